"""Well-known Pyro scripts with one line changed: the engine.  Each says what the trust report must say."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import constraints
from pyro.infer import Predictive
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

from pyro_evidence import LaplaceEvidence, Start, find_modes, importance_sampling
from pyro_evidence.program import LogJoint

SCHOOLS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
SCHOOL_ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def eight_schools(errors: Tensor, y: Tensor) -> None:
    """Non-centred, as in the Pyro example."""
    eta = pyro.sample("eta", dist.Normal(0.0, 1.0).expand([8]).to_event(1))
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    tau = pyro.sample("tau", dist.HalfCauchy(25.0))
    pyro.sample("y", dist.Normal(mu + tau * eta, errors).to_event(1), obs=y)


def eight_schools_log_evidence() -> float:
    """Oracle: eta and mu integrated on paper, tau by quadrature on the log scale."""
    log_tau = torch.linspace(-12.0, 9.0, 4001)
    tau = log_tau.exp()
    covariance = torch.diag_embed(SCHOOL_ERRORS.square() + tau.square().unsqueeze(-1)) + 100.0
    marginal = dist.MultivariateNormal(torch.zeros(8), covariance).log_prob(SCHOOLS)
    total = marginal + dist.HalfCauchy(25.0).log_prob(tau) + log_tau
    return float(total.logsumexp(0)) + math.log(21.0 / 4000.0)


def test_eight_schools_evidence_is_the_quadrature_or_k_hat_speaks() -> None:
    posterior = LaplaceEvidence(eight_schools).run(SCHOOL_ERRORS, SCHOOLS)
    found = importance_sampling(posterior, num_samples=40_000)
    assert (
        abs(found.log_evidence - eight_schools_log_evidence()) < max(0.1, 4.0 * found.standard_error)
        or not found.reliable
    )
    samples = posterior.get_samples(500, seed=0)
    assert {n: v.shape for n, v in samples.items()} == {"eta": (500, 8), "mu": (500,), "tau": (500,)}
    assert (samples["tau"] > 0).all()


def test_eight_schools_with_tau_maximised_is_exact() -> None:
    posterior = LaplaceEvidence(eight_schools, maximise=["tau"]).run(SCHOOL_ERRORS, SCHOOLS)
    tau = posterior.hyperparameters["tau"]
    covariance = torch.diag(SCHOOL_ERRORS.square() + tau.square()) + 100.0
    exact = dist.MultivariateNormal(torch.zeros(8), covariance).log_prob(SCHOOLS)
    torch.testing.assert_close(posterior.log_evidence, exact, rtol=1e-9, atol=1e-9)


def gaussian_mixture(data: Tensor) -> None:
    """The Pyro tutorial's: latent weights, one scale, enumerated assignment."""
    weights = pyro.sample("weights", dist.Dirichlet(0.5 * torch.ones(2)))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 2.0))
    with pyro.plate("components", 2):
        locs = pyro.sample("locs", dist.Normal(0.0, 10.0))
    with pyro.plate("data", len(data)):
        assignment = pyro.sample("assignment", dist.Categorical(weights), infer={"enumerate": "parallel"})
        pyro.sample("obs", dist.Normal(locs[assignment], scale), obs=data)


def test_gaussian_mixture_has_both_labellings_and_right_responsibilities() -> None:
    data = torch.tensor([0.0, 1.0, 10.0, 11.0, 12.0])
    posterior = LaplaceEvidence(gaussian_mixture, start=Start(restarts=8)).run(data)
    modes = find_modes(posterior, start=Start(restarts=8))
    assert modes.num_components == 2
    pairs = {tuple(s.problem.joint.latents.constrained(s.u)["locs"].round().tolist()) for s in modes.states}
    assert {(0.0, 11.0), (11.0, 0.0)} <= pairs or {(1.0, 11.0), (11.0, 1.0)} <= pairs
    resp = posterior.state.problem.joint.responsibilities(posterior.state.u, posterior.state.theta)
    assert (resp.argmax(-1)[:2] != resp.argmax(-1)[2:3]).all()


def toy_mixture(data: Tensor) -> None:
    """Whether B is hidden; A, C are seen.  Ten thousand points."""
    p_a = pyro.sample("p_A", dist.Beta(1.0, 1.0))
    p_b = pyro.sample("p_B", dist.Beta(torch.ones(2), torch.ones(2)).to_event(1))
    p_c = pyro.sample("p_C", dist.Beta(torch.ones(2), torch.ones(2)).to_event(1))
    with pyro.plate("data", len(data)):
        a = pyro.sample("A", dist.Bernoulli(p_a), obs=data[:, 0])
        b = pyro.sample("B", dist.Bernoulli(p_b[a.long()]), infer={"enumerate": "parallel"})
        pyro.sample("C", dist.Bernoulli(p_c[b.long()]), obs=data[:, 1])


