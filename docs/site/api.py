"""The pages of the API reference: which public name stands where.

A page is written when the site is built: of each name its docstring, its signature and, where its
settings come from other classes too, a table of those.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import foedus as fd

Sections = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Group:
    """One page: what stands before the names, and the names, as written after `fd.`, by heading."""

    file: str
    title: str
    text: str
    sections: Sections
    members: bool = False
    """Whether public methods and attributes are described too."""


GROUPS = (
    Group(
        "data",
        "Federations and data",
        "Rows, and who holds them. The guides: [data](../../how-to/data.md) and "
        "[partitions](../../how-to/partitions.md).",
        {
            "Load and split": ("load", "split", "Data", "Federation", "drift"),
            "Make data": ("synthetic_leaf", "synthetic_piecewise"),
            "Text": ("load_speeches", "word_federation"),
            "Bandits": ("class_bandit", "linear_bandit", "rewards_federation"),
            "Preprocessing among the clients": ("prepare",),
        },
        members=True,
    ),
    Group(
        "running",
        "Running and comparing",
        "One run, several algorithms beside each other, and settings chosen on held-out rows.",
        {
            "Run": ("run", "Poisson"),
            "Compare": ("compare", "Comparison"),
            "Tune": ("tune", "Tuning", "loguniform"),
        },
        members=True,
    ),
    Group(
        "ffgb",
        "FFGB: functional gradient boosting",
        "Clients send functions. The page of the family: [FFGB](../../explanation/ffgb.md).",
        {
            "Algorithms": ("FFGB", "FFGBLipschitz", "FFGBDistill", "FedAvgDistill", "Public"),
            "Trees from sums of histograms": ("FederatedGBDT",),
            "What fits a function": ("Forest", "Net", "SobolevNet", "MaxNet", "Sklearn"),
            "Smaller ensembles": ("prune", "distil", "Small"),
        },
    ),
    Group(
        "fedres",
        "FedRes: residual learning",
        "A shared and a private model learn each other's residual, online and under delay. The "
        "page of the family: [FedRes](../../explanation/fedres.md).",
        {
            "Algorithms": ("FedRes", "FedResERM", "FictitiousPlay", "FedResBandit"),
            "Evaluation": ("regret", "Regret", "rollouts"),
            "Step by step": ("fedres", "Hub", "Site"),
        },
    ),
    Group(
        "fedfw",
        "FedFW: projection-free learning",
        "Clients send extreme points of a convex set. The page of the family: "
        "[FedFW](../../explanation/fedfw.md); the sets: [geometry](geometry.md).",
        {"Algorithms": ("FedFW", "NaiveFW", "ProjectedFedAvg", "FedDR")},
    ),
    Group(
        "fedboost",
        "FedBoost: ensembles of given predictors",
        "Mixture weights of predictors that are given, a few of them sent in a round. The page of "
        "the family: [FedBoost](../../explanation/fedboost.md).",
        {
            "Algorithms": ("FedBoost", "AFLBoost"),
            "Predictors": ("Classifiers", "Densities", "NGrams"),
            "Mirror maps": ("Entropy", "Euclidean", "PNorm"),
        },
    ),
    Group(
        "fednewton",
        "FedNewton: second order",
        "Clients send gradients and Newton directions. The page of the family: "
        "[FedNewton](../../explanation/fednewton.md).",
        {
            "Algorithms": ("FedNewton", "DKRR", "RidgeFedAvg", "RidgeFedProx", "KRR"),
            "Feature maps": ("FeatureMap", "Identity", "Polynomial", "RandomFourier"),
        },
    ),
    Group(
        "averaging",
        "Averaging and personal methods",
        "Clients train by mini-batch descent, and the server averages. The page: "
        "[averaging](../../explanation/averaging.md).",
        {
            "One model": ("FedAvg", "FedProx", "Scaffold", "FedDyn", "FedNova"),
            "Server optimizers": ("FedOpt", "FedAdam", "FedYogi", "FedAdagrad"),
            "A model for each client": ("FineTuned", "Ditto", "FedPer", "FedRep"),
            "References": ("Independent", "Central"),
        },
    ),
    Group(
        "models",
        "Models, losses and schedules",
        "What averaging methods train; any `torch.nn.Module` is a model too: "
        "[your own model](../../how-to/your-model.md).",
        {
            "Models": ("Linear", "MLP", "CNN", "Module", "Model"),
            "Local training": ("Training",),
            "Losses": (
                "losses",
                "losses.CrossEntropy",
                "losses.WeightedCrossEntropy",
                "losses.Focal",
                "losses.SoftLabels",
                "losses.BinaryCrossEntropy",
                "losses.Squared",
                "losses.Huber",
                "losses.Quantile",
                "losses.Logistic",
                "losses.PoissonNLL",
                "losses.Stepwise",
                "losses.Loss",
            ),
            "Schedules of the step size": (
                "schedules",
                "schedules.Step",
                "schedules.Cosine",
                "schedules.WarmUp",
                "schedules.Schedule",
            ),
        },
    ),
    Group(
        "geometry",
        "Geometry",
        "Convex sets of parameters, for the methods of [FedFW](fedfw.md). Each has `lmo(g)`, the "
        "linear minimization oracle, `project(x)`, `contains(x)` and `diameter_of(shape)`.",
        {
            "Of all parameters together, or by layer": ("Whole", "PerLayer"),
            "Vectors": ("L1Ball", "L2Ball", "LInfBall", "Simplex", "Box", "KSparse", "GroupBall"),
            "Matrices and permutations": ("NuclearBall", "Birkhoff", "Permutahedron"),
        },
    ),
    Group(
        "engines",
        "Engines",
        "Where clients run. The guide: [engines](../../how-to/engines.md).",
        {
            "Engines": ("Local", "Ray", "Flower"),
            "Around an engine": ("Delayed", "Hostile"),
            "Hostile data": ("poison",),
        },
    ),
    Group(
        "aggregation",
        "Aggregation",
        "How replies become one. The guides: [hostile clients](../../how-to/hostile-clients.md), "
        "[secure aggregation](../../how-to/secure-aggregation.md) and "
        "[differential privacy](../../how-to/differential-privacy.md).",
        {
            "Robust means": ("Median", "TrimmedMean", "GeometricMedian", "Krum", "NormBound"),
            "Privacy": ("SecureAggregation", "DifferentialPrivacy", "noise_for"),
        },
    ),
    Group(
        "callbacks",
        "Stopping, callbacks and trackers",
        "What happens after a round. The guide: [trackers](../../how-to/trackers.md).",
        {
            "Stop": ("Patience", "Stop"),
            "Callbacks": ("Callback", "TensorBoard", "MLflow"),
            "Warnings": ("CallbackWarning", "DivergenceWarning", "GrowthWarning"),
        },
        members=True,
    ),
    Group(
        "diagnosis",
        "Diagnosis and audit",
        "How unlike clients are, and what messages reveal. The guide: "
        "[diagnose](../../how-to/diagnose.md).",
        {
            "Diagnosis": ("diagnose", "Diagnosis"),
            "Measures": (
                "heterogeneity",
                "Heterogeneity",
                "sharing",
                "Sharing",
                "spectrum",
                "Spectrum",
            ),
            "Audit": ("audit_leakage", "Leakage"),
            "Former names": ("survey", "Survey"),
        },
        members=True,
    ),
    Group(
        "results",
        "Results and files",
        "What a run leaves: history, models, files. The guide: "
        "[taking the model out](../../how-to/model-out.md).",
        {"Results": ("Run", "Predictor"), "Version": ("__version__",)},
        members=True,
    ),
    Group(
        "errors",
        "Errors",
        "Every error is a `FoedusError`.",
        {
            "Errors": (
                "FoedusError",
                "ConfigError",
                "DataError",
                "SplitError",
                "ModelError",
                "ReplyError",
                "DivergenceError",
                "CheckpointError",
                "SecureError",
                "TooFewClients",
                "WireError",
            )
        },
    ),
    Group(
        "writing",
        "Writing an algorithm",
        "The contract between an algorithm and the engines. The guide: "
        "[adding an algorithm](../../how-to/your-algorithm.md).",
        {
            "The contract": ("Algorithm", "Client", "State", "Spec"),
            "Client steps": ("client_step", "looped", "stacked", "Batching"),
        },
        members=True,
    ),
)

NO_DOCSTRING = {
    "__version__": "The version of foedus.",
    "Survey": "The former name of `fd.Diagnosis`.",
    "looped": 'Short for `fd.client_step(batch="loop")`: clients go one after the other.',
    "stacked": 'Short for `fd.client_step(batch="whole")`: the step is given a whole batch.',
}
"""Names that have no docstring of their own: what is said of them."""

NAME = re.compile(
    r"(?<!\[)`fd\.((?:losses\.|schedules\.)?[A-Za-z]\w*)((?:\.\w+)*(?:\([^`]*\))?)`(?!\])"
)
TAG = re.compile(
    r"`[^`]*`|<(?=[A-Za-z])(?!(?:a|br|details|div|img|kbd|p|picture|source|span|sub|summary|sup)\b)"
)
PUBLIC = {name for group in GROUPS for names in group.sections.values() for name in names}


def lookup(name: str) -> Any:
    """What a name after `fd.` stands for."""
    value: Any = fd
    for part in name.split("."):
        value = getattr(value, part)
    return value


def summary(name: str) -> str:
    """The first sentence of a docstring."""
    if name in NO_DOCSTRING:
        return NO_DOCSTRING[name]
    text = (inspect.getdoc(lookup(name)) or "").split("\n\n")[0].replace("\n", " ")
    return text.rstrip(":") + ("." if text.endswith(":") else "")


def path_of(name: str) -> str:
    """Where it is defined: what mkdocstrings reads."""
    value = lookup(name)
    if isinstance(value, ModuleType):
        return value.__name__
    return f"{value.__module__}.{value.__qualname__}"


def page_text(group: Group) -> str:
    """A page of the reference, in Markdown with the directives of mkdocstrings."""
    lines = [f"# {group.title}", "", group.text, ""]
    for heading, names in group.sections.items():
        lines += [f"## {heading}", ""]
        for name in names:
            lines += [entry(name, group.members), ""]
    return "\n".join(lines)


def entry(name: str, members: bool) -> str:
    """What is said of one name."""
    if name in NO_DOCSTRING:
        heading = f"### fd.{name} {{: #fd.{name} .doc-heading}}"
        if name == "__version__":  # not to be read as emphasis
            heading = '<span id="fd.__version__"></span>\n\n### fd.\\_\\_version\\_\\_'
        return f"{heading}\n\n{NO_DOCSTRING[name]}"
    value = lookup(name)
    shown = members and inspect.isclass(value) and not issubclass(value, Exception)
    options = [f"heading: fd.{name}", f"toc_label: {name}", *([] if shown else ["members: false"])]
    lines = [
        f"[](){{#fd.{name}}}",
        f"::: {path_of(name)}",
        "    options:",
        *[f"      {o}" for o in options],
    ]
    return "\n".join([*lines, "", inherited(value)])


def inherited(value: Any) -> str:
    """The settings that a class has from others, as a table that can be opened."""
    if not dataclasses.is_dataclass(value):
        return ""
    own = set(vars(value).get("__annotations__", {}))
    texts = {k: text for base in reversed(value.__mro__) for k, text in arguments(base).items()}
    fields = [f for f in dataclasses.fields(value) if f.init and f.name not in own]
    fields = [f for f in fields if f.name in texts and f.name not in arguments(value)]
    rows = [f"| `{f.name}` | {default_of(f)} | {texts[f.name]} |" for f in fields]
    if not rows:
        return ""
    title = f'??? settings "Inherited settings: {", ".join(f.name for f in fields)}"'
    return "\n    ".join([title, "", "| setting | default | |", "|---|---|---|", *rows])


def arguments(base: type) -> dict[str, str]:
    """What the docstring of a class says of its arguments, each on one line."""
    found = re.search(r"^Args:\n((?:[ \n].*\n?)*)", inspect.cleandoc(base.__doc__ or ""), re.M)
    if not found:
        return {}
    items = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", found.group(1), re.M)
    return {name: re.sub(r"\s+", " ", text).replace("|", "\\|") for name, text in items}


def default_of(setting: dataclasses.Field) -> str:
    default = setting.default
    if default is dataclasses.MISSING:
        default = setting.default_factory() if callable(setting.default_factory) else None
    return f"`{default!r}`".replace("|", "\\|")


def index_text() -> str:
    """The list of all public names with a sentence each."""
    lines = ["# API reference", "", "All public names, after `import foedus as fd`.", ""]
    for group in GROUPS:
        lines += [f"## [{group.title}]({group.file}.md)", "", "| name | |", "|---|---|"]
        for names in group.sections.values():
            lines += [f"| `fd.{name}` | {summary(name)} |" for name in names]
        lines += [""]
    return "\n".join(lines)


def linked_names(text: str) -> str:
    """Inline code such as `fd.FedAvg(lr=0.1)` leads to the reference."""

    def replaced(code: re.Match) -> str:
        return f"[{code.group()}][fd.{code[1]}]" if code[1] in PUBLIC else code.group()

    return "\n".join(
        line if line.startswith(("#", "    ")) else NAME.sub(replaced, line)
        for line in text.split("\n")
    )


def escaped(text: str) -> str:
    """A formula such as <g, s> is no tag of HTML; inline code stays as it is."""
    return TAG.sub(
        lambda found: found[0].replace("<", "&lt;") if found[0] == "<" else found[0], text
    )
