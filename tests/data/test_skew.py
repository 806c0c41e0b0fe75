"""Skew of sizes, features, targets and concepts: what the parameter of each scheme states."""

from __future__ import annotations

import itertools
import sys
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foedus as fd
from foedus.data import Data, split
from foedus.data.partition.features import turned
from foedus.errors import SplitError
from tests.data.test_partition import check_exact, make

CLASSED = {
    "quantity": {"exponent": 1.3},
    "lognormal": {"sigma": 0.7},
    "rotations": {"angles": 37.0},
    "noise": {"sigma": 0.5},
    "covariate": {"tilt": 2.0},
    "permuted": {},
}
REGRESSION = {
    "quantity": {"exponent": 0.4},
    "lognormal": {"sigma": 2.0},
    "rotations": {"angles": (0.0, 45.0)},
    "noise": {"sigma": 0.5},
    "covariate": {"tilt": 0.3, "direction": 2},
    "targets": {"s": 0.4},
    "quantiles": {"alpha": 0.3, "bins": 7},
}
ALL = [(s, o, False) for s, o in CLASSED.items()] + [(s, o, True) for s, o in REGRESSION.items()]


# -- all of them -----------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(data=st.data(), which=st.sampled_from(ALL), seed=st.integers(0, 2**31))
def test_every_row_goes_to_one_client_and_the_seed_decides(data, which, seed):
    scheme, options, regression = which
    rows, test_rows = data.draw(st.integers(2, 200)), data.draw(st.integers(0, 80))
    clients = data.draw(st.one_of(st.integers(1, rows), st.just(rows)))
    d = make(rows, 5, test_rows, seed, regression)
    fed, again = (split(d, scheme, clients=clients, seed=seed, **options) for _ in "ab")
    check_exact(fed, rows, test_rows, clients)
    for name in ("rows", "offsets", "test_rows", "test_offsets"):
        assert np.array_equal(getattr(fed, name), getattr(again, name))
    for name in ("x_train", "y_train", "x_test", "y_test"):
        assert np.array_equal(getattr(fed.data, name), getattr(again.data, name))


@pytest.mark.parametrize(("scheme", "options", "regression"), ALL)
def test_schemes_are_described_and_run(scheme, options, regression):
    d = make(120, 3, 60, 1, regression)
    fed = split(d, scheme, clients=6, seed=1, **options)
    other = split(d, scheme, clients=6, seed=2, **options)
    assert not np.array_equal(fed.rows, other.rows)
    assert f"6 clients, {scheme}" in fed.describe()
    for name, value in options.items():
        if isinstance(value, float):
            assert f"{name}={value}" in fed.describe()
    assert fed.summary()["rows"].sum() == 120 and fed.summary()["test_rows"].sum() == 60
    run = fd.run(fd.FedAvg(), fed, 1)
    assert run.settings["federation"]["settings"]["seed"] == 1


@pytest.mark.parametrize(("scheme", "options", "regression"), ALL)
def test_a_hundred_thousand_clients(scheme, options, regression):
    d = make(200_000, 10, 10_000, regression=regression)
    if scheme == "rotations":
        options = {"angles": 90.0}
    fed = split(d, scheme, clients=100_000, **options)
    check_exact(fed, 200_000, 10_000, 100_000)


@pytest.mark.parametrize(
    ("scheme", "options", "words"),
    [
        ("quantity", {"exponent": -1}, ["exponent=-1"]),
        ("quantity", {"min_rows": 11}, ["min_rows=11", "20 training rows"]),
        ("lognormal", {}, ["needs sigma="]),
        ("lognormal", {"sigma": float("nan")}, ["sigma=nan"]),
        ("rotations", {"angles": ()}, ["angles=() is empty"]),
        ("rotations", {"angles": "90"}, ["angles='90'", "list of angles"]),
        ("noise", {"sigma": -0.1}, ["sigma=-0.1"]),
        ("covariate", {"tilt": 1, "direction": 4}, ["direction=4", "0 .. 3"]),
        ("covariate", {"tilt": -1}, ["tilt=-1"]),
        ("permuted", {"kinds": 0}, ["kinds=0"]),
        ("targets", {"s": 0.5}, ["has labels", "use 'homogeneity'"]),
        ("quantiles", {"alpha": 0.5}, ["has labels", "use 'dirichlet'"]),
    ],
)
def test_errors_name_argument_and_value(scheme, options, words):
    with pytest.raises(SplitError) as error:
        split(make(20, 4, 5), scheme, clients=2, **options)
    assert all(word in str(error.value) for word in words), error.value


