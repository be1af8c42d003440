"""Scales whose log density has several modes are integrated from the highest that is known."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, NotAMode, Stop
from pyro_evidence.laplace.approximation import laplace_state
from pyro_evidence.laplace.gradient import slope
from pyro_evidence.models.gmrf import AR1
from pyro_evidence.nested import hyperparameter_modes
from pyro_evidence.nested.hyperparameter_modes import ENDLESS, best_mode, has_arrived, newton_step, prior_draws
from pyro_evidence.nested.integration import outer_mode

NUM = 4


def horseshoe(X: Tensor, y: Tensor) -> None:
    tau = pyro.sample("tau", dist.HalfCauchy(torch.ones(())))
    lam = pyro.sample("lam", dist.HalfCauchy(torch.ones(NUM)).to_event(1))
    b = pyro.sample("b", dist.Normal(torch.zeros(NUM), tau * lam).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ b, 0.5), obs=y)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X, noise = torch.randn(60, NUM, generator=generator), torch.randn(60, generator=generator)
    return X, 2.0 * X[:, 0] - X[:, 1] + 0.5 * noise


@pytest.mark.slow
def test_a_horseshoe_is_integrated_and_agrees_with_importance_sampling() -> None:
    posterior = LaplaceEvidence(horseshoe, stop=Stop(progress=False)).run(*data())
    found = posterior.diagnostics()
    assert found["status"] == "converged" and found["pareto_k"] < 0.7
    assert abs(found["log_evidence"] - found["log_evidence_importance"]) < 0.2


def two_hills(y: Tensor) -> None:
    """A scale whose prior has two modes, the lower one at -0.5."""
    low, high = (dist.Normal(m, 0.15) for m in (-0.5, 0.3))
    s = pyro.sample("s", dist.Normal(torch.zeros(()), 10.0))
    pyro.factor("modes", torch.logaddexp(low.log_prob(s) - 3.0, high.log_prob(s)))
    m = pyro.sample("m", dist.Normal(torch.zeros(()), 1.0))
    pyro.sample("y", dist.Normal(m, s.exp()).expand([len(y)]).to_event(1), obs=y)


def test_the_search_goes_on_from_the_highest_place_that_is_seen() -> None:
    engine = LaplaceEvidence(two_hills, marginalise=["s"], stop=Stop(progress=False))
    engine.run(torch.tensor([0.5, -0.5, 1.0]))
    state = engine._fits[0].state.laplace
    lower = outer_mode(laplace_state(state.problem, torch.tensor([-0.5]), state.u), torch.tensor([0]))
    found = best_mode(lower)
    assert has_arrived(found) and not has_arrived(lower)
    assert float(found.centre[0]) > 0.0 and found.state.objective > lower.state.objective + 1.0


def test_draws_of_a_vague_prior_are_looked_at_only_where_data_leave_a_scale() -> None:
    """Of a gamma prior's log precision, whose standard deviation is 1,000, nearly all lie e^-50 away."""

    def groups(y: Tensor) -> None:
        tau = pyro.sample("tau", dist.Gamma(1e-3, 1e-3))
        with pyro.plate("groups", len(y)):
            pyro.sample("y", dist.Normal(pyro.sample("mean", dist.Normal(0.0, tau**-0.5)), 1.0), obs=y)

    posterior = LaplaceEvidence(groups, stop=Stop(progress=False)).run(torch.tensor([2.0, -1.0, 0.5, 3.0, -4.0]))
    drawn = prior_draws(posterior.integral.outer_mode)
    assert len(drawn) < 4 and bool(((drawn - posterior.integral.outer_mode.centre).abs() < ENDLESS).all())


