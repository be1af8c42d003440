"""Kernels of mixtures of probabilistic PCA against NumPy, autograd and importance sampling."""

import math
from dataclasses import replace
from statistics import mean

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import hessian, jacobian
from torch.distributions import MultivariateNormal

from benchmarks.papers.mppca_evidence import exact_curvature, gaps, one_kernel, sampled_log_evidence
from pyro_evidence.mixture.updates import SharedParameters
from pyro_evidence.mppca import curvature as mppca_curvature
from pyro_evidence.mppca import evidence as mppca_evidence
from pyro_evidence.mppca import expectation as mppca_expectation
from pyro_evidence.mppca import orbit as mppca_orbit
from pyro_evidence.mppca import start as mppca_start
from pyro_evidence.mppca.data import Observations
from pyro_evidence.mppca.expectation import FactorAnalysers
from pyro_evidence.mppca.updates import (
    Iterate,
    MPPCAUpdate,
    best_within_span,
    literal_gamma,
    no_gamma,
    orbit_gamma,
)
from tests.oracles import mppca as oracle

K, M, Q = 3, 6, 2


def near(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def blobs(num: int = 120, m: int = M) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    centre = 4.0 * torch.randn(K, m, generator=generator)
    turn = torch.randn(m, m, generator=generator) / math.sqrt(m)
    return centre[torch.arange(num) % K] + torch.randn(num, m, generator=generator) @ turn


def analysers(Y: Tensor, *, diagonal: bool = False, rows: int = 1, alpha: float = 0.7) -> FactorAnalysers:
    generator = torch.Generator().manual_seed(1)
    m = Y.shape[1]
    W = torch.randn(rows, K, m, Q, generator=generator)
    beta = 0.5 + torch.rand(rows, K, m if diagonal else 1, generator=generator)
    log_mixing = torch.rand(rows, K, generator=generator).log_softmax(-1)
    on = torch.ones(rows, K, Q, dtype=torch.bool)
    return FactorAnalysers(
        W, Y[:K].expand(rows, K, m).clone(), beta.expand(rows, K, m).clone(), log_mixing, alpha * on.double(), on
    )


def ties(*, free: bool, m: int = M, columnwise: bool = False) -> SharedParameters:
    alpha = torch.arange(K * Q).reshape(K, Q) if columnwise else torch.arange(K)[:, None].expand(K, Q)
    return SharedParameters.of(alpha, torch.arange(K)[:, None].expand(K, m), free=free)


def iterate_at(Y: Tensor, at: FactorAnalysers, tied: SharedParameters) -> Iterate:
    return Iterate(at, tied, mppca_expectation.e_step(Y, at), torch.ones(Y.shape[1]))


def dense_log_joint(Y: Tensor, at: FactorAnalysers) -> Tensor:
    """``log p(D, W)`` by full covariances, first row."""
    C = at.W[0] @ at.W[0].mT + at.beta[0].reciprocal().diag_embed()
    table = MultivariateNormal(at.mu[0], C, validate_args=False).log_prob(Y[:, None]) + at.log_mixing[0]
    norm = at.W.shape[-2] * (at.alpha[0] / math.tau).log()
    return table.logsumexp(-1).sum() + 0.5 * (norm - at.alpha[0] * at.W[0].square().sum(-2)).sum()


@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_fifty_rounds_are_tipping_and_bishops(alpha: float) -> None:
    Y = blobs()
    at = analysers(Y)
    params = (at.log_mixing[0].exp(), at.mu[0], at.W[0], at.beta[0, :, 0].reciprocal())
    theirs: oracle.Params = tuple(x.numpy() for x in params)  # type: ignore[assignment]
    rule = MPPCAUpdate(no_gamma, alpha=alpha)
    for _ in range(50):
        near(mppca_expectation.e_step(Y, at).log_likelihood[0], torch.tensor(oracle.log_likelihood(Y.numpy(), theirs)))
        at, theirs = rule(iterate_at(Y, at, ties(free=True))), oracle.em_step(Y.numpy(), theirs, alpha)
    found = (at.log_mixing[0].exp(), at.mu[0], at.W[0], at.beta[0, :, 0].reciprocal())
    for actual, expected in zip(found, theirs, strict=True):
        near(actual, torch.tensor(expected))


@pytest.mark.parametrize("alpha", [0.1, 10.0, 1000.0])
@pytest.mark.parametrize("diagonal", [False, True])
def test_penalised_likelihood_never_falls(alpha: float, diagonal: bool) -> None:
    Y = blobs()
    at, tied = analysers(Y, diagonal=diagonal, alpha=alpha), ties(free=True)
    if diagonal:
        tied = SharedParameters.of(tied.alpha_group, torch.arange(K * M).reshape(K, M))
    before = -math.inf
    for _ in range(60):
        it = iterate_at(Y, at, tied)
        value = float(it.stats.log_likelihood - 0.5 * alpha * at.W.square().sum())
        assert value >= before - 1e-10 * abs(value)
        before, at = value, MPPCAUpdate(no_gamma, alpha=alpha)(it)


def test_fixed_point_is_a_maximum_of_the_penalised_likelihood() -> None:
    Y = blobs(60)
    at = analysers(Y)
    for _ in range(1000):
        at = MPPCAUpdate(no_gamma, alpha=0.7)(iterate_at(Y, at, ties(free=True)))
    leaves = [x.clone().requires_grad_() for x in (at.W, at.mu, at.beta[..., :1], at.log_mixing)]
    W, mu, beta, logits = leaves
    free = FactorAnalysers(W, mu, beta.expand_as(at.beta), logits.log_softmax(-1), at.alpha, at.columns)
    for slope in torch.autograd.grad(dense_log_joint(Y, free), leaves):
        assert float(slope.abs().max()) < 1e-9


@pytest.mark.parametrize("diagonal", [False, True])
def test_slope_and_curvature_are_those_of_autograd(diagonal: bool) -> None:
    Y = blobs(40)
    at = analysers(Y, diagonal=diagonal)

    def f(w: Tensor) -> Tensor:
        return dense_log_joint(
            Y, FactorAnalysers(w.reshape(at.W.shape), at.mu, at.beta, at.log_mixing, at.alpha, at.columns)
        )

    near(mppca_curvature.loading_slope(at, mppca_expectation.e_step(Y, at)).flatten(), jacobian(f, at.W.flatten()))
    near(mppca_curvature.loading_precision(Observations.resident(Y), at), -hessian(f, at.W.flatten()))


def test_newton_polishes_a_mode_to_rounding() -> None:
    """Quasi-Newton's search leaves slopes of 1e-4 nats per standard deviation of a loading."""
    Y = blobs()
    found = mppca_curvature.find_mode(Observations.resident(Y), analysers(Y))
    slope = mppca_curvature.loading_slope(found, mppca_expectation.e_step(Y, found))
    split = mppca_curvature.gauge(mppca_curvature.loading_precision(Observations.resident(Y), found), found)
    promised = slope.flatten() @ torch.cholesky_solve(slope.reshape(-1, 1), split.tril).flatten()
    assert float(promised) < 1e-12


def test_statistics_of_two_shards_add_up() -> None:
    Y = blobs()
    at = analysers(Y, diagonal=True)
    whole, parts = (
        mppca_expectation.e_step(Y, at),
        mppca_expectation.e_step(Y[:50], at) + mppca_expectation.e_step(Y[50:], at),
    )
    for name, value in vars(whole).items():
        near(getattr(parts, name), value)


def test_blocks_of_data_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: all data in one product; blocks of 48, and a shorter last one, share their memory."""
    Y = blobs()
    at = analysers(Y, rows=2)
    whole, table = mppca_expectation.e_step(Y, at), mppca_expectation.log_joint(Y, at)
    monkeypatch.setattr(mppca_expectation, "BLOCK", 48 * 2 * K * Q)
    assert mppca_expectation.rows_at_once(at) == 48
    near(mppca_expectation.log_joint(Y, at), table)
    for name, value in vars(mppca_expectation.e_step(Y, at)).items():
        near(value, getattr(whole, name))


def test_what_is_next_to_nothing_is_nothing() -> None:
    """Products of responsibilities far below rounding are subnormal numbers, which processors are slow at."""
    Y = 3.0 * blobs()
    at = analysers(Y)
    table = mppca_expectation.log_joint(Y, at)
    expected = (table - table.logsumexp(-1, keepdim=True)).exp()
    found = mppca_expectation.responsibilities(Y, at)
    near(found, expected)
    assert bool(((expected > 0) & (expected < 1e-100)).any()) and not bool(((found > 0) & (found < 1e-100)).any())


def test_a_batch_of_restarts_is_a_loop() -> None:
    Y = blobs()
    many, tied = analysers(Y, rows=3), ties(free=True)
    rule = MPPCAUpdate(orbit_gamma, rho=0.05)
    batch = rule(iterate_at(Y, many, tied))
    for row in range(3):
        one = FactorAnalysers(*(getattr(many, n)[row : row + 1] for n in many.__dataclass_fields__))
        single = rule(iterate_at(Y, one, tied))
        for name in ("W", "mu", "beta", "alpha", "log_mixing"):
            near(getattr(batch, name)[row], getattr(single, name)[0])


def test_nothing_is_lost_with_the_origin_or_the_order() -> None:
    Y = blobs()
    at, tied = analysers(Y), ties(free=True)
    order = torch.tensor([2, 0, 1])
    moved = FactorAnalysers(
        at.W[:, order],
        at.mu[:, order] + 5.0,
        at.beta[:, order],
        at.log_mixing[:, order],
        at.alpha[:, order],
        at.columns[:, order],
    )
    rule = MPPCAUpdate(literal_gamma)
    one, other = rule(iterate_at(Y, at, tied)), rule(iterate_at(Y + 5.0, moved, tied))
    near(other.W, one.W[:, order])
    near(other.mu, one.mu[:, order] + 5.0)
    near(other.alpha, one.alpha[:, order])


def test_literal_gamma_counts_the_rotations_and_the_other_does_not() -> None:
    Y = blobs(3000)
    at, tied = analysers(Y), ties(free=False)
    for _ in range(300):
        at = MPPCAUpdate(no_gamma, alpha=0.7)(iterate_at(Y, at, tied))
    it = iterate_at(Y, at, tied)
    near((it.literal_gamma * M).sum((-2, -1)), torch.full((1, K), 1.0 * M * Q), 1e-2)
    near((it.gamma * M).sum((-2, -1)), torch.full((1, K), M * Q - 1.0), 1e-2)


# -- the evidence ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("q", "volume"), [(1, 2.0), (2, 4.0 * math.pi), (3, 16.0 * math.pi**2)])
def test_volume_of_the_rotations(q: int, volume: float) -> None:
    assert mppca_evidence.log_volume(q) == pytest.approx(math.log(volume))


@pytest.mark.parametrize("kappa", [0.0, 0.3, 3.0, 300.0])
def test_orbit_integral_of_two_columns(kappa: float) -> None:
    """Oracle: the trapezium rule over the angle; both reflections."""
    angle = torch.linspace(0.0, 2.0 * math.pi, 200_001)[:-1]
    expected = 2.0 * (2.0 * math.pi) * (-kappa * angle.sin().square()).exp().mean()
    pairs = torch.tensor([[[False, True], [False, False]]])
    actual = mppca_evidence.log_orbit(kappa * pairs.double(), pairs, torch.tensor([2]))
    near(actual, expected.log().reshape(1), 1e-8)


@pytest.mark.parametrize("scale", [0.0, 0.5, 5.0, 50.0])
def test_orbit_integral_of_three_columns(scale: float) -> None:
    """Oracle: uniform random rotations; exact at 0, near elsewhere."""
    alpha, square = scale * torch.tensor([0.0, 1.0, 2.5]), torch.tensor([4.0, 2.0, 1.0])
    generator = torch.Generator().manual_seed(0)
    Q_, R = torch.linalg.qr(torch.randn(400_000, 3, 3, generator=generator))
    turned = (
        alpha * (square.unsqueeze(-1) * (Q_ * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).square()).sum(-2)
    ).sum(-1)
    expected = (-0.5 * (turned - (alpha * square).sum())).exp().mean().log() + mppca_evidence.log_volume(3)
    kappa = 0.5 * (alpha[:, None] - alpha) * (square - square[:, None])
    pairs = torch.ones(3, 3, dtype=torch.bool).triu(1)
    actual = mppca_evidence.log_orbit(kappa[None], pairs[None], torch.tensor([3]))
    near(actual, expected.reshape(1), 0.15)


@pytest.mark.parametrize(("num", "error"), [(20, -0.35), (100, -0.09), (2000, -0.005)])
def test_orbit_evidence_is_right_up_to_one_over_n(num: int, error: float) -> None:
    """m = 3, q = 2, mean over eight sets of data: Laplace's own error depends on them, more so when they are few."""
    runs = [gaps(num, 3, 2, seed, num_samples=8000) for seed in range(8)]
    assert mean(r["orbit"] for r in runs) == pytest.approx(error, abs=0.05)
    assert mean(r["held"] for r in runs) == pytest.approx(error, abs=0.06)
    assert all(r["literal"] < -5.0 for r in runs)


def test_evidence_of_more_columns_and_of_one() -> None:
    for m, q, num in ((5, 3, 300), (3, 1, 300)):
        Y, it = one_kernel(num, m, q, seed=1)
        truth, se = sampled_log_evidence(Y, it, 20_000)
        assert exact_curvature(Y, it) == pytest.approx(truth, abs=4.0 * se + 0.12)
        values = torch.linalg.eigvalsh(mppca_curvature.loading_precision(Observations.resident(Y), it.analysers))
        assert int((values < 1e-6 * values[-1]).sum()) == q * (q - 1) // 2


def test_pruned_columns_and_components_leave_the_evidence_alone() -> None:
    Y, it = one_kernel(100, 4, 2, seed=2)
    W = torch.cat([it.analysers.W, torch.zeros(1, 1, 4, 1)], -1)
    W = torch.cat([W, torch.zeros_like(W)], 1)
    columns = torch.tensor([[[True, True, False], [True, True, True]]])
    wide = FactorAnalysers(
        W,
        it.analysers.mu.expand(1, 2, 4),
        it.analysers.beta.expand(1, 2, 4),
        torch.tensor([[0.0, -math.inf]]),
        torch.tensor([[[1.0, 1.0, 1e12], [3.0, 3.0, 3.0]]]),
        columns,
    )
    tied = SharedParameters.of(torch.zeros(2, 3).long(), torch.zeros(2, 4).long(), free=False)
    other = iterate_at(Y, wide, tied)
    near(mppca_evidence.orbit_log_evidence(other), mppca_evidence.orbit_log_evidence(it), 1e-9)
    both = []
    for each in (it, other):
        split = mppca_curvature.gauge(
            mppca_curvature.loading_precision(Observations.resident(Y), each.analysers), each.analysers
        )
        both.append(
            mppca_curvature.orbit_laplace(
                mppca_evidence.log_joint(each.analysers, each.stats)[0], split, each.analysers
            )
        )
    near(both[0], both[1], 1e-9)


# -- the start, and the way there --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dense", [512, 0])
def test_direct_step_is_tipping_and_bishops(dense: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: eigenvectors of full covariances; subspace iteration comes near them."""
    monkeypatch.setattr(mppca_start, "DENSE", dense)
    monkeypatch.setattr(mppca_start, "PASSES", 200)
    Y = blobs()
    at = analysers(Y, rows=2)
    found = mppca_start.direct(Observations.resident(Y), at)
    resp = mppca_expectation.log_joint(Y, at).softmax(-1)
    for row in range(2):
        mixing, mu, W, v = (torch.tensor(x) for x in oracle.direct(Y.numpy(), resp[row].numpy(), Q))
        near(found.log_mixing[row].exp(), mixing)
        near(found.mu[row], mu)
        near(found.W[row] @ found.W[row].mT, W @ W.mT, 1e-8)
        near(found.beta[row, :, 0].reciprocal(), v, 1e-8)


def test_the_best_within_the_span_is_faster_than_em_and_ends_where_it_ends() -> None:
    Y, ends = blobs(), []
    for prepare in (None, best_within_span):
        at, path = analysers(Y), []
        for _ in range(120):
            it = iterate_at(Y, at, ties(free=True))
            path.append(it.stats.log_likelihood - 0.35 * at.W.square().sum())
            at = MPPCAUpdate(no_gamma, alpha=0.7, prepare=prepare)(it)
        ends.append(torch.cat([x.reshape(1) for x in path]))
        assert float(ends[-1].diff().min()) > -1e-9
    assert bool((ends[1][3:10] > ends[0][3:10]).all())
    near(ends[0][-1], ends[1][-1], 1e-10)


def test_centres_are_data_and_far_apart() -> None:
    Y = blobs()
    found = mppca_start.spread_centres(Y, torch.rand(20, 3, generator=torch.Generator().manual_seed(0)))
    assert bool((torch.cdist(found.reshape(-1, M), Y).amin(-1) < 1e-6).all())
    assert float(torch.cdist(found, found).amax((-2, -1)).min()) > 4.0
    same = mppca_start.spread_centres(torch.ones(5, 2), torch.rand(2, 3))
    near(same, torch.ones(2, 3, 2))


def test_displacements_across_the_orbit_do_not_turn_the_mode() -> None:
    """``W' d`` has no antisymmetric part, and turning by an antisymmetric matrix is no displacement at all."""
    at = analysers(blobs())
    S = torch.tensor([[0.0, 1.0], [-1.0, 0.0]]) * torch.tensor([0.3, -1.2, 2.0])[:, None, None]
    near(mppca_orbit.across((at.W[0] @ S).reshape(1, -1), at), torch.zeros(1, K * M * Q))
    drawn = torch.randn(5, K * M * Q, generator=torch.Generator().manual_seed(3))
    left = at.W[0].mT @ mppca_orbit.across(drawn, at).reshape(5, K, M, Q)
    near(left, left.mT)


@pytest.mark.parametrize("second", [0.7, 4.0])
def test_turned_loadings_have_the_covariance_they_had(second: float) -> None:
    """Any rotation under one precision of both columns; under two, angles as the density exp(-kappa sin^2) has them."""
    at = analysers(blobs())
    at = replace(at, alpha=torch.tensor([0.7, second]).expand(1, K, Q))
    num = 4_000
    W = mppca_orbit.turned(at.W.expand(num, K, M, Q), at, torch.Generator().manual_seed(0))
    near(W @ W.mT, (at.W @ at.W.mT).expand(num, K, M, M))
    cosine = (W * at.W).sum(-2) / (W.norm(dim=-2) * at.W.norm(dim=-2))
    assert float(cosine.mean(0).abs().max()) < 0.08  # both signs as often
    kappa = mppca_evidence.held_by_prior(at.alpha[0], at.W[0].square().sum(-2))[:, 0, 1]
    Q_of = torch.linalg.lstsq(at.W.expand(num, K, M, Q), W).solution
    sine = Q_of[..., 0, 1].square().mean(0)  # E sin^2 of the angle
    angle = torch.linspace(-0.5 * math.pi, 0.5 * math.pi, 20_001)
    density = (-kappa.unsqueeze(-1) * angle.sin().square()).exp()
    near(sine, (density * angle.sin().square()).sum(-1) / density.sum(-1), 0.03)
