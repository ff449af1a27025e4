"""``fedgkd-pl report``: the accuracies of finished runs in one table."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fedgkd_pl.errors import SettingError

ACCURACIES = {
    "best": "best_test_acc",
    "final": "final_test_acc",
    "last 10": "mean_last_10_test_acc",
    "at best val": "test_acc_at_best_val",
}
KEYS = ("method", "dataset", "seed", "rounds", "bytes_down")
Summary = dict[str, Any]


def read_summaries(paths: Sequence[str], newest: bool = True) -> list[tuple[Path, Summary]]:
    """The summaries of the finished runs below some folders.

    Args:
        paths: run folders (``runs/<name>/version_k``) or the folders above them.
        newest: only the newest run below each path; otherwise all of them.
    """
    found = []
    for path in map(Path, paths):
        files = sorted(path.rglob("summary.json"), key=lambda file: file.stat().st_mtime)
        if not files:
            raise SettingError("runs", "no finished run (summary.json) below", path)
        for file in files[-1:] if newest else files:
            found.append((file.parent, _read(file)))
    return found


def _read(file: Path) -> Summary:
    try:
        summary: Summary = json.loads(file.read_bytes())
        whole = {*ACCURACIES.values(), *KEYS} <= summary.keys()
    except (OSError, ValueError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise SettingError("runs", "not a summary.json of fedgkd-pl", file)
    return summary


def report(paths: Sequence[str], over_seeds: bool = False, markdown: bool = False) -> None:
    """Prints the table.

    Args:
        paths: run folders, or folders above them, of which the newest run counts.
        over_seeds: all runs, as mean ± standard deviation over the seeds of a method.
        markdown: as a Markdown table.
    """
    runs = read_summaries(paths, newest=not over_seeds)
    rows = _over_seeds([summary for _, summary in runs]) if over_seeds else _each(runs)
    if markdown:
        print("| " + " | ".join(rows[0]) + " |")
        print("|" + "---|" * len(rows[0]))
        for row in rows:
            print("| " + " | ".join(row.values()) + " |")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="test accuracy, %")
    for name in rows[0]:
        left = name in ("method", "dataset", "run")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "run")
    for row in rows:
        table.add_row(*row.values())
    console = Console()
    console.print(table) if console.is_terminal else Console(width=140).print(table)


def _each(runs: list[tuple[Path, Summary]]) -> list[dict[str, str]]:
    return [
        {
            **{key: str(summary[key]) for key in KEYS[:-1]},
            **{name: _percent([summary[key]]) for name, key in ACCURACIES.items()},
            "MB down": f"{summary['bytes_down'] / 1e6:.1f}",
            "run": str(folder),
        }
        for folder, summary in runs
    ]


def _over_seeds(summaries: list[Summary]) -> list[dict[str, str]]:
    groups: dict[tuple[Any, ...], list[Summary]] = {}
    for summary in summaries:
        key = (summary["dataset"], summary["rounds"], summary["method"])
        groups.setdefault(key, []).append(summary)
    return [
        {
            "method": str(method),
            "dataset": str(dataset),
            "rounds": str(rounds),
            "seeds": ", ".join(str(seed) for seed in sorted(s["seed"] for s in group)),
            **{name: _percent([s[key] for s in group]) for name, key in ACCURACIES.items()},
            "MB down": f"{mean(s['bytes_down'] for s in group) / 1e6:.1f}",
        }
        for (dataset, rounds, method), group in sorted(groups.items())
    ]


def _percent(values: list[float | None]) -> str:
    known = [100 * value for value in values if value is not None]
    if not known:
        return "-"
    return f"{mean(known):.2f}" + (f" ± {stdev(known):.2f}" if len(known) > 1 else "")
