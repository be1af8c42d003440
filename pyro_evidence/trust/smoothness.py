"""Whether second derivatives are those of the density, by differences of its gradient; named where they are not.

A log density with a corner, or one whose formula changes branches at a point, has second derivatives that automatic
differentiation gets wrong there, and Laplace's approximation would use them without a word.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.curvature.dense import Precision
from pyro_evidence.errors import NotSmooth
from pyro_evidence.numerics.derivatives import generic, pullback
from pyro_evidence.numerics.newton import Density
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.predictors import unwrapped
from pyro_evidence.program.sites import Node, sample_nodes
from pyro_evidence.threads import without_validation

WRONG = "its second derivatives are not those of its slope"
TOLERANCE = 0.05  # of a product with the Hessian, in posterior standard deviations
ONE_AND_HUNDREDTH = (1.0, 0.01)
# Of differences: a bend as narrow as the first step is none at a tenth of it; the rounding of an ill-conditioned slope
# is little at thirty and a thousand times the step, an eighth of a standard deviation, where a corner still shows.
STEPS = (1.0, 0.1, 30.0, 1000.0)
MOST_LOOKED_AT = 64  # coordinates along which a corner is looked for


@dataclass(frozen=True)
class Products:
    """Directions and what the curvature makes of them.

    :ivar directions: shape ``(P, D)``.
    :ivar images: minus the Hessian times each, as it is believed to be, shape ``(P, D)``.
    :ivar unit: what one unit of each coordinate of an image is worth, shape ``(D,)``: its standard deviation.
    """

    directions: Tensor
    images: Tensor
    unit: Tensor


def of_precision(precision: Precision, active: Tensor) -> Products:
    """Two directions, each about one posterior standard deviation long, by solving with the precision itself.

    :param active: coordinates that are not pruned, shape ``(D,)``.
    """
    unit = precision.variance[0].sqrt()
    images = generic(2, len(active), unit) / unit * active
    directions = torch.cat([precision.solve(image.unsqueeze(0)) for image in images])
    length = (directions * images).sum(-1, keepdim=True).sqrt()
    return Products(directions / length, images / length, unit * length.mean())


def curvature_error(density: Density, u: Tensor, theta: Tensor, products: Products, step: float) -> float:
    """The largest difference between the products and differences of the gradient, relative to the largest of either.

    :param step: of the differences, in units of the directions.
    """
    found = -_differences(density, u, theta, products.directions, step)
    size = torch.maximum(products.images.abs(), found.abs()) * products.unit
    gap = (found - products.images).abs() * products.unit
    largest = size.amax()
    return float(gap.amax() / torch.where(largest > 0.0, largest, 1.0))


def _differences(density: Density, u: Tensor, theta: Tensor, directions: Tensor, step: float) -> Tensor:
    """Central differences of the gradient along each direction, shape ``(P, D)``."""
    rows = torch.cat([u + step * directions, u - step * directions])
    with without_validation():
        slope = density.gradient(rows, theta)[1]
    ahead, behind = slope.chunk(2)
    return (ahead - behind) / (2.0 * step)


def certify(joint: LogJoint, density: Density, u: Tensor, theta: Tensor, products: Products) -> float:
    """Compare products with the Hessian at a mode with differences of the gradient.

    :param u: the mode, shape ``(D,)``.
    :return: the relative error, 1e-6 or less where all is well.
    :raises NotSmooth: where they disagree, with the site and its distribution.
    """
    step = _step(joint)
    for longer in STEPS:
        error = curvature_error(density, u, theta, products, longer * step)
        if error <= TOLERANCE:
            return error
    raise NotSmooth(_letter(joint, u, theta, step * products.directions[0], "at the posterior mode", WRONG))


def certify_sites(joint: LogJoint, u: Tensor, theta: Tensor, names: Sequence[str], unit: Tensor) -> None:
    """Compare second derivatives of some sites with differences of their slopes, where a search starts.

    :param unit: the change of each coordinate that matters to the sites, shape ``(D,)``.
    :raises NotSmooth: with the site and its distribution.
    """
    step = _step(joint) * unit * generic(1, len(u), u)[0] / len(u) ** 0.5
    gaps = _site_gaps(joint, u, theta, step)
    bad = [n for n in names if not gaps[n].error <= TOLERANCE]
    if bad:
        raise NotSmooth(_said(gaps[bad[0]], bad[0], "where the search starts", WRONG))


def _step(joint: LogJoint) -> float:
    """Of differences, where the error of the difference and its rounding are both small."""
    return float(torch.finfo(joint.dtype).eps ** 0.25)


def kink_letter(joint: LogJoint, density: Density, u: Tensor, theta: Tensor, gradient: Tensor) -> str | None:
    """The letter for a search that stopped on a corner of the log density; None where the slope does not jump.

    The change of the slope from one side of the point to the other goes to zero with the distance where the density
    is smooth, and does not where there is a corner.

    :param gradient: where the search stopped, shape ``(D,)``; its largest elements are looked at.
    """
    index = gradient.abs().argsort(descending=True)[:MOST_LOOKED_AT]
    ways = torch.zeros(len(index), len(u), dtype=u.dtype, device=u.device)
    reach = 10.0 * float(torch.finfo(joint.dtype).eps ** 0.5) * (1.0 + u[index].abs())
    ways[torch.arange(len(index)), index] = reach
    far, near = (_jumps(density, u, theta, s * ways, index) for s in ONE_AND_HUNDREDTH)
    jumps = torch.where(near > 0.3 * far, near, 0.0)
    worst = int(jumps.argmax())
    if not float(jumps[worst]) > 0.1 * float(gradient.abs().max()):
        return None
    jump = f"its slope jumps by {float(jumps[worst]):.2e} along {joint.latents.label(int(index[worst]))}"
    return _letter(joint, u, theta, ways[worst], "where the search for the posterior mode stopped", jump)


def _jumps(density: Density, u: Tensor, theta: Tensor, ways: Tensor, index: Tensor) -> Tensor:
    """How much each coordinate's slope changes from one end of its way to the other, shape ``(P,)``."""
    found = _differences(density, u, theta, ways, 1.0)
    return 2.0 * found.gather(1, index.unsqueeze(-1)).squeeze(-1).abs()


