"""What fuzzing found or had never seen before, again (``make fuzz`` adds to it)."""

from pathlib import Path

import pytest

from tests.support import fuzz
from tests.support.formats import small_texts

CASES = sorted(fuzz.CORPUS.glob("*-*"))
FAST = [*CASES[::6], *(file for file in CASES if not file.name.startswith("config"))]


@pytest.mark.parametrize(
    "file",
    [pytest.param(f, marks=[] if f in FAST else pytest.mark.faults, id=f.name) for f in CASES],
)
def test_the_corpus_is_answered(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kind, content = file.name.removeprefix("FOUND-").rsplit("-", 1)[0], file.read_bytes()
    if kind == "config":
        reason, _ = fuzz.try_config(content)
    elif kind == "checkpoint":
        reason, _ = fuzz.try_checkpoint(content)
    else:
        folder = small_texts(tmp_path, monkeypatch)
        reason, _ = fuzz.try_data(kind.replace("-", " "), content, folder)
    assert not reason


def test_there_is_a_corpus() -> None:
    assert len(CASES) > 20
