"""fd.tune finds what a closed form finds, on validation rows alone, and the same wherever and
however it runs.
"""

from __future__ import annotations

import os
import re
import threading
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import foedus as fd
from foedus.cli.app import app
from foedus.config.experiment import algorithm_section, read_config
from foedus.tuning import grid as grids
from foedus.tuning import search, tune

ROUNDS_RUN: list[float] = []
"""The lr of every round that a `Toy` has made in this process."""


@dataclass(frozen=True)
class Toy(fd.Algorithm):
    """w <- w - lr (w - 1) from w = 0: after t rounds the squared error of w, where every y is 1, is
    (1 - lr)^(2 t).
    """

    lr: float = 0.5
    fails_in: int = 10**9
    extra: Callable | None = None

    def start(self, clients):
        return fd.State(w=torch.zeros((), dtype=torch.float64), t=0, spec=clients.spec)

    def round(self, clients, state):
        ROUNDS_RUN.append(self.lr)
        if state.t + 1 >= self.fails_in:
            raise fd.DivergenceError(f"round {clients.round}: it was to fail", clients.round)
        return state.replace(w=state.w - self.lr * (state.w - 1), t=state.t + 1)

    def predictor(self, state):
        return fd.Predictor(lambda x: state.w.expand(len(x), 1), state.spec)

    def row_loss(self, outputs, y):
        return (outputs[:, 0] - y).square()


def ones(rows: int = 10) -> fd.Federation:
    x, y = np.zeros((rows, 1), np.float32), np.ones(rows, np.float32)
    return fd.split(fd.Data.from_arrays(x, y), "iid", clients=2)


def numbers(found: fd.Tuning) -> Any:
    return found.table.drop(columns="seconds")


# -- validation rows -------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6).filter(lambda s: max(s) > 1),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 5),
)
def test_a_holdout_loses_no_row_and_leaves_everybody_some(sizes, fraction, seed):
    n = sum(sizes)
    x = np.arange(n, dtype=np.float32)[:, None]  # a row is known by its value
    owner = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    data = fd.Data.from_arrays(
        x, np.arange(n) % 2, np.full((3, 1), -1, np.float32), np.zeros(3, int), classes=2
    )
    whole = fd.Federation.from_owners(
        data, owner, np.zeros(3, int), np.arange(len(sizes)) + 7, "given", {}
    )
    part = whole.holdout(fraction, seed)
    assert part.ids.tolist() == whole.ids.tolist()
    for p, size in enumerate(sizes):
        kept, held = (
            part.data.x_train[part.client_rows(p), 0],
            part.data.x_test[part.test_client_rows(p), 0],
        )
        assert sorted([*kept, *held]) == np.flatnonzero(owner == p).tolist()
        assert kept.tolist() == sorted(kept)  # in the order of before
        assert len(held) == min(max(round(fraction * size), 1), size - 1)
        assert (part.data.y_test[part.test_client_rows(p)] == held % 2).all()
    assert len(part.data.x_test) == len(part.test_rows)  # nothing of the test rows is left
    again = whole.select(np.arange(len(sizes))[::-1].copy()).holdout(fraction, seed)
    assert sorted(again.data.x_test[:, 0]) == sorted(part.data.x_test[:, 0])  # whoever comes first
    assert np.array_equal(again.data.x_test, part.data.x_test)


