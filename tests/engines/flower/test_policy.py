"""What a site's policy may say, what stands in its log and its account, and what its guard lets
through; the attacks that they are for are in tests/security.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

import foedus as fd

pytest.importorskip("flwr")

from foedus.core.describe import to_config
from foedus.engines.flower import auditlog
from foedus.engines.flower.account import Account, RefusedError
from foedus.engines.flower.guard import Guard, models_in
from foedus.engines.flower.policy import Policy
from foedus.engines.flower.questions import EvaluateOwn, Hello, Phase, Step, TryModel
from foedus.engines.flower.site import Schema
from tests.engines.flower.test_site import table, written
from tests.security.sites import federation
from tests.security.test_policy import HELLO, PLAN

LEAST = """
[site]
name = "north"
client = 0
data = "rows/north.csv"
label = "outcome"

[server]
address = "server.example:9091"
certificates = "ca.pem"
key = "/keys/north"

[allow]
columns = ["age", "pulse"]
"""


@pytest.fixture
def read(tmp_path):
    def read(text: str = LEAST) -> Policy:
        (tmp_path / "policy.toml").write_text(text)
        return Policy.read(tmp_path / "policy.toml")

    return read


# -- the file --------------------------------------------------------------------------------------


def test_what_a_policy_need_not_say(read, tmp_path):
    policy = read()
    assert policy.columns == ("age", "pulse")
    assert policy.classes is policy.algorithms is policy.models is policy.budget is None
    assert (policy.limit("exchanges"), policy.limit("evaluations")) == (10_000, 20)
    assert policy.cache == tmp_path.resolve() / "cache" and policy.log.parent == policy.cache
    assert policy.own_algorithms() == {}
    assert policy.node_config() == {
        "name": "north", "client": 0, "label": "outcome", "secure": "offered",
        "data": str(tmp_path.resolve() / "rows" / "north.csv"), "cache": str(policy.cache),
        "folder": str(tmp_path.resolve()),
    }  # fmt: skip
    assert (policy.categories, policy.quantiles) == ((), False)
    assert policy.file("server", "key") == Path("/keys/north").resolve()


def test_what_a_policy_may_say(read, tmp_path):
    more = LEAST.replace("[server]", 'test = 0.5\nseed = 3\ncache = "kept"\n\n[server]') + (
        'classes = ["0", "1"]\nalgorithms = ["FedAvg"]\nmodels = ["Linear"]\n'
        '[signing]\nkey = "a.sign"\npeers = "p.toml"\n'
        "[secure]\nrequired = true\nclients = 4\nthreshold = 0.7\nnoise = 1\n"
        "[limits]\nexchanges_a_day = 0\nevaluations_a_day = 1\n"
        "[privacy]\nepsilon = 8\ndelta = 1e-5\n"
    )
    policy, here = read(more), tmp_path.resolve()
    assert (policy.classes, policy.algorithms, policy.models) == (
        ("0", "1"), ("FedAvg",), ("Linear",)
    )  # fmt: skip
    assert (policy.limit("exchanges"), policy.limit("evaluations")) == (0, 1)
    assert policy.budget == (8.0, 1e-5) and policy.cache == here / "kept"
    config = policy.node_config()
    assert config["secure"] == "required" and "secure_required" not in config
    assert (config["secure_clients"], config["secure_threshold"]) == (4, 0.7)
    assert config["secure_noise"] == 1 and (config["test"], config["seed"]) == (0.5, 3)
    assert config["signing_key"] == str(here / "a.sign")
    assert config["peers"] == str(here / "p.toml")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("[allow]", "[alow]", "alow: section 'alow' is unknown"),
        ("columns =", "colums =", r"allow\.colums: key 'colums' is unknown"),
        ('columns = ["age", "pulse"]', "", r"allow\.columns: is missing"),
        ('columns = ["age", "pulse"]', 'columns = "age"', r"allow\.columns: "),
        ("[server]", "[signing]", r"server: the section \[server\] is missing"),
        ("client = 0\n", "", r"site\.client: is missing"),
        ("client = 0", "client = -1", r"site\.client: client=-1 must be"),
        ("client = 0", "client = 4294967296", r"site\.client: client=4294967296 must be"),
        ("client = 0", "client = 0.5", r"site\.client: "),
        ("client = 0", "client = 0\ntest = 1.0", r"site\.test: test=1\.0 must be"),
        ("client = 0", "client = 0\ntest = -0.1", r"site\.test: test=-0\.1 must be"),
    ],
)
def test_a_policy_that_says_something_else(old, new, why, read):
    assert old in LEAST
    with pytest.raises(fd.ConfigError, match=rf"policy\.toml: {why}"):
        read(LEAST.replace(old, new))


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ("[secure]\nclients = 1", r"secure\.clients: clients=1 must be"),
        ("[secure]\nthreshold = 0.49", r"secure\.threshold: threshold=0\.49 must be"),
        ("[secure]\nthreshold = 1.01", r"secure\.threshold: threshold=1\.01 must be"),
        ("[secure]\nnoise = -1", r"secure\.noise: noise=-1 must be"),
        ("[secure]\nnoise = nan", r"secure\.noise: noise=nan must be"),
        ("[secure]\nrequired = 1", r"secure\.required: "),
        ("[limits]\nexchanges_a_day = -1", r"limits\.exchanges_a_day: exchanges_a_day=-1 must"),
        ("[limits]\nevaluations_a_day = -1", r"limits\.evaluations_a_day: eval.*=-1 must"),
        ("[limits]\nevaluations = 3", r"limits\.evaluations: key 'evaluations' is unknown"),
        ("[privacy]\nepsilon = 0\ndelta = 0.1", r"privacy\.epsilon: epsilon=0 must be"),
        ("[privacy]\nepsilon = nan\ndelta = 0.1", r"privacy\.epsilon: epsilon=nan must be"),
        ("[privacy]\nepsilon = 1\ndelta = 0", r"privacy\.delta: delta=0 must be"),
        ("[privacy]\nepsilon = 1\ndelta = 1.0", r"privacy\.delta: delta=1\.0 must be"),
        ("[privacy]\nepsilon = 1", r"privacy\.delta: is missing"),
        ("[privacy]", r"privacy\.epsilon: is missing"),
        ('[signing]\nkey = "a"', r"signing\.peers: is missing"),
        ('[code]\nfile = "a.py"\nname = "a"', r"code\.sha256: is missing"),
    ],
)
def test_a_section_that_says_something_else(section, why, read):
    with pytest.raises(fd.ConfigError, match=rf"policy\.toml: {why}"):
        read(f"{LEAST}\n{section}\n")


@pytest.mark.parametrize("name", ["site", "server", "allow"])
def test_a_section_that_is_needed(name, read):
    before, _, after = LEAST.partition(f"[{name}]")
    rest = after[after.index("\n\n") :] if "\n\n" in after else ""
    with pytest.raises(fd.ConfigError, match=rf"{name}: the section \[{name}\] is missing"):
        read(before + rest)
    with pytest.raises(fd.ConfigError, match=rf"{name}\.\w+: is missing"):  # an empty one
        read(f"{before}[{name}]\n{rest}")


def test_a_policy_that_is_not_there(tmp_path):
    with pytest.raises(fd.ConfigError, match=r"none\.toml: cannot be read: No such file"):
        Policy.read(tmp_path / "none.toml")


# -- algorithms of the site's own ------------------------------------------------------------------

CODE = """import torch
import foedus as fd

