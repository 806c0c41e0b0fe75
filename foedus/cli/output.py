"""What the commands print: tables, histories, comparisons, links."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from foedus.errors import ConfigError

if TYPE_CHECKING:
    from foedus.core.result import Run
    from foedus.report.compare import Comparison


def check_writable(path: Path, key: str) -> None:
    """Find out before the work, not after it, that its result could not be written."""
    folder = next(p for p in (path.absolute().parent, *path.absolute().parents) if p.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        closed = f"{folder} is not a folder that can be written to"
        why = "it is a folder" if path.is_dir() else closed
        raise ConfigError(f"{key}: cannot write {str(path)!r}: {why}; choose another place")


def require_plots() -> None:
    from foedus.report.plots import require_matplotlib

    require_matplotlib()


def show_comparison(comparison: Comparison, page: Path, title: str | None = None) -> None:
    """The table, the page, and a last word about what diverged."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(comparison)  # fits the table to the terminal
    else:
        typer.echo(f"{comparison!r}\n")
    typer.echo(f"page: {link_to(comparison.report(page, title))}")
    lost = [message for messages in comparison.diverged.values() for message in messages.values()]
    if lost:
        total = sum(map(len, comparison.runs.values()))
        typer.echo(f"foedus: {len(lost)} of {total} runs diverged: {lost[0]}", err=True)
        if not any(comparison.finished(name) for name in comparison.runs):
            raise typer.Exit(1)


def link_to(page: Path) -> str:
    return f"{page} ({page.resolve().as_uri()})"


def print_history(run: Run) -> None:
    costs, metrics = ("round", "seconds", "bytes_up", "bytes_down", "clients"), ("accuracy", "mse")
    columns = (*costs, "loss", *metrics, *(f"own_{m}" for m in metrics))
    shown = run.history.filter(columns).tail(5)
    typer.echo(shown.to_string(index=False, na_rep="–"))
    typer.echo(f"\n{run!r}")


def or_dash(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def print_table(headings: list[str], rows: list[list[str]], text: tuple[str, ...]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in text else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160).print(table)
