"""A preprocessing that is fitted among clients is that of scikit-learn on their pooled rows."""

from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, RobustScaler, StandardScaler

import foedus as fd
from foedus import wire
from foedus.algorithms.preprocessing.encoding import (
    UNIT,
    blinded,
    bound,
    from_ordered,
    histogram,
    joined,
    known_bounds,
    magnitudes,
    ordered,
)
from foedus.algorithms.preprocessing.fit import FitPreprocessing
from foedus.base import unions
from foedus.base.rows import Rows
from foedus.base.spec import RawSpec
from foedus.core.algorithm import Client
from foedus.core.describe import to_config
from foedus.core.result import known_algorithm
from foedus.engines.flower import messages
from foedus.engines.prepare import bounded
from tests.engines.flower.grid import Here

NUMBERS, TEXTS = ["age", "dose", "flag", "income"], ["colour", "place"]
SITES = {"north": 130, "south": 41, "west": 7, "far": 222}


def people(rows: int, seed: int) -> pd.DataFrame:
    """Numbers of very different sizes, skewed ones, booleans, texts of each site's own, holes."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.integers(20, 90, rows).astype(float),
            "colour": rng.choice(["red", "green", f"blue {seed}"], rows),
            "dose": rng.normal(1e6, 10, rows),
            "place": pd.Categorical(rng.choice(["here", "there"], rows), ["here", "there"]),
            "flag": rng.random(rows) < 0.3,
            "income": -np.exp(rng.normal(8, 3, rows)),
        }
    )
    frame["outcome"] = np.where(frame.age + 40 * (frame.colour == "red") > 70, "ill", "well")
    frame.loc[rng.random(rows) < 0.2, "age"] = np.nan
    frame.loc[rng.random(rows) < 0.1, "colour"] = None
    return frame


@pytest.fixture(scope="module")
def sites() -> dict[str, pd.DataFrame]:
    return {name: people(rows, seed) for seed, (name, rows) in enumerate(SITES.items())}


def raw(sites, **recipe) -> fd.Federation:
    return fd.Federation.from_clients(sites, label="outcome", fit=False, test=0.25, **recipe)


def training(fed: fd.Federation) -> pd.DataFrame:
    """The pooled training rows of a raw federation, as a table."""
    about, x = fed.data.raw, fed.data.x_train
    frame = pd.DataFrame(x, columns=list(about.names))
    for name, texts in about.categories.items():
        frame[name] = [None if np.isnan(k) else texts[int(k)] for k in frame[name]]
    return frame


SCALERS = {"standard": StandardScaler, "minmax": MinMaxScaler, "robust": RobustScaler}


def check(fed: fd.Federation, rows: pd.DataFrame, scale: str, impute: str) -> None:
    """Constants and prepared rows against scikit-learn on the pooled training rows."""
    found = fed.data.preprocess
    strategy = {"strategy": "constant", "fill_value": 0.0} if impute == "zero" else {
        "strategy": impute
    }  # fmt: skip
    pooled = make_pipeline(SimpleImputer(**strategy), SCALERS[scale]())
    want = pooled.fit_transform(rows[NUMBERS].astype(float))
    np.testing.assert_allclose(
        fed.data.x_train[:, : len(NUMBERS)], want, rtol=2e-6, atol=2e-6 * np.abs(want).max()
    )
    scaler = pooled[-1]
    names = {"standard": ("mean_", "scale_"), "robust": ("center_", "scale_"),
             "minmax": ("data_min_", "data_range_")}  # fmt: skip
    for have, name in zip((found.shift, found.divisor), names[scale], strict=True):
        size = np.abs(rows[NUMBERS].to_numpy(float))
        error = 1e-12
        assert (np.abs(have - getattr(scaler, name)) <= error * np.nanmax(size, 0)).all()
    assert found.scaling == scale
    for name in TEXTS:
        known = sorted(rows[name].dropna().unique())
        assert found.categories[name] == (*known, None) if rows[name].isna().any() else (*known,)


@pytest.mark.parametrize("scale", list(SCALERS))
@pytest.mark.parametrize("impute", ["mean", "median", "zero"])
@pytest.mark.parametrize("aggregation", [None, fd.SecureAggregation()], ids=["clear", "secure"])
def test_the_same_as_scikit_learn_on_pooled_rows(scale, impute, aggregation, sites):
    fed = raw(sites, scale=scale, impute=impute)
    rows = training(fed)
    check(fd.prepare(fed, aggregation=aggregation), rows, scale, impute)


def test_the_same_as_a_fit_of_pooled_rows(sites):
    """`foedus.load` and `foedus.prepare` are two ways to one result, but for the last bit."""
    settings = {"label": "outcome", "test": 0.25, "scale": "standard", "impute": "mean"}
    at_once = fd.Federation.from_clients(sites, **settings)
    fed = fd.prepare(fd.Federation.from_clients(sites, **settings, fit=False))
    for part in ("x_train", "x_test", "y_train"):
        one, other = getattr(fed.data, part), getattr(at_once.data, part)
        np.testing.assert_allclose(one, other, rtol=2.0**-23, atol=1e-9)
    assert fed.names == at_once.names == tuple(SITES)
    assert fed.data.preprocess.feature_names == at_once.data.preprocess.feature_names
    run = fd.run(fd.FedAvg(fd.Linear(), lr=0.5), fed, 3)
    table = people(50, 9)
    np.testing.assert_array_equal(
        run.model.predict(table),
        fd.run(fd.FedAvg(fd.Linear(), lr=0.5), at_once, 3).model.predict(table),
    )
    assert run.settings["federation"]["settings"]["preprocess"]["bytes_up"] > 0


@pytest.mark.parametrize("engine", ["looped", "batches", "late", "flower", "secure flower"])
@pytest.mark.parametrize("scale", ["standard", "robust"])
def test_every_engine_gives_the_same(engine, scale, sites, tmp_path):
    fed = raw(sites, scale=scale, impute="median")
    here = {"looped": fd.Local(batch=False), "batches": fd.Local(memory=1 << 16)}
    here["late"] = fd.Delayed(fd.Local(), up=2, down=1)  # not before the first round
    secure = fd.SecureAggregation() if engine.startswith("secure") else None
    settings = {"aggregation": secure, "engine": here.get(engine) or Here(tmp_path, timeout=30)}
    one, other = fd.prepare(fed), fd.prepare(fed, **settings)
    check(other, training(fed), scale, "median")
    if secure is None:
        for key in ("bytes_up", "bytes_down", "messages_up"):
            assert one.settings["preprocess"][key] == other.settings["preprocess"][key]


def test_workers_of_ray_give_the_same(ray_engine, sites):
    fed = raw(sites, scale="robust", impute="median")
    one, other = fd.prepare(fed), fd.prepare(fed, engine=ray_engine)
    np.testing.assert_array_equal(one.data.x_train, other.data.x_train)
    assert one.settings["preprocess"] == other.settings["preprocess"]


def test_bytes_are_those_of_the_messages():
    """Two clients, two columns of numbers: a survey and two moments."""
    frame = pd.DataFrame({"a": [1.0, 2, 3, 4], "b": [0.0, 5, 5, 1], "y": [0, 1, 0, 1]})
    fed = fd.Federation.from_clients(
        [frame, frame], label="y", fit=False, scale="standard", impute="mean"
    )
    share = torch.zeros(2, dtype=torch.float64)
    survey = {"present": share, "lacking": share[:0], "magnitudes": torch.zeros(2, 32)}
    moment = {"sum": share[:, None], "present": share}
    up = wire.nbytes(survey) + 2 * wire.nbytes(moment)
    asked = {"center": torch.zeros(2).double(), "bound": torch.zeros(2).double(), "power": 1}
    down = wire.nbytes({}) + 2 * wire.nbytes(asked)
    about = fd.prepare(fed).settings["preprocess"]
    assert (about["bytes_up"], about["bytes_down"], about["messages_up"]) == (2 * up, 2 * down, 6)


# -- what is sent ----------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-(2.0**31), 2.0**31) | st.floats(-1e-9, 1e-9), min_size=1, max_size=5))
def test_parts_of_a_sum(values):
    """Sums of parts in fixed point are the sum, to 2^-85, and each part fits the range."""
    parts = [blinded(np.array([v])) for v in values]
    assert all(bool((p.abs() <= 16).all()) for p in parts)
    steps = sum((p / UNIT).round() for p in parts)  # as secure aggregation adds them
    found = Fraction(float(joined(steps * UNIT)[0]))
    exact = sum(map(Fraction, values))
    assert abs(found - exact) <= Fraction(len(values), 2**85) + abs(exact) / 2**52


def test_parts_say_nothing_but_their_sum():
    """Each part but the last is moved by up to 2^14 steps, anew for every number: the digits of
    single numbers cannot be found from sums of digits.
    """
    sent = blinded(np.full(20_000, 7.25))
    assert joined(sent).tolist() == [7.25] * 20_000
    first = sent.numpy()[:, 0] / UNIT
    assert -(2**14) <= (first - 7).min() < -16_000 and 16_000 < (first - 7).max() < 2**14
    assert abs((first - 7).mean()) < 400  # of 20,000 numbers with a spread of 9,459
    assert all(len(np.unique(sent[:, k])) > 10_000 for k in range(5))
    assert not np.array_equal(blinded(np.array([7.25])), blinded(np.array([7.25])))


@pytest.mark.parametrize("x", [0.0, 1e-40, 0.3, 1.0, 255.9, 256.0, 1e6, 3e38])
def test_bounds_are_powers_of_two_above(x):
    """At most 2^8 too large, but for numbers below 2^-118."""
    found = float(bound(magnitudes(np.array([x])).numpy())[0])
    assert x < found and math.log2(found) == round(math.log2(found))
    assert found <= max(2.0**-118, 256 * x) and found in known_bounds()
    average = (magnitudes(np.array([x])) + magnitudes(np.array([0.1]))).numpy() / 2
    assert float(bound(average)[0]) >= max(x, 0.1)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(allow_nan=False), min_size=2, max_size=20))
def test_bits_have_the_order_of_numbers(values):
    x = np.array(values)
    key = ordered(x)
    assert np.array_equal(np.argsort(key, kind="stable"), np.argsort(x + 0.0, kind="stable"))
    np.testing.assert_array_equal(from_ordered(key), x)


@pytest.mark.parametrize("level", [0, 1, 3, 8])
def test_histograms_of_digits(level):
    """Against the digits of Python's integers."""
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 4, (2, 50, 3)).astype(float)
    there = rng.random(x.shape) < 0.9
    key = ordered(x)
    prefix = key[0, 0] >> np.uint64(64 - 7 * level) if level else np.zeros(3, np.uint64)
    found = histogram(key, there, prefix, level)
    for client, column in itertools.product(range(2), range(3)):
        want = np.zeros(128)
        for row in range(50):
            bits = int(key[client, row, column])
            first = bits >> (64 - 7 * level) if level else 0
            if there[client, row, column] and first == int(prefix[column]):
                want[bits >> (57 - 7 * level) & 127] += 1
        np.testing.assert_array_equal(found[client, column], want)


