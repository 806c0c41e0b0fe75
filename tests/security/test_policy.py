"""A site answers as its policy says, whatever a server sends; and writes down what it did."""

from __future__ import annotations

import datetime
import json
import stat

import pytest

import foedus as fd
from foedus.aggregation.dp.accounting import epsilon
from foedus.core.describe import to_config
from foedus.engines.flower import auditlog, messages, server
from foedus.engines.flower.account import Account, RefusedError
from foedus.engines.flower.policy import Policy
from tests.security.sites import COLUMNS, federation, log, scaled

PLAN = """
[algorithm]
type = "FedAvg"
model = { type = "Linear" }
lr = 0.3

[data]
columns = ["age", "pulse", "score"]
classes = ["ill", "well"]

[run]
rounds = 2

[federation]
clients = 3
min_clients = 2
timeout = 1
patience = 0.3
"""

HELLO = {
    "algorithm": to_config(fd.FedAvg(fd.Linear())),
    "seed": 0,
    "session": "s",
    "schema": {"columns": COLUMNS, "classes": ["ill", "well"]},
}


def train(grid, folder):
    plan = server.read_plan(folder / "trial" / "federation.toml")
    return server.train(grid, plan, folder / "results")


def test_what_the_default_policy_allows(tmp_path):
    grid = federation(tmp_path, PLAN)
    run = train(grid, tmp_path)["FedAvg"]
    assert "left_out" not in run.history
    entries = list(auditlog.read(Policy.read(grid.policies[1]).log))
    assert [e["asked"] for e in entries if "algorithm" in e] == [
        "query.hello", "train.survey", "train.moment", "train.moment",
        "train.train", "train.train", "evaluate.model",
    ]  # fmt: skip
    step = next(e for e in entries if e["asked"] == "train.train")
    assert step["algorithm"] == "FedAvg" and step["answer"] == "given" and step["round"] == 1
    assert step["received"] > 0 and step["sent"] > 0


def test_columns_that_are_not_allowed_are_neither_used_nor_summed(tmp_path):
    grid = federation(tmp_path, PLAN, allow__columns='["age", "pulse"]')
    said = grid.ask(1, "query.hello", HELLO)
    assert said["error"] == "schema.columns: this site's policy does not allow 'score'"
    narrow = {**HELLO, "schema": {"columns": ["age"], "classes": ["ill", "well"]}}
    assert "error" not in grid.ask(1, "query.hello", narrow)
    assert log(grid, 1)[0]["answer"] == "refused" and "score" in log(grid, 1)[0]["why"]


@pytest.mark.parametrize("classes", [None, ["ill"], ["ill", "well", "dead"]])
def test_classes_are_those_of_the_site(classes, tmp_path):
    grid = federation(tmp_path, PLAN)
    said = grid.ask(1, "query.hello", {**HELLO, "schema": {"columns": COLUMNS, "classes": classes}})
    assert "schema.classes: they are not those of this site's policy" in said["error"]


def test_algorithms_and_models_that_are_not_named(tmp_path):
    allowed = {"allow__algorithms": '["FedAvg"]', "allow__models": '["Linear"]'}
    grid = federation(tmp_path, PLAN, **allowed)
    assert "error" not in grid.ask(1, "query.hello", HELLO)
    other = {**HELLO, "algorithm": to_config(fd.FFGB())}
    assert (
        "allow.algorithms in this site's policy does not have FFGB"
        in (grid.ask(1, "query.hello", other)["error"])
    )
    other = {**HELLO, "algorithm": to_config(fd.FedAvg(fd.MLP((3,))))}
    assert (
        "allow.models in this site's policy does not have MLP"
        in (grid.ask(1, "query.hello", other)["error"])
    )


def test_evaluations_a_day(tmp_path):
    """What 285 evaluations were asked to give away, one row after the other."""
    grid = federation(tmp_path, PLAN, limits__evaluations_a_day="3")
    train(grid, tmp_path)
    model = (tmp_path / "results" / "FedAvg.safetensors").read_bytes()
    question = next(m for m in grid.asked if m.metadata.message_type == "evaluate.model")
    header = messages.header(question)
    for _ in range(2):
        assert "hits" in grid.ask(1, "evaluate.model", header, model)
    said = grid.ask(1, "evaluate.model", header, model)
    assert said["error"] == "this site answers 3 evaluations a day, and has done so today"


def test_scores_of_all_are_evaluations(tmp_path):
    plan = PLAN + '\n[aggregation]\ntype = "SecureAggregation"\nrange = 32.0\n'
    grid = federation(tmp_path, plan, secure__required="true", limits__evaluations_a_day="1")
    with pytest.warns(UserWarning, match="this site answers 1 evaluations a day"):
        train(grid, tmp_path)
    table = json.loads((tmp_path / "results" / "FedAvg.sites.json").read_text())
    assert "error" in table[3] and "accuracy" not in table[3]


def test_exchanges_a_day(tmp_path):
    grid = federation(tmp_path, PLAN, limits__exchanges_a_day="4")  # three are for the fit
    with (
        pytest.warns(UserWarning, match="this site answers 4 exchanges a day"),
        pytest.raises(fd.TooFewClients, match="round 2"),
    ):
        train(grid, tmp_path)


