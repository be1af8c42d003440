"""One round of EM for mixtures of probabilistic PCA beside plain closed-form EM with covariances; CPU, one thread.

    OMP_NUM_THREADS=1 python benchmarks/mppca_speed.py            # Markdown on stdout
    OMP_NUM_THREADS=1 python benchmarks/mppca_speed.py --large    # also N = 1e6, minutes, Linux

Plain EM is Tipping and Bishop's (1999), appendix C, in torch float64, all components in batched products: it forms the
covariances S_k.  Each repeat times both, one after the other; the table has the smallest of each.  Satimage is
read from the folder that PYRO_EVIDENCE_DATA names; without it, noise of its size takes its place.
"""

import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from timing import seconds
from torch import Tensor

from pyro_evidence import EvidenceEM, Start, Stop, datasets
from pyro_evidence.fitting.em import advance
from pyro_evidence.mixture.updates import BoundedInflation, SharedParameters
from pyro_evidence.models.mppca import mppca
from pyro_evidence.mppca import fit as mppca_fit
from pyro_evidence.mppca import start as mppca_start
from pyro_evidence.mppca.data import Observations
from pyro_evidence.mppca.expectation import FactorAnalysers
from pyro_evidence.mppca.updates import MPPCAUpdate, no_gamma

K = Q = 10


def start(Y: Tensor, rows: int = 1) -> FactorAnalysers:
    """Centres among the data, then five direct rounds."""
    generator = torch.Generator().manual_seed(0)
    mu = mppca_start.spread_centres(Y[:4096], torch.rand(rows, K, generator=generator))
    m, on = Y.shape[1], torch.ones(rows, K, Q, dtype=torch.bool)
    W = 0.1 * torch.randn(rows, K, m, Q, generator=generator)
    at = FactorAnalysers(W, mu, torch.ones(rows, K, m), torch.full((rows, K), -math.log(K)), 0.01 * on, on)
    for _ in range(5):
        at = mppca_start.direct(Observations.resident(Y), at)
    return at


def batch(Y: Tensor, at: FactorAnalysers, rule: MPPCAUpdate) -> mppca_fit.MPPCARestarts:
    ties = SharedParameters.of(torch.arange(K)[:, None].expand(K, Q), torch.arange(K)[:, None].expand(K, Y.shape[1]))
    return mppca_fit.first(Observations.resident(Y), at, ties, torch.ones(Y.shape[1]), rule)


class Plain:
    """Tipping and Bishop's EM with an m x m covariance for each component."""

    def __init__(self, Y: Tensor, at: FactorAnalysers) -> None:
        self.Y, self.log_mixing, self.mu, self.W = Y, at.log_mixing[0], at.mu[0], at.W[0]
        self.v = at.beta[0, :, 0].reciprocal()

    def step(self) -> None:
        Y, W, v = self.Y, self.W, self.v[:, None, None]
        m = Y.shape[1]
        M = W.mT @ W + v * torch.eye(Q)
        tril = torch.linalg.cholesky(M)
        along = (Y @ W - (self.mu.unsqueeze(1) @ W)).mT  # (K, q, N)
        z = torch.linalg.solve_triangular(tril, along, upper=False)
        squares = Y.square().sum(-1) - 2.0 * self.mu @ Y.T + self.mu.square().sum(-1, keepdim=True)
        log_det = 2.0 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1) + (m - Q) * self.v.log()
        quadratic = (squares - z.square().sum(-2)) / self.v.unsqueeze(-1)
        table = self.log_mixing.unsqueeze(-1) - 0.5 * (log_det.unsqueeze(-1) + quadratic + m * math.log(math.tau))
        resp = table.softmax(0)
        counts = resp.sum(-1)
        self.mu = resp @ Y / counts.unsqueeze(-1)
        S = (Y.T * resp.unsqueeze(1)) @ Y / counts[:, None, None] - self.mu.unsqueeze(-1) * self.mu.unsqueeze(-2)
        SW, M_inverse = S @ W, torch.cholesky_inverse(tril)
        self.W = SW @ torch.linalg.inv(v * torch.eye(Q) + M_inverse @ (W.mT @ SW))
        trace = S.diagonal(dim1=-2, dim2=-1).sum(-1) - ((SW @ M_inverse) * self.W).sum((-2, -1))
        self.v, self.log_mixing = trace / m, (counts / len(Y)).log()


def against_plain(Y: Tensor, repeats: int) -> str:
    at = start(Y)
    plain = Plain(Y, at)
    kinds = {
        "plain EM with covariances": plain.step,
        "EM in latent space": stepping(batch(Y, at, MPPCAUpdate(no_gamma, alpha=0.0)), evidence=False),
        "regularised, gamma included": stepping(batch(Y, at, mppca_fit.rule_of(BoundedInflation())), evidence=False),
        "the same and the log evidence": stepping(batch(Y, at, mppca_fit.rule_of(BoundedInflation())), evidence=True),
    }
    times: dict[str, list[float]] = {n: [] for n in kinds}
    for _ in range(repeats):
        for name, step in kinds.items():
            times[name].append(seconds(step))
    base = min(times["plain EM with covariances"])
    aims = ("", "0.8", "0.8", "1.2")
    lines = ["| one round | ms | ratio to plain | aim |", "|---|---|---|---|"]
    for (name, t), aim in zip(times.items(), aims, strict=True):
        lines.append(f"| {name} | {1e3 * min(t):.2f} | {min(t) / base:.2f} | {aim} |")
    return "\n".join(lines)


