"""A site's policy: what it may send to the server, in a TOML file that only the site reads.

[site]
name = "north"
client = 0                        # its number in the federation
data = "north.csv"                # or .parquet; paths are relative to this file
# loader = "mine:rows"            # in the place of data: a function in mine.py beside this file (or
                                  # in an installed module) that returns a DataFrame
label = "outcome"
test = 0.25                       # part of the rows that is only for testing
cache = "cache"                   # states, models, the log and the account of privacy

[server]
address = "server.example:9091"
certificates = "ca.pem"           # the authority of the server's certificate
key = "north"                     # the key by which the server knows this site

[signing]                         # for secure aggregation
key = "north.sign"
peers = "peers.toml"              # the public keys of the other sites

[allow]
algorithms = ["FedAvg"]           # leave out for all of foedus' own
models = ["Linear"]               # models and oracles; leave out for all of foedus' own
columns = ["age", "sex"]          # columns that may be used or summed
classes = ["0", "1"]              # leave out to predict numbers
categories = ["smokes"]           # columns that may be used as text, and whose texts may be told
quantiles = false                 # true: medians, quartiles and extremes of columns may be told
metrics = ["f1", "auc"]           # whose sums over test rows may be told, besides loss, hits and
                                  # squared errors; none if left out. auc: counts of rows by score

[code]                            # algorithms of the site's own, from a file at the site
file = "models.py"
name = "algorithms"               # an algorithm, or a dictionary of them
sha256 = "..."                    # of the file; another one is not loaded

[secure]
required = true                   # no reply in the clear
clients = 3                       # the fewest clients in a sum
threshold = 0.6666
noise = 1.0                       # the least noise of differential privacy; 0: none is demanded
range = 16.0                      # the least range of numbers: whether a reply fits is told
states = false                    # true: also algorithms whose clients remember something

[limits]
exchanges_a_day = 10000
evaluations_a_day = 20
test_rows = 10                    # the fewest test rows of which sums for metrics are told

[privacy]                         # over all runs, as far as this site took part: replies and
                                  # scores without noise are not sent
epsilon = 8.0
delta = 1e-5
"""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval, Lt

from foedus.base.settings import check_value
from foedus.config.reader import Number, Reader
from foedus.core.algorithm import Algorithm
from foedus.core.metrics import CLASSIFICATION, REGRESSION, USUAL
from foedus.engines.flower.own import algorithms_in
from foedus.errors import ConfigError, unknown

_SECTIONS: dict[str, dict[str, Any]] = {
    "site": {"name": str, "client": int, "data": str, "loader": str, "label": str}
    | {"test": Number, "seed": int, "cache": str},
    "server": {"address": str, "certificates": str, "key": str},
    "signing": {"key": str, "peers": str},
    "allow": {
        "algorithms": tuple[str, ...],
        "models": tuple[str, ...],
        "columns": tuple[str, ...],
        "classes": tuple[str, ...],
        "categories": tuple[str, ...],
        "quantiles": bool,
        "metrics": tuple[str, ...],
    },
    "code": {"file": str, "name": str, "sha256": str},
    "secure": {"required": bool, "clients": int, "threshold": Number, "noise": Number}
    | {"range": Number, "states": bool},
    "limits": {"exchanges_a_day": int, "evaluations_a_day": int, "test_rows": int},
    "privacy": {"epsilon": Number, "delta": Number},
}
_REQUIRED = {
    "site": ("name", "client", "label"),
    "server": ("address", "certificates", "key"),
    "signing": ("key", "peers"),
    "allow": ("columns",),
    "code": ("file", "name", "sha256"),
    "privacy": ("epsilon", "delta"),
}
_RANGES: dict[str, Any] = {
    "site.client": Annotated[int, Ge(0), Lt(2**32)],
    "site.test": Annotated[float, Ge(0), Lt(1)],
    "secure.clients": Annotated[int, Ge(2)],
    "secure.threshold": Annotated[float, Interval(ge=0.5, le=1)],
    "secure.noise": Annotated[float, Ge(0)],
    "secure.range": Annotated[float, Ge(0)],
    "limits.exchanges_a_day": Annotated[int, Ge(0)],
    "limits.evaluations_a_day": Annotated[int, Ge(0)],
    "limits.test_rows": Annotated[int, Ge(1)],
    "privacy.epsilon": Annotated[float, Gt(0)],
    "privacy.delta": Annotated[float, Interval(gt=0, lt=1)],
}


