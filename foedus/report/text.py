"""Tables and numbers as text, and a bar for several runs: what comparisons and tunings print."""

from __future__ import annotations

import contextlib
import io
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def rich_table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]
) -> Any:
    """A table for rich: a title, the first column to the left, the others to the right, notes."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for i, heading in enumerate(headings):
        side: Any = "right" if i else "left"
        table.add_column(Text(heading), justify=side, no_wrap=i > 0, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
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
