"""Weak learning oracles: functions fitted to a functional gradient's values on a client's rows.

An oracle returns h close to phi, given phi(x_j) on rows x_j: |h - phi| <= (1 - gamma) |phi| in its
norm, with some gamma > 0. The returned h is a tree of arrays that can be sent; `join` combines
functions, and `values` applies weighted sums of them to rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from foedus.base import random, tree
from foedus.base.rows import Rows
from foedus.base.settings import LOCAL, Means, Settings, check_settings
from foedus.base.spec import Spec
from foedus.base.tree import Tree
from foedus.errors import ConfigError, ModelError, ReplyError
from foedus.models.base import Model, check_fits, model_of
from foedus.models.losses import Squared
from foedus.models.schedules import follows_rounds
from foedus.models.training.descend import descend
from foedus.models.training.gradients import to
from foedus.models.training.settings import Training
from foedus.models.trees import check_trees, fit_trees, predict_trees, some_trees
from foedus.models.trees import join as join_trees
from foedus.wire.arrays import Trees


class Oracle(Settings):
    """Base of the oracles."""

    norm: ClassVar[str] = "l2"

    weighs_rows: ClassVar[bool] = False
    """Whether `fit` takes the weights of rows."""

    bounds: ClassVar[bool] = False
    """Whether `fit` takes `bound`, the largest absolute value of the function."""

    trains: ClassVar[bool] = False
    """Whether it trains and computes values on the device of the rows; results are on the CPU.
    """

    def __post_init__(self) -> None:
        check_settings(self)

    def check(self, spec: Spec) -> None:
        """Raise an error for data that the oracle cannot fit.

        Args:
            spec: The form of the data.
        """

    def fit(self, x: Tensor, target: Tensor, key: Tensor, spec: Spec) -> Tree:
        """A function fitted to targets on rows.

        If the oracle `weighs_rows`, `weight=` gives the weights of the rows (n,), with mean 1.

        Args:
            x: Rows (n, *shape).
            target: Targets (n, k).
            key: The random key of the fit.
            spec: The form of the data.

        Returns:
            The function, as a tree of arrays.
        """
        raise NotImplementedError

    def accept(self, function: Tree, spec: Spec) -> None:
        """Raise `ReplyError` for a function from a client that cannot be one of this oracle's.

        Args:
            function: The function that the client sent.
            spec: The form of the data.
        """

    def accept_joined(self, functions: Tree, count: int, spec: Spec) -> None:
        """Raise `ReplyError` for functions from a server that cannot be this oracle's.

        Args:
            functions: The joined functions that the server sent.
            count: The number of functions there should be.
            spec: The form of the data.
        """

    def join(self, functions: list[Tree]) -> Tree:
        """Several functions as one tree.

        Args:
            functions: The functions.
        """
        raise NotImplementedError

    def concat(self, parts: list[Tree]) -> Tree:
        """Several joined trees as one.

        Args:
            parts: Results of `join`.
        """
        return self.join(parts)

    def values(self, functions: Tree, weights: Tensor, x: Tensor, spec: Spec) -> Tensor:
        """The values sum_j weights_j h_j(x) of joined functions, (n, k).

        Args:
            functions: The joined functions h_j.
            weights: The weight of each function.
            x: Rows (n, *shape).
            spec: The form of the data.
        """
        raise NotImplementedError

    def pick(self, functions: Tree, j: int) -> Tree:
        """One of several joined functions, joined alone.

        Args:
            functions: The joined functions.
            j: The index of the function.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Forest(Oracle):
    """Weak learner: regression trees fitted by least squares, with all outputs in each leaf.

        h(x) = 1/trees sum_t tree_t(x)

    Args:
        trees: The number of trees that are averaged.
        depth: The largest depth; `None`: no limit.
        leaf: The least number of rows in a leaf.
        extra: Split at random thresholds (extremely randomized trees) instead of the best ones.
        features: The fraction of the features that each split considers.
        rows: The fraction of the client's rows that each tree is grown on, drawn anew.

    Raises:
        ConfigError: A setting is out of range.

    Example:
        >>> fed = fd.split(fd.load("digits"), "homogeneity", clients=5, s=0.1)
        >>> run = fd.run(fd.FFGB(fd.Forest(trees=3, depth=6)), fed, rounds=2)
        >>> run.model.predict(fed.data.x_test).shape
        (451,)
    """

    trees: Annotated[int, Ge(1)] = 10
    depth: Annotated[int, Ge(1)] | None = 12
    leaf: Annotated[int, Ge(1)] = 1
    extra: bool = True
    features: Annotated[
        float, Gt(0), Le(1), Means("a part of the features, above 0 and at most 1")
    ] = 0.3

    rows: Annotated[float, Gt(0), Le(1)] = 1.0

    weighs_rows: ClassVar[bool] = True
    bounds: ClassVar[bool] = True

    def fit(
        self, x: Tensor, target: Tensor, key: Tensor, spec: Spec, weight: Tensor | None = None,
        bound: float | None = None,
    ) -> Trees:  # fmt: skip
        """Trees fitted to targets on rows by scikit-learn's builder (`foedus.models.trees`).

        Args:
            x: Rows (n, *shape).
            target: Targets (n, k).
            key: The random key of the fit.
            spec: The form of the data.
            weight: The weight of each row (n,), with mean 1; `None`: all equal.
            bound: The largest absolute value of a leaf; `None`: no limit.

        Returns:
            The trees.
        """
        grown = fit_trees(
            x.numpy().reshape(len(x), -1), target.numpy(), self.trees, int(random.words(key, 1)[0]),
            depth=self.depth, leaf=self.leaf, extra=self.extra, features=self.features,
            rows=self.rows, weight=None if weight is None else weight.numpy(),
        )  # fmt: skip
        if bound is not None:
            grown.value.clamp_(-bound, bound)
        return grown

    def accept(self, function: Tree, spec: Spec) -> None:
        if not isinstance(function, Trees):
            raise ReplyError(f"a reply holds a {type(function).__name__}, not trees")
        check_trees(function, spec.features, spec.outputs, self.trees, self.depth)

    def accept_joined(self, functions: Tree, count: int, spec: Spec) -> None:
        if not isinstance(functions, Trees):
            raise ReplyError(f"it is a {type(functions).__name__}, not trees")
        check_trees(functions, spec.features, spec.outputs, self.trees * count, self.depth)

    def join(self, functions: list[Trees]) -> Trees:
        return join_trees(functions)

    def values(self, functions: Trees, weights: Tensor, x: Tensor, spec: Spec) -> Tensor:
        return predict_trees(functions, x, self.shares(weights))

    def shares(self, weights: Tensor) -> Tensor:
        """The weight of each tree in a weighted sum of functions, each an average of trees.

        Args:
            weights: The weight of each function.
        """
        return weights.double().repeat_interleave(self.trees) / self.trees

    def pick(self, functions: Trees, j: int) -> Trees:
        return some_trees(functions, j * self.trees, (j + 1) * self.trees)


