"""Learning-rate schedules: their numbers, and training with them by hand and against PyTorch.

f_A'(w) = w - 2 (one row) and f_B'(w) = 4w - 2 (two rows), as in `tests.algorithms.test_averaging`.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

import foedus as fd
from foedus import kernels
from foedus.base import random
from foedus.base.rows import Rows
from foedus.core.describe import to_config
from foedus.core.result import known_algorithm
from foedus.models.losses import CrossEntropy
from foedus.models.schedules import lowest_rate, rate_at, rates_of, total_rate
from foedus.models.training.descend import descend

Cosine, Step, WarmUp = fd.schedules.Cosine, fd.schedules.Step, fd.schedules.WarmUp
HOW = {"model": fd.Linear(bias=False), "steps": 2, "batch_size": None}
HALVED = Step(0.1, every=1, factor=0.5, by="step")
"""0.1, 0.05, ... in each round."""


def weight(run: fd.Run) -> float:
    return float(run.state.w["weight"])


def after(algorithm: fd.Algorithm, fed: fd.Federation, rounds: int, **options) -> fd.Run:
    return fd.run(algorithm, fed, rounds, evaluate_every=0, **options)


# -- numbers ---------------------------------------------------------------------------------------


def by_round(lr, rounds: int) -> list[float]:
    return [rate_at(lr, t) for t in range(1, rounds + 1)]


def test_step():
    assert by_round(Step(0.8, every=3, factor=0.5), 7) == [0.8, 0.8, 0.8, 0.4, 0.4, 0.4, 0.2]
    assert rates_of(Step(0.8, every=2, factor=0.5, by="step"), 9, 5) == [0.8, 0.8, 0.4, 0.4, 0.2]
    assert by_round(Step(0.8, every=3, by="step"), 5) == [0.8] * 5


def test_cosine_is_that_of_pytorch_and_stays_at_its_end():
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=0.7)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9, eta_min=0.03)
    want = []
    for _ in range(10):
        want.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert by_round(Cosine(0.7, over=9, end=0.03), 10) == pytest.approx(want)
    assert by_round(Cosine(0.7, over=9, end=0.03), 15)[10:] == pytest.approx([0.03] * 5)


def test_warm_up():
    assert by_round(WarmUp(4, then=0.1), 6) == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1, 0.1])
    # `then` begins after the warm-up where both count rounds
    then = Step(0.1, every=2, factor=0.5)
    assert by_round(WarmUp(1, then), 6) == pytest.approx([0.05, 0.1, 0.1, 0.05, 0.05, 0.025])
    # by step inside, by round outside: the first steps of every round are smaller
    mixed = WarmUp(1, then, by="step")
    assert rates_of(mixed, 1, 3) == pytest.approx([0.05, 0.1, 0.1])
    assert rates_of(mixed, 3, 3) == pytest.approx([0.025, 0.05, 0.05])
    other = WarmUp(1, then=Step(0.1, every=2, factor=0.5, by="step"))
    assert rates_of(other, 1, 3) == pytest.approx([0.05, 0.05, 0.025])
    assert rates_of(other, 2, 3) == pytest.approx([0.1, 0.1, 0.05])


def test_lowest_and_total():
    assert lowest_rate(0.3) == 0.3 and lowest_rate(Cosine(0.3, over=4)) == 0
    assert lowest_rate(WarmUp(3, then=0.4)) == pytest.approx(0.1)
    assert lowest_rate(WarmUp(3, then=Cosine(0.4, over=3, end=0.02))) == 0.02
    assert lowest_rate(Step(0.1, every=1)) == 0 and lowest_rate(Step(0.1, 1, 1.0)) == 0.1
    steps = torch.tensor([0, 1, 3])
    assert total_rate(HALVED, 1, steps, 3).tolist() == pytest.approx([0, 0.1, 0.175])
    assert total_rate(Step(0.1, 1, 0.5), 2, steps, 3).tolist() == pytest.approx([0, 0.05, 0.15])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fd.FedAvg(lr=0), "lr=0 must be a positive finite number or a schedule"),
        (lambda: fd.FedAvg(lr="cosine"), "lr='cosine' must be .* a schedule of fd.schedules"),
        (lambda: Step(0.1, every=0), "every=0 must be an integer of at least 1"),
        (lambda: Step(0.1, every=2, factor=1.5), "factor=1.5 must be"),
        (lambda: Cosine(0.1, over=5, end=-1.0), "end=-1.0 must be a non-negative"),
        (lambda: Cosine(0.1, over=5, by="rounds"), "did you mean 'round'"),
        (lambda: WarmUp(5, then=-0.1), "then=-0.1 must be a positive"),
        (lambda: fd.Scaffold(lr=Cosine(0.1, over=9)), "falls to 0, and Scaffold's option 2"),
        (
            lambda: fd.Net(fd.MLP(4), fd.Training(lr=Cosine(0.1, over=9))),
            'an oracle is fitted anew in every round; use by="step"',
        ),
    ],
)
def test_mistakes(make, words):
    with pytest.raises(fd.ConfigError, match=words):
        make()


def test_where_a_step_size_of_0_does_no_harm():
    fd.Scaffold(lr=Cosine(0.1, over=9), option=1)
    fd.Scaffold(lr=Cosine(0.1, over=9, end=0.01))
    fd.Net(fd.MLP(4), fd.Training(lr=Cosine(0.1, over=9, by="step")))


def test_settings_can_be_written_and_read():
    lr = WarmUp(2, then=Cosine(0.1, over=9, by="step"))
    algorithm = fd.FineTuned(lr=lr, own_lr=Step(0.1, every=3))
    assert known_algorithm(to_config(algorithm)) == algorithm


# -- by hand ---------------------------------------------------------------------------------------


def test_by_round(two):
    """A 0 -> 0.2 -> 0.38, B 0 -> 0.2 -> 0.32: 0.34. With 0.05 from there A -> 0.423 -> 0.50185 and
    B -> 0.372 -> 0.3976.
    """
    algorithm = fd.FedAvg(lr=Step(0.1, every=1, factor=0.5), **HOW)
    assert weight(after(algorithm, two, 1)) == pytest.approx(0.34)
    assert weight(after(algorithm, two, 2)) == pytest.approx((0.50185 + 2 * 0.3976) / 3)


@pytest.mark.parametrize("batch", [True, False])
def test_by_step(two, batch):
    """A 0 -> 0.2 -> 0.2 + 0.05 * 1.8 = 0.29, B 0 -> 0.2 -> 0.26: 0.27. Every round begins with 0.1
    again: A 0.27 -> 0.443 -> 0.52085, B 0.27 -> 0.362 -> 0.3896.
    """
    algorithm, engine = fd.FedAvg(lr=HALVED, **HOW), fd.Local(batch=batch)
    assert weight(after(algorithm, two, 1, engine=engine)) == pytest.approx(0.27)
    two_rounds = after(algorithm, two, 2, engine=engine)
    assert weight(two_rounds) == pytest.approx((0.52085 + 2 * 0.3896) / 3)


def test_scaffold_divides_by_the_sum_of_step_sizes(two):
    """c_A = -0.29 / 0.15 and c_B = -0.26 / 0.15; a second round with c - c_i = +-0.1."""
    first, second = (after(fd.Scaffold(lr=HALVED, **HOW), two, r) for r in (1, 2))
    assert weight(first) == pytest.approx(0.275)
    assert float(first.state.c["weight"]) == pytest.approx(-0.55 / 0.3)
    # A: 0.275 + 0.1 (1.725 - 0.1) = 0.4375, + 0.05 (1.5625 - 0.1) = 0.510625
    # B: 0.275 + 0.1 (0.9 + 0.1) = 0.375, + 0.05 (0.5 + 0.1) = 0.405
    assert weight(second) == pytest.approx((0.510625 + 0.405) / 2)
    # c_i - c + (x - y) / 0.15: A -0.1 - 0.235625 / 0.15, B 0.1 - 0.13 / 0.15
    assert float(second.state.c["weight"]) == pytest.approx(-(0.235625 + 0.13) / 0.3)


def test_scaffold_by_round(two):
    """Round 2 from 0.35 with 0.05 and c - c_A = 0.15: A -> 0.425 -> 0.49625, B with -0.15 -> 0.3875
    -> 0.4175; and c_A = -0.15 - 0.14625 / 0.1, c_B = 0.15 - 0.0675 / 0.1.
    """
    run = after(fd.Scaffold(lr=Step(0.1, every=1, factor=0.5), **HOW), two, 2)
    assert weight(run) == pytest.approx((0.49625 + 0.4175) / 2)
    assert float(run.state.c["weight"]) == pytest.approx(-(0.14625 + 0.0675) / 0.2)


@pytest.mark.parametrize("batch", [True, False])
def test_fednova_counts_steps_by_their_sizes(two, batch):
    """One row a batch: A makes one step, to 0.2; B two, to 0.26, of which the second counts half.

    With momentum B's v is -2 and then -1 - 1.2, so w = 0.2 + 0.11; its gradients count 0.125 and
    0.05 to the 0.1 of A's.
    """
    how = {"model": fd.Linear(bias=False), "lr": HALVED, "batch_size": 1}
    run = after(fd.FedNova(**how), two, 1, engine=fd.Local(batch=batch))
    assert weight(run) == pytest.approx((1 + 2 * 1.5) / 3 * (0.2 + 2 * 0.26 / 1.5) / 3)
    run = after(fd.FedNova(**how, momentum=0.5), two, 1, engine=fd.Local(batch=batch))
    assert weight(run) == pytest.approx((1 + 2 * 1.75) / 3 * (0.2 + 2 * 0.31 / 1.75) / 3)


def test_own_training_has_a_schedule_of_its_own(two):
    """A's own model: one step of 0.05 from 0, then one of 0.025 from 0.34."""
    own = Step(0.05, every=1, factor=0.5)
    algorithm = fd.FineTuned(lr=0.1, own_lr=own, own_steps=1, **HOW)
    found = [after(algorithm, two, r).client_states().get(0)["w"]["weight"] for r in (1, 2)]
    assert [float(v) for v in found] == pytest.approx([0.1, 0.34 + 0.025 * 1.66])


