"""Models in the idioms of Pyro's examples and tutorials, small, each with data and what a fit of it must come to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.reparam import LocScaleReparam
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn
from torch.distributions import constraints


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=random(seed))


X = normal(60, 3)
LINE = X @ torch.tensor([1.0, -1.0, 0.5]) + 0.3
Y = LINE + 0.5 * normal(60, seed=1)
LABELS = (torch.rand(60, generator=random(2)) < torch.sigmoid(2.0 * LINE)).to(X.dtype)
COUNTS = torch.poisson(LINE.clamp(max=3.0).exp(), generator=random(3))
GROUP = torch.arange(60) % 6
SEEN = torch.arange(60) % 4 > 0
AT_BATS = torch.full((10,), 45.0)
HITS = torch.tensor([18.0, 17.0, 16.0, 15.0, 14.0, 12.0, 11.0, 10.0, 9.0, 7.0])
CLUMPS = torch.cat([normal(15, seed=4) - 4.0, normal(15, seed=5) + 4.0])
STATES = torch.tensor([0.1, -0.3, 0.4, 5.2, 4.8, 5.1, 4.6, 0.2, -0.1, 0.3, 5.3, 4.9])
TABLE = torch.tensor([[9.0, 1.0], [7.0, 3.0], [4.0, 6.0], [2.0, 8.0]])


def linear_regression(X: Tensor, y: Tensor) -> None:
    b = pyro.sample("b", dist.Normal(0.0, 5.0))
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    sigma = pyro.sample("sigma", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(X)):
        pyro.sample("obs", dist.Normal(X @ w + b, sigma), obs=y)


def logistic_regression(X: Tensor, t: Tensor) -> None:
    coefs = pyro.sample("coefs", dist.Normal(torch.zeros(3), torch.ones(3)).to_event(1))
    intercept = pyro.sample("intercept", dist.Normal(0.0, 10.0))
    with pyro.plate("N", len(X)):
        pyro.sample("outcome", dist.Bernoulli(logits=(coefs * X).sum(-1) + intercept), obs=t)


class Regression(PyroModule):
    """A PyroModule with priors on a torch layer's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = PyroModule[nn.Linear](3, 1)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))
        self.linear.bias = PyroSample(dist.Normal(0.0, 10.0).expand([1]).to_event(1))

    def forward(self, X: Tensor, y: Tensor | None = None) -> Tensor:
        sigma = pyro.sample("sigma", dist.Uniform(0.0, 10.0))
        mean = self.linear(X).squeeze(-1)
        with pyro.plate("data", len(X)):
            pyro.sample("obs", dist.Normal(mean, sigma), obs=y)
        return mean


def hidden_units(X: Tensor, y: Tensor) -> None:
    inner = pyro.sample("inner", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
    outer = pyro.sample("outer", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("obs", dist.Normal(torch.tanh(X @ inner) @ outer, 0.5), obs=y)


def completely_pooled(at_bats: Tensor, hits: Tensor) -> None:
    phi = pyro.sample("phi", dist.Beta(1.0, 1.0))
    with pyro.plate("num_players", len(hits)):
        pyro.sample("obs", dist.Binomial(at_bats, phi), obs=hits)


def not_pooled(at_bats: Tensor, hits: Tensor) -> None:
    with pyro.plate("num_players", len(hits)):
        phi = pyro.sample("phi", dist.Uniform(0.0, 1.0))
        pyro.sample("obs", dist.Binomial(at_bats, phi), obs=hits)


def pooled_by_logit(at_bats: Tensor, hits: Tensor) -> None:
    loc = pyro.sample("loc", dist.Normal(-1.0, 1.0))
    scale = pyro.sample("scale", dist.HalfCauchy(1.0))
    with pyro.plate("num_players", len(hits)):
        alpha = pyro.sample("alpha", dist.Normal(loc, scale))
        pyro.sample("obs", dist.Binomial(at_bats, logits=alpha), obs=hits)


def mixture(data: Tensor) -> None:
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(2)))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("components", 2):
        locs = pyro.sample("locs", dist.Normal(0.0, 10.0))
    with pyro.plate("data", len(data)):
        z = pyro.sample("z", dist.Categorical(weights), infer={"enumerate": "parallel"})
        pyro.sample("obs", dist.Normal(locs[z], scale), obs=data)


def same_family(data: Tensor) -> None:
    locs = pyro.sample("locs", dist.Normal(torch.tensor([-4.0, 4.0]), 1.0).to_event(1))
    parts = dist.Normal(locs, torch.ones(2))
    with pyro.plate("data", len(data)):
        pyro.sample("obs", dist.MixtureSameFamily(dist.Categorical(torch.tensor([0.5, 0.5])), parts), obs=data)


