"""Robust means: against independent closed forms, their breakdown points as properties, and in runs
on every engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import foedus as fd
from foedus.aggregation.robust import _CHUNK, Robust
from foedus.core.participation import Poisson
from foedus.wire.arrays import LowRank, Signs, Sparse

EVERY = (
    fd.NormBound(),
    fd.NormBound(2.0),
    fd.TrimmedMean(0.3),
    fd.Median(),
    fd.GeometricMedian(),
    fd.Krum(1),
    fd.Krum(1, select=3),
)


def even(n: int) -> torch.Tensor:
    return torch.full((n,), 1 / n, dtype=torch.float64)


def rows(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32))


# -- against closed forms --------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_median_is_numpys(n):
    x = rows(n, 7)
    torch.testing.assert_close(
        fd.Median().combine(x, even(n)), torch.from_numpy(np.median(x.numpy(), 0))
    )


@pytest.mark.parametrize(("n", "part"), [(10, 0.1), (10, 0.4), (7, 2 / 7), (20, 0.25)])
def test_trimmed_mean_is_scipys(n, part):
    x = rows(n, 7)
    expected = scipy.stats.trim_mean(x.double().numpy(), part + 1e-12, 0)
    torch.testing.assert_close(
        fd.TrimmedMean(part).combine(x, even(n)).double(),
        torch.from_numpy(expected),
        rtol=0,
        atol=1e-6,
    )


def test_of_a_client_at_the_edge_as_much_is_cut_as_it_takes():
    # 0.4 of 4 clients is 1.6: of 1 and 2, 0.4 each are left
    x = torch.tensor([[0.0], [1.0], [2.0], [30.0]])
    torch.testing.assert_close(fd.TrimmedMean(0.4).combine(x, even(4)), torch.tensor([1.5]))
    x = torch.tensor([[0.0], [1.0], [4.0]])  # 0.2 of 3 is 0.6: 0.4 of 0 and of 4, all of 1
    torch.testing.assert_close(
        fd.TrimmedMean(0.2).combine(x, even(3)), torch.tensor([(0.4 * 4 + 1) / 1.8])
    )


@pytest.mark.parametrize(
    "mean", [fd.Median(), fd.TrimmedMean(0.25), fd.GeometricMedian(tolerance=1e-9)], ids=repr
)
def test_a_weight_of_three_is_three_clients(mean):
    x, times = rows(5, 6), torch.tensor([1, 3, 2, 1, 1])
    repeated = x.repeat_interleave(times, 0)
    torch.testing.assert_close(
        mean.combine(x, times / 8.0 + torch.zeros(5).double()),
        mean.combine(repeated, even(8)),
        rtol=0,
        atol=2e-6,
    )


@pytest.mark.parametrize("seed", range(3))
def test_geometric_median_equals_that_of_another_optimizer(seed):
    x, w = (
        rows(9, 4, seed).double(),
        torch.from_numpy(np.random.default_rng(seed).dirichlet(np.ones(9))),
    )
    objective = lambda v: float(  # noqa: E731
        (w * torch.linalg.vector_norm(x - torch.from_numpy(v), dim=1)).sum()
    )
    best = scipy.optimize.minimize(
        objective,
        x.mean(0).numpy(),
        method="Nelder-Mead",
        options={"xatol": 1e-9, "fatol": 1e-12, "maxiter": 20000},
    )
    found = fd.GeometricMedian(tolerance=1e-8).combine(x, w)
    assert objective(found.numpy()) <= best.fun + 1e-7
    np.testing.assert_allclose(found.numpy(), best.x, atol=1e-3)


def test_geometric_median_of_points_in_one_place():
    x = torch.tensor([[1.0, 2.0]] * 3 + [[50.0, 9.0], [-7.0, 1e30]])
    torch.testing.assert_close(fd.GeometricMedian().combine(x, even(5)), torch.tensor([1.0, 2.0]))
    # Fermat's point of an equilateral triangle
    triangle = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 3**0.5 / 2]])
    torch.testing.assert_close(
        fd.GeometricMedian().combine(triangle, even(3)), triangle.mean(0), rtol=0, atol=1e-4
    )


def test_krum_by_hand():
    x = torch.tensor([[0.0], [1.0], [1.5], [2.5], [100.0]])  # n - hostile - 2 = 2 neighbors each
    scores = [1 + 2.25, 0.25 + 1, 0.25 + 1, 1 + 2.25, 97.5**2 + 98.5**2]
    torch.testing.assert_close(fd.Krum.scores(x, 1), torch.tensor(scores, dtype=torch.float64))
    assert fd.Krum(1).combine(x, even(5)).tolist() == [1.0]  # of two, the first
    w = torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2], dtype=torch.float64)
    torch.testing.assert_close(
        fd.Krum(1, select=2).combine(x, w), torch.tensor([(0.2 * 1 + 0.3 * 1.5) / 0.5])
    )


def test_norm_bound_by_hand():
    x = torch.tensor([[3.0, 4.0], [0.6, 0.8], [0.0, 0.0], [0.0, 1e30]])
    torch.testing.assert_close(
        fd.NormBound(2.0).combine(x, even(4)), torch.tensor([1.8, 1.6 + 0.8 + 2.0]) / 4
    )
    # norms 0, 1, 5, 1e30
    torch.testing.assert_close(
        fd.NormBound().combine(x, even(4)), torch.tensor([1.2, 0.8 * 2 + 1]) / 4
    )


def test_many_columns_are_taken_in_parts(monkeypatch):
    x = rows(6, 1000)
    whole = [mean.combine(x, even(6)) for mean in EVERY]
    monkeypatch.setattr("foedus.aggregation.robust._CHUNK", 6 * 64)
    for mean, expected in zip(EVERY, whole, strict=True):
        torch.testing.assert_close(mean.combine(x, even(6)), expected)
    assert _CHUNK >= 1 << 20


@pytest.mark.parametrize("mean", EVERY, ids=repr)
def test_replies_that_agree_are_their_mean(mean):
    x = rows(1, 5).repeat(7, 1)
    x = x / torch.linalg.vector_norm(x[0])
    torch.testing.assert_close(mean.combine(x, even(7)), x[0])


# -- breakdown -------------------------------------------------------------------------------------

HONEST = arrays(
    np.float32,
    st.tuples(st.integers(6, 12), st.integers(1, 4)),
    elements=st.floats(-10, 10, width=32),
)
LIES = st.sampled_from([3e38, -3e38, 1e30, -1e15, 0.0, 7.0, -100.0])


@st.composite
def attacked(draw, part: float):
    """Honest rows, and with them, at places of their own, fewer hostile ones than `part` of all."""
    honest = draw(HONEST)
    most = int(np.ceil(part * len(honest) / (1 - part))) - 1
    count = draw(st.integers(0, most))
    lies = draw(arrays(np.float32, (count, honest.shape[1]), elements=LIES.map(np.float32)))
    order = draw(st.permutations(range(len(honest) + count)))
    return torch.from_numpy(honest), torch.from_numpy(np.concatenate([honest, lies])[list(order)])


@settings(max_examples=40, deadline=None)
@given(attacked(0.5))
def test_median_stays_among_the_honest(case):
    honest, x = case
    found = fd.Median().combine(x, even(len(x)))
    assert ((found >= honest.amin(0)) & (found <= honest.amax(0))).all()


@settings(max_examples=40, deadline=None)
@given(attacked(0.3))
def test_trimmed_mean_stays_among_the_honest(case):
    honest, x = case
    found = fd.TrimmedMean(0.3).combine(x, even(len(x)))
    assert ((found >= honest.amin(0) - 1e-5) & (found <= honest.amax(0) + 1e-5)).all()


@settings(max_examples=40, deadline=None)
@given(attacked(0.4))
def test_geometric_median_stays_near_the_honest(case):
    honest, x = case
    hostile = 1 - len(honest) / len(x)
    center = honest.mean(0)
    radius = torch.linalg.vector_norm(honest - center, dim=1).max()
    found = fd.GeometricMedian().combine(x, even(len(x)))
    assert (
        torch.linalg.vector_norm(found - center)
        <= 2 * (1 - hostile) / (1 - 2 * hostile) * radius * 1.001 + 1e-4
    )


@settings(max_examples=40, deadline=None)
@given(attacked(0.5))
def test_norm_bound_is_no_longer_than_the_honest(case):
    honest, x = case
    found = fd.NormBound().combine(x, even(len(x)))
    assert torch.linalg.vector_norm(found) <= torch.linalg.vector_norm(honest, dim=1).max() * (
        1 + 1e-5
    )


@settings(max_examples=40, deadline=None)
@given(HONEST, st.integers(0, 2), st.sampled_from([1e4, 1e15, 3e38]))
def test_krum_does_not_take_those_who_are_far_away(honest, hostile, far):
    signs = np.where(np.arange(hostile) % 2, 1, -1)[:, None]
    x = torch.from_numpy(
        np.concatenate(
            [honest, np.full((hostile, honest.shape[1]), far, np.float32) * signs]
        ).astype(np.float32)
    )
    hostile = min(hostile, (len(x) - 3) // 2)
    found = fd.Krum(hostile).combine(x, even(len(x)))
    assert (torch.from_numpy(honest) == found).all(1).any()


# -- in runs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Say(fd.Algorithm):
    """Clients say a number of theirs: the mean of their rows; broken ones, which have more than
    100, something not finite.
    """

    form: str = "dense"
    total: bool = False
    single: bool = False

    def say(self, client):
        x = client.data.x.mean(0)
        x = torch.where(x > 100, torch.inf, x)
        forms = {
            "dense": lambda: x,
            "sparse": lambda: Sparse(torch.tensor([0, 2]), x[[0, 2]], (3,)),
            "signs": lambda: Signs.pack(x, torch.tensor(2.0)),
            "rank": lambda: LowRank(x.unsqueeze(1), torch.ones(2, 1)),
        }
        return {"said": forms[self.form]()}, None

    def start(self, clients):
        return fd.State(said=torch.zeros(3), came=clients.ids)

    def round(self, clients, state):
        ask = clients.gather if self.single else clients.sum if self.total else clients.mean
        return fd.State(said=ask(self.say)["said"], came=clients.answered)


def saying(*values: float) -> fd.Federation:
    """Clients of different sizes (a row more each) who say (v, -v, 2 v)."""
    one = lambda v, n: (  # noqa: E731
        np.tile(np.array([[v, -v, 2 * v]], np.float32), (n, 1)),
        np.zeros(n, np.float32),
    )
    return fd.Federation.from_clients([one(v, n + 1) for n, v in enumerate(values)])


def said(algorithm, fed, mean, **options):
    return fd.run(algorithm, fed, 1, evaluate_every=0, aggregation=mean, **options)


def test_clients_are_weighted_by_rows_by_default():
    fed = saying(1.0, 2.0, 3.0, 4.0, 50.0)  # of 1 to 5 rows: half of 15 lies within the fourth
    assert said(Say(), fed, fd.Median()).state.said.tolist() == [4.0, -4.0, 8.0]
    assert said(Say(), fed, fd.Median(weighted=False)).state.said.tolist() == [3.0, -3.0, 6.0]
    # of sums, clients count
    assert said(Say(total=True), fed, fd.Median()).state.said.tolist() == [15.0, -15.0, 30.0]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("dense", [3, -3, 6]),
        ("sparse", [3, 0, 6]),
        ("signs", [2, -2, 2]),
        ("rank", [[3, 3], [-3, -3], [6, 6]]),
    ],
)
def test_structured_replies_are_made_dense(form, expected):
    found = said(
        Say(form=form), saying(1.0, 2.0, 3.0, 4.0, 50.0), fd.Median(weighted=False)
    ).state.said
    assert found.tolist() == torch.tensor(expected).float().tolist()


@pytest.mark.parametrize("mean", [*EVERY, None], ids=repr)
def test_what_is_not_finite_is_dropped_named_and_counted(mean):
    fed = saying(1.0, 1.0, 200.0, 1.0, 1.0, 1.0, 300.0)
    if mean is None:  # an honest run that diverges says so
        with pytest.raises(fd.DivergenceError, match="the reply of client"):
            said(Say(), fed, mean)
        return
    run = said(Say(), fed, mean)
    bound = 1 if getattr(mean, "bound", None) != 2.0 else 2 / 6**0.5
    torch.testing.assert_close(run.state.said, torch.tensor([1.0, -1.0, 2.0]) * bound)
    assert run.state.came.tolist() == [0, 1, 3, 4, 5]
    assert run.history.dropped.tolist()[1] == 2
    assert (
        run.history.left_out[1]
        == "2: its reply is not finite (NaN or infinity); 6: its reply is not finite (NaN or "
        "infinity)"
    )


def test_batches_of_clients_leave_no_trace():
    fed = saying(*range(1, 30))
    for mean in EVERY:
        batched, looped = (
            said(Say(), fed, mean, engine=fd.Local(batch=b)).state.said for b in (True, False)
        )
        torch.testing.assert_close(batched, looped)


def test_under_delay_what_has_arrived_is_combined():
    fed = saying(1.0, 2.0, 3.0, 40.0)
    engine = fd.Delayed(up=[0, 0, 0, 1])
    assert said(Say(), fed, fd.Median(weighted=False), engine=engine).state.said.tolist() == [
        2.0,
        -2.0,
        4.0,
    ]
    later = fd.run(
        Say(), fed, 2, evaluate_every=0, aggregation=fd.Median(weighted=False), engine=engine
    )
    assert later.state.said.tolist() == [2.5, -2.5, 5.0]


@pytest.mark.slow
def test_on_ray_as_in_one_process():
    fed = saying(1.0, 2.0, 200.0, 4.0, 50.0)
    here, there = (said(Say(), fed, fd.Median(), engine=e) for e in (fd.Local(), fd.Ray(workers=2)))
    assert (
        torch.equal(here.state.said, there.state.said)
        and there.history.left_out[1] == here.history.left_out[1]
    )


def test_algorithms_that_look_at_every_reply_are_refused():
    with pytest.raises(fd.ConfigError, match="Say looks at every reply to say itself"):
        said(Say(single=True), saying(1.0, 2.0), fd.Median())


def test_clients_that_send_nothing_have_no_mean():
    fed = fd.split(fd.load("digits"), "iid", clients=3, seed=0)
    assert (
        fd.run(fd.Independent(fd.Linear()), fed, 1, aggregation=fd.Median()).history.own_accuracy[1]
        > 0.5
    )


def test_krum_needs_clients():
    with pytest.raises(
        fd.ConfigError, match="hostile=2 and select=1 need at least 7 clients a round; there are 6"
    ):
        said(Say(), saying(*range(6)), fd.Krum(2))
    with pytest.raises(fd.ConfigError, match="there are 5"):
        said(Say(), saying(*range(10)), fd.Krum(2), participation=Poisson(0.5))
    # four are left; the one that was dropped was the hostile one
    fed = saying(1.0, 2.0, 3.0, 4.0, 200.0)
    assert said(Say(), fed, fd.Krum(1)).state.said[0] in (1.0, 2.0, 3.0, 4.0)
    with pytest.raises(fd.TooFewClients, match="needs 3 replies that can be used; 2 came"):
        said(Say(), saying(1.0, 2.0, 200.0, 300.0, 400.0), fd.Krum(1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fd.NormBound("mean"), "bound='mean' must be a positive finite number or 'median'"),
        (lambda: fd.NormBound(-1.0), "bound=-1.0"),
        (
            lambda: fd.TrimmedMean(0.5),
            "part=0.5 must be a number above 0 and below 0.5; it is what is cut off",
        ),
        (lambda: fd.Krum(-1), "hostile=-1"),
        (lambda: fd.Krum(1, select=0), "select=0"),
        (lambda: fd.GeometricMedian(tolerance=0), "tolerance=0"),
    ],
)
def test_settings_that_are_refused(make, message):
    with pytest.raises(fd.ConfigError, match=message):
        make()


def test_a_run_goes_on_from_a_checkpoint(tmp_path):
    fed, path = fd.split(fd.load("digits"), "iid", clients=5, seed=0), tmp_path / "c.safetensors"
    options = {"aggregation": fd.TrimmedMean(0.2), "evaluate_every": 0}
    whole = fd.run(fd.FedAvg(fd.Linear()), fed, 3, **options)
    fd.run(fd.FedAvg(fd.Linear()), fed, 1, checkpoint=path, **options)
    again = fd.run(fd.FedAvg(fd.Linear()), fed, 3, checkpoint=path, resume=True, **options)
    assert all(torch.equal(again.state.w[k], whole.state.w[k]) for k in whole.state.w)
    with pytest.raises(fd.CheckpointError, match="aggregation"):
        fd.run(
            fd.FedAvg(fd.Linear()),
            fed,
            3,
            checkpoint=path,
            resume=True,
            aggregation=fd.TrimmedMean(0.3),
            evaluate_every=0,
        )


def test_a_custom_mean():
    @dataclass(frozen=True)
    class Least(Robust):
        def combine(self, x, weights, dropped=0):
            return x.amin(0)

    assert said(Say(), saying(1.0, 2.0), Least()).state.said.tolist() == [1.0, -2.0, 2.0]
