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
    """A text in lower case, without punctuation, split at white space and dashes."""
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
    """One client a text: a row for each word, whose features are the words before it.

    Args:
        texts: one for each client, such as all that a character says; see
            `foedus.data.load_speeches`.
        before: how many previous words a row has as features, as numbers; -1 where the text has not
            begun. 0: one feature, 0.
        least: texts with fewer words are left out.
        vocabulary: how many of the most frequent words are told apart (`None`: all); the others are
            one word, "<other>".
        test: the last part of each text is for testing. Words that only it holds are "<other>" as
            well.

    `data.class_names` are the words.
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
