"""Where tensors lie: runs on a device that is not there (`tests.other_device`), which computes with
the CPU's numbers and refuses, like a GPU, tensors of two devices in one operation.

The numbers of a run on it must be those on the CPU: what is trained is on the device, and comes
back. This does not show that a GPU's kernels exist for each operation, nor how they round;
`make gpu-test` runs the same list on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foedus as fd
from foedus import kernels
from foedus.base import tree
from tests.gpu.cases import RUNS, WEIGHTS, Dense, seeded, trains_there
from tests.other_device import There, other_device


def close(a: fd.Run, b: fd.Run) -> None:
    """Two runs with one state and one history; the second one's is on the CPU."""
    pairs = list(zip(tree.leaves(a.state), tree.leaves(b.state), strict=True))
    for x, y in pairs:
        if isinstance(x, torch.Tensor):
            assert type(y) is type(x) and y.device.type == "cpu"
            torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-6)
    assert list(a.history) == list(b.history)
    for name in set(a.history) - {"seconds"}:
        assert b.history[name].tolist() == pytest.approx(
            a.history[name].tolist(), rel=1e-5, abs=1e-6, nan_ok=True
        )


# -- the device itself -----------------------------------------------------------------------------


def test_the_device_refuses_what_a_gpu_refuses():
    with other_device():
        there, here = torch.ones(3, device="meta"), torch.ones(3)
        assert isinstance(there, There) and there.device.type == "meta"
        assert (there + torch.tensor(2.0)).to("cpu").tolist() == [3.0] * 3  # a number may be mixed
        for mix in (
            lambda: there + here,
            lambda: here.add_(there),
            lambda: torch.zeros(3, 3) @ there,
            lambda: there[torch.tensor([0])],
            lambda: here[there.long()],
            lambda: torch.func.vmap(lambda a, b: a * b)(there, here),
        ):
            with pytest.raises(RuntimeError, match="same device"):
                mix()
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        with pytest.raises(TypeError, match="float64"):
            there.double()
        assert torch.tensor([1.0, 2.0], device="meta").sum().item() == 3.0
        square = torch.func.grad(lambda v: (v**2).sum())(there * 3)
        assert square.device.type == "meta" and square.tolist() == [6.0] * 3


# -- runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [n for n, a in RUNS.items() if not getattr(a, "precision", None)],  # autocast knows no "meta"
)
def test_runs_are_those_of_the_cpu(name, fed, monkeypatch):
    """Three rounds with some of the clients; in PyTorch, as compiled loops round otherwise."""
    monkeypatch.setattr(kernels, "ready", False)
    algorithm = RUNS[name]
    whole = any(part in name for part in ("FedRes", "Fictitious", "FFGBLip"))
    options = {"seed": 3, "participation": 1.0 if whole or algorithm.pooled else 0.6}
    options["metrics"] = ["log_loss"]
    here = fd.run(algorithm, fed, 3, **options)
    with other_device() as device:
        there = fd.run(algorithm, fed, 3, engine=fd.Local(device="meta"), **options)
    close(here, there)
    assert (device.products > 0) == trains_there(name)


@pytest.mark.parametrize("name", ["own, average", "own, local", "own images, silo", "own, FFGB"])
def test_one_client_after_the_other(name, fed):
    here = fd.run(RUNS[name], fed, 2, engine=fd.Local(batch=False), per_client=True)
    with other_device() as device:
        engine = fd.Local(batch=False, device="meta")
        there = fd.run(RUNS[name], fed, 2, engine=engine, per_client=True)
    close(here, there)
    assert device.products > 0


@pytest.mark.parametrize("name", ["own, average", "Scaffold", "FFGB, networks", "FedFW, one entry"])
def test_delays_and_secure_sums(name, fed, monkeypatch):
    monkeypatch.setattr(kernels, "ready", False)
    for options in (
        {"engine": {"up": 1, "down": [0, 1, 0, 2, 0]}},
        {"aggregation": fd.SecureAggregation(range=64.0, bits=32)},
    ):
        if name == "FFGB, networks" and "aggregation" in options:
            continue  # gathers, which secure aggregation refuses
        delays = options.pop("engine", None)
        wrap = (lambda e, d=delays: fd.Delayed(e, **d)) if delays else (lambda e: e)
        if "FedFW" in name and not delays:
            continue
        here = fd.run(RUNS[name], fed, 3, engine=wrap(fd.Local()), **options)
        with other_device():
            there = fd.run(RUNS[name], fed, 3, engine=wrap(fd.Local(device="meta")), **options)
        close(here, there)


