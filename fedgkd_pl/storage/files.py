"""Files that are complete or not there, readers with a limit, and one process per run."""

import errno
import json
import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from fedgkd_pl.errors import SettingError, StorageError, require
from typing_extensions import override

if TYPE_CHECKING:
    from filelock import BaseFileLock
    from torch import Tensor

# The errors of a disk that cannot be written to.
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM)
MB = 1_000_000
PART = ".part"  # ends the name of a file that is being written
LOCK = ".lock"
CHECKPOINTS = "checkpoints"  # a run's folder of them


def commit(
    target: Path,
    chunks: Iterable[bytes | memoryview],
    keep_previous: bool = False,
    sync: bool = True,
) -> None:
    """Writes a file so that no fault leaves it half written.

    It is written beside its target, forced to the disk, and then takes the target's name.

    Args:
        target: its folder is made where it is missing.
        keep_previous: keep what was there as :func:`previous`.
        sync: force the file's name to the disk, too; one of many leaves that to the last.

    Raises:
        StorageError: it could not be written; what was there before is there, or kept.
    """
    part = target.with_name(f".{target.name}.{os.getpid()}{PART}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.unlink(missing_ok=True)
            with part.open("xb") as file:  # a new file, never an existing one
                reached("opened", target)
                for chunk in chunks:
                    file.write(chunk)
                    reached("writing", target)
                file.flush()
                reached("written", target)
                os.fsync(file.fileno())
            reached("synced", target)
            if keep_previous and target.exists():
                target.replace(previous(target))
                reached("rotated", target)
            part.replace(target)
            reached("replaced", target)
        finally:
            part.unlink(missing_ok=True)
        if sync:
            sync_folder(target.parent)
        reached("committed", target)
    except OSError as error:
        raise StorageError(target, error) from error


def reached(step: str, target: Path) -> None:
    """Does nothing; tests stop the process here, after a ``step`` of :func:`commit`."""


def previous(target: Path) -> Path:
    """Where :func:`commit` keeps the file that it replaces."""
    return target.with_suffix(f".previous{target.suffix}")


def home_of(checkpoint: Path) -> Path:
    """The folder of the run that a checkpoint belongs to."""
    folder = checkpoint.parent
    return folder.parent if folder.name == CHECKPOINTS else folder


def write_text(target: Path, text: str) -> None:
    """Commits a text file."""
    commit(target, [text.encode(errors="backslashreplace")])


def lock(folder: Path, key: str = "resume", seconds: float = 0) -> "BaseFileLock":
    """Locks a folder until this process ends; waits ``seconds`` for another, then names ``key``."""
    from filelock import FileLock, Timeout

    holder = FileLock(folder / LOCK)
    try:
        holder.acquire(timeout=seconds)
    except Timeout as error:
        raise SettingError(key, "the run is in use by another process", str(folder)) from error
    except OSError as error:
        raise StorageError(folder, error) from error
    return holder


def sync_folder(folder: Path) -> None:
    """Forces a folder's names to the disk, where the system can."""
    with suppress(OSError):  # some network filesystems cannot
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def to_safetensors(state: "Mapping[str, Tensor]", metadata: dict[str, str] | None = None) -> bytes:
    """Tensors of any device as one safetensors blob; tied weights are written once per name."""
    from safetensors.torch import save

    seen: set[int] = set()
    plain: dict[str, Tensor] = {}
    for name, tensor in state.items():
        tensor = tensor.detach().cpu().contiguous()
        pointer = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return bytes(save(plain, metadata))


# -- reading what others may have written --------------------------------------------------------


def read_bytes(path: str | Path, limit: int) -> bytes:
    """The content of a regular file of at most ``limit`` bytes; OSError for any other."""
    info = Path(path).stat()
    if not stat.S_ISREG(info.st_mode) or info.st_size > limit:
        raise OSError(errno.EINVAL, f"must be a file of at most {limit // MB} MB", str(path))
    return Path(path).read_bytes()


def read_json(path: str | Path, limit: int = MB) -> Any:
    """The value of a JSON file; OSError if it cannot be read, ValueError if it is not JSON."""
    try:
        return json.loads(read_bytes(path, limit))
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def printable(text: object, length: int = 200) -> str:
    """The first ``length`` characters of a text, as one line without control characters."""
    line = " ".join(str(text).split())
    line = line if len(line) <= length else f"{line[:length]} ..."
    return "".join(letter if letter.isprintable() else "?" for letter in line)


@cache
def _loader() -> type[yaml.SafeLoader]:
    from jsonargparse._loaders_dumpers import get_yaml_default_loader

    default: Any = get_yaml_default_loader()  # type: ignore[no-untyped-call]

    class Strict(yaml.SafeLoader):
        """PyYAML's safe loader; an alias could repeat a text until memory is full."""

        # jsonargparse's, which know that 1e-3 is a number
        yaml_implicit_resolvers = default.yaml_implicit_resolvers

        @override
        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()  # type: ignore[no-untyped-call]
            if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) not in (None, "!"):
                text = "aliases and tags are not allowed"
                raise yaml.MarkedYAMLError(None, None, text, event.start_mark)
            return super().compose_node(parent, index)

        @override
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = set[str]()
            for key, _ in node.value:
                if str(key.value) in keys:
                    text = f"{key.value} is given twice"
                    raise yaml.MarkedYAMLError(None, None, text, key.start_mark)
                keys.add(str(key.value))
            return super().construct_mapping(node, deep)

    return Strict


def load_yaml(text: str) -> Any:
    """The value of a YAML text; raises a ``YAMLError`` if it has none."""
    try:
        require(len(text) <= MB, "config", "is larger than 1 MB")
        return yaml.load(text, Loader=_loader())
    except (RecursionError, TypeError, ValueError) as error:
        raise yaml.YAMLError(str(error)) from error


def read_yaml(path: str) -> dict[str, Any]:
    """The settings of a config file; raises a clear error if it holds none."""
    require(os.path.isfile(path), "config", "is not a file", path)
    try:
        settings = load_yaml(read_bytes(path, MB).decode())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        reason = getattr(error, "problem", None) or getattr(error, "strerror", None) or error
        raise SettingError("config", f"{line}{reason}", path) from error
    is_mapping = isinstance(settings, dict) and len(settings) > 0
    require(is_mapping, "config", "must be a mapping, lines of key: value", path)
    return settings  # type: ignore[no-any-return]
