"""Where a network meets its data exactly, its fit ends and says so; noise that is small but there is found."""

import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, Start, Status, Stop
from pyro_evidence.compare import linearised
from pyro_evidence.laplace import remedies
from pyro_evidence.laplace.approximation import laplace_problem
from pyro_evidence.laplace.restarts import starts, warm_up
from pyro_evidence.models.mlp import MLP, Regression
from pyro_evidence.program import LogJoint

KEPT = Stop(progress=False, throw=False)


def clusters() -> tuple[Tensor, Tensor]:
    """Seven rows about each of three points, one target for each point: a saturated unit or two meet them all."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[-2.0, 0.0], [2.0, 1.0], [0.0, 3.0]]).repeat_interleave(7, 0)
    return centres + 0.3 * torch.randn(21, 2, generator=generator), torch.arange(3.0).repeat_interleave(7) - 1.0


def curve(noise: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(120, 2, generator=generator)
    t = torch.tanh(X @ torch.tensor([1.0, -0.5])) - 0.7 * torch.tanh(X @ torch.tensor([0.3, 1.2]) + 0.4)
    return X, t + noise * torch.randn(120, generator=generator)


def test_targets_that_are_met_exactly_end_the_fit_at_a_posterior_that_can_be_used() -> None:
    X, t = clusters()
    with pytest.warns(UserWarning, match="the noise goes to nothing"):
        posterior = LaplaceEvidence(MLP(2, 3), start=Start(restarts=1), stop=KEPT).run(X, t)
    assert posterior.status == Status.INTERPOLATING.value
    beta = float(posterior.hyperparameters["beta"])
    mean, _ = linearised(posterior, X)
    assert beta > 1e6 and float((mean[:, 0] - t).abs().max()) < 1e-2


@pytest.mark.parametrize("net", [MLP(2, 3, output=Regression(beta=100.0)), MLP(2, 1)], ids=["noise fixed", "one unit"])
def test_what_the_letter_advises_converges(net: MLP) -> None:
    assert "Fix the noise precision, or take a network with fewer hidden units" in Status.INTERPOLATING.value
    assert LaplaceEvidence(net, start=Start(restarts=1), stop=KEPT).run(*clusters()).status == "converged"


@pytest.mark.parametrize("noise", [1e-2, 1e-5])
def test_noise_that_is_small_but_there_is_found(noise: float) -> None:
    posterior = LaplaceEvidence(MLP(2, 2), stop=KEPT).run(*curve(noise))
    assert posterior.status == "converged"
    assert float(posterior.hyperparameters["beta"]) ** -0.5 == pytest.approx(noise, rel=0.2)


def test_the_warm_up_leaves_a_row_whose_noise_is_nothing() -> None:
    problem = laplace_problem(LogJoint(MLP(2, 3), clusters(), {}))
    theta, _ = warm_up(problem, problem.joint.initial_theta.unsqueeze(0), starts(problem.joint, 1, 0))
    above = (theta - problem.joint.initial_theta)[0, problem.joint.hypers.slices["beta"]]
    assert remedies.A_MILLION < float(above) < remedies.A_MILLION + 1.0
