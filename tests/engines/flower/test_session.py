"""The session of a server and the app of a site, talking to each other as through Flower: the same
numbers, and what goes wrong.
"""

from __future__ import annotations

import dataclasses
import shutil
import types

import httpx
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.runtime_pb2 import SendTaskHeartbeatResponse
from flwr.supercore.run import RunNotRunningException

import foedus as fd
from foedus import testing, wire
from foedus.base import random, tree
from foedus.core.exchange import Ask
from foedus.core.held import HeldSum
from foedus.engines.flower import messages, processes
from foedus.engines.flower.memory import Memory
from foedus.engines.flower.server import greet
from foedus.engines.flower.session import FlowerSession, Line
from tests.conformance import ALGORITHMS
from tests.engines.flower.grid import Here, HereGrid

# Measurements are not sent through Flower: these columns are for simulations.
MEASURED = (
    "objective",
    "objective_last",
    "fw_gap",
    "consensus",
    "worst",
    "online_loss",
    "regret",
    "reward",
    "penalty",
)
QUICK = (
    "FedAvg",
    "Scaffold",
    "FedNewton",
    "FedNewton, softmax",
    "FedFW, one entry",
    "FedFW, stochastic, rank one",
    "FedBoost, cache",
)
QUICK += (
    "AFLBoost",
    "FedRes",
    "FedResERM",
    "FFGB, two steps, theorem's step",
    "FFGBDistill",
    "Everything the contract allows",
)
DESCRIBED = {k: a for k, a in ALGORITHMS.items() if not a.pooled}


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(a, id=k, marks=[] if k in QUICK else pytest.mark.slow)
        for k, a in DESCRIBED.items()
    ],
)
def test_the_same_numbers_as_in_the_simulator(algorithm, fed, tmp_path):
    engine = Here(tmp_path, nodes=5, code="tests.conformance:ALGORITHMS")
    here = fd.run(algorithm, fed, 3, engine=engine)
    local = fd.run(algorithm, fed, 3, engine=fd.Local(batch=False))
    for column in local.records.columns:
        if column in ("seconds", *MEASURED) or (
            column not in here.records.columns and algorithm.personal
        ):
            continue
        torch.testing.assert_close(
            torch.tensor(here.records.values(column)).double(),
            torch.tensor(local.records.values(column)).double(), rtol=1e-6, atol=1e-6,
            equal_nan=True, msg=lambda m, c=column: f"{c}: {m}",
        )  # fmt: skip
    for x, y in zip(tree.leaves(here.state), tree.leaves(local.state), strict=True):
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    assert (engine.line.received, engine.line.sent) == (
        local.records.last("bytes_up"),
        local.records.last("bytes_down"),
    )


AVERAGE = fd.FedAvg(fd.Linear(), lr=0.1, batch_size=16)


@pytest.fixture
def engine(tmp_path):
    return Here(tmp_path, nodes=5)


def test_models_of_clients_stay_at_their_sites(fed, engine, tmp_path):
    run = fd.run(fd.Independent(fd.Linear(), lr=0.1), fed, 1, engine=engine)
    run.save(tmp_path / "run.safetensors")
    for result in (run, fd.Run.load(tmp_path / "run.safetensors")):
        with pytest.raises(fd.FoedusError, match=r"stayed at their sites; run\.per_client"):
            result.model_of(int(fed.ids[0]))
    local = fd.run(fd.Independent(fd.Linear(), lr=0.1), fed, 1).per_client()
    torch.testing.assert_close(
        torch.tensor(run.per_client()["loss"].to_numpy()),
        torch.tensor(local["loss"].to_numpy()), rtol=1e-5, atol=1e-6,
    )  # fmt: skip


def only(node: int, round: int, change):
    """Change the answers of one node in one round."""

    def spoil(asked: Message, answer: Message) -> Message | None:
        said = messages.header(asked)
        return (
            change(asked, answer)
            if asked.metadata.dst_node_id == node and said.get("round") == round
            else answer
        )

    return spoil


