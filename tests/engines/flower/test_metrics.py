"""Metrics between sites: the numbers of scikit-learn on the test rows of all of them together, in
the clear and under secure aggregation; who may ask for them; and what sites may not say.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pandas as pd
import pytest
from flwr.app import Message
from sklearn import metrics as sk
from torch import Tensor

import foedus as fd
from foedus import wire
from foedus.base import tree
from foedus.core.metrics import CLASSIFICATION
from foedus.engines.flower import messages, server
from foedus.engines.flower.site import read_site
from tests.core.test_metrics import reference
from tests.engines.flower.grid import Here
from tests.engines.flower.test_site import SCHEMA
from tests.security.sites import federation, log

NAMES = ("auc", "f1", "log_loss", "brier", "ece", "balanced_accuracy", "recall_weighted")
ALLOWED = {"allow__metrics": json.dumps(NAMES)}
PLAN = f"""
[algorithm]
type = "FedAvg"
model = {{ type = "Linear" }}
lr = 0.3

[data]
columns = ["age", "pulse", "score"]
classes = ["ill", "well"]

[run]
rounds = 3
metrics = {json.dumps(NAMES)}

[federation]
clients = 3
min_clients = 2
timeout = 1
patience = 0.3
"""
SECURE = PLAN + '\n[aggregation]\ntype = "SecureAggregation"\n'
HIDDEN = {**ALLOWED, "secure__required": "true"}


def train(grid, folder, name=""):
    plan = server.read_plan(folder / "trial" / "federation.toml")
    return server.train(grid, plan, folder / "results")


def rows_of(grid, made, schema=SCHEMA):
    """The test rows of all sites as the models see them, with their labels."""
    sites = [read_site(dict(c.node_config), schema) for c in grid.contexts.values()]
    feds = [site.federation(made).data for site in sites]
    return [(data.x_test, data.y_test) for data in feds]


def predictions(run, rows, model=None):
    from foedus.core.predictions import Predictions

    x, y = (np.concatenate(part) for part in zip(*rows, strict=True))
    p = (run.model if model is None else model).prepared.predict_proba(x).astype(np.float64)
    return Predictions(y, p, classes=p.shape[1])


@pytest.mark.parametrize("secure", [False, True])
def test_the_metrics_of_all_test_rows(secure, tmp_path, capsys):
    grid = federation(tmp_path, SECURE if secure else PLAN, **(HIDDEN if secure else ALLOWED))
    run = train(grid, tmp_path)["FedAvg"]
    history = run.history
    assert history["round"].tolist() == [0, 1, 2, 3] and history[list(NAMES)].notna().all(axis=None)
    rows = rows_of(grid, run.preprocess)
    p, last = predictions(run, rows), history.iloc[-1]
    for name in NAMES:
        within = last["auc_bin_error"] if name == "auc" else 1e-6  # probabilities: single precision
        assert last[name] == pytest.approx(reference(name, p), abs=within)
    assert last["auc_bin_error"] < 0.02
    assert last["accuracy"] == (p.given.argmax(1) == p.y).mean()
    assert last["loss"] == pytest.approx(sk.log_loss(p.y, p.given), abs=1e-6)
    assert last["test_rows"] == len(p.y)
    assert "not_measured" not in history and not run.notes
    # every round has that of its own model: that of the start says nothing
    assert history["loss"][0] == pytest.approx(np.log(2), rel=1e-6)
    assert not [c for c in history if re.search("_(worst|mean|spread)", c)]
    shown = f"auc {last['auc']:.4f} +- {last['auc_bin_error']:.1g}, f1 {last['f1']:.4f}"
    assert f"all test rows: loss {last['loss']:.4f}" in (out := capsys.readouterr().out)
    assert shown in out
    saved = pd.read_csv(tmp_path / "results" / "FedAvg.csv")
    assert saved["auc"].tolist() == pytest.approx(history["auc"].tolist())


def test_hidden_sums_are_those_in_the_clear(tmp_path):
    """The same model (no round), once summed by the server and once in fixed point."""
    found = {}
    for name, plan, policy in (("clear", PLAN, ALLOWED), ("secure", SECURE, HIDDEN)):
        grid = federation(tmp_path / name, plan.replace("rounds = 3", "rounds = 0"), **policy)
        found[name] = train(grid, tmp_path / name)["FedAvg"].records.rows[0]
    columns = [*NAMES, "auc_bin_error", "loss", "accuracy", "test_rows"]
    assert [found["clear"][c] for c in columns] == pytest.approx(
        [found["secure"][c] for c in columns], rel=1e-14
    )


def test_masked_sums_alone_leave_the_sites(tmp_path):
    grid = federation(tmp_path, SECURE.replace("rounds = 3", "rounds = 1"), **HIDDEN)
    answers = []
    grid.spoil = lambda asked, answer: (answers.append((asked, answer)), answer)[1]
    train(grid, tmp_path)
    kinds = [asked.metadata.message_type for asked, _ in answers]
    assert kinds.count("train.measure") == 2 * 3 and "evaluate.own" not in kinds
    masked = [a for asked, a in answers if asked.metadata.message_type == "train.measure"]
    assert all(messages.header(a)["phase"] == "mask" for a in masked)
    for a in masked:  # random integers, in place of counts of which most are 0
        leaves = tree.leaves(wire.decode(messages.body(a)))
        numbers = max((t for t in leaves if isinstance(t, Tensor)), key=Tensor.numel)
        assert numbers.numel() == 2048 and (numbers == 0).float().mean() < 0.05


def patients(folder, plan, **policy):
    """Sites whose label is a number around 500, or two of them."""
    grid = federation(folder, plan, **policy)
    for n, context in grid.contexts.items():
        path = context.node_config["data"]
        frame = pd.read_csv(path)
        rng = np.random.default_rng(n)
        frame["outcome"] = 500 + 3 * frame.score + 0.5 * rng.standard_normal(len(frame))
        frame.to_csv(path, index=False)
    for path in grid.policies.values():
        text = [t for t in path.read_text().splitlines() if not t.startswith("classes = ")]
        path.write_text("\n".join(text) + "\n")
    return grid


@pytest.mark.parametrize("secure", [False, True])
def test_metrics_of_values(secure, tmp_path):
    """Labels of mean 510 and spread 3: sums of squares of 2.6e5, in which 9 is small."""
    plan = (SECURE if secure else PLAN).replace('classes = ["ill", "well"]', "")
    plan = plan.replace(json.dumps(NAMES), '["mae", "rmse", "r2"]').replace("lr = 0.3", "lr = 0.05")
    plan = plan.replace('SecureAggregation"', 'SecureAggregation"\nrange = 1024.0')
    policy = {"allow__metrics": '["mae", "rmse", "r2"]'}
    grid = patients(tmp_path, plan, **policy, **({"secure__required": "true"} if secure else {}))
    run = train(grid, tmp_path)["FedAvg"]
    rows = rows_of(grid, run.preprocess, fd.engines.flower.site.Schema(SCHEMA.columns, None))
    x, y = (np.concatenate(part) for part in zip(*rows, strict=True))
    f, last = run.model.prepared.predict(x).astype(np.float64), run.history.iloc[-1]
    assert last["mae"] == pytest.approx(sk.mean_absolute_error(y, f), rel=1e-6)
    assert last["rmse"] == pytest.approx(sk.root_mean_squared_error(y, f), rel=1e-6)
    assert last["mse"] == pytest.approx(sk.mean_squared_error(y, f), rel=1e-6)
    assert last["r2"] == pytest.approx(sk.r2_score(y, f), rel=1e-6)


def test_every_site_where_single_replies_are_seen(tmp_path):
    plan = PLAN.replace("rounds = 3", "rounds = 3\nper_client = true\nevaluate_every = 2")
    grid = federation(tmp_path, plan, **ALLOWED)
    run = train(grid, tmp_path)["FedAvg"]
    assert run.history["f1"].notna().tolist() == [True, False, True, True]
    last, rows = run.history.iloc[-1], rows_of(grid, run.preprocess)
    each = [predictions(run, [part]) for part in rows]
    for name in ("f1", "brier"):
        due = [reference(name, p) for p in each]
        assert run.per_client(round=3)[name].tolist() == pytest.approx(due, abs=1e-6)
        assert last[f"{name}_mean"] == pytest.approx(np.mean(due), abs=1e-6)
        worst = np.argmax(due) if name == "brier" else np.argmin(due)
        assert last[f"{name}_worst_client"] == worst
        assert last[f"{name}_spread"] == pytest.approx(np.std(due), abs=1e-6)
    assert run.per_client(round=2)["test_rows"].tolist() == [len(y) for _, y in rows]
    assert "auc_bin_error_mean" not in run.history
    # what goes home has no scores of single sites
    assert not fd.Run.load(tmp_path / "results" / "FedAvg.safetensors").kept


def test_a_run_stops_by_a_metric_and_keeps_the_best(tmp_path):
    plan = PLAN.replace("rounds = 3", 'rounds = 30\nstop = { rounds = 2, metric = "f1" }')
    grid = federation(tmp_path, plan, limits__evaluations_a_day="100", **ALLOWED)
    run = train(grid, tmp_path)["FedAvg"]
    f1 = run.history["f1"]
    best = int(f1.idxmax())
    assert run.history["round"].iloc[-1] == best + 2 < 30
    assert run.best.round == best and "f1 has not improved" in run.notes[-1]
    p = predictions(run, rows_of(grid, run.preprocess), run.best)
    assert f1[best] == pytest.approx(reference("f1", p), abs=1e-6)


def test_nothing_is_measured_unless_it_is_asked_for(tmp_path):
    plain = PLAN.replace(f"metrics = {json.dumps(NAMES)}", "")
    grid = federation(tmp_path, plain)
    assert "loss" not in train(grid, tmp_path)["FedAvg"].history
    assert not any(m.metadata.message_type == "train.measure" for m in grid.asked)


def test_loss_and_accuracy_need_no_permission(tmp_path):
    plan = PLAN.replace(json.dumps(NAMES), '["accuracy"]')
    history = train(federation(tmp_path, plan), tmp_path)["FedAvg"].history
    assert history[["loss", "accuracy"]].notna().all(axis=None) and "auc" not in history


def test_a_run_that_goes_on_has_the_same_numbers(tmp_path):
    whole = train(federation(tmp_path / "a", PLAN, **ALLOWED), tmp_path / "a")["FedAvg"]
    first = federation(tmp_path / "b", PLAN.replace("rounds = 3", "rounds = 1"), **ALLOWED)
    train(first, tmp_path / "b")
    path = tmp_path / "b" / "trial" / "federation.toml"
    path.write_text(PLAN)
    again = train(first, tmp_path / "b")["FedAvg"]
    columns = [c for c in whole.history if c != "seconds"]
    pd.testing.assert_frame_equal(again.history[columns], whole.history[columns], rtol=1e-6)


# -- clients' own models ---------------------------------------------------------------------------

OWN = PLAN.replace('type = "FedAvg"\n', 'type = "Independent"\n')


def test_own_models_are_measured_at_home(tmp_path):
    plan = OWN.replace("rounds = 3", "rounds = 3\nper_client = true")
    grid = federation(tmp_path, plan, **ALLOWED)
    run = train(grid, tmp_path)["Independent"]
    last, table = run.history.iloc[-1], run.per_client(round=3)
    assert {f"own_{n}" for n in NAMES} | {"own_auc_bin_error", "own_f1_worst"} <= set(run.history)
    assert not any(m.metadata.message_type == "train.measure" for m in grid.asked)
    weights = table["test_rows"] / table["test_rows"].sum()
    assert last["own_log_loss"] == pytest.approx(weights @ table["log_loss"], rel=1e-12)
    assert last["own_log_loss"] == pytest.approx(last["own_loss"], rel=1e-6)
    assert last["own_auc_worst"] == table["auc"].min() and table["auc"].nunique() == 3


def test_own_models_beside_a_global_one(tmp_path):
    plan = PLAN.replace('type = "FedAvg"', 'type = "Ditto"')
    run = train(federation(tmp_path, plan, **ALLOWED), tmp_path)["Ditto"]
    assert run.history[["own_f1", "own_auc_bin_error", "f1", "loss"]].notna().all(axis=None)


def test_own_models_are_not_measured_under_secure_aggregation(tmp_path):
    plan = SECURE.replace('type = "FedAvg"', 'type = "Independent"')
    grid = federation(tmp_path, plan, **HIDDEN)
    with pytest.raises(fd.ConfigError, match="Independent has no global model, and clients' own"):
        train(grid, tmp_path)


def test_own_models_on_loopback_are_those_of_the_simulator(tmp_path):
    fed = fd.split(fd.load("digits"), "dirichlet", clients=4, alpha=1.0, seed=0)
    options = {"metrics": ["auc", "f1", "ece", top_two], "per_client": True, "seed": 3}
    algorithm = fd.Independent(fd.Linear(), lr=0.1)
    here = fd.run(algorithm, fed, 2, engine=Here(tmp_path), **options)
    local = fd.run(algorithm, fed, 2, **options)
    a, b = here.history.iloc[-1], local.history.iloc[-1]
    for name in ("own_f1", "own_ece", "own_f1_mean", "own_ece_worst", "own_accuracy"):
        assert a[name] == pytest.approx(b[name], rel=1e-5)
    assert abs(a["own_auc"] - b["own_auc"]) <= a["own_auc_bin_error"] < 0.01
    assert any("top_two of clients' own models: not measured" in note for note in here.notes)


def top_two(y, p):
    return np.mean([label in best for label, best in zip(y, np.argsort(p)[:, -2:], strict=True)])


def test_common_rows_on_loopback_are_those_of_the_simulator(tmp_path):
    fed = fd.split(fd.load("digits"), "dirichlet", clients=4, alpha=1.0, seed=0)
    options = {"metrics": [*CLASSIFICATION, top_two], "per_client": True, "seed": 3}
    algorithm = fd.FedAvg(fd.Linear(), lr=0.1)
    here = fd.run(algorithm, fed, 2, engine=Here(tmp_path), **options)
    local = fd.run(algorithm, fed, 2, **options)
    columns = [c for c in local.history if c != "seconds"]
    pd.testing.assert_frame_equal(here.history[columns], local.history[columns], rtol=1e-5)


# -- what a site allows ----------------------------------------------------------------------------


def test_without_permission_nothing_begins(tmp_path):
    grid = federation(tmp_path, PLAN)
    with pytest.raises(
        fd.ConfigError,
        match=r"run.metrics: 0 sites .* at least 1 must \(client 0 "
        r"\(north\): allow.metrics in this site's policy does not have 'auc'",
    ):
        train(grid, tmp_path)
    assert {m.metadata.message_type for m in grid.asked} == {"query.hello"}


def test_a_site_that_does_not_allow_them_trains_all_the_same(tmp_path):
    grid = federation(tmp_path, PLAN, **ALLOWED)
    path = grid.policies[2]
    path.write_text(path.read_text().replace('"ece", ', ""))
    with pytest.warns(
        UserWarning,
        match=r"client 1 \(south\): allow.metrics in this site's policy "
        "does not have 'ece'; the model is not measured there",
    ):
        run = train(grid, tmp_path)["FedAvg"]
    rows = rows_of(grid, run.preprocess)
    p, last = predictions(run, [rows[0], rows[2]]), run.history.iloc[-1]
    assert last["f1"] == pytest.approx(reference("f1", p), abs=1e-6)
    assert last["test_rows"] == len(p.y) and last["clients"] == 3
    asked = [e["asked"] for e in log(grid, 2)]
    assert "train.train" in asked and "train.measure" not in asked


def test_sums_over_few_rows_are_not_sent(tmp_path):
    """60, 80 and 100 rows, of which 16, 20 and 26 are for testing: a quarter of each class."""
    grid = federation(tmp_path, PLAN, limits__test_rows="17", **ALLOWED)
    with pytest.warns(UserWarning, match=r"\(north\): this site has 16 test rows, and tells sums"):
        run = train(grid, tmp_path)["FedAvg"]
    assert (run.history["test_rows"] == 20 + 26).all()


def test_a_site_holds_its_policy_against_every_message(tmp_path):
    """A server that does not ask first, or asks for more than it said."""
    grid = federation(tmp_path, PLAN, **ALLOWED)

    def more(node, kind, header, body):
        if kind == "train.measure" and node == 1:
            header["algorithm"]["metrics"] = ["auc", "precision"]
            return header, body
        return None

    grid.change = more
    with pytest.warns(UserWarning, match="allow.metrics in this site's policy does not have 'prec"):
        run = train(grid, tmp_path)["FedAvg"]
    assert "0: allow.metrics" in run.history["not_measured"].iloc[-1]
    assert run.history["f1"].notna().all()


def test_sums_are_in_the_form_of_the_aggregation(tmp_path):
    """Real numbers that are not blinded would show by their digits whose they are."""
    grid = federation(tmp_path, SECURE.replace("rounds = 3", "rounds = 0"), **HIDDEN)

    def other(node, kind, header, body):
        if kind == "train.measure":
            header["algorithm"]["sums"] = False
            return header, body
        return None

    grid.change = other
    with pytest.warns(UserWarning, match="sums=False does not go with this aggregation"):
        run = train(grid, tmp_path)["FedAvg"]
    assert "f1" not in run.history


def test_the_log_says_what_was_sent(tmp_path):
    grid = federation(tmp_path, PLAN, **ALLOWED)
    train(grid, tmp_path)
    told = [e for e in log(grid, 1) if e["asked"] == "sums over the test rows here"]
    assert len(told) == 4 and told[0]["metrics"] == ", ".join(NAMES) and told[0]["test_rows"] == 16
    steps = [e for e in log(grid, 1) if e["asked"] == "train.measure"]
    assert [e["round"] for e in steps] == [0, 1, 2, 3]
    assert all(e["algorithm"] == "Measure" and e["answer"] == "given" for e in steps)


def test_measurements_are_evaluations(tmp_path):
    grid = federation(tmp_path, PLAN, limits__evaluations_a_day="2", **ALLOWED)
    with pytest.warns(UserWarning, match="this site answers 2 evaluations a day") as told:
        run = train(grid, tmp_path)["FedAvg"]
    assert any("round 2: the model is not measured" in str(w.message) for w in told)
    assert run.history["f1"].notna().tolist() == [True, True, False, False]
    assert any("some rounds are not measured (round 2" in note for note in run.notes)


def test_with_a_budget_nothing_is_sent_without_noise(tmp_path):
    budget = {"privacy__epsilon": "8.0", "privacy__delta": "1e-5"}
    grid = federation(tmp_path, PLAN, **budget, **ALLOWED)
    with pytest.raises(fd.ConfigError, match="this site has a privacy budget: it sends no score"):
        train(grid, tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("rounds = 3", "rounds = 3\nper_client = true\n"), "run: per_client=True: under secure"),
        (('"SecureAggregation"', '"DifferentialPrivacy"\nclip = 1.0\nnoise = 1.0\ndelta = 1e-5'),
         "do not go with differential privacy between sites: .*scored once over all sites"),
        (('"SecureAggregation"', '"SecureAggregation"\nprivacy = { type = "DifferentialPrivacy", '
          'clip = 1.0, noise = 1.0, delta = 1e-5 }'), "do not go with differential privacy"),
        (('"auc"', '"aux"'), r"metrics\[0\]='aux' is unknown.*did you mean 'auc'"),
        (('"auc"', '"r2"'), r"metrics\[0\]='r2' is for regression"),
        (("rounds = 3", "rounds = 3\nevaluate_every = 0"), "evaluate_every=0: then nothing"),
        (("rounds = 3", 'rounds = 3\nstop = { rounds = 0, metric = "auc" }'), "run.stop.*rounds=0"),
    ],
)  # fmt: skip
def test_plans_that_cannot_be(change, words, tmp_path):
    path = tmp_path / "federation.toml"
    ranges = "ranges = { age = [0, 120], pulse = [30, 200], score = [0, 10] }"
    private = f'scale = "none"\nimpute = "zero"\n{ranges}\n\n[run]'
    plan = SECURE.replace("[run]", private) if "noise" in change[1] else SECURE
    path.write_text(plan.replace(*change))
    with pytest.raises(fd.ConfigError, match=words):
        server.read_plan(path)


def test_functions_need_single_rows(tmp_path):
    grid = federation(tmp_path, PLAN, **ALLOWED)
    plan = server.read_plan(tmp_path / "trial" / "federation.toml")
    plan.options["metrics"] = ("auc", top_two)
    with pytest.raises(
        fd.ConfigError,
        match="'top_two' is a function, which needs single rows, "
        r"and sites send sums over theirs; use names \(auc, balanced",
    ):
        server.train(grid, plan, tmp_path / "results")


def test_policies_that_cannot_be(tmp_path):
    with pytest.raises(fd.ConfigError, match=r"allow.metrics: metric 'aux' is unknown"):
        federation(tmp_path, PLAN, allow__metrics='["aux"]')


# -- what a site may not say -----------------------------------------------------------------------


def lies(change):
    """Answers of the second site in which `change` has been made to the sums."""

    def spoil(asked: Message, answer: Message) -> Message | None:
        if asked.metadata.message_type != "train.measure" or asked.metadata.dst_node_id != 2:
            return answer
        sums = wire.decode(messages.body(answer))
        if (new := change(sums)) is None:
            return None
        body = wire.encode(new)
        header = {**messages.header(answer), "lengths": [len(body)]}
        return Message(messages.content(header, body), reply_to=asked)

    return spoil


LIES = {
    "silent": (lambda s: None, "no answer within 1 s"),
    "not finite": (lambda s: {**s, "loss": s["loss"] * np.nan}, "not finite"),
    "shape": (lambda s: {**s, "gaps": s["gaps"][:3]}, "gaps must have shape (15,)"),
    "negative": (lambda s: {**s, "scores": -s["scores"]}, "scores must be counts of rows"),
    "more rows": (lambda s: {k: 1000 * v for k, v in s.items()}, "of 20000 rows, and there are 20"),
    "hits": (lambda s: {**s, "hits": s["hits"] + 20}, "hits cannot be of 20 rows"),
    "a list": (lambda s: [1, 2], "must be tensors by name"),
    "texts": (lambda s: {**s, "loss": "0"}, "must be tensors by name"),
    "less": (lambda s: {"rows": s["rows"]}, "loss must have shape ()"),
    "more": (lambda s: {**s, "x": s["rows"]}, "'x' was not asked for"),
    "single precision": (lambda s: {**s, "loss": s["loss"].float()}, "in double precision"),
    "huge": (lambda s: {**s, "loss": s["loss"] * 0 + 1e300}, "loss must be finite"),
}


@pytest.mark.parametrize(("change", "why"), LIES.values(), ids=LIES)
def test_lies_are_left_out_and_named(change, why, tmp_path):
    grid = federation(tmp_path, PLAN.replace("rounds = 3", "rounds = 1"), **ALLOWED)
    grid.spoil = lies(change)
    with pytest.warns(UserWarning, match=re.escape("client 1 (south) is left out: ")):
        run = train(grid, tmp_path)["FedAvg"]
    rows = rows_of(grid, run.preprocess)
    p, last = predictions(run, [rows[0], rows[2]]), run.history.iloc[-1]
    assert last["not_measured"].startswith("1: ") and why in last["not_measured"]
    assert last["f1"] == pytest.approx(reference("f1", p), abs=1e-6)
    assert last["test_rows"] == 16 + 26 and last["clients"] == 3


def test_a_lie_in_a_hidden_sum_is_found_and_the_training_goes_on(tmp_path, monkeypatch):
    """A site that adds to its rows before it masks them."""
    from foedus.engines.flower import measure

    honest, count = measure.packed, []

    def packed(sums, added):
        count.append(1)
        more = {**sums, "hits": sums["hits"] + 100} if len(count) == 2 else sums
        return honest(more, added)

    monkeypatch.setattr(measure, "packed", packed)
    grid = federation(tmp_path, SECURE.replace("rounds = 3", "rounds = 1"), **HIDDEN)
    why = r"the sums over the test rows of all sites cannot be \(hits cannot be of 62 rows\)"
    with pytest.warns(UserWarning, match=f"round 0: the model is not measured: {why}"):
        run = train(grid, tmp_path)["FedAvg"]
    assert run.history["f1"].notna().tolist() == [False, True]


def test_a_site_that_goes_away_while_it_is_measured(tmp_path):
    grid = federation(tmp_path, SECURE, secure__threshold="0.6", secure__clients="2", **HIDDEN)
    path = tmp_path / "trial" / "federation.toml"
    path.write_text(SECURE.replace("rounds = 3", "rounds = 1") + "threshold = 0.6\n")
    grid.spoil = lambda asked, answer: (
        None
        if asked.metadata.message_type == "train.measure" and asked.metadata.dst_node_id == 2
        else answer
    )
    with pytest.warns(UserWarning, match=r"client 1 \(south\) is left out"):
        run = train(grid, tmp_path)["FedAvg"]
    assert (run.history["test_rows"] == 42).all() and run.history["f1"].notna().all()


def test_own_sums_that_cannot_be(tmp_path):
    grid = federation(tmp_path, OWN.replace("rounds = 3", "rounds = 1"), **ALLOWED)

    def spoil(asked, answer):
        if asked.metadata.message_type != "evaluate.own" or asked.metadata.dst_node_id != 2:
            return answer
        sums = wire.decode(messages.body(answer))
        body = wire.encode({**sums, "rows": sums["rows"] + 1})
        header = {**messages.header(answer), "lengths": [len(body)]}
        return Message(messages.content(header, body), reply_to=asked)

    grid.spoil = spoil
    with pytest.warns(
        UserWarning,
        match=r"clients \[1\] are not evaluated: its sums over test rows"
        ": they are of 21 rows, and there are 20",
    ):
        run = train(grid, tmp_path)["Independent"]
    assert run.history["own_f1"].notna().all()


def test_greetings_that_cannot_be():
    hello = {"clients": [0], "rows": [8], "name": "n", "checksum": 7, "test_rows": [2]}
    assert server._wrong({**hello, "measures": True}, True) is None
    assert "whether it measures" in server._wrong({**hello, "measures": [1]}, True)


def test_an_older_site_is_named(tmp_path):
    """One that does not know the question leaves it unanswered."""
    grid = federation(tmp_path, PLAN, **ALLOWED)

    def spoil(asked, answer):
        if asked.metadata.message_type != "query.hello" or asked.metadata.dst_node_id != 1:
            return answer
        header = {k: v for k, v in messages.header(answer).items() if k != "measures"}
        return Message(messages.content({**header, "foedus": "1.0"}), reply_to=asked)

    grid.spoil = spoil
    with pytest.warns(UserWarning, match=r"\(north\): foedus 1.0 there does not measure"):
        run = train(grid, tmp_path)["FedAvg"]
    assert (run.history["test_rows"] == 46).all()


# -- code of a site's own --------------------------------------------------------------------------

CODE = """
import torch
import foedus as fd

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
algorithm = fd.FedAvg(fd.Module(net), lr=0.3)
"""


def test_a_module_of_the_sites_own_code_is_measured(tmp_path, monkeypatch):
    import hashlib

    code = tmp_path / "mine_measured.py"
    code.write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = re.sub(r"\[algorithm\].*?\n\n", '[code]\nname = "mine_measured:algorithm"\n\n', PLAN,
                  flags=re.DOTALL)  # fmt: skip
    about = {"code__file": json.dumps(str(code)), "code__name": '"algorithm"'}
    about["code__sha256"] = json.dumps(hashlib.sha256(code.read_bytes()).hexdigest())
    grid = federation(tmp_path, plan, **about, **ALLOWED)
    run = train(grid, tmp_path)["FedAvg"]
    p = predictions(run, rows_of(grid, run.preprocess))
    assert run.history["brier"].iloc[-1] == pytest.approx(reference("brier", p), abs=1e-6)
