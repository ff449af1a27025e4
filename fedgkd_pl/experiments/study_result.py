"""What a study has come to: its runs and tables."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
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
        """A row for every run: its labels, seed and measures."""
        return every_run(self.study, self.results)

    def records(self) -> list[dict[str, Any]]:
        """A mapping for every run."""
        return list(self.frame.to_dict("records"))

    @property
    def tables(self) -> list[Table]:
        """One, or one for each measure."""
        return make_tables(self.study, self.results, self.failed)

    @property
    def exit_code(self) -> int:
        """The command line's: 3 where a cell failed."""
        return 3 if self.failed else 0

    def to_csv(self) -> str:
        """A row for every run, accuracies in percent."""
        return str(self.frame.to_csv(index=False, float_format="%.4f"))

    def to_markdown(self) -> str:
        """The tables."""
        return "\n".join(table.to_markdown() for table in self.tables)

    def to_latex(self) -> str:
        """The tables."""
        return "\n".join(table.to_latex() for table in self.tables)

    def to_html(self) -> str:
        """The tables."""
        return "".join(table.to_html() for table in self.tables)

    def __repr__(self) -> str:
        """The tables, and what failed."""
        failed = [f"failed: {name}: {reason}" for name, reason in self.failed.items()]
        runs = f"{self.folder}, {len(self.runs)} runs"
        return "\n\n".join([runs, *map(repr, self.tables), *failed])

    def _repr_html_(self) -> str:
        """For a notebook."""
        lines = [f"{name}: {reason}" for name, reason in self.failed.items()]
        failed = "".join(f"<p><b>failed</b> {escape(line)}</p>" for line in lines)
        return f"{self.to_html()}{failed}<p><code>{escape(str(self.folder))}</code></p>"

    def write(self, page: bool = False) -> None:
        """Writes the tables beside the cells; and ``report.html`` where a run is finished."""
        for name, text in (
            ("results.csv", self.to_csv()),
            ("table.md", self.to_markdown()),
            ("table.tex", self.to_latex()),
        ):
            write_text(self.folder / name, text)
        if page and self.runs:
            from fedgkd_pl.experiments.page import write_page

            write_page(self.runs, self.folder / "report.html", self.study.title, self.to_html())

    def show(self, quiet: bool = False) -> int:
        """Prints the tables and, unless ``quiet``, where to look; gives back the exit code."""
        print("\n\n".join(map(repr, self.tables)))
        for name, reason in self.failed.items():
            print(f"error: {name}: {reason}", file=sys.stderr)
        files = "results.csv, table.md, table.tex" + (", report.html" if self.runs else "")
        print(f"wrote {self.folder}: {files}")
        if not quiet:
            print(how_to_look(self.folder))
        return self.exit_code
