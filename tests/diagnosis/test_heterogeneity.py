from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.stats import wasserstein_distance

import foedus as fd
from foedus.diagnosis.heterogeneity import heterogeneity
from foedus.errors import ConfigError


def federation(*clients) -> fd.Federation:
    """Clients that bring rows; their label is their position."""
    return fd.Federation.from_clients(
        [(np.asarray(x, np.float64), np.full(len(x), k)) for k, x in enumerate(clients)]
    )


def mixture(clients) -> tuple[np.ndarray, np.ndarray]:
    """Points and weights of α, by its definition."""
    weights = np.concatenate([np.full(len(x), 1 / (len(x) * len(clients))) for x in clients])
    return np.concatenate([np.asarray(x, np.float64) for x in clients]), weights


def transport_by_lp(x, p, y, q, power: int) -> float:
    """The optimum of (19), before its root, as the linear program that defines it."""
    cost = np.linalg.norm(x[:, None] - y[None], axis=2) ** power
    rows = np.kron(np.eye(len(x)), np.ones(len(y)))
    columns = np.kron(np.ones(len(x)), np.eye(len(y)))
    result = linprog(
        cost.ravel(), A_eq=np.vstack([rows, columns]), b_eq=np.concatenate([p, q]), bounds=(0, None)
    )
    assert result.success
    return result.fun


