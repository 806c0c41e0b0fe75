from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foedus.data import Data, split
from foedus.errors import SplitError

SCHEMES = {
    "iid": {},
    "dirichlet": {"alpha": 0.3},
    "homogeneity": {"s": 0.1},
    "labels": {"per_client": 2},
}


def make(
    rows: int, classes: int, test_rows: int = 0, seed: int = 0, regression: bool = False
) -> Data:
    rng = np.random.default_rng(seed)
    x, x_test = rng.standard_normal((rows, 4)), rng.standard_normal((test_rows, 4))
    if regression:
        return Data.from_arrays(
            x, rng.standard_normal(rows), x_test, rng.standard_normal(test_rows)
        )
    return Data.from_arrays(
        x,
        rng.integers(0, classes, rows),
        x_test,
        rng.integers(0, classes, test_rows),
        classes=classes,
    )


def check_exact(fed, rows: int, test_rows: int, clients: int) -> None:
    assert len(fed) == clients
    assert fed.sizes.min() >= 1
    assert np.array_equal(np.sort(fed.rows), np.arange(rows))
    assert np.array_equal(np.sort(fed.test_rows), np.arange(test_rows))
    assert fed.sizes.sum() == rows
    assert fed.offsets[0] == 0
    assert fed.rows.dtype == np.int64


@settings(max_examples=60, deadline=None)
@given(data=st.data(), scheme=st.sampled_from(list(SCHEMES)), seed=st.integers(0, 2**31))
def test_every_row_goes_to_one_client(data, scheme, seed):
    rows = data.draw(st.integers(1, 300))
    classes = data.draw(st.integers(2, 12))
    clients = data.draw(st.one_of(st.integers(1, rows), st.just(rows)))
    test_rows = data.draw(st.integers(0, 100))
    d = make(rows, classes, test_rows, seed)
    options = {
        "iid": {},
        "dirichlet": {"alpha": data.draw(st.sampled_from([1e-300, 1e-8, 1e-3, 0.1, 1.0, 1e4]))},
        "homogeneity": {"s": data.draw(st.floats(0, 1))},
        "labels": {"per_client": data.draw(st.integers(1, classes))},
    }[scheme]
    if scheme == "labels" and clients * options["per_client"] < len(np.unique(d.y_train)):
        with pytest.raises(SplitError, match="without a client"):
            split(d, scheme, clients=clients, seed=seed, **options)
        return
    fed = split(d, scheme, clients=clients, seed=seed, **options)
    check_exact(fed, rows, test_rows, clients)
    again = split(d, scheme, clients=clients, seed=seed, **options)
    assert np.array_equal(fed.rows, again.rows)
    assert np.array_equal(fed.test_rows, again.test_rows)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_seed_decides(scheme):
    d = make(400, 5, 100)
    a, b, c = (split(d, scheme, clients=8, seed=s, **SCHEMES[scheme]) for s in (0, 0, 1))
    assert np.array_equal(a.rows, b.rows)
    assert np.array_equal(a.test_rows, b.test_rows)
    assert not np.array_equal(a.rows, c.rows)
    state = np.random.get_state()[1].copy()
    split(d, scheme, clients=8, seed=3, **SCHEMES[scheme])
    assert np.array_equal(state, np.random.get_state()[1])


def test_iid_sizes_are_equal():
    assert sorted(set(split(make(103, 3), "iid", clients=10).sizes)) == [10, 11]


def test_iid_of_regression_deals_test_rows_by_size():
    fed = split(make(100, 0, 40, regression=True), clients=10)
    check_exact(fed, 100, 40, 10)
    assert set(fed.test_sizes) == {4}


def test_dirichlet_is_more_unequal_for_smaller_alpha():
    d = make(5000, 10)
    spread = [
        split(d, "dirichlet", clients=10, alpha=a).label_counts().std(0).mean()
        for a in (0.05, 0.5, 5.0, 1e6)
    ]
    assert spread == sorted(spread, reverse=True)
    assert spread[-1] < 2


def test_dirichlet_shares_follow_the_distribution():
    """A client's share of a label has mean 1/N and variance (1/N)(1 - 1/N) / (N alpha + 1)."""
    y = np.repeat(np.arange(200), 500)
    d = Data.from_arrays(np.zeros((len(y), 1)), y)
    share = split(d, "dirichlet", clients=5, alpha=0.5, seed=1).label_counts() / 500
    assert np.allclose(share.mean(1), 0.2, atol=0.05)
    assert np.isclose(share.var(), 0.2 * 0.8 / 3.5, rtol=0.15)


