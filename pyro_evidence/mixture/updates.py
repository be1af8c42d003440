r"""Rounds of evidence-regularised EM: functions that an engine is handed, each with its equation and its flaw.

Every one of them maps an :class:`EStep` to the next :class:`Mixture`.  In all, ``s`` is the component's sum of weighted
squared residuals, ``N_k`` its expected number of data, ``M`` the prior mean; sums run over whatever shares a
hyperparameter.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pyro_evidence.mixture.evidence import MixtureCurvature, WellDetermined, log_prior, well_determined
from pyro_evidence.mixture.expectation import (
    Mixture,
    MixtureData,
    MixtureStatistics,
    e_step,
    residual_products,
    residual_squares,
    solve_weights,
)
from pyro_evidence.numerics.evidence import log_evidence as laplace
from pyro_evidence.settings import check_number


@dataclass(frozen=True, eq=False)
class Pool:
    """Groups of the members of an array; a batch axis stands in front of what is summed."""

    group: Tensor  # (...) long, from 0 on

    @cached_property
    def axes(self) -> tuple[int, ...] | None:
        """Axes, counted from the end, that a group spans while all others tell groups apart; None if it is not so.

        There are none where every member is a group of its own, and all of them where all members are one.
        """
        group, dims = self.group, range(-self.group.dim(), 0)
        spanned = tuple(d for d in dims if bool((group == group.narrow(d, 0, 1)).all()))
        first = group[tuple(slice(0, 1) if d in spanned else slice(None) for d in dims)]
        return spanned if len(first.unique()) == first.numel() else None

    def __call__(self, x: Tensor) -> Tensor:
        """Each member's sum over its group, of ``x`` ``(R, ...)``; in a shape that broadcasts against that of ``x``."""
        if self.axes is not None:
            return x.sum(self.axes, keepdim=True) if self.axes else x
        sums = x.new_zeros(len(x), int(self.group.max()) + 1)
        return sums.index_add_(1, self.group.flatten(), x.flatten(1))[:, self.group]

    def per_group(self, x: Tensor, members: Tensor) -> Tensor:
        """Sums of ``x`` ``(R, ...)`` over the ``members`` of each group, shape ``(R, groups)``; 0 for other groups."""
        sums = x.new_zeros(len(x), int(self.group.max()) + 1)
        return sums.index_add_(1, self.group[members], x[:, members])


SMALLEST = torch.finfo(torch.float64).tiny  # in the place of zero where a component has no data: ratios stay finite
LEAST_LEFT = 1e-6  # data that a component has beyond its well-determined parameters
LARGEST_NOISE = 1e12  # precision in units of the data's: one point, or ties, make the likelihood unbounded
NOT_NEGATIVE = "a number of at least 0"
ALPHA_RANGE = (1e-8, LARGEST_NOISE)  # in units of the data's variance; beyond, the prior is flat or a point