@dataclass(frozen=True)
class Net(Oracle):
    """Weak learner: a network fitted by least squares from its own start (equation 6 of FFGB).

    Args:
        model: A foedus model or any `torch.nn.Module`.
        training: How it is trained; by default Adam with step size 1e-3, 100 epochs, mini-batches
            of 64 rows and gradients clipped to norm 5.

    Raises:
        ConfigError: The step size follows the round; the oracle is fitted anew in every round.

    Example:
        >>> fed = fd.split(fd.load("wine"), "iid", clients=3)
        >>> how = fd.Training(lr=1e-2, optimizer="adam", epochs=5)
        >>> run = fd.run(fd.FFGB(fd.Net(fd.MLP(8), training=how)), fed, rounds=2)
        >>> run.model.predict(fed.data.x_test).shape
        (45,)
    """

    model: Model
    training: Training = Training(lr=1e-3, optimizer="adam", epochs=100, batch_size=64, clip=5.0)  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", model_of(self.model))
        super().__post_init__()
        if follows_rounds(self.training.lr):
            raise ConfigError(
                f"training: lr={self.training.lr!r} follows the round, and an oracle is fitted "
                'anew in every round; use by="step"'
            )

    def check(self, spec: Spec) -> None:
        check_fits("the oracle's model", self.model, spec, descends=type(self).fit is Net.fit)

    weighs_rows: ClassVar[bool] = True
    trains: ClassVar[bool] = True

    def fit(
        self, x: Tensor, target: Tensor, key: Tensor, spec: Spec, weight: Tensor | None = None
    ) -> Tree:
        """Parameters of the model, trained on targets by `descend`.

        Args:
            x: Rows (n, *shape).
            target: Targets (n, k).
            key: The random key of the fit.
            spec: The form of the data.
            weight: The weight of each row (n,), with mean 1; `None`: all equal.

        Returns:
            The parameters, on the CPU.
        """
        target = target.to(x.device)
        rows = Rows(x, target, torch.arange(len(x)), torch.ones(len(x)), spec, None, weight)
        start, key = self.model.init(spec, random.fold(key, 0)), random.fold(key, 1)
        return descend(self.training, self.model, Squared(), start, rows, key)["params"]

    def accept(self, function: Tree, spec: Spec) -> None:
        self._check(function, (), spec)

    def accept_joined(self, functions: Tree, count: int, spec: Spec) -> None:
        self._check(functions, (count,), spec)
        if not tree.all_finite(functions):
            raise ReplyError("parameters are not finite")

    def _check(self, function: Tree, lead: tuple[int, ...], spec: Spec) -> None:
        """Raise `ReplyError` unless these are the model's parameters, with leading dimensions."""
        like = self.model.init(spec, random.key(0))
        if not isinstance(function, dict) or set(function) != set(like):
            raise ReplyError("a reply does not hold parameters of the oracle's model")
        for k, v in like.items():
            shape, given = (*lead, *v.shape), function[k]
            if not isinstance(given, Tensor) or given.shape != shape or given.dtype != v.dtype:
                raise ReplyError(f"a reply's {k} must be {v.dtype} of shape {shape}")

    def join(self, functions: list[Tree]) -> Tree:
        return tree.map(lambda *t: torch.stack(t), *functions)

    def concat(self, parts: list[Tree]) -> Tree:
        return tree.map(lambda *t: torch.cat(t), *parts)

    def values(self, functions: Tree, weights: Tensor, x: Tensor, spec: Spec) -> Tensor:
        with torch.no_grad():
            out = torch.zeros(len(x), spec.outputs, device=x.device)
            functions = to(x.device, functions)
            for j, weight in enumerate(weights.tolist()):
                out += weight * self.model.apply({k: v[j] for k, v in functions.items()}, x)
        return out.cpu()

    def pick(self, functions: Tree, j: int) -> Tree:
        return tree.map(lambda v: v[j : j + 1], functions)


