"""The shape of inner densities: sections by quadrature, maps by their derivatives, draws by exact weights."""

import math
from collections.abc import Callable
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, Stop
from pyro_evidence.nested import skewness
from pyro_evidence.nested.skewness import Profiles, follow, is_normal, skewness_points
from pyro_evidence.numerics import importance
from pyro_evidence.numerics.quadrature.rules import quasi_normal
from tests.models_for_tests.long_runs import HITS, baseball
from tests.models_for_tests.sampled_scales import generated
from tests.models_for_tests.toy_density import Toy


def skewed(u: Tensor) -> Tensor:
    """Two log rates of counts, correlated by their prior."""
    a, b = u.unbind(-1)
    return 3.0 * a - a.exp() + 6.0 * b - b.exp() - (a - b).square()


def banana(u: Tensor) -> Tensor:
    a, b = u.unbind(-1)
    return -0.5 * a.square() - 2.0 * (b - 0.2 * a.square()).square()


def gaussian(u: Tensor) -> Tensor:
    return -u[..., 0].square() - 0.5 * (u[..., 1] - u[..., 0]).square()


def profiled(value: Callable[[Tensor], Tensor]) -> Profiles:
    """The mode by plain Newton steps, and the factor of its covariance."""
    density, theta, u = Toy(lambda u, _: value(u)), torch.zeros(1, 0), torch.zeros(1, 2)
    for _ in range(50):
        u = u + torch.linalg.solve(density.precision(u, theta), density.gradient(u, theta)[1])
    return Profiles(density, density, theta, u, torch.linalg.cholesky(torch.linalg.inv(density.precision(u, theta))))


GRID = torch.linspace(-6.0, 6.0, 601)


def by_quadrature(value: Callable[[Tensor], Tensor], axis: int) -> tuple[float, float]:
    """Mean and standard deviation of one coordinate."""
    a, b = torch.meshgrid(GRID, GRID, indexing="ij")
    mass = value(torch.stack([a, b], -1)).exp()
    density = mass.sum(1 - axis) / mass.sum()
    mean = float((density * GRID).sum())
    return mean, float((density * (GRID - mean).square()).sum()) ** 0.5


@pytest.mark.parametrize("axis", [0, 1])
def test_margins_have_the_moments_of_quadrature(axis: int) -> None:
    profiles = profiled(skewed)
    found = skewness.margins(profiles, torch.zeros(1, 1))
    assert found is not None
    z = quasi_normal(4096, 1)
    t = found.axes(torch.zeros(1, 1)).forward(z.expand(-1, 2))[:, axis]
    x = profiles.u[0, axis] + t * profiles.covariance[0, axis, axis].sqrt()
    mean, sd = by_quadrature(skewed, axis)
    assert abs(float(profiles.u[0, axis]) - mean) > 0.1 * sd  # Laplace's own is off
    assert float(x.mean()) == pytest.approx(mean, abs=0.01 * sd) and float(x.std()) == pytest.approx(sd, rel=0.01)


@pytest.mark.parametrize("value", [skewed, banana])
def test_bent_noise_has_the_moments_of_quadrature(value: Callable[[Tensor], Tensor]) -> None:
    profiles = profiled(value)
    bend = skewness.skewness_correction(profiles, torch.zeros(1, 1), 512)
    assert bend is not None
    white = quasi_normal(4096, 2)
    z = torch.zeros(len(white), 1)
    x = profiles.u[0] + bend.forward(z, white)[0] @ profiles.covariance_root[0].mT
    for axis in (0, 1):
        mean, sd = by_quadrature(value, axis)
        assert float(x[:, axis].mean()) == pytest.approx(mean, abs=0.02 * sd)
        assert float(x[:, axis].std()) == pytest.approx(sd, rel=0.03)


def test_bent_noise_is_worth_more_than_plain() -> None:
    one, white = profiled(skewed), quasi_normal(1024, 2)
    bend = skewness.skewness_correction(profiled(skewed), torch.zeros(1, 1), 512)
    assert bend is not None
    bent, log_growth = bend.forward(torch.zeros(len(white), 1), white)
    worth = [
        float(importance.effective_sample_size(skewness._log_weights(one, 0, t, s, white))) / len(white)
        for t, s in ((white, torch.zeros(len(white))), (bent, log_growth))
    ]
    assert worth[0] < 0.95 and worth[1] > 0.99


