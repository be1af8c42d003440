"""What each update does at its fixed point."""

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise, permutations
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, Normal

from pyro_evidence import datasets
from pyro_evidence.mixture import evidence as mixture_evidence
from pyro_evidence.mixture import fit as mixture_fit
from pyro_evidence.mixture import mode as mixture_mode
from pyro_evidence.mixture.expectation import Mixture, MixtureData, e_step, mixture_data
from pyro_evidence.mixture.updates import (
    BoundedInflation,
    EStep,
    SharedParameters,
    Unregularised,
    Update,
    WeightDecay,
    corrected,
    estep,
    husmeier2000_update,
)
from tests.models_for_tests.mixture_cases import log_evidence

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
assert_approx = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-8)


def per_kernel(shape: tuple[int, int, int]) -> SharedParameters:
    """One alpha per kernel, one beta per kernel and output."""
    K, m, _ = shape
    ones = torch.ones(shape)
    alpha = torch.arange(K)[:, None, None].expand(shape)
    beta = torch.arange(K * m).reshape(K, m)
    return SharedParameters(alpha, ones, beta, ones[..., 0], ones.bool(), ones[..., 0].bool())


def ripley(label: int, num_components: int, num_restarts: int) -> tuple[MixtureData, Mixture, SharedParameters]:
    """Raw data of one class, kernels about its mean, as the paper starts them."""
    train = datasets.ripley_train()
    Y = train.X[train.t == label]
    torch.manual_seed(1)
    shape = (num_components, 2, 1)
    loc = Y.mean(0).expand(num_components, 2).unsqueeze(-1)
    w = loc + torch.randn(num_restarts, *shape)
    log_mixing = torch.full((num_restarts, num_components), -math.log(num_components))
    start = Mixture(w, torch.ones_like(w[..., 0]), log_mixing, torch.full_like(w, 0.01), loc)
    return mixture_data(Y), start, per_kernel(shape)


def run(data: MixtureData, at: Mixture, ties: SharedParameters, schedule: list[tuple[Update, int]]) -> Mixture:
    for update, num_steps in schedule:
        for _ in range(num_steps):
            new = update(estep(data, at, ties, mixture_evidence.coordinate))
            at = new.where(mixture_fit.change(new, new).isfinite(), at)
    return at


def evidence(data: MixtureData, at: Mixture) -> Tensor:
    at = mixture_mode.find_mode(data, at)
    A = mixture_evidence.full(data, at, e_step(data, at))
    return log_evidence(data, at, A)


# Log evidences of converged K = 2 fits from an independent implementation, and of L-BFGS on the evidence itself.
@pytest.mark.parametrize(
    ("label", "update", "expected"),
    [(0, husmeier2000_update, -19.93), (1, husmeier2000_update, 2.48), (0, corrected, -19.59), (1, corrected, 3.96)],
)
def test_fixed_points_on_ripley(label: int, update: Update, expected: float, data_dir: Path) -> None:
    data, start, ties = ripley(label, 2, 5)
    at = run(data, start, ties, [(Unregularised(rho=0.02), 20), (update, 400)])
    assert float(evidence(data, at).max()) == pytest.approx(expected, abs=0.006)


def test_one_kernel_climbs_to_the_maximum_of_the_exact_evidence() -> None:
    """K = 1 is Bayesian linear regression: oracle, the evidence with the weights integrated out on paper."""
    torch.manual_seed(0)
    G = torch.randn(40, 3)
    t = G @ torch.tensor([1.0, -0.5, 0.2]) + 0.3 * torch.randn(40)
    data, zero = mixture_data(t[:, None], G), torch.zeros(1, 1, 3)
    at = Mixture(zero[None], torch.ones(1, 1, 1), torch.zeros(1, 1), torch.ones(1, 1, 1, 3), zero)
    path = []
    for _ in range(200):
        at = corrected(estep(data, at, per_kernel((1, 1, 3)), mixture_evidence.block))
        path.append(float(evidence(data, at)))
    assert all(after >= before - 1e-9 for before, after in pairwise(path))
    log_alpha, log_beta = (
        at.alpha[0, 0, 0, 0].log().requires_grad_(),
        at.noise[0, 0, 0].log().requires_grad_(),
    )
    covariance = torch.eye(40) / log_beta.exp() + G @ G.mT / log_alpha.exp()
    found = torch.distributions.MultivariateNormal(torch.zeros(40), covariance).log_prob(t)
    assert_exact(evidence(data, at)[0], found.detach())
    for gradient in torch.autograd.grad(found, (log_alpha, log_beta)):
        assert_approx(gradient, torch.zeros(()))


