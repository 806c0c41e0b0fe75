"""FedBoost and AFLBoost: steps by hand, expectations by enumeration, optima by SciPy, the facts of
Section 3, and bad input.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import foedus as fd
from foedus import wire
from foedus.base.rows import Rows

TWO = fd.Densities([[0.8, 0.2], [0.3, 0.7]])


def labels(*counts, classes=None) -> fd.Federation:
    """A client for each list of how often it has each label."""
    parts = [np.repeat(np.arange(len(c)), c) for c in counts]
    data = [(np.zeros((len(y), 1), np.float32), y) for y in parts]
    return fd.Federation.from_clients(data, classes=classes or len(counts[0]))


def ends(algorithm, fed, rounds, **options):
    return fd.run(algorithm, fed, rounds, evaluate_every=0, **options).state


# -- by hand ---------------------------------------------------------------------------------------


def test_two_rounds_of_exponentiated_gradient_by_hand():
    """One client with labels (0, 0, 0, 1); log loss, eta = 0.5, all predictors.

    Round 1 at (1/2, 1/2): mixture (0.55, 0.45); d_k = -(3/4 h_k(0) / 0.55 + 1/4 h_k(1) / 0.45).
    """
    alpha = np.array([0.5, 0.5])
    table = np.array([[0.8, 0.2], [0.3, 0.7]])
    seen = []
    for _ in range(2):
        seen.append(alpha)
        mixed = alpha @ table
        d = -(table @ (np.array([0.75, 0.25]) / mixed))
        v = alpha * np.exp(-0.5 * d)
        alpha = v / v.sum()
    d1 = -(0.75 * 0.8 / 0.55 + 0.25 * 0.2 / 0.45)
    assert d1 == pytest.approx(-1.2020202)
    state = ends(fd.FedBoost(TWO, sampling="all", step=0.5, floor=1e-12), labels([3, 1]), 2)
    np.testing.assert_allclose(state.alpha, alpha, atol=1e-6)
    np.testing.assert_allclose(state.total / 2, np.mean(seen, 0), atol=1e-6)


def test_two_rounds_of_projected_gradient_by_hand():
    """Squared loss, eta = 0.1: d_k = 2 <mixture - (3/4, 1/4), h_k>; alpha - eta d, projected on the
    line of sum 1.
    """
    alpha, table, p = (
        np.array([0.5, 0.5]),
        np.array([[0.8, 0.2], [0.3, 0.7]]),
        np.array([0.75, 0.25]),
    )
    for _ in range(2):
        v = alpha - 0.1 * 2 * table @ (alpha @ table - p)
        alpha = v + (1 - v.sum()) / 2
    algorithm = fd.FedBoost(TWO, sampling="all", mirror=fd.Euclidean(), loss="squared", step=0.1)
    np.testing.assert_allclose(ends(algorithm, labels([3, 1]), 2).alpha, alpha, atol=1e-6)
    # The first step by hand: mixture - p = (-0.2, 0.2), d = 2 (-0.12, 0.08), v = (0.524, 0.484),
    # alpha = (0.52, 0.48).
    np.testing.assert_allclose(ends(algorithm, labels([3, 1]), 1).alpha, [0.52, 0.48], atol=1e-6)


def test_clients_count_by_their_rows():
    """Two clients of 3 and 1 rows give the gradient of all four rows in one place."""
    algorithm = fd.FedBoost(TWO, sampling="all", step=0.5)
    apart, together = ends(algorithm, labels([3, 0], [0, 1]), 3), ends(algorithm, labels([3, 1]), 3)
    np.testing.assert_allclose(apart.alpha, together.alpha, atol=1e-6)


def test_the_probabilities_are_those_of_the_paper():
    """Equation 8: min(1, C alpha_k); uniform: C / q; a budget of C R with repeats."""
    four = fd.Densities(np.eye(4))
    alpha = torch.tensor([0.6, 0.3, 0.1, 0.0], dtype=torch.float64)
    ask = lambda **k: fd.FedBoost(four, **k).probabilities(alpha).tolist()  # noqa: E731
    assert ask(budget=2) == pytest.approx([1, 0.6, 0.2, 0])
    assert ask(budget=2, sampling="uniform") == [0.5] * 4
    assert ask(budget=1, repeats=2) == pytest.approx([1, 0.6, 0.2, 0])
    assert ask(budget=2, explore=0.5) == pytest.approx([0.75, 0.55, 0.35, 0.25])
    assert ask(sampling="all") == [1] * 4


def test_the_default_step_is_that_of_theorem_2():
    """With a horizon, sqrt(2 r sigma / T) / G, r = log q and G the largest gradient so far in the
    maximum norm.
    """
    fed, q = labels([3, 1]), 2
    algorithm = fd.FedBoost(TWO, sampling="all", horizon=10, floor=1e-12)
    d = -np.array([[0.8, 0.2], [0.3, 0.7]]) @ (np.array([0.75, 0.25]) / np.array([0.55, 0.45]))
    eta = math.sqrt(2 * math.log(q) / 10) / np.abs(d).max()
    v = np.exp(-eta * d)
    np.testing.assert_allclose(ends(algorithm, fed, 1).alpha, v / v.sum(), atol=1e-6)


# -- expectations by enumeration -------------------------------------------------------------------


def expectation(algorithm: fd.FedBoost, fed, alpha: np.ndarray, gamma: np.ndarray) -> np.ndarray:
    """The mean of the server's gradient over all 2^q samples, each with its probability."""
    total = np.zeros(len(alpha))
    weights, chances = torch.tensor(alpha), torch.tensor(gamma)
    for sent in itertools.product([False, True], repeat=len(alpha)):
        chance = np.prod(np.where(sent, gamma, 1 - gamma))
        which = torch.tensor(sent).nonzero().flatten()
        if not len(which) or not chance:
            continue
        payload = algorithm.payload(weights, chances, which)
        slope = client_slope(algorithm, fed, **{**payload, "which": which})
        total += chance * algorithm.whole(slope, which, chances).numpy()
    return total


