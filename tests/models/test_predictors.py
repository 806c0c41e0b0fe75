"""Collections of predictors: what is sent, losses and gradients by numpy and by differences,
n-grams by hand, bad input.
"""

from __future__ import annotations

import io
import math
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import skops.io
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier

import foedus as fd
from foedus import wire
from foedus.base.rows import Rows
from foedus.models import predictors
from foedus.models.predictors.classifiers import unpack

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 2)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int) + 2 * (X[:, 1] > 0.5)  # labels 0 .. 3
FED = fd.Federation.from_clients([(X[:9], Y[:9]), (X[9:30], Y[9:30]), (X[30:], Y[30:])], classes=4)
ROWS = Rows(torch.from_numpy(X), torch.from_numpy(Y), torch.arange(40), torch.ones(40), FED.spec)
PADDED = Rows(
    ROWS.table_x,
    ROWS.table_y,
    torch.cat((torch.arange(40), torch.zeros(5, dtype=torch.int64))),
    torch.cat((torch.ones(40), torch.zeros(5))),
    FED.spec,
)


def network(seed: int) -> torch.nn.Module:
    net, generator = torch.nn.Linear(2, 4), torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.data = torch.randn(p.shape, generator=generator)
    return net


def classifiers() -> fd.Classifiers:
    """Estimators that a site can load, one that has seen three labels only, and networks."""
    some = Y != 3
    return fd.Classifiers(
        [
            LogisticRegression().fit(X, Y),
            network(0),
            GaussianNB().fit(X[some], Y[some]),
            make_pipeline(StandardScaler(), LogisticRegression()).fit(X, Y),
            network(1),
            KNeighborsClassifier(5, algorithm="brute").fit(X, Y),
        ],
        classes=4,
    )


def unigrams(rest: float = 0.1) -> fd.Densities:
    """Five unigrams over 40 words, each of a few words, with a uniform background; entries below 4
    occur for all labels.
    """
    table = np.zeros((5, 40))
    for k in range(5):
        table[k, k : k + 3] = (0.5, 0.3, 0.2)
    even = np.full(40, 1 / 40)
    return fd.Densities((1 - rest) * table + rest * even, even if rest else None, rest)


def text_federation() -> fd.Federation:
    texts = [
        "to be or not to be that is the question " * 4,
        "to the question that is not the question to be " * 3,
    ]
    return fd.word_federation(texts, before=2, least=20)


def look(members, which, weight, loss="log", floor=1e-3, excess=None, data=ROWS, sent=False):
    """Loss and gradient; with `sent`, at a site that has the encoded message only."""
    which, weight = torch.tensor(which), torch.tensor(weight, dtype=torch.float32)
    if sent:
        members, models = (
            members.remote(),
            wire.decode(wire.encode({"models": members.message(which)}))["models"],
        )
    else:
        models = None
    excess = None if excess is None else torch.tensor(excess, dtype=torch.float32)
    return members.loss(
        members.prepare(data, loss), data, which, models, weight, loss, floor, excess
    )


# -- densities -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "form"),
    [
        (unigrams(), {"own", "rest"}),
        (unigrams(0.0), {"own"}),
        (fd.Densities(RNG.dirichlet(np.ones(6), 5)), {"dense"}),
        (fd.Densities(RNG.dirichlet(np.ones(6), 5), np.full(6, 1 / 6), 0.0), {"dense"}),
    ],
    ids=["background", "sparse", "dense", "dense with a background"],
)
@pytest.mark.parametrize("which", [[0], [3, 1], [4, 0, 2], [0, 1, 2, 3, 4]])
def test_a_message_holds_the_densities(members, form, which):
    message = members.message(torch.tensor(which))
    assert set(message) == form
    encoded = wire.encode(message)
    assert len(encoded) == wire.nbytes(message)
    found = members.remote().rows_of(wire.decode(encoded))
    torch.testing.assert_close(found, members.table[which].mT, rtol=2e-6, atol=1e-8)


