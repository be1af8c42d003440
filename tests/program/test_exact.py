"""Second derivatives of log densities in their real parameters, at 0 and elsewhere, by differences of the slope."""

from collections.abc import Callable
from typing import Any, cast

import mpmath
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence.models.survival import Censored
from pyro_evidence.program.exact import exact
from tests.installed import before

T = torch.tensor
POINTS = (0.0, 1e-9, 0.1737, -0.3191)


def pair(x: Tensor) -> Tensor:
    return torch.stack([x, torch.zeros_like(x)])


def triple(x: Tensor) -> Tensor:
    return torch.stack([x, torch.zeros_like(x), -x])


CASES: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "Bernoulli": (lambda x: dist.Bernoulli(logits=x), T(1.0)),
    "Bernoulli by probs": (lambda x: dist.Bernoulli(probs=torch.sigmoid(x)), T(1.0)),
    "Binomial": (lambda x: dist.Binomial(10, logits=x), T(4.0)),
    "Binomial by probs": (lambda x: dist.Binomial(10, probs=torch.sigmoid(x)), T(4.0)),
    "ExtendedBinomial": (lambda x: dist.ExtendedBinomial(T(10), logits=x), T(4.0)),
    "torch Binomial": (lambda x: torch.distributions.Binomial(10, logits=x), T(4.0)),
    "Independent": (lambda x: dist.Binomial(10, logits=pair(x)).to_event(1), T([4.0, 5.0])),
    "expanded": (lambda x: dist.Binomial(10, logits=x).expand([2]), T([4.0, 5.0])),
    "masked": (lambda x: dist.Binomial(10, logits=pair(x)).mask(T([True, False])), T([4.0, 5.0])),
    "mixture": (
        lambda x: dist.MixtureSameFamily(dist.Categorical(logits=pair(x)), dist.Binomial(10, logits=triple(x)[:2])),
        T(4.0),
    ),
    "zero-inflated": (lambda x: dist.ZeroInflatedDistribution(dist.Binomial(10, logits=x), gate_logits=x), T(0.0)),
    "ContinuousBernoulli": (lambda x: dist.ContinuousBernoulli(logits=x), T(0.3)),
    "Geometric": (lambda x: dist.Geometric(logits=x), T(3.0)),
    "NegativeBinomial": (lambda x: dist.NegativeBinomial(T(3.0), logits=x), T(4.0)),
    "ZeroInflatedNegativeBinomial": (
        lambda x: dist.ZeroInflatedNegativeBinomial(T(3.0), logits=x, gate_logits=x),
        T(0.0),
    ),
    "ZeroInflatedPoisson": (lambda x: dist.ZeroInflatedPoisson(T(3.0), gate_logits=x), T(0.0)),
    "RelaxedBernoulli": (lambda x: dist.RelaxedBernoulli(T(0.7), logits=x), T(0.3)),
    "Categorical": (lambda x: dist.Categorical(logits=triple(x)), T(0)),
    "Multinomial": (lambda x: dist.Multinomial(10, logits=triple(x)), T([2.0, 3.0, 5.0])),
    "RelaxedOneHotCategorical": (
        lambda x: dist.RelaxedOneHotCategorical(T(0.7), logits=triple(x)),
        T([0.2, 0.3, 0.5]),
    ),
    "OrderedLogistic": (lambda x: dist.OrderedLogistic(x, T([0.0, 1.0])), T(0)),
    "SoftLaplace": (lambda x: dist.SoftLaplace(x, T(1.0)), T(0.0)),
    "SoftAsymmetricLaplace": (lambda x: dist.SoftAsymmetricLaplace(x, T(1.0), T(2.0), T(0.5)), T(0.0)),
    "Logistic": (lambda x: dist.Logistic(x, T(1.0)), T(0.0)),
    "InverseGamma": (lambda x: dist.InverseGamma(T(1.5), x.exp()), T(0.7)),
    "Weibull": (lambda x: dist.Weibull(x.exp(), T(1.3)), T(0.7)),
    "Weibull, concentration": (lambda x: dist.Weibull(T(2.0), x.exp()), T(0.7)),
    "Censored": (lambda x: Censored(dist.Weibull(x.exp(), T([1.3, 0.8])), event=T([1.0, 0.0])), T([0.7, 2.0])),
    "SkewLogistic": (lambda x: dist.SkewLogistic(x, T(1.0), T(2.0)), T(0.0)),
    "Cauchy": (lambda x: dist.Cauchy(x, T(1.0)), T(0.0)),
    "StudentT": (lambda x: dist.StudentT(T(4.0), x, T(1.0)), T(0.0)),
    "Gumbel": (lambda x: dist.Gumbel(x, T(1.0)), T(0.0)),
    "VonMises": (lambda x: dist.VonMises(x, T(2.0)), T(0.0)),
    "VonMises3D": (lambda x: dist.VonMises3D(triple(x)), T([0.6, 0.8, 0.0])),
    "ProjectedNormal": (lambda x: dist.ProjectedNormal(pair(x)), T([0.6, 0.8])),
    "SineBivariateVonMises, loc": (
        lambda x: dist.SineBivariateVonMises(x, T(0.2), T(2.0), T(2.0), T(0.5)),
        T([0.3, 0.2]),
    ),
    "SineBivariateVonMises, correlation": (
        lambda x: dist.SineBivariateVonMises(T(0.1), T(0.2), T(2.0), T(2.0), correlation=x),
        T([0.3, 0.2]),
    ),
    "MultivariateStudentT": (lambda x: dist.MultivariateStudentT(T(4.0), pair(x), torch.eye(2)), T([0.0, 0.0])),
    "LogNormal": (lambda x: dist.LogNormal(x, T(1.0)), T(1.0)),
    "DiscreteHMM": (
        lambda x: dist.DiscreteHMM(
            pair(x), torch.stack([pair(x), -pair(x)]), dist.Binomial(9, logits=pair(x)), validate_args=False
        ),
        T([2.0, 3.0, 5.0]),
    ),
}
if not before("2.8"):
    CASES |= {
        "GeneralizedPareto, loc": (lambda x: dist.GeneralizedPareto(x, T(1.0), T(0.3)), T(1.5)),
        "GeneralizedPareto, concentration": (lambda x: dist.GeneralizedPareto(T(0.0), T(1.0), x), T(1.5)),
    }


