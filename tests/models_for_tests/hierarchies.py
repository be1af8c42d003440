"""Hierarchical models made from a seed: nested, crossed, slopes, chains, meshes, mixtures of these."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.ops.indexing import Vindex
from torch import Tensor
from torch.distributions import constraints

Model = Callable[..., None]
Likelihood = Callable[[Tensor], Any]  # a predictor to a distribution
Case = tuple[Model, tuple[Any, ...]]


def positive(name: str, value: float = 1.0) -> Tensor:
    """A positive hyperparameter."""
    return pyro.param(name, torch.tensor(value), constraint=constraints.positive)


def gaussian(eta: Tensor) -> Any:
    """Noise of learned scale."""
    return dist.Normal(eta, positive("noise", 0.7))


def bernoulli(eta: Tensor) -> Any:
    """Two classes."""
    return dist.Bernoulli(logits=eta)


def poisson(eta: Tensor) -> Any:
    """Counts."""
    return dist.Poisson(eta.clamp(max=20.0).exp() if eta.dim() > 9 else eta.exp())


def negative_binomial(eta: Tensor) -> Any:
    """Counts with more spread, their parameter learned."""
    return dist.NegativeBinomial(positive("spread", 3.0), logits=eta)


def student(eta: Tensor) -> Any:
    """Heavy tails."""
    return dist.StudentT(5.0, eta, positive("noise", 1.5))


LIKELIHOODS: dict[str, tuple[Likelihood, Callable[[Tensor], Tensor]]] = {
    "gaussian": (gaussian, lambda eta: eta + 0.7 * torch.randn_like(eta)),
    "bernoulli": (bernoulli, lambda eta: torch.bernoulli(eta.sigmoid())),
    "poisson": (poisson, lambda eta: torch.poisson(eta.exp())),
    "negative_binomial": (negative_binomial, lambda eta: torch.poisson(eta.exp())),
    "student": (student, lambda eta: eta + torch.randn_like(eta)),
}


def global_part(X: Tensor, wanted: bool) -> Tensor:
    """Fixed effects, integrated or maximised."""
    if wanted:
        return X @ pyro.sample("w", dist.Normal(0.0, 3.0).expand([X.shape[1]]).to_event(1))
    return X @ pyro.param("beta", torch.zeros(X.shape[1]))


def crossed(likelihood: str, num: int, with_global: bool) -> Case:
    """Two factors that cross."""
    observe, draw = LIKELIHOODS[likelihood]
    sizes = 8 * num, 3 * num
    X, a, b = _rows(12 * num, sizes)
    y = draw(0.5 * torch.randn(sizes[0])[a] + 0.4 * torch.randn(sizes[1])[b])

    def model(X: Tensor, a: Tensor, b: Tensor, y: Tensor) -> None:
        fixed = global_part(X, with_global)
        with pyro.plate("first", sizes[0]):
            first = pyro.sample("first_effect", dist.Normal(0.0, positive("s")))
        with pyro.plate("second", sizes[1]):
            second = pyro.sample("second_effect", dist.Normal(0.0, positive("t", 0.5)))
        eta = fixed + first[a] + second.index_select(0, b)
        with pyro.plate("data", len(y)):
            pyro.sample("y", observe(eta), obs=y)

    return model, (X, a, b, y)


def nested(likelihood: str, num: int, with_global: bool) -> Case:
    """Three levels: rows in classes in schools, class means drawn around those of schools."""
    observe, draw = LIKELIHOODS[likelihood]
    schools, classes = num, 7 * num
    X, c = _rows(15 * num, (classes,))
    school = torch.arange(classes) % schools
    y = draw(0.5 * torch.randn(classes)[c])

    def model(X: Tensor, c: Tensor, y: Tensor) -> None:
        fixed = global_part(X, with_global)
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        with pyro.plate("schools", schools):
            upper = pyro.sample("upper", dist.Normal(mu, positive("s")))
        with pyro.plate("classes", classes):
            lower = pyro.sample("lower", dist.Normal(upper[school], positive("t", 0.5)))
        with pyro.plate("data", len(y)):
            pyro.sample("y", observe(fixed + lower[c]), obs=y)

    return model, (X, c, y)


def slopes(likelihood: str, num: int, with_global: bool) -> Case:
    """Correlated intercepts and slopes, three to a group."""
    observe, draw = LIKELIHOODS[likelihood]
    groups = 5 * num
    X, g = _rows(25 * num, (groups,))
    y = draw((X * (0.4 * torch.randn(groups, 3))[g]).sum(-1))

    def model(X: Tensor, g: Tensor, y: Tensor) -> None:
        fixed = global_part(X, with_global)
        tril = pyro.param("tril", torch.eye(3), constraint=constraints.lower_cholesky)
        with pyro.plate("groups", groups):
            b = pyro.sample("b", dist.MultivariateNormal(torch.zeros(3), scale_tril=tril))
        with pyro.plate("data", len(y)):
            pyro.sample("y", observe(fixed + (X * b[g]).sum(-1)), obs=y)

    return model, (X, g, y)


def non_centred(likelihood: str, num: int, with_global: bool) -> Case:
    """Latent mean and scale that multiply standard effects: not linear."""
    observe, draw = LIKELIHOODS[likelihood]
    groups = 10 * num
    X, g = _rows(40 * num, (groups,))
    y = draw(0.3 + torch.randn(groups)[g])

    def model(X: Tensor, g: Tensor, y: Tensor) -> None:
        fixed = global_part(X, with_global)
        mu, tau = pyro.sample("mu", dist.Normal(0.0, 2.0)), pyro.sample("tau", dist.Gamma(8.0, 8.0))
        with pyro.plate("groups", groups):
            z = pyro.sample("z", dist.Normal(0.0, positive("s")))
        effect = mu + tau * z
        with pyro.plate("data", len(y)):
            pyro.sample("y", observe(fixed + Vindex(effect)[g]), obs=y)

    return model, (X, g, y)


def chain(likelihood: str, num: int, with_global: bool) -> Case:
    """A stationary chain, observed at each step."""
    observe, draw = LIKELIHOODS[likelihood]
    length = 20 * num
    X = torch.randn(length, 3)
    y = draw(0.1 * torch.randn(length).cumsum(0))

    def model(X: Tensor, y: Tensor) -> None:
        fixed = global_part(X, with_global)
        phi = pyro.param("phi", torch.tensor(0.8), constraint=constraints.interval(-1.0, 1.0))
        x = pyro.sample("x", dist.Normal(0.0, 3.0).expand([length]).to_event(1))
        pyro.sample("dx", dist.Normal(phi * x[:-1], positive("s", 0.5)).to_event(1), obs=x[1:])
        with pyro.plate("data", length):
            pyro.sample("y", observe(fixed + x), obs=y)

    return model, (X, y)


def second_order(likelihood: str, num: int, with_global: bool) -> Case:
    """A second-order autoregression."""
    observe, draw = LIKELIHOODS[likelihood]
    length = 15 * num
    X = torch.randn(length, 3)
    y = draw(0.1 * torch.randn(length).cumsum(0))

    def model(X: Tensor, y: Tensor) -> None:
        fixed = global_part(X, with_global)
        with pyro.plate("time", length):
            x = pyro.sample("x", dist.Normal(0.0, 2.0))
        with pyro.plate("steps", length - 2):
            pyro.sample("dx", dist.Normal(0.9 * x[1:-1] - 0.3 * x[:-2], positive("s", 0.5)), obs=x[2:])
        with pyro.plate("data", length):
            pyro.sample("y", observe(fixed + x), obs=y)

    return model, (X, y)


def grid(likelihood: str, num: int, with_global: bool) -> Case:
    """Differences along the edges of a grid, and a proper prior."""
    observe, draw = LIKELIHOODS[likelihood]
    edges, size = grid_edges(4, 4 * num)
    X = torch.randn(size, 3)
    y = draw(0.3 * torch.randn(size))

    def model(X: Tensor, y: Tensor) -> None:
        fixed = global_part(X, with_global)
        with pyro.plate("cells", size):
            x = pyro.sample("x", dist.Normal(0.0, 2.0))
        with pyro.plate("edges", len(edges)):
            pyro.sample("difference", dist.Normal(x[edges[:, 0]] - x[edges[:, 1]], 0.7), obs=torch.zeros(len(edges)))
        with pyro.plate("data", size):
            pyro.sample("y", observe(fixed + x), obs=y)

    return model, (X, y)


def zero_inflated(likelihood: str, num: int, with_global: bool) -> Case:
    """A discrete site in each row, summed out."""
    groups = 10 * num
    X, g = _rows(30 * num, (groups,))
    y = torch.poisson((0.5 + 0.5 * torch.randn(groups)[g]).exp()) * torch.bernoulli(torch.full((len(X),), 0.7))

    def model(X: Tensor, g: Tensor, y: Tensor) -> None:
        fixed = global_part(X, with_global)
        share = pyro.param("share", torch.tensor(0.4), constraint=constraints.unit_interval)
        with pyro.plate("groups", groups):
            a = pyro.sample("a", dist.Normal(0.0, positive("s")))
        eta = fixed + a[g]
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(share))
            pyro.sample("y", dist.Poisson(torch.where(z > 0, 1e-6, eta.exp())), obs=y)

    return model, (X, g, y)


def group_classes(likelihood: str, num: int, with_global: bool) -> Case:
    """A class for each group, summed out."""
    groups = 10 * num
    y = torch.randn(groups) + torch.randn(4, groups)

    def model(y: Tensor) -> None:
        share = pyro.param("share", torch.tensor([0.3, 0.7]), constraint=constraints.simplex)
        centre = pyro.sample("centre", dist.Normal(torch.tensor([-1.0, 1.0]), 1.0).to_event(1))
        with pyro.plate("groups", groups):
            z = pyro.sample("z", dist.Categorical(share))
            a = pyro.sample("a", dist.Normal(0.0, positive("s", 0.6)))
            with pyro.plate("repeats", 4):
                pyro.sample("y", dist.Normal(a + centre[z], positive("noise", 0.8)), obs=y)

    return model, (y,)


def process_and_groups(likelihood: str, num: int, with_global: bool) -> Case:
    """A Gaussian process at a few places, seen by many rows, and group effects."""
    observe, draw = LIKELIHOODS[likelihood]
    places = torch.linspace(0.0, 1.0, 70)
    groups = 100 + 10 * num
    X, place, g = _rows(5 * groups, (len(places), groups))
    y = draw(torch.sin(6.0 * places)[place] + 0.5 * torch.randn(groups)[g])

    def model(X: Tensor, place: Tensor, g: Tensor, y: Tensor) -> None:
        fixed = global_part(X, with_global)
        distance = (places.unsqueeze(-1) - places) / positive("length", 0.3)
        K = torch.exp(-0.5 * distance.square()) + 1e-3 * torch.eye(len(places))
        f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(len(places)), K))
        with pyro.plate("groups", groups):
            a = pyro.sample("a", dist.Normal(0.0, positive("s")))
        with pyro.plate("data", len(y)):
            pyro.sample("y", observe(fixed + f[place] + a[g]), obs=y)

    return model, (X, place, g, y)


def of_all_kinds(likelihood: str, num: int, with_global: bool) -> Case:
    """Correlated slopes of persons in schools, items that cross them, and a chain of days."""
    observe, draw = LIKELIHOODS[likelihood]
    schools, persons, items, days = 2 * num, 6 * num, 3 * num, 12 * num
    X, p, i, t = _rows(40 * num, (persons, items, days))
    school = torch.arange(persons) % schools
    y = draw(0.4 * torch.randn(persons)[p] + 0.3 * torch.randn(items)[i])

    def model(X: Tensor, p: Tensor, i: Tensor, t: Tensor, y: Tensor) -> None:
        fixed = global_part(X, with_global)
        tril = pyro.param("tril", torch.eye(3), constraint=constraints.lower_cholesky)
        with pyro.plate("schools", schools):
            upper = pyro.sample("upper", dist.Normal(0.0, positive("s")))
        with pyro.plate("persons", persons):
            centre = torch.nn.functional.pad(upper[school].unsqueeze(-1), (0, 2))
            b = pyro.sample("b", dist.MultivariateNormal(centre, scale_tril=tril))
        with pyro.plate("items", items):
            c = pyro.sample("c", dist.Normal(0.0, positive("u", 0.5)))
        x = pyro.sample("x", dist.Normal(0.0, 2.0).expand([days]).to_event(1))
        pyro.sample("dx", dist.Normal(0.7 * x[:-1], positive("v", 0.5)).to_event(1), obs=x[1:])
        with pyro.plate("data", len(y)):
            pyro.sample("y", observe(fixed + (X * b[p]).sum(-1) + c[i] + x[t]), obs=y)

    return model, (X, p, i, t, y)


CASES = (
    crossed, nested, slopes, non_centred, chain, second_order, grid, zero_inflated, group_classes,
    process_and_groups, of_all_kinds,
)  # fmt: skip


def grid_edges(height: int, width: int) -> tuple[Tensor, int]:
    """Neighbours in a grid, ``(E, 2)``, and the number of its cells."""
    cell = torch.arange(height * width).reshape(height, width)
    across = torch.stack([cell[:, 1:].reshape(-1), cell[:, :-1].reshape(-1)], -1)
    down = torch.stack([cell[1:].reshape(-1), cell[:-1].reshape(-1)], -1)
    return torch.cat([across, down]), height * width


def _rows(num: int, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Covariates, and a level of each factor for each row; some levels may be empty."""
    return torch.randn(num, 3), *(torch.randint(size, (num,)) for size in sizes)
