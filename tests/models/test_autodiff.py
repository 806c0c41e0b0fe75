"""Gradients of several clients by autograd: each client's own, in memory of its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import foedus as fd
from foedus.models.base import derives_within
from foedus.models.training.autodiff import gradients


class Added(nn.Module):
    """Two parameters whose gradients are one tensor, and one whose gradient is the same number
    everywhere.
    """

    def __init__(self) -> None:
        super().__init__()
        start = torch.linspace(-1, 1, 640).view(64, 10)
        self.a, self.b = nn.Parameter(start / 9), nn.Parameter(-start / 7)
        self.c = nn.Parameter(torch.full((4,), 0.3))

    def forward(self, x):
        return x @ (self.a + self.b) * (1 + self.c.sum())


@pytest.mark.parametrize("batch", [True, False])
def test_parameters_that_are_added_decay_each_by_itself(fed, batch):
    how = {"lr": 0.1, "weight_decay": 0.5, "batch_size": None}
    run = fd.run(fd.FedAvg(Added(), **how), fed, 1, engine=fd.Local(batch=batch))
    want: dict[str, torch.Tensor] = {}
    x, y = torch.from_numpy(fed.data.x_train), torch.from_numpy(fed.data.y_train)
    for i in range(len(fed)):
        rows = fed.rows[fed.offsets[i] : fed.offsets[i + 1]]
        net = Added()
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.5).step()
        share = len(rows) / len(fed.rows)
        want = {k: want.get(k, 0) + share * v.detach() for k, v in net.named_parameters()}
    for k, v in want.items():
        torch.testing.assert_close(run.state.w[k], v, rtol=1e-5, atol=1e-6)


def test_each_client_has_its_own_gradient_and_the_only_one_that_is_not_a_number():
    """Of (a x)^2 at a = 1, 2 and x = 3, inf: 2 a x^2 = 18; the other client's is inf."""
    params = {"a": torch.tensor([1.0, 2.0])}
    x = torch.tensor([3.0, torch.inf])
    grads, values, more = gradients(
        lambda p, x: ((p["a"] * x) ** 2, {"x": x + 1}), params, x, model=fd.Linear()
    )
    assert grads["a"].tolist() == [18.0, torch.inf] and values.tolist() == [9.0, torch.inf]
    assert more["x"].tolist() == [4.0, torch.inf] and not params["a"].requires_grad


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_with_batch_norm_are_batched(fed, kind):
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.norm = kind(8, 6, batch_first=True), nn.BatchNorm1d(6)
            self.out = nn.Linear(6, 10)

        def forward(self, x):
            return self.out(self.norm(self.net(x.view(-1, 8, 8))[0][:, -1]))

    torch.manual_seed(0)
    module = fd.Module(Recurrent(), norm="average")
    runs = [
        fd.run(fd.FedAvg(module, lr=0.1), fed, 1, engine=fd.Local(batch=batch))
        for batch in (True, False)
    ]
    for k, v in runs[0].state.w.items():
        torch.testing.assert_close(v, runs[1].state.w[k], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("width", [8, 600])
def test_wide_networks_are_the_same_batched_or_looped(fed, width):
    """64 x 600 numbers are a wide matrix, whose gradients are taken within `vmap`."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(64, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(width, 10),
    )
    assert derives_within(fd.Module(net), dict(net.named_parameters())) == (width == 600)
    algorithm = fd.FedAvg(fd.Module(net, norm="average"), lr=0.1, batch_size=7)
    runs = [fd.run(algorithm, fed, 1, engine=fd.Local(batch=batch)) for batch in (True, False)]
    for k, v in runs[0].state.w.items():
        torch.testing.assert_close(v, runs[1].state.w[k], rtol=1e-3, atol=1e-5)


def test_wide_networks_of_images_are_batched(fed):
    """Compiled loops for BatchNorm are not used where `torch.func` takes derivatives."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(144, 300), nn.ReLU(), nn.Linear(300, 10),
    )  # fmt: skip
    algorithm = fd.FedAvg(fd.Module(net, norm="average"), lr=0.1)
    runs = [fd.run(algorithm, fed, 1, engine=fd.Local(batch=batch)) for batch in (True, False)]
    for k, v in runs[0].state.w.items():
        torch.testing.assert_close(v, runs[1].state.w[k], rtol=1e-3, atol=1e-5)
