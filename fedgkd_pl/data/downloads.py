"""Files that come from elsewhere: fetched, checked, and named in the error if they are damaged."""

import hashlib
import tarfile
from collections.abc import Sequence
from pathlib import Path
from shutil import unpack_archive
from tempfile import TemporaryDirectory

from fedgkd_pl.errors import SettingError, StorageError, require
from fedgkd_pl.storage.files import DISK, read_bytes

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
        if hashlib.new(algorithm, content, usedforsecurity=False).hexdigest() != checksum:
            reason = f"is damaged or not the original ({algorithm}): delete it, fetch it again"
            raise SettingError("data_dir", f"{file} {reason}")
    return content


def read_text(file: Path, checksum: str | None) -> str:
    """Reads a UTF-8 file as :func:`read_checked` does; bytes that are no text become a mark."""
    return read_checked(file, checksum).decode(errors="replace")


def provide(
    folder: Path, names: Sequence[str], url: str, checksum: str | None, inside: str = ""
) -> None:
    """Makes files or folders be in a folder: those that are missing are fetched, all or none.

    Args:
        url: of the file, or of a ``.zip`` or ``.tar.gz``, which stays; empty: fetch nothing.
        checksum: its MD5, compared before it is opened; None where the source has none.
        inside: the folder within the archive.
    """
    missing = [name for name in names if not (folder / name).exists()]
    if not missing:
        return
    instead = f"put {', '.join(names)} into it"
    require(bool(url), "data_dir", f"{missing[0]} is not there: {instead}", str(folder))
    from torchvision.datasets.utils import download_url

    archive = folder / url.rpartition("/")[2]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(".part", f"{archive.name}.", folder) as part:
            if not archive.exists():
                download_url(url, part, archive.name, checksum)
                Path(part, archive.name).replace(archive)
            if archive.name in names:
                return
            read_checked(archive, checksum)
            tar = archive.suffix == ".gz" and hasattr(tarfile, "data_filter")  # early 3.11 has none
            unpack_archive(archive, part, **({"filter": "data"} if tar else {}))  # type: ignore[arg-type]
            for name in missing:
                if not (folder / name).exists():  # else another run has just done the same
                    Path(part, inside, name).replace(folder / name)
    except Exception as error:  # a network, or a damaged archive, fails in any way
        if getattr(error, "errno", None) in DISK:
            raise StorageError(folder, error) from error
        why = " ".join(str(error).split()) or type(error).__name__
        reason = f"{archive} cannot be fetched, or is damaged ({why:.200}): delete it, or {instead}"
        raise SettingError("data_dir", reason) from error
