"""Predictors that are n-gram tables of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, Gt
from torch import Tensor

from foedus.base.settings import check_value
from foedus.base.spec import Spec
from foedus.base.tree import Tree
from foedus.errors import ConfigError, DataError, ModelError
from foedus.models.predictors.base import label_count, number_array, probabilities
from foedus.models.predictors.classifiers import _Evaluated


class NGrams(_Evaluated):
    """Given predictors: smoothed n-gram language models (MacKay and Peto's Dirichlet smoothing).

        h_0(w)     = background(w),
        h_m(w | c) = (n(c, w) + smoothing h_{m-1}(w | c')) / (n(c) + smoothing)

    with n the counts of member k, c the last m - 1 words and c' the last m - 2: a distribution for
    every context. Rows have the previous order - 1 words as features and the word as label; words
    before the beginning of the text are -1.

    Args:
        texts: The word numbers of each member's text.
        background: The probability of each word.
        order: The largest m.
        smoothing: The weight of the shorter context.

    Raises:
        ModelError: Texts or background are not of this form.
        ConfigError: A setting is out of range.

    Example:
        >>> models = fd.NGrams([[0, 1, 0, 1], [0, 0, 0]], background=[0.5, 0.5], order=2)
        >>> len(models)
        2
    """

    def __init__(
        self,
        texts: Sequence[Tensor | np.ndarray],
        background: Any,
        order: int = 2,
        smoothing: float = 10.0,
    ) -> None:
        self.background = number_array("background", background)
        if self.background.dim() != 1 or not len(self.background):
            given = tuple(self.background.shape)
            raise ModelError(f"background is a probability for each word, not of shape {given}")
        probabilities(self.background.unsqueeze(0), "background")
        check_value("order", order, Annotated[int, Ge(1)])
        check_value("smoothing", smoothing, Annotated[float, Gt(0)])
        self.order, self.smoothing = int(order), float(smoothing)
        if (len(self.background) + 1) ** order >= 2**63:
            raise ConfigError(
                f"order={order!r} is too much for {len(self.background):,} words: contexts cannot "
                "be numbered"
            )
        words = [self._words(k, text) for k, text in enumerate(texts)]
        if not words:
            raise ModelError("texts must hold at least one text")
        self.counts = [[self._count(text, m) for m in range(1, self.order + 1)] for text in words]

    @classmethod
    def of_clients(cls, fed: Any, order: int = 2, smoothing: float = 10.0) -> NGrams:
        """One language model per client of a federation of words, with a uniform background.

        Args:
            fed: The federation (`fd.word_federation`).
            order: The largest m.
            smoothing: The weight of the shorter context.

        Raises:
            DataError: Rows have fewer than order - 1 previous words.

        Example:
            >>> fed = fd.word_federation(["to be or not to be"] * 2, before=1, least=2)
            >>> len(fd.NGrams.of_clients(fed, order=2))
            2
        """
        classes = label_count(fed)
        if fed.settings.get("before", order) < order - 1:
            raise DataError(
                f"order={order!r} needs the {order - 1} words before each: word_federation(..., "
                f"before={order - 1})"
            )
        texts = [fed.data.y_train[fed.client_rows(i)] for i in range(len(fed))]
        return cls(texts, np.full(classes, 1 / classes), order, smoothing)

    def __len__(self) -> int:
        return len(self.counts)

    def check(self, spec: Spec, loss: str) -> None:
        if loss != "log":
            raise ConfigError(
                f"loss={loss!r}: n-gram models give the probability of a word, not of all words; "
                "use loss='log'"
            )
        if spec.classes != len(self.background) or spec.features < self.order - 1:
            raise DataError(
                f"the models are over {len(self.background):,} words with {self.order - 1} before "
                f"each; the data has {spec.classes} labels and {spec.features} features"
            )

    def _words(self, k: int, text: Any) -> Tensor:
        given = np.asarray(text)
        whole = given.ndim == 1 and (not given.size or given.dtype.kind in "iu")
        if not whole or ((given < 0) | (given >= len(self.background))).any():
            raise ModelError(
                f"text {k} must be a list of word numbers in 0 .. {len(self.background) - 1}"
            )
        return torch.from_numpy(given.astype(np.int64))

    def _count(self, words: Tensor, length: int) -> dict[str, Tensor]:
        """Numbers of all windows of this length in a text, and how often each occurs."""
        if not len(words):
            keys = torch.zeros(0, dtype=torch.int64)
            return {"keys": keys, "counts": keys.int()}
        before = torch.cat((torch.full((length - 1,), -1, dtype=torch.int64), words))
        keys, counts = self._key(before.unfold(0, length, 1)).unique(return_counts=True)
        return {"keys": keys, "counts": counts.to(torch.int32)}

    def _key(self, windows: Tensor) -> Tensor:
        base = len(self.background) + 1
        return ((windows + 1) * base ** torch.arange(windows.shape[1] - 1, -1, -1)).sum(1)

    def message(self, which: Tensor) -> dict[str, Tree]:
        return {str(k): {str(m): c for m, c in enumerate(self.counts[k])} for k in which.tolist()}

    def likelihoods(self, models: Tree, x: Tensor, y: Tensor) -> Tensor:
        chosen = self.counts
        if models is not None:
            chosen = [[m[str(i)] for i in range(self.order)] for m in models.values()]
        before = x.flatten(1)[:, x[0].numel() - self.order + 1 :].long()
        windows = torch.cat((before, y.unsqueeze(1)), 1)
        return torch.stack([self._likelihood(counts, windows) for counts in chosen])

    def _likelihood(self, counts: list[dict[str, Tensor]], windows: Tensor) -> Tensor:
        base, h = len(self.background) + 1, self.background[windows[:, -1]]
        for m, table in enumerate(counts, start=1):
            running = torch.cat((torch.zeros(1, dtype=torch.int64), table["counts"].cumsum(0)))

            def counted(below: Tensor, keys: Tensor = table["keys"]) -> Tensor:
                return running[torch.searchsorted(keys, below)]  # noqa: B023 - used at once

            number = self._key(windows[:, self.order - m :])
            context = number - number % base
            seen = counted(number + 1) - counted(number)
            of_context = counted(context + base) - counted(context)
            h = (seen + self.smoothing * h) / (of_context + self.smoothing)
        return h

    def mixture(self, weight: Tensor, x: Tensor) -> Tensor:
        """The probabilities (n, |Y|) of all words in each of n contexts.

        Args:
            weight: The weight of each member.
            x: Rows: the previous words.
        """
        words = torch.arange(len(self.background))
        contexts = x.flatten(1)[:, x[0].numel() - self.order + 1 :]
        # many rows have the same context
        keys, of_row = self._key(contexts.long()).unique(return_inverse=True)
        some_row = torch.zeros_like(keys).scatter_(0, of_row, torch.arange(len(x)))
        rows = [
            weight.float() @ self.likelihoods(None, c.expand(len(words), -1), words)
            for c in contexts[some_row]
        ]
        return torch.stack(rows)[of_row]

    def state_dict(self) -> dict[str, Tensor]:
        return {
            f"{k}.{m}.{n}": t
            for k, each in enumerate(self.counts)
            for m, c in enumerate(each)
            for n, t in c.items()
        }