@dataclass(frozen=True)
class Gap:
    """One site's slope along a step, and what its second derivatives promise of it.

    :ivar change: of the slope from one end of the step to the other.
    :ivar promised: the same by the second derivative.
    :ivar kind: the name of the site's distribution.
    """

    change: float
    promised: float
    kind: str

    @property
    def size(self) -> float:
        """How far the two are apart."""
        return abs(self.change - self.promised)

    @property
    def error(self) -> float:
        """How far the two are apart, relative to the larger."""
        largest = max(abs(self.change), abs(self.promised))
        return self.size / largest if largest > 0.0 else 0.0


def _letter(joint: LogJoint, u: Tensor, theta: Tensor, step: Tensor, where: str, what: str) -> str:
    gaps = _site_gaps(joint, u, theta, step)
    name = max(gaps, key=lambda n: gaps[n].size)
    return _said(gaps[name], name, where, what)


def _said(gap: Gap, name: str, where: str, what: str) -> str:
    return (
        f"the log density of site '{name}', a {gap.kind}, has a kink {where}: {what}, so that there is no curvature "
        f"for Laplace's approximation. Expected a smooth density. Take a smooth relative (SoftLaplace or StudentT for "
        f"Laplace, softplus for relu or clamp, sqrt(x**2 + 1e-3) for abs), or run NUTS on the model; where weights "
        f"are to be sparse, RVM(model) prunes them."
    )


def _site_gaps(joint: LogJoint, u: Tensor, theta: Tensor, step: Tensor) -> dict[str, Gap]:
    """Every site's slope at both ends of ``u`` plus and minus ``step`` ``(D,)``, beside its second derivative."""
    point = u.detach().requires_grad_()
    here, sides = _sites(joint, point, theta), []
    for sign in (1.0, -1.0):
        end = (u + sign * step).detach().requires_grad_()
        sides.append({n: _slope(node, end) @ step for n, node in _sites(joint, end, theta).items()})
    return {
        n: Gap(float(sides[0][n] - sides[1][n]), 2.0 * float(_second(node, point, step) @ step), _kind(node["fn"]))
        for n, node in here.items()
    }


def _sites(joint: LogJoint, point: Tensor, theta: Tensor) -> dict[str, Node]:
    """The sites of a run, with their log densities."""
    trace = joint.trace(point, theta)
    with without_validation():
        trace.compute_log_prob()
    return sample_nodes(trace)


def _slope(node: Node, point: Tensor, *, create_graph: bool = False) -> Tensor:
    """The gradient of a site's log density, ``(D,)``."""
    value = node["log_prob_sum"]
    return pullback(value, point, create_graph=create_graph) if isinstance(value, Tensor) else torch.zeros_like(point)


def _second(node: Node, point: Tensor, step: Tensor) -> Tensor:
    """The Hessian of a site's log density times ``step``, ``(D,)``."""
    return pullback(_slope(node, point, create_graph=True), point, step)


def _kind(fn: Any) -> str:
    """The name of a distribution without its wrappers."""
    return type(unwrapped(fn).base).__name__.strip("_")