def test_regression_has_no_labels_to_permute():
    d = make(20, 0, regression=True)
    with pytest.raises(SplitError, match=r"regression set; use one of .*'targets', 'quantiles'"):
        split(d, "permuted", clients=2)
    with pytest.raises(SplitError, match="bins=1"):
        split(d, "quantiles", clients=2, alpha=1.0, bins=1)


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.5])
def test_sizes_follow_the_power_law(exponent):
    """Rank r has 1000 r^-exponent / sum_q q^-exponent rows, up to one."""
    sizes = np.sort(split(make(1000, 3), "quantity", clients=8, exponent=exponent).sizes)[::-1]
    share = np.arange(1, 9) ** -exponent
    expected = 1000 * share / share.sum()
    if expected[-1] >= 2:
        assert (np.abs(sizes - expected) <= 1).all()
    else:
        assert np.abs(sizes - expected).max() <= 8
    assert sizes.sum() == 1000


def test_ranks_are_drawn():
    first = [split(make(100, 3), "quantity", clients=5, seed=s).sizes.argmax() for s in range(20)]
    assert set(first) == set(range(5))


def test_lognormal_sizes_have_that_sigma():
    fed = split(make(2_000_000, 2), "lognormal", clients=2000, sigma=0.6)
    assert np.log(fed.sizes).std() == pytest.approx(0.6, abs=0.04)
    assert set(split(make(100, 2), "lognormal", clients=10, sigma=0.0).sizes) == {10}


@pytest.mark.parametrize("scheme", ["quantity", "lognormal", "covariate"])
def test_min_rows(scheme):
    option = {"quantity": "exponent", "lognormal": "sigma", "covariate": "tilt"}[scheme]
    fed = split(make(200, 4), scheme, clients=10, min_rows=12, **{option: 6.0})
    assert fed.sizes.min() == 12
    assert split(make(200, 4), scheme, clients=10, **{option: 6.0}).sizes.min() < 12


def test_unequal_sizes_have_alike_labels():
    fed = split(make(20_000, 4), "quantity", clients=4, exponent=1.0)
    share = fed.label_counts() / fed.sizes[:, None]
    assert np.abs(share - 0.25).max() < 0.03


# -- features --------------------------------------------------------------------------------------


def images(rows=40, test_rows=20, shape=(6, 6)):
    rng = np.random.default_rng(0)
    x, x_test = rng.random((rows, *shape)), rng.random((test_rows, *shape))
    y, y_test = rng.integers(0, 3, rows), rng.integers(0, 3, test_rows)
    return Data.from_arrays(x, y, x_test, y_test, classes=3)


@pytest.mark.parametrize("shape", [(6, 6), (3, 6, 6), (36,)])
def test_quarter_turns_are_exact(shape):
    d = images(shape=shape)
    fed = split(d, "rotations", clients=6, angles=90.0)
    square = shape if len(shape) > 1 else (6, 6)
    for k in range(6):
        for rows, before, after in (
            (fed.client_rows(k), d.x_train, fed.data.x_train),
            (fed.test_client_rows(k), d.x_test, fed.data.x_test),
        ):
            expected = np.rot90(before[rows].reshape(-1, *square), k, axes=(-2, -1))
            assert np.array_equal(after[rows].reshape(-1, *square), expected)
    assert np.array_equal(fed.data.y_train, d.y_train)
    assert fed.settings["angle"].tolist() == [0, 90, 180, 270, 0, 90]
    assert "degrees=0 to 270" in fed.describe()


