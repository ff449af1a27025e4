"""Studies, reports and figures in Python: objects that a notebook shows, not printed text."""

import json
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import fedgkd_pl
import numpy as np
import pytest
from fedgkd_pl import Arrays, Digits, Dirichlet, build, compare, plot, read_run, report
from fedgkd_pl.errors import SettingError
from fedgkd_pl.experiments.gather import runs_of
from fedgkd_pl.experiments.study import Cell
from fedgkd_pl.experiments.study_result import StudyResult
from fedgkd_pl.runs.folder import RunFolder
from fedgkd_pl.storage.html import bubbles, curve

from tests.support.runs import QUICK
from tests.support.runs import Run as Command
from tests.support.studies import fake, study

EVIL = "<script>alert(1)</script>"


class Balanced(HTMLParser):
    """Reads HTML, and fails where a tag is not closed or is one that runs something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag not in ("script", "link", "img", "iframe", "object")
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attrs)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def html(thing: Any) -> str:
    text: str = thing._repr_html_()
    Balanced(text)
    assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    return text


STUDY: dict[str, Any] = {
    "name": "small",
    "config": "smoke",
    "set": {"rounds": 1, "model.engine.workers": 1},
    "axes": {"method": {"FedAvg": {"model": "FedAvg"}, "FedGKD": {"model.gamma": 20}}},
    "measures": ["final"],
    "rows": ["measure"],
}


def test_a_study_in_python_gives_its_runs_and_tables(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = compare(STUDY, tmp_path)
    assert result.exit_code == 0 and result.folder == tmp_path / "small" and not result.failed
    assert [run.summary["method"] for run in result.runs] == ["FedAvg", "FedGKD"]
    finals = [100 * run.summary["final_test_acc"] for run in result.runs]
    assert [record["final"] for record in result.records()] == finals
    (table,) = result.tables
    (row,) = table.records()
    assert row.keys() == {"measure", "FedAvg", "FedGKD"}
    assert result.to_markdown() == (tmp_path / "small" / "table.md").read_text()
    assert str(tmp_path / "small") in repr(result) and row["FedAvg"] in repr(result)
    assert row["FedAvg"] in html(result) and "━" not in capfd.readouterr().out
    assert len(report(result).frame) == 2 and plot("curves", result).axes
    with pytest.raises(SettingError, match="name: "):
        compare({"axes": {}}, tmp_path)


def test_cells_that_failed_are_told() -> None:
    runs = [(Cell({"alpha": "1", "method": "FedAvg"}, 0, ()), fake("FedAvg", 0, [0.5]))]
    result = StudyResult(study(), Path("runs/s"), runs, {"cell": f"no {EVIL}"})
    assert result.exit_code == 3 and f"failed: cell: no {EVIL}" in repr(result)
    assert "<b>failed</b> cell: no &lt;script&gt;" in html(result)


def test_a_report_is_a_table_of_runs_however_they_are_given(run: Command, tmp_path: Path) -> None:
    assert run("fit", *QUICK, "--rounds", "2")[0] == 0
    folder = tmp_path / "runs" / "smoke" / "version_0"
    one = read_run(folder)
    best = f"{100 * one.summary['best_test_acc']:.2f}"
    for given in (one, folder, str(folder), RunFolder(folder), [one], tmp_path, [[folder]]):
        assert [each.folder.resolve() for each in runs_of(given)] == [folder]
        assert report(given).records()[0]["best"] == best
    (row,) = report(folder, over_seeds=False).records()
    assert (row["run"], row["best"], row["rounds"]) == (str(folder), best, "2")
    for shown in (repr(one), html(one)):
        assert best in shown and str(folder) in shown
    assert "polyline" in html(one)
    assert str(one.summary["best_test_acc"]) in html(RunFolder(folder))
    (folder / "summary.json").unlink()
    assert "not finished" in html(RunFolder(folder))
    (folder / "summary.json").write_text("[1]")
    assert "not finished" in html(RunFolder(folder)), "a stranger's"


def test_a_strangers_texts_are_escaped() -> None:
    evil = fake(EVIL, 0, [0.5, 0.6])
    for text in (html(evil), html(report([evil])), html(report([evil], over_seeds=False))):
        assert EVIL not in text and "&lt;script&gt;" in text
    folder = RunFolder(Path(EVIL))
    assert "&lt;script&gt;" in html(folder)
    names = [EVIL, '"><b>']
    assert EVIL not in bubbles([[1, 2]], names) and "<b>" not in bubbles([[1, 2]], names)


def test_a_curve_goes_from_the_lowest_to_the_highest() -> None:
    svg = ET.fromstring(curve({1: 10.0, 2: 30.0, 3: 20.0}).partition("<br>")[0])
    points = [tuple(map(float, p.split(","))) for p in svg[0].attrib["points"].split()]
    assert points == [(4.0, 44.0), (110.0, 4.0), (216.0, 24.0)]
    assert curve({1: 1.0}) == ""


def test_bubbles_have_the_areas_of_the_counts() -> None:
    svg = ET.fromstring(bubbles([[4, 0], [1, 2]], ["cat", "dog"]))
    circles = [each for each in svg if each.tag.endswith("circle")]
    radii = {each[0].text: float(each.attrib["r"]) for each in circles}
    assert radii == {"client 0, cat: 4": 8.0, "client 1, cat: 1": 4.0, "client 1, dog: 2": 5.7}


def test_data_show_who_holds_what() -> None:
    data = Digits(num_clients=7, partition=Dirichlet(alpha=0.1), seed=0)
    assert "not set up yet" in html(data) and repr(data).startswith("Digits(num_clients=7, ")
    data.setup()
    counts = np.array(data.summary()["counts"])
    shown = html(data)
    assert shown.count("<circle") == np.count_nonzero(counts)
    assert "Dirichlet(alpha=0.1)" in shown
    values = Arrays(np.random.rand(40, 3), np.random.rand(40), num_clients=4, name="<b>x")
    values.setup()
    assert "&lt;b&gt;x" in html(values) and "classes of" not in html(values)


def test_an_experiment_says_what_it_would_train() -> None:
    made = build("smoke", name="x")
    assert repr(made) == "Experiment(FedGKD on digits, 3 rounds, runs/x)"
    assert "model.buffer_size" in html(made)


def test_the_functions_are_public() -> None:
    assert {"compare", "report", "plot", "StudyResult"} <= {*fedgkd_pl.__all__}
    assert json.dumps(report([fake("FedAvg", 0, [0.5])]).records())
