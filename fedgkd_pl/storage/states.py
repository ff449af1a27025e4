"""What clients keep between rounds: a file per state, named by the SHA-256 of its content.

The files lie beside the checkpoints that refer to them. So a checkpoint writes the states that are
new and lists the others, checkpoints share files, and a damaged file is found out by its name.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedgkd_pl.errors import StorageError
from fedgkd_pl.storage import files
from fedgkd_pl.storage.files import commit, sync_folder, to_safetensors
from torch import Tensor

State = dict[str, Tensor]
FOLDER = "states"  # beside checkpoints


class StateStore(MutableMapping[int, State]):
    """States by client, always on disk.

    Args:
        names: the files of states, by client, that a checkpoint refers to.
        source: their folder. New files go to a temporary folder until :meth:`save` names another.
    """

    def __init__(self, names: Mapping[int, str] | None = None, source: Path | None = None) -> None:
        self.names = dict(names or {})
        self._source = source and source.absolute()
        self._home: Path | None = None  # of new files
        self._temporary: TemporaryDirectory[str] | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[int]:
        return iter(self.names)

    def __contains__(self, client: object) -> bool:
        return client in self.names

    def __getitem__(self, client: int) -> State:
        from safetensors.torch import load

        return load(self._read(self.names[client]))

    def __setitem__(self, client: int, state: State) -> None:
        if self._home is None:
            self._temporary = TemporaryDirectory(prefix="fedgkd_pl-states-")
            self._home = Path(self._temporary.name)
        content = to_safetensors(state)
        name = f"{hashlib.sha256(content).hexdigest()}.safetensors"
        commit(self._home / name, [content], sync=False)
        before, self.names[client] = self.names.get(client), name
        self._discard(before)

    def __delitem__(self, client: int) -> None:
        self._discard(self.names.pop(client))

    def __reduce__(self) -> Any:
        """A copy, in this process or another, has files of its own."""
        return StateStore, (), None, None, iter(self.items())

    def _folder(self, name: str) -> Path:
        """Where the file of a state is: among the new ones, or where the checkpoint is."""
        if self._source is None or (self._home is not None and (self._home / name).exists()):
            assert self._home is not None
            return self._home
        return self._source

    def _read(self, name: str) -> bytes:
        return read_state(self._folder(name), name)

    def _discard(self, name: str | None) -> None:
        """Removes a replaced file from the temporary folder, which no checkpoint refers to."""
        if self._temporary is not None and name is not None and name not in self.names.values():
            (Path(self._temporary.name) / name).unlink(missing_ok=True)

    def save(self, folder: Path) -> None:
        """Makes a folder beside a checkpoint hold every state, on the disk when this returns."""
        folder = folder.absolute()
        if folder != self._home:
            # at first, what a file of this name holds is not known
            known = set() if self._temporary else {file.name for file in folder.glob("*")}
            for name in {*self.names.values()} - known:
                if self._folder(name) != folder:
                    commit(folder / name, [self._read(name)], sync=False)
            self.close()
            self._home, self._source = folder, None
        sync_folder(folder)

    def check(self) -> None:
        """Reads every file; StorageError if one is missing or damaged."""
        for name in self.names.values():
            self._read(name)

    def close(self) -> None:
        """Removes the temporary folder; Python does, unless a process ends without cleaning up."""
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = self._home = None


def read_state(folder: Path, name: str) -> bytes:
    """The file of a state, compared with its name; StorageError if it is another or none."""
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        raise StorageError(folder / name, error) from error
    if f"{hashlib.sha256(content).hexdigest()}.safetensors" != name:
        raise StorageError(folder / name, "is damaged")
    return content


def clean(folder: Path, referred: Iterable[str]) -> None:
    """Removes the states from a folder that nothing refers to."""
    for name in {file.name for file in folder.glob("*.safetensors")} - {*referred}:
        (folder / name).unlink(missing_ok=True)
        files.reached("removed", folder / name)
