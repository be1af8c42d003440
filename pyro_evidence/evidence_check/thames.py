"""The evidence by a truncated harmonic mean that does not care how mixture components are labelled."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import biject_to, constraints

from pyro_evidence.errors import BadInput
from pyro_evidence.evidence_check.bridge import effective_draws
from pyro_evidence.evidence_check.modes import Axes, component_axes, permutations
from pyro_evidence.evidence_check.target import (
    Draws,
    EvidenceEstimate,
    Posterior,
    Target,
    check_halves,
    laplace_posterior,
    rounding,
    sentences,
    target_of,
)
from pyro_evidence.fitting.process_state import within_memory
from pyro_evidence.numerics import importance
from pyro_evidence.numerics.coordinates import Coordinate
from pyro_evidence.settings import seeded

SIMPLEX = type(biject_to(constraints.simplex))


@within_memory
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
    axes, num = component_axes(target.joint, posterior.state, labels)
    space = _Space(target, axes, permutations(num) if axes else [()])
    first, second = check_halves(target, target.coordinates(draws))
    region = _region(space, first.flatten(0, 1))
    u = second.flatten(0, 1)
    distance, log_density = region.squared_distance(space.images(u)), space.log_density(u)
    inside = (log_density > region.cut) & (distance <= region.radius**2).any(0)
    if not bool(inside.any()):
        raise BadInput(
            "none of the draws of the second halves is where the first halves were: the chains have not "
            "converged. Run them longer."
        )
    terms = torch.where(inside, -log_density, -math.inf)
    log_volume, volume_error = region.log_volume(num_volume, seed)
    value = log_volume - float(importance.log_mean(terms))
    effective = effective_draws((terms - terms.max()).exp().reshape(second.shape[:2]))
    error = float(importance.standard_error(terms)) * math.sqrt(len(terms) / effective)
    share, label = float(inside.double().mean()), distance.argmin(0).reshape(second.shape[:2])
    numbers = {
        "effective_sample_size": effective,
        "share_inside": share,
        "label_switches": float((label[:, 1:] != label[:, :-1]).sum()),
    }
    doubts = sentences(
        (
            effective < 50.0,
            f"the chains are worth only {effective:.0f} independent draws; expected at least 50. Run them longer.",
        ),
        (
            share < 0.05,
            f"only {share:.1%} of the draws are in the truncation set; expected at least 5 %: the chains' "
            "halves disagree.",
        ),
    )
    error = math.sqrt(error**2 + volume_error**2 + rounding(value) ** 2)
    return EvidenceEstimate(f"THAMES over {len(space.orders)} labellings", value, error, numbers, doubts)


@dataclass(frozen=True)
class _Space:
    """Coordinates in which relabelling keeps volumes: unconstrained, simplices by K - 1 of their entries."""

    target: Target
    axes: Axes
    orders: list[tuple[int, ...]]

    @property
    def simplices(self) -> list[Coordinate]:
        """Sites whose coordinates are not the unconstrained ones."""
        return [p for p in self.target.joint.latents if isinstance(p.transform, SIMPLEX) and p.name in self.axes]

    def images(self, u: Tensor) -> Tensor:
        """All relabellings of unconstrained rows ``(S, D)``, identity first, shape ``(K!, S, D)``."""
        if not self.axes:
            return u.unsqueeze(0)
        latents, found = self.target.joint.latents, []
        values = latents.constrained(u.to(self.target.joint.dtype))
        for order in torch.tensor(self.orders, device=u.device):
            moved = values | {n: values[n].index_select(a + 1, order) for n, a in self.axes.items()}
            found.append(torch.cat([p.transform.inv(moved[p.name]).reshape(len(u), -1) for p in latents], -1).double())
        return torch.stack(found)

    def flat(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates ``(..., D)`` and ``log |d coordinates / d u|`` ``(...)``."""
        latents, log_det = self.target.joint.latents, u.new_zeros(u.shape[:-1])
        parts = latents.unconstrained(u)
        for part in self.simplices:
            value = part.transform(parts[part.name])
            slope = part.transform.log_abs_det_jacobian(parts[part.name], value)
            log_det = log_det + slope.reshape(*u.shape[:-1], -1).sum(-1)
            parts[part.name] = value[..., :-1]
        return torch.cat([parts[p.name].reshape(*u.shape[:-1], -1) for p in latents], -1), log_det

    def unflat(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The way back, and which rows are inside the support, ``(...)`` bool."""
        latents, inside = self.target.joint.latents, torch.ones(y.shape[:-1], dtype=torch.bool, device=y.device)
        parts = latents.unconstrained(y)
        for part in self.simplices:
            value = torch.cat([parts[part.name], 1.0 - parts[part.name].sum(-1, keepdim=True)], -1)
            inside &= (value > 0).reshape(*y.shape[:-1], -1).all(-1)
            safe = torch.where(value > 0, value, 1.0)
            parts[part.name] = part.transform.inv(safe / safe.sum(-1, keepdim=True))
        return torch.cat([parts[p.name].reshape(*y.shape[:-1], -1) for p in latents], -1), inside

    def log_density(self, u: Tensor) -> Tensor:
        """Log joint density per volume of these coordinates, nats, shape ``(S,)``."""
        return self.target.log_joint(u) - self.flat(u)[1]


@dataclass(frozen=True)
class _Region:
    """The ellipsoid's images, cut at a density."""

    space: _Space
    mean: Tensor
    tril: Tensor
    cut: float

    @property
    def radius(self) -> float:
        """``sqrt(D + 1)``: the radius of least variance for a normal posterior."""
        return math.sqrt(len(self.mean) + 1.0)

    def squared_distance(self, images: Tensor) -> Tensor:
        """``|L^-1 (y - m)|^2`` of the images ``(K!, S, D)`` of rows, shape ``(K!, S)``."""
        away = self.space.flat(images)[0] - self.mean
        white = torch.linalg.solve_triangular(self.tril, away.reshape(-1, len(self.mean)).mT, upper=False)
        return white.square().sum(0).reshape(away.shape[:-1])

    def log_volume(self, num: int, seed: int | None) -> tuple[float, float]:
        """Log volume and its standard error, nats, from uniform points of the ellipsoid."""
        generator, d = seeded(seed), len(self.mean)
        white = torch.randn(num, d, generator=generator, dtype=torch.float64).to(self.mean)
        uniform = torch.rand(num, generator=generator, dtype=torch.float64).to(self.mean)
        direction = white / white.norm(dim=-1, keepdim=True)
        points = self.mean + self.radius * (uniform ** (1.0 / d)).unsqueeze(-1) * direction @ self.tril.mT
        u, inside = self.space.unflat(points)
        counted = inside & (self.space.log_density(u) > self.cut)
        hits = (self.squared_distance(self.space.images(u)) <= self.radius**2).sum(0)
        shares = torch.where(counted, 1.0 / hits.clamp(min=1), 0.0)  # rounding aside, each is in its own ellipsoid
        log_ball = 0.5 * d * math.log(math.pi) - math.lgamma(0.5 * d + 1.0)
        ellipsoid = log_ball + d * math.log(self.radius) + float(self.tril.diagonal().log().sum())
        whole = ellipsoid + math.log(len(self.space.orders))
        return whole + math.log(float(shares.mean())), float(shares.std() / shares.mean()) / math.sqrt(num)


def _region(space: _Space, u: Tensor) -> _Region:
    """From the first halves of the chains: relabel towards the draw of highest density, then take moments.

    :raises BadInput: when the density of a relabelled row is another one.
    """
    images = space.images(u)
    some = torch.stack([space.log_density(image[:10]) for image in images])
    gap = float((some - some[0]).abs().max())
    if not gap <= 1e-8 * (1.0 + float(some[0].abs().max())):
        raise BadInput(
            f"relabelling {sorted(space.axes)} changes the log joint by up to {gap:.3g} nats; expected no change. "
            "Hyperparameters or priors differ between components, so the labels mean something: use "
            "importance_sampling(find_modes(posterior)), or pass labels={}."
        )
    log_density = space.log_density(u)
    y = space.flat(images)[0]
    pivot = y[0, log_density.argmax()]
    scale = y[0].std(0)
    for _ in range(5):
        nearest = ((y - pivot) / scale).square().sum(-1).argmin(0)
        chosen = y[nearest, torch.arange(y.shape[1])]
        pivot, scale = chosen.mean(0), chosen.std(0)
    tril = torch.linalg.cholesky(torch.cov(chosen.mT).reshape(len(pivot), len(pivot)))
    return _Region(space, pivot, tril, float(log_density.median()))
