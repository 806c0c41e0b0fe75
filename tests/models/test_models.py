"""Models: closed-form gradients against autograd, shapes against the papers, and what is
refused.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import foedus as fd
from foedus.base import random
from foedus.base.rows import Rows
from foedus.base.spec import Spec
from foedus.models import CNN, MLP, CrossEntropy, Linear, Module, Squared
from foedus.models.training.gradients import gradient_of, value_and_gradient


def draw(seed: int, *shape: int) -> torch.Tensor:
    return random.normal(random.key(seed), shape)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    clients=st.integers(1, 4),
    rows=st.integers(1, 7),
    model=st.sampled_from([Linear(), Linear(bias=False), MLP((5,)), MLP((6, 4))]),
    classify=st.booleans(),
)
def test_closed_form_gradient_equals_autograd(seed, clients, rows, model, classify):
    spec = Spec((3,), 4 if classify else None, 4)
    loss = CrossEntropy() if classify else Squared()
    each = [model.init(spec, random.key(seed + c)) for c in range(clients)]
    each = [
        {k: v + 0.1 * draw(seed + 7 + c, *v.shape) for k, v in p.items()}
        for c, p in enumerate(each)
    ]
    params = {k: torch.stack([p[k] for p in each]) for k in each[0]}
    x = draw(seed + 1, clients, rows, 3)
    y = (
        random.integers(random.key(seed + 2), (clients, rows), 4)
        if classify
        else draw(seed + 2, clients, rows, 4)
    )
    weight = random.uniform(random.key(seed + 3), (clients, rows))
    got = gradient_of(model, loss)(params, x, y, weight)
    for c, p in enumerate(each):
        leaves = {k: v.clone().requires_grad_() for k, v in p.items()}
        value = (weight[c] * loss.value(model.apply(leaves, x[c]), y[c])).sum()
        for k, g in zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True):
            torch.testing.assert_close(got[k][c], g, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "model",
    [Linear(), MLP((5,)), Module(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)))],
)
@pytest.mark.parametrize("clients", [1, 3])
def test_value_and_gradient_are_those_of_autograd(model, clients):
    """Weighted rows, in one pass; with a client dimension by vmap and without."""
    spec, loss = Spec((3,), 4, 4), CrossEntropy()
    table_x, table_y = draw(0, 10, 3), random.integers(random.key(1), (10,), 4)
    index = torch.arange(4).repeat(clients, 1) + torch.arange(clients).unsqueeze(1)
    weight = torch.tensor([1.0, 3.0, 1.0, 0.0]).repeat(clients, 1)
    each = [
        {k: v + 0.1 * draw(7 + c, *v.shape) for k, v in model.init(spec, random.key(c)).items()}
        for c in range(clients)
    ]
    params = {k: torch.stack([p[k] for p in each]) for k in each[0]}

    def one(params, index, weight):
        return value_and_gradient(model, loss, params, Rows(table_x, table_y, index, weight, spec))

    values, slopes = torch.func.vmap(one)(params, index, weight)
    for c, p in enumerate(each):
        leaves = {k: v.clone().requires_grad_() for k, v in p.items()}
        rows = loss.value(model.apply(leaves, table_x[index[c]]), table_y[index[c]])
        value = (weight[c] * rows).sum() / 5
        torch.testing.assert_close(values[c], value.detach())
        alone = one(p, index[c], weight[c])
        torch.testing.assert_close(alone[0], value.detach())
        for k, g in zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True):
            torch.testing.assert_close(slopes[k][c], g)
            torch.testing.assert_close(alone[1][k], g)


def test_losses_by_hand():
    outputs = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    y = torch.tensor([0, 1])
    expected = torch.tensor([torch.log(torch.tensor(2.0)), torch.log(1 + torch.e * torch.ones(()))])
    torch.testing.assert_close(CrossEntropy().value(outputs, y), expected)
    torch.testing.assert_close(
        CrossEntropy().slope(outputs[:1], y[:1], torch.tensor([2.0])), torch.tensor([[-1.0, 1.0]])
    )
    torch.testing.assert_close(
        Squared().value(outputs, torch.tensor([[1.0, 2.0], [1.0, 0.0]])), torch.tensor([2.5, 0.0])
    )
    torch.testing.assert_close(Squared().value(outputs, y), torch.tensor([0.5, 1.0]))


def shapes(model, spec):
    return {k: tuple(v.shape) for k, v in model.init(spec, random.key(0)).items()}


def test_cnn_of_the_papers():
    x, leaky = torch.full((1, 1, 2, 2), -2.0), CNN((1,), kernel=1, hidden=(), leak=0.1)
    params = {
        "conv0": torch.ones(1, 1, 1, 1),
        "conv_bias0": torch.zeros(1),
        "weight0": torch.ones(1, 1),
        "bias0": torch.zeros(1),
    }
    assert leaky.apply(params, x).item() == pytest.approx(-0.2)
    with pytest.raises(fd.ModelError, match="leak=1"):
        CNN(leak=1)
    cifar = shapes(CNN.cifar(), Spec((3, 32, 32), 10, 10))
    assert cifar["conv0"] == (64, 3, 5, 5)
    assert cifar["conv1"] == (64, 64, 5, 5)
    assert cifar["weight0"] == (384, 64 * 5 * 5)
    assert cifar["weight1"] == (192, 384)
    assert cifar["weight2"] == (10, 192)
    emnist = shapes(CNN.emnist(), Spec((784,), 26, 26))
    assert emnist["conv0"] == (64, 1, 5, 5)
    assert emnist["weight0"] == (120, 64 * 4 * 4)
    assert emnist["weight1"] == (84, 120)
    # McMahan et al. count 1,663,370 parameters.
    params = CNN.mnist().init(Spec((784,), 10, 10), random.key(0))
    assert sum(v.numel() for v in params.values()) == 1_663_370


def test_cnn_equals_the_same_layers_in_torch():
    spec = Spec((2, 12, 12), 3, 3)
    model = CNN(channels=(4,), kernel=3, hidden=(5,))
    p = model.init(spec, random.key(1))
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(100, 5),
        nn.ReLU(),
        nn.Linear(5, 3),
    )
    names = ["0.weight", "0.bias", "4.weight", "4.bias", "6.weight", "6.bias"]
    net.load_state_dict(dict(zip(names, p.values(), strict=True)))
    x = draw(0, 6, 2, 12, 12)
    torch.testing.assert_close(model.apply(p, x), net(x))
    net(x).square().sum().backward()
    theirs = dict(zip(p, (v.grad for v in net.parameters()), strict=True))
    slope = torch.func.grad(lambda p, x: model.apply(p, x).square().sum())
    torch.testing.assert_close(slope(p, x), theirs, rtol=1e-4, atol=1e-5)
    # each row alone, side by side
    rows = torch.func.vmap(slope, in_dims=(None, 0))(p, x.unsqueeze(1))
    torch.testing.assert_close({k: v.sum(0) for k, v in rows.items()}, theirs, rtol=1e-4, atol=1e-5)


def test_padding_and_leaks_of_a_cnn_are_those_of_torch():
    model, spec = (
        CNN(channels=(3,), kernel=3, hidden=(4,), padding="same", leak=0.2),
        Spec((2, 6, 6), 3, 3),
    )
    p = model.init(spec, random.key(1))
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding="same"), nn.LeakyReLU(0.2), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(27, 4), nn.LeakyReLU(0.2), nn.Linear(4, 3),
    )  # fmt: skip
    net.load_state_dict(dict(zip(net.state_dict(), p.values(), strict=True)))
    x = draw(0, 5, 2, 6, 6)
    torch.testing.assert_close(model.apply(p, x), net(x))


def test_cnn_takes_flat_and_square_rows():
    model, key = CNN(channels=(2,), kernel=3, hidden=(4,)), random.key(0)
    p = model.init(Spec((64,), 2, 2), key)
    x = draw(0, 3, 64)
    torch.testing.assert_close(model.apply(p, x), model.apply(p, x.view(3, 8, 8)))
    torch.testing.assert_close(model.apply(p, x), model.apply(p, x.view(3, 1, 8, 8)))


def test_start_does_not_touch_the_global_generator_and_is_bounded():
    before = torch.get_rng_state()
    p = MLP((50,)).init(Spec((100,), 3, 3), random.key(5))
    assert torch.equal(before, torch.get_rng_state())
    assert p["weight0"].abs().max() <= 0.1
    assert p["weight0"].std() == pytest.approx(0.1 / 3**0.5, rel=0.05)


def test_any_module_trains_like_the_built_in_model(fed):
    """The same linear map as a torch module, batched by vmap or looped, gives FedAvg's numbers."""
    net = nn.Sequential(nn.Linear(64, 10))
    nn.init.zeros_(net[0].weight), nn.init.zeros_(net[0].bias)
    ours = fd.run(fd.FedAvg(Linear(), lr=0.1), fed, 2)
    for batch in (True, False):
        theirs = fd.run(fd.FedAvg(net, lr=0.1), fed, 2, engine=fd.Local(batch=batch))
        torch.testing.assert_close(
            theirs.state.w["0/weight"], ours.state.w["weight"], rtol=1e-4, atol=1e-6
        )
    assert net[0].weight.abs().max() == 0, "the module passed in must not change"


