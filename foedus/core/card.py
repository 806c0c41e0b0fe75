"""Model cards in Markdown: the model, its training data, its quality and its cost.

Names of columns and sites, labels and categories come from other people: all of them are escaped.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foedus.base.markdown import block, listed, number, plain, table
from foedus.base.toml import quoted, toml
from foedus.core.facts import Facts, SiteFacts, worst_of

if TYPE_CHECKING:
    from foedus.core.result import Run

FIRST_LINE = (
    "<!-- Model card by foedus. Without this line, saving the run again keeps this file. -->"
)
_ELSEWHERE = {"epsilon", "dropped", "left_out"}
"""Columns of the history that do not measure quality."""
_WORDS = {
    "mse": "mean squared error",
    "own_loss": "loss of each client's own model",
    "own_accuracy": "accuracy of each client's own model",
    "own_mse": "mean squared error of each client's own model",
}


def card_path(path: Path) -> Path:
    """The path of the card of a saved run: the file's ending, if any, replaced by .md."""
    ending = re.fullmatch(r"\.[A-Za-z]\w*", path.suffix) and path.suffix != ".md"
    return path.with_suffix(".md") if ending else path.with_name(f"{path.name}.md")


def is_card(path: Path) -> bool:
    """Whether a file is a card that may be replaced."""
    try:
        with open(path, "rb") as file:
            return file.read(len(FIRST_LINE)) == FIRST_LINE.encode()
    except OSError:  # a folder, or not readable
        return False


