"""Shared fixtures: small federations on bundled data, and the real sets where they are at hand."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import foedus as fd
from foedus import kernels

# Tests run in two worker processes on two cores.
torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Files go to test processes one by one, but those of Ray together: they share a cluster."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "ray" if "/ray/" in file else file

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def digits() -> fd.Data:
    return fd.load("digits")


@pytest.fixture(scope="session")
def fed(digits) -> fd.Federation:
    """Five clients of unequal size and label mix, a few hundred rows in all."""
    small = fd.Data.from_arrays(
        digits.x_train[:300],
        digits.y_train[:300],
        digits.x_test[:100],
        digits.y_test[:100],
        classes=10,
    )
    return fd.split(small, "dirichlet", clients=5, alpha=0.5, seed=0)


@pytest.fixture(scope="session")
def values() -> fd.Federation:
    """A regression federation."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 4)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 0.5, 0.0]) + 0.1 * rng.normal(size=120)).astype(np.float32)
    return fd.split(fd.Data.from_arrays(x[:90], y[:90], x[90:], y[90:]), "iid", clients=4, seed=0)


@pytest.fixture(scope="session")
def real() -> Path:
    """The folder of real data sets."""
    folder = os.environ.get("FOEDUS_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("FOEDUS_DATA does not point to the folder of real data sets")
    return Path(folder)


@pytest.fixture
def two() -> fd.Federation:
    """Two clients for numbers worked out by hand: A holds the row (1, 2), B holds (2, 1) twice;
    f_A' = w - 2, f_B' = 4w - 2.
    """
    a = (np.array([[1.0]], np.float32), np.array([2.0], np.float32))
    b = (np.array([[2.0], [2.0]], np.float32), np.array([1.0, 1.0], np.float32))
    return fd.Federation.from_clients([a, b])


@pytest.fixture(scope="session")
def ray_engine():
    """Two Ray workers for all tests of a process.

    There is room for more: some tests have workers of their own.
    """
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        # Ray kills its workers: they could not save what coverage had measured
        patch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
        ray.init(
            "local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
        )
    with fd.Ray(workers=2) as engine:
        yield engine
    ray.shutdown()


@pytest.fixture(scope="module", params=[True, False], ids=["compiled", "in Python"])
def compiled_or_not(request):
    """Everything with compiled loops and without."""
    if request.param and not kernels.ready:
        pytest.skip("foedus was installed without a compiler, or FOEDUS_COMPILED=0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "ready", request.param)
        yield
