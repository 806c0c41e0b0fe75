"""Models and losses."""

from foedus.models.base import Model, model_of
from foedus.models.cnn import CNN
from foedus.models.linear import Linear
from foedus.models.losses import CrossEntropy, Squared, loss_for
from foedus.models.mlp import MLP
from foedus.models.module import Module

__all__ = ["CNN", "MLP", "CrossEntropy", "Linear", "Model", "Module", "Squared", "loss_for", "model_of"]