def slope(f: Callable[[Tensor], Tensor], x: float, graph: bool = False) -> tuple[Tensor, Tensor]:
    at = torch.tensor(x, requires_grad=True)
    return torch.autograd.grad(f(at), at, create_graph=graph)[0], at


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("x", POINTS)
def test_curvature_is_the_change_of_the_slope(name: str, x: float) -> None:  # oracle: differences, of fourth order
    make, value = CASES[name]

    def f(at: Tensor) -> Tensor:
        return exact(make(at)).log_prob(value).sum()

    first, at = slope(f, x, graph=True)
    second = torch.autograd.grad(first, at)[0]
    h = 1e-3
    g = [float(slope(f, x + s * h)[0]) for s in (2, 1, -1, -2)]
    assert float(second) == pytest.approx((-g[0] + 8 * g[1] - 8 * g[2] + g[3]) / (12 * h), rel=1e-6, abs=1e-7)
    heights = [float(f(torch.tensor(x + s * h))) for s in (2, 1, -1, -2)]
    difference = (-heights[0] + 8 * heights[1] - 8 * heights[2] + heights[3]) / (12 * h)
    assert float(first.detach()) == pytest.approx(difference, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_distribution(name: str) -> None:  # oracle: torch and Pyro
    make, value = CASES[name]
    fn = make(torch.tensor(0.1737))
    torch.testing.assert_close(exact(fn).log_prob(value), fn.log_prob(value), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["Binomial", "InverseGamma", "Weibull", "Censored"])
def test_no_absolute_value_has_a_second_derivative(name: str) -> None:  # torch would load its compiler for that, 1 s
    make, value = CASES[name]
    ahead, seen = [exact(make(torch.tensor(0.3, requires_grad=True))).log_prob(value).sum().grad_fn], set()
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [before for before, _ in node.next_functions]
    assert seen and not any(type(node).__name__ == "AbsBackward0" for node in seen)


@pytest.mark.parametrize("x", [-3e4, -700.0, -30.0, -2.0, 0.0, 0.3, 2.0, 30.0, 700.0, 3e4])
@pytest.mark.parametrize(("asymmetry", "softness"), [(1.0, 1.0), (2.0, 0.5), (0.3, 4.0)])
def test_soft_tails_have_two_derivatives_far_out(x: float, asymmetry: float, softness: float) -> None:  # oracle: mpmath
    def density(at: Any) -> Any:
        z, S = 1.0 - at, mpmath.mpf(softness)
        tails = [
            mpmath.exp((S**2 / 2 + c * s * z) / c**2) * mpmath.erfc((S**2 + c * s * z) / (c * S * mpmath.sqrt(2)))
            for c, s in ((mpmath.mpf(asymmetry), 1), (1 / mpmath.mpf(asymmetry), -1))
        ]
        return mpmath.log(sum(tails) / 2 / (mpmath.mpf(asymmetry) + 1 / mpmath.mpf(asymmetry)))

    def ours(at: Tensor) -> Tensor:
        fn = dist.SoftAsymmetricLaplace(at, T(1.0), T(asymmetry), T(softness))
        return cast(Tensor, exact(fn).log_prob(T(1.0)))

    first, at = slope(ours, x, graph=True)
    second = torch.autograd.grad(first, at)[0]
    with mpmath.workdps(80):
        expected = [mpmath.diff(density, mpmath.mpf(x), n, h=mpmath.mpf(10) ** -20) for n in (0, 1, 2)]
    for found, number in zip((ours(torch.tensor(x)), first.detach(), second), expected, strict=True):
        assert float(found) == pytest.approx(float(number), rel=1e-8, abs=1e-9)


SMOOTH = {  # Gaussians and what is made of them: a quadratic, or sums of exponentials of quadratics
    "AVFMultivariateNormal",
    "GaussianScaleMixture",
    "GroupedNormalNormal",
    "LogisticNormal",
    "LogNormalNegativeBinomial",
    "LowRankMultivariateNormal",
    "MixtureOfDiagNormals",
    "MixtureOfDiagNormalsSharedCovariance",
    "MultivariateNormal",
    "NanMaskedMultivariateNormal",
    "NanMaskedNormal",
    "Normal",
    "OMTMultivariateNormal",
}
CORNERS = {"Laplace", "AsymmetricLaplace"}  # by nature: refused by the name of the site
NO_DENSITY = {"Delta", "Unit", "Stable", "StableWithLogProb"}
OTHERS = {  # of data that are trees and matchings, and those that are others' by other names
    "AffineBeta",
    "CoalescentTimes",
    "CoalescentTimesWithRate",
    "OneOneMatching",
    "OneTwoMatching",
    "SpanningTree",
    "OneHotCategorical",
    "OneHotCategoricalStraightThrough",
    "RelaxedBernoulliStraightThrough",
    "RelaxedOneHotCategoricalStraightThrough",
    "ZeroInflatedDistribution",
}


def test_every_distribution_with_a_real_parameter_has_a_case_or_a_reason() -> None:
    real = (torch.distributions.constraints.real, torch.distributions.constraints.real_vector)
    found = set()
    for module in (torch.distributions, dist):
        for name, kind in vars(module).items():
            limits = getattr(kind, "arg_constraints", None)
            if isinstance(kind, type) and isinstance(limits, dict):
                if any(c in real or getattr(c, "base_constraint", None) in real for c in limits.values()):
                    found.add(name)
    tried = {name.split(",")[0].split(" by ")[0] for name in CASES}
    assert found - tried - SMOOTH - CORNERS - NO_DENSITY - OTHERS == set()


def test_binomial_at_even_odds() -> None:  # oracle: -n p (1 - p), and mpmath
    _, at = slope(lambda x: x.square(), 0.0)
    first = torch.autograd.grad(exact(dist.Binomial(10, logits=at)).log_prob(T(4.0)), at, create_graph=True)[0]
    assert float(torch.autograd.grad(first, at)[0]) == -2.5


@pytest.mark.skipif(before("2.8"), reason="torch has no GeneralizedPareto")
def test_concentration_of_zero() -> None:  # oracle: mpmath's derivatives of the limit
    def density(c: Any) -> Any:
        z = mpmath.mpf("1.5")
        return -(1 + 1 / c) * mpmath.log(1 + c * z)

    first, at = slope(lambda c: exact(dist.GeneralizedPareto(T(0.0), T(1.0), c)).log_prob(T(1.5)), 0.0, graph=True)
    with mpmath.workdps(60):
        expected = [mpmath.diff(density, mpmath.mpf("1e-20"), n) for n in (1, 2)]
    assert float(first.detach()) == pytest.approx(float(expected[0]), rel=1e-9)
    assert float(torch.autograd.grad(first, at)[0]) == pytest.approx(float(expected[1]), rel=1e-9)


def test_what_needs_no_mending_is_itself() -> None:
    fn = dist.Normal(0.0, 1.0).expand([3]).to_event(1)
    assert exact(fn) is fn
