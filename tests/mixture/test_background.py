"""A uniform density beside the kernels, in the Pyro model itself, so that every way to the evidence agrees."""

import math
from functools import partial
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import BadInput, EvidenceEM, Start
from pyro_evidence.compare import learning_curve
from pyro_evidence.infer.laplace_evidence import LaplaceEvidence
from pyro_evidence.mixture import GreedyDeletion
from pyro_evidence.mixture.density import MixtureDensity
from pyro_evidence.mixture.posterior import MixturePosterior
from pyro_evidence.mixture.updates import Update, corrected
from pyro_evidence.models import marginalised, with_background
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.mixture import FullNoise, SharedNoise, gaussian_mixture, linear_mixture
from pyro_evidence.models.regression import Learned
from pyro_evidence.program.distributions import Background
from pyro_evidence.program.log_joint import LogJoint, Model
from tests.models_for_tests.mixture_cases import assert_approx, same_as_generic

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def blobs(num_outliers: int = 8) -> Tensor:
    """Two blobs of standard deviation 0.5, 60 data each, and outliers all over a much larger square."""
    generator = torch.Generator().manual_seed(0)
    Y = 0.5 * torch.randn(120, 2, generator=generator)
    Y[60:] += 5.0
    return torch.cat([Y, 60.0 * torch.rand(num_outliers, 2, generator=generator) - 30.0])


def fit(model: Model, *args: Tensor, **settings: object) -> MixturePosterior:
    found = EvidenceEM(model, **settings).run(*args)  # type: ignore[arg-type]
    assert isinstance(found, MixturePosterior)
    return found


def test_outliers_do_not_inflate_kernels() -> None:
    without = fit(gaussian_mixture(2), blobs(), deletion=GreedyDeletion(splits=0))
    found = fit(with_background(gaussian_mixture(4)), blobs())
    assert found.num_components == 2
    scale = found.hyperparameters["beta"].rsqrt()[found.active]
    assert float((scale / 0.5 - 1.0).abs().max()) < 0.25
    assert float(without.hyperparameters["beta"].rsqrt()[without.active].max()) > 5.0
    owned = found.responsibilities().sum(-1)
    assert float(owned[:120].mean()) > 0.99 and float(owned[120:].max()) < 0.01
    assert float(found.log_evidence) > float(without.log_evidence) + 100.0


def test_log_density_is_that_of_the_formula_in_the_box_and_outside() -> None:
    Y = blobs()
    found = fit(with_background(gaussian_mixture(3), 0.1), Y)
    low, high, new = Y.amin(0), Y.amax(0), torch.tensor([[0.1, 0.2], [200.0, 0.0], [20.0, 20.0]])
    each = dist.Normal(found.mode["w"], found.hyperparameters["beta"].rsqrt()).to_event(1)
    kernels = 0.9 * (found.hyperparameters["mixing"] * each.log_prob(new.unsqueeze(-2)).exp()).sum(-1)
    uniform = 0.1 / (high - low).prod() * torch.tensor([1.0, 0.0, 1.0])
    assert_exact(found.log_prob(new).exp(), kernels + uniform)
    assert_exact(found.responsibilities(new[[0, 2]]).sum(-1), (kernels / (kernels + uniform))[[0, 2]])
    assert_exact(found.log_prob(new[:1]), found.log_prob(new)[:1])  # the box is that of the training data
    assert_exact(found.log_prob(), found.log_prob(Y))


@pytest.mark.parametrize("noise", [None, SharedNoise(), FullNoise()])
@pytest.mark.parametrize("update", [None, corrected])
def test_the_posterior_is_laplaces_of_the_pyro_model(noise: SharedNoise | FullNoise | None, update: Update) -> None:
    """Oracle: the generic Laplace approximation of the model with its background, by autograd."""
    model = gaussian_mixture(3, **({} if noise is None else {"noise": noise}))  # type: ignore[arg-type]
    found = fit(with_background(model), blobs(), **({} if update is None else {"update": update}))
    same_as_generic(found, blobs())


