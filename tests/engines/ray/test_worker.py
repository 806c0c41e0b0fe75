"""What a Ray worker does, without Ray: exchanges, copies of the states, and errors that travel."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import foedus as fd
from foedus.base import random, tree
from foedus.engines.ray import worker as module
from foedus.engines.ray.shards import pack, unpack, unpacked_sum
from foedus.engines.ray.worker import Worker


@dataclass(frozen=True)
class Tally(fd.Algorithm):
    """A client's number begins at ten times its id, and grows by `add` whenever it is asked."""

    looped: bool = False

    def batching(self):
        return replace(super().batching(), pays=not self.looped)

    def init(self, client):
        return {"n": 10.0 * client.id}

    def count(self, client, add):
        n = client.state["n"] + add
        return {"n": n}, {"n": n}

    def late(self, client):
        late = client.up + 10 * client.down + 100 * client.longest
        return {"late": torch.as_tensor(late).double()}, None

    def wrong(self, client):
        raise fd.ConfigError("lr=-1 must be positive")

    def bug(self, client):
        return {"x": torch.zeros(2) @ torch.zeros(3)}, None

    def start(self, clients):
        return fd.State()

    def round(self, clients, state):
        return state


def federation() -> fd.Federation:
    """Clients 0, 1 and 2 with one row each."""
    row = np.zeros((1, 1), np.float32), np.zeros(1, np.float32)
    return fd.Federation.from_clients([row] * 3)


def opened(looped: bool = False, memory: int | None = None) -> Worker:
    worker = Worker()
    assert worker.open(Tally(looped), federation(), pack(random.key(0)), 1, memory, []) == (
        True,
        None,
    )
    return worker


def question(ids: list[int], step: str = "count", **payload: float) -> tuple[Any, Any]:
    """The two arguments of an exchange, as they travel."""
    ask = {"step": step, "ids": torch.tensor(ids), "key": random.key(0), "round": 1, "exchange": 0}
    return pack(ask), pack({name: torch.tensor(v) for name, v in payload.items()})


def given(answer: tuple[bool, Any]) -> Any:
    done, found = answer
    assert done, found
    return unpack(found)


def numbers(worker: Worker) -> list[float | None]:
    """Each client's number."""
    states = [worker.session.states.get(p) for p in range(3)]
    return [None if s is None else float(s["n"]) for s in states]


def replies(answers: Iterator[tuple[bool, Any]]) -> list[list[tuple[list[int], list[float]]]]:
    """Ids and numbers of the replies, in lists as they traveled."""
    found = []
    for answer in answers:
        batches = given(answer)
        found.append([(ids.tolist(), reply["n"].flatten().tolist()) for ids, reply, _ in batches])
    return found


@pytest.mark.parametrize("looped", [False, True])
def test_sums_are_weighted_and_charged(looped):
    worker = opened(looped)
    done, reduced = worker.reduce(*question([1, 2], add=2.0), pack(torch.tensor([0.25, 0.5])))
    assert done
    # 0.25 (10 + 2) + 0.5 (20 + 2) = 14
    [total] = unpacked_sum(reduced).total.total
    assert total.item() == 14.0 and total.dtype == torch.float64
    assert reduced.clients == 2
    assert reduced.sent.messages_up == 2
    assert numbers(worker) == [None, 12.0, 22.0]


def test_replies_travel_together_until_they_are_large(monkeypatch):
    worker = opened(looped=True)
    # 4 bytes a reply, and 8 for its id: two of them fill a message of 20
    assert replies(worker.exchange(*question([0, 1, 2], add=1.0))) == [
        [([0], [1.0]), ([1], [11.0]), ([2], [21.0])]
    ]
    monkeypatch.setattr(module, "_CHUNK", 20)
    assert replies(worker.exchange(*question([0, 1, 2], add=1.0))) == [
        [([0], [2.0]), ([1], [12.0])],
        [([2], [22.0])],
    ]


@pytest.mark.parametrize("looped", [False, True])
def test_a_repeated_exchange_changes_the_states_alone(looped):
    worker, other = opened(looped), opened(looped)
    assert worker.repeat(*question([0, 2], add=3.0)) == (True, None)
    list(other.exchange(*question([0, 2], add=3.0)))
    assert numbers(worker) == numbers(other) == [3.0, None, 23.0]


@pytest.mark.parametrize("looped", [False, True])
def test_a_copy_has_what_has_changed_since_the_last(looped):
    worker = opened(looped)
    worker.repeat(*question([2, 0], add=1.0))
    whole = given(worker.copy(True))
    assert whole["saved"]["slot"].tolist() in ([1, -1, 0], [0, -1, 1])
    worker.repeat(*question([1], add=1.0))
    first = given(worker.copy(False))
    worker.repeat(*question([0], add=1.0))
    second = given(worker.copy(False))
    if looped:
        assert list(first["separate"]) == [1] and list(second["separate"]) == [0]
        assert first["separate"][1]["n"] == 11.0 and second["separate"][0]["n"] == 2.0
    else:
        assert first["positions"].tolist() == [1] and second["positions"].tolist() == [0]
        assert first["states"]["n"].tolist() == [11.0] and second["states"]["n"].tolist() == [2.0]
    third = given(worker.copy(False))  # nothing has changed since
    assert third["separate"] == {} if looped else third["positions"].tolist() == []

    other = opened(looped)
    other.repeat(*question([1, 2], add=50.0))  # forgotten with the first copy
    copies = [(True, pack(c)) for c in (whole, first, second)]
    assert other.restore(*copies) == (True, None)
    assert numbers(other) == [2.0, 11.0, 21.0] == numbers(worker)


