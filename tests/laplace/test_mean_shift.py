"""From the mode to the mean: against digamma, quadrature over groups, and one form of a density against another."""

import math
from collections.abc import Callable
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence
from pyro_evidence.laplace.mean_shift import at_mean, mean_shift
from pyro_evidence.numerics.quadrature.rules import quasi_normal
from pyro_evidence.posterior.nested import NestedPosterior
from pyro_evidence.structure.recognise import recognise
from tests.models_for_tests.posterior_models import unskewed


def waiting(shape: float) -> None:
    """A rate whose posterior is a Gamma variable of this shape, and of rate 2."""
    rate = pyro.sample("rate", dist.Gamma(shape - 1.0, 1.0))
    pyro.sample("y", dist.Exponential(rate), obs=torch.tensor(1.0))


@pytest.mark.parametrize("shape", [2.0, 5.0, 20.0])
def test_the_logarithm_of_a_gamma_variable(shape: float) -> None:
    """Oracle: its mean is digamma; the error is of the third order."""
    posterior = unskewed(LaplaceEvidence(waiting, marginalise=()).run(shape))
    mean = float(torch.digamma(torch.tensor(shape))) - math.log(2.0)
    found = float(posterior.median()["rate"].log())
    assert found == pytest.approx(mean, abs=0.1 / shape**3)
    assert abs(float(posterior.mode["rate"].log()) - mean) > 0.4 / shape
    first_moment = float(posterior.get_samples(20_000, seed=0)["rate"].mean())
    assert first_moment == pytest.approx(0.5 * shape, rel=0.03 + 0.1 / shape**2)


Observed = Callable[[Tensor], dist.TorchDistribution]
RATES: Observed = lambda eta: dist.Poisson(eta.exp())  # noqa: E731
LABELS: Observed = lambda eta: dist.Bernoulli(logits=eta)  # noqa: E731


def groups(observed: Observed, loc: float, scale: float, num: int, per: int) -> tuple[Callable[[], None], Tensor]:
    """An intercept and normal effects of groups on a predictor, and the data, ``(num, per)``."""
    generator = torch.Generator().manual_seed(0)
    eta = loc + scale * torch.randn(num, 1, generator=generator).expand(-1, per)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        y = observed(eta).sample()
    group = torch.arange(num).repeat_interleave(per)

    def model() -> None:
        a = pyro.sample("a", dist.Normal(0.0, 5.0))
        with pyro.plate("groups", num):
            b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("data", num * per):
            pyro.sample("y", observed(a + scale * b[group]), obs=y.flatten())

    return model, y


def moments(observed: Observed, y: Tensor, scale: float, a: Tensor) -> tuple[float, float]:
    """Mean and deviation of the intercept, each group's effect by a sum over 401 places."""
    b = torch.linspace(-8.0, 8.0, 401)
    terms = observed(a[:, None] + scale * b)
    height = sum(sum(terms.log_prob(each) for each in row).sub(0.5 * b.square()).logsumexp(-1) for row in y)
    mass = (height - 0.5 * (a / 5.0).square()).softmax(0)
    mean = mass @ a
    return float(mean), float((mass @ (a - mean).square()).sqrt())


@pytest.mark.parametrize(
    ("observed", "loc", "scale", "num", "per"),
    [(RATES, -1.0, 1.0, 50, 2), (RATES, -2.0, 1.5, 60, 2), (LABELS, -3.0, 1.5, 100, 5), (RATES, -1.0, 1.0, 150, 2)],
)
def test_the_intercept_of_sparse_data(observed: Observed, loc: float, scale: float, num: int, per: int) -> None:
    """Oracle: quadrature; the mode is a deviation off and more, in dense matrices and in blocks."""
    model, y = groups(observed, loc, scale, num, per)
    posterior = LaplaceEvidence(model).run()
    width = 9.0 * float(posterior.state.precision.variance[0, posterior.state.problem.joint.latents.slices["a"]].sqrt())
    at = float(posterior.mode["a"])
    mean, sd = moments(observed, y, scale, torch.linspace(at - width, at + width, 241))
    assert abs(at - mean) > 1.0 * sd
    assert float(posterior.median()["a"]) == pytest.approx(mean, abs=0.15 * sd)
    assert float(posterior.quantiles([0.5])["a"]) == float(posterior.median()["a"])
    draws = posterior.get_samples(4_000, seed=0)["a"]
    assert float(draws.mean()) == pytest.approx(mean, abs=0.2 * sd)
    assert float(draws.std()) == pytest.approx(sd, rel=0.15)
    assert posterior.diagnostics(100)["mean_shift"] > 1.0


