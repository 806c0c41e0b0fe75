"""`foedus deploy`."""

from __future__ import annotations

import importlib
from collections import deque
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
    """Write a folder for a federation: a plan, certificates, and for each site its keys and policy.

    Example:

        foedus deploy init trial --site north=north.csv --site south=south.csv --label outcome
    """
    deploy = _flower("deploy")
    sites: dict[str, Path | None] = {}
    for entry in site:
        name, _, path = entry.partition("=")
        if name in sites:
            raise ConfigError(f"--site names {name!r} twice; give each site a name of its own")
        sites[name] = Path(path) if path else None
    deploy.init(folder, sites, label, host, port, days)
    written = f"plan, certificates, and keys and policies of {len(sites)} sites"
    typer.echo(f"{folder}: {written}; {folder / 'README.md'} says what to do next")


Folder = Annotated[Path, Argument(metavar="DIR", help="A folder of `foedus deploy init`.")]
PolicyFile = Annotated[Path, Argument(metavar="POLICY", help="The site's policy.toml.")]


@deploy_app.command("up")
def deploy_up_command(folder: Folder) -> None:
    """Run the server and all sites of a folder on this machine, with TLS and keys."""
    _flower("deploy").up(folder, typer.echo)


@deploy_app.command("server")
def deploy_server_command(folder: Folder) -> None:
    """Run the server of a folder: it waits for the sites, runs the plan, and writes the results.

    Only the routes that sites need are open to the network. After an interruption, run it again: it
    resumes.
    """
    _flower("deploy").server(folder, typer.echo)


@deploy_app.command("site")
def deploy_site_command(policy: PolicyFile) -> None:
    """Answer the server at a site, as the policy allows, until interrupted.

    A site runs the foedus that is installed there, never code that is sent to it.
    """
    _flower("deploy").site(policy, typer.echo)


@deploy_app.command("keys")
def deploy_keys_command(
    name: Annotated[str, Argument(metavar="NAME", help="The name of the site.")],
    folder: Annotated[Path, Option(help="Where its folder is.")] = Path(),
) -> None:
    """Make a site's own keys, and print the public parts for the server and the other sites."""
    public, signing = _flower("deploy").site_keys(folder, name)
    typer.echo(f"for the server, as admitted/{name}.pub:\n{public.read_text()}")
    typer.echo(f"for peers.toml of all sites:\n{signing}")


@deploy_app.command("log")
def deploy_log_command(
    policy: PolicyFile,
    last: Annotated[int, Option(min=1, help="How many of the newest entries.")] = 20,
) -> None:
    """Show what a site was asked, what it answered, and what it refused; check the log's chain."""
    path = _flower("policy").Policy.read(policy).log
    if not path.is_file():
        raise FoedusError(f"{path} does not exist yet: this site was asked nothing so far")
    count, newest = 0, deque[dict[str, Any]](maxlen=last)
    for entry in _flower("auditlog").read(path):
        count += 1
        newest.append(entry)
    for entry in newest:
        if "cut" in entry:
            typer.echo(f"cut short, by a crash while it was written:  {entry['cut']}")
            continue
        about = " ".join(f"{k}={v}" for k, v in entry.items() if k not in ("time", "asked"))
        typer.echo(f"{entry['time']}  {entry['asked']}  {about}")
    typer.echo(f"{count} entries; each follows from the one before it")


def _flower(module: str) -> Any:
    from foedus.engines.flower import require_posix

    require_posix("foedus deploy")
    try:
        return importlib.import_module(f"foedus.engines.flower.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("flwr", "cryptography"):
            raise
        text = "a federation of sites needs Flower: pip install 'foedus[flower]'"
        raise FoedusError(text) from None
