"""Rows with weights: the objective is sum_i w_i loss_i / sum_i w_i, and integer weights are the
same as repeated rows.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.metrics import accuracy_score, log_loss
from sklearn.tree import DecisionTreeRegressor
from torch import nn

import foedus as fd
from foedus.algorithms.ffgb.boost import weights_of
from foedus.base import tree
from foedus.core.algorithm import Client
from foedus.core.facts import facts_of

SIZES = (9, 5, 13)


def rows(regression=False, seed=3):
    """Unequal clients, and an integer weight from 0 to 4 for each row."""
    rng = np.random.default_rng(seed)
    n = sum(SIZES)
    x = rng.standard_normal((n, 4)).astype(np.float32)
    y = (x @ [1.0, -0.5, 0.3, 0.1] + 0.3 * rng.standard_normal(n)).astype(np.float32)
    weights = rng.integers(0, 5, n)
    return x, y if regression else (y > 0.1).astype(np.int64), weights


def parts(*arrays):
    return zip(*(np.split(a, np.cumsum(SIZES)[:-1]) for a in arrays), strict=True)


def weighted(regression=False, scale=0.37):
    """Weights of any scale mean the same."""
    x, y, w = rows(regression)
    tested = (x[::3] + 0.1, y[::3], 0.5 + w[::3])
    return fd.Federation.from_clients(list(parts(x, y, scale * w)), test=tested)


def repeated(regression=False):
    """Each row as often as its weight says."""
    x, y, w = rows(regression)
    many = [(np.repeat(a, k, 0), np.repeat(b, k)) for a, b, k in parts(x, y, w)]
    return fd.Federation.from_clients(many, test=(x[::3] + 0.1, y[::3]))


def close(first, second, within=1e-6):
    pairs = zip(tree.leaves(first), tree.leaves(second), strict=True)
    assert all(torch.allclose(a, b, atol=within, rtol=1e-4) for a, b in pairs)


ONE_STEP = {"lr": 0.37, "batch_size": None}


@pytest.mark.parametrize(
    "algorithm",
    [
        fd.FedAvg(fd.Linear(), **ONE_STEP),
        fd.FedAvg(fd.MLP(5), **ONE_STEP),
        fd.FedAvg(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), **ONE_STEP),
        fd.FedProx(fd.Linear(), mu=0.3, **ONE_STEP),
        fd.FedAvg(fd.Linear(), server_momentum=0.5, weight_decay=0.1, **ONE_STEP),
        fd.ProjectedFedAvg(fd.Linear(), domain=fd.L2Ball(0.4), **ONE_STEP),
        fd.Central(fd.Linear(), momentum=0.9, **ONE_STEP),
    ],
    ids=lambda a: f"{type(a).__name__}-{type(a.model).__name__}",
)
@pytest.mark.parametrize("engine", [fd.Local(batch=True), fd.Local(batch=False)])
def test_integer_weights_are_repeated_rows_in_full_batch_steps(algorithm, engine):
    """Three rounds; a round's average step is that of the weighted objective of all rows."""
    first = fd.run(algorithm, weighted(), 3, engine=engine)
    second = fd.run(algorithm, repeated(), 3, engine=engine)
    close(first.state.w, second.state.w)
    for column in set(first.history) & {"objective", "fw_gap"}:
        assert np.allclose(first.history[column], second.history[column], atol=1e-5, equal_nan=True)


def test_compiled_and_generic_training_agree_on_weighted_mini_batches(monkeypatch):
    from foedus.models.training import descend, gradients

    algorithm = fd.FedAvg(fd.Linear(), lr=0.2, batch_size=4, epochs=2)
    compiled = fd.run(algorithm, weighted(), 3, participation=0.7).state.w
    for module in (descend, gradients):
        monkeypatch.setattr(module, "knows", lambda *_: False)
    close(fd.run(algorithm, weighted(), 3, participation=0.7).state.w, compiled, 1e-5)


