from __future__ import annotations

import math
import re
import struct
import tracemalloc
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap

from foedus import wire
from foedus.base import random, tree
from foedus.base.tree import State
from foedus.errors import ConfigError, ReplyError, WireError
from foedus.wire import LowRank, Quantised, Signs, Sparse, Trees, arrays, layout
from foedus.wire.decoding import decode
from foedus.wire.encoding import encode, nbytes


@tree.node(static=("name",))
@dataclass(frozen=True, eq=False)
class Labelled:
    inner: object
    name: str


# --- trees to draw from ---------------------------------------------------------------------------

DTYPES = list(layout.DTYPES)
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
leads = st.lists(st.integers(0, 3), max_size=2).map(tuple)


@st.composite
def tensors(draw, dtypes=tuple(DTYPES), shape=shapes):
    """Any bits at all: NaN payloads, infinities, negative zeros."""
    dtype, size = (
        draw(st.sampled_from(dtypes)),
        draw(shape) if not isinstance(shape, tuple) else shape,
    )
    count = math.prod(size)
    data = np.random.default_rng(draw(st.integers(0, 2**32))).integers(
        0, 256, count * dtype.itemsize, np.uint8
    )
    if dtype == torch.bool:
        data &= 1
    return (
        torch.from_numpy(data).clone().view(dtype).view(size)
        if count
        else torch.empty(size, dtype=dtype)
    )


def whole(draw, shape, low, high, dtypes=(torch.int32, torch.int64)):
    seed = draw(st.integers(0, 2**32))
    return torch.from_numpy(np.random.default_rng(seed).integers(low, high, shape)).to(
        draw(st.sampled_from(dtypes))
    )


@st.composite
def sparse(draw, lead=leads):
    lead, shape, k = (
        draw(lead),
        draw(st.lists(st.integers(1, 300), max_size=3).map(tuple)),
        draw(st.integers(0, 5)),
    )
    indices = whole(draw, (*lead, k), 0, math.prod(shape))
    return Sparse(indices, draw(tensors(tuple(DTYPES[1:]), (*lead, k))), shape)


@st.composite
def low_rank(draw, lead=leads):
    lead, m, n, r = draw(lead), *(draw(st.integers(0, 4)) for _ in range(3))
    dtype = (draw(st.sampled_from(FLOATS)),)
    return LowRank(draw(tensors(dtype, (*lead, m, r))), draw(tensors(dtype, (*lead, n, r))))


@st.composite
def signs(draw, lead=leads):
    lead, shape = draw(lead), draw(shapes)
    return Signs.pack(
        draw(tensors((torch.int8,), (*lead, *shape))), draw(tensors(tuple(FLOATS), lead))
    )


@st.composite
def quantised(draw, lead=leads):
    lead, shape = draw(lead), draw(shapes)
    codes = draw(tensors((torch.int8, torch.float16, torch.bfloat16), (*lead, *shape)))
    return Quantised(
        codes,
        draw(tensors(tuple(FLOATS), lead)),
        draw(st.sampled_from(["float32", "float64", "float16"])),
    )


@st.composite
def forests(draw, lead=leads):
    lead, nodes, outputs, trees = (
        draw(lead),
        draw(st.integers(1, 6)),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 3)),
    )
    features = draw(st.sampled_from([0, 1, 254, 255, 256, 70_000]))
    leaf = whole(draw, (nodes,), 0, 2 if features else 1) == 0
    leaf[-1] = True  # the last node has no room for children
    feature = torch.where(leaf, -1, whole(draw, (*lead, nodes), 0, max(features, 1)))
    children = [
        whole(draw, (*lead, nodes), torch.arange(nodes).clamp(max=nodes - 2) + 1, nodes)
        for _ in range(2)
    ]
    children = [
        torch.where(feature >= 0, c, whole(draw, (*lead, nodes), -1, nodes)) for c in children
    ]
    threshold, value = (
        draw(tensors((torch.float32,), (*lead, *more)))
        for more in ((nodes,), (int(leaf.sum()), outputs))
    )
    return Trees(
        feature, threshold, *children, value, whole(draw, (*lead, trees), 0, nodes), features
    )


structured = st.one_of(sparse(), low_rank(), signs(), quantised(), forests())
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=5)
)


def nested(leaf):
    names = st.text(max_size=4)
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(names, inner, max_size=3),
            st.dictionaries(names, inner, max_size=3).map(State),
            st.builds(Labelled, inner, names),
        ),
        max_leaves=8,
    )