with torch.random.fork_rng():
    torch.manual_seed(0)
    algorithm = fd.FedAvg(torch.nn.Sequential(torch.nn.Linear(3, 2)), lr=0.3)
algorithms = {"a": algorithm, "b": fd.FedProx(fd.Linear())}
nothing, number, mixed = {}, 3, {"a": algorithm, "b": 3}
"""


@pytest.fixture
def own(read, tmp_path):
    def own(name: str, code: str = CODE, sha256: str | None = None) -> Policy:
        (tmp_path / "own.py").write_text(code)
        found = sha256 or hashlib.sha256(code.encode()).hexdigest()
        about = f'[code]\nfile = "own.py"\nname = "{name}"\nsha256 = "{found}"\n'
        return read(LEAST + about)

    return own


def test_code_of_the_site_itself(own):
    assert list(own("algorithm").own_algorithms()) == ["FedAvg"]
    assert list(own("algorithms").own_algorithms()) == ["a", "b"]
    upper = hashlib.sha256(CODE.encode()).hexdigest().upper()
    assert list(own("algorithms", sha256=upper).own_algorithms()) == ["a", "b"]


@pytest.mark.parametrize("name", ["nothing", "number", "mixed", "absent"])
def test_code_that_is_no_algorithm(name, own):
    why = rf"code\.name: '{name}' in own\.py is not an algorithm or a dictionary of algorithms"
    with pytest.raises(fd.ConfigError, match=why):
        own(name).own_algorithms()


def test_code_with_another_hash_is_not_run(own, tmp_path):
    mark = tmp_path / "mark"
    policy = own("algorithm")
    (tmp_path / "own.py").write_text(f"open({str(mark)!r}, 'w')\n{CODE}")
    with pytest.raises(fd.ConfigError, match=r"code\.sha256: the file own\.py has another hash"):
        policy.own_algorithms()
    assert not mark.exists()


def test_code_that_is_gone(own, tmp_path):
    policy = own("algorithm")
    (tmp_path / "own.py").unlink()
    with pytest.raises(fd.ConfigError, match=r"code\.file: No such file"):
        policy.own_algorithms()


def test_a_site_answers_with_its_own_code(tmp_path):
    """By the settings that it has there: another step size is another algorithm."""
    (tmp_path / "own.py").write_text(CODE)
    about = {
        "file": tmp_path / "own.py", "name": "algorithm",
        "sha256": hashlib.sha256(CODE.encode()).hexdigest(),
    }  # fmt: skip
    grid = federation(tmp_path, PLAN, **{f"code__{k}": f'"{v}"' for k, v in about.items()})
    algorithm = Policy.read(grid.policies[1]).own_algorithms()["FedAvg"].seeded(0)
    assert "error" not in grid.ask(1, "query.hello", {**HELLO, "algorithm": to_config(algorithm)})
    other = to_config(dataclasses.replace(algorithm, lr=0.2))
    said = grid.ask(1, "query.hello", {**HELLO, "algorithm": other})
    assert "is not known here" in said["error"]
    (tmp_path / "own.py").write_text(CODE + "\n")
    said = grid.ask(1, "query.hello", {**HELLO, "algorithm": to_config(algorithm)})["error"]
    assert said == (
        "the rows or files of this site cannot answer this (DataError); the site's log says why"
    )
    entry = list(auditlog.read(Policy.read(grid.policies[1]).log))[-1]
    assert "the file own.py has another hash" in entry["why"]


# -- the guard -------------------------------------------------------------------------------------

ABOUT = {"algorithm": {}, "seed": 0, "session": "s"}
ASKED = {"ids": [0], "seen": [0], "round": 1, "exchange": 0, "version": 65537, "lengths": [0]}
EVALUATION = EvaluateOwn(**ABOUT, ids=[0], seen=[0])
STEP = Step(**ABOUT, **ASKED, groups=[[0]], held=[], items=[])


@pytest.mark.parametrize(
    ("question", "kind"),
    [
        (Hello(**ABOUT), None),
        (TryModel(**ABOUT), "evaluations"),
        (EVALUATION, "evaluations"),
        (Phase(**ABOUT, **ASKED, phase="share"), None),
        (STEP, "exchanges"),
    ],
    ids=lambda q: q if isinstance(q, str) else type(q).__name__,
)
def test_what_is_counted_as_what(question, kind, read):
    """None of the one kind is allowed, and a single one of the other."""
    for limits, refused in (("1 0", "evaluations"), ("0 1", "exchanges")):
        exchanges, evaluations = limits.split()
        text = f"[limits]\nexchanges_a_day = {exchanges}\nevaluations_a_day = {evaluations}\n"
        guard = Guard(read(LEAST + text))
        if kind == refused:
            with pytest.raises(RefusedError, match=f"answers 0 {kind} a day"):
                guard.question(question)
        else:
            guard.question(question)
    (guard.policy.cache / "account.sqlite").unlink(missing_ok=True)


def test_a_day_has_as_many_as_the_limit(read):
    guard = Guard(read(LEAST + "[limits]\nexchanges_a_day = 2\n"))
    guard.question(STEP)
    guard.question(STEP)
    with pytest.raises(RefusedError, match="answers 2 exchanges a day, and has done so today"):
        guard.question(STEP)


def test_sites_that_predict_numbers(read):
    guard = Guard(read())
    guard.question(Hello(**ABOUT, schema=Schema(("pulse",), None)))
    with pytest.raises(RefusedError, match=r"schema\.classes"):
        guard.question(Hello(**ABOUT, schema=Schema(("pulse",), ("0", "1"))))


def test_models_are_found_wherever_they_are():
    @dataclasses.dataclass
    class Several:
        models: list
        oracle: object
        kind: type = fd.Linear

    several = Several([fd.Linear(), (fd.MLP((3,)), 4)], fd.FFGB().oracle)
    names = [type(m).__name__ for m in models_in(several)]
    assert names == ["Linear", "MLP", type(fd.FFGB().oracle).__name__]


def test_a_reply_without_a_budget_is_not_accounted_for(read):
    guard = Guard(read())
    guard.reply(STEP, None)
    assert not guard.account.path.exists()


@pytest.mark.parametrize("noise", [1.0, 4.0])
def test_a_reply_is_accounted_for_with_the_noise_and_the_chance_of_its_round(noise, read):
    guard = Guard(read(LEAST + "[privacy]\nepsilon = 8.0\ndelta = 1e-5\n"))
    spent = []
    guard.account = SimpleNamespace(spend=lambda *what: spent.append(what))
    settings = fd.SecureAggregation(privacy=fd.DifferentialPrivacy(1.0, noise, 1e-6))
    question = dataclasses.replace(STEP, cohort="c", probability=0.25)
    guard.reply(question, settings)
    assert spent == [("c", 0.25, noise, 8.0, 1e-5)]
    for none in (None, fd.SecureAggregation()):
        with pytest.raises(RefusedError, match="no reply without differential privacy"):
            guard.reply(question, none)


# -- the account -----------------------------------------------------------------------------------


def test_sums_of_the_same_question_are_of_the_same_clients(tmp_path):
    Account(tmp_path).sum_of(0, "q", [2, 0, 1])
    account = Account(tmp_path)  # after a restart
    account.sum_of(0, "q", [0, 1, 2])  # the same set, in another order
    for others in ([0, 1], [0, 1, 2, 3], [0, 12]):
        with pytest.raises(RefusedError, match="for a sum of other clients"):
            account.sum_of(0, "q", others)
    account.sum_of(1, "q", [0, 1])  # another client of this site has its own account
    account.sum_of(0, "other", [0, 1])
    account.sum_of(0, "q", [0, 1, 2])  # what was refused has changed nothing


def test_what_is_refused_is_not_spent(tmp_path):
    account = Account(tmp_path)
    with pytest.raises(RefusedError, match=r"epsilon=0\.1 at delta=1e-05"):
        account.spend("a", 1.0, 1.0, 0.1, 1e-5)
    account.spend("a", 1.0, 1.0, 6.0, 1e-5)  # one exchange of noise 1 has epsilon 4.9 or so
    with pytest.raises(RefusedError, match="would make it"):
        account.spend("b", 1.0, 1.0, 6.0, 1e-5)
    assert stat.S_IMODE(account.path.stat().st_mode) == 0o600


# -- the log ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("long", [10, 70_000, 300_000, 1_500_000])
def test_a_log_of_lines_of_any_length(long, tmp_path):
    path = tmp_path / "cache" / "log.jsonl"
    texts = ["short", "é" * long, "short", "ü\n" * long, "last"]
    for text in texts:
        auditlog.append(path, asked=text)
    assert [entry["asked"] for entry in auditlog.read(path)] == texts
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_an_empty_log_begins_anew(tmp_path):
    path = tmp_path / "log.jsonl"
    path.touch()
    auditlog.append(path, asked="a")
    assert [entry["asked"] for entry in auditlog.read(path)] == ["a"]
    assert json.loads(path.read_text())["before"] == "0" * 64


@pytest.mark.parametrize("kept", [1, 20, -2, -1])
@pytest.mark.parametrize("times", [1, 2])
def test_a_log_goes_on_after_a_line_that_was_cut_short(kept, times, tmp_path):
    """What a process leaves that is killed while it writes; -1: only the end of the line."""
    path, expected = tmp_path / "log.jsonl", []
    for number in range(times):
        auditlog.append(path, asked=f"whole {number}")
        before = path.read_bytes()
        auditlog.append(path, asked=f"cut {number}")
        line = path.read_bytes().removeprefix(before)
        path.write_bytes(before + line[:kept])
        expected += [f"whole {number}", f"cut {number}" if kept == -1 else line[:kept].decode()]
        shown = [entry.get("cut", entry.get("asked")) for entry in auditlog.read(path)]
        assert shown == expected
    auditlog.append(path, asked="last")
    assert [e.get("cut", e.get("asked")) for e in auditlog.read(path)] == [*expected, "last"]


def test_a_cut_line_that_was_changed_is_found(tmp_path):
    path = tmp_path / "log.jsonl"
    auditlog.append(path, asked="whole")
    path.write_bytes(path.read_bytes() + b'{"time": ')
    auditlog.append(path, asked="next")
    path.write_bytes(path.read_bytes().replace(b'{"time": \n', b'{"tide": \n'))
    with pytest.raises(fd.CheckpointError, match=r"log\.jsonl, line 3: does not follow"):
        list(auditlog.read(path))


def test_a_line_that_is_broken_is_not_taken_for_cut(tmp_path):
    """Somebody makes a line illegible, and the chain right again: the next line says nothing."""
    path = tmp_path / "log.jsonl"
    for asked in ("first", "second", "third"):
        auditlog.append(path, asked=asked)
    lines = path.read_bytes().splitlines()
    lines[1] = lines[1][:-3]
    entry = json.loads(lines[2]) | {"before": hashlib.sha256(lines[1]).hexdigest()}
    path.write_bytes(b"\n".join([*lines[:2], json.dumps(entry).encode(), b""]))
    with pytest.raises(fd.CheckpointError, match=r"log\.jsonl, line 2: does not follow"):
        list(auditlog.read(path))


@pytest.mark.parametrize("line", ["{", "[]", '"before"', "{}", "\xff"])
def test_lines_that_are_no_entries(line, tmp_path):
    path = tmp_path / "log.jsonl"
    auditlog.append(path, asked="a")
    with path.open("a", encoding="latin-1") as file:
        file.write(f"{line}\n")
    with pytest.raises(fd.CheckpointError, match=r"log\.jsonl, line 2: does not follow"):
        list(auditlog.read(path))


def test_missing_rows_are_reported_in_the_log_only(tmp_path):
    grid = federation(tmp_path, PLAN)
    path = written(tmp_path / "data", "north", table(0))
    path.unlink()
    said = grid.ask(1, "query.hello", HELLO)["error"]
    assert "the rows or files of this site cannot answer this (DataError)" in said
    entry = list(auditlog.read(Policy.read(grid.policies[1]).log))[-1]
    assert "north.csv" in entry["why"] and entry["answer"] == "refused"
