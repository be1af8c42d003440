"""One fit of each engine with tensors on a GPU has the numbers of the same tensors on the processor."""

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import REVM, RVM, VRVM, EvidenceEM, LaplaceEvidence, OverlapEM, Stop, run_many
from pyro_evidence.models.basis import GaussianRBF, Linear
from pyro_evidence.models.gp import gp_regression
from pyro_evidence.models.kernels import RBF
from pyro_evidence.models.mixture import FullNoise, gaussian_mixture
from pyro_evidence.models.mppca import mppca
from pyro_evidence.models.prbf import prbf
from pyro_evidence.models.regression import regression

QUIET = Stop(progress=False)
HAS_GPU = torch.cuda.is_available()


def curve(device: str) -> tuple[Tensor, Tensor]:
    X = torch.linspace(-2.0, 2.0, 40, device=device).unsqueeze(-1)
    return X, (2.0 * X[:, 0]).sin() + 0.2 * (17.0 * X[:, 0]).cos()


def clusters(device: str) -> Tensor:
    angle = torch.arange(60.0, device=device)
    place = torch.stack([(3.0 * angle).sin(), (5.0 * angle).cos()], -1)
    return place + 6.0 * (angle >= 30.0).unsqueeze(-1)


def schools(sigma: Tensor, y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(sigma.new_zeros(()), 5.0))
    tau = pyro.sample("tau", dist.HalfNormal(sigma.new_tensor(5.0)))
    with pyro.plate("schools", len(y)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def groups(group: Tensor, y: Tensor) -> None:
    """Many groups, whose effects are blocks of their own."""
    scale = pyro.param("scale", lambda: y.new_ones(()), constraint=dist.constraints.positive)
    with pyro.plate("groups", 400):
        a = pyro.sample("a", dist.Normal(y.new_zeros(()), scale))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=a[group]), obs=y)


def of_schools(device: str) -> Tensor:
    sigma = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], device=device)
    y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], device=device)
    return LaplaceEvidence(schools, stop=QUIET).run(sigma, y).log_evidence


def of_groups(device: str) -> Tensor:
    group = torch.arange(400, device=device).repeat_interleave(6)
    y = ((37 * torch.arange(2400, device=device)) % 11 < (group % 9) + 1).double()
    return LaplaceEvidence(groups, stop=QUIET).run(group, y).log_evidence


def of_many(device: str) -> Tensor:
    X, t = curve(device)
    targets = torch.stack([t + 0.1 * number for number in range(10)])
    fits = run_many(LaplaceEvidence(regression(Linear()), stop=QUIET), X.expand(10, *X.shape), targets)
    return fits.log_evidence.sum()


FITS: dict[str, Callable[[str], Tensor]] = {
    "type-II maximum likelihood": lambda d: (
        LaplaceEvidence(regression(Linear()), stop=QUIET).run(*curve(d)).log_evidence
    ),
    "scales integrated": of_schools,
    "blocks": of_groups,
    "a Gaussian process": lambda d: LaplaceEvidence(gp_regression(RBF()), stop=QUIET).run(*curve(d)).log_evidence,
    "many fits": of_many,
    "a mixture": lambda d: EvidenceEM(gaussian_mixture(3, noise=FullNoise()), stop=QUIET).run(clusters(d)).log_evidence,
    "planes": lambda d: EvidenceEM(mppca(2, 1), stop=QUIET).run(clusters(d)).log_evidence,
    "overlapping classes": lambda d: (
        OverlapEM(prbf(2), stop=QUIET).run(clusters(d), torch.arange(60, device=d) // 30).log_prob(clusters(d)).sum()
    ),
    "RVM": lambda d: RVM(regression(GaussianRBF(curve(d)[0], 0.8), beta=25.0)).run(*curve(d)).log_evidence,
    "variational RVM": lambda d: VRVM(regression(Linear(), beta=25.0)).run(*curve(d)).log_evidence,
    "REVM": lambda d: REVM(regression(GaussianRBF(curve(d)[0], 0.8), beta=25.0)).run(*curve(d)).log_evidence,
}


@pytest.mark.parametrize("name", FITS)
def test_the_fits_are_fits(name: str) -> None:
    assert bool(torch.as_tensor(FITS[name]("cpu")).isfinite())


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@pytest.mark.parametrize("name", FITS)
def test_a_fit_on_a_gpu_is_that_on_the_processor(name: str) -> None:
    assert float(FITS[name]("cuda")) == pytest.approx(float(FITS[name]("cpu")), rel=1e-8)
