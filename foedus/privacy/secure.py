"""Secure aggregation: the server learns the weighted sum of the replies and no single one.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, with double masking; for many
clients on the random graph of Bell et al., CCS 2020 (`foedus.privacy.graph`). Client u turns its reply into whole numbers x_u
(`foedus.privacy.fixedpoint`) and sends, modulo 2^32 or 2^64,

    y_u = w_u x_u + PRG(b_u) + sum over neighbours v > u of PRG(s_uv) - sum over neighbours v < u of PRG(s_uv)

s_uv is what u and v agree on by X25519, so that these masks cancel in the sum; b_u is u's own. Both u's secret mask key and b_u are
shared among u and its neighbours (`foedus.privacy.shamir`), t shares rebuilding them. Four messages go each way:

    advertise   offer: session, round, exchange, settings         -> two X25519 public keys
    share       the neighbours' public keys                       -> a box of shares for each neighbour; SHA-256 of b_u
    mask        the boxes from the neighbours                     -> y_u, as a tree in the form of the reply
    unmask      who of the neighbours survived, who dropped out   -> shares of b_v of survivors, of the mask key of the others

The server subtracts PRG(b_u) of those whose y_u came, and the pairwise masks between them and those who dropped out after `share`.
Whatever is rebuilt is checked against its public key or its SHA-256 before use. PRG is AES-256 in counter mode under a key that is
used once; keys come from HKDF-SHA256, boxes are AES-256-GCM. Every derivation, box and signature is bound to a tag, the SHA-256 of
session, round, exchange, number of clients, weights and settings; and to sender and receiver. Randomness is the operating system's.

Weights are public: whole numbers (rows, or 1) that the server knows anyway. A client multiplies by its own, which it does not take
from the server, so that the server cannot make one reply stand out.

What is protected, against whom
-------------------------------
An honest-but-curious server, together with fewer than t clients of any neighbourhood, learns sums over the survivors of the round,
who took part, their weights and the shapes of replies. On the random graph this holds but for a probability of 2^-40, if at most a
tenth of the clients collude, and the order of the ring is drawn at random by the server.

Of a server that deviates, clients refuse: another tag (a replay of another session, round or exchange, or other settings); a key
list without their own keys as they are, with a key or a client twice, or with too few or too many clients; boxes that
were altered or come from elsewhere; an unmask request that names a client as both survivor and dropped out, that names others
than those whose masks were used or leaves some out, that calls the client itself dropped out, that leaves fewer than t
survivors, or that comes a second time. Telling some clients that u survived and others that it dropped out yields both secrets of u
only with 2 t - m or more colluding clients among its m holders: with threshold 2/3, a third of them.

Not protected: the sum itself (with two survivors, each knows the other's reply; differential privacy is for that); sums of two
rounds, or of one round run twice, whose clients differ by one; correctness against clients who send wrong numbers; a server
that invents clients or keys. For the last, give `sign` and `verify` (Ed25519, say): then keys must be signed by the clients they are said
to belong to. Messages themselves should go through TLS. What it costs: replies are dense, of 4 or 8 bytes a number.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import struct
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foedus.core import tree, wire
from foedus.core.tree import State, Tree
from foedus.errors import ConfigError, FoedusError, SecureError, TooFewClients, whole_number
from foedus.privacy import graph, shamir
from foedus.privacy.fixedpoint import FixedPoint, Noise, dense, dtype_of
from foedus.privacy.shamir import LIMBS, SECRET, Entropy

PHASES = ("advertise", "share", "mask", "unmask")
SECRETS = ("cipher_key", "mask_key", "seed", "shares")
"""What of an exported client state must not leave the client."""
_NONCE, _SIGNATURE = 12, 64
_BOX = _NONCE + 2 * LIMBS * 4 + 16
_CHUNK = 1 << 20
_ZEROS = memoryview(bytes(_CHUNK))

Sign = Callable[[bytes], bytes]
Verify = Callable[[int, bytes, bytes], bool]
"""Whether client (an id) has signed these bytes with this signature of 64 bytes."""


@functools.cache
def _crypto() -> SimpleNamespace:
    """What is used of the `cryptography` package, imported when it is needed."""
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as error:
        why = f"secure aggregation needs the package cryptography, which is not there ({error})"
        raise ConfigError(f"{why}: pip install 'foedus[secure]'") from error
    return SimpleNamespace(**locals())


@dataclass(frozen=True)
class SecureAggregation:
    """Settings of secure aggregation.

    threshold: the part of the clients that must stay to the end, and of a neighbourhood's shares that rebuild a secret; above 1/2.
    neighbours: with how many others a client shares masks (an even number), or "auto": see `foedus.privacy.graph`.
    range, bits, rounding, headroom: of the fixed-point numbers, see `foedus.privacy.fixedpoint.FixedPoint`. The step is
        range / 2^(bits - 1); a number beyond the range is an error at the client.
    """

    threshold: float = 2 / 3
    neighbours: int | str = "auto"
    range: float = 16.0
    bits: int = 24
    rounding: str = "nearest"
    headroom: int = 0

    def __post_init__(self) -> None:
        t, k = self.threshold, self.neighbours
        if isinstance(t, bool) or not isinstance(t, int | float) or not 0.5 < t <= 1:
            raise ConfigError(
                f"threshold={t!r} must be above 1/2 and at most 1: with less, two halves could be told different things"
            )
        if k != "auto" and (isinstance(k, bool) or not isinstance(k, int) or k < 2 or k % 2):
            raise ConfigError(f"neighbours={k!r} must be 'auto' or an even number of at least 2")
        self.fixed_point  # noqa: B018 - checks the others

    @property
    def fixed_point(self) -> FixedPoint:
        return FixedPoint(self.range, self.bits, self.rounding, self.headroom)

    def degree(self, clients: int) -> int:
        """The number of neighbours of each of so many clients."""
        return graph.degree(clients, self.threshold) if self.neighbours == "auto" else min(self.neighbours, clients - 1)

    def needed(self, count: int) -> int:
        """How many of so many clients, or of so many shares, are needed."""
        return graph.part(self.threshold, count)


@dataclass(frozen=True)
class Offer:
    """What a server proposes to all: which exchange this is, for how many clients of how much weight, in units of `unit`."""

    session: str
    round: int
    exchange: int
    clients: int
    weight: int
    unit: int = 1

    @classmethod
    def read(cls, message: Tree) -> Offer:
        names = list(cls.__dataclass_fields__)
        if not isinstance(message, dict) or set(message) != set(names):
            raise SecureError(f"the offer must have the fields {', '.join(names)}")
        least = {"round": 0, "exchange": 0, "clients": 2, "weight": 1, "unit": 1}
        for name, low in least.items():
            if type(message[name]) is not int or message[name] < low:
                raise SecureError(f"the offer's {name}={message[name]!r} must be a whole number of at least {low}")
        if not isinstance(message["session"], str) or not 0 < len(message["session"]) <= 256:
            raise SecureError("the offer's session must be a text of at most 256 characters")
        return cls(**message)

    def tag(self, config: SecureAggregation) -> bytes:
        """What every message, key, box and signature of the exchange is bound to."""
        settings = [float(config.threshold), config.neighbours, float(config.range), config.bits, config.headroom]
        return hashlib.sha256(wire.encode(["foedus secure aggregation 1", vars(self), settings])).digest()


# -- primitives --------------------------------------------------------------------------------------------------------


def _public(secret: bytes) -> bytes:
    return _crypto().X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def agree(secret: bytes, public: bytes) -> bytes:
    """X25519: what two have in common, from the secret key of one and the public key of the other."""
    c = _crypto()
    try:
        return c.X25519PrivateKey.from_private_bytes(secret).exchange(c.X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise SecureError(f"{public.hex()} is no public key to agree on anything with") from None


def derive(secret: bytes, *info: bytes) -> bytes:
    """HKDF-SHA256: a key for one purpose; `info` is what it is bound to, each part with its length."""
    c = _crypto()
    bound = b"".join(struct.pack("<I", len(part)) + part for part in info)
    return c.HKDF(algorithm=c.SHA256(), length=32, salt=None, info=bound).derive(secret)


def _who(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}q", *ids)


def pair_key(tag: bytes, secret: bytes, public: bytes, mine: int, other: int, other_public: bytes) -> bytes:
    """The key of the mask that two clients have in common, the same from both sides; keys are theirs for masks."""
    first, last = sorted([(mine, public), (other, other_public)])
    return derive(agree(secret, other_public), b"pair", tag, _who(first[0], last[0]), first[1], last[1])


def self_key(tag: bytes, seed: bytes, client: int) -> bytes:
    """The key of a client's own mask."""
    return derive(seed, b"self", tag, _who(client))


