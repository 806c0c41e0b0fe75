"""The site: a Flower ClientApp that answers for the clients whose rows it has.

Every message is a new process. Client states are kept in Flower's `context.state` (and, if the node
has a `cache` folder, on its disk, so that they survive the SuperNode), under the version of the
exchange that made them: the server sends the version of the last answer that it has received, so a
lost answer is undone, and a lost state is noticed. The result of `prepare` is kept in the cache,
under a checksum of rows and algorithm.

The server is not trusted. Headers are checked by `foedus.engines.flower.questions`, updates of held
values against the copies at the site, and a refused question changes no stored state.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from foedus import wire
from foedus.aggregation.secure.fixedpoint import dense
from foedus.algorithms.preprocessing.fit import FitPreprocessing
from foedus.base import random, tree
from foedus.base.tree import Tree
from foedus.core.algorithm import Algorithm
from foedus.core.delays import SomeDelays
from foedus.core.describe import to_config
from foedus.core.exchange import Ask, Replies
from foedus.core.held import Held, HeldArrays, rebuilt_from_wire
from foedus.core.measures import Measures
from foedus.core.result import known_algorithm
from foedus.core.site_sums import SiteSums
from foedus.data.federation import Federation
from foedus.engines.flower import messages
from foedus.engines.flower.guard import Guard
from foedus.engines.flower.holding import Holding
from foedus.engines.flower.measure import Measure, packed
from foedus.engines.flower.memory import Memory
from foedus.engines.flower.messages import explained
from foedus.engines.flower.own import algorithms_in
from foedus.engines.flower.policy import Policy
from foedus.engines.flower.questions import (
    EvaluateOwn,
    Hello,
    Phase,
    Question,
    Step,
    TryModel,
    read_question,
)
from foedus.engines.flower.score import Score
from foedus.engines.flower.secure_site import Demands, Plain, absent, phase
from foedus.engines.local import Local, LocalSession
from foedus.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    FoedusError,
    ReplyError,
    SecureError,
    WireError,
)
from foedus.version import __version__
from foedus.wire import checks

_LONGEST_ERROR = 2000


class SiteApp(ClientApp):
    """Answers every message of the server as the site's policy allows, or with an error message.

    An error message may quote what the server has sent. Anything about the site's rows, files or
    code is only in the site's own log.
    """

    def __init__(self, policy: Policy | None = None):
        super().__init__()
        self.guard = None if policy is None else Guard(policy)

    def __call__(self, message: Message, context: Context) -> Message:
        began, why, body = time.perf_counter(), "", b""
        header: dict[str, Any]
        asked: dict[str, Any] = {}
        before = os.umask(0o077)  # files written here derive from rows
        try:
            asked = messages.header(message)
            header, body = answer(message, asked, context, self.guard)
        except Exception as error:
            header = {"error": error_text(error)[:_LONGEST_ERROR]}
            words = [f"{type(e).__name__}: {e}" for e in (error, error.__cause__) if e is not None]
            why = "; ".join(words)
            if isinstance(error, Plain):
                header["refused"] = "plain"
            if not isinstance(error, FoedusError):
                traceback.print_exc()
        finally:
            os.umask(before)
        if self.guard is not None:
            self.guard.log(**summary(message, asked, header, why), sent=len(body))
        elif why:
            print(f"not answered: {why}", file=sys.stderr, flush=True)
        if not why:  # the time of a refusal could reveal something about rows
            header["seconds"] = time.perf_counter() - began
        return Message(messages.content(header, body), reply_to=message)


def error_text(error: Exception) -> str:
    """The error message for the server: it may quote what the server sent, and nothing else."""
    if isinstance(error, DataError | CheckpointError) or not isinstance(error, FoedusError):
        where = "the rows or files of this site" if isinstance(error, FoedusError) else "this site"
        return f"{where} cannot answer this ({type(error).__name__}); the site's log says why"
    return str(error)


def summary(
    message: Message, asked: dict[str, Any], header: dict[str, Any], why: str
) -> dict[str, Any]:
    """An entry of the site's log: who asked what, and the outcome.

    asked: the header of the message, empty if it cannot be read. header: that of the reply.
    """
    entry: dict[str, Any] = {"asked": messages.shown(message.metadata.message_type)}
    entry |= {k: asked[k] for k in ("session", "round", "exchange", "phase") if k in asked}
    settings = asked.get("algorithm")
    entry["algorithm"] = settings.get("type") if isinstance(settings, dict) else None
    with contextlib.suppress(FoedusError):
        entry["received"] = len(messages.body(message))
    entry["run"], entry["server"] = message.metadata.run_id, message.metadata.src_node_id
    entry["answer"] = "refused" if why else "given"
    if why:
        entry["why"] = why[:_LONGEST_ERROR]
    elif header.get("errors"):
        entry["errors"] = {k: messages.shown(v) for k, v in header["errors"].items()}
    plain = (bool, int, float, type(None))  # headers are not checked yet
    return {
        k: v if k == "errors" or isinstance(v, plain) else messages.shown(v)
        for k, v in entry.items()
    }


def answer(
    message: Message, header: dict[str, Any], context: Context, guard: Guard | None = None
) -> tuple[dict[str, Any], bytes]:
    """Header and body of the reply to a message with this header."""
    question = read_question(message.metadata.message_type, header)
    if guard is not None:
        guard.question(question)
    site, body = Holding(question, dict(context.node_config)), messages.body(message)
    if isinstance(question, Phase):
        parts = messages.cut(body, question.lengths)
        site.check_ids(question.ids)
        return phase(question, question.ids, parts, site.config, site.cache)
    algorithm = algorithm_of(question, known_here(context.run_config, guard))
    check_fit(question, algorithm)
    if guard is not None:
        guard.algorithm(algorithm, question)
    if isinstance(question, Hello):
        if question.secure is not None or site.site is not None:
            Demands.of(site.config).greeting(question.secure)
        greeting = site.hello()
        if question.metrics is not None:
            greeting["measures"] = measures(question.metrics, site, guard)
        return greeting, b""
    if isinstance(algorithm, Measure):
        check_metrics(algorithm.metrics, site, guard)
    demands = Demands.of(site.config)
    if isinstance(question, TryModel):
        score = site.try_model(body, algorithm)
        if guard is not None:
            guard.log(asked="the score of a model on the test rows here", **score)
        demands.plain("evaluate.model, the score on its test rows,", False)
        if guard is not None:
            guard.score(question)
        return score, b""
    assert isinstance(question, EvaluateOwn)
    memory = Memory(context, question.session, site.cache)
    if not isinstance(question, Step):
        demands.plain("evaluate", question.secure is not None)
        if guard is not None:
            guard.score(question)
        if question.metrics:
            check_metrics(question.metrics, site, guard)
        return evaluate_own(question, site, memory, algorithm)
    step = message.metadata.message_type.removeprefix(f"{Step.kind}.")
    return exchange(question, body, site, memory, algorithm, step, guard)


def check_metrics(names: Sequence[str], site: Holding, guard: Guard | None) -> None:
    """Refuse sums over test rows that the policy of this site does not allow."""
    if guard is None:
        return
    rows = site.test_count()
    guard.metrics(names, rows)
    guard.log(asked="sums over the test rows here", metrics=", ".join(names), test_rows=rows)


def measures(names: Sequence[str], site: Holding, guard: Guard | None) -> bool | str:
    """Whether this site gives the sums of these metrics, or why not."""
    why = None if guard is None else guard.measures(names, site.test_count())
    return True if why is None else why


def known_here(config: dict[str, Any], guard: Guard | None) -> dict[str, Algorithm]:
    """The algorithms of the site's own code: that of its policy, or of a module that the worker
    was started with.
    """
    code = str(config.get("code", ""))
    if guard is None and not code:
        return {}
    try:
        if guard is not None:
            return guard.policy.own_algorithms()
        module, _, name = code.partition(":")
        return algorithms_in(module, name, f"code={code!r}")
    except ConfigError as error:  # the error names files of this site
        raise DataError(str(error)) from error


def algorithm_of(question: Question, known: dict[str, Algorithm]) -> Algorithm:
    """The algorithm of a run: the site's own if it has one with these settings, otherwise built
    from the settings.
    """
    given = question.algorithm
    for algorithm in known.values():
        for candidate in (algorithm, *around(algorithm, given)):
            if to_config(candidate.seeded(question.seed)) == given:
                return candidate.seeded(question.seed)
    try:
        with explained("algorithm: it cannot be made of these settings", ConfigError):
            algorithm = known_algorithm(given).seeded(question.seed)
    except ConfigError as error:
        versions = f"the server has foedus {question.foedus}, this site {__version__}"
        raise ConfigError(
            f"the algorithm of this run is not known here ({versions}): {error}"
        ) from None
    if algorithm.pooled:
        raise ConfigError(
            f"algorithm: {type(algorithm).__name__} needs all rows in one place; sites keep theirs"
        )
    return algorithm


def around(algorithm: Algorithm, given: dict[str, Any]) -> list[Algorithm]:
    """The algorithms that evaluate the model of this one, as their settings describe."""
    if given.get("type") == Score.__name__:
        return [Score(algorithm)]
    if given.get("type") == Measure.__name__:
        with contextlib.suppress(ConfigError, LookupError, TypeError):
            return [Measure(algorithm, tuple(given["metrics"]), given["sums"])]
    return []


def check_fit(question: Question, algorithm: Algorithm) -> None:
    """Refuse a fit of a preprocessing with mismatched columns, or with sums in a form that does not
    fit the aggregation.
    """
    schema = question.schema
    if not isinstance(algorithm, FitPreprocessing | Measure) or schema is None:
        return
    if isinstance(algorithm, FitPreprocessing) and (
        algorithm.columns != schema.columns or algorithm.texts != schema.texts
    ):
        raise ReplyError("algorithm: its columns and texts must be those of the schema")
    secure = question.secure is not None and question.secure.get("privacy") is None
    if algorithm.sums != secure:
        raise ReplyError(f"algorithm: sums={algorithm.sums} does not go with this aggregation")
    if algorithm.sums and isinstance(question, Step) and question.weights is not None:
        raise ReplyError(f"weights={question.weights!r}: by them, sums would tell who has what")


def exchange(
    question: Step, body: bytes, site: Holding, memory: Memory, algorithm: Algorithm, step: str,
    guard: Guard | None = None,
) -> tuple[dict[str, Any], bytes]:  # fmt: skip
    """Run a client step for the clients asked; clients whose state is lost are named.

    In secure aggregation, replies are masked.
    """
    if (
        step.startswith("_")
        or hasattr(Algorithm, step)
        or not callable(getattr(type(algorithm), step, None))
    ):
        raise ReplyError(f"{step!r} is not a client step of {type(algorithm).__name__}")
    masked = question.phase is not None
    bodies, parts = messages.split(
        messages.cut(body, question.lengths), question.groups, question.ids
    )
    if len(parts) != (len(question.ids) if masked else 0):
        raise ReplyError(f"lengths: {len(parts)} parts of the body do not fit the groups")
    demands = Demands.of(site.config)
    settings = demands.settings(question.secure) if masked else None
    session, lost, copies = opened(question, site, memory, algorithm)
    if masked:
        demands.memory(session.remembers)
    if masked and (session.absorbs or question.longest is not None):
        raise SecureError("this algorithm, or late messages, cannot be under secure aggregation")
    places = {int(i): p for p, i in enumerate(session.ids)}
    ids = [i for i in question.ids if i not in lost]
    replies: dict[int, Tree] = {}
    hashes: dict[int, str] = {}
    if ids:
        ask = received(question, ids, step, bodies, session, copies)
        for i in ids if masked else []:
            held = {name: copies[i][name] for name in question.held}
            hashes[i] = question.hash(step, ask.payload, held)
        away = absent(question, step, ids, site.config, site.cache) if masked else []
        before = {i: session.state_of(places[i]) for i in away}
        with explained(f"{step} cannot be done with what was sent ({', '.join(ask.arguments)})"):
            for some, reply, stacked in session.exchange(ask):
                for n, i in enumerate(some.tolist()):
                    replies[i] = Replies(some, some, stacked=reply)[n] if stacked else reply
        # run the step nevertheless: the response time must not reveal who takes part
        for i in away:
            replies[i] = tree.map(torch.zeros_like, dense(replies[i]))
            if session.remembers:
                session.states.put(places[i], before[i])
        if any(tree.leaves(reply) for reply in replies.values()):
            if not masked:
                demands.plain(step, question.secure is not None)
            if guard is not None:
                guard.reply(question, settings)
    seen = dict(zip(question.ids, question.seen, strict=True))

    def keep(clients: list[int]) -> None:
        for i in clients if session.remembers or copies else []:
            kept = {"state": session.states.get(places[i]), "held": copies.get(i, {})}
            memory.keep(i, kept, question.version, seen[i])

    site.keep_prepared(session)
    if masked:
        weigh = question.weights == "rows"  # the site's own number, not one from the server
        more = lambda i: (  # noqa: E731
            replies[i], int(session.train.sizes[places[i]]) if weigh else 1, hashes[i]
        )  # fmt: skip
        here = [part for i, part in zip(question.ids, parts, strict=True) if i not in lost]
        header, sent = phase(question, ids, here, site.config, site.cache, more)
        keep(header["ids"])  # a refused question, also by the protocol, changes no state
        return {**header, "lost": sorted(lost)}, sent
    keep(ids)
    order = sorted(replies)
    encoded = [wire.encode(replies[i]) for i in order]
    about = {
        "round": question.round,
        "exchange": question.exchange,
        "ids": order,
        "lost": sorted(lost),
    }
    return {**about, "lengths": [len(m) for m in encoded]}, b"".join(encoded)


def received(
    question: Step,
    ids: list[int],
    step: str,
    bodies: list[bytes],
    session: LocalSession,
    copies: dict[int, dict[str, Tree]],
) -> Ask:
    """The questions to the clients of this site, with their copies of held values brought up to
    date.
    """
    names, updates = question.held, []
    held: dict[str, Held] = {}
    payload: dict[str, Tree] = {}
    keeps = bool(names) and not session.absorbs
    strange = set(names) - set(copies.get(ids[0], {})) if keeps else set()
    if strange:
        raise ReplyError(
            f"held: {min(strange)!r} is not a held value of {type(session.algorithm).__name__}"
        )
    for members, body in zip(question.groups, bodies, strict=True):
        message = read_message(body)
        mine = [i for i in members if i in ids]
        new = {name: message.get(name) for name in names}
        if keeps:
            for i in mine:
                copies[i] |= {
                    name: rebuilt_from_wire(name, copies[i][name], new[name]) for name in names
                }
        elif any(update is not None for update in new.values()):
            session.algorithm.check_updates(
                session.spec, **{name: update for name, update in new.items() if update is not None}
            )
        updates.append((torch.tensor([ids.index(i) for i in mine], dtype=torch.int64), new))
        payload = {k: v for k, v in message.items() if k not in (*names, *question.items)}
    if keeps:
        held = {name: HeldArrays(copies[ids[0]][name]) for name in names}
    key = random.key(question.seed)
    about = (torch.tensor(ids), key, question.round, question.exchange, question.quantise)
    updates = updates if names else []
    ask = Ask(step, payload, *about, held=held, updates=updates, sent=question.sent)
    try:
        inspect.signature(getattr(session.algorithm, step)).bind(None, **ask.arguments)
    except TypeError as error:
        raise ReplyError(f"{step}: what was sent does not fit its arguments: {error}") from None
    return ask


def read_message(body: bytes) -> dict[str, Tree]:
    """The message to a group of clients: arguments of the step, by name."""
    part = f"the part of {len(body)} bytes, by lengths, of the body"
    try:
        message = wire.decode(body)
    except WireError as error:
        raise ReplyError(f"{part} is not a valid message: {error}") from None
    if not isinstance(message, dict):
        raise ReplyError(f"{part} must hold arguments by name, not a {type(message).__name__}")
    if checks.dense_size(message) > checks.MOST:
        raise ReplyError(f"{part} stands for more than {checks.MOST} numbers")
    return message


def evaluate_own(
    question: EvaluateOwn, site: Holding, memory: Memory, algorithm: Algorithm
) -> tuple[dict[str, Any], bytes]:
    """Scores of the clients' own models on their own test rows, as sums; the sums for metrics are
    in the body.
    """
    if not algorithm.personal:
        raise ReplyError(f"algorithm: {type(algorithm).__name__} has no models of its clients' own")
    session, lost, _ = opened(question, site, memory, algorithm)
    # sums are counts of rows, and the steps of a sequence share one
    names = [] if session.spec.steps else question.metrics or []
    with explained("algorithm: the clients' own models are not its"):
        sums, ids = session.evaluate_own(*([names] if names else [])), session.ids.tolist()
    asked = [(p, i) for p, i in enumerate(ids) if i in question.ids and i not in lost]
    outputs = sums.pop("outputs", None)
    about = {
        "ids": [i for _, i in asked],
        "sums": {k: [float(v[p]) for p, _ in asked] for k, v in sums.items()},
    }
    if outputs is None:
        return about, b""
    measures, spec = Measures(algorithm, site.federation(), (), False, []), session.spec
    wanted = SiteSums(tuple(names), spec.classes, spec.outputs)
    p = measures.client_rows.of(measures.given(outputs, None))
    usual = {k: v.numpy() for k, v in sums.items() if k in ("loss", *measures.usual)}
    found = wanted.of(p, usual)
    parts = [wire.encode(packed({k: v[at] for k, v in found.items()}, False)) for at, _ in asked]
    return {**about, "lengths": [len(part) for part in parts]}, b"".join(parts)


def _rows_for(algorithm: Algorithm, site: Holding) -> Federation:
    """The rows that an algorithm works on: test rows, raw rows, or training rows."""
    if isinstance(algorithm, Score | Measure):
        return site.tested()
    return site.raw() if algorithm.takes_raw else site.federation()


def opened(
    question: EvaluateOwn, site: Holding, memory: Memory, algorithm: Algorithm
) -> tuple[LocalSession, set[int], dict[int, dict[str, Tree]]]:
    """A session on this node's clients with their states; the clients whose state is lost; held
    values.
    """
    site.check_ids(question.ids)
    fed = _rows_for(algorithm, site)
    with explained("algorithm: it does not fit the rows of this site", ConfigError):
        algorithm.check(fed.spec)
        session = Local().open(algorithm, fed, random.key(question.seed))
        first = algorithm.first_held(session.spec, session.shared)
    places = {int(i): p for p, i in enumerate(session.ids)}
    if question.longest is not None:
        at = torch.tensor([places[i] for i in question.ids])
        late = torch.zeros(2, len(places), dtype=torch.int64)
        late[:, at] = torch.tensor([question.up, question.down])
        session.delay(SomeDelays(late[0], late[1], question.longest))
    lost: set[int] = set()
    copies: dict[int, dict[str, Tree]] = {i: dict(first) for i in question.ids} if first else {}
    if session.remembers or first:
        for i, seen in zip(question.ids, question.seen, strict=True):
            if not seen:
                continue
            kept = memory.recall(i, seen)
            if kept is None:
                lost.add(i)
                continue
            if kept["state"] is not None:
                session.states.put(places[i], kept["state"])
            if first:
                # a server may give another algorithm under the name of the same session
                wire.validate_like(kept["held"], first, "held values here, of another algorithm")
                copies[i] = kept["held"]
    site.load_prepared(session)
    return session, lost, copies


app = SiteApp()