def test_a_mini_batch_step_is_the_weighted_mean_over_its_rows():
    """b rows count 1/b sum_j w_j loss_j: one client, two rows, one row a batch, by hand."""
    x, y, w = np.array([[1.0], [2.0]]), np.array([1.0, -1.0]), np.array([3.0, 1.0])
    fed = fd.Federation.from_clients([(x, y, w)], test=(x, y, w))
    algorithm = fd.FedAvg(fd.Linear(bias=False), lr=0.1, batch_size=1)
    found = float(next(iter(fd.run(algorithm, fed, 1).state.w.values())))
    # weights 1.5 and 0.5; from w = 0 the steps are -0.1 * v (w x - y) x, in either order
    first = 0 - 0.1 * 1.5 * (0 * 1 - 1) * 1
    then = first - 0.1 * 0.5 * (first * 2 + 1) * 2
    other = 0 - 0.1 * 0.5 * (0 * 2 + 1) * 2
    there = other - 0.1 * 1.5 * (other * 1 - 1) * 1
    assert found == pytest.approx(then) or found == pytest.approx(there)


@pytest.mark.parametrize(
    "algorithm",
    [
        fd.FedFW(fd.Linear(), fd.L1Ball(3.0), penalty=0.5),
        fd.NaiveFW(fd.Linear(), fd.L2Ball(3.0)),
        fd.Scaffold(fd.Linear(), option=1, **ONE_STEP),
        fd.Scaffold(fd.Linear(), **ONE_STEP),
        fd.FedDyn(fd.Linear(), alpha=0.1, **ONE_STEP),
        fd.FedDR(fd.Linear(), eta=1.0, **ONE_STEP),
        fd.Independent(fd.Linear(), **ONE_STEP),
        fd.FedAdam(fd.Linear(), weights="uniform", **ONE_STEP),
        fd.FedNova(fd.Linear(), weights="uniform", **ONE_STEP),
        fd.Ditto(fd.Linear(), weights="uniform", **ONE_STEP),
        fd.FedRep(fd.MLP(3), weights="uniform", **ONE_STEP),
    ],
    ids=lambda a: f"{type(a).__name__}-{getattr(a, 'option', '')}",
)
def test_where_clients_count_alike_their_mean_weights_scale_their_objectives(algorithm):
    """With a mean weight of 1 at every client, it is repeated rows again."""
    x, y, _ = rows()
    even = [np.resize([2, 1, 0], n) for n in SIZES]  # of 9, 5 and 13 rows
    even[1][4], even[2][12] = 0, 1
    assert [w.mean() for w in even] == [1, 1, 1]
    w = np.concatenate(even)
    fed = fd.Federation.from_clients(list(parts(x, y, w)), test=(x, y, w + 1))
    many = [(np.repeat(a, k, 0), np.repeat(b, k)) for a, b, k in parts(x, y, w)]
    again = fd.Federation.from_clients(many, test=(x, y))
    first, second = (fd.run(algorithm, f, 3) for f in (fed, again))
    if algorithm.personal:
        first, second = (r.client_states().get(1)["w"] for r in (first, second))
        close(first, second)
    else:
        close(first.model.form.params, second.model.form.params)


def test_a_client_whose_rows_weigh_nothing_teaches_nothing():
    x, y, w = rows()
    w = w.astype(float)
    w[: SIZES[0]] = 0
    fed = fd.Federation.from_clients(list(parts(x, y, w)), test=(x, y, w + 1))
    run = fd.run(fd.FedAvg(fd.Linear(), **ONE_STEP), fed, 2)
    others = fed.select([1, 2])
    rate = 0.37  # the others' average counts what it would without the first
    alone = fd.run(fd.FedAvg(fd.Linear(), lr=rate, batch_size=None), others, 2)
    close(run.state.w, alone.state.w)


# -- closed forms ----------------------------------------------------------------------------------


def ridge(x, y, w, reg):
    """sum_i w_i (x_i w - y_i)^2 / sum_i w_i + reg |w|^2, by scikit-learn."""
    model = Ridge(alpha=reg * w.sum(), fit_intercept=False, solver="cholesky")
    return model.fit(x.astype(float), y, sample_weight=w).coef_


def test_kernel_ridge_regression_is_weighted_least_squares():
    x, y, w = rows(regression=True)
    found = fd.run(fd.KRR(fd.Identity(), reg=0.1), weighted(True), 0).state.w[:, 0]
    assert np.allclose(found, ridge(x, y, w, 0.1), atol=1e-6)


