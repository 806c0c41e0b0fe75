"""foedus: federated learning beyond averaging.

import foedus as fd

data = fd.load("digits")
fed = fd.split(data, "dirichlet", clients=10, alpha=0.5, seed=0)
run = fd.run(fd.FedAvg(fd.Linear(), lr=0.1), fed, rounds=20)
run.history
"""

from __future__ import annotations

import importlib
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
        "Ditto",
        "DivergenceWarning",
        "FedAdagrad",
        "FedAdam",
        "FedAvg",
        "FedAvgDistill",
        "FedBoost",
        "FedDR",
        "FedDyn",
        "FedFW",
        "FedNewton",
        "FedNova",
        "FedOpt",
        "FedPer",
        "FedProx",
        "FedRep",
        "FedRes",
        "FedResBandit",
        "FedResERM",
        "FedYogi",
        "FederatedGBDT",
        "FictitiousPlay",
        "FineTuned",
        "Independent",
        "NaiveFW",
        "ProjectedFedAvg",
        "Public",
        "Regret",
        "RidgeFedAvg",
        "RidgeFedProx",
        "Scaffold",
        "Small",
        "distil",
        "prune",
        "regret",
    ),
    "foedus.audit.leakage": ("Leakage", "audit_leakage"),
    "foedus.core.algorithm": (
        "Algorithm",
        "Batching",
        "Client",
        "client_step",
        "looped",
        "stacked",
    ),
    "foedus.core.callbacks": ("Callback", "CallbackWarning"),
    "foedus.base.spec": ("Spec",),
    "foedus.base.tree": ("State",),
    "foedus.core.participation": ("Poisson",),
    "foedus.core.steer": ("GrowthWarning", "Patience", "Stop"),
    "foedus.core.predictor": ("Predictor",),
    "foedus.core.result": ("Run",),
    "foedus.core.run": ("run",),
    "foedus.data": (
        "Data",
        "Federation",
        "class_bandit",
        "drift",
        "linear_bandit",
        "load",
        "load_speeches",
        "rewards_federation",
        "split",
        "synthetic_leaf",
        "synthetic_piecewise",
        "word_federation",
    ),
    "foedus.diagnosis.diagnose": ("Diagnosis", "Survey", "diagnose", "survey"),
    "foedus.diagnosis.heterogeneity": ("Heterogeneity", "heterogeneity"),
    "foedus.diagnosis.sharing": ("Sharing", "sharing"),
    "foedus.diagnosis.spectral": ("Spectrum", "spectrum"),
    "foedus.engines.delayed": ("Delayed",),
    "foedus.engines.flower.engine": ("Flower",),
    "foedus.data.poison": ("poison",),
    "foedus.engines.hostile": ("Hostile",),
    "foedus.engines.local": ("Local",),
    "foedus.engines.prepare": ("prepare",),
    "foedus.engines.ray.engine": ("Ray",),
    "foedus.algorithms.fedres.rollouts": ("rollouts",),
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
    "foedus.algorithms.fedres.online": ("Hub", "Site"),
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
        "Module",
        "NGrams",
        "Net",
        "Polynomial",
        "RandomFourier",
        "Sklearn",
        "SobolevNet",
        "Training",
        "losses",
        "schedules",
    ),
    "foedus.aggregation": (
        "DifferentialPrivacy",
        "GeometricMedian",
        "Krum",
        "Median",
        "NormBound",
        "SecureAggregation",
        "TrimmedMean",
        "noise_for",
    ),
    "foedus.report.compare": ("Comparison", "compare"),
    "foedus.trackers": ("MLflow", "TensorBoard"),
    "foedus.tuning.grid": ("loguniform",),
    "foedus.tuning.tune": ("Tuning", "tune"),
}
_PACKAGES = {"fedres": "foedus.algorithms.fedres"}  # what only one family uses: fd.fedres.Hub
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME), *_PACKAGES]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        value = importlib.import_module(_PACKAGES[name])
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    else:
        from foedus.errors import nearest

        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}{nearest(name, __all__)}"
        )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
