"""Pyro's own examples and tutorials (``examples/``, ``tutorial/source/``), with data small or simulated."""

import functools
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.reparam import LocScaleReparam, StableReparam
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_evidence import EvidenceEM
from tests.gallery.programs.program import Program, coin, normal, poisson, random, uniform

T = torch.tensor
FIRST, HIT = T([45.0] * 18).double(), T([18, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7]).double()
EFFECTS = T([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]).double()
ERRORS = T([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]).double()


# --- baseball.py ---


def fully_pooled(at_bats: Tensor, hits: Tensor) -> None:
    phi = pyro.sample("phi", dist.Uniform(0.0, 1.0))
    with pyro.plate("num_players", len(hits)):
        pyro.sample("obs", dist.Binomial(at_bats, phi), obs=hits)


def not_pooled(at_bats: Tensor, hits: Tensor) -> None:
    with pyro.plate("num_players", len(hits)):
        phi = pyro.sample("phi", dist.Uniform(0.0, 1.0))
        pyro.sample("obs", dist.Binomial(at_bats, phi), obs=hits)


def partially_pooled(at_bats: Tensor, hits: Tensor) -> None:
    m = pyro.sample("m", dist.Uniform(0.0, 1.0))
    kappa = pyro.sample("kappa", dist.Pareto(1.0, 1.5))
    with pyro.plate("num_players", len(hits)):
        phi = pyro.sample("phi", dist.Beta(m * kappa, (1.0 - m) * kappa))
        pyro.sample("obs", dist.Binomial(at_bats, phi), obs=hits)


def beta_binomial(at_bats: Tensor, hits: Tensor) -> None:
    """The averages integrated in closed form."""
    m = pyro.sample("m", dist.Uniform(0.0, 1.0))
    kappa = pyro.sample("kappa", dist.Pareto(1.0, 1.5))
    with pyro.plate("num_players", len(hits)):
        pyro.sample("obs", dist.BetaBinomial(m * kappa, (1.0 - m) * kappa, at_bats), obs=hits)


def partially_pooled_with_logit(at_bats: Tensor, hits: Tensor) -> None:
    loc = pyro.sample("loc", dist.Normal(-1.0, 1.0))
    scale = pyro.sample("scale", dist.HalfCauchy(1.0))
    with pyro.plate("num_players", len(hits)):
        alpha = pyro.sample("alpha", dist.Normal(loc, scale))
        pyro.sample("obs", dist.Binomial(at_bats, logits=alpha), obs=hits)


def partially_pooled_with_logit_in_noise(at_bats: Tensor, hits: Tensor) -> None:
    loc = pyro.sample("loc", dist.Normal(-1.0, 1.0))
    scale = pyro.sample("scale", dist.HalfCauchy(1.0))
    with pyro.plate("num_players", len(hits)):
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        pyro.deterministic("alpha", loc + scale * eta)
        pyro.sample("obs", dist.Binomial(at_bats, logits=loc + scale * eta), obs=hits)


# --- eight_schools ---


def schools_mcmc(sigma: Tensor, y: Tensor) -> None:
    eta = pyro.sample("eta", dist.Normal(torch.zeros(8), torch.ones(8)).to_event(1))
    mu = pyro.sample("mu", dist.Normal(torch.zeros(1), 10.0 * torch.ones(1)).to_event(1))
    tau = pyro.sample("tau", dist.HalfCauchy(scale=25.0 * torch.ones(1)).to_event(1))
    pyro.sample("obs", dist.Normal(mu + tau * eta, sigma).to_event(1), obs=y)


def schools_svi(sigma: Tensor, y: Tensor) -> None:
    """A mean and a spread for each school, as the script has it."""
    with pyro.plate("data", len(y)):
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        tau = pyro.sample("tau", dist.HalfCauchy(scale=25.0))
        pyro.sample("obs", dist.Normal(mu + tau * eta, sigma), obs=y)


# --- capture_recapture/cjs.py ---


def captures(num: int, num_times: int) -> Tensor:
    alive = torch.ones(num, dtype=torch.float64)
    columns = []
    for t in range(num_times):
        alive = alive * coin(torch.full((num,), 0.75).double(), t) if t else alive
        columns.append(alive * coin(torch.full((num,), 0.6).double(), 100 + t) if t else alive)
    return torch.stack(columns, -1)


def lives(history: Tensor, phi: Any, rho: Any) -> None:
    """An animal that is caught first in year 0: whether it lives in each later year is summed out."""
    with pyro.plate("animals", len(history), dim=-1):
        z = torch.ones(len(history))
        for t in pyro.markov(range(1, history.shape[1])):
            z = pyro.sample(f"z_{t}", dist.Bernoulli(phi(t) * z), infer={"enumerate": "parallel"})
            pyro.sample(f"y_{t}", dist.Bernoulli(rho(t) * z), obs=history[:, t])


def lives_summed(history: Tensor, phi: Any, rho: Any) -> None:
    """The same by recursion: the probability of all that is seen from year t on, of a live animal and of a dead one."""
    live = torch.ones(len(history))
    dead = torch.ones(len(history))
    for t in range(history.shape[1] - 1, 0, -1):
        seen = history[:, t]
        after = torch.where(seen > 0, rho(t) * live, (1.0 - rho(t)) * live)
        dead = torch.where(seen > 0, torch.zeros(()), dead)
        live = phi(t) * after + (1.0 - phi(t)) * dead
    pyro.factor("lives", live.log().sum())


def cjs_1(history: Tensor, summed: bool = False) -> None:
    phi = pyro.sample("phi", dist.Uniform(0.0, 1.0))
    rho = pyro.sample("rho", dist.Uniform(0.0, 1.0))
    (lives_summed if summed else lives)(history, lambda t: phi, lambda t: rho)


