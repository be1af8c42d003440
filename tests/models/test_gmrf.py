"""Gaussian fields against dense eigenvalues, their own curvature, their draws and a sampler."""

from collections.abc import Callable

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS, Predictive
from torch import Tensor
from torch.distributions import biject_to

from pyro_evidence import LaplaceEvidence
from pyro_evidence.errors import BadInput
from pyro_evidence.models.gmrf import AR1, BYM2, ICAR, GaussianField, Neighbours, RandomWalk
from pyro_evidence.precision import damped, exact_hessian
from tests.oracles import gmrf as oracle

SQUARE = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [3, 4], [4, 1]])
TWO_PARTS = torch.tensor([[0, 2], [2, 4], [4, 0], [1, 3], [3, 5]])
S = torch.tensor(0.7, dtype=torch.float64)
LEVEL = torch.tensor(1.3, dtype=torch.float64)


def free(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inside(field: GaussianField) -> Tensor:
    """Some value of the support."""
    to_value = biject_to(field.support)
    shape = to_value.inverse_shape(field.event_shape)
    return to_value(free(shape.numel()).view(shape))


FIELDS: dict[str, Callable[[], GaussianField]] = {
    "walk": lambda: RandomWalk(S, 7),
    "walk at a level": lambda: RandomWalk(S, 7, level=LEVEL),
    "second order": lambda: RandomWalk(S, 7, order=2),
    "second order at a level": lambda: RandomWalk(S, 7, order=2, level=LEVEL),
    "autoregression": lambda: AR1(S, torch.tensor(-0.6, dtype=torch.float64), 7),
    "graph": lambda: ICAR(SQUARE, S),
    "graph at a level": lambda: ICAR(SQUARE, S, level=LEVEL),
    "two parts": lambda: ICAR(TWO_PARTS, S),
    "two parts at a level": lambda: ICAR(TWO_PARTS, S, level=LEVEL),
    "mixed": lambda: BYM2(SQUARE, S, torch.tensor(0.4, dtype=torch.float64)),
    "mixed at a level": lambda: BYM2(SQUARE, S, torch.tensor(0.4, dtype=torch.float64), level=LEVEL),
    "mixed in two parts": lambda: BYM2(TWO_PARTS, S, torch.tensor(0.4, dtype=torch.float64)),
}
every_field = pytest.mark.parametrize("make", FIELDS.values(), ids=FIELDS)


@every_field
def test_the_density_integrates_to_one(make: Callable[[], GaussianField]) -> None:
    field = make()
    to_value = biject_to(field.support)
    start = torch.zeros(to_value.inverse_shape(field.event_shape), dtype=torch.float64).flatten()
    shape = to_value.inverse_shape(field.event_shape)

    def log_prob(u: Tensor) -> Tensor:
        return field.log_prob(to_value(u.view(shape)))

    A = -torch.autograd.functional.hessian(log_prob, start)
    assert torch.linalg.eigvalsh(A)[0] > 0
    normaliser = 0.5 * torch.logdet(A) - 0.5 * len(A) * np.log(2.0 * np.pi)
    torch.testing.assert_close(log_prob(start), normaliser, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("order", [1, 2])
def test_walks_by_eigenvalues(order: int) -> None:
    field = RandomWalk(S, 9, order=order)
    x = inside(field)
    expected = oracle.log_density(oracle.walk_structure(9, order) / float(S) ** 2, x.numpy())
    assert float(field.log_prob(x)) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("edges", [SQUARE, TWO_PARTS])
def test_graphs_by_eigenvalues(edges: Tensor) -> None:
    field = ICAR(edges, S)
    x = inside(field)
    Q = oracle.laplacian(len(x), edges.numpy()) / float(S) ** 2
    assert float(field.log_prob(x)) == pytest.approx(oracle.log_density(Q, x.numpy()), abs=1e-10)


def test_walk_at_a_level_is_a_product_of_normals() -> None:
    x = free(6)
    expected = dist.Normal(0.0, LEVEL).log_prob(x[0]) + dist.Normal(0.0, S).log_prob(x.diff()).sum()
    torch.testing.assert_close(RandomWalk(S, 6, level=LEVEL).log_prob(x), expected, rtol=1e-12, atol=1e-12)


def test_autoregression_is_a_product_of_normals() -> None:
    x, phi = free(6), torch.tensor(0.8, dtype=torch.float64)
    start = dist.Normal(0.0, S / (1.0 - phi**2).sqrt()).log_prob(x[0])
    expected = start + dist.Normal(phi * x[:-1], S).log_prob(x[1:]).sum()
    torch.testing.assert_close(AR1(S, phi, 6).log_prob(x), expected, rtol=1e-12, atol=1e-12)


def test_mixed_field_has_typical_variance_one() -> None:
    Q = oracle.laplacian(5, SQUARE.numpy())
    typical = oracle.typical_variance(Q)
    assert float(Neighbours(SQUARE).typical_variance[0]) == pytest.approx(typical, rel=1e-12)
    x = inside(BYM2(SQUARE, S, 0.4))
    noise = dist.Normal((0.4**0.5) * S * x[1], S * 0.6**0.5).log_prob(x[0]).sum()
    expected = float(noise) + oracle.log_density(typical * Q, x[1].numpy())
    assert float(BYM2(SQUARE, S, 0.4).log_prob(x)) == pytest.approx(expected, rel=1e-6)


def test_a_normal_for_each_edge_is_another_density() -> None:
    """By s^-E against s^-(n-1), whence the error message for it."""
    x = inside(ICAR(SQUARE, S))

    def ratio(scale: float) -> Tensor:
        naive = dist.Normal(0.0, scale).log_prob(x[SQUARE[:, 0]] - x[SQUARE[:, 1]]).sum()
        return naive - ICAR(SQUARE, torch.tensor(scale).double()).log_prob(x)

    cycles = len(SQUARE) - 4
    assert float(ratio(0.5) - ratio(2.0)) == pytest.approx(cycles * np.log(4.0), rel=1e-10)


@every_field
def test_elements_sum_to_the_density(make: Callable[[], GaussianField]) -> None:
    field = make()
    x = inside(field)
    parts = field.element_log_prob(x.flatten()[field.element_index])
    assert parts.shape == field.element_index.shape[:1]
    torch.testing.assert_close(parts.sum() + field.log_normaliser(), field.log_prob(x), rtol=1e-12, atol=1e-12)


def test_scales_have_exact_slopes() -> None:
    x, phi = free(7), torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    s, level = (p.clone().requires_grad_() for p in (S, LEVEL))
    assert torch.autograd.gradcheck(lambda s, level: RandomWalk(s, 7, order=2, level=level).log_prob(x), (s, level))
    assert torch.autograd.gradcheck(lambda s, phi: AR1(s, phi, 7).log_prob(x), (s, phi))
    one, two = inside(ICAR(SQUARE, S)), inside(BYM2(SQUARE, S, 0.4))
    assert torch.autograd.gradcheck(lambda s: ICAR(SQUARE, s).log_prob(one), (s,))
    assert torch.autograd.gradcheck(lambda s, phi: BYM2(SQUARE, s, phi).log_prob(two), (s, phi))


@every_field
def test_draws_have_the_covariance_of_the_density(make: Callable[[], GaussianField]) -> None:
    field = make()
    to_value = biject_to(field.support)
    start = torch.zeros(to_value.inverse_shape(field.event_shape), dtype=torch.float64)
    A = -torch.autograd.functional.hessian(lambda u: field.log_prob(to_value(u)), start).view(start.numel(), -1)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        draws = field.sample((20_000,))
    assert draws.dtype == torch.float64
    u = biject_to(field.support).inv(draws).flatten(1)
    torch.testing.assert_close(to_value(u.view(-1, *start.shape)), draws, rtol=1e-8, atol=1e-8)  # inside the support
    white = u @ torch.linalg.cholesky(A)
    torch.testing.assert_close(white.mT @ white / len(u), torch.eye(len(A)).double(), rtol=0.0, atol=0.05)


def test_batches_and_plates() -> None:
    scales = torch.tensor([0.5, 2.0], dtype=torch.float64)
    field = ICAR(SQUARE, scales)
    x = torch.stack([inside(ICAR(SQUARE, s)) for s in scales])
    one_by_one = torch.stack([ICAR(SQUARE, s).log_prob(row) for s, row in zip(scales, x, strict=True)])
    torch.testing.assert_close(field.log_prob(x), one_by_one)
    assert field.sample((3,)).shape == (3, 2, 5)
    wide = BYM2(SQUARE, 1.0, 0.5).expand([4])
    assert wide.sample().shape == (4, 2, 5)
    assert wide.log_prob(wide.sample()).shape == (4,)
    with pyro.plate("fields", 3):
        assert pyro.sample("x", RandomWalk(torch.tensor(1.0), 6)).shape == (3, 6)


def test_support_knows_what_sums_to_zero() -> None:
    support = ICAR(SQUARE, S).support
    x = inside(ICAR(SQUARE, S))
    assert support.check(x)
    assert not support.check(x + 0.01)
    assert support.check(x.float())
    with pytest.raises(ValueError, match="within the support"):
        ICAR(SQUARE, S, validate_args=True).log_prob(x + 0.01)


def counts(edges: Neighbours, y: Tensor) -> None:
    x = pyro.sample("x", ICAR(edges, 0.5))
    level = pyro.sample("level", dist.Normal(0.0, 2.0))
    with pyro.plate("nodes", edges.size):
        pyro.sample("y", dist.Poisson((level + x).exp()), obs=y)


def test_nuts_and_laplace_run_on_a_field_that_sums_to_zero() -> None:
    pyro.set_rng_seed(0)
    y = torch.tensor([2.0, 5.0, 1.0, 0.0, 3.0])
    mcmc = MCMC(NUTS(counts), num_samples=200, warmup_steps=100, disable_progbar=True)
    mcmc.run(Neighbours(SQUARE), y)
    draws = mcmc.get_samples()["x"]
    assert draws.shape == (200, 5)
    assert draws.sum(-1).abs().max() < 1e-5
    posterior = LaplaceEvidence(counts).run(Neighbours(SQUARE), y)
    assert posterior.mode["x"].sum().abs() < 1e-5
    assert (draws.mean(0) - posterior.mode["x"]).abs().max() < 0.2
    assert Predictive(counts, {"level": torch.zeros(3)})(Neighbours(SQUARE), None)["x"].flatten(1).shape == (3, 5)


def test_laplace_is_exact_for_a_field_seen_through_normal_noise() -> None:
    y = free(5)

    def model(y: Tensor) -> None:
        x = pyro.sample("x", ICAR(SQUARE, S))
        with pyro.plate("nodes", 5):
            pyro.sample("y", dist.Normal(x, torch.tensor(0.3, dtype=torch.float64)), obs=y)

    Q = oracle.laplacian(5, SQUARE.numpy()) / float(S) ** 2
    covariance = torch.as_tensor(np.linalg.pinv(Q, hermitian=True)) + 0.09 * torch.eye(5)
    expected = dist.MultivariateNormal(torch.zeros(5).double(), covariance).log_prob(y)
    torch.testing.assert_close(LaplaceEvidence(model).run(y).log_evidence, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([[0, 1], [1, 1]], "node 1 has an edge with itself"),
        ([[0, 1], [1, 0]], "a pair twice"),
        ([[0, 1], [1, 3]], "node 2 has no neighbour"),
        ([[0, 1], [1, -1]], "nodes -1 to 1"),
        ([[0, 1, 2]], "expected pairs of nodes"),
        ([[0.0, 1.0]], "expected pairs of nodes"),
    ],
)
def test_letters_for_graphs(edges: list[list[float]], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        ICAR(torch.tensor(edges), 1.0)


def test_letters_for_walks() -> None:
    with pytest.raises(BadInput, match="order=3"):
        RandomWalk(1.0, 10, order=3)
    with pytest.raises(BadInput, match="size=2"):
        RandomWalk(1.0, 2, order=2)
    with pytest.raises(BadInput, match="size=1"):
        AR1(1.0, 0.5, 1)


def lattice(side: int) -> Tensor:
    node = torch.arange(side * side).view(side, side)
    across = torch.stack([node[:, :-1].flatten(), node[:, 1:].flatten()], -1)
    return torch.cat([across, torch.stack([node[:-1].flatten(), node[1:].flatten()], -1)])


LARGE: dict[str, Callable[[], GaussianField]] = {
    "walk": lambda: RandomWalk(S, 225, order=2, level=LEVEL),
    "autoregression": lambda: AR1(S, 0.9 * torch.ones((), dtype=torch.float64), 225),
    "graph": lambda: ICAR(lattice(15), S, level=LEVEL),
    "mixed": lambda: BYM2(lattice(11), S, torch.tensor(0.4, dtype=torch.float64), level=LEVEL),
}


@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
def test_the_sparse_curvature_of_a_field_is_the_exact_one(make: Callable[[], GaussianField]) -> None:
    field = make()
    y = torch.poisson(torch.ones(field.event_shape[-1]).double(), generator=torch.Generator().manual_seed(0))

    def model(y: Tensor) -> None:
        x = pyro.sample("x", make())
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson((x if x.dim() == 1 else x[0]).exp()), obs=y)

    sparse = LaplaceEvidence(model).run(y)
    dense = LaplaceEvidence(model, curvature=damped(exact_hessian, 0.0)).run(y)  # any choice but the exact one is dense
    assert "checked by 2 products" in str(sparse.structure)
    torch.testing.assert_close(sparse.log_evidence, dense.log_evidence, rtol=1e-10, atol=0.0)
