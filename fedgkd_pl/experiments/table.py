"""A table of texts with a title and notes; pandas writes it."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

import pandas as pd

PAPERS = "In brackets: the paper's."
TEX = str.maketrans(
    {
        **{letter: f"\\{letter}" for letter in "_%&#{}$"},
        **{"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"},
        **{"α": r"$\alpha$", "γ": r"$\gamma$", "λ": r"$\lambda$", "μ": r"$\mu$", "τ": r"$\tau$"},
    }
)


@dataclass(frozen=True, repr=False)
class Table:
    """A DataFrame of texts, and what is said of it.

    Attributes:
        left: the numbers of the columns aligned to the left.
        unit: of the numbers, after the title.
        ranks: by row and column of the frame: 1 is shown bold, 2 underlined.
        has_paper: whether numbers of the paper stand in brackets behind ours.
    """

    frame: pd.DataFrame
    left: Collection[int]
    title: str = ""
    unit: str = ""
    notes: Sequence[str] = ()
    ranks: Mapping[tuple[int, str], int] = field(default_factory=dict)
    has_paper: bool = False

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, str]], unit: str = "") -> "Table":
        """A table of texts, all to the left."""
        return cls(pd.DataFrame(rows), range(len(rows[0])), unit=unit)

    def records(self) -> list[dict[Hashable, str]]:
        """A mapping for every row."""
        return list(self.frame.to_dict("records"))

    def to_text(self) -> str:
        """For a terminal: the best between stars, the second between underscores."""
        texts = self._marked(str, "*{}*", "_{}_")
        for number in self.left:
            column = texts.iloc[:, number]
            width = max(map(len, [str(column.name), *column]))
            texts.isetitem(number, column.str.ljust(width))
        title = ", ".join(filter(None, (self.title, self.unit)))
        shown = texts.to_string(index=False, justify="left")
        return "\n".join([*filter(None, [title]), shown, *self._said])

    __repr__ = to_text

    def to_markdown(self) -> str:
        """The best bold, the second underlined."""
        texts = self._marked(lambda text: text.replace("|", r"\|"), "**{}**", "<u>{}</u>")
        lines = [f"**{self.title}**, {self.unit}", ""] if self.title else []
        sides = ["---" if n in self.left else "---:" for n in range(texts.shape[1])]
        lines += [f"| {' | '.join(texts)} |", f"|{'|'.join(sides)}|"]
        lines += [f"| {' | '.join(row)} |" for row in texts.itertuples(index=False)]
        lines += ["", PAPERS] if self.has_paper else []
        lines += ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join(lines) + "\n"

    def to_latex(self) -> str:
        """With booktabs; the best bold, the second underlined."""
        texts = self._marked(_tex, r"\textbf{{{}}}", r"\underline{{{}}}")
        sides = "".join("l" if n in self.left else "r" for n in range(texts.shape[1]))
        caption = f"{_tex(self.title)}, {_tex(self.unit)}"
        table: str = texts.to_latex(index=False, escape=False, column_format=sides, caption=caption)
        notes = "".join(f"\n\\par\\small {_tex(note)}" for note in self._said)
        return table.replace(r"\end{tabular}", r"\end{tabular}" + notes)

    def to_html(self) -> str:
        """For a page; with a title, a section of it."""
        texts = self._marked(escape, "<b>{}</b>", "<u>{}</u>")
        left = f"left{len(self.left)}"
        table: str = texts.to_html(index=False, escape=False, border=0, classes=left)
        notes = "".join(f"<li>{escape(note)}</li>" for note in self._said)
        shown = f"<div class=scroll>{table}</div>" + (f"<ul>{notes}</ul>" if notes else "")
        heading = f"<h2>{escape(self.title)}</h2>"
        return f"<section>{heading}{shown}</section>" if self.title else shown

    _repr_html_ = to_html  # for a notebook

    @property
    def _said(self) -> list[str]:
        return [*([PAPERS] if self.has_paper else []), *self.notes]

    def _marked(self, plain: Callable[[str], str], best: str, second: str) -> pd.DataFrame:
        """The texts in a format's letters; the paper's number, in brackets, is not marked."""
        texts = self.frame.map(plain)
        for (row, column), rank in self.ranks.items():
            ours, bracket, paper = texts.at[row, column].partition(" (")
            texts.at[row, column] = (best, second)[rank - 1].format(ours) + bracket + paper
        return texts.rename(columns=plain)


def _tex(text: str) -> str:
    return text.translate(TEX)
