"""Hyperparameters, a posterior and a log evidence for Pyro models: change the engine, keep the model."""

from typing import TYPE_CHECKING

from pyro_evidence.errors import (
    BadInput,
    ImproperPosterior,
    NotAMode,
    NotConverged,
    NotPositiveDefinite,
    TooLarge,
    UnsupportedModel,
)
from pyro_evidence.lazy_import import import_on_demand

if TYPE_CHECKING:  # at run time each is imported when it is first asked for
    from pyro_evidence.compare.committee import committee
    from pyro_evidence.compare.comparison import compare
    from pyro_evidence.compare.evidence import compare_evidence
    from pyro_evidence.compare.explore import explore
    from pyro_evidence.compare.many import FitTable, bootstrap, leave_one_group_out, run_many
    from pyro_evidence.compare.savage_dickey import savage_dickey
    from pyro_evidence.compare.sbc import sbc
    from pyro_evidence.compare.to_arviz import to_datatree, to_inference_data
    from pyro_evidence.evidence_check import (
        bridge_sampling,
        find_modes,
        importance_sampling,
        tempered_smc,
        thermodynamic_integration,
    )
    from pyro_evidence.evidence_check.thames import thames
    from pyro_evidence.fitting.iterate import Status, Stop
    from pyro_evidence.infer.class_conditional import class_conditional
    from pyro_evidence.infer.evidence_em import EvidenceEM
    from pyro_evidence.infer.laplace_evidence import LaplaceEvidence
    from pyro_evidence.infer.laplace_kernel import LaplaceKernel
    from pyro_evidence.infer.laplace_marginal import LaplaceMarginal
    from pyro_evidence.infer.laplace_nuts import LaplaceNUTS
    from pyro_evidence.infer.overlap_em import OverlapEM
    from pyro_evidence.infer.revm import REVM
    from pyro_evidence.infer.rvm import RVM, VRVM
    from pyro_evidence.posterior.laplace import LaplacePosterior
    from pyro_evidence.posterior.multimodal import ImportancePosterior, MultimodalPosterior
    from pyro_evidence.posterior.nested import NestedPosterior
    from pyro_evidence.posterior.process import predict_latent
    from pyro_evidence.posterior.structures import StructurePosterior
    from pyro_evidence.precision.choices import block_diagonal, damped, diagonal, exact_hessian, gauss_newton
    from pyro_evidence.settings import Start

__version__ = "0.1.0"

__all__ = [
    "REVM",
    "RVM",
    "VRVM",
    "BadInput",
    "EvidenceEM",
    "FitTable",
    "ImportancePosterior",
    "ImproperPosterior",
    "LaplaceEvidence",
    "LaplaceKernel",
    "LaplaceMarginal",
    "LaplaceNUTS",
    "LaplacePosterior",
    "MultimodalPosterior",
    "NestedPosterior",
    "NotAMode",
    "NotConverged",
    "NotPositiveDefinite",
    "OverlapEM",
    "Start",
    "Status",
    "Stop",
    "StructurePosterior",
    "TooLarge",
    "UnsupportedModel",
    "block_diagonal",
    "bootstrap",
    "bridge_sampling",
    "class_conditional",
    "committee",
    "compare",
    "compare_evidence",
    "damped",
    "diagonal",
    "exact_hessian",
    "explore",
    "find_modes",
    "gauss_newton",
    "importance_sampling",
    "leave_one_group_out",
    "predict_latent",
    "run_many",
    "savage_dickey",
    "sbc",
    "tempered_smc",
    "thames",
    "thermodynamic_integration",
    "to_datatree",
    "to_inference_data",
]

import_on_demand(__name__)