def rewritten(header=None, body=None):
    """An answer with another header or body."""

    def change(asked: Message, answer: Message) -> Message:
        said, sent = messages.header(answer), messages.body(answer)
        said, sent = {**said, **(header or {})}, sent if body is None else body(sent)
        if body is not None:
            said["lengths"] = [len(sent)]
        return Message(messages.content(said, sent), reply_to=asked)

    return change


def _other(shape, value=0.0):
    return lambda sent: wire.encode({k: torch.full(shape, value) for k in wire.decode(sent)})


def _nan(sent):
    return wire.encode({k: v * float("nan") for k, v in wire.decode(sent).items()})


FAULTS = {
    "silent": (lambda asked, answer: None, "no answer within"),
    "not a number": (rewritten(body=_nan), "not finite"),
    "another shape": (rewritten(body=_other((3, 3))), "form float32 [3, 3]"),
    "garbage": (rewritten(body=lambda sent: b"garbage" * 9), "expected b'fd' at byte 0"),
    "cut short": (rewritten(body=lambda sent: sent[:-5]), "checksum"),
    "another round": (rewritten({"round": 1}), "is for round 1, not 2"),
    "another exchange": (rewritten({"exchange": 7}), "is for exchange 7, not 0"),
    "another client": (rewritten({"ids": [3]}), "clients that it was not asked for"),
    "wrong lengths": (rewritten({"lengths": [3]}), "do not sum to"),
    "no header": (
        lambda asked, answer: Message(RecordDict({"x": ConfigRecord({"y": 1})}), reply_to=asked),
        "no readable header",
    ),
    "error": (rewritten({"error": "the disk is full"}), "the disk is full"),
}


@pytest.mark.parametrize(("change", "why"), FAULTS.values(), ids=list(FAULTS))
def test_who_answers_badly_is_left_out_of_the_round_and_named(change, why, fed, engine):
    engine.grid.spoil = only(1, 2, change)
    with pytest.warns(UserWarning, match="client 0 .* is left out"):
        run = fd.run(AVERAGE, fed, 3, engine=engine)
    named = run.history.left_out
    assert named.isna().tolist() == [True, True, False, True]
    assert named[2].startswith("0: ") and why in named[2]
    # Two rounds of all, but the second with the moves of the other four, averaged by their rows.
    after = fd.run(AVERAGE, fed, 2, engine=_spoilt_again(engine, change))
    w = fd.run(AVERAGE, fed, 1).state.w
    session = fd.Local(batch=False).open(AVERAGE, fed, random.key(0))
    ids = torch.tensor([1, 2, 3, 4])
    moves = [r for _, r, _ in session.exchange(Ask("train", {"w": w}, ids, random.key(0), 2, 0))]
    share = torch.from_numpy(fed.sizes[1:] / fed.sizes[1:].sum()).float()
    for k in w:
        torch.testing.assert_close(
            after.state.w[k], w[k] + sum(s * m[k] for s, m in zip(share, moves, strict=True))
        )


def _spoilt_again(engine, change):
    engine.grid.spoil = only(1, 2, change)
    return engine


def test_too_few_answers_stop_the_run(fed, tmp_path):
    engine = Here(tmp_path, nodes=5, min_clients=4)
    engine.grid.spoil = lambda asked, answer: (
        None if asked.metadata.dst_node_id < 3 and "round" in messages.header(asked) else answer
    )
    with (
        pytest.warns(UserWarning, match="no answer"),
        pytest.raises(
            fd.TooFewClients,
            match=r"round 1: 3 of 5 clients are left, at least 4 must be \(client 0",
        ),
    ):
        fd.run(AVERAGE, fed, 3, engine=engine)


