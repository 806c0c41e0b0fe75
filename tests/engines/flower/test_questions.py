"""A server that is not honest: headers and updates that no honest server sends, to a site in this
process.

Whatever arrives, the site gives a right answer, or a readable error that names the field. If it
refuses, nothing that it keeps has changed.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given, settings
from hypothesis import strategies as st

import foedus as fd
from foedus import wire
from foedus.engines.flower import client, messages, questions, server
from foedus.wire.arrays import LowRank, Signs, Sparse
from tests.engines.flower.grid import Here, HereGrid
from tests.engines.flower.test_site import PLAN, config, table, written

pytestmark = pytest.mark.filterwarnings("ignore:.*left out:UserWarning")


@dataclass
class Asked:
    """A message of an honest server, and what its node kept when it arrived."""

    kind: str
    header: dict[str, Any]
    body: bytes
    context: Context
    folder: Path
    files: dict[str, bytes]

    def answer(self, header: dict[str, Any], body: bytes | None = None) -> tuple[dict, bytes]:
        """What the site answers to another header or body, kept things put back before."""
        self.put_back()
        self.state = copy.deepcopy(self.context)
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
        content = messages.content(header, self.body if body is None else body)
        message = Message(content, dst_node_id=1, message_type=self.kind)
        return client.answer(message, messages.header(message), self.state)

    def put_back(self) -> None:
        if kept(self.folder) != self.files:
            for path in [p for p in self.folder.rglob("*") if p.is_file()]:
                path.unlink()
            for name, data in self.files.items():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / name).write_bytes(data)

    def unchanged(self) -> bool:
        """Whether the site keeps what it kept before the last question."""
        return kept(self.folder) == self.files and records(self.state) == records(self.context)


def kept(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def records(context: Context) -> dict[str, dict]:
    return {name: dict(record) for name, record in context.state.config_records.items()}


def recorded(grid: HereGrid, folder: Path, run) -> list[Asked]:
    """The messages of a run to its first node."""
    asked, honest = [], grid.app

    def app(message: Message, context: Context) -> Message:
        if context.node_id == 1:
            about = (message.metadata.message_type, messages.header(message))
            before = (copy.deepcopy(context), folder, kept(folder))
            asked.append(Asked(*about, messages.body(message), *before))
        return honest(message, context)

    grid.app = app
    run()
    return asked


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> dict[str, Asked]:
    """Questions of every kind."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4)).astype(np.float32)
    y = (x[:, 0] + x[:, 1] > 0).astype(np.int64)
    fed = fd.split(fd.Data.from_arrays(x[:44], y[:44], x[44:], y[44:], classes=2), "iid", clients=4)
    found: dict[str, Asked] = {}

    def simulated(algorithm, rounds=2, wrap=lambda engine: engine, **options) -> list[Asked]:
        folder = tmp_path_factory.mktemp("node")
        here = Here(folder, nodes=1)
        go = lambda: fd.run(algorithm, fed, rounds, engine=wrap(here), **options)  # noqa: E731
        return recorded(here.grid, folder / "0", go)

    average = fd.FedAvg(fd.Linear(), lr=0.1, batch_size=8)
    center = fd.FedFW(fd.Linear(), fd.L1Ball(2.0), measure_every=0)
    late = lambda engine: fd.Delayed(engine, up=[0, 1, 2, 0], down=[1, 0, 0, 0])  # noqa: E731
    secure = fd.SecureAggregation()
    noise = fd.DifferentialPrivacy(clip=1.0, noise=1.0, delta=1e-3, accountant="rdp")
    found["hello"], *_, found["quantised"] = simulated(average, quantise="int8")
    found["held"] = max(
        simulated(center, 6, participation=0.5), key=lambda q: len(q.header.get("groups", []))
    )
    assert len(found["held"].header["groups"]) > 1
    found["functions"] = simulated(fd.FFGB(fd.Forest(trees=2, depth=3)), 3)[-1]
    found["late"] = [
        q for q in simulated(fd.FedRes(step=0.05), 3, late) if q.kind.startswith("train.")
    ][-1]
    found["own models"] = simulated(fd.Independent(fd.Linear(), lr=0.1))[-1]
    measured = {"metrics": ["auc", "ece"]}
    found["own metrics"] = simulated(fd.Independent(fd.Linear(), lr=0.1), **measured)[-1]
    found["prepared"] = simulated(fd.FedNewton(fd.RandomFourier(5, bandwidth=4.0), reg=0.1))[-1]
    for q in simulated(average, 1, aggregation=secure)[1:]:
        found[f"secure, {q.header['phase']}"] = q
    private = fd.SecureAggregation(privacy=noise)
    found["private"] = next(
        q
        for q in simulated(average, 1, aggregation=private, evaluate_every=0)
        if q.header.get("phase") == "mask"
    )
    folder = tmp_path_factory.mktemp("site")
    path = folder / "federation.toml"
    text = PLAN.replace("clients = 3\nmin_clients = 2", "clients = 1")
    text = text.replace("rounds = 3", 'rounds = 3\nmetrics = ["auc", "brier"]')
    columns = 'columns = ["age", "pulse", "score", "smokes"]\ncategories = ["smokes"]'
    path.write_text(text.replace('columns = ["age", "pulse", "score"]', columns))
    (folder / "node").mkdir()
    rows = written(folder / "data", "north", table(0).assign(smokes=["no", "daily"] * 30))
    grid = HereGrid({1: config(rows, cache=str(folder / "node"))})
    train = lambda: server.train(grid, server.read_plan(path), folder / "results")  # noqa: E731
    found["site"], *steps, found["model"] = recorded(grid, folder / "node", train)
    found |= {f"fit, {q.kind.partition('.')[2]}": q for q in steps[:4]}
    del found["fit, moment"]
    found["fitted"] = next(q for q in steps if q.kind == "train.train")
    found["measured"] = next(q for q in steps if q.kind == "train.measure")
    return found


