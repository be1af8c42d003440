"""Scales integrated around Laplace, against quadrature, closed forms and themselves by another route."""

import copy
import math
import pickle
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, Importance, Predictive
from torch import Tensor

from pyro_evidence import LaplaceEvidence, LaplaceKernel, LaplacePosterior, Stop, compare_evidence, importance_sampling
from pyro_evidence.errors import BadInput, NotAMode, NotConverged
from pyro_evidence.models.formula import mixed
from pyro_evidence.models.gmrf import RandomWalk
from pyro_evidence.nested import integration, joint_posterior
from pyro_evidence.plots.posterior import marginal
from pyro_evidence.posterior import nested
from pyro_evidence.posterior.nested import NestedPosterior
from pyro_evidence.precision.blocks import BlockPrecision
from pyro_evidence.precision.dense import Dense, Precision, Separate, precision_tril
from pyro_evidence.precision.low_rank import LowRank
from tests.models_for_tests.sampled_scales import (
    COUNTS,
    SCHOOL_SDS,
    SCHOOLS,
    X,
    Y,
    conjugate,
    process_centred,
    regression,
    schools_centred,
    schools_noncentred,
    schools_with_param,
)

QUIET = Stop(progress=False)
EXACTLY = Stop(progress=False, quadrature_tol=1e-4)
LOG_TAU = torch.linspace(-30.0, 12.0, 8001, dtype=torch.float64)


@cache
def fitted(model, *, exactly: bool = False) -> NestedPosterior:
    data = (SCHOOLS,) if "schools" in model.__name__ else (X, Y)
    posterior = LaplaceEvidence(model, stop=EXACTLY if exactly else QUIET).run(*data)
    assert isinstance(posterior, NestedPosterior)
    return posterior


def quadrature(log_density: Tensor, x: Tensor, *values: Tensor) -> tuple[float, list[tuple[float, float]]]:
    """Log of an integral over a fine grid, and mean and sd of each of some functions, by the trapezoidal rule."""
    top = log_density.max()
    log_norm = torch.trapezoid((log_density - top).exp(), x).log() + top
    density = (log_density - log_norm).exp()
    means = [float(torch.trapezoid(density * v, x)) for v in values]
    pairs = zip(values, means, strict=True)
    sds = [float(torch.trapezoid(density * (v - m) ** 2, x)) ** 0.5 for v, m in pairs]
    return float(log_norm), list(zip(means, sds, strict=True))


@cache
def schools() -> tuple[float, dict[str, tuple[float, float]]]:
    """Oracle: mu integrated on paper, log tau by quadrature; log evidence, mean and sd of mu, tau, theta[0]."""
    variance = SCHOOL_SDS**2 + LOG_TAU.exp().unsqueeze(-1) ** 2
    precision, weight = 1.0 / 25.0 + (1.0 / variance).sum(-1), 1.0 / variance
    mean = (weight * SCHOOLS).sum(-1) / precision
    log_y = dist.Normal(0.0, variance.sqrt()).log_prob(SCHOOLS).sum(-1)
    log_y = log_y + 0.5 * precision * mean**2 - 0.5 * (25.0 * precision).log()
    log_density = log_y + dist.HalfCauchy(5.0).log_prob(LOG_TAU.exp()) + LOG_TAU
    tau2 = LOG_TAU.exp() ** 2
    shrink = tau2 / variance[:, 0]
    theta = mean + shrink * (SCHOOLS[0] - mean)
    within = tau2 * (1.0 - shrink) + (1.0 - shrink) ** 2 / precision
    value, ((m, ms), (t, ts), (log_tau, log_sd), (th, ths)) = quadrature(
        log_density, LOG_TAU, mean, LOG_TAU.exp().clamp(max=1e4), LOG_TAU, theta
    )
    _, ((inside_mu, _), (inside_theta, _)) = quadrature(log_density, LOG_TAU, 1.0 / precision, within)
    return value, {
        "mu": (m, math.hypot(ms, inside_mu**0.5)),
        "tau": (t, ts),
        "log tau": (log_tau, log_sd),
        "theta": (th, math.hypot(ths, inside_theta**0.5)),
    }


