"""The server's exchanges with sites through Flower's Grid.

A site that does not answer in time, or whose answer is invalid (it cannot be decoded, has a wrong
form, or belongs to another round or client; `foedus.core.clients` checks its numbers), is left out
of the rest of the round and named in the history; the round continues with the others, if enough of
them are left.
"""

from __future__ import annotations

import contextlib
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import Message
from torch import Tensor

from foedus import wire
from foedus.aggregation.secure.protocol import SecureAggregation, single_replies
from foedus.base import random, tree
from foedus.base.spec import Spec
from foedus.base.tree import Tree
from foedus.core.algorithm import Algorithm, batch_of
from foedus.core.describe import to_config
from foedus.core.exchange import Ask
from foedus.core.held import HeldArrays, HeldItems
from foedus.core.result import Run
from foedus.core.session import Conditions, Measured, SecureChannel, Session
from foedus.core.site_sums import SiteSums
from foedus.engines.flower import answers, messages, processes
from foedus.engines.flower.answers import seconds_of
from foedus.engines.flower.forms import Forms
from foedus.engines.flower.measure import Measure, ask
from foedus.engines.flower.questions import COMMON, asked_hash
from foedus.errors import CheckpointError, FoedusError, ReplyError, SecureError, TooFewClients
from foedus.wire import checks

_POLL = 0.05


class LinkLost(FoedusError):  # noqa: N818 - what has happened
    """The SuperLink no longer accepts messages of this server; with a checkpoint, the run can be
    resumed.
    """


@contextlib.contextmanager
def linked() -> Iterator[None]:
    """Turn a refusal of the SuperLink into a readable error: it ends a run that a user stops, or
    whose server has sent no heartbeat for a minute.
    """
    try:
        yield
    except processes.link_errors() as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise LinkLost(
            f"Flower's SuperLink does not let this server go on with its run: {why}"
        ) from error


@dataclass(eq=False)
class Line:
    """The connection to all sites: Flower's Grid, the nodes of clients, timeouts, and how many must
    answer.
    """

    grid: Any
    nodes: dict[int, int]
    """The node of each client."""
    names: dict[int, str] = field(default_factory=dict)
    """The names of clients, for messages."""
    timeout: float = 300.0
    min_clients: int = 1
    tested: dict[int, int] | None = None
    """Numbers of test rows of the clients whose sites send sums over them; `None`: a simulation, in
    which all do."""
    common: dict[str, Any] = field(default_factory=dict)
    """The fields of every header: schema and preprocessing, or the shard."""
    seconds: list[float] = field(default_factory=list)
    """The seconds of each exchange."""
    working: list[float] = field(default_factory=list)
    """The seconds that the slowest site computed."""
    sent: int = 0
    received: int = 0
    """Bytes of bodies sent through Flower."""

    def post(
        self, kind: str, headers: dict[int, dict[str, Any]], body: bytes | dict[int, bytes] = b""
    ) -> dict[int, Message | str]:
        """Send one message to each of these nodes and wait for the answers: a message, or an error.

        body: one for all nodes, or one for each.

        Only outstanding ids are requested: Flower answers with an error for an id that was fetched
        before.
        """
        with linked():
            return self._post(kind, headers, body)

    def _post(
        self, kind: str, headers: dict[int, dict[str, Any]], body: bytes | dict[int, bytes]
    ) -> dict[int, Message | str]:
        began = time.monotonic()
        getattr(self.grid, "speak", lambda: None)()
        here = set(self.grid.get_node_ids())
        replies: dict[int, Message | str] = {
            n: "it is not connected" for n in headers if n not in here
        }
        asked = [n for n in headers if n in here]
        bodies = body if isinstance(body, dict) else dict.fromkeys(headers, body)
        group = str(next((h["round"] for h in headers.values() if "round" in h), ""))
        letters = [
            Message(
                messages.content(headers[n], bodies[n]),
                dst_node_id=n,
                message_type=kind,
                ttl=self.timeout + 30,
                group_id=group,
            )
            for n in asked
        ]
        waiting: dict[str, int] = {}
        for n, id_ in zip(asked, self.grid.push_messages(letters), strict=False):
            if id_:
                waiting[id_] = n
                self.sent += len(bodies[n])
        for n in asked:
            if n not in waiting.values():
                replies[n] = "the message could not be sent to it"
        while waiting:
            for reply in self.grid.pull_messages(list(waiting)):
                if reply.metadata.reply_to_message_id in waiting:
                    n = waiting.pop(reply.metadata.reply_to_message_id)
                    replies[n] = (
                        f"Flower reports: {reply.error.reason}" if reply.has_error() else reply
                    )
            if time.monotonic() - began > self.timeout:
                break
            if waiting:
                time.sleep(_POLL)
        self.seconds.append(time.monotonic() - began)
        self.working.append(max(map(seconds_of, replies.values()), default=0.0))
        return replies | dict.fromkeys(waiting.values(), f"no answer within {self.timeout:g} s")

    def name(self, client: int) -> str:
        return f"{client} ({self.names[client]})" if client in self.names else str(client)


