"""Relevance vector and eigenvector machines: weights of linear predictors and their priors."""

from typing import TYPE_CHECKING

from pyro_evidence.lazy_import import import_on_demand

if TYPE_CHECKING:  # at run time each is imported when it is first asked for
    from pyro_evidence.relevance.axis_priors import GaussianPrior as GaussianPrior
    from pyro_evidence.relevance.axis_priors import L1Prior as L1Prior
    from pyro_evidence.relevance.eigen_state import base_centre as base_centre
    from pyro_evidence.relevance.eigen_state import score_centre as score_centre
    from pyro_evidence.relevance.posteriors import REVMPosterior as REVMPosterior
    from pyro_evidence.relevance.posteriors import RVMPosterior as RVMPosterior
    from pyro_evidence.relevance.quadratic import JaakkolaJordan as JaakkolaJordan
    from pyro_evidence.relevance.quadratic import LeastKL as LeastKL
    from pyro_evidence.relevance.quadratic import laplace_at_base as laplace_at_base

import_on_demand(__name__)
