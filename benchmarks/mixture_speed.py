"""Evidence-regularised EM beside scikit-learn's GaussianMixture and beside SVI; CPU seconds, one thread.

    OMP_NUM_THREADS=1 python benchmarks/mixture_speed.py            # Markdown on stdout
    OMP_NUM_THREADS=1 python benchmarks/mixture_speed.py --large    # also N = 1e6, about two minutes

scikit-learn's iterations are those of overlapping blobs, so that it does not converge before it is timed.
Our iteration includes gamma (diagonal: eq. A.28, full: eq. A.37) and the log evidence; both start from the same means.
"""

import os
import sys
import time
import warnings
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import SVI, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, init_to_sample
from sklearn.mixture import GaussianMixture
from timing import least
from torch.distributions import constraints

from pyro_evidence import EvidenceEM, datasets
from pyro_evidence.fitting.em import advance
from pyro_evidence.mixture import evidence as mixture_evidence
from pyro_evidence.mixture.expectation import Mixture, mixture_data
from pyro_evidence.mixture.fit import MixtureRestarts, first
from pyro_evidence.mixture.updates import BoundedInflation, SharedParameters
from pyro_evidence.models.mixture import gaussian_mixture

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


def blobs(shape: Shape) -> torch.Tensor:
    N, K, D = shape
    generator = torch.Generator().manual_seed(0)
    centres = 0.5 * torch.randn(K, D, generator=generator)
    return centres[torch.randint(K, (N,), generator=generator)] + torch.randn(N, D, generator=generator)


def ours(Y: torch.Tensor, K: int, *, full: bool, repeats: int) -> float:
    data = mixture_data(Y)
    batch = [start(data, Y[:K], full=full)]

    def iteration() -> float:
        batch[0] = advance(batch[0])
        return batch[0].objective

    return least(iteration, repeats)


def start(data: mixture_evidence.MixtureData, means: torch.Tensor, *, full: bool) -> MixtureRestarts:
    K, D = means.shape
    w = means.reshape(1, K, D, 1)
    noise = torch.eye(D).expand(1, K, D, D) if full else torch.ones(1, K, D)
    at = Mixture(w, noise, torch.full((1, K), -np.log(K)), torch.full_like(w, 0.01), torch.zeros(K, D, 1))
    ones = torch.ones(K, D, 1)
    beta = torch.arange(K * D).reshape(K, D)
    ties = SharedParameters(torch.zeros(K, D, 1).long(), ones, beta, ones[..., 0], ones.bool(), ones[..., 0].bool())
    curvature = mixture_evidence.coordinate if full else mixture_evidence.block
    return first(data, at, ties, curvature, BoundedInflation())


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
    return min((run(repeats + 1) - run(1)) / repeats for _ in range(3))


def roofline(shape: Shape, *, full: bool) -> float:
    """Two products with the features at the speed of a square product, and one exponential each, seconds."""
    N, K, D = shape
    a = torch.randn(1024, 1024)
    flops = 2.0 * 1024**3 / least(lambda: a @ a, 5)
    x = torch.randn(1_000_000)
    exps = 1e6 / least(x.exp, 5)
    num_features = D * (D + 1) / 2 + D + 1 if full else 2 * D + 1
    return 4.0 * N * K * num_features / flops + N * K / exps


def restarts() -> str:
    """24 restarts of Ripley's size as a batch and one by one."""
    Y = blobs((125, 10, 2))
    data = mixture_data(Y)
    one = start(data, Y[:10], full=False)

    def rows(num: int) -> MixtureRestarts:
        at = one.expected.mixture
        parts = (x.expand(num, *x.shape[1:]).contiguous() for x in (at.w, at.noise, at.log_mixing, at.alpha))
        return first(data, Mixture(*parts, at.loc), one.expected.ties, mixture_evidence.coordinate, BoundedInflation())

    batch, single = rows(24), rows(1)
    ratio = 24 * least(lambda: advance(single), 100) / least(lambda: advance(batch), 100)
    return f"24 restarts as a batch against 24 single ones: {ratio:.1f} times cheaper (aim: 5)"