def made(**changes: list[float]) -> dict[str, Any]:
    """A preprocessing of the columns of the site, as a header has it."""
    about: dict[str, Any] = {"scaling": "standard", "encode": "onehot", "clip": None}
    about |= {"names": ["age", "pulse", "score", "smokes"], "categories": {"smokes": ["no"]}}
    for key in ("fill", "shift", "divisor"):
        values = changes.get(key, [1.0, 1.0, 1.0])
        about[key] = {"shape": [len(values)], "values": values}
    return about


KINDS = (
    "hello",
    "site",
    "fit, strings",
    "fit, survey",
    "fitted",
    "measured",
    "model",
    "quantised",
    "held",
    "functions",
    "late",
    "own models",
    "own metrics",
    "prepared",
    "secure, advertise",
    "secure, share",
    "secure, mask",
    "secure, unmask",
    "private",
)


def test_there_is_a_question_of_every_kind(asked):
    assert set(asked) == set(KINDS)
    kinds = {
        q.kind.partition(".")[0] if q.kind.startswith("train") else q.kind for q in asked.values()
    }
    assert kinds == {questions.Step.kind, *questions.KINDS}
    for q in asked.values():
        header, body = q.answer(q.header)
        assert sum(header.get("lengths", [])) == len(body) and not header.get("errors")


# -- headers ---------------------------------------------------------------------------------------

HUGE = (2**31, 2**32, 2**48, 2**63, 2**64, -(2**63), 10**30, 10**400, -(10**400))
NUMBERS = (0, 1, -1, 7, 0.5, -0.0, 1e-320, 1e308, -1e308, 1e400, -1e400, float("nan"))
ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(HUGE),
    st.sampled_from(NUMBERS),
    st.integers(-3, 1000),
    st.sampled_from(["", "x", "0", "../../etc/passwd", "mask", "FedAvg", "\x00", "é" * 3000]),
    st.text(max_size=5),
)
JUNK = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["type", "opaque", "columns", "", "a"]), inner, max_size=3),
    ),
    max_leaves=8,
)

