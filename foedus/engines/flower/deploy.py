"""`foedus deploy`: a folder with all that a federation needs, and a way to try it on one
machine.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foedus.data import formats
from foedus.engines.flower.keys import certificates, node_key, signing_key
from foedus.engines.flower.loopback import SETTINGS, Loopback, ended_gently, write_app
from foedus.engines.flower.server import read_plan
from foedus.engines.flower.site import as_text
from foedus.errors import ConfigError, DataError

SERVER = """from pathlib import Path

from foedus.engines.flower.server import server_app

app = server_app(Path(__file__).parent / "federation.toml")"""

PLAN = """# What is learnt, and from what: every site is checked against [data] before training
# begins. All keys are explained in the documentation of foedus.engines.flower.server.

[algorithm]
type = "FedAvg"
model = {{ type = "Linear" }}
lr = 0.1

[data]
columns = [{columns}]
{classes}
scale = "standard"

[run]
rounds = 20
seed = 0

# [aggregation]                       # with this, the server sees averages and sums of replies,
#                                     # and no single reply
# type = "SecureAggregation"

[federation]
clients = {clients}
min_clients = {least}
timeout = 120
patience = 120

[output]
folder = "results"
"""

README = """# A federation of {count} sites

Server: `{address}`. Files: `app/` (what is run; edit `app/federation/federation.toml`), `tls/`
(certificates, valid for {days:g} days: for a trial; a certificate authority of your own is better),
`keys/` (one pair a site, and one key for signing; `peers.toml` has the public parts of those),
`sites.toml` (for a trial of everything on one machine).

Everywhere: Python 3.11 or newer, `pip install 'foedus[flower]'`, and

    {exports}

## On the server

    flower-superlink --ssl-certfile tls/server.pem --ssl-keyfile tls/server.key \\
        --ssl-ca-certfile tls/ca.pem --enable-supernode-auth --host 0.0.0.0 --port {port}

Tell `flwr` where that is: `export FLWR_HOME=$PWD/flwr`. Admit the sites, once each:

{register}

When the sites have connected, run it; results go to `results/` in the folder where the
SuperLink was started:

    flwr run app server --stream

## At each site

Bring `tls/ca.pem`, `keys/peers.toml` and the site's own keys (`keys/NAME` and `keys/NAME.sign`,
which nobody else needs) to the site. Its rows stay there, in a CSV file with a header. Then start a
SuperNode:

{sites}

`client` is the number of the site, another for each. `cache` is a folder where states and models
are kept: with it, a training goes on after the server or the SuperNode was started again.
`test=0.25` is the part of the rows that is only for testing. `secure="required"` makes a site
answer under secure aggregation alone (`[aggregation]` in the plan), `secure_noise=1.0` only with at
least that noise of differential privacy (`[aggregation.privacy]`). There, sites sign their keys
with `signing_key`, and check those of the others with `peers`: then no server can put in keys of
its own, if it does not have the signing keys. So for more than a trial let every site make its own,
and hand the public parts round without the server.

## All on one machine, for a trial

    foedus deploy up {folder}