@dataclass(frozen=True, eq=False)
class SharedParameters:
    """Which weights share a prior precision, which outputs a noise precision, and which of them are learned.

    A precision is its group's value times a ratio.  A component's weights are ``(m, B)`` in a mixture of regressions,
    and the ``q`` columns of its loadings in a mixture of probabilistic PCA.
    """

    alpha_group: Tensor  # (K, ...) long
    alpha_ratio: Tensor  # (K, ...)
    beta_group: Tensor  # (K, m) long
    beta_ratio: Tensor  # (K, m)
    alpha_free: Tensor  # (K, ...) bool
    beta_free: Tensor  # (K, m) bool
    mixing_free: bool = True
    mean_free: bool = True  # means that are no weights

    @staticmethod
    def of(alpha_group: Tensor, beta_group: Tensor, *, free: bool = True) -> "SharedParameters":
        """Precisions that are those of their groups; all of them, mixing and means are learned if ``free``."""
        ones = [torch.ones_like(x, dtype=torch.float64) for x in (alpha_group, beta_group)]
        learned = [torch.full_like(x, free, dtype=torch.bool) for x in (alpha_group, beta_group)]
        return SharedParameters(alpha_group, ones[0], beta_group, ones[1], learned[0], learned[1], free, free)

    @cached_property
    def alpha_pool(self) -> Pool:
        """Sums over the weights that share a prior precision."""
        return Pool(self.alpha_group)

    @cached_property
    def beta_pool(self) -> Pool:
        """Sums over the outputs that share a noise precision."""
        return Pool(self.beta_group)

    @property
    def columnwise(self) -> bool:
        """Whether weights of one component have prior precisions of their own."""
        return bool((self.alpha_group != self.alpha_group[:, :1]).any())

    @cached_property
    def all_free(self) -> tuple[bool, bool]:
        """Whether every prior precision and every noise precision is learned."""
        return bool(self.alpha_free.all()), bool(self.beta_free.all())

    def resized(self, num: int) -> "SharedParameters":
        """The same for ``num`` exchangeable components, more or fewer: what is shared stays shared.

        These are two at least if ``num`` is larger, or nobody knows what is shared.
        """

        def alike(x: Tensor) -> Tensor:
            return x[:num] if num <= len(x) else x[:1].expand(num, *x.shape[1:])

        def group(x: Tensor) -> Tensor:
            steps = torch.arange(num, device=x.device) * (x[1] - x[0]).flatten()[0] if num > len(x) else None
            return x[:num] if steps is None else x[0] + steps.reshape(-1, *[1] * (x.dim() - 1))

        alpha = group(self.alpha_group), alike(self.alpha_ratio)
        beta = group(self.beta_group), alike(self.beta_ratio)
        free = alike(self.alpha_free), alike(self.beta_free)
        return SharedParameters(*alpha, *beta, *free, self.mixing_free, self.mean_free)


@dataclass(frozen=True, eq=False)
class EStep:
    """One iterate with all that an update may ask of it.  Its parts belong to the same point."""

    data: MixtureData
    mixture: Mixture
    ties: SharedParameters
    curvature: MixtureCurvature
    stats: MixtureStatistics

    @cached_property
    def A(self) -> Tensor:
        """Curvature of the log likelihood, shape ``(R, groups, d, d)``."""
        return self.curvature(self.data, self.mixture, self.stats)

    @cached_property
    def well_determined(self) -> WellDetermined:
        """Gamma of each weight, shape ``(R, K, m, B)``, pruned components at zero."""
        return well_determined(self.A, self.mixture.alpha)

    @cached_property
    def log_evidence(self) -> Tensor:
        """Laplace log evidence at the current weights, nats, ``(R,)``; nan where the curvature is not positive."""
        log_joint = self.stats.log_likelihood + log_prior(self.mixture)
        return laplace(log_joint, self.well_determined.log_det, self.mixture.alpha[0].numel())

    @cached_property
    def gamma(self) -> Tensor:
        """Gamma per component and output, shape ``(R, K, m)``."""
        return self.well_determined.gamma.sum(-1)

    @cached_property
    def subtracted(self) -> Tensor:
        """Subtracted from ``N_k``: the component's whole gamma if unconditional (A.39), else the output's (2.23)."""
        gamma = self.gamma
        return gamma.sum(-1, keepdim=True).expand_as(gamma) if self.data.is_constant else gamma


Update = Callable[[EStep], Mixture]


@torch.no_grad()
def estep(data: MixtureData, mixture: Mixture, ties: SharedParameters, curvature: MixtureCurvature) -> EStep:
    """The iterate at ``mixture``."""
    return EStep(data, mixture, ties, curvature, e_step(data, mixture, spread=data.is_constant))