def client_slope(algorithm, fed, which, weight, excess=None) -> torch.Tensor:
    """The one client's gradient."""
    data = fed.data
    rows = Rows(
        torch.from_numpy(data.x_train),
        torch.from_numpy(data.y_train),
        torch.arange(len(data.y_train)),
        torch.ones(len(data.y_train)),
        fed.spec,
    )
    prepared = algorithm.prepare(rows)
    return algorithm.predictors.loss(
        prepared, rows, which, None, weight, algorithm.loss, algorithm.floor, excess
    )[1]


@pytest.mark.parametrize("alpha", [(0.5, 0.3, 0.2), (0.05, 0.9, 0.05)])
@pytest.mark.parametrize("gamma", [(0.5, 0.5, 0.5), (0.9, 0.2, 0.6), (1.0, 0.1, 0.3)])
@pytest.mark.parametrize("kind", ["densities", "classifiers"])
def test_the_corrected_gradient_is_unbiased_and_the_other_is_not(alpha, gamma, kind):
    """Over all samples: the corrected estimate is the gradient; the uncorrected is off by 2 alpha
    (1/gamma - 1) mean |h|^2.
    """
    alpha, gamma = np.array(alpha), np.array(gamma)
    rng = np.random.default_rng(1)
    if kind == "densities":
        table = rng.dirichlet(np.ones(4), 3)
        fed, members = labels([3, 1, 4, 2]), fd.Densities(table)
        p = np.array([0.3, 0.1, 0.4, 0.2])
        exact = 2 * table @ (alpha @ table - p)
        squares = (table**2).sum(1)
    else:
        nets = [torch.nn.Linear(2, 3) for _ in range(3)]
        x, y = rng.normal(size=(7, 2)).astype(np.float32), np.array([0, 1, 2, 0, 1, 2, 2])
        fed, members = fd.Federation.from_clients([(x, y)], classes=3), fd.Classifiers(nets, 3)
        with torch.no_grad():
            h = torch.stack([net(torch.from_numpy(x)).softmax(-1) for net in nets]).double().numpy()
        mixed = np.einsum("q,qnk->nk", alpha, h)
        exact = 2 * np.einsum("qnk,nk->q", h, mixed - np.eye(3)[y]) / 7
        squares = (h**2).sum((1, 2)) / 7
    plain = fd.FedBoost(members, budget=2, loss="squared")
    right = fd.FedBoost(members, budget=2, loss="squared", bias_correction=True)
    np.testing.assert_allclose(expectation(right, fed, alpha, gamma), exact, atol=1e-5)
    bias = 2 * alpha * (1 / gamma - 1) * squares
    np.testing.assert_allclose(expectation(plain, fed, alpha, gamma), exact + bias, atol=1e-5)
    assert bias.max() > 0.01


