"""The rows that sites bring: arrays, tables, torch and Hugging Face data sets, sparse matrices."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np

from foedus.data.dataset import Data
from foedus.data.federation import Federation
from foedus.data.formats.frames import is_frame, label_name
from foedus.data.loading import load
from foedus.data.partition import deal_test_rows
from foedus.errors import DataError, SplitError

_LARGEST = 1 << 33
"""The largest size of a sparse matrix in bytes once it is dense."""


def federation(
    cls: type[Federation], clients: Any, test: Any, classes: int | None, name: str, seed: int,
    reading: dict[str, Any],
) -> Federation:  # fmt: skip
    """See `Federation.from_clients`."""
    if isinstance(clients, tuple) and len(clients) in (2, 3) and _is_array(clients[0]):
        raise SplitError("clients is a pair of arrays; for a single client give [(x, y)]")
    names, given = named(clients, "clients")
    if not given:
        raise SplitError("clients is empty; give at least one (x, y)")
    if isinstance(test, bool) or (isinstance(test, Real) and not 0 <= float(test) < 1):
        raise SplitError(
            f"test={test!r} must be a fraction of at least 0 and below 1, or rows to test"
        )
    test = float(test) if isinstance(test, Real) else test
    called = names or [str(i) for i in range(len(given))]
    parts = [opened(part, f"clients[{k!r}]") for k, part in zip(called, given, strict=True)]
    common = test is not None and not isinstance(test, float | Mapping | list)
    tests: Any = test
    if isinstance(test, Mapping | list):
        tests = _tests(test, names, len(given))
    elif common:
        tests = opened(test, "test")
    if any(map(is_frame, parts)):
        if not all(map(is_frame, parts)):
            raise DataError("some clients bring tables and others arrays; give all the same")
        data = _of_tables(parts, called, tests, common, classes, name, seed, reading)
        test = None if isinstance(test, float) else test  # already held out
    else:
        if reading:
            key = next(iter(reading))
            remedy = (
                "give arrays as (x, y, weights)"
                if key == "weight"
                else "arrays are taken as they are, or made a DataFrame"
            )
            raise DataError(f"{key}= is for tables; {remedy}")
        data = _of_arrays(parts, tests, common, classes, name, names)
    count, owner = len(parts), data.groups_train
    assert owner is not None
    test_owner = data.groups_test
    if test_owner is None:
        test_owner = deal_test_rows(data, owner, count, np.random.default_rng(0))
    settings: dict[str, Any] = {"clients": count}
    fed = cls.from_owners(data, owner, test_owner, np.arange(count), "given", settings)
    return fed.holdout(test, seed) if isinstance(test, float) and test else fed


def _is_array(given: object) -> bool:
    return hasattr(given, "shape") and not is_frame(given)


def _tests(test: Any, names: list[str] | None, count: int) -> list[Any]:
    """The test rows of each client, in the order of the clients."""
    called, given = named(test, "test")
    if (called is None) != (names is None) or (names and set(called or ()) != set(names)):
        raise SplitError("test must have the same names as clients, or be a list as clients is one")
    if len(given) != count:
        raise SplitError(
            f"test has {len(given)} entries for {count} clients; give one a client, or a single "
            "tuple (x, y)"
        )
    if names and called:
        given = [given[called.index(name)] for name in names]
    keys = names or list(map(str, range(count)))
    return [opened(part, f"test[{k!r}]") for k, part in zip(keys, given, strict=True)]


def _of_tables(
    parts: list[Any], names: list[str], test: Any, common: bool, classes: int | None, name: str,
    seed: int, reading: dict[str, Any],
) -> Data:  # fmt: skip
    """One table of the rows of all sites, in their order, read as any other table."""
    import pandas as pd

    if classes is not None:
        raise DataError("classes= is for arrays; the classes of tables are those that occur")
    if "group" in reading:
        raise DataError("group= is for one table; here each client's rows are its own")
    reading["label"] = label_name(parts[0], "clients", reading.get("label"))
    owner = "site of the row"

    def together(parts: list[Any], what: str) -> Any:
        columns = [str(c) for c in parts[0].columns]
        for k, part in zip(names, parts, strict=True):
            if other := set(columns) ^ {str(c) for c in part.columns}:
                raise DataError(
                    f"{what}[{k!r}] and {what}[{names[0]!r}] differ in columns: "
                    f"{', '.join(sorted(other)[:10])}; give all the same"
                )
        parts = [
            p.set_axis(list(map(str, p.columns)), axis=1).assign(**{owner: k})
            for k, p in zip(names, parts, strict=True)
        ]
        kinds: list[set[str]] = [
            {c for c in columns if isinstance(p.dtypes.get(c), pd.CategoricalDtype)} for p in parts
        ]
        texts = set().union(*kinds)  # concatenating unequal categories would lose their type
        if some := sorted(texts - kinds[0].intersection(*kinds)):
            raise DataError(
                f"{what}: column {some[0]!r} holds categories at some sites only; make it "
                "categorical at all of them, or at none: table[column].astype('category')"
            )
        parts = [p.astype(dict.fromkeys(texts, object)) for p in parts]
        return pd.concat(parts, ignore_index=True).astype(dict.fromkeys(texts, "category"))

    rows: Any = test
    if isinstance(test, list):
        rows = together(test, "test")
    elif common:
        if not is_frame(test):
            raise DataError("test is a pair of arrays and the clients bring tables; give a table")
        rows = test.assign(**{owner: names[0]})
    data = load(
        together(parts, "clients"), group=owner, test=0 if test is None else rows, name=name,
        seed=seed, **reading,
    )  # fmt: skip
    # positions by name, in the given order
    place = np.array([names.index(k) for k in data.group_names or ()])
    theirs = None if common else place[data.groups_test]
    return replace(
        data, groups_train=place[data.groups_train], groups_test=theirs, group_names=tuple(names)
    )


def _of_arrays(
    parts: list[Any], test: Any, common: bool, classes: int | None, name: str,
    names: list[str] | None,
) -> Data:  # fmt: skip
    """A data set of the rows of all sites, in their order."""
    x, y, weights, owner = _concatenate(parts, "clients")
    if common and is_frame(test):
        raise DataError("test is a table and the clients bring arrays; give (x, y)")
    x_test = y_test = weights_test = test_owner = None
    if common:
        x_test, y_test, weights_test = test
    elif isinstance(test, list):
        x_test, y_test, weights_test, test_owner = _concatenate(test, "test")
    return Data.from_arrays(
        x, y, x_test, y_test, classes=classes, name=name, groups=owner, groups_test=test_owner,
        group_names=names, weights=weights, weights_test=weights_test,
    )  # fmt: skip


def _concatenate(
    parts: Sequence[tuple[Any, Any, Any]], what: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
    """All rows one after the other, with their weights, if they have some, and their clients."""
    first = tuple(v.shape[1:] for v in parts[0][:2])
    weighted = [weights is not None for *_, weights in parts]
    if any(weighted) and not all(weighted):
        raise DataError(
            f"{what}[{weighted.index(False)}] has no weights, and {what}[{weighted.index(True)}] "
            "has some; give (x, y, weights) for all, or (x, y) for all"
        )
    for k, (x, y, weights) in enumerate(parts):
        if x.ndim < 2 or y.ndim < 1 or len(x) != len(y):
            given = f"{what}[{k}] has x of shape {x.shape} and y of shape {y.shape}"
            raise DataError(f"{given}; give x [n, features] and y [n]")
        if weights is not None and weights.shape != (len(x),):
            raise DataError(
                f"{what}[{k}] has weights of shape {weights.shape} for {len(x)} rows; give one a "
                "row"
            )
        if (x.shape[1:], y.shape[1:]) != first:
            raise DataError(
                f"{what}[{k}] has rows of shape {x.shape[1:]} and {y.shape[1:]}, {what}[0] of "
                f"shape {first[0]} and {first[1]}; give all the same"
            )
    xs, ys, own = zip(*parts, strict=True)
    owner = np.repeat(np.arange(len(parts)), [len(x) for x in xs])
    weights = np.concatenate(own) if any(weighted) else None
    return _joined(list(xs)), np.concatenate(ys), weights, owner


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    """Arrays one after the other, without a copy if they are adjacent parts of one array."""
    first, end = arrays[0], None
    for a in arrays:
        start = a.__array_interface__["data"][0]
        alike = a.dtype == first.dtype and a.flags.c_contiguous and _owner(a) is _owner(first)
        if not alike or end not in (None, start):
            return np.concatenate(arrays)
        end = start + a.nbytes
    shape = (sum(map(len, arrays)), *first.shape[1:])
    # strides of dimensions of size 1 are arbitrary
    strides = np.cumprod([first.itemsize, *shape[:0:-1]])[::-1]
    return np.lib.stride_tricks.as_strided(first, shape, strides.tolist(), writeable=False)


def _owner(array: np.ndarray) -> Any:
    """The array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def named(clients: Any, what: str) -> tuple[list[str] | None, list[Any]]:
    """The names of the clients, if they have some, and their rows."""
    if isinstance(clients, Mapping):
        return [str(name) for name in clients], list(clients.values())
    if isinstance(clients, str | bytes) or not isinstance(clients, Sequence):
        raise SplitError(
            f"{what} is a {type(clients).__name__}; give a dictionary by name, or a list, of what "
            "each client has: (x, y), a DataFrame, or a data set of torch or Hugging Face"
        )
    return None, list(clients)