def test_conditional_densities_weights_and_gaps() -> None:
    Y = blobs()
    X = torch.randn(len(Y), 1, generator=torch.Generator().manual_seed(1))
    same_as_generic(fit(with_background(linear_mixture(2, Linear(), num_outputs=2)), X, Y), X, Y)
    weight = torch.ones(len(Y))
    weight[::3] = 2.0
    same_as_generic(fit(with_background(gaussian_mixture(2)), Y, weight), Y, weight)
    gaps = Y.clone()
    gaps[3, 0] = gaps[60:80, 1] = math.nan
    one = fit(with_background(marginalised(gaussian_mixture(2))), gaps)
    other = fit(marginalised(with_background(gaussian_mixture(2))), gaps)
    same_as_generic(one, gaps)
    assert_exact(one.log_evidence, other.log_evidence)


def test_laplace_evidence_goes_on_to_the_maximum() -> None:
    """Expected: by a fixed point on the total derivatives of the log determinant of the Hessian."""
    model = with_background(gaussian_mixture(2, units=raw_units, alpha=Learned(torch.ones(2))))
    begun = fit(model, blobs(), update=corrected, deletion=None)
    start = Start(values=begun.mode | begun.hyperparameters, tour=0)
    found = LaplaceEvidence(model, marginalise=(), start=start).run(blobs())
    assert float(found.log_evidence) == pytest.approx(-359.7885831783, abs=1e-8)
    assert begun.log_evidence < found.log_evidence


def raw_units(Y: Tensor) -> tuple[Tensor, Tensor]:
    return Y.mean(0), torch.ones_like(Y[0])


def test_no_share_is_no_background() -> None:
    one, other = (fit(model, blobs(0)) for model in (gaussian_mixture(3), with_background(gaussian_mixture(3), 0)))
    assert_exact(one.log_evidence, other.log_evidence)
    small = fit(with_background(gaussian_mixture(3), 1e-9), blobs(0))
    torch.testing.assert_close(small.log_evidence, one.log_evidence, rtol=0.0, atol=1e-4)


def test_the_evidence_tells_the_share() -> None:
    """8 outliers among 128 data."""
    heights = [float(fit(with_background(gaussian_mixture(3), s), blobs()).log_evidence) for s in (0.01, 1 / 16, 0.2)]
    assert heights[1] > max(heights[0], heights[2])


def test_a_saved_posterior_comes_back_with_its_background(tmp_path: Path) -> None:
    model = with_background(gaussian_mixture(2))
    found = fit(model, blobs())
    found.save(tmp_path / "fit.pt")
    again = MixturePosterior.load(tmp_path / "fit.pt", model)
    assert_exact(again.log_prob(blobs()), found.log_prob(blobs()))
    with pytest.raises(BadInput, match="the density is another"):
        MixturePosterior.load(tmp_path / "fit.pt", gaussian_mixture(2))


def test_units_change_the_log_evidence_by_the_jacobian_only() -> None:
    Y, unit = blobs(), torch.tensor([1000.0, 0.01])
    one, other = (fit(with_background(gaussian_mixture(4)), y) for y in (Y, Y * unit + 1e4))
    assert_approx(other.log_evidence, one.log_evidence - len(Y) * unit.log().sum())
    assert_approx(other.responsibilities(), one.responsibilities(), rtol=1e-4, atol=1e-4)


def test_blocks_of_data_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model, Y = with_background(gaussian_mixture(3)), blobs()
    whole = fit(model, Y)
    monkeypatch.setattr("pyro_evidence.mixture.expectation.BLOCK", 1)
    monkeypatch.setattr("pyro_evidence.mixture.expectation.SHARD", 100)
    assert_approx(fit(model, Y).log_evidence, whole.log_evidence)


def test_learning_curve_ends_where_the_engine_does() -> None:
    engine = EvidenceEM(with_background(gaussian_mixture(2)), deletion=None)
    curve = learning_curve(engine, (blobs(),), (blobs()[:5],), num_steps=60)
    assert_exact(curve.train[:, :, :5], curve.test)
    assert_exact(curve.density(60).log_prob(blobs()), curve.train[60, 0])


