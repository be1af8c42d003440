"""Every idiom runs in one line and says how good it is, or ends in the error message that it should end in."""

import math
import warnings

import pyro
import pytest
import torch

from pyro_evidence import LaplaceEvidence
from tests.gallery.idioms import CLUMPS, FITTED, REFUSED, Y, only_params, only_params_and_classes


def test_there_are_enough() -> None:
    assert len(FITTED) + len(REFUSED) >= 40


LARGER = ("capture and recapture",)  # as test_gallery.py fits it


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LARGER)) for n in FITTED])
def test_an_idiom_is_fitted_in_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    idiom = FITTED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # neither ours nor torch's reaches the user
        posterior = LaplaceEvidence(idiom.model, **idiom.settings).run(*idiom.data)
        found = posterior.diagnostics(1000)
    assert posterior.status == "converged"
    gap = abs(found["log_evidence_importance"] - found["log_evidence"])
    assert gap < 0.5 + 3.0 * found["log_evidence_importance_se"] or found["pareto_k"] > 0.7
    if name in ("DiscreteHMM", "params alone", "obs_mask", "LKJ"):
        posterior.summary()
        assert "log evidence =" in capsys.readouterr().out


@pytest.mark.parametrize("name", REFUSED)
def test_an_idiom_ends_in_its_letter(name: str) -> None:
    idiom = REFUSED[name]
    with pytest.raises((ValueError, ArithmeticError)) as error:
        LaplaceEvidence(idiom.model, **idiom.settings).run(*idiom.data)
    assert idiom.message in str(error.value)


def test_params_alone_are_maximised() -> None:  # oracle: the sample's own moments
    posterior = LaplaceEvidence(only_params).run(Y)
    mu, sigma = Y.mean(), Y.std(correction=0)
    expected = torch.distributions.Normal(mu, sigma).log_prob(Y).sum()
    torch.testing.assert_close(posterior.log_evidence, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(posterior.hyperparameters["mu"], mu, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(posterior.hyperparameters["sigma"], sigma, rtol=1e-5, atol=1e-5)
    assert posterior.get_samples(3) == {} and posterior.mode == {}
    assert "sites=[]" in repr(posterior)
    assert "mu" not in pyro.get_param_store()


def test_params_beside_classes_are_maximised() -> None:  # oracle: the sum over classes, at what was found
    posterior = LaplaceEvidence(only_params_and_classes).run(CLUMPS)
    p, mu = posterior.hyperparameters["p"], posterior.hyperparameters["mu"]
    each = torch.distributions.Normal(mu, 1.0).log_prob(CLUMPS.unsqueeze(-1)) + p.log()
    torch.testing.assert_close(posterior.log_evidence, each.logsumexp(-1).sum())
    assert math.isclose(abs(float(mu[0] - mu[1])), 8.0, abs_tol=1.0)
