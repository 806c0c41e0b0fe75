"""Mutated messages and files: whatever arrives, foedus answers with a value or with an error of its
own, soon and in little memory.

    python -m tests.faults.fuzz                       a million messages of the wire, and some of
                                                      everything else: minutes
    python -m tests.faults.fuzz --wire 20000 --only wire config
    python -m tests.faults.fuzz --again FILE          a case that was kept

Each case is a valid message with a few changes (`tests.faults.mutate`), its checksum put right in
most, so that what comes behind the checksum is reached. A case fails if anything but a
`FoedusError` comes out, if it takes longer than `PATIENCE` seconds, if it needs more than `ROOM`
bytes of address space, or if a message of the wire is accepted that `encode` would not have
written.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
import types
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch

from foedus import wire
from foedus.config.experiment import read_config
from foedus.core.result import Run
from foedus.errors import FoedusError, SecureError
from foedus.storage import checkpoint
from tests.faults import corpus
from tests.faults.mutate import mutated, mutated_text

PATIENCE = 10.0
ROOM = 64 << 20


class Hang(BaseException):
    """A case took too long."""


@dataclass
class Target:
    """A thing to feed: `make` gives a mutated case, `feed` hands it over. share: of the cases of
    the wire.
    """

    make: Callable[[Random], bytes]
    feed: Callable[[bytes], None]
    share: float
    accepted: int = 0
    refused: int = 0
    slowest: float = 0.0
    peak: int = 0
    failed: int = 0
    kinds: dict[str, bytes] = field(default_factory=dict)
    """The first case of each kind of failure."""


# -- the wire and what is read from it -------------------------------------------------------------


def repaired(message: bytes) -> bytes:
    """A message of the wire with a header and a checksum that are right."""
    body = b"fd\x01" + message[3:-4]
    return body + struct.pack("<I", zlib.crc32(body))


def _wire_case(valid: list[bytes]) -> Callable[[Random], bytes]:
    def make(rng: Random) -> bytes:
        message = mutated(rng.choice(valid), rng, valid)
        return repaired(message) if rng.random() < 0.95 else message

    return make


def feed_wire(message: bytes) -> None:
    t = wire.decode(message)
    if wire.encode(t) != message:
        raise AssertionError("decode accepts what encode does not write")
    if wire.nbytes(t) != len(message):
        raise AssertionError("nbytes is not the length of the message")


def wire_target() -> Target:
    return Target(_wire_case([wire.encode(t) for t in corpus.trees()]), feed_wire, 1.0)


def secure_target() -> Target:
    """Messages of secure aggregation, to a client at the phase they belong to, or to its server's
    first check.
    """
    from foedus.aggregation.secure.protocol import PHASES, Offer, fields
    from foedus.aggregation.secure.simulated import SecureAggregation, SecureClient

    config, phases, said = SecureAggregation(), list(PHASES), corpus.secure()
    valid = {p: [wire.encode(m) for m in said[p][:2]] for p in phases}
    everything = [m for p in phases for m in valid[p]]

    def make(rng: Random) -> bytes:
        number = rng.randrange(len(phases))
        return bytes([number]) + repaired(
            mutated(rng.choice(valid[phases[number]]), rng, everything)
        )

    def feed(case: bytes) -> None:
        phase, message = phases[case[0] % len(phases)], wire.decode(case[1:])
        client = SecureClient.restore(said[phase][2], config)
        more = ({"w": torch.ones(3)},) if phase == "mask" else ()
        with contextlib.suppress(SecureError):
            Offer.read(message)
        with contextlib.suppress(SecureError):
            fields(message, "it", bytes(32), keys=(torch.uint8, None, 32))
        getattr(client, phase)(message, *more)

    return Target(make, feed, 0.03)


class _Site:
    """Flower's Grid with one node, whose answer is the case."""

    def __init__(self) -> None:
        self.content: dict = {}

    def get_node_ids(self) -> list[int]:
        return [1]

    def push_messages(self, letters: list) -> list[str]:
        return ["id"]

    def pull_messages(self, ids: list[str]) -> list:
        about = types.SimpleNamespace(reply_to_message_id="id")
        return [
            types.SimpleNamespace(content=self.content, metadata=about, has_error=lambda: False)
        ]


