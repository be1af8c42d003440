"""Other modes of small densities: found, integrated together, drawn from, by closed forms."""

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive
from torch import Tensor

from pyro_evidence import (
    BadInput,
    ImportancePosterior,
    LaplaceEvidence,
    NestedPosterior,
    NotAMode,
    Start,
    Stop,
    importance_sampling,
)
from pyro_evidence.infer import laplace_evidence
from pyro_evidence.laplace import tour
from pyro_evidence.laplace.restarts import has_one_mode
from pyro_evidence.nested import inside
from pyro_evidence.posterior import multimodal
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.posterior.multimodal import MultimodalPosterior
from pyro_evidence.precision.dense import Dense

QUIET = Stop(progress=False)
ZERO = torch.tensor(0.0)
CENTRES = torch.tensor([[3.0, -2.0], [-3.0, 1.0], [0.0, 4.0]])
SHARES = torch.tensor([0.5, 0.3, 0.2])
WIDTHS = torch.tensor([0.3, 0.6, 0.4])
X = torch.linspace(-1.0, 1.0, 12)


def hills(far: Tensor) -> None:
    """A factor that makes the posterior a mixture of three normals under a flat enough prior, of known integral."""
    w = pyro.sample("w", dist.Normal(0.0, 4.0).expand([2]).to_event(1))
    parts = dist.Normal(CENTRES, WIDTHS.unsqueeze(-1)).to_event(1).log_prob(w.unsqueeze(-2))
    pyro.factor("hills", (parts + SHARES.log()).logsumexp(-1) - dist.Normal(0.0, 4.0).log_prob(w).sum(-1) + far)


def fitted(model: object, *args: Tensor, **settings: object) -> LaplacePosterior:
    return LaplaceEvidence(model, stop=QUIET, **settings).run(*args)


@functools.cache
def on_hills() -> LaplacePosterior:
    return fitted(hills, ZERO)


# --- modes so narrow that no draw from the prior falls on them ---


def spiked(place: Tensor, width: float) -> float:
    """Log density of a half and half mixture of a narrow normal at ``place``, and a wide one at 0, under the prior."""
    parts = dist.Normal(torch.stack([place, ZERO]), torch.tensor([width**2 + 100.0, 104.0]).sqrt()).log_prob(ZERO)
    return float(parts.logsumexp(0) - math.log(2.0))


def in_a_mixture(place: Tensor, width: float, size: int = 2) -> None:
    m = pyro.sample("m", dist.Normal(0.0, 10.0).expand([size]).to_event(1))
    parts = dist.Normal(torch.stack([place, ZERO]), torch.tensor([width, 2.0]))
    of_each = dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), parts)
    pyro.factor("spike", of_each.log_prob(m).sum())


