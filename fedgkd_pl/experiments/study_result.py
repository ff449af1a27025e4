"""What a study has come to: its runs and tables."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from fedgkd_pl.experiments.runs import Run
from fedgkd_pl.experiments.study import Study
from fedgkd_pl.experiments.table import Table
from fedgkd_pl.experiments.tables import Results, every_run, make_tables
from fedgkd_pl.runs.folder import how_to_look


@dataclass(frozen=True)
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
    def tables(self) -> list[Table]:
        """One, or one for each measure."""
        return make_tables(self.study, self.results, self.failed)

    @property
    def exit_code(self) -> int:
        """The command line's: 3 where a cell failed."""
        return 3 if self.failed else 0

    def records(self) -> list[dict[str, str]]:
        """A mapping for every run, with all measures, as ``pandas.DataFrame`` takes it."""
        return every_run(self.study, self.results).records()

    def to_markdown(self) -> str:
        """The tables."""
        return "\n".join(table.to_markdown() for table in self.tables)

    def __repr__(self) -> str:
        """The tables, and what failed."""
        lines = [f"failed: {name}: {reason}\n" for name, reason in self.failed.items()]
        return "".join([f"{self.folder}, {len(self.runs)} runs\n\n", self.to_markdown(), *lines])

    def _repr_html_(self) -> str:
        """For a notebook."""
        tables = "".join(table._repr_html_() for table in self.tables)
        lines = [f"{name}: {reason}" for name, reason in self.failed.items()]
        failed = "".join(f"<p><b>failed</b> {escape(line)}</p>" for line in lines)
        return f"{tables}{failed}<p><code>{escape(str(self.folder))}</code></p>"

    def write_page(self) -> None:
        """Writes ``report.html`` beside the cells; not where none is finished."""
        from fedgkd_pl.experiments.page import write_page

        if self.runs:
            page = "".join(table.to_html() for table in self.tables)
            write_page(self.runs, self.folder / "report.html", self.study.title, page)

    def show(self, quiet: bool = False) -> int:
        """Prints the tables and, unless ``quiet``, where to look; gives back the exit code."""
        from rich.console import Console

        console = Console() if sys.stdout.isatty() else Console(width=140)
        for table in self.tables:
            console.print(table.to_rich())
            for note in table.notes:
                console.print(f"  {note}", highlight=False, markup=False)
        for name, reason in self.failed.items():
            print(f"error: {name}: {reason}", file=sys.stderr)
        files = "results.csv, table.md, table.tex" + (", report.html" if self.runs else "")
        print(f"wrote {self.folder}: {files}")
        if not quiet:
            print(how_to_look(self.folder))
        return self.exit_code
