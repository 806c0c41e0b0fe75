"""Secure aggregation: the server learns the weighted sum of the replies and no single one.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017,
with double masking; for many clients on the random graph of Bell et al., CCS 2020
(`foedus.aggregation.secure.graph`). Client u turns its reply into integers x_u
(`foedus.aggregation.secure.fixedpoint`) and sends, modulo 2^32 or 2^64,

    y_u = w_u x_u + PRG(b_u) + sum over neighbours v > u of PRG(s_uv) - sum over neighbours v < u of
    PRG(s_uv)

s_uv is what u and v agree on by X25519, so that these masks cancel in the sum; b_u is u's own. Both
u's secret mask key and b_u are shared among u and its neighbours
(`foedus.aggregation.secure.shamir`), t shares rebuilding them. Four messages go each way:

    advertise   offer: session, round, exchange, settings   -> two X25519 public keys
    share       the neighbours' public keys                 -> a box of shares for each neighbour;
                                                               SHA-256 of b_u
    mask        the boxes from the neighbours               -> y_u, in the form of the reply
    unmask      which neighbours survived or dropped out    -> shares of b_v of survivors, of the
                                                               mask key of the others

The server subtracts PRG(b_u) of those whose y_u came, and the pairwise masks between them and those
who dropped out after `share`. Whatever is rebuilt is checked against its public key or its SHA-256
before use. PRG is AES-256 in counter mode under a key that is used once; keys come from
HKDF-SHA256, boxes are AES-256-GCM. Every derivation, box and signature is bound to a tag, the
SHA-256 of session, round, exchange, number of clients, weights, settings and question; and to
sender and receiver. Randomness is the operating system's.

Weights are public: integers (rows, or 1) that the server knows anyway. A client multiplies by
its own, which it does not take from the server, so that the server cannot make one reply stand out.

What is protected, against whom. An honest-but-curious server, together with fewer than t clients of
any neighbourhood, learns the sum over the survivors, who took part, their weights and the shapes of
replies. On the random graph this holds but for a probability of 2^-40, if at most a tenth of the
clients collude; the server draws the graph, and is trusted to draw it at random.

Of a server that deviates, clients refuse: another tag (a replay from another session, round or
exchange, or other settings); a question that is not the one of the tag, which is how a server could
tell one client from the others: it would have all others reply nothing, by a step of size 0, say
(Pasquini, Francati and Ateniese, "Eluding secure aggregation in federated learning via model
inconsistency", CCS 2022); a key list without their own keys as they are, with a key or a client
twice, or with too few or too many clients; boxes that were altered or come from elsewhere; an
unmask request that names a client as both survivor and dropped out, that names others than those
whose masks were used or leaves some out, that calls the client itself dropped out, that leaves
fewer than t survivors, or that comes a second time. To be told by some that u survived and by
others that it dropped out, and so to get both secrets of u, takes 2 t - m or more colluding clients
among u's m holders: with threshold 2/3, a third of them.

What is not protected. The sum itself: with two survivors, each knows the other's reply, and two
rounds (or one that is run twice) whose clients differ by one show that one's reply; differential
privacy is for that (`foedus.aggregation.dp.distributed`). The result, against clients who send
wrong numbers or wrong shares: they can spoil a round. A reply, against a server that invents
clients or their keys: for that, give `sign` and `verify` (for Ed25519,
`foedus.aggregation.secure.primitives.verifier`), and keys must be signed by those to whom they are
said to belong. A reply, against a server that tells every client another story of who has shared
keys and who dropped out, together with about an eighth of a neighbourhood (threshold 2/3): the
signatures by which survivors agree on one story in the variant of Bonawitz et al. against active
adversaries are not part of this. Nor is secrecy on the way: use TLS.

What it costs: replies are dense, of 4 or 8 bytes a number, and every client does two key agreements
a neighbour.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from foedus import wire
from foedus.aggregation.secure.client import SECRETS, SecureClient
from foedus.aggregation.secure.fixedpoint import FixedPoint, Noise
from foedus.aggregation.secure.protocol import PHASES, SecureAggregation
from foedus.aggregation.secure.server import SecureServer, Total
from foedus.base.tree import Tree
from foedus.errors import ConfigError, FoedusError

__all__ = [
    "PHASES",
    "SECRETS",
    "FixedPoint",
    "Outcome",
    "Phase",
    "SecureAggregation",
    "SecureClient",
    "SecureServer",
    "Simulated",
    "Total",
    "aggregate",
    "conduct",
    "counted",
]


@dataclass
class Phase:
    """What one phase sends: bytes as encoded, and messages of clients."""

    up: int = 0
    down: int = 0
    messages: int = 0


@dataclass(eq=False)
class Outcome:
    """The sum, what it cost by phase, the seconds (of computing) of all clients together and of the
    server, and who was left out, and why.
    """

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


Ask = Callable[[str, dict[int, Tree]], Iterable[tuple[int, Tree]]]
"""Sends the questions of a phase to clients and yields their answers as they arrive; an error in
place of an answer is the reason why there is none.
"""


def conduct(server: SecureServer, ask: Ask) -> Total:
    """All phases, from the side of the server."""
    adverts = dict(ask("advertise", dict.fromkeys(server.alive, server.offer())))
    shares = dict(ask("share", server.keys(adverts)))
    for client, masked in ask("mask", server.boxes(shares)):
        server.add(client, masked)
    return server.total(dict(ask("unmask", server.request())))


def counted(ask: Ask, phases: dict[str, Phase]) -> Ask:
    """The same, and `phases` says what is sent."""

    def asking(phase: str, questions: dict[int, Tree]) -> Iterator[tuple[int, Tree]]:
        cost = phases.setdefault(phase, Phase())
        cost.down += sum(map(wire.nbytes, questions.values()))
        for client, answer in ask(phase, questions):
            if not isinstance(answer, FoedusError):
                cost.up += wire.nbytes(answer)
                cost.messages += 1
            yield client, answer

    return asking


class Simulated:
    """Clients in this process that really run their side of the protocol.

    `seconds` is the time that all of them have computed.

    Args:
        replies: Yields the replies of the clients that are asked, in any order.
        absent: The clients that do not answer from a phase on.
    """

    def __init__(
        self,
        config: SecureAggregation,
        weights: Mapping[int, int],
        replies: Callable[[list[int]], Iterable[tuple[int, Tree]]],
        noise: Noise | None = None,
        absent: Callable[[str], Iterable[int]] = lambda phase: (),
        clip: float | None = None,
    ):
        self.clients = {i: SecureClient(i, config) for i in weights}
        self.weights, self.replies, self.noise, self.absent, self.clip = (
            weights,
            replies,
            noise,
            absent,
            clip,
        )
        self.seconds = 0.0

    def ask(self, phase: str, questions: dict[int, Tree]) -> Iterator[tuple[int, Tree]]:
        for i in self.absent(phase):
            self.clients.pop(i, None)
        here = [i for i in questions if i in self.clients]
        for i, *reply in self.replies(here) if phase == "mask" else zip(here):
            began = time.process_time()
            more = (*reply, self.weights[i], self.noise, self.clip) if phase == "mask" else ()
            answer = getattr(self.clients[i], phase)(questions[i], *more)
            self.seconds += time.process_time() - began
            yield i, answer


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
    """All phases in this process: to see what they cost, and what comes out.

    replies: of clients 0, 1, ..., or by id. weights: theirs, in the same order; 1 by default.
    dropouts: {phase: ids} of those who do not answer from that phase on.
    """
    config = SecureAggregation() if config is None else config
    replies = dict(replies.items() if isinstance(replies, Mapping) else enumerate(replies))
    dropouts = {phase: set(ids) for phase, ids in (dropouts or {}).items()}
    if wrong := set(dropouts) - set(PHASES):
        raise ConfigError(f"dropouts: {sorted(wrong)[0]!r} is no phase; use {', '.join(PHASES)}")
    weight = dict(zip(replies, [1] * len(replies) if weights is None else weights, strict=True))
    phases: dict[str, Phase] = {}
    began = time.process_time()
    server = SecureServer(config, weight, session=session, round=round, exchange=exchange)
    given = lambda ids: ((i, replies[i]) for i in ids)  # noqa: E731
    clients = Simulated(config, weight, given, noise, lambda phase: dropouts.get(phase, ()))
    total = conduct(server, counted(clients.ask, phases))
    seconds = {"clients": clients.seconds, "server": time.process_time() - began - clients.seconds}
    return Outcome(total, phases, seconds, server.faults)
