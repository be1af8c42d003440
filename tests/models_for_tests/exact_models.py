"""Models whose evidence is known on paper, or by quadrature, and exact posterior chains for them."""

import math

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor


def straight(X: Tensor, y: Tensor | None = None) -> Tensor:
    """Linear-Gaussian, prior precision 1, noise precision 4."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[-1]]).to_event(1))
    with pyro.plate("data", len(X)):
        return pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def straight_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(20, 3, generator=generator)
    return X, X @ torch.tensor([1.0, -0.5, 0.3]) + 0.5 * torch.randn(20, generator=generator)


def straight_log_evidence(X: Tensor, y: Tensor) -> float:
    """Oracle: the weights integrated out on paper."""
    covariance = 0.25 * torch.eye(len(y)) + X @ X.T
    return float(dist.MultivariateNormal(torch.zeros(len(y)), covariance).log_prob(y))


def straight_posterior(X: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Oracle: mean and covariance of the weights."""
    covariance = torch.linalg.inv(torch.eye(X.shape[1]) + 4.0 * X.T @ X)
    return 4.0 * covariance @ X.T @ y, covariance


def coin(num_tosses: int, heads: Tensor) -> None:
    """Beta-binomial with a uniform prior: every number of heads has evidence 1 / (n + 1)."""
    p = pyro.sample("p", dist.Uniform(0.0, 1.0))
    pyro.sample("heads", dist.Binomial(num_tosses, p), obs=heads)


def location(x: Tensor) -> None:
    """Normal with known variance: mean N(0, 2^2), noise sd 1."""
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(mean, 1.0), obs=x)


def location_log_evidence(x: Tensor) -> float:
    """Oracle: Murphy (2007), the conjugate normal with known variance, marginal likelihood."""
    n, total = len(x), float(x.sum())
    quadratic = float(x.square().sum()) - total**2 / (n + 0.25)
    return -0.5 * n * math.log(math.tau) - 0.5 * math.log(4.0 * (n + 0.25)) - 0.5 * quadratic


def location_posterior(x: Tensor) -> tuple[float, float]:
    """Oracle: mean and sd."""
    precision = len(x) + 0.25
    return float(x.sum()) / precision, precision**-0.5


def sticky(mean: Tensor, covariance: Tensor, num: int, rho: float, generator: torch.Generator) -> Tensor:
    """A stationary chain ``(num, D)`` with that exact normal distribution and autocorrelation ``rho``."""
    white = torch.randn(num, len(mean), generator=generator)
    for i in range(1, num):
        white[i] = rho * white[i - 1] + math.sqrt(1.0 - rho**2) * white[i]
    return mean + white @ torch.linalg.cholesky(covariance).T


def two_normals(x: Tensor) -> None:
    """Tied two-component mixture: centres N(0, 5^2), noise sd 1, equal proportions."""
    with pyro.plate("components", 2):
        centre = pyro.sample("centre", dist.Normal(0.0, 5.0))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Categorical(torch.ones(2) / 2), infer={"enumerate": "parallel"})
        pyro.sample("x", dist.Normal(centre[z], 1.0), obs=x)


def two_normals_data(separation: float, num: int = 50) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num, generator=generator)
    return x + separation * ((torch.arange(num) % 2) - 0.5)


GRID = torch.linspace(-8.0, 8.0, 401, dtype=torch.float64)


def _log_joint_on_grid(x: Tensor) -> Tensor:
    a, b = torch.meshgrid(GRID, GRID, indexing="ij")
    total = dist.Normal(0.0, 5.0).log_prob(a) + dist.Normal(0.0, 5.0).log_prob(b)
    for value in x:
        pair = torch.stack([dist.Normal(a, 1.0).log_prob(value), dist.Normal(b, 1.0).log_prob(value)])
        total = total + pair.logsumexp(0) - math.log(2.0)
    return total


def two_normals_log_evidence(x: Tensor) -> float:
    """Oracle: quadrature over both centres."""
    return float(_log_joint_on_grid(x).flatten().logsumexp(0)) + 2.0 * math.log(float(GRID[1] - GRID[0]))


def two_normals_draws(x: Tensor, num: int) -> Tensor:
    """Independent posterior draws ``(num, 2)`` to within a grid cell."""
    generator = torch.Generator().manual_seed(11)
    cell = torch.multinomial(_log_joint_on_grid(x).flatten().softmax(0), num, replacement=True, generator=generator)
    centres = torch.stack([GRID[cell // len(GRID)], GRID[cell % len(GRID)]], -1)
    jitter = torch.rand(num, 2, generator=generator, dtype=torch.float64) - 0.5
    return centres + jitter * (GRID[1] - GRID[0])
