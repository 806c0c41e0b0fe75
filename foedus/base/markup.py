"""HTML for notebooks (`_repr_html_`): it inherits the colors around it, escapes all text, and is
bounded in size, because long texts, tables and curves are shortened.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_LONGEST = 60  # characters of a text in a cell
_ROWS = 30  # rows of a table
_POINTS = 100  # points of a curve
_SHADES = 8
_ACCENT = "#3d8bd4"  # can be seen on white and on black


class Markup(str):
    """HTML that is used as it is; all other text is escaped."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table; shade: from 0 to 1, how strongly it is tinted."""

    content: object
    shade: float = 0.0
    bold: bool = False


def text(content: object, longest: int = _LONGEST) -> Markup:
    """Any text, escaped; a long one ends in an ellipsis."""
    if isinstance(content, Markup):
        return content
    shown = str(content)
    shown = shown if len(shown) <= longest else f"{shown[:longest]}…"
    return Markup(html.escape("".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)))


def finite(value: object) -> float:
    """A number that can be drawn; NaN for anything else."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if abs(number) < 1e300 else math.nan


def box(title: object, *parts: str) -> Markup:
    """Parts under a title; parts wider than the notebook scroll."""
    head = f'<div style="font-weight:600">{text(title, 200)}</div>'
    return Markup(f'<div style="overflow-x:auto;color:inherit">{head}{"".join(parts)}</div>')


def folded(summary: object, *parts: str) -> Markup:
    """Parts that show when the summary is clicked on."""
    head = f'<summary style="cursor:pointer">{text(summary)}</summary>'
    return Markup(f"<details>{head}{''.join(parts)}</details>")


def lines(texts: Iterable[object], most: int = 10) -> Markup:
    """A line for each text."""
    texts = list(texts)
    more = [f"and {len(texts) - most:,} more"] if len(texts) > most else []
    shown = [text(t, 500) for t in [*texts[:most], *more]]
    return Markup("".join(f'<div style="opacity:.8">{t}</div>' for t in shown))


def table(
    headings: Sequence[object], rows: Sequence[Sequence[object]], prose: bool = False
) -> Markup:
    """A table of texts and `Cell`s: its first column to the left, or all of them if prose."""

    def line(cells: Sequence[object], tag: str) -> str:
        return f"<tr>{''.join(_cell(c, tag, i == 0, prose) for i, c in enumerate(cells))}</tr>"

    look = "border-collapse:collapse;margin:4px 0;color:inherit;font-size:inherit"
    head = line([Cell(h, bold=True) for h in headings], "th")
    body = "".join(line(row, "td") for row in rows[:_ROWS])
    more = lines([f"and {len(rows) - _ROWS:,} more"] if len(rows) > _ROWS else [])
    return Markup(f'<table style="{look}"><thead>{head}</thead><tbody>{body}</tbody></table>{more}')


def _cell(content: object, tag: str, first: bool, prose: bool) -> str:
    cell = content if isinstance(content, Cell) else Cell(content)
    look = f"padding:2px 8px;text-align:{'left' if first or prose else 'right'}"
    look += ";font-weight:600" if cell.bold else ""
    look += ";min-width:9em" if first and prose else ""
    if cell.shade > 0:  # pale enough for text of any color
        look += f";background:rgba(61,139,212,{0.6 * min(cell.shade, 1):.2f})"
    return f'<{tag} style="{look}">{text(cell.content, 500 if prose else _LONGEST)}</{tag}>'


def curve(
    points: Iterable[tuple[object, object]],
    label: object,
    limits: tuple[float, float] | None = None,
) -> Markup:
    """A line as SVG, without axes; nothing where fewer than two points are finite.

    limits: of the vertical axis; by default the least and the largest value.
    """
    found = [(x, y) for x, y in ((finite(x), finite(y)) for x, y in points) if x == x and y == y]
    if len(found) < 2:
        return Markup()
    last = min(len(found), _POINTS) - 1
    xs, ys = zip(*(found[i * (len(found) - 1) // last] for i in range(last + 1)), strict=True)
    low, high = limits or (min(ys), max(ys))

    def part(value: float, low: float, high: float) -> float:
        return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.5

    path = " ".join(
        f"{1 + 118 * part(x, min(xs), max(xs)):.1f},{23 - 22 * part(y, low, high):.1f}"
        for x, y in zip(xs, ys, strict=True)
    )
    line = f'<polyline points="{path}" fill="none" stroke="{_ACCENT}" stroke-width="1.5"/>'
    return _svg(120, 24, line, label)


def heat(shares: Sequence[Sequence[float]], names: Sequence[object], label: object) -> Markup:
    """Numbers from 0 to 1 as a heat map, in SVG; names: of its rows, if they have some."""
    step, width = 14 if names else 6, max(4, 480 // len(shares[0]))
    left, wide, high = 110 if names else 0, width * len(shares[0]), step * len(shares)
    paths: dict[int, list[str]] = {}
    for i, row in enumerate(shares):
        for j, share in enumerate(row):
            if share > 0:
                paths.setdefault(math.ceil(_SHADES * min(share, 1)), []).append(f"M{j} {i}h1v1h-1z")
    cells = "".join(
        f'<path d="{"".join(d)}" fill="{_ACCENT}" fill-opacity="{k / _SHADES}"/>'
        for k, d in sorted(paths.items())
    )
    titles = "".join(
        f'<text x="{left - 6}" y="{step * i + 11}" text-anchor="end" font-size="11" '
        f'fill="currentColor">{text(name, 16)}</text>'
        for i, name in enumerate(names)
    )
    edge = f'<rect x="{left}" width="{wide}" height="{high}" fill="none" '
    edge += 'stroke="currentColor" stroke-opacity=".3"/>'
    placed = f'<g transform="translate({left} 0) scale({width} {step})">{cells}</g>'
    return _svg(left + wide + 1, high + 1, f"{titles}{placed}{edge}", label)


def _svg(width: int, height: int, content: str, label: object) -> Markup:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return Markup(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{text(label)}" '
        f'style="vertical-align:middle;max-width:100%">{content}</svg>'
    )