def husmeier2000_update(expected: EStep) -> Mixture:
    r"""Husmeier (2000), eqs. 2.21 to 2.24, and A.38, A.39 for an unconditional density, as printed.

    .. math:: 1/\beta_{ki} = s_{ki} / (N_k - \gamma_k), \quad \alpha_k = \gamma_k / \|w_k\|^2

    Flaws: the norm is not centred on the prior mean, so that the prior vanishes when the data are moved away from the
    origin; unconditionally the component's whole gamma is taken from every output, which inflates variances and is
    what regularises; not a stationary point of the evidence; nothing bounds it when values are tied.
    """
    return _regularised(expected, expected.subtracted, centre=torch.zeros_like(expected.mixture.loc))


def corrected(expected: EStep) -> Mixture:
    r"""The paper's derivation carried through: gamma of the output itself, norm centred on the prior mean.

    .. math:: 1/\beta_{ki} = s_{ki} / (N_k - \gamma_{ki}), \quad \alpha_k = \gamma_k / \|w_k - M\|^2

    Flaws: exact for one kernel only, since responsibilities move with beta and with the mixing; the mixing is that of
    EM; on small samples it keeps superfluous kernels; nothing bounds it when values are tied.
    """
    return _regularised(expected, expected.gamma)


@torch.no_grad()
def _regularised(expected: EStep, subtracted: Tensor, rho: float = 0.0, centre: Tensor | None = None) -> Mixture:
    """The next mixture, every precision by what is well determined.

    :param subtracted: from the numbers of data, shape ``(R, K, m)``.
    :param centre: of the norms of the weights; None for their prior mean.
    """
    w = solve_weights(expected.stats, expected.data.layout, expected.mixture)
    squares = expected.mixture.on * (w - (expected.mixture.loc if centre is None else centre)).square()
    ratio, pool = expected.ties.alpha_ratio, expected.ties.alpha_pool
    alpha = (pool(expected.well_determined.gamma) / pool(ratio * squares)).clamp(*ALPHA_RANGE) * ratio
    return _next(expected, w, _noise(expected, w, subtracted, rho), alpha, subtracted)


@dataclass(frozen=True)
class BoundedInflation:
    r"""The default: the paper's inflation of variances, bounded; norm centred; a gamma prior on beta.

    .. math:: 1/\beta_{ki} = (s_{ki} + 2\rho v_i) / (N_k - g_{ki}), \quad \alpha_k = \gamma_k / \|w_k - M\|^2

    with ``v_i`` the variance of output i.  A component with ``N_k <= g_k`` is pruned.  The gamma prior (Ormoneit and
    Tresp, 1996) is needed because tied values make the evidence unbounded.

    For an unconditional density ``g_ki`` is the output's own gamma and that of ``num_other_outputs`` further ones.
    This is a heuristic that widens kernels on few data, not a consequence of the evidence.  Three others are what one
    Gaussian needs: new data have the highest expected log density under the variance ``s / (N - 4 + 4 / (N + 1))``,
    however many outputs there are, while the paper's whole gamma, up to one for each output, leaves hardly a component
    where there are many.  For a noise matrix the same argument gives about ``N - m - 3``, and the whole gamma is taken.

    :ivar rho: strength of the gamma prior, in data.
    :ivar num_other_outputs: of how many other outputs gamma is taken as well; 0 for none, ``math.inf`` for all,
        as in A.39.

    >>> import torch
    >>> from pyro_evidence import EvidenceEM
    >>> from pyro_evidence.mixture import BoundedInflation
    >>> from pyro_evidence.models.mixture import gaussian_mixture
    >>> Y = torch.cat([torch.randn(30, 2), torch.randn(30, 2) + 6.0])
    >>> update = BoundedInflation(num_other_outputs=0.0)  # keeps more kernels on few data
    >>> EvidenceEM(gaussian_mixture(2), update=update).run(Y).num_components
    2
    """

    rho: float = 0.05
    num_other_outputs: float = 3.0

    def __post_init__(self) -> None:
        check_number("BoundedInflation: rho", self.rho, NOT_NEGATIVE, 0.0)
        name, expected = "BoundedInflation: num_other_outputs", f"{NOT_NEGATIVE}, math.inf for all"
        check_number(name, self.num_other_outputs, expected, 0.0)

    def __call__(self, expected: EStep) -> Mixture:
        subtracted, num_others = expected.subtracted, expected.mixture.w.shape[-2] - 1
        if self.num_other_outputs < num_others and not expected.mixture.has_full_noise:
            subtracted = torch.lerp(expected.gamma, subtracted, self.num_other_outputs / num_others)
        return _regularised(expected, subtracted, self.rho)


