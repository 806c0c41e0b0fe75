"""`fd.diagnose`: numbers by hand, every rule on a federation made for it, sampling, the page and
the picture, bad input.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import foedus as fd
from foedus.diagnosis import advice as rules
from foedus.diagnosis import diagnose as module
from tests.report.test_page import check

ONE, OWN, UNKNOWN, BEWARE = rules.ONE, rules.OWN, rules.UNKNOWN, rules.BEWARE


def rng(seed=0):
    return np.random.default_rng(seed)


def given(x, y, clients, classes=None, **options):
    data = fd.Data.from_arrays(np.asarray(x, np.float32), y, classes=classes)
    return fd.split(data, options.pop("scheme", "iid"), clients=clients, **options)


def images(**options):
    x, y = rng().normal(size=(120, 3, 16, 16)), np.arange(120) % 4
    return given(x, y, 6, 4, **options)


def boxes(classes=4, **options):
    """Labels by thresholds on two of eight features: easy for trees, hard for smooth functions of
    all eight.
    """
    x = rng().uniform(-1, 1, size=(800, 8))
    cell = 2 * (np.floor(x[:, 0] * 3).astype(int) % 2) + np.floor(x[:, 1] * 3).astype(int) % 2
    return given(x, cell if classes else cell.astype(np.float32), 4, classes, **options)


def linear(rows, clients, signs=None, features=3, noise=0.3, scale=1.0):
    """y = w . x with noise; by `signs`, some clients have -w."""
    w, made = np.ones(features), []
    for i in range(clients):
        x = rng(i).normal(size=(rows, features))
        y = (x @ w) * (1 if signs is None else signs[i]) + noise * rng(i + 99).normal(size=rows)
        made.append((x.astype(np.float32), (scale * y).astype(np.float32)))
    return fd.Federation.from_clients(made)


def blobs(clients=4, rows=60, skewed=False, features=3, shift=0.0):
    """Three well separated classes; skewed: clients hold one each; shift: what client i adds to all
    its features.
    """
    made = []
    for i in range(clients):
        y = np.full(rows, i % 3) if skewed else rng(i).integers(0, 3, rows)
        x = rng(i + 50).normal(size=(rows, features)) + 3 * np.eye(3, features)[y] + shift * i
        made.append((x.astype(np.float32), y))
    return fd.Federation.from_clients(made, classes=3)


def related():
    """Thirty clients of sixteen rows: nineteen weights in common, one of each client's own."""
    made, w = [], rng(1).normal(size=20)
    for i in range(30):
        x = rng(i).normal(size=(16, 20))
        made.append((x.astype(np.float32), (x @ np.r_[4 * (-1) ** i, w[1:]]).astype(np.float32)))
    return fd.Federation.from_clients(made)


def windows():
    """Each client sees another piece of one curve, nearly straight: own lines do well, and one
    curve for all does better.
    """
    x = [rng(i).uniform(2 * i, 2 * i + 2, size=(40, 1)).astype(np.float32) - 8 for i in range(8)]
    return fd.Federation.from_clients([(v, np.sin(v[:, 0])) for v in x])


# For each rule, in their order: a federation for which it is made, and what it then says.
CASES = [
    (images, ONE, "fd.FedAvg(epochs=5, model=fd.CNN())"),
    (
        lambda: images(scheme="labels", per_client=1),
        ONE,
        "fd.FedDyn(epochs=5, model=fd.CNN(), alpha=0.6)",
    ),
    (boxes, ONE, "fd.FFGB()"),
    (lambda: boxes(scheme="dirichlet", alpha=0.3), ONE, "fd.FFGB(step=3.0)"),
    (lambda: linear(200, 3), ONE, "fd.FedNewton(fd.Identity(intercept=True), reg=0.01)"),
    (lambda: linear(4, 6, features=10), ONE, "solver='cg')"),
    (lambda: blobs(skewed=True), ONE, "fd.FedDyn(epochs=5, model=fd.MLP(hidden=(64,)), alpha=0.3)"),
    (blobs, ONE, "fd.FedAvg(epochs=5, model=fd.MLP(hidden=(64,)))"),
    (lambda: linear(40, 3), ONE, "fd.FedAvg(lr=0.01, epochs=5, model=fd.MLP(hidden=(64,)))"),
    (related, OWN, "fd.FedRes(step=0.05, batch_size=10)"),
    (lambda: linear(60, 2, signs=(1, -1)), OWN, "fd.Independent(lr=0.01, epochs=5)"),
    (lambda: linear(60, 3), OWN, "Not needed: one linear model"),
    (windows, OWN, "Not needed: one nonlinear model for all"),
    (lambda: blobs(features=100), UNKNOWN, "fd.FedFW(domain=fd.L1Ball(30.0))"),
    (blobs, UNKNOWN, "fd.FedBoost(predictors)"),
    (lambda: blobs(rows=5), BEWARE, "no more than 5 rows"),
    (lambda: linear(40, 3, scale=1000.0), BEWARE, "divide y by it first"),
    (lambda: blobs(shift=4.0), BEWARE, "units and scaling at the sites"),
]


