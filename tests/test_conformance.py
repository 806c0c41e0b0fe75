"""Every algorithm passes every check on every engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import foedus as fd
from foedus import testing
from foedus.base import tree
from tests.conformance import ALGORITHMS, AT_ONCE, ENGINES, ONE_A_FAMILY

# Without delays, Delayed opens the engine inside it, so that a run on it is a run on Local.
HERE = ["Local", pytest.param("Delayed by nothing", marks=pytest.mark.slow)]


@pytest.mark.parametrize("check", testing.CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
@pytest.mark.parametrize("engine", HERE)
@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=list(ALGORITHMS))
def test_algorithm(algorithm, engine, check, fed):
    check(algorithm, fed, ENGINES[engine])


@pytest.mark.parametrize("name", ONE_A_FAMILY)
def test_a_delay_of_nothing_changes_nothing(name, fed):
    local, delayed = (
        fd.run(ALGORITHMS[name], fed, 3, engine=ENGINES[engine], participation=0.5)
        for engine in ("Local", "Delayed by nothing")
    )
    testing._same(local, delayed, "delays of no rounds changed the result")


LATE = {"up": [0, 1, 2, 0, 3], "down": [1, 0, 2, 2, 0]}


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in AT_ONCE])
def test_late_messages(name, fed):
    """With late messages, too, neither batches leave a trace, nor the order of clients, nor
    encoding, nor a stop with replies on their way.
    """
    algorithm = ALGORITHMS[name]
    looped, batched = (
        fd.run(algorithm, fed, 6, engine=fd.Delayed(fd.Local(batch=batch), **LATE))
        for batch in (False, True)
    )
    testing._close(looped, batched, "late messages: looped and batched differ")
    late = fd.Delayed(fd.Local(), **LATE)
    testing.check_client_order(algorithm, fed, late)
    testing._resumes(algorithm, fed, late, participation=0.5)
    testing.check_wire(algorithm, fed, late)


@pytest.mark.parametrize("name", AT_ONCE)
def test_late_messages_are_refused_before_the_first_round(name, fed):
    engine = fd.Delayed(fd.Local(), **LATE)
    with pytest.raises(fd.ConfigError, match="late"):
        fd.run(ALGORITHMS[name], fed, 3, engine=engine)


def test_regression_data(values):
    testing.check_algorithm(fd.FedAvg(fd.Linear(), lr=0.05, batch_size=8), values)


# Each check must notice the mistake that it is there for.


@dataclass(frozen=True)
class Base(fd.FedAvg):
    """FedAvg on a small batch, to be spoiled."""

    lr: float = 0.1
    batch_size: int | None = 16


@dataclass(frozen=True)
class GlobalNoise(Base):
    def round(self, clients, state):
        torch.rand(1)
        return super().round(clients, state)


@dataclass(frozen=True)
class WritesPayload(Base):
    def batching(self):
        return replace(super().batching(), pays=False)

    def train(self, client, w):
        reply, state = super().train(client, w)
        w["bias"] += 1e-3
        return reply, state


@dataclass(frozen=True)
class PaddingCounts(Base):
    def batching(self):
        return replace(super().batching(), spread=1.5)

    def train(self, client, w):
        reply, state = super().train(client, w)
        return tree.add(
            reply, {"weight": torch.zeros(()), "bias": client.data.x.mean() * torch.ones(10)}
        ), state


@dataclass(frozen=True)
class FixedDraws(Base):
    """Ignores its key, so another seed changes nothing but the cohort; and forgets the cohort."""

    def round(self, clients, state):
        return state


@dataclass(frozen=True)
class Forgets(Base):
    """Keeps something outside its state."""

    memory: ClassVar[dict] = {}

    def round(self, clients, state):
        self.memory["rounds"] = self.memory.get("rounds", 0) + 1
        new = super().round(clients, state)
        return new.replace(w=tree.scale(new.w, 1.0 + 0.01 * self.memory["rounds"]))


@pytest.mark.parametrize(
    ("spoilt", "check"),
    [
        (GlobalNoise(), testing.check_global_random_state),
        (WritesPayload(), testing.check_payload_unchanged),
        (PaddingCounts(), testing.check_batched_equals_looped),
        (PaddingCounts(), testing.check_sizes),
        (FixedDraws(), testing.check_seeds),
        (Forgets(), testing.check_seeds),
        (Forgets(), testing.check_resume),
    ],
    ids=lambda v: v.__name__ if callable(v) else type(v).__name__,
)
def test_checks_notice(spoilt, check, fed):
    with pytest.raises(AssertionError):
        check(spoilt, fed, fd.Local())


def test_wire_check_notices_a_wrong_count(fed, monkeypatch):
    from foedus.core import network

    monkeypatch.setattr(network.wire, "nbytes", lambda t, batched=False: 7)
    with pytest.raises(AssertionError, match="charged"):
        testing.check_wire(Base(), fed, fd.Local())


def test_order_check_notices(fed, monkeypatch):
    """An engine that takes clients in the order of the federation, not of their ids, is found
    out.
    """
    from foedus.engines.batches import Table

    class Unsorted(fd.Local):
        def open(self, algorithm, fed, seed_key):
            session = super().open(algorithm, fed, seed_key)
            session.ids = torch.from_numpy(fed.ids).sort().values
            offsets, order = fed.offsets, torch.arange(len(fed)).numpy()
            session.train = Table(
                fed.data.x_train, fed.data.y_train, fed.rows, offsets, order, fed.spec
            )
            return session

    with pytest.raises(AssertionError):
        testing.check_client_order(Base(), fed, Unsorted())
