"""The closed-form Hessian against autograd, the evidence against quadrature and Bayesian linear regression."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import hessian
from torch.distributions import MultivariateNormal, Normal

from pyro_evidence.mixture import evidence as mixture_evidence
from pyro_evidence.mixture import expectation as mixture_expectation
from pyro_evidence.mixture.expectation import Mixture, MixtureData, mixture_data
from tests.models_for_tests.mixture_cases import log_evidence

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def problem(shape: tuple[int, int, int], *, full: bool = False, constant: bool = False) -> tuple[MixtureData, Mixture]:
    """Data and a random point of shape (K, m, B), one row; curvatures of order 100."""
    torch.manual_seed(sum(shape))
    K, m, B = shape
    Y, G = torch.randn(40, m), torch.randn(40, B)
    noise = torch.rand(1, K, m) + 0.5
    if full:
        root = torch.randn(1, K, m, m)
        noise = 0.3 * root @ root.mT + torch.eye(m)
    at = Mixture(
        torch.randn(1, *shape),
        noise,
        torch.randn(1, K).log_softmax(-1),
        torch.rand(1, *shape),
        torch.randn(shape),
    )
    return mixture_data(Y, None if constant else G, weight=torch.rand(40)), at


def minus_log_joint(data: MixtureData, at: Mixture, flat: Tensor) -> Tensor:
    """Oracle: torch's own distributions."""
    w = flat.reshape(at.w.shape[1:])
    loc = torch.einsum("kib,nb->nki", w, data.G)
    if at.noise.dim() == 4:
        cells = MultivariateNormal(loc, precision_matrix=at.noise[0]).log_prob(data.Y[:, None])
    else:
        cells = Normal(loc, at.noise[0].rsqrt()).log_prob(data.Y[:, None]).sum(-1)
    prior = Normal(at.loc, at.alpha[0].rsqrt()).log_prob(w).sum()
    return -data.weight @ (cells + at.log_mixing[0]).logsumexp(-1) - prior


SHAPES = [(K, m, B) for K in (1, 2, 3, 5) for m in (1, 2, 4) for B in (1, 2, 5)]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_full_hessian_is_autograds(shape: tuple[int, int, int], full: bool) -> None:
    data, at = problem(shape, full=full)
    expected = hessian(partial(minus_log_joint, data, at), at.w.flatten())
    stats = mixture_expectation.e_step(data, at, spread=True)
    A = mixture_evidence.full(data, at, stats)
    assert_exact(A[0, 0] + at.alpha.flatten().diag(), expected)
    K, m, B = shape
    tensor = (A[0, 0]).reshape(K, m * B, K, m * B)
    coordinate = mixture_evidence.coordinate(data, at, stats)[0]
    assert_exact(coordinate, tensor.diagonal(dim1=0, dim2=2).movedim(-1, 0))
    tensor = (A[0, 0]).reshape(K * m, B, K * m, B)
    assert_exact(mixture_evidence.block(data, at, stats)[0], tensor.diagonal(dim1=0, dim2=2).movedim(-1, 0))
    assert_exact(mixture_evidence.log_joint(data, at)[0], -minus_log_joint(data, at, at.w.flatten()))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("K", [1, 3])
def test_hessian_from_sums_is_the_hessian_from_data(K: int, full: bool) -> None:
    """For a constant basis the E-step's sums are enough; oracle: the general way, with ones as its basis."""
    data, at = problem((K, 3, 1), full=full, constant=True)
    general = mixture_data(data.Y, torch.ones(40, 1), weight=data.weight)
    stats = mixture_expectation.e_step(data, at, spread=True)
    for curvature in (mixture_evidence.coordinate, mixture_evidence.block):
        assert data.is_constant and not general.is_constant
        assert_exact(curvature(data, at, stats), curvature(general, at, stats))


