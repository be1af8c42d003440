"""Skewness of nearly normal densities: third-order maps of white noise, smooth in the marginalised sites."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_evidence.laplace.tour import within
from pyro_evidence.nested.quantile_map import Calibrated
from pyro_evidence.numerics import importance
from pyro_evidence.numerics.batched import BATCH_NUMBERS
from pyro_evidence.numerics.newton import Density
from pyro_evidence.numerics.quadrature.densities import beyond_valleys
from pyro_evidence.numerics.quadrature.reparameterise import AxisMap, fitted, map_of
from pyro_evidence.numerics.quadrature.rules import quasi_normal
from pyro_evidence.precision.dense import Precision
from pyro_evidence.program.log_joint import LogJoint


@dataclass(frozen=True, eq=False)
class Profiles:
    """Modes with their covariances, one for each row of hyperparameters.

    :ivar shared: the density of rows that share their hyperparameters.
    :ivar theta: what the densities take beside ``u``, ``(K, T)``.
    """

    density: Density
    shared: Density
    theta: Tensor
    u: Tensor  # (K, D)
    covariance_root: Tensor  # (K, D, D) white noise to noise of the covariance

    @property
    def covariance(self) -> Tensor:
        """``(K, D, D)``."""
        return self.covariance_root @ self.covariance_root.mT

    def log_joint(self, row: int, u: Tensor) -> Tensor:
        """At points ``(S, D)`` with the hyperparameters of one mode, nats, ``(S,)``."""
        return self.shared.log_joint(u, self.theta[row].expand(len(u), -1)).detach()

    def precision(self, row: int, u: Tensor) -> Tensor:
        """Minus the Hessians at points ``(S, D)``, ``(S, D, D)``."""
        return self.shared.precision(u, self.theta[row].expand(len(u), -1)).detach().double()

    def log_marginal(self, points: Tensor) -> Tensor:
        r"""Log marginal density of every coordinate at ``points`` standard deviations off its mode, ``(K, D, J)``.

        .. math:: \log p(u_i) \approx \log p(u_i, \hat u_{-i}(u_i)) - \tfrac12 \log |A_{-i,-i}|

        up to a constant; minus infinity where the others have no mode.  Tierney and Kadane (1986), eq. 4.1.
        """
        num, size = self.u.shape
        covariance = self.covariance
        sd = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
        along = (covariance / sd.unsqueeze(-1)).unsqueeze(2)  # how all follow coordinate i, (K, D, 1, D)
        start = self.u[:, None, None] + points.reshape(-1, 1) * along
        index = torch.arange(size, device=self.u.device)[:, None].expand(num, -1, len(points))
        theta = self.theta[:, None, None].expand(-1, size, len(points), -1)
        rows = (start.flatten(0, 2), theta.flatten(0, 2), index.flatten())
        parts = zip(*(part.split(max(1, BATCH_NUMBERS // size**2)) for part in rows), strict=True)
        return torch.cat([self._given(*part) for part in parts]).reshape(num, size, len(points))

    def _given(self, u: Tensor, theta: Tensor, index: Tensor) -> Tensor:
        """One Newton step in the other coordinates, and what a second one promises."""
        first = _bowl(self.density, u, theta, index)
        moved = u + first.step
        better = (self.density.log_joint(moved, theta) > first.log_joint).unsqueeze(-1)
        second = _bowl(self.density, torch.where(better, moved, u), theta, index)
        value = second.log_joint + 0.5 * second.decrement - 0.5 * second.log_det
        return torch.where(torch.isfinite(value), value, -torch.inf).detach()


@dataclass(frozen=True, eq=False)
class ConditionalLaplace:
    """Second order around a point in all coordinates but one, which is held; nan where there is no maximum."""

    log_joint: Tensor  # (R,)
    step: Tensor  # (R, D) Newton's, zero in the coordinate that is held
    decrement: Tensor  # (R,) twice what it promises, nats
    log_det: Tensor  # (R,) of the precision of the others


def _bowl(density: Density, u: Tensor, theta: Tensor, index: Tensor) -> ConditionalLaplace:
    """By one factor of the whole precision: what a constraint costs is a correction of rank one."""
    log_joint, gradient = density.gradient(u, theta)
    tril, info = torch.linalg.cholesky_ex(density.precision(u, theta).detach().double())
    held = torch.nn.functional.one_hot(index, u.shape[-1]).to(u)
    solved = torch.cholesky_solve(torch.stack([gradient.double(), held], -1), tril)
    variance = (solved[..., 1] * held).sum(-1, keepdim=True)
    pull = (solved[..., 0] * held).sum(-1, keepdim=True) / variance
    step = solved[..., 0] - pull * solved[..., 1]
    log_det = 2.0 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1) + variance.squeeze(-1).log()
    sound = torch.where(info == 0, 0.0, torch.nan)
    return ConditionalLaplace(log_joint, step.nan_to_num(0.0), (gradient * step).sum(-1), log_det + sound)


def is_normal(profiles: Profiles) -> bool:
    """Whether the curvature two standard deviations off, on either side, is that at the mode."""
    u, root = profiles.u[0], profiles.covariance_root[0]
    away = 2.0 * root.sum(-1) / len(u) ** 0.5
    gap = root.mT @ profiles.precision(0, torch.stack([u + away, u - away])) @ root
    return bool((gap - torch.eye(len(u)).to(gap)).abs().max() < 1e-5)


REACH = 1.6  # standard deviations of the marginalised coordinates at which shapes are looked at
FARTHEST = 1.5 * REACH  # beyond which they are taken as here
FOLLOWED = 3  # marginalised coordinates up to which shapes may change with them


def skewness_points(num_dims: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Marginalised coordinates at which inner modes are wanted: centre and axes, ``(K, d)``, or the centre alone."""
    axes, centre = REACH * torch.eye(num_dims).to(like), like.new_zeros(1, num_dims)
    return (torch.cat([centre, axes, -axes]) if num_dims <= FOLLOWED else centre), centre