@pytest.mark.parametrize("k", range(len(CASES)))
def test_every_rule_fires_where_it_should(k):
    make, aim, said = CASES[k]
    found = fd.diagnose(make(), iterations=10)
    rule = rules.RULES[k]
    assert rule.when(found.facts)
    mine = rules.Advice(rule.aim, rule.make(found), rule.text.format_map(found.facts))
    assert mine in found.advice
    assert mine.aim == aim
    assert said in " ".join(str(mine).split())
    assert "{" not in mine.text
    # One answer for each question, and code that makes what is advised.
    assert found.advice[0].aim == ONE
    assert sum(a.aim == OWN for a in found.advice) == 1
    for entry in found.advice:
        if entry.algorithm is not None:
            assert eval(entry.code, {"fd": fd}) == entry.algorithm


def test_each_rule_has_its_case():
    assert len(CASES) == len(rules.RULES)


@pytest.mark.parametrize("make", [blobs, lambda: linear(40, 3), lambda: boxes(classes=None)])
def test_what_is_advised_runs(make):
    fed = make()
    for entry in fd.diagnose(fed, iterations=5).advice:
        if entry.algorithm is not None:
            fd.run(entry.algorithm, fed, 1, evaluate_every=0)


def test_trees_for_regression_have_a_smaller_step():
    found = fd.diagnose(boxes(classes=None), iterations=5)
    assert found.advice[0].algorithm == fd.FFGB(step=1.0)


# -- numbers ---------------------------------------------------------------------------------------


def test_disjoint_labels_by_hand():
    """Two clients with a label each, at 0 and at 3: from the pooled labels each is 1/2 away, from
    the pooled rows 1.5.
    """
    x = np.zeros((8, 1), np.float32)
    found = fd.diagnose(
        fd.Federation.from_clients([(x, np.zeros(8, int)), (x + 3, np.ones(8, int))], classes=2)
    )
    assert found.labels.tolist() == [0.5, 0.5]
    assert found.facts["label_tv"] == found.facts["label_tv_max"] == 0.5
    assert found.facts["omega_tv"] == 0.5
    assert found.facts["omega_w1"] == pytest.approx(1.5)
    assert found.facts["label_tv_by_chance"] < 0.5


def test_label_tv_is_to_the_pooled_labels():
    """Rows count, not clients: pooled labels are 7/8 and 1/8; client 0 has 5/6 and 1/6, client 1
    has 1 and 0.
    """
    labels = [[0, 0, 0, 0, 0, 1], [0, 0]]
    fed = fd.Federation.from_clients(
        [(np.eye(len(y), 2, dtype=np.float32), np.array(y)) for y in labels], classes=2
    )
    assert fd.diagnose(fed, iterations=3).labels == pytest.approx([1 / 24, 1 / 8])


def test_identical_clients_are_at_no_distance():
    x, y = rng().normal(size=(30, 2)).astype(np.float32), rng().integers(0, 2, 30)
    found = fd.diagnose(
        fd.Federation.from_clients([(x, y)] * 3, classes=2), features=fd.Identity(), reg=0.1
    )
    for name in ("label_tv", "omega_tv", "omega_w1", "data_shift", "model_shift", "radius"):
        assert found.facts[name] == pytest.approx(0, abs=1e-6), name


