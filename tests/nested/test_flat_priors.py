"""Flat priors on scales, Stan's default, and proper ones that are told from them: where there is an integral."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import logsigmoid

from pyro_evidence import BadInput, ImproperPosterior, LaplaceEvidence, NotAMode, Stop, compare_evidence
from pyro_evidence.laplace.approximation import laplace_state
from pyro_evidence.nested.hyperparameter_modes import require_integral
from pyro_evidence.nested.inner import MarginalisedJoint, marginalised_problem
from pyro_evidence.nested.integration import OuterMode

QUIET = Stop(progress=False)
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]).double()
EFFECTS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]).double()


def flat(support: constraints.Constraint, *shape: int) -> dist.ImproperUniform:
    return dist.ImproperUniform(support, (), shape)


def schools(errors: Tensor, effects: Tensor) -> None:
    mu, tau = pyro.sample("mu", flat(constraints.real)), pyro.sample("tau", flat(constraints.positive))
    with pyro.plate("schools", len(errors)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("effects", dist.Normal(theta, errors), obs=effects)


def schools_by_quadrature(num: int) -> tuple[float, float]:
    """The integral over mu in closed form and over log tau on a grid: its log, and the median of tau."""
    log_tau = torch.linspace(-12.0, math.log(1e6), 40_001).double()
    variance = ERRORS[:num].square() + (2.0 * log_tau).exp().unsqueeze(-1)
    V = 1.0 / (1.0 / variance).sum(-1)
    mean = (EFFECTS[:num] / variance).sum(-1) * V
    rows = dist.Normal(mean.unsqueeze(-1), variance.sqrt()).log_prob(EFFECTS[:num]).sum(-1)
    height = rows + 0.5 * (2.0 * math.pi * V).log() + log_tau
    mass = height.softmax(0).cumsum(0)
    step = (log_tau[1] - log_tau[0]).log()
    return float(height.logsumexp(0) + step), float(log_tau[(mass < 0.5).sum()].exp())


@pytest.mark.parametrize("num", [8, 4])
def test_a_spread_of_groups(num: int) -> None:
    posterior = LaplaceEvidence(schools, stop=QUIET).run(ERRORS[:num], EFFECTS[:num])
    log_integral, median = schools_by_quadrature(num)
    assert float(posterior.log_evidence) == pytest.approx(log_integral, abs=0.02)
    tau = posterior.get_samples(4000, seed=0)["tau"]
    assert float(tau.log().median()) == pytest.approx(math.log(median), abs=0.1)


def test_a_posterior_without_an_integral_is_refused_soon() -> None:
    """Of two groups' spread the density falls as 1 / tau: its integral has no end, and 10,000 runs said no more."""
    runs = 0

    def counted(errors: Tensor, effects: Tensor) -> None:
        nonlocal runs
        runs += 1
        schools(errors, effects)

    with pytest.raises(ImproperPosterior, match="no integral"):
        LaplaceEvidence(counted, stop=QUIET).run(ERRORS[:2], EFFECTS[:2])
    assert runs < 1000


def regression(X: Tensor, y: Tensor) -> None:
    w, sigma = pyro.sample("w", flat(constraints.real_vector, 3)), pyro.sample("sigma", flat(constraints.positive))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(X @ w, sigma), obs=y)


