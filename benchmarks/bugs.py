"""Examples of BUGS beside JAGS: means and standard deviations of the plain table.

    OMP_NUM_THREADS=1 python -m benchmarks.bugs [NAME ...]

d is the largest difference of a mean, in JAGS's deviations; the ratio of deviations is the one farthest from 1. JAGS's
numbers, with the effective draws behind them, are in tests/oracles/bugs.json; below 400 they are not to be relied on.
"""

import argparse
import time
import warnings

import pyro
import torch

torch.set_default_dtype(torch.float64)  # before models make tensors

from pyro_evidence import LaplaceEvidence, Stop
from tests.gallery.programs.bugs import EXAMPLES, STORED, data_of

NUM_DRAWS = 8000


def row(name: str) -> str:
    """One line of the table."""
    example, data = EXAMPLES[name], data_of(EXAMPLES[name].data)
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    start = time.process_time()
    try:
        posterior = LaplaceEvidence(example.model, stop=Stop(progress=False)).run(data)
    except Exception as error:
        return f"| {name} | {type(error).__name__}: {str(error)[:80]} | | | | |"
    fit = time.process_time() - start
    k_hat = posterior.diagnostics()["pareto_k"]
    found = example.quantities(posterior.get_samples(NUM_DRAWS, seed=1))
    jags = STORED[name]["jags"]
    far = max(abs(float(v.mean()) - jags[k][0]) / jags[k][1] for k, v in found.items())
    wide = max((float(v.std()) / jags[k][1] for k, v in found.items()), key=lambda ratio: abs(ratio - 1.0))
    return f"| {name} | {far:.2f} | {wide:.2f} | {k_hat:.2f} | {fit:.1f} | {STORED[name]['effective']} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(EXAMPLES)}; by default all")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| example | d | sd ratio | k-hat | fit, CPU s | JAGS's effective draws |\n|---|---|---|---|---|---|")
    for name in asked.names or EXAMPLES:
        print(row(name), flush=True)


if __name__ == "__main__":
    main()
