"""Regressions, time series, hidden Markov models with flat priors on coefficients and scales, as by default in Stan."""

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from torch import Tensor

from tests.gallery.programs.program import Program, coin, normal, ordered_logistic, poisson, uniform

T = torch.tensor
NO_EVIDENCE = ("no evidence to weigh models by",)


def flat(name: str, support: constraints.Constraint = constraints.real, *shape: int) -> Tensor:
    return pyro.sample(name, dist.ImproperUniform(support, (), shape))


# --- regressions ---


def interaction(x: Tensor, group: Tensor, y: Tensor) -> None:
    beta, sigma = flat("beta", constraints.real_vector, 4), flat("sigma", constraints.positive)
    mean = beta[0] + beta[1] * group + beta[2] * x + beta[3] * group * x
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(mean, sigma), obs=y)


def raw_units(size: Tensor, yield_: Tensor) -> None:
    """Yields in grams on sizes in centimetres."""
    beta, sigma = flat("beta", constraints.real_vector, 2), flat("sigma", constraints.positive)
    with pyro.plate("rows", len(yield_)):
        pyro.sample("y", dist.Normal(beta[0] + beta[1] * size, sigma), obs=yield_)


def logistic(X: Tensor, y: Tensor) -> None:
    alpha, beta = flat("alpha"), flat("beta", constraints.real_vector, 2)
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=alpha + X @ beta), obs=y)


def counts(X: Tensor, y: Tensor) -> None:
    alpha, beta = flat("alpha"), flat("beta", constraints.real_vector, 2)
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Poisson((alpha + X @ beta).exp()), obs=y)


def robust(X: Tensor, y: Tensor) -> None:
    alpha, beta, sigma = flat("alpha"), flat("beta", constraints.real_vector, 2), flat("sigma", constraints.positive)
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.StudentT(4.0, alpha + X @ beta, sigma), obs=y)


def ordered(x: Tensor, y: Tensor) -> None:
    beta, cuts = flat("beta"), flat("cuts", constraints.ordered_vector, 3)
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.OrderedLogistic(beta * x, cuts), obs=y)


def ordered_by_gaps(x: Tensor, y: Tensor) -> None:
    beta, first, gaps = flat("beta"), flat("first"), flat("gaps", constraints.independent(constraints.positive, 1), 2)
    cuts = pyro.deterministic("cuts", torch.cat([first.unsqueeze(-1), first + gaps.cumsum(-1)]))
    pyro.factor("y", ordered_logistic(beta * x, cuts, y).sum())


def lifetimes(x: Tensor, time: Tensor, seen: Tensor) -> None:
    """Weibull, censored: intercept, slope and shape are flat."""
    alpha, beta, shape = flat("alpha"), flat("beta"), flat("shape", constraints.positive)
    z = shape * (time.log() - alpha - beta * x)
    pyro.factor("y", (torch.where(seen, shape.log() + z, torch.zeros(())) - z.exp()).sum())


def intercepts(group: Tensor, y: Tensor) -> None:
    mu, tau, sigma = flat("mu"), flat("tau", constraints.positive), flat("sigma", constraints.positive)
    with pyro.plate("groups", 10):
        a = pyro.sample("a", dist.Normal(mu, tau))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(a[group], sigma), obs=y)


def intercepts_integrated(group: Tensor, y: Tensor) -> None:
    """Eight rows of a group are normal, with the variance of its intercept in common."""
    mu, tau, sigma = flat("mu"), flat("tau", constraints.positive), flat("sigma", constraints.positive)
    covariance = tau.square() * torch.ones(8, 8) + sigma.square() * torch.eye(8)
    with pyro.plate("groups", 10):
        fn = dist.MultivariateNormal(mu * torch.ones(8), covariance)
        pyro.sample("y", fn, obs=y.reshape(8, 10).T)  # group 0 has every tenth row


# --- time series ---


def autoregression(y: Tensor) -> None:
    alpha, beta, sigma = flat("alpha"), flat("beta", constraints.real_vector, 2), flat("sigma", constraints.positive)
    mean = alpha + beta[0] * y[1:-1] + beta[1] * y[:-2]
    pyro.sample("y", dist.Normal(mean, sigma).to_event(1), obs=y[2:])


def moving_average(y: Tensor) -> None:
    """Of one term, an error after the other."""
    mu, theta, sigma = flat("mu"), flat("theta", constraints.interval(-1.0, 1.0)), flat("sigma", constraints.positive)
    error = 0.0
    for t, value in enumerate(y):
        mean = mu + theta * error
        pyro.sample(f"y_{t}", dist.Normal(mean, sigma), obs=value)
        error = value - mean