HARD = {
    "a tiny negative": np.r_[-1e-15, np.linspace(0.01, 10, 100)],
    "residues": np.sin(np.arange(81) * np.pi),
    "an outlier": np.r_[np.linspace(-2, 2, 79), 1e20],
    "a large offset": 1e15 + np.arange(40) % 7,
    "zeros and minus zeros": np.r_[np.zeros(30), -np.zeros(30), 1.0],
    "subnormal": np.r_[5e-324, 1e-310, 1e-300] * np.ones((9, 1)),
    "large": np.r_[-1e307, 1e307, np.zeros(9)],
}


@pytest.mark.parametrize("values", HARD.values(), ids=list(HARD))
@pytest.mark.parametrize("secure", [False, True])
def test_order_statistics_of_hard_columns(values, secure):
    """Exact but for the last bit, whatever else is in the column."""
    x = np.ravel(values)
    frame = pd.DataFrame({"a": x, "y": np.arange(len(x)) % 2})
    aggregation = fd.SecureAggregation() if secure else None
    for scale, places in (("robust", (0.25, 0.5, 0.75)), ("minmax", (0.0, 0.0, 1.0))):
        data = fd.load(frame, label="y", test=0, scale=scale, fit=False)
        raw = fd.split(data, clients=4)
        found = fd.run(
            FitPreprocessing(("a",), scale=scale, sums=secure), raw, 0, evaluate_every=0,
            aggregation=bounded(aggregation, FitPreprocessing(("a",), scale=scale)),
        ).state  # fmt: skip
        low, middle, high = np.quantile(x, places)
        assert float(found.shift) == pytest.approx(middle, rel=1e-15, abs=1e-322)
        want = high - low if high > low else 1.0
        assert float(found.divisor) == pytest.approx(want, rel=1e-14, abs=4e-16 * abs(high))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e300, 1e300) | st.just(math.nan), min_size=1, max_size=9),
    st.sampled_from(["survey", "moment"]),
)
def test_replies_are_within_the_norm_that_noise_is_made_for(values, step):
    x = torch.tensor(values, dtype=torch.float64)[:, None].repeat(1, 2)
    x[:, 1] = torch.where(x[:, 1].isnan(), x[:, 1], 0.0)
    fit = FitPreprocessing(("a", "t"), ("t",), (("t", ("x",)),), (("a", -3.0, 5.0),), "standard",
                           "mean")  # fmt: skip
    spec = RawSpec((2,), None, 1, (None, ("x",)))
    rows = Rows(x, torch.zeros(len(x)), torch.arange(len(x)), torch.ones(len(x)), spec)
    key = torch.zeros(2, dtype=torch.int64)
    client = Client(torch.tensor(0), rows, None, None, key, key, spec)
    sent = {
        "center": torch.tensor([1.0]).double(),
        "bound": torch.tensor([4.0]).double(),
        "power": 1,
    }
    reply, _ = getattr(fit, step)(client, **(sent if step == "moment" else {}))
    norm = math.sqrt(sum(float((t.double() ** 2).sum()) for t in reply.values()))
    private = bounded(fd.DifferentialPrivacy(clip=7.0, noise=1.0, delta=1e-5), fit)
    assert norm <= private.clip_of(step)


