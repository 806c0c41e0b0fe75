"""Flower's simulator with Ray, two actors: `python -m benchmarks.peers.flower JOB [SECONDS]`, in a
venv with flwr[simulation] and torch.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from functools import cache

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn.functional import cross_entropy

from benchmarks.nets import NETS
from benchmarks.peers.job import Job, Weights, measure

ACTORS = 2
client, server = ClientApp(), ServerApp()


@cache
def resident(file: str) -> tuple:
    """What an actor keeps between messages: the settings, all rows, and one model."""
    torch.set_num_threads(1)
    job = Job.read(file)
    x, y = job.data()
    return job, torch.from_numpy(x), torch.from_numpy(y), NETS[job.net]()


@client.train()
def train(message: Message, context: Context) -> Message:
    """As little as can be: no optimizer, no loader, no metrics; one gather of the client's shuffled
    rows.
    """
    config = message.content["config"]
    job, x, y, model = resident(config["job"])
    own = int(context.node_config["partition-id"])
    parameters = list(model.parameters())
    with torch.no_grad():
        for p, new in zip(parameters, message.content["arrays"].to_numpy_ndarrays(), strict=True):
            p.copy_(torch.from_numpy(new))
    order = torch.arange(job.batch) if config["one-step"] else torch.randperm(job.rows)
    for a, b in zip(x[own][order].split(job.batch), y[own][order].split(job.batch), strict=True):
        grads = torch.autograd.grad(cross_entropy(model(a), b), parameters)
        with torch.no_grad():
            torch._foreach_add_(parameters, grads, alpha=-job.lr)
    arrays = ArrayRecord([p.detach().numpy() for p in parameters])
    return Message(
        RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": len(order)})}),
        reply_to=message,
    )


@server.main()
def serve(grid: Grid, context: Context) -> None:
    job = Job.read()
    # It waits that long between two looks for replies; a tenth of a second, its default, is longer
    # than most rounds.
    if len(sys.argv) > 2:
        grid.pull_interval = float(sys.argv[2])
    # a strategy counts the nodes before it waits for them
    while len(list(grid.get_node_ids())) < job.clients:
        time.sleep(0.05)

    def rounds(n: int, everybody: bool = False) -> Weights:
        strategy = FedAvg(
            fraction_train=1.0 if everybody else job.cohort / job.clients,
            fraction_evaluate=0.0,
            min_train_nodes=1,
            min_available_nodes=job.clients,
        )
        config = ConfigRecord({"job": os.path.abspath(job.path("job.json")), "one-step": everybody})
        return strategy.start(
            grid, ArrayRecord(job.weights()), num_rounds=n, train_config=config
        ).arrays.to_numpy_ndarrays()

    measure(job, rounds, lambda: rounds(1, everybody=True), ("flwr", "ray", "torch"))


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    run_simulation(
        server,
        client,
        num_supernodes=Job.read().clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": ACTORS, "logging_level": "ERROR", "log_to_driver": False},
        },
    )


if __name__ == "__main__":
    # By its own name, so that Ray's workers import this module instead of unpickling its functions
    # with every message.
    from benchmarks.peers import flower

    try:
        flower.main()
    except BaseException:
        # Where Ray does not come up, the server's thread would wait an hour for replies, and the
        # process for the thread.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
