"""Whether the log joint falls away from its mode on all sides, as that of a proper posterior does."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.curvature.dense import Precision
from pyro_evidence.errors import ImproperPosterior
from pyro_evidence.numerics.coordinates import Coordinates
from pyro_evidence.numerics.newton import Density

FAR = (10.0, 30.0, 100.0)  # standard deviations
LEAST = 1.0  # nats, at one of them
NEAR = 2.0  # standard deviations, where a normal density has fallen by 2 nats
LEAST_FALL = 0.2  # nats, there
ON_THE_WAY = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, NEAR)
AT_ONCE = 22  # places
LEAST_DIP = 0.01  # nats below the far end, somewhere before it
FAR_OUT = 1e8  # times the mode, or where a coordinate is as large


@dataclass(frozen=True)
class Summit:
    """A mode and the density around it.

    :ivar u: the mode, shape ``(D,)``.
    :ivar height: the log joint there, nats.
    :ivar active: coordinates that are not pruned, bool, shape ``(D,)``.
    """

    density: Density
    u: Tensor
    theta: Tensor
    height: Tensor
    active: Tensor

    def fall(self, moves: Tensor) -> Tensor:
        """How far the log joint has fallen at ``u`` plus each move ``(P, D)``, nats, shape ``(P,)``."""
        with torch.no_grad():
            return self.height - self.density.log_joint(self.u + moves, self.theta)


def require_proper(summit: Summit, precision: Precision, latents: Coordinates) -> None:
    """Walk away from the mode along its flattest direction, and along the ray from the origin through each site.

    A mode at infinity is not found by its curvature, which is rounding there: but further out on the ray the density
    is as high.

    :raises ImproperPosterior: when the log joint stays up on one side.
    """
    direction = precision.weakest(summit.active)[0]
    if _falls_at_once(summit, direction, latents):
        return
    steps = torch.tensor((*FAR, *ON_THE_WAY)).to(direction)[:, None] * direction
    rays = _rays(summit, latents)
    most = 2 * len(steps)
    moves = torch.cat([steps, -steps, *(r for _, r in rays)])
    falls = torch.cat([summit.fall(part) for part in moves.split(most)])
    along = falls[:most].reshape(2, len(steps))
    if _stays_up(along[:, : len(FAR)]):
        raise _letter(latents.label(int(direction.abs().argmax())), f"{FAR[-1]:g} posterior standard deviations away")
    if _level(along[:, len(FAR) :]):
        raise _letter(latents.label(int(direction.abs().argmax())), f"{NEAR:g} posterior standard deviations away")
    _require_fall(rays, falls[most:], latents)


def _falls_at_once(summit: Summit, direction: Tensor, latents: Coordinates) -> bool:
    """Whether a few of the places that are looked at show already that none of the others matters."""
    places = torch.stack([FAR[0] * direction, -FAR[0] * direction, NEAR * direction, -NEAR * direction])
    moves = torch.cat([places, *(ends[:1] for _, ends in _rays(summit, latents))])
    falls = torch.cat([summit.fall(part) for part in moves.split(AT_ONCE)])
    above = torch.cat([falls[:2] - LEAST, falls[2:].abs() - LEAST_FALL])
    return bool((above >= 0.0).all())


def require_fall_on_rays(summit: Summit, latents: Coordinates) -> None:
    """Walk out on the ray from the origin through the mode, and through each site's part of it alone.

    :raises ImproperPosterior: when the log joint stays where it is.
    """
    rays = _rays(summit, latents)
    falls = [summit.fall(ends) for _, ends in rays]
    _require_fall(rays, torch.cat(falls) if falls else summit.u[:0], latents)


def _rays(summit: Summit, latents: Coordinates) -> list[tuple[int, Tensor]]:
    """The largest coordinate of each ray, and the moves ``(2, D)`` to twice the mode and to its far end."""
    rays = []
    for block in [slice(0, len(summit.u)), *latents.slices.values()]:
        ray = torch.zeros_like(summit.u)
        ray[block] = summit.u[block] * summit.active[block]
        largest = int(ray.abs().argmax())
        if bool(ray[largest] != 0.0):
            end = FAR_OUT * max(1.0, float(1.0 / ray[largest].abs()))
            rays.append((largest, torch.stack([ray, end * ray])))
    return rays


def _require_fall(rays: list[tuple[int, Tensor]], falls: Tensor, latents: Coordinates) -> None:
    """Refuse a log joint that is where it was both at twice the mode and at the far end of a ray through it."""
    for (largest, _), fall in zip(rays, falls.reshape(-1, 2), strict=True):
        if bool((fall.abs() < LEAST_FALL).all()):
            raise _letter(latents.label(largest), "at twice the mode and far beyond")


def _stays_up(falls: Tensor) -> bool:
    """Whether the log joint is within 1 nat of the mode at 10, 30 and 100 standard deviations on one side.

    :param falls: on either side, shape ``(2, 3)``.
    """
    return bool((falls < LEAST).all(-1).any())


def _level(falls: Tensor) -> bool:
    """Whether the log joint is where it was at two standard deviations on one side, without a dip on the way.

    Behind a dip there is another mode: a second labelling, for one.

    :param falls: on either side, on the way there.
    """
    dip = falls[:, :-1].amax(-1) - falls[:, -1]
    return bool(((falls[:, -1].abs() < LEAST_FALL) & (dip < LEAST_DIP)).any())


def _letter(where: str, distance: str) -> ImproperPosterior:
    return ImproperPosterior(
        f"the log joint is as high as at its maximum {distance}, along a direction that points at {where}: the "
        f"posterior is improper or nearly so, or its mode lies at infinity (separable classes, collinear columns, a "
        f"flat prior). Give that site a proper prior, for example Normal(0, 10) on standardised inputs."
    )
