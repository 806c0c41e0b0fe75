"""Linear layers of batched clients compute what PyTorch's do; gradients lie as their matrices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foedus as fd
from foedus.base.spec import Spec
from foedus.models.products import linear_layers
from foedus.models.training.autodiff import gradients


def doubled(net: nn.Module, clients: int) -> dict[str, torch.Tensor]:
    """Parameters of several clients: the net's, times 1, 2, ..."""
    return {
        n.replace(".", "/"): torch.stack([p.detach() * (i + 1) for i in range(clients)])
        for n, p in net.named_parameters()
    }


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7,), (5, 7), (0, 7), (2, 3, 7)])
def test_outputs_and_gradients_are_those_of_pytorch(shape, bias):
    """Of rows (5, 7), of sequences (2, 3, 7), of no rows, and of a single vector."""
    torch.manual_seed(0)
    net = nn.Linear(7, 4, bias=bias)
    model, params = fd.Module(net), doubled(net, 3)
    x = torch.randn(3, *shape)

    def loss(w, x):
        return model.apply(w, x).square().sum(), {}

    grads, values, _ = gradients(loss, params, x, model=model)
    for i in range(3):
        alone = nn.Linear(7, 4, bias=bias)
        alone.load_state_dict({n.replace("/", "."): p[i] for n, p in params.items()})
        want = alone(x[i]).square().sum()
        want.backward()
        torch.testing.assert_close(values[i], want.detach())
        for name, p in alone.named_parameters():
            torch.testing.assert_close(grads[name][i], p.grad, rtol=1e-5, atol=1e-5)


def test_gradients_lie_as_their_matrices_do():
    """A step along a transposed gradient takes three times as long."""
    net = nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 10))
    model, params = fd.Module(net), doubled(net, 2)

    def loss(w, x):
        return model.apply(w, x).square().sum(), {}

    grads, _, _ = gradients(loss, params, torch.randn(2, 8, 300), model=model)
    assert all(g.is_contiguous() for g in grads.values())


class Tripled(nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


def test_layers_of_a_subclass_stay_as_they_are():
    """A subclass may do something else: here, three times as much."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4, bias=False), Tripled(4, 2, bias=False))
    assert list(linear_layers(net)) == ["0"]
    model, x = fd.Module(net), torch.randn(5, 4)
    params = model.init(Spec((4,), None, 2), None)
    want = 3 * x @ net[0].weight.mT @ net[1].weight.mT
    batched = torch.func.vmap(model.apply)({k: v[None] for k, v in params.items()}, x[None])
    torch.testing.assert_close(batched[0], want)
    assert type(net[0]) is nn.Linear and "forward" not in vars(
        net[0]
    )  # the user's own is untouched
