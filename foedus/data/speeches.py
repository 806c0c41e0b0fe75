"""Speeches by character from Project Gutenberg's Shakespeare (ebook 100), edition of January 1994.

It is the text that LEAF (Caldas et al., 2018, arXiv:1812.01097) divides among clients, one for each
speaking character of each play. Its layout:

    1603                                          year, title and author begin a work; its persons
    ALLS WELL THAT ENDS WELL                      follow, up to the first heading: ACT, SCENE,
    by William Shakespeare                        PROLOGUE or INDUCTION
    ACT I. SCENE 1.
    Enter BERTRAM, the COUNTESS and LAFEU         at the margin: headings, places, stage directions
      LAFEU. How call'd you the man?              two blanks, a name and a full stop: a speech
      COUNTESS. He was famous, sir, in his        four or five blanks: the speech goes on; behind a
        profession.  [Aside]  Alas!        Exit   wide gap or in brackets: stage directions
                      Enter PAROLLES              further to the right: stage directions

In The Comedy of Errors everything stands two columns further left. Most plays write names in
capitals, some shorten them (`Ham.`). Songs stand where stage directions do and are lost with them.
Other editions are laid out otherwise and are not read. The notice that comes between acts allows
personal and non-commercial use of this edition.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from foedus.errors import DataError

_LARGEST = 32 << 20  # bytes: the text has 5.5 million
_RIGHT = 7  # blanks before a stage direction, at least; within a speech there are at most six
_NOTICE = re.compile(r"<<[^<>]*>>")
_BRACKETS = re.compile(r"\[[^][]{0,500}\] *")
_HEADING = re.compile(r"(?:THE )?(?:ACT|SCENE|PROLOGUE|INDUCTION)\b", re.IGNORECASE)
_DIRECTION = re.compile(r" *(?:Enter|Re-enter|Exit|Exeunt|Flourish|Alarum|Sennet)\b")
_BEHIND_GAP = re.compile(r" {3,}\S.*")
_WORD = r"[A-Z][\w'-]*"
# FIRST LORD, BISHOP of ELY, GRUMIO, BIONDELLO, Lady P, 1. Mus, M. Wife
_SPEECH = re.compile(
    rf"( {{0,3}})((?:(?:\d|[A-Z])\. )?{_WORD}(?:,? (?:{_WORD}|of|and|the|to))*)\.(.*)"
)


def read_plays(path: Path, *, plays: int = 30, speakers: int = 500) -> list[dict]:
    """The speaking characters in the zip archive of the edition; see `parse_plays`."""
    try:
        with zipfile.ZipFile(path) as archive:
            texts = [m for m in archive.infolist() if m.filename.lower().endswith(".txt")]
            if len(texts) != 1:
                raise DataError(f"{path.name} holds {len(texts)} text files; expected one")
            with archive.open(texts[0]) as file:
                content = file.read(_LARGEST + 1)
    # RuntimeError: encrypted or unknown compression
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise DataError(f"{path.name} is not a readable zip archive ({error})") from None
    if len(content) > _LARGEST:
        size = f"{texts[0].filename} has more than {_LARGEST} bytes"
        raise DataError(f"{path.name}: {size}, so it is not the text")
    return parse_plays(content.decode("latin-1"), path.name, plays=plays, speakers=speakers)


def parse_plays(text: str, where: str, *, plays: int = 30, speakers: int = 500) -> list[dict]:
    """Characters in order of appearance: dictionaries with `id`, `play`, `speaker`, `speeches`.

    A text with fewer `plays` or `speakers` than these is refused: it is not this edition, which has
    well above the defaults.
    """
    users: dict[str, dict] = {}
    for title, lines in _works(_BRACKETS.sub("", _NOTICE.sub("", text))):
        for name, speech in _speeches(lines):
            # The same name may be written in several ways: SIR TOBY and SIR Toby.
            key = re.sub(r"\W+", "_", f"{title} {name}").upper()
            user = users.setdefault(
                key, {"id": key, "play": title, "speaker": name.upper(), "speeches": []}
            )
            user["speeches"].append(speech)
    found = len({user["play"] for user in users.values()})
    if found < plays or len(users) < speakers:
        raise DataError(
            f"{where} does not look like the edition of January 1994 of Project Gutenberg's ebook "
            f"100: {found} plays and "
            f"{len(users)} speaking characters found, expected at least {plays} and {speakers}"
        )
    return list(users.values())


def _works(text: str) -> Iterator[tuple[str, list[str]]]:
    """Title and lines of each work; text before the first one is left out."""
    title, above = "", ""
    lines: list[str] = []
    for line in map(str.rstrip, text.splitlines()):
        if line.strip().lower() == "by william shakespeare":
            if title:
                yield title, lines
            title, lines = above, []
        elif line:
            above = line.strip()
        lines.append(line)
    if title:
        yield title, lines


def _speeches(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Names and speeches of one work, in order; none for poems, which have no headings."""
    written = [_in_capitals(match[2]) for match in map(_SPEECH.fullmatch, lines) if match]
    capitals = 2 * sum(written) > len(written)
    name = ""
    spoken: list[str] = []
    begun = unfinished = False
    for above, line in pairwise(["", *lines]):
        indent = len(line) - len(line.lstrip())
        begun = begun or _HEADING.match(line) is not None
        match = _SPEECH.fullmatch(line)
        # a stage direction may stand below an empty line; "Enter his chamber" in a speech does not
        if (_DIRECTION.match(line) and not above) or (unfinished and not match):
            unfinished = line.endswith((",", ";"))  # continues in the next line
        elif not begun or _HEADING.match(line) or indent >= _RIGHT:
            continue
        # With names in capitals, "Farewell." begins no speech, whatever its place; without, a place
        # name at the margin looks like a speaker ("London. The palace"), so the place decides.
        elif match and (_in_capitals(match[2]) if capitals else indent == 2):
            yield from _joined(name, spoken)
            name, spoken = match[2], [match[3]]
            unfinished = False
        elif indent >= 2:
            spoken.append(line)
    yield from _joined(name, spoken)


def _in_capitals(name: str) -> bool:
    """Whether the first word of a name is in capitals (BISHOP of ELY); a lone letter is not."""
    first = name.split()[0].rstrip(",")
    return first.isupper() and (len(first) > 1 or (len(name) > 1 and name.isupper()))


def _joined(name: str, spoken: list[str]) -> Iterator[tuple[str, str]]:
    """The speech without stage directions at the ends of lines; nothing if no words are left."""
    lines = (" ".join(_BEHIND_GAP.sub("", line.strip()).split()) for line in spoken)
    speech = "\n".join(line for line in lines if line)
    if name and speech:
        yield name, speech
