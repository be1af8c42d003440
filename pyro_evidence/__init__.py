"""Hyperparameters, a posterior and a log evidence for Pyro models: change the engine, keep the model."""

from pyro_evidence.axis_priors import GaussianPrior, LaplacePrior
from pyro_evidence.compare import Comparison, compare
from pyro_evidence.compare_evidence import EvidenceComparison, compare_evidence
from pyro_evidence.eigen_state import base_centre, fixed_others, schur_complement, score_centre
from pyro_evidence.errors import (
    BadInput,
    ImproperPosterior,
    NotAMode,
    NotConverged,
    NotPositiveDefinite,
    TooLarge,
    UnsupportedModel,
)
from pyro_evidence.evidence_check import (
    EvidenceEstimate,
    bridge_sampling,
    find_modes,
    importance_sampling,
    tempered_smc,
    thames,
)
from pyro_evidence.infer.iterate import Status, Stop
from pyro_evidence.infer.laplace_evidence import LaplaceEvidence
from pyro_evidence.infer.laplace_kernel import LaplaceKernel
from pyro_evidence.infer.revm import REVM
from pyro_evidence.infer.ridge import cross_validation, isotropic_evidence
from pyro_evidence.infer.rvm import RVM
from pyro_evidence.infer.vrvm import VRVM
from pyro_evidence.interop import arviz_groups, to_datatree, to_inference_data
from pyro_evidence.ops.curvature import block_diagonal, damped, diagonal, exact_hessian, gauss_newton
from pyro_evidence.ops.predictive import hermite, mackay
from pyro_evidence.posterior import LaplacePosterior
from pyro_evidence.posterior_revm import REVMPosterior
from pyro_evidence.posterior_rvm import RVMPosterior
from pyro_evidence.program import LogJoint
from pyro_evidence.quadratic import JaakkolaJordan, LeastKL, empirical_fisher, laplace_at_base
from pyro_evidence.runs import Nuts, Svi
from pyro_evidence.sbc import Calibration, sbc

__version__ = "0.1.0"

__all__ = [
    "REVM",
    "RVM",
    "VRVM",
    "BadInput",
    "Calibration",
    "Comparison",
    "EvidenceComparison",
    "EvidenceEstimate",
    "GaussianPrior",
    "ImproperPosterior",
    "JaakkolaJordan",
    "LaplaceEvidence",
    "LaplaceKernel",
    "LaplacePosterior",
    "LaplacePrior",
    "LeastKL",
    "LogJoint",
    "NotAMode",
    "NotConverged",
    "NotPositiveDefinite",
    "Nuts",
    "REVMPosterior",
    "RVMPosterior",
    "Status",
    "Stop",
    "Svi",
    "TooLarge",
    "UnsupportedModel",
    "arviz_groups",
    "base_centre",
    "block_diagonal",
    "bridge_sampling",
    "compare",
    "compare_evidence",
    "cross_validation",
    "damped",
    "diagonal",
    "empirical_fisher",
    "exact_hessian",
    "find_modes",
    "fixed_others",
    "gauss_newton",
    "hermite",
    "importance_sampling",
    "isotropic_evidence",
    "laplace_at_base",
    "mackay",
    "sbc",
    "schur_complement",
    "score_centre",
    "tempered_smc",
    "thames",
    "to_datatree",
    "to_inference_data",
]
