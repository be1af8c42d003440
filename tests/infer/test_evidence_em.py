"""The engine: numbers on Ripley's data, laws of units and weights, agreement of its ways, and what it refuses."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS
from torch import Tensor

from pyro_evidence import datasets
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.fitting.iterate import Stop
from pyro_evidence.infer.class_conditional import class_conditional
from pyro_evidence.infer.evidence_em import EvidenceEM
from pyro_evidence.infer.laplace_evidence import LaplaceEvidence
from pyro_evidence.mixture import RandomWeights
from pyro_evidence.mixture import evidence as mixture_evidence
from pyro_evidence.mixture.expectation import Mixture
from pyro_evidence.mixture.posterior import MixturePosterior
from pyro_evidence.mixture.updates import BoundedInflation, EStep, Unregularised, WeightDecay, corrected
from pyro_evidence.models import with_background
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.mixture import (
    DiagonalNoise,
    FullNoise,
    SharedNoise,
    SphericalNoise,
    gaussian_mixture,
    linear_mixture,
)
from pyro_evidence.models.mppca import mppca
from pyro_evidence.models.regression import Learned
from pyro_evidence.settings import Start
from tests.models_for_tests.mixture_cases import assert_approx, same_as_generic

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def two_blobs(num_data: int = 60) -> Tensor:
    torch.manual_seed(0)
    half = num_data // 2
    return torch.cat([torch.randn(half, 2), torch.tensor([6.0, 3.0]) + 0.5 * torch.randn(num_data - half, 2)])


def fit(Y: Tensor, num_components: int = 6, **settings: object) -> MixturePosterior:
    found = EvidenceEM(gaussian_mixture(num_components), **settings).run(Y)  # type: ignore[arg-type]
    assert isinstance(found, MixturePosterior)
    return found


@pytest.mark.parametrize("num_components", [2, 6])  # all kept, and not
def test_rounds_without_a_graph_are_the_same_rounds(num_components: int) -> None:
    """An update of one's own may take derivatives; what a fit leaves can be differentiated."""
    Y, update = two_blobs(), BoundedInflation()

    def of_ones_own(expected: EStep) -> Mixture:
        w = expected.mixture.w.detach().requires_grad_()
        height = mixture_evidence.log_joint(expected.data, replace(expected.mixture, w=w)).sum()
        (slope,) = torch.autograd.grad(height, w)
        assert_approx(slope, mixture_evidence.log_joint_gradient(expected.data, expected.mixture)[1])
        return update(expected)

    of_ones_own.rho = update.rho  # type: ignore[attr-defined]
    ours, own = (fit(Y, num_components, update=u) for u in (update, of_ones_own))
    assert_exact(torch.tensor(ours.log_evidences), torch.tensor(own.log_evidences))
    assert_exact(ours.restarts, own.restarts)
    parts = [*vars(ours.mixture).values(), *vars(ours.recognised).values(), *ours.paths, *ours.mode.values()]
    made = [*parts, ours.restarts, ours.log_evidence, ours.state.u, ours.state.precision.log_det]
    assert not any(x.is_inference() for x in made if isinstance(x, Tensor))
    assert bool(ours.log_weights(10).isfinite().all())


@pytest.mark.parametrize("num_components", [2, 10, 20])
def test_ripley_with_default_settings(num_components: int, data_dir: Path) -> None:
    """The numbers that were set before this code was written: E1, E2 and the error on the test set, K = 2 per class."""
    train, test = datasets.ripley_train(), datasets.ripley_test()
    engine = EvidenceEM(gaussian_mixture(num_components), start=Start(seed=num_components))
    found = class_conditional(engine, train.X, train.t)
    log_density = found.log_density(test.X)
    assert [p.num_components for p in found.posteriors] == [2, 2]
    assert -float(log_density[test.t == 0, 0].mean()) <= 0.080
    assert -float(log_density[test.t == 1, 1].mean()) <= 0.073
    assert float((found.labels(test.X) != test.t).double().mean()) <= 0.091


def test_many_outputs_and_few_data_are_no_reason_to_give_up_components() -> None:
    """Two clusters in 20 dimensions, 30 data each: both are found, and plain EM and a single component are beaten."""
    generator = torch.Generator().manual_seed(0)
    centres = 1.5 * torch.randn(2, 20, generator=generator)
    which = torch.randint(2, (560,), generator=generator)
    X = centres[which] + torch.randn(560, 20, generator=generator)
    Y, Z = X[:60], X[60:]
    found = fit(Y)
    stop = Stop(tolerance=0.0, num_steps=50, throw=False, progress=False)
    plain = fit(
        Y, update=Unregularised(), start=Start(restarts=1), initial=RandomWeights(warm_up=0), deletion=None, stop=stop
    )
    assert found.num_components == 2
    height = found.log_prob(Z).mean()
    assert height > plain.log_prob(Z).mean() and height > fit(Y, 1).log_prob(Z).mean()


