"""Under differential privacy nothing that is published depends on who was drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import foedus as fd
from foedus import wire
from foedus.aggregation.dp import mechanism as dp
from foedus.base import tree
from foedus.storage import checkpoint

PRIVATE = fd.DifferentialPrivacy(clip=1.0, noise=1.0, delta=1e-4, accountant="rdp")
Q = 0.37
EVERYBODY = {"few": [3], "none": [], "many": [0, 1, 2, 4], "others": [1, 3]}


@dataclass(frozen=True)
class Ragged(fd.Algorithm):
    """Replies are as long as a client's rows are many, and of two exchanges."""

    def start(self, clients):
        return fd.State(w=torch.zeros(3))

    def round(self, clients, state):
        got = clients.mean(self.sparse, w=state.w)
        return state.replace(w=state.w + got["d"] + clients.sum(self.other)["x"])

    @fd.client_step(batch="loop")
    def sparse(self, client, w):
        n = min(3, len(client.data.y))  # the message of a client with more rows is longer
        return {"d": wire.Sparse(torch.arange(n, dtype=torch.int32), torch.ones(n), (3,))}, None

    def other(self, client):
        return {"x": torch.ones(3)}, None

    def predictor(self, state):
        return None


ALGORITHMS = {
    "FedAvg": fd.FedAvg(fd.Linear(), lr=0.1, batch_size=16),
    "Scaffold": fd.Scaffold(fd.Linear(), lr=0.1, batch_size=16),
    "FedFW, a held value": fd.FedFW(fd.Linear(), fd.L2Ball(5.0), measure_every=0),
    "replies of different lengths": Ragged(),
}


@pytest.fixture
def drawn(monkeypatch):
    """Runs with the cohort that a test names, and with the noise of a seed."""

    def run(algorithm, fed, who, rounds=3, **options):
        generator = np.random.default_rng(0)
        monkeypatch.setattr(
            dp.sampling, "bernoulli",
            lambda p, size, entropy: np.isin(np.arange(size), who) | (p == 1),
        )  # fmt: skip
        private = replace(PRIVATE, entropy=generator.bytes)
        options = {"participation": fd.Poisson(Q), "aggregation": private, **options}
        return fd.run(algorithm, fed, rounds, **options)

    return run


def uneven(fed) -> fd.Federation:
    """Clients with one, two and many rows."""
    cut = [np.arange(n) for n in (1, 2, 40, 1, 40)]
    x, y = fed.data.x_train, fed.data.y_train
    clients = [(x[i], y[i]) for i in cut]
    return fd.Federation.from_clients(clients, classes=10)


@pytest.mark.parametrize("quantise", [None, "int8"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_byte_columns_are_the_same_whoever_was_drawn(name, quantise, fed, drawn):
    fed = uneven(fed) if name == "replies of different lengths" else fed
    told: dict[str, list] = {}

    class Told(fd.Callback):
        def row(self, row):
            told.setdefault(who, []).append({k: row[k] for k in sorted(row) if k in counted})

    counted = ("bytes_up", "bytes_down", "messages_up", "clients", "epsilon", "dropped", "left_out")
    runs = {}
    for who, ids in EVERYBODY.items():
        options = {"quantise": quantise, "callbacks": [Told()]}
        runs[who] = drawn(ALGORITHMS[name], fed, ids, **options)
    rows = [[{k: v for k, v in r.items() if k in counted} for r in run.records.rows]
            for run in runs.values()]  # fmt: skip
    assert all(found == rows[0] for found in rows) and rows[0][-1]["bytes_up"] > 0
    assert all(found == told["few"] for found in told.values())
    assert len({tuple(run.records.columns) for run in runs.values()}) == 1


def test_they_are_those_of_the_expected_number(fed, drawn):
    """5 clients, q = 0.37: 1.85 of them, who get a model and send one."""
    run = drawn(ALGORITHMS["FedAvg"], fed, [0, 1, 2, 3, 4], rounds=4)
    each = wire.nbytes(tree.map(torch.zeros_like, dict(run.state.w)))
    alone = fd.run(ALGORITHMS["FedAvg"], fed, 1).records.rows[1]
    up, down = alone["bytes_up"] // 5, alone["bytes_down"] // 5
    assert up == each
    assert run.history.bytes_up.tolist() == [n * round(5 * Q * up) for n in range(5)]
    assert run.history.bytes_down.tolist() == [n * round(5 * Q * down) for n in range(5)]
    assert run.history.messages_up.tolist() == [0, 2, 4, 6, 8]


def test_everybody_in_every_round_is_counted_as_it_is(fed):
    run = fd.run(ALGORITHMS["FedAvg"], fed, 2, aggregation=PRIVATE)
    plain = fd.run(ALGORITHMS["FedAvg"], fed, 2)
    for column in ("bytes_up", "bytes_down", "messages_up"):
        assert run.history[column].tolist() == plain.history[column].tolist()


def test_nobody_who_fails_to_reply_is_named(fed, drawn):
    """Whoever is left out was asked: an untrusted engine's history must not say so."""
    engine = fd.Hostile(fd.Local(), clients=[1, 3], attack="nan")
    runs = [
        drawn(ALGORITHMS["FedAvg"], fed, ids, engine=engine) for ids in ([0, 2], [1, 2], [1, 3])
    ]
    for run in runs:
        assert "left_out" not in run.records.columns and "dropped" not in run.records.columns
    columns = ["bytes_up", "bytes_down", "messages_up", "clients"]
    assert all(run.history[columns].equals(runs[0].history[columns]) for run in runs)


def test_an_error_does_not_name_who_was_drawn(fed, drawn):
    @dataclass(frozen=True)
    class Broken(fd.FedAvg):
        def train(self, client, **payload):
            reply, state = super().train(client, **payload)
            return tree.map(lambda t: t * math.nan, reply), state

    with pytest.raises(fd.DivergenceError, match="of a client that is not named") as info:
        drawn(Broken(fd.Linear()), fed, [2, 4])
    assert not info.value.clients


def test_a_checkpoint_does_not_keep_who_was_sent_what(fed, drawn, tmp_path):
    kept = []
    for who in ([0], [1, 2]):
        path = tmp_path / f"{who[0]}.safetensors"
        drawn(ALGORITHMS["FedFW, a held value"], fed, who, checkpoint=path)
        kept.append(checkpoint.read(path)[0]["holdings"])
    assert set(kept[0]) == set(kept[1])
    for name in kept[0]:
        assert torch.equal(kept[0][name], kept[1][name])


def test_the_loss_is_that_of_the_test_rows(fed, drawn):
    """With the same released numbers it is the same, whoever was drawn: here nothing is learned."""
    still = fd.FedAvg(fd.Linear(), lr=1e-30)
    losses = [drawn(still, fed, ids).history.loss.tolist() for ids in EVERYBODY.values()]
    assert all(found == losses[0] for found in losses) and not math.isnan(losses[0][-1])
