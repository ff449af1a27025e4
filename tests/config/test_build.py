"""``build``: the same objects for the command line and a notebook; nothing is left behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fedgkd_pl.config.build import build
from fedgkd_pl.errors import SettingError

from tests.support.parsing import state

Run = Callable[..., tuple[int, str, str]]
SMALL: dict[str, Any] = {"model.engine.workers": 1, "trainer.enable_progress_bar": False}


def test_a_notebook_gets_the_files_and_bits_of_the_command_line(run: Run, tmp_path: Path) -> None:
    flags = ("--config", "smoke.yaml", "--model.engine.workers", "1", "--rounds", "2")
    assert run("fit", *flags, "--output_dir", "cli")[0] == 0
    folder = build("smoke", rounds=2, output_dir="python", **SMALL).fit()
    assert folder is not None and folder.path == Path("python/smoke/version_0")
    there, here = tmp_path / "cli/smoke/version_0", folder.path
    names = {file.name for file in there.iterdir() if "tfevents" not in file.name}
    assert names == {file.name for file in here.iterdir() if "tfevents" not in file.name}
    for name in ("global.safetensors", "metrics.csv", "partition.json"):
        assert (there / name).read_bytes() == (here / name).read_bytes(), name


def test_settings_are_files_mappings_and_overrides_later_ones_win(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("rounds: 7\nname: mine\n")
    more = {"model": {"class_path": "FedGKD", "init_args": {"gamma": 0.5}}, "name": "other"}
    settings = build(["smoke", file, more], **{"model.gamma": 0.7}).settings
    assert (settings["rounds"], settings["name"]) == (7, "other")
    assert settings["model"]["init_args"]["gamma"] == 0.7


def test_a_wrong_setting_is_an_exception_not_an_exit() -> None:
    with pytest.raises(SettingError) as caught:
        build("smoke", rounds=0)
    assert str(caught.value) == "rounds: must be from 1 to 2147483647 (got 0)"


def test_a_refused_run_is_free_again(run: Run, tmp_path: Path) -> None:
    folder = build("smoke", rounds=1, output_dir="runs", **SMALL).fit()
    assert folder is not None
    for _ in range(2):
        with pytest.raises(SettingError, match="seed_everything"):
            build(resume=folder.path, rounds=2, seed_everything=5).fit()
    with pytest.raises(SettingError, match="no such setting"):
        build(resume=folder.path, nonsense=1)
    build(resume=folder.path, rounds=2).fit()


def test_jsonargparse_is_as_it_was_after_a_build() -> None:
    """After an import: see test_imports.py."""
    before = state()
    build("smoke")
    assert state() == before
    with pytest.raises(SettingError):
        build("smoke", nonsense=1)
    assert state() == before
