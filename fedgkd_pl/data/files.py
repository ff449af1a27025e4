"""Files that come from elsewhere: fetched, checked, and refused by name if they are damaged."""

import hashlib
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

from fedgkd_pl.errors import SettingError

# What a pickled NumPy array needs, under its names before and after NumPy 2.
_HARMLESS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


def read_checked(file: Path, checksum: str | None) -> bytes:
    """The bytes of a file whose checksum is right.

    Args:
        file: which.
        checksum: its MD5 (32 digits) or SHA-256 (64); None where there is none to compare with.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise SettingError("data_dir", f"{file.name}: {error.strerror}", str(file)) from error
    if checksum is not None:
        kind = "md5" if len(checksum) == 32 else "sha256"
        found = hashlib.new(kind, content, usedforsecurity=False).hexdigest()
        if found != checksum:
            raise SettingError(
                "data_dir",
                f"{file.name} is damaged or not the original ({kind} {found[:8]}…, "
                f"not {checksum[:8]}…): fetch it again",
                str(file),
            )
    return content


def unpickle_arrays(content: bytes, name: str) -> Any:
    """A pickle of NumPy arrays and plain values; anything else in it is refused, not run.

    Args:
        content: the pickle.
        name: the file's name, for the error.
    """

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, attribute: str) -> Any:
            if (module, attribute) not in _HARMLESS:
                raise pickle.UnpicklingError(f"it names {module}.{attribute}")
            return super().find_class(module, attribute)

    try:
        return Unpickler(io.BytesIO(content), encoding="latin1").load()
    except (pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError) as error:
        raise SettingError("data_dir", f"{name} cannot be read: {error}") from error


def fetch(url: str, target: Path, checksum: str | None, instead: str) -> None:
    """Downloads a file, unless it is there.

    Args:
        url: its address.
        target: where to put it.
        checksum: its MD5, where the source has one.
        instead: what to do without a network, for the error.
    """
    if target.exists():
        return
    from torchvision.datasets.utils import download_url

    created = next((folder for folder in target.parents if folder.exists()), None)
    try:
        download_url(url, str(target.parent), target.name, checksum)
    except (OSError, RuntimeError) as error:
        target.unlink(missing_ok=True)
        folder = target.parent
        while folder != created and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()  # nothing came: leave nothing behind
            folder = folder.parent
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SettingError(
            "data_dir", f"{target.name} is not there and cannot be downloaded ({reason}): {instead}"
        ) from error


def unzip(archive: Path, folder: Path) -> None:
    """Extracts an archive; zipfile itself keeps every member inside the folder.

    Args:
        archive: the zip file.
        folder: where to.
    """
    try:
        with zipfile.ZipFile(archive) as source:
            source.extractall(folder)
    except (zipfile.BadZipFile, OSError) as error:
        raise SettingError("data_dir", f"{archive.name} is damaged: {error}") from error


def write_atomically(target: Path, content: bytes) -> None:
    """Writes a file that is whole or not there.

    Args:
        target: the file.
        content: its bytes.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    part.write_bytes(content)
    part.replace(target)
