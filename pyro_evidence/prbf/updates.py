r"""Updates of the probabilistic RBF network: plain EM, the published one, the exact M-step, ascent on eq. 22.

Each is a function of a :class:`~pyro_evidence.prbf.densities.Point` that returns the next one.
Constantinopoulos, Titsias and Likas (2001), eqs. 6 to 8 and 27 to 31.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from pyro_evidence.mixture.posterior import NOTABLE_GAIN, NoiseGain
from pyro_evidence.models.covariances import SLOWEST, Covariance, Full, mahalanobis
from pyro_evidence.numerics.batched import Batched, along
from pyro_evidence.numerics.line_search import Backtracking, Line, any_rise
from pyro_evidence.prbf.densities import (
    BHATTACHARYYA,
    ClassData,
    Network,
    Point,
    between_classes,
    column_variance,
    evaluate,
    parts_of,
    tilted,
)

ROUNDING = 64 * torch.finfo(torch.float64).eps  # relative: sums over data and kernels are no more exact
MOST = 60  # rounds of inner iterations, which converge in a few: only rounding keeps them from it


@dataclass(frozen=True, eq=False)
class Slopes:
    """Derivatives of eq. 22 in each parameter, and the steps that are EM's where ``alpha`` is 0."""

    gradient: Network
    step: Network

    @property
    def gain(self) -> Tensor:
        """Derivative of eq. 22 along the step, not negative, shape ``(B,)``."""
        pairs = zip(parts_of(self.gradient), parts_of(self.step), strict=True)
        return torch.stack([(a * b).flatten(1).sum(-1) for a, b in pairs]).sum(0)


def uphill(point: Point) -> Slopes:
    r"""The exact gradient of eq. 22 and a step uphill.

    The subkernel means move with the parameters; :func:`~pyro_evidence.prbf.densities.tilted` responsibilities carry
    that, so that the gradient is that of an expected log likelihood plus the explicit part of the penalty.  The steps
    of centres and covariances are gradients times a positive matrix; that of the mixing is positively correlated with
    its gradient.  The gradient in the class prior is zero where it is held.
    """
    net, kind, dim = point.net, point.kind, point.data.dim
    tail = (-1, 1, *[1] * kind.event_dim)
    moments = tilted(point)
    shares, total = moments[..., 0] + correction(point, point.distance), moments.sum(1)
    weight = 2.0 * BHATTACHARYYA * point.alpha
    draw = (net.ownership.unsqueeze(-1) * point.offset).sum(1)
    pull = total[..., 1 : dim + 1] - total[..., :1] * net.loc - weight[:, None, None] * draw
    mass = total[..., 0].reshape(*total.shape[:2], *[1] * kind.event_dim)
    excess = kind.scatter(total, net.loc) - mass * net.covariance + weight.reshape(tail) * between_classes(point)
    rate = torch.where(net.mixing > 0, shares / torch.where(net.mixing > 0, net.mixing, 1.0), 0.0)
    prior = prior_step = torch.zeros_like(net.class_prior)  # without unlabelled data it is held
    if not point.data.is_labelled:
        prior = shares.sum(-1) / net.class_prior
        prior_step = _shifted(net.class_prior, prior, point.counts.sum((-1, -2)))
    gradient = Network(rate, kind.solve(net.covariance, pull), kind.slope(net.covariance, excess, dim), prior)
    mass = point.counts.sum(1)
    full = mass > EMPTY * point.data.num_data  # a kernel without data makes no step
    damped = torch.where(full, 1.0 / (mass + weight.unsqueeze(-1)).where(full, 1.0), 0.0)
    loc, covariance = damped.unsqueeze(-1) * pull, damped.reshape(*damped.shape, *[1] * kind.event_dim) * excess
    return Slopes(gradient, Network(_shifted(net.mixing, rate, point.counts.sum(-1)), loc, covariance, prior_step))


def _shifted(share: Tensor, rate: Tensor, total: Tensor) -> Tensor:
    """Step of proportions towards those with the larger derivative, shape as ``share``."""
    target = share * torch.maximum(rate, SLOWEST * total.unsqueeze(-1))  # so it never becomes zero or negative
    return target / target.sum(-1, keepdim=True) - share


