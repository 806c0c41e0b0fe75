"""The experiments of the FedFW paper: what the authors' code does, step by step in NumPy, and the
tables' machinery.
"""

import numpy as np
import pytest
import torch

import foedus as fd
from foedus.papers import fedfw as paper

SIZES = (5, 3)
DATA = np.random.default_rng(0)
X = DATA.normal(size=(8, 3)).astype(np.float32)
Y = np.array([0, 1, 2, 0, 1, 2, 2, 0])
OWNER = np.repeat([0, 1], SIZES)


def fed():
    data = fd.Data.from_arrays(
        X, Y, X[:4], Y[:4], classes=3, groups=OWNER, groups_test=np.array([0, 0, 1, 1])
    )
    return fd.split(data, "natural")


def slope(w, b, x, y):
    score = x @ w.T + b
    p = np.exp(score - score.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return p.T @ x / len(y), p.mean(0)


def best(g, ball):
    if isinstance(ball, fd.L2Ball):
        return -ball.radius * g / np.linalg.norm(g)
    s, k = np.zeros_like(g), np.abs(g).argmax()
    s.flat[k] = -ball.radius * np.sign(g.flat[k])
    return s


@pytest.mark.parametrize("ball", [fd.L2Ball(2.0), fd.L1Ball(3.0)])
@pytest.mark.parametrize("averaged", [False, True])
def test_published_protocol_step_by_step(ball, averaged):
    """Batches in stored order, steps counted per client, a ball per tensor, clients that begin at
    the centre and send x_i.
    """
    center = [np.zeros((3, 3)), np.zeros(3)]
    made, d = [0, 0], [[np.zeros((3, 3)), np.zeros(3)] for _ in range(2)]
    for _ in range(3):
        sent = []
        for i in range(2):
            x, rows = [c.copy() for c in center], np.flatnonzero(i == OWNER)
            for first in range(0, len(rows), 2):
                batch = rows[first : first + 2]
                g = [v / 2 for v in slope(*x, X[batch], Y[batch])]
                made[i] += 1
                k = made[i]
                eta, pull = (
                    (9 / (k + 8), 0.05 * np.sqrt(k + 8))
                    if averaged
                    else (2 / (k + 1), 0.05 * np.sqrt(k + 1))
                )
                if averaged:
                    rho = 4 / (k + 7) ** (2 / 3)
                    g = d[i] = [
                        (1 - rho) * old + rho * new for old, new in zip(d[i], g, strict=True)
                    ]
                g = [v + pull * (a - c) for v, a, c in zip(g, x, center, strict=True)]
                x = [(1 - eta) * a + eta * best(v, ball) for a, v in zip(x, g, strict=True)]
            sent.append(x)
        center = [(a + b) / 2 for a, b in zip(*sent, strict=True)]
    algorithm = paper.PublishedFedFW(
        fd.Linear(), fd.PerLayer(ball), penalty=0.05, batch_size=2, averaged=averaged
    )
    state = fd.run(algorithm, fed(), 3).state
    np.testing.assert_allclose(state.center["weight"], center[0], atol=2e-5)
    np.testing.assert_allclose(state.center["bias"], center[1], atol=2e-5)


@pytest.mark.parametrize("ball", [fd.L2Ball(0.1), fd.L1Ball(0.1)])
def test_published_feddr_step_by_step(ball):
    def zeros():
        return [np.zeros((3, 3)), np.zeros(3)]

    w, x, y, h = zeros(), [zeros(), zeros()], [zeros(), zeros()], [zeros(), zeros()]
    for t in range(4):
        moves = []
        for i in range(2):
            rows = np.flatnonzero(i == OWNER)
            batch = rows[(t * 2 + np.arange(2)) % len(rows)]
            y[i] = [a + 0.1 * (c - b) for a, b, c in zip(y[i], x[i], w, strict=True)]
            g = slope(*x[i], X[batch], Y[batch])
            x[i] = [a - 0.5 * (v + 0.1 * (a - b)) for a, v, b in zip(x[i], g, y[i], strict=True)]
            new = [2 * a - b for a, b in zip(x[i], y[i], strict=True)]
            moves.append([a - b for a, b in zip(new, h[i], strict=True)])
            h[i] = new
        w = [a + (b + c) / 2 for a, b, c in zip(w, *moves, strict=True)]
        flat = np.concatenate([v.ravel() for v in w])
        norm = np.abs(flat).sum() if isinstance(ball, fd.L1Ball) else np.linalg.norm(flat)
        w = [v * min(1, 0.1 / norm) for v in w]
    algorithm = paper.PublishedFedDR(fd.Linear(), domain=ball, lr=0.5, batch_size=2, steps=1)
    state = fd.run(algorithm, fed(), 4).state
    np.testing.assert_allclose(state.w["weight"], w[0], atol=1e-6)
    assert (
        float(
            torch.cat([v.flatten() for v in state.w.values()]).norm(
                1 if isinstance(ball, fd.L1Ball) else 2
            )
        )
        <= 0.1001
    )


@pytest.mark.parametrize("protocol", ["described", "published"])
@pytest.mark.parametrize("which", ["table1", "table2", "table3"])
def test_a_cell_has_every_method_with_its_published_number(protocol, which):
    rows = paper.accuracies(0, which, protocol, "l2", "synthetic", "non-iid", rounds=2)
    names = [r["method"] for r in rows]
    assert names[0] == "FedDR" and set(names[1:]) <= {"FedFW", "FedFW+", "FedFW-sto"}
    # that branch of theirs never runs
    assert ("FedFW+" in names) == (protocol == "described" and which != "table3")
    for row in rows:
        assert 0 <= row["last"] <= row["best"] <= 100
    known = {("table1", "FedFW"): 94.81, ("table2", "FedFW"): 96.13, ("table3", "FedFW-sto"): 87.32}
    assert (
        paper.published_numbers(which)["l2", "synthetic", "non-iid", names[1]]
        == known[which, names[1]]
    )


def test_published_synthetic_has_three_classes_and_described_three_labels_a_client():
    setup = paper.Setup("table1", "synthetic", "l1", "non-iid")
    three = paper.federation(setup, "published", 0)
    assert three.data.classes == 3
    ten = paper.federation(setup, "described", 0)
    assert ten.data.classes == 10
    assert ((ten.label_counts() > 0).sum(1) <= 3).all()


def test_the_counter_example_stays_where_it_is():
    stays = paper.counter_example(0, "averaged Frank-Wolfe", 10, 1.0)
    moves = paper.counter_example(0, "FedFW", 200, 1.0)
    assert {r["x"] for r in stays} == {0.0}
    assert moves[-1]["distance"] < 0.15 < moves[0]["distance"]


def test_participation_and_penalties_return_curves():
    for variant in ("convex", "penalty", "augmented"):
        rows = paper.participation(0, variant, 1e-3, 0.5, 4)
        assert [r["round"] for r in rows] == [0, 1, 2, 3, 4]
    rows = paper.penalties(0, "d", 1e-3, 3, 0)
    assert [r["round"] for r in rows] == [1, 2, 3] and all(r["gap"] > 0 for r in rows)


def test_traffic_of_the_l1_ball_is_one_entry():
    found = {r["method"]: r for r in paper.traffic(0, "digits", 10, 4)}
    assert found["FedFW, L1Ball"]["up"] < 30 < 2500 < found["FedAvg"]["up"]
    assert found["FedFW, L1Ball"]["FedAvg / down"] > 10
    assert found["FedAvg"]["FedAvg / up"] == 1


def test_what_a_message_gives_away():
    rows = paper.leakage(0, "digits", 3, 40, 1.0)
    end = {r["message"]: r["end"] for r in rows if "end" in r}
    gradient, l1 = end["gradient"], next(v for k, v in end.items() if "L1" in k)
    assert gradient > l1 + 10
    pictures = {r["message"]: np.asarray(r["picture"]) for r in rows if "picture" in r}
    assert all(p.shape == (8, 8, 1) and p.min() >= 0 and p.max() <= 255 for p in pictures.values())
    error = [
        np.square(pictures[m] / 255.0 - pictures["original"] / 255.0).mean() for m in ("gradient",)
    ]
    # the picture that is stored is the one that was measured
    assert -10 * np.log10(error[0] + 1e-12) > 20