def arch(y: Tensor) -> None:
    """Conditional heteroscedasticity of order one; mu, alpha0 and alpha1 are flat."""
    mu, alpha0 = flat("mu"), flat("alpha0", constraints.positive)
    alpha1 = flat("alpha1", constraints.unit_interval)
    variance = alpha0 + alpha1 * (y[:-1] - mu).square()
    pyro.sample("y", dist.Normal(mu, variance.sqrt()).to_event(1), obs=y[1:])


def local_level(y: Tensor) -> None:
    """A level that walks; both scales are flat, and the first level."""
    walk, sigma = flat("walk", constraints.positive), flat("sigma", constraints.positive)
    first = flat("first")
    steps = pyro.sample("steps", dist.Normal(0.0, walk).expand([len(y) - 1]).to_event(1))
    level = first + torch.cat([steps.new_zeros(1), steps.cumsum(-1)])
    pyro.sample("y", dist.Normal(level, sigma).to_event(1), obs=y)


def local_level_in_noise(y: Tensor) -> None:
    walk, sigma = flat("walk", constraints.positive), flat("sigma", constraints.positive)
    first = flat("first")
    noise = pyro.sample("noise", dist.Normal(0.0, 1.0).expand([len(y) - 1]).to_event(1))
    steps = pyro.deterministic("steps", walk * noise)
    level = first + torch.cat([noise.new_zeros(1), steps.cumsum(-1)])
    pyro.sample("y", dist.Normal(level, sigma).to_event(1), obs=y)


# --- hidden Markov models ---


