"""Hyperparameters, a posterior and a log evidence for Pyro models: change the engine, keep the model."""

from pyro_evidence.errors import (
    BadInput,
    ImproperPosterior,
    NotAMode,
    NotConverged,
    NotPositiveDefinite,
    TooLarge,
    UnsupportedModel,
)
from pyro_evidence.infer.iterate import Status, Stop
from pyro_evidence.infer.laplace_evidence import LaplaceEvidence
from pyro_evidence.infer.laplace_kernel import LaplaceKernel
from pyro_evidence.ops.curvature import block_diagonal, damped, diagonal, exact_hessian, gauss_newton
from pyro_evidence.posterior import LaplacePosterior
from pyro_evidence.program import LogJoint

__version__ = "0.1.0"

__all__ = [
    "BadInput",
    "ImproperPosterior",
    "LaplaceEvidence",
    "LaplaceKernel",
    "LaplacePosterior",
    "LogJoint",
    "NotAMode",
    "NotConverged",
    "NotPositiveDefinite",
    "Status",
    "Stop",
    "TooLarge",
    "UnsupportedModel",
    "block_diagonal",
    "damped",
    "diagonal",
    "exact_hessian",
    "gauss_newton",
]
