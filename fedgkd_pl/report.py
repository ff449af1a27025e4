"""``fedgkd-pl report``: the accuracies of finished runs in one table."""

import json
from pathlib import Path
from typing import Any

from fedgkd_pl.errors import SettingError

COLUMNS = {
    "best": "best_test_acc",
    "at round": "best_round",
    "final": "final_test_acc",
    "last 10": "mean_last_10_test_acc",
    "at best val": "test_acc_at_best_val",
}


def read_summaries(paths: list[str]) -> list[tuple[Path, dict[str, Any]]]:
    """The newest summary under each path.

    Args:
        paths: run folders (``runs/<name>/version_k``) or the folders above them.
    """
    found = []
    for path in map(Path, paths):
        files = sorted(path.rglob("summary.json"), key=lambda file: file.stat().st_mtime)
        if not files:
            raise SettingError("runs", "no finished run (summary.json) below", path)
        found.append((files[-1].parent, json.loads(files[-1].read_text(encoding="utf-8"))))
    return found


def report(paths: list[str]) -> None:
    """Prints the table.

    Args:
        paths: run folders, or folders above them, of which the newest run counts.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(title="test accuracy, %")
    for name in ("method", "dataset", "seed", "rounds", *COLUMNS, "MB down", "run"):
        right = name not in ("method", "dataset", "run")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "run")
    for folder, summary in read_summaries(paths):
        accuracies = [
            f"{100 * value:.2f}" if isinstance(value, float) else str(value)
            for value in (summary[key] for key in COLUMNS.values())
        ]
        head = [str(summary[key]) for key in ("method", "dataset", "seed", "rounds")]
        table.add_row(*head, *accuracies, f"{summary['bytes_down'] / 1e6:.1f}", str(folder))
    console = Console()
    console.print(table) if console.is_terminal else Console(width=140).print(table)
