"""Synthetic federations: LEAF's Synthetic(alpha, beta) and FedNewton's piecewise-linear one."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Ge, Lt

from foedus.base.settings import check_value
from foedus.data.dataset import Data
from foedus.data.federation import Federation
from foedus.data.partition import apportion, deal_test_rows, split
from foedus.errors import DataError


def synthetic_leaf(
    alpha: float = 0.0,
    beta: float = 0.0,
    *,
    clients: int = 30,
    rows: int | None = None,
    features: int = 60,
    classes: int = 10,
    seed: int = 0,
    iid: bool = False,
    per_client: int | None = None,
    test: float = 0.1,
) -> Federation:
    """Synthetic(alpha, beta) of Li et al. 2020 (FedProx) and LEAF, as a natural federation.

    Client k labels its rows by its own softmax model, y = argmax(x W_k + b_k), with

        u_k ~ N(0, alpha),  W_k ~ N(u_k, 1),  b_k ~ N(u_k, 1)        how much models differ
        B_k ~ N(0, beta),   v_k ~ N(B_k, 1),  x ~ N(v_k, Sigma)      how much features differ
        Sigma = diag(j^-1.2), j = 1 .. features

    As in the published generator, alpha and beta are standard deviations, and a client has
    int(lognormal(4, 2)) + 50 rows.

    Args:
        alpha: How much the clients' models differ.
        beta: How much the clients' features differ.
        clients: The number of clients.
        rows: The total number of rows, shared in proportion to the lognormal draws (at least 2 rows
            per client); `None`: as many as are drawn.
        features: The number of features.
        classes: The number of classes.
        seed: The seed of all draws.
        iid: All clients have the same model, with W, b ~ N(0, 1), and v_k = 0.
        per_client: Deal the rows anew so that each client holds this number of labels, as
            `split(data, "labels")` does (FedFW's non-IID setting: 3).
        test: The fraction of each client's rows, the last ones, that are test rows.

    Returns:
        The federation.

    Raises:
        DataError: An argument is out of range.

    Example:
        >>> fed = fd.synthetic_leaf(1.0, 1.0, clients=5, rows=500)
        >>> len(fed), fed.data.x_train.shape[1], fed.data.classes
        (5, 60, 10)

    Reference:
        Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated optimization in heterogeneous
        networks", MLSys 2020.
    """
    check_value("alpha", alpha, Annotated[float, Ge(0)], DataError)
    check_value("beta", beta, Annotated[float, Ge(0)], DataError)
    for name, value in {"clients": clients, "features": features, "classes": classes}.items():
        check_value(name, value, Annotated[int, Ge(1)], DataError)
    check_value("test", test, Annotated[float, Ge(0), Lt(1)], DataError)
    if per_client is not None and not 1 <= per_client <= classes:
        raise DataError(f"per_client={per_client!r} must be from 1 to the {classes} classes")
    if rows is not None and rows < 2 * clients:
        raise DataError(f"rows={rows!r} for {clients} clients; give at least two rows a client")
    rng = np.random.default_rng(seed)
    sizes = rng.lognormal(4, 2, clients).astype(np.int64) + 50
    if rows is not None:
        sizes = 2 + apportion(sizes, rows - 2 * clients, rng)
    u, center = rng.normal(0, alpha, clients), rng.normal(0, beta, clients)
    deviation = np.arange(1, features + 1) ** -0.6  # the root of the variance j^-1.2
    shared = rng.standard_normal((features + 1, classes)) if iid else None
    x, y = np.empty((sizes.sum(), features), np.float32), np.empty(sizes.sum(), np.int64)
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    for k in range(clients):
        mean = 0.0 if iid else rng.normal(center[k], 1, features)
        model = shared if shared is not None else rng.normal(u[k], 1, (features + 1, classes))
        xk = mean + rng.standard_normal((sizes[k], features)) * deviation
        score = xk @ model[:-1] + model[-1]
        x[offsets[k] : offsets[k + 1]], y[offsets[k] : offsets[k + 1]] = xk, score.argmax(1)
    groups = np.repeat(np.arange(clients), sizes)
    tests = np.minimum(np.round(sizes * test).astype(np.int64), sizes - 1)
    held = np.arange(len(y)) >= np.repeat(offsets[1:] - tests, sizes)
    name = "synthetic(iid)" if iid else f"synthetic({alpha:g}, {beta:g})"
    data = Data(
        name, x[~held], y[~held], x[held], y[held], classes, None, groups[~held], groups[held]
    )
    if per_client is not None:
        return split(data, "labels", clients=clients, per_client=per_client, seed=seed)
    settings = {"clients": clients, "seed": seed, "alpha": alpha, "beta": beta, "iid": iid}
    return Federation.from_owners(
        data, groups[~held], groups[held], np.arange(clients), "natural", settings
    )


def synthetic_piecewise(
    alpha: float = 0.0,
    beta: float = 0.0,
    *,
    clients: int = 20,
    rows: int = 10000,
    test_rows: int = 2500,
    features: int = 10,
    noise: float = 0.2,
    test_noise: float | None = None,
    seed: int = 0,
) -> Federation:
    """FedNewton's regression set (Section 7) with covariate shift alpha and concept shift beta.

    The true function is f*(x) = min(-1'x, 1'x) = -|1'x| with x ~ N(0, I). All clients have equally
    many rows; client j has

        x ~ N(u_j, I),  y = min(-w_j'x, w_j'x) + e,
        u_j ~ N(0, alpha I),  w_j = 1 + v_j,  v_j ~ N(0, beta I),  e ~ N(0, noise)

    and test rows come from the homogeneous distribution (u = 0, w = 1), dealt to clients in
    proportion to size. The second argument of every N is a variance, also that of the noise: 0.2 is
    a standard deviation of 0.447.

    The paper leaves three things open: whether these are variances; what w_j ~ N(1, v_j) with v_j ~
    N(0, beta) means, as v_j can be negative (it is read as a shift of w_j, in the way that u_j
    shifts x, so that beta = 0 gives w_j = 1); and whether test targets are noisy (they are).

    Args:
        alpha: The variance of the clients' feature means.
        beta: The variance of the clients' weights.
        clients: The number of clients.
        rows: The total number of training rows.
        test_rows: The total number of test rows.
        features: The number of features.
        noise: The variance of the noise of training targets.
        test_noise: The variance of the noise of test targets; `None`: as `noise`, 0: test errors
            measure the distance to f* itself.
        seed: The seed of all draws.

    Returns:
        The federation.

    Raises:
        DataError: An argument is out of range.

    Example:
        >>> fed = fd.synthetic_piecewise(0.1, 0.1, clients=4, rows=400, test_rows=100)
        >>> fed.sizes.tolist(), fed.data.classes is None
        ([100, 100, 100, 100], True)

    Reference:
        "Efficient Newton-type federated learning with non-IID data", Section 7.
    """
    test_noise = noise if test_noise is None else test_noise
    variances = {"alpha": alpha, "beta": beta, "noise": noise, "test_noise": test_noise}
    for name, value in variances.items():
        check_value(name, value, Annotated[float, Ge(0)], DataError)
    for name, value in {"clients": clients, "rows": rows, "features": features}.items():
        check_value(name, value, Annotated[int, Ge(1)], DataError)
    if test_rows < 0 or rows < clients:
        raise DataError(
            f"rows={rows!r}, test_rows={test_rows!r} for {clients} clients; give at least one "
            "training row a client"
        )
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(clients), np.bincount(np.arange(rows) % clients, minlength=clients))
    u = rng.normal(0, np.sqrt(alpha), (clients, features))
    w = 1 + rng.normal(0, np.sqrt(beta), (clients, features))
    x = u[owner] + rng.standard_normal((rows, features))
    y = -np.abs(np.einsum("nd,nd->n", x, w[owner])) + rng.normal(0, np.sqrt(noise), rows)
    x_test = rng.standard_normal((test_rows, features))
    y_test = -np.abs(x_test.sum(1)) + rng.normal(0, np.sqrt(test_noise), test_rows)
    y, y_test = y.astype(np.float32), y_test.astype(np.float32)
    name = f"piecewise({alpha:g}, {beta:g})"
    data = Data(name, x, y, x_test, y_test, groups_train=owner)
    settings = {"clients": clients, "seed": seed, "alpha": alpha, "beta": beta, "noise": noise}
    test_owner = deal_test_rows(data, owner, clients, rng)
    return Federation.from_owners(data, owner, test_owner, np.arange(clients), "natural", settings)
