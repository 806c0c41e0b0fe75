"""AdamW, weight decay by parameter, accumulation and mixed precision: against PyTorch alone."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import foedus as fd
from foedus.base import random
from foedus.base.rows import Rows
from foedus.models.losses import CrossEntropy
from foedus.models.training import descend as descent
from foedus.models.training import precision
from foedus.models.training.descend import descend

ROWS = 23
KEY = random.key(5)


def network(*, norm: type[nn.Module] = nn.LayerNorm, p: float = 0.0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(64, 12), norm(12), nn.ReLU(), nn.Dropout(p), nn.Linear(12, 10)
        )
    net[1].weight.data.fill_(1.3)
    return net


def orders(epochs: int, n: int = ROWS) -> list[Tensor]:
    """The order of a client's rows in each epoch."""
    return [random.permutation(KEY if e == 0 else random.fold(KEY, e), n) for e in range(epochs)]


def trained(how: fd.Training, model: fd.Model, data: fd.Data, clients: int = 1) -> dict:
    """The parameters of a client after a round; of several alike, stacked."""
    x, y = (torch.from_numpy(t[:ROWS]) for t in (data.x_train, data.y_train))
    spec = fd.Spec((64,), 10, 10)
    rows = Rows(x, y, torch.arange(ROWS), torch.ones(ROWS), spec)
    go = partial(descend, how, model, CrossEntropy(), model.init(spec, random.key(3)))
    if clients == 1:
        return go(rows, KEY)["params"]
    index = torch.arange(ROWS).expand(clients, -1)
    rows = Rows(x, y, index.contiguous(), torch.ones(clients, ROWS), spec)
    found = go(rows, KEY.expand(clients, -1))["params"]
    assert all(torch.allclose(v[0], v[1], atol=1e-5) for v in found.values())
    return {k: v[-1] for k, v in found.items()}


def by_pytorch(net, data, optimizer, epochs: int, size: int, prox: float = 0.0) -> dict:
    x, y = (torch.from_numpy(t[:ROWS]) for t in (data.x_train, data.y_train))
    own = copy.deepcopy(net).train()
    made = optimizer(own)
    for rows in (part for order in orders(epochs) for part in order.split(size)):
        made.zero_grad()
        F.cross_entropy(own(x[rows]), y[rows]).backward()
        made.step()
    return {k.replace(".", "/"): p.detach() for k, p in own.named_parameters()}


def close(found: dict, want: dict, rtol: float = 1e-3, atol: float = 1e-5) -> None:
    assert set(found) == set(want)
    for k, v in want.items():
        torch.testing.assert_close(
            found[k], v, rtol=rtol, atol=atol, msg=lambda m, k=k: f"{k}: {m}"
        )


# -- AdamW and weight decay ------------------------------------------------------------------------


def grouped(kind, decay: str, **how):
    """An optimizer of PyTorch with decay 0.3 for all parameters, or for matrices alone."""

    def make(net: nn.Module) -> torch.optim.Optimizer:
        wide = [p for p in net.parameters() if p.dim() >= 2 or decay == "all"]
        others = [p for p in net.parameters() if p.dim() < 2 and decay != "all"]
        groups = [{"params": wide, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
        return kind([g for g in groups if g["params"]], lr=0.02, **how)

    return make


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("decay", ["all", "weights"])
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (torch.optim.AdamW, {"optimizer": "adamw"}),
        (torch.optim.Adam, {"optimizer": "adam"}),
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.7}),
    ],
    ids=["adamw", "adam", "sgd", "momentum"],
)
def test_steps_are_those_of_pytorch(digits, kind, how, decay, clients):
    """Two epochs, of 7, 7, 7 and 2 rows each."""
    training = fd.Training(lr=0.02, weight_decay=0.3, decay=decay, epochs=2, batch_size=7, **how)
    found = trained(training, fd.Module(network()), digits, clients)
    more = {k: v for k, v in how.items() if k == "momentum"}
    want = by_pytorch(network(), digits, grouped(kind, decay, **more), 2, 7)
    close(found, want)


