r"""Mixtures of probabilistic PCA, and of factor analysers, with a Gaussian prior on their loadings.

.. math:: x_n \sim N(0, I_q), \qquad y_n | x_n, k \sim N(W_k x_n + \mu_k, \beta_k^{-1} I), \qquad
    w_{kij} \sim N(0, \alpha_{kj}^{-1})

Tipping and Bishop (1999); Husmeier (2000), eqs. 3.1 to 3.8.  An ordinary Pyro model, for any engine.  Data with gaps,
nan where nothing was observed, are for ``EvidenceEM(marginalised(model))``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.ops.indexing import Vindex
from torch import Size, Tensor
from torch.distributions import constraints

from pyro_evidence.errors import BadInput
from pyro_evidence.models.basis import TensorValue
from pyro_evidence.models.mixture import Responses, check_complete, check_responses
from pyro_evidence.models.regression import LEARNED, Learned, Precision, check_precision, precision_value, start_of
from pyro_evidence.settings import check_count, check_function

FEW = 256  # rows on which the model is recognised: the rest is only looked at by the engine
FEW_NUMBERS = 2**21  # in the loadings of a few rows, which Pyro expands to one set for each


@dataclass(frozen=True, eq=False)
class PerColumn(Learned):
    """A learned precision for each column of each component's loadings: unneeded columns are switched off."""


@dataclass(frozen=True, eq=False)
class MPPCAParts:
    """All parameters of a mixture of probabilistic PCA."""

    mixing: Tensor  # (K,)
    mu: Tensor  # (K, m)
    W: Tensor  # (..., K, m, q)
    variance: Tensor  # (K, m)  of the noise


Noise = Callable[[int, Tensor], Tensor]  # number of components and Y to precisions that broadcast to (K, m)


@dataclass(frozen=True, eq=False)
class IsotropicNoise(TensorValue):
    """One noise precision for each component, ``beta`` ``(K,)``, in units of ``y`` to the power -2: PCA."""

    beta: Precision = LEARNED

    def __call__(self, num_components: int, Y: Tensor) -> Tensor:
        """Declares ``beta``: one noise precision for each component."""
        variance = Y.var(0, correction=0).mean()
        return _noise(self.beta, Size([num_components]), variance, "one per component").unsqueeze(-1)


@dataclass(frozen=True, eq=False)
class DiagonalNoise(TensorValue):
    """One noise precision for each component and output, ``beta`` ``(K, m)``: factor analysers.

    EM for factor analysers creeps towards its fixed point, as the noise of an output and its loadings can only change
    together: the density settles in tens of rounds, single precisions may take thousands.  The shortcut within the
    span of the loadings, which ``BoundedInflation()`` takes for isotropic noise, has no closed form here.
    """

    beta: Precision = LEARNED

    def __call__(self, num_components: int, Y: Tensor) -> Tensor:
        """Declares ``beta``: one noise precision for each component and column."""
        shape = Size([num_components, Y.shape[-1]])
        return _noise(self.beta, shape, Y.var(0, correction=0), "one per component and output")


def _noise(beta: Precision, shape: Size, variance: Tensor, meaning: str) -> Tensor:
    """A precision whose start is that of the data.

    :raises BadInput: when it is none, or does not fit the model.
    """
    check_precision("beta", beta, len(shape), shape, meaning)
    if beta is LEARNED:
        beta = Learned(torch.where(variance > 0, variance, 1.0).reciprocal().detach())
    return precision_value("beta", beta, shape, variance)


Latents = Callable[[MPPCAParts, Tensor], Tensor]


def marginal(parts: MPPCAParts, Y: Tensor) -> Tensor:
    """The data with latent coordinates integrated and components summed out, in closed form; site ``y``."""
    components = dist.LowRankMultivariateNormal(parts.mu, parts.W, parts.variance)
    with pyro.plate("data", len(Y)):
        return pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(parts.mixing), components), obs=Y)


def explicit_latents(parts: MPPCAParts, Y: Tensor) -> Tensor:
    """Every step of the story: component ``z``, enumerated, latent coordinates ``x`` ``(N, q)``, and data ``y``."""
    with pyro.plate("data", len(Y)):
        z = pyro.sample("z", dist.Categorical(parts.mixing), infer={"enumerate": "parallel"})
        x = pyro.sample("x", dist.Normal(Y.new_zeros(parts.W.shape[-1]), 1.0).to_event(1))
        loc = (Vindex(parts.W)[..., z, :, :] @ x.unsqueeze(-1)).squeeze(-1) + Vindex(parts.mu)[..., z, :]
        return pyro.sample("y", dist.Normal(loc, Vindex(parts.variance)[..., z, :].sqrt()).to_event(1), obs=Y)


