"""Flower: the bits of the local engine, through Flower's own messages, apps and contexts.

Here messages go from app to app within this process; test_flower_net.py has the processes.
"""

import csv
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from fedgkd_pl.cli.main import main
from fedgkd_pl.errors import RunFailed
from fedgkd_pl.federation.message import ClientFailure, ClientUpdate, encode_state
from fedgkd_pl.storage.checkpoint import read_checkpoint

from tests.conftest import same

pytest.importorskip("flwr", reason="the extra flower is not installed")
from fedgkd_pl.engines.flower import records
from fedgkd_pl.flower import client_app
from flwr.app import Array, ConfigRecord, Context, Error, RecordDict
from flwr.app import Message as FlowerMessage

from tests.support import everything
from tests.support.everything import PRECISIONS
from tests.support.flower_apps import TWO, Loop, Runs, failures, kept_by_nodes, weights


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.mark.parametrize(
    "precision",
    [PRECISIONS[0], *(pytest.param(each, marks=pytest.mark.nightly) for each in PRECISIONS[1:])],
)
def test_the_same_bits_as_the_local_engine(
    precision: str, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 11 stands for the clients 0, 2 and 4, which have net 0; node 12 for 1 and 3."""
    monkeypatch.syspath_prepend(str(Path(everything.__file__).parent))
    flags = ["--trainer.precision", precision]
    here = runs.local("Everything", *flags)
    grid = runs.flower(runs.app("Everything", *flags), **{"import": "everything"})
    there = runs.folder / "flower-Everything/version_0"
    assert failures(here) == failures(there) == []
    assert same(weights(here), weights(there))
    assert (here / "metrics.csv").read_text() == (there / "metrics.csv").read_text()
    assert [kind for kind, _, _ in grid.sent] == ["query"] * 2 + ["train"] * 6
    models = {node: set(content.array_records) for kind, node, content in grid.sent[2:]}
    assert models == {11 + n: {f"model.global@{n}", "tensors.shift"} for n in (0, 1)}
    # what a client keeps stays with its node
    last = "checkpoints/last.ckpt"
    ours, theirs = (read_checkpoint(folder / last)["fedgkd_pl"] for folder in (here, there))
    assert all(state.keys() == {records.SINCE} for state in theirs["client_states"].values())
    kept = kept_by_nodes(grid, there)
    assert kept.keys() == ours["client_states"].keys() and same(ours["shift"], theirs["shift"])
    for client, state in kept.items():
        assert same(state, ours["client_states"][client])


def test_clients_that_keep_their_models_send_none(runs: Runs) -> None:
    """What travels and what clients report is that of the local engine; no model leaves a node."""
    here = runs.local("FedMD")
    sent: list[str] = []

    def listen(grid: Loop, message: Any, node: int) -> Any:
        reply = grid._answer(message, node)
        sent.extend([*message.content.array_records, *reply.content.array_records])
        return reply

    grid = runs.flower(runs.app("FedMD"), change=listen)
    there = runs.folder / "flower-FedMD/version_0"
    told, again = (csv.DictReader((folder / "metrics.csv").open()) for folder in (here, there))
    for ours, theirs in zip(told, again, strict=True):
        known = [name for name in ours if name.startswith(("client/", "comm/"))]
        assert len(known) > 8 and [ours[n] for n in known] == [theirs[n] for n in known]
    assert sent and not [name for name in sent if "model" in name or "weights" in name]
    kept = [name for context in grid.contexts.values() for name in context.state]
    assert len({name.partition("-round")[0] for name in kept}) == 5  # a net of every client


def test_what_is_personal_stays_with_its_node(runs: Runs) -> None:
    here = runs.local("FedPer")
    crossed: set[str] = set()

    def listen(grid: Loop, message: Any, node: int) -> Any:
        reply = grid._answer(message, node)
        for content in (message.content, reply.content):
            crossed.update(name for record in content.array_records.values() for name in record)
        return reply

    grid = runs.flower(runs.app("FedPer"), change=listen)
    there = runs.folder / "flower-FedPer/version_0"
    assert failures(there) == [] and same(weights(here), weights(there))
    assert crossed and not any(name.startswith("classifier") for name in crossed)
    ours = read_checkpoint(here / "checkpoints/last.ckpt")["fedgkd_pl"]["client_states"]
    kept = kept_by_nodes(grid, there)
    assert kept.keys() == ours.keys()
    for client, state in kept.items():
        assert same(state, ours[client]) and "personal: classifier.weight" in state
    rows = [list(csv.DictReader((f / "metrics.csv").open())) for f in (here, there)]
    for mine, theirs in zip(*rows, strict=True):
        assert mine["comm/bytes_up"] == theirs["comm/bytes_up"]
        assert mine["test/acc"] and not theirs["test/acc"], "nothing is scored without the heads"


def test_a_node_with_other_fixed_weights_is_refused() -> None:
    asked = records.Contract("1", "FedPer", "s", "d", weights="a" * 64)
    mine = records.Contract("1", "FedPer", "s", "d", weights="b" * 64)
    assert mine.breach(asked).startswith("weights: the server has aaaa")


def test_a_node_that_fails_or_is_late_is_left_out(runs: Runs) -> None:
    def change(grid: Loop, message: Any, node: int) -> Any:
        if message.metadata.message_type == "train" and node == 12:
            match message.content["task"]["round"]:
                case 1:
                    raise ValueError("the node's disk is full")
                case 2:
                    return None  # and never will
                case 3:
                    nothing = RecordDict({"5.weights": ConfigRecord()})
                    return FlowerMessage(nothing, reply_to=message)
        return grid._answer(message, node)

    app = runs.app("FedGKD", "--model.engine.deadline", "0.2")
    runs.flower(app, change=change)
    told = failures(runs.folder / "flower-FedGKD/version_0")
    reasons = {round: {reason for r, _, reason in told if r == round} for round in "123"}
    assert reasons["1"] == {"its node failed: the node's disk is full"}
    assert reasons["2"] == {"its node did not answer within 0.2 s"}
    assert reasons["3"] == {"its node did not answer for it"}
    assert {int(client) % 2 for _, client, _ in told} == {1}


REFUSED = {
    "method": ({"method": "MOON"}, "this node takes part in MOON only, the server runs FedGKD"),
    "version": ({"version": "0.0.9"}, "this node takes part in 0.0.9 only, the server runs"),
    "settings": (
        {"args": "--model.gamma 9"},
        "settings: the server has model.gamma 0.2, this node 9.0",
    ),
    "data": (
        {"args": "--data.partition_seed 9 --model.net.hidden [8]"},
        "settings: the server has data.partition_seed None, this node 9; "
        "model.net.hidden [16], this node [8]",
    ),
    "pinned": ({"settings": "?"}, "this node takes part in ? only, the server runs"),
    "clients": ({"client": 7}, "client: must be 0 to 4"),
    "nobody": ({}, "this node has no client"),
    "own": ({"own-data": True}, "needs client=0"),
    "typing": ({"args": "--model.gama 9"}, "not understood by this node"),
}


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    """A run of one round, and the nodes and messages it had."""
    runs = Runs(tmp_path_factory.mktemp("loop"))
    return runs.flower(runs.app("FedGKD", "--rounds", "1"))


@pytest.mark.parametrize("case", REFUSED)
def test_a_node_that_thinks_otherwise_says_so(case: str, loop: Loop) -> None:
    said, text = REFUSED[case]
    if case not in ("clients", "nobody", "own"):
        said = said | {"clients": "1 3"}
    content = next(content for kind, _, content in loop.sent if kind == "query")
    message = FlowerMessage(content, 12, "query")
    message.metadata.__dict__["_message_id"] = "1"
    reply = loop.client(message, Context(1, 12, said, RecordDict(), {}))
    assert text in str(reply.content["node"]["refuses"])


def test_a_node_that_refuses_is_not_used(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    app = runs.app("FedGKD", "--model.engine.patience", "0", "--rounds", "1")
    grid = runs.flower(app, {11: {"clients": "0 2 4"}, 12: {"clients": "1 3", "method": "MOON"}})
    assert "node 12 is not used: method: this node takes part in MOON only" in caplog.text
    assert [node for kind, node, _ in grid.sent if kind == "train"] == [11]


def test_a_client_refuses_a_server_that_has_changed_since(loop: Loop) -> None:
    content = next(content for kind, _, content in loop.sent if kind == "train")
    content["contract"]["method"] = "FedAvg"
    message = FlowerMessage(content, 11, "train")
    message.metadata.__dict__["_message_id"] = "1"
    reply = loop._answer(message, 11)
    assert not reply.content.array_records
    told = [str(record["reason"]) for record in reply.content.config_records.values()]
    assert told and all("method: the server has FedAvg, this node FedGKD" in text for text in told)


def test_a_node_that_comes_back_trains_again(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is gone in round 2 and asked again when it is there, which takes it a while to answer."""
    replies: dict[str, tuple[float, Any]] = {}
    gone: list[float] = []

    def change(grid: Loop, message: Any, node: int) -> Any:
        if message.metadata.message_type == "query":
            due = time.monotonic() + (1.2 if gone else 0)  # a process must start there
            replies[message.metadata.message_id] = due, grid._answer(message, node)
            return None
        if node == 12 and message.metadata.group_id == "2":
            gone.append(time.monotonic())
            raise ConnectionError("it was killed")
        return grid._answer(message, node)

    def pull(grid: Loop, numbers: Iterable[str]) -> Iterable[Any]:
        for number in list(numbers):
            if number in replies and time.monotonic() >= replies[number][0]:
                grid.replies[number] = replies.pop(number)[1]
        return usual(grid, numbers)

    def connected(grid: Loop) -> Iterable[int]:
        asked = [m for kind, node, m in grid.sent if kind == "train" and node == 11]
        return [11] if gone and len(asked) < 3 else [11, 12]  # it is back when round 3 is done

    usual = Loop.pull_messages
    monkeypatch.setattr(Loop, "pull_messages", pull)
    monkeypatch.setattr(Loop, "get_node_ids", connected)
    runs.flower(runs.app("MOON", "--rounds", "5"), change=change)
    told = failures(runs.folder / "flower-MOON/version_0")
    assert {round for round, *_ in told} == {"2", "3"}
    assert gone and {int(client) % 2 for _, client, _ in told} == {1}


class Killed(BaseException):
    """Nothing catches it."""


def test_a_killed_server_goes_on_in_a_new_run(runs: Runs) -> None:
    def stop(grid: Loop, message: Any, node: int) -> Any:
        if message.metadata.group_id == "3":
            raise Killed
        return grid._answer(message, node)

    whole = runs.local("MOON")
    nodes = {n: said | {"state-dir": str(runs.folder / f"node{n}")} for n, said in TWO.items()}
    app = runs.app("MOON")
    with pytest.raises(Killed):
        runs.flower(app, nodes, stop)
    folder = runs.folder / "flower-MOON/version_0"
    assert len((folder / "metrics.csv").read_text().splitlines()) == 3
    runs.flower(app, nodes, resume=str(folder))  # with new contexts, as in a new run
    assert same(weights(whole), weights(folder))
    assert (whole / "metrics.csv").read_text() == (folder / "metrics.csv").read_text()


def test_a_lost_state_is_told(runs: Runs) -> None:
    def forget(grid: Loop, message: Any, node: int) -> Any:
        if node == 12:
            grid.contexts[node].state = RecordDict()
        return grid._answer(message, node)

    runs.flower(runs.app("MOON"), change=forget)
    told = failures(runs.folder / "flower-MOON/version_0")
    assert told and all("has lost what it kept since round" in reason for _, _, reason in told)
    assert {int(client) % 2 for _, client, _ in told} == {1}


def state_of(number: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2,), float(number))}


