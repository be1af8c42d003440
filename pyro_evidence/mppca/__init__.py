"""Mixtures of probabilistic PCA and of factor analysers, whole."""

from pyro_evidence.mppca.fit import NormalCentres
from pyro_evidence.mppca.posterior import MPPCAPosterior

__all__ = ["MPPCAPosterior", "NormalCentres"]
