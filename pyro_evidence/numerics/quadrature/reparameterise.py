"""Coordinates of the marginalised sites in which their density is nearly standard normal."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_evidence.numerics.quadrature.rules import gauss_hermite

NUM_PARAMS = 4  # of each axis
CHANGE = 5.0  # of the damping, after a step that helps and one that does not
NUM_STEPS = 60  # a bound, no target: four parameters of each axis, started from those of the normal
PULL = 1e-3  # to the identity, beside misfits of order one
FEW = 32  # of many modes, whose maps are found first: more than there are probes, of which the others are linear
KNOWN = 1e-10  # relative size of what rounding leaves of how probes differ from mode to mode
NUM_NODES = 31  # for the moments of an axis
LEAST_RISE = 1e-8  # of the cost: parameters then move by its root, 1e-4, which no integral over the axis feels


@dataclass(frozen=True, eq=False)
class AxisMap:
    """``t = loc + scale * sinh((asinh(z) + skew) / tail)`` on every axis; the identity at ``(0, 1, 0, 1)``.

    The inverse makes ``t`` normal where it is sinh-arcsinh distributed; Jones and Pewsey (2009), eq. 2.  A ``tail``
    below 1 stands for tails heavier than normal, down to exponential ones at one half.
    """

    loc: Tensor  # (d,)
    scale: Tensor  # (d,) positive
    skew: Tensor  # (d,)
    tail: Tensor  # (d,) positive

    def forward(self, z: Tensor) -> Tensor:
        """From ``z`` to ``t``, both ``(..., d)``."""
        return self.loc + self.scale * ((z.asinh() + self.skew) / self.tail).sinh()

    def inverse(self, t: Tensor) -> Tensor:
        """From ``t`` to ``z``, both ``(..., d)``."""
        return (self.tail * ((t - self.loc) / self.scale).asinh() - self.skew).sinh()

    def log_slope(self, z: Tensor) -> Tensor:
        """``log |dt / dz|`` summed over the axes, shape ``(...)``."""
        return self.log_slopes(z).sum(-1)

    def log_slopes(self, z: Tensor) -> Tensor:
        """``log |dt / dz|`` on each axis, ``(..., d)``."""
        bent = ((z.asinh() + self.skew) / self.tail).cosh()
        return self.scale.log() + bent.log() - self.tail.log() - 0.5 * (1.0 + z.square()).log()

    @property
    def params(self) -> Tensor:
        """Location, log scale, skew and log tail, ``(..., d, 4)``."""
        return torch.stack([self.loc, self.scale.log(), self.skew, self.tail.log()], -1)


def map_of(params: Tensor) -> AxisMap:
    """The map of location, log scale, skew and log tail ``(..., d, 4)``."""
    loc, log_scale, skew, log_tail = params.unbind(-1)
    return AxisMap(loc, log_scale.exp(), skew, log_tail.exp())


def fitted(t: Tensor, log_density: Tensor, start: Tensor | None = None) -> AxisMap:
    """The map under which each axis is nearest to a standard normal, from its log density at a few points.

    Least squares in the log density, up to a constant, points weighed by that density itself, by Levenberg and
    Marquardt; an axis whose points say nothing finite keeps the identity.

    :param t: points on each axis, ``(d, J)``, at least five.
    :param log_density: the log density there, nats, up to a constant, ``(d, J)``.
    :param start: parameters of the map where the search begins, ``(d, 4)``; by default those of the identity.
    """
    target, weight = _weighed(log_density)
    zero = torch.zeros(len(t), NUM_PARAMS, dtype=torch.float64, device=t.device)
    share = weight.square() / weight.square().sum(-1, keepdim=True)
    params = zero if start is None else start
    found, left = params.clone(), torch.arange(len(params), device=params.device)
    damping = torch.full((len(params), 1), 1e-2, dtype=params.dtype, device=params.device)
    data: tuple[Tensor, ...] = (t, target, weight, share)  # of the axes that have not arrived
    here = _misfit(params, *data)
    for _ in range(NUM_STEPS):
        normal, fall = here[:, 1:, 1:], here[:, 1:, 0]
        normal = normal + (damping * normal.diagonal(dim1=-2, dim2=-1)).diag_embed()
        step = torch.linalg.solve(normal, fall).clamp(-1.0, 1.0)
        going = (step * fall).sum(-1) > LEAST_RISE * here[:, 0, 0]
        found[left] = params - step  # which moves an axis that has arrived by next to nothing
        if not bool(going.any()):
            break
        left, params, step, here, damping = (x[going] for x in (left, params, step, here, damping))
        data = tuple(x[going] for x in data)
        ahead = _misfit(params - step, *data)
        better = ahead[:, :1, 0] < here[:, :1, 0]
        params, here = torch.where(better, params - step, params), torch.where(better.unsqueeze(-1), ahead, here)
        damping = damping * torch.where(better, 1.0 / CHANGE, CHANGE)
        found[left] = params
    return map_of(found)


def _weighed(log_density: Tensor) -> tuple[Tensor, Tensor]:
    """Log densities ``(..., J)`` below the highest, and the root of the density as a weight; zero where not finite."""
    drop = log_density - log_density.amax(-1, keepdim=True)
    known = torch.isfinite(drop)
    return torch.where(known, drop, 0.0), torch.where(known, (0.5 * drop).exp(), 0.0)


def _misfit(params: Tensor, t: Tensor, target: Tensor, weight: Tensor, share: Tensor) -> Tensor:
    r"""Squares and products of the weighed misfit with the best constant and of its four derivatives, ``(d, 5, 5)``.

    Beside a mild pull to the identity.

    The log density that a standard normal ``z = sinh(y)`` gives ``t``, ``x = (t - loc) / scale``, is up to a constant

    .. math:: \log\cosh y - \tfrac12 \sinh^2 y - \tfrac12 \log(1 + x^2) + \log\frac{tail}{scale}, \qquad
        y = tail \cdot \operatorname{asinh} x - skew
    """
    one = map_of(params.unsqueeze(-2))
    x = (t - one.loc) / one.scale
    root = (1.0 + x.square()).sqrt()
    y = one.tail * (x.abs() + root).log().copysign(x) - one.skew  # asinh, as exact as a misfit needs it
    up = y.exp()
    down = up.reciprocal()
    sinh, cosh = 0.5 * (up - down), 0.5 * (up + down)
    value = (cosh / root).log() - 0.5 * sinh.square() + params[:, 3:] - params[:, 1:2]
    by_y = sinh / cosh - sinh * cosh
    by_x = by_y * one.tail / root - x / root.square()
    each = [value - target, -by_x / one.scale, -x * by_x - 1.0, -by_y, by_y * (y + one.skew) + 1.0]
    rows = torch.stack(each, -2)  # points last, along which sums are fast
    rows = weight.unsqueeze(-2) * (rows - rows @ share.unsqueeze(-1))
    pull = torch.cat([params.unsqueeze(-2), torch.eye(NUM_PARAMS).to(params).expand(len(params), -1, -1)], -2)
    rows = torch.cat([rows, PULL * pull], -1)
    return rows @ rows.mT


STEPS = tuple(0.8 * each for each in (1, 2, 3, 4, 6, 8))  # standard deviations
PROBES = (*(-step for step in reversed(STEPS)), 0.0, *STEPS)


@dataclass(frozen=True, eq=False)
class Standardisation:
    """``phi = centre + basis t``, ``t`` a smooth function of ``z`` on each axis; of one mode, or of many in rows.

    :ivar centre: the mode of the marginalised sites, unconstrained, shape ``(d,)``; of many ``(R, 1, d)``, the bases
        ``(R, d, d)``.
    :ivar basis: eigenvectors of the curvature there, each one standard deviation long, as columns ``(d, d)``.
    :ivar axes: from ``z`` to ``t``.
    """

    centre: Tensor
    basis: Tensor
    axes: AxisMap

    @property
    def num_dims(self) -> int:
        """Number of marginalised coordinates."""
        return self.centre.shape[-1]

    def forward(self, z: Tensor) -> Tensor:
        """From ``z`` to unconstrained marginalised coordinates, ``(..., d)``."""
        return self.centre + self.axes.forward(z) @ self.basis.mT

    def inverse(self, phi: Tensor) -> Tensor:
        """From unconstrained marginalised coordinates to ``z``, ``(..., d)``."""
        return self.axes.inverse(torch.linalg.solve(self.basis, (phi - self.centre).mT).mT)

    def log_slope(self, z: Tensor) -> Tensor:
        """``log |d phi / d z|``, shape ``(...)``."""
        log_volume = torch.linalg.slogdet(self.basis).logabsdet
        return self.axes.log_slope(z) + (log_volume.unsqueeze(-1) if self.basis.dim() > 2 else log_volume)

    def on_product(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`forward` and :meth:`log_slope` of many modes at all products of nodes ``(k, 1)``, the last fastest.

        :return: ``(R, k^d, d)`` and ``(R, k^d)``.
        """
        grid, d = list[Tensor](), self.num_dims
        for x in (self.axes.forward(nodes), self.axes.log_slopes(nodes)):
            each = [x[..., a].reshape(-1, *[1] * a, len(nodes), *[1] * (d - a - 1)) for a in range(d)]
            grid.append(torch.stack(torch.broadcast_tensors(*each), 1).flatten(2))  # nodes last: sums are fast
        log_volume = torch.linalg.slogdet(self.basis).logabsdet.unsqueeze(-1)
        moved = sum(self.basis[..., i : i + 1] * grid[0][:, i : i + 1] for i in range(d))  # many small products
        return (self.centre.mT + moved).mT, grid[1].sum(1) + log_volume

    def probes(self) -> Tensor:
        """Points on each axis, ``(..., d * J, d)`` in ``phi``, at which :meth:`skewed` wants the log density."""
        d = self.num_dims
        steps = self.centre.new_tensor(PROBES)
        t = torch.eye(d).to(self.centre).unsqueeze(1) * steps[None, :, None]
        return self.centre + t.reshape(-1, d) @ self.basis.mT

    def skewed(self, log_density: Tensor) -> "Standardisation":
        """With axes mapped so that each looks normal.

        :param log_density: at :meth:`probes`, nats, ``(..., d * J)``.
        """
        by_axis, d = log_density.reshape(-1, len(PROBES)), self.num_dims
        t, start = self.centre.new_tensor(PROBES).expand(len(by_axis), -1), None
        if len(by_axis) > FEW * d:  # many are alike: their maps are nearly linear in the weighed probes
            drop, weight = (x.unflatten(0, (-1, d)).movedim(1, 0) for x in _weighed(by_axis))
            seen, step = torch.cat([weight * drop, torch.ones_like(drop[..., :1])], -1), len(log_density) // FEW
            some = log_density[::step].reshape(-1, len(PROBES))
            params = fitted(t[: len(some)], some).params.unflatten(0, (-1, d)).movedim(1, 0)
            told = seen @ torch.linalg.pinv(seen[:, ::step], rtol=KNOWN) @ params
            start = told.clamp(params.amin(1, keepdim=True), params.amax(1, keepdim=True)).movedim(1, 0).flatten(0, 1)
        axes = fitted(t, by_axis, start)
        return replace(self, axes=map_of(axes.params.reshape(*self.centre.shape, NUM_PARAMS)))

    def matched(self, z: Tensor, weights: Tensor, share: float) -> "Standardisation":
        """Moved and stretched to the moments of weighted points, of one mode; each axis stays as skewed as it is.

        :param z: the points, ``(K, d)``, and their weights ``(K,)``, which sum to one.
        :param share: how far their covariance is drawn to the one before, from 0 to 1.
        """
        rule = gauss_hermite(NUM_NODES, self.centre.device)
        t, mass = self.axes.forward(rule.nodes), rule.log_weights.exp()
        loc = mass @ t
        sd = (mass @ (t - loc).square()).sqrt()
        x = (self.axes.forward(z) - loc) / sd  # of mean zero and covariance one where z is standard normal
        mean = weights @ x
        covariance = torch.lerp((x - mean).mT @ (weights.unsqueeze(-1) * (x - mean)), torch.eye(len(sd)).to(sd), share)
        values, vectors = torch.linalg.eigh(covariance)
        basis = (self.basis * sd) @ (vectors * values.sqrt() @ vectors.mT) / sd
        return replace(self, centre=self.centre + self.basis @ (loc + sd * mean) - basis @ loc, basis=basis)

    def row(self, index: int) -> "Standardisation":
        """That of one of many modes."""
        return Standardisation(self.centre[index, 0], self.basis[index], map_of(self.axes.params[index, 0]))

    def rows(self, index: Tensor) -> "Standardisation":
        """Those of some of many modes."""
        return Standardisation(self.centre[index], self.basis[index], map_of(self.axes.params[index]))


def standardising(centre: Tensor, precision: Tensor) -> Standardisation:
    """Straight axes along the eigenvectors of a precision ``(..., d, d)``, the widest first."""
    values, vectors = torch.linalg.eigh(precision)
    nothing = torch.zeros(centre.shape[-1], NUM_PARAMS, dtype=torch.float64, device=centre.device)
    return Standardisation(centre, vectors * values.rsqrt().unsqueeze(-2), map_of(nothing))
