"""How well a small network under the evidence predicts, beside scikit-learn's MLPRegressor chosen by cross-validation.

    OMP_NUM_THREADS=1 python benchmarks/mlp_quality.py [DATA ...]

Ours: five hidden units, four starts, no validation.  Theirs: weight decay and size by five-fold cross-validation, noise
variance from cross-validated residuals.  Train on 300 rows, test on the rest (of the made ones 1,000); inputs and
targets in units of the training rows' standard deviation.  RMSE, and mean negative log predictive density in nats.
"""

import argparse
import math
import warnings
from collections.abc import Callable
from time import process_time

import numpy as np
import torch
from sklearn import datasets
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.neural_network import MLPRegressor

from pyro_evidence import LaplaceEvidence, Start, Stop, gauss_newton
from pyro_evidence.compare import linearised
from pyro_evidence.models.mlp import MLP

Array = np.ndarray
Predicted = tuple[Array, Array]  # means and variances of new targets
NUM = 300
GRID = {"alpha": [1e-4, 1e-2, 1.0], "hidden_layer_sizes": [(5,), (20,)]}

DATA: dict[str, Callable[[], tuple[Array, Array]]] = {
    "diabetes": lambda: datasets.load_diabetes(return_X_y=True),
    "Friedman 1": lambda: datasets.make_friedman1(NUM + 1000, noise=1.0, random_state=0),
    "Friedman 2": lambda: datasets.make_friedman2(NUM + 1000, noise=100.0, random_state=0),
    "Friedman 3": lambda: datasets.make_friedman3(NUM + 1000, noise=0.1, random_state=0),
    "sparse uncorrelated": lambda: datasets.make_sparse_uncorrelated(NUM + 1000, random_state=0),
}


def ours(X: Array, t: Array, new: Array) -> tuple[Predicted, str]:
    stop = Stop(progress=False, throw=False)
    engine = LaplaceEvidence(MLP(X.shape[1], 5), curvature=gauss_newton, start=Start(restarts=4), stop=stop)
    posterior = engine.run(torch.as_tensor(X), torch.as_tensor(t))
    mean, variance = (x[:, 0] for x in linearised(posterior, torch.as_tensor(new)))
    noise = 1.0 / posterior.hyperparameters["beta"]
    return (mean.numpy(), (variance + noise).numpy()), posterior.status.split(":")[0]


def network(X: Array, t: Array, new: Array) -> tuple[Predicted, str]:
    search = GridSearchCV(MLPRegressor(solver="lbfgs", max_iter=2000, random_state=0), GRID, cv=5).fit(X, t)
    residual = t - cross_val_predict(search.best_estimator_, X, t, cv=5)
    return (search.predict(new), np.full(len(new), residual.var())), str(search.best_params_)


def process(X: Array, t: Array, new: Array) -> tuple[Predicted, str]:
    kernel = ConstantKernel(1.0) * RBF(np.ones(X.shape[1])) + WhiteKernel(0.1)
    mean, sd = GaussianProcessRegressor(kernel).fit(X, t).predict(new, return_std=True)
    return (mean, sd**2), ""


def row(name: str) -> str:
    X, t = DATA[name]()
    order = np.random.default_rng(0).permutation(len(X))
    X, t = X[order], t[order]
    X, t = ((v - v[:NUM].mean(0)) / v[:NUM].std(0) for v in (X, t))
    cells = [name]
    for method in (ours, network, process):
        start = process_time()
        (mean, variance), note = method(X[:NUM], t[:NUM], X[NUM:])
        seconds, error = process_time() - start, t[NUM:] - mean
        density = 0.5 * (error**2 / variance + np.log(math.tau * variance)).mean()
        cells.append(f"{math.sqrt((error**2).mean()):.4f}, {density:.3f}, {seconds:.1f} s {note}".strip())
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="*", default=list(DATA))
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    print("| data | ours: RMSE, NLPD, CPU s | MLPRegressor by cross-validation | Gaussian process |\n|---|---|---|---|")
    for name in parser.parse_args().data:
        print(row(name), flush=True)


if __name__ == "__main__":
    main()