def reply_target() -> Target:
    """Answers of a site, header and body, to a server that has asked for a step of FedAvg."""
    from flwr.app import Array
    from flwr.supercore.task_identity import TaskIdentity

    import foedus as fd
    from foedus.base import random
    from foedus.base.spec import Spec
    from foedus.core.exchange import Ask
    from foedus.engines.flower import messages, server
    from foedus.engines.flower.session import Line, SitesEngine

    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    site, spec, algorithm = _Site(), Spec((4,), 3, 3), fd.FedAvg(fd.Linear())
    fed = types.SimpleNamespace(spec=spec)
    w = algorithm.model.init(spec, random.key(0))
    ask = Ask("train", {"w": w}, torch.tensor([0, 1]), random.key(0), 3, 0, taking=2)
    headers, bodies = (
        corpus.headers(),
        [wire.encode(w) for _ in range(20)] + [wire.encode(t) for t in corpus.trees()],
    )

    def make(rng: Random) -> bytes:
        parts = [
            repaired(mutated(rng.choice(bodies), rng, bodies))
            if rng.random() < 0.7
            else rng.choice(bodies)
            for _ in "12"
        ]
        said = {
            "round": 3,
            "exchange": 0,
            "ids": [0, 1],
            "lost": [],
            "lengths": [len(p) for p in parts],
        }
        header = (
            json.dumps(said).encode()
            if rng.random() < 0.6
            else mutated(rng.choice(headers), rng, headers)
        )
        return struct.pack("<I", len(header)) + header + b"".join(parts)

    def feed(case: bytes) -> None:
        (n,) = struct.unpack("<I", case[:4])
        site.content = {messages.HEADER: {"json": case[4 : 4 + n].decode(errors="surrogateescape")}}
        body = case[4 + n :]
        site.content[messages.BODY] = {"0": Array("uint8", (len(body),), "foedus", body)}
        with contextlib.suppress(FoedusError):
            server._wrong(messages.header(site.pull_messages([])[0]), 1)
        session = SitesEngine(Line(site, {0: 1, 1: 1})).open(algorithm, fed, random.key(0))
        try:
            list(session.exchange(ask))
        finally:
            # what is caught as the fault of an untrusted site must not have been ours
            for why in session.faults.values():
                if "allocate" in why or "MemoryError" in why:
                    raise AssertionError(why)

    return Target(make, feed, 0.03)


# -- files -----------------------------------------------------------------------------------------


def _checksummed(data: bytes) -> bytes:
    """A file of ours with the checksum that it should have."""
    at = checkpoint._place(data)
    if at is None or at + 8 > len(data):
        return data
    zeroed = data[:at] + b"00000000" + data[at + 8 :]
    return data[:at] + b"%08x" % zlib.crc32(zeroed) + data[at + 8 :]


def checkpoint_target(folder: Path) -> Target:
    valid, path = corpus.checkpoints(), folder / "case.safetensors"

    def make(rng: Random) -> bytes:
        data = mutated(rng.choice(valid), rng, valid)
        return _checksummed(data) if rng.random() < 0.8 else data

    def feed(case: bytes) -> None:
        path.write_bytes(case)
        _, meta = checkpoint.read(path)
        if meta.get("kind") == "run":
            Run.load(path)

    return Target(make, feed, 0.05)


def archive_target() -> Target:
    from foedus.models.predictors.classifiers import unpack

    valid = corpus.archives()
    return Target(
        lambda rng: mutated(rng.choice(valid), rng, valid),
        lambda case: unpack(torch.frombuffer(bytearray(case) or bytearray(1), dtype=torch.uint8)),
        0.002,
    )


