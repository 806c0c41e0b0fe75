"""Models, feature maps, losses, learning-rate schedules, weak learners and given predictors."""

from foedus.models import schedules
from foedus.models.base import Model, model_of
from foedus.models.cnn import CNN
from foedus.models.features import FeatureMap, Identity, Polynomial, RandomFourier
from foedus.models.linear import Linear
from foedus.models.losses import CrossEntropy, Huber, Logistic, Squared, loss_for
from foedus.models.mlp import MLP
from foedus.models.module import Module
from foedus.models.oracles import Forest, MaxNet, Net, Oracle, Sklearn, SobolevNet
from foedus.models.predictors.base import Predictors
from foedus.models.predictors.classifiers import Classifiers
from foedus.models.predictors.densities import Densities
from foedus.models.predictors.ngrams import NGrams
from foedus.models.training.settings import Training

__all__ = [
    "CNN",
    "MLP",
    "Classifiers",
    "CrossEntropy",
    "Densities",
    "FeatureMap",
    "Forest",
    "Huber",
    "Identity",
    "Linear",
    "Logistic",
    "MaxNet",
    "Model",
    "Module",
    "NGrams",
    "Net",
    "Oracle",
    "Polynomial",
    "Predictors",
    "RandomFourier",
    "Sklearn",
    "SobolevNet",
    "Squared",
    "Training",
    "loss_for",
    "model_of",
    "schedules",
]
