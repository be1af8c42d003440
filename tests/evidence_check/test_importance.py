"""Importance weights: the evidence, its error and the tail, against closed forms and ArviZ."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Gamma, MultivariateNormal, Normal

from pyro_evidence import LaplaceEvidence, Start
from pyro_evidence.numerics import importance
from tests.models_for_tests.posterior_models import (
    assert_approx,
    assert_exact,
    fitted_linear,
    fitted_logistic,
    funnel,
    linear_log_evidence,
    regression_data,
)


def ratios(num: int, target: Normal, proposal: Normal) -> Tensor:
    torch.manual_seed(0)
    x = proposal.sample((num,))
    return target.log_prob(x) - proposal.log_prob(x)


def pareto_ratios(k: float, num: int = 20_000) -> Tensor:
    """Log ratios whose tail is Pareto with shape ``k``: a ratio is ``U^-k``."""
    torch.manual_seed(0)
    return -k * torch.rand(num).log()


def test_log_mean_of_three_weights_by_hand() -> None:
    weights = torch.tensor([1.0, 2.0, 6.0])
    assert_exact(importance.log_mean(weights.log()), torch.tensor(3.0).log())


def test_log_mean_bears_weights_beyond_the_floats() -> None:
    log_weights = torch.tensor([1.0, 2.0, 6.0]).log() - 5000.0
    assert_exact(importance.log_mean(log_weights), torch.tensor(3.0).log() - 5000.0)


def test_standard_error_of_three_weights_by_hand() -> None:
    # mean 3, variance (4 + 1 + 9) / 2 = 7, three draws
    expected = torch.tensor(math.sqrt(7.0 / 3.0) / 3.0)
    assert_exact(importance.standard_error(torch.tensor([1.0, 2.0, 6.0]).log() - 900.0), expected)


def test_standard_error_is_that_of_repeated_runs() -> None:
    torch.manual_seed(0)
    runs = (0.5 * torch.randn(4000, 250)).unbind(0)
    spread = torch.stack([importance.log_mean(run) for run in runs]).std()
    typical = torch.stack([importance.standard_error(run) for run in runs]).mean()
    assert abs(float(spread / typical) - 1.0) < 4.0 / math.sqrt(2.0 * 4000)


def test_effective_sample_size_by_hand() -> None:
    size = importance.effective_sample_size(torch.tensor([1.0, 2.0, 6.0]).log() + 800.0)
    assert_exact(size, torch.tensor(81.0 / 41.0))


def k_hat(log_weights: Tensor) -> float:
    return importance.checked(log_weights).pareto_k


@pytest.mark.parametrize(("num", "size"), [(25, 5), (225, 45), (400, 60), (10_000, 300), (1000, 95)])
def test_tail_has_the_published_size(num, size) -> None:  # min(S / 5, 3 sqrt S), rounded up
    assert importance.tail_size(num) == size


@pytest.mark.parametrize("k", [0.2, 0.5, 0.7, 1.0, 1.5])
def test_pareto_k_of_a_pareto_tail(k) -> None:  # oracle: the shape that it was drawn with
    log_weights = pareto_ratios(k)
    size = importance.tail_size(len(log_weights))
    assert abs(k_hat(log_weights) - k) < 4.0 * (1.0 + k) / math.sqrt(size)  # asymptotic s.e. of k


@pytest.mark.parametrize(("scale", "low", "high"), [(1.5, -10.0, 0.2), (0.5, 0.7, 10.0)])
def test_pareto_k_tells_a_wide_proposal_from_a_narrow_one(scale, low, high) -> None:
    log_weights = ratios(20_000, Normal(0.0, 1.0), Normal(0.0, scale))
    assert low < k_hat(log_weights) < high


def log_ratio_sets() -> list[Tensor]:
    torch.manual_seed(0)
    return [
        pareto_ratios(0.6, 1000),
        pareto_ratios(1.3, 4001) - 4000.0,
        ratios(3000, Normal(0.0, 1.0), Normal(0.0, 0.8)),
        Gamma(2.0, 1.0).sample((999,)),
        torch.cat([torch.randn(500), torch.full((500,), -math.inf)]),
    ]


@pytest.mark.parametrize("case", range(5))
def test_pareto_k_equals_that_of_arviz(case) -> None:  # oracle: an independent program
    arviz = pytest.importorskip("arviz")
    log_weights = log_ratio_sets()[case]
    expected = torch.as_tensor(float(arviz.psislw(log_weights.numpy())[1]))
    assert_approx(torch.tensor(k_hat(log_weights)), expected)


def test_pareto_k_of_ratios_without_a_tail_is_minus_infinity() -> None:
    torch.manual_seed(0)
    assert k_hat(torch.full((1000,), -3.0)) == -math.inf
    assert k_hat(-3.0 + 1e-3 * torch.rand(1000)) == -math.inf
    assert k_hat(-3.0 + 1.0 * torch.rand(1000)) > -math.inf


def test_pareto_k_of_too_few_ratios_is_infinity() -> None:
    assert k_hat(torch.arange(20.0)) == math.inf


def test_evidence_of_a_linear_model_is_exact_by_importance_too() -> None:  # oracle: closed form
    found = fitted_linear().diagnostics()
    expected = linear_log_evidence(*regression_data())
    assert_exact(torch.tensor(found["log_evidence_importance"]), expected)
    assert found["log_evidence_importance_se"] < 1e-9
    assert found["pareto_k"] < 0.0
    assert found["effective_sample_size"] == pytest.approx(4000)


def test_ratios_are_the_joint_density_over_the_gaussian() -> None:  # oracle: a multivariate normal from torch
    posterior = fitted_logistic()
    state = posterior.state
    w = posterior.get_samples(7, seed=3)["w"] - (posterior._about_mean.u - state.u)  # weighed are draws at the mode
    precision = state.precision.tril[0] @ state.precision.tril[0].mT
    log_joint = torch.stack([state.problem.joint.log_joint(row, state.theta) for row in w])
    expected = log_joint - MultivariateNormal(state.u, precision_matrix=precision).log_prob(w)
    assert_exact(posterior.log_weights(7, seed=3), expected)


def test_ratios_do_not_depend_on_the_batches(monkeypatch) -> None:  # law
    posterior = fitted_logistic()
    whole = posterior.log_weights(1000, seed=1)
    monkeypatch.setattr(type(posterior), "_rows", 1000)
    assert_exact(posterior.log_weights(1000, seed=1), whole)


def test_importance_corrects_laplace_towards_the_true_evidence() -> None:  # oracle: quadrature
    data = torch.tensor([0.8])
    alone = Start(tour=0)
    found = LaplaceEvidence(funnel, marginalise=(), start=alone).run(data).diagnostics(num_samples=100_000)
    # given the scale s, x ~ N(0, 1 + s^2); s = tan(pi c / 2) with c uniform
    cell = (torch.arange(200_000) + 0.5) / 200_000
    scale = torch.tan(0.5 * math.pi * cell)
    exact = Normal(0.0, (1.0 + scale**2).sqrt()).log_prob(data).exp().mean().log()
    before = abs(found["log_evidence"] - float(exact))
    after = abs(found["log_evidence_importance"] - float(exact))
    assert after < 0.1 * before
    assert after < 4.0 * found["log_evidence_importance_se"]


def test_a_weight_of_zero_beside_others_is_not_constant() -> None:
    assert importance.is_constant(torch.full((3,), -700.0))
    assert not importance.is_constant(torch.tensor([0.0, 1.0, -math.inf]))
