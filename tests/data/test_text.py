"""Text as a federation of words, worked out by hand; and the real plays where they are at hand."""

from __future__ import annotations

import numpy as np
import pytest

import foedus as fd
from foedus.data.catalog import locate
from foedus.data.text import word_federation, words


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("To be, or NOT to be!", ["to", "be", "or", "not", "to", "be"]),
        ("'Tis o'er; the king's", ["tis", "oer", "the", "kings"]),
        ("‘Tis o’er; “the king’s”", ["tis", "oer", "the", "kings"]),
        ("love--hate love—hate love–hate", ["love", "hate"] * 3),
        ("  one\n\ttwo  ", ["one", "two"]),
        ("...?!", []),
        ("Éclair 42", ["éclair", "42"]),
        ("", []),
    ],
)
def test_words(text, want):
    assert words(text) == want


def named(fed: fd.Federation, numbers: np.ndarray) -> list[str]:
    return [fed.data.class_names[i] for i in numbers]


def test_a_client_for_each_text():
    """Ten words and five: the last fifth of each is for testing, and a word that only it holds is
    another.
    """
    fed = word_federation(["a b a c a b a c a Z", "B, b; b. b d"], least=5)
    assert len(fed) == 2
    assert fed.sizes.tolist() == [8, 4]
    assert fed.test_sizes.tolist() == [2, 1]
    assert fed.data.class_names == ("<other>", "b", "a", "c")  # by frequency: b 2 + 4, a 4, c 2
    assert fed.data.classes == 4
    assert named(fed, fed.data.y_train[fed.client_rows(0)]) == [
        "a",
        "b",
        "a",
        "c",
        "a",
        "b",
        "a",
        "c",
    ]
    assert named(fed, fed.data.y_train[fed.client_rows(1)]) == ["b"] * 4
    assert named(fed, fed.data.y_test[fed.test_client_rows(0)]) == ["a", "<other>"]
    assert named(fed, fed.data.y_test[fed.test_client_rows(1)]) == ["<other>"]
    assert fed.data.x_train.shape == (12, 1)
    assert not fed.data.x_train.any()


def test_words_of_one_frequency_are_in_alphabetical_order():
    assert word_federation(["c b a c"], least=2, test=0).data.class_names == (
        "<other>",
        "c",
        "a",
        "b",
    )


def test_a_limited_vocabulary():
    fed = word_federation(["a a a b b c"], least=2, test=0, vocabulary=2)
    assert fed.data.class_names == ("<other>", "a", "b")
    assert fed.data.y_train.tolist() == [1, 1, 1, 2, 2, 0]
    assert word_federation(["a a b"], least=2, test=0, vocabulary=99).data.classes == 3


def test_contexts():
    """The words before each, oldest first; -1 before the text; test rows look back into the
    training part.
    """
    fed = word_federation(["a b c a", "b b a a"], least=2, before=2, test=0.25)
    name = {-1: "-", **dict(enumerate(fed.data.class_names))}
    seen = ["".join(name[int(v)] for v in row) for row in fed.data.x_train[fed.client_rows(0)]]
    assert seen == ["--", "-a", "ab"]
    seen = ["".join(name[int(v)] for v in row) for row in fed.data.x_train[fed.client_rows(1)]]
    assert seen == ["--", "-b", "bb"]
    tests = ["".join(name[int(v)] for v in row) for row in fed.data.x_test]
    assert tests == ["bc", "ba"]
    assert fed.data.x_train.dtype == np.float32


@pytest.mark.parametrize("before", [1, 2, 5, 12])
def test_contexts_are_shifted_words(before):
    rng = np.random.default_rng(before)
    fed = word_federation(
        [" ".join(rng.choice(list("abcdef"), n)) for n in (9, 4)], least=2, before=before, test=0
    )
    for i in range(2):
        y, x = fed.data.y_train[fed.client_rows(i)], fed.data.x_train[fed.client_rows(i)]
        for back in range(1, before + 1):
            want = np.concatenate((np.full(back, -1), y))[: len(y)]
            assert np.array_equal(x[:, before - back], want)


def test_short_texts_are_left_out():
    fed = word_federation(["a b", "a b c", "a b c d"], least=3, test=0)
    assert fed.sizes.tolist() == [3, 4]
    assert fed.ids.tolist() == [0, 1]
    assert fed.settings["clients"] == 2


def test_every_client_keeps_a_word_to_train_on():
    assert word_federation(["a b", "a b c d"], least=2, test=0.95).sizes.tolist() == [1, 1]


def test_without_a_test_part():
    fed = word_federation(["a b c"], least=2, test=0)
    assert len(fed.data.x_test) == 0
    assert (
        len(fd.run(fd.FedBoost(fd.Densities.of_clients(fed), sampling="all"), fed, 1).history) == 2
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"test": 1.0}, r"test=1\.0 must be in \[0, 1\)"),
        ({"test": -0.1}, r"test=-0\.1"),
        ({"before": -1}, "before=-1 not negative"),
        ({"least": 1}, "least=1 at least 2"),
        ({"vocabulary": 0}, "vocabulary=0 must be at least 1"),
        ({"least": 50}, "none of the 2 texts has least=50 words"),
        ({"texts": []}, "none of the 0 texts"),
        ({"texts": "to be or not to be"}, "texts is a single text"),
    ],
)
def test_bad_input(options, says):
    with pytest.raises(fd.DataError, match=says):
        word_federation(**{"texts": ["a b c", "d e f"], "least": 2, **options})


def test_shakespeare(real):
    if locate("shakespeare") is None:
        pytest.skip("shakespeare is not in FOEDUS_DATA")
    texts = [" ".join(user["speeches"]) for user in fd.load_speeches()]
    fed = fd.word_federation(texts, least=1000, vocabulary=2000, before=1, name="shakespeare")
    assert len(fed) > 100
    assert int((fed.sizes + fed.test_sizes).min()) >= 1000
    assert fed.data.classes == 2001
    assert set(fed.data.class_names[1:8]) >= {"the", "and", "i", "to"}
    assert not any(c in name for name in fed.data.class_names[1:] for c in ".,;:!?'-ABC")
    members = fd.Densities.of_clients(fed)
    assert members.nbytes()[0] < 4 * fed.data.classes
    run = fd.run(fd.FedBoost(members, budget=20, step=0.05), fed, 3, evaluate_every=0)
    assert run.history.objective.iloc[-1] < np.log(2001)
