"""Pictures of posteriors, mixtures and comparisons."""

from pyro_evidence.moved import folder

__getattr__ = folder("plots")