@dataclass(frozen=True, eq=False)
class MPPCA(TensorValue):
    """The Pyro model that :func:`mppca` returns: call it with ``Y``, shape ``(N, m)``.

    Sites: ``W``, shape ``(K, m, q)``; ``y``, in the plate ``data``; with ``explicit_latents`` also ``z``, ``x``.
    Params: ``mu`` ``(K, m)``, ``mixing`` ``(K,)``, and ``alpha`` and ``beta`` where they are learned.
    """

    num_components: int
    num_latents: int
    alpha: Precision
    noise: Noise
    latents: Latents

    def __call__(self, Y: Tensor) -> Tensor:
        """Run the model; with ``Y``, shape ``(N, m)``, on those data."""
        check_responses(Y)
        _check_powers(Y)
        K, m, q = self.num_components, Y.shape[-1], self.num_latents
        if q >= m:
            fewer = f"num_latents={m - 1} at most, or " if m > 1 else ""
            raise BadInput(
                f"num_latents={q} and Y has {m} columns; expected fewer latents than columns, or nothing is left for "
                f"the noise. Pass {fewer}gaussian_mixture(K, noise=FullNoise())."
            )
        alpha = precision_value("alpha", self.alpha, _alpha_shape(self.alpha, K, q), Y)
        whole = torch.where(Y.isnan(), Y.nanmean(0), Y) if bool(Y.isnan().any()) else Y  # what params start from
        variance = self.noise(K, whole).reciprocal().expand(K, m)
        start = whole[torch.arange(K) * len(Y) // K]
        mu = pyro.param("mu", start.detach().clone())
        mixing = pyro.param("mixing", Y.new_full((K,), 1.0 / K), constraint=constraints.simplex)
        scale = alpha.rsqrt().reshape(-1, 1, alpha.shape[-1] if alpha.dim() == 2 else 1).expand(K, m, q)
        W = pyro.sample("W", dist.Normal(torch.zeros_like(scale), scale).to_event(scale.dim()))
        return self.latents(MPPCAParts(mixing, mu, W, variance), Y)

    def with_components(self, num_components: int) -> "MPPCA | None":
        """This model with another number of components; None where a setting of its own belongs to each."""
        own = start_of(self.alpha).shape, torch.as_tensor(start_of(getattr(self.noise, "beta", LEARNED))).shape
        alike = own[0] in (Size(), Size([1])) and own[1] == Size()
        return replace(self, num_components=num_components) if alike else None

    def settled(self, rows: Any = None) -> "MPPCA":
        """This model with its latent coordinates integrated out: a few rows are then enough to know it."""
        return replace(self, latents=marginal)

    def rows(self, Y: Tensor, *, gaps: bool = False) -> Responses:
        """The data as they are observed, checked; with ``gaps`` nan where missing.

        :raises BadInput: when they cannot be used.
        """
        (check_responses if gaps else check_complete)(Y)
        _check_powers(Y)
        return Responses(Y, None, Y.new_ones(1).expand(len(Y)))

    def few(self, step: int, Y: Tensor) -> tuple[Tensor]:
        """A few rows, evenly spaced, gaps filled with the means: to look at the model, not to fit it."""
        most = FEW_NUMBERS // (self.num_components * self.num_latents * Y.shape[1])
        few = Y[:: max(1, len(Y) // max(16, min(FEW, most)))]
        return (few.where(~few.isnan(), Y.nanmean(0)) if bool(few.isnan().any()) else few,)


def _check_powers(Y: Tensor) -> None:
    """Refuse numbers whose fourth powers are not finite, also those of single precision."""
    found, largest = float(Y.nan_to_num(0.0).abs().max()), torch.finfo(Y.dtype).max ** 0.25
    if found > largest:
        raise BadInput(
            f"Y, shape {tuple(Y.shape)}, holds {found:.3g} in size; expected less than {largest:.2g} in {Y.dtype}, or "
            f"powers of it are not finite. Rescale: Y / Y.std()."
        )


def _alpha_shape(alpha: Precision, num_components: int, num_latents: int) -> Size:
    """Shape of the param: one per component unless the setting has a shape of its own."""
    if isinstance(alpha, PerColumn):
        return Size([num_components, num_latents])
    own = start_of(alpha).shape
    return own if own else Size([num_components])


def mppca(
    num_components: int,
    num_latents: int,
    *,
    alpha: Precision = LEARNED,
    noise: Noise = IsotropicNoise(),
    latents: Latents = marginal,
) -> MPPCA:
    """A mixture of probabilistic PCA as a Pyro model ``model(Y)``.

    :param num_components: ``K``; ``EvidenceEM`` leaves out those that it does not need.
    :param num_latents: ``q``, latent dimensions, 1 to m - 1; with ``PerColumn()`` those that are not needed are
        left out.
    :param alpha: prior precision of the loadings, in units of ``y`` to the power -2: one per component (Husmeier 2000),
        ``PerColumn()`` for one per column, ``Learned(torch.ones(1))`` for one in all; numbers are held fixed.
    :param noise: :class:`IsotropicNoise` for PCA, :class:`DiagonalNoise` for factor analysers.
    :param latents: :func:`marginal`, or :func:`explicit_latents` for an engine that samples the latent coordinates.
    :raises BadInput: on settings that cannot be meant.
    """
    check_count("num_components", num_components)
    without = "Without latents it is gaussian_mixture(K, noise=SphericalNoise()), whose centres have a prior."
    check_count("num_latents", num_latents, advice=without if isinstance(num_latents, int) and num_latents == 0 else "")
    check_function("noise", noise, "IsotropicNoise()")
    check_function("latents", latents, "marginal")
    check_precision("alpha", alpha, largest_dim=2)
    allowed = (Size([1]), Size([num_components]), Size([num_components, num_latents]))
    shape = _alpha_shape(alpha, num_components, num_latents)
    start = start_of(alpha).shape
    if shape not in allowed or (isinstance(alpha, PerColumn) and start not in (Size(), shape)):
        raise BadInput(
            f"alpha has shape {tuple(start)}; expected (), ({num_components},), one per component, or "
            f"({num_components}, {num_latents}), one per column."
        )
    return MPPCA(num_components, num_latents, alpha, noise, latents)
