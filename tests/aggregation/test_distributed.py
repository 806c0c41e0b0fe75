"""Differential privacy under secure aggregation: what is released, what is accounted, what the
server can see.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import foedus as fd
from foedus.aggregation.dp import distributed
from foedus.aggregation.dp import noise as sampling
from foedus.aggregation.dp.accounted import Journal
from foedus.aggregation.dp.accounting import epsilon
from foedus.aggregation.dp.distributed import APART, Share
from foedus.aggregation.secure.aggregator import PrivateSecureAggregator
from foedus.aggregation.secure.client import SecureClient
from foedus.aggregation.secure.server import SecureServer
from foedus.aggregation.secure.simulated import aggregate
from foedus.base import tree
from foedus.errors import SecureError
from tests.aggregation.entropy import Counted
from tests.aggregation.test_dp import Looks, Sends, fed_of, private


def joined(bits: int = 24, threshold: float = 2 / 3, **more) -> fd.SecureAggregation:
    return fd.SecureAggregation(bits=bits, threshold=threshold, privacy=private(**more))


def launch(fed, algorithm=None, rounds=1, **more):
    aggregation = more.pop("aggregation", None) or joined()
    return fd.run(
        algorithm or Sends(), fed, rounds, aggregation=aggregation, evaluate_every=0, **more
    )


def whole(got) -> torch.Tensor:
    return torch.cat([t.flatten() for t in tree.leaves(got)]).double()


@pytest.fixture
def silent(monkeypatch):
    """Noise of 0."""
    monkeypatch.setattr(
        sampling, "discrete_gaussian", lambda size, variance, entropy: np.zeros(size, np.int64)
    )


class Dropping(PrivateSecureAggregator):
    gone: dict = {}  # noqa: RUF012 - by the tests

    def absent(self, phase, ask):
        return self.gone.get(phase, ())


def drops(gone: dict[str, list[int]], **more) -> fd.SecureAggregation:
    @dataclass(frozen=True)
    class Drops(fd.SecureAggregation):
        def open(self, setting):
            made = Dropping(self, setting)
            made.gone = gone
            return made

    return Drops(privacy=private(**more))


# -- what is released ------------------------------------------------------------------------------


def test_by_hand_with_the_noise_of_known_bytes():
    """(3, 4) is scaled to norm 1, (0.3, 0.4) stays, and client 2 sends zeros: (0.9, 1.2), and the
    noise of three, over 3.

    t = 2 of the three must stay, z = 2, and a step is 2^-23: each has a variance of 4 * 2^46 / 2
    steps.
    """
    entropy = Counted(b"by hand")
    fed = fed_of([[[3.0, 4.0]] * 5, [[0.3, 0.4]], [[0.0, 0.0]]])
    run = launch(fed, aggregation=joined(noise=2.0, entropy=entropy))
    again = Counted(b"by hand")
    noise = sum(sampling.discrete_gaussian(5, 2**47, again) for _ in range(3))
    expected = (
        torch.tensor([0.9, 1.2, 0.0, 0.0, 0.0], dtype=torch.float64)
        + torch.from_numpy(noise) * 2.0**-23
    ) / 3
    torch.testing.assert_close(whole(run.state.got[0]), expected, atol=2e-6, rtol=0)
    assert again.times == entropy.times  # and nothing else was drawn
    assert run.state.got[0]["a"].dtype == torch.float32


def test_the_share_of_a_client():
    share = Share(fd.SecureAggregation(bits=20, privacy=private(noise=3.0)), 5.0, 10)  # t = 7
    assert share.variance == math.ceil(9 * 4**19 / 7) and share.clip == share.settings.range == 5.0
    assert share.headroom == pytest.approx(16 * math.sqrt(share.variance), rel=1e-6)
    assert (
        share.settings.headroom == share.headroom and share.settings.fixed_point.step == 5.0 / 2**19
    )


@pytest.mark.parametrize(
    ("gone", "messages"),
    [
        ({}, 6),
        ({"share": [0, 3]}, 4),
        ({"mask": [5, 1]}, 4),
        ({"mask": [2]}, 5),
        ({"unmask": [4]}, 6),
    ],
)
def test_the_noise_is_at_least_what_is_accounted_whoever_drops_out(gone, messages):
    """Six clients send zeros, and 4 must stay.

    The sum has a variance of (z c)^2 messages / 4: exactly (z c)^2 where four are left.
    """
    aggregation = drops(gone, clip=2.0, noise=3.0, entropy=Counted(b"drops"))
    got = whole(
        launch(fed_of(np.zeros((6, 5000))), Sends(add=True), aggregation=aggregation).state.got[0]
    )
    variance = float((got / 6.0).var())
    assert abs(variance / (messages / 4) - 1) < 4 * math.sqrt(2 / 5000)
    assert abs(float(got.mean())) < 4 * 6.0 * math.sqrt(messages / 4 / 5000)


def test_below_the_threshold_nothing_is_released_and_the_exchange_is_accounted():
    aggregation = drops({"mask": [0, 1, 2]})
    with pytest.raises(fd.TooFewClients, match="3 of 6 clients are left"):
        launch(fed_of(np.zeros((6, 2))), aggregation=aggregation)


def test_an_average_is_over_those_whose_messages_came(silent):
    """Of 6 clients who send 0.6, two drop out; the others all take part."""
    run = launch(fed_of(np.full((6, 1), 0.6)), aggregation=drops({"mask": [0, 1]}))
    assert float(run.state.got[0]["a"]) == pytest.approx(0.6, abs=1e-6)
    assert run.history["left_out"].iloc[-1].startswith("0: mask: it did not answer")


@pytest.mark.parametrize("name", ["FedAvg", "Scaffold", "FedNewton"])
def test_without_noise_it_is_secure_aggregation(name, silent):
    """With a clip that nothing reaches: to the quantization step, in averages of equal clients."""
    fed = fd.split(fd.load("digits"), "iid", clients=3, seed=0)
    fed = (
        fed.select(np.flatnonzero(fed.sizes == fed.sizes[0]))
        if len(set(fed.sizes.tolist())) > 1
        else fed
    )
    assert len(fed) >= 2
    algorithm = {
        "FedAvg": fd.FedAvg(fd.Linear(), lr=0.1),
        "Scaffold": fd.Scaffold(fd.Linear(), lr=0.1),
        "FedNewton": fd.FedNewton(fd.RandomFourier(20, bandwidth=4.0), reg=0.1),
    }[name]
    secure, both = (
        fd.run(algorithm, fed, 2, aggregation=a, evaluate_every=0)
        for a in (fd.SecureAggregation(range=64.0, bits=32), joined(bits=32, clip=64.0))
    )
    for a, b in zip(tree.leaves(secure.state), tree.leaves(both.state), strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 200),
    st.integers(0, 10**6),
    st.floats(1e-3, 1e3),
    st.integers(16, 30),
    st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e3, 1e30, 1e300]),
)
def test_what_is_encoded_has_at_most_the_norm_clip(size, seed, clip, bits, scale):
    """In whole steps, exactly: a sum of squares of integers, over tensors of several types."""
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal(size)) * scale
    points = replace(fd.SecureAggregation(bits=bits), range=clip).fixed_point
    reply = {"a": x[: size // 2], "b": x[size // 2 :].view(-1, 1)}
    steps = points.encode(reply, 1, 64, clip=clip).view(np.int64).tolist()
    assert sum(v * v for v in steps) <= 4 ** (bits - 1)
    norm = float(torch.linalg.vector_norm(x / max(scale, 1e-300)) * scale)
    expected = x * min(1.0, clip / norm) if norm else x
    torch.testing.assert_close(
        torch.tensor(steps).double() * points.step,
        expected,
        atol=math.sqrt(size) * points.step,
        rtol=1e-8,
    )


def test_replies_that_are_not_finite_are_refused_at_the_client():
    config = joined()
    for bad in (math.nan, math.inf):
        with pytest.raises(
            fd.DivergenceError, match="which has no fixed-point form; nothing was sent"
        ):
            config.fixed_point.encode({"a": torch.tensor([bad, 1.0])}, 1, 32, clip=1.0)


def taking(monkeypatch, who):
    """Who takes part, by the probability to do so."""
    monkeypatch.setattr(
        PrivateSecureAggregator, "_draw", lambda self: torch.tensor(who(self.open_round[0]))
    )


# -- who takes part --------------------------------------------------------------------------------


def test_all_answer_and_nobody_knows_who_takes_part(silent, monkeypatch):
    """Of 4 clients who send 0.5, two take part though one in four is expected: 2 * 0.5 / (4 *
    0.25). Four messages come of everybody.
    """
    taking(monkeypatch, lambda p: [True, p == 1, True, p == 1])
    run = launch(fed_of([[0.5, 0.0]] * 4), Sends(first=1), participation=fd.Poisson(0.25))
    torch.testing.assert_close(
        [float(g["a"]) for g in run.state.got], [0.5, 1.0], atol=1e-6, rtol=0
    )
    assert run.state.who.tolist() == [0, 1, 2, 3] and run.state.share == 0.25
    assert run.history["messages_up"].tolist() == [16, 32]


def test_a_round_of_nobody_is_noise(monkeypatch):
    taking(monkeypatch, lambda p: [False] * 6)
    fed = fed_of(np.ones((6, 5000)))
    run = launch(fed, Sends(add=True), participation=fd.Poisson(0.1))
    noise = whole(run.state.got[0])
    assert abs(float(noise.var()) / 1.5 - 1) < 4 * math.sqrt(2 / 5000)
    assert run.history["messages_up"].iloc[-1] == 24
    assert run.history["epsilon"].iloc[-1] == epsilon({(0.1, 1.0, 1): 1}, 1e-3, "rdp", APART) > 0


def test_a_round_keeps_its_cohort(monkeypatch):
    drawn = []

    taking(monkeypatch, lambda p: drawn.append(p) or [True] * 5)
    launch(fed_of(np.zeros((5, 2))), Sends(exchanges=3), rounds=2, participation=fd.Poisson(0.4))
    assert drawn == [0.4, 0.4]


@dataclass(frozen=True)
class Remembers(Sends):
    """Clients count how often they took part."""

    def init(self, client):
        return torch.zeros(())

    def row(self, client):
        return super().row(client)[0], client.state + 1

    def nothing(self, client):
        return {}, None


def test_who_does_not_take_part_stays_as_it_is(monkeypatch):
    taking(monkeypatch, lambda p: [True, True, False, False])
    run = launch(fed_of(np.zeros((4, 2))), Remembers(), rounds=3, participation=fd.Poisson(0.5))
    assert run.clients["states"]["states"].tolist() == [3, 3, 0, 0]


@pytest.mark.parametrize(
    "algorithm",
    [
        fd.FedAvg(fd.Linear()),
        fd.Scaffold(fd.Linear()),
        fd.FedFW(fd.Linear(bias=False), fd.L2Ball(5.0), penalty=1e-3, measure_every=0),
        fd.FedFW(fd.Linear(bias=False), fd.NuclearBall(5.0), penalty=1e-3, measure_every=0),
        fd.FedNewton(fd.RandomFourier(10, bandwidth=4.0), reg=0.1),
    ],
    ids=["FedAvg", "Scaffold", "FedFW", "FedFW, rank one", "FedNewton"],
)
def test_algorithms_that_only_average(algorithm):
    fed = fd.split(fd.load("digits"), "iid", clients=5, seed=0)
    run = fd.run(algorithm, fed, 2, participation=fd.Poisson(0.5), aggregation=joined(clip=5.0))
    assert run.history["epsilon"].is_monotonic_increasing and run.history["epsilon"].iloc[-1] > 0
    assert all(
        bool(t.isfinite().all()) for t in tree.leaves(run.state) if isinstance(t, torch.Tensor)
    )


# -- what the server sees --------------------------------------------------------------------------


def test_the_server_never_sees_a_sum_without_noise(monkeypatch):
    """Whatever leaves a client's `mask` is masked; what the server makes of it is the clipped
    replies and every survivor's noise, to the step.
    """
    drawn, sums, masked, inside = [], [], [], []

    def draw(size, variance, entropy):
        assert inside  # a client is at work
        drawn.append(np.random.default_rng(len(drawn)).integers(1, 1000, size))
        return drawn[-1]

    def mask(self, *args):
        inside.append(self.id)
        answer = client_mask(self, *args)
        inside.pop()
        masked.append(whole(answer["reply"]))
        return answer

    def total(self, answers):
        result = server_total(self, answers)
        sums.append((whole(result.sum), len(result.ids)))
        return result

    client_mask, server_total = SecureClient.mask, SecureServer.total
    monkeypatch.setattr(sampling, "discrete_gaussian", draw)
    monkeypatch.setattr(SecureClient, "mask", mask)
    monkeypatch.setattr(SecureServer, "total", total)
    rows = np.eye(4)
    run = launch(fed_of(rows), Sends(exchanges=2), rounds=2, aggregation=drops({"unmask": [1]}))
    assert len(sums) == 4 and len(drawn) == len(masked) == 16
    for n, (seen, clients) in enumerate(sums):
        noise = sum(drawn[4 * n : 4 * n + 4])
        assert clients == 4 and bool((noise >= 4).all())
        steps = torch.round((seen - torch.tensor([1.0] * 4 + [0.0] * 3)) * 2**23)
        # clipping leaves room for rounding
        assert (steps - torch.from_numpy(noise)).abs().max() <= 8 * math.sqrt(7)
        torch.testing.assert_close(whole(run.state.got[n]), seen / 4, rtol=1e-6, atol=1e-7)
    for (
        message
        # unmasked it is within 2^23 + 1000; that 7 numbers of 32 random bits look so has a
        # probability of 2^-49
    ) in masked:
        assert float(message.abs().max()) > 2**24


def test_a_client_gives_no_shares_for_a_sum_with_too_little_noise():
    """Of 6 clients 4 advertise, as many as must stay to the end; then the server says that one of
    these dropped out.
    """
    config = Share(joined(), 1.0, 6).settings
    server = SecureServer(config, dict.fromkeys(range(6), 1), session="s")
    clients = {i: SecureClient(i, config) for i in range(4)}
    lists = server.keys({i: c.advertise(server.offer()) for i, c in clients.items()})
    boxes = server.boxes({i: c.share(lists[i]) for i, c in clients.items()})
    for i, c in clients.items():
        c.mask(boxes[i], {"a": torch.zeros(2)}, 1, lambda size: np.zeros(size, np.int64), 1.0)
    request = {
        "tag": boxes[0]["tag"],
        "survivors": torch.tensor([0, 1, 2]),
        "dropped": torch.tensor([3]),
    }
    with pytest.raises(SecureError, match="leaves 3 survivors of 4; 4 are needed"):
        clients[0].unmask(request)


# -- the modulus -----------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.integers(17, 40), st.floats(0.01, 100), st.integers(2, 5000))
def test_there_is_room_for_all_replies_and_all_noise(bits, noise, clients):
    share = Share(fd.SecureAggregation(bits=bits, privacy=private(noise=noise)), 1.0, clients)
    largest = clients * (2 ** (bits - 1) + share.headroom)
    if largest < 2**63:
        assert largest < 2 ** (share.settings.fixed_point.width(clients, clients) - 1)
    else:
        with pytest.raises(fd.ConfigError, match="use fewer bits"):
            share.settings.fixed_point.width(clients, clients)
    assert (
        share.headroom
        >= 16 * math.sqrt(share.variance)
        >= 16 * noise * 2 ** (bits - 1) / math.sqrt(clients + 1) * 0.999
    )


@pytest.mark.parametrize("bits", [17, 28])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sum_does_not_wrap(bits, sign):
    """Three clients of one number each, all at the clip, all with the largest noise."""
    share = Share(joined(bits), 1.0, 3)
    assert share.settings.fixed_point.width(3, 3) == (32 if bits == 17 else 64)
    replies = [{"a": torch.tensor([sign * 1.0])}] * 3
    noise = lambda size: np.full(size, sign * share.headroom)  # noqa: E731
    total = aggregate(replies, config=share.settings, noise=noise).total.sum["a"]
    assert float(total) == sign * (3 + 3 * share.headroom * share.settings.fixed_point.step)
    with pytest.raises(
        fd.ConfigError,
        match=f"headroom={share.headroom} is too small for noise of {share.headroom + 1}",
    ):
        aggregate(
            replies, config=share.settings, noise=lambda size: np.full(size, share.headroom + 1)
        )


# -- how far from normal ---------------------------------------------------------------------------


def discrete(variance: float, reach: int) -> np.ndarray:
    mass = np.exp(-(np.arange(-reach, reach + 1.0) ** 2) / (2 * variance))
    return mass / mass.sum()


@pytest.mark.parametrize("variance", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("clients", [2, 3, 5])
def test_a_sum_of_discrete_gaussians_is_one_to_tau(variance, clients):
    """For variances so small that it can be seen; it vanishes as exp(-pi^2 variance)."""
    reach = 200
    mass = discrete(variance, reach)
    summed = mass
    for _ in range(clients - 1):
        summed = np.convolve(summed, mass)
    middle = len(summed) // 2
    at = np.arange(
        -int(4 * math.sqrt(variance * clients)), int(4 * math.sqrt(variance * clients)) + 1
    )
    ratio = np.log(summed[middle + at] / discrete(variance * clients, reach)[reach + at])
    tau = 10 * sum(math.exp(-2 * math.pi**2 * variance * k / (k + 1)) for k in range(1, clients))
    assert 0 < np.abs(ratio).max() <= tau


@pytest.mark.parametrize("deviation", [2.0, 5.0, 40.0])
def test_a_discrete_gaussian_and_a_rounded_normal_number(deviation):
    """Both inequalities of the proof, where double precision can tell."""
    x = np.arange(0, int(6 * deviation))
    rounded = stats.norm.sf((x - 0.5) / deviation) - stats.norm.sf((x + 0.5) / deviation)
    ratio = np.log(rounded / stats.norm.pdf(x / deviation) * deviation)
    assert (ratio >= -1 / (24 * deviation**2) - 1e-9).all()
    assert (ratio <= x**2 / (24 * deviation**4) + 1e-9).all()


def test_a_grid_that_is_too_coarse_is_refused_and_the_remedy_works():
    fed = fed_of(np.zeros((3, 400)))
    with pytest.raises(
        fd.ConfigError,
        match=r"bits=14 is too coarse for noise=1 on replies of 403 numbers; use "
        r"SecureAggregation\(bits=18\)",
    ):
        launch(fed, aggregation=joined(bits=14))
    launch(fed, aggregation=joined(bits=18))
    share = Share(joined(bits=20, noise=0.01), 1.0, 3)
    with pytest.raises(fd.ConfigError, match=r"bits=20.*SecureAggregation\(bits=25\)"):
        share.noise(1000)
    size, steps = 10**7, 2.0**23
    assert 1.01 * (size + 2 * math.sqrt(150 * size) + 300) / (24 * steps**2) <= distributed.APART
    assert Share(joined(), 1.0, 3)._fine(size, 24) and not Share(joined(), 1.0, 3)._fine(2**28, 24)


# -- what is accounted -----------------------------------------------------------------------------


def test_epsilon_of_full_rounds_by_the_formula():
    """Two rounds of z = 2 are one Gaussian mechanism of 2 / sqrt(2), whose delta Balle and Wang
    2018 give; and 2e-8 an exchange.
    """
    run = launch(
        fed_of(np.zeros((5, 2))), rounds=2, aggregation=joined(noise=2.0, accountant="pld")
    )
    spent = float(run.history["epsilon"].iloc[-1]) - 4e-8
    a = 1 / math.sqrt(2)
    delta = stats.norm.cdf(a / 2 - spent / a) - math.exp(spent) * stats.norm.cdf(-a / 2 - spent / a)
    assert delta == pytest.approx(1e-3 * math.exp(-4e-8), rel=1e-6)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_epsilon_of_sampled_rounds_by_the_library(accountant):
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    run = launch(
        fed_of(np.zeros((5, 2))),
        rounds=3,
        participation=fd.Poisson(0.3),
        aggregation=joined(noise=1.5, accountant=accountant),
    )
    library = (
        PLDAccountant(value_discretization_interval=1e-3)
        if accountant == "pld"
        else RdpAccountant(range(2, 65))
    )
    for _ in range(3):
        library.compose(PoissonSampledDpEvent(0.3, GaussianDpEvent(1.5)))
    assert float(run.history["epsilon"].iloc[-1]) == pytest.approx(
        library.get_epsilon(1e-3), rel=1e-3
    )
    plain = fd.run(
        Sends(),
        fed_of(np.zeros((5, 2))),
        3,
        participation=fd.Poisson(0.3),
        evaluate_every=0,
        aggregation=private(noise=1.5, accountant=accountant),
    )
    assert 0 < run.history["epsilon"].iloc[-1] - plain.history["epsilon"].iloc[-1] < 1e-6


@pytest.mark.parametrize("exchanges", [1, 2])
def test_a_budget_stops_the_run(exchanges):
    aggregation = joined(noise=3.0, budget=3.0)
    run = launch(
        fed_of(np.zeros((5, 2))),
        Sends(exchanges=exchanges),
        rounds=100,
        participation=fd.Poisson(0.5),
        aggregation=aggregation,
    )
    spent = run.history["epsilon"].tolist()
    assert 2 < len(spent) < 100 and spent[-1] <= 3.0
    assert epsilon({(0.5, 3.0, exchanges): len(spent)}, 1e-3, "rdp", APART) > 3.0
    with pytest.raises(fd.ConfigError, match=r"budget=0.5: one round would make epsilon"):
        launch(fed_of(np.zeros((5, 2))), aggregation=joined(budget=0.5))


def test_the_account_goes_on_from_a_checkpoint(tmp_path):
    fed, path, part = fed_of(np.zeros((5, 2))), tmp_path / "c.safetensors", fd.Poisson(0.5)
    options = {"participation": part, "aggregation": joined(entropy=None)}
    total = launch(fed, rounds=4, **options)
    launch(fed, rounds=2, checkpoint=path, **options)
    again = launch(fed, rounds=4, checkpoint=path, resume=True, **options)
    assert again.history["epsilon"].tolist() == total.history["epsilon"].tolist()
    assert Journal(path).read() == {(0.5, 1.0, 1): 4}
    with pytest.raises(fd.CheckpointError, match="noise"):
        launch(
            fed,
            rounds=6,
            participation=part,
            aggregation=joined(entropy=None, noise=2.0),
            checkpoint=path,
            resume=True,
        )


def test_a_round_that_was_lost_is_accounted_all_the_same(tmp_path):
    fed, path = fed_of(np.zeros((5, 2))), tmp_path / "c.safetensors"
    options = {
        "participation": fd.Poisson(0.5),
        "aggregation": joined(entropy=None),
        "checkpoint": path,
    }
    with pytest.raises(KeyboardInterrupt):
        launch(fed, Sends(fail=2), rounds=3, **options)
    run = launch(fed, Sends(fail=2), rounds=1, resume=True, **options)
    assert Journal(path).read() == {(0.5, 1.0, 1): 2} and len(run.history) == 2


def test_where_nothing_is_sent_nothing_is_spent():
    fed = fed_of(np.random.default_rng(0).normal(size=(5, 2)))
    run = launch(fed, fd.Independent(fd.Linear()), rounds=2)
    assert run.history["epsilon"].tolist() == [0, 0, 0]


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"range": 64.0}, "range=64.0 does not go with privacy.*leave range out"),
        ({"headroom": 5}, "headroom=5 does not go with privacy.*leave headroom out"),
        (
            {"rounding": "stochastic"},
            "rounding='stochastic' does not go with privacy.*use rounding='nearest'",
        ),
        ({"privacy": 1.0}, r"privacy=1.0 must be a fd.DifferentialPrivacy or None"),
    ],
)
def test_settings_that_do_not_go_together(wrong, match):
    with pytest.raises(fd.ConfigError, match=match):
        fd.SecureAggregation(**{"privacy": private(), **wrong})


def test_runs_that_cannot_be_accounted():
    fed = fed_of(np.zeros((5, 2)))
    for more, match in (
        ({"participation": 0.5}, r"participation=0.5 .*use participation=fd.Poisson\(0.5\)"),
        ({"engine": fd.Delayed(fd.Local(), up=1, down=0)}, "fd.Delayed"),
        ({"quantise": "int8"}, "quantise='int8'"),
        ({"aggregation": joined(delta=0.3)}, "one of the 5 clients"),
        ({"aggregation": joined(clip={"rows": 1.0})}, "'rows' is not a client step of Sends"),
        ({"aggregation": joined(clip={"single": 1.0})}, "no norm for 'row'"),
        ({"aggregation": joined(bits=40, noise=1e8)}, "beyond 64 bits"),
        ({"algorithm": Looks()}, "Looks looks at single replies"),
    ):
        with pytest.raises(fd.ConfigError, match=match):
            launch(fed, **more)
    with pytest.raises(fd.ConfigError, match="at least 2 clients"):
        launch(fed_of(np.zeros((1, 2))))


def test_in_a_file(tmp_path):
    from foedus.config.experiment import read_config

    path = tmp_path / "run.toml"
    path.write_text(
        '[data]\nname = "digits"\n[split]\nscheme = "iid"\nclients = 5\n[run]\nrounds = '
        '1\n[algorithm]\ntype = "FedAvg"\n'
        'model = "Linear"\n[aggregation]\ntype = "SecureAggregation"\nbits = 22\n'
        '[aggregation.privacy]\ntype = "DifferentialPrivacy"\nclip = 1.0\nnoise = 2.0\ndelta = '
        "1e-3\n"
    )
    expected = fd.SecureAggregation(
        bits=22, privacy=fd.DifferentialPrivacy(clip=1.0, noise=2.0, delta=1e-3)
    )
    assert read_config(path, "run").options["aggregation"] == expected


@pytest.mark.slow
def test_on_ray(fed, ray_engine):
    """Replies come to the process that simulates the clients; from there on all is the same."""
    ray, local = (
        fd.run(fd.Scaffold(fd.Linear(), lr=0.1), fed, 3, engine=e, participation=fd.Poisson(0.5),
               aggregation=joined(entropy=Counted(b"ray")))
        for e in (ray_engine, fd.Local())
    )  # fmt: skip
    for a, b in zip(tree.leaves(ray.state), tree.leaves(local.state), strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    assert ray.records.values("epsilon") == local.records.values("epsilon")
