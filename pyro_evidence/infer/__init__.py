"""The engines, one file each: settings, what is repeated, and when it stops."""

from typing import TYPE_CHECKING

from pyro_evidence.lazy_import import import_on_demand

if TYPE_CHECKING:  # at run time each is imported when it is first asked for
    from pyro_evidence.infer.class_conditional import ClassConditional as ClassConditional
    from pyro_evidence.infer.class_conditional import class_conditional as class_conditional
    from pyro_evidence.infer.class_conditional import empirical_class_prior as empirical_class_prior
    from pyro_evidence.infer.class_conditional import fitted_class_prior as fitted_class_prior
    from pyro_evidence.infer.evidence_em import EvidenceEM as EvidenceEM
    from pyro_evidence.infer.laplace_evidence import LaplaceEvidence as LaplaceEvidence
    from pyro_evidence.infer.laplace_forecaster import LaplaceForecaster as LaplaceForecaster
    from pyro_evidence.infer.laplace_kernel import LaplaceKernel as LaplaceKernel
    from pyro_evidence.infer.laplace_marginal import LaplaceMarginal as LaplaceMarginal
    from pyro_evidence.infer.laplace_nuts import LaplaceNUTS as LaplaceNUTS
    from pyro_evidence.infer.overlap_em import OverlapEM as OverlapEM
    from pyro_evidence.infer.revm import REVM as REVM
    from pyro_evidence.infer.revm import isotropic_evidence as isotropic_evidence
    from pyro_evidence.infer.rvm import RVM as RVM
    from pyro_evidence.infer.rvm import VRVM as VRVM

import_on_demand(__name__)
