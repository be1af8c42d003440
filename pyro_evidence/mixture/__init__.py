"""Mixtures whose components are linear in their weights: evidence-regularised EM, whole."""

from pyro_evidence.fitting.component_moves import GreedyDeletion
from pyro_evidence.mixture.fit import Start
from pyro_evidence.mixture.posterior import MixturePosterior
from pyro_evidence.mixture.updates import (
    BoundedInflation,
    Unregularised,
    WeightDecay,
    corrected,
    husmeier2000_update,
    stationary,
)

__all__ = [
    "BoundedInflation",
    "GreedyDeletion",
    "MixturePosterior",
    "Start",
    "Unregularised",
    "WeightDecay",
    "corrected",
    "husmeier2000_update",
    "stationary",
]
