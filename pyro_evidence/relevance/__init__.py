"""Relevance vector and eigenvector machines: weights of linear predictors and their priors."""

from pyro_evidence.relevance.axis_priors import GaussianPrior, GroupPrior, L1Prior
from pyro_evidence.relevance.eigen_state import base_centre, score_centre
from pyro_evidence.relevance.posteriors import REVMPosterior, RVMPosterior
from pyro_evidence.relevance.quadratic import JaakkolaJordan, LeastKL, laplace_at_base

__all__ = [
    "GaussianPrior",
    "GroupPrior",
    "JaakkolaJordan",
    "L1Prior",
    "LeastKL",
    "REVMPosterior",
    "RVMPosterior",
    "base_centre",
    "laplace_at_base",
    "score_centre",
]
