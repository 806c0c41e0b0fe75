"""Secure aggregation: right sums, nothing else to be seen, and nothing strange accepted."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import math
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from foedus import wire
from foedus.aggregation.secure import graph, shamir
from foedus.aggregation.secure.fixedpoint import FixedPoint
from foedus.aggregation.secure.primitives import (
    add_mask,
    agree,
    box_key,
    derive,
    load,
    pair_key,
    public_key,
    self_key,
    verifier,
)
from foedus.aggregation.secure.protocol import Offer
from foedus.aggregation.secure.simulated import (
    PHASES,
    SECRETS,
    SecureAggregation,
    SecureClient,
    SecureServer,
    aggregate,
)
from foedus.base.tree import State
from foedus.errors import (
    ConfigError,
    DivergenceError,
    FoedusError,
    ReplyError,
    SecureError,
    TooFewClients,
)
from foedus.wire.arrays import LowRank, Sparse

CONFIG = SecureAggregation(range=8.0, bits=20)


def entropy(seed: int):
    """Random bytes that repeat: for tests only."""
    return np.random.default_rng(seed).bytes


def wired(tree):
    """A message as it comes out at the other end, after checking that its length is known."""
    data = wire.encode(tree)
    assert len(data) == wire.nbytes(tree)
    return wire.decode(data)


class Exchange:
    """One exchange, phase by phase, with every message and every client's state through the wire;
    tests meddle in between.
    """

    def __init__(
        self,
        replies,
        config=CONFIG,
        weights=None,
        seed=None,
        session="s",
        round=3,
        exchange=1,
        **hooks,
    ):
        self.replies, self.config, self.n = replies, config, len(replies)
        self.weights = [1] * self.n if weights is None else weights
        sources = {
            i: {} if seed is None else {"entropy": entropy(seed * 1000 + i)}
            for i in range(self.n + 1)
        }
        self.hooks = {
            i: {**sources[i], **{name: f(i) for name, f in hooks.items()}} for i in range(self.n)
        }
        self.clients = {i: SecureClient(i, config, **self.hooks[i]) for i in range(self.n)}
        about = {"session": session, "round": round, "exchange": exchange}
        self.server = SecureServer(
            config, dict(enumerate(self.weights)), **about, **sources[self.n]
        )
        self.questions, self.answers = {}, {}
        self.questions["advertise"] = dict.fromkeys(range(self.n), self.server.offer())

    def call(self, phase, i, question):
        """Ask client i, who lives in a new process every time."""
        client = SecureClient.restore(
            wire.decode(wire.encode(self.clients[i].export())), self.config, **self.hooks[i]
        )
        self.clients[i] = client
        rest = (self.replies[i], self.weights[i]) if phase == "mask" else ()
        return wired(getattr(client, phase)(wired(question), *rest))

    def ask(self, phase, silent=()):
        """All clients answer one phase, but the silent ones; the server gets ready for the next."""
        for i in silent:
            self.clients.pop(i, None)
        asked = {i: q for i, q in self.questions[phase].items() if i in self.clients}
        self.answers[phase] = {i: self.call(phase, i, q) for i, q in asked.items()}
        return self

    def then(self):
        """What the server makes of the last answers."""
        phase = list(self.answers)[-1]
        if phase == "mask":
            for i, answer in self.answers[phase].items():
                self.server.add(i, answer)
            self.questions["unmask"] = self.server.request()
        elif phase == "unmask":
            return self.server.total(self.answers[phase])
        else:
            step = {"advertise": self.server.keys, "share": self.server.boxes}[phase]
            self.questions[PHASES[PHASES.index(phase) + 1]] = step(self.answers[phase])
        return self

    def up_to(self, phase):
        """Everything before this phase."""
        for name in PHASES[: PHASES.index(phase)]:
            self.ask(name).then()
        return self

    def run(self, silent=None):
        for name in PHASES:
            result = self.ask(name, (silent or {}).get(name, ())).then()
        return result


def numbers(n, size=5, seed=0):
    return list(torch.from_numpy(np.random.default_rng(seed).uniform(-7, 7, (n, size))))


def plain(replies, weights, ids):
    return sum(weights[i] * replies[i] for i in ids) / sum(weights[i] for i in ids)


# -- Shamir ----------------------------------------------------------------------------------------


def test_shamir_by_hand():
    """f(x) = 42 + 7 x: 49, 56, 63. From x = 1, 3: 49 * 3/2 - 63 * 1/2 = 42."""
    values = shamir._values(np.array([42], np.uint64), np.array([[7]], np.uint64), 3)
    assert values.ravel().tolist() == [49, 56, 63]
    shares = np.zeros((2, 9), np.int32)
    shares[:, 0] = [49, 63]
    assert shamir.combine(np.array([1, 3]), shares) == (42).to_bytes(32, "little")
    # Modulo p = 2^31 - 1: f(x) = 5 - x + 2 x^2, so f(1) = 6, f(2) = 11, f(4) = 33; and 5 = 8/3 * 6
    # - 2 * 11 + 1/3 * 33.
    values = shamir._values(np.array([5], np.uint64), np.array([[shamir.P - 1], [2]], np.uint64), 4)
    assert values.ravel().tolist() == [6, 11, 20, 33]
    shares = np.zeros((3, 9), np.int32)
    shares[:, 0] = [6, 11, 33]
    assert shamir.combine(np.array([1, 2, 4]), shares) == (5).to_bytes(32, "little")


def test_limbs_are_thirty_bits_little_endian():
    assert shamir._limbs(((3 << 30) + 7).to_bytes(32, "little")) == [7, 3, 0, 0, 0, 0, 0, 0, 0]
    assert shamir._limbs(b"\xff" * 32) == [2**30 - 1] * 8 + [2**16 - 1]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_threshold_shares_give_the_secrets_back(data):
    holders = data.draw(st.integers(1, 12))
    threshold = data.draw(st.integers(1, holders))
    secrets = [data.draw(st.binary(min_size=32, max_size=32)) for _ in range(2)]
    shares = shamir.split(secrets, threshold, holders, entropy(data.draw(st.integers(0, 99))))
    chosen = np.array(data.draw(st.permutations(range(holders)))[:threshold])
    for i, secret in enumerate(secrets):
        assert shamir.combine(chosen + 1, shares[chosen, i]) == secret


def test_one_share_too_few_reveals_nothing():
    """Shares below the threshold are uniform for whatever secret; with one share changed, the
    secret is another.
    """
    draw = entropy(1)
    for secret in (bytes(32), b"\xff" * 32):
        shares = np.stack(
            [shamir.split([secret], 3, 3, draw)[:2, 0, 0] for _ in range(4000)]
        ).astype(float)
        for column in (shares[:, 0], shares[:, 1], (shares[:, 0] + shares[:, 1]) % shamir.P):
            assert stats.kstest(column / shamir.P, "uniform").pvalue > 1e-3
    shares = shamir.split([bytes(32)], 2, 2, draw)[:, 0]
    changed = shares.copy()
    changed[0, 0] = (changed[0, 0] + 1) % shamir.P  # weight 2 at x = 1: the secret grows by 2
    assert shamir.combine(np.array([1, 2]), changed) == (2).to_bytes(32, "little")
    changed[0, 0] = (changed[0, 0] - 2) % shamir.P  # and falls below 0: not a number of 30 bits
    with pytest.raises(SecureError, match="altered"):
        shamir.combine(np.array([1, 2]), changed)


def test_coefficients_are_never_p():
    asked = []

    def source(size):
        asked.append(size)
        return b"\xff" * size if len(asked) == 1 else b"\x05\x00\x00\x80" * (size // 4)

    assert shamir._uniform(3, source).tolist() == [5, 5, 5]
    assert asked == [12, 12]


# -- the graph -------------------------------------------------------------------------------------


def test_degrees_as_documented():
    assert [graph.degree(n, 2 / 3) for n in (2, 10, 100)] == [1, 9, 99]
    documented = {101: 32, 200: 58, 500: 100, 1000: 124, 10_000: 160, 100_000: 178}
    assert {n: graph.degree(n, 2 / 3) for n in documented} == documented
    row = next(line for line in graph.__doc__.splitlines() if line.strip().startswith("k  "))
    assert [int(w) for w in row.split()[1:]] == list(documented.values())


@pytest.mark.parametrize(("n", "k"), [(101, 32), (200, 40), (1000, 124)])
def test_risks_are_the_hypergeometric_tails(n, k):
    t, bad = math.ceil(2 * (k + 1) / 3), n // 10
    apart, hidden, recovered = graph.risks(n, k, 2 / 3)
    fewer = stats.hypergeom(n - 1, n - 1 - bad, k).cdf(t - 1)
    more = stats.hypergeom(n - 1, bad, k).sf(2 * t - (k + 1) - 1)
    for got, exact in ((hidden, more), (recovered, fewer)):
        assert got == (pytest.approx(math.log2(n * exact), rel=1e-6) if exact else -math.inf)
    pairs, gone = n * (n - k - 1) // 2, 2 * bad
    exact = pairs * math.comb(gone, k) / math.comb(n, k)
    assert apart == (pytest.approx(math.log2(exact)) if exact else -math.inf)


def test_the_smallest_degree_that_is_safe_is_taken():
    for n in (500, 1000):
        k = graph.degree(n, 2 / 3)
        good = [
            max(r[:2]) <= -41 and r[2] <= -20
            for r in (graph.risks(n, j, 2 / 3) for j in (k, k - 2))
        ]
        assert good == [True, False]
    # every share is needed: no dropout could be borne but by nobody dropping out
    assert graph.degree(300, 1.0) == 299
    with pytest.raises(ConfigError, match=r"threshold=0\.55.*10000 clients.*2/3"):
        graph.degree(10_000, 0.55)


@pytest.mark.parametrize(("n", "k"), [(5, 2), (11, 4), (40, 6), (7, 6), (7, 10), (2, 1)])
def test_graph_is_regular_and_symmetric(n, k):
    order = graph.ring(n, entropy(n))
    assert sorted(order) == list(range(n))
    around = graph.neighborhoods(order, k)
    assert around.shape == (n, min(k, n - 1) + 1)
    near = np.zeros((n, n), bool)
    for i, row in enumerate(around):
        assert (np.diff(row) > 0).all()
        near[i, row] = True
    assert near.diagonal().all() and (near == near.T).all()
    if k < n - 1:  # those next to each other in the ring
        assert all(
            near[order[p], order[(p + d) % n]] == (d <= k // 2)
            for p in range(n)
            for d in range(n // 2 + 1)
        )


def test_rings_differ():
    assert not np.array_equal(graph.ring(50, np.random.bytes), graph.ring(50, np.random.bytes))


@settings(max_examples=200, deadline=None)
@given(st.integers(5, 14), st.sampled_from([2, 4]), st.integers(0, 99), st.data())
def test_connected_is_reachable(n, k, seed, data):
    order = graph.ring(n, entropy(seed))
    around = graph.neighborhoods(order, k)
    present = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    if not present.any():
        return
    reached, new = set(), {int(np.flatnonzero(present)[0])}
    while new:
        reached |= new
        new = {int(q) for p in new for q in around[p] if present[q]} - reached
    assert graph.connected(order, k, present) == (len(reached) == present.sum())


# -- fixed point -----------------------------------------------------------------------------------


def test_fixed_point_by_hand():
    """range 8 in 4 bits: steps of 1. 2.4 is 2, -2.6 is -3, times 3; -9 is 2^32 - 9."""
    points = FixedPoint(range=8, bits=4)
    assert points.step == 1.0
    assert points.encode(torch.tensor([2.4, -2.6, 8.0, -8.0]), 3, 32).tolist() == [
        6,
        2**32 - 9,
        24,
        2**32 - 24,
    ]
    assert points.encode(torch.tensor([-1.0]), 1, 64).tolist() == [2**64 - 1]
    assert FixedPoint(range=3.0, bits=3).decode(np.array([2**32 - 5, 4], np.uint32)).tolist() == [
        -3.75,
        3.0,
    ]


def test_the_modulus_is_the_smallest_that_cannot_wrap():
    points = FixedPoint(range=1.0, bits=16)  # Q = 2^15
    assert points.width(2**16 - 1, 10) == 32  # 2^31 - 2^15
    assert points.width(2**16, 10) == 64  # 2^31 would be read as -2^31
    assert FixedPoint(1.0, 16, headroom=2**12).width(2**16 - 2, 8) == 32  # 2^31 - 2^16 + 2^15
    assert FixedPoint(1.0, 16, headroom=2**13).width(2**16 - 2, 8) == 64  # 2^31 - 2^16 + 2^16
    assert FixedPoint(1.0, 40).width(2**24 - 1, 9) == 64
    with pytest.raises(ConfigError, match=r"bits=40.*9 clients.*16777216.*fewer bits"):
        FixedPoint(1.0, 40).width(2**24, 9)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("bits", "weights"),
    [(16, [2**15, 2**14, 2**14 - 1]), (15, [7, 2**16, 2**10]), (31, [1, 2]), (40, [5, 9])],
)
def test_nothing_wraps_when_all_are_at_the_edge(sign, bits, weights):
    config = SecureAggregation(range=2.0, bits=bits)
    total = aggregate([torch.full((3,), 2.0 * sign)] * len(weights), weights, config).total
    assert total.sum.tolist() == [2.0 * sign * sum(weights)] * 3
    assert total.mean().tolist() == [2.0 * sign] * 3


def test_stochastic_rounding_has_mean_zero_error():
    points = FixedPoint(range=8.0, bits=4, rounding="stochastic")
    x = torch.full((40_000,), -2.25, dtype=torch.float64)
    q = points.encode(x, 1, 64, entropy=entropy(0)).astype(np.int64)
    assert set(q) == {-3, -2}
    assert q.mean() == pytest.approx(-2.25, abs=0.01)
    assert points.encode(torch.tensor([8.0, -8.0]), 1, 64, entropy=lambda n: b"\xff" * n).astype(
        np.int64
    ).tolist() == [8, -8]


def test_stochastic_rounding_stays_within_the_range():
    """Also where the number that is added, just below 1, becomes 1 by rounding."""
    assert math.floor(2.0**39 + (1 - 2.0**-32)) == 2**39 + 1
    points, edges = FixedPoint(8.0, 40, "stochastic"), torch.tensor([8.0, -8.0])
    for byte in (b"\xff", b"\x00"):
        q = points.encode(edges, 1, 64, entropy=lambda n, b=byte: b * n).astype(np.int64)
        assert np.abs(q).max() == 2**39


def test_needed_is_not_one_more_by_rounding():
    assert 0.55 * 100 > 55
    assert SecureAggregation(threshold=0.55).needed(100) == 55
    assert [SecureAggregation().needed(n) for n in (2, 3, 4, 9, 10, 125)] == [2, 2, 3, 6, 7, 84]


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        ({"a": torch.zeros(2), "b": [torch.tensor([1.0, -9.5])]}, ReplyError, r"round 3: client 2: "
                                                                              r"b\.0 holds -9.5, "
                                                                              r"outside -8 \.\. "
                                                                              r"8.*range=10"),
        (torch.tensor([8.0000001], dtype=torch.float64), ReplyError, r"the reply holds 8\.0000001, "
                                                                     r"outside"),
        ({"a": torch.tensor([math.nan, 99.0])}, DivergenceError, "client 2: a holds nan.*learning "
                                                                 "rate"),
        ({"a": torch.tensor([1.0, -math.inf])}, DivergenceError, "client 2: a holds -inf"),
        ({"a": torch.zeros(2), "n": 3}, ReplyError, "holds a int; only tensors have a mean"),
        ({"a": None}, ReplyError, "holds a NoneType"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_an_error_before_anything_is_sent(reply, error, message):
    e = Exchange([torch.zeros(2), torch.zeros(2), reply]).up_to("mask")
    before = e.clients[2].export()
    with pytest.raises(error, match=message) as caught:
        e.call("mask", 2, e.questions["mask"][2])
    if error is DivergenceError:
        assert (caught.value.round, caught.value.clients) == (3, (2,))
    assert e.clients[2].state.phase == before.phase == "mask"


def test_noise_is_added_before_masking():
    draws = iter([np.array([3, -4]), np.array([0, 10]), np.array([-10, 1])])
    config = SecureAggregation(range=8.0, bits=4, headroom=10)
    total = aggregate(
        [torch.tensor([1.0, 2.0])] * 3, [2, 2, 4], config, noise=lambda size: next(draws)
    ).total
    # the weights are 1, 1, 2 in units of 2
    assert total.sum.tolist() == [2 * (4 * 1 - 7), 2 * (4 * 2 + 7)]
    for noise, message in (
        (lambda n: np.full(n, 11), "headroom=10 is too small for noise of 11"),
        (lambda n: np.full(n, -11), "headroom=10 is too small for noise of 11"),
        (lambda n: np.zeros(n), "float64"),
        (lambda n: np.zeros(n + 1, np.int64), "must give 2 integers"),
    ):
        with pytest.raises(ConfigError, match=message):
            aggregate([torch.tensor([1.0, 2.0])] * 3, config=config, noise=noise)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"threshold": 0.5},
            "threshold=0.5 must be a number above 0.5 and at most 1; with less, two halves",
        ),
        ({"threshold": 1.2}, "threshold=1.2"),
        ({"threshold": math.nan}, "threshold=nan"),
        ({"threshold": True}, "threshold=True"),
        ({"neighbours": 3}, "neighbours=3 must be an even integer of at least 2 or 'auto'"),
        ({"neighbours": 0}, "neighbours=0"),
        ({"neighbours": "all"}, "neighbours='all'"),
        ({"range": 0}, "range=0 must be a positive"),
        ({"range": math.inf}, "range=inf"),
        (
            {"range": 1e-200},
            "range=1e-200 must be a positive number, from 1e-100 to 1e100 or 'auto'; scale what",
        ),
        ({"bits": 1}, "bits=1 must be an integer from 2 to 40"),
        ({"bits": 41}, "bits=41 must be an integer from 2 to 40; single precision has 24"),
        ({"rounding": "up"}, "rounding 'up' is unknown"),
        ({"headroom": -1}, "headroom=-1"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ConfigError, match=message):
        SecureAggregation(**settings)


# -- primitives ------------------------------------------------------------------------------------


def test_key_agreement_of_rfc_7748():
    """Section 6.1, Alice and Bob."""
    alice = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    bob = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    publics = (
        "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a",
        ("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"),
    )
    assert (public_key(alice).hex(), public_key(bob).hex()) == publics
    shared = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert (
        agree(load(alice), public_key(bob)).hex()
        == agree(load(bob), public_key(alice)).hex()
        == shared
    )
    with pytest.raises(SecureError, match="not a valid X25519 public key"):
        agree(load(alice), bytes(32))


def hkdf(secret, info):
    """RFC 5869 with SHA-256, no salt, 32 bytes."""
    return hmac.digest(hmac.digest(bytes(32), secret, "sha256"), info + b"\x01", "sha256")


def stream(key, size):
    """AES-256 of 0, 1, 2, ..., block by block."""
    cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    return (cipher.update(b"".join(i.to_bytes(16, "big") for i in range(-(-size // 16)))))[:size]


def info(*parts):
    return b"".join(struct.pack("<I", len(p)) + p for p in parts)


@pytest.mark.parametrize(("bits", "width"), [(20, 32), (33, 64)])
def test_a_masked_reply_recomputed_from_the_secrets(bits, width):
    """y = x + own mask + masks with the later - masks with the earlier clients, with no function of
    ours.
    """
    config = SecureAggregation(range=8.0, bits=bits)
    replies = numbers(4)
    e = Exchange(replies, config, [3, 6, 9, 3]).up_to("mask")
    offer = {"session": "s", "round": 3, "exchange": 1, "clients": 4, "weight": 7, "unit": 3}
    offer["question"] = "0" * 64
    assert e.questions["advertise"][0] == offer
    content = ["foedus secure aggregation 2", offer, [2 / 3, "auto", 8.0, bits, 0]]
    tag = hashlib.sha256(wire.encode(content)).digest()
    secrets = {i: bytes(c.state.mask_key.numpy()) for i, c in e.clients.items()}
    seed = bytes(e.clients[1].state.seed.numpy())
    e.ask("mask")
    kind = np.dtype(f"u{width // 8}")
    y = np.rint(replies[1].numpy() / (8.0 / 2 ** (bits - 1))).astype(np.int64).astype(
        kind
    ) * kind.type(2)
    y += np.frombuffer(
        stream(hkdf(seed, info(b"self", tag, struct.pack("<q", 1))), 5 * width // 8), kind
    )
    public = {
        i: X25519PrivateKey.from_private_bytes(s).public_key().public_bytes_raw()
        for i, s in secrets.items()
    }
    for i in (0, 2, 3):
        agreed = X25519PrivateKey.from_private_bytes(secrets[1]).exchange(
            X25519PublicKey.from_public_bytes(public[i])
        )
        low, high = min(1, i), max(1, i)
        key = hkdf(
            agreed, info(b"pair", tag, struct.pack("<2q", low, high), public[low], public[high])
        )
        mask = np.frombuffer(stream(key, 5 * width // 8), kind)
        y = y + mask if i > 1 else y - mask
    answer = e.answers["mask"][1]
    assert answer["reply"].numpy().view(kind).tolist() == y.tolist()
    assert answer["dtypes"] == ["float64"]
    assert bytes(answer["tag"].numpy()) == tag


def test_masks_of_any_length_are_one_stream(monkeypatch):
    """In pieces as in one piece, also where a piece ends within the numbers."""
    from foedus.aggregation.secure import primitives

    for kind in (np.uint32, np.uint64):
        whole = np.arange(1000, dtype=kind)
        add_mask(whole, b"k" * 32)
        assert (
            whole.tolist()
            == (
                np.arange(1000, dtype=kind) + np.frombuffer(stream(b"k" * 32, whole.nbytes), kind)
            ).tolist()
        )
        with monkeypatch.context() as patch:
            patch.setattr(primitives, "_CHUNK", 48)
            add_mask(whole, b"k" * 32, subtract=True)
        assert whole.tolist() == list(range(1000))


def test_keys_depend_on_all_they_are_bound_to():
    a, b = b"a" * 32, b"b" * 32
    pa, pb = public_key(a), public_key(b)
    one = pair_key(b"t" * 32, load(a), 1, pa, 2, pb)
    assert one == pair_key(b"t" * 32, load(b), 2, pb, 1, pa)
    others = [
        pair_key(b"u" * 32, load(a), 1, pa, 2, pb),
        pair_key(b"t" * 32, load(a), 1, pa, 3, pb),
        pair_key(b"t" * 32, load(a), 2, pa, 1, pb),
    ]
    others += [
        self_key(b"t" * 32, a, 1),
        self_key(b"t" * 32, a, 2),
        self_key(b"u" * 32, a, 1),
        derive(a, b"xy", b"z"),
        derive(a, b"x", b"yz"),
    ]
    others += [
        box_key(*args)
        for args in (
            (b"t" * 32, a, 1, 2),
            (b"t" * 32, a, 2, 1),
            (b"u" * 32, a, 1, 2),
            (b"t" * 32, b, 1, 2),
        )
    ]
    assert len({one, *others}) == 13


def test_the_tag_depends_on_exchange_and_settings():
    base = {"session": "s", "round": 1, "exchange": 0, "clients": 3, "weight": 5, "unit": 1}
    changes = [
        {"session": "t"},
        {"round": 2},
        {"exchange": 1},
        {"clients": 4},
        {"weight": 6},
        {"unit": 2},
    ]
    tags = [Offer(**{**base, **c}).tag(CONFIG) for c in [{}, *changes]]
    fields = [{"threshold": 0.7}, {"neighbours": 4}, {"range": 4.0}, {"bits": 21}, {"headroom": 1}]
    tags += [
        Offer(**base).tag(SecureAggregation(**{"range": 8.0, "bits": 20, **f})) for f in fields
    ]
    assert len(set(tags)) == 12


# -- the sum ---------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_mean_is_the_plain_one_to_half_a_step(data):
    """Whatever the sizes, weights, settings and dropouts that leave enough, in every phase."""
    n = data.draw(st.integers(2, 9))
    size = data.draw(st.sampled_from([0, 1, 2, 7, 300]))
    weights = data.draw(st.lists(st.integers(1, 10**6), min_size=n, max_size=n))
    config = SecureAggregation(
        threshold=data.draw(st.sampled_from([0.51, 2 / 3, 1.0])),
        range=7.0,
        bits=data.draw(st.integers(2, 40)),
    )
    spare = n - config.needed(n)
    order = data.draw(st.permutations(range(n)))
    silent = {phase: [] for phase in PHASES}
    for i in order[: data.draw(st.integers(0, spare))]:
        silent[data.draw(st.sampled_from(PHASES))].append(i)
    x = [
        {"w": v, "b": (v[:1] / 2).float()} for v in numbers(n, size, data.draw(st.integers(0, 99)))
    ]
    out = aggregate(x, weights, config, dropouts=silent)
    ids = [i for i in range(n) if i not in {j for phase in PHASES[:3] for j in silent[phase]}]
    assert out.total.ids == tuple(ids)
    assert out.total.weight == sum(weights[i] for i in ids)
    mean = out.total.mean()
    assert (mean["w"].dtype, mean["b"].dtype) == (torch.float64, torch.float32)
    step = config.fixed_point.step
    for name, slack in (("w", 1e-9), ("b", 1e-6)):
        exact = plain([v[name].double() for v in x], weights, ids)
        assert mean[name].shape == exact.shape
        assert (mean[name] - exact).abs().max().item() <= step / 2 + slack if size else True
    for i in {j for phase in PHASES for j in silent[phase]}:
        assert "did not answer" in out.faults[i]


def test_the_sum_of_fixed_point_numbers_is_exact():
    """Multiples of the step come out as they went in."""
    x = [torch.tensor([1.0, -3.0, 8.0]) * s for s in (0.5, 0.25, 1.0, -1.0)]
    total = aggregate(x, [1, 2, 3, 4], SecureAggregation(range=8.0, bits=8)).total
    assert (
        total.sum.tolist()
        == sum(w * v.double() for w, v in zip([1, 2, 3, 4], x, strict=True)).tolist()
    )


def test_replies_of_every_form():
    """Nested trees, states, integers and structured arrays, as `clients.mean` takes them."""
    sparse = Sparse(torch.tensor([1]), torch.tensor([2.0]), (3,))
    low_rank = LowRank(torch.ones(2, 1), torch.full((3, 1), 2.0))
    reply = State(a=(torch.tensor(1.5), [torch.tensor([[2, 3]])]), s=sparse, r=low_rank)
    mean = aggregate([reply] * 3, config=CONFIG).total.mean()
    assert isinstance(mean, State) and mean.a[0].item() == 1.5 and mean.a[0].shape == ()
    assert mean.a[1][0].tolist() == [[2.0, 3.0]] and mean.a[1][0].dtype == torch.float32
    assert mean.s.tolist() == [0.0, 2.0, 0.0]
    assert mean.r.tolist() == [[2.0] * 3] * 2


def test_ids_are_any_numbers():
    x = dict(zip((70, 3, 2**40), numbers(3), strict=True))
    total = aggregate(x, [1, 2, 4], CONFIG, dropouts={"mask": [3]}).total
    assert total.ids == (70, 2**40) and total.weight == 5
    assert torch.allclose(total.mean(), (x[70] + 4 * x[2**40]) / 5, atol=1e-5)


def test_masks_cancel_exactly():
    """The sum of all masked replies, less everybody's own mask, is the sum of the fixed-point
    numbers: no pairwise mask is left.
    """
    x = numbers(5)
    e = Exchange(x).up_to("mask")
    seeds = {i: bytes(c.state.seed.numpy()) for i, c in e.clients.items()}
    e.ask("mask")
    total = sum(e.answers["mask"][i]["reply"].numpy().view(np.uint32) for i in range(5))
    for i in range(5):
        add_mask(total, self_key(e.server.tag, seeds[i], i), subtract=True)
    assert (
        total.view(np.int32).tolist()
        == sum(np.rint(v.numpy() / CONFIG.fixed_point.step) for v in x).tolist()
    )


@pytest.mark.parametrize("bits", [20, 33])
def test_a_masked_reply_is_uniform_whatever_the_reply(bits):
    """Chi-square over its bytes, and over the bytes of its difference from another run with the
    same reply.
    """
    config = SecureAggregation(range=8.0, bits=bits)
    for value in (0.0, 8.0):
        x = [torch.full((20_000,), value)] * 3
        runs = [
            Exchange(x, config, seed=s)
            .up_to("mask")
            .ask("mask")
            .answers["mask"][0]["reply"]
            .numpy()
            for s in (1, 2)
        ]
        kind = np.dtype(f"u{runs[0].itemsize}")
        one, two = (r.view(kind) for r in runs)
        for sample in (one, two, one - two):
            counts = np.bincount(sample.view(np.uint8), minlength=256)
            assert stats.chisquare(counts).pvalue > 1e-4
            assert (
                abs(np.corrcoef(sample[:-1].astype(float), sample[1:].astype(float))[0, 1]) < 0.03
            )
        assert (one == two).mean() < 1e-3


def test_masks_come_from_the_operating_system_and_not_from_a_seed():
    seen = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        e = Exchange([torch.zeros(100)] * 3).up_to("mask").ask("mask")
        seen.append(e.answers["mask"][0]["reply"])
    assert (seen[0] == seen[1]).float().mean() < 0.05


def test_the_masks_do_not_depend_on_the_reply():
    """With the same secrets, masked replies differ by exactly the difference of the replies."""
    a, b = torch.tensor([1.0, -2.0, 8.0]), torch.tensor([-8.0, 3.0, 0.5])
    ya, yb = (
        Exchange([v] * 3, seed=5).up_to("mask").ask("mask").answers["mask"][1]["reply"].numpy()
        for v in (a, b)
    )
    assert ((ya - yb) * CONFIG.fixed_point.step).tolist() == (a - b).tolist()


def test_what_another_client_receives_does_not_open_a_reply():
    """Shares of a secret below the threshold, all other clients' messages included, do not rebuild
    it.
    """
    e = Exchange(numbers(6)).up_to("unmask")
    secret = {i: c.state.shares.numpy() for i, c in e.clients.items()}  # [holder][owner, 2, 9]
    three = np.stack([secret[i][5, 1] for i in (0, 1, 2)])
    four = np.stack([secret[i][5, 1] for i in (0, 1, 2, 3)])
    right = shamir.combine(np.array([1, 2, 3, 4]), four)
    assert (
        hashlib.sha256(b"foedus/seed" + e.server.tag + struct.pack("<q", 5) + right).digest()
        == e.server.commitments[5]
    )
    with contextlib.suppress(SecureError):
        assert shamir.combine(np.array([1, 2, 3]), three) != right


# -- dropouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("n", "spare"), [(3, 1), (6, 2), (10, 3)])
def test_dropouts_up_to_the_threshold_and_no_further(phase, n, spare):
    x, weights = numbers(n), list(range(1, n + 1))
    for gone in (range(spare), range(n - spare, n)):
        total = Exchange(x, weights=weights).run({phase: gone})
        ids = range(n) if phase == "unmask" else [i for i in range(n) if i not in gone]
        assert total.ids == tuple(ids)
        assert torch.allclose(
            total.mean(), plain(x, weights, ids), atol=CONFIG.fixed_point.step / 2 + 1e-12
        )
    left = n - spare - 1
    with pytest.raises(
        TooFewClients,
        match=rf"round 3: {phase}: {left} of {n} clients are left, threshold=0.667 needs "
        rf"{left + 1}; nothing was unmasked \(client 0: {phase}: it did not",
    ):
        Exchange(x, weights=weights).run({phase: range(spare + 1)})


def test_dropouts_add_up_over_the_phases():
    x = numbers(9)
    total = Exchange(x).run({"advertise": [0], "share": [4], "mask": [8]})
    assert total.ids == (1, 2, 3, 5, 6, 7)
    assert torch.allclose(total.mean(), plain(x, [1] * 9, total.ids), atol=1e-5)
    with pytest.raises(TooFewClients, match="unmask: 5 of 9"):
        Exchange(x).run({"advertise": [0], "share": [4], "mask": [8], "unmask": [1]})


SPARSE = SecureAggregation(range=8.0, bits=20, neighbours=8)


def test_a_sparse_graph_gives_the_sum_too():
    """Only neighbors exchange anything; a neighborhood of 9 needs 6."""
    x, silent = numbers(40), {"advertise": [3], "share": [7], "mask": [20], "unmask": [30]}
    e = Exchange(x, SPARSE, list(range(1, 41)), seed=4)
    total = e.run(silent)
    assert total.ids == tuple(i for i in range(40) if i not in (3, 7, 20))
    assert torch.allclose(total.mean(), plain(x, range(1, 41), total.ids), atol=1e-5)
    assert {len(q["ids"]) for q in e.questions["share"].values()} == {9}
    assert {len(q["ids"]) for q in e.questions["mask"].values()} == {7, 8}
    asked = sum(len(q["dropped"]) for q in e.questions["unmask"].values())
    assert asked == 8 - (7 in e.server.ids[e.server.around[e.server.place[20]]])


def test_a_neighborhood_that_is_too_small_stops_the_run():
    """With 24 of 40 needed, but four of one client's nine holders gone, the others being spared."""
    e = Exchange(numbers(40), SPARSE, seed=4).up_to("mask")
    near = e.server.ids[e.server.around[0]]
    with pytest.raises(
        TooFewClients,
        match=r"mask: 5 of the 9 holders of the secrets of client .* are left, 6 are needed; "
        r"nothing was",
    ):
        e.ask("mask", near[near != 0][:4]).then()
    e = Exchange(numbers(40), SPARSE, seed=4).up_to("unmask")
    with pytest.raises(TooFewClients, match="unmask: 5 of the 9 holders"):
        e.ask("unmask", near[near != 0][:4]).then()