def opened(given: Any, where: str) -> Any:
    """One client's rows: a DataFrame, or arrays (x, y, weights of rows or `None`)."""
    if is_frame(given):
        return given
    if hasattr(given, "to_pandas") and hasattr(given, "column_names"):  # Hugging Face
        return given.to_pandas()
    if isinstance(given, tuple | list) and len(given) in (2, 3):
        if is_frame(given[0]):
            return _with_labels(given, where)
        weights = np.asarray(given[2]) if len(given) == 3 else None
        return dense(given[0], where), np.asarray(_plain(given[1])), weights
    if "torch" in sys.modules and _is_torch(given):
        return *_of_torch(given, where), None
    raise DataError(
        f"{where} is a {type(given).__name__}; give (x, y), a DataFrame, or a data set of torch or "
        "Hugging Face"
    )


def _with_labels(given: Sequence[Any], where: str) -> Any:
    """A table of features and its labels as one table, so that columns are aligned by name."""
    frame, y = given[:2]
    if len(given) == 3 or "label" in map(str, frame.columns) or len(frame) != len(y):
        raise DataError(
            f"{where} is a DataFrame with separate labels (and weights); give one DataFrame that "
            "has them as columns, with label= (and weight=)"
        )
    return frame.assign(label=np.asarray(_plain(y)))


