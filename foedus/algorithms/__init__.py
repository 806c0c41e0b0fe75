"""The algorithms, one file a family."""

from foedus.algorithms.bandit import FedResBandit
from foedus.algorithms.diagnosis import Diagnosis, diagnose
from foedus.algorithms.distill import FedAvgDistill, FFGBDistill, Public
from foedus.algorithms.fedavg import FedAvg
from foedus.algorithms.fedboost import AFLBoost, FedBoost
from foedus.algorithms.feddr import FedDR, ProjectedFedAvg
from foedus.algorithms.feddyn import FedDyn
from foedus.algorithms.fedfw import FedFW, NaiveFW
from foedus.algorithms.fednewton import DKRR, KRR, DivergenceWarning, FedNewton
from foedus.algorithms.fedprox import FedProx
from foedus.algorithms.fedres import FedRes
from foedus.algorithms.fedres_erm import FedResERM, FictitiousPlay
from foedus.algorithms.ffgb import FFGB, FFGBLipschitz
from foedus.algorithms.hindsight import Regret, regret
from foedus.algorithms.local import Central, Independent
from foedus.algorithms.pruning import Small, distil, prune
from foedus.algorithms.ridge import RidgeFedAvg, RidgeFedProx
from foedus.algorithms.scaffold import Scaffold

__all__ = [
    "DKRR",
    "FFGB",
    "KRR",
    "AFLBoost",
    "Central",
    "Diagnosis",
    "DivergenceWarning",
    "FFGBDistill",
    "FFGBLipschitz",
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
]