@pytest.mark.parametrize(
    "update",
    [
        husmeier2000_update,
        corrected,
        BoundedInflation(),
        BoundedInflation(num_other_outputs=0.0),
        WeightDecay(0.1),
        Unregularised(),
    ],
)
def test_permuting_kernels_changes_nothing(update: Update) -> None:
    torch.manual_seed(0)
    shape = (3, 2, 1)
    data = mixture_data(torch.randn(50, 2))
    at = Mixture(
        torch.randn(1, *shape),
        torch.rand(1, 3, 2) + 0.5,
        torch.randn(1, 3).log_softmax(-1),
        torch.rand(1, 3, 1, 1).expand(1, *shape),
        torch.zeros(shape),
    )
    expected = update(estep(data, at, per_kernel(shape), mixture_evidence.coordinate))
    for order in permutations(range(3)):
        mixed = Mixture(*(getattr(at, f)[:, order] for f in ("w", "noise", "log_mixing", "alpha")), at.loc)
        actual = update(estep(data, mixed, per_kernel(shape), mixture_evidence.coordinate))
        for field in ("w", "noise", "log_mixing", "alpha"):
            assert_exact(getattr(actual, field), getattr(expected, field)[:, order])


def test_without_the_gamma_prior_the_outputs_own_gamma_is_the_derived_update(data_dir: Path) -> None:
    data, at, ties = ripley(0, 3, 2)
    here = estep(data, at, ties, mixture_evidence.coordinate)
    one, other = BoundedInflation(rho=0.0, num_other_outputs=0.0)(here), corrected(here)
    for field in ("w", "noise", "log_mixing", "alpha"):
        assert_exact(getattr(one, field), getattr(other, field))


def one_gaussian(Y: Tensor, full: bool = False) -> EStep:
    """One kernel for each data set ``(R, N, m)``, at its moments, with a prior so flat that every gamma is one."""
    R, _, m = Y.shape
    w, noise = Y.mean(1)[:, None, :, None], Y.var(1, correction=0).reciprocal()[:, None]
    at = Mixture(w, noise, torch.zeros(R, 1), torch.full_like(w, 1e-7), torch.zeros(1, m, 1))
    at = replace(at, noise=noise.diag_embed()) if full else at
    return estep(mixture_data(Y), at, per_kernel((1, m, 1)), mixture_evidence.coordinate)


@pytest.mark.parametrize(
    ("num_outputs", "others", "taken"),
    [(1, 3.0, 1), (2, 3.0, 2), (4, 3.0, 4), (5, 3.0, 4), (12, 3.0, 4), (12, math.inf, 12), (12, 1.0, 2), (12, 0.0, 1)],
)
def test_variances_are_widened_by_the_gamma_of_so_many_outputs(num_outputs: int, others: float, taken: int) -> None:
    """Oracle: the formula for one kernel, whose gammas are one."""
    Y = torch.randn(2, 30, num_outputs, generator=torch.Generator().manual_seed(0))
    variance = BoundedInflation(rho=0.0, num_other_outputs=others)(one_gaussian(Y)).noise[:, 0].reciprocal()
    assert_approx(variance, Y.var(1, correction=0) * 30 / (30 - taken))


