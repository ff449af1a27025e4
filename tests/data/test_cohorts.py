"""Who takes part in a round, and partitions that others have made."""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import (
    CIFAR10,
    IID,
    AuthorsCohorts,
    AuthorsDirichlet,
    BernoulliCohorts,
    CohortsFromFile,
    CyclicCohorts,
    Dirichlet,
    Examples,
    FedAvg,
    FederatedDataModule,
    FromFile,
    HeldOut,
    Splits,
    WeightedCohorts,
)
from fedgkd_pl.cli.partition import show_partition
from fedgkd_pl.data.cohorts import Population
from fedgkd_pl.errors import SettingError

from tests.conftest import REPO, Table, fit, linear

LABELS = np.random.default_rng(3).integers(0, 10, 4000)


def population(size: int = 4, clients: int = 20, **kwargs: Any) -> Population:
    sizes = {client: 1 + client for client in range(clients)}
    return Population(range(clients), sizes, size, 0, kwargs.get("partition", IID()))


def replay(labels: np.ndarray, clients: int, alpha: float, seed: int) -> tuple[list, list]:
    """The authors' procedure in plain lists, written from its description alone."""
    random = np.random.RandomState(1000 * seed)
    rows = np.array([[index, label] for index, label in enumerate(labels)])
    random.shuffle(rows)
    owned: list[int] = []
    for group in range(clients // 10):
        members = rows[group * len(rows) * 10 // clients : (group + 1) * len(rows) * 10 // clients]
        smallest = 0
        while smallest < 0.5 * len(members) / 10:
            hands: list[list[int]] = [[] for _ in range(10)]
            for label in range(10):
                of_class = [int(index) for index, own in members if own == label]
                p = random.dirichlet([alpha] * 10)
                full = [len(hand) >= len(members) / 10 for hand in hands]
                p = np.where(full, 0, p)
                p = p / p.sum()
                cuts = [0, *(np.cumsum(p) * len(of_class)).astype(int)[:-1], len(of_class)]
                for hand, start, stop in zip(hands, cuts, cuts[1:], strict=False):
                    hand += of_class[start:stop]
            smallest = min(map(len, hands))
        owned += [index for hand in hands for index in hand]
    each = len(owned) // clients
    parts = [owned[each * k : each * (k + 1)] for k in range(clients)]
    cohorts = [random.choice(np.arange(1, clients + 1), 4, replace=False) for _ in range(100)]
    return parts, [[int(client) - 1 for client in cohort] for cohort in cohorts]


def test_the_authors_draws_are_replayed() -> None:
    expected, cohorts = replay(LABELS, 20, 0.5, 7)
    partition = AuthorsDirichlet(alpha=0.5)
    index = partition(LABELS, 20, np.random.default_rng(0))
    assert [part.tolist() for part in index] == expected
    found = [AuthorsCohorts().draw(r, population(partition=partition)) for r in range(1, 101)]
    assert found == cohorts
    assert partition.cohort(250, 20, 4) and partition.cohort(3, 20, 4) == cohorts[2]


def test_the_papers_split_and_cohorts(real_data: Path) -> None:
    data = CIFAR10(
        data_dir=str(real_data),
        partition=AuthorsDirichlet(alpha=0.1),
        participation=0.2,
        cohorts=AuthorsCohorts(),
    )
    data.setup()
    index = data.client_data.index
    assert index.sizes.tolist() == [2250] * 20
    assert hashlib.sha256(index.samples).hexdigest() == (
        "a8fb622145013574f200019919c162aa59d763ac3ffc60c5df7e73cb0963444b"
    )
    known = REPO / "tests" / "fixtures" / "authors_cifar10_alpha0.1_seed7.json"
    facts = json.loads(known.read_text())
    cohorts = [data.cohorts.draw(r, data.population) for r in range(1, 101)]
    cohorts = [sorted(client + 1 for client in cohort) for cohort in cohorts]
    assert cohorts == [sorted(cohort) for cohort in facts["cohorts_round_1_to_100"]]
    assert data.summary()["counts"] == facts["class_counts"]


def test_authors_draws_need_what_the_authors_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedgkd_pl.data.partition.MAX_TRIES", 3)
    for make, reason in (
        (lambda: Table(sizes=[3] * 10, cohorts=AuthorsCohorts()).setup(), "AuthorsDirichlet"),
        (lambda: AuthorsDirichlet()(LABELS, 12, np.random.default_rng(0)), "groups of ten"),
        (lambda: AuthorsDirichlet(1e-4)(LABELS, 20, np.random.default_rng(0)), "raise alpha"),
    ):
        with pytest.raises(SettingError, match=reason):
            make()


def test_a_weighted_draw_takes_the_large_more_often() -> None:
    """Of two clients with 1 and 3 samples, one a round: three times of four the second."""
    two = Population([0, 1], {0: 1, 1: 3}, 1, 0, IID())
    drawn = Counter(WeightedCohorts().draw(r, two)[0] for r in range(1, 2001))
    assert drawn[1] / 2000 == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_cyclic_draw_takes_everybody_in_turn(shuffle: bool) -> None:
    people = population(size=4, clients=20)
    drawn = [CyclicCohorts(shuffle).draw(r, people) for r in range(1, 16)]
    assert Counter(client for cohort in drawn for client in cohort) == dict.fromkeys(range(20), 3)
    assert drawn[:5] == drawn[5:10] and (drawn[0] == [0, 1, 2, 3]) is not shuffle
    odd = population(size=3, clients=5)
    assert CyclicCohorts(False).draw(2, odd) == [3, 4, 0]


def test_a_bernoulli_draw_varies_and_is_never_empty() -> None:
    people = population(size=1, clients=10)
    sizes = [len(BernoulliCohorts().draw(r, people)) for r in range(1, 3001)]
    assert min(sizes) == 1 and max(sizes) >= 4
    # the mean of a binomial(10, 0.1) that is not 0 is 1 / (1 − 0.9¹⁰)
    assert np.mean(sizes) == pytest.approx(1 / (1 - 0.9**10), abs=0.06)


def test_cohorts_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "cohorts.json"
    file.write_text(json.dumps({"cohorts": [[0, 2], [1], [2, 1, 0]]}))
    data = Table(sizes=[4, 5, 6], cohorts=CohortsFromFile(str(file)))
    model = FedAvg(linear())
    seen = []
    model.on_train_batch_start = lambda batch, _: seen.append(batch)  # type: ignore[assignment]
    fit(model, data, rounds=3)
    assert seen == [[0, 2], [1], [0, 1, 2]]
    with pytest.raises(SettingError, match="rounds: must be at most 3"):
        fit(FedAvg(linear()), Table(sizes=[4, 5, 6], cohorts=CohortsFromFile(str(file))), rounds=4)


class Photos(FederatedDataModule):
    """Forty samples in the order of their classes, as a folder of images has them."""

    name, num_classes = "photos", 4

    def load(self) -> Splits:
        labels = torch.arange(40) // 10
        inputs = torch.arange(40.0).reshape(40, 1)  # a sample is its number
        return Splits(*(Examples(inputs[:n], labels[:n], lambda x, _: x) for n in (40, 4)))


def samples_of(data: FederatedDataModule, client: int) -> list[int]:
    return numbers(data.client_data.owned(client))


def numbers(examples: Examples) -> list[int]:
    return [int(value) for value in examples[:].inputs.flatten()]


def owned_by_file(file: Path, seed: int, **kwargs: Any) -> Photos:
    data = Photos(num_clients=2, partition=FromFile(str(file)), seed=seed, **kwargs)
    data.setup()
    return data


def test_a_file_means_the_same_samples_under_every_seed(tmp_path: Path) -> None:
    """The validation part is drawn by the seed, from every class alike."""
    file = tmp_path / "split.json"
    even, odd = list(range(0, 40, 2)), list(range(1, 40, 2))
    file.write_text(json.dumps([even, odd]))
    held = []
    for seed in (0, 1):
        data = owned_by_file(file, seed)
        held.append(set(numbers(data.val)))
        assert len(held[-1]) == 4
        assert samples_of(data, 0) == [each for each in even if each not in held[-1]]
        assert samples_of(data, 1) == [each for each in odd if each not in held[-1]]
    assert held[0] != held[1]
    file.write_text(json.dumps({"clients": [even[1:], odd[2:]], "validation": [0, 1, 3]}))
    for seed in (0, 1):
        data = owned_by_file(file, seed)
        assert numbers(data.val) == [0, 1, 3]
        assert (samples_of(data, 0), samples_of(data, 1)) == (even[1:], odd[2:])
    file.write_text(json.dumps({"clients": [even[1:], odd], "validation": [40]}))
    with pytest.raises(SettingError, match="must be some of 40"):
        owned_by_file(file, 0)


def test_an_export_has_the_validation_and_the_public_part(tmp_path: Path) -> None:
    file = tmp_path / "split.json"
    drawn = Photos(num_clients=2, partition=Dirichlet(1.0), seed=3, public=HeldOut(0.25))
    show_partition(drawn, tmp_path, file)
    again = owned_by_file(file, 3, public=HeldOut(0.25))
    assert drawn.fingerprint() == again.fingerprint()
    other = owned_by_file(file, 4, partition_seed=3, public=HeldOut(0.25))
    assert samples_of(other, 0) == samples_of(drawn, 0)
    for seed, kwargs in (4, {"public": HeldOut(0.25)}), (3, {}):
        with pytest.raises(SettingError, match="has a public part"):
            owned_by_file(file, seed, **kwargs)


def test_a_wrong_file_of_cohorts_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cohorts.json"
    for content in ("{", "{}", "[]", "[1]", '["12"]', "[[0.5]]", "[[0, 0]]", "[[9]]", "[[]]"):
        file.write_text(content)
        with pytest.raises(SettingError, match=r"^(cohorts|path): "):
            Table(sizes=[4, 5, 6], cohorts=CohortsFromFile(str(file))).setup()


WRONG: list[tuple[Any, str]] = [
    ([[0, 1], [2, 999]], "partition: .* once"),
    ({"clients": [[0, 1], [2, 3]], "validation": [3]}, "partition: .* once"),
    ([[1, 2], [3]], "partition: .* once"),
    ([[0, 1, 2, 3]], "num_clients: "),
    ({"clients": [[0, 1], [2, 3]], "labels_sha256": "abc"}, "partition: .* labels differ"),
    ([["a"], [1]], "path: not a partition"),
    ({}, "path: not a partition"),
]


@pytest.mark.parametrize(("content", "reason"), WRONG)
def test_a_wrong_partition_file_is_refused(tmp_path: Path, content: Any, reason: str) -> None:
    file = tmp_path / "split.json"
    file.write_text(json.dumps(content))
    with pytest.raises(SettingError, match=reason):
        FromFile(str(file))(LABELS[:4], 2, np.random.default_rng(0))