def test_rounds_that_gain_a_digit():
    fed = linear(30, 3)
    found = fd.diagnose(fed, features=fd.Identity(), reg=0.5, iterations=60)
    radius = found.newton.radius
    assert found.facts["rounds_a_digit"] == pytest.approx(1 / -math.log10(radius))
    exact = fd.run(fd.KRR(fd.Identity(), reg=0.5), fed, 0).state.w
    error = [
        (fd.run(fd.FedNewton(fd.Identity(), reg=0.5), fed, t).state.w - exact).norm()
        for t in (2, 4)
    ]
    assert float((error[1] / error[0]) ** 0.5) == pytest.approx(radius, rel=0.2)


def test_given_features_are_used(fed):
    features = fd.RandomFourier(40, bandwidth=4.0)
    found = fd.diagnose(fed, features=features, reg=1e-2, iterations=3)
    assert found.features == features
    assert found.facts["reg"] == 1e-2
    assert "fd.RandomFourier(40, bandwidth=4.0), reg=0.01" in str(found)
    assert repr(found).startswith(f"{fed.describe()}\n\nlabel TV ")  # not a list of fields
    alone = fd.spectrum(fed, features, 1e-2, iterations=3)
    assert found.newton.radius == pytest.approx(alone.radius)
    module_features = torch.nn.Linear(64, 5)
    assert fd.diagnose(fed, features=module_features, iterations=3).fits["features"] > 0


def test_a_diagnosis_repeats_in_any_order_of_clients(fed):
    one, two = (
        fd.diagnose(fed, iterations=5),
        fd.diagnose(fed.select([2, 4, 0, 1, 3]), iterations=5),
    )
    assert two.facts == pytest.approx(one.facts, rel=1e-6)
    assert two.advice == one.advice


def test_large_federations_are_sampled(monkeypatch):
    monkeypatch.setattr(module, "_CLIENTS", 5)
    monkeypatch.setattr(module, "_ROWS", 100)
    sizes = [3, 10, 60, 80, 90, 70, 65]
    fed = fd.Federation.from_clients(
        [(rng(n).normal(size=(n, 2)).astype(np.float32), rng(n).integers(0, 2, n)) for n in sizes]
    )
    found = fd.diagnose(fed, iterations=3)
    assert len(found.part) == 5
    assert 95 <= len(found.part.rows) <= 100
    for i, client in enumerate(found.part.ids):
        kept, all_rows = found.part.client_rows(i), fed.client_rows(int(client))
        assert set(kept) <= set(all_rows)
        # Only the largest are cut, all to the same level.
        assert len(kept) == len(all_rows) or len(kept) == max(found.part.sizes)
    assert len(found.labels) == 7
    assert found.per_client()["label_TV"].tolist() == [found.labels[i] for i in found.part.ids]
    assert f"measured on 5 clients with {len(found.part.rows)} rows, drawn at random" in str(found)
    other = fd.diagnose(fed, iterations=3, seed=1)
    assert not np.array_equal(found.part.rows, other.part.rows)
    np.testing.assert_array_equal(fd.diagnose(fed, iterations=3).part.rows, found.part.rows)


@pytest.mark.parametrize(
    "clients",
    [
        [(np.ones((1, 2)), [0])],
        [(np.ones((1, 2)) * i, [i % 2]) for i in range(5)],
        [(np.ones((4, 2)), [0, 1, 2, 0])] * 2,
        [(np.eye(4), [1, 1, 1, 1])] * 2,
    ],
    ids=["one row", "a row each", "constant features", "one label"],
)
def test_federations_with_little_in_them(clients, tmp_path):
    fed = fd.Federation.from_clients(
        [(np.asarray(x, np.float32), np.array(y)) for x, y in clients], classes=3
    )
    found = fd.diagnose(fed, iterations=3)
    assert found.advice[0].algorithm is not None
    assert "nan" not in str(found)
    found.report(tmp_path / "p.html")