def level(y: Tensor) -> None:
    """A level that walks, seen with noise; both scales multiply what is standard normal."""
    q, r = (pyro.sample(name, dist.HalfNormal(torch.ones(()))) for name in ("q", "r"))
    steps = pyro.sample("steps", dist.Normal(torch.zeros(len(y)), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(q * steps.cumsum(-1), r).to_event(1), obs=y)


def level_log_evidence(y: Tensor) -> tuple[float, float]:
    """Oracle: the walk integrated by hand, the two scales on a fine grid; and the mean of log r."""
    unit = torch.tril(torch.ones(len(y), len(y), dtype=torch.float64))
    values, vectors = torch.linalg.eigh(unit @ unit.T)
    log_q, log_r = torch.meshgrid(*[torch.linspace(-8.0, 3.0, 221, dtype=torch.float64)] * 2, indexing="ij")
    spread = (2.0 * log_q).exp().unsqueeze(-1) * values + (2.0 * log_r).exp().unsqueeze(-1)
    likelihood = -0.5 * (math.tau * spread).log() - 0.5 * (vectors.T @ y.double()).square() / spread
    prior = [dist.HalfNormal(torch.ones((), dtype=torch.float64)).log_prob(s.exp()) + s for s in (log_q, log_r)]
    log_mass = likelihood.sum(-1) + prior[0] + prior[1] + 2.0 * math.log(0.05)
    return float(log_mass.logsumexp((0, 1))), float((log_mass.flatten().softmax(0) * log_r.flatten()).sum())


@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_far_places_on_the_same_hill_are_no_other_mode(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    walk, noise = torch.randn(2, 30, generator=generator, dtype=torch.float64)
    y = 0.5 * walk.cumsum(0) + noise
    posterior = LaplaceEvidence(level, stop=Stop(progress=False)).run(y)
    log_evidence, mean = level_log_evidence(y)
    assert float(posterior.log_evidence) == pytest.approx(log_evidence, abs=0.02)
    log_r = posterior.get_samples(4000, seed=0)["r"].log()
    assert float(log_r.mean()) == pytest.approx(mean, abs=0.1 * float(log_r.std()))


def two_modes(y: Tensor, weight: float) -> None:
    """Two scales whose joint prior has a second mode of a share ``exp(-weight)``."""
    s = pyro.sample("s", dist.Normal(torch.zeros(2), 10.0).to_event(1))
    modes = [dist.Normal(torch.tensor(m), 0.4).to_event(1).log_prob(s) for m in ([0.3, 0.3], [-2.0, 0.3])]
    pyro.factor("modes", torch.logaddexp(modes[0], modes[1] - weight))
    m = pyro.sample("m", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(m, s.exp()).to_event(1).expand([len(y)]).to_event(1), obs=y)


def test_another_mode_counts_by_its_mass() -> None:
    y = 0.1 * torch.tensor([[0.5, 0.2], [-0.5, 1.0], [1.0, -0.8]])
    engine = LaplaceEvidence(two_modes, marginalise=["s"], stop=Stop(progress=False))
    assert math.isfinite(float(engine.run(y, 14.0).log_evidence))
    with pytest.raises(NotAMode, match="several modes"):
        engine.run(y, 4.0)


def test_a_place_from_which_the_way_to_the_mode_rises_is_not_climbed_from(monkeypatch: pytest.MonkeyPatch) -> None:
    y = 0.1 * torch.tensor([[0.5, 0.2], [-0.5, 1.0], [1.0, -0.8]])
    engine = LaplaceEvidence(two_modes, marginalise=["s"], stop=Stop(progress=False))
    with pytest.raises(NotAMode):
        engine.run(y, 4.0)
    found, climbed_from = outer_mode(engine._fits[0].state.laplace, torch.tensor([0, 1])), list[Tensor]()
    modes = torch.tensor([[0.3, 0.3], [-2.0, 0.3]])
    beyond_a_valley = modes[(modes - found.centre).norm(dim=-1).argmax()]
    places = torch.stack([found.centre + torch.tensor([0.3, 1.5]), beyond_a_valley])
    monkeypatch.setattr(hyperparameter_modes, "prior_draws", lambda _: places)
    drawn_alone = torch.arange(len(found.profile) + len(places)) >= len(found.profile)
    monkeypatch.setattr(hyperparameter_modes, "other_places", lambda *_: drawn_alone)
    monkeypatch.setattr(hyperparameter_modes, "_is_another", lambda _, place, __: climbed_from.append(place) or True)
    assert torch.equal(hyperparameter_modes.secondary_modes(found, 0.02), places[1:])
    assert torch.equal(torch.stack(climbed_from), places[1:])


def two_loadings(Y: Tensor) -> None:
    a, b = (pyro.sample(name, dist.Normal(0.0, 1.0)) for name in "ab")
    with pyro.plate("rows", len(Y)):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("Y", dist.Normal(torch.stack([a * w, b * w], -1), 0.4).to_event(1), obs=Y)


def test_the_mirror_image_of_two_loadings_is_seen_and_that_of_one_is_integrated() -> None:
    generator = torch.Generator().manual_seed(0)
    w, noise = (torch.randn(20, k, generator=generator, dtype=torch.float64) for k in (1, 2))
    Y = w * torch.tensor([1.2, 0.8]) + 0.4 * noise
    with pytest.raises(NotAMode, match=r"\['a', 'b'\] has several modes"):
        LaplaceEvidence(two_loadings, marginalise=["a", "b"], stop=Stop(progress=False)).run(Y)
    posterior = LaplaceEvidence(two_loadings, marginalise=["a"], stop=Stop(progress=False)).run(Y)
    loadings = torch.linspace(-4.0, 4.0, 161, dtype=torch.float64)
    a, b = torch.meshgrid(loadings, loadings, indexing="ij")
    covariance = torch.stack([a * a + 0.16, a * b, a * b, b * b + 0.16], -1).unflatten(-1, (2, 2))
    rows = dist.MultivariateNormal(torch.zeros(2, dtype=torch.float64), covariance).log_prob(Y[:, None, None])
    value = rows.sum(0) + dist.Normal(0.0, 1.0).log_prob(torch.stack([a, b])).sum(0)
    expected = float(value.flatten().logsumexp(0)) + 2.0 * math.log(0.05)
    assert float(posterior.log_evidence) == pytest.approx(expected, abs=0.1)


def counts_over_time(y: Tensor) -> None:
    scale, coefficient = pyro.sample("scale", dist.HalfNormal(1.0)), pyro.sample("coefficient", dist.Beta(4.0, 2.0))
    x = pyro.sample("x", AR1(scale, coefficient, len(y)))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson((1.0 + x).exp()), obs=y)


def test_the_last_step_to_a_mode_that_is_integrated_around_is_newtons() -> None:
    """The search ends where a step promises less than a thousandth of a nat; what is integrated around is the mode."""
    t = torch.arange(240.0)
    engine = LaplaceEvidence(counts_over_time, stop=Stop(progress=False))
    found = engine.run((1.0 + 0.7 * (t / 9.0).sin() + 0.5 * (2.1 * t).sin()).exp().round()).integral.outer_mode
    end = engine._fits[0].state
    left = float(end.slope.total @ torch.linalg.solve(found.precision, end.slope.total))
    assert 1e-6 < left < 2e-3 and has_arrived(found)
    far = outer_mode(laplace_state(found.state.problem, found.centre + 0.3, found.state.u), found.marginalised)
    there = newton_step(far, slope(far.state).total)  # too far for one step
    assert has_arrived(there) and torch.allclose(there.centre, found.centre, atol=1e-3)
