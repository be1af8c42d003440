"""Weighted draws of relevance machines: the same face as after LaplaceEvidence, against integrals on a grid."""

import pytest
import torch
from pyro.infer import Predictive
from torch import Tensor

from pyro_evidence import REVM, RVM, BadInput
from pyro_evidence.models.basis import Linear, Polynomial
from pyro_evidence.models.classifier import classifier
from pyro_evidence.posterior.reweighted import CorrectedPosterior
from pyro_evidence.relevance.posteriors import AxesPosterior


def few_labels(num: int = 14) -> tuple[Tensor, Tensor]:
    """So few that the posterior of a slope is skewed."""
    X = torch.linspace(-2.0, 2.0, num).unsqueeze(-1)
    t = (X[:, 0] > -0.2).double()
    t[num // 2 + 1] = 0.0
    return X, t


def fits() -> list[AxesPosterior]:
    model = classifier(Polynomial(1, bias=False))
    return [RVM(model).run(*few_labels()), REVM(model, ridge=0.1).run(*few_labels())]


def on_a_grid(posterior: AxesPosterior) -> tuple[float, float, float]:
    """Oracle: mean and deviation of the one weight, and the log evidence, by the trapezoidal rule."""
    joint = posterior._laplace.state.problem.joint
    assert joint.latents.size == 1
    x = torch.linspace(-20.0, 40.0, 6001).unsqueeze(-1)
    height = joint.log_joint(x, joint.initial_theta).detach()
    mass = height.softmax(0)
    w = x[:, 0] * float(posterior.state.directions[0, 0])
    mean = float(mass @ w)
    log_evidence = float(height.logsumexp(0) + torch.tensor(0.01).log())
    return mean, float((mass @ (w - mean).square()).sqrt()), log_evidence


@pytest.mark.parametrize("which", [0, 1], ids=["RVM", "REVM"])
def test_moments_are_those_of_the_exact_posterior(which: int) -> None:
    posterior = fits()[which]
    corrected, (mean, sd, log_evidence) = posterior.importance_resampled(20_000), on_a_grid(posterior)
    assert isinstance(corrected, CorrectedPosterior) and corrected.pareto_k < 0.7
    assert float(corrected.mean()["w"]) == pytest.approx(mean, rel=0.02)
    assert float(corrected.std()["w"]) == pytest.approx(sd, rel=0.05)
    assert float(corrected.log_evidence) == pytest.approx(log_evidence, abs=4.0 * corrected.log_evidence_error)
    laplace = float(posterior.mode["w"])
    assert abs(laplace - mean) > 5.0 * abs(float(corrected.mean()["w"]) - mean)  # there was something to correct
    assert posterior.diagnostics()["largest_mean_shift"] > 0.1


def test_the_face_is_that_of_other_corrected_posteriors(capsys: pytest.CaptureFixture[str]) -> None:
    posterior = fits()[0]
    corrected, new = posterior.importance_resampled(500), few_labels(5)[0]
    assert corrected.get_samples(7)["w"].shape == (7, 1) and corrected.quantiles([0.1, 0.9])["w"].shape == (2, 1)
    labels = Predictive(corrected.model, guide=corrected.guide, num_samples=20)(new)["t"]
    assert labels.shape == (20, 5)
    corrected.summary()
    assert "500 draws, weighted: worth" in capsys.readouterr().out


def test_nothing_to_correct_is_said() -> None:
    X, t = torch.tensor([[-1.0], [-1.0], [1.0], [1.0]]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    posterior = RVM(classifier(Linear(bias=False))).run(X, t)
    assert posterior.num_active == 0
    with pytest.raises(BadInput, match=r"every axis was pruned"):
        posterior.importance_resampled()
    with pytest.raises(BadInput, match=r"at least 100"):
        fits()[0].importance_resampled(10)
