"""Attacks that went through once: each is carried out, and fails now."""

from __future__ import annotations

import stat
import sys

import numpy as np
import pytest
import torch

import foedus as fd
from foedus import wire
from foedus.aggregation.secure.protocol import SecureAggregation
from foedus.core.describe import to_config
from foedus.engines.flower import auditlog, loopback
from foedus.engines.flower.account import Account, RefusedError
from foedus.engines.flower.memory import Memory
from foedus.engines.flower.policy import Policy
from foedus.engines.flower.secure_site import phase
from tests.engines.flower.test_site import table, written
from tests.security.sites import federation, scaled
from tests.security.test_policy import HELLO, PLAN

SECURE = SecureAggregation()
ABOUT = {"ids": [0], "seen": [0], "round": 1, "exchange": 0, "version": 65537}
SCALING = {"preprocess": scaled()}


def step(grid, algorithm, payload, parts=(), **more):
    """What the first site answers to a client step."""
    bodies = [wire.encode(payload), *parts]
    about = {"groups": [[0]], "held": [], "items": [], "lengths": [len(b) for b in bodies]}
    header = {**HELLO, **ABOUT, **SCALING, **about, "algorithm": to_config(algorithm), **more}
    return grid.ask(1, "train.train", header, b"".join(bodies))


def test_a_question_that_the_protocol_refuses_changes_no_state(tmp_path):
    """A server could give each site a state of its own: with control variates of 2^30, the rows of
    all but one are rounded away from the sum that all are asked for.
    """
    grid = federation(tmp_path, PLAN, secure__required="true", secure__states="true")
    alike = lambda value: {  # noqa: E731
        "weight": torch.full((2, 3), value), "bias": torch.full((2,), value)
    }  # fmt: skip
    said = step(
        grid, fd.Scaffold(fd.Linear(), lr=1.0), {"x": alike(1e18), "c": alike(-(2.0**30))},
        [wire.encode({})], phase="mask", weights="uniform", secure=to_config(SecureAggregation()),
    )  # fmt: skip
    assert "has no keys for this" in said["errors"]["0"]
    assert (
        Memory(grid.contexts[1], "s", Policy.read(grid.policies[1]).cache).recall(0, 65537) is None
    )


def test_a_scale_reveals_nothing_of_the_largest_number_of_a_column(tmp_path):
    """Whether x / scale is beyond the floats was an error; 45 questions found the largest x."""
    grid = federation(tmp_path, PLAN, secure__required="true")
    weights = {"w": {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}}
    told = {
        step(
            grid,
            fd.FedAvg(fd.Linear()),
            weights,
            preprocess=scaled((0.0,) * 3, (scale, 15.0, 1.0)),
        )["error"]
        for scale in (10.0, 1e-37, 2e-38)
    }
    assert len(told) == 1 and "not sent in the clear" in told.pop()


def test_a_checksum_does_not_confirm_a_guess_at_rows(tmp_path):
    """A CRC of any columns in any order is 32 linear equations in the bits of the rows."""
    grid = federation(tmp_path, PLAN)
    for name in ("north", "south"):
        written(tmp_path / "data", name, table(0))
    first, again, other = (grid.ask(n, "query.hello", HELLO) for n in (1, 1, 2))
    assert first["checksum"] == again["checksum"] != other["checksum"]
    written(tmp_path / "data", "north", table(1))
    assert grid.ask(1, "query.hello", HELLO)["checksum"] != first["checksum"]
    key = Policy.read(grid.policies[1]).cache / "checksum.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


@pytest.mark.parametrize("other", [(0.01, 1.0 + 1e-9), (0.02, 1.0)], ids=["noise", "probability"])
def test_a_cohort_is_one_entry_of_the_account(other, tmp_path):
    """Whether a client takes part is drawn once for a cohort. Noise that differed in a digit was
    accounted for as if it were drawn anew: 12 exchanges for less than epsilon=8 that cost 13.
    """
    account = Account(tmp_path)
    account.spend("a", 0.01, 1.0, 8.0, 1e-5)
    account.spend("a", 0.01, 1.0, 8.0, 1e-5)
    with pytest.raises(RefusedError, match="another probability or noise"):
        account.spend("a", *other, 8.0, 1e-5)
    account.spend("b", *other, 8.0, 1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"session": ["\ud800"]},
        {"session": ["x" * 100_000]},
        {"round": {"\ud800": "\x1b[2J"}},
        {"algorithm": {"type": ["y" * 100_000]}},
    ],
    ids=["surrogate", "long", "keys", "algorithm"],
)
def test_headers_in_the_log(change, tmp_path):
    """They are not checked yet: text that has no UTF-8 form ended the process before the line was
    written, and a list went into the log as it came.
    """
    grid = federation(tmp_path, PLAN)
    assert "error" in grid.ask(1, "query.hello", {**HELLO, **change}) or "round" in change
    path = Policy.read(grid.policies[1]).log
    assert len(list(auditlog.read(path))) == 1
    text = path.read_text()
    assert len(text) < 5000 and "\x1b" not in text