def hidden_markov(y: Tensor) -> None:
    stay = pyro.sample("stay", dist.Dirichlet(torch.ones(2, 2) + torch.eye(2)).to_event(1))
    locs = pyro.sample("locs", dist.Normal(torch.tensor([0.0, 5.0]), 1.0).to_event(1))
    state = 0
    for t in pyro.markov(range(len(y))):
        state = pyro.sample(f"state_{t}", dist.Categorical(stay[state]), infer={"enumerate": "parallel"})
        pyro.sample(f"y_{t}", dist.Normal(locs[state], 1.0), obs=y[t])


def hidden_markov_at_once(y: Tensor) -> None:
    stay = pyro.sample("stay", dist.Dirichlet(torch.ones(2, 2) + torch.eye(2)).to_event(1))
    locs = pyro.sample("locs", dist.Normal(torch.tensor([0.0, 5.0]), 1.0).to_event(1))
    hmm = dist.DiscreteHMM(torch.zeros(2), stay.log(), dist.Normal(locs, 1.0))
    pyro.sample("y", hmm, obs=y)


def random_walk(y: Tensor) -> None:
    drift = pyro.sample("drift", dist.LogNormal(-1.0, 0.5))
    steps = pyro.sample("steps", dist.Normal(0.0, 1.0).expand([len(y)]).to_event(1))
    level = drift * steps.cumsum(-1)
    pyro.sample("y", dist.Normal(level, 1.0).to_event(1), obs=y)


def capture_recapture(history: Tensor) -> None:
    phi = pyro.sample("phi", dist.Uniform(0.0, 1.0))
    rho = pyro.sample("rho", dist.Uniform(0.0, 1.0))
    with pyro.plate("animals", len(history), dim=-1):
        z = torch.ones(len(history))
        first = torch.zeros(len(history)).bool()
        for t in pyro.markov(range(history.shape[1])):
            with poutine.mask(mask=first):
                alive = first.float() * phi * z + (1 - first.float())
                z = pyro.sample(f"z_{t}", dist.Bernoulli(alive), infer={"enumerate": "parallel"})
                pyro.sample(f"y_{t}", dist.Bernoulli(rho * z), obs=history[:, t])
            first |= history[:, t].bool()


def growth(counts: Tensor) -> None:
    num_times, num_lineages = counts.shape
    with pyro.plate("lineages", num_lineages, dim=-1):
        rate = pyro.sample("rate", dist.Normal(0.0, 1.0))
        init = pyro.sample("init", dist.Normal(0.0, 1.0))
    probs = torch.softmax(init + rate * torch.arange(float(num_times))[:, None], dim=-1)
    with pyro.plate("time", num_times, dim=-2):
        fn = dist.Multinomial(probs=probs.unsqueeze(-2), validate_args=False)
        pyro.sample("obs", fn, obs=counts.unsqueeze(-2))


def poisson_regression(X: Tensor, k: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(X)):
        pyro.sample("k", dist.Poisson((X @ w + b).exp()), obs=k)


def zero_inflated(X: Tensor, k: Tensor) -> None:
    gate = pyro.sample("gate", dist.Beta(1.0, 4.0))
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("k", dist.ZeroInflatedPoisson((X @ w).exp(), gate=gate), obs=k)


def overdispersed(X: Tensor, k: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    shape = pyro.sample("shape", dist.LogNormal(1.0, 1.0))
    with pyro.plate("data", len(X)):
        pyro.sample("k", dist.NegativeBinomial(shape, logits=X @ w - shape.log()), obs=k)


def ordinal(X: Tensor, t: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    first = pyro.sample("first", dist.Normal(0.0, 1.0))
    gap = pyro.sample("gap", dist.LogNormal(0.0, 1.0))
    cuts = torch.stack([first, first + gap], -1)
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.OrderedLogistic(X @ w, cuts), obs=t)


def categorical(X: Tensor, t: Tensor) -> None:
    W = pyro.sample("W", dist.Normal(0.0, 1.0).expand([3, 3]).to_event(2))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Categorical(logits=X @ W), obs=t)


def robust(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.StudentT(4.0, X @ w + 0.3, sigma), obs=y)


def correlated(Z: Tensor) -> None:
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5).expand([2]).to_event(1))
    tril = pyro.sample("tril", dist.LKJCholesky(2, torch.tensor(2.0)))
    with pyro.plate("data", len(Z)):
        pyro.sample("z", dist.MultivariateNormal(torch.zeros(2), scale_tril=scale.unsqueeze(-1) * tril), obs=Z)


