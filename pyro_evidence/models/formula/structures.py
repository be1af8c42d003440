"""Covariances of the effects of one group, by the names that glmmTMB has: a table, and the factors in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import pi, tau

import torch
from torch import Tensor

from pyro_evidence.models.formula.expressions import Expression, call


def exchangeable_tril(rho: Tensor, size: int) -> Tensor:
    """Cholesky factor of correlations that are all ``rho``, ``(size, size)``."""
    before = torch.arange(size, dtype=rho.dtype, device=rho.device)
    explained = rho.square() * before / (1.0 + (before - 1.0) * rho)  # share of a variance by those before
    spread = (1.0 - explained).sqrt()
    return ((rho - explained) / spread).expand(size, size).tril(-1) + spread.diag()


def autoregressive_tril(rho: Tensor, size: int) -> Tensor:
    """Cholesky factor of correlations ``rho ** lag`` of equally spaced values, ``(size, size)``."""
    powers = [torch.ones_like(rho)]
    for _ in range(size - 1):
        powers.append(powers[-1] * rho)
    steps = torch.arange(size, device=rho.device)
    correlation = torch.stack(powers)[(steps.unsqueeze(-1) - steps).abs()].tril()
    return torch.cat([correlation[:, :1], correlation[:, 1:] * (1.0 - rho.square()).sqrt()], 1)


def spectral_scale(ell: Tensor, size: int, width: float) -> Tensor:
    """Standard deviations of sines whose sum is a Gaussian process of variance one, ``(size,)``.

    Riutort-Mayol et al. (2023), section 3.1, of the squared exponential kernel between ``-width`` and ``width``; what
    norms the sines there, ``1 / sqrt(width)``, is here.
    """
    ratio = ell / width
    frequency = 0.5 * pi * torch.arange(1, size + 1, dtype=ell.dtype, device=ell.device)
    return (tau**0.5 * ratio).sqrt() * (-0.25 * (frequency * ratio).square()).exp()


@dataclass(frozen=True, eq=False)
class Structure:
    """A row of the table.

    :ivar scale: standard deviations of the effects, or a factor of their covariance, from ``sd``, the parameter ``p``,
        the ``size`` of a group and the ``width`` of a range.
    :ivar parameter: how the name of its parameter begins; empty where it has none.
    :ivar constraint: of the parameter.
    :ivar single: whether the effects of a group have one standard deviation.
    :ivar factor: whether the scale is a factor of a covariance.
    :ivar outside: whether effects are of variance one and multiplied by their scales, of which some are next to zero.
    :ivar least: the smallest that the parameter can be: a correlation, or a length that the sines can tell.
    :ivar weak: a prior of the parameter that says little; a length is five times the least in the mean.
    """

    scale: Expression
    parameter: str = ""
    constraint: str = "correlation"
    single: bool = False
    factor: bool = True
    outside: bool = False
    least: Expression | float = -1.0
    weak: str = "Uniform({least:.6g}, 1)"


SD, P, SIZE, WIDTH = map(Expression, ("sd", "p", "size", "width"))
PROCESS = Structure(
    SD * call(spectral_scale, P, SIZE, WIDTH),
    "ell",
    "length",
    single=True,
    factor=False,
    outside=True,
    least=WIDTH * 1.75 / SIZE,  # Riutort-Mayol et al. (2023), section 4: of shorter ones too few sines are there
    weak="InverseGamma(3, {ten:.3g})",
)
STRUCTURES: Mapping[str, Structure] = {
    "us": Structure(SD.unsqueeze(-1) * P, "L", "corr_cholesky", weak="LKJ(1)"),
    "diag": Structure(SD, factor=False),
    "cs": Structure(SD.unsqueeze(-1) * call(exchangeable_tril, P, SIZE), "rho", least=-1.0 / (SIZE - 1.0)),
    "ar1": Structure(SD * call(autoregressive_tril, P, SIZE), "rho", single=True),
}