def test_a_regression_has_the_integral_of_its_closed_form() -> None:
    """sigma squared is inverse gamma, with n - p - 1 degrees of freedom; coefficients are Student's."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    y = X @ torch.tensor([1.0, -2.0, 0.5]).double() + 0.7 * torch.randn(40, generator=generator, dtype=torch.float64)
    n, p = X.shape
    w = torch.linalg.lstsq(X, y.unsqueeze(-1)).solution.squeeze(-1)
    S, a = float((y - X @ w).square().sum()), (n - p - 1) / 2
    log_integral = math.lgamma(a) - a * math.log(S / 2) - math.log(2.0) - (n - p) / 2 * math.log(2 * math.pi)
    log_integral -= 0.5 * float(torch.logdet(X.T @ X))
    mean_of_sigma = math.sqrt(S / 2) * math.exp(math.lgamma(a - 0.5) - math.lgamma(a))
    posterior = LaplaceEvidence(regression, stop=QUIET).run(X, y)
    assert float(posterior.log_evidence) == pytest.approx(log_integral, abs=0.02)
    draws = posterior.get_samples(4000, seed=0)
    assert float(draws["sigma"].mean()) == pytest.approx(mean_of_sigma, rel=0.01)
    torch.testing.assert_close(draws["w"].mean(0), w, rtol=0.0, atol=0.02)


def test_the_summary_says_that_it_is_no_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    posterior = LaplaceEvidence(schools, stop=QUIET).run(ERRORS, EFFECTS)
    posterior.summary()
    assert "flat prior for mu, tau: " in capsys.readouterr().out
    with pytest.raises(BadInput, match="flat prior for mu, tau"):
        compare_evidence(a=posterior, b=posterior)


def counts(prior: Any, y: Tensor) -> None:
    """Presence, and visits at which it was seen, with effects of sites: the data come by a factor."""
    a, c = pyro.sample("a", dist.Normal(0.0, 1.5)), pyro.sample("c", dist.Normal(0.0, 1.5))
    t = pyro.sample("t", prior)
    with pyro.plate("sites", len(y)):
        f = pyro.sample("f", dist.Normal(0.0, t))
        seen = dist.Binomial(5, logits=c + f).log_prob(y) + logsigmoid(a)
        pyro.factor("y", torch.where(y == 0, torch.logaddexp(seen, logsigmoid(-a)), seen))


def counts_by_quadrature(y: Tensor) -> float:
    """The sum over a, c and t on a grid, effects of sites by Gauss and Hermite's rule."""
    x, w = (torch.as_tensor(part) for part in np.polynomial.hermite_e.hermegauss(41))
    a, c = torch.linspace(-7.0, 7.0, 71).double(), torch.linspace(-7.0, 7.0, 141).double()
    t = (torch.arange(60).double() + 0.5) / 15.0
    present, logits = logsigmoid(a)[:, None, None], c[:, None, None] + t[:, None] * x
    total = dist.Normal(0.0, 1.5).log_prob(a)[:, None, None] + dist.Normal(0.0, 1.5).log_prob(c)[:, None]
    total = total + dist.HalfNormal(1.0).log_prob(t)
    for value, num in zip(*y.unique(return_counts=True), strict=True):
        seen = (dist.Binomial(5, logits=logits).log_prob(value) + (w / w.sum()).log()).logsumexp(-1) + present
        absent = logsigmoid(-a)[:, None, None] - (0.0 if value == 0 else math.inf)
        total = total + num * torch.logaddexp(seen, absent.expand_as(seen))
    return float(total.logsumexp((0, 1, 2))) + math.log(0.2 * 0.1 / 15.0)


@pytest.mark.slow
def test_where_modes_inside_merge_a_number_more_is_integrated() -> None:
    """Few sites with a high rate, or many with a low one: given the spread alone, the second mode comes and goes."""
    y = torch.arange(5).repeat_interleave(torch.tensor([11, 2, 2, 1, 4])).double()
    posterior = LaplaceEvidence(partial(counts, dist.HalfNormal(1.0)), stop=QUIET).run(y)
    assert set(posterior.marginalised_sites) == {"a", "t"}
    off = float(posterior.log_evidence) - counts_by_quadrature(y)
    assert abs(off) < 2.0 * float(posterior.log_evidence_error) < 0.6


def mode_of(model: Callable[..., None], log_scale: float, *args: Any) -> OuterMode:
    """What is inside at one value of the scale, as if that were its mode."""
    problem = marginalised_problem(MarginalisedJoint(model, args, marginalise=["t"]), None)
    state = laplace_state(problem, torch.tensor([log_scale]).double(), problem.joint.initial_u)
    return OuterMode(state, torch.tensor([0]), torch.ones(1, 1).double(), torch.zeros(len(state.u), 1).double())


