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
from pyro_evidence.infer.class_conditional import ClassConditional, class_conditional
from pyro_evidence.infer.evidence_em import EvidenceEM
from pyro_evidence.infer.iterate import Status, Stop
from pyro_evidence.infer.laplace_evidence import LaplaceEvidence
from pyro_evidence.infer.laplace_kernel import LaplaceKernel
from pyro_evidence.infer.mixture_em import GreedyDeletion
from pyro_evidence.infer.mixture_start import Start
from pyro_evidence.mixture_posterior import MixturePosterior
from pyro_evidence.ops.curvature import block_diagonal, damped, diagonal, exact_hessian, gauss_newton
from pyro_evidence.ops.mixture_updates import Guarded, Unregularised, WeightDecay, derived, exact, literal
from pyro_evidence.posterior import LaplacePosterior
from pyro_evidence.program import LogJoint

__version__ = "0.1.0"

__all__ = [
    "BadInput",
    "ClassConditional",
    "EvidenceEM",
    "GreedyDeletion",
    "Guarded",
    "ImproperPosterior",
    "LaplaceEvidence",
    "LaplaceKernel",
    "LaplacePosterior",
    "LogJoint",
    "MixturePosterior",
    "NotAMode",
    "NotConverged",
    "NotPositiveDefinite",
    "Start",
    "Status",
    "Stop",
    "TooLarge",
    "Unregularised",
    "UnsupportedModel",
    "WeightDecay",
    "block_diagonal",
    "class_conditional",
    "damped",
    "derived",
    "diagonal",
    "exact",
    "exact_hessian",
    "gauss_newton",
    "literal",
]
