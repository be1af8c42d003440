"""Gaussian processes: time against scikit-learn, and NUTS over hyperparameters against NUTS over everything.

    OMP_NUM_THREADS=1 python benchmarks/gp_speed.py

One thread, double precision, processor time, the least of several interleaved runs; only ratios carry over to another
machine.  Finished rows are kept in .benchmarks/gp_speed.json; delete it to measure again.
"""

import json
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF as SklearnRBF
from torch import Tensor
from tqdm import tqdm

from pyro_evidence import LaplaceEvidence, LaplaceMarginal, Stop
from pyro_evidence.models.gp import gp_classifier
from pyro_evidence.ops.kernels import RBF

QUIET = Stop(progress=False)
CACHE = Path(".benchmarks/gp_speed.json")
Row = dict[str, Any]


def classes(num_data: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(num_data, 2, generator=generator)
    noise = 0.5 * torch.randn(num_data, generator=generator)
    return X, ((2.0 * X[:, 0]).sin() + X[:, 1] + noise > 0).double()


def by_hand(X: Tensor, t: Tensor) -> None:
    """The fixed kernel in a model as a user would write it."""
    K = torch.exp(-0.5 * torch.cdist(X, X).square()) + 1e-6 * torch.eye(len(X))
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(len(X)), K))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=f), obs=t)


def least(jobs: dict[str, Callable[[], float]], num_repeats: int) -> dict[str, tuple[float, float]]:
    """Least processor time of each job, and what it returned."""
    found = {name: (float("inf"), 0.0) for name in jobs}
    for _ in range(num_repeats):
        for name, job in jobs.items():
            pyro.clear_param_store()
            start = process_time()
            value = job()
            found[name] = min(found[name], (process_time() - start, value))
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


def efficiency(model: Callable[..., Any], num: int, X: Tensor, t: Tensor) -> tuple[float, float, dict[str, Any]]:
    """Least effective samples per second of processor time, over the hyperparameters; the seconds; the means."""
    pyro.set_rng_seed(0)
    mcmc = MCMC(NUTS(model, max_tree_depth=8), num_samples=num, warmup_steps=num, disable_progbar=True)
    start = process_time()
    mcmc.run(X, t)
    seconds = process_time() - start
    names = [n for n in mcmc.get_samples() if n != "f"]
    diagnostics = mcmc.diagnostics()
    effective = min(float(diagnostics[n]["n_eff"]) for n in names)
    return effective / seconds, seconds, {n: float(mcmc.get_samples()[n].log().mean()) for n in names}


def marginal_row() -> Row:
    """NUTS over two hyperparameters, the function integrated out by Laplace, against NUTS over all 102."""
    X, t = classes(100)
    model = gp_classifier(RBF(dist.LogNormal(0.0, 0.5), dist.LogNormal(1.0, 0.5)), jitter=1e-4)
    ours, seconds, means = efficiency(LaplaceMarginal(model, integrate=["f"]), 100, X, t)
    rival, its_seconds, its_means = efficiency(model, 60, X, t)
    said = "; ".join(f"{n}: log mean {means[n]:.2f}, {its_means[n]:.2f}" for n in means)
    note = f"effective samples per second {ours:.3g} and {rival:.3g}; {said}"
    case = "N=100, classification: marginal Laplace + NUTS against NUTS over everything"
    return row(case, seconds, its_seconds, ours / rival, "at least 20", ours >= 20.0 * rival, note)


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
    "marginal": marginal_row,
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
        verdict = "met" if r["met"] else "MISSED"
        print(
            f"| {r['case']} | {r['ours']:.3g} | {r['rival']:.3g} | {r['ratio']:.3g} | {r['target']} | {verdict} | "
            f"{r['note']} |"
        )


if __name__ == "__main__":
    main()
