"""The pages: links lead somewhere, and what they name of the code is there."""

import ast
import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from unicodedata import normalize
from xml.etree import ElementTree

import fedgkd_pl
import pytest
import yaml
from fedgkd_pl.config.request import methods, resolve
from fedgkd_pl.methods import discover
from fedgkd_pl.methods.fedavg import FedAvg

from tests.conftest import REPO
from tests.support.runs import Run
from tools import equations
from tools.pages import SECTIONS, TRAVELS, generate, pages

DOCS = sorted((REPO / "docs").rglob("*.md"))
PAGES = [*DOCS, *REPO.glob("*.md"), *REPO.glob("results/*.md"), *REPO.glob("benchmarks/*.md")]
FENCE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
NOT_METRICS = {"test/confusion", "*/text_summary", "class/*"}  # a picture, a text, a name's end


def read(name: str) -> str:
    return (REPO / name).read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The anchors that mkdocs, and in these words also GitHub, makes of headings."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        text = re.sub(r"[^\w\s-]", "", text.encode("ascii", "ignore").decode())
        found.add(re.sub(r"[-\s]+", "-", text.strip().lower()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_links_pictures_and_anchors_are_there(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target, anchor in re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)", text):
        if target.startswith(("http:", "https:")):
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


def test_pictures_are_shown() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for file in (REPO / "docs" / "images").iterdir():
        assert f"images/{file.name})" in text, file.name


def test_the_version_is_the_same_everywhere() -> None:
    version, cited = fedgkd_pl.__version__, yaml.safe_load(read("CITATION.cff"))
    assert cited["version"] == version
    assert f"\n## [{version}] - {cited['date-released']}\n" in read("CHANGELOG.md")
    assert f'version="{version}"' in read("docs/flower.md")


def test_the_pages_stay_short() -> None:
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in DOCS}
    assert len(read("README.md").encode()) <= 8_000
    assert sum(words.values()) <= 32_000 and max(words.values()) <= 2_300


# -- methods -----------------------------------------------------------------------------------


def test_methods_are_found_as_python_sees_them() -> None:
    exported = [getattr(fedgkd_pl, name) for name in fedgkd_pl.__all__ if name[0].isupper()]
    classes = {c.__name__ for c in exported if isinstance(c, type) and issubclass(c, FedAvg)}
    found = discover()
    assert set(found) >= classes and len(classes) >= 25
    for name in classes:
        own, info = vars(getattr(fedgkd_pl, name)), found[name]
        assert (info.module, info.citation) == (own["__module__"], own.get("citation", ""))
        assert info.title in (own.get("title", name), name)
    for attribute in ("colour", "title"):
        assert len({getattr(info, attribute) for info in found.values()}) == len(found)


def test_the_tables_of_methods_are_what_make_pages_writes() -> None:
    files = generate(REPO)
    assert len(files) == len(pages()) + 2
    different = [file.name for file, text in files.items() if file.read_text("utf-8") != text]
    assert not different, f"{different}: make pages"
    papers = read("PAPERS.md")
    for title, config in methods().items():
        assert f"| [{title}](docs/methods/" in papers, title
        assert all(Path(file).is_file() for file in resolve(f"digits/{Path(config).name}"))


@pytest.mark.parametrize("stem", pages())
def test_the_page_of_a_method(stem: str) -> None:
    """All sections have words; every equation is one of a docstring's, line by line."""
    text = read(f"docs/methods/{stem}.md")
    parts = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    assert tuple(parts[1::2]) == SECTIONS and all(part.strip() for part in parts[2::2])
    for info, row in zip(pages()[stem], parts[4].partition(TRAVELS)[2].splitlines(), strict=False):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        assert cells[0] == info.title and len(cells) == 5 and all(cells)
    sources = (read(f"fedgkd_pl/methods/{name}.py") for name in (stem, "fedgkd"))
    known = {line.strip() for source in sources for line in source.splitlines()}
    for block in re.findall(r"```\n(.*?)```", parts[2], re.DOTALL):
        assert {line.strip() for line in block.splitlines()} <= known, block


def test_equations_are_set_as_formulas_without_losing_a_letter() -> None:
    signs = str.maketrans("Σ\u0303\u0304" + equations.RAISED, "∑\u02dc¯0123456789+−")
    found = 0
    for page in (REPO / "docs" / "methods").glob("*.md"):
        parts = page.read_text("utf-8").partition("## The equation")[2].partition("\n## ")
        for language, block in equations.BLOCK.findall(parts[0]):
            plain = normalize("NFD", block).translate(signs).translate(equations.PLAIN)
            made = "".join(ElementTree.fromstring(equations.table(block)).itertext())
            assert language == "" and made == re.sub(r"[\s_^{}]", "", plain), page
            found += 1
    assert found >= 19
    kept = "fedgkd_pl, x_train, <code>w_t</code>, <pre>n_k\nw_k</pre>, <a href='w_t'>it</a>"
    assert equations.inline(kept) == kept
    made = equations.inline("of w_{t+1}, h(w, x_i)")
    assert made.startswith("of <math><msub><mi>w</mi>") and made.count("</math>") == 2


def test_every_guard_against_a_published_error_exists() -> None:
    tests = "\n".join(file.read_text("utf-8") for file in (REPO / "tests").rglob("test_*.py"))
    guards = set(re.findall(r"`(test_\w+)`", read("PAPERS.md")))
    assert len(guards) >= 14
    assert not [name for name in guards if f"\ndef {name}(" not in tests]


# -- metrics -----------------------------------------------------------------------------------


def logged() -> Iterator[str]:
    """The texts of the code that look like metrics; what an f-string fills in is an asterisk."""
    package = REPO / "fedgkd_pl"
    files = [
        f for name in ("callbacks", "federation", "methods") for f in package.glob(f"{name}/*.py")
    ]
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_bytes()))):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        values = [part.value if isinstance(part, ast.Constant) else "*" for part in parts]
        text = "".join(value for value in values if isinstance(value, str))
        if re.fullmatch(r"[a-z][a-z*]*/[a-z0-9_/*]+", text):
            yield text


