"""Users' modules that are chains of linear layers: recognized, and trained by compiled loops to
what PyTorch's own layers give in double precision."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import foedus as fd
from foedus import kernels
from foedus.base import random
from foedus.models.chain import chain_of
from foedus.models.dropout import Site, draw_mask

needs_loops = pytest.mark.skipif(
    not kernels.ready, reason="foedus was installed without a compiler, or FOEDUS_COMPILED=0"
)


class Masked(nn.Module):
    """Dropout with masks that are set from outside."""

    def __init__(self, p: float):
        super().__init__()
        self.p, self.mask = p, None

    def forward(self, x):
        return x * self.mask


def between(order: str, width: int, **norm) -> list[nn.Module]:
    """Layers by letter: b, r, d."""
    made = {"b": lambda: nn.BatchNorm1d(width, momentum=0.3, eps=0.02, **norm), "r": nn.ReLU}
    return [made[c]() if c in made else nn.Dropout(0.37) for c in order]


def chain(order: str, bias: bool = True, **norm) -> nn.Module:
    """64 inputs, two hidden layers of 19 and 7, with other running statistics than those of new
    layers."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = nn.Sequential(
            nn.Flatten(), nn.Sequential(nn.Linear(64, 19, bias), *between(order, 19, **norm)),
            nn.Identity(), nn.Linear(19, 7, bias), *between(order[::-1], 7, **norm),
            nn.Linear(7, 10),
        )  # fmt: skip
        for m in net.modules():
            if isinstance(m, nn.BatchNorm1d):
                m.running_mean.uniform_(-0.3, 0.3), m.running_var.uniform_(0.5, 2.0)
                if m.affine:
                    nn.init.uniform_(m.weight, 0.5, 1.5), nn.init.uniform_(m.bias, -0.5, 0.5)
    return net


def by_pytorch(net, x, y, key, frozen: bool, prox: float, decay: float, lr: float) -> dict:
    """Two epochs of one client in mini-batches of eight, with PyTorch's layers in double precision.

    Dropout in step t of its i-th layer takes the mask of the key (client, 0xD20, i, t).
    """
    own, start = copy.deepcopy(net).double().train(), copy.deepcopy(net).double().state_dict()
    for name, m in list(own.named_modules()):
        if isinstance(m, nn.Dropout):
            home, _, last = name.rpartition(".")
            setattr(own.get_submodule(home), last, Masked(m.p))
    norms = [m for m in own.modules() if isinstance(m, nn.BatchNorm1d)]
    drops = [m for m in own.modules() if isinstance(m, Masked)]
    widths = [19, 7]
    t = 0
    for epoch in range(2):
        of_epoch = random.fold(key, epoch) if epoch else key
        order = random.permutation(of_epoch, len(x)) if len(x) > 8 else torch.arange(len(x))
        for part in order.split(8):
            for m in norms:
                m.train(not frozen and len(part) > 1)
            for i, m in enumerate(drops):
                call = random.fold(random.fold(key, 0xD20, i), torch.tensor([t]))
                site = Site((len(part), widths[i]), 0, m.p, 1 / (1 - round(m.p * 65536) / 65536))
                m.mask = draw_mask(call, site)[0].double()
            value = F.cross_entropy(own(x[part].double()), y[part])
            names, leaves = zip(*own.named_parameters(), strict=True)
            for k, p, g in zip(names, leaves, torch.autograd.grad(value, leaves), strict=True):
                p.data.sub_(g + prox * (p.data - start[k]) + decay * p.data, alpha=lr)
            t += 1
    found = {k.replace(".", "/"): v for k, v in own.state_dict().items() if "tracked" not in k}
    return {k: v.float() for k, v in found.items()}


@pytest.fixture
def calls(monkeypatch) -> list:
    """How often compiled training was called, with what follows each layer."""
    made, train = [], kernels.train

    def counted(*args, **options):
        made.append(options["between"])
        return train(*args, **options)

    monkeypatch.setattr(kernels, "train", counted)
    return made


@pytest.fixture(scope="module")
def unequal() -> fd.Federation:
    """Clients of 1, 8, 17, 33 and 6 rows: alone, one full batch, and last ones of one row."""
    rng, sizes = np.random.default_rng(4), (1, 8, 17, 33, 6)
    clients = [
        (rng.standard_normal((n, 8, 8), dtype=np.float32), rng.integers(0, 10, n)) for n in sizes
    ]
    return fd.Federation.from_clients(clients, classes=10)