def test_dirichlet_tiny_alpha_gives_each_label_to_one_client():
    d = make(1000, 10)
    counts = split(d, "dirichlet", clients=3, alpha=1e-6).label_counts()
    assert ((counts > 0).sum(0) <= 2).all()  # one owner, and perhaps a repair


def test_dirichlet_min_rows():
    d = make(200, 4)
    assert split(d, "dirichlet", clients=10, alpha=0.01, min_rows=15).sizes.min() == 15
    with pytest.raises(SplitError, match="min_rows=21"):
        split(d, "dirichlet", clients=10, alpha=0.01, min_rows=21)


def test_repair_takes_from_the_largest():
    y = np.zeros(100, np.int64)
    y[:3] = 1
    d = Data.from_arrays(np.zeros((100, 1)), y)
    fed = split(d, "dirichlet", clients=20, alpha=1e-9)
    assert sorted(fed.sizes)[:18] == [1] * 18


def test_homogeneity_extremes():
    y = np.repeat(np.arange(10), 100)
    d = Data.from_arrays(np.zeros((1000, 1)), np.random.default_rng(0).permutation(y))
    sorted_ = split(d, "homogeneity", clients=10, s=0).label_counts()
    assert np.array_equal(np.sort(sorted_, axis=None)[-10:], [100] * 10)  # one label each, in order
    assert np.array_equal(sorted_.argmax(1), np.arange(10))
    half = split(d, "homogeneity", clients=10, s=0.5)
    assert set(half.sizes) == {100}
    assert (half.label_counts().diagonal() > 40).all()
    assert (half.label_counts() > 0).mean() > 0.9
    shared = split(d, "homogeneity", clients=10, s=1).label_counts()
    assert shared.max() < 30


@settings(max_examples=30, deadline=None)
@given(
    clients=st.integers(1, 60),
    classes=st.integers(2, 15),
    per_client=st.integers(1, 15),
    seed=st.integers(0, 1000),
)
def test_each_client_has_exactly_per_client_labels(clients, classes, per_client, seed):
    per_client = min(per_client, classes)
    if clients * per_client < classes:
        return
    y = np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), 80))
    fed = split(
        Data.from_arrays(np.zeros((len(y), 1)), y),
        "labels",
        clients=clients,
        per_client=per_client,
        seed=seed,
    )
    counts = fed.label_counts()
    assert ((counts > 0).sum(1) == per_client).all()
    holders = (counts > 0).sum(0)
    assert holders.max() - holders.min() <= 1


def test_test_rows_follow_training_rows():
    rng = np.random.default_rng(0)
    y, y_test = rng.integers(0, 3, 900), np.repeat([0, 1, 2], 100)
    d = Data.from_arrays(np.zeros((900, 1)), y, np.zeros((300, 1)), y_test)
    fed = split(d, "dirichlet", clients=5, alpha=0.5)
    counts = fed.label_counts()
    for k in range(5):
        test = np.bincount(y_test[fed.test_client_rows(k)], minlength=3)
        assert (np.abs(test - 100 * counts[k] / counts.sum(0)) < 1).all()


def test_test_label_without_training_rows_goes_by_size():
    d = Data.from_arrays(np.zeros((6, 1)), [0, 0, 0, 1, 1, 1], np.zeros((6, 1)), [2] * 6, classes=3)
    assert split(d, "iid", clients=3).test_sizes.tolist() == [2, 2, 2]


def test_natural():
    d = Data.from_arrays(
        np.zeros((5, 1)),
        [0, 1, 0, 1, 0],
        np.zeros((4, 1)),
        [0, 1, 1, 0],
        groups=[7, 3, 7, 9, 3],
        groups_test=[3, 9, 8, 7],
    )
    fed = split(d, "natural")
    assert fed.ids.tolist() == [3, 7, 9]
    assert [fed.client_rows(k).tolist() for k in range(3)] == [[1, 4], [0, 2], [3]]
    # group 8 has no training rows
    assert [fed.test_client_rows(k).tolist() for k in range(3)] == [[0], [3], [1]]
    assert split(d, "natural", clients=3).ids.tolist() == [3, 7, 9]
    with pytest.raises(SplitError, match=r"clients=2, but .* 3 groups"):
        split(d, "natural", clients=2)
    with pytest.raises(SplitError, match="needs groups"):
        split(make(10, 2), "natural")


