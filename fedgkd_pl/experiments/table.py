"""A table of texts with a title and notes; pandas writes it."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

import pandas as pd

MARKS = "†‡§¶‖"
PAPERS = "In brackets: the paper's."
TEX = str.maketrans(
    {
        **{letter: f"\\{letter}" for letter in "_%&#{}$"},
        **{"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"},
        **{"α": r"$\alpha$", "γ": r"$\gamma$", "λ": r"$\lambda$", "μ": r"$\mu$", "τ": r"$\tau$"},
    }
)


class Footnotes:
    """Remarks below a table; the same remark has the same mark."""

    def __init__(self) -> None:
        self._marks: dict[str, str] = {}

    def mark(self, remark: str) -> str:
        """The mark to put after a number, with a space before; empty without a remark."""
        if not remark:
            return ""
        times, which = divmod(len(self._marks), len(MARKS))
        return " " + self._marks.setdefault(remark, MARKS[which] * (times + 1))

    @property
    def lines(self) -> list[str]:
        """The marks and what they say."""
        return [f"{mark} {remark}" for remark, mark in self._marks.items()]


@dataclass(frozen=True, repr=False)
class Table:
    """A DataFrame of texts, and what is said of it.

    Attributes:
        left: how many columns are aligned to the left.
        unit: of the numbers, after the title.
        ranks: by row and column of the frame: 1 is shown bold, 2 underlined.
    """

    frame: pd.DataFrame
    left: int
    title: str = ""
    unit: str = ""
    notes: Sequence[str] = ()
    ranks: Mapping[tuple[int, str], int] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, str]]) -> "Table":
        """A table of texts, all to the left."""
        return cls(pd.DataFrame(rows), len(rows[0]))

    def records(self) -> list[dict[Hashable, str]]:
        """A mapping for every row."""
        return list(self.frame.to_dict("records"))

    def to_text(self) -> str:
        """For a terminal: the best between stars, the second between underscores."""
        texts = self._marked(str, "*{}*", "_{}_")
        for number in range(self.left):
            column = texts.iloc[:, number]
            texts.isetitem(number, column.str.ljust(max(map(len, [str(column.name), *column]))))
        title = ", ".join(filter(None, (self.title, self.unit)))
        shown = texts.to_string(index=False, justify="left")
        return "\n".join([*filter(None, [title]), shown, *self.notes])

    __repr__ = to_text

    def to_markdown(self) -> str:
        """The best bold, the second underlined."""
        texts = self._marked(lambda text: text.replace("|", r"\|"), "**{}**", "<u>{}</u>")
        sides = ["---"] * self.left + ["---:"] * (texts.shape[1] - self.left)
        lines = [f"| {' | '.join(row)} |" for row in (texts.columns, *texts.to_numpy())]
        lines.insert(1, f"|{'|'.join(sides)}|")
        title = [f"**{self.title}**, {self.unit}", ""] if self.title else []
        notes = ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join([*title, *lines, *notes]) + "\n"

    def to_latex(self) -> str:
        """With booktabs; the best bold, the second underlined."""
        texts = self._marked(_tex, r"\textbf{{{}}}", r"\underline{{{}}}")
        sides = "l" * self.left + "r" * (texts.shape[1] - self.left)
        caption = f"{_tex(self.title)}, {_tex(self.unit)}"
        table: str = texts.to_latex(index=False, escape=False, column_format=sides, caption=caption)
        notes = "".join(f"\n\\par\\small {_tex(note)}" for note in self.notes)
        return table.replace(r"\end{tabular}", r"\end{tabular}" + notes)

    def to_html(self) -> str:
        """For a page; with a title, a section of it."""
        texts = self._marked(escape, "<b>{}</b>", "<u>{}</u>")
        left = f"left{self.left}"
        table: str = texts.to_html(index=False, escape=False, border=0, classes=left)
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        shown = f"<div class=scroll>{table}</div>" + (f"<ul>{notes}</ul>" if notes else "")
        heading = f"<h2>{escape(self.title)}</h2>"
        return f"<section>{heading}{shown}</section>" if self.title else shown

    _repr_html_ = to_html  # for a notebook

    def _marked(self, plain: Callable[[str], str], best: str, second: str) -> pd.DataFrame:
        """The texts in a format's letters; the paper's number, in brackets, is not marked."""
        texts = self.frame.map(plain)
        for (row, column), rank in self.ranks.items():
            ours, bracket, paper = texts.at[row, column].partition(" (")
            texts.at[row, column] = (best, second)[rank - 1].format(ours) + bracket + paper
        return texts.rename(columns=plain)


def _tex(text: str) -> str:
    return text.translate(TEX)
