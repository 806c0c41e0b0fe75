"""A site's own rows: a file that never leaves it, checked against what the server expects before
anything is learnt.

A site is told where its rows are by Flower's `--node-config`:

    data="/path/to/site.csv" label="target" client=2 name="Hungarian"
                        one client; optional: test=0.25, seed=0, cache="/path", and what secure
                        aggregation has (`foedus.engines.flower.secure_site`)
    shards="/folder"    loopback: clients of a simulation, written by fd.Flower
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Lt

from foedus.base.settings import Means, check_value
from foedus.data import formats
from foedus.data.dataset import Data
from foedus.data.federation import Federation
from foedus.data.formats.csv import read_csv
from foedus.data.formats.frames import as_text
from foedus.data.loading import hold_out
from foedus.errors import ConfigError, DataError, shown, unknown

KEYS = ("data", "label", "client", "name", "test", "seed", "cache", "shards")
SECURE_KEYS = (
    "secure",
    "secure_clients",
    "secure_threshold",
    "secure_noise",
    "secure_range",
    "secure_states",
    "signing_key",
    "peers",
)


@dataclass(frozen=True)
class Schema:
    """What all sites' rows must look like: columns in order, and the classes by name (`None`:
    numbers are predicted).
    """

    columns: tuple[str, ...]
    classes: tuple[str, ...] | None
    scale: str = "standard"

    def check(self, raw: formats.Raw, path: Path) -> np.ndarray:
        """The columns in the order of the schema; an error names what is missing, unknown or out of
        range.
        """
        found = list(raw.feature_names or [])
        missing = [c for c in self.columns if c not in found]
        if missing:
            names, more = ", ".join(map(repr, missing)), list(raw.left_out)
            instead = f"; the file has {', '.join(map(repr, more[:10]))} instead" if more else ""
            known = f"schema.columns: this site has no column{'s' * (len(missing) > 1)} {names}"
            raise ConfigError(known) from DataError(f"{path.name}: {names} missing{instead}")
        if texts := [c for c in self.columns if c in (raw.categories or {})]:
            raise DataError(
                f"{path.name}: column {texts[0]!r} holds text; encode it as numbers first, for "
                "instance with pandas.get_dummies"
            )
        return np.asarray(raw.x_train, np.float64)[:, [found.index(c) for c in self.columns]]

    def labels(self, y: np.ndarray, path: Path) -> np.ndarray:
        """Class numbers, or values."""
        if self.classes is None:
            if y.dtype.kind not in "iuf":
                raise DataError(
                    f"{path.name}: the label holds text ({str(y[0])!r}); the federation predicts "
                    "numbers"
                )
            return y.astype(np.float32)
        text = [as_text(v) for v in y]
        strange = sorted(set(text) - set(self.classes))
        if strange:
            raise DataError(
                f"{path.name}: label {strange[0]!r} is none of the classes of the federation "
                f"({', '.join(self.classes)})"
            )
        return np.array([self.classes.index(v) for v in text])


@dataclass(frozen=True)
class Site:
    """A site's rows as they are in its file (missing values and all), and who it is."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    client: int
    name: str
    classes: int | None

    def sums(self) -> dict[str, list[float]]:
        """Number, sum and sum of squares of the values of each column that are there: for a scaling
        common to all sites.
        """
        there = ~np.isnan(self.x)
        x = np.where(there, self.x, 0.0)
        return {
            "count": there.sum(0).tolist(),
            "sum": x.sum(0).tolist(),
            "squares": (x * x).sum(0).tolist(),
        }

    def federation(self, center: list[float], scale: list[float]) -> Federation:
        """The site as a federation of one client, scaled; what is missing becomes the centre."""

        small = np.array(scale) < np.finfo(np.float32).tiny
        if small.any():  # by what the server has sent alone, whatever the rows are
            column = int(np.argmax(small))
            raise ConfigError(
                f"center={center[column]} and scale={scale[column]} of column {column} give "
                "numbers that are not finite"
            )

        def scaled(x: np.ndarray) -> np.ndarray:
            # clipped: an error that depends on rows would tell the largest number of a column
            most = float(np.finfo(np.float32).max)
            with np.errstate(over="ignore"):
                new = np.nan_to_num((x - np.array(center)) / np.array(scale))
            return np.clip(new, -most, most).astype(np.float32)

        data = Data.from_arrays(
            scaled(self.x),
            self.y,
            scaled(self.x_test),
            self.y_test,
            classes=self.classes,
            name=self.name,
        )
        rows, test_rows = np.arange(len(self.y)), np.arange(len(self.y_test))
        offsets, test_offsets = np.array([0, len(rows)]), np.array([0, len(test_rows)])
        return Federation(data, rows, offsets, test_rows, test_offsets, np.array([self.client]))

    def checksum(self, key: bytes) -> int:
        """A number that changes with the rows, and tells nothing of them without the key."""
        parts = [np.ascontiguousarray(p) for p in (self.x, self.y, self.x_test, self.y_test)]
        found = hashlib.blake2b(digest_size=4, key=key)
        for part in parts:
            found.update(f"{part.dtype.str}{part.shape}".encode())
            found.update(part.data)
        return int.from_bytes(found.digest(), "big")


