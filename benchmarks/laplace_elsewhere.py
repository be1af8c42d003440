"""Laplace's approximation in several packages on one problem whose evidence is known: linear regression, 30 weights.

    OMP_NUM_THREADS=1 python benchmarks/laplace_elsewhere.py    # Markdown, benchmarks/results/laplace_elsewhere.md

Each package finds the prior precision of the weights and the noise, and says a log evidence, in nats.  Beside it
stands the exact one *at the values that it found*, a multivariate normal density of the targets, and how far these
values lie below the best.  Seconds are of the processor, one thread, the least of three where one takes less than
a second.  A package that is not installed is left out; laplace-torch is begun at least squares and given 200 steps of
Adam, AutoLaplaceApproximation 1,000.
"""

import time
import warnings
from collections.abc import Callable

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoLaplaceApproximation
from pyro.optim import Adam
from sklearn.linear_model import BayesianRidge
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import LaplaceEvidence, Stop

Found = tuple[float, float, float]  # prior precision, variance of the noise, log evidence that is said
ROWS, COLUMNS = 120, 30


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(ROWS, COLUMNS, generator=generator)
    w = 0.5 * torch.randn(COLUMNS, generator=generator)
    return X, X @ w + torch.randn(ROWS, generator=generator)


def exact(X: Tensor, t: Tensor, precision: float, variance: float) -> float:
    """Log density of the targets under ``N(0, variance I + X X' / precision)``."""
    covariance = variance * torch.eye(len(t)) + X @ X.mT / precision
    return float(torch.distributions.MultivariateNormal(torch.zeros(len(t)), covariance).log_prob(t))


def model(X: Tensor, t: Tensor) -> None:
    alpha = pyro.param("alpha", torch.tensor(1.0), constraint=constraints.positive)
    variance = pyro.param("variance", torch.tensor(1.0), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(0.0, alpha**-0.5).expand([X.shape[1]]).to_event(1))
    with pyro.plate("rows", len(X)):
        pyro.sample("t", dist.Normal(X @ w, variance.sqrt()), obs=t)


def ours(X: Tensor, t: Tensor) -> Found:
    found = LaplaceEvidence(model, stop=Stop(progress=False)).run(X, t)
    return float(found.hyperparameters["alpha"]), float(found.hyperparameters["variance"]), float(found.log_evidence)


def autolaplace(X: Tensor, t: Tensor) -> Found:
    """Params by the joint density, 1,000 steps; no evidence is to be had."""
    pyro.clear_param_store()
    guide = AutoLaplaceApproximation(model)
    svi = SVI(model, guide, Adam({"lr": 0.02}), Trace_ELBO())
    for _ in range(1000):
        svi.step(X, t)
    found = float(pyro.param("alpha")), float(pyro.param("variance")), float("nan")
    pyro.clear_param_store()
    return found


def ridge(X: Tensor, t: Tensor) -> Found:
    """scikit-learn's, its weak gamma priors left out as far as it lets one."""
    flat = {"alpha_1": 0.0, "alpha_2": 0.0, "lambda_1": 0.0, "lambda_2": 0.0}
    found = BayesianRidge(fit_intercept=False, compute_score=True, tol=1e-8, max_iter=1000, **flat).fit(X, t)
    return float(found.lambda_), 1.0 / float(found.alpha_), float(found.scores_[-1])


def laplace_torch(X: Tensor, t: Tensor) -> Found:
    from laplace import Laplace

    net = torch.nn.Linear(COLUMNS, 1, bias=False)
    net.weight.data = torch.linalg.lstsq(X, t.unsqueeze(-1)).solution.mT.contiguous()
    found = Laplace(net, "regression", subset_of_weights="all", hessian_structure="full")
    found.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, t.unsqueeze(-1)), batch_size=ROWS))
    logs = torch.zeros(2, requires_grad=True)
    optimiser = torch.optim.Adam([logs], lr=0.1)
    for _ in range(200):
        optimiser.zero_grad()
        loss = -found.log_marginal_likelihood(logs[0].exp(), logs[1].exp())
        loss.backward()
        optimiser.step()
    return float(logs[0].exp()), float((2.0 * logs[1]).exp()), -float(loss)


PACKAGES: dict[str, Callable[[Tensor, Tensor], Found]] = {
    "`LaplaceEvidence`": ours,
    "scikit-learn `BayesianRidge`": ridge,
    "laplace-torch": laplace_torch,
    "Pyro `AutoLaplaceApproximation`": autolaplace,
}


def best(X: Tensor, t: Tensor) -> float:
    """The highest exact evidence, on a grid of both values and a finer one about its best."""
    middle, width, height = (1.0, 1.0), 30.0, 0.0
    for _ in range(3):
        grids = [np.geomspace(x / width, x * width, 81) for x in middle]
        heights = on_grid(X, t, *(torch.as_tensor(g) for g in grids))
        i, j = divmod(int(heights.argmax()), 81)
        middle, width, height = (grids[0][i], grids[1][j]), width**0.1, float(heights.max())
    return height


def on_grid(X: Tensor, t: Tensor, precisions: Tensor, variances: Tensor) -> Tensor:
    """The exact evidence at all pairs, nats, by the eigenvalues of the covariance."""
    U, s, _ = torch.linalg.svd(X, full_matrices=True)
    squares, lengths = (U.mT @ t).square(), torch.cat([s.square(), torch.zeros(len(t) - len(s))])
    spread = variances.reshape(1, -1, 1) + lengths / precisions.reshape(-1, 1, 1)
    return -0.5 * (squares / spread + (2.0 * torch.pi * spread).log()).sum(-1)


def row(name: str, run: Callable[[Tensor, Tensor], Found], X: Tensor, t: Tensor, highest: float) -> str:
    seconds: list[float] = []
    while not seconds or (len(seconds) < 3 and seconds[0] < 1.0):
        start = time.process_time()
        alpha, variance, said = run(X, t)
        seconds.append(time.process_time() - start)
    truth = exact(X, t, alpha, variance)
    shown = "none" if said != said else f"{said:.3f} | {said - truth:+.3f}"
    shown = shown if "|" in shown else f"{shown} |  "
    return f"| {name} | {alpha:.3f} | {variance:.3f} | {shown} | {highest - truth:.3f} | {min(seconds):.3f} |"


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    X, t = data()
    highest = best(X, t)
    print("| package | prior precision | noise variance | log evidence said | its error | below the best | seconds |")
    print("|---|---|---|---|---|---|---|")
    for name, run in PACKAGES.items():
        try:
            print(row(name, run, X, t, highest), flush=True)
        except ImportError:
            continue


if __name__ == "__main__":
    main()
