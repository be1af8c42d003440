r"""Priors along the axes of a relevance eigenvector machine: what to pass as ``prior=``.

Each says how its hyperparameter ``alpha`` is chosen, where its mode is, and which Pyro distribution it is.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor

from pyro_evidence.errors import NotAMode
from pyro_evidence.numerics import newton
from pyro_evidence.program.log_joint import Model
from pyro_evidence.relevance import axis_evidence
from pyro_evidence.relevance import mode as relevance_mode
from pyro_evidence.relevance.mode import MOST_STEPS
from pyro_evidence.relevance.targets import LinearTarget, Penalised, QuadraticTarget, Target
from pyro_evidence.settings import check_count


class SearchStopped(NotAMode):
    """No mode was found; ``reached`` is where the search for it stopped."""

    def __init__(self, message: str, reached: Tensor | None = None) -> None:
        super().__init__(message)
        self.reached = reached


class AxisPrior(Protocol):
    """One independent symmetric prior per axis."""

    def alpha(self, h: Tensor, u: Tensor) -> Tensor:
        """Hyperparameters of highest evidence, ``inf`` for pruned axes, shape ``(K,)``."""

    def log_gain(self, wald: Tensor) -> Tensor:
        """Gain of each ``alpha`` over ``inf``, nats, shape ``(K,)``, largest curvature first."""

    def mode(self, target: Target, alpha: Tensor, start: Tensor) -> Tensor:
        """Posterior mode over the active axes and then the other coordinates, shape ``(K + V,)``."""

    def distribution(self, alpha: Tensor) -> Any:
        """The prior as a Pyro distribution of batch shape ``(K,)``."""


@dataclass(frozen=True)
class GaussianPrior:
    r"""``u ~ N(0, 1/alpha)``: GREVM.  With ``size`` above 1 axes of neighbouring curvature share a hyperparameter.

    The variances of such a group are ``s/h``, and it is kept where the *mean* of its Wald statistics exceeds 1.  It
    borrows strength and shrinks its axes alike, by ``1 - 1/mean``; it is no stronger filter: a group of ``b`` axes of
    pure noise is kept with probability :math:`P(\chi^2_b > b)`, 32 % for one axis, 44 % for ten, though almost wholly
    shrunk then.

    :ivar size: axes that share a hyperparameter; the last group may be smaller.

    >>> import torch
    >>> from pyro_evidence import REVM
    >>> from pyro_evidence.models.basis import Polynomial
    >>> from pyro_evidence.models.regression import regression
    >>> from pyro_evidence.relevance import GaussianPrior
    >>> X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    >>> t = 2.0 * X[:, 0] + 0.3 * torch.cos(40.0 * X[:, 0])
    >>> REVM(regression(Polynomial(3), beta=20.0), prior=GaussianPrior()).run(X, t).num_active > 0
    True
    """

    size: int = 1

    def __post_init__(self) -> None:
        """Requires a size of at least one."""
        check_count("size", self.size, advice="It is the number of axes in a group.")

    def alpha(self, h: Tensor, u: Tensor) -> Tensor:
        """Kropotov and Vetrov (2007), eq. 11."""
        return axis_evidence.gaussian_alpha(h, u, self.size)

    def log_gain(self, wald: Tensor) -> Tensor:
        return axis_evidence.gaussian_log_gain(wald, self.size)

    def mode(self, target: Target, alpha: Tensor, start: Tensor) -> Tensor:
        return climbed(target, alpha, start)

    def distribution(self, alpha: Tensor) -> Any:
        """Normal with precision ``alpha``."""
        return dist.Normal(torch.zeros_like(alpha), alpha.rsqrt())


@dataclass(frozen=True)
class L1Prior:
    """Density ``alpha/4 exp(-alpha |u| / 2)``: LREVM, with some axes exactly zero at the mode.

    :ivar orthant: hold every axis on the side of its centre, as algorithm 2 of Kropotov and Vetrov (2007)
        does.  Without it the mode is the maximum over all ``u``, which may lie on another side; the two
        differ rarely.

    >>> import torch
    >>> from pyro_evidence import REVM
    >>> from pyro_evidence.models.basis import Polynomial
    >>> from pyro_evidence.models.regression import regression
    >>> from pyro_evidence.relevance import L1Prior
    >>> X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    >>> t = 2.0 * X[:, 0] + 0.3 * torch.cos(40.0 * X[:, 0])
    >>> REVM(regression(Polynomial(3), beta=20.0), prior=L1Prior()).run(X, t).num_active > 0
    True
    """

    orthant: bool = False

    def alpha(self, h: Tensor, u: Tensor) -> Tensor:
        """The maximum of Kropotov and Vetrov (2007), eq. 13."""
        return axis_evidence.laplace_alpha(h, u)

    def log_gain(self, wald: Tensor) -> Tensor:
        return axis_evidence.laplace_log_gain(wald)

    def mode(self, target: Target, alpha: Tensor, start: Tensor) -> Tensor:
        """By projected Newton, optimality conditions met to 1e-9, or to rounding where that is more.

        :raises NotAMode: when they are not.
        """
        free = start.new_zeros(len(start) - len(alpha))
        rate = torch.cat([0.5 * alpha, free])
        density = Penalised(target, torch.zeros_like(rate))
        orthant, theta = start.sign() if self.orthant else None, start.new_zeros(0)
        value = float(density.log_joint(start.unsqueeze(0), theta)[0])
        slope = float((density.precision(start.unsqueeze(0), theta)[0].abs() @ start.abs()).max())
        # what rounding of the density and of the weights leaves of the conditions, nats per unit of weight
        tolerance = max(1e-9, newton.RESTING * target.eps * (1.0 + abs(value)), 10.0 * target.eps * slope)
        limits = newton.Limits(tolerance, MOST_STEPS, slack=newton.SLACK * target.eps)
        found = relevance_mode.maximise(density, rate, start, orthant, limits)
        if not found.converged:
            raise SearchStopped(
                f"the L1 search stopped with optimality residual {found.residual:.2e}; expected below "
                f"{tolerance:.2g}. A likelihood that is not log-concave has many maxima: pass "
                "prior=GaussianPrior(), or take a likelihood with lighter tails.",
                found.u,
            )
        return found.u

    def distribution(self, alpha: Tensor) -> Any:
        """Laplace with scale ``2 / alpha``."""
        return dist.Laplace(torch.zeros_like(alpha), 2.0 / alpha)


def climbed(target: Target | QuadraticTarget, alpha: Tensor, start: Tensor) -> Tensor:
    """Mode of the target under ``N(0, 1/alpha)`` on its first coordinates, shape ``(D,)``.

    :raises NotAMode: when Newton does not arrive.
    """
    padded = torch.cat([alpha, start.new_zeros(len(start) - len(alpha))])
    if isinstance(target, LinearTarget) and target.is_resident and target.rest is None:
        direct = relevance_mode.mode(target, padded, start)
        if direct.converged:
            return direct.x
    density, theta = Penalised(target, padded), start.new_zeros(0)
    limits = newton.Limits(newton.RESTING * target.eps, MOST_STEPS, slack=newton.SLACK * target.eps)
    found = newton.climb(density, density.precision, start.unsqueeze(0), theta, limits)
    if not bool(found.converged[0]):
        raise SearchStopped(
            f"Newton stopped where its next step still promises {0.5 * float(found.decrement[0]):.2e} nats; "
            "expected a maximum of a smooth density. Newton finds none at a corner, as of Laplace noise or relu: take "
            "a smooth relative (StudentT, SoftLaplace, tanh).",
            found.u[0].detach(),
        )
    return found.u[0].detach()


class SparseState:
    """Report of a sparse fit, along the weights themselves unless a subclass has other axes.

    Subclasses are frozen dataclasses.
    """

    alpha: Tensor  # (K,) of every axis, inf where pruned
    active: Tensor  # (K,) bool
    x: Tensor  # (K_active + V,) the mode: active axes, then the other coordinates
    prior: AxisPrior  # the same for each axis

    @cached_property
    def directions(self) -> Tensor:
        """Active axes, shape ``(M, K_active)``."""
        return torch.eye(len(self.alpha)).to(self.x)[:, self.active]

    @property
    def num_active(self) -> int:
        """Number of axes that the data keep."""
        return int(self.active.sum())

    @property
    def y(self) -> Tensor:
        """The mode: weights, then the other coordinates, shape ``(D,)``."""
        return self.embedding @ self.x

    @cached_property
    def embedding(self) -> Tensor:
        """``y = T x``, shape ``(D, K_active + V)``."""
        return torch.block_diag(self.directions, torch.eye(len(self.x) - self.num_active).to(self.x))


@dataclass(frozen=True, eq=False)
class GaussianFit:
    """The Laplace approximation over ``x``."""

    precision_tril: Tensor  # (K + V, K + V)
    log_evidence: Tensor  # ()


AXES = "axes"  # the latent site that replaces the weights


@dataclass(frozen=True, eq=False)
class OnAxes:
    """The user's model with ``w = directions u``: latent ``axes``, shape ``(K,)``, in place of the weights.

    The weights are recorded as ``pyro.deterministic`` under their own names; their prior is not counted.
    """

    model: Model
    directions: Tensor  # (M, K)
    prior: Any  # distribution of batch shape (K,)
    shapes: dict[str, tuple[int, ...]]  # of the sites that the weights are split into

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on one draw of the axes."""
        w = self.directions @ pyro.sample(AXES, self.prior.to_event(1)).to(self.directions)
        pieces = w.split([math.prod(shape) for shape in self.shapes.values()])
        named = zip(self.shapes.items(), pieces, strict=True)
        return WithWeights(self.model, {n: w.reshape(shape) for (n, shape), w in named})(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class WithWeights:
    """The user's model with its weights fixed, as when every axis is pruned."""

    model: Model
    values: dict[str, Tensor]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; the weights' prior is not counted."""
        fixed = {n: pyro.deterministic(n, v) for n, v in self.values.items()}
        return poutine.block(poutine.condition(self.model, data=fixed), hide=list(fixed))(*args, **kwargs)
