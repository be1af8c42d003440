"""Models as textbooks and forums have them, each against a number that was found another way."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence
from pyro_evidence.laplace.approximation import laplace_problem
from pyro_evidence.posterior.multimodal import MultimodalPosterior
from pyro_evidence.program.log_joint import LogJoint


def change_point(y: Tensor) -> None:
    """Disasters in coal mines: two rates, and a year of change that is summed out."""
    num = len(y)
    rate = pyro.sample("rate", dist.Exponential(torch.ones(2)).to_event(1))
    when = pyro.sample("when", dist.Categorical(torch.ones(num) / num), infer={"enumerate": "parallel"})
    early = torch.arange(num) < when.unsqueeze(-1)
    pyro.sample("y", dist.Poisson(torch.where(early, rate[0], rate[1])).to_event(1), obs=y)


def conjugate(y: Tensor) -> float:
    """Closed form: for each year of change two gamma integrals."""
    total = []
    for when in range(len(y)):
        parts = [(float(part.sum()) + 1.0, len(part) + 1.0) for part in (y[:when], y[when:])]
        total.append(sum(math.lgamma(a) - a * math.log(b) for a, b in parts))
    constant = -float(torch.lgamma(y + 1.0).sum()) - math.log(len(y))
    return float(torch.tensor(total).logsumexp(0)) + constant


def test_a_change_point_of_many_years() -> None:
    """A discrete site that ties seventy years together is no reason for seventy times seventy passes."""
    generator = torch.Generator().manual_seed(0)
    y = torch.poisson(torch.where(torch.arange(70) < 30, 3.1, 0.9), generator=generator)
    assert laplace_problem(LogJoint(change_point, (y,))).structure.likelihoods is None
    posterior = LaplaceEvidence(change_point).run(y)
    exact = conjugate(y)
    assert abs(float(posterior.log_evidence) - exact) < 0.03
    found = posterior.diagnostics(400)
    assert abs(found["log_evidence_importance"] - exact) < 4.0 * found["log_evidence_importance_se"]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def chance(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def waiting(time: Tensor, censored: Tensor) -> None:
    """Exponential survival times, some of them only known to be longer, by two masks."""
    rate = pyro.sample("rate", dist.Gamma(2.0, 3.0))
    with pyro.plate("patients", len(time)):
        with pyro.poutine.mask(mask=~censored):
            pyro.sample("died", dist.Exponential(rate), obs=time)
        with pyro.poutine.mask(mask=censored):
            pyro.factor("alive", -rate * time)


def exposed(persons: Tensor, cases: Tensor) -> None:
    """Cases among tens of thousands of persons."""
    rate = pyro.sample("rate", dist.Gamma(2.0, 1000.0))
    with pyro.plate("years", len(cases)):
        pyro.sample("cases", dist.Poisson(persons * rate), obs=cases)


def test_censored_survival() -> None:  # oracle: conjugacy
    time = (-chance(30).log() / 0.4).clamp(max=4.0)
    censored = time >= 4.0
    assert 0 < int(censored.sum()) < 30
    a, b = 2.0 + float((~censored).sum()), 3.0 + float(time.sum())
    exact = 2.0 * math.log(3.0) - math.lgamma(2.0) + math.lgamma(a) - a * math.log(b)
    posterior = LaplaceEvidence(waiting).run(time, censored)
    assert float(posterior.log_evidence) == pytest.approx(exact, abs=0.01)
    assert float(posterior.importance_resampled(8000).mean()["rate"]) == pytest.approx(a / b, rel=0.02)


def test_cases_among_tens_of_thousands() -> None:  # oracle: conjugacy
    persons = 1e4 * (1.0 + chance(12))
    cases = torch.poisson(0.003 * persons, generator=torch.Generator().manual_seed(0))
    a, b = 2.0 + float(cases.sum()), 1000.0 + float(persons.sum())
    exact = 2.0 * math.log(1000.0) - math.lgamma(2.0) + math.lgamma(a) - a * math.log(b)
    exact += float((cases * persons.log() - torch.lgamma(cases + 1.0)).sum())
    assert float(LaplaceEvidence(exposed).run(persons, cases).log_evidence) == pytest.approx(exact, abs=1e-3)


def closed_population(seen: Tensor) -> None:
    """Animals that exist with some probability, and are seen at each of five visits with another."""
    there = pyro.sample("there", dist.Beta(1.0, 1.0))
    caught = pyro.sample("caught", dist.Beta(1.0, 1.0))
    with pyro.plate("animals", len(seen)):
        z = pyro.sample("z", dist.Bernoulli(there), infer={"enumerate": "parallel"})
        probs = (z * caught).unsqueeze(-1).expand(*z.shape, 5)
        pyro.sample("seen", dist.Bernoulli(probs).to_event(1), obs=seen)


def directions(angle: Tensor) -> None:
    mean, concentration = pyro.sample("mean", dist.Normal(0.0, 1.0)), pyro.sample("k", dist.Gamma(2.0, 0.5))
    with pyro.plate("data", len(angle)):
        pyro.sample("angle", dist.VonMises(mean, concentration), obs=angle)


def zero_inflated(x: Tensor, count: Tensor) -> None:
    slope, gate = pyro.sample("slope", dist.Normal(0.0, 1.0)), pyro.sample("gate", dist.Beta(1.0, 1.0))
    with pyro.plate("data", len(count)):
        z = pyro.sample("z", dist.Bernoulli(gate), infer={"enumerate": "parallel"})
        pyro.sample("count", dist.Poisson((1.0 - z) * (1.0 + slope * x).exp() + 1e-8), obs=count)


def collinear(X: Tensor, y: Tensor) -> None:
    """Two columns that are one, and a spread that is sampled."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfCauchy(1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(X @ w, sigma), obs=y)


