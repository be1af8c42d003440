"""Relevance vectors, fast and variational."""

import math
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence.datasets import csv, ripley_test, ripley_train
from pyro_evidence.errors import BadInput, NotConverged, UnsupportedModel
from pyro_evidence.fitting.iterate import Stop
from pyro_evidence.infer.rvm import RVM, VRVM
from pyro_evidence.relevance import fast_marginal, variational
from pyro_evidence.relevance.posteriors import RVMPosterior
from tests.models_for_tests import weight_models as models
from tests.models_for_tests.weight_models import kernel, labels


def problem(N: int = 100, M: int = 8) -> tuple[Tensor, Tensor]:
    Phi = torch.randn(N, M, generator=torch.Generator().manual_seed(1))
    return Phi, torch.tensor([2.0, -1.0, 0.5] + [0.0] * (M - 3))


def noisy() -> tuple[Tensor, Tensor]:
    Phi, w = problem()
    return Phi, Phi @ w + 0.5 * torch.randn(100, generator=torch.Generator().manual_seed(2))


def exact(Phi: Tensor, t: Tensor, alpha: Tensor) -> Tensor:
    """Oracle: the Gaussian evidence with the weights integrated out on paper."""
    covariance = 0.25 * torch.eye(len(t)) + Phi @ (1.0 / alpha).diag() @ Phi.T
    return dist.MultivariateNormal(torch.zeros(len(t)), covariance).log_prob(t)


def test_ripleys_problem_needs_four_vectors(data_dir: Path) -> None:
    train, test = ripley_train(), ripley_test()
    assert train.t is not None and test.t is not None
    posterior = RVM(models.logistic).run(kernel(train.X, train.X, 0.25), train.t)
    assert posterior.num_active == 4 and len(posterior.relevant) == 4
    wrong = (posterior.predictor(kernel(test.X, train.X, 0.25))[0] > 0) != test.t.bool()
    assert float(wrong.double().mean()) == pytest.approx(0.096, abs=0.003)
    assert posterior.status == "converged"


def test_gaussian_evidence_is_exact_and_at_its_maximum() -> None:
    Phi, t = noisy()
    posterior = RVM(models.gaussian).run(Phi, t)
    at = exact(Phi, t, posterior.alpha)
    torch.testing.assert_close(posterior.log_evidence, at, rtol=1e-10, atol=0)
    assert posterior.log_evidences[-1] == pytest.approx(float(at), rel=1e-10)
    for m in range(8):
        for factor in (0.5, 2.0):
            alpha = posterior.alpha.clone()
            alpha[m] = alpha[m] * factor if bool(posterior.active[m]) else 1.0 * factor
            assert float(exact(Phi, t, alpha)) <= float(at) + 1e-6


def test_every_gain_is_the_difference_of_two_evidences() -> None:
    Phi, t = noisy()
    target = RVM(models.gaussian).run(Phi, t).of.target
    state = fast_marginal.empty(target)  # type: ignore[arg-type]
    for _ in range(6):
        best, gain = state.changes
        new = fast_marginal.changed(state, fast_marginal.first_of_best(gain))
        assert new.objective - state.objective == pytest.approx(float(gain.max()), abs=1e-9)
        for m in range(8):
            alpha = state.alpha.clone()
            alpha[m] = 1.0 / best[m]
            if bool(torch.isfinite(alpha).any()):
                assert float(exact(Phi, t, alpha)) - state.objective == pytest.approx(float(gain[m]), abs=1e-9)
        state = new


@pytest.mark.parametrize("model", [models.gaussian, models.logistic, models.poisson])
def test_the_evidence_never_falls(model: Any) -> None:
    Phi, t = noisy()
    t = t if model is models.gaussian else (t > 0).double()
    rises = torch.tensor(RVM(model).run(Phi, t).log_evidences).diff()
    assert float(rises[:-1].min()) > 0.0 and float(rises[-1]) >= 0.0


@pytest.mark.parametrize("sigma", [0.7, 1.0])
def test_a_promise_that_laplace_does_not_keep_is_no_circle(sigma: float, data_dir: Path) -> None:
    data = csv("bupa")
    X = (data.X - data.X.mean(0)) / data.X.std(0)
    assert data.t is not None
    rows = torch.randperm(len(X), generator=torch.Generator().manual_seed(100))[:172]
    t = (data.t == data.t.max()).double()[rows]
    Phi = torch.cat([(-torch.cdist(X[rows], X[rows]) / (2.0 * sigma**2)).exp(), torch.ones(172, 1)], 1)
    posterior = RVM(models.logistic, stop=Stop(num_steps=400)).run(Phi, t)
    assert posterior.status == "converged"
    assert float(torch.tensor(posterior.log_evidences).diff().min()) >= 0.0


