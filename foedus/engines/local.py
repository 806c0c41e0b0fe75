"""The in-process engine: many clients in one call by `torch.func.vmap`, or one after the other if
that is faster.

The data is not copied. A batch of clients is an index into it, padded to its largest member;
padding has weight 0. Mini-batch training reads rows by that index, so clients of any size share a
batch (`Batching.spread`). For algorithms that read all rows every round, a repeated batch is
stacked once; for adjacent clients of equal size the stack is a view.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from foedus import wire
from foedus.base import heap, random, tree
from foedus.base.rows import Rows
from foedus.base.settings import Means, Settings, check_settings
from foedus.base.tree import Tree
from foedus.core.algorithm import Algorithm, Batching, Client, batch_of
from foedus.core.evaluate import row_scores
from foedus.core.exchange import Ask
from foedus.core.reduce import not_finite
from foedus.core.session import Conditions, Session
from foedus.data.federation import Federation
from foedus.engines.batches import Group, Table, members_of, slices_of
from foedus.errors import ConfigError, ReplyError
from foedus.storage.states import States

_INIT = 0xFFFFFFFD
"""The keys of first states are folded from this number and the client's id."""


_DEVICES: dict[str, Callable[[], bool]] = {
    "cuda": torch.cuda.is_available,
    "mps": torch.backends.mps.is_available,
    "xpu": torch.xpu.is_available,
}


@dataclass(frozen=True)
class Local(Settings):
    """The default engine: simulation in this process.

    Args:
        batch: Whether clients are batched; "auto" asks the algorithm and its model.
        memory: Approximate bytes that one batch may take; more clients are divided into several
            batches.
        device: Where networks are trained and distilled ("cuda", "cuda:1", "mps", "xpu"): the
            clients' rows are kept there. Everything else, the algorithms' own arithmetic and their
            random draws included, stays on the CPU.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
        >>> run = fd.run(fd.FedAvg(fd.Linear()), fed, rounds=5, engine=fd.Local(batch=False))
        >>> run.history.accuracy.iloc[-1] > 0.8
        True
    """

    batch: bool | Literal["auto"] = "auto"
    memory: Annotated[int | float, Ge(1), Means("a positive number of bytes")] = 1 << 30
    device: str = "cpu"

    def __post_init__(self) -> None:
        if isinstance(self.device, torch.device):
            object.__setattr__(self, "device", str(self.device))
        check_settings(self)
        if self.device == "cpu":
            return
        try:
            torch.zeros(1, device=self.device).cpu()
        except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
            known = ["cpu", *(name for name, is_here in _DEVICES.items() if is_here())]
            names = " or ".join(map(repr, known))
            raise ConfigError(
                f"device={self.device!r} cannot be used here ({str(error).splitlines()[0]}); use "
                f"device={names}, or install a PyTorch that knows the device"
            ) from error

    def open(self, algorithm: Algorithm, fed: Federation, seed_key: Tensor) -> LocalSession:
        """Place the data and get ready to answer."""
        return LocalSession(self, algorithm, fed, seed_key)