def follow(z: Tensor, num: int) -> Tensor:
    """The first ``num`` of 1, ``z`` and ``z^2`` at marginalised coordinates ``(S, d)``, ``(S, num)``."""
    near = z.clamp(-FARTHEST, FARTHEST)
    return torch.cat([z.new_ones(len(z), 1), near, near.square()], -1)[:, :num]


POINTS = tuple(range(-3, 4))  # standard deviations
STEP = 1.0  # of differences of curvatures, in standard deviations
LARGEST = 100  # coordinates
NUM_POINTS = 512  # quasi-random points at which means and standard deviations are matched
TABULATED = 4096  # quasi-random points of tables and quantiles, which are then known to a hundredth of a deviation
FEW_POINTS = 128  # where rows are evaluated one by one, or cost much
PRICE = 2**27  # bytes that points may cost, as :func:`within` counts them: a third of a second
PASSES = 4  # over the points that are matched
WORTH = 0.05  # share of the points that weights must leave to be believed


@dataclass(frozen=True, eq=False)
class SkewnessCorrection:
    r"""``t_c = loc_c + scale_c [s_c(w) + exp(l_c(w)) f_c(w_c)]`` from white noise ``w``, one by one.

    ``s_c`` is quadratic and ``l_c`` linear in the coordinates before ``c``, with the third derivatives of the log
    density as coefficients; ``f_c`` is the map that makes its section along ``c`` normal.  All follow the marginalised
    sites: leading sizes ``B`` are those of their basis, see :func:`follow`.
    """

    loc: Tensor  # (B, D)
    log_scale: Tensor  # (B, D)
    axes: Tensor  # (B, D, 4) of AxisMap: location, log scale, skew, log tail
    linear: Tensor  # (B, D, D) strictly lower
    quadratic: Tensor  # (B, D, D, D) strictly lower in the last two

    def forward(self, z: Tensor, white: Tensor) -> tuple[Tensor, Tensor]:
        """Skewed noise ``(S, D)`` at marginalised coordinates ``z`` ``(S, d)``, and its log volume factor ``(S,)``."""
        basis = follow(z, len(self.loc))
        shift = _along(basis, torch.einsum("bcij,si,sj->bsc", self.quadratic, white, white))
        log_stretch = _along(basis, white @ self.linear.mT).tanh()
        axes, log_scale = map_of(torch.tensordot(basis, self.axes, 1)), basis @ self.log_scale
        skewed = basis @ self.loc + log_scale.exp() * (shift + log_stretch.exp() * axes.forward(white))
        return skewed, axes.log_slope(white) + (log_stretch + log_scale).sum(-1)

    def inverse(self, z: Tensor, skewed: Tensor) -> Tensor:
        """The white noise that :meth:`forward` made ``skewed`` of."""
        basis = follow(z, len(self.loc))
        axes = map_of(torch.tensordot(basis, self.axes, 1))
        plain, white = (skewed - basis @ self.loc) * (-basis @ self.log_scale).exp(), torch.zeros_like(skewed)
        for c in range(skewed.shape[-1]):
            shift = (basis * torch.einsum("bij,si,sj->sb", self.quadratic[:, c], white, white)).sum(-1)
            log_stretch = (basis * (white @ self.linear[:, c].mT)).sum(-1).tanh()
            own = AxisMap(*(part[:, c : c + 1] for part in vars(axes).values()))
            white[:, c] = own.inverse(((plain[:, c] - shift) * (-log_stretch).exp()).unsqueeze(-1)).squeeze(-1)
        return white


