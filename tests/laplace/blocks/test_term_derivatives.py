"""Integrals over persons whose items multiply them: against a grid by hand, and derivatives against differences."""

from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import LaplaceEvidence, Stop
from pyro_evidence.blocks import marginal as blocks
from pyro_evidence.blocks.integrals import integrals, with_derivatives
from pyro_evidence.blocks.term_derivatives import by_terms, families
from pyro_evidence.laplace.approximation import Problem, laplace_problem
from pyro_evidence.numerics import batched
from pyro_evidence.program.log_joint import LogJoint

T = torch.tensor
PERSONS, ITEMS = 20, 8  # so that what all persons share meets more than each of them
generator = torch.Generator().manual_seed(3)
Y = (torch.rand(PERSONS, ITEMS, generator=generator, dtype=torch.float64) < 0.6).double()


def asked(kind: str) -> Tensor:
    """Five items are enough where persons have one number each."""
    return Y if kind == "skewed" else Y[:, :5]


def answers(y: Tensor, kind: str) -> None:
    """Two parameters to an item; skewed: persons' priors depend on a latent that all share, and each has a second.

    Curved: predictors are not affine in persons, and the likelihood is one without closed derivatives.  Guessed: a
    fifth of the answers is right by chance.
    """
    skewed = kind == "skewed"
    mean = pyro.param("mean", T(0.2).double())
    of_slopes = pyro.param("of_slopes", T(0.6).double(), constraint=constraints.positive)
    centre = pyro.sample("centre", dist.Normal(0.0, T(0.5).double())) if skewed else 0.0
    with pyro.plate("persons", PERSONS, dim=-2):
        ability = pyro.sample("ability", dist.Normal(T(0.0).double() + centre, 1.0))
        drift = pyro.sample("drift", dist.Normal(T(0.0).double(), 0.4)) if skewed else T(0.0)
    with pyro.plate("items", y.shape[1], dim=-1):
        difficulty = pyro.sample("difficulty", dist.Normal(mean, 1.0))
        slope = pyro.sample("slope", dist.LogNormal(T(0.0).double(), of_slopes))
    logits = slope * (ability + drift * torch.linspace(-1, 1, y.shape[1]).double() - difficulty)
    with pyro.plate("p", PERSONS, dim=-2), pyro.plate("i", y.shape[1], dim=-1):
        if kind == "curved":
            pyro.sample("y", dist.NegativeBinomial(3.0, logits=logits + 0.02 * ability.square()), obs=y)
        elif kind == "guessed":
            pyro.sample("y", dist.Bernoulli(0.2 + 0.8 * logits.sigmoid()), obs=y)
        else:
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def set_up(kind: str, num: int) -> tuple[Problem, blocks.Marginal, Tensor]:
    problem = laplace_problem(LogJoint(answers, (asked(kind), kind)), None)
    marginal = problem.by_quadrature(num)
    assert marginal is not None and by_terms(marginal.density)
    assert marginal.partition.num_blocks == PERSONS and marginal.partition.width == 1 + (kind == "skewed")
    return problem, marginal, 0.3 * problem.joint.initial(1, seed=2)[0]


def test_integrals_are_those_of_a_grid() -> None:
    problem, marginal, u = set_up("plain", 21)
    p, theta = marginal.partition, problem.joint.initial_theta
    found = marginal.place(marginal.density.terms(theta), u[p.own], u[p.shared]).each
    values = problem.joint.latents.constrained(u)
    grid = torch.linspace(-9.0, 9.0, 4001, dtype=torch.float64)
    logits = values["slope"] * (grid[:, None, None] - values["difficulty"])
    log_rows = -torch.nn.functional.softplus((1.0 - 2.0 * asked("plain")) * logits).sum(-1) - 0.5 * (grid**2).unsqueeze(
        -1
    )
    expected = (log_rows - 0.5 * T(torch.pi * 2.0).log()).logsumexp(0) + (grid[1] - grid[0]).log()
    torch.testing.assert_close(found[p.block[p.own.argsort()]], expected, rtol=1e-9, atol=1e-9)


SKEWED = pytest.param("skewed", marks=pytest.mark.slow)


