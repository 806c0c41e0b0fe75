"""A server that is after the rows of one site: each attack is carried out, and fails."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Message

import foedus as fd
from foedus import wire
from foedus.aggregation.dp.distributed import Share
from foedus.aggregation.secure.client import SecureClient
from foedus.aggregation.secure.protocol import SecureAggregation
from foedus.aggregation.secure.server import SecureServer
from foedus.algorithms.preprocessing.fit import FitPreprocessing
from foedus.base import unions
from foedus.core.describe import to_config
from foedus.engines.flower import messages
from foedus.engines.flower.policy import Policy
from tests.engines.flower.test_site import table, written
from tests.security.sites import COLUMNS, federation, log
from tests.security.test_policy import HELLO, PLAN, train

SECURE = PLAN + '\n[aggregation]\ntype = "SecureAggregation"\nrange = 32.0\n'
pytestmark = pytest.mark.filterwarnings("ignore:.*(left out|take part):UserWarning")

# -- other questions to other sites ----------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["algorithm"].update(lr=1e-30),  # all but one reply nothing new
        lambda h: h["preprocess"]["divisor"].update(values=[1e30, 1e30, 1e30]),
        lambda h: h.update(seed=h["seed"] + 1),
        lambda h: h.update(weights="uniform"),
    ],
    ids=["step size", "scaling", "seed", "weights"],
)
def test_other_settings_for_all_but_one_site(change, tmp_path):
    grid = federation(tmp_path, SECURE, secure__clients="2")

    def retold(node, kind, header, body):
        if node == 1 or header.get("phase") != "mask" or header["preprocess"] is None:
            return None
        change(header)
        return header, body

    grid.change = retold
    with pytest.raises(fd.TooFewClients, match="asked something else than the offer says"):
        train(grid, tmp_path)
    assert all(entry["sent"] for entry in log(grid, 1) if entry.get("phase") == "mask")
    assert "asked something else" in str(log(grid, 2)[-1]["errors"])


def test_another_model_for_all_but_one_site(tmp_path):
    grid = federation(tmp_path, SECURE, secure__clients="2")

    def retold(node, kind, header, body):
        if node == 1 or header.get("phase") != "mask" or header["preprocess"] is None:
            return None
        first, *rest = messages.cut(body, header["lengths"])
        model = wire.decode(first)
        model["w"] = {name: torch.zeros_like(t) for name, t in model["w"].items()}
        model["w"]["weight"][0, 0] = 1.0
        parts = [wire.encode(model), *rest]
        return {**header, "lengths": [len(p) for p in parts]}, b"".join(parts)

    grid.change = retold
    with pytest.raises(fd.TooFewClients, match="asked something else than the offer says"):
        train(grid, tmp_path)


def test_an_offer_of_its_own_for_one_client():
    """A server that offers the victim its own question, too: the others' boxes do not open."""
    config, questions = SecureAggregation(), {0: "a" * 64, 1: "b" * 64, 2: "b" * 64, 3: "b" * 64}
    servers = {
        q: SecureServer(config, dict.fromkeys(range(4), 1), session="s", question=q)
        for q in set(questions.values())
    }
    clients = {i: SecureClient(i, config) for i in range(4)}
    adverts = {i: clients[i].advertise(servers[q].offer()) for i, q in questions.items()}

    def retag(message, q):
        return {**message, "tag": torch.frombuffer(bytearray(servers[q].tag), dtype=torch.uint8)}

    everybody = {
        q: s.keys({i: retag(a, q) for i, a in adverts.items()}) for q, s in servers.items()
    }
    shares = {i: clients[i].share(everybody[q][i]) for i, q in questions.items()}
    for q, s in servers.items():
        boxes = s.boxes({i: retag(share, q) for i, share in shares.items()})
        for i in (i for i, own in questions.items() if own == q):
            with pytest.raises(fd.SecureError, match="was altered, or is not from it"):
                clients[i].mask(boxes[i], torch.ones(3), question=q)