# -- the optimum -----------------------------------------------------------------------------------


def missed(seed, loss, mirror, rounds, step=None) -> tuple[float, float]:
    """By how much a run is above the loss of SciPy's optimum, and by how much it may be."""
    rng = np.random.default_rng(seed)
    table = 0.9 * rng.dirichlet(np.ones(6), 4) + 0.1 / 6
    counts = rng.integers(1, 20, (3, 6))
    p = counts.sum(0) / counts.sum()

    def value(alpha):
        mixed = alpha @ table
        return -(p * np.log(mixed)).sum() if loss == "log" else mixed @ mixed - 2 * p @ mixed + 1

    best = scipy.optimize.minimize(
        value,
        np.full(4, 0.25),
        bounds=[(0, 1)] * 4,
        constraints={"type": "eq", "fun": lambda a: a.sum() - 1},
        options={"ftol": 1e-12, "maxiter": 500},
    )
    algorithm = fd.FedBoost(
        fd.Densities(table),
        sampling="all",
        loss=loss,
        mirror=mirror,
        step=step,
        measure_every=0,
        floor=1e-9,
    )
    state = ends(algorithm, labels(*counts), rounds)
    assert float(state.alpha.sum()) == pytest.approx(1)
    enough = 2e-3 * max(1e-3, value(np.full(4, 0.25)) - best.fun) + 1e-3
    return value(state.alpha.numpy()) - best.fun, enough


# With these steps, all seeds are within half of what is allowed.
PACES = {
    ("log", fd.Entropy()): 2.0,
    ("log", fd.Euclidean()): 0.5,
    ("squared", fd.Entropy()): 3.0,
    ("squared", fd.Euclidean()): 1.5,
}


@pytest.mark.parametrize("kind", PACES, ids=lambda kind: f"{kind[0]}, {type(kind[1]).__name__}")
@settings(max_examples=1, deadline=None)
@given(seed=st.integers(0, 1000))
def test_it_finds_the_optimum_that_scipy_finds(kind, seed):
    gap, enough = missed(seed, *kind, rounds=200, step=PACES[kind])
    assert gap < enough


@pytest.mark.parametrize("kind", PACES, ids=lambda kind: f"{kind[0]}, {type(kind[1]).__name__}")
def test_the_default_step_finds_it_too(kind):
    gap, enough = missed(2, *kind, rounds=250)
    assert gap < enough


def test_sampling_goes_to_the_same_optimum():
    """With the correction, a third of the predictors a round; without it, more bandwidth is less
    bias.
    """
    rng = np.random.default_rng(0)
    table, p = rng.dirichlet(np.ones(8), 6), None
    fed = labels((rng.dirichlet(np.ones(8)) * 400).astype(int) + 1)
    p = np.bincount(fed.data.y_train, minlength=8) / len(fed.data.y_train)

    def value(alpha):
        mixed = alpha @ table
        return mixed @ mixed - 2 * p @ mixed + 1

    options = {"loss": "squared", "measure_every": 0}
    exact = value(
        ends(fd.FedBoost(fd.Densities(table), sampling="all", **options), fed, 100).alpha.numpy()
    )
    excess = {}
    for name, rounds, more in (
        ("corrected", 600, {"budget": 2, "bias_correction": True}),
        ("plain", 600, {"budget": 2}),
        ("repeats", 100, {"budget": 2, "repeats": 3}),
    ):
        state = ends(
            fd.FedBoost(fd.Densities(table), sampling="uniform", **more, **options), fed, rounds
        )
        excess[name] = value((state.total / state.rounds).numpy()) - exact
    assert excess["corrected"] < 0.25 * excess["plain"]
    assert excess["repeats"] < 0.25 * excess["plain"]  # six of six: a bandwidth of C R


