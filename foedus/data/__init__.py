"""Data: sets and files (`load`), partitions among clients (`split`), and synthetic federations."""

from __future__ import annotations

from foedus.data.bandits import class_bandit, linear_bandit, rewards_federation
from foedus.data.dataset import Data
from foedus.data.federation import Federation
from foedus.data.loading import load, load_speeches
from foedus.data.partition import drift, split
from foedus.data.synthetic import synthetic_leaf, synthetic_piecewise
from foedus.data.text import word_federation

__all__ = [
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
]
