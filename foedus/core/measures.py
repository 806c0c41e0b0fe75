"""Evaluation on test rows: the usual scores and the metrics of a run, in total and by client."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from foedus.base.tree import Tree
from foedus.core.algorithm import Algorithm
from foedus.core.evaluate import score, scored_rows
from foedus.core.metrics import Metric, OwnMetric, measured, over_clients
from foedus.core.predictions import Predictions, ratio
from foedus.core.predictor import Predictor
from foedus.core.session import Session
from foedus.core.site_sums import SiteSums
from foedus.data.federation import Federation
from foedus.errors import CheckpointError, ConfigError, ReplyError, SecureError, TooFewClients
from foedus.export.probabilities import softmax

if TYPE_CHECKING:
    import pandas as pd

    from foedus.core.result import Run

_KEPT = 1 << 22
"""The largest number of scores of single clients that a run keeps; the oldest are dropped."""


@dataclass(eq=False)
class PerClient:
    """Scores of each client, round by round.

    Args:
        ids: The ids of the clients, ascending.
        test_rows: The number of test rows of each client.
        rounds: For each round that was kept, the scores (clients,) by column.
    """

    ids: np.ndarray
    test_rows: np.ndarray
    rounds: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)

    def add(self, round: int, scores: dict[str, np.ndarray]) -> None:
        self.rounds[round] = scores
        most = max(1, _KEPT // max(1, len(self.ids) * len(scores)))
        while len(self.rounds) > most:
            del self.rounds[next(iter(self.rounds))]

    def table(self, round: int) -> pd.DataFrame:
        """One row a client."""
        import pandas as pd

        scores = self.rounds[round]
        return pd.DataFrame({"client": self.ids, "test_rows": self.test_rows, **scores})

    def to_tree(self) -> Tree:
        rounds = list(self.rounds)
        names = list(self.rounds[rounds[0]]) if rounds else []
        return {
            "ids": torch.from_numpy(self.ids),
            "test_rows": torch.from_numpy(self.test_rows),
            "rounds": torch.tensor(rounds, dtype=torch.int64),
            "scores": {
                k: torch.from_numpy(np.stack([self.rounds[t][k] for t in rounds])) for k in names
            },
        }

    @classmethod
    def from_tree(cls, saved: Any) -> PerClient:
        """The inverse of `to_tree`.

        Raises:
            CheckpointError: The scores are not one for each client and round.
        """
        ids, rows = saved["ids"].numpy(), saved["test_rows"].numpy()
        scores = {k: v.numpy() for k, v in saved["scores"].items()}
        rounds = saved["rounds"].tolist()
        if len(ids) != len(rows) or any(
            v.shape != (len(rounds), len(ids)) for v in scores.values()
        ):
            raise CheckpointError("the scores of clients are not one for each client and round")
        by_round = {t: {k: v[i] for k, v in scores.items()} for i, t in enumerate(rounds)}
        return cls(ids, rows, by_round)


class Measures:
    """Evaluation of models on the test rows of a federation.

    Args:
        algorithm: The algorithm of the models.
        fed: The federation with the test rows.
        metrics: Metrics besides the loss, and accuracy or mean squared error.
        per_client: Whether every client is also evaluated on its own test rows.
        notes: The notes of the run, to which undefined metrics are added.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        fed: Federation,
        metrics: Sequence[Metric],
        per_client: bool,
        notes: list[str],
    ):
        self.algorithm, self.fed, self.metrics, self.notes = algorithm, fed, metrics, notes
        self.classes = fed.data.classes
        self.kept: PerClient | None = None
        if per_client:
            order = np.argsort(fed.ids, kind="stable")
            sizes = np.diff(fed.test_offsets)[order] if isinstance(fed, Federation) else None
            rows = np.zeros(len(order), np.int64) if sizes is None else sizes
            self.kept = PerClient(fed.ids[order], rows)

    @cached_property
    def sums(self) -> SiteSums:
        """The sums that metrics need of rows that are at sites."""
        spec = self.fed.spec
        return SiteSums.of_spec([m.name for m in self.metrics], spec.classes, spec.outputs)

    @property
    def usual(self) -> tuple[str, str]:
        """The score beside the loss, and its key among sums."""
        return ("accuracy", "hits") if self.classes else ("mse", "error")

    @cached_property
    def own_rows(self) -> np.ndarray:
        """Test rows, client after client in order of ids."""
        order = np.argsort(self.fed.ids, kind="stable")
        first, sizes = self.fed.test_offsets[:-1][order], np.diff(self.fed.test_offsets)[order]
        shift = np.repeat(first - (np.cumsum(sizes) - sizes), sizes)
        return self.fed.test_rows[shift + np.arange(len(shift))]

    @cached_property
    def own_group(self) -> np.ndarray:
        """The client (its position in order of ids) of each of `own_rows`."""
        order = np.argsort(self.fed.ids, kind="stable")
        return np.repeat(np.arange(len(order)), np.diff(self.fed.test_offsets)[order])

    @cached_property
    def common_rows(self) -> Predictions:
        """All test rows, without predictions."""
        data = self.fed.data
        y = data.y_test if self.classes or data.y_test.ndim > 1 else data.y_test[:, None]
        y = y.astype(np.int64 if self.classes else np.float64)
        return Predictions(y, np.zeros(0), data.weights_test, None, 1, self.classes)

    @cached_property
    def client_rows(self) -> Predictions:
        """The test rows of each client as a group, without predictions."""
        rows, all_rows = self.own_rows, self.common_rows
        weight = None if all_rows.weight is None else all_rows.weight[rows]
        groups = len(self.fed.ids)
        return Predictions(
            all_rows.y[rows], np.zeros(0), weight, self.own_group, groups, self.classes
        )

    def common(self, predictor: Predictor, round: int) -> dict[str, Any]:
        """Scores of the global model on all test rows.

        Unless clients have their own models, also by client.
        """
        data = self.fed.data
        rows = scored_rows(self.algorithm, predictor, data, outputs=bool(self.metrics))
        outputs = rows.pop("outputs", None)
        found: dict[str, Any] = score(rows, data)
        if not np.isfinite(found["loss"]):
            return found
        given = None
        if outputs is not None:
            given = self.given(outputs, predictor)
            found |= self._of_all(given)
        if self.kept is not None and not self.algorithm.personal and len(self.own_rows):
            p, name = self.client_rows, self.usual
            means = {
                k: p.mean(rows[key].numpy()[self.own_rows]) for k, key in (("loss", "loss"), name)
            }
            if given is not None:
                means |= self._each(given[self.own_rows])
            found |= self._of_clients("", round, means)
        return found

    def everywhere(
        self, session: Session, run: Run, given: Algorithm, round: int
    ) -> dict[str, Any]:
        """Scores of the global model on test rows that stay at their sites, from sums over them.

        If too few sites answer, there is a warning and no score.

        Args:
            session: The session of the run.
            run: The run so far.
            given: The algorithm without the seed of the run.
            round: The round.
        """
        try:
            measured = session.measure(given, run, self.sums, round)
        except (ReplyError, SecureError, TooFewClients) as error:
            warnings.warn(f"round {round}: the model is not measured: {error}", stacklevel=2)
            self._note("some rounds are not measured", f" (round {round}: {error})"[:300])
            return {}
        total = self.sums.added(measured.sums)
        found: dict[str, Any] = {k: float(v[0]) for k, v in self.sums.finish(total).items()}
        if not np.isfinite(found["loss"]):
            return {"loss": found["loss"]}
        for m in self.metrics:
            if not np.isfinite(found[m.name]):
                self._note(f"{m.name} is NaN on the test rows of all sites: {m.undefined}")
        found["test_rows"] = int(total["rows"][0])
        if measured.left_out:
            found["not_measured"] = measured.left_out
        if self.kept is not None and measured.ids is not None and not self.algorithm.personal:
            at = np.searchsorted(self.kept.ids, measured.ids)
            self.kept.test_rows[at] = measured.sums["rows"].astype(np.int64)
            scores = {}
            for name, values in self.sums.finish(measured.sums).items():
                scores[name] = np.full(len(self.kept.ids), np.nan)
                scores[name][at] = values
            found |= self._of_clients("", round, scores)
        return found

    def own(self, sums: dict[str, Tensor], round: int) -> dict[str, Any]:
        """Scores of each client's own model on its own test rows.

        Args:
            sums: What `Session.evaluate_own` returned.
            round: The round.
        """
        outputs = sums.get("outputs")
        found: dict[str, Any] = {}
        scores: dict[str, np.ndarray] = {}
        if outputs is not None and len(outputs):
            given = self.given(outputs, None)
            p = replace(self.client_rows, group=None, groups=1).of(given)
            found |= {f"own_{k}": v for k, v in self._values(p, "all test rows").items()}
            scores = self._each(given) if self.kept is not None else {}
        elif self.metrics and outputs is None:
            scores = self._by_sums(sums)
            if scores:
                total = self.sums.added(self._needed(sums))
                all_of_them = self.sums.finish(total)
                found |= {f"own_{k}": float(all_of_them[k][0]) for k in scores}
            if missing := [m.name for m in self.metrics if m.name not in scores]:
                self._note(
                    f"{', '.join(missing)} of clients' own models: not measured, for outputs of "
                    "single rows stay at their sites; fd.Local() and fd.Ray() measure them"
                )
        if self.kept is not None and "loss" in sums:
            count = sums.get("weight", sums["rows"]).double().numpy()
            names = (("loss", "loss"), self.usual)
            means = {k: ratio(sums[key].numpy(), count) for k, key in names}
            self.kept.test_rows = sums["rows"].long().numpy()
            found |= self._of_clients("own_", round, means | scores)
        return found

    def _needed(self, sums: dict[str, Tensor]) -> dict[str, np.ndarray]:
        """The sums that metrics need, from clients that keep their rows."""
        needed = {k.removeprefix("sums."): v.numpy() for k, v in sums.items() if "sums." in k}
        if needed and (lacking := int(((needed["rows"] == 0) & (sums["rows"].numpy() > 0)).sum())):
            self._note(
                "metrics of clients' own models leave out some clients, whose sites do not allow "
                "them",
                f" ({lacking:,})",
            )
        return needed

    def _by_sums(self, sums: dict[str, Tensor]) -> dict[str, np.ndarray]:
        """Metrics of each client, from sums."""
        needed = self._needed(sums)
        found = self.sums.finish(needed) if needed else {}
        return {k: v for k, v in found.items() if k not in ("loss", *self.usual)}

    def given(self, outputs: Tensor, predictor: Predictor | None) -> np.ndarray:
        """The input of metrics: probabilities, or the outputs themselves."""
        if not self.classes:
            return outputs.double().numpy()
        shares = softmax if predictor is None else predictor.probabilities
        return shares(outputs.double()).numpy()

    def _of_all(self, given: np.ndarray) -> dict[str, float]:
        return self._values(self.common_rows.of(given), "all test rows")

    def _values(self, p: Predictions, where: str) -> dict[str, float]:
        found = {m.name: float(measured(m, p, lambda _: where)[0]) for m in self.metrics}
        for m in self.metrics:
            if not np.isfinite(found[m.name]):
                if isinstance(m, OwnMetric):
                    raise ConfigError(
                        f"metric {m.name!r} on {where} ({len(p.y):,} rows) gave {found[m.name]}; "
                        "return a finite number"
                    )
                self._note(f"{m.name} is NaN on {where}: {m.undefined}")
        return found

    def _each(self, given: np.ndarray) -> dict[str, np.ndarray]:
        """Metrics of each client on its own test rows."""
        assert self.kept is not None
        ids, p = self.kept.ids, self.client_rows.of(given)
        where = lambda g: f"the test rows of client {ids[g]}"  # noqa: E731
        return {m.name: measured(m, p, where) for m in self.metrics}

    def _of_clients(self, prefix: str, round: int, scores: dict[str, np.ndarray]) -> dict[str, Any]:
        """Columns of statistics over clients; the scores of each client are kept."""
        assert self.kept is not None
        ids = self.kept.ids
        tested = self.kept.test_rows > 0
        higher = {"accuracy": True} | {m.name: m.higher for m in self.metrics}
        why = {m.name: m.undefined for m in self.metrics}
        found: dict[str, Any] = {}
        for name, values in scores.items():
            if name == "auc_bin_error":
                continue
            found |= over_clients(f"{prefix}{name}", values, ids, higher.get(name, False))
            if undefined := int((np.isnan(values) & tested).sum()):
                self._note(
                    f"{prefix}{name} is undefined (NaN) for some clients, who are left out of its "
                    f"mean and quantile: {why.get(name, 'no number')}",
                    f" (round {round}: {undefined:,} of {int(tested.sum()):,})",
                )
        self.kept.add(round, scores)
        return found

    def _note(self, text: str, more: str = "") -> None:
        """Add a note once."""
        if not any(note.startswith(text) for note in self.notes):
            self.notes.append(text + more)
