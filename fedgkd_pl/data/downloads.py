"""Files that come from elsewhere: fetched, checked, and refused by name if they are damaged."""

import gzip
import hashlib
import io
import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PureWindowsPath
from typing import NamedTuple

from fedgkd_pl.errors import SettingError, StorageError, require
from fedgkd_pl.storage.files import DISK

LARGEST = 2**30  # bytes of a file, or of all that an archive holds; Tiny-ImageNet has a third of it
DEEPEST = 16  # folders within folders, which are removed by recursion


def read_checked(file: Path, checksum: str | None) -> bytes:
    """The bytes of a file whose checksum is right.

    Args:
        file: a regular file of at most ``LARGEST`` bytes.
        checksum: its MD5 (32 digits) or SHA-256 (64); None where there is none to compare with.
    """
    try:
        status = file.stat()
        fits = stat.S_ISREG(status.st_mode) and status.st_size <= LARGEST  # a pipe never ends
        content = file.read_bytes() if fits else b""
    except (OSError, ValueError) as error:  # the name may be invalid
        reason = getattr(error, "strerror", None) or error
        raise SettingError("data_dir", f"{file}: {reason}") from error
    require(fits, "data_dir", f"{file} is no file of at most {LARGEST} bytes")
    if checksum is not None:
        algorithm = "md5" if len(checksum) == 32 else "sha256"
        actual = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
        if actual != checksum:
            differ = f"{algorithm} {actual[:8]}…, not {checksum[:8]}…"
            reason = f"is damaged or not the original ({differ}): delete it and fetch it again"
            raise SettingError("data_dir", f"{file} {reason}")
    return content


def read_text(file: Path, checksum: str | None) -> str:
    """The text of a file whose checksum is right; see :func:`read_checked`."""
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

    created = next((folder for folder in target.parents if folder.exists()), None)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        download_url(url, str(target.parent), part.name, checksum)
        part.replace(target)
    except (OSError, RuntimeError) as error:
        part.unlink(missing_ok=True)
        folder = target.parent
        while folder != created and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()  # nothing came: leave nothing behind
            folder = folder.parent
        why = " ".join(str(error).split()) or type(error).__name__
        reason = f"{target.name} is not there and cannot be downloaded ({why}): {instead}"
        raise SettingError("data_dir", reason) from error


def extract(archive: Path, checksum: str | None, wanted: Sequence[str], folder: Path) -> None:
    """Takes files or folders out of a ``.zip`` or ``.tar.gz``, all of them or none.

    Every member is checked before the first is written: one that is no plain file or folder, or
    whose name leads elsewhere, makes the archive hostile, and no part of it is used. It is
    unpacked to a temporary folder and moved when complete.

    Args:
        checksum: as for :func:`read_checked`, compared before the archive is opened.
        wanted: the paths of what is wanted, within the archive.
        folder: where each of them goes, under the last part of its path.
    """
    content = read_checked(archive, checksum)
    part = None
    try:
        members, total = [], 0
        for member in (_zip if archive.suffix == ".zip" else _tar)(content):
            path = PureWindowsPath(member.name)  # it knows the slashes of all systems, and drives
            total += member.size
            if path.anchor or ".." in path.parts or len(path.parts) > DEEPEST:
                raise ValueError(f"{member.name!r:.80} leads out of the folder, or too deep")
            if not member.plain:
                raise ValueError(f"{member.name!r:.80} is no plain file or folder")
            if total > LARGEST:
                raise ValueError(f"it holds more than {LARGEST} bytes")
            members.append((path.parts, member))
        part = Path(tempfile.mkdtemp(".part", f"{archive.name}.", folder))
        for parts, member in members:
            target = part.joinpath(*parts)
            (target.parent if member.read else target).mkdir(parents=True, exist_ok=True)
            if member.read:
                target.write_bytes(member.read())
        for name in wanted:
            target = folder / Path(name).name
            if not (part / name).exists():
                raise ValueError(f"it has no {name}")
            if not target.is_dir():  # else another run has just done the same
                (part / name).replace(target)
    except (OSError, EOFError, RuntimeError, ValueError, *_DAMAGE) as error:
        if getattr(error, "errno", None) in DISK:
            raise StorageError(folder, error) from error
        reason = f"{archive} is damaged or hostile ({error!s:.200}): delete it and fetch it again"
        raise SettingError("data_dir", reason) from error
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)


_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error)


class _Member(NamedTuple):
    """A member of an archive, as it declares itself; a folder has nothing to read."""

    name: str
    size: int
    plain: bool
    read: Callable[[], bytes] | None


def _tar(content: bytes) -> Iterator[_Member]:
    unpacked = io.BytesIO()  # bounded before tarfile reads as much as a header declares
    with gzip.open(io.BytesIO(content)) as stream:
        while chunk := stream.read(2**20):
            unpacked.write(chunk)
            if unpacked.tell() > LARGEST:
                raise ValueError(f"it holds more than {LARGEST} bytes")
    unpacked.seek(0)
    source = tarfile.open(fileobj=unpacked, mode="r:")
    for info in source:
        sized = info.size >= 0 and not info.issparse()
        plain = sized and info.type in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE)

        def read(info: tarfile.TarInfo = info) -> bytes:
            return source.extractfile(info).read()  # type: ignore[union-attr]

        yield _Member(info.name, info.size, plain, None if info.isdir() else read)


def _zip(content: bytes) -> Iterator[_Member]:
    source = zipfile.ZipFile(io.BytesIO(content))
    for info in source.infolist():
        mode = stat.S_IFMT(info.external_attr >> 16)
        methods = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        plain = mode in (0, stat.S_IFREG, stat.S_IFDIR) and info.compress_type in methods

        def read(info: zipfile.ZipInfo = info, size: int = info.file_size) -> bytes:
            info.file_size = size + 1  # else zipfile stops there, and a larger file is not noticed
            data = source.read(info)
            if len(data) != size:
                raise ValueError(f"{info.filename!r:.80} is not as large as it says")
            return data

        name = info.orig_filename  # zipfile's own is cut at the first NUL
        yield _Member(name, info.file_size, plain, None if name.endswith("/") else read)