def simplex(counts: Tensor) -> None:
    p = pyro.sample("p", dist.Dirichlet(torch.ones(3)))
    pyro.sample("counts", dist.Multinomial(int(counts.sum()), p), obs=counts)


def varying_intercepts(y: Tensor, group: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    with pyro.plate("groups", 6):
        a = pyro.sample("a", dist.Normal(mu, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(a[group], 1.0), obs=y)


def learned_spread(y: Tensor, group: Tensor) -> None:
    tau = pyro.param("tau", torch.tensor(1.0), constraint=constraints.positive)
    with pyro.plate("groups", 6):
        a = pyro.sample("a", dist.Normal(0.0, tau))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(a[group], 1.0), obs=y)


def non_centred(errors: Tensor, y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    with pyro.plate("schools", len(y)), poutine.reparam(config={"theta": LocScaleReparam(0.0)}):
        theta = pyro.sample("theta", dist.Normal(mu, 5.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(theta, errors), obs=y)


def rasch(answers: Tensor) -> None:
    num_people, num_items = answers.shape
    with pyro.plate("items", num_items, dim=-1):
        difficulty = pyro.sample("difficulty", dist.Normal(0.0, 2.0))
    with pyro.plate("people", num_people, dim=-2):
        ability = pyro.sample("ability", dist.Normal(0.0, 1.0))
        with pyro.plate("answers", num_items, dim=-1):
            pyro.sample("y", dist.Bernoulli(logits=ability - difficulty), obs=answers)


def censored(times: Tensor, seen: Tensor) -> None:
    rate = pyro.sample("rate", dist.Gamma(2.0, 2.0))
    with pyro.plate("data", len(times)):
        with poutine.mask(mask=seen):
            pyro.sample("time", dist.Exponential(rate), obs=times)
        pyro.factor("survived", torch.where(seen, torch.zeros(()), -rate * times))


def masked(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(X)), poutine.mask(mask=SEEN):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def imputed(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y, obs_mask=SEEN)


def weighted(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(X)), poutine.scale(scale=0.5):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def recorded(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    mean = pyro.deterministic("mean", X @ w)
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(mean, 0.5), obs=y)


def process(X: Tensor, y: Tensor) -> None:
    length = pyro.param("length", torch.tensor(1.0), constraint=constraints.positive)
    K = (-0.5 * torch.cdist(X, X).square() / length.square()).exp() + 1e-6 * torch.eye(len(X))
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(len(X)), K))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(f, 0.5), obs=y)


def change_point(y: Tensor) -> None:
    early = pyro.sample("early", dist.Normal(0.0, 5.0))
    late = pyro.sample("late", dist.Normal(3.0, 5.0))
    tau = pyro.sample("tau", dist.Categorical(torch.ones(len(y))), infer={"enumerate": "parallel"})
    mean = torch.where(torch.arange(len(y)) < tau.unsqueeze(-1), early, late)
    pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y)


def smooth_lasso(X: Tensor, y: Tensor) -> None:
    with pyro.plate("columns", 3):
        w = pyro.sample("w", dist.SoftLaplace(torch.tensor(0.0), torch.tensor(0.1)))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def lasso(X: Tensor, y: Tensor) -> None:
    with pyro.plate("columns", 3):
        w = pyro.sample("w", dist.Laplace(0.0, 0.002))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def absolute_errors(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Laplace(X @ w, 0.5), obs=y)


def only_params(y: Tensor) -> None:
    mu = pyro.param("mu", torch.tensor(0.0))
    sigma = pyro.param("sigma", torch.tensor(1.0), constraint=constraints.positive)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mu, sigma), obs=y)


def only_params_and_classes(y: Tensor) -> None:
    p = pyro.param("p", torch.tensor([0.5, 0.5]), constraint=constraints.simplex)
    mu = pyro.param("mu", torch.tensor([-1.0, 1.0]))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(p), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(mu[z], 1.0), obs=y)


def subsampled(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(X), subsample_size=10) as index:
        pyro.sample("y", dist.Normal(X[index] @ w, 0.5), obs=y[index])


def counted_latent(y: Tensor) -> None:
    n = pyro.sample("n", dist.Poisson(5.0))
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(mu, (1.0 + n).rsqrt()).expand([len(y)]).to_event(1), obs=y)


def flat_prior(X: Tensor, t: Tensor) -> None:
    w = pyro.sample("w", dist.ImproperUniform(constraints.real, (), (3,)))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


def unnamed_randomness(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w + 0.1 * torch.randn(len(X)), 0.5), obs=y)


def moving_support(y: Tensor) -> None:
    top = pyro.sample("top", dist.LogNormal(0.0, 1.0))
    x = pyro.sample("x", dist.Uniform(0.0, top))
    pyro.sample("y", dist.Normal(x, 1.0).expand([len(y)]).to_event(1), obs=y)