def test_a_noise_matrix_is_widened_by_all() -> None:
    Y = torch.randn(1, 30, 12, generator=torch.Generator().manual_seed(0))
    covariance = torch.linalg.inv(BoundedInflation(rho=0.0)(one_gaussian(Y, full=True)).noise[0, 0])
    assert_approx(covariance, Y[0].mT.cov(correction=0) * 30 / (30 - 12))


def test_three_other_outputs_predict_best_however_many_there_are() -> None:
    """Expected log density of new data under a Gaussian that was fitted to 15, mean of 2000 fits; in closed form."""
    m, truth = 12, torch.Generator().manual_seed(0)
    at = one_gaussian(torch.randn(2000, 15, m, generator=truth))

    def nll(others: float) -> float:
        found = BoundedInflation(rho=0.0, num_other_outputs=others)(at)
        precision, mean = found.noise[:, 0], found.w[:, 0, :, 0]
        return float((0.5 * (precision * (1.0 + mean.square()) - precision.log())).sum(-1).mean())

    assert nll(3.0) < min(nll(others) for others in (0.0, 1.5, 4.5, 6.0, math.inf))


def test_unregularised_is_plain_em() -> None:
    """Oracle: sums written out."""
    torch.manual_seed(0)
    Y, shape = torch.randn(50, 2), (3, 2, 1)
    at = Mixture(
        torch.randn(1, *shape),
        torch.rand(1, 3, 2) + 0.5,
        torch.randn(1, 3).log_softmax(-1),
        torch.ones(1, *shape),
        torch.zeros(shape),
    )
    cells = Normal(at.w[0, ..., 0], at.noise[0].rsqrt()).log_prob(Y[:, None]).sum(-1) + at.log_mixing[0]
    resp = cells.softmax(-1)
    mean = resp.T @ Y / resp.sum(0)[:, None]
    variance = torch.einsum("nk,nki->ki", resp, (Y[:, None] - mean).square()) / resp.sum(0)[:, None]
    new = Unregularised()(estep(mixture_data(Y), at, per_kernel(shape), mixture_evidence.block))
    assert_exact(new.w[0, ..., 0], mean)
    assert_exact(new.noise[0], 1.0 / variance)
    assert_exact(new.log_mixing[0].exp(), resp.mean(0))


def two_clusters(separation: float) -> tuple[MixtureData, Mixture]:
    """Fifty data, two kernels of tied hyperparameters at the clusters' centres."""
    normal = torch.special.ndtri((torch.arange(25) + 0.5) / 25)
    y = torch.cat([normal, separation + normal])
    w = torch.tensor([0.0, separation]).reshape(1, 2, 1, 1)
    log_mixing = torch.full((1, 2), -math.log(2.0))
    at = Mixture(w, torch.ones(1, 2, 1), log_mixing, torch.full((1, 2, 1, 1), 0.1), y.mean().expand(2, 1, 1))
    return mixture_data(y[:, None]), at


def evidence_by_quadrature(data: MixtureData, at: Mixture) -> float:
    """Oracle: a grid over both centres."""
    y, mean = data.Y[:, 0], float(at.loc[0])
    grid = torch.linspace(mean - 6.0, mean + 6.0, 1201)
    log_prior = Normal(mean, 0.1**-0.5).log_prob(grid)
    each = Normal(grid[:, None], 1.0).log_prob(y)  # (grid, N)
    rows = [torch.logaddexp(row, each).sum(-1) - len(y) * math.log(2.0) + log_prior for row in each]
    log_joint = torch.stack(rows) + log_prior[:, None]
    return float(log_joint.logsumexp((0, 1)) + 2.0 * math.log(float(grid[1] - grid[0])))


