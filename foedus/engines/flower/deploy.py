"""`foedus deploy`: a folder for a federation, its server, its sites, and all on one machine."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from foedus.data import formats
from foedus.data.formats.frames import as_text
from foedus.engines.flower.keys import certificates, node_key, signing_key
from foedus.engines.flower.loopback import Loopback, Processes, ended_gently, free_port, stop
from foedus.engines.flower.policy import Policy
from foedus.engines.flower.server import read_plan, train
from foedus.errors import ConfigError, DataError

PLAN = """# What to train, and on which columns: every site is checked against [data] before
# training. All keys are explained in the documentation of foedus.engines.flower.server.

[algorithm]
type = "FedAvg"
model = {{ type = "Linear" }}
lr = 0.1

[data]
columns = [{columns}]
{classes}
categories = [{categories}]            # columns that hold text
scale = "standard"                    # of numbers; or "minmax", "robust", "unit", "none"
impute = "mean"                       # what replaces missing numbers; or "median", "zero"

[run]
rounds = 20
seed = 0
# metrics = ["auc", "f1"]             # of the model on the test rows of all sites, whose policies
#                                     # must allow them
# evaluate_every = 5                  # rounds between two measurements

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

[server]
listen = "{listen}"{space}# for sites; the operator works on this machine
"""

POLICY = """# What the site {name} may send to the server. Only this site reads this file: check
# every entry. All keys are explained in the documentation of foedus.engines.flower.policy.

[site]
name = "{name}"
client = {number}                            # another number for each site
data = "{data}"                       # CSV or Parquet; or, instead, a function of yours:
# loader = "mine:rows"                # rows() in mine.py beside this file returns a DataFrame
label = "{label}"
test = 0.25                           # part of the rows that is only for testing
cache = "cache"                       # states, models, the log, the account of privacy

[server]
address = "{address}"
certificates = "ca.pem"
key = "{name}.key"                    # secret: the server knows this site by it

[signing]                             # for secure aggregation
key = "{name}.sign"                   # secret: must not leave this site
peers = "peers.toml"                  # public keys of all sites: compare them by telephone

[allow]
# algorithms = ["FedAvg"]             # without this line: all of foedus' own
columns = [{columns}]
{classes}
categories = [{categories}]            # columns whose texts may be used and sent
quantiles = false                     # true: medians, quartiles and extremes may be sent
# metrics = ["f1", "auc"]             # metrics whose sums over test rows may be sent, besides
#                                     # loss, hits and squared errors; without this line: none

[secure]
required = {required}                     # true: replies only by secure aggregation
clients = {fewest}                           # the fewest clients in a sum
# noise = 1.0                         # the least noise of differential privacy
# states = true                       # with required: also algorithms with client states
#                                     # (Scaffold, FedFW); see SECURITY.md

[limits]
exchanges_a_day = 10000
evaluations_a_day = 20
test_rows = 10                        # the fewest test rows whose sums are sent

# [privacy]                           # over all runs; replies and scores without noise are
#                                     # not sent, so it needs noise above
# epsilon = 8.0
# delta = 1e-5
"""

README = """# A federation of {count} sites

The server is reached at `{address}`. Everywhere: Python 3.11 or newer and
`pip install 'foedus[flower]'`.

## On the server

`federation.toml` says what is trained. `tls/` has certificates, valid for {days:g} days, for a
trial; otherwise use those of your certificate authority. `admitted/` has the public keys of the
sites that may connect: add or remove files to admit or exclude sites.

    foedus deploy server {folder}

It waits for the sites, runs the plan, and writes `results/`. If it is interrupted, start it again:
it resumes. Only the routes that sites need are open to the network; runs are started only on this
machine.

## At each site

Copy the folder of the site (`sites/NAME`: its policy, its keys, `ca.pem`) to the site, and delete
it here: its keys are secret. The rows stay at the site, in a CSV file with a header, in a Parquet
file, or in a source that a Python function of the site reads. Read `policy.toml`, and enter the
place of the rows. Then:

    foedus deploy site policy.toml

It answers the server until you stop it, and restarts processes that fail. A site runs the foedus
that is installed there, never code that is sent to it. Questions, answers and refusals are in its
log: `foedus deploy log policy.toml`.

