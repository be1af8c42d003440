"""Laplace's approximation of any Pyro model, its hyperparameters, and the posterior that it gives."""

from pyro_evidence.laplace.marginal import LaplaceMarginal
from pyro_evidence.laplace.posterior import LaplacePosterior
from pyro_evidence.laplace.process_prediction import LatentPrediction, predict_latent

__all__ = ["LaplaceMarginal", "LaplacePosterior", "LatentPrediction", "predict_latent"]
