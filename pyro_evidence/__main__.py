"""``python -m pyro_evidence``: versions, and a fit whose evidence is known on paper; what to paste into a report."""

import math
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from pyro_evidence.fitting.iterate import Stop
from pyro_evidence.infer.laplace_evidence import LaplaceEvidence

OPTIONAL = ["scipy", "pandas", "formulae", "scikit-learn", "arviz", "arviz-base", "matplotlib", "xarray"]
ASKED = ["pyro-evidence", "pyro-ppl", "torch", "numpy", "opt_einsum", "safetensors", "tqdm", *OPTIONAL]
CLOSE = 1e-8  # nats
ALPHA, BETA = 0.5, 4.0  # precisions of weights and noise


def line(X: Tensor, t: Tensor | None = None) -> Tensor:
    """A regression whose evidence is that of one normal vector."""
    w = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[-1]), ALPHA**-0.5).to_event(1))
    with pyro.plate("rows", len(X)):
        return pyro.sample("t", dist.Normal(X @ w, BETA**-0.5), obs=t)


def versions() -> list[str]:
    """Interpreter, machine and packages, a line each."""
    found = [f"python {platform.python_version()}, {platform.platform()}"]
    for name in ASKED:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} is not installed{', and optional' if name in OPTIONAL else ''}")
    threads = f"{torch.get_num_threads()} threads, default dtype {torch.get_default_dtype()}"
    return [*found, f"torch computes with {threads}, CUDA {'is' if torch.cuda.is_available() else 'is not'} there"]


def difference() -> float:
    """Absolute error of a fit's log evidence, whose closed form is known, nats."""
    x = torch.linspace(-1.0, 1.0, 30, dtype=torch.float64)
    X = torch.stack([torch.ones_like(x), x], -1)
    t = 2.0 * x + 0.3 * torch.cos(40.0 * x)
    covariance = X @ X.mT / ALPHA + torch.eye(len(x), dtype=torch.float64) / BETA
    exact = MultivariateNormal(torch.zeros_like(x), covariance).log_prob(t)
    return float(LaplaceEvidence(line, stop=Stop(progress=False)).run(X, t).log_evidence - exact)


def main() -> int:
    """Print the report; 0 when the check holds."""
    sys.stdout.write("\n".join([*versions(), ""]))
    start = perf_counter()
    found = difference()
    holds = math.isfinite(found) and abs(found) < CLOSE
    says = "as it should be" if holds else f"expected at most {CLOSE:g}: please report it, with the lines above"
    seconds = perf_counter() - start
    sys.stdout.write(
        f"log evidence of a regression, less the closed form: {found:.1e} nats ({seconds:.1f} s): {says}\n"
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
