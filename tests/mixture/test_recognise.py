"""Mixtures are recognised in every form they are written in, and refused with the reason otherwise."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.poutine import scale as poutine_scale
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence.errors import UnsupportedModel
from pyro_evidence.mixture import evidence as mixture_evidence
from pyro_evidence.mixture.expectation import Mixture, mixture_data
from pyro_evidence.mixture.recognise import MixtureStructure, held_at, recognise_mixture
from pyro_evidence.models.basis import Polynomial
from pyro_evidence.models.mixture import (
    DiagonalNoise,
    FullNoise,
    Noise,
    SharedNoise,
    SphericalNoise,
    gaussian_mixture,
    linear_mixture,
)
from pyro_evidence.models.regression import Learned
from pyro_evidence.program.log_joint import LogJoint

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
Model = Callable[..., Any]


def data() -> Tensor:
    torch.manual_seed(0)
    return 5.0 + 3.0 * torch.randn(30, 2)


def positive(name: str, shape: tuple[int, ...]) -> Tensor:
    return pyro.param(name, torch.ones(shape), constraint=constraints.positive)


def mixing(name: str = "p", num_components: int = 3) -> Tensor:
    return pyro.param(name, torch.full((num_components,), 1.0 / num_components), constraint=constraints.simplex)


def same_family(Y: Tensor) -> None:
    """Scales instead of precisions, centres in a plate, MixtureSameFamily."""
    spread, sd, p = positive("spread", (3,)), positive("sd", (2,)), mixing()
    with pyro.plate("components", 3):
        centre = pyro.sample("centre", dist.Normal(Y.mean(0), spread.unsqueeze(-1)).to_event(1))
    with pyro.plate("data", len(Y)):
        pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(p), dist.Normal(centre, sd).to_event(1)), obs=Y)


def by_hand(Y: Tensor) -> None:
    """The same, enumerated."""
    spread, sd, p = positive("spread", (3,)), positive("sd", (2,)), mixing()
    with pyro.plate("components", 3):
        centre = pyro.sample("centre", dist.Normal(Y.mean(0), spread.unsqueeze(-1)).to_event(1))
    with pyro.plate("data", len(Y)):
        k = pyro.sample("k", dist.Categorical(p), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(centre[k], sd).to_event(1), obs=Y)


def two_lines(x: Tensor, t: Tensor) -> None:
    """Scalar responses, slopes and intercepts at separate sites, a fixed offset, fixed prior, weighted data."""
    beta, p = positive("beta", (2,)), mixing(num_components=2)
    slope = pyro.sample("slope", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    height = pyro.sample("height", dist.Normal(torch.zeros(2), 3.0).to_event(1))
    with pyro.plate("data", len(x)), poutine_scale(scale=torch.arange(len(x)) % 3 + 1.0):
        loc = slope * x.unsqueeze(-1) + height + x.square().unsqueeze(-1)
        pyro.sample("t", dist.MixtureSameFamily(dist.Categorical(p), dist.Normal(loc, beta.rsqrt())), obs=t)


def fixed(Y: Tensor) -> None:
    """Nothing to learn."""
    centre = pyro.sample("centre", dist.Normal(torch.zeros(2, 2), 4.0).to_event(2))
    with pyro.plate("data", len(Y)):
        k = pyro.sample("k", dist.Categorical(torch.tensor([0.3, 0.7])))
        pyro.sample("y", dist.Normal(centre[k], torch.tensor([1.0, 2.0])).to_event(1), obs=Y)


def library(noise: Noise, alpha: Learned = Learned()) -> Model:  # noqa: B008 - frozen
    return gaussian_mixture(4, noise=noise, alpha=alpha)


CASES: dict[str, tuple[Model, Callable[[], tuple[Tensor, ...]]]] = {
    "diagonal": (library(DiagonalNoise()), lambda: (data(),)),
    "full": (library(FullNoise()), lambda: (data(),)),
    "spherical": (library(SphericalNoise(), Learned(torch.ones(4))), lambda: (data(),)),
    "shared": (library(SharedNoise()), lambda: (data(),)),
    "one kernel": (gaussian_mixture(1), lambda: (data(),)),
    "linear": (
        linear_mixture(3, Polynomial(2), num_outputs=2),
        lambda: (torch.linspace(-1, 1, 30)[:, None], data()),
    ),
    "same family": (same_family, lambda: (data(),)),
    "by hand": (by_hand, lambda: (data(),)),
    "two lines": (two_lines, lambda: (torch.linspace(-1, 1, 30), data()[:, 0])),
    "fixed": (fixed, lambda: (data(),)),
}


def elsewhere(structure: MixtureStructure) -> Mixture:
    """Other weights, and hyperparameters moved within their ties."""
    torch.manual_seed(2)
    start, ties = structure.start, structure.ties
    log_mixing = torch.randn_like(start.log_mixing).log_softmax(-1) if ties.mixing_free else start.log_mixing
    alpha = torch.where(ties.alpha_free, 1.7 * start.alpha, start.alpha)
    noise = torch.where(ties.beta_free.unsqueeze(-1), 1.3 * start.noise_matrix, start.noise_matrix)
    noise = noise if start.noise.dim() == 4 else noise.diagonal(dim1=-2, dim2=-1)
    return replace(start, w=start.w + torch.randn_like(start.w), alpha=alpha, noise=noise, log_mixing=log_mixing)


@pytest.mark.parametrize("name", CASES)
def test_the_arrays_are_the_model(name: str) -> None:
    """The log joint from the arrays equals the one that Pyro computes from the params they are written to."""
    model, arguments = CASES[name]
    structure = recognise_mixture(LogJoint(model, arguments()))
    for mixture in (structure.start, elsewhere(structure)):
        at = mixture_data(structure.Y, structure.G, weight=structure.weight)
        joint = held_at(structure.joint, structure.params(mixture))
        expected = joint.log_joint(structure.flat(mixture.w[0]), joint.initial_theta)
        assert_exact(mixture_evidence.log_joint(at, mixture)[0], expected)


def test_both_forms_of_a_mixture_are_one_structure() -> None:
    a, b = (recognise_mixture(LogJoint(model, (data(),))) for model in (same_family, by_hand))
    for field in ("index", "Y", "weight", "loc"):
        assert_exact(getattr(a, field), getattr(b, field))
    for field in vars(a.ties):
        if isinstance(getattr(a.ties, field), Tensor):
            assert_exact(getattr(a.ties, field), getattr(b.ties, field))


def shared_weight(Y: Tensor) -> None:
    centre = pyro.sample("centre", dist.Normal(torch.zeros(2), 4.0).to_event(1))
    with pyro.plate("data", len(Y)):
        k = pyro.sample("k", dist.Categorical(torch.tensor([0.3, 0.7])))
        pyro.sample("y", dist.Normal(centre * (1.0 + k.unsqueeze(-1)), 1.0).to_event(1), obs=Y)


def not_gaussian(Y: Tensor) -> None:
    rate = pyro.sample("rate", dist.Normal(torch.zeros(2), 4.0).to_event(1))
    with pyro.plate("data", len(Y)):
        k = pyro.sample("k", dist.Categorical(torch.tensor([0.3, 0.7])))
        pyro.sample(
            "y",
            dist.StudentT(
                4.0, rate[k].unsqueeze(-1).expand(-1, -1, 2) if k.dim() > 1 else rate[k].unsqueeze(-1)
            ).to_event(1),
            obs=Y,
        )


def not_linear(Y: Tensor) -> None:
    log_centre = pyro.sample("centre", dist.Normal(torch.zeros(2, 2), 1.0).to_event(2))
    with pyro.plate("data", len(Y)):
        k = pyro.sample("k", dist.Categorical(torch.tensor([0.3, 0.7])))
        pyro.sample("y", dist.Normal(log_centre.exp()[k], 1.0).to_event(1), obs=Y)


def learned_noise_site(Y: Tensor) -> None:
    centre = pyro.sample("centre", dist.Normal(torch.zeros(2, 2), 1.0).to_event(2))
    sd = pyro.sample("sd", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(Y)):
        k = pyro.sample("k", dist.Categorical(torch.tensor([0.3, 0.7])))
        pyro.sample("y", dist.Normal(centre[k], sd).to_event(1), obs=Y)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (shared_weight, "shared"),
        (not_gaussian, "StudentT"),
        (not_linear, "not linear|basis functions"),
        (learned_noise_site, "other latent sites|not Normal|latent site"),
    ],
)
def test_what_is_no_such_mixture_is_refused_with_the_reason(model: Model, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        recognise_mixture(LogJoint(model, (data(),)))
