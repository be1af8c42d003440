"""Models of groups, and data for them."""

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import LaplaceState, Problem, laplace_problem, laplace_state
from pyro_evidence.program.log_joint import LogJoint
from tests.models_for_tests.engine_models import positive

Model = Callable[..., None]


def groups(num: int, rows: int, variance: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor, int, Tensor]:
    """Two inputs, the group of each row, the number of groups, binary targets."""
    generator = torch.Generator().manual_seed(seed)
    group = torch.arange(num).repeat_interleave(rows)
    X = torch.randn(num * rows, 2, generator=generator, dtype=torch.float64)
    b = variance**0.5 * torch.randn(num, generator=generator, dtype=torch.float64)
    eta = X @ torch.tensor([0.5, -0.5], dtype=torch.float64) + b[group]
    return X, group, num, (torch.rand(len(X), generator=generator, dtype=torch.float64) < eta.sigmoid()).double()


def intercepts(X: Tensor, group: Tensor, num: int, y: Tensor, sd: float = 1.0) -> None:
    """Random intercepts; the fixed effects are latent."""
    w = pyro.sample("w", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    s = positive("s", sd)
    with pyro.plate("groups", num):
        b = pyro.sample("b", dist.Normal(0.0, s))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w + b[group]), obs=y)


def fixed(X: Tensor, group: Tensor, num: int, y: Tensor, sd: float = 1.0) -> None:
    """Random intercepts; the fixed effects are params."""
    w, s = pyro.param("w", torch.tensor([0.3, -0.2])), positive("s", sd)
    with pyro.plate("groups", num):
        b = pyro.sample("b", dist.Normal(0.0, s))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w + b[group]), obs=y)


def slopes(X: Tensor, group: Tensor, num: int, y: Tensor) -> None:
    """Correlated intercepts and slopes, counts."""
    w = pyro.sample("w", dist.Normal(0.0, 3.0))
    sd = positive("sd", torch.tensor([0.8, 0.5]))
    tril = sd.unsqueeze(-1) * torch.tensor([[1.0, 0.0], [0.4, 0.9]])
    with pyro.plate("groups", num):
        a = pyro.sample("a", dist.MultivariateNormal(torch.zeros(2), scale_tril=tril))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Poisson((w + a[group, 0] + a[group, 1] * X[:, 0]).exp()), obs=y)


def heavy(X: Tensor, group: Tensor, num: int, y: Tensor) -> None:
    """Centred effects with heavy tails about a latent mean: no linear Gaussian structure."""
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    s = positive("s", 0.7)
    with pyro.plate("groups", num):
        b = pyro.sample("b", dist.StudentT(5.0, mean, s))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Binomial(3, logits=b[group]), obs=y)


def enumerated(X: Tensor, group: Tensor, num: int, y: Tensor) -> None:
    """A discrete site for each group, summed out."""
    s = positive("s", 1.0)
    plate = pyro.plate("groups", num, dim=-1)
    with plate:
        z = pyro.sample("z", dist.Bernoulli(0.3))
        b = pyro.sample("b", dist.Normal(0.0, s))
    with plate, pyro.plate("rows", len(X) // num, dim=-2):
        pyro.sample("y", dist.Normal(b + 0.8 * z, 0.5), obs=X[:, 0].reshape(num, -1).mT)


def problem_of(model: Model, *args: object, nodes: int = 1) -> Problem:
    """The problem of a model and its data."""
    found = laplace_problem(LogJoint(model, args))
    return Problem(found.joint, found.structure, found.curvature, found.active, nodes)


def state_of(model: Model, *args: object, nodes: int = 1) -> LaplaceState:
    """The state at the first hyperparameters."""
    problem = problem_of(model, *args, nodes=nodes)
    return laplace_state(problem, problem.joint.initial_theta, problem.joint.initial_u, cold=True)