@dataclass(frozen=True)
class Policy:
    """The policy of a file. `foedus.engines.flower.guard.Guard` checks every message against it."""

    path: Path
    sections: dict[str, dict[str, Any]] = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Read and check a file; every error names the file and the key."""
        reader = Reader(path, "run")
        for name in reader.table:
            if name not in _SECTIONS:
                reader.fail(name, unknown("section", name, _SECTIONS))
        found = {}
        for name, hints in _SECTIONS.items():
            given = reader.section(name, needed=name in ("site", "server", "allow"))
            required = _REQUIRED.get(name, ()) if name in reader.table else ()
            found[name] = reader.settings(name, given, hints, required)
            for key, value in found[name].items():
                if isinstance(value, str) and not value.isprintable():
                    reader.fail(f"{name}.{key}", f"{value!r} must be a text that can be printed")
                if (allowed := _RANGES.get(f"{name}.{key}")) is not None:
                    check = partial(check_value, key, value, allowed, ConfigError)
                    reader.attempt(f"{name}.{key}", check)
        known = [*USUAL, *CLASSIFICATION, *REGRESSION]
        for metric in found["allow"].get("metrics", ()):
            if metric not in known:
                reader.fail("allow.metrics", unknown("metric", metric, known))
        if ("data" in found["site"]) == ("loader" in found["site"]):
            reader.fail("site", "give either data, a file, or loader, a function of the site's own")
        if ":" not in found["site"].get("loader", ":"):
            reader.fail("site.loader", f"{found['site']['loader']!r} must be 'module:function'")
        secure = found["secure"]
        if (secure.get("required") or secure.get("noise")) and not found["signing"]:
            reader.fail(
                "signing",
                "secure aggregation is demanded, and without the keys of the other sites a server "
                "could be all of them: give key and peers",
            )
        return cls(path, found)

    def file(self, section: str, key: str) -> Path:
        """A path of the file, relative to its folder."""
        return (self.path.parent / self.sections[section][key]).resolve()

    @property
    def source(self) -> str:
        """The source of the rows, for messages."""
        site = self.sections["site"]
        return str(self.file("site", "data")) if "data" in site else site["loader"]

    @property
    def cache(self) -> Path:
        """The folder of this site's states, models and log."""
        return (self.path.parent / self.sections["site"].get("cache", "cache")).resolve()

    @property
    def log(self) -> Path:
        """What this site was asked, and what it answered (`foedus.engines.flower.auditlog`)."""
        return self.cache / "log.jsonl"

    @property
    def columns(self) -> tuple[str, ...]:
        return self.sections["allow"]["columns"]

    @property
    def classes(self) -> tuple[str, ...] | None:
        return self.sections["allow"].get("classes")

    @property
    def categories(self) -> tuple[str, ...]:
        """Columns whose texts may be sent."""
        return self.sections["allow"].get("categories", ())

    @property
    def quantiles(self) -> bool:
        """Whether order statistics of columns may be sent."""
        return self.sections["allow"].get("quantiles", False)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics whose sums over test rows may be sent."""
        return self.sections["allow"].get("metrics", ())

    @property
    def test_rows(self) -> int:
        """The fewest test rows whose sums may be sent."""
        return self.sections["limits"].get("test_rows", 10)

    @property
    def algorithms(self) -> tuple[str, ...] | None:
        """The names of the algorithms that may be run here; `None`: all of foedus' own."""
        return self.sections["allow"].get("algorithms")

    @property
    def models(self) -> tuple[str, ...] | None:
        """The names of the models and oracles that may be used; `None`: all of foedus' own."""
        return self.sections["allow"].get("models")

    def limit(self, kind: Literal["exchanges", "evaluations"]) -> int:
        """The limit of answers of this kind in a day."""
        default = {"exchanges": 10_000, "evaluations": 20}[kind]
        return self.sections["limits"].get(f"{kind}_a_day", default)

    @property
    def budget(self) -> tuple[float, float] | None:
        """Epsilon and delta over all runs, if the policy has them."""
        found = self.sections["privacy"]
        return (float(found["epsilon"]), float(found["delta"])) if found else None

    def node_config(self) -> dict[str, Any]:
        """The settings of the site, as `foedus.engines.flower.site.read_site` takes them."""
        site = self.sections["site"]
        config: dict[str, Any] = {k: v for k, v in site.items() if k not in ("data", "cache")}
        config |= {"cache": str(self.cache), "folder": str(self.path.parent.resolve())}
        if "data" in site:
            config["data"] = str(self.file("site", "data"))
        if self.sections["signing"]:
            config["signing_key"] = str(self.file("signing", "key"))
            config["peers"] = str(self.file("signing", "peers"))
        secure = dict(self.sections["secure"])
        config["secure"] = "required" if secure.pop("required", False) else "offered"
        return config | {f"secure_{key}": value for key, value in secure.items()}

    def own_algorithms(self) -> dict[str, Algorithm]:
        """The algorithms of the site's own file, if the policy names one; its hash must match."""
        about = self.sections["code"]
        if not about:
            return {}
        path = self.file("code", "file")
        try:
            source = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{self.path}: code.file: {error.strerror}") from None
        if hashlib.sha256(source).hexdigest() != about["sha256"].lower():
            raise ConfigError(
                f"{self.path}: code.sha256: the file {path.name} has another hash; it is not "
                "loaded. If the change is yours, write its hash (sha256sum) into the policy"
            )
        spec = importlib.util.spec_from_loader(path.stem, loader=None)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        try:
            exec(compile(source, str(path), "exec"), module.__dict__)
        except Exception as error:
            raise ConfigError(f"{self.path}: code.file: {path.name}: {error!r}") from error
        where = f"{self.path}: code.name: {about['name']!r} in {path.name}"
        return algorithms_in(module, about["name"], where)
