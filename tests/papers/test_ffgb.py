"""FFGB's experiments, small."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import foedus as fd
from foedus import wire
from foedus.models.trees import fit_trees
from foedus.papers import ffgb
from foedus.papers.item import Found, Missing


def test_theorem_4_3():
    error = {
        (T, r): ffgb.theorem43(0, T, r, 1.0, 0.3)[0]["error"]
        for T in (4, 36)
        for r in (True, False)
    }
    assert error[36, True] < 0.1 * error[4, True]
    assert error[36, False] > 5 * error[36, True]


def test_bagging_is_boosting_where_there_is_one_client():
    """One client, two classes, one round: a tree with Newton leaves, sum (y - 1/2) / (sum 1/4 + 1),
    at the rate.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 1)).astype(np.float32)
    y = (x[:, 0] > 0.3).astype(int)
    data = fd.Data.from_arrays(x, y, x, y, classes=2)
    fed = fd.split(data, "iid", clients=1)
    assert ffgb.bagging(fed, rounds=1, seed=0, depth=1) == 1.0
    # a stump has three nodes, of which one splits and two have a value for each class
    (first, second) = ffgb.bagging_by_round(fed, 2, seed=0, depth=1)
    stump = fit_trees(x, np.eye(2)[y] - 0.5, 1, 0, depth=1)
    assert first == (1.0, len(wire.encode({"trees": stump}))) and second[1] == first[1]


def test_trees_of_every_method(monkeypatch):
    monkeypatch.setattr(fd, "Forest", lambda: type("Few", (), {"trees": 1})())
    found = {m: ffgb.trees(0, "digits", 0.3, m, 2, 4)[0] for m in ("bagging",)}
    assert 0.3 < found["bagging"]["accuracy"] < 1
    monkeypatch.undo()
    (row,) = ffgb.trees(0, "digits", 0.3, "FFGB", 2, 4)
    assert row["accuracy"] > 0.85 and row["MB up"] > 0


def test_images(monkeypatch):
    data = fd.load("digits")
    monkeypatch.setitem(ffgb.NETS, "MLP 120-84", fd.MLP(16))
    monkeypatch.setattr(
        ffgb,
        "image_pair",
        lambda name, clients, s, rows, public, seed, test: (
            fd.split(data, "homogeneity", clients=4, s=s),
            data.x_test[:100],
        ),
    )
    size = {"clients": 4, "rows": 0, "public_rows": 0, "epochs": 3, "distil": 5, "local": 1}
    curves = {m: ffgb.curve(0, "digits", 0.3, m, 1, **size) for m in ffgb.METHODS}
    assert all([r["round"] for r in c] == [0, 1] for c in curves.values())
    start = {
        w: ffgb.curve(0, "digits", 0.3, "FedAvg", 1, **size, warm=w)[0]["accuracy"]
        for w in (True, False)
    }
    assert start[True] == curves["FFGB-Distill"][1]["accuracy"] > start[False]


def test_the_networks_of_section_6():
    """Two 5x5 convolutions of 64 filters; 384 (the text's 394 is a slip) and 192 neurons for CIFAR,
    120 and 84 for EMNIST.
    """
    for data, fully in (("cifar10", (384, 192)), ("cifar100", (384, 192)), ("letters", (120, 84))):
        net = ffgb.NETS[ffgb._size(data, "full")["model"]]
        assert (net.channels, net.kernel, net.hidden, net.leak) == ((64, 64), 5, fully, 0.01)
    usual = ffgb.NETS[ffgb._size("cifar10", "usual")["model"]]
    assert usual == ffgb.NETS[ffgb._size("cifar10", "full")["model"]]
    methods = ffgb.contenders(usual, np.zeros((4, 3, 32, 32), np.float32), 10, 10, 2, views=2)
    boost, average = methods["FFGB-Distill"], methods["FedAvg"]
    assert (boost.step, boost.mu, boost.local_steps, boost.public.views) == (10.0, 5e-3, 1, 2)
    assert boost.oracle == fd.Training(
        lr=1e-3, optimizer="adam", epochs=10, batch_size=64, clip=5.0, augment="crop_flip"
    )
    assert boost.student.weight_decay == 1e-3 and boost.student.augment is None
    assert (average.augment, average.clip, average.batch_size) == ("crop_flip", 5.0, 64)


