"""The algorithms, one file a family."""

from foedus.algorithms.fedavg import FedAvg
from foedus.algorithms.feddyn import FedDyn
from foedus.algorithms.fedprox import FedProx
from foedus.algorithms.local import Central, Independent
from foedus.algorithms.scaffold import Scaffold

__all__ = ["Central", "FedAvg", "FedDyn", "FedProx", "Independent", "Scaffold"]
