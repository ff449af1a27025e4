"""Runs, however they are given."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from fedgkd_pl.experiments.runs import Run, find_runs
from fedgkd_pl.runs.folder import RunFolder


class HasRuns(Protocol):
    """What has runs, such as a study's result."""

    @property
    def runs(self) -> "Sequence[Run]":
        """Finished ones."""


Runs: TypeAlias = "Run | RunFolder | str | Path | HasRuns | Sequence[Runs]"


def runs_of(runs: Runs) -> list[Run]:
    """Runs, however they are given.

    Args:
        runs: one or several of: a run, its folder, what ``fit`` gives back, a folder above some,
            and anything that has ``runs``, such as what ``compare`` gives back.
    """
    if isinstance(runs, Run):
        return [runs]
    if isinstance(runs, str | Path | RunFolder):
        return find_runs([str(runs.path if isinstance(runs, RunFolder) else runs)])
    inner: Any = getattr(runs, "runs", runs)
    return [run for each in inner for run in runs_of(each)]