def test_a_graph_that_falls_apart_stops_everything():
    """With two neighbors each, two gaps in the ring leave two groups whose sums would be seen
    apart.
    """
    config = SecureAggregation(range=8.0, bits=20, neighbours=2, threshold=0.6)
    e = Exchange(numbers(12), config, seed=4).up_to("mask")
    gone = e.server.ids[e.server.order[[0, 6]]]
    with pytest.raises(TooFewClients, match="fell apart"):
        e.ask("mask", gone).then()
    e = Exchange(numbers(12), config, seed=4).up_to("mask")
    assert len(e.ask("mask", e.server.ids[e.server.order[[0]]]).then().questions["unmask"]) == 11


def test_hundreds_of_clients():
    x = numbers(300, 20)
    config = SecureAggregation(range=8.0, bits=20, neighbours=8)
    out = aggregate(x, config=config, dropouts={"mask": [17], "unmask": [280]})
    assert len(out.total.ids) == 299
    assert torch.allclose(out.total.mean(), plain(x, [1] * 300, out.total.ids), atol=1e-5)
    assert out.phases["share"].messages == 300 and out.phases["unmask"].messages == 298


# -- what clients refuse ---------------------------------------------------------------------------


def changed(message, **changes):
    return {**message, **{k: f(message[k].clone()) for k, f in changes.items()}}


