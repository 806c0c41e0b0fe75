"""`fd.diagnose`: measures of a federation before training, and a recommended algorithm."""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from annotated_types import Ge, Gt
from torch import nn

from foedus.algorithms.fednewton.regression import FeatureRegression
from foedus.base import markup
from foedus.base.settings import check_value
from foedus.base.toml import section
from foedus.data.federation import Federation
from foedus.diagnosis.fits import fits
from foedus.diagnosis.heterogeneity import Heterogeneity, check_federation, heterogeneity
from foedus.diagnosis.sharing import Sharing, sharing
from foedus.diagnosis.spectral import Spectrum, spectrum
from foedus.errors import ConfigError
from foedus.models.features import FeatureMap, features_of
from foedus.report.reproduction import (
    FILE,
    UNKNOWN,
    Reproduction,
    algorithm_section,
    engine_section,
    joined,
)

if TYPE_CHECKING:
    import pandas as pd

    from foedus.diagnosis.advice import Advice

_CLIENTS, _ROWS = 100, 20_000


def diagnose(
    fed: Federation,
    algorithm: FeatureRegression | None = None,
    reg: float | None = None,
    *,
    features: FeatureMap | nn.Module | None = None,
    iterations: int = 30,
    seed: int = 0,
    engine: Any = None,
    **former: Any,
) -> Diagnosis:
    """Measure how much the clients differ, and recommend algorithms to try first.

    Sizes and labels are those of all clients. Everything else is measured on at most 100 clients,
    drawn at random, and 20,000 rows: if there are more, rows of the largest clients are left out.
    All rows are read in one place, which is possible in a simulation only; between real sites, use
    `fd.spectrum`.

    Args:
        fed: The federation.
        algorithm: A `fd.FedNewton`, whose spectral radius is measured: `radius`, and whether the
            plain iteration `converges`.
        reg: lambda of FedNewton, if no `algorithm` is given.
        features: Feature map of FedNewton, if no `algorithm` is given. By default both are the best
            on held-out rows of linear features and random Fourier features of three bandwidths.
        iterations: As in `fd.spectrum`.
        seed: Seed of all random draws.
        engine: As in `fd.spectrum`.
        **former: Not used; an error names the argument that replaced one of `fd.survey`.

    Returns:
        The measures and the advice.

    Example:
        >>> fed = fd.split(fd.load("wine"), "dirichlet", clients=4, alpha=0.3)
        >>> found = fd.diagnose(fed, iterations=10)
        >>> run = fd.run(found.advice[0].algorithm, fed, rounds=3)
        >>> run.history.accuracy.iloc[-1] > 0.5
        True
    """
    options: dict[str, Any] = {"iterations": iterations, "seed": seed, "engine": engine}
    if former or isinstance(algorithm, FeatureMap | nn.Module):
        return _former(fed, algorithm or features, reg, **options, **former)
    check_federation(fed)
    again = _reproduction(fed, algorithm, iterations, seed, engine)
    if fed.spec.weighted:
        warnings.warn(
            "fd.diagnose does not use the weights of rows: but for FedNewton's spectrum, all rows "
            "count alike in what it finds",
            stacklevel=2,
        )
    if algorithm is not None:
        if features is not None or reg is not None:
            raise ConfigError("give an algorithm, or features and reg, not both")
        squared = getattr(algorithm, "loss", "squared") == "squared"
        if not isinstance(algorithm, FeatureRegression) or not squared:
            needed = "a fd.FedNewton, with the squared loss"
            raise ConfigError(f"algorithm={algorithm!r} must be {needed}")
        features, reg = algorithm.features, algorithm.reg
    elif features is not None or reg is not None:
        again = Reproduction(
            missing="features= and reg= are arguments of Python's fd.diagnose only"
        )
    check_value("seed", seed, Annotated[int, Ge(0)])
    check_value("reg", reg, Annotated[float, Gt(0)] | None)
    if features is not None:
        features = features_of(features)
        features.check(fed.spec)
    rng = np.random.default_rng(seed)
    fed = fed.select(np.argsort(fed.ids))  # the result does not depend on the order of clients
    part = _sample(fed, rng)
    scores, features, reg = fits(fed, features, reg, rng, seed)
    return Diagnosis(
        fed=fed,
        part=part,
        distances=heterogeneity(part, seed=seed),
        by_chance=heterogeneity(_dealt_again(part, rng), seed=seed),
        labels=_label_distances(fed),
        labels_by_chance=_label_distances(_dealt_again(fed, rng)),
        newton=spectrum(part, features, reg, **options),
        features=features,
        fits=scores,
        sharing=sharing(part, seed=seed),
        again=again,
    )


