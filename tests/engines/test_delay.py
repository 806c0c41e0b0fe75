"""Delays: who acts on what, when replies arrive, and what is on its way when a run stops."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import scipy.stats
import torch

import foedus as fd
from foedus.core.exchange import NothingArrived
from foedus.engines.delayed import Delayed
from foedus.wire import nbytes


def federation(clients: int = 3) -> fd.Federation:
    """Clients 0, 1, 2, ... with 1, 2, 3, ... rows."""
    sizes = np.arange(1, clients + 1)
    data = fd.Data.from_arrays(
        np.ones((sizes.sum(), 1), np.float32), np.zeros(sizes.sum(), np.float32)
    )
    owner = np.repeat(np.arange(clients), sizes)
    return fd.Federation.from_owners(
        data, owner, np.zeros(0, np.int64), np.arange(clients), "by hand", {}
    )


@dataclass(frozen=True)
class Diary(fd.Algorithm):
    """Broadcasts the number of the round, and writes down what comes back, from whom and when."""

    weights: str = "uniform"

    def init(self, client):
        return {"turns": torch.zeros(())}

    def note(self, client, now):
        turns = client.state["turns"] + 1
        return {"saw": now, "who": client.id.double(), "turn": turns.double()}, {"turns": turns}

    def start(self, clients):
        return fd.State(log=torch.zeros(0, 5, dtype=torch.float64))

    def round(self, clients, state):
        replies = clients.gather(
            self.note, now=torch.tensor(float(clients.round), dtype=torch.float64)
        )
        r = replies.stack()
        now = torch.full((len(replies),), float(clients.round), dtype=torch.float64)
        rows = torch.stack((now, r["who"], r["turn"], r["saw"], replies.versions.double()), 1)
        return state.replace(log=torch.cat((state.log, rows)))


def test_each_reply_comes_when_it_must_and_from_the_broadcast_that_it_must():
    up, down = [0, 2, 1], [1, 0, 3]
    result = fd.run(
        Diary(), federation(), 8, engine=Delayed(fd.Local(), up, down), evaluate_every=0
    )
    expected = []
    for t in range(1, 9):
        for i in range(3):
            s = t - up[i]  # the round in which the reply was made; client i's s-th turn
            if s >= 1:
                expected.append([t, i, s, max(s - down[i], 1), max(s - down[i], 1)])
    assert result.state.log.tolist() == expected


def test_a_client_is_sent_what_the_server_had_whether_or_not_it_took_part_then():
    """With half of the clients and down = 2, everybody who takes part in round t acts on the
    broadcast of round t - 2.
    """
    fed = federation(6)
    result = fd.run(
        Diary(), fed, 9, engine=Delayed(down=2), participation=0.5, evaluate_every=0, seed=4
    )
    log = result.state.log
    assert log[:, 3].tolist() == log[:, 4].tolist() == [max(t - 2, 1) for t in log[:, 0].tolist()]
    cohorts = [set(log[log[:, 0] == t, 1].tolist()) for t in range(1, 10)]
    # some of them were not there when it was the newest
    assert any(cohorts[t] - cohorts[t - 2] for t in range(2, 9))
    prompt = fd.run(Diary(), fed, 9, participation=0.5, evaluate_every=0, seed=4)
    # and it is sent, and charged, in round t
    assert result.history.bytes_down.tolist() == prompt.history.bytes_down.tolist()


@dataclass(frozen=True)
class Growing(Diary):
    """Broadcasts as many numbers as there were rounds."""

    def note(self, client, now):
        return super().note(client, now.sum())

    def round(self, clients, state):
        clients.gather(self.note, now=torch.ones(clients.round, dtype=torch.float64))
        return state


def test_what_is_delivered_is_charged():
    """8 bytes a number: in round t client i is sent the broadcast of round max(t - down_i, 1)."""
    down = (0, 1, 3)
    run = fd.run(Growing(), federation(), 6, engine=Delayed(down=down), evaluate_every=0)
    one = nbytes({"now": torch.ones(1, dtype=torch.float64)})
    expected = [sum(one + 8 * (max(t - d, 1) - 1) for d in down) for t in range(1, 7)]
    assert run.history.bytes_down.diff()[1:].tolist() == expected


def test_bytes_are_charged_when_sent():
    prompt = fd.run(Diary(), federation(), 6, evaluate_every=0).history
    late = fd.run(Diary(), federation(), 6, engine=Delayed(up=4, down=2), evaluate_every=0).history
    for column in ("bytes_up", "bytes_down", "messages_up"):
        assert late[column].tolist() == prompt[column].tolist()


@pytest.mark.parametrize("batch", [True, False])
def test_without_delay_nothing_changes(batch):
    fed = fd.split(fd.load("digits"), "dirichlet", clients=5, alpha=0.5, seed=0)
    algorithm = fd.Scaffold(fd.Linear(), lr=0.1, batch_size=16)
    prompt = fd.run(algorithm, fed, 4, engine=fd.Local(batch=batch), participation=0.6)
    through = fd.run(algorithm, fed, 4, engine=Delayed(fd.Local(batch=batch)), participation=0.6)
    assert through.history.drop(columns="seconds").equals(prompt.history.drop(columns="seconds"))
    assert torch.equal(through.state.w["weight"], prompt.state.w["weight"])


@dataclass(frozen=True)
class Doubler(fd.Algorithm):
    """w <- mean of (w + id + 1) by rows: averages that are easy to do by hand."""

    def shifted(self, client, w):
        return {"w": w + client.id + 1}, None

    def start(self, clients):
        return fd.State(w=torch.zeros((), dtype=torch.float64))

    def round(self, clients, state):
        return fd.State(w=clients.mean(self.shifted, w=state.w)["w"])


def test_averages_are_over_those_who_arrive():
    """Clients 0 (1 row, prompt) and 1 (2 rows, down 1, up 1).

    Round 1: only client 0 arrives: 0 + 1 = 1. Round 2: client 0 says 1 + 1 = 2; client 1's of round
    1 was 0 + 2 = 2: w = 2. Round 3: client 0 says 2 + 1 = 3; client 1, in round 2, had the
    broadcast of round 1, 0, and said 2: (3 + 2 * 2) / 3.
    """
    fed = federation(2)
    result = fd.run(Doubler(), fed, 3, engine=Delayed(up=[0, 1], down=[0, 1]), evaluate_every=0)
    assert float(result.state.w) == pytest.approx(7 / 3)


def test_a_round_without_replies_leaves_the_state():
    result = fd.run(Doubler(), federation(2), 5, engine=Delayed(up=3), evaluate_every=0)
    # Replies of rounds 1 and 2 (to w = 0) arrive in rounds 4 and 5: mean of 1 and 2 by 1 and 2 rows
    # is 5/3.
    assert float(result.state.w) == pytest.approx(5 / 3)


def test_sums_add_up_what_arrives():
    @dataclass(frozen=True)
    class Adder(Doubler):
        def round(self, clients, state):
            try:
                return fd.State(
                    w=state.w
                    + clients.sum(self.shifted, w=torch.zeros((), dtype=torch.float64))["w"]
                )
            except NothingArrived:
                return fd.State(w=state.w - 1)

    assert (
        float(
            fd.run(Adder(), federation(2), 4, engine=Delayed(up=[1, 2]), evaluate_every=0).state.w
        )
        == -1 + 1 + 3 + 3
    )
    assert float(fd.run(Adder(), federation(2), 2, evaluate_every=0).state.w) == 3 + 3


@pytest.mark.parametrize(
    "algorithm",
    [fd.FedAvg(fd.Linear(), lr=0.1), fd.FedProx(fd.MLP(16), lr=0.1, mu=0.01)],
    ids=["FedAvg", "FedProx"],
)
def test_algorithms_learn_under_delay(algorithm):
    fed = fd.split(fd.load("digits"), "iid", clients=4)
    result = fd.run(algorithm, fed, 25, engine=Delayed(up=[0, 1, 2, 3], down=1), evaluate_every=25)
    assert result.history.accuracy.iloc[-1] > 0.85


def test_resume_with_messages_on_their_way(tmp_path):
    fed, path = federation(), tmp_path / "run.safetensors"
    engine = Delayed(fd.Local(), up=[0, 2, 1], down=[1, 0, 3])
    whole = fd.run(Diary(), fed, 8, engine=engine, participation=0.7, evaluate_every=0)
    fd.run(Diary(), fed, 4, engine=engine, participation=0.7, evaluate_every=0, checkpoint=path)
    again = fd.run(
        Diary(),
        fed,
        8,
        engine=engine,
        participation=0.7,
        evaluate_every=0,
        checkpoint=path,
        resume=True,
    )
    assert torch.equal(whole.state.log, again.state.log)
    with pytest.raises(fd.CheckpointError, match="other delays"):
        fd.run(
            Diary(),
            fed,
            9,
            engine=Delayed(up=1),
            participation=0.7,
            evaluate_every=0,
            checkpoint=path,
            resume=True,
        )
    with pytest.raises(fd.CheckpointError, match="messages on their way"):
        fd.run(Diary(), fed, 9, participation=0.7, evaluate_every=0, checkpoint=path, resume=True)


def test_delays_from_a_distribution_are_drawn_once_with_a_seed():
    fed = federation(6)

    def draw(seed):
        engine = Delayed(up=scipy.stats.randint(0, 9), down=scipy.stats.poisson(2), seed=seed)
        return engine.open(Doubler(), fed, torch.zeros(2, dtype=torch.int64)).conditions.delays

    a, b, c = draw(1), draw(1), draw(2)
    assert torch.equal(a.up, b.up) and torch.equal(a.down, b.down)
    assert not torch.equal(torch.cat((a.up, a.down)), torch.cat((c.up, c.down)))
    assert int(a.up.max()) < 9


def test_memory_is_bounded_by_the_delay():
    """Broadcasts that a client may still be sent or have answered, t - down .. t and t - down - up
    .. t - down; two rounds of replies.
    """
    seen = []

    @dataclass(frozen=True)
    class Watched(Doubler):
        def round(self, clients, state):
            seen.append(clients.network.mail)
            return super().round(clients, state)

    fd.run(Watched(), federation(2), 40, engine=Delayed(up=2, down=3), evaluate_every=0)
    mail = seen[-1]
    # replies to 35 and 36 arrived last
    assert [sorted(past) for past in mail.sent.values()] == [[35, 36, 37, 38, 39, 40]]
    assert [sum(len(batch) for _, batch in box) for box in mail.replies.values()] == [2 * 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"up": -1}, "up has a delay of -1"),
        ({"down": 1.5}, "down has a delay of 1.5"),
        ({"up": [0, -2]}, "up has a delay of -2"),
        ({"down": True}, "down has a delay of True"),
        ({"engine": "Local"}, "engine='Local'"),
        ({"engine": fd.Local}, "must be an engine such as"),
        ({"engine": Delayed(up=1)}, "itself without delays"),
        ({"up": scipy.stats.poisson}, "a distribution with its parameters"),
        ({"seed": -1}, "seed=-1"),
        ({"up": 10**9}, "up has a delay of 1000000000"),
    ],
)
def test_bad_delays(options, message):
    with pytest.raises(fd.ConfigError, match=message):
        Delayed(**options)


def test_bad_delays_for_a_federation():
    with pytest.raises(fd.ConfigError, match="up has 2 delays; the federation has 3 clients"):
        fd.run(Doubler(), federation(), 1, engine=Delayed(up=[1, 2]))
    with pytest.raises(fd.ConfigError, match="down has a delay of"):
        fd.run(Doubler(), federation(), 1, engine=Delayed(down=scipy.stats.norm(0, 1)))


def test_shares_are_of_those_who_arrive():
    """Scaffold's server control moves by the part of the clients whose controls have come."""
    fed = fd.split(fd.load("digits"), "iid", clients=4)
    algorithm = fd.Scaffold(fd.Linear(), lr=0.1, batch_size=16, weights="uniform")
    prompt = fd.run(algorithm, fed, 1, evaluate_every=0)
    late = fd.run(algorithm, fed, 4, engine=Delayed(up=3), evaluate_every=0)
    torch.testing.assert_close(late.state.c["weight"], prompt.state.c["weight"])
    one = fd.run(algorithm, fed, 1, engine=Delayed(up=[0, 3, 3, 3]), evaluate_every=0)
    control = one.clients["states"]["states"]["weight"][0]
    torch.testing.assert_close(one.state.c["weight"], control / 4)


