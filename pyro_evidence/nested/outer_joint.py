"""A log joint in which some latent sites stand with the hyperparameters, to be integrated outside."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import Problem, laplace_problem
from pyro_evidence.precision.choices import Curvature
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.program.parameters import Declaration
from pyro_evidence.structure.groups import PrecisionGroups


class OuterJoint(LogJoint):
    """``log p(D, inner | outer, hyperparameters)``; ``theta`` holds outer sites, maximised sites and params together.

    The prior of the outer sites is that of their unconstrained coordinates, Jacobian included, so that Laplace's log
    evidence plus :meth:`log_hyperprior` is a density over these coordinates, to be integrated.

    :param outer: names of the sites to integrate outside.
    :param hyper: as for :class:`LogJoint`.
    """

    def __init__(
        self,
        model: Model,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        outer: Sequence[str],
        hyper: Sequence[str] | None = None,
    ) -> None:
        self.outer_sites: tuple[str, ...] = tuple(sorted(outer))
        self._fixed = hyper is not None and not len(hyper)
        super().__init__(model, args, kwargs, hyper=[*(hyper or ()), *outer])

    def _hold(self, declared: Mapping[str, Declaration], everything: bool) -> dict[str, Declaration]:
        return super()._hold(declared, everything=self._fixed)

    @property
    def is_outer(self) -> Tensor:
        """Which coordinates of ``theta`` are those of outer sites, ``(T,)`` bool."""
        found = torch.zeros(self.hypers.size, dtype=torch.bool, device=self.device)
        for name in self.outer_sites:
            found[self.hypers.slices[name]] = True
        return found

    def log_hyperprior(self, theta: Tensor, u: Tensor | None = None) -> Tensor:
        """Log prior density of maximised sites, and of the unconstrained coordinates of outer ones, nats, ``()``."""
        total = super().log_hyperprior(theta, u)
        parts = self.hypers.unconstrained(theta.to(self.dtype))
        for part in self.hypers:
            if part.name in self.outer_sites:
                before = parts[part.name]
                log_slope = part.transform.log_abs_det_jacobian(before, part.transform(before))
                total = total + log_slope.sum().double()
        return total


def outer_problem(joint: OuterJoint, curvature: Curvature | None) -> Problem:
    """The inner problem; outer coordinates are no precision to be re-estimated or pruned, for they are integrated."""
    found = laplace_problem(joint, curvature)
    groups = _without(found.structure.groups, joint.is_outer)
    return replace(found, structure=replace(found.structure, groups=groups))


def _without(groups: PrecisionGroups | None, outer: Tensor) -> PrecisionGroups | None:
    if groups is None:
        return None
    power = torch.where(outer, 0.0, groups.power)
    if not bool((power != 0).any()):
        return None
    member = _owned(groups.member, outer)
    noise = {n: _owned(owner, outer) for n, owner in groups.noise.items()}
    return replace(groups, power=power, member=member, noise=noise)


def _owned(member: Tensor, outer: Tensor) -> Tensor:
    """The owner of each term, -1 where that is an outer coordinate."""
    known = torch.cat([outer, outer.new_zeros(1)])  # -1, the last, stands for none
    return torch.where(known[member], -1, member)