@dataclass(eq=False)
class Card:
    """The card of a run; `file` is the file in which the run is saved."""

    run: Run
    facts: Facts
    file: str = "run.safetensors"
    unknown: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The card."""
        sections = {
            "How to use it": self.usage(),
            "Quality": self.quality(),
            "Columns": self.columns(),
            "Cost": self.cost(),
            "Privacy": [self.privacy()],
            "Settings": self.settings(),
            "Notes of the run": [f"- {plain(note)}" for note in self.run.notes] or ["None."],
        }
        name = type(self.run.algorithm).__name__
        lines = [FIRST_LINE, "", f"# Model card: {name} on {self.data}", "", *self.summary()]
        for title, inside in sections.items():
            lines += ["", f"## {title}", "", *inside]
        unknown = [
            *self.unknown,
            "How the model does on rows of other sites, or of other times, than those above.",
            "Whether it does equally well for groups of people within a site.",
            "Intended use and limits: add them here before you publish it.",
        ]
        return "\n".join([*lines, "", "## What is not known", "", *(f"- {u}" for u in unknown), ""])

    @property
    def data(self) -> str:
        return plain(self.federation.get("data", "data of unknown name"))

    @property
    def federation(self) -> dict[str, Any]:
        found = self.run.settings.get("federation")
        return found if isinstance(found, dict) else {}

    def summary(self) -> list[str]:
        spec, facts, values = self.run.spec, self.facts, self.run.class_values
        rows = [("algorithm", type(self.run.algorithm).__name__), ("data", self.data)]
        total = facts.rows if facts.rows is not None else self.federation.get("rows")
        rows.append(("training rows", "unknown" if total is None else number(total)))
        tests = facts.test_rows
        rows.append(("test rows", "unknown" if tests is None else number(tests)))
        named = [site.name for site in facts.sites if site.name is not None]
        count = self.clients
        rows.append(("sites", f"{number(count)}: {listed(named)}" if named else number(count)))
        rows.append(("label", "unknown" if facts.label is None else plain(facts.label)))
        if facts.label is None:
            self.unknown.append("The name of the label.")
        if spec.classes:
            known = range(spec.classes) if values is None else values
            rows.append(("classes", f"{spec.classes}: {listed(known)}"))
            rows += [("labels a row", f"{spec.steps}, one for each step")] if spec.steps else []
        else:
            several = "" if spec.outputs == 1 else f" ({spec.outputs} of them)"
            rows.append(("predicts", f"numbers{several}"))
        rows.append(("rounds", number(self.rounds)))
        rows.append(("seed", plain(self.run.settings.get("seed"))))
        rows.append(("foedus", plain(facts.version or "unknown")))
        return table(["", ""], rows)

    @property
    def clients(self) -> int:
        count = self.federation.get("clients")
        return count if isinstance(count, int) else len(self.facts.sites)

    @property
    def rounds(self) -> int:
        return max(0, len(self.run.records) - 1)

    def usage(self) -> list[str]:
        algorithm, preprocess = self.run.algorithm, self.run.preprocess
        if not algorithm.personal and algorithm.predictor(self.run.state) is None:
            return ["This algorithm makes no model; its result is `run.state`."]
        opaque = '"opaque"' in json.dumps(self.run.settings.get("algorithm"))
        more = ', import_from=["MODULE"]' if opaque else ""
        own = algorithm.personal and algorithm.predictor(self.run.state) is None
        model = f"model_of({self.first_client})" if own else "model"
        lines = [
            "import foedus as fd",
            f"model = fd.Run.load({json.dumps(self.file, ensure_ascii=False)}{more}).{model}",
            "print(model.predict(rows))",
        ]
        if preprocess is not None and preprocess.names is not None:
            rows = "`rows` is a DataFrame of raw rows that has the columns below, in any order."
        else:
            shape = " x ".join(map(str, self.run.spec.shape))
            rows = f"`rows` is an array of rows of shape {shape}, prepared as `data.x_test` was."
        what = "Labels come back as they were written. " if self.run.spec.classes else ""
        text = [*block("python", lines), "", f"{rows} {what}".strip()]
        if opaque:
            text.append(
                "MODULE is the Python module that has the classes of the algorithm's own parts; or "
                "pass the algorithm itself, `algorithm=`."
            )
        return text

    @property
    def first_client(self) -> int:
        return self.facts.sites[0].client if self.facts.sites else 0

    def quality(self) -> list[str]:
        records = self.run.records
        measured = [c for c in records.scores if c not in _ELSEWHERE]
        rows = [(plain(_WORDS.get(c, c)), number(records.last(c))) for c in measured]
        lines = table([f"after round {self.rounds}", ""], rows) if rows else ["Not measured."]
        if not {"loss", "own_loss"} & {*measured}:
            self.unknown.append("How good the model is: the run was not evaluated.")
        return [*lines, "", *self.by_site()]

    def by_site(self) -> list[str]:
        sites, facts = self.facts.sites, self.facts
        if not sites:
            self.unknown.append("The sites: the run was saved without what is known of them.")
            return ["By site: unknown."]
        metric = "accuracy" if self.run.spec.classes else "mse"
        scored = [s for s in sites if getattr(s, metric) is not None]
        keys = ["rows", "test_rows", *(k for k in ("loss", metric) if scored)]
        words = {"rows": "training rows", "test_rows": "test rows", "mse": "mean squared error"}

        def shown(site: SiteFacts, key: str) -> str:
            value = getattr(site, key)
            return "unknown" if value is None else number(value)

        rows = [[site_name(s), *(shown(s, k) for k in keys)] for s in sites]
        own = ", by its own model" * self.run.algorithm.personal
        lines = [f"By site, on its own test rows{own}:" if scored else "By site:", ""]
        lines += table(["site", *(words.get(k, k) for k in keys)], rows)
        for worst in worst_of(scored):
            much = f"{words.get(metric, metric)} {number(getattr(worst, metric))}"
            lines += ["", f"The worst site is {site_name(worst)}, with {much}."]
        if not scored:
            why = facts.unmeasured or "they were not measured"
            self.unknown.append(f"Scores by site: {plain(why)}.")
        elif len(scored) < len(sites):
            missing = len(sites) - len(scored)
            self.unknown.append(
                f"Scores of {missing:,} sites, which have no test rows or no model."
            )
        if len(sites) < self.clients:
            lines += ["", f"The file of the run has {len(sites):,} of {self.clients:,} sites."]
        return lines

    def columns(self) -> list[str]:
        found = self.run.preprocess
        if found is None or found.names is None:
            scale = None if found is None else found.scaling
            shape = " x ".join(map(str, self.run.spec.shape))
            scaled = "" if scale is None else f", scaled before ({plain(scale)})"
            return [f"None by name: rows are arrays of shape {shape}{scaled}."]
        rows, place = [], 0
        for name in found.names:
            known = found.categories.get(name)
            if known is not None:
                texts = [k for k in known if k is not None]
                kind = f"category: {listed(texts, 10)}" if texts else "category"
                missing = "a category of its own" if None in known else "none of the categories"
                codes = "a column of 0 and 1 each" if found.encode == "onehot" else "its place"
                rows.append((plain(name), kind, missing, codes))
                continue
            fill = "refused" if found.fill is None else number(float(found.fill[place]))
            rows.append((plain(name), "number", fill, self.scale_of(place)))
            place += 1
        lines = table(["column", "kind", "where missing", "becomes"], rows)
        if found.categories:
            lines += ["", "A category that no training row has counts as none of those known."]
        return lines

    def scale_of(self, place: int) -> str:
        """The scaling of one column of numbers, as text."""
        found = self.run.preprocess
        assert found is not None
        shift, divisor = found.shift, found.divisor
        text = "itself"
        if divisor is not None:
            by = float(divisor if isinstance(divisor, float | int) else divisor[place])
            start = "x" if shift is None else f"(x - {float(shift[place]):.6g})"
            text = f"{start} / {by:.6g}"
        return text if found.clip is None else f"{text}, clipped at {found.clip:g}"

    def cost(self) -> list[str]:
        last = self.run.records.last
        units = {"bytes_up": "bytes from sites", "bytes_down": "bytes to sites"}
        units |= {"messages_up": "messages from sites", "seconds": "seconds"}
        rows = []
        for key, words in units.items():
            value = last(key)
            places = 2 if key == "seconds" else 0
            known = isinstance(value, int | float) and math.isfinite(value)
            rows.append((words, f"{value:,.{places}f}" if known else "unknown"))
        left_out = [n for n in self.run.records.values("dropped") if isinstance(n, int)]
        rows += [("replies left out", number(sum(left_out)))] if left_out else []
        if fit := self.fit:
            sent = f"{number(fit.get('bytes_up'))} and {number(fit.get('bytes_down'))}"
            rows.append(("bytes from and to sites before, for the preprocessing", sent))
        return table(["", "in all"], [("rounds", number(self.rounds)), *rows])

    @property
    def fit(self) -> dict[str, Any]:
        """The cost of fitting the preprocessing among the sites, if that was done."""
        settings = self.federation.get("settings")
        found = settings.get("preprocess") if isinstance(settings, dict) else None
        return found if isinstance(found, dict) else {}

    def privacy(self) -> str:
        """What the server saw, and the privacy account."""
        if self.run.algorithm.pooled:
            return "None: all rows were in one place."
        given = self.run.settings.get("aggregation")
        if given is None:
            return "None: the server saw every reply."
        kind = given.get("type") if isinstance(given, dict) else None
        noise = given.get("privacy") if kind == "SecureAggregation" else None
        noise = given if kind == "DifferentialPrivacy" else noise
        if kind == "SecureAggregation":
            text = "Secure aggregation: the server saw sums of replies, and no single one. "
        elif kind == "DifferentialPrivacy":
            text = "The server saw every reply; what it made of them is differentially private. "
        else:
            text = f"None: the server saw every reply, and combined them by {plain(kind)}. "
        epsilon = self.run.records.last("epsilon")
        if isinstance(noise, dict):
            much = "unknown" if epsilon != epsilon else number(epsilon)
            spent = f"epsilon {much} at delta {number(noise.get('delta'))}"
            before = self.fit.get("epsilon")
            more = f", after epsilon {number(before)} for the preprocessing" * (before is not None)
            return f"{text}Differential privacy of whole clients: {spent}{more}."
        return text + "There is no differential privacy."

    def settings(self) -> list[str]:
        """Sections as in the TOML file of an experiment."""
        given = self.run.settings
        run: dict[str, Any] = {"rounds": self.rounds}
        run |= {k: given.get(k) for k in ("seed", "participation", "evaluate_every", "quantise")}
        run |= {k: given[k] for k in ("metrics", "per_client") if k in given}
        sections = {"algorithm": given.get("algorithm"), "run": run}
        sections |= {"federation": self.federation, "aggregation": given.get("aggregation")}
        lines: list[str] = []
        for name, inside in sections.items():
            if isinstance(inside, dict) and inside:
                lines += ["", f"[{name}]", *(f"{quoted(k)} = {toml(v)}" for k, v in inside.items())]
        return block("toml", lines[1:])


def site_name(site: SiteFacts) -> str:
    return f"client {site.client}" if site.name is None else plain(site.name)