def put(at, value):
    def change(t):
        t[at] = value
        return t

    return change


def other(phase, **about):
    """The same message of another exchange between the same clients."""
    return Exchange(numbers(4), **{"seed": 1, **about}).up_to(phase).questions[phase][0]


KEY_LISTS = {
    "a key twice": (lambda m: changed(m, keys=put(1, m["keys"][2])), "a key twice"),
    "one key for both purposes": (
        lambda m: changed(m, keys=put((1, 0), m["keys"][1, 1])),
        "a key twice",
    ),
    "the own key of another": (
        lambda m: changed(m, keys=put((1, 1), m["keys"][0, 1])),
        "a key twice",
    ),
    "own key for boxes altered": (
        lambda m: changed(m, keys=put((0, 0, 0), m["keys"][0, 0, 0] ^ 1)),
        "keys of client 0 as they were sent",
    ),
    "own key for masks altered": (
        lambda m: changed(m, keys=put((0, 1, 31), m["keys"][0, 1, 31] ^ 1)),
        "keys of client 0 as they were sent",
    ),
    "not in it": (lambda m: changed(m, ids=put(0, 9)), "keys of client 0 as they were sent"),
    "a client twice": (lambda m: changed(m, ids=put(1, 2)), "names a client twice"),
    "too few clients": (
        lambda m: changed(m, ids=lambda t: t[:2], keys=lambda t: t[:2]),
        "has 2 clients; with 4 in all there must be 3 to 4",
    ),
    "too many clients": (
        lambda m: changed(
            m,
            ids=lambda t: torch.cat([t, torch.tensor([9])]),
            keys=lambda t: torch.cat([t, t[:1] ^ 3]),
        ),
        "has 5 clients",
    ),
    "a key of small order": (
        lambda m: changed(m, keys=put((1, 0), torch.zeros(32, dtype=torch.uint8))),
        "not a valid X25519 public key",
    ),
    "another session": (
        lambda m: other("share", session="t"),
        "another session, round or exchange",
    ),
    "another round": (lambda m: other("share", round=2), "another session, round or exchange"),
    "another exchange": (
        lambda m: other("share", exchange=2),
        "another session, round or exchange",
    ),
    "other settings": (
        lambda m: other("share", config=SecureAggregation(range=8.0, bits=21)),
        "other settings",
    ),
    "other weights": (lambda m: other("share", weights=[1, 1, 1, 5]), "other settings"),
    "an earlier try of the same exchange": (
        lambda m: other("share"),
        "keys of client 0 as they were sent",
    ),
    "keys of another length": (
        lambda m: changed(m, keys=lambda t: t[:, :, :31]),
        "keys must be torch.uint8",
    ),
    "fewer keys than clients": (lambda m: changed(m, keys=lambda t: t[:3]), "must have as many"),
    "keys of another type": (
        lambda m: changed(m, keys=lambda t: t.int()),
        "keys must be torch.uint8",
    ),
    "no tag": (
        lambda m: {k: v for k, v in m.items() if k != "tag"},
        "must have the fields tag, ids, keys",
    ),
    "more fields": (lambda m: {**m, "more": torch.zeros(1)}, "must have the fields"),
    "no dict": (lambda m: [m["ids"]], "must have the fields .* got a list"),
    "numbers for tensors": (lambda m: {**m, "ids": 3}, "ids must be torch.int64"),
}


