"""Ripley's data: how many of a hundred fits are within the numbers that were set before the code was written.

    PYRO_EVIDENCE_DATA=folder OMP_NUM_THREADS=1 python benchmarks/ripley.py [--seeds 10]

Two classes, a mixture each, 2 to 20 components offered, two widths of the start; every fit has its own seed.  In spec:
test errors of both densities at most .089 and .082 nats a datum, and 9.3 % of the labels wrong at most.
"""

import argparse
import time
import warnings
from collections import Counter
from itertools import product

import torch

from pyro_evidence import EvidenceEM, Start, Stop, class_conditional, datasets
from pyro_evidence.mixture import RandomWeights
from pyro_evidence.models.mixture import gaussian_mixture

LIMITS = (0.089, 0.082, 0.093)


def fitted(num_components: int, width: float, seed: int) -> tuple[tuple[int, ...], tuple[float, float, float]]:
    """Components of each class; test errors of both densities, nats a datum, and of the labels."""
    train, test = datasets.ripley_train(), datasets.ripley_test()
    engine = EvidenceEM(
        gaussian_mixture(num_components),
        start=Start(seed=seed),
        initial=RandomWeights(width=width),
        stop=Stop(progress=False),
    )
    found = class_conditional(engine, train.X, train.t)
    height = found.log_density(test.X)
    errors = [-float(height[test.t == k, k].mean()) for k in (0, 1)]
    wrong = float((found.labels(test.X) != test.t).double().mean())
    return tuple(p.num_components for p in found.posteriors), (errors[0], errors[1], wrong)  # type: ignore[attr-defined]


def main() -> None:
    """The share of fits that are in spec, and where the others are."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    cases = list(product((2, 5, 10, 15, 20), (0.5, 1.0), range(parser.parse_args().seeds)))
    begin, good, left = time.process_time(), 0, Counter[tuple[int, ...]]()
    for case in cases:
        numbers, errors = fitted(*case)
        left[numbers] += 1
        inside = all(found <= limit for found, limit in zip(errors, LIMITS, strict=True))
        good += inside
        if not inside:
            print(f"K={case[0]}, width {case[1]}, seed {case[2]}: {errors}, components {numbers}", flush=True)
    seconds = (time.process_time() - begin) / len(cases)
    print(f"{good} of {len(cases)} in spec; components {dict(left)}; {seconds:.2f} s of CPU for both classes")


if __name__ == "__main__":
    main()