REQUEST = httpx.Request("POST", "https://127.0.0.1/v1/runtime/pull-messages")
UNAUTHORIZED = httpx.HTTPStatusError(
    "401 Unauthorized", request=REQUEST, response=httpx.Response(401, request=REQUEST)
)


@pytest.mark.parametrize(
    ("error", "why"),
    [(UNAUTHORIZED, "401 Unauthorized"), (RunNotRunningException(), "RunNotRunningException")],
    ids=str,
)
def test_a_superlink_that_ends_the_run_is_a_readable_error(error, why, fed, tmp_path):
    """As it does when its clock jumps by more than a minute; the run can go on with a new one."""
    engine, path = Here(tmp_path, nodes=2), tmp_path / "c.safetensors"
    pull = HereGrid.pull_messages

    def refuse(ids):
        if engine.grid.asked[-1].metadata.group_id == "2":
            raise error
        return pull(engine.grid, ids)

    engine.grid.pull_messages = refuse
    with pytest.raises(fd.FoedusError, match=f"does not let this server go on with its run: {why}"):
        fd.run(AVERAGE, fed, 3, engine=engine, checkpoint=path)
    del engine.grid.pull_messages
    again = fd.run(AVERAGE, fed, 3, engine=engine, checkpoint=path, resume=True)
    assert again.history.accuracy.equals(
        fd.run(AVERAGE, fed, 3, engine=fd.Local(batch=False)).history.accuracy
    )


def test_a_run_that_flower_has_ended_does_not_interrupt_this_process():
    """Flower's own heartbeat, and its way of trying again, send SIGINT there."""

    class Client:
        def SendTaskHeartbeat(self, request):
            return SendTaskHeartbeatResponse(success=False)

    assert processes.say_alive(Client())
    assert processes.refused(UNAUTHORIZED) and not processes.refused(httpx.ConnectError("busy"))


def test_a_disconnected_site_costs_no_waiting(fed, engine):
    there = dict(engine.grid.contexts)
    engine.grid.get_node_ids = lambda: list(there)
    session_asks = len(engine.grid.asked)
    engine.grid.spoil = only(5, 1, lambda asked, answer: there.pop(5) and answer)
    with pytest.warns(UserWarning, match="not connected"):
        run = fd.run(AVERAGE, fed, 3, engine=engine)
    assert run.history.left_out.tolist()[2:] == ["4: it is not connected"] * 2
    assert len(engine.grid.asked) - session_asks == 5 + 5 + 4 + 4  # the greeting and three rounds


STATEFUL = {
    "Scaffold": fd.Scaffold(fd.Linear(), lr=0.1, batch_size=16),
    "FedRes": fd.FedRes(step=0.05),
    "FFGB": fd.FFGB(fd.Forest(trees=2, depth=3)),
    "FedFW": fd.FedFW(fd.Linear(), fd.L1Ball(5.0), measure_every=0),
}


@pytest.mark.parametrize("algorithm", STATEFUL.values(), ids=list(STATEFUL))
def test_an_answer_that_got_lost_is_undone(algorithm, fed, engine, tmp_path):
    """A client whose reply did not arrive is as if it had not been asked: it goes on from the state
    before.
    """
    engine.grid.spoil = only(1, 2, lambda asked, answer: None)
    with pytest.warns(UserWarning, match="no answer"):
        lost = fd.run(algorithm, fed, 4, engine=engine)
    deaf = Here(tmp_path / "deaf", nodes=5)
    deaf.grid.spoil = only(1, 2, lambda asked, answer: None)
    asks = deaf.grid.app

    def refuse(message, context):  # the node gets no message at all
        said = messages.header(message)
        if message.metadata.dst_node_id == 1 and said.get("round") == 2:
            return None
        return asks(message, context)

    deaf.grid.app = refuse
    with pytest.warns(UserWarning, match="no answer"):
        never = fd.run(algorithm, fed, 4, engine=deaf)
    testing._same(_without_clients(lost), _without_clients(never), "a lost answer left a trace")


