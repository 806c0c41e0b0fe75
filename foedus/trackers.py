"""Trackers: callbacks of `fd.run` that write its history for other tools.

Their packages are optional extras.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import time
import zlib
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

from annotated_types import MinLen, Predicate

from foedus.base.settings import Means, check_settings
from foedus.core.arguments import without_fingerprint
from foedus.core.callbacks import Callback
from foedus.core.describe import flatten
from foedus.errors import FoedusError
from foedus.version import __version__

if TYPE_CHECKING:
    from foedus.core.result import Run


@dataclass(eq=False)
class TensorBoard(Callback):
    """Writes every number of the history to a folder for TensorBoard, with the round as the step.

    A run has its own folder within `folder`, named by the algorithm, the seed and a checksum of the
    settings: the same run again, or resumed, replaces its former record, and every round is shown
    once. The settings are recorded as text, those of the algorithm also under "HParams".

    Args:
        folder: The folder, for `tensorboard --logdir`.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=5)
        >>> run = fd.run(fd.FedAvg(), fed, rounds=2, callbacks=[fd.TensorBoard("runs")])
        >>> from pathlib import Path
        >>> len(list(Path("runs").iterdir()))
        1
    """

    folder: Annotated[
        str | os.PathLike,
        Predicate(lambda folder: str(folder) != ""),
        Means("the path of a folder, such as 'runs'"),
    ]

    def __post_init__(self) -> None:
        _require("tensorboard", "TensorBoard")
        check_settings(self)

    def start(self, name: str, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Records of an earlier process are discarded from step 0 on, and the rows so far are
        # written again, so none is lost or doubled.
        path = Path(self.folder) / f"{quote(name, safe=' ,=()')}-{_fingerprint(settings)}"
        self.settings, self.writer = settings, SummaryWriter(str(path), purge_step=0)
        for row in rows:
            self.row(row)

    def row(self, row: dict[str, Any]) -> None:
        numbers = _numbers(row)
        if row["round"] == 0:
            self._describe(
                [c for c in ("loss", "accuracy", "mse", "own_accuracy", "own_mse") if c in numbers]
            )
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, row["round"])
        self.writer.flush()

    def _describe(self, metrics: list[str]) -> None:
        from torch.utils.tensorboard.summary import hparams

        shown = {"foedus": __version__, **flatten(self.settings)}
        table = "\n".join(f"| {k} | {str(v).replace('|', '&#124;')} |" for k, v in shown.items())
        self.writer.add_text("settings", f"| setting | value |\n|---|---|\n{table}", 0)
        events: Any = self.writer.file_writer  # declared as None, but created for the text
        # Not SummaryWriter.add_hparams, which makes a second run of it.
        for summary in hparams(_parameters(self.settings), dict.fromkeys(metrics, 0)):
            events.add_summary(summary)

    def end(self, run: Run | None, error: BaseException | None) -> None:
        self.writer.close()


@dataclass(eq=False)
class MLflow(Callback):
    """Records a run with MLflow.

    Settings are parameters, each number of the history is a metric by round, and the final status
    is FINISHED, FAILED, or KILLED by Ctrl-C. A resumed run continues its own record, found by a
    checksum of the settings, and no round is logged twice.

    Args:
        experiment: The name of MLflow's experiment, created if it does not exist.
        uri: Address of the tracking server or database, such as "http://host:5000" or
            "sqlite:///mlflow.db"; `None`: as MLflow decides ($MLFLOW_TRACKING_URI, or a database in
            the current folder).

    Example:
        >>> tracker = fd.MLflow("digits", uri="http://localhost:5000")  # doctest: +SKIP
        >>> fd.run(fd.FedAvg(), fed, rounds=20, callbacks=[tracker])  # doctest: +SKIP
    """

    experiment: Annotated[str, MinLen(1)] = "foedus"
    uri: str | None = None

    def __post_init__(self) -> None:
        _require("mlflow", "MLflow")
        check_settings(self)

    def start(self, name: str, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient(tracking_uri=self.uri)
        found = self.client.get_experiment_by_name(self.experiment)
        experiment = (
            self.client.create_experiment(self.experiment) if found is None else found.experiment_id
        )
        former = self._former(experiment, settings) if rows else None
        self.logged: set[int] = set()
        if former is None:
            self._create(experiment, name, settings)
        else:
            self.run_id: str = former
            self.logged = {
                metric.step for metric in self.client.get_metric_history(self.run_id, "seconds")
            }
            self.client.update_run(self.run_id, status="RUNNING")
        for row in rows:
            self.row(row)

    def _former(self, experiment: str, settings: dict[str, Any]) -> str | None:
        """The record of a resumed run."""
        same = f"tags.`foedus.fingerprint` = '{_fingerprint(settings)}'"
        found = self.client.search_runs(
            [experiment], same, max_results=1, order_by=["attributes.start_time DESC"]
        )
        return found[0].info.run_id if found else None

    def _create(self, experiment: str, name: str, settings: dict[str, Any]) -> None:
        from mlflow.entities import Param

        tags = {
            "version": __version__,
            "seed": settings["seed"],
            "fingerprint": _fingerprint(settings),
        }
        # checksums of rows are not sent to a server
        tags |= flatten(without_fingerprint(settings)["federation"], "federation")
        tags = {f"foedus.{key}": str(value)[:_LONGEST] for key, value in tags.items()}
        self.run_id = self.client.create_run(experiment, tags=tags, run_name=name).info.run_id
        params = [Param(key, str(value)[:_LONGEST]) for key, value in _parameters(settings).items()]
        for i in range(0, len(params), _AT_ONCE):
            self.client.log_batch(self.run_id, params=params[i : i + _AT_ONCE])

    def row(self, row: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        if row["round"] not in self.logged:
            now = int(time.time() * 1000)
            self.client.log_batch(
                self.run_id,
                [Metric(name, value, now, row["round"]) for name, value in _numbers(row).items()],
            )

    def end(self, run: Run | None, error: BaseException | None) -> None:
        stopped = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
        self.client.set_terminated(self.run_id, "FINISHED" if error is None else stopped)


_LONGEST = 500  # characters of a value that every version of MLflow accepts
_AT_ONCE = 100  # parameters in one request


def _require(module: str, who: str) -> None:
    """Raise before the run if a package is missing; the package itself is loaded when the run
    starts.
    """
    if importlib.util.find_spec(module) is None:
        raise FoedusError(f"fd.{who} needs the package {module}: pip install 'foedus[{module}]'")


def _fingerprint(settings: dict[str, Any]) -> str:
    """A checksum that is the same for a run and its continuation, and differs for other
    settings."""
    chosen = json.dumps(without_fingerprint(settings), sort_keys=True)
    return f"{zlib.crc32(chosen.encode()):08x}"


def _parameters(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of the algorithm and of the run, by dotted name.

    Lists and None become text.
    """
    chosen = flatten(settings["algorithm"]) | flatten(
        {k: v for k, v in settings.items() if k not in ("algorithm", "federation")}
    )
    return {
        k: v if isinstance(v, bool | int | float | str) else str(v).lower()
        for k, v in chosen.items()
    }


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row, without missing ones; the round is the step."""
    return {
        k: float(v)
        for k, v in row.items()
        if k != "round" and isinstance(v, Real) and not math.isnan(v)
    }
