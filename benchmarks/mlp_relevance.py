"""Automatic relevance determination: ten inputs, three relevant, 200 data, ten seeds, the best of four starts each.

    python benchmarks/mlp_relevance.py [--seeds 10] [--hidden 5]

Counts the seeds in which each of the seven other inputs gets a precision at least 100 times that of every relevant one.
What is done is kept in ``.benchmarks/mlp_relevance.json``.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from pyro_evidence import LaplaceEvidence, Start, Stop, gauss_newton
from pyro_evidence.models.mlp import MLP, ard

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
CACHE = Path(".benchmarks/mlp_relevance.json")
STOP = Stop(tolerance=1e-4, gradient_tolerance=0.05, num_steps=25, throw=False, progress=False)


def one(seed: int, num_hidden: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(200, 10, generator=generator)
    y = torch.sin(1.5 * X[:, 0]) + X[:, 1] * torch.tanh(X[:, 2])
    t = y / y.std() + 0.2 * torch.randn(200, generator=generator)
    start = time.process_time()
    engine = LaplaceEvidence(
        MLP(10, num_hidden, alpha=ard(10)), curvature=gauss_newton, start=Start(restarts=4, seed=seed), stop=STOP
    )
    posterior = engine.run(X, t)
    alpha = posterior.hyperparameters["alpha_W1"]
    return {
        "seconds": time.process_time() - start,
        "ratio": min(1e300, float(alpha[3:].min() / alpha[:3].max())),
        "evidence": float(posterior.log_evidence),
        "status": posterior.status,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=5)
    args = parser.parse_args()
    known = json.loads(CACHE.read_text()) if CACHE.exists() else {}
    for seed in tqdm(range(args.seeds), desc="seeds"):
        key = f"{seed} {args.hidden} restarts 4"
        if key not in known:
            known[key] = one(seed, args.hidden)
            CACHE.parent.mkdir(exist_ok=True)
            CACHE.write_text(json.dumps(known))
    found = [known[f"{seed} {args.hidden} restarts 4"] for seed in range(args.seeds)]
    print("| seed | smallest irrelevant / largest relevant precision | log evidence | CPU s |\n|---|---|---|---|")
    for seed, r in enumerate(found):
        print(f"| {seed} | {r['ratio']:.3g} | {r['evidence']:.1f} | {r['seconds']:.1f} |")
    print(f"\n{sum(r['ratio'] >= 100.0 for r in found)} of {len(found)} seeds with a ratio of at least 100.")


if __name__ == "__main__":
    main()
