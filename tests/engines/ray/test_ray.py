"""Ray: the numbers of `Local` on other processes, workers that are lost, states that do not fit,
and what is refused.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import foedus as fd
from foedus import testing, wire
from foedus.base import random, tree
from foedus.core import exchange as core
from foedus.engines.ray import cluster, shards
from foedus.engines.ray import engine as engine_module
from foedus.storage.spill import _Place
from foedus.storage.states import States
from tests.conformance import Everything

pytest.importorskip("ray")

FEDAVG = fd.FedAvg(fd.Linear(), lr=0.1, batch_size=16)
SCAFFOLD = fd.Scaffold(fd.Linear(), lr=0.1, batch_size=16)


@pytest.fixture
def many(digits) -> fd.Federation:
    """Twelve clients, listed backwards and with ids that are no positions."""
    fed = fd.split(digits, "dirichlet", clients=12, alpha=0.3, seed=1)
    return replace(fed.select(np.arange(12)[::-1].copy()), ids=100 + 3 * np.arange(12)[::-1])


def close(a: fd.Run, b: fd.Run, tolerance: float = 1e-6) -> None:
    """Two runs end alike: the server's state, every client's state, and the history but for the
    clock.
    """
    for x, y in zip(tree.leaves(a.state), tree.leaves(b.state), strict=True):
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)
    x, y = (r.history.drop(columns="seconds") for r in (a, b))
    assert list(x) == list(y)
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)
    for name in ("bytes_up", "bytes_down", "messages_up", "clients"):
        assert x[name].tolist() == y[name].tolist()
    for p, q in zip(*(client_states(r) for r in (a, b)), strict=True):
        assert (p is None) == (q is None)
        for u, v in zip(tree.leaves(p), tree.leaves(q), strict=True):
            torch.testing.assert_close(u, v, rtol=tolerance, atol=tolerance)


def client_states(run: fd.Run) -> list[Any]:
    states = States(len(run.clients["ids"]))
    states.load(run.clients["states"])
    return [states.get(p) for p in range(len(run.clients["ids"]))]


# -- the numbers of Local --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm",
    [
        FEDAVG,
        SCAFFOLD,
        fd.FedFW(fd.Linear(), fd.LInfBall(0.1)),
        fd.Independent(fd.Linear(), lr=0.1, batch_size=16),
        Everything(),
    ],
    ids=lambda a: type(a).__name__,
)
@pytest.mark.parametrize("options", [{}, {"participation": 0.4}, {"quantise": "int8"}], ids=str)
def test_histories_states_and_bytes_are_those_of_local(algorithm, options, many, ray_engine):
    local = fd.run(algorithm, many, 10, **options)
    # A weight that is rounded the other way in int8 differs by more than rounding does.
    close(
        local,
        fd.run(algorithm, many, 10, engine=ray_engine, **options),
        2e-2 if "quantise" in options else 1e-6,
    )


@dataclass(frozen=True)
class OneByOne(fd.FedAvg):
    """Clients go one after the other, so that nothing depends on who is in a batch with whom."""

    def batching(self):
        return replace(super().batching(), pays=False)

    dtype: ClassVar[torch.dtype] = torch.float32

    def train(self, client, w):
        change, state = super().train(client, w)
        return tree.map(lambda t: t.to(self.dtype), change), state

    def round(self, clients, state):
        move = tree.map(torch.Tensor.float, clients.mean(self.train, w=state.w))
        return state.replace(w=tree.add(state.w, move))


@dataclass(frozen=True)
class OneByOneDouble(OneByOne):
    dtype: ClassVar[torch.dtype] = torch.float64


@pytest.mark.parametrize("kind", [OneByOne, OneByOneDouble])
def test_sums_over_workers_are_those_of_one_process_to_the_last_bit(kind, many, ray_engine):
    algorithm = kind(fd.Linear(), lr=0.1, batch_size=16)
    testing._same(
        fd.run(algorithm, many, 5),
        fd.run(algorithm, many, 5, engine=ray_engine),
        "Local and Ray differ",
    )


@pytest.mark.parametrize("algorithm", [SCAFFOLD, Everything()], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("first", ["local", "ray"])
def test_a_checkpoint_of_one_engine_is_resumed_on_the_other(
    algorithm, first, many, ray_engine, tmp_path
):
    engines = [fd.Local(), ray_engine] if first == "local" else [ray_engine, fd.Local()]
    options = {"participation": 0.4, "checkpoint": tmp_path / "run.safetensors"}
    fd.run(algorithm, many, 3, engine=engines[0], **options)
    resumed = fd.run(algorithm, many, 6, engine=engines[1], resume=True, **options)
    close(fd.run(algorithm, many, 6, participation=0.4), resumed)


def test_models_of_clients_and_their_scores(many, ray_engine):
    algorithm = fd.Independent(fd.Linear(), lr=0.1, batch_size=16)
    local, far = (fd.run(algorithm, many, 3, engine=e) for e in (fd.Local(), ray_engine))
    np.testing.assert_allclose(local.per_client(), far.per_client(), rtol=1e-6)
    asked = {"metrics": ["auc", "brier"], "per_client": True}
    local, far = (fd.run(algorithm, many, 3, engine=e, **asked) for e in (fd.Local(), ray_engine))
    np.testing.assert_allclose(local.per_client(round=2), far.per_client(round=2), rtol=1e-5)
    for name in ("own_auc", "own_brier_worst", "own_auc_worst_client"):
        np.testing.assert_allclose(local.history[name], far.history[name], rtol=1e-5)
    x = many.data.x_test
    np.testing.assert_allclose(
        local.model_of(103).outputs(x), far.model_of(103).outputs(x), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    "algorithm",
    [
        fd.FedRes(step=0.05),
        SCAFFOLD,
        fd.FedAvg(lr=fd.schedules.Step(0.1, every=1, factor=0.8), batch_size=16),
    ],
    ids=lambda a: type(a).__name__,
)
def test_delays(algorithm, many, ray_engine, tmp_path):
    delayed = lambda engine: fd.Delayed(engine, up=list(range(12)), down=[2, 0, 1] * 4)  # noqa: E731
    local = fd.run(algorithm, many, 16, engine=delayed(fd.Local()))
    close(local, fd.run(algorithm, many, 16, engine=delayed(ray_engine)))
    path = tmp_path / "late.safetensors"
    fd.run(algorithm, many, 7, engine=delayed(ray_engine), checkpoint=path)
    close(
        local, fd.run(algorithm, many, 16, engine=delayed(ray_engine), checkpoint=path, resume=True)
    )
    with pytest.raises(fd.CheckpointError, match="on their way"):
        fd.run(algorithm, many, 20, engine=ray_engine, checkpoint=path, resume=True)


def test_a_worker_adds_up_before_it_sends(many, ray_engine):
    """Of a mean, one sum a worker comes back, however many clients it has; and what they would have
    sent is charged.
    """
    session = ray_engine.open(FEDAVG, many, random.key(0))
    try:
        ask = core.Ask(
            "train",
            {"w": FEDAVG.model.init(many.spec, random.key(1))},
            session.ids,
            random.key(0),
            1,
            0,
        )
        calls = session._asked(ask, "reduce", torch.full((12,), 1 / 12, dtype=torch.float64))
        answers = session._all(calls)
    finally:
        session.close()
    assert len(calls) == 2
    one = wire.nbytes(ask.payload["w"])
    assert [a.clients for a in answers] == [len(s) for s in shards.cut(many, 2)]
    assert [a.sent.bytes_up for a in answers] == [a.clients * one for a in answers]
    assert [a.sent.messages_up for a in answers] == [a.clients for a in answers]
    assert all(
        a.total.total["weight"].shape == (10, 64) and a.total.total["weight"].dtype == np.float64
        for a in answers
    )


# -- who gets what ---------------------------------------------------------------------------------


def sized(sizes: list[int]) -> fd.Federation:
    data = fd.Data.from_arrays(
        np.arange(sum(sizes), dtype=np.float32)[:, None], np.zeros(sum(sizes), np.float32)
    )
    owner = np.repeat(np.arange(len(sizes)), sizes)
    return fd.Federation.from_owners(
        data, owner, np.zeros(0, np.int64), np.arange(len(sizes)), "by hand", {}
    )


@pytest.mark.parametrize(
    ("sizes", "parts", "expected"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([9, 1, 1, 1, 1, 1], 2, [1, 5]),
        ([1, 1, 1, 1, 1, 9], 2, [5, 1]),
        ([100, 1, 1], 3, [1, 1, 1]),
        ([1, 1, 100], 3, [1, 1, 1]),
        ([1, 100, 1, 1, 1], 4, [1, 1, 1, 2]),
        ([5, 5], 4, [1, 1]),
        ([2, 4, 2, 3, 5], 2, [3, 2]),
        ([7], 3, [1]),
    ],
)
def test_clients_are_cut_by_rows(sizes, parts, expected):
    assert [len(p) for p in shards.cut(sized(sizes), parts)] == expected


def test_a_worker_gets_the_rows_of_its_clients_only(many):
    parts = [shards.part_of(many, p) for p in shards.cut(many, 3)]
    assert np.concatenate([p.ids for p in parts]).tolist() == sorted(many.ids)
    assert sum(len(p.data.x_train) for p in parts) == len(many.rows)
    for part in parts:
        for k, i in enumerate(part.ids):
            [at] = np.flatnonzero(many.ids == i)
            assert np.array_equal(
                part.data.x_train[part.client_rows(k)], many.data.x_train[many.client_rows(at)]
            )
            assert np.array_equal(
                part.data.y_test[part.test_client_rows(k)],
                many.data.y_test[many.test_client_rows(at)],
            )


def test_states_are_split_and_joined():
    whole = {
        "slot": torch.tensor([2, -1, 0, 1, -1, 3]),
        "states": {"x": torch.arange(8.0).view(4, 2)},
    }
    parts = shards.split_states(whole, [2, 1, 3])
    assert [p["slot"].tolist() for p in parts] == [[0, -1], [0], [0, -1, 1]]
    assert [p["states"]["x"][:, 0].tolist() for p in parts] == [[4.0], [0.0], [2.0, 6.0]]
    again = shards.join_states(parts)
    states = [States(6), States(6)]
    for s, saved in zip(states, (whole, again), strict=True):
        s.load(saved)
    for p in range(6):
        a, b = (s.get(p) for s in states)
        assert (a is None and b is None) or torch.equal(a["x"], b["x"])
    # One part with trees of their own makes all of them such.
    mixed = shards.join_states(
        [parts[0], {"slot": torch.tensor([0]), "separate": {"0": {"x": torch.ones(3)}}}]
    )
    assert set(mixed["separate"]) == {"0", "2"}
    assert mixed["slot"].tolist() == [0, -1, 1]
    assert shards.join_states(shards.split_states(mixed, [1, 2]))["separate"]["2"][
        "x"
    ].tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(fd.CheckpointError, match="6 clients, the federation 5"):
        shards.split_states(whole, [2, 3])


def test_trees_travel_unharmed():
    sent = {
        "bf": torch.randn(3, 2).bfloat16(),
        "turned": torch.arange(6).view(2, 3).T,
        "number": torch.tensor(1.5, dtype=torch.float64),
        "none": [None, "text", 3],
        "signs": wire.Signs.pack(torch.tensor([1.0, -1.0]), 2.0),
    }
    got = shards.unpack(shards.pack(sent))
    for a, b in zip(tree.leaves(sent), tree.leaves(got), strict=True):
        assert (a.dtype == b.dtype and torch.equal(a, b)) if isinstance(a, torch.Tensor) else a == b
    got["number"].add_(1)  # its own memory
    assert sent["number"] == 1.5


# -- workers that are lost -------------------------------------------------------------------------


def burn(fuse: str) -> None:
    """In a worker: whoever finds the fuse armed says who it is, and works until it is killed."""
    if not fuse:
        return
    try:
        os.rename(f"{fuse}/armed", f"{fuse}/taken")
    except FileNotFoundError:
        return
    Path(f"{fuse}/taken").write_text(str(os.getpid()))
    os.rename(f"{fuse}/taken", f"{fuse}/pid")
    time.sleep(120)


def arm(fuse: str, rounds: tuple[int, ...], now: int) -> None:
    if fuse and now in rounds:
        Path(f"{fuse}/armed").touch()


@dataclass(frozen=True)
class FragileFedAvg(fd.FedAvg):
    fuse: str = ""
    rounds: tuple[int, ...] = ()

    def train(self, client, w):
        burn(self.fuse)
        return super().train(client, w)

    def round(self, clients, state):
        arm(self.fuse, self.rounds, clients.round)
        return super().round(clients, state)


@dataclass(frozen=True)
class FragileScaffold(fd.Scaffold):
    fuse: str = ""
    rounds: tuple[int, ...] = ()

    def train(self, client, x, c):
        found = super().train(client, x, c)
        burn(self.fuse)
        return found

    def round(self, clients, state):
        arm(self.fuse, self.rounds, clients.round)
        return super().round(clients, state)


@dataclass(frozen=True)
class FragileFedFW(fd.FedFW):
    fuse: str = ""
    rounds: tuple[int, ...] = ()

    def follow(self, client, **payload):
        burn(self.fuse)
        return super().follow(client, **payload)

    def step(self, client, *args, **payload):
        burn(self.fuse)
        return super().step(client, *args, **payload)

    def round(self, clients, state):
        arm(self.fuse, self.rounds, clients.round)
        return super().round(clients, state)


@dataclass(frozen=True)
class FragileLoop(FragileScaffold):
    """Gathered, one client after the other: a worker is lost at its last client, with other replies
    sent.
    """

    def batching(self):
        return replace(super().batching(), pays=False)

    def train(self, client, x, c):
        return (
            super().train(client, x, c)
            if int(client.id) == 133
            else fd.Scaffold.train(self, client, x, c)
        )

    def round(self, clients, state):
        arm(self.fuse, self.rounds, clients.round)
        replies = clients.gather(self.train, x=state.w, c=state.c)
        return state.replace(
            w=tree.add(state.w, tree.map(lambda *d: sum(d) / len(d), *(r["move"] for r in replies)))
        )


@dataclass(frozen=True)
class FragileEverything(Everything):
    fuse: str = ""
    rounds: tuple[int, ...] = ()

    def move(self, client, to, big):
        burn(self.fuse)
        return super().move(client, to, big)

    def round(self, clients, state):
        arm(self.fuse, self.rounds, clients.round)
        return super().round(clients, state)


class Killer(threading.Thread):
    """Kills every worker that has taken the fuse."""

    def __init__(self, fuse: Path):
        super().__init__(daemon=True)
        self.fuse, self.killed, self.done = fuse, [], threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.01):
            file = self.fuse / "pid"
            if file.exists():
                self.killed.append(int(file.read_text()))
                file.unlink()
                os.kill(self.killed[-1], signal.SIGKILL)

    def __enter__(self) -> Killer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.join()


LINEAR = {"model": fd.Linear(), "lr": 0.1, "batch_size": 16}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "participation", "copy_every"),
    [
        pytest.param(FragileFedAvg(**LINEAR), 1.0, 8, id="stateless"),
        pytest.param(FragileScaffold(**LINEAR), 0.5, 8, id="Scaffold"),
        pytest.param(FragileScaffold(**LINEAR), 0.5, 1, id="Scaffold, copied always"),
        pytest.param(FragileFedFW(fd.Linear(), fd.L2Ball(5.0)), 1.0, 3, id="FedFW"),
        pytest.param(
            FragileLoop(fd.MLP(600), lr=0.1, batch_size=16), 1.0, 4, id="gathered one by one"
        ),
        pytest.param(FragileEverything(), 0.5, 4, id="personal"),
    ],
)
def test_a_worker_killed_at_work_changes_nothing(
    algorithm, participation, copy_every, many, ray_engine, tmp_path, monkeypatch
):
    monkeypatch.setattr(engine_module, "COPY_EVERY", copy_every)
    undisturbed = fd.run(algorithm, many, 12, engine=ray_engine, participation=participation)
    with Killer(tmp_path) as killer:
        fragile = replace(algorithm, fuse=str(tmp_path), rounds=(2, 11))
        disturbed = fd.run(fragile, many, 12, engine=ray_engine, participation=participation)
    assert len(killer.killed) == 2
    testing._same(undisturbed, disturbed, "the loss of a worker left a trace")


@pytest.mark.slow
def test_a_worker_killed_between_runs_and_between_rounds(many, ray_engine):
    def kill(at: int) -> None:
        pid = ray.get(session.shards[at].worker.__ray_call__.remote(lambda self: os.getpid()))
        os.kill(pid, signal.SIGKILL)

    import ray

    session = ray_engine.open(SCAFFOLD, many, random.key(0))
    w = SCAFFOLD.model.init(many.spec, random.key(1))
    zero = tree.zeros_like(w)
    ask = core.Ask("train", {"x": w, "c": zero}, session.ids, random.key(0), 1, 0)
    first = session.reduce(ask, torch.ones(12)).total.result()
    before = session.save()
    kill(0)
    after = session.save()
    assert all(
        torch.equal(a, b) for a, b in zip(tree.leaves(before), tree.leaves(after), strict=True)
    )
    session.load({"slot": torch.full((12,), -1), "separate": {}})
    kill(1)
    again = session.reduce(ask, torch.ones(12)).total.result()
    assert all(
        torch.equal(a, b) for a, b in zip(tree.leaves(first), tree.leaves(again), strict=True)
    )
    kill(0)
    session.close()
    close(fd.run(SCAFFOLD, many, 2), fd.run(SCAFFOLD, many, 2, engine=ray_engine))


@pytest.mark.slow
def test_states_that_cannot_be_restored_are_an_error(many, ray_engine, tmp_path, monkeypatch):
    import ray

    @ray.remote(num_cpus=0)
    class Owner:
        def put(self):
            return [ray.put(torch.zeros(1 << 20).numpy())]

    monkeypatch.setattr(engine_module, "COPY_EVERY", 1)
    kept = cluster.Shard.copied

    def copied_and_lost(self, call, whole):
        """The copy goes down with the process that it belongs to."""
        found, owner = kept(self, call, whole), Owner.remote()
        self.copies = ray.get(owner.put.remote())
        ray.kill(owner)
        return found

    monkeypatch.setattr(cluster.Shard, "copied", copied_and_lost)
    algorithm = FragileScaffold(**LINEAR, fuse=str(tmp_path), rounds=(3,))
    with Killer(tmp_path) as killer, pytest.raises(fd.CheckpointError) as info:
        fd.run(algorithm, many, 5, engine=ray_engine)
    assert len(killer.killed) == 1
    assert (
        "cannot be restored" in str(info.value)
        and "clients 1" in str(info.value)
        and "resume=True" in str(info.value)
    )


@dataclass(frozen=True)
class Deadly(fd.FedAvg):
    def train(self, client, w):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_step_that_kills_every_worker_is_given_up(many, ray_engine):
    with pytest.raises(fd.FoedusError, match=r"clients 100 to .* was lost 3 times in a row"):
        fd.run(Deadly(**LINEAR), many, 1, engine=ray_engine)


# -- errors come back as themselves ----------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm",
    [
        fd.FedAvg(fd.Linear(), lr=1e38, batch_size=16, optimizer="sgd"),
        fd.Independent(fd.Linear(), lr=1e38, batch_size=16),
    ],
    ids=["reply", "state"],
)
def test_numbers_that_are_not_finite_name_round_and_clients_as_local_does(
    algorithm, many, ray_engine
):
    errors = []
    for engine in (fd.Local(), ray_engine):
        with pytest.raises(fd.DivergenceError) as info:
            fd.run(algorithm, many, 3, engine=engine, evaluate_every=0)
        errors.append(info.value)
    local, far = errors
    assert str(local) == str(far)
    assert (local.round, local.clients) == (far.round, far.clients)
    assert len(far.clients) == 12
    assert len(far.run.history) == len(local.run.history)
    assert far.__cause__ is None


@dataclass(frozen=True)
class Wrong(fd.Algorithm):
    """A step that does what it should not, at client 130 alone."""

    what: str = ""

    def batching(self):
        return replace(super().batching(), pays=False)

    def reply(self, client):
        if int(client.id) == 130:
            if self.what == "config":
                raise fd.ConfigError("not with me")
            if self.what == "bug":
                return {"x": torch.zeros(2) @ torch.zeros(3)}, None
            if self.what == "shape":
                return {"x": torch.zeros(2)}, None
            if self.what == "local class":

                class OddError(Exception):
                    def __init__(self, a, b):
                        super().__init__(f"{a} and {b}")

                raise OddError("this", "that")
            if self.what == "text":
                return {"x": "text"}, None
        return {"x": torch.zeros(3)}, None

    def start(self, clients):
        return fd.State()

    def round(self, clients, state):
        return fd.State(x=clients.mean(self.reply)["x"])


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("config", fd.ConfigError, "^not with me$"),
        ("bug", RuntimeError, "size"),
        ("shape", fd.ReplyError, "another structure"),
        ("local class", RuntimeError, "^OddError: this and that\n"),
        ("text", fd.ReplyError, "holds a str"),
    ],
)
def test_an_error_in_a_step_is_the_users_own(what, kind, message, many, ray_engine):
    with pytest.raises(kind, match=message) as info:
        fd.run(Wrong(what), many, 1, engine=ray_engine)
    notes = "".join(getattr(info.value, "__notes__", []))
    # a bug shows where it is, an error of ours speaks for itself
    assert ("in reply" in notes) == (kind is RuntimeError)
    assert "RayTaskError" not in str(info.value)


def test_two_workers_may_not_disagree_on_the_form_of_a_reply(many, ray_engine):
    @dataclass(frozen=True)
    class Halves(Wrong):
        def reply(self, client):
            return {
                "x": torch.zeros(3 if int(client.id) < int(shards.part_of(many, cut).ids[0]) else 2)
            }, None

    cut = shards.cut(many, 2)[1]
    with pytest.raises(fd.ReplyError, match="another structure"):
        fd.run(Halves(), many, 1, engine=ray_engine)


def test_an_algorithm_that_cannot_travel(many, ray_engine):
    @dataclass(frozen=True)
    class Locked(fd.FedAvg):
        lock: Any = None

    with pytest.raises(fd.ConfigError, match="Locked cannot be sent"):
        fd.run(Locked(**LINEAR, lock=threading.Lock()), many, 1, engine=ray_engine)


def test_a_tree_node_of_the_users_own(many, ray_engine):
    @tree.node(static=("name",))
    @dataclass(frozen=True)
    class Pair:
        a: torch.Tensor
        name: str

    Pair.__module__ = "__main__"  # as in a script: workers cannot import it

    @dataclass(frozen=True)
    class Paired(fd.Algorithm):
        def both(self, client):
            return Pair(client.data.count, "rows"), None

        def start(self, clients):
            return fd.State()

        def round(self, clients, state):
            return fd.State(
                mean=clients.mean(self.both).a, each=clients.gather(self.both).stack().a
            )

    Paired.__module__ = "__main__"
    try:
        local, far = (fd.run(Paired(), many, 1, engine=e) for e in (fd.Local(), ray_engine))
    finally:
        del tree.NODES["Pair"]
    assert torch.equal(local.state.each, far.state.each)
    assert torch.equal(local.state.mean, far.state.mean)


# -- states that do not fit ------------------------------------------------------------------------


@pytest.mark.slow
def test_spilled_states_have_the_same_numbers(many, ray_engine):
    """Batched and one by one; some states in memory and some on disk."""
    with replace(ray_engine, state_memory=20_000) as small:
        for algorithm in (SCAFFOLD, FragileLoop(**LINEAR)):
            plain, spilled = (
                fd.run(algorithm, many, 9, engine=e, participation=0.5) for e in (ray_engine, small)
            )
            testing._same(plain, spilled, "states on disk gave other numbers")


@pytest.mark.slow
def test_a_worker_that_spills_is_replaced(many, ray_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "COPY_EVERY", 3)
    undisturbed = fd.run(SCAFFOLD, many, 9, engine=ray_engine)
    fragile = FragileScaffold(**LINEAR, fuse=str(tmp_path), rounds=(8,))
    with Killer(tmp_path) as killer:
        disturbed = fd.run(fragile, many, 9, engine=replace(ray_engine, state_memory=5_000))
    assert len(killer.killed) == 1
    testing._same(undisturbed, disturbed, "the loss of a worker left a trace")


@dataclass(frozen=True)
class Hoard(fd.Algorithm):
    """Every client keeps a megabyte; the reply says how much memory its process takes besides
    files.
    """

    batchable: bool = True

    def init(self, client):
        return {"x": torch.ones(1 << 18)}

    def work(self, client):
        lines = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        taken = torch.tensor(float(lines["RssAnon"].split()[0]) * 1024)
        return {"sum": client.state["x"].sum(), "taken": taken}, {"x": client.state["x"] + 1}

    def start(self, clients):
        return fd.State(sums=torch.zeros(0), taken=torch.zeros(0))

    def round(self, clients, state):
        """Eight clients at a time, one worker after the other."""
        blocks = torch.arange(len(clients)) // 8
        found = [clients.some(blocks == b).gather(self.work).stack() for b in blocks.unique()]
        sums, taken = (torch.cat([f[k] for f in found]) for k in ("sum", "taken"))
        return fd.State(sums=torch.cat((state.sums, sums)), taken=torch.cat((state.taken, taken)))


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs Linux's account of memory"
)
def test_spilled_states_take_no_memory(ray_engine, monkeypatch):
    monkeypatch.setattr(engine_module, "COPY_EVERY", 10_000)
    fed, grown, sums = sized([1] * 160), [], []
    for memory, kinds in ((None, [True]), (8 << 20, [True, False])):
        with replace(ray_engine, state_memory=memory) as engine:
            for batchable in kinds:
                state = fd.run(Hoard(batchable), fed, 2, engine=engine, evaluate_every=0).state
                # 72 of the first worker's 80 megabytes
                grown.append(float(state.taken[72] - state.taken[0]))
                sums.append(state.sums.tolist())
    assert sums == [[1.0 * (1 << 18)] * 160 + [2.0 * (1 << 18)] * 160] * 3
    assert grown[0] > 60e6
    assert max(grown[1:]) < 35e6


@pytest.mark.parametrize("looped", [True, False])
def test_states_on_disk_step_by_step(looped):
    """Against plain states, through everything that one can do with them."""
    plain, spilled = States(6), States(6, memory=50)
    draws = np.random.default_rng(0)
    for _ in range(30):
        chosen = torch.from_numpy(np.sort(draws.choice(6, draws.integers(1, 7), replace=False)))
        new = {"a": torch.randn(len(chosen), 3), "b": torch.randint(9, (len(chosen),))}
        for states in (plain, spilled):
            if looped:
                for i, p in enumerate(chosen.tolist()):
                    states.put(p, tree.map(lambda t, i=i: t[i], new))
            else:
                states.put_many(chosen, new)
        given = spilled.get_many(chosen)
        before = tree.map(torch.clone, given)
        for states in (plain, spilled):
            states.put_many(chosen, tree.map(lambda t: t + 1, new))
        assert all(
            torch.equal(a, b) for a, b in zip(tree.leaves(given), tree.leaves(before), strict=True)
        )
        saved = [s.save() for s in (plain, spilled)]
        assert all(torch.equal(a, b) for a, b in zip(*map(tree.leaves, saved), strict=True))
        again = States(6, memory=50)
        again.load(saved[0])
        assert all(
            torch.equal(a, b)
            for a, b in zip(tree.leaves(again.save()), tree.leaves(saved[0]), strict=True)
        )
    places = [isinstance(v, _Place) for v in spilled.separate.held.values()]
    assert (
        (any(places) and not all(places) and spilled.separate.taken <= 50)
        if looped
        else spilled.spilled
    )


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers=0"),
        ({"workers": 1.5}, "workers=1.5"),
        ({"address": 7}, "address=7"),
        ({"address": ""}, "address=''"),
        ({"resources": 2}, "resources=2"),
        ({"resources": {"CPU": 0}}, r"resources\['CPU'\]=0"),
        ({"resources": {"CPU": "two"}}, r"resources\['CPU'\]='two'"),
        ({"state_memory": 0}, "state_memory=0"),
    ],
    ids=str,
)
def test_settings(options, message):
    with pytest.raises(fd.ConfigError, match=message):
        fd.Ray(**options)


def test_resources_that_the_cluster_does_not_have(many, ray_engine):
    for resources in ({"CPU": 1000}, {"unobtainium": 1}, {"GPU": 9}):
        with pytest.raises(fd.ConfigError, match="room for 0; its nodes have CPU 8"):
            fd.run(FEDAVG, many, 1, engine=fd.Ray(workers=1, resources=resources))
    with pytest.raises(fd.ConfigError, match=r"workers=9 .* room for 8"):
        fd.run(FEDAVG, many, 1, engine=fd.Ray(workers=9))


@pytest.mark.slow
def test_resources_that_others_use(many, ray_engine, monkeypatch):
    greedy = fd.Ray(workers=1, resources={"CPU": 8})  # two of the eight are taken
    with monkeypatch.context() as hurry:
        hurry.setattr(cluster, "PATIENCE", 2.0)
        with pytest.raises(fd.ConfigError, match="gave 0 of 1 workers within 2 seconds"):
            fd.run(FEDAVG, many, 1, engine=greedy)
    close(
        fd.run(FEDAVG, many, 2),
        fd.run(FEDAVG, many, 2, engine=fd.Ray(workers=1, resources={"CPU": 2})),
    )


@pytest.mark.slow
def test_the_cluster_that_this_process_is_in(many, ray_engine):
    """It stays as it is; and one process is in one cluster only."""
    import ray

    close(fd.run(FEDAVG, many, 2), fd.run(FEDAVG, many, 2, engine=fd.Ray("auto", workers=2)))
    assert ray.is_initialized()
    with pytest.raises(fd.ConfigError, match="is connected to the Ray cluster at"):
        fd.run(FEDAVG, many, 1, engine=fd.Ray("10.1.2.3:6379"))
    for _ in range(100):  # Ray takes a moment to count what it has been given back
        if ray.available_resources()["CPU"] == 6:
            return
        time.sleep(0.1)
    raise AssertionError(f"workers are left: {ray.available_resources()}")


def outside(code: str, timeout: float = 240) -> str:
    """Run a script in a process of its own, which is in no cluster yet."""
    prelude = """
        import time, os, sys
        import numpy as np, torch
        import foedus as fd
        fed = fd.split(fd.load("digits"), "dirichlet", clients=12, alpha=0.3, seed=1)
        fedavg, scaffold = (
            kind(fd.Linear(), lr=0.1, batch_size=16) for kind in (fd.FedAvg, fd.Scaffold)
        )
        def same(a, b):
            np.testing.assert_allclose(
                a.history.drop(columns="seconds"), b.history.drop(columns="seconds"),
                rtol=1e-6, atol=1e-6,
            )
    """
    script = textwrap.dedent(prelude) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_an_address_at_which_nobody_listens():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    outside(f"""
        for address, message in (
            ("127.0.0.1:{port}", "nobody answers"),
            ("somewhere", "HOST:PORT"),
            ("ray://a:1", "HOST:PORT"),
        ):
            try:
                fd.run(fedavg, fed, 1, engine=fd.Ray(address))
            except fd.ConfigError as error:
                assert repr(address) in str(error) and message in str(error), error
            else:
                raise AssertionError(address)
    """)


@pytest.mark.slow
def test_a_ray_of_its_own_is_started_and_ended():
    """Nothing is printed, nothing is left running; a worker has its share of the cores."""
    said = outside("""
        import ray
        same(fd.run(fedavg, fed, 2), fd.run(fedavg, fed, 2, engine=fd.Ray(workers=2)))
        assert not ray.is_initialized()
        with fd.Ray(workers=1) as engine:
            cores = len(os.sched_getaffinity(0))
            assert ray.cluster_resources()["CPU"] == cores
            session = engine.open(scaffold, fed, torch.zeros(2, dtype=torch.int64))
            worker = session.shards[0].worker
            assert ray.get(
                worker.__ray_call__.remote(lambda self: torch.get_num_threads())
            ) == cores
            again = fd.Ray(workers=1)  # shares the connection; its end is not the end of the other
            session.close()
            engine._held[0].dismiss(engine._held[0].idle), engine._held[0].idle.clear()
            fd.run(fedavg, fed, 1, engine=again)
            assert ray.is_initialized()
            pids = [int(p) for p in os.popen(f"pgrep -P {os.getpid()}").read().split()]
            assert len(pids) >= 2
        assert not ray.is_initialized()
        print("alive:", [
            p for p in pids
            if os.path.exists(f"/proc/{p}")
            and "Z" not in open(f"/proc/{p}/stat").read().split()[2]
        ])
    """)
    assert said == "alive: []\n"


@pytest.mark.slow
def test_two_nodes_joined_by_address():
    """Workers on both; then one node is lost in mid-run, and its clients go on where there is
    room.
    """
    outside("""
        import ray
        from ray.cluster_utils import Cluster
        nodes = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
        )
        second = nodes.add_node(num_cpus=2)
        engine = fd.Ray(nodes.address, workers=2)
        locals_ = [fd.run(a, fed, 6) for a in (fedavg, scaffold)]
        with engine:
            session = engine.open(fedavg, fed, torch.zeros(2, dtype=torch.int64))
            homes = ray.get([
                s.worker.__ray_call__.remote(
                    lambda self: ray.get_runtime_context().get_node_id()
                )
                for s in session.shards
            ])
            assert len(set(homes)) == 2, homes
            session.close()
            for algorithm, local in zip((fedavg, scaffold), locals_):
                same(local, fd.run(algorithm, fed, 6, engine=engine))

        import foedus.engines.ray.engine as module
        reduce = module.RaySession.reduce

        def unlucky(session, ask, weights):
            if ask.round == 4:
                nodes.remove_node(second)
            return reduce(session, ask, weights)

        module.COPY_EVERY, module.RaySession.reduce = 2, unlucky
        same(locals_[1], fd.run(scaffold, fed, 6, engine=engine))
        assert not ray.is_initialized()
        ray.init(nodes.address, log_to_driver=False)  # the cluster itself is still there
        assert sum(n["Alive"] for n in ray.nodes()) == 1
        ray.shutdown()
        nodes.shutdown()
    """)