@pytest.mark.parametrize("case", KEY_LISTS)
def test_tampered_key_lists_are_refused(case):
    tamper, message = KEY_LISTS[case]
    e = Exchange(numbers(4)).up_to("share")
    before = e.clients[0].export()
    with pytest.raises(SecureError, match=message):
        e.clients[0].share(tamper(e.questions["share"][0]))
    assert e.clients[0].state is not None and e.clients[0].state.phase == "share"
    assert set(e.clients[0].export()) == set(before)


def test_a_mask_key_of_small_order_is_refused_before_anything_is_sent():
    e = Exchange(numbers(4)).up_to("share")
    for i in range(4):
        if i != 2:
            e.questions["share"][i] = changed(
                e.questions["share"][i], keys=put((2, 1), torch.zeros(32, dtype=torch.uint8))
            )
    e.ask("share", silent=[2]).then()
    assert 2 not in e.questions["mask"][0]["ids"]
    e = Exchange(numbers(4)).up_to("share")
    e.questions["share"][0] = changed(
        e.questions["share"][0], keys=put((2, 1), torch.zeros(32, dtype=torch.uint8))
    )
    e.ask("share").then()
    with pytest.raises(SecureError, match="not a valid X25519 public key"):
        e.call("mask", 0, e.questions["mask"][0])


