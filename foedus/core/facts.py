"""What is known about the data and the sites of a run, and the scores of its model at each site."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from foedus.core.evaluate import row_scores
from foedus.data.federation import Federation
from foedus.version import __version__

if TYPE_CHECKING:
    import pandas as pd

    from foedus.core.result import Run

MOST_SITES = 1000
"""Sites that the file of a run lists."""


@dataclass(frozen=True)
class SiteFacts:
    """One site; unknown values are `None`."""

    client: int
    name: str | None = None
    rows: int | None = None
    test_rows: int | None = None
    loss: float | None = None
    accuracy: float | None = None
    mse: float | None = None

    def __post_init__(self) -> None:
        kinds = {"client": int, "name": str, "rows": int, "test_rows": int}
        for key, value in vars(self).items():
            kind = kinds.get(key, int | float)
            if isinstance(value, bool) or not (isinstance(value, kind) or value is None):
                raise TypeError(f"{key}={value!r} of a site")


@dataclass(frozen=True)
class Facts:
    """Facts that only the federation knows; they are saved with the run for its card.

    Args:
        version: The version of foedus when the run was made.
        label: The column that is predicted.
        rows: The training rows of all sites.
        test_rows: The test rows of all sites.
        sites: The first `MOST_SITES` sites.
        unmeasured: The reason why there are no scores by site.
        origin: The sections [data] and [split] of a file that make the federation; `None` where no
            file can, or where the engine is one that no file names.
    """

    version: str | None = None
    label: str | None = None
    rows: int | None = None
    test_rows: int | None = None
    sites: tuple[SiteFacts, ...] = ()
    unmeasured: str | None = None
    origin: str | None = None

    def __post_init__(self) -> None:
        kinds = {"rows": int, "test_rows": int}
        for key, value in vars(self).items():
            kind = tuple if key == "sites" else kinds.get(key, str)
            if isinstance(value, bool) or not (isinstance(value, kind) or value is None):
                raise TypeError(f"{key}={value!r}")

    def to_json(self) -> dict[str, Any]:
        """Plain values; unknown ones are left out."""

        def known(values: dict[str, Any]) -> dict[str, Any]:
            return {k: v for k, v in values.items() if v is not None}

        sites = [known(asdict(site)) for site in self.sites[:MOST_SITES]]
        return {**known(asdict(self)), "sites": sites}

    @classmethod
    def from_json(cls, about: dict[str, Any]) -> Facts:
        """The inverse of `to_json`; raises TypeError for anything else."""
        sites = tuple(SiteFacts(**site) for site in about.get("sites", []))
        return cls(**{**about, "sites": sites})


def facts_of(run: Run, measure: bool) -> Facts:
    """The facts of a run's federation.

    Args:
        run: The run.
        measure: Whether to evaluate the model at each site, too.
    """
    fed = run.fed
    assert fed is not None
    if not isinstance(fed, Federation):
        return _facts_of_sites(fed)
    facts = Facts(
        __version__, fed.data.label, int(fed.sizes.sum()), int(fed.test_sizes.sum()), (),
        _unmeasured(run, fed, measure), origin_of(run),
    )  # fmt: skip
    shown = np.argsort(fed.ids, kind="stable")[:MOST_SITES]
    scores = None
    if facts.unmeasured is None:
        try:
            scores = _own_scores(run, fed) if run.algorithm.personal else run.per_client()
        except Exception as error:  # a user's algorithm may fail: the run must be saved anyway
            facts = replace(facts, unmeasured=f"measuring them failed ({error})")
    if scores is not None and len(fed) > MOST_SITES:
        metric, worst = ("accuracy", "idxmin") if fed.data.classes else ("mse", "idxmax")
        client = scores["client"][getattr(scores[metric], worst)()]
        place = np.flatnonzero(fed.ids == client)
        shown = shown if place[0] in shown else np.concatenate((shown[:-1], place))
    names = fed.names or [None] * len(fed)
    sites = [
        SiteFacts(int(fed.ids[p]), names[p], int(fed.sizes[p]), int(fed.test_sizes[p]))
        for p in shown.tolist()
    ]
    facts = replace(facts, sites=tuple(sites))
    if scores is None:
        return facts
    ids = [site.client for site in sites]
    listed = scores[scores["client"].isin(ids)].to_dict("records")
    return with_scores(facts, cast("list[dict[str, Any]]", listed))


def origin_of(run: Run) -> str | None:
    """The sections [data] and [split] of a file that make the federation of a run."""
    if run.fed is None:
        return None if run.facts is None else run.facts.origin
    by_file = run.engine is None or type(run.engine).__name__ in ("Local", "Ray")
    return run.fed.origin if by_file and isinstance(run.fed, Federation) else None


def _facts_of_sites(fed: Any) -> Facts:
    """The facts of sites that keep their rows; the settings of the federation have their names."""
    sites = [
        SiteFacts(int(i), fed.settings.get(str(int(i))), int(n))
        for i, n in zip(fed.ids, fed.sizes, strict=True)
    ]
    why = "the sites keep their test rows"
    return Facts(__version__, None, int(fed.sizes.sum()), None, tuple(sites), why)


def _unmeasured(run: Run, fed: Federation, measure: bool) -> str | None:
    """The reason why the model is not measured at each site, if it is not."""
    if not measure:
        return "they were not measured when the run was saved"
    if not run.settings.get("evaluate_every", 1):
        return "the run was not evaluated (evaluate_every=0)"
    if not len(fed.test_rows):
        return "there are no test rows"
    if run.algorithm.personal and len(fed) > MOST_SITES:
        return f"more than {MOST_SITES:,} sites have models of their own; run.per_client() does it"
    return None


def _own_scores(run: Run, fed: Federation) -> pd.DataFrame:
    """Scores of each client's own model, computed here: `per_client` would start an engine."""
    import pandas as pd

    states, found = run.client_states(), []
    order = np.argsort(fed.ids, kind="stable")  # states are in order of ids
    for place, position in enumerate(order.tolist()):
        rows, state = fed.test_client_rows(position), states.get(place)
        if state is None or not len(rows):
            continue
        client = int(fed.ids[position])
        outputs = run.own_model(client, state).prepared.outputs(fed.data.x_test[rows])
        y = torch.from_numpy(fed.data.y_test[rows])
        sums, given = row_scores(run.algorithm, outputs, y, fed.data.classes), fed.data.weights_test
        weight = torch.ones(len(y)) if given is None else torch.from_numpy(given[rows])
        share = weight.double() / weight.double().sum()
        means = {k: float(share @ v.double()) for k, v in sums.items()}
        words = {"hits": "accuracy", "error": "mse"}
        found.append({"client": client, **{words.get(k, k): v for k, v in means.items()}})
    return pd.DataFrame(found or {"client": []})


def with_scores(facts: Facts, scores: Iterable[Mapping[str, Any]]) -> Facts:
    """Facts with scores by client; NaN is no score, and other keys of `scores` are ignored."""
    keys = ("test_rows", "loss", "accuracy", "mse")
    found = {
        entry["client"]: {k: entry[k] for k in keys if k in entry and entry[k] == entry[k]}
        for entry in scores
        if "client" in entry
    }
    sites = tuple(replace(site, **found.get(site.client, {})) for site in facts.sites)
    return replace(facts, sites=sites)


def worst_of(sites: Iterable[SiteFacts]) -> list[SiteFacts]:
    """The site with the lowest accuracy or the largest error, if any has a score."""

    def quality(site: SiteFacts) -> float:
        return -math.inf if site.accuracy is None else site.accuracy

    scored = [s for s in sites if s.accuracy is not None or s.mse is not None]
    return sorted(scored, key=lambda s: quality(s) if s.mse is None else -s.mse)[:1]