@pytest.mark.parametrize("kind", ["plain", SKEWED, "curved"])
def test_derivatives_along_the_path_are_those_of_differences(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rows are taken one by one."""
    problem, marginal, u = set_up(kind, 5)
    p, terms, w = marginal.partition, marginal.density.terms(problem.joint.initial_theta), u[marginal.partition.shared]
    modes = blocks.block_modes(terms, u[p.own], w, 1e-12)
    nodes = blocks.placed(p, modes.own, modes.tril, marginal.num)
    along = blocks.path(p, modes.tril, blocks.beside(terms, modes.own, w), w)

    def value(moved: Tensor) -> Tensor:
        return integrals(terms, replace(nodes, rows=nodes.rows + along.away(moved)), moved).sum()

    affine = [family.likelihood is not None for family in families(marginal.density)]
    assert affine == ([False] if kind == "curved" else [True, False])
    found = with_derivatives(terms, nodes, w, along)
    torch.testing.assert_close(found.slope, torch.autograd.functional.jacobian(value, w), rtol=1e-9, atol=1e-9)
    h, steps = 1e-3, torch.eye(len(w), dtype=torch.float64)
    second = [
        (value(w + h * (a + b)) - value(w + h * (a - b)) - value(w - h * (a - b)) + value(w - h * (a + b)))
        / (4 * h * h)
        for a in steps
        for b in steps
    ]
    expected = -torch.stack(second).detach().reshape(len(w), len(w))
    torch.testing.assert_close(found.curvature, expected, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(batched, "BATCH_BYTES", 1)
    torch.testing.assert_close(with_derivatives(terms, nodes, w, along).curvature, found.curvature)


def test_nodes_where_a_probability_is_one_by_rounding_have_derivatives() -> None:
    """Oracle: autograd of the integrals."""
    problem, marginal, u = set_up("guessed", 5)
    p, terms, w = marginal.partition, marginal.density.terms(problem.joint.initial_theta), u[marginal.partition.shared]
    modes = blocks.block_modes(terms, u[p.own], w, 1e-12)
    nodes = blocks.placed(p, modes.own, modes.tril, marginal.num)
    nodes = replace(nodes, rows=100.0 * nodes.rows)
    along = blocks.path(p, modes.tril, blocks.beside(terms, modes.own, w), w)

    def value(moved: Tensor) -> Tensor:
        return integrals(terms, replace(nodes, rows=nodes.rows + along.away(moved)), moved).sum()

    found, slope = with_derivatives(terms, nodes, w, along), torch.autograd.functional.jacobian(value, w)
    torch.testing.assert_close(found.slope, slope, rtol=1e-9, atol=1e-9)
    expected = -torch.autograd.functional.hessian(value, w)
    torch.testing.assert_close(found.curvature, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.slow), SKEWED, "curved"])
def test_the_slope_in_hyperparameters_is_that_of_differences(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few nodes, whose own moves count."""
    problem, marginal, u = set_up(kind, 3)
    theta = problem.joint.initial_theta

    def log_evidence(theta: Tensor) -> float:
        return float(marginal.log_evidence(marginal.find(theta, u)))

    h, steps = 1e-3, torch.eye(len(theta), dtype=torch.float64)
    expected = T([(log_evidence(theta + h * e) - log_evidence(theta - h * e)) / (2 * h) for e in steps]).double()
    place = marginal.find(theta, u)
    found, _ = blocks.slope(marginal, place, theta)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(batched, "BATCH_BYTES", 1)
    torch.testing.assert_close(blocks.slope(marginal, place, theta)[0], found, rtol=1e-6, atol=1e-8)


def test_items_in_single_precision() -> None:
    """What blocks move by is in double precision whatever the model has."""

    def one_parameter(y: Tensor) -> None:
        items = pyro.plate("items", y.shape[1], dim=-1)
        with items:
            difficulty = pyro.sample("difficulty", dist.Normal(y.new_zeros(()), 1.0))
        with pyro.plate("persons", PERSONS, dim=-2):
            ability = pyro.sample("ability", dist.Normal(y.new_zeros(()), 1.0))
            with items:
                pyro.sample("y", dist.Bernoulli(logits=ability - difficulty), obs=y)

    heights = []
    for dtype in (torch.float32, torch.float64):
        joint = LogJoint(one_parameter, (Y.to(dtype),))
        marginal = laplace_problem(joint).by_quadrature(9)
        assert marginal is not None and by_terms(marginal.density)
        assert any(family.likelihood is not None for family in families(marginal.density))
        posterior = LaplaceEvidence(one_parameter, nodes=9, stop=Stop(progress=False)).run(Y.to(dtype))
        heights.append(float(posterior.log_evidence))
    assert heights[0] == pytest.approx(heights[1], abs=1e-3)
