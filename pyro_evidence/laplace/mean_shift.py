r"""Posterior mean less mode: Laplace's approximation one order on, for all coordinates at once.

With ``A(u)`` minus the second derivatives of the log joint, the mean is near the point where

.. math:: \nabla \log p(D, u) = \tfrac12 \nabla \log |A(u)|

To first order that is :math:`\hat u - \tfrac12 A^{-1} \nabla \log|A|`, the mean by the first terms of Laplace's series
(Lindley, 1980; Tierney and Kadane, 1986), which are also those of the simplified Laplace approximation (Rue, Martino
and Chopin, 2009) and of the variational mean (van Niekerk and Rue, 2024).  The
equation's own solution has a part of the next order: for the logarithm of a Gamma variable of shape ``y``, for logits
of Beta variables alike, it is :math:`\log(y - \tfrac12)`, where the mean is
:math:`\psi(y) = \log y - 1/2y - 1/12y^2 + O(y^{-4})`.  Two thirds of what the solution adds to the first order are
then exact to the second, and that is the shift.  Each of many coordinates may contribute little; one that they share,
such as an intercept, collects it all.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import LaplaceState, Problem
from pyro_evidence.laplace.gradient import orders_of
from pyro_evidence.numerics.derivatives import pullback
from pyro_evidence.precision import gaussian_process
from pyro_evidence.precision.choices import exact_hessian
from pyro_evidence.precision.dense import Precision, factorise
from pyro_evidence.precision.gaussian_process import LatentPrecision
from pyro_evidence.structure.gaussian_process import GaussianLatent

MOST_STEPS = 12  # three or four are enough where the series is worth its terms
SETTLED = 0.02  # posterior standard deviations: a tenth of the error that is told to the reader
ROUNDING = 1e-6  # standard deviations of the largest coordinate: the third derivatives are zero
NEXT = 2.0 / 3.0  # of what the solution adds to the first order: exact to the second for Gamma and Beta variables
FALLING = 0.5  # what the solution adds at most, in parts of the first order: else the series says nothing

Map = Callable[[Tensor], Tensor]


def at_mean(state: LaplaceState) -> LaplaceState | None:
    """The state with its Gaussian about the posterior mean ``u`` instead of the mode; itself where these are one.

    :return: None where :func:`mean_shift` is None.
    """
    precision = state.precision
    if state.problem.latent is None or not isinstance(precision, LatentPrecision):
        shift = mean_shift(state.problem, state.theta, state.u, precision)
        return None if shift is None else replace(state, u=state.u + shift)
    with torch.enable_grad(), suppress(ArithmeticError):
        dual = _dual_shift(state.problem.latent, precision, state.theta)
        if dual is not None:
            u = state.u + precision.covariance @ precision.seen.adjoint(dual.unsqueeze(-1)).squeeze(-1)
            moved = replace(precision.mode, dual=precision.mode.dual + dual)
            return replace(state, u=u, precision=replace(precision, mode=moved))
    return None


def mean_shift(problem: Problem, theta: Tensor, u: Tensor, precision: Precision) -> Tensor | None:
    """From the mode ``u`` ``(D,)`` to the posterior mean, ``(D,)``; exactly zero where the posterior is Gaussian.

    :param precision: at the mode.
    :return: None where the series says nothing (modes that merge, weights that are hardly identified), where the
        curvature is not the exact one or blocks are integrated by quadrature, and where groups came in chunks.
    """
    # the rows of a linear predictor may be streamed
    is_at_hand = problem.joint.has_data or problem.structure.linear is not None
    if not is_at_hand or problem.curvature is not exact_hessian or problem.marginal is not None:
        return None
    sd = precision.variance[0].sqrt()
    with torch.enable_grad(), suppress(ArithmeticError):
        return _solved(lambda v: _step(problem, theta, v), u.detach(), lambda step: step / sd)
    return None


def _solved(step_at: Map, start: Tensor, in_deviations: Map) -> Tensor | None:
    """Total shift of a point: the first step and two thirds of those after it; None where these do not fall.

    Steps are relaxed by Aitken's rule (Irons and Tuck, 1969).

    :param in_deviations: a step in posterior standard deviations.
    """
    first = step_at(start)
    before = in_deviations(first)
    largest = before.abs().max()
    if largest < ROUNDING:
        return torch.zeros_like(first)
    total, relax = first, 1.0
    for _ in range(MOST_STEPS):
        step = step_at(start + total)
        white = in_deviations(step)
        change = white - before
        relax = -relax * float(before @ change / change.square().sum())
        total, before = total + relax * step, white
        if not relax < torch.inf:  # nan too
            return None
        if white.abs().max() < SETTLED:
            falls = in_deviations(total - first).abs().max() < FALLING * largest
            return first + NEXT * (total - first) if falls else None
    return None


def _step(problem: Problem, theta: Tensor, u: Tensor) -> Tensor:
    """Towards the point where the slope is half that of the log determinant, in the metric of the curvature at ``u``.

    :raises NotPositiveDefinite: where there is no such metric.
    """
    if problem.factors is not None:
        precision: Precision = problem.factors.precision(u, theta)
        slope = problem.density.gradient(u.unsqueeze(0), theta)[1]
        half = 0.5 * problem.factors.log_det_slope(precision, u, theta)
    else:
        rows = u.unsqueeze(0).requires_grad_()
        found = orders_of(problem, rows, theta)
        precision, slope = factorise(found.precision.detach(), problem.joint.latents.label), found.gradient.detach()
        log_det = (precision.log_det_gradient * found.precision).sum()
        half = pullback(0.5 * log_det - problem.eliminated(rows, theta), rows)
    return precision.solve((slope - half).double() * problem.active)[0].detach().to(u)


def _dual_shift(latent: GaussianLatent, precision: LatentPrecision, theta: Tensor) -> Tensor | None:
    """The same under a dense Gaussian prior of covariance ``K``: what ``K`` times which is added to the predictor.

    Rasmussen and Williams (2006), section 3.4, have the mode in these coordinates.
    """
    prior, mode = latent.reading(theta).detached.latent, precision.mode
    K, sd = prior.covariance, mode.factor.variance(prior.covariance).sqrt()

    def step_at(dual: Tensor) -> Tensor:
        here = gaussian_process.likelihood_at(prior, prior.mean + (K @ dual).reshape(prior.mean.shape))
        factor, definite = gaussian_process.factorise_predictor(prior, here.curvature.detach())
        blocks = gaussian_process.diagonal_blocks(K - factor.explained(K), here.eta.shape[-1])
        half = pullback(0.5 * (blocks * here.curvature).sum(), here.eta).reshape(-1).double()
        rise = here.slope.detach() - half - dual
        step = rise - factor.apply((K @ rise).unsqueeze(-1)).squeeze(-1)
        return step if definite else torch.full_like(step, torch.nan)

    return _solved(step_at, mode.dual, lambda step: K @ step / sd)