def density() -> MixtureDensity:
    parts = torch.tensor([[0.3, 0.7]]).log(), torch.tensor([[[0.0, 1.0], [2.0, -1.0]]])
    tril = torch.tensor([[[[1.0, 0.0], [0.5, 0.8]], [[0.6, 0.0], [0.0, 0.5]]]])
    box = Background(torch.tensor(0.2), torch.tensor([-3.0, -4.0]), torch.tensor([5.0, 6.0]))
    return MixtureDensity(*parts, tril, box)


def grid(low: float, high: float, num: int = 4001) -> tuple[Tensor, float]:
    """Midpoints and their distance."""
    step = (high - low) / num
    return low + step * (torch.arange(num, dtype=torch.float64) + 0.5), step


def test_moments_and_distribution_function_are_integrals_of_the_density() -> None:
    """Oracle: midpoint rule, the box's edges between points."""
    marginal = density().marginal([1])
    y, step = grid(-14.0, 16.0, 30000)
    p = marginal.log_prob(y[:, None]).exp() * step
    close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)
    mean = (p * y).sum()
    close(p.sum(), torch.ones(()))
    close(density().mean[0, 1], mean)
    close(density().variance[0, 1], (p * (y - mean).square()).sum())
    close(marginal.cdf(torch.tensor([[1.0]]))[0, 0], p[y < 1.0].sum())
    levels = [0.001, 0.3, 0.999]
    quantiles = density().quantile(levels)[:, 0]
    close(density().cdf(quantiles.unsqueeze(1))[:, 0, 1], torch.tensor(levels))


def test_conditional_is_joint_over_marginal() -> None:
    given, y = torch.tensor([[0.5], [4.9], [7.0]]), torch.tensor([[0.3], [-2.0], [1.0]])
    joint = density().log_prob(torch.cat([given, y], -1))
    expected = joint - density().marginal([0]).log_prob(given)
    assert_exact(density().conditional([0], given).log_prob(y), expected)


def test_draws_have_the_moments() -> None:
    draws = density().sample(200_000, torch.Generator().manual_seed(0))[:, 0]
    torch.testing.assert_close(draws.mean(0), density().mean[0], rtol=0.0, atol=0.03)
    torch.testing.assert_close(draws.var(0), density().variance[0], rtol=0.02, atol=0.0)


def number(y: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def test_any_model_may_have_a_background() -> None:
    y = torch.tensor([0.2, 0.5, -0.3, 9.0])
    joint = LogJoint(with_background(number, 0.25), (y,))
    u = torch.tensor([0.4])
    expected = (0.75 * dist.Normal(0.4, 1.0).log_prob(y).exp() + 0.25 / 9.3).log().sum()
    actual = joint.density({"mean": u[0]}, {})
    assert_exact(actual, expected + dist.Normal(0.0, 1.0).log_prob(u[0]))
    wide = with_background(number, 0.25, low=torch.tensor([-10.0]), high=torch.tensor([10.0]))
    expected = (0.75 * dist.Normal(0.4, 1.0).log_prob(y).exp() + 0.25 / 20.0).log().sum()
    assert_exact(LogJoint(wide, (y,)).density({"mean": u[0]}, {}), expected + dist.Normal(0.0, 1.0).log_prob(u[0]))
    assert with_background(number) == with_background(number) != with_background(number, 0.1)


@pytest.mark.parametrize("share", [1.0, -0.1, math.nan, True, "much", None])
def test_a_share_that_cannot_be_is_refused(share: object) -> None:
    with pytest.raises(BadInput, match="expected a number of at least 0 and below 1"):
        with_background(number, share)  # type: ignore[arg-type]


def test_a_box_that_cannot_be_is_refused() -> None:
    one = torch.ones(1)
    with pytest.raises(BadInput, match="one of low and high"):
        with_background(number, low=one)
    with pytest.raises(BadInput, match="finite low < high"):
        with_background(number, low=one, high=one)
    with pytest.raises(BadInput, match=r"shape \(1,\); expected \(2,\)"):
        EvidenceEM(with_background(gaussian_mixture(2), low=-one, high=one)).run(blobs())
    constant = torch.cat([blobs(), torch.ones(128, 1)], -1)
    with pytest.raises(BadInput, match=r"no width in columns \[2\]"):
        EvidenceEM(with_background(gaussian_mixture(2))).run(constant)