def high_water() -> tuple[float, float]:
    """Memory in use and the most that was in use since the last call, MiB; Linux."""
    status = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("Vm"))
    with open("/proc/self/clear_refs", "w") as marks:
        marks.write("5")
    return tuple(int(status[key].split()[0]) / 1024 for key in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def peak(shape: Shape) -> str:
    """What an iteration needs beyond data and features, in numbers per datum and component."""
    N, K, _ = shape
    Y = blobs(shape)
    batch = start(mixture_data(Y), Y[:K], full=False)
    high_water()
    before, _ = high_water()
    for _ in range(2):
        batch = advance(batch)
    extra = high_water()[1] - before
    share = extra * 2**20 / (8 * N * K)
    return f"Peak memory of an iteration at {shape}: {extra:.1f} MiB, {share:.3f} N K numbers (aim: 0.3)"


def handmade(Y: torch.Tensor) -> None:
    """The library's mixture as a user would write it."""
    K, m = 10, Y.shape[1]
    loc, scale = Y.mean(0), Y.std(0, correction=0)
    alpha = pyro.param("alpha", torch.ones(()), constraint=constraints.positive)
    beta = pyro.param("beta", scale.pow(-2).expand(K, m).clone(), constraint=constraints.positive)
    mixing = pyro.param("mixing", torch.full((K,), 1.0 / K), constraint=constraints.simplex)
    w = pyro.sample("w", dist.Normal(loc.expand(K, m), (scale * alpha.rsqrt()).expand(K, m)).to_event(2))
    with pyro.plate("data", len(Y)):
        z = pyro.sample("z", dist.Categorical(mixing), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(w[z], beta[z].rsqrt()).to_event(1), obs=Y)


def whole_fits() -> str:
    """Ripley's first class: the default fit, the same model by hand, and 1000 steps of SVI."""
    train, test = datasets.ripley_train(), datasets.ripley_test()
    Y, Z = train.X[train.t == 0], test.X[test.t == 0]
    model = gaussian_mixture(10)
    fit, own = (least(partial(EvidenceEM(m).run, Y), 9) for m in (model, handmade))
    found = EvidenceEM(model).run(Y)

    def svi() -> float:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide = AutoDelta(poutine.block(model, expose=["w"]), init_loc_fn=init_to_sample)
        engine = SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), TraceEnum_ELBO(max_plate_nesting=1))
        for _ in range(1000):
            engine.step(Y)
        params = {name: pyro.param(name).detach() for name in ("beta", "mixing")}
        kernels = dist.Normal(guide()["w"].detach(), params["beta"].rsqrt()).to_event(1)
        return -float(dist.MixtureSameFamily(dist.Categorical(params["mixing"]), kernels).log_prob(Z).mean())

    begin = time.process_time()
    error = svi()
    slow = time.process_time() - begin
    pyro.clear_param_store()
    return (
        f"Ripley, class 1, K = 10: whole default fit {1e3 * fit:.0f} ms (aim: 150), the same model by hand "
        f"{own / fit:.2f} times that (aim: 1.3); 1000 steps of SVI {slow / fit:.0f} times that (aim: 50), test NLL "
        f"{error:.3f} against {-float(found.log_prob(Z).mean()):.3f}."
    )


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, float64, OPENBLAS_CORETYPE={os.environ.get('OPENBLAS_CORETYPE')}\n")
    print("| N, K, D | noise | ours ms | scikit-learn ms | ratio | aim | ours / roofline |")
    print("|---|---|---|---|---|---|---|")
    for shape, full, repeats, aim in CASES + (LARGE if "--large" in sys.argv else []):
        Y = blobs(shape)
        a = ours(Y, shape[1], full=full, repeats=repeats)
        b = theirs(Y, shape[1], full=full, repeats=repeats)
        line = f"| {shape} | {'full' if full else 'diagonal'} | {1e3 * a:.2f} | {1e3 * b:.2f} | {a / b:.2f} | {aim} |"
        print(f"{line} {a / roofline(shape, full=full):.1f} |", flush=True)
    largest = LARGE[0][0] if "--large" in sys.argv else CASES[2][0]
    print(f"\n{peak(largest)}\n\n{restarts()}\n\n{whole_fits()}")


if __name__ == "__main__":
    main()
