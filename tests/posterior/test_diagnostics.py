"""``diagnostics()`` and ``summary()``: the numbers against other derivations, and what is said about them."""

import dataclasses
import json
import math
import re

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, LaplacePosterior, Start, Stop, damped, diagonal, exact_hessian
from pyro_evidence.numerics import importance
from pyro_evidence.posterior.base import varies
from pyro_evidence.posterior.diagnostics import importance_check
from tests.models_for_tests.posterior_models import (
    class_data,
    fitted_linear,
    fitted_logistic,
    fitted_mixture,
    funnel,
    linear,
    linear_posterior,
    logistic,
    regression_data,
)

KEYS = {
    "status",
    "log_evidence",
    "log_evidence_per_step",
    "log_evidence_per_restart",
    "failed_restarts",
    "left_a_saddle",
    "mean_shift",
    "gradient_norm",
    "smallest_eigenvalue",
    "curvature",
    "notes",
    "num_coordinates",
    "num_pruned",
    "pareto_k",
    "log_evidence_importance",
    "log_evidence_importance_se",
    "effective_sample_size",
    "exact",
    "largest_mean_shift",
    "largest_mean_shift_site",
    "largest_sd_ratio",
    "largest_sd_ratio_site",
}


def weak_logistic(X: Tensor, t: Tensor | None = None) -> Tensor:
    w = pyro.sample("w", dist.Normal(X.new_zeros(1), 1e3).to_event(1))
    with pyro.plate("data", len(X)):
        return pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


