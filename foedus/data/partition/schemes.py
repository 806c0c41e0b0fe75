"""`fd.split`, and the schemes by name.

A scheme is a function `(data, clients, rng, **options) -> Division`.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt, Lt

from foedus.base.settings import Means, check_value
from foedus.base.toml import section
from foedus.data.dataset import Data
from foedus.data.federation import Federation
from foedus.data.partition.base import deal_test_rows
from foedus.data.partition.concepts import permuted
from foedus.data.partition.features import covariate, noise, rotations
from foedus.data.partition.given import is_partitioner, natural, partitioned
from foedus.data.partition.labels import dirichlet, homogeneity, iid, labels
from foedus.data.partition.sizes import lognormal, quantity
from foedus.data.partition.targets import quantiles, targets
from foedus.data.partition.tasks import tasks
from foedus.errors import SplitError, unknown

SCHEMES: dict[str, Callable[..., Any]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "homogeneity": homogeneity,
    "labels": labels,
    "tasks": tasks,
    "quantity": quantity,
    "lognormal": lognormal,
    "targets": targets,
    "quantiles": quantiles,
    "rotations": rotations,
    "noise": noise,
    "covariate": covariate,
    "permuted": permuted,
    "natural": natural,
}

_BY_LABEL = ("dirichlet", "homogeneity", "labels", "tasks", "permuted")
_BY_TARGET = {"targets": "homogeneity", "quantiles": "dirichlet"}
"""Schemes for regression, and the corresponding schemes for labels."""


def split(
    data: Data,
    scheme: str | Any = "iid",
    *,
    clients: int | None = None,
    seed: int = 0,
    test: float | None = None,
    **options: Any,
) -> Federation:
    """Divide the rows of a data set among clients; the same seed gives the same division.

    Schemes, with their options:

    - `"iid"`: rows at random, sizes equal up to one row.
    - `"dirichlet"` (`alpha`, `min_rows=1`): the shares of each label among the clients are drawn
      from a Dirichlet distribution with parameter alpha (Hsu et al. 2019; Wang et al. 2020).
      Clients below `min_rows` then receive rows of the largest.
    - `"homogeneity"` (`s`): a random fraction s of the rows is shared evenly, the rest is sorted by
      label and handed out in that order (FFGB; Karimireddy et al. 2020; Hsu et al. 2020). Sizes are
      equal up to one row.
    - `"labels"` (`per_client=3`): each client holds rows of exactly this number of labels (of fewer
      only if a label has fewer rows than clients that should hold it), and each label is held by
      about equally many clients (FedFW, Section 5).
    - `"tasks"` (`n0=30`, `merged=0.3`): FedRes' binary tasks, see `foedus.data.partition.tasks`. By
      definition it uses only part of the rows.
    - `"quantity"` (`exponent=1.0`, `min_rows=1`): random rows, power-law sizes: the client of rank
      r (drawn at random) has a share r^-exponent / sum_q q^-exponent of them.
    - `"lognormal"` (`sigma`, `min_rows=1`): random rows, shares exp(sigma z_k) / sum_j exp(sigma
      z_j) with z ~ N(0, 1).
    - `"targets"` (`s`), for regression: as "homogeneity" with the rest sorted by y, so that clients
      hold ranges of y; s=1 is iid, s=0 fully sorted.
    - `"quantiles"` (`alpha`, `bins=10`, `min_rows=1`), for regression: as "dirichlet" with the bins
      between quantiles of y as labels.
    - `"rotations"` (`angles=90.0`): rows at random; the images of client k are rotated
      counterclockwise by k * angles degrees, or by angles[k] of a list (repeated if it is shorter).
      Quarter turns are exact, others interpolated.
    - `"noise"` (`sigma`): rows at random; client k adds Gaussian noise of standard deviation sigma
      k / (clients - 1) to its features (as Li et al. 2022, who scale the variance).
    - `"covariate"` (`tilt`, `direction=None`, `min_rows=1`): row x goes to client k with
      probability proportional to exp(tilt c_k z(x)), with c_k evenly spaced from -1 to 1 and z(x)
      the standardized feature `direction`, or a random direction of all features. The distribution
      of labels given x is the same at all clients; tilt=0 is iid.
    - `"permuted"` (`kinds=None`): rows at random; client k permutes the labels by a permutation of
      its own, or by one of `kinds` permutations in turn, of which the first is the identity.
    - `"natural"`: clients are the groups of the data; `clients`, if given, must be their number.
    - A partitioner of flwr-datasets, such as `DirichletPartitioner(10, partition_by="label",
      alpha=0.5)`: see `foedus.data.partition.given`.

    Test rows of a label are dealt to clients in proportion to their training rows of it (in
    proportion to size for regression, in each range of y for "targets" and "quantiles"; drawn as
    training rows are for "covariate"). Natural test rows go by `groups_test`; those of a group
    without training rows stay in the common test set only. Changes to a client's training rows
    ("rotations", "noise", "permuted") are made to its test rows, too.

    Args:
        data: The data set.
        scheme: The name of a scheme, or a partitioner of flwr-datasets.
        clients: The number of clients; not needed for "natural" and partitioners.
        seed: The seed of the division.
        test: The fraction of its rows that each client holds out as its test rows, in place of the
            test rows of `data` (`Federation.holdout`); `None`: the test rows of `data`.
        **options: The options of the scheme.

    Returns:
        The federation, with the options in its `settings`.

    Raises:
        SplitError: The scheme or an option is unknown, or the rows cannot be divided that way.

    Example:
        >>> fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.3, seed=0)
        >>> int(fed.sizes.min()), int(fed.sizes.max())
        (36, 247)

    Reference:
        Li, Diao, Chen, He, "Federated learning on non-IID data silos: an experimental study", ICDE
        2022.
    """
    fed = _divided(data, scheme, clients, seed, test, options)
    if data.origin is not None and isinstance(scheme, str):
        count = {} if clients is None else {"clients": int(clients)}
        held = {} if test is None else {"test": test}
        division = {"scheme": scheme, **count, "seed": int(seed), **held, **options}
        object.__setattr__(fed, "origin", _origin(data.origin, division))
    return fed


def _origin(data: Mapping[str, Any], division: Mapping[str, Any]) -> str | None:
    """The sections [data] and [split] of a file, if TOML has such values."""
    plain = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in division.items()}
    text = f"{section('data', data)}\n\n{section('split', plain)}"
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None
    return text


def _divided(
    data: Data, scheme: Any, clients: int | None, seed: int, test: float | None, options: dict
) -> Federation:
    if not isinstance(data, Data):
        raise SplitError(
            f"data is a {type(data).__name__}; load it first: fd.load(data, label=...), or "
            "fd.Data.from_arrays(x, y)"
        )
    check_value("seed", seed, Annotated[int, Ge(0)], SplitError)
    if test is not None:
        part = Annotated[float, Gt(0), Lt(1), Means("a fraction above 0 and below 1, such as 0.25")]
        check_value("test", test, part, SplitError)
        return _divided(data, scheme, clients, seed, None, options).holdout(test, seed)
    rng = np.random.default_rng(seed)
    if not isinstance(scheme, str) and is_partitioner(scheme):
        if options:
            raise SplitError(
                f"option {next(iter(options))!r} is unknown to {type(scheme).__name__}; a "
                "partitioner has its options already"
            )
        return partitioned(data, scheme, clients, seed, rng)
    if not isinstance(scheme, str) or scheme not in SCHEMES:
        raise SplitError(unknown("scheme", scheme, SCHEMES))
    _check_options(scheme, options)
    if scheme == "natural":
        return natural(data, clients, rng)
    if clients is None:
        raise SplitError(f"scheme {scheme!r} needs clients=, the number of clients")
    check_value("clients", clients, Annotated[int, Ge(1)], SplitError)
    clients = int(clients)
    if clients > len(data.x_train):
        raise SplitError(
            f"clients={clients} is more than the {len(data.x_train)} training rows of "
            f"{data.name!r}; no client may be empty"
        )
    if data.classes is None and scheme in _BY_LABEL:
        others = ", ".join(repr(name) for name in SCHEMES if name not in _BY_LABEL)
        raise SplitError(
            f"scheme {scheme!r} divides by label, and {data.name!r} is a regression set; use one "
            f"of {others}"
        )
    if data.spec.steps and scheme in (*_BY_LABEL, *_BY_TARGET):
        rest = [repr(k) for k in SCHEMES if k not in _BY_LABEL and k not in _BY_TARGET]
        raise SplitError(
            f"scheme {scheme!r} divides by the label of a row, and rows of {data.name!r} have "
            f"{data.spec.steps} labels each, one for each step of a sequence; use one of "
            f"{', '.join(rest)}, or groups= and 'natural'"
        )
    if data.classes is not None and scheme in _BY_TARGET:
        raise SplitError(
            f"scheme {scheme!r} divides by a number to predict, and {data.name!r} has labels; use "
            f"{_BY_TARGET[scheme]!r}"
        )
    made = SCHEMES[scheme](data, clients, rng, **options)
    held = data if made.data is None else made.data
    test_owner = made.test_owner
    if test_owner is None:
        test_owner = deal_test_rows(held, made.owner, clients, rng)
    settings = {"clients": clients, "seed": int(seed), **options}
    for p in scheme_options(SCHEMES[scheme]):
        settings.setdefault(p.name, p.default)
    settings |= made.settings
    return Federation.from_owners(
        held, made.owner, test_owner, np.arange(clients), scheme, settings
    )


def scheme_options(scheme: Callable) -> list[inspect.Parameter]:
    """The options of a scheme: its keyword-only parameters."""
    parameters = inspect.signature(scheme).parameters.values()
    return [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]


def _check_options(scheme: str, options: dict) -> None:
    parameters = scheme_options(SCHEMES[scheme])
    for name in options:
        if name not in [p.name for p in parameters]:
            takes = ", ".join(p.name for p in parameters) or "none"
            raise SplitError(f"option {name!r} is unknown to scheme {scheme!r} (allowed: {takes})")
    for p in parameters:
        if p.default is inspect.Parameter.empty and p.name not in options:
            raise SplitError(f"scheme {scheme!r} needs {p.name}=, for example {p.name}=0.5")
