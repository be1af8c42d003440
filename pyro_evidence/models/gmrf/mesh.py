"""Fields on a plane, by finite elements: the Matern family as the solution of a stochastic differential equation."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.utils import broadcast_all

from pyro_evidence.errors import BadInput
from pyro_evidence.lazy_import import import_extra
from pyro_evidence.models.gmrf.field import GaussianField
from pyro_evidence.models.gmrf.graphs import Operator
from pyro_evidence.numerics.batched import BATCH_NUMBERS
from pyro_evidence.numerics.derivatives import cached_property, ordinary

SMALLEST_ANGLE = 1e-3  # radians: below, the entries of one triangle differ by 1e6 and half of the digits are gone


@dataclass(frozen=True, eq=False)
class Places:
    """Places in a mesh: the corners of the triangle that each lies in, and its barycentric coordinates."""

    corners: Tensor  # (N, 3) long
    weights: Tensor  # (N, 3)

    def __call__(self, field: Tensor) -> Tensor:
        """The field ``(..., n)`` at the places, linear within each triangle, ``(..., N)``."""
        return (field[..., self.corners] * self.weights.to(field)).sum(-1)


@dataclass(frozen=True, eq=False)
class Mesh:
    """Triangles in the plane, looked at once; the field's values are those at their corners.

    Let it reach one range beyond the data: at its border the variance of the field is too large.

    :param points: corners ``(n, 2)``.
    :param triangles: three different corners each, ``(T, 3)`` long.
    :param barrier: triangles through which the field does not pass, as land in the sea, ``(T,)`` bool.
    :raises BadInput: for shapes and numbers that are no triangles, triangles without area, corners of none.

    >>> x, y = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    >>> mesh = Mesh.delaunay(torch.stack([x.flatten(), y.flatten()], -1))
    >>> len(mesh.triangles)
    18
    """

    points: Tensor
    triangles: Tensor
    barrier: Tensor | None = None
    _equations: dict[float, tuple[Operator, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        points, triangles = torch.as_tensor(self.points), torch.as_tensor(self.triangles)
        if points.dim() != 2 or points.shape[-1] != 2 or not bool(points.isfinite().all()):
            raise BadInput(f"points of shape {tuple(points.shape)}; expected finite corners (n, 2).")
        if triangles.dim() != 2 or triangles.shape[-1] != 3 or triangles.is_floating_point() or not len(triangles):
            raise BadInput(
                f"triangles of shape {tuple(triangles.shape)}, {triangles.dtype}; expected three corners each (T, 3), "
                f"long: Mesh(points, triangles)."
            )
        if int(triangles.min()) < 0 or int(triangles.max()) >= len(points):
            raise BadInput(f"triangles name corners up to {int(triangles.max())}; expected 0 to {len(points) - 1}.")
        object.__setattr__(self, "points", points.detach().double())
        object.__setattr__(self, "triangles", triangles.long())
        barrier = None if self.barrier is None else torch.as_tensor(self.barrier)
        object.__setattr__(self, "barrier", barrier)
        if barrier is not None and (barrier.shape != triangles.shape[:1] or barrier.dtype is not torch.bool):
            raise BadInput(
                f"barrier of shape {tuple(barrier.shape)}, {barrier.dtype}; expected one bool for each triangle."
            )
        flat = torch.nonzero(_is_flat(self.points, triangles)).flatten()
        if len(flat):
            number = int(flat[0])
            raise BadInput(
                f"triangle {number}, corners {triangles[number].tolist()}, has no area; expected three corners "
                f"that are not on one line. Leave it out."
            )
        unused = torch.nonzero(torch.bincount(triangles.flatten(), minlength=len(points)) == 0).flatten()
        if len(unused):
            raise BadInput(f"point {int(unused[0])} is no corner of a triangle; expected each to be one: leave it out.")

    @classmethod
    def delaunay(cls, points: Tensor, barrier: Tensor | None = None) -> "Mesh":
        """The Delaunay triangles of points ``(n, 2)``, without those at the border that have no area; needs SciPy.

        :raises ImportError: without SciPy (extra ``fields``).
        :raises BadInput: for fewer than three points, points that are all on a line, or not finite.
        """
        missing = "Mesh.delaunay needs SciPy: pip install 'pyro-evidence[fields]'."
        points, spatial = torch.as_tensor(points), import_extra("scipy.spatial", missing)
        try:
            found = spatial.Delaunay(points.detach().cpu().double().numpy())
        except (ValueError, spatial.QhullError) as error:
            raise BadInput(
                f"points of shape {tuple(points.shape)} have no triangles; expected three or more finite points (n, 2) "
                f"that are not on one line."
            ) from error
        triangles, beside = (torch.as_tensor(x).long().to(points.device) for x in (found.simplices, found.neighbors))
        flat = _is_flat(points.detach().double(), triangles)
        outer = flat & ((beside < 0) | flat[beside]).any(-1)
        return cls(points, triangles[~outer], barrier)

    @cached_property
    def _sides(self) -> Tensor:
        """The side opposite to each corner, ``(T, 3, 2)``."""
        corner = self.points[self.triangles]
        return corner[:, [2, 0, 1]] - corner[:, [1, 2, 0]]

    @cached_property
    def areas(self) -> Tensor:
        """Area of each triangle, ``(T,)``."""
        a, b = self._sides[:, 0], self._sides[:, 1]
        return 0.5 * (a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]).abs()

    def mass(self, factor: Tensor) -> Tensor:
        """A third of the area of each corner's triangles, times ``factor`` ``(T,)``: the lumped mass, ``(n,)``."""
        third = (factor * self.areas / 3.0).unsqueeze(-1).expand(-1, 3)
        return torch.zeros_like(self.points[:, 0]).index_add_(0, self.triangles.flatten(), third.flatten())

    @ordinary
    def equation(self, fraction: float) -> tuple[Operator, Tensor]:
        """Masses and stiffness, and the variances of the right side at unit range and scale, ``(n,)``.

        In the barrier the range is ``fraction`` of that outside.  Lindgren, Rue and Lindstrom (2011), eq. 10; with a
        barrier, Bakka et al. (2019), eqs. 11 and 12.
        """
        if fraction in self._equations:
            return self._equations[fraction]
        inside = torch.ones_like(self.areas)
        squared = inside if self.barrier is None else torch.where(self.barrier, fraction**2, inside)
        pairs, weights = [], []
        for a, b in ((0, 1), (1, 2), (2, 0)):
            pairs.append(self.triangles[:, [a, b]].sort(-1).values)
            weights.append(-squared * (self._sides[:, a] * self._sides[:, b]).sum(-1) / (4.0 * self.areas))
        edges, place = torch.unique(torch.cat(pairs), dim=0, return_inverse=True)
        weight = torch.zeros(len(edges)).to(squared).index_add_(0, place, torch.cat(weights))
        found = Operator(self.mass(inside), edges, weight), 0.5 * math.pi * self.mass(squared)
        return self._equations.setdefault(fraction, found)

    def locate(self, places: Tensor) -> Places:
        """Where the field is looked at.

        :param places: ``(N, 2)``.
        :raises BadInput: naming the first that lies in no triangle.
        """
        x, corner = torch.as_tensor(places).detach().double(), self.points[self.triangles]
        if x.dim() != 2 or x.shape[-1] != 2:
            raise BadInput(f"places of shape {tuple(x.shape)}; expected (N, 2).")
        base = corner[:, 2]
        to_barycentric = torch.linalg.inv((corner[:, :2] - base.unsqueeze(1)).mT)  # (T, 2, 2)
        found, weights = [], []
        for part in x.split(max(1, BATCH_NUMBERS // len(corner))):
            two = torch.einsum("tab,ntb->nta", to_barycentric, part.unsqueeze(1) - base)
            three = torch.cat([two, 1.0 - two.sum(-1, keepdim=True)], -1)
            depth, triangle = three.amin(-1).max(-1)
            outside = torch.nonzero(~(depth >= -100.0 * torch.finfo(x.dtype).eps)).flatten()  # nan too
            if len(outside):
                raise BadInput(
                    f"the place {part[outside[0]].tolist()} lies in no triangle of the mesh; expected all inside: "
                    f"let the mesh reach one range beyond the data."
                )
            found.append(self.triangles[triangle])
            weights.append(three[torch.arange(len(part), device=x.device), triangle])
        return Places(torch.cat(found), torch.cat(weights))


def _is_flat(points: Tensor, triangles: Tensor) -> Tensor:
    """Which triangles have three corners on a line, ``(T,)`` bool."""
    a, b = (points[triangles[:, i]] - points[triangles[:, 2]] for i in (0, 1))
    longest = torch.stack([a, b, a - b]).square().sum(-1).amax(0)
    return (a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]).abs() <= SMALLEST_ANGLE * longest


class Matern(GaussianField):
    """A Matern field on a mesh; Lindgren, Rue and Lindstrom (2011).

    ``alpha = 2``: smoothness 1, the usual one in the plane.  ``alpha = 1``: rougher, with no variance at a point in the
    limit of small triangles; range and scale are then those of smoothness 1/2, nominally.

    :param mesh: a :class:`Mesh`; with a barrier only ``alpha = 2``.
    :param scale: standard deviation at a point, the batch's shape.
    :param range: distance at which the correlation has fallen to about .13, ``sqrt(8 nu) / kappa``.
    :param alpha: 1 or 2.
    :param fraction: range in the barrier over the range outside of it.

    >>> x, y = torch.meshgrid(torch.arange(5.0), torch.arange(5.0), indexing="ij")
    >>> mesh = Mesh.delaunay(torch.stack([x.flatten(), y.flatten()], -1))
    >>> Matern(mesh, scale=1.0, range=3.0).sample().shape
    torch.Size([25])

    :raises BadInput: for another ``alpha``, and for a barrier with ``alpha = 1``.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"scale": constraints.positive, "range": constraints.positive}

    def __init__(
        self,
        mesh: Mesh,
        scale: Any,
        range: Any,
        alpha: int = 2,
        validate_args: bool | None = None,
        *,
        fraction: float = 0.2,
    ) -> None:
        if not isinstance(mesh, Mesh) or alpha not in (1, 2) or (alpha == 1 and mesh.barrier is not None):
            raise BadInput(
                f"Matern(mesh={type(mesh).__name__}, alpha={alpha}); expected a Mesh first, and alpha 2, or 1 on a "
                f"mesh without a barrier."
            )
        if not fraction > 0:
            raise BadInput(f"Matern(fraction={fraction}); expected a range in the barrier above 0, over that outside.")
        self.scale, self.range = broadcast_all(scale, range)
        operator, variances = mesh.equation(fraction)
        size, one = operator.size, torch.ones_like(self.scale)
        if alpha == 1:
            kappa = 2.0 / self.range  # sqrt(8 nu), nu = 1/2
            unit = (math.tau * kappa).sqrt() * self.scale  # one over tau: gamma(1/2) / gamma(3/2) is 2
            structure, factors, log_det, _ = operator.at_scale(kappa.square(), one, unit)
        else:
            eighth = self.range.square() / 8.0
            structure, rows = operator.by_rows[0], operator.rows(one, eighth)
            noise = variances.to(self.scale) * (self.range * self.scale).square().unsqueeze(-1)
            factors = (rows, noise.reciprocal())

            def log_det() -> Tensor:
                return 2.0 * operator.log_det(one, eighth) - noise.log().sum(-1)

        super().__init__(structure, factors, log_det, torch.Size([size]), validate_args)