trees = nested(st.one_of(scalars, tensors(), structured))


def assert_same(a, b):
    """The same types, structure, shapes, dtypes and bits."""
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        raw = [
            t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""
            for t in (a, b)
        ]
        assert raw[0] == raw[1]
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for name in a:
            assert_same(a[name], b[name])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif hasattr(a, "tree_children"):
        for name in (*a.tree_children, *a.tree_static):
            assert_same(getattr(a, name), getattr(b, name))
    elif isinstance(a, float):
        assert struct.pack("<d", a) == struct.pack("<d", b)
    else:
        assert a == b


# --- round trips and lengths ----------------------------------------------------------------------


@settings(deadline=None, max_examples=400)
@given(trees)
def test_round_trip_and_length(t):
    assume(not layout.is_empty(t))
    data = encode(t)
    assert nbytes(t) == len(data)
    assert_same(decode(data), t)
    assert encode(decode(memoryview(bytearray(data)))) == data


@pytest.mark.parametrize("t", [{}, [], (), None, State()])
def test_empty_tree_is_the_empty_message(t):
    assert encode(t) == b""
    assert nbytes(t) == 0
    assert nbytes(t, batched=True) == 0
    assert decode(b"") == {}
    assert decode(encode({"a": {}, "b": None})) == {"a": {}, "b": None}


def test_empty_tensors_that_numpy_has_made():
    """Taking nothing by an index gives a stride of 0, which has no view as bytes."""
    nothing = torch.from_numpy(np.arange(3)[np.array([], np.int64)])
    assert decode(encode([nothing]))[0].shape == (0,)
    assert len(encode([nothing])) == nbytes([nothing])


def stacked(clients):
    lead = st.just((clients,))
    leaf = st.one_of(
        tensors(shape=shapes.map(lambda s: (clients, *s))),
        *(f(lead=lead) for f in LEADING),
        scalars,
    )
    return nested(leaf)


LEADING = (sparse, low_rank, signs, quantised, forests)


@settings(deadline=None)
@given(stacked(3))
def test_batched_length_is_that_of_every_slice(t):
    for c in range(3):
        one = tree.map(lambda x, c=c: x[c] if isinstance(x, Tensor) else x, t)
        assert nbytes(t, batched=True) == nbytes(one) == len(encode(one))


def test_batched_length_needs_a_leading_dimension():
    one = [
        torch.tensor(1.0),
        Sparse(torch.tensor([0]), torch.ones(1), (3,)),
        LowRank(torch.ones(2, 1), torch.ones(3, 1)),
    ]
    for t in (
        *one,
        Signs.pack(torch.ones(3), 1.0),
        arrays.Quantised(torch.zeros(2, dtype=torch.int8), torch.ones(()), "float32"),
    ):
        with pytest.raises(
            WireError, match=r"cannot encode x\.0: expected a leading dimension of clients"
        ):
            nbytes({"x": [t]}, batched=True)


def test_length_works_under_vmap():
    sizes = []
    vmap(lambda x: sizes.append(nbytes({"w": x})) or x)(torch.zeros(4, 10))
    assert sizes == [nbytes({"w": torch.zeros(10)})]


def test_tensors_of_every_memory_layout():
    base = torch.arange(24.0).reshape(4, 6)
    for t in (
        base.T,
        base[:, ::2],
        base[1:, 3:],
        torch.ones(1).expand(5, 3),
        torch.nn.Parameter(base),
        base.requires_grad_(),
    ):
        assert torch.equal(decode(encode(t)), t.detach())


def test_decoded_tensors_own_their_memory():
    data = bytearray(encode(torch.ones(3)))
    t = decode(data)
    data[:] = bytes(len(data))
    t += 1
    assert t.tolist() == [2, 2, 2]


def test_small_messages_have_small_overhead():
    assert nbytes(torch.zeros(100)) == 3 + 3 + 400 + 4  # header, tag and shape, numbers, checksum
    assert nbytes({"w": torch.zeros(10)}) == 3 + 2 + 2 + 3 + 40 + 4