# -- where the run has noise, or hostile clients ---------------------------------------------------


def test_differential_privacy_near_the_truth_with_many_clients():
    rng = np.random.default_rng(0)
    age, group = rng.normal(50, 12, 8000), rng.integers(0, 800, 8000)
    frame = pd.DataFrame({"age": age, "sex": rng.choice(["m", "f"], 8000), "who": group})
    data = fd.load(frame.assign(y=0.0 + (age > 50)), label="y", task="classification", fit=False,
                   group="who", scale="standard", impute="mean", test=0)  # fmt: skip
    private = fd.DifferentialPrivacy(clip=1.0, noise=1.0, delta=1e-4)
    known = {"categories": {"sex": ["f", "m"]}, "ranges": {"age": (0, 100)}}
    fed = fd.prepare(fd.split(data, "natural"), aggregation=private, **known)
    found, about = fed.data.preprocess, fed.settings["preprocess"]
    # noise of 1 in a mean of 800 shares, times sqrt(2) and half of the range: about 0.1
    assert abs(found.shift[0] - age.mean()) < 1 and abs(found.divisor[0] - 12) < 3
    assert found.categories == {"sex": ("f", "m", None)}
    assert 0 < about["epsilon"] < 10 and about["aggregation"]["noise"] == 1.0
    for missing, why in (
        ({"ranges": known["ranges"]}, "categories: with differential privacy"),
        ({"categories": known["categories"]}, "those of 'age' are not given"),
    ):
        with pytest.raises(fd.ConfigError, match=why):
            fd.prepare(fd.split(data, "natural"), aggregation=private, **missing)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"ranges": {"age": (0, 120)}}, "ranges= is for differential privacy"),
        ({"ranges": {"age": 5}}, r"ranges\['age'\]=5 must be"),
        ({"categories": {"colour": "red"}}, r"categories\['colour'\]='red' must be"),
        ({"aggregation": fd.Median()}, "a robust mean finds no medians"),
        ({"aggregation": fd.DifferentialPrivacy(clip=1.0, noise=1.0, delta=1e-3)},
         "impute='median': with differential privacy"),
    ],
)  # fmt: skip
def test_fits_that_cannot_be(more, why, sites):
    with pytest.raises(fd.ConfigError, match=why):
        fd.prepare(raw(sites, scale="standard", impute="median"), **more)


