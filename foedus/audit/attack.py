"""Reconstruction of a client's images from a gradient or a Frank-Wolfe message."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from foedus.base import random
from foedus.base.spec import Spec
from foedus.errors import ConfigError
from foedus.geometry import Domain, L1Ball, L2Ball, ModelDomain, PerLayer, Simplex, Whole
from foedus.geometry.domain import dense
from foedus.models.base import Model, Params, image_shape

ENOUGH = 1e-12
"""A mismatch below which an attack ends: the message is explained up to float32 rounding."""


def psnr(image: Tensor, original: Tensor, span: float = 1.0) -> float:
    """Peak signal-to-noise ratio in decibel, 10 log10(span^2 / mean squared error)."""
    error = float((image.double() - original.double()).square().mean())
    return math.inf if error == 0 else 10 * math.log10(span**2 / error)


@dataclass(frozen=True)
class SigmoidLeNet(Model):
    """DLG's network: three 5x5 convolutions of 12 filters (strides 2, 2, 1), then a linear layer.

    The convolutions have sigmoids.

    Weights and biases start uniform on (-1/2, 1/2). It is smooth, so a gradient has a gradient.
    """

    batchable = False

    def check(self, spec: Spec) -> None:
        image_shape(spec)

    def init(self, spec: Spec, key: Tensor) -> Params:
        channels, height, width = image_shape(spec)
        flat = 12 * -(-height // 4) * -(-width // 4)
        shapes: dict[str, tuple[int, ...]] = {}
        for i, inputs in enumerate((channels, 12, 12)):
            shapes |= {f"conv{i}": (12, inputs, 5, 5), f"conv_bias{i}": (12,)}
        shapes |= {"weight": (spec.outputs, flat), "bias": (spec.outputs,)}
        return {
            name: random.uniform(random.fold(key, i), shape) - 0.5
            for i, (name, shape) in enumerate(shapes.items())
        }

    def apply(self, params: Params, x: Tensor) -> Tensor:
        for i, stride in enumerate((2, 2, 1)):
            filters = params[f"conv{i}"], params[f"conv_bias{i}"]
            x = F.conv2d(x, *filters, stride=stride, padding=2).sigmoid()
        return F.linear(x.flatten(1), params["weight"], params["bias"])


# -- messages --------------------------------------------------------------------------------------


def gradient(
    model: Model, params: Params, image: Tensor, soft: Tensor, *, graph: bool = False
) -> Params:
    """The gradient of an image's cross-entropy; with `graph`, it can be differentiated again."""
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    loss = -(soft * model.apply(leaves, image.unsqueeze(0)).log_softmax(-1)).sum()
    slopes = torch.autograd.grad(loss, list(leaves.values()), create_graph=graph)
    return dict(zip(leaves, slopes, strict=True))


def message(g: Params, domain: ModelDomain | None) -> Any:
    """The message: the gradient, or the extreme point of a set that its oracle returns for it."""
    return g if domain is None else domain.lmo(g)


def opened(sent: Any, domain: ModelDomain | None, like: Params) -> Params:
    """A message as dense float64 tensors: the gradient, or an extreme point (sign of a step)."""
    parts = sent if domain is None else domain.dense(sent, like)
    return {name: t.double() for name, t in parts.items()}


def blurred(seen: Params, noise: float, key: Tensor) -> Params:
    """A message with normal noise of `noise` times its norm on every number."""
    if not noise:
        return seen
    deviation = noise * math.sqrt(sum(float(t.square().sum()) for t in seen.values()))
    return {
        k: t + deviation * random.normal(random.fold(key, i), t.shape).double()
        for i, (k, t) in enumerate(seen.items())
    }


def mismatch(seen: Params, domain: ModelDomain | None) -> Callable[[Params], Tensor]:
    """The mismatch between a gradient and a message from `opened`: at least 0, up to rounding."""
    if domain is None:
        size = _total(t.square().sum() for t in seen.values())
        return lambda g: _total((g[name] - t).square().sum() for name, t in seen.items()) / size
    if isinstance(domain, PerLayer):
        parts = {name: (d, seen[name]) for name, d in domain.each(seen).items()}
        return lambda g: _total(_mismatch(*p, g[k]) for k, p in parts.items()) / len(parts)
    if not isinstance(domain, Whole):
        allowed = "a set such as L1Ball(10.0), Whole(set) or PerLayer(set)"
        raise ConfigError(f"domain must be {allowed}, not {domain!r}")
    joined = _joined(seen)
    return lambda g: _mismatch(domain.domain, joined, _joined(g))


def _total(values: Iterable[Tensor]) -> Tensor:
    return cast("Tensor", sum(values))


def _joined(tensors: Params) -> Tensor:
    """The vector that `Whole` sees; a single tensor keeps its shape."""
    each = list(tensors.values())
    return each[0] if len(each) == 1 else torch.cat([t.flatten() for t in each])