def test_counts_survive_restarts_and_midnight_ends_them(tmp_path, monkeypatch):
    Account(tmp_path).count("evaluations", 1)
    with pytest.raises(RefusedError):
        Account(tmp_path).count("evaluations", 1)

    class Tomorrow(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.datetime(2999, 1, 2, tzinfo=tz)

    monkeypatch.setattr(datetime, "datetime", Tomorrow)
    Account(tmp_path).count("evaluations", 1)


PRIVATE = (
    PLAN.replace(
        "[run]",
        'scale = "none"\nimpute = "zero"\n'
        "ranges = { age = [0, 120], pulse = [30, 200], score = [0, 10] }\n\n[run]",
    )
    + """
[aggregation]
type = "SecureAggregation"
privacy = { type = "DifferentialPrivacy", clip = 1.0, noise = 1.0, delta = 1e-5 }
"""
)


def test_a_budget_over_all_runs(tmp_path):
    """Two exchanges of noise 1 with everybody have epsilon 7.5 or so at 1e-5: one run is within 8,
    the next is not, whatever it calls itself.
    """
    demands = {"secure__required": "true", "secure__noise": "1.0"}
    budget = {"privacy__epsilon": "8.0", "privacy__delta": "1e-5"}
    grid = federation(tmp_path, PRIVATE, **demands, **budget)
    assert "left_out" not in train(grid, tmp_path)["FedAvg"].history
    (tmp_path / "results").rename(tmp_path / "before")
    with (
        pytest.warns(UserWarning, match="what this site spends over all runs"),
        pytest.raises(fd.TooFewClients),
    ):
        train(grid, tmp_path)
    assert "epsilon=8 at delta=1e-05" in log(grid, 1)[-1]["why"]


def test_a_budget_needs_noise(tmp_path):
    grid = federation(tmp_path, PLAN, privacy__epsilon="8.0", privacy__delta="1e-5")
    with (
        pytest.warns(UserWarning, match="sends no reply without differential privacy"),
        pytest.raises(fd.TooFewClients),
    ):
        train(grid, tmp_path)


def test_with_a_budget_the_score_of_a_model_has_noise(tmp_path):
    """The policy demands neither `required` nor `noise`: the run itself is private."""
    budget = {"privacy__epsilon": "1000.0", "privacy__delta": "1e-5", "secure__required": "false"}
    grid = federation(tmp_path, PRIVATE, **budget)
    train(grid, tmp_path)
    table = json.loads((tmp_path / "results" / "FedAvg.sites.json").read_text())
    for entry in table[:3]:
        assert "this site has a privacy budget: it sends no score without noise" in entry["error"]
        assert "[aggregation] with SecureAggregation and privacy" in entry["error"]
        assert "accuracy" not in entry
    assert table[3]["site"] == "all" and "accuracy" in table[3]  # with noise, and accounted for
    assert any("hits" in entry for entry in log(grid, 1))  # the site itself may know


def test_with_a_budget_scores_of_own_models_are_not_sent(tmp_path):
    question = {**HELLO, "algorithm": to_config(fd.Independent(fd.Linear())), "ids": [0]}
    question |= {"seen": [0], "preprocess": scaled()}
    budget = {"privacy__epsilon": "8.0", "privacy__delta": "1e-5"}
    said = federation(tmp_path / "budget", PLAN, **budget).ask(1, "evaluate.own", question)
    assert "only a site without [privacy] in its policy" in said["error"]
    assert "sums" not in said
    assert "sums" in federation(tmp_path / "none", PLAN).ask(1, "evaluate.own", question)


def test_spent_is_what_the_accountant_says(tmp_path):
    """Three rounds of one exchange and one of two, against the same by `epsilon` in one piece."""
    account = Account(tmp_path)
    for cohort in ("a", "b", "c", "d", "d"):
        account.spend(cohort, 0.5, 2.0, 100.0, 1e-5)
    exact = epsilon({(0.5, 2.0, 1): 3, (0.5, 2.0, 2): 1, (0.5, 2.0, 3): 1}, 1e-5, "rdp")
    below = epsilon({(0.5, 2.0, 1): 3, (0.5, 2.0, 2): 1}, 1e-5, "rdp")
    with pytest.raises(RefusedError, match=r"would make it"):
        account.spend("e", 0.5, 2.0, below + 1e-6, 1e-5)
    account.spend("e", 0.5, 2.0, exact, 1e-5)


def test_a_damaged_account_answers_nothing(tmp_path):
    Account(tmp_path).count("exchanges", 9)
    (tmp_path / "account.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(RefusedError, match="without it nothing is answered"):
        Account(tmp_path).count("exchanges", 9)


def test_files_of_a_site_are_its_own(tmp_path):
    newton = PLAN.replace('type = "FedAvg"', 'type = "FedNewton"').replace(
        'model = { type = "Linear" }\nlr = 0.3', 'features = { type = "Identity" }\nreg = 0.01'
    )
    grid = federation(tmp_path, newton)
    train(grid, tmp_path)
    cache = Policy.read(grid.policies[1]).cache
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    kept = [path for path in cache.rglob("*") if path.is_file()]
    assert any(path.name.startswith("prepared-") for path in kept)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in kept)


def test_a_log_that_was_changed_is_found(tmp_path):
    path = tmp_path / "log.jsonl"
    for n in range(3):
        auditlog.append(path, asked=f"question {n}")
    assert [e["asked"] for e in auditlog.read(path)] == [f"question {n}" for n in range(3)]
    lines = path.read_text().splitlines(keepends=True)
    for bad in ([lines[0], lines[2]], [lines[0].replace("0", "9", 1), *lines[1:]], lines[1:]):
        path.write_text("".join(bad))
        with pytest.raises(fd.CheckpointError, match="does not follow from the line before it"):
            list(auditlog.read(path))
