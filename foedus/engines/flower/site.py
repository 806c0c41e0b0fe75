"""A site's own rows: a file that never leaves it, checked against the server's schema before
training.

Flower's `--node-config` tells a site where its rows are:

    data="/path/to/site.csv" label="target" client=2 name="Hungarian"
                        one client, from a CSV or Parquet file; optional: test=0.25, seed=0,
                        cache="/path", and what secure aggregation has
                        (`foedus.engines.flower.secure_site`)
    loader="mine:rows" folder="/path/to/the/policy"
                        in the place of data: a function of the site's own, which returns a
                        DataFrame; it is called for every message
    shards="/folder"    loopback: clients of a simulation, written by fd.Flower
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Lt

from foedus.base.settings import Means, check_value
from foedus.data import formats
from foedus.data.dataset import Data
from foedus.data.federation import Federation
from foedus.data.formats.csv import read_csv, read_parquet
from foedus.data.formats.frames import as_text, is_frame, table
from foedus.data.loading import hold_out
from foedus.data.preprocess import Preprocessor
from foedus.data.unprepared import Unprepared
from foedus.errors import ConfigError, DataError, shown, unknown

KEYS = (
    "data", "loader", "folder", "label", "client", "name", "test", "seed", "cache", "shards"
)  # fmt: skip
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


_MOST_NUMBERS = 1 << 29
"""Of the prepared rows of a site."""


@dataclass(frozen=True)
class Schema:
    """The schema of the rows of all sites.

    Args:
        columns: In order.
        classes: By name; `None`: numbers are predicted.
        texts: The columns that hold text; the others hold numbers.
    """

    columns: tuple[str, ...]
    classes: tuple[str, ...] | None
    texts: tuple[str, ...] = ()

    def check(self, raw: formats.Raw, where: str) -> tuple[np.ndarray, dict[str, tuple[str, ...]]]:
        """The columns in the order of the schema, and the texts of text columns; raises if a column
        is missing or does not fit.
        """
        found, ours = list(raw.feature_names or []), raw.categories or {}
        missing = [c for c in self.columns if c not in found]
        if missing:
            names, more = ", ".join(map(repr, missing)), list(raw.left_out)
            instead = f"; the file has {', '.join(map(repr, more[:10]))} instead" if more else ""
            known = f"schema.columns: this site has no column{'s' * (len(missing) > 1)} {names}"
            raise ConfigError(known) from DataError(f"{where}: {names} missing{instead}")
        if texts := [c for c in self.columns if c in ours and c not in self.texts]:
            raise DataError(
                f"{where}: column {texts[0]!r} holds text, and the federation takes it for "
                "numbers; ask the server to name it under data.categories"
            )
        x = np.asarray(raw.x_train, np.float64)[:, [found.index(c) for c in self.columns]]
        return x, {name: ours[name] for name in self.texts}

    def labels(self, y: np.ndarray, where: str) -> np.ndarray:
        """Class numbers, or values."""
        if self.classes is None:
            if y.dtype.kind not in "iuf":
                raise DataError(
                    f"{where}: the label holds text ({str(y[0])!r}); the federation predicts "
                    "numbers"
                )
            return y.astype(np.float32)
        text = [as_text(v) for v in y]
        unknown = sorted(set(text) - set(self.classes))
        if unknown:
            raise DataError(
                f"{where}: label {unknown[0]!r} is none of the classes of the federation "
                f"({', '.join(self.classes)})"
            )
        return np.array([self.classes.index(v) for v in text])


@dataclass(frozen=True)
class Site:
    """A site's rows as in its file, including missing values, with its name and id."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    client: int
    name: str
    classes: int | None
    raw: Unprepared

    def federation(self, fitted: Preprocessor | None = None) -> Federation:
        """The site as a federation of one client: raw rows, or preprocessed."""
        x, x_test = self.x, self.x_test
        if fitted is not None:
            width = len(fitted.feature_names or ())
            if (len(x) + len(x_test)) * width > _MOST_NUMBERS:
                raise ConfigError(f"preprocess: {width} features are too many for the rows here")
            x, x_test = (_finite(self.raw, part, fitted) for part in (x, x_test))
        data = Data(
            self.name, x, self.y, x_test, self.y_test, self.classes,
            raw=self.raw if fitted is None else None,
        )  # fmt: skip
        rows, test_rows = np.arange(len(self.y)), np.arange(len(self.y_test))
        offsets, test_offsets = np.array([0, len(rows)]), np.array([0, len(test_rows)])
        return Federation(data, rows, offsets, test_rows, test_offsets, np.array([self.client]))

    def checksum(self, key: bytes) -> int:
        """A checksum of the rows, which reveals nothing about them without the key."""
        parts = [np.ascontiguousarray(p) for p in (self.x, self.y, self.x_test, self.y_test)]
        found = hashlib.blake2b(digest_size=4, key=key)
        found.update(json.dumps([self.raw.names, dict(self.raw.categories)]).encode())
        for part in parts:
            found.update(f"{part.dtype.str}{part.shape}".encode())
            found.update(part.data)
        return int.from_bytes(found.digest(), "big")


