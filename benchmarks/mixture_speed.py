"""One iteration of evidence-regularised EM beside one of scikit-learn's GaussianMixture; CPU seconds, one thread.

    OMP_NUM_THREADS=1 python benchmarks/mixture_speed.py            # Markdown on stdout
    OMP_NUM_THREADS=1 python benchmarks/mixture_speed.py --large    # also N = 1e6, about two minutes

scikit-learn's iterations are those of overlapping blobs, so that it does not converge before it is timed.
Our iteration includes gamma (diagonal: eq. A.28, full: eq. A.37) and the log evidence; both start from the same means.
"""

import os
import resource
import sys
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from sklearn.mixture import GaussianMixture

from pyro_evidence.infer.mixture_em import Batch, advance, first
from pyro_evidence.ops import mixture_evidence
from pyro_evidence.ops.mixture import Mixture, mixture_data
from pyro_evidence.ops.mixture_updates import Guarded, Ties

CASES = [
    # (N, K, D), full covariance, repeats, the largest ratio that was aimed at
    ((250, 10, 2), False, 100, 1.5),
    ((5_000, 20, 10), False, 20, 0.6),
    ((100_000, 20, 16), False, 4, 0.5),
    ((5_000, 20, 10), True, 10, 0.7),
    ((4_435, 20, 36), True, 5, 1.2),
]
LARGE = [((1_000_000, 50, 32), False, 2, 0.3)]
Shape = tuple[int, int, int]


def cpu(f: Callable[[], object], repeats: int) -> float:
    """Median CPU seconds of one call, after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        begin = time.process_time()
        f()
        times.append(time.process_time() - begin)
    return sorted(times[1:])[repeats // 2]


def blobs(shape: Shape) -> torch.Tensor:
    N, K, D = shape
    generator = torch.Generator().manual_seed(0)
    centres = 0.5 * torch.randn(K, D, generator=generator)
    return centres[torch.randint(K, (N,), generator=generator)] + torch.randn(N, D, generator=generator)


def ours(Y: torch.Tensor, K: int, *, full: bool, repeats: int) -> float:
    data = mixture_data(Y, products=full)
    batch = [start(data, Y[:K], full=full)]

    def iteration() -> float:
        batch[0] = advance(batch[0])
        return batch[0].objective

    return cpu(iteration, repeats)


def start(data: mixture_evidence.MixtureData, means: torch.Tensor, *, full: bool) -> Batch:
    K, D = means.shape
    w = means.reshape(1, K, D, 1)
    noise = torch.eye(D).expand(1, K, D, D) if full else torch.ones(1, K, D)
    at = Mixture(w, noise, torch.full((1, K), -np.log(K)), torch.full_like(w, 0.01), torch.zeros(K, D, 1))
    ones = torch.ones(K, D, 1)
    beta = torch.arange(K * D).reshape(K, D)
    ties = Ties(torch.zeros(K, D, 1).long(), ones, beta, ones[..., 0], ones.bool(), ones[..., 0].bool())
    curvature = mixture_evidence.coordinate if full else mixture_evidence.block
    return first(data, at, ties, curvature, Guarded())


def theirs(Y: torch.Tensor, K: int, *, full: bool, repeats: int) -> float:
    """A difference of two runs, so that initialisation is not counted."""
    D = Y.shape[1]
    precision = np.broadcast_to(np.eye(D), (K, D, D)) if full else np.ones((K, D))

    def run(steps: int) -> float:
        model = GaussianMixture(
            K, covariance_type="full" if full else "diag", tol=0.0, max_iter=steps, means_init=Y[:K].numpy(),
            precisions_init=precision, weights_init=np.full(K, 1.0 / K),
        )  # fmt: skip
        begin = time.process_time()
        model.fit(Y.numpy())
        return time.process_time() - begin

    run(repeats + 1)
    return sorted((run(repeats + 1) - run(1)) / repeats for _ in range(3))[1]


def roofline(shape: Shape, *, full: bool) -> float:
    """Two products with the features at the speed of a square product, and one exponential each, seconds."""
    N, K, D = shape
    a = torch.randn(1024, 1024)
    flops = 2.0 * 1024**3 / cpu(lambda: a @ a, 5)
    x = torch.randn(1_000_000)
    exps = 1e6 / cpu(x.exp, 5)
    num_features = D * (D + 1) / 2 + D + 1 if full else 2 * D + 1
    return 4.0 * N * K * num_features / flops + N * K / exps


def restarts() -> str:
    """24 restarts of Ripley's size as a batch and one by one."""
    Y = blobs((125, 10, 2))
    data = mixture_data(Y, products=True)
    one = start(data, Y[:10], full=False)

    def rows(num: int) -> Batch:
        at = one.at.mixture
        parts = (x.expand(num, *x.shape[1:]).contiguous() for x in (at.w, at.noise, at.log_mixing, at.alpha))
        return first(data, Mixture(*parts, at.loc), one.at.ties, mixture_evidence.coordinate, Guarded())

    batch, single = rows(24), rows(1)
    ratio = 24 * cpu(lambda: advance(single), 100) / cpu(lambda: advance(batch), 100)
    return f"24 restarts as a batch against 24 single ones: {ratio:.1f} times cheaper (aim: 5)"


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, float64, OPENBLAS_CORETYPE={os.environ.get('OPENBLAS_CORETYPE')}\n")
    print("| N, K, D | noise | ours ms | scikit-learn ms | ratio | aim | ours / roofline |")
    print("|---|---|---|---|---|---|---|")
    for shape, full, repeats, aim in CASES + (LARGE if "--large" in sys.argv else []):
        Y = blobs(shape)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        a = ours(Y, shape[1], full=full, repeats=repeats)
        extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        b = theirs(Y, shape[1], full=full, repeats=repeats)
        line = f"| {shape} | {'full' if full else 'diagonal'} | {1e3 * a:.2f} | {1e3 * b:.2f} | {a / b:.2f} | {aim} |"
        print(f"{line} {a / roofline(shape, full=full):.1f} |", flush=True)
    print(f"\nPeak memory rose by {extra:.0f} MiB in our last case, features included.\n\n{restarts()}")


if __name__ == "__main__":
    main()
