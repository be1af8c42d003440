"""Latent spaces that can be turned at no cost: where they are, found by values at random points, never by names.

Where a density stays the same when the last axis of a latent site is turned, its modes form an orbit: the curvature
is zero along it, and Laplace's approximation about one point of it has no meaning.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from pyro_evidence.errors import UnsupportedModel
from pyro_evidence.numerics.coordinates import Coordinate, is_identity
from pyro_evidence.program.log_joint import LogJoint

# Sites that turn together; of each all, or one element of its first axis.
Turn = tuple[tuple[str, int | None], ...]
LARGEST = 64  # latent dimensions
MOST_PARTS = 16  # elements of a first axis that are turned one by one


def refuse_orbits(joint: LogJoint) -> None:
    """Refuse a latent space that can be turned to an engine that would take one point of its orbit for a mode.

    :raises UnsupportedModel: with the sites that turn, and the engine that integrates over all turns.
    """
    for turn in _proposals(joint):
        if _changes_nothing(joint, turn):
            names = " and ".join(f"'{name}'" for name, _ in turn)
            raise UnsupportedModel(
                f"the latent space of site {names} can be turned without any change of the density: its "
                "curvature has eigenvalues of zero, and Laplace's approximation about one point no meaning. Fit a "
                "mixture of probabilistic PCA by EvidenceEM(model).run(Y), which integrates over all turns; elsewhere "
                "hold the turn by zeros above the diagonal of the loadings, or offer a single latent."
            )


def _proposals(joint: LogJoint) -> Iterator[Turn]:
    """Sites alone, then all that end in the same number of dimensions, then the parts of those with three axes."""
    sites = [p for p in joint.latents if _has_a_space(p)]
    for site in sites:
        yield ((site.name, None),)
    for size in sorted({p.shape[-1] for p in sites}):
        together: Turn = tuple((p.name, None) for p in sites if p.shape[-1] == size)
        if len(together) > 1:
            yield together
    for site in sites:
        if len(site.shape) > 2 and 1 < site.shape[0] <= MOST_PARTS:
            yield from (((site.name, k),) for k in range(site.shape[0]))


def _has_a_space(site: Coordinate) -> bool:
    return len(site.shape) > 1 and 1 < site.shape[-1] <= LARGEST and is_identity(site.transform)


def _changes_nothing(joint: LogJoint, turn: Turn) -> bool:
    """Whether the density is the same after a random turn at two random points, though the data see what is turned."""
    generator = torch.Generator().manual_seed(0)
    tolerance = float(torch.finfo(joint.dtype).eps ** 0.55)
    for _ in range(2):
        u = torch.randn(joint.latents.size, generator=generator, dtype=torch.float64)
        turned, shrunk = _turned(joint, turn, u, generator), _scaled(joint, turn, u, 0.5)
        values = joint.log_joint(torch.stack([u, turned, shrunk]).to(joint.device), joint.initial_theta).detach()
        rounding = tolerance * (1.0 + values[0].abs())
        if not bool((values[1] - values[0]).abs() <= rounding):
            return False
        if bool((values[2] - values[0] - _prior_change(joint, turn, u)).abs() <= rounding):
            return False  # only the prior sees it: its mode is a point
    return True


def _parts(joint: LogJoint, turn: Turn, u: Tensor) -> Iterator[Tensor]:
    """Views of what turns, latent dimensions last."""
    for name, element in turn:
        site = next(p for p in joint.latents if p.name == name)
        value = u[joint.latents.slices[name]].reshape(site.shape)
        yield value if element is None else value[element]


def _turned(joint: LogJoint, turn: Turn, u: Tensor, generator: torch.Generator) -> Tensor:
    u = u.clone()
    parts = list(_parts(joint, turn, u))
    size = parts[0].shape[-1]
    rotation = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=u.dtype)).Q
    for part in parts:
        part.copy_(part @ rotation)
    return u


def _scaled(joint: LogJoint, turn: Turn, u: Tensor, factor: float) -> Tensor:
    u = u.clone()
    for part in _parts(joint, turn, u):
        part.mul_(factor)
    return u


def _prior_change(joint: LogJoint, turn: Turn, u: Tensor) -> Tensor:
    """How much the log prior of the sites that turn changes when they are halved, nats."""
    names = {name for name, _ in turn}
    logs = []
    for point in (u, _scaled(joint, turn, u, 0.5)):
        trace = joint.trace(point.to(joint.device), joint.initial_theta)
        logs.append(torch.stack([trace.nodes[n]["fn"].log_prob(trace.nodes[n]["value"]).sum().double() for n in names]))
    return (logs[1] - logs[0]).sum().detach()