The person who made the keys in this folder could have kept copies. For more than a trial, let
every site make its own keys (`foedus deploy keys NAME`), and exchange the public parts without the
server.

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
    """Write a folder for these sites; columns and classes are those of the files at hand."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; choose a new folder")
    if not sites:
        raise ConfigError("name at least one site: --site NAME or --site NAME=FILE.csv")
    for name in sites:
        check_name(name)
    columns, texts, classes = _look({n: p for n, p in sites.items() if p is not None}, label)
    listed, named = (", ".join(map(_quoted, some)) for some in (columns, texts))
    kinds = "" if classes is None else f"classes = [{', '.join(map(_quoted, classes))}]"
    certificates(folder / "tls", tuple(dict.fromkeys([host, "localhost", "127.0.0.1"])), days)
    listen = f"{host if host in ('127.0.0.1', 'localhost') else '0.0.0.0'}:{port}"
    plan = PLAN.format(
        columns=listed, classes=kinds, categories=named, clients=len(sites),
        least=max(1, len(sites) - 1), listen=listen, space=" " * max(1, 27 - len(listen)),
    )  # fmt: skip
    (folder / "federation.toml").write_text(plan)
    keys = {name: site_keys(folder / "sites" / name, name) for name in sites}
    (folder / "admitted").mkdir()
    peers = "# By which each site signs, by its number.\n\n"
    peers += "".join(f'{number} = "{known}"\n' for number, (_, known) in enumerate(keys.values()))
    for number, (name, path) in enumerate(sites.items()):
        own = folder / "sites" / name
        keys[name][0].rename(folder / "admitted" / f"{name}.pub")
        (own / "ca.pem").write_bytes((folder / "tls" / "ca.pem").read_bytes())
        (own / "peers.toml").write_text(peers)
        policy = POLICY.format(
            name=name, number=number, label=label, address=f"{host}:{port}", columns=listed,
            classes=kinds, categories=named, required="false", fewest=min(3, max(2, len(sites))),
            data=path.resolve() if path else f"/path/to/{name}.csv",
        )  # fmt: skip
        (own / "policy.toml").write_text(policy)
    readme = README.format(
        count=len(sites), address=f"{host}:{port}", days=days, folder=folder.name
    )
    (folder / "README.md").write_text(readme)


def check_name(name: str) -> None:
    """Refuse names that are not plain file names."""
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"the site name {name!r} may have letters, digits, - and _ only")


def site_keys(folder: Path, name: str) -> tuple[Path, str]:
    """Make the keys of a site: the public part of one as a file, and of the other as text."""
    check_name(name)
    for path in (folder / f"{name}.key", folder / f"{name}.sign"):
        if path.exists():
            raise ConfigError(f"{path} is there already; remove it if you want other keys")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _, public = node_key(folder / f"{name}.key")
    return public, signing_key(folder / f"{name}.sign")[1]


def _quoted(text: str) -> str:
    """As TOML has it."""
    return json.dumps(text, ensure_ascii=False)


def _look(files: dict[str, Path], label: str) -> tuple[list[str], list[str], list[str] | None]:
    """The columns that all files have, those that hold text in some file, and all labels."""
    columns: list[str] | None = None
    texts: set[str] = set()
    labels: set[str] = set()
    whole = True
    for name, path in files.items():
        try:
            raw = formats.read(path, label=label)
        except DataError as error:
            raise DataError(f"site {name}: {error}") from error
        own = [] if raw.feature_names is None else list(raw.feature_names)
        columns = own if columns is None else [c for c in columns if c in own]
        texts |= set(raw.categories or ())
        labels |= {as_text(v) for v in raw.y_train}
        whole &= raw.y_train.dtype.kind != "f"
    if columns is None:
        return ["first", "second"], [], ["0", "1"]
    if not columns:
        raise DataError("the files have no column in common")
    return columns, [c for c in columns if c in texts], sorted(labels) if whole else None


def server(folder: Path, say: Callable[[str], None] = print, listen: str | None = None) -> Path:
    """Run the server of a folder until its plan is done; returns the folder of results."""
    with ended_gently():
        return _serve(folder, say, listen, ())


def _serve(
    folder: Path, say: Callable[[str], None], listen: str | None, sites: Sequence[Policy]
) -> Path:
    """The server of a folder, and these sites on the same machine."""
    plan = read_plan(folder / "federation.toml")
    admitted = sorted((folder / "admitted").glob("*.pub"))
    if not admitted:
        raise ConfigError(f"{folder}/admitted has no keys (NAME.pub) of sites that may connect")
    listen, began = listen or plan.listen, time.monotonic()
    link = Loopback((folder / "server").resolve(), (listen, (folder / "tls").resolve()))
    try:
        link.start_link()
        link.register(admitted)
        say(f"server at {listen}, with TLS; {len(admitted)} sites are admitted")
        for policy in sites:
            name = policy.sections["site"]["name"]
            _start_site(link, policy, listen)
            say(f"site {name}: {policy.source}")
        runs = train(link.serve(), plan, folder / plan.folder)
    finally:
        link.close()
    say(f"{len(runs)} done in {time.monotonic() - began:.0f} s; results in {folder / plan.folder}")
    return folder / plan.folder


def up(folder: Path, say: Callable[[str], None] = print) -> Path:
    """Run the federation of a folder with all sites on this machine; returns the results."""
    if not (folder / "federation.toml").is_file():
        raise ConfigError(
            f"{folder} has no federation.toml: make the folder with `foedus deploy init`"
        )
    sites = [Policy.read(path) for path in sorted((folder / "sites").glob("*/policy.toml"))]
    with ended_gently():
        return _serve(folder, say, f"127.0.0.1:{free_port()}", sites)


def _start_site(group: Processes, policy: Policy, address: str) -> list[subprocess.Popen]:
    name = policy.sections["site"]["name"]
    files = policy.file("server", "certificates"), policy.file("server", "key")
    return group.start_node(name, address, *files, "", ["", str(policy.path.resolve())])


def site(path: Path, say: Callable[[str], None] = print, pause: float = 5.0) -> None:
    """Answer the server of a policy until this process is ended; failed processes are restarted."""
    policy = Policy.read(path)
    for section, key in (
        ("site", "data"), ("server", "certificates"), ("server", "key"), ("signing", "key"),
        ("signing", "peers"),
    ):  # fmt: skip
        if key in policy.sections[section] and not policy.file(section, key).is_file():
            raise ConfigError(
                f"{path}: {section}.{key}: there is no file {policy.file(section, key)}"
            )
    policy.own_algorithms()
    address, group = policy.sections["server"]["address"], Processes(policy.cache / "processes")
    say(f"{policy.sections['site']['name']} answers {address}; its log: foedus deploy log {path}")
    with ended_gently():
        try:
            while True:
                running = _start_site(group, policy, address)
                while all(process.poll() is None for process in running):
                    time.sleep(0.2)
                stop(running, signal.SIGTERM)
                say(f"the connection to {address} has ended; trying again in {pause:g} s")
                time.sleep(pause)
        finally:
            group.close()