def test_a_copy_is_whole_when_the_changes_have_become_as_many():
    worker = opened()
    worker.repeat(*question([0, 1, 2], add=1.0))
    assert "positions" in given(worker.copy(False))
    worker.repeat(*question([0, 1, 2], add=1.0))
    # six changes were copied since there is no whole copy: not more than twice the three states
    assert "positions" in given(worker.copy(False))
    worker.repeat(*question([1], add=1.0))  # the seventh
    assert given(worker.copy(False))["saved"]["states"]["n"].tolist() == [2.0, 13.0, 22.0]
    worker.repeat(*question([1], add=1.0))
    assert given(worker.copy(False))["positions"].tolist() == [1]  # counted from the whole one


def test_new_states_are_restored_to_the_places_that_they_had():
    """Client 2 took part before client 0, so its state lies first."""
    worker = opened()
    worker.repeat(*question([2], add=1.0))
    worker.repeat(*question([0], add=1.0))
    copy = given(worker.copy(False))
    assert copy["positions"].tolist() == [2, 0]
    other = opened()
    other.restore((True, pack(copy)))
    assert torch.equal(other.session.states.slot, worker.session.states.slot)
    assert numbers(other) == [1.0, None, 21.0]


def test_states_are_kept_in_the_memory_that_is_allowed():
    worker = opened(memory=4)  # one state of a single float
    worker.repeat(*question([0, 2], add=1.0))
    assert worker.session.states.spilled
    copy = given(worker.copy(True))
    other = opened(memory=4)
    other.repeat(*question([1, 2], add=50.0))  # forgotten with the copy
    other.restore((True, pack(copy)))
    assert other.session.states.spilled
    assert numbers(other) == [1.0, None, 21.0]


def test_delays_are_those_of_the_workers_clients():
    worker = opened(looped=True)
    assert worker.delay(pack((torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]))), 12) == (
        True,
        None,
    )
    [batches] = [given(a) for a in worker.exchange(*question([0, 2], step="late"))]
    # up + 10 down + 100 longest; 12 is the longest of all workers, not of these clients
    assert [float(reply["late"]) for _, reply, _ in batches] == [1241.0, 1263.0]


@dataclass(frozen=True)
class Personal(Tally):
    """A client predicts its number."""

    personal = True

    def outputs(self, client, x):
        return client.state["n"].expand(len(x), 1)

    def row_loss(self, outputs, y):
        return (outputs[:, 0] - y).square()


def test_evaluation_gives_clients_their_first_state():
    x, y = np.zeros((1, 1), np.float32), np.ones(1, np.float32)
    fed = fd.Federation.from_clients([(x, y)] * 2, test=[(x, y)] * 2)
    worker = Worker()
    worker.open(Personal(), fed, pack(random.key(0)), 1, None, [])
    assert given(worker.evaluate_own())["loss"].tolist() == [1.0, 81.0]  # (0 - 1)^2, (10 - 1)^2
    assert given(worker.copy(False))["positions"].tolist() == [0, 1]
    rows = pack((torch.zeros(2, 1), torch.tensor([0.0, 2.0])))
    # 0 + 4 and 100 + 64
    assert given(worker.evaluate_global(rows))["loss"].tolist() == [4.0, 164.0]
    assert given(worker.copy(False))["positions"].tolist() == []  # they had their states


def test_released_clients_are_gone():
    worker = opened()
    assert worker.release() == (True, None)
    done, error = worker.copy(True)
    assert not done and isinstance(error, AttributeError)


def test_tree_nodes_of_the_user_are_known_where_no_import_has_made_them():
    @dataclass(frozen=True)
    class OnlyInThisTest:
        a: torch.Tensor
        name: str

        tree_static = ("name",)  # as the decorator has left it where the class was defined

    try:
        done, _ = Worker().open(
            Tally(), federation(), pack(random.key(0)), 1, None, [OnlyInThisTest, OnlyInThisTest]
        )
        assert done
        assert tree.map(lambda t: t + 1, OnlyInThisTest(torch.ones(1), "x")).a.item() == 2.0
    finally:
        del tree.NODES["OnlyInThisTest"]


# -- errors ----------------------------------------------------------------------------------------


def test_an_error_of_the_users_settings_has_no_traceback_note():
    for done, error in (
        opened().repeat(*question([0], step="wrong")),
        *opened().exchange(*question([0], step="wrong")),
    ):
        assert not done
        assert type(error) is fd.ConfigError and str(error) == "lr=-1 must be positive"
        assert not hasattr(error, "__notes__")


def test_a_bug_says_where_it_is():
    done, error = opened(looped=True).repeat(*question([0], step="bug"))
    assert not done and isinstance(error, RuntimeError)
    [note] = pickle.loads(pickle.dumps(error)).__notes__
    assert note.startswith("In a worker:\n") and "in bug" in note


def test_an_error_that_cannot_be_sent_is_named():
    class OddError(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} and {b}")

    sent = module._portable(OddError("this", "that"))
    assert type(sent) is RuntimeError and str(sent) == "OddError: this and that"
    assert "OddError" in sent.__notes__[0]
