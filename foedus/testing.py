"""The checks that every algorithm passes, in the manner of scikit-learn's `check_estimator`.

    from foedus.testing import check_algorithm
    check_algorithm(MyAlgorithm(), fed)

Each check is a separate function with the same arguments, so a test suite can run and name them one
by one:

    @pytest.mark.parametrize("check", foedus.testing.CHECKS, ids=lambda c: c.__name__)
    def test_mine(check):
        check(MyAlgorithm(), fed, fd.Local())
"""

from __future__ import annotations

import random as python_random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from foedus import wire
from foedus.base import random, tree
from foedus.base.spec import Spec
from foedus.base.tree import Tree
from foedus.core.algorithm import Algorithm
from foedus.core.delays import Delays
from foedus.core.exchange import Ask, Replies
from foedus.core.held import HeldArrays, rebuilt
from foedus.core.result import Run
from foedus.core.run import run
from foedus.core.session import Session
from foedus.data.federation import Federation
from foedus.engines.local import Local
from foedus.errors import SplitError

ROUNDS = 3


def check_algorithm(algorithm: Algorithm, fed: Federation, engine: Any = None) -> None:
    """Run every check on a federation of at least four clients, with test rows; raises
    AssertionError, with the name of the property, at the first that fails.
    """
    if len(fed) < 4:
        raise SplitError(
            f"check_algorithm needs a federation of at least 4 clients, not {len(fed)}"
        )
    for check in CHECKS:
        check(algorithm, fed, engine or Local())


def check_batched_equals_looped(algorithm: Algorithm, fed: Federation, engine: Any) -> None:
    """Results do not depend on the batches of clients or the engine, up to rounding."""
    reference = _run(algorithm, fed, Local(batch=False))
    for other in (Local(batch=True), Local(batch=True, memory=1), engine):
        _close(
            reference,
            _run(algorithm, fed, other),
            f"{type(algorithm).__name__}: looped and {other} differ",
        )


def check_client_order(algorithm: Algorithm, fed: Federation, engine: Any) -> None:
    """The order in which clients are listed does not matter, to the last bit."""
    backwards = fed.select(np.arange(len(fed))[::-1].copy())
    _same(
        _run(algorithm, fed, engine),
        _run(algorithm, backwards, engine),
        "the order of the clients changed the result",
    )


def check_seeds(algorithm: Algorithm, fed: Federation, engine: Any) -> None:
    """The same seed gives the same run, another seed another run (other clients take part in
    it).
    """
    first, again, other = (
        _run(algorithm, fed, engine, seed=s, participation=0.5, rounds=4) for s in (0, 0, 1)
    )
    _same(first, again, "the same seed gave another run")
    if not algorithm.pooled or _draws(algorithm, len(fed.rows)):
        assert not _equal(_numbers(first), _numbers(other)), "another seed gave the same run"


def check_resume(algorithm: Algorithm, fed: Federation, engine: Any) -> None:
    """A run that is stopped and resumed has the history, the state and the client states of one
    that was not.
    """
    _resumes(algorithm, fed, engine, participation=0.5)
    _resumes(algorithm, fed, Local(batch=True, memory=100_000), participation=1.0)


def _resumes(algorithm: Algorithm, fed: Federation, engine: Any, participation: float) -> None:
    options: dict[str, Any] = {"participation": participation, "evaluate_every": 1}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.safetensors"
        whole = _run(algorithm, fed, engine, rounds=4, **options)
        _run(algorithm, fed, engine, rounds=2, checkpoint=path, **options)
        resumed = _run(algorithm, fed, engine, rounds=4, checkpoint=path, resume=True, **options)
    _same(whole, resumed, "the resumed run differs from the uninterrupted one")


def check_wire(algorithm: Algorithm, fed: Federation, engine: Any) -> None:
    """Payloads and replies survive encoding to the last bit, and the bytes charged are the bytes
    encoded.
    """
    counted = Encoding(engine)
    through = _run(algorithm, fed, counted)
    _same(
        _run(algorithm, fed, engine),
        through,
        "encoding and decoding every message changed the result",
    )
    last = through.records.rows[-1]
    charged = (last["bytes_up"], last["bytes_down"], last["messages_up"])
    sent = (counted.up, counted.down, counted.messages)
    assert charged == sent, f"charged (up, down, messages) {charged}, encoded {sent}"


