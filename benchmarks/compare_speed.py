"""What a comparison costs beside its NUTS run, what importance sampling costs, and how good Laplace is on Pima.

    OMP_NUM_THREADS=1 python benchmarks/compare_speed.py

One thread, double precision, processor time, the least of several runs, so that other processes hardly matter; only
ratios carry over to another machine.  Finished numbers are kept in .benchmarks/compare_speed.json, so that an
interrupted run goes on where it was; delete the file to measure again.  Pima needs PYRO_EVIDENCE_DATA; without it
synthetic data of the same size take its place.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from timing import seconds
from torch import Tensor
from tqdm import tqdm

from pyro_evidence import REVM, LaplaceEvidence, compare, importance_sampling
from pyro_evidence.compare import NUTSRun, SVIRun
from pyro_evidence.datasets import pima, standardised

CACHE = Path(".benchmarks/compare_speed.json")
REPEATS = 3


def logistic(X: Tensor, t: Tensor) -> None:
    """Logistic regression; every weight, the bias too, has prior precision 1."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[-1]]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


def data(num: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs with a bias column, and labels drawn from the model."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.cat([torch.randn(num, size - 1, generator=generator), torch.ones(num, 1)], -1)
    w = torch.randn(size, generator=generator) / size**0.5
    return X, torch.bernoulli(torch.sigmoid(X @ w), generator=generator)


def pima_data() -> tuple[str, tuple[Tensor, Tensor]]:
    """The real data where they are, else as many synthetic ones."""
    if "PYRO_EVIDENCE_DATA" not in os.environ:
        return "768 synthetic data, D = 9", data(768, 9)
    found = standardised(pima())
    return "Pima, N = 768, D = 9", (torch.cat([found.X, torch.ones(len(found.X), 1)], 1), found.t)


def nuts_alone(X: Tensor, t: Tensor) -> None:
    """500 draws after 500 warmup steps, on the model with nothing to fit."""
    torch.manual_seed(0)
    MCMC(NUTS(logistic), num_samples=500, warmup_steps=500, disable_progbar=True).run(X, t)


def comparison(X: Tensor, t: Tensor) -> Any:
    """Four engines; NUTS with the same seed on the same density."""
    engines = {
        "laplace": LaplaceEvidence(logistic, maximise=()),
        "revm": REVM(logistic),
        "svi": SVIRun(AutoNormal, Adam({"lr": 0.05}), num_steps=300),
        "nuts": NUTSRun(posterior="laplace"),
    }
    return compare(logistic, X, t, engines=engines)


def laplace_errors(X: Tensor, t: Tensor, num_draws: int = 200_000) -> list[tuple[str, float, float]]:
    """Largest errors of Laplace's marginals over the weights, each with its Monte-Carlo standard error.

    The reference is self-normalised importance sampling from a Student t of 10 degrees of freedom around Laplace's
    Gaussian, with the density written out here; its errors are by the delta method.
    """
    posterior = LaplaceEvidence(logistic, maximise=()).run(X, t)
    mode, tril = posterior.mode["w"], torch.linalg.cholesky(torch.linalg.inv(hessian(X, posterior.mode["w"])))
    generator = torch.Generator().manual_seed(0)
    white = torch.randn(num_draws, len(mode), generator=generator)
    chi_square = torch.randn(num_draws, 10, generator=generator).square().sum(-1, keepdim=True)
    white = white * (10.0 / chi_square).sqrt()
    w = mode + white @ tril.mT
    log_q = -0.5 * (10 + len(mode)) * (white.square().sum(-1) / 10.0).log1p()
    eta = w @ X.T
    log_p = (t * eta - torch.nn.functional.softplus(eta)).sum(-1) - 0.5 * w.square().sum(-1)
    share = (log_p - log_q).softmax(0).unsqueeze(-1)
    mean = (share * w).sum(0)
    off = w - mean
    sd = (share * off.square()).sum(0).sqrt()
    ratio = tril.square().sum(-1).sqrt() / sd
    mean_error = (share * off).square().sum(0).sqrt() / sd
    ratio_error = ratio * (share * (off.square() - sd.square())).square().sum(0).sqrt() / (2.0 * sd.square())
    rows = [
        ("(mode - mean) / sd", (mode - mean).abs() / sd, mean_error),
        ("sd ratio - 1", (ratio - 1.0).abs(), ratio_error),
    ]
    return [(name, float(x.max()), float(error[x.argmax()])) for name, x, error in rows]


def hessian(X: Tensor, w: Tensor) -> Tensor:
    """Of minus the log joint density."""
    p = (X @ w).sigmoid()
    return (X.T * (p * (1.0 - p))) @ X + torch.eye(len(w))


def measured() -> dict[str, float]:
    """All times, the least of REPEATS; rivals take turns."""
    _, (X, t) = pima_data()
    wide = LaplaceEvidence(logistic, maximise=()).run(*data(250, 50))
    jobs: dict[str, Callable[[], object]] = {
        "nuts alone": lambda: nuts_alone(X, t),
        "comparison": lambda: comparison(X, t),
        "importance": lambda: importance_sampling(wide, num_samples=10_000),
    }
    found: dict[str, list[float]] = json.loads(CACHE.read_text()) if CACHE.exists() else {}
    CACHE.parent.mkdir(exist_ok=True)
    for _ in tqdm(range(REPEATS), desc="repeats"):
        for name, job in jobs.items():
            if len(found.get(name, [])) < REPEATS:
                found.setdefault(name, []).append(seconds(job))
                CACHE.write_text(json.dumps(found))
    return {name: min(times) for name, times in found.items()}


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    name, (X, t) = pima_data()
    times = measured()
    ratio = times["comparison"] / times["nuts alone"]
    milliseconds = 1000.0 * times["importance"]
    print("| case | seconds | target | |\n|---|---|---|---|")
    print(f"| {name}: NUTS 500+500 alone | {times['nuts alone']:.2f} | | |")
    stop_reason = f"{ratio:.2f} x, {'met' if ratio <= 1.2 else 'MISSED'}"
    print(f"| the same with Laplace, REVM and SVI, compared | {times['comparison']:.2f} | 1.2 x | {stop_reason} |")
    stop_reason = "met" if milliseconds < 100.0 else "MISSED"
    print(f"| importance sampling, S = 10 000, D = 50, N = 250 | {times['importance']:.3f} | 0.1 | {stop_reason} |")
    print("\n| Laplace, largest over the weights | error | Monte-Carlo se | target |\n|---|---|---|---|")
    for (label, error, se), target in zip(laplace_errors(X, t), (0.05, 0.03), strict=True):
        print(f"| {label} | {error:.4f} | {se:.4f} | {target}, {'met' if error < target else 'MISSED'} |")
    print(f"\n{comparison(X, t).to_markdown()}")


if __name__ == "__main__":
    main()