def test_toy_mixture_of_ten_thousand_points_says_that_it_is_not_identified() -> None:
    a = torch.bernoulli(torch.full((10_000,), 0.5), generator=generator())
    b = torch.bernoulli(torch.where(a > 0, 0.8, 0.2), generator=generator(1))
    c = torch.bernoulli(torch.where(b > 0, 0.9, 0.1), generator=generator(2))
    posterior = LaplaceEvidence(toy_mixture, start=Start(restarts=1, tour=0)).run(torch.stack([a, c], -1))
    assert float(posterior.mode["p_A"]) == pytest.approx(float(a.mean()), abs=1e-3)
    assert not importance_sampling(posterior, num_samples=1000).reliable


def lkj(y: Tensor) -> None:
    theta = pyro.sample("theta", dist.HalfCauchy(1.0).expand([3]).to_event(1))
    tril = pyro.sample("L_omega", dist.LKJCholesky(3, torch.tensor(1.0)))
    with pyro.plate("observations", len(y)):
        pyro.sample("obs", dist.MultivariateNormal(y.new_zeros(3), scale_tril=theta.sqrt().diag() @ tril), obs=y)


def test_lkj_finds_the_correlations() -> None:
    truth = torch.tensor([[1.0, 0.6, 0.0], [0.6, 1.0, -0.3], [0.0, -0.3, 1.0]])
    y = torch.randn(400, 3, generator=generator()) @ torch.linalg.cholesky(truth).T
    posterior = LaplaceEvidence(lkj).run(y)
    tril = posterior.mode["L_omega"]
    torch.testing.assert_close(tril @ tril.T, torch.corrcoef(y.T), atol=0.03, rtol=0.0)
    assert importance_sampling(posterior).reliable


def capture_recapture(captured: Tensor) -> None:
    """Cormack-Jolly-Seber, model 1: an animal's life is summed out along a Markov chain."""
    phi = pyro.sample("phi", dist.Uniform(0.0, 1.0))
    rho = pyro.sample("rho", dist.Uniform(0.0, 1.0))
    with pyro.plate("animals", len(captured), dim=-1):
        z, seen = torch.ones(len(captured)), torch.zeros(len(captured), dtype=torch.bool)
        for t in pyro.markov(range(captured.shape[1])):
            survival = torch.where(seen, z * phi, 1.0)  # alive until it is first seen
            z = pyro.sample(f"z_{t}", dist.Bernoulli(survival), infer={"enumerate": "parallel"})
            with pyro.poutine.mask(mask=seen):
                pyro.sample(f"y_{t}", dist.Bernoulli(z * rho), obs=captured[:, t])
            seen = seen | (captured[:, t] > 0)


def life(phi: float, rho: float, num: int, num_times: int) -> Tensor:
    alive, rows = torch.ones(num), []
    for t in range(num_times):
        alive = alive * torch.bernoulli(torch.full((num,), phi), generator=generator(t)) if t else alive
        seen = torch.bernoulli(torch.full((num,), rho), generator=generator(100 + t)) if t else torch.ones(num)
        rows.append(alive * seen)
    return torch.stack(rows, -1)


def test_capture_recapture_finds_survival() -> None:
    posterior = LaplaceEvidence(capture_recapture).run(life(0.7, 0.6, 200, 5))
    sd = {n: v.std() for n, v in posterior.get_samples(1000, seed=0).items()}
    assert abs(float(posterior.mode["phi"]) - 0.7) < 3.0 * sd["phi"]
    assert abs(float(posterior.mode["rho"]) - 0.6) < 3.0 * sd["rho"]
    assert importance_sampling(posterior, num_samples=2000).reliable


def poisson_gamma(X: Tensor, counts: Tensor | None = None) -> None:
    scale = pyro.param("scale", lambda: torch.tensor(1.0), constraint=constraints.positive)
    coef = pyro.sample("coef", dist.Normal(0.0, scale).expand([X.shape[1]]).to_event(1))
    concentration = pyro.sample("concentration", dist.LogNormal(0.0, 1.0))
    with pyro.plate("bins", len(X)):
        rate = concentration / (X @ coef).exp()
        pyro.sample("counts", dist.GammaPoisson(concentration, rate), obs=counts)


def test_gamma_poisson_regression_with_a_learned_scale() -> None:
    X = torch.randn(100, 2, generator=generator())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        counts = dist.GammaPoisson(4.0, 4.0 / (X @ torch.tensor([1.0, -0.5])).exp()).sample()
    posterior = LaplaceEvidence(poisson_gamma).run(X, counts)
    assert posterior.mode["coef"].tolist() == pytest.approx([1.0, -0.5], abs=0.3)
    assert importance_sampling(posterior).reliable
    drawn = Predictive(posterior.model, guide=posterior.guide, num_samples=20)(X)
    assert drawn["counts"].shape == (20, 100)


class Regression(PyroModule):
    """Bayesian linear regression as in the tutorial."""

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.linear = PyroModule[nn.Linear](num_inputs, 1)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, num_inputs]).to_event(2))
        self.linear.bias = PyroSample(dist.Normal(0.0, 10.0).expand([1]).to_event(1))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        sigma = pyro.sample("sigma", dist.Uniform(0.0, 10.0))
        mean = self.linear(x).squeeze(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(mean, sigma), obs=y)
        return mean


