"""The wheel carries all that a run needs, and a real run of the paper's protocol works."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO


def call(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_installed_wheel_trains_from_an_empty_folder(tmp_path: Path) -> None:
    dist, site, empty = (tmp_path / name for name in ("dist", "site", "empty"))
    empty.mkdir()
    build = ("-m", "build", "--no-isolation", "--outdir", str(dist), str(REPO))
    done = call(*build, cwd=tmp_path)  # the wheel from the sdist, which must have all it needs
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = (map(str, dist.glob(kind)) for kind in ("*.whl", "*.tar.gz"))
    done = call("-m", "twine", "check", "--strict", wheel, sdist, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    done = call("-m", "pip", "install", "-q", "--no-deps", "--target", str(site), wheel, cwd=empty)
    assert done.returncode == 0, done.stderr
    where = call(
        "-c", "import fedgkd_pl; print(fedgkd_pl.__file__)", cwd=empty, PYTHONPATH=str(site)
    )
    assert where.stdout.startswith(str(site))
    assert (site / "fedgkd_pl" / "py.typed").is_file()
    assert (site / "fedgkd_pl" / "__init__.pyi").is_file()
    fit = ("-m", "fedgkd_pl", "fit", "--config", "quickstart.yaml", "--rounds", "2")
    done = call(*fit, cwd=empty, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    summary = json.loads((empty / "runs/quickstart/version_0/summary.json").read_text())
    assert summary["rounds"] == 2
    done = call("-m", "fedgkd_pl", "new", "mine", cwd=empty, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    for file in (REPO / "fedgkd_pl" / "cli" / "template").rglob("*.tpl"):
        name = str(file.relative_to(REPO / "fedgkd_pl" / "cli" / "template")).removesuffix(".tpl")
        assert (empty / "mine" / name.replace("my_project", "mine")).is_file(), name


@pytest.mark.slow
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
