"""Fixtures, and what pytest does before and after the tests.

The process that starts xdist's workers imports this file and no test: without torch, it is quick.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from fedgkd_pl.processes.start import context

from tests.support.runs import QUICK, Run, no_picture, version

REPO = Path(__file__).parents[1]
PIECES = ("Given", "Table", "fit", "linear", "quiet_trainer", "same", "seed_everything")


def __getattr__(name: str) -> Any:
    """The pieces that tests put together, imported by the tests alone."""
    if name not in PIECES:
        raise AttributeError(f"no {name} in {__name__}")
    from tests.support import pieces

    return getattr(pieces, name)


def pytest_configure(config: pytest.Config) -> None:
    """Starts a launcher's server for all workers of xdist; without them the first test does."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        from tests.support.faults import SHARED, start_server

        os.environ[SHARED] = start_server()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Has a worker's fork server import all that any test needs, while tests are collected.

    The first test to start a process would choose what it imports, for all that come after it.
    """
    if hasattr(session.config, "workerinput"):
        from fedgkd_pl.experiments.compare import PRELOAD

        context("fedgkd_pl.engines.pool", *PRELOAD)
        forkserver.ensure_running()


def pytest_collection_finish() -> None:
    """Modules that tests write and import leave no bytecode in the folders that tests look at."""
    sys.dont_write_bytecode = True


@pytest.fixture(autouse=True)
def _no_seed_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard's figures are made, and drawn only in files that have a fixture of this name."""
    monkeypatch.setattr("torch.utils.tensorboard.writer.figure_to_image", no_picture)


@pytest.fixture
def run(tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line, in an empty folder: returns (exit code, stdout, stderr)."""
    from fedgkd_pl.cli.main import main

    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        try:
            code = main([str(word) for word in words])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return (code, *capfd.readouterr())

    return call


@pytest.fixture(scope="session")
def _three_rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fedgkd_pl.cli.main import main

    folder = tmp_path_factory.mktemp("three")
    with contextlib.chdir(folder):
        assert main(["fit", *QUICK, "--rounds", "3"]) == 0
    return folder / "runs"


@pytest.fixture
def done(run: Run, _three_rounds: Path, tmp_path: Path) -> Path:
    """The folder of a run of three rounds, this test's own copy."""
    shutil.copytree(_three_rounds, tmp_path / "runs")
    return version(tmp_path)


def script(text: str, folder: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Runs a Python script of the user's in a new process."""
    file = folder / "script.py"
    file.write_text(text)
    outside = filter(None, [os.environ.get("PYTHONPATH")])  # that of a simulated device
    return subprocess.run(
        [sys.executable, str(file)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), *outside])},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture
def real_data() -> Path:
    """The folder of real datasets, where there is one."""
    folder = os.environ.get("FEDGKD_DATA")
    if not folder or not (Path(folder) / "cifar-10-batches-py").is_dir():
        pytest.skip("FEDGKD_DATA does not name a folder with cifar-10-batches-py")
    return Path(folder)
