"""Hyperparameters, a posterior and a log evidence for Pyro models: change the engine, keep the model."""

from pyro_evidence.axis_priors import GaussianPrior, GroupPrior, LaplacePrior
from pyro_evidence.committee import Committee, committee, linearised
from pyro_evidence.compare import Comparison, compare
from pyro_evidence.compare_evidence import EvidenceComparison, compare_evidence
from pyro_evidence.early_stopping import EarlyStopped, EarlyStopping, RandomShare, Unseen
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
    thermodynamic_integration,
)
from pyro_evidence.infer.class_conditional import ClassConditional, class_conditional, optimised, shares
from pyro_evidence.infer.evidence_em import EvidenceEM
from pyro_evidence.infer.iterate import Status, Stop
from pyro_evidence.infer.laplace_evidence import LaplaceEvidence
from pyro_evidence.infer.laplace_kernel import LaplaceKernel
from pyro_evidence.infer.mixture_deletion import GreedyDeletion
from pyro_evidence.infer.mixture_start import Start
from pyro_evidence.infer.overlap_choice import (
    AlphaChoice,
    KernelPath,
    NetworkAverage,
    add_kernels,
    average,
    choose_alpha,
    error_rate,
    log_loss,
)
from pyro_evidence.infer.overlap_em import OverlapEM
from pyro_evidence.infer.overlap_rounds import Reseed, keep, prune
from pyro_evidence.infer.overlap_start import Given, KMeans, RandomPoints, Wide
from pyro_evidence.infer.overlap_task import Multiple
from pyro_evidence.infer.revm import REVM
from pyro_evidence.infer.ridge import cross_validation, isotropic_evidence
from pyro_evidence.infer.rvm import RVM
from pyro_evidence.infer.vrvm import VRVM
from pyro_evidence.interop import arviz_groups, to_datatree, to_inference_data
from pyro_evidence.laplace_marginal import LaplaceMarginal
from pyro_evidence.latent_prediction import LatentPrediction, predict_latent
from pyro_evidence.learning_curve import LearningCurve, learning_curve
from pyro_evidence.mixture_posterior import MixturePosterior
from pyro_evidence.models.background import with_background
from pyro_evidence.models.missing import Missing, marginalised
from pyro_evidence.mppca_posterior import MPPCAPosterior
from pyro_evidence.ops.curvature import block_diagonal, damped, diagonal, exact_hessian, gauss_newton
from pyro_evidence.ops.mixture_updates import Guarded, Unregularised, WeightDecay, derived, exact, literal
from pyro_evidence.ops.prbf_ascent import Ascent
from pyro_evidence.ops.predictive import hermite, mackay
from pyro_evidence.posterior import LaplacePosterior
from pyro_evidence.posterior_revm import REVMPosterior
from pyro_evidence.posterior_rvm import RVMPosterior
from pyro_evidence.prbf_posterior import PRBFPosterior
from pyro_evidence.program import LogJoint
from pyro_evidence.quadratic import JaakkolaJordan, LeastKL, empirical_fisher, laplace_at_base
from pyro_evidence.runs import Nuts, Svi
from pyro_evidence.sbc import Calibration, sbc

__version__ = "0.1.0"

__all__ = [
    "REVM",
    "RVM",
    "VRVM",
    "AlphaChoice",
    "Ascent",
    "BadInput",
    "Calibration",
    "ClassConditional",
    "Committee",
    "Comparison",
    "EarlyStopped",
    "EarlyStopping",
    "EvidenceComparison",
    "EvidenceEM",
    "EvidenceEstimate",
    "GaussianPrior",
    "Given",
    "GreedyDeletion",
    "GroupPrior",
    "Guarded",
    "ImproperPosterior",
    "JaakkolaJordan",
    "KMeans",
    "KernelPath",
    "LaplaceEvidence",
    "LaplaceKernel",
    "LaplaceMarginal",
    "LaplacePosterior",
    "LaplacePrior",
    "LatentPrediction",
    "LearningCurve",
    "LeastKL",
    "LogJoint",
    "MPPCAPosterior",
    "Missing",
    "MixturePosterior",
    "Multiple",
    "NetworkAverage",
    "NotAMode",
    "NotConverged",
    "NotPositiveDefinite",
    "Nuts",
    "OverlapEM",
    "PRBFPosterior",
    "REVMPosterior",
    "RVMPosterior",
    "RandomPoints",
    "RandomShare",
    "Reseed",
    "Start",
    "Status",
    "Stop",
    "Svi",
    "TooLarge",
    "Unregularised",
    "Unseen",
    "UnsupportedModel",
    "WeightDecay",
    "Wide",
    "add_kernels",
    "arviz_groups",
    "average",
    "base_centre",
    "block_diagonal",
    "bridge_sampling",
    "choose_alpha",
    "class_conditional",
    "committee",
    "compare",
    "compare_evidence",
    "cross_validation",
    "damped",
    "derived",
    "diagonal",
    "empirical_fisher",
    "error_rate",
    "exact",
    "exact_hessian",
    "find_modes",
    "fixed_others",
    "gauss_newton",
    "hermite",
    "importance_sampling",
    "isotropic_evidence",
    "keep",
    "laplace_at_base",
    "learning_curve",
    "linearised",
    "literal",
    "log_loss",
    "mackay",
    "marginalised",
    "optimised",
    "predict_latent",
    "prune",
    "sbc",
    "schur_complement",
    "score_centre",
    "shares",
    "tempered_smc",
    "thames",
    "thermodynamic_integration",
    "to_datatree",
    "to_inference_data",
    "with_background",
]
