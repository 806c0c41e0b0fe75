"""Secure aggregation between sites: the numbers and bytes of the simulator, sites that go away, and
a server that is not honest.
"""

from __future__ import annotations

import shutil
import stat
from dataclasses import dataclass

import pytest
import torch
from flwr.app import Message

import foedus as fd
from foedus import testing, wire
from foedus.aggregation.secure.aggregator import SecureAggregator
from foedus.aggregation.secure.simulated import PHASES, SecureAggregation
from foedus.base import tree
from foedus.engines.flower import deploy, messages, server
from foedus.engines.flower.secure_site import Demands, Secrets
from foedus.errors import DataError, SecureError
from tests.aggregation.test_secure_run import ALGORITHMS, SECURE
from tests.engines.flower.grid import Here, HereGrid
from tests.engines.flower.test_session import STATEFUL, _without_clients
from tests.engines.flower.test_site import PLAN, config, table, written

AVERAGE = ALGORITHMS["FedAvg"]
pytestmark = pytest.mark.filterwarnings("ignore:.*left out:UserWarning")


@pytest.fixture
def engine(tmp_path):
    return Here(tmp_path, nodes=5)


def phase_of(message: Message) -> tuple[int, str]:
    said = messages.header(message)
    return said.get("round", -1), said.get("phase", "")


def silent(where: dict[int, tuple[int, str]]):
    """Nodes that do not answer in a phase of a round."""
    return lambda asked, answer: (
        None if where.get(asked.metadata.dst_node_id) == phase_of(asked) else answer
    )


def meddle(engine, node: int, at: tuple[int, str], change):
    """A server that asks one node something else, in a phase of a round: `change` has the parts of
    the body, decoded.
    """
    honest = engine.grid.app

    def app(message, context):
        if context.node_id == node and phase_of(message) == at:
            said = messages.header(message)
            parts = change(
                [
                    wire.decode(part)
                    for part in messages.cut(messages.body(message), said["lengths"])
                ]
            )
            bodies = [wire.encode(part) for part in parts]
            content = messages.content(
                {**said, "lengths": [len(b) for b in bodies]}, b"".join(bodies)
            )
            changed = Message(content, dst_node_id=node, message_type=message.metadata.message_type)
            changed.metadata.__dict__["_message_id"] = message.metadata.message_id
            message = changed
        return honest(message, context)

    engine.grid.app = app


@dataclass(frozen=True)
class Absent(SecureAggregation):
    """In the simulator: one client who goes away in a phase of round 2."""

    phase: str = "mask"

    def open(self, setting):
        made = SecureAggregator(self, setting)
        made.absent = lambda phase, ask: [0] if (ask.round, phase) == (2, self.phase) else []
        return made


def same(here: fd.Run, local: fd.Run, within: float = 0.0) -> None:
    for a, b in zip(tree.leaves(here.state), tree.leaves(local.state), strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=0.0, atol=within)


# -- the same numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["FedAvg", "FedNewton", "FedFW, one entry", "FedBoost, cache", "Scaffold"]
)
def test_the_numbers_and_bytes_of_the_simulator(name, fed, tmp_path):
    engine = Here(tmp_path, nodes=5, code="tests.aggregation.test_secure_run:ALGORITHMS")
    here, local = (
        fd.run(ALGORITHMS[name], fed, 2, engine=e, aggregation=SECURE)
        for e in (engine, fd.Local(batch=False))
    )
    # To the last bit: what was rounded to steps is added up without rounding. FedBoost's own
    # arithmetic rounds before that.
    same(here, local, SECURE.fixed_point.step if name.startswith("FedBoost") else 0.0)
    for column in ("bytes_up", "bytes_down", "messages_up"):
        assert here.records.values(column) == local.records.values(column)
    assert (engine.line.received, engine.line.sent) == (
        local.records.last("bytes_up"),
        local.records.last("bytes_down"),
    )
    assert not list(tmp_path.glob("*/cache/secure/*"))  # no key has outlived its exchange