def test_the_same_question_for_another_set_of_sites(tmp_path):
    """Two sums that differ by one site show the reply of that site: so they would from the first
    exchange of the fit on.
    """
    grid = federation(tmp_path, SECURE, secure__clients="2", secure__threshold="0.6")
    train(grid, tmp_path)
    (tmp_path / "results").rename(tmp_path / "before")
    west = grid.contexts.pop(3)
    with pytest.raises(fd.TooFewClients, match="the same was asked before, for a sum of other"):
        train(grid, tmp_path)
    grid.contexts[3] = west  # the same again is no news
    shutil.rmtree(tmp_path / "results", ignore_errors=True)
    train(grid, tmp_path)


# -- fewer clients, less noise ---------------------------------------------------------------------


def test_a_sum_of_fewer_clients_than_the_site_demands(tmp_path):
    """Three are offered, and one of them never answers: two thirds are enough for the server."""
    grid = federation(tmp_path, SECURE, secure__clients="3")
    grid.spoil = lambda asked, answer: (
        None
        if asked.metadata.dst_node_id == 3 and messages.header(asked).get("phase") == "mask"
        else answer
    )
    with pytest.raises(fd.TooFewClients, match=r"leaves 2 survivors of 3; 3 are needed"):
        train(grid, tmp_path)


@pytest.mark.parametrize("claimed", [101, 200, 1000])
def test_the_noise_of_those_whom_a_client_has_seen_is_enough(claimed):
    """A server claims many clients, each of whom then adds little noise; only the neighbors of a
    client are there. Their noise alone must have the multiplier that was demanded.
    """
    config = SecureAggregation(privacy=fd.DifferentialPrivacy(clip=1.0, noise=1.0, delta=1e-6))
    share, seen = Share(config, 1.0, claimed), config.degree(claimed) + 1
    assert seen < claimed
    there = config.needed(seen)  # fewer survivors are refused
    total = math.sqrt(there * share.variance) / 2 ** (config.bits - 1)
    assert total >= 1.0 and total == pytest.approx(1.0, rel=1e-3)


def test_a_key_list_of_fewer_neighbors_than_the_noise_assumes_is_refused():
    config = SecureAggregation()
    client = SecureClient(0, config)
    offered = SecureServer(config, dict.fromkeys(range(101), 1), session="s")
    few = SecureServer(config, dict.fromkeys(range(32), 1), session="s")
    others = {i: SecureClient(i, config).advertise(few.offer()) for i in range(1, 32)}
    mine = client.advertise(offered.offer())
    listed = few.keys({0: {**mine, "tag": others[1]["tag"]}, **others})[0]
    with pytest.raises(fd.SecureError, match="the key list has 32 clients; with 101 in all"):
        client.share({**listed, "tag": mine["tag"]})


# -- scores, errors, files -------------------------------------------------------------------------


def test_a_score_is_not_sent_in_the_clear_where_no_reply_is(tmp_path):
    grid = federation(tmp_path, SECURE, secure__required="true", secure__clients="2")
    train(grid, tmp_path)
    answers = [m for m in grid.asked if m.metadata.message_type == "evaluate.model"]
    said = grid.ask(1, "evaluate.model", messages.header(answers[0]), messages.body(answers[0]))
    assert "not sent in the clear" in said["error"] and not {"hits", "rows"} & set(said)
    own = {n: next(entry for entry in log(grid, n) if "hits" in entry) for n in (1, 2, 3)}
    table = json.loads((tmp_path / "results" / "FedAvg.sites.json").read_text())
    assert all("not sent in the clear" in e["error"] and "accuracy" not in e for e in table[:3])
    hits, rows = (sum(own[n][name] for n in own) for name in ("hits", "rows"))
    assert table[3]["site"] == "all" and table[3]["test_rows"] == rows
    assert table[3]["accuracy"] == pytest.approx(hits / rows, abs=1e-5)  # and no single one
    assert (Policy.read(grid.policies[1]).cache / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("spoil", "secret"),
    [
        (lambda f: f.assign(outcome=["Huntington"] * len(f)), "Huntington"),
        (lambda f: f.assign(age=["41x", *f.age[1:]]), "41x"),
        (lambda f: f.assign(pulse=np.inf), "inf"),
        (lambda f: f.rename(columns={"age": "years", "score": "HIV"}), "HIV"),
    ],
    ids=["label", "cell", "infinite", "columns"],
)
def test_errors_tell_nothing_of_rows_or_files(spoil, secret, tmp_path):
    grid = federation(tmp_path, PLAN)
    written(tmp_path / "data", "north", spoil(table(0)))
    said = grid.ask(1, "query.hello", HELLO)
    assert "error" in said
    for word in (secret, str(tmp_path), "north.csv"):
        assert word not in str(said)
    assert secret in log(grid, 1)[-1]["why"] or "north.csv" in log(grid, 1)[-1]["why"]