def _without_clients(run):
    run.clients = None
    for row in run.records.rows:
        row.pop("left_out", None)
    return run


@pytest.mark.parametrize("algorithm", STATEFUL.values(), ids=list(STATEFUL))
def test_a_server_that_was_killed_goes_on_to_the_same_numbers(algorithm, fed, tmp_path):
    """After the second round's first answers nothing is written any more; a new server takes up the
    checkpoint.
    """
    path, folder = tmp_path / "run.safetensors", tmp_path / "nodes"
    whole = fd.run(algorithm, fed, 4, engine=Here(tmp_path / "whole", nodes=5))
    engine = Here(folder, nodes=5)

    class Killed(BaseException):
        pass

    def die(asked, answer):
        if asked.metadata.dst_node_id == 3 and messages.header(asked).get("round") == 3:
            raise Killed
        return answer

    engine.grid.spoil = die
    with pytest.raises(Killed):
        fd.run(algorithm, fed, 4, engine=engine, checkpoint=path)
    engine.grid.spoil = lambda asked, answer: answer
    # a new run of Flower's has a context of its own: states come from the nodes' disks
    for node in engine.grid.contexts:
        engine.grid.restart(node)
    resumed = fd.run(algorithm, fed, 4, engine=engine, checkpoint=path, resume=True)
    testing._same(_without_clients(whole), _without_clients(resumed), "the resumed run differs")


def test_sites_follow_a_server_to_the_checkpoint_before_its_last(fed, tmp_path):
    """Killed in round 4, its checkpoint of round 3 damaged: it goes on from round 2, and sites from
    what they were after it.
    """
    algorithm, path = STATEFUL["Scaffold"], tmp_path / "run.safetensors"
    whole = fd.run(algorithm, fed, 5, engine=Here(tmp_path / "whole", nodes=5))
    engine = Here(tmp_path / "nodes", nodes=5)

    class Killed(BaseException):
        pass

    def die(asked, answer):
        if asked.metadata.dst_node_id == 5 and messages.header(asked).get("round") == 4:
            raise Killed
        return answer

    engine.grid.spoil = die
    with pytest.raises(Killed):
        fd.run(algorithm, fed, 5, engine=engine, checkpoint=path)
    engine.grid.spoil = lambda asked, answer: answer
    path.write_bytes(path.read_bytes()[:-1])
    for node in engine.grid.contexts:
        engine.grid.restart(node)
    with pytest.warns(UserWarning, match="previous of round 2"):
        resumed = fd.run(algorithm, fed, 5, engine=engine, checkpoint=path, resume=True)
    testing._same(_without_clients(whole), _without_clients(resumed), "the resumed run differs")
    assert len(resumed.notes) == 1


def _lose(engine, node: int, round: int, folder):
    """A SuperNode that starts again without its state, before a round."""

    def spoil(asked, answer):
        if messages.header(asked).get("round") == round and asked.metadata.dst_node_id == max(
            engine.grid.contexts
        ):
            engine.grid.restart(node)
            shutil.rmtree(folder / str(node - 1) / "cache" / "states", ignore_errors=True)
        return answer

    return spoil


def test_a_state_that_is_gone_is_noticed_and_its_client_excluded(fed, tmp_path):
    engine = Here(tmp_path, nodes=5)
    engine.grid.spoil = _lose(engine, 1, 1, tmp_path)
    with pytest.warns(
        UserWarning, match="client 0 .* has lost its state and is excluded: Scaffold"
    ):
        run = fd.run(STATEFUL["Scaffold"], fed, 4, engine=engine)
    assert run.history.left_out.tolist()[2:] == [
        "0: it has lost its state",
        "0: it has lost its state and cannot come back",
        "0: it has lost its state and cannot come back",
    ]