BOXES = {
    "altered shares": (
        lambda m: changed(m, boxes=put((1, 40), m["boxes"][1, 40] ^ 1)),
        "box from client 2 was altered",
    ),
    "altered check": (
        lambda m: changed(m, boxes=put((0, 99), m["boxes"][0, 99] ^ 1)),
        "box from client 1 was altered",
    ),
    "altered nonce": (
        lambda m: changed(m, boxes=put((0, 0), m["boxes"][0, 0] ^ 1)),
        "box from client 1 was altered",
    ),
    "senders exchanged": (
        lambda m: changed(m, boxes=lambda t: t[[1, 0, 2]]),
        "box from client 1 was altered",
    ),
    "its own": (lambda m: changed(m, ids=put(0, 0)), "neighbors; client 0 is not one"),
    "of an unknown client": (
        lambda m: changed(m, ids=put(0, 17)),
        "neighbors; client 17 is not one",
    ),
    "a client twice": (lambda m: changed(m, ids=put(0, 2)), "names a client twice"),
    "too few": (
        lambda m: changed(m, ids=lambda t: t[:1], boxes=lambda t: t[:1]),
        "2 of 4 neighbors have shared keys; 3 must",
    ),
    "one box missing": (lambda m: changed(m, boxes=lambda t: t[:2]), "2 boxes of 3 clients"),
    "short boxes": (lambda m: changed(m, boxes=lambda t: t[:, :-1]), "boxes must be"),
    "another round": (lambda m: other("mask", round=4), "another session, round or exchange"),
    "an earlier try": (lambda m: other("mask"), "was altered, or is not from it"),
    "garbage": (lambda m: {"tag": "x"}, "must have the fields"),
}


