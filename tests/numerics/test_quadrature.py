"""Nodes, maps and interpolated densities against moments, inverses and each other."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from pyro_evidence.numerics.quadrature import reparameterise, rules
from pyro_evidence.numerics.quadrature.densities import (
    CORRELATED,
    EDGE,
    Interpolated,
    Kriged,
    Lattice,
    Normal,
    Trend,
    extended,
    lagrange,
    spline,
)


def moment(powers: tuple[int, ...]) -> float:
    """Oracle: a mixed moment of independent standard normal numbers."""
    return math.prod(0 if p % 2 else math.prod(range(p - 1, 0, -2)) for p in powers)


def weighted(rule: rules.Rule, powers: tuple[int, ...]) -> float:
    values = (rule.nodes ** torch.tensor(powers, dtype=torch.float64)).prod(-1)
    return float((rule.log_weights.exp() * values).sum())


@pytest.mark.parametrize("num", [1, 2, 5, 9, 25])
def test_gauss_hermite_is_exact_to_its_degree(num: int) -> None:
    rule = rules.gauss_hermite(num)
    for degree in range(min(2 * num, 16)):
        assert weighted(rule, (degree,)) == pytest.approx(moment((degree,)), rel=1e-11, abs=1e-11)


def test_a_product_is_exact_on_every_axis_the_last_one_fastest() -> None:
    rule = rules.product(rules.gauss_hermite(4), 3)
    assert weighted(rule, (2, 4, 6)) == pytest.approx(moment((2, 4, 6)))
    assert torch.equal(rule.nodes[:4, 0], rule.nodes[:1, 0].expand(4))


@pytest.mark.parametrize("num_dims", range(1, 9))
def test_central_composite_designs_are_exact_to_degree_four(num_dims: int) -> None:
    rule = rules.central_composite(num_dims)
    assert len(rule.nodes) == 1 + 2 * num_dims + {5: 16, 6: 32, 7: 64, 8: 64}.get(num_dims, 2**num_dims)
    for degree in range(5):
        for axes in itertools.combinations_with_replacement(range(num_dims), degree):
            powers = tuple(axes.count(i) for i in range(num_dims))
            assert weighted(rule, powers) == pytest.approx(moment(powers), abs=1e-11)
            if degree <= 3:
                assert weighted(rules.axes_of(rule), powers) == pytest.approx(moment(powers), abs=1e-11)


def bent() -> reparameterise.AxisMap:
    parts = ([0.3, -1.0], [0.7, 2.0], [-0.6, 0.4], [0.8, 1.2])
    return reparameterise.AxisMap(*(torch.tensor(p) for p in parts))


def test_the_axis_map_has_its_inverse_and_its_slope() -> None:
    z = torch.linspace(-4.0, 4.0, 17).unsqueeze(-1).expand(-1, 2)
    torch.testing.assert_close(bent().inverse(bent().forward(z)), z)
    slopes = torch.stack([torch.autograd.functional.jacobian(bent().forward, row).logdet() for row in z])
    torch.testing.assert_close(bent().log_slope(z), slopes)


def test_the_fitted_map_makes_a_density_of_its_family_normal() -> None:
    t = torch.linspace(-4.0, 4.0, 13).expand(2, -1)
    z = bent().inverse(t.mT).mT
    each = [reparameterise.AxisMap(*(p[i : i + 1] for p in vars(bent()).values())) for i in range(2)]
    log_slope = torch.stack([one.log_slope(row.unsqueeze(-1)) for one, row in zip(each, z, strict=True)])
    found = reparameterise.fitted(t, -0.5 * z.square() - log_slope)
    for ours, exact in zip(vars(found).values(), vars(bent()).values(), strict=True):
        torch.testing.assert_close(ours, exact, rtol=2e-3, atol=2e-3)  # pulled a little to the identity


def test_a_normal_density_keeps_the_identity() -> None:
    t = torch.linspace(-3.0, 3.0, 9).expand(1, -1)
    found = reparameterise.fitted(t, -0.5 * t.square())
    for ours, exact in zip(vars(found).values(), vars(reparameterise.map_of(torch.zeros(1, 4))).values(), strict=True):
        torch.testing.assert_close(ours, exact, rtol=0, atol=1e-9)


def test_a_standardisation_goes_there_and_back() -> None:
    precision = torch.tensor([[2.0, 0.8], [0.8, 1.0]])
    where = reparameterise.standardising(torch.tensor([1.0, -2.0]), precision)
    probes = where.probes()
    along = (probes - where.centre).reshape(2, -1, 2)
    drop = -0.5 * torch.einsum("dji,ik,djk->dj", along, precision, along)
    where = where.skewed(drop.reshape(-1))
    z = torch.tensor([[0.3, -0.2], [2.0, 1.0]])
    torch.testing.assert_close(where.inverse(where.forward(z)), z)
    exact = -0.5 * precision.logdet().expand(2)
    torch.testing.assert_close(where.log_slope(z), exact)


def test_standardisations_of_many_modes_are_those_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of log Gammas; what few of them say of their probes leaves most with two steps, from the identity four."""
    generator, misfit, asked = torch.Generator().manual_seed(0), reparameterise._misfit, list[int]()

    def counted(params: Tensor, *data: Tensor) -> Tensor:
        asked.append(len(params))
        return misfit(params, *data)

    shape = 3.0 + 9.0 * torch.rand(400, 2, generator=generator)
    shape[7] = 0.05  # unlike all others: nothing is read off beyond what these have
    precision = torch.diag_embed(shape) + 0.5
    many = reparameterise.standardising(torch.zeros(400, 1, 2), precision)

    def log_density(phi: Tensor) -> Tensor:
        own = shape.unsqueeze(1)
        return (own * (phi - phi.exp())).sum(-1) - 0.25 * phi.sum(-1).square()

    def off(profile: Tensor, where: reparameterise.Standardisation) -> Tensor:
        """The squared misfit of the map of each axis."""
        target, weight = reparameterise._weighed(profile.reshape(2, -1))
        t, share = torch.tensor(reparameterise.PROBES).expand(2, -1), weight.square()
        return misfit(where.axes.params, t, target, weight, share / share.sum(-1, keepdim=True))[:, 0, 0]

    heights = log_density(many.probes())
    monkeypatch.setattr(reparameterise, "_misfit", counted)
    found, nodes = many.skewed(heights), rules.gauss_hermite(5).nodes
    assert sum(asked) < 3 * 800
    phi, log_slope = found.on_product(nodes)
    z = rules.product(rules.gauss_hermite(5), 2).nodes
    for k in (0, 7, 399):
        alone = reparameterise.standardising(torch.zeros(2), precision[k]).skewed(heights[k])
        if k == 7:  # from the identity a search is slower
            assert bool((off(heights[7], found.row(7)) <= off(heights[7], alone) + 1e-9).all())
        else:
            torch.testing.assert_close(found.row(k).axes.params, alone.axes.params, rtol=0.0, atol=1e-5)
        torch.testing.assert_close(phi[k], found.row(k).forward(z))
        torch.testing.assert_close(log_slope[k], found.row(k).log_slope(z))


