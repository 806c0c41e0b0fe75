"""`fd.run`: rounds of one algorithm on one federation, measured, checkpointed, and the same again whenever asked."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import time
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from foedus.core import checkpoint as files
from foedus.core import random
from foedus.core.aggregation import Aggregation, Aggregator, BudgetSpent, Setting
from foedus.core.algorithm import Algorithm, Client, Predictor, row_scores
from foedus.core.arguments import check_arguments, checkpoint_file, differences, refuse_to_overwrite
from foedus.core.callbacks import Callback, Callbacks
from foedus.core.clients import Clients, Ledger, NothingArrived, Poisson, cohort, expected
from foedus.core.config import from_config, subclasses, to_config
from foedus.core.history import History
from foedus.core.progress import Interrupts, RoundProgress
from foedus.core.spec import Spec
from foedus.core.states import States
from foedus.core.tree import State, Tree
from foedus.core.tree import leaves as tree_leaves
from foedus.errors import CheckpointError, ConfigError, DivergenceError, FoedusError, TooFewClients

if TYPE_CHECKING:
    import pandas as pd

    from foedus.data.federation import Federation

_COHORT = 0xFFFFFFFE


def run(
    algorithm: Algorithm,
    fed: Federation,
    rounds: int,
    *,
    seed: int = 0,
    engine: Any = None,
    participation: float | Poisson = 1.0,
    evaluate_every: int = 1,
    target: float | None = None,
    quantise: str | None = None,
    aggregation: Aggregation | None = None,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_every: int = 1,
    resume: bool = False,
    start: Run | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
) -> Run:
    """Run an algorithm on a federation.

    rounds: how many. seed: of everything random. engine: `fd.Local()` unless given.
    participation: the fraction of clients drawn without replacement in each round, or `fd.Poisson(p)`.
    evaluate_every: evaluate after every so many rounds, and after the last (0: never).
    target: stop once the accuracy reaches it (or the mean squared error falls to it).
    quantise: send replies as "float16", "bfloat16" or "int8", rounded stochastically without bias.
    aggregation: how replies are averaged, if not by adding them up; see `foedus.core.aggregation`.
    checkpoint: a file, written atomically after every `checkpoint_every` rounds; `resume=True` goes on from it, to the
    numbers of an uninterrupted run. The one before it is kept as PATH.previous, and is used where the newest is damaged;
    `run.notes` says so. Ctrl-C finishes the round, writes the checkpoint and stops.
    start: a finished run whose global model this one starts from (a warm start); what that run sent is not counted here.
    callbacks: told of the start, of every row of the history and of the end: `[fd.TensorBoard("runs")]`; see `fd.Callback`.
    progress: show a bar; by default only on a terminal.

    Example:
        >>> fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.5)
        >>> fd.run(fd.FedAvg(fd.Linear()), fed, rounds=20).history
    """
    check_arguments(
        algorithm,
        fed,
        rounds,
        seed=seed,
        engine=engine,
        participation=participation,
        evaluate_every=evaluate_every,
        target=target,
        quantise=quantise,
        aggregation=aggregation,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        resume=resume,
        callbacks=callbacks,
    )
    rounds, seed = int(rounds), int(seed)
    algorithm.check(fed.spec)
    if algorithm.pooled:
        fed, participation, quantise, aggregation = fed.pool(), 1.0, None, None
    if engine is None:
        from foedus.engines.local import Local  # the default, loaded only when it is needed

        engine = Local()
    path, told, name = checkpoint_file(checkpoint), Callbacks(callbacks), f"{type(algorithm).__name__}-seed{seed}"
    loop = _Loop(algorithm, fed, rounds, seed, engine, participation, evaluate_every, target, quantise)
    loop.first = None if start is None else _model_of(start)
    try:
        loop.open(aggregation, path, resume)
        if path:
            files.sweep(path)
        if resume and files.exists(path):
            loop.resume(path)
            told.start(name, loop.settings, loop.history.rows)
        else:
            if path:
                refuse_to_overwrite(path)
            told.start(name, loop.settings, [])
            loop.start()
            if path:
                loop.save(path)
            told.row(loop.history.rows[-1])
        with (
            RoundProgress(type(algorithm).__name__, rounds, progress) as bar,
            Interrupts(enabled=path is not None) as interrupts,
        ):
            bar.update(loop.done, loop.history)
            while loop.done < rounds and not loop.stopped:
                made = loop.step()
                bar.update(loop.done, loop.history)
                finished = loop.done == rounds or loop.stopped
                if path and (interrupts.asked or finished or loop.done % checkpoint_every == 0):
                    loop.save(path)
                if made:
                    told.row(loop.history.rows[-1])
                interrupts.raise_if_asked(
                    f"stopped after round {loop.done}; go on with resume=True and checkpoint={str(path)!r}"
                )
        result = loop.result()
        told.end(result, None)
        return result
    except DivergenceError as error:
        error.run = loop.result()
        if path and path.exists():
            error.add_note(f"The last good state is in {path}; error.run holds the rounds before.")
        told.end(error.run, error)
        raise
    except BaseException as error:
        told.end(None, error)
        raise
    finally:
        loop.session.close()


class _Loop:
    """The state of a run between two rounds, and the step from one round to the next."""

    def __init__(self, algorithm, fed, rounds, seed, engine, participation, evaluate_every, target, quantise):
        self.given, self.algorithm = algorithm, algorithm.seeded(seed)
        self.fed, self.rounds, self.engine = fed, rounds, engine
        self.participation, self.evaluate_every, self.target, self.quantise = participation, evaluate_every, target, quantise
        self.seed, self.key = seed, random.key(seed)
        self.ids, order = np.unique(fed.ids, return_index=True)
        self.ids, self.sizes = torch.from_numpy(self.ids), torch.from_numpy(fed.sizes[order])
        self.rows = int(self.sizes.sum())
        self.session = engine.open(self.algorithm, fed, self.key)
        self.aggregation: Aggregation | None = None
        self.aggregator: Aggregator | None = None
        self.ledger, self.history, self.seconds = Ledger(), History(), 0.0
        self.state: State | None = None
        self.first: Tree = None  # the model of another run to start from
        self.done = 0
        self.reached = False
        self.only_last: list[str] = []
        self.notes: list[str] = []
        self.saved: int | None = None  # the round of the last checkpoint

    def open(self, aggregation: Aggregation | None, path: Path | None, resume: bool) -> None:
        """Get ready to put replies together otherwise than by adding them up."""
        self.aggregation = aggregation
        if aggregation is not None:
            about = (
                self.algorithm,
                self.session,
                self.ids,
                self.sizes,
                self.participation,
                self.rounds,
                self.seed,
                self.quantise,
            )
            self.aggregator = aggregation.open(Setting(*about, path, resume))

    # -- rounds ------------------------------------------------------------------------------------------------------

    @property
    def stopped(self) -> bool:
        """Whether the run ends here, whatever rounds are left."""
        return self.reached or (self.aggregator is not None and self.aggregator.spent is not None)

    def clients(self, round: int, positions: torch.Tensor) -> Clients:
        ids, sizes = self.ids[positions], self.sizes[positions]
        return Clients(
            session=self.session,
            algorithm=self.algorithm,
            ids=ids,
            sizes=sizes,
            total=len(self.ids),
            total_rows=self.rows,
            spec=self.fed.spec,
            round=round,
            seed_key=self.key,
            ledger=self.ledger,
            participation=expected(self.participation, len(self.ids)),
            quantise=self.quantise,
            free=self.algorithm.pooled,
            taking=len(ids),
            aggregator=self.aggregator,
        )

    def start(self) -> None:
        began = time.perf_counter()
        clients = self.clients(0, torch.arange(len(self.ids)))
        try:
            self.state = self.algorithm.start(clients)
        except NothingArrived as error:
            raise TooFewClients(f"{error}: there is nothing to start from") from None
        if self.first is not None:
            self.state = self.algorithm.begin_at(self.state, self.first)
        self.seconds += time.perf_counter() - began
        self._record(clients)

    def step(self) -> bool:
        """Make a round; whether it was made, for the aggregator may end the run before it."""
        round = self.done + 1
        if self.aggregator is not None and self.aggregator.draws:
            positions = torch.arange(len(self.ids))
        else:
            positions = cohort(self.participation, len(self.ids), random.fold(self.key, round, _COHORT))
        clients = self.clients(round, positions)
        began = time.perf_counter()
        before = self.state
        self._readmit()
        try:
            if len(positions):
                clients = self._round(clients, positions)
        except BudgetSpent as error:
            self.state, self.aggregator.spent = before, str(error)
            return False
        self.seconds += time.perf_counter() - began
        self.done = round
        try:
            self._record(clients)
        except DivergenceError:
            self.state, self.done = before, round - 1
            raise
        return True

    def _round(self, clients: Clients, positions: torch.Tensor) -> Clients:
        """The algorithm's round; the clients that it was made with."""
        with contextlib.suppress(NothingArrived):
            try:
                self.state = self.algorithm.round(clients, self.state)
            except TooFewClients:
                if not self._readmit():
                    raise
                clients = self.clients(clients.round, positions)  # once more, with those who begin anew
                self.session.again()
                self.state = self.algorithm.round(clients, self.state)
        return clients

    def _readmit(self) -> bool:
        """Take back clients who have lost their states, where the algorithm has a rule for it; whether there are any."""
        lost = getattr(self.session, "lost", None)
        if not lost:
            return False
        ids = torch.tensor(sorted(lost))
        state = self.algorithm.readmit(self.state, ids)
        self.session.readmit(ids.tolist(), state is not None)
        self.state = self.state if state is None else state
        return state is not None

    def _record(self, clients: Clients) -> None:
        row = {
            "round": clients.round,
            "seconds": self.seconds,
            "bytes_up": self.ledger.bytes_up,
            "bytes_down": self.ledger.bytes_down,
            "messages_up": self.ledger.messages_up,
            "clients": len(clients) if clients.round else 0,
            **clients.metrics,
            **(self.aggregator.row() if self.aggregator else {}),
        }
        due = self.evaluate_every and self.done % self.evaluate_every == 0
        self.only_last = []
        if due or (self.evaluate_every and (self.done == self.rounds or self.stopped)):
            metrics = self._evaluate(clients)
            row.update(metrics)
            self.only_last = [] if due else list(metrics)
        self.history.append(row)

    def _evaluate(self, clients: Clients) -> dict[str, float]:
        data, metrics = self.fed.data, {}
        metric = "accuracy" if data.classes else "mse"
        if self.algorithm.personal:
            sums = self.session.evaluate_own()
            metrics |= {f"own_{k}": v for k, v in _averages(sums, data.classes).items()}
            bad = self.ids[~torch.isfinite(sums["loss"])].tolist() if "loss" in sums else []
            if bad:
                names = ", ".join(map(str, bad[:10]))
                raise DivergenceError(
                    f"round {clients.round}: the loss of client {names} on its own test rows is not finite; "
                    f"{self.algorithm.remedy}",
                    clients.round,
                    bad,
                )
        if len(data.x_test):
            predictor = self.algorithm.predictor(self.state)
            if predictor is not None:
                metrics |= _score(self.algorithm, predictor, data)
            elif self.algorithm.personal:
                everywhere = self.session.evaluate_global(torch.from_numpy(data.x_test), torch.from_numpy(data.y_test))
                metrics |= _averages(everywhere, data.classes)
        if not math.isfinite(metrics.get("loss", 0.0)):
            ids = clients.ids.tolist()
            raise DivergenceError(
                f"round {clients.round}: the loss on the test set is {metrics['loss']}; the clients of this round were "
                f"{', '.join(map(str, ids[:10]))}{' ...' if len(ids) > 10 else ''}; {self.algorithm.remedy}",
                clients.round,
                ids,
            )
        if self.target is not None and metric in metrics:
            self.reached = metrics[metric] >= self.target if data.classes else metrics[metric] <= self.target
        return metrics

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides the numbers of a run."""
        return {
            "algorithm": to_config(self.given),
            "federation": {
                "data": self.fed.data.name,
                "scheme": self.fed.scheme,
                "settings": to_config({k: v for k, v in self.fed.settings.items() if not isinstance(v, np.ndarray)}),
                "clients": len(self.fed),
                "rows": int(self.fed.sizes.sum()),
            },
            "seed": self.seed,
            "participation": to_config(self.participation),
            "evaluate_every": self.evaluate_every,
            "quantise": self.quantise,
            "aggregation": to_config(self.aggregation),
            "start": None if self.first is None else _crc(self.first),
        }

    @cached_property
    def fingerprint(self) -> dict[str, int]:
        """Checksums of who holds which rows, and of the rows themselves: a checkpoint belongs to one federation."""
        fed, data = self.fed, self.fed.data
        parts = {"clients": (fed.ids, fed.offsets, fed.rows), "data": (data.x_train, data.y_train)}
        return {name: reduce(lambda c, a: zlib.crc32(np.ascontiguousarray(a), c), arrays, 0) for name, arrays in parts.items()}

    def save(self, path: Path) -> None:
        ledger = vars(self.ledger)
        meta = {
            "kind": "checkpoint",
            "settings": self.settings,
            "rounds_done": self.done,
            "seconds": self.seconds,
            "ledger": ledger,
            "history": self.history.to_json(),
            "only_last": self.only_last,
            "aggregator": self.aggregator.save() if self.aggregator else {},
            "fingerprint": self.fingerprint,
            "notes": self.notes,
        }
        try:
            files.write(path, {"state": self.state, "clients": self.session.save()}, meta, files.previous_of(path))
        except CheckpointError as error:
            if self.saved is not None:
                error.add_note(f"The checkpoint of round {self.saved} is still good: resume=True goes on from it.")
            raise
        self.saved = self.done

    def resume(self, path: Path) -> None:
        path, trees, meta, note = files.newest(path)
        if meta.get("kind") != "checkpoint":
            raise CheckpointError(f"{path} is not a checkpoint of a run")
        try:
            differ = differences(meta["settings"], self.settings)
            differ += [f"the {k} of the federation differ" for k, v in self.fingerprint.items() if meta["fingerprint"][k] != v]
            if differ:
                raise CheckpointError(f"{path} belongs to another run: {'; '.join(differ)}. Remove it, or use its settings")
            self.state, self.done, self.seconds = trees["state"], int(meta["rounds_done"]), float(meta["seconds"])
            self.ledger, self.history, self.saved = Ledger(**meta["ledger"]), History(meta["history"]), self.done
            self.notes = [*meta.get("notes", []), *([note] if note else [])]
            self.session.load(trees["clients"])
            if self.aggregator:
                self.aggregator.load(meta["aggregator"])
            if self.done > self.rounds:
                raise CheckpointError(f"{path} is at round {self.done} already; rounds={self.rounds} must not be less")
            if self.done < self.rounds:  # what was evaluated only because the run ended there
                for name in meta["only_last"]:
                    self.history.rows[-1].pop(name, None)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {error!r}") from error
        if note:
            warnings.warn(note, stacklevel=3)
        if self.target is not None:
            last = self.history.last("accuracy" if self.fed.data.classes else "mse")
            self.reached = last >= self.target if self.fed.data.classes else last <= self.target

    def result(self) -> Run:
        clients = {"ids": self.ids, "states": self.session.save()}
        about = (self.settings, clients, self.fed, self.engine, self.notes)
        return Run(self.algorithm, self.fed.spec, self.state, self.history, *about)


@dataclass(eq=False)
class Run:
    """What a run gives: `history` (one row a round), `model` (numpy in, numpy out), `state`, `settings`.

    notes: what happened to the run that its numbers do not show, such as a damaged checkpoint.
    """

    algorithm: Algorithm
    spec: Spec
    state: State
    records: History
    settings: dict[str, Any]
    clients: Tree = None
    fed: Federation | None = None
    engine: Any = None
    notes: list[str] = field(default_factory=list)

    @cached_property
    def history(self) -> pd.DataFrame:
        """One row a round (row 0: after the start); see `foedus.core.history`."""
        return self.records.frame()

    @cached_property
    def model(self) -> Predictor:
        """The global model."""
        predictor = self.algorithm.predictor(self.state)
        if predictor is None:
            name = type(self.algorithm).__name__
            if self.algorithm.personal:
                raise FoedusError(f"{name} has no global model; run.model_of(client) gives a client's own")
            raise FoedusError(f"{name} makes no model (it defines no predictor); its result is run.state")
        return predictor

    def model_of(self, client: int) -> Predictor:
        """The model that a client ends up with: its own where the algorithm is personal, else the global one."""
        if not self.algorithm.personal:
            return self.model
        ids = self.clients["ids"].tolist()
        if client not in ids:
            raise FoedusError(f"there is no client {client!r}; clients are {', '.join(map(str, ids[:20]))}")
        states = States(len(ids))
        states.load(self.clients["states"])
        state, key = states.get(ids.index(client)), torch.zeros(2, dtype=torch.int64)
        if state is None:
            raise FoedusError(f"client {client} has not taken part in any round, so it has no model of its own")
        member = Client(torch.tensor(client), None, None, state, key, key, self.spec)
        return Predictor(lambda x: self.algorithm.outputs(member, x), self.spec)

    def per_client(self) -> pd.DataFrame:
        """Each client's test rows, and loss and accuracy (or mse) on them of the model it ends up with."""
        import pandas as pd

        if self.fed is None:
            raise FoedusError("per_client needs the federation, which is not part of a saved run")
        fed, data = self.fed, self.fed.data
        if self.algorithm.personal:
            session = self.engine.open(self.algorithm, fed, random.key(self.settings["seed"]))
            session.load(self.clients["states"])
            sums = session.evaluate_own()
            session.close()
        else:
            owner = np.repeat(np.arange(len(fed)), np.diff(fed.test_offsets))
            rows = _row_scores(self.algorithm, self.model, data)
            sums = {k: torch.from_numpy(np.bincount(owner, v.numpy()[fed.test_rows], len(fed))) for k, v in rows.items()}
            order = torch.from_numpy(np.argsort(fed.ids, kind="stable"))
            sums = {k: v[order] for k, v in (sums | {"rows": torch.from_numpy(np.diff(fed.test_offsets))}).items()}
        count = sums["rows"].double()
        table = {"client": self.clients["ids"], "test_rows": sums["rows"], "loss": sums["loss"] / count}
        table |= {"accuracy": sums["hits"] / count} if data.classes else {"mse": sums["error"] / count}
        return pd.DataFrame({k: v.numpy() for k, v in table.items()})

    def save(self, path: str | os.PathLike) -> None:
        """Write the run to one file (safetensors, with JSON inside): state, client models if personal, history, settings."""
        meta = {
            "kind": "run",
            "settings": self.settings,
            "history": self.records.to_json(),
            "notes": self.notes,
            "spec": {"shape": list(self.spec.shape), "classes": self.spec.classes, "outputs": self.spec.outputs},
        }
        clients = self.clients if self.algorithm.personal else None
        files.sweep(Path(path))
        files.write(path, {"state": self.state, "clients": clients}, meta)

    @classmethod
    def load(cls, path: str | os.PathLike, algorithm: Algorithm | None = None) -> Run:
        """Read a saved run. Pass the algorithm if it holds what text cannot describe (a `torch.nn.Module`)."""
        trees, meta = files.read(path)
        try:
            return cls._of(path, trees, meta, algorithm)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointError(f"{path} is damaged: {error!r}") from error

    @classmethod
    def _of(cls, path: str | os.PathLike, trees: dict[str, Tree], meta: dict[str, Any], algorithm: Algorithm | None) -> Run:
        if meta.get("kind") != "run":
            raise CheckpointError(f"{path} is a checkpoint, not a saved run: continue it with fd.run(..., resume=True)")
        if algorithm is None:
            try:
                algorithm = known_algorithm(meta["settings"]["algorithm"])
            except ConfigError as error:
                raise CheckpointError(f"{path}: {error}; pass the algorithm: fd.Run.load(path, algorithm=...)") from error
        elif type(algorithm) is not Algorithm and (
            differ := differences(meta["settings"]["algorithm"], to_config(algorithm), "algorithm")
        ):
            raise CheckpointError(f"{path} was made by another algorithm than the one passed: {'; '.join(differ)}")
        algorithm = algorithm.seeded(meta["settings"]["seed"])
        spec = Spec(tuple(meta["spec"]["shape"]), meta["spec"]["classes"], meta["spec"]["outputs"])
        notes = list(meta.get("notes", []))
        return cls(algorithm, spec, trees["state"], History(meta["history"]), meta["settings"], trees["clients"], notes=notes)

    def __repr__(self) -> str:
        shown = [c for c in ("loss", "accuracy", "mse", "own_accuracy", "own_mse") if c in self.records.columns]
        values = ", ".join(f"{c} {self.records.last(c):.4f}" for c in shown)
        megabytes = (self.records.last("bytes_up") + self.records.last("bytes_down")) / 1e6
        return f"<Run {type(self.algorithm).__name__}: {len(self.records) - 1} rounds, {megabytes:.2f} MB, {values}>"


