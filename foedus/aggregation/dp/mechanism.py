"""Differential privacy of whole clients, for everything that is averaged or added up: `fd.run(...,
aggregation=fd.DifferentialPrivacy(...))`.

McMahan, Ramage, Talwar and Zhang, "Learning differentially private recurrent language models", ICLR
2018, with exact noise. In a round every one of n clients takes part with probability q,
independently; S is the cohort. In each exchange of the round, client i replies r_i, all tensors of
it as one vector, and the server gives the algorithm

    mean = ( sum_{i in S} r_i min(1, c / |r_i|)  +  z c N(0, I) ) / (q n)       c: clip,  z: noise

in place of the average, and q n times that in place of a sum. The divisor is fixed. If it were the
size of the cohort, one additional client would change the contribution of every other client. For
the same reason all clients have the same weight, whatever their numbers of rows.

Adding or removing one client changes the sum by at most c: `foedus.aggregation.dp.accounting` makes
(epsilon, delta) of that. It holds if S stays secret. So the server draws S from the operating
system's generator, not from the seed of the run, which sites know. The algorithm sees all clients,
not S, and a round with an empty cohort releases noise like every other. Bytes and messages in the
history are those of q n clients, not of |S|, and clients that fail to reply are not named in it.

Under secure aggregation clients do all this themselves: see `foedus.aggregation.dp.distributed`.

Noise is exact: replies are rounded to a grid, and the noise is a normal number rounded down to the
same grid (`foedus.aggregation.dp.noise`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import torch
from annotated_types import Gt
from torch import Tensor

from foedus.aggregation.dp import noise as sampling
from foedus.aggregation.dp.accounting import Accountant
from foedus.aggregation.secure.fixedpoint import FINE, clipped, dense
from foedus.aggregation.secure.shamir import Entropy
from foedus.base import tree
from foedus.base.rows import Rows
from foedus.base.settings import check_settings, check_value
from foedus.base.tree import Tree
from foedus.core.aggregation import Aggregation, Aggregator, Setting
from foedus.core.algorithm import Client
from foedus.core.exchange import NothingArrived
from foedus.core.reduce import not_finite
from foedus.errors import ConfigError, DivergenceError, ReplyError

if TYPE_CHECKING:
    from foedus.core.network import RoundTrip

from foedus.aggregation.dp.accounted import Accounted


@dataclass(frozen=True)
class DifferentialPrivacy(Aggregation):
    """Central differential privacy of clients: clipped replies, and Gaussian noise on their sum.

    Clients take part with probability q; S is the cohort:

        mean = ( sum_{i in S} r_i min(1, c / |r_i|)  +  z c N(0, I) ) / (q n)

    Clients take part by `participation=fd.Poisson(q)`, or all in every round. Exchanges before the
    first round ask all clients. All clients have the same weight, even where an algorithm asks for
    an average by rows. The history has `epsilon`, of all rounds so far.

    Args:
        clip: c, the largest norm of a reply; or one for each step that is averaged, {"gradient":
            0.1, "direction": 1.0}.
        noise: z, the standard deviation of the noise divided by c; `fd.noise_for` computes it for a
            given epsilon.
        delta: At which epsilon is given; well below 1 / clients.
        budget: The largest epsilon: the run ends before a round that would exceed it.
        accountant: "pld", the privacy loss distribution, or "rdp", Renyi differential privacy.
        entropy: The source of random bytes; for tests only.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=100)
        >>> private = fd.DifferentialPrivacy(clip=0.5, noise=1.0, delta=1e-5, budget=4.0)
        >>> run = fd.run(fd.FedAvg(fd.Linear()), fed, rounds=3, participation=fd.Poisson(0.2),
        ...              aggregation=private)
        >>> 0 < run.history.epsilon.iloc[-1] < 4
        True

    Reference: McMahan, Ramage, Talwar and Zhang, "Learning differentially private recurrent
    language models", ICLR 2018.
    """

    clip: (
        Annotated[float, Gt(0)]
        | Mapping[str, Annotated[float, Gt(0)]]
        | tuple[tuple[str, Annotated[float, Gt(0)]], ...]
    )
    noise: Annotated[float, Gt(0)]
    delta: Annotated[float, Gt(0)]
    budget: Annotated[float, Gt(0)] | None = None
    accountant: Accountant = "pld"
    entropy: Entropy | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.clip, Mapping | tuple | list):
            clips = dict(self.clip)
            for step, value in clips.items():
                check_value(f"clip[{step!r}]", value, Annotated[float, Gt(0)])
            object.__setattr__(self, "clip", tuple(sorted(clips.items())))
        check_settings(self)
        if self.noise < 0.01:
            raise ConfigError(
                f"noise={self.noise!r} protects no client; pass a standard deviation, in units of "
                "clip, of 0.01 or more"
            )
        if self.delta >= 1:
            raise ConfigError(
                f"delta={self.delta!r} is a probability that privacy fails; it must be well below "
                "1 / clients, such as 1e-5"
            )

    def clip_of(self, step: str) -> float:
        """The largest norm of a reply to this step."""
        if not isinstance(self.clip, tuple | Mapping):
            return self.clip
        clips = dict(self.clip)
        if step not in clips:
            raise ConfigError(
                f"clip has no norm for {step!r}; it names "
                f"{', '.join(map(repr, clips)) or 'nothing'}: add one, or give one number"
            )
        return clips[step]

    def open(self, setting: Setting) -> Aggregator:
        return PrivateAggregator(self, setting)


class PrivateAggregator(Accounted):
    """The server draws who takes part, clips, and adds noise."""

    def __init__(self, config: DifferentialPrivacy, setting: Setting):
        super().__init__(config, setting)
        self.expected = 0.0
        self.member = torch.ones(len(self.ids), dtype=torch.bool)

    def among(self, round: int, ids: Tensor) -> Tensor:
        """The cohort: drawn once a round; all clients before the first round."""
        if self._begin(round):
            self.member = self._draw()
        self.expected = self.chance * len(ids)
        return self.member[torch.searchsorted(self.ids, ids)]

    def total(self, trip: RoundTrip, weights: str | None) -> Tree:
        """The noisy sum of clipped replies; over the expected number of clients, where an average
        was asked for.
        """
        trip.shares(weights, trip.sizes)  # refuses unknown weights
        clip = self.privacy.clip_of(trip.step)
        self._charge(trip)
        if trip.secret:
            trip.hide(self.expected, first(blank(trip)))
        total: Tensor | None = None
        form: tree.Form = None
        shapes: list[torch.Size] = []
        dtypes: list[torch.dtype] = []
        step = 0.0
        for ids, reply in self._replies(trip):
            reply = dense(reply)
            leaves, shape = tree.flatten(reply)
            if not leaves:  # Independent's clients send nothing
                continue
            flat = torch.cat([t.reshape(len(t), -1).double() for t in leaves], 1)
            if total is None:
                form, shapes, dtypes = (
                    shape,
                    [t.shape[1:] for t in leaves],
                    [_dtype(t) for t in leaves],
                )
                step = grid(self.privacy.noise, clip, flat.shape[1])
                total = torch.zeros(flat.shape[1], dtype=torch.int64)
            elif (shape, [t.shape[1:] for t in leaves]) != (form, shapes):
                assert ids is not None
                who = "some clients" if trip.hidden else f"clients {ids.tolist()[:5]}"
                raise ReplyError(
                    f"round {trip.round}: {who} replied with another structure than those before"
                )
            if ids is not None:
                if not bool(torch.isfinite(flat).all()):
                    if trip.hidden:
                        raise DivergenceError(
                            f"round {trip.round}: a reply is not finite (NaN or infinity), of a "
                            f"client that is not named, since who takes part is a secret; "
                            f"{trip.algorithm.remedy}",
                            trip.round,
                            [],
                        )
                    raise not_finite(leaves, trip.round, ids, remedy=trip.algorithm.remedy)
                total += clipped(flat, clip, step).sum(0)
        if total is None:
            self._nothing()
            return reply
        bits = round(math.log2(self.privacy.noise * clip / step))
        noise = torch.from_numpy(sampling.rounded_gaussian(len(total), bits, self.entropy))
        released = ((total + noise).double() + 0.5) * step  # the noise was rounded down
        released = released if weights is None else released / self.expected
        parts = released.split([math.prod(s) for s in shapes])
        return tree.unflatten(
            [p.view(s).to(d) for p, s, d in zip(parts, shapes, dtypes, strict=True)], form
        )

    def _replies(self, trip: RoundTrip) -> Iterable[tuple[Tensor | None, Tree]]:
        """The replies, batch by batch; if there are none, a made-up reply with weight 0, for its
        form.
        """
        if len(trip.ids):
            with contextlib.suppress(NothingArrived):
                return ((batch.ids, batch.tree()) for batch in trip.batches())
        return [(None, blank(trip))]


def grid(noise: float, clip: float, size: int) -> float:
    """The step of the grid for replies of `size` numbers: the noise is 2^bits of its steps."""
    return noise * clip / 2 ** max(10, math.ceil(math.log2(FINE * noise * math.sqrt(max(size, 1)))))


def blank(trip: RoundTrip) -> Tree:
    """The form of a reply, from a made-up client with a row of zeros.

    No client's data are used.
    """
    spec, algorithm, shared = trip.network.spec, trip.algorithm, trip.network.shared
    y = (
        torch.zeros((1, spec.steps) if spec.steps else 1, dtype=torch.int64)
        if spec.classes
        else torch.zeros((1, spec.outputs)[: 1 + (spec.outputs > 1)])
    )
    rows = Rows(
        torch.zeros(1, *spec.shape), y, torch.zeros(1, dtype=torch.int64), torch.ones(1), spec
    )
    client = Client(torch.tensor(0), rows, algorithm.prepare(rows), None, trip.key, shared, spec)
    arguments = {
        **trip.broadcast.payload,
        **{name: h.argument for name, h in trip.broadcast.held.items()},
    }
    reply, _ = getattr(algorithm, trip.step)(
        replace(client, state=algorithm.init(client)), **arguments
    )
    return tree.map(lambda t: t.unsqueeze(0) if isinstance(t, Tensor) else t, reply)


def first(replies: Tree) -> Tree:
    """The first of stacked replies."""
    return tree.map(lambda t: t[0] if isinstance(t, Tensor) else t, replies)


def _dtype(t: Tensor) -> torch.dtype:
    return t.dtype if t.is_floating_point() else torch.float32
