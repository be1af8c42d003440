r"""Covariance functions of Gaussian processes: small values that add and multiply.

Each maps inputs ``X``, shape ``(N, D)``, and ``Z``, ``(M, D)``, by default ``X`` itself, to covariances ``(N, M)``.  A
setting (a variance, a lengthscale) is a fixed number or tensor, a :class:`Learned` one, which the models of
:mod:`pyro_evidence.models.gp` declare as a ``pyro.param``, or a Pyro distribution, its prior.  Called by itself, a
kernel takes a learned setting where it starts.

Rasmussen and Williams (2006), "Gaussian Processes for Machine Learning", chapter 4; MacKay (2003), chapter 45.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import reduce
from operator import add, mul
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from pyro_evidence.data.arrays import require_matrix
from pyro_evidence.errors import BadInput
from pyro_evidence.models.basis import LEARNED, Learned, TensorValue
from pyro_evidence.numerics.batched import BATCH_NUMBERS


def squared_distance(X: Tensor, Z: Tensor) -> Tensor:
    """``|x_i - z_j|^2``, shape ``(..., N, M)``, of rows ``(..., N, D)`` and ``(..., M, D)``.

    Not through ``|x|^2 + |z|^2 - 2 x'z``, whose cancellation costs half of the digits between neighbours; its
    derivatives, which are matrix products, may be taken again.
    """
    return _Squared.apply(X, Z) if torch.is_grad_enabled() else _squared(X, Z)  # under vmap requires_grad says False


def _squared(X: Tensor, Z: Tensor) -> Tensor:
    distance = torch.cdist(X, Z, compute_mode="donot_use_mm_for_euclid_dist")
    return distance.mul_(distance)  # in its own memory


class _Squared(torch.autograd.Function):
    """:func:`squared_distance`; the derivative is ``2 sum_j G_ij (x_i - z_j)``, made of matrix products."""

    generate_vmap_rule = True

    @staticmethod
    def forward(X: Tensor, Z: Tensor) -> Tensor:
        return _squared(X.detach(), Z.detach())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, Tensor]:
        (X, Z), (G,) = ctx.saved_tensors, cotangents
        return _pulled(X, Z, G), _pulled(Z, X, G.mT)


def _pulled(X: Tensor, Z: Tensor, G: Tensor) -> Tensor:
    return 2.0 * (G.sum(-1, keepdim=True) * X - G @ Z)


def root(squared: Tensor) -> Tensor:
    """Square root of numbers >= 0 whose derivative at 0 is 0 instead of infinite."""
    positive = squared > 0
    return torch.where(positive, torch.where(positive, squared, 1.0).sqrt(), 0.0)


Setting = Any  # float | Tensor | Learned | a Pyro distribution
Read = Callable[[str, Setting, "Kernel"], Setting]  # name, setting, the kernel whose it is -> its value

Self = TypeVar("Self", bound="Kernel")


class Kernel(TensorValue):
    """Base of all kernels; a subclass is a frozen dataclass of settings with a covariance function.

    :cvar real: names of settings that may be any number; all others are positive.
    """

    real: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name, setting in vars(self).items():
            start = setting.start if isinstance(setting, Learned) else setting
            if not isinstance(start, int | float | Tensor):
                continue  # a prior, or a part
            value = torch.as_tensor(start)
            refused = value.detach()[~(value.isfinite() & ((value > 0) | (name in self.real)))].flatten()
            if value.dim() > 1 or len(refused):
                found = f"the value {float(refused[0]):g}" if len(refused) else f"shape {tuple(value.shape)}"
                above = "" if name in self.real else " and greater than 0"
                raise BadInput(
                    f"{type(self).__name__} has {name} with {found}; expected finite{above}, one number or "
                    f"one per input. For a function that hardly varies along an input, give that input a lengthscale "
                    f"of many times its range."
                )

    def __call__(self, X: Tensor, Z: Tensor | None = None) -> Tensor:
        """Covariances of the function's values at ``X`` and at ``Z``, shape ``(N, M)``.

        :raises BadInput: for anything but floats of shapes ``(N, D)`` and ``(M, D)``, ``D >= 1``.
        """
        check_inputs(X, Z)
        return self.covariance(X, X if Z is None else Z)

    def covariance(self, X: Tensor, Z: Tensor) -> Tensor:
        """Covariance of the function at inputs that have been checked."""
        raise NotImplementedError

    def diagonal(self, X: Tensor) -> Tensor:
        """Variances of the function's values at ``X``, shape ``(N,)``."""
        check_inputs(X)
        return torch.stack([self.covariance(x, x).reshape(()) for x in X.split(1)])

    def resolved(self: Self, read: Read, name: str = "kernel") -> Self:
        """The kernel with each setting replaced by what ``read`` makes of its dotted name and of itself.

        Parts are numbered: ``kernel.0.variance``.  The new values are not checked: an engine may try any.
        """
        found = copy.copy(self)
        for field in fields(self):  # type: ignore[arg-type]
            value: Any = getattr(self, field.name)
            if field.name == "parts":
                value = tuple(part.resolved(read, f"{name}.{i}") for i, part in enumerate(value))
            else:
                value = read(f"{name}.{field.name}", value, self)
            object.__setattr__(found, field.name, value)
        return found

    def least(self, setting: str, X: Tensor) -> Tensor | None:
        """The least value of a setting that inputs ``(N, D)`` can tell, ``(D,)``; None where they do not bound it.

        A setting that is learned stays above it: for one number that all inputs share, above the least of these.
        """
        return None

    def most(self, setting: str, X: Tensor) -> Tensor | None:
        """The greatest value, likewise ``(D,)``; one that has it has a least one."""
        return None

    def begin(self, setting: str, X: Tensor, t: Tensor | None) -> Tensor | None:
        """Where a learned setting begins by default, told by inputs ``(N, D)`` and targets; None where at 1."""
        return None

    def __add__(self, other: "Kernel | float") -> "Sum":
        return Sum(_parts(Sum, self, other))

    def __mul__(self, other: "Kernel | float") -> "Product":
        return Product(_parts(Product, self, other))

    __radd__ = __add__
    __rmul__ = __mul__


