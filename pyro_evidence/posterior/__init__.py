"""Posteriors: draws, predictions, summaries, diagnostics and files."""

from typing import TYPE_CHECKING

from pyro_evidence.lazy_import import import_on_demand

if TYPE_CHECKING:  # at run time each is imported when it is first asked for
    from pyro_evidence.posterior.groups import with_groups as with_groups
    from pyro_evidence.posterior.laplace import LaplacePosterior
    from pyro_evidence.posterior.multimodal import toured as toured
    from pyro_evidence.posterior.nested import NestedPosterior
    from pyro_evidence.posterior.nested import integrated as integrated
    from pyro_evidence.posterior.process import LatentPrediction, predict_latent
    from pyro_evidence.posterior.structures import StructureFits as StructureFits
    from pyro_evidence.posterior.structures import over_structures as over_structures

__all__ = ["LaplacePosterior", "LatentPrediction", "NestedPosterior", "predict_latent"]

import_on_demand(__name__)