@dataclass(frozen=True)
class Unregularised:
    """EM without a prior on the weights; directions of eigenvalue below ``cutoff`` times the largest are left at zero.

    With ``rho = 0`` and a constant basis it is plain EM, with ``cutoff`` the eigenvalue cut-off of Husmeier (2000),
    sec. 4.2.  Flaw: the likelihood is unbounded; kernels collapse on single points.

    :ivar rho: strength of a gamma prior on beta, in data; 0 for none.

    >>> import torch
    >>> from pyro_evidence import EvidenceEM
    >>> from pyro_evidence.mixture import Unregularised
    >>> from pyro_evidence.models.mixture import gaussian_mixture
    >>> Y = torch.cat([torch.randn(30, 2), torch.randn(30, 2) + 6.0])
    >>> EvidenceEM(gaussian_mixture(2), update=Unregularised()).run(Y).num_components
    2
    """

    rho: float = 0.0
    cutoff: float = 1e-6  # relative; Husmeier (2000), footnote 12

    def __post_init__(self) -> None:
        check_number("Unregularised: rho", self.rho, NOT_NEGATIVE, 0.0)
        check_number("Unregularised: cutoff", self.cutoff, NOT_NEGATIVE, 0.0)

    def __call__(self, expected: EStep) -> Mixture:
        """One round; alpha stays."""
        layout = expected.data.layout
        gram, cross = expected.stats.moments[..., layout.gram], expected.stats.moments[..., layout.cross]
        gram = gram if expected.data.observed is not None else gram[..., :1, :, :]
        values, vectors = torch.linalg.eigh(gram)
        kept = values > self.cutoff * values[..., -1:]  # zero along poorly determined directions
        inverse = torch.where(kept, 1.0 / torch.where(kept, values, 1.0), 0.0)
        w = (vectors @ (inverse.unsqueeze(-1) * (vectors.mT @ cross.unsqueeze(-1)))).squeeze(-1)
        nothing = torch.zeros_like(w[..., 0])
        return _next(expected, w, _noise(expected, w, nothing, self.rho), expected.mixture.alpha, nothing)


@dataclass(frozen=True)
class WeightDecay:
    """A fixed prior precision of the weights, and a gamma prior on beta: MAP of Ormoneit and Tresp (1996), eq. 4.4.

    :ivar alpha: prior precision, in units of the standardised data.
    :ivar rho: strength of the gamma prior, in data; 0 for plain weight decay.

    >>> import torch
    >>> from pyro_evidence import EvidenceEM
    >>> from pyro_evidence.mixture import WeightDecay
    >>> from pyro_evidence.models.mixture import gaussian_mixture
    >>> Y = torch.cat([torch.randn(30, 2), torch.randn(30, 2) + 6.0])
    >>> EvidenceEM(gaussian_mixture(2), update=WeightDecay(0.01)).run(Y).num_components
    2
    """

    alpha: float
    rho: float = 0.0

    def __post_init__(self) -> None:
        least = f"a number of at least {ALPHA_RANGE[0]:g}; for none take Unregularised()"
        check_number("WeightDecay: alpha", self.alpha, least, ALPHA_RANGE[0])
        check_number("WeightDecay: rho", self.rho, NOT_NEGATIVE, 0.0)

    def __call__(self, expected: EStep) -> Mixture:
        """One round; gamma is not looked at."""
        fixed = replace(expected.mixture, alpha=torch.full_like(expected.mixture.alpha, self.alpha))
        w = solve_weights(expected.stats, expected.data.layout, fixed)
        nothing = torch.zeros_like(w[..., 0])
        return _next(expected, w, _noise(expected, w, nothing, self.rho), fixed.alpha, nothing)