@dataclass(frozen=True)
class MaxNet(Net):
    """Weak learner: a network that minimizes the largest error (Q^infinity, equation 20 of FFGB).

        min_h max_x |phi(x) - h(x)|^2,    by Adam on
        scale / beta log mean exp(beta |phi - h|^2 / scale)

    a smoothed maximum over all rows, with beta rising from 1 to `sharpness` and scale the largest
    |phi|^2.

    Args:
        model: A foedus model or any `torch.nn.Module`.
        training: Not used: `steps` and `lr` take its place.
        steps: The number of steps of Adam, each on all rows.
        lr: The step size.
        sharpness: The final beta, at least 1.

    Example:
        >>> fed = fd.split(fd.load("wine"), "iid", clients=3)
        >>> run = fd.run(fd.FFGB(fd.MaxNet(fd.MLP(8), steps=20)), fed, rounds=2)
        >>> run.model.predict(fed.data.x_test).shape
        (45,)
    """

    steps: Annotated[int, Ge(1)] = 500
    lr: Annotated[float, Gt(0)] = 1e-2
    sharpness: Annotated[float, Ge(1)] = 100.0

    norm: ClassVar[str] = "linf"
    weighs_rows: ClassVar[bool] = False

    def _scale(self, target: Tensor) -> Tensor:
        """The largest |phi|^2; if phi is 0, a value for which Adam's squares stay finite."""
        return target.square().sum(-1).max().clamp(min=1e-12)

    def fit(
        self, x: Tensor, target: Tensor, key: Tensor, spec: Spec, weight: Tensor | None = None
    ) -> Tree:
        """Parameters of the model that minimize the smoothed maximum.

        Args:
            x: Rows (n, *shape).
            target: Targets (n, k).
            key: The random key of the fit.
            spec: The form of the data.
            weight: Not used: a maximum has no weights.

        Returns:
            The parameters, on the CPU.
        """
        target = target.to(x.device)
        scale = self._scale(target)

        def loss(params: dict[str, Tensor], s: int) -> Tensor:
            error = (self.model.apply(params, x) - target).square().sum(-1)
            return smooth_maximum(error / scale, self.sharpness ** (s / self.steps))

        start = to(x.device, self.model.init(spec, random.fold(key, 0)))
        return _adam(start, loss, self.steps, self.lr)


