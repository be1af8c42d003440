"""Laplace on B against the dense textbook formulas, quadrature, differences and scikit-learn."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process import kernels as sk
from torch import Tensor
from torch.autograd.functional import hessian, jacobian

from pyro_evidence.models.kernels import RBF
from pyro_evidence.precision.gaussian_process import (
    Cotangents,
    LatentPredictor,
    PredictorMode,
    cotangents,
    factorise_predictor,
    likelihood_at,
    predictor_mode,
)

Likelihood = Callable[[Tensor], Tensor]


def data(num_data: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(num_data, 2, generator=generator)
    return X, (X.sum(-1) + 0.8 * torch.randn(num_data, generator=generator) > 0).double()


def bernoulli(t: Tensor) -> Likelihood:
    return lambda eta: torch.distributions.Bernoulli(logits=eta[..., 0], validate_args=False).log_prob(t).sum(-1)


def poisson(t: Tensor) -> Likelihood:
    return lambda eta: torch.distributions.Poisson(eta[..., 0].exp(), validate_args=False).log_prob(3.0 * t).sum(-1)


def normal(t: Tensor) -> Likelihood:
    return lambda eta: torch.distributions.Normal(eta[..., 0], 0.3, validate_args=False).log_prob(t).sum(-1)


def student(t: Tensor) -> Likelihood:
    return lambda eta: torch.distributions.StudentT(3.0, eta[..., 0], 0.4, validate_args=False).log_prob(t).sum(-1)


def softmax(t: Tensor) -> Likelihood:
    label = (t + (torch.arange(len(t)) % 3 == 0)).long()
    return lambda eta: (eta.log_softmax(-1) * torch.nn.functional.one_hot(label, 3)).sum((-1, -2))


LIKELIHOODS = {
    "bernoulli": (bernoulli, 1),
    "poisson": (poisson, 1),
    "normal": (normal, 1),
    "student": (student, 1),
    "softmax": (softmax, 3),
}
each_likelihood = pytest.mark.parametrize("name", LIKELIHOODS)


def latent(name: str, K: Tensor | None = None, mean: Tensor | None = None) -> LatentPredictor:
    X, t = data()
    make, C = LIKELIHOODS[name]
    if K is None:
        K = torch.kron(RBF(1.3, 2.0)(X), torch.eye(C)) + 1e-3 * torch.eye(len(t) * C)
    mean = torch.full((len(t), C), 0.2) if mean is None else mean
    return LatentPredictor(mean, K, make(t), lambda: torch.linalg.cholesky(K))


def gradient(at: LatentPredictor, mode: PredictorMode) -> Cotangents:
    return cotangents(at.covariance, mode, likelihood_at(at, mode.eta))


def solved(at: LatentPredictor) -> PredictorMode:
    return predictor_mode(at, at.mean, 1e-15)


def naive(at: LatentPredictor) -> tuple[Tensor, Tensor, Tensor]:
    """Mode, posterior precision and log evidence by plain dense Newton on ``eta``, with K inverted."""
    inverse, shape = torch.linalg.inv(at.covariance), at.mean.shape

    def log_joint(eta: Tensor) -> Tensor:
        away = eta - at.mean.reshape(-1)
        return at.log_likelihood(eta.reshape(1, *shape))[0] - 0.5 * away @ inverse @ away

    eta = at.mean.reshape(-1).clone()
    for _ in range(200):
        g, H = jacobian(log_joint, eta), -hessian(log_joint, eta)
        step = torch.linalg.solve(H, g) if bool((torch.linalg.eigvalsh(H) > 0).all()) else 1e-3 * g
        while float(log_joint(eta + step)) < float(log_joint(eta)) - 1e-12:
            step = 0.5 * step
        eta = eta + step
    H = -hessian(log_joint, eta)
    log_z = log_joint(eta) - 0.5 * (torch.logdet(H) + torch.logdet(at.covariance))
    return eta, H, log_z


@each_likelihood
def test_mode_covariance_and_evidence_are_the_dense_ones(name: str) -> None:
    at = latent(name)
    mode, (eta, A, log_z) = solved(at), naive(at)
    assert mode.converged and mode.definite
    torch.testing.assert_close(mode.eta.reshape(-1), eta, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(mode.log_evidence(at), log_z, rtol=1e-9, atol=1e-9)
    covariance = at.covariance - mode.factor.explained(at.covariance)
    torch.testing.assert_close(covariance, torch.linalg.inv(A), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(
        mode.factor.explained_diagonal(at.covariance), mode.factor.explained(at.covariance).diagonal()
    )
    torch.testing.assert_close(mode.factor.apply(at.covariance), mode.factor.matrix() @ at.covariance)


def test_posterior_variances_are_those_of_the_dense_matrix() -> None:  # from data that say nothing to ones that say all
    K = latent("bernoulli").covariance
    W = torch.logspace(-12.0, 8.0, len(K)).index_fill(0, torch.tensor([3]), 0.0)
    factor, exact = factorise_predictor(latent("bernoulli", K), W[:, None, None])
    R = torch.linalg.solve(torch.eye(len(K)) + W[:, None] * K, torch.diag(W))
    assert exact
    torch.testing.assert_close(factor.variance(K), (K - K @ R @ K).diagonal(), rtol=1e-6, atol=1e-14)


@each_likelihood
def test_gradient_is_that_of_differences(name: str) -> None:
    base = latent(name)
    base = latent(name, base.covariance + 0.2 * torch.eye(len(base.covariance)))
    generator = torch.Generator().manual_seed(1)
    root = torch.randn(base.covariance.shape, generator=generator)
    dK, dm = 0.1 * root @ root.T, torch.randn(base.mean.shape, generator=generator)

    def at(step: float) -> LatentPredictor:
        return latent(name, base.covariance + step * dK, base.mean + step * dm)

    def height(step: float) -> Tensor:
        return solved(at(step)).log_evidence(at(step))

    found = gradient(base, solved(base))
    expected = (8.0 * (height(1e-3) - height(-1e-3)) - (height(2e-3) - height(-2e-3))) / 12e-3
    actual = (found.covariance * dK).sum() + found.mean @ dm.reshape(-1)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.covariance, found.covariance.mT)


@pytest.mark.parametrize("family", ["normal", "student", "negative binomial"])
def test_gradient_in_the_likelihoods_own_number(family: str) -> None:
    X, t = data()
    K = RBF(1.3, 2.0)(X) + 1e-3 * torch.eye(len(X))

    def at(log_scale: Tensor) -> LatentPredictor:
        def log_likelihood(eta: Tensor) -> Tensor:
            eta, scale = eta[..., 0], log_scale.exp()
            d = torch.distributions
            if family == "normal":
                return d.Normal(eta, scale, validate_args=False).log_prob(t).sum(-1)
            if family == "student":
                return d.StudentT(4.0, eta, scale, validate_args=False).log_prob(t).sum(-1)
            return d.NegativeBinomial(scale, logits=eta, validate_args=False).log_prob(3.0 * t).sum(-1)

        return LatentPredictor(torch.zeros(len(t), 1), K, log_likelihood, lambda: torch.linalg.cholesky(K))

    def height(x: float) -> float:
        here = at(torch.tensor(x))
        return float(solved(here).log_evidence(here))

    theta = torch.tensor(-0.3, requires_grad=True)
    here = at(theta)
    mode = solved(at(theta.detach()))
    seen = likelihood_at(here, mode.eta)
    slope = torch.autograd.grad(cotangents(K, mode, seen).likelihood(seen), theta)[0]
    h = 1e-3
    expected = (8 * (height(-0.3 + h) - height(-0.3 - h)) - (height(-0.3 + 2 * h) - height(-0.3 - 2 * h))) / (12 * h)
    assert float(slope) == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_evidence_is_exact_for_gaussian_noise() -> None:
    at = latent("normal")
    t = data()[1]
    exact = torch.distributions.MultivariateNormal(at.mean[:, 0], at.covariance + 0.09 * torch.eye(len(t)))
    torch.testing.assert_close(solved(at).log_evidence(at), exact.log_prob(t), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "error"), [("bernoulli", 0.02), ("poisson", 0.02)])
def test_evidence_is_near_the_integral(name: str, error: float) -> None:  # oracle: quadrature, N = 1
    make, _ = LIKELIHOODS[name]
    at = LatentPredictor(
        torch.zeros(1, 1), torch.full((1, 1), 0.7), make(torch.ones(1)), lambda: torch.full((1, 1), 0.7**0.5)
    )
    x = torch.linspace(-8.0, 8.0, 4001)
    density = torch.distributions.Normal(0.0, math.sqrt(0.7)).log_prob(x) + at.log_likelihood(x[:, None, None])
    integral = density.logsumexp(0) + math.log(16.0 / 4000)
    assert abs(float(solved(at).log_evidence(at) - integral)) < error


@each_likelihood
def test_a_newton_step_evaluates_the_likelihood_once(name: str) -> None:
    at, steps, calls = latent(name), [], []

    def counted(eta: Tensor) -> Tensor:
        calls.append(eta)
        return at.log_likelihood(eta)

    predictor_mode(LatentPredictor(at.mean, at.covariance, counted, at.root), at.mean, 1e-12, steps.append)
    assert len(steps) >= 1
    assert len(calls) <= len(steps) + 1 + 3 * (name == "student")  # and once where it begins; Student's t halves steps


def test_a_singular_covariance_is_no_trouble() -> None:
    X, t = data()
    X = torch.cat([X, X])
    K = RBF(1.0, 1.0)(X)
    at = LatentPredictor(torch.zeros(len(X), 1), K, bernoulli(torch.cat([t, t])), lambda: K)
    mode = solved(at)
    rival = GaussianProcessClassifier(sk.RBF(1.0), optimizer=None).fit(X.numpy(), torch.cat([t, t]).numpy())
    assert mode.converged
    assert float(mode.log_evidence(at)) == pytest.approx(rival.log_marginal_likelihood_value_, abs=1e-8)


def test_a_start_where_the_likelihood_overflows_is_no_trouble() -> None:
    at = latent("poisson")
    far = predictor_mode(at, torch.full_like(at.mean, 800.0), 2e-14)  # exp(800) overflows
    torch.testing.assert_close(far.eta, solved(at).eta)


def test_log_evidence_and_gradient_are_scikit_learns() -> None:
    X, t = data(60)
    rng = np.random.default_rng(0)
    rival = GaussianProcessClassifier(1.0 * sk.RBF([1.0, 1.0]), optimizer=None).fit(X.numpy(), t.numpy())
    rival.base_estimator_.max_iter_predict, rival.base_estimator_.warm_start = 200, True
    for _ in range(20):
        theta = torch.from_numpy(rng.normal(0.0, 1.0, 3)).requires_grad_()
        for _ in range(4):  # scikit-learn stops Newton at 1e-10 nats; from its own mode it goes on
            expected = rival.log_marginal_likelihood(theta.detach().numpy(), eval_gradient=True)
        K = RBF(theta[1:].exp(), theta[0].exp())(X)
        at = LatentPredictor(torch.zeros(60, 1), K.detach(), bernoulli(t), lambda K=K: K)
        mode = solved(at)
        slope = torch.autograd.grad((gradient(at, mode).covariance * K).sum(), theta)[0]
        assert float(mode.log_evidence(at)) == pytest.approx(expected[0], abs=1e-7)
        torch.testing.assert_close(slope, torch.from_numpy(expected[1]), rtol=1e-6, atol=1e-6)
