"""Components and columns left out because the evidence is higher without them."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from pyro_evidence.fitting.em import GreedyDeletion, advance, repeated, warmed
from pyro_evidence.mixture.updates import BoundedInflation, SharedParameters
from pyro_evidence.mppca import expectation as kernels
from pyro_evidence.mppca import fit as mppca_fit
from pyro_evidence.mppca.data import Observations
from pyro_evidence.mppca.expectation import FactorAnalysers
from tests.mppca.test_fit import planes

RULE = mppca_fit.rule_of(BoundedInflation())


def standard(num: int = 200) -> Tensor:
    Y = planes(num)
    Y = Y - Y.mean(0)
    return Y / Y.var(0, correction=0).mean().sqrt()


def settled(Y: Tensor, K: int, q: int, *, columnwise: bool, restarts: int = 1) -> mppca_fit.MPPCARestarts:
    """After 60 rounds, nothing deleted; centres among the data of both planes in turn."""
    m, on = Y.shape[1], torch.ones(restarts, K, q, dtype=torch.bool)
    group = torch.arange(K * q).reshape(K, q) if columnwise else torch.arange(K)[:, None].expand(K, q)
    ties = SharedParameters.of(group, torch.arange(K)[:, None].expand(K, m))
    generator = torch.Generator().manual_seed(0)
    W = 0.1 * torch.randn(restarts, K, m, q, generator=generator)
    mu = torch.stack([Y[r : r + K] for r in range(restarts)])
    flat = torch.full((restarts, K), -math.log(K))
    at = FactorAnalysers(W, mu, torch.ones(restarts, K, m), flat, 0.01 * on, on)
    variance = 0.01 * torch.ones(m)
    return repeated(warmed(mppca_fit.first(Observations.resident(Y), at, ties, variance, RULE), 10), 60)


def test_components_that_the_data_do_not_need_are_deleted() -> None:
    before = settled(standard(), 5, 2, columnwise=False)
    after = GreedyDeletion(num_steps=25)(before)
    assert int(before.it.analysers.active.sum()) > 2 and int(after.it.analysers.active.sum()) == 2
    assert float(after.occam[0]) > float(before.occam[0])


def test_columns_that_the_data_do_not_need_are_deleted() -> None:
    """Two short columns beside the two that the planes have."""
    done = settled(standard(), 2, 2, columnwise=True)
    at, spare = done.it.analysers, torch.zeros(1, 2, 2, dtype=torch.bool)
    noise = 0.02 * torch.randn(1, 2, 5, 2, generator=torch.Generator().manual_seed(0))
    wide = replace(
        at,
        W=torch.cat([at.W, noise], -1),
        alpha=torch.cat([at.alpha, 50.0 + 0.0 * spare], -1),
        columns=torch.cat([at.columns, ~spare], -1),
    )
    ties = SharedParameters.of(torch.arange(8).reshape(2, 4), done.it.ties.beta_group)
    before = mppca_fit.first(done.data, wide, ties, done.it.variance, RULE)
    after = GreedyDeletion(num_steps=25)(before)
    assert after.it.analysers.columns[0].sum(-1).tolist() == [2, 2]
    assert float(after.occam[0]) > float(before.occam[0])


def test_nothing_is_deleted_where_the_evidence_falls() -> None:
    before = settled(standard(), 2, 2, columnwise=True)
    after = GreedyDeletion(num_steps=25)(before)
    assert after is before and int(after.it.analysers.active.sum()) == 2


def test_candidates_are_every_component_and_the_shortest_column_of_each() -> None:
    batch = settled(standard(), 3, 2, columnwise=True)
    at = batch.it.analysers
    tried, owner = batch.candidates(torch.tensor([True]), GreedyDeletion())
    keep, columns = tried.parameters.active, tried.parameters.columns
    num = int(at.active.sum())
    assert len(keep) == len(owner) == num + int((at.columns[0].any(-1) & at.active[0]).sum())
    norms = torch.where(at.columns[0], at.W[0].square().sum(-2), torch.inf)
    for k, one in zip(at.active[0].nonzero().flatten().tolist(), columns[num:], strict=True):
        assert not one[k, norms[k].argmin()] and int((at.columns[0] & ~one).sum()) == 1


def test_a_fixed_mixing_keeps_its_components() -> None:
    batch = settled(standard(), 5, 2, columnwise=False)
    held = replace(batch.it.ties, mixing_free=False)
    fixed = mppca_fit.first(batch.data, batch.it.analysers, held, batch.it.variance, RULE)
    assert GreedyDeletion(num_steps=5)(fixed) is fixed


def test_restarts_as_a_batch_end_where_single_ones_do() -> None:
    Y = standard(90)
    many = settled(Y, 3, 2, columnwise=False, restarts=3)
    for row in range(3):
        one = many.selected(torch.tensor([row]))
        torch.testing.assert_close(one.log_evidence[0], many.log_evidence[row], rtol=1e-9, atol=1e-9)
        alone, stats = one.it.analysers, kernels.e_step(Y, one.it.analysers)
        torch.testing.assert_close(stats.log_likelihood, many.it.stats.log_likelihood[row : row + 1])
        stepped, batched = advance(one), advance(many)
        torch.testing.assert_close(stepped.it.analysers.W[0], batched.it.analysers.W[row], rtol=1e-8, atol=1e-8)
        assert alone.W.shape[0] == 1