@pytest.mark.parametrize("size", [3, 40], ids=["more rows than features", "fewer"])
def test_fednewton_goes_to_weighted_ridge_regression(size):
    algorithm = {"reg": 0.05, "solver": "cg"}
    features = fd.RandomFourier(size, bandwidth=2.0)
    newton = fd.run(fd.FedNewton(features, **algorithm), weighted(True), 40).state.w
    exact = fd.run(fd.KRR(features, reg=0.05), weighted(True), 0).state.w
    again = fd.run(fd.KRR(features, reg=0.05), repeated(True), 0).state.w
    assert torch.allclose(newton, exact, atol=1e-6) and torch.allclose(exact, again, atol=1e-6)


def test_a_round_of_fednewton_by_hand():
    """Line by line, with H_j = 1/n_j X_j^T W_j X_j + reg I."""
    reg, x, y, w = 0.3, *rows(regression=True)
    systems, n = [], sum(SIZES)
    for xj, yj, wj in parts(x.astype(float), y.astype(float), w / w.mean()):
        h = (xj * wj[:, None]).T @ xj / len(xj) + reg * np.eye(4)
        systems.append((len(xj) / n, h, (xj * wj[:, None]).T @ yj / len(xj)))
    v = sum(p * np.linalg.solve(h, b) for p, h, b in systems)
    for _ in range(3):
        g = sum(p * (h @ v - b) for p, h, b in systems)
        v = v - sum(p * np.linalg.solve(h, g) for p, h, _ in systems)
    found = fd.run(fd.FedNewton(fd.Identity(), reg=reg), weighted(True), 3).state.w[:, 0]
    assert np.allclose(found, v, atol=1e-6)


@pytest.mark.parametrize("loss", ["logistic", "cross_entropy"])
def test_fednewton_with_other_losses_minimizes_the_weighted_objective(loss):
    algorithm = fd.FedNewton(fd.Identity(), reg=0.1, loss=loss)
    first, second = (fd.run(algorithm, f, 25).state.w for f in (weighted(), repeated()))
    assert torch.allclose(first, second, atol=1e-4)


def test_ridge_averaging_uses_weights():
    first, second = (
        fd.run(fd.RidgeFedAvg(fd.Identity(), reg=0.1, lr=0.4, steps=1), f, 600).state.w
        for f in (weighted(True), repeated(True))
    )
    assert torch.allclose(first, second, atol=1e-6)
    x, y, w = rows(regression=True)
    assert np.allclose(first[:, 0], ridge(x, y, w, 0.1), atol=1e-4)


# -- trees -----------------------------------------------------------------------------------------

STUMP = fd.Forest(trees=1, depth=1, extra=False, features=1.0)  # deeper, splits are often equal
TRUSTED = ("sklearn.tree._tree.Tree",)


@pytest.mark.parametrize(
    "oracle",
    [STUMP, fd.Sklearn(DecisionTreeRegressor(max_depth=1), TRUSTED)],
    ids=lambda o: type(o).__name__,
)
def test_boosted_trees_of_weighted_rows_are_those_of_repeated_ones(oracle):
    algorithm = fd.FFGB(oracle, step=0.5, weights="rows")
    first, second = (fd.run(algorithm, f, 3) for f in (weighted(True), repeated(True)))
    x = rows()[0]
    assert np.allclose(first.model.predict(x), second.model.predict(x), atol=1e-5)


def test_one_tree_is_that_of_scikit_learn_with_sample_weight():
    """From f = 0 the target is -y times the mean weight; one client has the mean weight 1."""
    x, y, w = rows(regression=True)
    fed = fd.Federation.from_clients([(x, y, w)], test=(x, y, w))
    run = fd.run(fd.FFGB(STUMP, step=0.5), fed, 1)
    exact = DecisionTreeRegressor(max_depth=1).fit(x, y, sample_weight=w)
    assert np.allclose(run.model.predict(x), 0.5 * exact.predict(x), atol=1e-5)


def test_a_network_oracle_fits_weighted_squares():
    """A linear network, whose minimum is weighted least squares."""
    training = fd.Training(lr=0.2, epochs=2000, batch_size=None)
    x, y, w = rows(regression=True)
    oracle = fd.Net(fd.Linear(bias=False), training)
    worth = torch.from_numpy(w / w.mean()).float()
    spec, key = fd.Spec((4,), None, 1), fd.base.random.key(0)
    found = oracle.fit(torch.from_numpy(x), torch.from_numpy(y)[:, None], key, spec, worth)
    wanted = np.linalg.lstsq(x * np.sqrt(w)[:, None], y * np.sqrt(w), rcond=None)[0]
    assert np.allclose(next(iter(found.values())).flatten(), wanted, atol=1e-4)


