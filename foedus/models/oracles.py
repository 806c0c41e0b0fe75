"""Weak learning oracles: fit a function to a functional gradient's values on a client's rows.

An oracle is asked for h close to phi, given phi(x_j) on rows x_j: |h - phi| <= (1 - gamma) |phi| in
its norm, with some gamma > 0. What it returns is a tree of arrays that can be sent; `join` puts
functions together, `values` applies weighted sums of them to rows.
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

    trains: ClassVar[bool] = False
    """Whether rows may be on another device than the CPU, where it trains and computes values; what
    it returns is on the CPU.
    """

    def __post_init__(self) -> None:
        check_settings(self)

    def check(self, spec: Spec) -> None:
        """Refuse data that the oracle cannot fit."""

    def fit(self, x: Tensor, target: Tensor, key: Tensor, spec: Spec) -> Tree:
        """A function for targets (n, k) on rows (n, *shape).

        Where the oracle `weighs_rows`, `weight=` gives the weights of the rows (n,), with mean 1.
        """
        raise NotImplementedError

    def accept(self, function: Tree, spec: Spec) -> None:
        """Refuse a function that came from a client and cannot be one of this oracle's."""

    def accept_joined(self, functions: Tree, count: int, spec: Spec) -> None:
        """Refuse what came from a server and cannot be `count` joined functions of this oracle."""

    def join(self, functions: list[Tree]) -> Tree:
        """Many functions as one tree."""
        raise NotImplementedError

    def concat(self, parts: list[Tree]) -> Tree:
        """What was joined, joined again."""
        return self.join(parts)

    def values(self, functions: Tree, weights: Tensor, x: Tensor, spec: Spec) -> Tensor:
        """sum_j weights_j h_j(x) of joined functions: (n, k)."""
        raise NotImplementedError

    def pick(self, functions: Tree, j: int) -> Tree:
        """The j-th of joined functions, joined alone."""
        raise NotImplementedError


@dataclass(frozen=True)
class Forest(Oracle):
    """Least squares by regression trees: the average of `trees` of them, all outputs in each leaf.

    extra: splits at random thresholds (extremely randomised trees) instead of the best ones.
    features: the part of the features that a split may look at. depth: at most; `None`: no limit.
    leaf: rows in a leaf, at least.
    """

    trees: Annotated[int, Ge(1)] = 10
    depth: Annotated[int, Ge(1)] | None = 12
    leaf: Annotated[int, Ge(1)] = 1
    extra: bool = True
    features: Annotated[
        float, Gt(0), Le(1), Means("a part of the features, above 0 and at most 1")
    ] = 0.3

    weighs_rows: ClassVar[bool] = True

    def fit(
        self, x: Tensor, target: Tensor, key: Tensor, spec: Spec, weight: Tensor | None = None
    ) -> Trees:
        return fit_trees(
            x.numpy().reshape(len(x), -1), target.numpy(), self.trees, int(random.words(key, 1)[0]),
            depth=self.depth, leaf=self.leaf, extra=self.extra, features=self.features,
            weight=None if weight is None else weight.numpy(),
        )  # fmt: skip

    def accept(self, function: Tree, spec: Spec) -> None:
        if not isinstance(function, Trees):
            raise ReplyError(f"a reply holds a {type(function).__name__} where trees were due")
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
        """The weight of each tree in the sum of functions, each an average of trees."""
        return weights.double().repeat_interleave(self.trees) / self.trees

    def pick(self, functions: Trees, j: int) -> Trees:
        return some_trees(functions, j * self.trees, (j + 1) * self.trees)


