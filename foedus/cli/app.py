"""The `foedus` command: errors as messages and exit codes, and the options of all commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from foedus.errors import DivergenceError, FoedusError


class _Commands(TyperGroup):
    """Turns errors that a user can fix into one message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader has closed the pipe, as `head` does
            raise
        except (FoedusError, OSError) as error:
            if ctx.params.get("debug") or os.environ.get("FOEDUS_DEBUG", "0") not in ("", "0"):
                raise
            _complain(error)
            raise typer.Exit(1 if isinstance(error, DivergenceError) else 2) from None
        except KeyboardInterrupt as stop:
            saved = f"{stop} (foedus run CONFIG.toml --resume)" if str(stop) else "stopped at once"
            typer.echo(saved, err=True)
            raise typer.Exit(130) from None


def _complain(error: BaseException) -> None:
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename or ''}: {error.strerror}".lstrip(": ")
    typer.echo("\n".join([f"foedus: error: {text}", *getattr(error, "__notes__", [])]), err=True)


app = typer.Typer(
    cls=_Commands,
    name="foedus",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Config = Annotated[
    Path, Argument(metavar="CONFIG.toml", help="The experiment; see examples/ for some.")
]


def _version(asked: bool) -> None:
    if asked:
        from foedus.cli.doctor import version_line

        typer.echo(version_line())
        raise typer.Exit


@app.callback(
    epilog="Begin with: foedus demo. Every command explains itself: foedus run --help. "
    "Exit codes: 0 done, 1 a run diverged, 2 something must be mended first, 130 stopped by Ctrl-C."
)
def _root(
    version: Annotated[
        bool,
        Option("--version", callback=_version, is_eager=True, help="Print the version and stop."),
    ] = False,
    debug: Annotated[
        bool, Option("--debug", help="Show the whole traceback of an error (also FOEDUS_DEBUG=1).")
    ] = False,
) -> None:
    """foedus: federated learning beyond averaging.

    Compare federated algorithms on the same data and seeds, with every byte counted.
    """


def main() -> None:
    """Entry point of the `foedus` command."""
    app()
