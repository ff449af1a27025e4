"""Every method has a page, and the pages say what the code says."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fedgkd_pl
import pytest
from fedgkd_pl import build
from fedgkd_pl.experiments import pages
from fedgkd_pl.experiments.pages import BLOCK, KEPT, SECTIONS, generate, kept
from fedgkd_pl.experiments.programs import Page, all_pages, as_python
from fedgkd_pl.experiments.results import BLOCK as RESULTS
from fedgkd_pl.runs.described import describe
from fedgkd_pl.settings.signatures import Argument, class_value, own_arguments

from tests.conftest import REPO
from tests.support.runs import of_families

FOLDER = REPO / "docs" / "methods"
PAGES = {page.stem: page for page in all_pages()}
METRICS = (REPO / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
STATISTICS = re.compile(r"_(mean|std|p10|p90)$")


def text_of(page: Page) -> str:
    return (FOLDER / f"{page.stem}.md").read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    """What stands below a heading, up to the next one."""
    return re.split(r"^## .*\n", text.partition(f"\n## {title}\n")[2], flags=re.MULTILINE)[0]


def common() -> str:
    """The rows of the reference that hold of every method, without the names of statistics."""
    rows = [line for line in METRICS.splitlines() if line.startswith("| `")]
    split = (re.split(r"(?<!\\)\|", row)[1:-1] for row in rows)
    whose = ("all", "all, where there are classes", "every run")
    every = [cells[0] for cells in split if len(cells) == 2 or cells[2].strip() in whose]
    return "".join(every).replace("_<statistic>", "")


def test_every_method_has_a_page_and_every_page_a_method() -> None:
    assert len(PAGES) >= 23
    configs = {file.stem for file in (REPO / "configs" / "methods").glob("*.yaml")}
    assert set(PAGES) == configs
    assert {file.stem for file in FOLDER.glob("*.md")} == {*configs, "index"}


def test_every_block_is_what_make_pages_writes() -> None:
    files = generate(REPO)
    assert len(files) == len(PAGES) + 1
    different = [file.name for file, text in files.items() if file.read_text("utf-8") != text]
    assert not different, f"{different}: make pages"


@pytest.mark.parametrize("stem", PAGES)
def test_a_page_has_the_skeleton(stem: str) -> None:
    page, text = PAGES[stem], text_of(PAGES[stem])
    assert text.startswith(f"# {page.info.title}\n\n<!-- code: head -->\n")
    assert re.findall(r"^## (.*)", text, re.MULTILINE) == list(SECTIONS)
    for title, block in SECTIONS.items():
        own = BLOCK.sub("", section(text, title))
        assert f"<!-- code: {block} -->" in section(text, title) or not block, title
        assert own.strip() or title in ("Settings", "Run it"), f"{title} has no words"
    assert len(re.findall(r"\.(?:\s|$)", section(text, "When to use it"))) == 1, "one sentence"
    assert RESULTS.search(section(text, "Results")), "no table of our results"
    cells = kept(text)
    assert cells is not None and len(cells) == 4 and all(cells)


@pytest.mark.parametrize("stem", PAGES)
def test_every_metric_of_clients_is_on_the_page(stem: str) -> None:
    page = PAGES[stem]
    declared = getattr(fedgkd_pl, page.info.name).client_metrics
    table = section(text_of(page), "Metrics")
    assert declared and all(f"`client/{name}`" in table for name in declared), declared
    assert set(re.findall(r"`client/(\w+)`", table)) == set(declared), "one that nobody reports"


@pytest.mark.parametrize("stem", PAGES)
def test_the_equation_is_that_of_the_code(stem: str) -> None:
    """Line by line: a docstring of the method's module, or of what it builds on, has it."""
    page = PAGES[stem]
    names = [page.info.module, "fedgkd_pl.federation.optimizers", "fedgkd_pl.methods.fedgkd"]
    files = [REPO.joinpath(*name.split(".")).with_suffix(".py") for name in names]
    known = {line.strip() for file in files for line in file.read_text("utf-8").splitlines()}
    blocks = re.findall(r"```\n(.*?)```", section(text_of(page), "The equation"), re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    assert lines and not [line for line in lines if line not in known]


def defined() -> Iterator[tuple[str, set[str], list[str]]]:
    """Classes with the functions of their body and their bases; functions alone with neither."""
    for file in (REPO / "fedgkd_pl").rglob("*.py"):
        for node in ast.parse(file.read_bytes()).body:
            if isinstance(node, ast.ClassDef):
                body = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
                yield node.name, body, [ast.unparse(base) for base in node.bases]
            elif isinstance(node, ast.FunctionDef):
                yield f"{node.name}()", set(), []


def test_functions_and_tests_that_pages_name_exist() -> None:
    known = {name: (body, bases) for name, body, bases in defined()}

    def has(name: str, function: str) -> bool:
        body, bases = known.get(name, (set(), []))
        return function in body or any(has(base, function) for base in bases)

    tests = "".join(file.read_text("utf-8") for file in (REPO / "tests").rglob("test_*.py"))
    for page in PAGES.values():
        lines = section(text_of(page), "The algorithm, line by line")
        named = re.findall(r"`([A-Z]\w+)\.(\w+)`", lines)
        assert named or "line by line](" in lines, page.stem
        assert not [f"{cls}.{name}" for cls, name in named if not has(cls, name)], page.stem
        alone = re.findall(r"`(\w+\(\))`", lines)
        assert not [name for name in alone if name not in known], page.stem
        for name in re.findall(r"`(test_\w+)`", text_of(page)):
            assert f"def {name}(" in tests, (page.stem, name)
    assert has("FedYogi", "broadcast") and not has("FedGKD", "broadcasts")


@pytest.mark.parametrize("name", [*PAGES, "index"])
def test_links_and_anchors_are_there(name: str) -> None:
    file = FOLDER / f"{name}.md"
    text = re.sub(r"```.*?```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        if target.startswith("http"):
            continue
        other = (file.parent / target) if target else file
        assert other.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)", other.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in slugs, f"{target}#{anchor}"


def test_a_page_is_begun_for_a_method_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / pages.PLACE
    folder.mkdir(parents=True)
    (folder / "index.md").write_text("# M\n\n<!-- code: methods -->\nformer\n<!-- end -->\nafter\n")
    for page in PAGES.values():
        if page.stem != "fedprox":
            (folder / f"{page.stem}.md").write_text(text_of(page), encoding="utf-8")
    assert pages.main(tmp_path) == 0
    begun = (folder / "fedprox.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)", begun, re.MULTILINE) == list(SECTIONS)
    tuned = "`0.001` on cifar100, tiny_imagenet, ag_news, sst5"
    assert f"| `mu` | `0.01` | `0.01`; {tuned} | μ, the weight" in begun
    assert KEPT in begun and "68.79 ± 1.10 at α=0.1" in begun and "FedProx(" in begun
    index = (folder / "index.md").read_text(encoding="utf-8")
    assert "| [FedProx](fedprox.md) | Li et al., MLSys 2020 | a proximal term keeps" in index
    assert index.endswith("<!-- end -->\nafter\n") and "former" not in index
    assert "fedprox.md" in capsys.readouterr().out
    assert pages.main(tmp_path) == 0 and not capsys.readouterr().out


def test_arguments_are_read_from_the_source() -> None:
    plus, rest = own_arguments("fedgkd_pl.methods.fedgkd_plus.FedGKDPlus")
    assert plus == {} and rest == "FedGKD"
    yogi, rest = own_arguments("fedgkd_pl.methods.fedopt.FedYogi")  # FedAdam has the constructor
    assert list(yogi) == ["server_lr", "server_betas", "server_tau"] and rest == "FedAvg"
    assert own_arguments("fedgkd_pl.methods.fedavg.FedAvg")[1] == ""
    assert class_value("fedgkd_pl.methods.fedaux.FedAUX", "tasks") == ("classes",)
    assert class_value("fedgkd_pl.methods.fedprox.FedProx", "tasks") is None  # a name, in the base
    assert class_value("fedgkd_pl.methods.fedprox.FedProx", "nothing") is None
    made = [pages._default(Argument("", ast.parse(text).body[0].value)) for text in DEFAULTS]  # type: ignore[attr-defined]
    assert made == [f"`{shown}`" for shown in DEFAULTS.values()]


def test_objects_of_a_config_in_python() -> None:
    adam = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.1, "betas": [0.9, 0.99]}}
    other = {"class_path": "OtherData", "init_args": {"data": {"class_path": "fedgkd_pl.CIFAR100"}}}
    assert as_python(adam) == "partial(Adam, lr=0.1, betas=[0.9, 0.99])"
    assert as_python(other) == "OtherData(data=CIFAR100())"
    assert [as_python(value) for value in (None, 1e-5, "a", True)] == [
        "None",
        "1e-05",
        '"a"',
        "True",
    ]


