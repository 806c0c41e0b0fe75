"""Rounds of FedRes with many rollouts at once: one scheme on all federations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from foedus.algorithms.fedres.pair import forward, part_spec, targets
from foedus.algorithms.fedres.sgd import FedRes
from foedus.algorithms.fedres.step import act, descended, stream
from foedus.base import random, tree
from foedus.base.columns import Columns, part
from foedus.base.rows import take
from foedus.base.spec import Spec
from foedus.errors import ConfigError
from foedus.models.base import Model, Params

if TYPE_CHECKING:
    from foedus.data.federation import Federation


class Study:
    """One scheme on all federations: R rollouts of P clients each."""

    def __init__(
        self, algorithms: list[FedRes], feds: Sequence[Federation], up: Tensor, down: Tensor
    ):
        first, spec = algorithms[0], feds[0].spec
        if not all(type(a) is FedRes for a in algorithms):
            raise ConfigError(f"rollouts are of fd.FedRes, not of {type(first).__name__}")
        if first.send == "gradient":
            raise ConfigError("rollouts need send='rows'; send='gradient' has the same numbers")
        for a, fed in zip(algorithms, feds, strict=True):
            a.check_data(fed.spec)
            if not a.alike or (fed.spec.classes, fed.spec.outputs) != (spec.classes, spec.outputs):
                raise ConfigError(
                    "rollouts need local models of one kind, and federations with the same outputs"
                )
            if replace(a, shared=first.shared, private=first.private) != first or _width(
                a, fed
            ) != _width(first, feds[0]):
                raise ConfigError(
                    "the algorithms of a scheme may differ in the choice of columns alone"
                )
        self.feds, self.rollouts, self.clients = feds, len(feds), len(feds[0])
        wide, narrow = _width(first, feds[0])
        # Every federation's columns in one order: those of the global model, then those of the
        # local one.
        self.algorithm = replace(
            first, shared=tuple(range(wide)), private=tuple(range(wide, wide + narrow))
        )
        outputs = part_spec(spec, None).outputs
        self.spec, self.classes = Spec((wide + narrow,), None, outputs), spec.classes
        self.columns = [
            np.concatenate([_all(c, f) for c in (a.shared, a.only_local[1])])
            for a, f in zip(algorithms, feds, strict=True)
        ]
        if first.local_model is None:
            self.columns = [c[:wide] for c in self.columns]
            self.algorithm = replace(self.algorithm, private=None)
            self.spec = Spec((wide,), None, outputs)
        elif first.global_model is None:
            self.columns = [c[wide:] for c in self.columns]
            self.algorithm = replace(self.algorithm, shared=None, private=None)
            self.spec = Spec((narrow,), None, outputs)
        self.x = torch.cat(
            [
                torch.from_numpy(f.data.x_train.reshape(len(f.data.x_train), -1)[:, c]).float()
                for f, c in self._pairs()
            ]
        )
        y = torch.cat([torch.from_numpy(f.data.y_train) for f in feds])
        self.y = targets(y.unsqueeze(0), spec)[0]  # made once: from here on they are real targets
        self.index, weight = _index(
            [(f.rows, f.offsets, f.ids) for f in feds], [len(f.data.x_train) for f in feds]
        )
        self.count = (weight > 0).sum(1)
        # Where all clients have as many rows, whose turn it is need not be looked up.
        alike = first.batch_size == 1 and bool((self.count == self.count[0]).all())
        self.turns = self.index.T.contiguous().unsqueeze(2) if alike else None
        self.up, self.down = up.repeat(self.rollouts), down.repeat(self.rollouts)
        self.lag, self.longest = self.up + self.down, int((up + down).max())
        self.whose = torch.arange(self.rollouts).repeat_interleave(self.clients)
        self._begin()

    def _pairs(self) -> list[tuple[Federation, np.ndarray]]:
        return list(zip(self.feds, self.columns, strict=True))

    def _begin(self) -> None:
        a, many = self.algorithm, self.rollouts * self.clients
        self.state: dict[str, Any] = {
            "t": torch.zeros(many, dtype=torch.int64),
            "loss": torch.zeros(many, dtype=torch.float64),
        }
        self.w: Params | None = None
        self.squares: Params | None = None
        self.past: Params = {}
        model, private = a.only_local
        if model is not None:
            local = _start(model, part_spec(self.spec, private), many)
            self.state["local"] = local
            if a.schedule == "adagrad":
                self.state["squares"] = tree.zeros_like(local)
            if a.waits(self.longest):
                self.state["waiting"] = tree.map(
                    lambda p: p.new_zeros(many, self.longest + 1, *p.shape[1:]), local
                )
        if a.global_model is not None:
            self.w = _start(a.global_model, part_spec(self.spec, a.shared), self.rollouts)
            self.squares = tree.zeros_like(self.w) if a.schedule == "adagrad" else None
            self.past = tree.map(
                lambda p: p.unsqueeze(1).repeat(1, self.longest + 1, *[1] * (p.dim() - 1)), self.w
            )
            outputs = part_spec(self.spec, None).outputs
            self.spoken = torch.zeros(many, int(self.up.max()) + 1, a.batch_size, outputs)
            self.ranges = torch.zeros(2, many, int(self.up.max()) + 1, outputs)
        if a.clip_predictions:
            zero = torch.zeros(many, part_spec(self.spec, None).outputs)
            self.state |= {"low": zero, "high": zero.clone()}

    def round(self, t: int) -> dict[str, Any]:
        a, before, seen = self.algorithm, self.state["loss"], None
        if self.w is not None:
            if self.longest:
                for k, past in self.past.items():
                    past[:, t % (self.longest + 1)] = self.w[k]
            seen = self._version((t - self.down).clamp(min=1))
        args = {"state": self.state, "w": seen, "index": self.index, "count": self.count}
        args["lag"] = self.lag
        if self.turns is not None:
            args["rows"] = self.turns[(t - 1) % len(self.turns)]
        found = act(a, *a.only_local, args, (self.x, self.y, self.spec), own=True)
        self.state = found["state"]
        if self.w is not None:
            # A reply that arrives at once brings the gradient that its client has at hand.
            prompt = not self.longest or (a.rule != "misaligned" and self.spoken.shape[1] == 1)
            self._move(t, found["gradient"]() if prompt else self._late(t, found["reply"]))
        loss = (self.state["loss"] - before).view(self.rollouts, self.clients)
        return {"loss": loss, "w": self.w}

    def _version(self, rounds: Tensor) -> Params:
        """The global model of each client's rollout, as it was in a round."""
        if not self.longest:
            assert self.w is not None
            return {k: w.index_select(0, self.whose) for k, w in self.w.items()}
        return {k: past[self.whose, rounds % (self.longest + 1)] for k, past in self.past.items()}

    def _late(self, t: int, sent: dict[str, Tensor]) -> Params:
        """The gradients (8) of what arrives in round t: client i's reply of round t - up_i."""
        a, made = self.algorithm, t - self.up
        if self.spoken.shape[1] > 1:
            here, many = made.clamp(min=1), torch.arange(len(self.up))
            if a.local_model is not None:
                self.spoken[:, t % self.spoken.shape[1]] = sent["local"]
            place, when = t % self.spoken.shape[1], here % self.spoken.shape[1]
            bounds: dict[str, Tensor] = {}
            if a.clip_predictions:
                self.ranges[0, :, place], self.ranges[1, :, place] = sent["low"], sent["high"]
                bounds = dict(zip(("low", "high"), self.ranges[:, many, when], strict=True))
            rows = stream(here - 1, self.index, self.count, a.batch_size)
            sent = {
                "x": part(take(self.x, rows).float(), a.shared, 2),
                "y": take(self.y, rows),
                "local": self.spoken[many, when],
                **bounds,
            }
        if a.rule == "misaligned":
            assert self.w is not None
            w = {k: p.index_select(0, self.whose) for k, p in self.w.items()}
        else:
            w = self._version((made - self.down).clamp(min=1))
        g = a.global_gradient(w, sent, self.spec)
        if t <= int(self.up.max()):  # some have sent nothing yet
            g = {k: v * (made >= 1).view(-1, *[1] * (v.dim() - 1)) for k, v in g.items()}
        return g

    def _move(self, t: int, g: Params) -> None:
        a = self.algorithm
        assert self.w is not None
        g = {k: v.view(self.rollouts, self.clients, *v.shape[1:]).sum(1) for k, v in g.items()}
        self.w, self.squares = descended(
            a, self.w, g, self.squares, torch.full((self.rollouts,), t - 1), a.step, 1
        )

    def scores(self) -> dict[str, Any]:
        """Each rollout's pairs on their clients' own test rows."""
        a, classes = self.algorithm, self.classes
        model, private = a.only_local
        parts = [(f.test_rows, f.test_offsets, f.ids) for f in self.feds]
        result: dict[str, list[float]] = {}
        for r, (fed, columns) in enumerate(self._pairs()):
            index, weight = _index([parts[r]], [len(fed.data.x_test)])
            if not index.shape[1]:
                name = "own_accuracy" if classes else "own_mse"
                for key in (name, f"{name}_worst"):
                    result.setdefault(key, []).append(float("nan"))
                continue
            x = take(
                torch.from_numpy(fed.data.x_test.reshape(len(fed.data.x_test), -1)[:, columns]),
                index,
            ).float()
            mine = slice(r * self.clients, (r + 1) * self.clients)
            z = torch.zeros(())
            if a.global_model is not None:
                z = (
                    z
                    + forward(
                        a.global_model,
                        tree.map(lambda p, m=mine: p[m], self.state["seen"]),
                        part(x, a.shared, 2),
                    )[0]
                )
            if model is not None:
                local = tree.map(lambda p, m=mine: p[m], self.state["local"])
                z = z + forward(model, local, part(x, private, 2))[0]
            y = take(torch.from_numpy(fed.data.y_test), index)
            if classes:
                right = (z[..., 0] > 0).long() == y if classes == 2 else z.argmax(-1) == y
                score, name = right.float(), "own_accuracy"
            else:
                score, name = (z - y.reshape(z.shape)).square().mean(-1), "own_mse"
            score = score * weight
            count = weight.sum(1)
            each = score.sum(1)[count > 0] / count[count > 0]
            result.setdefault(name, []).append(float(score.sum() / count.sum()))
            result.setdefault(f"{name}_worst", []).append(
                float(each.min() if classes else each.max())
            )
        online = (self.state["loss"] / self.state["t"]).view(self.rollouts, self.clients).mean(1)
        return {**result, "online_loss": online.tolist()}


