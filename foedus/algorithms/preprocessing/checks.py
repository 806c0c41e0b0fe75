"""Checks of untrusted clients' replies to the steps of a fit: the reason of a rejection, or
None."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import torch
from torch import Tensor

from foedus.algorithms.preprocessing.encoding import LONGEST_TEXT
from foedus.data.formats.frames import MOST

_SLACK = 1e-6  # of rounding


def _within(t: Tensor, low: float, high: float) -> bool:
    return bool(((t >= low - _SLACK) & (t <= high + _SLACK)).all())


def wrong_survey(reply: dict[str, Tensor]) -> str | None:
    if not all(_within(reply[k], 0, 1) for k in reply):
        return "its survey has shares of its rows that cannot be"
    steps = reply.get("magnitudes", torch.ones(0, 1))
    whole = bool(((steps == 0) | (steps == 1)).all())
    if not whole or bool((steps[..., 1:] > steps[..., :-1]).any()):
        return "its survey has magnitudes that cannot be"
    return None


def wrong_moment(reply: dict[str, Tensor]) -> str | None:
    total, present = reply["sum"][..., 0], reply["present"]
    if not _within(present, 0, 1) or bool((total.abs() > present + _SLACK).any()):
        return "its sums are not those of numbers within the bound"
    return None


def wrong_bins(reply: Tensor) -> str | None:
    if bool((reply < 0).any()) or not _within(reply.double().sum(-1), 0, 1):
        return "its counts of rows cannot be"
    return None


def wrong_strings(strings: Collection[bytes], columns: int) -> str | None:
    """The reason why texts, each after the index of its column, are invalid, or None."""
    count: Counter[int] = Counter()
    for text in strings:
        place = int.from_bytes(text[:2], "little")
        try:
            text[2:].decode()
        except UnicodeDecodeError:
            return "its texts are not UTF-8"
        if len(text) < 2 or place >= columns or len(text) > LONGEST_TEXT:
            return "its texts are of no column, or too long"
        count[place] += 1
    if max(count.values(), default=0) > MOST:
        return f"it has more than {MOST} texts of a column"
    return None
