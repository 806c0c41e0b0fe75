"""The side of the site: a Flower ClientApp that answers for the clients whose rows it has.

Every message is a new process. What a client must remember lives in Flower's `context.state` (and,
where the node has a `cache` folder, on its disk, so that it outlives the SuperNode), under the
version of the exchange that made it: the server says which version it has seen an answer of, so
that an answer that got lost is undone, and a state that is gone is noticed. What `prepare` makes of
the rows is kept in the cache, under a checksum of rows and algorithm.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from foedus import wire
from foedus.aggregation.secure.fixedpoint import dense
from foedus.base import random, tree
from foedus.base.tree import Tree
from foedus.core.algorithm import Algorithm
from foedus.core.delays import SomeDelays
from foedus.core.describe import to_config
from foedus.core.exchange import Ask, Replies
from foedus.core.held import Held, HeldArrays, rebuilt
from foedus.core.result import Run, known_algorithm
from foedus.data.federation import Federation
from foedus.engines.flower import messages
from foedus.engines.flower.secure_site import Demands, Plain, absent, phase, questions
from foedus.engines.flower.site import Schema, Site, read_shard, read_site
from foedus.engines.local import Local, LocalSession
from foedus.errors import CheckpointError, ConfigError, FoedusError, ReplyError, SecureError
from foedus.storage import checkpoint as files
from foedus.version import __version__


class SiteApp(ClientApp):
    """Answers every message of the server; errors go back to it in words."""

    def __call__(self, message: Message, context: Context) -> Message:
        began = time.perf_counter()
        try:
            header, body = answer(message, context)
        except Plain as error:
            header, body = {"error": str(error), "refused": "plain"}, b""
        except FoedusError as error:
            header, body = {"error": str(error)}, b""
        except Exception as error:
            header, body = {"error": f"{type(error).__name__}: {error}"}, b""
        return Message(
            messages.content({**header, "seconds": time.perf_counter() - began}, body),
            reply_to=message,
        )


def answer(message: Message, context: Context) -> tuple[dict[str, Any], bytes]:
    """Header and body of the reply."""
    asked, kind = messages.header(message), message.metadata.message_type
    site, config = Holding(asked, dict(context.node_config)), context.run_config
    demands = Demands.of(site.config)
    if kind == "query.hello":
        algorithm_of(asked, config)
        if "secure" in asked:
            demands.greeting(asked["secure"])
        return site.hello(), b""
    if kind == "evaluate.model":
        return site.try_model(messages.body(message), algorithm_of(asked, config)), b""
    if kind == "query.secure":
        return phase(asked, questions(asked, messages.body(message)), site.config, site.cache)
    memory = Memory(context, asked["session"], site.cache)
    if kind == "evaluate.own":
        return evaluate_own(asked, site, memory, algorithm_of(asked, config)), b""
    if kind.startswith("train."):
        return exchange(
            asked,
            messages.body(message),
            site,
            memory,
            algorithm_of(asked, config),
            kind.removeprefix("train."),
        )
    raise ReplyError(
        f"this site does not know messages of type {kind!r}; it has foedus {__version__}"
    )


def algorithm_of(asked: dict[str, Any], config: dict[str, Any]) -> Algorithm:
    """The algorithm of a run: the app's own if it has one of these settings, else built from the
    settings alone.
    """
    given, own = asked["algorithm"], config.get("code")
    if own:
        module, _, name = str(own).partition(":")
        found = getattr(importlib.import_module(module), name)
        for algorithm in found.values() if isinstance(found, dict) else [found]:
            if to_config(algorithm.seeded(asked["seed"])) == given:
                return algorithm.seeded(asked["seed"])
    try:
        return known_algorithm(given).seeded(asked["seed"])
    except ConfigError as error:
        versions = f"the server has foedus {asked.get('foedus')}, this site {__version__}"
        raise ConfigError(
            f"the algorithm of this run is not known here ({versions}): {error}"
        ) from None


class Holding:
    """The rows of this node: of one site, or of some clients of a simulation."""

    def __init__(self, asked: dict[str, Any], config: dict[str, Any]):
        self.asked, self.config = asked, config
        self.shards = Path(config["shards"]) if "shards" in config else None
        self.site: Site | None = None
        if self.shards is None:
            schema = asked.get("schema")
            if not schema:
                raise ConfigError(
                    "the server sends no schema: sites with files of their own need one"
                )
            classes = None if schema["classes"] is None else tuple(schema["classes"])
            self.site = read_site(config, Schema(tuple(schema["columns"]), classes))

    @property
    def cache(self) -> Path | None:
        """Where this node may keep what must outlive a process."""
        if "cache" in self.config:
            return Path(str(self.config["cache"]))
        return self.shards / "cache" if self.shards else None

    def federation(self) -> Federation:
        if self.shards:
            return read_shard(self.shards, self.asked["shard"])
        assert self.site is not None
        return self.site.federation(self.asked["center"], self.asked["scale"])

    def hello(self) -> dict[str, Any]:
        """Who is here, and what a common scaling needs to know."""
        if self.site is None:
            fed = self.federation()
            return {
                "clients": fed.ids.tolist(),
                "rows": fed.sizes.tolist(),
                "name": "shard",
                "foedus": __version__,
            }
        site = self.site
        about = {
            "name": site.name,
            "checksum": site.checksum,
            "foedus": __version__,
            "sums": site.sums(),
        }
        return {
            "clients": [site.client],
            "rows": [len(site.y)],
            "test_rows": [len(site.y_test)],
            **about,
        }

    def try_model(self, file: bytes, algorithm: Algorithm) -> dict[str, Any]:
        """Keep the final model, if there is a cache, and say how it does on this site's test
        rows.
        """
        fed = self.federation()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.safetensors"
            path.write_bytes(file)
            run = Run.load(path, algorithm)
        if self.cache:
            files.replace(self.cache / "model.safetensors", [file])
        x, y = fed.data.x_test, fed.data.y_test
        if not len(y):
            return {"rows": 0}
        if run.algorithm.personal and run.algorithm.predictor(run.state) is None:
            raise ReplyError(f"{type(algorithm).__name__} has no global model")
        predicted = run.model.predict(x)
        if fed.data.classes:
            return {"rows": len(y), "hits": int((predicted == y).sum())}
        return {
            "rows": len(y),
            "squares": float(((predicted - y) ** 2).mean(tuple(range(1, y.ndim))).sum()),
        }


def exchange(
    asked: dict[str, Any],
    body: bytes,
    site: Holding,
    memory: Memory,
    algorithm: Algorithm,
    step: str,
) -> tuple[dict[str, Any], bytes]:
    """Run a client step for the clients asked; those whose state is gone are named as lost.

    In secure aggregation, replies are masked.
    """
    if (
        step.startswith("_")
        or hasattr(Algorithm, step)
        or not callable(getattr(type(algorithm), step, None))
    ):
        raise ReplyError(f"{step!r} is no client step of {type(algorithm).__name__}")
    masked = "phase" in asked
    if masked and asked["phase"] != "mask":
        raise SecureError(f"a step is asked for in phase {str(asked['phase'])[:40]!r}, not mask")
    session, lost, copies = opened(asked, site, memory, algorithm)
    messages_, parts = messages.split(questions(asked, body), asked.get("groups"), asked["ids"])
    places = {int(i): p for p, i in enumerate(session.ids)}
    ids = [i for i in asked["ids"] if i not in lost]
    replies: dict[int, Tree] = {}
    if ids:
        key = random.key(asked["seed"])
        away = absent(asked, step, ids, site.config, site.cache) if masked else []
        before = {i: session.state_of(places[i]) for i in away}
        ask = received(asked, ids, step, key, messages_, session, copies)
        for some, reply, stacked in session.exchange(ask):
            for n, i in enumerate(some.tolist()):
                replies[i] = Replies(some, some, stacked=reply)[n] if stacked else reply
        # after the step all the same: how long an answer takes must not tell who takes part
        for i in away:
            replies[i] = tree.map(torch.zeros_like, dense(replies[i]))
            if session.remembers:
                session.states.put(places[i], before[i])
        demands = Demands.of(site.config)
        if not masked and any(tree.leaves(reply) for reply in replies.values()):
            demands.plain(step, "secure" in asked)
        if session.remembers or copies:
            seen = dict(zip(asked["ids"], asked["seen"], strict=True))
            for i in ids:
                kept = {"state": session.states.get(places[i]), "held": copies.get(i, {})}
                memory.keep(i, kept, asked["version"], seen[i])
    keep_prepared(session, site, asked)
    if masked:
        weigh = asked["weights"] == "rows"  # the site's own number, not one that the server gives
        more = lambda i: (replies[i], int(session.train.sizes[places[i]]) if weigh else 1)  # noqa: E731
        here = [(i, part) for i, part in zip(asked["ids"], parts, strict=True) if i not in lost]
        header, sent = phase(
            {**asked, "ids": [i for i, _ in here]},
            [p for _, p in here],
            site.config,
            site.cache,
            more,
        )
        return {**header, "lost": sorted(lost)}, sent
    order = sorted(replies)
    messages_ = [wire.encode(replies[i]) for i in order]
    about = {
        "round": asked["round"],
        "exchange": asked["exchange"],
        "ids": order,
        "lost": sorted(lost),
    }
    return {**about, "lengths": [len(m) for m in messages_]}, b"".join(messages_)


def received(
    asked: dict[str, Any],
    ids: list[int],
    step: str,
    key: Tensor,
    bodies: list[bytes],
    session: LocalSession,
    copies: dict[int, dict[str, Tree]],
) -> Ask:
    """What the clients that are here are asked, with their copies of held values brought up to
    date.
    """
    names, items, updates = asked["held"], asked["items"], []
    held: dict[str, Held] = {}
    for members, body in zip(asked["groups"], bodies, strict=True):
        message = wire.decode(body)
        mine = [i for i in members if i in ids]
        if names and not session.absorbs:
            for i in mine:
                copies[i] |= {
                    name: rebuilt(copies[i].get(name, {}), message.get(name)) for name in names
                }
        updates.append(
            (
                torch.tensor([ids.index(i) for i in mine], dtype=torch.int64),
                {n: message.get(n) for n in names},
            )
        )
        payload = {name: value for name, value in message.items() if name not in (*names, *items)}
    if names and not session.absorbs:
        held = {name: HeldArrays(copies[ids[0]][name]) for name in names}
    about = (torch.tensor(ids), key, asked["round"], asked["exchange"], asked["quantise"])
    return Ask(step, payload, *about, held=held, updates=updates if names else [])


def evaluate_own(
    asked: dict[str, Any], site: Holding, memory: Memory, algorithm: Algorithm
) -> dict[str, Any]:
    """How the clients' own models do on their own test rows: sums."""
    session, lost, _ = opened(asked, site, memory, algorithm)
    sums, ids = session.evaluate_own(), session.ids.tolist()
    return {
        "ids": [i for i in ids if i in asked["ids"] and i not in lost],
        "sums": {
            k: [float(v[p]) for p, i in enumerate(ids) if i in asked["ids"] and i not in lost]
            for k, v in sums.items()
        },
    }