@settings(max_examples=30, deadline=None)
@given(classes=st.integers(6, 26), clients=st.integers(1, 40), seed=st.integers(0, 1000))
def test_tasks(classes, clients, seed):
    d = make(1500, classes, 600, seed)
    fed = split(d, "tasks", clients=clients, seed=seed)
    info = fed.settings
    n, merged = info["rows_per_class"], info["merged_classes"]
    assert len(merged) == (3 * classes) // 10
    assert 1 <= n <= 30
    assert fed.data.classes == 2
    assert (fed.sizes == 2 * n).all()
    source, source_test = info["source_rows"], info["source_test_rows"]
    assert len(np.unique(source)) == len(source)
    assert len(np.unique(source_test)) == len(source_test)
    assert np.array_equal(fed.data.x_train, d.x_train[source])
    assert np.array_equal(fed.data.x_test, d.x_test[source_test])
    for k in range(clients):
        for rows, y, original in (
            (fed.client_rows(k), fed.data.y_train, d.y_train[source]),
            (fed.test_client_rows(k), fed.data.y_test, d.y_test[source_test]),
        ):
            assert y[rows].sum() * 2 == len(rows)  # balanced
            assert np.isin(original[rows[y[rows] == 0]], merged).all()
            assert (original[rows[y[rows] == 1]] == info["task"][k]).all()
        assert info["task"][k] not in merged
    features = np.concatenate([info["global_features"], info["local_features"]])
    assert sorted(features) == list(range(4))
    assert len(info["global_features"]) == 2


def test_tasks_lowers_n_where_rows_are_few():
    d = make(120, 6, 0)
    fed = split(d, "tasks", clients=10)
    merged_rows = np.isin(d.y_train, fed.settings["merged_classes"]).sum()
    assert fed.settings["rows_per_class"] <= merged_rows // 10
    with pytest.raises(SplitError, match="too many for binary tasks"):
        split(d, "tasks", clients=100)
    with pytest.raises(SplitError, match="merges 0"):
        split(make(50, 3), "tasks", clients=2)


D = make(20, 4, 5)


@pytest.mark.parametrize(
    ("scheme", "options", "words"),
    [
        ("irid", {"clients": 2}, ["scheme 'irid' is unknown", "did you mean 'iid'", "natural"]),
        ("iid", {}, ["clients="]),
        ("iid", {"clients": 21}, ["clients=21", "20"]),
        ("iid", {"clients": 0}, ["clients=0"]),
        ("iid", {"clients": 2.5}, ["clients=2.5"]),
        ("iid", {"clients": True}, ["clients=True"]),
        ("iid", {"clients": 2, "alpha": 1}, ["'alpha'", "'iid'", "none"]),
        ("iid", {"clients": 2, "seed": -1}, ["seed=-1"]),
        ("dirichlet", {"clients": 2}, ["needs alpha="]),
        ("dirichlet", {"clients": 2, "alpha": 0}, ["alpha=0", "must be a positive finite number"]),
        ("dirichlet", {"clients": 2, "alpha": float("nan")}, ["alpha=nan"]),
        ("dirichlet", {"clients": 2, "alpha": float("inf")}, ["alpha=inf"]),
        ("dirichlet", {"clients": 2, "beta": 1, "alpha": 1}, ["'beta'", "alpha, min_rows"]),
        ("homogeneity", {"clients": 2, "s": 1.1}, ["s=1.1", "0 to 1"]),
        ("homogeneity", {"clients": 2}, ["needs s="]),
        ("labels", {"clients": 2, "per_client": 5}, ["per_client=5", "4 classes"]),
        ("labels", {"clients": 2, "per_client": 0}, ["per_client=0"]),
        ("tasks", {"clients": 2, "n0": 0}, ["n0=0"]),
    ],
)
def test_errors_name_argument_and_value(scheme, options, words):
    with pytest.raises(SplitError) as error:
        split(D, scheme, **options)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("scheme", ["dirichlet", "homogeneity", "labels", "tasks"])
def test_regression_has_no_labels_to_divide_by(scheme):
    with pytest.raises(SplitError, match="regression"):
        split(make(20, 0, regression=True), scheme, clients=2, **SCHEMES.get(scheme, {}))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_hundred_thousand_clients(scheme):
    d = make(300_000, 10, 10_000)
    fed = split(d, scheme, clients=100_000, **SCHEMES[scheme])
    check_exact(fed, 300_000, 10_000, 100_000)
