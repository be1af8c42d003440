"""Two planes, and a fit of a mixture of probabilistic PCA to them, shared by its tests."""

from dataclasses import replace

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import EvidenceEM, Start, Stop
from pyro_evidence.models.mppca import MPPCA, mppca
from pyro_evidence.mppca import MPPCAPosterior

QUIET = Stop(tolerance=1e-6, gradient_tolerance=1e-2, num_steps=60, throw=False, progress=False)


SHORT = replace(QUIET, num_steps=8, tolerance=0.0)  # so many rounds, asked for


def near(actual: Tensor, expected: Tensor, tolerance: float = 1e-8) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def planes(num: int = 160, m: int = 5) -> Tensor:
    """Two planes, far apart."""
    generator = torch.Generator().manual_seed(0)
    centre, W = 4.0 * torch.randn(2, m, generator=generator), torch.randn(2, m, 2, generator=generator)
    z = torch.arange(num) % 2
    x, noise = torch.randn(num, 2, 1, generator=generator), torch.randn(num, m, generator=generator)
    return centre[z] + (W[z] @ x).squeeze(-1) + 0.3 * noise


def fit(Y: Tensor, model: MPPCA | None = None, **settings: object) -> MPPCAPosterior:
    chosen: dict[str, object] = {"stop": QUIET, "start": Start(restarts=2)} | settings
    found = EvidenceEM(model or mppca(3, 2), **chosen).run(Y)  # type: ignore[arg-type]
    assert isinstance(found, MPPCAPosterior)
    return found


def my_model(Y: Tensor) -> None:
    """A user's own, with other names, a scale for a precision, and no learned mixing."""
    spread = pyro.param("spread", torch.tensor(2.0), constraint=constraints.positive)
    noise = pyro.param("noise", torch.ones(2, 1), constraint=constraints.positive)
    middle = pyro.param("middle", Y[:2].clone())
    L = pyro.sample("L", dist.Normal(torch.zeros(2, 5, 2), spread).to_event(3))
    kernels = dist.LowRankMultivariateNormal(middle, L, noise.square().expand(2, 5))
    with pyro.plate("rows", len(Y)):
        pyro.sample("obs", dist.MixtureSameFamily(dist.Categorical(torch.tensor([0.5, 0.5])), kernels), obs=Y)
