"""Sparse linear predictors at several hyperparameters together; oracle: dense Hessians of the whole log density."""

from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import Problem, laplace_problem, laplace_state
from pyro_evidence.laplace.gradient import slope
from pyro_evidence.models.gmrf import AR, RandomWalk, Seasonal
from pyro_evidence.nested.inner import MarginalisedJoint, marginalised_problem, solve_inner
from pyro_evidence.numerics import batched, lbfgs
from pyro_evidence.numerics.evidence import log_evidence
from pyro_evidence.precision.dense import FLOAT, Remade, Separate
from pyro_evidence.program import predictors
from pyro_evidence.structure.density import AutogradDensity
from pyro_evidence.structure.factor_mode import PredictorRows, StructuredProblem

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


def effects(y: Tensor) -> None:
    """Correlated effects of groups, and three weights whose covariance is given."""
    scale = pyro.sample("scale", dist.HalfNormal(torch.ones(2).double()).to_event(1))
    ties = pyro.sample("ties", dist.LKJCholesky(2, torch.tensor(2.0).double()))
    given = torch.eye(3).double() + 0.5
    w = pyro.sample("w", dist.MultivariateNormal(torch.ones(3).double(), precision_matrix=given))
    with pyro.plate("groups", 125):
        u = pyro.sample("u", dist.MultivariateNormal(torch.zeros(2).double(), scale_tril=scale.unsqueeze(-1) * ties))
    number, x = torch.arange(NUM) % 125, torch.linspace(-1.0, 1.0, NUM).double()
    with pyro.plate("data", NUM):
        pyro.sample("y", dist.Poisson((w[0] + w[1] * x + w[2] * x**2 + u[number, 0] + u[number, 1] * x).exp()), obs=y)


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


@pytest.mark.parametrize(
    ("model", "outside"),
    [(counts, ["scale"]), (noisy, ["scale", "shift"]), (groups, ["scale"]), (effects, ["scale", "ties"])],
)
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


def series(y: Tensor) -> None:
    """Two fields of several values a factor and two normals: their coefficients move with the hyperparameters."""
    scale = pyro.sample("scale", dist.HalfNormal(torch.tensor(0.1).double()))
    partial = pyro.sample("partial", dist.Uniform(-torch.ones(2).double(), 1.0).to_event(1))
    x = pyro.sample("x", AR(scale, partial, NUM))
    season = pyro.sample("season", Seasonal(scale, NUM, 12))
    w = pyro.sample("w", dist.Normal(torch.zeros(2).double(), 3.0 * scale).to_event(1))
    with pyro.plate("data", NUM):
        pyro.sample("y", dist.Normal(x + season + w[0] + w[1] * torch.arange(NUM).double() / NUM, 1.0), obs=y)


@pytest.mark.parametrize(
    ("model", "outside", "num"), [(series, ["scale", "partial"], 3), (effects, ["scale", "ties"], 2)]
)
def test_precisions_that_fields_say_are_the_second_derivatives(model: Any, outside: list[str], num: int) -> None:
    """Oracles: products with the true Hessian, differences."""
    joint = MarginalisedJoint(model, (data(),), marginalise=outside)
    problem = laplace_problem(joint, None)
    assert problem.factors is not None
    density, theta = problem.factors.density, joint.initial_theta + 0.3
    assert len(density.families) == num and all(family.closed for family in density.families)
    gap = density.certificate(joint.initial_u, theta, density.elements(joint.initial_u, theta))
    assert float(gap.max()) < 1e-12
    exact, step = slope(laplace_state(problem, theta, joint.initial_u)).total, 1e-4 * torch.eye(3).double()
    ends = [[laplace_state(problem, theta + s * e, joint.initial_u).objective for s in (1.0, -1.0)] for e in step]
    assert exact.tolist() == pytest.approx([(a - b) / 2e-4 for a, b in ends], rel=1e-6)