def test_angles_of_a_list_are_taken_in_turn():
    fed = split(images(), "rotations", clients=5, angles=(0, -90))
    assert fed.settings["angle"].tolist() == [0, 270, 0, 270, 0]
    other = split(images(), "rotations", clients=5, angles=[0.0, 270.0])
    assert np.array_equal(fed.data.x_train, other.data.x_train)


def test_other_angles_interpolate_counterclockwise():
    """A plane a r + b c stays a plane, turned: in the inner pixels, interpolation is exact."""
    r, c = np.meshgrid(np.arange(9.0) - 4, np.arange(9.0) - 4, indexing="ij")
    d = Data.from_arrays((0.7 * r + 0.2 * c + 5)[None], [0], classes=2)
    angle = np.deg2rad(30)
    # the value at a place is that of the place turned back, clockwise on the screen (rows go down)
    back_r = np.cos(angle) * r + np.sin(angle) * c
    back_c = -np.sin(angle) * r + np.cos(angle) * c
    found = turned(d, d.x_train, np.array([30.0]))[0]
    inner = np.hypot(r, c) < 3
    assert found[inner] == pytest.approx((0.7 * back_r + 0.2 * back_c + 5)[inner], abs=1e-5)
    quarter = turned(d, d.x_train, np.array([90.0 - 1e-7]))[0]
    assert quarter[inner] == pytest.approx(np.rot90(d.x_train[0])[inner], abs=1e-4)


@pytest.mark.parametrize("shape", [(5,), (4, 6), (2, 2, 2, 2)])
def test_what_is_no_square_image_cannot_be_turned(shape):
    with pytest.raises(SplitError, match="only square images can be rotated"):
        split(images(shape=shape), "rotations", clients=2)


def test_noise_grows_with_the_client():
    """Client k of 5 adds a standard deviation of 0.8 k / 4, to training and test rows."""
    d = make(20_000, 3, 10_000)
    fed = split(d, "noise", clients=5, sigma=0.8)
    for k in range(5):
        for rows, before, after in (
            (fed.client_rows(k), d.x_train, fed.data.x_train),
            (fed.test_client_rows(k), d.x_test, fed.data.x_test),
        ):
            added = after[rows].astype(np.float64) - before[rows]
            assert added.std() == pytest.approx(0.2 * k, rel=0.03, abs=1e-6)
            assert abs(added.mean()) < 0.03
    assert fed.settings["level"] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    alone = split(d, "noise", clients=1, sigma=0.3)
    assert (alone.data.x_train - d.x_train).std() == pytest.approx(0.3, rel=0.03)


@pytest.mark.parametrize(("tilt", "clients"), [(0.0, 4), (0.4, 2), (0.8, 5), (3.0, 7), (2e3, 3)])
def test_covariate_shift_is_an_exponential_tilt(tilt, clients):
    """P(k | z) = softmax_k(tilt c_k z), c_k = 2 k / (N - 1) - 1: compared in narrow bands of z."""
    rng = np.random.default_rng(5)
    x, x_test = rng.normal(3, 2, (200_000, 2)), rng.normal(3, 2, (100_000, 2))
    d = Data.from_arrays(x, np.zeros(200_000), x_test, np.zeros(100_000))
    fed = split(d, "covariate", clients=clients, tilt=tilt, direction=1)
    c = np.linspace(-1, 1, clients)
    for which, rows, offsets in (
        (x, fed.rows, fed.offsets),
        (x_test, fed.test_rows, fed.test_offsets),
    ):
        owner = np.empty(len(which), int)
        owner[rows] = np.repeat(np.arange(clients), np.diff(offsets))
        z = (which[:, 1] - x[:, 1].mean()) / x[:, 1].std()
        for center in (-1.5, -0.6, 0.7, 1.4):
            band = np.abs(z - center) < 0.05
            logits = tilt * c * center
            expected = np.exp(logits - logits.max())
            found = np.bincount(owner[band], minlength=clients) / band.sum()
            assert found == pytest.approx(expected / expected.sum(), abs=0.04)