def test_the_measure_of_a_client_without_weight_is_uniform():
    class Weightless:
        worth = torch.zeros(3)

    one = torch.zeros(2, dtype=torch.int64)
    client = Client(torch.tensor(0), Weightless(), None, None, one, one, fd.Spec((1,), None, 1))
    mean, measure = weights_of(client)
    assert float(mean) == 0 and measure.tolist() == [1, 1, 1]


# -- evaluation ------------------------------------------------------------------------------------


def test_scores_are_weighted_as_those_of_scikit_learn():
    fed = weighted()
    run = fd.run(fd.FedAvg(fd.Linear(), lr=0.1), fed, 2)
    data = fed.data
    w, p = data.weights_test, run.model.predict_proba(data.x_test)
    assert run.history.accuracy.iloc[-1] == pytest.approx(
        accuracy_score(data.y_test, p.argmax(1), sample_weight=w)
    )
    assert run.history.loss.iloc[-1] == pytest.approx(
        log_loss(data.y_test, p, sample_weight=w), rel=1e-5
    )
    assert any("weighted averages" in note for note in run.notes)
    assert run.settings["federation"]["weighted"] is True
    table = run.per_client()
    for k in range(3):
        own = fed.test_client_rows(k)
        hits = p[own].argmax(1) == data.y_test[own]
        assert table.accuracy[k] == pytest.approx(np.average(hits, weights=w[own]))
        assert table.test_rows[k] == len(own)


@pytest.mark.parametrize("engine", [fd.Local(batch=True), fd.Local(batch=False)])
def test_personal_models_are_scored_by_weight(engine):
    fed = weighted()
    run = fd.run(fd.Independent(fd.Linear(), lr=0.1), fed, 2, engine=engine)
    w, hits, everywhere = fed.data.weights_test, [], []
    for k in range(3):
        said = run.model_of(k).predict(fed.data.x_test) == fed.data.y_test
        everywhere.append(np.average(said, weights=w))
        own = fed.test_client_rows(k)
        hits.append((said[own] * w[own]).sum())
        want = pytest.approx(np.average(said[own], weights=w[own]))
        assert run.per_client().accuracy[k] == want
        assert facts_of(run, measure=True).sites[k].accuracy == want
    held = w[fed.test_rows].sum()
    assert run.history.own_accuracy.iloc[-1] == pytest.approx(sum(hits) / held)
    assert run.history.accuracy.iloc[-1] == pytest.approx(np.mean(everywhere))


