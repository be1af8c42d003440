"""Draws of a nearly normal density: white noise bent by its third derivatives, as smooth functions of outer sites."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.laplace.shape.conditional import Profile, Profiles, is_normal
from pyro_evidence.laplace.shape.outer_points import follow
from pyro_evidence.numerics import importance
from pyro_evidence.numerics.quadrature import axis_map
from pyro_evidence.numerics.quadrature.axis_map import AxisMap
from pyro_evidence.numerics.quadrature.nodes import quasi_normal

POINTS = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)  # standard deviations
STEP = 1.0  # of differences of curvatures, in standard deviations
LARGEST = 100  # coordinates
NUM_POINTS = 512  # quasi-random points at which means and standard deviations are matched
FEW_POINTS = 128  # where rows are evaluated one by one
WORTH = 0.05  # share of the points that weights must leave to be believed


@dataclass(frozen=True)
class Bend:
    r"""``t_c = loc_c + scale_c [s_c(w) + exp(l_c(w)) f_c(w_c)]`` from white noise ``w``, one by one.

    ``s_c`` is quadratic and ``l_c`` linear in the coordinates before ``c``, with the third derivatives of the log
    density as coefficients; ``f_c`` is the map that makes its section along ``c`` normal.  All follow the outer sites:
    leading sizes ``B`` are those of their basis, see :func:`follow`.
    """

    loc: Tensor  # (B, D)
    log_scale: Tensor  # (B, D)
    axes: Tensor  # (B, D, 4) of AxisMap: location, log scale, skew, log tail
    linear: Tensor  # (B, D, D) strictly lower
    quadratic: Tensor  # (B, D, D, D) strictly lower in the last two

    def forward(self, z: Tensor, white: Tensor) -> tuple[Tensor, Tensor]:
        """Bent noise ``(S, D)`` at outer coordinates ``z`` ``(S, d)``, and the log by which volumes grow ``(S,)``."""
        basis = follow(z, len(self.loc))
        shift = _along(basis, torch.einsum("bcij,si,sj->bsc", self.quadratic, white, white))
        log_stretch = _along(basis, white @ self.linear.mT).tanh()
        axes, log_scale = self._axes(basis), basis @ self.log_scale
        bent = basis @ self.loc + log_scale.exp() * (shift + log_stretch.exp() * axes.forward(white))
        return bent, axes.log_slope(white) + (log_stretch + log_scale).sum(-1)

    def inverse(self, z: Tensor, bent: Tensor) -> Tensor:
        """The white noise that :meth:`forward` made ``bent`` of."""
        basis, axes = follow(z, len(self.loc)), self._axes(follow(z, len(self.loc)))
        plain, white = (bent - basis @ self.loc) * (-basis @ self.log_scale).exp(), torch.zeros_like(bent)
        for c in range(bent.shape[-1]):
            shift = (basis * torch.einsum("bij,si,sj->sb", self.quadratic[:, c], white, white)).sum(-1)
            log_stretch = (basis * (white @ self.linear[:, c].mT)).sum(-1).tanh()
            own = AxisMap(*(part[:, c : c + 1] for part in vars(axes).values()))
            white[:, c] = own.inverse(((plain[:, c] - shift) * (-log_stretch).exp()).unsqueeze(-1)).squeeze(-1)
        return white

    def _axes(self, basis: Tensor) -> AxisMap:
        loc, log_scale, skew, log_tail = torch.tensordot(basis, self.axes, 1).unbind(-1)
        return AxisMap(loc, log_scale.exp(), skew, log_tail.exp())


def _along(basis: Tensor, values: Tensor) -> Tensor:
    """Values ``(B, S, D)`` summed over the basis of each row, ``(S, D)``."""
    return torch.einsum("sb,bsd->sd", basis, values)


def bend(profiles: Profiles, z: Tensor, num_points: int) -> Bend | None:
    """The bend of inner densities; None where they are normal, or normal noise is nearer to them.

    :param profiles: inner modes at the outer coordinates ``z`` ``(K, d)``.
    """
    if is_normal(profiles):
        return None
    parts = [_at(profiles, row, num_points) for row in range(len(z))]
    if any(part is None for part in parts):
        return None
    columns = zip(*(vars(part).values() for part in parts), strict=True)
    inverse = torch.linalg.inv(follow(z, len(z)))
    return Bend(*(torch.tensordot(inverse, torch.cat(column), 1) for column in columns))


def _at(profiles: Profiles, row: int, num_points: int) -> Bend | None:
    """The bend of one row's density, with its moments matched."""
    one = profiles.row(row)
    raw, white = _third_order(one), quasi_normal(num_points, len(one.u)).to(one.u)
    plain = _log_weights(one, white, torch.zeros(len(white)).to(white), white)
    for _ in range(2):
        raw = _matched(one, raw, white)
    bent, log_slope = raw.forward(white[:, :0], white)
    found = _log_weights(one, bent, log_slope, white)
    sizes = [float(importance.effective_sample_size(each)) for each in (found, plain)]
    return raw if sizes[0] > max(sizes[1], WORTH * num_points) else None


