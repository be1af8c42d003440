"""Speed of the PRBF's rounds; CPU seconds, one thread, float64, ratios of runs that take turns.

    OMP_NUM_THREADS=1 python benchmarks/prbf_speed.py      # Markdown on stdout

Data: blobs of the sizes of Satimage and Pima.  scikit-learn's rounds are a difference of two fits, so that its
initialisation is not counted.
"""

import warnings
from functools import partial

import torch
from sklearn.mixture import GaussianMixture
from timing import seconds

from pyro_evidence import Start
from pyro_evidence.fitting.em import repeated
from pyro_evidence.models.covariances import Covariance, Diagonal, Spherical
from pyro_evidence.prbf.data import Training
from pyro_evidence.prbf.densities import Network, Point, class_data, parts_of
from pyro_evidence.prbf.fit import first, keep_dead_kernels, next_round, warmed_up
from pyro_evidence.prbf.start import RandomPoints
from pyro_evidence.prbf.updates import Update, climb_penalised, em, exact_m_step, prbf2001_update


def blobs(N: int, D: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    y = torch.randint(K, (N,), generator=g)
    return 0.7 * torch.randn(K, D, generator=g)[y] + torch.randn(N, D, generator=g), y


def begun(X: torch.Tensor, y: torch.Tensor, M: int, kind: Covariance, rows: int = 1) -> Point:
    K = int(y.max()) + 1
    allowed = torch.ones(K, M, dtype=torch.bool)
    net = RandomPoints()(Training(X, y, kind, allowed), Start(restarts=rows))
    return first(class_data(X, y, K, kind), net, 20.0 * len(X) / (K * M))


def rounds(point: Point, update: Update, num: int) -> object:
    return repeated(warmed_up(point, update, keep_dead_kernels), num, next_round)


def per_round(point: Point, update: Update, num: int) -> float:
    def go() -> None:
        at = point
        for _ in range(num):
            at = update(at)

    return seconds(go) / num


def theirs(X: torch.Tensor, M: int, name: str, num: int) -> float:
    def fit(steps: int) -> float:
        start = {
            "means_init": X[:M].numpy(),
            "max_iter": steps,
            "tol": 0.0,
            "covariance_type": name,
            "init_params": "random",
            "random_state": 0,
        }
        return seconds(lambda: GaussianMixture(M, **start).fit(X.numpy()))

    return (min(fit(num + 1) for _ in range(3)) - min(fit(1) for _ in range(3))) / num


def satimage() -> None:
    X, y = blobs(6435, 36, 6)
    print("| one round, 6435 x 36, M = 18 | ms | ratio | aim |\n|---|---|---|---|")
    for kind, name in ((Spherical(), "spherical"), (Diagonal(), "diag")):
        at = begun(X, y, 18, kind)
        warm = at
        for _ in range(20):
            warm = em(warm)
        runs = {"plain": [], "literal": [], "ascent": [], "exact": [], "scikit-learn": []}
        for _ in range(5):
            for label, update in (("plain", em), ("literal", prbf2001_update), ("ascent", climb_penalised)):
                runs[label].append(per_round(warm, update, 10))
            runs["exact"].append(per_round(warm, exact_m_step, 10))
            runs["scikit-learn"].append(theirs(X, 18, name, 10))
        best = {label: min(values) for label, values in runs.items()}
        p = best["plain"]
        print(f"| {name}, scikit-learn's GaussianMixture | {1e3 * best['scikit-learn']:.2f} | | |")
        print(f"| {name}, plain EM, against scikit-learn | {1e3 * p:.2f} | {p / best['scikit-learn']:.2f} | 1.0 |")
        for label in ("literal", "ascent", "exact"):
            print(
                f"| {name}, {label}, against plain | {1e3 * best[label]:.2f} | {best[label] / p:.2f} | 2.0 |",
                flush=True,
            )


def pima() -> None:
    X, y = blobs(614, 8, 2)
    print("\n| 25 fits of Pima's size as a batch against one by one, M = 14 | times cheaper | aim |\n|---|---|---|")
    for update in (em, prbf2001_update, climb_penalised):
        batch = begun(X, y, 14, Spherical(), 25)
        single = [begun_row(batch, b) for b in range(25)]
        whole, each = [], []
        for _ in range(5):
            whole.append(seconds(partial(rounds, batch, update, 20)))
            each.append(sum(seconds(partial(rounds, one, update, 20)) for one in single))
        print(f"| {update.__name__} | {min(each) / min(whole):.1f} | 4 |", flush=True)


def begun_row(batch: Point, b: int) -> Point:
    net = Network(*(v[b : b + 1] for v in parts_of(batch.net)))
    return first(batch.data, net, batch.alpha[b : b + 1])


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, float64\n")
    satimage()
    pima()


if __name__ == "__main__":
    main()