@pytest.mark.parametrize(("label", "expected"), [(0, -19.5917), (1, 3.9619)])
def test_laplace_evidence_goes_on_to_the_maximum(label: int, expected: float, data_dir: Path) -> None:
    """Expected: by L-BFGS on the evidence of the model with one alpha per kernel, in raw units."""
    train = datasets.ripley_train()
    Y = train.X[train.t == label]
    model = gaussian_mixture(2, units=raw_units, alpha=Learned(torch.ones(2)))
    begun = EvidenceEM(model, update=corrected, deletion=None).run(Y)
    start = Start(values=begun.mode | begun.hyperparameters, tour=0)
    found = LaplaceEvidence(model, marginalise=(), start=start).run(Y)
    assert float(found.log_evidence) == pytest.approx(expected, abs=5e-5)
    assert begun.log_evidence < found.log_evidence


def raw_units(Y: Tensor) -> tuple[Tensor, Tensor]:
    """Prior about the mean, in the units of the data."""
    return Y.mean(0), torch.ones_like(Y[0])


@pytest.mark.parametrize("noise", [DiagonalNoise(), FullNoise(), SharedNoise()])
def test_the_posterior_is_laplaces_of_the_pyro_model(noise: DiagonalNoise | FullNoise | SharedNoise) -> None:
    found = EvidenceEM(gaussian_mixture(4, noise=noise)).run(two_blobs())
    assert isinstance(found, MixturePosterior)
    same_as_generic(found, two_blobs())


def test_steps_are_a_run() -> None:
    Y = two_blobs()
    engine = EvidenceEM(gaussian_mixture(3), deletion=None, stop=Stop(num_steps=20, tolerance=0.0, throw=False))
    whole = engine.run(Y)
    losses = [engine.step(Y) for _ in range(21)]
    assert_exact(engine.posterior.log_evidence, whole.log_evidence)
    assert_exact(torch.tensor(losses), -torch.tensor(whole.log_evidences))


@pytest.mark.parametrize("noise", [DiagonalNoise(), FullNoise(), SharedNoise()])
def test_units_change_nothing_else(noise: DiagonalNoise | FullNoise | SharedNoise) -> None:
    Y = two_blobs()
    scale, shift = torch.tensor([1000.0, 1.0]), torch.tensor([0.0, 1e6])
    one = EvidenceEM(gaussian_mixture(5, noise=noise)).run(Y)
    other = EvidenceEM(gaussian_mixture(5, noise=noise)).run(Y * scale + shift)
    assert isinstance(one, MixturePosterior) and isinstance(other, MixturePosterior)
    assert_approx(other.log_evidence, one.log_evidence - len(Y) * math.log(1000.0), rtol=1e-6, atol=1e-4)
    assert one.num_components == other.num_components
    centres = [p.mode["w"][p.active].sort(0).values for p in (one, other)]
    assert_approx(centres[1], centres[0] * scale + shift, rtol=1e-5, atol=1e-4)
    assert_approx(other.mean(), one.mean() * scale + shift, rtol=1e-6, atol=1e-4)


def test_weights_are_copies() -> None:
    """Up to the prior, which stands about the mean of the data as they are given."""
    Y = two_blobs(30)
    weight = torch.arange(30) % 3 + 1.0
    model = gaussian_mixture(3, units=unit_prior)
    once = EvidenceEM(model).run(Y, weight)
    copies = EvidenceEM(model).run(Y.repeat_interleave(weight.long(), 0))
    assert_approx(once.log_evidence, copies.log_evidence)
    assert_approx(once.mode["w"], copies.mode["w"])


