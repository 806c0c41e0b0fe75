"""BatchNorm by policy: against PyTorch's own layers, with padding and rows that are alone."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import foedus as fd
from foedus import kernels, wire
from foedus.base import random
from foedus.models.norms import groups_of


@pytest.fixture(autouse=True, params=[True, False], ids=["compiled", "in Python"])
def loops(request, monkeypatch):
    """Everything here holds with compiled loops, and without."""
    if request.param and not kernels.ready:
        pytest.skip("foedus was installed without a compiler, or FOEDUS_COMPILED=0")
    monkeypatch.setattr(kernels, "ready", request.param)


def dense() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(64, 12), nn.BatchNorm1d(12, momentum=0.3), nn.ReLU(), nn.Linear(12, 10)
        )
    net[1].running_mean.fill_(0.2), net[1].running_var.fill_(1.7)
    return net


def unchained() -> nn.Module:
    """The same, with layers that compiled training does not know: clients are batched by vmap."""
    net = dense()
    return nn.Sequential(*net[:3], nn.Unflatten(1, (3, 4)), nn.Flatten(), net[3])


def images() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Flatten(), nn.Linear(144, 10),
        )  # fmt: skip


def by_pytorch(net: nn.Module, x, y, batch_size: int, key, lr: float, **terms) -> dict:
    """One epoch of one client, in PyTorch alone and in double precision (PyTorch's own layer loses
    digits in single); a last mini-batch of one row uses the running statistics."""
    own, x = copy.deepcopy(net).double().train(), x.double()
    order = random.permutation(key, len(x)) if len(x) > batch_size else torch.arange(len(x))
    for part in order.split(batch_size):
        own.train(len(part) > 1 or isinstance(own[2], nn.BatchNorm2d))
        value = F.cross_entropy(own(x[part]), y[part])
        leaves = [*own.parameters()]
        for p, g in zip(leaves, torch.autograd.grad(value, leaves), strict=True):
            p.data.sub_(g, alpha=lr)
    found = {k.replace(".", "/"): v for k, v in own.state_dict().items() if "tracked" not in k}
    return {k: v.float() for k, v in found.items()}


@pytest.mark.parametrize("make", [dense, unchained, images])
@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("batch_size", [7, 64])
def test_averaged_statistics_are_those_of_pytorch(fed, make, batch, batch_size):
    """Two rounds with half of the clients, which are unequal: mini-batches are padded, and some
    have a single row."""
    assert any(n % 7 == 1 for n in fed.sizes), "a mini-batch of one row"
    net = make()
    algorithm = fd.FedAvg(fd.Module(net, norm="average"), lr=0.1, batch_size=batch_size)
    run = fd.run(algorithm, fed, 1, engine=fd.Local(batch=batch), seed=3)
    x, y = torch.from_numpy(fed.data.x_train), torch.from_numpy(fed.data.y_train)
    want: dict = {}
    for i in range(len(fed)):
        rows = fed.rows[fed.offsets[i] : fed.offsets[i + 1]]
        key = random.fold(random.key(3), 1, 0, int(fed.ids[i]))
        new = by_pytorch(net, x[rows], y[rows], batch_size, key, 0.1)
        share = len(rows) / len(fed.rows)
        want = {k: want.get(k, 0) + share * v for k, v in new.items()}
    assert set(run.state.w) == set(want)
    for k, v in want.items():
        torch.testing.assert_close(run.state.w[k], v, rtol=1e-3, atol=1e-5)
    numbers = sum(v.numel() for v in want.values())
    assert run.records.last("bytes_up") > 4 * numbers * len(fed), "statistics are counted"
    # evaluation and export use them
    module = run.model.to_torch()
    assert not module.training
    place = 2 if make is images else 1
    assert torch.equal(module[place].running_mean, run.state.w[f"{place}/running_mean"])
    test = torch.from_numpy(fed.data.x_test)
    torch.testing.assert_close(module(test), run.model.outputs(test), rtol=1e-4, atol=1e-5)
    assert torch.equal(net[place].running_mean, make()[place].running_mean)


def test_one_row_alone_uses_and_leaves_the_running_statistics():
    net = dense()
    x, y = random.normal(random.key(0), (1, 64)), torch.tensor([3])
    data = fd.Data.from_arrays(x.numpy(), y.numpy(), x.numpy(), y.numpy(), classes=10)
    fed = fd.split(data, "iid", clients=1, seed=0)
    run = fd.run(fd.FedAvg(fd.Module(net, norm="average"), lr=0.1), fed, 1)
    assert torch.equal(run.state.w["1/running_mean"], torch.full((12,), 0.2))
    assert torch.equal(run.state.w["1/running_var"], torch.full((12,), 1.7))
    own = copy.deepcopy(net).eval()
    F.cross_entropy(own(x), y).backward()
    torch.testing.assert_close(run.state.w["3/bias"], net[3].bias - 0.1 * own[3].bias.grad)


@pytest.mark.parametrize("batch", [True, False])
def test_frozen_statistics_stay_and_are_not_sent(fed, batch):
    """One step on all rows of one client, as of a module in evaluation mode."""
    net = dense()
    one = fd.split(fed.data, "iid", clients=1, seed=0)
    algorithm = fd.FedAvg(fd.Module(net, norm="frozen"), lr=0.1, batch_size=None)
    run = fd.run(algorithm, one, 1, engine=fd.Local(batch=batch))
    assert not any("running" in k for k in run.state.w)
    own = copy.deepcopy(net).eval()
    F.cross_entropy(
        own(torch.from_numpy(fed.data.x_train)), torch.from_numpy(fed.data.y_train)
    ).backward()
    for k, p in own.named_parameters():
        torch.testing.assert_close(run.state.w[k.replace(".", "/")], p.data - 0.1 * p.grad)
    assert torch.equal(run.model.to_torch()[1].running_mean, net[1].running_mean)


@pytest.mark.parametrize(
    ("channels", "groups"), [(4, 1), (12, 1), (31, 1), (32, 2), (64, 4), (100, 5), (48, 3)]
)
def test_groups_have_at_least_sixteen_channels(channels, groups):
    assert groups_of(channels) == groups


def test_group_norm_takes_the_place_of_batch_norm(fed):
    net = dense()
    run = fd.run(fd.FedAvg(fd.Module(net, norm="group"), lr=0.1), fed, 2)
    twin = copy.deepcopy(net)
    twin[1] = nn.GroupNorm(1, 12)
    plain = fd.run(fd.FedAvg(twin, lr=0.1), fed, 2)
    for k, v in plain.state.w.items():
        assert torch.equal(run.state.w[k], v)
    assert isinstance(run.model.to_torch()[1], nn.GroupNorm)
    assert isinstance(net[1], nn.BatchNorm1d), "the module passed in must not change"


def last(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 10), layer)


@pytest.mark.parametrize(
    ("net", "norm", "message"),
    [
        (dense(), None, r"layer '1' \(BatchNorm1d\) mixes the rows .* norm=\"average\".*\"group\""),
        (last(nn.BatchNorm1d(10, momentum=None)), "average", "momentum=None"),
        (last(nn.BatchNorm1d(10, track_running_stats=False)), "average", "no running statistics"),
        (last(nn.InstanceNorm1d(10, track_running_stats=True)), "average", "keeps running stat"),
    ],
)  # fmt: skip
def test_layers_without_a_policy_are_refused(fed, net, norm, message):
    with pytest.raises(fd.ModelError, match=message):
        fd.run(fd.FedAvg(fd.Module(net, norm=norm)), fed, 1)


def test_a_policy_that_is_not_there():
    with pytest.raises(fd.ModelError, match="norm 'averaged' is unknown; did you mean 'average'"):
        fd.Module(dense(), norm="averaged")


STATISTICS = {"1/running_mean", "1/running_var"}
KEPT = {"local": STATISTICS | {"1/weight", "1/bias"}, "silo": STATISTICS}


@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("norm", ["local", "silo"])
def test_layers_that_stay_at_their_client(fed, norm, batch):
    """Two rounds of FedBN and SiloBN in PyTorch: each client goes on from its own layer, the rest
    is averaged by rows; the own model is the one after local training."""
    net = dense()
    algorithm = fd.FedAvg(fd.Module(net, norm=norm), lr=0.1, batch_size=7, server_lr=0.8)
    run = fd.run(algorithm, fed, 2, engine=fd.Local(batch=batch), seed=3)
    x, y = torch.from_numpy(fed.data.x_train), torch.from_numpy(fed.data.y_train)
    clients = [copy.deepcopy(net) for _ in fed.ids]
    w = {k.replace(".", "/"): v for k, v in net.state_dict().items() if "tracked" not in k}
    w = {k: v for k, v in w.items() if k not in KEPT[norm]}
    for round in (1, 2):
        mean = {k: torch.zeros_like(v) for k, v in w.items()}
        for i, own in enumerate(clients):
            own.load_state_dict({k.replace("/", "."): v for k, v in w.items()}, strict=False)
            rows = fed.rows[fed.offsets[i] : fed.offsets[i + 1]]
            key = random.fold(random.key(3), round, 0, int(fed.ids[i]))
            new = by_pytorch(own, x[rows], y[rows], 7, key, 0.1)
            own.load_state_dict({k.replace("/", "."): v for k, v in new.items()}, strict=False)
            for k, v in w.items():
                mean[k] += len(rows) / len(fed.rows) * (new[k] - v)
        w = {k: v + 0.8 * mean[k] for k, v in w.items()}
    assert set(run.state.w) == set(w)
    for k, v in w.items():
        torch.testing.assert_close(run.state.w[k], v, rtol=1e-3, atol=1e-5)
    assert run.records.last("bytes_up") == 2 * len(fed) * wire.nbytes(w), "and nothing else is sent"
    test = torch.from_numpy(fed.data.x_test)
    for i, own in zip(fed.ids.tolist(), clients, strict=True):
        found = run.model_of(i)
        torch.testing.assert_close(found.outputs(test), own.eval()(test), rtol=1e-2, atol=1e-3)
        assert torch.equal(
            found.to_torch()[1].running_mean, run.client_states().get(i)["w"]["1/running_mean"]
        )
    hits = 0
    for i, own in enumerate(clients):
        rows = fed.test_rows[fed.test_offsets[i] : fed.test_offsets[i + 1]]
        hits += int((own(test[rows]).argmax(1).numpy() == fed.data.y_test[rows]).sum())
    assert run.records.last("own_accuracy") == pytest.approx(hits / len(fed.test_rows))
    with pytest.raises(fd.FoedusError, match=r"FedAvg has no global model; run\.model_of"):
        _ = run.model


@pytest.mark.parametrize(
    "algorithm",
    [
        lambda m: fd.FedProx(m, lr=0.1, mu=0.5),
        lambda m: fd.FedAdam(m, lr=0.1),
        lambda m: fd.FedNova(m, lr=0.1),
        lambda m: fd.FineTuned(m, lr=0.1, own_lr=0.05),
        lambda m: fd.FedPer(m, lr=0.1, shared="0.* 1.*"),
        lambda m: fd.FedRep(m, lr=0.1, shared="0.* 1.*"),
    ],
)
def test_algorithms_with_layers_that_stay(fed, algorithm):
    """Half of the clients take part; what a client keeps is its own, and is never sent."""
    made = algorithm(fd.Module(dense(), norm="local"))
    looped, batched = (
        fd.run(made, fed, 3, participation=0.6, engine=fd.Local(batch=batch))
        for batch in (False, True)
    )
    assert not set(looped.state.w) & KEPT["local"]
    states = [run.client_states() for run in (looped, batched)]
    known = [i for i in range(len(fed)) if states[0].get(i) is not None]
    for i in known:
        for k in KEPT["local"]:
            a, b = (s.get(i)["w"][k] for s in states)
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    means = torch.stack([states[0].get(i)["w"]["1/running_mean"] for i in known])
    assert float(means.std(0).max()) > 1e-3, "clients have statistics of their own"


def test_layers_that_stay_are_nothing_special_where_nothing_is_sent(fed):
    for kind in (fd.Independent, fd.Central):
        local, average = (
            fd.run(kind(fd.Module(dense(), norm=norm), lr=0.1), fed, 2)
            for norm in ("local", "average")
        )
        assert local.records.last("accuracy") == average.records.last("accuracy")


@pytest.mark.parametrize("kind", [fd.Scaffold, fd.FedDyn, fd.Ditto, fd.FedDR])
def test_algorithms_that_keep_no_layers_say_so(fed, kind):
    with pytest.raises(fd.ModelError, match=f"{kind.__name__} has no place for layers that stay"):
        fd.run(kind(fd.Module(dense(), norm="silo")), fed, 1)


@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize(
    "algorithm",
    [
        lambda m: fd.FedAvg(m, lr=0.1, server_lr=0.4, server_momentum=0.6),
        lambda m: fd.FedProx(m, lr=0.1, mu=2.0, weight_decay=0.1),
        lambda m: fd.Scaffold(m, lr=0.1, server_lr=0.4),
        lambda m: fd.Scaffold(m, lr=0.1, option=1, weight_decay=0.1),
        lambda m: fd.FedDyn(m, lr=0.1, alpha=0.5),
        lambda m: fd.FedAvg(m, lr=0.01, optimizer="adam"),
    ],
)
def test_no_server_step_and_no_penalty_moves_statistics(fed, algorithm, batch):
    """A first layer that nothing moves: its outputs, and so the averaged statistics, are those of
    plain averaging, whatever the algorithm does to weights."""
    net = dense()
    net[0].requires_grad_(False)
    weights = "uniform" if isinstance(algorithm(net), fd.Scaffold | fd.FedDyn) else "rows"
    how = {"lr": 0.1, "weights": weights}
    module, engine = fd.Module(net, norm="average"), fd.Local(batch=batch)
    plain = fd.run(fd.FedAvg(module, **how), fed, 3, participation=0.6, engine=engine).state.w
    found = fd.run(algorithm(module), fed, 3, participation=0.6, engine=engine).state.w
    for k in ("1/running_mean", "1/running_var"):
        torch.testing.assert_close(found[k], plain[k], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found["3/weight"], plain["3/weight"], rtol=1e-3)


def test_algorithms_that_do_not_average_statistics_say_so(fed):
    for kind in (fd.FedDR, fd.ProjectedFedAvg, fd.FedFW):
        with pytest.raises(fd.ModelError, match=f"{kind.__name__} does not average"):
            fd.run(kind(fd.Module(dense(), norm="average")), fed, 1)
        fd.run(kind(fd.Module(dense(), norm="group"), begin="projected") if kind is fd.FedFW
               else kind(fd.Module(dense(), norm="group"), lr=0.01), fed, 1)  # fmt: skip


def test_each_client_alone_keeps_its_statistics(fed):
    runs = [
        fd.run(fd.Independent(fd.Module(dense(), norm="average"), lr=0.1), fed, 2,
               engine=fd.Local(batch=batch))
        for batch in (True, False)
    ]  # fmt: skip
    assert runs[0].records.last("own_accuracy") == pytest.approx(
        runs[1].records.last("own_accuracy")
    )
    assert runs[0].records.last("bytes_up") == 0


def test_checkpoints_and_saved_runs_hold_statistics(fed, tmp_path):
    algorithm = fd.FedAvg(fd.Module(dense(), norm="average"), lr=0.1)
    whole = fd.run(algorithm, fed, 4)
    file = tmp_path / "half.ckpt"
    fd.run(algorithm, fed, 2, checkpoint=file)
    again = fd.run(algorithm, fed, 4, checkpoint=file, resume=True)
    assert torch.equal(again.state.w["1/running_var"], whole.state.w["1/running_var"])
    whole.save(tmp_path / "run.foedus")
    loaded = fd.Run.load(tmp_path / "run.foedus", algorithm=algorithm)
    x = fed.data.x_test
    assert torch.equal(loaded.model.outputs(x), whole.model.outputs(x))
    other = fd.FedAvg(fd.Module(dense(), norm="frozen"), lr=0.1)
    with pytest.raises(fd.FoedusError, match="norm"):
        fd.Run.load(tmp_path / "run.foedus", algorithm=other)


class Steps(nn.Module):
    """BatchNorm over all steps of a sequence, as rows of their own."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(8), nn.Linear(64, 10)

    def forward(self, x):
        return self.out(self.norm(x.reshape(-1, 8)).view(-1, 64))


def test_padding_is_left_out_where_a_row_becomes_several(fed):
    algorithm = fd.FedAvg(fd.Module(Steps(), norm="average"), lr=0.1, batch_size=7)
    one, other = (
        fd.run(algorithm, fed, 2, engine=fd.Local(batch=b)).state.w for b in (True, False)
    )
    for k, v in one.items():
        torch.testing.assert_close(v, other[k], rtol=1e-4, atol=1e-6)
