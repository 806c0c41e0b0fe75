"""Untrusted text, numbers and tables in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_ROWS, _LONGEST = 100, 200
"""Rows of a table, and characters of a text, that are shown."""


def plain(text: object) -> str:
    """Untrusted text in a line of Markdown, with all markup escaped."""
    shown = str(text)
    shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]} ..."
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)
    shown = re.sub(r"([\\`*_\[\]<>|#~&@$!])", r"\\\1", shown)
    return re.sub(r"(?<=\w)([:.])(?=//|\w)", r"\\\1", shown) if _links(shown) else shown


def _links(text: str) -> bool:
    return re.search(r"://|www\.", text, re.IGNORECASE) is not None


def number(value: object) -> str:
    """A number of a history, or what stands in its place."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else plain(value)


def listed(texts: Iterable[object], most: int = 20) -> str:
    """Some untrusted texts in one line."""
    texts = list(texts)
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return ", ".join(plain(text) for text in texts[:most]) + more


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table; only the first of a long one."""
    lines = [head, ["---"] * len(head), *rows[:_ROWS]]
    text = [f"| {' | '.join(line)} |" for line in lines]
    return text + ([f"\n... and {len(rows) - _ROWS:,} more."] if len(rows) > _ROWS else [])


def block(language: str, lines: Sequence[str]) -> list[str]:
    return [f"```{language}", *lines, "```"]