@pytest.mark.parametrize("case", BOXES)
def test_altered_boxes_are_refused(case):
    tamper, message = BOXES[case]
    e = Exchange(numbers(4)).up_to("mask")
    with pytest.raises(SecureError, match=message):
        e.clients[0].mask(tamper(e.questions["mask"][0]), numbers(4)[0])
    assert e.clients[0].state.phase == "mask"


def test_a_box_for_somebody_else_is_refused():
    """What 1 sent to 3, given to 0 as if it were for it."""
    e = Exchange(numbers(4)).up_to("mask")
    m = e.questions["mask"][0]
    for_3 = e.questions["mask"][3]["boxes"][1]
    with pytest.raises(SecureError, match="box from client 1 was altered"):
        e.clients[0].mask(changed(m, boxes=put(0, for_3)), numbers(4)[0])


def test_shares_that_are_no_field_elements_are_refused(monkeypatch):
    """Else the server would blame the one who passes them on."""
    split = shamir.split
    for i, value in ((1, shamir.P), (2, -1)):
        e = Exchange(numbers(4)).up_to("share")
        with monkeypatch.context() as patch:
            patch.setattr(shamir, "split", lambda *a, v=value: np.full_like(split(*a), v))
            bad = e.call("share", i, e.questions["share"][i])
        del e.questions["share"][i]
        e.ask("share").answers["share"][i] = bad
        e.then()
        with pytest.raises(SecureError, match=f"the shares from client {i} are out of range"):
            e.call("mask", 0, e.questions["mask"][0])


REQUESTS = {
    "both secrets of one": (
        lambda m: changed(m, dropped=lambda t: torch.tensor([2])),
        "asks for both secrets of client 2",
    ),
    "a client twice": (
        lambda m: changed(m, survivors=lambda t: torch.tensor([0, 1, 2, 3, 3])),
        "names a client twice",
    ),
    "one left out": (
        lambda m: changed(m, survivors=lambda t: torch.tensor([0, 1, 2])),
        "exactly the clients whose masks",
    ),
    "an unknown client": (
        lambda m: changed(m, survivors=lambda t: torch.tensor([0, 1, 2, 4])),
        "exactly the clients whose masks",
    ),
    "one more": (
        lambda m: changed(m, dropped=lambda t: torch.tensor([7])),
        "exactly the clients whose masks",
    ),
    "itself": (
        lambda m: changed(
            m, survivors=lambda t: torch.tensor([1, 2, 3]), dropped=lambda t: torch.tensor([0])
        ),
        "client 0 itself has dropped",
    ),
    "too few": (
        lambda m: changed(
            m, survivors=lambda t: torch.tensor([0, 1]), dropped=lambda t: torch.tensor([2, 3])
        ),
        "leaves 2 survivors of 4; 3 are needed",
    ),
    "another session": (
        lambda m: other("unmask", session="t"),
        "another session, round or exchange",
    ),
    "another round": (lambda m: other("unmask", round=4), "another session, round or exchange"),
    "another exchange": (
        lambda m: other("unmask", exchange=0),
        "another session, round or exchange",
    ),
    "ids as 32 bits": (
        lambda m: changed(m, survivors=lambda t: t.int()),
        "survivors must be torch.int64",
    ),
    "a matrix": (
        lambda m: changed(m, survivors=lambda t: t.view(2, 2)),
        "survivors must be torch.int64",
    ),
    "garbage": (lambda m: 5, "must have the fields"),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_requests_that_ask_too_much_are_refused(case):
    tamper, message = REQUESTS[case]
    e = Exchange(numbers(4)).up_to("unmask")
    with pytest.raises(SecureError, match=message):
        e.clients[0].unmask(tamper(e.questions["unmask"][0]))
    assert e.clients[0].unmask(e.questions["unmask"][0])["seeds"].shape == (4, 9)


def test_every_phase_is_answered_once_and_in_order():
    """Also after the state has been through a file: a second request gets nothing, not even the
    same one.
    """
    for phase in PHASES:
        e = Exchange(numbers(4)).up_to(phase)
        question = e.questions[phase][0]
        for wrong in PHASES:
            if wrong != phase:
                with pytest.raises(
                    SecureError, match=f"asked to {wrong}, but what it can do next is {phase}"
                ):
                    e.call(wrong, 0, question)
        e.call(phase, 0, question)
        with pytest.raises(SecureError, match=f"client 0 is asked to {phase}, but"):
            e.call(phase, 0, question)


def test_the_two_secrets_of_a_client_are_never_both_answered():
    """Whoever is called a survivor, each client gives one secret's share of every other: the seed's
    or the key's.
    """
    for gone in itertools.combinations(range(6), 2):
        e = Exchange(numbers(6)).up_to("mask").ask("mask", gone).then()
        shares = {i: c.state.shares.numpy() for i, c in e.clients.items()}
        e.ask("unmask")
        for i, answer in e.answers["unmask"].items():
            seeds, keys = (
                e.questions["unmask"][i]["survivors"].tolist(),
                e.questions["unmask"][i]["dropped"].tolist(),
            )
            assert answer["seeds"].tolist() == shares[i][seeds, 1].tolist()
            assert answer["keys"].tolist() == shares[i][keys, 0].tolist()
            assert keys == list(gone)


@pytest.mark.parametrize(
    "offer",
    [
        None,
        {},
        {"session": "s", "round": 0, "exchange": 0, "clients": 1, "weight": 1, "unit": 1},
        {"session": "s", "round": 0, "exchange": 0, "clients": 3, "weight": 0, "unit": 1},
        {"session": "s", "round": 0, "exchange": 0, "clients": 3, "weight": 3, "unit": 0},
        {"session": "s", "round": -1, "exchange": 0, "clients": 3, "weight": 3, "unit": 1},
        {"session": "s", "round": 0, "exchange": True, "clients": 3, "weight": 3, "unit": 1},
        {"session": "", "round": 0, "exchange": 0, "clients": 3, "weight": 3, "unit": 1},
        {"session": "s", "round": 0, "exchange": 0, "clients": 3, "weight": 3.0, "unit": 1},
        {
            "session": "s",
            "round": 0,
            "exchange": 0,
            "clients": 3,
            "weight": 3,
            "unit": 1,
            "more": 1,
        },
        {"session": "s", "round": 0, "exchange": 0, "clients": 3, "weight": 2**60, "unit": 1},
    ],
)
def test_senseless_offers_are_refused(offer):
    client = SecureClient(0, CONFIG)
    with pytest.raises((SecureError, ConfigError)):
        client.advertise(offer)
    assert client.state == {"id": 0, "phase": "advertise"}


@pytest.mark.parametrize("weight", [3, 10, -2, 1.5])
def test_a_weight_that_was_not_offered_is_refused(weight):
    """The weights are 2, 2, 4: units of 2, four in all."""
    e = Exchange(numbers(3), weights=[2, 2, 4]).up_to("mask")
    e.weights[0] = weight
    with pytest.raises((SecureError, ConfigError), match="weight"):
        e.call("mask", 0, e.questions["mask"][0])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PHASES[1:]), st.data())