def cjs_2(history: Tensor, summed: bool = False) -> None:
    rho = pyro.sample("rho", dist.Uniform(0.0, 1.0))
    phi = [pyro.sample(f"phi_{t}", dist.Uniform(0.0, 1.0)) for t in range(1, history.shape[1])]
    (lives_summed if summed else lives)(history, lambda t: phi[t - 1], lambda t: rho)


def cjs_3(history: Tensor, summed: bool = False) -> None:
    rho = pyro.sample("rho", dist.Uniform(0.0, 1.0))
    mean = pyro.sample("phi_mean", dist.Uniform(0.0, 1.0))
    logit_mean = mean.log() - (1.0 - mean).log()
    sigma = pyro.sample("phi_sigma", dist.Uniform(0.0, 10.0))
    logits = [pyro.sample(f"phi_logit_{t}", dist.Normal(logit_mean, sigma)) for t in range(1, history.shape[1])]
    (lives_summed if summed else lives)(history, lambda t: logits[t - 1].sigmoid(), lambda t: rho)


def cjs_4(history: Tensor, summed: bool = False) -> None:
    rho = pyro.sample("rho", dist.Uniform(0.0, 1.0))
    with pyro.plate("groups", 2):
        phi = pyro.sample("phi", dist.Uniform(0.0, 1.0))
    of_animal = phi[torch.arange(len(history)) % 2]
    (lives_summed if summed else lives)(history, lambda t: of_animal, lambda t: rho)


def cjs_5(history: Tensor, summed: bool = False) -> None:
    gamma = [pyro.sample(f"gamma_{t}", dist.Normal(0.0, 10.0)) for t in range(1, history.shape[1])]
    beta = pyro.sample("beta", dist.Normal(0.0, 10.0))
    rho = pyro.sample("rho", dist.Uniform(0.0, 1.0))
    female = torch.arange(len(history)) % 2
    (lives_summed if summed else lives)(history, lambda t: (gamma[t - 1] + beta * female).sigmoid(), lambda t: rho)


def summed(model: Any) -> Any:
    return functools.partial(model, summed=True)


# --- regressions: intro_long, bayesian_regression, mle_map, svi_part_i, intro_part_ii, csis ---


RUGGED = uniform(120, seed=1) * 6.0
AFRICA = coin(torch.full((120,), 0.3).double(), 2)
GDP = 9.2 - 1.9 * AFRICA - 0.2 * RUGGED + 0.4 * AFRICA * RUGGED + 0.9 * normal(120, seed=3)
HEADS = T([1.0] * 6 + [0.0] * 4).double()


def intro_simple(africa: Tensor, rugged: Tensor, gdp: Tensor) -> None:
    a = pyro.param("a", T(0.0))
    b_a = pyro.param("bA", T(0.0))
    b_r = pyro.param("bR", T(0.0))
    b_ar = pyro.param("bAR", T(0.0))
    sigma = pyro.param("sigma", T(1.0), constraint=constraints.positive)
    with pyro.plate("data", len(gdp)):
        pyro.sample("obs", dist.Normal(a + b_a * africa + b_r * rugged + b_ar * africa * rugged, sigma), obs=gdp)


def intro_by_least_squares(africa: Tensor, rugged: Tensor, gdp: Tensor) -> float:
    design = torch.stack([torch.ones_like(africa), africa, rugged, africa * rugged], -1)
    residual = gdp - design @ torch.linalg.lstsq(design, gdp.unsqueeze(-1)).solution.squeeze(-1)
    return float(dist.Normal(0.0, residual.square().mean().sqrt()).log_prob(residual).sum())


def intro_bayesian(africa: Tensor, rugged: Tensor, gdp: Tensor) -> None:
    a = pyro.sample("a", dist.Normal(0.0, 10.0))
    b_a = pyro.sample("bA", dist.Normal(0.0, 1.0))
    b_r = pyro.sample("bR", dist.Normal(0.0, 1.0))
    b_ar = pyro.sample("bAR", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.Uniform(0.0, 10.0))
    with pyro.plate("data", len(gdp)):
        pyro.sample("obs", dist.Normal(a + b_a * africa + b_r * rugged + b_ar * africa * rugged, sigma), obs=gdp)


