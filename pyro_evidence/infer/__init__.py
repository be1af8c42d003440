"""The engines, one file each: settings, what is repeated, and when it stops."""

from typing import TYPE_CHECKING

from pyro_evidence.lazy_import import import_on_demand

if TYPE_CHECKING:  # at run time each is imported when it is first asked for
    from pyro_evidence.infer.class_conditional import (
        ClassConditional,
        class_conditional,
        empirical_class_prior,
        fitted_class_prior,
    )
    from pyro_evidence.infer.evidence_em import EvidenceEM
    from pyro_evidence.infer.laplace_evidence import LaplaceEvidence
    from pyro_evidence.infer.laplace_forecaster import LaplaceForecaster
    from pyro_evidence.infer.laplace_kernel import LaplaceKernel
    from pyro_evidence.infer.laplace_marginal import LaplaceMarginal
    from pyro_evidence.infer.laplace_nuts import LaplaceNUTS
    from pyro_evidence.infer.overlap_em import OverlapEM
    from pyro_evidence.infer.revm import REVM, isotropic_evidence
    from pyro_evidence.infer.rvm import RVM, VRVM

__all__ = [
    "REVM",
    "RVM",
    "VRVM",
    "ClassConditional",
    "EvidenceEM",
    "LaplaceEvidence",
    "LaplaceForecaster",
    "LaplaceKernel",
    "LaplaceMarginal",
    "LaplaceNUTS",
    "OverlapEM",
    "class_conditional",
    "empirical_class_prior",
    "fitted_class_prior",
    "isotropic_evidence",
]

import_on_demand(__name__)