@pytest.mark.parametrize(
    ("n", "width"),
    [(1, 1), (256, 1), (257, 2), (65_536, 2), (65_537, 3), (2**24 + 1, 4), (2**32 + 1, 5)],
)
def test_indices_are_as_narrow_as_the_shape_allows(n, width):
    shape = (n,) if n < 2**31 else (n // 641, 641)
    some = Sparse(torch.tensor([n - 1, 0]), torch.ones(2), shape)
    none = Sparse(torch.zeros(0, dtype=torch.int64), torch.ones(0), shape)
    assert nbytes(some) - nbytes(none) == 2 * (width + 4)
    assert decode(encode(some)).indices.tolist() == [n - 1, 0]


def test_documented_example():
    text = (Path(__file__).parents[2] / "docs" / "reference" / "wire.md").read_text()
    code, dump = (
        re.search(r"```python\n(.*?)```", text, re.S)[1],
        re.search(r"```hex\n(.*?)```", text, re.S)[1],
    )
    scope: dict = {}
    exec(code, scope)
    data = bytes.fromhex("".join(line.split("#")[0] for line in dump.splitlines()))
    assert encode(scope["message"]) == data
    assert_same(decode(data), scope["message"])


# --- what cannot be encoded -----------------------------------------------------------------------


def forest(**changes):
    fields = {
        "feature": torch.tensor([1, -1, -1]),
        "threshold": torch.zeros(3),
        "left": torch.tensor([1, -1, -1]),
        "right": torch.tensor([2, -1, -1]),
        "value": torch.ones(2, 2),
        "roots": torch.tensor([0]),
        "features": 4,
    }
    return Trees(**{**fields, **changes})


@pytest.mark.parametrize(
    ("t", "message"),
    [
        ({"a": [1, {3: 4}]}, r"a\.1: expected keys that are strings, got 3"),
        ({"a": {1, 2}}, "a: expected tensors, scalars, text and trees of them, got a set"),
        (2**63, "the tree: expected an integer of 64 bits"),
        ("\ud800", "valid Unicode"),
        (torch.ones(2, dtype=torch.complex64), "complex64"),
        (torch.eye(2).to_sparse(), "expected a strided tensor"),
        (torch.empty(0, 2**32), "expected a shape within"),
        (torch.empty([1] * 33), "at most 32 dimensions"),
        (Sparse(torch.tensor([3]), torch.ones(1), (3,)), r"indices in 0 \.\. 2, got 3"),
        (Sparse(torch.tensor([-1]), torch.ones(1), (3,)), r"indices in 0 \.\. 2, got -1"),
        (Sparse(torch.tensor([1.0]), torch.ones(1), (3,)), "indices must be int32 or int64"),
        (Sparse(torch.tensor([1]), torch.ones(2), (3,)), "one shape"),
        (LowRank(torch.ones(2, 1), torch.ones(2, 2)), r"\[\.\.\., m, r\]"),
        (LowRank(torch.ones(2, 1), torch.ones(2, 1).double()), "one floating dtype"),
        (
            Signs(torch.zeros(2, dtype=torch.uint8), torch.tensor(1.0), (3,)),
            r"3 signs take bits of shape \[1\]",
        ),
        (Quantised(torch.zeros(2), torch.tensor(1.0), "float32"), "codes must be int8"),
        (Quantised(torch.zeros(2, dtype=torch.int8), torch.tensor(1.0), "int8"), "floating dtype"),
        (
            Quantised(torch.zeros(2, dtype=torch.int8), torch.ones(3), "float32"),
            "leading dimensions",
        ),
        (forest(left=torch.tensor([0, -1, -1])), "higher index"),
        (forest(feature=torch.tensor([4, -1, -1])), r"feature in -1 \.\. 3, got -1 \.\. 4"),
        (forest(right=torch.tensor([3, -1, -1])), r"right in -1 \.\. 2"),
        (forest(roots=torch.tensor([3])), r"roots in 0 \.\. 2"),
        (forest(value=torch.ones(2)), "value must be"),
        (forest(value=torch.ones(3, 2)), "3 rows of values must have as many leaves"),
        (forest(value=torch.ones(1, 2)), "1 rows of values must have as many leaves"),
        (forest(threshold=torch.zeros(3).double()), "float32"),
    ],
)
def test_encode_says_what_it_cannot_send(t, message):
    with pytest.raises(WireError, match=message):
        encode(t)


def test_nesting_has_a_limit():
    deep = torch.ones(1)
    for _ in range(64):
        deep = [deep]
    assert_same(decode(encode(deep)), deep)
    with pytest.raises(WireError, match="nesting of at most 64"):
        encode([deep])
    with pytest.raises(WireError, match="nesting of at most 64"):
        decode(seal(b"\x06\x01" * 100_000 + b"\x00"))


# --- hostile bytes --------------------------------------------------------------------------------


def seal(body: bytes) -> bytes:
    """A message with a right header and checksum around any body."""
    data = b"fd\x01" + body
    return data + struct.pack("<I", zlib.crc32(data))


def weight(t) -> int:
    return sum(x.numel() * x.itemsize if isinstance(x, Tensor) else 64 for x in tree.leaves(t))


def survives(data: bytes) -> None:
    """Either a `WireError` and nothing else, or a tree that the bytes justify."""
    try:
        t = decode(data)
    except WireError:
        return
    assert weight(t) <= 64 * len(data)
    assert nbytes(t) == len(data)


SAMPLE = State(
    w=torch.arange(6.0).reshape(2, 3),
    b=[torch.tensor([True, False]), torch.tensor(3, dtype=torch.int16), 7, -0.5, None, True, "né"],
    sparse=Sparse(torch.tensor([[1, 70_000]]), torch.ones(1, 2), (300, 300)),
    low=LowRank(torch.ones(2, 1), torch.ones(3, 1)),
    signs=Signs.pack(torch.tensor([1.0, -1, 1]), 0.5),
    q=Quantised(torch.tensor([1, -2], dtype=torch.int8), torch.tensor(0.1), "float32"),
    trees=forest(),
    node=Labelled((torch.zeros(0, 3),), "x"),
)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=60))
def test_random_bytes(data):
    assume(data)
    with pytest.raises(WireError):
        decode(data)
    survives(seal(data))


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.sampled_from([*range(11), *range(0x10, 0x15), *range(0x20, 0x2A), 0x80, 0xFF]),
        max_size=40,
    ).map(bytes)
)
def test_random_tags(data):
    survives(seal(data))


