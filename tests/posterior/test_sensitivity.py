"""Slopes of the log evidence and of means in the constants of priors, against closed forms, quadrature and refits."""

import math
from functools import cache
from typing import Any

import pyro.distributions as dist
import pytest
import torch
from pyro import param, plate, sample
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import BadInput, LaplaceEvidence, Start, UnsupportedModel
from pyro_evidence.posterior.sensitivity import log_evidence_after

STEP = 1e-3  # of a difference of refits
COLUMNS, COUNTS = 3, 60


def double(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def design() -> Tensor:
    return torch.randn(COUNTS, COLUMNS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def classes() -> Tensor:
    return (design()[:, 0] + 0.5 * design()[:, 1].cos() > 0.3).double()


def weights() -> Tensor:
    return sample("w", dist.Normal(torch.zeros(COLUMNS, dtype=torch.float64), double(2.0)).to_event(1))


def linear(X: Tensor, t: Tensor) -> None:
    w = weights()
    with plate("data", len(X)):
        sample("t", dist.Normal(X @ w, double(0.5)), obs=t)


def logistic(X: Tensor, y: Tensor) -> None:
    w, b = weights(), sample("b", dist.Normal(double(0.5), double(1.0)))
    with plate("data", len(X)):
        sample("y", dist.Bernoulli(logits=X @ w + b), obs=y)


def learned(X: Tensor, y: Tensor) -> None:
    spread = param("spread", double(1.0), constraint=constraints.positive)
    w = sample("w", dist.Normal(torch.zeros(COLUMNS, dtype=torch.float64), spread).to_event(1))
    b = sample("b", dist.Normal(double(0.5), double(1.0)))
    with plate("data", len(X)):
        sample("y", dist.Bernoulli(logits=X @ w + b), obs=y)


def most_probable(X: Tensor, y: Tensor) -> None:
    spread = sample("spread", dist.HalfNormal(double(1.0)))
    w = sample("w", dist.Normal(torch.zeros(COLUMNS, dtype=torch.float64), spread).to_event(1))
    with plate("data", len(X)):
        sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def groups(g: Tensor, y: Tensor) -> None:
    mean = sample("mean", dist.Normal(double(0.0), double(10.0)))
    spread = sample("spread", dist.Gamma(double(2.0), double(3.0)))
    with plate("groups", 30):
        level = sample("level", dist.Normal(mean, spread))
    with plate("data", len(g)):
        sample("y", dist.Poisson(level[g].exp()), obs=y)


def in_groups() -> tuple[Tensor, Tensor]:
    g, generator = torch.arange(120) % 30, torch.Generator().manual_seed(1)
    levels = 0.5 + 0.7 * torch.randn(30, generator=generator, dtype=torch.float64)
    return g, torch.poisson(levels[g].exp(), generator=generator)


def two_signs(t: Tensor) -> None:
    a = sample("a", dist.Normal(double(0.0), double(3.0)))
    sample("t", dist.Normal(a.square(), double(0.5)), obs=t)


def simplex(y: Tensor) -> None:
    p = sample("p", dist.Dirichlet(torch.ones(4, dtype=torch.float64)))
    shift = sample("shift", dist.LogNormal(double(0.0), double(0.3)))
    with plate("data", len(y)):
        sample("y", dist.Categorical(p.pow(shift) / p.pow(shift).sum()), obs=y)


REFITS: dict[str, tuple[Any, tuple[Tensor, ...], dict[str, Any], float]] = {
    "linear": (linear, (design(), design()[:, 0]), {}, 1e-5),
    "logistic": (logistic, (design(), classes()), {}, 1e-5),
    "params": (learned, (design(), classes()), {}, 1e-5),
    "maximised site": (most_probable, (design(), classes()), {"maximise": ["spread"]}, 1e-5),
    # what Laplace inside leaves out is taken as a straight line over the nodes, .05 nats from one to the next
    "integrated scale": (groups, in_groups(), {}, 0.01),
    # refits move the nodes, and with them what these leave out: within the error of the integral
    "integrated scale, blocks by quadrature": (groups, in_groups(), {"nodes": 3}, 4e-4),
    # one Gaussian, without a look at its weights
    "simplex": (simplex, (torch.arange(40) % 5 % 4,), {"marginalise": (), "start": Start(tour=0)}, 1e-5),
}


LONGEST = "integrated scale, blocks by quadrature"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == LONGEST)) for n in REFITS])
def test_slopes_are_differences_of_refits(name: str) -> None:
    model, args, settings, within = REFITS[name]
    posterior = LaplaceEvidence(model, **settings).run(*args)
    found = posterior.sensitivity()
    assert len(found.log_evidence) >= 2
    for constant, slope in found.log_evidence.items():
        ends = [log_evidence_after(posterior, found.constants[constant], step) for step in (STEP, -STEP)]
        assert slope == pytest.approx((ends[0] - ends[1]) / (2.0 * STEP), abs=within), constant


