# The functions of compiled.c: arrays are contiguous, `out`, `total`, `rest` and the parameters
# of `train` are written.
from collections.abc import Sequence

import numpy as np

Array = np.ndarray | bytes

def version() -> int: ...
def choose(wide: bool, pytorch: bool, /) -> object: ...
def words(out: Array, keys: Array, batch: int, count: int, /) -> None: ...
def fold(out: Array, keys: Array, counters: Array, batch: int, /) -> None: ...
def order(
    out: Array, keys: Array, valid: Array, batch: int, n: int, rows: int, threads: int, /
) -> None: ...
def train(
    weights: Sequence[Array],
    biases: Sequence[Array],
    more_weights: Sequence[Array],
    more_biases: Sequence[Array],
    between: Sequence[tuple],
    sizes: Sequence[int],
    x: Array,
    y: Array,
    used: Array,
    shares: Array,
    steps: Array,
    dims: tuple[int, int, int, int],
    labels: bool,
    loss: int,
    lr: float,
    keep: float,
    delta: float,
    threads: int,
    /,
) -> None: ...
def pack_trees(
    nodes: Array,
    feature: Array,
    threshold: Array,
    left: Array,
    right: Array,
    roots: Array,
    n_nodes: int,
    n_trees: int,
    features: int,
    /,
) -> int: ...
def sum_trees(
    out: Array,
    x: Array,
    nodes: Array,
    roots: Array,
    shares: Array,
    values: Array,
    sizes: tuple[int, int, int, int, int, int],
    threads: int,
    /,
) -> None: ...
def sum_histograms(
    out: Array,
    bins: Array,
    offsets: Array,
    node: Array,
    values: Array,
    sizes: tuple[int, int, int, int, int],
    threads: int,
    /,
) -> None: ...
def sum_replies(
    total: Array,
    rest: Array,
    x: Array,
    weights: Array,
    clients: int,
    n: int,
    wide: bool,
    threads: int,
    /,
) -> None: ...
def sum_sparse(
    total: Array,
    rest: Array,
    indices: Array,
    values: Array,
    weights: Array,
    clients: int,
    k: int,
    n: int,
    wide: bool,
    /,
) -> None: ...
def normalize(
    dims: tuple[int, ...], eps: float, momentum: float, threads: int, /, *arrays: Array
) -> None: ...
