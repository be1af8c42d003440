"""Terms that see many coordinates through a few sums: against the dense Hessian, and on paper where there is paper."""

import math
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, Stop
from pyro_evidence.errors import TooLarge
from pyro_evidence.laplace.approximation import LaplaceState, Problem, is_certified, laplace_problem, laplace_state
from pyro_evidence.laplace.gradient import slope
from pyro_evidence.models.gmrf import AR1, BYM2, ICAR, Kronecker, Neighbours, RandomWalk, lattice
from pyro_evidence.precision.choices import exact_hessian
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.structure import factor_cells, factor_terms, factors, recognise
from pyro_evidence.structure.factor_density import Structured
from tests.models_for_tests.hierarchies import positive

NUM = 210  # more than are treated as one dense matrix


def effects(y: Tensor) -> Tensor:
    with pyro.plate("groups", len(y)):
        return pyro.sample("a", dist.Normal(y.new_zeros(()), positive("s")))


def counts(y: Tensor, rate: Tensor) -> None:
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(rate.exp()), obs=y)


def softly_zero(y: Tensor) -> None:
    """A sum that is nearly zero, as a factor."""
    a, mean = effects(y), pyro.sample("mean", dist.Normal(0.0, 2.0))
    pyro.factor("zero", dist.Normal(0.0, 0.001).log_prob(a.mean()))
    counts(y, mean + a)


def observed_zero(y: Tensor) -> None:
    """The same as an observation."""
    a, mean = effects(y), pyro.sample("mean", dist.Normal(0.0, 2.0))
    pyro.sample("zero", dist.Normal(a.sum(), 0.001 * len(y)), obs=y.new_zeros(()))
    counts(y, mean + a)


def centred(y: Tensor) -> None:
    """Effects about their own mean."""
    a, mean = effects(y), pyro.sample("mean", dist.Normal(0.0, 2.0))
    counts(y, mean + a - a.mean())


def sum_in_the_likelihood(y: Tensor) -> None:
    """Every datum sees the sum of all effects."""
    a = effects(y)
    counts(y, 0.5 * a + 0.01 * a.sum())


def field(y: Tensor) -> None:
    """A ring of differences that are small, half of the nodes without data, and a sum that is nearly zero."""
    a = pyro.sample("a", dist.ImproperUniform(dist.constraints.real_vector, (), (len(y),)))
    pyro.factor("edges", -0.5 * (a - a.roll(1)).square().sum() / positive("s"))
    pyro.factor("zero", dist.Normal(0.0, 0.001).log_prob(a.mean()))
    counts(y[::2], pyro.sample("mean", dist.Normal(0.0, 2.0)) + a[::2])


