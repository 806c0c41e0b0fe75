"""Faults of real federations: Ray actors, SuperNodes, ClientApps and servers that are killed, sites
that are slow or come and go.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import foedus as fd
from tests.faults.alone import JUMPS, Clock
from tests.faults.subject import ALGORITHMS, RESUMED, SAME, Tally, children, difference, federation

TIMEOUT = 15.0
RESULTS = "results"


class Doer(threading.Thread):
    """Does something at random moments while a run goes on, until it is told to end; `what` says
    how many it has done.
    """

    def __init__(self, what: Callable[[], int], pauses: Callable[[], float], most: int):
        super().__init__(daemon=True)
        self.what, self.pauses, self.most, self.done, self.over = (
            what,
            pauses,
            most,
            0,
            threading.Event(),
        )

    def run(self) -> None:
        while self.done < self.most and not self.over.wait(self.pauses()):
            self.done += self.what()

    def __enter__(self) -> Doer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.join()


def until_done(
    tally: Tally,
    algorithm: fd.Algorithm,
    fed: fd.Federation,
    rounds: int,
    engine: Any,
    path: Path,
    whole: fd.Run,
    **options: Any,
) -> None:
    """Run with a checkpoint, and go on from it after every clear error; then compare."""
    errors = 0
    while True:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run = fd.run(
                    algorithm,
                    fed,
                    rounds,
                    engine=engine,
                    checkpoint=path,
                    resume="auto",
                    progress=False,
                    **options,
                )
            break
        except fd.FoedusError as error:
            errors += 1
            if errors > 40:
                tally.end(RESUMED, f"does not come to an end: {error}")
                return
            time.sleep(1)
    tally.end(RESUMED if errors else SAME, difference(run, whole))


# -- Ray -------------------------------------------------------------------------------------------


def ray_workers() -> list[int]:
    """The worker processes of the Ray that this process has started."""
    found = []
    for pid in children(os.getpid()):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_text().startswith("ray::Worker"):
                found.append(pid)
    return found


def ray(tally: Tally, folder: Path, kills: int, rng: Random) -> None:
    """kill -9 of a worker process, every few seconds."""
    fed, algorithm, rounds = federation(12), ALGORITHMS["Scaffold"], 60

    def shoot() -> bool:
        there = ray_workers()
        if not there:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice(there), signal.SIGKILL)
            tally.kills += 1
            tally.injected += 1
            return True
        return False

    # Ray tells of every worker that died
    with contextlib.redirect_stdout(sys.stderr), fd.Ray(workers=2) as engine:
        whole = fd.run(algorithm, fed, rounds, engine=engine, participation=0.5, progress=False)
        number = 0
        while tally.kills < kills:
            # A worker that was lost takes seconds to replace; what is lost three times in one
            # exchange is given up.
            with Doer(shoot, lambda: rng.uniform(0.1, 6), min(4, kills - tally.kills)):
                number += 1
                path = folder / f"ray{number}.safetensors"
                until_done(tally, algorithm, fed, rounds, engine, path, whole, participation=0.5)


# -- Flower ----------------------------------------------------------------------------------------


class Federation:
    """A real federation on loopback of two nodes, whose processes can be disturbed one by one."""

    def __init__(self, folder: Path, rounds: int = 6):
        self.fed, self.algorithm, self.rounds = (
            federation().select([0, 1]),
            ALGORITHMS["Scaffold"],
            rounds,
        )
        self.folder, self.runs = folder, 0
        self.engine = fd.Flower(nodes=2, timeout=TIMEOUT, min_clients=2)
        self.whole = fd.run(self.algorithm, self.fed, rounds, engine=self.engine, progress=False)
        # of each node, its number at the loopback: one that is started again has a new one
        self.current = [0, 1]

    @property
    def loopback(self) -> Any:
        return self.engine.loopback

    def run(
        self, tally: Tally, what: Callable[[], int], pauses: Callable[[], float], most: int = 1
    ) -> None:
        self.runs += 1
        with Doer(what, pauses, most) as doer:
            path = self.folder / f"flower{self.runs}.safetensors"
            until_done(tally, self.algorithm, self.fed, self.rounds, self.engine, path, self.whole)
        tally.injected += doer.done

    def processes(self, node: int) -> list[subprocess.Popen]:
        """The SuperNode and its worker."""
        return self.loopback.nodes[self.current[node]]

    def restart(self, node: int) -> None:
        """Start a SuperNode until it stays, as a supervisor would: Flower refuses one that it does
        not yet take for gone.
        """
        base = Path(self.engine.temporary.name)
        config = f'shards="{base / "shards" / str(node)}"'
        while True:
            self.loopback.stop_node(self.current[node])
            self.current[node] = self.loopback.add_node(base / "keys" / f"node{node}", config)
            while self.processes(node)[0].poll() is None:
                if "SuperNode ID" in self.loopback.log(f"node{self.current[node]}"):
                    return
                time.sleep(0.1)
            time.sleep(1)

    def revive(self) -> bool:
        """Start the SuperNodes again that have ended, as a supervisor would; whether there were
        any.
        """
        ended = [node for node in (0, 1) if self.processes(node)[0].poll() is not None]
        for node in ended:
            self.restart(node)
        return bool(ended)

    def close(self) -> None:
        self.engine.close()


def client_apps(tally: Tally, federation: Federation, kills: int, rng: Random) -> None:
    """kill -9 of the process in which a site works on its answer."""

    def shoot() -> bool:
        end = time.monotonic() + 20
        # an answer takes a fraction of a second, so somebody must be waited for
        while time.monotonic() < end:
            there = [c for node in (0, 1) for c in children(federation.processes(node)[1].pid)]
            if there:
                time.sleep(rng.uniform(0, 0.05))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(there), signal.SIGKILL)
                    tally.kills += 1
                    return True
            time.sleep(0.005)
        return False

    while tally.kills < kills:
        before = tally.kills
        federation.run(tally, shoot, lambda: rng.uniform(0, 3), min(2, kills - tally.kills))
        if tally.kills == before:
            break


def super_nodes(tally: Tally, federation: Federation, kills: int, rng: Random) -> None:
    """kill -9 of a SuperNode with all its processes, or of both, which are started again after a
    while.
    """

    def shoot() -> int:
        nodes = rng.choice(([0], [1], [0, 1]))
        for node in nodes:
            federation.loopback.stop_node(federation.current[node])
            tally.kills += 1
        time.sleep(rng.uniform(0, 3))
        for node in nodes:
            federation.restart(node)
        return len(nodes)

    while tally.kills < kills:
        federation.run(tally, shoot, lambda: rng.uniform(0.5, 4))


def slow(tally: Tally, federation: Federation, runs: int, rng: Random) -> None:
    """A site that stands still for a while: shorter than the server waits, or (every third time)
    longer.
    """

    def pause() -> bool:
        processes, long = federation.processes(rng.randrange(2)), tally.injected % 3 == 2
        for signal_, seconds in (
            (signal.SIGSTOP, TIMEOUT + 3 if long else rng.uniform(2, 6)),
            (signal.SIGCONT, 0),
        ):
            for process in processes:
                os.killpg(process.pid, signal_)
            time.sleep(seconds)
        return True

    for _ in range(runs):
        federation.run(tally, pause, lambda: rng.uniform(0.2, 3))


def flapping(tally: Tally, federation: Federation, runs: int, rng: Random) -> None:
    """Both sites come and go every second or two."""

    def flap() -> bool:
        processes = federation.processes(rng.randrange(2))
        for signal_, seconds in ((signal.SIGSTOP, rng.uniform(0.2, 2)), (signal.SIGCONT, 0)):
            for process in processes:
                os.killpg(process.pid, signal_)
            time.sleep(seconds)
        return True

    for _ in range(runs):
        federation.run(tally, flap, lambda: rng.uniform(0.2, 1), 1000)


def clocks(tally: Tally, folder: Path, runs: int, rng: Random) -> None:
    """The wall clock of all processes of a federation jumps during the run."""
    for number in range(runs):
        at = folder / f"clocks{number}"
        clock, said = Clock(at / "clock"), at / "said.txt"
        with open(said, "wb") as out:
            words = [sys.executable, "-m", "tests.faults.sites", str(at / "run")]
            process = subprocess.Popen(words, env=clock.environment, stdout=out, stderr=out)
            while process.poll() is None:
                time.sleep(rng.uniform(2, 8))
                if "started" in said.read_text():
                    clock.jump(rng.choice(JUMPS))
                    tally.injected += 1
        lines = said.read_text().splitlines()
        last = lines[-1] if lines else ""
        tally.end(
            RESUMED if "error" in last else SAME,
            None if last.startswith("fine") else said.read_text()[-800:],
        )


# -- a deployed server -----------------------------------------------------------------------------


@contextlib.contextmanager
def _deploy(verb: str, what: Path) -> Iterator[subprocess.Popen]:
    """`foedus deploy VERB`, ended gently."""
    command = [sys.executable, "-c", "from foedus.cli import main; main()", "deploy", verb, what]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def _trial(folder: Path) -> Path:
    import numpy as np

    from foedus.engines.flower import deploy

    rng, sites = np.random.default_rng(0), {}
    for name in ("north", "south"):
        x = rng.normal(size=(80, 3))
        rows = [",".join(map(str, [*r, int(sum(r) > 0)])) for r in x.tolist()]
        sites[name] = folder.parent / f"{folder.name}-{name}.csv"
        sites[name].write_text("\n".join(["a,b,c,outcome", *rows]) + "\n")
    deploy.init(folder, sites, "outcome")
    plan = folder / "federation.toml"
    plan.write_text(
        plan.read_text()
        .replace('type = "FedAvg"', 'type = "Scaffold"')
        .replace("rounds = 20", "rounds = 12")
    )
    return folder


def server_apps(tally: Tally, folder: Path, kills: int, rng: Random) -> None:
    """`foedus deploy up`, with kill -9 of the command, whose processes end with it, or of its
    SuperLink alone, in turn; the command is given again each time.
    """
    whole = _trial(folder / "undisturbed")
    with _deploy("up", whole) as process:
        process.wait(400)
    expected = fd.Run.load(whole / RESULTS / "Scaffold.safetensors")
    number = 0
    while tally.kills < kills:
        number += 1
        before, trial = tally.kills, _trial(folder / f"deployed{number}")
        result, rounds = (
            trial / RESULTS / f"Scaffold.{kind}"
            for kind in ("safetensors", "checkpoint.safetensors")
        )
        for _ in range(12):
            with _deploy("up", trial) as process:
                shot = False
                while process.poll() is None and not shot:
                    time.sleep(0.05)
                    # From the first checkpoint on: what comes before is the start of Flower itself.
                    if tally.kills < min(kills, before + 3) and rounds.exists():
                        time.sleep(rng.uniform(0, 4))
                        shot = _shoot(tally, process, tally.kills % 2 == 0)
                        tally.kills += shot
                        tally.injected += shot
            if result.exists():
                break
        if result.exists():
            tally.end(
                RESUMED if tally.kills > before else SAME, difference(fd.Run.load(result), expected)
            )
        else:
            tally.end(RESUMED, "the deployed run did not come to an end")
            return


def _shoot(tally: Tally, up: subprocess.Popen, whole: bool) -> bool:
    """kill -9 of the command, whose processes are to end with it, or of its SuperLink alone."""
    under = children(up.pid)
    if whole:
        up.kill()
        up.wait()
        end = time.monotonic() + 15
        while left := [pid for pid in under if _alive(pid)]:
            if time.monotonic() > end:
                tally.wrong.append(
                    f"{len(left)} processes of a command that was killed are still there"
                )
                break
            time.sleep(0.1)
        return True
    for pid in under:
        with contextlib.suppress(OSError):
            if "\0superlink\0" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
                return True
    return False


def residents(tally: Tally, folder: Path, kills: int, rng: Random) -> None:
    """`foedus deploy server` and two `foedus deploy site`, with kill -9 at a site, in turn, of the
    process that works on an answer, of its resident worker, of the SuperNode, and of the command,
    which is given again. The logs and accounts of the sites must be whole in the end.
    """
    whole = _trial(folder / "calm")
    expected = _with_sites(whole, lambda sites: 0)
    number = 0
    while tally.kills < kills:
        number += 1
        trial, before = _trial(folder / f"resident{number}"), tally.kills

        def shoot(sites: list[Resident], last: int = before + 2) -> int:
            if tally.kills >= min(kills, last):
                return 0
            hit = rng.choice(sites).shoot(tally.kills % 4, rng)
            tally.kills += hit
            tally.injected += hit
            return hit

        found = _with_sites(trial, shoot)
        wrong = "the run did not come to an end" if found is None else difference(found, expected)
        tally.end(RESUMED if tally.kills > before else SAME, wrong or _books(trial))


def _books(folder: Path) -> str | None:
    """What is wrong with the logs and accounts of the sites of a folder."""
    import sqlite3

    from foedus.engines.flower import auditlog
    from foedus.engines.flower.policy import Policy

    for path in sorted((folder / "sites").glob("*/policy.toml")):
        policy = Policy.read(path)
        try:
            entries = list(auditlog.read(policy.log))
            with contextlib.closing(sqlite3.connect(policy.cache / "account.sqlite")) as db:
                ((said,),) = db.execute("pragma integrity_check").fetchall()
        except (fd.FoedusError, sqlite3.Error, OSError) as error:
            return f"{path.parent.name}: {error}"
        if said != "ok" or not entries:
            return f"{path.parent.name}: {len(entries)} entries in the log; the account: {said}"
    return None


class Resident:
    """A site that is given its command again when that has ended."""

    def __init__(self, policy: Path, stack: contextlib.ExitStack):
        self.policy, self.stack = policy, stack
        self.start()

    def start(self) -> None:
        self.process = self.stack.enter_context(_deploy("site", self.policy))

    def revive(self) -> None:
        if self.process.poll() is not None:
            self.start()

    def shoot(self, victim: int, rng: Random) -> bool:
        """kill -9 of a worker's child (0), a worker (1), a SuperNode (2) or all of the site (3)."""
        mine = {pid: children(pid) for pid in children(self.process.pid)}
        roles = dict.fromkeys(mine, "")
        for pid in mine:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                roles[pid] = next((w for w in words if w in ("worker", "supernode")), "")
        workers = [pid for pid, role in roles.items() if role == "worker"]
        found = {
            0: [pid for pid in workers if not mine[pid]],
            1: [pid for pid in workers if mine[pid]],
            2: [pid for pid, role in roles.items() if role == "supernode"],
            3: [self.process.pid],
        }[victim]
        if not found:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice(found), signal.SIGKILL)
            return True
        return False