def test_several_clients_on_a_node_and_some_of_them_in_a_round(fed, tmp_path):
    options = {"participation": 0.5, "aggregation": SECURE}
    here, local = (
        fd.run(STATEFUL["Scaffold"], fed, 4, engine=e, **options)
        for e in (Here(tmp_path), fd.Local(batch=False))
    )
    same(here, local)


# -- sites that go away ----------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
def test_a_site_that_goes_away_in_a_phase(phase, fed, engine):
    """As if it had not been asked, unless its masked reply had come; it is back in the next round,
    from the right state.
    """
    engine.grid.spoil = silent({1: (2, phase)})
    scaffold = STATEFUL["Scaffold"]
    with pytest.warns(
        UserWarning,
        match=rf"round 2: client 0 \(shard\) is left out: {phase}: no answer within 0.3 s",
    ):
        here = fd.run(scaffold, fed, 3, engine=engine, aggregation=SECURE)
    local = fd.run(
        scaffold,
        fed,
        3,
        engine=fd.Local(batch=False),
        aggregation=Absent(range=64.0, bits=32, phase=phase),
    )
    same(here, local)
    assert here.history.left_out.isna().tolist() == [True, True, False, True]
    assert here.history.left_out[2] == f"0: {phase}: no answer within 0.3 s"
    assert here.history.bytes_down.tolist() == local.history.bytes_down.tolist()
    assert here.history.bytes_up.tolist() == local.history.bytes_up.tolist()


@pytest.mark.parametrize("phase", PHASES)
def test_beyond_the_threshold_nothing_is_unmasked(phase, fed, engine):
    engine.grid.spoil = silent({1: (2, phase), 2: (2, phase)})  # 3 of 5 are left; 2/3 are 4
    with pytest.raises(
        fd.TooFewClients,
        match=rf"round 2: {phase}: 3 of 5 clients are left.*needs 4; nothing was unmasked.*no "
        r"answer",
    ):
        fd.run(AVERAGE, fed, 3, engine=engine, aggregation=SECURE)


def test_fewer_than_min_clients_stop_the_run_before_unmasking(fed, tmp_path):
    engine = Here(tmp_path, nodes=5, min_clients=5)
    engine.grid.spoil = silent({1: (1, "mask")})
    with pytest.raises(fd.TooFewClients, match="4 of 5 clients are left, at least 5 must be"):
        fd.run(AVERAGE, fed, 1, engine=engine, aggregation=SECURE)
    assert "unmask" not in [phase_of(m)[1] for m in engine.grid.asked]


def test_a_site_that_is_away_and_comes_back(fed, engine):
    """FedFW asks those who are behind in a group of their own, unless that would show what they
    send.
    """
    engine.grid.spoil = silent({1: (1, "advertise")})
    run = fd.run(STATEFUL["FedFW"], fed, 4, engine=engine, aggregation=SECURE)
    assert run.history.left_out.notna().tolist() == [False, True, False, False, False]


def test_a_state_that_is_gone(fed, tmp_path):
    engine = Here(tmp_path, nodes=5)

    def lose(asked, answer):
        if phase_of(asked) == (2, "share") and asked.metadata.dst_node_id == 5:
            engine.grid.restart(1)
            shutil.rmtree(tmp_path / "0" / "cache" / "states")
        return answer

    engine.grid.spoil = lose
    with pytest.warns(UserWarning, match="lost its state"):
        run = fd.run(STATEFUL["FedFW"], fed, 4, engine=engine, aggregation=SECURE)
    assert run.history.left_out.notna().tolist() == [False, False, True, False, False]
    assert run.history.left_out[2] == "0: mask: it has lost its state"


