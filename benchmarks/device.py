"""Large fits on a GPU beside one core of the processor: wall seconds, float64, and how far the log evidences are apart.

    OMP_NUM_THREADS=1 python benchmarks/device.py [CASE ...] [--share 0.01] [--devices cpu cuda]

``--share`` takes that share of the rows, groups or fits.  A GPU has to be there, unless ``--devices cpu`` is all.
"""

import argparse
import time
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import EvidenceEM, LaplaceEvidence, Stop, run_many
from pyro_evidence.models.mixture import gaussian_mixture

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
QUIET = Stop(progress=False)
Job = Callable[[], Tensor]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def grouped(group: Tensor, num: int, y: Tensor) -> None:
    scale = pyro.param("scale", lambda: y.new_tensor(0.7), constraint=constraints.positive)
    with pyro.plate("groups", num):
        a = pyro.sample("a", dist.Normal(y.new_zeros(()), scale))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=a[group]), obs=y)


def groups(share: float, device: str) -> Job:
    """A million groups of ten binary rows."""
    num = max(400, int(1e6 * share))
    effect = torch.randn(num, generator=generator())
    group = torch.arange(num).repeat_interleave(10)
    y = torch.bernoulli(effect[group].sigmoid(), generator=generator())
    group, y = group.to(device), y.to(device)
    return lambda: LaplaceEvidence(grouped, stop=QUIET).run(group, num, y).log_evidence


def selection(X: Tensor, y: Tensor) -> None:
    keep = pyro.sample(
        "keep", dist.Bernoulli(X.new_tensor(0.5)).expand([X.shape[1]]).to_event(1), infer={"branching": True}
    )
    w = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[1]), 1.0).to_event(1))
    with pyro.plate("rows", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=X @ (w * keep)), obs=y)


def structures(share: float, device: str) -> Job:
    """All 4,096 logistic models of twelve columns, 500 rows."""
    size = max(4, round(12 + torch.tensor(share).log2().item()))
    X = torch.randn(500, size, generator=generator())
    y = torch.bernoulli((X @ (torch.arange(size) % 3 - 1.0)).sigmoid(), generator=generator())
    X, y = X.to(device), y.to(device)
    return lambda: LaplaceEvidence(selection, stop=QUIET).run(X, y).log_evidence


def intercepts(group: Tensor, y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(y.new_zeros(()), 10.0))
    tau = pyro.param("tau", lambda: y.new_ones(()), constraint=constraints.positive)
    sigma = pyro.param("sigma", lambda: y.new_ones(()), constraint=constraints.positive)
    with pyro.plate("groups", 10):
        a = pyro.sample("a", dist.Normal(mu, tau))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(a[group], sigma), obs=y)


def small_fits(share: float, device: str) -> Job:
    """Two thousand fits of random intercepts, 60 rows each."""
    num, group = max(10, int(2000 * share)), torch.arange(60) % 10
    effect = torch.randn(num, 10, generator=generator())
    y = (effect[:, group] + 0.5 * torch.randn(num, 60, generator=generator())).to(device)
    group = group.to(device).expand(num, 60)
    return lambda: run_many(LaplaceEvidence(intercepts, stop=QUIET), group, y).log_evidence.sum()


def mixture(share: float, device: str) -> Job:
    """Twenty rounds of a mixture of ten components on a million rows of 32 columns."""
    num = max(2000, int(1e6 * share))
    centre = 3.0 * torch.randn(10, 32, generator=generator())
    Y = (centre[torch.arange(num) % 10] + torch.randn(num, 32, generator=generator())).to(device)
    stop = Stop(num_steps=20, throw=False, progress=False)
    return lambda: EvidenceEM(gaussian_mixture(10), stop=stop).run(Y).log_evidence


CASES: dict[str, Callable[[float, str], Job]] = {f.__name__: f for f in (groups, structures, small_fits, mixture)}


def timed(job: Job) -> tuple[float, float]:
    """Log evidence, and the seconds of the second run: the first compiles and allocates."""
    job()
    begun = time.perf_counter()
    value = float(job())  # which waits for the device
    return value, time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--devices", nargs="+", default=["cpu", "cuda"])
    given = parser.parse_args()
    print(f"| case | {' s | '.join(given.devices)} s | apart, nats |")
    print("|---" * (len(given.devices) + 2) + "|")
    for name in given.cases:
        found = [timed(CASES[name](given.share, device)) for device in given.devices]
        times = " | ".join(f"{seconds:.2f}" for _, seconds in found)
        print(f"| {name} | {times} | {max(v for v, _ in found) - min(v for v, _ in found):.1e} |", flush=True)


if __name__ == "__main__":
    main()