def box_key(tag: bytes, secret: bytes, public: bytes, sender: int, receiver: int) -> bytes:
    """The key of the box that one client sends to another; keys are theirs for boxes."""
    return derive(agree(secret, public), b"box", tag, _who(sender, receiver))


def _bound(kind: bytes, tag: bytes, *ids: int) -> bytes:
    return b"foedus/" + kind + tag + _who(*ids)


def commitment(tag: bytes, seed: bytes, client: int) -> bytes:
    """What shows a rebuilt seed to be the right one, and nothing about it before."""
    return hashlib.sha256(_bound(b"seed", tag, client) + seed).digest()


def add_mask(numbers: np.ndarray, key: bytes, subtract: bool = False) -> None:
    """Add the stream of a key to unsigned numbers in place (or subtract it), modulo their width: AES-256-CTR from 0."""
    c = _crypto()
    stream = c.Cipher(c.algorithms.AES(key), c.modes.CTR(bytes(16))).encryptor()
    buffer = np.empty(min(_CHUNK, numbers.nbytes) + 16, np.uint8)
    change, length = np.subtract if subtract else np.add, _CHUNK // numbers.itemsize
    for at in range(0, len(numbers), length):
        part = numbers[at : at + length]
        stream.update_into(_ZEROS[: part.nbytes], buffer)
        change(part, buffer[: part.nbytes].view(part.dtype), out=part)