def test_what_is_no_federation():
    with pytest.raises(fd.DataError, match="fed is a Data; give a Federation"):
        fd.prepare(fd.load("digits"))


def test_a_robust_mean_is_not_moved():
    """Nine like sites, and one whose rows are a billion times larger."""
    rng = np.random.default_rng(0)
    tables = [
        pd.DataFrame({"a": rng.normal(5, 2, 50), "y": rng.integers(0, 2, 50)}) for _ in range(10)
    ]
    tables[3]["a"] *= 1e9
    fed = fd.Federation.from_clients(tables, label="y", fit=False, scale="standard")
    found = fd.prepare(fed, aggregation=fd.Median()).data.preprocess
    assert abs(found.shift[0] - 5) < 0.5 and abs(found.divisor[0] - 2) < 0.5
    assert fd.prepare(fed).data.preprocess.shift[0] > 1e8


def test_who_is_implausible_is_left_out():
    rng = np.random.default_rng(0)
    tables = [
        pd.DataFrame({"a": rng.normal(5, 2, 50), "y": rng.integers(0, 2, 50)}) for _ in range(4)
    ]
    tables[2]["a"] *= 1e6
    fed = fd.Federation.from_clients(tables, label="y", fit=False)
    fit = FitPreprocessing(("a",), scale="standard", doubt=True)
    run = fd.run(fit, fed, 0, evaluate_every=0)
    assert run.state.refused.tolist() == [2]
    others = np.concatenate([t.a for k, t in enumerate(tables) if k != 2])
    assert float(run.state.shift) == pytest.approx(others.mean(), rel=1e-12)
    assert float(run.state.divisor) == pytest.approx(others.std(), rel=1e-12)
    assert run.history.bytes_up.iloc[-1] > 0
    few = fd.run(fit, fed.select([0, 2]), 0, evaluate_every=0)
    assert few.state.refused.tolist() == []  # of two, which?


