"""Secure aggregation as part of a run: the numbers of the plain one to the quantization step, every
byte, and what is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch

import foedus as fd
from foedus import testing, wire
from foedus.aggregation.secure.aggregator import SecureAggregator
from foedus.aggregation.secure.simulated import PHASES, aggregate
from foedus.base import tree
from foedus.core.aggregation import Setting
from tests.conformance import FEATURES, PREDICTORS

SECURE = fd.SecureAggregation(range=64.0, bits=32)
"""Steps of 3e-8."""

ALGORITHMS = {
    "FedAvg": fd.FedAvg(fd.Linear(), lr=0.1, batch_size=16),
    "FedNewton": fd.FedNewton(FEATURES, reg=0.1),
    "FedFW": fd.FedFW(fd.Linear(), fd.L2Ball(5.0), measure_every=0),
    "FedFW, one entry": fd.FedFW(fd.Linear(), fd.L1Ball(5.0), measure_every=0),
    "FedBoost": fd.FedBoost(PREDICTORS, budget=2.5, measure_every=0),
    "FedBoost, cache": fd.FedBoost(PREDICTORS, budget=2, cache=True, repeats=2, measure_every=0),
    "Scaffold": fd.Scaffold(fd.Linear(), lr=0.1, batch_size=16),
    "FedRes": fd.FedRes(step=0.05, send="gradient"),
}
WHOLE = [k for k in ALGORITHMS if k.startswith("FedFW")]
"""With some of the clients, the server must see every reply."""


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_numbers_of_the_plain_run(name, fed):
    algorithm = ALGORITHMS[name]
    plain, secure = (fd.run(algorithm, fed, 3, aggregation=a) for a in (None, SECURE))
    for a, b in zip(tree.leaves(plain.state), tree.leaves(secure.state), strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(secure.history.loss, plain.history.loss, rtol=1e-4)
    assert secure.history.bytes_up.iloc[-1] > plain.history.bytes_up.iloc[-1]


CHECKS = (
    testing.check_batched_equals_looped,
    testing.check_client_order,
    testing.check_seeds,
    testing.check_resume,
    testing.check_global_random_state,
    testing.check_payload_unchanged,
)


QUICK = [("FedAvg", check) for check in CHECKS] + [
    (name, testing.check_client_order) for name in ("FedNewton", "FedFW", "FedBoost, cache")
]


@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param(
            name,
            check,
            id=f"{name}, {check.__name__.removeprefix('check_')}",
            marks=[] if (name, check) in QUICK else pytest.mark.slow,
        )
        for name in ("FedAvg", "FedNewton", "FedFW", "FedBoost, cache")
        for check in CHECKS
    ],
)
def test_conformance(name, check, fed, monkeypatch):
    """Masks come from the operating system, and cancel to the last bit: runs repeat, whatever the
    order, and go on from checkpoints.
    """
    monkeypatch.setattr(testing, "run", partial(fd.run, aggregation=SECURE))
    if name in WHOLE:
        whole = partial(fd.run, aggregation=SECURE)
        monkeypatch.setattr(
            testing, "run", lambda *args, participation=1.0, **options: whole(*args, **options)
        )
        if check is testing.check_seeds:
            return  # with all clients it draws nothing
    check(ALGORITHMS[name], fed, fd.Local())


# -- by hand ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask(fd.Algorithm):
    """Says its number of rows times 0.3, and a constant; counts how often it was asked."""

    how: str = "rows"

    def init(self, client):
        return torch.zeros(())

    def say(self, client, add):
        reply = {"x": client.data.count * 0.3 + add, "n": torch.ones(2, dtype=torch.int64)}
        return reply, client.state + 1

    def start(self, clients):
        return fd.State(x=torch.zeros(()), n=torch.zeros(2), who=clients.ids, came=clients.sizes)

    def round(self, clients, state):
        add = torch.ones(())
        got = (
            clients.sum(self.say, add=add)
            if self.how == "sum"
            else clients.mean(self.say, weights=self.how, add=add)
        )
        return fd.State(x=got["x"], n=got["n"], who=clients.answered, came=clients.answered_rows)


@pytest.fixture(scope="module")
def few() -> fd.Federation:
    """Clients 3, 5, 8, 9 of 1, 2, 3 and 10 rows."""
    rows = [(np.zeros((n, 1), np.float32), np.zeros(n, np.float32)) for n in (1, 2, 3, 10)]
    return replace(fd.Federation.from_clients(rows), ids=np.array([3, 5, 8, 9]))


@pytest.mark.parametrize(
    ("how", "x", "n"),
    [
        ("rows", (1.3 + 2 * 1.6 + 3 * 1.9 + 10 * 4.0) / 16, 1),
        ("uniform", (1.3 + 1.6 + 1.9 + 4.0) / 4, 1),
        ("sum", 8.8, 4),
    ],
)
def test_weights_by_hand(how, x, n, few):
    run = fd.run(Ask(how), few, 1, aggregation=fd.SecureAggregation(), evaluate_every=0)
    assert run.state.x.item() == pytest.approx(x, abs=2e-6 * (4 if how == "sum" else 1))
    assert run.state.n.tolist() == [n, n] and run.state.n.dtype == torch.float32
    assert run.state.x.dtype == torch.float32


class Dropping(SecureAggregator):
    """Clients who go away in a phase of a round."""

    gone: dict = {}  # noqa: RUF012 - by the tests

    def absent(self, phase, ask):
        return self.gone.get((ask.round, phase), ())


@dataclass(frozen=True)
class Drops(fd.SecureAggregation):
    def open(self, setting: Setting):
        made = Dropping(self, setting)
        made.gone = GONE
        return made


GONE: dict[tuple[int, str], list[int]] = {}


@pytest.fixture
def gone():
    yield GONE
    GONE.clear()


@pytest.mark.parametrize("phase", PHASES)
def test_dropouts_in_every_phase(phase, few, gone):
    """Client 8 drops out; its reply counts only where it was masked and sent before."""
    gone[2, phase] = [8]
    run = fd.run(Ask(), few, 3, aggregation=Drops(), evaluate_every=0)
    everyone = (1.3 + 2 * 1.6 + 3 * 1.9 + 10 * 4.0) / 16
    two = fd.run(Ask(), few, 2, aggregation=Drops(), evaluate_every=0)
    there = phase == "unmask"
    assert two.state.x.item() == pytest.approx(
        everyone if there else (1.3 + 2 * 1.6 + 10 * 4.0) / 13, abs=2e-6
    )
    assert two.state.who.tolist() == ([3, 5, 8, 9] if there else [3, 5, 9])
    assert two.state.came.tolist() == ([1, 2, 3, 10] if there else [1, 2, 10])
    assert run.state.x.item() == pytest.approx(everyone, abs=2e-6)  # it is back
    assert run.history.left_out.isna().tolist() == [True, True, False, True]
    assert run.history.left_out[2] == f"8: {phase}: it did not answer"
    states = tree.leaves(run.clients["states"])
    counts = torch.cat(
        [t.reshape(-1) for t in states if isinstance(t, torch.Tensor) and t.is_floating_point()]
    )
    # who dropped out before `mask` was not asked for anything
    assert counts.tolist() == [3, 3, 3 if there else 2, 3]


@pytest.mark.parametrize("phase", PHASES)
def test_below_the_threshold_it_stops(phase, few, gone):
    gone[2, phase] = [5, 8]  # 2 of 4 are left, 3 must be
    with pytest.raises(
        fd.TooFewClients,
        match=rf"round 2: {phase}: 2 of 4 clients are left.*needs 3; nothing was unmasked",
    ):
        fd.run(Ask(), few, 3, aggregation=Drops(), evaluate_every=0)


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropped", [{}, {"share": [5]}, {"mask": [5]}, {"unmask": [9]}])
def test_every_byte_of_every_phase_is_charged(dropped, few, gone):
    """What the phases cost, and the payload, once to each that gets as far as `mask`."""
    gone.update({(1, phase): ids for phase, ids in dropped.items()})
    run = fd.run(Ask(), few, 1, aggregation=Drops(), evaluate_every=0)
    reply = {"x": torch.ones(()), "n": torch.ones(2, dtype=torch.int64)}
    about = {"session": "0" * 32, "round": 1, "exchange": 0}
    cost = aggregate(
        dict.fromkeys([3, 5, 8, 9], reply), [1, 2, 3, 10], Drops(), dropouts=dropped, **about
    )
    row = run.records.rows[-1]
    sent = wire.nbytes({"add": torch.ones(())})
    assert row["bytes_up"] == cost.bytes_up
    assert row["bytes_down"] == cost.bytes_down + sent * (3 if "share" in dropped else 4)
    assert row["messages_up"] == sum(p.messages for p in cost.phases.values())


# -- who takes part --------------------------------------------------------------------------------


def test_some_clients(fed):
    algorithm = ALGORITHMS["FedAvg"]
    for part in (0.5, fd.Poisson(0.9)):
        plain, secure = (
            fd.run(algorithm, fed, 4, participation=part, aggregation=a) for a in (None, SECURE)
        )
        assert secure.history.clients.tolist() == plain.history.clients.tolist()
        for k in plain.state.w:
            torch.testing.assert_close(secure.state.w[k], plain.state.w[k], rtol=1e-5, atol=1e-6)


def test_one_client_alone_is_an_error(fed):
    with pytest.raises(
        fd.TooFewClients,
        match=r"round \d+: 1 client is asked for train; .* needs at least 2.*larger participation",
    ):
        fd.run(
            ALGORITHMS["FedAvg"],
            fed,
            50,
            participation=fd.Poisson(0.2),
            aggregation=SECURE,
            evaluate_every=0,
        )
    with pytest.raises(
        fd.ConfigError, match=r"at least 2 clients in a sum.*participation=0.1 is 1 client a round"
    ):
        fd.run(ALGORITHMS["FedAvg"], fed, 1, participation=0.1, aggregation=SECURE)
    with pytest.raises(fd.ConfigError, match="there is 1 client"):
        fd.run(ALGORITHMS["FedAvg"], fed.pool(), 1, aggregation=SECURE)


# -- what does not go together ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "part", "step"),
    [
        (fd.FFGB(fd.Forest(trees=1)), 1.0, "FFGB asks for every client's own reply to boost"),
        (fd.FedRes(step=0.05), 1.0, "FedRes asks .* reply to act"),
        (fd.AFLBoost(PREDICTORS, budget=2), 1.0, "AFLBoost asks .* reply to slope"),
    ],
)
def test_single_replies_are_refused(algorithm, part, step, fed):
    with pytest.raises(fd.ConfigError, match=step):
        fd.run(algorithm, fed, 2, participation=part, aggregation=SECURE)


def test_fedfw_keeps_no_copies_of_what_it_cannot_see(fed):
    """With some of the clients it moves the center by p eta times the mean of their points;
    matrices of rank one are averaged.
    """
    run = fd.run(
        fd.FedFW(fd.Linear(), fd.L2Ball(5.0), penalty=1e-3),
        fed,
        3,
        participation=0.5,
        aggregation=SECURE,
    )
    before = fd.run(
        fd.FedFW(fd.Linear(), fd.L2Ball(5.0), penalty=1e-3),
        fed,
        2,
        participation=0.5,
        aggregation=SECURE,
    )
    assert run.state.copies is None
    p = run.history.clients.iloc[-1] / len(fed)
    rate = p * 2 / (p * 2 + 2)  # eta_3 = 2 / (tau + 1), tau = 2 p + 1
    # The mean of points of the ball's surface has at most its radius.
    mean = {
        k: (v - (1 - rate) * before.state.center[k]) / rate for k, v in run.state.center.items()
    }
    assert sum(float(v.square().sum()) for v in mean.values()) ** 0.5 <= 5.0 + 1e-3
    whole = fd.FedFW(fd.Linear(bias=False), fd.NuclearBall(5.0), penalty=1e-3)
    plain, secure = (fd.run(whole, fed, 2, aggregation=a) for a in (None, SECURE))
    torch.testing.assert_close(
        secure.state.center["weight"], plain.state.center["weight"], rtol=1e-3, atol=1e-4
    )


def test_settings_that_do_not_go_together(fed):
    with pytest.raises(fd.ConfigError, match=r"quantise='int8' and secure aggregation.*bits="):
        fd.run(ALGORITHMS["FedAvg"], fed, 1, quantise="int8", aggregation=SECURE)
    with pytest.raises(fd.ConfigError, match=r"fd.Delayed and secure aggregation"):
        fd.run(ALGORITHMS["FedAvg"], fed, 1, engine=fd.Delayed(up=1), aggregation=SECURE)
    late, local = (
        fd.run(ALGORITHMS["FedAvg"], fed, 2, engine=e, aggregation=SECURE)
        for e in (fd.Delayed(), fd.Local())
    )
    # delays of nothing
    assert all(torch.equal(late.state.w[k], local.state.w[k]) for k in local.state.w)
    with pytest.raises(fd.ConfigError, match="weights 'row' is unknown"):
        fd.run(Ask("row"), fed, 1, aggregation=SECURE, evaluate_every=0)


def test_a_session_is_closed_when_its_aggregation_is_refused(fed):
    closed = []

    class Engine(fd.Local):
        def open(self, *args):
            session = super().open(*args)
            session.close = lambda: closed.append(1)
            return session

    with pytest.raises(fd.ConfigError, match="quantise"):
        fd.run(ALGORITHMS["FedAvg"], fed, 1, engine=Engine(), quantise="int8", aggregation=SECURE)
    assert closed == [1]


def test_numbers_out_of_range_and_not_finite(few):
    with pytest.raises(
        fd.ReplyError, match=r"round 1: client 9: x holds 4\.0, outside -2 \.\. 2; nothing was sent"
    ):
        fd.run(Ask(), few, 1, aggregation=fd.SecureAggregation(range=2.0), evaluate_every=0)

    class Wild(Ask):
        def say(self, client, add):
            return {"x": client.data.count / (client.data.count - 2)}, None

        def round(self, clients, state):
            clients.mean(self.say, add=torch.ones(()))

    with pytest.raises(
        fd.DivergenceError, match="round 1: the reply of client 5 is not finite"
    ) as caught:
        fd.run(Wild(), few, 1, aggregation=fd.SecureAggregation(), evaluate_every=0)
    assert caught.value.clients == (5,)


# -- for others ------------------------------------------------------------------------------------


def test_noise_and_clipping_at_clients(few):
    """What differential privacy needs: clients change their replies before encoding, and add whole
    numbers of steps.
    """

    seen = {}

    class Noisy(SecureAggregator):
        def sent(self, batch):
            seen.update(zip(batch.ids.tolist(), batch.sizes.tolist(), strict=True))
            return {k: v.clamp(max=1.5) for k, v in batch.reply.items()}

    @dataclass(frozen=True)
    class Settings(fd.SecureAggregation):
        def open(self, setting):
            return Noisy(self, setting, noise=lambda size: np.full(size, 5, np.int64))

    config = Settings(range=8.0, bits=11, headroom=5)  # steps of 2^-7
    run = fd.run(Ask("uniform"), few, 1, aggregation=config, evaluate_every=0)
    rounded = [round(x * 128) / 128 for x in (1.3, 1.5, 1.5, 1.5)]
    assert run.state.x.item() == pytest.approx(sum(rounded) / 4 + 5 / 128)
    assert seen == {3: 1, 5: 2, 8: 3, 9: 10}


@pytest.mark.slow
def test_on_ray(fed, ray_engine):
    for name in ("FedAvg", "Scaffold", "FedNewton"):
        ray, local = (
            fd.run(ALGORITHMS[name], fed, 3, engine=e, aggregation=SECURE)
            for e in (ray_engine, fd.Local())
        )
        testing._close(ray, local, name)
