"""One posterior, one evidence: every check agrees with every other, whatever kind of precision the posterior has."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import (
    REVM,
    RVM,
    LaplaceEvidence,
    Start,
    block_diagonal,
    bridge_sampling,
    compare_evidence,
    diagonal,
    find_modes,
    importance_sampling,
)
from pyro_evidence.laplace.tour import NormalMixture
from pyro_evidence.models.gp import gp_classifier, gp_regression
from pyro_evidence.models.kernels import RBF, Matern52
from pyro_evidence.posterior.guide import CoordinateDistribution
from pyro_evidence.precision.dense import Dense, Diagonal, Precision

Fitted = Callable[[], Any]


def inputs(num: int = 40, dims: int = 1) -> Tensor:
    return 2.0 * torch.randn(num, dims, generator=torch.Generator().manual_seed(0))


def wave(X: Tensor) -> Tensor:
    return torch.sin(2.0 * X[:, 0]) + 0.2 * torch.randn(len(X), generator=torch.Generator().manual_seed(1))


def by_hand(X: Tensor, t: Tensor | None = None) -> None:
    scale = pyro.param("scale", torch.tensor(1.0), constraint=constraints.positive)
    K = scale.square() * (-0.5 * torch.cdist(X, X).square()).exp() + 1e-4 * torch.eye(len(X))
    f = pyro.sample("f", dist.MultivariateNormal(X.new_zeros(len(X)), K))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(f, 0.3), obs=t)


def weights(X: Tensor, t: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=X @ w + b), obs=t)


def counts(X: Tensor, t: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 0.5).expand([X.shape[1]]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Poisson((X @ w).exp()), obs=t)


def relevant(X: Tensor, t: Tensor | None = None) -> None:
    alpha = pyro.param("alpha", torch.ones(X.shape[1]), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(0.0, alpha.rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(X @ w, 0.5), obs=t)


WIDE = inputs(60, 4)
LABELS = (WIDE[:, 0] + 0.5 * inputs(60)[:, 0] > 0.0).to(torch.float64)
KINDS: dict[str, Fitted] = {
    "process by formula": lambda: LaplaceEvidence(gp_regression(RBF())).run(inputs(), wave(inputs())),
    "process by hand": lambda: LaplaceEvidence(by_hand).run(inputs(), wave(inputs())),
    "process classes": lambda: LaplaceEvidence(gp_classifier(Matern52())).run(
        inputs(), (wave(inputs()) > 0.0).to(torch.float64)
    ),
    "dense": lambda: LaplaceEvidence(weights).run(0.5 * WIDE, LABELS),
    "counts": lambda: LaplaceEvidence(counts).run(0.2 * WIDE, torch.arange(60.0) % 4),
    "diagonal": lambda: LaplaceEvidence(weights, curvature=diagonal).run(0.5 * WIDE, LABELS),
    "blocks of sites": lambda: LaplaceEvidence(weights, curvature=block_diagonal).run(0.5 * WIDE, LABELS),
    "pruned": lambda: LaplaceEvidence(relevant).run(WIDE, WIDE[:, 0] - WIDE[:, 1] + 0.5 * inputs(60)[:, 0]),
    "columns": lambda: RVM(relevant).run(WIDE, WIDE[:, 0] - WIDE[:, 1] + 0.5 * inputs(60)[:, 0]),
    "axes": lambda: REVM(relevant).run(WIDE, WIDE[:, 0] - WIDE[:, 1] + 0.5 * inputs(60)[:, 0]),
}
EXACT = {"process by formula", "process by hand", "pruned", "columns", "axes"}


@cache
def fitted(kind: str) -> Any:
    return KINDS[kind]()


@pytest.mark.parametrize("kind", KINDS)
def test_checks_agree(kind: str) -> None:  # law
    posterior = fitted(kind)
    found = posterior.diagnostics()
    sampled = importance_sampling(posterior, num_samples=4_000, seed=1)
    error = math.hypot(sampled.standard_error, found["log_evidence_importance_se"])
    assert sampled.log_evidence == pytest.approx(found["log_evidence_importance"], abs=4.0 * error + 1e-6)
    modes = find_modes(posterior, start=Start(restarts=2), labels={})
    several = importance_sampling(modes, num_samples=4_000, seed=2)
    error = math.hypot(sampled.standard_error, several.standard_error)
    assert several.log_evidence == pytest.approx(sampled.log_evidence, abs=4.0 * error + 1e-6)
    both = compare_evidence(one=posterior, other=posterior)
    assert both.probabilities == pytest.approx({"one": 0.5, "other": 0.5})


@pytest.mark.parametrize("kind", sorted(EXACT))
def test_an_exact_evidence_is_that_of_every_check(kind: str) -> None:  # oracle: the evidence itself
    posterior = fitted(kind)
    exact = float(posterior.log_evidence)
    assert importance_sampling(posterior).log_evidence == pytest.approx(exact, abs=1e-6)
    assert posterior.diagnostics()["log_evidence_importance"] == pytest.approx(exact, abs=1e-6)
    if kind in {"process by hand", "pruned"}:
        samples = {n: v.reshape(4, -1, *v.shape[1:]) for n, v in posterior.get_samples(4000, seed=0).items()}
        assert bridge_sampling(posterior, samples).log_evidence == pytest.approx(exact, abs=0.05)


def precisions() -> dict[str, Precision]:
    B = torch.randn(5, 5, generator=torch.Generator().manual_seed(2))
    A = B @ B.T + torch.eye(5)
    dense = Dense(torch.linalg.cholesky(A).unsqueeze(0))
    process = fitted("process by hand").state.precision
    return {"dense": dense, "diagonal": Diagonal(A.diagonal().unsqueeze(0)), "process": process}


@pytest.mark.parametrize("kind", ["dense", "diagonal", "process"])
def test_whitening_takes_colouring_back(kind: str) -> None:  # law
    precision = precisions()[kind]
    white = torch.randn(7, precision.variance.shape[-1], generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(precision.whiten(precision.unwhiten(white)), white, rtol=1e-6, atol=1e-6)


def test_a_normal_by_its_precision_is_the_one_by_its_covariance() -> None:  # oracle: torch
    precision = precisions()["dense"]
    loc, active = torch.arange(5.0), torch.ones(5, dtype=torch.bool)
    normal = CoordinateDistribution(NormalMixture(torch.zeros(1), loc.unsqueeze(0), (precision,), active))
    expected = torch.distributions.MultivariateNormal(loc, precision.log_det_gradient[0])
    x = torch.randn(2, 3, 5)
    torch.testing.assert_close(normal.log_prob(x), expected.log_prob(x))
    torch.manual_seed(0)
    draws = normal.sample((4000,))
    torch.testing.assert_close(torch.cov(draws.mT), expected.covariance_matrix, rtol=0.15, atol=0.05)
    assert normal.expand([3]).sample((2,)).shape == (2, 3, 5)