def check_inputs(X: Tensor, Z: Tensor | None = None) -> None:
    """Refuse what is not a matrix of floats with at least one column, the same number in both.

    :raises BadInput: with the shapes and dtypes.
    """
    for name, value in (("X", X), ("Z", X if Z is None else Z)):
        require_matrix(name, value, batched=True)
    if Z is not None and X.shape[-1] != Z.shape[-1]:
        raise BadInput(
            f"X has {X.shape[-1]} inputs and Z has {Z.shape[-1]}; expected the same number. Give both the same columns."
        )


def _parts(kind: type["CompositeKernel"], *given: Kernel | float) -> tuple[Kernel, ...]:
    """Parts of a sum or a product of some kernels; a number is a constant kernel."""
    kernels = [each if isinstance(each, Kernel) else Constant(each) for each in given]
    return tuple(part for each in kernels for part in (each.parts if isinstance(each, kind) else (each,)))


def value_of(setting: Setting, like: Tensor) -> Tensor:
    """A setting as a tensor in the dtype and on the device of ``like``; a learned one where it starts.

    :raises BadInput: for a prior, which only a model can draw from.
    """
    start = setting.start if isinstance(setting, Learned) else setting
    if not isinstance(start, int | float | Tensor):
        raise BadInput(
            f"this kernel has the prior {start!r} for a setting; expected a number. Use the kernel in a model, such as "
            f"gp_regression(kernel), which draws it."
        )
    return torch.as_tensor(start, dtype=like.dtype, device=like.device)


def per_input(setting: Setting, X: Tensor, kernel: str, name: str) -> Tensor:
    """A setting of shape ``()`` or ``(D,)``, one per input.

    :raises BadInput: for another number of entries.
    """
    value = value_of(setting, X)
    if value.dim() == 1 and len(value) not in (1, X.shape[-1]):
        raise BadInput(
            f"{kernel} has {len(value)} entries in {name}, but X has {X.shape[-1]} inputs; expected one number, or one "
            f"per input (automatic relevance determination)."
        )
    return value


@dataclass(frozen=True, eq=False)
class CompositeKernel(Kernel):
    """A kernel made of others, whose covariances and variances are put together alike."""

    parts: tuple[Kernel, ...]
    combine: ClassVar[Callable[..., Any]]

    def covariance(self, X: Tensor, Z: Tensor) -> Tensor:
        """Sum or product of the parts' covariances."""
        return reduce(type(self).combine, (part.covariance(X, Z) for part in self.parts))

    def diagonal(self, X: Tensor) -> Tensor:
        """Sum or product of the parts' variances."""
        return reduce(type(self).combine, (part.diagonal(X) for part in self.parts))


class Sum(CompositeKernel):
    """The covariance of a sum of independent functions.  Made by ``+``."""

    combine = staticmethod(add)


class Product(CompositeKernel):
    """The product of covariances, which is one.  Made by ``*``; let only one factor have a variance to learn."""

    combine = staticmethod(mul)