@pytest.mark.parametrize("curvature", [mixture_evidence.full, mixture_evidence.coordinate, mixture_evidence.block])
def test_hessian_with_missing_values_is_autograds(curvature: mixture_evidence.MixtureCurvature) -> None:
    data, at = problem((3, 2, 1), constant=True)
    holes = data.Y.clone()
    holes[::3, 0] = torch.nan
    data = mixture_data(holes)

    def objective(flat: Tensor) -> Tensor:
        cells = Normal(flat.reshape(3, 2), at.noise[0].rsqrt()).log_prob(data.Y[:, None])
        return -(torch.where(holes.isnan()[:, None], 0.0, cells).sum(-1) + at.log_mixing[0]).logsumexp(-1).sum()

    A = curvature(data, at, mixture_expectation.e_step(data, at, spread=True))[0]
    expected = hessian(objective, at.w.flatten())
    tensor = expected.reshape(len(A), A.shape[-1], len(A), A.shape[-1])
    assert_exact(A, tensor.diagonal(dim1=0, dim2=2).movedim(-1, 0))


def test_one_kernel_is_exact_bayesian_linear_regression() -> None:
    """Evidence by integrating the weights out on paper; gamma by MacKay's 1 - alpha Sigma."""
    torch.manual_seed(0)
    t, G = torch.randn(30), torch.randn(30, 4)
    alpha, beta = torch.tensor([0.5, 1.0, 2.0, 4.0]), torch.tensor(3.0)
    data = mixture_data(t[:, None], G)
    zero = torch.zeros(1, 1, 4)
    at = Mixture(zero[None], beta.reshape(1, 1, 1), torch.zeros(1, 1), alpha.reshape(1, 1, 1, 4), zero)
    stats = mixture_expectation.e_step(data, at)
    at = Mixture(mixture_expectation.solve_weights(stats, data.layout, at), at.noise, at.log_mixing, at.alpha, at.loc)
    covariance = torch.eye(30) / beta + G @ torch.diag(1.0 / alpha) @ G.mT
    expected = MultivariateNormal(torch.zeros(30), covariance).log_prob(t)
    variance = torch.linalg.inv(beta * G.mT @ G + alpha.diag()).diagonal()
    for curvature in (mixture_evidence.full, mixture_evidence.coordinate, mixture_evidence.block):
        A = curvature(data, at, stats)
        actual = log_evidence(data, at, A)
        assert_exact(actual[0], expected)
        assert_exact(mixture_evidence.well_determined(A, at.alpha).gamma.flatten(), 1.0 - alpha * variance)


def test_gamma_sums_to_the_papers_formula_and_is_clipped() -> None:
    """Eq. 2.20 written out, with an eigenvalue that is negative."""
    rotation = torch.linalg.qr(torch.tensor([[1.0, 2.0], [0.5, -1.0]]))[0]
    A = (rotation @ torch.diag(torch.tensor([6.0, -0.5])) @ rotation.mT).reshape(1, 1, 2, 2)
    found = mixture_evidence.well_determined(A, torch.full((1, 1, 2, 1), 2.0))
    assert_exact(found.gamma.sum(), torch.tensor(6.0 / 8.0))
    assert found.num_clipped.tolist() == [1]


def test_a_pruned_component_adds_nothing_to_the_evidence() -> None:
    data, at = problem((3, 2, 2))
    keep = torch.tensor([0, 2])
    w = torch.where(torch.tensor([False, True, False])[:, None, None], at.loc, at.w)
    log_mixing = torch.tensor([[0.4, 0.0, 0.6]]).log()
    three = Mixture(w, at.noise, log_mixing, at.alpha, at.loc)
    two = Mixture(w[:, keep], at.noise[:, keep], log_mixing[:, keep], at.alpha[:, keep], at.loc[keep])
    values = []
    for one in (three, two):
        stats = mixture_expectation.e_step(data, one)
        A = mixture_evidence.coordinate(data, one, stats) * 0.0 + mixture_evidence.coordinate(data, one, stats).abs()
        A = A * torch.eye(4)  # any positive curvature will do
        values.append(log_evidence(data, one, A))
    assert_exact(values[0], values[1])
