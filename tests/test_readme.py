"""The README's example runs and prints what the README says."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/diagnose.md",
        "docs/fednewton.md",
        "docs/fedfw.md",
        "docs/fedboost.md",
        "docs/fedres.md",
        "docs/ffgb.md",
        "docs/trackers.md",
    ],
)
def test_the_example_prints_what_it_says(page, tmp_path, monkeypatch, capsys):
    if page == "docs/trackers.md":
        pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'foedus[tensorboard]'")
    example, shown = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", (ROOT / page).read_text(), re.S).groups()
    monkeypatch.chdir(tmp_path)
    exec(compile(example, page, "exec"), {})
    printed = capsys.readouterr().out
    number = r"-?\d+\.?\d*(?:e[+-]?\d+)?"
    assert re.sub(number, "#", printed).split() == re.sub(number, "#", shown).split()
    got, want = (np.array([float(v) for v in re.findall(number, text)]) for text in (printed, shown))
    # Another processor may round otherwise, and a row or two change sides.
    np.testing.assert_allclose(got, want, rtol=0.01)


def test_the_contributing_example_works(fed):
    import torch

    import foedus as fd

    code = re.search(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S).group(1)
    scope = {"fd": fd, "torch": torch}
    exec("from dataclasses import dataclass\n" + code, scope)
    share = fd.run(scope["LabelCounts"](), fed, 1, evaluate_every=0).state.share
    expected = np.bincount(fed.data.y_train, minlength=10) / len(fed.data.y_train)
    assert share.numpy() == pytest.approx(expected, abs=1e-6)
