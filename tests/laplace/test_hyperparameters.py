"""How hyperparameters are measured and moved, against closed forms."""

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions.constraints import ordered_vector, softplus_lower_cholesky, softplus_positive
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence.laplace.approximation import LaplaceState, laplace_problem, laplace_state
from pyro_evidence.laplace.gradient import curvature, exact_curvature, slope
from pyro_evidence.laplace.metric import information, inverted, natural_metric, response, round_of_all
from pyro_evidence.laplace.type2 import answer
from pyro_evidence.numerics.line_search import alone
from pyro_evidence.program import LogJoint
from pyro_evidence.program.parameters import RelativeCholesky, transform_of
from tests.models_for_tests.engine_models import linear, positive, targets

GROUP = torch.arange(40) % 8


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.stack([torch.ones(40), torch.randn(40, generator=generator)], -1)
    a = torch.randn(8, generator=generator)
    return X, X @ torch.tensor([3.0, -1.0]) + a[GROUP] + 0.5 * torch.randn(40, generator=generator)


def mixed(X: Tensor, y: Tensor) -> None:
    b, sd, sigma = pyro.param("b", torch.zeros(2)), positive("sd", 0.7), positive("sigma", 0.6)
    a = pyro.sample("a", dist.Normal(torch.zeros(8), sd).to_event(1))
    pyro.sample("y", dist.Normal(X @ b + a[GROUP], sigma).to_event(1), obs=y)


def state_of(model: Callable[..., object], args: tuple[Tensor, ...]) -> LaplaceState:
    joint = LogJoint(model, args)
    return laplace_state(laplace_problem(joint), joint.initial_theta, joint.initial(1, seed=0)[0], cold=True)


def covariance(sd: Tensor, sigma: Tensor) -> Tensor:
    """Of all responses, the groups integrated out."""
    return sd**2 * (GROUP[:, None] == GROUP).double() + sigma**2 * torch.eye(40)


def log_evidence(theta: Tensor, X: Tensor, y: Tensor) -> Tensor:
    """Oracle: the closed form; theta is b, log sd, log sigma."""
    V = covariance(theta[2].exp(), theta[3].exp())
    return torch.distributions.MultivariateNormal(X @ theta[:2], V).log_prob(y)


def test_information_of_fixed_effects_is_that_of_generalised_least_squares() -> None:
    X, y = data()
    V = covariance(torch.tensor(0.7), torch.tensor(0.6))
    found = information(state_of(mixed, (X, y)), torch.arange(2))
    torch.testing.assert_close(found, X.T @ torch.linalg.solve(V, X), rtol=1e-9, atol=1e-9)


def test_the_natural_step_of_fixed_effects_is_their_estimate() -> None:
    X, y = data()
    state = state_of(mixed, (X, y))
    found = slope(state)
    step = (natural_metric(state, found) @ found.total)[:2]
    V = covariance(torch.tensor(0.7), torch.tensor(0.6))
    expected = torch.linalg.solve(X.T @ torch.linalg.solve(V, X), X.T @ torch.linalg.solve(V, y))
    torch.testing.assert_close(step, expected, rtol=1e-9, atol=1e-9)
    follows = response(state, torch.cat([step, torch.zeros(2)]).unsqueeze(0))[0]
    residual = (y - X @ expected).reshape(-1, 8).sum(0)  # 5 data in each group
    torch.testing.assert_close(state.u + follows, residual / (5.0 + 0.36 / 0.49), rtol=1e-8, atol=1e-8)


def one_sided(state: LaplaceState, measure: Tensor) -> Tensor:
    return alone(curvature(state, slope(state), measure), answer)


@pytest.mark.parametrize(("by", "rtol"), [(one_sided, 3e-3), (exact_curvature, 1e-5)])
def test_curvature_by_differences_is_the_hessian(by: Callable[..., Tensor], rtol: float) -> None:
    X, y = data()
    state = state_of(mixed, (X, y))
    measure = torch.full((4,), 0.2)
    found = by(state, measure)
    expected = -torch.autograd.functional.hessian(lambda t: log_evidence(t, X, y), state.theta)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * float(expected.abs().max()))
    held = by(state, measure.index_fill(0, torch.tensor(1), 0.0))
    assert not bool(held[1].any() or held[:, 1].any())


