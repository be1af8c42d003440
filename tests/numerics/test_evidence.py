"""The numbers around Laplace's log evidence, against integrals and optima on paper."""

import math
from functools import partial

import torch

from pyro_evidence.numerics.evidence import log_evidence, reestimated_log_precision, well_determined
from tests.oracles.linear_predictor import gaussian_log_evidence

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    generator = torch.Generator().manual_seed(0)
    Phi = torch.randn(20, 3, generator=generator)
    t = Phi @ torch.tensor([1.0, -0.4, 0.2]) + 0.5 * torch.randn(20, generator=generator)
    return Phi, t, torch.tensor([0.5, 1.0, 2.0]), 3.0


def posterior(alpha: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Precision, mean and log joint density at it, of Bayesian linear regression."""
    Phi, t, _, _ = problem()
    A = beta * Phi.mT @ Phi + alpha.diag()
    mean = torch.linalg.solve(A, beta * Phi.mT @ t)
    prior = 0.5 * (alpha / math.tau).log().sum() - 0.5 * (alpha * mean.square()).sum()
    residual = t - Phi @ mean
    return A, mean, prior + 0.5 * len(t) * math.log(beta / math.tau) - 0.5 * beta * residual.square().sum()


def test_log_evidence_of_a_gaussian_is_exact() -> None:
    Phi, t, alpha, beta = problem()
    A, _, log_joint = posterior(alpha, beta)
    actual = log_evidence(log_joint, torch.logdet(A), 3)
    expected = gaussian_log_evidence(Phi.numpy(), t.numpy(), alpha.numpy(), beta)
    assert_exact(float(actual), expected)


def test_log_evidence_takes_rows() -> None:
    value, log_det = torch.tensor([-3.0, -4.0]), torch.tensor([1.0, 2.0])
    assert_exact(log_evidence(value, log_det, 2), value + math.log(2 * math.pi) - 0.5 * log_det)


def test_well_determined_counts_directions() -> None:
    """Equal prior precisions: gamma is the sum of l / (l + alpha) over eigenvalues l of beta Phi' Phi."""
    Phi, _, _, beta = problem()
    alpha = torch.full((3,), 0.7)
    A, _, _ = posterior(alpha, beta)
    values = torch.linalg.eigvalsh(beta * Phi.mT @ Phi)
    actual = well_determined(alpha, torch.linalg.inv(A).diagonal())
    assert_exact(actual.sum(), (values / (values + 0.7)).sum())


def test_a_round_is_mackays_for_gaussian_likelihoods() -> None:
    _, _, alpha, beta = problem()
    log_alpha = alpha.log().requires_grad_()
    A, mean, log_joint = posterior(log_alpha.exp(), beta)
    gradient = torch.autograd.grad(log_evidence(log_joint, torch.logdet(A), 3), log_alpha)[0]
    gamma = well_determined(alpha, torch.linalg.inv(A.detach()).diagonal())
    move = reestimated_log_precision(gradient, alpha * mean.detach().square())
    assert_exact((log_alpha.detach() + move).exp(), gamma / mean.detach().square())


def test_a_round_stays_where_the_gradient_is_zero_and_refuses_to_leave_the_positive_numbers() -> None:
    quadratic = torch.tensor([1.0, 2.0])
    assert_exact(reestimated_log_precision(torch.zeros(2), quadratic), torch.zeros(2))
    assert not bool(torch.isfinite(reestimated_log_precision(torch.tensor([-0.5, -2.0]), quadratic)).any())
