"""Metrics from sums: those of scikit-learn on the pooled rows, AUC within its stated bound; and
sums that cannot be.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

import foedus as fd
from foedus.core import metric_sums
from foedus.core.metric_sums import SUMS, auc, auc_bin_error, pair, r2, score_bins
from foedus.core.metrics import CLASSIFICATION, REGRESSION
from foedus.core.predictions import Predictions
from foedus.core.site_sums import LARGEST, SiteSums
from tests.core.test_metrics import classified, parts, reference, valued

CLASSES, VALUES = tuple(CLASSIFICATION), tuple(REGRESSION)


def told(p: Predictions, names=CLASSES):
    """What the clients tell whose rows are the groups of p."""
    outputs = p.given.shape[1]
    sums = SiteSums(names, p.classes, outputs)
    if p.classes:
        usual = {"loss": p.sum(-np.log(p.of_label)), "hits": p.sum(p.predicted == p.y)}
    else:
        errors = ((p.y - p.given) ** 2).mean(1)
        usual = {"loss": p.sum(errors), "error": p.sum(errors)}
    return sums, sums.of(p, usual)


def pooled(p: Predictions) -> Predictions:
    return replace(p, group=None, groups=1)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_of_clients_give_the_metrics_of_the_pooled_rows(classes, weighted):
    p = classified(classes, weighted)
    sums, found = told(p)
    total = sums.added(found)
    values = {k: float(v[0]) for k, v in sums.finish(total).items()}
    for name in CLASSES:
        within = values["auc_bin_error"] if name == "auc" else 1e-12
        assert values[name] == pytest.approx(reference(name, pooled(p)), abs=within, rel=0)
    hits = (p.given.argmax(1) == p.y) @ p.w / p.w.sum()
    assert values["accuracy"] == pytest.approx(hits, rel=1e-12)
    assert values["loss"] == pytest.approx(values["log_loss"], rel=1e-12)


def test_each_client_has_the_metrics_of_its_rows():
    p = classified(4, False)
    sums, found = told(p)
    each = sums.finish(found)
    for g, part in enumerate(parts(p)):
        if len(part.y):
            assert each["brier"][g] == pytest.approx(reference("brier", part), rel=1e-12)
            assert each["f1"][g] == pytest.approx(reference("f1", part), rel=1e-12)
        else:
            assert all(np.isnan(each[name][g]) for name in CLASSES)


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_of_values_give_the_metrics_of_the_pooled_rows(outputs, weighted):
    p = valued(outputs, weighted)
    sums, found = told(p, VALUES)
    values = sums.finish(sums.added(found))
    for name in VALUES:
        assert values[name][0] == pytest.approx(reference(name, pooled(p)), rel=1e-12)


def test_variance_far_from_zero_does_not_cancel():
    """Labels in single precision around 1e6 with a spread of 1: sum y^2 has 12 digits before those
    that the variance begins with.
    """
    rng = np.random.default_rng(0)
    y = (1e6 + rng.standard_normal((300, 1))).astype(np.float32).astype(np.float64)
    p = Predictions(y, y + 0.5 * rng.standard_normal(y.shape), None, np.repeat([0, 1, 2], 100), 3)
    sums, found = told(p, ("r2",))
    value = sums.finish(sums.added(found))["r2"][0]
    assert value == pytest.approx(sk.r2_score(y, p.given), rel=1e-12)
    doubles = {k: np.where([1, 0, 1, 0], v, 0) if k == "moments" else v for k, v in found.items()}
    naive = sums.finish({k: v.sum(0, keepdims=True) for k, v in doubles.items()})["r2"][0]
    assert abs(naive - value) > 1e-9  # without the second halves of the pairs


def test_a_sum_as_a_pair():
    values = [1e16, 1.0, 1e-9, -1e16]
    assert pair(values) == (1.0 + 1e-9, (1e-9 - ((1.0 + 1e-9) - 1.0)))
    assert pair([math.inf, 1.0]) == (math.inf, 0.0)


def test_auc_of_bins_by_hand():
    """One bin each for 0.2, twice 0.5 (a positive, a negative) and 0.8, and 0.8001 with 0.8: exact
    wins of positives (0.5, 0.8) over negatives (0.2, 0.5, 0.8001): 1 + 1/2 + 0 + 1 + 1 + 0 = 3.5 of
    6. By bins the pair 0.8, 0.8001 is a tie: 4 of 6, and two pairs of one bin: off by at most 1/6.
    """
    scores = np.array([0.5, 0.8, 0.2, 0.5, 0.8001])
    y = np.array([1, 1, 0, 0, 0])
    p = Predictions(y, np.stack([1 - scores, scores], 1), classes=2)
    s = {"scores": SUMS["scores"](p)}
    assert sk.roc_auc_score(y, scores) == pytest.approx(3.5 / 6)
    assert auc(s).tolist() == [4 / 6] and auc_bin_error(s).tolist() == [1 / 6]


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_auc_is_within_its_bound(data):
    """Also of scores that crowd near 0, near 1, or in one bin."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    n, scale = data.draw(st.integers(2, 300)), data.draw(st.sampled_from([1e-3, 0.1, 3.0, 30.0]))
    center = data.draw(st.sampled_from([-20.0, -8.0, 0.0, 5.0]))
    y = rng.integers(0, 2, n)
    y[:2] = 0, 1
    score = 1 / (1 + np.exp(-(center + scale * (rng.standard_normal(n) + 0.5 * y))))
    p = Predictions(y, np.stack([1 - score, score], 1), classes=2)
    s = {"scores": SUMS["scores"](p)}
    exact = sk.roc_auc_score(y, score)
    assert abs(auc(s)[0] - exact) <= auc_bin_error(s)[0] + 1e-12


