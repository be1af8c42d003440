"""Whether an approximation's means and standard deviations are those of the exact density, with Monte Carlo errors."""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.numerics.importance import Smoothed
from pyro_evidence.posterior.base import varies

# Shifts of a mean, in standard deviations, and ratios of two standard deviations: what nobody need hear of, what is
# said once it is known, and what must not be passed over in silence.
HARMLESS, NOTABLE, HARMFUL = 0.1, 0.15, 0.3
LEVEL = 0.01  # probability of a wrong sentence among all elements
WEIGHED = "take draws from posterior.importance_resampled(...)"


@dataclass(frozen=True)
class Elements:
    """Draws of all elements that vary, standardised by an approximation's moments.

    :ivar names: site and place of each, ``(K,)``, and ``kept`` which of all elements these are.
    """

    names: tuple[tuple[str, tuple[int, ...]], ...]
    kept: Tensor
    mean: Tensor
    sd: Tensor

    @classmethod
    def of(cls, draws: Mapping[str, Tensor]) -> "Elements":
        """The elements of draws ``(S,) + site shape`` of an approximation."""
        x = columns(draws)
        kept = torch.isfinite(x.std(0)) & varies(x)
        names = [(n, place) for n, v in draws.items() for place in itertools.product(*map(range, v.shape[1:]))]
        own = tuple(name for name, keep in zip(names, kept.tolist(), strict=True) if keep)
        mean = x[:, kept].mean(0)
        return cls(own, kept, mean, (x[:, kept] - mean).square().mean(0).sqrt())

    def standardised(self, draws: Mapping[str, Tensor]) -> Tensor:
        """Other draws in units of these moments, ``(S, K)``."""
        return (columns(draws)[:, self.kept] - self.mean) / self.sd


def columns(draws: Mapping[str, Tensor]) -> Tensor:
    """Draws of all sites side by side, ``(S, K)``."""
    return torch.cat([v.reshape(len(v), -1).double() for v in draws.values()], 1)