def test_all_rows_in_one_place_are_never_late():
    fed = fd.split(fd.load("digits"), "iid", clients=3)
    algorithm = fd.Central(fd.Linear(), lr=0.1)
    a, b = (
        fd.run(algorithm, fed, 2, engine=engine).history
        for engine in (fd.Local(), Delayed(up=[1, 2, 3]))
    )
    assert a.loss.tolist() == b.loss.tolist()


@dataclass(frozen=True)
class Twice(fd.Algorithm):
    """Asks for the same step twice in a round, with different payloads."""

    def echo(self, client, v):
        return {"v": v}, None

    def start(self, clients):
        return fd.State(log=torch.zeros(0, 2, dtype=torch.float64))

    def round(self, clients, state):
        got = [
            clients.mean(self.echo, v=torch.tensor(float(k * clients.round), dtype=torch.float64))[
                "v"
            ]
            for k in (1, -1)
        ]
        return state.replace(log=torch.cat((state.log, torch.stack(got)[None])))


def test_a_step_asked_for_twice_gets_its_own_broadcasts():
    """In round 1 nothing has arrived, so the second question is first asked in round 2, and first
    answered in round 3.
    """
    log = fd.run(
        Twice(), federation(2), 6, engine=Delayed(up=1, down=2), evaluate_every=0
    ).state.log
    assert log.tolist() == [[1, -2], [1, -2], [2, -2], [3, -3]]