def test_covariate_shift_leaves_rows_and_labels_alone():
    """A label that is a function of x is the same function at each client; means of x differ."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3000, 3))
    d = Data.from_arrays(x, (x.sum(1) > 0).astype(int))
    fed = split(d, "covariate", clients=3, tilt=2.0)
    assert fed.data is d
    along = d.x_train @ fed.settings["line"]
    means = [along[fed.client_rows(k)].mean() for k in range(3)]
    assert means == sorted(means) and means[2] - means[0] > along.std()
    with pytest.raises(SplitError, match="all alike"):
        split(Data.from_arrays(np.ones((9, 2)), [0, 1, 0] * 3), "covariate", clients=2, tilt=1.0)


# -- targets ---------------------------------------------------------------------------------------


def test_sorted_targets_are_ranges():
    d = make(1000, 0, 400, regression=True)
    fed = split(d, "targets", clients=5, s=0.0)
    assert set(fed.sizes) == {200}
    ranges = [d.y_train[fed.client_rows(k)] for k in range(5)]
    assert all(a.max() <= b.min() for a, b in itertools.pairwise(ranges))
    # test rows of the same range: between the quantiles that bound it
    edges = np.quantile(d.y_train, [0.2, 0.4, 0.6, 0.8])
    for k in range(5):
        assert (np.searchsorted(edges, d.y_test[fed.test_client_rows(k)]) == k).all()


def test_targets_go_from_sorted_to_iid():
    """Of client means, the variance is (1 - s)^2 that of the sorted division, up to sampling."""
    d = make(20_000, 0, regression=True)

    def spread(s):
        fed = split(d, "targets", clients=10, s=s)
        return fed.summary()["mean_y"].var()

    assert spread(0.5) / spread(0.0) == pytest.approx(0.25, abs=0.03)
    assert spread(0.8) / spread(0.0) == pytest.approx(0.04, abs=0.02)
    assert spread(1.0) / spread(0.0) < 0.005


def test_dirichlet_shares_of_quantiles():
    """A client's share of a bin has variance (1/N)(1 - 1/N) / (N alpha + 1), as for labels."""
    d = make(100_000, 0, 50_000, regression=True)
    fed = split(d, "quantiles", clients=5, alpha=0.5, bins=200, seed=1)
    edges = np.quantile(d.y_train, np.arange(1, 200) / 200)
    share, test = np.zeros((5, 200)), np.zeros((5, 200))
    for k in range(5):
        for counts, rows, y in (
            (share, fed.client_rows(k), d.y_train),
            (test, fed.test_client_rows(k), d.y_test),
        ):
            bins = np.searchsorted(edges, y[rows], side="right")
            counts[k] = np.bincount(bins, minlength=200)
    share, test = share / share.sum(0), test / test.sum(0)
    assert share.var() == pytest.approx(0.2 * 0.8 / 3.5, rel=0.15)
    assert np.abs(share - test).max() < 0.02


def test_the_first_of_several_targets_is_sorted():
    rng = np.random.default_rng(0)
    d = Data.from_arrays(rng.random((60, 2)), rng.random((60, 3)))
    fed = split(d, "targets", clients=3, s=0.0)
    ranges = [d.y_train[fed.client_rows(k), 0] for k in range(3)]
    assert ranges[0].max() <= ranges[1].min() and ranges[1].max() <= ranges[2].min()


# -- concepts --------------------------------------------------------------------------------------


def test_labels_are_permuted_by_client():
    d = make(600, 5, 300)
    fed = split(d, "permuted", clients=6, kinds=3, seed=4)
    own = fed.settings["permutation"]
    assert own.shape == (6, 5) and (np.sort(own, 1) == np.arange(5)).all()
    assert own[0].tolist() == [0, 1, 2, 3, 4] and np.array_equal(own[:3], own[3:])
    assert len(np.unique(own, axis=0)) == 3
    for k in range(6):
        for rows, before, after in (
            (fed.client_rows(k), d.y_train, fed.data.y_train),
            (fed.test_client_rows(k), d.y_test, fed.data.y_test),
        ):
            assert np.array_equal(after[rows], own[k][before[rows]])
    assert np.array_equal(fed.data.x_train, d.x_train)
    assert len(np.unique(split(d, "permuted", clients=6).settings["permutation"], axis=0)) == 6