def test_convolutions_are_looped_and_small_nets_batched():
    assert not Module(nn.Sequential(nn.Conv2d(1, 2, 3))).batchable
    assert not CNN().batchable
    assert Module(nn.Linear(4, 2)).batchable
    assert Module(nn.Linear(2000, 2000)).batchable


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)),
            r"layer '1' \(BatchNorm1d\) mixes the rows of a batch",
        ),
        (nn.Linear(64, 7), r"data has 10 classes: its last layer must have 10 outputs"),
        (nn.Linear(63, 10), r"cannot take rows of shape \(64,\)"),
        (nn.ReLU(), r"no parameters"),
        (CNN(), r"too small for 2 convolutions"),
        ("linear", r"model must be a foedus model or a torch.nn.Module, not 'linear'"),
    ],
)
def test_models_that_are_refused(model, message, fed):
    with pytest.raises(fd.ModelError, match=message):
        fd.run(fd.FedAvg(model), fed, 1)


def test_frozen_parameters_stay_and_are_not_sent(fed):
    net = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))
    net[0].requires_grad_(False)
    run = fd.run(fd.FedAvg(net, lr=0.1), fed, 1)
    assert set(run.state.w) == {"2/weight", "2/bias"}
    assert run.records.last("bytes_up") < 5 * 4 * 120


