"""How each recorded run is made, and what is recorded of it."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import numpy as np
import torch

import foedus as fd
from tests.conformance import ALGORITHMS, PREDICTORS

ROUNDS = 6
ROWS = 5
"""Rows on which the outputs of final models are recorded."""
ENTRIES = 4
"""Entries of a tensor that are recorded next to its sum and its norm."""

# -- federations -----------------------------------------------------------------------------------


@cache
def digits() -> fd.Federation:
    """The fixture `fed`: five clients of unequal size and label mix, 300 rows in all."""
    d = fd.load("digits")
    train, test = (d.x_train[:300], d.y_train[:300]), (d.x_test[:100], d.y_test[:100])
    data = fd.Data.from_arrays(*train, *test, classes=10)
    return fd.split(data, "dirichlet", clients=5, alpha=0.5, seed=0)


@cache
def values() -> fd.Federation:
    """The fixture `values`: a regression federation of four clients."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 4)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 0.5, 0.0]) + 0.1 * rng.normal(size=120)).astype(np.float32)
    data = fd.Data.from_arrays(x[:90], y[:90], x[90:], y[90:])
    return fd.split(data, "iid", clients=4, seed=0)


@cache
def bandit() -> fd.Federation:
    """The digits as a bandit with one action a class."""
    return fd.class_bandit(digits())


def doubtful(y: np.ndarray, given: np.ndarray) -> float:
    """The share of rows whose two largest probabilities are equal up to rounding.

    A class that nobody has seen yet is as probable as the next one: which of them is predicted is
    a matter of the processor, and `compare` lets these rows count either way.
    """
    if given.ndim < 2 or given.shape[1] < 2 or not np.isfinite(given).all():
        return 0.0
    second, first = np.sort(given, axis=1)[:, -2:].T
    return float(np.mean(first - second <= 1e-6))


# -- algorithms ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """An algorithm, its federation, and the participation where the scenario does not set one."""

    algorithm: fd.Algorithm
    federation: Any = digits
    participation: float = 1.0


# without mixed precision: processors round products of bfloat16 numbers in their own ways
SAME_EVERYWHERE = {k: a for k, a in ALGORITHMS.items() if not getattr(a, "precision", None)}
CASES: dict[str, Case] = {name: Case(algorithm) for name, algorithm in SAME_EVERYWHERE.items()} | {
    "FedResBandit": Case(fd.FedResBandit(fd.Linear(), fd.Linear(), every=2, step=0.03), bandit),
    "FedResBandit, squarecb": Case(
        fd.FedResBandit(
            fd.Linear(),
            fd.Linear(),
            explore="squarecb",
            step=0.03,
            gamma=20.0,
            reward="mean",
        ),
        bandit,
    ),
    "FFGBLipschitz": Case(
        fd.FFGBLipschitz(
            fd.SobolevNet(fd.MLP(8), steps=5, lr=5e-2, points=6),
            local_steps=2,
            step=0.4,
            mu=0.2,
        ),
        values,
    ),
    "FedFW, L1 ball, MLP, participation 0.3": Case(
        fd.FedFW(fd.MLP(6), fd.L1Ball(20.0), begin="projected", penalty=1e-2), participation=0.3
    ),
    "AFLBoost, domains": Case(
        fd.AFLBoost(PREDICTORS, budget=2, step=0.2, domains={"a": [0, 2], "b": [1, 3, 4]}),
    ),
}

# -- scenarios -------------------------------------------------------------------------------------

UP, DOWN = (0, 1, 2, 0, 3), (1, 0, 0, 2, 1)
COUNTS = ("round", "bytes_up", "bytes_down", "messages_up", "clients", "epsilon")
"""All that is recorded where noise comes from the operating system."""
FAMILIES = ("FedAvg", "FedNewton", "FedFW", "FedBoost, predictors from messages", "FedRes", "FFGB")
"""Those that also run as a Flower federation of several processes."""


def ragged(clients: int) -> fd.Delayed:
    """Delays that differ from client to client."""
    return fd.Delayed(up=UP[:clients], down=DOWN[:clients])


