r"""Basis functions: from inputs ``X``, shape ``(..., N, D)``, to a design matrix ``Phi``, ``(..., N, M)``.

Every basis is a frozen value: it compares by content, pickles, and holds all of its settings.  The result
has the dtype and the device of ``X``; tensors among the settings are cast to them.  With ``bias=True`` the
**last** column of ``Phi`` is 1.  Any other function of ``X`` serves as a basis as well; a class of your own
says that its last column is a bias by an attribute ``bias = True``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro.infer.util import is_validation_enabled
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack  # None outside vmap, grad and the like

from pyro_evidence.data.arrays import require_matrix
from pyro_evidence.errors import BadInput
from pyro_evidence.numerics.derivatives import Last, are_equal
from pyro_evidence.settings import check_count, check_numbers, check_tensor

Basis = Callable[[Tensor], Tensor]  # X (..., N, D) -> Phi (..., N, M)


class TensorValue:
    """Lets a frozen dataclass with tensors among its fields be compared and hashed by content."""

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return are_equal([*vars(self).values()], [*vars(other).values()])

    def __hash__(self) -> int:
        return hash((type(self), *(v.shape if isinstance(v, Tensor) else v for v in vars(self).values())))


class OneEntryCache(Last[tuple[Any, ...], Any]):
    """The last result for given inputs and settings; no part of a value's content."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OneEntryCache)

    def __hash__(self) -> int:
        return 0

    def recall(self, X: Tensor, settings: list[Tensor], make: Callable[[], Any]) -> Any:
        """The last one again where inputs and settings are the same numbers, without graphs; else a new one."""
        inference = X.is_inference() or torch.is_inference_mode_enabled()  # whose tensors have no versions
        graph = X.requires_grad or any(s.requires_grad for s in settings)
        if graph or inference or peek_interpreter_stack() is not None:
            return make()
        try:
            values = [(tuple(s.shape), s.flatten().tolist()) for s in settings]
        except RuntimeError:  # a batch under vmap
            return make()
        key = (X._version, is_validation_enabled(), values)
        pair = self.pair
        if pair is None or pair[0][0] is not X or pair[0][1:] != (key, getattr(pair[1], "_version", 0)):
            made = make()
            pair = self.pair = (X, key, getattr(made, "_version", 0)), made  # changes in place that a tensor has seen
        return pair[1]


@dataclass(frozen=True, eq=False)
class Linear(TensorValue):
    """The inputs as they are, then the bias: ``M = D + bias``."""

    bias: bool = True
    last: OneEntryCache = field(default_factory=OneEntryCache, repr=False)

    def names(self, inputs: Sequence[str]) -> list[str]:
        """Names of the columns of ``Phi``, from those of ``X``."""
        return [*inputs, *["bias"] * self.bias]

    def __call__(self, X: Tensor) -> Tensor:
        """``Phi``, shape ``(..., N, D + bias)``."""
        return self.last.recall(_inputs(X), [], lambda: _columns([X], self.bias))


@dataclass(frozen=True, eq=False)
class Polynomial(TensorValue):
    """Powers of every input on its own: all inputs, all squares, ..., then the bias.

    There are no products of different inputs; ``M = D * degree + bias``.  Standardise first: high powers of
    inputs far from 0 are nearly collinear.
    """

    degree: int
    bias: bool = True
    last: OneEntryCache = field(default_factory=OneEntryCache, repr=False)

    def __post_init__(self) -> None:
        check_count("degree", self.degree, advice="1 means straight lines.")

    def __call__(self, X: Tensor) -> Tensor:
        """``Phi``, shape ``(..., N, D * degree + bias)``."""
        powers = range(1, self.degree + 1)
        return self.last.recall(_inputs(X), [], lambda: _columns([X.pow(power) for power in powers], self.bias))