@pytest.mark.parametrize("model", [fd.Linear(zero_start=False), fd.MLP(6)], ids=["linear", "mlp"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_decay_of_weights_alone_in_closed_form(digits, model, optimizer):
    """Of foedus' own models, in one full-batch step from a start w of lr = 0.02: weights get
    -0.02 * 0.3 w more than without decay, biases nothing.
    """
    how = {"lr": 0.02, "optimizer": optimizer, "batch_size": None}
    plain, every, weights = (
        trained(fd.Training(**how, **more), model, digits)
        for more in ({}, {"weight_decay": 0.3}, {"weight_decay": 0.3, "decay": "weights"})
    )
    start = model.init(fd.Spec((64,), 10, 10), random.key(3))
    for k, v in start.items():
        shrunk = plain[k] - 0.006 * v
        # Adam's first step does not depend on the size of a gradient, AdamW's decay is apart
        if optimizer == "adamw" or v.dim() >= 2:
            torch.testing.assert_close(every[k], shrunk, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            weights[k], shrunk if v.dim() >= 2 else plain[k], rtol=1e-5, atol=1e-6
        )
        same = torch.allclose(every[k], weights[k], rtol=0, atol=1e-5)
        assert not same or v.dim() >= 2 or not v.any()


def test_frozen_parameters_have_no_decay(digits):
    """FedRep's head is fitted with the body fixed; AdamW must not shrink that."""
    fed = fd.split(digits, "iid", clients=3, seed=0)
    how = {"shared": "*0", "lr": 0.01, "optimizer": "adamw", "weight_decay": 0.5, "own_steps": 2}
    run = fd.run(fd.FedRep(fd.MLP(6), **how), fed, 1, evaluate_every=0)
    first = fd.run(fd.FedAvg(fd.MLP(6)), fed, 0, evaluate_every=0).state.w
    body = run.client_states().get(0)["w"]["weight0"]
    torch.testing.assert_close(body, first["weight0"], rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_scaffolds_gradient_control_has_the_decay_of_local_steps(two, optimizer):
    """At x = 1 the gradients are -1 and 2, with weight decay 0.5 (of a matrix) -0.5 and 2.5; that
    of AdamW is no part of the gradient.
    """
    model = fd.Module(nn.Linear(1, 1, bias=False).requires_grad_())
    model.module.weight.data.fill_(1.0)
    how = {"lr": 0.1, "steps": 1, "batch_size": None, "weight_decay": 0.5, "option": 1}
    control = {}
    for decay in ("all", "weights"):
        algorithm = fd.Scaffold(model, optimizer=optimizer, decay=decay, **how)
        run = fd.run(algorithm, two, 1, evaluate_every=0)
        control[decay] = float(run.state.c["weight"])
    want = 0.5 if optimizer == "adamw" else 1.0
    assert control == {"all": pytest.approx(want), "weights": pytest.approx(want)}
    biased = nn.Linear(1, 1)
    biased.weight.data.fill_(1.0), biased.bias.data.fill_(2.0)
    algorithm = fd.Scaffold(fd.Module(biased), optimizer="sgd", decay="weights", **how)
    run = fd.run(algorithm, two, 1, evaluate_every=0)
    # residuals at (1, 2): A 1, B 3; gradients of the bias the same, without 0.5 * 2
    assert float(run.state.c["bias"]) == pytest.approx(2.0)


# -- gradient accumulation -------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("how", [{}, {"momentum": 0.7}, {"optimizer": "adamw"}, {"clip": 0.5}])
def test_accumulated_mini_batches_are_one_that_is_larger(digits, how, clients):
    """23 rows, 3 mini-batches of 4 a step: steps of 12 and 11 rows, the last mini-batch of 3."""
    how = {"lr": 0.02, "epochs": 2, "weight_decay": 0.1, **how}
    small = fd.Training(batch_size=4, accumulate=3, **how)
    large = fd.Training(batch_size=12, **how)
    model = fd.Module(network())
    close(trained(small, model, digits, clients), trained(large, model, digits, clients))


def test_accumulation_by_hand(two):
    """One row a mini-batch: A's step is 0.1 * 2 from 0; B's two rows have gradients -2 each, whose
    mean is one step to 0.2, then a second to 0.32.
    """
    weightless = fd.Module(nn.Linear(1, 1, bias=False))
    weightless.module.weight.data.zero_()
    for model in (fd.Linear(bias=False), weightless):
        how = {"lr": 0.1, "batch_size": 1, "accumulate": 2}
        run = fd.run(fd.FedAvg(model, epochs=2, **how), two, 1, evaluate_every=0)
        assert float(run.state.w["weight"]) == pytest.approx((0.38 + 2 * 0.32) / 3)
        # FedNova divides by as many steps as there were: two each
        run = fd.run(fd.FedNova(model, epochs=2, **how), two, 1, evaluate_every=0)
        assert float(run.state.w["weight"]) == pytest.approx((0.38 + 2 * 0.32) / 3)


def test_the_forward_pass_has_a_mini_batch_of_rows():
    """Eight rows, two mini-batches of three and one of two for a step."""
    seen = []

    class Counts(nn.Linear):
        def forward(self, x):
            if torch.is_grad_enabled():
                seen.append(len(x))
            return super().forward(x)

    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    fed = fd.Federation.from_clients([(x, np.arange(8) % 2)], classes=2)
    algorithm = fd.FedAvg(Counts(2, 2), lr=0.1, batch_size=3, accumulate=3)
    fd.run(algorithm, fed, 1, evaluate_every=0, engine=fd.Local(batch=False))
    assert seen == [3, 3, 2]
    seen.clear()  # 14 rows: the last step has five of them, and no third mini-batch
    more = (np.concatenate((x, x[:6])), np.arange(14) % 2)
    fd.run(algorithm, fd.Federation.from_clients([more], classes=2), 1, evaluate_every=0)
    assert seen == [3, 3, 3, 3, 2]


@pytest.mark.parametrize("batch", [True, False])
def test_batch_norm_goes_from_mini_batch_to_mini_batch(batch):
    """Statistics as PyTorch's when it accumulates: by mini-batch, of real rows. Clients of 13 and 6
    rows: the second has no rows in the second mini-batch of its second step.
    """
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(n, 64)).astype(np.float32), rng.integers(0, 10, n)) for n in (13, 6)]
    fed = fd.Federation.from_clients(parts, classes=10)
    net = network(norm=nn.BatchNorm1d)
    algorithm = fd.FedAvg(
        fd.Module(net, norm="average"), lr=0.1, batch_size=2, accumulate=2, weights="uniform"
    )
    run = fd.run(algorithm, fed, 1, engine=fd.Local(batch=batch), evaluate_every=0, seed=4)
    want: dict = {}
    for i, (x, y) in enumerate(parts):
        own, key = copy.deepcopy(net).train(), random.fold(random.key(4), 1, 0, i)
        x, y = torch.from_numpy(x), torch.from_numpy(y)
        for group in random.permutation(key, len(x)).split(4):
            own.zero_grad()
            for rows in group.split(2):
                own.train(len(rows) > 1)  # one row: by the running statistics
                value = F.cross_entropy(own(x[rows]), y[rows])
                (value * len(rows) / len(group)).backward()
            for p in own.parameters():
                p.data.sub_(p.grad, alpha=0.1)
        for k, v in own.state_dict().items():
            want[k.replace(".", "/")] = want.get(k.replace(".", "/"), 0) + v / 2
    want.pop("1/num_batches_tracked")
    close(run.state.w, want, atol=1e-4)


