"""Mixtures whose components are linear in their weights: evidence-regularised EM, whole."""

from pyro_evidence.fitting.em import GreedyDeletion
from pyro_evidence.mixture.evidence import block, coordinate, full
from pyro_evidence.mixture.fit import RandomWeights
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
    "RandomWeights",
    "Unregularised",
    "WeightDecay",
    "block",
    "coordinate",
    "corrected",
    "full",
    "husmeier2000_update",
    "stationary",
]