def test_a_server_that_was_killed_goes_on_to_the_same_numbers(fed, tmp_path):
    path, algorithm = tmp_path / "run.safetensors", STATEFUL["Scaffold"]
    whole = fd.run(algorithm, fed, 4, engine=Here(tmp_path / "whole", nodes=5), aggregation=SECURE)
    engine = Here(tmp_path / "nodes", nodes=5)

    class Killed(BaseException):
        pass

    def die(asked, answer):
        if asked.metadata.dst_node_id == 3 and phase_of(asked) == (3, "mask"):
            raise Killed
        return answer

    engine.grid.spoil = die
    with pytest.raises(Killed):
        fd.run(algorithm, fed, 4, engine=engine, aggregation=SECURE, checkpoint=path)
    engine.grid.spoil = lambda asked, answer: answer
    for node in engine.grid.contexts:
        engine.grid.restart(node)
    resumed = fd.run(
        algorithm, fed, 4, engine=engine, aggregation=SECURE, checkpoint=path, resume=True
    )
    testing._same(_without_clients(whole), _without_clients(resumed), "the resumed run differs")


def test_an_error_of_one_client_is_its_own(fed, tmp_path):
    """Of a node with several clients, the one whose question is wrong is left out."""
    engine = Here(tmp_path, nodes=2)  # clients 0, 2, 4 and 1, 3
    meddle(
        engine,
        1,
        (1, "share"),
        lambda parts: [parts[0], {**parts[1], "ids": parts[1]["ids"] + 1}, parts[2]],
    )
    run = fd.run(AVERAGE, fed, 1, engine=engine, aggregation=SECURE)
    assert run.history.left_out[1].startswith(
        "2: share: the key list does not have the keys of client 2"
    )


# -- a server that is not honest -------------------------------------------------------------------


def put(message, name, at, value):
    t = message[name].clone()
    t[at] = value
    return {**message, name: t}


MEDDLING = {
    "another offer": (
        "advertise",
        lambda p: [{**p[0], "round": 1}],
        "the offer is for another session, round or exchange",
    ),
    "no offer": ("advertise", lambda p: [{"session": "x"}], "the offer must have the fields"),
    "my key": (
        "share",
        lambda p: [put(p[0], "keys", (0, 1), torch.arange(32).byte())],
        "does not have the keys of client 0",
    ),
    "a key twice": (
        "share",
        lambda p: [put(p[0], "keys", (2, 1), p[0]["keys"][1, 1])],
        "has a key twice",
    ),
    "too short a list": (
        "share",
        lambda p: [{**p[0], "ids": p[0]["ids"][:2], "keys": p[0]["keys"][:2]}],
        "the key list has 2 clients; with 5 in all there must be 4 to 5",
    ),
    "an altered box": (
        "mask",
        lambda p: [p[0], put(p[1], "boxes", (1, 40), 7 ^ p[1]["boxes"][1, 40])],
        "was altered",
    ),
    "both secrets": (
        "unmask",
        lambda p: [{**p[0], "dropped": p[0]["survivors"][2:3]}],
        "asks for both secrets of client 2",
    ),
    "myself gone": (
        "unmask",
        lambda p: [{**p[0], "survivors": p[0]["survivors"][1:], "dropped": p[0]["survivors"][:1]}],
        "says that client 0 itself has dropped out",
    ),
    "others gone": (
        "unmask",
        lambda p: [{**p[0], "survivors": p[0]["survivors"][:3], "dropped": p[0]["survivors"][3:]}],
        "leaves 3 survivors of 5; 4 are needed",
    ),
    "not a phase": ("share", lambda p: [{"tag": p[0]["tag"]}], "the key list must have the fields"),
}


@pytest.mark.parametrize("name", MEDDLING)
def test_what_a_site_refuses(name, fed, engine):
    phase, change, why = MEDDLING[name]
    meddle(engine, 1, (2, phase), change)
    run = fd.run(AVERAGE, fed, 2, engine=engine, aggregation=SECURE)
    assert run.history.left_out[2].startswith(f"0: {phase}: ") and why in run.history.left_out[2]


