"""The part of its samples that every client keeps to be tested on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import ByKey, Digits, Dirichlet, FederatedData
from fedgkd_pl.data.examples import Examples, Scale, Splits
from fedgkd_pl.errors import SettingError

from tests.conftest import Given, Table


class Counted(Table):
    """Classes 0, 1, 2 that a test can count: sample n is of class ``labels[n]`` and is n itself."""

    def __init__(self, parts: list[list[int]], labels: list[int], **kwargs: Any) -> None:
        super().__init__(partition=Given(parts), num_clients=len(parts), **kwargs)
        self.labels = labels

    def load(self) -> Splits:
        y = torch.tensor(self.labels)
        all_ = Examples(torch.arange(len(y)).float()[:, None], y, Scale(1))
        return Splits(all_, all_[:2])


def numbers(examples: Examples) -> list[int]:
    return [int(x) for x in examples.inputs[:, 0]]


def held(data: Any, split: str, client: int) -> list[int]:
    own = data.client_splits[split]
    return numbers(own.examples[own.rows(client)])


def trained(data: Any, client: int) -> list[int]:
    return numbers(data.client_data.owned(client))


def test_own_splits_are_disjoint_and_exhaustive_and_have_every_class_in_its_share() -> None:
    labels = [0] * 20 + [1] * 10 + [2] * 10
    parts = [[*range(0, 10), *range(20, 30)], [*range(10, 20), *range(30, 40)]]
    data = Counted(parts, labels, client_test_fraction=0.2, client_val_fraction=0.1)
    data.setup()
    for client, part in enumerate(parts):
        pieces = [held(data, "test", client), held(data, "val", client), trained(data, client)]
        assert sorted(n for piece in pieces for n in piece) == part
        counts = [np.bincount([labels[n] for n in piece], minlength=3).tolist() for piece in pieces]
        other = 1 if client == 0 else 2
        for found, each in zip(counts, (2, 1, 7), strict=True):
            assert found == [each if c in (0, other) else 0 for c in range(3)]
    assert len(left := data.client_data.examples) == 28, "what is kept never reaches a worker"
    assert left.targets.tolist() == [labels[n] for n in numbers(left)]
    summary = data.summary()
    assert summary["counts"] == [[7, 7, 0], [7, 0, 7]]
    assert (summary["num_client_test"], summary["num_client_val"]) == (8, 4)
    assert (
        data.client_data.index.sizes.tolist()
        == [14, 14]
        == [data.population.sizes[k] for k in (0, 1)]
    )


def test_a_client_keeps_the_last_sample_of_a_class_and_a_small_one_everything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = Counted([[0], [1, 2], [3, 4, 5, 6]], [0, 0, 1, 2, 2, 2, 2], client_test_fraction=0.5)
    data.setup()
    data.setup()
    assert trained(data, 0) == [0] and trained(data, 1) == [1, 2]
    assert len(held(data, "test", 2)) == len(trained(data, 2)) == 2
    assert data.client_splits["test"].clients == [2]
    (line,) = caplog.messages
    assert line.startswith("client_test_fraction: 2 of 3 clients are too small for a test split")
    with pytest.raises(SettingError, match="client_test_fraction: takes nothing"):
        Counted([[0], [1, 2]], [0, 0, 1], client_test_fraction=0.5).setup()


def test_the_draw_depends_on_the_partition_seed_and_the_client_alone() -> None:
    parts, labels = [[*range(20)], [*range(20, 40)]], [0] * 40

    def drawn(parts: list[list[int]] = parts, **kwargs: Any) -> list[int]:
        data = Counted(parts, labels, **({"client_test_fraction": 0.25} | kwargs))
        data.setup()
        return held(data, "test", 1)

    assert drawn() == drawn(participation=0.5, batch_size=3) == drawn([[*range(5)], parts[1]])
    assert drawn() == drawn(seed=9, partition_seed=0) != drawn(seed=9)
    assert drawn() == drawn(client_val_fraction=0.25), "validation is drawn after test"


def test_without_fractions_nothing_changes() -> None:
    plain = Digits(num_clients=5, partition=Dirichlet(alpha=0.5))
    zero = Digits(num_clients=5, partition=Dirichlet(alpha=0.5), client_test_fraction=0)
    part = Digits(num_clients=5, partition=Dirichlet(alpha=0.5), client_test_fraction=0.2)
    other = Digits(num_clients=5, partition=Dirichlet(alpha=0.5), client_val_fraction=0.2)
    # SHA-256 of this partition before there were such fractions
    before = "920f29239f27180d67cd1df187f7e7613d25b2a97676d6938d739ce213f2fc33"
    assert plain.fingerprint() == zero.fingerprint() == before
    assert len({each.fingerprint() for each in (plain, part, other)}) == 3
    assert zero.summary() == plain.summary() and not zero.client_splits
    assert "num_client_test" not in zero.summary()


def test_a_test_set_cut_from_owners_is_theirs_where_owners_are_clients(tmp_path: Path) -> None:
    x, y = np.arange(40, dtype=np.float32)[:, None], np.arange(40) % 2
    owners = np.repeat(["gil", "cyd", "eve", "ann"], 10)
    data = FederatedData.from_arrays(x, y, owners=owners, num_clients=4, partition=ByKey())
    data.setup()
    assert [data.owner_names[own[0]] for own in data.owners_of] == ["ann", "cyd", "eve", "gil"]
    for client, owner in enumerate(data.owner_names):
        assert len(held(data, "test", client)) == 2
        assert (
            set(owners[held(data, "test", client)]) == {owner} == set(owners[trained(data, client)])
        )
    cut = FederatedData.from_arrays(x, y, owners=owners, num_clients=4)
    cut.setup()
    assert not cut.client_splits, "an IID client is no owner"
