"""Dropout from the clients' keys: against PyTorch with the same masks, its laws, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import foedus as fd
from foedus.base import random
from foedus.models.dropout import Drawn, Masks, Record, Site, draw_mask


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 12), nn.Linear(12, 10)

    def forward(self, x):
        return self.b(F.dropout(self.a(x).relu(), 0.3, self.training))


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.out = nn.Linear(8, 10)

    def forward(self, x):
        return self.out(self.layer(x.view(-1, 8, 8)).mean(1))


class Recurs(nn.Module):
    def __init__(self, kind, **more):
        super().__init__()
        self.net = kind(8, 6, 2, dropout=0.4, batch_first=True, **more)
        self.out = nn.Linear(6 * (2 if self.net.bidirectional else 1), 10)

    def forward(self, x):
        return self.out(self.net(x.view(-1, 8, 8))[0][:, -1])


NETS = {
    "layers": lambda: nn.Sequential(
        nn.Linear(64, 12), nn.Dropout(0.5), nn.Unflatten(1, (3, 4)), nn.Dropout1d(0.2),
        nn.Flatten(), nn.AlphaDropout(0.1), nn.Linear(12, 10),
    ),
    "images": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.Dropout2d(0.3), nn.ReLU(),
        nn.Unflatten(1, (4, 1)), nn.Dropout3d(0.1), nn.FeatureAlphaDropout(0.1),
        nn.Flatten(), nn.Linear(144, 10),
    ),
    "function": Functional,
    "attention": Attends,
    "lstm": lambda: Recurs(nn.LSTM),
    "gru": lambda: Recurs(nn.GRU, bidirectional=True),
}  # fmt: skip


def made(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return NETS[name]()


@pytest.mark.parametrize("name", NETS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_batched_or_looped_dropout_drops_the_same(fed, name):
    """Clients are unequal and smaller than a mini-batch, so that batches are padded."""
    net, before = made(name), torch.get_rng_state()
    algorithm = fd.FedAvg(net, lr=0.1, batch_size=80, epochs=2)
    runs = [
        fd.run(algorithm, fed, 2, participation=0.6, engine=fd.Local(batch=batch))
        for batch in (True, False, False)
    ]
    assert torch.equal(before, torch.get_rng_state()), "the global generator is not used"
    for k, v in runs[0].state.w.items():
        torch.testing.assert_close(v, runs[1].state.w[k], rtol=1e-4, atol=1e-6)
        assert torch.equal(runs[1].state.w[k], runs[2].state.w[k])
    other = fd.run(algorithm, fed, 2, participation=0.6, seed=1)
    assert not all(torch.equal(v, runs[0].state.w[k]) for k, v in other.state.w.items())
    x = torch.from_numpy(fed.data.x_test)
    outputs = runs[0].model.outputs(x)  # in evaluation it is off
    assert torch.equal(outputs, runs[0].model.outputs(x))
    torch.testing.assert_close(runs[0].model.to_torch()(x), outputs, rtol=1e-4, atol=1e-5)
    assert net.training, "the module passed in must not change"


def test_training_with_dropout_is_pytorch_with_these_masks(fed):
    """One client, three steps on all of its rows: masks rebuilt from the key, all else PyTorch."""
    one = fd.split(fed.data, "iid", clients=1, seed=0)
    net = nn.Sequential(nn.Linear(64, 12), nn.ReLU(), nn.Dropout(0.37), nn.Linear(12, 10))
    found = fd.run(fd.FedAvg(net, lr=0.2, batch_size=None, steps=3), one, 1, seed=5).state.w
    key = random.fold(random.key(5), 1, 0, 0)
    a, b = nn.Linear(64, 12), nn.Linear(12, 10)
    a.load_state_dict(net[0].state_dict()), b.load_state_dict(net[3].state_dict())
    x, y = torch.from_numpy(one.data.x_train), torch.from_numpy(one.data.y_train)
    x, y = x[one.rows], y[one.rows]
    leaves, kept = [*a.parameters(), *b.parameters()], 1 - round(0.37 * 65536) / 65536
    for step in range(3):
        stream = random.fold(random.fold(key, 0xD20, 0), step)
        words = random.words(stream, len(x) * 6).numpy().astype(np.uint32).view(np.uint16)
        mask = torch.from_numpy((words >= round(0.37 * 65536)).astype(np.float32)).view(-1, 12)
        value = F.cross_entropy(b(a(x).relu() * mask / kept), y)
        for p, g in zip(leaves, torch.autograd.grad(value, leaves), strict=True):
            p.data.sub_(g, alpha=0.2)
    for k, p in zip(("0/weight", "0/bias", "3/weight", "3/bias"), leaves, strict=True):
        torch.testing.assert_close(found[k], p.data, rtol=1e-4, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), p=st.floats(0.01, 0.99), rows=st.integers(0, 1))
def test_masks_drop_with_their_probability(seed, p, rows):
    keys = random.fold(random.key(seed), torch.arange(3))
    mask = draw_mask(keys, Site((90, 101), rows, p, 1 / (1 - p)))
    n = mask.numel()
    kept = (mask > 0).double().mean().item()
    assert abs(kept - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5 + 1e-5
    assert abs(mask.double().mean().item() - 1) < 5 * (p / (1 - p) / n) ** 0.5 + 1e-4
    # every client has its own; alone it has the same
    assert not torch.equal(mask[0], mask[1])
    assert torch.equal(draw_mask(keys[1:2], Site((90, 101), rows, p, 1 / (1 - p)))[0], mask[1])


@pytest.mark.parametrize("rows", [0, 1])
def test_padding_changes_no_mask(rows):
    shape = lambda n: (n, 6) if rows == 0 else (6, n)  # noqa: E731
    keys = random.fold(random.key(3), torch.arange(2))
    small, large = (draw_mask(keys, Site(shape(n), rows, 0.5)) for n in (5, 9))
    assert torch.equal(small, large.narrow(rows + 1, 0, 5))


def drop(function, x, *args, **kwargs):
    masks = Masks(random.fold(random.key(1), torch.arange(1)), 1)
    call = lambda i, site, like: masks.draw(i, site, like, 0, slice(0, 1))[0]  # noqa: E731
    plan = Record(len(x))
    plan.by_function = True
    with Drawn(len(x), plan, call):
        return function(x, *args, **kwargs)


def test_alpha_dropout_keeps_mean_and_variance():
    x = random.normal(random.key(0), (400, 500))
    found = drop(F.alpha_dropout, x, 0.3, True)
    assert found.mean().item() == pytest.approx(0, abs=0.01)
    assert found.var().item() == pytest.approx(1, abs=0.02)
    assert not torch.equal(found, x)


def test_channels_are_dropped_whole():
    x = torch.ones(50, 4, 3, 3)
    for function, rows in (
        (F.dropout2d, x),
        (F.dropout1d, x[..., 0]),
        (F.dropout3d, x[..., None]),
    ):
        found = drop(function, rows, 0.5, True).flatten(2)
        assert bool((found == found[..., :1]).all())
        assert {round(v, 3) for v in found.unique().tolist()} == {0.0, 2.0}


def test_dropout_in_place_and_at_its_ends():
    x = torch.ones(40, 5)
    assert drop(F.dropout, x, 0.5, True, True) is x
    assert {0.0, 2.0} == set(x.unique().tolist())
    assert drop(F.dropout, torch.ones(4, 5), 1.0).abs().max() == 0
    assert torch.equal(drop(F.dropout, torch.ones(4, 5), 0.5, False), torch.ones(4, 5))


@pytest.mark.parametrize("causal", [True, False])
def test_attention_without_drops_is_that_of_torch(causal):
    """What a kept share of (almost) all leaves is PyTorch's own attention."""
    q, k, v = (random.normal(random.key(i), (3, 2, 5, 4)) for i in range(3))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    with Record(3):
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=1e-9, is_causal=causal)
    torch.testing.assert_close(found, want)
    mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -1e9)
    want = F.scaled_dot_product_attention(q, k, v, mask, scale=0.3)
    with Record(3):
        found = F.scaled_dot_product_attention(q, k, v, mask, 1e-9, scale=0.3)
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_one_by_one_are_those_of_torch(kind):
    net = kind(4, 3, 3, dropout=1e-9, bidirectional=True)
    x = random.normal(random.key(0), (5, 2, 4))
    want, ends = net(x)
    with Record(2) as record:
        found, found_ends = net(x)
    assert len(record.sites) == 2
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(found_ends, ends)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(64, 10)

    def forward(self, x):
        return self.net(x + 0.1 * torch.randn(x.shape))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(64, 10)

    def forward(self, x):
        return self.net(x) if x.sum() > 0 else -self.net(x)


