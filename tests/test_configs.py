"""Every configuration parses and runs two rounds, on tiny data where the real is not here."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPO
from tests.test_data import write_cifar

FILES = sorted(
    file.relative_to(REPO / "configs").as_posix() for file in (REPO / "configs").rglob("*.yaml")
)
ALONE = [name for name in FILES if name != "digits_fedavg.yaml"]  # that one only changes another


def test_the_configs_of_the_readme_are_there() -> None:
    assert {
        "quickstart.yaml",
        "smoke.yaml",
        "cifar10_fedgkd.yaml",
        "cifar10_fedavg.yaml",
    } <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_two_rounds(
    name: str,
    run: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = (
        ["--config", name] if name in ALONE else ["--config", "quickstart.yaml", "--config", name]
    )
    if "cifar10" in name:
        write_cifar(tmp_path / "data", monkeypatch)
        words += ["--data.num_clients", "5", "--model.engine.workers", "1"]
    words += ["--rounds", "2", "--model.local_epochs", "1", "--name", "x"]
    code, _, err = run("fit", *words)
    assert code == 0, err
    folder = tmp_path / "runs" / "x" / "version_0"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rounds"] == 2 and summary["final_test_acc"] > 0
    assert summary["method"].lower() in name or name in ("quickstart.yaml", "smoke.yaml")