# -- messages ----------------------------------------------------------------------------------------------------------


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _fields(message: Tree, what: str, tag: bytes, **expected: tuple) -> list[np.ndarray]:
    """The tensors of a message that has this tag and these fields: name -> (dtype, *shape), None for any size."""
    expected = {"tag": (torch.uint8, 32), **expected}
    if not isinstance(message, dict) or set(message) != set(expected):
        got = ", ".join(map(str, message)) if isinstance(message, dict) else f"a {type(message).__name__}"
        raise SecureError(f"{what} must have the fields {', '.join(expected)}, got {got}")
    for name, (dtype, *shape) in expected.items():
        t = message[name]
        fits = isinstance(t, Tensor) and t.dtype == dtype and t.dim() == len(shape)
        if not fits or any(n is not None and n != m for n, m in zip(shape, t.shape, strict=True)):
            raise SecureError(f"{what}: {name} must be {dtype} {['any' if n is None else n for n in shape]}")
    if message["tag"].numpy().tobytes() != tag:
        raise SecureError(f"{what} belongs to another session, round or exchange, or to other settings")
    return [message[name].numpy() for name in expected if name != "tag"]


def _distinct(ids: np.ndarray, what: str) -> None:
    if len(np.unique(ids)) < len(ids):
        raise SecureError(f"{what} names a client twice")


# -- the client --------------------------------------------------------------------------------------------------------