def test_other_settings_halfway_are_refused(fed, engine):
    """Settings are bound to the tag of the exchange."""
    honest = engine.grid.app

    def app(message, context):
        if context.node_id == 1 and phase_of(message) == (1, "share"):
            said = messages.header(message)
            said["secure"]["threshold"] = 0.9
            content = messages.content(said, messages.body(message))
            changed = Message(content, dst_node_id=1, message_type=message.metadata.message_type)
            changed.metadata.__dict__["_message_id"] = message.metadata.message_id
            message = changed
        return honest(message, context)

    engine.grid.app = app
    run = fd.run(AVERAGE, fed, 1, engine=engine, aggregation=SECURE)
    assert (
        "share: the key list belongs to another session, round or exchange, or to other settings"
        in run.history.left_out[1]
    )


def test_replayed_messages_are_refused(fed, engine):
    fd.run(AVERAGE, fed, 2, engine=engine, aggregation=SECURE)
    asked = [m for m in engine.grid.asked if m.metadata.dst_node_id == 1 and phase_of(m)[1]]
    assert [phase_of(m) for m in asked] == [(r, p) for r in (1, 2) for p in PHASES]

    def again(message):
        said = messages.header(engine.grid.app(message, engine.grid.contexts[1]))
        return said.get("error") or said["errors"].get("0")

    for message in asked:
        why = again(message)
        if phase_of(message)[1] == "advertise":
            assert why is None  # new keys, for which the old messages are no good
        elif phase_of(message)[1] == "share":
            assert "does not have the keys of client 0 as they were sent" in why
        else:
            assert "is asked to" in why and "what it can do next is share" in why


def test_an_answer_is_given_once(fed, engine):
    """The same question a second time, or two stories of who survived: the second finds nothing
    left to tell.
    """
    honest, second = engine.grid.app, []

    def app(message, context):
        answer = honest(message, context)
        if context.node_id == 1 and phase_of(message)[1] in ("share", "mask", "unmask"):
            said = messages.header(honest(message, context))
            second.append(said["errors"]["0"])
        return answer

    engine.grid.app = app
    same(
        fd.run(AVERAGE, fed, 1, engine=engine, aggregation=SECURE),
        fd.run(AVERAGE, fed, 1, engine=fd.Local(batch=False), aggregation=SECURE),
    )
    assert "is asked to share, but what it can do next is mask" in second[0]
    assert "is asked to mask, but what it can do next is unmask" in second[1]
    assert "has no keys for this" in second[2]


def test_of_two_processes_one_gets_the_state(tmp_path):
    """Flower may answer two messages at once: a state is taken away by the first."""
    first, second = Secrets(tmp_path), Secrets(tmp_path)
    first.put(3, {"phase": "unmask"})
    assert stat.S_IMODE((tmp_path / "secure" / "3.bin").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "secure").stat().st_mode) == 0o700
    assert first.take(3) == {"phase": "unmask"}
    with pytest.raises(SecureError, match="client 3 has no keys for this"):
        second.take(3)
    assert not list((tmp_path / "secure").iterdir())


def test_the_server_never_sees_a_reply(fed, engine):
    """What comes back is dense, of another length, and another one for the same reply."""
    seen = []

    def watch(asked, answer):
        if phase_of(asked) == (1, "mask") and asked.metadata.dst_node_id == 1:
            seen.append(wire.decode(messages.body(answer))["reply"]["weight"])
        return answer

    engine.grid.spoil = watch
    for _ in range(2):
        fd.run(AVERAGE, fed, 1, engine=engine, aggregation=SECURE)
    assert seen[0].dtype == torch.int64 and not bool((seen[0] == seen[1]).any())


def test_an_error_does_not_quote_the_reply(fed, engine):
    """A server that asks for a tiny range would otherwise be told the largest number of every
    reply.
    """
    with (
        # in the log of the site
        pytest.warns(UserWarning, match=r"weight holds -?0\.\d+, outside -0\.001 \.\. 0\.001"),
        pytest.raises(
            fd.TooFewClients,
            match=r"mask: its reply does not fit into -0\.001 \.\. 0\.001, so nothing was sent",
        ) as error,
    ):
        fd.run(AVERAGE, fed, 1, engine=engine, aggregation=SecureAggregation(range=1e-3))
    assert "holds" not in str(error.value)