@pytest.mark.parametrize("model", [schools_centred, schools_noncentred])
def test_eight_schools_is_what_quadrature_says(model) -> None:
    log_evidence, moments = schools()
    posterior = fitted(model)
    assert posterior.marginalised_sites == ("tau",)
    assert float(posterior.log_evidence) == pytest.approx(log_evidence, abs=0.02)
    for name in ("mu", "tau"):
        (mean, sd), found = moments[name], posterior.marginal(name)
        assert float(found.mean) == pytest.approx(mean, abs=0.05 * sd)
        if name == "mu":
            assert float(found.sd) == pytest.approx(sd, rel=0.05)
    mean, sd = moments["log tau"]
    found = posterior.integral.moments
    assert float(found[0]) == pytest.approx(mean, abs=0.05 * sd) and float(found[1]) == pytest.approx(sd, rel=0.05)


def test_a_table_has_all_its_draws() -> None:
    """It may take as long as it takes, other than a summary."""
    table = fitted(schools_centred).table()
    assert {"tau", "theta[7]"} <= set(table.rows) and not table.notes


def test_both_forms_say_the_same_of_a_school() -> None:
    mean, sd = schools()[1]["theta"]
    draws = fitted(schools_centred).get_samples(4000, seed=0)["theta"][:, 0]
    other = fitted(schools_noncentred).get_samples(4000, seed=1)
    again = other["mu"] + other["tau"] * other["eta"][:, 0]
    for each in (draws, again):
        assert float(each.mean()) == pytest.approx(mean, abs=0.08 * sd)
        assert float(each.std()) == pytest.approx(sd, rel=0.06)
    assert float(fitted(schools_noncentred).log_evidence) == pytest.approx(
        float(fitted(schools_centred).log_evidence), abs=1e-6
    )


@pytest.mark.parametrize("model", [schools_centred, schools_noncentred])
def test_what_is_asked_for_is_got(model) -> None:
    assert float(fitted(model, exactly=True).log_evidence) == pytest.approx(schools()[0], abs=1e-4)
    assert fitted(model, exactly=True).integration_error < 1e-4


def conjugate_log_evidence() -> float:
    """Oracle: y is multivariate Student-t."""
    S = torch.eye(len(X)) + 4.0 * X @ X.T
    a, b, n = 3.0, 2.0, len(Y)
    quadratic = float(Y @ torch.linalg.solve(S, Y))
    log_norm = math.lgamma(a + n / 2) - math.lgamma(a) + a * math.log(b) - 0.5 * n * math.log(math.tau)
    return log_norm - 0.5 * float(S.logdet()) - (a + n / 2) * math.log(b + 0.5 * quadratic)


def test_the_conjugate_regression_is_its_closed_form() -> None:
    assert float(fitted(conjugate).log_evidence) == pytest.approx(conjugate_log_evidence(), abs=0.02)
    assert float(fitted(conjugate, exactly=True).log_evidence) == pytest.approx(conjugate_log_evidence(), abs=1e-4)
    S = torch.eye(len(X)) + 4.0 * X @ X.T
    a, b = 3.0 + len(Y) / 2, 2.0 + 0.5 * float(Y @ torch.linalg.solve(S, Y))
    beta = fitted(conjugate, exactly=True).marginal("beta")
    assert float(beta.mean) == pytest.approx(a / b, rel=1e-4) and float(beta.sd) == pytest.approx(a**0.5 / b, rel=1e-3)
    levels = torch.distributions.Gamma(a, b).cdf(beta.quantiles([0.05, 0.5, 0.95]))
    torch.testing.assert_close(levels, torch.tensor([0.05, 0.5, 0.95]), rtol=0, atol=1e-3)


def test_a_sampled_noise_scale_is_what_quadrature_says() -> None:
    log_sigma = torch.linspace(-3.0, 3.0, 1201)
    values, axes = torch.linalg.eigh(100.0 * X @ X.T)
    sds = (values.clamp(min=0.0) + log_sigma.exp().unsqueeze(-1).square()).sqrt()
    log_density = dist.Normal(0.0, sds).log_prob(axes.mT @ Y).sum(-1) + dist.HalfNormal(5.0).log_prob(log_sigma.exp())
    log_evidence, [(mean, sd)] = quadrature(log_density + log_sigma, log_sigma, log_sigma.exp())
    posterior = fitted(regression)
    assert float(posterior.log_evidence) == pytest.approx(log_evidence, abs=0.02)
    assert float(posterior.marginal("sigma").mean) == pytest.approx(mean, abs=0.05 * sd)
    assert float(posterior.marginal("sigma").sd) == pytest.approx(sd, rel=0.05)


