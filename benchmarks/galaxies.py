"""The 82 galaxies: how many components EvidenceEM leaves, and the log evidence for each K one may start with.

    PYRO_EVIDENCE_DATA=folder OMP_NUM_THREADS=1 python benchmarks/galaxies.py [--seeds 20]    # Markdown on stdout

Each seed is one default fit, five restarts of its own.  The log evidence is in nats, total, velocities in 1000 km/s;
*best K* of a seed is the number of components left in its fit of highest log evidence, over all starts.
"""

import argparse
import warnings
from collections import Counter
from dataclasses import replace

import torch
from tqdm.auto import tqdm

from pyro_evidence import EvidenceEM, Start, datasets
from pyro_evidence.infer import evidence_em
from pyro_evidence.mixture.posterior import MixturePosterior
from pyro_evidence.models.mixture import gaussian_mixture

Found = dict[tuple[int, int], tuple[float, int]]  # (K, seed) -> log evidence and components left
QUIET = replace(evidence_em.STOP, progress=False)


def fits(velocities: torch.Tensor, starts: range, seeds: range) -> Found:
    found: Found = {}
    for K, seed in tqdm([(K, seed) for K in starts for seed in seeds], desc="fits", disable=None):
        fit = EvidenceEM(gaussian_mixture(K), start=Start(seed=seed), stop=QUIET).run(velocities)
        assert isinstance(fit, MixturePosterior)
        found[K, seed] = float(fit.log_evidence), fit.num_components
    return found


def tally(numbers: list[int]) -> str:
    """``4: 19, 3: 1``, the most frequent first."""
    return ", ".join(f"{number}: {times}" for number, times in Counter(numbers).most_common())


def report(found: Found, starts: range, seeds: range) -> str:
    head = ["K to start with", "components left: seeds", "log evidence: median", "lowest", "highest"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for K in starts:
        evidence = torch.tensor([found[K, seed][0] for seed in seeds])
        left = tally([found[K, seed][1] for seed in seeds])
        lines.append(f"| {K} | {left} | {evidence.quantile(0.5):.2f} | {evidence.min():.2f} | {evidence.max():.2f} |")
    best = [max(found[K, seed] for K in starts)[1] for seed in seeds]
    return "\n".join([*lines, "", f"Best number of components over all starts, of {len(seeds)} seeds: {tally(best)}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--largest", type=int, default=10, help="largest K to start with")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # a fit that runs out of rounds says so; its evidence counts all the same
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    starts, seeds = range(1, args.largest + 1), range(args.seeds)
    print(report(fits(datasets.galaxies().X / 1000.0, starts, seeds), starts, seeds))


if __name__ == "__main__":
    main()