def private() -> fd.DifferentialPrivacy:
    return fd.DifferentialPrivacy(clip=1.0, noise=0.1, delta=1e-3, accountant="rdp")


SCENARIOS: dict[str, Any] = {
    "batched": lambda n: {"engine": fd.Local(batch=True)},
    "looped": lambda n: {"engine": fd.Local(batch=False)},
    "half": lambda n: {"engine": fd.Local(), "participation": 0.5},
    "delayed": lambda n: {"engine": fd.Delayed(up=2, down=3)},
    "ragged": lambda n: {"engine": ragged(n), "participation": 0.5},
    "int8": lambda n: {"quantise": "int8"},
    "secure": lambda n: {"aggregation": fd.SecureAggregation()},
    "private": lambda n: {"aggregation": private()},
    "ray": lambda n: {},
    "flower": lambda n: {},
}
"""By name: from the number of clients, the arguments of `fd.run`. Ray and Flower have one engine
for all runs."""

SLOW_SCENARIOS = ("ray", "flower", "looped", "int8", "private")
SLOW_RUNS = (
    *(f"{scenario}/FFGBLipschitz" for scenario in ("looped", "int8", "delayed")),
    *(f"{scenario}/FedNewton, *" for scenario in ("looped", "int8")),
    *(f"{scenario}/FFGBDistill" for scenario in ("looped", "int8")),
    *(f"{scenario}/*, *" for scenario in ("secure", "private")),  # one of each name is enough
)
"""Globs of scenario/algorithm, of runs too slow for the ordinary tests."""


def runs() -> list[tuple[str, str]]:
    """All (scenario, algorithm)."""
    return [(s, a) for s in SCENARIOS for a in CASES if s != "flower" or a in FAMILIES]


def slow(scenario: str, name: str) -> bool:
    run = f"{scenario}/{name}"
    return scenario in SLOW_SCENARIOS or any(fnmatchcase(run, glob) for glob in SLOW_RUNS)


@contextlib.contextmanager
def engine_of(scenario: str) -> Iterator[Any]:
    """The engine that serves all runs of a scenario, or None where every run has its own."""
    if scenario == "ray":
        import ray

        started = not ray.is_initialized()
        if started:
            quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
            ray.init("local", num_cpus=4, **quiet)
        with fd.Ray(workers=2) as engine:
            yield engine
        if started:
            ray.shutdown()
    elif scenario == "flower":
        with fd.Flower(nodes=2, timeout=300, code="tests.conformance:ALGORITHMS") as engine:
            yield engine
    else:
        yield None


def record(scenario: str, name: str, engine: Any = None) -> dict[str, Any]:
    """Run an algorithm in a scenario; what is recorded of it, or of the error it ends in."""
    case = CASES[name]
    fed = case.federation()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            arguments = {"participation": case.participation} | SCENARIOS[scenario](len(fed))
            arguments["participation"] = min(arguments["participation"], case.participation)
            if engine is not None:
                arguments["engine"] = engine
            how = {"seed": 0, "evaluate_every": 1} | arguments
            asked = {"metrics": [doubtful]} if fed.data.classes else {}
            if scenario == "flower":  # a function is not sent to sites
                clear = fd.run(case.algorithm, fed, ROUNDS, **how | asked | {"engine": fd.Local()})
                run = fd.run(case.algorithm, fed, ROUNDS, **how)
            else:
                clear = run = fd.run(case.algorithm, fed, ROUNDS, **how | asked)
        except Exception as error:
            if engine is not None and type(error) is fd.FoedusError:
                raise  # processes that do not start are not a refusal
            first = (str(error).splitlines() or [""])[0]
            return {"error": {"class": type(error).__name__, "message": first}}
    rows = run.records.rows
    if engine is not None and any("left_out" in row for row in rows):
        raise RuntimeError(f"{scenario}/{name}: a process did not answer in time; run it again")
    names = [c for c in dict.fromkeys(c for row in rows for c in row) if c != "seconds"]
    names = [c for c in names if "doubtful" not in c]
    columns = [c for c in ("doubtful", "own_doubtful") if c in clear.records.columns]
    unclear = {c: [row[c] for row in clear.records.rows] for c in columns}
    if scenario == "private":
        names = [c for c in names if c in COUNTS]
        if getattr(case.algorithm, "sampling", "uniform") != "uniform":
            # FedBoost draws by weights, which have noise: how many predictors it sends is random
            names = [c for c in names if not c.startswith("bytes")]
        return {"columns": {c: [plain(row.get(c)) for row in rows] for c in names}}
    return {
        "columns": {c: [plain(row.get(c)) for row in rows] for c in names},
        "state": state_digest(run.state),
        "outputs": outputs(run, fed, scenario != "flower"),
        "doubtful": unclear,
    }


