"""Messages through Flower: a header of plain values, and a body in the wire format of foedus.

The body of a question has one message for each group of clients that are sent the same; that of an
answer has one message for each client. Only bodies are counted as bytes sent. Headers contain the
round and the exchange of a message.
"""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from foedus.errors import FoedusError, ReplyError

HEADER, BODY = "foedus", "wire"
_ARRAY, _LONGEST, _DEEPEST = "foedus", 1 << 24, 32
_LARGEST = 1 << 1000  # of integers: all of them can become floats
_SHOWN = 300


def content(header: dict[str, Any], body: bytes = b"") -> RecordDict:
    """The content of a Flower message."""
    records: dict[str, Any] = {HEADER: ConfigRecord({"json": json.dumps(header)})}
    if body:
        records[BODY] = ArrayRecord({"0": Array("uint8", (len(body),), _ARRAY, body)})
    return RecordDict(records)


def header(message: Message) -> dict[str, Any]:
    """The header of a message from a peer."""
    try:
        text = message.content[HEADER]["json"]
        if not isinstance(text, str | bytes):
            raise TypeError(f"it is a {type(text).__name__}")
        if len(text) > _LONGEST:
            raise ReplyError(
                f"the header of the message has {len(text)} characters; at most {_LONGEST} are read"
            )
        found = json.loads(text)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, ReplyError):
            raise
        raise ReplyError(f"the message has no readable header: {shown(repr(error))}") from None
    if not isinstance(found, dict):
        raise ReplyError("the header of the message is not a table")
    for name, value in found.items():
        _check_plain(name, value)
    return found


def _check_plain(name: str, value: Any) -> None:
    """Refuse a value that is nested too deeply, or integers out of range.

    Level by level, because a recursion could exceed its limit.
    """
    level = [value]
    for _ in range(_DEEPEST):
        if any(type(v) is int and abs(v) > _LARGEST for v in level):
            raise ReplyError(f"{shown(name)} in the header has an integer of more than 1000 bits")
        nested = [v for v in level if isinstance(v, dict | list)]
        if not nested:
            return
        level = [v for t in nested for v in (t.values() if isinstance(t, dict) else t)]
    raise ReplyError(f"{shown(name)} in the header is nested deeper than {_DEEPEST} levels")


def shown(text: Any) -> str:
    """Text of a peer for display: short, in one line, without control characters."""
    line = "".join(c if c.isprintable() else " " for c in str(text)[: _SHOWN + 1])
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]} ..."


def body(message: Message) -> bytes:
    """The body of a message from a peer."""
    if BODY not in message.content:
        return b""
    try:
        array = message.content[BODY]["0"]
        if not isinstance(array, Array):
            raise TypeError(f"it is a {type(array).__name__}")
        return bytes(array.data)
    except (KeyError, TypeError, AttributeError) as error:
        raise ReplyError(f"the body of the message cannot be read: {error!r}") from None


def cut(joined: bytes, lengths: Any) -> list[bytes]:
    """The messages that were joined, by their lengths."""
    if (
        not isinstance(lengths, list)
        or not all(type(n) is int and n >= 0 for n in lengths)
        or sum(lengths) != len(joined)
    ):
        raise ReplyError(
            f"the lengths of its parts do not sum to the {len(joined)} bytes of the body"
        )
    ends = _sums(lengths)
    return [joined[end - n : end] for n, end in zip(lengths, ends, strict=True)]


def split(parts: list[bytes], groups: Any, ids: list[int]) -> tuple[list[bytes], list[bytes]]:
    """The messages of the groups of clients who are sent the same, and what comes behind them."""
    fine = isinstance(groups, list) and all(
        isinstance(g, list) and all(type(i) is int for i in g) for g in groups
    )
    if not fine or sorted(i for g in groups for i in g) != sorted(ids) or len(groups) > len(parts):
        raise ReplyError("the groups of clients in the header are not those who are asked, ids")
    return parts[: len(groups)], parts[len(groups) :]


def _sums(lengths: Sequence[int]) -> list[int]:
    total, ends = 0, []
    for n in lengths:
        total += n
        ends.append(total)
    return ends


@contextlib.contextmanager
def explained(what: str, kind: type[FoedusError] = ReplyError) -> Iterator[None]:
    """Converts any exception about a message of the server to an error that names the part."""
    try:
        yield
    except FoedusError:
        raise
    except Exception as error:
        traceback.print_exc()  # its text may quote rows
        raise kind(f"{what}: {type(error).__name__}") from error