def linear_evidence(scale: float, loc: float) -> tuple[float, Tensor]:
    """Oracle: the multivariate normal of the targets, and the mean of the weights."""
    X, t = design(), design()[:, 0]
    covariance = 0.25 * torch.eye(COUNTS, dtype=torch.float64) + scale**2 * X @ X.T
    mean = X.sum(-1) * loc
    gain = scale**2 * X.T @ torch.linalg.inv(covariance)
    value = dist.MultivariateNormal(mean, covariance).log_prob(t)
    return float(value), loc + gain @ (t - mean)


def test_slopes_of_a_linear_model_are_those_of_its_closed_form() -> None:
    found = LaplaceEvidence(linear).run(design(), design()[:, 0]).sensitivity()
    scales = [linear_evidence(2.0 * 2.0**step, 0.0) for step in (STEP, -STEP)]
    locs = [linear_evidence(2.0, 2.0 * step) for step in (STEP, -STEP)]  # a step is the prior's scale, 2
    for constant, (ahead, behind) in {"w.scale": scales, "w.loc": locs}.items():
        assert found.log_evidence[constant] == pytest.approx((ahead[0] - behind[0]) / (2.0 * STEP), abs=1e-5)
        expected = (ahead[1] - behind[1]) / (2.0 * STEP)
        torch.testing.assert_close(found.means[constant]["w"], expected, atol=1e-7, rtol=0.0)
    assert list(found.log_evidence) == sorted(found.log_evidence, key=lambda c: -abs(found.log_evidence[c]))


def test_means_move_with_the_params_that_follow() -> None:
    args = design(), classes()
    posterior = LaplaceEvidence(learned).run(*args)
    found = posterior.sensitivity()
    ends = []
    for loc in (0.5 + STEP, 0.5 - STEP):  # a step is the prior's scale, 1

        def moved(X: Tensor, y: Tensor, loc: float = loc) -> None:
            spread = param("spread", double(1.0), constraint=constraints.positive)
            w = sample("w", dist.Normal(torch.zeros(COLUMNS, dtype=torch.float64), spread).to_event(1))
            b = sample("b", dist.Normal(double(loc), double(1.0)))
            with plate("data", len(X)):
                sample("y", dist.Bernoulli(logits=X @ w + b), obs=y)

        ends.append(LaplaceEvidence(moved).run(*args).mode)
    for site in ("w", "b"):
        expected = (ends[0][site] - ends[1][site]) / (2.0 * STEP)
        torch.testing.assert_close(found.means["b.loc"][site], expected, atol=1e-5, rtol=0.0)


def schools_evidence(scale: float, spread: float) -> tuple[float, float]:
    """Oracle: quadrature over the spread, all else on paper; the log evidence, and the mean of the spread."""
    y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], dtype=torch.float64).unsqueeze(-1)
    s = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], dtype=torch.float64).unsqueeze(-1)
    x = torch.linspace(-16.0, 12.0, 8001, dtype=torch.float64)
    tau = x.exp()
    variance = s.square() + tau.square()
    precision, shift = (1.0 / variance).sum(0) + scale**-2, (y / variance).sum(0)
    value = -0.5 * ((math.tau * variance).log() + y.square() / variance).sum(0)
    value = value - math.log(scale) - 0.5 * precision.log() + 0.5 * shift.square() / precision
    value = value + dist.HalfCauchy(double(spread)).log_prob(tau) + x
    weights = value.softmax(0)
    return float(value.logsumexp(0) + (x[1] - x[0]).log()), float(weights @ tau)