class BayesianRegression(PyroModule):
    """The tutorial's, of a PyroModule."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = PyroModule[nn.Linear](in_features, out_features)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([out_features, in_features]).to_event(2))
        self.linear.bias = PyroSample(dist.Normal(0.0, 10.0).expand([out_features]).to_event(1))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        sigma = pyro.sample("sigma", dist.Uniform(0.0, 10.0))
        mean = self.linear(x).squeeze(-1)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("obs", dist.Normal(mean, sigma), obs=y)
        return mean


def map_original(data: Tensor) -> None:
    f = pyro.sample("latent_fairness", dist.Beta(10.0, 10.0))
    with pyro.plate("data", len(data)):
        pyro.sample("obs", dist.Bernoulli(f), obs=data)


def map_masked(data: Tensor) -> None:
    with poutine.mask(mask=False):
        f = pyro.sample("latent_fairness", dist.Beta(10.0, 10.0))
    with pyro.plate("data", len(data)):
        pyro.sample("obs", dist.Bernoulli(f), obs=data)


def mle(data: Tensor) -> None:
    f = pyro.param("latent_fairness", T(0.5), constraint=constraints.unit_interval)
    with pyro.plate("data", len(data)):
        pyro.sample("obs", dist.Bernoulli(f), obs=data)


def mle_by_counting(data: Tensor) -> float:
    return float(dist.Bernoulli(data.mean()).log_prob(data).sum())


def coin_by_coin(data: Tensor) -> None:
    f = pyro.sample("latent_fairness", dist.Beta(T(10.0), T(10.0)))
    for i in range(len(data)):
        pyro.sample(f"obs_{i}", dist.Bernoulli(f), obs=data[i])


def scale(guess: Tensor) -> None:
    weight = pyro.sample("weight", dist.Normal(guess, 1.0))
    pyro.sample("measurement", dist.Normal(weight, 0.75), obs=T(9.5))


def csis(x1: Tensor, x2: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0**0.5))
    pyro.sample("x1", dist.Normal(mu, 2.0**0.5), obs=x1)
    pyro.sample("x2", dist.Normal(mu, 2.0**0.5), obs=x2)


def logistic(data: Tensor, labels: Tensor) -> None:
    coefs = pyro.sample("beta", dist.Normal(torch.zeros(3), torch.ones(3)).to_event(1))
    pyro.sample("y", dist.Bernoulli(logits=(coefs * data).sum(-1)).to_event(1), obs=labels)


def boosting(data: Tensor) -> None:
    z = pyro.sample("z", dist.Normal(T([0.0]), T([5.0])))
    with pyro.plate("data", len(data)):
        pyro.sample("x", dist.Normal(z * z, T([0.1])), obs=data)


# --- mixtures: gmm, dirichlet_process_mixture, toy_mixture_model_discrete_enumeration, autoname ---


CLUMPS = T([0.0, 1.0, 10.0, 11.0, 12.0]).double()


def gmm(data: Tensor) -> None:
    weights = pyro.sample("weights", dist.Dirichlet(0.5 * torch.ones(2)))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 2.0))
    with pyro.plate("components", 2):
        locs = pyro.sample("locs", dist.Normal(0.0, 10.0))
    with pyro.plate("data", len(data)):
        assignment = pyro.sample("assignment", dist.Categorical(weights), infer={"enumerate": "parallel"})
        pyro.sample("obs", dist.Normal(locs[assignment], scale), obs=data)


def sticks(data: Tensor) -> None:
    """A Dirichlet process mixture of the plane, cut at four sticks."""
    with pyro.plate("beta_plate", 3):
        beta = pyro.sample("beta", dist.Beta(1.0, 0.1 * 5.0))
    rest = torch.nn.functional.pad((1.0 - beta).cumprod(-1), (1, 0), value=1.0)
    weights = torch.nn.functional.pad(beta, (0, 1), value=1.0) * rest
    with pyro.plate("mu_plate", 4):
        mu = pyro.sample("mu", dist.MultivariateNormal(torch.zeros(2), 5.0 * torch.eye(2)))
    with pyro.plate("data", len(data)):
        z = pyro.sample("z", dist.Categorical(weights), infer={"enumerate": "parallel"})
        pyro.sample("obs", dist.MultivariateNormal(mu[z], torch.eye(2)), obs=data)


def sunspots(counts: Tensor) -> None:
    """The same of Poisson rates."""
    with pyro.plate("beta_plate", 3):
        beta = pyro.sample("beta", dist.Beta(1.0, 1.1))
    rest = torch.nn.functional.pad((1.0 - beta).cumprod(-1), (1, 0), value=1.0)
    weights = torch.nn.functional.pad(beta, (0, 1), value=1.0) * rest
    with pyro.plate("rates", 4):
        rate = pyro.sample("rate", dist.Gamma(3.0, 0.05))
    with pyro.plate("data", len(counts)):
        z = pyro.sample("z", dist.Categorical(weights), infer={"enumerate": "parallel"})
        pyro.sample("obs", dist.Poisson(rate[z]), obs=counts)


def toy_mixture(a: Tensor, c: Tensor) -> None:
    p_a = pyro.sample("p_A", dist.Beta(1.0, 1.0))
    p_b = pyro.sample("p_B", dist.Beta(torch.ones(2), torch.ones(2)).to_event(1))
    p_c = pyro.sample("p_C", dist.Beta(torch.ones(2), torch.ones(2)).to_event(1))
    with pyro.plate("data", len(a)):
        seen = pyro.sample("A", dist.Bernoulli(p_a), obs=a)
        b = pyro.sample("B", dist.Bernoulli(p_b[seen.long()]), infer={"enumerate": "parallel"})
        pyro.sample("C", dist.Bernoulli(p_c[b.long()]), obs=c)


def autoname_mixture(data: Tensor) -> None:
    locs = pyro.param("locs", T([10.0, 10.0]))
    scales = pyro.param("scales", T([1.0, 1.0]), constraint=constraints.positive)
    weights = pyro.param("weights", T([0.5, 0.5]), constraint=constraints.simplex)
    with pyro.plate("data", len(data)):
        i = pyro.sample("i", dist.Categorical(weights), infer={"enumerate": "parallel"})
        pyro.sample("x", dist.Normal(locs[i], scales[i]), obs=data)


# --- hmm.py: five tones that are on or off, sixteen hidden states in the script, two here ---


def tones(num_sequences: int, length: int, num_tones: int) -> Tensor:
    state = (torch.arange(length) // 4 % 2).double()
    p = 0.2 + 0.6 * (state.unsqueeze(-1) - torch.arange(num_tones) % 2).abs()
    return coin(p.expand(num_sequences, length, num_tones), 5)


def hmm_1(sequences: Tensor) -> None:
    num_tones = sequences.shape[-1]
    x = pyro.sample("probs_x", dist.Dirichlet(0.9 * torch.eye(2) + 0.1).to_event(1))
    y = pyro.sample("probs_y", dist.Beta(0.1, 0.9).expand([2, num_tones]).to_event(2))
    tone = pyro.plate("tones", num_tones, dim=-1)
    for i in pyro.plate("sequences", len(sequences)):
        state = 0
        for t in pyro.markov(range(sequences.shape[1])):
            state = pyro.sample(f"x_{i}_{t}", dist.Categorical(x[state]), infer={"enumerate": "parallel"})
            with tone:
                pyro.sample(f"y_{i}_{t}", dist.Bernoulli(y[state.squeeze(-1)]), obs=sequences[i, t])


def hmm_2(sequences: Tensor) -> None:
    """A tone's probability depends on whether it was on before."""
    num, length, num_tones = sequences.shape
    x = pyro.sample("probs_x", dist.Dirichlet(0.9 * torch.eye(2) + 0.1).to_event(1))
    y = pyro.sample("probs_y", dist.Beta(0.1, 0.9).expand([2, 2, num_tones]).to_event(3))
    tone = pyro.plate("tones", num_tones, dim=-1)
    with pyro.plate("sequences", num, dim=-2):
        state, before = 0, torch.zeros(()).long()
        for t in pyro.markov(range(length)):
            state = pyro.sample(f"x_{t}", dist.Categorical(x[state]), infer={"enumerate": "parallel"})
            with tone as column:
                now = pyro.sample(f"y_{t}", dist.Bernoulli(y[state, before, column]), obs=sequences[:, t])
                before = now.long()