# -- corners ---------------------------------------------------------------------------------------


def test_columns_that_are_constant_or_empty():
    frame = pd.DataFrame({"same": [7.0] * 4, "none": [np.nan] * 4, "y": [0, 1, 0, 1]})
    for scale in ("standard", "minmax", "robust"):
        for impute in ("mean", "median", "zero"):
            fed = fd.Federation.from_clients(
                [frame, frame], label="y", fit=False, scale=scale, impute=impute
            )
            found = fd.prepare(fed).data.preprocess
            np.testing.assert_allclose(found.shift, [7, 0], atol=1e-30)
            assert found.divisor.tolist() == [1, 1] and found.fill[1] == 0


def test_auto_is_that_of_pooled_rows():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 40)
    for x in (rng.random((40, 3)), rng.random((40, 3)) * 0.3, rng.random((40, 3)) * 3,
              rng.integers(0, 256, (40, 300)), -rng.random((40, 2))):  # fmt: skip
        frame = pd.DataFrame(x, columns=[f"c{i}" for i in range(x.shape[1])]).assign(y=y)
        pooled = fd.load(frame, label="y", test=0)
        fed = fd.prepare(fd.split(fd.load(frame, label="y", test=0, fit=False), clients=3))
        assert fed.data.scaling == pooled.scaling
        np.testing.assert_allclose(fed.data.x_train, pooled.x_train, rtol=1e-6, atol=1e-6)