def test_truncation_at_every_offset():
    data = encode(SAMPLE)
    for n in range(1, len(data)):
        with pytest.raises(WireError):
            decode(data[:n])
        with pytest.raises(WireError, match=r"at byte \d+|truncated"):
            decode(seal(data[3 : max(3, n - 4)]))


def test_every_single_byte_mutation():
    body = encode(SAMPLE)[3:-4]
    for at in range(len(body)):
        for flip in (1, 2, 4, 0x10, 0x80, 0xFF):
            mutant = bytearray(body)
            mutant[at] ^= flip
            survives(seal(bytes(mutant)))


def test_damage_is_noticed_by_the_checksum():
    data = encode(SAMPLE)
    for at in range(3, len(data)):
        with pytest.raises(WireError, match="checksum"):
            decode(data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :])


# no batch; 4 features, 3 nodes, 2 leaves, 0 outputs, 1 tree
TREES_HEAD = b"\x14\x00\x04\x03\x02\x00\x01"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"fd", "truncated: expected at least 8 bytes, got 2"),
        (b"PK\x01\x00" + bytes(4), "expected b'fd' at byte 0"),
        (b"fd\x02\x00" + bytes(4), "expected version 1 of the wire form at byte 2, got 2"),
        (b"fd\x01\x00" + bytes(4), "checksum at byte 4"),
        (seal(b"\x08\x00"), "an empty tree is a message of no bytes"),
        (seal(b"\x00\x00"), "expected the end of the message at byte 4, got 1 more"),
        (seal(b"\x7f"), "tag of a value, got 0x7f, at byte 3"),
        (seal(b"\x2a\x00"), "tag of a value, got 0x2a"),
        (seal(b"\x08\x02\x01a\x00\x01a\x00"), "every key once, got 'a' again, at byte 8"),
        (seal(b"\x08\x01\x01\xff\x00"), "valid UTF-8 in a key at byte 5"),
        (seal(b"\x05\x02\xc3("), "valid UTF-8 in text at byte 4"),
        (
            seal(b"\x06\xff\xff\xff\xff\x0f\x00"),
            "number of items that fits into the message, got 4294967295, at byte 4",
        ),
        (seal(b"\x06\x81\x00\x00"), "shortest form of the number of items at byte 4"),
        (seal(b"\x06" + b"\xff" * 9 + b"\x01"), "at most 63 bits"),
        (seal(b"\x03\x00"), "8 bytes of an integer, of which only 1 are there, at byte 4"),
        (seal(b"\x29\x01\xff\xff\xff\xff\x07"), "17179869176 bytes of torch.float64"),
        (seal(b"\x29\x03" + b"\xff\xff\xff\xff\x07" * 3), "a shape within"),
        (seal(b"\x29\x02\x00\xff\xff\xff\xff\x0f"), "a shape within"),
        (seal(b"\x29\x21" + b"\x01" * 33), "at most 32 dimensions, got 33"),
        (seal(b"\x20\x01\x02\x01\x02"), "booleans of 0 or 1, got 2, at byte 6"),
        (
            seal(b"\x10\x01\x03\x01\x01\x05\x03\x08" + bytes(4)),
            r"indices in 0 \.\. 2, got 3, at byte 9",
        ),
        (
            seal(b"\x10\x01\x03\x01\x01\x08\x00\x08" + bytes(4)),
            "signed integer dtype for indices at byte 8",
        ),
        (seal(b"\x10\x01\x03\x01\x01\x03\x00\x08" + bytes(4)), "indices must be int32 or int64"),
        (seal(b"\x10\x01\x03\x01\x01\x05\x00\x63"), r"code of a dtype \(0 \.\. 9\), got 99"),
        (
            seal(b"\x11\x28\x02\x01\x01" + bytes(4) + b"\x28\x02\x01\x02" + bytes(8)),
            r"m, r\] and \[\.\.\., n, r\]",
        ),
        (
            seal(b"\x12\x01\x09\x28\x00" + bytes(4) + b"\x00"),
            r"2 bytes of torch.uint8 \[2\], of which only 1",
        ),
        (seal(b"\x13\x08\x28\x00" + bytes(4) + b"\x28\x00" + bytes(4)), "codes must be int8"),
        (seal(TREES_HEAD + b"\x05\x05\x00\x00"), r"features in -1 \.\. 3, got 4"),
        (seal(TREES_HEAD + b"\x05\x01\x00\x00\x05\x04\x00\x00"), r"children in -1 \.\. 2, got 3"),
        (
            seal(
                TREES_HEAD + b"\x05\x01\x00\x00\x05\x01\x00\x00\x05\x02\x00\x00\x05\x00" + bytes(12)
            ),
            "higher index",
        ),
        (
            seal(
                TREES_HEAD + b"\x05\x01\x00\x00\x05\x02\x00\x00\x05\x03\x00\x00\x05\x03" + bytes(12)
            ),
            r"roots in 0 \.\. 2",
        ),
        (
            seal(
                TREES_HEAD + b"\x05\x00\x00\x00\x05\x00\x00\x00\x05\x00\x00\x00\x05\x00" + bytes(12)
            ),
            "as many leaves",
        ),
        (seal(b"\x14\x00\x04\x03\xff\xff\xff\xff\x0f\x00\x01"), "a shape within"),
        (
            seal(b"\x14\x00\x04\x01\x7f\x7f\x01\x05\x00\x05\x00\x05\x00\x05\x00" + bytes(4)),
            "64516 bytes of torch.float32",
        ),
        (seal(b"\x0a\x06Sparse"), "registered node, got 'Sparse', at byte 4"),
        (seal(b"\x0a\x03int"), "registered node, got 'int'"),
        (seal(b"\x28\x21" + b"\x01" * 33 + bytes(4)), "at most 32 dimensions, got 33, at byte 4"),
    ],
)
def test_malformed_messages_say_what_was_expected_and_where(data, message):
    with pytest.raises(WireError, match=message):
        decode(data)


