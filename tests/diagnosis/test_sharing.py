"""`fd.sharing`: numbers by hand, tasks of which the answer is known, and the joint solution against
plain least squares.
"""

from __future__ import annotations

import numpy as np
import pytest

import foedus as fd
from foedus.diagnosis import sharing as module


def tasks(weights, rows=40, noise=0.0, seed=0):
    """Clients with y = w_i . x, one for each row of weights."""
    rng = np.random.default_rng(seed)
    clients = []
    for w in np.atleast_2d(weights):
        x = rng.normal(size=(rows, len(w)))
        clients.append(
            (x.astype(np.float32), (x @ w + noise * rng.normal(size=rows)).astype(np.float32))
        )
    return fd.Federation.from_clients(clients)


def test_labels_alone_by_hand():
    """Rows that say nothing; a client's mean of 8 of its 10 rows is shrunk by 8/9, so of 1/4 there
    is left (1/18)^2.
    """
    x = np.zeros((10, 2), np.float32)
    fed = fd.Federation.from_clients([(x, np.zeros(10, int)), (x, np.ones(10, int))], classes=2)
    found = fd.sharing(fed)
    assert found.explained["labels"] == pytest.approx(80 / 81, rel=1e-6)
    assert found.explained["private"] == pytest.approx(80 / 81, rel=1e-6)
    assert found.explained["shared"] == pytest.approx(0, abs=1e-6)
    assert found.accuracy["labels"] == found.accuracy["both"] == 1.0
    assert np.isnan(found.similarity).all()
    assert np.isnan(found.alike)


def test_one_task_is_all_shared():
    found = fd.sharing(tasks([[1.0, -2.0, 0.5]] * 4))
    assert found.explained["shared"] > 0.999
    assert found.explained["both"] == pytest.approx(found.explained["shared"], abs=1e-3)
    assert found.explained["labels"] < 0.05
    assert found.gain[0] < 1e-3
    assert found.alike > 0.99 and found.itself > 0.99


def test_opposite_tasks_share_nothing():
    found = fd.sharing(tasks([[1.0, 2.0], [-1.0, -2.0]], rows=200))
    assert found.explained["shared"] < 0.02
    assert found.explained["private"] > 0.99
    assert found.alike < -0.99
    assert found.itself > 0.99


def test_tasks_with_something_in_common_need_both():
    """Fifteen rows do not tell twenty weights; what all clients have in common they learn
    together.
    """
    rng = np.random.default_rng(1)
    weights = np.tile(rng.normal(size=20), (12, 1))
    weights[:, 0] = 4 * np.sign(rng.normal(size=12))
    found = fd.sharing(tasks(weights, rows=15, noise=0.1))
    assert (
        found.explained["both"] > max(found.explained["shared"], found.explained["private"]) + 0.05
    )
    gain, noise = found.gain
    better = max(found.explained["shared"], found.explained["private"])
    assert gain == pytest.approx(found.explained["both"] - better)
    assert gain > 2 * noise > 0


def test_the_joint_solution_is_that_of_plain_least_squares():
    """Fold 0 of three clients: one large system with a block for w and one for each v_i."""
    rng = np.random.default_rng(2)
    x, y = np.append(rng.normal(size=(60, 3)), np.ones((60, 1)), axis=1), rng.normal(size=(60, 2))
    owner, fold = np.arange(60) % 3, np.arange(60) // 3 % 5
    shared, slopes, level = 10.0, 100.0, 1.0
    got = module._Sums(x, y, owner, fold, 3).outputs(shared, slopes, level)
    kept = fold != 0
    design = np.zeros((60, 16))
    design[:, :4] = x
    for i in range(3):
        design[owner == i, 4 + 4 * i : 8 + 4 * i] = x[owner == i]
    penalty = np.diag([shared] * 4 + [slopes, slopes, slopes, level] * 3)
    solution = np.linalg.solve(design[kept].T @ design[kept] + penalty, design[kept].T @ y[kept])
    np.testing.assert_allclose(got[~kept], design[~kept] @ solution, rtol=1e-8)


def test_order_of_clients_decides_nothing(fed):
    one, two = fd.sharing(fed), fd.sharing(fed.select([3, 0, 4, 2, 1]))
    assert two.explained == pytest.approx(one.explained, rel=1e-9)
    assert two.similarity[1, 2] == pytest.approx(one.similarity[0, 4], rel=1e-6)
    frame = two.per_client.set_index("client").loc[one.per_client["client"]]
    np.testing.assert_allclose(frame["both"], one.per_client["both"], rtol=1e-6)


def test_wide_rows_are_reduced():
    fed = tasks(np.tile(np.r_[np.ones(3), np.zeros(77)], (3, 1)), rows=60)
    assert module._features(fed, 0).shape == (180, module._COMPONENTS + 1)
    assert fd.sharing(fed, seed=1).explained.keys() == {"labels", "shared", "private", "both"}


@pytest.mark.parametrize("rows", [1, 2])
def test_tiny_clients(rows):
    rng = np.random.default_rng(0)
    clients = [
        (rng.normal(size=(rows, 2)).astype(np.float32), rng.integers(0, 3, rows)) for _ in range(7)
    ]
    found = fd.sharing(fd.Federation.from_clients(clients, classes=3))
    assert all(np.isfinite(list(found.explained.values())))
    assert np.isnan(found.similarity).all()
    assert "similarity" in str(found)


def test_a_constant_target_leaves_nothing_to_explain():
    clients = [(np.eye(4, dtype=np.float32), np.ones(4, np.float32))] * 2
    found = fd.sharing(fd.Federation.from_clients(clients))
    assert set(found.explained.values()) == {0.0}
    assert found.accuracy is None


def test_bad_input():
    with pytest.raises(fd.ConfigError, match="fed is a list; give a Federation"):
        fd.sharing([1])
    with pytest.raises(fd.ConfigError, match="seed=-1"):
        fd.sharing(tasks([[1.0]]), seed=-1)
