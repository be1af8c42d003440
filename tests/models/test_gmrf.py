"""Gaussian fields against dense eigenvalues, their own curvature, their draws and a sampler."""

import math
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
from pyro_evidence.models.gmrf import (
    AR,
    AR1,
    BYM2,
    CAR,
    GMRF,
    ICAR,
    SAR,
    GaussianField,
    Kronecker,
    Lattice,
    Leroux,
    Matern,
    Mesh,
    Neighbours,
    OrnsteinUhlenbeck,
    PCCorrelation,
    PCRange,
    PCScale,
    RandomWalk,
    Seasonal,
    constrained,
    graphs,
    lattice,
)
from pyro_evidence.models.gmrf.constrained import log_det
from pyro_evidence.precision import damped, exact_hessian
from pyro_evidence.precision.dense import Pattern, Plan
from pyro_evidence.program import LogJoint, checks
from tests.oracles import gmrf as oracle

SQUARE = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [3, 4], [4, 1]])
TWO_PARTS = torch.tensor([[0, 2], [2, 4], [4, 0], [1, 3], [3, 5]])
S = torch.tensor(0.7, dtype=torch.float64)
LEVEL = torch.tensor(1.3, dtype=torch.float64)


TIMES = torch.tensor([0.0, 0.3, 1.1, 1.2, 2.5, 4.0, 4.4], dtype=torch.float64)
SUM = (torch.ones(1, 5), torch.zeros(1))
PARTIAL = torch.tensor([0.6, -0.4, 0.2], dtype=torch.float64)
WEIGHTS = torch.tensor([1.0, 0.5, 2.0, 1.0, 3.0, 0.2], dtype=torch.float64)
RHO = torch.tensor(0.7, dtype=torch.float64)


