"""What `fd.run(..., aggregation=...)` hands to an aggregator, and what it takes from one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import foedus as fd
from foedus.base import tree
from foedus.core.aggregation import Aggregation, Aggregator, Setting


@dataclass(frozen=True)
class Doubled(Aggregation):
    """Twice the average, and a limited number of exchanges."""

    limit: int = 1000

    def open(self, setting: Setting) -> Aggregator:
        return _Doubling(self.limit, setting)


class _Doubling(Aggregator):
    def __init__(self, limit: int, setting: Setting):
        self.limit, self.setting, self.asked, self.seen = limit, setting, 0, []

    def total(self, trip, weights):
        self.asked += 1
        self.spent = f"{self.asked} exchanges" if self.asked >= self.limit else None
        return tree.scale(trip.mean(weights), 2.0)

    def gathered(self, trip, replies):
        raise fd.ConfigError(f"{trip.step}: {len(replies)} replies would be seen")

    def row(self) -> dict[str, float]:
        return {"asked": self.asked}

    def save(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load(self, saved: dict[str, Any]) -> None:
        self.asked = saved["asked"]


@pytest.fixture(scope="module")
def fed() -> fd.Federation:
    return fd.split(fd.load("digits"), "iid", clients=4, seed=0)


def test_an_average_goes_through_it(fed):
    algorithm = fd.FedAvg(fd.Linear(), lr=0.1)
    plain, doubled = (fd.run(algorithm, fed, 1, aggregation=a) for a in (None, Doubled()))
    for a, b in zip(plain.state.w.values(), doubled.state.w.values(), strict=True):
        torch.testing.assert_close(b, 2 * a)  # the first model of fd.Linear is 0
    assert doubled.history["asked"].tolist() == [0, 1]
    assert doubled.settings["aggregation"] != plain.settings["aggregation"]


def test_the_run_ends_when_it_is_spent(fed):
    run = fd.run(fd.FedAvg(fd.Linear()), fed, 10, aggregation=Doubled(limit=3))
    assert run.history["round"].tolist() == [0, 1, 2, 3]


def test_it_goes_on_from_a_checkpoint(fed, tmp_path):
    algorithm, path = fd.FedAvg(fd.Linear(), lr=0.01), tmp_path / "c.safetensors"
    whole = fd.run(algorithm, fed, 4, aggregation=Doubled())
    fd.run(algorithm, fed, 2, aggregation=Doubled(), checkpoint=path)
    again = fd.run(algorithm, fed, 4, aggregation=Doubled(), checkpoint=path, resume=True)
    assert again.history["asked"].tolist() == whole.history["asked"].tolist() == [0, 1, 2, 3, 4]
    assert all(
        torch.equal(a, b)
        for a, b in zip(again.state.w.values(), whole.state.w.values(), strict=True)
    )
    with pytest.raises(fd.CheckpointError, match="aggregation"):
        fd.run(algorithm, fed, 4, checkpoint=path, resume=True)


def test_it_is_asked_before_single_replies_are_seen(fed):
    with pytest.raises(fd.ConfigError, match="4 replies would be seen"):
        fd.run(fd.FFGB(fd.Forest(trees=1)), fed, 1, aggregation=Doubled())


def test_measurements_and_references_do_not_go_through_it(fed):
    run = fd.run(fd.Central(fd.Linear()), fed, 1, aggregation=Doubled())
    assert "asked" not in run.history
    run = fd.run(
        fd.FedFW(fd.Linear(), fd.L2Ball(5.0), penalty=1e-3, measure_every=1),
        fed,
        1,
        aggregation=Doubled(),
    )
    # the gap and the distance were measured by exchanges of their own
    assert run.history["asked"].tolist() == [0, 1]


@pytest.mark.parametrize("wrong", ["median", Doubled, 3])
def test_what_is_no_aggregation_is_refused(fed, wrong):
    with pytest.raises(fd.ConfigError, match="aggregation="):
        fd.run(fd.FedAvg(fd.Linear()), fed, 1, aggregation=wrong)