def _third_order(one: Profile) -> Bend:
    """From curvatures one standard deviation off on either side, along each white coordinate."""
    size, tril = len(one.u), one.colour
    away = STEP * tril.mT
    plus, minus = (tril.mT @ one.precision(torch.cat([one.u + away, one.u - away])) @ tril).chunk(2)
    third = (minus - plus) / (2.0 * STEP)
    third = (third + third.permute(1, 0, 2) + third.permute(2, 1, 0)) / 3.0
    index = torch.arange(size, device=tril.device)
    before = index.unsqueeze(-1) > index
    both = before.unsqueeze(-1) & before.unsqueeze(-2)
    own = third.diagonal(dim1=0, dim2=1).mT  # (D, D): c, c, a
    zero = torch.zeros(1, size).to(tril)
    axes = _sections(one).unsqueeze(0)
    return Bend(zero, zero, axes, (0.5 * own * before).unsqueeze(0), (0.5 * third * both).unsqueeze(0))


def _sections(one: Profile) -> Tensor:
    """Maps of the sections along each white coordinate through the mode, ``(D, 4)``."""
    size, points = len(one.u), one.u.new_tensor(POINTS)
    rows = one.u + (points.unsqueeze(-1) * one.colour.mT.unsqueeze(1)).reshape(-1, size)
    axes = axis_map.fitted(points.expand(size, -1), one.log_joint(rows).reshape(size, -1))
    return torch.stack([axes.loc, axes.scale.log(), axes.skew, axes.tail.log()], -1)


def _matched(one: Profile, raw: Bend, white: Tensor) -> Bend:
    """With the means and standard deviations that importance weights say."""
    bent, log_slope = raw.forward(white[:, :0], white)
    log_weights = _log_weights(one, bent, log_slope, white)
    if float(importance.effective_sample_size(log_weights)) < WORTH * len(white):
        return raw
    weights = log_weights.softmax(0).unsqueeze(-1)
    mean, middle = (weights * bent).sum(0), bent.mean(0)
    ratio = ((weights * (bent - mean).square()).sum(0) / (bent - middle).square().mean(0)).sqrt()
    return Bend(mean + ratio * (raw.loc - middle), raw.log_scale + ratio.log(), raw.axes, raw.linear, raw.quadratic)


def _log_weights(one: Profile, bent: Tensor, log_slope: Tensor, white: Tensor) -> Tensor:
    """Log ratio of the exact density to that of bent noise, up to a constant, nats, ``(S,)``."""
    log_joint = one.log_joint(one.u + bent @ one.colour.mT)
    return (log_joint + log_slope + 0.5 * white.square().sum(-1)).nan_to_num(nan=-torch.inf)