@needs_loops
@pytest.mark.parametrize("order", ["r", "", "b", "br", "rb", "d", "brd", "drb", "rdb", "bd"])
@pytest.mark.parametrize("norm", ["average", "frozen"])
def test_a_round_is_that_of_pytorchs_layers(unequal, calls, order, norm):
    net = chain(order)
    how = {"lr": 0.13, "epochs": 2, "batch_size": 8, "mu": 0.29, "weight_decay": 0.07}
    algorithm = fd.FedProx(fd.Module(net, norm=norm), **how)
    run = fd.run(algorithm, unequal, 1, seed=5, evaluate_every=0)
    assert len(calls) == 1
    x, y = torch.from_numpy(unequal.data.x_train), torch.from_numpy(unequal.data.y_train)
    want: dict = {}
    for i in range(len(unequal)):
        rows = unequal.rows[unequal.offsets[i] : unequal.offsets[i + 1]]
        key = random.fold(random.key(5), 1, 0, int(unequal.ids[i]))
        new = by_pytorch(net, x[rows], y[rows], key, norm == "frozen", 0.29, 0.07, 0.13)
        want = {k: want.get(k, 0) + len(rows) / 65 * v for k, v in new.items()}
    assert set(run.state.w) == {k for k in want if norm == "average" or "running" not in k}
    for k, v in run.state.w.items():
        torch.testing.assert_close(v, want[k], rtol=2e-4, atol=2e-6, msg=lambda m, k=k: f"{k}: {m}")


@needs_loops
def test_layers_without_scale_shift_and_bias(unequal, calls):
    net = chain("br", bias=False, affine=False)
    algorithm = fd.FedAvg(fd.Module(net, norm="average"), lr=0.13, epochs=2, batch_size=8)
    run = fd.run(algorithm, unequal, 1, evaluate_every=0)
    assert len(calls) == 1 and calls[0][0].norm[0] is None
    x, y = torch.from_numpy(unequal.data.x_train), torch.from_numpy(unequal.data.y_train)
    want: dict = {}
    for i in range(len(unequal)):
        rows = unequal.rows[unequal.offsets[i] : unequal.offsets[i + 1]]
        key = random.fold(random.key(0), 1, 0, int(unequal.ids[i]))
        new = by_pytorch(net, x[rows], y[rows], key, False, 0.0, 0.0, 0.13)
        want = {k: want.get(k, 0) + len(rows) / 65 * v for k, v in new.items()}
    for k, v in run.state.w.items():
        torch.testing.assert_close(v, want[k], rtol=2e-4, atol=2e-6)


@needs_loops
@pytest.mark.parametrize("order", ["brd", "rdb"])
def test_compiled_and_batched_by_vmap_agree(fed, calls, monkeypatch, order):
    """Control variates, which differ by client, are added to the gradients of scale and shift."""
    algorithm = fd.Scaffold(fd.Module(chain(order), norm="average"), lr=0.1, batch_size=16)
    found = fd.run(algorithm, fed, 3, seed=2, participation=0.6)
    assert len(calls) == 3
    monkeypatch.setattr("foedus.models.training.compiled.chain_of", lambda module, dimensions: None)
    other = fd.run(algorithm, fed, 3, seed=2, participation=0.6)
    assert len(calls) == 3
    for k, v in other.state.w.items():
        torch.testing.assert_close(found.state.w[k], v, rtol=1e-3, atol=2e-5)


@needs_loops
def test_a_client_gets_the_same_bits_in_any_batch(fed, calls):
    algorithm = fd.FedAvg(fd.Module(chain("brd"), norm="average"), lr=0.1, batch_size=16)
    whole = fd.run(algorithm, fed, 2).state.w
    apart = fd.run(algorithm, fed, 2, engine=fd.Local(batch=False)).state.w
    assert len(calls) == 2 + 2 * len(fed)
    assert all(torch.equal(whole[k], apart[k]) for k in whole)


@needs_loops
@pytest.mark.parametrize(
    "more",
    [
        {"momentum": 0.9}, {"optimizer": "adam"}, {"clip": 1.0}, {"accumulate": 2},
        {"loss": nn.CrossEntropyLoss()}, {"lr": fd.schedules.Cosine(0.1, over=9, by="step")},
    ],
    ids=lambda more: next(iter(more)),
)  # fmt: skip
def test_other_training_is_not_compiled(fed, calls, more):
    model = fd.Module(chain("b"), norm="average")
    fd.run(fd.FedAvg(model, **{"lr": 0.1, "batch_size": 16, **more}), fed, 1)
    assert not calls