def test_labels_drift_in_phases():
    fed = split(make(300, 10, 100), "dirichlet", clients=6, alpha=0.5)
    phases = fd.drift(fed, "labels", phases=4, part=0.4, share=0.5, seed=3)
    assert len(phases) == 4 and np.array_equal(phases[0].data.y_train, fed.data.y_train)
    assert [p.settings["phase"] for p in phases] == [0, 1, 2, 3]
    assert "phase=2" in phases[2].describe() and "drift=labels" in phases[2].describe()
    same = [
        k
        for k in range(6)
        if all(
            np.array_equal(p.data.y_train[p.client_rows(k)], fed.data.y_train[fed.client_rows(k)])
            for p in phases
        )
    ]
    assert len(same) == 3  # the other half drifts
    moving = np.concatenate([fed.client_rows(k) for k in range(6) if k not in same])
    moving_test = np.concatenate([fed.test_client_rows(k) for k in range(6) if k not in same])
    for before, after in itertools.pairwise(phases):
        assert np.array_equal(before.rows, after.rows)
        assert np.array_equal(before.data.x_train, after.data.x_train)
        meaning = {}
        for rows, a, b in (
            (moving, before.data.y_train, after.data.y_train),
            (moving_test, before.data.y_test, after.data.y_test),
        ):
            for old, new in zip(a[rows], b[rows], strict=True):
                assert meaning.setdefault(old, new) == new  # one function, for both parts
        assert len(set(meaning.values())) == len(meaning) == 10
        assert sum(old != new for old, new in meaning.items()) == 4
    again = fd.drift(fed, "labels", phases=4, part=0.4, share=0.5, seed=3)[3]
    assert np.array_equal(again.data.y_train, phases[3].data.y_train)


def test_images_drift_by_an_angle():
    fed = split(images(), "iid", clients=4)
    phases = fd.drift(fed, "rotation", phases=3, angle=90.0)
    for t, phase in enumerate(phases):
        assert np.array_equal(phase.data.x_train, np.rot90(fed.data.x_train, t, axes=(1, 2)))
        assert np.array_equal(phase.data.x_test, np.rot90(fed.data.x_test, t, axes=(1, 2)))


def test_a_run_follows_a_drift():
    """Each phase starts from the model before it, which the drift makes worse."""
    fed = split(fd.load("digits"), "iid", clients=5)
    run, ends = None, []
    for phase in fd.drift(fed, "labels", phases=2, part=0.5):
        run = fd.run(fd.FedAvg(), phase, 8, start=run)
        ends.append((run.history.accuracy.iloc[0], run.history.accuracy.iloc[-1]))
    assert ends[0][1] > 0.85  # the model has learned phase 0
    assert ends[1][0] == pytest.approx(0.5, abs=0.1)  # half of the labels mean something else
    assert ends[1][1] > 0.7


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "label"}, "did you mean 'labels'"),
        ({"phases": 0}, "phases=0"),
        ({"part": 0.0}, "part=0.0 must be a number above 0"),
        ({"share": 1.1}, "share=1.1"),
        ({"angle": float("nan"), "kind": "rotation"}, "angle=nan"),
    ],
)
def test_drift_refuses(options, words):
    with pytest.raises(SplitError, match=words):
        fd.drift(split(make(20, 3), clients=2), **options)


def test_drift_of_labels_needs_labels():
    with pytest.raises(SplitError, match="regression set"):
        fd.drift(split(make(20, 0, regression=True), clients=2))


# -- partitioners of flwr-datasets -----------------------------------------------------------------


class Columns:
    """As much of Hugging Face's `Dataset` as a partitioner of the tests needs."""

    def __init__(self, columns):
        self.columns = columns

    @classmethod
    def from_dict(cls, columns):
        return cls(columns)

    def __getitem__(self, name):
        return self.columns[name]

    def select(self, rows):
        return Columns({k: np.asarray(v)[rows] for k, v in self.columns.items()})