def _mismatch(domain: Domain, s: Tensor, g: Tensor) -> Tensor:
    """The mismatch between the gradient g and the extreme point s of one set: see the table of the
    module."""
    tiny = torch.finfo(g.dtype).tiny
    size = torch.linalg.vector_norm(g).clamp(min=tiny)
    if isinstance(domain, L2Ball):
        return 1 + (g * s).sum() / (size * torch.linalg.vector_norm(s).clamp(min=tiny))
    if isinstance(domain, L1Ball | Simplex):
        logits = -g.flatten() * math.sqrt(g.numel()) / size
        entry = s.flatten().abs().argmax()
        sign = s.flatten()[entry].sign()
        rivals = logits if isinstance(domain, Simplex) else torch.cat((logits, -logits))
        return rivals.logsumexp(0) - sign * logits[entry]
    # by Danskin's theorem a constant, as far as the slope goes
    best = dense(domain.lmo(g.detach()))
    return (g * (s - best)).sum() / (max(domain.diameter_of(g.shape), tiny) * size)


def label_shown(seen: Params, domain: ModelDomain | None, classes: int) -> int | None:
    """The label that the last layer shows, if it shows one.

    The derivative in the last bias is negative for the true label only; if the message has no
    biases, the sums of the rows of the last weights serve, if the activations below are positive
    (sigmoid, ReLU).
    """
    layers = [t for t in list(seen.values())[-2:] if t.shape[0] == classes]
    last = [t if domain is not None else -t for t in layers]
    for t in sorted(last, key=Tensor.dim):
        evidence = t.flatten(1).sum(-1) if t.dim() > 1 else t
        if bool(evidence.any()):
            return int(evidence.argmax()) if evidence.max() > 0 else None
    return None


# -- the attack ------------------------------------------------------------------------------------


class Guess(NamedTuple):
    """The state of the observer after some iterations."""

    image: Tensor
    label: int
    loss: float


def attack(
    explain: Callable[[Tensor, Tensor], Tensor],
    shape: tuple[int, ...],
    classes: int,
    *,
    key: Tensor,
    iterations: int,
    label: int | None = None,
) -> Iterator[Guess]:
    """L-BFGS from one random image; yields the start, then the guess of every iteration.

    It never sees the original. explain(image, soft_label) is the mismatch to minimize. label: the
    known label, or None to search for it as well. Images start uniform on [0, 1], which the
    observer knows to be the range of pixels; a guess is clamped to it. Ends early below `ENOUGH`.
    """
    image = random.uniform(random.fold(key, 0), shape, torch.float64).requires_grad_()
    logits = random.normal(random.fold(key, 1), (classes,), torch.float64).requires_grad_()
    known = None if label is None else F.one_hot(torch.tensor(label), classes).double()
    unknowns = [image, logits] if known is None else [image]
    optimizer = torch.optim.LBFGS(
        unknowns,
        max_iter=1,
        max_eval=26,
        tolerance_grad=0,
        tolerance_change=0,
        history_size=100,
        line_search_fn="strong_wolfe",
    )  # one iteration a step: the memory of earlier ones is kept
    last: list[tuple[list[Tensor], Tensor, tuple[Tensor, ...]]] = []

    def closure() -> Tensor:
        # a step begins where the last line search ended; reuse that evaluation
        if not last or not all(map(torch.equal, last[0][0], unknowns)):
            loss = explain(image, logits.softmax(-1) if known is None else known)
            place = [u.detach().clone() for u in unknowns]
            last[:] = [(place, loss.detach(), torch.autograd.grad(loss, unknowns))]
        for u, slope in zip(unknowns, last[0][2], strict=True):
            u.grad = slope.clone()
        return last[0][1]

    for iteration in range(iterations + 1):
        loss = float(closure())
        if not math.isfinite(loss) or not all(bool(u.isfinite().all()) for u in unknowns):
            return  # what came before stands
        found = int(logits.argmax()) if label is None else label
        yield Guess(image.detach().clamp(0, 1).float(), found, loss)
        if loss < ENOUGH or iteration == iterations:
            return
        optimizer.step(closure)


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """What the observer of one message found, by the start with the least mismatch at its end.

    Lists have an entry for the random start and one for each iteration (fewer than asked for if the
    message was explained earlier). psnr: of the guess against the original, which the observer
    cannot know. loss: the mismatch it minimizes. image: the last guess. shots: guesses at some
    iterations. label: the one found, and label_shown whether the last layer revealed it. explained:
    whether the last guess would send the observed message. twins: how many of the `others` do.
    """

    bytes: int
    psnr: list[float]
    loss: list[float]
    image: Tensor
    shots: dict[int, Tensor]
    label: int
    label_shown: bool
    explained: bool
    twins: int
