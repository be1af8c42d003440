"""How often 90 % intervals of a variance hold the truth, by Laplace and with blocks integrated.

    python benchmarks/block_coverage.py [REPLICATES] [GROUPS ROWS]

Calibration by simulation (Talts et al., 2018): values are drawn from the prior, data from the model, both fits see the
same data.  Random intercepts, binary rows, ``log sd ~ Normal(log 2, 0.3)`` (500 groups of two) or ``Normal(0, 0.3)``
(50 groups of ten), the scale integrated (``outer``).
A calibrated posterior covers 90 %; ``z`` is the mean of (truth - mean) / sd of the log scale.
"""

import math
import sys
import time

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, Stop
from pyro_evidence.errors import NotConverged

CASES = ((500, 2, math.log(2.0), 11), (50, 10, 0.0, 9))  # groups, rows, mean of the log sd, nodes
SPREAD = 0.3


def model(group: Tensor, num: int, centre: float, y: Tensor | None = None) -> Tensor:
    """Random intercepts about a latent mean, binary rows."""
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    s = pyro.sample("s", dist.LogNormal(centre, SPREAD))
    with pyro.plate("groups", num):
        b = pyro.sample("b", dist.Normal(0.0, s))
    with pyro.plate("data", len(group)):
        return pyro.sample("y", dist.Bernoulli(logits=mean + b[group]), obs=y)


def replicate(seed: int, groups: int, rows: int, centre: float, nodes: int) -> tuple[bool, float]:
    """Whether the interval holds the truth, and how far the truth is from the mean, in standard deviations."""
    pyro.set_rng_seed(seed)
    group = torch.arange(groups).repeat_interleave(rows)
    trace = pyro.poutine.trace(model).get_trace(group, groups, centre)
    truth, y = float(trace.nodes["s"]["value"].log()), trace.nodes["y"]["value"]
    posterior = LaplaceEvidence(model, nodes=nodes, stop=Stop(progress=False)).run(group, groups, centre, y)
    low, middle, high = posterior.quantiles([0.05, 0.5, 0.95])["s"].log().tolist()
    return low <= truth <= high, (truth - middle) / ((high - low) / 3.29)


def main(replicates: int, cases: list[tuple[int, int, float, int]]) -> None:
    """Print a line for each case and number of nodes."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    print("groups x rows  nodes  replicates  failed  coverage, %  its standard error  mean z  CPU s a fit")
    for groups, rows, centre, many in cases:
        for nodes in (many, 1):
            begin, inside, z, failed = time.process_time(), [], [], 0
            for seed in range(replicates):
                try:
                    held, away = replicate(seed, groups, rows, centre, nodes)
                except (NotConverged, ArithmeticError):
                    failed += 1
                    continue
                inside.append(held)
                z.append(away)
            share, num = sum(inside) / max(1, len(inside)), max(1, len(inside))
            error = 100.0 * math.sqrt(share * (1.0 - share) / num)
            cost = (time.process_time() - begin) / replicates
            counts = f"{groups} x {rows}  {nodes}  {num}  {failed}"
            print(f"{counts}  {100 * share:.1f}  {error:.1f}  {sum(z) / num:+.2f}  {cost:.2f}", flush=True)


if __name__ == "__main__":
    numbers = [int(x) for x in sys.argv[1:]]
    chosen = [case for case in CASES if len(numbers) < 3 or case[:2] == tuple(numbers[1:3])]
    main(numbers[0] if numbers else 300, chosen)