def hidden_normal(y: Tensor) -> None:
    """Two states in order, their common spread flat, rows of the transition matrix flat on the simplex."""
    rows = pyro.sample("rows", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
    mu, sigma = flat("mu", constraints.ordered_vector, 2), flat("sigma", constraints.positive)
    state = 0
    for t in pyro.markov(range(len(y))):
        state = pyro.sample(f"s_{t}", dist.Categorical(rows[state]), infer={"enumerate": "parallel"})
        pyro.sample(f"y_{t}", dist.Normal(mu[state], sigma), obs=y[t])


def hidden_normal_summed(y: Tensor) -> None:
    rows = pyro.sample("rows", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
    first, gap, sigma = flat("first"), flat("gap", constraints.positive), flat("sigma", constraints.positive)
    mu = pyro.deterministic("mu", torch.stack([first, first + gap], -1))
    forward(rows, dist.Normal(mu, sigma.unsqueeze(-1)).log_prob(y.unsqueeze(-1)))


def hidden_counts(y: Tensor) -> None:
    """Two states of Poisson counts, their rates flat and in order."""
    rows = pyro.sample("rows", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
    rates = flat("rates", constraints.positive_ordered_vector, 2)
    state = 0
    for t in pyro.markov(range(len(y))):
        state = pyro.sample(f"s_{t}", dist.Categorical(rows[state]), infer={"enumerate": "parallel"})
        pyro.sample(f"y_{t}", dist.Poisson(rates[state]), obs=y[t])


def hidden_at_once(y: Tensor) -> None:
    """The same in Pyro's own distribution of whole sequences."""
    rows = pyro.sample("rows", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
    rates = flat("rates", constraints.positive_ordered_vector, 2)
    pyro.sample("y", dist.DiscreteHMM(rows[..., 0, :].log(), rows.log(), dist.Poisson(rates)), obs=y)


def hidden_at_once_summed(y: Tensor) -> None:
    """DiscreteHMM moves before it looks: the first state is two steps from the row of state 0."""
    rows = pyro.sample("rows", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
    first, gap = flat("first", constraints.positive), flat("gap", constraints.positive)
    rates = pyro.deterministic("rates", torch.stack([first, first + gap], -1))
    forward(rows, y.unsqueeze(-1) * rates.log() - rates - (y + 1.0).lgamma().unsqueeze(-1), rows[0] @ rows)


def hidden_counts_summed(y: Tensor) -> None:
    rows = pyro.sample("rows", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
    first, gap = flat("first", constraints.positive), flat("gap", constraints.positive)
    rates = pyro.deterministic("rates", torch.stack([first, first + gap], -1))
    forward(rows, y.unsqueeze(-1) * rates.log() - rates - (y + 1.0).lgamma().unsqueeze(-1))


def forward(rows: Tensor, emission: Tensor, first: Tensor | None = None) -> None:
    """The forward recursion; a chain begins with the row of state 0, if nothing else is said."""
    log_rows = rows.log()
    heights = (rows[0] if first is None else first).log() + emission[0]
    for t in range(1, len(emission)):
        heights = (heights.unsqueeze(-1) + log_rows).logsumexp(-2) + emission[t]
    pyro.factor("y", heights.logsumexp(-1))


X = normal(80, 2)
Z = X @ T([1.0, -0.7]).double()
SWITCHED = (torch.arange(80) // 10 % 2).double()


def scores() -> tuple[Tensor, Tensor, Tensor]:
    x, group = 100.0 + 15.0 * X[:, 0], coin(torch.full((80,), 0.7).double())
    return x, group, 10.0 + 40.0 * group + 0.9 * x - 0.4 * group * x + 18.0 * normal(80, seed=1)


def autoregressive() -> tuple[Tensor]:
    y = [T(0.0).double(), T(0.0).double()]
    for e in normal(80, seed=2):
        y.append(1.0 + 0.5 * y[-1] - 0.2 * y[-2] + 2.0 * e)
    return (torch.stack(y[2:]),)


def bursts() -> tuple[Tensor]:
    y = [T(0.0).double()]
    for e in normal(150, seed=3):
        y.append(0.3 + (1.0 + 0.5 * (y[-1] - 0.3).square()).sqrt() * e)
    return (torch.stack(y[1:]),)


def moving() -> tuple[Tensor]:
    e = normal(61, seed=4)
    return (2.0 + 1.5 * (e[1:] + 0.5 * e[:-1]),)


def survival() -> tuple[Tensor, Tensor, Tensor]:
    time = (2.0 + 0.6 * X[:60, 0] + 0.7 * (-uniform(60, seed=5).log()).log()).exp()
    return X[:60, 0], time.clamp(max=20.0), time < 20.0


PROGRAMS: dict[str, Program] = {
    "flat: interaction": Program(interaction, scores, says=NO_EVIDENCE),
    "flat: raw units": Program(
        raw_units,
        lambda: (50.0 + 20.0 * X[:, 0], 43000.0 + 800.0 * X[:, 0] + 3000.0 * normal(80, seed=6)),
        says=NO_EVIDENCE,
    ),
    "flat: logistic": Program(logistic, lambda: (X, coin((0.5 * Z).sigmoid(), 7)), says=NO_EVIDENCE),
    "flat: counts": Program(counts, lambda: (X, poisson((0.5 + 0.5 * Z).exp(), 8)), says=NO_EVIDENCE),
    "flat: robust": Program(
        robust, lambda: (X, 1.0 + Z + 0.4 * normal(80, seed=9) / uniform(80, seed=10).sqrt()), says=NO_EVIDENCE
    ),
    "flat: ordered": Program(
        ordered,
        lambda: (X[:, 0], torch.bucketize(X[:, 0] + 1.7 * normal(80, seed=11), T([-1.5, 0.0, 1.5]).double())),
        says=NO_EVIDENCE,
        summed=ordered_by_gaps,
    ),
    "flat: lifetimes": Program(lifetimes, survival, says=NO_EVIDENCE),
    "flat: intercepts": Program(
        intercepts,
        lambda: (torch.arange(80) % 10, 3.0 + (1.5 * normal(10, seed=12))[torch.arange(80) % 10] + normal(80, seed=13)),
        says=NO_EVIDENCE,
        summed=intercepts_integrated,
    ),
    "flat: autoregression": Program(autoregression, autoregressive, says=NO_EVIDENCE),
    "flat: moving average": Program(moving_average, moving, says=NO_EVIDENCE),
    "flat: arch": Program(arch, bursts, says=NO_EVIDENCE),
    "flat: local level": Program(
        local_level,
        lambda: (5.0 + (0.7 * normal(50, seed=14)).cumsum(0) + normal(50, seed=15),),
        says=NO_EVIDENCE,
        summed=local_level_in_noise,
    ),
    "flat: hidden normal": Program(
        hidden_normal,
        lambda: (1.0 + 3.0 * SWITCHED + normal(80, seed=16),),
        says=NO_EVIDENCE,
        summed=hidden_normal_summed,
        slow=True,
    ),
    "flat: hidden at once": Program(
        hidden_at_once,
        lambda: (poisson(2.0 + 6.0 * SWITCHED, 17),),
        says=NO_EVIDENCE,
        summed=hidden_at_once_summed,
        slow=True,
    ),
    "flat: hidden counts": Program(
        hidden_counts,
        lambda: (poisson(2.0 + 6.0 * SWITCHED, 17),),
        says=NO_EVIDENCE,
        summed=hidden_counts_summed,
        slow=True,
    ),
}
