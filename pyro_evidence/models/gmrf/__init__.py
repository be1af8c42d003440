"""Gaussian Markov random fields as Pyro distributions: random walks, autoregressions, fields on graphs.

A field is a sum of squares of differences, ``-1/2 sum_f precision_f (c_f' x[index_f])^2``, each of a few values; its
log determinant is exact.  Differences alone say nothing about the level (for a second-order walk, nor about the slope).
Without ``level`` that part is taken away, exactly: the values of each connected part sum to zero, and samplers and
engines move in the remaining coordinates only.  With ``level``, a standard deviation, the first value of each part
(of a second-order walk, the first two) is normal around zero; differences keep the very same distribution, and the
field takes the place of an intercept.  This form is sparse: write it for large fields.

    >>> from pyro_evidence.models.gmrf import RandomWalk
    >>> walk = RandomWalk(scale=0.5, size=100)
    >>> round(float(walk.sample().sum()), 4) == 0.0
    True

Rue and Held (2005), Gaussian Markov Random Fields, chapters 2 and 3.
"""

from pyro_evidence.models.gmrf.chains import AR, AR1, OrnsteinUhlenbeck, RandomWalk, Seasonal
from pyro_evidence.models.gmrf.composed import GMRF, Kronecker
from pyro_evidence.models.gmrf.field import GaussianField
from pyro_evidence.models.gmrf.graphs import BYM2, CAR, ICAR, SAR, Lattice, Leroux, Neighbours, lattice
from pyro_evidence.models.gmrf.mesh import Matern, Mesh
from pyro_evidence.models.gmrf.priors import PCCorrelation, PCRange, PCScale

__all__ = [
    "AR",
    "AR1",
    "BYM2",
    "CAR",
    "GMRF",
    "ICAR",
    "SAR",
    "GaussianField",
    "Kronecker",
    "Lattice",
    "Leroux",
    "Matern",
    "Mesh",
    "Neighbours",
    "OrnsteinUhlenbeck",
    "PCCorrelation",
    "PCRange",
    "PCScale",
    "RandomWalk",
    "Seasonal",
    "lattice",
]
