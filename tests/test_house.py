"""How package and tests are laid out: layers, sizes, public names, what the package depends on."""

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from inspect import isclass
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import fedgkd_pl
import pytest
from fedgkd_pl import ClassTasks, FederatedClient, SimCLR
from fedgkd_pl.config.safety import allowed, parts
from fedgkd_pl.methods import discover
from lightning.pytorch import Callback, LightningDataModule
from torch import nn

from tests.conftest import REPO, script

PACKAGE = REPO / "fedgkd_pl"
FILES = sorted(PACKAGE.rglob("*.py"))
LINES, TOKENS = 15_000, 151_000  # of code; a feature that adds some says what it gives
# Lowest first: a package imports from itself and from those before it.
LAYERS = (
    *("errors", "seeds", "storage", "processes", "models", "data", "federation", "engines"),
    *("methods", "plots", "runs", "callbacks", "config", "engines.flower", "experiments", "cli"),
)
ENTRIES = ("__init__", "__main__", "_torchvision", "flower")  # modules that belong to no layer
OTHERS = ("all", "dev", "docs")  # extras that bring nothing that the package imports by itself
# Where a distribution is not called like the module that it brings.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "typing_extensions": "typing-extensions",
    "yaml": "pyyaml",
}


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """The line and the module of every import, except those for type checkers."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    typing = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in node.body
    }
    for node in ast.walk(tree):
        if node in typing:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file}:{node.lineno} is relative"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def layer(module: str) -> str:
    """The layer of a module, with the package's own name before it; empty if it has none."""
    parts = module.split(".")[1:]
    name = ".".join(parts[: 2 if parts[:2] == ["engines", "flower"] else 1])
    return "" if name in ENTRIES else name


def test_every_package_imports_only_from_the_layers_below_it() -> None:
    upward = []
    for file in FILES:
        own = layer(".".join(file.relative_to(REPO).with_suffix("").parts))
        for line, module in imports(file) if own else ():
            if module.startswith("fedgkd_pl."):
                other = layer(module)
                if other in LAYERS and LAYERS.index(other) > LAYERS.index(own):
                    upward.append(f"{file.relative_to(REPO)}:{line} ({own}) imports {other}")
    assert not upward, "\n".join(upward)


def test_every_package_has_a_layer() -> None:
    folders = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    modules = {file.stem for file in PACKAGE.glob("*.py")}
    assert folders | modules == {*LAYERS, *ENTRIES} - {"engines.flower"} and len(modules) <= 6


def test_no_file_is_over_600_lines() -> None:
    lengths = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in FILES}
    long = [f"{file.relative_to(REPO)}: {n}" for file, n in lengths.items() if n > 600]
    assert not long, "\n".join(long)


def size(file: Path) -> tuple[int, int]:
    """Code lines (no docstring, comment or blank) and tokens of a file."""
    text = file.read_text(encoding="utf-8")
    documentation = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(body := getattr(node, "body", None), list)
        and body
        and isinstance(body[0], ast.Expr)
        and isinstance(getattr(body[0].value, "value", None), str)
        for line in range(body[0].lineno, (body[0].end_lineno or 0) + 1)
    }
    kinds = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    found = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in (*kinds, tokenize.ENDMARKER) and token.start[0] not in documentation
    ]
    lines = {line for token in found for line in range(token.start[0], token.end[0] + 1)}
    return len(lines), len(found)


def test_the_package_keeps_to_its_size() -> None:
    lines, tokens = (sum(numbers) for numbers in zip(*map(size, FILES), strict=True))
    assert lines <= LINES and tokens <= TOKENS, f"{lines} code lines, {tokens} tokens"


def test_a_class_has_at_most_three_bases_of_ours() -> None:
    """A part is a collaborator, not a base. A method may build on methods beside these."""
    for name in sorted(fedgkd_pl.__all__):
        mro = getattr(getattr(fedgkd_pl, name), "__mro__", ())
        homes = [base.__module__ for base in mro[1:]]
        ours = [home for home in homes if home.startswith("fedgkd_pl.")]
        own = [home for home in ours if not home.endswith(".recorded") and ".methods." not in home]
        assert len(own) <= 3, f"{name}: {own}"


def project() -> dict[str, Any]:
    text = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["project"]  # type: ignore[no-any-return]


def declared() -> set[str]:
    """What a user installs with the package and its extras: not the developers', nor the site's."""
    extras = project()["optional-dependencies"].items()
    lists = [project()["dependencies"], *(texts for name, texts in extras if name not in OTHERS)]
    return {distribution(text) for texts in lists for text in texts}