def test_models_sent_until_a_target():
    """FFGB-Distill is at 0.5, then 0.7: targets 0.5 and 0.7.

    FedAvg reaches the first in round 3, the second never.
    """
    curves = {"FFGB-Distill": [0.1, 0.505, 0.7], "FedAvg": [0.1, 0.2, 0.4, 0.5, 0.69]}
    rows = [
        {"data": "d", "s": 0.1, "seed": 0, "method": m, "round": r, "accuracy": a}
        for m, c in curves.items()
        for r, a in enumerate(c)
    ]
    sent = ffgb.models_sent(pd.DataFrame(rows)).set_index(["target", "method"])["models"]
    assert sent.to_dict() == {
        ("first round", "FFGB-Distill"): 1, ("first round", "FedAvg"): 3,
        ("best", "FFGB-Distill"): 2, ("best", "FedAvg"): np.inf,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["heart_disease_4sites"])
def test_heart(name, real):
    data = ffgb.tabular_data(name)
    assert (
        data.classes == 2
        and len(np.unique(data.groups_train)) == 4
        and np.isfinite(data.x_train).all()
    )


def test_with_all_rows_the_targets_are_the_papers():
    """Table 2: CIFAR-10 with s = 0.1 to 0.50 and 0.55, the digits to 0.99 only."""
    rows = [
        {
            "data": d,
            "s": 0.1,
            "seed": 0,
            "method": "FFGB-Distill",
            "round": r,
            "accuracy": a,
            "rows": ffgb.WHOLE,
        }
        for d in ("cifar10", "digits")
        for r, a in enumerate([0.1, 0.49, 0.51, 0.56])
    ]
    sent = ffgb.models_sent(pd.DataFrame(rows)).set_index(["data", "target"])
    assert sent.accuracy.to_dict() == {
        ("cifar10", "first round"): 0.5,
        ("cifar10", "best"): 0.55,
        ("digits", "best"): 0.99,
    }
    assert sent.models.to_dict() == {
        ("cifar10", "first round"): 2.0,
        ("cifar10", "best"): 3.0,
        ("digits", "best"): np.inf,
    }


def test_distillation_against_plain_averaging_after_as_many_models():
    """CIFAR-10: 0.3 after two rounds against 0.2 then (0.5 later); CIFAR-100 the same, where the
    paper has it worse.
    """
    curves = {"FedAvg-Distill": [0.1, 0.2, 0.3], "FedAvg": [0.1, 0.1, 0.2, 0.5]}
    frame = pd.DataFrame(
        {"data": d, "s": 0.1, "seed": 0, "method": m, "round": r, "accuracy": a}
        for d in ("cifar10", "cifar100")
        for m, c in curves.items()
        for r, a in enumerate(c)
    )
    assert ffgb._improves("cifar10", True)(Found(frame)) == (True, "s = 0.1 +10.0")
    assert ffgb._improves("cifar100", False)(Found(frame)) == (False, "s = 0.1 +10.0")


# -- data sets and references ----------------------------------------------------------------------


def numbered(name: str, rows: int, start: int) -> fd.Data:
    """Rows with a number of their own each, in ten classes."""
    x = np.arange(start, start + rows, dtype=np.float32)[:, None]
    y = np.arange(rows) % 10
    return fd.Data.from_arrays(x, y, x[:30], y[:30], classes=10, name=name)


