"""pfl-research: `python -m benchmarks.peers.pfl JOB`, or under torchrun for several processes, in a
venv with pfl and torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops.pytorch_ops import distributed
from pfl.model.pytorch import PyTorchModel
from torch.nn.functional import cross_entropy

from benchmarks.nets import NETS
from benchmarks.peers.job import Job, Weights, measure


class Unmeasured(FederatedAveraging):
    """Without the evaluation of the first round, which no setting turns off."""

    def get_next_central_contexts(self, *args, **kwargs):
        contexts, model, metrics = super().get_next_central_contexts(*args, **kwargs)
        if contexts is not None:
            contexts = tuple(dataclasses.replace(c, do_evaluation=False) for c in contexts)
        return contexts, model, metrics


def cohorts(clients: int, cohort: int) -> Iterator[int]:
    """Clients without repetition in a round; the same in every process."""
    rng = np.random.default_rng(0)
    return itertools.chain.from_iterable(
        rng.choice(clients, cohort, replace=False).tolist() for _ in itertools.count()
    )


def main() -> None:
    job = Job.read()
    if distributed.world_size > 1:
        torch.set_num_threads(1)
    x, y = (torch.from_numpy(a) for a in job.data())
    net = NETS[job.net]()
    net.loss = lambda a, b: cross_entropy(net(a), b)
    net.metrics = lambda a, b: {}
    first = [torch.from_numpy(w) for w in job.weights()]
    # A set of tensors remembers how it is cut into batches, so each client's is made once.
    users = [PyTorchTensorDataset((x[i], y[i])) for i in range(job.clients)]

    def rounds(n: int, everybody: bool = False) -> Weights:
        with torch.no_grad():
            for p, w in zip(net.parameters(), first, strict=True):
                p.copy_(w)
        cohort, sets = job.cohort, users
        if everybody:
            cohort = job.clients
            sets = [
                PyTorchTensorDataset((x[i, : job.batch], y[i, : job.batch]))
                for i in range(job.clients)
            ]
        sampler = cohorts(job.clients, cohort)
        data = FederatedDataset(lambda i: sets[i], lambda: next(sampler))
        model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
        Unmeasured().run(
            algorithm_params=NNAlgorithmParams(
                central_num_iterations=n,
                evaluation_frequency=n + 1,
                train_cohort_size=cohort,
                val_cohort_size=0,
            ),
            backend=SimulatedBackend(data, data),
            model=model,
            model_train_params=NNTrainHyperParams(
                local_num_epochs=1, local_learning_rate=job.lr, local_batch_size=job.batch
            ),
            send_metrics_to_platform=False,
        )
        return [p.detach().numpy().copy() for p in net.parameters()]

    measure(
        job,
        rounds,
        lambda: rounds(1, everybody=True),
        ("pfl", "torch"),
        speaks=distributed.global_rank == 0,
    )


if __name__ == "__main__":
    os.environ.setdefault("PFL_PYTORCH_DEVICE", "cpu")
    main()
