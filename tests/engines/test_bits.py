"""The table of docs/how-to/engines.md: which runs are the same to the last bit however clients are
batched or spread over workers, and which up to rounding.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import foedus as fd
from foedus import kernels, testing
from foedus.base import tree
from foedus.storage.states import States
from tests.conformance import ALGORITHMS

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "engines.md"
BATCHES = (
    fd.Local(batch=False),
    fd.Local(batch=True, memory=1),
    fd.Local(batch=True, memory=100_000),
)

needs_compiled = pytest.mark.skipif(not kernels.ready, reason="foedus has no compiled loops here")


def table() -> dict[str, str]:
    """By name of an algorithm of `tests.conformance`, what the page says: "bit" or "rounding"."""
    text = PAGE.read_text().split("## Bitwise reproducibility")[1].split("\n## ")[0]
    said: dict[str, str] = {}
    for names, equal in re.findall(r"^\| (`.*`) \| (bit|rounding) \|", text, re.M):
        for name in re.findall(r"`([^`]+)`", names):
            assert name not in said, f"{name} is in the table twice"
            said[name] = equal
    return said


TO_THE_BIT = [name for name, equal in table().items() if equal == "bit"]


def numbers(run: fd.Run) -> list[torch.Tensor]:
    """The server's state and every client's, in order of id, wherever they are kept."""
    clients = []
    if "slot" in (run.clients or {}):
        states = States(len(run.clients["slot"]))
        states.load(run.clients)
        there = (p for p in range(len(run.clients["slot"])) if run.clients["slot"][p] >= 0)
        clients = [tree.map(torch.clone, states.get(p)) for p in there]
    return [t for t in tree.leaves((run.state, clients)) if isinstance(t, torch.Tensor)]


@pytest.fixture(scope="module")
def many(digits) -> fd.Federation:
    """Twelve clients, some of fewer rows than a mini-batch."""
    train, test = (digits.x_train[:300], digits.y_train[:300]), (digits.x_test, digits.y_test)
    small = fd.Data.from_arrays(*train, *test, classes=10)
    return fd.split(small, "dirichlet", clients=12, alpha=0.5, seed=0)


def test_every_algorithm_is_in_the_table():
    assert set(table()) == set(ALGORITHMS)


@needs_compiled
@pytest.mark.parametrize(
    ("name", "threads"), [(name, 1) for name in TO_THE_BIT] + [("Scaffold", 2), ("FedDR", 2)]
)
def test_other_batches_give_the_same_bits(name, threads, fed, many):
    where = fed if name.startswith("AFLBoost") else many  # low=0.1 leaves room for ten domains
    torch.set_num_threads(threads)
    try:
        engines = (fd.Local(batch=True), *BATCHES)
        first, *others = (
            numbers(fd.run(ALGORITHMS[name], where, 2, engine=engine, evaluate_every=0))
            for engine in engines
        )
    finally:
        torch.set_num_threads(1)
    for engine, other in zip(BATCHES, others, strict=True):
        assert testing._equal(first, other), engine


@needs_compiled
@pytest.mark.slow
def test_one_worker_and_two_give_the_same_bits(fed, ray_engine):
    with fd.Ray(workers=1) as single:
        for name in TO_THE_BIT:
            here, *there = (
                numbers(fd.run(ALGORITHMS[name], fed, 2, engine=engine, evaluate_every=0))
                for engine in (fd.Local(), single, ray_engine)
            )
            assert all(testing._equal(here, other) for other in there), name
