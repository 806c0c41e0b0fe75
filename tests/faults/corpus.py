"""Valid messages of every kind: what the mutations begin with."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import foedus as fd
from foedus import wire
from foedus.base import random
from foedus.base.spec import Spec
from foedus.base.tree import Tree
from foedus.storage import checkpoint
from foedus.wire import layout
from foedus.wire.arrays import LowRank, Quantised, Signs, Sparse, Trees


def trees() -> Iterator[Tree]:
    """Trees of tensors, of every kind that the wire has."""
    g = torch.Generator().manual_seed(0)
    for dtype in layout.DTYPES:
        for shape in ((), (3,), (2, 3), (0, 2)):
            yield torch.randint(0, 2, shape, generator=g).to(dtype)
    yield torch.randn(20, 10, generator=g)
    yield [1, -5, 2.5, "text", "tëxt", True, False, None, float("nan"), 2**62]
    yield {"w": {"weight": torch.randn(3, 4, generator=g), "bias": torch.zeros(3)}, "n": 3}
    yield fd.State(
        x=torch.randn(4, generator=g),
        count=torch.tensor(3),
        inner=fd.State(y=torch.zeros(2, dtype=torch.float16)),
    )
    yield ([torch.ones(2)], (torch.zeros(1, dtype=torch.int64),), {"a": [{"b": ()}]})
    yield Spec((4,), 3, 3)
    for n, dtype in (
        (200, torch.int32),
        (70_000, torch.int64),
        (2**25, torch.int32),
        (2**33, torch.int64),
    ):
        yield Sparse(
            torch.tensor([1, 5, n - 1], dtype=dtype), torch.randn(3, generator=g), (n // 8, 8)
        )
    yield Sparse(torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2, dtype=torch.float64), (5,))
    yield LowRank(torch.randn(6, 2, generator=g), torch.randn(5, 2, generator=g))
    yield LowRank(torch.randn(2, 3, 1, generator=g), torch.randn(2, 4, 1, generator=g))
    yield Signs.pack(torch.randn(5, 5, generator=g), 2.0)
    yield Signs.pack(torch.randn(3, 9, generator=g), torch.ones(3))
    key = random.key(0)
    for kind in ("int8", "float16", "bfloat16"):
        yield wire.quantise(
            {"w": torch.randn(4, 4, generator=g), "b": torch.randn(4, generator=g)}, kind, key
        )
    yield Quantised(torch.zeros(2, 3, dtype=torch.int8), torch.ones(2), "float64")
    yield _tree(2), _tree(300)
    yield {"tree": _tree(40_000), "rate": torch.tensor(0.1)}


def _tree(features: int) -> Trees:
    """Two trees of three nodes each."""
    index = torch.tensor([0, -1, -1, features - 1, -1, -1], dtype=torch.int32)
    left = torch.tensor([1, -1, -1, 4, -1, -1], dtype=torch.int16)
    right = torch.tensor([2, -1, -1, 5, -1, -1], dtype=torch.int16)
    return Trees(
        index,
        torch.randn(6),
        left,
        right,
        torch.randn(4, 2),
        torch.tensor([0, 3], dtype=torch.int8),
        features,
    )


def secure() -> dict[str, list[Tree]]:
    """The messages of an exchange of secure aggregation, by phase: what the server says, then what
    a client answers.
    """
    from foedus.aggregation.secure.simulated import SecureAggregation, SecureClient, SecureServer

    config = SecureAggregation()
    clients = {i: SecureClient(i, config) for i in range(4)}
    server = SecureServer(config, dict.fromkeys(clients, 1), session="fuzz")
    found, questions = {}, dict.fromkeys(clients, server.offer())
    steps = (
        ("advertise", lambda c, m: c.advertise(m), server.keys),
        ("share", lambda c, m: c.share(m), server.boxes),
        ("mask", lambda c, m: c.mask(m, {"w": torch.ones(3)}), None),
        ("unmask", lambda c, m: c.unmask(m), server.total),
    )
    for phase, answer, take in steps:
        states = {i: c.export() for i, c in clients.items()}
        answers = {i: answer(clients[i], m) for i, m in questions.items()}
        found[phase] = [questions[0], answers[0], states[0]]
        if take is not None:
            questions = take(answers)
        else:
            for i, m in answers.items():
                server.add(i, m)
            questions = server.request()
    return found


def checkpoints() -> list[bytes]:
    """Files of runs and of checkpoints."""
    rng = np.random.default_rng(0)
    data = fd.Data.from_arrays(
        *(
            rng.normal(size=(n, 3)) if k == 0 else rng.integers(0, 2, n)
            for n in (8, 4)
            for k in (0, 1)
        )
    )
    fed = fd.split(data, "iid", clients=2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.safetensors"
        run = fd.run(fd.Scaffold(fd.Linear(), lr=0.1), fed, 1, checkpoint=path)
        run.save(Path(folder) / "run.safetensors", card=False)
        checkpoint.write(
            Path(folder) / "t.safetensors",
            {"state": [t for t in trees() if not isinstance(t, float)]},
            {"kind": "x"},
        )
        return [p.read_bytes() for p in sorted(Path(folder).iterdir())]


def headers() -> list[bytes]:
    """Headers of Flower messages, as text."""
    asked = {
        "session": "s",
        "seed": 0,
        "round": 3,
        "exchange": 0,
        "version": 65536,
        "ids": [0, 1],
        "seen": [0, 0],
        "quantise": None,
    }
    said = {
        "round": 3,
        "exchange": 0,
        "ids": [0, 1],
        "lost": [],
        "lengths": [11, 11],
        "seconds": 0.5,
    }
    hello = {
        "clients": [0],
        "rows": [8],
        "name": "shard",
        "test_rows": [2],
        "checksum": 7,
    }
    own = {"ids": [0, 1], "sums": {"rows": [4.0, 4.0], "loss": [1.0, 2.0]}}
    return [
        json.dumps(h).encode()
        for h in (asked, said, hello, own, {"error": "it failed", "seconds": 1})
    ]


def archives() -> list[bytes]:
    """Estimators of scikit-learn, as skops writes them."""
    import skops.io
    from sklearn.linear_model import LogisticRegression
    from sklearn.naive_bayes import GaussianNB

    x, y = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20) % 2
    return [skops.io.dumps(m.fit(x, y)) for m in (LogisticRegression(), GaussianNB())]


COMMANDS = ("run", "compare", "tune", "diagnose", "plan")

CONFIGS = (
    """[data]