def test_blocks_and_dense_matrices_agree() -> None:
    model, _ = groups(RATES, -1.0, 1.0, 210, 2)
    state = LaplaceEvidence(model).run().state
    assert state.problem.factors is not None
    dense = replace(state.problem, structure=recognise(state.problem.joint, factors=False))
    assert dense.form is None
    found = [mean_shift(problem, state.theta, state.u, state.precision) for problem in (state.problem, dense)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-10)


def test_a_gaussian_process_and_dense_matrices_agree() -> None:
    x = torch.linspace(0.0, 1.0, 12)
    K = torch.exp(-2.0 * (x.unsqueeze(-1) - x).abs())
    y = torch.tensor([0.0, 0.0, 1.0, 0.0, 2.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 3.0])

    def model() -> None:
        f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(12), K))
        with pyro.plate("data", 12):
            pyro.sample("y", dist.Poisson(f.exp()), obs=y)

    posterior = LaplaceEvidence(model).run()
    state, moved = posterior.state, at_mean(posterior.state)
    assert state.problem.latent is not None and moved is not None
    dense = replace(state.problem, structure=replace(state.problem.structure, known=None))
    shift = mean_shift(dense, state.theta, state.u, state.precision)
    torch.testing.assert_close(moved.u - state.u, shift, rtol=0, atol=2e-3)  # steps end at a part of a deviation
    assert float(shift.abs().max()) > 0.1
    torch.testing.assert_close(K @ moved.precision.dual, moved.u, rtol=0, atol=1e-10)


def test_a_gaussian_posterior_stays_where_it_is() -> None:
    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=torch.tensor(2.0))

    posterior = LaplaceEvidence(model).run()
    assert torch.equal(posterior.median()["w"], posterior.mode["w"])
    assert posterior.diagnostics(100)["mean_shift"] == 0.0


def test_where_the_series_says_nothing_the_mode_is_kept() -> None:
    """A normal variable whose precision at the mode is that of no neighbourhood: the third derivative is all there."""

    def model() -> None:
        x = pyro.sample("x", dist.Normal(0.0, 10.0))
        pyro.factor("valley", -(0.02 * x.square() + 0.3 * x**3 + x**4))

    posterior = unskewed(LaplaceEvidence(model).run())
    assert math.isnan(posterior.diagnostics(100)["mean_shift"])
    assert torch.equal(posterior.median()["x"], posterior.mode["x"])


def test_means_move_around_marginalised_sites() -> None:
    """Of 210 groups, whose scale is integrated: as many deviations as with the scale held at its mode, roughly."""
    y = groups(RATES, -1.0, 1.0, 210, 2)[1]
    group = torch.arange(210).repeat_interleave(2)

    def model() -> None:
        a, s = pyro.sample("a", dist.Normal(0.0, 5.0)), pyro.sample("s", dist.HalfNormal(1.0))
        with pyro.plate("groups", 210):
            b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 420):
            pyro.sample("y", dist.Poisson((a + s * b[group]).exp()), obs=y.flatten())

    posterior = LaplaceEvidence(model).run()
    assert isinstance(posterior, NestedPosterior) and posterior.marginalised_sites == ("s",)
    a, s = (posterior.get_samples(200, seed=0)[name] for name in ("a", "s"))
    places = torch.linspace(-2.0, 0.0, 61)
    mean, sd = moments(RATES, y, float(s.mean()), places)
    assert float(a.mean()) == pytest.approx(mean, abs=0.35 * sd)  # of other scales too
    assert float(posterior.mode["a"]) > mean + 1.0 * sd
    assert float(posterior.quantiles(0.5)["a"]) == pytest.approx(float(a.median()), abs=0.15 * sd)
    u, log_density = posterior.proposal.drawn(quasi_normal(4, 212))
    torch.testing.assert_close(posterior.proposal.log_prob(u), log_density, rtol=0, atol=1e-5)