# -- who does not know weights ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        (fd.FedRes(fd.Linear(), fd.Linear()), "FedRes"),
        (fd.FedAvgDistill(fd.Linear(), public=np.zeros((3, 4), np.float32)), "FedAvgDistill"),
        (fd.FFGB(fd.MaxNet(fd.Linear())), "MaxNet"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_would_ignore_weights_refuses_them(algorithm, name):
    with pytest.raises(fd.ConfigError, match=rf"{name} does not use the weights.*drop weight="):
        fd.run(algorithm, weighted(), 1)


def test_every_algorithm_of_foedus_says_whether_it_knows_weights():
    known = {
        "FedAvg", "FedProx", "ProjectedFedAvg", "Scaffold", "FedDyn", "FedDR", "Independent",
        "Central", "FedFW", "NaiveFW", "FedNewton", "KRR", "DKRR", "RidgeFedAvg", "RidgeFedProx",
        "FFGB", "FedAdam", "FedYogi", "FedAdagrad", "FedNova", "FineTuned", "Ditto", "FedPer",
        "FedRep", "FedOpt", "FederatedGBDT",
    }  # fmt: skip
    public = {k: getattr(fd, k) for k in dir(fd)}
    ours = {
        k for k, v in public.items()
        if isinstance(v, type) and issubclass(v, fd.Algorithm) and v.weighs_rows
    }  # fmt: skip
    assert ours == known


def test_flower_does_not_carry_weights():
    from foedus.engines.flower.engine import Flower

    with pytest.raises(fd.ConfigError, match="Flower does not carry the weights"):
        Flower.open(object.__new__(Flower), fd.FedAvg(), weighted(), fd.base.random.key(0))


# -- where weights come from -----------------------------------------------------------------------


def table(n=24):
    rng = np.random.default_rng(0)
    columns = {"a": rng.standard_normal(n), "b": rng.standard_normal(n)}
    frame = pd.DataFrame({**columns, "y": np.arange(n) % 2, "site": np.arange(n) % 3})
    return frame.assign(w=np.arange(n) + 0.5)


def test_a_column_of_weights_follows_its_rows():
    """Each row's weight is its number and a half, and so is its place in the table."""
    frame = table()
    data = fd.load(frame, label="y", group="site", weight="w", test=0.25, scale=None)
    assert data.preprocess.names == ("a", "b")

    def matches(x, weights):
        place = [int(np.flatnonzero(np.float32(frame.a) == row[0])[0]) for row in x]
        return np.array_equal(weights, np.array(place) + 0.5)

    assert matches(data.x_train, data.weights_train) and matches(data.x_test, data.weights_test)
    for fed in (fd.split(data, "natural"), fd.split(data, "dirichlet", clients=3, alpha=1.0)):
        held = fed.select([2, 0]).holdout(0.3).data
        assert matches(held.x_train, held.weights_train) and matches(held.x_test, held.weights_test)
    sites = {str(k): part.drop(columns="site") for k, part in frame.groupby("site")}
    fed = fd.Federation.from_clients(sites, label="y", weight="w", test=0.25, scale=None)
    assert matches(fed.data.x_train, fed.data.weights_train)
    assert matches(fed.data.x_test, fed.data.weights_test)


def test_weights_of_files_and_of_a_test_table(tmp_path):
    frame = table().drop(columns="site")
    frame.to_csv(tmp_path / "t.csv", index=False)
    data = fd.load(tmp_path / "t.csv", label="y", weight="w", test=frame[:5])
    assert data.weights_train.tolist() == frame.w.tolist()
    assert data.weights_test.tolist() == frame.w[:5].tolist()
    both = fd.load(tmp_path / "t.csv", label="y", weight="w", test=0.5)
    assert sorted([*both.weights_train, *both.weights_test]) == frame.w.tolist()


def test_weights_are_scaled_over_the_clients_that_are_there():
    fed = weighted().select([0, 2])
    made = fed.with_mean_weight_one()
    assert made.data.weights_train[made.rows].mean() == pytest.approx(1)
    assert made.data.weights_train[made.rows[0]] * fed.data.weights_train[fed.rows].mean() == (
        pytest.approx(fed.data.weights_train[fed.rows[0]])
    )


def test_other_weights_are_another_federation():
    first, second = weighted().fingerprint, weighted(scale=2.0).fingerprint
    assert {k for k in first if first[k] != second[k]} == {"training rows"}


def test_a_run_of_weighted_rows_goes_on_and_is_saved(tmp_path):
    algorithm, path = fd.FedAvg(fd.Linear(), lr=0.1), tmp_path / "c.safetensors"
    whole = fd.run(algorithm, weighted(), 3)
    fd.run(algorithm, weighted(), 1, checkpoint=path)
    again = fd.run(algorithm, weighted(), 3, checkpoint=path, resume=True)
    close(whole.state.w, again.state.w, 0)
    assert len(again.notes) == 1
    again.save(tmp_path / "r.safetensors")
    assert fd.Run.load(tmp_path / "r.safetensors").spec.weighted
    x, y, w = rows()
    tested = (x[::3] + 0.1, y[::3], 0.5 + w[::3])
    other = fd.Federation.from_clients(list(parts(x, y, w + 1.0)), test=tested)
    with pytest.raises(fd.CheckpointError, match="data of the federation differ"):
        fd.run(algorithm, other, 4, checkpoint=path, resume=True)


def test_settings_are_chosen_by_weighted_scores():
    found = fd.tune(fd.FedAvg(fd.Linear()), weighted(), rounds=2, grid={"lr": [0.1, 0.5]})
    assert found.best.lr in (0.1, 0.5)


def test_a_diagnosis_says_that_it_does_not_weigh():
    x, y, w = (np.concatenate([v] * 4) for v in rows())
    fed = fd.Federation.from_clients([(x[k::2], y[k::2], w[k::2] + 1.0) for k in (0, 1)])
    with pytest.warns(UserWarning, match="does not use the weights of rows"):
        fd.diagnose(fed)
