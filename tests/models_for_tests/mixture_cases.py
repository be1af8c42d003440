"""What tests of mixtures share: data far from the origin, and the generic posterior of the same Pyro model."""

from functools import partial

import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import laplace_problem, laplace_state
from pyro_evidence.mixture import MixturePosterior
from pyro_evidence.mixture.evidence import log_joint, well_determined
from pyro_evidence.mixture.expectation import Mixture, MixtureData
from pyro_evidence.numerics.evidence import log_evidence as laplace
from pyro_evidence.program import LogJoint

assert_approx = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-8)


def log_evidence(data: MixtureData, at: Mixture, A: Tensor) -> Tensor:
    """Laplace's log evidence by some curvature, nats, shape ``(R,)``; Husmeier (2000), eq. 2.11."""
    return laplace(log_joint(data, at), well_determined(A, at.alpha).log_det, at.alpha[0].numel())


def far_blobs(num_data: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.tensor([[500.0, 0.0], [560.0, 0.3]])
    which = torch.randint(2, (num_data,), generator=generator)
    return centres[which] + torch.tensor([10.0, 0.1]) * torch.randn(num_data, 2, generator=generator)


def same_as_generic(found: MixturePosterior, *args: Tensor) -> None:
    """Oracle: the generic Laplace approximation of the very model that NUTS would sample, by autograd."""
    joint = LogJoint(found.model, args)
    state = laplace_state(laplace_problem(joint), joint.initial_theta, found.state.u)
    assert_approx(state.log_evidence, found.log_evidence)
    assert_approx(state.log_joint, found.state.log_joint)
    assert_approx(state.u, found.state.u)
    assert_approx(state.precision.variance[0], found.state.precision.variance[0])