def hmm_3(sequences: Tensor) -> None:
    """Two hidden chains beside each other."""
    num, length, num_tones = sequences.shape
    w_probs = pyro.sample("probs_w", dist.Dirichlet(0.9 * torch.eye(2) + 0.1).to_event(1))
    x_probs = pyro.sample("probs_x", dist.Dirichlet(0.9 * torch.eye(2) + 0.1).to_event(1))
    y = pyro.sample("probs_y", dist.Beta(0.1, 0.9).expand([2, 2, num_tones]).to_event(3))
    tone = pyro.plate("tones", num_tones, dim=-1)
    with pyro.plate("sequences", num, dim=-2):
        w, x = 0, 0
        for t in pyro.markov(range(length)):
            w = pyro.sample(f"w_{t}", dist.Categorical(w_probs[w]), infer={"enumerate": "parallel"})
            x = pyro.sample(f"x_{t}", dist.Categorical(x_probs[x]), infer={"enumerate": "parallel"})
            with tone as column:
                pyro.sample(f"y_{t}", dist.Bernoulli(y[w, x, column]), obs=sequences[:, t])


def hmm_6(sequences: Tensor) -> None:
    """Probabilities as params, begun off the simplex as the script has it."""
    num, length, num_tones = sequences.shape
    x = pyro.param("probs_x", lambda: 0.5 * torch.eye(2) + uniform(2, 2, seed=6), constraint=constraints.simplex)
    start = T([[0.1], [0.9]]).double() + 0.05 * uniform(2, num_tones, seed=7)
    y = pyro.param("probs_y", lambda: start, constraint=constraints.unit_interval)
    tone = pyro.plate("tones", num_tones, dim=-1)
    with pyro.plate("sequences", num, dim=-2):
        state = 0
        for t in pyro.markov(range(length)):
            state = pyro.sample(f"x_{t}", dist.Categorical(x[state]), infer={"enumerate": "parallel"})
            with tone as column:
                pyro.sample(f"y_{t}", dist.Bernoulli(y[state, column]), obs=sequences[:, t])


def hmm_0(sequences: Tensor) -> None:
    """Without plates of sequences, a step after the other."""
    x = pyro.sample("probs_x", dist.Dirichlet(0.9 * torch.eye(2) + 0.1).to_event(1))
    y = pyro.sample("probs_y", dist.Beta(0.1, 0.9).expand([2, sequences.shape[-1]]).to_event(2))
    for i, sequence in enumerate(sequences):
        state = 0
        for t in pyro.markov(range(len(sequence))):
            state = pyro.sample(f"x_{i}_{t}", dist.Categorical(x[state]), infer={"enumerate": "parallel"})
            pyro.sample(f"y_{i}_{t}", dist.Bernoulli(y[state]).to_event(1), obs=sequence[t])


def hmm_4(sequences: Tensor) -> None:
    """Two hidden chains, the second driven by the first."""
    num, length, num_tones = sequences.shape
    w_probs = pyro.sample("probs_w", dist.Dirichlet(0.9 * torch.eye(2) + 0.1).to_event(1))
    x_probs = pyro.sample("probs_x", dist.Dirichlet((0.9 * torch.eye(2) + 0.1).expand(2, 2, 2)).to_event(2))
    y = pyro.sample("probs_y", dist.Beta(0.1, 0.9).expand([2, 2, num_tones]).to_event(3))
    tone = pyro.plate("tones", num_tones, dim=-1)
    with pyro.plate("sequences", num, dim=-2):
        w, x = 0, 0
        for t in pyro.markov(range(length)):
            w = pyro.sample(f"w_{t}", dist.Categorical(w_probs[w]), infer={"enumerate": "parallel"})
            x = pyro.sample(f"x_{t}", dist.Categorical(x_probs[w, x]), infer={"enumerate": "parallel"})
            with tone as column:
                pyro.sample(f"y_{t}", dist.Bernoulli(y[w, x, column]), obs=sequences[:, t])


