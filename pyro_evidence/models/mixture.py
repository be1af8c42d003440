r"""Mixtures with a Gaussian prior on their centres: densities, and conditional densities on a basis.

.. math:: p(y_n | x_n) = \sum_k \pi_k\, N(y_n | W_k g(x_n), \beta_k^{-1}), \qquad w_k \sim N(M, \alpha_k^{-1})

Husmeier (2000), eqs. 1.1 to 1.3 and 2.1.  Every model here is an ordinary Pyro model, for any engine.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.ops.indexing import Vindex
from torch import Size, Tensor
from torch.distributions import constraints

from pyro_evidence.data.arrays import require_matrix
from pyro_evidence.data.rows import Rows, column_moments, with_ones
from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.process_state import without_validation
from pyro_evidence.models.basis import Basis, TensorValue, design_matrix
from pyro_evidence.models.regression import LEARNED, Precision, check_precision, precision_value, start_of
from pyro_evidence.models.wrappers import check_weights
from pyro_evidence.program.checks import bad_entries
from pyro_evidence.settings import check_count, check_function, check_tensors

Units = Callable[[Tensor], tuple[Tensor, Tensor]]


def data_units(Y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population standard deviation of each column, ``(m,)`` each; 1 for a constant one; nan is left out."""
    return units_of_rows(Rows.resident(Y, len(Y)))


def units_of_rows(rows: Rows[Tensor]) -> tuple[Tensor, Tensor]:
    """:func:`data_units` of rows in pieces ``(n, m)``."""
    _, mean, square = column_moments(rows.mapped(with_ones))
    return mean, torch.where(square > 0, square.sqrt(), 1.0)


@dataclass(frozen=True, eq=False)
class FixedUnits(TensorValue):
    """Origin and unit of each column as numbers, ``(m,)`` each, whatever the data."""

    origin: Tensor
    unit: Tensor

    def __call__(self, Y: Tensor) -> tuple[Tensor, Tensor]:
        """The origin and the unit that were given, whatever the data."""
        return self.origin.to(Y), self.unit.to(Y)


@dataclass(frozen=True, eq=False)
class Responses:
    """Arguments of one call, as rows of responses."""

    Y: Tensor  # (N, m)
    G: Tensor | None  # (N, B) basis functions; None for the constant 1
    weight: Tensor  # (N,)

    def __getitem__(self, some: slice) -> "Responses":
        return Responses(self.Y[some], None if self.G is None else self.G[some], self.weight[some])

    @property
    def in_double(self) -> "Responses":
        """The same in double precision."""
        parts = (None if x is None else x.detach().double() for x in (self.Y, self.G, self.weight))
        return Responses(*parts)  # type: ignore[arg-type]


# a component's noise: of the number of components and the units it declares the params, and returns what maps
# ``(loc, z)`` to the distribution of one datum
Noise = Callable[[int, Tensor], Callable[[Tensor, Tensor], Any]]


@dataclass(frozen=True, eq=False)
class DiagonalNoise(TensorValue):
    """One noise precision for each component and output, ``beta`` ``(K, m)``, in units of ``y`` to the power -2."""

    beta: Precision = LEARNED

    def __call__(self, num_components: int, scale: Tensor) -> Callable[[Tensor, Tensor], Any]:
        """Declares ``beta``: one noise precision for each component and output."""
        beta = _in_units(self.beta, Size([num_components, len(scale)]), scale)
        return lambda loc, z: dist.Normal(loc, Vindex(beta)[..., z, :].rsqrt()).to_event(1)


@dataclass(frozen=True, eq=False)
class SphericalNoise(TensorValue):
    """One noise precision for each component, ``beta`` ``(K,)``, outputs measured in the model's units."""

    beta: Precision = LEARNED

    def __call__(self, num_components: int, scale: Tensor) -> Callable[[Tensor, Tensor], Any]:
        """Declares ``beta``: one noise precision for each component."""
        beta = precision_value("beta", self.beta, Size([num_components]), scale)
        return lambda loc, z: dist.Normal(loc, scale * Vindex(beta.unsqueeze(-1))[..., z, :].rsqrt()).to_event(1)