def opened(
    asked: dict[str, Any], site: Holding, memory: Memory, algorithm: Algorithm
) -> tuple[LocalSession, set[int], dict[int, dict[str, Tree]]]:
    """A session on this node's clients, with what they remember; those that should remember
    something and do not; held values.
    """
    session = Local().open(algorithm, site.federation(), random.key(asked["seed"]))
    places = {int(i): p for p, i in enumerate(session.ids)}
    strange = [i for i in asked["ids"] if i not in places]
    if strange:
        raise ReplyError(f"client {strange[0]} is not here; this node has {sorted(places)[:10]}")
    if "longest" in asked:
        at = torch.tensor([places[i] for i in asked["ids"]])
        late = torch.zeros(2, len(places), dtype=torch.int64)
        late[:, at] = torch.tensor([asked["up"], asked["down"]])
        session.delay(SomeDelays(late[0], late[1], asked["longest"]))
    lost: set[int] = set()
    first = algorithm.first_held(session.spec, session.shared)
    copies: dict[int, dict[str, Tree]] = {i: dict(first) for i in asked["ids"]} if first else {}
    if session.remembers or first:
        for i, seen in zip(asked["ids"], asked["seen"], strict=True):
            if not seen:
                continue
            kept = memory.recall(i, seen)
            if kept is None:
                lost.add(i)
                continue
            if kept["state"] is not None:
                session.states.put(places[i], kept["state"])
            if first:
                copies[i] = kept["held"]
    if session.prepares and (path := prepared_file(site, asked)) and path.is_file():
        try:
            session.load_prepared(files.read(path)[0]["prepared"])
        except CheckpointError:
            path.unlink(missing_ok=True)  # it is made anew
    return session, lost, copies