# -- what is sent ----------------------------------------------------------------------------------


def test_bytes_do_not_depend_on_the_number_of_predictors():
    down = {}
    for q in (10, 100, 1000):
        table = np.full((q, 50), 1 / 50)
        fed = labels(np.ones(50, int))
        history = fd.run(
            fd.FedBoost(fd.Densities(table), budget=5, sampling="uniform"),
            fed,
            60,
            evaluate_every=0,
        ).history
        down[q] = history.bytes_down.iloc[-1] / history.sent.sum()
    assert max(down.values()) < 1.1 * min(down.values())


def test_clients_send_as_many_numbers_as_predictors():
    """C numbers for FedBoost; one more, the loss, for AFLBoost."""
    fed, members = labels([3, 1, 2], [1, 1, 1]), fd.Densities(np.eye(3))
    for kind, reply in ((fd.FedBoost, {}), (fd.AFLBoost, {"loss": torch.zeros(())})):
        history = fd.run(kind(members, sampling="all", floor=0.1), fed, 4, evaluate_every=0).history
        assert history.bytes_up.iloc[-1] == 4 * 2 * wire.nbytes({**reply, "slope": torch.zeros(3)})


def test_a_cache_sends_every_predictor_once_and_changes_no_result():
    fed = labels(*np.random.default_rng(0).integers(1, 3, (6, 200)))
    table = np.random.default_rng(1).dirichlet(np.ones(200), 7)
    runs = [
        fd.run(
            fd.FedBoost(fd.Densities(table), budget=3, cache=c, step=0.2),
            fed,
            40,
            participation=0.5,
            evaluate_every=0,
        )
        for c in (False, True)
    ]
    np.testing.assert_allclose(runs[0].state.alpha, runs[1].state.alpha, atol=1e-6)
    assert runs[1].history.bytes_down.iloc[-1] < 0.5 * runs[0].history.bytes_down.iloc[-1]
    late = runs[1].history.bytes_down.diff().iloc[-5:]
    assert late.max() < 150 * 3  # numbers and weights only, to three clients


def test_repeats_send_the_predictors_in_parts():
    fed, table = labels([3, 1, 2]), np.random.default_rng(1).dirichlet(np.ones(3), 6)
    once = fd.run(
        fd.FedBoost(fd.Densities(table), budget=6, sampling="uniform", step=0.1),
        fed,
        5,
        evaluate_every=0,
    )
    parts = fd.run(
        fd.FedBoost(fd.Densities(table), budget=2, repeats=3, sampling="uniform", step=0.1),
        fed,
        5,
        evaluate_every=0,
    )
    np.testing.assert_allclose(once.state.alpha, parts.state.alpha, atol=1e-6)
    assert once.history.messages_up.iloc[-1] == parts.history.messages_up.iloc[-1] == 5


def test_an_uncovered_element_is_finite():
    """Point masses, one predictor a round: what was not sent has probability 0, and costs
    -log(floor).
    """
    fed = labels([5, 3, 2])
    run = fd.run(
        fd.FedBoost(fd.Densities(np.eye(3)), budget=1, step=0.05), fed, 30, evaluate_every=0
    )
    assert run.history.objective.notna().all()
    assert run.history.objective.iloc[0] == pytest.approx(math.log(3), abs=1e-4)
    never = fd.run(
        fd.FedBoost(fd.Densities([[1.0, 0.0, 0.0]]), sampling="all", floor=1e-4),
        fed,
        1,
        evaluate_every=0,
    )
    assert never.history.objective.iloc[-1] == pytest.approx(-0.5 * math.log(1e-4), abs=1e-3)


# -- the worst mixture of domains ------------------------------------------------------------------


