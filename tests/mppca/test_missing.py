"""Sums, slopes and curvature of data with gaps against dense Gaussians of what was seen."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import hessian, jacobian
from torch.distributions import MultivariateNormal

from pyro_evidence.mixture.updates import SharedParameters
from pyro_evidence.mppca import curvature as mppca_curvature
from pyro_evidence.mppca import expectation as mppca_expectation
from pyro_evidence.mppca.data import Observations
from pyro_evidence.mppca.expectation import FactorAnalysers
from pyro_evidence.mppca.updates import Iterate, MPPCAUpdate, no_gamma
from tests.mppca.test_expectation import K, M, analysers, blobs, near, ties


def gappy(num: int = 30) -> Tensor:
    """A third is missing; one datum wholly."""
    Y, generator = blobs(num), torch.Generator().manual_seed(5)
    Y[torch.rand(Y.shape, generator=generator) < 0.3] = torch.nan
    Y[3] = torch.nan
    return Y


def dense_log_joint(Y: Tensor, at: FactorAnalysers, W: Tensor) -> Tensor:
    """``log p(what was seen of D, W)``, datum by datum."""
    C = W @ W.mT + at.beta[0].reciprocal().diag_embed()
    total = -0.5 * (at.alpha[0].unsqueeze(-2) * W.square()).sum()
    for y in Y:
        seen = (~y.isnan()).nonzero().flatten()
        table = [
            MultivariateNormal(at.mu[0, k, seen], C[k][seen][:, seen]).log_prob(y[seen])
            if len(seen)
            else torch.zeros(())
            for k in range(K)
        ]
        total = total + (torch.stack(table) + at.log_mixing[0]).logsumexp(0)
    return total


@pytest.mark.parametrize("diagonal", [False, True])
def test_slope_and_curvature_are_those_of_what_was_seen(diagonal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slope comes from the sums of the E-step, by Fisher's identity: with it all of them are right."""
    monkeypatch.setattr(mppca_expectation, "LATENT_BLOCK", 7 * K * M)
    Y = gappy(12)
    at = analysers(Y.nan_to_num(0.0), diagonal=diagonal)

    def f(w: Tensor) -> Tensor:
        return dense_log_joint(Y, at, w.reshape(at.W.shape[1:]))

    stats = mppca_expectation.e_step(Y, at)
    norm = 0.5 * M * (at.alpha / math.tau).log().sum()
    near(stats.log_likelihood[0] + mppca_expectation.log_prior(at)[0] - norm, f(at.W[0]))
    near(mppca_curvature.loading_slope(at, stats).flatten(), jacobian(f, at.W.flatten()))
    near(mppca_curvature.loading_precision(Observations.resident(Y), at), -hessian(f, at.W.flatten()))
    assert mppca_curvature.full_size(Observations.resident(Y)) < mppca_curvature.FULL_SIZE


def test_sums_of_whole_data_are_the_same_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    Y = blobs()
    at = analysers(Y, diagonal=True, rows=2)
    whole = mppca_expectation.e_step(Y, at)
    monkeypatch.setattr(mppca_expectation, "has_gaps", lambda _: True)
    for name, value in vars(mppca_expectation.e_step(Y, at)).items():
        near(value, getattr(whole, name))


def test_restarts_are_a_batch_with_gaps_too() -> None:
    Y = gappy()
    many = analysers(Y.nan_to_num(0.0), rows=3)
    batch = mppca_expectation.e_step(Y, many)
    for row in range(3):
        single = mppca_expectation.e_step(Y, many[torch.tensor([row])])
        for name, value in vars(single).items():
            near(value[0], getattr(batch, name)[row])


@pytest.mark.parametrize("diagonal", [False, True])
def test_penalised_likelihood_of_what_was_seen_never_falls(diagonal: bool) -> None:
    Y, alpha, before = gappy(60), 0.5, -math.inf
    at, tied = analysers(Y.nan_to_num(0.0), diagonal=diagonal, alpha=alpha), ties(free=True)
    if diagonal:
        tied = SharedParameters.of(tied.alpha_group, torch.arange(K * M).reshape(K, M))
    for _ in range(40):
        it = Iterate(at, tied, mppca_expectation.e_step(Y, at), torch.ones(M))
        value = float(it.stats.log_likelihood - 0.5 * alpha * at.W.square().sum())
        assert value >= before - 1e-10 * abs(value)
        before, at = value, MPPCAUpdate(no_gamma, alpha=alpha)(it)
