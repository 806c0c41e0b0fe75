"""A client's system: primal against dual against NumPy; other losses against autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import foedus as fd
from foedus.base.rows import Rows
from foedus.base.spec import Spec
from foedus.models import curvature
from foedus.models.least_squares import add_gram, mirror, prepare_ridge, product, ridge_bytes, solve
from foedus.models.losses import CrossEntropy, Huber, Logistic, Squared


def client(rows: int, size: int, outputs: int = 2, padding: int = 0, seed: int = 0) -> Rows:
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(size=(rows, size)).astype(np.float32))
    y = torch.from_numpy(rng.normal(size=(rows, outputs)).astype(np.float32))
    index = torch.cat((torch.arange(rows), torch.zeros(padding, dtype=torch.int64)))
    weight = torch.cat((torch.ones(rows), torch.zeros(padding)))
    return Rows(x, y, index, weight, Spec((size,), None, outputs))


def system(data: Rows, reg: float) -> tuple[np.ndarray, np.ndarray]:
    n = int(data.weight.sum())
    x, y = data.table_x.double().numpy(), data.table_y.double().numpy()
    return x.T @ x / n + reg * np.eye(x.shape[1]), x.T @ y / n


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 25),
    size=st.integers(1, 25),
    padding=st.integers(0, 30),
    reg=st.sampled_from([1e-4, 1e-2, 1.0]),
)
def test_systems_are_numpys(rows, size, padding, reg):
    """Primal where there are as many rows (with padding) as features, dual where there are fewer;
    padding never counts.
    """
    data = client(rows, size, padding=padding)
    h, b = system(data, reg)
    ridge = prepare_ridge(fd.Identity(), reg, torch.float64, data)
    assert ("phi" in ridge) == (rows + padding < size)
    assert ("hessian" in ridge) == (rows + padding >= size)
    v = torch.from_numpy(np.random.default_rng(1).normal(size=(size, 3)))
    np.testing.assert_allclose(product(ridge, reg, v), h @ v.numpy(), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(ridge["right"], b, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(
        solve(ridge, reg, v), np.linalg.solve(h, v.numpy()), rtol=1e-7, atol=1e-8 / reg
    )
    np.testing.assert_allclose(ridge["local"], np.linalg.solve(h, b), rtol=1e-7, atol=1e-8)


def test_primal_and_dual_agree():
    short = client(20, 30)
    dual = prepare_ridge(fd.Identity(), 1e-3, torch.float64, short)
    primal = prepare_ridge(fd.Identity(), 1e-3, torch.float64, client(20, 30, padding=15))
    assert "phi" in dual
    assert "hessian" in primal
    v = torch.randn(30, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(solve(dual, 1e-3, v), solve(primal, 1e-3, v), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(dual["local"], primal["local"], rtol=1e-9, atol=1e-9)


def test_the_dual_holds_nothing_of_the_size_of_the_primal():
    dual = prepare_ridge(fd.RandomFourier(2000, seed=0), 1e-3, torch.float64, client(5, 3))
    assert max(t.numel() for t in dual.values()) == 5 * 2000
    assert ridge_bytes(5, 2000, torch.float64) < 8 * 2000 * 2000 / 100


@pytest.mark.parametrize(("rows", "size"), [(60, 40), (30, 40)])
def test_single_precision_is_refined(rows, size, monkeypatch):
    """Features close to a few directions, condition 1e5: plain solutions in float32 lose three
    digits or more, refined ones none.

    In the primal the system itself is kept in float32, so that is the one to be solved.
    """
    data, reg = client(rows, size), 1e-5
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(size, size)))[0].astype(np.float32)
    data.table_x.copy_((data.table_x * torch.logspace(0, -3, size)) @ torch.from_numpy(turn))
    v = torch.randn(size, 2, generator=torch.Generator().manual_seed(0))

    def error() -> float:
        ridge = prepare_ridge(fd.Identity(), reg, torch.float32, data)
        assert ridge["factor"].dtype == torch.float32
        h = ridge["hessian"].double().numpy() if rows >= size else system(data, reg)[0]
        want = np.linalg.solve(h, v.double().numpy())
        return np.linalg.norm(solve(ridge, reg, v).double().numpy() - want) / np.linalg.norm(want)

    refined = error()
    assert refined < 1e-6
    monkeypatch.setattr("foedus.models.least_squares._REFINEMENTS", 0)
    assert error() > 100 * refined


def test_local_solutions_in_single_precision(monkeypatch):
    data, reg = client(30, 40), 1e-4
    data.table_x.mul_(torch.logspace(0, -3, 40))
    h, b = system(data, reg)
    want = np.linalg.solve(h, b)
    error = lambda: np.linalg.norm(  # noqa: E731
        prepare_ridge(fd.Identity(), reg, torch.float32, data)["local"].double().numpy() - want
    )
    refined = error() / np.linalg.norm(want)
    assert refined < 1e-5
    monkeypatch.setattr("foedus.models.least_squares._REFINEMENTS", 0)
    assert error() > 10 * refined * np.linalg.norm(want)


def test_large_grams_are_made_of_half_their_products():
    phi = torch.randn(2, 30, 1030, dtype=torch.float64)
    total = torch.zeros(2, 1030, 1030, dtype=torch.float64)
    add_gram(total, phi[:, :10])
    add_gram(total, phi[:, 10:])
    assert int((total[0, 0] == 0).sum()) > 700  # above the diagonal nothing was computed
    mirror(total)
    torch.testing.assert_close(total, phi.mT @ phi)


def test_large_clients_come_in_blocks(monkeypatch):
    data = client(50, 4)
    whole = prepare_ridge(fd.Identity(), 0.1, torch.float64, data)
    monkeypatch.setattr("foedus.models.least_squares._BLOCK_BYTES", 4 * 8 * 7)
    parts = prepare_ridge(fd.Identity(), 0.1, torch.float64, data)
    for name in whole:
        torch.testing.assert_close(whole[name], parts[name])


def test_a_singular_system_is_an_error_with_a_remedy():
    data = client(4, 3)
    data.table_x[:] = torch.tensor([1.0, 2.0, 4.0])
    with pytest.raises(
        fd.ConfigError, match=r"reg=1e-30 is too small.*singular in float64; raise reg$"
    ):
        prepare_ridge(fd.Identity(), 1e-30, torch.float64, data)
    with pytest.raises(fd.ConfigError, match="or use dtype='float64'"):
        prepare_ridge(fd.Identity(), 1e-12, torch.float32, data)


LOSSES = [CrossEntropy(), Squared(), Logistic(), Huber(0.7)]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_slopes_and_bends_are_the_derivatives(loss):
    torch.manual_seed(0)
    f = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    y = (
        torch.arange(9) % 3
        if not isinstance(loss, Huber)
        else torch.randn(9, 3, dtype=torch.float64)
    )
    weight = torch.rand(9, dtype=torch.float64)
    value = loss.value(f, y)
    (slope,) = torch.autograd.grad(weight @ value, f)
    torch.testing.assert_close(loss.slope(f.detach(), y, weight), slope)
    v = torch.randn(9, 3, dtype=torch.float64)
    _, bent = torch.autograd.functional.hvp(lambda f: loss.value(f, y).sum(), f, v)
    if isinstance(loss, Huber):  # that of reweighted least squares: slope / residual
        r = f.detach() - y
        bent = loss.slope(f.detach(), y, torch.ones(9, dtype=torch.float64)) / r * v
    torch.testing.assert_close(loss.bend(f.detach(), y, v), bent)


def test_values_by_hand():
    """Logistic: log(1 + e^f) - y f. Huber with delta 1: 1/8 at 1/2, and 2.5 at 3."""
    f = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    assert float(Logistic().value(f, torch.tensor([1]))) == pytest.approx(
        0.6931471805599453 + 1.3132616875182228 - 1
    )
    assert float(Huber().value(torch.tensor([[0.5, -3.0]]), torch.zeros(1, 2))) == pytest.approx(
        0.125 + 2.5
    )


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("direct", [True, False], ids=["factorised", "by conjugate gradients"])
def test_newton_directions_are_those_of_the_whole_hessian(loss, direct, monkeypatch):
    """Against autograd's Hessian of the client's objective, formed as one big matrix."""
    monkeypatch.setattr(curvature, "DIRECT", 512 if direct else 0)
    rows, size, k, reg = 12, 4, 3, 0.05
    data = client(rows, size, k, padding=3)
    if not isinstance(loss, Huber):
        data = Rows(
            data.table_x, torch.arange(rows) % k, data.index, data.weight, Spec((size,), k, k)
        )
    prepared = curvature.prepare(fd.Identity(), torch.float64, data)
    w = torch.randn(size, k, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x, y = (
        data.table_x.double(),
        data.table_y.double() if data.table_y.is_floating_point() else data.table_y,
    )

    def objective(flat: torch.Tensor) -> torch.Tensor:
        return loss.value(x @ flat.view(size, k), y).mean() + 0.5 * reg * flat.square().sum()

    g = torch.autograd.functional.jacobian(objective, w.flatten())
    hessian = torch.autograd.functional.hessian(objective, w.flatten())
    if isinstance(loss, Huber):
        r = x @ w - y
        weight = r.clamp(-0.7, 0.7) / r / rows
        blocks = [x.mT @ (weight[:, c : c + 1] * x) + reg * torch.eye(size) for c in range(k)]
        hessian = torch.zeros(size * k, size * k, dtype=torch.float64)
        for c in range(k):
            hessian[c::k, c::k] = blocks[c]
    torch.testing.assert_close(curvature.gradient(prepared, loss, reg, w).flatten(), g)
    got = curvature.solve(prepared, loss, reg, w, g.view(size, k), inner=100)
    torch.testing.assert_close(got.flatten(), torch.linalg.solve(hessian, g), rtol=1e-6, atol=1e-8)
    steps = (0.0, 0.5, 1.0)
    along = curvature.along(prepared, loss, reg, w, got, steps)
    want = torch.stack([objective((w - s * got).flatten()) for s in steps])
    torch.testing.assert_close(along, want)