def check_sizes(algorithm: Algorithm, fed: Federation, engine: Any) -> None:
    """One client alone, and clients of very unequal size, work."""
    if not algorithm.names_clients:
        _finite(_run(algorithm, fed.pool(), engine), "one client alone")
    order = np.concatenate([fed.client_rows(i) for i in range(len(fed))])
    cuts = np.array([0, 1, 3, 6, len(order)])
    unequal = replace(fed.select(np.arange(4)), rows=order, offsets=cuts)
    looped = _run(algorithm, unequal, Local(batch=False))
    _finite(looped, "clients of 1, 2, 3 and all other rows")
    _close(
        looped,
        _run(algorithm, unequal, engine),
        "clients of very unequal size: looped and batched differ",
    )


def _numpy_state() -> np.ndarray:
    return cast("tuple[str, np.ndarray, int, int, float]", np.random.get_state())[1]


def check_global_random_state(algorithm: Algorithm, fed: Federation, engine: Any) -> None:
    """No global random generator is used or seeded."""
    before = torch.get_rng_state(), _numpy_state().copy(), python_random.getstate()
    _run(algorithm, fed, engine, participation=0.5)
    assert torch.equal(before[0], torch.get_rng_state()), (
        "the run changed torch's global random state"
    )
    assert np.array_equal(before[1], _numpy_state()), "the run changed numpy's global random state"
    assert before[2] == python_random.getstate(), "the run changed Python's global random state"


def check_payload_unchanged(algorithm: Algorithm, fed: Federation, engine: Any) -> None:
    """Client steps are pure: they do not write into what the server sent."""
    watched = Encoding(engine, watch=True)
    _run(algorithm, fed, watched)


CHECKS: tuple[Callable[[Algorithm, Federation, Any], None], ...] = (
    check_batched_equals_looped,
    check_client_order,
    check_seeds,
    check_resume,
    check_wire,
    check_sizes,
    check_global_random_state,
    check_payload_unchanged,
)


class Encoding:
    """An engine around an engine: encodes, decodes and counts every message."""

    def __init__(self, engine: Any, watch: bool = False):
        self.engine, self.watch = engine, watch
        self.up = self.down = self.messages = 0

    def open(self, algorithm: Algorithm, fed: Federation, seed_key: Tensor) -> Session:
        return EncodingSession(
            self,
            algorithm,
            self.engine.open(algorithm, fed, seed_key),
            fed.spec,
            random.fold(seed_key, 0),
        )


