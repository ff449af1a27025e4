"""Files that come from elsewhere: fetched, checked, and named in the error if they are damaged."""

import hashlib
import os
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from fedgkd_pl.errors import SettingError, StorageError
from fedgkd_pl.storage.files import DISK
from fedgkd_pl.storage.reading import read_bytes

LARGEST = 2**30  # bytes of a file; Tiny-ImageNet has a third of it


def read_checked(file: Path, checksum: str | None) -> bytes:
    """Reads a file of at most ``LARGEST`` bytes and compares its checksum.

    Args:
        checksum: its MD5 (32 digits) or SHA-256 (64); None where there is none to compare with.
    """
    try:
        content = read_bytes(file, LARGEST)
    except (OSError, ValueError) as error:  # the name may be invalid
        reason = getattr(error, "strerror", None) or error
        raise SettingError("data_dir", f"{file}: {reason}") from error
    if checksum is not None:
        algorithm = "md5" if len(checksum) == 32 else "sha256"
        actual = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
        if actual != checksum:
            reason = (
                f"{file} is damaged or not the original ({algorithm}): delete it, fetch it again"
            )
            raise SettingError("data_dir", reason)
    return content


def read_text(file: Path, checksum: str | None) -> str:
    """Reads a UTF-8 file as :func:`read_checked` does."""
    try:
        return read_checked(file, checksum).decode()
    except UnicodeDecodeError as error:
        reason = f"{file} is not UTF-8 at byte {error.start}: fetch it again"
        raise SettingError("data_dir", reason) from error


def fetch(url: str, target: Path, checksum: str | None, instead: str) -> None:
    """Downloads a file, unless it is there; a download that was cut off is never taken for it.

    Args:
        checksum: its MD5, where the source has one.
        instead: what to do without a network, for the error.
    """
    if target.exists():
        return
    from torchvision.datasets.utils import download_url

    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        download_url(url, str(target.parent), part.name, checksum)
        part.replace(target)
    except (OSError, RuntimeError) as error:
        part.unlink(missing_ok=True)
        why = " ".join(str(error).split()) or type(error).__name__
        reason = f"{target.name} is not there and cannot be downloaded ({why}): {instead}"
        raise SettingError("data_dir", reason) from error


def extract(archive: Path, checksum: str | None, wanted: Sequence[str], folder: Path) -> None:
    """Takes files or folders out of a ``.zip`` or ``.tar.gz``, all of them or none.

    Args:
        checksum: as for :func:`read_checked`, compared before the archive is opened.
        wanted: the paths of what is wanted, within the archive.
        folder: where each of them goes, under the last part of its path.
    """
    read_checked(archive, checksum)
    try:
        with tempfile.TemporaryDirectory(".part", f"{archive.name}.", folder) as part:
            if archive.suffix == ".zip":
                with zipfile.ZipFile(archive) as zipped:
                    zipped.extractall(part)
            else:
                with tarfile.open(archive) as tar:
                    # no links, and no names, that lead out of the folder; early 3.11 lacks it
                    tar.extraction_filter = getattr(tarfile, "data_filter", None)
                    tar.extractall(part)
            for name in wanted:
                target = folder / Path(name).name
                if not target.is_dir():  # else another run has just done the same
                    Path(part, name).replace(target)
    except Exception as error:  # a damaged archive fails in any way
        if getattr(error, "errno", None) in DISK:
            raise StorageError(folder, error) from error
        reason = f"{archive} is damaged ({error!s:.200}): delete it and fetch it again"
        raise SettingError("data_dir", reason) from error