def wide(X: Tensor, t: Tensor | None = None) -> Tensor:
    alpha = pyro.param("alpha", torch.full((20,), 2.0))
    w = pyro.sample("w", dist.Normal(X.new_zeros(20), alpha.rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        return pyro.sample("t", dist.Normal(X @ w, 1.0), obs=t)


def test_diagnostics_are_plain_numbers_and_words() -> None:
    found = fitted_logistic().diagnostics()
    assert found.keys() == KEYS
    assert json.loads(json.dumps(found)) == found
    assert found["status"] == "converged"
    assert found["log_evidence"] == float(fitted_logistic().log_evidence)
    assert found["log_evidence_per_step"][-1] == found["log_evidence"]
    assert sorted(found["log_evidence_per_step"]) == found["log_evidence_per_step"]
    assert found["log_evidence_per_restart"] == [found["log_evidence"]]
    assert found["curvature"] == "exact_hessian"
    assert found["num_pruned"] == 0


def test_smallest_eigenvalue_is_that_of_the_posterior_precision() -> None:  # oracle: closed form
    _, covariance = linear_posterior(*regression_data())
    expected = float(1.0 / torch.linalg.eigvalsh(covariance)[-1])
    assert fitted_linear().diagnostics()["smallest_eigenvalue"] == pytest.approx(expected)
    diagonal_fit = LaplaceEvidence(linear, maximise=(), curvature=diagonal).run(*regression_data())
    entries = 0.5 + 4.0 * regression_data()[0].square().sum(0)
    assert diagonal_fit.diagnostics()["smallest_eigenvalue"] == pytest.approx(float(entries.min()))


def test_gradient_norm_is_in_posterior_standard_deviations() -> None:
    state = fitted_logistic().state
    away = dataclasses.replace(state, decrement=0.09)
    posterior = dataclasses.replace(fitted_logistic(), state=away)
    assert posterior.diagnostics(10)["gradient_norm"] == pytest.approx(0.3)
    assert fitted_logistic().diagnostics(10)["gradient_norm"] < 1e-6


def test_effective_sample_size_is_nearly_all_for_a_nearly_gaussian_posterior() -> None:
    posterior = LaplaceEvidence(logistic).run(*class_data(400))
    found = posterior.diagnostics()
    assert 3500.0 < found["effective_sample_size"] < 4000.0
    difference = abs(found["log_evidence_importance"] - found["log_evidence"])
    assert difference < 4.0 * found["log_evidence_importance_se"] + 0.01


def test_diagnostics_repeat_themselves_and_obey_their_seed() -> None:
    posterior = fitted_logistic()
    assert posterior.diagnostics(500) == posterior.diagnostics(500)
    first, second = (posterior.diagnostics(500, seed=s)["log_evidence_importance"] for s in (0, 1))
    assert first != second


def printed(posterior: LaplacePosterior, capsys, prob: float = 0.9) -> str:
    capsys.readouterr()
    posterior.summary(prob)
    return capsys.readouterr().out


def test_summary_gives_hyperparameters_evidence_and_status(capsys) -> None:
    text = printed(fitted_logistic(), capsys)
    alpha, gamma = float(fitted_logistic().hyperparameters["alpha"]), float(fitted_logistic().gamma["alpha"])
    sd = float(fitted_logistic().hyperparameter_covariance().sd["alpha"])
    assert re.search(rf"\n *alpha +{alpha:.4g} +{sd:.4g} .* {gamma:.4g}\n", text)
    assert f"\nlog evidence = {float(fitted_logistic().log_evidence):.4f} nats " in text
    assert text.endswith("\nstatus: converged\n")
    assert "above 0.7" not in text
    assert "different modes" not in text
    assert "not the exact Hessian" not in text


def test_summary_doubts_a_posterior_that_is_not_gaussian(capsys) -> None:
    alone = LaplaceEvidence(funnel, marginalise=(), start=Start(tour=0))
    posterior = alone.run(torch.tensor([3.0, -2.0, 0.5, 4.0, -3.0, 1.0]) / 10.0)
    assert posterior.diagnostics()["pareto_k"] > 0.7
    text = printed(posterior, capsys)
    assert "k-hat is above 0.7: the posterior is far from Gaussian" in text
    assert "run NUTS on posterior.model" in text


def test_summary_doubts_separable_data_under_a_weak_prior(capsys) -> None:
    X = torch.linspace(-1.0, 1.0, 8).unsqueeze(-1)
    posterior = LaplaceEvidence(weak_logistic).run(X, (X[:, 0] > 0.0).to(X.dtype))
    assert "k-hat is above 0.7" in printed(posterior, capsys)


def test_summary_reports_different_modes(capsys) -> None:
    posterior = fitted_mixture()
    heights = sorted(set(posterior.restarts.tolist()), reverse=True)
    assert len(heights) == 2  # the labels as the priors have them, and swapped
    text = printed(posterior, capsys)
    assert f"restarts reached different modes: log evidences [{heights[0]:.3f}, {heights[1]:.3f}]" in text


def test_one_mode_reached_by_many_restarts_is_no_news(capsys) -> None:
    posterior = LaplaceEvidence(logistic, start=Start(restarts=3)).run(*class_data())
    assert len(posterior.diagnostics()["log_evidence_per_restart"]) == 3
    assert "different modes" not in printed(posterior, capsys)


def test_summary_names_failed_restarts_and_compares_the_others(capsys) -> None:
    failed = dataclasses.replace(fitted_mixture(), failures=("restart 0: no mode",))
    alike = dataclasses.replace(failed, restarts=torch.tensor([math.nan, -11.7, -11.7]))
    text = printed(alike, capsys)
    assert text.endswith("status: converged\nrestart 0: no mode\n")
    assert "different modes" not in text
    unlike = dataclasses.replace(failed, restarts=torch.tensor([math.nan, -11.7, -64.6]))
    assert "restarts reached different modes: log evidences [-11.7, -64.6]\n" in printed(unlike, capsys)


def test_summary_names_a_curvature_that_is_not_the_exact_one(capsys) -> None:
    posterior = LaplaceEvidence(linear, maximise=(), curvature=damped(exact_hessian, 0.25)).run(*regression_data())
    assert "curvature: damped(exact_hessian, 0.25), not the exact Hessian" in printed(posterior, capsys)


@pytest.mark.filterwarnings("ignore:LaplaceEvidence. ran out of steps:UserWarning")
def test_summary_says_why_the_fit_stopped(capsys) -> None:
    stop = Stop(num_steps=1, throw=False)
    posterior = LaplaceEvidence(logistic, stop=stop).run(*class_data())
    assert "status: ran out of steps" in printed(posterior, capsys)


def test_a_long_hyperparameter_is_cut_short(capsys) -> None:
    X = torch.randn(40, 20)
    posterior = LaplaceEvidence(wide, maximise=()).run(X, X.sum(-1))
    text = printed(posterior, capsys)
    assert "alpha[11] " in text and "alpha[12] " not in text and "\nalpha: 8 more, in table()\n" in text
    assert "w[11] " in text and "\nw: 8 more, in table()\n" in text
    assert "alpha[19]" in posterior.table().rows


def test_one_weight_far_out_is_not_the_whole_of_the_evidence() -> None:
    """Oracle: Student's t from normal draws, whose weights have the mean one and no variance."""
    x = torch.randn(200, 4000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    log_weights = dist.StudentT(5.0).log_prob(x) - dist.Normal(0.0, 1.0).log_prob(x)
    found = torch.tensor([importance_check(importance.checked(row))["log_evidence_importance"] for row in log_weights])
    raw = log_weights.logsumexp(-1) - math.log(4000)
    assert float(found.square().mean()) < 0.1 * float(raw.square().mean())


def test_whether_draws_vary_does_not_hang_on_their_unit() -> None:
    draws = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    assert varies(1e-20 * draws).all() and varies(1e20 + 1e10 * draws).all()
    same = torch.tensor([0.1, 0.0, -1e9]).expand(50, 3)
    assert not varies(same * (1.0 + 1e-15 * draws)).any()