def interpolated() -> Interpolated:
    """A density over two correlated axes whose log ratio to the normal is a polynomial."""
    rule = rules.gauss_hermite(7)
    z = rules.product(rule, 2).nodes
    log_ratio = ratio(z)
    log_norm = (rules.product(rule, 2).log_weights + log_ratio).logsumexp(0)
    return Interpolated(rule, (log_ratio - log_norm).reshape(7, 7))


def ratio(z: Tensor) -> Tensor:
    return 0.1 * z[:, 0] - 0.2 * z.prod(-1) - 0.05 * z[:, 0] ** 2 + 0.1 * z[:, 1] - 0.02 * z[:, 1] ** 2


def test_an_interpolated_density_is_the_polynomials() -> None:
    density, rule = interpolated(), rules.product(rules.gauss_hermite(25), 2)
    near = rule.nodes[(rule.nodes.abs() < 2.5).all(-1)]
    log_norm = rule.log_mean(ratio(rule.nodes))
    exact = ratio(near) - log_norm - 0.5 * near.square().sum(-1) - math.log(math.tau)
    torch.testing.assert_close(density.log_prob(near), exact, rtol=0, atol=4e-3)


@pytest.mark.parametrize(
    "density", [interpolated(), Normal(torch.tensor([0.4, -0.2]), torch.tensor([[0.9, 0], [0.3, 1.2]]))]
)
def test_draws_have_the_density_that_is_said(density: Interpolated | Normal) -> None:
    white = torch.randn(10_000, 2, generator=torch.Generator().manual_seed(0))
    z = density.unwhiten(white)
    assert float(z.abs().max()) <= EDGE
    weights = (density.log_prob(z) + 0.5 * z.square().sum(-1) + math.log(math.tau)).neg().exp()  # to the normal
    for values, exact in (
        (weights, 1.0),
        (weights * z[:, 0], 0.0),
        (weights * z[:, 1] ** 2, 1.0),
        (weights * z.prod(-1), 0),
    ):
        assert float(values.mean()) == pytest.approx(exact, abs=4.0 * float(values.std()) / 100.0)
    turned = density.permuted((1, 0))
    if isinstance(density, Normal):
        torch.testing.assert_close(turned.log_prob(z.flip(-1)), density.log_prob(z))
    last = density.last_given_others(z[:5, :1])
    heights = last.prob(z[:5, 1:]).squeeze(-1)
    marginal = density.permuted((0, 1)).log_prob(z[:5]) - heights.log()
    again = density.log_prob(torch.stack([z[:5, 0], z[:5, 1] + 0.3], -1))
    torch.testing.assert_close(again - last.prob(z[:5, 1:] + 0.3).squeeze(-1).log(), marginal, rtol=0, atol=5e-3)