def test_holdouts_of_other_seeds_are_others(fed):
    first, again, other = (fed.holdout(0.3, seed).rows for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_holdout_keeps_groups_and_forgets_where_test_rows_came_from(digits):
    tasks = fd.split(digits, "tasks", clients=4, seed=0)
    part = tasks.holdout(0.25)
    assert "source_test_rows" not in part.settings and "global_features" in part.settings
    owner = np.repeat(np.arange(4), part.test_sizes)
    assert np.array_equal(part.data.groups_test[part.test_rows], owner)


@pytest.mark.parametrize(
    "wrong", [{"fraction": 0}, {"fraction": 1.0}, {"fraction": "a"}, {"seed": -1}, {"seed": 0.5}]
)
def test_holdout_refuses(fed, wrong):
    with pytest.raises(fd.SplitError, match=next(iter(wrong))):
        fed.holdout(**wrong)


def test_test_rows_are_never_touched(fed):
    """Other test rows, or none, and the same scores to the last bit."""
    grid, options = {"lr": [0.01, 0.1, 1.0]}, {"rounds": 2, "workers": 1}
    expected = numbers(fd.tune(fd.FedAvg(), fed, grid=grid, **options))
    data = fed.data
    corrupt = replace(data, x_test=data.x_test * 1e6 - 7, y_test=(data.y_test + 1) % 10)
    none = replace(data, x_test=data.x_test[:0], y_test=data.y_test[:0])
    assert expected.equals(
        numbers(fd.tune(fd.FedAvg(), replace(fed, data=corrupt), grid=grid, **options))
    )
    without = replace(fed, data=none, test_rows=[], test_offsets=np.zeros(len(fed) + 1))
    assert expected.equals(numbers(fd.tune(fd.FedAvg(), without, grid=grid, **options)))
    # That they could have mattered: on them, the same runs have other accuracies.
    finals = [
        fd.run(fd.FedAvg(lr=0.1), replace(fed, data=d), 2).records.last("accuracy")
        for d in (data, corrupt)
    ]
    assert finals[0] != finals[1]


# -- the choice ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def noisy() -> fd.Federation:
    """Few rows, many features, much noise: too little regularization overfits, too much forgets."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(60, 20)).astype(np.float32)
    y = (x @ rng.normal(size=20) + 3 * rng.normal(size=60)).astype(np.float32)
    return fd.split(fd.Data.from_arrays(x, y), "iid", clients=3, seed=1)


def ridge(x: np.ndarray, y: np.ndarray, reg: float) -> np.ndarray:
    return np.linalg.solve(x.T @ x / len(x) + reg * np.eye(x.shape[1]), x.T @ y / len(x))


REGS = [1e-4, 1e-2, 0.1, 0.3, 1.0, 3.0, 100.0]


def test_the_best_reg_is_that_of_the_closed_form(noisy):
    scores = {reg: [] for reg in REGS}
    averaged = {reg: [] for reg in REGS}
    for seed in (0, 1):
        part = noisy.holdout(0.25, seed)
        x, y = part.data.x_train.astype(float), part.data.y_train.astype(float)
        vx, vy = part.data.x_test.astype(float), part.data.y_test.astype(float)
        own = [part.client_rows(p) for p in range(3)]
        for reg in REGS:
            scores[reg].append(np.mean((vx @ ridge(x[part.rows], y[part.rows], reg) - vy) ** 2))
            w = sum(len(r) / len(part.rows) * ridge(x[r], y[r], reg) for r in own)
            averaged[reg].append(np.mean((vx @ w - vy) ** 2))
    for algorithm, by_hand in ((fd.KRR, scores), (fd.DKRR, averaged)):
        found = fd.tune(
            algorithm(fd.Identity()),
            noisy,
            0,
            grid={"reg": REGS},
            seeds=2,
            validation=0.25,
            workers=1,
        )
        best = min(REGS, key=lambda reg, s=by_hand: np.mean(s[reg]))
        assert REGS[0] < best < REGS[-1]
        assert found.values == {"reg": best}
        assert found.best == algorithm(fd.Identity(), reg=best)
        table = found.table.sort_values("reg")
        assert table.score.tolist() == pytest.approx(
            [np.mean(by_hand[reg]) for reg in REGS], rel=1e-5
        )
        assert table.spread.tolist() == pytest.approx(
            [np.std(by_hand[reg], ddof=1) for reg in REGS], rel=1e-4
        )
        assert found.table.score.is_monotonic_increasing
        assert found.border == ()


def test_scores_are_the_toys_own():
    lrs = [0.25, 0.5, 1.5, 1.75]
    found = fd.tune(Toy(), ones(), 3, grid={"lr": lrs}, halving=None, workers=1)
    by_hand = {lr: (1 - lr) ** 6 for lr in lrs}
    assert dict(zip(found.table.lr, found.table.score, strict=True)) == pytest.approx(by_hand)
    # 0.5 and 1.5 are equals: the first in the grid comes first
    assert found.table.lr.tolist() == [0.5, 1.5, 0.25, 1.75]
    assert found.table.rounds.tolist() == [3] * 4
    assert found.table.index.tolist() == [1, 2, 0, 3]


@dataclass(frozen=True)
class Sides(Toy):
    """Says of x that it is of the class x > 0, with the logit side * scale * x."""

    side: int = 1
    scale: float = 1.0

    def predictor(self, state):
        return fd.Predictor(
            lambda x: torch.cat((torch.zeros_like(x), self.side * self.scale * x), 1), state.spec
        )

    def row_loss(self, outputs, y):
        return torch.nn.functional.cross_entropy(outputs, y, reduction="none")


def test_accuracy_is_maximized_and_ties_are_broken_by_the_loss():
    x = np.array([[-1.0], [1.0]] * 10, np.float32)
    fed = fd.split(fd.Data.from_arrays(x, (x[:, 0] > 0).astype(int)), "iid", clients=2)
    grid = {"side": [-1, 1], "scale": [1.0, 3.0, 2.0]}
    found = fd.tune(Sides(), fed, 0, grid=grid, workers=1)
    assert found.metric == "accuracy"
    assert found.table.score.tolist() == [1.0] * 3 + [0.0] * 3
    assert list(zip(found.table.side, found.table.scale, strict=True)) == [
        (1, 3),
        (1, 2),
        (1, 1),
        (-1, 1),
        (-1, 2),
        (-1, 3),
    ]
    by_loss = fd.tune(Sides(), fed, 0, grid=grid, metric="loss", workers=1)
    assert by_loss.values == {"side": 1, "scale": 3.0}
    assert by_loss.table.score.iloc[-1] == pytest.approx(np.log(1 + np.exp(3)))


def test_personal_models_are_judged_on_their_own_clients_rows(fed):
    found = fd.tune(fd.Independent(), fed, 2, grid={"lr": [0.001, 0.1]}, workers=1)
    assert found.metric == "own_accuracy"
    for row in found.table.to_dict("records"):
        alone = fd.run(fd.Independent(lr=row["lr"]), fed.holdout(0.2, 0), 2)
        assert row["score"] == alone.records.last("own_accuracy")
    assert (
        fd.tune(fd.Independent(), fed, 1, grid={"lr": [0.1]}, metric="accuracy", workers=1).metric
        == "accuracy"
    )


def test_each_seed_has_a_run_and_validation_rows_of_its_own(fed):
    algorithm = fd.FedAvg(fd.MLP(4), lr=0.1)
    found = fd.tune(
        algorithm,
        fed,
        2,
        grid={"lr": [0.1]},
        seeds=[4, 1],
        participation=0.5,
        metric="loss",
        workers=1,
    )
    alone = [
        fd.run(algorithm, fed.holdout(0.2, s), 2, seed=s, participation=0.5).records.last("loss")
        for s in (4, 1)
    ]
    assert found.table.score.tolist() == [pytest.approx(np.mean(alone), rel=1e-12)]
    assert found.table.spread.tolist() == [pytest.approx(np.std(alone, ddof=1), rel=1e-9)]


def test_single_rows_stay_with_their_clients():
    x = np.zeros((4, 1), np.float32)
    pairs = [(x[:1], np.ones(1, np.float32)), (x[:3], np.ones(3, np.float32))]
    assert (
        fd.tune(
            Toy(), fd.Federation.from_clients(pairs), 1, grid={"lr": [0.5]}, workers=1
        ).table.score[0]
        == 0.25
    )
    with pytest.raises(fd.SplitError, match="each of the 2 clients has a single training row"):
        fd.tune(
            Toy(),
            fd.Federation.from_clients([pairs[0], pairs[0]]),
            1,
            grid={"lr": [0.5]},
            workers=1,
        )


# -- halving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "rounds", "halving", "rungs"),
    [
        (3, 90, 3, [90]),  # as few as the last comparison has
        (4, 90, 3, [30, 90]),
        (9, 90, 3, [30, 90]),
        (10, 90, 3, [10, 30, 90]),
        (27, 8, 3, [1, 3, 8]),
        (81, 1, 3, [1]),
        (81, 0, 3, [0]),
        (8, 100, 2, [25, 50, 100]),
        (100, 100, None, [100]),
    ],
)
def test_rungs(cells, rounds, halving, rungs):
    assert tune._rungs(cells, rounds, halving) == rungs


def test_halving_continues_and_finds_what_the_whole_grid_finds():
    lrs = [0.01, 0.02, 0.05, 0.1, 0.2, 0.9, 1.6, 1.7, 1.8]
    whole = fd.tune(Toy(), ones(), 9, grid={"lr": lrs}, halving=None, workers=1)
    ROUNDS_RUN.clear()
    halved = fd.tune(Toy(), ones(), 9, grid={"lr": lrs}, workers=1)
    assert len(ROUNDS_RUN) == 9 * 3 + 3 * 6  # nobody began again
    assert halved.values == whole.values == {"lr": 0.9}
    assert halved.table.rounds.tolist() == [9] * 3 + [3] * 6
    assert halved.table.lr.tolist()[:3] == whole.table.lr.tolist()[:3]
    assert halved.table.score.tolist()[:3] == whole.table.score.tolist()[:3]
    assert halved.table.score.tolist()[3:] == pytest.approx(
        [(1 - lr) ** 6 for lr in halved.table.lr[3:]]
    )


def test_a_score_counts_after_as_many_rounds_only():
    """Errors that grow with the rounds: those that were left behind have smaller ones, but after
    fewer rounds.
    """
    found = fd.tune(Toy(), ones(), 6, grid={"lr": [2.35, 2.3, 2.25, 2.2]}, halving=2, workers=1)
    assert found.values == {"lr": 2.2}
    assert found.table.lr.tolist() == [2.2, 2.25, 2.3, 2.35]
    assert found.table.score.tolist() == pytest.approx([1.2**12, 1.25**12, 1.3**6, 1.35**6])


@pytest.mark.parametrize(
    ("algorithm", "name", "options"),
    [
        (
            fd.FedAvg(fd.MLP(6), lr=0.05, server_momentum=0.5),
            "lr",
            {"participation": 0.5, "quantise": "int8"},
        ),
        (fd.Scaffold(fd.Linear(), lr=0.1), "lr", {"participation": fd.Poisson(0.6)}),
        (fd.FedAvg(fd.Linear()), "lr", {"engine": fd.Delayed(fd.Local(), up=1, down=1)}),
        (fd.FedFW(fd.Linear(), fd.L2Ball(5.0), schedule="nonconvex", horizon=6), "penalty", {}),
        (fd.FedNewton(fd.RandomFourier(30, bandwidth=4.0), solver="cg"), "reg", {}),
        (fd.Independent(fd.Linear(), lr=0.1, momentum=0.5), "lr", {"participation": 0.5}),
        (fd.FFGB(fd.Forest(trees=1, depth=2)), "mu", {}),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, fd.Algorithm) else "",
)
def test_a_survivor_has_the_numbers_of_a_run_that_was_never_stopped(fed, algorithm, name, options):
    grid = {name: [0.03, 0.1, 0.3]}
    loss = "own_loss" if algorithm.personal else "loss"
    found = fd.tune(algorithm, fed, 6, grid=grid, halving=2, metric=loss, workers=1, **options)
    assert found.table.rounds.tolist() == [6, 6, 3]
    for row in found.table.to_dict("records"):
        alone = fd.run(
            replace(algorithm, **{name: row[name]}), fed.holdout(0.2, 0), row["rounds"], **options
        )
        assert row["score"] == alone.records.last(loss)


# -- failures --------------------------------------------------------------------------------------


def test_what_diverges_comes_last(fed):
    found = fd.tune(
        fd.FedAvg(fd.MLP(4)), fed, 2, grid={"lr": [1e30, 0.01, 0.1]}, seeds=2, workers=1
    )
    assert found.table.lr.tolist()[-1] == 1e30
    last = found.table.iloc[-1]
    assert np.isnan(last.score) and np.isnan(last.spread) and last.rounds == 0
    assert re.match(r"round 1: .*not finite", last.failed)
    assert found.table.failed.tolist()[:2] == ["", ""]
    assert "1 of 3 failed; lr = 1e+30: round 1" in str(found)


def test_a_singular_system_is_a_failure_too(values):
    newton = fd.FedNewton(fd.Polynomial(3), dtype="float32", solver="cg")
    found = fd.tune(newton, values, 1, grid={"reg": [1e-30, 0.1]}, workers=1)
    assert found.values == {"reg": 0.1}
    assert "too small" in found.table.failed.iloc[1]


def test_all_that_went_on_fail():
    """Those that were left behind take their place, from where they were."""
    grid = {"lr": [0.9, 0.8, 0.3, 0.2], "fails_in": [5]}
    make = lambda lr, fails_in: Toy(lr, fails_in if lr > 0.5 else 10**9)  # noqa: E731
    ROUNDS_RUN.clear()
    found = fd.tune(make, ones(), 6, grid=grid, halving=2, workers=1)
    assert found.values["lr"] == 0.3
    assert found.table.lr.tolist() == [0.3, 0.2, 0.9, 0.8]
    assert found.table.rounds.tolist() == [6, 6, 4, 4]
    assert found.table.score[2] == pytest.approx(0.7**12)
    assert len(ROUNDS_RUN) == 4 * 3 + 2 * 2 + 2 * 3


def test_if_everything_fails_the_first_failure_is_named():
    with pytest.raises(
        fd.DivergenceError, match=r"every combination of the grid failed; lr = 0.1: round 2: it was"
    ) as caught:
        fd.tune(Toy(fails_in=2), ones(), 3, grid={"lr": [0.1, 0.2]}, workers=1)
    assert caught.value.round == 2


# -- the grid --------------------------------------------------------------------------------------


def test_values_reach_fields_of_fields_all_at_once():
    base = fd.FedFW(fd.MLP(8), fd.L2Ball(1.0))
    grid = {
        "domain.radius": [2.0],
        "model.hidden": [(3,)],
        "horizon": [7],
        "schedule": ["nonconvex"],
    }
    made = grids.build(base, {k: v[0] for k, v in grid.items()})
    # The schedule needs a horizon: one after the other would be refused.
    assert made == fd.FedFW(fd.MLP((3,)), fd.L2Ball(2.0), horizon=7, schedule="nonconvex")


def test_a_function_or_a_class_makes_the_algorithm():
    assert fd.tune(Toy, ones(), 1, grid={"lr": np.array([0.5, 0.25])}, workers=1).best == Toy(0.5)
    assert fd.tune(lambda a: Toy(a / 2), ones(), 1, grid={"a": (1, 2)}, workers=1).best == Toy(1.0)
    assert (
        type(fd.tune(Toy, ones(), 1, grid={"lr": np.array([0.5])}, workers=1).values["lr"]) is float
    )


def test_the_whole_grid_is_tried_once():
    found = fd.tune(
        lambda a, b: Toy(a * b), ones(), 0, grid={"a": [1, 2, 3], "b": [10, 20]}, workers=1
    )
    assert [(r.a, r.b) for r in found.table.sort_index().itertuples()] == [
        (a, b) for a in (1, 2, 3) for b in (10, 20)
    ]


def test_random_draws():
    grid = {"a": [1, 2, 3], "b": [10, 20, 30]}
    draws = [grids.combinations(grid, 5, seed) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert len({(d["a"], d["b"]) for d in draws[0]}) == 5  # none twice
    every = [{"a": a, "b": b} for a in grid["a"] for b in grid["b"]]
    assert grids.combinations(grid, 9, 0) == grids.combinations(grid, None, 0) == every


def test_draws_from_a_range_are_uniform_in_the_logarithm():
    drawn = grids.combinations({"lr": fd.loguniform(1e-4, 1.0), "b": ["x", "y"]}, 4000, 0)
    lr = np.array([d["lr"] for d in drawn])
    assert lr.min() >= 1e-4 and lr.max() <= 1.0
    counts = np.histogram(np.log10(lr), 4, (-4, 0))[0]
    assert counts == pytest.approx(1000, abs=120)  # four standard deviations
    assert all(float(f"{v:.3g}") == v for v in lr)
    assert {d["b"] for d in drawn} == {"x", "y"}
    narrow = fd.loguniform(0.12345, 0.12346)
    assert all(0.12345 <= narrow.draw(np.random.default_rng(s)) <= 0.12346 for s in range(20))


@pytest.mark.parametrize(
    ("values", "border"),
    [
        ([0.5, 0.7, 1.0], ("lr",)),
        ([1.0, 0.5, 1.5], ()),
        ([1.0, 1.2, 1.3], ("lr",)),
        ([0.5, 1.0], ()),
        ([1.0, 1.0, 0.5], ()),
    ],
)
def test_a_choice_at_the_end_of_its_list_is_reported(values, border):
    found = fd.tune(Toy(), ones(), 1, grid={"lr": values, "extra": [None]}, workers=1)
    assert found.values["lr"] == 1.0
    assert found.border == border
    assert ("lr = 1 is at the end of its list" in str(found)) == bool(border)


def test_what_is_printed():
    found = fd.tune(
        Toy(), ones(), 1, grid={"lr": [k / 20 for k in range(1, 14)]}, halving=None, workers=1
    )
    lines = str(found).splitlines()
    assert lines[0] == "data: 13 settings of Toy, 1 round, 1 seed"
    assert "lr" in lines[2] and "mse" in lines[2] and lines[4].split() == ["0.65", "0.1225", "1"]
    assert len([line for line in lines if re.match(r"0\.\d+ ", line)]) == 10
    assert lines[-3:] == [
        "chosen: lr = 0.65",
        "lr = 0.65 is at the end of its list: better values may lie beyond",
        "3 more in .table",
    ]


def test_a_setting_may_be_none():
    found = fd.tune(Toy(), ones(), 1, grid={"extra": [None, 0.25], "lr": [0.5, 1.0]}, workers=1)
    assert found.values["extra"] is None
    assert found.table.extra.tolist() == [None, 0.25, None, 0.25]
    assert re.search(r"^None +1 +0 +1$", str(found), re.MULTILINE)


ERRORS = [
    ({"grid": {}}, r"grid=\{\} must be a dictionary"),
    ({"grid": {"lr": []}}, r"grid\['lr'\] is empty"),
    ({"grid": {"lr": 0.1}}, r"grid\['lr'\]=0.1 must be a list"),
    ({"grid": {"lr": "ab"}}, r"grid\['lr'\]='ab' must be a list"),
    ({"grid": {"rate": [1]}}, r"setting 'rate' is unknown.*allowed: .*\blr\b.*model\.hidden"),
    ({"grid": {"model.hiden": [1]}}, r"did you mean 'model.hidden'"),
    ({"grid": {"lr": [0.1, -1.0]}}, r"grid: lr = -1: lr=-1.0 must be"),
    (
        {"grid": {"model": [fd.MLP(2)], "model.hidden": [(3,)]}},
        "'model.hidden', which is a part of it",
    ),
    ({"grid": {"score": [1]}}, "'score' is that of a column"),
    ({"grid": {1: [1]}}, "key 1"),
    ({"grid": {"lr": fd.loguniform(0.1, 1)}}, r"grid\['lr'\] is a range, so trials="),
    ({"trials": 3}, "trials=3 is more than the 2 combinations"),
    ({"trials": 0}, "trials=0 must be an integer of at least 1 or None"),
    ({"validation": 0}, "validation=0 must be"),
    ({"validation": 1.0}, "validation=1.0 must be"),
    ({"halving": 1}, "halving=1 must be an integer of at least 2 or None"),
    ({"metric": "mse"}, "metric 'mse' is unknown.*allowed: accuracy, loss"),
    ({"metric": "own_accuracy"}, "metric 'own_accuracy' is unknown"),
    ({"seeds": 0}, "seeds=0 must be at least 1"),
    ({"workers": 0}, "workers=0"),
    ({"rounds": -1}, "rounds=-1"),
    ({"participation": 2}, "participation=2"),
    ({"workers": 2, "engine": fd.Ray(workers=2)}, "workers=2 cannot share engine="),
    ({"algorithm": 3}, "algorithm=3 must be"),
    ({"algorithm": lambda lr: lr}, r"algorithm\(\*\*values\) returned 0.1"),
    ({"fed": 3}, "fed must be a federation"),
]


@pytest.mark.parametrize(("change", "message"), ERRORS, ids=[m[:30] for _, m in ERRORS])
def test_errors(fed, change, message):
    arguments = {
        "algorithm": fd.FedAvg(fd.MLP(4)),
        "fed": fed,
        "rounds": 1,
        "grid": {"lr": [0.1, 0.2]},
        "workers": 1,
        **change,
    }
    with pytest.raises(fd.ConfigError, match=message):
        fd.tune(**arguments)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1, 1), (-1, 1), (1, float("inf")), (True, 2)])
def test_ranges_are_of_positive_numbers(low, high):
    with pytest.raises(fd.ConfigError, match=r"low|high"):
        fd.loguniform(low, high)


def test_a_metric_that_nobody_measures():
    @dataclass(frozen=True)
    class Blind(Toy):
        def predictor(self, state):
            return None

    with pytest.raises(fd.ConfigError, match="metric='mse' is not measured: Blind makes no model"):
        fd.tune(Blind(), ones(), 1, grid={"lr": [0.1]}, workers=1)


# -- processes -------------------------------------------------------------------------------------


def test_the_same_in_two_processes():
    """With arrays large enough to be shared, a cell that diverges, cells that are continued, and
    what no text describes.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3000, 110)).astype(np.float32)
    assert x.nbytes > 1 << 20
    large = fd.split(fd.Data.from_arrays(x, (x[:, 0] + x[:, 1] > 0).astype(int)), "iid", clients=7)
    grid = {"lr": [0.03, 0.1, 1e30, 0.3, 1.0]}
    options = {"seeds": 2, "metric": "loss", "participation": 0.5}
    threads = torch.get_num_threads()
    serial, parallel = (
        fd.tune(fd.FedAvg(fd.MLP(4)), large, 4, grid=grid, workers=w, **options) for w in (1, 2)
    )
    assert numbers(serial).equals(numbers(parallel))
    assert serial.table.rounds.tolist() == [4, 4, 2, 2, 0]
    assert str(serial) == str(parallel)
    assert torch.get_num_threads() == threads

    held = Toy(extra=lambda v: v)  # a function has another address in every process
    lrs = {"lr": [0.1, 0.2, 0.9, 1.5]}
    serial, parallel = (fd.tune(held, ones(), 6, grid=lrs, workers=w) for w in (1, 2))
    assert numbers(serial).equals(numbers(parallel))
    assert parallel.best.extra is held.extra

    with pytest.raises(
        fd.ConfigError,
        match=r"workers=2: the algorithm cannot be sent to another process \(.*lock.*\); use "
        r"workers=1",
    ):
        fd.tune(Toy(extra=threading.Lock().acquire), ones(), 1, grid={"lr": [0.1, 0.2]}, workers=2)


