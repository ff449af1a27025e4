"""What the organisations send each other, as Flower's records: arrays and plain values, no pickles.

A model, or a group of other tensors, is one ArrayRecord. Where one model goes down and one comes
back for one client (FedAvg, FedProx, MOON, FedGKD with M=1), a message holds a single ArrayRecord
each way, as Flower's mods for differential privacy want it.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from fedgkd_pl.errors import RunFailed
from fedgkd_pl.federation.message import (
    Answer,
    ClientFailure,
    ClientUpdate,
    Message,
    State,
    decode_state,
    encode_state,
    plain_seconds,
)
from fedgkd_pl.runs.folder import short
from fedgkd_pl.storage.files import commit
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

BFLOAT16 = "bfloat16"  # which NumPy does not have: it travels as int16 of this name
MODEL, TENSORS = "model.", "tensors."
Mark = tuple[int, int]  # of a state: round and checksum; (0, 0) for nothing kept yet
SINCE = "kept by its node"  # the name of what stands for a state on the server
KEPT = 3  # of each client, with the one it goes on from: a server that resumes may go rounds back


@dataclass(frozen=True)
class Contract:
    """What both sides must agree on before a client trains."""

    version: str
    method: str
    settings: str  # the SHA-256 of all settings that decide the result
    data: str  # the SHA-256 of the partitioned data; empty where every node has data of its own
    fixed: str = ""  # the settings themselves, as JSON, to name the one that differs
    weights: str = ""  # the SHA-256 of those that do not travel, as the run begins
    public: str = ""  # the SHA-256 of the public data, whose rows answers are about

    def breach(self, asked: "Contract") -> str:
        """Why this side cannot do what the server ``asked`` for; empty if it can."""
        for name in "version", "method", "settings", "data", "weights", "public":
            value, mine = getattr(asked, name), getattr(self, name)
            if mine != value and (mine or name != "data"):
                texts = f"{value[:16]}, this node {mine[:16]}"
                if name == "settings":
                    texts = differing(asked.fixed, self.fixed)
                return f"{name}: the server has {texts}"
        return ""


def differing(asked: str, mine: str) -> str:
    """The settings (as JSON) that differ, with both values."""
    there, here = json.loads(asked), json.loads(mine)
    return "; ".join(
        f"{short(key)} {there.get(key)!r:.60}, this node {here.get(key)!r:.60}"
        for key in sorted({*there, *here})
        if there.get(key) != here.get(key)
    )


def to_arrays(state: State) -> ArrayRecord:
    """Tensors, of any device, as a record."""
    return ArrayRecord({name: _to_array(tensor) for name, tensor in state.items()})


def _to_array(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype != torch.bfloat16:
        return Array(tensor.numpy())
    array = Array(tensor.view(torch.int16).numpy())
    array.dtype = BFLOAT16
    return array


def from_arrays(record: ArrayRecord) -> State:
    """The inverse of :func:`to_arrays`."""
    return {name: _from_array(array) for name, array in record.items()}


def _from_array(array: Array) -> torch.Tensor:
    tensor = torch.from_numpy(array.numpy())
    return tensor.view(torch.bfloat16) if array.dtype == BFLOAT16 else tensor


def pack_message(message: Message, contract: Contract) -> dict[str, Any]:
    """What every node gets in a round, if all clients have one net."""
    records: dict[str, Any] = {MODEL + n: to_arrays(state) for n, state in message.models.items()}
    records |= {TENSORS + name: to_arrays(state) for name, state in message.tensors.items()}
    records["numbers"] = MetricRecord(dict(message.numbers))
    records["contract"] = ConfigRecord(asdict(contract))
    return records


def pack_task(common: Mapping[str, Any], round: int, since: Mapping[int, Mark]) -> RecordDict:
    """``common`` of :func:`pack_message`, and whom a node trains, from the state of which mark."""
    marks = [part for mark in since.values() for part in mark]
    task = ConfigRecord({"round": round, "clients": list(since), "marks": marks})
    return RecordDict({**common, "task": task})


def unpack_task(content: RecordDict) -> tuple[Message, dict[int, Mark]]:
    """The inverse of :func:`pack_task`, without the contract."""
    task: Any = content["task"]
    arrays = content.array_records.items()
    models, tensors = (
        {name.removeprefix(kind): from_arrays(x) for name, x in arrays if name.startswith(kind)}
        for kind in (MODEL, TENSORS)
    )
    numbers: Any = dict(content["numbers"])
    marks = zip(task["marks"][::2], task["marks"][1::2], strict=True)
    message = Message(task["round"], models, numbers, tensors)
    return message, dict(zip(task["clients"], marks, strict=True))


def unpack_contract(content: RecordDict) -> Contract:
    """The server's contract."""
    said = content["contract"]  # of another version perhaps, with other fields
    return Contract(**{name.name: str(said.get(name.name, "")) for name in fields(Contract)})