def test_chains_are_recognized():
    links = chain_of(chain("brd"), 2)
    assert [link.name for link in links] == ["1.0", "3", "7"]
    normalize, relu, dropout = kernels.NORMALIZE, kernels.RELU, kernels.DROPOUT
    assert links[0].operations == (normalize, relu, dropout) and links[0].norm == "1.1"
    assert links[1].operations == (dropout, relu, normalize) and links[1].p == 0.37
    assert links[2].operations == ()
    assert chain_of(nn.Linear(3, 2), 1)[0].name == ""
    assert chain_of(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.0), nn.Linear(2, 2)), 1)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Backwards(nn.Sequential):
    def forward(self, x):
        return super().forward(-x)


def hooked(add: str) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    getattr(net[1], add)(lambda *given: None)
    return net


def still() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    net[0].bias.requires_grad_(False)
    return net


def replaced() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    net[1].forward = torch.tanh
    return net


def shared() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


def shared_norm() -> nn.Module:
    norm = nn.BatchNorm1d(4, affine=False)
    return nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm, nn.Linear(4, 2))


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    net[2].weight = net[0].weight
    return net


def extended() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    net[0].scale = nn.Parameter(torch.ones(1))
    return net


NOT_CHAINS = {
    "another layer": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)),
    "ends in ReLU": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
    "begins with dropout": lambda: nn.Sequential(nn.Dropout(), nn.Linear(4, 2)),
    "ReLU twice": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.ReLU(), nn.Linear(4, 2)),
    "flattens a part": lambda: nn.Sequential(nn.Flatten(0), nn.Linear(4, 2)),
    "a subclass of a layer": lambda: nn.Sequential(Doubled(4, 4), nn.ReLU(), nn.Linear(4, 2)),
    "a subclass of Sequential": lambda: Backwards(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)),
    "a hook": lambda: hooked("register_forward_hook"),
    "a hook before": lambda: hooked("register_forward_pre_hook"),
    "a hook on the way back": lambda: hooked("register_full_backward_hook"),
    "a forward of its own": replaced,
    "a parameter that stays": still,
    "a shared layer": shared,
    "a shared weight": tied,
    "one more parameter": extended,
    "eps that is 0 in single precision": lambda: nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4, eps=1e-50), nn.Linear(4, 2)
    ),
    "shared statistics": shared_norm,
    "no layers": nn.Sequential,
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))),
    "no running statistics": lambda: nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)
    ),
}


@pytest.mark.parametrize("make", NOT_CHAINS.values(), ids=list(NOT_CHAINS))
def test_what_is_no_chain(make):
    assert chain_of(make(), 1) is None


def test_hooks_on_all_modules_are_called():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    hook = nn.modules.module.register_module_forward_hook(lambda *given: None)
    try:
        assert chain_of(net, 1) is None
    finally:
        hook.remove()
    assert chain_of(net, 1) is not None


def test_a_layer_without_numbers_may_be_there_twice():
    relu = nn.ReLU()
    net = nn.Sequential(nn.Linear(4, 3), relu, nn.Linear(3, 3), relu, nn.Linear(3, 2))
    assert [len(link.operations) for link in chain_of(net, 1)] == [1, 1, 0]


def test_rows_of_several_dimensions_must_be_flattened():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    assert chain_of(net, 2) is None
    assert chain_of(nn.Sequential(nn.Flatten(), nn.Linear(8, 2)), 2)


@needs_loops
@pytest.mark.parametrize(
    "spoilt",
    [
        (4, 0, 0), (-1, 0, 0), (2, 2, 0), (1, 0, 0), (3, 0, 0),
    ],
    ids=["unknown", "negative", "twice", "no statistics", "no keys"],
)  # fmt: skip
def test_operations_that_cannot_be_are_refused(spoilt):
    layers = [(torch.zeros(1, 2, 3), torch.zeros(1, 2)), (torch.zeros(1, 2, 2), torch.zeros(1, 2))]
    one = torch.ones(1, 1, 1)
    with pytest.raises(ValueError):
        kernels.train(
            layers, [(None, None)] * 2, torch.zeros(1, 3), torch.tensor([0]), one.long() - 1, one,
            torch.tensor([1]), between=[kernels.Between(spoilt)], loss=0, lr=0.1, keep=1.0,
        )  # fmt: skip


@needs_loops
def test_statistics_of_another_size_are_refused():
    layers = [(torch.zeros(1, 2, 3), None), (torch.zeros(1, 2, 2), None)]
    one, few = torch.ones(1, 1, 1), torch.zeros(1, 1)
    with pytest.raises(ValueError, match="mean has 4 bytes"):
        kernels.train(
            layers, [(None, None)] * 2, torch.zeros(1, 3), torch.tensor([0]), one.long() - 1, one,
            torch.tensor([1]), loss=0, lr=0.1, keep=1.0,
            between=[kernels.Between((kernels.NORMALIZE,), (None, None, few, few))],
        )  # fmt: skip
