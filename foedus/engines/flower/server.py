"""The server: it greets the sites, checks them, runs the algorithms of a file, and saves the
models.

The file is TOML, in the form of `foedus.config.experiment` as far as the two have keys in common:

    [algorithm]                       # or several, run one after the other: [algorithms.FedNewton],
                                      # [algorithms.FedFW], ...
    type = "FedAvg"

    [data]                            # what the rows of every site must look like
    columns = ["age", "sex", "smokes"]
    classes = ["0", "1"]              # leave out to predict numbers
    categories = ["smokes"]           # columns that hold text: their texts are found among the
                                      # sites; or a table, which names them:
                                      # { smokes = ["no", "daily"] }
    scale = "standard"                # of numbers; or "minmax", "robust", "unit", "none"
    impute = "mean"                   # what replaces missing numbers; or "median", "zero"
    encode = "onehot"                 # of categories; or "ordinal"
    clip = 10.0                       # the largest scaled number, if any
    ranges = { age = [0, 120] }     # least and largest values, for differential privacy

    [run]
    rounds = 20
    seed = 0
    metrics = ["auc", "f1"]           # of the model on the test rows of all sites, as columns of
                                      # the history; also per_client, stop, keep_best, ...
    evaluate_every = 5                # rounds; a site answers `evaluations_a_day`

    [aggregation]                     # how replies are averaged, if not by adding them up
    type = "SecureAggregation"        # the server sees only averages and sums; further keys are
                                      # its settings

    [federation]
    clients = 4                       # sites to wait for, at most `patience` seconds
    min_clients = 3                   # go on while at least 3 answer
    timeout = 120                     # seconds that a site may take for an answer
    patience = 60

    [output]
    folder = "results"

    [server]
    listen = "0.0.0.0:9091"           # where sites reach it

    [code]                            # in the place of [algorithm]: what text cannot describe
    name = "module:name"              # an algorithm, or a dictionary of them
"""

from __future__ import annotations

import json
import time
import types
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from foedus.aggregation.dp.mechanism import DifferentialPrivacy
from foedus.aggregation.secure.protocol import SecureAggregation
from foedus.algorithms.preprocessing.fit import FitPreprocessing
from foedus.base.settings import check_value
from foedus.base.spec import RawSpec, Spec
from foedus.config.reader import Number, Reader
from foedus.core.algorithm import Algorithm
from foedus.core.arguments import asks, check_sites, differences, refuse_functions
from foedus.core.card import card_path
from foedus.core.describe import to_config
from foedus.core.metrics import metrics_of
from foedus.core.result import Run
from foedus.core.run import run
from foedus.data.preprocess import Preprocessor
from foedus.data.unprepared import Recipe
from foedus.engines.flower import answers, messages
from foedus.engines.flower.own import algorithms_in
from foedus.engines.flower.score import Score
from foedus.engines.flower.session import Line, SitesEngine, linked
from foedus.engines.prepare import cost, fit, recipe_of
from foedus.errors import ConfigError, FoedusError, ReplyError, TooFewClients, unknown
from foedus.storage import checkpoint as files
from foedus.version import __version__

if TYPE_CHECKING:
    from foedus.data.federation import Federation

_DATA = {
    "columns": tuple[str, ...],
    "classes": tuple[str, ...],
    "categories": tuple[str, ...] | dict,
    "scale": Literal["standard", "minmax", "robust", "unit", "none"],
    "impute": Literal["mean", "median", "zero"],
    "encode": Literal["onehot", "ordinal"],
    "clip": Number,
    "ranges": dict,
}
_RUN = {
    "rounds": int,
    "seed": int,
    "participation": Number | dict,
    "quantise": Literal["float16", "bfloat16", "int8"],
    "evaluate_every": int,
    "metrics": tuple[str, ...],
    "per_client": bool,
    "stop": dict,
    "keep_best": str | Literal[False],
    "stop_on_growth": bool,
}
_FEDERATION = {"clients": int, "min_clients": int, "timeout": Number, "patience": Number}