def test_no_single_change_raises_the_evidence_of_labels() -> None:
    Phi, w = problem()
    posterior = RVM(models.logistic).run(Phi, labels(Phi, w))
    target = posterior.of.target
    for m in range(8):
        for factor in (0.5, 0.9, 1.1, 2.0):
            alpha = posterior.alpha.clone()
            alpha[m] = alpha[m] * factor if bool(posterior.active[m]) else 1.0 * factor
            state = fast_marginal.FastState(target, alpha, torch.zeros(8))  # type: ignore[arg-type]
            assert state.objective < float(posterior.log_evidence) + 0.01


def test_the_diagonal_of_the_precision_with_and_without_kept_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    Phi, t = noisy()
    part = RVM(models.gaussian).run(Phi, t).of.target.parts[0]  # type: ignore[attr-defined]
    B = torch.rand(100, 1, 1)
    expected = (Phi.T @ (B[:, 0] * Phi)).diagonal()
    torch.testing.assert_close(part.precision_diagonal(B), expected)
    monkeypatch.setattr("pyro_evidence.numerics.linear_predictor.HELD_NUMBERS", 0)
    torch.testing.assert_close(part.precision_diagonal(B), expected)


def test_formulas_and_derivatives_take_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    Phi, w = problem()
    t = labels(Phi, w)
    by_formulas = RVM(models.logistic).run(Phi, t)
    assert by_formulas.of.target.parts[0].closed  # type: ignore[attr-defined]
    monkeypatch.setattr("pyro_evidence.program.predictors.LikelihoodTerm.closed", lambda *_: None)
    by_derivatives = RVM(models.logistic).run(Phi, t)
    assert not by_derivatives.of.target.parts[0].closed  # type: ignore[attr-defined]
    expected = torch.tensor(by_derivatives.log_evidences)
    torch.testing.assert_close(torch.tensor(by_formulas.log_evidences), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(by_formulas.weights["w"], by_derivatives.weights["w"], rtol=1e-8, atol=1e-10)


def test_what_a_fit_leaves_can_be_differentiated() -> None:
    """Its steps are taken in inference mode, whose tensors cannot."""
    Phi, w = problem()
    engine = RVM(models.logistic)
    posterior = engine.run(Phi, labels(Phi, w))
    part = posterior.of.target.parts[0]  # type: ignore[attr-defined]
    made = [posterior.alpha, posterior.state.x, part.J, part.columns, part.precision_diagonal(torch.ones(100, 1, 1))]
    assert not any(x.is_inference() for x in (*made, part.closed.targets, posterior.log_evidence))
    y = torch.zeros(8).requires_grad_()
    (slope,) = torch.autograd.grad(part.log_likelihood(part.predictor(y))[0], y)
    torch.testing.assert_close(slope, Phi.T @ (labels(Phi, w) - 0.5))
    assert engine.step(Phi, labels(Phi, w)) > engine.step(Phi, labels(Phi, w))


def test_threads_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyro_evidence.numerics.linalg.LARGE", 0.0)  # every operation runs on the caller's threads
    X = torch.randn(150, 2)  # enough for two threads to share a product, and to add its terms in another order
    t = labels(X, torch.tensor([3.0, 0.0]))
    found, few = [], Stop(num_steps=12, progress=False, throw=False)  # each waits for the other thread
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            with pytest.warns(UserWarning, match="ran out of steps"):
                found.append(RVM(models.logistic, stop=few).run(kernel(X, X, 1.0), t))
        finally:
            torch.set_num_threads(1)
    assert torch.equal(found[0].relevant, found[1].relevant)
    torch.testing.assert_close(found[0].weights["w"], found[1].weights["w"], rtol=1e-6, atol=1e-8)


def test_softmax_is_one_model_of_all_classes() -> None:
    generator = torch.Generator().manual_seed(3)
    centres = torch.tensor([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]])
    t = torch.arange(90) % 3
    X = centres[t] + 0.7 * torch.randn(90, 2, generator=generator)
    posterior = RVM(models.softmax).run(kernel(X, X, 4.0), t)
    eta = kernel(X, X, 4.0) @ posterior.weights["w"].T
    assert float((eta.argmax(-1) == t).double().mean()) > 0.93
    assert posterior.num_active < 20


