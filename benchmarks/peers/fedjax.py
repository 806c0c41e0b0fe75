"""FedJAX: `python -m benchmarks.peers.fedjax JOB jit|pmap`, in a venv with fedjax and jax for
CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import fedjax
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers.job import Job, Weights, measure

SPATIAL = ("NHWC", "HWIO", "NHWC")  # channels last: XLA's convolutions on CPU are faster so


def conv(x: jax.Array, w: jax.Array, b: jax.Array, padding: str) -> jax.Array:
    return jax.lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=SPATIAL) + b


def pool(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def dense(h: jax.Array, layers: list[jax.Array]) -> jax.Array:
    """Fully connected layers: kernels (in, out) and biases in turn."""
    for i in range(0, len(layers), 2):
        h = h @ layers[i] + layers[i + 1]
        h = jax.nn.relu(h) if i + 2 < len(layers) else h
    return h


def mnist_cnn(p: list[jax.Array], x: jax.Array) -> jax.Array:
    h = pool(jax.nn.relu(conv(x.reshape(-1, 28, 28, 1), p[0], p[1], "SAME")))
    h = pool(jax.nn.relu(conv(h, p[2], p[3], "SAME")))
    return dense(h.reshape(len(x), -1), p[4:])


def cifar_cnn(p: list[jax.Array], x: jax.Array) -> jax.Array:
    h = jax.nn.relu(conv(jax.nn.relu(conv(x, p[0], p[1], "VALID")), p[2], p[3], "VALID"))
    return dense(pool(h).reshape(len(x), -1), p[4:])


NETS: dict[str, Callable] = {
    "softmax regression": lambda p, x: dense(x, p),
    "mlp": lambda p, x: dense(x, p),
    "mnist cnn": mnist_cnn,
    "cifar cnn": cifar_cnn,
}
HEIGHT = {"mnist cnn": 7, "cifar cnn": 14}  # of the image that the first fully connected layer sees


def from_torch(weights: Weights, net: str) -> Weights:
    """PyTorch's layout (out, in, ...), channels first, to JAX's."""
    out = []
    for i, w in enumerate(weights):
        if w.ndim == 4:
            w = w.transpose(2, 3, 1, 0)
        elif w.ndim == 2:
            if i and weights[i - 2].ndim == 4:
                side = HEIGHT[net]
                w = w.reshape(len(w), -1, side, side).transpose(0, 2, 3, 1).reshape(len(w), -1)
            w = w.T
        out.append(np.ascontiguousarray(w))
    return out


def to_torch(weights: Weights, net: str) -> Weights:
    """And back."""
    out = []
    for i, w in enumerate(weights):
        if w.ndim == 4:
            w = w.transpose(3, 2, 0, 1)
        elif w.ndim == 2:
            w = w.T
            if i and weights[i - 2].ndim == 4:
                side = HEIGHT[net]
                w = w.reshape(len(w), side, side, -1).transpose(0, 3, 1, 2).reshape(len(w), -1)
        out.append(np.ascontiguousarray(w))
    return out


def main() -> None:
    job, backend = Job.read(), sys.argv[2]
    x, y = job.data()
    if x.ndim == 5:
        x = np.ascontiguousarray(x.transpose(0, 1, 3, 4, 2))
    apply = NETS[job.net]
    first = [jnp.asarray(w) for w in from_torch(job.weights(), job.net)]

    def loss(params: list[jax.Array], batch: dict, rng: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(apply(params, batch["x"]))
        return -jnp.take_along_axis(scores, batch["y"][:, None], 1).mean()

    with fedjax.for_each_client_backend(backend):
        algorithm = fedjax.algorithms.fed_avg.federated_averaging(
            jax.grad(loss),
            fedjax.optimizers.sgd(job.lr),
            fedjax.optimizers.sgd(1.0),
            fedjax.ShuffleRepeatBatchHParams(
                batch_size=job.batch, num_epochs=1, drop_remainder=False
            ),
        )
    names = [b"%06d" % i for i in range(job.clients)]
    labels = y.astype(np.int32)

    def rounds(n: int, everybody: bool = False) -> Weights:
        size, cohort = (job.batch, job.clients) if everybody else (job.rows, job.cohort)
        held = {c: {"x": x[i, :size], "y": labels[i, :size]} for i, c in enumerate(names)}
        sampler = fedjax.client_samplers.UniformGetClientSampler(
            fedjax.InMemoryFederatedData(held), cohort, seed=0
        )
        state = algorithm.init(first)
        for _ in range(n):
            state, _ = algorithm.apply(state, sampler.sample())
        # then it has learned something else
        if any(p.shape != w.shape for p, w in zip(state.params, first, strict=True)):
            raise ValueError(
                f"parameters of shape {first[0].shape} come back in shape {state.params[0].shape}"
            )
        return to_torch([np.asarray(p) for p in state.params], job.net)

    measure(job, rounds, lambda: rounds(1, everybody=True), ("fedjax", "jax", "jaxlib"))


if __name__ == "__main__":
    main()
