"""One fitted relevance eigenvector machine: ridge mode, axes, hyperparameters, mode; what makes it meaningless."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput, ImproperPosterior, NotAMode
from pyro_evidence.fitting.iterate import Status, Stop, bar_of
from pyro_evidence.numerics import lbfgs
from pyro_evidence.relevance import axis_evidence
from pyro_evidence.relevance.axis_evidence import EigenAxes
from pyro_evidence.relevance.axis_priors import AxisPrior, SearchStopped, SparseState, climbed
from pyro_evidence.relevance.quadratic import Approximation, Quadratic
from pyro_evidence.relevance.targets import AutogradTarget, LinearTarget, Penalised, Target
from pyro_evidence.settings import check_result, check_ridge, stacklevel

TRUNCATE = 2000  # weights above which only the axes that can be kept are computed
WIDE = 2.0  # weights for each predictor, from which the rows' span is worth its QR decomposition
DIGITS = 1e-7  # error of a Wald statistic that changes nothing

Centre = Callable[[Tensor], Tensor]  # slopes (N, C), or a score (M,) -> those that are followed to the centre


def base_centre(slope: Tensor) -> Tensor:
    """Centred where the quadratic was taken, as in the paper: the ridge mode stands for a maximum."""
    return torch.zeros_like(slope)


def score_centre(slope: Tensor) -> Tensor:
    """Centred at the quadratic's own maximum ``u + g/h``: the right one, but it keeps more axes."""
    return slope


@dataclass(frozen=True)
class REVMSettings:
    """Settings of one run; of ``stop`` whether to raise and to show a progress bar."""

    prior: AxisPrior
    centre: Centre
    approximation: Approximation
    stop: Stop = Stop()


@dataclass(frozen=True, eq=False)
class REVMState(SparseState):
    """Built only by :func:`eigen_state`, so its parts always agree."""

    prior: AxisPrior
    ridge: float
    base: Tensor  # (D,) where the quadratic was taken: the ridge mode, or the mean of another approximation
    axes: EigenAxes
    alpha: Tensor  # (K,) of every axis, inf where pruned
    active: Tensor  # (K,) bool: neither pruned nor zero at the mode
    x: Tensor  # (K_active + V,) the mode: active axes, then the other coordinates
    base_log_likelihood: Tensor  # () at the ridge mode
    null_log_likelihood: Tensor  # () at w = 0
    reason: Status = Status.CONVERGED  # why the search for the mode stopped

    @property
    def directions(self) -> Tensor:
        """Active axes, shape ``(M, K_active)``."""
        return self.axes.directions[:, self.active]

    @property
    def misfit(self) -> Tensor:
        """``D``: the quadratic's log likelihood at ``w = 0`` minus the true one, nats; large is bad."""
        return self.base_log_likelihood - 0.5 * self.axes.wald.sum() - self.null_log_likelihood

    @property
    def factorised_log_evidence(self) -> Tensor:
        """Kropotov and Vetrov (2007), eq. 8, at its optimum, nats, ``()``; exact for Gaussian noise, ridge 0.

        Not for comparing models: the axes come from the data, and it errs high where the quadratic does.
        """
        return self.base_log_likelihood + (self.prior.log_gain(self.axes.wald) - 0.5 * self.axes.wald).sum()


def base_point(target: Target, ridge: float, start: Tensor, num_weights: int) -> Tensor:
    """Mode under ``N(0, 1/ridge)`` on the weights, shape ``(D,)``.

    :raises BadInput: for a ridge that is negative, infinite or nan.
    :raises ImproperPosterior: for ridge 0 where the likelihood has no maximum.
    """
    check_ridge(ridge)
    alpha = torch.full_like(start[:num_weights], ridge)
    try:
        if isinstance(target, AutogradTarget):  # L-BFGS first, where the likelihood is not concave in the weights
            density = Penalised(target, torch.cat([alpha, start.new_zeros(len(start) - num_weights)]))
            theta, points = start.new_zeros(0), start.unsqueeze(0)
            start = lbfgs.ascend(partial(density.gradient, theta=theta), points, tolerance=1e-4, num_steps=500)[0]
        y = climbed(target, alpha, start)
    except (NotAMode, RuntimeError) as error:
        raise _improper() if ridge == 0.0 else error from error
    if ridge == 0.0:
        if separable(target, y, num_weights):
            raise _improper()
        h = torch.linalg.eigvalsh(target.precision(y.unsqueeze(0))[0])
        if bool(h[0] <= 10.0 * len(h) * target.eps * h[-1]):
            raise _improper()
    return y


def _improper() -> ImproperPosterior:
    return ImproperPosterior(
        "with ridge=0 the likelihood has no single maximum: the classes can be separated, or columns of the design "
        "coincide. Pass ridge=1e-2, or ridge=isotropic_evidence."
    )


