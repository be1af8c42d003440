"""A site a step: loops over hundreds of sites against the same density with all steps in one site."""

import pickle
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import LaplaceEvidence, Start
from pyro_evidence.laplace.approximation import Problem, is_certified, laplace_problem, laplace_state
from pyro_evidence.laplace.gradient import slope
from pyro_evidence.numerics.newton import Limits
from pyro_evidence.precision.choices import exact_hessian
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.structure import factor_terms, recognise


def counts(num: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x, found = 0.0, []
    for _ in range(num):
        x = 0.9 * x + 0.4 * float(torch.randn((), generator=generator))
        found.append(torch.poisson(torch.tensor(x).exp(), generator=generator))
    return torch.stack(found).double()


def scale() -> Tensor:
    return pyro.param("s", torch.tensor(0.5).double(), constraint=constraints.positive)


def looped(y: Tensor) -> None:
    s, x = scale(), y.new_zeros(())
    for t in pyro.markov(range(len(y))):
        x = pyro.sample(f"x_{t}", dist.Normal(0.9 * x, s))
        pyro.sample(f"y_{t}", dist.Poisson(x.exp()), obs=y[t])


def at_once(y: Tensor) -> None:
    s = scale()
    with pyro.plate("steps", len(y)):
        x = pyro.sample("x", dist.Normal(y.new_zeros(()), 1e8).mask(False))
        pyro.sample("y", dist.Poisson(x.exp()), obs=y)
    pyro.sample("dx", dist.Normal(torch.cat([y.new_zeros(1), 0.9 * x[:-1]]), s).to_event(1), obs=x)


def test_a_loop_of_markov_is_the_site_of_all_its_steps() -> None:
    y = counts(40)
    found, expected = (LaplaceEvidence(model).run(y) for model in (looped, at_once))
    torch.testing.assert_close(found.log_evidence, expected.log_evidence, rtol=1e-9, atol=1e-8)
    torch.testing.assert_close(found.hyperparameters["s"], expected.hyperparameters["s"], rtol=1e-5, atol=0.0)
    density = found.state.problem.structure.factors
    assert density is not None and density.terms is not None
    assert len(density.terms.replay.batches) < 40


def chains(y: Tensor) -> None:
    """Hidden states of several sequences, summed out step by step."""
    stay = pyro.sample("stay", dist.Beta(4.0, 2.0).expand([2]).to_event(1))
    mean = pyro.sample("mean", dist.Normal(torch.tensor([-1.0, 1.0]).double(), 1.0).to_event(1))
    for n, row in enumerate(y):
        x: Any = 0
        for t in pyro.markov(range(len(row))):
            x = pyro.sample(f"x_{n}_{t}", dist.Bernoulli(stay[x]), infer={"enumerate": "parallel"}).long()
            pyro.sample(f"y_{n}_{t}", dist.Normal(mean[x], 0.7), obs=row[t])


def many_sites(y: Tensor) -> None:
    """Few latents, seen through other curves at each of many sites."""
    a, b = (pyro.sample(name, dist.Normal(y.new_zeros(()), 1.0)) for name in "ab")
    for n, row in enumerate(y):
        with pyro.plate(f"rows_{n}", len(row)):
            pyro.sample(f"y_{n}", dist.StudentT(4.0, a * torch.tanh(b * n / len(y)), 0.5), obs=row)


@pytest.mark.parametrize(("model", "shape"), [(chains, (6, 5)), (many_sites, (40, 2))])
def test_loops_over_sites_that_are_summed_out_or_observed(
    model: Callable[..., None], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    y = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()
    engine = LaplaceEvidence(model, start=Start(tour=0))
    found = engine.run(y)
    density = found.state.problem.structure.density
    assert density.terms is not None and 2 * len(density.terms.replay.batches) < density.terms.replay.num_operations
    u = torch.randn(3, len(found.state.u), generator=torch.Generator().manual_seed(1)).double()
    theta = found.state.theta
    torch.testing.assert_close(density.log_joint(u, theta), density.joint.log_joint(u, theta), rtol=1e-10, atol=1e-10)
    copied = pickle.loads(pickle.dumps(density.terms))
    assert torch.equal(copied.log_joint(u, theta), density.terms.log_joint(u, theta))
    monkeypatch.setattr(factor_terms, "SITES", 1000)
    expected = engine.run(y)
    assert expected.state.problem.structure.density.terms is None
    torch.testing.assert_close(found.log_evidence, expected.log_evidence, rtol=1e-9, atol=1e-8)


def second_order(y: Tensor) -> None:
    """An autoregression of order two, a global mean, a plate in every step, a step without data."""
    s, mean = scale(), pyro.sample("mean", dist.Normal(0.0, 1.0))
    before = [y.new_zeros(()), y.new_zeros(())]
    for t in pyro.markov(range(len(y) // 2), history=2):
        x = pyro.sample(f"x_{t}", dist.Normal(0.6 * before[0] + 0.2 * before[1], s))
        before = [x, before[0]]
        with pyro.plate(f"rows_{t}", 2):
            if t % 7:
                pyro.sample(f"y_{t}", dist.Poisson((mean + x).exp()), obs=y[2 * t : 2 * t + 2])


def vectors(y: Tensor) -> None:
    """Sites of two numbers, one of them constrained."""
    s, x = scale(), y.new_zeros(2)
    for t in pyro.markov(range(len(y) // 2)):
        x = pyro.sample(f"x_{t}", dist.Normal(0.8 * x, s).to_event(1))
        r = pyro.sample(f"r_{t}", dist.Gamma(3.0, 3.0 * x[0].exp()))
        pyro.sample(f"y_{t}", dist.Poisson(r * x[1].exp()), obs=y[t])


def branching(y: Tensor) -> None:
    """A density with a corner, which the program goes round by a branch."""
    s, x = scale(), y.new_zeros(())
    for t in pyro.markov(range(len(y))):
        x = pyro.sample(f"x_{t}", dist.Normal(0.9 * x, s))
        rate = x.exp() if bool(x < 3.0) else 20.0 + 20.0 * (x - 3.0)
        pyro.sample(f"y_{t}", dist.Poisson(rate), obs=y[t])


@pytest.mark.parametrize(
    ("model", "num", "is_replayed"), [(second_order, 52, True), (vectors, 50, True), (branching, 30, False)]
)
def test_evidence_and_slope_are_those_of_the_dense_hessian(
    model: Callable[..., None], num: int, is_replayed: bool
) -> None:
    joint = LogJoint(model, (counts(num),))
    problem = laplace_problem(joint)
    assert (problem.factors is not None and problem.factors.density.terms is not None) == is_replayed
    plain = Problem(joint, recognise.recognise(joint), exact_hessian, problem.active)
    start = joint.initial(1, 0)[0]
    found, expected = (laplace_state(p, joint.initial_theta, start, cold=True) for p in (problem, plain))
    assert is_certified(found)
    torch.testing.assert_close(found.log_evidence, expected.log_evidence, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(slope(found).total, slope(expected).total, rtol=1e-6, atol=1e-6)


def running(y: Tensor) -> None:
    s, x = scale(), y.new_zeros(())
    for t in range(len(y)):
        x = 0.9 * x + s * pyro.sample(f"e_{t}", dist.Normal(y.new_zeros(()), 1.0))
        pyro.sample(f"y_{t}", dist.Poisson(x.exp()), obs=y[t])


def run_at_once(y: Tensor) -> None:
    s, lag = scale(), torch.arange(len(y))
    gap = (lag.unsqueeze(-1) - lag).double()
    with pyro.plate("steps", len(y)):
        e = pyro.sample("e", dist.Normal(y.new_zeros(()), 1.0))
        pyro.sample("y", dist.Poisson((s * (0.9**gap).tril() @ e).exp()), obs=y)


def test_a_running_state_is_a_product_with_a_matrix() -> None:
    """A loop without a sparse curvature: equal operations of its steps are one all the same."""
    y = counts(40)
    found, expected = (LaplaceEvidence(model, start=Start(tour=0)).run(y) for model in (running, run_at_once))
    torch.testing.assert_close(found.log_evidence, expected.log_evidence, rtol=1e-9, atol=1e-8)
    structure = found.state.problem.structure
    assert structure.factors is None and structure.density.terms is not None


def drifting(y: Tensor) -> None:
    """All steps in one site of more coordinates than a dense matrix is worth."""
    s = scale()
    with pyro.plate("steps", len(y)):
        x = pyro.sample("x", dist.Normal(y.new_zeros(()), 3.0))
        pyro.sample("y", dist.Poisson(x.exp()), obs=y)
    pyro.sample("dx", dist.Normal(0.9 * x[:-1], s).to_event(1), obs=x[1:])


@pytest.mark.parametrize(("model", "num"), [(drifting, 210), (second_order, 52)])
def test_modes_of_rows_with_their_own_hyperparameters_are_those_of_each_row(
    model: Callable[..., None], num: int
) -> None:
    """Searched together, as for nodes and draws, or one after the other."""
    problem = laplace_problem(LogJoint(model, (counts(num),)))
    assert problem.factors is not None and problem.factors.density.takes_rows
    theta = problem.joint.initial_theta + torch.linspace(-1.0, 1.0, 5).double().unsqueeze(-1)
    u, limits = problem.joint.initial_u.expand(5, -1), Limits(problem.limits.tolerance, 50)
    for row, found in enumerate(problem.factors.near_modes(u, theta, limits)):
        expected = problem.factors.find_modes(u[:1], theta[row], limits, cold=False)
        assert found is not None
        torch.testing.assert_close(found.u, expected.u, rtol=0.0, atol=1e-6)
        torch.testing.assert_close(found.log_joint, expected.log_joint, rtol=1e-12, atol=1e-9)
        pair = (mode.found[0].log_det for mode in (found, expected))
        torch.testing.assert_close(*pair, rtol=1e-7, atol=1e-7)


def test_rows_from_where_a_few_steps_do_not_arrive_are_left_to_others() -> None:
    problem = laplace_problem(LogJoint(drifting, (counts(210),)))
    assert problem.factors is not None
    u = problem.joint.initial_u.expand(2, -1) + torch.tensor([[0.0], [300.0]])
    theta, limits = problem.joint.initial_theta.expand(2, -1), Limits(problem.limits.tolerance, 50)
    near, far = problem.factors.near_modes(u, theta, limits)
    assert near is not None and far is None