def factorisations(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled, from here on, with how many matrices are factorised at a time."""
    assert problem.factors is not None
    made, kind = list[int](), type(problem.factors.density.plan)
    whole = kind.factorise_rows
    monkeypatch.setattr(kind, "factorise_rows", lambda *args: made.append(len(args[1][0])) or whole(*args))
    return made


def test_gaussian_data_take_one_factorisation_and_light_factors_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    joint = MarginalisedJoint(series, (data(),), marginalise=["scale", "partial"])
    problem = laplace_problem(joint, None)
    made = factorisations(problem, monkeypatch)
    theta, start = joint.initial_theta + torch.tensor([[0.0], [0.2]]).double(), joint.initial_u.expand(2, -1)
    kept = solve_inner(problem, theta, start)
    assert made == [2]
    monkeypatch.setattr(batched, "BATCH_NUMBERS", 1)  # no room for two factors at a time
    monkeypatch.setattr(batched, "HELD_NUMBERS", 1)  # nor for those of two later on
    light = solve_inner(problem, theta, start, held=0)
    assert made == [2, 1, 1]
    assert isinstance(light.precision, Separate) and all(isinstance(A, Remade) for A in light.precision.members)
    monkeypatch.setattr(joint, "trace", None)  # the model is not run again
    assert torch.allclose(light.precision.variance, kept.precision.variance, rtol=1e-12)
    assert torch.equal(light.precision.log_det, kept.precision.log_det)
    assert torch.allclose(light.precision.solve(start + 1.0), kept.precision.solve(start + 1.0), rtol=1e-10)


def test_factors_are_kept_as_long_as_they_have_room_beside_those_of_other_rows() -> None:
    joint = MarginalisedJoint(counts, (data(),), marginalise=["scale"])
    problem = laplace_problem(joint, None)
    assert problem.factors is not None
    room = FLOAT * batched.HELD_NUMBERS // problem.factors.density.plan.num_bytes
    theta, start = torch.tensor([[-1.0], [0.5]]).double(), joint.initial_u.expand(2, -1)
    for held, kept in ((None, True), (room - 2, True), (room - 1, False)):
        found = solve_inner(problem, theta, start, held=held).precision
        assert isinstance(found, Separate)
        assert [not isinstance(A, Remade) for A in found.members] == [kept] * 2


def test_heights_to_a_thousandth_of_a_nat_take_fewer_factorisations(monkeypatch: pytest.MonkeyPatch) -> None:
    joint = MarginalisedJoint(counts, (data(),), marginalise=["scale"])
    problem = laplace_problem(joint, None)
    made = factorisations(problem, monkeypatch)
    theta, start = torch.tensor([[-1.0], [0.5]]).double(), joint.initial_u.expand(2, -1)
    exact, num = solve_inner(problem, theta, start).log_density, sum(made)
    found = solve_inner(problem, theta, start, rough=True).log_density
    assert found.tolist() == pytest.approx(exact.tolist(), abs=1e-3)
    assert sum(made) < 2 * num


def test_a_factor_serves_several_steps_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    joint = MarginalisedJoint(counts, (data(),), marginalise=["scale"])
    problem = laplace_problem(joint, None)
    made = factorisations(problem, monkeypatch)
    theta, start = torch.tensor([[-1.0], [0.5]]).double(), joint.initial_u.expand(2, -1)
    near = solve_inner(problem, theta - 0.3, start).u
    made.clear()
    found = solve_inner(problem, theta, near)
    assert sum(made) <= 5  # Newton's steps alone take nine
    for row in range(len(theta)):  # oracle: Newton on the Hessian by autograd
        density, u = AutogradDensity(joint, None), found.u[row : row + 1]
        slope, A = density.gradient(u, theta[row])[1][0], density.precision(u, theta[row])[0]
        assert float(slope @ torch.linalg.solve(A, slope)) < 1e-18


def test_rows_that_may_be_missing_are_searched_together_only(monkeypatch: pytest.MonkeyPatch) -> None:
    joint = MarginalisedJoint(counts, (data(),), marginalise=["scale"])
    problem, alone = laplace_problem(joint, None), list[float]()
    find = StructuredProblem.find_modes
    monkeypatch.setattr(lbfgs, "STEPS_ON", 20)  # none of them gets there
    monkeypatch.setattr(
        StructuredProblem, "find_modes", lambda *args, **kw: alone.append(float(args[2])) or find(*args, **kw)
    )
    start = laplace_state(problem, joint.initial_theta, joint.initial_u, cold=True).u
    alone.clear()
    theta = torch.tensor([[-3.0], [-27.0], [-45.0]]).double()  # the data are beyond rounding at the last two
    found = solve_inner(problem, theta, start.expand(3, -1), searches=torch.tensor([2, 0, 1]))
    assert torch.isfinite(found.log_density).tolist() == [True, False, False]
    assert set(alone) == {-45.0}


def test_rows_of_a_quadratic_prior_take_one_run_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = laplace_problem(MarginalisedJoint(effects, (data(),), marginalise=["scale", "ties"]))
    joint, known = problem.joint, problem.structure.factors
    assert known is not None and known.is_quadratic
    u, theta = torch.randn(7, joint.latents.size, generator=torch.Generator().manual_seed(1)), joint.initial_theta
    expected, rows, prior = joint.log_joint(u, theta), [], predictors.log_prior_rows
    monkeypatch.setattr(predictors, "log_prior_rows", lambda j, u, t: rows.append(len(u)) or prior(j, u, t))
    found = replace(known, about=u[:1]).log_joint(u, theta.expand(7, -1))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-9)
    assert rows == [1]


def graded(y: Tensor) -> None:
    """Grades, whose cutpoints are latent beside the predictor: nothing that is read as a linear predictor."""
    scale = pyro.sample("scale", dist.HalfNormal(torch.ones(2).double()).to_event(1))
    first = pyro.sample("first", dist.Normal(torch.tensor(-1.0).double(), 2.0))
    gap = pyro.sample("gap", dist.Exponential(torch.tensor(1.0).double()))
    with pyro.plate("groups", 30):
        u = pyro.sample("u", dist.Normal(torch.zeros(2).double(), scale).to_event(1))
    number, x = torch.arange(NUM) % 30, torch.linspace(-1.0, 1.0, NUM).double()
    with pyro.plate("data", NUM):
        cutpoints = torch.stack([first, first + gap])
        pyro.sample("y", dist.OrderedLogistic(u[number, 0] + u[number, 1] * x, cutpoints), obs=y.clamp(max=2.0))


def test_effects_beside_latent_cutpoints_are_searched_by_few_derivatives() -> None:
    """Fourteen, where a dense Hessian takes one for each of the 62 coordinates; and small factors are kept."""
    joint = MarginalisedJoint(graded, (data(),), marginalise=["scale"])
    problem = marginalised_problem(joint, None)
    assert problem.factors is not None and problem.factors.density.linear is None
    start = laplace_state(problem, joint.initial_theta, joint.initial_u, cold=True).u
    theta = joint.initial_theta + torch.tensor([[-0.4], [0.0], [0.5]]).double()
    found = solve_inner(problem, theta, start.expand(3, -1), held=0)
    expected = [dense(joint, t, start.unsqueeze(0)) for t in theta]
    assert found.log_density.tolist() == pytest.approx(expected, abs=1e-8)
    assert isinstance(found.precision, Separate) and not any(isinstance(A, Remade) for A in found.precision.members)
    assert problem.factors.density.second_of(problem.factors.density.differentiated).num_passes == 14
