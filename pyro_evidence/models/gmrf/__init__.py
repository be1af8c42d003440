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

from typing import TYPE_CHECKING

from pyro_evidence.lazy_import import import_on_demand

if TYPE_CHECKING:  # at run time each is imported when it is first asked for
    from pyro_evidence.models.gmrf.chains import AR as AR
    from pyro_evidence.models.gmrf.chains import AR1 as AR1
    from pyro_evidence.models.gmrf.chains import OrnsteinUhlenbeck as OrnsteinUhlenbeck
    from pyro_evidence.models.gmrf.chains import RandomWalk as RandomWalk
    from pyro_evidence.models.gmrf.chains import Seasonal as Seasonal
    from pyro_evidence.models.gmrf.composed import GMRF as GMRF
    from pyro_evidence.models.gmrf.composed import Kronecker as Kronecker
    from pyro_evidence.models.gmrf.field import GaussianField as GaussianField
    from pyro_evidence.models.gmrf.graphs import BYM2 as BYM2
    from pyro_evidence.models.gmrf.graphs import CAR as CAR
    from pyro_evidence.models.gmrf.graphs import ICAR as ICAR
    from pyro_evidence.models.gmrf.graphs import SAR as SAR
    from pyro_evidence.models.gmrf.graphs import Lattice as Lattice
    from pyro_evidence.models.gmrf.graphs import Leroux as Leroux
    from pyro_evidence.models.gmrf.graphs import Neighbours as Neighbours
    from pyro_evidence.models.gmrf.graphs import lattice as lattice
    from pyro_evidence.models.gmrf.mesh import Matern as Matern
    from pyro_evidence.models.gmrf.mesh import Mesh as Mesh
    from pyro_evidence.models.gmrf.priors import PCCorrelation as PCCorrelation
    from pyro_evidence.models.gmrf.priors import PCRange as PCRange
    from pyro_evidence.models.gmrf.priors import PCScale as PCScale

import_on_demand(__name__)
