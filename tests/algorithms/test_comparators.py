"""Server optimizers, FedNova and personal methods against numbers worked out by hand.

f_A'(w) = w - 2 (one row) and f_B'(w) = 4w - 2 (two rows), lr = 0.1, two full-batch steps from w =
0: A goes 0 -> 0.2 -> 0.38, B goes 0 -> 0.2 -> 0.32, and their average by rows is 0.34.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import foedus as fd
from foedus import wire
from foedus.core.result import Run

HOW = {"model": fd.Linear(bias=False), "lr": 0.1, "steps": 2, "batch_size": None}
ONE = {"model": fd.Linear(), "lr": 0.1, "steps": 1, "batch_size": None}


def after(algorithm: fd.Algorithm, fed: fd.Federation, rounds: int, **options) -> fd.Run:
    return fd.run(algorithm, fed, rounds, evaluate_every=0, **options)


def weight(run: fd.Run) -> float:
    return float(run.state.w["weight"])


def own(run: fd.Run, client: int, name: str = "weight") -> float:
    return float(run.client_states().get(client)["w"][name])


# -- server optimizers -----------------------------------------------------------------------------

SERVER = {"tau": 0.1, "server_lr": 0.5, "beta1": 0.5}


@pytest.mark.parametrize(
    ("algorithm", "v"),
    [
        (fd.FedAdam(**HOW, **SERVER, beta2=0.75), 0.75 * 0.01 + 0.25 * 0.1156),
        # tau^2 is below the square of the move, so Yogi adds
        (fd.FedYogi(**HOW, **SERVER, beta2=0.75), 0.01 + 0.25 * 0.1156),
        (fd.FedAdagrad(**HOW, **SERVER), 0.01 + 0.1156),
    ],
    ids=["adam", "yogi", "adagrad"],
)
def test_a_round_of_a_server_optimizer(algorithm, v, two):
    run = after(algorithm, two, 1)
    assert float(run.state.m["weight"]) == pytest.approx(0.5 * 0.34)
    assert float(run.state.v["weight"]) == pytest.approx(v)
    assert weight(run) == pytest.approx(0.5 * 0.17 / (v**0.5 + 0.1))


def test_yogi_forgets_by_the_square_of_the_move(two):
    """tau^2 = 4 exceeds 0.1156, so that v shrinks, by 0.25 * 0.1156."""
    run = after(fd.FedYogi(**HOW, tau=2.0, beta2=0.75), two, 1)
    assert float(run.state.v["weight"]) == pytest.approx(4 - 0.25 * 0.1156)


def test_server_optimizers_weight_clients_as_set(two):
    run = after(fd.FedAdagrad(**HOW, weights="uniform"), two, 1)
    assert float(run.state.m["weight"]) == pytest.approx(0.35)


# -- FedNova ---------------------------------------------------------------------------------------


def test_fednova_normalizes_by_steps(two):
    # One row a batch: A makes one step, to 0.2; B two, to 0.32. d = (0.2 + 2 * 0.16) / 3, a = 5/3.
    run = after(fd.FedNova(fd.Linear(bias=False), lr=0.1, batch_size=1), two, 1)
    assert weight(run) == pytest.approx(5 / 3 * (0.2 + 2 * 0.16) / 3)


def test_fednova_uniform(two):
    how = {"batch_size": 1, "weights": "uniform", "server_lr": 0.5}
    run = after(fd.FedNova(fd.Linear(bias=False), lr=0.1, **how), two, 1)
    assert weight(run) == pytest.approx(0.5 * 1.5 * (0.2 + 0.16) / 2)


def test_fednova_with_momentum(two):
    # B: v = -2, w = 0.2; v = -1 - 1.2, w = 0.42. Its gradients count 1.5 and 1: a_B = 2.5.
    run = after(fd.FedNova(fd.Linear(bias=False), lr=0.1, batch_size=1, momentum=0.5), two, 1)
    assert weight(run) == pytest.approx((1 + 2 * 2.5) / 3 * (0.2 + 2 * 0.42 / 2.5) / 3)


def test_fednova_is_fedavg_where_steps_are_equal(two):
    assert weight(after(fd.FedNova(**HOW), two, 2)) == pytest.approx(
        weight(after(fd.FedAvg(**HOW), two, 2))
    )


# -- own models ------------------------------------------------------------------------------------


def test_finetuned(two):
    run = after(fd.FineTuned(**HOW), two, 1)
    assert weight(run) == pytest.approx(0.34)
    assert (own(run, 0), own(run, 1)) == (pytest.approx(0.38), pytest.approx(0.32))
    # one step of 0.05 from 0 and, in round 2, from 0.34: -1.66 and -0.64
    how = fd.FineTuned(**HOW, own_steps=1, own_lr=0.05)
    assert own(after(how, two, 1), 0) == pytest.approx(0.1)
    run = after(how, two, 2)
    assert (own(run, 0), own(run, 1)) == (pytest.approx(0.423), pytest.approx(0.372))
    assert weight(run) == pytest.approx(weight(after(fd.FedAvg(**HOW), two, 2)))


def test_ditto(two):
    first, second = (after(fd.Ditto(**HOW, lam=1.0), two, r) for r in (1, 2))
    # As FedProx from 0: A -> 0.36, B -> 0.3. The global model is FedAvg's.
    assert (own(first, 0), own(first, 1)) == (pytest.approx(0.36), pytest.approx(0.3))
    assert weight(first) == pytest.approx(0.34)
    # A: -1.64 + 0.02 -> 0.522, -1.478 + 0.182 -> 0.6516.
    # B: -0.8 - 0.04 -> 0.384, -0.464 + 0.044 -> 0.426.
    assert (own(second, 0), own(second, 1)) == (pytest.approx(0.6516), pytest.approx(0.426))
    assert weight(second) == pytest.approx((0.6554 + 2 * 0.4424) / 3)


def test_fedper(two):
    """The weight is shared, the bias is not."""
    first, second = (after(fd.FedPer(**ONE, shared="weight"), two, r) for r in (1, 2))
    # A: errors of -2: (0.2, 0.2). B, x = 2, errors of -1: (0.2, 0.1).
    assert set(first.state.w) == {"weight"}
    assert weight(first) == pytest.approx(0.2)
    assert (own(first, 0, "bias"), own(first, 1, "bias")) == (
        pytest.approx(0.2),
        pytest.approx(0.1),
    )
    # A: 0.2 + 0.2 - 2 = -1.6: (0.36, 0.36). B: 0.4 + 0.1 - 1 = -0.5: (0.3, 0.15).
    assert weight(second) == pytest.approx((0.36 + 2 * 0.3) / 3)
    assert (own(second, 0), own(second, 0, "bias")) == (pytest.approx(0.36), pytest.approx(0.36))
    assert (own(second, 1), own(second, 1, "bias")) == (pytest.approx(0.3), pytest.approx(0.15))


def test_fedrep(two):
    """First the bias with the shared weight, then the weight with the new bias."""
    first, second = (after(fd.FedRep(**ONE, shared="weight"), two, r) for r in (1, 2))
    # A: bias 0.2, then 0.2 - 2 = -1.8: 0.18. B: bias 0.1, then 0.1 - 1 = -0.9, x = 2: 0.18.
    assert weight(first) == pytest.approx(0.18)
    assert (own(first, 0), own(first, 0, "bias")) == (0.0, pytest.approx(0.2))
    # A: -1.62: bias 0.362; -1.458: 0.3258. B: -0.54: bias 0.154; -0.486, x = 2: 0.2772.
    assert weight(second) == pytest.approx((0.3258 + 2 * 0.2772) / 3)
    assert (own(second, 0), own(second, 0, "bias")) == (pytest.approx(0.18), pytest.approx(0.362))
    assert (own(second, 1), own(second, 1, "bias")) == (pytest.approx(0.18), pytest.approx(0.154))


@pytest.mark.parametrize("kind", [fd.FedPer, fd.FedRep])
def test_only_shared_parameters_travel(kind, two):
    row = after(kind(**ONE, shared="weight"), two, 1).records.rows[-1]
    assert row["bytes_up"] == 2 * len(wire.encode({"weight": torch.zeros(1, 1)}))
    assert row["bytes_down"] == 2 * len(wire.encode({"w": {"weight": torch.zeros(1, 1)}}))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.ReLU())
        self.head = torch.nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.parametrize("kind", [fd.FedPer, fd.FedRep])
def test_names_of_a_module_have_dots(kind, two):
    run = after(kind(Net(), shared="body.*", lr=0.1), two, 1)
    assert set(run.state.w) == {"body/0/weight", "body/0/bias"}
    heads = [run.client_states().get(i)["w"]["head/bias"] for i in (0, 1)]
    assert not torch.equal(*heads)


@pytest.mark.parametrize(("shared", "found"), [("body", "none"), ("*", "all")])
def test_a_pattern_that_splits_nothing_is_refused(shared, found, two):
    with pytest.raises(fd.ConfigError, match=rf"{found} of .* parameters are weight0, bias0"):
        after(fd.FedPer(fd.MLP(3), shared=shared), two, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fd.FedAdam(beta1=1.0), r"beta1=1.0"),
        (lambda: fd.FedYogi(beta2=-0.1), r"beta2=-0.1"),
        (lambda: fd.FedAdagrad(tau=0), r"tau=0"),
        (lambda: fd.FedNova(optimizer="adam"), r"use optimizer='sgd'"),
        (lambda: fd.Ditto(lam=-1), r"lam=-1"),
        (lambda: fd.FineTuned(own_lr=0), r"own_lr=0"),
        (lambda: fd.FedRep(own_steps=0), r"own_steps=0"),
        (lambda: fd.FedPer(shared=""), r"shared=''"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(fd.ConfigError, match=message):
        make()


# -- averages alone --------------------------------------------------------------------------------

EVERY = {
    type(a).__name__: a
    for a in (
        # tau is large: fixed point numbers must not be divided by a small one
        fd.FedAdam(fd.Linear(), batch_size=16, tau=0.5),
        fd.FedYogi(fd.Linear(), batch_size=16, tau=0.5),
        fd.FedAdagrad(fd.Linear(), batch_size=16, tau=0.5),
        fd.FedNova(fd.Linear(), batch_size=64),  # one step or two: noise is times a
        fd.FineTuned(fd.Linear(), batch_size=16, own_steps=2),
        fd.Ditto(fd.Linear(), batch_size=16),
        fd.FedPer(fd.MLP(6), batch_size=16),
        fd.FedRep(fd.MLP(6), batch_size=16),
    )
}


@pytest.mark.parametrize(
    ("aggregation", "off"),
    [
        (fd.SecureAggregation(), 2e-3),
        # six standard deviations of two rounds' noise; no move is longer than the clip
        (fd.DifferentialPrivacy(clip=2.0, noise=0.01, delta=1e-3, accountant="rdp"), 0.05),
    ],
    ids=["secure", "private"],
)
@pytest.mark.parametrize("name", EVERY)
def test_averages_are_all_that_is_needed(name, aggregation, off, fed):
    weights = {"weights": "uniform"}  # differential privacy counts clients alike
    algorithm = type(EVERY[name])(**{**vars(EVERY[name]), **weights})
    plain = after(algorithm, fed, 2)
    hidden = after(algorithm, fed, 2, aggregation=aggregation)
    for k, v in plain.state.w.items():
        torch.testing.assert_close(hidden.state.w[k], v, rtol=0, atol=off)


@pytest.mark.parametrize("name", EVERY)
def test_saved_and_loaded(name, fed, tmp_path):
    run = fd.run(EVERY[name], fed, 2)
    run.save(tmp_path / "run")
    again = Run.load(tmp_path / "run")
    assert again.algorithm == run.algorithm
    x = np.asarray(fed.data.x_test[:5])
    np.testing.assert_array_equal(again.model_of(1).predict(x), run.model_of(1).predict(x))


@pytest.mark.parametrize("name", EVERY)
def test_secret_cohorts(name, fed):
    """Who takes part is drawn in secret, and in some rounds it is nobody."""
    private = fd.DifferentialPrivacy(clip=1.0, noise=0.1, delta=1e-3, accountant="rdp")
    algorithm = type(EVERY[name])(**{**vars(EVERY[name]), "weights": "uniform"})
    run = after(algorithm, fed, 6, aggregation=private, participation=fd.Poisson(0.2))
    assert all(torch.isfinite(v).all() for v in run.state.w.values())


@pytest.mark.parametrize("name", EVERY)
def test_robust_means(name, fed):
    run = after(EVERY[name], fed, 2, aggregation=fd.Median())
    assert all(torch.isfinite(v).all() for v in run.state.w.values())
