"""Differential privacy in runs: what is released, what is refused, what is accounted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import foedus as fd
from foedus import wire
from foedus.aggregation.dp import mechanism as dp
from foedus.aggregation.dp.accounted import Journal
from foedus.aggregation.dp.accounting import epsilon
from foedus.base import tree
from foedus.storage import checkpoint
from tests.aggregation.entropy import Counted


@dataclass(frozen=True)
class Sends(fd.Algorithm):
    """Clients send their first row, in several tensors; the server keeps what it got."""

    add: bool = False
    exchanges: int = 1
    first: int = 0
    fail: int = 0

    def row(self, client):
        x = client.data.x[0]
        return {
            "a": x[:1],
            "b": {"c": x[1:], "d": wire.Sparse(torch.zeros(1, dtype=torch.int32), 0 * x[:1], (3,))},
        }, None

    def single(self, client):
        return client.data.x[0], None

    def nothing(self, client):
        return {}, None

    def start(self, clients):
        state = fd.State(got=[clients.mean(self.row) for _ in range(self.first)])
        return state.replace(who=clients.ids)

    def round(self, clients, state):
        ask = clients.sum if self.add else clients.mean
        clients.gather(self.nothing)
        got = [ask(self.row) for _ in range(self.exchanges)]
        if clients.round == self.fail:
            raise KeyboardInterrupt
        return state.replace(got=[*state.got, *got], who=clients.ids, share=clients.share())


def fed_of(rows) -> fd.Federation:
    return fd.Federation.from_clients(
        [
            (np.atleast_2d(np.asarray(r, np.float32)), np.zeros(len(np.atleast_2d(r)), np.float32))
            for r in rows
        ]
    )


def flat(got) -> torch.Tensor:
    return torch.cat([got["a"].flatten(), got["b"]["c"].flatten()]).double()


def private(**more) -> fd.DifferentialPrivacy:
    return fd.DifferentialPrivacy(
        **{
            "clip": 1.0,
            "noise": 1.0,
            "delta": 1e-3,
            "accountant": "rdp",
            "entropy": Counted(b"dp"),
            **more,
        }
    )


def launch(fed, algorithm=None, rounds=1, **more):
    aggregation = more.pop("aggregation", None) or private()
    return fd.run(
        algorithm or Sends(), fed, rounds, aggregation=aggregation, evaluate_every=0, **more
    )


# -- what is released ------------------------------------------------------------------------------


def test_clipping_by_hand(monkeypatch):
    """(3, 4) is scaled to norm 1, (0.3, 0.4) stays; the client with more rows weighs the same.

    Without noise: (0.45, 0.6).
    """
    monkeypatch.setattr(
        dp.sampling, "rounded_gaussian", lambda size, bits, entropy: np.zeros(size, np.int64)
    )
    fed = fed_of([[[3.0, 4.0]] * 5, [[0.3, 0.4]]])
    got = launch(fed).state.got[0]
    torch.testing.assert_close(
        flat(got), torch.tensor([0.45, 0.6], dtype=torch.float64), atol=2e-3, rtol=0
    )
    assert got["b"]["d"].shape == (3,) and got["a"].dtype == torch.float32
    total = launch(fed, Sends(add=True)).state.got[0]
    torch.testing.assert_close(
        flat(total), torch.tensor([0.9, 1.2], dtype=torch.float64), atol=4e-3, rtol=0
    )


def test_the_divisor_is_the_expected_number(monkeypatch):
    """Of 4 clients who send 0.5, two come though one in four was expected: 2 * 0.5 / (4 * 0.25)."""
    monkeypatch.setattr(
        dp.sampling, "rounded_gaussian", lambda size, bits, entropy: np.zeros(size, np.int64)
    )
    monkeypatch.setattr(
        dp.sampling,
        "bernoulli",
        lambda p, size, entropy: np.array([True, False, True, False]) | (p == 1),
    )
    fed = fed_of([[0.5, 0.0]] * 4)
    run = launch(fed, Sends(first=1), participation=fd.Poisson(0.25))
    torch.testing.assert_close(
        [float(g["a"]) for g in run.state.got], [0.5, 1.0], atol=2e-3, rtol=0
    )
    assert run.state.who.tolist() == [0, 1, 2, 3]  # who came is for nobody to know
    assert run.state.share == 0.25
    assert run.history["messages_up"].tolist() == [4, 5]  # everybody, then 4 * 0.25 expected


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(0, 10**6),
    st.floats(1e-3, 1e3),
    st.floats(0.01, 50),
    st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e3, 1e30, 1e300]),
)
def test_one_client_changes_the_sum_by_at_most_clip(size, seed, clip, noise, scale):
    """In whole steps of the grid, exactly: the sum of squares is an integer."""
    rows = torch.from_numpy(np.random.default_rng(seed).standard_normal((4, size))) * scale
    step = dp.grid(noise, clip, size)
    whole = dp.clipped(rows, clip, step)
    change = (whole.sum(0) - whole[1:].sum(0)).tolist()
    assert math.sqrt(sum(v * v for v in change)) * step <= clip
    longest = torch.linalg.vector_norm(rows / max(scale, 1e-300), dim=1) * scale
    for row, before, norm in zip(
        whole, rows, longest.tolist(), strict=True
    ):  # and it is the reply, but for clipping and the grid
        torch.testing.assert_close(
            row.double() * step,
            before * min(1.0, clip / norm) if norm else before,
            atol=2.1e-3 * clip,
            rtol=0,
        )


def test_noise_has_the_variance_that_is_accounted():
    """Zeros from 50 clients: what is left is noise of deviation z c / n, the same in every
    tensor.
    """
    fed = fed_of(np.zeros((50, 4000)))
    got = launch(fed, aggregation=private(clip=2.0, noise=3.0)).state.got[0]
    noise = flat(got) * 50 / 6.0
    assert abs(float(noise.mean())) < 4 / math.sqrt(4000)
    assert abs(float(noise.var()) - 1) < 4 * math.sqrt(2 / 4000)
    assert float(got["b"]["d"].abs().min()) > 0


def test_noise_is_not_of_the_seed():
    fed = fed_of(np.zeros((5, 8)))
    one, other = (launch(fed, aggregation=private(entropy=None)).state.got[0] for _ in range(2))
    assert not torch.equal(flat(one), flat(other))


def test_a_round_of_nobody_is_like_any_other(monkeypatch):
    """Noise of the form of a reply, on the record, and nobody is asked."""
    monkeypatch.setattr(dp.sampling, "bernoulli", lambda p, size, entropy: np.zeros(size, bool))
    fed = fed_of(np.ones((5, 600)))
    run = launch(fed, participation=fd.Poisson(0.1))
    noise = flat(run.state.got[0]) * 0.5
    assert run.history["messages_up"].iloc[-1] == 0
    assert abs(float(noise.std()) - 1) < 4 * math.sqrt(1 / 1200)
    assert run.history["epsilon"].iloc[-1] == epsilon({(0.1, 1.0, 1): 1}, 1e-3, "rdp") > 0


@pytest.mark.parametrize(
    "algorithm",
    [
        fd.FedAvg(fd.Linear()),
        fd.Scaffold(fd.Linear()),
        fd.FedFW(fd.Linear(bias=False), fd.NuclearBall(5.0), penalty=1e-3),
    ],
)
def test_nobody_for_real_algorithms(algorithm, monkeypatch):
    monkeypatch.setattr(dp.sampling, "bernoulli", lambda p, size, entropy: np.zeros(size, bool))
    fed = fd.split(fd.load("digits"), "iid", clients=4, seed=0)
    run = fd.run(algorithm, fed, 2, participation=fd.Poisson(0.5), aggregation=private())
    assert run.history["messages_up"].tolist() == [0, 2, 4]  # the expected number
    assert all(
        bool(t.isfinite().all()) for t in tree.leaves(run.state) if isinstance(t, torch.Tensor)
    )


def test_quantized_replies_and_the_engine_make_no_difference():
    fed = fed_of(np.random.default_rng(0).standard_normal((6, 5)))
    plain, looped = (
        flat(launch(fed, engine=e).state.got[0]) for e in (None, fd.Local(batch=False))
    )
    assert torch.equal(plain, looped)  # integers add up to the same in any order
    rounded = flat(launch(fed, quantise="float16", aggregation=private()).state.got[0])
    torch.testing.assert_close(plain, rounded, atol=5e-3, rtol=0)


# -- what is accounted -----------------------------------------------------------------------------


def test_every_exchange_is_accounted():
    """Before the first round everybody is asked; two exchanges of a round ask the same sample."""
    fed = fed_of(np.zeros((5, 2)))
    run = launch(fed, Sends(exchanges=2, first=1), rounds=3, participation=fd.Poisson(0.4))
    expected = [epsilon({(1.0, 1.0, 1): 1, (0.4, 1.0, 2): t}, 1e-3, "rdp") for t in range(4)]
    assert run.history["epsilon"].tolist() == pytest.approx(expected)


def test_a_round_keeps_its_cohort(monkeypatch):
    drawn = []

    def draw(p, size, entropy):
        drawn.append(p)
        return np.arange(size) == len(drawn)

    class Engine(fd.Local):
        def open(self, *about):
            session = super().open(*about)
            exchange = session.exchange

            def noting(ask):
                if ask.step == "row":
                    asked.append((ask.round, ask.ids.tolist()))
                return exchange(ask)

            session.exchange = noting
            return session

    asked: list[tuple[int, list[int]]] = []
    monkeypatch.setattr(dp.sampling, "bernoulli", draw)
    run = launch(
        fed_of(np.zeros((5, 2))),
        Sends(exchanges=3),
        rounds=2,
        participation=fd.Poisson(0.4),
        engine=Engine(),
    )
    assert drawn == [0.4, 0.4]
    assert asked == [(1, [1])] * 3 + [(2, [2])] * 3
    assert run.history["messages_up"].tolist() == [0, 6, 12]  # 3 of 5 * 0.4 clients a round


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("exchanges", [1, 2])
def test_a_budget_is_never_exceeded(accountant, exchanges):
    fed = fed_of(np.zeros((5, 2)))
    aggregation = private(noise=3.0, budget=3.0, accountant=accountant)
    run = launch(
        fed,
        Sends(exchanges=exchanges),
        rounds=100,
        participation=fd.Poisson(0.5),
        aggregation=aggregation,
    )
    spent = run.history["epsilon"].tolist()
    assert 2 < len(spent) < 100 and spent[-1] <= 3.0
    # one more would have been too much
    assert epsilon({(0.5, 3.0, exchanges): len(spent)}, 1e-3, accountant) > 3.0
    assert len(run.state.got) == exchanges * (len(spent) - 1)


def test_a_round_that_turns_out_too_dear_is_not_made():
    """The first round has two exchanges, of which the budget allows one: that one is spent, and the
    state is as before.
    """
    one, two = (epsilon({(1.0, 2.0, k): 1}, 1e-3, "rdp") for k in (1, 2))
    run = launch(
        fed_of(np.zeros((5, 2))),
        Sends(exchanges=2),
        rounds=5,
        aggregation=private(noise=2.0, budget=(one + two) / 2),
    )
    assert run.history["round"].tolist() == [0] and run.state.got == []


def test_a_round_that_is_not_made_is_not_in_the_checkpoint(tmp_path):
    one, two = (epsilon({(1.0, 2.0, k): 1}, 1e-3, "rdp") for k in (1, 2))
    dear, path = private(noise=2.0, budget=(one + two) / 2), tmp_path / "c.safetensors"
    launch(
        fed_of(np.zeros((5, 2))), Sends(exchanges=2), rounds=5, aggregation=dear, checkpoint=path
    )
    assert checkpoint.read(path)[1]["rounds_done"] == 0


def test_a_budget_for_not_even_one_round_is_refused_at_once():
    with pytest.raises(
        fd.ConfigError,
        match=r"budget=0.5: one round would make epsilon .*; use more noise than 1.0",
    ):
        launch(fed_of(np.zeros((5, 2))), aggregation=private(budget=0.5))
    one = epsilon({(1.0, 1.0, 1): 1}, 1e-3, "rdp")
    with pytest.raises(fd.ConfigError, match=r"round 0 \(row\)"):
        launch(fed_of(np.zeros((5, 2))), Sends(first=2), aggregation=private(budget=1.1 * one))


def test_the_last_round_before_the_budget_ends_is_evaluated():
    fed = fd.split(fd.load("digits"), "iid", clients=4, seed=0)
    aggregation = private(noise=4.0, budget=3.0)
    run = fd.run(fd.FedAvg(fd.Linear()), fed, 100, aggregation=aggregation, evaluate_every=100)
    assert 1 < len(run.history) < 50 and run.history["accuracy"].notna().tolist()[-1]


# -- checkpoints -----------------------------------------------------------------------------------


def test_the_account_goes_on_from_a_checkpoint(tmp_path):
    fed, path, part = fed_of(np.zeros((5, 2))), tmp_path / "c.safetensors", fd.Poisson(0.5)
    config = private(entropy=None)
    whole = launch(fed, rounds=4, participation=part, aggregation=config)
    launch(fed, rounds=2, participation=part, aggregation=config, checkpoint=path)
    again = launch(
        fed, rounds=4, participation=part, aggregation=config, checkpoint=path, resume=True
    )
    assert again.history["epsilon"].tolist() == whole.history["epsilon"].tolist()
    (tmp_path / "c.safetensors.privacy").unlink()  # the checkpoint has the account too
    further = launch(
        fed, rounds=5, participation=part, aggregation=config, checkpoint=path, resume=True
    )
    assert further.history["epsilon"].iloc[-1] == epsilon({(0.5, 1.0, 1): 5}, 1e-3, "rdp")
    with pytest.raises(fd.CheckpointError, match="noise"):
        launch(
            fed,
            rounds=6,
            participation=part,
            aggregation=private(entropy=None, noise=2.0),
            checkpoint=path,
            resume=True,
        )


def test_a_round_that_was_lost_is_accounted_all_the_same(tmp_path):
    """Round 3 releases two averages and dies; made again, it has cost both."""
    fed, path, config = fed_of(np.zeros((5, 2))), tmp_path / "c.safetensors", private(entropy=None)
    more = {"participation": fd.Poisson(0.5), "aggregation": config, "checkpoint": path}
    algorithm = Sends(exchanges=2, fail=3)
    with pytest.raises(KeyboardInterrupt):
        launch(fed, algorithm, rounds=4, **more)
    lost = epsilon({(0.5, 1.0, 2): 3}, 1e-3, "rdp")
    run = launch(fed, algorithm, rounds=2, resume=True, **more)  # nothing more is released
    assert run.history["epsilon"].iloc[-1] == epsilon({(0.5, 1.0, 2): 2}, 1e-3, "rdp") < lost
    with pytest.raises(KeyboardInterrupt):
        launch(fed, algorithm, rounds=4, resume=True, **more)
    journal = Journal(path)
    assert journal.read() == {(0.5, 1.0, 2): 4}
    with journal.path.open("a") as file:
        file.write('["cut')  # by a crash, before anything was released
    assert journal.read() == {(0.5, 1.0, 2): 4}
    for file in (path, path.with_name(f"{path.name}.previous")):
        file.unlink()
    with pytest.raises(
        fd.CheckpointError, match=r"c.safetensors.privacy is the privacy account of an earlier run"
    ):
        launch(fed, algorithm, rounds=1, **more)
    # it died before its first checkpoint
    run = launch(fed, algorithm, rounds=1, resume="auto", **more)
    assert run.history["epsilon"].iloc[-1] == epsilon({(0.5, 1.0, 2): 5}, 1e-3, "rdp")
    journal.path.write_text("nonsense\n")
    with pytest.raises(fd.CheckpointError, match="damaged"):
        launch(fed, algorithm, rounds=2, resume=True, **more)


def test_a_spent_run_stays_spent(tmp_path):
    fed, path, config = (
        fed_of(np.zeros((5, 2))),
        tmp_path / "c.safetensors",
        private(noise=3.0, budget=2.0, entropy=None),
    )
    first = launch(fed, rounds=100, aggregation=config, checkpoint=path)
    again = launch(fed, rounds=100, aggregation=config, checkpoint=path, resume=True)
    assert len(again.history) == len(first.history) < 50


# -- what is refused -------------------------------------------------------------------------------


def test_sampling_of_a_fixed_number_is_refused_before_any_work():
    with pytest.raises(
        fd.ConfigError, match=r"participation=0.5 .*use participation=fd.Poisson\(0.5\)"
    ):
        launch(fed_of(np.zeros((5, 2))), participation=0.5)


def test_late_replies_are_refused():
    with pytest.raises(fd.ConfigError, match="Delayed"):
        launch(fed_of(np.zeros((5, 2))), engine=fd.Delayed(fd.Local(), up=1, down=0))


@dataclass(frozen=True)
class Looks(Sends):
    def round(self, clients, state):
        clients.gather(self.single)
        return state


def test_where_nothing_is_sent_nothing_is_spent():
    fed = fed_of(np.random.default_rng(0).normal(size=(5, 2)))
    run = launch(fed, fd.Independent(fd.Linear()), rounds=2)
    assert run.history["epsilon"].tolist() == [0, 0, 0] and run.history["bytes_up"].iloc[-1] == 0


def test_single_replies_are_refused():
    with pytest.raises(fd.ConfigError, match=r"Looks looks at single replies \(single\).*FedAvg"):
        launch(fed_of(np.zeros((5, 2))), Looks())


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"clip": 0.0}, "clip=0.0"),
        ({"clip": {"row": -1.0}}, r"clip\['row'\]=-1.0"),
        ({"noise": 0.001}, "protects no client"),
        ({"delta": 2.0}, "delta=2.0"),
        ({"budget": -1.0}, "budget=-1.0"),
        ({"accountant": "moments"}, "accountant"),
    ],
)
def test_settings_that_mean_nothing(wrong, match):
    with pytest.raises(fd.ConfigError, match=match):
        private(**wrong)


def test_settings_that_do_not_fit_the_run():
    fed = fed_of(np.zeros((5, 2)))
    with pytest.raises(fd.ConfigError, match="one of the 5 clients"):
        launch(fed, aggregation=private(delta=0.2))
    with pytest.raises(fd.ConfigError, match="'rows' is not a client step of Sends"):
        launch(fed, aggregation=private(clip={"rows": 1.0}))
    with pytest.raises(fd.ConfigError, match="no norm for 'row'; it names 'single'"):
        launch(fed, aggregation=private(clip={"single": 1.0}))


def test_a_clip_for_each_step():
    config = private(clip={"row": 2.0, "single": 1.0})
    assert config.clip_of("row") == 2.0 and config == private(
        clip=(("single", 1.0), ("row", 2.0)), entropy=config.entropy
    )


def test_replies_are_clipped_by_the_norm_of_their_step(monkeypatch):
    """Rows (3, 4) and (0, 0) of norm 5 and 0: with a clip of 2 for `row`, whatever others have, the
    sum is (1.2, 1.6).
    """
    monkeypatch.setattr(
        dp.sampling, "rounded_gaussian", lambda size, bits, entropy: np.zeros(size, np.int64)
    )
    fed = fed_of([[3.0, 4.0], [0.0, 0.0]])
    run = launch(fed, Sends(add=True), aggregation=private(clip={"row": 2.0, "single": 9.0}))
    np.testing.assert_allclose(flat(run.state.got[0]), [1.2, 1.6], atol=0.01)


def test_noise_that_was_rounded_down_is_centered(monkeypatch):
    """floor(y) is -1 or 0 where y is about 0, as often the one as the other: what is released lies
    half a step on either side.
    """
    released = []
    for floor in (-1, 0):
        monkeypatch.setattr(
            dp.sampling,
            "rounded_gaussian",
            lambda size, bits, entropy, floor=floor: np.full(size, floor),
        )
        released.append(flat(launch(fed_of([[0.0, 0.0], [0.0, 0.0]])).state.got[0]))
    assert torch.equal(released[0], -released[1]) and bool((released[1] > 0).all())


@dataclass(frozen=True)
class Breaks(Sends):
    def row(self, client):
        return {"a": 1 / client.data.x[0]}, None


def test_a_reply_that_is_not_finite_names_its_client():
    with pytest.raises(fd.DivergenceError, match="client 1"):
        launch(fed_of([[1.0, 2.0], [1.0, 0.0], [3.0, 1.0]]), Breaks())


# -- algorithms ------------------------------------------------------------------------------------


def test_the_center_of_fedfw_where_only_averages_are_seen(monkeypatch):
    """f_i = (x - y_i)^2 / 2 on [-1, 1]: y of 1, 1, -1, -1 give points 1, 1, -1, -1 from 0. Clients
    0, 1 and 2 come, and two are expected: the mean of the points is (1 + 1 - 1) / 2, and with q =
    1/2 and eta = 1 the center goes from 0 to 1/4. So does (s_i - x_i) / 4, added up.
    """
    monkeypatch.setattr(
        dp.sampling, "rounded_gaussian", lambda size, bits, entropy: np.zeros(size, np.int64)
    )
    monkeypatch.setattr(
        dp.sampling, "bernoulli", lambda p, size, entropy: np.array([True, True, True, False])
    )
    one = lambda y: (np.array([[1.0]], np.float32), np.array([y], np.float32))  # noqa: E731
    fed = fd.Federation.from_clients([one(y) for y in (1.0, 1.0, -1.0, -1.0)])
    algorithm = fd.FedFW(fd.Linear(bias=False), fd.L2Ball(1.0), penalty=1e-3, measure_every=0)
    run = fd.run(
        algorithm, fed, 1, participation=fd.Poisson(0.5), aggregation=private(), evaluate_every=0
    )
    assert float(run.state.center["weight"]) == pytest.approx(0.25, abs=2e-3)
    assert "x" not in run.state


@pytest.mark.slow
@pytest.mark.parametrize("part", [1.0, fd.Poisson(0.5)], ids=["all", "some"])
@pytest.mark.parametrize(
    "algorithm",
    [fd.FedAvg(fd.Linear(), lr=0.1), fd.Scaffold(fd.Linear(), lr=0.1)],
    ids=["FedAvg", "Scaffold"],
)
def test_on_ray(algorithm, part, fed, ray_engine):
    """The noise of known bytes gives the simulator's numbers, and the same account."""
    ray, local = (
        fd.run(
            algorithm,
            fed,
            4,
            engine=e,
            participation=part,
            aggregation=private(entropy=Counted(b"ray")),
        )
        for e in (ray_engine, fd.Local())
    )
    for a, b in zip(tree.leaves(ray.state), tree.leaves(local.state), strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-3)  # the grid
    for column in ("epsilon", "bytes_up", "bytes_down", "messages_up"):
        assert ray.records.values(column) == local.records.values(column)