@dataclass(frozen=True, eq=False)
class SharedNoise(TensorValue):
    """One noise precision for all components and outputs, ``beta`` ``()``, outputs measured in the model's units."""

    beta: Precision = LEARNED

    def __call__(self, num_components: int, scale: Tensor) -> Callable[[Tensor, Tensor], Any]:
        """Declares ``beta``: noise precisions that all components share."""
        beta = precision_value("beta", self.beta, Size(), scale)
        return lambda loc, z: dist.Normal(loc, scale * beta.rsqrt()).to_event(1)


@dataclass(frozen=True, eq=False)
class FullNoise(TensorValue):
    """A noise covariance for each component.

    Its diagonal is ``1 / beta``, ``beta`` ``(K, m)``; ``correlation_tril`` ``(K, m, m)`` is the lower Cholesky factor
    of its correlations.
    """

    def __call__(self, num_components: int, scale: Tensor) -> Callable[[Tensor, Tensor], Any]:
        """Declares ``beta`` and ``correlation_tril``."""
        beta = _in_units(LEARNED, Size([num_components, len(scale)]), scale)
        start = torch.eye(len(scale), dtype=scale.dtype, device=scale.device).expand(num_components, -1, -1)
        correlation = pyro.param("correlation_tril", start.clone(), constraint=constraints.corr_cholesky)
        tril = beta.rsqrt().unsqueeze(-1) * correlation
        return lambda loc, z: dist.MultivariateNormal(loc, scale_tril=Vindex(tril)[..., z, :, :])


def _in_units(beta: Precision, shape: Size, scale: Tensor) -> Tensor:
    """A precision per output whose start is 1 in the model's units."""
    if beta is LEARNED:  # data of other columns have a better word for it later
        start = scale.pow(-2).expand(shape)
        return torch.as_tensor(pyro.param("beta", start.clone(), constraint=constraints.positive))
    return precision_value("beta", beta, shape, scale)


def _weights(weight: Tensor | None, Y: Tensor) -> Tensor:
    if weight is None:
        return Y.new_ones(1).expand(len(Y))
    check_weights(weight, len(Y))
    return weight


Means = Callable[[Tensor | None], Tensor]  # of kernels, for data of component ``z``; for None of all, side by side


class _Mixture(TensorValue):
    alpha: Precision
    noise: Noise

    def settled(self, rows: Rows[Responses]) -> Any:
        """This model with what it takes from all data held as numbers; as it is where it takes nothing from them."""
        return self

    def with_components(self, num_components: int) -> Any:
        """This model with another number of components; None where a setting of its own belongs to each."""
        own = (self.alpha, getattr(self.noise, "beta", LEARNED))
        alike = not any(start_of(x).shape for x in own)
        return replace(self, num_components=num_components) if alike else None  # type: ignore[type-var]

    def _observed(self, num: int, means: Means, noise: Any, like: Tensor, Y: Tensor | None, weight: Any) -> Tensor:
        """The data: each of its component ``z``, or ``weight_n log p(y_n)`` each, components summed out.

        :param like: a row for each datum.
        """
        mixing = pyro.param("mixing", like.new_full((num,), 1.0 / num), constraint=constraints.simplex)
        if weight is None:
            with pyro.plate("data", len(like)):
                z = pyro.sample("z", dist.Categorical(mixing), infer={"enumerate": "parallel"})
                return pyro.sample("y", noise(means(z), z), obs=Y)
        check_weights(weight, None if Y is None else len(Y))
        with without_validation():
            scaled = poutine.scale(scale=weight)  # would refuse a weight of 0
        with pyro.plate("data", len(weight)), scaled:
            kernels = noise(means(None), torch.arange(num))
            return pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(mixing), kernels), obs=Y)