def test_states_are_kept_as_long_as_a_server_may_ask(tmp_path: Path) -> None:
    kept, since = records.States(RecordDict(), tmp_path), (0, 0)
    marks: dict[int, tuple[int, int]] = {}
    for round in range(1, 7):
        stands = kept.add(3, round, state_of(round), since)
        marks[round] = since = tuple(stands[records.SINCE].tolist())
    kept.add(31, 1, state_of(0))  # another's, with a name that begins alike
    for round in range(7, 14):  # rounds that do not count: the server never takes what this gives
        kept.add(3, round, state_of(round), since)
    for where in kept, records.States(RecordDict(), tmp_path):
        assert [float(where.find(3, marks[n])["w"][0]) for n in (5, 6)] == [5, 6]
        assert where.find(3, (0, 0)) == {}
        for mark in marks[3], (6, 123):
            with pytest.raises(RunFailed, match=f"since round {mark[0]}"):
                where.find(3, mark)
    assert len(list(tmp_path.glob("client-3-*"))) == 3
    file = next(tmp_path.glob("client-3-round-6-*"))
    file.write_bytes(encode_state(state_of(0)))
    with pytest.raises(RunFailed, match="since round 6"):  # it was changed
        kept.find(3, marks[6])


def test_what_travels_is_exact() -> None:
    torch.manual_seed(0)
    state = {
        "float": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "half": torch.randn(3).half(),
        "bfloat16": torch.randn(2, 2).bfloat16(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "bool": torch.tensor([True, False]),
        "inf": torch.tensor([float("inf"), float("nan"), -0.0]),
    }
    there = records.from_arrays(records.to_arrays(state))
    assert list(there) == list(state)
    for name, tensor in state.items():
        assert there[name].dtype == tensor.dtype and there[name].shape == tensor.shape
        assert torch.equal(there[name].nan_to_num(), tensor.nan_to_num())
    update = ClientUpdate(5, 9, state, {"loss": 1 / 3}, seconds={"train": 1.5})
    failed = ClientFailure(6, "it failed", "a traceback with a patient's name")
    back, *others = records.unpack_answers(records.pack_answers([update, failed]), [5, 6, 7])
    assert isinstance(back, ClientUpdate)
    assert (back.num_samples, back.metrics, back.seconds) == (9, {"loss": 1 / 3}, {"train": 1.5})
    told = [ClientFailure(6, "it failed"), ClientFailure(7, "its node did not answer for it")]
    assert others == told


Change = Callable[[Any, RecordDict], Any]


def spoiled(kind: str, change: Change) -> Callable[[Loop, Any, int], Any]:
    """Nodes as always, but for what node 12 answers to one kind of message."""

    def answer(grid: Loop, message: Any, node: int) -> Any:
        reply = grid._answer(message, node)
        if message.metadata.message_type == kind and node == 12:
            return change(message, reply.content) or reply
        return reply

    return answer


def forged(**values: Any) -> Change:
    def change(_: Any, content: RecordDict) -> None:
        for name in content.metric_records:
            if name.endswith(".counts"):
                content[name].update(values)

    return change


def empty(_: Any, content: RecordDict) -> None:
    for record in content.array_records.values():
        for name, array in list(record.items()):
            record[name] = Array(array.dtype, array.shape, array.stype, b"")


NONSENSE: dict[str, tuple[Change, str]] = {
    "mark": (forged(mark=[5]), "its state has an undeclared"),
    "samples": (forged(num_samples=0), "reports 0 samples"),
    "memory": (empty, "cannot be read: EOFError"),
    "type": (lambda m, _: FlowerMessage(RecordDict(), reply_to=m), "did not answer for it"),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_a_node_that_answers_nonsense_is_left_out(case: str, runs: Runs) -> None:
    change, text = NONSENSE[case]
    runs.flower(runs.app("FedGKD", "--rounds", "2"), change=spoiled("train", change))
    told = failures(runs.folder / "flower-FedGKD/version_0")
    assert told and all(text in reason for _, _, reason in told), told
    assert {int(client) % 2 for _, client, _ in told} == {1}


def test_a_node_is_asked_again_until_it_can_say_whom_it_stands_for(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fedgkd_pl.engines.flower.engine.ASK_AGAIN", 0.1)
    tries: list[int] = []

    def change(message: Any, _: RecordDict) -> Any:
        tries.append(1)
        if len(tries) == 1:
            return FlowerMessage(Error(2, "its disk is not mounted yet"), reply_to=message)
        if len(tries) == 2:
            return FlowerMessage(RecordDict(), reply_to=message)
        return None

    runs.flower(runs.app("FedGKD", "--rounds", "1"), change=spoiled("query", change))
    assert (
        "its disk is not mounted yet" in caplog.text and "cannot be read: KeyError" in caplog.text
    )
    assert len(tries) == 3 and failures(runs.folder / "flower-FedGKD/version_0") == []


def test_two_nodes_for_one_client(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    nodes = {12: {"clients": "0 1 2 3 4"}, 11: {"clients": "0 1 2 3 4"}}
    grid = runs.flower(runs.app("FedGKD", "--rounds", "2"), nodes)
    assert {node for kind, node, _ in grid.sent if kind == "train"} == {11}
    assert caplog.text.count("clients [0, 1, 2, 3, 4] have another node, too") == 1


def test_errors_of_a_node_say_their_kind_only(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(self: Any, *_: Any) -> Any:
        raise KeyError("patient 4711")

    monkeypatch.setattr("fedgkd_pl.engines.flower.apps.Node.train", train)
    with pytest.raises(RunFailed, match="code 3"):  # no round counted
        runs.flower(runs.app("FedGKD", "--rounds", "1"))
    told = failures(runs.folder / "flower-FedGKD/version_0")
    assert {reason for _, _, reason in told} == {"KeyError (its node's log says more)"}


def test_bad_flags_of_a_run_end_it_with_an_error(runs: Runs) -> None:
    app = runs.app("FedGKD")
    with pytest.raises(RunFailed, match="code 2"):
        runs.flower(app, args="--model.gama 9")
    assert not (runs.folder / "flower-FedGKD").exists()


def test_states_that_are_elsewhere(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    runs.flower(runs.app("MOON"))
    folder = runs.folder / "flower-MOON/version_0"
    before = (folder / "config.yaml").read_bytes()
    resume = ["fit", "--resume", str(folder), "--rounds", "4", "--model.engine", "LocalEngine"]
    assert main(resume) == 2
    assert "is with the clients: go on with the engine that began" in capfd.readouterr().err
    assert (folder / "config.yaml").read_bytes() == before
    config = ["--config", str(folder / "config.yaml"), "--model.engine", "LocalEngine"]
    assert main(["test", *config, "--ckpt_path", str(folder / "checkpoints/last.ckpt")]) == 0


def test_nodes_with_data_of_their_own(runs: Runs) -> None:
    """Each node's training data is its client's, whatever the server has."""

    def change(grid: Loop, message: Any, node: int) -> Any:
        reply = grid._answer(message, node)
        records = reply.content.metric_records.values()
        counted.extend(record["num_samples"] for record in records if "mark" in record)
        return reply

    counted: list[Any] = []
    app = runs.app(
        "FedGKD", "--data.participation", "1", "--data.num_clients", "2", "--rounds", "2"
    )
    nodes = {n: {"client": n, "own-data": True} for n in range(2)}
    runs.flower(app, nodes, change, args="--model.engine.max_samples 1437")
    assert failures(runs.folder / "flower-FedGKD/version_0") == []
    assert counted == [1797 - 360] * 4  # all but the test set


@pytest.mark.nightly
def test_flower_s_mods_for_privacy_fit(runs: Runs) -> None:
    from flwr.clientapp.mod import LocalDpMod

    mod = LocalDpMod(clipping_norm=1e-6, sensitivity=0.0, epsilon=1.0, delta=0.1)
    words = ["--model.buffer_size", "1", "--rounds", "2", "--data.participation", "1"]
    app = runs.app("FedGKD", *words)
    private = client_app(str(app / "fedgkd_app.py"), mods=[mod])
    nodes = {n: {"client": n} for n in range(5)}
    runs.flower(app, nodes, lambda grid, message, node: private(message, grid.contexts[node]))
    folder = runs.folder / "flower-FedGKD/version_0"
    assert failures(folder) == []
    start = read_checkpoint(folder / "checkpoints/last.ckpt")["state_dict"]
    before = runs.local("FedGKD", *words, "--model.optimizer.lr", "1e-12")
    for name, tensor in weights(before).items():  # clipped to nothing: the model stays
        assert torch.allclose(tensor, start[name], atol=1e-5)


BAD = [
    (["flower", "app", "--config", "nowhere.yaml"], "nowhere.yaml"),
    (["flower", "an app", "--config", "smoke.yaml"], "letters, digits and dashes"),
    (["flower", "app", "--config", "smoke.yaml", "--model.engine.deadline", "0"], "deadline"),
    (["fit", "--config", "smoke.yaml", "--model.engine", "FlowerEngine"], "fedgkd-pl flower"),
    (
        ["flower", "app", "--model.engine.deadline", "5", "--config", "smoke.yaml"],
        "must be FlowerEngine",
    ),
    (["flower", "app", "--config", "smoke.yaml", "--resume", "x"], "--run-config"),
    (["flower", "app", "--import", "json.decoder", "--config", "smoke.yaml"], "of one file"),
]


@pytest.mark.parametrize("words, text", BAD, ids=[str(n) for n in range(len(BAD))])
def test_bad_input(words: list[str], text: str, run: Any, tmp_path: Path) -> None:
    code, _, err = run(*words)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and text in err
    assert list(tmp_path.iterdir()) == []
