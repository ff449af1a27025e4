"""What an import of the package does and does not: torchvision works, jsonargparse is as it was."""

from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from fedgkd_pl import _torchvision

from tests.conftest import script

IMPORTS = """
import sys
from tests.support.parsing import state
before = state()
import fedgkd_pl
import fedgkd_pl.cli.main
assert state() == before
assert "torch" not in sys.modules, "importing the package alone must stay cheap"
import torchvision, torchmetrics, lightning
from fedgkd_pl import _torchvision
from torchvision.models import resnet18
print("declared", len(_torchvision._declared), len(list(resnet18().parameters())))
import lightning.pytorch.cli  # which changes it
before = state()
import fedgkd_pl.config.build
assert state() == before
fedgkd_pl.build("smoke")
afterwards = ("fedgkd_pl.experiments", "fedgkd_pl.plots")
assert not [name for name in sys.modules if name.startswith(afterwards)]
"""


def test_importing_the_package_makes_torchvision_importable_and_changes_nothing(
    tmp_path: Path,
) -> None:
    """In a new interpreter."""
    done = script(IMPORTS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "declared" and done.stdout.split()[2] == "62"


@pytest.mark.parametrize("loads", [True, False])
def test_operators_are_declared_only_where_they_do_not_load(
    loads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "_C.so").write_bytes(b"not a library")  # dlopen really fails
    library = MagicMock()
    monkeypatch.setattr(torch.library, "Library", library)
    monkeypatch.setattr(_torchvision, "_declared", [])
    if loads:
        monkeypatch.setattr(torch.ops, "load_library", lambda file: None)
    assert _torchvision.declare_missing_operators(tmp_path) is not loads
    names = [call.args[0].split("(")[0] for call in library().define.call_args_list]
    assert names == ([] if loads else ["nms", "qnms"])
