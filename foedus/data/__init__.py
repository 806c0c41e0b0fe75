"""Data: sets and files (`load`), partitions among clients (`split`), and synthetic federations."""

from __future__ import annotations

from foedus.data.dataset import Data
from foedus.data.datasets import load, load_speeches
from foedus.data.federation import Federation
from foedus.data.partition import split
from foedus.data.synthetic import synthetic_leaf, synthetic_piecewise
from foedus.data.text import word_federation

__all__ = [
    "Data",
    "Federation",
    "load",
    "load_speeches",
    "split",
    "synthetic_leaf",
    "synthetic_piecewise",
    "word_federation",
]