def test_what_a_killed_process_left_is_removed(fed, engine, tmp_path):
    left = tmp_path / "0" / "cache" / "secure" / ".0.left"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"secret")
    fd.run(AVERAGE, fed, 1, engine=engine, aggregation=SECURE)
    assert not left.exists()


# -- in the clear ----------------------------------------------------------------------------------


def test_single_replies_stay_where_they_are(fed, engine):
    with pytest.raises(fd.ConfigError, match="FFGB asks for every client's own reply to boost"):
        fd.run(STATEFUL["FFGB"], fed, 1, engine=engine, aggregation=SECURE)
    assert engine.line.received == 0  # no function has left its site


def test_a_site_that_sends_in_the_clear_is_left_out(fed, tmp_path):
    """FedBoost's predictors are received, and nothing is answered."""
    engine = Here(tmp_path, nodes=5, code="tests.aggregation.test_secure_run:ALGORITHMS")

    def spoil(asked, answer):
        if asked.metadata.message_type == "train.receive" and asked.metadata.dst_node_id == 1:
            said, body = messages.header(answer), wire.encode({"x": torch.ones(3)})
            return Message(messages.content({**said, "lengths": [len(body)]}, body), reply_to=asked)
        return answer

    engine.grid.spoil = spoil
    run = fd.run(ALGORITHMS["FedBoost, cache"], fed, 1, engine=engine, aggregation=SECURE)
    assert "0: it sent a reply in the clear" in run.history.left_out[1]


def test_a_site_may_demand_it(fed, tmp_path):
    engine = Here(tmp_path, nodes=5, code="tests.aggregation.test_secure_run:ALGORITHMS")
    engine.grid.contexts[1].node_config["secure"] = "required"
    run = fd.run(AVERAGE, fed, 1, engine=engine)
    assert (
        "0: the reply to train is not sent in the clear: this site answers under secure "
        "aggregation alone" in run.history.left_out[1]
    )
    run = fd.run(AVERAGE, fed, 1, engine=engine, aggregation=SECURE)
    assert "left_out" not in run.history
    run = fd.run(ALGORITHMS["FedBoost, cache"], fed, 1, engine=engine, aggregation=SECURE)
    assert "left_out" not in run.history  # empty replies may be sent


@pytest.mark.parametrize(
    ("demands", "settings", "why"),
    [
        (
            {"secure": "required"},
            {"threshold": 0.6},
            "threshold=0.6 is less than the 0.667 that this site demands",
        ),
        (
            {"secure_threshold": 0.9},
            {},
            "threshold=0.667 is less than the 0.9 that this site demands",
        ),
        (
            {"secure_clients": 6},
            {},
            "advertise: the sum is of 5 clients; this site demands 6 at least",
        ),
        (
            {"secure": "required"},
            {"neighbours": 2},
            "advertise: neighbours=2 are fewer than the 4 that this site demands",
        ),
    ],
)
def test_settings_that_are_too_weak(demands, settings, why, fed, engine):
    engine.grid.contexts[1].node_config.update(demands)
    run = fd.run(AVERAGE, fed, 1, engine=engine, aggregation=SecureAggregation(**settings))
    assert why in run.history.left_out[1]


def test_settings_that_cannot_be(fed, engine):
    honest = engine.grid.app

    def run(settings):
        def app(message, context):
            said = messages.header(message)
            if context.node_id == 1 and said.get("phase") == "advertise":
                said["secure"] = settings
                changed = Message(
                    messages.content(said, messages.body(message)),
                    dst_node_id=1,
                    message_type="query.secure",
                )
                changed.metadata.__dict__["_message_id"] = message.metadata.message_id
                message = changed
            return honest(message, context)

        engine.grid.app = app
        return fd.run(AVERAGE, fed, 1, engine=engine, aggregation=SECURE).history.left_out[1]

    assert "threshold=0.1 must be a number above 0.5 and at most 1" in run(
        {"type": "SecureAggregation", "threshold": 0.1}
    )
    assert "secure='none' must be a dictionary or None" in run("none")
    assert "is not of secure aggregation" in run({"threshold": 0.9})
    assert "type 'FedAvg' is unknown" in run({"type": "FedAvg"})


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"secure": "yes"}, 'secure=\'yes\' must be "required" or "offered"'),
        ({"secure_clients": 1}, "secure_clients=1"),
        ({"secure_threshold": 2}, "secure_threshold=2"),
    ],
)
def test_demands_that_cannot_be(config, why):
    with pytest.raises(DataError, match=why):
        Demands.of(config)


