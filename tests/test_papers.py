"""PAPERS.md names what exists."""

import re
from pathlib import Path

import fedgkd_pl
from fedgkd_pl.experiments.papers import HEADER, method_rows, write_papers
from fedgkd_pl.methods import discover
from fedgkd_pl.methods.fedavg import FedAvg
from fedgkd_pl.settings.files import resolve

from tests.conftest import REPO, script

TEXT = (REPO / "PAPERS.md").read_text(encoding="utf-8")


def test_methods_are_found_as_python_sees_them() -> None:
    exported = [getattr(fedgkd_pl, name) for name in fedgkd_pl.__all__ if name[0].isupper()]
    methods = {c.__name__ for c in exported if isinstance(c, type) and issubclass(c, FedAvg)}
    found = discover()
    assert set(found) >= methods and len(methods) >= 9
    for name in methods:
        own = vars(getattr(fedgkd_pl, name))
        assert found[name].module == own["__module__"]
        assert found[name].title in (own.get("title", name), name)
        assert found[name].citation == own.get("citation", "")
    assert [info.title for info in found.values()][:9] == [
        *("FedAvg", "FedProx", "MOON", "FedDistill", "FedDistill+"),
        *("FedGen", "FedGKD", "FedGKD-Vote", "FedGKD+"),
    ]
    assert len({info.colour for info in found.values()}) == len(found)
    assert len({info.title for info in found.values()}) == len(found)


def test_what_lists_and_reports_needs_no_torch(tmp_path: Path) -> None:
    lines = """
import sys
from fedgkd_pl.cli.main import main
import fedgkd_pl.experiments.report
assert main(["configs"]) == 0 and main(["report", "nowhere"]) == 2
from fedgkd_pl.experiments.study import read_study
assert len(read_study("studies/digits.yaml").axes["method"]) >= 9
assert not {"torch", "matplotlib"} & set(sys.modules), "starts slowly"
"""
    done = script(lines, tmp_path)
    assert done.returncode == 0, done.stderr


def test_every_row_is_that_of_its_class(tmp_path: Path) -> None:
    """A method without a row gets it by ``make papers``; one that is there must be right."""
    rows = {name: line for line in TEXT.splitlines() for name in re.findall(r"py` `(\w+)`", line)}
    made = method_rows()
    assert len(rows) >= 9 and set(rows) <= set(made)
    assert all(made[name] == row for name, row in rows.items()), "make papers"
    assert made["FedGKDVote"] == (
        "| FedGKD-Vote | Yao et al. | `methods/fedgkd_vote.py` `FedGKDVote` | "
        "`cifar10_fedgkd_vote.yaml`; `digits/fedgkd_vote.yaml` |"
    )
    (tmp_path / "PAPERS.md").write_text(f"before\n\n{HEADER}| old |\n| rows |\n\nafter\n")
    write_papers(tmp_path / "PAPERS.md")
    table = HEADER + "\n".join(made.values())
    assert (tmp_path / "PAPERS.md").read_text() == f"before\n\n{table}\n\nafter\n"


def test_every_file_it_names_exists() -> None:
    for name in re.findall(r"`(methods/\w+\.py)`", TEXT):
        assert (REPO / "fedgkd_pl" / name).is_file(), name
    for name in re.findall(r"`([\w/]+\.yaml)`", TEXT):
        assert all(Path(file).is_file() for file in resolve(name)), name
    for name in re.findall(r"`(test_\w+\.py)`", TEXT):
        assert list((REPO / "tests").rglob(name)), name