DEFAULTS = {
    "None": "null",
    "True": "true",
    "1e-3": "0.001",
    "10_000": "10000",
    "(0.9, 0.99)": "[0.9, 0.99]",
    "lambda params: torch.optim.SGD(params, lr=0.05)": "SGD(lr=0.05)",
    "CrossEntropy()": "CrossEntropy()",
}


@pytest.mark.parametrize("stem", of_families(PAGES))
def test_the_python_of_a_page_is_its_config_and_logs_what_it_says(
    stem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = PAGES[stem]
    (block,) = re.findall(r"```python\n(.*?)```", text_of(page), re.DOTALL)
    quiet = "logger=False, enable_checkpointing=False, enable_progress_bar=False"
    assert "max_epochs=30" in block
    session: dict[str, Any] = {"__name__": stem}
    exec(compile(block.replace("max_epochs=30", f"max_epochs=2, {quiet}"), stem, "exec"), session)

    theirs = build(f"digits/{stem}")
    for ours, shipped in (session["model"], theirs.model), (session["data"], theirs.data):
        assert describe(ours) == describe(shipped)
    known = text_of(page) + common()
    for name in session["model"].report:
        plain = re.sub(r"class_acc/\d+", "class_acc/<c>", STATISTICS.sub("", name))
        plain = re.sub(r"teacher_\d+", "teacher_<m>", plain)
        assert f"`{plain}`" in known, name