@pytest.mark.parametrize("name", ["FedRes", "FFGB", "FedFW"])
def test_where_there_is_a_rule_it_comes_back_as_a_newcomer(name, fed, tmp_path):
    engine = Here(tmp_path, nodes=5)
    engine.grid.spoil = _lose(engine, 1, 2, tmp_path)
    with pytest.warns(UserWarning, match="lost its state"):
        run = fd.run(STATEFUL[name], fed, 6, engine=engine)
    named = run.history.left_out
    assert named.notna().tolist() == [False, False, False, True, False, False, False]
    plain = fd.run(STATEFUL[name], fed, 6)
    assert (
        abs(run.history.loss.iloc[-1] - plain.history.loss.iloc[-1])
        < 0.25 * plain.history.loss.iloc[-1]
    )


def test_ffgb_sends_a_newcomer_all_functions(fed, tmp_path):
    """So that its values of f are right: its next tree is the one it would have grown from f
    itself.
    """
    engine = Here(tmp_path, nodes=5)
    engine.grid.spoil = _lose(engine, 1, 2, tmp_path)
    with pytest.warns(UserWarning, match="lost"):
        run = fd.run(STATEFUL["FFGB"], fed, 5, engine=engine)
    rows = fed.data.x_train[fed.client_rows(0)]
    state = engine.grid.contexts[1].state["client-0"]
    kept = wire.decode(state["states"][-1])["state"]["f"]
    whole = run.state.f
    before = HeldSum(whole.parts[:-1], whole.weights[:-1], whole.keeps[:-1])
    f = STATEFUL["FFGB"].predictor(run.state.replace(f=before)).outputs(rows)
    torch.testing.assert_close(kept, f, rtol=1e-4, atol=1e-4)


def test_settings_that_a_site_does_not_know_are_an_error_in_its_words(fed, engine):
    session = engine.open(AVERAGE, fed, random.key(0))
    for config, why in (
        ({"type": "FedNovel"}, "type 'FedNovel' is unknown"),
        ({"type": "FedAvg", "pace": 1}, "'pace' is unknown"),
    ):
        question = {**session.common, "algorithm": config, "foedus": "9.9"}
        with pytest.warns(
            UserWarning,
            match=r"node 1 does not take part: the algorithm of this run is not known here .the "
            rf"server has foedus 9.9.*{why}",
        ):
            assert greet(Line(engine.grid, {}), [1], question) == {}


def test_only_client_steps_can_be_asked_for(fed, engine):
    session = engine.open(AVERAGE, fed, random.key(0))
    ask = Ask("train", {}, torch.tensor([0]), random.key(0), 1, 0)
    letters = session._letters(ask, [0], session._about(ask), lambda i: [])
    for step in ("round", "start", "__init__", "_private", "lr", "nothing"):
        answers = session.line.post(f"train.{step}", *letters)
        assert "is not a client step of FedAvg" in messages.header(answers[1])["error"]
    answers = session.line.post("query.secrets", *letters)
    assert "does not know messages of type 'query.secrets'" in messages.header(answers[1])["error"]


def test_what_was_prepared_is_prepared_once(fed, tmp_path, monkeypatch):
    algorithm, count = fd.FedNewton(fd.RandomFourier(20, bandwidth=4.0), reg=0.1), []
    prepare = type(algorithm).prepare
    monkeypatch.setattr(
        type(algorithm), "prepare", lambda self, data: count.append(1) or prepare(self, data)
    )
    fd.run(algorithm, fed, 3, engine=Here(tmp_path, nodes=5))
    # one for each node, in seven exchanges; and the server's, who looks what replies must look like
    assert len(count) == 6


def test_quantized_replies(fed, engine):
    here = fd.run(AVERAGE, fed, 2, engine=engine, quantise="int8")
    local = fd.run(AVERAGE, fed, 2, quantise="int8")
    torch.testing.assert_close(here.state.w, local.state.w)
    assert here.records.last("bytes_up") == local.records.last("bytes_up") == engine.line.received


