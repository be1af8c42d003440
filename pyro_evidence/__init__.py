"""Hyperparameters, a posterior and a log evidence for Pyro models: change the engine, keep the model."""

from pyro_evidence.compare import Comparison, compare
from pyro_evidence.compare_evidence import EvidenceComparison, compare_evidence
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
from pyro_evidence.interop import arviz_groups, to_datatree, to_inference_data
from pyro_evidence.ops.curvature import block_diagonal, damped, diagonal, exact_hessian, gauss_newton
from pyro_evidence.posterior import LaplacePosterior
from pyro_evidence.program import LogJoint
from pyro_evidence.runs import Nuts, Svi
from pyro_evidence.sbc import Calibration, sbc

__version__ = "0.1.0"

__all__ = [
    "BadInput",
    "Calibration",
    "Comparison",
    "EvidenceComparison",
    "EvidenceEstimate",
    "ImproperPosterior",
    "LaplaceEvidence",
    "LaplaceKernel",
    "LaplacePosterior",
    "LogJoint",
    "NotAMode",
    "NotConverged",
    "NotPositiveDefinite",
    "Nuts",
    "Status",
    "Stop",
    "Svi",
    "TooLarge",
    "UnsupportedModel",
    "arviz_groups",
    "block_diagonal",
    "bridge_sampling",
    "compare",
    "compare_evidence",
    "damped",
    "diagonal",
    "exact_hessian",
    "find_modes",
    "gauss_newton",
    "importance_sampling",
    "sbc",
    "tempered_smc",
    "thames",
    "to_datatree",
    "to_inference_data",
]