@dataclass(frozen=True, eq=False)
class SitesEngine:
    """An engine for `fd.run` whose clients are reached through a `Line`."""

    line: Line

    def open(self, algorithm: Algorithm, fed: Any, seed_key: Tensor) -> FlowerSession:
        low, high = seed_key.tolist()
        return FlowerSession(self.line, algorithm, low | high << 32, fed.spec)


class FlowerSession(Session, SecureChannel):
    """One run of one algorithm with the clients of a `Line`."""

    def __init__(self, line: Line, algorithm: Algorithm, seed: int, spec: Spec):
        self.line, self.algorithm = line, algorithm
        self.ids = torch.tensor(sorted(line.nodes))
        self.common = {
            **line.common,
            "session": uuid.uuid4().hex,
            "algorithm": to_config(algorithm),
            "seed": seed,
        }
        self.name = self.common["session"]
        self.seen: dict[int, int] = {}  # the version of the last answer of each client
        self.conditions = Conditions(trusted=False, measures=False)
        self.lost: set[int] = set()  # clients whose state is lost
        self.excluded: set[int] = set()  # clients that cannot come back
        self.faults: dict[int, str] = {}
        self.forms = Forms(algorithm, spec, random.key(seed))
        self.round = 0
        self.out: set[int] = set()
        self.before: dict[int, int] = {}  # the version before the last answer
        self.at_start: dict[int, int] = {}  # the versions before this round
        self.last = (-1, -1)
        self.taking = 0
        self.secured = False
        self.config: SecureAggregation | None = None
        # clients that refuse to send the last reply in the clear
        self.plain: set[int] = set()

    # -- exchanges ---------------------------------------------------------------------------------

    def exchange(self, ask: Ask) -> Iterator[tuple[Tensor, Tree, bool]]:
        """Run an exchange, and return the valid answers, in order of client id."""
        asked, more = self.present(ask), self._about(ask)
        found = self.line.post(f"train.{ask.step}", *self._letters(ask, asked, more, lambda i: []))
        replies, faults = self._sorted(found, asked, more)
        if self.secured and faults and not replies and self.plain >= set(asked):
            raise single_replies(self.algorithm, ask.step)
        for i in [i for i in replies if self.secured and tree.leaves(replies[i])]:
            del replies[i]
            faults[i] = "it sent a reply in the clear, in a run under secure aggregation"
        misfits = self._misfits(ask, replies)
        replies = {i: reply for i, reply in replies.items() if i not in misfits}
        self.leave(faults | misfits)
        self.settle(ask, replies)
        self.enough(ask)
        for i in sorted(replies):
            yield torch.tensor([i]), replies[i], False

    def present(self, ask: Ask) -> list[int]:
        """Begin an exchange: returns the clients that can be asked."""
        if ask.round != self.round:
            self.round, self.out, self.at_start = ask.round, set(), dict(self.seen)
        if self.last != (ask.round, ask.exchange):  # late broadcasts make several of one exchange
            self.last, self.faults = (ask.round, ask.exchange), {}
        asked = [i for i in ask.ids.tolist() if i not in self.out]
        for i in asked:
            if i in self.excluded:
                self._leave_out(i, "it has lost its state and cannot come back")
        return [i for i in asked if i not in self.out]

    def _about(self, ask: Ask) -> dict[str, Any]:
        version = (ask.round << 16) + ask.exchange + 1
        return {
            "round": ask.round,
            "exchange": ask.exchange,
            "version": version,
            "sent": ask.sent,
            "quantise": ask.quantise,
        }

    def _sorted(
        self, found: dict[int, Message | str], asked: list[int], more: dict[str, Any]
    ) -> tuple[dict[int, Tree], dict[int, str]]:
        """The valid replies, and the errors of the others, by client."""
        replies: dict[int, Tree] = {}
        faults: dict[int, str] = {}
        self.plain = set()
        for node, answer in found.items():
            mine = [i for i in asked if self.line.nodes[i] == node]
            try:
                good, bad = self._read(answer, mine, more)
                replies |= good
                faults |= bad
            except Exception as error:  # any bytes from an untrusted site
                why = (
                    str(error)
                    if isinstance(error, FoedusError)
                    else f"its answer cannot be read: {error!r}"
                )
                faults |= dict.fromkeys(mine, why)
        return replies, faults

    def settle(self, ask: Ask, ids: Iterable[int]) -> None:
        """Accept the answers of these clients: they continue from the states after it."""
        for i in ids:
            self.before[i] = self.seen.get(i, 0)
            self.seen[i] = self._about(ask)["version"]

    # -- secure aggregation (`foedus.aggregation.secure.aggregator`) -------------------------------

    def secure(self, config: SecureAggregation) -> SecureChannel:
        """From now on, tell sites that only empty replies may be sent in the clear."""
        self.secured, self.config = True, config
        self.common["secure"] = to_config(config)
        return self

    def question(self, ask: Ask, weights: str | None, extra: dict[str, Any]) -> str:
        """The same as `Step.hash` at a site."""
        common = {name: self.common.get(name) for name in COMMON}
        held = {name: h.value for name, h in ask.held.items() if isinstance(h, HeldArrays)}
        return asked_hash(common, ask.step, weights, extra, ask.payload, held)

    def phase(
        self,
        ask: Ask,
        phase: str,
        questions: dict[int, Tree],
        weights: str | None,
        extra: dict[str, Any],
        settings: SecureAggregation,
    ) -> dict[int, Tree | SecureError]:
        """Send the questions of a phase to clients; the payload of a step is sent with `mask`.
        Returns answers or errors.

        extra: additional fields of the header. settings: those of the exchange.
        """
        asked, secure = sorted(questions), to_config(settings)
        more = {**self._about(ask), "phase": phase, "weights": weights, "secure": secure, **extra}
        letters = self._letters(
            ask if phase == "mask" else None, asked, more, lambda i: [wire.encode(questions[i])]
        )
        found = self.line.post(f"train.{ask.step}" if phase == "mask" else "query.secure", *letters)
        replies, faults = self._sorted(found, asked, more)
        return {**replies, **{i: SecureError(why) for i, why in faults.items()}}

    def _letters(
        self,
        ask: Ask | None,
        asked: list[int],
        more: dict[str, Any],
        questions: Callable[[int], list[bytes]],
    ) -> tuple[dict[int, dict[str, Any]], dict[int, bytes]]:
        """Headers and bodies by node: the message of each group of clients that are sent the same,
        and the additional fields of each client.
        """
        headers, bodies = self._headers(asked, more), {}
        messages_ = (
            []
            if ask is None
            else [(set(ids.tolist()), wire.encode(message)) for ids, message in ask.messages()]
        )
        for node, header in headers.items():
            mine = [([i for i in header["ids"] if i in ids], message) for ids, message in messages_]
            groups = [(ids, message) for ids, message in mine if ids]
            parts = [
                *(message for _, message in groups),
                *(part for i in header["ids"] for part in questions(i)),
            ]
            if ask is not None:
                items = [name for name, h in ask.held.items() if isinstance(h, HeldItems)]
                names = [name for name in ask.held if name not in items]
                header |= {"groups": [ids for ids, _ in groups], "held": names, "items": items}
            header["lengths"], bodies[node] = [len(part) for part in parts], b"".join(parts)
        return headers, bodies

    def _headers(self, asked: list[int], more: dict[str, Any]) -> dict[int, dict[str, Any]]:
        by_node: dict[int, list[int]] = {}
        for i in asked:
            by_node.setdefault(self.line.nodes[i], []).append(i)
        return {
            node: {
                **self.common,
                **more,
                **self._late(ids),
                "ids": ids,
                "seen": [self.seen.get(i, 0) for i in ids],
            }
            for node, ids in by_node.items()
        }

    def _late(self, ids: list[int]) -> dict[str, Any]:
        """The delays, for clients."""
        delays = self.conditions.delays
        if delays is None:
            return {}
        place = torch.searchsorted(self.ids, torch.tensor(ids))
        return {
            "up": delays.up[place].tolist(),
            "down": delays.down[place].tolist(),
            "longest": delays.longest,
        }

    def _read(
        self, answer: Message | str, mine: list[int], more: dict[str, Any]
    ) -> tuple[dict[int, Tree], dict[int, str]]:
        """The valid replies in an answer, and the errors of the others."""
        if isinstance(answer, str):
            raise ReplyError(answer)
        self.line.received += len(messages.body(answer))
        try:
            parts = answers.read_parts(answer, mine, more)
        except answers.PlainRefusedError:
            self.plain |= set(mine)
            raise
        replies, faults = {}, {}
        for i, part in parts.replies.items():
            try:
                replies[i] = wire.decode(part)
            except FoedusError as error:
                faults[i] = str(error)
        for i in mine:
            if i in parts.lost:
                self.lost.add(i)
                faults[i] = "it has lost its state"
            elif i not in replies and i not in faults:
                faults[i] = parts.errors.get(i, "it was not in the answer of its node")
        return replies, faults

    def _misfits(self, ask: Ask, replies: dict[int, Tree]) -> dict[int, str]:
        """The invalid replies: of a wrong form, or too large once dense if the form is free."""
        large = [i for i, r in replies.items() if checks.dense_size(r) > checks.MOST]
        bad = dict.fromkeys(large, f"its reply stands for more than {checks.MOST} numbers")
        free = batch_of(getattr(self.algorithm, ask.step)) == "loop"
        if free or not self.algorithm.batching().alike:
            return bad
        usable = {i: r for i, r in replies.items() if i not in bad}
        plain = {i: wire.dequantise(r) for i, r in usable.items()} if ask.quantise else usable
        ids = torch.tensor(sorted(plain), dtype=torch.int64)
        kinds = self.algorithm.kinds(ids)
        kinds = torch.zeros_like(ids) if kinds is None else kinds
        for kind in kinds.unique().tolist():
            bad |= checks.misfits(
                {i: plain[i] for i in ids[kinds == kind].tolist()}, self.forms.of(ask, kind)
            )
        return bad

    def _leave_out(self, client: int, why: str) -> None:
        why = why if len(why) <= 300 else f"{why[:300]} ..."
        self.out.add(client)
        self.faults[client] = why
        warnings.warn(
            f"round {self.round}: client {self.line.name(client)} is left out: {why}", stacklevel=2
        )

    def leave(self, faults: Mapping[int, str]) -> None:
        """Leave these clients out of the rest of the round."""
        for i, why in faults.items():
            if i not in self.out:
                self._leave_out(i, why)

    def refuse(self, client: int, why: str) -> None:
        """Reject an answer that turned out to be invalid: the client's state is restored."""
        self.seen[client] = self.before.get(client, 0)
        self._leave_out(client, why)
        self._enough(self.taking)

    def enough(self, ask: Ask) -> None:
        """Raise if too few clients of the round are left."""
        self.taking = ask.taking
        self._enough(ask.taking)

    def _enough(self, taking: int) -> None:
        left, need = taking - len(self.out), min(self.line.min_clients, taking)
        if left < need:
            faults = "; ".join(
                f"client {self.line.name(i)}: {why}" for i, why in sorted(self.faults.items())
            )
            raise TooFewClients(
                f"round {self.round}: {left} of {taking} clients are left, at least {need} must be "
                f"({faults})"
            )

    def repeat_round(self) -> None:
        self.seen = {i: v for i, v in self.at_start.items() if i in self.seen}
        self.round, self.last = -1, (-1, -1)

    def readmit(self, ids: list[int], allowed: bool) -> None:
        """Readmit clients that have lost their state as new ones, or exclude them."""
        self.lost -= set(ids)
        for i in ids:
            self.seen.pop(i, None)
            if not allowed:
                self.excluded.add(i)
                warnings.warn(
                    f"client {self.line.name(i)} has lost its state and is excluded: "
                    f"{type(self.algorithm).__name__} has no rule for "
                    "coming back",
                    stacklevel=2,
                )

    # -- evaluation --------------------------------------------------------------------------------

    def evaluate_own(self, metrics: Sequence[str] = ()) -> dict[str, Tensor]:
        """Each client's own model on its own test rows: sums by client; none for clients that do
        not answer. Outputs for single rows stay at their sites, which send the sums that metrics
        need.
        """
        ids, spec = self.ids.tolist(), self.forms.spec
        place = {i: p for p, i in enumerate(ids)}
        wanted = SiteSums.of_spec(metrics, spec.classes, spec.outputs)
        headers = self._headers([i for i in ids if i not in self.excluded], {})
        tells = {
            node: bool(wanted.metrics)
            and (self.line.tested is None or set(header["ids"]) <= set(self.line.tested))
            for node, header in headers.items()
        }
        for node, header in headers.items():
            header |= {"metrics": list(wanted.metrics)} if tells[node] else {}
        found = self.line.post("evaluate.own", headers)
        sums: dict[str, Tensor] = {"rows": torch.zeros(len(ids), dtype=torch.float64)}
        for name, shape in wanted.shapes.items() if wanted.metrics else ():
            sums[f"sums.{name}"] = torch.zeros(len(ids), *shape, dtype=torch.float64)
        for node, answer in found.items():
            mine = {i for i in ids if self.line.nodes[i] == node}
            try:
                some, table = answers.read_sums(
                    answer, mine, spec.classes, wanted if tells[node] else None
                )
            except FoedusError as error:
                warnings.warn(
                    f"the clients {sorted(mine)[:10]} are not evaluated: {error}", stacklevel=2
                )
                continue
            at = [place[i] for i in some]
            for name, column in table.items():
                sums.setdefault(name, torch.zeros(len(ids), dtype=torch.float64))[at] = column
        return sums

    def measure(self, algorithm: Algorithm, run: Run, sums: SiteSums, round: int) -> Measured:
        """The global model of a run on the test rows of the sites that allow it."""
        tested = {i: n for i, n in (self.line.tested or {}).items() if i in self.line.nodes}
        seed, spec = self.common["seed"], self.forms.spec
        asking = Measure(algorithm, sums.metrics, sums=self.secured)
        inner = FlowerSession(self.line, asking, seed, spec)
        return ask(inner, asking, run, tested, self.config, spec, random.key(seed), round)

    def evaluate_global(
        self, x: Tensor, y: Tensor, weight: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Common test rows are not sent to sites."""
        return {"rows": torch.zeros(len(self.ids), dtype=torch.float64)}

    # -- checkpoints -------------------------------------------------------------------------------

    def save(self) -> Tree:
        """The versions of the answers that the server has received; client states stay at the
        clients."""
        return {
            "sites": {
                "session": self.common["session"],
                "seen": {str(i): v for i, v in self.seen.items()},
                "excluded": sorted(self.excluded),
            }
        }

    def load(self, saved: Tree) -> None:
        if "sites" not in saved:
            raise CheckpointError(
                "the checkpoint holds the states of simulated clients; a federation of sites "
                "cannot go on from it"
            )
        self.name = self.common["session"] = saved["sites"]["session"]
        self.seen = {int(i): v for i, v in saved["sites"]["seen"].items()}
        self.excluded = set(saved["sites"]["excluded"])

    def close(self) -> None:
        """The `Line` stays open for other runs."""