def test_bins_are_fine_in_probability_and_in_odds():
    edges = metric_sums._edges(score_bins(2))
    assert len(edges) == 1023 and (np.diff(edges) > 0).all()
    assert np.diff([0.0, *edges, 1.0]).max() <= 1 / 512 + 1e-12
    odds = np.log(edges) - np.log1p(-edges)
    assert np.diff(odds).max() <= 0.0705 and odds[0] == pytest.approx(-18)
    # a rare event, scores around 1 in 3,000: the bound stays useful
    rng = np.random.default_rng(0)
    y = (rng.random(20_000) < 0.01).astype(np.int64)
    score = 1 / (1 + np.exp(8 - rng.standard_normal(20_000) - y))
    s = {"scores": SUMS["scores"](Predictions(y, np.stack([1 - score, score], 1), classes=2))}
    assert auc_bin_error(s)[0] < 0.01


def test_many_classes_have_fewer_bins():
    """2 x 64 x 1024 = 2^17 numbers; 1000 classes: 2^17 / 2000 = 65, made even."""
    assert [score_bins(k) for k in (2, 64, 65, 1000, 10**6)] == [1024, 1024, 1008, 64, 32]
    assert len(metric_sums._edges(64)) == 63


def test_r2_of_a_constant():
    y = np.full((4, 1), np.float32(0.1)).astype(np.float64)
    for off, due in ((0.0, 1.0), (0.5, 0.0)):
        p = Predictions(y, y + off)
        s = {"rows": p.total, "squares": SUMS["squares"](p), "moments": SUMS["moments"](p)}
        assert r2(s).tolist() == [due]


# -- what clients tell -----------------------------------------------------------------------------


def one(p: Predictions, names=CLASSES):
    sums, found = told(pooled(p), names)
    return sums, {k: v[0] for k, v in found.items()}


def test_what_honest_clients_tell_is_accepted():
    for classes in (2, 4):
        p = classified(classes, False)
        sums, found = one(p)
        assert sums.wrong(found, len(p.y)) is None and sums.wrong(found) is None
    sums, found = one(valued(3, False), VALUES)
    assert sums.wrong(found, 73) is None