def test_no_memory_for_trees_without_nodes():
    """2^31 forests of 0 nodes take 30 bytes; counting their leaves would take 16 GiB."""
    head = b"\x14\x01\x80\x80\x80\x80\x08"  # the leading dimension
    none = b"\x05\x05\x05\x05"  # feature, left, right and roots: int64, and no numbers
    forests = decode(seal(head + b"\x04\x00\x00\x01\x00" + none))
    assert forests.feature.shape == (1 << 31, 0) and len(encode(forests)) < 30
    with pytest.raises(WireError, match="1 rows of values must have as many leaves"):
        decode(seal(b"\x14\x00\x04\x00\x01\x01\x00" + none + bytes(4)))


def test_the_number_of_values_in_a_message_is_limited(monkeypatch):
    """Each is an object in memory, however few bytes it has."""
    monkeypatch.setattr(layout, "MAX_VALUES", 5)
    assert decode(encode([1, [2, 3]])) == [1, [2, 3]]  # two lists, three numbers
    with pytest.raises(WireError, match="at most 5 values"):
        encode([1, [2, 3], 4])
    monkeypatch.undo()
    data = encode([1, [2, 3], 4])
    monkeypatch.setattr(layout, "MAX_VALUES", 5)
    with pytest.raises(WireError, match="at most 5 values"):
        decode(data)


