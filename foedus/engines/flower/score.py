"""The score of a model on the test rows of all sites: one average, by secure aggregation."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from foedus.base.settings import check_settings
from foedus.base.spec import Spec
from foedus.base.tree import State, Tree
from foedus.core.algorithm import Algorithm, Batching, Client, client_step
from foedus.core.clients import Clients
from foedus.core.result import Run
from foedus.engines.flower.messages import explained
from foedus.errors import ReplyError


@dataclass(frozen=True)
class Score(Algorithm):
    """The accuracy, or the mean squared error, of the model of a run on the rows of all clients.

    At a site the rows of this algorithm are its test rows (`Holding.tested`). Averaged by rows, the
    scores of clients are that of all rows together; with secure aggregation the server sees only
    that average.

    algorithm: the algorithm that trained the model.
    """

    algorithm: Algorithm

    file: ClassVar[bytes] = b""
    """The saved run, at the server: not a setting, because sites receive it as an argument of the
    step."""

    def __post_init__(self) -> None:
        check_settings(self)

    @classmethod
    def of(cls, algorithm: Algorithm, file: bytes) -> Score:
        """To be run at the server."""
        score = cls(algorithm)
        object.__setattr__(score, "file", file)
        return score

    def batching(self) -> Batching:
        return Batching(alike=False)

    def start(self, clients: Clients) -> State:
        return State(score=torch.tensor(float("nan")))

    def round(self, clients: Clients, state: State) -> State:
        file = torch.frombuffer(bytearray(self.file), dtype=torch.uint8)
        return State(score=clients.mean(self.score, file=file))

    @client_step(batch="loop")
    def score(self, client: Client, file: Tensor) -> tuple[Tree, None]:
        data, x, y = client.data, client.data.x.numpy(), client.data.y.numpy()
        found = scored(file.numpy().tobytes(), self.algorithm, client.spec, x, y)
        total = found.get("hits", found.get("squares", 0.0))
        return torch.tensor(total / max(1, len(data.y)), dtype=torch.float32), None


def scored(
    file: bytes, algorithm: Algorithm, spec: Spec, x: np.ndarray, y: np.ndarray
) -> dict[str, Any]:
    """Rows, and hits or squared errors, of the model of a saved run on these rows."""
    run = saved_run(file, algorithm, spec)
    with explained("the model cannot be used on the rows of this site"):
        predicted = run.model.prepared.predict(x) if len(y) else y
    if not len(y):
        return {"rows": 0}
    if spec.classes:
        return {"rows": len(y), "hits": int((predicted == y).sum())}
    squares = ((predicted - y) ** 2).mean(tuple(range(1, y.ndim)))
    return {"rows": len(y), "squares": float(squares.sum())}


def saved_run(file: bytes, algorithm: Algorithm, spec: Spec) -> Run:
    """A saved run with a global model for rows of this form."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(file)
        with explained("the file of the model cannot be read"):
            run = Run.load(path, algorithm)
    if run.spec != spec:
        raise ReplyError(f"the model is for {run.spec}, the rows of this site are {spec}")
    if run.algorithm.personal and run.algorithm.predictor(run.state) is None:
        raise ReplyError(f"{type(algorithm).__name__} has no global model")
    return run