def change(name, value, at=...):
    def spoil(found):
        found[name] = np.array(found[name])
        found[name][at] = value
        return found

    return spoil


LIES = {
    "NaN": (change("loss", np.nan), "loss must be finite"),
    "infinite": (change("brier", np.inf), "brier must be finite"),
    "negative": (change("scores", -1.0, (0, 0, 3)), "scores must be counts of rows"),
    "half a row": (change("hits", 1.5), "hits must be counts of rows"),
    "more rows": (change("rows", 74.0), "they are of 74 rows, and there are 73"),
    "more hits": (change("hits", 74.0), "hits cannot be of 73 rows"),
    "hits of a class": (change("confusion", 73.0, (0, 0)), "confusion cannot be of 73 rows"),
    "rows of a class": (change("confusion", 73.0, (1, 0)), "confusion cannot be of 73 rows"),
    "scores": (change("scores", 60.0, (0, 1, 3)), "scores cannot be of 73 rows"),
    "loss": (change("log_loss", 73 * 40.0), "log_loss cannot be of 73 rows"),
    "negative loss": (change("log_loss", -1.0), "log_loss cannot be of 73 rows"),
    "brier": (change("brier", 74.0), "brier cannot be of 73 rows"),
    "gaps": (change("gaps", 10.0), "gaps cannot be of 73 rows"),
    "shape": (lambda f: {**f, "gaps": f["gaps"][:5]}, "gaps must have shape"),
    "type": (lambda f: {**f, "gaps": f["gaps"].astype(np.float32)}, "in double precision"),
    "missing": (lambda f: {k: v for k, v in f.items() if k != "gaps"}, "gaps must have shape"),
    "more": (lambda f: {**f, "rows of others": f["loss"]}, "'rows of others' was not asked for"),
}


@pytest.mark.parametrize(("spoil", "why"), LIES.values(), ids=LIES)
def test_lies_about_classes_are_found(spoil, why):
    sums, found = one(classified(2, False))
    assert why in sums.wrong(spoil(found), 73)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (change("squares", -1.0, 1), "squares cannot be of 73 rows"),
        (change("absolute", -1.0, 0), "absolute cannot be of 73 rows"),
        (change("error", -1.0), "error cannot be of 73 rows"),
        # (sum y)^2 is at most n sum y^2: 73 squares of 1 at least, if the sum is 73
        (change("moments", [73.0, 0.0, 70.0, 0.0], 0), "moments cannot be of 73 rows"),
    ],
)
def test_lies_about_values_are_found(spoil, why):
    sums, found = one(valued(3, False), VALUES)
    assert why in sums.wrong(spoil(found), 73)


def test_the_sums_of_a_diverged_model_are_infinite():
    """Nothing that is not finite travels, and the loss is infinite at the server."""
    p = classified(2, False)
    given_ = np.where(np.arange(len(p.y))[:, None] == 3, np.nan, p.given)
    p = Predictions(p.y, given_, None, p.group, p.groups, 2)
    sums = SiteSums(CLASSES, 2, 2)
    found = sums.of(p, {"loss": np.array([np.nan, 0, 1, 1, 1]), "hits": np.ones(5)})
    assert found["loss"][0] == LARGEST
    assert all(np.isfinite(v).all() for v in found.values())
    assert sums.wrong({k: v[0] for k, v in found.items()}, 40) is None
    assert sums.finish(sums.added(found))["loss"][0] == np.inf


def test_functions_and_names_of_another_kind():
    assert SiteSums.of_spec(["auc", "my_own", "r2"], 3, 3).metrics == ("auc",)
    with pytest.raises(fd.ReplyError, match=r"'r2' cannot be made of sums over rows \(can be: auc"):
        SiteSums(("r2",), 3, 3)
    with pytest.raises(fd.ReplyError, match="names something twice"):
        SiteSums(("auc", "auc"), 3, 3)
