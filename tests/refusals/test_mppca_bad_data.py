"""Poor data under EvidenceEM on mixtures of probabilistic PCA: what is said of them, beside finite numbers."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pyro_evidence import EvidenceEM, class_conditional
from pyro_evidence.models.mppca import DiagonalNoise, IsotropicNoise, mppca
from tests.mppca.test_fit import QUIET, fit, near, planes


def with_covariance(variances: list[float], num: int = 200) -> Tensor:
    """Data whose sample covariance is diagonal, with exactly these variances."""
    m = len(variances)
    raw = torch.randn(num, m, generator=torch.Generator().manual_seed(0))
    Q = torch.linalg.qr(raw - raw.mean(0)).Q
    return Q * (num * torch.tensor(variances)).sqrt()


def test_equal_eigenvalues_leave_only_a_span() -> None:
    """Canonical form says so, and the span is that of the two axes."""
    found = fit(with_covariance([9.0, 9.0, 0.2, 0.2, 0.2]), mppca(1, 2))
    subspace = found.principal_subspaces()[0]
    assert subspace is not None and not subspace.is_determined
    assert "axes [0, 1] have equal variances: their rotation is undetermined" in str(subspace)
    near(subspace.axes @ subspace.axes.mT, torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])), 1e-6)
    other = fit(with_covariance([9.0, 8.0, 0.2, 0.2, 0.2]), mppca(1, 2)).principal_subspaces()[0]
    assert other is not None and other.is_determined and "undetermined" not in str(other)


@pytest.mark.parametrize("noise", [IsotropicNoise(), DiagonalNoise()])
def test_pixels_that_never_change_take_no_part_in_the_planes(noise: IsotropicNoise | DiagonalNoise) -> None:
    Y = torch.cat([planes(120, 4), torch.full((120, 2), 7.0)], 1)
    found = fit(Y, mppca(2, 2, noise=noise), deletion=None, stop=replace(QUIET, tolerance=0.0))
    assert float(found.mode["W"][:, 4:].abs().max()) < 0.05 * float(found.mode["W"].abs().max())
    near(found.reconstruct()[:, 4:], Y[:, 4:], 0.02)


def test_a_cluster_of_fewer_data_than_latents_is_no_singularity() -> None:
    """Two data far from all others: maximum likelihood would put a plane through them and make it thin."""
    Y = torch.cat([planes(158), torch.tensor([[60.0, 0.0, 0.0, 0.0, 0.0], [0.0, 60.0, 0.0, 0.0, 0.0]])])
    found = fit(Y, mppca(4, 3))
    kept = found.active
    beta = found.hyperparameters["beta"].reshape(-1)[kept]
    assert float(beta.max()) < 1e3 and bool(found.log_prob().isfinite().all())
    assert bool((found.responsibilities().sum(0)[kept] > 1.0).all())


def test_a_component_that_died_keeps_its_place_and_takes_no_part() -> None:
    found = fit(planes(), mppca(5, 2))
    dead = ~found.active
    assert found.num_components == 2 and int(dead.sum()) == 3
    assert bool((found.hyperparameters["mixing"][dead] == 0).all())
    assert bool((found.responsibilities()[:, dead] == 0).all())
    assert bool((found.num_latents[dead] == 0).all()) and bool((found.gamma["alpha"][dead] == 0).all())
    assert [s is None for s in found.principal_subspaces()] == dead.tolist()
    assert bool(found.transform().mean.isfinite().all()) and bool(found.get_samples(5, seed=0)["W"].isfinite().all())


@pytest.mark.parametrize("rank", [1, 2])
def test_data_of_low_rank_are_their_own_plane(rank: int) -> None:
    """Without noise the plane is that of the data, and the noise ends at its prior and not at zero."""
    generator = torch.Generator().manual_seed(0)
    Y = torch.randn(80, rank, generator=generator) @ torch.randn(rank, 6, generator=generator)
    found = fit(Y, mppca(1, 2))
    near(found.reconstruct(), Y, 0.01)
    assert math.isfinite(float(found.log_prob().sum()))
    assert float(found.hyperparameters["beta"].max() * Y.var(0).mean()) < 1e10  # far from the largest allowed, 1e12
    assert (rank == 1) == bool(found.refusal)  # the second column has no length, and no orbit


def test_three_labels_of_any_kind() -> None:
    """Classes are what the labels say they are, not 0 to C - 1."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.tensor([7, -2, 40])[torch.arange(150) % 3]
    centre = 3.0 * torch.randn(3, 6, generator=generator)
    Y = centre[torch.arange(150) % 3] + torch.randn(150, 6, generator=generator)
    found = class_conditional(EvidenceEM(mppca(1, 2), stop=QUIET), Y[:90], labels[:90])
    assert found.classes.tolist() == [-2, 7, 40]
    assert float((found.labels(Y[90:]) == labels[90:]).double().mean()) > 0.95
    gappy = Y[90:].clone()
    gappy[:, 0] = torch.nan
    near(found.log_proba(gappy).exp().sum(-1), torch.ones(60))
    assert float((found.labels(gappy) == labels[90:]).double().mean()) > 0.85
