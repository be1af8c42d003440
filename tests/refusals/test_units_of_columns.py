"""The unit of a design's columns: no matter where a common factor changes nothing, else an error message."""

import re

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import REVM, RVM, VRVM, BadInput, LaplaceEvidence, Start

FACTORS = [1e-60, 1e-6, 1e12]


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(24, 3, generator=generator, dtype=torch.float64)
    return X, X.sum(-1) + torch.randn(24, generator=generator, dtype=torch.float64)


def weights(X: Tensor, one_each: bool) -> Tensor:
    start = X.new_ones(X.shape[-1]) if one_each else X.new_ones(())
    alpha = pyro.param("alpha", start, constraint=constraints.positive)
    return pyro.sample("w", dist.Normal(X.new_zeros(X.shape[-1]), alpha.rsqrt()).to_event(1))


def straight(X: Tensor, t: Tensor) -> None:
    beta = pyro.param("beta", X.new_ones(()), constraint=constraints.positive)
    pyro.sample("t", dist.Normal(X @ weights(X, False), beta.rsqrt()).to_event(1), obs=t)


def relevant(X: Tensor, t: Tensor) -> None:
    pyro.sample("t", dist.Normal(X @ weights(X, True), 1.0).to_event(1), obs=t)


def classes(X: Tensor, t: Tensor) -> None:
    pyro.sample("t", dist.Bernoulli(logits=X @ weights(X, True)).to_event(1), obs=(t > 0).double())


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("model", [straight, relevant, classes])
def test_a_common_factor_is_nothing_where_precisions_are_learned(model, factor) -> None:
    X, t = data()
    expected, found = (LaplaceEvidence(model).run(X * f, t) for f in (1.0, factor))
    torch.testing.assert_close(found.log_evidence, expected.log_evidence, rtol=1e-7, atol=1e-6)
    torch.testing.assert_close(found.mode["w"] * factor, expected.mode["w"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("factor", [1e-9, 1e9])
def test_a_factor_of_one_column_is_nothing_either(factor) -> None:
    X, t = data()
    found = LaplaceEvidence(relevant).run(X * torch.tensor([1.0, factor, 1.0]), t).log_evidence
    torch.testing.assert_close(found, LaplaceEvidence(relevant).run(X, t).log_evidence, rtol=1e-7, atol=1e-6)


def test_ordinary_columns_start_where_they_did() -> None:
    X, t = data()
    posterior = LaplaceEvidence(straight, start=Start(seed=3)).run(X, t)
    assert len(posterior.log_evidences) > 1
    expected = regression_evidence(X, t, torch.ones(()), torch.ones(()))
    torch.testing.assert_close(torch.tensor(posterior.log_evidences[0]), expected)


def regression_evidence(X: Tensor, t: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Oracle: the weights integrated on paper."""
    covariance = torch.eye(len(t), dtype=X.dtype) / beta + X @ X.mT / alpha
    return dist.MultivariateNormal(torch.zeros(len(t), dtype=X.dtype), covariance).log_prob(t)


@pytest.mark.parametrize("factor", [1e-20, 1e12, 1e30])
def test_a_prior_that_is_held_is_what_it_is(factor) -> None:  # oracle: quadrature in one dimension
    def held(x: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
        pyro.sample("t", dist.Normal(x * w, 1.0).to_event(1), obs=t)

    x, t = data()[0][:, 0], data()[1]
    found = LaplaceEvidence(held).run(x * factor).log_evidence
    precision = 1.0 + factor**2 * (x @ x)
    explained = 0.5 * (factor * (x @ t)) ** 2 / precision
    torch.testing.assert_close(found, dist.Normal(0.0, 1.0).log_prob(t).sum() + explained - 0.5 * precision.log())


@pytest.mark.parametrize("kind", [relevant, classes])
def test_the_variational_machine_feels_small_columns(kind) -> None:
    X, t = data()
    found, expected = (VRVM(kind).run(f * X, t) for f in (1e-9, 1.0))
    torch.testing.assert_close(found.log_evidence, expected.log_evidence, rtol=0.0, atol=1e-2)  # of its Gamma priors
    torch.testing.assert_close(found.mode["w"] * 1e-9, expected.mode["w"], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("model", [relevant, classes])
def test_eigenvectors_in_columns_that_the_ridge_outweighs(model) -> None:
    X, t = data()
    with pytest.raises(BadInput, match=r"on no axis do the data say a thousandth of ridge=0\.01") as error:
        REVM(model).run(X * 1e-8, t)
    factor, ridge = (float(n) for n in re.findall(r"by (\S+), or pass ridge=(\S+)\.$", str(error.value))[0])
    assert REVM(model).run(X * 1e-8 * factor, t).num_active > 0  # the advice works, both ways
    assert REVM(model, ridge=ridge).run(X * 1e-8, t).num_active > 0


@pytest.mark.parametrize("engine", [RVM, VRVM, REVM])
def test_targets_that_are_an_offset_and_little_else(engine) -> None:
    X, t = data()
    message = (
        r"site 't' has values about 1e\+06 .* no combination of the model's weights is a constant.* column of ones"
    )
    with pytest.raises(BadInput, match=message):
        engine(relevant).run(X, t - t.mean() + 1e6)
    wide = torch.cat([X, torch.ones(24, 1, dtype=X.dtype)], -1)
    if engine is not REVM:  # whose ridge holds a bias back, and says so
        engine(relevant).run(wide, t + 1e6)  # the advice works, both ways
    engine(relevant).run(X, t + 1e6 - (t + 1e6).mean())
