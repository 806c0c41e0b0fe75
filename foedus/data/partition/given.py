"""Given divisions: by the groups of the data, or by a partitioner of flwr-datasets."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from foedus.base.settings import check_value
from foedus.data.dataset import Data
from foedus.data.federation import Federation
from foedus.data.partition.base import deal_test_rows
from foedus.errors import SplitError


def natural(data: Data, clients: int | None, rng: np.random.Generator) -> Federation:
    """The federation whose clients are the groups of the data."""
    if data.groups_train is None:
        raise SplitError(
            f"scheme 'natural' needs groups, and {data.name!r} has none; load it with group=, or "
            "give Data groups_train"
        )
    ids, owner = np.unique(data.groups_train, return_inverse=True)
    check_value("clients", clients, Annotated[int, Ge(1)] | None, SplitError)
    if clients is not None and clients != len(ids):
        raise SplitError(
            f"clients={clients}, but {data.name!r} has {len(ids)} groups; leave clients out, then "
            ".select() those you want"
        )
    if data.groups_test is None:
        test_owner = deal_test_rows(data, owner, len(ids), rng)
    else:
        place = np.minimum(np.searchsorted(ids, data.groups_test), len(ids) - 1)
        test_owner = np.where(ids[place] == data.groups_test, place, -1)
    return Federation.from_owners(data, owner, test_owner, ids, "natural", {"clients": len(ids)})


def is_partitioner(scheme: object) -> bool:
    """Whether an object has the interface of flwr-datasets' partitioners."""
    interface = {"dataset", "load_partition", "num_partitions"}
    return not isinstance(scheme, type) and interface <= set(dir(scheme))


def partitioned(
    data: Data, partitioner: Any, clients: int | None, seed: int, rng: np.random.Generator
) -> Federation:
    """The federation that a partitioner of flwr-datasets makes.

    The partitioner receives a data set with the columns `row` (the number of the training row),
    `label` and `y` (the label or target, except for labels of the steps of a sequence) and, if the
    data has groups, `group`.
    """
    name = type(partitioner).__name__
    try:
        from datasets import Dataset
    except ImportError:
        raise SplitError(
            f"scheme={name}: partitioners of flwr-datasets need Hugging Face's datasets: "
            "pip install datasets"
        ) from None
    rows = np.arange(len(data.y_train))
    columns = {"row": rows}
    if data.spec.steps is None:
        y = data.y_train if data.y_train.ndim == 1 else data.y_train[:, 0]
        columns |= {"label": y, "y": y}
    if data.groups_train is not None:
        columns["group"] = data.groups_train
    settings = _arguments(partitioner)
    owner = np.full(len(rows), -1, np.int64)
    try:
        partitioner.dataset = Dataset.from_dict(columns)
        count = int(partitioner.num_partitions)
        for k in range(count):
            part = np.asarray(partitioner.load_partition(k)["row"], np.int64)
            if (owner[part] >= 0).any() or len(np.unique(part)) < len(part):
                raise SplitError(f"scheme={name} gives a row twice; foedus divides by rows")
            owner[part] = k
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, SplitError):
            raise
        raise SplitError(
            f"scheme={name} cannot divide {data.name!r}: {error} (its columns are "
            f"{', '.join(columns)}; a partitioner divides one data set, so make a new one)"
        ) from error
    if clients is not None and clients != count:
        raise SplitError(f"clients={clients}, but {name} makes {count} partitions; leave it out")
    sizes = np.bincount(owner[owner >= 0], minlength=count)
    if not sizes.all():
        raise SplitError(f"{name} gives no rows to client {int(sizes.argmin())}; use fewer clients")
    test_owner = deal_test_rows(data, owner, count, rng)
    settings = {"clients": count, "seed": int(seed), **settings}
    return Federation.from_owners(data, owner, test_owner, np.arange(count), name, settings)


def _arguments(partitioner: Any) -> dict[str, Any]:
    """The plain arguments of a partitioner, as far as it stores them as `_name`."""
    names = inspect.signature(type(partitioner)).parameters
    kept = {name: vars(partitioner).get(f"_{name}") for name in names}
    plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in kept.items()}
    return {k: v for k, v in plain.items() if isinstance(v, bool | int | float | str | list)}
