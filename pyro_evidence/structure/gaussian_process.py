"""Models whose latents have a Gaussian prior with dense covariance and are seen through linear predictors.

Gaussian processes above all, alone or with other Gaussian latents beside them (an intercept, a second process).  Mode,
curvature and the exact gradient of the Laplace evidence then are those of
:mod:`pyro_evidence.precision.gaussian_process`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from pyro_evidence.errors import NotPositiveDefinite
from pyro_evidence.numerics import derivatives, newton
from pyro_evidence.numerics.coordinates import is_identity
from pyro_evidence.numerics.derivatives import Last, are_equal
from pyro_evidence.numerics.line_search import Watch
from pyro_evidence.precision import gaussian_process as process
from pyro_evidence.precision.gaussian_process import (
    LatentPrecision,
    LatentPredictor,
    ObservationMap,
    Sloped,
    seen_by,
)
from pyro_evidence.program import predictors
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.sites import Node
from pyro_evidence.structure.density import LinearDensity, ModelParts

Pair = Sequence[Any]  # a run at u = 0 and one elsewhere, at the same hyperparameters


@dataclass(frozen=True, eq=False)
class PriorBlock:
    """The Gaussian prior of some consecutive latent coordinates, dense or diagonal."""

    where: slice
    loc: Tensor  # (d,)
    covariance: Tensor  # (d, d), or variances (d,)
    tril: Tensor  # its lower Cholesky factor, or standard deviations

    @property
    def log_det(self) -> Tensor:
        """Log determinant of the covariance."""
        diagonal = self.tril if self.tril.dim() == 1 else self.tril.diagonal()
        return 2.0 * diagonal.log().sum()

    def whitened(self, u: Tensor) -> Tensor:
        """Independent standard normal coordinates of rows ``(R, d)``."""
        away = u - self.loc
        if self.tril.dim() == 1:
            return away / self.tril
        return torch.linalg.solve_triangular(self.tril, away.mT, upper=False).mT


def prior_blocks(joint: LogJoint, trace: Any) -> list[PriorBlock] | None:
    """The prior as blocks; None when a site is not Gaussian, or is masked, scaled or constrained."""
    found: list[PriorBlock] = []
    for part in joint.latents:
        if not is_identity(part.transform):
            return None
        node = trace.nodes[part.name]
        blocks = function_blocks(node, joint.latents.slices[part.name].start)
        if blocks is None:
            loc, precision, known = predictors.gaussian_site(node, part.size)
            if not bool(known.all()):
                return None
            variance = precision.double().reciprocal()
            blocks = [PriorBlock(joint.latents.slices[part.name], loc.double(), variance, variance.sqrt())]
        found += blocks
    return found


def function_blocks(node: Node, start: int) -> list[PriorBlock] | None:
    """One block per element of the batch of a MultivariateNormal; None for any other site."""
    base, value = predictors.unwrapped(node["fn"]).base, node["value"]
    if not predictors.is_plain(node) or not predictors.is_like(base, MultivariateNormal, value.shape[:-1]):
        return None
    size = value.shape[-1]
    shared = not len(base.batch_shape)  # one matrix for the whole batch, taken once
    arrays = (base.loc, base.covariance_matrix, base.scale_tril)
    loc, K, tril = (x.double() for x in arrays)
    if not shared:
        K, tril = (x.expand(*value.shape[:-1], size, size).reshape(-1, size, size) for x in (K, tril))
    loc = loc.expand(value.shape).reshape(-1, size)
    each = range(len(loc))
    where = [slice(start + i * size, start + (i + 1) * size) for i in each]
    return [PriorBlock(where[i], loc[i], K if shared else K[i], tril if shared else tril[i]) for i in each]


@dataclass(frozen=True, eq=False)
class Reading:
    """Prior and likelihood of the model at one setting of the hyperparameters."""

    parts: ModelParts
    blocks: tuple[PriorBlock, ...]
    loc: Tensor  # (D,)
    covariance: Tensor  # (D, D)
    latent: LatentPredictor

    @cached_property
    def tril(self) -> Tensor:
        """Lower Cholesky factor of the prior covariance, ``(D, D)``."""
        return _assembled([b.tril for b in self.blocks])

    @cached_property
    def detached(self) -> "Reading":
        """This reading without the hyperparameters' graph."""
        latent = replace(self.latent, mean=self.latent.mean.detach(), covariance=self.latent.covariance.detach())
        blocks = tuple(PriorBlock(b.where, b.loc.detach(), b.covariance.detach(), b.tril.detach()) for b in self.blocks)
        return Reading(self.parts, blocks, self.loc.detach(), self.covariance.detach(), latent)

    @property
    def log_det(self) -> Tensor:
        """Log determinant of the prior covariance."""
        return torch.stack([b.log_det for b in self.blocks]).sum()


