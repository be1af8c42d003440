"""The marginal model against closed forms, against the joint model, and under NUTS and SVI."""

import math
import pickle
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.infer.mcmc.util import initialize_model
from pyro.ops.integrator import potential_grad
from pyro.optim import Adam
from torch import Tensor

from pyro_evidence import BadInput, LaplaceEvidence, LaplaceMarginal, Stop, UnsupportedModel
from pyro_evidence.errors import NotAMode
from pyro_evidence.infer import laplace_marginal
from pyro_evidence.models.basis import Learned
from pyro_evidence.models.gp import gp_classifier, gp_regression
from pyro_evidence.models.kernels import RBF

QUIET = Stop(progress=False)


def data(num_data: int = 15, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = 2.0 * torch.rand(num_data, 1, generator=generator) - 1.0
    return X, (3.0 * X[:, 0]).sin() + 0.2 * torch.randn(num_data, generator=generator)


def regression() -> Any:
    return gp_regression(RBF(dist.LogNormal(-0.5, 0.5), dist.LogNormal(0.0, 0.7)), beta=dist.Gamma(4.0, 0.2))


def by_hand(X: Tensor, t: Tensor) -> None:
    """The same with the function integrated out on paper."""
    lengthscale = pyro.sample("kernel.lengthscale", dist.LogNormal(-0.5, 0.5))
    variance = pyro.sample("kernel.variance", dist.LogNormal(0.0, 0.7))
    beta = pyro.sample("beta", dist.Gamma(4.0, 0.2))
    K = RBF(1.0, 1.0).resolved(lambda n, *_: lengthscale if "length" in n else variance)(X)
    K = K + (1e-6 + 1.0 / beta) * torch.eye(len(X))
    pyro.sample("t", dist.MultivariateNormal(torch.zeros(len(X)), K), obs=t)


def potential(model: Any, *args: Any) -> Any:
    return initialize_model(model, model_args=args)[1]


def test_density_and_gradient_are_those_of_the_function_integrated_on_paper() -> None:
    X, t = data()
    ours, exact = potential(LaplaceMarginal(regression(), integrate=["f"]), X, t), potential(by_hand, X, t)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        names = ("kernel.lengthscale", "kernel.variance", "beta")
        z = {n: torch.randn((), generator=generator).requires_grad_() for n in names}
        a, b = ours(z), exact(z)
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(
            torch.autograd.grad(a, list(z.values())), torch.autograd.grad(b, list(z.values())), rtol=1e-8, atol=1e-8
        )


def test_only_the_rest_is_seen() -> None:
    X, t = data()
    model = gp_classifier(RBF(dist.LogNormal(0.0, 1.0), Learned(2.0)))
    trace = poutine.trace(LaplaceMarginal(model, integrate=["f"])).get_trace(X, (t > 0).double())
    assert set(trace.stochastic_nodes) == {"kernel.lengthscale"}
    assert trace.observation_nodes == ["log_evidence"] and trace.param_nodes == ["kernel.variance"]
    fixed = poutine.condition(model, data={"kernel.lengthscale": trace.nodes["kernel.lengthscale"]["value"]})
    exact = LaplaceEvidence(poutine.block(fixed, hide=["kernel.lengthscale"]), maximise=(), stop=QUIET).run(X, t > 0)
    trace.compute_log_prob()
    torch.testing.assert_close(trace.nodes["log_evidence"]["log_prob_sum"].detach(), exact.log_evidence)


def groups(x: Tensor) -> None:
    """No Gaussian process: means of groups under an unknown spread, exact by hand."""
    spread = pyro.sample("spread", dist.LogNormal(0.0, 1.0))
    with pyro.plate("groups", len(x)):
        mean = pyro.sample("mean", dist.Normal(1.0, spread))
        pyro.sample("x", dist.Normal(mean, 0.5), obs=x)


def test_any_model_can_be_marginalised() -> None:
    x = torch.tensor([0.3, 1.9, 2.5, 0.8])
    ours = potential(LaplaceMarginal(groups, integrate=["mean"]), x)
    z = torch.tensor(0.4, requires_grad=True)
    value = ours({"spread": z})
    spread = dist.Normal(1.0, (z.exp().square() + 0.25).sqrt())
    exact = -(spread.log_prob(x).sum() + dist.LogNormal(0.0, 1.0).log_prob(z.exp()) + z)
    torch.testing.assert_close(value, exact, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.autograd.grad(value, z), torch.autograd.grad(exact, z), rtol=1e-9, atol=1e-9)


def test_nuts_walks_as_over_the_function_integrated_on_paper() -> None:
    X, t = data(10)
    marginal = LaplaceMarginal(regression(), integrate=["f"])
    pickle.dumps(marginal)
    start = dict.fromkeys(("kernel.lengthscale", "kernel.variance", "beta"), torch.tensor(0.0))
    draws = []
    for model in (marginal, by_hand):
        pyro.set_rng_seed(0)
        kernel = NUTS(model, max_tree_depth=3)
        mcmc = MCMC(kernel, num_samples=5, warmup_steps=5, initial_params=start, disable_progbar=True)
        mcmc.run(X, t)
        draws.append(mcmc.get_samples())
    assert all(len(v.unique()) > 1 for v in draws[0].values())
    torch.testing.assert_close(draws[0], draws[1], rtol=1e-4, atol=1e-6)


def test_latents_given_draws_of_the_rest() -> None:
    X, t = data()
    marginal = LaplaceMarginal(regression(), integrate=["f"])
    rest = {"kernel.lengthscale": torch.tensor(0.6), "kernel.variance": torch.tensor(1.0), "beta": torch.tensor(20.0)}
    samples = {n: v.expand(150) for n, v in rest.items()}
    f = marginal.latents(samples, X, t)["f"]
    K = RBF(0.6, 1.0)(X) + 1e-6 * torch.eye(len(X))
    gain = K @ torch.linalg.inv(K + 0.05 * torch.eye(len(X)))
    sd = (K - gain @ K).diagonal().sqrt()
    assert f.shape == (150, 15) and bool(((f.mean(0) - gain @ t).abs() < 4.5 * sd / 150**0.5).all())
    exact = dist.MultivariateNormal(torch.zeros(15), K + 0.05 * torch.eye(15)).log_prob(t)
    heights = marginal.log_evidences({n: v[:2] for n, v in samples.items()}, X, t)
    torch.testing.assert_close(heights, exact.expand(2), rtol=1e-9, atol=1e-9)
    with pytest.raises(BadInput, match=r"lack the site\(s\) \['beta'\]"):
        marginal.latents({n: v for n, v in samples.items() if n != "beta"}, X, t)


def test_svi_learns_a_guide_and_a_param() -> None:
    X, t = data()
    model = gp_regression(RBF(dist.LogNormal(-0.5, 0.5), Learned(3.0)), beta=25.0)
    marginal = LaplaceMarginal(model, integrate=["f"])
    svi = SVI(marginal, AutoNormal(marginal), Adam({"lr": 0.05}), Trace_ELBO())
    losses = [svi.step(X, t) for _ in range(60)]
    assert sum(losses[-15:]) < sum(losses[:15])
    assert 0.05 < float(pyro.param("kernel.variance").detach()) < 3.0


def test_letters() -> None:
    X, t = data()
    with pytest.raises(BadInput, match="leaves nothing to sample"):
        LaplaceMarginal(gp_regression(RBF(1.0, 1.0), beta=1.0), integrate=["f"])(X, t)
    with pytest.raises(BadInput, match=r"there is no \['g'\]"):
        LaplaceMarginal(regression(), integrate=["g"])(X, t)
    with pytest.raises(BadInput, match="expected a list of names"):
        LaplaceMarginal(regression(), integrate="f")
    with pytest.raises(BadInput, match="callable Pyro model"):
        LaplaceMarginal(3, integrate=["f"])  # type: ignore[arg-type]


def test_second_derivatives_are_refused() -> None:
    X, t = data()
    marginal = LaplaceMarginal(regression(), integrate=["f"])
    ours = potential(marginal, X, t)
    z = {n: torch.zeros((), requires_grad=True) for n in ("kernel.lengthscale", "kernel.variance", "beta")}
    first = torch.autograd.grad(ours(z), list(z.values()), create_graph=True)
    with pytest.raises(UnsupportedModel, match="first derivatives only"):
        torch.autograd.grad(sum(first), list(z.values()))
    with pytest.raises(UnsupportedModel, match="first derivatives only"):
        LaplaceEvidence(marginal, stop=QUIET).run(X, t)


def test_a_region_without_a_mode_has_no_density_and_is_counted() -> None:
    X, t = data()
    marginal = LaplaceMarginal(regression(), integrate=["f"])
    ours = potential(marginal, X, t)
    z = {"kernel.lengthscale": torch.tensor(0.0), "kernel.variance": torch.tensor(800.0), "beta": torch.tensor(0.0)}
    values, failures = marginal.num_values, marginal.num_failures
    assert not math.isfinite(float(potential_grad(ours, z)[1]))  # as NUTS asks: a singular matrix is a divergence
    assert marginal.num_failures - failures <= marginal.num_values - values <= 1


def test_inner_failures_are_counted_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    marginal = LaplaceMarginal(groups, integrate=["mean"])
    ours = potential(marginal, torch.tensor([0.3, 1.9, 2.5, 0.8]))
    assert math.isfinite(float(ours({"spread": torch.tensor(-1.0)})))

    def lost(*args: object, **settings: object) -> None:
        raise NotAMode("the search ended on a slope.")

    monkeypatch.setattr(laplace_marginal, "search_modes", lost)
    before = marginal.num_values
    with pytest.warns(
        UserWarning, match=r"no mode of \['mean'\].*'spread': 1.0.*ended on a slope.*num_failures counts"
    ):
        assert float(ours({"spread": torch.tensor(0.0)})) == math.inf
    assert float(ours({"spread": torch.tensor(0.5)})) == math.inf  # and nothing more is said
    assert (marginal.num_values - before, marginal.num_failures) == (2, 2)


def test_a_search_begins_where_the_last_one_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts under a Gaussian process: the same numbers from a warm start, which is nearer than the origin."""
    X, t = data(30)
    model = gp_classifier(RBF(dist.LogNormal(0.0, 1.0), 1.0))
    starts: list[tuple[Tensor, bool]] = []
    search = laplace_marginal.search_modes

    def watched(problem, u, theta, *, cold):  # type: ignore[no-untyped-def]
        starts.append((u, cold))
        return search(problem, u, theta, cold=cold)

    monkeypatch.setattr(laplace_marginal, "search_modes", watched)
    marginal = LaplaceMarginal(model, integrate=["f"])
    ours = potential(marginal, X, (t > 0).double())
    places = [torch.tensor(v) for v in (0.0, 0.1, 0.2)]
    warm = [float(ours({"kernel.lengthscale": z})) for z in places]
    assert [cold for _, cold in starts[-2:]] == [False, False] and bool(starts[-1][0].abs().max() > 0.1)
    for z, value in zip(places, warm, strict=True):
        cold = potential(LaplaceMarginal(model, integrate=["f"]), X, (t > 0).double())
        assert float(cold({"kernel.lengthscale": z})) == pytest.approx(value, abs=1e-8)
