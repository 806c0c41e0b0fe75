"""Users' functions that `torch.func.vmap` cannot batch: `one_hot`, and what is said of the rest."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import foedus as fd
from tests.engines.test_walls import Masks


def dice(outputs, y):
    """1 - p_y, by unit vectors."""
    return 1 - (outputs.softmax(-1) * F.one_hot(y, 10)).sum(-1)


def gathered(outputs, y):
    return 1 - outputs.softmax(-1).gather(1, y.unsqueeze(1)).squeeze(1)


def brier(outputs, y):
    """A mean, which is called row by row."""
    return (outputs.softmax(-1) - F.one_hot(y, num_classes=10)).square().sum(-1).mean()


def by_eye(outputs, y):
    return (outputs.softmax(-1) - torch.eye(10)[y]).square().sum(-1)


@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize(("loss", "same"), [(dice, gathered), (brier, by_eye)])
@pytest.mark.parametrize("model", [fd.Linear(), nn.Linear(64, 10)], ids=["Linear", "own"])
def test_losses_may_use_unit_vectors(fed, model, loss, same, batch):
    engine = fd.Local(batch=batch)
    how = {"lr": 0.5, "batch_size": 7}
    found, want = (
        fd.run(fd.FedAvg(model, loss=f, **how), fed, 2, engine=engine).state.w for f in (loss, same)
    )
    for k, v in want.items():
        torch.testing.assert_close(found[k], v, rtol=1e-4, atol=1e-6)


class Codes(nn.Module):
    """Dark, gray or light, as unit vectors; with dropout before and after, and BatchNorm."""

    def __init__(self, eye: bool):
        super().__init__()
        generator, self.eye = torch.Generator().manual_seed(0), eye
        self.first, self.norm = nn.Linear(192, 6), nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 10)
        for p in self.parameters():
            p.data = 0.3 * torch.randn(p.shape, generator=generator)

    def forward(self, x):
        level = (F.dropout(x, 0.2, self.training) * 3).long().clamp(0, 2)
        codes = torch.eye(3)[level] if self.eye else F.one_hot(level, 3).float()
        codes = F.dropout(codes.flatten(1), 0.3, self.training)
        return self.last(self.norm(self.first(codes)).relu())


@pytest.mark.parametrize("batch", [True, False])
def test_modules_may_use_unit_vectors(fed, batch):
    """The second call of a module that could not be batched draws the masks of the first."""
    engine, how = fd.Local(batch=batch), {"lr": 0.1, "batch_size": 7}
    found, want = (
        fd.run(fd.FedAvg(fd.Module(Codes(eye), norm="average"), **how), fed, 2, engine=engine)
        for eye in (False, True)
    )
    for k, v in want.state.w.items():
        torch.testing.assert_close(found.state.w[k], v, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "algorithm",
    [
        fd.Ditto(Masks(), lr=0.1, lam=0.1),
        fd.FedPer(Masks(), shared="layer.weight", lr=0.1),
        fd.FedFW(Masks(), fd.L2Ball(5.0)),
        fd.Scaffold(Masks(), lr=0.1, option=1),
        fd.FedRes(Masks(), fd.Linear(), send="gradient"),
    ],
    ids=lambda a: type(a).__name__,
)
def test_families_say_what_to_do_and_then_do_it(fed, algorithm):
    """In training, in the evaluation of clients' own models, and in FedRes' own gradients."""
    with pytest.raises(fd.ModelError, match=r"Masks cannot be batched .*fd.Local\(batch=False\)"):
        fd.run(algorithm, fed, 1)
    assert len(fd.run(algorithm, fed, 1, engine=fd.Local(batch=False)).records) == 2


@pytest.mark.parametrize("model", [fd.Linear(), nn.Linear(64, 10)], ids=["Linear", "own"])
def test_a_loss_that_looks_at_values_says_what_to_do(fed, model):
    def masked(outputs, y):
        loss = F.cross_entropy(outputs, y, reduction="none")
        loss[y == 3] *= 2
        return loss

    with pytest.raises(fd.ModelError, match=r"loss=masked cannot be batched .*torch.where"):
        fd.run(fd.FedAvg(model, loss=masked, lr=0.1), fed, 1)
    looped = fd.Local(batch=False)
    weights = [1.0, 1.0, 1.0, 2.0, *[1.0] * 6]
    found, want = (
        fd.run(fd.FedAvg(model, loss=loss, lr=0.1), fed, 2, engine=looped).state.w
        for loss in (masked, fd.losses.WeightedCrossEntropy(weights))
    )
    for k, v in want.items():
        torch.testing.assert_close(found[k], v, rtol=1e-4, atol=1e-6)
