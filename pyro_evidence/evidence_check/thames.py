"""The evidence by a truncated harmonic mean that does not care how mixture components are labelled."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import biject_to, constraints

from pyro_evidence.errors import BadInput
from pyro_evidence.evidence_check.bridge import chain_error, few_draws
from pyro_evidence.evidence_check.modes import Axes, component_axes, permutations
from pyro_evidence.evidence_check.target import (
    Draws,
    EvidenceEstimate,
    Target,
    check_halves,
    estimated,
    laplace_posterior,
    target_of,
)
from pyro_evidence.fitting.process_state import entry_point
from pyro_evidence.numerics import importance
from pyro_evidence.posterior.base import Posterior
from pyro_evidence.settings import seeded
from pyro_evidence.structure.symmetries import relabelled

SIMPLEX = type(biject_to(constraints.simplex))
FEWEST_INSIDE = 0.05  # share of the draws in the set: half of them where the chains' halves agree


@entry_point
def thames(
    posterior: Posterior, draws: Draws, *, labels: Axes | None = None, num_volume: int = 20_000, seed: int | None = 0
) -> EvidenceEstimate:
    """Log evidence by the truncated harmonic mean over a set that contains every relabelling of itself.

    The set is an ellipsoid of radius ``sqrt(D + 1)`` around the relabelled first halves of the chains,
    joined with its images under all permutations of the components and cut to the half of the draws of
    highest density; its volume is found by uniform points.  Whether the chains switched labels or stayed in
    one makes no difference. After Metodiev et al. (2025), arXiv 2504.21812; the ellipsoid is that of
    Metodiev et al. (2024), THAMES.

    :param posterior: the one whose model the chains ran on.
    :param draws: ``MCMC(NUTS(posterior.model), ...).get_samples(group_by_chain=True)``.
    :param labels: as in :func:`find_modes`; without mixture components this is the plain THAMES.
    :param num_volume: uniform points for the volume.
    :param seed: of those points.
    :return: diagnostics ``effective_sample_size``, ``share_inside`` (of draws in the set) and
        ``label_switches``.
    :raises BadInput: when the density changes under relabelling (hyperparameters that differ between
        components), for pruned posteriors, and for the draws that :func:`bridge_sampling` refuses.
    """
    posterior = laplace_posterior(posterior)
    target = target_of(posterior)
    if target.size < len(target.active):
        raise BadInput("some coordinates are pruned; expected none. Use bridge_sampling.")
    axes, num = component_axes(target.joint, labels)
    space = Labellings(target, axes, permutations(num) if axes else [()])
    first, second = check_halves(target, target.coordinates(draws))
    region = truncation_set(space, first.flatten(0, 1))
    u = second.flatten(0, 1)
    log_joint, distance = target.log_joint(u), region.squared_distance(space.images(u))
    inside = (log_joint - space.log_slope(u) > region.cut) & (distance <= region.squared_radius).any(0)
    if not bool(inside.any()):
        raise BadInput(
            "none of the draws of the second halves is where the first halves were: the chains have not "
            "converged. Run them longer."
        )
    terms = torch.where(inside, -log_joint, -math.inf)
    error, effective = chain_error(terms.reshape(second.shape[:2]))
    log_volume, volume_error = region.log_volume(num_volume, seed)
    label = distance.argmin(0).reshape(second.shape[:2])
    share = float(inside.double().mean())
    return estimated(
        f"THAMES over {len(space.orders)} labellings",
        log_volume - float(importance.log_mean(terms)),
        math.hypot(error, volume_error),
        {
            "effective_sample_size": effective,
            "share_inside": share,
            "label_switches": float((label[:, 1:] != label[:, :-1]).sum()),
        },
        few_draws(effective),
        (
            share < FEWEST_INSIDE,
            f"only {share:.1%} of the draws are in the truncation set; expected at least {FEWEST_INSIDE:.0%}: the "
            "chains' halves disagree.",
        ),
    )


@dataclass(frozen=True, eq=False)
class Labellings:
    """All relabellings of unconstrained rows, and the volumes of what they make of a set."""

    target: Target
    axes: Axes
    orders: Sequence[tuple[int, ...]]

    def images(self, u: Tensor) -> Tensor:
        """Rows ``(S, D)`` under all relabellings, identity first, ``(K!, S, D)``."""
        return relabelled(self.target.joint, u, self.axes, self.orders)

    def log_slope(self, u: Tensor) -> Tensor:
        """Log of the volume, ``(...)``, per volume at rows ``(..., D)``, of coordinates in which relabelling keeps it.

        They are the unconstrained ones, but of relabelled simplices all entries but one.
        """
        latents, found = self.target.joint.latents, u.new_zeros(u.shape[:-1])
        for part in (p for p in latents if isinstance(p.transform, SIMPLEX) and p.name in self.axes):
            value = latents.unconstrained(u)[part.name]
            slope = part.transform.log_abs_det_jacobian(value, part.transform(value))
            found = found + slope.reshape(*u.shape[:-1], -1).sum(-1)
        return found

    def log_density(self, u: Tensor) -> Tensor:
        """Log joint density per volume of those coordinates, nats, shape ``(S,)``: the same of all images."""
        return self.target.log_joint(u) - self.log_slope(u)


@dataclass(frozen=True, eq=False)
class TruncationSet:
    """An ellipsoid of unconstrained rows and its images under relabelling, where the log density exceeds ``cut``."""

    space: Labellings
    mean: Tensor
    tril: Tensor
    cut: float

    @property
    def squared_radius(self) -> float:
        """``D + 1``: of least variance for a normal posterior."""
        return len(self.mean) + 1.0

    def squared_distance(self, images: Tensor) -> Tensor:
        """``|L^-1 (y - m)|^2`` of rows ``(K!, S, D)``, shape ``(K!, S)``."""
        away = (images - self.mean).reshape(-1, len(self.mean))
        white = torch.linalg.solve_triangular(self.tril, away.mT, upper=False)
        return white.square().sum(0).reshape(images.shape[:-1])

    def log_volume(self, num: int, seed: int | None) -> tuple[float, float]:
        """Log volume and its standard error, nats, from uniform points of the ellipsoid."""
        generator, d = seeded(seed), len(self.mean)
        white = torch.randn(num, d, generator=generator, dtype=torch.float64).to(self.mean)
        uniform = torch.rand(num, generator=generator, dtype=torch.float64).to(self.mean)
        length = math.sqrt(self.squared_radius) * (uniform ** (1.0 / d)).unsqueeze(-1)
        away = length * white / white.norm(dim=-1, keepdim=True)
        u = self.mean + away @ self.tril.mT
        images = self.space.images(u)
        hits = (self.squared_distance(images) <= self.squared_radius).sum(0)
        volumes = (self.space.log_slope(u) - self.space.log_slope(images)).exp().sum(0)  # of all images, by its own
        inside = self.space.log_density(u) > self.cut
        shares = torch.where(inside, volumes / hits.clamp(min=1), 0.0)  # rounding aside, each is in its own ellipsoid
        log_ball = 0.5 * d * math.log(math.pi * self.squared_radius) - math.lgamma(0.5 * d + 1.0)
        ellipsoid = log_ball + float(self.tril.diagonal().log().sum())
        return ellipsoid + math.log(float(shares.mean())), float(importance.standard_error(shares.log()))


def truncation_set(space: Labellings, u: Tensor) -> TruncationSet:
    """From the first halves of the chains: relabel towards the draw of highest density, then take moments.

    :raises BadInput: when the density of a relabelled row is another one.
    """
    y = space.images(u)
    some = torch.stack([space.log_density(image[:10]) for image in y])
    if not bool(space.target.joint.are_level(some, some[0]).all()):
        gap = float((some - some[0]).abs().max())
        raise BadInput(
            f"relabelling {sorted(space.axes)} changes the log joint by up to {gap:.3g} nats; expected no change. "
            "Hyperparameters or priors differ between components, so the labels mean something: use "
            "importance_sampling(find_modes(posterior)), or pass labels={}."
        )
    log_density = space.log_density(u)
    pivot = y[0, log_density.argmax()]
    scale = y[0].std(0)
    for _ in range(5):
        nearest = ((y - pivot) / scale).square().sum(-1).argmin(0)
        chosen = y[nearest, torch.arange(y.shape[1])]
        pivot, scale = chosen.mean(0), chosen.std(0)
    tril = torch.linalg.cholesky(torch.cov(chosen.mT).reshape(len(pivot), len(pivot)))
    return TruncationSet(space, pivot, tril, float(log_density.median()))
