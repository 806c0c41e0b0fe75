"""A real federation on loopback: Flower's SuperLink and SuperNodes as processes, with TLS and
keys.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import foedus as fd
from foedus import testing
from foedus.engines.flower import keys
from tests.engines.flower.test_session import MEASURED

AVERAGE = fd.FedAvg(fd.Linear(), lr=0.1, batch_size=16)
FOLDER = "FOEDUS_TEST_FOLDER"


class Slow(fd.FedAvg):
    """Asked to wait by a file, a process says by another that it is at work, and waits."""

    @fd.client_step(batch="loop")
    def train(self, client, w):
        folder = Path(os.environ.get(FOLDER, "/nowhere"))
        if (folder / "wait").exists():
            with contextlib.suppress(FileNotFoundError):  # the other client's process was first
                (folder / "wait").unlink()
                (folder / "new").write_text(str(os.getpid()))
                (folder / "new").rename(folder / "at work")
                time.sleep(200)
        return super().train(client, w)


SLOW = Slow(fd.Linear(), lr=0.1, batch_size=16)


@pytest.fixture(scope="module")
def engine():
    with fd.Flower(nodes=2, timeout=60, code="tests.conformance:ALGORITHMS") as found:
        found.start()
        yield found


@pytest.fixture(scope="module")
def pair(fed):
    return fed.select([0, 1])


def same(a: fd.Run, b: fd.Run) -> None:
    for column in b.records.columns:
        if column not in ("seconds", *MEASURED):
            np.testing.assert_allclose(
                a.records.values(column), b.records.values(column), rtol=1e-6, err_msg=column
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [AVERAGE, fd.Scaffold(fd.Linear(), lr=0.1, batch_size=16)],
    ids=["FedAvg", "Scaffold"],
)
def test_the_same_numbers_and_bytes_as_in_the_simulator(algorithm, engine, pair):
    real, local = fd.run(algorithm, pair, 2, engine=engine), fd.run(algorithm, pair, 2)
    same(real, local)
    assert (engine.line.received, engine.line.sent) == (
        local.records.last("bytes_up"),
        local.records.last("bytes_down"),
    )


@pytest.mark.slow
def test_several_clients_on_a_node_and_a_resumed_run(engine, fed, tmp_path):
    algorithm, path = fd.Scaffold(fd.Linear(), lr=0.1, batch_size=16), tmp_path / "run.safetensors"
    fd.run(algorithm, fed, 1, engine=engine, checkpoint=path)
    # The shard of the first run is not that of the second; the clients' states are found by their
    # session.
    same(
        fd.run(algorithm, fed, 2, engine=engine, checkpoint=path, resume=True),
        fd.run(algorithm, fed, 2),
    )


@pytest.mark.slow
def test_a_run_that_flower_has_ended_goes_on(engine, pair, tmp_path, capsys):
    """A readable error, and a new run of Flower for the remaining rounds."""
    algorithm, path = fd.Scaffold(fd.Linear(), lr=0.1, batch_size=16), tmp_path / "c.safetensors"

    class Stop(fd.Callback):
        def row(self, row):
            if row["round"] == 1:
                engine.loopback.flwr("stop", engine.grid._run.run_id, "loopback")

    with pytest.raises(fd.FoedusError, match="does not let this server go on"):
        fd.run(algorithm, pair, 3, engine=engine, checkpoint=path, callbacks=[Stop()])
    assert "Ctrl-C" not in capsys.readouterr().err  # nobody has pressed it
    same(
        fd.run(algorithm, pair, 3, engine=engine, checkpoint=path, resume=True),
        fd.run(algorithm, pair, 3),
    )


@pytest.mark.slow
def test_nobody_gets_in_without_a_key_that_is_known(engine):
    before = set(engine.grid.get_node_ids())
    private, public = keys.node_key(engine.loopback.folder / "keys" / "unknown")
    number = engine.loopback.add_node(private, 'shards="/nowhere"')
    end = time.monotonic() + 60
    while time.monotonic() < end and engine.loopback.nodes[number][0].poll() is None:
        time.sleep(0.2)
    assert set(engine.grid.get_node_ids()) == before
    assert engine.loopback.nodes[number][0].poll() is not None  # it has given up
    assert "Failed to activate SuperNode" in engine.loopback.log(f"node{number}")
    engine.loopback.register([public])
    number = engine.loopback.add_node(private, 'shards="/nowhere"')
    while time.monotonic() < end and len(engine.grid.get_node_ids()) == len(before):
        time.sleep(0.2)
    assert len(engine.grid.get_node_ids()) == len(before) + 1  # the key was all that was missing
    engine.loopback.stop_node(number)


@pytest.mark.slow
def test_secure_aggregation(engine, fed):
    """Every phase of every exchange is a process of its own, and what it leaves at the site is
    taken up by the next.
    """
    secure = fd.SecureAggregation()
    for algorithm in (AVERAGE, fd.Scaffold(fd.Linear(), lr=0.1, batch_size=16)):
        real, local = (
            fd.run(algorithm, fed, 2, engine=e, aggregation=secure)
            for e in (engine, fd.Local(batch=False))
        )
        same(real, local)
        assert engine.line.received == local.records.last("bytes_up")
    folder = engine.loopback.folder / "shards"
    assert list(folder.glob("*/cache/secure")) and not list(folder.glob("*/cache/secure/*"))


@pytest.mark.slow
def test_a_node_that_dies_is_left_out_and_the_run_goes_on(pair):
    class Dying(fd.Flower):
        def open(self, algorithm, fed, seed_key):
            session = super().open(algorithm, fed, seed_key)
            exchange = session.exchange

            def deadly(ask):
                if ask.round == 2:
                    self.loopback.stop_node(0)
                return exchange(ask)

            session.exchange = deadly
            return session

    with (
        Dying(nodes=2, timeout=10) as engine,
        pytest.warns(UserWarning, match="is left out: no answer within 10 s"),
    ):
        run = fd.run(AVERAGE, pair, 2, engine=engine)
    assert run.history.left_out.notna().tolist() == [False, False, True]
    assert run.history.left_out[2] == "0: no answer within 10 s"


@pytest.mark.slow
def test_a_client_process_that_is_killed_is_an_error_of_one_round(pair, tmp_path, monkeypatch):
    """Flower's own SuperNode would wait for its answer for a minute, or forever, and take up no
    other message.
    """

    monkeypatch.setenv(FOLDER, str(tmp_path))

    class Deadly(fd.Flower):
        def open(self, algorithm, fed, seed_key):
            session = super().open(algorithm, fed, seed_key)
            exchange = session.exchange

            def shoot():
                while not (tmp_path / "at work").exists():
                    time.sleep(0.01)
                os.kill(int((tmp_path / "at work").read_text()), signal.SIGKILL)

            def deadly(ask):
                if ask.round == 2:
                    (tmp_path / "wait").touch()
                    threading.Thread(target=shoot).start()
                return exchange(ask)

            session.exchange = deadly
            return session

    code = "tests.engines.flower.test_loopback:SLOW"
    with (
        Deadly(nodes=2, timeout=100, code=code) as engine,
        pytest.warns(UserWarning, match="ClientApp stopped responding"),
    ):
        run = fd.run(SLOW, pair, 3, engine=engine)
    assert run.history.left_out.notna().tolist() == [False, False, True, False]
    assert run.history.seconds.iloc[-1] < 90  # nobody was waited for


def test_what_needs_all_rows_is_refused_before_anything_starts(fed):
    engine = fd.Flower()
    with pytest.raises(fd.ConfigError, match="Central needs all rows in one place"):
        fd.run(fd.Central(fd.Linear()), fed, 1, engine=engine)
    assert engine.loopback is None


@pytest.mark.parametrize(
    ("options", "why"),
    [({"nodes": 0}, "nodes=0"), ({"timeout": 0}, "timeout=0"), ({"code": "x"}, "code='x'")],
)
def test_bad_settings(options, why):
    with pytest.raises(fd.ConfigError, match=why):
        fd.Flower(**options)


FAMILIES = ("FedNewton", "FedFW", "FedBoost, predictors from messages", "FedRes", "FFGB", "FedAvg")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "check",
    [testing.check_client_order, testing.check_seeds],
    ids=lambda c: c.__name__.removeprefix("check_"),
)
def test_one_algorithm_of_each_family(name, check, engine, fed):
    from tests.conformance import ALGORITHMS

    check(ALGORITHMS[name], fed, engine)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_families_have_the_numbers_of_the_simulator(name, engine, fed, tmp_path):
    from tests.conformance import ALGORITHMS

    algorithm, path = ALGORITHMS[name], tmp_path / "run.safetensors"
    local = fd.run(algorithm, fed, 3)
    same(fd.run(algorithm, fed, 3, engine=engine), local)
    fd.run(algorithm, fed, 2, engine=engine, checkpoint=path)
    same(fd.run(algorithm, fed, 3, engine=engine, checkpoint=path, resume=True), local)
