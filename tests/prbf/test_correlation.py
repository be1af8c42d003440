"""What full covariances would gain over a network's own: by hand, on correlated classes, and on round ones."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from pyro_evidence import OverlapEM
from pyro_evidence.models.covariances import Covariance, Diagonal, Spherical
from pyro_evidence.models.prbf import Full, prbf
from pyro_evidence.prbf.posterior import PRBFPosterior
from pyro_evidence.prbf.updates import FOLDS, covariance_gain


def classes(correlation: float, num: int = 300, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two clouds of one shape, ``num`` each, well apart."""
    generator = torch.Generator().manual_seed(seed)
    white = torch.randn(2 * num, 2, generator=generator, dtype=torch.float64)
    tril = torch.tensor([[1.0, 0.0], [correlation, (1.0 - correlation**2) ** 0.5]], dtype=torch.float64)
    labels = torch.arange(2 * num) % 2
    return white @ tril.mT + 8.0 * labels.unsqueeze(-1), labels


@pytest.mark.parametrize("kind", [Spherical(), Diagonal()])
def test_the_gain_by_hand(kind: Covariance) -> None:
    """Oracle: torch's own densities, a row and a kernel at a time."""
    X, _ = classes(0.6, 30)
    resp = torch.rand(60, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    fold = torch.randperm(60, generator=torch.Generator().manual_seed(0)) % FOLDS
    each = torch.zeros(60, dtype=torch.float64)
    for n in range(60):
        for j in range(3):
            weight = resp[:, j] * (fold != fold[n])
            mean = (weight.unsqueeze(-1) * X).sum(0) / weight.sum()
            S = torch.cov(X.T, aweights=weight, correction=0)
            own = S.diagonal().mean().repeat(2) if isinstance(kind, Spherical) else S.diagonal()
            both = [MultivariateNormal(mean, A).log_prob(X[n]) for A in (S, own.diag())]
            each[n] += resp[n, j] * (both[0] - both[1])
    found = covariance_gain(X, resp, kind)
    assert found.nats == pytest.approx(float(each.sum()), rel=1e-9)
    error = float(each.std(correction=0)) * 60**0.5
    assert found.chance == pytest.approx(max(10.0, 3.0 * error), rel=1e-9)
    assert f"(standard error {error:.0f})" in found.advice


def test_correlated_classes_are_told_of_full_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    """The gain is that of the densities, and the advice, followed, makes new rows likelier by as much."""
    X, labels = classes(0.9)
    round_ones = OverlapEM(prbf(2), alpha=0.0).run(X, labels)
    gain = round_ones.diagnostics()["covariance_gain"]
    assert gain == pytest.approx(-300.0 * math.log(1.0 - 0.9**2), rel=0.1)
    round_ones.summary()
    assert f"kernels with full covariances would be about {gain:.0f} nats likelier" in capsys.readouterr().out
    full = OverlapEM(prbf(2, kernels=Full()), alpha=0.0).run(X, labels)
    assert full.diagnostics()["notes"] == [] and full.covariance_gain is None
    new = classes(0.9, seed=1)
    assert float((full.log_prob(*new) - round_ones.log_prob(*new)).sum()) == pytest.approx(gain, rel=0.15)


@pytest.mark.parametrize("seed", range(5))
def test_round_classes_are_not(seed: int) -> None:
    X, labels = classes(0.0, 60, seed)
    assert OverlapEM(prbf(2)).run(X, labels).diagnostics()["notes"] == []


def test_a_loaded_network_has_no_rows_to_hold_out(tmp_path) -> None:  # type: ignore[no-untyped-def]
    X, labels = classes(0.9, 40)
    posterior = OverlapEM(prbf(2)).run(X, labels)
    posterior.save(tmp_path / "network")
    loaded = PRBFPosterior.load(tmp_path / "network", prbf(2))
    assert posterior.covariance_gain is not None and loaded.covariance_gain is None
    assert torch.equal(loaded.predict(X), posterior.predict(X)) and loaded.diagnostics()["notes"] == []