COUPLED = {
    "ids": ("seen", "groups", "lengths", "client"),
    "round": ("version", "offer", "settings"),
    "exchange": ("version", "offer", "settings"),
    "session": ("offer", "settings"),
    "seed": ("algorithm",),
    "shard": ("ids", "rows"),
    "lengths": ("groups",),
    "schema": ("column", "label", "classes", "the rows of this site", "center", "preprocess"),
    "preprocess": ("the model is for", "what was sent"),
    "held": ("what was sent", "f, part"),
    "items": ("what was sent",),
    "phase": ("lengths", "header of"),
    "secure": ("cohort", "settings", "threshold", "clear"),
    "algorithm": ("step", "own", "model", "what was sent", "f, part", "metrics"),
    "up": ("longest",),
    "down": ("longest",),
    "probability": ("cohort",),
}
"""What else may be at odds with a field, and so be named in its place."""


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The paths to a value and to all values in it."""
    if not isinstance(value, dict | list):
        return [path]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [path] + [p for key, inner in items for p in places(inner, (*path, key))]


def _at(value: Any, path: tuple) -> Any:
    for key in path:
        value = value[key]
    return value


def _no_work(junk: Any) -> bool:
    atoms = [_at(junk, path) for path in places(junk)]
    return not any(isinstance(v, int | float) and not abs(v) <= 1000 for v in atoms)


@st.composite
def spoilt(draw, header: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A field, and a header in which it is not as it was."""
    field = draw(st.sampled_from(sorted(header)))
    path = draw(st.sampled_from(places(header[field], (field,))))
    new = copy.deepcopy(header)
    holder, at, old = _at(new, path[:-1]), path[-1], _at(new, path)
    ways = ["drop", "junk", "flag"] + ["twice", "short", "longer", "mixed"] * isinstance(old, list)
    way = draw(st.sampled_from(ways))
    if way == "drop":
        del holder[at]
    elif way == "junk":
        # how much work an algorithm may ask for is not bounded: an epoch more is no fault
        small = field == "algorithm" and len(path) > 1
        holder[at] = draw(JUNK.filter(_no_work) if small else JUNK)
    elif way == "flag":
        holder[at] = bool(old)
    elif way == "twice":
        holder[at] = old + old[:1]
    elif way == "short":
        holder[at] = old[:-1]
    elif way == "longer":
        holder[at] = [*old, draw(JUNK)]
    else:
        holder[at] = draw(st.permutations(old))
    return field, new