def _reproduction(
    fed: Federation, algorithm: Any, iterations: int, seed: int, engine: Any
) -> Reproduction:
    """How a federation is diagnosed again by `foedus diagnose`."""
    try:
        parts = engine_section(engine)
        parts += [section("run", {"seed": seed})] if seed else []
        parts += [algorithm_section("algorithm", algorithm)] if algorithm is not None else []
        text = joined(fed.origin, parts)
    except ConfigError as error:
        return Reproduction(missing=str(error))
    more = "" if iterations == 30 else f" --iterations {iterations}"
    return Reproduction(f"foedus diagnose {FILE}{more} --out page.html", text)


def _former(fed: Federation, features: Any, reg: float | None, **options: Any) -> Any:
    """fd.diagnose(fed, features, reg) of earlier versions: only FedNewton's spectral radius."""
    text = "fd.diagnose(fed, features, reg) is now fd.spectrum(fed, features, reg); "
    text += "fd.diagnose(fed, algorithm=fd.FedNewton(...)) has its radius beside everything else"
    warnings.warn(text, FutureWarning, stacklevel=3)
    return spectrum(fed, features, 1e-4 if reg is None else reg, **options)


def survey(
    fed: Federation, features: Any = None, reg: float | None = None, **options: Any
) -> Diagnosis:
    """The former name of `fd.diagnose`; it will be removed in the next release."""
    text = "fd.survey is now fd.diagnose, and goes with the next release"
    warnings.warn(text, FutureWarning, stacklevel=2)
    return diagnose(fed, reg=reg, features=features, **options)


