"""Pages of documentation as tests see them: blocks of code and what they print, headings, links,
tables, commands.

A ```python block is run, together with the others of its page, in order and in one namespace. If a
plain ``` block follows it directly, that is what it prints. A comment on the line before a block
says what else is to be known:

    <!-- not run: WHY -->              it needs what a test cannot have; every one of these is
                                       listed in tests/test_docs.py
    <!-- slow: WHY -->                 it is run by `make test-slow` (and so is a ```sh block with
                                       this comment)
    <!-- needs $FOEDUS_DATA: WHY -->   it is run where that variable points to a folder
    <!-- varies: REGEX -->             before an output: what the expression finds there is not
                                       compared
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]

_NUMBER = r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_FENCE = re.compile(r"^```([\w-]*)$")
_COMMENT = re.compile(r"^<!-- (.*?) -->$")
_MARKERS = ("not run: ", "slow: ", "needs $FOEDUS_DATA: ", "varies: ")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line of its fence (from 1), the comment before
    it, and its output if it has one.
    """

    language: str
    text: str
    line: int
    marker: str = ""
    output: Block | None = None

    def is_run(self, slow: bool = False) -> bool:
        if self.marker.startswith("slow: "):
            return slow
        if self.marker.startswith("needs $FOEDUS_DATA: "):
            return bool(os.environ.get("FOEDUS_DATA"))
        return self.language == "python" and not self.marker.startswith("not run: ")


@dataclass(frozen=True)
class Page:
    """A page, taken apart."""

    path: Path
    blocks: list[Block]
    prose: str
    """The page without its fenced blocks."""

    text: str
    """The whole page; of a notebook without outputs, with fences around its code."""

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    def headings(self, level: int | None = None) -> list[str]:
        found = re.findall(r"^(#{1,6}) (.*)$", self.prose, re.M)
        return [text.strip() for marks, text in found if level in (None, len(marks))]

    def anchors(self) -> set[str]:
        """The names under which GitHub lets one link to a heading."""
        seen: dict[str, int] = {}
        names = set()
        for heading in self.headings():
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            names.add(f"{slug}-{seen[slug]}" if slug in seen else slug)
            seen[slug] = seen.get(slug, 0) + 1
        return names

    def links(self) -> list[str]:
        """The targets of links and images."""
        return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "`code`", self.prose))

    def inline(self) -> list[str]:
        """Inline code."""
        return re.findall(r"`([^`]+)`", self.prose.replace("\\|", "|"))

    def commands(self) -> list[list[str]]:
        """Command lines that begin with foedus, make or python -m: inline code, and lines of blocks
        that are no Python.
        """
        lines = [re.sub(r"\s+", " ", text) for text in self.inline()]
        for block in self.blocks:
            if block.language in ("", "sh", "toml"):
                lines += re.sub(r"\\\n\s*", " ", block.text).splitlines()
        found = []
        for line in lines:
            line = re.sub(r"^\s*#\s*", "", line).split("  #")[0].split(" # ")[0].strip()
            for part in re.split(r"\s*&&\s*", line):
                if re.match(r"(foedus|make|python -m) [^=]", part):
                    found.append(part.split())
        return found

    def tables(self) -> list[tuple[str, list[list[str]]]]:
        """Each table as rows of cells, the header first, with the paragraph before it."""
        found = []
        for match in re.finditer(r"(?:^\|.*\|\n)+", self.prose, re.M):
            before = self.prose[: match.start()].rstrip().rsplit("\n\n", 1)[-1]
            rows = [re.split(r"(?<!\\)\|", row)[1:-1] for row in match.group().splitlines()]
            found.append(
                (
                    before,
                    [
                        [cell.strip().replace("\\|", "|") for cell in row]
                        for row in rows
                        if "---" not in row[0]
                    ],
                )
            )
        return found