def test_each_has_its_own_share_of_the_background():
    even, own, rest = np.full(8, 1 / 8), np.eye(8)[:3], np.array([0.0, 0.25, 0.5])
    members = fd.Densities((1 - rest)[:, None] * own + rest[:, None] * even, even, rest)
    message = members.message(torch.tensor([2, 1]))
    assert message["rest"].tolist() == [0.5, 0.25]
    assert message["own"].values.tolist() == pytest.approx([0.5, 0.75])
    torch.testing.assert_close(members.rows_of(message), members.table[[2, 1]].mT)


def test_bytes_are_those_of_the_encoded_members():
    for members in (unigrams(), classifiers(), fd.NGrams.of_clients(text_federation())):
        lengths = [
            len(wire.encode({"models": members.message(torch.tensor([k]))}))
            for k in range(len(members))
        ]
        assert members.nbytes() == lengths


def test_a_unigram_costs_what_it_has_seen():
    """A word more is a number of 4 bytes and an index of 2 (1,000 words); all words would be 4,000
    bytes.
    """
    even, sizes = np.full(1000, 1e-3), (1, 2, 10, 100)
    table = [0.9 * np.repeat((1 / n, 0), (n, 1000 - n)) + 0.1 * even for n in sizes]
    small = fd.Densities(table, even, 0.1).nbytes()
    # a longer length, once
    assert [b - small[0] for b in small] == pytest.approx([6 * (n - 1) for n in sizes], abs=1)
    assert fd.Densities(table).nbytes()[0] > 4000
    assert small[0] < 60


@pytest.mark.parametrize("which", [[1], [0, 2], [4, 1, 3, 0, 2]])
@pytest.mark.parametrize("data", [ROWS, PADDED], ids=["rows", "padded"])
def test_densities_against_numpy(which, data):
    """p: the client's distribution.

    Log: -p.log(m + floor); squared: |m|^2 - 2 p.m + 1 with m the mixture.
    """
    members, y = unigrams(), Y[:40]
    weight, excess = np.linspace(0.7, 0.2, len(which)), np.linspace(0.1, 0.3, len(which))
    h = members.table.double().numpy()[which]
    p = np.bincount(y, minlength=40) / 40
    mixed, squares = weight @ h, (h**2).sum(1)
    for sent in (False, True):
        value, slope = look(members, which, weight, data=data, sent=sent)
        assert float(value) == pytest.approx(-(p * np.log(mixed + 1e-3)).sum(), rel=1e-5)
        np.testing.assert_allclose(slope, -h @ (p / (mixed + 1e-3)), rtol=1e-4)
        value, slope = look(members, which, weight, "squared", data=data, sent=sent)
        assert float(value) == pytest.approx(mixed @ mixed - 2 * p @ mixed + 1, rel=1e-5)
        np.testing.assert_allclose(slope, 2 * h @ (mixed - p), rtol=1e-4, atol=1e-6)
        value, slope = look(members, which, weight, "squared", excess=excess, data=data, sent=sent)
        assert float(value) == pytest.approx(
            mixed @ mixed - 2 * p @ mixed + 1 - (weight * excess) @ squares, rel=1e-5
        )
        np.testing.assert_allclose(
            slope, 2 * h @ (mixed - p) - 2 * excess * squares, rtol=1e-4, atol=1e-6
        )


