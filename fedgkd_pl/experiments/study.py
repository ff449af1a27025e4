"""Study files: which runs make a table.

A study names base configs, axes (methods among them) and seeds; a cell is one run, which takes one
label of each axis and a seed.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.settings.files import methods, resolve
from fedgkd_pl.storage.reading import printable

Settings = Mapping[str, Any]  # dotted keys, as `fedgkd-pl fit` takes them; `config` names files
MEASURE = re.compile(
    r"(average_)?(best|final|last10|at_best_val|round[1-9]\d{,8})|task_(acc|forgetting|transfer)"
)
SETTING = re.compile(r"[A-Za-z_]\w*(\.\w+)*\+?")
# Flags of `fedgkd-pl fit` that are no settings: a study says what is run, not what is imported,
# where it is kept or how it goes on.
COMMANDS = "ckpt_path debug help import name output_dir print_config resume version".split()
ADDRESSES = ("ray_address",)  # results from there are pickles
MOST_CELLS = 10_000
MEASURES = "best, final, last10, at_best_val or round<N>"
AVERAGES = f"after average_: {MEASURES}"


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    labels: dict[str, str]  # by axis
    seed: int
    words: tuple[str, ...]  # the flags of ``fedgkd-pl fit`` but for the seed

    @property
    def name(self) -> str:
        """Its folder: labels that are numbers say of what."""
        parts = [
            (axis if re.match(r"[\d.]", label) else "") + label
            for axis, label in self.labels.items()
        ]
        return "-".join(re.sub(r"[^\w.+-]", "_", part) for part in [*parts, f"seed{self.seed}"])


@dataclass(frozen=True)
class Study:
    """A table's runs, and how they are laid out in it.

    Attributes:
        axes: for each, labels and the settings that each stands for. In a file, the axis
            ``method`` may also be ``all`` or a list of titles, each standing for its config.
        rows: the axes, or ``measure``, that are the table's rows; ``columns`` likewise. Where
            neither names ``measure``, each measure has a table.
    """

    name: str
    axes: Mapping[str, Mapping[str, Settings]]
    config: Sequence[str] = ()
    seeds: Sequence[int] = (0,)
    set: Settings = field(default_factory=dict)
    special: Sequence[Mapping[str, Settings]] = ()  # ``set`` of the cells ``where``; they win
    paper: str = ""
    measures: Sequence[str] = ("best", "final", "last10")
    rows: Sequence[str] = ()
    columns: Sequence[str] = ("method",)
    compare: str = "method"  # the axis over which the best is marked
    title: str = ""  # in a file by default its first line, up to a semicolon

    def cells(self, extra: Sequence[str] = ()) -> list[Cell]:
        """Every run, seed by seed, so that a whole table is there soon; ``extra`` flags win."""
        cells = []
        for seed in self.seeds:
            for labels in product(*self.axes.values()):
                chosen = dict(zip(self.axes, labels, strict=True))
                words = _words([{"config": self.config}, self.set, *self._settings(chosen)])
                cells.append(Cell(chosen, seed, (*words, *extra)))
        return cells

    def part(self, only: Sequence[str]) -> "Study":
        """The same study with some labels, ``axis=label,label`` or ``seed=0,1``, each axis once."""
        axes, seeds = dict(self.axes), list(self.seeds)
        for text in only:
            axis, _, rest = text.partition("=")
            known = list(map(str, self.seeds)) if axis == "seed" else list(self.axes.get(axis, {}))
            names = ", ".join([*self.axes, "seed"])
            require(len(known) > 0, "only", f"must be AXIS=LABEL,... with an axis of {names}", text)
            wanted = _split(rest, known)
            for label in wanted:
                require(label in known, "only", f"{axis} is one of {', '.join(known)}", label)
            if axis == "seed":
                seeds = [seed for seed in self.seeds if str(seed) in wanted]
            else:
                axes[axis] = {label: s for label, s in self.axes[axis].items() if label in wanted}
        return replace(self, axes=axes, seeds=seeds)

    def _settings(self, labels: Mapping[str, str]) -> Iterator[Settings]:
        for axis, label in labels.items():
            yield self.axes[axis][label]
        for one in self.special:
            if all(labels[axis] == label for axis, label in one["where"].items()):
                yield one["set"]


def read_study(path: str) -> Study:
    """A study file, checked."""
    from fedgkd_pl.settings import strict_yaml

    file, *others = resolve(path, "study")
    require(not others, "study", "is a protocol with a method", path)
    content = strict_yaml.read(file)
    is_config = "axes" not in content and {"model", "data"} & content.keys()
    require(not is_config, "study", "is a config: fedgkd-pl fit --config runs it", path)
    return make_study({"name": Path(file).stem, "title": _header(file)} | content)


def make_study(content: Mapping[str, Any]) -> Study:
    """The study of a mapping with the keys of a study file, checked; it needs a ``name``."""
    known = [item.name for item in fields(Study)]
    for key in content:
        require(key in known, str(key), f"a study has no such key: {', '.join(known)}")
    require("name" in content, "name", "a study needs one: its folder is called so")
    require("axes" in content, "axes", "a study needs at least one", content["name"])
    axes = {
        str(axis): {str(label): _settings(f"axes.{axis}.{label}", s) for label, s in labels.items()}
        for axis, given in _mapping("axes", content["axes"]).items()
        if (labels := _labels(str(axis), given))
    }
    require(len(axes) == len(content["axes"]) > 0, "axes", "each needs at least one label")
    name = content["name"]
    is_plain = isinstance(name, str) and re.fullmatch(r"\w[\w.+-]*", name) is not None
    require(is_plain, "name", "must be a plain word: it names a folder", name)
    config = content.get("config", [])
    study = Study(
        name=name,
        axes=axes,
        config=[config] if isinstance(config, str) else _list("config", config, str),
        seeds=_list("seeds", content.get("seeds", [0]), int),
        set=_settings("set", content.get("set", {})),
        special=[_special(one, axes) for one in _list("special", content.get("special", []), dict)],
        paper=_text("paper", content.get("paper", "")),
        measures=_list("measures", content.get("measures", list(Study.measures)), str),
        rows=_list("rows", content.get("rows", _other_axes(axes)), str),
        columns=_list("columns", content.get("columns", ["method"]), str),
        compare=_text("compare", content.get("compare", "method")),
        title=_text("title", content.get("title", "")),
    )
    _check(study)
    return study


def _check(study: Study) -> None:
    laid_out = [*study.rows, *study.columns]
    for axis in study.axes:
        require(axis not in ("measure", "seed"), "axes", "must have another name", axis)
        require(laid_out.count(axis) == 1, "rows", f"or columns must name {axis}, once", laid_out)
    for name in laid_out:
        require(name in (*study.axes, "measure"), "rows", f"or columns name no axis {name}")
        require(laid_out.count(name) == 1, "rows", f"and columns name {name} twice", laid_out)
    require(study.compare in study.axes, "compare", "must name an axis", study.compare)
    require(len(study.seeds) > 0, "seeds", "at least one is needed")
    require(len(set(study.seeds)) == len(study.seeds), "seeds", "one is given twice", study.seeds)
    for seed in study.seeds:
        require(0 <= seed < 2**32, "seeds", "must be from 0 to 4294967295", seed)
    check_measures("measures", study.measures)
    number = prod(map(len, study.axes.values())) * len(study.seeds)
    require(number <= MOST_CELLS, "axes", f"a study has at most {MOST_CELLS} cells", number)
    for name, times in Counter(cell.name for cell in study.cells()).items():
        require(len(name) <= 200, "axes", "labels make too long a name of a folder", name)
        require(times == 1, "axes", "two cells would share a folder", name)


def check_measures(key: str, measures: Sequence[str]) -> None:
    """Refuses what no run is measured by, and none at all."""
    require(len(measures) > 0, key, f"at least one is needed: {MEASURES}")
    for measure in measures:
        known = AVERAGES if measure.startswith("average") else MEASURES
        require(MEASURE.fullmatch(measure) is not None, key, known, measure)


def _split(text: str, known: Sequence[str]) -> list[str]:
    """The labels of a text with commas between them; a known label may have commas itself."""
    pieces, labels = text.split(","), list[str]()
    while pieces:
        joined = [",".join(pieces[:end]).strip() for end in range(len(pieces), 0, -1)]
        label = next((each for each in joined if each in known), joined[-1])
        labels.append(label)
        pieces = pieces[len(pieces) - joined.index(label) :]
    return labels


def _words(settings: Sequence[Settings]) -> tuple[str, ...]:
    """Flags: configs first, so that what is set wins over them."""
    configs: list[str] = []
    flags: list[str] = []
    for part in settings:
        for key, value in part.items():
            if key == "config":
                names = [value] if isinstance(value, str) else _list("config", value, str)
                configs += [word for name in names for word in ("--config", name)]
            else:
                flags += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    return (*configs, *flags)


def _special(one: Any, axes: Mapping[str, Mapping[str, Settings]]) -> Mapping[str, Settings]:
    require(set(one) == {"where", "set"}, "special", "each needs where and set", sorted(one))
    where = {k: str(v) for k, v in _mapping("special.where", one["where"]).items()}
    for axis, label in where.items():
        require(axis in axes, "special.where", "must name axes", axis)
        require(label in axes[axis], "special.where", f"{axis} has no such label", label)
    return {"where": where, "set": _settings("special.set", one["set"])}


def _settings(prefix: str, value: Any) -> dict[str, Any]:
    """Settings that cannot be taken for anything else when they become flags."""
    settings = _mapping(prefix, value)
    for key, item in settings.items():
        where = f"{prefix}.{printable(key, 80)}"
        fits = isinstance(key, str) and SETTING.fullmatch(key) is not None
        require(fits, where, "must be a setting's name, in words and dots")
        words = key.rstrip("+").split(".")
        reason = "is not a setting: a study cannot give it, only the command line can"
        require(words[0] not in COMMANDS and words[-1] != "help", where, reason)
        require(key != "trainer.fast_dev_run", where, reason)
        require(not key.upper().startswith("FEDGKD_"), where, reason)  # a variable's name
        for name, text in _texts(item, words[-1]):
            require(name not in ADDRESSES, where, reason)
            flag = text.startswith("-") and re.match(r"-[\d.]", text) is None
            require(not flag, where, "a value must not begin like a flag", text)
    return settings


def _texts(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Every text in a value, with the name it has there."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, name)
    elif isinstance(value, str):
        yield name, value
        if name not in ADDRESSES:
            yield from ((each, "") for each in ADDRESSES if each in value)  # JSON in a text


def _labels(axis: str, given: Any) -> dict[Any, Any]:
    """An axis as it is written; methods may be named only: ``all``, or a list of titles."""
    if axis != "method" or isinstance(given, dict):
        return _mapping(f"axes.{axis}", given)
    known = methods()
    chosen = list(known) if given == "all" else _list("axes.method", given, str)
    for title in chosen:
        require(title in known, "axes.method", f"all, or some of {', '.join(known)}", title)
    return {title: {"config": known[title]} for title in chosen}


def _mapping(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SettingError(key, "must be a mapping, lines of key: value", value)
    return value


def _list(key: str, value: Any, cls: type) -> list[Any]:
    if not isinstance(value, list) or not all(type(item) is cls for item in value):
        raise SettingError(key, f"must be a list of {cls.__name__}", value)
    return value


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise SettingError(key, "must be a text", value)
    return value


def _other_axes(axes: Mapping[str, Any]) -> list[str]:
    return [axis for axis in axes if axis != "method"]


def _header(file: str) -> str:
    first = Path(file).read_text(encoding="utf-8").splitlines()[0]
    return first.lstrip("# ").split(";")[0] if first.startswith("#") else ""
