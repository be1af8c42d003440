"""Law: EvidenceEM and RVM take the same rounds to the same number in every unit; LaplaceEvidence's are beside it."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import RVM, EvidenceEM, Stop
from pyro_evidence.models.basis import GaussianRBF, Learned, Linear, Polynomial
from pyro_evidence.models.mixture import FullNoise, SphericalNoise, gaussian_mixture, linear_mixture
from pyro_evidence.models.mppca import DiagonalNoise, PerColumn, mppca
from pyro_evidence.models.regression import regression

QUIET = Stop(progress=False)
UNITS = [1e3, 1e-3]
NUM = 60
X = torch.linspace(-2.0, 2.0, NUM, dtype=torch.float64)[:, None]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CLOUDS = normal(NUM, 2) @ torch.tensor([[1.0, 0.6], [0.0, 0.8]]).double() + 6.0 * (torch.arange(NUM) % 2)[:, None]
PLANE = normal(NUM, 1) @ normal(1, 4, seed=1) + 0.3 * normal(NUM, 4, seed=2)
LINE = 3.0 + 2.0 * X[:, 0] + 0.4 * normal(NUM)


def by_hand(unit: float) -> Callable[..., Any]:
    """Two components along a line, centres and precisions written by the user."""

    def model(Y: Tensor) -> None:
        alpha = pyro.param("alpha", lambda: torch.full((2,), unit**-2.0), constraint=constraints.positive)
        beta = pyro.param("beta", lambda: torch.full((2,), unit**-2.0), constraint=constraints.positive)
        p = pyro.param("p", lambda: torch.full((2,), 0.5), constraint=constraints.simplex)
        mu = pyro.sample("mu", dist.Normal(0.0, alpha.rsqrt().unsqueeze(-1)).expand([2, 1]).to_event(2))
        with pyro.plate("data", len(Y)):
            z = pyro.sample("z", dist.Categorical(p), infer={"enumerate": "parallel"})
            pyro.sample("Y", dist.Normal(mu[z, 0], beta[z].rsqrt()), obs=Y)

    return model


MIXTURES: dict[str, tuple[Callable[[float], Any], tuple[Tensor, ...], Tensor]] = {
    "diagonal": (lambda _: gaussian_mixture(2), (), CLOUDS),
    "full": (lambda _: gaussian_mixture(2, noise=FullNoise()), (), CLOUDS),
    "spherical": (lambda _: gaussian_mixture(3, noise=SphericalNoise()), (), CLOUDS),
    "regressions": (lambda _: linear_mixture(2, Linear()), (X,), LINE[:, None]),
    "planes": (lambda _: mppca(2, 1), (), PLANE),
    "factors": (lambda _: mppca(1, 2, alpha=PerColumn(), noise=DiagonalNoise()), (), PLANE),
    "by hand": (by_hand, (), CLOUDS[:, 0]),
}


@cache
def mixture_in(name: str, unit: float) -> Any:
    model, inputs, Y = MIXTURES[name]
    pyro.clear_param_store()
    return EvidenceEM(model(unit), stop=QUIET).run(*inputs, unit * Y)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_know_no_unit(name: str, unit: float) -> None:
    one, other = mixture_in(name, 1.0), mixture_in(name, unit)
    assert (one.status, len(one.log_evidences)) == (other.status, len(other.log_evidences))
    shifted = float(other.log_evidence) + MIXTURES[name][2].numel() * math.log(unit)
    assert shifted == pytest.approx(float(one.log_evidence), rel=1e-8)


def scaled(basis: Any, **settings: Any) -> Callable[[float], Any]:
    """A regression whose precisions start in the unit of the targets."""

    def made(unit: float) -> Any:
        start = Learned(unit**-2.0)
        return regression(
            basis, alpha=start, alpha_bias=settings.get("bias", start), beta=start, groups=settings.get("groups")
        )

    return made


REGRESSIONS = {
    "powers": scaled(Polynomial(4)),
    "powers in groups": scaled(Polynomial(4), groups=torch.tensor([0, 0, 1, 1])),
    "kernels": scaled(GaussianRBF(X[::6], 0.7)),
    "lines": scaled(Linear()),
    "powers with a constant among them": scaled(Polynomial(4), bias=None),
    "narrow kernels": scaled(GaussianRBF(X[::4], 0.3)),
}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", REGRESSIONS)
def test_relevance_vectors_know_no_unit(name: str, unit: float) -> None:
    t = LINE + torch.sin(2.0 * X[:, 0])
    one, other = (RVM(REGRESSIONS[name](c), stop=QUIET).run(X, c * t) for c in (1.0, unit))
    assert (one.status, len(one.log_evidences), one.num_active) == (
        other.status,
        len(other.log_evidences),
        other.num_active,
    )
    assert float(other.log_evidence) + NUM * math.log(unit) == pytest.approx(float(one.log_evidence), rel=1e-8)