def test_a_spline_and_a_polynomial_go_through_their_nodes() -> None:
    rules = torch.tensor([-2.0, -0.7, 0.1, 1.3, 2.5])
    for basis in (lagrange, spline):
        torch.testing.assert_close(basis(rules, rules.unsqueeze(-1)), torch.eye(5), rtol=0, atol=1e-12)
    z = torch.linspace(-2.0, 2.5, 31).unsqueeze(-1)
    cubic, line = rules**3 - rules, 2.0 * rules - 1.0
    torch.testing.assert_close(lagrange(rules, z) @ cubic, (z**3 - z)[:, 0])
    torch.testing.assert_close(spline(rules, z) @ line, (2.0 * z - 1.0)[:, 0])


def test_a_spline_does_not_magnify_rounding() -> None:
    rules = torch.linspace(-8.0, 8.0, 25)
    noise = 1e-8 * (-1.0) ** torch.arange(25.0)
    z = torch.linspace(-8.0, 8.0, 501).unsqueeze(-1)
    assert float((spline(rules, z) @ noise).abs().max()) < 3e-8
    assert float((lagrange(rules, z) @ noise).abs().max()) > 1e-5
    assert float((spline(rules, z) @ (0.3 * rules).cos() - (0.3 * z[:, 0]).cos()).abs().max()) < 2e-3


@pytest.mark.parametrize("num", [1, 7, 45, 95])
def test_small_weights_are_right_to_all_digits(num: int) -> None:  # oracle: numpy
    points, weights = np.polynomial.hermite_e.hermegauss(num)
    rule = rules.gauss_hermite(num)
    assert rule.nodes[:, 0].tolist() == pytest.approx(points.tolist(), abs=1e-12)
    log_weights = np.log(weights) - 0.5 * np.log(2.0 * np.pi)
    assert rule.log_weights.tolist() == pytest.approx(log_weights.tolist(), abs=1e-11)


