"""Hierarchies in the idioms of other people's models: by factors as by the dense Hessian, in value and in slope."""

from collections.abc import Callable, Iterator
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence.laplace.approximation import Problem, is_certified, laplace_problem, laplace_state
from pyro_evidence.laplace.gradient import slope
from pyro_evidence.precision.choices import exact_hessian
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.structure import recognise
from pyro_evidence.structure.factor_cells import SummandTracker, cells
from tests.models_for_tests.hierarchies import positive

NUM = 24  # groups
GROUP = torch.arange(4 * NUM) % NUM
X = torch.randn(len(GROUP), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
EFFECT = torch.randn(NUM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
UNIFORM = torch.rand(len(GROUP), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
LABEL = (UNIFORM < (EFFECT[GROUP] + X).sigmoid()).double()
COUNT = torch.poisson((0.5 * EFFECT[GROUP]).exp(), generator=torch.Generator().manual_seed(3))
ORDER = torch.bucketize(EFFECT[GROUP] + UNIFORM.logit(), torch.tensor([-1.0, 0.5]).double()).double()
TIME, SEEN = -UNIFORM.log() * (0.3 * EFFECT[GROUP]).exp(), UNIFORM > 0.3


@pytest.fixture(autouse=True)
def small_models_too() -> Iterator[None]:
    """Factors are looked for in models of any size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recognise, "SMALL", 0)
        yield


def effects() -> Tensor:
    with pyro.plate("groups", NUM):
        return pyro.sample("a", dist.Normal(0.0, positive("s")))


def ordinal() -> None:
    """Cut points that are a latent site; torch fills the probabilities of classes in place."""
    cuts = dist.TransformedDistribution(
        dist.Normal(torch.zeros(2), 2.0).to_event(1), [dist.transforms.OrderedTransform()]
    )
    cut, a = pyro.sample("cut", cuts), effects()
    with pyro.plate("data", len(GROUP)):
        pyro.sample("y", dist.OrderedLogistic(a[GROUP], cut), obs=ORDER)


def correlated() -> None:
    """Intercepts and slopes whose correlation is a latent site."""
    root = torch.tensor([1.0, 0.5]).unsqueeze(-1) * pyro.sample("L", dist.LKJCholesky(2, 2.0))
    with pyro.plate("groups", NUM):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    b = (z @ root.mT)[GROUP]
    with pyro.plate("data", len(GROUP)):
        pyro.sample("y", dist.Bernoulli(logits=b[:, 0] + b[:, 1] * X), obs=LABEL)


def survival() -> None:
    """Censored times by a sum that the model makes itself."""
    shape, rate = positive("shape", 1.2), (-effects()[GROUP]).exp()
    hazard = shape.log() + (shape - 1.0) * TIME.log() + shape * rate.log()
    pyro.factor("times", torch.where(SEEN, hazard, 0.0).sum() - ((rate * TIME) ** shape).sum())


def smooth() -> None:
    """A walk by a penalty on its steps, halved and divided."""
    with pyro.plate("steps", NUM):
        x = pyro.sample("x", dist.Normal(0.0, 5.0))
    pyro.factor("penalty", -0.5 * (x[1:] - x[:-1]).square().sum() / positive("s", 0.5).square())
    with pyro.plate("data", len(GROUP)):
        pyro.sample("y", dist.Poisson(x[GROUP].exp()), obs=COUNT)


def spread_by_group() -> None:
    a = effects()
    with pyro.plate("groups again", NUM):
        log_sd = pyro.sample("log_sd", dist.Normal(0.0, positive("t", 0.5)))
    with pyro.plate("data", len(GROUP)):
        pyro.sample("y", dist.Normal(a[GROUP], log_sd[GROUP].exp()), obs=X)


def members() -> None:
    """Every datum belongs to three groups, by weights."""
    index = torch.stack([GROUP, (GROUP + 5) % NUM, (3 * GROUP + 1) % NUM], -1)
    a = effects()
    with pyro.plate("data", len(GROUP)):
        pyro.sample("y", dist.Normal((a[index] * torch.tensor([0.5, 0.3, 0.2])).sum(-1), positive("noise")), obs=X)


def members_again() -> None:
    """Every datum belongs to three groups, often twice to the same, some to one only."""
    index = torch.stack([GROUP, (GROUP * GROUP) % NUM, GROUP.clamp(max=2)], -1)
    a = effects()
    with pyro.plate("data", len(GROUP)):
        rate = (0.3 * a[index]).sum(-1).exp()
        pyro.sample("y", dist.Poisson(rate), obs=COUNT)


def items() -> None:
    """Persons and items, discriminations included."""
    person, item = torch.arange(NUM).repeat_interleave(4), torch.arange(4).repeat(NUM)
    a = effects()
    with pyro.plate("items", 4):
        easy = pyro.sample("easy", dist.Normal(0.0, 1.0))
        log_slope = pyro.sample("log_slope", dist.Normal(0.0, 0.5))
    with pyro.plate("data", len(person)):
        pyro.sample("y", dist.Bernoulli(logits=log_slope.exp()[item] * (a[person] - easy[item])), obs=LABEL)


def overdispersed() -> None:
    """Counts whose spread is a latent site, an exposure, and effects about a mean that is one too."""
    spread, mean = pyro.sample("spread", dist.LogNormal(0.0, 1.0)), pyro.sample("mean", dist.Normal(0.0, 3.0))
    with pyro.plate("groups", NUM):
        a = pyro.sample("a", dist.Normal(mean, positive("s")))
    with pyro.plate("data", len(GROUP)):
        pyro.sample("y", dist.NegativeBinomial(spread, logits=a[GROUP - NUM] + UNIFORM.log()), obs=COUNT)


def gathered() -> None:
    """Two effects a group, of which each datum sees one."""
    with pyro.plate("groups", NUM):
        a = pyro.sample("a", dist.Normal(torch.zeros(2), positive("s")).to_event(1))
    chosen = torch.arange(len(GROUP)) % 2
    eta = a[GROUP].gather(1, chosen.unsqueeze(-1)).squeeze(-1) + torch.take_along_dim(a[:, 0], GROUP, 0)
    with pyro.plate("data", len(GROUP)):
        pyro.sample("y", dist.Poisson(eta.exp()), obs=COUNT)


def chosen_by_ones() -> None:
    """A product with a matrix of zeros and ones, and an embedding."""
    a, one_hot = effects(), torch.nn.functional.one_hot(GROUP, NUM).to(X)
    with pyro.plate("others", NUM):
        b = pyro.sample("b", dist.Normal(torch.zeros(2), positive("t", 0.5)).to_event(1))
    eta = one_hot @ a + torch.nn.functional.embedding((3 * GROUP + 1) % NUM, b)[:, 1] * X
    with pyro.plate("data", len(GROUP)):
        pyro.sample("y", dist.Poisson(eta.exp()), obs=COUNT)


def frailty() -> None:
    """Groups on positive support."""
    with pyro.plate("groups", NUM):
        z = pyro.sample("z", dist.Gamma(positive("k", 2.0), positive("k", 2.0)))
    with pyro.plate("data", len(GROUP)):
        pyro.sample("y", dist.Exponential(z[GROUP]), obs=TIME)


MODELS = (
    ordinal,
    correlated,
    survival,
    smooth,
    spread_by_group,
    members,
    members_again,
    items,
    overdispersed,
    gathered,
    chosen_by_ones,
    frailty,
)


@pytest.mark.parametrize("model", MODELS)
def test_value_and_slope_are_those_of_the_dense_hessian(model: Callable[[], None]) -> None:
    joint = LogJoint(model)
    problem = laplace_problem(joint)
    assert problem.factors is not None, problem.structure.coupled
    state = laplace_state(problem, joint.initial_theta, joint.initial(1, 0)[0], cold=True)
    alone = Problem(joint, recognise.recognise(joint), exact_hessian, problem.active)
    expected = laplace_state(alone, state.theta, state.u)
    assert is_certified(state)
    torch.testing.assert_close(state.log_evidence, expected.log_evidence, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(slope(state).total, slope(expected).total, rtol=1e-6, atol=1e-6)
    assert max(index.shape[-1] for index in problem.factors.density.pattern.index) <= 5  # no datum sees all groups


def test_data_of_different_numbers_of_groups_stay_linear_predictors() -> None:
    density = laplace_problem(LogJoint(members_again)).structure.factors
    assert density is not None and density.linear is not None and not density.families
    used = (density.parts[0].rows.value != 0).sum(-1).unique()
    assert used.tolist() == [1, 2, 3]


def test_a_sum_that_the_model_makes_is_taken_apart() -> None:
    joint = LogJoint(survival)
    u = joint.initial(1, 0)[0]
    found = cells(joint, u, joint.initial_theta)
    assert [found[f"times, {i}"].shape for i in range(2)] == [GROUP.shape, GROUP.shape]
    torch.testing.assert_close(sum(x.sum() for x in found.values()), joint.log_joint(u, joint.initial_theta))


@pytest.mark.parametrize(
    "combined",
    [
        lambda x, y: x.sum(),
        lambda x, y: -(2.0 * torch.sum(x)),
        lambda x, y: (x.sum() - y.sum()) / 3.0,
        lambda x, y: 1.0 - x.sum() * y[0] + 0.5,
        lambda x, y: y[1] * x.sum() + torch.add(x.sum(), y.sum()),
    ],
)
def test_summands_add_up(combined: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, y = torch.randn(5), torch.randn(3, 2)[:, 0]
    with SummandTracker() as summands:
        total: Any = combined(x, y)
    parts = summands.of(total)
    assert parts is not None and any(part.numel() > 1 for part in parts)
    torch.testing.assert_close(torch.stack([part.sum() for part in parts]).sum(), total)


def test_what_is_no_sum_has_no_summands() -> None:
    x = torch.randn(5)
    with SummandTracker() as summands:
        totals = [x.sum().exp(), x.sum() * x.sum(), x.amax(), x.sum() / x.sum()]
    assert [summands.of(total) for total in totals] == [None] * 4


def by_steps(y: Tensor) -> None:
    """A site for each step of a walk, and one for each datum."""
    s, x = positive("s", 0.3), torch.zeros(())
    for t in pyro.markov(range(len(y))):
        x = pyro.sample(f"x{t}", dist.Normal(0.9 * x, s))
        pyro.sample(f"y{t}", dist.Poisson((0.7 + x).exp()), obs=y[t])


def at_once(y: Tensor) -> None:
    """The same walk as one site."""
    with pyro.plate("steps", len(y)):
        x = pyro.sample("x", dist.ImproperUniform(constraints.real, (), ()))
    before = torch.cat([torch.zeros(1), x[:-1]])
    with pyro.plate("moves", len(y)):
        pyro.sample("move", dist.Normal(x - 0.9 * before, positive("s", 0.3)), obs=torch.zeros(len(y)))
        pyro.sample("y", dist.Poisson((0.7 + x).exp()), obs=y)


def test_a_walk_step_by_step_is_the_walk_at_once() -> None:
    states = []
    for model in (by_steps, at_once):
        joint = LogJoint(model, (COUNT[:30],))
        problem = laplace_problem(joint)
        assert problem.factors is not None
        states.append(laplace_state(problem, joint.initial_theta, joint.initial_u, cold=True))
    first, second = states
    torch.testing.assert_close(first.log_evidence, second.log_evidence, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(slope(first).total, slope(second).total, rtol=1e-8, atol=1e-8)
