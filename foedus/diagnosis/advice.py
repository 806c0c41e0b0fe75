"""Which algorithms to try on a federation, by rules on the measures of a diagnosis:
docs/how-to/diagnose.md."""

from __future__ import annotations

import contextlib
import dataclasses
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from foedus.algorithms import FFGB, FedAvg, FedDyn, FedFW, FedNewton, FedRes, Independent
from foedus.core.algorithm import Algorithm
from foedus.errors import ModelError
from foedus.geometry import L1Ball
from foedus.models import CNN, MLP, Linear, Model

if TYPE_CHECKING:
    from foedus.diagnosis.diagnose import Diagnosis

ONE, OWN = "one model for all", "a model for each client"
UNKNOWN, BEWARE = "what the data cannot tell", "beware"

_NET: dict[str, Any] = {"lr": 0.1, "epochs": 5}


@dataclass(frozen=True)
class Rule:
    """A rule: if a condition on the measures holds, recommend this algorithm, for this reason.

    `text` is formatted with the measures.
    """

    aim: str
    when: Callable[[dict[str, Any]], bool]
    make: Callable[[Diagnosis], Algorithm | None]
    text: str


@dataclass(frozen=True)
class Advice:
    """One piece of advice: its aim, an algorithm with settings (`None`: a remark), and why."""

    aim: str
    algorithm: Algorithm | None
    text: str

    @property
    def code(self) -> str:
        """The algorithm as source code."""
        return code(self.algorithm)

    def __str__(self) -> str:
        head = f"{self.aim}:" + ("" if self.algorithm is None else f" {self.code}")
        return "\n    ".join([head, *textwrap.wrap(self.text, 96)])


def _skewed(m: dict[str, Any]) -> bool:
    return m["label_tv"] - m["label_tv_by_chance"] >= 0.2


def _trees_fit(m: dict[str, Any]) -> bool:
    """Whether trees are worth their bytes, and clients have enough labels to fit useful ones."""
    better = m["fit_trees"] >= max(m["fit_features"], m.get("fit_linear", 0.0)) + 0.02
    enough = m["labels_held"] >= min(3, m["classes"]) and m["rows_median"] >= 20
    return m["tabular"] and better and enough


def _adds_up(m: dict[str, Any]) -> bool:
    """Whether a shared and a private model together explain significantly more than either."""
    return m["gain"] >= max(0.003, 2 * m["gain_noise"])


def _tasks_differ(m: dict[str, Any]) -> bool:
    return m["explained_private"] >= m["explained_shared"] + 0.02


def _curves_do_it(m: dict[str, Any]) -> bool:
    """Whether one nonlinear model explains as much as a linear model for each client."""
    return m["fit_best"] >= m["both"]


def _net(s: Diagnosis) -> Model:
    if not s.facts["tabular"]:
        with contextlib.suppress(ModelError):  # images too small for its convolutions
            CNN().check(s.fed.spec)
            return CNN()
    return MLP((64,))


def _feddyn(s: Diagnosis) -> FedDyn:
    """alpha with a pull of about a third over a round, lr K alpha; more stalls large clients."""
    steps = _NET["epochs"] * max(1.0, s.facts["rows_typical"] / FedDyn.batch_size)
    return FedDyn(_net(s), alpha=float(f"{min(1.0, 0.3 / (_NET['lr'] * steps)):.1g}"), **_NET)


def _step(s: Diagnosis) -> dict[str, Any]:
    return _NET if s.fed.data.classes else _NET | {"lr": 0.01}


def _newton(solver: Literal["newton", "cg"]) -> Callable[[Diagnosis], Algorithm]:
    return lambda s: FedNewton(s.features, s.newton.reg, solver=solver)


_NEWTON = (
    " Its result is that of pooled rows: about {fit_features:.3f} on held-out rows. A "
    "client sends {newton_kb:.3g} kB a round (a linear model: {linear_kb:.3g} kB)."
)