def read_site(config: dict[str, Any], schema: Schema) -> Site:
    """Read and check the rows of a site, as its node config says."""
    for key in config:
        if key not in (*KEYS, *SECURE_KEYS):
            raise DataError(f"--node-config: {unknown('key', key, [*KEYS, *SECURE_KEYS])}")
    for key in ("data", "client"):
        if key not in config:
            raise DataError(
                f'--node-config: {key} is missing; such as: data="/path/site.csv" label="target" '
                "client=0"
            )
    path, client = Path(str(config["data"])), config["client"]
    site_number = Annotated[
        int, Ge(0), Lt(2**32), Means("the number of the site, such as client=0")
    ]
    check_value("--node-config: client", client, site_number, DataError)
    if not path.is_file():
        raise DataError(f"--node-config: there is no file {path.name!r} where data= says")
    with formats.readable(path, "csv"):
        raw = read_csv(path, config.get("label"), only=set(schema.columns))
    x, y = schema.check(raw, path), schema.labels(raw.y_train, path)
    infinite = np.isinf(x)
    if infinite.any():
        row, column = np.argwhere(infinite)[0].tolist()
        raise DataError(
            f"{path.name}, line {row + 2}: column {schema.columns[column]!r} is infinite"
        )
    share = float(config.get("test", 0.25))
    if not 0 <= share < 1:
        raise DataError(
            f"--node-config: test={share} must be a part of the rows, at least 0 and below 1"
        )
    raw = hold_out(
        replace(raw, x_train=x, y_train=y),
        share,
        int(config.get("seed", 0)),
        schema.classes is None,
    )
    classes = None if schema.classes is None else len(schema.classes)
    assert raw.x_test is not None and raw.y_test is not None
    return Site(
        raw.x_train,
        raw.y_train,
        raw.x_test,
        raw.y_test,
        client,
        str(config.get("name", path.stem)),
        classes,
    )


# -- clients of a simulation -----------------------------------------------------------------------


def write_shard(path: Path, fed: Federation) -> None:
    """Some clients of a federation in memory, for a node on loopback."""
    data = fed.data
    np.savez(
        path,
        x_test=data.x_test[fed.test_rows],
        y_test=data.y_test[fed.test_rows],
        ids=fed.ids,
        offsets=fed.offsets,
        test_offsets=fed.test_offsets,
        x=data.x_train[fed.rows],
        y=data.y_train[fed.rows],
        classes=np.array(data.classes or 0),
    )


def read_shard(folder: Path, name: str) -> Federation:
    """The clients that `write_shard` wrote."""
    if not name.isalnum() or not (folder / f"{name}.npz").is_file():
        raise DataError(f"there is no shard {shown(name)} here")
    with np.load(folder / f"{name}.npz", allow_pickle=False) as f:
        data = Data.from_arrays(
            f["x"],
            f["y"],
            f["x_test"],
            f["y_test"],
            classes=int(f["classes"]) or None,
            name="shard",
        )
        return Federation(
            data,
            np.arange(len(f["y"])),
            f["offsets"],
            np.arange(len(f["y_test"])),
            f["test_offsets"],
            f["ids"],
        )
