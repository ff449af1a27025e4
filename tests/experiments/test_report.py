"""The report's page and the figures of the command line, on real small runs."""

import csv
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from fedgkd_pl.cli.main import main
from fedgkd_pl.experiments.runs import find_runs

CALLBACKS = json.dumps(
    [
        "ClientDrift",
        "LocalModels",
        "TeacherAgreement",
        "Forgetting",
        {"class_path": "FeatureMap", "init_args": {"every_n_rounds": 3, "max_samples": 60}},
    ]
)
STUDY = f"""
# Two methods, two seeds
name: pair
config: digits/fedavg.yaml
seeds: [0, 1]
set: {{rounds: 3, model.local_steps: 2, trainer.callbacks: {CALLBACKS}}}
measures: [best]
columns: [method]
rows: []
axes:
  method:
    FedAvg: {{}}
    FedGKD: {{model: FedGKD, model.gamma: 0.2}}
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of four runs."""
    top = tmp_path_factory.mktemp("report")
    (top / "pair.yaml").write_text(STUDY.lstrip())
    words = ["compare", str(top / "pair.yaml"), "--output_dir", str(top), "--jobs", "2"]
    assert main(words) == 0
    return top / "pair"


def test_the_page_has_every_figure_and_the_table(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    names = re.findall(r'<figure data-name="(\w+)"', page)
    for name in ("curves", "loss", "kd", "drift", "cosine", "local", "agreement", "forgetting"):
        assert name in names
    for name in ("best", "bytes", "seconds", "clients1", "clients2", "features", "partition1"):
        assert name in names
    assert len(names) == len(set(names)) == page.count("<svg")
    assert "http" not in re.sub(r'"http://www\.w3\.org/[^"]*"', "", page), "needs a network"
    best = {}
    for run in find_runs([str(folder)]):
        with (run.folder / "metrics.csv").open() as file:
            accuracies = [100 * float(row["test/acc"]) for row in csv.DictReader(file)]
        best.setdefault(run.summary["method"], []).append(max(accuracies))
    for method, values in best.items():
        text = f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"
        assert f"<td>{method}</td>" in page and text in page
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)), "figures take each other's clip paths"


@pytest.mark.parametrize("kind", ["curves", "participation", "partition", "features", "clients"])
def test_figures_by_the_command_line(folder: Path, kind: str, tmp_path: Path) -> None:
    output = tmp_path / f"{kind}.svg"
    assert main(["figure", kind, str(folder), "--output", str(output)]) == 0
    text = output.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert "FedGKD" in text or kind in ("clients", "partition")


def test_markdown(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder), "--format", "md", "--output", str(tmp_path / "r.md")]) == 0
    lines = (tmp_path / "r.md").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("| method | data | rounds | seeds | best |")
    assert lines[2].startswith("| FedAvg | digits | 3 | 0, 1 |")
    assert "- `model.local_steps`: 2" in lines
    assert "- `model.gamma`: 0.2" not in lines, "not all have it"
