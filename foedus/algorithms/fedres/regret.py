"""The regret of an online run: against the best pair of a global model and local models in
hindsight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from foedus.algorithms.fedres.erm import FedResERM
from foedus.algorithms.fedres.pair import targets, value
from foedus.algorithms.fedres.sgd import FedRes
from foedus.base.columns import Columns, part
from foedus.core.result import Run
from foedus.errors import FoedusError
from foedus.models.linear import Linear

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Regret:
    """What `fd.regret` returns: equation (1) of the FedRes paper.

    Attributes:
        loss: Average loss of all predictions.
        best: That of the best pair of models in hindsight.
        regret: The difference.
        per_client: All three by client.

    Example:
        >>> fed = fd.split(fd.load("digits"), "tasks", clients=5)
        >>> found = fd.regret(fd.run(fd.FedRes(), fed, rounds=20))
        >>> abs(found.loss - found.best - found.regret) < 1e-9
        True
    """

    loss: float
    best: float
    regret: float
    per_client: pd.DataFrame


def regret(run: Run) -> Regret:
    """The regret of a finished run against the best pair of linear models in hindsight.

    The best pair minimizes the loss over the rows that the clients have seen, as often as they have
    seen them; no ball is put around it, so that with a `radius` the regret is at most this.

    Args:
        run: A run of `fd.FedRes`, `fd.FedResERM` or `fd.FictitiousPlay` with linear models.

    Returns:
        The losses and their difference, over all clients and by client.

    Raises:
        FoedusError: The run is of another algorithm or of other models.

    Example:
        >>> fed = fd.split(fd.load("digits"), "tasks", clients=5)
        >>> shared, private = fed.settings["global_features"], fed.settings["local_features"]
        >>> run = fd.run(fd.FedRes(shared=shared, private=private), fed, rounds=50)
        >>> fd.regret(run).per_client.columns.tolist()
        ['client', 'loss', 'best', 'regret']
    """
    import pandas as pd

    algorithm = run.algorithm
    if run.fed is None or not (type(algorithm) is FedRes or isinstance(algorithm, FedResERM)):
        raise FoedusError(
            "regret needs a run of FedRes, FedResERM or FictitiousPlay, with its federation"
        )
    loss, bias = _linear(algorithm)
    private = algorithm.private if isinstance(algorithm, FedResERM) else algorithm.only_local[1]
    parts, online = [], []
    states = run.client_states()
    order = np.argsort(run.fed.ids, kind="stable")
    for position, i in enumerate(order):
        state = states.get(position)
        if state is None or int(state["t"]) == 0:
            raise FoedusError(f"client {int(run.fed.ids[i])} has made no prediction")
        seen, rows = int(state["t"]) * algorithm.batch_size, run.fed.client_rows(i)
        times = np.full(len(rows), seen // len(rows))
        times[: seen % len(rows)] += 1
        x, y = (
            torch.from_numpy(np.asarray(t[rows]))
            for t in (run.fed.data.x_train, run.fed.data.y_train)
        )
        x = x.float()
        features = [
            _features(x, columns, b)
            for columns, b in zip((algorithm.shared, private), bias, strict=True)
        ]
        target = targets(y.unsqueeze(0), run.fed.spec)[0].double()
        parts.append((*features, target, torch.from_numpy(times).double() / seen))
        online.append(float(state["loss"]) / int(state["t"]))
    best = (_squared if loss == "squared" else _descended)(parts, loss)
    columns = run.fed.select(order).client_columns()
    frame = pd.DataFrame({**columns, "loss": online, "best": best})
    frame["regret"] = frame.loss - frame.best
    return Regret(
        float(frame.loss.mean()), float(frame.best.mean()), float(frame.regret.mean()), frame
    )


def _linear(algorithm: FedRes | FedResERM) -> tuple[str, list[bool | None]]:
    """The loss, and whether the global and the local model have a bias (`None`: there is no such
    model).
    """
    if isinstance(algorithm, FedResERM):
        return "squared", [algorithm.bias, algorithm.bias]
    models = [algorithm.global_model, algorithm.local_model]
    if not algorithm.alike or any(m is not None and not isinstance(m, Linear) for m in models):
        raise FoedusError("the best pair in hindsight is known for linear models that are alike")
    return algorithm.loss, [m.bias if isinstance(m, Linear) else None for m in models]


def _features(x: Tensor, columns: Columns, bias: bool | None) -> Tensor:
    if bias is None:
        return torch.zeros(len(x), 0, dtype=torch.float64)
    x = part(x.float(), columns, 1).flatten(1).double()
    return torch.cat((x, torch.ones(len(x), 1, dtype=x.dtype)), 1) if bias else x


def _squared(parts: list[tuple[Tensor, ...]], loss: str) -> list[float]:
    """Least squares in all models at once; the local ones are eliminated first."""
    matrix, right, solved = 0.0, 0.0, []
    for g, own, y, weight in parts:
        wg, wl = g * weight.unsqueeze(1), own * weight.unsqueeze(1)
        inverse = torch.linalg.pinv(own.mT @ wl, hermitian=True)
        cross = wg.mT @ own
        matrix = matrix + wg.mT @ g - cross @ inverse @ cross.mT
        right = right + wg.mT @ y - cross @ inverse @ (wl.mT @ y)
        solved.append((inverse, cross))
    w = torch.linalg.pinv(matrix, rtol=1e-12, hermitian=True) @ right
    best = []
    for (g, own, y, weight), (inverse, cross) in zip(parts, solved, strict=True):
        local = inverse @ ((own * weight.unsqueeze(1)).mT @ y - cross.mT @ w)
        best.append(float((weight * value("squared", g @ w + own @ local, y)).sum()))
    return best


def _descended(parts: list[tuple[Tensor, ...]], loss: str) -> list[float]:
    """By quasi-Newton steps, from 0."""
    outputs = parts[0][2].shape[1]
    free = [
        torch.zeros(p.shape[1], outputs, dtype=torch.float64, requires_grad=True)
        for p in (parts[0][0], *(q[1] for q in parts))
    ]
    optimiser = torch.optim.LBFGS(
        free, lr=1.0, max_iter=500, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )

    def each() -> list[Tensor]:
        return [
            (k * value(loss, g @ free[0] + own @ w, y)).sum()
            for (g, own, y, k), w in zip(parts, free[1:], strict=True)
        ]

    def closure() -> Tensor:
        optimiser.zero_grad()
        total = torch.stack(each()).mean()
        total.backward()
        return total

    with torch.enable_grad():
        optimiser.step(closure)
    return [float(v.detach()) for v in each()]
