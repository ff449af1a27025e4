"""Study files: which runs make a table.

A study names base configs, axes (methods among them) and seeds; a cell is one run, which takes one
label of each axis and a seed.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from fedgkd_pl.config.request import methods, resolve
from fedgkd_pl.errors import require
from fedgkd_pl.storage.files import read_yaml

Settings = Mapping[str, Any]  # dotted keys, as `fedgkd-pl fit` takes them; `config` names files
MEASURE = re.compile(
    r"(average_)?(best|final|last10|at_best_val|round[1-9]\d{,8})|task_(acc|forgetting|transfer)"
)
SETTING = re.compile(r"[A-Za-z_]\w*(\.\w+)*\+?")
# Flags that only the command line may give: they import code, choose folders or resume a run.
# Results from a Ray cluster (ray_address) are pickles.
COMMANDS = "ckpt_path debug help import name output_dir print_config resume version".split()
MEASURES = "best, final, last10, at_best_val or round<N>, also after average_; task_acc, ..."


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    labels: dict[str, str]  # by axis
    seed: int
    words: tuple[str, ...]  # the flags of ``fedgkd-pl fit`` but for the seed

    @property
    def argv(self) -> list[str]:
        """The flags of ``fedgkd-pl fit``."""
        return [*self.words, f"--seed_everything={self.seed}"]

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
    """A table's runs, and how they are laid out in it; jsonargparse reads it from a study file.

    Attributes:
        axes: for each, labels and the settings that each stands for. In a file, the axis
            ``method`` may also be ``all`` or a list of titles, each standing for its config.
        rows: the axes, or ``measure``, that are the table's rows; ``columns`` likewise. Where
            neither names ``measure``, each measure has a table.
    """

    name: str
    axes: dict  # type: ignore[type-arg]  # plain, so that jsonargparse leaves settings alone
    config: list[str] | str = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: [0])
    set: dict = field(default_factory=dict)  # type: ignore[type-arg]
    special: list[dict] = field(default_factory=list)  # type: ignore[type-arg]
    paper: str = ""
    measures: list[str] = field(default_factory=lambda: ["best", "final", "last10"])
    rows: list[str] = field(default_factory=list)  # in a file by default every axis but ``method``
    columns: list[str] = field(default_factory=lambda: ["method"])
    compare: str = "method"  # the axis over which the best is marked
    title: str = ""  # in a file by default its first line, up to a semicolon

    def cells(self, extra: Sequence[str] = ()) -> list[Cell]:
        """Every run, seed by seed, so that a whole table is there soon; ``extra`` flags win."""
        cells = []
        for seed in self.seeds:
            for labels in product(*self.axes.values()):
                chosen = dict(zip(self.axes, labels, strict=True))
                parts = [{"config": self.config}, self.set]
                parts += [self.axes[axis][label] for axis, label in chosen.items()]
                parts += [s["set"] for s in self.special if s["where"].items() <= chosen.items()]
                cells.append(Cell(chosen, seed, (*_words(parts), *extra)))
        return cells

    def part(self, only: Sequence[str]) -> "Study":
        """The same study with some labels, ``axis=label,label`` or ``seed=0,1``."""
        parts: dict[str, Any] = {**self.axes, "seed": {str(seed): seed for seed in self.seeds}}
        for text in only:
            axis, _, rest = text.partition("=")
            known, wanted = parts.get(axis, {}), [label.strip() for label in rest.split(",")]
            reason = f"must be AXIS=LABEL,... of {', '.join(known or parts)}"
            require({*wanted} <= {*known}, "only", reason, text)
            parts[axis] = {label: value for label, value in known.items() if label in wanted}
        return replace(self, seeds=list(parts.pop("seed").values()), axes=parts)


def read_study(path: str) -> Study:
    """A study file, checked."""
    file = resolve(path, "study")[0]
    content = read_yaml(file)
    is_config = "axes" not in content and {"model", "data"} & content.keys()
    require(not is_config, "study", "is a config: fedgkd-pl fit --config runs it", path)
    first = Path(file).read_text(encoding="utf-8").partition("\n")[0]
    title = first.lstrip("# ").partition(";")[0] if first.startswith("#") else ""
    return make_study({"name": Path(file).stem, "title": title} | content)


def make_study(content: Mapping[str, Any]) -> Study:
    """The study of a mapping with the keys of a study file, checked; it needs a ``name``."""
    from fedgkd_pl.config.messages import argument_error
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(exit_on_error=False, default_env=False)
    parser.add_class_arguments(Study)
    try:
        study = Study(**parser.parse_object(dict(content)).as_dict())
    except ArgumentError as error:
        raise argument_error(str(error)) from error
    axes = {str(axis): _labels(str(axis), given) for axis, given in study.axes.items()}
    special = [_special(one, axes) for one in study.special]
    rows = study.rows if "rows" in content else [axis for axis in axes if axis != "method"]
    study = replace(study, axes=axes, set=_settings("set", study.set), special=special, rows=rows)
    _check(study)
    return study


def _check(study: Study) -> None:
    is_plain = re.fullmatch(r"\w[\w.+-]*", study.name) is not None
    require(is_plain, "name", "must be a plain word: it names a folder", study.name)
    fits = len(study.axes) > 0 and not {"measure", "seed"} & study.axes.keys()
    require(fits, "axes", "must be at least one, and not be named measure or seed")
    laid_out = sorted([*study.rows, *study.columns])
    known = sorted({*study.axes} | {"measure"} & {*laid_out})
    require(laid_out == known, "rows", f"and columns must name each of {', '.join(known)} once")
    require(study.compare in study.axes, "compare", "must name an axis", study.compare)
    fits = len({*study.seeds}) == len(study.seeds) > 0 and min(study.seeds) >= 0
    require(fits, "seeds", "must be different whole numbers, at least one", study.seeds)
    fits = len(study.measures) > 0 and all(map(MEASURE.fullmatch, study.measures))
    require(fits, "measures", f"must be of {MEASURES}", study.measures)
    for name, times in Counter(cell.name for cell in study.cells()).items():
        reason = "labels must make names of folders, different and not long"
        require(times == 1 and len(name) <= 200, "axes", reason, name)


def _words(parts: Sequence[Settings]) -> list[str]:
    """Flags: configs first, so that what is set wins over them."""
    configs, flags = list[str](), list[str]()
    for key, value in (item for part in parts for item in part.items()):
        if key == "config":
            names = [value] if isinstance(value, str) else value
            configs += [f"--config={name}" for name in names]
        else:
            flags.append(f"--{key}={value if isinstance(value, str) else json.dumps(value)}")
    return [*configs, *flags]


def _labels(axis: str, given: Any) -> dict[str, Settings]:
    """The labels of an axis; methods may be named only: ``all``, or a list of titles."""
    key = f"axes.{axis}"
    if axis == "method" and not isinstance(given, dict):
        known = methods()
        given = list(known) if given == "all" else given
        fits = isinstance(given, list) and {*map(str, given)} <= known.keys()
        require(fits, key, f"must be all, or some of {', '.join(known)}", given)
        given = {title: {"config": known[title]} for title in given}
    require(isinstance(given, dict) and len(given) > 0, key, "must have at least one label", given)
    return {str(label): _settings(f"{key}.{label}", value) for label, value in given.items()}


def _special(one: Mapping[str, Any], axes: Mapping[str, Mapping[str, Settings]]) -> dict[str, Any]:
    fits = one.keys() == {"where", "set"} and isinstance(one["where"], dict)
    require(fits, "special", "each needs where, labels by axis, and set", one)
    where = {str(axis): str(label) for axis, label in one["where"].items()}
    fits = all(label in axes.get(axis, {}) for axis, label in where.items())
    require(fits, "special.where", "must have labels of the axes", where)
    return {"where": where, "set": _settings("special.set", one["set"])}


def _settings(where: str, settings: Any) -> dict[str, Any]:
    """Settings that cannot be taken for anything else when they become flags."""
    require(isinstance(settings, dict), where, "must be a mapping, lines of key: value", settings)
    for key, value in settings.items():
        words = str(key).rstrip("+").split(".")
        is_flag = words[0] in COMMANDS or words[-1] in ("help", "fast_dev_run")
        fits = SETTING.fullmatch(str(key)) and not is_flag and "ray_address" not in f"{key} {value}"
        require(bool(fits), where, "a study cannot give this, which is no setting", repr(key))
    return dict(settings)
