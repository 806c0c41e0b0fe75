"""Hostile clients: what they send is what they are said to send, and what fails a check is left
out, named and counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import foedus as fd
from foedus.base import random
from foedus.core.exchange import Ask
from foedus.engines.hostile import ATTACKS
from foedus.errors import WireError

AVERAGE = fd.FedAvg(fd.Linear(), lr=0.1, steps=2)


@pytest.fixture(scope="module")
def fed() -> fd.Federation:
    digits = fd.load("digits")
    few = fd.Data.from_arrays(
        digits.x_train[:300],
        digits.y_train[:300],
        digits.x_test[:100],
        digits.y_test[:100],
        classes=10,
    )
    return fd.split(few, "dirichlet", clients=6, alpha=1.0, seed=0)


def replies(engine, fed, round=2, algorithm=AVERAGE, step="train", **payload):
    """Every client's reply to one exchange, and the session."""
    session = engine.open(algorithm, fed, random.key(0))
    payload = payload or {"w": fd.Linear().init(fed.spec, random.key(1))}
    ask = Ask(step, payload, torch.arange(len(fed)), random.key(0), round, 0)
    found = {}
    for ids, reply, stacked in session.exchange(ask):
        for n, i in enumerate(ids.tolist()):
            found[i] = {k: v[n] for k, v in reply.items()} if stacked else reply
    return found, session


@pytest.mark.parametrize(
    ("attack", "strength", "factor"),
    [("sign_flip", None, -1), ("sign_flip", 3.0, -3), ("scale", None, 10)],
)
@pytest.mark.parametrize("batch", [True, False])
def test_replies_of_the_hostile_are_multiplied_and_no_others(fed, attack, strength, factor, batch):
    engine = fd.Hostile(fd.Local(batch=batch), clients=[1, 4], attack=attack, strength=strength)
    honest, _ = replies(fd.Local(batch=batch), fed)
    spoilt, _ = replies(engine, fed)
    for i in range(6):
        for k in honest[i]:
            assert torch.equal(spoilt[i][k], honest[i][k] * (factor if i in (1, 4) else 1))


@pytest.mark.parametrize(
    "domain",
    [
        fd.L1Ball(2.0),
        fd.L2Ball(2.0),
        fd.LInfBall(2.0),
        fd.PerLayer({"weight": fd.NuclearBall(2.0), "bias": fd.L2Ball(1.0)}),
    ],
)
def test_structured_replies_are_multiplied_too(fed, domain):
    algorithm = fd.FedFW(fd.Linear(), domain)
    like = fd.Linear().init(fed.spec, random.key(0))
    sent = {"center": like, "pace": torch.tensor([0.5, 1e-3, 1e-3, 0.1, 0.2])}

    def points(engine):
        session = engine.open(algorithm, fed, random.key(0))
        batches = list(session.exchange(Ask("step", sent, torch.arange(6), random.key(0), 1, 0)))
        return [(ids, algorithm.set.dense(reply, like)) for ids, reply, _ in batches]

    spoilt = points(fd.Hostile(fd.Local(batch=True), clients=[2], attack="scale", strength=7.0))
    for (ids, honest), (_, other) in zip(points(fd.Local(batch=True)), spoilt, strict=True):
        factor = torch.where(ids == 2, 7.0, 1.0)
        for k in honest:
            torch.testing.assert_close(
                other[k], honest[k] * factor.view(-1, *[1] * (honest[k].dim() - 1))
            )


def test_garbage_cannot_be_read_and_nan_is_not_finite(fed):
    for attack, why in (
        ("garbage", "expected b'fd' at byte 0"),
        ("nan", "its reply is not finite"),
    ):
        run = fd.run(AVERAGE, fed, 2, engine=fd.Hostile(clients=[1, 4], attack=attack))
        assert run.history.dropped.tolist()[1:] == [2, 2]
        for text in run.history.left_out[1:]:
            first, second = text.split("; ")
            assert (
                first.startswith("1: ")
                and second.startswith("4: ")
                and why in first
                and why in second
            )
        alone = fd.run(AVERAGE, fed.select([0, 2, 3, 5]), 2)
        for k in run.state.w:
            torch.testing.assert_close(run.state.w[k], alone.state.w[k])