@pytest.mark.parametrize("ids", [["*"], ["../../x"], ["0"], [0.5], [-1], [2**40], [1]])
def test_ids_are_numbers_of_this_site_before_anything_else(ids, tmp_path):
    """They were part of a pattern of files to remove."""
    grid = federation(tmp_path, SECURE, secure__clients="2")
    folder = Policy.read(grid.policies[1]).cache / "secure"
    folder.mkdir(parents=True)
    (folder / ".0.abc").write_bytes(b"kept")
    about = {"ids": ids, "seen": [0], "round": 1, "exchange": 0, "version": 65537, "lengths": [0]}
    secure = {"type": "SecureAggregation"}
    header = {**HELLO, **about, "phase": "advertise", "secure": secure}
    said = grid.ask(1, "query.secure", header)
    assert "ids" in said["error"]
    assert [p.name for p in folder.iterdir()] == [".0.abc"]


# -- the fit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("robust", [False, True])
def test_one_hostile_site_does_not_move_the_scaling(robust, tmp_path):
    """Rows a billion times larger put those of all others into one point. Among replies in the
    clear the site is named and left out; a median over sites is not moved.
    """
    names = ("north", "south", "west", "east")
    plan = PLAN.replace("clients = 3", "clients = 4")
    grid = federation(tmp_path, plan + '\n[aggregation]\ntype = "Median"\n' * robust, names)
    honest = train(grid, tmp_path)["FedAvg"]
    (tmp_path / "results").rename(tmp_path / "before")
    path = tmp_path / "data" / "east.csv"
    frame = pd.read_csv(path)
    frame.assign(age=frame.age * 1e4).to_csv(path, index=False)
    if robust:
        run = train(grid, tmp_path)["FedAvg"]
    else:
        words = r"client 3 \(east\) does not take part: its columns are implausible"
        with pytest.warns(UserWarning, match=words):
            run = train(grid, tmp_path)["FedAvg"]
        assert run.history.clients.tolist()[1:] == [3, 3]
    assert honest.history.clients.tolist()[1:] == [4, 4]
    spread = honest.preprocess.divisor
    assert (np.abs(run.preprocess.shift - honest.preprocess.shift) < spread).all()
    assert (np.abs(run.preprocess.divisor / spread - 1) < 0.5).all()


TEXTS = PLAN.replace(
    'columns = ["age", "pulse", "score"]',
    'columns = ["age", "pulse", "score", "name"]\ncategories = ["name"]',
)


def with_names(tmp_path, plan=TEXTS, **policy):
    """A federation whose tables have a column of names."""
    grid = federation(
        tmp_path, PLAN, **{"allow__columns": '["age", "pulse", "score", "name"]'} | policy
    )
    for site in ("north", "south", "west"):
        path = tmp_path / "data" / f"{site}.csv"
        frame = pd.read_csv(path)
        frame.assign(name=[f"{site} {i % 3}" for i in range(len(frame))]).to_csv(path, index=False)
    (tmp_path / "trial" / "federation.toml").write_text(plan)
    return grid


