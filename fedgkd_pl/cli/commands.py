"""From the words of a command to its exit code: what comes before the parser, and every error."""

import errno
import logging
import sys
import threading
import warnings
from importlib import import_module
from os.path import isfile  # which, unlike Path's, takes a name of any length
from pathlib import Path

from fedgkd_pl.errors import RunFailed, SettingError, StorageError, require
from fedgkd_pl.settings.allowed import allow
from fedgkd_pl.settings.build import FederatedCLI
from fedgkd_pl.settings.files import expand
from fedgkd_pl.storage.files import DISK, check_folder
from lightning.fabric.utilities.exceptions import MisconfigurationException

imported: set[str] = set()  # the user's modules, of this command


def run(words: list[str], kind: type[FederatedCLI] = FederatedCLI) -> int:
    """Runs a command of the Trainer.

    Args:
        words: the command and its arguments. ``--debug`` among them lets errors through whole;
            ``--import MODULE`` imports the user's own classes, from the current folder too.
        kind: what makes something of the settings.

    Returns:
        The exit code.
    """
    imported.clear()
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    # Lightning speaks of epochs, of a cloud service and of its own deprecations.
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in (
        "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
        "Be aware that when using `ckpt_path`, callbacks",
        "Checkpoint directory .* exists and is not empty",
        "Initializing zero-element tensors is a no-op",
    ):
        warnings.filterwarnings("ignore", text)
    threading.excepthook = _quiet_if_full
    try:
        export = take_export(words) if words[0] == "partition" else None
        words, resume = prepare(words)
        only_partition = words[0] == "partition"
        if only_partition:
            words[0] = "fit"  # the same settings
        kind(words, only_partition, resume, export)
    except (SettingError, MisconfigurationException) as error:
        return _tell(error, 2, debug)
    except RunFailed as error:
        return _tell(error, 3, debug)
    except StorageError as error:
        return _tell(error, 4, debug)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK:
            return _tell(StorageError(error.filename or "output_dir", error), 4, debug)
        unexpected = RunFailed(f"{type(error).__name__}: {error} (--debug shows where)")
        unexpected.__cause__ = error
        return _tell(unexpected, 3, debug)
    finally:
        threading.excepthook = threading.__excepthook__
    return 0


def _quiet_if_full(failed: threading.ExceptHookArgs) -> None:
    """TensorBoard's writer meets a full disk, or none, in its thread; the main one will tell."""
    if getattr(failed.exc_value, "errno", None) not in (*DISK, errno.ENOENT):
        threading.__excepthook__(failed)


def _tell(error: Exception, code: int, debug: bool) -> int:
    if debug:
        raise error
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def take_export(words: list[str]) -> Path | None:
    """Takes ``--export FILE`` out of the words of ``partition``.

    Args:
        words: changed in place.
    """
    for place, word in enumerate(words):
        if word.split("=")[0] == "--export":
            name = word[9:] or "".join(words[place + 1 : place + 2])
            del words[place : place + (1 if word[9:] else 2)]
            fits = name.endswith((".json", ".npz"))
            require(fits, "export", "must be a file name that ends in .json or .npz", name)
            return Path(name)
    return None


def prepare(words: list[str]) -> tuple[list[str], Path | None]:
    """Imports what ``--import`` names, and finds the files that ``--config`` names.

    Args:
        words: the command and its arguments.

    Returns:
        The words for the parser, and the folder that ``--resume`` names.
    """
    rest: list[str] = []
    resume: Path | None = None
    waiting = iter(expand(words))
    for word in waiting:
        if word.split("=")[0] == "--import":
            import_users(word[9:] or next(waiting, ""))
        elif word.split("=")[0] == "--resume" and words[0] == "fit":
            require(resume is None, "resume", "one run at a time", resume)
            resume = Path(word[9:] or next(waiting, ""))
            config = resume / "config.yaml"
            require(isfile(config), "resume", "no run was begun there: no config.yaml", resume)
            check_folder(resume)
            rest[1:1] = ["--config", str(config)]
        else:
            rest.append(word)
    return rest, resume


def import_users(module: str, folder: Path | None = None) -> None:
    """Imports the user's module, so that a config may name its classes.

    Args:
        module: a name that Python can import, from the folder too.
        folder: by default the current one.
    """
    sys.path.insert(0, str(folder or Path.cwd()))
    require(all(map(str.isidentifier, module.split("."))), "import", "which module?", module)
    try:
        import_module(module)
        allow(module)
        imported.add(module)
    except ImportError as error:
        raise SettingError("import", str(error), module) from error
    except Exception as error:  # it is the user's code
        raise SettingError("import", f"{type(error).__name__}: {error}", module) from error