def _finite(raw: Unprepared, x: np.ndarray, fitted: Preprocessor) -> np.ndarray:
    """Preprocessed rows; numbers beyond single precision are clipped, and missing ones without an
    imputed value are 0: an error would reveal something about a row.
    """
    most = float(np.finfo(np.float32).max)
    if fitted.fill is None:
        fitted = replace(fitted, fill=np.zeros(len(raw.names) - len(raw.categories)))
    with np.errstate(over="ignore"):
        return np.clip(np.nan_to_num(raw.apply(x, fitted), posinf=most, neginf=-most), -most, most)


def read_site(config: dict[str, Any], schema: Schema) -> Site:
    """Read and check the rows of a site, as its node config says."""
    for key in config:
        if key not in (*KEYS, *SECURE_KEYS):
            raise DataError(f"--node-config: {unknown('key', key, [*KEYS, *SECURE_KEYS])}")
    for keys in (("data", "loader"), ("client",)):
        if not any(key in config for key in keys):
            raise DataError(
                f'--node-config: {keys[0]} is missing; such as: data="/path/site.csv" '
                'label="target" client=0'
            )
    client = config["client"]
    site_number = Annotated[
        int, Ge(0), Lt(2**32), Means("the number of the site, such as client=0")
    ]
    check_value("--node-config: client", client, site_number, DataError)
    raw, where = read_table(config, schema)
    x, categories = schema.check(raw, where)
    y = schema.labels(raw.y_train, where)
    share = float(config.get("test", 0.25))
    if not 0 <= share < 1:
        raise DataError(
            f"--node-config: test={share} must be a part of the rows, at least 0 and below 1"
        )
    raw = hold_out(
        replace(raw, x_train=x, y_train=y), share, int(config.get("seed", 0)),
        schema.classes is None,
    )  # fmt: skip
    assert raw.x_test is not None and raw.y_test is not None
    return Site(
        raw.x_train, raw.y_train, raw.x_test, raw.y_test, client,
        str(config.get("name", Path(str(config.get("data", "site"))).stem)),
        None if schema.classes is None else len(schema.classes),
        Unprepared(schema.columns, categories),
    )  # fmt: skip


def read_table(config: dict[str, Any], schema: Schema) -> tuple[formats.Raw, str]:
    """The table of a site, and its name in errors: a CSV or Parquet file, or the result of a
    function at the site.
    """
    label, only = config.get("label"), {*schema.columns}
    if "loader" in config:
        frame, where = loaded(str(config["loader"]), str(config.get("folder", "."))), "loader"
        return table(frame, where, label, only=only, texts=schema.texts), where
    path = Path(str(config["data"]))
    if not path.is_file():
        raise DataError(f"--node-config: there is no file {path.name!r} where data= says")
    kind = "parquet" if path.name.lower().endswith(".parquet") else "csv"
    with formats.readable(path, kind):
        read = read_parquet if kind == "parquet" else read_csv
        return read(path, label, only=only, texts=schema.texts), path.name


def loaded(name: str, folder: str) -> Any:
    """The DataFrame that a function at the site returns: "module:function", where the module is a
    file in the folder of the site's policy, or installed.
    """
    module_name, _, function = name.partition(":")
    path = Path(folder) / f"{module_name}.py"
    try:
        if path.is_file():
            spec = importlib.util.spec_from_file_location(module_name, path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
        frame = getattr(module, function)()
    except Exception as error:  # any exception of the site's own code
        raise DataError(f"loader={name!r} failed: {error!r}") from error
    if not is_frame(frame):
        raise DataError(
            f"loader={name!r} returned a {type(frame).__name__}; it must return a pandas DataFrame"
        )
    return frame.reset_index(drop=True)


# -- clients of a simulation -----------------------------------------------------------------------


def write_shard(path: Path, fed: Federation) -> None:
    """Some clients of a federation in memory, for a node on loopback."""
    data, raw = fed.data, fed.data.raw
    about: dict[str, Any] = {
        "classes": data.classes,
        "names": None if raw is None else list(raw.names),
    }
    about["categories"] = {} if raw is None else {k: list(v) for k, v in raw.categories.items()}
    np.savez(
        path,
        x_test=data.x_test[fed.test_rows],
        y_test=data.y_test[fed.test_rows],
        ids=fed.ids,
        offsets=fed.offsets,
        test_offsets=fed.test_offsets,
        x=data.x_train[fed.rows],
        y=data.y_train[fed.rows],
        about=np.array(json.dumps(about)),
    )


def read_shard(folder: Path, name: str) -> Federation:
    """The clients that `write_shard` wrote."""
    if not name.isalnum() or not (folder / f"{name}.npz").is_file():
        raise DataError(f"there is no shard {shown(name)} here")
    with np.load(folder / f"{name}.npz", allow_pickle=False) as f:
        about = json.loads(str(f["about"]))
        raw = None
        if about["names"] is not None:
            texts = {k: tuple(v) for k, v in about["categories"].items()}
            raw = Unprepared(tuple(about["names"]), texts)
        data = Data("shard", f["x"], f["y"], f["x_test"], f["y_test"], about["classes"], raw=raw)
        return Federation(
            data,
            np.arange(len(f["y"])),
            f["offsets"],
            np.arange(len(f["y_test"])),
            f["test_offsets"],
            f["ids"],
        )
