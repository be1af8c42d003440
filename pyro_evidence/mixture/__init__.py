"""Mixtures whose components are linear in their weights: evidence-regularised EM, whole."""

from typing import TYPE_CHECKING

from pyro_evidence.lazy_import import import_on_demand

if TYPE_CHECKING:  # at run time each is imported when it is first asked for
    from pyro_evidence.fitting.em import GreedyDeletion as GreedyDeletion
    from pyro_evidence.mixture.evidence import block as block
    from pyro_evidence.mixture.evidence import coordinate as coordinate
    from pyro_evidence.mixture.evidence import full as full
    from pyro_evidence.mixture.fit import RandomWeights as RandomWeights
    from pyro_evidence.mixture.posterior import MixturePosterior as MixturePosterior
    from pyro_evidence.mixture.updates import BoundedInflation as BoundedInflation
    from pyro_evidence.mixture.updates import Unregularised as Unregularised
    from pyro_evidence.mixture.updates import WeightDecay as WeightDecay
    from pyro_evidence.mixture.updates import corrected as corrected
    from pyro_evidence.mixture.updates import husmeier2000_update as husmeier2000_update

import_on_demand(__name__)
