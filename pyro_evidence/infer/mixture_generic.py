"""Evidence for any Pyro model with one local discrete site: EM to a mode, then the exact gradient of the evidence."""

from dataclasses import dataclass
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_evidence.errors import UnsupportedModel
from pyro_evidence.infer import type2
from pyro_evidence.infer.iterate import Fit, Stop, iterate, require_convergence
from pyro_evidence.infer.restarts import Restarts, search
from pyro_evidence.infer.type2 import TypeII
from pyro_evidence.laplace import problem
from pyro_evidence.ops import derivatives, newton
from pyro_evidence.posterior import LaplacePosterior
from pyro_evidence.program import LogJoint


@dataclass(frozen=True)
class ExpectedLogJoint:
    """``sum_nk r_nk log p(x_n, k, w) + log p(w)``, which an M-step climbs: the log joint with its labels held."""

    joint: LogJoint
    resp: Tensor  # (N, K)

    def _one(self, u: Tensor, theta: Tensor) -> Tensor:
        table = self.joint.table(u, theta).double()
        held = (self.resp * torch.where(self.resp > 0, table, 0.0)).sum()
        return self.joint.log_joint(u, theta) - table.logsumexp(-1).sum() + held

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        """Values of rows ``(R, D)``, nats, shape ``(R,)``."""
        with pyro.validation_enabled(False):
            return torch.stack([self._one(row, theta) for row in u])

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Values and gradients."""
        return derivatives.gradient(self.log_joint, u, theta)


def expectation_maximisation(joint: LogJoint, u: Tensor, theta: Tensor, num_steps: int) -> Tensor:
    """EM at fixed hyperparameters from one start ``(D,)``: each M-step is a few Newton steps with the exact Hessian."""
    for _ in range(num_steps):
        expected: Any = ExpectedLogJoint(joint, joint.responsibilities(u, theta).detach().double())

        def curvature(v: Tensor, f: Any = expected) -> Tensor:
            return -derivatives.hessian(f.log_joint, v, theta)

        mode = newton.climb(expected, curvature, u.unsqueeze(0), theta, newton.Limits(1e-8, 5))
        u = mode.u[0].detach()
    return u


def climb_evidence(joint: LogJoint, starts: Tensor, num_em: int, stop: Stop) -> tuple[Fit[TypeII], Restarts]:
    """The best of the distinct modes that EM leads to, each with its hyperparameters where the evidence is stationary.

    :param starts: unconstrained weights, shape ``(R, D)``.
    """
    theta = joint.initial_theta
    u = torch.stack([expectation_maximisation(joint, start, theta, num_em) for start in starts])
    found = search(problem(joint), u, theta)
    fits = [iterate(type2.step, type2.at(state), stop, "EvidenceEM") for state in found.states]
    return max(fits, key=lambda fit: fit.state.objective), found


def run_generic(joint: LogJoint, why_not: Exception, restarts: int, seed: int, stop: Stop) -> LaplacePosterior:
    """A Laplace posterior of a model that is no mixture of linear-Gaussian kernels.

    :param why_not: what the recognition of mixtures said.
    :raises UnsupportedModel: when the model has not exactly one local discrete site.
    :raises NotConverged: with ``stop.throw``, unless converged.
    """
    if len(joint.discrete) != 1:
        raise UnsupportedModel(
            f"{why_not} Nor has it exactly one discrete latent site; LaplaceEvidence may do."
        ) from None
    best, found = climb_evidence(joint, joint.initial(restarts, seed), 5, stop)
    heights = torch.tensor([float(s.log_evidence) for s in found.states] + [torch.nan], dtype=torch.float64)
    posterior = LaplacePosterior(
        best.state.laplace, best.status.value, best.objectives, heights[found.reached], found.failures
    )
    require_convergence("EvidenceEM", best.status, posterior, stop)
    return posterior