def some_bend(num: int, size: int, seed: int = 0) -> skewness.SkewnessCorrection:
    """Any coefficients of the right form."""
    before = torch.arange(size).unsqueeze(-1) > torch.arange(size)
    both = before.unsqueeze(-1) & before.unsqueeze(-2)
    return skewness.SkewnessCorrection(
        0.1 * generated(num, size, seed=seed),
        0.1 * generated(num, size, seed=seed + 1),
        0.1 * generated(num, size, 4, seed=seed + 2),
        0.1 * generated(num, size, size, seed=seed + 3) * before,
        0.1 * generated(num, size, size, size, seed=seed + 4) * both,
    )


def test_a_bend_is_inverted_and_says_by_how_much_volumes_grow() -> None:
    bend, z, white = some_bend(3, 4), generated(5, 1, seed=8), generated(5, 4, seed=9)
    bent, log_growth = bend.forward(z, white)
    torch.testing.assert_close(bend.inverse(z, bent), white)
    for row in range(5):
        J = torch.func.jacrev(lambda w, row=row: bend.forward(z[row : row + 1], w.unsqueeze(0))[0][0])(white[row])
        torch.testing.assert_close(torch.linalg.slogdet(J).logabsdet, log_growth[row])


def test_a_normal_density_is_left_as_it_is() -> None:
    profiles = profiled(gaussian)
    assert is_normal(profiles) and not is_normal(profiled(skewed))
    assert skewness.skewness_correction(profiles, torch.zeros(1, 1), 64) is None
    assert skewness.margins(profiles, torch.zeros(1, 1)) is None


def test_shapes_follow_the_outer_coordinates_through_the_points_where_they_were_looked_at() -> None:
    points = skewness_points(2, torch.zeros(1))[0]
    values = generated(5, 3)
    coefficients = torch.linalg.solve(follow(points, 5), values)
    torch.testing.assert_close(follow(points, 5) @ coefficients, values)
    assert len(skewness_points(4, torch.zeros(1))[0]) == 1
    far = torch.tensor([[50.0, -50.0]])
    assert torch.equal(follow(far, 5), follow(far / 10.0, 5))


def test_draws_of_a_skewed_hierarchy_need_no_weights() -> None:
    posterior = LaplaceEvidence(baseball, stop=Stop(progress=False)).run(HITS)
    found = posterior.diagnostics(1000)
    assert found["effective_sample_size"] > 980 and found["largest_mean_shift"] < 0.05
    u = posterior._unwhitened(posterior._white(20, torch.Generator().manual_seed(0)))
    white = posterior._white(20, torch.Generator().manual_seed(0))
    law = posterior.guide.gaussian
    torch.testing.assert_close(law.log_prob(u), law.density.drawn(white)[1])
    assert math.isfinite(float(law.log_prob(u + 0.1).sum()))


def test_a_model_that_takes_one_row_at_a_time_runs_for_the_shape_at_the_centre_alone() -> None:
    """Shapes at all the places that others are looked at would be seven times as many runs."""
    runs = 0

    def model(y: Tensor) -> None:
        nonlocal runs
        runs += 1
        scale = pyro.sample("scale", dist.HalfNormal(y.new_tensor(1.0)))
        with pyro.plate("groups", 2):
            u = pyro.sample("u", dist.Normal(y.new_tensor(0.0), scale))
        if bool((u > 1e6).any()):  # which a batch of rows cannot be asked
            return
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson(0.1 + u.exp().repeat(3)), obs=y)  # no linear predictor: each row is run

    posterior = LaplaceEvidence(model, stop=Stop(progress=False)).run(torch.tensor([0.0, 3, 1, 2, 0, 4]))
    runs = 0
    assert isinstance(posterior.integral.skewness_correction, skewness.SkewnessCorrection)
    assert 128 < runs < 600


@pytest.mark.parametrize(("row_bytes", "expected"), [(100, 512), (30_000, 256), (10**9, 128), (None, 128)])
def test_points_are_as_many_as_rows_are_cheap(row_bytes: int | None, expected: int) -> None:
    assert skewness.num_matched(SimpleNamespace(row_bytes=row_bytes), 3) == expected  # type: ignore[arg-type]