def config_target(folder: Path) -> Target:
    from foedus.engines.flower.server import read_plan

    path, texts, plan = folder / "case.toml", list(corpus.CONFIGS), len(corpus.COMMANDS) - 1
    fitting = {0: (1,), 1: (0,), 2: (2,), 3: (0, 1, 2), 4: (3,)}

    def make(rng: Random) -> bytes:
        number = rng.randrange(len(corpus.COMMANDS))
        text = texts[rng.choice(fitting[number])]
        return bytes([number]) + mutated_text(text, rng, texts).encode(errors="surrogateescape")

    def feed(case: bytes) -> None:
        number = case[0] % len(corpus.COMMANDS)
        path.write_bytes(case[1:])
        if number == plan:
            read_plan(path)
        else:
            read_config(path, corpus.COMMANDS[number])

    return Target(make, feed, 0.02)


def question_target(folder: Path) -> Target:
    """Messages of a server to a site with rows and a policy: header and body."""
    from flwr.app import Array

    from foedus.engines.flower import messages, server
    from foedus.engines.flower.client import answer
    from foedus.engines.flower.guard import Guard
    from foedus.engines.flower.policy import Policy
    from tests.security.test_rows import TEXTS, with_names

    folder.mkdir(parents=True, exist_ok=True)
    plan = TEXTS.replace("[run]", 'impute = "median"\n\n[run]')
    policy = {"allow__categories": '["name"]', "allow__quantiles": "true"}
    grid = with_names(folder, plan, **policy)
    for more in ("", '\n[aggregation]\ntype = "SecureAggregation"\nrange = 32.0\n'):
        (folder / "trial" / "federation.toml").write_text(plan + more)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            server.train(
                grid,
                server.read_plan(folder / "trial" / "federation.toml"),
                folder / f"results{len(more)}",
            )
    asked = [
        (m.metadata.message_type, json.dumps(messages.header(m)).encode(), messages.body(m))
        for m in grid.asked
        if m.metadata.dst_node_id == 1
    ]
    headers, bodies = [h for _, h, _ in asked], [b for _, _, b in asked if b]
    path = grid.policies[1]
    path.write_text(
        path.read_text()
        .replace("exchanges_a_day = 10000", "exchanges_a_day = 1000000")
        .replace("evaluations_a_day = 20", "evaluations_a_day = 1000000")
    )
    guard = Guard(Policy.read(path))
    config = guard.policy.node_config()

    def make(rng: Random) -> bytes:
        number = rng.randrange(len(asked))
        _, header, body = asked[number]
        if rng.random() < 0.7:
            header = mutated(header, rng, headers)
        if body and rng.random() < 0.5:
            body = mutated(body, rng, bodies)
        return struct.pack("<BI", number, len(header)) + header + body

    def feed(case: bytes) -> None:
        number, n = struct.unpack("<BI", case[:5])
        text, body = case[5 : 5 + n].decode(errors="surrogateescape"), case[5 + n :]
        content = {messages.HEADER: {"json": text}}
        content[messages.BODY] = {"0": Array("uint8", (len(body),), "foedus", body)}
        about = types.SimpleNamespace(message_type=asked[number % len(asked)][0])
        records = types.SimpleNamespace(config_records={})
        context = types.SimpleNamespace(node_config=config, state=records, run_config={})
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            message = types.SimpleNamespace(content=content, metadata=about)
            answer(message, messages.header(message), context, guard)

    return Target(make, feed, 0.005)


def policy_target(folder: Path) -> Target:
    """A site's policy, and its log."""
    from foedus.engines.flower import auditlog, deploy
    from foedus.engines.flower.policy import Policy

    folder.mkdir(parents=True, exist_ok=True)
    deploy.init(folder / "policies", {"north": None}, "outcome")
    text = (folder / "policies" / "sites" / "north" / "policy.toml").read_text()
    path, log = folder / "policy.toml", folder / "log.jsonl"
    for number in range(5):
        auditlog.append(log, asked="train.train", round=number, why="x" * number)
    lines = log.read_bytes()

    def make(rng: Random) -> bytes:
        if rng.random() < 0.5:
            return b"p" + mutated_text(text, rng, [text]).encode(errors="surrogateescape")
        return b"l" + mutated(lines, rng, [lines])

    def feed(case: bytes) -> None:
        if case[:1] == b"p":
            path.write_bytes(case[1:])
            policy = Policy.read(path)
            policy.node_config(), policy.budget, policy.limit("exchanges")
        else:
            log.write_bytes(case[1:])
            list(auditlog.read(log))

    return Target(make, feed, 0.02)