def unit_prior(Y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tensor([2.0, 1.0]), torch.tensor([3.0, 2.0])


def test_nothing_global_changes() -> None:
    pyro.get_param_store()["mine"] = torch.ones(())
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    found = fit(two_blobs(), start=Start(restarts=2))
    torch.manual_seed(5)
    fit(two_blobs(), start=Start(restarts=2))
    found.get_samples(3, seed=0), found.responsibilities(), found.sample(2, seed=1)
    assert list(pyro.get_param_store().keys()) == ["mine"]
    torch.manual_seed(5)
    Y = two_blobs()
    state = torch.random.get_rng_state()
    fit(Y)
    assert torch.equal(state, torch.random.get_rng_state()) and before is not None


def test_what_a_posterior_says() -> None:
    Y = two_blobs()
    found = fit(Y)
    resp = found.responsibilities()
    assert found.num_components == 2 and resp.shape == (60, 6)
    assert_exact(resp.sum(-1), torch.ones(60))
    assert_exact(resp[:, ~found.active], torch.zeros(60, 4))
    assert_exact(found.responsibilities(Y[:7]), resp[:7])
    assert_approx(found.mean()[0], Y.mean(0), rtol=0.05, atol=0.05)
    assert_exact(found.density().log_prob(Y), found.log_prob(Y))
    assert found.get_samples(9, seed=0)["w"].shape == (9, 6, 2)
    median = found.density().quantile(0.5)
    assert_exact(found.density().cdf(median[0]), torch.full((1, 2), 0.5))
    assert found.gamma.keys() == {"alpha"} and 3.5 < float(found.gamma["alpha"]) <= 4.0
    assert found.diagnostics(500)["num_components"] == 2


@pytest.mark.parametrize("noise", [DiagonalNoise(), SphericalNoise(), SharedNoise(), FullNoise()])
def test_a_density_is_the_same_whatever_else_is_asked(noise: DiagonalNoise | FullNoise | SharedNoise) -> None:
    """The model takes units from the data that it is given; the fitted density must not."""
    Y = two_blobs()
    found = EvidenceEM(gaussian_mixture(2, noise=noise)).run(Y)
    assert isinstance(found, MixturePosterior)
    whole, part = found.log_prob(Y), Y[3:4]
    assert_exact(found.log_prob(part), whole[3:4])
    assert_exact(found.density(part).log_prob(part), whole[3:4])
    assert_exact(found.responsibilities(part), found.responsibilities()[3:4])


def test_a_posterior_survives_the_disk(tmp_path: Path) -> None:
    found = fit(two_blobs())
    found.save(tmp_path / "fit.pt")
    again = MixturePosterior.load(tmp_path / "fit.pt", gaussian_mixture(6))
    assert_exact(again.log_evidence, found.log_evidence)
    assert_exact(again.responsibilities(), found.responsibilities())
    assert_exact(again.gamma["alpha"], found.gamma["alpha"])
    assert again.num_components == found.num_components


def test_a_posterior_with_correlated_noise_survives_the_disk(tmp_path: Path) -> None:
    model = gaussian_mixture(2, noise=FullNoise())
    found = EvidenceEM(model).run(two_blobs())
    found.save(tmp_path / "fit.pt")
    again = MixturePosterior.load(tmp_path / "fit.pt", model)
    assert_exact(again.log_evidence, found.log_evidence)
    assert_exact(again.log_prob(), found.log_prob())


def test_nuts_runs_on_the_models_posterior_and_agrees() -> None:
    found = fit(two_blobs(), num_components=2)
    kernel = NUTS(found.model)
    kernel.setup(10, two_blobs())
    mcmc = MCMC(
        NUTS(found.model),
        num_samples=100,
        warmup_steps=30,
        initial_params={"w": found.mode["w"]},
        disable_progbar=True,
    )
    mcmc.run(two_blobs())
    drawn, sd = mcmc.get_samples()["w"], found.get_samples(4000, seed=0)["w"].std(0)
    assert float(((drawn.mean(0) - found.mode["w"]).abs() / sd).max()) < 0.4
    assert float((drawn.std(0) / sd - 1.0).abs().max()) < 0.35


@pytest.mark.parametrize("noise", [DiagonalNoise(), FullNoise(), SharedNoise(), SphericalNoise()])
def test_single_precision_is_recognised_as_well(noise: DiagonalNoise | FullNoise | SharedNoise) -> None:
    Y = two_blobs()
    single, double = (EvidenceEM(gaussian_mixture(4, noise=noise)).run(x) for x in (Y.float(), Y))
    assert isinstance(single, MixturePosterior)
    assert single.num_components == double.num_components  # type: ignore[attr-defined]
    assert_approx(single.log_evidence.double(), double.log_evidence, rtol=1e-4, atol=1e-2)
    assert single.mode["w"].dtype == single.hyperparameters["beta"].dtype == torch.float32
    assert bool(single.log_prob(Y.float()).isfinite().all())


def test_conditional_density_of_two_lines() -> None:
    torch.manual_seed(0)
    x = 4.0 * torch.rand(200, 1) - 2.0
    sign = torch.where(torch.rand(200, 1) < 0.3, 1.0, -1.0)
    y = sign * x + 0.2 * torch.randn(200, 1)
    found = EvidenceEM(linear_mixture(5, Linear())).run(x, y)
    assert isinstance(found, MixturePosterior)
    assert found.num_components == 2
    assert_approx(found.mode["w"][found.active, 0, 0].sort().values, torch.tensor([-1.0, 1.0]), rtol=0.1, atol=0.1)
    ahead = torch.tensor([[2.0], [0.0]])
    assert found.mean(ahead).shape == (2, 1)
    assert float(found.mean(ahead)[0, 0]) == pytest.approx(0.3 * 2.0 - 0.7 * 2.0, abs=0.4)
    assert float(found.variance(ahead)[0, 0]) > 1.0 > float(found.variance(ahead)[1, 0])
    assert found.sample(11, ahead, seed=0).shape == (11, 2, 1)


def student(Y: Tensor) -> None:
    """No Gaussian kernels."""
    centre = pyro.sample("centre", dist.Normal(torch.tensor([0.0, 6.0]), 1.0).to_event(1))
    with pyro.plate("data", len(Y)):
        k = pyro.sample("k", dist.Categorical(torch.tensor([0.5, 0.5])))
        pyro.sample("y", dist.StudentT(4.0, centre[k]), obs=Y)


def test_any_model_with_one_discrete_site_is_fitted_by_laplace_evidence() -> None:
    """Oracle: quadrature over both centres."""
    Y = two_blobs()[:, 0]
    found = EvidenceEM(student, start=Start(restarts=2)).run(Y)
    grid = torch.linspace(-3.0, 9.0, 401)
    each = dist.StudentT(4.0, grid[:, None]).log_prob(Y) - math.log(2.0)
    prior = [dist.Normal(m, 1.0).log_prob(grid) for m in (0.0, 6.0)]
    rows = torch.stack([torch.logaddexp(row, each).sum(-1) for row in each])
    expected = (rows + prior[0][:, None] + prior[1]).logsumexp((0, 1)) + 2.0 * (grid[1] - grid[0]).log()
    assert float(found.log_evidence) == pytest.approx(float(expected), abs=0.02)


def no_labels(Y: Tensor) -> None:
    mean = pyro.sample("mean", dist.StudentT(4.0, 0.0, 1.0))
    with pyro.plate("data", len(Y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=Y)


def test_a_model_without_components_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="discrete"):
        EvidenceEM(no_labels).run(torch.randn(9))


def test_planes_beside_a_background_are_refused() -> None:
    """Their equations know of none: the fit would be that of the planes alone, without a word."""
    with pytest.raises(UnsupportedModel, match="background of outliers"):
        EvidenceEM(with_background(mppca(1, 1))).run(torch.randn(30, 3))


@pytest.mark.parametrize(
    ("Y", "message"),
    [
        (torch.tensor([[1.0, math.nan], [0.0, 1.0]]), "nan"),
        (torch.tensor([[1.0, math.inf], [0.0, 1.0]]), "inf"),
        (torch.zeros(3), r"shape \(3,\)"),
        (torch.zeros(0, 2), "shape|empty|rows"),
    ],
)
def test_bad_data_are_refused(Y: Tensor, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        fit(Y)


@pytest.mark.parametrize("num_components", [0, -1, 2.0, True])
def test_bad_numbers_of_components_are_refused(num_components: object) -> None:
    with pytest.raises(BadInput, match="num_components"):
        gaussian_mixture(num_components)  # type: ignore[arg-type]


@pytest.mark.parametrize("update", [Unregularised(rho=0.01), WeightDecay(0.1, rho=0.1)])
def test_baselines_are_one_line_each(update: Unregularised | WeightDecay) -> None:
    found = fit(two_blobs(), update=update, deletion=None, curvature=mixture_evidence.block)
    assert math.isfinite(float(found.log_evidence))


@pytest.mark.parametrize("number", [1, 2])
def test_rows_that_are_all_the_same_have_no_evidence(number: int) -> None:
    """The noise that they have is none; 30 rows had 116 nats, by the least variance that an update takes."""
    with pytest.raises(BadInput, match="all rows are the same"):
        EvidenceEM(gaussian_mixture(number)).run(torch.full((30, 2), 1.5, dtype=torch.float64))


def test_a_column_that_does_not_vary_is_said_where_its_noise_is_its_own() -> None:
    """Its noise was found, beta = 260, and a hundred nats with it, in silence."""
    Y = torch.cat([two_blobs(), torch.full((60, 1), 3.0)], 1)
    with pytest.warns(UserWarning, match=r"column\(s\) \[2\] of the responses are one constant each"):
        EvidenceEM(gaussian_mixture(2)).run(Y)
    EvidenceEM(gaussian_mixture(2, noise=SphericalNoise())).run(Y)  # as is advised