@dataclass(frozen=True)
class Plan:
    """The contents of a file."""

    algorithms: dict[str, Algorithm]
    fit: FitPreprocessing
    classes: tuple[str, ...] | None
    rounds: int
    options: dict[str, Any]
    clients: int
    min_clients: int
    timeout: float
    patience: float
    folder: Path
    listen: str

    @property
    def metrics(self) -> list[str] | None:
        """The names of metrics to request from sites; `None`: neither metrics nor loss."""
        get = self.options.get
        about = get("metrics", ()), get("per_client", False), get("stop"), get("keep_best")
        growth = get("stop_on_growth", False)
        if not any(asks(a, *about, growth) for a in self.algorithms.values()):
            return None
        classes = None if self.classes is None else len(self.classes)
        found = metrics_of(get("metrics", ()), classes)
        refuse_functions(found, classes)
        return [m.name for m in found]

    def spec(self, features: int) -> Spec:
        """The form of rows of this number of features."""
        classes = None if self.classes is None else len(self.classes)
        return Spec((features,), classes, classes or 1)


def read_plan(path: Path) -> Plan:
    """Read and check a file."""
    reader = Reader(path, "compare" if "algorithms" in Reader(path, "run").table else "run")
    known = ("algorithm", "algorithms", "data", "run", "aggregation", "federation", "output",
             "server", "code")  # fmt: skip
    for name in reader.table:
        if name not in known:
            reader.fail(name, unknown("section", name, known))
    data = reader.settings("data", reader.section("data"), _DATA, required=["columns"])
    options = reader.settings("run", reader.section("run"), _RUN, required=["rounds"])
    rounds = options.pop("rounds")
    reader.check_run(rounds, options)
    reader.stop(options)
    if "aggregation" in reader.table:
        options["aggregation"] = reader.aggregation()
    found = reader.settings("federation", reader.section("federation", needed=False), _FEDERATION)
    clients = found.get("clients", 2)
    least = found.get("min_clients", clients)
    if not 1 <= least <= clients:
        reader.fail("federation.min_clients", f"{least} must be from 1 to the {clients} clients")
    folder = reader.settings("output", reader.section("output", needed=False), {"folder": str}).get(
        "folder", "results"
    )
    listen = reader.settings("server", reader.section("server", needed=False), {"listen": str}).get(
        "listen", "127.0.0.1:9091"
    )
    if not listen.rpartition(":")[2].isdigit():
        reader.fail("server.listen", f"{listen!r} must be HOST:PORT, such as 0.0.0.0:9091")
    if "code" in reader.table:
        code = reader.settings("code", reader.section("code"), {"name": str}, ["name"])["name"]
        module, _, name = code.partition(":")
        algorithms = algorithms_in(module, name, f"code={code!r}")
    else:
        algorithms = {k or type(a).__name__: a for k, a in reader.algorithms().items()}
    fit = reader.attempt("data", partial(_fit_of, data, options.get("aggregation")))
    plan = Plan(
        algorithms, fit, data.get("classes"), rounds, options, clients, least,
        float(found.get("timeout", 300)), float(found.get("patience", 60)), Path(folder),
        listen,
    )  # fmt: skip
    reader.attempt("run", partial(_check_measures, plan))
    for name, algorithm in plan.algorithms.items():
        if algorithm.pooled:
            reader.fail(
                f"algorithms.{name}",
                f"{type(algorithm).__name__} needs all rows in one place; sites keep theirs",
            )
        if not fit.asked:  # otherwise the number of features is not known yet
            features = len(fit.columns) + sum(len(known) - 1 for _, known in fit.known)
            reader.attempt(f"algorithms.{name}", partial(algorithm.check, plan.spec(features)))
    return plan


def _check_measures(plan: Plan) -> None:
    """Raise, before any site is asked, for metrics that sites cannot measure."""
    if plan.metrics is None:
        return
    if not plan.options.get("evaluate_every", 1):
        raise ConfigError("evaluate_every=0: then nothing is measured; leave it or metrics out")
    config = plan.options.get("aggregation")
    noisy = isinstance(config, DifferentialPrivacy)
    if isinstance(config, SecureAggregation):
        noisy = config.privacy is not None
    hides = isinstance(config, SecureAggregation)
    check_sites(plan.options.get("per_client", False), hides, noisy)


