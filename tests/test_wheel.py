"""The wheel carries all that a run needs, and a real run of the paper's protocol works."""

import json
import os
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from tests.conftest import REPO

pytestmark = pytest.mark.nightly


def call(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    settings: dict[str, Any] = {"cwd": cwd, "env": {**os.environ, **env}, "check": False}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, **settings)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, and the wheel built from it: the sdist must have all that it needs."""
    folder = tmp_path_factory.mktemp("dist")
    build = ("-m", "build", "--no-isolation", "--outdir", str(folder), str(REPO))
    done = call(*build, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def files(folder: str) -> Iterator[str]:
    """What the repository has there, as paths from its top."""
    for file in (REPO / folder).rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            yield file.relative_to(REPO).as_posix()


def test_the_wheel_has_the_package_with_its_configs_and_nothing_else(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = [name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert len(names) == len(set(names))
    assert set(names) == {*files("fedgkd_pl"), *(f"fedgkd_pl/{name}" for name in files("configs"))}


def test_the_sdist_has_the_tests_and_what_they_read(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    for folder in ("fedgkd_pl", "configs", "tests", "docs", "tools"):
        assert {name for name in files(folder) if "/build/" not in name} <= names, folder
    assert {"pyproject.toml", "constraints.txt", "Makefile", "mkdocs.yml", "CITATION.cff"} <= names


def test_the_installed_wheel_trains_from_an_empty_folder(dist: Path, tmp_path: Path) -> None:
    site, empty = (tmp_path / name for name in ("site", "empty"))
    empty.mkdir()
    (wheel,) = map(str, dist.glob("*.whl"))
    done = call("-m", "pip", "install", "-q", "--no-deps", "--target", str(site), wheel, cwd=empty)
    assert done.returncode == 0, done.stderr
    commands = (
        "-c 'import fedgkd_pl; print(fedgkd_pl.__file__)'",
        "-m fedgkd_pl fit --config quickstart.yaml --rounds 2",
        "-m fedgkd_pl report runs --format html",
        "-m fedgkd_pl new mine",
    )
    said = []
    for words in commands:
        done = call(*shlex.split(words), cwd=empty, PYTHONPATH=str(site))
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0].startswith(str(site))
    assert call(str(site / "bin/fedgkd-pl"), "--version", cwd=empty, PYTHONPATH=str(site)).stdout
    summary = json.loads((empty / "runs/quickstart/version_0/summary.json").read_text())
    assert summary["rounds"] == 2
    assert "FedGKD" in (empty / "runs" / "report.html").read_text(encoding="utf-8")
    assert (empty / "mine" / "config.yaml").is_file()


def test_two_rounds_of_the_papers_protocol_on_real_cifar(real_data: Path, tmp_path: Path) -> None:
    config = str(REPO / "configs" / "cifar10_fedgkd.yaml")
    words = ("--config", config, "--data.data_dir", str(real_data), "--rounds", "2")
    done = call("-m", "fedgkd_pl", "fit", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs/cifar10_fedgkd/version_0"
    partition = json.loads((folder / "partition.json").read_text())
    assert [sum(counts) for counts in partition["counts"]] == [2250] * 20
    assert (partition["num_val"], partition["num_test"]) == (5000, 10000)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["bytes_up"] == 2 * 4 * 78_042 * 4  # rounds × clients × parameters × bytes
