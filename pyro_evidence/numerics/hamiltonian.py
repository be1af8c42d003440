"""Hamiltonian Monte Carlo of many chains at once, in the metric of a posterior precision."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.numerics.batched import Batched

WARM_UP = 3  # trajectories after which draws of the approximation are forgotten: of a normal density one is enough
TOO_LONG, TOO_SHORT = 0.6, 0.9  # mean acceptance below and above which steps are changed; Betancourt (2014): about 0.8
SPREAD = 0.2  # of steps about their size, so that no trajectory is as long as a period


@dataclass(frozen=True)
class Chains(Batched):
    """Where chains are: positions ``(C, D)``, log density ``(C,)`` in nats and its gradient ``(C, D)``."""

    u: Tensor
    log_density: Tensor
    slope: Tensor


def trajectory(
    gradient: Callable[[Tensor], tuple[Tensor, Tensor]], metric: Any, here: Chains, white: Tensor, step: float
) -> tuple[Chains, Tensor]:
    r"""One trajectory of each chain by leapfrog steps, a quarter of a normal density's period long.

    By velocities ``v = A^-1 p`` from ``N(0, A^-1)``: a half step of ``h`` along the gradient ``g`` adds ``h A^-1 g`` to
    them and :math:`h v'g + h^2 g'A^{-1}g / 2` to the kinetic energy :math:`v'Av / 2`, so that no product with ``A``
    is taken.  Neal (2011).

    :param metric: a precision ``A``, which can ``solve`` and ``unwhiten`` rows.
    :param white: standard normal noise, ``(C, D)``, zero in coordinates that stay.
    :return: the chains afterwards, and the probability with which each was moved, ``(C,)``.
    """
    velocity, kinetic, now, half = metric.unwhiten(white), 0.5 * white.square().sum(-1), here, 0.5 * step
    before = kinetic - here.log_density
    pull = metric.solve(here.slope)
    for _ in range(num_steps(step)):
        kinetic = kinetic + half * ((velocity + 0.5 * half * pull) * now.slope).sum(-1)
        velocity = velocity + half * pull
        moved = now.u + step * velocity
        now = Chains(moved, *gradient(moved))
        pull = metric.solve(now.slope)
        kinetic = kinetic + half * ((velocity + 0.5 * half * pull) * now.slope).sum(-1)
        velocity = velocity + half * pull
    acceptance = (before - kinetic + now.log_density).nan_to_num(nan=-math.inf).clamp(max=0.0).exp()
    return now, acceptance


def first_step(active: Tensor) -> float:
    """Step of the first trajectory: errors of the energy are then as large in any dimension."""
    return max(1, int(active.sum())) ** -0.25


def num_steps(step: float) -> int:
    """Number of steps that make a quarter of a period."""
    return max(1, round(0.5 * math.pi / step))


def draws(
    gradient: Callable[[Tensor], tuple[Tensor, Tensor]],
    metric: Any,
    start: Tensor,
    active: Tensor,
    generator: torch.Generator,
) -> Iterator[tuple[Tensor, Tensor] | None]:
    """Positions ``(C, D)`` of all chains after each trajectory, without end, and its noise; None while they warm up.

    Were the density normal with that precision, a trajectory would end near the noise's own draw: what differs between
    these two is what the density is not normal by.

    :param start: draws of an approximation whose precision is ``metric``.
    :param active: which coordinates move, bool ``(D,)``.
    """

    def noise(*shape: int, uniform: bool = False) -> Tensor:
        make = torch.rand if uniform else torch.randn
        return make(*shape, generator=generator, dtype=torch.float64).to(start.device)

    def masked(u: Tensor) -> tuple[Tensor, Tensor]:
        value, slope = gradient(u)
        return value.double(), torch.where(active & slope.isfinite(), slope, 0.0).double()

    here = Chains(start.double(), *masked(start.double()))
    step = first_step(active)
    for count in range(2**62):
        length = step * (1.0 + SPREAD * (2.0 * float(noise(1, uniform=True)) - 1.0))
        white = noise(*start.shape) * active
        there, acceptance = trajectory(masked, metric, here, white, length)
        taken = noise(len(start), uniform=True) < acceptance
        here = there.where(taken, here)
        if count < WARM_UP:
            mean = float(acceptance.mean())
            step *= 0.5 if mean < TOO_LONG else 1.3 if mean > TOO_SHORT else 1.0
        yield (here.u, white) if count >= WARM_UP else None