def test_no_trees_of_many_nodes_take_no_memory():
    """A leading dimension of 0 makes any number of nodes fit into no bytes: nothing of that size
    may be made of it.
    """
    nodes = b"\x80\x80\x80\x80\x08"  # 2^31
    body = b"\x14\x01\x00\x04" + nodes + b"\x01\x01\x01" + b"\x05" * 4
    before = torch.arange

    def guarded(n, **options):
        assert n < 1000
        return before(n, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "arange", guarded)
        assert decode(seal(body)).feature.shape == (0, 1 << 31)


def test_oversized_messages_are_refused():
    data = encode(torch.zeros(100))
    assert decode(data, max_bytes=len(data)).shape == (100,)
    with pytest.raises(WireError, match=f"expected at most {len(data) - 1}"):
        decode(data, max_bytes=len(data) - 1)


@pytest.mark.parametrize(
    "body",
    [
        b"\x29\x01\x80\x80\x80\x80\x02",
        b"\x06\x80\x80\x80\x80\x02\x00",
        b"\x08\x80\x80\x80\x80\x02\x00",
        b"\x05\x80\x80\x80\x80\x02\x00",
        b"\x10\x01\x03\x01\x80\x80\x80\x80\x02\x05\x00",
        b"\x12\x01\x80\x80\x80\x80\x02\x28\x00" + bytes(4),
        b"\x14\x00\x04\x80\x80\x80\x80\x02\x00\x01\x05",
    ],
)
def test_declared_lengths_allocate_nothing(body, monkeypatch):
    empty = torch.empty

    def guarded(n, **kwargs):
        assert n <= len(body)
        return empty(n, **kwargs)

    monkeypatch.setattr(torch, "empty", guarded)
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(seal(body))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000


# --- structured arrays ----------------------------------------------------------------------------


def batch(dtype=torch.float32):
    c = 5
    key = random.key(3)
    yield Sparse(random.integers(key, (c, 4), 12), random.normal(key, (c, 4), dtype), (3, 4))
    yield Sparse(random.integers(key, (c, 4), 12).int(), random.normal(key, (c, 4), dtype), (3, 4))
    yield LowRank(
        random.normal(key, (c, 3, 2), dtype), random.normal(random.fold(key, 1), (c, 4, 2), dtype)
    )
    yield Signs.pack(random.normal(key, (c, 3, 4), dtype), random.uniform(key, c, dtype))
    yield Signs.pack(random.normal(key, (c,), dtype), random.uniform(key, c, dtype))
    for kind in ("int8", "float16", "bfloat16"):
        keys = random.fold(key, torch.arange(c))
        yield vmap(lambda x, k, kind=kind: wire.quantise(x, kind, k))(
            random.normal(key, (c, 3, 4), dtype), keys
        )


@pytest.mark.parametrize("number", range(8))
def test_dense_of_stacked_arrays(number):
    t = list(batch(torch.float64))[number]
    looped = torch.stack([tree.map(lambda x, c=c: x[c], t).dense() for c in range(5)])
    assert torch.equal(t.dense(), looped)
    assert torch.equal(vmap(lambda x: x.dense())(t), looped)


def test_dense_by_hand():
    assert Sparse(torch.tensor([1, 3, 1]), torch.tensor([1.0, 2, 3]), (2, 2)).dense().tolist() == [
        [0, 4],
        [0, 2],
    ]
    assert Sparse(torch.tensor([0]), torch.tensor([5.0]), ()).dense().item() == 5
    assert LowRank(torch.tensor([[1.0], [2]]), torch.tensor([[3.0], [4]])).dense().tolist() == [
        [3, 4],
        [6, 8],
    ]
    signs = Signs.pack(torch.tensor([1.0, -2, 0, -1, 1, 1, 1, 1, -3, 5]), 0.5)
    assert signs.bits.tolist() == [0b11110101, 0b10]
    assert signs.dense().tolist() == [0.5, -0.5, 0.5, -0.5, 0.5, 0.5, 0.5, 0.5, -0.5, 0.5]
    assert (
        Quantised(torch.tensor(3, dtype=torch.int8), torch.tensor(0.5), "float64").dense().dtype
        == torch.float64
    )


@settings(deadline=None)
@given(signs())
def test_pack_keeps_every_sign(t):
    one = Signs(t.bits, torch.ones_like(t.scale), t.shape)
    assert_same(Signs.pack(one.dense(), one.scale), one)


def test_densify_turns_all_but_trees_dense():
    out = wire.densify(
        {
            "s": SAMPLE.sparse,
            "l": [SAMPLE.low],
            "b": SAMPLE.signs,
            "q": SAMPLE.q,
            "t": SAMPLE.trees,
            "n": 1,
        }
    )
    assert out["s"].shape == (1, 300, 300)
    assert out["l"][0].shape == (2, 3)
    assert out["b"].shape == (3,)
    assert out["t"] is SAMPLE.trees
    assert out["n"] == 1


