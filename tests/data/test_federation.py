from __future__ import annotations

import numpy as np
import pytest

from foedus.data import Data, Federation, split, synthetic_piecewise
from foedus.errors import DataError, SplitError


@pytest.fixture
def fed() -> Federation:
    rng = np.random.default_rng(0)
    data = Data.from_arrays(
        rng.standard_normal((60, 3)),
        np.arange(60) % 4,
        rng.standard_normal((20, 3)),
        np.arange(20) % 4,
        name="toy",
    )
    return split(data, "dirichlet", clients=6, alpha=0.5, seed=2)


def test_select_keeps_ids_and_rows(fed):
    part = fed.select([4, 0])
    assert part.ids.tolist() == [4, 0]
    assert len(part) == 2
    for new, old in enumerate([4, 0]):
        assert np.array_equal(part.client_rows(new), fed.client_rows(old))
        assert np.array_equal(part.test_client_rows(new), fed.test_client_rows(old))
    assert part.select([1]).ids.tolist() == [0]
    assert np.array_equal(fed.select(fed.sizes > 5).ids, np.flatnonzero(fed.sizes > 5))
    for wrong in ([], [6], [-1], [0, 0], [0.5]):
        with pytest.raises(SplitError):
            fed.select(wrong)
    with pytest.raises(IndexError):
        fed.client_rows(6)


def test_pool_holds_everything_whatever_the_order(fed):
    pool = fed.pool()
    assert len(pool) == 1
    assert pool.ids.tolist() == [0]
    assert np.array_equal(pool.rows, np.arange(60))
    assert np.array_equal(pool.test_rows, np.arange(20))
    assert np.array_equal(fed.select([5, 4, 3, 2, 1, 0]).pool().rows, pool.rows)


def test_summary_counts_labels(fed):
    table = fed.summary()
    assert list(table.columns) == ["client", "rows", "test_rows", 0, 1, 2, 3]
    assert table["rows"].sum() == 60
    assert table["test_rows"].sum() == 20
    assert (table[[0, 1, 2, 3]].sum() == 15).all()
    k = 3
    assert np.array_equal(
        table.loc[k, [0, 1, 2, 3]], np.bincount(fed.data.y_train[fed.client_rows(k)], minlength=4)
    )


def test_summary_of_regression():
    fed = synthetic_piecewise(clients=3, rows=30, test_rows=6)
    table = fed.summary()
    y = fed.data.y_train[fed.client_rows(1)]
    assert np.isclose(table["mean_y"][1], y.mean(), atol=1e-5)
    assert np.isclose(table["std_y"][1], y.std(), atol=1e-5)


def test_texts(fed):
    assert repr(fed).startswith("Federation(toy: 6 clients, dirichlet alpha=0.5")
    assert "60" in fed.describe()
    assert "a client holds" in fed.describe()
    assert "mean of y" in synthetic_piecewise(clients=3, rows=30, test_rows=6).describe()


@pytest.mark.parametrize("clients", [10, 1000])
def test_plot(clients, tmp_path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    data = Data.from_arrays(np.zeros((3000, 1)), np.arange(3000) % 10)
    ax = split(data, "dirichlet", clients=clients, alpha=0.3).plot()
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    assert str(clients) in ax.get_title()
    if clients == 10:
        assert len(ax.patches) == 100
        assert [t.get_text() for t in ax.get_yticklabels()] == [str(i) for i in range(10)]
    else:
        assert ax.images[0].get_array().shape == (10, 200)
        assert np.allclose(ax.images[0].get_array().sum(0), 1)
    ax.figure.savefig(tmp_path / "who.png")
    plt.close(ax.figure)
    _, given = plt.subplots()
    assert synthetic_piecewise(clients=clients, rows=2000, test_rows=0).plot(given) is given
    plt.close("all")


def test_from_clients():
    rng = np.random.default_rng(0)
    parts = [(rng.standard_normal((n, 2)), rng.integers(0, 3, n)) for n in (3, 5, 2)]
    fed = Federation.from_clients(parts, classes=3)
    assert fed.sizes.tolist() == [3, 5, 2]
    assert fed.test_sizes.tolist() == [0, 0, 0]
    for k, (x, y) in enumerate(parts):
        assert np.array_equal(fed.data.x_train[fed.client_rows(k)], x.astype(np.float32))
        assert np.array_equal(fed.data.y_train[fed.client_rows(k)], y)
    own = Federation.from_clients(
        parts, test=[parts[1], (np.zeros((0, 2)), []), parts[2]], classes=3
    )
    assert own.test_sizes.tolist() == [5, 0, 2]
    common = Federation.from_clients(parts, test=(np.zeros((10, 2)), np.zeros(10, int)), classes=3)
    assert common.test_sizes.sum() == 10


@pytest.mark.parametrize(
    ("clients", "kind", "word"),
    [
        ([], SplitError, "empty"),
        ([(np.zeros((2, 2)), [0, 1]), (np.zeros((2, 3)), [0, 1])], DataError, r"clients\[1\]"),
        ([(np.zeros((2, 2)), [0])], DataError, r"clients\[0\]"),
        (
            [(np.zeros((2, 2)), [0, 1]), (np.zeros((0, 2)), [])],
            SplitError,
            "client 1 has no training rows",
        ),
    ],
)
def test_from_clients_errors(clients, kind, word):
    with pytest.raises(kind, match=word):
        Federation.from_clients(clients, classes=2)


def test_a_row_in_two_clients_is_refused(fed):
    with pytest.raises(SplitError, match="more than once"):
        Federation(fed.data, [0, 1, 1], [0, 2, 3], [], [0, 0, 0], [0, 1])
    with pytest.raises(SplitError, match="outside"):
        Federation(fed.data, [0, 1, 60], [0, 2, 3], [], [0, 0, 0], [0, 1])
    with pytest.raises(SplitError, match="offsets"):
        Federation(fed.data, [0, 1], [0, 2, 3], [], [0, 0, 0], [0, 1])


def test_split_holds_out_a_part_of_each_client():
    data = Data.from_arrays(np.arange(40.0).reshape(20, 2), np.arange(20) % 2)
    fed = split(data, "iid", clients=4, seed=3, test=0.4)  # round(0.4 * 5) = 2 of 5
    assert fed.sizes.tolist() == [3, 3, 3, 3] and fed.test_sizes.tolist() == [2, 2, 2, 2]
    same = split(data, "iid", clients=4, seed=3).holdout(0.4, seed=3)
    assert (fed.rows == same.rows).all() and (fed.data.x_test == same.data.x_test).all()
    with pytest.raises(SplitError, match=r"test=1.5 must be a fraction above 0 and below 1"):
        split(data, "iid", clients=4, test=1.5)
