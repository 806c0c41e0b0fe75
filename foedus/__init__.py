"""foedus: federated learning beyond averaging.

    import foedus as fd

    data = fd.load("digits")
    fed = fd.split(data, "dirichlet", clients=10, alpha=0.5, seed=0)
    run = fd.run(fd.FedAvg(fd.Linear(), lr=0.1), fed, rounds=20)
    run.history
"""

from foedus.algorithms import Central, FedAvg, FedDyn, FedProx, Independent, Scaffold
from foedus.core.algorithm import Algorithm, Client, Predictor, looped
from foedus.core.clients import Poisson
from foedus.core.run import Run, run
from foedus.core.tree import State
from foedus.data import Data, Federation, load, split, synthetic_leaf, synthetic_piecewise
from foedus.engines.local import Local
from foedus.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergenceError,
    FoedusError,
    ModelError,
    ReplyError,
    SplitError,
    WireError,
)
from foedus.models import CNN, MLP, Linear, Model
from foedus.report.compare import Comparison, compare

from foedus.version import __version__

__all__ = [
    "CNN",
    "MLP",
    "Algorithm",
    "Central",
    "CheckpointError",
    "Client",
    "Comparison",
    "ConfigError",
    "Data",
    "DataError",
    "DivergenceError",
    "FedAvg",
    "FedDyn",
    "FedProx",
    "Federation",
    "FoedusError",
    "Independent",
    "Linear",
    "Local",
    "Model",
    "ModelError",
    "Poisson",
    "Predictor",
    "ReplyError",
    "Run",
    "Scaffold",
    "SplitError",
    "State",
    "WireError",
    "compare",
    "load",
    "looped",
    "run",
    "split",
    "synthetic_leaf",
    "synthetic_piecewise",
]