def schools() -> None:
    y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], dtype=torch.float64)
    s = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], dtype=torch.float64)
    mu = sample("mu", dist.Normal(double(0.0), double(10.0)))
    tau = sample("tau", dist.HalfCauchy(double(8.0)))
    with plate("schools", 8):
        sample("y", dist.Normal(sample("theta", dist.Normal(mu, tau)), s), obs=y)


def test_slopes_of_eight_schools_are_those_of_quadrature() -> None:
    found = LaplaceEvidence(schools).run().sensitivity()
    moved = {
        "mu.scale": [schools_evidence(10.0 * 2.0**step, 8.0) for step in (STEP, -STEP)],
        "tau.scale": [schools_evidence(10.0, 8.0 * 2.0**step) for step in (STEP, -STEP)],
    }
    for constant, (ahead, behind) in moved.items():
        assert found.log_evidence[constant] == pytest.approx((ahead[0] - behind[0]) / (2.0 * STEP), abs=2e-6)
        assert float(found.means[constant]["tau"]) == pytest.approx((ahead[1] - behind[1]) / (2.0 * STEP), abs=1e-4)


RIGHT = torch.tensor([1.0, 3.0, 2.0, 3.0, 4.0, 2.0, 3.0, 1.0], dtype=torch.float64)  # of five answers in each group


@cache
def over_groups() -> tuple[Tensor, Tensor, Tensor]:
    """Level, log spread, and log likelihood of both by quadrature over each group."""
    level, x, z = (
        torch.linspace(*ends, dtype=torch.float64) for ends in ((-7.0, 7.0, 71), (-9.0, 3.0, 121), (-6.0, 6.0, 61))
    )
    eta = level[:, None, None] + x.exp()[:, None] * z
    known = dist.Binomial(5, logits=eta)
    normal = dist.Normal(double(0.0), double(1.0)).log_prob(z) + (z[1] - z[0]).log()
    right = zip(*RIGHT.unique(return_counts=True), strict=True)
    return level, x, sum(num * (known.log_prob(k) + normal).logsumexp(-1) for k, num in right)


def answers_evidence(concentration: float, scale: float) -> float:
    """Oracle: quadrature over the level and the spread."""
    level, x, value = over_groups()
    value = value + dist.Normal(double(0.0), double(scale)).log_prob(level).unsqueeze(-1)
    value = value + dist.Gamma(double(concentration), double(2.0)).log_prob(x.exp()) + x
    return float(value.flatten().logsumexp(0) + ((level[1] - level[0]) * (x[1] - x[0])).log())


def answers() -> None:
    a = sample("a", dist.Normal(double(0.0), double(2.0)))
    s = sample("s", dist.Gamma(double(2.0), double(2.0)))
    with plate("groups", 8):
        sample("y", dist.Binomial(5, logits=a + sample("u", dist.Normal(double(0.0), s))), obs=RIGHT)


def test_slopes_count_what_laplace_leaves_out_inside() -> None:
    """By Laplace inside alone the slope in the concentration is .05 too low: the spread's density is another."""
    found = LaplaceEvidence(answers).run().sensitivity()
    both = [(answers_evidence(2.0 * 2.0**step, 2.0), answers_evidence(2.0, 2.0 * 2.0**step)) for step in (STEP, -STEP)]
    for constant, ahead, behind in zip(("s.concentration", "a.scale"), *both, strict=True):
        assert found.log_evidence[constant] == pytest.approx((ahead - behind) / (2.0 * STEP), abs=2e-3)
    curve = found.curve("s.concentration", 1.99, 2.01, num=3)
    assert float(curve.log_evidence[1]) == pytest.approx(curve.here, abs=1e-3)