def test_params_are_maximised_outside_of_the_integral() -> None:
    mu = torch.tensor(7.0, requires_grad=True)

    def log_evidence(mu: Tensor) -> Tensor:
        sd = (SCHOOL_SDS**2 + LOG_TAU.exp().unsqueeze(-1) ** 2).sqrt()
        log_density = dist.Normal(mu, sd).log_prob(SCHOOLS).sum(-1) + LOG_TAU
        log_density = log_density + dist.HalfCauchy(5.0).log_prob(LOG_TAU.exp())
        return torch.trapezoid((log_density + 40.0).exp(), LOG_TAU).log() - 40.0

    posterior = LaplaceEvidence(schools_with_param, stop=QUIET).run(SCHOOLS)
    best = torch.linspace(7.0, 8.5, 151)
    exact = torch.stack([log_evidence(m) for m in best])
    assert float(posterior.hyperparameters["mu"]) == pytest.approx(float(best[exact.argmax()]), abs=0.03)
    assert float(posterior.log_evidence) == pytest.approx(float(exact.max()), abs=0.02)
    assert set(posterior.mode) == {"tau", "theta"} and mu.requires_grad


def test_importance_weights_are_those_of_the_joint_density_of_the_draws() -> None:
    log_evidence, posterior = schools()[0], fitted(schools_centred)
    found = posterior.diagnostics(2000)
    assert found["log_evidence_importance"] == pytest.approx(
        log_evidence, abs=5.0 * found["log_evidence_importance_se"]
    )
    assert found["effective_sample_size"] > 1900 and found["inner_failures"] == 0
    assert found["marginalised_sites"] == ["tau"] and found["integration"].endswith("nodes")


def test_the_guide_has_the_density_of_the_draws_and_sits_in_the_models_plates() -> None:
    for model in (schools_centred, schools_noncentred):
        posterior = pickle.loads(pickle.dumps(fitted(model).guide))
        guide = poutine.trace(posterior).get_trace(SCHOOLS)
        joint = poutine.trace(poutine.replay(fitted(model).model, trace=guide)).get_trace(SCHOOLS)
        ratio = float(joint.log_prob_sum() - guide.log_prob_sum())
        assert ratio == pytest.approx(schools()[0], abs=0.3)
    weights = Importance(fitted(schools_centred).model, fitted(schools_centred).guide, 50).run(SCHOOLS)
    assert float(weights.get_log_normalizer()) == pytest.approx(schools()[0], abs=0.05)


def test_predictions_run_over_the_mixture() -> None:
    posterior = fitted(regression)
    new = Predictive(posterior.model, guide=posterior.guide, num_samples=50)(X[:4])
    assert new["y"].shape == (50, 4) and float(new["y"].std(0).min()) > 0.4


def test_quantiles_are_those_of_the_draws() -> None:
    posterior = fitted(schools_centred)
    draws = posterior.get_samples(4000, seed=3)
    found = posterior.quantiles([0.1, 0.5, 0.9])
    for name in ("mu", "tau", "theta"):
        below = (draws[name].unsqueeze(0) < found[name].unsqueeze(1)).double().mean(1)
        level = torch.tensor([0.1, 0.5, 0.9]).reshape(-1, *[1] * (below.dim() - 1)).expand_as(below)
        torch.testing.assert_close(below, level, rtol=0, atol=0.03)
    assert torch.equal(posterior.median()["tau"], posterior.quantiles(0.5)["tau"])


def test_draws_repeat_with_their_seed_and_are_all_different() -> None:
    posterior = fitted(schools_centred)
    first, second = (posterior.get_samples(200, seed=1)["tau"] for _ in range(2))
    assert torch.equal(first, second) and len(first.unique()) == 200
    assert posterior.get_samples(0)["theta"].shape == (0, 8)