def stepped(net: Network, data: ClassData, step: Network, size: Tensor) -> Network:
    """The network ``size`` of the way along a step, covariances about the new centres and above the floor."""
    kind, t = data.kind, size[:, None, None]
    covariance = net.covariance + t.reshape(-1, 1, *[1] * kind.event_dim) * step.covariance - kind.outer(t * step.loc)
    covariance = kind.floored(kind.guarded(covariance, net.covariance), data.unit)
    return Network(
        net.mixing + t * step.mixing,
        net.loc + t * step.loc,
        covariance,
        net.class_prior + size[:, None] * step.class_prior,
    )


def climb_penalised(point: Point) -> Point:
    """One step uphill in every row, halved until eq. 22 rises; a row that is at its top stays there."""
    found = uphill(point)

    def trial(rows: Tensor, scale: Tensor) -> Point:
        return evaluate(point.data, stepped(point.net[rows], point.data, found.step[rows], scale), point.alpha[rows])

    rising = found.gain > ROUNDING * (1.0 + point.objective.abs())
    line = Line(found.gain, torch.zeros_like(found.gain))
    return Backtracking(any_rise)(point, rising.nonzero().squeeze(-1), line, trial)[0]


@dataclass(frozen=True)
class Ascent:
    """Steps uphill on eq. 22, each halved until it rises: monotone.

    :ivar warm_up: rounds of plain EM before; from random centres the ascent would find worse optima.

    >>> import torch
    >>> from pyro_evidence import OverlapEM
    >>> from pyro_evidence.models.prbf import prbf
    >>> from pyro_evidence.prbf import Ascent
    >>> Y = torch.cat([torch.randn(30, 2), torch.randn(30, 2) + 6.0])
    >>> labels = torch.arange(60) // 30
    >>> path = OverlapEM(prbf(2), update=Ascent(warm_up=5)).run(Y, labels).objectives
    >>> all(after >= before for before, after in zip(path, path[1:]))
    True
    """

    warm_up: int = 50

    def __call__(self, point: Point) -> Point:
        return climb_penalised(point)


Update = Callable[[Point], Point]

EMPTY = 1e-10  # share of the data below which a kernel keeps its place: its mean would be a quotient of rounding


def em(point: Point) -> Point:
    """EM without regularisation, eqs. 6 to 8; the likelihood never falls."""
    return evaluate(point.data, _estimated(point, torch.zeros_like(point.alpha)), point.alpha)


def _estimated(point: Point, alpha: Tensor, between: Tensor | None = None) -> Network:
    """Centres by eq. 27, covariances by eq. 28, mixing by eq. 8; a kernel without data keeps its place and covariance.

    A centre is the mean of the data, drawn towards the subkernels' expected one; a covariance is not below the floor.

    :param between: weight of the scatter of the held subkernels about the new centre, ``(B,)``; None for none.
    """
    net, kind, mass, weight = point.net, point.kind, point.counts.sum(1), 2.0 * BHATTACHARYYA * alpha.unsqueeze(-1)
    full = mass > EMPTY * point.data.num_data
    target = (net.ownership.unsqueeze(-1) * point.centres).sum(1)
    sums = point.moments[..., 1 : point.data.dim + 1].sum(1) + weight.unsqueeze(-1) * target
    mean = sums / torch.where(full, mass + weight, 1.0).unsqueeze(-1)
    loc = torch.where(full.unsqueeze(-1), mean, net.loc)
    tail = [1] * kind.event_dim
    scatter = kind.scatter(point.moments.sum(1), loc)
    if between is not None:
        moved = replace(point, net=replace(net, loc=loc))
        scatter = scatter + between.reshape(-1, 1, *tail) * between_classes(moved)
    full, mass = full.reshape(*full.shape, *tail), torch.where(full, mass, 1.0).reshape(*full.shape, *tail)
    covariance = kind.floored(torch.where(full, scatter / mass, net.covariance), point.data.unit)
    return Network(_normalised(point.counts, net.mixing), loc, covariance, class_prior(point))


def class_prior(point: Point) -> Tensor:
    """Eq. 20; with unlabelled rows their expected classes count too.  Shape ``(B, K)``."""
    if point.data.is_labelled:
        return point.net.class_prior
    return point.counts.sum(-1) / point.counts.sum((-1, -2)).unsqueeze(-1)