def test_without_a_cache_there_is_no_place_for_keys(tmp_path):
    with pytest.raises(fd.ConfigError, match=r"needs cache=.*node config"):
        Secrets(None)


# -- files -----------------------------------------------------------------------------------------

SECURE_PLAN = PLAN.replace("[algorithms.Trees]", "[nothing]").split("[nothing]")[0] + (
    '[aggregation]\ntype = "SecureAggregation"\nrange = 32\n\n[data]' + PLAN.split("[data]")[1]
)


@pytest.fixture
def signed(tmp_path):
    """Three sites of a folder made by `deploy init`, with the keys of the folder."""
    names = ("north", "south", "west")
    sites = {n: written(tmp_path / "data", n, table(k, 60 + 20 * k)) for k, n in enumerate(names)}
    deploy.init(tmp_path / "trial", sites, "outcome")
    (tmp_path / "trial" / "federation.toml").write_text(SECURE_PLAN)
    configs = {}
    for n, name in enumerate(names):
        own = tmp_path / "trial" / "sites" / name
        more = {"signing_key": str(own / f"{name}.sign"), "peers": str(own / "peers.toml")}
        more["secure"] = "required"
        configs[n + 1] = config(sites[name], n, cache=str(tmp_path / "cache" / name), **more)
    return HereGrid(configs), server.read_plan(tmp_path / "trial" / "federation.toml")


def test_a_training_from_files(signed, tmp_path):
    grid, plan = signed
    assert plan.options["aggregation"] == SecureAggregation(range=32.0)
    run = server.train(grid, plan, tmp_path / "results")["FedAvg"]
    assert "left_out" not in run.history
    shares = [wire.decode(m) for m in _bodies(grid, "share")]
    assert all(m["signatures"].shape == (3, 64) for m in shares)


def _bodies(grid, phase):
    return [messages.body(m) for m in grid.asked if phase_of(m)[1] == phase]


def test_a_key_that_its_owner_has_not_signed(signed, tmp_path):
    grid, plan = signed
    meddle(
        type("Engine", (), {"grid": grid}),
        1,
        (2, "share"),
        lambda p: [put(p[0], "keys", (1, 1), torch.arange(32).byte())],
    )
    run = server.train(grid, plan, tmp_path / "results")["FedAvg"]
    assert (
        run.history.left_out[2]
        == "0: share: the keys in the key list of client 1 are not signed by it"
    )


def test_a_site_that_demands_it_says_so_before_training(signed, tmp_path):
    grid, plan = signed
    del plan.options["aggregation"]
    with (
        pytest.warns(
            UserWarning,
            match="node 1 does not take part: this site answers under secure aggregation alone",
        ),
        pytest.raises(fd.TooFewClients, match="0 sites can take part"),
    ):
        server.train(grid, plan, tmp_path / "results")


def test_signing_keys_that_cannot_be_read(signed, tmp_path, capsys):
    grid, plan = signed
    grid.contexts[1].node_config["signing_key"] = str(tmp_path / "nowhere")
    grid.contexts[2].node_config["signing_key"] = str(tmp_path / "trial" / "keys" / "south")
    with pytest.raises(fd.TooFewClients) as error:
        server.train(grid, plan, tmp_path / "results")
    for client in (0, 1):
        why = f"client {client}: advertise: the rows or files of this site cannot answer this"
        assert why in str(error.value)
    assert str(tmp_path) not in str(error.value)
    assert "--node-config: signing_key: [Errno 2]" in capsys.readouterr().err