def test_functions_that_must_not_be_used_are_left_out(fed, engine):
    """FFGB checks what it is sent itself: one function too many, and a tree for three classes in
    the place of ten.
    """

    def twice(sent):
        reply = wire.decode(sent)
        return wire.encode({"functions": reply["functions"] * 2})

    def broken(sent):
        trees = wire.decode(sent)["functions"][0]
        return wire.encode(
            {"functions": [dataclasses.replace(trees, value=trees.value[..., :3].contiguous())]}
        )

    for spoil, why in ((twice, "must send 1 functions"), (broken, "outputs")):
        engine.grid.spoil = only(1, 2, rewritten(body=spoil))
        with pytest.warns(UserWarning, match="client 0 .* is left out"):
            run = fd.run(STATEFUL["FFGB"], fed, 3, engine=engine)
        assert run.history.left_out.notna().tolist() == [False, False, True, False]
        assert why in run.history.left_out[2]
        assert len(run.state.f.weights[1]) == 4


@pytest.mark.parametrize(
    "name",
    [
        "FedAvg",
        "Scaffold",
        "Scaffold, step sizes by round and step",
        "FedRes",
        "FFGB",
        "FedFW, one entry",
        "FedBoost",
    ],
)
def test_late_messages(name, fed, tmp_path):
    """Delays go around this engine as around the others, and clients know of them."""
    late = {"up": [0, 1, 2, 0, 1], "down": [1, 0, 2, 0, 0]}
    engine = fd.Delayed(Here(tmp_path, nodes=5, code="tests.conformance:ALGORITHMS"), **late)
    here, local = (
        fd.run(ALGORITHMS[name], fed, 5, engine=e)
        for e in (engine, fd.Delayed(fd.Local(batch=False), **late))
    )
    for x, y in zip(tree.leaves(here.state), tree.leaves(local.state), strict=True):
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_conjugate_gradients_start_anew_after_a_failure(fed, engine):
    """A round without one client belongs to another system of equations; the run still ends at the
    solution of all rows.
    """
    algorithm = fd.FedNewton(fd.RandomFourier(20, bandwidth=4.0), reg=0.1, solver="cg")
    engine.grid.spoil = only(2, 2, lambda asked, answer: None)
    with pytest.warns(UserWarning, match="no answer"):
        run = fd.run(algorithm, fed, 25, engine=engine, evaluate_every=25)
    solution = fd.run(fd.KRR(fd.RandomFourier(20, bandwidth=4.0), reg=0.1), fed, 1)
    torch.testing.assert_close(run.state.w, solution.state.w, rtol=1e-5, atol=1e-6)


def silent(node: int, *rounds: int):
    """A node whose answers in some rounds do not arrive."""
    return lambda asked, answer: (
        None
        if asked.metadata.dst_node_id == node and messages.header(asked).get("round") in rounds
        else answer
    )


@pytest.mark.parametrize("algorithm", STATEFUL.values(), ids=list(STATEFUL))
def test_a_site_may_be_away_for_several_rounds(algorithm, fed, tmp_path):
    """Two lost answers in a row: its state is that of the last answer that was seen, and it is
    alone in a group when it is asked again.
    """
    engine = Here(tmp_path, nodes=5, min_clients=3)
    engine.grid.spoil = silent(1, 2, 3)
    with pytest.warns(UserWarning, match="no answer"):
        run = fd.run(algorithm, fed, 5, engine=engine)
    assert run.history.left_out.notna().tolist() == [False, False, True, True, False, False]


def test_low_rank_points_of_those_who_came(fed, tmp_path):
    engine = Here(tmp_path, nodes=5)
    engine.grid.spoil = silent(1, 2)
    algorithm = fd.FedFW(fd.Linear(bias=False), fd.NuclearBall(5.0), measure_every=0)
    with pytest.warns(UserWarning, match="no answer"):
        run = fd.run(algorithm, fed, 3, engine=engine)
    assert bool(fd.NuclearBall(5.0).contains(run.state.center["weight"]))