def test_says_why_it_stopped() -> None:
    Phi, w = problem()
    t = labels(Phi, w)
    with pytest.raises(NotConverged, match="ran out of steps") as caught:
        RVM(models.logistic, stop=Stop(num_steps=2)).run(Phi, t)
    assert isinstance(caught.value.posterior, RVMPosterior)
    with pytest.warns(UserWarning, match="RVM: ran out of steps"):
        quiet = RVM(models.logistic, stop=Stop(num_steps=2, throw=False)).run(Phi, t)
    assert quiet.status.startswith("ran out of steps")


def test_nothing_relevant_is_an_answer() -> None:
    Phi, _ = problem(N=40)
    t = torch.arange(40).fmod(2.0)
    half = torch.cat([Phi[:20].repeat_interleave(2, 0)])  # every row with both labels: no column explains anything
    posterior = RVM(models.logistic).run(half, t)
    assert posterior.num_active == 0
    assert float(posterior.log_evidence) == pytest.approx(-40.0 * math.log(2.0))


def test_step_by_step_is_run() -> None:
    Phi, t = noisy()
    engine = RVM(models.gaussian)
    losses = [engine.step(Phi, t) for _ in range(40)]
    assert losses[-1] == pytest.approx(-float(RVM(models.gaussian).run(Phi, t).log_evidence), abs=1e-5)


def test_saved_and_loaded(tmp_path: Path) -> None:
    Phi, t = noisy()
    for posterior in (RVM(models.gaussian).run(Phi, t), VRVM(models.gaussian).run(Phi, t)):
        posterior.save(tmp_path / "p")
        again = RVMPosterior.load(tmp_path / "p", models.gaussian, map_location="cpu")
        torch.testing.assert_close(again.mode["w"], posterior.mode["w"])
        torch.testing.assert_close(again.log_evidence, posterior.log_evidence)
        with pytest.raises(BadInput, match="expected a device such as 'cpu'"):
            RVMPosterior.load(tmp_path / "p", models.gaussian, map_location=lambda storage, place: storage)


# Healing


def sinc(N: int = 60) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.linspace(-8.0, 8.0, N)
    t = (x.sin() / x.where(x != 0, 1.0)) + 0.1 * torch.randn(N, generator=torch.Generator().manual_seed(0))
    return x, (-0.2 * (x[:, None] - x).square()).exp(), 5.0 * t


# Variational


@pytest.mark.parametrize("model", [models.gaussian, models.logistic])
def test_the_bound_never_falls_and_is_a_bound(model: Any) -> None:
    Phi, w = problem()
    t = noisy()[1] if model is models.gaussian else labels(Phi, w)
    posterior = VRVM(model).run(Phi, t)
    rises = torch.tensor(posterior.log_evidences).diff()
    assert float(rises.min()) > -1e-10
    assert float(posterior.log_evidence) < float(RVM(model).run(Phi, t).log_evidence)


def test_the_bound_is_the_evidence_lower_bound_of_its_own_posterior() -> None:
    """Oracle: a Monte Carlo ELBO of q(w) q(alpha) under the model written with a Gamma prior."""
    Phi, t = noisy()
    posterior = VRVM(models.gaussian).run(Phi, t)
    shape = torch.tensor(0.5 + 1e-6)
    q = dist.Gamma(shape, shape / posterior.alpha)
    alpha, w = q.sample((200_000,)), posterior.get_samples(200_000, seed=0)["w"]
    fit = posterior._fit
    log_q = dist.MultivariateNormal(
        posterior.mode["w"], precision_matrix=fit.precision_tril @ fit.precision_tril.T
    ).log_prob(w)
    log_p = dist.Normal(0.0, alpha.rsqrt()).log_prob(w) + dist.Gamma(1e-6, 1e-6).log_prob(alpha) - q.log_prob(alpha)
    log_likelihood = -0.5 * ((t - w @ Phi.T) / 0.5).square().sum(-1) - 100 * math.log(0.5 * math.sqrt(math.tau))
    ratios = log_likelihood - log_q + log_p.sum(-1)
    error = float(ratios.std()) / math.sqrt(200_000)
    assert abs(float(ratios.mean()) - float(posterior.log_evidence)) < 4.0 * error