def test_a_reply_that_is_not_finite_is_noise_under_differential_privacy(tmp_path, monkeypatch):
    """An error told, without noise, that a row is beyond a number, and that the site takes part."""
    private = SecureAggregation(privacy=fd.DifferentialPrivacy(clip=1.0, noise=1.0, delta=1e-5))
    question = type("", (), {"phase": "mask", "secure": to_config(private), "step": "train",
                             "round": 1, "exchange": 0})()  # fmt: skip
    sent = []

    class Masking:
        def __init__(self, *about, **hooks):
            self.state = type("", (dict,), {"offer": OFFER, "phase": "advertise"})()

        @classmethod
        def restore(cls, *about, **hooks):
            return cls()

        def mask(self, message, reply, weight, noise, clip, asked):
            sent.append((reply, weight, noise(3).std() > 0, clip))
            return {}

    OFFER = {"session": "s", "round": 1, "exchange": 0, "clients": 3, "weight": 3, "unit": 1,
             "question": "0" * 64}  # fmt: skip
    monkeypatch.setattr("foedus.aggregation.secure.client.SecureClient", Masking)
    folder = tmp_path / "secure"
    folder.mkdir()
    (folder / "0.bin").write_bytes(wire.encode({"offer": OFFER}))
    more = lambda i: ({"w": torch.tensor([1.0, np.inf, 2.0])}, 7, None)  # noqa: E731
    with pytest.warns(UserWarning, match="is not finite: 0 in its place"):
        header, _ = phase(question, [0], [wire.encode({})], {"secure": "required"}, tmp_path, more)
    ((reply, weight, noisy, clip),) = sent
    assert header["errors"] == {} and header["ids"] == [0]
    assert reply["w"].tolist() == [0, 0, 0] and (weight, noisy, clip) == (1, True, 1.0)


def test_what_processes_print_is_for_this_user_alone(tmp_path, monkeypatch):
    """Tracebacks of the worker may quote rows."""
    monkeypatch.setattr(loopback, "INSIDE", [sys.executable, "-c", "print('a row')"])
    group = loopback.Processes(tmp_path / "cache" / "processes")
    group.start("north.worker", "worker").wait(30)
    assert group.log("north.worker") == "a row\n"
    assert stat.S_IMODE((group.folder / "north.worker.log").stat().st_mode) == 0o600
    assert stat.S_IMODE(group.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("demand", [{"secure__required": "true"}, {"secure__noise": "1.0"}])
def test_secure_aggregation_is_not_demanded_without_the_keys_of_others(demand, tmp_path):
    """A server played all other clients itself, and had the reply of the one."""
    path = federation(tmp_path, PLAN, **demand).policies[1]
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("[signing]"))
    path.write_text("\n".join(lines[:at] + lines[at + 3 :]))
    with pytest.raises(fd.ConfigError, match="a server could be all of them"):
        Policy.read(path)


def test_memories_of_others_do_not_show_one_reply(tmp_path):
    """Scaffold with all sites but one, x = 1e18 and c = -2^30, left controls beside which the rows
    of these sites are rounded away from the next sum, that of all.
    """
    grid = federation(tmp_path, PLAN, secure__required="true")
    secure = to_config(SecureAggregation())
    zeros = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    payload, asked = {"x": zeros, "c": zeros}, {"phase": "mask", "weights": "uniform"}
    parts = [wire.encode({})]
    scaffold = fd.Scaffold(fd.Linear(), lr=1.0)
    said = step(grid, scaffold, payload, parts, secure=secure, **asked)
    assert "clients of this algorithm remember something" in said["error"]
    average = fd.FedAvg(fd.Linear())
    said = step(grid, average, {"w": zeros}, parts, secure=secure, **asked)
    assert "has no keys for this" in said["errors"]["0"]  # it is not for its memory


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"range": 15.0}, "range=15 is less than the 16"),
        ({"bits": 12}, "bits=12 are fewer"),
        ({"range": 33.0, "bits": 16}, "range=33 with bits=16 rounds numbers to 0.001"),
    ],
    ids=["range", "grid", "wide range"],
)
def test_ranges_and_grids_are_not_the_servers_alone(settings, why, tmp_path):
    """Whether a reply fits is told: eight ranges found the largest number of a reply. And a sum of
    numbers on a coarse grid, weighted by rows, left three to five candidates for each.
    """
    grid = federation(tmp_path, PLAN, secure__required="true")
    hello = {**HELLO, "secure": to_config(SecureAggregation(**settings))}
    assert why in grid.ask(1, "query.hello", hello)["error"]
    assert "error" not in grid.ask(1, "query.hello", {**HELLO, "secure": to_config(SECURE)})
