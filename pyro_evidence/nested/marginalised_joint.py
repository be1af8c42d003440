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


class MarginalisedJoint(LogJoint):
    """``log p(D, inner | marginalised, hyperparameters)``; ``theta`` holds marginalised and maximised sites and params.

    The prior of the marginalised sites is that of their unconstrained coordinates, Jacobian included, so that
    Laplace's log evidence plus :meth:`log_hyperprior` is a density over these coordinates, to be integrated.

    :param marginalise: names of the sites to integrate outside.
    :param maximise, values: as for :class:`LogJoint`.
    """

    def __init__(
        self,
        model: Model,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        marginalise: Sequence[str],
        maximise: Sequence[str] | None = None,
        values: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.marginalised_sites: tuple[str, ...] = tuple(sorted(marginalise))
        self._fixed = maximise is not None and not len(maximise)
        super().__init__(model, args, kwargs, maximise=[*(maximise or ()), *marginalise], values=values)

    def _hold(self, declared: Mapping[str, Declaration], everything: bool) -> dict[str, Declaration]:
        return super()._hold(declared, everything=self._fixed)

    @property
    def is_marginalised(self) -> Tensor:
        """Which coordinates of ``theta`` are those of marginalised sites, ``(T,)`` bool."""
        found = torch.zeros(self.hypers.size, dtype=torch.bool, device=self.device)
        for name in self.marginalised_sites:
            found[self.hypers.slices[name]] = True
        return found

    def log_hyperprior(self, theta: Tensor, u: Tensor | None = None) -> Tensor:
        """Log prior of maximised sites, and of unconstrained coordinates of marginalised ones, nats, ``()``."""
        total = super().log_hyperprior(theta, u)
        parts = self.hypers.unconstrained(theta.to(self.dtype))
        for part in self.hypers:
            if part.name in self.marginalised_sites:
                before = parts[part.name]
                log_slope = part.transform.log_abs_det_jacobian(before, part.transform(before))
                total = total + log_slope.sum().double()
        return total


def marginalised_problem(joint: MarginalisedJoint, curvature: Curvature | None) -> Problem:
    """The inner problem; marginalised coordinates are no precisions to be re-estimated or pruned."""
    found, marginalise = laplace_problem(joint, curvature), joint.is_marginalised
    groups = found.structure.groups
    if groups is not None:
        power = torch.where(marginalise, 0.0, groups.power)
        member = _owned(groups.member, marginalise)
        noise = {n: _owned(owner, marginalise) for n, owner in groups.noise.items()}
        left = bool((power != 0).any())
        groups = replace(groups, power=power, member=member, noise=noise) if left else None
    return replace(found, structure=replace(found.structure, groups=groups))


def _owned(member: Tensor, marginalise: Tensor) -> Tensor:
    """The owner of each term, -1 where that is an marginalised coordinate."""
    known = torch.cat([marginalise, marginalise.new_zeros(1)])  # -1, the last, stands for none
    return torch.where(known[member], -1, member)
