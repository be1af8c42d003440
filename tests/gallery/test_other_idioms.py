"""Models as textbooks and forums have them, each against a number that was found another way."""

import math

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence
from pyro_evidence.laplace.approximation import laplace_problem
from pyro_evidence.program.log_joint import LogJoint


def change_point(y: Tensor) -> None:
    """Disasters in coal mines: two rates, and a year of change that is summed out."""
    num = len(y)
    rate = pyro.sample("rate", dist.Exponential(torch.ones(2)).to_event(1))
    when = pyro.sample("when", dist.Categorical(torch.ones(num) / num), infer={"enumerate": "parallel"})
    early = torch.arange(num) < when.unsqueeze(-1)
    pyro.sample("y", dist.Poisson(torch.where(early, rate[0], rate[1])).to_event(1), obs=y)


def conjugate(y: Tensor) -> float:
    """Closed form: for each year of change two gamma integrals."""
    total = []
    for when in range(len(y)):
        parts = [(float(part.sum()) + 1.0, len(part) + 1.0) for part in (y[:when], y[when:])]
        total.append(sum(math.lgamma(a) - a * math.log(b) for a, b in parts))
    constant = -float(torch.lgamma(y + 1.0).sum()) - math.log(len(y))
    return float(torch.tensor(total).logsumexp(0)) + constant


def test_a_change_point_of_many_years() -> None:
    """A discrete site that ties a hundred years together is no reason for a hundred times a hundred passes."""
    generator = torch.Generator().manual_seed(0)
    y = torch.poisson(torch.where(torch.arange(100) < 40, 3.1, 0.9), generator=generator)
    assert laplace_problem(LogJoint(change_point, (y,))).structure.slots is None
    posterior = LaplaceEvidence(change_point).run(y)
    exact = conjugate(y)
    assert abs(float(posterior.log_evidence) - exact) < 0.03
    found = posterior.diagnostics(4000)
    assert abs(found["log_evidence_importance"] - exact) < 4.0 * found["log_evidence_importance_se"]