@dataclass(frozen=True)
class Shifts:
    """Corrections of an approximation's moments by the exact density, each ``(K,)``.

    :ivar mean: change of the mean in standard deviations, and ``log_sd`` the log ratio of standard deviations, each
        with its standard error.
    :ivar method: how it was found, and ``remedy`` what to do where they are off.
    """

    names: tuple[tuple[str, tuple[int, ...]], ...]
    mean: Tensor
    mean_error: Tensor
    log_sd: Tensor
    log_sd_error: Tensor
    method: str
    remedy: str

    @property
    def reach(self) -> float:
        """Standard errors within which all of these numbers are at once, but for :data:`LEVEL`."""
        return -float(torch.special.ndtri(torch.tensor(0.25 * LEVEL / max(1, len(self.names)), dtype=torch.float64)))

    @property
    def scaled(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Means, and ratios of deviations as if shifts of means, beside their errors."""
        away = self.log_sd.abs()
        return (self.mean.abs(), self.mean_error), (away.expm1(), self.log_sd_error * away.exp())

    @property
    def largest_error(self) -> float:
        """Within which the least known of these numbers is, in standard deviations or as a share of one."""
        return self.reach * float(torch.stack([error for _, error in self.scaled]).amax()) if self.names else 0.0

    @property
    def alarms(self) -> tuple[Tensor, Tensor]:
        """Which means, and which standard deviations, are off for certain, bool ``(K,)``."""
        mean, sd = ((value > NOTABLE) & (value - self.reach * error > HARMLESS) for value, error in self.scaled)
        return mean, sd

    def unknown(self, most: float = HARMFUL) -> tuple[Tensor, Tensor]:
        """Which may be off by more than that, bool ``(K,)``."""
        mean, sd = (~(value + self.reach * error < most) for value, error in self.scaled)
        return mean, sd

    def is_settled(self, most: float = HARMFUL) -> bool:
        """Whether something is off for certain, or nothing by more than that."""
        return bool(torch.stack(self.alarms).any()) or not bool(torch.stack(self.unknown(most)).any())


def by_weights(
    elements: Elements, draws: Mapping[str, Tensor], judged: Mapping[str, Tensor], smoothed: Smoothed
) -> Shifts:
    """By self-normalised importance weights; errors by the delta method.

    :param draws: that were weighed.
    :param judged: those of the approximation, of the same noise.
    """
    z, beside, weights = elements.standardised(draws), elements.standardised(judged), smoothed.weights.double()
    mean, own, weight = weights @ z, 1.0 / len(z), weights.unsqueeze(-1)
    away = (z - mean).square()
    variance = weights @ away
    mean_error = (weight * (z - mean) - own * beside).square().sum(0).sqrt()
    log_sd_error = 0.5 * (weight * (away / variance - 1.0) - own * (beside.square() - 1.0)).square().sum(0).sqrt()
    return Shifts(elements.names, mean, mean_error, 0.5 * variance.log(), log_sd_error, "importance weights", WEIGHED)


@dataclass(frozen=True)
class Moments:
    """Verdicts on means and standard deviations.

    :ivar is_off: whether some are off for certain.
    """

    is_off: bool
    sentences: list[str]


def by_chains(elements: Elements, sums: Tensor, count: int) -> Shifts:
    """By draws of independent chains beside draws of the approximation, whose averages are pairs; errors by these.

    :param sums: of the ``count`` draws of each chain, of their squares, and the same of the approximation's draws, all
        standardised, ``(4, C, K)``.
    """
    means, squares = (sums[i::2] / count for i in (0, 1))  # (2, C, K)
    middle = means.mean(1, keepdim=True)
    spreads = squares - 2.0 * middle * means + middle.square()
    variance = spreads.mean(1, keepdim=True)
    root = (sums.shape[1] * variance[1, 0]).sqrt()
    numbers = (
        (middle[0] - middle[1])[0] / variance[1, 0].sqrt(),
        (means[0] - means[1]).std(0) / root,
        0.5 * (variance[0] / variance[1])[0].log(),
        0.5 * (spreads / variance).diff(dim=0)[0].std(0) / sums.shape[1] ** 0.5,
    )
    method = f"{sums.shape[1] * count:,} draws of Hamiltonian Monte Carlo"
    return Shifts(elements.names, *numbers, method, "run NUTS on posterior.model")


def moments(found: Shifts | None, label: Callable[[str, tuple[int, ...]], str], num: int) -> Moments:
    """The surest error of each kind, by name; else what is not known.

    :param found: None where importance weights of ``num`` draws degenerate, and there was no time for chains.
    """
    if found is None:
        said = f"importance weights of {num:,} draws degenerate, and there was no time for Hamiltonian Monte Carlo"
        return Moments(False, [f"{said}: whether means and standard deviations are right is not known"])
    scaled = zip(found.scaled, found.alarms, found.unknown(), ("mean", "standard deviation"), strict=True)
    off, doubtful = list[str](), list[str]()
    for (value, error), alarms, unknown, what in scaled:
        low, high = value - found.reach * error, value + found.reach * error
        unit = "standard deviations" if what == "mean" else "of it"
        if bool(alarms.any()):
            i = int(torch.where(alarms, low, -math.inf).argmax())
            off.append(f"the {what} of {label(*found.names[i])} is off by {value[i]:.2f} +- {error[i]:.2f} {unit}")
        elif bool(unknown.any()):
            i = int(torch.where(unknown, high.nan_to_num(nan=math.inf), -math.inf).argmax())
            doubtful.append(f"the {what} of {label(*found.names[i])} may be off by up to {high[i]:.2f} {unit}")
    if off:
        return Moments(True, [f"by {found.method} {', '.join(off)}: {found.remedy}"])
    if doubtful:
        return Moments(False, [f"by {found.method}, too few to know, {', '.join(doubtful)}"])
    return Moments(False, [])
