"""Flower for real: a SuperLink, two SuperNodes, TLS, keys, and what happens when they die."""

import csv
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fedgkd_pl.cli.main import main
from fedgkd_pl.storage.checkpoint import read_checkpoint

from tests.conftest import same

pytest.importorskip("flwr", reason="the extra flower is not installed")
from tests.support import everything
from tests.support.flower_net import BIN, Network, free_port, until

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True)
def _with_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both commands import ``everything``; the app takes it along."""
    monkeypatch.syspath_prepend(str(Path(everything.__file__).parent))


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    network = Network(tmp_path_factory.mktemp("net"))
    try:
        for place in range(2):
            key = network.key(f"node{place}")
            network.register(key)
            network.node(key, config(network, place))
        until(lambda: network.online() == 2, "two SuperNodes")
        yield network
    finally:
        network.close()


def config(network: Network, place: int) -> str:
    states = network.folder / f"states{place}"
    return f'partition-id={place} num-partitions=2 state-dir="{states}"'


def local(folder: Path, *words: str) -> Path:
    where = ["--output_dir", str(folder), "--name", "local", "--model.engine.workers", "1"]
    assert main(["fit", *everything.words(), *where, *words]) == 0
    return folder / "local/version_0"


def app(folder: Path, *words: str) -> Path:
    where = ["--output_dir", str(folder), "--name", "flower"]
    assert main(["flower", str(folder / "app"), *everything.words(), *where, *words]) == 0
    return folder / "app"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(folder / "checkpoints/last.ckpt")["state_dict"]  # type: ignore[no-any-return]


def rows(folder: Path) -> int:
    file = folder / "metrics.csv"
    return len(file.read_text().splitlines()) - 1 if file.exists() else 0


def failures(folder: Path) -> list[dict[str, str]]:
    file = folder / "failures.csv"
    return list(csv.DictReader(file.open())) if file.exists() else []


def same_run(here: Path, there: Path) -> None:
    assert same(weights(here), weights(there))
    assert (here / "metrics.csv").read_text() == (there / "metrics.csv").read_text()
    assert failures(there) == []


@pytest.mark.engines
def test_three_rounds_give_the_bits_of_the_local_engine(net: Network, tmp_path: Path) -> None:
    """Over TLS; every field of messages and updates, public data, two nets, tasks."""
    here = local(tmp_path)
    run = net.wait(net.start(app(tmp_path)))
    assert run["status"] == "finished:completed", net.log("superlink")
    same_run(here, tmp_path / "flower/version_0")


def test_an_unknown_key_is_refused(net: Network) -> None:
    stranger = net.key("stranger")  # and nobody registers it
    net.node(stranger, "partition-id=0 num-partitions=2")
    process = net.processes["stranger"]
    assert until(lambda: process.poll() is not None, "the refusal") and process.returncode != 0
    del net.processes["stranger"]
    assert "Failed to activate SuperNode" in net.log("stranger")
    assert net.online() == 2


def test_the_server_killed_after_round_two_resumes(net: Network, tmp_path: Path) -> None:
    here = local(tmp_path)
    folder, made = tmp_path / "flower/version_0", app(tmp_path)
    run = net.start(made)
    until(lambda: rows(folder) >= 2, "round 2", 300)
    server = net.family("superlink", "flwr-serverapp")
    assert server, [process.cmdline() for process in net.family("superlink")]
    for process in server:
        process.kill()
    assert net.wait(run)["status"] == "finished:failed"
    assert rows(folder) == 2
    again = net.start(made, "--run-config", f'resume="{folder}"')
    assert net.wait(again)["status"] == "finished:completed", net.log("superlink")
    same_run(here, folder)


def test_flwr_run_simulates(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Flower simulates with Ray")
    here, made = local(tmp_path), app(tmp_path)
    port = str(free_port())
    environment = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(tmp_path / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": port,
    }
    nodes = ["--federation-config", "num-supernodes=4 client-resources-num-cpus=1"]
    try:
        done = subprocess.run(
            [str(BIN / "flwr"), "run", str(made), "--stream", *nodes],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert (tmp_path / "flower/version_0/summary.json").is_file(), done.stdout + done.stderr
        same_run(here, tmp_path / "flower/version_0")
    finally:  # Flower leaves the SuperLink that it starts for this
        for process in psutil.process_iter(["cmdline"]):
            if port in (process.info["cmdline"] or []):
                for one in [*process.children(recursive=True), process]:
                    one.kill()


def test_a_node_killed_in_a_round_does_not_stop_the_run(net: Network, tmp_path: Path) -> None:
    made = app(tmp_path, "--model.local_epochs", "400")
    folder = tmp_path / "flower/version_0"
    run = net.start(made)
    until(lambda: rows(folder) >= 1, "round 1", 300)
    until(lambda: net.family("node1", "flwr-clientapp"), "node1's second task", 60)
    net.kill("node1")
    assert net.wait(run)["status"] == "finished:completed", net.log("superlink")
    left_out: Any = failures(folder)
    assert {row["client"] for row in left_out} == {"1", "3"}
    assert rows(folder) == 3 and "1" not in {row["round"] for row in left_out}
