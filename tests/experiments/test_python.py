"""Runs, studies, reports and figures in Python, and what damaged files of a run come to."""

import csv
import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fedgkd_pl import find_runs, plot, read_run, report
from fedgkd_pl.errors import SettingError
from fedgkd_pl.experiments.report import KINDS
from fedgkd_pl.experiments.runs import runs_of
from fedgkd_pl.runs.folder import RunFolder


class Study:
    """An object with runs, as a study's result is."""

    def __init__(self, *runs: Any) -> None:
        self.runs = runs


def test_a_run_is_found_however_it_is_given(done: Path, tmp_path: Path) -> None:
    one = read_run(done)
    best = f"{100 * one.summary['best_test_acc']:.2f}"
    for given in (one, done, str(done), RunFolder(done), Study(one), tmp_path, [[done]]):
        assert [each.folder.resolve() for each in runs_of(given)] == [done]
    assert best in repr(one) and str(done) in repr(one)
    with (done / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["test/acc"] for row in one.metrics()] == [float(row["test/acc"]) for row in rows]
    assert one.measure("round2") == one.accuracy[2] == 100 * float(rows[1]["test/acc"])
    assert one.measure("average_best") is None
    assert f"{one.measure('best'):.2f}" == best


def test_versions_are_sorted_by_number(tmp_path: Path) -> None:
    content = {"method": "FedAvg", "dataset": "d", "seed": 0, "rounds": 1, "bytes_down": 1}
    for number in (10, 9, 2):
        folder = tmp_path / "x" / f"version_{number}"
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps(content))
    paths = [str(tmp_path)]
    assert [run.folder.name[8:] for run in find_runs(paths)] == ["2", "9", "10"]
    with pytest.raises(SettingError, match="no finished run"):
        find_runs([str(tmp_path / "nowhere")])


def npz(**arrays: Any) -> bytes:
    points = np.zeros((2, 2))
    usual: dict[str, Any] = {"global_points": points, "local_points": points, "round": 1}
    usual |= {"labels": np.array([0, 1]), "global_acc": 0.5, "local_acc": 0.5, "client": 1}
    file = io.BytesIO()
    np.savez(file, **(usual | arrays))
    return file.getvalue()


class Canary:
    """Writes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


DAMAGED = [
    ("summary.json", "curves", '{"method": "x"}'),
    ("metrics.csv", "curves", "round,test/acc\n1,2,3\n"),
    ("metrics.csv", "curves", "round,test/acc\n1,x\n"),
    ("config.yaml", "curves", "x: !!python/object/apply:os.system ['true']\n"),
    ("config.yaml", "curves", "seed_everything: [1]\n"),
    ("partition.json", "partition", '{"counts": [[1, 2], [3]]}'),
    ("partition.json", "partition", '{"counts": [[1, -2]]}'),
    ("predictions.csv", "confusion", "label,prediction\n1,99999999\n"),
    ("local_models.csv", "clients", "round,client,acc\n1,2,inf\n"),
    ("clients.csv", "per_client", "round,client\n1,2\n"),
    ("personalized.csv", "personalized", "client,acc_before,acc_after\n1,0.5,x\n"),
    ("features-round001.npz", "features", npz(labels=np.array([0, 1, 2]))),
]


@pytest.mark.parametrize(("name", "kind", "content"), DAMAGED)
def test_a_damaged_file_is_named(done: Path, name: str, kind: str, content: str | bytes) -> None:
    data = content if isinstance(content, bytes) else content.encode()
    (done / name).write_bytes(data)
    with pytest.raises(SettingError, match=f"^runs: damaged: .*{name}"):
        plot(kind, str(done))


def test_no_code_of_a_run_is_run(done: Path, tmp_path: Path) -> None:
    canary = Canary(tmp_path / "touched")
    objects = np.array([canary], dtype=object)
    (done / "features-round001.npz").write_bytes(npz(labels=objects))
    with pytest.raises(SettingError, match="damaged"):
        plot("features", done)
    for name in ("global.safetensors", "partition.json", "metrics.csv"):
        (done / name).write_bytes(pickle.dumps(canary))
    for use in (lambda: plot("partition", done), lambda: plot("curves", done), read_run(done).net):
        with pytest.raises(SettingError):
            use()
    assert not canary.file.exists()


def test_control_characters_of_a_stranger_are_not_shown(done: Path) -> None:
    summary = json.loads((done / "summary.json").read_text()) | {"title": "a\x1b[2J\nb"}
    (done / "summary.json").write_text(json.dumps(summary))
    assert read_run(done).title == "a?[2J b"
    assert "\x1b" not in str(report(done))


def test_a_figure_says_what_it_needs(done: Path) -> None:
    for kind in {*KINDS} - {"curves", "partition", "participation"}:
        with pytest.raises(SettingError, match=r"^runs: no"):
            plot(kind, done)
    with pytest.raises(SettingError, match=r"^kind: must be one of"):
        plot("toy", done)
    assert plot("partition", done).axes and plot("participation", done).axes