def test_a_round_of_aflboost_by_hand():
    """Two domains of one client each: alpha against the mixture by lambda, lambda along the
    domains' losses.
    """
    fed = labels([3, 1], [0, 2])
    table, p = np.array([[0.8, 0.2], [0.3, 0.7]]), np.array([[0.75, 0.25], [0.0, 1.0]])
    state = ends(fd.AFLBoost(TWO, sampling="all", step=0.5, step_domains=0.2, floor=1e-12), fed, 1)
    mixed = np.array([0.55, 0.45])
    losses = -(p * np.log(mixed)).sum(1)
    d = -((p / mixed) @ table.T).mean(0)
    v, w = np.exp(-0.5 * d), np.exp(0.2 * losses)
    np.testing.assert_allclose(state.alpha, v / v.sum(), atol=1e-6)
    np.testing.assert_allclose(state.lam, w / w.sum(), atol=1e-6)


def test_aflboost_finds_the_minimax_mixture():
    """Three domains, squared loss: the largest domain loss is that of the linear-programming-free
    minimax by SciPy.
    """
    rng = np.random.default_rng(3)
    table = rng.dirichlet(np.ones(5), 4)
    counts = (rng.dirichlet(0.5 * np.ones(5), 3) * 200).astype(int) + 1
    p = counts / counts.sum(1, keepdims=True)

    def losses(alpha):
        mixed = alpha @ table
        return mixed @ mixed - 2 * p @ mixed + 1

    best = scipy.optimize.minimize(
        lambda z: z[4],
        np.append(np.full(4, 0.25), 1.0),
        bounds=[(0, 1)] * 4 + [(None, None)],
        constraints=[
            {"type": "eq", "fun": lambda z: z[:4].sum() - 1},
            {"type": "ineq", "fun": lambda z: z[4] - losses(z[:4])},
        ],
        options={"ftol": 1e-12},
    )
    run = fd.run(
        fd.AFLBoost(fd.Densities(table), sampling="all", loss="squared", measure_every=400),
        labels(*counts),
        400,
        evaluate_every=0,
    )
    assert run.history.worst.iloc[-1] == pytest.approx(best.fun, abs=1e-3)
    plain = fd.run(
        fd.FedBoost(fd.Densities(table), sampling="all", loss="squared", measure_every=0),
        labels(*counts),
        60,
        evaluate_every=0,
    )
    assert losses(plain.state.alpha.numpy()).max() > run.history.worst.iloc[-1] + 1e-3


def test_domains_are_groups_of_clients():
    counts = [[3, 1], [2, 5], [4, 4]]
    grouped = ends(
        fd.AFLBoost(TWO, sampling="all", step=0.3, domains={"a": [0, 2], "b": [1]}),
        labels(*counts),
        3,
    )
    merged = ends(fd.AFLBoost(TWO, sampling="all", step=0.3), labels([7, 5], [2, 5]), 3)
    np.testing.assert_allclose(grouped.alpha, merged.alpha, atol=1e-6)
    np.testing.assert_allclose(grouped.lam, merged.lam, atol=1e-6)


def test_bounds_keep_lambda_inside():
    fed = labels([9, 1], [1, 9], [5, 5])
    state = ends(fd.AFLBoost(TWO, sampling="all", low=0.2, high=0.5, step=2.0), fed, 20)
    assert float(state.lam.min()) >= 0.2 - 1e-9
    assert float(state.lam.max()) <= 0.5 + 1e-9


