"""FedRes beside the real Vowpal Wabbit, row by row, where the package is installed."""

from __future__ import annotations

import numpy as np
import pytest

import foedus as fd

vw = pytest.importorskip(
    "vowpalwabbit", reason="compares with Vowpal Wabbit: pip install vowpalwabbit"
)


def told(workspace, x, y=""):
    """The prediction of a row of numbers; learns from it if there is a label."""
    row = f"{y} | " + " ".join(f"f{i}:{v:.9g}" for i, v in enumerate(x))
    return workspace.predict(row) if y == "" else workspace.learn(row)


@pytest.mark.parametrize(("step", "spread"), [(0.5, 1.0), (2.0, 1.0), (0.5, 0.3)])
def test_clipped_adagrad_is_vw_adaptive(step, spread):
    """Every prediction, clipped as VW does: to the interval of 0 and the labels before it.

    Both are in single precision; inputs of size 1 keep sums of 300 updates within 1e-4.
    """
    rng = np.random.default_rng(3)
    x = rng.normal(size=(300, 4)).astype(np.float32) * spread
    y = np.sign(x @ rng.normal(size=4) + 0.3 * rng.normal(size=300)).astype(np.float32)
    algorithm = fd.FedRes(global_model=None, step=step, clip_predictions=True)
    site = fd.Site(algorithm, fd.Spec((4,), None, 1))
    workspace = vw.Workspace(f"--adaptive -l {step} --power_t 0.5 --quiet")
    gaps, low, high = [], 0.0, 0.0
    for row, label in zip(x, y, strict=True):
        gaps.append(np.clip(site.predict(row), low, high) - told(workspace, row))
        low, high = min(low, label), max(high, label)
        site.learn(row, float(label))
        told(workspace, row, f"{label:g}")
    workspace.finish()
    assert np.abs(gaps).max() < 1e-4
