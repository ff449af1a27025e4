"""Every sample to exactly one client, whatever is asked."""

import numpy as np
import pytest
from fedgkd_pl import IID, ByKey, Dirichlet, Pathological, QuantitySkew, Shards
from fedgkd_pl.data.partition import ClientIndex, Partition, effective_classes, heterogeneity
from fedgkd_pl.errors import SettingError
from hypothesis import assume, given, settings
from hypothesis import strategies as st


def labels(samples: int, classes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, samples)


def cut(partition: Partition, y: np.ndarray, clients: int, seed: int = 0) -> ClientIndex:
    return partition(y, clients, np.random.default_rng(seed))


PARTITIONS = st.one_of(
    st.just(IID()),
    st.builds(Dirichlet, st.floats(0.05, 100), st.booleans(), st.just(0)),
    st.builds(Pathological, st.integers(1, 12)),
    st.builds(Shards, st.integers(1, 5)),
    st.builds(QuantitySkew, st.floats(0.05, 100), st.integers(0, 3)),
)


@settings(max_examples=150, deadline=None)
@given(PARTITIONS, st.integers(1, 200), st.integers(1, 3000), st.integers(2, 20), st.integers(0, 9))
def test_union_is_everything_and_nothing_is_shared(
    partition: Partition, clients: int, samples: int, classes: int, seed: int
) -> None:
    assume(samples >= clients)
    y = labels(samples, classes, seed)
    try:
        index = cut(partition, y, clients, seed)
    except SettingError as error:  # impossible with so few samples: said, not hidden
        assert error.key in (*vars(partition), "num_clients")
        return
    assert len(index) == clients
    assert sorted(np.concatenate(list(index)).tolist()) == list(range(samples))
    again = cut(partition, y, clients, seed)
    assert all((a == b).all() for a, b in zip(index, again, strict=True))
    counts = np.array(index.label_counts(y, classes))
    if isinstance(partition, IID) or (isinstance(partition, Dirichlet) and partition.balanced):
        assert index.sizes.max() - index.sizes.min() <= 1
    if isinstance(partition, Pathological):
        assert ((counts > 0).sum(1) <= partition.classes_per_client).all()
    if isinstance(partition, QuantitySkew):
        assert index.sizes.min() >= partition.min_size


@pytest.mark.parametrize(("alpha", "expected"), [(1.0, 6.4), (0.5, 5.1), (0.1, 2.8)])
def test_skew_is_the_papers(alpha: float, expected: float) -> None:
    y = np.repeat(np.arange(10), 4500)  # CIFAR-10 is this, but for the order
    found = [
        effective_classes(cut(Dirichlet(alpha, balanced=True), y, 20, seed).label_counts(y, 10))
        for seed in range(30)
    ]
    assert np.mean(found) == pytest.approx(expected, abs=0.25)


@pytest.mark.parametrize("balanced", [True, False])
def test_when_all_of_a_class_goes_to_full_clients_it_is_drawn_again(balanced: bool) -> None:
    """At α → 0 a class goes to one client; once that is full, all proportions left are zero."""
    y = np.repeat(np.arange(10), 30)
    with np.errstate(all="raise"):  # 0/0 would give all of a class to one client
        index = cut(Dirichlet(1e-4, balanced=balanced, min_size=0), y, 10)
    assert sorted(index.samples.tolist()) == list(range(300))


@pytest.mark.parametrize(
    ("partition", "clients", "key"),
    [
        (lambda: Dirichlet(float("nan")), 5, "alpha"),
        (lambda: Dirichlet(1.0, min_size=30), 5, "min_size"),
        (lambda: Dirichlet(0.01, min_size=18), 5, "alpha"),
        (lambda: Pathological(11), 5, "classes_per_client"),
        (lambda: Pathological(1), 5, "classes_per_client"),
        (lambda: Shards(21), 5, "shards_per_client"),
        (lambda: QuantitySkew(0.01, min_size=15), 5, "beta"),
        (lambda: ByKey(), 5, "partition"),
        (lambda: IID(), 101, "num_clients"),
    ],
)
def test_impossible_requests_are_answered(
    partition: object, clients: int, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedgkd_pl.data.partition.MAX_TRIES", 20)
    with pytest.raises(SettingError, match=f"^{key}: "):
        cut(partition(), labels(100, 10), clients)  # type: ignore[operator]


def test_pathological_and_shards_give_few_classes() -> None:
    y = np.repeat(np.arange(10), 60)
    counts = np.array(cut(Pathological(3), y, 20).label_counts(y, 10))
    assert ((counts > 0).sum(1) == 3).all()
    assert ((counts > 0).sum(0) == 6).all()  # every class as often as any other
    assert (counts[counts > 0] == 10).all()
    for labels in (y, np.random.default_rng(0).permutation(y)):
        counts = np.array(cut(Shards(2), labels, 20).label_counts(labels, 10))
        assert (counts.sum(1) == 30).all()
        assert ((counts > 0).sum(1) <= 4).all() and (counts > 0).sum(1).mean() > 1.5


def test_quantity_skew_changes_sizes_and_not_labels() -> None:
    y = labels(20000, 4)
    index = cut(QuantitySkew(0.5), y, 10)
    assert index.sizes.max() > 4 * index.sizes.min()
    counts = np.array(index.label_counts(y, 4))[index.sizes > 500]
    assert np.abs(counts / counts.sum(1, keepdims=True) - 0.25).max() < 0.06


def test_by_key_keeps_owners_whole() -> None:
    keys = np.array([7, 7, 3, 9, 3, 7, 9, 9, 9])
    y = np.zeros(9, dtype=np.int64)
    rng = np.random.default_rng(0)
    three = ByKey()(y, 3, rng, keys)
    assert [sorted(part.tolist()) for part in three] == [[2, 4], [0, 1, 5], [3, 6, 7, 8]]
    two = ByKey()(y, 2, rng, keys)  # the four of 9; then 7 and 3 together
    assert sorted(two.sizes.tolist()) == [4, 5]
    with pytest.raises(SettingError, match="3 owners"):
        ByKey()(y, 4, rng, keys)


def test_heterogeneity_by_hand() -> None:
    alike = heterogeneity([[5, 5], [5, 5]])
    assert alike["effective_classes"] == pytest.approx(2) and alike["total_variation"] == 0
    apart = heterogeneity([[8, 0], [0, 2]])
    assert apart["effective_classes"] == pytest.approx(1)
    # labels of all: (0.8, 0.2); distances 0.2 and 0.8
    assert apart["total_variation"] == pytest.approx(0.5)
    assert (apart["size_min"], apart["size_max"], apart["size_std"]) == (2, 8, 3)
    with_empty = heterogeneity([[8, 0], [0, 2], [0, 0]])
    assert with_empty["effective_classes"] == pytest.approx(1) and with_empty["size_min"] == 0


def test_label_counts_by_hand() -> None:
    index = ClientIndex([np.array([0, 3]), np.array([1, 2, 4])])
    assert index.label_counts(np.array([0, 1, 1, 2, 0]), 3) == [[1, 0, 1], [1, 2, 0]]
    assert index.sizes.tolist() == [2, 3]
    with pytest.raises(IndexError):
        index[2]
