"""Changes of bytes and of texts that a broken or hostile sender could make.

All of them come from the generator that is given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random

INTERESTING = (
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    9,
    10,
    0x10,
    0x11,
    0x12,
    0x13,
    0x14,
    0x20,
    0x25,
    0x28,
    0x29,
    0x2A,
    0x7F,
    0x80,
    0xFE,
    0xFF,
)
LENGTHS = (0, 1, 127, 128, 255, 2**14, 2**16, 2**20, 2**31 - 1, 2**31, 2**32, 2**48, 2**56, 2**62)


def varint(n: int) -> bytes:
    """A number as messages have it, seven bits a byte."""
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes([*out, n])


def _slice(data: bytearray, rng: Random) -> tuple[int, int]:
    start = rng.randrange(len(data))
    return start, min(len(data), start + 1 + int(rng.expovariate(0.2)))


def _flip(data: bytearray, rng: Random, _: Sequence[bytes]) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set(data: bytearray, rng: Random, _: Sequence[bytes]) -> None:
    data[rng.randrange(len(data))] = rng.choice(INTERESTING)


def _random(data: bytearray, rng: Random, _: Sequence[bytes]) -> None:
    a, b = _slice(data, rng)
    data[a:b] = rng.randbytes(b - a)


def _length(data: bytearray, rng: Random, _: Sequence[bytes]) -> None:
    """A count or a dimension of another size, in the place of one byte."""
    at = rng.randrange(len(data))
    data[at : at + 1] = varint(rng.choice(LENGTHS))


def _delete(data: bytearray, rng: Random, _: Sequence[bytes]) -> None:
    a, b = _slice(data, rng)
    del data[a:b]


def _repeat(data: bytearray, rng: Random, _: Sequence[bytes]) -> None:
    a, b = _slice(data, rng)
    data[a:a] = data[a:b] * rng.choice((1, 2, 40))


def _swap(data: bytearray, rng: Random, _: Sequence[bytes]) -> None:
    (a, b), (c, d) = sorted((_slice(data, rng), _slice(data, rng)))
    if b <= c:
        data[a:d] = data[c:d] + data[b:c] + data[a:b]


def _cut(data: bytearray, rng: Random, _: Sequence[bytes]) -> None:
    del data[rng.randrange(len(data)) :]


def _splice(data: bytearray, rng: Random, others: Sequence[bytes]) -> None:
    """A piece of another message, in the place of a piece or between two."""
    other = rng.choice(others)
    if other:
        a, b = _slice(bytearray(other), rng)
        at, end = _slice(data, rng)
        data[at : end if rng.random() < 0.5 else at] = other[a : b + rng.choice((0, 0, 40))]


_CHANGES: tuple[Callable[[bytearray, Random, Sequence[bytes]], None], ...] = (
    _flip, _set, _set, _random, _length, _length, _delete, _repeat, _swap, _cut, _splice, _splice,
)  # fmt: skip


def mutated(data: bytes, rng: Random, others: Sequence[bytes], keep: int = 0) -> bytes:
    """`data` after one to four changes. keep: bytes at the beginning that stay as they are."""
    head, body = data[:keep], bytearray(data[keep:])
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        if not body:
            break
        rng.choice(_CHANGES)(body, rng, others)
    return head + bytes(body)


WORDS = (
    "0", "1", "-1", "1.5", "-0.0", "nan", "inf", "-inf", "1e400", "9" * 400, "9" * 5000, "true",
    "false", '"none"', '""', '"FedAvg"', '"\\u0000"', "[]", "[1]", "[[1], [2]]", '["a", 1]', "{}",
    "{ type = 3 }", '{ type = "MLP" }', "{ poisson = 0.5 }", "{ type = [1] }",
    "1979-05-27T07:32:00Z", "07:32:00", "0x7fffffffffffffff", '"' + "x" * 300 + '"',
    "[" * 80 + "]" * 80, "[" * 3000 + "]" * 3000,
)  # fmt: skip


def mutated_text(text: str, rng: Random, others: Sequence[str]) -> str:
    """A TOML file after one to three changes: of its lines, of values, of keys, or of
    characters.
    """
    for _ in range(rng.choice((1, 1, 2, 3))):
        lines = text.split("\n")
        at = rng.randrange(len(lines))
        kind = rng.randrange(9)
        if kind <= 2:  # another value
            lines[at] = re.sub(r"=.*", lambda _: f"= {rng.choice(WORDS)}", lines[at], count=1)
        elif kind == 3:  # a value or a key of another line
            a, b = (
                lines[at].partition("="),
                rng.choice(rng.choice(others).split("\n")).partition("="),
            )
            lines[at] = "".join((*a[:2], b[2])) if rng.random() < 0.5 else "".join((b[0], *a[1:]))
        elif kind == 4:
            del lines[at]
        elif kind == 5:
            lines.insert(at, rng.choice(rng.choice(others).split("\n")))
        elif kind == 6:
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        elif kind == 7:  # a part of a value
            found = list(re.finditer(r"[-\w.\"]+", lines[at]))
            if found:
                one = rng.choice(found)
                lines[at] = lines[at][: one.start()] + rng.choice(WORDS) + lines[at][one.end() :]
        else:
            raw = mutated(
                "\n".join(lines).encode(errors="surrogateescape"), rng, [o.encode() for o in others]
            )
            lines = raw.decode(errors=rng.choice(("replace", "surrogateescape"))).split("\n")
        text = "\n".join(lines)
    return text