@dataclass(frozen=True, eq=False, repr=False)
class Diagnosis:
    """The result of `fd.diagnose`; it is shown as text, or in notebooks as tables, with advice.

    Attributes:
        fed: The federation.
        part: The part of it that was measured.
        distances: `fd.Heterogeneity` of `part`.
        by_chance: The same after redistributing its rows at random, to clients of the same sizes.
            The part of a distance beyond that is heterogeneity.
        labels: Of each client of `fed`, the total variation distance between its labels and those
            of all rows; empty for regression.
        labels_by_chance: The same after redistributing the rows at random.
        newton: `fd.Spectrum` of FedNewton with `features`: Delta_D, Delta_f and the spectral
            radius.
        features: The feature map.
        fits: How well a "linear" model, one on the "features", and "trees" predict held-out rows
            with all other rows in one place: accuracy, or for regression the share of the variance
            explained. It shows which kind of function is needed.
        sharing: `fd.Sharing`: whether FedRes would help.
        again: The command and the file that measure again.

    Example:
        >>> fed = fd.split(fd.load("wine"), "dirichlet", clients=4, alpha=0.3)
        >>> found = fd.diagnose(fed, iterations=10)
        >>> found.converges == (found.radius < 1)
        True
    """

    fed: Federation
    part: Federation
    distances: Heterogeneity
    by_chance: Heterogeneity
    labels: np.ndarray = field(repr=False)
    labels_by_chance: np.ndarray = field(repr=False)
    newton: Spectrum
    features: FeatureMap
    fits: dict[str, float]
    sharing: Sharing
    again: Reproduction = UNKNOWN

    @property
    def radius(self) -> float:
        """The spectral radius of FedNewton's iteration."""
        return self.newton.radius

    @property
    def converges(self) -> bool:
        """Whether FedNewton's plain iteration (`solver="newton"`) converges."""
        return self.newton.converges

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The measures by name, as the rules of `foedus.diagnosis.advice` use them."""
        fed, spec, radius, digit = self.fed, self.fed.spec, self.newton.radius, 1.0
        if radius > 0:
            digit = math.log(10) / -math.log(radius) if radius < 1 else math.inf
        if labelled := fed.data.classes is not None:
            labels: dict[str, float] = {
                "labels_held": float(np.median((fed.label_counts() > 0).sum(1))),
                "label_tv": float(self.labels.mean()),
                "label_tv_max": float(self.labels.max()),
                "label_tv_by_chance": float(self.labels_by_chance.mean()),
            }
        else:
            labels = {"labels_held": math.inf}
            labels |= dict.fromkeys(("label_tv", "label_tv_max", "label_tv_by_chance"), 0.0)
        return {
            "clients": len(fed),
            "rows": len(fed.rows),
            "rows_median": float(np.median(fed.sizes)),
            # of the client that a row is with
            "rows_typical": float(np.square(fed.sizes).sum() / fed.sizes.sum()),
            "classes": fed.data.classes or 0,
            "tabular": len(spec.shape) == 1,
            "spread_y": 0.0 if labelled else float(fed.data.y_train[fed.rows].std()),
            **labels,
            "omega_tv": self.distances.omega_tv,
            "omega_tv_by_chance": self.by_chance.omega_tv,
            "omega_w1": self.distances.omega_w1,
            "omega_w1_by_chance": self.by_chance.omega_w1,
            "data_shift": float(np.mean(self.newton.columns["data_shift"])),
            "data_shift_max": max(self.newton.columns["data_shift"]),
            "model_shift": float(np.mean(self.newton.columns["model_shift"])),
            "model_shift_max": max(self.newton.columns["model_shift"]),
            "reg": self.newton.reg,
            "radius": radius,
            "rounds_a_digit": digit,
            **{f"fit_{kind}": score for kind, score in self.fits.items()},
            "fit_best": max(self.fits.values()),
            **(self.sharing.accuracy or self.sharing.explained),
            **{f"explained_{model}": share for model, share in self.sharing.explained.items()},
            "gain": self.sharing.gain[0],
            "gain_noise": self.sharing.gain[1],
            "alike": self.sharing.alike,
            "itself": self.sharing.itself,
            "newton_kb": 2 * 8 * self.features.size(spec) * spec.outputs / 1e3,
            "linear_kb": 4 * (spec.features + 1) * spec.outputs / 1e3,
        }

    @cached_property
    def advice(self) -> list[Advice]:
        """Recommended algorithms with reasons; `advice[0].algorithm` can be run."""
        from foedus.diagnosis.advice import advise

        return advise(self)

    def measures(self) -> list[tuple[str, str, str]]:
        """Name, value and reference value of each measure."""
        from foedus.diagnosis.advice import code

        m, labelled = self.facts, self.fed.data.classes is not None
        score = "accuracy" if labelled else "variance explained"
        found, at_random = [], "rows permuted: "
        if labelled:
            chance = f"largest {m['label_tv_max']:.3f}; {at_random}{m['label_tv_by_chance']:.3f}"
            found.append(("label TV", f"{m['label_tv']:.3f}", chance))
        chance = f"{at_random}{m['omega_tv_by_chance']:.3f}"
        found.append(("omega_TV", f"{m['omega_tv']:.3f}", chance))
        sliced = "" if self.distances.exact else "sliced; "
        chance = f"{sliced}{at_random}{m['omega_w1_by_chance']:.4g}"
        found.append(("omega_W1", f"{m['omega_w1']:.4g}", chance))
        for name, key in (("Delta_D", "data_shift"), ("Delta_f", "model_shift")):
            found.append((name, f"{m[key]:.4g}", f"largest {m[f'{key}_max']:.4g}"))
        newton = f"plain Newton {'converges' if self.converges else 'diverges'}"
        settings = f"{code(self.features)}, reg={m['reg']:g}"
        radius = ("FedNewton's spectral radius", f"{m['radius']:.4g}", f"{newton}; {settings}")
        found.append(radius)
        kinds = {"linear": "a linear model", "features": "FedNewton's features", "trees": "trees"}
        rows = "held-out rows, pooled data"
        found += [(f"{score}, {kinds[k]}", f"{v:.3f}", rows) for k, v in self.fits.items()]
        shares = self.sharing.accuracy or self.sharing.explained
        rows = "held-out rows of the same client"
        kinds = {"labels": "own average of y", "shared": "one linear model"}
        kinds |= {"private": "own linear models", "both": "both"}
        found += [(f"{score}, {name}", f"{shares[k]:.3f}", rows) for k, name in kinds.items()]
        alike, itself = ("–" if math.isnan(m[k]) else f"{m[k]:.2f}" for k in ("alike", "itself"))
        halves = f"of a client's two halves: {itself}"
        return [*found, ("task similarity of two clients", alike, halves)]

    @property
    def sampled(self) -> str:
        """A note if only a part of the federation was measured."""
        if len(self.part.rows) == len(self.fed.rows):
            return ""
        return (
            f"distances, shifts and shares were measured on {len(self.part)} clients with "
            f"{len(self.part.rows)} rows, drawn at random"
        )

    def __repr__(self) -> str:
        lines = [self.fed.describe(), *([self.sampled] if self.sampled else []), ""]
        found = self.measures()
        width, wide = (max(len(entry[k]) for entry in found) for k in (0, 1))
        lines += [f"{name:<{width}}  {value:>{wide}}  {note}" for name, value, note in found]
        return "\n".join([*lines, "", *map(str, self.advice)])

    def _repr_html_(self) -> str:
        """For notebooks: advice with its reasons, and all measures."""
        title, *others = self.fed.describe().splitlines()
        advice = [
            [a.aim, "" if a.algorithm is None else markup.Cell(a.code, bold=True), a.text]
            for a in self.advice
        ]
        return markup.box(
            title,
            markup.lines([*others, *([self.sampled] if self.sampled else [])]),
            markup.table(["aim", "what to try", "why"], advice, prose=True),
            markup.folded(
                "Measures",
                markup.table(
                    ["measure", "value", "to hold it against"], self.measures(), prose=True
                ),
            ),
        )

    def per_client(self) -> pd.DataFrame:
        """One row for each client of `part`: rows, distances, and the variance that linear models
        explain."""
        import pandas as pd

        columns: dict[str, Any] = {**self.part.client_columns(), "rows": self.part.sizes}
        if len(self.labels):
            by_id = dict(zip(self.fed.ids.tolist(), self.labels, strict=True))
            columns["label_TV"] = [by_id[i] for i in self.part.ids.tolist()]
        columns["W1"], newton = self.distances.per_client["w1"], self.newton.columns
        columns |= {"Delta_D": newton["data_shift"], "Delta_f": newton["model_shift"]}
        shares = self.sharing.per_client[["shared", "private", "both"]]
        return pd.DataFrame({**columns, **shares})

    def plot(self, path: str | os.PathLike) -> Path:
        """Draw labels, distances, similarities and scores as one figure, .svg or .png."""
        from foedus.diagnosis.figures import write_picture

        write_picture(self, Path(path))
        return Path(path)

    def report(self, path: str | os.PathLike) -> Path:
        """Write one self-contained HTML page: advice with its reasons, charts, measures.

        Needs matplotlib.
        """
        from foedus.diagnosis.figures import inline_panels
        from foedus.report.html import render, versions, write_page

        frame = self.per_client()
        text = render(
            "diagnosis.html.j2",
            title=f"The federation {self.fed.data.name}",
            subtitle=self.fed.describe().splitlines()[0],
            found=self,
            drawn=inline_panels(self),
            columns=[c.replace("_", " ") for c in frame.columns],
            clients=[[_cell(v) for v in row] for row in frame.itertuples(index=False)],
            again=self.again,
            versions=versions(),
        )
        return write_page(path, text)


Survey = Diagnosis  # its former name


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{value:.3g}"
    return str(value)


def _sample(fed: Federation, rng: np.random.Generator) -> Federation:
    """At most `_CLIENTS` clients and `_ROWS` rows; the largest leave rows out first."""
    if len(fed) > _CLIENTS:
        fed = fed.select(np.sort(rng.permutation(len(fed))[:_CLIENTS]))
    if len(fed.rows) <= _ROWS:
        return fed
    low, high = 1, int(fed.sizes.max())
    while low < high:  # the largest level to which all can be cut
        middle = (low + high + 1) // 2
        fits_in = np.minimum(fed.sizes, middle).sum() <= _ROWS
        low, high = (middle, high) if fits_in else (low, middle - 1)
    kept = [np.sort(rng.permutation(fed.client_rows(i))[:low]) for i in range(len(fed))]
    offsets = np.cumsum([0, *map(len, kept)])
    return replace(fed, rows=np.concatenate(kept), offsets=offsets)


def _dealt_again(fed: Federation, rng: np.random.Generator) -> Federation:
    """The same rows at random, to clients of the same sizes."""
    return replace(fed, rows=rng.permutation(np.sort(fed.rows)))


def _label_distances(fed: Federation) -> np.ndarray:
    """For each client, half the L1 distance between its label frequencies and those of all rows."""
    if fed.data.classes is None:
        return np.zeros(0)
    counts = fed.label_counts()
    return np.abs(counts / fed.sizes[:, None] - counts.sum(0) / counts.sum()).sum(1) / 2
