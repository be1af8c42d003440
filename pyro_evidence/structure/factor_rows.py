"""Sparse linear predictors under Gaussian priors at many rows together, each at hyperparameters of its own."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.numerics.derivatives import pullback
from pyro_evidence.numerics.linear_predictor import slope_and_curvature
from pyro_evidence.precision.dense import Elements
from pyro_evidence.program.sites import log_prob_sum
from pyro_evidence.structure.factor_density import Structured
from pyro_evidence.structure.factor_linear import SparseLinear

Slopes = tuple[Tensor, Tensor, Callable[[], Tensor]]  # log likelihoods (r,), their slopes and curvatures in predictors


@dataclass(frozen=True)
class PredictorRows:
    """A density of linear predictors whose prior is quadratic in the latents; the model is run where the rows start.

    :ivar start: ``(R, D)``.
    :ivar theta: ``(R, T)``.
    """

    density: Structured
    start: Tensor
    theta: Tensor
    _last: list[tuple[Tensor, list[Slopes]]] = field(default_factory=list, repr=False, compare=False)

    @cached_property
    def parts(self) -> tuple[SparseLinear, ...]:
        """The linear predictors."""
        return self.density.parts

    @cached_property
    def _read(self) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """At the starts: all but the predictors' likelihoods, its gradient, the prior's own diagonal, and predictors.

        The diagonal is that of independent latents, which have no families; else zero.
        """
        joint, linear = self.density.joint, self.density.linear
        assert linear is not None

        def one(u: Tensor, theta: Tensor) -> tuple[Tensor, ...]:
            trace = joint.trace(u, theta)
            log_det = joint.latents.constrained_with_log_det(u.to(joint.dtype))[1]
            value = (log_prob_sum(trace, (*joint.latents.names, *linear.free)) + log_det).double()
            return value, *(part.slot.blocks(trace).double() for part in self.parts)

        with torch.enable_grad():
            u = self.start.detach().requires_grad_()
            value, *etas = torch.vmap(one)(u, self.theta)
            slope = pullback(value.sum(), u, create_graph=True)
            alone = torch.zeros_like(u) if self.density.families else -pullback(slope.sum(), u)
        return value.detach(), slope.detach(), alone.detach(), [eta.detach() for eta in etas]

    @cached_property
    def _factors(self) -> tuple[Tensor, ...]:
        """The precision of each factor of the prior, ``(R, F, k, k)`` for each family."""
        return self.density.factors_of_rows(self.start, self.theta)

    @cached_property
    def _shared(self) -> Any:
        """A trace whose likelihoods are those of all rows; None where they depend on hyperparameters."""
        with torch.enable_grad():
            trace = self.density.joint.trace(self.start[0].detach(), self.theta[0].detach().requires_grad_())
        others = [x for part in self.parts for x in part.slot.others(trace)]
        return None if any(isinstance(x, Tensor) and x.requires_grad for x in others) else trace

    def _prior(self, away: Tensor, rows: Tensor) -> Tensor:
        """Its precision times ``away`` ``(r, D)``."""
        total, B = self._read[2][rows] * away, self.density.B
        seen = torch.cat([away, away @ B.mT], -1)  # factors see sums too
        of_factors = torch.zeros_like(seen)
        for family, own in zip(self.density.families, self._factors, strict=True):
            product = (own[rows] @ seen[:, family.index].unsqueeze(-1)).flatten(1)
            of_factors.index_add_(1, family.index.flatten(), product)
        of_coordinates, of_sums = of_factors.split([away.shape[-1], len(B)], -1)
        return total + of_coordinates + of_sums @ B

    def _slopes(self, u: Tensor, rows: Tensor) -> list[Slopes]:
        if self._last and torch.equal(self._last[0][0], u):
            return self._last[0][1]
        away, joint, found = u - self.start[rows], self.density.joint, []
        for part, eta in zip(self.parts, self._read[3], strict=True):
            here = (eta[rows] + part.rows.product(away)).to(joint.dtype)
            if self._shared is not None:
                found.append(part.of_likelihood.of(self._shared, here))
            else:
                found.append(slope_and_curvature(partial(self._log_likelihood, part, rows), part.slot.layout, here))
        self._last[:] = [(u.clone(), found)]
        return found

    def _log_likelihood(self, part: SparseLinear, rows: Tensor, eta: Tensor) -> Tensor:
        """Log likelihood of predictors ``(r,) + shape``, each at its row's hyperparameters, ``(r,)``."""
        origin = self.start[0].detach()

        def one(own: Tensor, theta: Tensor) -> Tensor:
            return part.slot.log_likelihood(self.density.joint.trace(origin, theta))(own.unsqueeze(0))[0]

        return torch.vmap(one)(eta, self.theta[rows])

    def gradient(self, u: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint and its gradient at points ``(r, D)`` of some rows, detached."""
        value, slope, away = self._read[0][rows], self._read[1][rows], u.detach() - self.start[rows]
        product = self._prior(away, rows)
        value, slope = value + ((slope - 0.5 * product) * away).sum(-1), slope - product
        for part, (found, by_eta, _) in zip(self.parts, self._slopes(u, rows), strict=True):
            value, slope = value + found.double(), slope + part.back(by_eta)
        return value, slope

    def elements(self, u: Tensor, rows: Tensor) -> list[Elements]:
        """Minus the Hessians at points ``(r, D)`` of some rows."""
        blocks = [block().double() for *_, block in self._slopes(u, rows)]
        self._last.clear()  # its graph is used up
        alone = torch.nn.functional.pad(self._read[2][rows], (0, len(self.density.B)))
        pairs = list(enumerate(rows.tolist()))
        joined = [[p.rows.elements(B[i]) for p, B in zip(self.parts, blocks, strict=True)] for i, _ in pairs]
        return [self.density.laid_out(alone[i], joined[i], [own[row] for own in self._factors]) for i, row in pairs]
