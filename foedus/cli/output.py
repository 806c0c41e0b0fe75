"""Output of the commands: tables, histories, comparisons, links."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foedus.errors import ConfigError

if TYPE_CHECKING:
    from foedus.core.result import Run
    from foedus.report.compare import Comparison


def check_writable(path: Path, key: str) -> None:
    """Raise before the work, not after it, if a file cannot be written.

    key: The option, or the key of the configuration file, that names it.
    """
    if path.is_dir():
        raise _cannot_write(path, key, "it is a folder; choose another place")
    if path.exists() and not os.access(path, os.W_OK):
        raise _cannot_write(path, key, "the file is read-only; choose another place")
    _check_folder(path.parent, path, key)


def check_writable_folder(path: Path, key: str) -> None:
    """Raise if files cannot be written to a folder, which is created if its parent exists."""
    _check_folder(path if path.exists() else path.parent, path, key)


def _check_folder(folder: Path, path: Path, key: str) -> None:
    if not folder.exists():
        remedy = f"create it (mkdir -p {shlex.quote(str(folder))}) or choose another place"
        raise _cannot_write(path, key, f"there is no folder {str(folder)!r}; {remedy}")
    try:
        tempfile.TemporaryFile(dir=folder).close()  # mode bits are not enough: root
    except OSError as error:
        why = f"{folder} is not a folder that can be written to ({error.strerror})"
        raise _cannot_write(path, key, f"{why}; choose another place") from error


def _cannot_write(path: Path, key: str, why: str) -> ConfigError:
    return ConfigError(f"{key}: cannot write {str(path)!r}: {why}")


def require_plots() -> None:
    from foedus.report.plots import require_matplotlib

    require_matplotlib()


def show_comparison(comparison: Comparison, page: Path, title: str | None = None) -> None:
    """Print the table, write the page, and warn about runs that diverged."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(comparison)  # fits the table to the terminal
    else:
        typer.echo(f"{comparison!r}\n")
    typer.echo(f"page: {link_to(comparison.report(page, title))}")
    for message in comparison.left_out:
        typer.echo(f"foedus: left out: {message}", err=True)
    lost = [message for messages in comparison.diverged.values() for message in messages.values()]
    if lost:
        total = sum(map(len, comparison.runs.values()))
        typer.echo(f"foedus: {len(lost)} of {total} runs diverged: {lost[0]}", err=True)
        if not any(comparison.finished(name) for name in comparison.runs):
            raise typer.Exit(1)


def command_of(context: typer.Context, page: str = "page.html") -> str:
    """The command as it was typed, without what is at its default, with another page to write."""
    names: list[str] = []
    above: Any = context
    while above.parent is not None:
        names.append(str(above.info_name))
        above = above.parent
    words = ["foedus", *reversed(names)]
    for parameter in context.command.params:
        value = context.params[str(parameter.name)]
        if value in (None, parameter.default) or parameter.name == "out":
            continue
        values = [*map(str, value)] if isinstance(value, list | tuple) else [str(value)]
        if parameter.param_type_name == "argument":
            words += values
        else:
            option = parameter.opts[0]
            words += [option] if value is True else [w for v in values for w in (option, v)]
    return shlex.join([*words, "--out", page])


def link_to(page: Path) -> str:
    return f"{page} ({page.resolve().as_uri()})"


def print_history(run: Run) -> None:
    costs, metrics = ("round", "seconds", "bytes_up", "bytes_down", "clients"), ("accuracy", "mse")
    asked = [*metrics, *run.settings.get("metrics", [])]
    columns = (*costs, "loss", *asked, *(f"own_{m}" for m in asked))
    shown = run.history.filter(columns).tail(5)
    typer.echo(shown.to_string(index=False, na_rep="–"))
    typer.echo(f"\n{run!r}")
    for note in run.notes:
        if note.startswith("stopped after"):
            typer.echo(note)


def or_dash(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def print_table(headings: list[str], rows: list[list[str]], text: tuple[str, ...]) -> None:
    from rich.console import Console

    from foedus.report.text import Grid

    width = None if sys.stdout.isatty() else 160
    Console(file=sys.stdout, width=width).print(Grid(headings, rows, text, {}))