def _normalised(numerators: Tensor, old: Tensor) -> Tensor:
    """Numerators over their sum in each class; the old mixing of a class that has none."""
    total = numerators.sum(-1, keepdim=True)
    return torch.where(total > 0, numerators / torch.where(total > 0, total, 1.0), old)


def clamped_mixing(numerators: Tensor, old: Tensor) -> Tensor:
    """Mixing from the numerators of eq. 29: negative ones are set to zero *before* the sum is taken.

    The published order, ratio first, can turn the most rejected kernel into the heaviest one: numerators 0.84 and
    -45.7 have a negative sum.  A class whose numerators are all negative keeps its old mixing.

    :param numerators: shape ``(..., K, M)``.
    """
    return _normalised(numerators.clamp(min=0.0), old)  # a share of data is not negative


def numerators(point: Point, distance: Tensor) -> Tensor:
    """Numerators of eq. 29 for given squared distances, shape ``(B, K, M)``; the correction sums to zero, eq. 31."""
    return point.counts + correction(point, distance)


def correction(point: Point, distance: Tensor) -> Tensor:
    """``alpha / 8 P_jk (sum_l P_jl d_jl - d_jk)``, eq. 29: sums to zero over classes, shape ``(B, K, M)``."""
    P = point.net.ownership
    mean = (P * distance).sum(1, keepdim=True)
    return BHATTACHARYYA * point.alpha[:, None, None] * P * (mean - distance)


def prbf2001_update(point: Point) -> Point:
    """Eqs. 27 to 31 with the published time indices, and the clamp done safely (:func:`clamped_mixing`).

    This is neither an M-step nor ascent: eq. 22 falls in about one round of six.  Its clamp rejects classes for good
    and makes most of the gain in error; probabilities become too sure.  The mixing looks at the distances of one
    round before, which there are none of in the first round.
    """
    net = _estimated(point, point.alpha)
    mixing = clamped_mixing(numerators(point, point.lag), point.net.mixing)
    return evaluate(point.data, replace(net, mixing=mixing), point.alpha, _from_subkernels(point, net))


def _from_subkernels(point: Point, net: Network) -> Tensor:
    """Squared distance of each new centre from the subkernels that are held, by its covariance, ``(B, K, M)``."""
    return mahalanobis(point.kind, net.covariance.unsqueeze(1), net.loc.unsqueeze(1) - point.centres)


def exact_m_step(point: Point) -> Point:
    """The exact M-step of eq. 26 at held subkernels, with the new covariance in the penalty; nothing is clamped.

    Centres by eq. 27; covariances with the scatter of the subkernels' centres, weight ``alpha / 4``; mixing
    ``R_jk / (lambda_k + g_jk)``, whose ``lambda_k`` is the root of a function of one number.  Not ascent on eq. 22,
    where the subkernels move too; a kernel with far fewer data than ``alpha / 4`` may grow without bound.
    """
    net = _estimated(point, point.alpha, 2.0 * BHATTACHARYYA * point.alpha)
    mixing = exact_mixing(point, _from_subkernels(point, net))
    return evaluate(point.data, replace(net, mixing=mixing), point.alpha)


def exact_mixing(point: Point, distance: Tensor) -> Tensor:
    """Mixing that maximises eq. 26 at given distances, shape ``(B, K, M)``; positive wherever it was.

    Rounds of the stationary equation, each shortened until eq. 26 does not fall.
    """
    here = _Mixing(point.net.mixing, expected(point, point.net.mixing, distance))
    all_rows = torch.arange(len(point.alpha), device=point.alpha.device)
    for _ in range(MOST):
        before, target = here, stationary_mixing(point, here.value, distance)

        def trial(rows: Tensor, scale: Tensor, old: _Mixing = before, target: Tensor = target) -> _Mixing:
            begin, own = (old, point) if len(rows) == len(all_rows) else (old[rows], point[rows])
            mixing = begin.value + along(scale, target) * (target[rows] - begin.value)
            return _Mixing(mixing, expected(own, mixing, distance[rows]))

        line = Line(torch.zeros_like(here.objective), ROUNDING * here.objective.abs())
        here = Backtracking()(before, all_rows, line, trial)[0]
        if float((here.value - before.value).abs().max()) < ROUNDING:
            break
    return here.value


@dataclass(frozen=True, eq=False)
class _Mixing(Batched):
    """A mixing and eq. 26 there, nats."""

    value: Tensor  # (B, K, M)
    objective: Tensor  # (B,)


