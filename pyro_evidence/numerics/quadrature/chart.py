"""Coordinates of the outer sites in which their density is nearly standard normal."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_evidence.numerics.quadrature import axis_map
from pyro_evidence.numerics.quadrature.axis_map import AxisMap

PROBES = (-6.4, -4.8, -3.2, -2.4, -1.6, -0.8, 0.0, 0.8, 1.6, 2.4, 3.2, 4.8, 6.4)  # standard deviations


@dataclass(frozen=True)
class Chart:
    """``phi = centre + basis t``, ``t`` a smooth function of ``z`` on each axis.

    :ivar centre: the outer mode, unconstrained, shape ``(d,)``.
    :ivar basis: eigenvectors of the curvature there, each one standard deviation long, as columns ``(d, d)``.
    :ivar axes: from ``z`` to ``t``.
    """

    centre: Tensor
    basis: Tensor
    axes: AxisMap

    @property
    def num_dims(self) -> int:
        """Number of outer coordinates."""
        return len(self.centre)

    def forward(self, z: Tensor) -> Tensor:
        """From ``z`` to unconstrained outer coordinates, ``(..., d)``."""
        return self.centre + self.axes.forward(z) @ self.basis.mT

    def inverse(self, phi: Tensor) -> Tensor:
        """From unconstrained outer coordinates to ``z``, ``(..., d)``."""
        return self.axes.inverse(torch.linalg.solve(self.basis, (phi - self.centre).mT).mT)

    def log_slope(self, z: Tensor) -> Tensor:
        """``log |d phi / d z|``, shape ``(...)``."""
        return self.axes.log_slope(z) + torch.linalg.slogdet(self.basis).logabsdet

    def probes(self) -> Tensor:
        """Points on each axis, ``(d * J, d)`` in ``phi``, at which :meth:`bent` wants the log density."""
        d = self.num_dims
        steps = self.centre.new_tensor(PROBES)
        t = torch.eye(d).to(self.centre).unsqueeze(1) * steps[None, :, None]
        return self.centre + t.reshape(-1, d) @ self.basis.mT

    def bent(self, log_density: Tensor) -> "Chart":
        """With axes mapped so that each looks normal.

        :param log_density: at :meth:`probes`, nats, ``(d * J,)``.
        """
        steps = self.centre.new_tensor(PROBES).expand(self.num_dims, -1)
        return replace(self, axes=axis_map.fitted(steps, log_density.reshape(self.num_dims, -1)))


def chart(centre: Tensor, precision: Tensor) -> Chart:
    """Straight axes along the eigenvectors of a precision ``(d, d)``, the widest first."""
    values, vectors = torch.linalg.eigh(precision)
    return Chart(centre, vectors * values.rsqrt(), axis_map.identity(len(centre)))