def test_nothing_is_late_before_the_first_round():
    rng = np.random.default_rng(0)
    parts = [
        (rng.normal(size=(n, 2)).astype(np.float32), rng.normal(size=n).astype(np.float32))
        for n in (3, 5)
    ]
    fed = fd.Federation.from_clients(parts)
    late, plain = (
        fd.run(fd.DKRR(fd.Identity()), fed, 0, engine=engine, evaluate_every=0).state.w
        for engine in (Delayed(up=3, down=2), fd.Local())
    )
    assert torch.equal(late, plain)


def test_replies_with_nothing_in_them_are_not_late():
    """Predictors go out in two parts; nothing comes back but the last exchange's gradients, in
    round 3.
    """
    fed = fd.Federation.from_clients(
        [(np.zeros((2, 1), np.float32), np.array([k, 1])) for k in (0, 1)], classes=2
    )
    algorithm = fd.FedBoost(fd.Densities(np.eye(2)), sampling="all", repeats=2, measure_every=0)
    states = [
        fd.run(algorithm, fed, rounds, engine=Delayed(up=2), evaluate_every=0).state
        for rounds in (2, 3)
    ]
    assert [s.rounds for s in states] == [2, 3]
    assert [s.alpha.tolist() == [0.5, 0.5] for s in states] == [True, False]
