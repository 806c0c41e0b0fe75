"""The algorithms, one file each, a folder for a family of several."""

from foedus.algorithms.adaptive import FedAdagrad, FedAdam, FedYogi
from foedus.algorithms.ditto import Ditto
from foedus.algorithms.fedavg import FedAvg
from foedus.algorithms.fedboost.aflboost import AFLBoost
from foedus.algorithms.fedboost.fedboost import FedBoost
from foedus.algorithms.feddr import FedDR
from foedus.algorithms.feddyn import FedDyn
from foedus.algorithms.fedfw.fedfw import FedFW
from foedus.algorithms.fedfw.naive import NaiveFW
from foedus.algorithms.fednewton.averaging import RidgeFedAvg, RidgeFedProx
from foedus.algorithms.fednewton.divergence import DivergenceWarning
from foedus.algorithms.fednewton.newton import FedNewton
from foedus.algorithms.fednewton.regression import DKRR, KRR
from foedus.algorithms.fednova import FedNova
from foedus.algorithms.fedopt import FedOpt
from foedus.algorithms.fedper import FedPer
from foedus.algorithms.fedprox import FedProx
from foedus.algorithms.fedrep import FedRep
from foedus.algorithms.fedres.bandit import FedResBandit
from foedus.algorithms.fedres.erm import FedResERM
from foedus.algorithms.fedres.fictitious import FictitiousPlay
from foedus.algorithms.fedres.regret import Regret, regret
from foedus.algorithms.fedres.sgd import FedRes
from foedus.algorithms.ffgb.boost import FFGB
from foedus.algorithms.ffgb.distill import FedAvgDistill, FFGBDistill, Public
from foedus.algorithms.ffgb.lipschitz import FFGBLipschitz
from foedus.algorithms.ffgb.pruning import Small, distil, prune
from foedus.algorithms.finetuned import FineTuned
from foedus.algorithms.gbdt.gbdt import FederatedGBDT
from foedus.algorithms.projected import ProjectedFedAvg
from foedus.algorithms.references import Central, Independent
from foedus.algorithms.scaffold import Scaffold

__all__ = [
    "DKRR",
    "FFGB",
    "KRR",
    "AFLBoost",
    "Central",
    "Ditto",
    "DivergenceWarning",
    "FFGBDistill",
    "FFGBLipschitz",
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
]