def test_columns_are_texts_only_where_the_policy_says_so(tmp_path):
    """Neither told nor matched: by texts of its choice, a server could confirm guesses, and count
    the numbers of a column.
    """
    grid = with_names(tmp_path / "no")
    with (
        pytest.warns(UserWarning, match=r"allow.categories .* does not have 'name'"),
        pytest.raises(fd.TooFewClients),
    ):
        train(grid, tmp_path / "no")
    assert not any(e["asked"] == "train.strings" for e in log(grid, 1))
    ages = {**HELLO["schema"], "texts": ["age"]}
    said = grid.ask(1, "query.hello", {**HELLO, "schema": ages})
    assert "allow.categories in this site's policy does not have 'age'" in said["error"]
    grid = with_names(tmp_path / "yes", allow__categories='["name"]')
    run = train(grid, tmp_path / "yes")["FedAvg"]
    assert len(run.preprocess.categories["name"]) == 9
    known = TEXTS.replace('categories = ["name"]', 'categories = { name = ["north 1", "x"] }')
    grid = with_names(tmp_path / "known", known, allow__categories='["name"]')
    run = train(grid, tmp_path / "known")["FedAvg"]
    assert run.preprocess.categories == {"name": ("north 1", "x")}
    assert not any(e["asked"] == "train.strings" for e in log(grid, 1))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda a: a.update(columns=["name", "pulse", "score", "age"], texts=["age"]),
         "algorithm: its columns and texts must be those of the schema"),
        (lambda a: a.update(known=[["name", ["x"]]]), "the texts of 'name' are not asked for"),
    ],
    ids=["another order", "known ones"],
)  # fmt: skip
def test_a_fit_cannot_take_one_column_for_another(change, why, tmp_path):
    grid = with_names(tmp_path, allow__categories='["name"]')
    fit = FitPreprocessing(("age", "pulse", "score", "name"), ("name",))
    body = wire.encode({"rows": 0, "columns": ["name"]})
    schema = {"columns": list(fit.columns), "classes": ["ill", "well"], "texts": ["name"]}
    header = {**HELLO, "schema": schema, "algorithm": to_config(fit), "ids": [0], "seen": [0]}
    header |= {"round": 1, "exchange": 0, "version": 65537, "groups": [[0]], "held": []}
    header |= {"items": [], "lengths": [len(body)]}
    change(header["algorithm"])
    assert why in grid.ask(1, "train.strings", header, body)["error"]


def test_single_values_are_not_found_by_quantiles(tmp_path):
    """Counts of the rows in any interval give every value of a column."""
    plan = PLAN.replace("[run]", 'impute = "median"\n\n[run]')
    grid = federation(tmp_path / "no", plan)
    with (
        pytest.warns(UserWarning, match="allow.quantiles in this site's policy is not true"),
        pytest.raises(fd.TooFewClients),
    ):
        train(grid, tmp_path / "no")
    grid = federation(tmp_path / "yes", plan, allow__quantiles="true")
    assert "left_out" not in train(grid, tmp_path / "yes")["FedAvg"].history
    # nor by a fit that needs none
    mean = to_config(FitPreprocessing(tuple(COLUMNS), impute="mean", scale="standard"))
    body = wire.encode({"prefix": torch.zeros(1, 3).long(), "level": 0, "fill": torch.zeros(3)})
    header = {**HELLO, "algorithm": mean, "ids": [0], "seen": [0], "round": 1, "exchange": 0}
    header |= {"version": 65537, "groups": [[0]], "held": [], "items": [], "lengths": [len(body)]}
    said = grid.ask(1, "train.bins", header, body)
    assert "this fit needs no order statistics" in said["error"]
    # nor by ranges of a millionth, unless there is noise
    narrow = FitPreprocessing(tuple(COLUMNS), ranges=tuple((c, 50.0, 50.1) for c in COLUMNS))
    hello = {**HELLO, "algorithm": to_config(narrow)}
    grid = federation(tmp_path / "ranges", PLAN)
    assert "allow.quantiles" in grid.ask(1, "query.hello", hello)["error"]


def test_columns_of_the_schema_are_the_only_ones_summed(tmp_path):
    grid = federation(tmp_path, PLAN)
    fit = FitPreprocessing(("age",), impute="mean", scale="standard")
    header = {**HELLO, "algorithm": to_config(fit), "ids": [0], "seen": [0], "round": 1}
    header |= {"exchange": 0, "version": 65537, "groups": [[0]], "held": [], "items": []}
    body = wire.encode({})
    header["lengths"] = [len(body)]
    assert "must be those of the schema" in grid.ask(1, "train.survey", header, body)["error"]
    header["schema"] = {**HELLO["schema"], "columns": ["age"]}
    assert "error" not in grid.ask(1, "train.survey", header, body) and len(COLUMNS) == 3


FIT = FitPreprocessing(tuple(COLUMNS), impute="mean", scale="standard")