def squared_w2_on_a_line(x, y) -> float:
    """Both samples repeated to a common size, and matched in order."""
    size = math.lcm(len(x), len(y))
    return np.mean(
        (np.repeat(np.sort(x), size // len(x)) - np.repeat(np.sort(y), size // len(y))) ** 2
    )


# By hand


@pytest.mark.parametrize("point", [[3.0], [3.0, 0.0], [1.0, 2.0, 2.0]])
def test_two_points_at_distance_three(point):
    h = heterogeneity(federation([np.zeros(len(point))], [point]))
    assert h.per_client["tv"].tolist() == pytest.approx([0.5, 0.5])
    assert h.per_client["w1"].tolist() == pytest.approx([1.5, 1.5])
    assert (h.omega_tv, h.omega_w1, h.label_tv) == pytest.approx((0.5, 1.5, 0.5))
    assert h.w2 == pytest.approx(2 * 9 / 4)
    assert h.exact


@pytest.mark.parametrize("columns", [1, 2])
def test_rows_that_clients_share(columns):
    # α has 7/12 at 0, 2/12 at 1, 3/12 at 2; the first client 8/12, 4/12, 0; the second 6/12, 0,
    # 6/12.
    clients = [np.eye(1, columns) * np.array(values)[:, None] for values in ([0, 1, 0], [2, 0])]
    h = heterogeneity(federation(*clients))
    assert h.per_client["tv"].tolist() == pytest.approx([3 / 12, 3 / 12])
    assert h.per_client["w1"].tolist() == pytest.approx([4 / 12, 4 / 12])
    assert h.w2 == pytest.approx(2 * (4 / 6 + 1 / 3) / 4)
    assert h.per_client["rows"].tolist() == [3, 2]


def test_each_client_has_the_same_weight_whatever_its_rows():
    h = heterogeneity(federation([[0.0, 0.0]] * 9, [[0.0, 4.0]]))
    assert h.per_client["tv"].tolist() == pytest.approx([0.5, 0.5])
    assert h.per_client["w1"].tolist() == pytest.approx([2, 2])


def test_distinct_rows_have_total_variation_one_less_a_client():
    h = heterogeneity(federation(*np.arange(40.0).reshape(4, 5, 2)))
    assert h.per_client["tv"].tolist() == pytest.approx([3 / 4] * 4)


@pytest.mark.parametrize("max_points", [1, 2000])
def test_identical_clients(max_points):
    x = np.random.default_rng(0).integers(0, 9, (12, 3))
    h = heterogeneity(federation(x, x[::-1], np.repeat(x, 2, axis=0)), max_points=max_points)
    assert [h.omega_tv, h.omega_w1, h.w2] == pytest.approx([0, 0, 0], abs=1e-12)


@pytest.mark.parametrize("max_points", [1, 2000])
def test_one_client(max_points):
    h = heterogeneity(federation([[0.0, 1.0], [2.0, 3.0], [2.0, 3.0]]), max_points=max_points)
    assert (h.omega_tv, h.omega_w1, h.w2, h.label_tv, h.exact) == (0, 0, 0, 0, True)


def test_negative_zero_is_zero():
    assert heterogeneity(federation([[0.0, 1.0]], [[-0.0, 1.0]])).omega_tv == 0


def test_label_distributions():
    # Shares of label 0: 1, 1/2, 0; their mean is 1/2.
    clients = [([[0.0]] * 3, [0, 0, 0]), ([[0.0]] * 2, [0, 1]), ([[0.0]], [1])]
    h = heterogeneity(fd.Federation.from_clients(clients))
    assert h.per_client["label_tv"].tolist() == pytest.approx([0.5, 0, 0.5])
    assert h.label_tv == pytest.approx(1 / 3)
    assert h.omega_tv == h.omega_w1 == 0


# Against other ways to the same number


@pytest.mark.parametrize("columns", [1, 2])
def test_on_a_line_against_scipy(columns):
    rng = np.random.default_rng(1)
    values = [rng.integers(-20, 20, n) / 4 for n in (1, 7, 12, 30)]
    h = heterogeneity(federation(*(np.eye(1, columns) * v[:, None] for v in values)))
    points, weights = mixture(values)
    assert h.exact
    assert h.per_client["w1"].tolist() == pytest.approx(
        [wasserstein_distance(points, v, weights) for v in values]
    )
    assert h.w2 == pytest.approx(
        np.mean([[squared_w2_on_a_line(a, b) for a in values] for b in values])
    )


def test_in_the_plane_against_the_linear_program():
    rng = np.random.default_rng(2)
    clients = [
        rng.normal(size=(n, 2)).astype(np.float32).astype(np.float64) + k
        for k, n in enumerate((4, 9, 6))
    ]
    clients[2][0] = clients[0][0]
    h = heterogeneity(federation(*clients))
    points, weights = mixture(clients)
    uniform = [np.full(len(x), 1 / len(x)) for x in clients]
    w1 = [transport_by_lp(points, weights, x, p, 1) for x, p in zip(clients, uniform, strict=True)]
    w2 = [
        [transport_by_lp(x, p, y, q, 2) for x, p in zip(clients, uniform, strict=True)]
        for y, q in zip(clients, uniform, strict=True)
    ]
    assert h.exact
    assert h.per_client["w1"].tolist() == pytest.approx(w1)
    assert h.w2 == pytest.approx(np.mean(w2))


def test_sliced_is_the_mean_over_directions():
    rng = np.random.default_rng(3)
    clients = [rng.integers(-9, 9, (n, 3)) for n in (5, 1, 16, 11)]
    h = heterogeneity(federation(*clients), max_points=10, projections=30, seed=4)
    directions = np.random.default_rng(4).standard_normal((30, 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    points, weights = mixture(clients)
    w1 = [
        np.mean([wasserstein_distance(points @ u, x @ u, weights) for u in directions])
        for x in clients
    ]
    w2 = np.mean(
        [squared_w2_on_a_line(x @ u, y @ u) for u in directions for x in clients for y in clients]
    )
    assert not h.exact
    assert h.per_client["w1"].tolist() == pytest.approx(w1)
    assert h.w2 == pytest.approx(w2)


def test_blocks_of_directions_change_nothing(monkeypatch):
    fed = federation(*np.random.default_rng(5).normal(size=(3, 20, 4)))
    whole = heterogeneity(fed, max_points=1, projections=7)
    monkeypatch.setattr("foedus.diagnosis.heterogeneity._NUMBERS", 150)
    parts = heterogeneity(fed, max_points=1, projections=7)
    assert (parts.omega_w1, parts.w2) == pytest.approx((whole.omega_w1, whole.w2), rel=1e-12)


def test_a_translation_is_the_distance():
    # One sample and the same sample elsewhere: W_2 is the length of the translation, and slices see
    # |u·v|² = |v|²/d on average.
    x = np.random.default_rng(6).integers(-50, 50, (40, 5))
    fed = federation(x, x + np.array([3, 0, 4, 0, 0]))
    assert heterogeneity(fed).w2 == pytest.approx(25 / 2)
    assert heterogeneity(fed, max_points=1, projections=4000).w2 == pytest.approx(
        25 / 2 / 5, rel=0.1
    )


def test_the_solver_reaches_the_optimum(monkeypatch):
    x = np.random.default_rng(7).normal(size=(2, 200, 2))
    fed = federation(x[0], x[1] + 0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        h = heterogeneity(fed)
    # With two clients α is half of each: W_1(α, α_i) is half of W_1(α_1, α_2), for both.
    assert np.ptp(h.per_client["w1"]) < 1e-9
    assert (2 * h.omega_w1) ** 2 <= 2 * h.w2  # W_1 ≤ W_2
    monkeypatch.setattr("foedus.diagnosis.heterogeneity._ITERATIONS", 1)
    with pytest.warns(UserWarning, match="numItermax"):
        assert heterogeneity(fed).w2 != pytest.approx(h.w2)


# Properties

rows = st.lists(st.tuples(st.integers(-6, 6), st.integers(-6, 6)), min_size=1, max_size=8)
federations = st.lists(rows, min_size=1, max_size=5).map(
    lambda clients: [np.array(x, np.float64) for x in clients]
)
points = st.sampled_from([1, 2000])


def numbers(h) -> list[float]:
    return [h.omega_tv, h.omega_w1, h.w2, h.label_tv]


@settings(max_examples=30, deadline=None)
@given(clients=federations, max_points=points, data=st.data())
def test_the_order_of_clients_and_rows_decides_nothing(clients, max_points, data):
    order = data.draw(st.permutations(range(len(clients))))
    fed = federation(*clients)
    h, other = (
        heterogeneity(f, max_points=max_points, projections=10) for f in (fed, fed.select(order))
    )
    assert numbers(other) == pytest.approx(numbers(h), abs=1e-9)
    assert other.per_client["client"].tolist() == list(order)
    assert np.allclose(other.per_client, h.per_client.iloc[order], atol=1e-9)
    backwards = heterogeneity(
        federation(*(x[::-1] for x in clients)), max_points=max_points, projections=10
    )
    assert numbers(backwards) == pytest.approx(numbers(h), abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(clients=federations)
def test_bounds(clients):
    exact, sliced = (
        heterogeneity(federation(*clients), max_points=m, projections=20) for m in (2000, 1)
    )
    tv, diameter = exact.per_client["tv"], 12 * np.sqrt(2)
    assert exact.exact
    assert tv.between(0, 1 - 1 / len(clients) + 1e-12).all()
    assert (exact.per_client["w1"] <= tv * diameter + 1e-9).all()
    assert (exact.per_client["w1"] >= tv - 1e-9).all()  # distinct rows are at least 1 apart
    assert (sliced.per_client["w1"] <= exact.per_client["w1"] + 1e-9).all()
    assert sliced.w2 <= exact.w2 + 1e-9
    # Jensen: W_1(α, α_i) ≤ mean of W_1(α_s, α_i) ≤ mean of W_2
    assert exact.omega_w1**2 <= exact.w2 + 1e-9
    assert sliced.omega_tv == exact.omega_tv


@settings(max_examples=30, deadline=None)
@given(
    clients=federations,
    max_points=points,
    scale=st.sampled_from([0.25, 2.0, -8.0]),
    shift=st.integers(-99, 99),
)
def test_scale_and_translation(clients, max_points, scale, shift):
    h, moved = (
        heterogeneity(federation(*c), max_points=max_points, projections=10)
        for c in (clients, [scale * x + shift for x in clients])
    )
    assert moved.omega_tv == pytest.approx(h.omega_tv, abs=1e-12)
    assert moved.omega_w1 == pytest.approx(abs(scale) * h.omega_w1, abs=1e-9)
    assert moved.w2 == pytest.approx(scale**2 * h.w2, abs=1e-9)


@settings(max_examples=20, deadline=None)
@given(clients=federations, max_points=points)
def test_repeating_all_rows_changes_nothing(clients, max_points):
    h = heterogeneity(federation(*clients), max_points=max_points, projections=10)
    twice = [np.repeat(x, k + 1, axis=0) for k, x in enumerate(clients)]
    repeated = heterogeneity(federation(*twice), max_points=max_points, projections=10)
    assert numbers(repeated) == pytest.approx(numbers(h), abs=1e-9)


# Many clients


@pytest.mark.parametrize("max_points", [1, 2000])
def test_a_sample_of_the_pairs_where_all_are_alike(max_points):
    fed = federation(*(x[None] for x in np.eye(40)))  # any two clients are sqrt(2) apart
    h = heterogeneity(fed, max_points=max_points, projections=2000)
    assert h.w2 == pytest.approx(
        2 * 39 / 40 if h.exact else 2 * 39 / 40 / 40, rel=1e-9 if h.exact else 0.05
    )
    assert h.exact == (max_points >= 40)


def test_a_sample_of_the_pairs_estimates_their_mean():
    x = np.random.default_rng(8).normal(size=(60, 1, 2)).astype(np.float32)
    fed = federation(*x)
    truth = np.mean(np.sum((x - x[:, 0]) ** 2, axis=2))
    estimates = [heterogeneity(fed, seed=seed).w2 for seed in range(5)]
    assert len(set(estimates)) == 5
    assert np.mean(estimates) == pytest.approx(truth, rel=0.08)
    assert heterogeneity(fed, seed=3).w2 == estimates[3]
    order = np.random.default_rng(9).permutation(60)
    assert heterogeneity(fed.select(order), seed=3).w2 == pytest.approx(estimates[3], rel=1e-12)


# On data


@pytest.mark.parametrize("max_points", [100, 2000])
def test_label_skew_on_digits(digits, max_points):
    small = fd.Data.from_arrays(digits.x_train[:700], digits.y_train[:700])
    results = [
        heterogeneity(
            fd.split(small, "homogeneity", clients=5, s=s), max_points=max_points, projections=100
        )
        for s in (0.0, 0.5, 1.0)
    ]
    for name in ("omega_w1", "w2", "label_tv"):
        skewed, half, iid = (getattr(h, name) for h in results)
        assert skewed > half > iid > 0
    assert all(h.exact == (max_points == 2000) for h in results)
    # Equal images have equal labels here, so labels are a function of the features, and no further
    # apart.
    assert all(h.label_tv <= h.omega_tv + 1e-12 for h in results)


def test_images_are_flat_rows(digits):
    x, y = digits.x_train[:60].reshape(60, -1), digits.y_train[:60]
    flat, images = (
        fd.split(fd.Data.from_arrays(a, y), "iid", clients=3) for a in (x, x.reshape(60, 1, 8, 8))
    )
    assert numbers(heterogeneity(images)) == numbers(heterogeneity(flat))


def test_features_are_compared_instead(digits):
    x, y = digits.x_train[:60].reshape(60, 8, 8), digits.y_train[:60]
    fed = fd.split(fd.Data.from_arrays(x, y), "iid", clients=3)
    h = heterogeneity(fed, features=lambda rows: rows.mean(axis=2))
    again = fd.split(fd.Data.from_arrays(x.mean(axis=2), y), "iid", clients=3)
    assert numbers(h) == numbers(heterogeneity(again))
    constant = heterogeneity(fed, features=lambda rows: np.zeros((len(rows), 4), int))
    assert (constant.omega_tv, constant.omega_w1, constant.w2) == pytest.approx(
        (0, 0, 0), abs=1e-12
    )


def test_labels_only_where_there_are_any(values, fed):
    h = heterogeneity(values)
    assert h.label_tv is None
    assert h.per_client["label_tv"].isna().all()
    assert "labels" not in str(h)
    left_out = heterogeneity(fed, classes=False)
    assert left_out.label_tv is None
    assert left_out.omega_w1 == heterogeneity(fed).omega_w1


def test_a_few_readable_lines(fed):
    h = heterogeneity(fed)
    assert list(h.per_client) == ["client", "rows", "tv", "w1", "label_tv"]
    assert h.per_client["client"].tolist() == fed.ids.tolist()
    assert str(h).startswith("5 clients of ")
    assert f"{h.omega_w1:.4g}" in str(h) and f"{h.label_tv:.4f}" in str(h) and "exact" in str(h)
    assert "lower bound" in str(heterogeneity(fed, max_points=10, projections=5))
    assert "200 pairs" in str(heterogeneity(federation(*np.arange(62.0).reshape(31, 1, 2))))
    assert "per_client" not in repr(h)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_points": 0}, "max_points=0 must be an integer of at least 1"),
        ({"max_points": 10.5}, r"max_points=10\.5"),
        ({"projections": True}, "projections=True"),
        ({"seed": -1}, "seed=-1"),
        ({"classes": 10}, "classes=10 must be True"),
        ({"features": "pixels"}, "features='pixels' must be a function"),
        ({"features": lambda x: x[:-1]}, r"features returned shape \(299, 64\) for 300 rows"),
        ({"features": lambda x: x[:, 0]}, r"must return \[300, d\]"),
        ({"features": lambda x: x[:, :0]}, r"must return \[300, d\]"),
        ({"features": lambda x: x.astype(str)}, "real numbers"),
        ({"features": lambda x: x * np.nan}, "NaN or infinite"),
    ],
)
def test_what_is_refused(fed, options, message):
    with pytest.raises(ConfigError, match=message):
        heterogeneity(fed, **options)


def test_not_a_federation(digits):
    with pytest.raises(ConfigError, match="fed is a Data; give a Federation"):
        heterogeneity(digits)
