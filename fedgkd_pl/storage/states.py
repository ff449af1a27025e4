"""Tensors by number, of which only the latest used are in memory: what clients keep between rounds.

Every state is one safetensors file, named by the SHA-256 of its bytes, in a folder beside the
checkpoints that refer to it. So a checkpoint writes the states that are new and lists the others,
checkpoints share files, and a file that was changed is found out by its name.
"""

import hashlib
import os
import re
import stat
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from fedgkd_pl.errors import StorageError
from fedgkd_pl.storage import files
from fedgkd_pl.storage.files import commit, sync_folder
from fedgkd_pl.storage.tensors import to_safetensors
from torch import Tensor

State = dict[str, Tensor]
FOLDER = "states"  # beside checkpoints
SIZE = 32  # bytes of a checksum
_FILE = re.compile(r"[0-9a-f]{64}\.safetensors")


class StateDamaged(ValueError):
    """A state whose file is missing, or is not what it was; the text says so."""


class StateStore(MutableMapping[int, State]):
    """States by client, of which the ones used last are in memory and the others in files.

    Args:
        memory: megabytes of states in memory; those beyond lie beside the checkpoints, or in a
            temporary folder until there are any.
    """

    def __init__(self, memory: float = 64) -> None:
        self.limit = memory * 1e6
        self._names: dict[int, bytes | None] = {}  # checksums; None of one that no file has yet
        self._memory: OrderedDict[int, State] = OrderedDict()  # the one used last comes last
        self._used = 0
        self._homes: dict[Path, set[bytes]] = {}  # folders, and what is sound in each
        self._loose: dict[Path, set[bytes]] = {}  # files of ours that no checkpoint refers to yet
        self._saved: Path | None = None  # the folder of the last commit
        self._spilled: TemporaryDirectory[str] | None = None  # until there is one

    # -- a mapping -----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[int]:
        return iter(self._names)

    def __contains__(self, client: object) -> bool:
        return client in self._names

    def __getitem__(self, client: int) -> State:
        if client not in self._memory:
            from safetensors.torch import load

            self._remember(client, load(self._read(client)))
        self._memory.move_to_end(client)
        state = self._memory[client]
        self._shrink()
        return dict(state)

    def __setitem__(self, client: int, state: State) -> None:
        self._forget(client)
        before, self._names[client] = self._names.get(client), None
        self._discard(before)
        self._remember(client, state)
        self._shrink()

    def __delitem__(self, client: int) -> None:
        before = self._names.pop(client)
        self._discard(before)
        self._forget(client)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} states, {len(self._memory)} in memory)"

    def __reduce__(self) -> Any:
        """A copy, in this process or another, has everything in memory at first."""
        return _again, (self.limit / 1e6, dict(self))

    def _remember(self, client: int, state: State) -> None:
        self._memory[client] = state
        self._used += _nbytes(state)

    def _forget(self, client: int) -> None:
        state = self._memory.pop(client, None)
        if state is not None:
            self._used -= _nbytes(state)

    def _shrink(self) -> None:
        """Lets go of the states that were used longest ago, once they are in a file."""
        while self._used > self.limit and self._memory:
            client = next(iter(self._memory))
            if self._home_of(client) is None:
                self._write(client, self._spill())
            self._forget(client)

    # -- files ---------------------------------------------------------------------------------

    def _home_of(self, client: int) -> Path | None:
        name = self._names[client]
        return next((home for home, kept in self._homes.items() if name in kept), None)

    def _read(self, client: int) -> bytes:
        name, home = self._names[client], self._home_of(client)
        assert name is not None and home is not None
        try:
            return read_state(home, name)
        except StateDamaged as error:  # by somebody else, during the run
            raise StorageError(home.parent, f"what client {client} keeps, {error}") from error

    def _spill(self) -> Path:
        """Where a state goes for which memory has no room: where commits go, once there is one.

        Not where the states were read: that may be the folder of another run.
        """
        if self._saved is not None and self._saved.is_dir():
            return self._saved
        if self._spilled is None:
            self._spilled = TemporaryDirectory(prefix="fedgkd_pl-states-")
        return Path(self._spilled.name)

    def _discard(self, name: bytes | None) -> None:
        """Removes the file of a state that was replaced, unless a checkpoint may refer to it."""
        for home, loose in self._loose.items():
            if name in loose and name not in self._names.values():
                _remove(home / _file(name))
                loose.remove(name)
                self._homes[home].discard(name)

    def close(self) -> None:
        """Removes the temporary folder; Python does, unless a process ends without cleaning up."""
        if self._spilled is not None:
            home = Path(self._spilled.name)
            self._homes.pop(home, None)
            self._loose.pop(home, None)
            self._spilled.cleanup()
            self._spilled = None

    def _write(self, client: int, folder: Path) -> None:
        """Makes sure that a folder has the file of a state."""
        content = None
        name = self._names[client]
        if name is None:
            content = to_safetensors(self._memory[client])
            name = self._names[client] = hashlib.sha256(content).digest()
        kept = self._homes.setdefault(folder, set())
        if name in kept:
            return
        is_new = not os.path.lexists(folder / _file(name))
        if content is None and not _linked(self._home_of(client), folder, name):
            home = self._home_of(client)
            content = to_safetensors(self._memory[client]) if home is None else self._read(client)
        if content is not None:
            commit(folder / _file(name), [content], sync=False)
        kept.add(name)
        if is_new:  # else an older checkpoint may have it
            self._loose.setdefault(folder, set()).add(name)

    def save(self, folder: Path) -> None:
        """Writes to a folder what it does not have yet; on the disk when this returns.

        The names of states that were spilled to it may not be on the disk either, so it is synced
        in any case.
        """
        _check(folder)
        folder = folder.absolute()
        kept = self._homes.get(folder, set())
        for client in [client for client, name in self._names.items() if name not in kept]:
            self._write(client, folder)
        try:
            sync_folder(folder)
        except OSError as error:
            raise StorageError(folder, error) from error
        self._loose.pop(folder, None)
        self._saved = folder
        self.close()

    def names(self) -> set[bytes]:
        """The checksums of all states that are in files."""
        return {name for name in self._names.values() if name is not None}

    def clean(self, folder: Path, referred: Iterable[bytes]) -> None:
        """Removes from a folder what neither checkpoints refer to nor this store needs."""
        needed = {*referred, *self.names()}
        known, folder = {_file(name) for name in needed}, folder.absolute()
        with suppress(FileNotFoundError):
            for name in sorted(set(os.listdir(folder)) - known):
                if _FILE.fullmatch(name):
                    _remove(folder / name)
        if folder in self._homes:
            self._homes[folder] &= needed

    def index(self) -> dict[str, Tensor]:
        """What a checkpoint has of the states: clients, and the checksums of their files."""
        clients = sorted(self._names)
        names = b"".join(self._names[client] or b"" for client in clients)
        if len(names) != SIZE * len(clients):
            raise StorageError(FOLDER, "states that have not been written cannot be referred to")
        digests = torch.frombuffer(bytearray(names), dtype=torch.uint8) if names else torch.empty(0)
        return {
            "clients": torch.tensor(clients, dtype=torch.int64),
            "digests": digests.to(torch.uint8).reshape(-1, SIZE),
        }

    @classmethod
    def of_index(cls, index: Mapping[str, Tensor], folder: Path) -> "StateStore":
        """The inverse of :meth:`index`; no file is looked at before it is needed."""
        store = cls()
        clients, digests = index["clients"].tolist(), index["digests"].to(torch.uint8).numpy()
        store._names = {
            client: digest.tobytes() for client, digest in zip(clients, digests, strict=True)
        }
        names = {name for name in store._names.values() if name is not None}
        if any(len(name) != SIZE for name in names):
            raise StateDamaged("its list of clients' states is damaged")
        store._homes = {folder.absolute(): names}
        return store

    def check(self) -> None:
        """Looks at every file.

        Raises:
            StateDamaged: one is missing, or damaged.
        """
        for client, name in self._names.items():
            if name is not None and (home := self._home_of(client)) is not None:
                try:
                    read_state(home, name)
                except StateDamaged as error:
                    raise StateDamaged(f"what client {client} keeps, {error}") from error