def asked(grid, step, payload, fit=FIT, **more):
    """What the first site answers to a step of a fit."""
    body = wire.encode(payload)
    header = {**HELLO, "algorithm": to_config(fit), "ids": [0], "seen": [0], "round": 0}
    header |= {"exchange": 0, "version": 1, "groups": [[0]], "held": [], "items": []}
    return grid.ask(1, f"train.{step}", {**header, "lengths": [len(body)], **more}, body)


BOUND = torch.full((3,), 2.0**18, dtype=torch.float64)


@pytest.mark.parametrize(
    "change",
    [
        {"bound": torch.ones(44, 3).double()},  # a weight for each row
        {"center": torch.zeros(44, 3).double()},
        {"bound": torch.zeros(3).double()},  # infinite, and by its sign larger or smaller
        {"bound": BOUND * 1.5},
        {"center": BOUND * float("nan")},
        {"center": BOUND * 2},
        {"power": 7},
        {"power": 2},  # of twice the bound
    ],
    ids=["rows", "centers of rows", "zero", "between", "nan", "far", "power", "half"],
)
def test_moments_are_sums_and_squares_alone(change, tmp_path):
    """Weights of single rows gave the rows, and bounds of 0 the smallest value of a column."""
    grid = federation(tmp_path, PLAN)
    good = {"center": torch.zeros(3).double(), "bound": BOUND, "power": 1}
    assert "error" not in asked(grid, "moment", good)
    assert "moment: " in asked(grid, "moment", {**good, **change})["error"]


def test_counts_are_of_a_few_cells(tmp_path):
    grid = federation(tmp_path, PLAN, allow__quantiles="true")
    fit = FitPreprocessing(tuple(COLUMNS), impute="median", scale="standard")
    good = {"prefix": torch.zeros(2, 3).long(), "level": 1, "fill": BOUND}
    assert "error" not in asked(grid, "bins", good, fit)
    for change in (
        {"prefix": torch.zeros(7, 3).long()}, {"prefix": torch.zeros(1, 2).long()},
        {"prefix": torch.zeros(1, 3)}, {"fill": BOUND[:2]}, {"level": 9}, {"level": True},
    ):  # fmt: skip
        assert "bins: " in asked(grid, "bins", {**good, **change}, fit)["error"]


@pytest.mark.parametrize("rows", [3, 3_000_000, -1])
def test_tables_of_texts_have_the_rows_that_are_known(rows, tmp_path):
    grid = with_names(tmp_path, allow__categories='["name"]')
    fit = FitPreprocessing(("age", "pulse", "score", "name"), ("name",))
    schema = {"columns": list(fit.columns), "classes": ["ill", "well"], "texts": ["name"]}
    said = asked(grid, "strings", {"rows": rows, "columns": ["name"]}, fit, schema=schema)
    assert f"rows={rows}" in said["error"] and "seconds" not in said
    twice = {"rows": 0, "columns": ["name", "name"]}
    assert "each column once" in asked(grid, "strings", twice, fit, schema=schema)["error"]


def test_sums_of_a_fit_are_not_weighted(tmp_path):
    """By rows, the count of a text is a sum of numbers of rows, which tells who has it."""
    grid = federation(tmp_path, PLAN, secure__required="true")
    secure, fit = to_config(SecureAggregation()), dataclasses.replace(FIT, sums=True)
    about = {"secure": secure, "phase": "mask", "weights": "rows"}
    assert "weights='rows'" in asked(grid, "survey", {}, fit, **about)["error"]
    said = asked(grid, "survey", {}, FIT, **{**about, "weights": None})
    assert "sums=False does not go with" in said["error"]


def test_noise_that_hides_nothing_opens_no_ranges(tmp_path):
    """Unless the site itself demands noise, or has a budget."""
    tiny = fd.DifferentialPrivacy(clip=1.0, noise=0.01, delta=1e-5)
    secure = to_config(SecureAggregation(privacy=tiny))
    narrow = FitPreprocessing(tuple(COLUMNS), ranges=tuple((c, 50.0, 50.1) for c in COLUMNS))
    hello = {**HELLO, "algorithm": to_config(narrow), "secure": secure}
    grid = federation(tmp_path / "a", PLAN)
    assert "allow.quantiles" in grid.ask(1, "query.hello", hello)["error"]
    grid = federation(tmp_path / "b", PLAN, secure__noise="0.01")
    assert "error" not in grid.ask(1, "query.hello", hello)


