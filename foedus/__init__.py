"""foedus: federated learning beyond averaging.

import foedus as fd

data = fd.load("digits")
fed = fd.split(data, "dirichlet", clients=10, alpha=0.5, seed=0)
run = fd.run(fd.FedAvg(fd.Linear(), lr=0.1), fed, rounds=20)
run.history
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from foedus.version import __version__

# Names are loaded when first used, so that `foedus --help` need not wait for PyTorch.
_HOMES = {
    "foedus.algorithms": (
        "AFLBoost",
        "DKRR",
        "FFGB",
        "FFGBDistill",
        "FFGBLipschitz",
        "KRR",
        "Central",
        "Diagnosis",
        "DivergenceWarning",
        "FedAvg",
        "FedAvgDistill",
        "FedBoost",
        "FedDR",
        "FedDyn",
        "FedFW",
        "FedNewton",
        "FedProx",
        "FedRes",
        "FedResBandit",
        "FedResERM",
        "FictitiousPlay",
        "Independent",
        "NaiveFW",
        "ProjectedFedAvg",
        "Public",
        "Regret",
        "RidgeFedAvg",
        "RidgeFedProx",
        "Scaffold",
        "Small",
        "diagnose",
        "distil",
        "prune",
        "regret",
    ),
    "foedus.core.algorithm": ("Algorithm", "Client", "Predictor", "looped", "stacked"),
    "foedus.core.callbacks": ("Callback", "CallbackWarning"),
    "foedus.core.clients": ("Poisson",),
    "foedus.core.run": ("Run", "run"),
    "foedus.core.spec": ("Spec",),
    "foedus.core.tree": ("State",),
    "foedus.data": (
        "Data",
        "Federation",
        "class_bandit",
        "linear_bandit",
        "load",
        "load_speeches",
        "rewards_federation",
        "split",
        "synthetic_leaf",
        "synthetic_piecewise",
        "word_federation",
    ),
    "foedus.data.heterogeneity": ("Heterogeneity", "heterogeneity"),
    "foedus.data.sharing": ("Sharing", "sharing"),
    "foedus.engines.delay": ("Delayed",),
    "foedus.engines.flower": ("Flower",),
    "foedus.data.poison": ("poison",),
    "foedus.engines.hostile": ("Hostile",),
    "foedus.engines.local": ("Local",),
    "foedus.engines.ray": ("Ray",),
    "foedus.engines.rollouts": ("rollouts",),
    "foedus.errors": (
        "CheckpointError",
        "ConfigError",
        "DataError",
        "DivergenceError",
        "FoedusError",
        "ModelError",
        "ReplyError",
        "SecureError",
        "TooFewClients",
        "SplitError",
        "WireError",
    ),
    "foedus.geometry": (
        "Birkhoff",
        "Box",
        "Entropy",
        "Euclidean",
        "GroupBall",
        "KSparse",
        "L1Ball",
        "L2Ball",
        "LInfBall",
        "NuclearBall",
        "PNorm",
        "PerLayer",
        "Permutahedron",
        "Simplex",
        "Whole",
    ),
    "foedus.online": ("Hub", "Site"),
    "foedus.models": (
        "CNN",
        "MLP",
        "Classifiers",
        "Densities",
        "FeatureMap",
        "Forest",
        "Identity",
        "Linear",
        "MaxNet",
        "Model",
        "NGrams",
        "Net",
        "Polynomial",
        "RandomFourier",
        "Sklearn",
        "SobolevNet",
        "Training",
    ),
    "foedus.privacy": (
        "DifferentialPrivacy",
        "GeometricMedian",
        "Krum",
        "Leakage",
        "Median",
        "NormBound",
        "SecureAggregation",
        "TrimmedMean",
        "audit_leakage",
        "noise_for",
    ),
    "foedus.report.compare": ("Comparison", "compare"),
    "foedus.report.survey": ("Survey", "survey"),
    "foedus.trackers": ("MLflow", "TensorBoard"),
    "foedus.tuning": ("Tuning", "loguniform", "tune"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
