"""Gaussian processes: time against scikit-learn, and NUTS over hyperparameters against NUTS over everything.

    OMP_NUM_THREADS=1 python benchmarks/gp_speed.py

One thread, double precision, processor time, the least of several interleaved runs; only ratios carry over to another
machine.  Finished rows are kept in .benchmarks/gp_speed.json; delete it to measure again.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS
from pyro.ops.stats import effective_sample_size
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF as SklearnRBF
from timing import timed
from torch import Tensor
from tqdm import tqdm

from pyro_evidence import LaplaceEvidence, LaplaceMarginal, Stop
from pyro_evidence.models.gp import gp_classifier
from pyro_evidence.models.kernels import RBF

QUIET = Stop(progress=False)
CACHE = Path(".benchmarks/gp_speed.json")
Row = dict[str, Any]


def classes(num_data: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(num_data, 2, generator=generator)
    noise = 0.5 * torch.randn(num_data, generator=generator)
    return X, ((2.0 * X[:, 0]).sin() + X[:, 1] + noise > 0).double()


def by_hand(X: Tensor, t: Tensor) -> None:
    """The fixed kernel in a model as a user would write it.

    It makes and factorises its covariance anew in every run, and is run several times to see what it is made of;
    ``gp_classifier`` keeps the last one.
    """
    K = torch.exp(-0.5 * torch.cdist(X, X).square()) + 1e-6 * torch.eye(len(X))
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(len(X)), K))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=f), obs=t)


def least(jobs: dict[str, Callable[[], float]], num_repeats: int) -> dict[str, tuple[float, float]]:
    """Least processor time of each job, and what it returned."""
    found = {name: (float("inf"), 0.0) for name in jobs}
    for _ in range(num_repeats):
        for name, job in jobs.items():
            found[name] = min(found[name], timed(job))
    return found


def ours(model: Callable[..., Any]) -> Callable[[], float]:
    X, t = classes(1000)
    return lambda: float(LaplaceEvidence(model(), stop=QUIET).run(X, t).log_evidence)


def theirs(optimizer: str | None) -> Callable[[], float]:
    X, t = (x.numpy() for x in classes(1000))
    kernel = 1.0 * SklearnRBF(1.0)
    return lambda: float(
        GaussianProcessClassifier(kernel, optimizer=optimizer).fit(X, t).log_marginal_likelihood_value_
    )


def classification(case: str, model: Callable[..., Any], optimizer: str | None, target: float) -> Row:
    num = 5 if optimizer is None else 2
    found = least({"ours": ours(model), "rival": theirs(optimizer)}, num)
    (seconds, value), (rival, its_value) = found["ours"], found["rival"]
    note = f"log evidence {value:.6f}, scikit-learn {its_value:.6f}"
    return row(case, seconds, rival, seconds / rival, f"at most {target:g}", seconds <= target * rival, note)


def row(case: str, ours: float, rival: float, ratio: float, target: str, met: bool, note: str) -> Row:
    return {"case": case, "ours": ours, "rival": rival, "ratio": ratio, "target": target, "met": met, "note": note}


def everything(X: Tensor, t: Tensor) -> None:
    """Hyperparameters and the function as independent normal numbers, as NUTS likes it best."""
    lengthscale = pyro.sample("kernel.lengthscale", dist.LogNormal(0.0, 0.5))
    variance = pyro.sample("kernel.variance", dist.LogNormal(1.0, 0.5))
    z = pyro.sample("z", dist.Normal(torch.zeros(len(X)), 1.0).to_event(1))
    K = variance * torch.exp(-0.5 * torch.cdist(X, X).square() / lengthscale**2) + 1e-4 * torch.eye(len(X))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=torch.linalg.cholesky(K) @ z), obs=t)


NAMES = ("kernel.lengthscale", "kernel.variance")


@dataclass(frozen=True)
class Chain:
    """What NUTS says of the logarithms of the hyperparameters."""

    seconds: float
    effective: Tensor  # (2,) effective samples
    mean: Tensor  # (2,)
    sd: Tensor  # (2,)

    def __str__(self) -> str:
        error = self.sd / self.effective.sqrt()
        parts = zip(NAMES, self.mean, error, self.sd, strict=True)
        return ", ".join(f"{n} {float(m):.2f} +- {float(e):.2f} (sd {float(s):.2f})" for n, m, e, s in parts)


def chain(model: Callable[..., Any], num: int, X: Tensor, t: Tensor) -> Chain:
    """NUTS, ``num`` steps of warm-up and as many draws."""
    pyro.set_rng_seed(0)
    mcmc = MCMC(NUTS(model), num_samples=num, warmup_steps=num, disable_progbar=True)
    seconds, _ = timed(lambda: mcmc.run(X, t))
    draws = torch.stack([mcmc.get_samples()[n].reshape(-1).log() for n in NAMES], -1)
    return Chain(seconds, effective_sample_size(draws.unsqueeze(0)), draws.mean(0), draws.std(0))


def marginal_row(num_data: int, num: int, its_num: int, *, whitened: bool) -> Row:
    """NUTS over two hyperparameters, the function integrated out by Laplace, against NUTS over it as well."""
    X, t = classes(num_data)
    model = gp_classifier(RBF(dist.LogNormal(0.0, 0.5), dist.LogNormal(1.0, 0.5)), jitter=1e-4)
    rival = everything if whitened else model
    ours, its = chain(LaplaceMarginal(model, integrate=["f"]), num, X, t), chain(rival, its_num, X, t)
    rate, its_rate = (float(c.effective.min()) / c.seconds for c in (ours, its))
    note = f"effective samples per second {rate:.3g} and {its_rate:.3g}; ours: {ours}; theirs: {its}"
    name = (
        "hyperparameters and the function, whitened by hand" if whitened else "the same model (theta, f) as it stands"
    )
    case = f"N={num_data}, classification: marginal Laplace + NUTS against NUTS over {name}"
    return row(case, ours.seconds, its.seconds, rate / its_rate, "at least 20", rate >= 20.0 * its_rate, note)


ROWS: dict[str, Callable[[], Row]] = {
    "fixed": lambda: classification(
        "N=1000, kernel fixed", lambda: gp_classifier(RBF(1.0, 1.0)), optimizer=None, target=1.5
    ),
    "by hand": lambda: classification(
        "N=1000, kernel fixed, model written by hand", lambda: by_hand, optimizer=None, target=1.5
    ),
    "optimised": lambda: classification(
        "N=1000, kernel optimised", lambda: gp_classifier(RBF()), optimizer="fmin_l_bfgs_b", target=1.0
    ),
    "marginal, N=50": lambda: marginal_row(50, 300, 300, whitened=True),
    "marginal, N=100": lambda: marginal_row(100, 150, 150, whitened=True),
    "marginal, N=100, same model": lambda: marginal_row(100, 150, 60, whitened=False),
}


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    CACHE.parent.mkdir(exist_ok=True)
    done = json.loads(CACHE.read_text()) if CACHE.exists() else {}
    for name in tqdm([n for n in ROWS if n not in done], desc="rows"):
        done[name] = ROWS[name]()
        CACHE.write_text(json.dumps(done, indent=1))
    print("| case | ours, s | rival, s | ratio | target | | |\n|---|---|---|---|---|---|---|")
    for r in done.values():
        stop_reason = "met" if r["met"] else "MISSED"
        print(
            f"| {r['case']} | {r['ours']:.3g} | {r['rival']:.3g} | {r['ratio']:.3g} | {r['target']} | {stop_reason} | "
            f"{r['note']} |"
        )


if __name__ == "__main__":
    main()