def test_the_mode_is_the_outer_one_with_the_inner_one_given_it() -> None:
    mode = fitted(schools_centred).mode
    weight = 1.0 / (SCHOOL_SDS**2 + mode["tau"] ** 2)
    mu = (weight * SCHOOLS).sum() / (weight.sum() + 1.0 / 25.0)
    torch.testing.assert_close(mode["mu"], mu)


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    posterior, path = fitted(schools_centred), tmp_path / "posterior.pt"
    posterior.save(path)
    again = NestedPosterior.load(path, schools_centred)
    assert torch.equal(again.log_evidence, posterior.log_evidence) and again.marginalised_sites == ("tau",)
    torch.testing.assert_close(again.get_samples(20, seed=0)["theta"], posterior.get_samples(20, seed=0)["theta"])
    torch.testing.assert_close(again.marginal("tau").mean, posterior.marginal("tau").mean)
    with pytest.raises(BadInput, match=r"holds a NestedPosterior; .*: load it with NestedPosterior\.load"):
        LaplacePosterior.load(path, schools_centred)
    with pytest.raises(BadInput, match="this model has"):
        NestedPosterior.load(path, schools_noncentred)


def test_importance_sampling_and_mcmc_take_it() -> None:
    posterior = fitted(schools_centred)
    estimate = importance_sampling(posterior, num_samples=1000)
    assert estimate.log_evidence == pytest.approx(schools()[0], abs=0.02) and not estimate.doubts
    mcmc = MCMC(LaplaceKernel(LaplaceEvidence(schools_centred, stop=QUIET)), num_samples=20, warmup_steps=0)
    mcmc.run(SCHOOLS)
    assert mcmc.get_samples()["theta"].shape == (20, 8)


def test_two_axes_agree_with_importance_sampling() -> None:
    posterior = LaplaceEvidence(process_centred, stop=QUIET).run(COUNTS)
    found = posterior.diagnostics(2000)
    assert posterior.marginalised_sites == ("length", "variance") and "each of 2 axes" in found["integration"]
    assert float(posterior.log_evidence) == pytest.approx(found["log_evidence_importance"], abs=0.1)  # the inner error
    for name in posterior.marginalised_sites:
        draws, marginal = posterior.get_samples(4000, seed=0)[name].log(), posterior.marginal(name)
        middle = marginal.quantiles(0.5).log()
        assert float((draws < middle).double().mean()) == pytest.approx(0.5, abs=0.03)
        assert float(marginal.mass[-1]) == 1.0


def test_nothing_outer_is_one_gaussian_over_everything() -> None:
    plain = LaplaceEvidence(regression, marginalise=(), stop=QUIET).run(X, Y)
    assert not isinstance(plain, NestedPosterior)
    named = LaplaceEvidence(regression, marginalise=["sigma"], stop=QUIET).run(X, Y)
    assert torch.equal(named.log_evidence, fitted(regression).log_evidence)


def test_the_summary_says_what_was_integrated(capsys: pytest.CaptureFixture[str]) -> None:
    fitted(schools_centred).summary()
    said = capsys.readouterr().out
    assert "integrated numerically around Laplace: tau   (11 nodes, error " in said


def test_a_maximised_scale_is_not_weighed_against_an_integrated_one() -> None:
    maximised = LaplaceEvidence(regression, maximise=["sigma"], stop=QUIET).run(X, Y)
    with pytest.raises(BadInput, match=r"'sigma' is maximised in a and integrated in b"):
        compare_evidence(a=maximised, b=fitted(regression))
    forms = compare_evidence(a=fitted(schools_noncentred), b=fitted(schools_centred))
    assert forms.rows[0].probability == pytest.approx(0.5, abs=0.01)


def test_pictures_show_the_marginal() -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    figure, axes = plt.subplots()
    assert marginal(axes, fitted(schools_centred), site="tau") is axes
    drawn = axes.lines[0].get_xydata()
    assert float(drawn[:, 1].max()) > 0.1 and axes.get_xlabel().startswith("tau")
    plt.close(figure)


def two_hills(y: Tensor) -> None:
    """The prior of a noise scale has two narrow modes, and the data prefer neither much."""
    spread = dist.MixtureSameFamily(
        dist.Categorical(torch.tensor([0.3, 0.7])), dist.Normal(torch.tensor([-1.0, 2.0]), 0.2)
    )
    sigma = pyro.sample("sigma", dist.TransformedDistribution(spread, dist.transforms.ExpTransform()))
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(mu, sigma), obs=y)