name = "digits"
scale = "none"

[split]
scheme = "dirichlet"
clients = 10
alpha = 0.3
seed = 0

[run]
rounds = 30
seeds = 3
participation = { poisson = 0.5 }
evaluate_every = 2
target = 0.9
quantise = "int8"

[algorithms.FedAvg]
lr = 0.1
model = { type = "MLP", hidden = [64] }

[algorithms."FedProx, strong"]
type = "FedProx"
mu = 1.0

[output]
runs = "results"
report = "page.html"
""",
    """[data]
name = "digits"

[split]
scheme = "labels"
clients = 5
per_client = 3

[run]
rounds = 3
seed = 1
participation = 0.5
checkpoint = "run.safetensors"
checkpoint_every = 2
resume = true

[engine]
type = "Ray"
workers = 2
resources = { CPU = 1 }

[algorithm]
type = "FedFW"
domain = { type = "L1Ball", radius = 10.0 }
model = "Linear"

[output]
run = "run.safetensors"

[track]
tensorboard = "runs"
mlflow = { experiment = "digits" }
""",
    """[data]
name = "digits"

[split]
scheme = "homogeneity"
clients = 4
s = 0.5

[run]
rounds = 2

[algorithm]
type = "FedNewton"
features = { type = "RandomFourier", dim = 200, bandwidth = 1.0 }
reg = 1e-3

[tune]
reg = [1e-4, 1e-3]
features.bandwidth = [1.0, 2.0]

[tune.options]
trials = 2
halving = 2
workers = 1
""",
    """[algorithm]
type = "Scaffold"
model = "Linear"
lr = 0.1

[data]
columns = ["age", "sex"]
classes = ["0", "1"]
categories = { sex = ["f", "m"] }
scale = "standard"
impute = "median"
encode = "ordinal"
clip = 5.0
ranges = { age = [0, 120] }

[run]
rounds = 20
seed = 0

[federation]
clients = 4
min_clients = 3
timeout = 120
patience = 60

[output]
folder = "results"
""",
)