def test_garbage_is_refused_and_changes_nothing(phase, data):
    """Any tree the wire can bring, in place of a message or of one of its fields."""
    leaf = st.one_of(
        st.none(),
        st.integers(-5, 5),
        st.text(max_size=3),
        st.builds(
            lambda shape, dtype: torch.zeros(shape, dtype=dtype),
            st.lists(st.integers(0, 4), max_size=3),
            st.sampled_from([torch.uint8, torch.int64, torch.int32, torch.float32]),
        ),
    )
    e = GARBAGE[phase]
    question = dict(e.questions[phase][0])
    if data.draw(st.booleans()):
        name, value = data.draw(st.sampled_from(sorted(question))), data.draw(leaf)
        # nobody dropped out: an empty list of ids is no garbage, but what the server really asks
        assume(wire.encode({"": value}) != wire.encode({"": question[name]}))
        question[name] = value
    else:
        question = data.draw(
            st.one_of(
                leaf,
                st.lists(leaf, max_size=2),
                st.dictionaries(st.sampled_from(sorted(question)), leaf),
            )
        )
    before = e.clients[0].state
    with pytest.raises(SecureError):
        getattr(e.clients[0], phase)(question, *([numbers(4)[0]] if phase == "mask" else []))
    assert e.clients[0].state is before


GARBAGE = {phase: Exchange(numbers(4)).up_to(phase) for phase in PHASES[1:]}


# -- state -----------------------------------------------------------------------------------------


def test_states_hold_what_is_needed_and_say_what_is_secret():
    """`Exchange` takes every state through the wire.

    Here: what is in it, phase by phase; keys are forgotten when they are used.
    """
    public = {"id", "phase", "offer", "public", "ids", "needed"}
    e, kept = Exchange(numbers(4)), []
    kept.append(set(e.clients[0].export()))
    for phase in PHASES:
        e.ask(phase).then()
        kept.append(set(e.clients[0].export()))
    assert kept[1] - public == {"cipher_key", "mask_key"}
    assert kept[2] - public == {"mask_key", "seed", "shares", "box_keys"}
    assert kept[3] - public == {"shares"}
    assert kept[0] - public == kept[4] - public == set()
    assert set().union(*kept) - public == set(SECRETS)


def test_an_exported_state_is_a_copy():
    e = Exchange(numbers(4)).up_to("unmask")
    saved = e.clients[0].export()
    e.ask("unmask")
    assert saved.phase == "unmask" and e.clients[0].state.phase == "nothing more"


# -- what the server refuses -----------------------------------------------------------------------

BAD_ANSWERS = {
    ("advertise", "no dict"): lambda m: None,
    ("advertise", "of another exchange"): lambda m: changed(m, tag=put(0, m["tag"][0] ^ 1)),
    ("advertise", "short keys"): lambda m: changed(m, keys=lambda t: t[:, :31]),
    ("share", "of another exchange"): lambda m: changed(m, tag=put(0, m["tag"][0] ^ 1)),
    ("share", "a box too few"): lambda m: changed(m, boxes=lambda t: t[1:]),
    ("share", "garbage"): lambda m: {"boxes": []},
    ("mask", "of another exchange"): lambda m: changed(m, tag=put(0, m["tag"][0] ^ 1)),
    ("mask", "of another width"): lambda m: changed(m, reply=lambda t: t.long()),
    ("mask", "of another length"): lambda m: changed(m, reply=lambda t: t[1:]),
    ("mask", "of another shape"): lambda m: changed(m, reply=lambda t: t.view(5, 1)),
    ("mask", "in another tree"): lambda m: {**m, "reply": [m["reply"]]},
    ("mask", "with numbers"): lambda m: {**m, "reply": 3},
    ("mask", "of unknown types"): lambda m: {**m, "dtypes": ["object"]},
    ("mask", "of other types"): lambda m: {**m, "dtypes": ["float32"]},
    ("mask", "without types"): lambda m: {**m, "dtypes": None},
    ("mask", "garbage"): lambda m: 7,
    ("unmask", "of another exchange"): lambda m: changed(m, tag=put(0, m["tag"][0] ^ 1)),
    ("unmask", "a share too few"): lambda m: changed(m, seeds=lambda t: t[1:]),
    ("unmask", "out of range"): lambda m: changed(m, seeds=put((0, 0), shamir.P)),
    ("unmask", "negative"): lambda m: changed(m, keys=put((0, 0), -1)),
    ("unmask", "garbage"): lambda m: [1, 2],
}


@pytest.mark.parametrize("phase", PHASES)
def test_bad_answers_are_left_out_and_named(phase):
    """Client 4 answers nonsense, first or last; the sum is that of the others."""
    x = numbers(7)
    for (where, _), spoil in BAD_ANSWERS.items():
        if where != phase:
            continue
        for bad in (0, 6):
            e = Exchange(x)
            for name in PHASES:
                # so that there are shares of keys as well
                e.ask(name, [3] if name == "mask" else ())
                if name == phase:
                    e.answers[name][bad] = spoil(e.answers[name][bad])
                result = e.then()
            ids = [i for i in range(7) if i != 3 and (i != bad or phase == "unmask")]
            assert result.ids == tuple(ids)
            assert torch.allclose(result.mean(), plain(x, [1] * 7, ids), atol=1e-5)
            assert e.server.faults[bad].startswith(f"{phase}: ")
            assert set(e.server.faults) == {3, bad}


def test_unknown_clients_and_second_replies_do_not_count():
    x = numbers(4)
    e = Exchange(x).up_to("mask").ask("mask")
    e.server.add(0, e.answers["mask"][0])
    e.server.add(9, e.answers["mask"][1])
    e.server.add(0, e.answers["mask"][0])  # marked as a fault, and not added again
    for i in (1, 2, 3):
        e.server.add(i, e.answers["mask"][i])
    e.questions["unmask"] = e.server.request()
    total = e.server.total(e.ask("unmask").answers["unmask"] | {9: {}})
    assert torch.allclose(total.mean(), plain(x, [1] * 4, range(4)), atol=1e-5)


