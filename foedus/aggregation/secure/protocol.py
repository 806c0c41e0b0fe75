"""What both sides of secure aggregation share: the settings, the offer, and the reading of
messages.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Le, MultipleOf
from torch import Tensor

from foedus import wire
from foedus.aggregation.dp.mechanism import DifferentialPrivacy
from foedus.aggregation.secure import graph
from foedus.aggregation.secure.fixedpoint import Bits, FixedPoint, Range, Rounding
from foedus.aggregation.secure.shamir import LIMBS
from foedus.base.settings import Remedy, check_settings
from foedus.base.tree import Tree
from foedus.core.aggregation import Aggregation, Aggregator, Setting
from foedus.errors import ConfigError, SecureError

PHASES = ("advertise", "share", "mask", "unmask")
BOX, SIGNATURE = 12 + 2 * LIMBS * 4 + 16, 64
"""Bytes of a box (a nonce, shares of two secrets, a check) and of a signature."""

LEAST_RANGE, MOST_BITS = 16.0, 40
"""Of range="auto": the least range, and the most bits that are given to a wider one."""
SLACK = 1 - 1e-6
"""How much of a range a declared bound may fill: single precision may exceed it by rounding."""

Sign = Callable[[bytes], bytes]
Verify = Callable[[int, bytes, bytes], bool]
"""Whether this is a signature of these bytes by the client of this id."""


@dataclass(frozen=True)
class SecureAggregation(Aggregation):
    """Secure aggregation: the server learns averages and sums of replies, and no single reply.

    Clients add masks that cancel in the sum (`foedus.aggregation.secure.simulated`).

    Args:
        threshold: The fraction of the clients that must stay to the end, and of a neighborhood's
            shares that rebuild a secret; above 1/2.
        neighbours: The number of other clients with which a client shares masks (even), or "auto":
            see `foedus.aggregation.secure.graph`.
        range: Largest magnitude of a number; a larger one is an error at the client. The step of
            the fixed-point numbers is range / 2^(bits - 1): `foedus.aggregation.secure.fixedpoint`.
            "auto": 16, or more where the algorithm says that it sends larger numbers
            (`Algorithm.reply_bound`), with as many more bits, so that the step stays the same.
        bits: Bits of a number before the sum.
        rounding: "nearest" or "stochastic".
        headroom: More bits for the sum.
        privacy: Differential privacy as well (`foedus.aggregation.dp.distributed`): clients clip
            their replies and add noise before they mask them. Then the range is `privacy.clip`,
            headroom is what the noise needs, and all clients are asked in every round.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=5)
        >>> run = fd.run(fd.FedAvg(fd.Linear()), fed, rounds=2, aggregation=fd.SecureAggregation())
        >>> run.history.accuracy.iloc[-1] > 0.8
        True

    Reference: Bonawitz et al., "Practical secure aggregation for privacy-preserving machine
    learning", CCS 2017; Bell, Bonawitz, Gascon, Lepoint and Raykova, CCS 2020.
    """

    threshold: Annotated[
        float, Gt(0.5), Le(1), Remedy("with less, two halves could be told different things")
    ] = 2 / 3
    neighbours: Annotated[int, Ge(2), MultipleOf(2)] | Literal["auto"] = "auto"
    range: Range | Literal["auto"] = "auto"
    bits: Bits = 24
    rounding: Rounding = "nearest"
    headroom: Annotated[int, Ge(0)] = 0
    privacy: DifferentialPrivacy | None = None

    def __post_init__(self) -> None:
        check_settings(self)
        if self.privacy is None:
            return
        if self.range != "auto":
            raise ConfigError(
                f"range={self.range!r} does not go with privacy, where clip is the range; leave "
                "range out"
            )
        if self.headroom:
            raise ConfigError(
                f"headroom={self.headroom!r} does not go with privacy, which knows its noise; "
                "leave headroom out"
            )
        if self.rounding != "nearest":
            raise ConfigError(
                f"rounding={self.rounding!r} does not go with privacy: it could make a reply "
                "longer than clip; use rounding='nearest'"
            )

    def open(self, setting: Setting) -> Aggregator:
        """The aggregator of one run."""
        # which imports cryptography
        from foedus.aggregation.secure.aggregator import PrivateSecureAggregator, SecureAggregator

        return (SecureAggregator if self.privacy is None else PrivateSecureAggregator)(
            self, setting
        )

    @property
    def fixed_point(self) -> FixedPoint:
        range_ = LEAST_RANGE if self.range == "auto" else self.range
        return FixedPoint(range_, self.bits, self.rounding, self.headroom)

    def bounded_by(self, bound: float | None) -> SecureAggregation:
        """The settings of an exchange whose replies hold numbers of at most this magnitude.

        With range="auto" the range is 16 * 2^k, the least that holds them, and the bits are k more,
        so that the step is that of the range 16. There are at most 40 bits: beyond, the step
        doubles with the range, and for an infinite bound the range is the largest with that step.
        """
        if self.range != "auto":
            return self
        room, doublings = MOST_BITS - self.bits, 0
        if bound is not None and bound > LEAST_RANGE * SLACK:
            doublings = (
                math.ceil(math.log2(bound / (LEAST_RANGE * SLACK))) if bound < math.inf else room
            )
        return replace(
            self,
            range=math.ldexp(LEAST_RANGE, doublings),
            bits=self.bits + min(doublings, room),
        )

    def degree(self, clients: int) -> int:
        """The number of neighbors of each of `clients` clients."""
        return (
            graph.degree(clients, self.threshold)
            if self.neighbours == "auto"
            else min(self.neighbours, clients - 1)
        )

    def needed(self, count: int) -> int:
        """The number of clients, or of shares, that are needed of `count`."""
        return graph.part(self.threshold, count)


@dataclass(frozen=True)
class Offer:
    """The first message of the server to all: the exchange, the number of clients and their total
    weight in units of `unit`, and the hash of the question that follows (`question_of`).
    """

    session: str
    round: int
    exchange: int
    clients: int
    weight: int
    unit: int = 1
    question: str = "0" * 64

    @classmethod
    def read(cls, message: Tree) -> Offer:
        names = list(cls.__dataclass_fields__)
        if not isinstance(message, dict) or set(message) != set(names):
            raise SecureError(f"the offer must have the fields {', '.join(names)}")
        least = {"round": 0, "exchange": 0, "clients": 2, "weight": 1, "unit": 1}
        for name, low in least.items():
            if type(message[name]) is not int or message[name] < low:
                raise SecureError(
                    f"the offer's {name}={message[name]!r} must be an integer of at least {low}"
                )
        if not isinstance(message["session"], str) or not 0 < len(message["session"]) <= 256:
            raise SecureError("the offer's session must be a text of at most 256 characters")
        question = message["question"]
        if not isinstance(question, str) or not re.fullmatch("[0-9a-f]{64}", question):
            raise SecureError("the offer's question must be a SHA-256, in 64 hexadecimal digits")
        return cls(**message)

    def tag(self, config: SecureAggregation) -> bytes:
        """The hash to which every message, key, box and signature of the exchange is bound."""
        settings = [
            float(config.threshold),
            config.neighbours,
            config.fixed_point.range,
            config.bits,
            config.headroom,
        ]
        return hashlib.sha256(
            wire.encode(["foedus secure aggregation 2", vars(self), settings])
        ).digest()


def question_of(*parts: Tree) -> str:
    """The SHA-256 of the question to clients: everything besides their rows on which replies
    depend.

    Every exchange is bound to it (`Offer.tag`), so that the masks of two clients cancel only if
    they were asked the same question. Held values are hashed as the client has them now, not as the
    message that updates them.
    """

    def ordered(t: Tree) -> Tree:
        if isinstance(t, dict):
            return {str(k): ordered(t[k]) for k in sorted(t, key=str)}
        return [ordered(v) for v in t] if isinstance(t, list | tuple) else t

    return hashlib.sha256(wire.encode([ordered(part) for part in parts])).hexdigest()


def to_tensor(data: bytes) -> Tensor:
    """Bytes as a tensor of a message."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def fields(message: Tree, what: str, tag: bytes, **expected: tuple) -> list[np.ndarray]:
    """The tensors of a message that has this tag and these fields: name -> (dtype, *shape), None
    for any size.
    """
    expected = {"tag": (torch.uint8, 32), **expected}
    if not isinstance(message, dict) or set(message) != set(expected):
        got = (
            ", ".join(map(str, message))
            if isinstance(message, dict)
            else f"a {type(message).__name__}"
        )
        raise SecureError(f"{what} must have the fields {', '.join(expected)}, got {got}")
    for name, (dtype, *shape) in expected.items():
        t = message[name]
        fits = isinstance(t, Tensor) and t.dtype == dtype and t.dim() == len(shape)
        if not fits or any(n is not None and n != m for n, m in zip(shape, t.shape, strict=True)):
            raise SecureError(
                f"{what}: {name} must be {dtype} {['any' if n is None else n for n in shape]}"
            )
    if message["tag"].numpy().tobytes() != tag:
        raise SecureError(
            f"{what} belongs to another session, round or exchange, or to other settings"
        )
    return [message[name].numpy() for name in expected if name != "tag"]


def distinct(ids: np.ndarray, what: str) -> None:
    """Raise on duplicate ids."""
    if len(np.unique(ids)) < len(ids):
        raise SecureError(f"{what} names a client twice")


def to_bytes(t: Tensor) -> bytes:
    """The bytes of a tensor."""
    return t.numpy().tobytes()


def single_replies(algorithm: object, step: str) -> ConfigError:
    """The error for an algorithm whose server needs single replies."""
    return ConfigError(
        f"{type(algorithm).__name__} asks for every client's own reply to {step}, and under secure "
        "aggregation the server sees sums alone. Use settings with which it only averages "
        "(participation=1.0 for FedFW), another algorithm, or no secure aggregation"
    )
