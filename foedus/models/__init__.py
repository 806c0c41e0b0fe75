"""Models, feature maps and losses."""

from foedus.models.base import Model, model_of
from foedus.models.cnn import CNN
from foedus.models.features import FeatureMap, Identity, Polynomial, RandomFourier
from foedus.models.linear import Linear
from foedus.models.losses import CrossEntropy, Huber, Logistic, Squared, loss_for
from foedus.models.mlp import MLP
from foedus.models.module import Module
from foedus.models.predictors import Classifiers, Densities, NGrams, Predictors

__all__ = [
    "CNN",
    "MLP",
    "Classifiers",
    "CrossEntropy",
    "Densities",
    "FeatureMap",
    "Huber",
    "Identity",
    "Linear",
    "Logistic",
    "Model",
    "Module",
    "NGrams",
    "Polynomial",
    "Predictors",
    "RandomFourier",
    "Squared",
    "loss_for",
    "model_of",
]