def test_missing_values_need_impute(sites):
    with pytest.raises(fd.DataError, match="column 'age' has missing values; pass impute="):
        fd.prepare(raw(sites))


def test_categories_that_are_known_are_not_asked_for(sites):
    fed = raw(sites, scale="standard", impute="mean")
    known = {"colour": ["red", "violet"], "place": ["here", "there"]}
    found = fd.prepare(fed, categories=known).data
    assert found.preprocess.categories == {
        "colour": ("red", "violet", None),
        "place": ("here", "there"),
    }
    names = found.preprocess.feature_names
    reds = found.x_train[:, names.index("colour=red")].sum()
    assert reds == (training(fed).colour == "red").sum()
    asked = fd.prepare(fed).settings["preprocess"]["bytes_up"]
    assert fd.prepare(fed, categories=known).settings["preprocess"]["bytes_up"] < asked
    with pytest.raises(
        fd.ConfigError, match=r"categories: column of text .color. is unknown.*colour"
    ):
        fd.prepare(fed, categories={"color": ["red"]})


def test_too_many_texts():
    tables = [
        pd.DataFrame({"name": [f"{k} {i}" for i in range(600)], "x": 1.0, "y": [0, 1] * 300})
        for k in range(2)
    ]
    with pytest.raises(fd.DataError, match="'name' has 1200 different texts"):
        fd.prepare(fd.Federation.from_clients(tables, label="y", fit=False))


def test_raw_rows_are_for_no_model(sites):
    fed = raw(sites, impute="mean")
    algorithm = fd.FedAvg(fd.Linear())
    for use in (
        lambda: fd.run(algorithm, fed, 1),
        lambda: fd.compare({"a": algorithm}, fed, 1),
        lambda: fd.tune(algorithm, fed, 1, grid={"lr": [0.1]}),
        lambda: fd.diagnose(fed),
        lambda: fd.heterogeneity(fed),
    ):
        with pytest.raises(fd.DataError, match=r"raw rows \(fit=False\).*fd.prepare\(fed\)"):
            use()
    with pytest.raises(fd.DataError, match="are prepared already; for raw ones pass fit=False"):
        fd.prepare(fd.prepare(fed))
    with pytest.raises(fd.DataError, match="fit=False: the columns of 'digits' have no names"):
        fd.load("digits", fit=False)
    assert repr(fed.data).endswith("raw)")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"columns": ("a", "a")}, "columns names a column twice"),
        ({"columns": ()}, "columns=() must be a non-empty"),
        ({"texts": ("c",)}, "texts: column 'c' is unknown"),
        ({"known": (("a", ("x",)),)}, "known: column 'a' is unknown"),
        ({"texts": ("a",), "ranges": (("a", 0.0, 1.0),)}, "ranges: column 'a' is unknown"),
        ({"ranges": (("a", 0.0, 1.0),)}, "ranges: that of 'b' is missing"),
        ({"ranges": (("a", 1.0, 1.0), ("b", 0.0, 1.0))}, "'a' has [1.0, 1.0]; give finite low"),
        ({"scale": "half"}, "scale 'half' is unknown"),
        ({"clip": -1.0}, "clip=-1.0 must be"),
    ],
)
def test_settings_that_cannot_be(settings, why):
    with pytest.raises(fd.FoedusError) as error:
        FitPreprocessing(**{"columns": ("a", "b")} | settings)
    assert why in str(error.value)


