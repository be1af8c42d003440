"""Packages that exclude those of the other tests, in an environment of their own: ``make neighbours``.

ArviZ 1.x reads fits of this package and of Pyro itself: the same numbers, and its own leave-one-out.
"""

from typing import Any

import arviz_base
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from arviz_stats import loo
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal
from pyro.optim import Adam
from torch import Tensor

from pyro_evidence import LaplaceEvidence, to_datatree

torch.set_default_dtype(torch.float64)


def line(X: Tensor, y: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(60, 2, generator=generator)
    return X, X @ torch.tensor([1.0, -0.5]) + 0.5 * torch.randn(60, generator=generator)


def by_nuts(X: Tensor, y: Tensor) -> Any:
    mcmc = MCMC(NUTS(line), num_samples=400, warmup_steps=200, disable_progbar=True)
    mcmc.run(X, y)
    return mcmc


def by_svi(X: Tensor, y: Tensor) -> Any:
    svi = SVI(line, AutoMultivariateNormal(line), Adam({"lr": 0.02}), Trace_ELBO(num_particles=4))
    for _ in range(600):
        svi.step(X, y)
    return svi


def by_predictive(X: Tensor, y: Tensor) -> Any:
    return Predictive(line, guide=by_svi(X, y).guide, num_samples=1)


def by_laplace(X: Tensor, y: Tensor) -> Any:
    return LaplaceEvidence(line, maximise=()).run(X, y)


@pytest.mark.parametrize("made", [by_nuts, by_svi, by_predictive, by_laplace])
def test_a_fit_is_read_by_arviz_base(made: Any) -> None:
    """Leave-one-out is known exactly: each datum left out in turn, on paper."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    X, y = data()
    tree = to_datatree(made(X, y), X, y, num_samples=2000)
    assert {"posterior", "posterior_predictive", "log_likelihood", "observed_data", "prior"} <= set(tree.children)
    w = torch.as_tensor(arviz_base.extract(tree, var_names="w").values).T
    np.testing.assert_array_equal(tree["observed_data"]["y"], y)
    covariance = torch.linalg.inv(torch.eye(2) + 4.0 * X.T @ X)
    torch.testing.assert_close(w.mean(0), 4.0 * covariance @ X.T @ y, rtol=0.0, atol=0.03)
    exact = 0.0
    for i in range(len(X)):
        rest = torch.arange(len(X)) != i
        covariance = torch.linalg.inv(torch.eye(2) + 4.0 * X[rest].T @ X[rest])
        mean = 4.0 * X[i] @ covariance @ X[rest].T @ y[rest]
        exact += float(dist.Normal(mean, (0.25 + X[i] @ covariance @ X[i]).sqrt()).log_prob(y[i]))
    assert float(loo(tree).elpd) == pytest.approx(exact, abs=0.5)