def test_a_round_of_all_is_mackays_where_precisions_are_recognised() -> None:
    state = state_of(linear, targets())
    found = slope(state)
    index = torch.arange(2)
    mackay = natural_metric(state, found) @ found.total
    round_ = round_of_all(state, found, index, torch.zeros(2), 10.0)
    torch.testing.assert_close(round_, mackay, rtol=1e-3, atol=1e-3)
    assert float(round_of_all(state, found, index, torch.zeros(2), 0.5).abs().max()) <= 0.5


def test_a_positive_inverse_turns_round_what_bends_the_wrong_way() -> None:
    A = torch.tensor([[4.0, 1.0], [1.0, 2.0]])
    torch.testing.assert_close(inverted(A, torch.ones(2)), torch.linalg.inv(A))
    torch.testing.assert_close(inverted(torch.diag(torch.tensor([-4.0, 2.0])), torch.ones(2)).diag(), 1 / A.diag())
    unit = torch.tensor([1e6, 1e-6])
    scaled = inverted(A / unit / unit[:, None], torch.ones(2))
    torch.testing.assert_close(scaled / unit / unit[:, None], torch.linalg.inv(A))
    assert bool(torch.isfinite(inverted(torch.zeros(2, 2), torch.zeros(2))).all())


@pytest.mark.parametrize(
    ("constraint", "start", "expected"),
    [
        (constraints.real, torch.zeros(2), [False, False]),
        (constraints.positive, torch.ones(2), [True, True]),
        (softplus_positive, torch.ones(1), [True]),
        (constraints.unit_interval, torch.full((2,), 0.5), [True, True]),
        (constraints.interval(-3.0, 5.0), torch.zeros(1), [True]),
        (constraints.simplex, torch.full((3,), 1 / 3), [True, True]),
        (constraints.simplex, torch.ones(1), []),
        (ordered_vector, torch.arange(3.0), [False, True, True]),
        (constraints.lower_cholesky, torch.eye(2), [True, False, True, True]),  # the upper triangle is not looked at
        (constraints.corr_cholesky, torch.eye(2), [True]),
    ],
)
def test_what_can_be_infinite(constraint: object, start: Tensor, expected: list[bool]) -> None:
    def model(y: Tensor) -> None:
        value = pyro.param("p", start, constraint=constraint)
        w = pyro.sample("w", dist.Normal(value.sum(), 1.0))
        pyro.sample("y", dist.Normal(w * value.square().sum(), 1.0), obs=y)

    joint = LogJoint(model, (torch.tensor(1.0),))
    assert laplace_problem(joint).log_units.tolist() == expected


def test_a_log_precision_can_be_infinite_though_it_is_a_real_number() -> None:
    def model(y: Tensor) -> None:
        w = pyro.sample(
            "w", dist.Normal(pyro.param("loc", torch.zeros(())), pyro.param("log_sd", torch.ones(())).exp())
        )
        pyro.sample("y", dist.Normal(w, 1.0), obs=y)

    joint = LogJoint(model, (torch.tensor(1.0),))
    assert laplace_problem(joint).log_units.tolist() == [False, True]


@pytest.mark.parametrize("constraint", [constraints.lower_cholesky, softplus_lower_cholesky])
def test_a_row_in_another_unit_moves_its_logarithm_alone(constraint: object) -> None:
    transform = transform_of(constraint)
    assert transform == RelativeCholesky()
    L = torch.tensor([[2.0, 0.0], [-3.0, 0.5]])
    x, scaled = transform.inv(L), transform.inv(torch.tensor([1.0, 1000.0])[:, None] * L)
    torch.testing.assert_close(transform(x), L)
    torch.testing.assert_close(scaled - x, torch.diag(torch.tensor([0.0, 1000.0]).clamp(min=1.0).log()))