# --- quantization ---------------------------------------------------------------------------------

KINDS = ("int8", "float16", "bfloat16")
STEPS = 1 << 10


def over_all_draws(x: Tensor, kind: str, monkeypatch) -> Tensor:
    """The dequantized tensor for every word of an even grid of `STEPS` words, one row a word."""
    monkeypatch.setattr(random, "fold", lambda key, i: key)
    monkeypatch.setattr(random, "words", lambda key, n: key[0].expand(n))
    keys = torch.arange(0, 2**32, 2**32 // STEPS).unsqueeze(1)
    return vmap(lambda key: wire.dequantise(wire.quantise(x, kind, key)))(keys).double()


def dyadic(dtype, kind):
    """Numbers whose place between their neighbors is a multiple of 1 / STEPS, so that the mean
    over the grid is exact.
    """
    if kind == "int8":  # the largest is 127, so that the scale is 1
        return torch.tensor([127, 0, 0.5, -0.25, 3 + 1 / 1024, -126.75, 1 / 64, -0.0], dtype=dtype)
    bits = 10 if kind == "float16" else 7
    top = 2.0**14
    big = [
        top,
        1 + 2.0 ** -(bits + 10),
        -1 - 3 * 2.0 ** -(bits + 4),
        1000 + 2.0**-6,
        0.0,
        -top * (1 - 2.0 ** -(bits + 4)),
    ]
    subnormal = [5 * 2.0**-33, -3 * 2.0**-26, 2.0**-34] if kind == "float16" else [2.0**-30]
    return torch.tensor(big + subnormal, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [0, 3, 100, -100])
def test_quantization_is_exactly_unbiased(kind, dtype, scale, monkeypatch):
    x = dyadic(dtype, kind) * 2.0**scale
    out = over_all_draws(x, kind, monkeypatch)
    assert torch.equal(out.mean(0), x.double())
    for column, value in zip(out.T, x.double(), strict=True):
        low, high = column.min(), column.max()
        assert low <= value <= high
        assert set(column.tolist()) <= {low.item(), high.item()}  # two neighbors, nothing else


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data())
def test_quantization_error_is_below_one_step(kind, dtype, data):
    width = 32 if dtype == torch.float32 else 64
    numbers = st.floats(allow_nan=False, allow_infinity=False, width=width)
    x = torch.tensor(data.draw(st.lists(numbers, min_size=1, max_size=8)), dtype=dtype)
    assume(x.abs().max() < torch.finfo(dtype).max * 0.99)
    q = wire.quantise(x, kind, random.key(data.draw(st.integers(0, 1000))))
    out, scale, exact = q.dense(), q.scale.double(), x.double()
    assert out.dtype == dtype
    assert torch.isfinite(out).all()
    assert q.codes.dtype == getattr(torch, kind)
    if kind == "int8":
        assert q.codes.abs().int().max() <= 127
        step = scale.expand_as(exact)
    else:
        bits, lowest = (10, 2.0**-24) if kind == "float16" else (7, 2.0**-133)
        step = torch.maximum(exact.abs() * 2.0**-bits, scale * lowest)
    assert ((out.double() - exact).abs() <= step * (1 + 1e-6)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e5, 2.0**-149])
