"""FedRes: a shared global model and private local models learn each other's residual.

In short `fd.fedres`.
"""

from foedus.algorithms.fedres.bandit import FedResBandit
from foedus.algorithms.fedres.erm import FedResERM
from foedus.algorithms.fedres.fictitious import FictitiousPlay
from foedus.algorithms.fedres.online import Hub, Site
from foedus.algorithms.fedres.regret import Regret, regret
from foedus.algorithms.fedres.rollouts import rollouts
from foedus.algorithms.fedres.sgd import FedRes
from foedus.algorithms.fedres.theorem import Theorem2

__all__ = [
    "FedRes",
    "FedResBandit",
    "FedResERM",
    "FictitiousPlay",
    "Hub",
    "Regret",
    "Site",
    "Theorem2",
    "regret",
    "rollouts",
]
