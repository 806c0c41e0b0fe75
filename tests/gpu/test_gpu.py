"""Runs on a GPU beside the same runs on the CPU: `make gpu-test`, or `make gpu-test DEVICE=mps`.

A GPU adds numbers up in another order, so runs agree up to rounding: after three rounds, every
array of the server's state within TOLERANCE of its largest number, and the losses of the history
within TOLERANCE. `tests/engines/test_devices.py` runs the same list on a device that is simulated.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import pytest
import torch

import foedus as fd
from foedus.base import tree
from tests.gpu.cases import RUNS, Dense, seeded, trains_there

DEVICE = os.environ.get("FOEDUS_TEST_DEVICE", "cuda")
TOLERANCE = 2e-3
HALF_TOLERANCE = 0.05
"""With numbers of 8 or 11 bits."""


def _missing() -> str:
    try:
        torch.zeros(1, device=DEVICE).cpu()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        return f"no device {DEVICE!r} here: {str(error).splitlines()[0]}"
    return ""


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_missing()), reason=_missing())]


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """Convolutions in float32: cuDNN would use 10 bits."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, against the largest number (of arrays of zeros: 1e-3)."""
    return float((a.double() - b.double()).abs().max() / a.double().abs().max().clamp(min=1e-3))


def compare(here: fd.Run, there: fd.Run, tolerance: float = TOLERANCE) -> None:
    for a, b in zip(tree.leaves(here.state), tree.leaves(there.state), strict=True):
        if isinstance(a, torch.Tensor) and a.numel():
            assert b.device.type == "cpu" and a.dtype == b.dtype and a.shape == b.shape
            assert apart(a, b) <= tolerance
    for name in ("loss", "own_loss"):
        if name in here.history:
            want = pytest.approx(here.history[name].tolist(), rel=tolerance, nan_ok=True)
            assert there.history[name].tolist() == want


@pytest.mark.parametrize("name", RUNS)
def test_every_family_and_module(name, fed):
    algorithm = RUNS[name]
    part = algorithm.pooled or any(k in name for k in ("FedRes", "Fictitious"))
    options = {"seed": 3, "participation": 1.0 if part else 0.6}
    here = fd.run(algorithm, fed, 3, **options)
    there = fd.run(algorithm, fed, 3, engine=fd.Local(device=DEVICE), **options)
    compare(here, there, HALF_TOLERANCE if "bfloat16" in name else TOLERANCE)


@pytest.mark.parametrize("name", [n for n in RUNS if n.startswith("own") and trains_there(n)])
def test_one_client_after_the_other(name, fed):
    here = fd.run(RUNS[name], fed, 2, engine=fd.Local(batch=False))
    compare(here, fd.run(RUNS[name], fed, 2, engine=fd.Local(batch=False, device=DEVICE)))


@pytest.mark.parametrize("name", ["own, average", "own, attention", "FedAvg, Adam, clipping"])
def test_the_same_run_twice_is_the_same(name, fed):
    """Up to rounding: some of a GPU's sums have no fixed order."""
    runs = [fd.run(RUNS[name], fed, 3, engine=fd.Local(device=DEVICE)) for _ in range(2)]
    compare(*runs, tolerance=1e-4)


@pytest.mark.parametrize("name", ["own, average", "own, attention"])
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_mixed_precision(name, precision, fed):
    if precision == "float16" and DEVICE == "cpu":
        pytest.skip("float16 needs a GPU")
    here = fd.run(RUNS[name], fed, 3)
    half = dataclasses.replace(RUNS[name], precision=precision)
    there = fd.run(half, fed, 3, engine=fd.Local(device=DEVICE))
    assert all(v.dtype == torch.float32 for v in there.state.w.values())
    assert there.records.last("loss") == pytest.approx(
        here.records.last("loss"), rel=HALF_TOLERANCE
    )


def test_the_module_of_the_user_stays_on_the_cpu(fed):
    """To a GPU PyTorch moves a module in place, to the simulated device it does not."""
    net = Dense()
    before = {k: (v.data_ptr(), v.clone()) for k, v in net.state_dict().items()}
    algorithm = fd.FedAvg(fd.Module(net, norm="average"), lr=0.1)
    fd.run(algorithm, fed, 1, engine=fd.Local(device=DEVICE))
    for name, v in net.state_dict().items():
        where, value = before[name]
        assert v.device.type == "cpu" and v.data_ptr() == where and torch.equal(v, value)


def test_a_module_on_the_device_starts_from_its_values(fed):
    here = fd.run(RUNS["own, average"], fed, 2)
    algorithm = fd.FedAvg(fd.Module(seeded(Dense()).to(DEVICE), norm="average"), lr=0.05,
                          batch_size=16)  # fmt: skip
    compare(here, fd.run(algorithm, fed, 2, engine=fd.Local(device=DEVICE)))
    compare(here, fd.run(algorithm, fed, 2))


def test_checkpoints_go_from_the_device_to_the_cpu(fed, tmp_path):
    whole = fd.run(RUNS["own, local"], fed, 4)
    path = tmp_path / "run"
    fd.run(RUNS["own, local"], fed, 2, engine=fd.Local(device=DEVICE), checkpoint=path)
    compare(whole, fd.run(RUNS["own, local"], fed, 4, checkpoint=path, resume=True))


@pytest.mark.parametrize("name", ["own, average", "FedRep", "FFGB, networks"])
def test_workers_of_ray_share_a_gpu(name, fed):
    pytest.importorskip("ray")
    here = fd.run(RUNS[name], fed, 3)
    half = None if DEVICE == "cpu" else {"GPU": 0.5}
    if DEVICE.startswith("mps"):
        pytest.skip("Ray does not hand out mps")
    with fd.Ray(workers=2, device=DEVICE.split(":")[0], resources=half) as engine:
        compare(here, fd.run(RUNS[name], fed, 3, engine=engine))