def halves(y: Tensor) -> None:
    """Two sums, weighted, one of the others' mean in it, and a shape of the curvature that changes."""
    a = effects(y)
    first, second = a[: len(y) // 2], a[len(y) // 2 :]
    level = first.mean()
    pyro.factor("zero", dist.Normal(0.0, 0.1).log_prob((second - level).mean()))
    pyro.factor("heavy", dist.StudentT(3.0).log_prob(level))
    counts(y, 0.3 + torch.cat([first - level, second]))


def many_given_sums(y: Tensor) -> None:
    """A field over 10 times and 22 regions, which sums to zero at each time."""
    over_time = AR1(positive("s"), torch.tensor(0.5), 10)
    x = pyro.sample("x", Kronecker(over_time, ICAR(lattice(2, 11), torch.ones(()))))
    counts(y, pyro.sample("mean", dist.Normal(0.0, 2.0)) + x.flatten()[: len(y)])


MODELS = (softly_zero, observed_zero, centred, sum_in_the_likelihood, field, halves, many_given_sums)


def data(num: int = NUM) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.poisson((0.5 * torch.randn(num, generator=generator)).exp(), generator=generator).double()


def states(model: Any) -> tuple[LaplaceState, LaplaceState]:
    joint = LogJoint(model, (data(),))
    problem = laplace_problem(joint)
    assert problem.structure.factors is not None and len(problem.structure.factors.B)
    plain = Problem(joint, recognise.recognise(joint), exact_hessian, problem.active)
    state = laplace_state(problem, joint.initial_theta, joint.initial(1, 0)[0], cold=True)
    return state, laplace_state(plain, joint.initial_theta, state.u)


@pytest.mark.parametrize("model", MODELS)
def test_evidence_slope_and_spread_are_those_of_the_dense_hessian(model: Any) -> None:
    found, expected = states(model)
    assert is_certified(found)
    torch.testing.assert_close(found.log_evidence, expected.log_evidence, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(slope(found).total, slope(expected).total, rtol=1e-6, atol=1e-6)
    covariance = torch.cholesky_inverse(expected.precision.tril[0])
    chosen = torch.tensor([0, 7, NUM - 1])
    torch.testing.assert_close(found.precision.variance[0], covariance.diagonal(), rtol=1e-8, atol=1e-12)
    of_chosen = found.precision.covariance_of(chosen, len(covariance))
    torch.testing.assert_close(of_chosen, covariance[chosen], rtol=1e-7, atol=1e-9)
    root = found.precision.unwhiten(torch.eye(len(found.u)).double())
    torch.testing.assert_close(root.mT @ root, covariance, rtol=1e-7, atol=1e-9)
    rows = torch.stack([found.u.cos(), found.u.sin()])
    torch.testing.assert_close(found.precision.whiten(found.precision.unwhiten(rows)), rows, rtol=1e-8, atol=1e-8)


def test_many_effects_whose_sum_all_data_see_are_exact() -> None:
    """On paper: the covariance of the data is ``I + s^2 (I + c 11')^2``."""
    num, c, s = 30_000, 1e-4, 0.7
    y = torch.randn(num, generator=torch.Generator().manual_seed(1)).double()

    def model(y: Tensor) -> None:
        with pyro.plate("groups", num):
            a = pyro.sample("a", dist.Normal(y.new_zeros(()), s))
        with pyro.plate("data", num):
            pyro.sample("y", dist.Normal(a + c * a.sum(), 1.0), obs=y)

    posterior = LaplaceEvidence(model, stop=Stop(progress=False)).run(y)
    along, across = 1.0 + s**2 * (1.0 + c * num) ** 2, 1.0 + s**2
    square = float(y.sum() ** 2) / num
    expected = -0.5 * (num * math.log(2 * math.pi) + math.log(along) + (num - 1) * math.log(across))
    expected -= 0.5 * (square / along + (float(y.square().sum()) - square) / across)
    assert float(posterior.log_evidence) == pytest.approx(expected, rel=1e-10)
    assert "1 sum over many coordinates, as a border of low rank" in posterior.structure


def test_sums_of_more_than_coordinates_are_not_taken_for_sums() -> None:
    def model(y: Tensor) -> None:
        a = effects(y)
        counts(y, a - a.square().mean())

    problem = laplace_problem(LogJoint(model, (data(),)))
    assert problem.factors is None and problem.structure.coupled is not None


def test_the_density_of_a_vector_is_no_sum_that_data_see() -> None:
    """It is a sum over more coordinates than count as few, and a term itself."""

    def answers(y: Tensor) -> None:
        slope = pyro.sample("slope", dist.LogNormal(y.new_zeros(20), 0.5).to_event(1))
        with pyro.plate("persons", len(y), dim=-2):
            ability = pyro.sample("ability", dist.Normal(y.new_zeros(()), 1.0))
        with pyro.plate("p", len(y), dim=-2), pyro.plate("i", 20, dim=-1):
            pyro.sample("y", dist.Bernoulli(logits=slope * ability), obs=y)

    generator = torch.Generator().manual_seed(0)
    y = torch.randint(2, (NUM, 20), generator=generator).double()
    problem = laplace_problem(LogJoint(answers, (y,)))
    plain = replace(problem, structure=recognise.recognise(problem.joint))
    found = laplace_state(problem, problem.joint.initial_theta, problem.joint.initial_u)
    expected = laplace_state(plain, found.theta, found.u)
    torch.testing.assert_close(found.log_evidence, expected.log_evidence, rtol=1e-8, atol=1e-8)


def test_the_letter_for_what_stays_dense_comes_before_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(y: Tensor) -> None:
        a = effects(y)
        counts(y, a / a.std())

    monkeypatch.setattr("pyro_evidence.numerics.linalg.available_bytes", lambda device: 10**9)
    with pytest.raises(TooLarge, match=r"60,000 coordinates together \(site 'a'.*ICAR\(edges, scale, level="):
        LaplaceEvidence(model, stop=Stop(progress=False)).run(data(60_000))


def test_second_derivatives_of_a_prior_are_made_once_for_each_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of data that see no linear predictor are others at each point; the elements are those made afresh."""

    def model(y: Tensor) -> None:
        a = effects(y)
        pyro.sample("y", dist.Poisson((a - a.mean()).exp() + 0.1).to_event(1), obs=y)

    density = laplace_problem(LogJoint(model, (data(),))).structure.known
    assert isinstance(density, Structured) and len(density.B) > 0 and density.linear is None
    assert density.varies == tuple(any(member.name == "y" for member in family.members) for family in density.families)
    theta, made, closed = torch.tensor([0.1]), list[Tensor](), Structured.closed_forms
    monkeypatch.setattr(Structured, "closed_forms", lambda *args: made.append(args[1]) or closed(*args))
    u = torch.linspace(-1.0, 1.0, density.joint.latents.size)
    first, again = density.elements(0.3 * u, theta), density.elements(u, theta)
    assert len(made) == 1
    fresh = replace(density, _kept=[]).elements(u, theta)
    torch.testing.assert_close(again, fresh, rtol=1e-12, atol=1e-12)
    assert any(not torch.allclose(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("kind", [ICAR, BYM2, RandomWalk])
def test_fields_of_given_sums_and_linear_predictors_are_not_differentiated(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row and several at hyperparameters of their own; oracle: the dense Hessian of the model."""
    graph = lattice(15, 15)

    def model(y: Tensor) -> None:
        scale, mean = pyro.param("scale", torch.tensor(0.5)), pyro.sample("mean", dist.Normal(0.0, 2.0))
        x = pyro.sample(
            "x",
            {ICAR: lambda: ICAR(graph, scale), BYM2: lambda: BYM2(graph, scale, 0.4)}.get(
                kind, lambda: RandomWalk(scale, 225, order=2)
            )(),
        )
        counts(y, mean + (x[0] if kind is BYM2 else x))

    joint = LogJoint(model, (torch.arange(225.0) % 4.0,))
    problem = laplace_problem(joint)
    density, factors = problem.structure.known, problem.factors
    assert isinstance(density, Structured) and len(density.B) == (2 if kind is RandomWalk else 1)
    assert factors is not None and density.takes_rows and density.linear is not None and not any(density.varies)
    theta = torch.tensor([[0.3], [0.6]])
    u = 0.1 * torch.randn(2, joint.latents.size, generator=torch.Generator().manual_seed(0))
    assert all(factors.is_certified(*row) for row in zip(u, theta, strict=True))
    modes = [
        factors.find_modes(row.unsqueeze(0), own, problem.limits, cold=True) for row, own in zip(u, theta, strict=True)
    ]
    together = factors.near_modes(torch.cat([mode.u for mode in modes]) + 0.001 * u, theta, problem.limits)
    for own, alone, found in zip(theta, modes, together, strict=True):
        assert found is not None and torch.allclose(found.u, alone.u, atol=1e-8)
        A, precision = problem.structure.density.precision(found.u, own)[0], found.found[0]
        assert float(precision.log_det) == pytest.approx(float(torch.logdet(A)), abs=1e-8)
        assert torch.allclose(precision.variance[0], torch.linalg.inv(A).diagonal(), atol=1e-9)
    expanded = density.expanded(u[:1], theta[0])(u[1:], torch.zeros(1, dtype=torch.long))
    for mine, own in zip(expanded, problem.structure.density.gradient(u[1:], theta[0]), strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-10, atol=1e-10)
    runs, trace_at = list[Any](), LogJoint.trace_at
    monkeypatch.setattr(LogJoint, "trace_at", lambda *args: runs.append(args) or trace_at(*args))
    slope(laplace_state(problem, theta[0] + 0.1, modes[0].u[0]))
    assert len(runs) <= 4  # all that does not depend on the latents, the prior at the start, at the end, and its slope


def test_coordinates_that_all_factors_see_are_not_laid_out_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, laid, table = lattice(15, 14), list[int](), factor_cells.coordinate_table

    def counted(groups: Any, shape: Any) -> Tensor:
        laid.append((found := table(groups, shape)).numel())
        return found

    def model(y: Tensor) -> None:
        counts(y, pyro.sample("x", ICAR(graph, positive("s"))))

    for module in (factor_cells, factors, factor_terms):
        monkeypatch.setattr(module, "coordinate_table", counted)
    known = recognise.recognise(LogJoint(model, (torch.ones(NUM),)), factors=True).known
    assert isinstance(known, Structured) and len(known.B) == 1
    assert laid and len(graph.edges) * (NUM - 1) not in laid


def product_of_fields(y: Tensor) -> None:
    one = torch.ones((), dtype=y.dtype)
    scale = pyro.sample("scale", dist.HalfNormal(one))
    ring = Neighbours(torch.tensor([[i, (i + 1) % 20] for i in range(20)]))
    x = pyro.sample("x", Kronecker(AR1(scale, 0.5 * one, 12), ICAR(ring, one)))
    with pyro.plate("times", 12, dim=-2), pyro.plate("regions", 20, dim=-1):
        pyro.sample("y", dist.Poisson(x.view(12, 20).exp()), obs=y)


def test_sums_stand_in_the_precision_of_the_model() -> None:
    """Of a model in single precision they are doubles, which no product of its matrices takes."""
    y = torch.poisson(torch.full((12, 20), 2.0), torch.Generator().manual_seed(0))
    heights = []
    for dtype in (torch.float32, torch.float64):
        joint = LogJoint(product_of_fields, (y.to(dtype),), {}, maximise=["scale"])
        heights.append(laplace_state(laplace_problem(joint), joint.initial_theta, joint.initial_u).objective)
    assert heights[0] == pytest.approx(heights[1], abs=1e-2)


def test_small_fields_that_sum_to_zero_have_factors_where_nodes_are_searched() -> None:
    """Their priors have no closed form, so that each step of a dense search differentiates them in all directions."""

    def walk(y: Tensor) -> None:
        x = pyro.sample("x", RandomWalk(positive("s"), len(y), order=2))
        counts(y, pyro.sample("mean", dist.Normal(0.0, 2.0)) + x)

    joint = LogJoint(walk, (data(60),))
    assert laplace_problem(joint).factors is None
    found = laplace_problem(joint, few=16)
    assert found.factors is not None
    dense = replace(found, structure=replace(found.structure, known=None))
    both = [laplace_state(problem, joint.initial_theta, joint.initial_u) for problem in (found, dense)]
    assert float(both[0].log_evidence) == pytest.approx(float(both[1].log_evidence), abs=1e-8)
    assert both[1].problem.factors is None


def test_rows_fewer_than_weights_are_no_few_sums() -> None:
    """Each datum of a regression is a sum of all weights, whose priors have no closed form."""
    X = torch.randn(20, 24, generator=torch.Generator().manual_seed(0)).double()

    def regression(y: Tensor) -> None:
        w = pyro.sample("w", dist.StudentT(4.0, X.new_zeros(24), 1.0).to_event(1))
        with pyro.plate("rows", 20):
            pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)

    assert laplace_problem(LogJoint(regression, (X[:, 0],)), few=16).factors is None