class TonesByNetwork:
    """hmm 5: a network gives the tones' probabilities from the state and the tones before."""

    def __init__(self, num_tones: int) -> None:
        self.network = nn.Sequential(nn.Linear(num_tones + 1, 4), nn.ReLU(), nn.Linear(4, num_tones))

    def __call__(self, sequences: Tensor) -> None:
        network = pyro.module("tones_generator", self.network)
        num, length, num_tones = sequences.shape
        x = pyro.sample("probs_x", dist.Dirichlet(0.9 * torch.eye(2) + 0.1).to_event(1))
        with pyro.plate("sequences", num, dim=-1):
            state, before = 0, torch.zeros(num, num_tones)
            for t in pyro.markov(range(length)):
                state = pyro.sample(f"x_{t}", dist.Categorical(x[state]), infer={"enumerate": "parallel"})
                level = (state * torch.ones(num)).unsqueeze(-1)
                logits = network(torch.cat([level, before.expand(*level.shape[:-1], num_tones)], -1))
                pyro.sample(f"y_{t}", dist.Bernoulli(logits=logits).to_event(1), obs=sequences[:, t])
                before = sequences[:, t]


# --- lkj.py, prior_predictive, modules, gp, sparse ---


def lkj(y: Tensor) -> None:
    d = y.shape[1]
    theta = pyro.sample("theta", dist.HalfCauchy(torch.ones(d)).to_event(1))
    tril = pyro.sample("L_omega", dist.LKJCholesky(d, torch.ones(())))
    with pyro.plate("observations", len(y)):
        pyro.sample("obs", dist.MultivariateNormal(torch.zeros(d), scale_tril=theta.sqrt().diag_embed() @ tril), obs=y)


def gp_with_priors(x: Tensor, y: Tensor) -> None:
    variance = pyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = pyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    square = ((x.unsqueeze(-1) - x) / lengthscale).square()
    covariance = variance * (-0.5 * square).exp() + 0.04 * torch.eye(len(x))
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), covariance), obs=y)


def gp_maximised(x: Tensor, y: Tensor) -> None:
    """GPRegression without priors: settings of the kernel are params."""
    variance = pyro.param("variance", T(1.0), constraint=constraints.positive)
    lengthscale = pyro.param("lengthscale", T(1.0), constraint=constraints.positive)
    noise = pyro.param("noise", T(1.0), constraint=constraints.positive)
    square = ((x.unsqueeze(-1) - x) / lengthscale).square()
    covariance = variance * (-0.5 * square).exp() + noise * torch.eye(len(x))
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), covariance), obs=y)