def by_a_switch(place: Tensor, width: float) -> None:
    m = pyro.sample("m", dist.Normal(0.0, 10.0))
    on = pyro.sample("on", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
    pyro.sample("t", dist.Normal(m, torch.where(on == 1, width, 2.0)), obs=on * place)


def by_logaddexp(place: Tensor, width: float) -> None:
    """Beside a slope; torch's second derivatives of logaddexp are nan far from both modes."""
    m, b = (pyro.sample(name, dist.Normal(0.0, 10.0)) for name in "mb")
    narrow, wide = dist.Normal(place, width).log_prob(m), dist.Normal(0.0, 2.0).log_prob(m)
    pyro.factor("spike", torch.logaddexp(narrow, wide) - math.log(2.0))
    pyro.sample("t", dist.Normal(b * X, 1.0).to_event(1), obs=0.5 * X)


@pytest.mark.parametrize(("place", "width"), [(5.0, 1e-5), (0.1, 0.01)])
@pytest.mark.parametrize(("model", "num"), [(in_a_mixture, 2), (by_a_switch, 1), (by_logaddexp, 1)])
def test_a_mode_that_is_narrow_beside_another_is_found(model: object, num: int, place: float, width: float) -> None:
    """Half of the mass of each number, log 2 nats, was missed in silence; also where it is inside of the wide mode."""
    posterior = fitted(model, torch.tensor(place), width)
    truth = num * spiked(torch.tensor(place), width)
    if model is by_logaddexp:
        covariance = 100.0 * torch.outer(X, X) + torch.eye(len(X))
        truth += float(dist.MultivariateNormal(torch.zeros(len(X)), covariance).log_prob(0.5 * X))
    assert len(posterior.states) == 2**num
    assert float(posterior.log_evidence) == pytest.approx(truth, abs=0.02)


def higher_of_two(far: Tensor) -> None:
    x = pyro.sample("x", dist.Uniform(-10.0, 10.0).expand([5]).to_event(1))
    first, second = (dist.Normal(*ends).expand([5]).to_event(1).log_prob(x) for ends in ((far, 0.3), (-far, 1.0)))
    pyro.factor("blobs", torch.maximum(first, second))


def test_both_of_a_maximum_are_found() -> None:
    posterior = fitted(higher_of_two, torch.tensor(4.0))
    assert float(posterior.log_evidence) == pytest.approx(math.log(2.0) - 5.0 * math.log(20.0), abs=0.02)


def signs_beside(degrees: Tensor) -> None:
    """Two modes in one coordinate, and tails that fall as ``r^-(degrees + 1)`` in another."""
    pyro.sample("t", dist.Normal(pyro.sample("a", dist.Normal(0.0, 3.0)) ** 2, 0.5), obs=torch.tensor(4.0))
    pyro.sample("b", dist.StudentT(degrees, 0.0, 1.0))


def test_each_mode_has_a_k_hat() -> None:
    """Weights of draws from a t of two degrees have a tail of shape ``(2 - degrees) / 2``; of normal modes none."""
    normal = fitted(hills, torch.tensor(0.0)).modes.rows
    assert len(normal) == 3 and all(row["k-hat"] < 0.5 for row in normal.values())
    heavy = fitted(signs_beside, torch.tensor(0.2)).modes
    assert list(heavy.columns) == ["share", "k-hat", "log evidence", "copies"]
    assert [row["k-hat"] for row in heavy.rows.values()] == pytest.approx([0.9, 0.9], abs=0.3)


@pytest.mark.parametrize("far", [0.0, -5_000.0])
def test_three_hills_have_their_integral_shares_and_moments(far: float) -> None:
    posterior = fitted(hills, torch.tensor(far))
    assert isinstance(posterior, MultimodalPosterior)
    assert float(posterior.log_evidence) == pytest.approx(far, abs=0.01)
    assert posterior.integral.log_shares.exp().tolist() == pytest.approx(SHARES.tolist(), abs=0.01)
    draws = posterior.get_samples(20_000, seed=0)["w"]
    torch.testing.assert_close(draws.mean(0), SHARES @ CENTRES, atol=0.06, rtol=0.0)
    below = SHARES @ torch.special.ndtr(-CENTRES[:, 0] / WIDTHS)
    assert float((draws[:, 0] < 0).double().mean()) == pytest.approx(float(below), abs=0.015)
    assert float(posterior.at_mode(0).log_evidence) == pytest.approx(far + math.log(0.5), abs=1e-6)


def test_a_mode_that_leaves_the_first_faint_takes_its_place() -> None:
    """Oracle: a grid.  The fit ends in the smaller of two camps of data, tens of nats below the other."""
    noise = torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.where(torch.arange(200) < 104, -6.0, 6.0) + noise

    def camps(y: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(torch.zeros((), dtype=torch.float64), 10.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Cauchy(a, 1.0), obs=y)

    x = torch.linspace(-9.0, 9.0, 20_001, dtype=torch.float64)
    density = dist.Normal(0.0, 10.0).log_prob(x) + dist.Cauchy(x.unsqueeze(-1), 1.0).log_prob(y).sum(-1)
    start = Start(values={"a": torch.tensor(6.0, dtype=torch.float64)})
    posterior = LaplaceEvidence(camps, start=start, stop=QUIET).run(y)
    assert abs(float(posterior.log_evidence - density.logsumexp(0) - (x[1] - x[0]).log())) < 0.01
    assert float(posterior.mode["a"]) < 0.0


def test_each_mode_has_its_draws_however_dear_they_are() -> None:
    posterior = on_hills()
    assert isinstance(posterior, MultimodalPosterior)
    integral = tour.integral_over(posterior.states, seed=0, price=1.0)
    assert len(integral.draws) >= 256 * len(posterior.states)
    assert abs(float(integral.log_evidence)) < 3.0 * integral.error < 0.1


def test_draws_are_those_of_the_integral_and_not_of_the_normal(capsys: pytest.CaptureFixture[str]) -> None:
    """A sector of a ring: the normal at its middle is far off, importance sampling from many is not.

    Oracle: a grid.
    """

    def sector() -> None:
        a, b = pyro.sample("a", dist.Normal(1.5, 0.6)), pyro.sample("b", dist.Normal(0.0, 1.0))
        pyro.sample("t", dist.Normal((a * a + b * b).sqrt(), 0.1), obs=torch.tensor(2.0))

    posterior = fitted(sector)
    assert isinstance(posterior, ImportancePosterior)
    assert posterior.integral.is_trusted
    capsys.readouterr()
    posterior.summary()
    said = capsys.readouterr().out
    assert f"log evidence = {float(posterior.log_evidence):.4f} nats   (+- {posterior.integral.error:.2g}, by" in said
    assert "off by" not in said and "trust neither number" not in said
    a, b = torch.meshgrid(torch.linspace(-3.0, 4.5, 1501), torch.linspace(-5.0, 5.0, 2001), indexing="ij")
    height = dist.Normal(1.5, 0.6).log_prob(a) + dist.Normal(0.0, 1.0).log_prob(b)
    mass = (height + dist.Normal((a * a + b * b).sqrt(), 0.1).log_prob(torch.tensor(2.0))).flatten().softmax(0)
    mean = torch.stack([mass @ a.flatten(), mass @ b.flatten()])
    sd = (torch.stack([mass @ a.flatten().square(), mass @ b.flatten().square()]) - mean.square()).sqrt()
    drawn = torch.stack(list(posterior.get_samples(4000, seed=1).values()))
    assert bool(((drawn.mean(1) - mean).abs() < 0.1 * sd).all())
    torch.testing.assert_close(drawn.std(1), sd, rtol=0.1, atol=0.0)
    median = torch.stack(list(posterior.median().values()))
    assert bool(((median - drawn.median(1).values).abs() < 0.1 * sd).all())


@pytest.mark.parametrize("loadings", [(1.2, 0.8), pytest.param((0.7, -1.0), marks=pytest.mark.slow)])
def test_a_number_that_multiplies_many_is_integrated_around_them(loadings: tuple[float, float]) -> None:
    """Two loadings of one factor, whose signs turn together: around one of them there is one mode, of many numbers.

    Oracle: factor and intercepts on paper, both loadings by quadrature.
    """
    generator = torch.Generator().manual_seed(3)
    w, noise = (torch.randn(30, k, generator=generator) for k in (1, 2))
    Y = torch.tensor([1.0, -0.5]) + w * torch.tensor(loadings) + 0.4 * noise

    def one_factor(Y: Tensor) -> None:
        a, b = (pyro.sample(name, dist.Normal(0.0, 1.0)) for name in "ab")
        c = pyro.sample("c", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        with pyro.plate("rows", len(Y)):
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
            pyro.sample("Y", dist.Normal(c + torch.stack([a * w, b * w], -1), 0.4).to_event(1), obs=Y)

    a = torch.cartesian_prod(*[torch.linspace(-5.0, 5.0, 161)] * 2)
    S, size = 0.16 * torch.eye(2) + a.unsqueeze(-1) * a.unsqueeze(-2), len(Y)
    rows = torch.distributions.MultivariateNormal(torch.zeros(2), S.unsqueeze(-3))
    of_mean = [
        torch.distributions.MultivariateNormal(torch.zeros(2), V) for V in (S / size + 4.0 * torch.eye(2), S / size)
    ]
    log_density = rows.log_prob(Y - Y.mean(0)).sum(-1) + dist.Normal(0.0, 1.0).log_prob(a).sum(-1)
    log_density = log_density + of_mean[0].log_prob(Y.mean(0)) - of_mean[1].log_prob(torch.zeros(2))
    truth = float(log_density.logsumexp(0)) + 2.0 * math.log(10.0 / 160.0)
    posterior = fitted(one_factor, Y)
    assert abs(float(posterior.log_evidence) - truth) < min(0.05, 3.0 * posterior.log_evidence_error)


def products(Y: Tensor) -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0).expand([Y.shape[1]]).to_event(1))
    with pyro.plate("rows", len(Y)):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("Y", dist.Normal(a * w.unsqueeze(-1), 0.4).to_event(1), obs=Y)


def made_of_products(rows: int, loadings: tuple[float, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    w, noise = (torch.randn(rows, k, generator=generator) for k in (1, len(loadings)))
    return w * torch.tensor(loadings) + 0.4 * noise


@pytest.mark.parametrize(("loadings", "rows"), [((1.2, 0.8), 12), ((0.5, 0.3, 0.2), 80), ((1.0, -0.7, 0.5), 12)])
def test_a_vector_that_multiplies_a_vector_has_all_of_its_evidence(loadings: tuple[float, ...], rows: int) -> None:
    """Blocks are exact, and what they share is by importance sampling around one image.

    Oracle: factors on paper, loadings by quadrature.
    """
    size, Y = len(loadings), made_of_products(rows, loadings)
    a = torch.cartesian_prod(*[torch.linspace(-4.5, 4.5, 91)] * size)
    scale = 1.0 + a.square().sum(-1) / 0.16  # |0.16 I + a a'| is this times |0.16 I|, Sherman-Morrison for its inverse
    square = (Y.square().sum() - (a @ Y.mT).square().sum(-1) / (0.16 * scale)) / 0.16
    log_density = -0.5 * (square + len(Y) * (scale.log() + size * math.log(0.16 * math.tau)))
    log_density = log_density + dist.Normal(0.0, 1.0).log_prob(a).sum(-1)
    truth = float(log_density.logsumexp(0)) + size * math.log(0.1)
    posterior = fitted(products, Y)
    assert len(posterior._turned) == 1
    assert abs(float(posterior.log_evidence) - truth) < min(0.06, 3.0 * posterior.log_evidence_error)


def over_directions(Y: Tensor, scale: float) -> float:
    """Log evidence of ``N(Y_ij; a_i w_j, scale^2)`` under standard normals, nats.

    ``w`` on paper, the size of ``a`` on a grid, its direction by draws from an angular central Gaussian that envelops
    the Bingham density (Kent, Ganeiber and Mardia, 2018).
    """
    (n, m), S, square = Y.shape, Y @ Y.mT, scale**2
    values = torch.linalg.eigvalsh(S)
    spread, low, high = (values[-1] - values) / (2.0 * square), 0.0, float(n)
    for _ in range(60):
        b = 0.5 * (low + high)
        low, high = (b, high) if float((1.0 / (b + 2.0 * spread)).sum()) > 1.0 else (low, b)
    shape = 1.0 + 2.0 * spread / b
    directions = torch.randn(20_000, n, generator=torch.Generator().manual_seed(0)) / shape.sqrt()
    directions = directions / directions.norm(dim=-1, keepdim=True)
    log_q = 0.5 * shape.log().sum() - 0.5 * n * (directions.square() @ shape).log()
    r = torch.arange(1, 601) / 50.0
    log_r = (n - 1) * r.log() - 0.5 * r.square() - (0.5 * n - 1.0) * math.log(2.0) - math.lgamma(0.5 * n)
    told = -0.5 * m * ((n - 1) * math.log(square) + (square + r.square()).log() + n * math.log(math.tau))
    seen = 0.5 * r.square() / (square * (square + r.square()))
    heights = told + log_r - 0.5 * S.trace() / square + (directions.square() @ values).unsqueeze(-1) * seen
    return float((heights.logsumexp(-1) - log_q).logsumexp(0)) - math.log(20_000 * 50.0)


@pytest.mark.parametrize(("num", "other", "size"), [(30, 31, 0.4), (5, 5, 1.0)])
def test_products_whose_volume_is_away_from_the_mode_or_whose_plates_have_one_length(
    num: int, other: int, size: float
) -> None:
    """Where little is seen of many the mode of either is short, and nearly all volume where they are longer."""
    generator = torch.Generator().manual_seed(0)
    a, w, noise = (torch.randn(*shape, generator=generator) for shape in ((num, 1), (other,), (num, other)))
    Y = size * a * w + 0.5 * noise

    def model(Y: Tensor) -> None:
        with pyro.plate("rows", num):
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with pyro.plate("columns", other):
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("Y", dist.Normal(a.unsqueeze(-1) * w, 0.5).to_event(2), obs=Y)

    posterior = fitted(model, Y)
    assert abs(float(posterior.log_evidence) - over_directions(Y, 0.5)) < min(0.1, 4.0 * posterior.log_evidence_error)


def test_a_product_whose_noise_is_sampled_has_a_log_evidence_where_its_images_meet() -> None:
    """With more noise the two images become one mode, at which the curvature of loadings vanishes.

    Oracle: factors on paper, loadings and noise by two million draws from the prior.
    """
    generator = torch.Generator().manual_seed(3)
    Y = (torch.randn(3, 1, generator=generator) * torch.randn(5, generator=generator)).mT
    Y = Y + 0.5 * torch.randn(3, 5, generator=generator).mT

    def model(Y: Tensor) -> None:
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
        a = pyro.sample("a", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with pyro.plate("rows", 5):
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
            pyro.sample("Y", dist.Normal(a * w.unsqueeze(-1), noise).to_event(1), obs=Y)

    a, variance = torch.randn(2_000_000, 3, generator=generator), torch.randn(2_000_000, generator=generator).square()
    size = variance + a.square().sum(-1)
    square = (Y.square().sum() - (a @ Y.mT).square().sum(-1) / size) / variance
    log_density = -0.5 * (square + 5.0 * (2.0 * variance.log() + size.log()) + 15.0 * math.log(math.tau))
    truth = float(log_density.logsumexp(0)) - math.log(2e6)
    posterior = fitted(model, Y)
    assert abs(float(posterior.log_evidence) - truth) < 0.05


def test_products_are_drawn_no_more_where_their_error_cannot_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = fitted(products, made_of_products(80, (1.2, 0.8)))
    monkeypatch.setattr(inside, "PRECISE", 0.0)
    monkeypatch.setattr(inside, "LITTLE", 0)
    monkeypatch.setattr(inside.importance, "is_beyond", lambda *_: True)
    for name in ("_left_out", "_by_inside_draws"):
        vars(posterior).pop(name, None)
    assert posterior._left_out.num_draws == 256


def test_modes_that_are_no_images_are_not_left_out_by_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An angle with two peaks of unlike height: around one mode inside, nodes of the noise would see one of them."""
    monkeypatch.setattr(tour.ModeIntegral, "is_trusted", False)
    t = torch.tensor([1.9, 2.1, 2.0, 2.05])

    def peaks(t: Tensor) -> None:
        angle, noise = pyro.sample("angle", dist.Uniform(0.0, math.tau)), pyro.sample("noise", dist.HalfNormal(1.0))
        size = pyro.sample("size", dist.Normal(0.0, 3.0))
        with pyro.plate("data", len(t)):
            pyro.sample("t", dist.Normal(size * (2.0 * angle).cos() + 0.05 * angle.sin(), noise), obs=t)

    posterior = fitted(peaks, t)
    assert isinstance(posterior, MultimodalPosterior)
    assert posterior.has_unlike_modes


@pytest.mark.parametrize(("size", "seed"), [(0.0, 1), pytest.param(0.4, 3, marks=pytest.mark.slow)])
def test_a_period_of_a_wave_that_is_hardly_there_is_as_under_its_prior(size: float, seed: int) -> None:
    """Where the wave vanishes, period and phases are free, far from the mode, and that holds a part of the evidence.

    Oracle: the offset on paper, under a prior that is flat where data see it; all else on a grid.
    """
    t, noise = torch.linspace(0.0, 60.0, 40), torch.randn(40, generator=torch.Generator().manual_seed(seed))
    y = 5.0 + size * (math.tau * t / 10.4 + 1.0).cos() + noise

    def wave(period: Tensor, phase: Tensor, place: Tensor) -> Tensor:
        angle = math.tau * t / (9.0 + 3.0 * period) + phase
        return angle.cos() + 0.3 * (2.0 * angle + place).cos()

    def periodic(y: Tensor) -> None:
        offset = pyro.sample("offset", dist.Uniform(-1000.0, 1000.0))
        scale, period = (pyro.sample(name, dist.Uniform(0.0, 1.0)) for name in ("scale", "period"))
        phase, place = (pyro.sample(name, dist.Uniform(0.0, math.tau)) for name in ("phase", "place"))
        mean = offset + torch.expm1(math.log(1000.0) * scale) * wave(period, phase, place)
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    def inner(a: Tensor, b: Tensor) -> Tensor:
        """Of deviations from the mean."""
        return (a * b).sum(-1) - a.sum(-1) * b.sum(-1) / len(y)

    cells, num = (torch.arange(50) + 0.5) / 50, 20
    angles = math.tau * torch.arange(num) / num
    amplitude = torch.expm1(math.log(1000.0) * (torch.arange(600) + 0.5) / 1000)  # beyond 62 there is no mass
    g = wave(cells[:, None, None, None], angles[:, None, None], angles[:, None])
    fit = inner(g, y).unsqueeze(-1) * amplitude - 0.5 * inner(g, g).unsqueeze(-1) * amplitude.square()
    at_none = 0.5 * (math.log(math.tau / len(y)) - len(y) * math.log(math.tau) - float(inner(y, y)))
    truth = at_none - math.log(2000.0) + float(fit.flatten().logsumexp(0)) - math.log(50 * num**2 * 1000)
    posterior = fitted(periodic, y)
    assert posterior.integral.is_trusted
    assert abs(float(posterior.log_evidence) - truth) < min(0.025, 3.0 * posterior.log_evidence_error)


def test_the_guide_draws_from_all_modes() -> None:
    posterior = on_hills()
    pyro.set_rng_seed(0)
    drawn = Predictive(posterior.model, guide=posterior.guide, num_samples=4_000, parallel=True)(ZERO)["w"]
    torch.testing.assert_close(drawn.squeeze().mean(0), SHARES @ CENTRES, atol=0.15, rtol=0.0)


def test_a_file_has_all_modes(tmp_path: Path) -> None:
    posterior = on_hills()
    posterior.save(tmp_path / "hills.posterior")
    loaded = MultimodalPosterior.load(tmp_path / "hills.posterior", hills)
    torch.testing.assert_close(loaded.log_evidence, posterior.log_evidence)
    torch.testing.assert_close(loaded.quantiles(0.2), posterior.quantiles(0.2))


def test_a_file_is_opened_where_draws_move_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another processor, whose rounding accepts other moves: the integral is the same within its error."""
    posterior = on_hills()
    posterior.save(tmp_path / "hills.posterior")
    monkeypatch.setattr(multimodal, "SEED", 17)
    loaded = MultimodalPosterior.load(tmp_path / "hills.posterior", hills)
    assert 1e-6 < abs(float(loaded.log_evidence - posterior.log_evidence)) < 5.0 * float(loaded.log_evidence_error)


def product(t: Tensor) -> None:
    """Two factors whose signs turn together."""
    a, b = (pyro.sample(name, dist.Normal(0.0, 1.0)) for name in "ab")
    with pyro.plate("data", len(t)):
        pyro.sample("t", dist.Normal(a * b, 0.2), obs=t)


def test_signs_that_turn_together_are_two_modes_of_long_ridges() -> None:
    """The log evidence by quadrature over both factors."""
    t = torch.tensor([1.4, 1.6, 1.5])
    posterior = fitted(product, t)
    x = torch.linspace(-7.0, 7.0, 1401)
    a, b = torch.meshgrid(x, x, indexing="ij")
    log_joint = dist.Normal(0.0, 1.0).log_prob(a) + dist.Normal(0.0, 1.0).log_prob(b)
    log_joint = log_joint + dist.Normal((a * b).unsqueeze(-1), 0.2).log_prob(t).sum(-1)
    truth = float(log_joint.flatten().logsumexp(0)) + 2.0 * math.log(0.01)
    assert isinstance(posterior, MultimodalPosterior)
    assert len(posterior.states) == 2
    assert posterior.integral.weighed.pareto_k < 0.7
    assert posterior.log_evidence_error < 0.05
    assert float(posterior.log_evidence) == pytest.approx(truth, abs=3.0 * posterior.log_evidence_error)
    signs = posterior.get_samples(2_000, seed=0)["a"] > 0
    assert float(signs.double().mean()) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("dims", [pytest.param(2, marks=pytest.mark.slow), 5])
def test_rings_without_any_normal_mode_are_integrated(dims: int) -> None:
    """Two shells of radius 2 in a box of side 12: the surface of both over the volume, and the width's second order."""

    def shells() -> None:
        x = pyro.sample("x", dist.Uniform(-6.0, 6.0).expand([dims]).to_event(1))
        away = torch.stack([(x + s * 3.5 * torch.eye(dims)[0]).square().sum(-1).sqrt() for s in (-1.0, 1.0)])
        pyro.factor("shells", dist.Normal(2.0, 0.1).log_prob(away).logsumexp(0))

    r = torch.linspace(1.0, 3.0, 20_001, dtype=torch.float64)
    weight = (dist.Normal(2.0, 0.1).log_prob(r) + (dims - 1) * r.log()).exp()
    area = math.log(2.0) + 0.5 * dims * math.log(math.pi) - math.lgamma(0.5 * dims)
    truth = math.log(2.0) + area + float(torch.trapezoid(weight, r).log()) - dims * math.log(12.0)
    posterior = fitted(shells)
    assert isinstance(posterior, ImportancePosterior)
    assert posterior.integral.is_trusted
    assert float(posterior.log_evidence) == pytest.approx(truth, abs=0.05)


def test_the_integral_of_one_coordinate_is_far_better_than_random_draws() -> None:
    """The scale of ten normal numbers under Jeffreys' prior: a gamma function."""
    t = torch.tensor([1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4], dtype=torch.float64)

    def spread(t: Tensor) -> None:
        scale = pyro.sample("log_scale", dist.Uniform(-10.0, 10.0)).exp()
        with pyro.plate("data", len(t)):
            pyro.sample("t", dist.Normal(0.0, scale), obs=t)

    truth = math.lgamma(5.0) - 5.0 * math.log(math.pi * float(t.square().sum())) - math.log(40.0)
    assert float(fitted(spread, t).log_evidence) == pytest.approx(truth, abs=5e-4)


def test_a_single_mode_that_is_no_normal_is_integrated_and_saved(tmp_path: Path) -> None:
    """The evidence of a Cauchy prior and nothing else is one; by Laplace it is sqrt(2 / pi) of that or so."""

    def heavy(o: Tensor) -> None:
        pyro.sample("x", dist.StudentT(2.0, torch.zeros(2), 1.0).to_event(1))
        pyro.sample("o", dist.Bernoulli(1.0 - 1e-16), obs=o)

    posterior = fitted(heavy, torch.tensor(1.0))
    assert isinstance(posterior, ImportancePosterior)
    assert len(posterior.states) == 1
    assert posterior.log_evidence_error < 0.01
    assert abs(float(posterior.log_evidence)) < 0.02
    assert float(posterior.at_mode(0).log_evidence) < -0.3
    estimate = importance_sampling(posterior)
    assert estimate.reliable
    assert abs(estimate.log_evidence) < 0.02
    posterior.save(tmp_path / "heavy.posterior")
    loaded = ImportancePosterior.load(tmp_path / "heavy.posterior", heavy)
    torch.testing.assert_close(loaded.log_evidence, posterior.log_evidence)


CLUSTERS = torch.tensor([-12.0, -7.0, -2.0, 3.0, 8.0, 13.0])


def means_of(num: int) -> object:
    def model(t: Tensor) -> None:
        with pyro.plate("components", num):
            m = pyro.sample("m", dist.Normal(0.0, 5.0))
        with pyro.plate("data", len(t)):
            k = pyro.sample("k", dist.Categorical(torch.ones(num)), infer={"enumerate": "parallel"})
            pyro.sample("t", dist.Normal(m[k], 1.0), obs=t)

    return model


def log_sum_over_partitions(t: Tensor, num: int) -> float:
    """Oracle: each way to put data into at most ``num`` clusters, its integral, and its number of labellings."""

    @functools.cache
    def of_cluster(members: tuple[int, ...]) -> float:
        size = len(members)
        covariance = 25.0 * torch.ones(size, size) + torch.eye(size)
        return float(dist.MultivariateNormal(torch.zeros(size), covariance).log_prob(t[list(members)]))

    def terms(i: int, clusters: tuple[tuple[int, ...], ...]) -> Iterator[float]:
        if i == len(t):
            labellings = math.lgamma(num + 1) - math.lgamma(num - len(clusters) + 1)
            yield sum(map(of_cluster, clusters)) + labellings - len(t) * math.log(num)
            return
        for j, cluster in enumerate(clusters):
            yield from terms(i + 1, (*clusters[:j], (*cluster, i), *clusters[j + 1 :]))
        if len(clusters) < num:
            yield from terms(i + 1, (*clusters, (i,)))

    return float(torch.tensor(list(terms(0, ()))).logsumexp(0))


@pytest.mark.parametrize(("num", "data"), [(3, 6), (4, 4), pytest.param(6, 6, marks=pytest.mark.slow), (6, 1)])
def test_all_labellings_of_components_are_counted(num: int, data: int) -> None:
    """Of three by their modes, of six by one order of 720, and where one mode holds all orders, once."""
    t = CLUSTERS[:data] if data > 1 else torch.tensor([0.3])
    posterior = fitted(means_of(num), t)
    assert isinstance(posterior, ImportancePosterior)
    assert posterior.integral.is_trusted
    assert (posterior.integral.exchange is not None) == (num == data)
    assert posterior.log_evidence_error < 0.02
    truth = log_sum_over_partitions(t, num)
    assert float(posterior.log_evidence) == pytest.approx(truth, abs=0.02 + 2.0 * posterior.log_evidence_error)
    if num == data:
        assert posterior.integral.log_copies == pytest.approx(math.lgamma(num + 1))
        assert f"counts all {math.factorial(num)} orders" in " ".join(posterior._notes(0.0))
        drawn = posterior.get_samples(4_000, seed=0)["m"]
        torch.testing.assert_close(drawn.mean(0), t.mean().expand(num), atol=0.6, rtol=0.0)
        assert posterior.relative_ess > 0.5


@pytest.mark.parametrize(
    ("num", "data"), [(4, [-7.0, -6.0, 7.0]), pytest.param(6, [-4.0, 4.0], marks=pytest.mark.slow)]
)
def test_components_without_data_are_integrated_over_their_prior(num: int, data: list[float]) -> None:
    """Of more components than data some are as under their prior, far from all modes."""
    t = torch.tensor(data)
    posterior = fitted(means_of(num), t)
    assert isinstance(posterior, ImportancePosterior)
    assert posterior.integral.is_trusted
    assert posterior.integral.error < 0.02
    truth = log_sum_over_partitions(t, num)
    assert float(posterior.log_evidence) == pytest.approx(truth, abs=0.01 + 2.0 * posterior.integral.error)


def test_a_corner_of_a_simplex_is_found_by_draws_from_the_prior() -> None:
    """Two hills in the logit of a share of a Dirichlet, whose Beta density is divided out: the evidence is one.

    That in the corner is no image of the other, and far from all places within two of the centre.
    """

    def corner(o: Tensor) -> None:
        share = pyro.sample("p", dist.Dirichlet(torch.tensor([1.0, 0.3, 0.3])))[..., 0]
        z = share.logit()
        hills = torch.logaddexp(dist.Normal(0.0, 0.3).log_prob(z), dist.Normal(7.0, 0.3).log_prob(z)) - math.log(2.0)
        prior = dist.Beta(1.0, 0.6).log_prob(share) + share.log() + (-share).log1p()
        pyro.factor("hills", hills - prior)
        pyro.sample("o", dist.Bernoulli(1.0 - 1e-16), obs=o)

    posterior = fitted(corner, torch.tensor(1.0), start=Start(restarts=1))
    assert isinstance(posterior, MultimodalPosterior)
    assert posterior.integral.log_shares.exp().tolist() == pytest.approx([0.5, 0.5], abs=0.02)
    assert float(posterior.log_evidence) == pytest.approx(0.0, abs=0.02)


def heavy_tailed(y: Tensor) -> None:
    """One mode that is not proved to be alone."""
    w = pyro.sample("w", dist.StudentT(4.0, torch.zeros(2), 2.5).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=w[..., 0:1] + w[..., 1:2] * X), obs=y)


def test_where_there_is_one_mode_nothing_is_climbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tour looks at the density between its places and the mode before it pays for searches from them."""

    def search(*_: object, **__: object) -> None:
        raise AssertionError("a tour of one mode has climbed")

    single = fitted(heavy_tailed, (X > 0.2).double(), start=Start(tour=0))
    assert not has_one_mode(single.state.problem, single.state.u, single.state.theta)
    monkeypatch.setattr(tour, "search_modes", search)
    assert len(tour.tour(single.state, 1_000, seed=0)[0]) == 1
    several = fitted(hills, ZERO, start=Start(tour=0))
    with pytest.raises(AssertionError, match="has climbed"):
        tour.tour(several.state, 1_000, seed=0)


def test_errors_of_laplace_that_cancel_do_not_make_its_draws_right() -> None:
    """A heavy and a light tail: the log evidence is right by chance, the 99 % quantile of Student's t is not."""
    x = torch.linspace(-8.0, 8.0, 4001, dtype=torch.float64)
    light = -0.19332 * x**4

    def two() -> None:
        pyro.sample("a", dist.StudentT(3.0, 0.0, 1.0))
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        pyro.factor("light", -0.19332 * b**4)

    posterior = fitted(two)
    exact = float(torch.trapezoid((light - 0.5 * x.square()).exp(), x).log()) - 0.5 * math.log(math.tau)
    assert abs(float(posterior.state.log_evidence) - exact) < 1e-3
    assert abs(float(posterior.log_evidence) - exact) < 0.01
    assert float(posterior.get_samples(20_000, seed=0)["a"].quantile(0.99)) == pytest.approx(4.541, rel=0.1)


def test_one_mode_alone_when_no_tour_is_asked_for() -> None:
    assert type(fitted(hills, ZERO, start=Start(tour=0, restarts=1))) is LaplacePosterior


def test_a_mode_that_is_not_there_is_refused() -> None:
    posterior = on_hills()
    assert isinstance(posterior, MultimodalPosterior)
    with pytest.raises(BadInput, match="expected the number of a mode, 0 to 2"):
        posterior.at_mode(3)


def regression(family: str) -> object:
    def model(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        eta = w[..., 0:1] + w[..., 1:2] * X
        likelihood = {
            "bernoulli": lambda: dist.Bernoulli(logits=eta),
            "poisson": lambda: dist.Poisson(eta.exp()),
            "normal": lambda: dist.Normal(eta, 0.5),
            "gamma": lambda: dist.Gamma(2.0, (-eta).exp()),
            "noise": lambda: dist.Normal(0.2, eta.exp()),
            "student": lambda: dist.StudentT(3.0, eta, 0.1),
        }[family]()
        with pyro.plate("data", len(y)):
            pyro.sample("y", likelihood, obs=y)

    return model


@pytest.mark.parametrize(
    ("family", "one"), [("bernoulli", 1), ("poisson", 1), ("normal", 1), ("gamma", 1), ("noise", 1), ("student", 0)]
)
def test_log_concave_likelihoods_under_normal_priors_have_one_mode(family: str, one: int) -> None:
    y = (X > 0.2).double() + (0.5 if family == "gamma" else 0.0)
    state = fitted(regression(family), y, start=Start(tour=0)).state
    assert has_one_mode(state.problem, state.u, state.theta) == bool(one)


# --- modes of what is inside an integral over a scale ---

NOISY = torch.linspace(-0.6, 0.8, 8)
FEW_NOISY = torch.tensor([1.29, 0.5, 1.93, -0.42, -1.12, -1.11])


def wave(t: Tensor) -> None:
    """Modes on both sides of each top of a wave, none an image of another; the scale of the noise is integrated."""
    a, s = pyro.sample("a", dist.Normal(0.3, 1.5)), pyro.sample("s", dist.HalfNormal(1.0))
    with pyro.plate("data", len(t)):
        pyro.sample("t", dist.Normal((2.0 * a).cos() + 0.2, s), obs=t)


def two_camps(t: Tensor) -> None:
    """One mode where the scale is large, two where it is small: Laplace's evidence is infinite where they part."""
    a, s = pyro.sample("a", dist.Normal(0.0, 5.0)), pyro.sample("s", dist.HalfNormal(1.0))
    with pyro.plate("data", len(t)):
        pyro.sample("t", dist.StudentT(1.5, a, s), obs=t)


def bend(t: Tensor) -> None:
    """Of one sharp mode at the mode of the scale, and of another, near zero, where the scale is large."""
    a, s = pyro.sample("a", dist.Normal(0.0, 1.0)), pyro.sample("s", dist.HalfNormal(1.0))
    with pyro.plate("data", len(t)):
        pyro.sample("t", dist.Normal(a**3 - a, s), obs=t)


@pytest.mark.parametrize(
    ("model", "t", "of_data"),
    [
        (bend, 1.2 + 0.3 * FEW_NOISY, lambda a, s, t: dist.Normal(a**3 - a, s).log_prob(t)),
        (wave, NOISY, lambda a, s, t: dist.Normal((2.0 * a).cos() + 0.2, s).log_prob(t)),
        (
            two_camps,
            torch.cat([NOISY[::2] - 4.0, NOISY[::2] + 4.0]),
            lambda a, s, t: dist.StudentT(1.5, a, s).log_prob(t),
        ),
    ],
)
def test_modes_inside_an_integral_are_counted(model: Any, t: Tensor, of_data: Callable[..., Tensor]) -> None:
    posterior = fitted(model, t.double())
    a, z = torch.meshgrid(torch.linspace(-12.0, 12.0, 2401), torch.linspace(-5.0, 2.0, 281), indexing="ij")
    s = z.exp()
    loc, scale = {wave: (0.3, 1.5), bend: (0.0, 1.0), two_camps: (0.0, 5.0)}[model]
    height = dist.Normal(loc, scale).log_prob(a)
    height = height + dist.HalfNormal(1.0).log_prob(s) + z + sum(of_data(a, s, x) for x in t.double())
    exact = float(height.flatten().logsumexp(0)) + math.log(0.01 * 0.025)
    assert float(posterior.log_evidence) == pytest.approx(exact, abs=0.02)
    assert len(posterior.states) > 1


def test_modes_inside_that_are_not_counted_are_said() -> None:
    posterior = fitted(wave, NOISY.double(), marginalise=["s"])
    (said,) = posterior.diagnostics()["failed_restarts"]
    assert "there are other modes, which hold 0." in said
    assert not fitted(wave, NOISY.double(), start=Start(tour=0), marginalise=["s"]).failures


def test_modes_that_restarts_have_reached_are_said_where_a_tour_costs_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laplace_evidence, "can_tour", lambda state: False)
    (said,) = fitted(wave, NOISY.double()).failures
    assert "there are other modes, which hold 0." in said


def test_where_no_draw_has_a_weight_the_integral_around_one_mode_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws of many modes may miss the one order of elements that is integrated, as of a network's hidden units."""

    def product(t: Tensor) -> None:
        a, b = (pyro.sample(name, dist.Normal(0.0, 1.0)) for name in "ab")
        s = pyro.sample("s", dist.HalfNormal(1.0))
        with pyro.plate("data", len(t)):
            pyro.sample("t", dist.Normal(a * b, s), obs=t)

    monkeypatch.setattr(tour.ActiveDensity, "log_joint_or_nan", lambda self, x: torch.full_like(x[:, 0], -math.inf))
    posterior = fitted(product, NOISY.double() + 2.0)
    assert isinstance(posterior, NestedPosterior) and posterior.marginalised_sites == ("s",)
    with pytest.raises(NotAMode, match="-inf or nan at all 1000 draws"):
        importance_sampling(posterior, num_samples=1000)


def sums_of_angles(t: Tensor) -> None:
    """Ridges around a torus: the integral of a density of sums of uniform angles is that of uniform ones."""
    a, b = (pyro.sample(n, dist.Uniform(0.0, math.tau).expand([4]).to_event(1)) for n in "ab")
    pyro.sample("t", dist.VonMises(a + b, 20.0).to_event(1), obs=t)


def test_angles_of_one_site_are_replaced_by_their_sums_where_these_are_what_data_see() -> None:
    posterior = fitted(sums_of_angles, torch.linspace(-2.0, 2.0, 4))
    assert float(posterior.log_evidence) == pytest.approx(-4.0 * math.log(math.tau), abs=0.02)


def test_densities_that_are_level_at_an_end_are_integrated_to_it() -> None:
    """Numbers whose logarithms have a Gamma distributed sum, beside two modes."""
    num, t = 30, torch.tensor(4.0)

    def model(t: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(0.0, 2.0))
        with pyro.plate("numbers", num):
            x = pyro.sample("x", dist.Beta(3.0, 1.0))
        pyro.sample("t", dist.Normal(a.square() - 0.1 * x.log().sum(), 0.3), obs=t)

    total, a = torch.linspace(1e-3, 40.0, 4001), torch.linspace(-8.0, 8.0, 1601)
    rows = dist.Normal(a.square() + 0.1 * total.unsqueeze(-1), 0.3).log_prob(t) + dist.Normal(0.0, 2.0).log_prob(a)
    known = torch.trapezoid(dist.Gamma(num, 3.0).log_prob(total).exp() * torch.trapezoid(rows.exp(), a), total).log()
    assert float(fitted(model, t).log_evidence) == pytest.approx(float(known), abs=0.05)


@pytest.mark.parametrize("spread", [6.0, 2.0, 1.0])
def test_particles_that_walk_to_a_density_tell_its_integral_and_how_well(spread: float) -> None:
    """A plateau between -10 and 10 along one axis, normal across it: the narrower the start, the less is known."""

    def heights(x: Tensor) -> tuple[Tensor, Tensor]:
        value = -((x[:, 0] / 10.0) ** 8) - 0.5 * x[:, 1:].square().sum(-1)
        return value, value

    precision = Dense(torch.tensor([spread, 1.2, 1.2, 1.2]).reciprocal().diag().unsqueeze(0))
    start = tour.NormalMixture(torch.zeros(1), torch.zeros(1, 4), (precision,), torch.ones(4).bool(), (False,))
    draws, log_joint, log_evidence, error = tour._walked(start, heights, 4, seed=0)
    known = math.log(20.0) + math.lgamma(1.125) + 1.5 * math.log(math.tau)
    assert abs(float(log_evidence) - known) < 2.0 * error < 2.0 / spread
    assert torch.equal(log_joint, heights(draws)[0])
    variance = 100.0 * math.gamma(0.375) / math.gamma(0.125)
    assert spread == 1.0 or float(draws[:, 0].var()) == pytest.approx(variance, rel=0.1)


def test_particles_of_which_none_is_where_a_density_is_tell_nothing() -> None:
    def nothing(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, 0], torch.full_like(x[:, 0], -math.inf)

    start = tour.NormalMixture(
        torch.zeros(1), torch.zeros(1, 2), (Dense(torch.eye(2).unsqueeze(0)),), torch.ones(2).bool(), (False,)
    )
    assert not tour._walked(start, nothing, 2, seed=0)[-1] < math.inf


def test_particles_that_have_not_reached_all_ridges_do_not_vouch_for_their_integral(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("angles", "on_intervals"):
        monkeypatch.setattr(tour, name, lambda joint, *_: torch.zeros(joint.latents.size) > 0)
    posterior = fitted(sums_of_angles, torch.linspace(-2.0, 2.0, 4))
    gap = float(posterior.log_evidence) + 4.0 * math.log(math.tau)
    assert abs(gap) < 2.0 * float(posterior.log_evidence_error)


def bent(t: Tensor) -> None:
    """Ridges along parabolas: a normal's weights have no variance, and say little of how far off they are."""
    a, b = (pyro.sample(n, dist.Normal(0.0, s).expand([4]).to_event(1)) for n, s in (("a", 1.0), ("b", 3.0)))
    pyro.sample("t", dist.Normal(b - a.square(), 0.2).to_event(1), obs=t)


def funnel(t: Tensor) -> None:
    scale = pyro.sample("log_scale", dist.Normal(0.0, 1.5)).exp()
    x = pyro.sample("x", dist.Normal(0.0, 1.0).expand([len(t)]).to_event(1))
    pyro.sample("t", dist.Normal(x * scale, 0.3).to_event(1), obs=t)


LINE = torch.linspace(-12.0, 12.0, 20_001).double()
NUMBERS = torch.linspace(-0.6, 0.6, 20).double()
OF_BENT = dist.Normal(0.0, 1.0).log_prob(LINE) + dist.Normal(0.0, 9.04**0.5).log_prob(LINE.square())
OF_FUNNEL = dist.Normal(0.0, ((2.0 * LINE).exp() + 0.09).sqrt().unsqueeze(-1)).log_prob(NUMBERS).sum(-1)
OF_FUNNEL = OF_FUNNEL + dist.Normal(0.0, 1.5).log_prob(LINE)


@pytest.mark.parametrize(
    ("model", "t", "seed", "copies", "rows"),
    [(bent, torch.zeros(4), 1000, 4.0, OF_BENT), (funnel, NUMBERS, 4000, 1.0, OF_FUNNEL)],
)
def test_where_weights_have_no_variance_particles_tell_the_integral(
    model: Callable[..., None], t: Tensor, seed: int, copies: float, rows: Tensor
) -> None:
    """The second ones go on walking, since they have not reached all at first."""
    known = copies * float(torch.trapezoid(rows.exp(), LINE).log())
    modes, exchange = tour.tour(fitted(model, t.double()).state, None, 0)
    integral = tour.integral_over(modes, seed, exchange=exchange, price=2.0 * tour.LITTLE).after_walk
    assert abs(float(integral.log_evidence) - known) < 2.5 * integral.error


def test_particles_that_fail_leave_an_integral_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    modes, _ = tour.tour(fitted(bent, torch.zeros(4).double()).state, None, 0)
    integral = tour.integral_over(modes, 1000, price=2.0 * tour.LITTLE)
    assert integral.walks_by is not None
    monkeypatch.setattr(tour, "_walked", lambda *_: (integral.x, integral.log_joint, torch.tensor(0.0), 0.6))
    assert not integral.after_walk.is_trusted and integral.after_walk.method == "importance sampling"
