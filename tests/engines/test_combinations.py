"""Dropout, BatchNorm by each policy, own losses, partial participation, delays and checkpoints, all
at once: a run that is resumed is the run that was not interrupted, to the last bit.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import foedus as fd
from foedus.base import tree
from tests.gpu.cases import LOSSES, Dense, Transformer, seeded

HOW = {"lr": 0.05, "batch_size": 7}
OWN = LOSSES["a module with weights"]


def net(norm: str) -> fd.Module:
    return fd.Module(seeded(Dense()), norm=norm)


RUNS = {
    "average": fd.FedAvg(net("average"), loss=OWN, momentum=0.9, **HOW),
    "average, Scaffold": fd.Scaffold(net("average"), loss=F.cross_entropy, **HOW),
    "average, Ditto": fd.Ditto(net("average"), loss=F.cross_entropy, lam=0.3, **HOW),
    "average, alone": fd.Independent(net("average"), momentum=0.5, **HOW),
    "local": fd.FedAvg(net("local"), loss="focal", **HOW),
    "local, FedPer": fd.FedPer(net("local"), shared="first*", loss=OWN, **HOW),
    "local, FedNova": fd.FedNova(net("local"), **HOW),
    "silo": fd.FedAvg(net("silo"), loss=F.cross_entropy, **HOW),
    "silo, FedRep": fd.FedRep(net("silo"), shared="first*", own_steps=2, **HOW),
    "frozen, FineTuned": fd.FineTuned(net("frozen"), loss=OWN, own_steps=2, **HOW),
    "group, FedPer": fd.FedPer(net("group"), shared="first*", loss=OWN, **HOW),
    "attention, FedAdam": fd.FedAdam(seeded(Transformer()), loss="focal", **HOW),
}
ENGINES = {
    "Local": fd.Local(),
    "looped": fd.Local(batch=False),
    "Delayed": fd.Delayed(fd.Local(), up=[0, 1, 2, 0, 1], down=1),
}


def states(run: fd.Run) -> list[torch.Tensor]:
    """The server's and the clients' numbers."""
    return [t for t in tree.leaves((run.state, run.clients)) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_is_the_whole_one(name, engine, fed, tmp_path):
    options = {"engine": ENGINES[engine], "participation": 0.5, "seed": 2, "metrics": ["auc"]}
    whole = fd.run(RUNS[name], fed, 5, **options)
    path = tmp_path / "run"
    fd.run(RUNS[name], fed, 2, checkpoint=path, **options)
    again = fd.run(RUNS[name], fed, 5, checkpoint=path, resume=True, **options)
    for a, b in zip(states(whole), states(again), strict=True):
        assert torch.equal(a, b)
    assert again.history.drop(columns="seconds").equals(whole.history.drop(columns="seconds"))


@pytest.mark.parametrize("name", RUNS)
def test_batched_is_looped(name, fed):
    """With one-row mini-batches at the end of epochs, which have no variance: 7 does not divide."""
    runs = [
        fd.run(RUNS[name], fed, 3, participation=0.5, engine=fd.Local(batch=batch))
        for batch in (True, False)
    ]
    for a, b in zip(tree.leaves(runs[0].state), tree.leaves(runs[1].state), strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)  # the suite's own limit
    for column in {"loss", "own_loss"} & set(runs[0].history):  # clients' own models, too
        want = pytest.approx(runs[0].history[column].tolist(), rel=1e-4)
        assert runs[1].history[column].tolist() == want
