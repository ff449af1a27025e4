"""PAPERS.md names what exists."""

import re

import fedgkd_pl
from fedgkd_pl.methods.fedavg import FedAvg

from tests.conftest import REPO

TEXT = (REPO / "PAPERS.md").read_text(encoding="utf-8")


def test_every_method_has_its_row() -> None:
    exported = [getattr(fedgkd_pl, name) for name in fedgkd_pl.__all__ if name[0].isupper()]
    methods = {c.__name__ for c in exported if isinstance(c, type) and issubclass(c, FedAvg)}
    rows = set(re.findall(r"`methods/\w+\.py` `(\w+)`", TEXT))
    assert rows == methods and len(rows) == 9


def test_every_file_it_names_exists() -> None:
    for name in re.findall(r"`(methods/\w+\.py)`", TEXT):
        assert (REPO / "fedgkd_pl" / name).is_file(), name
    for name in re.findall(r"`([\w/]+\.yaml)`", TEXT):
        assert (REPO / "configs" / name).is_file(), name
    for name in re.findall(r"`(test_\w+\.py)`", TEXT):
        assert list((REPO / "tests").rglob(name)), name
