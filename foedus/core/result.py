"""The result of a run: `Run`, with its history, its model, and its file."""

from __future__ import annotations

import importlib
import math
import os
import warnings
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from foedus.base import markup, random
from foedus.base.spec import Spec
from foedus.base.tree import State, Tree
from foedus.base.tree import leaves as tree_leaves
from foedus.core.algorithm import Algorithm, Client
from foedus.core.arguments import differences
from foedus.core.card import Card, card_path, is_card
from foedus.core.describe import flatten, from_config, subclasses, to_config
from foedus.core.facts import Facts, facts_of, with_scores
from foedus.core.history import History
from foedus.core.measures import PerClient
from foedus.core.modules import ImportFrom, described, imported, restored
from foedus.core.predictor import Predictor
from foedus.core.steer import Best
from foedus.data.federation import Federation
from foedus.data.preprocess import Preprocessor
from foedus.errors import CheckpointError, ConfigError, FoedusError
from foedus.storage import checkpoint as files
from foedus.storage.states import States

if TYPE_CHECKING:
    import pandas as pd

    from foedus.core.session import Engine

from foedus.core.evaluate import scored_rows

_METRICS = 6
"""Columns of the history that a notebook shows at once."""


@dataclass(eq=False)
class Run:
    """The result of `fd.run`: a history with one row per round, the model, the state, the settings.

    Args:
        algorithm: The algorithm, with its random draws fixed by the seed.
        spec: The form of the rows as clients were given them.
        state: The server's state after the last round.
        records: The rows of the history; `history` shows them as a DataFrame.
        settings: All arguments of the run as plain values: algorithm, federation, engine, seed, ...
        clients: The ids of the clients, and their states.
        fed: The federation; `None` for a run that was loaded from a file.
        engine: The engine; `None` for a run that was loaded from a file.
        notes: Events that the numbers do not show, such as a damaged checkpoint or an early stop.
        preprocess: The preprocessing of raw rows (`Data.preprocess`).
        class_values: The labels as they were written in the data (`Data.class_values`).
        facts: For a loaded run, what its file says about data and sites.
        kept: Scores of each client by round, of a run with `per_client=True`.
        best_of: The state whose model is `best`.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
        >>> run = fd.run(fd.FedAvg(), fed, rounds=3)
        >>> list(run.history.columns)[:3], len(run.history)
        (['round', 'seconds', 'bytes_up'], 4)
        >>> run.model.predict(fed.data.x_test).shape
        (451,)
    """

    algorithm: Algorithm
    spec: Spec
    state: State
    records: History
    settings: dict[str, Any]
    clients: Tree = None
    fed: Federation | None = None
    engine: Engine | None = None
    notes: list[str] = field(default_factory=list)
    preprocess: Preprocessor | None = None
    class_values: tuple[Any, ...] | None = None
    facts: Facts | None = None
    kept: PerClient | None = None
    best_of: Best | None = None

    @cached_property
    def history(self) -> pd.DataFrame:
        """The history as a DataFrame: row 0 after the start, then one row per round.

        See `foedus.core.history`.
        """
        return self.records.frame()

    @cached_property
    def model(self) -> Predictor:
        """The global model after the last round.

        Raises:
            FoedusError: The algorithm has no global model.
        """
        predictor = self.algorithm.predictor(self.state)
        if predictor is None:
            name = type(self.algorithm).__name__
            if self.algorithm.personal:
                raise FoedusError(
                    f"{name} has no global model; run.model_of(client) gives a client's own"
                )
            raise FoedusError(
                f"{name} makes no model (it defines no predictor); its result is run.state"
            )
        return self._named(predictor)

    @cached_property
    def best(self) -> Predictor:
        """The global model after the best round, `best.round`; see `keep_best` of `fd.run`.

        Raises:
            FoedusError: No best model was kept.
        """
        if self.best_of is None:
            raise FoedusError(
                "no best model was kept; use fd.run(..., keep_best='accuracy'), or another metric"
            )
        predictor = self.algorithm.predictor(self.best_of.state)
        assert predictor is not None  # otherwise no state is kept
        return replace(self._named(predictor), round=self.best_of.round)

    def _named(self, predictor: Predictor) -> Predictor:
        """A model that takes raw rows and returns labels as they were written in the data."""
        return replace(predictor, preprocess=self.preprocess, class_values=self.class_values)

    def model_of(self, client: int) -> Predictor:
        """The model that a client ends up with.

        It is the client's own if the algorithm is personal, else the global one.

        Args:
            client: The id of the client.

        Raises:
            FoedusError: There is no such client, or it has never taken part.

        Example:
            >>> fed = fd.split(fd.load("digits"), "labels", clients=5)
            >>> run = fd.run(fd.FineTuned(fd.Linear()), fed, rounds=2)
            >>> run.model_of(3).predict(fed.data.x_test).shape
            (451,)
        """
        if not self.algorithm.personal:
            return self.model
        ids = self.clients["ids"].tolist()
        if client not in ids:
            raise FoedusError(
                f"there is no client {client!r}; clients are {', '.join(map(str, ids[:20]))}"
            )
        state = self.client_states().get(ids.index(client))
        if state is None:
            raise FoedusError(
                f"client {client} has not taken part in any round, so it has no model of its own"
            )
        return self.own_model(client, state)

    def own_model(self, client: int, state: Tree) -> Predictor:
        """The own model of a client with a given state, if the algorithm is personal.

        Args:
            client: The id of the client.
            state: The state of the client.
        """
        key = torch.zeros(2, dtype=torch.int64)
        member = Client(torch.tensor(client), None, None, state, key, key, self.spec)  # type: ignore[arg-type]  # no rows here
        return self._named(Predictor(self.algorithm.form(member), self.spec))

    def client_states(self) -> States:
        """The states of the clients, in order of their ids.

        Raises:
            FoedusError: The states stayed at the sites.
        """
        saved = self.clients["states"]
        if "slot" not in saved:
            raise FoedusError(
                "what clients remember, and so the models of their own, stayed at their sites; "
                "run.per_client() asks the sites for scores, and a run with engine=fd.Local() has "
                "the models here"
            )
        states = States(len(self.clients["ids"]))
        states.load(saved)
        return states

    def per_client(self, round: int | None = None) -> pd.DataFrame:
        """The scores of each client on its own test rows: loss, accuracy (or mse) and metrics.

        Args:
            round: Of the model after this round, for a run with `per_client=True` that was
                evaluated in it; `None`: of the model that the client ends up with.

        Returns:
            A DataFrame with one row per client.

        Raises:
            FoedusError: These scores were not kept, and the federation is not part of a loaded run.

        Example:
            >>> fed = fd.split(fd.load("digits"), "iid", clients=5)
            >>> list(fd.run(fd.FedAvg(), fed, rounds=1).per_client().columns)
            ['client', 'test_rows', 'loss', 'accuracy']
        """
        kept = {} if self.kept is None else self.kept.rounds
        if round is None and self.records.rows and self.records.rows[-1]["round"] in kept:
            round = self.records.rows[-1]["round"]
        if round is None:
            return self._with_names(self._measure_clients())
        if round not in kept:
            known = ", ".join(map(str, [*kept][-20:])) or "none: use fd.run(..., per_client=True)"
            raise FoedusError(f"the scores of clients in round={round!r} were not kept ({known})")
        assert self.kept is not None
        return self._with_names(self.kept.table(round))

    def _with_names(self, frame: pd.DataFrame) -> pd.DataFrame:
        fed = self.fed
        if fed is not None and fed.names is not None:
            names = dict(zip(fed.ids.tolist(), fed.names, strict=True))
            frame.insert(1, "name", [names[i] for i in frame["client"]])
        return frame

    def _measure_clients(self) -> pd.DataFrame:
        import pandas as pd

        if self.fed is None:
            raise FoedusError("per_client needs the federation, which is not part of a saved run")
        fed, data = self.fed, self.fed.data
        if self.algorithm.personal:
            assert self.engine is not None
            session = self.engine.open(self.algorithm, fed, random.key(self.settings["seed"]))
            session.load(self.clients["states"])
            sums = session.evaluate_own()
            session.close()
        else:
            owner = np.repeat(np.arange(len(fed)), np.diff(fed.test_offsets))
            rows = scored_rows(self.algorithm, self.model.prepared, data)
            if data.weights_test is not None:
                weight = torch.from_numpy(data.weights_test)
                rows = {**{k: v * weight for k, v in rows.items()}, "weight": weight}
            sums = {
                k: torch.from_numpy(np.bincount(owner, v.numpy()[fed.test_rows], len(fed)))
                for k, v in rows.items()
            }
            order = torch.from_numpy(np.argsort(fed.ids, kind="stable"))
            sums = {
                k: v[order]
                for k, v in (sums | {"rows": torch.from_numpy(np.diff(fed.test_offsets))}).items()
            }
        count = sums.get("weight", sums["rows"]).double()
        table = {
            "client": self.clients["ids"],
            "test_rows": sums["rows"],
            "loss": sums["loss"] / count,
        }
        table |= (
            {"accuracy": sums["hits"] / count} if data.classes else {"mse": sums["error"] / count}
        )
        return pd.DataFrame({k: v.numpy() for k, v in table.items()})

    def card(
        self,
        path: str | os.PathLike = "run.safetensors",
        scores: Iterable[Mapping[str, Any]] = (),
    ) -> str:
        """The model card in Markdown: data, columns, settings, quality by site, cost, privacy.

        Args:
            path: The file of the run, for which the card gives instructions.
            scores: Scores by site from elsewhere: `client` and some of `test_rows`, `loss`,
                `accuracy` and `mse`.

        Example:
            >>> fed = fd.split(fd.load("digits"), "iid", clients=5)
            >>> "FedAvg" in fd.run(fd.FedAvg(), fed, rounds=1).card()
            True
        """
        facts = with_scores(self._facts(measure=not scores), scores)
        return Card(self, facts, Path(path).name).text()

    def _facts(self, measure: bool) -> Facts:
        """What is known about data and sites."""
        if self.fed is None:
            return Facts() if self.facts is None else self.facts
        if not measure:
            return facts_of(self, measure)
        return self._measured

    @cached_property
    def _measured(self) -> Facts:
        return facts_of(self, measure=True)

    def save(self, path: str | os.PathLike, card: bool = True) -> None:
        """Write the run to one file, and its model card beside it.

        The file (safetensors, with JSON inside) holds the state, the history, the settings and, if
        the algorithm is personal, the clients' models; of a user's torch modules the tensors and
        the names of their classes.

        Args:
            path: The file to write.
            card: Whether to measure the model at each site and to write the model card (`card`)
                beside the file, with the ending .md. A file of that name that is not a model card
                is kept.

        Example:
            >>> import pathlib, tempfile
            >>> path = pathlib.Path(tempfile.mkdtemp(), "run.safetensors")
            >>> fed = fd.split(fd.load("digits"), "iid", clients=5)
            >>> fd.run(fd.FedAvg(), fed, rounds=1).save(path)
            >>> sorted(file.name for file in path.parent.iterdir())
            ['run.md', 'run.safetensors']
        """
        facts = self._facts(measure=card)
        if self.fed is not None and not isinstance(self.fed, Federation):
            # the file goes to every site, which must not learn the other sites' numbers of rows
            facts = replace(facts, sites=())
        meta = {
            "kind": "run",
            "settings": self.settings,
            "history": self.records.to_json(),
            "notes": self.notes,
            "spec": {
                "shape": list(self.spec.shape),
                "classes": self.spec.classes,
                "outputs": self.spec.outputs,
                "integers": self.spec.integers,
                "weighted": self.spec.weighted,
                "steps": self.spec.steps,
            },
            "preprocess": None if self.preprocess is None else self.preprocess.to_json(),
            "class_values": None if self.class_values is None else list(self.class_values),
            "facts": facts.to_json(),
        }
        trees: dict[str, Tree] = {"state": self.state}
        trees["clients"] = self.clients if self.algorithm.personal else None
        if self.best_of is not None:
            best = self.best_of
            trees["best"] = best.state
            meta["best"] = {"round": best.round, "metric": best.metric, "value": best.value}
        # the file of a federation of sites goes to every site: without the scores of others
        if self.kept is not None and (self.fed is None or isinstance(self.fed, Federation)):
            trees["per_client"] = self.kept.to_tree()
        notes, tensors = described(self.algorithm)
        if notes:
            meta["modules"], trees["modules"] = notes, tensors
        files.sweep(Path(path))
        files.write(path, trees, meta)
        if card:
            self._write_card(Path(path))

    def _write_card(self, path: Path) -> None:
        place = card_path(path)
        if place.exists() and not is_card(place):
            warnings.warn(
                f"{place} is not a model card, so it is kept; run.card() gives the card",
                stacklevel=3,
            )
            return
        files.sweep(place)
        files.replace(place, [self.card(path).encode(errors="backslashreplace")])

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        algorithm: Algorithm | None = None,
        import_from: ImportFrom = (),
    ) -> Run:
        """Read a saved run.

        Args:
            path: The file.
            algorithm: The algorithm, if it has a setting that text cannot describe.
            import_from: Python modules, or their names, in which to look for the classes of the
                user's `torch.nn.Module`s; they are constructed without arguments. Code is imported
                from nowhere else.

        Returns:
            The run, without its federation and engine.

        Raises:
            CheckpointError: The file is missing or damaged, is a checkpoint, or needs `algorithm`.

        Example:
            >>> import pathlib, tempfile
            >>> path = pathlib.Path(tempfile.mkdtemp(), "run.safetensors")
            >>> fed = fd.split(fd.load("digits"), "iid", clients=5)
            >>> fd.run(fd.FedAvg(), fed, rounds=1).save(path, card=False)
            >>> fd.Run.load(path).model.predict(fed.data.x_test).shape
            (451,)
        """
        homes = imported(import_from)
        trees, meta = files.read(path)
        try:
            return cls._of(path, trees, meta, algorithm, homes)
        except FoedusError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"{path} is damaged: {error!r}") from error

    @classmethod
    def _of(
        cls,
        path: str | os.PathLike,
        trees: dict[str, Tree],
        meta: dict[str, Any],
        algorithm: Algorithm | None,
        homes: list[ModuleType],
    ) -> Run:
        if meta.get("kind") != "run":
            raise CheckpointError(
                f"{path} is a checkpoint, not a saved run: continue it with fd.run(..., "
                "resume=True)"
            )
        if algorithm is None:
            notes, tensors = meta.get("modules", []), trees.get("modules", [])
            try:
                modules = restored(notes, tensors, homes) if homes else {}
                algorithm = known_algorithm(meta["settings"]["algorithm"], modules)
            except ConfigError as error:
                classes = ", ".join(n["class"].partition(":")[2] for n in notes)
                also = f", or where {classes} is: import_from=[...]" if notes and not homes else ""
                raise CheckpointError(
                    f"{path}: {error}; pass the algorithm: fd.Run.load(path, algorithm=...){also}"
                ) from error
        elif type(algorithm) is not Algorithm and (
            differ := differences(meta["settings"]["algorithm"], to_config(algorithm), "algorithm")
        ):
            raise CheckpointError(
                f"{path} was made by another algorithm than the one passed: {'; '.join(differ)}"
            )
        algorithm = algorithm.seeded(meta["settings"]["seed"])
        for row in meta["history"]:
            if not all(isinstance(v, int | float | str | None) for v in row.values()):
                raise TypeError("a history of other things than numbers and texts")
        form = meta["spec"]
        spec = Spec(
            tuple(form["shape"]), form["classes"], form["outputs"],
            bool(form.get("integers")), bool(form.get("weighted")), form.get("steps"),
        )  # fmt: skip
        notes, about = list(meta.get("notes", [])), meta.get("preprocess")
        values = meta.get("class_values")
        if values is not None and (
            not isinstance(values, list)
            or len(values) != spec.classes
            or not all(isinstance(v, str | int | float) for v in values)
        ):
            raise TypeError(f"class_values of {spec.classes} classes")
        return cls(
            algorithm,
            spec,
            trees["state"],
            History(meta["history"]),
            meta["settings"],
            trees["clients"],
            notes=notes,
            preprocess=None if about is None else Preprocessor.from_json(about),
            class_values=None if values is None else tuple(values),
            facts=Facts.from_json(meta.get("facts", {})),
            kept=PerClient.from_tree(trees["per_client"]) if "per_client" in trees else None,
            best_of=Best(trees["best"], **meta["best"]) if "best" in meta else None,
        )

    def report(self, path: str | os.PathLike, title: str | None = None) -> Path:
        """Write one self-contained HTML page: curves, clients, every round, every setting.

        Needs matplotlib.

        Args:
            path: The file.
            title: Of the page; by default the algorithm and the data.

        Returns:
            The path of the file.

        Example:
            >>> import pathlib, tempfile
            >>> fed = fd.split(fd.load("digits"), "iid", clients=5)
            >>> page = fd.run(fd.FedAvg(), fed, rounds=1).report(tempfile.mkdtemp() + "/page.html")
            >>> "Run it again" in page.read_text()
            True
        """
        from foedus.report.compare import Comparison

        fed = self.fed if isinstance(self.fed, Federation) else None
        return Comparison({type(self.algorithm).__name__: [self]}, fed).report(path, title)

    def __repr__(self) -> str:
        shown = [
            c
            for c in ("loss", "accuracy", "mse", "own_accuracy", "own_mse")
            if c in self.records.columns
        ]
        values = ", ".join(f"{c} {self.records.last(c):.4f}" for c in shown)
        megabytes = (self.records.last("bytes_up") + self.records.last("bytes_down")) / 1e6
        return (
            f"<Run {type(self.algorithm).__name__}: {len(self.records) - 1} rounds, "
            f"{megabytes:.2f} MB, {values}>"
        )

    def _repr_html_(self) -> str:
        """What notebooks show: first and last value of each metric, and its curve over rounds."""
        history, settings = self.records, flatten(self.settings)
        rows: list[list[object]] = []
        for column in history.scores:
            points = [(r.get("round"), r[column]) for r in history.rows if column in r]
            values = [v for _, y in points if not math.isnan(v := markup.finite(y))]
            if values:
                ends = [f"{v:.4g}" for v in (values[0], values[-1])]
                label = f"{column} by round: {' to '.join(ends)}"
                rows.append([column, *ends, markup.curve(points, label)])
        head, more = ["metric", "first", "last", "by round"], rows[_METRICS:]
        data = settings.get("federation.data")
        on = f" on {data}" if data else ""
        up, down, seconds = map(
            markup.finite, map(history.last, ("bytes_up", "bytes_down", "seconds"))
        )
        cost = f"{up / 1e6:.2f} MB up, {down / 1e6:.2f} MB down, {seconds:.2g} s of computing"
        return markup.box(
            f"{type(self.algorithm).__name__}{on}: {len(history) - 1} rounds",
            markup.lines([cost]),
            markup.table(head, rows[:_METRICS]),
            markup.folded(f"{len(more)} more", markup.table(head, more)) if more else "",
            markup.lines(self.notes),
        )


def known_algorithm(config: Any, modules: Mapping[str, Any] = MappingProxyType({})) -> Algorithm:
    """The algorithm that `to_config` described, if text and named modules can describe it."""
    from foedus.geometry import Domain, Mirror, ModelDomain
    from foedus.models import FeatureMap, Model, Oracle, Training
    from foedus.models.losses import Loss
    from foedus.models.schedules import Schedule

    importlib.import_module("foedus.algorithms")  # registers the algorithms of foedus
    known = {
        **subclasses(Algorithm, Domain, FeatureMap, Loss, Mirror, Model, ModelDomain, Oracle),
        **subclasses(Schedule),
        "Training": Training,
    }
    algorithm = from_config(config, known, "algorithm", modules)
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(f"algorithm: {str(config)[:80]!r} describes no algorithm")
    return algorithm


def checksum(w: Tree) -> int:
    return reduce(
        lambda c, t: zlib.crc32(np.ascontiguousarray(t.detach().cpu().numpy()).data, c),
        tree_leaves(w),
        0,
    )


def start_model(run: Run) -> Tree:
    if not isinstance(run, Run) or "w" not in run.state:
        raise ConfigError(f"start={run!r} must be a finished run whose state has a global model w")
    return run.state["w"]
