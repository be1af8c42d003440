"""What a comparison costs beside its NUTS run, and what importance sampling costs: one Markdown table.

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
from time import process_time
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from torch import Tensor
from tqdm import tqdm

from pyro_evidence import REVM, LaplaceEvidence, Nuts, Svi, compare, importance_sampling
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
        "laplace": LaplaceEvidence(logistic, hyper=()),
        "revm": REVM(logistic),
        "svi": Svi(AutoNormal, Adam({"lr": 0.05}), num_steps=300),
        "nuts": Nuts(of="laplace"),
    }
    return compare(logistic, X, t, engines=engines)


def seconds(job: Callable[[], object]) -> float:
    """Processor time of one run."""
    pyro.clear_param_store()
    start = process_time()
    job()
    return process_time() - start


def measured() -> dict[str, float]:
    """All times, the least of REPEATS; rivals take turns."""
    _, (X, t) = pima_data()
    wide = LaplaceEvidence(logistic, hyper=()).run(*data(250, 50))
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
    verdict = f"{ratio:.2f} x, {'met' if ratio <= 1.2 else 'MISSED'}"
    print(f"| the same with Laplace, REVM and SVI, compared | {times['comparison']:.2f} | 1.2 x | {verdict} |")
    verdict = "met" if milliseconds < 100.0 else "MISSED"
    print(f"| importance sampling, S = 10 000, D = 50, N = 250 | {times['importance']:.3f} | 0.1 | {verdict} |")
    print(f"\n{comparison(X, t).to_markdown()}")


if __name__ == "__main__":
    main()
