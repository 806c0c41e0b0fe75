"""Text as a federation of words: who says which word, after which others."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from foedus.data.dataset import Data
from foedus.data.federation import Federation
from foedus.errors import DataError

_PLAIN = str.maketrans("—–", "  ", string.punctuation + "‘’“”")


def words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation, split at white space and dashes."""
    return text.lower().replace("--", " ").translate(_PLAIN).split()


def word_federation(
    texts: Sequence[str],
    *,
    before: int = 0,
    least: int = 100,
    vocabulary: int | None = None,
    test: float = 0.2,
    name: str = "words",
) -> Federation:
    """A federation of words: one client per text, one row per word, previous words as features.

    `data.class_names` are the words.

    Args:
        texts: The text of each client, such as all that a character says (`fd.load_speeches`).
        before: The number of previous words that are features, as word numbers; -1 before the text
            begins. 0: a single feature, 0.
        least: The least number of words; shorter texts are left out.
        vocabulary: The number of most frequent words that are kept apart (`None`: all); all others
            are one word, "<other>".
        test: The fraction of each text, its end, that is the test part; words that occur only there
            are "<other>".
        name: The name of the data set.

    Returns:
        The federation.

    Raises:
        DataError: An argument is out of range, or no text has enough words.

    Example:
        >>> texts = ["To be, or not to be", "Words, words, words"]
        >>> fed = fd.word_federation(texts, least=2, test=0)
        >>> fed.data.class_names
        ('<other>', 'words', 'be', 'to', 'not', 'or')
    """
    if isinstance(texts, str):
        raise DataError("texts is a single text: give a list with one for each client")
    if not 0 <= test < 1 or before < 0 or least < 2:
        raise DataError(
            f"test={test!r} must be in [0, 1), before={before!r} not negative, least={least!r} at "
            "least 2"
        )
    if vocabulary is not None and vocabulary < 1:
        raise DataError(f"vocabulary={vocabulary!r} must be at least 1, or None for all words")
    split = [w for w in map(words, texts) if len(w) >= least]
    if not split:
        raise DataError(f"none of the {len(texts)} texts has least={least} words")
    cut = [max(1, len(w) - round(test * len(w))) for w in split]
    counts = Counter(word for w, c in zip(split, cut, strict=True) for word in w[:c])
    known = sorted(counts, key=lambda w: (-counts[w], w))[:vocabulary]
    number = {word: i + 1 for i, word in enumerate(known)}
    ids = [np.array([number.get(word, 0) for word in w], np.int64) for w in split]
    x = [_before(w, before) for w in ids]
    owner = np.repeat(np.arange(len(ids)), cut)
    late = np.repeat(np.arange(len(ids)), [len(w) - c for w, c in zip(ids, cut, strict=True)])
    x_train, y_train, x_test, y_test = (
        np.concatenate([t[:c] if first else t[c:] for t, c in zip(arrays, cut, strict=True)])
        for first in (True, False)
        for arrays in (x, ids)
    )
    data = Data(
        name, x_train, y_train, x_test, y_test, len(known) + 1, ("<other>", *known), owner, late
    )
    settings: dict[str, Any] = {"clients": len(ids), "before": before, "least": least}
    settings |= {"vocabulary": vocabulary, "test": test}
    return Federation.from_owners(data, owner, late, np.arange(len(ids)), "natural", settings)


def _before(ids: np.ndarray, before: int) -> np.ndarray:
    """The words before each word, oldest first, (n, before)."""
    if not before:
        return np.zeros((len(ids), 1), np.float32)
    padded = np.concatenate((np.full(before, -1), ids))
    return np.lib.stride_tricks.sliding_window_view(padded, before)[:-1].astype(np.float32)
