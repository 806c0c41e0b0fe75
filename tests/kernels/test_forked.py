"""Compiled loops in a process that was forked."""

from __future__ import annotations

import subprocess
import sys

import pytest

from foedus import kernels

FORKED = """
import faulthandler, os, sys
import numpy as np
import torch
from foedus import kernels
torch.set_num_threads(2)
keys = np.arange(400).reshape(200, 2)
here = kernels.order(keys, 700, None)
torch.randn(1000, 1000).exp()  # PyTorch's threads are awake
child = os.fork()
if child == 0:
    faulthandler.dump_traceback_later(60, exit=True)
    os._exit(0 if np.array_equal(here, kernels.order(keys, 700, None)) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(
    not kernels.ready, reason="foedus was installed without a compiler, or FOEDUS_COMPILED=0"
)
def test_a_forked_process_does_not_wait_for_threads_that_it_has_not():
    """Nodes of a federation on one machine fork their client processes.

    (PyTorch's own operations do wait, if they are large.)
    """
    assert subprocess.run([sys.executable, "-c", FORKED], timeout=120).returncode == 0
