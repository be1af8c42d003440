"""The same fits as four processors compute them: do they decide alike, and agree on the log evidence?

    python benchmarks/portable.py            # one table; ends in an error where two settings differ
    python benchmarks/portable.py --suite    # the test suite under the same settings before it: make portable

Two variables make one machine compute like another: ``ATEN_CPU_CAPABILITY`` chooses torch's kernels, ``MKL_CBWR`` those
of the linear algebra.  A fit decides alike when status, pruned groups, components and axes that are kept are the same;
log evidences agree to 1e-7 of their size.  Wants PYRO_EVIDENCE_DATA; fits of sets that are not there are left out.
"""

import csv
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import REVM, RVM, VRVM, EvidenceEM, LaplaceEvidence, OverlapEM, Start, Stop, datasets, gauss_newton
from pyro_evidence.models.basis import Learned, Linear, Polynomial
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.gp import gp_classifier, gp_regression
from pyro_evidence.models.kernels import RBF
from pyro_evidence.models.mixture import gaussian_mixture, linear_mixture
from pyro_evidence.models.mlp import MLP
from pyro_evidence.models.mppca import mppca
from pyro_evidence.models.prbf import prbf
from pyro_evidence.models.regression import regression

SETTINGS = (
    {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"},
    {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2"},
    {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "SSE4_2"},
    {"OMP_NUM_THREADS": "2", "ATEN_CPU_CAPABILITY": "avx512"},
)
AGREE = 1e-7  # relative difference of two log evidences that counts as none
QUIET = Stop(progress=False, throw=False)

Fit = Callable[[], Any]  # to a posterior


def positive(name: str, value: float | Tensor) -> Tensor:
    return pyro.param(name, lambda: torch.as_tensor(value), constraint=constraints.positive)


def table(name: str) -> dict[str, list[str]]:
    path = Path(os.environ.get("PYRO_EVIDENCE_DATA", "")) / f"{name}.csv"
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {key: [row[key] for row in rows] for key in rows[0]}


def codes(column: list[str]) -> tuple[Tensor, int]:
    levels = sorted(set(column))
    return torch.tensor([levels.index(c) for c in column]), len(levels)


def numbers(column: list[str]) -> Tensor:
    return torch.tensor([float(c) for c in column])


def sleepstudy(correlated: bool) -> Any:
    columns = table("sleepstudy")
    (group, num), x, y = codes(columns["Subject"]), numbers(columns["Days"]), numbers(columns["Reaction"])

    def model(x: Tensor, y: Tensor) -> None:
        b, sd, sigma = pyro.param("b", torch.zeros(2)), positive("sd", torch.ones(2)), positive("sigma", 1.0)
        tril = sd.diag()
        if correlated:
            tril = sd[:, None] * pyro.param("L", torch.eye(2), constraint=constraints.corr_cholesky)
        with pyro.plate("subjects", num):
            a = pyro.sample("a", dist.MultivariateNormal(torch.zeros(2), scale_tril=tril))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(b[0] + a[group, 0] + (b[1] + a[group, 1]) * x, sigma), obs=y)

    return LaplaceEvidence(model, stop=QUIET).run(x, y)


def cbpp() -> Any:
    columns = table("cbpp")
    (herd, herds), (period, _), size = codes(columns["herd"]), codes(columns["period"]), numbers(columns["size"])

    def model(y: Tensor) -> None:
        b, sd = pyro.param("b", torch.zeros(4)), positive("sd", 1.0)
        a = pyro.sample("a", dist.Normal(torch.zeros(herds), sd).to_event(1))
        pyro.sample("y", dist.Binomial(size, logits=b[period] + a[herd]).to_event(1), obs=y)

    return LaplaceEvidence(model, stop=QUIET).run(numbers(columns["incidence"]))


def scaled(data: datasets.Dataset) -> tuple[Tensor, Tensor]:
    assert data.t is not None
    X = data.X.where(~data.X.isnan(), data.X.nanmean(0))
    spread = X.std(0)
    return (X - X.mean(0)) / torch.where(spread > 0, spread, 1.0), data.t


def ripley() -> tuple[Tensor, Tensor]:
    return scaled(datasets.ripley_train())


def kernel_columns(X: Tensor) -> Tensor:
    return torch.cat([torch.exp(-torch.cdist(X, X[::3]).square() / 0.5), torch.ones(len(X), 1)], 1)


def weights(Phi: Tensor, t: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(Phi.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(Phi)):
        pyro.sample("t", dist.Bernoulli(logits=Phi @ w), obs=t)


def by_ard(load: Callable[[], tuple[Tensor, Tensor]]) -> Any:
    X, t = load()
    return LaplaceEvidence(classifier(Linear(), groups=torch.arange(X.shape[1])), stop=QUIET).run(X, t)


def wave() -> tuple[Tensor, Tensor]:
    X, _ = ripley()
    noise = torch.randn(len(X), generator=torch.Generator().manual_seed(0))
    return X, torch.sin(3.0 * X[:, 0]) + 0.1 * X[:, 1] + 0.1 * noise


def shared(load: Callable[[], tuple[Tensor, Tensor]]) -> Any:
    X, t = load()
    return LaplaceEvidence(classifier(Linear()), stop=QUIET).run(X, t)


def network(restarts: int) -> Any:
    X, y = wave()
    engine = LaplaceEvidence(MLP(2, 3), curvature=gauss_newton, start=Start(restarts=restarts), stop=QUIET)
    return engine.run(X[:100], y[:100])


def relevance(engine: Any, load: Callable[[], tuple[Tensor, Tensor]]) -> Any:
    X, t = load()
    return engine.run(kernel_columns(X), t)


def of_rows(load: Callable[[], datasets.Dataset], engine: Any) -> Any:
    return engine.run(scaled(load())[0])


def polynomials(engine: Callable[[Any], Any]) -> Any:
    X, y = wave()
    start = Learned(1.0)
    model = regression(Polynomial(6), alpha=start, alpha_bias=None, groups=torch.arange(13), beta=start)
    return engine(model).run(X, y)


def conditional() -> Any:
    X, y = wave()
    return EvidenceEM(linear_mixture(3, Polynomial(2)), start=Start(restarts=2), stop=QUIET).run(X, y[:, None])


def fits() -> dict[str, Fit]:
    few, pima, heart = Start(restarts=2), datasets.pima, lambda: datasets.csv("heart")
    galaxies = lambda: datasets.galaxies().X / 1000.0  # noqa: E731
    return {
        "LaplaceEvidence, sleepstudy, independent": lambda: sleepstudy(correlated=False),
        "LaplaceEvidence, sleepstudy, correlated": lambda: sleepstudy(correlated=True),
        "LaplaceEvidence, cbpp": cbpp,
        "LaplaceEvidence, heart, one precision": lambda: shared(lambda: scaled(heart())),
        "LaplaceEvidence, pima, a precision each": lambda: by_ard(lambda: scaled(pima())),
        "LaplaceEvidence, heart, a precision each": lambda: by_ard(lambda: scaled(heart())),
        "LaplaceEvidence, wave, polynomial": lambda: polynomials(lambda m: LaplaceEvidence(m, stop=QUIET)),
        "LaplaceEvidence, wave, Gaussian process": lambda: LaplaceEvidence(gp_regression(RBF()), stop=QUIET).run(
            *(x[:100] for x in wave())
        ),
        "LaplaceEvidence, ripley, Gaussian process": lambda: LaplaceEvidence(gp_classifier(RBF()), stop=QUIET).run(
            *(x[::3] for x in ripley())
        ),
        "LaplaceEvidence, wave, network": lambda: network(4),
        "EvidenceEM, galaxies": lambda: EvidenceEM(gaussian_mixture(8), stop=QUIET).run(galaxies()),
        "EvidenceEM, ripley": lambda: of_rows(datasets.ripley_train, EvidenceEM(gaussian_mixture(6), stop=QUIET)),
        "EvidenceEM, pima, planes": lambda: of_rows(pima, EvidenceEM(mppca(3, 2), start=few, stop=QUIET)),
        "EvidenceEM, wave, linear": conditional,
        "REVM, ripley": lambda: relevance(REVM(weights, ridge=1e-2), ripley),
        "REVM, heart": lambda: relevance(REVM(weights, ridge=1e-2), lambda: scaled(heart())),
        "RVM, ripley": lambda: relevance(RVM(weights, stop=QUIET), ripley),
        "RVM, heart": lambda: relevance(RVM(weights, stop=QUIET), lambda: scaled(heart())),
        "RVM, wave, polynomial": lambda: polynomials(lambda m: RVM(m, stop=QUIET)),
        "VRVM, ripley": lambda: relevance(VRVM(weights, stop=QUIET), ripley),
        "VRVM, wave, polynomial": lambda: polynomials(lambda m: VRVM(m, stop=QUIET)),
        "OverlapEM, ripley": lambda: OverlapEM(prbf(5), stop=QUIET).run(*ripley()),
        "OverlapEM, heart": lambda: OverlapEM(prbf(4), stop=QUIET).run(*scaled(heart())),
    }


def decisions(posterior: Any) -> str:
    """What was decided on the way, as a text: why the fit ended, and what is left."""
    found = [posterior.status.split(":")[0][:30]]
    if hasattr(posterior, "num_components"):
        found.append(f"{posterior.num_components} components")
    if hasattr(posterior, "num_latents"):
        found.append(f"latents {sorted(posterior.num_latents.tolist())}")
    if hasattr(posterior, "active"):
        found.append(f"{int(torch.as_tensor(posterior.active).sum())} kept")
    elif hasattr(posterior, "pruned") and isinstance(posterior.pruned, dict):
        found.append(f"{sum(int(p.sum()) for p in posterior.pruned.values())} pruned")
    return ", ".join(found)


def height(posterior: Any) -> float:
    """The log evidence, or what stands for it, nats."""
    for name in ("log_evidence", "log_bound", "log_likelihood_per_step"):
        value = getattr(posterior, name, None)
        if isinstance(value, Tensor) and value.numel() == 1:
            return float(value)
    found = getattr(posterior, "objectives", None) or getattr(posterior, "log_evidences", (math.nan,))
    return float(found[-1])


def measure() -> None:
    """Print one line of JSON for each fit, under the setting of this process."""
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    for name, fit in fits().items():
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        try:
            posterior = fit()
            found = {"decided": decisions(posterior), "height": height(posterior)}
        except FileNotFoundError:
            continue
        except Exception as error:  # a fit that ends in an error message decides, too
            found = {"decided": f"{type(error).__name__}: {str(error)[:60]}", "height": math.nan}
        print(json.dumps({"name": name, **found}), flush=True)


def under(setting: dict[str, str]) -> dict[str, dict[str, Any]]:
    """All fits by a process of their own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure"]
    output = subprocess.run(command, env=os.environ | setting, check=True, capture_output=True, text=True).stdout
    return {line["name"]: line for line in map(json.loads, output.splitlines())}


def same(lines: list[dict[str, Any]]) -> bool:
    """Whether all settings decided alike, and agree on the height."""
    heights = [line["height"] for line in lines]
    close = all(abs(h - heights[0]) <= AGREE * (1.0 + abs(heights[0])) for h in heights) or all(
        map(math.isnan, heights)
    )
    return close and len({line["decided"] for line in lines}) == 1


def suite(arguments: list[str]) -> None:
    """The tests under each setting; ends in an error where one fails."""
    for setting in SETTINGS:
        print(" ".join(f"{k}={v}" for k, v in setting.items()), flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--dist", "worksteal", *arguments]
        subprocess.run(command, env=os.environ | setting, check=True)


def main() -> None:
    """One row for each fit."""
    if "--suite" in sys.argv:
        suite(sys.argv[sys.argv.index("--suite") + 1 :])
    found = [under(setting) for setting in SETTINGS]
    differ = 0
    for name in found[0]:
        lines = [each[name] for each in found]
        heights = [line["height"] for line in lines]
        spread = (max(heights) - min(heights)) / (1.0 + abs(heights[0]))
        if same(lines):
            print(f"{name:42s} {heights[0]:14.6f}  {spread:7.1e}  {lines[0]['decided']}")
        else:
            differ += 1
            print(f"{name:42s} DIFFERS {heights} {[line['decided'] for line in lines]}")
    print(f"{len(found[0])} fits under {len(SETTINGS)} settings; {differ} differ")
    sys.exit(int(differ > 0))


if __name__ == "__main__":
    measure() if "--measure" in sys.argv else main()
