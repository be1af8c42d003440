"""The probabilistic RBF network with class-overlap regularisation, whole."""

from typing import TYPE_CHECKING

from pyro_evidence.lazy_import import import_on_demand

if TYPE_CHECKING:  # at run time each is imported when it is first asked for
    from pyro_evidence.prbf.choice import AlphaChoice as AlphaChoice
    from pyro_evidence.prbf.choice import KernelPath as KernelPath
    from pyro_evidence.prbf.choice import NetworkAverage as NetworkAverage
    from pyro_evidence.prbf.choice import add_kernels as add_kernels
    from pyro_evidence.prbf.choice import average_networks as average_networks
    from pyro_evidence.prbf.choice import choose_alpha as choose_alpha
    from pyro_evidence.prbf.choice import error_rate as error_rate
    from pyro_evidence.prbf.choice import log_loss as log_loss
    from pyro_evidence.prbf.fit import AlphaPerKernel as AlphaPerKernel
    from pyro_evidence.prbf.fit import keep_dead_kernels as keep_dead_kernels
    from pyro_evidence.prbf.posterior import PRBFPosterior as PRBFPosterior
    from pyro_evidence.prbf.start import DataCovariance as DataCovariance
    from pyro_evidence.prbf.start import KMeans as KMeans
    from pyro_evidence.prbf.start import RandomPoints as RandomPoints
    from pyro_evidence.prbf.start import StartFrom as StartFrom
    from pyro_evidence.prbf.updates import Ascent as Ascent
    from pyro_evidence.prbf.updates import em as em
    from pyro_evidence.prbf.updates import exact_m_step as exact_m_step
    from pyro_evidence.prbf.updates import prbf2001_update as prbf2001_update

import_on_demand(__name__)
