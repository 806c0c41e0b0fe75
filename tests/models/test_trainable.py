"""Parts of a module that are trained: what moves, what travels, and what stays."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import foedus as fd
from foedus import wire
from foedus.base import random


class Net(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(64, 12), norm(12), nn.ReLU())
            self.head = nn.Linear(12, 10)

    def forward(self, x):
        return self.head(self.body(x))


def after(model: fd.Model, fed: fd.Federation, rounds: int = 2, **options) -> fd.Run:
    algorithm = fd.FedAvg(model, lr=0.1, batch_size=16)
    return fd.run(algorithm, fed, rounds, evaluate_every=0, **options)


@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize(
    ("trainable", "names"),
    [
        ("head.*", ["head/weight", "head/bias"]),
        (["head.weight", "body.1.*"], ["body/1/weight", "body/1/bias", "head/weight"]),
        ("head.weight body.1.*", ["body/1/weight", "body/1/bias", "head/weight"]),
    ],
)
def test_only_what_is_trained_travels(fed, trainable, names, batch):
    """As where the other parameters do not require a gradient."""
    net = Net(nn.LayerNorm)
    before = copy.deepcopy(net.state_dict())
    run = after(fd.Module(net, trainable=trainable), fed, engine=fd.Local(batch=batch))
    assert list(run.state.w) == names
    fixed = copy.deepcopy(net)
    for name, p in fixed.named_parameters():
        p.requires_grad_(name.replace(".", "/") in names)
    want = after(fd.Module(fixed), fed, engine=fd.Local(batch=batch))
    assert all(torch.equal(run.state.w[k], v) for k, v in want.state.w.items())
    assert run.history.bytes_up.tolist() == want.history.bytes_up.tolist()
    assert run.records.last("bytes_up") == 2 * len(fed) * wire.nbytes(dict(run.state.w))
    # the module that was passed is as it was, and what comes out is whole
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert all(p.requires_grad for p in net.parameters())
    module = run.model.to_torch()
    for name, value in module.state_dict().items():
        moved = run.state.w.get(name.replace(".", "/"))
        assert torch.equal(value, before[name] if moved is None else moved)
    x = torch.from_numpy(fed.data.x_test)
    torch.testing.assert_close(module(x), run.model.outputs(x))


def test_a_step_of_the_head_is_that_of_pytorch(fed):
    """One client with all its rows in one mini-batch."""
    net = Net(nn.LayerNorm)
    rows = fed.rows[fed.offsets[0] : fed.offsets[1]]
    x, y = (torch.from_numpy(t[rows]) for t in (fed.data.x_train, fed.data.y_train))
    one = fd.Federation.from_clients([(x.numpy(), y.numpy())], classes=10)
    algorithm = fd.FedAvg(fd.Module(net, trainable="head.*"), lr=0.1, batch_size=None)
    run = fd.run(algorithm, one, 1, evaluate_every=0)
    grads = torch.autograd.grad(F.cross_entropy(net(x), y), net.head.parameters())
    for (name, p), g in zip(net.head.named_parameters(), grads, strict=True):
        torch.testing.assert_close(run.state.w[f"head/{name}"], (p - 0.1 * g).detach())


@pytest.mark.parametrize("norm", ["average", "local", "silo", "frozen", "group"])
def test_frozen_batch_norm_follows_its_policy(fed, norm):
    """Its weight and bias stay as they are; running statistics are the policy's."""
    net = Net()
    net.body[1].weight.data.fill_(1.7)
    run = after(fd.Module(net, norm=norm, trainable="head.* body.0.*"), fed)
    sent = {"head/weight", "head/bias", "body/0/weight", "body/0/bias"}
    statistics = {"body/1/running_mean", "body/1/running_var"}
    assert set(run.state.w) == (sent | statistics if norm == "average" else sent)
    if norm in ("local", "silo"):
        assert set(run.client_states().get(0)["w"]) == sent | statistics
        layer = run.model_of(0).to_torch().body[1]
        assert not torch.equal(layer.running_mean, net.body[1].running_mean)
    else:
        layer = run.model.to_torch().body[1]
    assert torch.equal(layer.weight, net.body[1].weight)
    if norm == "average":
        assert torch.equal(layer.running_mean, run.state.w["body/1/running_mean"])


class Tied(nn.Module):
    """Its first and last layers share a matrix."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first = nn.Linear(64, 64)
            self.middle = nn.Linear(64, 64)
            self.last = nn.Linear(64, 64)
            self.out = nn.Linear(64, 10)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.out(self.last(self.middle(self.first(x)).relu()))


@pytest.mark.parametrize("trainable", ["last.weight", "first.weight"])
def test_a_shared_parameter_is_trained_by_any_of_its_names(fed, trainable):
    run = after(fd.Module(Tied(), trainable=trainable), fed)
    assert list(run.state.w) == ["first/weight"]
    module = run.model.to_torch()
    assert torch.equal(module.last.weight, run.state.w["first/weight"])
    assert not torch.equal(module.last.weight, Tied().last.weight)
    assert torch.equal(module.middle.weight, Tied().middle.weight)


def test_two_models_of_one_module(fed):
    """Another choice of the same module does not see the first one's copies."""
    net = Net(nn.LayerNorm)
    for trainable in ("head.*", None, "body.0.*"):
        run = after(fd.Module(net, trainable=trainable), fed, 1)
        fresh = after(fd.Module(Net(nn.LayerNorm), trainable=trainable), fed, 1)
        assert all(torch.equal(v, run.state.w[k]) for k, v in fresh.state.w.items())


def test_what_stays_follows_the_module(fed):
    """Weights that are loaded into the module after its first use are those that are used."""
    net, other = Net(nn.LayerNorm), Net(nn.LayerNorm)
    model = fd.Module(net, trainable="head.*")
    after(model, fed, 1)
    net.body[0].weight.data.mul_(2.0), other.body[0].weight.data.mul_(2.0)
    want = after(fd.Module(other, trainable="head.*"), fed, 1)
    assert all(torch.equal(v, after(model, fed, 1).state.w[k]) for k, v in want.state.w.items())


def test_nothing_is_differentiated_that_stays():
    """Autograd does not hold the activations of layers before the first that is trained."""
    net, spec = Net(nn.LayerNorm), fd.Spec((64,), 10, 10)
    assert fd.Module(net)._own(True, torch.device("cpu")).head.weight.requires_grad
    model = fd.Module(net, trainable="head.*")
    w = {k: v.requires_grad_() for k, v in model.init(spec, None).items()}
    x = random.normal(random.key(0), (3, 64))
    outputs, _ = model.train_outputs(w, x, torch.ones(3), False, None)
    assert outputs.requires_grad
    own = model._own(True, torch.device("cpu"))
    assert not own.body(x).requires_grad


def test_patterns_that_match_nothing():
    net = Net(nn.LayerNorm)
    net.body[0].bias.requires_grad_(False)
    known = "Net has body.0.weight, body.1.weight, body.1.bias, head.weight, head.bias"
    for trainable, asked in (("haed.*", "'haed.*'"), (["head.*", "tail"], "'tail'"), ("", "it")):
        with pytest.raises(fd.ModelError, match=f"{asked} matches no parameter.*{known}"):
            fd.Module(net, trainable=trainable)
    with pytest.raises(fd.ModelError, match=r"can be trained.*requires_grad=False: body.0.bias"):
        fd.Module(net, trainable="body.0.bias")
    with pytest.raises(fd.ModelError, match="trainable=3 must be"):
        fd.Module(net, trainable=3)