def test_densities_of_clients_by_hand():
    parts = [(np.zeros((4, 1)), [0, 0, 0, 2]), (np.zeros((2, 1)), [1, 2])]
    fed = fd.Federation.from_clients(
        [(x.astype(np.float32), np.array(y)) for x, y in parts], classes=4
    )
    members = fd.Densities.of_clients(fed, rest=0.2)
    # 0.8 (3/4, 0, 1/4, 0) + 0.05, 0.8 (0, 1/2, 1/2, 0) + 0.05
    want = [[0.65, 0.05, 0.25, 0.05], [0.05, 0.45, 0.45, 0.05]]
    np.testing.assert_allclose(members.table, want, atol=1e-7)
    assert members.counts.tolist() == [2, 2]
    plain = fd.Densities.of_clients(fed.select(np.array([1, 0])), rest=0)
    np.testing.assert_allclose(plain.table, [[0, 0.5, 0.5, 0], [0.75, 0, 0.25, 0]])
    assert plain.background is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: fd.Densities([0.5, 0.5]), "a row for each predictor"),
        (lambda: fd.Densities([]), "a row for each predictor"),
        (lambda: fd.Densities([[0.5, 0.5], [1.0]]), "table must be an array of numbers"),
        (lambda: fd.Densities("abc"), "table must be an array of numbers"),
        (
            lambda: fd.Densities([[1.5, -0.5]]),
            r"0 is not a probability distribution: it sums to 1, its least entry is -0\.5",
        ),
        (lambda: fd.Densities([[0.5, math.nan]]), "predictor 0 is not a probability distribution"),
        (lambda: fd.Densities([[0.5, 0.5]], rest=0.1), "give that too"),
        (
            lambda: fd.Densities([[0.5, 0.5]], [1.0], 0.1),
            r"background has shape \(1,\), the table 2 columns",
        ),
        (
            lambda: fd.Densities([[0.5, 0.5]], [0.5, 0.6], 0.1),
            "background 0 is not a prob",
        ),
        (lambda: fd.Densities([[0.5, 0.5]], [0.5, 0.5], [0.1, 0.1]), "rest must be a share"),
        (lambda: fd.Densities([[0.5, 0.5]], [0.5, 0.5], 1.5), "rest must be a share"),
        (lambda: fd.Densities.of_clients(FED, rest=-1), "rest=-1"),
    ],
)
def test_bad_densities(make, says):
    with pytest.raises(fd.ModelError, match=says):
        make()


def test_regression_has_no_labels(values):
    for make in (fd.Densities.of_clients, fd.NGrams.of_clients):
        with pytest.raises(fd.DataError, match="the data has no labels"):
            make(values)


# -- at hand and from messages ---------------------------------------------------------------------


