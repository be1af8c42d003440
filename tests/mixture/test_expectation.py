"""E-step and M-step against scikit-learn, against sums written out, and against their own laws."""

import math
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from pyro_evidence.mixture import expectation as mixture_expectation
from pyro_evidence.mixture.expectation import Mixture, MixtureData, MixtureStatistics, mixture_data

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def blobs(num_data: int = 200, num_outputs: int = 3, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    centres = 3.0 * torch.randn(4, num_outputs)
    noise = torch.randn(num_data, num_outputs) @ (0.5 * torch.randn(num_outputs, num_outputs))
    return centres[torch.randint(4, (num_data,))] + noise


def start(shape: tuple[int, int, int, int], *, full: bool = False, seed: int = 1) -> Mixture:
    """A random mixture of shape (R, K, m, B)."""
    torch.manual_seed(seed)
    R, K, m, _ = shape
    noise = torch.rand(R, K, m) + 0.5
    if full:
        root = torch.randn(R, K, m, m)
        noise = root @ root.mT + torch.eye(m)
    log_mixing = torch.randn(R, K).log_softmax(-1)
    return Mixture(torch.randn(shape), noise, log_mixing, torch.rand(shape) + 0.1, torch.randn(shape[1:]))


def log_joint(Y: Tensor, G: Tensor, one: Mixture) -> Tensor:
    """Oracle: torch's own distributions, row 0, shape (N, K)."""
    loc = torch.einsum("kib,nb->nki", one.w[0], G)
    if one.noise.dim() == 4:
        cells = MultivariateNormal(loc, precision_matrix=one.noise[0]).log_prob(Y[:, None])
    else:
        cells = Normal(loc, one.noise[0].rsqrt()).log_prob(Y[:, None]).sum(-1)
    return cells + one.log_mixing[0]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("num_basis", [1, 4])
def test_responsibilities_are_those_of_torch_distributions(full: bool, num_basis: int) -> None:
    Y = blobs(50)
    G = torch.cat([torch.ones(50, 1), torch.randn(50, num_basis - 1)], -1)
    one = start((1, 5, 3, num_basis), full=full)
    data = mixture_data(Y, None if num_basis == 1 else G)
    resp, log_density = mixture_expectation.responsibilities(
        data.features, mixture_expectation.natural_parameters(one, data.layout)
    )
    assert_exact(resp[0].T, log_joint(Y, G, one).softmax(-1))
    assert_exact(log_density[0], log_joint(Y, G, one).logsumexp(-1))


def em(data: MixtureData, at: Mixture) -> Mixture:
    """Plain EM: no prior, no correction."""
    stats = mixture_expectation.e_step(data, at)
    flat = Mixture(at.w, at.noise, at.log_mixing, torch.zeros_like(at.alpha), at.loc)
    w = mixture_expectation.solve_weights(stats, data.layout, flat)
    if at.noise.dim() == 4:
        scatter = mixture_expectation.residual_products(stats, data.layout, w)
        noise = torch.linalg.inv(scatter / stats.counts[..., None, None])
    else:
        noise = stats.counts.unsqueeze(-1) / mixture_expectation.residual_squares(stats, data.layout, w)
    return Mixture(w, noise, (stats.counts / data.num_data).log(), flat.alpha, at.loc)


@pytest.mark.parametrize("kind", ["diag", "full"])
def test_plain_em_is_scikit_learns(kind: str) -> None:
    sklearn = pytest.importorskip("sklearn.mixture")
    Y = blobs()
    at = start((1, 4, 3, 1))
    noise = torch.eye(3).expand(1, 4, 3, 3) / 9.0 if kind == "full" else at.noise
    at = Mixture(Y[:4, :, None].unsqueeze(0).clone(), noise, at.log_mixing, at.alpha, at.loc)
    theirs = sklearn.GaussianMixture(
        4, covariance_type=kind, reg_covar=0.0, tol=0.0, max_iter=30, means_init=Y[:4].numpy(),
        precisions_init=at.noise[0].numpy(), weights_init=at.log_mixing[0].exp().numpy(),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that 30 iterations may not be enough
        theirs.fit(Y.numpy())
    data = mixture_data(Y)
    for _ in range(30):
        at = em(data, at)
    assert_exact(at.w[0, ..., 0], torch.as_tensor(theirs.means_))
    assert_exact(at.log_mixing[0].exp(), torch.as_tensor(theirs.weights_))
    assert_exact(at.noise[0], torch.as_tensor(np.asarray(theirs.precisions_)))


def test_statistics_of_two_shards_add_up_and_blocks_do_not_matter() -> None:
    Y, at = blobs(1000), start((2, 4, 3, 1))
    whole = mixture_expectation.e_step(mixture_data(Y), at, spread=True)
    parts = [mixture_expectation.e_step(mixture_data(part), at, spread=True) for part in (Y[:300], Y[300:])]
    for actual, expected in zip(vars(parts[0] + parts[1]).values(), vars(whole).values(), strict=True):
        assert_exact(actual, expected)


def rows(stats: MixtureStatistics, row: int) -> list[Tensor]:
    return [v[row : row + 1] for v in vars(stats).values()]


@pytest.mark.parametrize("separate", [False, True])
def test_a_batch_of_restarts_equals_a_loop(separate: bool) -> None:
    """With one basis for all restarts, and with one each."""
    Y, at = blobs(60), start((3, 4, 3, 2))
    G = torch.randn(3, 60, 2) if separate else torch.randn(60, 2)
    data = mixture_data(Y.expand(3, 60, 3) if separate else Y, G)
    batch = mixture_expectation.e_step(data, at, spread=True)
    w = mixture_expectation.solve_weights(batch, data.layout, at)
    for row in range(3):
        one = Mixture(*(getattr(at, f)[row : row + 1] for f in ("w", "noise", "log_mixing", "alpha")), at.loc)
        alone = mixture_data(Y, G[row] if separate else G)
        stats = mixture_expectation.e_step(alone, one, spread=True)
        for actual, expected in zip(rows(batch, row), vars(stats).values(), strict=True):
            assert_exact(actual, expected)
        assert_exact(w[row : row + 1], mixture_expectation.solve_weights(stats, alone.layout, one))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("num_basis", [1, 3])
def test_solved_weights_are_stationary(full: bool, num_basis: int) -> None:
    """Oracle: autograd of the expected complete log joint, written with torch's distributions."""
    Y, at = blobs(40), start((1, 4, 3, num_basis), full=full)
    G = torch.ones(40, 1) if num_basis == 1 else torch.randn(40, num_basis)
    data = mixture_data(Y, None if num_basis == 1 else G)
    stats = mixture_expectation.e_step(data, at)
    w = mixture_expectation.solve_weights(stats, data.layout, at).requires_grad_()
    resp = log_joint(Y, G, at).softmax(-1)
    new = Mixture(w, at.noise, at.log_mixing, at.alpha, at.loc)
    expected = (resp * log_joint(Y, G, new)).sum() - 0.5 * (at.alpha * (w - at.loc).square()).sum()
    (slope,) = torch.autograd.grad(expected, w)
    assert_exact(slope, torch.zeros_like(slope))


@pytest.mark.parametrize("num_basis", [1, 3])
def test_residual_sums_are_the_sums_written_out(num_basis: int) -> None:
    Y, at = blobs(40), start((1, 4, 3, num_basis))
    G = torch.ones(40, 1) if num_basis == 1 else torch.randn(40, num_basis)
    data = mixture_data(Y, None if num_basis == 1 else G)
    stats = mixture_expectation.e_step(data, replace(at, noise=at.noise_matrix), spread=True)
    resp = log_joint(Y, G, at).softmax(-1)
    e = Y[:, None] - torch.einsum("kib,nb->nki", at.w[0], G)
    squares = mixture_expectation.residual_squares(stats, data.layout, at.w)[0]
    products = mixture_expectation.residual_products(stats, data.layout, at.w)[0]
    assert_exact(squares, torch.einsum("nk,nki->ki", resp, e.square()))
    assert_exact(products, torch.einsum("nk,nki,nkj->kij", resp, e, e))
    assert_exact(stats.spread[0, :, 0], (resp * (1 - resp)).sum(0))


def test_integer_weights_are_copies() -> None:
    Y, at = blobs(20), start((1, 4, 3, 1))
    weight = torch.arange(20) % 3
    copies = mixture_expectation.e_step(mixture_data(Y.repeat_interleave(weight, 0)), at, spread=True)
    weighted = mixture_expectation.e_step(mixture_data(Y, weight=weight.double()), at, spread=True)
    for actual, expected in zip(vars(weighted).values(), vars(copies).values(), strict=True):
        assert_exact(actual, expected)


def test_missing_values_are_integrated_out() -> None:
    Y, at = blobs(30), start((1, 4, 3, 1))
    holes = Y.clone()
    holes[::3, 0], holes[1::4, 2] = math.nan, math.nan
    data = mixture_data(holes)
    resp, log_density = mixture_expectation.responsibilities(
        data.features, mixture_expectation.natural_parameters(at, data.layout)
    )
    cells = Normal(at.w[0, ..., 0], at.noise[0].rsqrt()).log_prob(Y[:, None])
    expected = torch.where(holes.isnan()[:, None], 0.0, cells).sum(-1) + at.log_mixing[0]
    assert_exact(log_density[0], expected.logsumexp(-1))
    stats = mixture_expectation.e_step(data, at)
    weight = resp[0].T[..., None] * (~holes.isnan())[:, None]
    mean = (weight * Y[:, None]).sum(0) / weight.sum(0)
    flat = Mixture(at.w, at.noise, at.log_mixing, torch.zeros_like(at.alpha), at.loc)
    assert_exact(mixture_expectation.solve_weights(stats, data.layout, flat)[0, ..., 0], mean)


def test_a_pruned_component_takes_nothing() -> None:
    Y, at = blobs(30), start((1, 4, 3, 1))
    log_mixing = torch.tensor([[0.5, 0.0, 0.3, 0.2]]).log()
    pruned = Mixture(at.w, at.noise, log_mixing, at.alpha, at.loc)
    keep = torch.tensor([0, 2, 3])
    three = Mixture(*(getattr(pruned, f)[:, keep] for f in ("w", "noise", "log_mixing", "alpha")), at.loc[keep])
    four = mixture_expectation.e_step(mixture_data(Y), pruned, spread=True)
    small = mixture_expectation.e_step(mixture_data(Y), three, spread=True)
    assert_exact(four.log_likelihood, small.log_likelihood)
    assert_exact(four.moments[:, keep], small.moments)
    assert float(four.moments[:, 1].abs().max()) == 0.0
