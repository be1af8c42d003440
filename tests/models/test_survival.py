"""Survival functions against SciPy and mpmath, censored likelihoods against integrals, Cox against its definition."""

import itertools
import math
import warnings
from collections.abc import Callable

import mpmath
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from torch import Tensor

from pyro_evidence import LaplaceEvidence
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.fitting.process_state import without_validation
from pyro_evidence.models.survival import (
    Censored,
    CoxPartialLikelihood,
    Gompertz,
    LogLogistic,
    PiecewiseExponential,
    log_survival,
)

A, B = torch.tensor([0.7, 1.5, 4.0]).double(), torch.tensor([0.4, 1.0, 2.5]).double()
TIMES = torch.tensor([0.3, 1.2, 2.4]).double()
CUTS, HAZARD = torch.tensor([0.5, 2.0]).double(), torch.tensor([0.3, -0.4, 0.2]).double()

KINDS: dict[str, Callable[[Tensor, Tensor], dist.TorchDistribution]] = {
    "exponential": lambda a, b: dist.Exponential(a * b),
    "Weibull": dist.Weibull,
    "log-normal": dist.LogNormal,
    "Gamma": dist.Gamma,
    "log-logistic": LogLogistic,
    "Gompertz": Gompertz,
    "piecewise": lambda a, b: PiecewiseExponential(CUTS, HAZARD * b.sum(), a.log()),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_survival_is_the_integral_of_the_density(kind: str) -> None:
    """By Gauss and Legendre's rule on panels between the kinks of the density, the last one to infinity."""
    fn = KINDS[kind](A, B)
    nodes, weights = (torch.from_numpy(x) for x in np.polynomial.legendre.leggauss(120))
    share = 0.5 * (nodes + 1.0)
    logs = share / (1.0 - share)  # of times over the last break, from 0 to infinity
    for t in (0.1, 1.0, 3.0):
        breaks = sorted({t, *(c for c in CUTS.tolist() if c > t), t + 2.0, t + 8.0})
        x = [low + (high - low) * share for low, high in itertools.pairwise(breaks)]
        by_x = [torch.full_like(share, high - low) for low, high in itertools.pairwise(breaks)]
        tail = breaks[-1] * logs.clamp(max=200.0).exp()  # nothing is left there
        x, by_x = [*x, tail], [*by_x, tail * (1.0 - share) ** -2]
        density = fn.log_prob(torch.cat(x).unsqueeze(-1)).exp()
        expected = (0.5 * weights.repeat(len(x)) * torch.cat(by_x)) @ density
        survival = log_survival(fn, torch.full((3,), t).double()).exp()
        torch.testing.assert_close(survival, expected, rtol=0.0, atol=1e-7)


@every_kind
def test_survival_has_two_right_derivatives(kind: str) -> None:
    a, b, t = (x.clone().requires_grad_() for x in (A, B, TIMES))

    def f(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
        return log_survival(KINDS[kind](a, b), t)

    assert torch.autograd.gradcheck(f, (a, b, t))
    assert torch.autograd.gradgradcheck(f, (a, b, t), fast_mode=True)


@every_kind
def test_survival_of_rows_is_evaluated_at_once(kind: str) -> None:
    """Else a model with it is fitted row by row: frailties of log-normal times took seven times as long."""
    rows = torch.tensor([0.8, 1.1]).double()

    def one(factor: Tensor) -> Tensor:
        return log_survival(KINDS[kind](factor * A, B), TIMES)

    with without_validation(), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.vmap(one)(rows)
    torch.testing.assert_close(found, torch.stack([one(row) for row in rows]))


@pytest.mark.parametrize("a", [0.05, 0.7, 3.0, 40.0, 900.0])
def test_a_gamma_s_survival_and_its_slope_in_the_shape(a: float) -> None:
    mpmath.mp.dps = 40
    for share in (0.3, 0.95, 1.0, 1.05, 3.0):
        x = share * a if a > 1 else share
        shape = torch.tensor(a).double().requires_grad_()
        value = log_survival(dist.Gamma(shape, torch.tensor(1.0).double()), torch.tensor(x).double())
        exact = mpmath.log(mpmath.gammainc(a, x, regularized=True))
        slope = mpmath.diff(lambda s, x=x: mpmath.log(mpmath.gammainc(s, x, regularized=True)), a)
        assert float(value.detach()) == pytest.approx(float(exact), rel=1e-10, abs=1e-13)
        assert float(torch.autograd.grad(value, shape)[0]) == pytest.approx(float(slope), rel=1e-8, abs=1e-10)


@every_kind
def test_draws_survive_as_often_as_said(kind: str) -> None:
    fn = KINDS[kind](A, B)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draws = fn.sample((40_000,))
    for t in (0.4, 1.5):
        share = (draws > t).double().mean(0)
        torch.testing.assert_close(share, log_survival(fn, torch.full((3,), t).double()).exp(), rtol=0.0, atol=0.012)


def test_moments_of_the_log_logistic() -> None:  # oracle: SciPy's, and no end of either below 2 and 1
    made = LogLogistic(torch.tensor([0.7, 2.0, 3.0, 1.0]).double(), torch.tensor([2.5, 6.0, 1.5, 0.9]).double())
    for moment, of in ((made.mean, stats.fisk.mean), (made.variance, stats.fisk.var)):
        expected = [of(c, scale=s) for s, c in zip(made.scale.tolist(), made.concentration.tolist(), strict=True)]
        np.testing.assert_allclose(moment.numpy()[:2], expected[:2], rtol=1e-12)
    assert made.mean.isfinite().tolist() == [True, True, True, False]
    assert made.variance.isfinite().tolist() == [True, True, False, False]


def test_every_kind_of_censoring() -> None:
    fn = dist.Weibull(torch.full((5,), 2.0).double(), torch.tensor(1.3).double())
    nan = math.nan
    value = torch.tensor([1.0, 1.5, 3.0, 2.0, 0.7]).double()
    observed = Censored(
        fn,
        event=torch.tensor([1, 0, 1, 1, 0]),
        lower=torch.tensor([nan, nan, 2.0, nan, nan]).double(),
        upper=torch.tensor([nan, nan, 3.0, nan, nan]).double(),
        entry=torch.tensor([0.0, 0.5, 0.0, 1.0, 0.0]).double(),
    ).log_prob(value)

    def S(t: float) -> float:
        return math.exp(-((t / 2.0) ** 1.3))

    def f(t: float) -> float:
        return 1.3 / 2.0 * (t / 2.0) ** 0.3 * S(t)

    expected = [f(1.0), S(1.5) / S(0.5), S(2.0) - S(3.0), f(2.0) / S(1.0), S(0.7)]
    np.testing.assert_allclose(observed.exp(), expected, rtol=1e-12)


@every_kind
def test_events_before_a_first_visit_have_right_derivatives(kind: str) -> None:
    """Left-censored: ``lower`` is 0, where logarithms of times have no slope."""
    a, b = (x.clone().requires_grad_() for x in (A, B))

    def f(a: Tensor, b: Tensor) -> Tensor:
        return Censored(KINDS[kind](a, b), lower=0.0 * TIMES, upper=TIMES).log_prob(TIMES)

    torch.testing.assert_close(f(a, b).exp(), 1.0 - log_survival(KINDS[kind](a, b), TIMES).exp())
    assert torch.autograd.gradcheck(f, (a, b), fast_mode=True)
    assert torch.autograd.gradgradcheck(f, (a, b), fast_mode=True)


def test_one_distribution_of_all_times_is_that_of_each() -> None:
    event = [1, 0, 1]
    one, each = (Censored(dist.Weibull(torch.full(n, 2.0), 1.5), event=event) for n in ((), (3,)))
    assert one.batch_shape == (3,)
    assert torch.equal(one.log_prob(TIMES), each.log_prob(TIMES))


def test_a_gamma_s_survival_is_not_told_where_it_would_be_wrong() -> None:
    shape = torch.tensor([1500.0, 1e5]).double()
    found = log_survival(dist.Gamma(shape, torch.ones(2).double()), shape)
    assert float(found[0]) == pytest.approx(stats.gamma(1500.0).logsf(1500.0), rel=1e-6)
    assert bool(found[1].isnan())


@every_kind
def test_seen_and_censored_rows_of_every_kind(kind: str) -> None:
    """By hazard and survival: the density itself is another formula."""
    fn, event = KINDS[kind](A, B), torch.tensor([1, 0, 1])
    expected = torch.where(event == 1, fn.log_prob(TIMES), log_survival(fn, TIMES))
    torch.testing.assert_close(Censored(fn, event=event).log_prob(TIMES), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("time", [0.0, -1.0, math.nan])
def test_times_outside_the_support_are_refused_where_rows_are_censored(time: float) -> None:
    """As by the density itself, whose hazard would have a number for them."""
    fn, times = dist.Weibull(torch.ones(2), 0.7), torch.tensor([time, 1.0])
    for event in (torch.tensor([1, 0]), torch.tensor([0, 1])):
        with pytest.raises(ValueError, match="support"):
            Censored(fn, event=event).log_prob(times)


def test_a_weibull_s_survival_of_no_time_has_no_slope() -> None:
    """Where its logarithm has none that is finite, as of a first visit at time 0."""
    a, b = (torch.ones(1).double().requires_grad_() for _ in range(2))
    value = log_survival(dist.Weibull(a, b), torch.zeros(1).double())
    slopes = torch.autograd.grad(value.sum(), (a, b))
    assert [float(x.detach()) for x in (value, *slopes)] == pytest.approx([0.0, 0.0, 0.0], abs=1e-300)


def test_rows_of_another_kind_have_no_part_in_slopes() -> None:
    scale = torch.tensor([2.0, 2.0]).double().requires_grad_()
    fn = Censored(
        dist.Weibull(scale, torch.ones(2).double()),
        lower=torch.tensor([1.0, math.nan]),
        upper=torch.tensor([2.0, math.nan]),
        entry=torch.tensor([0.0, 0.1]),
    )
    assert bool(torch.autograd.grad(fn.log_prob(torch.ones(2).double()).sum(), scale)[0].isfinite().all())


def partial(eta: np.ndarray, time: np.ndarray, event: np.ndarray, efron: bool) -> float:
    """Event by event, as in the books."""
    total = 0.0
    for t in np.unique(time[event]):
        dead, at_risk = np.exp(eta[event & (time == t)]), np.exp(eta[time >= t]).sum()
        for number in range(len(dead)):
            taken = dead.sum() * number / len(dead) if efron else 0.0
            total += math.log(dead[number]) - math.log(at_risk - taken)
    return total


@pytest.mark.parametrize("efron", [False, True])
def test_cox_by_its_definition(efron: bool) -> None:
    generator = np.random.default_rng(0)
    eta, event = generator.normal(size=40), generator.random(40) < 0.7
    for time in (generator.exponential(size=40), generator.integers(1, 6, size=40).astype(float)):
        found = CoxPartialLikelihood(torch.as_tensor(eta), torch.as_tensor(event), efron).log_prob(
            torch.as_tensor(time)
        )
        assert float(found) == pytest.approx(partial(eta, time, event, efron), rel=1e-12)


@pytest.mark.parametrize("efron", [False, True])
def test_cox_has_derivatives_of_three_orders(efron: bool) -> None:
    event, time = torch.tensor([1, 1, 0, 1, 1]), torch.tensor([2.0, 2.0, 3.0, 1.0, 2.0])

    def f(b: Tensor) -> Tensor:
        return CoxPartialLikelihood(b * torch.tensor([30.0, -40.0, 1.0, 0.0, 2.0]).double(), event, efron).log_prob(
            time
        )

    b = torch.tensor(0.1).double().requires_grad_()
    assert torch.autograd.gradcheck(f, (b,))
    assert torch.autograd.gradgradcheck(f, (b,))
    third = torch.func.grad(torch.func.grad(torch.func.grad(f)))(torch.tensor(5.0).double())
    assert bool(third.isfinite())


def test_the_piecewise_model_with_a_cut_at_every_event_is_cox_s() -> None:
    """Where nobody leaves between events, the maximum over flat hazards is the partial likelihood; Breslow (1974)."""
    generator = torch.Generator().manual_seed(0)
    time, x = torch.rand(30, generator=generator).double() + 0.1, torch.randn(30, generator=generator).double()
    event = torch.ones(30).bool()
    cuts = time.sort().values

    def profile(b: float) -> float:
        starts, ends = torch.nn.functional.pad(cuts[:-1], (1, 0)), cuts
        exposure = (time.unsqueeze(-1).clamp(max=ends) - starts).clamp(min=0.0)
        log_hazard = -((b * x).exp() @ exposure).log()
        return float(PiecewiseExponential(cuts[:-1], log_hazard, b * x).log_prob(time).sum())

    def cox(b: float) -> float:
        return float(CoxPartialLikelihood(b * x, event).log_prob(time))

    assert profile(0.7) - profile(-0.2) == pytest.approx(cox(0.7) - cox(-0.2), rel=1e-10)


def test_a_weibull_with_frailty_is_fitted() -> None:
    pyro.set_rng_seed(0)
    group = torch.arange(12).repeat_interleave(4)
    effect = 0.5 * torch.randn(12).double()
    time = dist.Weibull((1.0 + effect[group]).exp(), torch.tensor(1.5).double()).sample()
    event = time < 4.0

    def model(group: Tensor, time: Tensor, event: Tensor) -> None:
        shape = pyro.sample("shape", dist.LogNormal(torch.tensor(0.0).double(), 1.0))
        sd = pyro.sample("sd", dist.HalfNormal(torch.tensor(1.0).double()))
        level = pyro.sample("level", dist.Normal(torch.tensor(0.0).double(), 3.0))
        with pyro.plate("groups", 12):
            a = pyro.sample("a", dist.Normal(0.0, sd))
        with pyro.plate("rows", len(time)):
            fn = dist.Weibull((level + a[group]).exp(), shape)
            pyro.sample("time", Censored(fn, event=event), obs=time)

    posterior = LaplaceEvidence(model).run(group, time.clamp(max=4.0), event)
    draws = posterior.get_samples(500, seed=0)
    assert float(draws["level"].mean()) == pytest.approx(1.0, abs=3.0 * float(draws["level"].std()))
    assert float(draws["shape"].mean()) == pytest.approx(1.5, abs=3.0 * float(draws["shape"].std()))


LATE = torch.tensor([0.1, 1.5, 0.0]).double()


def late(fn: dist.TorchDistribution) -> Tensor:
    return fn.log_prob(TIMES.double())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Censored(dist.Exponential(torch.ones(3)), event=torch.ones(4)), "event of shape"),
        (lambda: Censored(dist.Exponential(torch.ones(3)), event=torch.tensor([1, 2, 0])), "other values than 0 and 1"),
        (lambda: Censored(dist.Exponential(torch.ones(1)), lower=torch.ones(1)), "one of lower and upper"),
        (lambda: Censored(dist.Exponential(torch.ones(1)), lower=torch.ones(1), upper=torch.ones(1)), "in order"),
        (lambda: PiecewiseExponential(CUTS.flip(0), HAZARD, 0.0), "increasing times"),
        (lambda: PiecewiseExponential(CUTS, HAZARD[:2], 0.0), r"and \(J,\)"),
        (lambda: CoxPartialLikelihood(torch.zeros(3), torch.ones(4)), r"\(\.\.\., N\) and \(N,\)"),
        (lambda: CoxPartialLikelihood(torch.zeros(3), torch.tensor([1, 2, 1])), "other values than 0 and 1"),
        (lambda: late(CoxPartialLikelihood(torch.zeros(3), None, entry=LATE)), "row 1 came under .* at 1.5, after"),
        (lambda: late(Censored(dist.Exponential(torch.ones(3)), entry=LATE)), "row 1 came under .* at 1.5, after"),
        (lambda: Censored(dist.Exponential(torch.ones(3)), entry=-LATE), "entry is below 0"),
        (lambda: Censored(torch.ones(3), event=torch.ones(3)), "a distribution of times first"),  # type: ignore[arg-type]
    ],
)
def test_messages(make: Callable[[], object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make()


def test_what_has_no_times_predicts_none() -> None:
    with pytest.raises(UnsupportedModel, match="predicts no times"):
        CoxPartialLikelihood(torch.zeros(3), None).sample()
    with pytest.raises(UnsupportedModel, match="predicts no times"):
        _ = CoxPartialLikelihood(torch.zeros(3), None).mean


def test_a_distribution_without_survival_is_named() -> None:
    with pytest.raises(UnsupportedModel, match="Beta has no survival function"):
        Censored(dist.Beta(torch.ones(2), torch.ones(2)), event=torch.tensor([0, 1])).log_prob(torch.full((2,), 0.5))