@pytest.mark.parametrize("which", [[2], [5, 0, 1], [0, 1, 2, 3, 4, 5]])
def test_classifiers_against_numpy(which):
    members, y = classifiers(), Y[:40]
    weight, excess = np.linspace(0.7, 0.2, len(which)), np.linspace(0.1, 0.3, len(which))
    h = members.outputs(None, torch.from_numpy(X[:40])).double().numpy()[which]
    likely = h[:, np.arange(40), y]
    inside = weight @ likely + 1e-3
    apart, squares = np.einsum("c,cnk->nk", weight, h) - np.eye(4)[y], (h**2).sum(2).mean(1)
    for data in (ROWS, PADDED):
        for sent in (False, True):
            value, slope = look(members, which, weight, data=data, sent=sent)
            assert float(value) == pytest.approx(-np.log(inside).mean(), rel=1e-5)
            np.testing.assert_allclose(slope, -(likely / inside).mean(1), rtol=1e-4)
            value, slope = look(
                members, which, weight, "squared", data=data, excess=excess, sent=sent
            )
            assert float(value) == pytest.approx(
                (apart**2).sum(1).mean() - (weight * excess) @ squares, rel=1e-4
            )
            exact = 2 * np.einsum("cnk,nk->c", h, apart) / 40 - 2 * excess * squares
            np.testing.assert_allclose(slope, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", ["log", "squared"])
@pytest.mark.parametrize("make", [unigrams, classifiers], ids=["densities", "classifiers"])
def test_gradients_against_differences(make, loss):
    members, weight = make(), np.array([0.3, 0.5, 0.4])
    _, slope = look(members, [0, 1, 2], weight, loss, floor=0.05)
    for k in range(3):
        up, down = (
            float(look(members, [0, 1, 2], weight + s * 0.02 * np.eye(3)[k], loss, floor=0.05)[0])
            for s in (1, -1)
        )
        assert float(slope[k]) == pytest.approx((up - down) / 0.04, rel=0.02, abs=2e-3)


def test_ngram_gradients_against_differences():
    fed = text_federation()
    members, weight = fd.NGrams.of_clients(fed, order=3), np.array([0.3, 0.6])
    y = torch.from_numpy(fed.data.y_train)
    data = Rows(
        torch.from_numpy(fed.data.x_train), y, torch.arange(len(y)), torch.ones(len(y)), fed.spec
    )
    value, slope = look(members, [0, 1], weight, data=data)
    sent_value, sent_slope = look(members, [0, 1], weight, data=data, sent=True)
    assert float(value) == float(sent_value)
    assert torch.equal(slope, sent_slope)
    for k in range(2):
        up, down = (
            float(look(members, [0, 1], weight + s * 0.02 * np.eye(2)[k], data=data)[0])
            for s in (1, -1)
        )
        assert float(slope[k]) == pytest.approx((up - down) / 0.04, rel=0.02)


def cases():
    text = text_federation()
    label = {"loss": "squared", "bias_correction": True}
    return {
        "unigrams": (fd.Densities.of_clients(text), text, {}),
        "unigrams, squared": (fd.Densities.of_clients(text), text, label),
        "point masses": (fd.Densities(np.eye(4)), FED, {"floor": 1e-2}),
        "classifiers": (classifiers(), FED, {}),
        "classifiers, squared": (classifiers(), FED, label),
        "n-grams": (fd.NGrams.of_clients(text, order=3), text, {}),
    }


@pytest.mark.parametrize("case", cases().values(), ids=cases().keys())
@pytest.mark.parametrize("kind", [fd.FedBoost, fd.AFLBoost])
def test_a_run_from_messages_is_the_run_at_hand(case, kind):
    members, fed, options = case
    runs = [
        fd.run(
            kind(m, budget=len(m) / 2, sampling="uniform", step=0.1, measure_every=0, **options),
            fed,
            6,
            evaluate_every=0,
        )
        for m in (members, members.remote())
    ]
    assert not torch.equal(
        runs[0].state.alpha, torch.full_like(runs[0].state.alpha, 1 / len(members))
    )
    torch.testing.assert_close(runs[0].state.alpha, runs[1].state.alpha, rtol=1e-5, atol=1e-6)
    assert runs[0].history.bytes_down.tolist() == runs[1].history.bytes_down.tolist()
    assert runs[0].history.bytes_up.tolist() == runs[1].history.bytes_up.tolist()


def test_what_is_not_at_hand_cannot_be_kept():
    far = unigrams().remote()
    for options in ({"measure_every": 1}, {"cache": True}, {"repeats": 2}):
        with pytest.raises(fd.ConfigError, match="not at hand"):
            fd.FedBoost(far, budget=1, **{"measure_every": 0, **options})
    assert unigrams().at_hand


def test_the_corrected_loss_is_unbiased():
    """Over all samples of three predictors, the mean of the corrected loss is the loss of the whole
    mixture.
    """
    alpha, gamma = np.array([0.5, 0.3, 0.2]), np.array([0.9, 0.4, 0.6])
    for members in (unigrams(), classifiers()):
        exact = float(look(members, [0, 1, 2], alpha, "squared")[0])
        found = plain = np.prod(1 - gamma) * 1.0  # nothing sent: |0 - e_y|^2
        for bits in range(1, 8):
            sent = np.array([bits >> k & 1 for k in range(3)], bool)
            chance, weight = np.prod(np.where(sent, gamma, 1 - gamma)), (alpha / gamma)[sent]
            args = (members, np.flatnonzero(sent), weight, "squared")
            found = found + chance * float(look(*args, excess=weight * (1 - gamma[sent]))[0])
            plain = plain + chance * float(look(*args)[0])
        assert found == pytest.approx(exact, abs=1e-5)
        assert plain > exact + 0.01


# -- classifiers -----------------------------------------------------------------------------------


def test_labels_not_seen_have_probability_zero():
    odd = Y % 2 == 1
    member = LogisticRegression().fit(X[odd], Y[odd])
    out = fd.Classifiers([member], 4).outputs(None, torch.from_numpy(X))[0]
    assert not out[:, [0, 2]].any()
    np.testing.assert_allclose(out[:, [1, 3]], member.predict_proba(X), atol=1e-6)


def test_the_mixture_of_classifiers():
    members, weight = classifiers(), torch.tensor([0.1, 0.2, 0.3, 0.1, 0.1, 0.2])
    by_hand = (
        0.1 * members.members[0].predict_proba(X)
        + 0.2 * members.members[1](torch.from_numpy(X)).softmax(1).detach().numpy()
    )
    rest = members.outputs(None, torch.from_numpy(X))[2:]
    by_hand = by_hand + torch.einsum("q,qnk->nk", weight[2:], rest).numpy()
    np.testing.assert_allclose(members.mixture(weight, torch.from_numpy(X)), by_hand, atol=1e-6)


def test_networks_are_evaluated_not_trained():
    net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.9))
    x = torch.from_numpy(X)
    out = fd.Classifiers([net], 4).outputs(None, x)[0]
    torch.testing.assert_close(out, net[0](x).softmax(-1))


