"""Losses: values and derivatives against PyTorch and by hand, users' own functions, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import foedus as fd
from foedus.base import random
from foedus.base.spec import Spec
from foedus.models import losses
from foedus.models.custom_loss import check_custom, custom_loss

LABELS = [losses.Focal(1.7), losses.WeightedCrossEntropy((0.5, 2.0, 0.0, 1.3))]
TARGETS = [losses.BinaryCrossEntropy(), losses.Quantile(0.3), losses.PoissonNLL()]


def draw(seed: int, *shape: int) -> torch.Tensor:
    return random.normal(random.key(seed), shape)


@pytest.mark.parametrize("loss", [*LABELS, *TARGETS], ids=lambda v: type(v).__name__)
def test_slopes_are_those_of_autograd(loss):
    """With a client dimension, unequal row weights and, for values, several outputs."""
    outputs = draw(0, 3, 5, 4)
    y = random.integers(random.key(1), (3, 5), 4) if loss in LABELS else draw(1, 3, 5, 4).abs()
    weight = random.uniform(random.key(2), (3, 5))
    leaf = outputs.clone().requires_grad_()
    (weight * loss.value(leaf, y)).sum().backward()
    torch.testing.assert_close(loss.slope(outputs.clone(), y, weight), leaf.grad)


@pytest.mark.parametrize(
    "loss",
    [losses.WeightedCrossEntropy((0.5, 2.0, 0.1, 1.3)), losses.BinaryCrossEntropy(),
     losses.PoissonNLL()],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_bends_are_second_derivatives(loss):
    outputs, v = draw(0, 5, 4).double(), draw(3, 5, 4).double()
    y = torch.tensor([0, 1, 2, 3, 1]) if loss.needs == "classes" else draw(1, 5, 4).double().abs()
    slope = lambda f: torch.func.grad(lambda f: loss.value(f, y).sum())(f)  # noqa: E731
    _, want = torch.func.jvp(slope, (outputs,), (v,))
    torch.testing.assert_close(loss.bend(outputs, y, v), want)


def test_values_are_those_of_torch():
    f, y, labels = draw(0, 6, 4), draw(1, 6, 4).abs(), torch.tensor([0, 1, 2, 3, 1, 1])
    torch.testing.assert_close(
        losses.BinaryCrossEntropy().value(f, y.clamp(max=1)),
        F.binary_cross_entropy_with_logits(f, y.clamp(max=1), reduction="none").mean(-1),
    )
    torch.testing.assert_close(
        losses.PoissonNLL().value(f, y), F.poisson_nll_loss(f, y, reduction="none").sum(-1)
    )
    weights = (0.5, 2.0, 0.1, 1.3)
    torch.testing.assert_close(
        losses.WeightedCrossEntropy(weights).value(f, labels),
        F.cross_entropy(f, labels, weight=torch.tensor(weights), reduction="none"),
    )
    torch.testing.assert_close(
        losses.Focal(0.0).value(f, labels), F.cross_entropy(f, labels, reduction="none")
    )


def test_values_by_hand():
    # r = 2 - 5 = -3 and 1: max(0.9 r, -0.1 r) is 0.3 and 0.9
    found = losses.Quantile(0.9).value(torch.tensor([[5.0], [1.0]]), torch.tensor([2.0, 2.0]))
    torch.testing.assert_close(found, torch.tensor([0.3, 0.9]))
    # p = 1/2: -(1/2)^2 log(1/2)
    found = losses.Focal(2.0).value(torch.zeros(1, 2), torch.tensor([0]))
    torch.testing.assert_close(found, torch.tensor([0.25 * math.log(2)]))
    # a row that is certain: 0, with a slope of 0 and not NaN, for a gamma below 1 too
    certain, label = torch.tensor([[200.0, 0.0]]), torch.tensor([0])
    assert losses.Focal(0.5).value(certain, label).item() == 0
    assert losses.Focal(0.5).slope(certain, label, torch.ones(1)).abs().max() == 0


def test_a_quantile_is_learned():
    """A constant model under the pinball loss ends at the quantile of its targets."""
    y = np.sort(np.random.default_rng(0).gamma(2.0, size=400)).astype(np.float32)
    x = np.zeros((400, 1), np.float32)
    fed = fd.split(fd.Data.from_arrays(x, y, x[:9], y[:9]), "iid", clients=4, seed=0)
    how = {"lr": 0.05, "batch_size": None, "epochs": 10}
    run = fd.run(fd.FedAvg(loss=losses.Quantile(0.8), **how), fed, 60, evaluate_every=0)
    assert run.state.w["bias"].item() == pytest.approx(np.quantile(y, 0.8), abs=0.06)


OWN = {
    "module": nn.CrossEntropyLoss(),
    "mean": F.cross_entropy,
    "rows": lambda outputs, y: F.cross_entropy(outputs, y, reduction="none"),
    "column": lambda outputs, y: F.cross_entropy(outputs, y, reduction="none")[:, None],
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("batch", [True, False])
def test_an_own_loss_trains_as_the_built_in_one(fed, name, batch):
    """Clients are unequal, so batches are padded; epochs end in smaller mini-batches."""
    how = {"lr": 0.1, "batch_size": 7, "epochs": 2}
    for model in (fd.Linear(), fd.Module(nn.Linear(64, 10))):
        engine = fd.Local(batch=batch)
        want = fd.run(fd.FedAvg(model, **how), fed, 2, participation=0.6, engine=engine)
        own = fd.FedAvg(model, loss=OWN[name], **how)
        found = fd.run(own, fed, 2, participation=0.6, engine=engine)
        for k, v in want.state.w.items():
            torch.testing.assert_close(found.state.w[k], v, rtol=1e-4, atol=1e-6)
        assert found.records.last("loss") == pytest.approx(want.records.last("loss"), rel=1e-5)


def _focal(f, y):
    log_p = f.log_softmax(1)[range(len(y)), y]
    return -((1 - log_p.exp()) ** 2 * log_p).mean()


def _by_vectors(loss):
    return lambda f, y: loss(f, torch.eye(10)[y], reduction="none").sum(1).mean()


NAMED = {
    "cross_entropy": F.cross_entropy,
    "focal": _focal,
    "squared": lambda f, y: 0.5 * _by_vectors(F.mse_loss)(f, y),
    "huber": _by_vectors(F.huber_loss),
    "logistic": _by_vectors(F.binary_cross_entropy_with_logits),
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("engine", [fd.Local(batch=True), fd.Local(batch=False)], ids=str)
@pytest.mark.parametrize("own", [False, True])
def test_named_losses_of_classes_are_those_of_pytorch(fed, name, engine, own):
    """Two rounds of one full-batch step each, for foedus' model and a module; labels are unit
    vectors to the losses of values.
    """
    net = nn.Linear(64, 10)
    nn.init.zeros_(net.weight), nn.init.zeros_(net.bias)
    how = {"lr": 0.3, "batch_size": None, "loss": name}
    model = fd.Module(net) if own else fd.Linear()
    found = fd.run(fd.FedAvg(model, **how), fed, 2, engine=engine).state.w
    x, y = (torch.from_numpy(t[fed.rows]) for t in (fed.data.x_train, fed.data.y_train))
    for _ in range(2):  # averages of steps by rows: a step on the mean of all losses
        value = NAMED[name](net(x), y)
        slopes = torch.autograd.grad(value, [net.weight, net.bias])
        net.weight.data -= 0.3 * slopes[0]
        net.bias.data -= 0.3 * slopes[1]
    torch.testing.assert_close(found["weight"], net.weight.data, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["bias"], net.bias.data, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", OWN)
def test_an_own_loss_counts_the_weights_of_rows(name):
    """A row of weight 3 is three rows, also where the function returns a mean."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 3)).astype(np.float32), rng.integers(0, 2, 12)
    weights = np.array([1, 3, 1, 2, 1, 1, 2, 1, 1, 1, 3, 1], np.float32)
    data = fd.Data.from_arrays(x, y, x, y, classes=2, weights=weights, weights_test=weights)
    fed = fd.split(data, "iid", clients=1, seed=0)
    how = {"lr": 0.37, "batch_size": None, "epochs": 3}
    found = fd.run(fd.FedAvg(loss=OWN[name], **how), fed, 2).state.w
    net = nn.Linear(3, 2)
    nn.init.zeros_(net.weight), nn.init.zeros_(net.bias)
    share = torch.from_numpy(weights / weights.sum())
    for _ in range(6):
        value = share @ F.cross_entropy(
            net(torch.from_numpy(x)), torch.from_numpy(y), reduction="none"
        )
        for p, g in zip(
            net.parameters(), torch.autograd.grad(value, [*net.parameters()]), strict=True
        ):
            p.data.sub_(g, alpha=0.37)
    torch.testing.assert_close(found["weight"], net.weight.data, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["bias"], net.bias.data, rtol=1e-4, atol=1e-5)