def stepping(begun: mppca_fit.MPPCARestarts, *, evidence: bool) -> Callable[[], None]:
    state = [begun]

    def step() -> None:
        state[0] = advance(state[0])
        if evidence:
            assert math.isfinite(state[0].objective)

    return step


def widths(repeats: int) -> str:
    """Cost per number of outputs at q = 10, N = 2000: linear, so the last column stays."""
    lines = ["| m | ms a round | microseconds per output | per output more than above |", "|---|---|---|---|"]
    above: tuple[int, float] | None = None
    for m in (36, 144, 784, 3136):
        generator = torch.Generator().manual_seed(0)
        Y = torch.randn(2000, Q, generator=generator) @ torch.randn(Q, m, generator=generator)
        Y = Y + torch.randn(2000, m, generator=generator)
        step = stepping(batch(Y, start(Y), mppca_fit.rule_of(BoundedInflation())), evidence=True)
        best = min(seconds(step) for _ in range(repeats))
        more = f"{1e6 * (best - above[1]) / (m - above[0]):.1f}" if above else ""
        lines.append(f"| {m} | {1e3 * best:.1f} | {1e6 * best / m:.1f} | {more} |")
        above = m, best
    return "\n".join(lines)


def peak() -> float:
    """Most that was ever resident, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def large() -> str:
    """A whole run on a million data, each in a process of its own: what it needs beyond its data."""
    lines = ["| N | m | data, MiB | peak memory beyond them, MiB | aim | s |", "|---|---|---|---|---|---|"]
    for m in (10, 36):
        done = subprocess.run([sys.executable, __file__, "--one", str(m)], check=True, capture_output=True, text=True)
        lines.append(f"| 1e6 | {m} | {' | '.join(done.stdout.split())} |")
    return "\n".join(lines)


def one_large(m: int, num: int = 1_000_000) -> str:
    """K = 5 clusters of q = 3 axes; one restart, the whole warm-up, three rounds, and the log evidence."""
    generator = torch.Generator().manual_seed(0)
    Y, (centre, W) = torch.empty(num, m), (3.0 * torch.randn(5, m, s, generator=generator) for s in (1, 3))
    for block in Y.split(50_000):
        z = torch.randint(5, (len(block),), generator=generator)
        block[:] = (centre[z] + W[z] @ torch.randn(len(block), 3, 1, generator=generator) / 3.0).squeeze(-1)
        block += 0.3 * torch.randn(len(block), m, generator=generator)
    stop = Stop(num_steps=3, tolerance=0.0, throw=False, progress=False)
    engine = EvidenceEM(mppca(5, 3), start=Start(restarts=1), deletion=None, stop=stop)
    engine.run(Y[:5000])  # libraries take their memory once
    before = memory()
    taken = seconds(lambda: float(engine.run(Y).log_evidence))
    return f"{Y.nbytes / 2**20:.0f} {peak() - before:.0f} 1024 {taken:.0f}"


def memory() -> float:
    """Resident now, MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def restarts(Y: Tensor) -> str:
    single, many = (
        stepping(batch(Y, start(Y, rows), mppca_fit.rule_of(BoundedInflation())), evidence=True) for rows in (1, 5)
    )
    times = [(seconds(single), seconds(many)) for _ in range(10)]
    ratio = 5.0 * min(t[0] for t in times) / min(t[1] for t in times)
    return f"Five restarts as a batch against five single ones: {ratio:.2f} times cheaper."


def satimage() -> Tensor:
    try:
        X = datasets.csv("satimage_train").X / 128.0
    except FileNotFoundError:
        X = torch.randn(4435, 36, generator=torch.Generator().manual_seed(0))
    X = X - X.mean(0)
    return X / X.var(0, correction=0).mean().sqrt()


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    if "--one" in sys.argv:
        print(one_large(int(sys.argv[-1])))
        return
    print(f"torch {torch.__version__}, one thread, float64, OPENBLAS_CORETYPE={os.environ.get('OPENBLAS_CORETYPE')}\n")
    Y = satimage()
    print(f"## {tuple(Y.shape)}, K = q = 10\n\n{against_plain(Y, 15)}\n\n{restarts(Y)}\n", flush=True)
    print(f"## Outputs\n\n{widths(3)}\n", flush=True)
    if "--large" in sys.argv:
        print(f"## A million data, K = 5, q = 3\n\n{large()}")


if __name__ == "__main__":
    main()
