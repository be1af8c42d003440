"""Noise that is re-estimated with the weights: against the exact evidence, whatever the param that sets it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence.errors import BadInput, NotConverged, UnsupportedModel
from pyro_evidence.infer.rvm import RVM, VRVM
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.relevance.noise import noise_of
from pyro_evidence.relevance.posteriors import RVMPosterior
from pyro_evidence.relevance.weights import weights_of
from tests.models_for_tests import weight_models as models

Model = Callable[..., Any]


def noisy(name: str, start: float, constraint: Any, scale: Callable[[Tensor], Tensor]) -> Model:
    """Gaussian noise whose standard deviation is a function of a param."""

    def model(Phi: Tensor, t: Tensor | None = None) -> Tensor:
        value = pyro.param(name, torch.tensor(start), constraint=constraint)
        w = models.weights(Phi.shape[1], Phi)
        with pyro.plate("data", len(Phi)):
            return pyro.sample("t", dist.Normal(Phi @ w, scale(value)), obs=t)

    return model


by_scale = noisy("scale", 1.0, constraints.positive, lambda x: x)
PARAMS = {
    "scale": by_scale,
    "variance": noisy("variance", 0.04, constraints.positive, torch.sqrt),
    "beta": noisy("beta", 9.0, constraints.positive, torch.rsqrt),
    "log_beta": noisy("log_beta", 0.0, constraints.real, lambda x: (-0.5 * x).exp()),
    "raw": noisy("raw", 0.3, constraints.real, torch.nn.functional.softplus),
}


def problem() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    Phi = torch.randn(80, 8, generator=generator)
    w = torch.tensor([2.0, -1.0, 0.5] + [0.0] * 5)
    return Phi, Phi @ w + 0.4 * torch.randn(80, generator=generator)


def exact(alpha: Tensor, variance: Tensor | float) -> float:
    """Oracle: log evidence with the weights integrated out on paper."""
    Phi, t = problem()
    covariance = variance * torch.eye(80) + Phi @ (1.0 / alpha).diag() @ Phi.T
    return float(dist.MultivariateNormal(torch.zeros(80), covariance).log_prob(t))


def fitted_variance(posterior: RVMPosterior) -> float:
    """The noise variance of the posterior's own model."""
    Phi, _ = problem()
    trace = poutine.trace(posterior.model).get_trace(Phi)
    return float(trace.nodes["t"]["fn"].variance[0])


@pytest.mark.parametrize("name", PARAMS)
def test_no_other_noise_has_more_evidence(name: str) -> None:
    posterior = RVM(PARAMS[name], noise=name).run(*problem())
    variance = fitted_variance(posterior)
    assert float(posterior.log_evidence) == pytest.approx(exact(posterior.alpha, variance), rel=1e-10)
    assert variance == pytest.approx(0.16, rel=0.4)
    for factor in (0.98, 1.02):
        assert exact(posterior.alpha, variance * factor) < float(posterior.log_evidence)
        assert exact(posterior.alpha * factor, variance) < float(posterior.log_evidence)
    assert float(torch.tensor(posterior.log_evidences).diff().min()) > 0.0


def test_every_param_finds_the_same_noise() -> None:
    found = [fitted_variance(RVM(PARAMS[n], noise=n).run(*problem())) for n in PARAMS]
    torch.testing.assert_close(torch.tensor(found), torch.full((5,), found[0]), rtol=1e-3, atol=0)


def test_the_variational_noise_is_where_the_bound_is_highest() -> None:
    Phi, t = problem()
    posterior = VRVM(by_scale, noise="scale").run(Phi, t)
    assert float(torch.tensor(posterior.log_evidences).diff().min()) > -1e-10
    mean, spread = posterior.predictor()
    expected = ((t - mean).square() + spread).mean()
    assert fitted_variance(posterior) == pytest.approx(float(expected), rel=1e-3)
    for factor in (0.9, 1.0, 1.1):  # the bound with that noise held

        def held(Phi: Tensor, t: Tensor, scale: float = factor * fitted_variance(posterior) ** 0.5) -> None:
            w = models.weights(Phi.shape[1], Phi)
            with pyro.plate("data", len(Phi)):
                pyro.sample("t", dist.Normal(Phi @ w, scale), obs=t)

        gap = float(posterior.log_evidence - VRVM(held).run(Phi, t).log_evidence)
        assert abs(gap) < 0.01 if factor == 1.0 else gap > 0.01


def test_held_noise_stays() -> None:
    posterior = RVM(by_scale).run(*problem())
    assert fitted_variance(posterior) == 1.0