def test_what_cannot_be_done_says_what_to_do(fed, values):
    with pytest.raises(fd.ModelError, match="draws from the global random generator"):
        fd.run(fd.FedAvg(Noisy()), fed, 1)
    with pytest.raises(fd.ModelError, match=r"fd.Local\(batch=False\)"):
        fd.run(fd.FedAvg(Branches(), lr=0.1), fed, 1, engine=fd.Local(batch=True))
    fd.run(fd.FedAvg(Branches(), lr=0.1), fed, 1, engine=fd.Local(batch=False))
    with pytest.raises(fd.ModelError, match="FedFW does not train by mini-batch descent"):
        fd.run(fd.FedFW(made("layers")), fed, 1)


def test_dropout_on_other_engines_and_in_other_algorithms(fed):
    net = made("layers")
    for kind in (fd.Scaffold, fd.FedProx, fd.FedDyn, fd.Independent, fd.Central):
        algorithm = kind(net, lr=0.05, batch_size=7)
        one, other = (fd.run(algorithm, fed, 2, engine=fd.Local(batch=b)) for b in (True, False))
        assert one.records.last("loss") == pytest.approx(other.records.last("loss"), rel=1e-4)


class Tied(nn.Module):
    """An embedding that is the last layer, too."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 10, bias=False), nn.Linear(64, 10, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("shift", torch.ones(64))

    def forward(self, x):
        return self.first(x) + self.last(x + self.shift)


def test_shared_parameters_and_constant_buffers(fed):
    """Twice the same weights: those of one linear map with twice its gradient."""
    net = Tied()
    for batch in (True, False):
        run = fd.run(fd.FedAvg(net, lr=0.05), fed, 2, engine=fd.Local(batch=batch))
        assert set(run.state.w) == {"first/weight"}
        module = run.model.to_torch()
        assert module.last.weight is module.first.weight
        x = torch.from_numpy(fed.data.x_test)
        torch.testing.assert_close(module(x), run.model.outputs(x), rtol=1e-5, atol=1e-5)
        plain = (2 * x + 1) @ run.state.w["first/weight"].T
        torch.testing.assert_close(plain, run.model.outputs(x), rtol=1e-4, atol=1e-4)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(64, 10)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.net(x)


def test_buffers_that_change_are_refused_and_put_back(fed):
    net = Counts()
    with pytest.raises(fd.ModelError, match="changes its buffers"):
        fd.run(fd.FedAvg(net), fed, 1)
    assert net.calls == 0