# -- digests ---------------------------------------------------------------------------------------

STATE = (
    *("w", "v", "c", "h"),  # FedAvg and its momentum, Scaffold, FedDyn, FedDR
    "m",  # FedAdam
    *("g", "d", "r", "p", "rz", "step"),  # FedNewton
    *("center", "penalty"),  # FedFW
    *("alpha", "total", "steepest", "squares", "lam", "lam_total", "latest"),  # FedBoost, FedRes
    *("own", "y", "cross", "local"),  # FedResERM
    *("to", "spread"),  # the algorithm of tests.conformance
)
"""Entries of server states with a meaning in the papers. The others say who was sent what."""


def state_digest(state: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in STATE:
        if name in state:
            found |= leaves(name, state[name])
    return found


def leaves(path: str, value: Any) -> dict[str, Any]:
    """Digests of the tensors and numbers of a nested value, by their path."""
    if isinstance(value, Mapping):
        pairs = [leaves(f"{path}.{k}", v) for k, v in value.items()]
    elif isinstance(value, list | tuple):
        pairs = [leaves(f"{path}.{i}", v) for i, v in enumerate(value)]
    elif isinstance(value, torch.Tensor):
        return {path: digest(value)}
    elif isinstance(value, bool | int | float):
        return {path: [plain(value)]}
    else:
        return {}
    return {k: v for pair in pairs for k, v in pair.items()}


def digest(t: torch.Tensor) -> list[float]:
    """Sum, norm and evenly spaced entries: the first ones belong to pixels that are always 0."""
    t = t.detach().cpu().flatten()
    exact, count = t.double(), min(ENTRIES, len(t))
    spaced = torch.linspace(0, max(len(t) - 1, 0), count).round().long()
    return [exact.sum().item(), exact.norm().item(), *entries(t[spaced])]


def entries(t: torch.Tensor) -> list[float]:
    """As numbers whose repr is the shortest that gives the entry back."""
    if t.dtype == torch.float32:
        return [float(str(v)) for v in t.numpy()]
    return t.tolist()


def outputs(run: fd.Run, fed: fd.Federation, states: bool) -> dict[str, Any]:
    """Outputs on a few rows of the global model, and of each client's own in personal algorithms.

    states: whether the run has the clients' states; in a federation of sites they stay there.
    FFGB's model is a sum of functions: its outputs are recorded in full.
    """
    data, found = fed.data, {}
    x = data.x_test[:ROWS] if len(data.x_test) >= ROWS else data.x_train[:ROWS]
    with contextlib.suppress(fd.FoedusError):  # no global model
        out = run.model.outputs(x)
        found["model"] = entries(out.flatten()) if is_boosting(run) else digest(out)
    if run.algorithm.personal and states:
        for client in sorted(fed.ids.tolist()):
            with contextlib.suppress(fd.FoedusError):  # has never taken part
                found[f"client {client}"] = digest(run.model_of(client).outputs(x))
    return found


def is_boosting(run: fd.Run) -> bool:
    return isinstance(run.algorithm, fd.FFGB) and "w" not in run.state


def plain(value: Any) -> Any:
    """A number or text as JSON has it; None where there is no value."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, torch.Tensor | np.generic | np.ndarray):
        value = value.item()
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return value