class SecureClient:
    """A client in one exchange: `advertise`, `share`, `mask`, `unmask`, each once and in this order.

    `export` gives what must be kept between two messages as a tree of tensors, `restore` makes a client of it. The entries in
    `SECRETS` must stay with the client, and only the newest state must be kept: one that is taken back to an older state could be
    made to answer twice. Write it before the answer is sent. Keys and seed are gone after `mask`, all of it after `unmask`.

    sign, verify: sign the client's public keys, and check those of others. entropy: for tests only.
    """

    def __init__(
        self,
        id: int,
        config: SecureAggregation,
        *,
        sign: Sign | None = None,
        verify: Verify | None = None,
        entropy: Entropy = os.urandom,
    ):
        _crypto()
        self.id, self.config, self.sign, self.verify, self.entropy = int(id), config, sign, verify, entropy
        self.state = State(id=self.id, phase="advertise")

    def export(self) -> State:
        """What must be kept until the next message."""
        return self.state.replace()

    @classmethod
    def restore(cls, state: Mapping[str, Tree], config: SecureAggregation, **hooks: Any) -> SecureClient:
        """The client that exported this state."""
        new = cls(state["id"], config, **hooks)
        new.state = State(state)
        return new

    def _at(self, phase: str) -> tuple[State, Offer, bytes]:
        if self.state.phase != phase:
            raise SecureError(f"client {self.id} is asked to {phase}, but what it can do next is {self.state.phase}")
        offer = Offer(**self.state.offer) if "offer" in self.state else None
        return self.state, offer, offer.tag(self.config) if offer else b""

    def advertise(self, offer: Tree) -> Tree:
        """Two public keys: one for boxes, one for masks."""
        self._at("advertise")
        accepted = Offer.read(offer)
        self.config.fixed_point.width(accepted.weight, accepted.clients)
        cipher, mask, tag = self.entropy(SECRET), self.entropy(SECRET), accepted.tag(self.config)
        public = _public(cipher) + _public(mask)
        answer = {"tag": _tensor(tag), "keys": _tensor(public).view(2, 32)}
        if self.sign is not None:
            answer["signature"] = _tensor(self.sign(_bound(b"keys", tag, self.id) + public))
        self.state = State(
            id=self.id,
            phase="share",
            offer=dict(offer),
            cipher_key=_tensor(cipher),
            mask_key=_tensor(mask),
            public=answer["keys"],
        )
        return answer

    def share(self, message: Tree) -> Tree:
        """A box of shares for each neighbour, in the order of the key list."""
        s, offer, tag = self._at("share")
        message = dict(message) if isinstance(message, dict) else message
        signatures = message.pop("signatures", None) if isinstance(message, dict) else None
        spec = {"ids": (torch.int64, None), "keys": (torch.uint8, None, 2, 32)}
        ids, keys = _fields(message, "the key list", tag, **spec)
        self._check_list(offer, tag, ids, keys, signatures)
        seed, mask_key, cipher_key = (self.entropy(SECRET), _bytes(s.mask_key), _bytes(s.cipher_key))
        shares = shamir.split([mask_key, seed], self.config.needed(len(ids)), len(ids), self.entropy)
        boxes = bytearray()
        own = int(np.flatnonzero(ids == self.id)[0])
        for i, other in enumerate(ids.tolist()):
            if i == own:
                continue
            nonce, key = self.entropy(_NONCE), box_key(tag, cipher_key, keys[i, 0].tobytes(), self.id, other)
            bound = _bound(b"box", tag, self.id, other)
            boxes += nonce + _crypto().AESGCM(key).encrypt(nonce, shares[i].tobytes(), bound)
        self.state = s.replace(
            phase="mask",
            seed=_tensor(seed),
            ids=torch.from_numpy(ids.copy()),
            keys=torch.from_numpy(keys.copy()),
            shares=torch.from_numpy(shares[own].copy()),
        )
        answer = torch.frombuffer(boxes, dtype=torch.uint8).view(-1, _BOX)
        return {"tag": _tensor(tag), "boxes": answer, "commitment": _tensor(commitment(tag, seed, self.id))}

    def _check_list(self, offer: Offer, tag: bytes, ids: np.ndarray, keys: np.ndarray, signatures: Tree) -> None:
        """Refuse a list of keys that was tampered with."""
        _distinct(ids, "the key list")
        if len({key.tobytes() for key in keys.reshape(-1, 32)}) < 2 * len(ids):
            raise SecureError("the key list has a key twice")
        own = np.flatnonzero(ids == self.id)
        if not len(own) or keys[own[0]].tobytes() != _bytes(self.state.public):
            raise SecureError(f"the key list does not have the keys of client {self.id} as they were sent")
        most = self.config.degree(offer.clients) + 1
        least = min(most, self.config.needed(offer.clients))
        if not least <= len(ids) <= most:
            raise SecureError(
                f"the key list has {len(ids)} clients; with {offer.clients} in all there must be {least} to {most}"
            )
        if self.verify is None:
            return
        shape = (len(ids), _SIGNATURE)
        if not isinstance(signatures, Tensor) or signatures.dtype != torch.uint8 or tuple(signatures.shape) != shape:
            raise SecureError("the key list has no signatures")
        for i, other in enumerate(ids.tolist()):
            if not self.verify(other, _bound(b"keys", tag, other) + keys[i].tobytes(), _bytes(signatures[i])):
                raise SecureError(f"the keys in the key list of client {other} are not signed by it")

    def mask(self, message: Tree, reply: Tree, weight: int = 1, noise: Noise | None = None) -> Tree:
        """The masked reply: a tree in the form of the reply, of whole numbers that look random.

        weight: this client's, by which the reply is multiplied. noise: gives whole numbers to add before masking.
        """
        s, offer, tag = self._at("mask")
        sources, boxes = _fields(message, "the boxes", tag, ids=(torch.int64, None), boxes=(torch.uint8, None, _BOX))
        if len(sources) != len(boxes):
            raise SecureError(f"there are {len(boxes)} boxes of {len(sources)} clients")
        _distinct(sources, "the boxes")
        ids, keys = s.ids.numpy(), s.keys.numpy()
        place = {other: i for i, other in enumerate(ids.tolist()) if other != self.id}
        if strange := [i for i in sources.tolist() if i not in place]:
            raise SecureError(f"the boxes are not all of neighbours: client {strange[0]} is none")
        if len(sources) + 1 < self.config.needed(len(ids)):
            raise SecureError(
                f"{len(sources) + 1} of {len(ids)} neighbours have shared keys; {self.config.needed(len(ids))} must"
            )
        shares = [(self.id, s.shares.numpy())]
        for other, box in zip(sources.tolist(), boxes, strict=True):
            key = box_key(tag, _bytes(s.cipher_key), keys[place[other], 0].tobytes(), other, self.id)
            shares.append((other, _opened(key, box.tobytes(), _bound(b"box", tag, other, self.id), other)))
        numbers = self._numbers(offer, reply := dense(reply), weight, noise)
        secret, public = _bytes(s.mask_key), _bytes(s.public[1])
        add_mask(numbers, self_key(tag, _bytes(s.seed), self.id))
        for other in sources.tolist():
            key = pair_key(tag, secret, public, self.id, other, keys[place[other], 1].tobytes())
            add_mask(numbers, key, subtract=other < self.id)
        shares.sort(key=lambda pair: pair[0])
        self.state = State(
            id=self.id,
            phase="unmask",
            offer=s.offer,
            ids=torch.tensor([i for i, _ in shares]),
            shares=torch.from_numpy(np.stack([share for _, share in shares])),
            needed=self.config.needed(len(ids)),
        )
        leaves, structure = tree.flatten(reply)
        parts = torch.from_numpy(numbers.view(np.dtype(f"i{numbers.itemsize}"))).split([t.numel() for t in leaves])
        masked = [part.view(t.shape) for part, t in zip(parts, leaves, strict=True)]
        return {"tag": _tensor(tag), "reply": tree.unflatten(masked, structure), "dtypes": [dtype_of(t) for t in leaves]}

    def _numbers(self, offer: Offer, reply: Tree, weight: int, noise: Noise | None) -> np.ndarray:
        whole_number("weight", weight, 0)
        if weight % offer.unit or weight // offer.unit > offer.weight:
            raise SecureError(
                f"weight={weight} is not {offer.unit} times a whole number of at most {offer.weight}, as was offered"
            )
        points, width = self.config.fixed_point, self.config.fixed_point.width(offer.weight, offer.clients)
        about = {"noise": noise, "entropy": self.entropy, "round": offer.round, "client": self.id}
        return points.encode(reply, weight // offer.unit, width, **about)

    def unmask(self, message: Tree) -> Tree:
        """Shares of the seeds of those who survived and of the mask keys of those who dropped out: never both of one client."""
        s, _, tag = self._at("unmask")
        what = "the unmask request"
        there, gone = _fields(message, what, tag, survivors=(torch.int64, None), dropped=(torch.int64, None))
        named, ids = np.concatenate([there, gone]), s.ids.numpy()
        if len(np.intersect1d(there, gone)):
            raise SecureError(f"{what} asks for both secrets of client {np.intersect1d(there, gone)[0]}")
        _distinct(named, what)
        if not np.array_equal(np.sort(named), ids):
            raise SecureError(f"{what} does not name exactly the clients whose masks client {self.id} used")
        if self.id in gone:
            raise SecureError(f"{what} says that client {self.id} itself has dropped out")
        if len(there) < s.needed:
            raise SecureError(f"{what} leaves {len(there)} survivors of {len(ids)}; {s.needed} are needed")
        shares = s.shares.numpy()
        seeds, keys = shares[np.searchsorted(ids, there), 1], shares[np.searchsorted(ids, gone), 0]
        self.state = State(id=self.id, phase="nothing more", offer=s.offer)
        return {"tag": _tensor(tag), "seeds": torch.from_numpy(seeds), "keys": torch.from_numpy(keys)}


def _bytes(t: Tensor) -> bytes:
    return t.numpy().tobytes()


def _opened(key: bytes, box: bytes, bound: bytes, sender: int) -> np.ndarray:
    c = _crypto()
    try:
        data = c.AESGCM(key).decrypt(box[:_NONCE], box[_NONCE:], bound)
    except c.InvalidTag:
        raise SecureError(f"the box from client {sender} was altered, or is not from it") from None
    return np.frombuffer(data, np.int32).reshape(2, LIMBS)


# -- the server --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Total:
    """What comes out: the weighted sum (float64), the weight and the ids of those whose replies are in it."""

    sum: Tree
    weight: int
    ids: tuple[int, ...]
    dtypes: tuple[str, ...]

    def mean(self) -> Tree:
        """The weighted mean, in the types of the replies."""
        leaves, structure = tree.flatten(self.sum)
        means = [(t / self.weight).to(wire.NAMES[d]) for t, d in zip(leaves, self.dtypes, strict=True)]
        return tree.unflatten(means, structure)


@dataclass
class _Sum:
    """Masked replies of one form, added up."""

    numbers: np.ndarray
    structure: Any
    shapes: list[tuple[int, ...]]
    dtypes: tuple[str, ...]
    ids: list[int] = field(default_factory=list)


class SecureServer:
    """The server in one exchange: `offer`, `keys`, `boxes`, `add` for each masked reply, `request`, `total`, in this order.

    Messages to clients come as {id: message}; answers are taken as {id: answer}. Those who do not answer, or not well, are left out
    and named in `faults`; too few are an error (`TooFewClients`), and nothing is unmasked.

    weights: of the clients that are asked, whole numbers. Their greatest common divisor is taken out, to keep the modulus small.
    """

    def __init__(
        self,
        config: SecureAggregation,
        weights: Mapping[int, int],
        *,
        session: str,
        round: int = 0,
        exchange: int = 0,
        verify: Verify | None = None,
        entropy: Entropy = os.urandom,
    ):
        _crypto()
        for i, weight in weights.items():
            whole_number(f"weights[{i}]", weight, 0)
        if len(weights) < 2:
            raise ConfigError(f"secure aggregation needs at least 2 clients, got {len(weights)}: the sum would be the reply")
        if not any(weights.values()):
            raise ConfigError("weights must not all be 0")
        self.config, self.weights, self.verify, self.entropy = config, dict(weights), verify, entropy
        unit = math.gcd(*weights.values())
        self.asked = Offer(session, round, exchange, len(weights), sum(weights.values()) // unit, unit)
        self.tag, self.minimum = self.asked.tag(config), config.needed(len(weights))
        self.width = config.fixed_point.width(self.asked.weight, self.asked.clients)
        self.faults: dict[int, str] = {}
        self.alive = sorted(weights)
        self.sums: dict[tuple, _Sum] = {}

    def offer(self) -> Tree:
        """The first message, the same for all."""
        return dict(vars(self.asked))

    def _gather(self, phase: str, answers: Mapping[int, Tree], read: Callable[[int, Tree], Any]) -> dict[int, Any]:
        """What can be read of the answers of those who are still there; the others are left out."""
        good = {}
        for i in self.alive:
            try:
                if i not in answers:
                    raise SecureError("it did not answer")
                good[i] = read(i, answers[i])
            except FoedusError as error:
                self.faults[i] = f"{phase}: {error}"
        self._enough(phase, good)
        return good

    def _enough(self, phase: str, left: Collection[int]) -> None:
        self.alive = sorted(left)
        if len(left) < self.minimum:
            why = "; ".join(f"client {i}: {self.faults[i]}" for i in sorted(self.faults)[:5])
            raise TooFewClients(
                f"round {self.asked.round}: {phase}: {len(left)} of {self.asked.clients} clients are left, "
                f"threshold={self.config.threshold:.3g} needs {self.minimum}; nothing was unmasked ({why})"
            )

    def keys(self, adverts: Mapping[int, Tree]) -> dict[int, Tree]:
        """From public keys to each client's list of its neighbours' keys."""
        signatures: dict[int, bytes] = {}

        def read(i: int, advert: Tree) -> np.ndarray:
            advert = dict(advert) if isinstance(advert, dict) else advert
            signature = advert.pop("signature", None) if isinstance(advert, dict) else None
            (keys,) = _fields(advert, "its keys", self.tag, keys=(torch.uint8, 2, 32))
            if isinstance(signature, Tensor) and signature.dtype == torch.uint8 and tuple(signature.shape) == (_SIGNATURE,):
                signatures[i] = _bytes(signature)
            if self.verify is not None and not self.verify(
                i, _bound(b"keys", self.tag, i) + keys.tobytes(), signatures.get(i, b"")
            ):
                raise SecureError("its keys are not signed by it")
            return keys

        found = self._gather("advertise", adverts, read)
        owners: dict[bytes, list[int]] = {}
        for i, keys in found.items():
            for key in keys:
                owners.setdefault(key.tobytes(), []).append(i)
        for i in {i for same in owners.values() if len(same) > 1 for i in same}:
            del found[i]
            self.faults[i] = "advertise: another key is the same as its"
        self._enough("advertise", found)
        self.ids = np.array(self.alive)
        self.public = np.stack([found[i] for i in self.alive])
        self.k = self.config.degree(self.asked.clients)
        self.order = graph.ring(len(self.ids), self.entropy)
        self.around = graph.neighbourhoods(self.order, self.k)
        self.place = {i: p for p, i in enumerate(self.alive)}
        self.needed = self.config.needed(self.around.shape[1])
        signed = np.stack([np.frombuffer(signatures.get(i, bytes(64)), np.uint8) for i in self.alive]) if signatures else None
        lists = {}
        for i, near in zip(self.alive, self.around, strict=True):
            lists[i] = self._message(ids=self.ids[near], keys=self.public[near])
            if signed is not None:
                lists[i]["signatures"] = torch.from_numpy(signed[near])
        return lists

    def _message(self, **arrays: np.ndarray) -> Tree:
        return {"tag": _tensor(self.tag), **{name: torch.from_numpy(a) for name, a in arrays.items()}}

    def boxes(self, shares: Mapping[int, Tree]) -> dict[int, Tree]:
        """From each client's boxes to those that are for each client."""
        rows, spec = self.around.shape[1] - 1, {"commitment": (torch.uint8, 32)}
        spec["boxes"] = (torch.uint8, rows, _BOX)
        found = self._gather("share", shares, lambda i, m: _fields(m, "its shares", self.tag, **spec))
        self.shared = np.isin(self.ids, self.alive)
        self.commitments = {i: c.tobytes() for i, (c, _) in found.items()}
        inboxes = {}
        for i in self.alive:
            p = self.place[i]
            near = [q for q in self.around[p] if q != p and self.shared[q]]
            mine = np.empty((len(near), _BOX), np.uint8)
            for n, q in enumerate(near):  # in q's boxes p comes at its place among q's neighbours, q itself left out
                mine[n] = found[int(self.ids[q])][1][np.searchsorted(self.around[q], p) - (q < p)]
            inboxes[i] = self._message(ids=self.ids[near], boxes=mine)
        return inboxes

    def add(self, client: int, message: Tree) -> None:
        """Add one masked reply to the sum; one that cannot be used is left out."""
        try:
            if client not in self.commitments or any(client in s.ids for s in self.sums.values()):
                raise SecureError("it was not asked for a masked reply, or has sent one")
            if not isinstance(message, dict) or set(message) != {"tag", "reply", "dtypes"}:
                raise SecureError("its masked reply must have the fields tag, reply, dtypes")
            _fields({"tag": message["tag"]}, "its masked reply", self.tag)
            leaves, structure = tree.flatten(message["reply"])
            dtypes, whole = message["dtypes"], torch.int32 if self.width == 32 else torch.int64
            if not isinstance(dtypes, list) or [d for d in dtypes if d not in ("float16", "bfloat16", "float32", "float64")]:
                raise SecureError("its masked reply names no known types")
            if len(dtypes) != len(leaves) or not all(isinstance(t, Tensor) and t.dtype == whole for t in leaves):
                raise SecureError(f"its masked reply must be tensors of {whole}")
        except FoedusError as error:
            self.faults[client] = f"mask: {error}"
            return
        shapes = [tuple(t.shape) for t in leaves]
        form = (str(structure), tuple(shapes), tuple(dtypes))
        if form not in self.sums:
            numbers = np.zeros(sum(t.numel() for t in leaves), np.dtype(f"u{self.width // 8}"))
            self.sums[form] = _Sum(numbers, structure, shapes, tuple(dtypes))
        total = self.sums[form]
        total.ids.append(client)
        at = 0
        for t in leaves:
            part = total.numbers[at : at + t.numel()]
            part += t.reshape(-1).numpy().view(part.dtype)
            at += t.numel()

    def request(self) -> dict[int, Tree]:
        """Whom each survivor is asked about. Replies of another form than most have are left out."""
        forms = sorted(self.sums.values(), key=lambda s: -len(s.ids))
        for other in forms[1:]:
            self.faults |= dict.fromkeys(other.ids, "mask: its reply has another form than the others'")
        there = sorted(forms[0].ids) if forms else []
        for i in self.alive:
            if i not in there:
                self.faults.setdefault(i, "mask: it did not answer")
        self._enough("mask", there)
        self.masked = forms[0]
        self.there = np.isin(self.ids, there)
        self._hold(self.there, "mask")
        if not graph.connected(self.order, self.k, self.there):
            raise TooFewClients(f"round {self.asked.round}: the survivors' graph fell apart, so parts of the sum would be seen")
        questions = {}
        for i in there:
            near = self.around[self.place[i]]
            near = near[self.shared[near]]
            survived = self.there[near]
            questions[i] = self._message(survivors=self.ids[near[survived]], dropped=self.ids[near[~survived]])
        self.questions = questions
        return questions

    def _hold(self, present: np.ndarray, phase: str) -> None:
        """Refuse to go on where the secrets of a client that shared some could not be rebuilt."""
        holders = present[self.around].sum(1)
        short = np.flatnonzero(self.shared & (holders < self.needed))
        if len(short):
            p = short[0]
            raise TooFewClients(
                f"round {self.asked.round}: {phase}: {holders[p]} of the {self.around.shape[1]} holders of the secrets of client "
                f"{self.ids[p]} are left, {self.needed} are needed; nothing was unmasked"
            )

    def total(self, answers: Mapping[int, Tree]) -> Total:
        """Rebuild what is needed, take the masks off, and give the sum."""

        def read(i: int, answer: Tree) -> list[np.ndarray]:
            there, gone = self.questions[i]["survivors"], self.questions[i]["dropped"]
            spec = {"seeds": (torch.int32, len(there), LIMBS), "keys": (torch.int32, len(gone), LIMBS)}
            found = _fields(answer, "its shares", self.tag, **spec)
            if any(len(a) and not 0 <= a.min() <= a.max() < shamir.P for a in found):
                raise SecureError("its shares are out of range")
            return [there.numpy(), gone.numpy(), *found]

        found = self._gather("unmask", answers, read)
        self._hold(np.isin(self.ids, self.alive), "unmask")
        shares: dict[int, list[tuple[int, np.ndarray]]] = {}
        for i, (there, gone, seeds, keys) in found.items():
            for owner, share in zip((*there.tolist(), *gone.tolist()), (*seeds, *keys), strict=True):
                shares.setdefault(owner, []).append((self.place[i], share))
        numbers = self.masked.numbers
        for owner, held in shares.items():
            p = self.place[owner]
            points = np.searchsorted(self.around[p], [q for q, _ in held[: self.needed]]) + 1
            try:
                secret = shamir.combine(points, np.stack([share for _, share in held[: self.needed]]))
                (self._survived if self.there[p] else self._dropped)(numbers, p, secret)
            except SecureError as error:
                raise SecureError(f"round {self.asked.round}: the secret of client {owner} is not right: {error}") from None
        ids = tuple(sorted(self.masked.ids))
        real = torch.from_numpy(self.config.fixed_point.decode(numbers)).mul_(self.asked.unit)
        parts = real.split([math.prod(shape) for shape in self.masked.shapes])
        leaves = [part.view(shape) for part, shape in zip(parts, self.masked.shapes, strict=True)]
        weight = sum(self.weights[i] for i in ids)
        return Total(tree.unflatten(leaves, self.masked.structure), weight, ids, self.masked.dtypes)

    def _survived(self, numbers: np.ndarray, p: int, seed: bytes) -> None:
        """Take off a survivor's own mask."""
        client = int(self.ids[p])
        if commitment(self.tag, seed, client) != self.commitments[client]:
            raise SecureError("shares of its seed were altered")
        add_mask(numbers, self_key(self.tag, seed, client), subtract=True)

    def _dropped(self, numbers: np.ndarray, p: int, secret: bytes) -> None:
        """Take off what survivors added and subtracted for one who dropped out."""
        public, client = self.public[p, 1].tobytes(), int(self.ids[p])
        if _public(secret) != public:
            raise SecureError("shares of its key were altered")
        for q in self.around[p]:
            if self.there[q]:
                other = int(self.ids[q])
                key = pair_key(self.tag, secret, public, client, other, self.public[q, 1].tobytes())
                add_mask(numbers, key, subtract=other < client)


# -- all in one process ------------------------------------------------------------------------------------------------


@dataclass
class Phase:
    """What one phase sends: bytes as encoded, and messages of clients."""

    up: int = 0
    down: int = 0
    messages: int = 0


@dataclass(eq=False)
class Outcome:
    """The sum, what it cost by phase, the seconds of all clients together and of the server, and who was left out, and why."""

    total: Total
    phases: dict[str, Phase]
    seconds: dict[str, float]
    faults: dict[int, str]

    @property
    def bytes_up(self) -> int:
        return sum(p.up for p in self.phases.values())

    @property
    def bytes_down(self) -> int:
        return sum(p.down for p in self.phases.values())


def aggregate(
    replies: Sequence[Tree] | Mapping[int, Tree],
    weights: Sequence[int] | None = None,
    config: SecureAggregation | None = None,
    *,
    dropouts: Mapping[str, Iterable[int]] | None = None,
    session: str = "local",
    round: int = 0,
    exchange: int = 0,
    noise: Noise | None = None,
) -> Outcome:
    """All phases in this process, with every client's work done in earnest: for simulation.

    replies: of clients 0, 1, ..., or by id. weights: theirs, in the same order; 1 by default.
    dropouts: {phase: ids} of those who do not answer from that phase on.
    """
    config = SecureAggregation() if config is None else config
    replies = dict(replies.items() if isinstance(replies, Mapping) else enumerate(replies))
    dropouts = {phase: set(ids) for phase, ids in (dropouts or {}).items()}
    if wrong := set(dropouts) - set(PHASES):
        raise ConfigError(f"dropouts: {sorted(wrong)[0]!r} is no phase; use {', '.join(PHASES)}")
    weight = dict(zip(replies, [1] * len(replies) if weights is None else weights, strict=True))
    clients = {i: SecureClient(i, config) for i in replies}
    phases, seconds = {name: Phase() for name in PHASES}, {"clients": 0.0, "server": 0.0}

    def timed(who: str, f: Callable, *arguments: Any) -> Any:
        began = time.perf_counter()
        result = f(*arguments)
        seconds[who] += time.perf_counter() - began
        return result

    def ask(name: str, questions: dict[int, Tree], answer: Callable[[SecureClient, Tree], Tree], take: Callable) -> None:
        for i in dropouts.get(name, ()):
            clients.pop(i, None)
        for i, question in questions.items():
            phases[name].down += wire.nbytes(question)
            if i in clients:
                reply = timed("clients", answer, clients[i], question)
                phases[name].up += wire.nbytes(reply)
                phases[name].messages += 1
                take(i, reply)

    def asked(name: str, questions: dict[int, Tree], answer: Callable[[SecureClient, Tree], Tree]) -> dict[int, Tree]:
        answers: dict[int, Tree] = {}
        ask(name, questions, answer, answers.__setitem__)
        return answers

    server = SecureServer(config, weight, session=session, round=round, exchange=exchange)
    adverts = asked("advertise", dict.fromkeys(replies, server.offer()), SecureClient.advertise)
    shares = asked("share", timed("server", server.keys, adverts), SecureClient.share)
    masked = lambda c, m: c.mask(m, replies[c.id], weight[c.id], noise)  # noqa: E731
    ask("mask", timed("server", server.boxes, shares), masked, lambda i, m: timed("server", server.add, i, m))
    answers = asked("unmask", timed("server", server.request), SecureClient.unmask)
    return Outcome(timed("server", server.total, answers), phases, seconds, server.faults)