def test_constant_and_empty_tensors(kind, dtype, value):
    x = torch.full((3, 4), value, dtype=dtype)
    for seed in range(5):
        out = wire.dequantise(wire.quantise(x, kind, random.key(seed)))
        if kind == "int8" and value in (0.0, 1.0, -3.0, 1e5):
            torch.testing.assert_close(out, x, rtol=2e-7, atol=0)
        elif kind != "int8" and value != 1e5:
            assert torch.equal(out, x)
    empty = wire.quantise(torch.zeros(0, 3, dtype=dtype), kind, random.key(0))
    assert wire.dequantise(empty).shape == (0, 3)
    assert (
        wire.dequantise(wire.quantise(torch.tensor(value, dtype=dtype), kind, random.key(0))).shape
        == ()
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_diverged_tensor_stays_visible(kind, bad):
    out = wire.dequantise(wire.quantise(torch.tensor([1.0, bad, 0.0]), kind, random.key(0)))
    assert not tree.all_finite(out)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_float_does_not_overflow(kind, dtype):
    x = torch.tensor([torch.finfo(dtype).max, -torch.finfo(dtype).max], dtype=dtype)
    for seed in range(5):
        assert tree.all_finite(wire.dequantise(wire.quantise(x, kind, random.key(seed))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_scale_never_makes_a_code_of_128(dtype, monkeypatch):
    # up, whenever there is anything to round
    monkeypatch.setattr(random, "words", lambda key, n: torch.zeros(n))
    x = torch.linspace(0.5, 1.5, 3000, dtype=dtype)
    q = vmap(lambda v: wire.quantise(v, "int8", random.key(0)))(x)
    assert (q.codes == 127).all()
    torch.testing.assert_close(q.dense(), x, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_quantise_under_vmap_equals_a_loop(kind):
    keys = random.fold(random.key(7), torch.arange(6))
    t = {
        "w": random.normal(random.key(1), (6, 3, 5)) * torch.logspace(-6, 6, 6)[:, None, None],
        "b": (random.normal(random.key(2), (6,), torch.float64), torch.arange(6)),
    }
    together = vmap(lambda x, k: wire.quantise(x, kind, k))(t, keys)
    for c in range(6):
        alone = wire.quantise(tree.map(lambda x, c=c: x[c], t), kind, keys[c])
        assert_same(tree.map(lambda x, c=c: x[c], together), alone)
    assert nbytes(together, batched=True) == len(encode(alone))


def test_quantise_touches_dense_floats_alone():
    t = {
        "i": torch.arange(3),
        "h": torch.ones(2, dtype=torch.float16),
        "s": SAMPLE.sparse,
        "l": SAMPLE.low,
        "n": 2,
        "w": torch.ones(2),
    }
    q = wire.quantise(t, "int8", random.key(0))
    assert all(q[name] is t[name] for name in "ihsln")
    assert isinstance(q["w"], Quantised)
    with pytest.raises(ConfigError, match="did you mean 'int8'"):
        wire.quantise(t, "int4", random.key(0))


def test_leaves_draw_from_keys_of_their_own():
    x = random.normal(random.key(1), 100)
    q = wire.quantise({"a": x, "b": x}, "int8", random.key(0))
    assert not torch.equal(q["a"].codes, q["b"].codes)


# --- untrusted replies ----------------------------------------------------------------------------


def test_validate_like_accepts_the_same_form():
    other = decode(encode(SAMPLE))
    wire.validate_like(other, SAMPLE, "the reply of client 3")
    wire.validate_like({"w": torch.ones(2, 3)}, {"w": torch.ones(2, 3, device="meta")}, "reply")


@pytest.mark.parametrize(
    ("got", "expected", "message"),
    [
        (
            {"a": [torch.ones(2)]},
            {"a": [torch.ones(3)]},
            r"the reply: at a\.0 got float32 \[2\], expected float32 \[3\]",
        ),
        (
            torch.ones(2),
            torch.ones(2).double(),
            r"at the top got float32 \[2\], expected float64 \[2\]",
        ),
        ({"a": 1}, {"b": 1}, r"got the keys \['a'\], expected \['b'\]"),
        ({"a": 1, "b": 2}, {"b": 1, "a": 2}, "got the keys"),
        ([1], [1, 2], "got 1 items, expected 2"),
        ({"a": 1}, {"a": 1.0}, "at a got a int, expected a float"),
        ({}, State(), "got a dict, expected a State"),
        ({"a": None}, {"a": torch.ones(())}, r"got a NoneType, expected float32 \[\]"),
        (SAMPLE.sparse, torch.ones(1, 300, 300), "got a Sparse, expected float32"),
        (torch.ones(2), SAMPLE.low, r"got float32 \[2\], expected a LowRank"),
        (
            Sparse(torch.zeros(1), torch.ones(1), (9,)),
            Sparse(torch.zeros(1), torch.ones(1), (3,)),
            r"at shape got \(9,\)",
        ),
        ([forest(roots=torch.tensor([0, 0]))], [forest()], r"at 0\.roots got int64 \[2\]"),
    ],
)
def test_validate_like_names_the_difference(got, expected, message):
    with pytest.raises(ReplyError, match=message):
        wire.validate_like(got, expected, "the reply")


def test_int8_codes_by_hand():
    """The largest number has the code 127, so that a step is 1 here and integers stay as they
    are.
    """
    made = wire.quantise(torch.tensor([-127.0, 1.0, 0.0, 64.0]), "int8", random.key(0))
    assert made.codes.tolist() == [-127, 1, 0, 64] and float(made.scale) == 1