def expected(point: Point, mixing: Tensor, distance: Tensor) -> Tensor:
    """The part of eq. 26 that depends on the mixing, nats, shape ``(B,)``."""
    P = replace(point.net, mixing=mixing).ownership
    penalty = BHATTACHARYYA * point.alpha[:, None, None] * P * distance
    return (torch.xlogy(point.counts, mixing) - penalty).sum((-1, -2))


def stationary_mixing(point: Point, mixing: Tensor, distance: Tensor) -> Tensor:
    """``R_jk / (lambda_k + g_jk)`` with ``lambda_k`` such that each class sums to 1, shape ``(B, K, M)``."""
    net = replace(point.net, mixing=mixing)
    use = (mixing * net.class_prior.unsqueeze(-1)).sum(1, keepdim=True)
    mean = (net.ownership * distance).sum(1, keepdim=True)
    share = torch.where(use > 0, net.class_prior.unsqueeze(-1) / torch.where(use > 0, use, 1.0), 0.0)
    g = BHATTACHARYYA * point.alpha[:, None, None] * share * (distance - mean)
    return shares(point.counts, g, mixing)


def shares(R: Tensor, g: Tensor, old: Tensor) -> Tensor:
    """``R_j / (lambda + g_j)`` with the one ``lambda`` above all ``-g_j`` at which they sum to 1, shape ``(..., M)``.

    Newton's method on the reciprocal of the sum, which is concave: monotone from the left end.  Everything is
    measured from the pole, so that nothing cancels.

    :param R: not negative, shape ``(..., M)``.
    :param old: what to return where all ``R`` are zero.
    """
    used = R > 0
    above = torch.where(used, g - torch.where(used, g, torch.inf).amin(-1, keepdim=True), 1.0)  # from the pole
    root = torch.where(used, R - above, 0.0).amax(-1, keepdim=True)
    for _ in range(MOST):
        below = torch.where(used, root + above, 1.0)
        total = (R / below).sum(-1, keepdim=True)
        step = (total - 1.0) * total / (R / below.square()).sum(-1, keepdim=True)
        root = torch.where(used.any(-1, keepdim=True), root + step, 1.0)
        if bool((step <= ROUNDING * root.abs()).all()):
            break
    return _normalised(R / torch.where(used, root + above, 1.0), old)


FOLDS = 3  # the fewest in which a covariance is estimated from most of the data
ERRORS = 3.0  # standard errors that it must exceed as well


def covariance_gain(X: Tensor, resp: Tensor, kind: Covariance) -> NoiseGain:
    r"""Log likelihood of every row under covariances estimated from the other folds, full less restricted.

    .. math:: \sum_{nj} r_{nj} \bigl[\log N(x_n | m_j, S_j) - \log N(x_n | m_j, S'_j)\bigr]

    with ``m_j`` and ``S_j`` the weighted mean and covariance without the fold of row n, and ``S'_j`` the closest one of
    the network's kind.

    :param X: inputs, shape ``(N, D)``.
    :param resp: responsibilities of the kernels, shape ``(N, M)``.
    """
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0)).to(X.device)
    fold, unit = order % FOLDS, kind.floor * column_variance(X)
    gains = torch.zeros_like(X[:, 0])
    for weight in resp.mT:
        for held in (fold == f for f in range(FOLDS)):
            others = torch.where(held, 0.0, weight)
            mass = others.sum()
            if float(mass) > 0.0:
                centred = X - others @ X / mass
                S = (centred * others.unsqueeze(-1)).mT @ centred / mass
                own = kind.matrix(kind.floored(kind.restricted(S), unit), X.shape[-1])
                full, restricted = (MultivariateNormal(0.0 * X[0], A) for A in (Full().floored(S, unit), own))
                gains[held] += weight[held] * (full.log_prob(centred[held]) - restricted.log_prob(centred[held]))
    nats, error = float(gains.sum()), float(gains.std(correction=0)) * len(X) ** 0.5
    advice = (
        f"by rows held out, kernels with full covariances would be about {nats:.0f} nats likelier (standard error "
        f"{error:.0f}): fit prbf(..., kernels=Full()) and compare errors on rows of your own."
    )
    return NoiseGain(nats, max(NOTABLE_GAIN, ERRORS * error), advice)