@dataclass(frozen=True, eq=False)
class ChangePoint(CompositeKernel):
    r"""One function before a place and another after it, along the only input.

    .. math:: k(x, z) = (1 - s(x)) (1 - s(z)) k_0(x, z) + s(x) s(z) k_1(x, z), \quad
        s(x) = 1 / (1 + e^{-(x - \text{location}) / \text{width}})

    Lloyd, Duvenaud, Grosse, Tenenbaum and Ghahramani (2014), sec. 2.

    :param parts: the kernels before and after.
    :param location: in units of the input; by default it begins in the middle of the inputs.  One that is learned stays
        among these.
    :param width: of the transition, 90 % of which takes six widths; by default it begins at a twentieth of the inputs'
        range.  One that is learned stays below a sixth.
    """

    location: Setting = LEARNED
    width: Setting = LEARNED
    real = ("location",)

    def least(self, setting: str, X: Tensor) -> Tensor:
        return X.detach().amin(0) if setting == "location" else torch.zeros_like(X[0])

    def most(self, setting: str, X: Tensor) -> Tensor:
        low, high = X.detach().amin(0), X.detach().amax(0)
        return high if setting == "location" else (high - low) / 6.0

    def begin(self, setting: str, X: Tensor, t: Tensor | None) -> Tensor:
        low, high = X.detach().amin(), X.detach().amax()
        return 0.5 * (low + high) if setting == "location" else 0.05 * (high - low)

    def shares(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """The factor of each part at ``X``, ``(N,)`` each.

        :raises BadInput: for several inputs.
        """
        if X.shape[-1] != 1:
            raise BadInput(f"ChangePoint has {X.shape[-1]} inputs; expected one, along which the function changes.")
        along = (X[..., 0] - value_of(self.location, X)) / value_of(self.width, X)
        return torch.sigmoid(-along), torch.sigmoid(along)

    def covariance(self, X: Tensor, Z: Tensor) -> Tensor:
        """The sum of the parts, each as far as it is there."""
        trios = zip(self.parts, self.shares(X), self.shares(Z), strict=True)
        return reduce(add, (a.unsqueeze(-1) * b.unsqueeze(-2) * part.covariance(X, Z) for part, a, b in trios))

    def diagonal(self, X: Tensor) -> Tensor:
        """Variances of each part, of what is there of it."""
        pairs = zip(self.parts, self.shares(X), strict=True)
        return reduce(add, (a.square() * part.diagonal(X) for part, a in pairs))


class Stationary(Kernel):
    """Kernels of the difference of inputs: every value of the function has the same variance."""

    variance: Setting

    def diagonal(self, X: Tensor) -> Tensor:
        """``variance`` everywhere, shape ``(N,)``."""
        check_inputs(X)
        return value_of(self.variance, X).expand(X.shape[:-1])


@dataclass(frozen=True, eq=False)
class Isotropic(Stationary):
    """Kernels of the distance ``r`` between inputs in units of ``lengthscale``.

    :param lengthscale: in units of the inputs, ``()`` or ``(D,)``.
    :param variance: of the function's values (not its scale).
    """

    lengthscale: Setting = LEARNED
    variance: Setting = LEARNED

    def profile(self, squared: Tensor) -> Tensor:
        """Correlation as a function of ``r^2``."""
        raise NotImplementedError

    def covariance(self, X: Tensor, Z: Tensor) -> Tensor:
        """``variance`` times the correlation."""
        scale = per_input(self.lengthscale, X, type(self).__name__, "lengthscale")
        squared = squared_distance(X / scale, Z / scale)
        return value_of(self.variance, X) * self.profile(squared)


@dataclass(frozen=True, eq=False)
class Constant(Stationary):
    """One unknown level: ``k = variance``."""

    variance: Setting = LEARNED

    def covariance(self, X: Tensor, Z: Tensor) -> Tensor:
        return value_of(self.variance, X).expand(*X.shape[:-1], Z.shape[-2])


@dataclass(frozen=True, eq=False)
class Linear(Kernel):
    """Straight lines through the origin, ``k = variance x'z``; ``variance`` ``()`` or one per input, ``(D,)``.

    Rasmussen and Williams (2006), sec. 4.2.2; add :class:`Constant` for lines that need not pass through it.
    """

    variance: Setting = LEARNED

    def covariance(self, X: Tensor, Z: Tensor) -> Tensor:
        return (X * per_input(self.variance, X, "Linear", "variance")) @ Z.mT

    def diagonal(self, X: Tensor) -> Tensor:
        return (X.square() * per_input(self.variance, X, "Linear", "variance")).sum(-1)


class RBF(Isotropic):
    r"""Squared exponential, :math:`k = \sigma^2 \exp(-r^2 / 2)`.  Rasmussen and Williams (2006), eq. 4.9."""

    def profile(self, squared: Tensor) -> Tensor:
        """``exp(-r^2 / 2)``."""
        return (-0.5 * squared).exp_()


@dataclass(frozen=True, eq=False)
class RationalQuadratic(Isotropic):
    r"""A mixture of lengthscales, :math:`k = \sigma^2 (1 + r^2 / 2a)^{-a}`.  Rasmussen and Williams (2006), eq. 4.19.

    :param mixture: ``a``; infinite for an :class:`RBF`.
    """

    mixture: Setting = LEARNED

    def profile(self, squared: Tensor) -> Tensor:
        """``(1 + r^2 / 2a)^-a``."""
        a = value_of(self.mixture, squared)
        return (-a * (0.5 * squared / a).log1p()).exp()


class Matern12(Isotropic):
    """Exponential, ``k = variance exp(-r)``: continuous paths without a slope.  Rasmussen and Williams, eq. 4.18."""

    def profile(self, squared: Tensor) -> Tensor:
        """``exp(-r)``."""
        return (-root(squared)).exp()


class Matern32(Isotropic):
    """Matern of order 3/2, once differentiable.  Rasmussen and Williams (2006), eq. 4.17."""

    def profile(self, squared: Tensor) -> Tensor:
        """``(1 + sqrt(3) r) exp(-sqrt(3) r)``."""
        r = math.sqrt(3.0) * root(squared)
        return (1.0 + r) * (-r).exp()


class Matern52(Isotropic):
    """Matern of order 5/2, twice differentiable.  Rasmussen and Williams (2006), eq. 4.17."""

    def profile(self, squared: Tensor) -> Tensor:
        """``(1 + sqrt(5) r + 5 r^2 / 3) exp(-sqrt(5) r)``."""
        r = math.sqrt(5.0) * root(squared)
        return (1.0 + r + 5.0 / 3.0 * squared) * (-r).exp()


@dataclass(frozen=True, eq=False)
class Periodic(Stationary):
    r"""Functions that repeat, :math:`k = \sigma^2 \exp(-\tfrac12 \sum_d \sin^2(\pi (x_d - z_d) / p_d) / l_d^2)`.

    MacKay (2003), fig. 45.1c; scikit-learn's ``ExpSineSquared`` has ``2 l`` for our ``l``.

    :param period: ``p``, ``()`` or ``(D,)``, in units of the inputs.  One that is learned stays above twice the mean
        spacing of the inputs, below which a process sees aliases; a prior, or a shorter start, overrules that.  Of one
        input it begins by default where the targets' periodogram is highest.
    :param lengthscale: ``l``, ``()`` or ``(D,)``, a pure number.
    """

    period: Setting = LEARNED
    lengthscale: Setting = LEARNED
    variance: Setting = LEARNED

    def least(self, setting: str, X: Tensor) -> Tensor | None:
        """Smallest period: twice the mean distance of neighbours; nan for a constant input, which has no period.

        Of evenly spaced inputs a shorter one is the alias of a longer one (Shannon 1949), and of others it fits the
        noise.
        """
        if setting != "period":
            return None
        ordered = X.detach().sort(0).values
        steps = (ordered.diff(dim=0) > 0).sum(0)
        return 2.0 * (ordered[-1] - ordered[0]) / steps

    def begin(self, setting: str, X: Tensor, t: Tensor | None) -> Tensor | None:
        """The period of the sine that leaves the least squares, beside a straight line.

        Lomb (1976).  Periods that the inputs see at least twice, a quarter of a cycle over the whole range apart.
        """
        x = X.detach()[:, 0]
        if setting != "period" or X.shape[-1] != 1 or t is None or t.shape != x.shape:
            return None
        span, steps = x.max() - x.min(), int((x.sort().values.diff() > 0).sum())
        if steps < 5:
            return None
        cycles = torch.arange(2.0, steps / 2.0, 0.25).to(x)
        line = torch.linalg.qr(torch.stack([torch.ones_like(x), (x - x.mean()) / span], -1)).Q
        rest, power = t.to(x) - line @ (line.mT @ t.to(x)), []
        for some in cycles.split(max(1, BATCH_NUMBERS // len(x))):
            angle = math.tau * some.unsqueeze(-1) * (x - x.min()) / span
            waves = torch.stack([angle.cos(), angle.sin()], -1)
            waves = waves - line @ (line.mT @ waves)
            along = waves.mT @ rest
            power.append((along * torch.linalg.solve(waves.mT @ waves, along)).sum(-1))
        return span / cycles[torch.cat(power).argmax()]

    def covariance(self, X: Tensor, Z: Tensor) -> Tensor:
        """Through the points ``(cos, sin)`` on a circle, whose squared distance is ``4 sin^2``."""
        angle = 2.0 * math.pi / per_input(self.period, X, "Periodic", "period")
        radius = 0.5 / per_input(self.lengthscale, X, "Periodic", "lengthscale")
        around, across = (torch.cat([radius * (angle * x).cos(), radius * (angle * x).sin()], -1) for x in (X, Z))
        return value_of(self.variance, X) * (-0.5 * squared_distance(around, across)).exp()
