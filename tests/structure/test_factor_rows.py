"""Sparse linear predictors at several hyperparameters together; oracle: dense Hessians of the whole log density."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import laplace_problem, laplace_state
from pyro_evidence.models.gmrf import RandomWalk
from pyro_evidence.nested.inner import MarginalisedJoint, solve_inner
from pyro_evidence.numerics.evidence import log_evidence
from pyro_evidence.structure.density import AutogradDensity
from pyro_evidence.structure.factor_mode import StructuredProblem
from pyro_evidence.structure.factor_rows import PredictorRows

NUM = 250


def counts(y: Tensor) -> None:
    """The likelihood is the same at all hyperparameters, the prior is not."""
    scale = pyro.sample("scale", dist.HalfNormal(torch.tensor(0.1).double()))
    x = pyro.sample("x", RandomWalk(scale, NUM, order=2, level=10.0))
    with pyro.plate("data", NUM):
        pyro.sample("y", dist.Binomial(torch.tensor(4.0).double(), logits=x), obs=y)


def noisy(y: Tensor) -> None:
    """Noise and offset move with the hyperparameters."""
    scale = pyro.sample("scale", dist.HalfNormal(torch.tensor(0.1).double()))
    shift = pyro.sample("shift", dist.HalfNormal(torch.tensor(1.0).double()))
    x = pyro.sample("x", RandomWalk(scale, NUM, level=10.0))
    with pyro.plate("data", NUM):
        pyro.sample("y", dist.StudentT(5.0, x + shift, 0.5 + shift), obs=y)


def groups(y: Tensor) -> None:
    """Independent latents, which have no families."""
    scale = pyro.sample("scale", dist.HalfNormal(torch.tensor(1.0).double()))
    with pyro.plate("data", NUM):
        a = pyro.sample("a", dist.Normal(torch.zeros(NUM).double(), scale))
        pyro.sample("y", dist.Poisson(a.exp()), obs=y)


def data() -> Tensor:
    torch.manual_seed(0)
    return torch.randint(0, 5, (NUM,)).double()


def dense(joint: MarginalisedJoint, theta: Tensor, u: Tensor) -> float:
    density = AutogradDensity(joint, None)
    for _ in range(12):
        value, slope = density.gradient(u, theta)
        tril = torch.linalg.cholesky(density.precision(u, theta).detach())
        u = u + torch.cholesky_solve(slope.unsqueeze(-1), tril).squeeze(-1)
    found = log_evidence(value[0], 2.0 * tril[0].diagonal().log().sum(), u.shape[-1])
    return float(found + joint.log_hyperprior(theta))


@pytest.mark.parametrize(("model", "outside"), [(counts, ["scale"]), (noisy, ["scale", "shift"]), (groups, ["scale"])])
def test_log_evidence_of_rows_is_that_of_dense_matrices(
    model: Any, outside: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    joint = MarginalisedJoint(model, (data(),), marginalise=outside)
    problem = laplace_problem(joint, None)
    assert problem.factors is not None and problem.factors.density.linear is not None
    start = laplace_state(problem, joint.initial_theta, joint.initial_u, cold=True).u
    theta = joint.initial_theta + torch.tensor([[-0.6], [0.0], [0.8]]).double()
    monkeypatch.setattr(StructuredProblem, "find_modes", None)  # nothing is searched one by one
    found = solve_inner(problem, theta, start.expand(3, -1))
    expected = [dense(joint, t, start.unsqueeze(0)) for t in theta]
    assert found.log_density.tolist() == pytest.approx(expected, abs=1e-8)


def test_rows_have_the_gradient_and_value_of_the_model() -> None:  # oracle: autograd of the whole
    joint = MarginalisedJoint(noisy, (data(),), marginalise=["scale", "shift"])
    problem = laplace_problem(joint, None)
    assert problem.factors is not None
    torch.manual_seed(1)
    start, move = (torch.randn(2, joint.latents.size).double() for _ in range(2))
    theta = joint.initial_theta + 0.3 * torch.randn(2, 2).double()
    rows = PredictorRows(problem.factors.density, start, theta)
    value, slope = rows.gradient(start + move, torch.arange(2))
    whole, exact = AutogradDensity(joint, None).gradient(start + move, theta)
    assert value.tolist() == pytest.approx(whole.tolist(), rel=1e-11)
    assert torch.allclose(slope, exact, rtol=1e-9, atol=1e-8)