class EncodingSession(Session):
    """Messages of an `Encoding`; clients' copies of held values are rebuilt from them, and must
    equal the server's.
    """

    def __init__(
        self, counted: Encoding, algorithm: Algorithm, inner: Session, spec: Spec, shared: Tensor
    ):
        self.counted, self.algorithm, self.inner, self.conditions = (
            counted,
            algorithm,
            inner,
            inner.conditions,
        )
        self.first = lambda: algorithm.first_held(spec, shared)
        self.copies: dict[int, dict[str, Tree]] = {}

    def exchange(self, ask: Ask) -> Iterator[tuple[Tensor, Tree, bool]]:
        if ask.free:
            yield from self.inner.exchange(ask)
            return
        counted, sent, updates = self.counted, [], []
        for ids, plain in ask.messages():
            message = wire.encode(plain)
            counted.down += len(message) * len(ids)
            sent.append((message, wire.decode(message)))
            updates.append(
                (
                    torch.searchsorted(ask.ids, ids),
                    {name: sent[-1][1].get(name) for name in ask.held},
                )
            )
            self._rebuild(ask, ids, sent[-1][1])
        received = {name: value for name, value in sent[0][1].items() if name not in ask.held}
        for ids, reply, stacked in self.inner.exchange(
            replace(ask, payload=received, updates=updates if ask.held else [])
        ):
            if stacked:
                replies = Replies(ids, ids, stacked=reply)
                each = [self._through(replies[i]) for i in range(len(ids))]
                yield (
                    ids,
                    Replies(ids, ids, separate=each).stack() if tree.leaves(reply) else reply,
                    True,
                )
            else:
                yield ids, self._through(reply), False
        if counted.watch:
            for message, plain in sent:
                assert wire.encode(plain) == message, (
                    f"the client step {ask.step} changed its payload in place"
                )

    def _rebuild(self, ask: Ask, ids: Tensor, message: Tree) -> None:
        """The values that clients rebuild from the message equal the server's, to the last bit."""
        for name, held in ask.held.items():
            if not isinstance(held, HeldArrays):
                continue
            for i in ids.tolist():
                copies = self.copies.setdefault(i, self.first())
                copies[name] = rebuilt(copies[name], message.get(name))
                same = all(torch.equal(v, held.value[k]) for k, v in copies[name].items())
                assert same, f"client {i}'s copy of {name} is not the server's in round {ask.round}"

    def _through(self, reply: Tree) -> Tree:
        message = wire.encode(reply)
        self.counted.up += len(message)
        self.counted.messages += bool(message)
        return wire.decode(message) if message else reply

    def delay(self, delays: Delays) -> None:
        super().delay(delays)
        self.inner.delay(delays)

    def save(self) -> Tree:
        return self.inner.save()

    def load(self, saved: Tree) -> None:
        self.inner.load(saved)

    def evaluate_own(self, metrics: Sequence[str] = ()) -> dict[str, Tensor]:
        return self.inner.evaluate_own(metrics)

    def evaluate_global(
        self, x: Tensor, y: Tensor, weight: Tensor | None = None
    ) -> dict[str, Tensor]:
        return self.inner.evaluate_global(x, y, weight)

    def close(self) -> None:
        self.inner.close()


def _run(
    algorithm: Algorithm,
    fed: Federation,
    engine: Any,
    rounds: int = ROUNDS,
    seed: int = 0,
    **options: Any,
) -> Run:
    return run(algorithm, fed, rounds, seed=seed, engine=engine, progress=False, **options)


def _draws(algorithm: Algorithm, rows: int) -> bool:
    """Whether a pooled reference depends on the seed (mini-batches) at all."""
    return (getattr(algorithm, "batch_size", None) or rows) < rows


def _numbers(result: Run) -> list[Tensor]:
    """All numbers at the end of a run: server state, client states, history (except times)."""
    rows = [
        [row.get(c, float("nan")) for c in result.records.columns if c != "seconds"]
        for row in result.records.rows
    ]
    trees = (result.state, result.clients)
    return [t for t in tree.leaves(trees) if isinstance(t, Tensor)] + [
        torch.tensor(rows, dtype=torch.float64)
    ]


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.equal(x.nan_to_num(7e77), y.nan_to_num(7e77))
        for x, y in zip(a, b, strict=True)
    )


def _same(a: Run, b: Run, message: str) -> None:
    assert _equal(_numbers(a), _numbers(b)), message


def _close(a: Run, b: Run, message: str, tolerance: float = 2e-4) -> None:
    for x, y in zip(tree.leaves(a.state), tree.leaves(b.state), strict=True):
        if isinstance(x, Tensor):
            torch.testing.assert_close(
                x, y, rtol=tolerance, atol=tolerance, msg=lambda m: f"{message}: {m}"
            )
    for column in a.records.columns:
        # A row on the decision boundary may change sides by rounding, so losses are compared, not
        # accuracies.
        if column == "seconds" or "accuracy" in column:
            continue
        got, want = np.array(b.records.values(column)), np.array(a.records.values(column))
        np.testing.assert_allclose(
            got, want, rtol=tolerance, atol=tolerance, err_msg=f"{message}: {column}"
        )


def _finite(result: Run, what: str) -> None:
    assert tree.all_finite(result.state), f"{what}: the state is not finite"
