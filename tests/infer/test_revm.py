"""The relevance eigenvector machine: published numbers, exact cases, invariances, bad input."""

import math
import warnings
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS, Predictive
from torch import Tensor

from pyro_evidence.datasets import ripley_test, ripley_train
from pyro_evidence.errors import BadInput, NotAMode
from pyro_evidence.fitting.iterate import Status, Stop
from pyro_evidence.infer.revm import REVM, isotropic_evidence
from pyro_evidence.relevance import mode as relevance_mode
from pyro_evidence.relevance.axis_priors import GaussianPrior, L1Prior, climbed
from pyro_evidence.relevance.eigen_state import score_centre
from pyro_evidence.relevance.posteriors import REVMPosterior
from pyro_evidence.relevance.quadratic import JaakkolaJordan, LeastKL, empirical_fisher, laplace_at_base
from tests.models_for_tests import weight_models as models
from tests.models_for_tests.weight_models import kernel, labels, problem


def ripley(data_dir: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    train, test = ripley_train(), ripley_test()
    assert train.t is not None and test.t is not None
    return train.X, train.t, test.X, test.t


def with_one(X: Tensor) -> Tensor:
    return torch.cat([X, torch.ones(len(X), 1)], 1)


def error(posterior: REVMPosterior, Phi: Tensor, t: Tensor) -> float:
    return float(((posterior.predictor(Phi)[0] > 0) != t.bool()).double().mean())


@pytest.mark.parametrize(
    ("prior", "weights"),
    [
        (GaussianPrior(), [1.764032149, 11.844996244, -6.155473413]),
        (L1Prior(), [1.763728960, 11.842960414, -6.154415455]),
    ],
)
def test_ripleys_problem_with_three_columns_and_no_ridge(prior: Any, weights: list[float], data_dir: Path) -> None:
    X, t, X_test, t_test = ripley(data_dir)
    posterior = REVM(models.logistic, prior=prior, ridge=0.0).run(with_one(X), t)
    base = torch.tensor([2.071918263, 11.997331661, -6.074622918])
    torch.testing.assert_close(posterior.state.base, base, rtol=0, atol=1e-9)
    h = torch.tensor([32.268200750, 4.717466492, 0.319140033])
    torch.testing.assert_close(posterior.eigenvalues, h, rtol=0, atol=1e-9)
    torch.testing.assert_close(posterior.weights["w"], torch.tensor(weights), rtol=0, atol=5e-8)
    assert error(posterior, with_one(X_test), t_test) == pytest.approx(0.111)
    assert float((((with_one(X_test) @ base) > 0) != t_test.bool()).double().mean()) == pytest.approx(0.114)


@pytest.mark.parametrize(
    ("prior", "ridge", "percent", "axes"),
    [
        (GaussianPrior(), 0.1, 9.5, 7),
        (GaussianPrior(), 1e-2, 9.7, 7),
        (L1Prior(), 0.1, 9.5, 6),
        (L1Prior(), 1e-2, 9.6, 6),
    ],
)
def test_ripleys_problem_with_kernels(prior: Any, ridge: float, percent: float, axes: int, data_dir: Path) -> None:
    X, t, X_test, t_test = ripley(data_dir)
    posterior = REVM(models.logistic, prior=prior, ridge=ridge).run(kernel(X, X, 0.25), t)
    assert posterior.num_active == axes
    assert 100.0 * error(posterior, kernel(X_test, X, 0.25), t_test) == pytest.approx(percent, abs=0.11)


def test_a_gaussian_likelihood_makes_the_factorised_evidence_exact() -> None:
    Phi, _ = problem()
    t = Phi @ torch.tensor([1.0, -0.4, 0.1, 0.0, 0.0, 0.0]) + 0.5 * torch.randn(120)
    posterior = REVM(models.gaussian, ridge=0.0).run(Phi, t)
    active = posterior.state.directions
    covariance = (
        0.25 * torch.eye(120) + Phi @ active @ (1.0 / posterior.alpha[posterior.active]).diag() @ active.T @ Phi.T
    )
    exact = dist.MultivariateNormal(torch.zeros(120), covariance).log_prob(t)
    torch.testing.assert_close(posterior.state.factorised_log_evidence, exact, rtol=1e-11, atol=0)
    torch.testing.assert_close(posterior.log_evidence, exact, rtol=1e-11, atol=0)


def test_the_same_mode_under_the_non_diagonal_prior_in_weight_space() -> None:
    Phi, t = problem()
    posterior = REVM(models.logistic).run(Phi, t)
    alpha = torch.where(posterior.active, posterior.alpha, 1e9)
    R = posterior.state.axes.directions @ alpha.diag() @ posterior.state.axes.directions.T
    w = torch.zeros(6)
    for _ in range(50):  # Newton, by hand
        s = torch.sigmoid(Phi @ w)
        A = Phi.T @ ((s * (1 - s))[:, None] * Phi) + R
        w = w + torch.linalg.solve(A, Phi.T @ (t - s) - R @ w)
    torch.testing.assert_close(posterior.weights["w"], w, rtol=0, atol=1e-5)


def test_groups_are_kept_by_their_mean_wald_statistic() -> None:
    Phi, t = problem()
    alone, posterior = (REVM(models.logistic, prior=p).run(Phi, t) for p in (GaussianPrior(), GaussianPrior(size=3)))
    torch.testing.assert_close(posterior.wald, alone.wald)
    means = alone.wald.reshape(2, 3).mean(-1)
    expected = torch.where(means > 1.0, means - 1.0, 0.0).repeat_interleave(3).reciprocal() * alone.eigenvalues
    torch.testing.assert_close(posterior.alpha, expected)
    single = REVM(models.logistic, prior=GaussianPrior(size=1)).run(Phi, t)
    torch.testing.assert_close(single.weights["w"], alone.weights["w"])


def test_groups_make_the_factorised_evidence_exact_for_gaussian_noise() -> None:
    Phi, _ = problem()
    t = Phi @ torch.tensor([1.0, -0.4, 0.1, 0.0, 0.0, 0.0]) + 0.5 * torch.randn(120)
    posterior = REVM(models.gaussian, prior=GaussianPrior(size=2), ridge=0.0).run(Phi, t)
    torch.testing.assert_close(posterior.state.factorised_log_evidence, posterior.log_evidence, rtol=1e-11, atol=0)


def test_rotating_the_basis_changes_nothing_and_scaling_a_column_does() -> None:
    Phi, t = problem()
    Q, _ = torch.linalg.qr(torch.randn(6, 6))
    eta = REVM(models.logistic).run(Phi, t).predictor()[0]
    torch.testing.assert_close(REVM(models.logistic).run(Phi @ Q, t).predictor()[0], eta, rtol=0, atol=1e-6)
    scaled = Phi * torch.tensor([1.0, 30.0, 1.0, 1.0, 1.0, 1.0])
    assert float((REVM(models.logistic).run(scaled, t).predictor()[0] - eta).abs().max()) > 1e-3


def test_a_duplicated_column_with_half_the_ridge_changes_no_prediction() -> None:
    Phi, t = problem()
    root = math.sqrt(0.5)
    twice = torch.cat([root * Phi[:, :1], root * Phi[:, :1], Phi[:, 1:]], 1)  # an isometry of weight space
    eta = REVM(models.logistic).run(Phi, t).predictor()[0]
    posterior = REVM(models.logistic).run(twice, t)
    torch.testing.assert_close(posterior.predictor()[0], eta, rtol=0, atol=1e-8)
    assert len(posterior.eigenvalues) == 6  # the difference of the two is a null direction


def test_shift_directions_of_softmax_are_null() -> None:
    Phi, _ = problem(M=4)
    t = torch.randint(0, 3, (120,))
    t[Phi[:, 0] > 0.5] = 1
    posterior = REVM(models.softmax).run(Phi, t)
    assert len(posterior.eigenvalues) == 8  # of 12 weights; 4 shifts over 3 classes
    torch.testing.assert_close(posterior.weights["w"].sum(0), torch.zeros(4), rtol=0, atol=1e-9)
    assert posterior.num_active >= 2


@pytest.mark.parametrize("model", [models.probit, models.poisson, models.negative_binomial, models.gaussian])
def test_other_likelihoods_end_at_a_mode_of_their_own_model(model: Any) -> None:
    Phi, t = problem()
    posterior = REVM(model).run(Phi, t)
    assert posterior.num_active >= 1
    assert posterior.diagnostics()["gradient_norm"] < 1e-7


def test_wald_statistics_of_a_logistic_likelihood_are_bounded() -> None:
    for ridge in (1.0, 1e-3, 1e-6):
        Phi = torch.randn(40, 41)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            posterior = REVM(models.logistic, ridge=ridge).run(Phi, (torch.rand(40) < 0.5).double())
        assert float(posterior.wald.sum()) <= 0.43922884 * 40


def test_when_everything_is_pruned_it_says_so() -> None:
    X = torch.randn(40, 2)
    t = (X[:, 0] > 0).double()
    with pytest.warns(UserWarning, match="every axis was pruned although the weights explain 27.7 nats"):
        posterior = REVM(models.logistic, ridge=1e-13).run(kernel(X, X, 0.3), t)
    assert posterior.num_active == 0
    assert bool((posterior.weights["w"] == 0).all())
    assert float(posterior.log_evidence) == pytest.approx(-40 * math.log(2.0))
    assert posterior.get_samples(3)["w"].shape == (3, 41)
    assert posterior.diagnostics()["separable"]
    with pytest.raises(BadInput, match="every axis was pruned"):
        posterior.guide  # noqa: B018 - the property raises
    assert posterior.model(kernel(X, X, 0.3)).shape == (40,)


@pytest.mark.parametrize(("prior", "share", "spread"), [(GaussianPrior(), 0.317, 0.04), (L1Prior(), 0.151, 0.03)])
def test_how_much_pure_noise_is_kept(prior: Any, share: float, spread: float) -> None:
    kept = 0
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        Phi = torch.randn(2000, 50, generator=generator)
        t = (torch.rand(2000, generator=generator) < 0.5).double()
        kept += REVM(models.logistic, prior=prior, ridge=0.0).run(Phi, t).num_active
    assert kept / 300 == pytest.approx(share, abs=spread)


def test_singular_values_and_gram_matrix_give_the_same_axes() -> None:
    Phi, t = problem(N=40, M=6)
    few = REVM(models.logistic).run(Phi, t)
    padded = torch.cat([Phi, torch.zeros(40, 60)], 1)  # more weights than data: singular values
    many = REVM(models.logistic).run(padded, t)
    torch.testing.assert_close(many.eigenvalues, few.eigenvalues)
    torch.testing.assert_close(many.alpha, few.alpha)
    torch.testing.assert_close(many.weights["w"][:6], few.weights["w"])


@pytest.mark.parametrize("settings", [{}, {"prior": L1Prior()}, {"centre": score_centre}, {"approximation": LeastKL()}])
def test_many_more_weights_than_data_live_in_the_rows(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    X = torch.randn(25, 3)
    Phi = kernel(X, torch.randn(90, 3), 4.0)
    t = labels(X, torch.tensor([2.0, -1.0, 0.0]))
    few = REVM(models.logistic, ridge=0.1, **settings).run(Phi, t)
    monkeypatch.setattr("pyro_evidence.relevance.eigen_state.WIDE", math.inf)
    whole = REVM(models.logistic, ridge=0.1, **settings).run(Phi, t)
    torch.testing.assert_close(few.state.base, whole.state.base, rtol=0, atol=1e-7)
    torch.testing.assert_close(few.weights["w"], whole.weights["w"], rtol=0, atol=1e-6)
    torch.testing.assert_close(few.log_evidence, whole.log_evidence)
    assert torch.equal(few.eigenvalues[few.active] > 0, whole.eigenvalues[whole.active] > 0)


def test_above_the_limit_only_axes_that_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    X = torch.randn(200, 2)
    Phi, t = kernel(X, X[:120], 1.0), labels(X, torch.tensor([3.0, -1.0]))
    whole = REVM(models.logistic).run(Phi, t)
    monkeypatch.setattr("pyro_evidence.relevance.eigen_state.TRUNCATE", 50)
    part = REVM(models.logistic).run(Phi, t)
    assert len(part.eigenvalues) < len(whole.eigenvalues)
    torch.testing.assert_close(part.weights["w"], whole.weights["w"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(part.wald[part.active], whole.wald[whole.active], rtol=1e-6, atol=0)


def test_the_score_centre_is_where_the_quadratic_has_its_maximum() -> None:
    Phi, t = problem()
    posterior = REVM(models.logistic, centre=score_centre, ridge=3.0).run(Phi, t)
    quadratic = laplace_at_base(posterior.of.target, 3.0, posterior.state.base)
    expected = quadratic.y + torch.linalg.solve(quadratic.gram, quadratic.score)
    actual = posterior.state.axes.directions @ posterior.state.axes.u
    torch.testing.assert_close(actual, expected)


def test_nuts_on_the_posteriors_model_agrees() -> None:
    Phi, t = problem(N=400)
    posterior = REVM(models.logistic).run(Phi, t)
    mcmc = MCMC(NUTS(posterior.model), num_samples=200, warmup_steps=100, disable_progbar=True)
    mcmc.run(Phi, t)
    w = mcmc.get_samples()["axes"] @ posterior.state.directions.T
    ours = posterior.get_samples(20_000, seed=1)["w"]
    assert float(((w.mean(0) - ours.mean(0)).abs() / ours.std(0)).max()) < 0.35
    assert float((w.std(0) / ours.std(0) - 1.0).abs().max()) < 0.2
    assert posterior.diagnostics()["pareto_k"] < 0.7


def test_importance_sampling_confirms_the_log_evidence() -> None:
    Phi, t = problem(N=400)
    posterior = REVM(models.logistic).run(Phi, t)
    found = posterior.diagnostics()
    assert abs(found["log_evidence_importance"] - float(posterior.log_evidence)) < 0.05
    torch.testing.assert_close(posterior._laplace.log_evidence, posterior.log_evidence)


def test_predictive_records_the_weights() -> None:
    Phi, t = problem()
    posterior = REVM(models.logistic).run(Phi, t)
    draws = Predictive(posterior.model, guide=posterior.guide, num_samples=50, return_sites=("w", "t"))(Phi)
    assert draws["w"].reshape(50, 6).shape == (50, 6)
    assert draws["t"].shape == (50, 120)


def test_other_latents_stay_at_their_mode() -> None:
    Phi, t = problem()
    fixed = REVM(models.with_offset, site="w").run(Phi, t)
    assert set(fixed.mode) == {"b", "w"}
    s = torch.sigmoid(Phi @ fixed.state.base[:6] + fixed.state.base[6])
    B = (s * (1 - s))[:, None]
    torch.testing.assert_close(fixed.eigenvalues, torch.linalg.eigvalsh(Phi.T @ (B * Phi)).flip(0))
    assert fixed.diagnostics()["gradient_norm"] < 1e-7


def test_a_network_by_gauss_newton() -> None:
    X = torch.randn(150, 3)
    t = labels(torch.tanh(X), torch.tensor([3.0, -2.0, 0.0]))
    posterior = REVM(models.network, ridge=0.1).run(X, t)
    assert 1 <= posterior.num_active < 16
    assert float(posterior.log_prob().sum()) > -150 * math.log(2.0)


@pytest.mark.parametrize("approximation", [JaakkolaJordan(), LeastKL(), empirical_fisher])
def test_other_gaussians_in_place_of_the_likelihood(approximation: Any) -> None:
    Phi, t = problem(N=400)
    eta = REVM(models.logistic).run(Phi, t).predictor()[0]
    other = REVM(models.logistic, approximation=approximation, centre=score_centre).run(Phi, t).predictor()[0]
    assert float((eta - other).abs().max()) < 0.4 * float(eta.abs().max())


@pytest.mark.parametrize("at_mode", [False, True])
def test_least_kl_has_the_moments_that_make_it_stationary(at_mode: bool) -> None:
    """Precision = E[-l''] and E[l'] = 0, prior included; expectations by brute force."""
    Phi, t = problem(N=60, M=3)
    target = REVM(models.logistic).run(Phi, t).of.target
    start = climbed(target, torch.full((3,), 0.5), torch.zeros(3))
    quadratic = LeastKL()(target, 0.5, start if at_mode else torch.zeros(3))
    S = torch.linalg.inv(quadratic.gram + 0.5 * torch.eye(3))
    eta = quadratic.y @ Phi.T + torch.randn(200_000, 3) @ torch.linalg.cholesky(S).T @ Phi.T
    s = torch.sigmoid(eta)
    torch.testing.assert_close((s * (1 - s)).mean(0), quadratic.curvatures[0][:, 0, 0], rtol=0.02, atol=1e-3)
    gradient = Phi.T @ (t - s.mean(0)) - 0.5 * quadratic.y
    assert float(gradient.abs().max()) < 0.1


def test_ridges_by_function() -> None:
    Phi, t = problem(N=300)
    evidence = REVM(models.logistic, ridge=isotropic_evidence).run(Phi, t)
    ridge = float(evidence.hyperparameters["ridge"])
    assert 0.3 < ridge < 5.0  # mean square of the true weights is 0.875

    for unit in (1e-6, 1e6):
        scaled = REVM(models.logistic, ridge=isotropic_evidence).run(unit * Phi, t)
        assert float(scaled.log_evidence) == pytest.approx(float(evidence.log_evidence), abs=1e-6)

    def isotropic(value: float) -> float:
        """Oracle: Laplace's log evidence by the generic engine."""
        from pyro_evidence import LaplaceEvidence

        def model(Phi: Tensor, t: Tensor) -> None:
            w = pyro.sample("w", dist.Normal(torch.zeros(6), value**-0.5).to_event(1))
            with pyro.plate("data", len(Phi)):
                pyro.sample("t", dist.Bernoulli(logits=Phi @ w), obs=t)

        return float(LaplaceEvidence(model, maximise=()).run(Phi, t).log_evidence)

    assert isotropic(ridge) >= max(isotropic(1.2 * ridge), isotropic(ridge / 1.2))


def test_probabilities_keep_the_decision_of_the_mode() -> None:
    Phi, t = problem(N=40)
    posterior = REVM(models.logistic).run(Phi, t)
    mean, variance = posterior.predictor()
    exact = torch.sigmoid(mean + variance.sqrt() * torch.randn(400_000, 1)).mean(0)
    p = posterior.predict()
    assert torch.equal(p > 0.5, mean > 0)
    torch.testing.assert_close(p, exact, rtol=0, atol=0.005)
    fresh = posterior.predict(Phi[:3])  # targets left out
    torch.testing.assert_close(fresh, p[:3])


def test_the_predictors_moments_are_those_of_the_draws() -> None:
    Phi, t = problem(N=400)
    posterior = REVM(models.logistic).run(Phi, t)
    assert posterior.num_active > 1
    draws = posterior.get_samples(20_000, seed=0)["w"] @ Phi.T
    mean, variance = posterior.predictor()
    torch.testing.assert_close(variance, draws.var(0), rtol=0.06, atol=0)
    assert float(((draws.mean(0) - mean).abs() / variance.sqrt()).max()) < 4.0 / 20_000**0.5


@pytest.mark.parametrize("prior", [GaussianPrior(), L1Prior(), L1Prior(orthant=True), GaussianPrior(size=2)])
def test_saved_and_loaded(prior: Any, tmp_path: Path) -> None:
    Phi, t = problem()
    posterior = REVM(models.logistic, prior=prior).run(Phi, t)
    posterior.save(tmp_path / "p")
    again = REVMPosterior.load(tmp_path / "p", models.logistic)
    torch.testing.assert_close(again.weights["w"], posterior.weights["w"])
    torch.testing.assert_close(again.log_evidence, posterior.log_evidence)
    assert again.state.prior == prior
    with pytest.raises(BadInput, match="another density"):
        REVMPosterior.load(tmp_path / "p", models.probit)


def test_leaves_store_and_generator_alone() -> None:
    Phi, t = problem()
    before = torch.get_rng_state()
    posterior = REVM(models.logistic).run(Phi, t)
    posterior.get_samples(3)
    posterior.predictor(Phi)
    assert torch.equal(torch.get_rng_state(), before)
    assert not list(pyro.get_param_store().keys())


def test_quantiles_agree_with_draws() -> None:
    Phi, t = problem()
    posterior = REVM(models.logistic).run(Phi, t)
    draws = posterior.get_samples(40_000, seed=0)["w"]
    expected = draws.quantile(torch.tensor([0.1, 0.9]), 0)
    torch.testing.assert_close(posterior.quantiles([0.1, 0.9])["w"], expected, rtol=0, atol=0.03)


def test_a_mode_that_is_not_found_is_an_error_or_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the search has reached is returned where ``stop`` asks for no error; here it was the mode all the same."""
    Phi, t = problem()
    found, search = REVM(models.logistic, prior=L1Prior()).run(Phi, t), relevance_mode.maximise
    monkeypatch.setattr(relevance_mode, "maximise", lambda *x, **how: search(*x, **how)._replace(converged=False))
    with pytest.raises(NotAMode, match="the L1 search stopped"):
        REVM(models.logistic, prior=L1Prior()).run(Phi, t)
    with pytest.warns(UserWarning, match="the L1 search stopped"):
        posterior = REVM(models.logistic, prior=L1Prior(), stop=Stop(throw=False)).run(Phi, t)
    assert (found.status, posterior.status) == (Status.CONVERGED.value, Status.FAILED.value)
    assert torch.equal(posterior.log_evidence, found.log_evidence)
