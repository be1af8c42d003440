"""A Gaussian field as a sum of squared differences of a few values each; Rue and Held (2005), chapters 2 and 3."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from pyro.distributions.util import broadcast_shape  # torch's own loads sympy, for a second
from torch import Tensor
from torch.distributions import biject_to, constraints, transform_to
from torch.distributions.transforms import Transform
from torch.distributions.utils import broadcast_all

from pyro_evidence.errors import BadInput
from pyro_evidence.models.gmrf.constrained import Structure, least_square, log_det, squares
from pyro_evidence.numerics.derivatives import cached_property
from pyro_evidence.numerics.linalg import most_independent
from pyro_evidence.program.distributions import OfArguments


class OnSubspace(constraints.Constraint):
    """Values whose inner products with given directions are given: zero, if nothing else is said.

    :param directions: orthonormal columns ``(n, m)``.
    :param shape: event shape of a value, ``n`` elements.
    :param given: the inner products ``(m,)``.
    """

    is_discrete = False

    def __init__(self, directions: Tensor, shape: torch.Size, given: Tensor | None = None) -> None:
        self.directions, self.shape = directions, shape
        self.given = torch.zeros_like(directions[0]) if given is None else given

    @property
    def event_dim(self) -> int:  # type: ignore[override]
        """Number of dimensions of one value."""
        return len(self.shape)

    def __repr__(self) -> str:
        size, count = self.directions.shape
        return f"OnSubspace({count} directions of {size} given)"

    def check(self, value: Tensor) -> Tensor:
        """Whether each value lies in the subspace, up to rounding of its sums."""
        flat = value.flatten(value.dim() - len(self.shape))
        off = (flat @ self.directions.to(flat) - self.given.to(flat)).abs().amax(-1)
        rounding = torch.finfo(flat.dtype).eps * flat.shape[-1] ** 0.5
        return off <= 100.0 * rounding * (1.0 + flat.norm(dim=-1))


class Isometry(Transform):
    """Coordinates ``(..., n - m)`` to values of an :class:`OnSubspace`, lengths kept, by Householder reflections."""

    domain = constraints.real_vector
    bijective = True
    is_affine = True  # what takes a mean to a mean

    def __init__(self, codomain: OnSubspace) -> None:
        super().__init__()
        self.codomain, self._shape = codomain, codomain.shape
        first = most_independent(codomain.directions)  # so that sums of different values stay apart
        rest = torch.ones(len(codomain.directions), dtype=torch.bool, device=first.device)
        self._order = torch.cat([first, rest.index_fill(0, first, False).nonzero().flatten()])
        packed, tau = torch.geqrf(codomain.directions[self._order])
        self._count = tau.shape[-1]
        self._first = packed.diagonal() * codomain.given  # coordinates that the constraint fixes: R is diag(+-1)
        eye = torch.eye(*packed.shape, dtype=packed.dtype, device=packed.device)
        self._V = packed.tril(-1) + eye
        between = eye[: self._count] + tau.unsqueeze(-1) * (self._V.mT @ self._V).triu(1)
        self._T = torch.linalg.solve_triangular(between, tau.diag(), upper=True)

    def _reflected(self, x: Tensor, T: Tensor) -> Tensor:
        """``x - V T V' x``: all reflections, one after the other; Golub and Van Loan (2013), section 5.1.7."""
        V, column = self._V.to(x), x.unsqueeze(-1)  # constants stand on the left: where they are zero, nothing is seen
        return (column - V @ (T.to(x) @ (V.mT @ column))).squeeze(-1)

    def _call(self, x: Tensor) -> Tensor:
        padded = torch.cat([self._first.to(x).expand(*x.shape[:-1], self._count), x], -1)
        value = self._reflected(padded, self._T)[..., self._order.argsort()]
        return value.reshape(*x.shape[:-1], *self._shape)

    def _inverse(self, y: Tensor) -> Tensor:
        flat = y.reshape(*y.shape[: y.dim() - len(self._shape)], -1)
        return self._reflected(flat[..., self._order], self._T.mT)[..., self._count :]

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Zero: lengths are kept."""
        return x.new_zeros(x.shape[:-1])

    def forward_shape(self, shape: Any) -> torch.Size:
        """Shape of values."""
        return torch.Size([*shape[:-1], *self._shape])

    def inverse_shape(self, shape: Any) -> torch.Size:
        """Shape of coordinates."""
        batch = shape[: len(shape) - len(self._shape)]
        return torch.Size([*batch, self._shape.numel() - self._count])


for _registry in (biject_to, transform_to):
    _registry.register(OnSubspace, Isometry)


class Between(constraints.interval):
    """Strictly between two bounds, at which a field is no distribution any more."""

    def __repr__(self) -> str:
        return f"strictly between {self.lower_bound:g} and {self.upper_bound:g} (at a bound: an ICAR or a RandomWalk)"

    def check(self, value: Tensor) -> Tensor:
        """Whether each value lies inside, the bounds excluded."""
        return (self.lower_bound < value) & (value < self.upper_bound)


class GaussianField(OfArguments):
    """A zero-mean Gaussian field; see :mod:`pyro_evidence.models.gmrf` for those that can be asked for.

    :ivar structure: which values each factor of the density takes, and which directions are given.
    """

    has_rsample = False
    scale: Any  # of the values or what they are made of, where it has one
    level: Any  # standard deviation of the anchors' values; None where sums are given
    in_order = False  # whether each value is normal given those before it, however many follow

    def __init__(
        self,
        structure: Structure,
        factors: tuple[Tensor, Tensor],
        log_det: Tensor | Callable[[], Tensor] | None,
        event_shape: torch.Size,
        validate_args: bool | None = None,
        given: Tensor | None = None,
    ) -> None:
        """The density of given factors ``exp(-1/2 sum_f precision_f (c_f' x[index_f])^2)``.

        :param factors: coefficients ``(..., F, k)`` and precisions ``(..., F)``.
        :param log_det: of the precision on the values that may vary, the batch's shape; what takes long, when it is
            asked for: not every run of a model asks for a density.  None computes it, sparse.
        :param given: inner products of the values with the fixed directions, ``(m,)``; None: zero.
        """
        self.structure, self._given = structure, given
        batch = torch.Size(broadcast_shape(factors[0].shape[:-2], factors[1].shape[:-1]))
        self._coefficients = factors[0].expand(*batch, *factors[0].shape[-2:])
        self._precision = factors[1].expand(*batch, factors[1].shape[-1])
        self._log_det = log_det
        super().__init__(batch, event_shape, validate_args=validate_args)

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> Any:
        """The values that the field may take: all, or those with given sums."""
        if not self.structure.fixed.shape[-1]:
            return constraints.independent(constraints.real, len(self.event_shape))
        return OnSubspace(self.structure.fixed, self.event_shape, self._given)

    @property
    def mean(self) -> Tensor:
        """Zero; where sums are given that are not zero, the field of least squares with them."""
        if self._given is None:
            return torch.zeros(self._extended_shape()).to(self._precision)
        zero = torch.zeros(1, self.structure.size, dtype=torch.float64, device=self._precision.device)
        flat = self.elements.reshape(-1, *self.elements.shape[-3:])
        rows = [self.structure.on_constraint(row).krige(zero, self._given) for row in flat]
        return torch.cat(rows).view(self._extended_shape()).to(self._precision)

    @property
    def elements(self) -> Tensor:
        """The precision of each factor among the values that it takes, ``(..., F, k, k)`` float64."""
        return squares(self._coefficients, self._precision)

    def elements_of(self, design: Tensor | None, times: Any) -> Tensor:
        """Those of all fields of a batch, multiplied, ``(F, k, k)``, among coordinates of which the values are made.

        :param design: the values of each factor in its coordinates, ``(F, v, k)``; None: these themselves.
        """
        coefficients = self._coefficients.flatten(0, -2)
        if design is not None:
            coefficients = (coefficients.unsqueeze(-1) * design).sum(-2)
        return squares(coefficients, self._precision.flatten() * times)

    @property
    def log_det(self) -> Tensor:
        """Log determinant of the precision on the values that may vary, of the batch's shape."""
        if self._log_det is None:
            self._log_det = log_det(self.elements, self.structure).to(self._precision)
        elif not isinstance(self._log_det, Tensor):
            self._log_det = self._log_det()
        return self._log_det.expand(self._precision.shape[:-1])

    @property
    def element_index(self) -> Tensor:
        """The values that each factor takes, ``(F, k)``, within the flat event."""
        return self.structure.index

    def element_log_prob(self, values: Tensor) -> Tensor:
        """Each factor's part of the log density, of its values ``(..., F, k)``, shape ``(..., F)``."""
        return -0.5 * self._precision * (self._coefficients * values).sum(-1).square()

    def log_normaliser(self) -> Tensor:
        """Log density at zero; where sums are given that are not zero, what is left without the factors.  Nats."""
        normaliser = 0.5 * self.log_det.to(self._precision) - 0.5 * self.structure.rank * math.log(math.tau)
        if self._given is None:
            return normaliser
        return normaliser + 0.5 * least_square(self.elements, self.structure, self._given).to(normaliser)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density, nats; where directions are given, with respect to lengths in what is left."""
        if self._validate_args:
            self._validate_sample(value)
        flat = value.flatten(value.dim() - len(self.event_shape))
        return self.element_log_prob(flat[..., self.element_index]).sum(-1) + self.log_normaliser()

    def sample(self, sample_shape: Iterable[int] = ()) -> Tensor:
        """Draws, by the sparse factor of the field's precision, and by kriging where directions are given."""
        shape, size = torch.Size(sample_shape), self.structure.size
        with torch.no_grad():
            white = torch.randn(self.batch_shape.numel(), shape.numel(), size, dtype=torch.float64)
            pairs = zip(self._rows(), white.to(self._precision.device), strict=True)
            draws = [field.unwhitened(z) for field, z in pairs]
        return torch.stack(draws, 1).view(*shape, *self.batch_shape, *self.event_shape).to(self._precision.dtype)

    def _rows(self) -> "list[GaussianField]":
        """The fields of the batch, each alone."""
        coefficients = self._coefficients.reshape(-1, *self._coefficients.shape[-2:])
        rows = zip(coefficients, self._precision.reshape(-1, self._precision.shape[-1]), strict=True)
        return [GaussianField(self.structure, row, None, self.event_shape, False, self._given) for row in rows]

    def unwhitened(self, white: Tensor) -> Tensor:
        """Draws ``(S, n)`` of white noise, by one field."""
        given = torch.zeros_like(self.structure.fixed[0]) if self._given is None else self._given
        precision = self.structure.on_constraint(self.elements)
        return precision.krige(precision.factor.unwhiten(white), given)

    def continued(self, first: Tensor, white: Tensor) -> Tensor:
        """The first values of the field ``(..., n)``, and those that follow, drawn given them, ``(..., n + h)``.

        :param white: standard normal numbers, ``(..., h)``; zeros give the mean of what follows.
        :raises BadInput: for a field whose first values do not have the law of a shorter one.
        """
        if not self.in_order:
            raise BadInput(
                f"{type(self).__name__} of {self.structure.size} values was fitted with {first.shape[-1]}; expected "
                f"the same number. What can be continued: RandomWalk, but for cyclic and scaled ones, Seasonal, AR, "
                f"AR1, OrnsteinUhlenbeck."
            )
        size = first.shape[-1]
        later = self.structure.index.amax(-1) >= size  # their factors, one for each, in order
        units = torch.nn.functional.one_hot(self.structure.index[later], self.structure.size).to(first)
        rows = torch.einsum("...fk,fkn->...fn", self._coefficients[..., later, :], units)
        right = white / self._precision[..., later].sqrt() - (rows[..., :size] @ first.unsqueeze(-1)).squeeze(-1)
        found = torch.linalg.solve_triangular(rows[..., size:], right.unsqueeze(-1), upper=False).squeeze(-1)
        return torch.cat([first.expand(*found.shape[:-1], size), found], -1)

    def expand(self, batch_shape: Iterable[int], _instance: Any = None) -> "GaussianField":
        """The same field for each element of a larger batch."""
        new: GaussianField = super().expand(torch.Size(batch_shape), _instance)
        new._coefficients = self._coefficients.expand(*new.batch_shape, *self._coefficients.shape[-2:])
        new._precision = self._precision.expand(*new.batch_shape, self._precision.shape[-1])
        new._log_det = self.log_det
        return new


@dataclass(frozen=True, eq=False)
class Unit:
    """An intrinsic field of unit scale: made once, and looked at as often as a model runs.

    :ivar part: the connected part of each value, from 0 on, ``(n,)``.
    :ivar known_log_det: log determinant on the values that may vary, where a formula has it.
    """

    structure: Structure
    coefficients: Tensor  # (F, k) float64
    weights: Tensor  # (F,) float64, precisions
    part: Tensor
    known_log_det: float | None = None

    @cached_property
    def _precision(self) -> Any:
        return self.structure.on_constraint(squares(self.coefficients, self.weights))

    @cached_property
    def log_det(self) -> float:
        """Log determinant on the values that may vary."""
        return float(self._precision.log_det) if self.known_log_det is None else self.known_log_det

    @cached_property
    def typical_variance(self) -> Tensor:
        """Geometric mean of the variances of each part, ``(parts,)``.

        Sorbye and Rue (2014); by parts, Freni-Sterrantino, Ventrucci and Rue (2018).
        """
        count = torch.bincount(self.part).double()
        sums = torch.zeros_like(count).index_add_(0, self.part, self._precision.variance.log())
        return (sums / count).exp()

    @cached_property
    def standardised(self) -> "Unit":
        """The same field with a typical variance of one in each part."""
        typical = self.typical_variance
        weights = self.weights * typical[self.part[self.structure.index[:, 0]]]
        fixed = torch.zeros_like(typical).index_add_(0, self.part, self.structure.fixed.square().sum(-1))
        gain = ((torch.bincount(self.part) - fixed) * typical.log()).sum()
        return Unit(self.structure, self.coefficients, weights, self.part, self.log_det + float(gain))

    @cached_property
    def log_overlap(self) -> float:
        """Log determinant of the fixed directions at the anchors."""
        return float(torch.linalg.slogdet(self.structure.fixed[self.structure.anchors]).logabsdet)

    @cached_property
    def at_a_level(self) -> Structure:
        """The structure with one factor more for each anchor, and nothing fixed."""
        structure = self.structure
        anchors = structure.anchors.unsqueeze(-1).expand(-1, structure.index.shape[-1])
        free = structure.fixed[:, :0]
        return Structure(torch.cat([structure.index, anchors]), free, structure.anchors[:0])

    def factors(self, scale: Tensor, level: Tensor | None) -> tuple[Structure, tuple[Tensor, Tensor], Tensor]:
        """Structure, factors and log determinant at a scale, and a standard deviation of the anchors' values."""
        precision = self.weights.to(scale) * scale.unsqueeze(-1) ** -2
        log_det = self.log_det - 2.0 * self.structure.rank * scale.log()
        if level is None:
            return self.structure, (self.coefficients.to(scale), precision), log_det
        count = len(self.structure.anchors)
        own = torch.nn.functional.one_hot(self.structure.anchors.new_zeros(count), self.coefficients.shape[-1])
        coefficients = torch.cat([self.coefficients, own.to(self.coefficients)])
        precision = torch.cat([precision, (level**-2).unsqueeze(-1).expand(*scale.shape, count)], -1)
        log_det = log_det + 2.0 * self.log_overlap - 2.0 * count * level.log()
        return self.at_a_level, (coefficients.to(scale), precision), log_det


def parameters(*values: Any) -> tuple[Any, ...]:
    """Numbers and tensors of one shape, a level that may be None last, which stays.

    :raises BadInput: for a level that is a number and not above 0.
    """
    if isinstance(values[-1], int | float) and not values[-1] > 0:
        raise BadInput(f"level={values[-1]}; expected a standard deviation above 0, or None for sums of zero.")
    given = iter(broadcast_all(*(value for value in values if value is not None)))
    return tuple(None if value is None else next(given) for value in values)