def ridge() -> Lattice:
    """A density along a bow: ``x`` normal, ``y`` normal about ``x^2 / 2``; on a lattice of steps of a quarter."""
    x, y = torch.arange(-20, 21) / 4.0, torch.arange(-14, 61) / 4.0
    log_density = -0.5 * x.square().unsqueeze(-1) - 0.5 * (y - 0.5 * x.square().unsqueeze(-1)).square()
    return Lattice(0.25, torch.tensor([x[0], y[0]], dtype=torch.float64), log_density.double())


def test_a_lattice_is_a_density_and_draws_from_itself() -> None:
    density = ridge()
    cells = torch.cartesian_prod(torch.linspace(-5, 5, 101), torch.linspace(-3.5, 15, 186)).double()
    assert float(density.log_prob(cells).exp().sum() * 0.1 * 0.1) == pytest.approx(1.0, abs=2e-3)
    white = torch.randn(10_000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x, y = density.unwhiten(white).T
    assert float(x.mean()) == pytest.approx(0.0, abs=0.04) and float(x.var()) == pytest.approx(1.0, abs=0.06)
    assert float(y.mean()) == pytest.approx(0.5, abs=0.05) and float(y.var()) == pytest.approx(1.5, abs=0.12)
    assert float((y * x.square()).mean()) == pytest.approx(1.5, abs=0.2)


def dist_of_x(x: Tensor) -> Tensor:
    """Oracle: the marginal of the first coordinate."""
    return -0.5 * (x.square() + math.log(math.tau))


def test_a_lattice_knows_its_axes_in_any_order() -> None:
    density = ridge()
    z = density.unwhiten(torch.randn(50, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    torch.testing.assert_close(density.permuted((1, 0)).log_prob(z.flip(-1)), density.log_prob(z), rtol=0, atol=1e-3)
    given = density.last_given_others(z[:, :1]).log_prob(z[:, 1])
    torch.testing.assert_close(density.log_prob(z) - given, dist_of_x(z[:, 0]), rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("step", "num_dims", "ratio"), [(1.0, 1, 1.01), (1.0, 2, 1.01), (1.0, 3, 1.02), (1.5, 4, 1.06)]
)
def test_a_lattice_of_wide_steps_between_which_a_density_is_smooth(step: float, num_dims: int, ratio: float) -> None:
    axis = step * torch.arange(-4, 5, dtype=torch.float64)
    z = torch.cartesian_prod(*[axis] * num_dims).reshape([len(axis)] * num_dims + [num_dims])
    height = -0.5 * z.square().sum(-1)
    lattice = Lattice(step, axis[:1].expand(num_dims), torch.where(height > -12.0, height, -torch.inf))
    white = torch.randn(20_000, num_dims, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = lattice.unwhiten(white)
    assert bool(((drawn.std(0) / white.std(0) - 1.0).abs() < ratio - 1.0).all())
    exact = -0.5 * (drawn.square() + math.log(math.tau)).sum(-1)
    assert float((exact - lattice.log_prob(drawn)).exp().mean()) == pytest.approx(1.0, abs=0.01)


def test_what_is_added_around_a_lattice_is_no_higher_than_what_it_is_beside() -> None:
    """Where one value at the edge is far below the next one, a line through both would rise to the top again."""
    assert extended(torch.tensor([-40.0, -9.0, -1.0, -8.0])).tolist() == [-71.0, -40.0, -9.0, -1.0, -8.0, -15.0]
    assert extended(torch.tensor([-1.0, -40.0, -9.0])).tolist()[-1] == -9.0


def test_a_tilted_density_is_that_times_an_exponential() -> None:
    """Oracle: a normal density, which moves by its covariance times the slope, and is as wide as it was."""
    tril = torch.tensor([[0.9, 0.0], [0.4, 0.7]], dtype=torch.float64)
    slope, loc = torch.tensor([0.6, -0.3], dtype=torch.float64), torch.tensor([0.2, 0.1], dtype=torch.float64)
    plain, moved = Normal(loc, tril), Normal(loc + tril @ tril.mT @ slope, tril)
    rule, axis = rules.gauss_hermite(9), torch.arange(-6.0, 6.1, 0.25).double()
    nodes, points = (torch.cartesian_prod(x, x) for x in (rule.nodes[:, 0], axis))
    standard = -0.5 * (nodes.square() + math.log(math.tau)).sum(-1)
    product = Interpolated(rule, (plain.log_prob(nodes) - standard).reshape(9, 9))
    lattice = Lattice(0.25, axis[[0, 0]], plain.log_prob(points).reshape(49, 49))
    z = moved.unwhiten(rules.quasi_normal(50, 2).clamp(-2.0, 2.0))
    for density, error in ((plain, 1e-12), (product, 2e-3), (lattice, 0.07)):  # linear between points
        torch.testing.assert_close(density.tilted(slope).log_prob(z), moved.log_prob(z), rtol=0.0, atol=error)


def test_a_trend_is_exact_at_nodes_and_wherever_it_is_a_polynomial_of_its_degree() -> None:
    z = rules.product(rules.gauss_hermite(6), 2).nodes

    def value(z: Tensor) -> Tensor:
        x, y = z.unbind(-1)
        return torch.stack([1.0 + x - 2.0 * x * y**2, x**4 - y**3 + 1e3], -1)

    between = 2.0 * torch.rand(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 1.0
    found = Trend(z, value(z))
    assert torch.equal(found(z), value(z))
    torch.testing.assert_close(found(between), value(between), rtol=0.0, atol=1e-9)


def test_a_trend_does_not_run_away_beyond_its_nodes() -> None:
    z = rules.gauss_hermite(9).nodes
    found = Trend(z, z.exp())
    assert torch.equal(found(z[-1:] + 100.0), z[-1:].exp())


def test_a_trend_through_one_node_is_its_value() -> None:
    assert torch.equal(Trend(torch.zeros(1, 3), torch.ones(1, 5))(torch.ones(4, 3)), torch.ones(4, 5))


def test_a_kriged_curve_goes_through_its_nodes_and_knows_how_far_off_it_is_without_one() -> None:
    z = torch.randn(20, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    values = (z[:, :1] * 0.7).sin() + z[:, 1:].square()
    found = Kriged(z, values)
    torch.testing.assert_close(found(z), values, rtol=0.0, atol=1e-8)
    assert float(found.errors(z)[0].max()) < 1e-4
    others = [torch.arange(20) != i for i in range(20)]
    without = torch.cat([Kriged(z[kept], values[kept])(z[~kept]) for kept in others])
    weighed = found._annihilator @ values / found._annihilator.diagonal().unsqueeze(-1)  # Dubrule (1983)
    torch.testing.assert_close(values - without, weighed, rtol=1e-6, atol=1e-9)


def test_variances_of_sums_of_errors_are_those_of_the_kriging_system() -> None:  # oracle: Cressie (1993), 3.4.5
    draw = torch.Generator().manual_seed(3)
    nodes, places = (torch.randn(num, 2, generator=draw, dtype=torch.float64) for num in (20, 150))
    weights = torch.randn(2, 150, generator=draw, dtype=torch.float64)
    weights[:, 70:90] = 0.0
    found = Kriged(nodes, (nodes[:, :1] * 2.0).sin())

    def matern(x: Tensor, y: Tensor) -> Tensor:
        far = 5.0**0.5 * (x.unsqueeze(1) - y).norm(dim=-1) / CORRELATED
        return (1.0 + far + far.square() / 3.0) * (-far).exp()

    def terms(x: Tensor) -> Tensor:
        return torch.stack([x[:, 0] ** 0, x[:, 0], x[:, 1], x[:, 0] ** 2, x[:, 0] * x[:, 1], x[:, 1] ** 2], -1)

    side = terms(nodes)
    system = torch.cat([torch.cat([matern(nodes, nodes), side], 1), torch.cat([side.mT, side.new_zeros(6, 6)], 1)])
    seen = torch.cat([matern(places, nodes), terms(places)], 1)
    each = matern(places, places) - seen @ torch.linalg.solve(system, seen.mT)
    errors, variances = found.errors(places)
    scaled = weights * errors / each.diagonal().sqrt()
    torch.testing.assert_close(variances(weights), ((scaled @ each) * scaled).sum(-1), rtol=1e-6, atol=1e-9)


def test_a_kriged_curve_without_curvature_left_over_is_the_polynomial() -> None:
    z = rules.product(rules.gauss_hermite(5), 2).nodes
    found = Kriged(z, 1.0 + z[:, :1] - 0.3 * z[:, :1] * z[:, 1:])
    far = torch.tensor([[4.0, -4.0]]).double()
    assert float(found(far)) == pytest.approx(1.0 + 4.0 + 0.3 * 16.0, abs=1e-6)


def test_margins_of_very_many_dimensions_are_as_even_as_those_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scrambled Sobol points of as many would hold 900 numbers for each dimension."""
    few = rules.quasi_normal(64, 50)
    monkeypatch.setattr(torch, "_sobol_engine_scramble_", None)
    for points in (few, rules.quasi_normal(64, 5000)):
        strata = (torch.special.ndtr(points) * 64).floor().sort(0).values
        assert torch.equal(strata, torch.arange(64.0).double().unsqueeze(-1).expand_as(strata))
    assert torch.equal(points, rules.quasi_normal(64, 5000))
    assert float((points.mT @ points[:, 0] / 64)[1:].abs().max()) < 0.7  # of 4,999 independent ones: five deviations


def narrow_and_far(x: Tensor) -> Tensor:
    parts = [torch.distributions.Normal(*place).log_prob(x) for place in ((100.0, 1e-3), (0.0, 1.0))]
    return torch.logaddexp(*parts) - math.log(2.0)


def power(p: float) -> tuple[Callable[[Tensor], Tensor], float]:
    """``(1 + x^2)^-p`` and the log of its integral, a beta function."""
    return lambda x: -p * torch.log1p(x.square()), 0.5 * math.log(math.pi) + math.lgamma(p - 0.5) - math.lgamma(p)


DENSITIES = {
    "narrow and far": (narrow_and_far, 0.0),
    "corner": (lambda x: -(x - 0.3).abs(), math.log(2.0)),
    "rounded": (lambda x: (-0.5 * x.float().square()).double() + 1e6, 1e6 + 0.5 * math.log(math.tau)),
    "powers": power(0.6),
    "hardly": power(0.505),
}


@pytest.mark.parametrize("name", DENSITIES)
def test_the_whole_line(name: str) -> None:
    """Modes of unlike widths, corners, rounding, and tails of which half is beyond e^40: closed forms."""
    log_density, log_integral = DENSITIES[name]
    dtype, places = torch.float32 if name == "rounded" else torch.float64, torch.tensor([[100.0, 0.0], [1e-3, 1.0]])
    loc, sd = (each[0 if name == "narrow and far" else 1 :].double() for each in places)
    found = rules.on_line(log_density, loc, sd, 2_000, dtype)
    tolerance = 1e-6 if name == "rounded" else 1e-9
    assert found.error < tolerance
    assert float((found.log_density + found.log_length).logsumexp(0)) == pytest.approx(log_integral, abs=tolerance)
    assert len(found.x) < 4_000


def test_a_tail_that_does_not_fall_has_no_integral() -> None:
    zero, one = torch.zeros(1).double(), torch.ones(1).double()
    assert rules.on_line(power(0.5001)[0], zero, one, 2_000, torch.float64).error == math.inf
    nothing = rules.on_line(lambda x: torch.full_like(x, -math.inf), zero, one, 2_000, torch.float64)
    assert float(nothing.log_density.amax()) == -math.inf
    known = rules.on_line(lambda x: torch.where(x < 20.0, -0.1 * x.abs(), math.nan), zero, one, 2_000, torch.float64)
    assert known.error < 1.0  # where it is not known beyond twenty it goes on as it falls there
    assert float((known.log_density + known.log_length).logsumexp(0)) == pytest.approx(math.log(20.0), abs=known.error)
