"""Links: there and back, and what they say about parameters that were made otherwise."""

import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence.numerics.quadrature.rules import nodes_and_weights, quasi_normal
from pyro_evidence.program import predictors
from pyro_evidence.program.predictors import Link

ELEMENTWISE = [
    predictors.IDENTITY,
    predictors.LOG,
    predictors.SQUARE_ROOT,
    predictors.INVERSE_SOFTPLUS,
    predictors.LOGIT,
    predictors.PROBIT,
    predictors.COMPLEMENTARY_LOG_LOG,
]
BASELINE = [predictors.BASELINE_LOGITS, predictors.BASELINE_SOFTMAX]


def name(link: Link) -> str:
    return link.name


@pytest.mark.parametrize("link", ELEMENTWISE, ids=name)
def test_there_and_back(link: Link) -> None:
    eta = torch.linspace(0.1, 3.0, 30) if link is predictors.SQUARE_ROOT else torch.linspace(-3.0, 3.0, 31)
    torch.testing.assert_close(link.inverse(link.forward(eta)), eta, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("link", BASELINE, ids=name)
def test_there_and_back_with_a_reference_class(link: Link) -> None:
    eta = torch.randn(5, 2)
    assert link.forward(eta).shape == (5, 3)
    torch.testing.assert_close(link.inverse(link.forward(eta)), eta, rtol=1e-10, atol=1e-10)


def test_formulas() -> None:
    eta = torch.tensor([-1.3, 0.4])
    expected = {
        "log": eta.exp(),
        "square root": eta**2,
        "inverse softplus": (1.0 + eta.exp()).log(),
        "logit": 1.0 / (1.0 + (-eta).exp()),
        "probit": torch.distributions.Normal(0.0, 1.0).cdf(eta),
        "complementary log-log": 1.0 - (-eta.exp()).exp(),
    }
    for link in ELEMENTWISE[1:]:
        torch.testing.assert_close(link.forward(eta), expected[link.name], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(predictors.BASELINE_SOFTMAX.forward(eta), torch.tensor([0.0, -1.3, 0.4]).softmax(-1))


FAR = torch.tensor([-1000.0, -40.0, -21.0, -3.0, -0.1, 0.1, 3.0, 21.0, 40.0, 1000.0])


def explains(link: Link, parameter: Tensor, eta: Tensor) -> Tensor:
    return link.explains(parameter, eta, 1e-10 * (1.0 + eta.abs()))


@pytest.mark.parametrize("link", ELEMENTWISE, ids=name)
def test_a_link_explains_its_own_parameter_at_any_distance(link: Link) -> None:
    assert bool(explains(link, link.forward(FAR), FAR).all())
    assert bool(explains(link, link.forward(FAR * (1.0 + 1e-12)), FAR).all())


@pytest.mark.parametrize("link", ELEMENTWISE, ids=name)
def test_a_link_does_not_explain_another_predictor(link: Link) -> None:
    moderate = FAR[3:7]
    assert not bool(explains(link, link.forward(moderate + 1e-7), moderate).any())


@pytest.mark.parametrize("link", [predictors.LOGIT, predictors.LOG, predictors.IDENTITY], ids=name)
def test_a_clamp_is_seen_where_it_acts(link: Link) -> None:
    """Even where a probability is 1 but for 2e-9."""
    parameter = link.forward(FAR.clamp(-20.0, 20.0))
    assert int((~explains(link, parameter, FAR)).sum()) == 6
    assert bool(explains(link, parameter, FAR)[3:7].all())


def test_another_link_is_told_apart() -> None:
    eta = torch.linspace(-2.0, 2.0, 9)[:8]
    for right in (predictors.LOGIT, predictors.PROBIT, predictors.COMPLEMENTARY_LOG_LOG):
        for wrong in (predictors.LOGIT, predictors.PROBIT, predictors.COMPLEMENTARY_LOG_LOG):
            assert bool(explains(wrong, right.forward(eta), eta).all()) is (right is wrong)


@pytest.mark.parametrize("link", BASELINE, ids=name)
def test_logits_of_classes_are_compared_as_probabilities_are(link: Link) -> None:
    logits = 30.0 * torch.randn(6, 3)
    eta = logits[:, 1:] - logits[:, :1]
    parameter = logits.log_softmax(-1) if link is predictors.BASELINE_LOGITS else logits.softmax(-1)
    assert bool(explains(link, parameter, eta).all())
    assert not bool(explains(link, parameter, eta + 1e-4).all(-1).any())
    assert not bool(explains(link, parameter, 0.1 * eta).all())


def test_what_is_nan_cannot_be_judged_and_infinities_are_equal() -> None:
    eta = torch.tensor([1.0, 800.0])
    assert bool(explains(predictors.LOG, torch.tensor([torch.nan, torch.inf]), eta).all())
    assert not bool(explains(predictors.LOG, torch.tensor([torch.inf, 1e300]), eta).any())


def test_single_precision_has_its_own_rounding() -> None:
    eta = FAR.float()
    for link in (predictors.LOGIT, predictors.LOG, predictors.IDENTITY):
        noisy = link.forward(eta.double()).float()
        assert bool(link.explains(noisy, eta, 1e-4 * (1.0 + eta.abs())).all())


@pytest.mark.parametrize(
    ("constraint", "normalised", "first"),
    [
        (constraints.real, False, predictors.IDENTITY),
        (constraints.real_vector, False, predictors.IDENTITY),
        (constraints.unit_interval, False, predictors.LOGIT),
        (constraints.positive, False, predictors.LOG),
        (constraints.nonnegative, False, predictors.LOG),
        (constraints.simplex, False, predictors.BASELINE_SOFTMAX),
        (constraints.real_vector, True, predictors.BASELINE_LOGITS),
    ],
)
def test_candidates_follow_the_constraint(constraint, normalised, first) -> None:
    found = predictors.candidate_links(constraint, normalised)
    assert found[0] is first
    assert predictors.IDENTITY in found or first in BASELINE


def test_an_averaged_softmax_is_the_integral() -> None:  # oracle: a product of Gauss-Hermite rules
    mean = torch.tensor([[0.3, -1.2], [2.0, 0.5]])
    root = torch.tensor([[[1.0, 0.0], [0.6, 0.8]], [[2.0, 0.0], [-1.0, 0.5]]])
    nodes, weights = nodes_and_weights(60, mean)
    grid, volume = torch.cartesian_prod(nodes, nodes), torch.cartesian_prod(weights, weights).prod(-1)
    exact = volume @ predictors.BASELINE_SOFTMAX.forward(mean.unsqueeze(1) + grid @ root.mT)
    found = predictors.softmax_average(mean, root @ root.mT, quasi_normal(4096, 2))
    torch.testing.assert_close(found, exact, rtol=0.0, atol=1e-3)
    single = predictors.softmax_average(mean[:1], (root @ root.mT)[:1], quasi_normal(4096, 2))
    torch.testing.assert_close(single, found[:1], rtol=1e-12, atol=1e-12)