def test_stale_is_what_was_sent_at_first(fed):
    engine = fd.Hostile(clients=[3], attack="stale")
    session = engine.open(AVERAGE, fed, random.key(0))
    w = fd.Linear().init(fed.spec, random.key(1))

    def said(round, scale):
        ask = Ask(
            "train",
            {"w": {k: v + scale for k, v in w.items()}},
            torch.arange(6),
            random.key(0),
            round,
            0,
        )
        return {
            i: {k: v[n] for k, v in r.items()}
            for ids, r, _ in session.exchange(ask)
            for n, i in enumerate(ids.tolist())
        }

    first, later = said(1, 0.0), said(2, 0.5)
    assert all(torch.equal(first[3][k], later[3][k]) for k in w)
    assert all(not torch.equal(first[2][k], later[2][k]) for k in w)
    honest, _ = replies(fd.Local(), fed, 1, w=w)
    torch.testing.assert_close(first[3], honest[3])


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_same_seed_gives_the_same_run_and_it_can_be_resumed(fed, attack, tmp_path):
    engine, path = fd.Hostile(clients=0.3, attack=attack), tmp_path / "c.safetensors"
    whole, again = (
        fd.run(AVERAGE, fed, 3, engine=engine, seed=5, evaluate_every=0) for _ in range(2)
    )
    fd.run(AVERAGE, fed, 2, engine=engine, seed=5, evaluate_every=0, checkpoint=path)
    resumed = fd.run(
        AVERAGE, fed, 3, engine=engine, seed=5, evaluate_every=0, checkpoint=path, resume=True
    )
    for k in whole.state.w:
        assert torch.equal(whole.state.w[k], again.state.w[k]) and torch.equal(
            whole.state.w[k], resumed.state.w[k]
        )
    other = fd.Hostile(clients=[0], attack=attack)
    with pytest.raises(fd.CheckpointError, match="other hostile clients"):
        fd.run(
            AVERAGE, fed, 3, engine=other, seed=5, evaluate_every=0, checkpoint=path, resume=True
        )