def check(q: Asked, field: str, header: dict[str, Any]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        said, body = q.answer(header)
    except fd.FoedusError as error:
        words = str(error)
        assert len(words) < 5000
        assert any(name in words for name in (field, *COUPLED.get(field, ()))), words
        # keys of a secure exchange are used up by whatever asks for them
        if not q.kind.startswith("query.secure"):
            assert q.unchanged()
    else:
        json.dumps(said)
        asked = header.get("ids", [])
        assert set(said.get("ids", [])) <= set(asked)
        assert sum(said.get("lengths", [])) == len(body)
        for name in ("round", "exchange", "phase"):
            assert said.get(name) == (header.get(name) if name in said else None)
    finally:
        q.put_back()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 1 << 18, f"{grown} KiB for {field}"


@pytest.mark.parametrize("kind", KINDS)
def test_headers_that_no_honest_server_sends(kind, asked):
    question = asked[kind]

    @settings(max_examples=120, deadline=None, derandomize=True, database=None)
    @given(spoilt(question.header))
    def attack(case) -> None:
        check(question, *case)

    attack()


FAULTS = {
    "no ids": ("held", {"ids": []}, "ids=[] must be a non-empty list"),
    "a client twice": ("held", {"ids": [0, 0], "seen": [0, 0]}, "ids names something twice"),
    "clients of others": ("quantised", {"ids": [0, 1, 2, 9]}, "groups of clients in the header"),
    "a flag for a client": (
        "quantised",
        {"ids": [0, True, 2, 3]},
        "ids[1]=True must be an integer",
    ),
    "too few versions": ("quantised", {"seen": [0]}, "seen has 1 elements for 4 clients in ids"),
    "another version": ("quantised", {"version": 7}, "version=7 must be 131073"),
    "many exchanges": ("quantised", {"exchange": 65535}, "exchange=65535 must be an integer"),
    "an unknown rounding": ("quantised", {"quantise": "int4"}, "quantise 'int4' is unknown"),
    "a long delay": ("late", {"longest": 10**9}, "longest=1000000000 must be an integer"),
    "too short a delay": ("late", {"longest": 0}, "longest=0 is less than up + down of a client"),
    "half of the delays": ("late", {"up": None}, "up, down and longest must be given together"),
    "a negative seed": ("hello", {"seed": -1}, "seed=-1 must be an integer"),
    "a long seed": ("hello", {"seed": 2**64}, "seed=18446744073709551616 must be an integer"),
    "an integer of many digits": ("hello", {"seed": 10**400}, "seed in the header has an integer"),
    "a path for a shard": ("hello", {"shard": "../x"}, "shard='../x' must be a text of at most 64"),
    "a shard that is not": ("hello", {"shard": "x" * 32}, "there is no shard 'xxx"),
    "no shard": ("hello", {"shard": None}, "the server sends no shard"),
    "a shard for a site": ("model", {"shard": "x"}, "shard='x': this site has a file of its own"),
    "no schema": ("site", {"schema": None}, "the server sends no schema"),
    "a column twice": (
        "site",
        {"schema": {"columns": ["age", "age"]}},
        "schema.columns has a name",
    ),
    "columns of no names": ("site", {"schema": {"columns": [1]}}, "schema.columns[0]=1 must be"),
    "no scale": ("model", {"preprocess": made(divisor=[1.0, 0.0, 1.0])}, "divisor must be above 0"),
    "a tiny scale": ("model", {"preprocess": made(divisor=[1.0, 1e-40, 1.0])}, "not finite"),
    "an endless scale": ("model", {"preprocess": made(divisor=[1.0, 1e400, 1.0])}, "not finite"),
    "no center": ("model", {"preprocess": made(shift=[float("nan")] * 3)}, "shift is not finite"),
    "two centers": ("model", {"preprocess": made(shift=[0.0] * 2)}, "shift of (2,) columns"),
    "other columns": (
        "model",
        {"preprocess": {**made(), "names": ["age", "smokes", "pulse", "score"]}},
        "preprocess: its columns are not those of the schema",
    ),
    "no preprocessing": ("fitted", {"preprocess": None}, "the server sends no preprocessing"),
    "texts of no column": (
        "site",
        {"schema": {"columns": ["age"], "texts": ["name"]}},
        "schema.texts: 'name' is none of the columns",
    ),
    "no settings": ("hello", {"algorithm": {"opaque": 3}}, "algorithm holds '3'"),
    "a type of no name": (
        "hello",
        {"algorithm": {"type": ["FedAvg"]}},
        "algorithm: type ['FedAvg']",
    ),
    "all rows at once": (
        "hello",
        {"algorithm": {"type": "Central"}},
        "needs all rows in one place",
    ),
    "a held value of no name": (
        "quantised",
        {"held": ["w"]},
        "held: 'w' is not a held value of FedAvg",
    ),
    "a held value twice": ("held", {"held": ["center"] * 2}, "held, with items, names something"),
    "no groups": ("held", {"groups": []}, "the groups of clients in the header"),
    "too few parts": ("quantised", {"lengths": []}, "lengths of its parts do not sum to"),
    "negative lengths": ("quantised", {"lengths": [-1]}, "lengths[0]=-1 must be an integer"),
    "no session": ("held", {"session": ""}, "session='' must be a text of 1 to 256 characters"),
    "deep settings": (
        "hello",
        {"secure": json.loads("[" * 50 + "]" * 50)},
        "secure in the header is",
    ),
    "another phase": ("secure, mask", {"phase": "share"}, "phase 'share' is unknown"),
    "a phase of a step": ("secure, share", {"phase": "mask"}, "phase 'mask' is unknown"),
    "keys of others": ("secure, advertise", {"ids": [4, 5, 6, 7]}, "ids: client 4 is not here"),
    "metrics of no name": ("own metrics", {"metrics": [3]}, "metrics[0]=3 must be a text"),
    "unknown metrics": ("own metrics", {"metrics": ["r2"]}, "'r2' cannot be made of sums over"),
    "metrics twice": ("own metrics", {"metrics": ["auc", "auc"]}, "metrics names something twice"),
    "metrics in a text": ("site", {"metrics": "auc"}, "metrics='auc' must be"),
    "models of nobody": (
        "own models",
        {"algorithm": {"type": "FedAvg"}},
        "no models of its clients'",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_errors_name_what_is_wrong(name, asked):
    kind, change, words = FAULTS[name]
    question = asked[kind]
    with pytest.raises(fd.FoedusError) as error:
        question.answer({**question.header, **change})
    assert words in str(error.value) and question.unchanged()


def test_an_error_does_not_repeat_a_long_value(asked):
    question = asked["quantised"]
    for name in ("session", "quantise", "ids", "algorithm", "foedus"):
        with pytest.raises(fd.FoedusError, match=name) as error:
            question.answer({**question.header, name: "x" * 1_000_000})
        assert len(str(error.value)) < 500


def test_what_a_site_does_not_know_is_ignored(asked):
    for question in asked.values():
        if not question.kind.startswith("query.secure"):
            assert question.answer({**question.header, "news": [1]})[0].keys() > set()
    assert messages.header(Message(messages.content({"a": 1}), dst_node_id=1, message_type="query"))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", "null", '{"a": ', '{"seed": 1' + "0" * 5000 + "}", "[" * 100_000, b"\xff"],
    ids=lambda text: repr(text[:12]),
)
def test_text_that_is_no_header(text, asked):
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    content = RecordDict({messages.HEADER: ConfigRecord({"json": text})})
    message = Message(content, dst_node_id=1, message_type="query.hello")
    with pytest.raises(fd.ReplyError, match="header"):
        messages.header(message)
    reply = client.SiteApp()(message, copy.deepcopy(asked["hello"].context))
    assert "header" in messages.header(reply)["error"]


def test_a_state_of_another_algorithm(asked):
    """Under one session, a server first has FedFW trained and then says that it was something
    else.
    """
    question = asked["held"]
    for other in (
        fd.FedFW(fd.MLP((3,)), fd.L1Ball(2.0)),
        fd.Scaffold(fd.Linear(), lr=0.1),
        fd.FFGB(fd.Forest(trees=2)),
        fd.FedRes(step=0.05),
    ):
        header = {**question.header, "algorithm": fd.core.describe.to_config(other)}
        with pytest.raises(fd.FoedusError):
            question.answer(header)
        assert question.unchanged()


def test_a_server_does_not_choose_the_noise(asked):
    question = asked["private"]
    secure = copy.deepcopy(question.header["secure"])
    secure["privacy"]["entropy"] = 4
    with pytest.raises(fd.FoedusError, match="secure: entropy is for tests"):
        question.answer({**question.header, "secure": secure})
    assert question.unchanged()


# -- bodies ----------------------------------------------------------------------------------------


def sent(question: Asked, change) -> tuple[dict, bytes]:
    """The answer to the question with another message for every group."""
    groups, parts = (
        question.header["groups"],
        messages.cut(question.body, question.header["lengths"]),
    )
    bodies = [wire.encode(change(wire.decode(part))) for part in parts[: len(groups)]]
    bodies += parts[len(groups) :]
    return question.answer(
        {**question.header, "lengths": [len(b) for b in bodies]}, b"".join(bodies)
    )


def entry(value: float = 1.0, shape: tuple[int, ...] = (2, 4)) -> Sparse:
    return Sparse(torch.tensor([0], dtype=torch.int32), torch.tensor([value]), shape)


def no_entries(*lead: int) -> Sparse:
    return Sparse(torch.zeros(*lead, 0).int(), torch.zeros(*lead, 0), (2,))


BIAS = no_entries()
UPDATES = {
    "a number": (3, "center must be arrays or a list of changes, not 3"),
    "text": ("x" * 10_000, "center must be arrays or a list of changes, not 'xxx"),
    "no changes": ([[]], "center, change 0: it must be [keep, add], not []"),
    "other arrays": ({"weight": torch.zeros(2, 4)}, "it must have the arrays ['weight', 'bias']"),
    "another shape": (
        {"weight": torch.zeros(4, 2), "bias": torch.zeros(2)},
        "center: weight must be torch.float32 of shape [2, 4], not torch.float32 of shape [4, 2]",
    ),
    "another dtype": (
        {"weight": torch.zeros(2, 4).double(), "bias": torch.zeros(2)},
        "not torch.float64 of shape [2, 4]",
    ),
    "not finite": (
        {"weight": torch.full((2, 4), torch.nan), "bias": torch.zeros(2)},
        "center is not finite",
    ),
    "the whole, sparse": ({"weight": entry(), "bias": torch.zeros(2)}, "weight must be a Tensor"),
    "no factor": (
        [["1", {"weight": entry(), "bias": BIAS}]],
        "change 0: keep='1' must be a finite",
    ),
    "a flag for a factor": ([[True, {"weight": entry(), "bias": BIAS}]], "keep=True must be a"),
    "an endless factor": (
        [[1e400, {"weight": entry(), "bias": BIAS}]],
        "keep=inf must be a finite",
    ),
    "finite numbers that add up to infinity": (
        [
            [
                1.0,
                {
                    "weight": Sparse(torch.zeros(2).int(), torch.full((2,), 3e38), (2, 4)),
                    "bias": BIAS,
                },
            ]
        ],
        "center is not finite",
    ),
    "a sparse one of another shape": (
        [[1.0, {"weight": entry(shape=(1 << 10, 1 << 10)), "bias": BIAS}]],
        "not torch.float32 of shape [1024, 1024]",
    ),
    "many sparse ones": (
        [[1.0, {"weight": entry(), "bias": no_entries(1 << 20)}]],
        "bias must be torch.float32 of shape [2], not torch.float32 of shape [1048576, 2]",
    ),
    "a low rank one of another shape": (
        [
            [
                1.0,
                {"weight": LowRank(torch.zeros(1 << 10, 0), torch.zeros(1 << 10, 0)), "bias": BIAS},
            ]
        ],
        "not torch.float32 of shape [1024, 1024]",
    ),
    "signs": (
        [[1.0, {"weight": Signs.pack(torch.ones(2, 4), 1.0), "bias": BIAS}]],
        "weight must be a Tensor or Sparse or LowRank, not a Signs",
    ),
    "many changes": ([[1.0, {"weight": entry(), "bias": BIAS}]] * 50, "center: the changes take"),
}


@pytest.mark.parametrize("name", UPDATES)
def test_updates_of_held_arrays(name, asked):
    update, words = UPDATES[name]
    with pytest.raises(fd.ReplyError) as error:
        sent(asked["held"], lambda message: {**message, "center": update})
    assert words in str(error.value) and len(str(error.value)) < 500
    assert asked["held"].unchanged()


def forest(question: Asked) -> Any:
    return wire.decode(messages.cut(question.body, question.header["lengths"])[0])["f"]


def test_updates_of_held_functions(asked):
    question = asked["functions"]
    keep, parts, weights = forest(question)
    (trees,) = parts
    spoilt = {
        "f must be [keep, parts, weights]": [keep, parts],
        "f: keep=nan must be a finite number": [float("nan"), parts, weights],
        "f: there must be a list of parts, and as many weights": [keep, parts * 2, weights],
        "the weights of part 0 must be finite": [keep, parts, [weights[0] * float("inf")]],
        "the weights of part 0": [keep, parts, [weights[0].float()]],
        "f, part 0: 8 trees were sent instead of 6": [keep, parts, [weights[0][:3]]],
        "f, part 0: it is a dict, not trees": [keep, [{"a": 1}], weights],
        "f, part 0: trees for 9 features": [
            keep,
            [dataclasses.replace(trees, features=9)],
            weights,
        ],
        "f, part 0: a tree holds numbers that are not finite": [
            keep,
            [dataclasses.replace(trees, value=trees.value * float("nan"))],
            weights,
        ],
    }
    for words, update in spoilt.items():
        with pytest.raises(fd.ReplyError) as error:
            sent(question, lambda message, update=update: {**message, "f": update})
        assert words in str(error.value)
        assert question.unchanged()
    with pytest.raises(fd.ReplyError, match=r"the held values \['g'\] are not those of FFGB"):
        question.answer({**question.header, "held": ["g"]}, renamed(question))


def renamed(question: Asked) -> bytes:
    part = messages.cut(question.body, question.header["lengths"])[0]
    message = wire.decode(part)
    return wire.encode({**{k: v for k, v in message.items() if k != "f"}, "g": message["f"]})


ARGUMENTS = {
    "no table": (lambda m: [1], "must hold arguments by name, not a list"),
    "nothing": (lambda m: {}, "what was sent does not fit its arguments: missing a required"),
    "one more": (lambda m: {**m, "x": 1}, "does not fit its arguments: got an unexpected keyword"),
    "the client itself": (
        lambda m: {**m, "client": 1},
        "does not fit its arguments: multiple values",
    ),
    "another type": (lambda m: {"w": 3}, "train cannot be done with what was sent (w): "),
    "another shape": (lambda m: {"w": {"weight": torch.zeros(3), "bias": torch.zeros(1)}}, "(w): "),
    "a huge tensor in a few bytes": (
        lambda m: {"w": {**m["w"], "weight": entry(shape=(1 << 20, 1 << 20))}},
        "stands for more than",
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_a_step(name, asked):
    change, words = ARGUMENTS[name]
    question = asked["quantised"]
    with pytest.raises(fd.ReplyError) as error:
        sent(question, change)
    assert words in str(error.value) and question.unchanged()


def test_a_body_that_is_no_message(asked):
    question = asked["quantised"]
    with pytest.raises(fd.ReplyError, match="is not a valid message: expected b'fd' at byte 0"):
        question.answer({**question.header, "lengths": [21]}, b"garbage" * 3)
    assert question.unchanged()


MODELS = {
    "no file": (lambda file: b"x", "damaged|cannot be read|no such"),
    "nothing": (lambda file: b"", "damaged|cannot be read"),
    "cut short": (lambda file: file[:-9], "damaged|cannot be read"),
}


@pytest.mark.parametrize("name", MODELS)
def test_final_models_that_cannot_be_used(name, asked):
    change, words = MODELS[name]
    question = asked["model"]
    with pytest.raises(fd.FoedusError, match=words):
        question.answer(question.header, change(question.body))
    assert question.unchanged()


def test_a_final_model_for_other_rows_is_not_kept(asked, tmp_path):
    question = asked["model"]
    (tmp_path / "m").write_bytes(question.body)
    run = fd.Run.load(tmp_path / "m")
    run.spec = fd.Spec((7,), 2, 2)
    run.save(tmp_path / "m")
    with pytest.raises(fd.ReplyError, match=r"the model is for Spec\(shape=\(7,\)"):
        question.answer(question.header, (tmp_path / "m").read_bytes())
    assert question.unchanged()