def _with_sites(trial: Path, shoot: Callable[[list[Resident]], int]) -> fd.Run | None:
    """The result of a server and of sites that are shot at, given again until it is there."""
    from foedus.engines.flower.loopback import free_port

    plan, port = trial / "federation.toml", free_port()
    text = plan.read_text().replace("min_clients = 1", "min_clients = 2")
    plan.write_text(
        text.replace("timeout = 120", f"timeout = {TIMEOUT:g}").replace("9091", f"{port}")
    )
    policies = sorted((trial / "sites").glob("*/policy.toml"))
    for path in policies:
        path.write_text(path.read_text().replace("9091", f"{port}"))
    result, rounds = (
        trial / RESULTS / f"Scaffold.{kind}" for kind in ("safetensors", "checkpoint.safetensors")
    )
    with contextlib.ExitStack() as stack:
        sites = [Resident(path, stack) for path in policies]
        for _ in range(12):
            with _deploy("server", trial) as server:
                calm = time.monotonic()
                while server.poll() is None:
                    time.sleep(0.05)
                    for site in sites:
                        site.revive()
                    # From the first checkpoint on, and when the sites are back.
                    if rounds.exists() and time.monotonic() > calm and shoot(sites):
                        calm = time.monotonic() + 20
            if result.exists():
                return fd.Run.load(result)
    return None


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _main() -> None:
    """A federation in this process and its children, for `clock`."""
    folder = Path(sys.argv[1])
    folder.mkdir()
    found = Federation(folder, rounds=12)
    tally = Tally("clock")
    try:
        print("started", flush=True)
        with Doer(found.revive, lambda: 1.0, 1000):
            path = folder / "c.safetensors"
            until_done(
                tally, found.algorithm, found.fed, found.rounds, found.engine, path, found.whole
            )
    finally:
        found.close()
    print(f"wrong: {tally.wrong}" if tally.wrong else f"fine: {dict(tally.outcomes)}", flush=True)


if __name__ == "__main__":
    _main()