# -- Section 3 -------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), mirror=st.sampled_from([fd.Entropy(), fd.Euclidean()]))
def test_lemma_1_the_mixture_minimizes_the_weighted_divergence(seed, mirror):
    rng = np.random.default_rng(seed)
    domains, other = (
        torch.tensor(rng.dirichlet(np.ones(5), 3)),
        torch.tensor(rng.dirichlet(np.ones(5))),
    )
    lam = torch.tensor(rng.dirichlet(np.ones(3)))
    loss = lambda h: float(lam @ mirror.divergence(domains, h.expand(3, 5)))  # noqa: E731
    best = lam @ domains
    assert loss(best) <= loss(other) + 1e-12
    # The difference is the divergence from the mixture itself (equation 12), so the minimizer is
    # unique.
    assert loss(other) - loss(best) == pytest.approx(
        float(mirror.divergence(best, other)), abs=1e-9
    )


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), mirror=st.sampled_from([fd.Entropy(), fd.Euclidean()]))
def test_theorem_1_the_information_radius_bounds_the_minimax_loss(seed, mirror):
    """With one predictor for each domain, off by epsilon: min over alpha, max over lambda is at
    most R + epsilon.
    """
    rng = np.random.default_rng(seed)
    domains = torch.tensor(0.9 * rng.dirichlet(np.ones(4), 3) + 0.025)
    near = torch.tensor(0.95 * domains.numpy() + 0.05 * rng.dirichlet(np.ones(4), 3))
    epsilon = float(mirror.divergence(domains, near).max())

    steps = np.arange(151)
    grid = np.array([(i, j, 150 - i - j) for i in steps for j in steps[: 151 - i]]) / 150
    weights = torch.tensor(grid)

    def losses(h):  # of every domain, for every row of h
        return mirror.divergence(domains.expand(len(h), 3, 4), h.unsqueeze(1).expand(-1, 3, 4))

    r = float((weights * losses(weights @ domains)).sum(1).max())
    found = float(losses(weights @ near).amax(1).min())
    assert found <= r + epsilon + 2e-3  # the grid's own error


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": 0}, "budget=0"),
        ({"budget": 3}, "budget=3 must be above 0 and at most the 2"),
        ({"budget": None}, "budget=None"),
        ({"budget": 1, "sampling": "all"}, "budget=1"),
        ({"sampling": "some"}, "sampling"),
        ({"loss": "hinge"}, "loss"),
        ({"mirror": "entropy"}, "mirror"),
        ({"step": 0.0}, "step=0.0"),
        ({"repeats": 0}, "repeats=0"),
        ({"start_weights": (0.5, 0.6)}, "sum to 1"),
        ({"start_weights": (1.5, -0.5)}, "not negative"),
        ({"start_weights": (1.0,)}, "2 numbers"),
        ({"bias_correction": True}, "bias_correction is for loss='squared'"),
        ({"explore": 2.0}, "explore=2.0"),
        ({"explore": "much"}, "explore='much'"),
        ({"step": "small"}, "step='small'"),
        ({"floor": None}, "floor=None"),
        ({"start_weights": (math.nan, 1.0)}, "sum to nan"),
        ({"start_weights": 0.5}, "2 numbers"),
    ],
)
def test_bad_settings(options, says):
    with pytest.raises(fd.ConfigError, match=says):
        fd.FedBoost(TWO, **{"budget": 1, **options})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"domains": []}, "must not be empty"),
        ({"domains": [0, 1]}, "lists of client ids"),
        ({"step_domains": 0.0}, "step_domains=0.0"),
        ({"mirror_domains": "entropy"}, "mirror_domains='entropy'"),
        ({"low": 0.6, "high": 0.5}, "low=0.6"),
        ({"low": "0"}, "low='0'"),
    ],
)
def test_bad_settings_of_domains(options, says):
    with pytest.raises(fd.ConfigError, match=says):
        fd.AFLBoost(TWO, budget=1, **options)


def test_bad_collections_and_domains():
    with pytest.raises(fd.ConfigError, match="must be a collection"):
        fd.FedBoost([[0.5, 0.5]], budget=1)
    with pytest.raises(
        fd.ModelError, match=r"predictor 1 is not a probability distribution: it sums to 0\.9"
    ):
        fd.Densities([[0.5, 0.5], [0.5, 0.4]])
    with pytest.raises(fd.DataError, match="over 2 elements, the data has 3 labels"):
        fd.run(fd.FedBoost(TWO, budget=1), labels([1, 1, 1]), 1)
    with pytest.raises(fd.ConfigError, match="no client may be in two"):
        fd.AFLBoost(TWO, budget=1, domains=[[0, 1], [1]])
    with pytest.raises(fd.ConfigError, match=r"domains must hold every client once.*\[1\]"):
        fd.run(fd.AFLBoost(TWO, budget=1, domains=[[0]]), labels([1, 2], [2, 1]), 1)
    with pytest.raises(fd.ConfigError, match="leave no mixture of 2 domains"):
        fd.run(fd.AFLBoost(TWO, budget=1, high=0.4), labels([1, 2], [2, 1]), 1)