def distribution(text: str) -> str:
    return re.split(r"[^\w-]", text)[0].lower().replace("_", "-")


def test_the_dependencies_are_what_is_imported_and_are_pinned() -> None:
    modules = {module.split(".")[0] for file in FILES for _, module in imports(file)}
    modules -= {*sys.stdlib_module_names, "fedgkd_pl"}
    by_others = {"onnx", "onnxscript", "pyarrow", "jinja2"}  # by torch.onnx and pandas
    by_others |= {"tensorboard"}  # by torch
    assert {DISTRIBUTIONS.get(module, module) for module in modules} == declared() - by_others
    extras = project()["optional-dependencies"]
    users = ",".join(name for name in extras if name not in OTHERS)
    assert extras["all"] == [f"fedgkd-pl[{users}]"]
    lines = (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert declared() <= {distribution(line) for line in lines}


def test_public_names_are_those_of_the_stub_and_the_methods() -> None:
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
    listed = [n for node in stub.body if isinstance(node, ast.ImportFrom) for n in node.names]
    assert all(alias.asname == alias.name for alias in listed), "else mypy takes it for private"
    names = [alias.name for alias in listed]
    assert len(names) == len(set(names))
    assert set(fedgkd_pl.__all__) == {"__version__", *names, *discover()}
    assert {*fedgkd_pl.__all__} <= {*dir(fedgkd_pl)}
    for name in names:
        assert getattr(fedgkd_pl, name).__name__ == name
    with pytest.raises(AttributeError, match="FedGDK"):
        fedgkd_pl.FedGDK  # noqa: B018
    assert (PACKAGE / "py.typed").is_file()


def test_a_config_may_name_the_parts_of_an_experiment_and_nothing_else_of_ours() -> None:
    """The list is by name, so that no class need be imported; here it is by what they are."""
    kinds = (Callback, LightningDataModule, nn.Module, ClassTasks, SimCLR)
    kinds += tuple(getattr(fedgkd_pl, name) for name in ("Cohorts", "Engine", "LocalLoss"))
    kinds += tuple(getattr(fedgkd_pl, name) for name in ("Partition", "PublicData"))
    public = {name: getattr(fedgkd_pl, name) for name in fedgkd_pl.__all__}
    classes = {name: thing for name, thing in public.items() if isclass(thing)}
    ours = {name for name, thing in classes.items() if issubclass(thing, kinds)}
    assert parts().keys() == {n for n in ours if not issubclass(classes[n], FederatedClient)}
    for name in ("build", "read_checkpoint", "Message", "Session", "Examples", "FedAvgClient"):
        assert f"fedgkd_pl.{name}" not in allowed()
    for name in ("FedAvg", "FederatedServer", "Partition", "Engine", "MLP", "RunFiles"):
        assert f"fedgkd_pl.{name}" in allowed()


QUICKSTART = """
import runpy, sys
sys.argv = "fedgkd-pl fit --config quickstart.yaml --rounds 1 --quiet".split()
try:
    runpy.run_module("fedgkd_pl", run_name="__main__")
except SystemExit as done:
    assert done.code == 0
modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "fedgkd_pl"]
print("files", *{module.__file__ for module in modules})
"""


def test_a_run_is_few_files(tmp_path: Path) -> None:
    """Those with code that a fit of quickstart.yaml imports: what a newcomer reads."""
    done = script(QUICKSTART, tmp_path)
    assert done.returncode == 0, done.stderr
    files = [Path(name) for name in done.stdout.splitlines()[-1].split()[1:]]
    with_code = sorted(str(file) for file in files if size(file)[0])
    assert 20 < len(with_code) <= 55, "\n".join(with_code)


PUBLIC = """
import sys, fedgkd_pl
assert "torch" not in sys.modules and "MyMethod" in fedgkd_pl.__all__
print(fedgkd_pl.MyMethod.__module__, fedgkd_pl.__file__)
"""


def test_a_new_method_is_public_with_nothing_else_edited(tmp_path: Path) -> None:
    copytree(PACKAGE, tmp_path / "fedgkd_pl", ignore=ignore_patterns("__pycache__"))
    (tmp_path / "fedgkd_pl" / "methods" / "my_method.py").write_text(
        "from fedgkd_pl.methods.fedavg import FedAvg\n\n\nclass MyMethod(FedAvg):\n    pass\n"
    )
    done = script(PUBLIC, tmp_path)
    assert done.returncode == 0, done.stderr
    module, file = done.stdout.split()
    assert module == "fedgkd_pl.methods.my_method" and Path(file).is_relative_to(tmp_path)