COUNTS = torch.tensor([0.0, 1.0, 3.0, 2.0, 0.0, 4.0]).double()


def test_a_narrow_mode_tells_nothing_about_the_ends() -> None:
    found = mode_of(partial(counts, dist.HalfNormal(1.0)), -1.0, COUNTS)
    require_integral(replace(found, precision=1e6 * found.precision))


def test_what_is_bounded_has_an_integral_under_a_prior_that_hardly_falls() -> None:
    """From e^-6 to e^-26 the prior falls by 1e-3 nats, and data say nothing."""
    require_integral(mode_of(partial(counts, dist.LogNormal(0.0, 1e3)), 0.0, COUNTS))


def schools_with(prior: Any, power: float) -> None:
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 10.0)), pyro.sample("tau", prior)
    pyro.factor("power", -power * tau.log())
    with pyro.plate("schools", len(ERRORS)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("effects", dist.Normal(theta, ERRORS), obs=EFFECTS)


ENDS = [
    (flat(constraints.positive), ImproperPosterior, "no integral"),
    (dist.Uniform(0.0, 100.0), ImproperPosterior, "no integral"),
    (
        dist.HalfNormal(10.0),
        NotAMode,
        "ends, if at all, beyond what can be integrated",
    ),  # for rounding has the last word
]


@pytest.mark.filterwarnings("ignore:the log joint density jumps by")
@pytest.mark.parametrize(("prior", "error", "said"), ENDS)
def test_one_over_a_scale_has_no_integral_at_zero(prior: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        LaplaceEvidence(partial(schools_with, prior, 1.0), stop=QUIET).run()


@pytest.mark.filterwarnings("ignore:the log joint density jumps by")
@pytest.mark.parametrize("power", [0.5, 0.9])
def test_a_power_that_has_one_is_integrated(power: float) -> None:
    """Of tau^-.9 a sixth is where 1 / tau^2 hides all that data say by rounding: the error counts it."""
    x = torch.linspace(-300.0, 20.0, 640_001).double()
    variance = ERRORS.square() + (2.0 * x).exp().unsqueeze(-1)
    precision, mean = (1.0 / variance).sum(-1) + 0.01, (EFFECTS / variance).sum(-1)
    height = dist.Normal(0.0, variance.sqrt()).log_prob(EFFECTS).sum(-1) + 0.5 * mean.square() / precision
    height = height - 0.5 * (100.0 * precision).log() + dist.HalfNormal(10.0).log_prob(x.exp()) + (1.0 - power) * x
    exact = float(height.logsumexp(0) + (x[1] - x[0]).log())
    posterior = LaplaceEvidence(partial(schools_with, dist.HalfNormal(10.0), power), stop=QUIET).run()
    off = abs(float(posterior.log_evidence) - exact)
    assert off < float(posterior.log_evidence_error) < 0.01 + 2.0 * off


@pytest.mark.parametrize(("prior", "exact"), [(dist.Gamma(0.1, 0.1), -30.9444), (dist.LogNormal(0.0, 10.0), -31.4455)])
def test_what_rounding_hides_of_a_proper_prior_is_in_the_error(prior: Any, exact: float) -> None:
    """By quadrature over log tau from -300: -.19 and -.1 off, and an error of .009 and .004 said."""
    posterior = LaplaceEvidence(partial(schools_with, prior, 0.0), stop=QUIET).run()
    assert abs(float(posterior.log_evidence) - exact) < float(posterior.log_evidence_error) < 1.0


def test_a_proper_prior_over_all_scales_is_not_called_improper() -> None:
    with pytest.raises(NotAMode, match="ends, if at all, beyond what can be integrated numerically"):
        LaplaceEvidence(partial(schools_with, dist.LogNormal(0.0, 200.0), 0.0), stop=QUIET).run()