def lie(step, change):
    """Answers of the third site to a step, changed."""

    def spoil(asked, answer):
        if asked.metadata.message_type != f"train.{step}" or asked.metadata.dst_node_id != 3:
            return answer
        said = messages.header(answer)
        (part,) = messages.cut(messages.body(answer), said["lengths"])
        body = wire.encode(change(wire.decode(part)))
        return Message(messages.content({**said, "lengths": [len(body)]}, body), reply_to=asked)

    return spoil


LIES = {
    "negative shares": ("moment", lambda r: {k: -v for k, v in r.items()}),
    "more than all rows": ("moment", lambda r: {k: v * 1e12 for k, v in r.items()}),
    "beyond the bound": ("moment", lambda r: {**r, "sum": r["sum"] * 0 + 5.0}),
    "rows that are not": ("survey", lambda r: {**r, "present": r["present"] * 1e308}),
    "less than nothing": ("survey", lambda r: {**r, "present": r["present"] - 1e6}),
    "half a magnitude": ("survey", lambda r: {**r, "magnitudes": r["magnitudes"] / 2}),
    "counts beyond rows": ("bins", lambda r: r + 1e30),
    "negative counts": ("bins", lambda r: -r),
    "no column": ("strings", lambda r: torch.tensor([3, 0, 255, 255, 65], dtype=torch.uint8)),
    "one byte": ("strings", lambda r: torch.tensor([1, 0, 0], dtype=torch.uint8)),
    "no text": ("strings", lambda r: torch.tensor([3, 0, 0, 0, 255], dtype=torch.uint8)),
}


@pytest.mark.parametrize(("step", "change"), LIES.values(), ids=list(LIES))
def test_lies_in_a_fit_are_left_out(step, change, tmp_path):
    """The site is named, and the columns of all are those of the other two."""
    plan = TEXTS.replace("[run]", 'impute = "median"\n\n[run]')
    policy = {"allow__categories": '["name"]', "allow__quantiles": "true"}
    grid = with_names(tmp_path / "lie", plan, **policy)
    grid.spoil = lie(step, change)
    with pytest.warns(UserWarning, match=r"client 2 \(west\) is left out: its "):
        run = train(grid, tmp_path / "lie")["FedAvg"]
    honest = with_names(tmp_path / "two", plan, **policy)
    del honest.contexts[3]
    want = train(honest, tmp_path / "two")["FedAvg"].preprocess
    assert np.isfinite(run.preprocess.shift).all()
    near = np.abs(run.preprocess.shift - want.shift) / want.divisor
    assert (near < 1).all() and (np.abs(run.preprocess.divisor / want.divisor - 1) < 0.5).all()


def test_magnitudes_that_nobody_else_has(tmp_path):
    """They move no median: bits are searched, not cells of a bound that one site can choose."""
    plan = PLAN.replace("[run]", 'impute = "median"\n\n[run]')
    policy = {"allow__quantiles": "true"}
    honest = train(federation(tmp_path / "a", plan, **policy), tmp_path / "a")["FedAvg"]
    grid = federation(tmp_path / "b", plan, **policy)
    grid.spoil = lie("survey", lambda r: {**r, "magnitudes": torch.ones_like(r["magnitudes"])})
    run = train(grid, tmp_path / "b")["FedAvg"]
    np.testing.assert_allclose(run.preprocess.fill, honest.preprocess.fill)
    np.testing.assert_allclose(run.preprocess.divisor, honest.preprocess.divisor)


@pytest.mark.parametrize("texts", [[b"\0\0\xff"], [b"\x63\0x"], [b"x"]])
def test_false_sums_of_texts_stop_with_a_readable_error(texts, tmp_path, monkeypatch):
    """Nobody can say whose they are."""
    secure = TEXTS + '\n[aggregation]\ntype = "SecureAggregation"\n'
    grid = with_names(tmp_path, secure, allow__categories='["name"]')
    true, calls = unions.table, []

    def table(strings, rows):
        calls.append(1)
        return true(texts if len(calls) == 3 else strings, rows)

    monkeypatch.setattr(unions, "table", table)
    with pytest.raises(fd.ReplyError, match="the texts of all clients cannot be used"):
        train(grid, tmp_path)