class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.spare = nn.Linear(64, 10), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize("batch", [True, False])
def test_a_parameter_that_is_not_used_does_not_move(fed, batch):
    run = fd.run(fd.FedAvg(Spare(), lr=0.1), fed, 1, engine=fd.Local(batch=batch))
    assert run.state.w["spare"].tolist() == [1, 1, 1]
    assert run.model.predict(fed.data.x_test.astype(float)).shape == (100,)


@pytest.mark.parametrize(
    "change", [{"channels": ()}, {"kernel": 0}, {"kernel": 4, "padding": "same"}, {"hidden": (0,)}]
)
def test_cnn_settings_must_make_sense(change):
    with pytest.raises(fd.ModelError, match=f"{next(iter(change))}="):
        CNN(**change)
    assert CNN(hidden=8).hidden == (8,)


def test_loss_must_fit_the_data(fed, values):
    with pytest.raises(fd.ConfigError, match="needs class labels"):
        fd.run(fd.FedAvg(loss="cross_entropy"), values, 1)
    with pytest.raises(fd.ConfigError, match="did you mean 'squared'"):
        fd.run(fd.FedAvg(loss="sqared"), fed, 1)
    assert fd.run(fd.FedAvg(loss="squared", lr=0.01), fed, 1).records.last("accuracy") > 0.1


@pytest.mark.parametrize("hidden", [(), (0,), ("a",)])
def test_mlp_layers_must_make_sense(hidden):
    with pytest.raises(fd.ModelError, match="hidden="):
        MLP(hidden)


_MEETING = threading.Barrier(2)


class _Meeting(nn.Module):
    """A layer in which two calls are always inside at the same time."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1))

    def forward(self, x):
        _MEETING.wait(timeout=20)
        out = x @ self.weight
        _MEETING.wait(timeout=20)
        return out


def test_modules_called_in_two_threads_keep_to_their_own_parameters():
    """`Local` trains convolutions of several clients at once: `functional_call` on one module would
    mix their weights up.
    """
    model = Module(_Meeting())
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(model.apply, {"weight": torch.full((1, 1), w)}, torch.ones(1, 1))
            for w in (2.0, 3.0)
        ]
        assert [float(c.result()) for c in calls] == [2.0, 3.0]
    assert float(model.module.weight.detach()) == 0.0