# -- page, picture, errors -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["classes", "values", "many"])
def test_the_page_is_whole(kind, fed, values, tmp_path):
    if kind == "many":
        fed = blobs(clients=45, rows=6)
    found = fd.diagnose(values if kind == "values" else fed, iterations=5)
    page = found.report(tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    parsed = check(page)
    for text in (
        found.advice[0].code,
        found.advice[0].text,
        "omega_W1",
        "task similarity",
        "clients",
    ):
        assert text in parsed.text
    assert ("label TV" in parsed.text) == (kind != "values")
    assert parsed.tags.count("figure") == {"classes": 5, "values": 5, "many": 6}[kind]


@pytest.mark.parametrize(("name", "magic"), [("p.svg", b"<?xml"), ("p.png", b"\x89PNG")])
def test_the_picture(name, magic, fed, tmp_path):
    found = fd.diagnose(fed, iterations=3)
    assert found.plot(tmp_path / name).read_bytes().startswith(magic)
    with pytest.raises(fd.ConfigError, match=r"must be named \.svg or \.png"):
        found.plot(tmp_path / "p.pdf")


def test_bad_input(fed):
    with pytest.raises(fd.ConfigError, match="fed is a Data; give a Federation"):
        fd.diagnose(fed.data)
    with pytest.raises(fd.ConfigError, match="seed=-1 must be"):
        fd.diagnose(fed, seed=-1)
    with pytest.raises(fd.ConfigError, match="reg=0 must be"):
        fd.diagnose(fed, reg=0)
    with pytest.raises(fd.ModelError, match="features must be a foedus feature map"):
        fd.diagnose(fed, features="fourier")
    with pytest.raises(fd.ConfigError, match="iterations=0"):
        fd.diagnose(fed, iterations=0)


def test_an_algorithm_gives_its_features(fed):
    found = fd.diagnose(fed, algorithm=fd.FedNewton(fd.Identity(), 0.5), iterations=60)
    alone = fd.spectrum(fed, fd.Identity(), 0.5, iterations=60)
    assert (found.features, found.newton.reg, found.radius) == (
        fd.Identity(),
        0.5,
        pytest.approx(alone.radius),
    )
    assert found.converges == alone.converges == (alone.radius < 1)
    word = "converges" if alone.converges else "diverges"
    assert f"plain Newton {word}; fd.Identity(), reg=0.5" in str(found)
    with pytest.raises(fd.ConfigError, match="not both"):
        fd.diagnose(fed, fd.FedNewton(fd.Identity()), features=fd.Identity())
    for other in (fd.FedAvg(), fd.FedNewton(fd.Identity(), loss="logistic")):
        with pytest.raises(fd.ConfigError, match=r"must be a fd\.FedNewton"):
            fd.diagnose(fed, other)


def test_former_names_still_work_and_say_what_they_are_now(fed):
    assert fd.Survey is fd.Diagnosis
    with pytest.warns(FutureWarning, match=r"fd\.survey is now fd\.diagnose"):
        found = fd.survey(fed, fd.Identity(), 0.5, iterations=5)
    assert isinstance(found, fd.Diagnosis)
    for options in ({}, {"per_client": False}, {"confidence": 0.9}):
        with pytest.warns(FutureWarning, match=r"is now fd\.spectrum.*algorithm=fd\.FedNewton"):
            former = fd.diagnose(fed, fd.Identity(), 0.5, iterations=5, **options)
        assert former == fd.spectrum(fed, fd.Identity(), 0.5, iterations=5, **options)
    assert former.radius == pytest.approx(found.radius)


def test_labels_are_skewed_beyond_chance():
    assert rules._skewed({"label_tv": 0.5, "label_tv_by_chance": 0.25})
    assert not rules._skewed({"label_tv": 0.5, "label_tv_by_chance": 0.4})


def test_a_gain_counts_beyond_its_noise():
    assert rules._adds_up({"gain": 0.01, "gain_noise": 0.004})
    assert not rules._adds_up({"gain": 0.01, "gain_noise": 0.006})
    assert not rules._adds_up({"gain": 0.002, "gain_noise": 0.0})


@pytest.mark.parametrize(
    ("radius", "solver"),
    [(0.2, "Newton converges"), (0.95, "would diverge"), (3.0, "would diverge")],
)
def test_one_solver_of_fednewton_is_advised(radius, solver):
    """A radius near 1 hardly moves, and is approached from below: conjugate gradients from 0.9
    on.
    """
    about = [rule for rule in rules.RULES if rule.text.startswith("The spectral radius")]
    (right,) = (rule for rule in about if rule.when({"radius": radius}))
    assert len(about) == 2 and solver in right.text