def animals() -> Tensor:
    alive = torch.bernoulli(torch.full((40, 5), 0.7), generator=random(6)).cumprod(1)
    return alive * torch.bernoulli(torch.full((40, 5), 0.8), generator=random(7))


@dataclass(frozen=True)
class Idiom:
    """A model, its data, the engine's settings, and the beginning of the error message where it is to be refused."""

    model: Callable[..., Any]
    data: tuple[Any, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    message: str = ""


WIDE = (X > 0.5).long().sum(-1).clamp(max=2)
SCHOOLS = (torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0]), torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0]))
ANSWERS = (torch.rand(20, 5, generator=random(8)) < 0.6).to(X.dtype)
TIMES = torch.empty(40).exponential_(generator=random(9))
PLANE = normal(40, 2, seed=10) @ torch.tensor([[1.0, 0.5], [0.0, 1.0]])
JUMP = torch.cat([normal(10, seed=11), normal(10, seed=12) + 4.0])

FITTED: dict[str, Idiom] = {
    "linear regression": Idiom(linear_regression, (X, Y)),
    "logistic regression": Idiom(logistic_regression, (X, LABELS)),
    "PyroModule": Idiom(Regression(), (X, Y)),
    "completely pooled": Idiom(completely_pooled, (AT_BATS, HITS)),
    "even odds": Idiom(completely_pooled, (AT_BATS[:1] - 5.0, torch.tensor([20.0]))),
    "not pooled": Idiom(not_pooled, (AT_BATS, HITS)),
    "pooled by logit, scale maximised": Idiom(pooled_by_logit, (AT_BATS, HITS), {"maximise": ["scale"]}),
    "mixture": Idiom(mixture, (CLUMPS,)),
    "MixtureSameFamily": Idiom(same_family, (CLUMPS,)),
    "hidden Markov": Idiom(hidden_markov, (STATES,)),
    "DiscreteHMM": Idiom(hidden_markov_at_once, (STATES,)),
    "random walk": Idiom(random_walk, (JUMP,)),
    "capture and recapture": Idiom(capture_recapture, (animals(),)),
    "logistic growth": Idiom(growth, (TABLE,)),
    "Poisson regression": Idiom(poisson_regression, (X, COUNTS)),
    "zero-inflated": Idiom(zero_inflated, (X, COUNTS)),
    "overdispersed": Idiom(overdispersed, (X, COUNTS)),
    "ordinal": Idiom(ordinal, (X, WIDE)),
    "categorical": Idiom(categorical, (X, WIDE)),
    "robust": Idiom(robust, (X, Y)),
    "LKJ": Idiom(correlated, (PLANE,)),
    "Dirichlet": Idiom(simplex, (torch.tensor([12.0, 7.0, 3.0]),)),
    "varying intercepts": Idiom(varying_intercepts, (Y, GROUP)),
    "learned spread": Idiom(learned_spread, (Y, GROUP)),
    "reparametrised": Idiom(non_centred, SCHOOLS),
    "Rasch": Idiom(rasch, (ANSWERS,)),
    "censored": Idiom(censored, (TIMES.clamp(max=1.5), TIMES < 1.5)),
    "masked": Idiom(masked, (X, Y)),
    "obs_mask": Idiom(imputed, (X, Y)),
    "scaled": Idiom(weighted, (X, Y)),
    "deterministic": Idiom(recorded, (X, Y)),
    "Gaussian process": Idiom(process, (X, Y)),
    "change point": Idiom(change_point, (JUMP,)),
    "smooth lasso": Idiom(smooth_lasso, (X, Y)),
    "params alone": Idiom(only_params, (Y,)),
    "params and classes": Idiom(only_params_and_classes, (CLUMPS,)),
}
REFUSED: dict[str, Idiom] = {
    "lasso": Idiom(lasso, (X, Y), message="site 'w', a Laplace, has a kink"),
    "absolute errors": Idiom(absolute_errors, (X, Y), message="site 'y', a Laplace, has a kink"),
    "subsampled": Idiom(subsampled, (X, Y), message="plate 'data' subsamples 10 of 60"),
    "counted latent": Idiom(counted_latent, (Y,), message="site 'n' is a discrete latent, Poisson, without finite"),
    "separable": Idiom(flat_prior, (X, (X[:, 0] > 0).to(X.dtype)), message="improper"),
    "unnamed randomness": Idiom(unnamed_randomness, (X, Y), message="not a fixed function"),
    "moving support": Idiom(moving_support, (Y,), message="depends on another site"),
}
