"""`fd.Flower` with its processes replaced by objects of this process: what it starts, deals out,
renews and closes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import foedus as fd

pytest.importorskip("flwr")

from flwr.supercore.run import RunNotRunningException

from foedus.engines.flower import loopback
from foedus.engines.flower.messages import content
from foedus.version import __version__
from tests.engines.flower.grid import HereGrid

AVERAGE = fd.FedAvg(fd.Linear(), lr=0.1, batch_size=16)


class HereLoopback:
    """In the place of `Loopback`: SuperNodes are node configs, and runs of Flower are counted."""

    def __init__(self, folder: Path, made: list[HereGrid]):
        self.folder, self.grids, self.runs = folder, made, 0
        self.done: list[str] = []
        self.configs: dict[int, dict[str, str]] = {}
        self.codes: list[str | None] = []

    def start_link(self) -> None:
        self.done.append("link")

    def register(self, keys: list[Path]) -> None:
        self.done += [f"register {k.name}" for k in keys]

    def add_node(self, key: Path, config: str, code: str | None) -> int:
        assert key.exists()
        name, _, folder = config.partition("=")
        assert name == "shards" and Path(folder.strip('"')).is_dir()
        self.configs[len(self.configs) + 1] = {"shards": folder.strip('"')}
        self.codes.append(code)
        self.done.append(f"node {key.name}")
        return len(self.configs) - 1

    def serve(self) -> HereGrid:
        self.runs += 1
        grid = HereGrid(self.configs)
        grid.closed = False
        grid.beat = SimpleNamespace(is_running=True)
        grid.beat.stop = lambda: setattr(grid.beat, "is_running", False)
        grid.close = lambda: setattr(grid, "closed", True)
        self.grids.append(grid)
        return grid

    def close(self) -> None:
        self.done.append("close")


@pytest.fixture
def grids(monkeypatch) -> list[HereGrid]:
    """The grids that became servers, one for each run of Flower's."""
    made: list[HereGrid] = []
    monkeypatch.setattr(loopback, "Loopback", lambda folder: HereLoopback(folder, made))
    return made


def same(a: fd.Run, b: fd.Run) -> None:
    for name in ("loss", "accuracy", "bytes_up", "bytes_down", "clients"):
        np.testing.assert_allclose(a.history[name], b.history[name], rtol=1e-6, err_msg=name)


def test_the_numbers_of_local_from_start_to_end(fed, grids):
    engine = fd.Flower(nodes=2)
    assert repr(engine) == "Flower(nodes=2)"
    with engine:
        same(fd.run(AVERAGE, fed, 2, engine=engine), fd.run(AVERAGE, fed, 2))
        link, folder = engine.loopback, engine.loopback.folder
        assert link.done == [
            "link", "register node0.pub", "register node1.pub", "node node0", "node node1"
        ]  # fmt: skip
        assert engine.line.timeout == 120.0  # only the greeting was given more
        # clients 0, 2, 4 on the first node and 1, 3 on the second
        assert engine.line.nodes == {0: 1, 2: 1, 4: 1, 1: 2, 3: 2}
        fd.run(AVERAGE, fed, 1, engine=engine)  # with the processes that are there
        assert len(grids) == 1 and link.runs == 1
    assert link.done[-1] == "close" and not folder.exists()
    assert grids[0].closed and not grids[0].beat.is_running
    assert engine.loopback is None
    engine.close()  # nothing is left to close
    assert link.done.count("close") == 1


@pytest.mark.parametrize("code", [None, "mine:ALGORITHMS"])
def test_nodes_know_the_code_of_the_user(code, grids):
    with fd.Flower(nodes=2, code=code) as engine:
        engine.start()
        assert engine.loopback.codes == [code, code]


def test_a_heartbeat_that_has_ended_is_not_stopped_again(grids):
    with fd.Flower(nodes=1) as engine:
        engine.start()
        engine.grid.beat.is_running = False
        engine.grid.beat.stop = None
    assert grids[0].closed


@pytest.mark.parametrize("how", ["Flower has ended its run", "a renewal had failed"])
def test_another_run_of_flower_where_the_last_is_over(how, fed, grids):
    def ended():
        raise RunNotRunningException

    with fd.Flower(nodes=2) as engine:
        first = fd.run(AVERAGE, fed, 1, engine=engine)
        if how == "a renewal had failed":
            engine._leave()
        else:
            engine.grid.get_node_ids = ended
        same(fd.run(AVERAGE, fed, 1, engine=engine), first)
        assert len(grids) == engine.loopback.runs == 2
        assert grids[0].closed and not grids[1].closed


def test_a_node_that_does_not_take_part_is_missed(fed, grids):
    with fd.Flower(nodes=2) as engine:
        engine.start()
        engine.grid.spoil = lambda asked, answer: (
            spoilt(answer) if asked.metadata.dst_node_id == 2 else answer
        )
        with (
            pytest.warns(UserWarning, match="node 2 does not take part: no room"),
            pytest.raises(fd.FoedusError) as info,
        ):
            fd.run(AVERAGE, fed, 1, engine=engine)
    assert str(info.value) == "no node has client 1; 1 of 2 nodes answered (see the warnings)"


def spoilt(answer):
    answer.content.clear()
    answer.content.update(content({"error": "no room"}))
    return answer


def test_nodes_are_asked_by_version_and_seed(fed, grids):
    from foedus.engines.flower.messages import header

    with fd.Flower(nodes=1) as engine:
        fd.run(AVERAGE, fed, 1, engine=engine, seed=7)
        hello = header(grids[0].asked[0])
    assert hello["foedus"] == __version__ and hello["session"] == ""
    assert hello["algorithm"]["type"] == "FedAvg"
    shards = Path(grids[0].contexts[1].node_config["shards"])
    assert not shards.exists() and hello["shard"]


@pytest.mark.parametrize("error", [fd.FoedusError("no port"), KeyboardInterrupt()], ids=repr)
def test_a_start_that_fails_leaves_nothing(error, grids, monkeypatch):
    links = []

    def fail(self):
        links.append(self)
        raise error

    monkeypatch.setattr(HereLoopback, "start_link", fail)
    engine = fd.Flower()
    with pytest.raises(type(error)):
        engine.start()
    assert links[0].done == ["close"] and not links[0].folder.exists()
    assert engine.loopback is None


def test_flower_that_is_not_installed(monkeypatch):
    monkeypatch.delattr("foedus.engines.flower.keys")
    monkeypatch.setitem(sys.modules, "foedus.engines.flower.keys", None)
    engine = fd.Flower()
    with pytest.raises(fd.FoedusError, match=r"fd\.Flower needs flwr: pip install 'foedus\[flow"):
        engine.start()
    assert engine.loopback is None


@pytest.mark.filterwarnings("ignore:node 2 does not take part")
def test_more_nodes_than_clients(fed, grids):
    one = fed.select([3])
    with fd.Flower(nodes=2) as engine:
        same(fd.run(AVERAGE, one, 1, engine=engine), fd.run(AVERAGE, one, 1))
        assert engine.line.nodes == {3: 1}