def test_a_module_loss_keeps_its_settings():
    f, y = draw(0, 6, 4), torch.tensor([0, 1, 2, 3, 1, 1])
    weight = torch.tensor([1.0, 2.0, 3.0, 0.5])
    module = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)
    want = F.cross_entropy(f, y, weight=weight, label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(custom_loss(module).value(f, y), want)
    assert module.reduction == "mean", "the module passed in must not change"
    target = draw(1, 6, 4)
    mean = F.mse_loss(f, target, reduction="none").mean(-1)
    torch.testing.assert_close(custom_loss(nn.MSELoss()).value(f, target), mean)


def test_real_targets_have_the_shape_of_the_outputs(values):
    """(n, 1) beside (n,) would be broadcast to (n, n)."""
    want = fd.run(fd.FedAvg(lr=0.1), values, 2).state.w["weight"]
    found = fd.run(fd.FedAvg(lr=0.05, loss=nn.MSELoss()), values, 2).state.w["weight"]
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-6)


class Learns(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs, y):
        return self.scale * F.cross_entropy(outputs, y)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda f, y: F.cross_entropy(f, y, weight=torch.arange(1.0, 11)), "not a mean of the"),
        (lambda f, y: F.cross_entropy(f, y, reduction="none") + f.sum(), "not a mean of the loss"),
        (lambda f, y: (f.argmax(-1) != y).sum(), "returns torch.int64, which has no gradient"),
        (lambda f, y: f, r"returns shape \(5, 10\) for 5 rows; .* such as by .mean\(-1\)"),
        (lambda f, y: f.sum(0), r"returns shape \(10,\) for 5 rows; return one number a row"),
        (lambda f, y: 1.0, "returns float, not a tensor"),
        (lambda f, y: (f - 100).log().sum(-1), "returns nan for the model's raw outputs"),
        (lambda f, y: f.detach().sum(-1), "has no gradient in the outputs"),
        (lambda f, y: f[:, 0] * torch.rand(()), "draws random numbers"),
        (lambda f, y: f.sum() if f.sum().item() > 0 else -f.sum(), "cannot be batched over rows"),
        (lambda f: f.mean(), "fails for outputs of shape"),
        (nn.CrossEntropyLoss(reduction="sum"), "use reduction='mean'"),
        (nn.CrossEntropyLoss, "loss=CrossEntropyLoss is a class: add parentheses"),
        (Learns(), "has parameters, which would not be trained"),
        (3, "loss=3 must be the name of a loss"),
        (losses.WeightedCrossEntropy((1.0, 2.0)), "weights for 2 classes, the data has 10"),
        ("quantile", "needs real targets"),
        ("fokal", "did you mean 'focal'"),
    ],
)  # fmt: skip
def test_losses_that_are_refused(fed, loss, message):
    with pytest.raises(fd.ConfigError, match=message):
        fd.run(fd.FedAvg(lr=0.1, loss=loss), fed, 1)


