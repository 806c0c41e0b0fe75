"""Pruning and distilling ensembles, against sums made one function at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import foedus as fd
from foedus import wire
from foedus.core.held import HeldSum
from foedus.models.trees import some_trees


@pytest.fixture(scope="module")
def run() -> fd.Run:
    fed = fd.split(fd.load("digits"), "homogeneity", clients=4, s=0.5)
    return fd.run(fd.FFGB(fd.Forest(trees=2, depth=5)), fed, 4, evaluate_every=0)


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray]:
    data = fd.load("digits")
    return data.x_test[:150], data.y_test[:150]


def contributions(run: fd.Run, x: np.ndarray) -> np.ndarray:
    """What each of the 16 functions adds, row by row through its own nodes."""
    trees, weights = run.algorithm.ensemble(run.state)
    feature, left, right = (getattr(trees, k).numpy() for k in ("feature", "left", "right"))
    out, number = np.zeros((len(weights), len(x), 10)), np.cumsum(feature < 0) - 1
    for j, root in enumerate(trees.roots.tolist()):
        for i, row in enumerate(x):
            node = root
            while feature[node] >= 0:
                node = (
                    left[node]
                    if row[feature[node]] <= float(trees.threshold[node])
                    else right[node]
                )
            out[j // 2, i] += float(weights[j // 2]) / 2 * trees.value[number[node]].numpy()
    return out


def loss(f: np.ndarray, y: np.ndarray) -> float:
    return float(np.mean(np.log(np.exp(f).sum(1)) - f[np.arange(len(y)), y]))


@pytest.mark.parametrize("tolerance", [0.0, 0.1, 1.0])
def test_the_smallest_go_first_while_the_loss_allows_it(run, rows, tolerance):
    x, y = rows
    said = contributions(run, x)
    order = np.argsort((said**2).mean((1, 2)))
    limit, left, gone = loss(said.sum(0), y) * (1 + tolerance), said.sum(0), 0
    for k, j in enumerate(order[:-1], start=1):
        left = left - said[j]
        if loss(left, y) <= limit:
            gone = k
    small = fd.prune(run, x, y, tolerance, refit=False)
    assert len(small) == len(said) - gone
    np.testing.assert_allclose(
        small.model.outputs(x), said[np.sort(order[gone:])].sum(0), atol=1e-4
    )
    assert small.nbytes == len(
        wire.encode({"functions": small.functions, "weights": small.weights})
    )
    assert tolerance < 1 or gone > 0


def test_refitting_never_hurts_on_the_rows_it_sees(run, rows):
    x, y = rows
    plain, refit = (fd.prune(run, x, y, 1.0, refit=r) for r in (False, True))
    assert len(plain) == len(refit)
    assert loss(refit.model.outputs(x).numpy(), y) <= loss(plain.model.outputs(x).numpy(), y) + 1e-6


def test_refitting_makes_up_for_what_is_gone(run, rows):
    """Half of the functions is gone: what stays takes over, and the loss is lower for it."""
    x, y = rows
    plain, refit = (fd.prune(run, x, y, 1.0, refit=r) for r in (False, True))
    assert len(plain) < 16 and not torch.allclose(plain.weights, refit.weights)
    assert loss(refit.model.outputs(x).numpy(), y) < loss(plain.model.outputs(x).numpy(), y)


def test_functions_without_weight_are_left_out(run, rows):
    x, y = rows
    f, some = run.state.f, torch.tensor([1.0, 0.0, 1.0, 0.0])
    state = run.state.replace(f=HeldSum(f.parts, [w * some for w in f.weights], f.keeps))
    thin = fd.Run(run.algorithm, run.spec, state, run.records, run.settings)
    small = fd.prune(thin, x, y, 0.0)
    assert len(small) <= 8
    np.testing.assert_allclose(small.model.outputs(x), thin.model.outputs(x), atol=1e-4)


def test_probabilities_are_those_of_the_loss():
    data = fd.load("digits")
    run = fd.run(
        fd.FFGB(fd.Forest(trees=2), loss="logistic"),
        fd.split(data, "iid", clients=2),
        2,
        evaluate_every=0,
    )
    x, want = data.x_test[:100], run.model.predict_proba(data.x_test[:100])
    small = fd.prune(run, x, data.y_test[:100], tolerance=0.0, refit=False)
    f = small.model.outputs(x).double().numpy()
    sigmoid = 1 / (1 + np.exp(-f))
    np.testing.assert_allclose(
        small.model.predict_proba(x), sigmoid / sigmoid.sum(1, keepdims=True), atol=1e-5
    )
    if len(small) == 4:
        np.testing.assert_allclose(small.model.predict_proba(x), want, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float64])
def test_labels_of_any_dtype(run, rows, dtype):
    """Data sets often have labels of uint8, and files of floats; they are classes all the same."""
    assert len(fd.prune(run, rows[0], rows[1].astype(dtype))) == len(fd.prune(run, *rows))


def test_a_part_of_the_trees(run, rows):
    trees, _ = run.algorithm.ensemble(run.state)
    part = some_trees(trees, 4, 6)
    assert len(part.roots) == 2 and int(part.roots[0]) == 0
    said = contributions(run, rows[0][:20])[2]
    weight = run.algorithm.ensemble(run.state)[1][2]
    found = run.algorithm.oracle.values(
        part, weight.reshape(1), torch.from_numpy(rows[0][:20]), run.spec
    )
    np.testing.assert_allclose(found, said, atol=1e-4)


def test_one_function_that_says_the_same(run):
    data = fd.load("digits")
    teacher = run.model.predict(data.x_test)
    forest = fd.distil(run, data.x_train, fd.Forest(trees=20, depth=None, features=1.0))
    assert len(forest) == 1 and (forest.model.predict(data.x_test) == teacher).mean() > 0.9
    net = fd.distil(
        run, data.x_train, fd.Net(fd.MLP(16), fd.Training(lr=0.01, optimizer="adam", epochs=30))
    )
    assert (
        net.model.predict(data.x_test) == teacher
    ).mean() > 0.85 and net.nbytes < forest.nbytes / 50


def test_bad_input(run, rows):
    x, y = rows
    with pytest.raises(fd.DataError, match=r"x has shape \(150, 3\)"):
        fd.prune(run, x[:, :3], y)
    with pytest.raises(fd.DataError, match="150 rows and y 149"):
        fd.prune(run, x, y[:-1])
    with pytest.raises(fd.ConfigError, match="tolerance=-1"):
        fd.prune(run, x, y, -1)
    other = fd.run(fd.FedAvg(fd.Linear()), fd.split(fd.load("digits"), "iid", clients=2), 1)
    with pytest.raises(fd.ConfigError, match="runs of FFGB, not of FedAvg"):
        fd.distil(other, x)
    empty = fd.run(fd.FFGB(), fd.split(fd.load("digits"), "iid", clients=2), 0)
    with pytest.raises(fd.ConfigError, match="at least one round"):
        fd.distil(empty, x)