"""


def init(
    folder: Path,
    sites: dict[str, Path | None],
    label: str = "target",
    host: str = "127.0.0.1",
    port: int = 9091,
    days: float = 30,
) -> None:
    """Write a folder for these sites; columns and classes are those of the files that are at
    hand.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; choose a new folder")
    if not sites:
        raise ConfigError("name at least one site: --site NAME or --site NAME=FILE.csv")
    for name in sites:
        if not name.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"the site name {name!r} may have letters, digits, - and _ only")
    columns, classes = _look({n: p for n, p in sites.items() if p is not None}, label)
    app = write_app(folder / "app", "federation", SERVER, {"output": ""})
    listed = ", ".join(f'"{c}"' for c in columns)
    kinds = "" if classes is None else "classes = [" + ", ".join(f'"{c}"' for c in classes) + "]"
    plan = PLAN.format(
        columns=listed, classes=kinds, clients=len(sites), least=max(1, len(sites) - 1)
    )
    (app / "federation" / "federation.toml").write_text(plan)
    certificates(folder / "tls", tuple(dict.fromkeys([host, "localhost", "127.0.0.1"])), days)
    (folder / "flwr").mkdir()
    (folder / "flwr" / "config.toml").write_text(
        f'[superlink]\ndefault = "server"\n\n[superlink.server]\naddress = "{host}:{port}"\n'
        f'root-certificates = "{(folder / "tls" / "ca.pem").resolve()}"\n'
    )
    entries, commands, admit, public = [], [], [], []
    peers = (folder / "keys" / "peers.toml").resolve()
    for number, (name, path) in enumerate(sites.items()):
        node_key(folder / "keys" / name)
        signing, known = signing_key(folder / "keys" / f"{name}.sign")
        public.append(f'{number} = "{known}"\n')
        where = str(path.resolve()) if path else f"/path/to/{name}.csv"
        entries.append(
            f'[{name}]\nclient = {number}\ndata = "{where}"\nlabel = "{label}"\n'
            f'signing_key = "{signing.resolve()}"\npeers = "{peers}"\n'
        )
        admit.append(f"    flwr supernode register keys/{name}.pub server --name {name}")
        commands.append(
            f"**{name}**\n\n    flower-supernode --root-certificates ca.pem --superlink "
            f"{host}:{port} \\\n"
            f"        --auth-supernode-private-key {name} \\\n"
            f'        --node-config \'data="/path/to/{name}.csv" label="{label}" client={number} '
            f'name="{name}" cache="/folder/of/{name}" '
            f'signing_key="/path/to/{name}.sign" peers="/path/to/peers.toml"\'\n'
        )
    peers.write_text("# By which each site signs, by its number.\n\n" + "".join(public))
    (folder / "sites.toml").write_text(
        "# Where each site's rows are, for a trial on one machine.\n\n" + "\n".join(entries)
    )
    readme = README.format(
        count=len(sites), address=f"{host}:{port}", port=port, days=days, folder=folder.name,
        sites="\n".join(commands), register="\n".join(admit),
        exports="export " + " ".join(f"{k}={v}" for k, v in SETTINGS.items()),
    )  # fmt: skip
    (folder / "README.md").write_text(readme)


def _look(files: dict[str, Path], label: str) -> tuple[list[str], list[str] | None]:
    """Columns that all files have, and all of their labels."""
    columns: list[str] | None = None
    labels: set[str] = set()
    whole = True
    for name, path in files.items():
        try:
            raw = formats.read(path, format="csv", label=label)
        except DataError as error:
            raise DataError(f"site {name}: {error}") from error
        own = [] if raw.feature_names is None else list(raw.feature_names)
        columns = own if columns is None else [c for c in columns if c in own]
        labels |= {as_text(v) for v in raw.y_train}
        whole &= raw.y_train.dtype.kind != "f"
    if columns is None:
        return ["first", "second"], ["0", "1"]
    if not columns:
        raise DataError("the files have no column in common")
    return columns, sorted(labels) if whole else None


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file is there: a new one takes the place of another, whatever the clock says."""
    if not path.exists():
        return None
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def up(folder: Path, say: Callable[[str], None] = print) -> Path:
    """Run the federation of a folder with all sites on this machine; returns the folder of
    results.
    """
    config = folder / "sites.toml"
    if not config.is_file():
        raise ConfigError(f"{folder} has no sites.toml: make the folder with `foedus deploy init`")
    try:
        sites: dict[str, dict[str, Any]] = tomllib.loads(config.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{config}: not valid TOML: {error}") from None
    plan = read_plan(folder / "app" / "federation" / "federation.toml")
    results = folder / plan.folder
    files = {name: results / f"{name.replace('/', '-')}.sites.json" for name in plan.algorithms}
    began, before = time.monotonic(), {name: _identity(path) for name, path in files.items()}
    with ended_gently():
        loopback = Loopback(
            folder.resolve() / "loopback", supervised=True, tls=folder / "tls", cwd=folder
        )
        try:
            say(f"SuperLink at {loopback.address}, with TLS")
            loopback.start_link()
            loopback.register([folder / "keys" / f"{name}.pub" for name in sites])
            for name, entry in sites.items():
                settings = {
                    "name": name,
                    "cache": str((folder / "cache" / name).resolve()),
                    **entry,
                }
                words = " ".join(
                    f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in settings.items()
                )
                loopback.start_node(folder / "keys" / name, words)
                say(f"SuperNode of {name}: {entry.get('data')}")
            for line in loopback.stream("run", (folder / "app").resolve(), "loopback", "--stream"):
                say(line)
        finally:
            loopback.close()
    done = [name for name, path in files.items() if _identity(path) not in (None, before[name])]
    if len(done) < len(plan.algorithms):
        raise ConfigError(
            f"the run did not finish ({len(done)} of {len(plan.algorithms)} algorithms); see "
            f"{folder}/loopback/link.log"
        )
    say(f"done in {time.monotonic() - began:.0f} s; results in {results}")
    return results