def targets(folder: Path) -> dict[str, Callable[[], Target]]:
    return {
        "wire": wire_target,
        "reply": reply_target,
        "secure": secure_target,
        "checkpoint": lambda: checkpoint_target(folder),
        "skops": archive_target,
        "config": lambda: config_target(folder),
        "question": lambda: question_target(folder / "question"),
        "policy": lambda: policy_target(folder / "policy"),
    }


# -- the campaign ----------------------------------------------------------------------------------


@contextlib.contextmanager
def limits(room: int) -> Iterator[None]:
    """No more than `room` bytes of address space beyond those in use, and an alarm that ends a
    hang.
    """
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)

    def ring(*_: object) -> None:
        raise Hang(f"took longer than {PATIENCE:g} s")

    former = signal.signal(signal.SIGALRM, ring)
    resource.setrlimit(resource.RLIMIT_AS, (used + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def _resident(peak: bool) -> int:
    """Bytes of memory in use, or the most since the last call with False."""
    if not peak:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    name = "VmHWM" if peak else "VmRSS"
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )
    return int(line.split()[1]) << 10


def one(target: Target, case: bytes) -> str | None:
    """Feed a case; what is wrong with what comes out, if anything."""
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    began = time.process_time()  # not of others that share the machine
    try:
        target.feed(case)
        target.accepted += 1
    except FoedusError:
        target.refused += 1
    except (Exception, Hang):
        return traceback.format_exc(limit=-2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        target.slowest = max(target.slowest, time.process_time() - began)
    return None


def fuzz(target: Target, cases: int, seed: int, room: int = ROOM) -> Target:
    """Run `cases` mutated inputs through a target."""
    rng = Random(seed)
    warnings.simplefilter("ignore")
    for _ in range(20):  # what is loaded with the first cases is not theirs
        one(target, target.make(rng))
    target.accepted = target.refused = 0
    target.slowest = 0.0
    base = _resident(peak=False)
    with limits(room):
        for _ in range(cases):
            case = target.make(rng)
            wrong = one(target, case)
            if wrong is not None:
                target.failed += 1
                target.kinds.setdefault(wrong, case)
    target.peak = max(0, _resident(peak=True) - base)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.fuzz", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--wire",
        type=int,
        default=1_000_000,
        help="messages of the wire; of others, a part of that",
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(targets(Path())), help="some of the targets"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keep", type=Path, default=Path("fuzz-failures"), help="folder for cases that failed"
    )
    parser.add_argument("--again", type=Path, help="a case that was kept: TARGET-*.bin")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder:
        known = targets(Path(folder))
        if options.again:
            wrong = one(known[options.again.name.split("-")[0]](), options.again.read_bytes())
            print(wrong or "fine")
            return int(wrong is not None)
        return campaign({n: known[n] for n in options.only or known}, options)


def campaign(chosen: dict[str, Callable[[], Target]], options: argparse.Namespace) -> int:
    print(
        "| input | cases | accepted | rejected with an error | other outcome | slowest, ms | "
        "memory, MB | seconds |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    failed = 0
    for name, build in chosen.items():
        target, began = build(), time.perf_counter()
        fuzz(target, max(100, int(options.wire * target.share)), options.seed)
        n = target.accepted + target.refused + target.failed
        numbers = [f"{v:,}" for v in (n, target.accepted, target.refused, target.failed)]
        numbers += [
            f"{1e3 * target.slowest:.1f}",
            f"{target.peak / 1e6:.0f}",
            f"{time.perf_counter() - began:.0f}",
        ]
        print(f"| {name} | {' | '.join(numbers)} |", flush=True)
        for wrong, case in list(target.kinds.items())[:20]:
            options.keep.mkdir(parents=True, exist_ok=True)
            file = options.keep / f"{name}-{hashlib.sha256(case).hexdigest()[:12]}.bin"
            file.write_bytes(case)
            print(f"{file}:\n{wrong}", file=sys.stderr)
        failed += target.failed
    print(f"\n{failed} failures" if failed else "\nno failure")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
