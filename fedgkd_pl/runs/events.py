"""TensorBoard: how to look at runs, and the files of one that is resumed."""

import io
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any

from fedgkd_pl.runs.folder import EVENTS
from fedgkd_pl.storage.files import commit

log = logging.getLogger("fedgkd_pl")
# written anew: when the run ends, and by Dashboard when it goes on, with its callbacks of now
FINAL = ("hp/", "_hparams_/", "custom_scalars__config__")


def how_to_look(folder: Path) -> str:
    """The command, and the address of the charts: TensorBoard opens on Time Series, tag by tag."""
    address = "http://localhost:6006/#custom_scalars"
    return f"look:  tensorboard --logdir {quote(str(folder))}\n       {address}"


def rewind(folder: Path, rows: list[dict[str, float]]) -> None:
    """Rewrites TensorBoard's files to hold the committed rounds: none twice, none missing.

    Lightning logs a part of a round's values after its checkpoint is written; a run that was killed
    in between has them only in ``rows``, the values of the committed rounds by name.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    files = sorted(file for file in folder.glob(EVENTS) if file.is_file())
    last = max((int(row["round"]) for row in rows), default=0)
    seen: set[tuple[str, int]] = set()
    for number, file in enumerate(files):
        kept = []
        for event, record in _events(file):
            tags = [value.tag for value in event.summary.value]
            if event.step <= last and not any(tag.startswith(FINAL) for tag in tags):
                seen.update((tag, event.step) for tag in tags)
                kept.append(record)
        if number == len(files) - 1:
            for row in rows:
                step = int(row["round"])
                missing = [name for name in row if name != "round" and (name, step) not in seen]
                for name in missing:
                    value = Summary.Value(tag=name, simple_value=row[name])
                    event = Event(step=step, wall_time=time.time(), summary=Summary(value=[value]))
                    kept.append(event.SerializeToString())
        content = io.BytesIO()
        writer = RecordWriter(content)
        for record in kept:
            writer.write(record)
        commit(file, [content.getvalue()])


def _events(file: Path) -> Iterator[tuple[Any, bytes]]:
    """What a file holds, up to where it is damaged."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    records = RawEventFileLoader(str(file)).Load()
    while True:
        try:
            record = next(records)
            event = Event.FromString(record)
        except (StopIteration, OSError):
            return
        except Exception:  # TensorBoard and protobuf raise many kinds
            log.warning("%s is damaged: its end is left out", file)
            return
        yield event, record
