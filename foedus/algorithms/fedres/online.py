"""FedRes as a service: sites that predict and then learn, one row at a time, and a hub that learns
from what they send.

    hub = fd.Hub(algorithm, spec)
    site = fd.Site(algorithm, spec, id=7)
    site.receive(hub.broadcast())                  # bytes, by any transport
    guess = site.predict(x)                        # one row
    message = site.learn(x, y)                     # once the truth is known
    hub.learn({7: message})

The numbers are those of `fd.run`; a message is in foedus' wire form, and what comes from a peer is
checked before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foedus import wire
from foedus.algorithms.fedres.pair import logits, part_spec
from foedus.algorithms.fedres.settings import check_ids
from foedus.algorithms.fedres.sgd import FedRes
from foedus.algorithms.fedres.step import act, descended
from foedus.base import random, tree
from foedus.base.columns import part
from foedus.base.spec import Spec
from foedus.base.tree import Tree
from foedus.core.algorithm import Client
from foedus.errors import (
    ConfigError,
    DataError,
    DivergenceError,
    ReplyError,
    WireError,
    whole_number,
)


class Site:
    """A client's own process: the newest global model it has, and its private one.

    It starts with the model that the hub starts with, made from the same seed.

    Args:
        algorithm: A `fd.FedRes` with `batch_size=1`.
        spec: The form of the data: `fed.spec`, or `fd.Spec((features,), classes, outputs)`.
        id: The number of the client.
        seed: As of the hub.
        lag: Rounds between a row and the first global model that knows it; the local model then
            learns from the row as late, (7).

    Example:
        >>> fedres = fd.FedRes(shared=[0, 1], private=[2])
        >>> site = fd.Site(fedres, fd.Spec((3,), None, 1), id=7)
        >>> site.predict([1.0, 2.0, 3.0])
        0.0
        >>> message = site.learn([1.0, 2.0, 3.0], 1.5)  # bytes for the hub
        >>> site.loss
        2.25
    """

    def __init__(self, algorithm: FedRes, spec: Spec, id: int = 0, *, seed: int = 0, lag: int = 0):
        whole_number("lag", lag, 0)
        whole_number("id", id, 0)
        if type(algorithm) is not FedRes or algorithm.batch_size != 1:
            raise ConfigError(f"algorithm={algorithm!r} must be a fd.FedRes with batch_size=1")
        algorithm.check(spec)
        check_ids(algorithm, [id])
        self.algorithm, self.spec, self.id, self.version, self.lag = algorithm, spec, id, 1, lag
        key = random.key(seed)
        first = random.fold(key, 0xFFFFFFFD, id)
        about = (None, None, first, random.fold(key, 0), spec, lag, 0, lag)
        self._client = Client(torch.tensor(id), None, *about)  # type: ignore[arg-type]  # rows come one by one
        start = algorithm.init(self._client)
        self.state: dict[str, Tree] = tree.map(lambda v: v.unsqueeze(0), start)
        self.w = self.state.get("seen")

    def receive(self, message: bytes) -> None:
        """Take a global model from the hub's broadcast, unless it is older than the site's."""
        if self.w is None:
            raise ReplyError(
                "this site has no global model (global_model=None): it needs no broadcast"
            )
        like = tree.map(lambda v: v[0], self.w)
        found = _decode("the broadcast", message, 1 << 16, like)
        fine = isinstance(found, dict) and set(found) == {"version", "w"}
        if not fine or not _is_version(found["version"]):
            raise ReplyError("this is no broadcast of a hub: it must hold a version and a model")
        _same_form("the broadcast model", found["w"], like)
        if found["version"] < self.version:
            return
        self.version, self.w = found["version"], tree.map(lambda v: v.unsqueeze(0), found["w"])

    def predict(self, x: Any) -> Any:
        """The class number, or the value, that this site's pair of models predicts for one row."""
        out = logits(self._outputs(self._row(x)), self.spec)[0]
        if self.spec.classes:
            return int(out.argmax())
        return float(out[0]) if self.spec.outputs == 1 else out.numpy()

    def learn(self, x: Any, y: Any) -> bytes:
        """Learn from a row; returns the message for the hub (empty without a global model)."""
        row, target = self._row(x), self._target(y)
        model, columns = self.algorithm.local(self._client)
        args = {"state": self.state, "w": self.w, "index": torch.zeros(1, 1, dtype=torch.int64)}
        args |= {"count": torch.ones(1, dtype=torch.int64), "lag": torch.tensor([self.lag])}
        with torch.no_grad():
            found = act(self.algorithm, model, columns, args, (row, target, self.spec))
        if not tree.all_finite(found["state"]):
            raise DivergenceError(
                f"site {self.id}: its model is no longer finite; {self.algorithm.remedy}",
                int(self.state["t"]),
                [self.id],
            )
        self.state = found["state"]
        reply = tree.map(lambda v: v[0], found["reply"])
        return wire.encode({"version": self.version, **reply}) if reply else b""

    @property
    def loss(self) -> float:
        """The average loss of its predictions so far."""
        return float(self.state["loss"] / self.state["t"].clamp(min=1))

    def _outputs(self, row: Tensor) -> Tensor:
        model, columns = self.algorithm.local(self._client)
        z, shared = torch.zeros(()), self.algorithm.global_model
        with torch.no_grad():
            if shared is not None:
                w = tree.map(lambda v: v[0], self.w)
                z = z + shared.apply(w, part(row, self.algorithm.shared, 1))
            if model is not None:
                local = tree.map(lambda v: v[0], self.state["local"])
                z = z + model.apply(local, part(row, columns, 1))
        return z

    def _row(self, x: Any) -> Tensor:
        try:
            row = np.asarray(x, np.float32)
        except (TypeError, ValueError):
            raise DataError(
                f"x={x!r} must be one row of numbers, of shape {self.spec.shape}"
            ) from None
        if row.shape != self.spec.shape or not np.isfinite(row).all():
            raise DataError(
                f"x has shape {row.shape}; give one row of shape {self.spec.shape}, of finite "
                "numbers"
            )
        return torch.from_numpy(row.copy()).unsqueeze(0)

    def _target(self, y: Any) -> Tensor:
        if self.spec.classes:
            number = isinstance(y, Real | np.number) and not isinstance(y, bool)
            if not number or not 0 <= y < self.spec.classes or int(y) != y:
                raise DataError(f"y={y!r} must be a class number from 0 to {self.spec.classes - 1}")
            return torch.tensor([int(y)])
        try:
            target = np.asarray(y, np.float32).reshape(-1)
        except (TypeError, ValueError):
            target = np.zeros(0, np.float32)
        if len(target) != self.spec.outputs or not np.isfinite(target).all():
            raise DataError(f"y={y!r} must be {self.spec.outputs} finite numbers")
        return torch.from_numpy(target.copy()).unsqueeze(0)


