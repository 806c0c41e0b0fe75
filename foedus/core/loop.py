"""The state of a run between two rounds, its checkpoints, and the step from round to round."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from foedus.base import random
from foedus.base.rows import tensor_of
from foedus.base.tree import State, Tree
from foedus.core.aggregation import Aggregation, Aggregator, BudgetSpent, Setting
from foedus.core.arguments import check_sites, differences, without_fingerprint
from foedus.core.clients import Clients
from foedus.core.describe import to_config
from foedus.core.evaluate import averages
from foedus.core.exchange import NothingArrived
from foedus.core.history import History
from foedus.core.measures import Measures, PerClient
from foedus.core.metrics import Metric
from foedus.core.network import Network
from foedus.core.participation import cohort, expected
from foedus.core.reduce import Ledger
from foedus.core.result import Run, checksum
from foedus.core.steer import Best, GrowthWarning, Patience, Watch, best_metric
from foedus.data.federation import Federation
from foedus.data.fingerprint import checksum as array_checksum
from foedus.data.fingerprint import sampled
from foedus.errors import CheckpointError, ConfigError, DivergenceError, TooFewClients
from foedus.storage import checkpoint as files
from foedus.storage.history_file import Earlier

if TYPE_CHECKING:
    from foedus.core.algorithm import Algorithm
    from foedus.core.participation import Poisson
    from foedus.core.session import Engine

_COHORT = 0xFFFFFFFE


class Loop:
    """The state of a run between two rounds, and the step from one round to the next."""

    def __init__(
        self,
        algorithm: Algorithm,
        fed: Federation,
        rounds: int,
        seed: int,
        engine: Engine,
        participation: float | Poisson,
        evaluate_every: int,
        target: float | None,
        quantise: str | None,
        metrics: Sequence[Metric] = (),
        per_client: bool = False,
        stop: Patience | None = None,
        keep_best: str | Literal[False] | None = None,
        stop_on_growth: bool = False,
        asks: bool = False,
    ):
        self.given, self.algorithm = algorithm, algorithm.seeded(seed)
        self.fed, self.rounds, self.engine = fed, rounds, engine
        self.participation, self.evaluate_every, self.target, self.quantise = (
            participation,
            evaluate_every,
            target,
            quantise,
        )
        self.seed, self.key = seed, random.key(seed)
        ids, order = np.unique(fed.ids, return_index=True)
        self.ids, self.sizes = torch.from_numpy(ids), torch.from_numpy(fed.sizes[order])
        self.rows = int(self.sizes.sum())
        self.spec = self.algorithm.row_spec(fed.spec)
        self.session = engine.open(self.algorithm, fed, self.key)
        self.network = Network(
            self.session, self.algorithm, self.ids, self.sizes, self.spec, self.key, quantise
        )
        self.aggregation: Aggregation | None = None
        self.history, self.seconds = History(), 0.0
        self.state: State = None  # type: ignore[assignment]  # until the start
        self.first: Tree = None  # the model of another run to start from
        self.done = 0
        self.reached = False
        self.only_last: list[str] = []
        self.notes: list[str] = []
        self.saved: int | None = None  # the round of the last checkpoint
        self.earlier: Earlier | None = None  # rows that have left the checkpoint
        self.network.rounds, self.network.notes = rounds, self.notes
        self.measures = Measures(self.algorithm, fed, metrics, per_client, self.notes)
        self.keep_best, self.stop_on_growth = keep_best, stop_on_growth
        self.stop = stop
        # whether the model is measured on test rows that stay at their sites
        self.elsewhere = asks and not isinstance(fed, Federation)
        self.best: Best | None = None
        self.last_best: Best | None = None  # if its round was evaluated only as the last one
        self.watch = self._watch()
        self.why: str | None = None  # the run ends before its last round

    def open(self, aggregation: Aggregation | None, path: Path | None, resume: bool) -> None:
        """Set up the aggregation of the run."""
        self.aggregation = aggregation
        if path is not None:
            self.session.keep(files.sites_of(path))
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
            self.network.aggregator = aggregation.open(Setting(*about, path, resume))
        if self.elsewhere:
            hides = self.aggregator is not None and self.aggregator.hides
            noisy = self.aggregator is not None and self.aggregator.draws
            check_sites(self.measures.kept is not None, hides, noisy)

    @property
    def aggregator(self) -> Aggregator | None:
        return self.network.aggregator

    @property
    def ledger(self) -> Ledger:
        return self.network.ledger

    # -- rounds ------------------------------------------------------------------------------------

    @property
    def stopped(self) -> bool:
        """Whether the run ends here, even if rounds are left."""
        if self.reached or self.why is not None:
            return True
        return self.aggregator is not None and self.aggregator.spent is not None

    def clients(self, round: int, positions: torch.Tensor | None = None) -> Clients:
        """The clients at some positions, or all clients."""
        part = expected(self.participation, len(self.ids))
        ids, sizes = self.ids, self.sizes
        if positions is not None:
            ids, sizes = ids[positions], sizes[positions]
        return Clients(self.network, ids, sizes, round, part, free=self.algorithm.pooled)

    def start(self) -> None:
        began = time.perf_counter()
        clients = self.clients(0)
        try:
            self.state = self.algorithm.start(clients)
        except NothingArrived as error:
            raise TooFewClients(f"{error}: there is nothing to start from") from None
        if self.first is not None:
            self.state = self.algorithm.begin_at(self.state, self.first)
        self.seconds += time.perf_counter() - began
        self._record(clients)

    def step(self) -> bool:
        """Make a round; returns False if the aggregator ends the run before it."""
        round = self.done + 1
        drawn = self.aggregator is not None and self.aggregator.draws
        positions = None  # all clients
        if self.participation != 1 and not drawn:
            key = random.fold(self.key, round, _COHORT)
            positions = cohort(self.participation, len(self.ids), key)
        clients = self.clients(round, positions)
        began = time.perf_counter()
        before = self.state
        self._readmit()
        try:
            if len(clients):
                clients = self._round(clients, positions)
        except BudgetSpent as error:
            assert self.aggregator is not None
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

    def _round(self, clients: Clients, positions: torch.Tensor | None) -> Clients:
        """Run the algorithm's round; returns the clients that it was run with."""
        holdings = self.network.holdings
        held = holdings.save()
        with contextlib.suppress(NothingArrived):
            try:
                self.state = self.algorithm.round(clients, self.state)
            except TooFewClients:
                lost = torch.tensor(sorted(self.session.lost), dtype=torch.int64)
                if not self._readmit():
                    raise
                # once more, with the clients that start again
                clients = self.clients(clients.round, positions)
                self.session.repeat_round()
                holdings.load(held)
                holdings.forget(self.network.positions(lost))
                self.state = self.algorithm.round(clients, self.state)
        return clients

    def _readmit(self) -> bool:
        """Take back clients that have lost their states, if the algorithm has a rule for it.

        Returns:
            Whether there are any.
        """
        if not self.session.lost:
            return False
        ids = torch.tensor(sorted(self.session.lost))
        state = self.algorithm.readmit(self.state, ids)
        self.session.readmit(ids.tolist(), state is not None)
        self.network.holdings.forget(self.network.positions(ids))
        self.state = self.state if state is None else state
        return state is not None

    def _record(self, clients: Clients) -> None:
        row: dict[str, Any] = {
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
        self._judge(row)

    def end_here(self, why: str) -> None:
        """End the run after the round that was made last, which is evaluated if it was not yet."""
        if self.done == self.rounds:
            return
        self.why = f"stopped after round {self.done}: {why}"
        if self.evaluate_every and self.done % self.evaluate_every and not self.only_last:
            metrics = self._evaluate(self.clients(self.done))
            self.only_last = list(metrics)
            self.history.extend(metrics)
            self._judge(self.history.rows[-1])

    def _judge(self, row: dict[str, Any]) -> None:
        """Update the best model, and decide whether to stop or to warn."""
        why, better = self.watch.see(row)
        if better:
            self._keep_best()
        if (grown := self.watch.grown) is not None and grown not in self.notes:
            self.notes.append(grown)
            warnings.warn(
                f"{grown} (stop_on_growth=True ends such a run)", GrowthWarning, stacklevel=5
            )
        if why is None and self.stop_on_growth and grown is not None:
            why = f"stopped after round {self.done}: the loss has grown"
        if self.done < self.rounds:
            self.why = self.why or why

    def _keep_best(self) -> None:
        if self.algorithm.predictor(self.state) is None:
            if self.keep_best:
                name = type(self.algorithm).__name__
                raise ConfigError(
                    f"keep_best={self.keep_best!r}: {name} has no global model to keep; leave it "
                    "out (run.model_of(client) gives a client's own model)"
                )
            self.watch.best_metric = None
            return
        assert self.watch.best_metric is not None
        best = Best(self.state, self.done, self.watch.best_metric, self.watch.best_value)
        # an evaluation made only because the run ends here is dropped if the run is continued
        self.best, self.last_best = (self.best, best) if self.only_last else (best, None)

    def _watch(self) -> Watch:
        data, best = self.fed.data, best_metric(self.keep_best, self.stop)
        given = (self.measures.metrics, data.y_test, data.classes, self.algorithm.remedy)
        return Watch(self.stop, best, *given)

    def _evaluate(self, clients: Clients) -> dict[str, float]:
        metrics: dict[str, float] = {}
        data = self.fed.data
        metric = "accuracy" if data.classes else "mse"
        if self.elsewhere:
            self._measurable()
        if self.algorithm.personal:
            asked = [m.name for m in self.measures.metrics]
            sums = self.session.evaluate_own(*([asked] if asked else []))
            metrics |= {f"own_{k}": v for k, v in averages(sums, data.classes).items()}
            bad = self.ids[~torch.isfinite(sums["loss"])].tolist() if "loss" in sums else []
            if bad:
                names = ", ".join(map(str, bad[:10]))
                raise DivergenceError(
                    f"round {clients.round}: the loss of client {names} on its own test rows is "
                    f"not finite; {self.algorithm.remedy}",
                    clients.round,
                    bad,
                )
            metrics |= self.measures.own(sums, clients.round)
        if self.elsewhere and self.algorithm.predictor(self.state) is not None:
            bare = replace(self.result(), records=History(), clients=None, best_of=None, notes=[])
            about = (self.session, bare, self.given, clients.round)
            metrics |= self.measures.everywhere(*about)
        if len(data.x_test):
            predictor = self.algorithm.predictor(self.state)
            if predictor is not None:
                metrics |= self.measures.common(predictor, clients.round)
            elif self.algorithm.personal:
                everywhere = self.session.evaluate_global(
                    tensor_of(data.x_test, self.spec.integers),
                    tensor_of(data.y_test),
                    *([] if data.weights_test is None else [tensor_of(data.weights_test)]),
                )
                metrics |= averages(everywhere, data.classes)
        if not math.isfinite(metrics.get("loss", 0.0)):
            ids = clients.ids.tolist()
            raise DivergenceError(
                f"round {clients.round}: the loss on the test set is {metrics['loss']}; the "
                "clients of this round were "
                f"{', '.join(map(str, ids[:10]))}{' ...' if len(ids) > 10 else ''}; "
                f"{self.algorithm.remedy}",
                clients.round,
                ids,
            )
        if self.target is not None and metric in metrics:
            self.reached = (
                metrics[metric] >= self.target if data.classes else metrics[metric] <= self.target
            )
        return metrics

    def _measurable(self) -> None:
        """Refuse metrics of models that neither a sum over all sites nor a single one can show."""
        hidden = self.aggregator is not None and self.aggregator.hides
        if hidden and self.algorithm.predictor(self.state) is None:
            raise ConfigError(
                f"metrics, per_client, stop and keep_best: {type(self.algorithm).__name__} has no "
                "global model, and clients' own models are not measured under secure aggregation; "
                "leave them out, or run it without [aggregation]"
            )

    # -- checkpoints -------------------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides the numbers of a run."""
        return {
            "algorithm": to_config(self.given),
            "federation": {
                "data": self.fed.data.name,
                "scheme": self.fed.scheme,
                "settings": to_config(
                    {k: v for k, v in self.fed.settings.items() if not isinstance(v, np.ndarray)}
                ),
                "clients": len(self.fed),
                "rows": int(self.fed.sizes.sum()),
                **({"weighted": True} if self.spec.weighted else {}),
                # between sites it would reveal the other sites' numbers of rows
                **(
                    {"fingerprint": self.fed.fingerprint}
                    if isinstance(self.fed, Federation)
                    else {}
                ),
            },
            "seed": self.seed,
            "participation": to_config(self.participation),
            "evaluate_every": self.evaluate_every,
            "quantise": self.quantise,
            "aggregation": to_config(self.aggregation),
            "start": None if self.first is None else checksum(self.first),
            **self._measured,
        }

    @property
    def _measured(self) -> dict[str, Any]:
        """What is measured besides the usual, if anything is."""
        names = [m.name for m in self.measures.metrics]
        per_client = {"per_client": True} if self.measures.kept is not None else {}
        return ({"metrics": names} if names else {}) | per_client

    @cached_property
    def fingerprint(self) -> dict[str, int]:
        """Checksums of who holds which rows, and of the rows themselves: a checkpoint belongs to
        one federation.
        """
        fed, data = self.fed, self.fed.data
        if not isinstance(fed, Federation):  # sites: the checksums that stand for their rows
            train, test = array_checksum(data.x_train, data.y_train), 0
        else:
            train, test = data.checksums
        if len(data.x_test):
            test = array_checksum(fed.test_rows, fed.test_offsets, start=test)
        part = " (in part)" if sampled(data.x_train) else ""
        clients = array_checksum(fed.ids, fed.offsets, fed.rows)
        return {"clients": clients, f"data{part}": train, "test rows": test}

    def save(self, path: Path) -> None:
        ledger = vars(self.ledger)
        if self.earlier is None:
            self.earlier = Earlier(path)
            self.earlier.path.unlink(missing_ok=True)  # of a run whose checkpoints were removed
        meta = {
            "kind": "checkpoint",
            "settings": self.settings,
            "rounds_done": self.done,
            "seconds": self.seconds,
            "ledger": ledger,
            "only_last": self.only_last,
            "aggregator": self.aggregator.save() if self.aggregator else {},
            "fingerprint": self.fingerprint,
            "notes": self.notes,
        }
        if self.best is not None:
            about = {"round": self.best.round, "metric": self.best.metric}
            meta["best"] = about | {"value": self.best.value}
        try:
            meta["history"] = self.earlier.save(self.history.rows)
            files.write(path, self._trees(), meta, files.previous_of(path))
        except CheckpointError as error:
            if self.saved is not None:
                error.add_note(
                    f"The checkpoint of round {self.saved} is still good: resume=True goes on from "
                    "it."
                )
            raise
        self.saved = self.done

    def _trees(self) -> dict[str, Tree]:
        mail = None if self.network.mail is None else self.network.mail.save()
        more: dict[str, Tree] = {} if self.best is None else {"best": self.best.state}
        if self.measures.kept is not None:
            more["per_client"] = self.measures.kept.to_tree()
        return {
            "state": self.state,
            "clients": self.session.save(),
            "holdings": self.network.holdings.save(),
            "mail": mail,
            **more,
        }

    def _load_mail(self, saved: Tree) -> None:
        mail = self.network.mail
        if mail is not None and saved is not None:
            mail.load(saved)
        elif mail is not None:
            raise CheckpointError(
                "the checkpoint was made with other delays: use the same up, down and seed of "
                "fd.Delayed"
            )
        elif saved is not None:
            raise CheckpointError(
                "the checkpoint was made with messages on their way: use the same fd.Delayed(...) "
                "engine"
            )

    def resume(self, path: Path) -> None:
        checkpoint = path
        path, trees, meta, note = files.newest(path)
        if meta.get("kind") != "checkpoint":
            raise CheckpointError(f"{path} is not a checkpoint of a run")
        try:
            # rows are compared below
            before, now = map(without_fingerprint, (meta["settings"], self.settings))
            differ = differences(before, now)
            differ += [
                f"the {k} of the federation differ"
                for k, v in self.fingerprint.items()
                if meta["fingerprint"].get(k, v) != v  # older ones have no checksum of test rows
            ]
            if differ:
                raise CheckpointError(
                    f"{path} belongs to another run: {'; '.join(differ)}. Remove it, or use its "
                    "settings"
                )
            self.state, self.done, self.seconds = (
                trees["state"],
                int(meta["rounds_done"]),
                float(meta["seconds"]),
            )
            rows = meta["history"]
            if self.done < self.rounds:  # evaluated only because the run ended there
                for name in meta["only_last"]:
                    rows[-1].pop(name, None)
            self.network.ledger, self.history, self.saved = (
                Ledger(**meta["ledger"]),
                History(rows),
                self.done,
            )
            notes = [*meta.get("notes", []), *self.notes, *([note] if note else [])]
            self.notes[:] = dict.fromkeys(notes)
            self.earlier = Earlier(checkpoint, **meta["earlier"])
            self._load_mail(trees["mail"])
            self.session.load(trees["clients"])
            self.network.holdings.load(trees["holdings"])
            if self.aggregator:
                self.aggregator.load(meta["aggregator"])
            self._take_up(trees, meta)
            if self.done > self.rounds:
                raise CheckpointError(
                    f"{path} is at round {self.done} already; rounds={self.rounds} must not be less"
                )
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {error!r}") from error
        if note:
            warnings.warn(note, stacklevel=3)
        if self.target is not None:
            last = self.history.last("accuracy" if self.fed.data.classes else "mse")
            self.reached = last >= self.target if self.fed.data.classes else last <= self.target

    def _take_up(self, trees: dict[str, Tree], meta: dict[str, Any]) -> None:
        """Scores of clients and the best model from a checkpoint; what follows from the rows."""
        kept = self.measures.kept
        if kept is not None:
            saved = PerClient.from_tree(trees["per_client"])
            kept.rounds = saved.rounds
            if self.elsewhere:  # numbers of test rows that sites reported
                kept.test_rows = saved.test_rows
            if meta["only_last"] and self.done < self.rounds:
                kept.rounds.pop(self.done, None)
        why = None
        for row in self.history.rows:
            why, _ = self.watch.see(row)
        if self.stop_on_growth and self.watch.grown is not None:
            why = f"stopped after round {self.done}: the loss has grown"
        if self.done < self.rounds:
            self.why = why
        watch, about = self.watch, meta.get("best", {})
        if watch.best_metric is None or watch.best_round < 0:
            return
        if about.get("metric") == watch.best_metric and about["round"] == watch.best_round:
            value = float(about["value"])
            self.best = Best(trees["best"], watch.best_round, watch.best_metric, value)
        elif watch.best_round == self.done:
            self.best = Best(self.state, self.done, watch.best_metric, watch.best_value)
        else:
            self.notes.append(
                f"run.best is that of the rounds after {self.done}: the checkpoint was written "
                f"without keep_best={watch.best_metric!r}"
            )
            watch.best_value, watch.best_round = math.nan, -1

    def result(self) -> Run:
        clients = {"ids": self.ids, "states": self.session.save()}
        notes = [*self.notes, *([] if self.why is None else [self.why])]
        about = (self.settings, clients, self.fed, self.engine, notes)
        data = self.fed.data
        return Run(
            self.algorithm, self.spec, self.state, self.history, *about, data.preprocess,
            data.class_values, kept=self.measures.kept, best_of=self.last_best or self.best,
        )  # fmt: skip
