"""Held values: the shortest way to each client's copy, to the last bit; versions sent, doubted,
forgotten and resumed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import foedus as fd
from foedus import testing, wire
from foedus.base import random
from foedus.core.held import (
    NOTHING_KNOWN,
    HeldArrays,
    HeldItems,
    HeldSum,
    Holdings,
    rebuilt,
    shortest,
)
from foedus.wire.arrays import LowRank, Sparse

ALGORITHM = fd.Algorithm()


def arrays(size: int = 100) -> HeldArrays:
    return HeldArrays({"w": torch.linspace(-1, 1, size)})


def one_entry(size: int, at: int, value: float) -> dict:
    return {"w": Sparse(torch.tensor([at], dtype=torch.int32), torch.tensor([value]), (size,))}


def test_a_change_by_hand():
    """0.5 * (1, 2) + (0, 3) = (0.5, 4); then 0.25 * that + (1, 0) = (1.125, 1)."""
    held = HeldArrays({"w": torch.tensor([1.0, 2.0])})
    held = held.moved(0.5, {"w": torch.tensor([0.0, 3.0])}).moved(
        0.25, {"w": torch.tensor([1.0, 0.0])}
    )
    assert held.version == 2 and held["w"].tolist() == [1.125, 1.0]


def test_the_shortest_of_nothing_changes_and_whole():
    held = arrays()
    assert held.update(0, ALGORITHM) is None  # version 0 is everybody's own
    for k in range(3):
        held = held.moved(0.9, one_entry(100, k, 1.0))
    assert held.update(3, ALGORITHM) is None
    assert len(held.update(2, ALGORITHM)) == 1 and len(held.update(0, ALGORITHM)) == 3
    (_, last), (_, before) = held.update(2, ALGORITHM)[0], held.update(1, ALGORITHM)[0]
    assert last["w"].indices.tolist() == [2] and before["w"].indices.tolist() == [1]  # the newest
    assert held.update(NOTHING_KNOWN, ALGORITHM) is held.value
    dense = held.moved(0.9, {"w": torch.ones(100)})
    assert dense.update(3, ALGORITHM) is dense.value  # the change is as long as the value


def test_the_log_is_no_longer_than_the_value():
    """100 numbers take 400 bytes and some; a change of one entry some 40: about ten are kept,
    whatever the number of rounds.
    """
    held = arrays()
    for k in range(200):
        held = held.moved(0.9, one_entry(100, k % 100, 1.0))
    assert 5 <= len(held.log) <= 15
    assert wire.nbytes(held.log) <= wire.nbytes(held.value) + 60
    assert held.update(200 - len(held.log) - 1, ALGORITHM) is held.value


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 12), st.integers(0, 2**32 - 1))
def test_copies_have_the_bits_of_the_original(base, seed):
    """From any version, through encoded messages, in dense, sparse and low-rank changes."""
    rng = np.random.default_rng(seed)
    held = HeldArrays({"w": torch.from_numpy(rng.normal(size=(6, 5)).astype(np.float32))})
    copy = {k: v.clone() for k, v in held.value.items()}
    for version in range(12):
        if version == base:
            copy = {k: v.clone() for k, v in held.value.items()}
        left, right = (torch.from_numpy(rng.normal(size=(n, 1)).astype(np.float32)) for n in (6, 5))
        dense = torch.from_numpy(rng.normal(size=(6, 5)).astype(np.float32))
        add = [{"w": dense}, {"w": LowRank(left, right)}, shortest({"w": dense * (dense > 1.5)})][
            int(rng.integers(3))
        ]
        held = held.moved(float(rng.uniform(0, 1)), add)
    update = held.update(min(base, 12) if base < 12 else 12, ALGORITHM)
    if base == 12:
        assert update is None
        return
    message = wire.decode(wire.encode({"held": update}))["held"]
    assert torch.equal(rebuilt(copy, message)["w"], held["w"])


def test_a_sum_of_functions_by_hand():
    """f = 2 h1; then 0.5 f + 3 h2; then 0.1 f + 4 h3: weights 2 * 0.5 * 0.1, 3 * 0.1, 4."""
    f = HeldSum()
    for keep, weight in ((1.0, 2.0), (0.5, 3.0), (0.1, 4.0)):
        f = f.grown(keep, f"h{f.version + 1}", torch.tensor([weight], dtype=torch.float64))
    keep, weights = f.since(0)
    assert keep == pytest.approx(0.05)
    torch.testing.assert_close(
        torch.cat(weights), torch.tensor([0.1, 0.3, 4.0], dtype=torch.float64)
    )
    # what a client has of 2 h1 is now worth 0.05 of it
    keep, parts, weights = f.update(1, ALGORITHM)
    assert keep == pytest.approx(0.05) and parts == ["h2", "h3"]
    assert f.update(3, ALGORITHM) is None
    assert (
        f.update(NOTHING_KNOWN, ALGORITHM)[0] == 0.0
        and len(f.update(NOTHING_KNOWN, ALGORITHM)[1]) == 3
    )


def test_items_are_sent_once():
    @dataclass(frozen=True)
    class Sends(fd.Algorithm):
        def items(self, which):
            return which.tolist()

    holdings, algorithm = Holdings(3), Sends()
    first = {"models": HeldItems(torch.tensor([0, 2]), 4)}
    (group,) = holdings.updates(first, torch.tensor([0, 1]), False, algorithm)
    assert group[0].tolist() == [0, 1] and group[1] == {"models": [0, 2]}
    holdings.settle(first, torch.tensor([0, 1]))
    second = {"models": HeldItems(torch.tensor([2, 3]), 4)}
    groups = holdings.updates(second, torch.tensor([0, 1, 2]), False, algorithm)
    assert {tuple(places.tolist()): u["models"] for places, u in groups} == {
        (0, 1): [3],
        (2,): [2, 3],
    }
    whole = holdings.updates(second, torch.tensor([0, 1, 2]), True, algorithm)
    assert [(places.tolist(), u["models"]) for places, u in whole] == [([0, 1, 2], [2, 3])]


def test_who_has_what():
    """Settled, doubted (the whole is sent), forgotten (what a newcomer makes itself), saved and
    restored.
    """
    held = arrays()
    for k in range(3):
        held = held.moved(1.0, one_entry(100, k, 1.0))
    holdings, everybody = Holdings(4), torch.arange(4)
    holdings.settle({"w": held}, torch.tensor([0, 1, 2]))
    saved = holdings.save()
    holdings.settle({"w": held}, torch.tensor([3]))  # what was saved stays as it was
    holdings.doubt(torch.tensor([1]))
    holdings.forget(torch.tensor([2, 3]))
    groups = holdings.updates({"w": held}, everybody, False, ALGORITHM)
    found = {int(i): u["w"] for places, u in groups for i in places}
    assert found[0] is None and found[1] is held.value and len(found[2]) == len(found[3]) == 3
    holdings.load(saved)
    assert holdings.versions["w"].tolist() == [3, 3, 3, 0]
    secret = holdings.updates({"w": held}, everybody, True, ALGORITHM)
    assert len(secret) == 1 and secret[0][1]["w"] is held.value


class Flaky(testing.EncodingSession):
    """Untrusted clients, of whom client 1 fails to answer in rounds 2 and 3."""

    def __init__(self, *args):
        super().__init__(*args)
        self.conditions = replace(self.conditions, trusted=False)
        self.faults = {}

    def exchange(self, ask):
        away = ask.round in (2, 3)
        self.faults = {1: "no answer"} if away else {}
        for ids, reply, stacked in super().exchange(ask):
            keep = ids != 1 if away else torch.ones_like(ids, dtype=torch.bool)
            if bool(keep.all()):
                yield ids, reply, stacked
            elif stacked:
                yield ids[keep], {k: v[keep] for k, v in reply.items()}, True


def test_a_lost_answer_is_followed_by_the_whole(fed):
    """Each site's copy is the server's (`EncodingSession` asserts it), also after answers were
    lost.
    """

    class Engine(testing.Encoding):
        def open(self, algorithm, fed, seed_key):
            session = super().open(algorithm, fed, seed_key)
            return Flaky(self, algorithm, session.inner, fed.spec, random.fold(seed_key, 0))

    algorithm = fd.FedFW(fd.Linear(), fd.PerLayer(fd.L1Ball(5.0)), penalty=1e-2)
    engine = Engine(fd.Local(batch=False))
    run = fd.run(algorithm, fed, 6, engine=engine, evaluate_every=0)
    assert run.history.dropped.tolist()[2:4] == [1, 1]
    assert engine.down == run.history.bytes_down.iloc[-1]
    steps = run.history.bytes_down.diff()
    whole = wire.nbytes({"center": run.state.center.value})
    # rounds 3 and 4 begin with a doubt about client 1
    assert steps[3] > whole > steps[2] and steps[4] > whole > steps[6]


def test_resumed_runs_know_who_has_what(fed, tmp_path):
    path = tmp_path / "run.safetensors"
    algorithm = fd.FedFW(fd.Linear(), fd.L1Ball(5.0))
    options = {"participation": 0.4, "evaluate_every": 0}
    whole = fd.run(algorithm, fed, 8, **options)
    fd.run(algorithm, fed, 5, checkpoint=path, **options)
    resumed = fd.run(algorithm, fed, 8, checkpoint=path, resume=True, **options)
    assert resumed.history.bytes_down.tolist() == whole.history.bytes_down.tolist()


def test_the_size_of_a_message_does_not_tell_who_has_been_here(fed):
    """Where clients are drawn in secret, everybody is sent the whole, in the first round, too."""
    private = fd.DifferentialPrivacy(clip=10.0, noise=1.0, delta=1e-3)
    algorithm = fd.FedFW(fd.Linear(), fd.L1Ball(5.0), penalty=1e-2, measure_every=0)

    class Engine(fd.Local):
        def open(self, *about):
            session = super().open(*about)
            exchange = session.exchange

            def noting(ask):
                lengths.extend(wire.nbytes(m) for ids, m in ask.messages() if len(ids))
                return exchange(ask)

            session.exchange = noting
            return session

    lengths: list[int] = []
    options = {"participation": fd.Poisson(0.7), "aggregation": private, "evaluate_every": 0}
    run = fd.run(algorithm, fed, 4, engine=Engine(), **options)
    message = wire.nbytes({"center": run.state.center.value, "pace": torch.zeros(5)})
    assert set(lengths) == {message}
    sent = run.history.bytes_down.diff()[1:]
    assert (sent == round(5 * 0.7 * message)).all()  # of the number that is expected