@dataclass(frozen=True)
class SobolevNet(MaxNet):
    """Weak learner: a network close in value and slope (Q^lip, equation 21 of FFGB).

    It is the oracle of `fd.FFGBLipschitz`.

    It adds to the smoothed maximum of `MaxNet` a term for slopes,

        slopes * mean |grad phi - grad h|^2

    over points that are drawn uniformly in the box around the client's rows, anew in every step.

    Args:
        model: A foedus model or any `torch.nn.Module`.
        training: Not used: `steps` and `lr` take its place.
        steps: The number of steps of Adam, each on all rows.
        lr: The step size.
        sharpness: The final beta of the smoothed maximum, at least 1.
        slopes: The factor of the term for slopes.
        points: The number of points at which slopes are compared in a step.

    Example:
        >>> fd.SobolevNet(fd.MLP(8), slopes=0.5).norm
        'lip'
    """

    slopes: Annotated[float, Gt(0)] = 0.1
    points: Annotated[int, Ge(1)] = 64

    norm: ClassVar[str] = "lip"

    def fit_function(
        self, x: Tensor, phi: Callable[[Tensor], Tensor], key: Tensor, spec: Spec
    ) -> Tree:
        """A function fitted to phi, which is known everywhere and can be differentiated.

        Args:
            x: Rows (n, *shape).
            phi: The function.
            key: The random key of the fit.
            spec: The form of the data.

        Returns:
            The parameters of the model.
        """
        with torch.no_grad():
            target = phi(x)
        scale, low, high = self._scale(target), x.amin(0), x.amax(0)
        shape = (self.steps * self.points, *spec.shape)
        draws = low + (high - low) * random.uniform(random.fold(key, 2), shape)

        def slope_of(f: Callable[[Tensor], Tensor], at: Tensor, graph: bool) -> Tensor:
            at = at.detach().requires_grad_()
            slope = partial(torch.autograd.grad, create_graph=graph, retain_graph=True)
            return torch.stack([slope(column, at)[0] for column in f(at).sum(0)])

        def loss(params: dict[str, Tensor], s: int) -> Tensor:
            error = (self.model.apply(params, x) - target).square().sum(-1)
            at = draws[s * self.points : (s + 1) * self.points]
            apart = slope_of(partial(self.model.apply, params), at, True) - slope_of(phi, at, False)
            far = smooth_maximum(error / scale, self.sharpness ** (s / self.steps))
            return far + self.slopes * apart.square().sum(0).flatten(1).sum(-1).mean() / scale

        return _adam(self.model.init(spec, random.fold(key, 0)), loss, self.steps, self.lr)


def _check_sample_weight(model: Any) -> None:
    from sklearn.utils.validation import has_fit_parameter

    if not has_fit_parameter(model, "sample_weight"):
        raise ModelError(
            f"{type(model).__name__} has no sample_weight in fit, and the rows are weighted; use "
            "another estimator, or leave weight= out of fd.load"
        )


def smooth_maximum(values: Tensor, beta: float) -> Tensor:
    """1 / beta log mean exp(beta v): from the mean (beta = 0) to the maximum (infinity)."""
    return (torch.logsumexp(beta * values, 0) - math.log(len(values))) / beta


def _adam(
    start: dict[str, Tensor],
    loss: Callable[[dict[str, Tensor], int], Tensor],
    steps: int,
    lr: float,
) -> dict[str, Tensor]:
    with torch.enable_grad():
        params = {k: v.detach().clone().requires_grad_() for k, v in start.items()}
        optimizer = torch.optim.Adam(params.values(), lr=lr)
        for s in range(steps):
            optimizer.zero_grad()
            loss(params, s).backward()
            optimizer.step()
    return {k: v.detach().cpu() for k, v in params.items()}


def gamma(oracle: Oracle, function: Tree, x: Tensor, target: Tensor, spec: Spec) -> float:
    """The constant of the weak learning assumption that a function reaches on these rows.

        gamma = 1 - |h - phi| / |phi|

    in the oracle's norm: (5) for "l2", (10) for "linf". 1 is exact, 0 no better than the zero
    function.

    Args:
        oracle: The oracle.
        function: The function h.
        x: Rows (n, *shape).
        target: The values phi(x), (n, k).
        spec: The form of the data.
    """
    error = oracle.values(oracle.join([function]), torch.ones(1), x, spec) - target
    if oracle.norm == "l2":
        return float(1 - error.norm() / target.norm().clamp(min=1e-30))
    return float(1 - error.norm(dim=-1).max() / target.norm(dim=-1).max().clamp(min=1e-30))