RULES = (
    Rule(
        ONE,
        lambda m: not m["tabular"] and not _skewed(m),
        lambda s: FedAvg(_net(s), **_step(s)),
        "Rows are images, for which features without convolutions are a weak model, and clients "
        "hold about the same labels (label TV {label_tv:.2f}, by chance {label_tv_by_chance:.2f}): "
        "averaging networks needs no correction.",
    ),
    Rule(
        ONE,
        lambda m: not m["tabular"] and _skewed(m),
        _feddyn,
        "Rows are images, for which features without convolutions are a weak model, and clients "
        "hold different labels (label TV {label_tv:.2f}, by chance {label_tv_by_chance:.2f}): "
        "networks trained locally drift apart, which FedDyn corrects at the cost of FedAvg's "
        "messages.",
    ),
    Rule(
        ONE,
        lambda m: _trees_fit(m) and not _skewed(m),
        # ten is for cross-entropy, whose gradients are below 1
        lambda s: FFGB() if s.fed.data.classes else FFGB(step=1.0),
        "Trees predict held-out rows best ({fit_trees:.3f}; FedNewton's features "
        "{fit_features:.3f}). Messages are large: a forest of every client in every round.",
    ),
    Rule(
        ONE,
        lambda m: _trees_fit(m) and _skewed(m),
        lambda s: FFGB(step=3.0),
        "Trees predict held-out rows best ({fit_trees:.3f}; FedNewton's features "
        "{fit_features:.3f}), and boosting with functions as messages keeps most of that under "
        "label skew (label TV {label_tv:.2f}, by chance {label_tv_by_chance:.2f}), with a smaller "
        "step than usual. Messages are large: a forest of every client in every round.",
    ),
    Rule(
        ONE,
        lambda m: m["radius"] < 0.9,
        _newton("newton"),
        "The spectral radius is {radius:.2g}: plain Newton converges, by one digit every "
        "{rounds_a_digit:.1f} rounds." + _NEWTON,
    ),
    Rule(
        ONE,
        lambda m: m["radius"] >= 0.9,
        _newton("cg"),
        "The spectral radius is {radius:.3g}: plain Newton would diverge or converge slowly; "
        "conjugate gradients with the same messages converge for any heterogeneity." + _NEWTON,
    ),
    Rule(
        ONE,
        lambda m: m["tabular"] and _skewed(m),
        _feddyn,
        "If you want a network: label TV is {label_tv:.2f} (by chance "
        "{label_tv_by_chance:.2f}), so locally trained networks drift apart. FedDyn corrects that "
        "at the cost of FedAvg's messages; Scaffold sends twice as much.",
    ),
    Rule(
        ONE,
        lambda m: m["tabular"] and not _skewed(m) and m["classes"] > 0,
        lambda s: FedAvg(_net(s), **_step(s)),
        "If you want a network: labels are divided about as by chance (label TV {label_tv:.2f}, "
        "by chance {label_tv_by_chance:.2f}), so plain averaging is enough.",
    ),
    Rule(
        ONE,
        lambda m: m["tabular"] and not m["classes"],
        lambda s: FedAvg(_net(s), **_step(s)),
        "If you want a network: begin with plain averaging; there is no label skew.",
    ),
    Rule(
        OWN,
        lambda m: _adds_up(m) and not _curves_do_it(m),
        lambda s: FedRes(
            step=0.05, batch_size=10, loss="logistic" if s.fed.data.classes else "squared"
        ),
        "Tasks differ and have something in common: linear models reach {shared:.3f} shared, "
        "{private:.3f} private and {both:.3f} "
        "added up (similarity of two clients {alike:.2f}, of one client's halves {itself:.2f}).",
    ),
    Rule(
        OWN,
        lambda m: not _adds_up(m) and _tasks_differ(m) and not _curves_do_it(m),
        lambda s: Independent(Linear(), **_step(s)),
        "A client's own linear model reaches {private:.3f} on its rows, one for all {shared:.3f}, "
        "both together {both:.3f}: for its "
        "own rows a client does not need the others. On other rows such a model is bad.",
    ),
    Rule(
        OWN,
        lambda m: not _adds_up(m) and not _tasks_differ(m),
        lambda s: None,
        "Not needed: one linear model for all reaches {shared:.3f}, own models {private:.3f}, both "
        "together {both:.3f}.",
    ),
    Rule(
        OWN,
        lambda m: (_adds_up(m) or _tasks_differ(m)) and _curves_do_it(m),
        lambda s: None,
        "Not needed: one nonlinear model for all reaches {fit_best:.3f} on held-out rows; the "
        "clients' own linear models reach {private:.3f} on their rows, and {both:.3f} together "
        "with a shared one.",
    ),
    Rule(
        UNKNOWN,
        lambda m: m["linear_kb"] >= 1,
        lambda s: FedFW(Linear(), L1Ball(30.0)),
        "If bytes are scarce: a client sends one entry a round, some 20 bytes instead of a linear "
        "model's {linear_kb:.3g} kB. It takes hundreds of rounds and reaches less accuracy, "
        "especially if many features matter.",
    ),
    Rule(
        UNKNOWN,
        lambda m: m["classes"] > 0,
        lambda s: None,
        "If you have predictors already, from public data or from other sites: "
        "fd.FedBoost(predictors) learns only how to mix them. If you have unlabeled public rows: "
        "fd.FFGBDistill(model, public) starts a network from the knowledge of all clients.",
    ),
    Rule(
        BEWARE,
        lambda m: m["rows_median"] < 20,
        lambda s: None,
        "Half of the clients have no more than {rows_median:g} rows. Distances between them are "
        "mostly chance, and a client's own model "
        "fits noise: let many clients take part in a round, and make few local steps.",
    ),
    Rule(
        BEWARE,
        lambda m: not m["classes"] and not 0.1 <= m["spread_y"] <= 10,
        lambda s: None,
        "The standard deviation of y is {spread_y:.3g}. The step sizes of gradient methods are "
        "for y of about 1, and diverge or are slow here: divide y by it first (not needed for "
        "FedNewton).",
    ),
    Rule(
        BEWARE,
        lambda m: m["omega_w1"] > 1.5 * m["omega_w1_by_chance"] and not _skewed(m),
        lambda s: None,
        "Features differ between clients (omega_W1 {omega_w1:.3g}, by chance "
        "{omega_w1_by_chance:.3g}) and labels do not: check units and scaling at the sites first.",
    ),
)


def advise(found: Diagnosis) -> list[Advice]:
    """The advice of all rules whose conditions hold, in their order."""
    facts = found.facts
    return [Advice(r.aim, r.make(found), r.text.format_map(facts)) for r in RULES if r.when(facts)]


def code(value: Any) -> str:
    """A dataclass as source code, without settings at their defaults."""
    if not dataclasses.is_dataclass(value):
        return repr(value)
    shown, by_position = [], True
    for f in dataclasses.fields(value):
        given = getattr(value, f.name)
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        if given == default:
            by_position = False
            continue
        text = code(given)
        shown.append(text if by_position and default is dataclasses.MISSING else f"{f.name}={text}")
    return f"fd.{type(value).__name__}({', '.join(shown)})"