def test_a_plates_scale_counts_the_data() -> None:
    Phi, t = problem()
    weights = weights_of(LogJoint(poutine.scale(by_scale, 2.5), (Phi, t), maximise=()), "w")
    assert noise_of(weights, "scale").num_data == pytest.approx(200.0)

    def masked(Phi: Tensor, t: Tensor) -> None:
        scale = pyro.param("scale", torch.tensor(1.0), constraint=constraints.positive)
        w = models.weights(Phi.shape[1], Phi)
        with pyro.plate("data", len(Phi)), poutine.mask(mask=torch.arange(80) < 30):
            pyro.sample("t", dist.Normal(Phi @ w, scale), obs=t)

    assert noise_of(weights_of(LogJoint(masked, (Phi, t), maximise=()), "w"), "scale").num_data == pytest.approx(30.0)


def test_the_params_of_the_posterior_are_those_found(tmp_path: Path) -> None:
    posterior = RVM(by_scale, noise="scale").run(*problem())
    scale = posterior.hyperparameters["scale"]
    assert float(scale) == pytest.approx(fitted_variance(posterior) ** 0.5)
    assert not list(pyro.get_param_store().keys())
    posterior.save(tmp_path / "p")
    again = RVMPosterior.load(tmp_path / "p", by_scale)
    assert float(again.hyperparameters["scale"]) == float(scale)
    posterior.update_param_store()
    assert float(pyro.param("scale").detach()) == pytest.approx(float(scale), rel=1e-14)


def test_single_precision() -> None:
    Phi, t = problem()
    torch.set_default_dtype(torch.float32)
    posterior = RVM(by_scale, noise="scale").run(Phi.float(), t.float())
    assert float(posterior.hyperparameters["scale"]) == pytest.approx(0.4, rel=0.2)


# Bad input


@pytest.mark.parametrize("engine", [RVM, VRVM])
def test_what_sets_no_noise_is_refused(engine: Any) -> None:
    Phi, t = problem()
    with pytest.raises(BadInput, match=r"noise='sigma': no such param; expected one of the model's: scale"):
        engine(by_scale, noise="sigma").run(Phi, t)

    def heated(Phi: Tensor, t: Tensor) -> None:
        w = models.weights(Phi.shape[1], Phi)
        heat = pyro.param("heat", torch.tensor(2.0), constraint=constraints.positive)
        with pyro.plate("data", len(Phi)):
            pyro.sample("t", dist.Bernoulli(logits=Phi @ w / heat), obs=t)

    with pytest.raises(UnsupportedModel, match="expected one Gaussian observed site"):
        engine(heated, noise="heat").run(Phi, (t > 0).double())

    def stretched(Phi: Tensor, t: Tensor) -> None:
        w = models.weights(Phi.shape[1], Phi)
        heat = pyro.param("heat", torch.tensor(2.0), constraint=constraints.positive)
        with pyro.plate("data", len(Phi)):
            pyro.sample("t", dist.Normal(Phi @ w * heat, heat), obs=t)

    with pytest.raises(UnsupportedModel, match="the param 'heat' sets and nothing else"):
        engine(stretched, noise="heat").run(Phi, t)


def test_noise_of_several_numbers_is_refused() -> None:
    def grouped(Phi: Tensor, t: Tensor) -> None:
        scale = pyro.param("scale", torch.ones(2), constraint=constraints.positive)
        w = models.weights(Phi.shape[1], Phi)
        with pyro.plate("data", len(Phi)):
            pyro.sample("t", dist.Normal(Phi @ w, scale.repeat(40)), obs=t)

    with pytest.raises(BadInput, match=r"param 'scale' has shape \(2,\); expected one number"):
        RVM(grouped, noise="scale").run(*problem())


@pytest.mark.parametrize("engine", [RVM, VRVM])
@pytest.mark.parametrize("size", [0.0, 1e-14, 1e-10])
def test_targets_that_the_weights_meet_have_no_noise_to_be_found(engine: Any, size: float) -> None:
    """The log evidence grows with the precision of the noise as long as residuals have digits."""
    generator = torch.Generator().manual_seed(0)
    Phi, noise = (torch.randn(30, *axes, generator=generator, dtype=torch.float64) for axes in ((3,), ()))
    t = Phi @ torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
    with pytest.raises(NotConverged, match="runs to infinity, so the log evidence has no maximum"):
        engine(by_scale, noise="scale").run(Phi, t + size * noise)
    found = engine(by_scale, noise="scale").run(Phi, t + 1e-6 * noise).hyperparameters["scale"]
    assert 0.7e-6 < float(found) < 1.4e-6
