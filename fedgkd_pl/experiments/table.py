"""One table, shown as Markdown, LaTeX, HTML, CSV or on a terminal."""

import csv
import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.table

MARKDOWN = ("{}", "**{}**", "<u>{}</u>")  # by rank
RICH = ("{}", "[bold]{}[/bold]", "[underline]{}[/underline]")
LATEX = ("{}", r"\textbf{{{}}}", r"\underline{{{}}}")
HTML = ("{}", "<b>{}</b>", "<u>{}</u>")
TEX: dict[str, str | int | None] = {
    **{letter: f"\\{letter}" for letter in "_%&#{}$"},
    **{"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"},
    **{"α": r"$\alpha$", "γ": r"$\gamma$", "λ": r"$\lambda$", "μ": r"$\mu$", "τ": r"$\tau$"},
    **{"±": r"$\pm$", "†": r"\dag{}", "‡": r"\ddag{}", "§": r"\S{}", "¶": r"\P{}"},
    "‖": r"$\|$",
}


@dataclass(frozen=True)
class Value:
    """A cell of a table."""

    text: str
    rank: int = 0  # 1 is shown bold, 2 underlined
    paper: str = ""  # the paper's number beside ours


@dataclass(frozen=True)
class Table:
    """Rows below a head."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]
    left: Collection[int]  # the columns aligned to the left, others to the right
    title: str = ""
    unit: str = ""  # of the numbers, after the title
    notes: Sequence[str] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, str]], unit: str = "") -> "Table":
        """A table of texts, all to the left."""
        columns = list(rows[0])
        values = [[Value(row[name]) for name in columns] for row in rows]
        return cls(columns, values, range(len(columns)), unit=unit)

    @property
    def has_paper(self) -> bool:
        """Whether a number of the paper is in it."""
        return any(value.paper for row in self.rows for value in row)

    def to_markdown(self) -> str:
        """The best bold, the second underlined, the paper's in brackets."""
        lines = [f"**{self.title}**, {self.unit}", ""] if self.title else []
        lines.append("| " + " | ".join(name.replace("|", r"\|") for name in self.columns) + " |")
        lines.append("|" + "".join(("---:|", "---|")[left] for left in self._lefts()))
        for row in self.rows:
            cells = (
                MARKDOWN[value.rank].format(value.text.replace("|", r"\|")) + _brackets(value.paper)
                for value in row
            )
            lines.append("| " + " | ".join(cells) + " |")
        if self.has_paper:
            lines += ["", "In brackets: the paper's."]
        lines += ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join(lines) + "\n"

    def records(self) -> list[dict[str, str]]:
        """A mapping for every row, as ``pandas.DataFrame`` takes it."""
        texts = [[value.text for value in row] for row in self.rows]
        return [dict(zip(self.columns, row, strict=True)) for row in texts]

    def __repr__(self) -> str:
        """As Markdown, which a terminal shows well."""
        return self.to_markdown()

    def _repr_html_(self) -> str:
        """For a notebook."""
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        table = replace(self, title="").to_html()
        title = f"<b>{escape(self.title)}</b>, {escape(self.unit)}" if self.title else ""
        return f"{title}{table}<ul>{notes}</ul>" if notes else title + table

    def to_rich(self) -> "rich.table.Table":
        """For a terminal; the notes are not in it."""
        from rich.markup import escape as plain
        from rich.table import Table as RichTable

        shown = RichTable(title=plain(", ".join(filter(None, (self.title, self.unit)))))
        for name, left in zip(self.columns, self._lefts(), strict=True):
            shown.add_column(plain(name), justify="left" if left else "right")
        for row in self.rows:
            shown.add_row(
                *(
                    RICH[value.rank].format(plain(value.text))
                    + (f"\n[dim]({value.paper})[/dim]" if value.paper else "")
                    for value in row
                )
            )
        return shown

    def to_latex(self) -> str:
        """With booktabs; the best bold, the second underlined."""
        unit = self.unit[:1].upper() + self.unit[1:]
        unit += ", the paper's in brackets" if self.has_paper else ""
        lines = [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_tex(self.title)}. {_tex(unit)}.}}",
            rf"\begin{{tabular}}{{{''.join('rl'[left] for left in self._lefts())}}}",
            r"\toprule",
            " & ".join(map(_tex, self.columns)) + r" \\",
            r"\midrule",
        ]
        for row in self.rows:
            cells = (
                LATEX[value.rank].format(_tex(value.text)) + _brackets(_tex(value.paper))
                for value in row
            )
            lines.append(" & ".join(cells) + r" \\")
        wide = rf"\multicolumn{{{len(self.columns)}}}{{l}}"
        lines += [r"\bottomrule", *(rf"{wide}{{\small {_tex(note)}}} \\" for note in self.notes)]
        return "\n".join([*lines, r"\end{tabular}", r"\end{table}", ""])

    def to_html(self) -> str:
        """For a page; with a title, a section of it."""
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        body = ""
        for row in self.rows:
            cells = (
                HTML[value.rank].format(escape(value.text))
                + (f"<br><small>paper {escape(value.paper)}</small>" if value.paper else "")
                for value in row
            )
            body += "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
        table = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        table = f"<div class=scroll><table class=left{len(self.left)}>{table}</table></div>"
        if not self.title:
            return table
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        return f"<section><h2>{escape(self.title)}</h2>{table}<ul>{notes}</ul></section>"

    def to_csv(self) -> str:
        """The texts alone."""
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([value.text for value in row] for row in self.rows)
        return text.getvalue()

    def _lefts(self) -> list[bool]:
        return [index in self.left for index in range(len(self.columns))]


def _brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _tex(text: str) -> str:
    return text.replace(" ± ", "±").translate(str.maketrans(TEX))
