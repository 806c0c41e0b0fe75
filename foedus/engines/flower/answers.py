"""Answers of a site, checked by the server: the sender, the question, and the ranges of numbers.

Bodies are checked later, when the form of replies is known (`foedus.engines.flower.session`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch
from flwr.app import Message
from torch import Tensor

from foedus import wire
from foedus.core.site_sums import SiteSums
from foedus.engines.flower import measure, messages
from foedus.errors import FoedusError, ReplyError

MOST_ROWS = 2**40


class PlainRefusedError(ReplyError):
    """A site refuses to send this reply in the clear."""


def header_of(answer: Message | str) -> dict[str, Any]:
    """The header of an answer; raises errors that a site or the connection reports."""
    if isinstance(answer, str):
        raise ReplyError(answer)
    header = messages.header(answer)
    if "error" in header:
        kind = PlainRefusedError if header.get("refused") == "plain" else ReplyError
        raise kind(messages.shown(header["error"]))
    return header


@dataclass(frozen=True)
class Parts:
    """The answers of the clients of a node: encoded replies, clients that have lost their state,
    and errors of single clients.
    """

    replies: dict[int, bytes]
    lost: list[int]
    errors: dict[int, str]


def read_parts(answer: Message, mine: list[int], asked: dict[str, Any]) -> Parts:
    """The entries of an answer for each of the node's clients; `asked` is the question."""
    header = header_of(answer)
    for name in ("round", "exchange", "phase"):
        given, due = header.get(name), asked.get(name)
        if type(given) is not type(due) or given != due:
            raise ReplyError(f"its answer is for {name} {messages.shown(given)}, not {due}")
    parts = messages.cut(messages.body(answer), header.get("lengths"))
    ids, lost, errors = header.get("ids"), header.get("lost", []), header.get("errors", {})
    if not own_clients(ids, mine) or not own_clients(lost, mine) or set(ids) & set(lost):
        raise ReplyError("its answer names clients that it was not asked for")
    if len(ids) != len(parts) or not isinstance(errors, dict):
        raise ReplyError(f"its answer has {len(parts)} replies of {len(ids)} clients, or no errors")
    why = {i: messages.shown(errors[str(i)]) for i in mine if str(i) in errors}
    return Parts(dict(zip(ids, parts, strict=True)), lost, why)


def own_clients(ids: Any, mine: Collection[int]) -> TypeGuard[list[int]]:
    """Whether these are ids of the node's clients, without duplicates."""
    return (
        isinstance(ids, list)
        and all(type(i) is int and i in mine for i in ids)
        and len(set(ids)) == len(ids)
    )


def read_sums(
    answer: Message | str, mine: Collection[int], classes: int | None,
    wanted: SiteSums | None = None,
) -> tuple[list[int], dict[str, Tensor]]:  # fmt: skip
    """Clients, and the sums over their test rows: rows, loss, and hits or squared errors; as
    "sums.NAME" also the sums for metrics, if they are requested.
    """
    header = header_of(answer)
    ids, sums = header.get("ids"), header.get("sums")
    score = "hits" if classes else "error"
    if not own_clients(ids, mine):
        raise ReplyError("its ids are not those of its own clients")
    if not isinstance(sums, dict) or set(sums) != {"rows", "loss", score}:
        raise ReplyError(f"its sums must be rows, loss and {score}")
    for name, column in sums.items():
        if not isinstance(column, list) or len(column) != len(ids) or not all(map(_number, column)):
            raise ReplyError(f"its sums of {name} must be finite numbers, one for each client")
    for rows, value in zip(sums["rows"], sums[score], strict=True):
        if not 0 <= rows <= MOST_ROWS or rows != int(rows):
            raise ReplyError(f"its sums cannot be: rows={messages.shown(rows)}")
        if not 0 <= value <= (rows if classes else math.inf):
            raise ReplyError(
                f"its sums cannot be: {score}={messages.shown(value)} with {rows} rows"
            )
    found = {k: torch.tensor([float(v) for v in sums[k]], dtype=torch.float64) for k in sums}
    if wanted is None:
        return ids, found
    assert not isinstance(answer, str)
    parts = messages.cut(messages.body(answer), header.get("lengths"))
    if len(parts) != len(ids):
        raise ReplyError(f"its answer has {len(parts)} sums for metrics of {len(ids)} clients")
    each = [
        measure.read(wire.decode(part), wanted, int(rows)) if rows else None
        for part, rows in zip(parts, sums["rows"], strict=True)
    ]
    for name, shape in wanted.shapes.items():
        column = [np.zeros(shape) if one is None else one[name] for one in each]
        found[f"sums.{name}"] = torch.from_numpy(np.array(column).reshape(-1, *shape))
    return ids, found


def read_score(answer: Message | str, classes: int | None) -> tuple[int, float]:
    """Test rows of a site, and the accuracy or the mean squared error of a model on them."""
    header = header_of(answer)
    rows, name = header.get("rows"), "hits" if classes else "squares"
    if type(rows) is not int or not 0 <= rows <= MOST_ROWS:
        raise ReplyError(f"its answer cannot be read: rows={messages.shown(rows)}")
    if not rows:
        return 0, math.nan
    total = header.get(name)
    if not _number(total) or not 0 <= total <= (rows if classes else math.inf):
        raise ReplyError(
            f"its answer cannot be read: {name}={messages.shown(total)} with {rows} rows"
        )
    return rows, total / rows


def seconds_of(answer: Message | str) -> float:
    """The computing time that a site reports; 0 if it is invalid."""
    with contextlib.suppress(FoedusError):
        if not isinstance(answer, str):
            seconds = messages.header(answer).get("seconds")
            return float(seconds) if _number(seconds) and seconds >= 0 else 0.0
    return 0.0


def _number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and math.isfinite(value)
