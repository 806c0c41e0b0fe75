"""Promises of single lines, away from degenerate points: a wrong line fails its test."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import foedus as fd
from foedus.aggregation.dp.accounting import epsilon
from foedus.base import random
from foedus.core.reduce import Accumulator
from foedus.geometry import best_step
from foedus.models.training.augment import crop_flip
from tests.algorithms.twins import Case, copies, same, seen, states_of, values


def rows_of(*numbers: float) -> fd.Federation:
    """One client for each number, which is its only feature; the i-th has i + 1 rows."""
    one = [
        (np.full((i + 1, 1), v, np.float32), np.zeros(i + 1, np.float32))
        for i, v in enumerate(numbers)
    ]
    return fd.Federation.from_clients(one)


# -- who takes part, and the server's draws --------------------------------------------------------


@pytest.mark.parametrize("participation", [0.3, fd.Poisson(0.3)], ids=str)
def test_cohorts_change_from_round_to_round_and_are_fair(participation):
    """50 rounds, 20 clients: each comes 50 * 0.3 = 15 times, +- sqrt(50 * 0.3 * 0.7) = 3.24."""
    fed = rows_of(*range(20))
    drawn = [tuple(ids.tolist()) for ids in seen(fed, 50, participation).cohorts]
    sizes = np.array([len(who) for who in drawn])
    assert len(set(drawn)) >= 49  # there are 38760 sets of 6
    times = np.bincount([i for who in drawn for i in who], minlength=20)
    assert np.abs(times - 15).max() < 4 * 3.24
    # Two rounds have 6 * 0.3 = 1.8 clients in common on average.
    both = [len(set(a) & set(b)) for a, b in itertools.pairwise(drawn)]
    assert np.mean(both) == pytest.approx(1.8, abs=0.8)
    if participation == 0.3:
        assert (sizes == 6).all()
    else:  # binomial: variance 20 * 0.3 * 0.7 = 4.2
        assert sizes.mean() == pytest.approx(6, abs=4 * math.sqrt(4.2 / 50))
        assert 2 < sizes.var() < 8
    other = [tuple(ids.tolist()) for ids in seen(fed, 50, participation, seed=12).cohorts]
    assert sum(a == b for a, b in zip(drawn, other, strict=True)) <= 1


def test_the_servers_draws_change_from_round_to_round():
    fed = rows_of(*range(4))
    first, second = ([tuple(key.tolist()) for key in seen(fed, 50, seed=s).drawn] for s in (11, 12))
    assert len({*first, *second}) == 100


# -- local training --------------------------------------------------------------------------------


def test_adams_correction_of_bias_is_each_clients_own():
    """One step a round.

    Corrected, a first step has m / (1 - 0.9) = g and s / (1 - 0.999) = g^2: it is lr everywhere,
    also where others of the round make their second.
    """
    case = values()
    run = fd.run(
        fd.Independent(case.model, optimizer="adam", lr=0.013, batch_size=7),
        case.fed, 2, seed=case.seed, participation=0.5, evaluate_every=0,
    )  # fmt: skip
    old, new = (
        set(case.cohorts[0]) & set(case.cohorts[1]),
        set(case.cohorts[1]) - set(case.cohorts[0]),
    )
    assert old and new
    states = states_of(run)
    for i in new:
        moved = np.concatenate([t.flatten() for t in states[i]["w"].values()]) - case.start
        np.testing.assert_allclose(np.abs(moved), 0.013, rtol=1e-4)
        assert float(states[i]["memory"]["steps"]) == 1
    assert {float(states[i]["memory"]["steps"]) for i in old} == {2.0}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("clip", [1.0, 0.37])
def test_clip_leaves_what_is_shorter_and_shortens_what_is_longer(bias, clip):
    """A row x = (3, 4) with target y at w = 0 has the gradient -y (3, 4), and -y in the bias.

    y = 0.05: norm 0.25 (0.255 with the bias), below both bounds. y = 1: norm 5 (sqrt(26) with the
    bias), above.
    """
    x = np.array([[3.0, 4.0]], np.float32)
    targets = (0.05, 1.0)
    fed = fd.Federation.from_clients([(x, np.array([y], np.float32)) for y in targets])
    algorithm = fd.Independent(fd.Linear(bias=bias), lr=0.1, clip=clip)
    states = states_of(fd.run(algorithm, fed, 1, evaluate_every=0))
    whole = np.array([3.0, 4.0, 1.0] if bias else [3.0, 4.0])
    want = [0.1 * 0.05 * whole, 0.1 * clip * whole / np.linalg.norm(whole)]
    for i, right in enumerate(want):
        found = np.concatenate([t.flatten() for t in states[i]["w"].values()])
        np.testing.assert_allclose(found, right, rtol=1e-5)


def test_crops_shift_rows_and_columns_independently():
    """Two marks in the middle of 19 x 19 images show shifts, -4 to 4 each way, and flips."""
    many = 81 * 100
    x = torch.zeros(many, 1, 19, 19)
    x[:, 0, 9, 9], x[:, 0, 9, 10] = 1.0, 2.0
    got = crop_flip(x, random.key(5)).numpy()[:, 0]
    at = lambda mark: np.argwhere(got == mark)[:, 1:]  # noqa: E731
    first, second = at(1.0), at(2.0)
    assert len(first) == len(second) == many
    flipped = second[:, 1] < first[:, 1]
    np.testing.assert_array_equal(second[:, 1] - first[:, 1], np.where(flipped, -1, 1))
    dy, dx = first[:, 0] - 9, np.where(flipped, 18 - first[:, 1], first[:, 1]) - 9
    assert {dy.min(), dx.min()} == {-4} and {dy.max(), dx.max()} == {4}
    for half in (flipped, ~flipped):  # 8100 / 2, standard deviation sqrt(8100) / 2 = 45
        assert half.sum() == pytest.approx(4050, abs=4 * 45)
    # Of 81 places each is as likely: chi-square has 80 degrees of freedom, so mean 80 and standard
    # deviation sqrt(160) = 12.6.
    places = np.bincount((dy + 4) * 9 + dx + 4, minlength=81)
    assert ((places - 100.0) ** 2 / 100).sum() < 80 + 4 * 12.6
    assert np.abs(np.corrcoef([dy, dx, flipped])[np.triu_indices(3, 1)]).max() < 4 / math.sqrt(many)


# -- divergence ------------------------------------------------------------------------------------


def growing() -> fd.Federation:
    """x = 1, so a step of lr = 1e7 makes about -1e7 w of w: 1e7, 1e14, 1e21.

    Half of the square of the last is above 3.4e38, the largest float32.
    """
    one = lambda y: (np.ones((2, 1), np.float32), np.full(2, y, np.float32))  # noqa: E731
    return fd.Federation.from_clients([one(1.0), one(2.0), one(3.0)], test=one(1.0))


def test_the_run_of_a_divergence_is_the_one_before_it():
    """The replies of round 3 are finite; it is the loss of its model that is not."""
    algorithm = fd.FedAvg(fd.Linear(bias=False), lr=1e7, server_momentum=0.3)
    with pytest.raises(
        fd.DivergenceError, match="round 3: the loss on the test set is inf"
    ) as caught:
        fd.run(algorithm, growing(), 9)
    run, before = caught.value.run, fd.run(algorithm, growing(), 2)
    assert caught.value.round == 3 and set(run.state) == {"w", "spec", "v"}
    same(run.state, before.state, "the state", tolerance=0.0)
    assert np.isfinite(run.history["loss"]).all() and run.history["round"].tolist() == [0, 1, 2]


@pytest.mark.xfail(strict=True, reason="client states are those after the round that diverged")
def test_the_run_of_a_divergence_has_the_clients_of_before():
    algorithm = fd.Scaffold(fd.Linear(bias=False), lr=1e7)
    with pytest.raises(fd.DivergenceError) as caught:
        fd.run(algorithm, growing(), 9)
    run = caught.value.run
    before = fd.run(algorithm, growing(), caught.value.round - 1)
    same(run.state, before.state, "the server", tolerance=0.0)
    same(states_of(run), states_of(before), "the clients", tolerance=0.0)


@pytest.mark.parametrize("radius", [0.5, 0.9, 0.99, 1.01, 1.2])
def test_fednewton_warns_exactly_where_it_diverges(radius):
    """One feature, one row against two: p = 1/3 and q = 2/3, Hessians a and b = r a.

    (p/a + q/b) (p a + q b) - 1 = p^2 + q^2 + p q (r + 1/r) - 1 = p q (r + 1/r - 2),
    as p^2 + q^2 = 1 - 2 p q. With p q = 2/9, a spectral radius R needs r + 1/r = s = 2 + 9/2 R,
    which is r = (s + sqrt(s^2 - 4)) / 2.
    """
    s, reg = 2 + 4.5 * radius, 0.1
    r = (s + math.sqrt(s * s - 4)) / 2
    # Client 0: x = 1, a = 1 + reg. Client 1: x^2 + reg = r a.
    x = math.sqrt(r * (1 + reg) - reg)
    parts = [
        (np.ones((1, 1), np.float32), np.array([1.0], np.float32)),
        (np.full((2, 1), x, np.float32), np.array([-1.0, 0.3], np.float32)),
    ]
    fed = fd.Federation.from_clients(parts)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = fd.run(fd.FedNewton(fd.Identity(), reg=reg), fed, 4, evaluate_every=0)
    said = [w for w in caught if issubclass(w.category, fd.DivergenceWarning)]
    assert len(said) == (1 if radius > 1 else 0)
    assert run.history["radius"].dropna().to_numpy() == pytest.approx(radius, rel=1e-5)
    assert "radius" in run.history and run.history["radius"].notna().sum() == (
        1 if radius > 1 else 3
    )


# -- FedBoost's step -------------------------------------------------------------------------------

TABLE = np.array([[0.7, 0.2, 0.1], [0.15, 0.6, 0.25], [0.3, 0.1, 0.6]])


def simplex(v: np.ndarray) -> np.ndarray:
    """The closest point of the simplex: max(v - theta, 0), theta by bisection."""
    low, high = v.min() - 1, v.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(v - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(v - low, 0)


@pytest.mark.parametrize("kind", ["entropy", "euclidean"])
def test_fedboosts_step_for_a_horizon(kind):
    """q = 3, T = 7: eta_t = sqrt(2 sigma r / T) / G_t, G_t the largest gradient so far.

    The gradient is measured in the dual norm.

    Entropy: sigma = 1 in |.|_1, r = log 3 (any point from the uniform one), dual norm the maximum.
    Euclidean: sigma = 1, r = |e_1 - (1/3, 1/3, 1/3)|^2 / 2 = (4/9 + 1/9 + 1/9) / 2 = 1/3, and the
    norm |.|_2 is its own dual.
    """
    r, order = (math.log(3), np.inf) if kind == "entropy" else (1 / 3, 2)
    labels = [[0, 0], [1, 1, 2], [2, 2, 0, 2, 1, 2, 2], [0, 1, 0, 0], [1, 1, 1, 1, 0]]
    fed = fd.Federation.from_clients(
        [(np.zeros((len(y), 1), np.float32), np.array(y)) for y in labels], classes=3
    )
    mirror = fd.Entropy() if kind == "entropy" else fd.Euclidean()
    algorithm = fd.FedBoost(
        fd.Densities(TABLE), sampling="all", mirror=mirror, horizon=7, floor=1e-3
    )
    rounds = 5
    cohorts = [who.tolist() for who in seen(fed, rounds).cohorts]
    alpha, total, steepest, squares, sizes = np.full(3, 1 / 3), np.zeros(3), 0.0, 0.0, []
    for t, who in enumerate(cohorts, 1):
        y = np.array([label for i in who for label in labels[i]])
        mixture = alpha @ TABLE[:, y]
        g = -(TABLE[:, y] / (mixture + 1e-3)).mean(1)
        total = total + alpha
        size = np.linalg.norm(g, order)
        sizes.append(size)
        steepest, squares = max(steepest, size), squares + size**2
        eta = math.sqrt(2 * r / 7) / steepest
        assert eta == pytest.approx(best_step(r, 1.0, 7, steepest), rel=1e-12)
        alpha = alpha * np.exp(-eta * g) if kind == "entropy" else simplex(alpha - eta * g)
        alpha = alpha / alpha.sum()
        run = fd.run(algorithm, fed, t, seed=11, participation=0.5, evaluate_every=0)
        want = {
            "alpha": alpha,
            "total": total,
            "rounds": t,
            "steepest": steepest,
            "squares": squares,
        }
        same(run.state, want, f"round {t}")
    # not always the last is the largest
    assert any(b < max(sizes[:t]) for t, b in enumerate(sizes) if t)
    assert any(b > max(sizes[:t]) for t, b in enumerate(sizes) if t)


# -- Krum ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Says(fd.Algorithm):
    """Clients send their number; the server keeps the average, or the sum in double precision."""

    add: bool = False

    def say(self, client: Any) -> tuple[Any, None]:
        x = client.data.x[0]
        return {"x": x.double() if self.add else x}, None

    def start(self, clients: Any) -> fd.State:
        return fd.State(x=torch.zeros(1))

    def round(self, clients: Any, state: fd.State) -> fd.State:
        return fd.State(**(clients.sum(self.say) if self.add else clients.mean(self.say)))


@pytest.mark.parametrize(
    ("numbers", "hostile", "want"),
    [
        # Seven clients, of whom the last sends NaN: 6 < 2 * 2 + 3, so it is one of the two hostile
        # ones, 6 - 1 - 2 = 3 neighbors.
        #   0: 1 + 4 + 16 = 21    1: 1 + 1 + 9 = 11    2: 1 + 4 + 4 = 9    4: 4 + 9 + 16 = 29
        #   9: 1 + 25 + 49 = 75   10: 1 + 36 + 64 = 101
        # With 2 neighbors 1 would win (1 + 1 = 2), with 4 the number 4 (4 + 9 + 16 + 25 = 54
        # against 58 of 2).
        ((0.0, 1.0, 2.0, 4.0, 9.0, 10.0, 5.0), 2, 2.0),
        # Eight: 7 >= 2 * 2 + 3, so two of those that are left may be hostile, 7 - 2 - 2 = 3
        # neighbors.
        #   0, 1, 2, 4 as above   9: 1 + 9 + 25 = 35   10: 1 + 4 + 36 = 41   12: 4 + 9 + 64 = 77
        # With 4 neighbors (of all eight) the number 4 would win (54 against 58 of 2), with 2 the
        # number 1.
        ((0.0, 1.0, 2.0, 4.0, 9.0, 10.0, 12.0, 5.0), 2, 2.0),
        # Without anybody dropped, 7 - 1 - 2 = 4 neighbors: 4 + 9 + 16 + 25 = 54 of the number 4.
        ((0.0, 1.0, 2.0, 4.0, 9.0, 10.0, 12.0), 1, 4.0),
    ],
)
def test_krums_neighbors_are_of_the_replies_that_are_left(numbers, hostile, want):
    broken = [i for i, v in enumerate(numbers) if v == 5.0]
    engine = fd.Hostile(clients=broken, attack="nan")
    aggregation = fd.Krum(hostile=hostile)
    run = fd.run(
        Says(), rows_of(*numbers), 1, engine=engine, aggregation=aggregation, evaluate_every=0
    )
    assert run.state.x.tolist() == [want]
    assert run.history["dropped"].iloc[-1] == len(broken)


# -- sums ------------------------------------------------------------------------------------------


def summed(*numbers: float) -> Accumulator:
    """Each number as a reply of its own, in the stream of one accumulator."""
    total = Accumulator()
    for i, v in enumerate(numbers):
        total.add(
            {"a": torch.tensor([[v, -v]], dtype=torch.float64)},
            torch.ones(1, dtype=torch.float64),
            1,
            torch.tensor([i]),
        )
    return total


@pytest.mark.parametrize(
    "workers",
    [
        [
            (1e16,),
            (1.0,),
            (-1e16,),
            (1.0,),
        ],  # doubles near 1e16 are 2 apart: 1e16 + 1 is 1e16, and in the end 1
        [(1e16, 1.0), (-1e16, 1.0)],
        [(1.0, 1e16, 1.0), (3.0, -1e16), (-3.0,)],
        [(1.0,), (1e16,), (1.0,), (-1e16,)],  # also where the small one comes first
    ],
    ids=str,
)
def test_what_rounding_takes_from_merged_sums_is_kept(workers):
    """In plain doubles these are 0 or 1; the sum is 2."""
    total = Accumulator()
    for numbers in workers:
        total.merge(summed(*numbers), 1, torch.tensor([0]))
    assert total.result()["a"].tolist() == [2.0, -2.0]


def test_a_run_sums_replies_of_double_precision_exactly():
    """One client after the other. float32 knows 2^60, and doubles near it are 256 apart."""
    fed = rows_of(2.0**60, 1.0, -(2.0**60), 1.0)
    run = fd.run(Says(add=True), fed, 1, engine=fd.Local(batch=False), evaluate_every=0)
    assert run.state.x.dtype == torch.float64 and run.state.x.tolist() == [2.0]


# -- the privacy account ---------------------------------------------------------------------------

CRASH: list[tuple[int, int]] = []
"""(round, exchange) after which the process dies: not a setting, or a resume would be refused."""

ENTERED: list[int] = []
"""The rounds that were begun."""


@dataclasses.dataclass(frozen=True)
class Asks(Says):
    """Several averages a round, and some before the first."""

    exchanges: int = 2
    first: int = 1

    def start(self, clients: Any) -> fd.State:
        return fd.State(x=[clients.mean(self.say)["x"] for _ in range(self.first)])

    def round(self, clients: Any, state: fd.State) -> fd.State:
        ENTERED.append(clients.round)
        got = []
        for k in range(self.exchanges):
            got.append(clients.mean(self.say)["x"])
            if (clients.round, k + 1) in CRASH:
                CRASH.remove((clients.round, k + 1))
                raise KeyboardInterrupt
        return fd.State(x=got)


def account(
    fed: fd.Federation,
    algorithm: fd.Algorithm,
    rounds: int,
    budget: float | None = None,
    **more: Any,
) -> fd.Run:
    aggregation = fd.DifferentialPrivacy(
        clip=1.0, noise=2.3, delta=1e-3, budget=budget, accountant="rdp"
    )
    more = {"participation": fd.Poisson(0.37), **more}
    return fd.run(algorithm, fed, rounds, aggregation=aggregation, evaluate_every=0, **more)


def test_epsilon_after_a_resume_is_that_of_a_run_in_one_piece(tmp_path):
    """Stopped and resumed twice, with one exchange before the first round and two in each round."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    fed, path = rows_of(*range(6)), tmp_path / "c.safetensors"
    whole = account(fed, Asks(), 5)
    for rounds in (1, 3, 5):
        again = account(fed, Asks(), rounds, checkpoint=path, resume="auto")
    assert again.history["epsilon"].tolist() == whole.history["epsilon"].tolist()
    # A round of two exchanges is one sample of noise 2.3 / sqrt(2); everybody is asked once before.
    want = [epsilon({(1.0, 2.3, 1): 1, (0.37, 2.3, 2): t}, 1e-3, "rdp") for t in range(6)]
    assert whole.history["epsilon"].tolist() == pytest.approx(want, rel=1e-9)
    assert np.all(np.diff(want) > 0)
    accountant = RdpAccountant()
    accountant.compose(GaussianDpEvent(2.3))
    accountant.compose(PoissonSampledDpEvent(0.37, GaussianDpEvent(2.3 / math.sqrt(2))), 5)
    # Its orders are not only integers, so its bound may be a little lower.
    assert accountant.get_epsilon(1e-3) <= want[-1] + 1e-9
    assert want[-1] == pytest.approx(accountant.get_epsilon(1e-3), rel=0.02)