# -- rounds ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reads(fd.Algorithm):
    """Replies the difference between the round that was broadcast and the one that clients read."""

    batch: str = "vmap"

    def compare(self, client, now):
        return {"apart": now - client.round, "round": torch.tensor(float(client.round))}, None

    def start(self, clients):
        return fd.State(seen=torch.zeros(0), apart=torch.zeros(0))

    def round(self, clients, state):
        replies = clients.gather(self.compare, now=torch.tensor(float(clients.round))).stack()
        seen = torch.cat((state.seen, replies["round"].unique()))
        return state.replace(seen=seen, apart=torch.cat((state.apart, replies["apart"])))


@pytest.mark.parametrize("batch", [True, False])
def test_clients_know_the_round_of_what_they_answer(fed, batch):
    local = fd.Local(batch=batch)
    run = after(Reads(), fed, 5, engine=local)
    assert run.state.seen.tolist() == [1, 2, 3, 4, 5] and not run.state.apart.any()
    late = fd.Delayed(local, up=[0, 1, 0, 2, 1], down=[2, 0, 1, 3, 0])
    run = after(Reads(), fed, 7, engine=late, participation=0.7)
    assert len(run.state.apart) and not run.state.apart.any()


def test_a_late_broadcast_has_the_step_size_of_its_round(two):
    """B is a round behind: in round 2 it starts from 0, with 0.1 as in round 1; A from 0.35, with
    0.05: 0.35 -> 0.4325 -> 0.510875. Both count alike.
    """
    algorithm = fd.FedAvg(lr=Step(0.1, every=1, factor=0.5), weights="uniform", **HOW)
    run = after(algorithm, two, 2, engine=fd.Delayed(down=[0, 1]))
    assert weight(run) == pytest.approx(0.35 + (0.510875 - 0.35 + 0.32) / 2)


