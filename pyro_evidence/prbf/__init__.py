"""The probabilistic RBF network with class-overlap regularisation, whole."""

from pyro_evidence.prbf.choice import (
    AlphaChoice,
    KernelPath,
    NetworkAverage,
    add_kernels,
    average_networks,
    choose_alpha,
    error_rate,
    log_loss,
)
from pyro_evidence.prbf.fit import AlphaPerKernel, keep_dead_kernels
from pyro_evidence.prbf.posterior import PRBFPosterior
from pyro_evidence.prbf.start import DataCovariance, KMeans, RandomPoints, StartFrom
from pyro_evidence.prbf.updates import Ascent, em, exact_m_step, prbf2001_update

__all__ = [
    "AlphaChoice",
    "AlphaPerKernel",
    "Ascent",
    "DataCovariance",
    "KMeans",
    "KernelPath",
    "NetworkAverage",
    "PRBFPosterior",
    "RandomPoints",
    "StartFrom",
    "add_kernels",
    "average_networks",
    "choose_alpha",
    "em",
    "error_rate",
    "exact_m_step",
    "keep_dead_kernels",
    "log_loss",
    "prbf2001_update",
]