@pytest.mark.parametrize(
    "header",
    [
        {"ids": ["0"]},
        {"ids": [0.0]},
        {"ids": [True]},
        {"lost": 5},
        {"lost": "abc"},
        {"lost": [0]},
        {"seconds": 10**400},
        {"lengths": [-1, 1]},
    ],
    ids=str,
)
def test_headers_of_untrusted_sites(header, fed, engine):
    engine.grid.spoil = only(1, 2, rewritten(header))
    run = fd.run(AVERAGE, fed, 3, engine=engine)
    assert run.history.get("left_out") is None or "0: " in run.history.left_out[2]


def test_all_states_gone_at_once(fed, tmp_path):
    """Where there is a rule, everybody begins anew and the round is done again; where there is
    none, the run stops.
    """
    for name in ("FedFW", "Scaffold"):
        engine = Here(tmp_path / name, nodes=5, min_clients=4)

        def lose(asked, answer, engine=engine, name=name):
            if messages.header(asked).get("round") == 1 and asked.metadata.dst_node_id == 5:
                for node in range(1, 6):
                    engine.grid.restart(node)
                    shutil.rmtree(
                        tmp_path / name / str(node - 1) / "cache" / "states", ignore_errors=True
                    )
            return answer

        engine.grid.spoil = lose
        with pytest.warns(UserWarning, match="lost its state"):  # noqa: PT031 - one or the other
            if name == "FedFW":
                assert len(fd.run(STATEFUL[name], fed, 3, engine=engine).history) == 4
            else:
                with pytest.raises(fd.TooFewClients, match="lost its state"):
                    fd.run(STATEFUL[name], fed, 3, engine=engine)


def test_a_refused_answer_is_undone_in_any_group(fed, engine):
    """FFGB in two groups: the answer of the first is refused after the second was asked."""
    engine.grid.spoil = lambda asked, answer: silent(1, 1)(
        asked,
        only(2, 2, rewritten(body=lambda sent: wire.encode({"functions": []})))(asked, answer),
    )
    session = {}
    opened = engine.open

    def remember(*args):
        session["it"] = opened(*args)
        return session["it"]

    engine.open = remember
    with pytest.warns(UserWarning, match="left out"):
        fd.run(STATEFUL["FFGB"], fed, 2, engine=engine)
    assert session["it"].seen[1] >> 16 == 1  # not the second round's


@pytest.mark.parametrize(
    "algorithm",
    [fd.FedRes(step=0.05), fd.FedResERM(shared=range(6), private=range(6, 12))],
    ids=["FedRes", "FedResERM"],
)
def test_labels_that_cannot_be_are_left_out(algorithm, fed, engine):
    def wrong(sent):
        reply = wire.decode(sent)
        return wire.encode({**reply, "y": torch.full_like(reply["y"], 99)})

    engine.grid.spoil = only(1, 2, rewritten(body=wrong))
    with pytest.warns(UserWarning, match="its y must be integers from 0 to 9"):
        run = fd.run(algorithm, fed, 3, engine=engine)
    assert run.history.left_out.notna().tolist() == [False, False, True, False]


@pytest.mark.parametrize("wrong", [2, 3, 5])
def test_the_server_knows_the_form_whatever_most_send(wrong, fed, engine):
    """Half of the sites, most of them or all send models of one other form: these sites are
    refused, and no others.
    """

    def spoil(asked, answer):
        bad = asked.metadata.dst_node_id <= wrong and messages.header(asked).get("round") == 2
        return rewritten(body=_other((3, 3), 1.0))(asked, answer) if bad else answer

    engine.grid.spoil = spoil
    if wrong == 5:
        with pytest.warns(UserWarning, match="form float32"), pytest.raises(fd.TooFewClients):
            fd.run(AVERAGE, fed, 3, engine=engine)
        return
    with pytest.warns(
        UserWarning, match=r"form float32 \[3, 3\], float32 \[3, 3\], not float32 \[10, 64\]"
    ):
        run = fd.run(AVERAGE, fed, 3, engine=engine)
    assert run.history.dropped.tolist()[1:] == [0, wrong, 0]
    assert [entry.split(":")[0] for entry in run.history.left_out[2].split("; ")] == [
        str(i) for i in range(wrong)
    ]