def test_a_key_that_two_advertise_leaves_both_out():
    e = Exchange(numbers(7)).ask("advertise")
    e.answers["advertise"][5] = e.answers["advertise"][2]
    e.then()
    assert e.server.alive == [0, 1, 3, 4, 6]
    assert "the same" in e.server.faults[2] and "the same" in e.server.faults[5]


@pytest.mark.parametrize("secret", ["seeds", "keys"])
def test_altered_shares_stop_everything(secret):
    """The secret that is rebuilt is checked against what was published: a wrong sum never comes
    out.
    """
    e = Exchange(numbers(7)).up_to("mask").ask("mask", [3]).then().ask("unmask")
    for i in (0, 1):
        answer = e.answers["unmask"][i]
        e.answers["unmask"][i] = changed(
            answer, **{secret: put((0, 8), (answer[secret][0, 8] + 1) % shamir.P)}
        )
    with pytest.raises(
        SecureError,
        match=f"round 3: the secret of client {0 if secret == 'seeds' else 3} is not right",
    ):
        e.then()


def test_weights_are_checked_and_their_common_divisor_taken_out():
    assert SecureServer(CONFIG, {0: 600, 1: 900}, session="s").offer()["weight"] == 5
    assert SecureServer(CONFIG, {0: 600, 1: 900}, session="s").offer()["unit"] == 300
    config = SecureAggregation(range=1.0, bits=16)
    assert SecureServer(config, dict.fromkeys(range(100), 6000), session="s").width == 32
    for weights, message in (
        ({0: 1}, "at least 2 clients"),
        ({0: 0, 1: 0}, "must not all be 0"),
        ({0: 1, 1: 0.5}, r"weights\[1\]=0.5"),
        ({0: 1, 1: -1}, "-1"),
    ):
        with pytest.raises(ConfigError, match=message):
            SecureServer(config, weights, session="s")


def test_a_client_of_weight_zero_changes_nothing():
    x = numbers(3)
    total = Exchange(x, weights=[2, 0, 6]).run()
    assert total.weight == 8
    assert torch.allclose(total.mean(), (x[0] + 3 * x[2]) / 4, atol=1e-5)
    with pytest.raises(TooFewClients, match="weight 0; nothing was unmasked"):
        Exchange(x, weights=[0, 0, 6]).run({"mask": [2]})


def test_numbers_of_numpy_do_as_ids_and_weights():
    ids, rows = torch.tensor([4, 9]), np.array([3, 6])
    server = SecureServer(
        CONFIG, dict(zip(ids.numpy(), rows, strict=True)), session="s", round=np.int64(2)
    )
    offer = {"session": "s", "round": 2, "exchange": 0, "clients": 2, "weight": 3, "unit": 3}
    offer["question"] = "0" * 64
    assert wire.decode(wire.encode(server.offer())) == offer


# -- signatures ------------------------------------------------------------------------------------


def test_signed_keys():
    """With the clients' own signatures, a server that puts in keys of its own is found out."""
    signers = [Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in range(4)]
    verify = verifier({i: s.public_key().public_bytes_raw() for i, s in enumerate(signers)})
    hooks = {"sign": lambda i: signers[i].sign, "verify": lambda i: verify}
    x = numbers(4)
    assert torch.allclose(
        Exchange(x, **hooks).run({"mask": [1]}).mean(), plain(x, [1] * 4, [0, 2, 3]), atol=1e-5
    )

    def refused(tamper):
        e = Exchange(x, **hooks).up_to("share")
        with pytest.raises(SecureError, match=r"signed by it|no signatures"):
            e.clients[0].share(tamper(e.questions["share"][0]))

    mine = torch.frombuffer(bytearray(public_key(b"m" * 32)), dtype=torch.uint8)
    refused(lambda m: changed(m, keys=put((2, 1), mine)))
    refused(lambda m: changed(m, signatures=put((2, 0), m["signatures"][2, 0] ^ 1)))
    refused(lambda m: changed(m, signatures=lambda t: t[[0, 2, 1, 3]]))
    refused(lambda m: changed(m, ids=put(2, 9)))
    refused(lambda m: {k: v for k, v in m.items() if k != "signatures"})
    refused(lambda m: changed(m, signatures=lambda t: t[:3]))
    # signed, but for another round
    old = Exchange(x, round=2, **hooks).up_to("share").questions["share"][0]
    refused(
        lambda m: changed(m, keys=put(2, old["keys"][2]), signatures=put(2, old["signatures"][2]))
    )


def test_a_server_may_check_signatures_too():
    signers = [Ed25519PrivateKey.generate() for _ in range(4)]
    verify = verifier({i: s.public_key().public_bytes_raw() for i, s in enumerate(signers)})
    clients = {i: SecureClient(i, CONFIG, sign=signers[i].sign) for i in range(3)} | {
        3: SecureClient(3, CONFIG)
    }
    server = SecureServer(CONFIG, dict.fromkeys(range(4), 1), session="s", verify=verify)
    server.keys({i: c.advertise(server.offer()) for i, c in clients.items()})
    assert server.alive == [0, 1, 2] and "not signed" in server.faults[3]


# -- in one process --------------------------------------------------------------------------------


def test_bytes_are_those_of_the_wire():
    """By phase, also with dropouts: what `Exchange` sends, encoded."""
    x, silent = numbers(9, 50), {"advertise": [1], "mask": [2], "unmask": [3]}
    out, e = (
        aggregate(x, [5] * 9, CONFIG, dropouts=silent, session="s", round=3, exchange=1),
        Exchange(x, weights=[5] * 9),
    )
    e.run(silent)
    for phase in PHASES:
        down = sum(len(wire.encode(q)) for q in e.questions[phase].values())
        up = sum(len(wire.encode(a)) for a in e.answers[phase].values())
        assert (out.phases[phase].up, out.phases[phase].down) == (up, down)
        assert out.phases[phase].messages == len(e.answers[phase])
    assert out.bytes_up == sum(p.up for p in out.phases.values()) > 7 * 4 * 50
    assert out.bytes_down == sum(p.down for p in out.phases.values())
    assert set(out.faults) == {1, 2, 3}
    assert all(s > 0 for s in out.seconds.values())


def test_arguments_of_aggregate():
    with pytest.raises(
        ConfigError, match="dropouts: 'later' is not a phase; use advertise, share, mask, unmask"
    ):
        aggregate(numbers(3), dropouts={"later": [1]})
    with pytest.raises(ConfigError, match="at least 2 clients, got 1"):
        aggregate(numbers(1))
    with pytest.raises(ReplyError, match="client 1"):
        aggregate([torch.zeros(1), torch.full((1,), 99.0)])
    assert issubclass(SecureError, FoedusError)


def test_without_cryptography_the_error_says_what_to_install():
    code = """
import sys
sys.modules["cryptography"] = None
from foedus.errors import ConfigError
from foedus.aggregation.secure.protocol import SecureAggregation
SecureAggregation()
try:
    import foedus.aggregation.secure.simulated
except ConfigError as error:
    print(error)
"""
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert "needs the package cryptography" in shown and "pip install 'foedus[secure]'" in shown


def test_numbers_that_no_secret_has_are_refused():
    """Limbs have 30 bits, and the ninth 16: with a threshold of 1, a share is the secret itself."""
    share = np.zeros((1, 9), np.int32)
    assert shamir.combine(np.array([1]), share) == bytes(32)
    for limb, value in ((0, 1 << 30), (8, 1 << 16)):
        altered = share.copy()
        altered[0, limb] = value
        with pytest.raises(SecureError, match="altered"):
            shamir.combine(np.array([1]), altered)


def test_a_box_has_a_key_for_its_receiver_alone():
    keys = {
        box_key(b"t" * 32, b"a" * 32, sender, receiver) for sender in (1, 2) for receiver in (1, 2)
    }
    assert len(keys) == 4