def separable(target: Target, y: Tensor, num_weights: int) -> bool:
    """Whether the likelihood does not fall on the way from the weights to a thousand times them."""
    scale = torch.ones_like(y)
    scale[:num_weights] = 1e3
    values = target.value(torch.stack([y, y * scale]))
    return bool(values[1] >= values[0])


def _centred(settings: REVMSettings, score: Tensor) -> Tensor:
    return check_result("centre", settings.centre(score), Tensor, "a tensor, such as the score itself")


def axes_of_quadratic(quadratic: Quadratic, num_weights: int, settings: REVMSettings) -> EigenAxes:
    """Eigenvectors of the curvature; by singular values where its Gram matrix would lose digits that matter."""
    w = quadratic.y[:num_weights]
    if quadratic.summed_score is not None:
        return axis_evidence.from_gram(quadratic.gram, w, _centred(settings, quadratic.score))
    slopes = tuple(_centred(settings, s) for s in quadratic.slopes)
    followed = any(bool((s != 0).any()) for s in slopes)
    centred = replace(quadratic, slopes=slopes)
    if len(quadratic.y) > num_weights:
        M = num_weights
        return axis_evidence.from_gram(centred.gram[:M, :M], w, centred.score[:M])
    roots = [_root(B) for B in quadratic.curvatures]
    if all(roots) and num_weights > TRUNCATE and not followed:
        rows = list(zip(quadratic.parts, quadratic.curvatures, strict=True))

        def product(v: Tensor) -> Tensor:
            found = [(B @ (p.J @ v).unsqueeze(-1)).flatten() @ p.J.flatten(0, 1) for p, B in rows]
            return torch.stack(found).sum(0)

        return axis_evidence.truncated(product, w)
    if all(roots) and (followed or sum(s.numel() for s in slopes) < num_weights):
        return _of_rows(centred, [root for root in roots if root], w, followed)
    return axis_evidence.from_gram(quadratic.gram, w, centred.score)


def _of_rows(quadratic: Quadratic, roots: list[tuple[Tensor, Tensor]], w: Tensor, followed: bool) -> EigenAxes:
    """With a score to follow, or fewer data than weights.

    At the base centre no axis with ``h <= 1/|w|^2`` is kept: the Gram matrix is faster, and will do where it has
    the digits of such an ``h``.
    """
    num_rows = sum(s.numel() for s in quadratic.slopes)
    if not followed and len(w) <= 2 * num_rows:
        axes = axis_evidence.from_gram(quadratic.gram, w, torch.zeros_like(w))
        if torch.finfo(w.dtype).eps * float(axes.h[:1].sum() * (w @ w)) <= DIGITS:
            return axes
    triples = list(zip(quadratic.parts, roots, quadratic.slopes, strict=True))
    rows = torch.cat([(root @ p.J).flatten(0, 1) for p, (root, _), _ in triples])
    residual = torch.cat([(inverse @ s.unsqueeze(-1)).flatten() for _, (_, inverse), s in triples])
    return axis_evidence.from_rows(rows, w, residual)


def _root(B: Tensor) -> tuple[Tensor, Tensor] | None:
    """Symmetric square root and its pseudo-inverse of every block; None where a block has none."""
    values, vectors = torch.linalg.eigh(B)
    if bool((values < -1e-10 * values.abs().max()).any()):
        return None
    root = values.clamp(min=0.0).sqrt()  # rounding below zero
    inverse = torch.where(root > 0, root.reciprocal(), 0.0)
    return (vectors * root.unsqueeze(-2)) @ vectors.mT, (vectors * inverse.unsqueeze(-2)) @ vectors.mT


def eigen_state(target: Target, num_weights: int, start: Tensor, ridge: float, settings: REVMSettings) -> REVMState:
    """Algorithms 1 and 2 of Kropotov and Vetrov (2007), with a ridge mode where they ask for a maximum.

    :param start: where the search for the ridge mode starts, shape ``(D,)``.
    """
    if isinstance(target, LinearTarget) and ridge > 0.0 and target.is_resident and target.rest is None:
        if WIDE * sum(p.c.numel() for p in target.parts) <= num_weights:  # mode and axes lie in the span of the rows
            Q, _ = torch.linalg.qr(torch.cat([p.J.flatten(0, 1) for p in target.parts]).mT)  # (M, N C)
            found = eigen_state(target.along(Q), Q.shape[1], Q.mT @ start, ridge, settings)
            axes = found.axes._replace(directions=Q @ found.axes.directions)
            return replace(found, base=Q @ found.base, axes=axes)
    with bar_of("REVM", settings.stop.progress, total=3) as bar:
        base, reason = searched(partial(base_point, target, ridge, start, num_weights), settings.stop)
        bar.update()
        quadratic = check_result("approximation", settings.approximation(target, ridge, base), Quadratic)
        axes = axes_of_quadratic(quadratic, num_weights, settings)
        bar.update()
        state = on_axes(target, settings, ridge, quadratic.y, axes)
        bar.update()
    return state if reason is Status.CONVERGED else replace(state, reason=reason)