def test_who_is_hostile_is_drawn_by_the_seed():
    ids, half = torch.arange(100) + 7, fd.Hostile(clients=0.25)
    drawn = [half.who(ids, random.key(s)).tolist() for s in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and all(
        len(set(d)) == 25 and set(d) <= set(ids.tolist()) for d in drawn
    )
    assert fd.Hostile(clients=0).who(ids, random.key(0)).tolist() == []


def test_nobody_hostile_changes_nothing(fed):
    plain, watched = (
        fd.run(AVERAGE, fed, 2),
        fd.run(AVERAGE, fed, 2, engine=fd.Hostile(clients=0.0)),
    )
    assert all(torch.equal(plain.state.w[k], watched.state.w[k]) for k in plain.state.w)
    assert watched.history.dropped.tolist()[1:] == [0, 0] and "left_out" not in watched.history


def test_flipped_labels(fed):
    poisoned = fd.poison(fed, [2])
    for p in range(6):
        mine = fed.client_rows(p)
        before, after = fed.data.y_train[mine], poisoned.data.y_train[mine]
        assert (after == (9 - before if p == 2 else before)).all()
    assert (poisoned.data.y_test == fed.data.y_test).all()
    run, same = (
        fd.run(AVERAGE, fed, 1, engine=fd.Hostile(clients=[2], attack="label_flip")),
        fd.run(AVERAGE, poisoned, 1),
    )
    assert all(torch.equal(run.state.w[k], same.state.w[k]) for k in run.state.w)
    values = fd.Federation.from_clients(
        [(np.ones((2, 1)), np.array([1.0, 2.0])), (np.ones((1, 1)), np.array([3.0]))]
    )
    assert fd.poison(values, [0]).data.y_train.tolist() == [-1.0, -2.0, 3.0]
    with pytest.raises(fd.ConfigError, match="clients names 9"):
        fd.poison(fed, [9])


def test_a_robust_mean_does_not_follow_them(fed):
    attack = fd.Hostile(clients=[1, 4], attack="scale", strength=1e6)
    honest = fd.run(AVERAGE, fed, 3).state.w["weight"]
    robust = fd.run(AVERAGE, fed, 3, engine=attack, aggregation=fd.Median(weighted=False)).state.w[
        "weight"
    ]
    plain = fd.run(AVERAGE, fed, 3, engine=attack, evaluate_every=0).state.w["weight"]
    assert robust.norm() < 2 * honest.norm() < 1e-3 * plain.norm()


def test_delays_go_around(fed):
    engine = fd.Delayed(fd.Hostile(clients=[1], attack="nan"), up=[0, 0, 1, 0, 0, 0])
    run = fd.run(AVERAGE, fed, 3, engine=engine)
    assert run.history.dropped.tolist()[1:] == [1, 1, 1]
    assert np.isfinite(run.history.loss).all()


def test_functions_and_measurements_survive(fed):
    run = fd.run(
        fd.FFGB(fd.Forest(trees=1, depth=2)), fed, 2, engine=fd.Hostile(clients=[0], attack="nan")
    )
    assert run.history.dropped.tolist()[1:] == [1, 1]
    run = fd.run(
        fd.FedFW(fd.Linear(), fd.L2Ball(5.0), penalty=1e-3),
        fed,
        2,
        engine=fd.Hostile(clients=[0], attack="garbage"),
    )
    assert np.isfinite(run.history.fw_gap).all()


def test_if_a_cohort_is_refused_the_round_changes_nothing(fed):
    """Clients 0 to 2 of 6 are hostile: a round that draws only them leaves the model as it was."""
    engine = fd.Hostile(clients=[0, 1, 2], attack="garbage")
    run = fd.run(AVERAGE, fed, 12, engine=engine, participation=1 / 3)
    rows = run.history
    alone = (rows.dropped == 2).to_numpy()
    assert 0 < alone.sum() < 12  # some cohorts, not all
    before = rows.accuracy.shift().to_numpy()
    assert (rows.accuracy.to_numpy() == before)[alone].all()


@pytest.mark.parametrize("attack", ["garbage", "nan"])
@pytest.mark.parametrize("aggregation", [None, fd.Median()], ids=["mean", "median"])
def test_if_all_clients_are_refused_the_run_ends_and_names_them(attack, aggregation, fed):
    engine = fd.Hostile(clients=1.0, attack=attack)
    for engine_ in (engine, fd.Delayed(engine, up=[0, 1, 0, 0, 1, 0])):
        with pytest.raises(fd.TooFewClients) as error:
            fd.run(AVERAGE, fed, 3, engine=engine_, aggregation=aggregation)
        assert all(f"client {i}: " in str(error.value) for i in range(6))
        assert "repair these clients" in str(error.value)


def test_if_all_points_are_refused_the_error_says_why(fed):
    """A point ten times as long as the set allows is no point of it; rows and gaps may be."""
    engine = fd.Hostile(clients=1.0, attack="scale")
    for domain in (fd.L2Ball(5.0), fd.L1Ball(5.0)):
        with pytest.raises(fd.TooFewClients, match=r"round 1: .*client 5: its point lies outside"):
            fd.run(fd.FedFW(fd.Linear(), domain), fed, 2, engine=engine)
    garbage = fd.Hostile(clients=1.0, attack="garbage")
    with pytest.raises(fd.TooFewClients, match=r"round 0: .* replies to scale of all 6 .*client 0"):
        fd.run(fd.FedFW(fd.Linear(), fd.L2Ball(5.0)), fed, 2, engine=garbage)


@dataclass(frozen=True)
class Named:
    """An engine whose clients are untrusted already."""

    def open(self, algorithm, fed, seed_key):
        session = fd.Local().open(algorithm, fed, seed_key)
        session.conditions = replace(session.conditions, trusted=False)
        return session


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attack": "flip"}, "attack 'flip' is unknown"),
        ({"clients": 1.5}, "clients=1.5"),
        ({"clients": "all"}, "clients='all'"),
        ({"clients": [True]}, "must be a part from 0 to 1, or a list"),
        ({"strength": -1.0}, "strength=-1.0"),
        ({"engine": fd.Delayed()}, "delays go around"),
        ({"engine": fd.Local}, "must be fd.Local"),
        ({"clients": [99]}, "clients names 99"),
        ({"engine": Named()}, "are simulated with"),
    ],
)
def test_settings_that_are_refused(fed, options, message):
    with pytest.raises(fd.ConfigError, match=message):
        fd.run(AVERAGE, fed, 1, engine=fd.Hostile(**options))


def test_random_bytes_do_not_decode():
    from foedus import wire
    from foedus.engines.hostile import _garbage

    for client in range(50):
        with pytest.raises(WireError):
            wire.decode(
                _garbage(Ask("x", {}, torch.tensor([0]), random.key(0), 1, 0), client, 40 + client)
            )


def test_what_is_measured_is_not_attacked(fed):
    """The objective of the start is measured before any client could have moved it."""
    algorithm = fd.FedFW(fd.Linear(), fd.L2Ball(5.0), penalty=1e-3)
    first = [
        fd.run(algorithm, fed, 0, engine=engine, evaluate_every=0).history.objective.iloc[0]
        for engine in (fd.Local(), fd.Hostile(clients=[0], attack="scale", strength=1e3))
    ]
    assert first[0] == first[1]
