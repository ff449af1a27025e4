"""What clients keep between rounds, which never leaves their node.

The server knows a mark of it, the round and a checksum, and says with every task which one a client
goes on from: after a round that did not count, or a resume, that is not the latest.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from fedgkd_pl.engines.flower.records import SINCE, Mark, from_arrays, to_arrays
from fedgkd_pl.errors import RunFailed
from fedgkd_pl.federation.message import State, decode_state, encode_state
from fedgkd_pl.storage.files import commit

KEPT = 3  # of each client, with the one it goes on from: a server that resumes may go rounds back


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
            for old in _old(list(self.records), client, name, since):
                del self.records[old]
        else:
            commit(self.folder / name, [encode_state(state)])
            names = [file.name for file in self.folder.iterdir()]
            for old in _old(names, client, name, since):
                (self.folder / old).unlink(missing_ok=True)
        return {SINCE: torch.tensor(mark)}


def _checksum(state: State) -> int:
    return int.from_bytes(hashlib.sha256(encode_state(state)).digest()[:7], "big")


def _name(client: int, mark: Mark) -> str:
    return f"{_of(client)}{mark[0]}-{mark[1]:x}.safetensors"


def _of(client: int) -> str:
    return f"client-{client}-round-"


def _old(names: Iterable[str], client: int, new: str, since: Mark) -> list[str]:
    """The states of a client that no server will ask for any more."""
    begins = _of(client)
    mine = [name for name in names if name.startswith(begins)]
    rounds = {name: int(name.removeprefix(begins).split("-")[0]) for name in mine}
    before = sorted((round, name) for name, round in rounds.items() if round <= since[0])
    kept = {new, _name(client, since), *(name for _, name in before[1 - KEPT :])}
    return [name for name in mine if name not in kept]
