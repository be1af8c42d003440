"""The scales, correlations and ranges of fields are found, with a level and without, at any order and prior."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence.models.gmrf import (
    AR,
    AR1,
    BYM2,
    CAR,
    GMRF,
    ICAR,
    SAR,
    Kronecker,
    Lattice,
    Leroux,
    Matern,
    Mesh,
    OrnsteinUhlenbeck,
    PCCorrelation,
    PCRange,
    PCScale,
    RandomWalk,
    Seasonal,
    lattice,
)
from pyro_evidence.nested.roles import sites_to_marginalise
from pyro_evidence.program.log_joint import LogJoint

GRAPH = lattice(5, 6)
TIMES = torch.linspace(0.0, 5.0, 30, dtype=torch.float64).square()
NODE = torch.arange(30).view(5, 6)
CORNERS = [x.flatten() for x in (NODE[:-1, :-1], NODE[:-1, 1:], NODE[1:, :-1], NODE[1:, 1:])]
TRIANGLES = torch.cat([torch.stack([CORNERS[0], CORNERS[1], CORNERS[2]], -1), torch.stack([*CORNERS[:0:-1]], -1)])
MESH = Mesh(torch.stack([(NODE % 6).flatten(), (NODE // 6).flatten()], -1).double(), TRIANGLES)


def scale(name: str = "s") -> Tensor:
    return torch.as_tensor(pyro.sample(name, dist.HalfNormal(torch.tensor(1.0, dtype=torch.float64))))


def share(name: str = "p", low: float = 0.0) -> Tensor:
    return torch.as_tensor(pyro.sample(name, dist.Uniform(torch.tensor(low, dtype=torch.float64), 1.0)))


def of_own(s: Tensor, intrinsic: bool) -> GMRF:
    degree = torch.bincount(GRAPH.edges.flatten()).double() + (0.0 if intrinsic else 0.5)
    entries = -torch.ones(len(GRAPH.edges)).double() / s**2
    constraint = (torch.ones(1, 30), torch.zeros(1)) if intrinsic else None
    return GMRF(GRAPH.edges, degree / s**2, entries, constraint, intrinsic=intrinsic)


FIELDS: dict[str, tuple[Callable[[], Any], str]] = {
    "walk": (lambda: RandomWalk(scale(), 30), "s"),
    "second order": (lambda: RandomWalk(scale(), 30, order=2), "s"),
    "second order at a level": (lambda: RandomWalk(scale(), 30, order=2, level=scale("level")), "level s"),
    "cyclic": (lambda: RandomWalk(scale(), 30, order=2, cyclic=True), "s"),
    "uneven": (lambda: RandomWalk(pyro.sample("s", PCScale(1.0, 0.1)), TIMES, order=2), "s"),
    "season": (lambda: Seasonal(scale(), 30, 4, level=scale("level")), "level s"),
    "autoregression": (lambda: AR(scale(), torch.stack([share("p"), share("q", -1.0)]), 30), "p q s"),
    "penalised": (lambda: AR1(scale(), pyro.sample("p", PCCorrelation(0.5, 0.3)), 30), "p s"),
    "continuous": (lambda: OrnsteinUhlenbeck(scale(), scale("r"), TIMES), "r s"),
    "graph": (lambda: ICAR(GRAPH, scale()), "s"),
    "mixed": (lambda: BYM2(GRAPH, scale(), share()), "p s"),
    "thin plate": (lambda: Lattice(scale(), 5, 6), "s"),
    "proper": (lambda: CAR(GRAPH, scale(), share()), "p s"),
    "Leroux": (lambda: Leroux(GRAPH, scale(), share()), "p s"),
    "simultaneous": (lambda: SAR(GRAPH, scale(), share("p", -1.0)), "p s"),
    "Matern": (lambda: Matern(MESH, scale(), pyro.sample("r", PCRange(1.0, 0.1))), "r s"),
    "separable": (lambda: Kronecker(AR1(scale(), share(), 6), RandomWalk(1.0, 5)), "p s"),
    "one's own": (lambda: of_own(scale(), intrinsic=False), "s"),
    "one's own, intrinsic": (lambda: of_own(scale(), intrinsic=True), "s"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_hyperparameters_of_a_field_are_marginalised(name: str) -> None:
    field, expected = FIELDS[name]

    def model(y: Tensor) -> None:
        level = pyro.sample("b", dist.Normal(torch.tensor(0.0, dtype=torch.float64), 3.0))
        x = pyro.sample("x", field()).flatten()[:30]
        with pyro.plate("data", 30):
            pyro.sample("y", dist.Poisson((level + x).exp()), obs=y)

    y = torch.poisson(torch.ones(30).double(), generator=torch.Generator().manual_seed(0))
    assert " ".join(sites_to_marginalise(LogJoint(model, (y,), {}))) == expected
