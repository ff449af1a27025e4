"""Flower for real: a SuperLink, two SuperNodes, TLS, keys, and what happens when they die."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import same

pytest.importorskip("flwr", reason="the extra flower is not installed")
from tests.support import everything
from tests.support.flower_apps import Runs, failures, weights
from tests.support.flower_net import BIN, Network, environment, free_port, until

pytestmark = pytest.mark.nightly
METHOD = "Everything"
LOCAL, FLOWER = f"local-{METHOD}", f"flower-{METHOD}"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Both commands import ``everything``; the app takes it along."""
    monkeypatch.syspath_prepend(str(Path(everything.__file__).parent))
    return Runs(tmp_path)


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


def rows(folder: Path) -> int:
    file = folder / "metrics.csv"
    return len(file.read_text().splitlines()) - 1 if file.exists() else 0


def same_run(runs: Runs) -> None:
    here, there = (runs.folder / name / "version_0" for name in (LOCAL, FLOWER))
    assert same(weights(here), weights(there))
    assert (here / "metrics.csv").read_text() == (there / "metrics.csv").read_text()
    assert failures(there) == []


@pytest.mark.engines
def test_three_rounds_give_the_bits_of_the_local_engine(net: Network, runs: Runs) -> None:
    """Over TLS; every field of messages and updates, public data, two nets, tasks."""
    runs.local(METHOD)
    run = net.wait(net.start(runs.app(METHOD)))
    assert run["status"] == "finished:completed", net.log("superlink")
    same_run(runs)


def test_an_unknown_key_is_refused(net: Network) -> None:
    stranger = net.key("stranger")  # and nobody registers it
    net.node(stranger, "partition-id=0 num-partitions=2")
    process = net.processes["stranger"]
    assert until(lambda: process.poll() is not None, "the refusal") and process.returncode != 0
    del net.processes["stranger"]
    assert "Failed to activate SuperNode" in net.log("stranger")
    assert net.online() == 2


def test_the_server_killed_after_round_two_resumes(net: Network, runs: Runs) -> None:
    runs.local(METHOD)
    folder, made = runs.folder / FLOWER / "version_0", runs.app(METHOD)
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
    same_run(runs)


def test_flwr_run_simulates(runs: Runs) -> None:
    pytest.importorskip("ray", reason="Flower simulates with Ray")
    runs.local(METHOD)
    port = str(free_port())
    settings = {
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": port,
    }
    nodes = ["--federation-config", "num-supernodes=4 client-resources-num-cpus=1"]
    try:
        done = subprocess.run(
            [str(BIN / "flwr"), "run", str(runs.app(METHOD)), "--stream", *nodes],
            env=environment(runs.folder / "home") | settings,
            capture_output=True,
            text=True,
            timeout=300,
        )
        written = runs.folder / FLOWER / "version_0/summary.json"
        assert written.is_file(), done.stdout + done.stderr
        same_run(runs)
    finally:  # Flower leaves the SuperLink that it starts for this
        for process in psutil.process_iter(["cmdline"]):
            if port in (process.info["cmdline"] or []):
                for one in [*process.children(recursive=True), process]:
                    one.kill()


def test_a_node_killed_in_a_round_does_not_stop_the_run(net: Network, runs: Runs) -> None:
    made = runs.app(METHOD, "--model.local_epochs", "400")
    folder = runs.folder / FLOWER / "version_0"
    run = net.start(made)
    until(lambda: rows(folder) >= 1, "round 1", 300)
    until(lambda: net.family("node1", "flwr-clientapp"), "node1's second task", 60)
    net.kill("node1")
    assert net.wait(run)["status"] == "finished:completed", net.log("superlink")
    left_out = failures(folder)
    assert {client for _, client, _ in left_out} == {"1", "3"}
    assert rows(folder) == 3 and "1" not in {round for round, _, _ in left_out}