@pytest.mark.parametrize("every", [1, 2])
def test_rounds_that_a_crash_undid_are_accounted(tmp_path, every):
    """Dead after the first average of round 4, then after the second: both were released.

    With a checkpoint every 2 rounds, nothing but the journal knows of the last ones.
    """
    fed, path = rows_of(*range(6)), tmp_path / "c.safetensors"
    more = {"checkpoint": path, "checkpoint_every": every, "resume": "auto"}
    for crash in ((4, 1), (4, 2)):
        CRASH[:] = [crash]
        with pytest.raises(KeyboardInterrupt):
            account(fed, Asks(), 5, **more)
    assert not CRASH
    run = account(fed, Asks(), 5, **more)
    # Round 4 with one average, lost, and with two, lost. With a checkpoint every 2 rounds, round 3
    # was made three times, too.
    twice = 2 if every == 2 else 0
    lost = {(1.0, 2.3, 1): 1, (0.37, 2.3, 1): 1, (0.37, 2.3, 2): 5 + 1 + twice}
    assert run.history["epsilon"].iloc[-1] == pytest.approx(epsilon(lost, 1e-3, "rdp"), rel=1e-9)
    assert run.history["epsilon"].iloc[-1] > account(fed, Asks(), 5).history["epsilon"].iloc[-1]


