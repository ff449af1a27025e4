"""Every sample to exactly one client, whatever is asked."""

from pathlib import Path

import numpy as np
import pytest
from fedgkd_pl import IID, Dirichlet
from fedgkd_pl.data.partition import ClientIndex, Partition
from fedgkd_pl.errors import SettingError
from hypothesis import assume, given, settings
from hypothesis import strategies as st


def labels(samples: int, classes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, samples)


def cut(partition: Partition, y: np.ndarray, clients: int, seed: int = 0) -> ClientIndex:
    return partition(y, clients, np.random.default_rng(seed))


PARTITIONS = st.one_of(
    st.just(IID()),
    st.builds(
        Dirichlet,
        alpha=st.floats(0.05, 100),
        balanced=st.booleans(),
        min_size=st.just(0),
    ),
)


@settings(max_examples=60, deadline=None)
@given(PARTITIONS, st.integers(1, 60), st.integers(1, 2000), st.integers(2, 20), st.integers(0, 9))
def test_union_is_everything_and_nothing_is_shared(
    partition: Partition, clients: int, samples: int, classes: int, seed: int
) -> None:
    assume(samples >= clients)
    y = labels(samples, classes, seed)
    try:
        index = cut(partition, y, clients, seed)
    except SettingError as error:  # too skewed a draw for so few samples: said, not hidden
        assert error.key == "alpha"
        return
    assert len(index) == clients
    assert sorted(np.concatenate(list(index)).tolist()) == list(range(samples))
    again = cut(partition, y, clients, seed)
    assert all((a == b).all() for a, b in zip(index, again, strict=True))
    if isinstance(partition, IID) or (isinstance(partition, Dirichlet) and partition.balanced):
        assert index.sizes.max() - index.sizes.min() <= 1


@pytest.mark.parametrize("balanced", [True, False])
def test_another_seed_is_another_partition(balanced: bool) -> None:
    y = labels(1000, 10)
    a, b = (cut(Dirichlet(1.0, balanced), y, 10, seed) for seed in (0, 1))
    assert not np.array_equal(a.samples, b.samples)


def test_min_size_is_kept() -> None:
    y = labels(3000, 10)
    for seed in range(5):
        assert cut(Dirichlet(0.3, min_size=40), y, 20, seed).sizes.min() >= 40


def test_balanced_clients_hold_half_a_share_of_their_group_before_the_cut() -> None:
    """The re-cut makes sizes equal; skew must survive it."""
    y = np.repeat(np.arange(10), 450)
    counts = np.array(cut(Dirichlet(0.1, balanced=True), y, 20).label_counts(y, 10))
    assert (counts.sum(1) == 225).all()
    top = np.sort(counts, axis=1)[:, -3:].sum(1) / 225
    assert top.mean() > 0.85  # about 2.8 effective classes each


def effective_classes(index: ClientIndex, y: np.ndarray) -> float:
    counts = np.array(index.label_counts(y, 10), dtype=float)
    p = counts / counts.sum(1, keepdims=True)
    entropy = -np.sum(np.where(p > 0, p * np.log(np.maximum(p, 1e-300)), 0), axis=1)
    return float(np.exp(entropy).mean())


@pytest.mark.parametrize(("alpha", "expected"), [(1.0, 6.4), (0.5, 5.1), (0.1, 2.8)])
def test_skew_is_the_papers(alpha: float, expected: float) -> None:
    y = np.repeat(np.arange(10), 4500)  # CIFAR-10 is this, but for the order
    found = [
        effective_classes(cut(Dirichlet(alpha, balanced=True), y, 20, seed), y)
        for seed in range(30)
    ]
    assert np.mean(found) == pytest.approx(expected, abs=0.25)


def test_large_alpha_tends_to_iid() -> None:
    y = np.repeat(np.arange(10), 500)
    index = cut(Dirichlet(1e6), y, 5)
    shares = np.array(index.label_counts(y, 10)) / 500
    assert np.abs(shares - 0.2).max() < 0.02


@pytest.mark.parametrize(
    ("partition", "clients", "key"),
    [
        (lambda: Dirichlet(0.0), 5, "alpha"),
        (lambda: Dirichlet(-1.0), 5, "alpha"),
        (lambda: Dirichlet(float("nan")), 5, "alpha"),
        (lambda: Dirichlet(float("inf")), 5, "alpha"),
        (lambda: Dirichlet(1.0, min_size=30), 5, "min_size"),
        (lambda: Dirichlet(0.01, min_size=18, max_tries=20), 5, "alpha"),
        (lambda: IID(), 101, "num_clients"),
        (lambda: IID(), 0, "num_clients"),
    ],
)
def test_impossible_requests_are_answered(partition: object, clients: int, key: str) -> None:
    with pytest.raises(SettingError) as error:
        cut(partition(), labels(100, 10), clients)  # type: ignore[operator]
    assert error.value.key == key
    assert "\n" not in str(error.value)


def test_label_counts_by_hand() -> None:
    index = ClientIndex([np.array([0, 3]), np.array([1, 2, 4])])
    assert index.label_counts(np.array([0, 1, 1, 2, 0]), 3) == [[1, 0, 1], [1, 2, 0]]
    assert index.sizes.tolist() == [2, 3]
    with pytest.raises(IndexError):
        index[2]


def test_real_cifar_is_cut_as_the_paper_cuts_it(real_data: Path) -> None:
    from fedgkd_pl import CIFAR10

    for alpha, expected in ((1.0, 6.4), (0.5, 5.2), (0.1, 2.8)):
        found = []
        for seed in range(5):
            data = CIFAR10(
                data_dir=str(real_data), partition=Dirichlet(alpha, balanced=True), seed=seed
            )
            data.setup()
            assert data.client_data.index.sizes.tolist() == [2250] * 20
            assert (len(data.val), len(data.test)) == (5000, 10000)
            targets = data.client_data.examples.targets.numpy()
            found.append(effective_classes(data.client_data.index, targets))
        assert np.mean(found) == pytest.approx(expected, abs=0.5)