def _fit_of(data: dict[str, Any], aggregation: Any) -> FitPreprocessing:
    """The preprocessing of [data]."""
    given = data.get("categories", ())
    known = given if isinstance(given, dict) else {}
    for key, hint, table in (
        ("categories", Sequence[str], known),
        ("ranges", tuple[float, float], {k: tuple(v) for k, v in data.get("ranges", {}).items()}),
    ):
        for name, value in table.items():
            check_value(f"{key}.{name}", value, hint)
    scale = data.get("scale", "standard")
    recipe = Recipe(
        None if scale == "none" else scale, data.get("impute", "mean"),
        data.get("encode", "onehot"), data.get("clip"),
    )  # fmt: skip
    columns = tuple(data["columns"])
    if strange := [name for name in given if name not in columns]:
        raise ConfigError(f"categories: {unknown('column', strange[0], columns)}")
    texts = tuple(c for c in columns if c in given)
    made = recipe_of(recipe, columns, texts, known, data.get("ranges", {}), aggregation)
    return replace(made, doubt=True)


@dataclass(eq=False)
class Sites:
    """The server's view of a federation of sites, in place of a `Federation`: the sites and their
    numbers of rows.
    """

    ids: np.ndarray
    sizes: np.ndarray
    spec: Spec
    checksums: np.ndarray
    scheme: str = "sites"
    settings: dict[str, Any] = field(default_factory=dict)
    preprocess: Preprocessor | None = None
    class_values: tuple[str, ...] | None = None
    names: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def offsets(self) -> np.ndarray:
        return np.concatenate(([0], np.cumsum(self.sizes)))

    rows = property(lambda self: self.sizes)

    @property
    def data(self) -> Any:
        """The attributes of `Data` that a run needs, without rows; checksums represent the rows of
        the sites."""
        nothing = np.zeros((0, *self.spec.shape), np.float32)
        return types.SimpleNamespace(
            name="sites",
            classes=self.spec.classes,
            x_train=self.checksums,
            y_train=self.sizes,
            x_test=nothing,
            y_test=nothing,
            preprocess=self.preprocess,
            class_values=self.class_values,
        )


def wait_for(grid: Any, clients: int, least: int, patience: float) -> list[int]:
    """The connected nodes, as soon as there are `clients`, or after `patience` seconds."""
    began = time.monotonic()
    with linked():
        while (
            len(nodes := sorted(grid.get_node_ids())) < clients
            and time.monotonic() - began < patience
        ):
            time.sleep(0.1)
    if not nodes:
        raise TooFewClients(
            f"no SuperNode has connected within {patience:g} s; start them first, with this "
            "server's address"
        )
    if len(nodes) < least:
        raise TooFewClients(
            f"{len(nodes)} SuperNodes have connected within {patience:g} s, at least {least} must"
        )
    return nodes


def _wrong(greeting: dict[str, Any], site: bool) -> str | None:
    """The reason why the greeting of an untrusted site is invalid, or None."""

    def whole(v: Any, least: int, most: int) -> bool:
        return type(v) is int and least <= v <= most

    clients, rows = greeting.get("clients"), greeting.get("rows")
    if (
        not isinstance(clients, list)
        or not clients
        or not all(whole(c, 0, 2**32 - 1) for c in clients)
    ):
        return "no numbers of clients"
    if (
        not isinstance(rows, list)
        or len(rows) != len(clients)
        or not all(whole(n, 1, 2**40) for n in rows)
    ):
        return "no numbers of rows"
    name = greeting.get("name")
    if not isinstance(name, str) or len(name) > 100 or not name.isprintable():
        return "no name, or one that is too long or cannot be printed"
    if not site:  # a shard of a simulation
        return None
    if len(clients) != 1 or not whole(greeting.get("checksum"), 0, 2**32 - 1):
        return "no checksum, or several clients"
    tested = greeting.get("test_rows")
    if not isinstance(tested, list) or len(tested) != 1 or not whole(tested[0], 0, 2**40):
        return "no number of test rows"
    if not isinstance(greeting.get("measures", True), bool | str):
        return "something else than whether it measures"
    return None


