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
from pyro_evidence.infer.class_conditional import ClassConditional, class_conditional
from pyro_evidence.infer.evidence_em import EvidenceEM
from pyro_evidence.infer.iterate import Status, Stop
from pyro_evidence.infer.laplace_evidence import LaplaceEvidence
from pyro_evidence.infer.laplace_kernel import LaplaceKernel
from pyro_evidence.infer.mixture_em import GreedyDeletion
from pyro_evidence.infer.mixture_start import Start
from pyro_evidence.infer.revm import REVM
from pyro_evidence.infer.ridge import cross_validation, isotropic_evidence
from pyro_evidence.infer.rvm import RVM
from pyro_evidence.infer.vrvm import VRVM
from pyro_evidence.interop import arviz_groups, to_datatree, to_inference_data
from pyro_evidence.mixture_posterior import MixturePosterior
from pyro_evidence.mppca_posterior import MPPCAPosterior
from pyro_evidence.ops.curvature import block_diagonal, damped, diagonal, exact_hessian, gauss_newton
from pyro_evidence.ops.mixture_updates import Guarded, Unregularised, WeightDecay, derived, exact, literal
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
    "ClassConditional",
    "Comparison",
    "EvidenceComparison",
    "EvidenceEM",
    "EvidenceEstimate",
    "GaussianPrior",
    "GreedyDeletion",
    "Guarded",
    "ImproperPosterior",
    "JaakkolaJordan",
    "LaplaceEvidence",
    "LaplaceKernel",
    "LaplacePosterior",
    "LaplacePrior",
    "LeastKL",
    "LogJoint",
    "MPPCAPosterior",
    "MixturePosterior",
    "NotAMode",
    "NotConverged",
    "NotPositiveDefinite",
    "Nuts",
    "REVMPosterior",
    "RVMPosterior",
    "Start",
    "Status",
    "Stop",
    "Svi",
    "TooLarge",
    "Unregularised",
    "UnsupportedModel",
    "WeightDecay",
    "arviz_groups",
    "base_centre",
    "block_diagonal",
    "bridge_sampling",
    "class_conditional",
    "compare",
    "compare_evidence",
    "cross_validation",
    "damped",
    "derived",
    "diagonal",
    "empirical_fisher",
    "exact",
    "exact_hessian",
    "find_modes",
    "fixed_others",
    "gauss_newton",
    "hermite",
    "importance_sampling",
    "isotropic_evidence",
    "laplace_at_base",
    "literal",
    "mackay",
    "sbc",
    "schur_complement",
    "score_centre",
    "tempered_smc",
    "thames",
    "to_datatree",
    "to_inference_data",
]