def searched(search: Callable[[], Tensor], stop: Stop) -> tuple[Tensor, Status]:
    """The mode, or where the search for it stopped, with a warning instead of the error if ``stop.throw`` is off.

    :raises SearchStopped: otherwise.
    """
    try:
        return search(), Status.CONVERGED
    except SearchStopped as error:
        if stop.throw or error.reached is None:
            raise
        warnings.warn(str(error), stacklevel=stacklevel())
        return error.reached, Status.FAILED


def on_axes(target: Target, settings: REVMSettings, ridge: float, base: Tensor, axes: EigenAxes) -> REVMState:
    """Hyperparameters and mode along given axes: algorithm 1 or 2 from step 4 on."""
    num_weights = len(axes.directions)
    alpha = settings.prior.alpha(axes.h, axes.u)
    kept = torch.isfinite(alpha)
    others = base[num_weights:]
    T = torch.block_diag(axes.directions[:, kept], torch.eye(len(others)).to(alpha))
    u, reason = torch.cat([axes.u[kept], others]), Status.CONVERGED
    if len(u):
        u, reason = searched(partial(settings.prior.mode, target.along(T), alpha[kept], u), settings.stop)
    nonzero = u[: int(kept.sum())] != 0
    active = kept.clone()
    active[kept] = nonzero
    x = torch.cat([u[: len(nonzero)][nonzero], u[len(nonzero) :]])
    return REVMState(settings.prior, ridge, base, axes, alpha, active, x, *log_likelihoods(target, base, axes), reason)


def log_likelihoods(target: Target, base: Tensor, axes: EigenAxes) -> tuple[Tensor, Tensor]:
    """At the base point, and where its weights are 0 instead, nats, ``()`` each."""
    num_weights = len(axes.directions)
    null = torch.cat([torch.zeros_like(base[:num_weights]), base[num_weights:]])
    at_base, at_null = target.value(torch.stack([base, null]))
    return at_base, at_null


def refuse_if_outweighed(state: REVMState) -> None:
    """Refuse a fit in which the ridge, which stands for no prior at all, leaves the data nothing along any axis.

    :raises BadInput: with the factor by which the columns are too small.
    """
    largest = float(state.axes.h.max()) if len(state.axes.h) else 0.0
    explained = float(state.base_log_likelihood - state.null_log_likelihood)  # more than a nat has a warning
    if state.num_active or explained > 1.0 or not 0.0 < largest < OUTWEIGHED * state.ridge:
        return
    factor = (state.ridge / largest) ** 0.5
    raise BadInput(
        f"on no axis do the data say a thousandth of ridge={state.ridge:g}: the largest curvature of the likelihood is "
        f"{largest:.2g}, and every axis would be pruned for that. Expected columns of a usual size, or a weaker ridge. "
        f"Multiply the design matrix by {100.0 * factor:.0e}, or pass ridge={1e-4 * largest:.0e}."
    )


OUTWEIGHED = 1e-3  # curvature of the likelihood over the ridge, below which the data had no chance
SATURATED = 25.0  # log odds beyond which a likelihood no longer feels its weights


def warn_if_meaningless(state: REVMState, target: Target) -> None:
    """Say whether every axis was pruned against the data, or the mode lies where the likelihood is flat."""
    explained = float(state.base_log_likelihood - state.null_log_likelihood)
    if not state.num_active and explained > 1.0:
        w, statistics = state.base[: len(state.axes.directions)], float(state.axes.wald.sum())
        if state.ridge * float(w @ w) > statistics:
            why = "The ridge outweighs the likelihood's curvature: lower it, or pass centre=score_centre."
        else:
            why = "The classes are separated, so that curvature vanishes: raise the ridge, say to 1e-2."
        warnings.warn(
            f"every axis was pruned although the weights explain {explained:.3g} nats: at ridge={state.ridge:g} their "
            f"Wald statistics add up to {statistics:.2g}, and the quadratic says nothing. {why} Or choose it by "
            "ridge=isotropic_evidence.",
            stacklevel=stacklevel(),
        )
        return
    parts = target.linearise(state.base) if target.is_resident else ()
    largest = max((float(p.eta(state.base.unsqueeze(0)).abs().max()) for p in parts), default=0.0)
    far_away = abs(float(state.misfit)) / (1.0 + abs(float(state.base_log_likelihood)))
    if largest > SATURATED and far_away > 0.01:  # else the quadratic is the likelihood
        warnings.warn(
            f"the ridge mode has a predictor of {largest:.0f}: at ridge={state.ridge:g} some data no longer feel the "
            f"weights, and the quadratic is poor (misfit {float(state.misfit):.3g} nats). Raise the ridge.",
            stacklevel=stacklevel(),
        )