def prepared_file(site: Holding, asked: dict[str, Any]) -> Path | None:
    if site.cache is None:
        return None
    rows = asked.get("shard")
    if not rows:
        assert site.site is not None
        rows = [site.site.checksum, asked["center"], asked["scale"]]
    about = json.dumps([__version__, asked["algorithm"], asked["seed"], rows], sort_keys=True)
    return site.cache / f"prepared-{hashlib.sha256(about.encode()).hexdigest()[:32]}.safetensors"


def keep_prepared(session: LocalSession, site: Holding, asked: dict[str, Any]) -> None:
    """Write what was prepared, once."""
    path = prepared_file(site, asked)
    if session.prepares and path is not None and not path.is_file():
        with contextlib.suppress(CheckpointError):  # a full disk: it is only a cache
            files.write(path, {"prepared": session.save_prepared()}, {})


class Memory:
    """What clients remember, by version: of this round all versions, and the last of each of two
    rounds before it.
    """

    def __init__(self, context: Context, session: str, cache: Path | None):
        self.records, self.session = context.state.config_records, session
        self.folder = cache / "states" if cache else None

    def _record(self, client: int) -> dict[str, Any]:
        """The record of a client in this run: Flower's, or the one on disk; an empty one if there
        is neither.
        """
        record = self.records.get(f"client-{client}")
        if record is not None and record["session"] == self.session:
            return dict(record)
        path = self.folder / f"{client}.bin" if self.folder else None
        if path is not None and path.is_file():
            with contextlib.suppress(FoedusError, KeyError, TypeError):
                record = wire.decode(path.read_bytes())
                if record["session"] == self.session:
                    states = [bytes(s.numpy()) for s in record["states"]]
                    return {
                        "session": self.session,
                        "versions": list(record["versions"]),
                        "states": states,
                    }
        return {"session": self.session, "versions": [], "states": []}

    def recall(self, client: int, version: int) -> Any:
        """The state of a client as it was after that exchange; `None` if it is not here."""
        record = self._record(client)
        if version not in record["versions"]:
            return None
        return wire.decode(record["states"][record["versions"].index(version)])

    def keep(self, client: int, state: Any, version: int, seen: int) -> None:
        """Keep a new state under the version of the exchange that made it.

        Of the rounds before, the one that the server has seen (`seen`) is kept, and that of a round
        before it, for a server that has to go back to its checkpoint before the last; of this
        round, all that came before.
        """
        old = self._record(client)
        pairs = [(v, s) for v, s in zip(old["versions"], old["states"], strict=True) if v < version]
        if seen >> 16 < version >> 16:
            further = max((v for v, _ in pairs if v >> 16 < seen >> 16), default=seen)
            pairs = [(v, s) for v, s in pairs if v in (seen, further)]
        pairs.append((version, wire.encode(state)))
        record: dict[str, Any] = {
            "session": self.session,
            "versions": [v for v, _ in pairs],
            "states": [s for _, s in pairs],
        }
        self.records[f"client-{client}"] = ConfigRecord(record)
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            as_tensors = [
                torch.from_numpy(np.frombuffer(s, np.uint8).copy()) for s in record["states"]
            ]
            files.replace(
                self.folder / f"{client}.bin", [wire.encode({**record, "states": as_tensors})]
            )


app = SiteApp()