def test_slopes_over_two_modes_are_those_of_quadrature() -> None:
    posterior = LaplaceEvidence(two_signs).run(double(4.0))
    assert len(posterior.states) == 2
    found = posterior.sensitivity()
    a = torch.linspace(-6.0, 6.0, 20001, dtype=torch.float64)
    log_density = dist.Normal(0.0, 3.0).log_prob(a) + dist.Normal(a.square(), 0.5).log_prob(double(4.0))
    rise = math.log(2.0) * (a.square() / 9.0 - 1.0)  # of the log prior density, a doubling of its scale
    assert found.log_evidence["a.scale"] == pytest.approx(float(log_density.softmax(0) @ rise), abs=1e-5)
    weights = log_density.softmax(0)
    moved = float(weights @ (a * rise)) - float(weights @ a) * float(weights @ rise)
    assert float(found.means["a.scale"]["a"]) == pytest.approx(moved, abs=1e-9)
    assert found.log_evidence["a.loc"] == pytest.approx(0.0, abs=1e-9)  # as likely on both sides


def test_slopes_by_draws_are_those_of_a_grid() -> None:
    """By moments of second degree alone 8e-4 off."""

    def model() -> None:
        a, b = sample("a", dist.Normal(double(0.0), double(3.0))), sample("b", dist.Normal(double(0.0), double(1.0)))
        sample("t", dist.Normal(a.square() + b, double(0.5)), obs=double(4.0))
        sample("v", dist.Normal(b, double(0.5)), obs=double(0.4))

    found = LaplaceEvidence(model).run().sensitivity()
    a, b = torch.linspace(-5.0, 5.0, 1201).double().unsqueeze(-1), torch.linspace(-4.0, 4.0, 401).double()
    of_data = dist.Normal(a.square() + b, 0.5).log_prob(double(4.0)) + dist.Normal(b, 0.5).log_prob(double(0.4))

    def log_evidence(a_scale: float, b_scale: float) -> Tensor:
        priors = dist.Normal(0.0, a_scale).log_prob(a) + dist.Normal(0.0, b_scale).log_prob(b)
        return (of_data + priors).logsumexp((0, 1))

    more, less = 2.0**STEP, 2.0**-STEP
    for constant, ahead, behind in (("a.scale", (3 * more, 1), (3 * less, 1)), ("b.scale", (3, more), (3, less))):
        expected = float(log_evidence(*ahead) - log_evidence(*behind)) / (2.0 * STEP)
        assert found.log_evidence[constant] == pytest.approx(expected, abs=1e-5)


def test_slopes_of_two_spreads_are_those_of_quadrature() -> None:
    """By the nodes of the fit 3e-4 off."""
    num, each = 5, 4
    g, generator = torch.arange(num * each) % num, torch.Generator().manual_seed(2)
    y = 1.0 + torch.randn(num, generator=generator).double()[g] + torch.randn(num * each, generator=generator).double()

    def model() -> None:
        mu, tau = sample("mu", dist.Normal(double(0.0), 5.0)), sample("tau", dist.HalfCauchy(double(1.0)))
        s = sample("s", dist.HalfNormal(double(2.0)))
        with plate("groups", num):
            u = sample("u", dist.Normal(double(0.0), tau))
        with plate("data", len(y)):
            sample("y", dist.Normal(mu + u[g], s), obs=y)

    found = LaplaceEvidence(model).run().sensitivity()
    x, z = torch.linspace(-16.0, 7.0, 1201).double().unsqueeze(-1), torch.linspace(-1.5, 2.5, 401).double()
    tau, s, means = x.exp(), z.exp(), torch.stack([y[g == j].mean() for j in range(num)])
    within = sum((y[g == j] - means[j]).square().sum() for j in range(num))
    variance = tau.square() + s.square() / each
    precision, shift = num / variance + 1.0 / 25.0, means.sum() / variance
    value = -num * (each - 1) * z - 0.5 * within / s.square() - 0.5 * num * variance.log()
    value = value - 0.5 * means.square().sum() / variance - 0.5 * precision.log() + 0.5 * shift.square() / precision

    def log_evidence(of_tau: float, of_s: float) -> Tensor:
        priors = dist.HalfCauchy(of_tau).log_prob(tau) + x + dist.HalfNormal(of_s).log_prob(s) + z
        return (value + priors).logsumexp((0, 1))

    more, less = 2.0**STEP, 2.0**-STEP
    for constant, ahead, behind in (("tau.scale", (more, 2), (less, 2)), ("s.scale", (1, 2 * more), (1, 2 * less))):
        expected = float(log_evidence(*ahead) - log_evidence(*behind)) / (2.0 * STEP)
        assert found.log_evidence[constant] == pytest.approx(expected, abs=1e-5)


