r"""What whole groups of rows add to the log density of the coordinates ``w`` that all groups share.

.. math:: \hat\ell(w, \theta) = \max_b \log p(D, b \mid w, \theta), \qquad
    h(w, \theta) = \tfrac n2 \log 2\pi - \tfrac12 \log|B(\hat b, w, \theta)|

for the groups' own coordinates ``b`` ``(n,)``, whose precision ``B`` is block-diagonal.  Both are sums over chunks, and
minus the second derivative of the first is the chunk's Schur complement, so that Laplace's approximation of everything
is, with ``S`` the sum of these and of the prior's,

.. math:: \log p(D) \approx \log p(\hat w) + \sum \hat\ell + \sum h + \tfrac P2 \log 2\pi - \tfrac12 \log|S|.

The mode follows ``w`` and the hyperparameters by one Newton step from where it was found, which is exact to first
order; a maximum whose place is so exact has its first three derivatives exact.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from pyro_evidence.laplace.blocks.local import Modes, block_modes, local, solved
from pyro_evidence.laplace.blocks.partition import Partition
from pyro_evidence.laplace.blocks.terms import BlockDensity, Terms
from pyro_evidence.numerics import derivatives
from pyro_evidence.numerics.derivatives import pullback
from pyro_evidence.structure.streamed import Summands, Totals


@dataclass
class Last:
    """Where the modes of a chunk's groups were found last, kept from pass to pass."""

    own: Tensor  # (n,)
    place: tuple[Tensor, Tensor] | None = None  # shared coordinates and hyperparameters
    modes: Modes | None = None


@dataclass(frozen=True)
class Groups:
    """The groups of one chunk as a density of what all groups share."""

    density: BlockDensity
    last: Last
    tolerance: float  # squared length of a step in posterior standard deviations that counts as none

    @property
    def partition(self) -> Partition:
        """The coordinates of the groups, and the shared ones."""
        return self.density.partition

    def modes(self, w: Tensor, theta: Tensor) -> Modes:
        """Of all groups, given shared coordinates ``(P,)``, searched from where they were found last."""
        place, last = (w.detach(), theta.detach()), self.last
        if last.modes is None or last.place is None or not all(map(torch.equal, last.place, place)):
            found = block_modes(self.density.terms(place[1]), last.own, place[0], self.tolerance)
            last.own, last.place, last.modes = found.own, (place[0].clone(), place[1].clone()), found
        return last.modes

    def following(self, w: Tensor, theta: Tensor) -> tuple[Terms, Tensor]:
        """The terms, and the modes as a function of shared coordinates and hyperparameters, ``(n,)``."""
        modes, terms = self.modes(w, theta), self.density.terms(theta)
        start = modes.own.detach().requires_grad_()
        rise = pullback(terms(start.unsqueeze(0), w).sum(), start, create_graph=True)
        return terms, start.detach() + solved(self.partition, modes.tril, rise)


def _profile(groups: Groups, w: Tensor, theta: Tensor) -> Tensor:
    terms, own = groups.following(w, theta)
    return terms(own.unsqueeze(0), w).sum()


def _integral(groups: Groups, w: Tensor, theta: Tensor) -> Tensor:
    terms, own = groups.following(w, theta)
    found = local(terms, own, w, create_graph=True).curvature
    logs = [torch.linalg.cholesky(B).diagonal(dim1=-2, dim2=-1).log().sum() for B in found]
    return 0.5 * len(own) * math.log(math.tau) - torch.stack(logs).sum()


OfRow = Callable[[Groups, Tensor, Tensor], Tensor]


def _of_rows(one: OfRow, groups: Groups, u: Tensor, theta: Tensor) -> Tensor:
    """Of rows ``(R, P)``; nan where groups have no mode, so that a search turns back there, on all processes."""
    found, thetas = [], theta.expand(len(u), -1)
    with torch.enable_grad():
        for w, t in zip(u, thetas, strict=True):
            try:
                found.append(one(groups, w, t))
            except (ArithmeticError, LinAlgError):
                found.append((w.sum() + t.sum()) * torch.nan)
    value = torch.stack(found)
    return value if u.requires_grad or theta.requires_grad else value.detach()


def value(groups: Groups, u: Tensor, theta: Tensor) -> Tensor:
    """The highest log density of groups and data, nats, ``(R,)``."""
    return _of_rows(_profile, groups, u, theta)


@torch.enable_grad()
def slope(groups: Groups, u: Tensor, theta: Tensor) -> Tensor:
    """Its derivative in shared coordinates, which require a gradient, ``(R, P)``."""
    return pullback(value(groups, u, theta).sum(), u, create_graph=True)


@torch.enable_grad()
def precision(groups: Groups, u: Tensor, theta: Tensor) -> Tensor:
    """Minus its second derivative, ``(R, P, P)``: the groups' Schur complement."""
    graph = u.requires_grad or theta.requires_grad
    return -derivatives.hessian(lambda v, t: value(groups, v, t), u, theta, create_graph=graph)


def integral(groups: Groups, u: Tensor, theta: Tensor) -> Tensor:
    """What the Gaussian integral over the groups adds, nats, ``(R,)``; its first derivatives are exact."""
    return _of_rows(_integral, groups, u, theta)


@torch.enable_grad()
def _totals(groups: Groups, u: Tensor, theta: Tensor) -> Totals:
    u = u.detach().requires_grad_()
    height, rise, second = derivatives.sloped(lambda v, t: value(groups, v, t), u, theta)
    return Totals(height.detach(), rise.detach(), -second(False))


PROFILE = Summands(value, slope, precision, _totals)