class Hub:
    """The server's process: the global model, and the old versions that late messages refer to.

    Args:
        algorithm: A `fd.FedRes` with a global model and `batch_size=1`.
        spec: The form of the data: `fed.spec`, or `fd.Spec((features,), classes, outputs)`.
        seed: Of the first model, as of the sites.
        keep: How many versions back a message may refer to; older ones are refused.

    Example:
        >>> fedres, spec = fd.FedRes(shared=[0, 1], private=[2]), fd.Spec((3,), None, 1)
        >>> hub, site = fd.Hub(fedres, spec), fd.Site(fedres, spec, id=7)
        >>> for _ in range(20):
        ...     site.receive(hub.broadcast())
        ...     hub.learn({7: site.learn([1.0, 2.0, 3.0], 1.5)})
        >>> round(site.predict([1.0, 2.0, 3.0]), 1)
        1.5
    """

    def __init__(self, algorithm: FedRes, spec: Spec, *, seed: int = 0, keep: int = 100):
        whole_number("keep", keep, 0)
        if (
            type(algorithm) is not FedRes
            or algorithm.global_model is None
            or algorithm.batch_size != 1
        ):
            raise ConfigError(
                f"algorithm={algorithm!r} must be a fd.FedRes with a global model and batch_size=1"
            )
        algorithm.check(spec)
        self.algorithm, self.spec, self.keep, self.version = algorithm, spec, keep, 1
        self.w = algorithm.global_model.init(
            part_spec(spec, algorithm.shared), random.fold(random.key(seed), 0)
        )
        self.squares = tree.zeros_like(self.w) if algorithm.schedule == "adagrad" else None
        self.past = {1: self.w} if self._refers else {}

    @property
    def _refers(self) -> bool:
        """Whether messages refer to old versions of the model."""
        return self.algorithm.send == "rows" and self.algorithm.rule != "misaligned"

    def broadcast(self) -> bytes:
        """The newest global model, for sites to receive."""
        return wire.encode({"version": self.version, "w": self.w})

    def learn(self, messages: Mapping[int, bytes]) -> None:
        """One round: (8), from one message a site, by its number.

        The model then has a new version. A bad message refuses the round, naming the site.
        """
        found = {site: self._read(site, messages[site]) for site in sorted(messages, key=str)}
        if found:
            with torch.no_grad():
                each = self._gradients(list(found.values()))
                g = {k: v.sum(0) for k, v in each.items()}
                t = torch.tensor(self.version - 1)
                w, squares = descended(
                    self.algorithm, self.w, g, self.squares, t, self.algorithm.step, 0
                )
            if not tree.all_finite((w, squares)):
                sizes = torch.stack(
                    [v.double().flatten(1).square().sum(1) for v in each.values()]
                ).sum(0)
                worst = list(found)[int(sizes.nan_to_num(torch.inf).argmax())]
                raise ReplyError(
                    f"the message of site {worst} is finite, but its gradient is too large to use"
                )
            self.w, self.squares = w, squares
        self.version += 1
        if self._refers:
            self.past[self.version] = self.w
            self.past.pop(self.version - self.keep - 1, None)

    def _read(self, site: int, message: bytes) -> dict[str, Any]:
        who, form = f"the message of site {site}", self._form()
        found = _decode(who, message, 1 << 16, form)
        version = found.get("version") if isinstance(found, dict) else None
        if not _is_version(version):
            raise ReplyError(f"{who} has no version")
        if self._refers and version not in self.past:
            raise ReplyError(
                f"{who} refers to version {version}; from {min(self.past)} to {self.version} are "
                f"kept (keep={self.keep})"
            )
        rest = {k: v for k, v in found.items() if k != "version"}
        _same_form(who, rest, form)
        if (
            self.algorithm.send == "rows"
            and self.spec.classes
            and not 0 <= int(rest["y"][0]) < self.spec.classes
        ):
            raise ReplyError(f"{who} has class {int(rest['y'][0])}; there are {self.spec.classes}")
        return {"version": version, **rest}

    def _form(self) -> dict[str, Tensor]:
        """What a message must look like."""
        if self.algorithm.send == "gradient":
            return self.w
        spec, few = (
            part_spec(self.spec, self.algorithm.shared),
            self.spec.classes and self.spec.classes <= 256,
        )
        y = (
            torch.zeros(1, dtype=torch.uint8 if few else torch.int64)
            if self.spec.classes
            else torch.zeros(1, self.spec.outputs)
        )
        form = {"x": torch.zeros(1, *spec.shape), "y": y}
        if self.algorithm.clip_predictions:
            form |= {"low": torch.zeros(spec.outputs), "high": torch.zeros(spec.outputs)}
        return (
            form
            if self.algorithm.local_model is None
            else {**form, "local": torch.zeros(1, spec.outputs)}
        )

    def _gradients(self, found: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Each site's, with a leading dimension."""
        if self.algorithm.send == "gradient":
            return {k: torch.stack([f[k] for f in found]) for k in self.w}
        past = [
            self.w if self.algorithm.rule == "misaligned" else self.past[f["version"]]
            for f in found
        ]
        w = {k: torch.stack([p[k] for p in past]) for k in self.w}
        sent = {k: torch.stack([f[k] for f in found]) for k in found[0] if k != "version"}
        return self.algorithm.global_gradient(w, sent, self.spec)


def _is_version(value: Any) -> bool:
    return type(value) is int and value >= 1


def _decode(who: str, message: Any, spare: int, form: dict[str, Tensor]) -> Tree:
    """A message of a peer, no longer than one of such a form can be."""
    if not isinstance(message, bytes | bytearray | memoryview):
        raise ReplyError(f"{who} must be bytes, not {type(message).__name__}")
    try:
        return wire.decode(
            message, max_bytes=spare + sum(t.numel() * t.element_size() for t in form.values())
        )
    except WireError as error:
        raise ReplyError(f"{who} cannot be read: {error}") from error


def _same_form(what: str, got: Any, like: dict[str, Tensor] | None) -> None:
    """Refuse what has other names, shapes or types than it must, or numbers that are not finite."""
    if not isinstance(got, dict) or like is None or set(got) != set(like):
        raise ReplyError(
            f"{what} must hold {', '.join(like or {})}; it holds "
            f"{', '.join(got) if isinstance(got, dict) else got!r}"
        )
    for name, want in like.items():
        t = got[name]
        if not isinstance(t, Tensor) or t.shape != want.shape or t.dtype != want.dtype:
            form = f"{t.dtype} {tuple(t.shape)}" if isinstance(t, Tensor) else type(t).__name__
            raise ReplyError(f"{what}: {name} must be {want.dtype} {tuple(want.shape)}, not {form}")
        if t.is_floating_point() and not bool(torch.isfinite(t).all()):
            raise ReplyError(f"{what}: {name} is not finite")
