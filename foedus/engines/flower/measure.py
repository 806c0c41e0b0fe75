"""Metrics of a global model on the test rows of all sites, from sums that each site computes.

Without secure aggregation the server sees the sums of each site, and checks them. Under it, it sees
the sums over all sites, which are exact as well: counts are integers of fixed-point steps, and each
real number, of at most 2^100, is sent in parts (`encoding.blinded`) whose sums give the sum of the
numbers to 2^-101 for each site.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from foedus.aggregation.secure.protocol import SecureAggregation
from foedus.algorithms.preprocessing.encoding import UNIT, blinded, exactly_joined
from foedus.base.settings import check_settings
from foedus.base.spec import Spec
from foedus.base.tree import Tree
from foedus.core.aggregation import Setting
from foedus.core.algorithm import Algorithm, Batching, Client, client_step
from foedus.core.clients import Clients
from foedus.core.evaluate import scores_of
from foedus.core.exchange import map_tensors
from foedus.core.network import Network
from foedus.core.predictions import Predictions
from foedus.core.result import Run
from foedus.core.session import Measured, Session
from foedus.core.site_sums import SiteSums
from foedus.engines.flower.messages import explained
from foedus.engines.flower.score import saved_run
from foedus.engines.prepare import exact
from foedus.errors import ReplyError, TooFewClients

_SCALE, _PARTS = 2.0**69, 11
"""Of real numbers of at most 2^100 as `blinded` takes them."""


@dataclass(frozen=True)
class Measure(Algorithm):
    """The sums that metrics of the model of a run need, on the rows of all clients.

    At a site the rows of this algorithm are its test rows (`Holding.tested`).

    algorithm: the algorithm that trained the model. metrics: by name. sums: clients send numbers
        for sums in fixed point, for secure aggregation.
    """

    algorithm: Algorithm
    metrics: tuple[str, ...] = ()
    sums: bool = False

    def __post_init__(self) -> None:
        check_settings(self)

    def batching(self) -> Batching:
        return Batching(alike=False)

    def asked(self, spec: Spec) -> SiteSums:
        """The sums to request for rows of this form."""
        return SiteSums(self.metrics, spec.classes, spec.outputs)

    @client_step(batch="loop")
    def measure(self, client: Client, file: Tensor) -> tuple[Tree, None]:
        """The sums of the model of a saved run over the client's rows."""
        asked, classes = self.asked(client.spec), client.spec.classes
        run = saved_run(file.numpy().tobytes(), self.algorithm, client.spec)
        predictor = run.algorithm.predictor(run.state)
        assert predictor is not None
        x, y = client.data.x.numpy(), client.data.y.numpy()
        with explained("the model cannot be used on the rows of this site"):
            rows = scores_of(run.algorithm, predictor, x, y, classes, outputs=True)
            outputs = rows.pop("outputs")
            given = predictor.probabilities(outputs) if classes else outputs
            labels = y.astype(np.int64 if classes else np.float64)
            labels = labels if classes or labels.ndim > 1 else labels[:, None]
            p = Predictions(labels, given.numpy(), classes=classes)
            found = asked.of(p, {k: p.sum(v.numpy()) for k, v in rows.items()})
        return packed({k: v[0] for k, v in found.items()}, self.sums), None


def packed(sums: Mapping[str, np.ndarray], added: bool) -> dict[str, Tensor]:
    """The sums of a client as they are sent; added: so that they can be added up in fixed point."""
    if not added:
        return {k: torch.from_numpy(np.asarray(v, np.float64)) for k, v in sums.items()}
    return {
        k: torch.from_numpy(np.asarray(v * UNIT))
        if SiteSums.counts(k)
        else blinded(np.asarray(v / _SCALE), _PARTS)
        for k, v in sums.items()
    }


def read(reply: Tree, asked: SiteSums, rows: int | None) -> dict[str, np.ndarray]:
    """The sums of one client; raises if they are invalid.

    rows: its number of test rows, if known.
    """
    if not isinstance(reply, dict) or not all(isinstance(v, Tensor) for v in reply.values()):
        raise ReplyError("its sums over test rows must be tensors by name")
    sums = {str(k): v.numpy() for k, v in reply.items()}
    if (why := asked.wrong(sums, rows)) is not None:
        raise ReplyError(f"its sums over test rows: {why}")
    return sums


def _read_total(reply: Tree, asked: SiteSums, rows: int) -> dict[str, np.ndarray]:
    """The sums over all clients, of what was added up in fixed point."""
    sums = {}
    for name, shape in asked.shapes.items():
        part = reply[name]
        if SiteSums.counts(name):
            sums[name] = np.rint(part.double().numpy() / UNIT)
            continue
        numbers = [n * int(_SCALE) for n in exactly_joined(part)]
        if name == "moments":  # pairs of a number and what it leaves, also of the total
            for at in range(0, len(numbers), 2):
                whole = numbers[at] + numbers[at + 1]
                high = Fraction(float(whole))
                numbers[at : at + 2] = [high, whole - high]
        sums[name] = np.array([float(n) for n in numbers]).reshape(shape)
    if (why := asked.wrong(sums, rows)) is not None:
        raise ReplyError(
            f"the sums over the test rows of all sites cannot be ({why}): one of them has sent "
            "something else, and secure aggregation hides which"
        )
    return sums


def ask(
    session: Session, algorithm: Measure, run: Run, tested: Mapping[int, int],
    config: SecureAggregation | None, spec: Spec, key: Tensor, round: int,
) -> Measured:  # fmt: skip
    """Ask these clients for their sums, by secure aggregation if it is used.

    session: of the algorithm. tested: numbers of test rows, by client.
    """
    if len(tested) < (least := 1 if config is None else 2):
        raise TooFewClients(
            f"{len(tested)} sites have test rows and allow the metrics, at least {least} must"
        )
    ids = torch.tensor(sorted(tested))
    sizes = torch.tensor([tested[i] for i in ids.tolist()])
    network = Network(session, algorithm, ids, sizes, spec, key)
    if config is not None:
        setting = Setting(algorithm, session, ids, sizes, 1.0, 1, run.settings["seed"])
        network.aggregator = exact(config, "sums over test rows").open(setting)
    clients, asked = Clients(network, ids, sizes, round), algorithm.asked(spec)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.safetensors"
        run.save(path, card=False)
        file = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    if config is not None:
        total = clients.sum(algorithm.measure, file=file)
        assert clients.answered is not None
        rows = sum(tested[i] for i in clients.answered.tolist())
        sums = _read_total(total, asked, rows)
        return Measured({k: v[None] for k, v in sums.items()}, None, _left_out(clients))

    def wrong(senders: Tensor, reply: Tree) -> dict[int, str]:
        for n, client in enumerate(senders.tolist()):
            read(map_tensors(lambda t, n=n: t[n], reply), asked, tested[client])
        return {}

    replies = clients.gather(algorithm.measure, accept=wrong, file=file)
    stacked = replies.stack()
    sums = {k: v.numpy() for k, v in stacked.items()}
    return Measured(sums, replies.ids.numpy(), _left_out(clients))


def _left_out(clients: Clients) -> str:
    return str(clients.metrics.get("left_out", ""))