def read_page(path: Path) -> Page:
    """Take a page apart; a fence that is never closed, or a comment that says nothing known, is an
    error.
    """
    text = path.read_text()
    text = notebook_text(text) if path.suffix == ".ipynb" else text
    lines = text.splitlines()
    blocks: list[Block] = []
    prose: list[str] = []
    # `last`: the line after the last block, as long as nothing but blank lines and a comment has
    # followed
    at, last = 0, -1
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if not fence:
            if lines[at].strip() and not _COMMENT.match(lines[at]):
                last = -1
            prose.append(lines[at])
            at += 1
            continue
        end = next((i for i in range(at + 1, len(lines)) if lines[i] == "```"), None)
        assert end is not None, f"{path.name}, line {at + 1}: the block is not closed"
        comment = _COMMENT.match(lines[at - 1]) if at else None
        marker = comment.group(1) if comment else ""
        if marker:
            assert marker.startswith(_MARKERS), (
                f"{path.name}, line {at}: the comment {marker!r} is none of {_MARKERS}"
            )
        block = Block(fence.group(1), "\n".join([*lines[at + 1 : end], ""]), at + 1, marker)
        if block.language == "" and last >= 0 and blocks[-1].language == "python":
            before = blocks.pop()
            blocks.append(Block(before.language, before.text, before.line, before.marker, block))
            last = -1
        else:
            blocks.append(block)
            last = end + 1
        prose += [""] * (end + 1 - at)
        at = end + 1
    return Page(path, blocks, "\n".join([*prose, ""]), text)


def notebook_text(file: str) -> str:
    """The cells of a notebook as a page, without outputs."""
    parts = []
    for cell in json.loads(file)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    return "\n\n".join([*parts, ""])


def compare_output(printed: str, shown: str, where: str, varies: str | None = None) -> None:
    """Words and integers must be the same; other numbers may differ by a hundredth.

    Another processor may round otherwise, and a row or two of a test set change sides. varies: a
    regular expression for what is not compared at all, such as seconds.
    """
    texts = [printed, shown]
    if varies:
        texts = [re.sub(varies, "~", text, flags=re.M) for text in texts]
        assert "~" in texts[1], f"{where}: {varies!r} is not found in what the page shows"
    words = [re.sub(_NUMBER, "#", text).split() for text in texts]
    assert words[0] == words[1], f"{where} prints\n{printed}\nwhere the page shows\n{shown}"
    for got, want in zip(*(re.findall(_NUMBER, text) for text in texts), strict=True):
        message = f"{where}: {got} where the page shows {want}; printed was\n{printed}"
        if "." in want or "e" in want:
            np.testing.assert_allclose(float(got), float(want), rtol=0.01, err_msg=message)
        else:
            assert got == want, message


def run_page(
    page: Page, folder: Path, monkeypatch: pytest.MonkeyPatch, slow: bool = False
) -> dict[str, Any]:
    """Run the blocks of a page in a folder, in one namespace and without a network, and compare
    what they print; the namespace.
    """
    monkeypatch.chdir(folder)
    module = types.ModuleType("page")
    # where a dataclass looks for the names in its annotations
    monkeypatch.setitem(sys.modules, "page", module)
    scope = vars(module)
    with no_network():
        for block in page.blocks:
            if not block.is_run(slow):
                continue
            where = f"{page.name}, line {block.line}"
            if block.language == "sh":
                run_commands(block, folder, where)
                continue
            out = io.StringIO()
            # As many empty lines before it as the page has: a traceback then names the line of the
            # page.
            code = compile("\n" * block.line + block.text, page.name, "exec", dont_inherit=True)
            with contextlib.redirect_stdout(out):
                exec(code, scope)
            printed = out.getvalue()
            if block.output is None:
                assert not printed, f"{where} prints what the page does not show:\n{printed}"
            else:
                marker = block.output.marker
                varies = marker.removeprefix("varies: ") if marker.startswith("varies: ") else None
                compare_output(printed, block.output.text, where, varies)
    return scope


def run_commands(block: Block, folder: Path, where: str) -> None:
    """Run a block of shell commands with the programs of this environment, and this copy of
    foedus.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{where}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


@contextlib.contextmanager
def no_network() -> Iterator[None]:
    """Connections beyond this machine are refused."""
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and str(address[0]) not in ("127.0.0.1", "::1", "localhost"):
            raise ConnectionRefusedError(
                f"a page connects to {address[0]}: its blocks must run without a network"
            )
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", local_only)
        yield
