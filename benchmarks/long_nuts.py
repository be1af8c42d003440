"""Long chains of Pyro's NUTS on the hierarchies of tests/models_for_tests/long_runs.py, kept as means and deviations.

    python -m benchmarks.long_nuts [NAME ...]

writes tests/oracles/long_nuts.json: by model and site the mean, the standard deviation, the effective number of draws
and the R-hat of every element, and what the chains were.  Chains start apart, and run one after the other.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pyro
import torch

torch.set_default_dtype(torch.float64)  # before models make tensors

from pyro import poutine
from pyro.infer import MCMC, NUTS
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from torch import Tensor

from tests.models_for_tests.long_runs import LONG_RUNS, LongRun

STORED = Path(__file__).resolve().parents[1] / "tests" / "oracles" / "long_nuts.json"


def chain(model: Any, data: Tensor, length: tuple[int, int], seed: int) -> tuple[dict[str, Tensor], int]:
    """One chain's draws, deterministic sites included, and how many of them diverged."""
    pyro.set_rng_seed(seed)
    kernel = NUTS(model, jit_compile=True, ignore_jit_warnings=True, target_accept_prob=0.9)
    mcmc = MCMC(kernel, num_samples=length[1], warmup_steps=length[0], disable_progbar=True)
    mcmc.run(data)
    draws = mcmc.get_samples()
    recorded = [
        _recorded(model, data, {n: v[i] for n, v in draws.items()}) for i in range(len(next(iter(draws.values()))))
    ]
    made = {n: torch.stack([row[n] for row in recorded]) for n in recorded[0]}
    return draws | made, len(mcmc.diagnostics()["divergences"]["chain 0"])


def _recorded(model: Any, data: Tensor, values: dict[str, Tensor]) -> dict[str, Tensor]:
    nodes = poutine.trace(poutine.condition(model, values)).get_trace(data).nodes
    return {n: node["value"] for n, node in nodes.items() if node.get("infer", {}).get("_deterministic")}


def moments(draws: Tensor) -> dict[str, Any]:
    """Mean, deviation, effective number and R-hat of each element of ``(C, S) + shape``."""
    rows = draws.flatten(2) if draws.dim() > 2 else draws.unsqueeze(-1)
    pooled = rows.flatten(0, 1)
    return {
        "mean": pooled.mean(0).tolist(),
        "sd": pooled.std(0).tolist(),
        "n_eff": effective_sample_size(rows).tolist(),
        "r_hat": split_gelman_rubin(rows).tolist(),
    }


def long_run(case: LongRun) -> dict[str, Any]:
    """The chains of one model."""
    model, data, start = case.sampled or case.model, case.data(), time.process_time()
    num, *length = case.chains
    found = [chain(model, data, (length[0], length[1]), seed) for seed in range(num)]
    sites = {n: moments(torch.stack([draws[n] for draws, _ in found])) for n in found[0][0]}
    made = f"{num} chains of {length[1]} draws after {length[0]}, target acceptance 0.9"
    diverging = sum(number for _, number in found)
    return {"sites": sites, "chains": made, "divergences": diverging, "seconds": time.process_time() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(LONG_RUNS)}; by default all")

    for name in parser.parse_args().names or LONG_RUNS:
        stored = json.loads(STORED.read_text()) if STORED.exists() else {}
        stored[name] = {"command": f"python -m benchmarks.long_nuts {name}"} | long_run(LONG_RUNS[name])
        STORED.write_text(json.dumps(stored, indent=1) + "\n")
        worst = min(min(site["n_eff"]) for site in stored[name]["sites"].values())
        print(f"{name}: {stored[name]['seconds']:.0f} s, least effective {worst:.0f}")


if __name__ == "__main__":
    main()