def test_where_nobody_knows_the_form_more_than_half_must_agree():
    from foedus.wire import checks

    a, b = {"x": torch.zeros(2)}, {"x": torch.zeros(3)}
    assert list(checks.misfits({0: a, 1: a, 2: b}, None)) == [2]
    assert list(checks.misfits({0: a, 1: b}, None)) == [0, 1]
    assert list(checks.misfits({0: a, 1: a, 2: b}, checks.form_of(b))) == [0, 1]
    assert checks.misfits({}, None) == {}


def test_a_few_bytes_for_a_huge_tensor_are_refused(fed, engine):
    """FFGB's replies have no form of their own; one that would be dense in terabytes is not made
    dense.
    """
    huge = wire.encode(
        {"functions": [wire.Sparse(torch.tensor([0]), torch.ones(1), (1 << 20, 1 << 20))]}
    )
    engine.grid.spoil = only(1, 2, rewritten(body=lambda sent: huge))
    with pytest.warns(UserWarning, match="stands for more than"):
        run = fd.run(fd.FFGB(fd.Forest(trees=1, depth=2)), fed, 2, engine=engine)
    assert run.history.dropped.tolist()[1:] == [0, 1]


def test_robust_means_between_sites(fed, engine):
    engine.grid.spoil = only(
        1,
        2,
        rewritten(
            body=lambda sent: wire.encode({k: v * 1e6 for k, v in wire.decode(sent).items()})
        ),
    )
    here = fd.run(AVERAGE, fed, 2, engine=engine, aggregation=fd.Median())
    local = fd.run(AVERAGE, fed, 2, aggregation=fd.Median())
    plain = fd.run(AVERAGE, fed, 2, engine=engine)
    assert (
        here.state.w["weight"].norm()
        < 2 * local.state.w["weight"].norm()
        < 1e-2 * plain.state.w["weight"].norm()
    )


def test_versions_rise_with_every_exchange():
    """A state is kept under the version of the exchange that made it: two of one round must not be
    taken for each other.
    """
    session = FlowerSession(Line(None, {0: 0}), fd.FedAvg(), 0, fd.Spec((2,), 2, 2))
    asks = [
        Ask("train", {}, torch.tensor([0]), random.key(0), t, e) for t in (1, 2) for e in (0, 1, 2)
    ]
    versions = [session._about(ask)["version"] for ask in asks]
    assert versions == sorted(set(versions)) and len(versions) == 6
    assert [v >> 16 for v in versions] == [1, 1, 1, 2, 2, 2]


def test_an_answer_of_the_same_round_is_undone():
    """Two exchanges in round 1; the answer to the second got lost, so that the third goes on from
    the state of the first.
    """
    context = types.SimpleNamespace(state=types.SimpleNamespace(config_records={}))
    first, second = (1 << 16) + 1, (1 << 16) + 2
    memory = Memory(context, "run", None)
    memory.keep(4, {"a": 1}, first, 0)
    memory.keep(4, {"a": 2}, second, first)
    assert memory.recall(4, first) == {"a": 1} and memory.recall(4, second) == {"a": 2}
    assert memory.recall(4, 3) is None


def test_what_another_run_has_left_is_not_taken_up():
    context = types.SimpleNamespace(state=types.SimpleNamespace(config_records={}))
    Memory(context, "one", None).keep(4, {"a": 1}, 7, 0)
    assert Memory(context, "one", None).recall(4, 7) == {"a": 1}
    assert Memory(context, "other", None).recall(4, 7) is None