def _assembled(matrices: list[Tensor]) -> Tensor:
    """Matrices along the diagonal; a vector stands for a diagonal one."""
    dense = [m.diag() if m.dim() == 1 else m for m in matrices]
    return dense[0] if len(dense) == 1 else torch.block_diag(*dense)


@dataclass(frozen=True, eq=False)
class GaussianLatent(LinearDensity):
    """A density of linear predictors whose latents have a Gaussian prior, some of it dense, free of the latents."""

    seen: ObservationMap = field(kw_only=True)
    _read: Last[ModelParts, Reading] = field(default_factory=Last, repr=False, compare=False, kw_only=True)
    _graph: Last[Tensor, tuple[Tensor, Reading]] = field(default_factory=Last, repr=False, compare=False, kw_only=True)

    def parts(self, theta: Tensor) -> ModelParts:
        """The model's parts at ``theta``, whose graph, of matrices, is made only where it is asked for.

        :raises NotPositiveDefinite: where the model cannot factorise its covariance.
        """
        try:
            with torch.set_grad_enabled(theta.requires_grad and torch.is_grad_enabled()):
                return super().parts(theta)
        except LinAlgError as error:
            raise _no_covariance(error) from error

    def reading(self, theta: Tensor) -> Reading:
        """The prior and the likelihood at ``theta`` ``(T,)``, read once per run of the model."""
        return self._read.found(self.parts(theta), is_, self._reading)

    def graph(self, theta: Tensor) -> tuple[Tensor, Reading]:
        """A copy of ``theta`` ``(T,)``, and a reading that can be differentiated in it, for mode and slope alike.

        :raises NotPositiveDefinite: where the model cannot factorise its covariance.
        """
        return self._graph.found(theta.detach().clone(), torch.equal, self._made)

    def _made(self, theta: Tensor) -> tuple[Tensor, Reading]:
        leaf = theta.clone().requires_grad_()
        try:
            with torch.enable_grad():
                return leaf, self._reading(self.parts_at(leaf, self.joint.trace(self.joint.initial_u, leaf)))
        except LinAlgError as error:
            raise _no_covariance(error) from error

    def _reading(self, parts: ModelParts) -> Reading:
        blocks = prior_blocks(self.joint, parts.trace)
        assert blocks is not None  # verified when it was recognised
        loc, K = torch.cat([b.loc for b in blocks]), _assembled([b.covariance for b in blocks])
        mean = self.seen.apply(loc.unsqueeze(-1)).reshape(-1, *self.linear[0].J.shape[1:2])
        mean = mean + torch.cat([c.reshape(-1, mean.shape[-1]) for c in parts.offsets])
        covariance = self.seen.apply(self.seen.apply(K.mT).mT)
        root = lambda: self.seen.apply(_assembled([b.tril.detach() for b in blocks]))  # noqa: E731
        first, *others = self.linear
        formula: Sloped | None  # value, slope and curvature of the only observed site
        formula = None if others else lambda eta: first.derivatives(parts.trace, eta.to(self.joint.dtype))
        each = [part.likelihood.log_likelihood(parts.trace) for part in self.linear]
        sizes = [len(part.J) for part in self.linear]

        def log_likelihood(eta: Tensor) -> Tensor:  # all observed sites as one function of blocks (R, N, C)
            pieces = zip(self.linear, each, eta.to(self.joint.dtype).split(sizes, 1), strict=True)
            return torch.stack([f(part.likelihood.layout.natural(piece)).double() for part, f, piece in pieces]).sum(0)

        return Reading(parts, tuple(blocks), loc, K, LatentPredictor(mean, covariance, log_likelihood, root, formula))

    def log_prior(self, u: Tensor, theta: Tensor) -> Tensor:
        reading = self.reading(theta[0] if theta.dim() == 2 else theta)
        squares = torch.stack([b.whitened(u[:, b.where]).square().sum(-1) for b in reading.blocks]).sum(0)
        return -0.5 * (squares + reading.log_det + u.shape[-1] * math.log(math.tau))

    def _prior_precision(self, u: Tensor, theta: Tensor) -> Tensor:
        tril = self.reading(theta[0] if theta.dim() == 2 else theta).tril
        return torch.cholesky_inverse(tril).expand(len(u), -1, -1)

    def precision_diagonal(self, u: Tensor, theta: Tensor) -> Tensor:
        """The diagonal of the dense precision, ``(R, D)``."""
        return self.precision(u, theta).diagonal(dim1=-2, dim2=-1)

    def find_modes(self, u: Tensor, theta: Tensor, tolerance: float, watch: Watch) -> newton.Mode:
        """Newton from rows ``(R, D)``; a start far from the mode does no harm."""
        reading = self.graph(theta)[1].detached
        latent, size = reading.latent, len(reading.loc)
        rows, found = list[tuple[Tensor, ...]](), list[LatentPrecision | NotPositiveDefinite]()
        for row in u.detach():
            start = latent.mean + self.seen.apply((row - reading.loc).unsqueeze(-1)).reshape(latent.mean.shape)
            mode = process.predictor_mode(latent, start, tolerance, watch)
            precision = LatentPrecision(reading.covariance, reading.tril, self.seen, mode)
            gradient = self.seen.adjoint((mode.slope - mode.dual).unsqueeze(-1)).squeeze(-1)
            log_prior = -0.5 * (process.quadratic(mode, latent) + reading.log_det + size * math.log(math.tau))
            log_joint = mode.log_likelihood + log_prior + torch.as_tensor(reading.parts.rest).detach().double()
            flags = (torch.tensor(x, device=u.device) for x in (mode.decrement, mode.converged, mode.definite))
            rows.append((reading.loc + precision.covariance @ precision.dual, log_joint, gradient, *flags))
            found.append(precision if mode.definite else self._no_maximum(gradient))
        point, value, slope, decrement, converged, definite = (torch.stack(x) for x in zip(*rows, strict=True))
        none, never = torch.zeros_like(point), torch.zeros_like(converged)
        return newton.Mode(
            point, value, slope, torch.empty(0), decrement, converged, definite, none, none, never, found=tuple(found)
        )

    def _no_maximum(self, gradient: Tensor) -> NotPositiveDefinite:
        worst = self.joint.latents.label(int(gradient.abs().argmax()))
        return NotPositiveDefinite(
            f"the posterior precision of a Gaussian process, K^-1 + W, is not positive definite where the search for "
            f"the mode stopped; the slope points at {worst}. Expected a maximum: a likelihood that is not log-concave "
            f"(Student's t, a mixture) may have saddles (try start=Start(restarts=8)), or a hyperparameter has made "
            f"the covariance inf or nan."
        )

    def slope(self, precision: LatentPrecision, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Derivatives of the log evidence in ``theta``, and of the log joint at the fixed mode, both ``(T,)``.

        Of the latter the part that dense covariances contribute is left out: no precision group owns them.
        """
        (theta, reading), mode = self.graph(theta), precision.mode
        here = process.likelihood_at(reading.latent, mode.eta)
        found = process.cotangents(reading.detached.latent.covariance, mode, here)
        rest = torch.as_tensor(reading.parts.rest).double()
        # a number whose derivative is that of the log evidence
        G = self.seen.adjoint(self.seen.adjoint(found.covariance).mT)
        loc = self.seen.adjoint(found.mean.unsqueeze(-1)).squeeze(-1)
        offsets = torch.cat([c.reshape(-1) for c in reading.parts.offsets])
        total = loc @ reading.loc + found.mean @ offsets
        for b in reading.blocks:
            piece = G[b.where, b.where]
            weights = piece.diagonal() if b.covariance.dim() == 1 else piece.flatten()
            total = total + weights @ b.covariance.flatten()  # a product would be another matrix
        total = total + found.likelihood(here) + rest
        u = reading.loc.detach() + precision.covariance @ precision.dual
        joint = here.value + rest
        diagonal = [(u[b.where] - b.loc, b.covariance) for b in reading.blocks if b.covariance.dim() == 1]
        joint = joint + sum(-0.5 * (away.square() / variance + variance.log()).sum() for away, variance in diagonal)
        return derivatives.pullback(total, theta), derivatives.pullback(joint, theta)

    def information(self, precision: LatentPrecision, theta: Tensor, index: Tensor) -> Tensor | None:
        r"""Minus the second derivatives of the log joint along its mode in hyperparameters ``index``, ``(P, P)``.

        With :math:`M` and :math:`S` the derivatives of the predictor's prior mean and of the likelihood's slope,
        :math:`M^\top R M - S^\top \Sigma S - M^\top (I - R K) S - S^\top (I - K R) M` less the second derivatives of
        :math:`\log p(D|\eta) + a^\top m`; no covariance is factorised.  None where a covariance depends on them.
        """
        (theta, reading), mode = self.graph(theta), precision.mode
        K, R = reading.detached.latent.covariance, mode.factor.apply
        left, right = derivatives.generic_directions(2, len(K), K)
        if bool((derivatives.pullback(left @ reading.latent.covariance @ right, theta)[index] != 0).any()):
            return None
        here, mean = process.likelihood_at(reading.latent, mode.eta), reading.latent.mean.reshape(-1)
        unit = torch.eye(len(theta)).to(theta)[index]
        M, S = (derivatives.Forward(x, theta).along(unit).mT.double() for x in (mean, here.slope))
        moved = K @ (S - R(K @ S)) + M - K @ R(M)  # how the predictor's mode follows
        held = here.value + mean @ mode.dual + torch.as_tensor(reading.parts.rest).double()
        first = derivatives.pullback(held, theta, create_graph=True)[index]
        second = torch.stack([derivatives.pullback(slope, theta)[index] for slope in first]).double()
        return M.mT @ (R(M) - S + R(K @ S)) - S.mT @ moved - second


def _no_covariance(error: LinAlgError) -> NotPositiveDefinite:
    return NotPositiveDefinite(
        f"the model's own covariance matrix cannot be factorised: {error} Give it more jitter, a noise of its own, or "
        f"hyperparameters that stay in range (a prior, maximise=[...])."
    )


def with_dense_prior(linear: LinearDensity, origin: Any, pairs: Sequence[Pair]) -> GaussianLatent | None:
    """A density with its dense Gaussian prior, if that is what the latents have, near and far.

    :param origin: a run at ``u = 0`` with derivatives.
    :param pairs: runs at ``u = 0`` and far out, at the same hyperparameters.
    """
    if any(p.likelihood.mixture is not None for p in linear.linear):
        return None
    num_rows, num_columns = sum(len(p.J) for p in linear.linear), {p.J.shape[1] for p in linear.linear}
    if len(num_columns) > 1 or num_rows * max(num_columns) > 2 * linear.joint.latents.size:
        return None  # work in the space of the predictors would be no cheaper
    blocks = prior_blocks(linear.joint, origin.trace) or []
    # A function of the rows has as many values; small blocks are the effects of many groups, and none are no function.
    function = num_rows <= 2 * max((len(b.loc) for b in blocks if b.tril.dim() == 2), default=0)
    if not function or any(predictors.depends(x, origin.u) for b in blocks for x in (b.loc, b.covariance)):
        return None
    for pair in pairs:
        found = (prior_blocks(linear.joint, run.trace) or [] for run in pair)
        first, second = ([x for b in blocks for x in (b.loc, b.covariance)] for blocks in found)
        if not first or not are_equal(first, second):
            return None
    J = torch.cat([p.J.flatten(0, 1) for p in linear.linear])
    return GaussianLatent(linear.joint, linear.linear, linear.free, linear.gaussian, seen=seen_by(J))
