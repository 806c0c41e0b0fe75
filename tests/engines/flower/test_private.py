"""Differential privacy between sites: noise by the server, or by the sites themselves under secure
aggregation.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from flwr.app import Message

import foedus as fd
from foedus import wire
from foedus.aggregation.dp import mechanism as dp
from foedus.aggregation.dp import noise as sampling
from foedus.aggregation.dp.accounting import epsilon
from foedus.aggregation.dp.distributed import APART
from foedus.aggregation.secure.aggregator import PrivateSecureAggregator
from foedus.base import tree
from foedus.engines.flower import messages
from foedus.engines.flower.secure_site import Demands, Secrets
from foedus.errors import DataError
from tests.aggregation.entropy import Counted
from tests.engines.flower.grid import Here
from tests.engines.flower.test_secure import phase_of, same, silent

AVERAGE = fd.FedAvg(fd.Linear(), lr=0.1, batch_size=16)
SCAFFOLD = fd.Scaffold(fd.Linear(), lr=0.1, batch_size=16)
pytestmark = pytest.mark.filterwarnings("ignore:.*left out:UserWarning")


def private(**more) -> fd.DifferentialPrivacy:
    return fd.DifferentialPrivacy(
        **{"clip": 1.0, "noise": 1.0, "delta": 1e-3, "accountant": "rdp", **more}
    )


def joined(**more) -> fd.SecureAggregation:
    return fd.SecureAggregation(privacy=private(**more))


@pytest.fixture
def engine(tmp_path):
    return Here(tmp_path, nodes=5)


def retold(engine, node: int, at: tuple[int, str], **said):
    """A server that says something else to one node, in a phase of a round."""
    honest = engine.grid.app

    def app(message, context):
        if context.node_id == node and phase_of(message) == at:
            content = messages.content({**messages.header(message), **said}, messages.body(message))
            changed = Message(content, dst_node_id=node, message_type=message.metadata.message_type)
            changed.metadata.__dict__["_message_id"] = message.metadata.message_id
            message = changed
        return honest(message, context)

    engine.grid.app = app


# -- noise by the server ---------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [AVERAGE, SCAFFOLD], ids=["FedAvg", "Scaffold"])
@pytest.mark.parametrize("part", [1.0, fd.Poisson(0.4)], ids=["all", "some"])
def test_the_same_noise_and_account_as_in_the_simulator(algorithm, part, fed, tmp_path):
    """The server draws both who is asked and the noise, here from known bytes; in some of the
    rounds nobody is asked.
    """
    here, local = (
        fd.run(
            algorithm,
            fed,
            4,
            engine=e,
            participation=part,
            aggregation=private(entropy=Counted(b"sites")),
        )
        for e in (Here(tmp_path, nodes=5), fd.Local(batch=False))
    )
    same(here, local, 2e-3)  # the grid
    for column in ("epsilon", "bytes_up", "bytes_down", "messages_up"):
        assert here.records.values(column) == local.records.values(column)
    assert here.history["epsilon"].iloc[-1] == epsilon(
        {(1.0 if part == 1.0 else 0.4, 1.0, 1): 4}, 1e-3, "rdp"
    )


def test_a_site_that_does_not_answer_is_missing_in_the_sum_and_the_divisor_stays(
    fed, engine, monkeypatch
):
    """All replies have the norm of the clip: the average of four, over five."""
    monkeypatch.setattr(
        sampling, "rounded_gaussian", lambda size, bits, entropy: np.zeros(size, np.int64)
    )
    engine.grid.spoil = lambda asked, answer: (
        None
        if asked.metadata.dst_node_id == 1 and messages.header(asked).get("round") == 1
        else answer
    )
    here = fd.run(AVERAGE, fed, 1, engine=engine, aggregation=private(clip=1e-3))
    monkeypatch.setattr(
        dp.PrivateAggregator, "_draw", lambda self: torch.tensor([False, True, True, True, True])
    )
    local = fd.run(AVERAGE, fed, 1, engine=fd.Local(batch=False), aggregation=private(clip=1e-3))
    same(here, local, 2e-6)
    assert here.history.left_out[1].startswith("0: no answer")
    assert here.history["epsilon"].iloc[-1] == local.history["epsilon"].iloc[-1]


# -- noise by the sites ----------------------------------------------------------------------------


@pytest.fixture
def noiseless(monkeypatch):
    monkeypatch.setattr(
        sampling, "discrete_gaussian", lambda size, variance, entropy: np.zeros(size, np.int64)
    )


@pytest.mark.parametrize("algorithm", [AVERAGE, SCAFFOLD], ids=["FedAvg", "Scaffold"])
@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
def test_without_noise_the_numbers_and_bytes_of_the_simulator(
    algorithm, some, fed, engine, noiseless, monkeypatch
):
    """All take part, or every other client in turns: the others send zeros and stay as they are, on
    both engines.
    """
    if some:
        cohorts: list[str] = []

        def takes_part(self, client, cohort, probability):
            if cohort not in cohorts:
                cohorts.append(cohort)
            return (client + cohorts.index(cohort)) % 2 == 0

        monkeypatch.setattr(Secrets, "takes_part", takes_part)
        monkeypatch.setattr(
            PrivateSecureAggregator,
            "_draw",
            lambda self: (torch.arange(5) + self.round - 1) % 2 == 0,
        )
    part = fd.Poisson(0.5) if some else 1.0
    here, local = (
        fd.run(algorithm, fed, 3, engine=e, participation=part, aggregation=joined(clip=0.5))
        for e in (engine, fd.Local(batch=False))
    )
    same(here, local)
    for column in ("epsilon", "bytes_up", "bytes_down", "messages_up"):
        assert here.records.values(column) == local.records.values(column)
    assert engine.line.received == local.records.last("bytes_up")
    assert here.history["epsilon"].iloc[-1] == epsilon(
        {(0.5 if some else 1.0, 1.0, 1): 3}, 1e-3, "rdp", APART
    )


def test_sites_add_the_noise_that_is_accounted(tmp_path, monkeypatch):
    """Six clients who take no part; one drops out, and 4 must stay.

    The average over 3 has a variance of (z c)^2 5 / 4 / 2.5^2.
    """
    monkeypatch.setattr(Secrets, "takes_part", lambda self, client, cohort, probability: False)
    rng = np.random.default_rng(0)
    rows = [(rng.normal(size=(4, 600)).astype(np.float32), np.arange(4) % 4) for _ in range(6)]
    fed = fd.Federation.from_clients(rows, classes=4)
    engine = Here(tmp_path, nodes=6)
    engine.grid.spoil = silent({2: (1, "mask")})
    zero = fd.run(AVERAGE, fed, 0).state.w
    run = fd.run(
        AVERAGE,
        fed,
        1,
        engine=engine,
        participation=fd.Poisson(0.5),
        aggregation=joined(noise=3.0, clip=2.0),
        evaluate_every=0,
    )
    moved = torch.cat([(run.state.w[k] - zero[k]).flatten() for k in zero]).double() * 2.5 / 6.0
    assert abs(float(moved.var()) / (5 / 4) - 1) < 6 * math.sqrt(2 / len(moved))
    assert len(moved) > 2000


def test_what_a_site_sends_is_clipped_and_noisy(fed, engine, monkeypatch):
    """Constant noise of 1000 steps."""
    monkeypatch.setattr(
        sampling, "discrete_gaussian", lambda size, variance, entropy: np.full(size, 1000)
    )
    honest = fd.run(AVERAGE, fed, 1, engine=engine, aggregation=joined(clip=0.5))
    monkeypatch.setattr(
        sampling, "discrete_gaussian", lambda size, variance, entropy: np.zeros(size, np.int64)
    )
    bare = fd.run(AVERAGE, fed, 1, engine=engine, aggregation=joined(clip=0.5))
    for a, b in zip(tree.leaves(honest.state), tree.leaves(bare.state), strict=True):
        if isinstance(a, torch.Tensor) and a.is_floating_point():
            torch.testing.assert_close(
                (a - b).abs(), torch.full_like(a, 1000 * 0.5 / 2**23), rtol=1e-2, atol=1e-7
            )


def test_a_site_that_is_to_weigh_its_reply_by_rows_sends_nothing(fed, engine):
    retold(engine, 1, (1, "mask"), weights="rows")
    with pytest.warns(UserWarning, match="client 0 .* asked something else than the offer says"):
        fd.run(AVERAGE, fed, 1, engine=engine, aggregation=joined(clip=0.5))


def test_who_takes_part_is_drawn_once_for_a_cohort(tmp_path):
    site = Secrets(tmp_path)
    first = [site.takes_part(i, "a", 0.5) for i in range(64)]
    assert first == [Secrets(tmp_path).takes_part(i, "a", 0.5) for i in range(64)]
    assert first != [site.takes_part(i, "b", 0.5) for i in range(64)]
    assert 8 < sum(first) < 56
    assert all(site.takes_part(i, "c", 1.0) for i in range(8))
    with pytest.raises(fd.SecureError, match=r"probability=0.1 was 1.0 in this cohort"):
        site.takes_part(0, "c", 0.1)  # to be accounted for as drawn by 0.1, and there for certain
    (tmp_path / "secure" / "0.cohort").write_text("cut")
    assert site.takes_part(0, "c", 1.0)


def test_the_time_of_an_answer_does_not_tell_who_takes_part(fed, engine, monkeypatch):
    """Those who take no part do the step all the same."""
    trained = []
    step = fd.FedAvg.train

    def train(self, client, **payload):
        trained.append(1)
        return step(self, client, **payload)

    monkeypatch.setattr(fd.FedAvg, "train", train)
    monkeypatch.setattr(Secrets, "takes_part", lambda self, client, cohort, probability: False)
    fd.run(
        AVERAGE,
        fed,
        1,
        engine=engine,
        participation=fd.Poisson(0.5),
        aggregation=joined(),
        evaluate_every=0,
    )
    assert len(trained) >= 5


def test_a_site_may_demand_noise(fed, engine):
    engine.grid.contexts[1].node_config["secure_noise"] = 1.0
    for aggregation, why in (
        (None, "is not sent in the clear: this site answers under secure aggregation alone"),
        (
            fd.SecureAggregation(),
            "the run has no differential privacy, with the noise of 1 that this site demands",
        ),
        (joined(noise=0.5), "noise=0.5 is less than the noise of 1 that this site demands"),
    ):
        run = fd.run(AVERAGE, fed, 1, engine=engine, aggregation=aggregation, evaluate_every=0)
        assert why in run.history.left_out[1]
    assert (
        "left_out"
        not in fd.run(
            AVERAGE, fed, 1, engine=engine, aggregation=joined(), evaluate_every=0
        ).history
    )
    with pytest.raises(DataError, match="secure_noise=-1"):
        Demands.of({"secure_noise": -1})


@pytest.mark.parametrize(
    ("phase", "said", "why"),
    [
        ("mask", {"step": "round"}, "keys were made for 'round', not for train"),
        ("mask", {"probability": 2.0}, "probability=2.0 must be above 0 and at most 1"),
        ("mask", {"cohort": 3}, "cohort=3 must be a text of 1 to 64 characters"),
        ("share", {"step": "round"}, "another session, round or exchange, or to other settings"),
    ],
)
def test_what_a_site_refuses(phase, said, why, fed, engine):
    """A server that changes its mind between two phases, or makes no sense."""
    retold(engine, 1, (1, phase), **said)
    run = fd.run(
        AVERAGE, fed, 1, engine=engine, aggregation=joined(clip={"train": 1.0, "round": 2.0})
    )
    assert f"0: {phase}: " in run.history.left_out[1] and why in run.history.left_out[1]


def test_entropy_of_the_server_is_refused(fed, engine):
    with pytest.raises(
        fd.ConfigError,
        match="entropy is for tests in this process: sites draw their noise themselves",
    ):
        fd.run(AVERAGE, fed, 1, engine=engine, aggregation=joined(entropy=Counted()))


def test_a_server_that_was_killed_goes_on_with_the_account(fed, tmp_path):
    path, engine = tmp_path / "run.safetensors", Here(tmp_path / "nodes", nodes=5)

    class Killed(BaseException):
        pass

    def die(asked, answer):
        if asked.metadata.dst_node_id == 3 and phase_of(asked) == (3, "mask"):
            raise Killed
        return answer

    options = {
        "engine": engine,
        "participation": fd.Poisson(0.5),
        "aggregation": joined(),
        "checkpoint": path,
    }
    engine.grid.spoil = die
    with pytest.raises(Killed):
        fd.run(SCAFFOLD, fed, 4, **options)
    engine.grid.spoil = lambda asked, answer: answer
    for node in engine.grid.contexts:
        engine.grid.restart(node)
    run = fd.run(SCAFFOLD, fed, 4, resume=True, **options)
    assert "left_out" not in run.history
    # the third was made twice
    assert run.history["epsilon"].iloc[-1] == epsilon({(0.5, 1.0, 1): 5}, 1e-3, "rdp", APART)


def test_masked_messages_alone_leave_a_site(fed, engine):
    sent = []

    def watch(asked, answer):
        if phase_of(asked)[1] == "mask":
            sent.append(wire.decode(messages.body(answer)))
        return answer

    engine.grid.spoil = watch
    fd.run(
        AVERAGE,
        fed,
        1,
        engine=engine,
        participation=fd.Poisson(0.5),
        aggregation=joined(),
        evaluate_every=0,
    )
    assert len(sent) == 5 and all(set(m) == {"tag", "reply", "dtypes"} for m in sent)
    assert {t.dtype for m in sent for t in tree.leaves(m["reply"])} <= {torch.int32, torch.int64}


# -- processes -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_on_loopback(fed):
    """Real processes: noise by the server from known bytes gives the simulator's numbers; noise by
    the sites is accounted.
    """
    with fd.Flower(nodes=2, timeout=60) as engine:
        real, local = (
            fd.run(
                AVERAGE,
                fed,
                2,
                engine=e,
                participation=fd.Poisson(0.5),
                aggregation=private(entropy=Counted(b"loop")),
            )
            for e in (engine, fd.Local(batch=False))
        )
        same(real, local, 2e-3)
        assert real.records.values("epsilon") == local.records.values("epsilon")
        both = fd.run(
            SCAFFOLD, fed, 2, engine=engine, participation=fd.Poisson(0.5), aggregation=joined()
        )
        assert both.history["epsilon"].iloc[-1] == epsilon({(0.5, 1.0, 1): 2}, 1e-3, "rdp", APART)
        assert "left_out" not in both.history