def with_deterministic(x: Tensor, y: Tensor) -> None:
    weight = pyro.sample("weight", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    bias = pyro.sample("bias", dist.Normal(0.0, 10.0))
    sigma = pyro.sample("sigma", dist.HalfCauchy(1.0))
    mean = pyro.deterministic("mean", x @ weight + bias, event_dim=0)
    with pyro.plate("data", len(x)):
        pyro.sample("obs", dist.Normal(mean, sigma), obs=y)


def sparse_regression(X: Tensor, y: Tensor) -> None:
    """Pairs of interactions by a kernel, with a scale for each column."""
    P = X.shape[1]
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    eta_1 = pyro.sample("eta1", dist.HalfCauchy(1.0))
    msq = pyro.sample("msq", dist.InverseGamma(1.0, 1.0))
    xisq = pyro.sample("xisq", dist.InverseGamma(1.0, 1.0))
    lam = pyro.sample("lambda", dist.HalfCauchy(torch.ones(P)).to_event(1))
    kX = X * msq.sqrt() * lam / (msq + (eta_1 * lam).square()).sqrt()
    eta_2 = eta_1.square() * xisq.sqrt() / msq
    dot, squares = kX @ kX.mT, kX.square() @ kX.square().mT
    k = 0.5 * eta_2**2 * (1.0 + dot).square() - 0.5 * eta_2**2 * squares + (eta_1**2 - eta_2**2) * dot
    k = k + 1.0 - 0.5 * eta_2**2 + sigma**2 * torch.eye(len(X))
    pyro.sample("Y", dist.MultivariateNormal(torch.zeros(len(X)), k), obs=y)


class Moons(dist.TorchDistribution):
    """Two half moons of the plane; neutra.py."""

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = constraints.real_vector

    def __init__(self) -> None:
        super().__init__(event_shape=torch.Size([2]))

    def sample(self, sample_shape: Any = ()) -> Tensor:
        return torch.randn(torch.Size(sample_shape) + self.event_shape)

    def log_prob(self, x: Tensor) -> Tensor:
        ring = 0.5 * ((x.norm(dim=-1) - 2.0) / 0.4).square()
        ends = [-0.5 * ((x[..., 0] + sign * 2.0) / 0.6).square() for sign in (1.0, -1.0)]
        return torch.logaddexp(*ends) - ring


def moons() -> None:
    pyro.sample("x", Moons())


def stable_by_parts(y: Tensor) -> None:
    """The stable law with two uniform latents for each return."""
    stability = pyro.sample("r_stability", dist.Uniform(1.2, 2.0))
    scale = pyro.sample("r_scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("time", len(y)), poutine.reparam(config={"r": StableReparam()}):
        pyro.sample("r", dist.Stable(stability, 0.0, scale, 0.0), obs=y)


def forecast_1(x: Tensor, y: Tensor) -> None:
    bias = pyro.sample("bias", dist.Normal(0.0, 10.0))
    weight = pyro.sample("weight", dist.Normal(0.0, 0.1).expand([x.shape[-1]]).to_event(1))
    noise_scale = pyro.sample("noise_scale", dist.LogNormal(-5.0, 5.0))
    with pyro.plate("time", len(y)):
        pyro.sample("residual", dist.Normal(bias + x @ weight, noise_scale), obs=y)


def forecast_2(x: Tensor, y: Tensor) -> None:
    """A local level beside the regression, non-centred as the script's reparameterisation has it."""
    bias = pyro.sample("bias", dist.Normal(0.0, 10.0))
    weight = pyro.sample("weight", dist.Normal(0.0, 0.1).expand([x.shape[-1]]).to_event(1))
    drift_scale = pyro.sample("drift_scale", dist.LogNormal(-10.0, 10.0))
    noise_scale = pyro.sample("noise_scale", dist.LogNormal(-5.0, 5.0))
    with pyro.plate("time", len(y)), poutine.reparam(config={"drift": LocScaleReparam(0.0)}):
        drift = pyro.sample("drift", dist.Normal(0.0, drift_scale))
    with pyro.plate("data", len(y)):
        pyro.sample("residual", dist.Normal(bias + drift.cumsum(-1) + x @ weight, noise_scale), obs=y)


def regional_growth(counts: Tensor) -> None:
    """Logistic growth of two lineages, in each region its own rates around those of all; model 2 of the tutorial."""
    num_times, num_regions, num_lineages = counts.shape
    time = torch.arange(float(num_times))[:, None, None]
    lineages = pyro.plate("lineages", num_lineages, dim=-1)
    regions = pyro.plate("region", num_regions, dim=-2)
    rate_scale = pyro.sample("rate_scale", dist.LogNormal(-4.0, 2.0))
    init_scale = pyro.sample("init_scale", dist.LogNormal(0.0, 2.0))
    with lineages:
        rate_loc = pyro.sample("rate_loc", dist.Normal(0.0, 1.0))
    with regions, lineages:
        rate = pyro.sample("rate", dist.Normal(rate_loc, rate_scale))
        init = pyro.sample("init", dist.Normal(0.0, init_scale))
    with pyro.plate("time", num_times, dim=-3), regions:
        fn = dist.Multinomial(logits=(init + rate * time).unsqueeze(-2), validate_args=False)
        pyro.sample("obs", fn, obs=counts.unsqueeze(-2))


def growth(counts: Tensor) -> None:
    """Model 1 of the tutorial: one region."""
    num_times, num_lineages = counts.shape
    with pyro.plate("lineages", num_lineages, dim=-1):
        rate = pyro.sample("rate", dist.Normal(0.0, 1.0))
        init = pyro.sample("init", dist.Normal(0.0, 1.0))
    logits = init + rate * torch.arange(float(num_times))[:, None]
    with pyro.plate("time", num_times, dim=-2):
        pyro.sample("obs", dist.Multinomial(logits=logits.unsqueeze(-2), validate_args=False), obs=counts.unsqueeze(-2))


def growth_by_logits(counts: Tensor) -> None:
    """The same without Pyro's indexing by a mask."""
    num_times, num_lineages = counts.shape
    with pyro.plate("lineages", num_lineages, dim=-1):
        rate = pyro.sample("rate", dist.Normal(0.0, 1.0))
        init = pyro.sample("init", dist.Normal(0.0, 1.0))
    logits = init + rate * torch.arange(float(num_times))[:, None]
    pyro.factor("obs", (counts * logits.log_softmax(-1)).sum())


def easyguide(batch: Tensor) -> None:
    """A short series for each of some users, around an average that is common."""
    num, length = batch.shape
    drift = pyro.sample("drift", dist.LogNormal(-1.0, 0.5))
    with pyro.plate("data", num):
        state = 0.0
        for t in range(length):
            state = pyro.sample(f"state_{t}", dist.Normal(state, drift))
            pyro.sample(f"obs_{t}", dist.Bernoulli(logits=state), obs=batch[:, t])


def subsampled_easyguide(batch: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(batch), subsample_size=5) as index:
        pyro.sample("obs", dist.Normal(mean, 1.0), obs=batch[index, 0])


def inclined_plane(times: Tensor) -> None:
    """Friction by simulation: a loop of Euler's until the block is down, so that the density has jumps."""
    mu = pyro.sample("mu", dist.Uniform(0.0, 1.0))
    g, length, angle = 9.8, 2.0, torch.pi / 6.0
    step = 0.005
    place, speed, clock = 0.0, 0.0, 0.0
    while place < length:
        place = place + speed * step
        speed = speed + g * (0.5 - mu * float(torch.cos(T(angle)))) * step
        clock += step
        if speed <= 0.0:
            clock, place = 1e5, length
    with pyro.plate("data", len(times)):
        pyro.sample("obs", dist.Normal(float(clock), 0.02), obs=times)


def workflow(x: Tensor, y: Tensor) -> None:
    with pyro.plate("columns", 3):
        w = pyro.sample("w", dist.Laplace(0.0, 0.05))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def stable(y: Tensor) -> None:
    """Returns of a stable law by its density, whose integral Pyro takes numerically."""
    stability = pyro.sample("r_stability", dist.Uniform(1.2, 2.0))
    skew = pyro.sample("r_skew", dist.Uniform(-1.0, 1.0))
    scale = pyro.sample("r_scale", dist.LogNormal(0.0, 1.0))
    loc = pyro.sample("r_loc", dist.Normal(0.0, 1.0))
    pyro.sample("r", dist.StableWithLogProb(stability, skew, scale, loc).expand([len(y)]).to_event(1), obs=y)


def lda(words: Tensor, num_words: int) -> None:
    """Topics, weights of topics in documents, and words in documents whose topics are summed out."""
    with pyro.plate("topics", 3):
        topic_weights = pyro.sample("topic_weights", dist.Gamma(1.0 / 3.0, 1.0))
        topic_words = pyro.sample("topic_words", dist.Dirichlet(torch.ones(num_words) / num_words))
    with pyro.plate("documents", words.shape[1], dim=-1):
        doc_topics = pyro.sample("doc_topics", dist.Dirichlet(topic_weights))
        with pyro.plate("words", words.shape[0], dim=-2):
            topic = pyro.sample("word_topics", dist.Categorical(doc_topics), infer={"enumerate": "parallel"})
            pyro.sample("doc_words", dist.Categorical(topic_words[topic]), obs=words)


def gplvm(y: Tensor) -> None:
    """Points of a plane behind each column by a Gaussian process."""
    num = len(y)
    X = pyro.sample("X", dist.Normal(torch.zeros(num, 2), 1.0).to_event(2))
    lengthscale = pyro.param("lengthscale", torch.ones(2), constraint=constraints.positive)
    noise = pyro.param("noise", T(0.1), constraint=constraints.positive)
    square = ((X.unsqueeze(-2) - X.unsqueeze(-3)) / lengthscale).square().sum(-1)
    K = (-0.5 * square).exp() + noise * torch.eye(num)
    with pyro.plate("columns", y.shape[1]):
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(num), K), obs=y.T)


