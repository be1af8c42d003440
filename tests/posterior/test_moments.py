"""Predictions of new data against closed forms and quadrature; targets are not needed."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import RVM, LaplaceEvidence, Stop, predict_latent
from pyro_evidence.models.basis import GaussianRBF, Linear
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.gp import gp_classifier, gp_poisson, gp_regression
from pyro_evidence.models.kernels import RBF
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.models.regression import regression
from pyro_evidence.posterior.base import pairs_in_parts
from pyro_evidence.posterior.predict import PredictiveMoments
from pyro_evidence.program import simulate
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.predictors import hermite

QUIET = Stop(progress=False)


def data() -> tuple[Tensor, Tensor, Tensor]:
    X = torch.randn(40, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    t = X @ torch.tensor([1.0, -2.0]) + 0.3 * torch.randn(40, generator=torch.Generator().manual_seed(2)).double()
    return X, t, torch.tensor([[0.5, -1.0], [3.0, 2.0], [-4.0, 0.0]])


def test_a_linear_prediction_is_the_closed_one() -> None:
    """Oracle: the mean is linear in the mode; the variance is noise plus x' A^-1 x.  Draws within four errors."""
    X, t, new = data()
    posterior = LaplaceEvidence(regression(Linear(bias=False), alpha=0.5, beta=9.0), stop=QUIET).run(X, t)
    S = torch.linalg.inv(9.0 * X.mT @ X + 0.5 * torch.eye(2))
    w, variance = 9.0 * S @ X.mT @ t, (new @ S * new).sum(-1)
    mean, std = posterior.predict(new, return_std=True, num_samples=4000)
    assert bool(((mean - new @ w).abs() < 4.0 * (variance / 4000).sqrt()).all())
    torch.testing.assert_close(std, (variance + 1.0 / 9.0).sqrt(), rtol=0.02, atol=0)


def test_probabilities_are_averaged_and_not_plugged_in() -> None:
    """Oracle: Gauss-Hermite quadrature over the predictor."""
    X, t, new = data()
    posterior = LaplaceEvidence(classifier(Linear(), alpha=1.0, alpha_bias=1.0), stop=QUIET).run(X, (t > 0).double())
    Phi = torch.cat([new, torch.ones(3, 1)], -1)
    A = posterior.state.precision.log_det_gradient[0]
    expected = hermite(Phi @ posterior.median()["w"], (Phi @ A * Phi).sum(-1))
    assert float((posterior.predict(new, num_samples=4000) - expected).abs().max()) < 0.01
    plugged_in = torch.sigmoid(Phi @ posterior.median()["w"])
    assert float((expected - plugged_in).abs().max()) > 0.001


def test_classes_have_a_column_each() -> None:
    X, t, new = data()
    posterior = LaplaceEvidence(classifier(Linear(), num_classes=3), stop=QUIET).run(X, (t > -1).long() + (t > 1))
    found = posterior.predict(new)
    assert found.shape == (3, 3)
    torch.testing.assert_close(found.sum(-1), torch.ones(3))


@pytest.mark.parametrize("num", [1, 3])
def test_processes_are_predicted_at_new_inputs_by_quadrature(num: int) -> None:
    X, t, new = data()
    new = new[:num]
    process = LaplaceEvidence(gp_regression(RBF(2.0, 1.5), beta=9.0), maximise=(), stop=QUIET).run(X, t)
    f = predict_latent(process, new)
    mean, std = process.predict(new, return_std=True)
    torch.testing.assert_close(mean, f.mean)
    torch.testing.assert_close(std, (f.variance + 1.0 / 9.0).sqrt())
    labels = LaplaceEvidence(gp_classifier(RBF(2.0, 1.5)), maximise=(), stop=QUIET).run(X, (t > 0).long())
    torch.testing.assert_close(labels.predict(new), predict_latent(labels, new).probability())
    counts = LaplaceEvidence(gp_poisson(RBF(0.5, 1.5)), maximise=(), stop=QUIET).run(X, torch.arange(40.0) % 3)
    torch.testing.assert_close(counts.predict(new), predict_latent(counts, new).expected(torch.exp), rtol=1e-6, atol=0)


def test_relevance_vectors_predict_as_their_predictor_says() -> None:
    X, t, new = data()
    model = classifier(GaussianRBF(X, 1.0))
    posterior = RVM(model, stop=Stop(num_steps=2000, progress=False)).run(X, (t > 0).long())
    expected = hermite(*posterior.predictor(new))
    assert float((posterior.predict(new, num_samples=4000) - expected).abs().max()) < 0.02