def test_every_metric_is_on_the_page() -> None:
    cells = re.findall(r"^\| (`.*?) \|", read("docs/metrics.md"), re.MULTILINE)
    page = {re.sub(r"<\w+>", "*", name) for name in re.findall(r"`([^`]+)`", "".join(cells))}
    found = set(logged()) - NOT_METRICS
    assert len(found) >= 30
    # charts ask for a beginning, such as local/acc of local/acc_mean
    missing = {name for name in found if not any(fnmatchcase(p, f"{name}*") for p in page)}
    assert not missing
    for file in REPO.glob("results/*/rounds.csv"):
        columns = file.read_text().partition("\n")[0].split(",")[2:]
        own = r"local/acc_(client\d+|unseen)"  # logged by a callback of benchmarks/
        named = [name for name in columns if not re.fullmatch(own, name)]
        assert not [n for n in named if not any(fnmatchcase(n, pattern) for pattern in page)], file


# -- commands ----------------------------------------------------------------------------------


def commands() -> list[str]:
    """Every ``fedgkd-pl`` line of a page's shell blocks, once."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            lines = block.replace("\\\n", " ")
            found += re.findall(r"^(?:\S*/)?fedgkd-pl ([^|#\n]*)", lines, re.MULTILINE)
    return list(dict.fromkeys(" ".join(words.split()) for words in found))


# What a reader has by then; tests/test_readme.py and tests/cli/test_new.py run these commands.
THEIRS = re.compile(r"my_project|anchored|--resume")


def test_every_config_that_a_page_names_exists() -> None:
    names = {name for command in commands() for name in re.findall(r"--config (\S+)", command)}
    for text in (page.read_text(encoding="utf-8") for page in PAGES):
        names |= set(re.findall(r"`((?:studies|digits|protocols|loggers)/\w+\.yaml)`", text))
    assert len(names) >= 15
    for name in names - {"config.yaml", "photos.yaml"}:
        assert "anchored" in name or all(Path(file).is_file() for file in resolve(name)), name


@pytest.mark.nightly
@pytest.mark.parametrize("command", [each for each in commands() if not THEIRS.search(each)])
def test_every_command_of_the_pages_is_understood(command: str, run: Run) -> None:
    """Those that would train print their settings; what needs a run may say that it is missing."""
    name, *words = shlex.split(command)
    if name == "flower":
        pytest.importorskip("flwr")
    extra = {"fit": ["--print_config"], "compare": ["--dry_run"]}.get(name, [])
    if name == "partition" or (name == "compare" and "digits" not in command):
        extra += ["--data.download", "false"]
    if name == "compare" and "--only" not in words:
        extra += ["--only", "seed=0"]
    code, _, err = run(name, *words, *extra)
    absent = r"error: (\S+: )?(runs?|data\.data_dir|input|model\.engine): "
    assert code == 0 or (name != "fit" and re.match(absent, err)), err
