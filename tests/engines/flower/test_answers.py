"""Answers of sites to a server that does not trust them: headers of any content are read, or
refused with a `ReplyError`.
"""

from __future__ import annotations

import contextlib
import json
import math

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given, settings
from hypothesis import strategies as st

import foedus as fd
from foedus.engines.flower import answers, messages, server

ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.sampled_from(
        [2**40, 2**41, 2**70, 1e308, 10**400, 1e400, -1e400, math.nan, 0.5, "0", "ids"]
    ),
    st.text(max_size=3),
)
JUNK = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=6,
)

PARTS = {"round": 3, "exchange": 0, "ids": [1, 4], "lost": [], "errors": {}, "lengths": [2, 1]}
SUMS = {"ids": [1, 4], "sums": {"rows": [4.0, 2.0], "loss": [1.5, -0.5], "hits": [3.0, 0.0]}}
SCORE = {"rows": 4, "hits": 3}
HELLO = {
    "clients": [0],
    "rows": [8],
    "name": "north",
    "checksum": 7,
    "test_rows": [2],
    "sums": {"count": [8], "sum": [0.5], "squares": [8.0]},
}


def said(header, body: bytes = b"") -> Message:
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    asked = Message(messages.content({}), dst_node_id=1, message_type="query")
    return Message(messages.content(header, body), reply_to=asked)


def parts(header):
    return answers.read_parts(said(header, b"abc"), [1, 4], {"round": 3, "exchange": 0})


def sums(header):
    return answers.read_sums(said(header), {1, 4}, 2)


def score(header):
    return answers.read_score(said(header), 2)


def test_what_can_be_used():
    assert parts(PARTS) == answers.Parts({1: b"ab", 4: b"c"}, [], {})
    some = {**PARTS, "ids": [4], "lost": [1], "lengths": [3]}
    assert parts(some) == answers.Parts({4: b"abc"}, [1], {})
    why = {
        **PARTS,
        "ids": [4],
        "lengths": [3],
        "errors": {"1": "full\n\x1b[2J" + "x" * 1000, "9": ""},
    }
    assert parts(why).errors == {1: "full  [2J" + "x" * 291 + " ..."}
    ids, table = sums(SUMS)
    assert ids == [1, 4] and table["loss"].tolist() == [1.5, -0.5]
    assert score(SCORE) == (4, 0.75)
    assert answers.read_score(said({"rows": 2, "squares": 3}), None) == (2, 1.5)
    assert answers.read_score(said({"rows": 0}), None)[0] == 0
    assert answers.seconds_of(said({"seconds": 2})) == 2.0 and answers.seconds_of("gone") == 0.0


@pytest.mark.parametrize(
    ("read", "header", "change", "words"),
    [
        (parts, PARTS, {"round": True}, "is for round True, not 3"),
        (parts, PARTS, {"exchange": False}, "is for exchange False, not 0"),
        (parts, PARTS, {"phase": "mask"}, "is for phase mask, not None"),
        (parts, PARTS, {"ids": [1, 1]}, "clients that it was not asked for"),
        (parts, PARTS, {"ids": [1, 2]}, "clients that it was not asked for"),
        (parts, PARTS, {"ids": [1.0, 4]}, "clients that it was not asked for"),
        (parts, PARTS, {"lost": [4]}, "clients that it was not asked for"),
        (parts, PARTS, {"ids": [1]}, "2 replies of 1 clients"),
        (parts, PARTS, {"errors": []}, "or no errors"),
        (parts, PARTS, {"error": "\x1b[31mfull"}, r"^ \[31mfull$"),
        (sums, SUMS, {"ids": [1, 1]}, "its ids are not those of its own clients"),
        (sums, SUMS, {"ids": [True, 4]}, "its ids are not those of its own clients"),
        (sums, SUMS, {"sums": {}}, "its sums must be rows, loss and hits"),
        (
            sums,
            SUMS,
            {"sums": {**SUMS["sums"], "x": [1, 1]}},
            "its sums must be rows, loss and hits",
        ),
        (sums, SUMS, {"sums": {**SUMS["sums"], "loss": [1]}}, "sums of loss must be finite"),
        (sums, SUMS, {"sums": {**SUMS["sums"], "loss": [1, math.nan]}}, "sums of loss must be"),
        (sums, SUMS, {"sums": {**SUMS["sums"], "rows": [-1, 2]}}, "cannot be: rows=-1"),
        (sums, SUMS, {"sums": {**SUMS["sums"], "rows": [0.5, 2]}}, "cannot be: rows=0.5"),
        (sums, SUMS, {"sums": {**SUMS["sums"], "rows": [2**41, 2]}}, "cannot be: rows=2199"),
        (sums, SUMS, {"sums": {**SUMS["sums"], "hits": [5, 0]}}, "hits=5 with 4"),
        (sums, SUMS, {"sums": {**SUMS["sums"], "hits": [-1, 0]}}, "hits=-1 with 4"),
        (score, SCORE, {"rows": "4"}, "cannot be read: rows=4"),
        (score, SCORE, {"rows": True}, "cannot be read: rows=True"),
        (score, SCORE, {"hits": 5}, "hits=5 with 4 rows"),
        (score, SCORE, {"hits": None}, "hits=None with 4 rows"),
        (score, SCORE, {"hits": 10**400}, "hits in the header has an integer"),
    ],
)
def test_what_cannot(read, header, change, words):
    with pytest.raises(fd.ReplyError, match=words):
        read({**header, **change})


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_headers_of_any_content(data):
    """Either they can be used, or they are refused with a readable error."""
    read, header = data.draw(
        st.sampled_from([(parts, PARTS), (sums, SUMS), (score, SCORE), (greeted, HELLO)])
    )
    header = json.loads(json.dumps(header))
    holder = header
    while True:
        key = data.draw(st.sampled_from(sorted(holder)))
        if not isinstance(holder[key], dict) or not holder[key] or data.draw(st.booleans()):
            break
        holder = holder[key]
    if data.draw(st.booleans()):
        holder[key] = data.draw(JUNK)
    elif isinstance(holder[key], list) and holder[key]:
        holder[key][0] = data.draw(JUNK)
    else:
        del holder[key]
    with contextlib.suppress(fd.FoedusError):
        read(header)
    answers.seconds_of(said(header))


def greeted(header):
    wrong = server._wrong(answers.header_of(said(header)), True)
    assert wrong is None or isinstance(wrong, str)


def test_seconds_that_cannot_be():
    for seconds in (-1, math.nan, math.inf, 10**400, "2", [2], None, True):
        assert answers.seconds_of(said({"seconds": seconds})) == 0.0
    asked = Message(messages.content({}), dst_node_id=1, message_type="query")
    nothing = Message(RecordDict({"x": ConfigRecord({"y": 1})}), reply_to=asked)
    assert answers.seconds_of(nothing) == 0.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "north\x1b[2J"}, "no name, or one that is too long or cannot be printed"),
        ({"name": "a\nb"}, "cannot be printed"),
        ({"test_rows": [-1]}, "no number of test rows"),
    ],
)
def test_greetings_that_cannot_be(change, words):
    assert server._wrong(HELLO, 1) is None
    assert words in server._wrong({**HELLO, **change}, 1)
