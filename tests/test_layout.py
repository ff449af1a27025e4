"""Where tests are: in the folder of the package they test, each on its own."""

import re

from tests.conftest import REPO

TESTS = REPO / "tests"
OURS = {"device", "oracles", "support"}  # for several tests


def test_every_folder_is_that_of_a_package() -> None:
    folders = {file.parent.name for file in TESTS.glob("*/*.py")} - OURS
    assert folders and all((REPO / "fedgkd_pl" / name).is_dir() for name in folders), folders


def test_no_test_imports_from_another() -> None:
    for file in TESTS.rglob("*.py"):
        found = re.findall(
            r"^\s*(?:from|import) tests\S*\btest_\w+", file.read_text(), re.MULTILINE
        )
        assert not found, file