def _all(columns: Columns, fed: Federation) -> np.ndarray:
    return np.arange(fed.spec.features) if columns is None else np.array(columns)


def _width(a: FedRes, fed: Federation) -> tuple[int, int]:
    return len(_all(a.shared, fed)), len(_all(a.only_local[1], fed))


def _index(
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]], sizes: list[int]
) -> tuple[Tensor, Tensor]:
    """Row numbers of all clients of all federations in tables laid end to end, padded with a
    client's first row, and weights.
    """
    orders = [np.argsort(ids, kind="stable") for _, _, ids in parts]
    counts = np.concatenate(
        [np.diff(offsets)[order] for (_, offsets, _), order in zip(parts, orders, strict=True)]
    )
    width = np.arange(max(counts, default=0))
    tables = []
    for (rows, offsets, _), order, base in zip(
        parts, orders, np.cumsum([0, *sizes[:-1]]), strict=True
    ):
        size = np.diff(offsets)[order][:, None]
        at = offsets[:-1][order][:, None] + np.where(width < size, width, 0)
        tables.append(
            base + rows[np.minimum(at, len(rows) - 1)]
            if len(rows)
            else np.zeros((len(order), len(width)), np.int64)
        )
    index = np.concatenate(tables)
    return torch.from_numpy(index), torch.from_numpy((width < counts[:, None]).astype(np.float32))


def _start(model: Model, spec: Spec, many: int) -> Params:
    """The same first parameters, repeated."""
    first, other = (model.init(spec, random.key(seed)) for seed in (0, 1))
    if not model.closed_form or any(not torch.equal(first[k], other[k]) for k in first):
        raise ConfigError(
            "rollouts need models with closed-form gradients and a fixed start such as "
            f"fd.Linear(), not {model!r}"
        )
    return tree.map(lambda p: p.unsqueeze(0).repeat(many, *[1] * p.dim()), first)
