"""The gradient of the Laplace log evidence against finite differences of the log evidence itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_evidence import block_diagonal, damped, diagonal, exact_hessian, gauss_newton
from pyro_evidence.laplace import approximation, gradient
from pyro_evidence.precision.choices import Curvature
from pyro_evidence.program import LogJoint
from tests.models_for_tests.engine_models import (
    classes,
    curve,
    hierarchical,
    linear,
    logistic_ard,
    logistic_noncentred,
    logistic_sd,
    mixture,
    network,
    targets,
    two_clusters,
)

CASES = {
    "logistic, ARD": (logistic_ard, classes(), exact_hessian, None),
    "logistic, prior sds": (logistic_sd, classes(), exact_hessian, None),
    "logistic, non-centred": (logistic_noncentred, classes(), exact_hessian, None),
    "linear, alpha and beta": (linear, targets(), exact_hessian, None),
    "network": (network, curve(), exact_hessian, None),
    "network, Gauss-Newton": (network, curve(), gauss_newton, None),
    "network, block diagonal": (network, curve(), block_diagonal, None),
    "network, diagonal": (network, curve(), diagonal, None),
    "network, damped": (network, curve(), damped(exact_hessian, 0.5), None),
    "latent scale as hyperparameter": (hierarchical, classes(), exact_hessian, ["tau"]),
    "enumerated mixture": (mixture, (two_clusters(),), exact_hessian, None),
}


def central_difference(f: Callable[[Tensor], float], x: Tensor, step: float = 1e-3) -> Tensor:
    """Fourth-order differences of a scalar function."""

    def along(direction: Tensor) -> float:
        near = f(x + step * direction) - f(x - step * direction)
        far = f(x + 2 * step * direction) - f(x - 2 * step * direction)
        return (8.0 * near - far) / (12.0 * step)

    return torch.tensor([along(direction) for direction in torch.eye(len(x))])


@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_differences_of_the_log_evidence(name: str) -> None:
    case: tuple[Any, Any, Curvature, Any] = CASES[name]
    model, data, curvature, maximise = case
    joint = LogJoint(model, data, maximise=maximise)
    at = approximation.laplace_problem(joint, curvature)
    theta = joint.initial_theta + 0.3
    state = approximation.laplace_state(at, theta, joint.initial(1, seed=0)[0], cold=True)
    expected = central_difference(lambda x: approximation.laplace_state(at, x, state.u).objective, theta)
    torch.testing.assert_close(gradient.slope(state).total, expected, rtol=2e-6, atol=2e-6)


def test_mode_hyperprior_and_slope_at_one_place_take_one_run_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    joint = LogJoint(hierarchical, classes(), maximise=["tau"])
    problem = approximation.laplace_problem(joint)
    assert problem.shared is not None
    runs, trace_at = [], LogJoint.trace_at
    monkeypatch.setattr(LogJoint, "trace_at", lambda *args: runs.append(args) or trace_at(*args))
    theta = joint.initial_theta + 0.3
    state = approximation.laplace_state(problem, theta, joint.initial_u)
    found = gradient.slope(state)
    assert len(runs) == 1
    again = gradient.slope(approximation.laplace_state(problem, theta + 0.1, state.u))
    assert len(runs) == 2
    assert not torch.equal(again.total, found.total)
    assert torch.equal(gradient.slope(state).total, found.total)