def test_pairs_of_image_sets(monkeypatch):
    loaded = []

    def load(name):
        loaded.append(name)
        return numbered(name, 200, 1000 * len(loaded))

    monkeypatch.setattr(fd, "load", load)
    fed, public = ffgb.image_pair("letters", 4, 0.5, 60, 20, seed=3, test_rows=7)
    assert loaded == ["nist_az_letters", "emnist_digits10k"]
    assert len(fed) == 4 and fed.sizes.sum() == 60
    assert (fed.data.x_test[:, 0] - 1000).tolist() == list(range(7))
    own = fed.data.x_train[:, 0] - 1000
    assert (own % 10 == fed.data.y_train).all()  # labels stay with their rows
    rng = np.random.default_rng(3)
    assert own.tolist() == rng.permutation(200)[:60].tolist()
    assert (public[:, 0] - 2000).tolist() == rng.permutation(200)[:20].tolist()
    for name, pair in {
        "cifar10": ["cifar10", "cifar100"],
        "cifar100": ["cifar100", "cifar10"],
        "digits": ["emnist_digits", "emnist_letters"],
        "letters": ["emnist_letters", "emnist_digits"],
    }.items():
        loaded.clear()
        fed, public = ffgb.image_pair(name, 4, 0.5, ffgb.WHOLE, ffgb.WHOLE, seed=0)
        assert loaded == pair and fed.sizes.sum() == len(public) == 200


def threshold() -> fd.Federation:
    """Label 1 where x > 0. The second client has label 0 alone, which 3 of 4 test rows have."""
    x = np.linspace(-1, 1, 80, dtype=np.float32)[:, None]
    y = (x[:, 0] > 0).astype(int)
    x_test = np.array([[-0.9], [-0.8], [-0.7], [0.9]], np.float32)
    return fd.Federation.from_clients(
        [(x, y), (x[:40], y[:40])], test=(x_test, np.array([0, 0, 0, 1])), classes=2
    )


def test_boosted_trees_with_all_rows_and_alone(monkeypatch):
    fed = threshold()
    assert ffgb.pooled(fed.data) == 1.0
    # the first client learns the threshold, the second always says 0: (1 + 3/4) / 2
    assert ffgb.alone(fed) == 0.875
    monkeypatch.setattr(ffgb, "tabular_data", lambda name: fed.data)
    monkeypatch.setattr(ffgb, "alone", lambda fed: 10.0 + len(fed))
    monkeypatch.setattr(ffgb, "pooled", lambda data: 20.0 + len(data.x_test))
    assert ffgb.trees(0, "mine", None, "alone", 1, 5) == [{"accuracy": 12.0}]  # its own two sites
    assert ffgb.trees(0, "mine", 0.5, "alone", 1, 5) == [{"accuracy": 15.0}]
    assert ffgb.trees(0, "mine", 0.5, "pooled", 1, 5) == [{"accuracy": 24.0}]


def test_fewer_models_than_another_method():
    def curves(**methods: list[float]) -> Found:
        return Found(
            pd.DataFrame(
                {"data": "d", "s": 0.1, "seed": 0, "method": m.replace("_", "-"), "round": r,
                 "accuracy": a}
                for m, c in methods.items()
                for r, a in enumerate(c)
            )
        )  # fmt: skip

    fast, slow = [0.1, 0.5, 0.7], [0.1, 0.2, 0.3, 0.7]
    test = ffgb._fewer("FedAvg").test
    assert test(curves(FFGB_Distill=fast, FedAvg=slow)) == (True, "d s = 0.1: 2 / 3")
    assert test(curves(FFGB_Distill=fast, FedAvg=[0.1, 0.2])) == (True, "d s = 0.1: 2 / never")
    assert test(curves(FFGB_Distill=fast, FedAvg=fast)) == (False, "d s = 0.1: 2 / 2")
    with pytest.raises(Missing, match="FedAvg"):
        test(curves(FFGB_Distill=fast))
    assert ffgb.models_sent(curves(FedAvg=slow).frame).empty  # there is no target