class LocalSession(Session):
    """One run of one algorithm on this engine."""

    def __init__(self, engine: Local, algorithm: Algorithm, fed: Federation, seed_key: Tensor):
        heap.keep_freed()
        self.engine, self.algorithm, self.spec, self.seed_key = (
            engine,
            algorithm,
            algorithm.row_spec(fed.spec),
            seed_key,
        )
        order = np.argsort(fed.ids, kind="stable")
        self.ids = torch.from_numpy(np.ascontiguousarray(fed.ids[order]))
        self.train = Table(
            fed.data.x_train,
            fed.data.y_train,
            fed.rows,
            fed.offsets,
            order,
            self.spec,
            engine.device,
            fed.data.weights_train,
        )
        self.conditions = Conditions(device=torch.device(engine.device))
        test = (fed.data.x_test, fed.data.y_test, fed.test_rows, fed.test_offsets)
        self._test = lambda: Table(*test, order, self.spec, weights=fed.data.weights_test)
        self.states = States(len(self.ids))
        self.shared = random.fold(seed_key, 0)
        self.prepares = type(algorithm).prepare is not Algorithm.prepare
        self.remembers = algorithm.stateful
        self.absorbs = type(algorithm).absorb is not Algorithm.absorb
        self.batching, self.kinds = algorithm.batching(), algorithm.kinds(self.ids)
        self._everyone: list[Group] | None = None
        self._prepared: dict[int, Tree] = {}

    @cached_property
    def test(self) -> Table:
        return self._test()

    # -- the exchange ------------------------------------------------------------------------------

    def exchange(self, ask: Ask) -> Iterator[tuple[Tensor, Tree, bool]]:
        """Run a step at the clients asked; yields (ids, reply, whether stacked) batch by batch."""
        positions = torch.searchsorted(self.ids, ask.ids)
        if self.absorbs:
            for places, updates in ask.updates:
                self._absorb(
                    ask,
                    positions[places],
                    {name: u for name, u in updates.items() if u is not None},
                )
        if self.kinds is None:
            yield from self._answers(ask, positions)
            return
        kinds = self.kinds[positions]
        for kind in kinds.unique().tolist():
            yield from self._answers(ask, positions[kinds == kind], kind)

    def _absorb(self, ask: Ask, positions: Tensor, updates: dict[str, Tree]) -> None:
        """Clients apply the updates of held values to their states."""
        if not updates:
            return

        def run(client: Client) -> tuple[Tree, Tree]:
            return {}, self.algorithm.absorb(client, **updates)

        keys = torch.zeros(len(positions), 2, dtype=torch.int64)
        if self._loops(self.algorithm.absorb):
            deque(self._each(run, self.train, positions.tolist(), keys), maxlen=0)
            return
        for group in self._groups(positions, wire.nbytes(updates)):
            self._many(run, self.train, group, self._no_keys(group))

    def _answers(
        self, ask: Ask, positions: Tensor, kind: int = 0
    ) -> Iterator[tuple[Tensor, Tree, bool]]:
        """The replies of clients of one kind."""
        step, arguments = getattr(self.algorithm, ask.step), ask.arguments
        batch = batch_of(step)

        def run(client: Client) -> tuple[Tree, Tree]:
            client = replace(client, kind=kind, round=ask.answers)
            reply, state = _pair(step(client, **arguments), ask.step)
            if state is not None and not self.remembers:
                raise ReplyError(
                    f"the client step {ask.step} returns a state, but "
                    f"{type(self.algorithm).__name__} has no init"
                )
            if ask.quantise:
                reply = wire.quantise(reply, ask.quantise, random.fold(client.key, 0xFFFFFFFF))
            return reply, state

        if self._loops(step):
            keys = random.fold(ask.key, ask.round, ask.exchange, self.ids[positions])
            # Large models: a client a core is faster than one client on all cores. A step that says
            # that it must be looped may call anything, so those go strictly one after the other.
            workers = 1 if self.batching.pays or batch == "loop" else torch.get_num_threads()
            for position, reply in self._each(run, self.train, positions.tolist(), keys, workers):
                self._check_states(ask.round, positions.new_tensor([position]), reply)
                yield self.ids[position : position + 1], reply, False
            return
        at_once = batch == "whole" and not ask.quantise and not self.remembers
        for group in self._groups(positions, wire.nbytes(arguments)):
            ids = self.ids[group.positions]
            keys = random.fold(ask.key, ask.round, ask.exchange, ids)
            reply = (self._stacked if at_once else self._many)(run, self.train, group, keys)
            self._check_states(ask.round, group.positions, reply)
            yield ids, reply, True

    def _check_states(self, round: int, positions: Tensor, reply: Tree) -> None:
        """Check that clients' models are finite, for algorithms that send nothing."""
        if self.remembers and not tree.leaves(reply):
            states = self.states.get_many(positions)
            if not tree.all_finite(states):
                raise not_finite(
                    [states], round, self.ids[positions], "state", self.algorithm.remedy
                )

    def _loops(self, step: Callable) -> bool:
        if batch_of(step) == "loop" or not self.batching.alike:
            return True
        if self.engine.batch == "auto":
            return not self.batching.pays
        return not self.engine.batch

    def _groups(self, positions: Tensor, payload: int) -> list[Group]:
        """The batches for these clients.

        Batches of the whole federation are kept, with their prepared values.
        """
        table, spread = self.train, self.batching.spread

        def limit(rows: int, sent: int) -> int:
            each = self.batching.footprint(rows, table.row_bytes) + 8 * sent + 1024
            return max(1, int(self.engine.memory // each))

        whole = len(positions) == len(self.ids)
        if not whole and not self.prepares:
            return [
                Group(p) for p in table.groups(positions, spread, lambda rows: limit(rows, payload))
            ]
        if self._everyone is None:
            # Cut by rows only: cached batches must not depend on which exchange came first.
            everyone = table.groups(
                torch.arange(len(self.ids)), spread, lambda rows: limit(rows, 0)
            )
            self._everyone = [self._ready(Group(p)) for p in everyone]
        groups = (
            self._everyone
            if whole
            else [g for g in (members_of(g, positions) for g in self._everyone) if g]
        )
        sizes = [limit(int(table.sizes[g.positions].max()), payload) for g in groups]
        return [
            p
            for g, n in zip(groups, sizes, strict=True)
            for p in ([g] if len(g.positions) <= n else slices_of(g, n))
        ]

    def _ready(self, group: Group) -> Group:
        """Compute the cached tensors of a batch that is used in every round."""
        group.width = int(self.train.sizes[group.positions].max())
        if self.prepares:
            prepare = lambda client: (self.algorithm.prepare(client.data), None)  # noqa: E731
            group.prepared = self._many(
                prepare, self.train, group, self._no_keys(group), stateless=True
            )
        elif self.batching.spread < float("inf"):
            group.stacked = self.train.stack(group.positions)
        return group

    def _late(self, positions: Tensor | int) -> tuple[Tensor | int, Tensor | int, int]:
        """Rounds that clients' messages take, up and down, and the longest round trip of all."""
        delays = self.conditions.delays
        return (
            (0, 0, 0)
            if delays is None
            else (delays.up[positions], delays.down[positions], delays.longest)
        )

    def _no_keys(self, group: Group) -> Tensor:
        return torch.zeros(len(group.positions), 2, dtype=torch.int64)

    def _stacked(self, run: Callable, table: Table, group: Group, keys: Tensor) -> Tree:
        """`run` once for all clients of a batch, if the step allows it (`stacked`) and clients keep
        no state.
        """
        index, weight = table.index(group.positions, group.width)
        late = self._late(group.positions)
        rows = Rows(table.x, table.y, index, weight, self.spec, group.stacked, table.w)
        ids = self.ids[group.positions]
        reply, _ = run(Client(ids, rows, group.prepared, None, keys, self.shared, self.spec, *late))
        if any(isinstance(t, Tensor) and t.shape[:1] != ids.shape for t in tree.leaves(reply)):
            raise ReplyError(
                f"a stacked client step was asked for {len(ids)} replies at once; all tensors must "
                "begin with that dimension"
            )
        return reply

    def _many(
        self, run: Callable, table: Table, group: Group, keys: Tensor, stateless: bool = False
    ) -> Tree:
        """`run` at all clients of a batch by one vmap; new client states are kept."""
        positions = group.positions
        index, weight = table.index(positions, group.width if table is self.train else 0)
        state = None if stateless else self._states(group)
        late = self._late(positions)
        inputs, form = tree.flatten(
            ((group.stacked, group.prepared, state), self.ids[positions], index, weight, keys, late)
        )
        where = [i for i, leaf in enumerate(inputs) if isinstance(leaf, Tensor)]
        kept: dict[str, Any] = {}

        def one(*tensors: Tensor) -> tuple[Tensor, ...]:
            leaves = list(inputs)
            for i, t in zip(where, tensors, strict=True):
                leaves[i] = t
            (stacked, prepared, state), id_, index, weight, key, late = tree.unflatten(leaves, form)
            rows = Rows(table.x, table.y, index, weight, self.spec, stacked, table.w)
            reply, new = run(Client(id_, rows, prepared, state, key, self.shared, self.spec, *late))
            kept["same"] = new is state or new is None
            out, kept["form"] = tree.flatten(
                (reply, None if kept["same"] and not stateless else new)
            )
            kept["out"] = out
            return id_, *(t for t in out if isinstance(t, Tensor))

        _, *made = torch.func.vmap(one)(*(inputs[i] for i in where))
        results = iter(made)
        out = [next(results) if isinstance(t, Tensor) else t for t in kept["out"]]
        reply, new = tree.unflatten(out, kept["form"])
        if not kept["same"] and not stateless:
            self.states.put_many(positions, new)
        return reply

    def _each(
        self, run: Callable, table: Table, positions: list[int], keys: Tensor, workers: int = 1
    ) -> Iterator[tuple[int, Tree]]:
        """`run` at one client after the other, without padding; with several workers, in as many
        threads of one core each.
        """

        def finish(position: int, client: Client, result: tuple[Tree, Tree]) -> tuple[int, Tree]:
            reply, new = result
            if new is not client.state and new is not None:
                self.states.put(position, new)
            return position, reply

        clients = (self._client(table, p, key) for p, key in zip(positions, keys, strict=True))
        if workers == 1:
            for position, client in zip(positions, clients, strict=True):
                yield finish(position, client, run(client))
            return
        pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
        waiting: deque = deque()
        try:
            for position, client in zip(positions, clients, strict=True):
                waiting.append((position, client, pool.submit(run, client)))
                if len(waiting) > 2 * workers:  # replies are large here: only a few may wait
                    position, client, future = waiting.popleft()
                    yield finish(position, client, future.result())
            while waiting:
                position, client, future = waiting.popleft()
                yield finish(position, client, future.result())
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(workers)

    def _client(self, table: Table, position: int, key: Tensor) -> Client:
        """One client as its step sees it; with its first state, if it is new."""
        if self.prepares and position not in self._prepared:
            self._prepared[position] = self.algorithm.prepare(self.train.one(position))
        id_, prepared, state = (
            self.ids[position],
            self._prepared.get(position),
            self.states.get(position),
        )
        late = self._late(position)
        if self.remembers and state is None:
            first_key = random.fold(self.seed_key, _INIT, id_)
            client = Client(
                id_,
                self.train.one(position),
                prepared,
                None,
                first_key,
                self.shared,
                self.spec,
                *late,
            )
            state = self.algorithm.init(client)
            self.states.put(position, state)
        return Client(id_, table.one(position), prepared, state, key, self.shared, self.spec, *late)

    def state_of(self, position: int) -> Tree:
        """The state of one client; its first state, if it has not taken part yet."""
        return self._client(self.train, position, self.seed_key).state if self.remembers else None

    def _states(self, group: Group) -> Tree:
        """The states of a batch, stacked; new clients get their first one."""
        if not self.remembers:
            return None
        known = self.states.known(group.positions)
        if not bool(known.all()):
            new = members_of(group, group.positions[~known])
            assert new is not None
            keys = random.fold(self.seed_key, _INIT, self.ids[new.positions])
            init = lambda client: (self.algorithm.init(client), None)  # noqa: E731
            self.states.put_many(
                new.positions, self._many(init, self.train, new, keys, stateless=True)
            )
        return self.states.get_many(group.positions)

    # -- evaluation of personal models -------------------------------------------------------------

    def evaluate_own(self, metrics: Sequence[str] = ()) -> dict[str, Tensor]:
        """If the algorithm is personal: each client's model on its own test rows.

        Sums by client, in id order; metrics: the metrics that need the outputs of all rows, client
        after client, if any.
        """

        def run(client: Client) -> tuple[Tree, Tree]:
            data = client.data
            out = self.algorithm.outputs(client, data.x)
            weight = data.weight if data.worth is None else data.weight * data.worth
            scores = _scores(self.algorithm, out, data.y, weight, self.spec.classes)
            return scores | {"outputs": out} if metrics else scores, client.state

        sizes = self.test.sizes
        parts = self._everywhere(run, self.test, torch.nonzero(sizes > 0).flatten())
        if self.test.w is not None:
            parts["weight"] = self.test.weight_sums()
        if metrics:  # a worker whose clients have no test rows
            parts.setdefault("outputs", torch.zeros(0, *self.spec.output_shape).double())
        return {**parts, "rows": sizes}

    def evaluate_global(
        self, x: Tensor, y: Tensor, weight: Tensor | None = None, block: int = 1024
    ) -> dict[str, Tensor]:
        """If the algorithm is personal: each client's model on the same rows."""
        block = max(1, block // (self.spec.steps or 1))
        total: dict[str, Tensor] = {}
        total_weight = None if weight is None else weight.double().sum()
        worth = torch.ones(len(x)) if weight is None else weight.float()
        for bx, by, weight in zip(x.split(block), y.split(block), worth.split(block), strict=True):

            def run(
                client: Client, bx: Tensor = bx, by: Tensor = by, weight: Tensor = weight
            ) -> tuple[Tree, Tree]:
                out = self.algorithm.outputs(client, bx)
                return _scores(self.algorithm, out, by, weight, self.spec.classes), client.state

            part = self._everywhere(run, self.train, torch.arange(len(self.ids)), rows=block)
            total = {k: v + total[k] if k in total else v for k, v in part.items()}
        if total_weight is not None:
            total["weight"] = total_weight.expand(len(self.ids))
        return {**total, "rows": torch.full((len(self.ids),), len(x))}

    def _everywhere(
        self, run: Callable, table: Table, positions: Tensor, rows: int | None = None
    ) -> dict[str, Tensor]:
        sums = {
            k: torch.zeros(len(self.ids), dtype=torch.float64)
            for k in ("loss", "hits" if self.spec.classes else "error")
        }
        if self._loops(self.algorithm.outputs):
            no_keys = torch.zeros(len(positions), 2, dtype=torch.int64)
            for p, scores in self._each(run, table, positions.tolist(), no_keys):
                self._take_outputs(sums, table, torch.tensor([p]), scores.pop("outputs", None))
                for k, v in scores.items():
                    sums[k][p] = v
            return sums
        outputs = 4 * (self.spec.steps or 0) * self.spec.outputs
        limit = lambda n: max(  # noqa: E731
            1, int(self.engine.memory // (4 * (rows or n) * (table.row_bytes + outputs) + 4096))
        )
        groups = [Group(p) for p in table.groups(positions, Batching.spread, limit)]
        if self.prepares:
            groups = self._groups(positions, 0)
        for group in (Group(g.positions, None, g.prepared, g.width) for g in groups):
            scores = self._many(run, table, group, self._no_keys(group))
            self._take_outputs(sums, table, group.positions, scores.pop("outputs", None))
            for k, v in scores.items():
                sums[k][group.positions] = v.double()
        return sums

    def _take_outputs(
        self, sums: dict[str, Tensor], table: Table, positions: Tensor, outputs: Tensor | None
    ) -> None:
        """Write the outputs of some clients' rows, (c, n, *output_shape) with padding or (n,
        *output_shape), to their places among those of all rows.
        """
        if outputs is None:
            return
        form = self.spec.output_shape
        outputs = outputs.reshape(len(positions), -1, *form).double()
        if "outputs" not in sums:
            sums["outputs"] = outputs.new_zeros(len(table.rows), *form)
        column = torch.arange(outputs.shape[1])
        real = column < table.sizes[positions].unsqueeze(1)
        place = table.starts[positions].unsqueeze(1) + column
        sums["outputs"][place[real]] = outputs[real]

    # -- checkpoints -------------------------------------------------------------------------------

    def save(self) -> Tree:
        """All client states, as a tree."""
        return self.states.save()

    def load(self, saved: Tree) -> None:
        """Restore the client states of a checkpoint."""
        self.states.load(saved)

    def save_prepared(self) -> Tree:
        """The results of `prepare` so far, as a tree, for an engine that stores them."""
        groups = [
            {"positions": g.positions, "prepared": g.prepared, "width": g.width}
            for g in self._everyone or []
        ]
        return {"groups": groups, "each": [[p, prepared] for p, prepared in self._prepared.items()]}

    def load_prepared(self, saved: Tree) -> None:
        """Restore what `save_prepared` returned."""
        groups = [Group(g["positions"], None, g["prepared"], g["width"]) for g in saved["groups"]]
        self._everyone = groups or None
        self._prepared = dict(saved["each"])

    def close(self) -> None:
        """Give memory back to the system."""
        heap.give_back()


def _pair(result: Any, step: str) -> tuple[Tree, Tree]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise ReplyError(
            f"the client step {step} must return (reply, new client state), not "
            f"{type(result).__name__}"
        )
    return result


def _scores(
    algorithm: Algorithm, outputs: Tensor, y: Tensor, weight: Tensor, classes: int | None
) -> dict[str, Tensor]:
    return {k: (v * weight).sum(-1) for k, v in row_scores(algorithm, outputs, y, classes).items()}
