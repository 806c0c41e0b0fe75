"""Secure aggregation: the server learns the weighted sum of the replies and no single one.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017,
with double masking; for many clients on the random graph of Bell et al., CCS 2020
(`foedus.aggregation.secure.graph`). Client u turns its reply into integers x_u
(`foedus.aggregation.secure.fixedpoint`) and sends, modulo 2^32 or 2^64,

    y_u = w_u x_u + PRG(b_u) + sum over neighbors v > u of PRG(s_uv) - sum over neighbors v < u of
    PRG(s_uv)

s_uv is the shared secret of u and v by X25519, so these masks cancel in the sum; b_u is known to u
only. Both u's secret mask key and b_u are shared among u and its neighbors
(`foedus.aggregation.secure.shamir`); t shares rebuild them. Four messages go each way:

    advertise   offer: session, round, exchange, settings   -> two X25519 public keys
    share       the neighbors' public keys                  -> a box of shares for each neighbor;
                                                               SHA-256 of b_u
    mask        the boxes from the neighbors                -> y_u, in the form of the reply
    unmask      which neighbors survived or dropped out    -> shares of b_v of survivors, of the
                                                               mask key of the others

The server subtracts PRG(b_u) of the clients whose y_u arrived, and the pairwise masks between them
and the clients that dropped out after `share`. Every rebuilt secret is checked against its public
key or its SHA-256 before use. PRG is AES-256 in counter mode under a key that is used once; keys
come from HKDF-SHA256, boxes are AES-256-GCM. Every derivation, box and signature is bound to a tag,
the SHA-256 of session, round, exchange, number of clients, weights, settings and question; and to
sender and receiver. Randomness is the operating system's.

Weights are public: integers (rows, or 1) that the server knows anyway. A client multiplies by its
own weight, not by one that the server sends, so the server cannot single out a reply.

Protection. An honest-but-curious server, together with fewer than t clients of any neighborhood,
learns only the sum over the survivors, who took part, their weights and the shapes of replies. On
the random graph this holds except with probability 2^-40, if at most a tenth of the clients
collude; the server draws the graph, and is trusted to draw it at random.

If a server deviates, clients refuse: another tag (a replay from another session, round or exchange,
or other settings); a question other than that of the tag, by which a server could isolate one
client: all others would reply nothing, for example with a step of size 0 (Pasquini, Francati and
Ateniese, "Eluding secure aggregation in federated learning via model inconsistency", CCS 2022); a
key list in which their own keys are absent or changed, with a duplicate key or client, or with too
few or too many clients; boxes that were altered or come from another sender; an unmask request that
names a client as both survivor and dropped out, whose clients are not exactly those whose masks
were used, that names the client itself as dropped out, that leaves fewer than t survivors, or that
comes a second time. To get both secrets of u, by telling some holders that u survived and others
that it dropped out, the server needs 2 t - m or more colluding clients among u's m holders: with
threshold 2/3, a third of them.

Not protected: the sum itself. With two survivors, each knows the other's reply, and two rounds (or
one that is repeated) whose clients differ by one reveal that client's reply; use differential
privacy against this (`foedus.aggregation.dp.distributed`). The result, against clients that send
wrong numbers or wrong shares: they can spoil a round. A reply, against a server that invents
clients or their keys: pass `sign` and `verify` (for Ed25519,
`foedus.aggregation.secure.primitives.verifier`), and keys must be signed by their owners. A reply,
against a server that tells clients different lists of who has shared keys and who dropped out, and
colludes with about an eighth of a neighborhood (threshold 2/3): the signatures with which survivors
agree on one list, in the variant of Bonawitz et al. against active adversaries, are not
implemented. The messages on the network: use TLS.

Cost: replies are dense, 4 or 8 bytes a number, and every client makes two key agreements with each
neighbor.
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
    """The traffic of one phase: encoded bytes, and messages of clients."""

    up: int = 0
    down: int = 0
    messages: int = 0


@dataclass(eq=False)
class Outcome:
    """The sum, the cost by phase, the seconds of computation of all clients together and of the
    server, and the clients that were left out, with reasons.
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
"""Sends the questions of a phase to clients and yields their answers as they arrive, with an
exception in place of a missing answer.
"""


def conduct(server: SecureServer, ask: Ask) -> Total:
    """All phases, at the server."""
    adverts = dict(ask("advertise", dict.fromkeys(server.alive, server.offer())))
    shares = dict(ask("share", server.keys(adverts)))
    for client, masked in ask("mask", server.boxes(shares)):
        server.add(client, masked)
    return server.total(dict(ask("unmask", server.request())))


def counted(ask: Ask, phases: dict[str, Phase]) -> Ask:
    """The same; `phases` receives the traffic."""

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
    """Clients in this process that run the whole protocol.

    `seconds` is their total time of computation.

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
    """All phases in this process, for their cost and result.

    replies: of clients 0, 1, ..., or by id. weights: in the same order; 1 by default. dropouts:
        {phase: ids} of the clients that stop answering in that phase.
    """
    config = SecureAggregation() if config is None else config
    replies = dict(replies.items() if isinstance(replies, Mapping) else enumerate(replies))
    dropouts = {phase: set(ids) for phase, ids in (dropouts or {}).items()}
    if wrong := set(dropouts) - set(PHASES):
        raise ConfigError(f"dropouts: {sorted(wrong)[0]!r} is not a phase; use {', '.join(PHASES)}")
    weight = dict(zip(replies, [1] * len(replies) if weights is None else weights, strict=True))
    phases: dict[str, Phase] = {}
    began = time.process_time()
    server = SecureServer(config, weight, session=session, round=round, exchange=exchange)
    given = lambda ids: ((i, replies[i]) for i in ids)  # noqa: E731
    clients = Simulated(config, weight, given, noise, lambda phase: dropouts.get(phase, ()))
    total = conduct(server, counted(clients.ask, phases))
    seconds = {"clients": clients.seconds, "server": time.process_time() - began - clients.seconds}
    return Outcome(total, phases, seconds, server.faults)