def test_slopes_count_what_laplace_leaves_out_of_few_latents() -> None:
    """By the nodes, with Laplace for the log odds, 1.6e-3 off."""

    def model() -> None:
        a, k = sample("a", dist.Normal(double(0.0), double(2.0))), sample("k", dist.Gamma(double(2.0), double(0.1)))
        with plate("groups", 8):
            sample("y", dist.BetaBinomial(a.sigmoid() * k, (-a).sigmoid() * k, 5), obs=RIGHT)

    found = LaplaceEvidence(model).run().sensitivity()
    a, x = torch.linspace(-6.0, 6.0, 601).double().unsqueeze(-1), torch.linspace(-9.0, 7.0, 601).double()
    ends = a.sigmoid() * x.exp(), (-a).sigmoid() * x.exp()
    of_data = sum(dist.BetaBinomial(*ends, 5).log_prob(k) for k in RIGHT)

    def log_evidence(scale: float, rate: float) -> Tensor:
        gamma = dist.Gamma(double(2.0), double(rate)).log_prob(x.exp()) + x
        return (of_data + dist.Normal(0.0, scale).log_prob(a) + gamma).logsumexp((0, 1))

    more, less = 2.0**STEP, 2.0**-STEP
    for constant, ahead, behind in (
        ("a.scale", (2 * more, 0.1), (2 * less, 0.1)),
        ("k.rate", (2, 0.1 * more), (2, 0.1 * less)),
    ):
        expected = float(log_evidence(*ahead) - log_evidence(*behind)) / (2.0 * STEP)
        assert found.log_evidence[constant] == pytest.approx(expected, abs=1e-5)


def test_slopes_of_heavy_tails_are_those_of_a_grid() -> None:
    def heavy(t: Tensor) -> None:
        a = sample("a", dist.StudentT(double(3.0), double(0.0), double(1.0)))
        sample("t", dist.StudentT(double(3.0), a, double(1.0)), obs=t)

    def log_evidence(spread: float) -> Tensor:
        a = torch.linspace(-200.0, 200.0, 400_001, dtype=torch.float64)
        value = dist.StudentT(3.0, 0.0, double(spread)).log_prob(a) + dist.StudentT(3.0, a, 1.0).log_prob(double(1.0))
        return value.logsumexp(0)

    found = LaplaceEvidence(heavy).run(double(1.0)).sensitivity()
    expected = float(log_evidence(2.0**STEP) - log_evidence(2.0**-STEP)) / (2.0 * STEP)
    assert found.log_evidence["a.scale"] == pytest.approx(expected, abs=1e-6)
    assert {"a.df", "a.loc", "a.scale"} == set(found.constants)


def test_the_curve_holds_the_log_evidence_and_its_slope() -> None:
    posterior = LaplaceEvidence(linear).run(design(), design()[:, 0])
    curve = posterior.sensitivity().curve("w.scale", 0.1, 10.0)
    expected = [linear_evidence(float(value), 0.0)[0] for value in curve.values]
    torch.testing.assert_close(curve.log_evidence, torch.tensor(expected, dtype=torch.float64), atol=1e-8, rtol=0.0)
    assert curve.values[[0, -1]].tolist() == pytest.approx([0.1, 10.0])
    axes = curve.plot()
    assert axes.get_xscale() == "log" and len(axes.get_lines()) == 2
    flat = posterior.sensitivity().curve("w.loc", -1.0, 1.0, num=3)
    expected = [linear_evidence(2.0, float(value))[0] for value in flat.values]
    torch.testing.assert_close(flat.log_evidence, torch.tensor(expected, dtype=torch.float64), atol=1e-8, rtol=0.0)


