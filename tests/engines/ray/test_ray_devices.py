"""Ray workers with a device: on one that is simulated (`tests.other_device`) with the workers in
this process, GPUs that Ray hands out, and what is said where there is no such device.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foedus as fd
from tests.engines.test_devices import close
from tests.gpu.cases import RUNS, trains_there
from tests.other_device import other_device

pytest.importorskip("ray")

from tests.engines.ray.here import HereRay
from tests.engines.ray.test_cluster import install


@pytest.fixture
def here(monkeypatch) -> HereRay:
    return install(HereRay(), monkeypatch)


NAMES = (
    "FedAvg, Adam, clipping", "own, average", "own, local", "own, attention", "own, Ditto",
    "loss, a module with weights, own", "FedRep", "FFGB, networks", "FedFW, one entry",
    "FFGBDistill", "FedNewton, cg", "FedBoost, cache",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_workers_train_on_their_device(name, fed, here):
    """States, replies and scores come back on the CPU, where the server's own arithmetic is."""
    options = {"participation": 0.6, "seed": 3, "metrics": ["log_loss"]}
    local = fd.run(RUNS[name], fed, 3, **options)
    with other_device() as device:
        engine = fd.Ray(workers=2, device="meta")
        close(local, fd.run(RUNS[name], fed, 3, engine=engine, **options))
    assert (device.products > 0) == trains_there(name)


def test_a_lost_worker_is_replaced_by_one_with_the_device(fed, here):
    run = lambda: fd.run(RUNS["FedRep"], fed, 3, engine=fd.Ray(workers=2, device="meta"))  # noqa: E731
    with other_device():
        whole, lost = run(), []

        def disturb(actor, method, number):
            if method == "reduce" and not lost and actor is here.actors[-1]:
                lost.append(actor)
                here.kill(actor)

        here.disturb = disturb
        close(whole, run())
    assert lost


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_a_worker_has_a_gpu_of_its_own_unless_they_share(device, here):
    here.resources["GPU"] = 2.0
    cluster = fd.Ray(device=device)._cluster()
    # four CPUs, but two GPUs: two workers
    assert cluster.workers == 2 and cluster.resources == {"CPU": 1, "GPU": 1}
    cluster = fd.Ray(workers=4, device=device, resources={"GPU": 0.5})._cluster()
    assert cluster.workers == 4
    cluster.hire(1)
    assert here.asked_for[-1]["num_gpus"] == 0.5
    assert fd.Ray(device="mps")._cluster().resources == {"CPU": 1}  # Ray does not know those


def test_there_are_too_few_gpus(here):
    with pytest.raises(fd.ConfigError) as info:
        fd.Ray(workers=2, device="cuda")._cluster()
    assert str(info.value) == (
        "workers=2 with resources={'CPU': 1, 'GPU': 1} each: the Ray cluster has room for 0; its "
        "nodes have CPU 4; there is no GPU: use device='cpu'"
    )
    here.resources["GPU"] = 1.0
    with pytest.raises(fd.ConfigError, match=r"CPU 4, GPU 1; ask for .* resources={'GPU': 0.5}"):
        fd.Ray(workers=2, device="cuda")._cluster()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_worker_says_that_it_has_no_such_device(fed, here):
    """The driver needs none, so the worker is asked; Ray's count of GPUs may be wrong."""
    here.resources["GPU"] = 2.0
    with pytest.raises(fd.ConfigError, match=r"a Ray worker on .*: device='cuda' cannot be used"):
        fd.run(fd.FedAvg(), fed, 1, engine=fd.Ray(workers=2, device=torch.device("cuda")))
    assert here.alive == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cudo"}, "device='cudo' is not a device of PyTorch"),
        ({"device": "cuda:1"}, "device='cuda:1': Ray says which GPU .* use device='cuda'"),
        ({"resources": {"GPU": 1.5}}, r"resources\['GPU'\]=1.5 must be a part of a GPU"),
        ({"device": 3}, "device=3"),
        ({"batch": "never"}, "batch='never'"),
        ({"memory": 0}, "memory=0"),
    ],
    ids=str,
)
def test_settings(settings, message):
    with pytest.raises(fd.ConfigError, match=message):
        fd.Ray(**settings)


class Branches(nn.Module):
    """Looks at values of its rows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        return self.layer(x if x.sum() > 0 else -x)


def test_workers_take_one_client_after_the_other(fed, here):
    algorithm = fd.FedAvg(Branches(), lr=0.1)
    with pytest.raises(fd.ModelError, match=r"Branches cannot be batched .*fd.Ray\(batch=False\)"):
        fd.run(algorithm, fed, 1, engine=fd.Ray(workers=2))
    local = fd.run(algorithm, fed, 2, engine=fd.Local(batch=False))
    close(local, fd.run(algorithm, fed, 2, engine=fd.Ray(workers=2, batch=False)))
