"""What a user runs into, on every engine: callbacks that stop or raise, Optuna's pruning, runs that
end because of what is measured, losses that become NaN, modules that look at values, metrics that
do not return a number.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import foedus as fd
from foedus.base import tree

AVERAGE = fd.FedAvg(lr=0.1, batch_size=16)
ENGINES = ("Local", "looped", "Delayed", "Ray", "Flower")


@pytest.fixture(params=ENGINES)
def engine(request, monkeypatch, tmp_path) -> Any:
    """Ray and Flower without their processes."""
    if request.param == "Ray":
        pytest.importorskip("ray")
        from tests.engines.ray.here import HereRay
        from tests.engines.ray.test_cluster import install

        install(HereRay(), monkeypatch)
        return fd.Ray(workers=2)
    if request.param == "Flower":
        pytest.importorskip("flwr")
        from tests.engines.flower.grid import Here

        return Here(tmp_path, nodes=5, code="tests.engines.test_walls:OWN")
    looped = fd.Local(batch=False)
    return {"Local": fd.Local(), "looped": looped, "Delayed": fd.Delayed(fd.Local(), up=1)}[
        request.param
    ]


class After(fd.Callback):
    """Does something after two rounds."""

    def __init__(self, what: Callable[[], Any]):
        self.what, self.told = what, []

    def row(self, row):
        self.told.append(row["round"])
        return self.what() if row["round"] == 2 else None


def stop():
    raise fd.Stop("enough")


@pytest.mark.parametrize("what", [stop, lambda: True], ids=["Stop", "True"])
def test_a_callback_stops_a_run(what, fed, engine, tmp_path):
    """The run is the first two rounds of the whole one."""
    callback = After(what)
    run = fd.run(AVERAGE, fed, 5, engine=engine, callbacks=[callback])
    assert callback.told == [0, 1, 2] and len(run.records) == 3
    assert run.notes == [
        "stopped after round 2: " + ("enough" if what is stop else "After asked for it")
    ]
    two = fd.run(AVERAGE, fed, 2, engine=engine)
    for a, b in zip(tree.leaves(run.state), tree.leaves(two.state), strict=True):
        assert not isinstance(a, torch.Tensor) or torch.equal(a, b)


def test_what_is_raised_on_purpose_reaches_the_caller(fed, engine):
    class Meant(Exception):  # noqa: N818
        pass

    class Raises(After):
        raises = (Meant,)

    def raise_it():
        raise Meant("on purpose")

    with warnings.catch_warnings():
        warnings.simplefilter("error", fd.CallbackWarning)
        with pytest.raises(Meant, match="on purpose"):
            fd.run(AVERAGE, fed, 5, engine=engine, callbacks=[Raises(raise_it)])
    # and the engine can be used again
    assert len(fd.run(AVERAGE, fed, 1, engine=engine).records) == 2


def test_optuna_prunes_trials(fed, engine):
    """The trial that does not learn is pruned after its third round, by Optuna's own exception."""
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    class Report(fd.Callback):
        def __init__(self, trial):
            self.trial = trial

        def row(self, row):
            self.trial.report(row["loss"], row["round"])
            if self.trial.should_prune():
                raise optuna.TrialPruned(f"after round {row['round']}")

    rates = iter([0.1, 1e-9])

    def objective(trial):
        algorithm = fd.FedAvg(lr=next(rates), batch_size=16)
        run = fd.run(algorithm, fed, 4, engine=engine, callbacks=[Report(trial)])
        return run.records.last("loss")

    pruner = optuna.pruners.ThresholdPruner(upper=2.3, n_warmup_steps=3)  # log 10 = 2.303
    study = optuna.create_study(pruner=pruner)
    study.optimize(objective, n_trials=2)
    good, bad = study.trials
    assert good.state == optuna.trial.TrialState.COMPLETE and good.value < 2.3
    assert bad.state == optuna.trial.TrialState.PRUNED and max(bad.intermediate_values) == 3


def test_a_run_ends_when_it_no_longer_improves(fed, engine):
    """With no learning to speak of, the loss is that of the start: patience ends after 2 rounds."""
    stop = fd.Patience(2, "loss", minimum=1e-3)
    run = fd.run(fd.FedAvg(lr=1e-9), fed, 9, engine=engine, stop=stop)
    assert len(run.records) == 3 and run.best.round == 0
    [note] = run.notes
    assert note.startswith("stopped after round 2: loss has not improved on 2.30259 (round 0)")