def test_pyro_module_regression_is_least_squares_with_many_data() -> None:
    X = torch.randn(170, 3, generator=generator())
    y = X @ torch.tensor([0.5, -1.0, 0.2]) + 9.0 + 0.9 * torch.randn(170, generator=generator(1))
    posterior = LaplaceEvidence(Regression(3)).run(X, y)
    design = torch.cat([X, torch.ones(170, 1)], -1)
    slope = torch.linalg.lstsq(design, y.unsqueeze(-1)).solution.squeeze(-1)
    torch.testing.assert_close(posterior.mode["linear.weight"][0], slope[:3], atol=0.03, rtol=0.0)
    torch.testing.assert_close(posterior.mode["linear.bias"][0], slope[3], atol=0.03, rtol=0.0)
    assert importance_sampling(posterior).reliable


def gaussian_process(x: Tensor, y: Tensor) -> None:
    """Lengthscale and noise are latent; the function is integrated already."""
    lengthscale = pyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    noise = pyro.sample("noise", dist.LogNormal(-3.0, 0.5))
    covariance = process_covariance(x, lengthscale, noise)
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), covariance), obs=y)


def process_covariance(x: Tensor, lengthscale: Tensor, noise: Tensor) -> Tensor:
    square = ((x.unsqueeze(-1) - x) / lengthscale[..., None, None]).square()
    return 0.25 * torch.exp(-0.5 * square) + (0.01 + noise[..., None, None]) * torch.eye(len(x))


def process_log_evidence(x: Tensor, y: Tensor) -> float:
    """Oracle: quadrature over both log hyperparameters."""
    a, b = torch.meshgrid(torch.linspace(-3.0, 3.0, 121), torch.linspace(-6.0, 0.0, 121), indexing="ij")
    a, b = a.flatten(), b.flatten()
    likelihood = dist.MultivariateNormal(torch.zeros(len(x)), process_covariance(x, a.exp(), b.exp())).log_prob(y)
    prior = dist.Normal(0.0, 0.5).log_prob(a) + dist.Normal(-3.0, 0.5).log_prob(b)
    return float((likelihood + prior).logsumexp(0)) + 2.0 * math.log(0.05)


def test_gaussian_process_evidence_is_the_quadrature() -> None:
    x = torch.linspace(0.0, 5.0, 20)
    y = 0.5 * torch.sin(3.0 * x) + 0.2 * torch.randn(20, generator=generator())
    found = importance_sampling(LaplaceEvidence(gaussian_process).run(x, y))
    assert found.reliable
    assert abs(found.log_evidence - process_log_evidence(x, y)) < 4.0 * found.standard_error


def horseshoe(X: Tensor, y: Tensor) -> None:
    """Centred weights, half-Cauchy scales; these must be in ``maximise``, or the joint has no mode."""
    local = pyro.sample("local", dist.HalfCauchy(1.0).expand([X.shape[1]]).to_event(1))
    w = pyro.sample("w", dist.Normal(0.0, local).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def test_sparse_regression_with_local_scales_in_hyper() -> None:
    X = torch.randn(60, 6, generator=generator())
    y = X @ torch.tensor([2.0, 0.0, 0.0, -1.0, 0.0, 0.0]) + 0.5 * torch.randn(60, generator=generator(1))
    posterior = LaplaceEvidence(horseshoe, maximise=["local"]).run(X, y)
    w, local = posterior.mode["w"], posterior.hyperparameters["local"]
    assert w[[0, 3]].tolist() == pytest.approx([2.0, -1.0], abs=0.3)
    assert (w[[1, 2, 4, 5]].abs() < 0.15).all()
    assert local[[0, 3]].min() > local[[1, 2, 4, 5]].max()


def network(x: Tensor, y: Tensor) -> None:
    """A BNN of three tanh units."""
    first = pyro.sample("first", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
    second = pyro.sample("second", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    inputs = torch.stack([x, torch.ones_like(x)], -1)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(torch.tanh(inputs @ first) @ second, 0.2), obs=y)


def test_bnn_has_symmetric_modes_and_k_hat_says_so() -> None:
    x = torch.linspace(-2.0, 2.0, 40)
    y = torch.tanh(1.5 * x) + 0.2 * torch.randn(40, generator=generator())
    posterior = LaplaceEvidence(network, start=Start(restarts=8)).run(x, y)
    assert not importance_sampling(posterior, num_samples=2000).reliable
    fitted = torch.tanh(torch.stack([x, torch.ones(40)], -1) @ posterior.mode["first"]) @ posterior.mode["second"]
    assert float((fitted - y).square().mean().sqrt()) < 0.3


def test_models_of_the_gallery_are_fixed_densities() -> None:
    joint = LogJoint(eight_schools, (SCHOOL_ERRORS, SCHOOLS))
    assert joint.latents.size == 10