@pytest.mark.parametrize("k", [0, 2, 3, 5])
def test_an_estimator_survives_its_archive(k):
    members = classifiers()
    sent = wire.decode(wire.encode(members.message(torch.tensor([k]))))[str(k)]
    assert set(sent) == {"skops"}
    again = unpack(sent["skops"])
    assert again is not members.members[k]
    np.testing.assert_array_equal(again.predict_proba(X), members.members[k].predict_proba(X))


class Strange(LogisticRegression):
    """A type of nobody's library."""


def double(x):
    return 2 * x


def test_a_type_that_the_site_trusts_is_loaded():
    """Types are trusted by their full names, and no others with them."""
    member = RandomForestClassifier(2, random_state=0)
    tree = "sklearn.tree._tree.Tree"
    members = fd.Classifiers([member.fit(X, Y)], 4, trusted=[tree])
    options = {"sampling": "all", "step": 0.1, "measure_every": 0}
    runs = [
        fd.run(fd.FedBoost(m, **options), FED, 2, evaluate_every=0)
        for m in (members, members.remote())
    ]
    torch.testing.assert_close(runs[0].state.alpha, runs[1].state.alpha)
    with pytest.raises(fd.ModelError, match="trusted='Tree'"):
        fd.Classifiers([member], 4, trusted="Tree")


@pytest.mark.parametrize(
    ("member", "named"),
    [
        (Strange(), "Strange"),
        (make_pipeline(FunctionTransformer(double), LogisticRegression()), "double"),
        (RandomForestClassifier(2), "Tree"),
    ],
    ids=["class", "function", "compiled"],
)
def test_an_untrusted_type_is_not_loaded(member, named):
    members = fd.Classifiers([member.fit(X, Y)], 4)
    with pytest.raises(fd.ModelError, match=rf"untrusted types \(.*{named}.*not loaded"):
        unpack(members.message(torch.tensor([0]))["0"]["skops"])
    options = {"sampling": "all", "step": 0.1, "measure_every": 0}
    with pytest.raises(fd.ModelError, match="untrusted types"):
        fd.run(fd.FedBoost(members.remote(), **options), FED, 1, evaluate_every=0)
    # one's own members need no archive to be used
    fd.run(fd.FedBoost(members, **options), FED, 1, evaluate_every=0)


def test_an_archive_with_a_function_is_not_loaded():
    archive = torch.frombuffer(bytearray(skops.io.dumps({"f": double})), dtype=torch.uint8)
    with pytest.raises(fd.ModelError, match="double"):
        unpack(archive)


def test_files_that_are_not_archives_are_refused_with_a_readable_error():
    whole = skops.io.dumps(LogisticRegression().fit(X, Y))
    for bad in (b"", b"garbage", whole[:-30], whole.replace(b"schema", b"schemb")):
        with pytest.raises(fd.ModelError, match="not a readable skops archive"):
            unpack(torch.tensor(list(bad), dtype=torch.uint8))