def test_a_model_that_wants_its_targets_gets_none() -> None:
    def wants(X: Tensor, t: Tensor) -> Tensor:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("rows", len(X)):
            return pyro.sample("t", dist.Poisson((0.1 * X @ w).exp()), obs=t)

    X, _, new = data()
    state = torch.random.get_rng_state()
    posterior = LaplaceEvidence(wants, stop=QUIET).run(X, torch.arange(40.0) % 4)
    first = posterior.predict(new)
    assert torch.equal(first, posterior.predict(new)) and first.shape == (3,)
    assert torch.equal(state, torch.random.get_rng_state())


def test_components_are_drawn() -> None:
    X, *_ = data()
    posterior = LaplaceEvidence(gaussian_mixture(2), stop=Stop(throw=False, progress=False)).run(X)
    assert posterior.predict(X).shape == X.shape


def test_draws_in_parts_predict_what_all_at_once_predict(monkeypatch: pytest.MonkeyPatch) -> None:
    X, t, new = data()
    posterior = LaplaceEvidence(classifier(Linear(), alpha=1.0, alpha_bias=1.0), stop=QUIET).run(X, (t > 0).double())
    at_once = posterior.predict(new, return_std=True, num_samples=50)
    rows = posterior.predict(new, quantiles=[0.1, 0.6], num_samples=50)
    probability = posterior.predict(new, num_samples=50)
    monkeypatch.setattr(simulate, "HELD_NUMBERS", 7 * new.numel())  # of 50 draws the last part has one
    for one, other in zip(posterior.predict(new, return_std=True, num_samples=50), at_once, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(posterior.predict(new, quantiles=[0.1, 0.6], num_samples=50), rows)
    torch.testing.assert_close(posterior.predict(new, num_samples=50), probability)


def test_draws_of_many_latents_are_made_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def noise(part: int) -> list[Tensor]:
        monkeypatch.setattr("pyro_evidence.posterior.base.HELD_NUMBERS", part)
        return list(pairs_in_parts(1001, 40, torch.Generator().manual_seed(0), 60))

    (whole,), parts = noise(2**24), noise(100 * 60)
    assert whole.shape == (1002, 40) and {len(part) for part in parts} == {96, 42}
    for part in parts:
        torch.testing.assert_close(part[: len(part) // 2], -part[len(part) // 2 :], rtol=0, atol=0)
    torch.testing.assert_close(torch.cat([part[: len(part) // 2] for part in parts]), whole[:501], rtol=0, atol=0)


def test_more_draws_are_added_by_the_laws_of_total_expectation_and_variance() -> None:
    """Oracle: all of them at once."""
    weights, mean, variance = torch.rand(9), torch.randn(9, 4), torch.rand(9, 4)
    whole = PredictiveMoments.over(weights, mean, variance)
    parts = [
        PredictiveMoments.over(*(x[s] for x in (weights, mean, variance))) for s in (slice(2), slice(2, 3), slice(3, 9))
    ]
    added = parts[0] + parts[1] + parts[2]
    torch.testing.assert_close(added.mean, whole.mean)
    torch.testing.assert_close(added.variance, whole.variance)


def test_a_check_that_nobody_gave_a_number_takes_fewer_draws_of_large_models() -> None:
    X, t, _ = data()
    small, wide = (
        LogJoint(regression(Linear()), (x, y)) for x, y in ((X, t), (torch.zeros(1000, 99), torch.zeros(1000)))
    )
    assert simulate.affordable_draws(small) == 4000
    assert simulate.affordable_draws(small, 10_000) == 10_000
    assert simulate.affordable_draws(wide) == 10**8 // (1000 * 100 + 100)


def test_params_alone_are_those_of_the_fit() -> None:
    def line(X: torch.Tensor, y: torch.Tensor | None = None) -> None:
        b = pyro.param("b", torch.zeros(2))
        with pyro.plate("rows", len(X)):
            pyro.sample("y", dist.Normal(X @ b, 1.0), obs=y)

    X = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    posterior = LaplaceEvidence(line, stop=Stop(progress=False)).run(X, torch.tensor([2.0, -1.0, 1.0]))
    torch.testing.assert_close(posterior.predict(X), torch.tensor([2.0, -1.0, 1.0]))
