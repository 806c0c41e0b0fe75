"""The local engine: batches, padding, client state, keys, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import foedus as fd
from foedus import wire
from foedus.base import random
from foedus.base.spec import Spec
from foedus.engines.batches import Table
from foedus.storage.states import States


def federation(sizes: list[int], seed: int = 0) -> fd.Federation:
    rng = np.random.default_rng(seed)
    return fd.Federation.from_clients(
        [
            (rng.normal(size=(n, 3)).astype(np.float32), rng.normal(size=n).astype(np.float32))
            for n in sizes
        ]
    )


@dataclass(frozen=True)
class Asks(fd.Algorithm):
    """Base for algorithms that ask one thing."""

    def start(self, clients):
        return fd.State(value=torch.zeros(()))


@dataclass(frozen=True)
class MeanTarget(Asks):
    """The mean of all targets, two ways: reading padded rows, and counting real ones."""

    def ask(self, client):
        total = (client.data.weight * client.data.y).sum()
        return {"mean": total / client.data.count, "rows": client.data.count}, None

    def round(self, clients, state):
        got = clients.mean(self.ask)
        return fd.State(value=got["mean"], rows=got["rows"])


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.sampled_from([1, 2000, 1 << 30]),
    st.booleans(),
)
def test_mean_over_any_batching_is_the_mean_over_rows(sizes, memory, batch):
    fed = federation(sizes)
    run = fd.run(
        MeanTarget(), fed, 1, engine=fd.Local(batch=batch, memory=memory), evaluate_every=0
    )
    assert float(run.state.value) == pytest.approx(fed.data.y_train.mean(), abs=1e-5)
    assert float(run.state.rows) == pytest.approx(np.average(sizes, weights=sizes), rel=1e-5)


def test_padding_does_not_count():
    """Clients of 3 and 2 rows in one batch: the smaller one's third place has the weight 0."""
    table = fd.Local().open(MeanTarget(), federation([3, 2]), random.key(0)).train
    rows, weight = table.index(torch.tensor([0, 1]))
    assert weight.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert rows[1, 2] == rows[1, 0]  # its own first row


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 400))
def test_groups_partition_the_clients_within_the_limits(sizes, memory):
    table = Table(
        np.zeros((sum(sizes), 1), np.float32),
        np.zeros(sum(sizes), np.float32),
        np.arange(sum(sizes)),
        np.concatenate(([0], np.cumsum(sizes))),
        np.arange(len(sizes)),
        Spec((1,), None, 1),
    )
    groups = table.groups(torch.arange(len(sizes)), 1.5, lambda rows: max(1, memory // rows))
    assert sorted(torch.cat(groups).tolist()) == list(range(len(sizes)))
    for g in groups:
        n = table.sizes[g]
        assert int(n.max()) <= 1.5 * int(n.min())
        assert len(g) == 1 or len(g) * int(n.max()) <= memory


def test_neighbors_of_equal_size_are_a_view_and_others_a_copy():
    fed = federation([4, 4, 4, 2])
    table = fd.Local().open(MeanTarget(), fed, random.key(0)).train
    x, y = table.stack(torch.tensor([1, 2]))
    assert x.data_ptr() == table.x[4:].data_ptr()
    assert x.shape == (2, 4, 3)
    assert y.shape == (2, 4)
    for apart in ([0, 2], [2, 3]):
        x, _ = table.stack(torch.tensor(apart))
        assert x.data_ptr() != table.x[int(table.starts[apart[0]]) :].data_ptr()
        torch.testing.assert_close(x[1, :2], table.x[int(table.starts[apart[1]]) :][:2])


def test_the_data_is_not_copied():
    fed = federation([3, 5]).select([1, 0])
    session = fd.Local().open(MeanTarget(), fed, random.key(0))
    assert session.train.x.data_ptr() == torch.from_numpy(fed.data.x_train).data_ptr()


@dataclass(frozen=True)
class Remembers(Asks):
    """Each client counts its calls and what it saw first."""

    def init(self, client):
        return {"calls": torch.zeros(()), "first": client.data.y[0]}

    def count(self, client):
        calls = client.state["calls"] + 1
        return {"calls": calls, "first": client.state["first"]}, {**client.state, "calls": calls}

    def round(self, clients, state):
        replies = clients.gather(self.count)
        return fd.State(
            ids=replies.ids, calls=replies.stack()["calls"], first=replies.stack()["first"]
        )


@pytest.mark.parametrize("batch", [True, False])
def test_state_belongs_to_its_client(batch):
    fed = federation([3, 9, 2, 9, 5])
    engine = fd.Local(batch=batch)
    run = fd.run(Remembers(), fed, 6, participation=0.4, engine=engine, evaluate_every=0)
    first = torch.tensor([fed.data.y_train[fed.client_rows(i)[0]] for i in range(5)])
    assert torch.equal(run.state.first, first[run.state.ids])
    states = States(5)
    states.load(run.clients["states"])
    assert sum(float(states.get(i)["calls"]) for i in range(5) if states.get(i)) == 12


def test_states_move_between_stacked_and_separate():
    states = States(4)
    states.put_many(torch.tensor([2, 0]), {"a": torch.tensor([[2.0], [0.0]])})
    assert states.known(torch.arange(4)).tolist() == [True, False, True, False]
    states.put(3, {"a": torch.tensor([3.0])})
    assert states.get_many(torch.tensor([0, 3, 2]))["a"].flatten().tolist() == [0.0, 3.0, 2.0]
    states.put_many(torch.tensor([3, 0]), {"a": torch.tensor([[33.0], [10.0]])})
    assert [float(states.get(p)["a"]) for p in (0, 2, 3)] == [10.0, 2.0, 33.0]
    again = States(4)
    again.load(states.save())
    assert float(again.get(3)["a"]) == 33.0


def test_states_grow_with_the_clients_seen():
    states = States(1_000_000)
    states.put_many(torch.tensor([999_999, 5]), {"a": torch.ones(2, 3)})
    assert sum(t.numel() for t in states.tensors) <= 12


@dataclass(frozen=True)
class Draws(Asks):
    def draw(self, client):
        return {
            "u": random.uniform(client.key, 3),
            "shared": random.uniform(client.shared, 1),
            "id": client.id,
        }, None

    def round(self, clients, state):
        first, second = clients.gather(self.draw), clients.gather(self.draw)
        draws = {
            "first": first.stack()["u"],
            "second": second.stack()["u"],
            "server": random.uniform(clients.shared, 1),
        }
        return fd.State(**draws, shared=first.stack()["shared"], ids=first.stack()["id"])


def test_keys_differ_by_client_exchange_and_round_and_agree_between_engines():
    fed = federation([2, 3, 2, 7])
    one, two = (fd.run(Draws(), fed, r, evaluate_every=0).state for r in (1, 2))
    draws = torch.cat([one.first, one.second, two.first, two.second])
    assert len({tuple(d.tolist()) for d in draws}) == 16
    assert len(set(one.shared.flatten().tolist())) == 1
    looped = fd.run(Draws(), fed, 1, engine=fd.Local(batch=False), evaluate_every=0).state
    assert torch.equal(looped.first, one.first)
    assert looped.ids.tolist() == [0, 1, 2, 3]
    assert torch.equal(one.server, one.shared[0])


@dataclass(frozen=True)
class SendsStructure(Asks):
    kind: str = "sparse"

    def ask(self, client):
        i = client.id.reshape(1)
        if self.kind == "sparse":
            return wire.Sparse(i, 2.0 * torch.ones(1), (6,)), None
        left, right = torch.nn.functional.one_hot(i, 6).float().mT, torch.ones(1, 1)
        return wire.LowRank(left, right), None

    def round(self, clients, state):
        return fd.State(value=clients.mean(self.ask, weights="uniform"))


def test_structured_replies_average_to_dense_and_cost_their_encoded_size():
    fed = federation([2, 2, 4])
    for batch in (True, False):
        run = fd.run(
            SendsStructure("sparse"), fed, 1, engine=fd.Local(batch=batch), evaluate_every=0
        )
        torch.testing.assert_close(run.state.value, torch.tensor([2 / 3, 2 / 3, 2 / 3, 0, 0, 0]))
        message = wire.encode(wire.Sparse(torch.tensor([1]), torch.tensor([2.0]), (6,)))
        assert run.records.last("bytes_up") == 3 * len(message)
        assert run.records.last("bytes_down") == 0
        low = fd.run(
            SendsStructure("lowrank"), fed, 1, engine=fd.Local(batch=batch), evaluate_every=0
        )
        torch.testing.assert_close(
            low.state.value[:, 0], torch.tensor([1 / 3, 1 / 3, 1 / 3, 0, 0, 0])
        )


@dataclass(frozen=True)
class Ragged(Asks):
    """Replies of a different length from each client."""

    @fd.looped
    def ask(self, client):
        return {"rows": client.data.y.sort().values}, None

    def round(self, clients, state):
        replies = clients.gather(self.ask)
        return fd.State(value=torch.cat([r["rows"] for r in replies]), ids=replies.ids)


def test_looped_steps_may_reply_with_any_length():
    fed = federation([3, 1, 4])
    run = fd.run(Ragged(), fed, 1, engine=fd.Local(batch=True), evaluate_every=0)
    expected = np.concatenate([np.sort(fed.data.y_train[fed.client_rows(i)]) for i in range(3)])
    np.testing.assert_array_equal(run.state.value.numpy(), expected)


@dataclass(frozen=True)
class Prepares(Asks):
    made: ClassVar[list] = []

    def prepare(self, data):
        self.made.append(1)
        return {"sum": (data.x * data.weight.unsqueeze(-1)).sum(0)}

    def ask(self, client):
        return client.prepared["sum"], None

    def round(self, clients, state):
        return fd.State(value=clients.mean(self.ask, weights="uniform"))


@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_prepare_is_done_once(batch, participation):
    fed = federation([3, 3, 8, 8])
    Prepares.made.clear()
    run = fd.run(
        Prepares(),
        fed,
        5,
        engine=fd.Local(batch=batch),
        participation=participation,
        evaluate_every=0,
    )
    assert len(Prepares.made) <= 4
    if participation == 1.0:
        torch.testing.assert_close(
            run.state.value, torch.from_numpy(fed.data.x_train.sum(0)) / 4, rtol=1e-4, atol=1e-5
        )


@dataclass(frozen=True)
class Breaks(Asks):
    how: str = "nan"

    def ask(self, client):
        bad = client.id == 2
        return {
            "v": torch.where(bad, float("nan") if self.how == "nan" else float("inf"), 1.0)
        }, None

    def round(self, clients, state):
        return fd.State(value=clients.mean(self.ask)["v"])


@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("how", ["nan", "inf"])
def test_a_reply_that_is_not_finite_names_round_and_client(batch, how):
    with pytest.raises(
        fd.DivergenceError, match=r"round 1: the reply of client 2 is not finite"
    ) as error:
        fd.run(
            Breaks(how), federation([2, 2, 5, 2]), 3, engine=fd.Local(batch=batch), evaluate_every=0
        )
    assert (error.value.round, error.value.clients) == (1, (2,))


@dataclass(frozen=True)
class Forgetful(Asks):
    def ask(self, client):
        return torch.ones(())

    def round(self, clients, state):
        return fd.State(value=clients.mean(self.ask))


@dataclass(frozen=True)
class NoInit(Asks):
    def ask(self, client):
        return torch.ones(()), torch.ones(())

    def round(self, clients, state):
        return fd.State(value=clients.mean(self.ask))


def test_steps_that_break_the_contract_raise_errors():
    with pytest.raises(fd.ReplyError, match=r"must return \(reply, new client state\)"):
        fd.run(Forgetful(), federation([2]), 1)
    with pytest.raises(fd.ReplyError, match="NoInit has no init"):
        fd.run(NoInit(), federation([2]), 1)


def test_quantized_replies_are_charged_as_sent_and_stay_unbiased(fed):
    plain = fd.run(fd.FedAvg(lr=0.1), fed, 3)
    for kind, width in (("float16", 2), ("bfloat16", 2), ("int8", 1)):
        small = fd.run(fd.FedAvg(lr=0.1), fed, 3, quantise=kind)
        assert small.records.last("bytes_up") == pytest.approx(
            plain.records.last("bytes_up") * width / 4, rel=0.06
        )
        assert small.records.last("bytes_down") == plain.records.last("bytes_down")
        assert small.records.last("loss") == pytest.approx(plain.records.last("loss"), rel=0.02)


@pytest.mark.parametrize(
    ("make", "message"),
    [(lambda: fd.Local(batch="yes"), "batch='yes'"), (lambda: fd.Local(memory=0), "memory=0")],
)
def test_bad_engine_settings(make, message):
    with pytest.raises(fd.ConfigError, match=message):
        make()


def test_many_clients_are_not_many_python_objects():
    """100,000 clients that do nothing: one round is a handful of tensor operations."""
    fed = fd.split(
        fd.Data.from_arrays(np.zeros((100_000, 1), np.float32), np.zeros(100_000, np.float32)),
        "iid",
        clients=100_000,
    )
    run = fd.run(MeanTarget(), fed, 2, participation=0.5, evaluate_every=0)
    assert float(run.state.rows) == pytest.approx(1.0, rel=1e-6)
    assert run.records.last("messages_up") == 100_000


@dataclass(frozen=True)
class Wide(Asks):
    def ask(self, client):
        return torch.full((50,), 0.1), None

    def round(self, clients, state):
        return fd.State(value=clients.mean(self.ask))


def test_the_mean_over_many_clients_keeps_its_digits():
    """20,000 equal replies: a plain sum in single precision would be off in the fourth digit."""
    fed = fd.split(
        fd.Data.from_arrays(np.zeros((20_000, 1), np.float32), np.zeros(20_000, np.float32)),
        "iid",
        clients=20_000,
    )
    value = fd.run(Wide(), fed, 1, evaluate_every=0).state.value
    torch.testing.assert_close(value, torch.full((50,), 0.1), rtol=1e-6, atol=0)


def test_large_models_are_trained_a_client_a_core(digits):
    """Several threads of one core each give what one gives, to the bit, and leave the number of
    threads as it was.
    """
    fed = fd.split(
        fd.Data.from_arrays(digits.x_train[:200], digits.y_train[:200], classes=10),
        "dirichlet",
        clients=7,
        alpha=0.5,
    )
    algorithm = fd.Scaffold(fd.CNN((2,), kernel=3, hidden=(8,)), lr=0.05, batch_size=8)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = fd.run(algorithm, fed, 3, participation=0.7, evaluate_every=0)
        torch.set_num_threads(3)
        three = fd.run(algorithm, fed, 3, participation=0.7, evaluate_every=0)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    for k, v in one.state.w.items():
        assert torch.equal(v, three.state.w[k])
    assert torch.equal(one.clients["states"]["slot"], three.clients["states"]["slot"])


@dataclass(frozen=True)
class Fails(fd.FedAvg):
    def batching(self):
        return replace(super().batching(), pays=False)

    def train(self, client, w):
        if int(client.id) == 2:
            raise RuntimeError("no more")
        return super().train(client, w)


def test_an_error_in_a_worker_is_raised_and_the_threads_are_restored(fed):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(RuntimeError, match="no more"):
            fd.run(Fails(lr=0.1), fed, 1, evaluate_every=0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("options", [{"batch_size": None}, {"steps": 300}, {"epochs": 20}])
def test_one_large_client_does_not_blow_up_the_batch_of_the_small_ones(options):
    """Everything that is padded to the largest client stays within the budget, whatever the
    settings.
    """
    fed = federation([5] * 200 + [2000])
    session = fd.Local(memory=64 << 20).open(fd.FedAvg(**options), fed, random.key(0))
    algorithm = session.algorithm
    for group in session._groups(torch.arange(201), 0):
        n = int(session.train.sizes[group.positions].max())
        least = int(session.train.sizes[group.positions].min())
        passes = algorithm.steps * 32 / least if algorithm.steps else algorithm.epochs
        padded = (
            len(group.positions)
            * n
            * (16 * passes + (session.train.row_bytes if algorithm.batch_size is None else 0))
        )
        assert len(group.positions) == 1 or padded <= 64 << 20


@dataclass(frozen=True)
class Echo(fd.Algorithm):
    """The reply is the state itself."""

    def init(self, client):
        return {"x": torch.zeros(2)}

    def count(self, client):
        new = client.state["x"] + 1
        return {"x": new}, {"x": new}

    def tell(self, client):
        return {"x": client.state["x"]}, None

    def start(self, clients):
        return fd.State()

    def round(self, clients, state):
        first, told = (clients.gather(step).stack()["x"] for step in (self.count, self.tell))
        before = first.clone()
        for part in (0, 1):
            clients.some(torch.arange(len(clients)) % 2 == part).gather(self.count)
        assert torch.equal(first, before) and torch.equal(told, before)
        return state


@pytest.mark.parametrize("batch", [True, False])
def test_a_reply_stays_what_it_was_when_the_state_goes_on(batch, fed):
    fd.run(Echo(), fed, 3, engine=fd.Local(batch=batch), evaluate_every=0)


@dataclass(frozen=True)
class AveragedByVmap(fd.FedAvg):
    """The same step, one client as `vmap` shows it."""

    def train(self, client, w):
        assert client.id.dim() == 0
        return super().train(client, w)


@dataclass(frozen=True)
class NearByVmap(fd.FedProx):
    def train(self, client, w):
        assert client.id.dim() == 0
        return super().train(client, w)


@pytest.mark.parametrize(
    "options",
    [{}, {"steps": 3}, {"batch_size": None}, {"optimizer": "adam", "epochs": 2}, {"momentum": 0.5}],
)
@pytest.mark.parametrize(
    ("at_once", "by_vmap"), [(fd.FedAvg, AveragedByVmap), (fd.FedProx, NearByVmap)]
)
@pytest.mark.parametrize("sizes", [[20] * 7, [1, 2, 40, 7, 13]])
@pytest.mark.parametrize("model", [fd.Linear(zero_start=False), fd.MLP(4)])
def test_a_step_that_takes_a_batch_at_once_finds_what_vmap_finds(
    at_once, by_vmap, sizes, model, options
):
    options = {"lr": 0.05, "batch_size": 8} | options
    one, other = (
        fd.run(kind(model, **options), federation(sizes), 2) for kind in (at_once, by_vmap)
    )
    assert all(
        torch.equal(a, b) for a, b in zip(one.state.w.values(), other.state.w.values(), strict=True)
    )
    assert one.history.bytes_up.tolist() == other.history.bytes_up.tolist()


def test_a_batch_comes_at_once_only_where_the_step_says_so():
    shapes = []

    @dataclass(frozen=True)
    class Noted(fd.FedAvg):
        @fd.stacked
        def train(self, client, w):
            shapes.append(tuple(client.data.index.shape))
            return super().train(client, w)

    fed = federation([20] * 3)
    fd.run(Noted(lr=0.1), fed, 1)
    # each reply is rounded with its own client's key
    fd.run(Noted(lr=0.1), fed, 1, quantise="int8")
    fd.run(Noted(lr=0.1), fed, 1, engine=fd.Local(batch=False))
    assert shapes == [(3, 20), (20,), (20,), (20,), (20,)]


@dataclass(frozen=True)
class Pulled(fd.FedAvg):
    """With a correction that is the same for all clients."""

    @fd.stacked
    def train(self, client, w):
        moved = self.descend(
            client, w, correction={k: 0.3 * torch.ones_like(v) for k, v in w.items()}
        )["params"]
        return {k: moved[k] - w[k] for k in w}, None


@dataclass(frozen=True)
class PulledByVmap(Pulled):
    def train(self, client, w):
        return super().train(client, w)


@pytest.mark.parametrize("sizes", [[20], [20] * 4, [40, 33, 7], [1, 2, 40, 7, 13]])
def test_a_correction_may_be_shared_by_a_batch(sizes):
    one, other = (
        fd.run(kind(fd.MLP(4), lr=0.05, batch_size=8), federation(sizes), 2)
        for kind in (Pulled, PulledByVmap)
    )
    assert all(
        torch.equal(a, b) for a, b in zip(one.state.w.values(), other.state.w.values(), strict=True)
    )


def test_a_batch_at_once_must_send_a_reply_for_each():
    @dataclass(frozen=True)
    class Forgets(fd.FedAvg):
        @fd.stacked
        def train(self, client, w):
            return w, None

    with pytest.raises(
        fd.ReplyError, match="a stacked client step was asked for 3 replies at once"
    ):
        fd.run(Forgets(), federation([5] * 3), 1)


def test_a_batch_at_once_has_no_memory():
    @dataclass(frozen=True)
    class Remembers(fd.FedAvg):
        @fd.stacked
        def train(self, client, w):
            return self.descend(client, w, memory={"velocity": w})["params"], None

    with pytest.raises(TypeError, match="a stacked step cannot keep memory"):
        fd.run(Remembers(momentum=0.5), federation([5] * 3), 1)


def test_states_that_were_given_away_do_not_change():
    """All of them, in order, are no copy; one that is written afterwards must not show in what
    somebody else holds.
    """
    states = States(3)
    states.put_many(torch.arange(3), {"a": torch.tensor([1.0, 2.0, 3.0])})
    held = states.get_many(torch.arange(3))["a"]
    states.put_many(torch.tensor([1]), {"a": torch.tensor([7.0])})
    assert held.tolist() == [1, 2, 3] and states.get_many(torch.arange(3))["a"].tolist() == [
        1,
        7,
        3,
    ]


def test_states_of_another_number_of_clients_are_refused():
    saved = States(2)
    saved.put_many(torch.arange(2), {"a": torch.zeros(2)})
    with pytest.raises(fd.CheckpointError, match="the checkpoint has 2 clients, the federation 3"):
        States(3).load(saved.save())


@dataclass(frozen=True)
class Constant(Asks):
    def tell(self, client):
        return {"a": torch.tensor([0.3, 1.0])}, None

    def round(self, clients, state):
        return fd.State(mean=clients.mean(self.tell)["a"])


def test_clients_round_independently():
    """int8 codes of 0.3 are 38 or 39 with the mean 38.1: over 400 clients, the mean of codes has a
    deviation of 0.3 / 20.
    """
    run = fd.run(Constant(), federation([1] * 400), 1, quantise="int8", evaluate_every=0)
    assert float(run.state.mean[0]) * 127 == pytest.approx(38.1, abs=0.06)


class Lossy:
    """An engine that loses the replies of client 1."""

    def open(self, algorithm, fed, seed_key):
        session = fd.Local().open(algorithm, fed, seed_key)
        whole = session.exchange

        def exchange(ask):
            for ids, reply, stacked in whole(ask):
                here = ids != 1
                yield ids[here], {k: v[here] for k, v in reply.items()}, stacked

        session.exchange = exchange
        return session


def test_replies_that_are_missing_are_an_error():
    with pytest.raises(fd.ReplyError, match="round 1: 2 of 3 clients replied to tell"):
        fd.run(Constant(), federation([4, 4, 4]), 1, engine=Lossy(), evaluate_every=0)


@dataclass(frozen=True)
class Keeps(Asks):
    """Clients keep a number that they drew before their first step."""

    def init(self, client):
        return {"a": random.uniform(client.key, ())}

    def tell(self, client):
        return {"a": client.state["a"]}, client.state

    def round(self, clients, state):
        return fd.State(all=clients.gather(self.tell).stack()["a"])


def test_first_states_draw_from_keys_of_their_own():
    """By the number that is told apart from those of rounds, and the client's id; batched or
    not.
    """
    key = random.fold(random.key(0), 0xFFFFFFFD, torch.arange(3))
    for batch in (True, False):
        run = fd.run(
            Keeps(), federation([2, 2, 2]), 1, engine=fd.Local(batch=batch), evaluate_every=0
        )
        assert (
            torch.equal(run.state.all, random.uniform(key, ()))
            and len(set(run.state.all.tolist())) == 3
        )


@dataclass(frozen=True)
class Parted(Asks):
    """The last two clients are asked apart from the others."""

    def tell(self, client):
        return {"a": client.id.float()}, None

    def round(self, clients, state):
        return fd.State(mean=clients.some(clients.ids > 0).mean(self.tell)["a"])


def test_some_of_the_clients_have_their_own_rows():
    """Clients 1 and 2 have 2 and 6 rows: (1 * 2 + 2 * 6) / 8."""
    run = fd.run(Parted(), federation([4, 2, 6]), 1, evaluate_every=0)
    assert float(run.state.mean) == pytest.approx(1.75)