def dense(x: Any, where: str) -> np.ndarray:
    """Features as an array; sparse matrices become dense, up to a size."""
    if hasattr(x, "toarray") and hasattr(x, "nnz"):
        size = 4 * int(np.prod(x.shape))
        if size > _LARGEST:
            raise DataError(
                f"{where}: a sparse matrix of shape {tuple(x.shape)} would take {size / 2**30:.0f} "
                "GiB once it is dense; leave out columns, or hash them into fewer"
            )
        return x.astype(np.float32).toarray()
    return np.asarray(_plain(x))


def _plain(values: Any) -> Any:
    """A tensor without its graph, on the CPU; other values unchanged."""
    return values.detach().cpu() if hasattr(values, "detach") else values


def _is_torch(given: object) -> bool:
    from torch.utils.data import DataLoader, Dataset

    return isinstance(given, Dataset | DataLoader)


def _of_torch(given: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    """All rows of a Dataset, in order, or of a DataLoader, in its order."""
    import torch
    from torch.utils.data import DataLoader, IterableDataset, TensorDataset

    if isinstance(given, TensorDataset) and len(given.tensors) == 2:
        x, y = given.tensors
        return x.numpy(), y.numpy()
    if isinstance(given, DataLoader) and given.drop_last:
        raise DataError(f"{where}: this DataLoader leaves rows out; make one with drop_last=False")
    loader = given
    if not isinstance(given, DataLoader):
        whole = not isinstance(given, IterableDataset)
        loader = DataLoader(given, batch_size=1024 if whole else 256)
    xs, ys = [], []
    for batch in loader:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            count = len(batch) if isinstance(batch, tuple | list) else 0
            found = f"{count} values" if count > 1 else type(batch).__name__
            raise DataError(
                f"{where}: its items must be pairs (x, y), not {found}; give a Dataset of such "
                "pairs, or arrays (x, y)"
            )
        x, y = (part if isinstance(part, torch.Tensor) else torch.as_tensor(part) for part in batch)
        xs.append(x.numpy())
        ys.append(y.numpy())
    if not xs:
        raise DataError(f"{where} has no rows")
    return np.concatenate(xs), np.concatenate(ys)