def greet(
    line: Line, nodes: list[int], question: dict[str, Any], site: bool = False
) -> dict[int, dict[str, Any]]:
    """Greet every node; nodes with errors are named and left out.

    Returns the greetings of the others, by node.
    """
    found = line.post("query.hello", dict.fromkeys(nodes, question))
    good: dict[int, dict[str, Any]] = {}
    whose: dict[int, str] = {}
    for node in nodes:
        try:
            greeting = answers.header_of(found[node])
            if wrong := _wrong(greeting, site):
                raise ReplyError(f"its greeting has {wrong}")
        except FoedusError as error:
            warnings.warn(f"node {node} does not take part: {error}", stacklevel=2)
            continue
        for client in greeting["clients"]:
            if client in whose:
                raise ConfigError(
                    f"two sites are client {client}: {whose[client]} and {greeting['name']!r} "
                    f"(node {node}); give each a number of its own"
                )
            whose[client] = f"{greeting['name']!r} (node {node})"
            line.nodes[client] = node
            line.names[client] = greeting["name"]
        good[node] = greeting
    return good


def _roster(
    folder: Path, line: Line, greetings: dict[int, dict[str, Any]], plan: Plan
) -> dict[str, Any]:
    """The participating sites with their rows and preprocessing: as before, if a run is resumed;
    absent sites may come back.
    """
    path = folder / "roster.json"
    own = {s["clients"][0]: s for s in greetings.values()}
    if not (path.exists() and any(folder.glob("*.checkpoint.safetensors*"))):
        made, about = _fitted(line, own, plan)
        ids = sorted(i for i in own if i in line.nodes)
        roster = {
            "ids": ids, "rows": [own[i]["rows"][0] for i in ids],
            "checksums": [own[i]["checksum"] for i in ids],
            "names": {str(i): own[i]["name"] for i in ids}, "preprocess": made.to_json(),
            "fit": about, "data": to_config(plan.fit),
        }  # fmt: skip
        files.replace(path, [json.dumps(roster).encode()])
        return roster
    try:
        roster = json.loads(path.read_text())
        before = roster["data"]
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{path} is damaged, or of another version: {error!r}; remove the folder to begin anew"
        ) from error
    if differ := differences(before, to_config(plan.fit), "data"):
        raise ConfigError(
            f"[data] has changed since {path}: {'; '.join(differ)}; remove the folder to begin anew"
        )
    for i, checksum in zip(roster["ids"], roster["checksums"], strict=True):
        if i in own and own[i]["checksum"] != checksum:
            raise ConfigError(
                f"the rows of client {line.name(i)} have changed since {path}; remove the folder "
                "to begin anew"
            )
        line.names.setdefault(i, roster["names"][str(i)])
        line.nodes.setdefault(i, -1)  # an id that no connected node has
    for i in sorted(set(own) - set(roster["ids"])):
        warnings.warn(
            f"client {line.name(i)} was not there when the training began, and does not take part",
            stacklevel=2,
        )
        del line.nodes[i]
    return roster


def _fitted(
    line: Line, own: dict[int, dict[str, Any]], plan: Plan
) -> tuple[Preprocessor, dict[str, Any]]:
    """The preprocessing, fitted among the sites, and its cost; implausible sites are named and left
    out.
    """
    ids, columns, plain = sorted(own), len(plan.fit.columns), plan.spec(1)
    spec = RawSpec((columns,), plain.classes, plain.outputs)
    rows = np.array([own[i]["rows"][0] for i in ids])
    sites = Sites(np.array(ids), rows, spec, np.zeros(len(ids)))
    seed, aggregation = plan.options.get("seed", 0), plan.options.get("aggregation")
    result = fit(plan.fit, cast("Federation", sites), SitesEngine(line), aggregation, seed)
    for i in result.state.refused.tolist():
        warnings.warn(
            f"client {line.name(i)} does not take part: its columns are implausible, a thousand "
            "times farther from the others than these are from each other",
            stacklevel=2,
        )
        del line.nodes[i]
    if len(line.nodes) < plan.min_clients:
        raise TooFewClients(
            f"{len(line.nodes)} sites can take part, at least {plan.min_clients} must; see the "
            "warnings above"
        )
    return plan.fit.preprocessor(result.state), cost(result, aggregation)