@dataclass(frozen=True, eq=False)
class Sklearn(Oracle):
    """Weak learner: any scikit-learn regressor (with several outputs), cloned for each fit.

    Functions are sent as skops archives. For simulation: a client runs the estimator's code, so a
    site must list the types that it trusts beyond those of skops.

    Args:
        estimator: The regressor.
        trusted: Full names of types that are loaded from archives besides those that skops trusts.

    Example:
        >>> from sklearn.linear_model import Ridge
        >>> fed = fd.split(fd.load("wine"), "iid", clients=3)
        >>> run = fd.run(fd.FFGB(fd.Sklearn(Ridge())), fed, rounds=2)
        >>> run.model.predict(fed.data.x_test).shape
        (45,)
    """

    estimator: Any
    trusted: tuple[str, ...] = field(default=(), metadata=LOCAL)

    weighs_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.trusted, list):
            object.__setattr__(self, "trusted", tuple(self.trusted))
        super().__post_init__()

    def fit(
        self, x: Tensor, target: Tensor, key: Tensor, spec: Spec, weight: Tensor | None = None
    ) -> Tree:
        """A clone of the estimator, fitted to targets on rows.

        Args:
            x: Rows (n, *shape).
            target: Targets (n, k).
            key: The random key of the fit, for estimators with a `random_state`.
            spec: The form of the data.
            weight: The weight of each row (n,), with mean 1; `None`: all equal.

        Returns:
            A skops archive, as bytes in a tensor.

        Raises:
            ModelError: The estimator returns another number of outputs, or takes no weights.
        """
        import skops.io
        from sklearn.base import clone

        model = clone(self.estimator)
        if "random_state" in model.get_params():
            model.set_params(random_state=int(random.words(key, 1)[0]))
        y = target.numpy() if target.shape[1] > 1 else target[:, 0].numpy()
        rows = x.numpy().reshape(len(x), -1)
        if weight is None:
            fitted = model.fit(rows, y)
        else:
            _check_sample_weight(model)
            fitted = model.fit(rows, y, sample_weight=weight.numpy())
        found = np.asarray(fitted.predict(x[:1].numpy().reshape(1, -1))).reshape(1, -1)
        if found.shape[1] != spec.outputs:
            given = f"{type(model).__name__} returns {found.shape[1]} outputs"
            raise ModelError(f"{given}; the data needs {spec.outputs}")
        return {"archive": torch.from_numpy(np.frombuffer(skops.io.dumps(fitted), np.uint8).copy())}

    def accept(self, function: Tree, spec: Spec) -> None:
        archive = function.get("archive") if isinstance(function, dict) else None
        if not isinstance(archive, Tensor) or archive.dtype != torch.uint8 or archive.dim() != 1:
            raise ReplyError("a reply does not hold an archive of an estimator")
        import skops.io

        try:
            types = set(skops.io.get_untrusted_types(data=archive.numpy().tobytes()))
        except Exception as error:  # any exception of the reader, for bytes of an untrusted client
            raise ReplyError(f"a reply's archive cannot be read: {error!r}") from error
        if types := types - set(self.trusted):
            raise ReplyError(
                f"a reply's archive holds types that are not trusted: {', '.join(sorted(types))}"
            )
        row = torch.zeros(1, spec.features)
        try:
            said = self.values(self.join([function]), torch.ones(1), row, spec)
        # any exception of an object that is not a regressor fitted to such rows
        except Exception as error:
            raise ReplyError(
                f"a reply's archive does not hold a regressor of {spec.features} features: "
                f"{error!r}"
            ) from error
        if said.shape[1] != spec.outputs or not bool(torch.isfinite(said).all()):
            needed = f"{spec.outputs} finite numbers a row"
            raise ReplyError(f"a reply's archive does not hold a regressor that returns {needed}")

    def accept_joined(self, functions: Tree, count: int, spec: Spec) -> None:
        archives = functions.get("archives") if isinstance(functions, dict) else None
        if not isinstance(archives, list) or len(archives) != count:
            raise ReplyError(f"these are not the archives of {count} estimators")
        for archive in archives:
            self.accept({"archive": archive}, spec)

    def join(self, functions: list[Tree]) -> Tree:
        flat: list[Tensor] = []
        for f in functions:
            flat += f["archives"] if "archives" in f else [f["archive"]]
        return {"archives": flat}

    def values(self, functions: Tree, weights: Tensor, x: Tensor, spec: Spec) -> Tensor:
        import skops.io

        out = torch.zeros(len(x), spec.outputs, dtype=torch.float64)
        rows = x.numpy().reshape(len(x), -1)
        for archive, weight in zip(functions["archives"], weights.tolist(), strict=True):
            model = skops.io.loads(archive.numpy().tobytes(), trusted=list(self.trusted))
            predicted = np.asarray(model.predict(rows), float).reshape(len(x), -1)
            out += weight * torch.from_numpy(predicted)
        return out.float()

    def pick(self, functions: Tree, j: int) -> Tree:
        return {"archives": [functions["archives"][j]]}