class EvenOdd:
    """Rows of even labels to the first of two clients, and of odd ones to the second."""

    def __init__(self, partition_by="label", offset=0):
        self._partition_by, self._offset, self._dataset = partition_by, offset, None

    @property
    def dataset(self):
        if self._dataset is None:
            raise AttributeError("set it before")
        return self._dataset

    @dataset.setter
    def dataset(self, value):
        if self._dataset is not None:
            raise ValueError("assigned only once")
        self._dataset = value

    @property
    def num_partitions(self):
        return len(self.dataset["row"]) and 2

    def load_partition(self, k):
        labels = np.asarray(self.dataset[self._partition_by])
        return self.dataset.select(np.flatnonzero((labels + self._offset) % 2 == k))


@pytest.fixture
def datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(Dataset=Columns))


def test_a_partitioner_divides(datasets):
    d = make(100, 4, 40)
    fed = split(d, EvenOdd(offset=1), seed=2)
    check_exact(fed, 100, 40, 2)
    assert (d.y_train[fed.client_rows(0)] % 2 == 1).all()
    assert (d.y_test[fed.test_client_rows(0)] % 2 == 1).all()
    assert fed.scheme == "EvenOdd"
    expected = {"clients": 2, "seed": 2, "partition_by": "label", "offset": 1}
    assert fed.settings == expected and "offset=1" in fed.describe()
    assert len(split(d, EvenOdd(), clients=2)) == 2


def test_partitioners_that_cannot_divide(datasets, monkeypatch):
    d, used = make(100, 4, 40), EvenOdd()
    split(d, used)
    for partitioner, options, words in (
        (used, {}, "assigned only once.*make a new one"),
        (EvenOdd(partition_by="weight"), {}, "EvenOdd cannot divide.*row, label, y"),
        (EvenOdd(), {"clients": 3}, "clients=3, but EvenOdd makes 2"),
        (EvenOdd(), {"alpha": 1.0}, "'alpha' is unknown to EvenOdd"),
        (EvenOdd, {}, "is unknown"),
        (7, {}, "scheme 7 is unknown"),
    ):
        with pytest.raises(SplitError, match=words):
            split(d, partitioner, **options)
    monkeypatch.setattr(EvenOdd, "load_partition", lambda self, k: self.dataset)
    with pytest.raises(SplitError, match="gives a row twice"):
        split(d, EvenOdd())
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SplitError, match="pip install datasets"):
        split(d, EvenOdd())


def test_partitioners_of_flwr_datasets():
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    d = make(400, 4, 100)
    fed = split(d, partitioners.IidPartitioner(8))
    check_exact(fed, 400, 100, 8)
    assert set(fed.sizes) == {50}
    shares = partitioners.DirichletPartitioner(5, partition_by="label", alpha=0.3, seed=1)
    fed = split(d, shares)
    check_exact(fed, 400, 100, 5)
    assert fed.settings["alpha"] == [0.3] * 5 and fed.settings["partition_by"] == "label"
    two = partitioners.PathologicalPartitioner(
        4, partition_by="label", num_classes_per_partition=2, class_assignment_mode="deterministic"
    )
    assert ((split(d, two).label_counts() > 0).sum(1) == 2).all()
    groups = Data.from_arrays(d.x_train, d.y_train, groups=np.arange(400) % 3)
    natural = split(groups, partitioners.NaturalIdPartitioner(partition_by="group"))
    assert sorted(natural.sizes) == [133, 133, 134]
    regression = make(300, 0, 60, regression=True)
    by_y = partitioners.ContinuousPartitioner(3, partition_by="y", strictness=1.0)
    ranges = [regression.y_train[split(regression, by_y).client_rows(0)]]
    assert len(ranges[0]) == 100
    with pytest.raises(SplitError):
        split(d, partitioners.VerticalEvenPartitioner(2))