def test_growth_is_noticed_and_ends_a_run(fed, engine):
    """A step that is too large for the squared loss: 0.5, 2.8, 148, 9943, ... (in the third round
    more than 1,000 times log 10, the loss of equal probabilities).
    """
    diverging = fd.FedAvg(loss="squared", lr=0.2, batch_size=None, epochs=4)
    rounds = 9 if isinstance(engine, fd.Delayed) else 6
    with pytest.warns(fd.GrowthWarning, match=r"the run seems to diverge; try a smaller lr"):
        run = fd.run(diverging, fed, rounds, engine=engine)
    with pytest.warns(fd.GrowthWarning):
        ended = fd.run(diverging, fed, rounds, engine=engine, stop_on_growth=True)
    assert len(run.records) == rounds + 1 and len(ended.records) < rounds + 1
    if not isinstance(engine, fd.Delayed):
        assert len(ended.records) == 4
        assert any("round 3: loss is 9.94e+03, after 0.5" in note for note in ended.notes)


def vector(y, outputs):
    return torch.ones(3).numpy()


def test_a_metric_that_gives_a_vector(fed, engine):
    with pytest.raises(fd.ConfigError, match=r"metric 'vector' on all test rows .* gave 3 numbers"):
        fd.run(AVERAGE, fed, 1, engine=engine, metrics=[vector])


# -- own losses and modules ------------------------------------------------------------------------


def soon(outputs, y):
    """Cross-entropy, which becomes infinite for rows that are learned: log 0."""
    loss = F.cross_entropy(outputs, y, reduction="none")
    return loss + 0 * torch.log(F.relu(loss - 0.05))


def flat(outputs, y):
    """A root, whose slope at 0 is infinite."""
    return (
        F.cross_entropy(outputs, y, reduction="none")
        + (outputs - outputs.detach()).square().sum(1).sqrt()
    )


class Branches(nn.Module):
    """Looks at values of its rows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.layer.weight.data.zero_(), self.layer.bias.data.zero_()

    def forward(self, x):
        return self.layer(x if x.mean() > -1 else -x)


class Masks(Branches):
    def forward(self, x):
        outputs = self.layer(x)
        outputs[x.sum(1) < -1e9] = 0
        return outputs


class Reads(Branches):
    def forward(self, x):
        return self.layer(x / max(1.0, x.max().item() / 1e6))


OWN = {
    "soon": fd.FedAvg(lr=0.5, epochs=5, loss=soon),
    "Ditto, soon": fd.Ditto(lr=0.5, epochs=5, lam=0.1, loss=soon),
    "Independent, soon": fd.Independent(lr=0.5, epochs=5, loss=soon),
    "FedFW, soon": fd.FedFW(fd.Linear(), fd.L2Ball(500.0), loss=soon),
    "Branches": fd.FedAvg(Branches(), lr=0.1, batch_size=16),
    "Masks": fd.FedAvg(Masks(), lr=0.1, batch_size=16),
    "Reads": fd.FedAvg(Reads(), lr=0.1, batch_size=16),
}


@pytest.mark.parametrize("loss", [flat, lambda f, y: torch.log(f - 9).sum(1)])
def test_a_loss_that_is_nan_at_the_start_is_refused(loss, fed):
    with pytest.raises(
        fd.ConfigError, match=r"loss=(flat|<lambda>) (has a gradient of|returns) nan"
    ):
        fd.run(fd.FedAvg(lr=0.1, loss=loss), fed, 1)


@pytest.mark.parametrize("name", ["soon", "Ditto, soon", "Independent, soon", "FedFW, soon"])
def test_a_loss_that_becomes_nan_is_named_with_round_and_clients(name, fed, engine):
    if type(engine).__name__ == "Here" and name == "Independent, soon":  # a site, not the server
        with pytest.warns(UserWarning, match=r"clients \[\d\] are not .* loss must be finite"):
            fd.run(OWN[name], fed, 5, engine=engine)
        return
    of = "(of this round were )?"
    with pytest.raises(
        fd.DivergenceError, match=rf"round \d+: .* clients? {of}\d.*; or loss=soon itself gives NaN"
    ) as caught:
        fd.run(OWN[name], fed, 30, engine=engine)
    assert caught.value.round >= 1 and caught.value.clients


@pytest.mark.parametrize("name", ["Branches", "Masks", "Reads"])
def test_a_module_that_looks_at_values(name, fed, engine):
    """Batched, it says what to do; that then works, and is what the plain module does."""
    if engine in (fd.Local(batch=False),) or type(engine).__name__ == "Here":  # one by one
        fine = engine
    else:
        with pytest.raises(fd.ModelError, match=rf"{name} cannot .*fd.Local\(batch=False\)"):
            fd.run(OWN[name], fed, 2, engine=engine)
        fine = {
            "Local": fd.Local(batch=False),
            "Delayed": fd.Delayed(fd.Local(batch=False), up=1),
            "Ray": fd.Ray(workers=2, batch=False),
        }[type(engine).__name__]
    found = fd.run(OWN[name], fed, 2, engine=fine)
    plain = fd.FedAvg(nn.Sequential(Branches().layer), lr=0.1, batch_size=16)
    delayed = isinstance(engine, fd.Delayed)
    want = fd.run(plain, fed, 2, engine=fine if delayed else fd.Local(batch=False))
    for (_, a), (_, b) in zip(
        sorted(found.state.w.items()), sorted(want.state.w.items()), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