def pack_answers(answers: Iterable[Answer]) -> RecordDict:
    """What a node answers: of a state only its mark; no traceback, which may show data."""
    records: dict[str, Any] = {}
    for answer in answers:
        name = str(answer.client)
        if isinstance(answer, ClientFailure):
            records[f"{name}.failure"] = ConfigRecord({"reason": answer.reason})
            continue
        states = {"weights": answer.weights, "extra": answer.extra}
        records |= {f"{name}.{key}": to_arrays(state) for key, state in states.items() if state}
        records[f"{name}.metrics"] = MetricRecord(dict(answer.metrics))
        records[f"{name}.seconds"] = MetricRecord(dict(answer.seconds))
        mark = answer.state[SINCE].tolist() if answer.state else []
        counts = {"num_samples": answer.num_samples, "mark": mark}
        records[f"{name}.counts"] = MetricRecord(counts)
    return RecordDict(records)


def unpack_answers(content: RecordDict, clients: Sequence[int]) -> list[Answer]:
    """The inverse of :func:`pack_answers`, for the clients that were asked and no others."""
    answers: list[Answer] = []
    for client in clients:
        try:
            answers.append(_unpack_answer(content, client))
        except Exception as error:  # a node may send anything
            reason = f"its node's answer cannot be read: {type(error).__name__}: {error}"
            answers.append(ClientFailure(client, reason))
    return answers


def _unpack_answer(content: RecordDict, client: int) -> Answer:
    name = str(client)
    if f"{name}.failure" in content:
        return ClientFailure(client, str(content[f"{name}.failure"]["reason"]))
    if f"{name}.counts" not in content:
        return ClientFailure(client, "its node did not answer for it")
    counts: Any = content[f"{name}.counts"]
    weights, extra = (content.array_records.get(f"{name}.{x}", {}) for x in ("weights", "extra"))
    mark = list(counts["mark"])
    return ClientUpdate(
        client=client,
        num_samples=counts["num_samples"],
        weights=from_arrays(weights),
        metrics=dict(content[f"{name}.metrics"]),
        extra=from_arrays(extra),
        state={SINCE: torch.tensor(mark)} if mark else {},
        seconds=plain_seconds(dict(content[f"{name}.seconds"])),
    )


class States:
    """The states of a node's clients: in a folder or, without one, in Flower's Context.

    Flower gives every run a new Context, and a server that was killed goes on in a new run.
    """

    def __init__(self, records: Any, folder: Path | None = None) -> None:
        self.records = records
        self.folder = folder

    def find(self, client: int, mark: Mark) -> State:
        """The state that a client goes on from, by its mark."""
        if mark == (0, 0):
            return {}
        name = _name(client, mark)
        if self.folder is None and name in self.records:
            return from_arrays(self.records[name])
        if self.folder is not None and (self.folder / name).is_file():
            state = decode_state((self.folder / name).read_bytes())
            if _checksum(state) == mark[1]:
                return state
        hint = "" if self.folder else "; set state-dir for a server that resumes"
        raise RunFailed(f"its node has lost what it kept since round {mark[0]}{hint}")

    def add(self, client: int, round: int, state: State, since: Mark = (0, 0)) -> State:
        """Keeps a new state, the one it came from (``since``) and some before; drops the others.

        What is later than the one it came from is of rounds that did not count.

        Returns:
            What the server keeps in its place.
        """
        if not state:
            return {}
        mark = round, _checksum(state)
        name = _name(client, mark)
        if self.folder is None:
            self.records[name] = to_arrays(state)
            names = list(self.records)
        else:
            commit(self.folder / name, [encode_state(state)])
            names = [file.name for file in self.folder.iterdir()]
        begins = _of(client)
        mine = [each for each in names if each.startswith(begins)]
        rounds = {each: int(each.removeprefix(begins).split("-")[0]) for each in mine}
        before = sorted((number, each) for each, number in rounds.items() if number <= since[0])
        kept = {name, _name(client, since), *(each for _, each in before[1 - KEPT :])}
        for old in rounds.keys() - kept:  # which no server will ask for any more
            if self.folder is None:
                del self.records[old]
            else:
                (self.folder / old).unlink(missing_ok=True)
        return {SINCE: torch.tensor(mark)}


def _checksum(state: State) -> int:
    return int.from_bytes(hashlib.sha256(encode_state(state)).digest()[:7], "big")


def _name(client: int, mark: Mark) -> str:
    return f"{_of(client)}{mark[0]}-{mark[1]:x}.safetensors"


def _of(client: int) -> str:
    return f"client-{client}-round-"