def _again(memory: float, states: dict[int, State]) -> StateStore:
    store = StateStore(memory)
    store.update(states)
    return store


def read_state(folder: Path, name: bytes) -> bytes:
    """The file of a state, compared with its checksum; links are not followed."""
    file = folder / _file(name)
    where = f"{FOLDER}/{file.name}"
    try:
        with os.fdopen(os.open(file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise StateDamaged(f"{where}, is not a file")
            content = opened.read()
    except FileNotFoundError as error:
        raise StateDamaged(f"{where}, is not beside the checkpoint") from error
    except OSError as error:
        raise StateDamaged(f"{where}, cannot be read: {error.strerror}") from error
    if hashlib.sha256(content).digest() != name:
        raise StateDamaged(f"{where}, is damaged (its checksum is wrong)")
    return content


def copy_states(names: Iterable[bytes], source: Path, target: Path) -> None:
    """Takes states to the folder of another run."""
    for name in names:
        if not (target / _file(name)).exists() and not _linked(source, target, name):
            commit(target / _file(name), [read_state(source, name)])


def _file(name: bytes) -> str:
    return f"{name.hex()}.safetensors"


def _remove(file: Path) -> None:
    file.unlink(missing_ok=True)
    files.reached("removed", file)


def _nbytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def _check(folder: Path) -> None:
    if folder.is_symlink():
        raise StorageError(folder, "is a link: the states of a run are in a folder of its own")


def _linked(source: Path | None, folder: Path, name: bytes) -> bool:
    """Whether a sound file of another folder could be given a second name."""
    if source is None:
        return False
    try:
        read_state(source, name)
        folder.mkdir(parents=True, exist_ok=True)
        os.link(source / _file(name), folder / _file(name))
    except FileExistsError:  # of an earlier session: what it holds is not known
        return False
    except (OSError, StateDamaged):
        return False
    return True