def test_dropout_has_masks_of_its_own_in_every_mini_batch(fed):
    """Batched and looped alike, and other ones in the second mini-batch of a step than in the
    first.
    """
    model = fd.Module(network(p=0.5))
    algorithm = fd.FedAvg(model, lr=0.1, batch_size=8, accumulate=2, epochs=2)
    one, other = (
        fd.run(algorithm, fed, 2, engine=fd.Local(batch=b), evaluate_every=0).state.w
        for b in (True, False)
    )
    close(one, other, atol=1e-4)
    # the same row twice, with p = 0.5: a mask for both would keep what is kept in each
    x, y = np.ones((2, 64), np.float32), np.zeros(2, np.int64)
    alike = fd.Federation.from_clients([(x, y)], classes=10)
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 10))
    net[1].weight.data.zero_(), net[1].bias.data.zero_()
    run = fd.run(
        fd.FedAvg(fd.Module(net), lr=0.1, batch_size=1, accumulate=2), alike, 1, evaluate_every=0
    )
    # each mask gives a feature a gradient of 2 * 0.9 / 2 or none in class 0
    moves = (run.state.w["1/weight"][0] / 0.09).round(decimals=3).unique().tolist()
    assert moves == pytest.approx([0, 1, 2])


def test_accumulation_needs_mini_batches():
    with pytest.raises(fd.ConfigError, match=r"accumulate=2 adds up mini-batches.*batch_size=32"):
        fd.FedAvg(accumulate=2, batch_size=None)


