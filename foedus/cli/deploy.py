"""`foedus deploy`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from foedus.cli.app import app
from foedus.errors import ConfigError, FoedusError

deploy_app = typer.Typer(no_args_is_help=True, help="A federation of real sites, on Flower.")
app.add_typer(deploy_app, name="deploy")


@deploy_app.command("init")
def deploy_init_command(
    folder: Annotated[Path, Argument(metavar="DIR", help="A new folder.")],
    site: Annotated[list[str], Option(help="NAME or NAME=FILE.csv; once for each site.")],
    label: Annotated[str, Option(help="The column to predict.")] = "target",
    host: Annotated[
        str, Option(help="Name or address under which sites reach the server.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(help="Its port.")] = 9091,
    days: Annotated[float, Option(help="How long the certificates are valid.")] = 30,
) -> None:
    """Write a folder for a federation: Flower app, certificates, keys, settings, and a README.

    The README has the commands for each site.

    Example:

        foedus deploy init trial --site north=north.csv --site south=south.csv --label outcome
    """
    deploy = _deploy()
    sites: dict[str, Path | None] = {}
    for entry in site:
        name, _, path = entry.partition("=")
        if name in sites:
            raise ConfigError(f"--site names {name!r} twice; give each site a name of its own")
        sites[name] = Path(path) if path else None
    deploy.init(folder, sites, label, host, port, days)
    written = f"app, certificates and keys for {len(sites)} sites"
    typer.echo(f"{folder}: {written}; {folder / 'README.md'} says what to do next")


@deploy_app.command("up")
def deploy_up_command(
    folder: Annotated[Path, Argument(metavar="DIR", help="A folder of `foedus deploy init`.")],
) -> None:
    """Run a folder's federation, the server and all sites on this machine, with TLS and keys."""
    _deploy().up(folder, typer.echo)


def _deploy() -> Any:
    try:
        return importlib.import_module("foedus.engines.flower.deploy")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("flwr", "cryptography"):
            raise
        text = "a federation of sites needs Flower: pip install 'foedus[flower]'"
        raise FoedusError(text) from None
