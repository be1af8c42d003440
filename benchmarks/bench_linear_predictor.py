"""Logistic regression, N = 5000, D = 1000, dense: what the linear predictor costs, in matrix products.

    OMP_NUM_THREADS=1 python benchmarks/bench_linear_predictor.py

Times are ratios to one ``X.T @ (b[:, None] * X)``, memory is the growth of the resident set above what the data
and that product need.  Targets: mode + Hessian + evidence under 25 products, peak extra memory under
``3 D^2 + 3 N D`` numbers, the exact gradient in the hyperparameters under 3 Newton steps.
"""

import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence.laplace import approximation
from pyro_evidence.laplace.gradient import slope
from pyro_evidence.precision.dense import factorise
from pyro_evidence.program.log_joint import LogJoint

N, D = 5000, 1000


def logistic(X: Tensor, t: Tensor) -> None:
    alpha = pyro.param("alpha", X.new_ones(()), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[-1]), alpha.rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


def problem() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(N, D, generator=generator, dtype=torch.float64)
    eta = X @ (torch.randn(D, generator=generator, dtype=torch.float64) / D**0.5)
    return X, (torch.rand(N, generator=generator, dtype=torch.float64) < eta.sigmoid()).double()


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Watched:
    """Seconds and peak growth of the resident set of what runs inside."""

    def __enter__(self) -> "Watched":
        gc.collect()
        self.before = self.peak = resident_bytes()
        self.running, self.thread = True, threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        self.start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self.start
        self.running = False
        self.thread.join()

    def _watch(self) -> None:
        while self.running:
            self.peak = max(self.peak, resident_bytes())
            time.sleep(0.001)

    @property
    def growth(self) -> int:
        return self.peak - self.before


def watched(f: Callable[[], Any]) -> tuple[Any, Watched]:
    with Watched() as watch:
        result = f()
    return result, watch


def fastest(f: Callable[[], Any]) -> Watched:
    """Of five runs, so that a busy machine does not bend the ratios."""
    return min((watched(f)[1] for _ in range(5)), key=lambda watch: watch.seconds)


def newton_step(at: approximation.Problem, state: approximation.LaplaceState) -> Tensor:
    u, theta = state.u.unsqueeze(0), state.theta.clone()
    return factorise(at.density.precision(u, theta)).solve(at.density.gradient(u, theta)[1])


def main() -> None:
    torch.set_num_threads(1)
    X, t = problem()
    b = torch.rand(N, dtype=torch.float64)
    joint = LogJoint(logistic, (X, t))
    theta = joint.initial_theta
    product = fastest(lambda: X.T @ (b[:, None] * X))
    at, looking = watched(lambda: approximation.laplace_problem(joint))
    assert at.structure.linear is not None
    state, fitting = watched(lambda: approximation.laplace_state(at, theta, joint.initial_u, cold=True))
    step, gradient = fastest(lambda: newton_step(at, state)), fastest(lambda: slope(state))
    numbers = 8 * (D * D + N * D)
    print(f"N = {N}, D = {D}; log evidence {float(state.log_evidence):.6f}")
    print(f"{'':34}{'seconds':>9}{'products':>10}{'MB':>8}{'x (D^2 + N D)':>15}")
    rows = {"one product": product, "recognition": looking, "mode, Hessian, evidence": fitting}
    rows |= {"one Newton step": step, "gradient in the hyperparameters": gradient}
    for name, watch in rows.items():
        ratio = watch.seconds / product.seconds
        print(f"{name:34}{watch.seconds:9.3f}{ratio:10.1f}{watch.growth / 1e6:8.0f}{watch.growth / numbers:15.2f}")
    print(f"gradient / Newton step: {gradient.seconds / step.seconds:.1f}")


if __name__ == "__main__":
    main()