# -- mixed precision -------------------------------------------------------------------------------


def autocast(net, data, kind: torch.dtype, how, scale: float = 1.0) -> dict:
    """One epoch of 7 rows a step in PyTorch alone, with the forward pass in autocast."""
    x, y = (torch.from_numpy(t[:ROWS]) for t in (data.x_train, data.y_train))
    own = copy.deepcopy(net).train()
    optimizer = how(own.parameters())
    for rows in orders(1)[0].split(7):
        optimizer.zero_grad()
        with torch.autocast("cpu", kind):
            outputs = own(x[rows])
        (F.cross_entropy(outputs.float(), y[rows]) * scale).backward()
        for p in own.parameters():
            p.grad.div_(scale)
        optimizer.step()
    return {k.replace(".", "/"): p.detach() for k, p in own.named_parameters()}


@pytest.mark.parametrize("clients", [1, 3])
def test_bfloat16_is_pytorchs_autocast(digits, clients):
    net = network()
    training = fd.Training(lr=0.5, batch_size=7, precision="bfloat16")
    found = trained(training, fd.Module(net), digits, clients)
    want = autocast(net, digits, torch.bfloat16, partial(torch.optim.SGD, lr=0.5))
    close(found, want, rtol=1e-5, atol=1e-6)
    assert all(v.dtype == torch.float32 for v in found.values())
    full = trained(fd.Training(lr=0.5, batch_size=7), fd.Module(net), digits)
    assert not all(torch.allclose(full[k], v, atol=1e-5) for k, v in found.items())
    close(full, want, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("norm", ["average", "frozen", "group"])
def test_bfloat16_with_batch_norm(fed, norm):
    """Running statistics stay float32, and are near those of float32 throughout."""
    net = network(norm=nn.BatchNorm1d)
    runs = [
        fd.run(
            fd.FedAvg(fd.Module(net, norm=norm), lr=0.1, batch_size=16, precision=precision),
            fed, 2, evaluate_every=0,
        )
        for precision in ("bfloat16", None)
    ]  # fmt: skip
    narrow, full = (run.state.w for run in runs)
    assert all(v.dtype == torch.float32 for v in narrow.values())
    close(narrow, full, rtol=0.1, atol=0.05)


def test_float16_needs_a_gpu(fed):
    with pytest.raises(
        fd.ConfigError, match=r"needs a GPU; use precision='bfloat16'.*device='cuda'"
    ):
        fd.run(fd.FedAvg(network(), precision="float16"), fed, 1)


def test_float16_gradients_are_scaled(digits, monkeypatch):
    """By 1024, exactly: as PyTorch with a loss that is scaled by hand. (The CPU can do it, too.)"""
    monkeypatch.setattr(
        descent, "narrowed", lambda model, kind, device: precision._Narrow(model, kind, "cpu")
    )
    training = fd.Training(lr=0.5, batch_size=7, precision="float16")
    found = trained(training, fd.Module(network()), digits)
    how = partial(torch.optim.SGD, lr=0.5)
    close(found, autocast(network(), digits, torch.float16, how, 1024.0), rtol=1e-5, atol=1e-6)
    unscaled = autocast(network(), digits, torch.float16, how)
    assert not all(torch.equal(found[k], v) for k, v in unscaled.items())