@pytest.mark.parametrize(("separation", "num_modes", "tolerance"), [(6.0, 2, 1e-3), (3.0, 2, 0.02), (0.0, 1, 0.5)])
def test_the_sum_over_distinct_modes_is_the_evidence(separation: float, num_modes: int, tolerance: float) -> None:
    """One mode of two that are far apart misses log 2; where they have merged there is nothing to add."""
    data, at = two_clusters(separation)
    ends = [mixture_mode.find_mode(data, replace(at, w=at.loc + shift)) for shift in spread_out(3.0)]
    distinct = {tuple(end.w.flatten().round(decimals=6).add(0.0).tolist()): end for end in ends}
    assert len(distinct) == num_modes
    each = torch.tensor([float(evidence(data, end)) for end in distinct.values()])
    truth = evidence_by_quadrature(data, at)
    assert float(each.logsumexp(0)) == pytest.approx(truth, abs=tolerance)
    assert float(each[0]) + math.log(num_modes) == pytest.approx(truth, abs=tolerance)
    with_relabelling = float(each[0]) + math.log(2.0)
    assert (abs(with_relabelling - truth) < tolerance) == (num_modes == 2)


def spread_out(size: float) -> list[Tensor]:
    """Starts on either side, and beside the middle."""
    pairs = ((-size, size), (size, -size), (0.3, -0.1), (-0.1, 0.3))
    return [torch.tensor(pair).reshape(1, 2, 1, 1) for pair in pairs]


def test_collapse_is_bounded_by_the_gamma_prior_only() -> None:
    """Tied values: the plain update runs to the limit, the guarded one stays within 1 / (2 rho) data."""
    torch.manual_seed(0)
    Y = torch.cat([torch.zeros(10, 1), torch.randn(20, 1)])
    w = torch.tensor([0.0, 0.3]).reshape(1, 2, 1, 1)
    start = Mixture(
        w,
        torch.tensor([[[100.0], [1.0]]]),
        torch.full((1, 2), -math.log(2.0)),
        torch.full_like(w, 0.1),
        Y.mean().expand(2, 1, 1),
    )
    data, ties = mixture_data(Y), per_kernel((2, 1, 1))
    plain = run(data, start, ties, [(Unregularised(), 300)])
    guarded = run(data, start, ties, [(BoundedInflation(rho=0.05), 300)])
    assert float(plain.noise.max()) > 1e8
    assert float(guarded.noise.max()) < len(Y) / 0.1


def test_the_last_component_is_never_pruned() -> None:
    """Two data in four dimensions have fewer data than well-determined weights."""
    Y = torch.tensor([[0.0, 1.0, 2.0, 3.0], [1.0, 0.0, -1.0, 2.0]])
    torch.manual_seed(0)
    w = torch.randn(3, 4, 4, 1)
    start = Mixture(
        w,
        torch.ones(3, 4, 4),
        torch.full((3, 4), -math.log(4.0)),
        torch.full_like(w, 0.01),
        torch.zeros(4, 4, 1),
    )
    at = run(mixture_data(Y), start, per_kernel((4, 4, 1)), [(BoundedInflation(), 50)])
    assert at.active.sum(-1).tolist() == [1, 1, 1]
    assert bool(mixture_fit.change(at, at).isfinite().all())


def test_mixture_density_oracle_is_torchs() -> None:
    """The log joint of one row against MixtureSameFamily."""
    torch.manual_seed(0)
    Y, w = torch.randn(9, 1), torch.randn(1, 3, 1, 1)
    at = Mixture(
        w,
        torch.rand(1, 3, 1) + 0.5,
        torch.randn(1, 3).log_softmax(-1),
        torch.ones_like(w),
        torch.zeros(3, 1, 1),
    )
    fn = MixtureSameFamily(Categorical(logits=at.log_mixing[0]), Normal(w[0, :, 0, 0], at.noise[0, :, 0].rsqrt()))
    expected = fn.log_prob(Y[:, 0]).sum() + Normal(0.0, 1.0).log_prob(w).sum()
    assert_exact(mixture_evidence.log_joint(mixture_data(Y), at)[0], expected)
