"""Small pieces of HTML for a notebook, in its colours, light or dark; they need no network."""

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 220, 48  # of a curve, in pixels
CELL = 16  # of a bubble chart, in pixels
SHOWN = 60  # rows and columns of one
BLUE = "#4e79a7"  # is read well on white and on black


def facts(title: str, values: Mapping[str, object], *more: str) -> str:
    """A title, names and values as a small table, and further pieces of HTML."""
    rows = "".join(
        f'<tr><td style="text-align:left">{escape(str(name))}</td>'
        f'<td style="text-align:left">{escape(str(value))}</td></tr>'
        for name, value in values.items()
    )
    return f"<div><b>{escape(title)}</b><table>{rows}</table>{''.join(more)}</div>"


def curve(values: Mapping[int, float], label: str = "") -> str:
    """A line over rounds as SVG, with its first and last value; empty where there is none."""
    if len(values) < 2:
        return ""
    rounds, lowest, highest = sorted(values), min(values.values()), max(values.values())
    across, range_ = rounds[-1] - rounds[0], (highest - lowest) or 1.0
    points = " ".join(
        f"{4 + (WIDTH - 8) * (n - rounds[0]) / across:.1f},"
        f"{HEIGHT - 4 - (HEIGHT - 8) * (values[n] - lowest) / range_:.1f}"
        for n in rounds
    )
    line = f'<polyline points="{points}" fill="none" stroke="{BLUE}" stroke-width="2"/>'
    text = f"{label}, rounds {rounds[0]} to {rounds[-1]}: {lowest:.4g} to {highest:.4g}"
    return f"{_svg(WIDTH, HEIGHT, line)}<br><small>{escape(text.removeprefix(', '))}</small>"


def bubbles(counts: Sequence[Sequence[int]], names: Sequence[str] = ()) -> str:
    """Clients × classes as SVG, the area of a circle a number of samples; the first of many."""
    shown = [list(row[:SHOWN]) for row in counts[:SHOWN]]
    classes = len(shown[0]) if shown else 0
    largest = max((max(row, default=0) for row in shown), default=0) or 1
    left, parts = 30, []
    for client, row in enumerate(shown):
        across = left + CELL * client + CELL / 2
        for label, count in enumerate(row):
            if count:
                text = f"client {client}, {names[label] if names else label}: {count}"
                radius = max(0.8, CELL / 2 * (count / largest) ** 0.5)
                circle = f'cx="{across}" cy="{CELL * label + CELL / 2}" r="{radius:.1f}"'
                parts.append(
                    f'<circle {circle} fill="{BLUE}"><title>{escape(text)}</title></circle>'
                )
    for label in range(classes):
        name = str(names[label] if names else label)[:5]
        parts.append(_text(left - 4, CELL * label + CELL * 0.75, "end", name))
    step = max(1, len(shown) // 10)
    for client in range(0, len(shown), step):
        across = left + CELL * client + CELL / 2
        parts.append(_text(across, CELL * classes + 12, "middle", str(client)))
    return _svg(left + CELL * len(shown), CELL * classes + 16, "".join(parts))


def _text(x: float, y: float, anchor: str, text: str) -> str:
    style = f'text-anchor="{anchor}" font-size="10" fill="currentColor"'
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'


def _svg(width: float, height: float, content: str) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>{content}</svg>'