def mesh(barrier: bool = False, side: int = 3) -> Mesh:
    """A grid, a little out of shape, each cell cut in two."""
    node = torch.arange(side * side).view(side, side)
    a, b, c, d = (x.flatten() for x in (node[:-1, :-1], node[:-1, 1:], node[1:, :-1], node[1:, 1:]))
    triangles = torch.cat([torch.stack([a, b, c], -1), torch.stack([d, c, b], -1)])
    y, x = (z.flatten().double() for z in (node // side, node % side))
    points = torch.stack([x + 0.2 * (y * 1.7).sin(), y + 0.2 * (x * 2.3).cos()], -1)
    return Mesh(points, triangles, torch.arange(len(triangles)) < 3 if barrier else None)


def own(constraint: tuple[Tensor, Tensor] | None = None, intrinsic: bool = False) -> GMRF:
    Q = torch.as_tensor(oracle.laplacian(5, SQUARE.numpy())) + (0.0 if intrinsic else 0.5) * torch.eye(5).double()
    return GMRF(SQUARE, Q.diagonal(), Q[SQUARE[:, 0], SQUARE[:, 1]], constraint, intrinsic=intrinsic)


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
    "cyclic": lambda: RandomWalk(S, 7, cyclic=True),
    "cyclic second order": lambda: RandomWalk(S, 7, order=2, cyclic=True),
    "cyclic second order at a level": lambda: RandomWalk(S, 7, order=2, cyclic=True, level=LEVEL),
    "walk in uneven time": lambda: RandomWalk(S, TIMES),
    "second order in uneven time": lambda: RandomWalk(S, TIMES, order=2),
    "scaled": lambda: RandomWalk(S, 7, order=2, scaled=True),
    "season": lambda: Seasonal(S, 9, 4, level=LEVEL),
    "third order autoregression": lambda: AR(S, PARTIAL, 7),
    "continuous autoregression": lambda: OrnsteinUhlenbeck(S, LEVEL, TIMES),
    "weighted graph": lambda: ICAR(Neighbours(SQUARE, weights=WEIGHTS), S),
    "scaled graph in two parts": lambda: ICAR(TWO_PARTS, S, scaled=True),
    "thin plate": lambda: Lattice(S, 3, 4),
    "thin plate at a level": lambda: Lattice(S, 3, 4, level=LEVEL),
    "proper graph": lambda: CAR(Neighbours(SQUARE, weights=WEIGHTS), S, RHO),
    "proper graph, unlike neighbours": lambda: CAR(SQUARE, S, -RHO),
    "Leroux": lambda: Leroux(SQUARE, S, RHO),
    "simultaneous": lambda: SAR(Neighbours(SQUARE, weights=WEIGHTS), S, RHO),
    "Matern": lambda: Matern(mesh(), S, LEVEL),
    "rough Matern": lambda: Matern(mesh(), S, LEVEL, alpha=1),
    "barrier": lambda: Matern(mesh(barrier=True), S, LEVEL),
    "separable": lambda: Kronecker(AR(S, PARTIAL[:2], 4), SAR(SQUARE, S, RHO)),
    "separable, one sums to zero": lambda: Kronecker(AR1(S, RHO, 3), ICAR(TWO_PARTS, S)),
    "separable, both sum to zero": lambda: Kronecker(RandomWalk(S, 4), ICAR(SQUARE, S)),
    "one's own": lambda: own(),
    "one's own with a given sum": lambda: own((torch.ones(1, 5), torch.tensor([2.0]))),
    "one's own, intrinsic": lambda: own((torch.ones(1, 5), torch.tensor([0.0])), intrinsic=True),
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
    highest = start + torch.linalg.solve(A, torch.func.grad(log_prob)(start))
    torch.testing.assert_close(log_prob(highest), normaliser, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("order", [1, 2])
def test_walks_by_eigenvalues(order: int) -> None:
    field = RandomWalk(S, 9, order=order)
    x = inside(field)
    expected = oracle.log_density(oracle.walk_structure(9, order) / float(S) ** 2, x.numpy())
    assert float(field.log_prob(x)) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("edges", [SQUARE, TWO_PARTS])
def test_graphs_by_eigenvalues(edges: Tensor) -> None:
    field = ICAR(edges.int().numpy(), S)  # as scipy.spatial has them
    x = inside(field)
    Q = oracle.laplacian(len(x), edges.numpy()) / float(S) ** 2
    assert float(field.log_prob(x)) == pytest.approx(oracle.log_density(Q, x.numpy()), abs=1e-10)


def dense(name: str) -> np.ndarray:
    """The precision of a field, written out."""
    edges, weights, s, rho = SQUARE.numpy(), WEIGHTS.numpy(), float(S), float(RHO)
    L, weighted, one = oracle.laplacian(5, edges), oracle.weighted_laplacian(5, edges, weights), np.eye(5)
    degree = np.diag(np.diag(weighted))
    simultaneous = one - rho * np.linalg.inv(degree) @ (degree - weighted)
    fields = {
        "cyclic": lambda: oracle.cyclic_structure(7, 1),
        "cyclic second order": lambda: oracle.cyclic_structure(7, 2),
        "walk in uneven time": lambda: oracle.uneven_structure(TIMES.numpy(), 1),
        "second order in uneven time": lambda: oracle.uneven_structure(TIMES.numpy(), 2),
        "scaled": lambda: oracle.walk_structure(7, 2) * oracle.typical_variance(oracle.walk_structure(7, 2)),
        "weighted graph": lambda: weighted,
        "thin plate": lambda: oracle.thin_plate(3, 4),
        "proper graph": lambda: degree - rho * (degree - weighted),
        "proper graph, unlike neighbours": lambda: np.diag(np.diag(L)) + rho * (np.diag(np.diag(L)) - L),
        "Leroux": lambda: rho * L + (1.0 - rho) * one,
        "simultaneous": lambda: simultaneous.T @ simultaneous,
    }
    return np.asarray(fields[name]()) / s**2


@pytest.mark.parametrize(
    "name",
    [
        *("cyclic", "cyclic second order", "walk in uneven time", "second order in uneven time", "scaled"),
        *("weighted graph", "thin plate", "proper graph", "proper graph, unlike neighbours", "Leroux", "simultaneous"),
    ],
)
def test_fields_by_their_dense_precision(name: str) -> None:
    field = FIELDS[name]()
    x = inside(field)
    expected = oracle.log_density(dense(name), x.flatten().numpy())
    assert float(field.log_prob(x)) == pytest.approx(expected, abs=1e-10)


def covariance(field: GaussianField) -> np.ndarray:
    return np.linalg.inv(precision(field))


def precision(field: GaussianField) -> np.ndarray:
    n, index = field.structure.size, field.element_index
    Q = torch.zeros(n, n).double()
    for row, element in zip(index, field.elements, strict=True):
        Q.index_put_((row.unsqueeze(-1), row.unsqueeze(0)), element, accumulate=True)
    return np.asarray(Q)


def test_a_season_is_sums_and_a_start() -> None:
    x = free(9)
    sums = x.unfold(0, 4, 1).sum(-1)
    expected = dist.Normal(0.0, S).log_prob(sums).sum() + dist.Normal(0.0, LEVEL).log_prob(x[:3]).sum()
    torch.testing.assert_close(Seasonal(S, 9, 4, level=LEVEL).log_prob(x), expected, rtol=1e-12, atol=1e-12)


def test_an_autoregression_is_stationary_and_has_its_partial_correlations() -> None:
    """Which is all that there is to say of one."""
    field, p = AR(S, PARTIAL, 8), len(PARTIAL)
    Sigma = covariance(field)
    np.testing.assert_allclose(Sigma[1:, 1:], Sigma[:-1, :-1], rtol=1e-12)
    for lag in range(1, 8):
        K = np.linalg.inv(Sigma[: lag + 1, : lag + 1])
        partial = -K[0, lag] / np.sqrt(K[0, 0] * K[lag, lag])
        assert partial == pytest.approx(float(PARTIAL[lag - 1]) if lag <= p else 0.0, abs=1e-12)
    assert 1.0 / np.linalg.inv(Sigma)[-1, -1] == pytest.approx(float(S) ** 2)
    phi = field.coefficients.numpy()
    np.testing.assert_allclose(Sigma[4, 0], phi @ Sigma[[3, 2, 1], 0], rtol=1e-12)
    x = free(8)
    expected = dist.MultivariateNormal(torch.zeros(8).double(), torch.as_tensor(Sigma)).log_prob(x)
    torch.testing.assert_close(field.log_prob(x), expected, rtol=1e-10, atol=1e-10)


def test_a_continuous_autoregression_has_an_exponential_covariance() -> None:
    Sigma = S**2 * (-(TIMES.unsqueeze(-1) - TIMES).abs() / LEVEL).exp()
    expected = dist.MultivariateNormal(torch.zeros(7).double(), Sigma).log_prob(free(7))
    torch.testing.assert_close(
        FIELDS["continuous autoregression"]().log_prob(free(7)), expected, rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("barrier", [False, True])
def test_a_matern_field_is_the_solution_of_its_equation(barrier: bool) -> None:
    """Stationary: K' C^-1 K / (4 pi kappa^2 scale^2); behind a barrier a fifth of the range counts."""
    m, r, s = mesh(barrier), float(LEVEL), float(S)
    ranges = np.where(m.barrier.numpy(), 0.2 * r, r) if m.barrier is not None else np.full(len(m.triangles), r)
    parts = oracle.finite_elements(m.points.numpy(), m.triangles.numpy())
    A = sum(C + own**2 / 8.0 * G for own, (C, G) in zip(ranges, parts, strict=True))
    noise = sum(0.5 * np.pi * own**2 * C for own, (C, _) in zip(ranges, parts, strict=True))
    Q = A.T @ np.linalg.inv(noise) @ A / s**2
    field, x = Matern(m, S, LEVEL), free(9)
    assert float(field.log_prob(x)) == pytest.approx(oracle.log_density(Q, x.numpy()), abs=1e-10)
    if not barrier:
        kappa, C, G = 8.0**0.5 / r, sum(C for C, _ in parts), sum(G for _, G in parts)
        K = kappa**2 * C + G
        np.testing.assert_allclose(
            Q, K.T @ np.linalg.inv(C) @ K / (4.0 * np.pi * kappa**2 * s**2), rtol=1e-10, atol=1e-12
        )
        rough = (kappa / 2.0**0.5) ** 2 * C + G  # sqrt(8 / 2) / range
        tau = 1.0 / (2.0 * np.pi * (kappa / 2.0**0.5)) / s**2
        expected = oracle.log_density(tau * rough, x.numpy())
        assert float(Matern(m, S, LEVEL, alpha=1).log_prob(x)) == pytest.approx(expected, abs=1e-10)


def test_a_matern_field_has_its_scale_and_range_far_from_the_border() -> None:
    """Covariance scale^2 (kappa d) K_1(kappa d), to the accuracy of the mesh."""
    special = pytest.importorskip("scipy.special")
    m, r = mesh(side=41), 8.0
    field = Matern(m, S, torch.tensor(r, dtype=torch.float64))
    Q = field.structure.on_constraint(field.elements)
    middle = 20 * 41 + 20
    row = Q.solve(torch.nn.functional.one_hot(torch.tensor([middle]), 1681).double())[0]
    for step in (0, 2, 4, 8):
        d = 8.0**0.5 / r * float((m.points[middle + step] - m.points[middle]).norm())
        expected, off = (d * special.k1(d), 0.003) if step else (1.0, 0.04)  # at distance 0 K_1 is steep
        assert float(row[middle + step]) / float(S) ** 2 == pytest.approx(expected, abs=off)


def test_separable_fields_have_the_product_of_the_precisions() -> None:
    one, two = AR(S, PARTIAL[:2], 4), SAR(SQUARE, S, RHO)
    Q, x = np.kron(precision(one), precision(two)), free(20)
    field = Kronecker(one, two)
    assert float(field.log_prob(x.view(4, 5))) == pytest.approx(oracle.log_density(Q, x.numpy()), abs=1e-10)
    both = Kronecker(RandomWalk(S, 4), ICAR(SQUARE, S))
    x = inside(both)
    Q = np.kron(oracle.walk_structure(4, 1), oracle.laplacian(5, SQUARE.numpy())) / float(S) ** 4
    assert float(both.log_prob(x)) == pytest.approx(oracle.log_density(Q, x.flatten().numpy()), abs=1e-10)


def test_a_given_sum_is_conditioned_on() -> None:
    """The joint density of the values over that of their sum."""
    A, e = (
        torch.tensor([[1.0, 2.0, 0.0, -1.0, 1.0], [0.0, 1.0, 1.0, 1.0, 0.0]]).double(),
        torch.tensor([2.0, -1.0]).double(),
    )
    field, everywhere = own((A, e)), own()
    x = inside(field)
    torch.testing.assert_close(A @ x, e)
    Sigma = torch.as_tensor(covariance(everywhere))
    of_sum = dist.MultivariateNormal(torch.zeros(2).double(), A @ Sigma @ A.mT).log_prob(e)
    expected = everywhere.log_prob(x) - of_sum - 0.5 * torch.logdet(A @ A.mT)
    torch.testing.assert_close(field.log_prob(x), expected, rtol=1e-10, atol=1e-10)


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
    assert float(Neighbours(SQUARE).unit.typical_variance[0]) == pytest.approx(typical, rel=1e-12)
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
    mean = torch.linalg.solve(A, torch.func.grad(lambda u: field.log_prob(to_value(u)))(start).flatten())
    white = (u - mean) @ torch.linalg.cholesky(A)
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
    mcmc = MCMC(NUTS(counts), num_samples=100, warmup_steps=50, disable_progbar=True)
    mcmc.run(Neighbours(SQUARE), y)
    draws = mcmc.get_samples()["x"]
    assert draws.shape == (100, 5)
    assert draws.sum(-1).abs().max() < 1e-5
    posterior = LaplaceEvidence(counts).run(Neighbours(SQUARE), y)
    assert posterior.mode["x"].sum().abs() < 1e-5
    assert (draws.mean(0) - posterior.mode["x"]).abs().max() < 0.25
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
    with pytest.raises(BadInput, match="of 2 values"):
        RandomWalk(1.0, 2, order=2)
    with pytest.raises(BadInput, match="size=1"):
        AR1(1.0, 0.5, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomWalk(S, TIMES.flip(0)), "do not increase"),
        (lambda: RandomWalk(S, TIMES, cyclic=True), "a circle has equal distances"),
        (lambda: RandomWalk(S, 2, cyclic=True), "3 values at least"),
        (lambda: Seasonal(S, 3, 4), "period=4"),
        (lambda: AR(S, torch.zeros(0), 4), "p >= 1"),
        (lambda: AR(S, PARTIAL, 3), "more than p values"),
        (lambda: OrnsteinUhlenbeck(S, S, TIMES.flip(0)), "ascending order"),
        (lambda: Lattice(S, 2, 9), "3 or more of each"),
        (lambda: Neighbours(SQUARE, weights=torch.zeros(6)), "finite numbers above 0"),
        (lambda: Matern(SQUARE, S, S), "expected a Mesh first"),
        (lambda: Matern(mesh(), S, S, alpha=3), "alpha 2, or 1"),
        (lambda: Mesh(mesh().triangles, mesh().points), "expected finite corners"),
        (lambda: Mesh(mesh().points, mesh().triangles + 1), "expected 0 to 8"),
        (lambda: Mesh(torch.tensor([[0.0, 0], [1, 1], [2, 2]]), torch.tensor([[0, 1, 2]])), "has no area"),
        (lambda: Mesh(torch.cat([mesh().points, torch.ones(1, 2)]), mesh().triangles), "point 9 is no corner"),
        (lambda: mesh().locate(torch.tensor([[1.0, 1.0], [50.0, 1.0]])), r"\[50.0, 1.0\] lies in no triangle"),
        (lambda: Kronecker(Lattice(S, 3, 3), ICAR(SQUARE, S)), "one dimension each"),
        (lambda: GMRF(SQUARE, torch.ones(4), torch.ones(6)), "nodes 0 to 4; expected 0 to 3"),
        (lambda: own((torch.ones(2, 5), torch.zeros(2))), "follow from one another"),
        (lambda: own((torch.ones(1, 4), torch.zeros(1))), r"expected \(m, 5\)"),
        (lambda: GMRF(SQUARE, torch.full((5,), 9.0), -torch.ones(6), SUM, intrinsic=True), "not flat along the rows"),
        (lambda: own(torch.ones(1, 5)), "a pair"),
        (lambda: RandomWalk(30, S), "the scale first"),
        (lambda: RandomWalk(S, 30, level=-1.0), "standard deviation above 0"),
        (lambda: Seasonal(S, 24, 12.0), "period=12.0"),
        (lambda: AR(PARTIAL, S, 4), "p >= 1"),
        (lambda: AR1(S, 4, 0.5), "size=0.5"),
        (lambda: OrnsteinUhlenbeck(TIMES, S, S), "do not increase"),
        (lambda: Neighbours(SQUARE, torch.ones(6)), "size is a Tensor"),
        (lambda: Mesh(mesh().points, mesh().triangles, torch.zeros(8)), "one bool for each"),
        (lambda: Mesh.delaunay(torch.arange(6.0).view(3, 2)), "not on one line"),
        (lambda: Mesh.delaunay(torch.tensor([[0.0, 0], [1, 0], [0, math.nan]])), "finite points"),
        (lambda: mesh().locate(torch.tensor([1.0, 1.0])), "places of shape"),
        (lambda: mesh().locate(torch.tensor([[math.nan, 1.0]])), "lies in no triangle"),
        (lambda: Matern(mesh(), S, S, fraction=0.0), "fraction=0.0"),
        (lambda: PCScale(0.01, 2.0), "then the probability"),
        (lambda: PCRange(-1.0, 0.5), "above 0"),
        (lambda: PCCorrelation(1.0, 0.5), "below 1"),
        (lambda: PCCorrelation(0.5, 0.4, towards=1), "between sqrt"),
        (lambda: PCCorrelation(0.5, 0.4, towards=2), "towards=2"),
    ],
)
def test_messages_for_fields(make: Callable[[], object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make()


def test_arrays_and_lists_are_taken_as_tensors() -> None:
    for size in ([0.0, 1.0, 3.0], np.array([0.0, 1.0, 3.0]), torch.tensor([0, 1, 3])):
        assert RandomWalk(S, size).structure is RandomWalk(S, torch.tensor([0.0, 1.0, 3.0])).structure
    assert RandomWalk(S, np.int64(4)).event_shape == (4,)
    assert AR(1.0, [0.5, 0.2], 4).partial.tolist() == pytest.approx([0.5, 0.2])
    same = Mesh(mesh().points.numpy(), mesh().triangles.numpy())  # type: ignore[arg-type]
    assert torch.equal(same.areas, mesh().areas)


def test_effects_of_a_field_alone_are_no_density() -> None:
    with pytest.raises(ValueError, match="mixing"):
        BYM2(SQUARE, S, 1.0)


@pytest.mark.parametrize(
    "make", [lambda x: CAR(SQUARE, S, x), lambda x: SAR(SQUARE, S, x), lambda x: Leroux(SQUARE, S, x)]
)
def test_a_coefficient_of_one_is_no_distribution(make: Callable[[float], object]) -> None:
    with pytest.raises(ValueError, match=r"strictly between .* an ICAR"):
        make(1.0)


@pytest.mark.parametrize(
    "prior",
    [PCScale(2.0, 0.1), PCRange(3.0, 0.2), PCCorrelation(0.5, 0.3), PCCorrelation(0.5, 0.7, towards=1)],
    ids=["scale", "range", "correlation to none", "correlation to one"],
)
def test_priors_integrate_to_one_and_pass_their_bound_as_often_as_said(prior: dist.TorchDistribution) -> None:
    transform = biject_to(prior.support)
    u = torch.linspace(-30.0, 30.0, 200_001, dtype=torch.float64)
    x = transform(u)
    density = (prior.log_prob(x) + transform.log_abs_det_jacobian(u, x)).exp().nan_to_num(0.0)
    assert float(torch.trapezoid(density, u)) == pytest.approx(1.0, abs=1e-5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draws = prior.sample((200_000,)).double()
    for q in (0.2, 0.5, 0.8):
        cut = draws.quantile(q)
        below = float(torch.trapezoid(torch.where(x < cut, density, 0.0), u))
        assert below == pytest.approx(q, abs=0.005)


def test_priors_pass_their_bounds_as_often_as_said() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        assert float((PCScale(2.0, 0.1).sample((100_000,)) > 2.0).double().mean()) == pytest.approx(0.1, abs=0.005)
        assert float((PCRange(3.0, 0.2).sample((100_000,)) < 3.0).double().mean()) == pytest.approx(0.2, abs=0.006)
        to_none, to_one = PCCorrelation(0.5, 0.3), PCCorrelation(0.5, 0.7, towards=1)
        assert float((to_none.sample((100_000,)).abs() > 0.5).double().mean()) == pytest.approx(0.3, abs=0.007)
        assert float((to_one.sample((100_000,)) > 0.5).double().mean()) == pytest.approx(0.7, abs=0.007)


def test_a_prior_of_a_correlation_is_smooth_at_zero() -> None:
    x = torch.tensor([0.0, 1e-9, 1e-5, 1e-4, 1e-3], dtype=torch.float64, requires_grad=True)
    value = PCCorrelation(torch.tensor(0.5).double(), 0.3).log_prob(x)
    assert bool(value.isfinite().all())
    slope = torch.autograd.grad(value.sum(), x)[0]
    assert bool(slope.isfinite().all())


def test_a_field_is_linear_within_a_triangle() -> None:
    m, places = mesh(), torch.tensor([[0.4, 0.7], [1.5, 1.2], [1.0, 1.0]]).double()
    plane = 2.0 + 3.0 * m.points[:, 0] - m.points[:, 1]
    torch.testing.assert_close(m.locate(places)(plane), 2.0 + 3.0 * places[:, 0] - places[:, 1], rtol=1e-12, atol=1e-12)


def test_determinants_have_exact_derivatives_of_two_orders() -> None:
    rho = RHO.clone().requires_grad_()
    spectrum, sparse = Neighbours(SQUARE).operator, Neighbours(SQUARE).operator

    def by_factor(rho: Tensor) -> Tensor:
        coefficients, precision = sparse.factors(1.0 - rho, rho)
        outer = coefficients.unsqueeze(-1) * coefficients.unsqueeze(-2)
        return log_det(precision[:, None, None] * outer, sparse.by_edges)

    def by_spectrum(rho: Tensor) -> Tensor:
        return spectrum.log_det(1.0 - rho, rho)

    torch.testing.assert_close(by_factor(rho), spectrum.log_det(1.0 - rho, rho), rtol=1e-12, atol=1e-12)
    for order in (1, 2):
        one: Callable[[Tensor], Tensor] = by_factor
        other: Callable[[Tensor], Tensor] = by_spectrum
        for _ in range(order):
            one, other = torch.func.grad(one), torch.func.grad(other)
        torch.testing.assert_close(one(RHO), other(RHO), rtol=1e-10, atol=1e-10)
    both = torch.func.vmap(by_factor)(torch.stack([RHO, 0.5 * RHO]))
    torch.testing.assert_close(both[1], spectrum.log_det(1.0 - 0.5 * RHO, 0.5 * RHO), rtol=1e-12, atol=1e-12)


LARGE: dict[str, Callable[[], GaussianField]] = {
    "walk": lambda: RandomWalk(S, 225, order=2, level=LEVEL),
    "autoregression": lambda: AR1(S, 0.9 * torch.ones((), dtype=torch.float64), 225),
    "graph": lambda: ICAR(lattice(15, 15), S, level=LEVEL),
    "mixed": lambda: BYM2(lattice(11, 11), S, torch.tensor(0.4, dtype=torch.float64), level=LEVEL),
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


def test_triangles_of_points_nearly_on_a_line_at_the_border_are_left_out() -> None:
    pytest.importorskip("scipy")
    x, y = torch.meshgrid(torch.arange(4.0).double(), torch.arange(4.0).double(), indexing="ij")
    points = torch.stack([x.flatten(), y.flatten()], -1)
    points[1, 0] += 1e-6  # a point of the border moves inwards: a triangle of two of its neighbours and itself
    mesh = Mesh.delaunay(points)
    assert len(mesh.triangles) == 18
    assert float(mesh.areas.sum()) == pytest.approx(9.0, abs=1e-5)


def test_the_pattern_of_a_field_at_a_level_is_not_factorised_for_its_density(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its determinant is that of the field without a level; nor do a run's modes see how that pattern is made."""
    graph, elimination, seen, plans = lattice(4, 4), constrained.elimination, list[Tensor](), list[int]()

    def counted(pattern: Pattern) -> Plan:
        before = len(seen)
        found = elimination(pattern)
        plans.append(len(seen) - before)
        return found

    def model(y: Tensor) -> None:
        x = pyro.sample("x", ICAR(graph, pyro.param("scale", torch.tensor(0.5)), level=3.0))
        pyro.sample("y", dist.Normal(x[torch.arange(16)], 1.0).to_event(1), obs=y)

    monkeypatch.setattr(constrained, "elimination", counted)
    monkeypatch.setattr(checks.Levels, "_check", lambda self, index: seen.append(index))
    LogJoint(model, (torch.randn(16),))
    assert plans == [0] and seen


def test_a_run_that_asks_for_no_density_makes_no_determinant(monkeypatch: pytest.MonkeyPatch) -> None:
    scale, graph = torch.tensor(0.5), lattice(3, 3)
    x, y = torch.meshgrid(torch.arange(3.0), torch.arange(3.0), indexing="ij")
    mesh, asked = Mesh.delaunay(torch.stack([x.flatten(), y.flatten()], -1)), list[int]()
    monkeypatch.setattr(graphs.Operator, "log_det", lambda self, b, c: [b.new_zeros(()), asked.append(0)][0])
    fields = [kind(graph, scale, 0.5) for kind in (CAR, Leroux, SAR)] + [Matern(mesh, 1.0, 1.0, a) for a in (1, 2)]
    fields.append(Kronecker(fields[0], fields[1]))
    assert not asked
    for field in fields:
        field.log_prob(torch.zeros(field.event_shape))
    assert len(asked) == 5


def test_a_large_graph_s_log_determinant_is_that_of_its_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two derivatives, and for a batch of coefficients too."""
    c = torch.tensor([0.3, 0.8, -0.4, 0.8], dtype=torch.float64)

    def found() -> list[Tensor]:
        operator, x = lattice(9, 7).operator, c.clone().requires_grad_()
        value = operator.log_det(1.0 - x, x)
        (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(slope.sum(), x)
        return [value, slope, second, torch.vmap(operator.log_det)(1.0 - c, c)]

    expected = found()
    monkeypatch.setattr(graphs, "SPECTRUM", 0)
    for actual, own in zip(found(), expected, strict=True):
        torch.testing.assert_close(actual, own, rtol=1e-10, atol=1e-10)


def test_runs_of_a_model_share_what_does_not_depend_on_scales() -> None:
    """Plans of elimination are made once for it."""
    graph, t = Neighbours(torch.tensor([[0, 1], [1, 2], [2, 0]]), 3), torch.tensor([0.0, 1.0, 2.5, 3.0])

    def made(scale: float) -> list[GaussianField]:
        s = torch.tensor(scale)
        return [RandomWalk(s, t, order=2, level=1.0), BYM2(graph, s, torch.tensor(0.5))]

    assert all(one.structure is other.structure for one, other in zip(made(0.5), made(2.0), strict=True))
    t += torch.tensor([0.0, 0.0, 0.0, 1.0])  # in place: another walk
    other = RandomWalk(0.5, t, order=2, level=1.0)
    x = torch.tensor([0.3, -0.1, 0.4, 0.2])
    torch.testing.assert_close(other.log_prob(x), RandomWalk(0.5, t.clone(), order=2, level=1.0).log_prob(x))


@pytest.mark.parametrize("kind", [SAR, Leroux, ICAR])
def test_a_field_in_single_precision_has_its_density_in_it(kind: Callable[..., GaussianField]) -> None:
    edges = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2]])
    settings = [0.7] if kind is ICAR else [0.7, 0.4]
    single, double = (kind(edges, *torch.tensor(settings, dtype=d).unbind()) for d in (torch.float32, torch.float64))
    x = double.sample()
    assert single.log_prob(x.float()).dtype is torch.float32
    torch.testing.assert_close(single.log_prob(x.float()).double(), double.log_prob(x), rtol=1e-4, atol=1e-4)


def test_edges_are_looked_at_once_until_they_are_written_into() -> None:
    edges = SQUARE.clone()
    first, again = ICAR(edges, S), BYM2(edges, S, 0.5)
    assert ICAR(edges, S).structure is first.structure
    assert lattice(3, 4) is lattice(3, 4)
    edges[-1] = torch.tensor([0, 2])
    assert ICAR(edges, S).structure.index.tolist() == edges.tolist()
    assert first.structure.index.tolist() == SQUARE.tolist()
    torch.testing.assert_close(again.log_prob(torch.zeros(2, 5)), BYM2(SQUARE, S, 0.5).log_prob(torch.zeros(2, 5)))