def test_an_archive_that_swells_is_not_unpacked():
    """A megabyte of zeros in a kilobyte: no memory is given to it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("schema.json", bytes(1 << 20))
    with pytest.raises(fd.ModelError, match=r"unpacks to 1048576; it is not loaded"):
        unpack(torch.tensor(list(file.getvalue()), dtype=torch.uint8))


def test_nothing_is_pickled():
    files = sorted(Path(predictors.__file__).parent.glob("*.py"))
    assert {"base.py", "classifiers.py", "densities.py", "ngrams.py"} <= {
        file.name for file in files
    }
    source = "\n".join(file.read_text() for file in files)
    assert not re.search(r"^\s*(import|from)\s+\S*(pickle|joblib|dill)", source, re.MULTILINE)
    assert "torch.load" not in source


class Counted(GaussianNB):
    """Counts the rows it is asked about."""

    asked: list[int] = []  # noqa: RUF012 - shared on purpose

    def predict_proba(self, x):
        self.asked.append(len(x))
        return super().predict_proba(x)


@pytest.mark.parametrize(
    ("engine", "rows"), [(fd.Local(batch=False), 60), (fd.Local(), 69)], ids=["looped", "batched"]
)
def test_a_member_sees_every_row_once(engine, rows):
    """Clients of 21 and 30 rows share a batch, which adds 9 rows of padding."""
    members = fd.Classifiers([Counted().fit(X, Y), network(0)], 4)
    algorithm = fd.FedBoost(members, budget=1, sampling="uniform")
    Counted.asked.clear()
    fd.run(algorithm, FED, 0, evaluate_every=0, engine=engine)
    first = list(Counted.asked)
    Counted.asked.clear()
    fd.run(algorithm, FED, 5, evaluate_every=0, engine=engine)
    assert first == Counted.asked
    assert Counted.asked[0] == 2  # the check before the run
    assert sum(Counted.asked[1:]) == rows


def two_outputs():
    return DecisionTreeClassifier().fit(X, np.stack([Y, Y], 1))


@pytest.mark.parametrize(
    ("members", "says"),
    [
        (lambda: [], "at least one"),
        (lambda: network(0), "must be a list"),
        (
            lambda: [network(0), LogisticRegression()],
            "member 1, a LogisticRegression, is not fitted",
        ),
        (lambda: [SVC().fit(X, Y)], r"member 0, a SVC, has no predict_proba"),
        (
            lambda: [LogisticRegression().fit(X, Y + 1)],
            r"member 0 knows labels \[.*4.*not in 0 \.\. 3",
        ),
        (lambda: [LogisticRegression().fit(X, np.array(list("abcd"))[Y])], "member 0 knows labels"),
        (lambda: [two_outputs()], "several labels"),
    ],
)
def test_bad_members(members, says):
    with pytest.raises(fd.ModelError, match=says):
        fd.Classifiers(members(), 4)


@pytest.mark.parametrize("classes", [0, 1, 2.5, "4", True])
def test_bad_numbers_of_classes(classes):
    with pytest.raises(fd.ModelError, match="classes="):
        fd.Classifiers([network(0)], classes)


class Sums(GaussianNB):
    """Says that everything is certain."""

    def predict_proba(self, x):
        return np.ones((len(x), 4))


@pytest.mark.parametrize(
    ("member", "says"),
    [
        (torch.nn.Linear(3, 4), r"member 1 cannot take rows of shape \(2,\)"),
        (
            torch.nn.Linear(2, 3),
            r"member 1 gives outputs of shape \(2, 3\) for 2 rows, not \(2, 4\)",
        ),
        (
            torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Flatten(0)),
            r"outputs of shape \(8,\)",
        ),
        (LogisticRegression().fit(np.c_[X, X], Y), "member 1 cannot take rows"),
        (
            Sums().fit(X, Y),
            "the output of member 1 for row 0 is not a probability distribution: it sums to 4",
        ),
    ],
)
def test_members_that_do_not_fit_the_data(member, says):
    algorithm = fd.FedBoost(fd.Classifiers([network(0), member], 4), budget=1)
    with pytest.raises(fd.ModelError, match=says):
        fd.run(algorithm, FED, 1)


def test_classifiers_for_other_classes():
    with pytest.raises(fd.DataError, match="for 5 classes, the data has 4"):
        fd.run(fd.FedBoost(fd.Classifiers([torch.nn.Linear(2, 5)], 5), sampling="all"), FED, 1)


# -- n-grams ---------------------------------------------------------------------------------------


def test_bigrams_by_hand():
    """The text 0 1 0 1 1 over three words, smoothing 2, background (1/2, 1/4, 1/4).

    h_1(w) = (n(w) + 2 b(w)) / (5 + 2): (3, 3.5, 0.5) / 7. After 0 (twice, both times 1): (n(0 w) +
    2 h_1(w)) / 4. After 1 (twice: 0 and 1; the last 1 has no successor): (n(1 w) + 2 h_1(w)) / 4.
    Before the text (once, 0): (n + 2 h_1(w)) / 3.
    """
    members = fd.NGrams([np.array([0, 1, 0, 1, 1])], [0.5, 0.25, 0.25], order=2, smoothing=2.0)
    one = np.array([3, 3.5, 0.5]) / 7
    seen = {0: (0, 2, 0), 1: (1, 1, 0), 2: (0, 0, 0), -1: (1, 0, 0)}
    for context, counts in seen.items():
        want = (np.array(counts) + 2 * one) / (sum(counts) + 2)
        x = torch.full((3, 1), float(context))
        np.testing.assert_allclose(
            members.likelihoods(None, x, torch.arange(3))[0], want, atol=1e-6
        )
        np.testing.assert_allclose(members.mixture(torch.ones(1), x[:1])[0], want, atol=1e-6)


def test_trigrams_by_hand():
    """The text 0 1 0 1 1, smoothing 2: after (0, 1) come 0 and 1 once each, on top of the bigrams
    after 1.
    """
    members = fd.NGrams([[0, 1, 0, 1, 1]], [0.5, 0.25, 0.25], order=3, smoothing=2.0)
    after_one = (np.array([1, 1, 0]) + 2 * np.array([3, 3.5, 0.5]) / 7) / 4
    x = torch.tensor([[0.0, 1.0]])
    np.testing.assert_allclose(
        members.mixture(torch.ones(1), x)[0], (np.array([1, 1, 0]) + 2 * after_one) / 4, atol=1e-6
    )
    np.testing.assert_allclose(
        members.mixture(torch.ones(1), torch.tensor([[2.0, 1.0]]))[0], after_one, atol=1e-6
    )
    wide = torch.tensor([[7.0, 9.0, 0.0, 1.0]])  # more words than are looked at
    torch.testing.assert_close(
        members.mixture(torch.ones(1), wide), members.mixture(torch.ones(1), x)
    )


def test_order_one_is_the_smoothed_unigram():
    """(n(w) + s b(w)) / (n + s): `Densities` with rest = s / (n + s)."""
    rng = np.random.default_rng(1)
    texts, background = [rng.integers(0, 6, n) for n in (4, 30)], rng.dirichlet(np.ones(6))
    members = fd.NGrams(texts, background, order=1, smoothing=3.0)
    for k, text in enumerate(texts):
        want = (np.bincount(text, minlength=6) + 3 * background) / (len(text) + 3)
        np.testing.assert_allclose(
            members.likelihoods(None, torch.zeros(6, 1), torch.arange(6))[k], want, atol=1e-6
        )


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 4), max_size=25), min_size=1, max_size=3),
    order=st.integers(1, 4),
    smoothing=st.floats(0.01, 100),
    data=st.data(),
)
def test_every_context_has_a_distribution(texts, order, smoothing, data):
    """Known or not, also those that begin before the text; and the mixture is that of the members'
    likelihoods.
    """
    rng = np.random.default_rng(0)
    members = fd.NGrams(texts, rng.dirichlet(np.ones(5)), order, smoothing)
    contexts = torch.tensor(
        data.draw(st.lists(st.tuples(*[st.integers(-1, 4)] * 3), min_size=1, max_size=6)),
        dtype=torch.float32,
    )
    weight = torch.tensor(rng.dirichlet(np.ones(len(texts))))
    mixed = members.mixture(weight, contexts)
    assert mixed.shape == (len(contexts), 5)
    for context, row in zip(contexts, mixed, strict=True):
        each = members.likelihoods(None, context.expand(5, 3), torch.arange(5))
        torch.testing.assert_close(each.sum(1), torch.ones(len(texts)), rtol=0, atol=1e-5)
        assert bool((each > 0).all())
        torch.testing.assert_close(row, weight.float() @ each)


def test_ngrams_survive_their_message():
    rng = np.random.default_rng(2)
    members = fd.NGrams([rng.integers(0, 5, n) for n in (3, 20, 0)], np.full(5, 0.2), order=3)
    x, y = (
        torch.from_numpy(rng.integers(-1, 5, (50, 2))).float(),
        torch.from_numpy(rng.integers(0, 5, 50)),
    )
    sent = wire.decode(wire.encode(members.message(torch.tensor([2, 0]))))
    assert list(sent) == ["2", "0"]
    assert torch.equal(
        members.remote().likelihoods(sent, x, y), members.likelihoods(None, x, y)[[2, 0]]
    )
    empty = members.likelihoods(None, x, y)[2]
    # a text of no words is the background
    torch.testing.assert_close(empty, torch.full((50,), 0.2))


def test_ngrams_of_clients_read_their_own_words():
    fed = text_federation()
    members = fd.NGrams.of_clients(fed, order=2, smoothing=1.0)
    first = fed.data.y_train[fed.client_rows(0)]
    alone = fd.NGrams(
        [first], np.full(fed.data.classes, 1 / fed.data.classes), order=2, smoothing=1.0
    )
    x, y = torch.from_numpy(fed.data.x_train), torch.from_numpy(fed.data.y_train)
    assert torch.equal(members.likelihoods(None, x, y)[0], alone.likelihoods(None, x, y)[0])
    run = fd.run(fd.FedBoost(members, sampling="all"), fed, 5)
    assert run.history.objective.iloc[-1] < run.history.objective.iloc[0]
    assert run.model.predict_proba(fed.data.x_test[:4]).sum(1) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"order": 0}, fd.ConfigError, "order=0"),
        ({"order": 1.5}, fd.ConfigError, r"order=1\.5"),
        ({"order": 70}, fd.ConfigError, "order=70 is too much for 2 words"),
        ({"smoothing": 0.0}, fd.ConfigError, r"smoothing=0\.0"),
        ({"smoothing": math.inf}, fd.ConfigError, "smoothing=inf"),
        (
            {"background": [0.5, 0.4]},
            fd.ModelError,
            "background 0 is not a prob",
        ),
        ({"background": [[0.5, 0.5]]}, fd.ModelError, "background is a probability for each word"),
        ({"background": []}, fd.ModelError, "background is a probability for each word"),
        ({"texts": []}, fd.ModelError, "at least one text"),
        (
            {"texts": [[0, 1], [0, 2]]},
            fd.ModelError,
            r"text 1 must be a list of word numbers in 0 \.\. 1",
        ),
        ({"texts": [[0, -1]]}, fd.ModelError, "text 0"),
        ({"texts": [[0.5]]}, fd.ModelError, "text 0"),
        ({"texts": ["to be"]}, fd.ModelError, "text 0"),
    ],
)
def test_bad_ngrams(options, error, says):
    with pytest.raises(error, match=says):
        fd.NGrams(**{"texts": [[0, 1]], "background": [0.5, 0.5], **options})


def test_ngrams_that_do_not_fit():
    members = fd.NGrams([[0, 1]], [0.25] * 4, order=4)
    with pytest.raises(
        fd.DataError, match="4 words with 3 before each; the data has 4 labels and 2 features"
    ):
        fd.run(fd.FedBoost(members, sampling="all"), FED, 1)
    with pytest.raises(fd.ConfigError, match="use loss='log'"):
        fd.run(fd.FedBoost(members, sampling="all", loss="squared"), FED, 1)
    with pytest.raises(fd.DataError, match=r"word_federation\(\.\.\., before=1\)"):
        fd.NGrams.of_clients(fd.word_federation(["to be or not to be"], least=2), order=2)


def test_repr_and_checkpoints_tell_collections_apart():
    assert repr(unigrams()) == "Densities(5)"
    a, b = fd.Densities([[0.5, 0.5]]), fd.Densities([[0.4, 0.6]])
    assert not torch.equal(a.state_dict()["table"], b.state_dict()["table"])
    assert set(classifiers().state_dict()) >= {"0.skops", "1.weight", "1.bias"}
    assert set(fd.NGrams([[0, 1]], [0.5, 0.5]).state_dict()) == {
        f"0.{m}.{n}" for m in (0, 1) for n in ("keys", "counts")
    }
