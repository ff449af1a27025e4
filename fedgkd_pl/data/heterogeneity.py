"""Differences between the clients' label distributions and sizes."""

from collections.abc import Sequence

import numpy as np

Counts = Sequence[Sequence[int]]  # samples of each class, for every client


def effective_classes(counts: Counts) -> list[float]:
    """For every client with data exp(label entropy): 1 for one class, C for C equal ones."""
    p = _shares(counts)
    entropy = -np.sum(p * np.log(np.where(p > 0, p, 1)), axis=1)
    return [float(value) for value in np.exp(entropy)]


def heterogeneity(counts: Counts) -> dict[str, float]:
    """The figures of a partition.

    Returns:
        ``effective_classes``: mean over clients of the exponential of the label entropy.
        ``total_variation``: mean distance of a client's label distribution to that of all, in
        [0, 1]. ``size_min``, ``size_max``, ``size_std``: of the clients' sizes.
    """
    table = np.asarray(counts, dtype=float)
    sizes = table.sum(axis=1)
    everyone = table.sum(axis=0) / table.sum()
    distance = np.abs(_shares(counts) - everyone).sum(axis=1) / 2
    return {
        "effective_classes": float(np.mean(effective_classes(counts))),
        "total_variation": float(distance.mean()),
        "size_min": float(sizes.min()),
        "size_max": float(sizes.max()),
        "size_std": float(sizes.std()),
    }


def _shares(counts: Counts) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    table = np.asarray(counts, dtype=float)
    table = table[table.sum(axis=1) > 0]
    return table / table.sum(axis=1, keepdims=True)  # type: ignore[no-any-return]