def test_settings_as_text():
    fit = FitPreprocessing(("a", "t"), ("t",), (("t", ("x", "y")),), (("a", 0.0, 1.0),), "standard")
    assert known_algorithm(json.loads(json.dumps(to_config(fit)))) == fit


@pytest.mark.parametrize("scale", ["standard", "minmax", "robust"])
def test_clients_that_share_a_padded_batch(scale):
    """Padding is no row, and no missing value either."""
    rng = np.random.default_rng(0)
    frames = [pd.DataFrame({"a": rng.normal(9, 2, n), "y": np.arange(n) % 2}) for n in (10, 12, 14)]
    for frame in frames:
        frame.loc[:3, "a"] = np.nan
    settings = {"label": "y", "scale": scale, "impute": "zero"}
    pooled = fd.Federation.from_clients(frames, **settings).data.preprocess
    found = fd.prepare(fd.Federation.from_clients(frames, **settings, fit=False)).data.preprocess
    np.testing.assert_allclose(found.shift, pooled.shift, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.divisor, pooled.divisor, rtol=1e-9)


def test_who_spreads_too_far_is_left_out():
    rng = np.random.default_rng(0)
    tables = [
        pd.DataFrame({"a": rng.normal(0, 2, 50), "y": rng.integers(0, 2, 50)}) for _ in range(4)
    ]
    wide = rng.normal(0, 1e5, 50)
    tables[1]["a"] = wide - wide.mean()  # its mean is like that of the others
    fed = fd.Federation.from_clients(tables, label="y", fit=False)
    fit = FitPreprocessing(("a",), scale="standard", doubt=True)
    assert fd.run(fit, fed, 0, evaluate_every=0).state.refused.tolist() == [1]


def test_noise_leaves_a_scale():
    """A column that is all but constant: a fiftieth of half its range, not what noise leaves."""
    frame = pd.DataFrame({"a": [50.0, 50.1] * 10, "y": [0, 1] * 10})
    fed = fd.Federation.from_clients(
        [frame] * 30, label="y", fit=False, scale="standard", impute="mean"
    )
    private = fd.DifferentialPrivacy(clip=1.0, noise=0.01, delta=1e-3)
    for _ in range(8):  # half of the time, noise makes the square negative
        found = fd.prepare(fed, aggregation=private, ranges={"a": (0, 1000)}).data.preprocess
        assert found.divisor[0] >= 10.0


def test_texts_of_an_untrusted_client(tmp_path):
    """More than a table may have, or longer ones: that client is left out, and the others go on."""
    frame = pd.DataFrame({"t": ["x", "y"] * 3, "a": 1.0, "y": [0, 1] * 3})
    fed = fd.Federation.from_clients([frame] * 3, label="y", fit=False, scale="standard")
    here = Here(tmp_path, nodes=3, timeout=30)

    def spoil(asked, answer):
        if asked.metadata.message_type != "train.strings" or asked.metadata.dst_node_id != 2:
            return answer
        many = unions.listed({b"\0\0" + str(i).encode() for i in range(5000)})
        body = wire.encode(many)
        header = {**messages.header(answer), "lengths": [len(body)]}
        return Message(messages.content(header, body), reply_to=asked)

    here.grid.spoil = spoil
    with pytest.warns(UserWarning, match="it has more than 1000 texts of a column"):
        found = fd.prepare(fed, engine=here).data.preprocess
    assert found.categories == {"t": ("x", "y")}


def test_a_prepared_run_goes_on_in_another_process(sites, tmp_path):
    """The settings of a run have nothing that differs from one fit to the next."""
    fed = raw(sites, scale="standard", impute="mean")
    path = tmp_path / "run.safetensors"
    fd.run(fd.FedAvg(fd.Linear()), fd.prepare(fed), 1, checkpoint=path)
    run = fd.run(fd.FedAvg(fd.Linear()), fd.prepare(fed), 2, checkpoint=path, resume=True)
    assert len(run.history) == 3