@dataclass(frozen=True)
class Net(Oracle):
    """Least squares by a network, from its own start, with Adam (equation 6).

    model: any model (or `nn.Module`); `training` says how: by default Adam, 1e-3, 100 epochs,
    batches of 64.
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
        """Refuse what does not have the form of the model's parameters, with leading dimensions."""
        like = self.model.init(spec, random.key(0))
        if not isinstance(function, dict) or set(function) != set(like):
            raise ReplyError("a reply holds no parameters of the oracle's model")
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
    """A network that is nowhere far off (Q^infinity, equation 20): min max_x |phi(x) - h(x)|^2.

    By Adam on a smoothed maximum, scale / beta log mean exp(beta |phi - h|^2 / scale), with beta
    rising from 1 to `sharpness` and scale the largest |phi|^2, over all rows in each of `steps`.
    """

    steps: Annotated[int, Ge(1)] = 500
    lr: Annotated[float, Gt(0)] = 1e-2
    sharpness: Annotated[float, Ge(1)] = 100.0

    norm: ClassVar[str] = "linf"
    weighs_rows: ClassVar[bool] = False

    def _scale(self, target: Tensor) -> Tensor:
        """The largest |phi|^2; where phi is 0, enough that Adam's squares stay finite."""
        return target.square().sum(-1).max().clamp(min=1e-12)

    def fit(
        self, x: Tensor, target: Tensor, key: Tensor, spec: Spec, weight: Tensor | None = None
    ) -> Tree:
        target = target.to(x.device)
        scale = self._scale(target)

        def loss(params: dict[str, Tensor], s: int) -> Tensor:
            error = (self.model.apply(params, x) - target).square().sum(-1)
            return smooth_maximum(error / scale, self.sharpness ** (s / self.steps))

        start = to(x.device, self.model.init(spec, random.fold(key, 0)))
        return _adam(start, loss, self.steps, self.lr)


@dataclass(frozen=True)
class SobolevNet(MaxNet):
    """A network close in value and slope (Q^lip, equation 21), for `fd.FFGBLipschitz`.

    To the smoothed maximum of (20) it adds `slopes` times the mean of |grad phi - grad h|^2 over
    `points` points, drawn uniformly in the box around the client's rows, anew in every step.
    """

    slopes: Annotated[float, Gt(0)] = 0.1
    points: Annotated[int, Ge(1)] = 64

    norm: ClassVar[str] = "lip"

    def fit_function(
        self, x: Tensor, phi: Callable[[Tensor], Tensor], key: Tensor, spec: Spec
    ) -> Tree:
        """A function for phi, which is known everywhere and can be differentiated."""
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
        optimiser = torch.optim.Adam(params.values(), lr=lr)
        for s in range(steps):
            optimiser.zero_grad()
            loss(params, s).backward()
            optimiser.step()
    return {k: v.detach().cpu() for k, v in params.items()}


def gamma(oracle: Oracle, function: Tree, x: Tensor, target: Tensor, spec: Spec) -> float:
    """The constant of the weak learning assumption reached on these rows: 1 - |h - phi| / |phi|.

    In the oracle's norm: (5) for "l2", (10) for "linf". 1 is exact, 0 no better than the zero
    function.
    """
    error = oracle.values(oracle.join([function]), torch.ones(1), x, spec) - target
    if oracle.norm == "l2":
        return float(1 - error.norm() / target.norm().clamp(min=1e-30))
    return float(1 - error.norm(dim=-1).max() / target.norm(dim=-1).max().clamp(min=1e-30))


@dataclass(frozen=True, eq=False)
class Sklearn(Oracle):
    """Any scikit-learn regressor (of several outputs), cloned for each fit; sent by skops.

    For simulation: a client runs code of the estimator, so a site must list the types that it
    trusts beyond those of skops.
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
            raise ReplyError("a reply holds no archive of an estimator")
        import skops.io

        try:
            types = set(skops.io.get_untrusted_types(data=archive.numpy().tobytes()))
        except Exception as error:  # whatever an untrusted client's bytes make of the reader
            raise ReplyError(f"a reply's archive cannot be read: {error!r}") from error
        if types := types - set(self.trusted):
            raise ReplyError(
                f"a reply's archive holds types that are not trusted: {', '.join(sorted(types))}"
            )
        row = torch.zeros(1, spec.features)
        try:
            said = self.values(self.join([function]), torch.ones(1), row, spec)
        # whatever an object does that is no fitted regressor for these rows
        except Exception as error:
            raise ReplyError(
                f"a reply's archive holds no regressor of {spec.features} features: {error!r}"
            ) from error
        if said.shape[1] != spec.outputs or not bool(torch.isfinite(said).all()):
            needed = f"{spec.outputs} finite numbers a row"
            raise ReplyError(f"a reply's archive holds no regressor that says {needed}")

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
