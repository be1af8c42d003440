"""NumPyro's examples, written for Pyro, with data small or simulated."""

import functools
import math

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from tests.gallery.programs.program import Program, coin, normal, poisson, random, uniform

T = torch.tensor


def ar2(y: Tensor) -> None:
    alpha_1 = pyro.sample("alpha_1", dist.Normal(0.0, 1.0))
    alpha_2 = pyro.sample("alpha_2", dist.Normal(0.0, 1.0))
    const = pyro.sample("const", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    mean = const + alpha_1 * y[1:-1] + alpha_2 * y[:-2]
    pyro.sample("y", dist.Normal(mean, sigma).to_event(1), obs=y[2:])


def volatility(returns: Tensor) -> None:
    """A random walk of log volatility behind Student's returns."""
    step = pyro.sample("sigma", dist.Exponential(50.0))
    nu = pyro.sample("nu", dist.Exponential(0.1))
    noise = pyro.sample("noise", dist.Normal(0.0, 1.0).expand([len(returns)]).to_event(1))
    pyro.sample("r", dist.StudentT(nu, 0.0, (step * noise.cumsum(-1)).exp()).to_event(1), obs=returns)


def logistic(X: Tensor, y: Tensor) -> None:
    coefs = pyro.sample("coefs", dist.Normal(torch.zeros(X.shape[1]), torch.ones(X.shape[1])).to_event(1))
    with pyro.plate("N", len(X)):
        pyro.sample("obs", dist.Bernoulli(logits=X @ coefs), obs=y)


def ucbadmit(dept: Tensor, male: Tensor, applications: Tensor, admit: Tensor) -> None:
    """Intercepts and slopes of departments, correlated, non-centred."""
    v_mu = pyro.sample("v_mu", dist.Normal(torch.zeros(2), T([4.0, 1.0])).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(torch.ones(2)).to_event(1))
    L = pyro.sample("L_Rho", dist.LKJCholesky(2, T(2.0)))
    z = pyro.sample("z", dist.Normal(torch.zeros(6, 2), 1.0).to_event(2))
    v = v_mu + z @ (sigma.unsqueeze(-1) * L).mT
    with pyro.plate("rows", len(admit)):
        pyro.sample("admit", dist.Binomial(applications, logits=v[dept, 0] + v[dept, 1] * male), obs=admit)


def zero_inflated(X: Tensor, y: Tensor) -> None:
    b_rate = pyro.sample("b_rate", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    gate = pyro.sample("gate", dist.Uniform(0.0, 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.ZeroInflatedPoisson((X @ b_rate).exp(), gate=gate), obs=y)


def predator_prey(y: Tensor) -> None:
    """Hares and lynxes: a differential equation by Runge and Kutta, noise on the log scale."""
    initial = pyro.sample("z_init", dist.LogNormal(math.log(10.0), 1.0).expand([2]).to_event(1))
    theta = pyro.sample("theta", dist.LogNormal(T([0.5, 0.05, 1.0, 0.05]).log(), 0.3).to_event(1))
    sigma = pyro.sample("sigma", dist.LogNormal(-1.0, 1.0).expand([2]).to_event(1))

    def slope(z: Tensor) -> Tensor:
        u, v = z[..., 0], z[..., 1]
        return torch.stack([(theta[0] - theta[1] * v) * u, (-theta[2] + theta[3] * u) * v], -1)

    z, rows = initial, [initial]
    for _ in range(4 * (len(y) - 1)):
        k1 = slope(z)
        k2 = slope(z + 0.125 * k1)
        k3 = slope(z + 0.125 * k2)
        k4 = slope(z + 0.25 * k3)
        z = z + (k1 + 2.0 * k2 + 2.0 * k3 + k4) / 24.0
        rows.append(z)
    pyro.sample("y", dist.LogNormal(torch.stack(rows)[::4].clamp(min=1e-6).log(), sigma).to_event(2), obs=y)


def gp(x: Tensor, y: Tensor) -> None:
    var = pyro.sample("kernel_var", dist.LogNormal(0.0, 10.0))
    noise = pyro.sample("kernel_noise", dist.LogNormal(0.0, 10.0))
    length = pyro.sample("kernel_length", dist.LogNormal(0.0, 10.0))
    square = ((x.unsqueeze(-1) - x) / length).square()
    k = var * (-0.5 * square).exp() + (noise + 1e-6) * torch.eye(len(x))
    pyro.sample("Y", dist.MultivariateNormal(torch.zeros(len(x)), k), obs=y)


def multinomial_annotation(positions: Tensor, notes: Tensor) -> None:
    """All annotators are one: an item's class, and a row of confusion for each class."""
    pi = pyro.sample("pi", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("classes", 3):
        zeta = pyro.sample("zeta", dist.Dirichlet(torch.ones(3) + 4.0 * torch.eye(3)))
    with pyro.plate("item", len(notes), dim=-2):
        c = pyro.sample("c", dist.Categorical(pi), infer={"enumerate": "parallel"})
        with pyro.plate("position", notes.shape[1], dim=-1):
            pyro.sample("y", dist.Categorical(zeta[c]), obs=notes)


def dawid_skene(notes: Tensor) -> None:
    """Each annotator has a confusion of its own."""
    pi = pyro.sample("pi", dist.Dirichlet(torch.ones(2)))
    with pyro.plate("annotator", notes.shape[1], dim=-2), pyro.plate("class", 2, dim=-1):
        beta = pyro.sample("beta", dist.Dirichlet(torch.ones(2, 2) + 3.0 * torch.eye(2)))
    with pyro.plate("item", len(notes), dim=-2):
        c = pyro.sample("c", dist.Categorical(pi), infer={"enumerate": "parallel"})
        with pyro.plate("position", notes.shape[1], dim=-1) as place:
            pyro.sample("y", dist.Categorical(beta[place, c]), obs=notes)


def hsgp(x: Tensor, y: Tensor) -> None:
    """A Gaussian process by ten sines, with its amplitude, length and noise."""
    alpha = pyro.sample("alpha", dist.HalfNormal(1.0))
    length = pyro.sample("length", dist.InverseGamma(5.0, 5.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([10]).to_event(1))
    frequency = torch.arange(1.0, 11.0) * math.pi / 6.0
    basis = (frequency * (x.unsqueeze(-1) + 3.0)).sin() / 3.0**0.5
    density = alpha**2 * (2.0 * math.pi) ** 0.5 * length * (-0.5 * (length * frequency).square()).exp()
    pyro.sample("y", dist.Normal(basis @ (density.sqrt() * beta), noise).to_event(1), obs=y)


def horseshoe(X: Tensor, Y: Tensor, binary: bool = False) -> None:
    d = X.shape[1]
    lambdas = pyro.sample("lambdas", dist.HalfCauchy(torch.ones(d)).to_event(1))
    tau = pyro.sample("tau", dist.HalfCauchy(torch.ones(1)).to_event(1))
    unscaled = pyro.sample("unscaled_betas", dist.Normal(0.0, torch.ones(d)).to_event(1))
    mean = X @ (tau * lambdas * unscaled)
    if binary:
        pyro.sample("Y", dist.Bernoulli(logits=mean).to_event(1), obs=Y)
    else:
        precision = pyro.sample("prec_obs", dist.Gamma(3.0, 1.0))
        pyro.sample("Y", dist.Normal(mean, precision.rsqrt()).to_event(1), obs=Y)


def holt_winters(y: Tensor) -> None:
    """Level, trend and season by exponential smoothing, a step after the other."""
    level_sm = pyro.sample("level_sm", dist.Beta(2.0, 2.0))
    trend_sm = pyro.sample("trend_sm", dist.Beta(2.0, 2.0))
    season_sm = pyro.sample("s_sm", dist.Beta(2.0, 2.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    level = pyro.sample("level_init", dist.Normal(0.0, 5.0))
    trend = pyro.sample("trend_init", dist.Normal(0.0, 1.0))
    with pyro.plate("seasons", 4):
        first = pyro.sample("s_init", dist.Normal(0.0, 1.0))
    season = list(first.unbind(-1))
    for t, value in enumerate(y):
        pyro.sample(f"y_{t}", dist.Normal(level + trend + season[t % 4], noise), obs=value)
        before = level
        level = level_sm * (value - season[t % 4]) + (1.0 - level_sm) * (level + trend)
        trend = trend_sm * (level - before) + (1.0 - trend_sm) * trend
        season[t % 4] = season_sm * (value - level) + (1.0 - season_sm) * season[t % 4]


def sgt(y: Tensor) -> None:
    """Seasonal global trend: a clamp in the loop, as the script has it."""
    sigma = pyro.sample("sigma", dist.HalfCauchy(1.0))
    nu = pyro.sample("nu", dist.Uniform(2.0, 20.0))
    coef = pyro.sample("coef_trend", dist.Cauchy(0.0, 1.0))
    smoothing = pyro.sample("level_sm", dist.Beta(1.0, 2.0))
    power = pyro.sample("powx", dist.Uniform(0.0, 1.0))
    level = y[0]
    for t in range(1, len(y)):
        mean = (level + coef * level.abs() ** power).clamp(min=y[t] - 0.3)
        pyro.sample(f"y_{t}", dist.StudentT(nu, mean, sigma), obs=y[t])
        level = smoothing * y[t] + (1.0 - smoothing) * level


def cubic_link(x: Tensor, y: Tensor) -> None:
    """Dais: a process behind counts by a cubic link."""
    length = pyro.sample("length", dist.InverseGamma(5.0, 5.0))
    square = ((x.unsqueeze(-1) - x) / length).square()
    K = (-0.5 * square).exp() + 1e-4 * torch.eye(len(x))
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(len(x)), K))
    pyro.sample("y", dist.Normal(f**3, 0.3).to_event(1), obs=y)


def autoregressive(num: int) -> Tensor:
    y, noise = [T(0.0).double(), T(0.0).double()], normal(num)
    for e in noise:
        y.append(0.2 + 0.6 * y[-1] - 0.3 * y[-2] + 0.5 * e)
    return torch.stack(y[2:])


HARES = T([30, 47.2, 70.2, 77.4, 36.3, 20.6, 18.1, 21.4, 22, 25.4, 27.1]).double()
LYNXES = T([4, 6.1, 9.8, 35.2, 59.4, 41.7, 19, 13, 8.3, 9.1, 7.4]).double()
ROWS = normal(400, 6, seed=1)
DEPARTMENT, MALE = torch.arange(12) // 2, (1.0 - torch.arange(12) % 2).double()
APPLICATIONS = T([825, 108, 560, 25, 325, 593, 417, 375, 191, 393, 373, 341]).double()
ADMITTED = T([512, 89, 353, 17, 120, 202, 138, 131, 53, 94, 22, 24]).double()
LINE = torch.linspace(-1.0, 1.0, 30).double()


def sparse_rows() -> tuple[Tensor, Tensor]:
    X = normal(50, 6)
    return X, X[:, 0] + 2.0 * X[:, 1] + 0.5 * X[:, 2] + 0.3 * normal(50, seed=1)


def inflated_rows() -> tuple[Tensor, Tensor]:
    X = torch.stack([torch.ones(200), normal(200, seed=2)], -1)
    return X, poisson((X @ T([1.0, 0.5]).double()).exp(), 3) * coin(torch.full((200,), 0.7).double(), 4)


def notes(num: int, places: int, classes: int) -> Tensor:
    truth = torch.randint(classes, (num, 1), generator=random(6))
    wrong = torch.randint(classes, (num, places), generator=random(7))
    return torch.where(uniform(num, places, seed=8) < 0.7, truth.expand(-1, places), wrong)


def seasons(num: int) -> Tensor:
    t = torch.arange(num).double()
    return 0.1 * t + T([1.0, -0.5, 0.3, -0.8]).double()[torch.arange(num) % 4] + 0.2 * normal(num)


PROGRAMS: dict[str, Program] = {
    "ar2": Program(ar2, lambda: (autoregressive(100),)),
    "stochastic volatility": Program(
        volatility, lambda: ((0.02 * normal(100).cumsum(0)).exp() * 0.5 * normal(100, seed=1),)
    ),
    "covtype": Program(logistic, lambda: (ROWS, coin((ROWS @ T([1.0, -1.0, 0.5, 0, 0, 0.2]).double()).sigmoid(), 2))),
    "proportion": Program(
        logistic, lambda: (ROWS[:, :3], coin((ROWS[:, :3] @ T([0.5, -0.5, 0.1]).double()).sigmoid(), 3))
    ),
    "ucbadmit": Program(ucbadmit, lambda: (DEPARTMENT, MALE, APPLICATIONS, ADMITTED)),
    "zero-inflated Poisson": Program(zero_inflated, inflated_rows),
    "predator and prey": Program(predator_prey, lambda: (torch.stack([HARES, LYNXES], -1),), slow=True),
    "gp": Program(gp, lambda: (LINE, (3.0 * LINE).sin() + 0.2 * normal(30, seed=5)), compared=False),
    "annotation, multinomial": Program(
        multinomial_annotation, lambda: (torch.arange(4), notes(30, 4, 3)), compared=False
    ),
    "annotation, Dawid and Skene": Program(dawid_skene, lambda: (notes(30, 4, 2),), compared=False),
    "hsgp": Program(hsgp, lambda: (2.0 * LINE, (4.0 * LINE).sin() + 0.2 * normal(30, seed=5)), compared=False),
    "horseshoe": Program(horseshoe, sparse_rows, slow=True, compared=False),
    "horseshoe, binary": Program(
        functools.partial(horseshoe, binary=True),
        lambda: (sparse_rows()[0], (sparse_rows()[1] > 0).double()),
        slow=True,
        compared=False,
    ),
    "Holt and Winters": Program(holt_winters, lambda: (seasons(40),), slow=True),
    "seasonal global trend": Program(sgt, lambda: (2.0 + torch.arange(30) * 0.1 + 0.3 * normal(30),), compared=False),
    "cubic link": Program(cubic_link, lambda: (LINE, (2.0 * LINE) ** 3 * 0.3 + 0.3 * normal(30)), compared=False),
}