def test_the_local_bound_touches_the_likelihood_where_eta_is_certain() -> None:
    Phi, w = problem()
    t = labels(Phi, w)
    _, local = variational.local_bound(VRVM(models.logistic).run(Phi, t).of.target)  # type: ignore[arg-type]
    eta = Phi @ torch.randn(8)
    exact_value = dist.Bernoulli(logits=eta).log_prob(t).sum()
    torch.testing.assert_close(local.expected(eta, eta.square()), exact_value, rtol=1e-12, atol=0)
    spread = dist.Bernoulli(logits=eta + 0.7 * torch.randn(20_000, 1)).log_prob(t).sum(-1).mean()
    assert float(local.expected(eta, eta.square() + 0.49)) < float(spread)


def test_the_weights_part_of_the_bound_from_torchs_divergence() -> None:
    tril, rate = torch.linalg.cholesky(torch.eye(3) + 0.2), torch.tensor([0.3, 2.0, 1e-3])
    q, prior = (dist.Gamma(torch.full((3,), 1e-6 + a), r) for a, r in ((0.5, rate), (0.0, torch.full((3,), 1e-6))))
    second = 2.0 * (rate - 1e-6)
    likelihood = 0.5 * ((torch.digamma(q.concentration) - rate.log()) - math.log(math.tau) - q.mean * second)
    entropy = dist.MultivariateNormal(torch.zeros(3), precision_matrix=tril @ tril.T).entropy()
    expected = (likelihood - torch.distributions.kl_divergence(q, prior)).sum() + entropy
    torch.testing.assert_close(variational._weights_bound(tril, rate), expected, rtol=1e-11, atol=0)


def test_variational_mean_is_near_the_sequential_one() -> None:
    Phi, t = noisy()
    assert (
        float((VRVM(models.gaussian).run(Phi, t).mode["w"] - RVM(models.gaussian).run(Phi, t).mode["w"]).abs().max())
        < 0.1
    )


# Bad input


@pytest.mark.parametrize("engine", [RVM, VRVM])
def test_models_without_a_linear_predictor_are_refused(engine: Any) -> None:
    X = torch.randn(50, 3)
    with pytest.raises(UnsupportedModel, match="a predictor is not linear"):
        engine(models.network).run(X, (X[:, 0] > 0).double())
    with pytest.raises(UnsupportedModel, match="there are b"):
        engine(models.with_offset, site="w").run(X, (X[:, 0] > 0).double())


@pytest.mark.filterwarnings("ignore:VRVM. ran out of steps")
def test_two_classes_are_a_logistic_likelihood() -> None:
    """By logits against the first class, by its probabilities, or by log odds."""
    X = torch.randn(40, 3)
    t = (X[:, 0] + torch.randn(40) > 0).long()

    def model(X: Tensor, t: Tensor, way: str) -> None:
        alpha = pyro.param("alpha", X.new_ones(3), constraint=dist.constraints.positive)
        eta = X @ pyro.sample("w", dist.Normal(X.new_zeros(3), alpha.rsqrt()).to_event(1))
        both = torch.stack([torch.zeros_like(eta), eta], -1)
        ways = {"logits": dist.Categorical(logits=both), "probs": dist.Categorical(both.softmax(-1))}
        with pyro.plate("rows", len(X)):
            pyro.sample("t", ways.get(way, dist.Bernoulli(logits=eta)), obs=t if way in ways else t.double())

    found = [VRVM(model, stop=Stop(throw=False)).run(X, t, way).log_evidence for way in ("odds", "logits", "probs")]
    torch.testing.assert_close(found[1:], [found[0]] * 2, rtol=1e-9, atol=1e-9)


def test_the_bound_refuses_other_likelihoods() -> None:
    Phi, _ = problem()
    with pytest.raises(UnsupportedModel, match="RVM takes softmax"):
        VRVM(models.softmax).run(Phi, torch.arange(100) % 3)
    with pytest.raises(UnsupportedModel, match="Bernoulli with a linear predictor in log odds"):
        VRVM(models.poisson).run(Phi, torch.arange(100).fmod(4.0))


@pytest.mark.parametrize("engine", [RVM, VRVM])
def test_nothing_fitted_yet(engine: Any) -> None:
    with pytest.raises(BadInput, match="nothing is fitted yet"):
        engine(models.logistic).posterior  # noqa: B018 - the property raises
    assert not list(pyro.get_param_store().keys())
