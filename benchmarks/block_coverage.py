"""How often 90 % intervals of a variance hold the truth, by Laplace and with blocks integrated.

    python benchmarks/block_coverage.py [REPLICATES] [NODES]

Calibration by simulation (Talts et al., 2018): the log scale is drawn from its prior, ``Normal(log 2, 0.3)`` for 500
groups of two binary rows, ``Normal(0, 0.3)`` for 50 groups of ten; data from the model; the posterior of the scale is
its prior times the evidence, on a grid.  All replicates are blocks of one model: one state of the package at each
point of the grid gives the integrals of all of them, by quadrature and by Laplace.  A calibrated posterior covers 90 %;
``z`` is the mean of (truth - mean) / sd of the log scale.
"""

import math
import sys
import time
from dataclasses import replace

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence.laplace.approximation import laplace_problem, laplace_state
from pyro_evidence.laplace.evidence_error import by_laplace
from pyro_evidence.numerics.quadrature.densities import spline
from pyro_evidence.program.log_joint import LogJoint

CASES = ((500, 2, math.log(2.0)), (50, 10, 0.0))  # groups, rows, mean of the log scale
SPREAD = 0.3
GRID = torch.linspace(-1.2, 1.2, 33, dtype=torch.float64)  # about that mean


def model(group: Tensor, num: int, y: Tensor) -> None:
    """Random intercepts, binary rows."""
    s = pyro.param("s", torch.tensor(1.0, dtype=torch.float64), constraint=constraints.positive)
    with pyro.plate("groups", num):
        b = pyro.sample("b", dist.Normal(0.0, s))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=b[group]), obs=y)


def simulated(replicates: int, groups: int, rows: int, centre: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log scales ``(R,)``, the group of each row, and binary rows of all replicates."""
    generator = torch.Generator().manual_seed(0)
    truth = centre + SPREAD * torch.randn(replicates, generator=generator, dtype=torch.float64)
    b = truth.exp().repeat_interleave(groups) * torch.randn(replicates * groups, generator=generator).double()
    group = torch.arange(len(b)).repeat_interleave(rows)
    return truth, group, (torch.rand(len(group), generator=generator) < b[group].sigmoid()).double()


def log_likelihoods(group: Tensor, y: Tensor, num: int, nodes: int, log_scales: Tensor) -> tuple[Tensor, Tensor]:
    """Log integrals of every group at each log scale, by quadrature and by Laplace, ``(K, G)``."""
    problem = replace(laplace_problem(LogJoint(model, (group, num, y))), nodes=nodes)
    u, found, plain = problem.joint.initial_u, [], []
    for log_scale in log_scales:
        state = laplace_state(problem, log_scale.reshape(1), u)
        assert state.place is not None
        u = state.u
        found.append(state.place.each[:-1])
        plain.append(by_laplace(state.place))
    return torch.stack(found), torch.stack(plain)


def coverage(log_density: Tensor, log_scales: Tensor, truth: Tensor) -> tuple[float, float]:
    """The share of 90 % intervals that hold the truth, and the mean of z; densities on the grid ``(K, R)``."""
    fine = torch.linspace(float(log_scales[0]), float(log_scales[-1]), 4001, dtype=torch.float64)
    weights = (spline(log_scales, fine.unsqueeze(-1)) @ log_density).softmax(0)
    rank = (weights * (fine.unsqueeze(-1) <= truth)).sum(0)
    mean = fine @ weights
    sd = ((fine.unsqueeze(-1) - mean).square() * weights).sum(0).sqrt()
    return float(((rank > 0.05) & (rank < 0.95)).double().mean()), float(((truth - mean) / sd).mean())


def main(replicates: int, nodes: int) -> None:
    """Print a line for each case and method."""
    torch.set_num_threads(1)
    print("groups x rows  nodes  replicates  coverage, %  its standard error  mean z")
    for groups, rows, centre in CASES:
        begin = time.process_time()
        truth, group, y = simulated(replicates, groups, rows, centre)
        log_scales = centre + GRID
        both = log_likelihoods(group, y, replicates * groups, nodes, log_scales)
        log_prior = -0.5 * ((log_scales - centre) / SPREAD).square().unsqueeze(-1)
        for num, each in zip((nodes, 1), both, strict=True):
            log_density = each.reshape(len(log_scales), replicates, groups).sum(-1) + log_prior
            share, z = coverage(log_density, log_scales, truth)
            error = 100.0 * math.sqrt(share * (1.0 - share) / replicates)
            print(f"{groups} x {rows}  {num}  {replicates}  {100.0 * share:.1f}  {error:.1f}  {z:+.2f}", flush=True)
        print(f"  {time.process_time() - begin:.0f} CPU s", flush=True)


if __name__ == "__main__":
    numbers = [int(x) for x in sys.argv[1:]]
    main(*numbers, *(300, 15)[len(numbers) :])