@pytest.mark.parametrize(("patience", "here"), [(1e9, 4), (0.0, 0)])
def test_processes_are_started_once_it_takes_long(monkeypatch, patience, here):
    monkeypatch.setattr(search, "_advance", lambda job: (job, os.getpid()))
    with search._pool(2, patience) as work:
        found = list(work([(k,) for k in range(4)]))
    assert [job for job, _ in found] == [0, 1, 2, 3]
    assert sum(pid == os.getpid() for _, pid in found) == here


def test_one_thread_in_this_process_and_then_as_many_as_before():
    seen = []

    @dataclass(frozen=True)
    class Watched(Toy):
        def round(self, clients, state):
            seen.append(torch.get_num_threads())
            return super().round(clients, state)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        fd.tune(Watched(), ones(), 1, grid={"lr": [0.1]}, workers=1)
        assert seen == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# -- the command -----------------------------------------------------------------------------------

CONFIG = """
data      = { name = "wine" }
split     = { scheme = "iid", clients = 4 }
algorithm = { type = "FedAvg", batch_size = "none", model = { type = "MLP", hidden = [4] } }

[run]
rounds = 2
seed = 3
participation = 0.5
checkpoint = "c.safetensors"
evaluate_every = 2

[tune]
lr = [0.01, 0.3]
model.hidden = [[4], [5, 3]]
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str):
        (tmp_path / "c.toml").write_text(text)
        return "c.toml"

    return write


def test_the_command_prints_what_to_paste(file):
    done = CliRunner().invoke(
        app, ["tune", file(CONFIG + "[tune.options]\nworkers = 1\nhalving = 'none'\n")]
    )
    assert done.exit_code == 0, done.output
    assert "wine: 4 settings of FedAvg, 2 rounds, 1 seed" in done.output
    experiment = read_config("c.toml", "tune")
    assert experiment.grid == {"lr": [0.01, 0.3], "model.hidden": [(4,), (5, 3)]}
    assert experiment.tune_options == {"workers": 1, "halving": None}
    (algorithm,) = experiment.algorithms.values()
    fed = experiment.federation()
    found = fd.tune(
        algorithm,
        fed,
        2,
        grid=experiment.grid,
        seeds=[3],
        participation=0.5,
        halving=None,
        workers=1,
    )
    assert str(found) in done.output
    section = done.output[done.output.index("[algorithm]") :]
    pasted = re.sub(r"algorithm = .*\n", "", CONFIG.split("[tune]")[0]) + section
    assert read_config(file(pasted), "run").algorithms == {"": found.best}
    assert tomllib.loads(section)["algorithm"]["lr"] == found.values["lr"]


def test_the_section_of_an_algorithm_names_what_was_chosen():
    best = fd.FedNewton(fd.RandomFourier(30, bandwidth=1.0), reg=1e-4, solver="cg")
    assert algorithm_section(best).splitlines() == [
        "[algorithm]",
        'type = "FedNewton"',
        'features = { type = "RandomFourier", dim = 30 }',
        'solver = "cg"',
    ]
    assert "reg = 0.0001" in (named := algorithm_section(best, ["reg", "features.bandwidth"]))
    assert 'features = { type = "RandomFourier", dim = 30, bandwidth = 1.0 }' in named


def test_other_commands_leave_the_section_alone(file):
    assert read_config(file(CONFIG), "run").grid == {}
    examples = os.path.join(os.path.dirname(__file__), "..", "..", "examples", "fednewton.toml")
    assert set(read_config(examples, "tune").grid) == {"features.bandwidth", "reg"}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("", "tune: the section [tune] is missing"),
        ("[tune]", "tune: has nothing to try"),
        (
            "[tune]\nepoch = [1]",
            "tune.epoch: FedAvg setting 'epoch' is unknown; did you mean 'epochs'?",
        ),
        ("[tune]\nlr = 0.1", "tune.lr: 0.1 is a number, but must be a list of values"),
        ("[tune]\nlr = [0.1, 'a']", "tune.lr[1]: 'a' is text, but must be a number"),
        (
            "[tune]\noptimizer = ['sgd', 'adm']",
            "tune.optimizer[1]: value 'adm' is unknown; did you mean 'adam'?",
        ),
        ("[tune]\nlr = []", "tune: grid['lr'] is empty"),
        ("[tune]\nlr = { loguniform = [1.0] }", "tune.lr.loguniform: [1.0] must be two numbers"),
        (
            "[tune]\nlr = { loguniform = [1.0, 0.1] }",
            "tune.lr.loguniform: low=1.0 must be less than high=0.1",
        ),
        ("[tune]\nlr = { loguniform = [0.1, 1] }", "tune: grid['lr'] is a range, so trials="),
        (
            "[tune]\nlr = [0.1]\n[tune.options]\ntrails = 3",
            "tune.options.trails: key 'trails' is unknown; did you mean 'trials'?",
        ),
        ("[tune]\nlr = [0.1]\n[tune.options]\nvalidation = 2", "tune: validation=2 must be"),
        ("[tune]\nlr = [0.1]\noptions = 3", "tune.options: must be a section [tune.options]"),
    ],
)
def test_errors_of_the_command_name_the_file_and_the_key(file, section, message):
    done = CliRunner().invoke(app, ["tune", file(CONFIG.split("[tune]")[0] + section)])
    assert done.exit_code == 2
    assert f"c.toml: {message}" in done.stderr


def test_ranges_in_a_file(file):
    section = "[tune]\nlr = { loguniform = [0.01, 1] }\n[tune.options]\ntrials = 2\nworkers = 1\n"
    path = file(CONFIG.split("[tune]")[0] + section)
    assert read_config(path, "tune").grid == {"lr": fd.loguniform(0.01, 1.0)}
    done = CliRunner().invoke(app, ["tune", path])
    assert "2 settings of FedAvg" in done.output


def test_if_everything_diverges_the_exit_code_is_1(file):
    done = CliRunner().invoke(
        app, ["tune", file(CONFIG.split("[tune]")[0] + "[tune]\nlr = [1e30]")]
    )
    assert done.exit_code == 1
    assert "the only combination of the grid failed; lr = 1e+30: round " in done.stderr