def _noise(expected: EStep, w: Tensor, subtracted: Tensor, rho: float) -> Tensor:
    """Noise precisions ``(N_k - subtracted) / (s + 2 rho)``, ties kept."""
    counts = expected.stats.moments[..., expected.data.layout.present]
    left = counts - subtracted
    left = torch.where(left > 0, left, counts)  # the last kernel of all is kept, without correction
    if expected.mixture.has_full_noise:
        scatter = residual_products(expected.stats, expected.data.layout, w)
        ridge = 2.0 * rho * torch.eye(w.shape[-2], dtype=w.dtype, device=w.device)
        covariance = (scatter + ridge) / left[..., :1].unsqueeze(-1)
        return torch.linalg.inv_ex(0.5 * (covariance + covariance.mT))[0]  # a singular row gives inf, and fails alone
    ratio, pool = expected.ties.beta_ratio, expected.ties.beta_pool
    squares, on = residual_squares(expected.stats, expected.data.layout, w) + 2.0 * rho, expected.mixture.on.squeeze(-1)
    return (pool(left * on) / pool(ratio * squares * on)).clamp(max=LARGEST_NOISE) * ratio


def _next(expected: EStep, w: Tensor, noise: Tensor, alpha: Tensor, subtracted: Tensor) -> Mixture:
    """The next mixture: what is held fixed put back, components that have died put out."""
    old, ties = expected.mixture, expected.ties
    noise = noise if old.has_full_noise else torch.where(ties.beta_free, noise, old.noise)
    alpha = torch.where(ties.alpha_free & old.active[..., None, None], alpha, old.alpha)
    counts = expected.stats.counts
    log_mixing = (counts / counts.sum(-1, keepdim=True)).log() if ties.mixing_free else old.log_mixing
    new, margin = Mixture(w, noise, log_mixing, alpha, old.loc), counts - subtracted.amax(-1)
    if old.all_active and float(margin.amin()) > LEAST_LEFT:
        return new
    return pruned(new, survivors(old.active, margin))


def survivors(active: Tensor, margin: Tensor) -> Tensor:
    """Components with data left beyond their well-determined parameters, and the best one; shape ``(R, K)`` bool.

    Husmeier (2000), sec. 2.2 and below eq. 3.26: without, the noise precision is negative.

    :param margin: data less parameters, ``(R, K)``.
    """
    best = torch.where(active, margin, -torch.inf).argmax(-1, keepdim=True)
    return (active & (margin > LEAST_LEFT)).scatter(-1, best, True)


def pruned(mixture: Mixture, keep: Tensor) -> Mixture:
    """The mixture without the components where ``keep`` ``(R, K)`` is False; they stand at their prior mean."""
    log_mixing = torch.where(keep, mixture.log_mixing, -torch.inf).log_softmax(-1)
    w = torch.where(keep[..., None, None], mixture.w, mixture.loc)
    plain = torch.eye(w.shape[-2]).to(w) if mixture.has_full_noise else w.new_ones(1)
    noise = torch.where(keep.reshape(*keep.shape, *[1] * (mixture.noise.dim() - 2)), mixture.noise, plain)
    return replace(mixture, w=w, log_mixing=log_mixing, noise=noise)


def padded(mixture: Mixture, like: Mixture) -> Mixture:
    """The mixture with pruned components appended, until it has as many as ``like``."""
    missing = like.w.shape[1] - mixture.w.shape[1]
    if not missing:
        return mixture

    def longer(field: str, x: Tensor) -> Tensor:
        more = getattr(like, field)[:1, -missing:]
        return torch.cat([x, more.expand(len(x), *more.shape[1:])], 1)

    keep = torch.arange(like.w.shape[1], device=like.w.device) < mixture.w.shape[1]
    whole = replace(mixture.rebuilt(longer), loc=like.loc)
    return pruned(whole, keep & whole.active)