def sparse_gamma(x: Tensor) -> None:
    """A deep exponential family of two layers."""
    with pyro.plate("data", len(x), dim=-1):
        z_top = pyro.sample("z_top", dist.Gamma(0.5, 0.5).expand([2]).to_event(1))
        w_bottom = torch.tensor([[1.0, 0.2, 2.0], [0.1, 3.0, 0.5]]).double()
        z_bottom = pyro.sample("z_bottom", dist.Gamma(0.5, 0.5 / (z_top @ w_bottom)).to_event(1))
        pyro.sample("obs", dist.Poisson(z_bottom).to_event(1), obs=x)


def sir(cases: Tensor) -> None:
    """New infections of an epidemic day by day, as continuous numbers (sir_hmc.py)."""
    population, infected = 1000.0, T(5.0)
    r0 = pyro.sample("R0", dist.LogNormal(0.0, 1.0))
    rho = pyro.sample("rho", dist.Beta(5.0, 5.0))
    susceptible = population - infected
    for t in range(len(cases)):
        fresh = susceptible * (1.0 - (-r0 * infected / (7.0 * population)).exp())
        susceptible, infected = susceptible - fresh, infected * (6.0 / 7.0) + fresh
        pyro.sample(f"obs_{t}", dist.Poisson(rho * fresh), obs=cases[t])


def tree_data(x: Tensor, group: Tensor) -> None:
    """Gaussians under Gaussians under a Gaussian."""
    root = pyro.sample("root", dist.Normal(0.0, 10.0))
    with pyro.plate("groups", 3):
        centre = pyro.sample("centre", dist.Normal(root, 2.0))
    with pyro.plate("leaves", len(x)):
        pyro.sample("x", dist.Normal(centre[group], 1.0), obs=x)


def growing() -> Tensor:
    p = torch.softmax(T([1.0, 0.0]).double() + torch.arange(10.0).unsqueeze(-1) * T([0.1, 0.4]).double(), -1)
    heads = torch.stack([coin(p[:, 1].expand(40, 10), 8).sum(0)], -1)
    return torch.cat([40.0 - heads, heads], -1)


def trend() -> tuple[Tensor, Tensor]:
    time = torch.linspace(0.0, 6.0, 60).double()
    x = torch.stack([time.sin(), time.cos()], -1)
    return x, 2.0 + x @ T([0.1, -0.1]).double() + 0.2 * normal(60, seed=10)


def toy_data() -> tuple[Tensor, Tensor]:
    a = coin(torch.full((300,), 0.5).double())
    b = coin(torch.where(a > 0, 0.8, 0.2).double(), 1)
    return a, coin(torch.where(b > 0, 0.9, 0.1).double(), 2)


PLANE = torch.cat(
    [normal(20, 2, seed=s) + T(c).double() for s, c in enumerate([[-4.0, -4.0], [4.0, 4.0], [-4.0, 4.0]])]
)
SMOOTH = torch.linspace(0.0, 5.0, 25).double()
SCHOOLS = functools.partial(tuple, (ERRORS, EFFECTS))
TRIAL = functools.partial(tuple, (FIRST, HIT))
CAUGHT = functools.partial(captures, 60, 5)
ROWS = normal(60, 3, seed=20)
LABELS = coin((ROWS @ T([1.0, -2.0, 0.5]).double()).sigmoid(), 21)

