"""Hyperparameters, a posterior and a log evidence for Pyro models: change the engine, keep the model."""

from typing import TYPE_CHECKING

from pyro_evidence import moved
from pyro_evidence.errors import (
    BadInput,
    ImproperPosterior,
    NotAMode,
    NotConverged,
    NotPositiveDefinite,
    TooLarge,
    UnsupportedModel,
)
from pyro_evidence.on_demand import on_demand

if TYPE_CHECKING:
    from pyro_evidence import distributed as distributed
    from pyro_evidence.compare.committee import committee
    from pyro_evidence.compare.comparison import compare
    from pyro_evidence.compare.evidence import compare_evidence
    from pyro_evidence.compare.sbc import sbc
    from pyro_evidence.compare.to_arviz import to_datatree, to_inference_data
    from pyro_evidence.curvature.choices import block_diagonal, damped, diagonal, exact_hessian, gauss_newton
    from pyro_evidence.evidence_check import (
        bridge_sampling,
        find_modes,
        importance_sampling,
        tempered_smc,
        thermodynamic_integration,
    )
    from pyro_evidence.evidence_check.thames import thames
    from pyro_evidence.infer.class_conditional import class_conditional
    from pyro_evidence.infer.evidence_em import EvidenceEM
    from pyro_evidence.infer.laplace_evidence import LaplaceEvidence
    from pyro_evidence.infer.laplace_kernel import LaplaceKernel
    from pyro_evidence.infer.laplace_nuts import LaplaceNUTS
    from pyro_evidence.infer.overlap_em import OverlapEM
    from pyro_evidence.infer.revm import REVM
    from pyro_evidence.infer.rvm import RVM
    from pyro_evidence.infer.vrvm import VRVM
    from pyro_evidence.iterate import Status, Stop
    from pyro_evidence.laplace.marginal import LaplaceMarginal
    from pyro_evidence.laplace.nested.posterior import NestedPosterior
    from pyro_evidence.laplace.posterior import LaplacePosterior
    from pyro_evidence.laplace.process_prediction import predict_latent
    from pyro_evidence.mixture.fit import Start

__version__ = "0.1.0"

__all__ = [
    "REVM",
    "RVM",
    "VRVM",
    "BadInput",
    "EvidenceEM",
    "ImproperPosterior",
    "LaplaceEvidence",
    "LaplaceKernel",
    "LaplaceMarginal",
    "LaplaceNUTS",
    "LaplacePosterior",
    "NestedPosterior",
    "NotAMode",
    "NotConverged",
    "NotPositiveDefinite",
    "OverlapEM",
    "Start",
    "Status",
    "Stop",
    "TooLarge",
    "UnsupportedModel",
    "block_diagonal",
    "bridge_sampling",
    "class_conditional",
    "committee",
    "compare",
    "compare_evidence",
    "damped",
    "diagonal",
    "exact_hessian",
    "find_modes",
    "gauss_newton",
    "importance_sampling",
    "predict_latent",
    "sbc",
    "tempered_smc",
    "thames",
    "thermodynamic_integration",
    "to_datatree",
    "to_inference_data",
]

moved.install()
__getattr__ = moved.top

on_demand(
    __name__,
    {
        "EvidenceEM": "infer.evidence_em",
        "LaplaceEvidence": "infer.laplace_evidence",
        "LaplaceKernel": "infer.laplace_kernel",
        "LaplaceMarginal": "laplace.marginal",
        "LaplaceNUTS": "infer.laplace_nuts",
        "LaplacePosterior": "laplace.posterior",
        "NestedPosterior": "laplace.nested.posterior",
        "OverlapEM": "infer.overlap_em",
        "REVM": "infer.revm",
        "RVM": "infer.rvm",
        "Start": "mixture.fit",
        "Status": "iterate",
        "Stop": "iterate",
        "VRVM": "infer.vrvm",
        "block_diagonal": "curvature.choices",
        "bridge_sampling": "evidence_check",
        "class_conditional": "infer.class_conditional",
        "committee": "compare.committee",
        "compare": "compare.comparison",
        "compare_evidence": "compare.evidence",
        "damped": "curvature.choices",
        "diagonal": "curvature.choices",
        "distributed": "distributed",
        "exact_hessian": "curvature.choices",
        "find_modes": "evidence_check",
        "gauss_newton": "curvature.choices",
        "importance_sampling": "evidence_check",
        "predict_latent": "laplace.process_prediction",
        "sbc": "compare.sbc",
        "tempered_smc": "evidence_check",
        "thames": "evidence_check.thames",
        "thermodynamic_integration": "evidence_check",
        "to_datatree": "compare.to_arviz",
        "to_inference_data": "compare.to_arviz",
    },
)