VISITS = (chance(40, 5) < 0.3).double() * (chance(40, 1, seed=1) < 0.6)
COUNTS = torch.poisson((1.0 + 0.5 * draw(60)).exp(), generator=torch.Generator().manual_seed(0))
PLANAR = {
    "closed population": (closed_population, (VISITS,)),
    "directions": (directions, (1.0 + 0.5 * draw(40),)),
    "zero-inflated": (zero_inflated, (draw(60), COUNTS * (chance(60, seed=2) < 0.7))),
}


@pytest.mark.parametrize("name", PLANAR)
def test_two_latents_against_a_grid(name: str) -> None:  # oracle: the trapezoidal rule over both
    model, data = PLANAR[name]
    joint = LogJoint(model, data)
    axis = torch.linspace(-9.0, 9.0, 201, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    height = torch.cat([joint.log_joint(rows, joint.initial_theta).detach() for rows in grid.split(10_000)])
    exact = float(height.logsumexp(0) + 2.0 * (axis[1] - axis[0]).log())
    found = LaplaceEvidence(model).run(*data).diagnostics(4000)
    assert abs(found["log_evidence"] - exact) < 0.15
    assert abs(found["log_evidence_importance"] - exact) < 4.0 * found["log_evidence_importance_se"] + 1e-3


def test_columns_that_coincide() -> None:  # oracle: weights integrated on paper, the spread by the trapezoidal rule
    x = draw(50)
    X, y = torch.stack([x, x], -1), 2.0 * x + draw(50, seed=1)
    log_sigma = torch.linspace(-4.0, 4.0, 2001, dtype=torch.float64)
    covariance = X @ X.T + torch.diag_embed((2.0 * log_sigma).exp().unsqueeze(-1).expand(-1, 50))
    height = torch.distributions.MultivariateNormal(torch.zeros(50), covariance).log_prob(y)
    height = height + torch.distributions.HalfCauchy(1.0).log_prob(log_sigma.exp()) + log_sigma
    exact = float(height.logsumexp(0) + (log_sigma[1] - log_sigma[0]).log())
    assert float(LaplaceEvidence(collinear).run(X, y).log_evidence) == pytest.approx(exact, abs=0.02)


def test_raw_units_in_single_precision() -> None:  # law: the same fit as in double precision
    age, income = 20.0 + 50.0 * chance(100), 2e4 + 8e4 * chance(100, seed=1)
    label = (chance(100, seed=2) < torch.sigmoid(0.05 * (age - 45.0) + 2e-5 * (income - 6e4))).double()

    def model(age: Tensor, income: Tensor, t: Tensor) -> None:
        scales = age.new_tensor([10.0, 1.0, 0.1])
        a, b, c = pyro.sample("w", dist.Normal(torch.zeros_like(scales), scales).to_event(1))
        with pyro.plate("data", len(t)):
            pyro.sample("t", dist.Bernoulli(logits=a + b * age + c * income), obs=t)

    double, single = (
        LaplaceEvidence(model).run(*(x.to(kind) for x in (age, income, label)))
        for kind in (torch.float64, torch.float32)
    )
    assert float(single.log_evidence) == pytest.approx(float(double.log_evidence), abs=0.01)
    torch.testing.assert_close(single.mode["w"].double(), double.mode["w"], rtol=0.02, atol=1e-6)


def measured_with_an_error(seen: Tensor, y: Tensor) -> None:
    """A line on a predictor of which only measurements are known."""
    slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
    spread = pyro.sample("spread", dist.HalfNormal(2.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    with pyro.plate("rows", len(y)):
        x = pyro.sample("x", dist.Normal(0.0, spread))
        pyro.sample("seen", dist.Normal(x, 0.5), obs=seen)
        pyro.sample("y", dist.Normal(slope * x, noise), obs=y)


def test_a_predictor_that_is_measured_with_an_error() -> None:  # oracle: x on paper, the three others by a grid
    x = draw(60)
    seen, y = x + 0.5 * draw(60, seed=1), 0.8 * x + 0.4 * draw(60, seed=2)
    axes = [torch.linspace(*ends, 81, dtype=torch.float64) for ends in ((0.2, 1.6), (-0.8, 0.9), (-4.0, 0.2))]
    slope, log_spread, log_noise = torch.cartesian_prod(*axes).T
    spread, noise = log_spread.exp(), log_noise.exp()
    variance = [spread**2 + 0.25, slope * spread**2, slope**2 * spread**2 + noise**2]
    determinant = variance[0] * variance[2] - variance[1] ** 2
    square = variance[2] * seen.dot(seen) - 2.0 * variance[1] * seen.dot(y) + variance[0] * y.dot(y)
    height = -60.0 * math.log(math.tau) - 30.0 * determinant.log() - 0.5 * square / determinant
    height += torch.distributions.Normal(0.0, 2.0).log_prob(slope)
    height += torch.distributions.HalfNormal(2.0).log_prob(spread) + log_spread
    height += torch.distributions.HalfNormal(1.0).log_prob(noise) + log_noise
    exact = float(height.logsumexp(0)) + sum(math.log(float(axis[1] - axis[0])) for axis in axes)
    posterior = LaplaceEvidence(measured_with_an_error).run(seen, y)
    assert float(posterior.log_evidence) == pytest.approx(exact, abs=0.01)
    draws, weights = posterior.get_samples(1000, seed=0), height.softmax(0)
    for name, values in (("slope", slope), ("spread", spread), ("noise", noise)):
        mean = float(weights @ values)
        sd = float(weights @ (values - mean).square()) ** 0.5
        assert float(draws[name].mean()) == pytest.approx(mean, abs=0.1 * sd)
        assert float(draws[name].std()) == pytest.approx(sd, rel=0.1)


def declining(time: Tensor, count: Tensor) -> None:
    """A stock that falls with time, and has no density where it has fallen below zero."""
    decline = pyro.sample("decline", dist.LogNormal(-1.0, 1.0))
    with pyro.plate("times", len(time)):
        pyro.sample("count", dist.Poisson(20.0 - decline * time), obs=count)


def test_a_model_that_most_places_do_not_allow() -> None:  # oracle: the trapezoidal rule
    time = torch.arange(1.0, 41.0, dtype=torch.float64)
    count = torch.poisson(20.0 - 0.3 * time, generator=torch.Generator().manual_seed(0))
    log_decline = torch.linspace(-8.0, math.log(0.4999), 4001, dtype=torch.float64)
    decline = log_decline.exp()
    height = torch.distributions.Poisson(20.0 - decline.unsqueeze(-1) * time).log_prob(count).sum(-1)
    height = height + torch.distributions.Normal(-1.0, 1.0).log_prob(log_decline)
    exact = float(height.logsumexp(0) + (log_decline[1] - log_decline[0]).log())
    assert float(LaplaceEvidence(declining).run(time, count).log_evidence) == pytest.approx(exact, abs=0.01)


def sign_unknown(y: Tensor) -> None:
    a = pyro.sample("a", dist.Normal(0.0, 3.0))
    pyro.sample("y", dist.Poisson(a.square()), obs=y)


def test_draws_of_several_modes_have_the_mean_around_each() -> None:  # oracle: the trapezoidal rule
    """A scale seen through its square, as components' spreads are skewed: the mode is a quarter of a deviation off."""
    posterior = LaplaceEvidence(sign_unknown).run(torch.tensor(1.0))
    assert isinstance(posterior, MultimodalPosterior) and len(posterior.states) == 2
    a = torch.linspace(0.0, 8.0, 4001, dtype=torch.float64)
    weights = (-a.square() - a.square() / 18.0).exp() * a.square()
    weights /= weights.sum()
    mean = float(weights @ a)
    sd = float(weights @ (a - mean).square()) ** 0.5
    found = posterior.get_samples(8000, seed=0)["a"].abs()
    assert abs(float(posterior.mode["a"].abs()) - mean) > 0.2 * sd
    assert float(found.mean()) == pytest.approx(mean, abs=0.08 * sd)