PROGRAMS: dict[str, Program] = {
    "baseball, fully pooled": Program(fully_pooled, TRIAL),
    "baseball, not pooled": Program(not_pooled, TRIAL),
    "baseball, partially pooled": Program(partially_pooled, TRIAL, summed=beta_binomial, heavy=("kappa",)),
    "baseball, with logit": Program(partially_pooled_with_logit, TRIAL, summed=partially_pooled_with_logit_in_noise),
    "eight schools, mcmc": Program(schools_mcmc, SCHOOLS),
    "eight schools, svi": Program(schools_svi, SCHOOLS, compared=False),
    "cjs 1": Program(cjs_1, lambda: (CAUGHT(),), summed=summed(cjs_1)),
    "cjs 2": Program(cjs_2, lambda: (CAUGHT(),), summed=summed(cjs_2)),
    "cjs 3": Program(cjs_3, lambda: (CAUGHT(),), summed=summed(cjs_3), slow=True),
    "cjs 4": Program(cjs_4, lambda: (CAUGHT(),), summed=summed(cjs_4)),
    "cjs 5": Program(cjs_5, lambda: (CAUGHT(),), summed=summed(cjs_5)),
    "intro, maximised": Program(
        intro_simple, lambda: (AFRICA, RUGGED, GDP), compared=False, closed_form=intro_by_least_squares
    ),
    "intro, Bayesian": Program(intro_bayesian, lambda: (AFRICA, RUGGED, GDP)),
    "Bayesian regression": Program(
        BayesianRegression(3, 1), lambda: (ROWS, ROWS @ T([1.0, -1.0, 0.5]).double() + 9.0 + 0.9 * normal(60, seed=22))
    ),
    "fairness, MAP": Program(map_original, lambda: (HEADS,)),
    "fairness, masked prior": Program(map_masked, lambda: (HEADS,)),
    "fairness, maximum likelihood": Program(mle, lambda: (HEADS,), compared=False, closed_form=mle_by_counting),
    "fairness, coin by coin": Program(coin_by_coin, lambda: (HEADS,)),
    "scale": Program(scale, lambda: (T(8.5).double(),)),
    "csis": Program(csis, lambda: (T(8.0).double(), T(9.0).double())),
    "logistic": Program(logistic, lambda: (ROWS, LABELS)),
    "boosting, two equal modes": Program(boosting, lambda: (4.0 + 0.1 * normal(100),)),
    "mixture of Gaussians": Program(gmm, lambda: (CLUMPS,), compared=False),
    "mixture of Gaussians, EvidenceEM": Program(gmm, lambda: (CLUMPS,), engine=EvidenceEM, compared=False),
    "Dirichlet process of the plane": Program(sticks, lambda: (PLANE,), compared=False),
    "sunspots": Program(
        sunspots, lambda: (poisson(T([20.0, 60.0, 120.0]).double().repeat_interleave(30), 3),), compared=False
    ),
    "toy mixture": Program(toy_mixture, toy_data, compared=False),
    "autoname mixture": Program(
        autoname_mixture, lambda: (torch.cat([normal(8, seed=1) + 1.0, normal(8, seed=2) + 30.0]),), compared=False
    ),
    "Dirichlet process of the plane, EvidenceEM": Program(sticks, lambda: (PLANE,), engine=EvidenceEM, compared=False),
    "csis of whole numbers": Program(csis, lambda: (8, 9), refused="no tensors among the arguments"),
    "GP regression, maximised": Program(
        gp_maximised, lambda: (SMOOTH, (2.0 * SMOOTH).sin() + 0.2 * normal(25)), compared=False
    ),
    "deterministic sites": Program(with_deterministic, lambda: (ROWS, ROWS[:, 0] - 2.0 + 0.5 * normal(60, seed=23))),
    "sparse regression by a kernel": Program(
        sparse_regression, lambda: (ROWS, ROWS[:, 0] * ROWS[:, 1] + 0.3 * normal(60, seed=24)), compared=False
    ),
    "two moons": Program(moons, lambda: (), refused="no observed site"),
    "stable law by parts": Program(stable_by_parts, lambda: (normal(60),), refused="would be integrated numerically"),
    "hmm 0": Program(hmm_0, lambda: (tones(3, 8, 3),), compared=False),
    "hmm 4": Program(hmm_4, lambda: (tones(3, 6, 2),), compared=False, slow=True),
    "hmm 5": Program(TonesByNetwork(3), lambda: (tones(3, 8, 3),), refused="pyro.module hides"),
    "hmm 1": Program(hmm_1, lambda: (tones(3, 8, 3),), compared=False),
    "hmm 2": Program(hmm_2, lambda: (tones(4, 8, 3),), compared=False),
    "hmm 3": Program(hmm_3, lambda: (tones(4, 8, 3),), compared=False, slow=True),
    "hmm 6": Program(hmm_6, lambda: (tones(4, 8, 3),), compared=False),
    "lkj": Program(lkj, lambda: (normal(100, 3) @ T([[1.0, 0.5, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 1.0]]).double(),)),
    "gp with priors": Program(gp_with_priors, lambda: (SMOOTH, (2.0 * SMOOTH).sin() + 0.2 * normal(25))),
    "forecasting 1": Program(forecast_1, trend),
    "forecasting 2": Program(forecast_2, trend, slow=True),
    "logistic growth": Program(growth, lambda: (growing(),), summed=growth_by_logits),
    "logistic growth by region": Program(
        regional_growth, lambda: (growing().unsqueeze(1).expand(-1, 6, -1),), slow=True
    ),
    "easyguide": Program(easyguide, lambda: (coin(torch.full((20, 4), 0.7).double(), 12),), compared=False),
    "easyguide, subsampled": Program(subsampled_easyguide, lambda: (normal(20, 4),), refused="subsamples 5 of 20"),
    "inclined plane": Program(inclined_plane, lambda: (T([1.8, 1.9, 1.7]).double(),), refused="jumps", slow=True),
    "workflow": Program(workflow, lambda: (ROWS, ROWS[:, 0] + 0.5 * normal(60, seed=23)), refused="kink"),
    "stable law by its density": Program(stable, lambda: (normal(40),), slow=True),
    "lda": Program(
        lda,
        lambda: (torch.randint(8, (12, 6), generator=random(3)), 8),
        compared=False,
        slow=True,
    ),
    "lda, all together": Program(
        lda,
        lambda: (torch.randint(8, (12, 6), generator=random(3)), 8),
        settings={"marginalise": ()},
        compared=False,
    ),
    "gplvm": Program(gplvm, lambda: (normal(12, 2, seed=1) @ normal(2, 4, seed=2),), slow=True, compared=False),
    "sparse gamma": Program(sparse_gamma, lambda: (poisson(torch.full((10, 3), 3.0).double(), 4),), compared=False),
    "epidemic": Program(
        sir,
        lambda: (poisson(T([1, 1, 2, 2, 4, 5, 8, 11, 15, 20, 26, 33]).double(), 5),),
    ),
    "tree of Gaussians": Program(tree_data, lambda: (normal(9) + torch.arange(9) % 3 * 3.0, torch.arange(9) % 3)),
}