@dataclass(frozen=True, eq=False)
class Shift:
    """Inner draws about their means, by the next order of Laplace's series, with the spread of the mode's Gaussian.

    :ivar loc: in white noise, in the basis of :func:`follow`, ``(B, D)``.
    """

    loc: Tensor

    def forward(self, z: Tensor, white: Tensor) -> tuple[Tensor, Tensor]:
        """Shifted noise ``(S, D)`` at marginalised coordinates ``z`` ``(S, d)``, and its log volume factor, zero."""
        return white + follow(z, len(self.loc)) @ self.loc, white.new_zeros(len(white))

    def inverse(self, z: Tensor, shifted: Tensor) -> Tensor:
        """The white noise that :meth:`forward` made ``shifted`` of."""
        return shifted - follow(z, len(self.loc)) @ self.loc


def _along(basis: Tensor, values: Tensor) -> Tensor:
    """Values ``(B, S, D)`` summed over the basis of each row, ``(S, D)``."""
    return torch.einsum("sb,bsd->sd", basis, values)


def affordable(joint: LogJoint, passes: int, few: int, most: int) -> int:
    """Number of points of so many passes over them: few, where rows are evaluated one by one, or cost much."""
    return few if joint.row_bytes is None else max(few, within(PRICE / passes, joint, most))


def num_matched(joint: LogJoint, num_modes: int) -> int:
    """Number of points at each of so many modes, at which means and standard deviations are matched."""
    return affordable(joint, PASSES * num_modes, FEW_POINTS, NUM_POINTS)


def skewness_correction(profiles: Profiles, z: Tensor, num_points: int) -> SkewnessCorrection | None:
    """The skewness correction of inner densities; None where they are normal, or normal noise is nearer to them.

    :param profiles: inner modes at the marginalised coordinates ``z`` ``(K, d)``.
    """
    if is_normal(profiles):
        return None
    parts = [_at(profiles, row, num_points) for row in range(len(z))]
    if parts[0] is None:
        return None
    known = parts if all(part is not None for part in parts) else parts[:1]  # else as at the centre everywhere
    columns = zip(*(vars(part).values() for part in known), strict=True)
    inverse = torch.linalg.inv(follow(z[: len(known)], len(known)))
    return SkewnessCorrection(*(torch.tensordot(inverse, torch.cat(column), 1) for column in columns))


def _at(profiles: Profiles, row: int, num_points: int) -> SkewnessCorrection | None:
    """The skewness correction of one row's density, with its moments matched."""
    raw, white = _third_order(profiles, row), quasi_normal(num_points, profiles.u.shape[-1]).to(profiles.u)
    plain = _log_weights(profiles, row, white, torch.zeros(len(white)).to(white), white)
    core, log_slope = raw.forward(white[:, :0], white)
    loc, log_scale = raw.loc[0], raw.log_scale[0]
    for _ in range(2):  # to the means and standard deviations that importance weights say
        skewed = loc + log_scale.exp() * core
        found = _log_weights(profiles, row, skewed, log_slope + log_scale.sum(), white)
        if float(importance.effective_sample_size(found)) < WORTH * num_points:
            break
        weights = found.softmax(0).unsqueeze(-1)
        mean, middle = (weights * skewed).sum(0), skewed.mean(0)
        ratio = ((weights * (skewed - mean).square()).sum(0) / (skewed - middle).square().mean(0)).sqrt()
        loc, log_scale = mean + ratio * (loc - middle), log_scale + ratio.log()
    found = _log_weights(profiles, row, loc + log_scale.exp() * core, log_slope + log_scale.sum(), white)
    sizes = [float(importance.effective_sample_size(each)) for each in (found, plain)]
    if sizes[0] <= max(sizes[1], WORTH * num_points):
        return None
    return replace(raw, loc=loc.unsqueeze(0), log_scale=log_scale.unsqueeze(0))