def known_algorithm(config: Any) -> Algorithm:
    """The algorithm that `to_config` described, if text can describe it."""
    from foedus.geometry import Domain, Mirror, ModelDomain
    from foedus.models import FeatureMap, Model, Oracle, Training

    importlib.import_module("foedus.algorithms")  # so that our own classes are known
    known = {**subclasses(Algorithm, Domain, FeatureMap, Mirror, Model, ModelDomain, Oracle), "Training": Training}
    algorithm = from_config(config, known, "algorithm")
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(f"algorithm: {str(config)[:80]!r} describes no algorithm")
    return algorithm


def _crc(w: Tree) -> int:
    return reduce(lambda c, t: zlib.crc32(np.ascontiguousarray(t.detach().cpu().numpy()), c), tree_leaves(w), 0)


def _model_of(run: Run) -> Tree:
    if not isinstance(run, Run) or "w" not in run.state:
        raise ConfigError(f"start={run!r} must be a finished run whose state has a global model w")
    return run.state["w"]


def _row_scores(algorithm: Algorithm, predictor: Predictor, data: Any) -> dict[str, torch.Tensor]:
    """In blocks of rows: the outputs of all rows at once may be more than memory holds (a vocabulary of classes)."""
    blocks = zip(*(torch.from_numpy(t).split(predictor.block) for t in (data.x_test, data.y_test)), strict=True)
    parts = [row_scores(algorithm, predictor.outputs(x), y, data.classes) for x, y in blocks]
    return {k: torch.cat([p[k] for p in parts]).double() for k in parts[0]}


def _score(algorithm: Algorithm, predictor: Predictor, data: Any) -> dict[str, float]:
    rows = _row_scores(algorithm, predictor, data)
    metric = {"accuracy": rows["hits"]} if data.classes else {"mse": rows["error"]}
    return {"loss": float(rows["loss"].mean()), **{k: float(v.mean()) for k, v in metric.items()}}


def _averages(sums: dict[str, torch.Tensor], classes: int | None) -> dict[str, float]:
    """Averages over rows of what was summed by client, and the worst client's."""
    count = sums["rows"].double()
    total, some = count.sum(), count > 0
    if total == 0:
        return {}
    name, key = ("accuracy", "hits") if classes else ("mse", "error")
    each = sums[key][some] / count[some]
    worst = each.min() if classes else each.max()
    return {"loss": float(sums["loss"].sum() / total), name: float(sums[key].sum() / total), f"{name}_worst": float(worst)}
