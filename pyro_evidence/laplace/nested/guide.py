"""A posterior with outer sites where Pyro expects a guide."""

from typing import Any, ClassVar

import torch
from pyro import poutine
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence.laplace.approximation import LaplaceState
from pyro_evidence.laplace.guide import LaplaceGuide
from pyro_evidence.laplace.nested import whole
from pyro_evidence.laplace.nested.integration import Integral
from pyro_evidence.laplace.nested.whole import Places

SCALAR = torch.Size()


class NestedGuide(LaplaceGuide):
    """A callable with the model's arguments that samples outer and inner sites together, as an AutoGuide does.

    One auxiliary site, ``_laplace_latent``, holds all unconstrained coordinates; the sites are transforms of it,
    Jacobian counted.  Inner modes are solved anew at each draw, on the data of the fit; the arguments are not looked
    at.  It can be pickled if the model can.
    """

    def __init__(self, state: LaplaceState, integral: Integral, places: Places) -> None:
        super().__init__(state)
        self.gaussian: Any = NestedMixture(integral, places)


class NestedMixture(TorchDistribution):
    """Outer coordinates from their continuous density, inner ones from Laplace's approximation given them."""

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = constraints.real_vector
    has_rsample = False

    def __init__(self, integral: Integral, places: Places, batch_shape: torch.Size = SCALAR) -> None:
        self.integral = integral
        self.places = places
        size = len(places.outer) + len(places.inner)
        super().__init__(batch_shape, torch.Size([size]), validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "NestedMixture":
        """The same for every cell of a batch."""
        return NestedMixture(self.integral, self.places, torch.Size(batch_shape))

    def sample(self, sample_shape: Any = SCALAR) -> Tensor:
        """Draws of all unconstrained coordinates, from torch's generator."""
        shape = self._extended_shape(torch.Size(sample_shape))
        white = torch.randn(shape, dtype=torch.float64).to(self.places.outer.device)
        with poutine.block():  # the runs inside are nobody else's
            return whole.drawn(self.integral, self.places, white.reshape(-1, shape[-1])).u.reshape(shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of unconstrained coordinates, nats."""
        rows = value.reshape(-1, value.shape[-1])
        with poutine.block():
            return whole.log_density(self.integral, self.places, rows).reshape(value.shape[:-1])