@dataclass(frozen=True, eq=False)
class GaussianRBF(TensorValue):
    r"""Gaussian bumps :math:`\exp(-|x - c_m|^2 / 2 s_m^2)`, then the bias.  Bishop (2006), eq. 3.4.

    :param centres: shape ``(M, D)``.
    :param scale: the length ``s`` in units of the inputs (not a variance), one for all or shape ``(M,)``.
    """

    centres: Tensor
    scale: float | Tensor
    bias: bool = True

    def __post_init__(self) -> None:
        check_tensor("GaussianRBF: centres", self.centres, "shape (M, D), one row per centre")
        check_numbers("GaussianRBF: scale", self.scale)
        if self.centres.dim() != 2:
            shape = tuple(self.centres.shape)
            raise BadInput(f"GaussianRBF has centres of shape {shape}; expected (M, D), one row per centre.")
        scale = torch.as_tensor(self.scale)
        if scale.dim() > 0 and scale.shape != self.centres.shape[:1]:
            raise BadInput(
                f"GaussianRBF has scale of shape {tuple(scale.shape)} for {len(self.centres)} centres; "
                f"expected one number, or one per centre."
            )
        if not bool((scale > 0).all()):
            raise BadInput(f"GaussianRBF has scale {float(scale.min()):g}; expected a length greater than 0.")

    def __call__(self, X: Tensor) -> Tensor:
        """``Phi``, shape ``(..., N, M + bias)``; every bump is 1 at its centre."""
        centres = self.centres.to(X)
        _inputs(X, centres.shape[1], "GaussianRBF was given centres with")
        # Not through |x|^2 + |c|^2 - 2 x'c, whose cancellation costs half of the digits near a centre.
        distance = torch.cdist(X, centres, compute_mode="donot_use_mm_for_euclid_dist")
        scale = torch.as_tensor(self.scale, dtype=X.dtype, device=X.device)
        return _columns([(-0.5 * (distance / scale).square()).exp()], self.bias)


@dataclass(frozen=True, eq=False)
class RandomVectorFunctionalLink(TensorValue):
    """The inputs, then hidden units with fixed weights, then the bias: linear in all that is learned.

    The hidden weights are drawn once by the caller, from a generator of the caller's, and stay.
    Husmeier (2000), Neural Networks 13, "The Bayesian evidence scheme for regularizing probability-density
    estimating neural networks".

    :param weights: from inputs to hidden units, shape ``(D, H)``.
    :param biases: of the hidden units, shape ``(H,)``.
    :param activation: elementwise; a named function, so that the basis can be pickled.
    """

    weights: Tensor
    biases: Tensor
    activation: Callable[[Tensor], Tensor] = torch.tanh
    bias: bool = True

    def __post_init__(self) -> None:
        if self.weights.dim() != 2 or self.biases.shape != self.weights.shape[1:]:
            raise BadInput(
                f"RandomVectorFunctionalLink has weights of shape {tuple(self.weights.shape)} and biases of "
                f"shape {tuple(self.biases.shape)}; expected (D, H) and (H,), D inputs and H hidden units."
            )

    def __call__(self, X: Tensor) -> Tensor:
        """``Phi``, shape ``(..., N, D + H + bias)``."""
        _inputs(X, len(self.weights), "RandomVectorFunctionalLink was given weights for")
        hidden = self.activation(X @ self.weights.to(X) + self.biases.to(X))
        return _columns([X, hidden], self.bias)


@dataclass(frozen=True, eq=False)
class Standardised(TensorValue):
    """A basis of ``(X - mean) / scale``, so that the caller's ``X`` stays in its own units.

    :param basis: any basis.
    :param mean: of each input, shape ``(D,)``.
    :param scale: standard deviation of each input, shape ``(D,)``; :func:`mean_and_scale` gives both.
    """

    basis: Basis
    mean: Tensor
    scale: Tensor

    @property
    def bias(self) -> bool:
        """Whether the last column is the bias: as the basis inside."""
        return has_bias(self.basis)

    def __call__(self, X: Tensor) -> Tensor:
        """``Phi`` of the standardised inputs, shape ``(..., N, M)``."""
        _inputs(X, len(self.mean), "Standardised was given the mean of")
        return self.basis((X - self.mean.to(X)) / self.scale.to(X))


