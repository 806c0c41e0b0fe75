"""Tables and numbers as text, and a bar for several runs: what comparisons and tunings print."""

from __future__ import annotations

import contextlib
import io
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_LONGEST_WORD = 20
"""Characters of a word that a narrow terminal must leave in one piece."""


@dataclass(frozen=True)
class Grid:
    """A table for rich, in several parts where it is too wide, each with the first column.

    Args:
        headings: They may have line breaks.
        rows: Texts, one for each heading.
        left: Headings of the columns that are text: to the left, and broken between words.
        options: Those of rich's `Table`.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[str]
    options: dict[str, Any]

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.measure import Measurement

        first, *others = range(len(self.headings))
        part, unlimited = [first], options.update(width=10_000)
        for column in others:
            wider = [*part, column]
            least = Measurement.get(console, unlimited, self._part(wider, shrink=True)).maximum
            if least > options.max_width and len(part) > 1:
                yield self._part(part)
                yield ""
                wider = [first, column]
            part = wider
        yield self._part(part)

    def _part(self, columns: Sequence[int], shrink: bool = False) -> Any:
        """The table of some columns; shrink: with nothing but the longest word of each text."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, **self.options)
        for i in columns:
            text = self.headings[i] in self.left
            words = [w for row in self.rows for w in row[i].split()] if text else []
            words += [w for line in self.headings[i].split("\n") for w in line.split()]
            longest = max(map(len, words), default=1)
            table.add_column(
                Text(self.headings[i]), justify="left" if text else "right", no_wrap=not text,
                overflow="fold", min_width=min(longest, _LONGEST_WORD),
                max_width=min(longest, _LONGEST_WORD) if shrink and text else None,
            )  # fmt: skip
        for row in self.rows:
            table.add_row(*(Text(row[i]) for i in columns))
        return table


def rich_table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]
) -> Any:
    """A table for rich: a title, the first column to the left, the others to the right, notes."""
    from rich.console import Group
    from rich.text import Text

    look = {"padding": (0, 1, 0, 0), "show_edge": False}
    table = Grid(headings, rows, headings[:1], look)
    return Group(Text(title, style="bold"), table, Text("\n".join(notes)))


def plain(renderable: Any) -> str:
    """What rich would show, without colours and without spaces at the ends of lines."""
    from rich.console import Console

    written = io.StringIO()
    out = Console(file=written, width=160, color_system=None, legacy_windows=False)
    out.print(renderable)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines()).strip("\n")


def mean_and_spread(mean: float, spread: float) -> str:
    if math.isnan(mean):
        return "–"
    text = digits(mean, mean)
    return text if math.isnan(spread) else f"{text} ± {digits(spread, mean)}"


def digits(value: float, size: float) -> str:
    """Four decimals for what is as small as an accuracy, fewer for numbers of a larger size."""
    return f"{value:.{max(0, 4 - int(math.log10(max(abs(size), 1))))}f}"


def number(value: float) -> str:
    if math.isnan(value):
        return "–"
    if value == 0 or value >= 99.95:
        return f"{value:,.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.0095 else f"{value:.2g}"


def count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


@contextlib.contextmanager
def bar(total: int, show: bool | None) -> Iterator[Callable[[str, int], None]]:
    """Yields advance(description, steps); silent when there is no terminal."""
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda description, steps: None
        return
    from rich import progress
    from rich.console import Console
    from rich.markup import escape

    columns = (progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeElapsedColumn())
    text, console = progress.TextColumn("{task.description}"), Console(stderr=True)
    with progress.Progress(*columns, text, console=console, transient=True) as shown:
        task = shown.add_task("", total=total)
        yield lambda text, steps: shown.update(task, description=escape(text), advance=steps)