def test_settings_of_losses_are_checked():
    for make in (
        lambda: losses.Quantile(1.0), lambda: losses.Focal(-1), lambda: losses.Huber(0),
        lambda: losses.WeightedCrossEntropy((1.0, -1.0)),
    ):  # fmt: skip
        with pytest.raises(fd.ConfigError, match="must be"):
            make()


def test_as_many_outputs_as_rows_are_not_taken_for_losses_of_rows():
    spec = Spec((3,), 5, 5)
    with pytest.raises(fd.ConfigError, match=r"shape \(5,\) for 6 rows"):
        check_custom(custom_loss(lambda f, y: f.mean(0)), fd.Linear(), spec)


def test_runs_with_losses_are_loaded_again(fed, values, tmp_path):
    described = fd.FedAvg(lr=0.01, loss=losses.Quantile(0.7))
    path = tmp_path / "run.foedus"
    fd.run(described, values, 1).save(path)
    assert fd.Run.load(path).algorithm == described
    for loss in (F.cross_entropy, nn.CrossEntropyLoss(weight=torch.arange(1.0, 11.0))):
        run = fd.run(fd.FedAvg(lr=0.1, loss=loss), fed, 1)
        run.save(path)
        with pytest.raises(fd.FoedusError, match="algorithm="):
            fd.Run.load(path)
        again = fd.Run.load(path, algorithm=fd.FedAvg(lr=0.1, loss=loss))
        assert torch.equal(again.state.w["weight"], run.state.w["weight"])
    with pytest.raises(fd.FoedusError, match="another algorithm"):
        fd.Run.load(path, algorithm=fd.FedAvg(lr=0.1, loss=nn.CrossEntropyLoss(torch.ones(10))))


@pytest.mark.parametrize("kind", [fd.Scaffold, fd.FedDyn, fd.FedProx, fd.FedFW, fd.Independent])
def test_algorithms_take_an_own_loss(fed, kind):
    more = {} if kind is fd.FedFW else {"lr": 0.1}
    named, own = (
        fd.run(kind(loss=loss, **more), fed, 2).records.last("loss")
        for loss in ("cross_entropy", F.cross_entropy)
    )
    assert own == pytest.approx(named, rel=1e-4)