def mean_and_scale(X: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and *population* standard deviation (divisor N) of every column, each of shape ``(..., D)``.

    :param X: shape ``(..., N, D)``, finite.
    :raises BadInput: on an empty ``X``, on inf or nan, and on a column that is constant and so has no scale.
    """
    _inputs(X)
    if unusable := (~X.isfinite()).reshape(-1, X.shape[-1]).any(0).nonzero().flatten().tolist():
        raise BadInput(
            f"Columns {unusable} of X hold inf or nan (missing?); expected finite numbers. Leave out these "
            f"rows or columns, or fill them in, before standardising."
        )
    if constant := (X == X[..., :1, :]).all(-2).reshape(-1, X.shape[-1]).any(0).nonzero().flatten().tolist():
        raise BadInput(
            f"Columns {constant} of X are constant and cannot be scaled to unit variance. Leave them out "
            f"(the bias already is a constant): X[:, X.amax(0) > X.amin(0)]."
        )
    return X.mean(-2), X.std(-2, correction=0)


def design_matrix(basis: Basis, X: Tensor) -> Tensor:
    """Design matrix of a basis at inputs ``X``, shape ``(N, M)``.

    :raises BadInput: where it is no matrix.
    """
    Phi = basis(X)
    if not isinstance(Phi, Tensor) or Phi.ndim < 2:
        given = f"shape {tuple(Phi.shape)}" if isinstance(Phi, Tensor) else repr(Phi)
        raise BadInput(f"basis gave {given}; expected a design matrix of X, a tensor (N, M), as Linear() gives.")
    return Phi


def has_bias(basis: Basis) -> bool:
    """Whether ``basis`` says that the last column of its ``Phi`` is a bias."""
    return getattr(basis, "bias", False) is True  # a torch.nn.Linear keeps a tensor under this name


def linear_predictor(Phi: Tensor, w: Tensor) -> Tensor:
    """``Phi w``, shape ``(..., N)``.

    :param Phi: shape ``(N, M)``.
    :param w: shape ``(M,)``, or with a batch in front ``(..., M)``.  A batch that ends in 1, as a plate
        around the whole model makes it, loses that 1, which is the place of the data's own plate.
    """
    eta = w @ Phi.mT
    return eta if w.dim() == 1 else eta.squeeze(-2)


def class_predictor(Phi: Tensor, w: Tensor) -> Tensor:
    """``Phi w_c`` for every class ``c``, shape ``(..., N, C)``.

    :param Phi: shape ``(N, M)``.
    :param w: shape ``(C, M)``, or ``(..., C, M)`` with a batch as in :func:`linear_predictor`.
    """
    eta = Phi @ w.mT
    return eta if w.dim() == 2 else eta.squeeze(-3)


def _columns(blocks: list[Tensor], bias: bool) -> Tensor:
    ones = [torch.ones_like(blocks[0][..., :1])] if bias else []
    return torch.cat(blocks + ones, dim=-1)


def _inputs(X: Tensor, num_inputs: int | None = None, who: str = "") -> Tensor:
    """``X`` itself, once it is known to be a matrix of floats with ``num_inputs`` columns."""
    require_matrix("X", X, batched=True)
    if num_inputs is not None and X.shape[-1] != num_inputs:
        raise BadInput(f"X has {X.shape[-1]} columns, but {who} {num_inputs} inputs; expected as many columns.")
    return X


@dataclass(frozen=True, eq=False)
class Learned(TensorValue):
    """A positive number for the engine to learn: a ``pyro.param``, which begins at ``start``."""

    start: float | Tensor = 1.0


LEARNED = Learned()
Precision = float | Tensor | Learned  # a number or a tensor is a fixed value