def train(grid: Any, plan: Plan, folder: Path) -> dict[str, Run]:
    """Greet the sites, run every algorithm of the plan, and write the results."""
    line = Line(grid, {}, timeout=plan.timeout, min_clients=plan.min_clients)
    nodes = wait_for(grid, plan.clients, plan.min_clients, plan.patience)
    schema = {
        "columns": list(plan.fit.columns),
        "classes": None if plan.classes is None else list(plan.classes),
        "texts": list(plan.fit.texts),
    }
    seed = plan.options.get("seed", 0)
    first = next(iter(plan.algorithms.values()))
    question = {
        "schema": schema,
        "algorithm": to_config(first),
        "seed": seed,
        "foedus": __version__,
        "session": "",
        "metrics": plan.metrics,
    }
    aggregation = plan.options.get("aggregation")
    question["secure"] = (
        to_config(aggregation) if isinstance(aggregation, SecureAggregation) else None
    )
    greetings = greet(line, nodes, question, site=True)
    if len(line.nodes) < plan.min_clients:
        raise TooFewClients(
            f"{len(line.nodes)} sites can take part, at least {plan.min_clients} must; see the "
            "warnings above"
        )
    secure = question["secure"] is not None
    line.tested = {} if plan.metrics is None else _measuring(line, greetings, secure)
    folder.mkdir(parents=True, exist_ok=True)
    line.common = {"schema": schema, "preprocess": None, "foedus": __version__}
    roster = _roster(folder, line, greetings, plan)
    line.common["preprocess"] = roster["preprocess"]
    made = Preprocessor.from_json(roster["preprocess"])
    spec = plan.spec(len(made.feature_names or ()))
    sites = Sites(
        np.array(roster["ids"]),
        np.array(roster["rows"]),
        spec,
        np.array(roster["checksums"]),
        settings={**roster["names"], "preprocess": roster["fit"]},
        preprocess=made,
        class_values=_written(plan.classes),
        names=tuple(roster["names"][str(i)] for i in roster["ids"]),
    )
    runs = {}
    for name, algorithm in plan.algorithms.items():
        label = name.replace("/", "-")
        result = run(
            algorithm, cast("Federation", sites), plan.rounds, engine=SitesEngine(line),
            checkpoint=folder / f"{label}.checkpoint.safetensors", resume="auto", progress=False,
            **plan.options,
        )  # fmt: skip
        file = folder / f"{label}.safetensors"
        result.save(file, card=False)
        result.history.to_csv(folder / f"{label}.csv", index=False)
        table = try_model(line, result, file, algorithm, seed)
        if sum("kept" in entry for entry in table) > 1 and question["secure"] is not None:
            tested = {s["clients"][0]: s["test_rows"][0] for s in greetings.values()}
            table.append(score_of_all(line, tested, spec, algorithm, file, plan.options))
        files.replace(folder / f"{label}.sites.json", [json.dumps(table, indent=1).encode()])
        files.replace(card_path(file), [result.card(file, scores=table).encode()])
        print(f"{name}: {_shown(table)}{_columns(result, plan.metrics)}", flush=True)
        runs[name] = result
    return runs


