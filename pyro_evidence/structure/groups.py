"""Hyperparameters that are the precision of Gaussian latents, or of Gaussian noise, and nothing else.

A density without the latents whose precision has run to infinity is here too: a mask, never a big number.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from pyro_evidence.numerics.derivatives import Orders, generic_directions, pullback, sole_slopes
from pyro_evidence.numerics.newton import Density
from pyro_evidence.program import predictors
from pyro_evidence.program.sites import log_prob_sum
from pyro_evidence.structure.probes import NearbyPoints, TestPoint

WIDE = 20.0  # change of a log prior precision under which a group must stay one: a factor of e^20
WIDE_NOISE = 4.0  # the same for a noise precision, which the data resist


@dataclass(frozen=True, eq=False)
class PrecisionGroups:
    """Hyperparameters that scale the precision of Gaussian latents or of Gaussian noise, and do nothing else.

    Coordinate ``t`` of the unconstrained hyperparameters is in a group when the log precision of its members is
    ``power[t] * theta[t]`` plus a constant: power 1 for a precision, -1 for a variance, -2 for a scale.
    """

    power: Tensor  # (T,) 0 where theta[t] is not in a group
    member: Tensor  # (D,) the group of each latent coordinate, -1 for none
    noise: dict[str, Tensor]  # observed site -> (n,) the group of each element, -1 for none
    loc: Tensor  # (D,) prior mean of the members, nan where hyperparameters or other latents move it
    offset: Tensor  # (D,) log precision of each member minus power * theta
    follows: Tensor  # (D,) bool, whether other latents move the prior mean
    num_noise: Tensor | None = None  # (T,) elements of noise in each group, where rows at hand are not all there are

    @cached_property
    def is_weight(self) -> Tensor:
        """Which hyperparameters hold precisions of latents about means of no latent's making, shape ``(T,)`` bool.

        Only for them is the number of well-determined parameters the sum of ``1 - precision * variance``.
        """
        found = torch.zeros_like(self.power, dtype=torch.bool)
        found[self.member[self.member >= 0]] = True
        found[self.member[(self.member >= 0) & self.follows]] = False
        return found

    def log_precision(self, theta: Tensor) -> Tensor:
        """Log prior precision of each latent coordinate, 0 for those in no group, shape ``(..., D)``."""
        log_precision = self.offset + (self.power * theta)[..., self.member]  # -1, the last, stands for none
        return torch.where(self.member >= 0, log_precision, 0.0)

    def size(self, active: Tensor) -> Tensor:
        """Number of Gaussian terms that each hyperparameter scales, pruned coordinates left out, shape ``(..., T)``.

        :param active: ``(..., D)`` bool.
        """
        return self.sums(active.double()) + (self.noise_here if self.num_noise is None else self.num_noise)

    @property
    def noise_here(self) -> Tensor:
        """Number of elements of noise that each hyperparameter scales, in the rows at hand, ``(T,)``."""
        owners = torch.cat(list(self.noise.values())) if self.noise else self.member[:0]
        return torch.bincount(owners[owners >= 0], minlength=len(self.power)).double()

    def sums(self, each: Tensor) -> Tensor:
        """Sums of numbers per latent coordinate, ``(..., D)``, over those of each hyperparameter, ``(..., T)``."""
        owner = torch.where(self.member >= 0, self.member, len(self.power))  # the last place takes the others
        total = each.new_zeros(*each.shape[:-1], len(self.power) + 1)
        return total.index_add(-1, owner, each)[..., :-1]


@dataclass(frozen=True, eq=False)
class Pruned:
    """The limit of a density as the precisions of the inactive coordinates go to infinity.

    Those coordinates stay at their prior mean, their prior density is left out, and the precision is the identity on
    them, so that they add nothing to a log determinant.

    :ivar groups: whose coordinates can be inactive; None where all are active.
    :ivar active: ``(D,)`` bool.  None: rows have hyperparameters and masks of their own, handed over as ``theta``,
        ``(R, T + D)``.
    """

    density: Density
    groups: PrecisionGroups | None
    active: Tensor | None = None

    @property
    def blocks(self) -> tuple[slice, ...]:
        """The flat coordinates of each latent site."""
        return self.density.blocks

    def read(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Which coordinates are active, and the hyperparameters."""
        if self.active is not None:
            return self.active, theta
        size = self.blocks[-1].stop
        return theta[:, -size:].detach() != 0, theta[:, :-size]

    def held(self, u: Tensor, theta: Tensor) -> Tensor:
        """The rows ``(R, D)`` with inactive coordinates at their prior mean."""
        active, _ = self.read(theta)
        if self.groups is None or bool(active.all()):
            return u
        return torch.where(active, u, torch.where(active, 0.0, self.groups.loc))

    def left_out(self, theta: Tensor) -> Tensor:
        """The log prior density of the inactive coordinates at their mean, nats."""
        active, own = self.read(theta)
        if self.groups is None or bool(active.all()):
            return own.new_zeros(())
        at_mean = 0.5 * (self.groups.log_precision(own) - math.log(math.tau))
        return torch.where(active, 0.0, at_mean).sum(-1)

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        """``log p(D, active w | hyperparameters)``, nats, shape ``(R,)``."""
        return self.density.log_joint(self.held(u, theta), self.read(theta)[1]) - self.left_out(theta)

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint and its gradient in ``u``, zero on pruned coordinates."""
        active, own = self.read(theta)
        value, slope = self.density.gradient(self.held(u.detach(), theta), own)
        return value - self.left_out(theta).detach(), torch.where(active, slope, 0.0)

    def orders(self, u: Tensor, theta: Tensor) -> Orders:
        """The log joint and two derivatives in the active coordinates of ``u``, in one graph."""
        active, own = self.read(theta)
        density: Any = self.density
        found: Orders = density.orders(self.held(u, theta), own)
        slope, A = torch.where(active, found.gradient, 0.0), masked(found.precision, active)
        return Orders(found.log_joint - self.left_out(theta), slope, A)

    def precision(self, u: Tensor, theta: Tensor) -> Tensor:
        """Minus the Hessian in the active coordinates, shape ``(R, D, D)``."""
        return self._masked(self.density.precision, u, theta)

    def precision_diagonal(self, u: Tensor, theta: Tensor) -> Tensor:
        """Diagonal of that, shape ``(R, D)``."""
        return self._masked(self.density.precision_diagonal, u, theta)

    def gauss_newton(self, u: Tensor, theta: Tensor) -> Tensor:
        """Gauss-Newton in the active coordinates, shape ``(R, D, D)``."""
        return self._masked(self.density.gauss_newton, u, theta)

    def _masked(self, curvature: Callable[[Tensor, Tensor], Tensor], u: Tensor, theta: Tensor) -> Tensor:
        active, own = self.read(theta)
        return masked(curvature(self.held(u, theta), own), active)


def masked(A: Tensor, active: Tensor) -> Tensor:
    """A curvature ``(R, D, D)``, or its diagonal, with the identity on coordinates that are not active."""
    if bool(active.all()):
        return A
    keep = active.to(A.dtype)
    if A.dim() == 2:
        return A * keep + (1.0 - keep)
    return A * keep.unsqueeze(-2) * keep.unsqueeze(-1) + (1.0 - keep).diag_embed()


@dataclass(frozen=True, eq=False)
class Guess:
    """Which hyperparameter is thought to own each Gaussian term: ``log precision = power * theta + constant``."""

    power: Tensor  # (T,) 0 where theta[t] owns none
    owner: Tensor  # (n,), -1 for none

    def without(self, bad: Tensor) -> "Guess":
        """The guess without the hyperparameters ``bad``, shape ``(T,)`` bool."""
        power = torch.where(bad, 0.0, self.power)
        return Guess(power, torch.where((power != 0)[self.owner], self.owner, -1))

    def columns(self, terms: Tensor) -> Tensor:
        """The owners of ``terms`` ``(n,)`` bool, shape ``(T,)`` bool."""
        found = torch.zeros_like(self.power, dtype=torch.bool)
        found[self.owner[terms & (self.owner >= 0)]] = True
        return found

    def is_latent(self, origin: TestPoint) -> Tensor:
        """Which terms belong to latent coordinates, not to noise, shape ``(n,)`` bool."""
        return torch.arange(len(self.owner), device=self.owner.device) < origin.u.numel()

    def step(self, origin: TestPoint) -> Tensor:
        """A change of the hyperparameters that is wide in their precisions; those outside groups stay, ``(T,)``."""
        step = torch.where(self.columns(self.is_latent(origin)), WIDE, WIDE_NOISE) / self.power
        return torch.where(self.power != 0, step, 0.0)


def propose(found: NearbyPoints) -> Guess | None:
    """The groups that derivatives at the origin suggest and a typical point does not contradict; None for none.

    :param found: of a model with hyperparameters.
    """
    # the one hyperparameter that each log precision depends on; where terms of one differ, by the largest power: the
    # others then contradict it
    origin, cells = found.origin, found.origin.cells
    slope, owner, sole = sole_slopes(cells.log_precision, origin.theta, _tolerance(origin))
    owner = torch.where(cells.known & sole, owner, -1)
    owned, least = owner >= 0, torch.full_like(origin.theta.detach(), -torch.inf)
    power = least.scatter_reduce(0, owner[owned], slope[owned].to(least), "amax").nan_to_num(neginf=0.0)
    guess = Guess(power, owner).without(power == 0)
    guess = guess.without(guess.columns(_surprising(guess, origin, found.typical)))
    if not bool((guess.power != 0).any()):
        return None
    # hyperparameters that change the log joint otherwise than through the precisions they own
    probe, owned = found.typical, guess.owner >= 0
    held = pullback(probe.cells.log_density[owned].sum(), probe.theta).double()
    total = _slope(probe, guess.power != 0).double()
    count = torch.bincount(guess.owner[owned], minlength=len(held))
    guess = guess.without((total - held).abs() > _tolerance(probe) * (1.0 + total.abs() + held.abs() + count))
    is_latent = guess.is_latent(origin)
    guess = guess.without(guess.columns(is_latent) & guess.columns(~is_latent))  # one or the other, never both
    return guess if bool((guess.power != 0).any()) else None


def _tolerance(probe: TestPoint) -> float:
    return float(torch.finfo(probe.joint.dtype).eps ** 0.5)


def _surprising(guess: Guess, before: TestPoint, after: TestPoint) -> Tensor:
    """Terms whose log precision changes otherwise than expected, or that are Gaussian no more, shape ``(n,)`` bool."""
    first, second = before.cells, after.cells
    if first.known.shape != second.known.shape:  # a site was Gaussian noise in one run only
        return torch.ones_like(first.known)
    moved = guess.power * (after.theta - before.theta).detach()
    change = (second.log_precision - first.log_precision).detach()
    expected = torch.where(guess.owner >= 0, moved[guess.owner], 0.0)
    as_expected = (change - expected).abs() <= _tolerance(before) * (1.0 + expected.abs())
    return first.known & ~(second.known & as_expected)


def _slope(probe: TestPoint, wanted: Tensor) -> Tensor:
    """The slope of the log joint in the ``wanted`` hyperparameters, ``(T,)``, without that of a covariance's factor."""
    joint, nodes = probe.joint, probe.trace.nodes
    dense = []
    for name in joint.latents.names:
        base, shape = predictors.unwrapped(nodes[name]["fn"]).base, nodes[name]["value"].shape[:-1]
        if predictors.is_plain(nodes[name]) and predictors.is_like(base, MultivariateNormal, shape):
            dense.append(name)
    if not dense or joint.discrete or any(_is_moved(nodes[n], probe, wanted) for n in dense):
        return pullback(probe.log_joint, probe.theta)
    others = [n for n in (*joint.latents.names, *joint.observed) if n not in dense]
    return pullback(log_prob_sum(probe.trace, others), probe.theta)


