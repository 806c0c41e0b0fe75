"""AFLBoost: Figure 2 of Hamer, Mohri and Suresh, "FedBoost: communication-efficient algorithms for
federated learning", ICML 2020.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from annotated_types import Gt, Interval
from torch import Tensor

from foedus.algorithms.fedboost.fedboost import FedBoost
from foedus.algorithms.fedboost.settings import common_point, pace
from foedus.base.settings import Means
from foedus.base.tree import State, Tree
from foedus.core.algorithm import Client
from foedus.core.clients import Clients
from foedus.core.exchange import Replies
from foedus.errors import ConfigError
from foedus.geometry import Domain, Euclidean, Mirror


@dataclass(frozen=True)
class AFLBoost(FedBoost):
    """FedBoost for the worst mixture of domains (Figure 2).

        min over alpha of max over lambda in Lambda of sum_d lambda_d L_d(alpha)

    L_d is the mean loss over the rows of domain d, a group of clients. alpha descends as in
    `fd.FedBoost`, against the gradient of the mixture by lambda, and lambda ascends:

        w = [grad F]^-1(grad F(lambda) + eta_lambda L_.(a))
        lambda <- Bregman projection of w onto Lambda

    With partial participation, a domain's loss is estimated from the clients that take part, each
    in inverse proportion to its probability. Where sites fail to answer, the others of their domain
    replace them; a domain of which no client answers keeps its last loss (it must neither gain nor
    lose weight by silence) and is left out of the gradient, which is scaled up to the weight of all
    domains. Clients send their own loss and gradient, C + 1 numbers. The history has `worst`, the
    largest domain loss of the result.

    Args:
        domains: Groups of client ids that together are all clients ({name: ids} or a list of
            lists), or `None`: every client is one.
        low: Lower bound of every lambda_d: Lambda = {lambda in the simplex: low <= lambda <= high}.
        high: Upper bound of every lambda_d.
        mixtures: Another part of Lambda: a set of `fd.geometry` with a projection, such as
            `fd.L2Ball(0.5)`, `fd.Box(low, high)` with a bound for each domain, or
            `fd.Permutahedron(weights)`; Lambda is what it has in common with the simplex and the
            bounds. lambda then moves by projected gradients (`mirror_domains` is `fd.Euclidean()`).
        mirror_domains: The mirror map for lambda; `None`: `mirror`, or `fd.Euclidean()` with
            `mixtures`.
        step_domains: eta_lambda; `None`: `step`.

    Example:
        >>> from sklearn.naive_bayes import GaussianNB
        >>> data = fd.load("digits")
        >>> parts = [slice(i, None, 5) for i in range(5)]
        >>> fitted = [GaussianNB(var_smoothing=0.1).fit(data.x_train[p], data.y_train[p])
        ...           for p in parts]
        >>> fed = fd.split(data, "dirichlet", clients=10, alpha=0.3)
        >>> aflboost = fd.AFLBoost(fd.Classifiers(fitted, classes=10), budget=2)
        >>> run = fd.run(aflboost, fed, rounds=5)
        >>> bool(run.history.worst.iloc[-1] >= run.history.objective.iloc[-1])
        True
    """

    domains: Mapping[str, Sequence[int]] | Sequence[Sequence[int]] | None = None
    low: Annotated[float, Interval(ge=0, le=1)] = 0.0
    high: Annotated[float, Interval(ge=0, le=1)] = 1.0
    mixtures: Annotated[Domain, Means("a set such as fd.L2Ball(0.5)")] | None = None
    mirror_domains: Annotated[Mirror, Means("a mirror map such as fd.Entropy()")] | None = None
    step_domains: Annotated[float, Gt(0)] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "domains", disjoint_groups(self.domains))
        if self.mirror_domains is None:
            own = self.mirror if self.mixtures is None else Euclidean()
            object.__setattr__(self, "mirror_domains", own)
        super().__post_init__()
        if self.mixtures is not None and self.mirror_domains != Euclidean():
            raise ConfigError(
                f"mirror_domains={self.mirror_domains} has no projection onto {self.mixtures}; "
                "with mixtures leave mirror_domains out"
            )
        if self.low > self.high:
            raise ConfigError(
                f"low={self.low!r} and high={self.high!r} must be bounds with 0 <= low <= high <= 1"
            )

    @property
    def names_clients(self) -> bool:
        return self.domains is not None

    def slope(self, client: Client, **sent: Tree) -> tuple[dict[str, Tensor], None]:
        """Line 3 of Figure 2: the loss is the gradient in lambda."""
        value, slope = self.at(client, **sent)
        return {"loss": value, "slope": slope}, None

    def start(self, clients: Clients) -> State:
        groups = disjoint_groups(self.domains) or tuple((int(i),) for i in clients.ids)
        domain = domain_of_clients(groups, clients.ids)
        if self.low * len(groups) > 1 or self.high * len(groups) < 1:
            raise ConfigError(
                f"low={self.low!r} and high={self.high!r} leave no mixture of {len(groups)} domains"
            )
        mirror = self.mirror_domains or self.mirror
        lam = mirror.project(mirror.start(len(groups), torch.float64), self.low, self.high)
        if self.mixtures is not None:
            lam = common_point(lam, self.mixtures, self.low, self.high)
        state = super().start(clients)
        state = state.replace(
            lam=lam, lam_total=torch.zeros_like(lam), lam_steepest=0.0, lam_squares=0.0
        )
        state = state.replace(domain=domain, ids=clients.ids, sizes=clients.sizes)
        state = state.replace(latest=torch.full_like(lam, torch.inf))  # no loss yet
        self.measure_worst(clients, state)
        return state

    def round(self, clients: Clients, state: State) -> State:
        state = super().round(clients, state.replace(lam_total=state.lam_total + state.lam))
        self.measure_worst(clients, state)
        return state

    def ask(
        self, clients: Clients, state: State, sent: dict[str, Tree], note: list[Tensor]
    ) -> tuple[State, Tensor]:
        """Lines 3 to 5 of Figure 2, and 7: lambda moves at once, alpha by the mixture as it was."""
        replies = clients.gather(self.slope, note=note, **sent)
        share, absent = self.shares(clients, state, replies.ids), self.absent(clients, state)
        parts = share.sum(1)  # of each domain that is there
        losses = share @ replies.column("loss").double()
        latest = torch.where(parts > 0, losses / parts, state.latest)
        # A domain that does not answer keeps its last loss; before it has had one, the mean of the
        # others'. It has no gradient: the mixture of those that have one is scaled up to the weight
        # of all.
        losses = losses + absent * torch.where(
            latest.isfinite(), latest, losses.sum() / parts.sum()
        )
        # 0 where lambda has left all domains that answered: then there is no gradient
        here = float(state.lam @ parts)
        g = self.mixed(replies, state.lam @ share) * (
            1 + float(state.lam @ absent) / here if here else 1.0
        )
        mirror, step = self.mirror_domains or self.mirror, self.step_domains or self.step
        eta, steepest, squares = pace(
            mirror, step, self.horizon, losses, state.lam_steepest, state.lam_squares
        )
        lam = self.risen(state.lam, losses, eta) if eta else state.lam
        return state.replace(lam=lam, lam_steepest=steepest, lam_squares=squares, latest=latest), g

    def risen(self, lam: Tensor, losses: Tensor, eta: float) -> Tensor:
        """Line 7: one step against alpha, in Lambda."""
        mirror = self.mirror_domains or self.mirror
        if self.mixtures is None:
            return mirror.step(lam, -losses, eta, self.low, self.high)
        return common_point(lam + eta * losses, self.mixtures, self.low, self.high)

    def mixed(self, replies: Replies, weights: Tensor) -> Tensor:
        """sum_j weights_j g_j, each gradient for what was drawn in the round that it answers."""
        total = torch.zeros(len(self.predictors), dtype=torch.float64)
        for broadcast, some in replace(replies, weights=weights).by_broadcast():
            total += self.whole(some.weights @ some.stack()["slope"].double(), *broadcast.note)
        return total

    # -- who stands for whom -----------------------------------------------------------------------

    def rows(self, state: State, ids: Tensor) -> Tensor:
        """How many rows these clients hold of each domain."""
        at = torch.searchsorted(state.ids, ids)
        return torch.zeros(len(state.lam), dtype=torch.float64).index_add(
            0, state.domain[at], state.sizes[at].double()
        )

    def failed(self, clients: Clients) -> Tensor:
        """Those who were asked in this round and will not answer."""
        return torch.tensor(sorted(clients.dropped), dtype=torch.int64)

    def shares(self, clients: Clients, state: State, came: Tensor) -> Tensor:
        """What each reply adds to each domain's loss, in inverse proportion to its client's chance:
        (domains, replies).

        Those who were asked and failed to answer are stood for by the others of their domain.
        """
        at = torch.searchsorted(state.ids, came)
        # late replies may come two at a time
        _, which, times = came.unique(return_inverse=True, return_counts=True)
        share = (
            state.sizes[at].double()
            / times[which]
            / self.rows(state, state.ids)[state.domain[at]]
            / clients.participation
        )
        if clients.dropped:
            asked = self.rows(state, clients.ids)
            share = (
                share * (asked / (asked - self.rows(state, self.failed(clients))))[state.domain[at]]
            )
        zeros = torch.zeros(len(state.lam), len(at), dtype=torch.float64)
        return zeros.index_put((state.domain[at], torch.arange(len(at))), share)

    def absent(self, clients: Clients, state: State) -> Tensor:
        """The part of each domain that was asked where nobody will answer: (domains,), 0 where
        somebody does.
        """
        asked, failed = self.rows(state, clients.ids), self.rows(state, self.failed(clients))
        part = asked / self.rows(state, state.ids) / clients.participation
        return torch.where((asked > 0) & (failed == asked), part, 0.0)

    def measure_worst(self, clients: Clients, state: State) -> None:
        """Log the agnostic loss of the result: the largest of all domains'."""
        if not self.due(clients):
            return
        each = clients.measure_each(self.look, weight=self.result(state).float().unsqueeze(0))
        if each is not None:
            by_client = state.sizes.double() * each["loss"].squeeze(1).double()
            losses = torch.zeros_like(state.lam).index_add(0, state.domain, by_client)
            clients.log(worst=(losses / self.rows(state, state.ids)).max())


def disjoint_groups(given: Any) -> tuple[tuple[int, ...], ...] | None:
    """Groups of client ids, from {name: ids} or a list of lists."""
    groups = given.values() if isinstance(given, Mapping) else given
    if groups is None:
        return None
    try:
        groups = tuple(tuple(sorted(int(c) for c in g)) for g in groups)
    except (TypeError, ValueError):
        raise ConfigError(
            f"domains={given!r} must be lists of client ids, one for each domain"
        ) from None
    members = [c for g in groups for c in g]
    if len(set(members)) != len(members) or not groups or not all(groups):
        raise ConfigError("domains must not be empty and no client may be in two of them")
    return groups


def domain_of_clients(groups: tuple[tuple[int, ...], ...], ids: Tensor) -> Tensor:
    """The domain of each client, in order of id."""
    members = sorted(c for g in groups for c in g)
    if members != ids.tolist():
        apart = sorted(set(members) ^ set(ids.tolist()))
        raise ConfigError(
            "domains must hold every client once; these are in none, or are no clients: "
            f"{apart[:10]}"
        )
    domain = torch.empty_like(ids)
    for d, group in enumerate(groups):
        domain[torch.searchsorted(ids, torch.tensor(group))] = d
    return domain
