"""A study's result: its runs and tables."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
from fedgkd_pl.experiments.page import write_page
from fedgkd_pl.experiments.runs import Run
from fedgkd_pl.experiments.study import Study
from fedgkd_pl.experiments.table import Table
from fedgkd_pl.experiments.tables import Results, every_run, make_tables
from fedgkd_pl.runs.folder import how_to_look
from fedgkd_pl.storage.files import write_text


@dataclass(frozen=True, repr=False)
class StudyResult:
    """The finished runs of a study, those of earlier sessions too, and its tables.

    Attributes:
        failed: why, by the name of the cell.
    """

    study: Study
    folder: Path
    results: Results
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def runs(self) -> list[Run]:
        """The finished ones."""
        return [run for _, run in self.results]

    @property
    def frame(self) -> pd.DataFrame:
        """A row for every run: its labels, seed and measures, accuracies in percent."""
        return every_run(self.study, self.results)

    def records(self) -> list[dict[str, Any]]:
        """A mapping for every run."""
        return list(self.frame.to_dict("records"))

    @property
    def tables(self) -> list[Table]:
        """One, or one for each measure."""
        return make_tables(self.study, self.results, self.failed)

    def __repr__(self) -> str:
        """The tables, and what failed."""
        failed = [f"failed: {name}: {reason}" for name, reason in self.failed.items()]
        runs = f"{self.folder}, {len(self.runs)} runs"
        return "\n\n".join([runs, *map(repr, self.tables), *failed])

    def _repr_html_(self) -> str:
        """For a notebook."""
        tables = "".join(table.to_html() for table in self.tables)
        lines = [f"failed: {name}: {reason}" for name, reason in self.failed.items()]
        return tables + "".join(f"<p>{escape(line)}</p>" for line in (*lines, str(self.folder)))

    def write(self, page: bool = False) -> None:
        """Writes the tables beside the cells; and ``report.html`` where a run is finished."""
        tables = self.tables
        for name, text in (
            ("results.csv", self.frame.to_csv(index=False, float_format="%.4f")),
            ("table.md", "\n".join(table.to_markdown() for table in tables)),
            ("table.tex", "\n".join(table.to_latex() for table in tables)),
        ):
            write_text(self.folder / name, text)
        if page and self.runs:
            above = "".join(table.to_html() for table in tables)
            write_page(self.runs, self.folder / "report.html", self.study.title, above)

    def show(self, quiet: bool = False) -> int:
        """Prints the tables and, unless ``quiet``, where to look; gives back the exit code."""
        print("\n\n".join(map(repr, self.tables)))
        for name, reason in self.failed.items():
            print(f"error: {name}: {reason}", file=sys.stderr)
        files = "results.csv, table.md, table.tex" + (", report.html" if self.runs else "")
        print(f"wrote {self.folder}: {files}")
        if not quiet:
            print(how_to_look(self.folder))
        return 3 if self.failed else 0
