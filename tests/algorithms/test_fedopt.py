"""FedOpt: optimizers of PyTorch at the server, against FedAvg and against PyTorch by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foedus as fd

HOW = {"lr": 0.1, "batch_size": 16}
PART = {"participation": 0.5, "seed": 3, "evaluate_every": 0}


def after(algorithm: fd.Algorithm, fed: fd.Federation, rounds: int = 3, **options) -> fd.Run:
    return fd.run(algorithm, fed, rounds, **PART, **options)


def same(one: fd.Run, other: fd.Run) -> None:
    assert set(one.state.w) == set(other.state.w)
    assert all(torch.equal(v, other.state.w[k]) for k, v in one.state.w.items())


def batch_norm() -> fd.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))
    return fd.Module(net, norm="average")


@pytest.mark.parametrize("model", [fd.MLP(8), batch_norm()], ids=["mlp", "statistics"])
def test_sgd_with_step_1_is_fedavg(fed, model):
    same(after(fd.FedOpt(model, **HOW), fed), after(fd.FedAvg(model, **HOW), fed))


@pytest.mark.parametrize("model", [fd.MLP(8), batch_norm()], ids=["mlp", "statistics"])
def test_momentum_is_fedavgs_server_momentum(fed, model):
    options = {"server_lr": 0.7, "server_options": {"momentum": 0.6}}
    found = after(fd.FedOpt(model, **HOW, **options), fed)
    want = after(fd.FedAvg(model, **HOW, server_lr=0.7, server_momentum=0.6), fed)
    for k, v in want.state.w.items():
        torch.testing.assert_close(found.state.w[k], v)


def test_adam_by_its_definition(two):
    """Average changes of 0.34 and 0.2 or so are gradients of the other sign."""
    options = {"server_optimizer": "Adam", "server_lr": 0.05, "server_options": {"eps": 0.1}}
    how = {"model": fd.Linear(bias=False), "lr": 0.1, "steps": 2, "batch_size": None}
    found = fd.run(fd.FedOpt(**how, **options), two, 2, evaluate_every=0)
    w = m = v = 0.0
    for t in (1, 2):
        a, b = w, w
        for _ in range(2):  # f_A' = w - 2 and f_B' = 4w - 2
            a, b = a - 0.1 * (a - 2), b - 0.1 * (4 * b - 2)
        g = -((a - w) + 2 * (b - w)) / 3
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w -= 0.05 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)) ** 0.5 + 0.1)
    assert float(found.state.w["weight"]) == pytest.approx(w, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adam", {"betas": (0.37, 0.83)}),
        ("AdamW", {"weight_decay": 0.3, "amsgrad": True}),
        ("RMSprop", {"alpha": 0.7, "momentum": 0.3}),
        ("Rprop", {}),
        ("Adagrad", {"initial_accumulator_value": 0.1}),
    ],
)
def test_pytorch_makes_the_same_steps(fed, name, options):
    """Three rounds with half of the clients: the average change of each is FedAvg's from there."""
    how = {"server_optimizer": name, "server_lr": 0.03, "server_options": options}
    algorithm = fd.FedOpt(fd.MLP(8), **HOW, **how)
    states = [after(algorithm, fed, rounds).state.w for rounds in range(4)]

    class From(fd.FedAvg):
        """FedAvg whose rounds begin where those of the other run do."""

        def round(self, clients, state):
            return super().round(clients, state.replace(w=states[clients.round - 1]))

    averages = [after(From(fd.MLP(8), **HOW), fed, rounds).state.w for rounds in range(4)]
    w = {k: nn.Parameter(v.clone()) for k, v in states[0].items()}
    optimizer = getattr(torch.optim, name)(w.values(), lr=0.03, **options)
    for t in range(3):
        for k, p in w.items():
            p.grad = states[t][k] - averages[t + 1][k]
        optimizer.step()
        for k, p in w.items():
            # a difference of weights has an error of 1e-8, which small changes are divided by
            torch.testing.assert_close(states[t + 1][k], p.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "NAdam", "ASGD", "Rprop"])
def test_a_checkpoint_holds_what_the_optimizer_remembers(fed, name, tmp_path):
    options = {"momentum": 0.5} if name == "SGD" else {}
    algorithm = fd.FedOpt(
        fd.MLP(8), **HOW, server_optimizer=name, server_lr=0.02, server_options=options
    )
    path = tmp_path / "run.safetensors"
    after(algorithm, fed, 2, checkpoint=path)
    same(after(algorithm, fed, 5, checkpoint=path, resume=True), after(algorithm, fed, 5))
    after(algorithm, fed, 3).save(tmp_path / "saved")
    assert fd.Run.load(tmp_path / "saved").algorithm == algorithm


def test_an_optimizer_leaves_earlier_states_alone():
    """Optimizers work in place, and the server's states stay as they were."""
    algorithm = fd.FedOpt(server_optimizer="Adam", server_lr=0.1)
    w, change = {"a": torch.ones(2, 3)}, {"a": torch.full((2, 3), 0.5)}
    first, memory = algorithm._stepped(w, change, {})
    before = {k: v.clone() for k, v in memory["a"].items()}
    second, _ = algorithm._stepped(first, change, memory)
    assert all(torch.equal(v, before[k]) for k, v in memory["a"].items())
    assert torch.equal(w["a"], torch.ones(2, 3)) and not torch.equal(first["a"], second["a"])


def test_a_class_is_its_name():
    assert fd.FedOpt(server_optimizer=torch.optim.AdamW) == fd.FedOpt(server_optimizer="AdamW")
    assert fd.FedOpt(server_options={"betas": [0.5, 0.9]}, server_optimizer="Adam").server_options


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"server_optimizer": "Adamw"}, "did you mean 'AdamW'"),
        ({"server_optimizer": torch.optim.Optimizer}, "'Optimizer' is unknown"),
        ({"server_optimizer": 3}, "server_optimizer=3 must be a string"),
        ({"server_options": {"momentun": 0.9}}, "'SGD' .*unexpected keyword argument 'momentun'"),
        ({"server_options": {"momentum": -1.0}}, "cannot be used: Invalid momentum value"),
        ({"server_options": {"lr": 0.9}}, "the step size is server_lr"),
        ({"server_options": {"momentum": [torch.ones(1)]}}, "server_options"),
        ({"server_optimizer": "LBFGS"}, "cannot be used: .*closure"),
        ({"server_optimizer": "SparseAdam"}, "cannot be used: .*dense gradients"),
    ],
)
def test_mistakes(how, words):
    with pytest.raises(fd.ConfigError, match=words):
        fd.FedOpt(**how)