def test_what_depends_on_other_sites_is_no_constant_and_bounds_are_left_out() -> None:
    def model() -> None:
        top = sample("top", dist.Uniform(double(0.0), double(3.0)))
        with plate("levels", 5):
            level = sample("level", dist.Normal(double(1.0), top + 0.1))
        sample("y", dist.Normal(level.sum(), double(1.0)), obs=double(3.0))

    found = LaplaceEvidence(model).run().sensitivity()
    assert set(found.log_evidence) == {"level.loc"} or not found.log_evidence
    assert set(found.left_out) >= {"top.low", "top.high"}
    assert "top.high" in str(found)


def test_priors_of_pruned_sites_and_of_no_site_have_no_slope() -> None:
    """A spread that ends at zero has elements without a density: the search at it ended in nan."""
    groups, t = torch.arange(12) % 4, torch.linspace(-1.0, 1.0, 12).double().roll(6)

    def model(random: bool) -> None:
        m = param("m", double(0.0))
        if random:
            spread = param("spread", double(1.0), constraint=constraints.positive)
            with plate("groups", 4):
                m = m + sample("u", dist.Normal(double(0.0), spread))[groups]
        with plate("rows", 12):
            sample("t", dist.Normal(m, double(2.0)), obs=t)

    fit = LaplaceEvidence(model).run(True)
    assert bool(fit.pruned["u"].all())
    with pytest.raises(UnsupportedModel, match=r"no constant that can be moved.* Left out: u\.loc"):
        fit.sensitivity()
    with pytest.raises(UnsupportedModel, match="no constant that can be moved"):
        LaplaceEvidence(model).run(False).sensitivity()


def test_slopes_beside_weights_of_which_some_are_pruned_are_those_of_refits() -> None:
    """Means of pruned weights have no slope; of the others' priors, differences of refits."""
    *X, noise = torch.randn(6, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    X = torch.stack(X, -1)

    def model(scale: float) -> None:
        spread = param("spread", torch.ones(5).double(), constraint=constraints.positive)
        w = sample("w", dist.Normal(double(0.0), spread).to_event(1))
        b = sample("b", dist.Normal(double(0.0), double(scale)))
        with plate("rows", 30):
            sample("t", dist.Normal(X @ w + b, double(0.3)), obs=X[:, 0] + 0.3 * noise)

    fit = LaplaceEvidence(model).run(2.0)
    assert 0 < int(fit.pruned["w"].sum()) < 5
    found = fit.sensitivity()
    assert "w.loc" in found.left_out
    more, less = (LaplaceEvidence(model).run(2.0 ** (1.0 + h)).log_evidence for h in (0.01, -0.01))
    assert found.log_evidence["b.scale"] == pytest.approx(float(more - less) / 0.02, abs=1e-4)


def test_bad_input() -> None:
    posterior = LaplaceEvidence(linear).run(design(), design()[:, 0])
    found = posterior.sensitivity()
    with pytest.raises(BadInput, match="expected one of"):
        found.curve("w.rate", 1.0, 2.0)
    with pytest.raises(BadInput, match="0 < low < high"):
        found.curve("w.scale", 2.0, 1.0)

    def no_constants() -> None:
        top = sample("top", dist.Uniform(double(0.0), double(3.0)))
        sample("y", dist.Normal(top, double(1.0)), obs=double(1.0))

    with pytest.raises(UnsupportedModel, match="no constant that can be moved"):
        LaplaceEvidence(no_constants).run().sensitivity()


def test_elements_that_do_not_vary_do_not_move() -> None:
    """The Cholesky factor of a correlation has a one and a zero, in all draws."""
    y = torch.randn(8, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def model(y: Tensor) -> None:
        mean = sample("mean", dist.Normal(torch.zeros(2, dtype=torch.float64), 1.0).to_event(1))
        L = sample("L", dist.LKJCholesky(2, double(2.0)))
        with plate("rows", len(y)):
            sample("y", dist.MultivariateNormal(mean, scale_tril=L), obs=y)

    table = LaplaceEvidence(model).run(y).sensitivity().table()
    assert all(row["mean"] < 1.0 for row in table.rows.values())