def _measuring(line: Line, greetings: dict[int, dict[str, Any]], secure: bool) -> dict[int, int]:
    """Numbers of test rows of the sites that send sums over them; the others are named, and take
    part in everything else.
    """
    found, refused = {}, []
    for client, answer in sorted((s["clients"][0], s) for s in greetings.values()):
        old = f"foedus {messages.shown(answer.get('foedus'))} there does not measure"
        why = answer.get("measures", old)
        if why is True and answer["test_rows"][0]:
            found[client] = answer["test_rows"][0]
            continue
        why = "it has no test rows" if why is True else messages.shown(why)
        refused.append(f"client {line.name(client)}: {why}")
    if len(found) < (least := 2 if secure else 1):
        raise ConfigError(
            f"run.metrics: {len(found)} sites give sums over test rows for them, at least {least} "
            f"must ({'; '.join(refused)}); the sites decide in their policies, or leave metrics, "
            "per_client, stop and keep_best out"
        )
    for text in refused:
        warnings.warn(f"{text}; the model is not measured there", stacklevel=3)
    return found


def _written(classes: Sequence[str] | None) -> tuple[Any, ...] | None:
    """Classes as sites write them: integers, if all of them are."""
    if classes is None:
        return None
    whole = all(c.removeprefix("-").isdecimal() and str(int(c)) == c for c in classes)
    return tuple(int(c) if whole else c for c in classes)


def try_model(
    line: Line, result: Run, path: Path, algorithm: Algorithm, seed: int
) -> list[dict[str, Any]]:
    """Send the final model to every site, and ask for its score on the site's test rows."""
    if algorithm.personal and algorithm.predictor(result.state) is None:
        return []
    question = {**line.common, "algorithm": to_config(algorithm), "seed": seed, "session": ""}
    found = line.post(
        "evaluate.model", dict.fromkeys(set(line.nodes.values()), question), path.read_bytes()
    )
    table, name = [], "accuracy" if result.spec.classes else "mse"
    for client, node in sorted(line.nodes.items()):
        entry: dict[str, Any] = {"client": client, "site": line.names[client]}
        try:
            rows, score = answers.read_score(found[node], result.spec.classes)
            entry |= {"test_rows": rows, name: score} if rows else {}
        except FoedusError as error:
            entry["error"] = str(error)
            if isinstance(error, answers.PlainRefusedError):
                entry["kept"] = True
        table.append(entry)
    return table


def score_of_all(
    line: Line, tested: dict[int, int], spec: Spec, algorithm: Algorithm, path: Path,
    options: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The score of a model on the test rows of all sites together, under secure aggregation.

    tested: numbers of test rows, by client.
    """
    here = {i: n for i, n in sorted(tested.items()) if n and i in line.nodes}
    entry: dict[str, Any] = {"site": "all", "test_rows": sum(here.values())}
    sites = Sites(np.array(list(here)), np.array(list(here.values())), spec, np.zeros(len(here)))
    score = Score.of(algorithm, path.read_bytes())
    nodes, line.nodes = line.nodes, {i: line.nodes[i] for i in here}
    try:
        found = run(
            score, cast("Federation", sites), 1, engine=SitesEngine(line), progress=False,
            seed=options.get("seed", 0), aggregation=options["aggregation"],
        )  # fmt: skip
    except FoedusError as error:
        return {**entry, "error": str(error)}
    finally:
        line.nodes = nodes
    return {**entry, "accuracy" if spec.classes else "mse": float(found.state.score)}


def _columns(result: Run, metrics: Sequence[str] | None) -> str:
    """The latest metrics on the test rows of all sites."""
    if metrics is None:
        return ""
    usual = ["loss", "accuracy" if result.spec.classes else "mse"]
    names = [*usual, *metrics, *(f"own_{name}" for name in (*usual, *metrics))]
    values = {name: result.records.last(name) for name in names}
    errors = {name: result.records.last(f"{name}_bin_error") for name in names}
    words = [
        f"{name} {value:.4f}" + (f" +- {errors[name]:.1g}" if errors[name] == errors[name] else "")
        for name, value in values.items()
        if value == value
    ]
    return f"; all test rows: {', '.join(words)}" if words else ""


def _shown(table: list[dict[str, Any]]) -> str:
    words = [
        f"{e['site']} {e.get('accuracy', e.get('mse')):.4f}"
        for e in table
        if "accuracy" in e or "mse" in e
    ]
    return ", ".join(words) or "no test rows"