# -- domains that do not answer --------------------------------------------------------------------


class SilentFrom(fd.Hostile):
    """Some clients send what cannot be read, from the second round on."""

    def open(self, algorithm, fed, seed_key):
        session = super().open(algorithm, fed, seed_key)
        spoilt = session.exchange
        session.exchange = lambda ask: spoilt(ask) if ask.round > 1 else session.inner.exchange(ask)
        return session


def test_a_domain_that_falls_silent_keeps_its_last_loss():
    fed, algorithm = (
        labels([6, 2], [1, 9]),
        fd.AFLBoost(TWO, sampling="all", step=0.5, step_domains=0.2),
    )
    one, two = ends(algorithm, fed, 1), ends(algorithm, fed, 2)
    quiet = fd.run(
        algorithm, fed, 2, evaluate_every=0, engine=SilentFrom(clients=[1], attack="garbage")
    ).state
    # its own of this round, and the last one of the silent domain
    losses = torch.stack((two.latest[0], one.latest[1]))
    moved = one.lam * torch.exp(0.2 * losses)
    torch.testing.assert_close(quiet.lam, moved / moved.sum())
    torch.testing.assert_close(quiet.latest, losses)
    alone = ends(
        fd.FedBoost(TWO, sampling="all", step=0.5, start_weights=tuple(one.alpha.tolist())),
        fed.select([0]),
        1,
    )
    # the gradient of those who answered, with the weight of all
    torch.testing.assert_close(quiet.alpha, alone.alpha)


def test_a_domain_that_was_never_heard_neither_wins_nor_loses():
    fed, algorithm = (
        labels([6, 2], [1, 9]),
        fd.AFLBoost(TWO, sampling="all", step=0.5, step_domains=0.2),
    )
    state = fd.run(
        algorithm, fed, 3, evaluate_every=0, engine=fd.Hostile(clients=[1], attack="garbage")
    ).state
    torch.testing.assert_close(state.lam, torch.tensor([0.5, 0.5], dtype=torch.float64))


def test_others_of_a_domain_stand_for_those_who_do_not_answer():
    fed = labels([6, 2], [3, 1], [1, 9])  # the second says what the first says
    algorithm = fd.AFLBoost(TWO, sampling="all", step=0.5, domains=[[0, 1], [2]])
    whole, quiet = (
        fd.run(algorithm, fed, 3, evaluate_every=0, engine=e).state
        for e in (fd.Local(), fd.Hostile(clients=[1], attack="garbage"))
    )
    torch.testing.assert_close(quiet.lam, whole.lam)
    torch.testing.assert_close(quiet.alpha, whole.alpha)


def test_losses_of_rows_by_hand():
    """h = (0.2, 0.8) of label 1: -log(0.8 + 0.1), and 0.2^2 + (0.8 - 1)^2; of label 0: -log(0.2 +
    0.1), and 0.8^2 + 0.8^2.
    """
    outputs, y, members = (
        torch.tensor([[0.2, 0.8], [0.2, 0.8]]),
        torch.tensor([1, 0]),
        fd.Densities(np.eye(2)),
    )
    log, squared = (
        fd.FedBoost(members, sampling="all", loss=loss, floor=0.1) for loss in ("log", "squared")
    )
    np.testing.assert_allclose(log.row_loss(outputs, y), -np.log([0.9, 0.3]), rtol=1e-6)
    np.testing.assert_allclose(squared.row_loss(outputs, y), [0.08, 1.28], rtol=1e-6)


def test_predictors_are_drawn_independently():
    """Eight with a chance of one half each: over 60 rounds, their number has the deviation sqrt(2)
    and is not always 0 or 8.
    """
    run = fd.run(
        fd.FedBoost(fd.Densities(np.eye(8)), budget=4, sampling="uniform", measure_every=0),
        labels([1] * 8),
        60,
    )
    sent = run.history["sent"].iloc[1:]
    assert 1 < sent.std() < 2 and 3 < sent.mean() < 5