def test_a_schedule_goes_on_after_a_checkpoint(fed, tmp_path):
    lr = WarmUp(2, then=Cosine(0.1, over=4, end=0.01))
    algorithm, path = fd.FedAvg(fd.MLP(8), lr=lr, batch_size=16), tmp_path / "run.safetensors"
    fd.run(algorithm, fed, 3, participation=0.5, checkpoint=path)
    resumed = fd.run(algorithm, fed, 6, participation=0.5, checkpoint=path, resume=True)
    whole = fd.run(algorithm, fed, 6, participation=0.5)
    assert all(torch.equal(v, whole.state.w[k]) for k, v in resumed.state.w.items())
    plain = fd.run(fd.FedAvg(fd.MLP(8), lr=0.1, batch_size=16), fed, 6, participation=0.5)
    assert not torch.allclose(plain.state.w["weight0"], whole.state.w["weight0"])


# -- against PyTorch -------------------------------------------------------------------------------


@pytest.mark.parametrize("lr", [HALVED, WarmUp(3, Cosine(0.2, over=5, by="step"), by="step")])
@pytest.mark.parametrize("how", [{}, {"momentum": 0.7}, {"optimizer": "adam"}], ids=str)
@pytest.mark.parametrize("model", [fd.Linear(zero_start=False), fd.MLP(7)], ids=["linear", "mlp"])
def test_steps_are_those_of_pytorch(digits, model, how, lr):
    """Eight steps of 3 rows each, in the order that the client's key gives."""
    x, y = (torch.from_numpy(t[:12]) for t in (digits.x_train, digits.y_train))
    spec = fd.Spec((64,), 10, 10)
    start, key = model.init(spec, random.key(3)), random.key(5)
    training = fd.Training(lr=lr, epochs=2, batch_size=3, weight_decay=0.01, **how)
    data = Rows(x, y, torch.arange(12), torch.ones(12), spec)
    found = descend(training, model, CrossEntropy(), start, data, key)["params"]

    leaves = {k: v.clone().requires_grad_() for k, v in start.items()}
    kind = torch.optim.Adam if "optimizer" in how else torch.optim.SGD
    momentum = {k: v for k, v in how.items() if k == "momentum"}
    optimizer = kind(leaves.values(), lr=1.0, weight_decay=0.01, **momentum)
    orders = [random.permutation(key if e == 0 else random.fold(key, e), 12) for e in range(2)]
    for t, rows in enumerate(torch.cat(orders).split(3)):
        optimizer.param_groups[0]["lr"] = rates_of(lr, 1, 8)[t]
        optimizer.zero_grad()
        F.cross_entropy(model.apply(leaves, x[rows]), y[rows]).backward()
        optimizer.step()
    for k, v in leaves.items():
        torch.testing.assert_close(found[k], v.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not kernels.ready, reason="foedus was installed without a compiler")
def test_compiled_code_trains_by_round(fed, monkeypatch):
    """A schedule by round is a number to it; one by step is not."""
    sizes, train = [], kernels.train
    monkeypatch.setattr(
        kernels, "train", lambda *a, **how: sizes.append(how["lr"]) or train(*a, **how)
    )
    after(fd.FedAvg(lr=Step(0.4, every=1, factor=0.5)), fed, 3)
    assert sizes == [0.4, 0.2, 0.1]
    after(fd.FedAvg(lr=HALVED), fed, 3)
    assert len(sizes) == 3


def test_distillation_follows_rounds(fed):
    """The student's step size of round 2 is near 0, so that only round 1 has taught it."""
    public = fed.data.x_test[:40]
    short = Step(0.05, every=1, factor=1e-12)
    oracle = fd.Training(lr=0.01, optimizer="adam", epochs=1, batch_size=16)
    for student in (short, 0.05):
        teach = fd.Training(lr=student, batch_size=16)
        algorithm = fd.FFGBDistill(fd.MLP(4), public, oracle=oracle, student=teach, step=1.0)
        first, second = (after(algorithm, fed, r).state.w["weight0"] for r in (1, 2))
        assert torch.allclose(first, second, atol=1e-7) == (student is short)
