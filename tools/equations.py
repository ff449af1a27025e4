"""Equations in plain letters, ``w_{t+1} ← w_t − η Δ²``, as MathML: browsers draw it themselves.

So a docstring, a page on GitHub and the site have the same text, and nobody loads a script.
"""

import re
from html import escape, unescape
from unicodedata import normalize

SCRIPT = r"\{[^{}]*\}|[A-Za-z0-9]+"
RAISED, LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "₀₁₂₃₄₅₆₇₈₉"
PLAIN = str.maketrans(RAISED + LOWERED, "0123456789+−0123456789")
OPERATORS = "+−=←∈≈≤<>·⊙/,:"  # which have a space of their own around them
ACCENTS = {"\u0303": "\u02dc", "\u0304": "¯"}
PIECE = re.compile(
    r"(?:(?P<words>-?[A-Za-z]{2,}[A-Za-z'-]*|a(?= [a-z]{3}))|(?P<number>\d+(?:\.\d+)?)"
    rf"|(?P<letter>[^\W\d_{RAISED}{LOWERED}])(?P<accent>[{''.join(ACCENTS)}]?)"
    rf"|(?P<space> (?=[A-Za-z]{{2}})| (?![{OPERATORS}])(?<![{OPERATORS}] ))|(?P<sign>.))"
    rf"(?:_(?P<sub>{SCRIPT})|(?P<lowered>[{LOWERED}]+))?"
    rf"(?:\^(?P<sup>{SCRIPT})|(?P<raised>[{RAISED}]+))?"
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# What is left as it is, or a letter with an index; names of Python have more letters before.
INLINE = re.compile(
    r"(?P<kept><(code|pre|script|style|math)\b.*?</\2>|<[^>]*>)"
    r"|(?:(?<!\w)[^\W\d_][\u0303\u0304]?|\))"
    r"_(?:\{[^{}<]*\}|[A-Za-z0-9]{1,4}(?![A-Za-z0-9_]))[⁺²]?",
    re.DOTALL,
)


def formula(text: str) -> str:
    """The elements of a formula, to stand within ``<math>``."""
    return "".join(map(_element, PIECE.finditer(normalize("NFD", text))))


def _element(piece: re.Match[str]) -> str:
    """A letter, a number, words or a sign, with what stands above and below it."""
    if piece["space"] or piece["sign"] == " ":
        return '<mspace width="0.25em"/>' if piece["space"] else ""
    part = f'<mo stretchy="false">{escape(piece["sign"] or "")}</mo>'
    for tag, name in (("mtext", "words"), ("mn", "number"), ("mi", "letter")):
        if piece[name]:
            part = f"<{tag}>{piece[name]}</{tag}>"
    if piece["accent"]:
        part = f'<mover accent="true">{part}<mo>{ACCENTS[piece["accent"]]}</mo></mover>'
    is_sum = piece["letter"] == "Σ"
    if is_sum:
        part = '<mo movablelimits="true">∑</mo>'
    scripts = [piece["sub"] or piece["lowered"], piece["sup"] or piece["raised"]]
    texts = [each.strip("{}").translate(PLAIN) for each in scripts if each]
    if not texts:
        return part
    kind = "msubsup" if all(scripts) else "msub" if scripts[0] else "msup"
    kind = "munder" if is_sum else kind
    return f"<{kind}>{part}{''.join(f'<mrow>{formula(each)}</mrow>' for each in texts)}</{kind}>"


def table(block: str) -> str:
    """The lines of an equation; what begins below each other in the text does so here."""
    lines = [list(re.finditer(r"\S+(?: \S+)*", line)) for line in block.splitlines()]
    columns = sorted({part.start() for line in lines for part in line})
    rows = []
    for line in filter(None, lines):
        starts = [columns.index(part.start()) for part in line]
        ends = [*starts[1:], len(columns)]
        cells = [f'<td colspan="{starts[0]}"></td>'] * (starts[0] > 0)
        for part, start, end in zip(line, starts, ends, strict=True):
            math = f'<math displaystyle="true">{formula(part[0])}</math>'
            cells.append(f'<td colspan="{end - start}">{math}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="equation"><table class="lines">{"".join(rows)}</table></div>'


def of_blocks(markdown: str) -> str:
    """A page of a method, whose code blocks without a language are equations."""
    return BLOCK.sub(lambda block: block[0] if block[1] else table(block[2]), markdown)


def inline(html: str) -> str:
    """A page with its letters that have an index as formulas, outside of code."""

    def replaced(match: re.Match[str]) -> str:
        return match["kept"] or f"<math>{formula(unescape(match[0]))}</math>"

    return INLINE.sub(replaced, html)