@pytest.mark.parametrize("exchanges", [2, 3])
def test_a_round_of_several_exchanges_that_the_budget_does_not_cover_is_not_begun(
    tmp_path, exchanges
):
    """Everybody in every round: n exchanges cost what one of noise 2.3 / sqrt(n) does.

    The budget covers three rounds and all exchanges of a fourth but its last.
    """
    cost = lambda n: epsilon({(1.0, 2.3, n): 1}, 1e-3, "rdp")  # noqa: E731
    budget = (cost(4 * exchanges - 1) + cost(4 * exchanges)) / 2
    fed, path = rows_of(*range(6)), tmp_path / "c.safetensors"
    more = {"budget": budget, "participation": 1.0, "checkpoint": path, "resume": "auto"}
    ENTERED.clear()
    run = account(fed, Asks(exchanges=exchanges, first=0), 9, **more)
    assert ENTERED == [1, 2, 3] == run.history["round"].tolist()[1:]
    assert run.history["epsilon"].iloc[-1] == pytest.approx(cost(3 * exchanges), rel=1e-9)
    account(fed, Asks(exchanges=exchanges, first=0), 9, **more)  # and again not after a resume
    assert ENTERED == [1, 2, 3]


# -- what the twins rest on ------------------------------------------------------------------------


def test_all_mini_batches_of_copies_have_one_gradient():
    """Or the twins of clients with unequal numbers of steps would depend on permutations."""
    case: Case = copies()
    for (x, y), (x_first, y_first) in zip(
        case.rows, [(x[:1], y[:1]) for x, y in case.rows], strict=True
    ):
        whole, one = (case.gradient_on(a, b, case.start) for a, b in ((x, y), (x_first, y_first)))
        np.testing.assert_allclose(whole, one, rtol=1e-12)