def _is_moved(node: Mapping[str, Any], probe: TestPoint, wanted: Tensor) -> bool:
    """Whether what a multivariate normal is made of depends on one of the ``wanted`` hyperparameters."""
    base = predictors.unwrapped(node["fn"]).base
    spread = next(n for n in ("covariance_matrix", "scale_tril", "precision_matrix") if n in vars(base))
    for value in (base.loc, getattr(base, spread)):
        rows = (value @ generic_directions(1, value.shape[-1], value)[0]).flatten()
        weighed = rows @ generic_directions(2, len(rows), rows)[1]
        if bool((pullback(weighed, probe.theta)[wanted] != 0).any()):
            return True
    return False


def settle(guess: Guess, found: NearbyPoints, far: Sequence[tuple[TestPoint, TestPoint]]) -> PrecisionGroups | None:
    """The groups, if the owners do nothing but what is expected of them, however far they and the latents move.

    :param far: runs with hyperparameters far from where they start, first at the origin's latents, then far out.
    """
    origin, owned = found.origin, guess.owner >= 0
    if any(bool((_surprising(guess, origin, p) & owned).any()) for _, p in far):
        return None
    for base in {id(b): b for b, _ in far}.values():  # at the same latents nothing but the owned precisions changes
        if bool(_surprising(guess, origin, base).any()):
            return None
        change = base.log_joint.detach() - origin.log_joint.detach()
        terms = (base.cells.log_density.detach() - origin.cells.log_density.detach())[owned]
        size = 1.0 + origin.log_joint.detach().abs() + terms.abs().sum()
        if bool(base.log_joint.isfinite()) and not bool((change - terms.sum()).abs() <= origin.joint.rounding * size):
            return None
    loc, precision, _ = (x.detach() for x in origin.prior)
    runs = [found.typical, *(p for pair in far for p in pair)]
    moves = torch.stack([p.prior[0].detach() != loc for p in runs]).any(0)
    follows = [p.prior[0] != base.prior[0] for base, p in far]
    sizes = {n: 0 if cells is None else len(cells[0]) for n, cells in origin.noise.items()}
    member, *owners = guess.owner.split([len(loc), *sizes.values()])
    offset = precision.log() - (guess.power * origin.theta.detach())[member]
    return PrecisionGroups(
        guess.power,
        member,
        dict(zip(sizes, owners, strict=True)),
        torch.where(moves, torch.nan, loc),
        torch.where(member >= 0, offset, 0.0),
        torch.stack([torch.zeros_like(moves), *follows]).any(0),
    )
