"""FFGB-Distill and ensemble distillation by closed forms, warm starts, and images cropped and
flipped at random.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import foedus as fd
from foedus import testing
from foedus.base import random
from foedus.core.exchange import Ask
from foedus.models.training.augment import crop_flip

QUICK = fd.Training(lr=1e-2, optimizer="adam", epochs=2, batch_size=16)
STILL = fd.Training(lr=1e-30, steps=1, batch_size=None)
"""A student that stays where it starts."""

# -- FFGB-Distill by closed forms ------------------------------------------------------------------

SHRUNK = 0.5
RIDGE = fd.Training(lr=0.4, epochs=300, batch_size=None, weight_decay=SHRUNK)
INTERPOLATE = fd.Training(lr=0.3, epochs=800, batch_size=None)
PUBLIC = np.array([[1.0, 0.5, 0, 0], [0, -1, 1, 0], [-0.5, 0, 0, 1.5]], np.float32)


def bias(x):
    return np.concatenate([x.astype(float), np.ones((len(x), 1))], 1)


def uneven(width=2) -> fd.Federation:
    """Three clients of 8, 12 and 20 rows of four features."""
    rng = np.random.default_rng(0)
    clients = []
    for i, n in enumerate((8, 12, 20)):
        x = rng.normal(size=(n, 4)).astype(np.float32)
        clients.append(
            (x, (x[:, :width] * (i + 1) + rng.normal(size=(n, width))).astype(np.float32))
        )
    return fd.Federation.from_clients(clients, test=clients[0])


def distilled(fed, rounds, *, K, step, mu, residual, weights, public=PUBLIC):
    """Clients fit ridge regressions (bias included) to their targets; the student goes to the
    nearest model that says the teacher's values.
    """
    w, A = np.zeros((5, fed.spec.outputs)), bias(public)
    for _ in range(rounds):
        sizes, teacher = [], []
        for i in range(len(fed)):
            rows = fed.client_rows(i)
            B, y = bias(fed.data.x_train[rows]), fed.data.y_train[rows].astype(float)
            g, delta, values = B @ w, 0.0, A @ w
            for _ in range(K):
                target = delta + g - y
                h = np.linalg.solve(B.T @ B / len(B) + SHRUNK * np.eye(5), B.T @ target / len(B))
                g = g - step * (B @ h + mu * g)
                values = values - step * (A @ h + mu * values)
                delta = target - B @ h if residual else 0.0
            sizes.append(len(rows))
            teacher.append(values)
        share = (
            np.array(sizes) / sum(sizes) if weights == "rows" else np.full(len(fed), 1 / len(fed))
        )
        w = w + np.linalg.pinv(A) @ (np.tensordot(share, teacher, 1) - A @ w)
    return A @ w, w


@pytest.mark.parametrize(
    ("K", "mu", "residual", "weights"),
    [
        (1, 0.0, True, "uniform"),
        (1, 0.3, True, "rows"),
        (2, 0.3, True, "uniform"),
        (3, 0.2, False, "rows"),
        (3, 0.2, True, "rows"),
    ],
)
def test_the_teacher_by_closed_forms(K, mu, residual, weights):
    fed = uneven()
    algorithm = fd.FFGBDistill(
        fd.Linear(),
        PUBLIC,
        step=0.7,
        mu=mu,
        local_steps=K,
        residual=residual,
        weights=weights,
        oracle=RIDGE,
        student=INTERPOLATE,
    )
    for rounds in (1, 2):
        run = fd.run(algorithm, fed, rounds, evaluate_every=0)
        values, w = distilled(fed, rounds, K=K, step=0.7, mu=mu, residual=residual, weights=weights)
        np.testing.assert_allclose(run.model.outputs(PUBLIC), values, atol=2e-3)
        np.testing.assert_allclose(run.state.w["weight"], w[:4].T, atol=2e-3)


def forward(params, x):
    w0, b0, w1, b1 = (params[k].double().numpy() for k in ("weight0", "bias0", "weight1", "bias1"))
    return np.maximum(x @ w0.T + b0, 0) @ w1.T + b1


def test_the_teacher_from_the_replies():
    """Classes, K = 2: the client step is asked through a session, and the weights are (1 - eta
    mu)^2, eta (1 - eta mu) and eta.
    """
    rng = np.random.default_rng(1)
    clients = [
        (rng.normal(size=(n, 4)).astype(np.float32), rng.integers(0, 3, n)) for n in (10, 15)
    ]
    fed, eta, mu = fd.Federation.from_clients(clients, classes=3), 0.8, 0.25
    student = fd.Training(lr=2e-2, optimizer="adam", epochs=1500, batch_size=None)
    algorithm = fd.FFGBDistill(
        fd.MLP(24),
        PUBLIC,
        weak=fd.MLP(6),
        step=eta,
        mu=mu,
        local_steps=2,
        oracle=QUICK,
        student=student,
        weights="rows",
    )
    start = fd.run(algorithm, fed, 1, evaluate_every=0)
    first = fd.MLP(24).init(fed.spec, random.fold(random.key(0), 0))
    session = fd.Local(batch=False).open(algorithm, fed, random.key(0))
    replies = list(
        session.exchange(
            Ask("boost", {"w": first, "t": 1}, torch.tensor([0, 1]), random.key(0), 1, 0)
        )
    )
    f = (1 - eta * mu) ** 2 * forward(first, PUBLIC)
    for share, (_, reply, _) in zip((10 / 25, 15 / 25), replies, strict=True):
        h1, h2 = (forward(h, PUBLIC) for h in reply["functions"])
        f = f - share * (eta * (1 - eta * mu) * h1 + eta * h2)
    np.testing.assert_allclose(start.model.outputs(PUBLIC), f, atol=5e-3)


def test_boosting_with_distillation_learns(fed, digits):
    algorithm = fd.FFGBDistill(
        fd.MLP(16), digits.x_train[300:500], step=3.0, mu=0.0,
        oracle=fd.Training(lr=1e-2, optimizer="adam", epochs=10, batch_size=32),
        student=fd.Training(lr=1e-2, optimizer="adam", epochs=10, batch_size=32),
    )  # fmt: skip
    run = fd.run(algorithm, fed, 4)
    assert run.records.rows[0]["accuracy"] < 0.3 < 0.6 < run.records.last("accuracy"), run


def test_one_model_goes_down_and_k_come_up(fed, digits):
    """64 x 5 + 5 + 5 x 10 + 10 = 385 numbers a model; what is said of them takes a few bytes
    more.
    """
    run = fd.run(
        fd.FFGBDistill(
            fd.MLP(5), digits.x_train[300:310], local_steps=3, oracle=QUICK, student=QUICK
        ),
        fed,
        2,
    )
    per_client = run.records.last("bytes_up") / 10, run.records.last("bytes_down") / 10
    assert 0 <= per_client[0] - 3 * 385 * 4 < 300 and 0 <= per_client[1] - 385 * 4 < 120


# -- ensemble distillation -------------------------------------------------------------------------


def locally(fed, lr=0.2):
    """One full gradient step from zero on the squared loss: w_i = lr B^T y / n; numbers of rows."""
    each = []
    for i in range(len(fed)):
        rows = fed.client_rows(i)
        B = bias(fed.data.x_train[rows])
        each.append(lr * B.T @ fed.data.y_train[rows].astype(float) / len(rows))
    return np.stack(each), fed.sizes


@pytest.mark.parametrize("weights", ["rows", "uniform"])
def test_the_student_starts_at_the_weighted_average(weights):
    fed = uneven()
    each, sizes = locally(fed)
    share = sizes / sizes.sum() if weights == "rows" else np.full(3, 1 / 3)
    how = {"lr": 0.2, "steps": 1, "batch_size": None}
    run = fd.run(
        fd.FedAvgDistill(model=fd.Linear(), public=PUBLIC, student=STILL, weights=weights, **how),
        fed,
        1,
    )
    want = np.tensordot(share, each, 1)
    np.testing.assert_allclose(run.state.w["weight"], want[:4].T, atol=1e-6)
    np.testing.assert_allclose(run.state.w["bias"], want[4], atol=1e-6)
    # And ends at the teacher, the plain average of what the clients' models say, however clients
    # are weighed.
    run = fd.run(
        fd.FedAvgDistill(
            model=fd.Linear(), public=PUBLIC, student=INTERPOLATE, weights=weights, **how
        ),
        fed,
        1,
    )
    np.testing.assert_allclose(run.model.outputs(PUBLIC), bias(PUBLIC) @ each.mean(0), atol=1e-4)


def test_a_single_reply_is_its_own_teacher(digits):
    """The slopes of the student are rounding errors, of which Adam would make whole steps."""
    alone = fd.split(digits, clients=4).select([2])
    how = {"model": fd.MLP(5), "lr": 0.05}
    run = fd.run(fd.FedAvgDistill(**how, public=digits.x_train[:50]), alone, 1)
    plain = fd.run(fd.FedAvg(**how), alone, 1)
    for name, value in plain.state.w.items():
        torch.testing.assert_close(run.state.w[name], value, rtol=0, atol=1e-7)


def test_the_teacher_of_classes_is_the_softmax_of_the_average():
    """One step on cross-entropy from zero: w_i = lr B^T (onehot - 1/3) / n."""
    rng = np.random.default_rng(2)
    clients = [
        (rng.normal(size=(n, 4)).astype(np.float32), np.r_[0, 1, 2, rng.integers(0, 3, n - 3)])
        for n in (6, 14)
    ]
    fed = fd.Federation.from_clients(clients, classes=3)
    logits = [4.0 * bias(PUBLIC) @ bias(x).T @ (np.eye(3)[y] - 1 / 3) / len(x) for x, y in clients]
    e = np.exp(np.mean(logits, 0))
    student = fd.Training(lr=1.0, epochs=3000, batch_size=None)
    run = fd.run(
        fd.FedAvgDistill(
            model=fd.Linear(), public=PUBLIC, student=student, lr=4.0, steps=1, batch_size=None
        ),
        fed,
        1,
    )
    np.testing.assert_allclose(
        run.model.predict_proba(PUBLIC), e / e.sum(1, keepdims=True), atol=2e-3
    )


# -- conformance -----------------------------------------------------------------------------------


def test_two_steps_with_mu_do_not_depend_on_batching(fed, digits):
    """Every check of both methods is in tests/test_conformance.py."""
    algorithm = fd.FFGBDistill(
        fd.MLP(5),
        digits.x_train[300:330],
        local_steps=2,
        step=1.0,
        mu=0.1,
        oracle=QUICK,
        student=QUICK,
    )
    testing.check_batched_equals_looped(algorithm, fed, fd.Delayed(fd.Local()))


# -- bad input -------------------------------------------------------------------------------------


def made(kind, public, **changes):
    if kind == "FFGBDistill":
        return fd.FFGBDistill(fd.Linear(), public, **{"oracle": STILL, "student": STILL, **changes})
    return fd.FedAvgDistill(model=fd.Linear(), public=public, **{"student": STILL, **changes})


@pytest.mark.parametrize("kind", ["FFGBDistill", "FedAvgDistill"])
def test_bad_public_rows_are_refused(kind):
    nan, infinite = PUBLIC.copy(), PUBLIC.copy()
    nan[1, 2], infinite[0, 0] = np.nan, np.inf
    for public in (PUBLIC[:0], nan, infinite, np.ones(4, np.float32)):
        with pytest.raises(fd.DataError, match="at least one"):
            made(kind, public)
    for other in (np.ones((3, 5)), np.ones((3, 1, 2, 2))):
        with pytest.raises(fd.DataError, match=r"the clients' \(4,\)"):
            fd.run(made(kind, other), uneven(), 1)
    with pytest.raises(fd.ConfigError, match="student=3"):
        made(kind, PUBLIC, student=3)
    with pytest.raises(fd.ConfigError, match=r"weights='even'|'even' is unknown"):
        made(kind, PUBLIC, weights="even")


@pytest.mark.parametrize(
    "changes",
    [
        {"oracle": fd.Forest()},
        {"local_steps": 0},
        {"step": 0.0},
        {"step": "theorem4.1"},
        {"mu": -1.0},
    ],
    ids=str,
)
def test_bad_settings_are_refused(changes):
    with pytest.raises(fd.ConfigError, match=next(iter(changes))):
        made("FFGBDistill", PUBLIC, **changes)


def test_mu_may_be_a_number_of_numpy():
    assert fd.FFGB(mu=np.float32(0.5)).mu == 0.5
    assert made("FFGBDistill", PUBLIC, mu=np.float32(0.5)).mu == 0.5


def test_what_else_is_refused():
    with pytest.raises(fd.ConfigError, match="public=None"):
        fd.FedAvgDistill(model=fd.Linear())
    with pytest.raises(fd.ConfigError, match="'hinge' is unknown"):
        fd.run(made("FFGBDistill", PUBLIC, loss="hinge"), uneven(), 1)
    with pytest.raises(fd.ModelError, match="2 outputs"):
        fd.run(fd.FFGBDistill(torch.nn.Linear(4, 3), PUBLIC), uneven(), 1)
    with pytest.raises(fd.ModelError, match="2 outputs"):
        fd.run(fd.FFGBDistill(fd.Linear(), PUBLIC, weak=torch.nn.Linear(4, 3)), uneven(), 1)
    with pytest.raises(fd.DataError, match="views=2 needs images"):
        fd.Public(PUBLIC, views=2)
    with pytest.raises(fd.ConfigError, match="views"):
        fd.Public(PUBLIC, views=-1)


def test_views_of_public_images():
    """Each copy is cropped and flipped independently; the same key gives the same copies."""
    x = pictures(3)
    plain, views = fd.Public(x), fd.Public(x, views=2)
    assert torch.equal(plain.rows(random.key(0)), torch.from_numpy(x))
    rows = views.rows(random.key(0))
    assert rows.shape == (6, 2, 5, 7) and torch.equal(rows, views.rows(random.key(0)))
    assert not torch.equal(rows[:3], rows[3:]) and not torch.equal(rows, views.rows(random.key(1)))
    for row, image in zip(rows.numpy(), np.concatenate([x, x]), strict=True):
        assert any(np.array_equal(row, c) for c in crops(image))


# -- warm starts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["FedAvg", "FedProx", "Scaffold", "FedDyn", "FedAvgDistill"])
def test_a_run_starts_from_another(kind, fed, digits):
    public = digits.x_train[300:330]
    first = fd.run(fd.FFGBDistill(fd.MLP(8), public, step=1.0, oracle=QUICK, student=QUICK), fed, 2)
    more = {"mu": 0.1} if kind == "FedProx" else {"alpha": 0.1} if kind == "FedDyn" else {}
    more |= {"public": public, "student": QUICK} if kind == "FedAvgDistill" else {}
    algorithm = getattr(fd, kind)(model=fd.MLP(8), lr=0.05, batch_size=16, **more)
    warm, cold = fd.run(algorithm, fed, 1, start=first), fd.run(algorithm, fed, 1)
    begun, ended = warm.records.rows[0], first.records.rows[-1]
    assert begun["accuracy"] == ended["accuracy"] and begun["loss"] == pytest.approx(
        ended["loss"], rel=1e-6
    )
    assert begun["bytes_up"] == begun["bytes_down"] == 0
    assert warm.records.last("loss") != cold.records.last("loss")
    assert warm.records.last("loss") < begun["loss"]  # it goes on from there
    before = {k: v.clone() for k, v in first.state.w.items()}
    fd.run(algorithm, fed, 1, start=first)
    # the first run stays as it was
    assert all(torch.equal(v, before[k]) for k, v in first.state.w.items())


def test_runs_that_cannot_be_started_from(fed, digits):
    first = fd.run(fd.FedAvg(fd.MLP(8), lr=0.05), fed, 1)
    with pytest.raises(
        fd.ConfigError,
        match=r"holds a model of shapes .*\(8, 64\).*FedAvg learns one of .*\(9, 64\)",
    ):
        fd.run(fd.FedAvg(fd.MLP(9), lr=0.05), fed, 1, start=first)
    with pytest.raises(fd.ConfigError, match="holds a model of shapes"):
        fd.run(fd.FedAvg(fd.Linear(), lr=0.05), fed, 1, start=first)
    boosted = fd.run(fd.FFGB(fd.Forest(trees=1, depth=2)), fed, 1)
    with pytest.raises(fd.ConfigError, match="a global model w"):
        fd.run(fd.FedAvg(fd.MLP(8), lr=0.05), fed, 1, start=boosted)
    for other in (first.model, first.state.w, "run", 3):
        with pytest.raises(fd.ConfigError, match="must be a finished run"):
            fd.run(fd.FedAvg(fd.MLP(8), lr=0.05), fed, 1, start=other)
    with pytest.raises(fd.ConfigError, match="FFGB has none"):
        fd.run(fd.FFGB(fd.Forest(trees=1, depth=2)), fed, 1, start=first)


def test_a_warm_start_survives_a_checkpoint(fed, tmp_path):
    first = fd.run(fd.FedAvg(fd.MLP(8), lr=0.05), fed, 2)
    algorithm, path = fd.Scaffold(fd.MLP(8), lr=0.05), tmp_path / "checkpoint.safetensors"
    whole = fd.run(algorithm, fed, 3, start=first)
    fd.run(algorithm, fed, 1, start=first, checkpoint=path)
    resumed = fd.run(algorithm, fed, 3, start=first, checkpoint=path, resume=True)
    assert all(torch.equal(v, resumed.state.w[k]) for k, v in whole.state.w.items())


def test_a_checkpoint_of_another_warm_start_is_refused(fed, tmp_path):
    one, two = (fd.run(fd.FedAvg(fd.MLP(8), lr=0.05), fed, rounds) for rounds in (1, 2))
    algorithm, path = fd.FedAvg(fd.MLP(8), lr=0.05), tmp_path / "checkpoint.safetensors"
    fd.run(algorithm, fed, 1, start=one, checkpoint=path)
    with pytest.raises(fd.CheckpointError):
        fd.run(algorithm, fed, 2, start=two, checkpoint=path, resume=True)


# -- images cropped and flipped at random ----------------------------------------------------------


def pictures(n, shape=(2, 5, 7), seed=0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(1, 2, (n, *shape)).astype(np.float32)


def crops(image: np.ndarray, pad=4) -> list[np.ndarray]:
    """All 81 crops of a padded image, as they are and mirrored."""
    _, height, width = image.shape
    wide = np.pad(image, ((0, 0), (pad, pad), (pad, pad)))
    found = [
        wide[:, i : i + height, j : j + width]
        for i in range(2 * pad + 1)
        for j in range(2 * pad + 1)
    ]
    return found + [c[:, :, ::-1] for c in found]


def test_every_outcome_is_a_crop_or_its_mirror_image():
    """3000 copies of one image: each is one of the 162, and every one of them comes up about
    equally often.
    """
    image = pictures(1)[0]
    x = torch.from_numpy(np.repeat(image[None], 3000, 0))
    got = crop_flip(x, random.key(0)).numpy()
    assert got.shape == x.shape
    number = {c.tobytes(): i for i, c in enumerate(np.ascontiguousarray(c) for c in crops(image))}
    assert len(number) == 162
    counts = np.bincount([number[g.tobytes()] for g in np.ascontiguousarray(got)], minlength=162)
    assert counts[40] > 0  # row 4, column 4, not flipped: the image itself
    assert np.array_equal(crops(image)[40], image)
    assert counts.min() > 0
    expected = 3000 / 162
    assert ((counts - expected) ** 2 / expected).sum() < 161 + 5 * np.sqrt(2 * 161)
    assert abs(counts[81:].sum() - 1500) < 150


def test_different_images_keep_their_own_content():
    x = pictures(40)
    for got, image in zip(crop_flip(torch.from_numpy(x), random.key(3)).numpy(), x, strict=True):
        assert any(np.array_equal(got, c) for c in crops(image))


def test_the_key_decides():
    x = torch.from_numpy(pictures(10))
    a, b, c = (crop_flip(x, random.key(s)) for s in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_an_image_does_not_depend_on_its_batch():
    x, other = torch.from_numpy(pictures(10)), torch.from_numpy(pictures(10, seed=1))
    whole = crop_flip(x, random.key(0))
    assert torch.equal(crop_flip(x[:3], random.key(0)), whole[:3])
    assert torch.equal(crop_flip(torch.cat([x[:3], other]), random.key(0))[:3], whole[:3])
    # Several keys at once: every batch as with its key alone.
    keys = torch.stack([random.key(s) for s in range(6)]).view(2, 3, 2)
    stacked = torch.stack([x, other, x, other, x, other]).view(2, 3, *x.shape)
    both = crop_flip(stacked, keys)
    for i in range(2):
        for j in range(3):
            assert torch.equal(both[i, j], crop_flip(stacked[i, j], keys[i, j]))


def test_other_padding():
    image = pictures(1)[0]
    x = torch.from_numpy(np.repeat(image[None], 200, 0))
    found = {c.tobytes() for c in (np.ascontiguousarray(c) for c in crops(image, pad=1))}
    got = {g.tobytes() for g in crop_flip(x, random.key(0), pad=1).numpy()}
    assert got == found and len(found) == 18


@pytest.fixture(scope="module")
def images(digits) -> fd.Federation:
    """Digits as images of one channel, at four clients of unequal size."""
    x = digits.x_train[:120].reshape(-1, 1, 8, 8)
    data = fd.Data.from_arrays(x, digits.y_train[:120], x[:40], digits.y_train[:40], classes=10)
    return fd.split(data, "dirichlet", clients=4, alpha=0.5, seed=0)


@pytest.mark.parametrize(
    "model", [fd.MLP(5), fd.CNN(padding="same")], ids=["closed form", "convolutions"]
)
def test_training_with_augmentation(model, images):
    how = (
        {"lr": 0.05, "batch_size": 8, "epochs": 2}
        if isinstance(model, fd.MLP)
        else {"lr": 0.05, "batch_size": 8, "steps": 2}
    )
    plain, one, two = (
        fd.run(fd.FedAvg(model, augment=a, **how), images, 1)
        for a in (None, "crop_flip", "crop_flip")
    )
    assert all(torch.equal(v, two.state.w[k]) for k, v in one.state.w.items())
    assert any(not torch.equal(v, plain.state.w[k]) for k, v in one.state.w.items())


def test_augmentation_does_not_depend_on_batching(images):
    algorithm = fd.FedAvg(fd.MLP(5), lr=0.05, batch_size=8, epochs=2, augment="crop_flip")
    testing.check_batched_equals_looped(algorithm, images, fd.Local())


def test_augmentation_does_not_depend_on_the_company_of_larger_clients():
    """Clients of 3 and 30 rows, batches of 8: the small client alone has its rows in order, and
    permuted in a batch with the other.
    """
    x, y = pictures(33, (1, 8, 8)), np.arange(33) % 10
    fed = fd.Federation.from_clients([(x[:3], y[:3]), (x[3:], y[3:])], classes=10)
    algorithm = fd.FedAvg(fd.Linear(), lr=0.1, batch_size=8, augment="crop_flip")
    one, many = (
        fd.run(algorithm, fed, 1, engine=fd.Local(batch=b)).state.w["weight"] for b in (False, True)
    )
    np.testing.assert_allclose(one, many, atol=1e-5)


def test_one_augmented_step_by_hand(images):
    """One client, one full batch, a linear model from zero: w = -lr mean (softmax - onehot) x' on
    rows x' that were each moved.

    The bias does not depend on x'; the weights are those of the crops of the rows in the order of
    their epoch.
    """
    one = images.pool()
    run = fd.run(
        fd.FedAvg(fd.Linear(), lr=1.0, steps=1, batch_size=None, augment="crop_flip"), one, 1
    )
    y = one.data.y_train
    np.testing.assert_allclose(run.state.w["bias"], (np.eye(10)[y] - 0.1).mean(0), atol=1e-6)
    key = random.fold(random.key(0), 1, 0, torch.tensor([0]))[0]
    order = random.permutation(key, len(y)).numpy()
    moved = (
        crop_flip(
            torch.from_numpy(one.data.x_train[order]), random.fold(random.fold(key, 0xA06), 0)
        )
        .flatten(1)
        .double()
        .numpy()
    )
    y = y[order]
    np.testing.assert_allclose(
        run.state.w["weight"], (np.eye(10)[y] - 0.1).T @ moved / len(y), atol=1e-5
    )


def test_augmentation_of_flat_rows_is_refused(fed):
    with pytest.raises(fd.ConfigError, match="needs images"):
        fd.run(fd.FedAvg(fd.Linear(), augment="crop_flip"), fed, 1)
    with pytest.raises(fd.ConfigError, match="'flip' is unknown"):
        fd.Training(augment="flip")
