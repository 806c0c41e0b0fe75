"""AFLBoost: Figure 2 of "FedBoost: communication-efficient algorithms for federated learning", ICML 2020."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from foedus.algorithms.fedboost.fedboost import FedBoost, column, pace
from foedus.base.tree import State, Tree
from foedus.core.algorithm import Client
from foedus.core.clients import Clients
from foedus.errors import ConfigError, positive
from foedus.geometry import Mirror


@dataclass(frozen=True)
class AFLBoost(FedBoost):
    """FedBoost for the worst mixture of domains (Figure 2): min over alpha of max over lambda in Lambda of sum_d lambda_d L_d(alpha).

    L_d is the mean loss over the rows of domain d, a group of clients. alpha descends as in FedBoost, against the gradient
    of the mixture by lambda, and lambda ascends:

        w = [grad F]^-1(grad F(lambda) + eta_lambda L_.(a)),   lambda <- Bregman projection of w onto Lambda

    domains: groups of client ids that together are all clients ({name: ids} or a list of lists), or None: every client is one.
    low, high: Lambda = {lambda in the simplex: low <= lambda <= high}. mirror_domains, step_domains: as mirror and step, for
    lambda; by default the same. With some of the clients, a domain's loss is estimated by those who came, each in inverse
    proportion to its chance. Where sites fail to answer, the others of their domain stand for them; a domain of which nobody answers keeps
    its last loss (it must neither win nor lose weight by silence) and is left out of the gradient, which the others fill up to the
    weight of all. Clients send their own loss and gradient, C + 1 numbers. The history has `worst`, the largest domain loss of the result.
    """

    domains: tuple[tuple[int, ...], ...] | None = None
    low: float = 0.0
    high: float = 1.0
    mirror_domains: Mirror | None = None
    step_domains: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        groups = self.domains.values() if isinstance(self.domains, Mapping) else self.domains
        if groups is not None:
            try:
                groups = tuple(tuple(sorted(int(c) for c in g)) for g in groups)
            except (TypeError, ValueError):
                raise ConfigError(f"domains={self.domains!r} must be lists of client ids, one for each domain") from None
            object.__setattr__(self, "domains", groups)
            members = [c for g in groups for c in g]
            if len(set(members)) != len(members) or not groups or not all(groups):
                raise ConfigError("domains must not be empty and no client may be in two of them")
        if not all(isinstance(v, Real) for v in (self.low, self.high)) or not 0 <= self.low <= self.high <= 1:
            raise ConfigError(f"low={self.low!r} and high={self.high!r} must be bounds with 0 <= low <= high <= 1")
        if self.mirror_domains is None:
            object.__setattr__(self, "mirror_domains", self.mirror)
        if not isinstance(self.mirror_domains, Mirror):
            raise ConfigError(f"mirror_domains={self.mirror_domains!r} must be a mirror map such as fd.Entropy()")
        if self.step_domains is not None:
            positive("step_domains", self.step_domains)

    @property
    def names_clients(self) -> bool:
        return self.domains is not None

    def slope(self, client: Client, **sent: Tree) -> tuple[dict[str, Tensor], None]:
        """Line 3 of Figure 2: the loss is the gradient in lambda."""
        value, slope = self.at(client, **sent)
        return {"loss": value, "slope": slope}, None

    def start(self, clients: Clients) -> State:
        groups = self.domains or tuple((int(i),) for i in clients.ids)
        members = sorted(c for g in groups for c in g)
        if members != clients.ids.tolist():
            apart = sorted(set(members) ^ set(clients.ids.tolist()))
            raise ConfigError(f"domains must hold every client once; these are in none, or are no clients: {apart[:10]}")
        if self.low * len(groups) > 1 or self.high * len(groups) < 1:
            raise ConfigError(f"low={self.low!r} and high={self.high!r} leave no mixture of {len(groups)} domains")
        domain = torch.empty_like(clients.ids)
        for d, group in enumerate(groups):
            domain[torch.searchsorted(clients.ids, torch.tensor(group))] = d
        lam = self.mirror_domains.project(self.mirror_domains.start(len(groups), torch.float64), self.low, self.high)
        state = super().start(clients)
        state = state.replace(lam=lam, lam_total=torch.zeros_like(lam), lam_steepest=0.0, lam_squares=0.0, domain=domain)
        state = state.replace(latest=torch.full_like(lam, torch.inf))  # no loss yet
        if self.measure_every:
            self.log_worst(clients, state)
        return state

    def rows(self, state: State, ids: Tensor) -> Tensor:
        """How many rows these clients hold of each domain."""
        at = torch.searchsorted(state.ids, ids)
        return torch.zeros(len(state.lam), dtype=torch.float64).index_add(0, state.domain[at], state.sizes[at].double())

    def shares(self, clients: Clients, state: State, came: Tensor) -> Tensor:
        """What each client who came adds to each domain's loss: (domains, clients)."""
        at = torch.searchsorted(state.ids, came)
        _, which, times = came.unique(return_inverse=True, return_counts=True)  # late replies may come two at a time
        share = state.sizes[at].double() / times[which] / self.rows(state, state.ids)[state.domain[at]] / clients.participation
        if not clients.longest:  # those who were asked and failed to answer are stood for by the others of their domain
            asked, there = self.rows(state, clients.ids), self.rows(state, came)
            share = share * (asked / there)[state.domain[at]]
        return torch.zeros(len(state.lam), len(at), dtype=torch.float64).index_put(
            (state.domain[at], torch.arange(len(at))), share
        )

    def absent(self, clients: Clients, state: State, came: Tensor) -> Tensor:
        """The part of each domain that was asked where nobody answered: (domains,), 0 where somebody did."""
        if clients.longest:
            return torch.zeros_like(state.lam)
        asked, there = self.rows(state, clients.ids), self.rows(state, came)
        return torch.where(there > 0, 0.0, asked / self.rows(state, state.ids) / clients.participation)

    def round(self, clients: Clients, state: State) -> State:
        state = state.replace(lam_total=state.lam_total + state.lam)
        state = super().round(clients, state)
        if self.measure_every and clients.round % self.measure_every == 0:
            self.log_worst(clients, state)
        return state

    def ask(self, clients: Clients, state: State, drawn: list, **sent: Any) -> tuple[State, Tensor]:
        """Lines 3 to 5 of Figure 2, and 7: lambda moves at once, alpha by the mixture as it was."""
        replies = clients.gather(self.slope, **sent)
        share, absent = self.shares(clients, state, replies.ids), self.absent(clients, state, replies.ids)
        parts = share.sum(1)  # of each domain that is there
        losses = share @ column(replies, "loss", torch.arange(len(replies))).double()
        latest = torch.where(parts > 0, losses / parts, state.latest)
        # A domain that does not answer keeps its last loss; before it has had one, the mean of the others'. It has no gradient: the mixture
        # of those that have one is scaled up to the weight of all.
        known = latest.isfinite()
        losses = losses + absent * torch.where(known, latest, losses.sum() / parts.sum())
        g = self.total(replies, state.lam @ share, drawn) * (1 + (state.lam @ absent) / (state.lam @ parts))
        eta, steepest, squares = pace(
            self.mirror_domains, self.step_domains or self.step, self.horizon, losses, state.lam_steepest, state.lam_squares
        )
        lam = self.mirror_domains.step(state.lam, -losses, eta, self.low, self.high) if eta else state.lam
        return state.replace(lam=lam, lam_steepest=steepest, lam_squares=squares, latest=latest), g

    def log_worst(self, clients: Clients, state: State) -> None:
        """The agnostic loss of the result: the largest of all domains'."""
        if not clients.measures:
            return
        weight = self.result(state).float().unsqueeze(0)
        each = clients.watched(state.ids).gather(self.look, weight=weight).stack()["loss"].squeeze(1).double()
        losses = torch.zeros_like(state.lam).index_add(0, state.domain, state.sizes.double() * each)
        losses = losses / self.rows(state, state.ids)
        clients.log(worst=losses.max())
