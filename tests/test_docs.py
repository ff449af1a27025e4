"""The site's pages: what they link to exists, and they name what the code has, all of it."""

import ast
import csv
import inspect
import re
import shlex
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import fedgkd_pl
import pytest
import yaml
from fedgkd_pl.cli.main import COMMANDS
from fedgkd_pl.methods import discover
from fedgkd_pl.processes.signals import Stopped
from fedgkd_pl.settings.suggest import FLAGS, TOP
from lightning.pytorch import Callback

from tests.conftest import REPO
from tools import reference
from tools.classes import PAGES as CLASSES
from tools.classes import Group, members, public
from tools.signatures import settings

PACKAGE = REPO / "fedgkd_pl"
DOCS = sorted((REPO / "docs").rglob("*.md"))
PAGES = [*DOCS, *REPO.glob("*.md"), *REPO.glob("results/*.md"), *REPO.glob("benchmarks/*.md")]
FENCE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
METRICS = (REPO / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
LOGGED = re.compile(r"[a-z*]+/[a-z0-9_/*]+")


def slug(heading: str) -> str:
    """The anchor that mkdocs, and in these words also GitHub, makes of a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    text = text.encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def anchors(page: Path) -> set[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_links_pictures_and_anchors_are_there(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target, anchor in re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)", text):
        if target.startswith(("http:", "https:")):
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), f"{target}#{anchor}"


def test_every_picture_is_shown() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for file in (REPO / "docs" / "images").iterdir():
        assert f"images/{file.name})" in text, file.name


def test_every_page_is_in_the_navigation() -> None:
    def leaves(part: Any) -> Iterator[str]:
        if isinstance(part, str):
            yield part
        for each in part.values() if isinstance(part, dict) else part:
            yield from leaves(each) if not isinstance(part, str) else ()

    nav = set(leaves(yaml.safe_load((REPO / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    pages = {file.relative_to(REPO / "docs").as_posix() for file in DOCS}
    assert {page for page in pages if not page.startswith("methods/")} <= nav
    assert {"methods/", "api/"} <= nav


def test_the_reference_is_what_make_reference_writes() -> None:
    pages = reference.generate()
    different = [n for n, text in pages.items() if (REPO / n).read_text(encoding="utf-8") != text]
    assert not different, f"{different}: make reference"
    written = {file.name for file in (REPO / reference.FOLDER).glob("*.md")}
    assert written == {Path(name).name for name in pages} | {"metrics.md"}


def taken(class_: type) -> dict[str, inspect.Parameter]:
    """What a constructor takes as Python sees it, following ``**kwargs`` to the classes above."""
    found: dict[str, inspect.Parameter] = {}
    for depth, owner in enumerate(class_.__mro__):
        if "__init__" not in vars(owner) or not owner.__module__.startswith("fedgkd_pl"):
            continue
        own = list(inspect.signature(vars(owner)["__init__"]).parameters.values())[1:]
        for each in own:
            required = each.default is inspect.Parameter.empty
            if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
                if not (required and found and depth):  # else the class below gives it
                    found.setdefault(each.name, each)
        if not any(each.kind is each.VAR_KEYWORD for each in own):
            break
    return found


GROUPS = [group for _, groups in CLASSES.values() for group in groups]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.title)
def test_every_setting_is_in_the_reference(group: Group) -> None:
    for name, path in members(group).items():
        known = {one.name: one for one in settings(path)}
        python = taken(getattr(fedgkd_pl, name))
        assert set(known) == set(python), name
        for key, one in known.items():
            assert one.text or key == "params", f"{name}.{key} has no documentation"
            required = python[key].default is inspect.Parameter.empty
            assert required == (one.default is None), f"{name}.{key}"


def test_every_class_of_a_config_is_in_the_reference() -> None:
    shown = {name for group in GROUPS for name in members(group)}
    classes = {name: getattr(fedgkd_pl, name) for name in public()}
    nameable = {
        name
        for name, value in classes.items()
        if inspect.isclass(value) and not inspect.isabstract(value) and taken(value)
    }
    parts = {"FederatedServer", "FederatedClient", "FrozenNet"}  # what methods are made of
    data = {"ClientUpdate", "Message", "Spec", "Examples", "Splits", "Run", "StudyResult"}
    data |= {"Experiment", "Predictions", "Trained"}  # what is handed around
    assert nameable - {"FedAvgClient", "FedGKDClient"} - parts - data <= shown
    callbacks = {n for n, c in classes.items() if inspect.isclass(c) and issubclass(c, Callback)}
    assert callbacks - {"FederatedCallback"} == set(members(GROUPS[-1]))


def test_every_key_at_the_top_of_a_config_is_in_the_reference() -> None:
    flags = {"config", "print_config", "return_predictions", "verbose"}  # of commands, not keys
    keys = {*TOP, *FLAGS} - {flag for flag in FLAGS if flag.startswith("no_")} - flags
    assert set(reference.TOP) == keys


def test_every_command_and_exit_code_is_in_the_reference() -> None:
    text = (REPO / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert all(f"\n## {name}\n" in text for name in COMMANDS)
    source = ast.parse((PACKAGE / "processes" / "command.py").read_text(encoding="utf-8"))
    explained = next(n for n in ast.walk(source) if getattr(n, "name", "") == "_explained")
    returns = [n.value.elts[1] for n in ast.walk(explained) if isinstance(n, ast.Return)]  # type: ignore[union-attr]
    codes = {"0", *(ast.unparse(code) for code in returns)}
    codes |= {str(Stopped(number).exit_code) for number in (1, 2, 15)}
    assert set(reference.EXIT_CODES) == codes
    (table,) = re.findall(
        r"\| exit code \| meaning \|\n(.*?)\n\n",
        (REPO / "docs" / "reliability.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    assert (
        set(re.findall(r"\d+", " ".join(row.split("|")[1] for row in table.split("\n")))) == codes
    )


def test_the_version_is_the_same_everywhere() -> None:
    version = fedgkd_pl.__version__
    cited = yaml.safe_load((REPO / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == version
    changes = (REPO / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## [{version}] - {cited['date-released']}\n" in changes
    assert f'version="{version}"' in (REPO / "docs" / "flower.md").read_text(encoding="utf-8")


def strings(file: Path) -> Iterator[str]:
    """Every text of a module; what an f-string fills in is an asterisk."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    within = {
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                part.value if isinstance(part, ast.Constant) else "*"  # type: ignore[misc]
                for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in within:
            yield node.value


def metrics_of_the_code() -> set[str]:
    """What is logged by name: all texts that look like it, where a run's values are made."""
    folders = ("callbacks", "federation", "methods")
    files = [file for folder in folders for file in (PACKAGE / folder).glob("*.py")]
    found = {text for file in files for text in strings(file) if LOGGED.fullmatch(text)}
    other = {"test/confusion", "*/text_summary"}  # a picture, a text
    other |= {"*/*", "*/acc", "class_acc/*", "client/*", "client/loss_mean"}  # spelt out below
    reported = {
        name for method in discover() for name in getattr(fedgkd_pl, method).client_metrics or ()
    }
    clients = {f"client/{name}_*" for name in reported}
    scores = {"acc", "loss", "f1", "mae", "rmse", "class_acc/*"}
    splits = {f"{split}/{name}" for split in ("val", "test") for name in scores}
    made = {"server/steps", "server/loss", "pretraining/steps", "pretraining/loss"}
    made |= {f"average/{part}{name}" for part in ("", "val_") for name in ("acc", "loss")}
    spread = ("acc_mean", "acc_std", "acc_min", "acc_worst10", "loss_mean")
    made |= {f"clients/{kind}_{name}" for kind in ("global", "local") for name in spread}
    training = ("steps", "loss", "best_step")
    made |= {"server/best_step", *(f"server/*/{name}" for name in training)}
    made |= {f"task/{name}{of}" for name in ("acc", "forgetting", "transfer") for of in ("", "/*")}
    made |= {"nets/*_val_acc", "nets/*_test_acc"}
    patterns = {"*/steps", "*/loss", "average/**", "clients/*_*", "client/*_*"}  # spelt out above
    patterns |= {"*/best_step", "server/*", "task/*", "task/*/*"}
    assert patterns <= found
    return (found - other - patterns) | clients | splits | made


def metrics_of_the_page() -> set[str]:
    names = {
        re.sub(r"<\w+>", "*", name)
        for row in re.findall(r"^\| (`.*?) \|", METRICS, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", row)
    }
    return names - {"val/*", "test/*", "client/*_*"}  # metrics of the user's


def test_every_metric_is_on_the_page_and_no_other() -> None:
    code, page = metrics_of_the_code(), metrics_of_the_page()
    # charts ask for a beginning, such as local/acc of local/acc_mean
    code = {name for name in code if not any(other.startswith(f"{name}_") for other in page)}
    assert code == page


# What a callback of benchmarks/<study>.py logs begins so.
OF_BENCHMARKS = {"one_round": "local/acc_client", "toy": "local/acc_unseen"}


def test_the_page_has_every_metric_of_the_kept_results() -> None:
    page = metrics_of_the_page()
    for file in REPO.glob("results/*/rounds.csv"):
        with file.open(newline="") as opened:
            columns = next(csv.reader(opened))[2:]
        own = OF_BENCHMARKS.get(file.parent.name, "nobody's")
        for name in columns:
            known = (fnmatchcase(name, pattern) for pattern in page)
            assert name.startswith(own) or any(known), name


def test_messages_of_troubleshooting_are_those_of_the_code() -> None:
    page = (REPO / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    texts = {" ".join(text.split()) for file in PACKAGE.rglob("*.py") for text in strings(file)}
    whole = "\n".join(texts)
    messages = [
        message
        for heading in re.findall(r"^### (.*)$", page, re.MULTILINE)
        for message in re.findall(r"`([^`]+)`", heading)
        if " " in message
    ]
    assert len(messages) >= 25
    for message in messages:
        parts = [part.strip(" :;,()") for part in message.split("…")]
        for part in filter(None, parts):
            assert part in whole, f"{part} of {message}"


def commands() -> list[str]:
    """Every ``fedgkd-pl`` line of a page's shell blocks, once; of methods one page's."""
    found: dict[str, None] = {}
    for page in PAGES:
        if page.parent.name == "methods" and page.stem != "fedgkd":
            continue  # their commands are written by make pages, and every config is tested
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if match := re.match(r"(?:\S*/)?fedgkd-pl ([^|#]*)", line):
                    found[" ".join(match[1].split())] = None
    return list(found)


# What a reader has by then; tests/test_readme.py and tests/cli/test_new.py run these commands.
THEIRS = re.compile(r"my_project|anchored|--resume")


def cases() -> Iterator[Any]:
    """The commands, each where what it needs is installed: Flower is for ``make test-engines``."""
    for command in commands():
        if not THEIRS.search(command):
            engine = command.startswith("flower ")
            yield pytest.param(command, marks=pytest.mark.engines if engine else pytest.mark.long)


@pytest.mark.parametrize("command", list(cases()))
def test_every_command_of_the_pages_is_understood(
    command: str, run: Callable[..., tuple[int, str, str]]
) -> None:
    """Those that would train print their settings; what needs a run may say that it is missing."""
    name, *words = shlex.split(command)
    extra = {"fit": ["--print_config"], "compare": ["--dry_run"]}
    if name == "partition" or (name == "compare" and "digits" not in command):
        words += ["--data.download", "false"]
    if name == "compare" and "--only" not in words:
        words += ["--only", "seed=0"]
    code, _, err = run(name, *words, *extra.get(name, []))
    absent = r"error: (\S+: )?(runs?|data\.data_dir|input|model\.engine): "
    assert code == 0 or (name != "fit" and re.match(absent, err)), err
