"""Configs with anything anywhere: success, or one line and an exit code; no traceback."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.conftest import REPO
from tests.support.runs import Run

QUICK = ("--rounds", "1", "--model.engine.workers", "1", "--trainer.fast_dev_run", "true")
METHODS = sorted((REPO / "configs" / "methods").glob("*.yaml"))
NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2.5, 1e20, -0.0, float("nan"), float("inf"), "", "x", "auto"),
    *([], {}, [1, [2]], {"class_path": "os.system"}, {"init_args": 3}, "FedGKD", "torch.nn.Linear"),
    *("é\u202e\n", "1e-3", "!!python/name:os.system", "${HOME}", "a.yaml", "null", 10**30, "../.."),
    *({"class_path": "fedgkd_pl.MLP", "init_args": {"hidden": [1]}}, "lightning.pytorch.Trainer"),
)
TRIALS = 30 * int(os.environ.get("FEDGKD_TRIALS", "10"))
FUZZING = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
LARGE = re.compile(r"\d{3,}|e\d\d?")  # a sound setting may cost hours: too many clients or layers


def tree_of(method: Path) -> dict[str, Any]:
    """A method on the digits."""
    tree = yaml.safe_load((REPO / "configs" / "protocols" / "digits.yaml").read_text("utf-8"))
    model = yaml.safe_load(method.read_text("utf-8"))["model"]
    own = model.get("init_args", {})
    tree["model"]["class_path"] = model["class_path"]
    init_args = tree["model"]["init_args"]
    init_args["net"]["init_args"] |= own.pop("net", {}).get("init_args", {})
    init_args |= own
    return tree  # type: ignore[no-any-return]


def places(tree: Any) -> list[tuple[dict[str, Any], str]]:
    """Every mapping of a tree with each of its keys."""
    here = list(tree.items()) if isinstance(tree, dict) else []
    return [found for key, value in here for found in ((tree, key), *places(value))]


@pytest.mark.nightly
@settings(FUZZING, max_examples=TRIALS)
@given(st.sampled_from(METHODS), st.integers(0, 10**6), st.sampled_from(NASTY), st.data())
def test_any_config_has_an_answer(
    run: Run, tmp_path: Path, method: Path, place: int, value: Any, data: Any
) -> None:
    tree = tree_of(method)
    group, key = places(tree)[place % len(places(tree))]
    group[data.draw(st.sampled_from([key, f"{key}s", f"{key}.x"]))] = value
    content = yaml.safe_dump(tree, allow_unicode=True).encode()
    cut = data.draw(st.integers(0, len(content)) | st.just(len(content)))
    content = content[:cut] + data.draw(st.just(b"") | st.binary(max_size=4)) + content[cut:]
    assume(not LARGE.search(content.decode(errors="ignore")))
    for file in tmp_path.iterdir():
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    (tmp_path / "bad.yaml").write_bytes(content)
    code, _, err = run("fit", "--config", "bad.yaml", *QUICK)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code in (0, 2, 3, 4) and "Traceback" not in err
    assert len(errors) == (code != 0)
    if code == 2:
        assert [file.name for file in tmp_path.rglob("*")] == ["bad.yaml"]