@dataclass(frozen=True, eq=False)
class GaussianMixture(_Mixture):
    """The Pyro model that :func:`gaussian_mixture` returns: call it with ``Y``.

    Sites: ``w``, the centres, shape ``(K, m)``; ``z``, enumerated, and ``y``, in the plate ``data``.
    """

    num_components: int | None  # None: as many as :func:`enough_components` says
    alpha: Precision
    noise: Noise
    units: Units

    def __call__(self, Y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Draw or observe the data, shape ``(N, m)``; ``weight`` ``(N,)`` says how often each datum counts."""
        check_responses(Y)
        loc, scale = check_tensors("units", self.units(Y), 2)
        alpha = precision_value("alpha", self.alpha, start_of(self.alpha).shape, Y)
        num = self.num_components or enough_components(*Y.shape)
        prior_scale = (scale * alpha.rsqrt().unsqueeze(-1)).expand(num, -1)
        noise = self.noise(num, scale)
        if not callable(noise):
            raise BadInput(f"noise gave {noise!r}; expected a function (mean, component) -> distribution.")
        w = pyro.sample("w", dist.Normal(loc.expand_as(prior_scale), prior_scale).to_event(2))
        return self._observed(num, lambda z: w if z is None else Vindex(w)[..., z, :], noise, Y, Y, weight)

    def settled(self, rows: Rows[Responses]) -> "GaussianMixture":
        """This model with what it takes from all data held as numbers: a few rows are then enough to know it.

        :raises BadInput: for units that are a function of all rows at once, where these come in chunks.
        """
        units = self.units
        if units is data_units:
            units = FixedUnits(*units_of_rows(rows.mapped(lambda r: r.Y)))
        elif isinstance(rows.pieces, tuple):
            units = FixedUnits(*units(rows.example.Y))
        elif not isinstance(units, FixedUnits):
            raise BadInput(f"units={units!r} looks at all rows at once; pass units=FixedUnits(origin, unit).")
        number = self.num_components or enough_components(len(rows), rows.example.Y.shape[-1])
        return replace(self, num_components=number, units=units)

    def rows(self, Y: Tensor, weight: Tensor | None = None) -> Responses:
        """The data as they are observed, checked.

        :raises BadInput: when they cannot be used.
        """
        check_complete(Y)
        return Responses(Y, None, _weights(weight, Y))

    def few(self, step: int, Y: Tensor, weight: Tensor | None = None) -> tuple[Tensor, ...]:
        """Arguments with every ``step``-th row."""
        return (Y[::step],) if weight is None else (Y[::step], torch.ones_like(weight[::step]))


@dataclass(frozen=True, eq=False)
class LinearMixture(_Mixture):
    """The Pyro model that :func:`linear_mixture` returns: call it with ``X`` and ``Y``, or with ``X`` alone.

    Sites: ``w``, shape ``(K, m, B)``; ``z``, enumerated, and ``y``, in the plate ``data``.
    """

    num_components: int
    basis: Basis
    num_outputs: int
    alpha: Precision
    noise: Noise

    def __call__(self, X: Tensor, Y: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        """Draw or observe the responses, shape ``(N, m)``, given inputs ``(N, D)``; ``weight`` as for a density."""
        Phi = design_matrix(self.basis, X)
        if Y is not None:
            check_responses(Y, (len(Phi), self.num_outputs))
        alpha = precision_value("alpha", self.alpha, start_of(self.alpha).shape, Phi)
        shape = (self.num_components, self.num_outputs, Phi.shape[-1])
        prior_scale = alpha.rsqrt().reshape(-1, 1, 1).expand(shape)
        noise = self.noise(self.num_components, Phi.new_ones(self.num_outputs))
        w = pyro.sample("w", dist.Normal(Phi.new_zeros(shape), prior_scale).to_event(len(shape)))

        def means(z: Tensor | None) -> Tensor:
            if z is None:
                return torch.einsum("...kmb,nb->...nkm", w, Phi)
            return (Vindex(w)[..., z, :, :] @ Phi.unsqueeze(-1)).squeeze(-1)

        return self._observed(self.num_components, means, noise, Phi, Y, weight)

    def rows(self, X: Tensor, Y: Tensor, weight: Tensor | None = None) -> Responses:
        """The data as they are observed, checked.

        :raises BadInput: when they cannot be used.
        """
        Phi = design_matrix(self.basis, X)
        check_complete(Y, (len(Phi), self.num_outputs))
        return Responses(Y, Phi, _weights(weight, Y))

    def few(self, step: int, X: Tensor, Y: Tensor, weight: Tensor | None = None) -> tuple[Tensor, ...]:
        """Arguments with every ``step``-th row."""
        return (X[::step], Y[::step]) if weight is None else (X[::step], Y[::step], torch.ones_like(weight[::step]))


def check_responses(Y: Tensor, shape: tuple[int, int] | None = None) -> None:
    """Refuse anything but floats of shape ``(N, m)``.

    :raises BadInput: with the shape that was given.
    """
    require_matrix("Y", Y, "m")
    if shape is not None and tuple(Y.shape) != shape:
        raise BadInput(f"Y has shape {tuple(Y.shape)}; expected {shape}, a row for each of X and the model's columns.")
    if bool(Y.sum().isfinite()):
        return  # the sum needs no memory
    infinite = Y.isinf().any(0).nonzero().flatten().tolist()
    if infinite:
        found = f"{int(Y.isinf().sum())} values that are inf in columns {infinite}"
        raise BadInput(f"Y has {found}; expected finite ones. Drop such rows: Y[~Y.isinf().any(1)].")
    empty = Y.isnan().all(0).nonzero().flatten().tolist()
    if empty:
        raise BadInput(f"Y has no value at all, only nan, in columns {empty}; expected one at least. Drop them.")


def check_complete(Y: Tensor, shape: tuple[int, int] | None = None) -> None:
    """Refuse anything but numbers of shape ``(N, m)``, gaps among them.

    :raises BadInput: with the shape that was given, or the first bad number.
    """
    check_responses(Y, shape)
    if bool(Y.sum().isnan()):
        raise BadInput(
            f"Y, shape {tuple(Y.shape)}{bad_entries(Y)}; expected numbers. Rows with gaps are for "
            f"EvidenceEM(marginalised(model)), those of mixtures all at once by run(Y)."
        )


def enough_components(num_data: int, num_outputs: int) -> int:
    """With how many components to begin: 2 to 20, five data for each of the ``2 m + 1`` parameters of one."""
    return min(20, max(2, num_data // (5 * (2 * num_outputs + 1))))


def _check(num_components: int, alpha: Precision, noise: Noise) -> None:
    num_components = check_count("num_components", num_components)
    check_function("noise", noise, "DiagonalNoise()")
    check_precision("beta", getattr(noise, "beta", 1.0), largest_dim=2)
    check_precision("alpha", alpha, 1, Size([num_components]), "one per component")


def gaussian_mixture(
    num_components: int | None = None,
    *,
    alpha: Precision = LEARNED,
    noise: Noise = DiagonalNoise(),
    units: Units = data_units,
) -> GaussianMixture:
    """A Gaussian mixture as a Pyro model ``model(Y)`` with a Normal prior on its centres.

    The prior of each centre is Normal about the mean of the data, with precision ``alpha`` in units of the data's
    variance, column by column, so that a change of units changes nothing else.

    :param num_components: ``K``, with which ``EvidenceEM`` begins: it leaves out those that it does not need, and
        splits others where more are needed.  A single one stays single.  None: by :func:`enough_components`.
    :param alpha: prior precision of the centres: one for all, or one each, by ``Learned(torch.ones(K))``.
    :param noise: :class:`DiagonalNoise`, :class:`SphericalNoise`, :class:`SharedNoise` or :class:`FullNoise`.
    :param units: origin and unit of each column: :func:`data_units`, :class:`FixedUnits`, or a function of ``Y``.
    :raises BadInput: on settings that cannot be meant.
    """
    _check(1 if num_components is None else num_components, alpha, noise)
    check_function("units", units, "data_units")
    return GaussianMixture(num_components, alpha, noise, units)


def linear_mixture(
    num_components: int,
    basis: Basis,
    *,
    num_outputs: int = 1,
    alpha: Precision = LEARNED,
    noise: Noise = DiagonalNoise(),
) -> LinearMixture:
    """A conditional density ``p(y | x)`` as a mixture of linear regressions on ``basis``: ``model(X, Y)``.

    :param num_components: ``K``.
    :param basis: ``X`` to ``Phi``, such as :class:`~pyro_evidence.models.basis.RandomVectorFunctionalLink`.
    :param num_outputs: ``m``, columns of ``Y``.
    :param alpha: prior precision of the weights: one for all components, or one each, by ``Learned(torch.ones(K))``.
    :param noise: as for :func:`gaussian_mixture`.
    :raises BadInput: on settings that cannot be meant.
    """
    _check(num_components, alpha, noise)
    num_outputs = check_count("num_outputs", num_outputs)
    check_function("basis", basis, "Linear()")
    return LinearMixture(num_components, basis, num_outputs, alpha, noise)
