"""Differential privacy of whole clients, for everything that is averaged or added up: `fd.run(..., aggregation=fd.DifferentialPrivacy(...))`.

McMahan, Ramage, Talwar and Zhang, "Learning differentially private recurrent language models", ICLR 2018, with exact noise. In a round every
one of n clients takes part with probability q, independently; S is who does. In each exchange of the round, client i replies r_i, all tensors
of it as one vector, and the server gives the algorithm

    mean = ( sum_{i in S} r_i min(1, c / |r_i|)  +  z c N(0, I) ) / (q n)             c: clip,  z: noise

in place of the average, and q n times that in place of a sum. The divisor is fixed. Were it the number of those who came, one client more
would change every other one's share as well. For the same reason all clients weigh the same, whatever their numbers of rows.

Adding or removing one client changes the sum by at most c: `foedus.privacy.accounting` makes (epsilon, delta) of that. It holds if nobody learns
who took part. So the server draws S itself, from the operating system's generator: sites know the seed of a run, and could redo what is
drawn from it. And the algorithm is shown all clients, not S: a round in which nobody takes part releases noise like every other.

Under secure aggregation clients do all this themselves: see `foedus.privacy.distributed`.

Noise is exact: replies are rounded to a grid, and what is added is a normal number rounded down to the same grid (`foedus.privacy.sampling`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foedus.core import tree
from foedus.core.aggregation import Aggregation, Aggregator, BudgetSpent, Setting
from foedus.core.algorithm import Client
from foedus.core.clients import NothingArrived, Poisson, not_finite
from foedus.core.rows import Rows
from foedus.core.tree import Tree
from foedus.errors import CheckpointError, ConfigError, ReplyError, positive, unknown
from foedus.privacy import sampling
from foedus.privacy.accounting import ACCOUNTANTS, Spent, epsilon
from foedus.privacy.fixedpoint import FINE, clipped, dense
from foedus.privacy.shamir import Entropy

if TYPE_CHECKING:
    from foedus.core.clients import Ask, Clients, Replies


@dataclass(frozen=True)
class DifferentialPrivacy(Aggregation):
    """Central differential privacy of clients: replies are clipped, and their sum gets Gaussian noise.

    clip: c, the largest norm of a reply; or one for each step that is averaged, {"gradient": 0.1, "direction": 1.0}. noise: z, the
    standard deviation of the noise over c; `foedus.privacy.accounting.noise_for` finds the one for a given epsilon. delta: at which
    epsilon is given; well below 1 / clients. budget: the largest epsilon. The run ends before a round that would take it beyond.
    accountant: "pld" or "rdp". entropy: for tests only.

    Clients take part by `participation=fd.Poisson(q)`, or all in every round. What comes before the first round asks everybody. All
    clients weigh the same, also where an algorithm asks for an average by rows. The history has `epsilon`, of all rounds so far.

    Example:
        >>> private = fd.DifferentialPrivacy(clip=1.0, noise=1.0, delta=1e-5, budget=4.0)
        >>> fd.run(fd.FedAvg(fd.Linear()), fed, rounds=100, participation=fd.Poisson(0.1), aggregation=private)
    """

    clip: float | tuple[tuple[str, float], ...]
    noise: float
    delta: float
    budget: float | None = None
    accountant: str = "pld"
    entropy: Entropy | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.clip, Mapping | tuple | list):
            clips = dict(self.clip)
            for step, value in clips.items():
                positive(f"clip[{step!r}]", value)
            object.__setattr__(self, "clip", tuple(sorted(clips.items())))
        else:
            positive("clip", self.clip)
        positive("noise", self.noise)
        if self.noise < 0.01:
            raise ConfigError(
                f"noise={self.noise!r} protects nobody; give a standard deviation, in units of clip, of 0.01 or more"
            )
        positive("delta", self.delta)
        if self.delta >= 1:
            raise ConfigError(
                f"delta={self.delta!r} is a probability that privacy fails; it must be well below 1 / clients, such as 1e-5"
            )
        if self.budget is not None:
            positive("budget", self.budget)
        if self.accountant not in ACCOUNTANTS:
            raise ConfigError(unknown("accountant", self.accountant, list(ACCOUNTANTS)))

    def clip_of(self, step: str) -> float:
        """The largest norm of a reply to this step."""
        if not isinstance(self.clip, tuple):
            return self.clip
        clips = dict(self.clip)
        if step not in clips:
            raise ConfigError(
                f"clip has no norm for {step!r}; it names {', '.join(map(repr, clips)) or 'nothing'}: add one, or give one number"
            )
        return clips[step]

    def open(self, setting: Setting) -> Aggregator:
        return PrivateAggregator(self, setting)


class Accounted(Aggregator):
    """An aggregator that releases noisy sums: keeps account of them, and ends the run where the budget does."""

    hides = draws = True

    apart = 0.0
    """By how much the noise of an exchange may be off the normal one: see `foedus.privacy.accounting.epsilon`."""

    def __init__(self, privacy: DifferentialPrivacy, setting: Setting):
        self.privacy, self.ids = privacy, setting.ids
        self.entropy = privacy.entropy or os.urandom
        part = setting.participation
        if not isinstance(part, Poisson) and part != 1:
            raise ConfigError(
                f"participation={part!r} draws a fixed number of clients, for which no epsilon is accounted; use "
                f"participation=fd.Poisson({part!r}), or 1.0 for all of them"
            )
        self.probability = part.probability if isinstance(part, Poisson) else 1.0
        if getattr(setting.session, "longest", 0):
            raise ConfigError(
                "fd.Delayed and differential privacy do not go together: two late replies of one client may come in one round, and "
                "would count twice; use the engine without delays"
            )
        if privacy.delta >= 1 / len(self.ids):
            raise ConfigError(
                f"delta={privacy.delta!r} allows to give away one of the {len(self.ids)} clients altogether; it must be well below "
                f"1 / clients, such as {0.01 / len(self.ids):.0e}"
            )
        for step, _ in privacy.clip if isinstance(privacy.clip, tuple) else ():
            if not callable(getattr(setting.algorithm, step, None)):
                raise ConfigError(f"clip names {step!r}, which is no step of {type(setting.algorithm).__name__}")
        self.rounds: Counter[tuple[float, float, int]] = Counter()
        self.open_round: tuple[float, int] | None = None  # probability and exchanges so far of the round that is going on
        self.usual = 1  # exchanges in a round
        self.round, self.cohort = -1, ""
        self.journal = None if setting.checkpoint is None else Journal(setting.checkpoint)
        if self.journal is not None and self.journal.path.exists():
            if not setting.resume:
                raise CheckpointError(
                    f"{self.journal.path} is the privacy account of an earlier run with this checkpoint; pass resume=True to go on, or remove both"
                )
            self.rounds = self.journal.read()
        if not self.rounds:
            self._affordable(self._with(self.probability, 1), "one round")

    def _begin(self, clients: Clients) -> bool:
        """Whether this is the first exchange of a round, whose cohort is to be drawn: each with `open_round[0]`, all before the first."""
        if self.round == clients.round:
            return False
        self._close()
        self.round, self.cohort = clients.round, os.urandom(8).hex()
        self.open_round = (self.probability if clients.round else 1.0, 0)
        return True

    def _draw(self) -> Tensor:
        """Who of all clients takes part in the round that is going on."""
        return torch.from_numpy(sampling.bernoulli(self.open_round[0], len(self.ids), self.entropy))

    def gathered(self, clients: Clients, ask: Ask, replies: Replies) -> None:
        if any(tree.leaves(reply) for reply in ([replies.stacked] if replies.separate is None else replies.separate)):
            raise ConfigError(
                f"{type(clients.algorithm).__name__} looks at single replies ({ask.step}), which have no differential privacy here: "
                "only averages and sums get noise. Use an algorithm that asks for averages, such as FedAvg, FedFW, FedBoost or FedNewton"
            )

    def _with(self, probability: float, exchanges: int) -> Spent:
        """What was released, and a round more."""
        return self.rounds + Counter({(probability, float(self.privacy.noise), exchanges): 1})

    def _epsilon(self, spent: Spent) -> float:
        return epsilon(spent, self.privacy.delta, self.privacy.accountant, self.apart)

    def _affordable(self, spent: Spent, what: str) -> None:
        if self.privacy.budget is None or (cost := self._epsilon(spent)) <= self.privacy.budget:
            return
        before = f", after {self._epsilon(self.rounds):.4g} so far" if self.rounds else ""
        raise BudgetSpent(
            f"budget={self.privacy.budget!r}: {what} would make epsilon {cost:.4g}{before}; use more noise than {self.privacy.noise!r}, or a larger budget"
        )

    def _charge(self, ask: Ask) -> None:
        """Count an exchange before anything of it is released; refuse what the budget does not allow."""
        probability, exchanges = self.open_round
        self._affordable(self._with(probability, exchanges + 1), f"round {ask.round} ({ask.step})")
        self.open_round = (probability, exchanges + 1)
        if self.journal is not None:
            self.journal.add(self.cohort, probability, float(self.privacy.noise))

    def _nothing(self) -> None:
        """Replies turned out to be empty: nothing was released, and nothing spent."""
        self.open_round = (self.open_round[0], self.open_round[1] - 1)

    def _close(self) -> None:
        """The round is over."""
        if self.open_round is not None and self.open_round[1]:
            self.rounds = self._with(*self.open_round)
            if self.round:
                self.usual = max(self.usual, self.open_round[1])
        self.open_round = None

    def row(self) -> dict[str, float]:
        self._close()
        self.round = -1  # whatever comes next is of another cohort
        self._look_ahead()
        return {"epsilon": self._epsilon(self.rounds)}

    def _look_ahead(self) -> None:
        try:
            self._affordable(self._with(self.probability, self.usual), "another round")
        except BudgetSpent as error:
            self.spent = str(error)

    def save(self) -> dict[str, Any]:
        return {"rounds": [[*kind, times] for kind, times in sorted(self.rounds.items())], "usual": self.usual}

    def load(self, saved: dict[str, Any]) -> None:
        """The account of the checkpoint, and of what the journal says was released after it."""
        known = Counter({(float(q), float(z), int(k)): int(times) for q, z, k, times in saved["rounds"]})
        self.rounds, self.usual = known | self.rounds, int(saved["usual"])
        self._look_ahead()


class PrivateAggregator(Accounted):
    """The server draws who takes part, clips, and adds noise."""

    def __init__(self, config: DifferentialPrivacy, setting: Setting):
        super().__init__(config, setting)
        self.expected = 0.0
        self.member = torch.ones(len(self.ids), dtype=torch.bool)

    def among(self, clients: Clients) -> Clients:
        """Those of the clients who take part: drawn once a round; all of them before the first."""
        if self._begin(clients):
            self.member = self._draw()
        self.expected = self.open_round[0] * len(clients)
        chosen = self.member[torch.searchsorted(self.ids, clients.ids)]
        return replace(clients, ids=clients.ids[chosen], sizes=clients.sizes[chosen], taking=int(self.member.sum()))

    def total(self, clients: Clients, ask: Ask, weights: str | None) -> Tree:
        """The noisy sum of clipped replies; over the expected number of clients, where an average was asked for."""
        clients._share_of(weights, clients.sizes)  # refuses what is no kind of weights
        clip = self.privacy.clip_of(ask.step)
        self._charge(ask)
        form = total = step = None
        for ids, reply in self._replies(clients, ask):
            reply = dense(reply)
            leaves, shape = tree.flatten(reply)
            if not leaves:  # Independent's clients send nothing
                continue
            flat = torch.cat([t.reshape(len(t), -1).double() for t in leaves], 1)
            if total is None:
                form, step = (
                    (shape, [t.shape[1:] for t in leaves], [_dtype(t) for t in leaves]),
                    grid(self.privacy.noise, clip, flat.shape[1]),
                )
                total = torch.zeros(flat.shape[1], dtype=torch.int64)
            elif (shape, [t.shape[1:] for t in leaves]) != form[:2]:
                raise ReplyError(
                    f"round {ask.round}: clients {ids.tolist()[:5]} replied with another structure than those before"
                )
            if ids is not None:
                if not bool(torch.isfinite(flat).all()):
                    raise not_finite(leaves, ask.round, ids, remedy=clients.algorithm.remedy)
                total += clipped(flat, clip, step).sum(0)
        if total is None:
            self._nothing()
            return reply
        bits = round(math.log2(self.privacy.noise * clip / step))
        noise = torch.from_numpy(sampling.rounded_gaussian(len(total), bits, self.entropy))
        released = ((total + noise).double() + 0.5) * step  # the noise was rounded down
        released = released if weights is None else released / self.expected
        parts = released.split([math.prod(s) for s in form[1]])
        return tree.unflatten([p.view(s).to(d) for p, s, d in zip(parts, form[1], form[2], strict=True)], form[0])

    def _replies(self, clients: Clients, ask: Ask) -> Iterable[tuple[Tensor | None, Tree]]:
        """The replies, batch by batch; where there are none, one of nobody, whose form alone counts."""
        if len(clients):
            with contextlib.suppress(NothingArrived):
                return clients.stream(ask)
        return [(None, blank(clients, ask))]


class Journal:
    """Every exchange, written beside the checkpoint before its result is released: rounds that a crash undoes were released all the same."""

    def __init__(self, checkpoint: Path):
        self.path = checkpoint.with_name(checkpoint.name + ".privacy")

    def add(self, cohort: str, probability: float, noise: float) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps([cohort, probability, noise]) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> Counter[tuple[float, float, int]]:
        """Rounds by kind. A last line that was cut off counts for nothing: it was never released."""
        lines = self.path.read_text().split("\n")
        try:
            entries = Counter(tuple(json.loads(line)) for line in lines[:-1])
            return Counter((float(q), float(z), k) for (_, q, z), k in entries.items())
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{self.path} is damaged, so what was spent is not known: {error!r}") from error


def grid(noise: float, clip: float, size: int) -> float:
    """The step of the grid for replies of so many numbers: the noise is 2^bits of its steps."""
    return noise * clip / 2 ** max(10, math.ceil(math.log2(FINE * noise * math.sqrt(max(size, 1)))))


def blank(clients: Clients, ask: Ask) -> Tree:
    """What a client would reply, in form: a made-up one, with a row of zeros. Nobody's data are looked at."""
    spec, algorithm = clients.spec, clients.algorithm
    y = torch.zeros(1, dtype=torch.int64) if spec.classes else torch.zeros((1, spec.outputs)[: 1 + (spec.outputs > 1)])
    rows = Rows(torch.zeros(1, *spec.shape), y, torch.zeros(1, dtype=torch.int64), torch.ones(1), spec)
    client = Client(torch.tensor(0), rows, algorithm.prepare(rows), None, clients.key, clients.shared, spec)
    reply, _ = getattr(algorithm, ask.step)(replace(client, state=algorithm.init(client)), **ask.payload)
    return tree.map(lambda t: t.unsqueeze(0) if isinstance(t, Tensor) else t, reply)


def _dtype(t: Tensor) -> torch.dtype:
    return t.dtype if t.is_floating_point() else torch.float32