@pytest.mark.parametrize("name", ["own, local", "FedRep", "FedNova, momentum"])
def test_checkpoints_go_from_one_device_to_the_other(name, fed, tmp_path):
    whole = fd.run(RUNS[name], fed, 4)
    with other_device():
        engine = fd.Local(device="meta")
        fd.run(RUNS[name], fed, 2, engine=engine, checkpoint=tmp_path / "there")
    close(whole, fd.run(RUNS[name], fed, 4, checkpoint=tmp_path / "there", resume=True))
    fd.run(RUNS[name], fed, 2, checkpoint=tmp_path / "here")
    with other_device():
        path = tmp_path / "here"
        close(whole, fd.run(RUNS[name], fed, 4, engine=engine, checkpoint=path, resume=True))


# -- what users give -------------------------------------------------------------------------------


def test_the_module_and_the_loss_of_the_user_stay_where_they_are(fed):
    module, loss = Dense(), nn.CrossEntropyLoss(weight=WEIGHTS.clone(), reduction="none")
    own, before = loss.weight, {k: v.clone() for k, v in module.state_dict().items()}
    algorithm = fd.FedAvg(fd.Module(module, norm="average"), lr=0.1, loss=loss)
    with other_device():
        fd.run(algorithm, fed, 1, engine=fd.Local(device="meta"))
    assert loss.weight is own
    for name, v in module.state_dict().items():
        assert type(v) is torch.Tensor and torch.equal(v, before[name])


def test_a_module_that_lies_on_the_device_starts_from_its_values(fed):
    """As `net.cuda()` does; what is sent and evaluated is on the CPU."""
    net = seeded(Dense())
    here = fd.run(fd.FedAvg(fd.Module(net, norm="average"), lr=0.1), fed, 2)
    with other_device():
        moved = seeded(Dense()).to("meta")
        assert all(v.device.type == "meta" for v in moved.state_dict().values())
        for engine in (fd.Local(device="meta"), fd.Local()):
            algorithm = fd.FedAvg(fd.Module(moved, norm="average"), lr=0.1)
            close(here, fd.run(algorithm, fed, 2, engine=engine))


class Makes(nn.Module):
    """Makes a tensor where its rows are not."""

    def __init__(self):
        super().__init__()
        self.layer, self.plain = nn.Linear(64, 10), torch.ones(64)

    def forward(self, x):
        return self.layer(x * self.plain)


@pytest.mark.parametrize("batch", [True, False])
def test_tensors_that_cannot_be_moved_say_what_to_do(fed, batch):
    engine = {"batch": batch, "device": "meta"}
    with other_device():
        with pytest.raises(fd.ModelError, match=r"Makes uses tensors on another device .*device=x"):
            fd.run(fd.FedAvg(Makes(), lr=0.1), fed, 1, engine=fd.Local(**engine))

        def weighted(outputs, y):
            return nn.functional.cross_entropy(outputs, y, WEIGHTS, reduction="none")

        with pytest.raises(fd.ConfigError, match=r"loss=.*weighted.*write weights.to\(outputs"):
            fd.run(fd.FedAvg(lr=0.1, loss=weighted), fed, 1, engine=fd.Local(**engine))


# -- devices that are not there --------------------------------------------------------------------


def test_a_device_without_numbers_is_refused():
    with pytest.raises(fd.ConfigError, match=r"device='meta' cannot be used here .* use device="):
        fd.Local(device="meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_gpu_names_the_devices_there_are():
    with pytest.raises(fd.ConfigError, match=r"device='cuda' cannot .* use device='cpu'"):
        fd.Local(device=torch.device("cuda"))