def test_two_modes_of_a_scale_are_both_found() -> None:
    y, log_sigma = torch.tensor(1.0), torch.linspace(-4.0, 5.0, 4001)
    prior = [w * dist.Normal(m, 0.2).log_prob(log_sigma).exp() for w, m in ((0.3, -1.0), (0.7, 2.0))]
    log_density = sum(prior).log() + dist.Normal(0.0, (1.0 + log_sigma.exp() ** 2).sqrt()).log_prob(y)
    exact, [(mean, sd)] = quadrature(log_density, log_sigma, log_sigma)
    posterior = LaplaceEvidence(two_hills, marginalise=["sigma"], stop=QUIET).run(y)
    assert float(posterior.log_evidence) == pytest.approx(exact, abs=2e-3)
    assert "several modes" in posterior.diagnostics(200)["integration"]
    draws = posterior.get_samples(4000, seed=0)["sigma"].log()
    assert float(draws.mean()) == pytest.approx(mean, abs=0.06 * sd) and float(draws.std()) == pytest.approx(
        sd, rel=0.04
    )


def test_a_density_with_no_end_that_numbers_hold_is_refused() -> None:
    def flat(y: Tensor) -> None:
        tau = pyro.sample("tau", dist.LogNormal(0.0, 1e8))  # proper in name only
        with pyro.plate("units", 8):
            pyro.sample("y", dist.Normal(tau * pyro.sample("eta", dist.Normal(0.0, 1.0)), SCHOOL_SDS), obs=y)

    with pytest.raises((NotAMode, NotConverged), match=r"hardly falls far from|runs to infinity"):
        LaplaceEvidence(flat, stop=QUIET).run(SCHOOLS)


def test_the_precision_by_parts_is_the_dense_one() -> None:
    posterior = fitted(schools_noncentred)
    parts, dense = (
        joint_posterior.NestedPrecision(posterior.integral.outer_mode, posterior._places),
        posterior.state.precision,
    )
    rows = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    for name in ("log_det", "variance", "log_det_gradient"):
        torch.testing.assert_close(getattr(parts, name), getattr(dense, name))
    torch.testing.assert_close(parts.solve(rows[:1]), dense.solve(rows[:1]))
    torch.testing.assert_close(parts.whiten(parts.unwhiten(rows)), rows)
    torch.testing.assert_close(parts.whiten(rows).square().sum(-1), dense.whiten(rows).square().sum(-1))
    active = torch.ones(10, dtype=torch.bool)
    torch.testing.assert_close(parts.least_precise_direction(active), dense.least_precise_direction(active))


def test_a_posterior_can_be_copied_and_sent() -> None:
    posterior = copy.copy(fitted(schools_centred))  # without draws that were made among others, and rounded so
    for again in (copy.deepcopy(posterior), pickle.loads(pickle.dumps(posterior))):
        assert torch.equal(again.log_evidence, posterior.log_evidence)
        assert torch.equal(again.get_samples(3, seed=1)["tau"], posterior.get_samples(3, seed=1)["tau"])