def _third_order(profiles: Profiles, row: int) -> SkewnessCorrection:
    """From curvatures one standard deviation off on either side, along each white coordinate."""
    u, tril = profiles.u[row], profiles.covariance_root[row]
    size, away = len(u), STEP * tril.mT
    plus, minus = (tril.mT @ profiles.precision(row, torch.cat([u + away, u - away])) @ tril).chunk(2)
    third = (minus - plus) / (2.0 * STEP)
    third = (third + third.permute(1, 0, 2) + third.permute(2, 1, 0)) / 3.0
    index = torch.arange(size, device=tril.device)
    before = index.unsqueeze(-1) > index
    both = before.unsqueeze(-1) & before.unsqueeze(-2)
    own = third.diagonal(dim1=0, dim2=1).mT  # (D, D): c, c, a
    zero = torch.zeros(1, size).to(tril)
    points = u.new_tensor(POINTS)  # of the section along each white coordinate, through the mode
    rows = u + (points.unsqueeze(-1) * tril.mT.unsqueeze(1)).reshape(-1, size)
    axes = fitted(points.expand(size, -1), profiles.log_joint(row, rows).reshape(size, -1)).params.unsqueeze(0)
    return SkewnessCorrection(zero, zero, axes, (0.5 * own * before).unsqueeze(0), (0.5 * third * both).unsqueeze(0))


def _log_weights(profiles: Profiles, row: int, skewed: Tensor, log_slope: Tensor, white: Tensor) -> Tensor:
    """Log ratio of the exact density to that of skewed noise, up to a constant, nats, ``(S,)``."""
    log_joint = profiles.log_joint(row, profiles.u[row] + skewed @ profiles.covariance_root[row].mT)
    return (log_joint + log_slope + 0.5 * white.square().sum(-1)).nan_to_num(nan=-torch.inf)


@dataclass(frozen=True, eq=False)
class Margins:
    """Maps of every inner coordinate, from standard normal to its standardised marginal.

    :ivar coefficients: of location, log scale, skew and log tail in 1, ``z`` and ``z^2`` of the marginalised
        coordinates, ``(B, D, 4)``; ``B`` is 1 where they do not follow them, and 1 + 2 d where they do.
    """

    coefficients: Tensor

    def axes(self, z: Tensor) -> AxisMap:
        """The maps at marginalised coordinates ``(S, d)``; each parameter ``(S, D)``."""
        return map_of(torch.tensordot(follow(z, len(self.coefficients)), self.coefficients, 1))


def margins(profiles: Profiles, z: Tensor) -> Margins | None:
    """The marginals' maps; None where the inner density is normal.

    :param profiles: inner modes at the marginalised coordinates ``z`` ``(K, d)`` of those points.
    """
    if is_normal(profiles):
        return None
    points = z.new_tensor(POINTS)
    log_density = profiles.log_marginal(points)
    log_density = torch.where(beyond_valleys(log_density), -torch.inf, log_density)  # there others found another mode
    axes = fitted(points.expand(log_density[..., 0].numel(), -1), log_density.flatten(0, 1))
    params = axes.params.unflatten(0, log_density.shape[:2])
    return Margins(torch.linalg.solve(follow(z, len(z)), params.flatten(1)).reshape(params.shape))


@dataclass(frozen=True, eq=False)
class SkewedNormal(Calibrated):
    """The normal distribution at a mode, its noise skewed.

    :ivar u: the mode, ``(D,)``.
    """

    u: Tensor
    precision: Precision
    skewness: SkewnessCorrection

    @property
    def loc(self) -> Tensor:
        """The mode, ``(1, D)``."""
        return self.u.unsqueeze(0)

    def _drawn(self, white: Tensor) -> tuple[Tensor, Tensor]:
        skewed, log_growth = self.skewness.forward(white[:, :0], white)
        return self.u + self.precision.unwhiten(skewed), self._log_normal(white) - log_growth

    def _log_prob(self, u: Tensor) -> Tensor:
        white = self.skewness.inverse(u[:, :0], self.precision.whiten(u - self.u))
        return self._log_normal(white) - self.skewness.forward(white[:, :0], white)[1]

    def _log_normal(self, white: Tensor) -> Tensor:
        return 0.5 * self.precision.log_det - 0.5 * (white.square() + math.log(math.tau)).sum(-1)


def skewed_normal(profile: Profiles, precision: Precision, joint: LogJoint) -> SkewedNormal | None:
    """The density about one mode with its skewness; None where it is normal, or a normal is nearer to it."""
    found = skewness_correction(profile, profile.u[:, :0], num_matched(joint, 1))
    if found is None:
        return None

    def log_weights(u: Tensor, log_density: Tensor) -> Tensor:
        return (profile.log_joint(0, u) - log_density).nan_to_num(nan=-torch.inf)

    num = affordable(joint, 1, NUM_POINTS, TABULATED)
    return SkewedNormal(profile.u[0], precision, found).calibrated(num, log_weights)
