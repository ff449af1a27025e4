"""Whether one method is ahead of another, over seeds."""

from collections.abc import Mapping, Sequence
from statistics import mean, stdev

ENOUGH = 3  # seeds for a test of significance


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation (of a sample) of some percentages."""
    if not values:
        return "-"
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def lead(first: str, best: Mapping[int, float], second: str, other: Mapping[int, float]) -> str:
    """By how much one is ahead of another over the seeds they share, and if that is much."""
    seeds = sorted(best.keys() & other.keys())
    ahead = [best[seed] - other[seed] for seed in seeds]
    if not seeds:
        return f"{first} and {second} have no seed in common"
    if not any(round(each, 6) for each in ahead):
        return f"{first} and {second} are equal"
    if round(mean(ahead), 2) == 0:
        apart = spread(ahead).removeprefix("-")
        return f"{first} and {second} are level: {apart} points apart over {_seeds(seeds)}"
    if mean(ahead) < 0:  # over the seeds that both have
        return lead(second, other, first, best)
    text = f"{first} is ahead of {second} by {spread(ahead)} points"
    if len(seeds) < 2:
        return f"{text}; one seed says nothing of its significance"
    if len({round(each, 6) for each in ahead}) == 1:  # the last bits differ, and prove nothing
        no_test = "; without any spread there is no test" if len(seeds) >= ENOUGH else ""
        return f"{text} in each of {len(seeds)} seeds{no_test}"
    if len(seeds) < ENOUGH:
        return f"{text} over {_seeds(seeds)}; a test needs {ENOUGH}"
    from scipy.stats import ttest_1samp

    p = float(ttest_1samp(ahead, 0).pvalue)
    shown = f"p = {p:.3f}" if p >= 0.001 else "p < 0.001"
    verdict = "significant" if p < 0.05 else "not significant"
    return f"{text} over {len(seeds)} seeds, paired t-test {shown}: {verdict} at 5 %"


def _seeds(seeds: Sequence[int]) -> str:
    return f"{len(seeds)} seed{'s' * (len(seeds) > 1)}"