def test_a_table_and_its_check_solve_each_draw_once(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = copy.copy(fitted(schools_centred))
    white = posterior._white(7, torch.Generator().manual_seed(0))
    first = posterior._with_density(white)
    monkeypatch.setattr(joint_posterior.Proposal, "drawn", lambda *_: pytest.fail("solved twice"))
    assert torch.equal(posterior._with_density(white.clone())[0], first[0])


def clinics(y: Tensor) -> None:
    s = pyro.sample("s", dist.HalfNormal(2.0))
    a = pyro.sample("a", dist.StudentT(4.0, 0.0, 2.0))
    with pyro.plate("clinics", 12):
        b = pyro.sample("b", dist.Normal(0.0, s))
        with pyro.plate("rows", 8):
            pyro.sample("y", dist.Bernoulli(logits=a + b), obs=y)


def followed_clinics(monkeypatch: pytest.MonkeyPatch) -> NestedPosterior:
    """Of which searches count as long, so that draws follow from the nodes."""
    monkeypatch.setattr(integration, "FEW_HESSIANS", 10**12)
    draw = torch.Generator().manual_seed(1)
    y = torch.bernoulli(torch.randn(12, generator=draw, dtype=torch.float64).sigmoid().expand(8, 12), generator=draw)
    posterior = LaplaceEvidence(clinics, stop=QUIET).run(y)
    assert isinstance(posterior, NestedPosterior) and posterior.integral.known is not None
    return posterior


def test_draws_follow_from_the_nodes_and_are_searched_beyond_them(monkeypatch: pytest.MonkeyPatch) -> None:
    integral = followed_clinics(monkeypatch).integral
    z = torch.linspace(-2.5, 2.5, 20, dtype=torch.float64).unsqueeze(-1)
    white = torch.randn(20, 13, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    searched, beyond = (integral.outer_mode.inner(integral.standardisation.forward(x)) for x in (z, 3.0 * z[-1:]))
    assert float((integral.inner(3.0 * z[-1:]).u - beyond.u).abs().max()) < 1e-5
    monkeypatch.setattr(integration, "solve_inner", lambda *_, **__: pytest.fail("searched"))
    found = integral.inner(z)
    away = found.u + found.precision.unwhiten(white) - searched.u - searched.precision.unwhiten(white)
    assert 0.0 < float(searched.precision.whiten(away).norm(dim=-1).max()) < 0.5 * integration.CLOSE
    torch.testing.assert_close(found.precision.log_det, searched.precision.log_det, rtol=0.0, atol=0.05)
    torch.testing.assert_close(found.log_density, searched.log_density, rtol=0.0, atol=0.05)


def units(y: Tensor) -> None:
    s, a = pyro.sample("s", dist.HalfNormal(1.0)), pyro.sample("a", dist.Normal(0.0, 2.0))
    with pyro.plate("units", len(y)):
        pyro.sample("y", dist.Poisson((a + pyro.sample("b", dist.Normal(0.0, s))).exp()), obs=y)


def walk(y: Tensor) -> None:
    s, a = pyro.sample("s", dist.HalfNormal(1.0)), pyro.sample("a", dist.Normal(0.0, 2.0))
    x = pyro.sample("x", RandomWalk(s, len(y)))
    with pyro.plate("times", len(y)):
        pyro.sample("y", dist.Poisson((a + x).exp()), obs=y)


@pytest.mark.parametrize(("model", "kind"), [(units, BlockPrecision), (walk, LowRank)])
def test_draws_of_many_coordinates_follow_by_the_factors_that_searches_leave(
    model, kind: type[Precision], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(1)
    log_rate = torch.linspace(0.0, 9.0, 210, dtype=torch.float64).sin() + 1.0
    log_rate += 0.5 * torch.randn(210, generator=draw, dtype=torch.float64)
    y = torch.poisson(log_rate.exp(), generator=draw)
    posterior = LaplaceEvidence(model, stop=QUIET).run(y)
    assert isinstance(posterior, NestedPosterior)
    integral = posterior.integral
    monkeypatch.setattr(integration, "HELD_NUMBERS", 2**20)  # too few for dense factors
    z = torch.linspace(-1.5, 1.5, 9, dtype=torch.float64).unsqueeze(-1)
    searched, found = integral.outer_mode.inner(integral.standardisation.forward(z)), integral.inner(z)
    white = torch.randn(found.u.shape, generator=draw, dtype=torch.float64)
    assert isinstance(found.precision, kind)
    away = found.u + found.precision.unwhiten(white) - searched.u - searched.precision.unwhiten(white)
    assert 0.0 < float(searched.precision.whiten(away).norm(dim=-1).max()) < 0.5 * integration.CLOSE
    torch.testing.assert_close(found.precision.log_det, searched.precision.log_det, rtol=0.0, atol=0.1)


def test_draws_are_searched_where_the_inner_mode_jumps_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    integral = followed_clinics(monkeypatch).integral
    jump = (integral.standardisation.inverse(integral.phi) > 0.3).double()
    nodes = replace(integral.nodes, u=integral.nodes.u + jump)
    z = torch.linspace(-1.0, 1.0, 5, dtype=torch.float64).unsqueeze(-1)
    found, searched = (
        replace(integral, nodes=nodes).inner(z),
        integral.outer_mode.inner(integral.standardisation.forward(z)),
    )
    torch.testing.assert_close(found.u, searched.u, rtol=0.0, atol=1e-5)


def test_importance_weights_are_those_of_draws_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = followed_clinics(monkeypatch)
    white = posterior._white(300, torch.Generator().manual_seed(3))
    u, log_density = posterior.proposal.drawn(white)
    torch.testing.assert_close(posterior.proposal.log_prob(u), log_density)
    log_weights = posterior.log_weights(300, seed=3)
    exact = copy.copy(posterior)
    vars(exact.integral)["known"] = vars(exact._tilted)["known"] = None
    torch.testing.assert_close(log_weights, exact.log_weights(300, seed=3), rtol=0.0, atol=0.05)


def test_marginals_of_draws_that_follow_are_those_of_searched_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nested, "is_affordable", lambda _, num: num <= nested.FEW_HESSIANS // 4)
    posterior = followed_clinics(monkeypatch)
    assert posterior.integral.searched < 0.05 and posterior._rows > nested.TOGETHER
    exact = copy.copy(posterior)
    points = posterior._calibrated.points
    vars(exact.integral)["known"] = vars(exact._tilted)["known"] = None
    monkeypatch.setattr(nested, "is_affordable", lambda *_: True)
    searched = exact._calibrated.points
    assert len(points) == nested.CALIBRATED
    torch.testing.assert_close(points.std(0), searched.std(0), rtol=0.01, atol=0.0)
    assert float(((points - searched).mean(0) / searched.std(0)).abs().max()) < 0.01


def test_marginals_are_not_asked_of_draws_that_are_searched_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In four dimensions the nodes of a central composite design are too far apart for draws to follow from them."""
    monkeypatch.setattr(nested, "is_affordable", lambda _, num: num <= nested.FEW_HESSIANS // 4)
    monkeypatch.setattr(integration, "FEW_HESSIANS", 10**12)
    random = np.random.default_rng(5)
    frame = pd.DataFrame(random.uniform(size=(80, 2)), columns=["x", "z"])
    frame["y"] = random.normal(size=80)
    model, data = mixed("y ~ t2(x, z)", frame, priors="weak")
    posterior = LaplaceEvidence(model, stop=QUIET).run(*data)
    assert isinstance(posterior, NestedPosterior) and posterior.integral.searched > 0.5
    assert not len(posterior._calibrated.points) and posterior._rows == nested.TOGETHER


@dataclass(frozen=True)
class Flipped(Precision):
    """A precision whose factor has the coordinates in the other order."""

    inner: Dense

    @property
    def log_det(self) -> Tensor:
        return self.inner.log_det

    def unwhiten(self, white: Tensor) -> Tensor:
        return self.inner.unwhiten(white.flip(-1)).flip(-1)

    def whiten(self, rows: Tensor) -> Tensor:
        return self.inner.whiten(rows.flip(-1)).flip(-1)


def flipped(A: Precision) -> Flipped:
    tril = precision_tril(A, 13)
    return Flipped(Dense(torch.linalg.cholesky((tril @ tril.mT).flip(0, 1)).unsqueeze(0)))


def test_noise_of_draws_that_follow_has_one_order_whatever_that_of_the_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = followed_clinics(monkeypatch)
    integral, white = posterior.integral, posterior._white(5, torch.Generator().manual_seed(4))
    state = replace(integral.outer_mode.state, precision=flipped(integral.outer_mode.state.precision))
    rows = Separate(tuple(flipped(integral.nodes.precision.row(row)) for row in range(len(integral.phi))))
    other = replace(
        integral,
        outer_mode=replace(integral.outer_mode, state=state),
        nodes=replace(integral.nodes, precision=rows),
    )
    turned = replace(posterior, integral=other)
    vars(posterior)["_tilted"], vars(turned)["_tilted"] = integral, other
    torch.testing.assert_close(turned.proposal.drawn(white)[0], posterior.proposal.drawn(white)[0])
    torch.testing.assert_close(turned._beside(white), posterior._beside(white))
    torch.testing.assert_close(
        other.factored(rows, len(rows.members)).whiten(rows.unwhiten(rows.whiten(integral.nodes.u))),
        integral.nodes.precision.whiten(integral.nodes.u),
    )
