"""What is foreseen of other prior precisions, against the log evidence there."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import LaplaceEvidence, Stop
from pyro_evidence.laplace import approximation, pruning
from pyro_evidence.laplace.approximation import LaplaceState, laplace_problem, laplace_state
from pyro_evidence.laplace.pruning import is_gaussian, predicted_gain, reactivated, removal, rises
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.regression import Learned
from pyro_evidence.models.regression import regression as linear_regression
from pyro_evidence.program import LogJoint

MOVES = torch.tensor([-8.0, -5.0, -2.5, -0.1, 0.3, 2.5, 5.0, 8.0])


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(40, 5, generator=generator)
    return X, X[:, 0] + 0.3 * X[:, 3] + 0.5 * torch.randn(40, generator=generator)


def weights(X: Tensor) -> Tensor:
    """One weight under a precision, three under a scale about 0.2, one under a fixed prior."""
    alpha = pyro.param("alpha", torch.tensor(0.7), constraint=constraints.positive)
    scale = pyro.param("scale", torch.tensor(0.4), constraint=constraints.positive)
    a = pyro.sample("a", dist.Normal(0.0, alpha.rsqrt()))
    b = pyro.sample("b", dist.Normal(0.2, scale).expand([3]).to_event(1))
    return X @ torch.cat([a.reshape(1), b, pyro.sample("c", dist.Normal(0.0, 1.0)).reshape(1)])


def regression(X: Tensor, t: Tensor) -> None:
    beta = pyro.param("beta", torch.tensor(3.0), constraint=constraints.positive)
    eta = weights(X)
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(eta, beta.rsqrt()), obs=t)


def classes(X: Tensor, t: Tensor) -> None:
    eta = weights(X)
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=eta), obs=(t > 0).double())


def state(model) -> LaplaceState:  # type: ignore[no-untyped-def]
    joint = LogJoint(model, data())
    return laplace_state(laplace_problem(joint), joint.initial_theta, joint.initial_u, cold=True)


def index_of(at: LaplaceState, name: str) -> int:
    return at.problem.joint.hypers.slices[name].start


def members(at: LaplaceState, index: int) -> Tensor:
    return (at.problem.structure.groups.member == index).nonzero().flatten()  # type: ignore[union-attr]


def there(at: LaplaceState, index: int) -> Tensor:
    """What happens."""
    moved = [at.theta.index_add(0, torch.tensor([index]), m.reshape(1)) for m in MOVES]
    return torch.stack([laplace_state(at.problem, theta, at.u).log_evidence - at.log_evidence for theta in moved])


@pytest.mark.parametrize("name", ["alpha", "scale"])
def test_the_rise_is_exact_under_gaussian_noise(name: str) -> None:
    at = state(regression)
    index = index_of(at, name)
    found, expected = rises(at, index, members(at, index), MOVES), there(at, index)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert is_gaussian(at)
    assert torch.equal(predicted_gain(at, index, MOVES, 0.02), expected > 0.02)
    assert bool((expected > 0.02).any()) and bool((expected < 0.02).any())


@pytest.mark.parametrize("name", ["alpha", "scale"])
def test_what_a_removal_costs_is_exact_under_gaussian_noise(name: str) -> None:
    at = state(regression)
    index = index_of(at, name)
    found = removal(at, index, MOVES[-1])
    gone = laplace_state(at.problem.without(at.problem.structure.groups.member == index), at.theta, at.u)  # type: ignore
    expected = float(there(at, index)[-1]), gone.objective - at.objective
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9) and expected[0] != expected[1]
    other = state(classes)
    assert removal(other, index_of(other, name), MOVES[-1]) is None


@pytest.mark.parametrize("name", ["alpha", "scale"])
def test_of_another_likelihood_nothing_is_left_out_that_is_foreseen_nearly_as_high(name: str) -> None:
    at = state(classes)
    index = index_of(at, name)
    assert not is_gaussian(at)
    assert bool(predicted_gain(at, index, MOVES, 0.02)[there(at, index) > 0.0].all())


def test_of_what_is_no_prior_precision_everything_is_tried() -> None:
    at = state(regression)
    assert bool(predicted_gain(at, index_of(at, "beta"), MOVES, 0.02).all())


@pytest.mark.parametrize("shared", [0.0, 0.9])
def test_groups_that_are_pruned_together_are_those_that_go_one_by_one(
    monkeypatch: pytest.MonkeyPatch, shared: float
) -> None:
    """Also where columns are nearly alike, of which one is needed; with a tenth fewer searches at least."""
    generator = torch.Generator().manual_seed(3)
    X = (1.0 - shared) * torch.randn(200, 20, generator=generator) + shared * torch.randn(200, 1, generator=generator)
    t = X[:, :5] @ torch.randn(5, generator=generator) + torch.randn(200, generator=generator)
    searches: list[int] = []
    search = pruning.laplace_state

    def counted(*given: Any, **others: Any) -> LaplaceState:
        searches[-1] += 1
        return search(*given, **others)

    for module in (pruning, approximation):
        monkeypatch.setattr(module, "laplace_state", counted)

    def fitted() -> tuple[float, list[bool]]:
        searches.append(0)
        engine = LaplaceEvidence(linear_regression(Linear(), alpha=Learned(torch.ones(20))), stop=Stop(progress=False))
        posterior = engine.run(X, t)
        return float(posterior.log_evidence), posterior.state.problem.active.tolist()

    together = fitted()
    monkeypatch.setattr(pruning, "_together", lambda state, *_: state)
    height, active = fitted()
    assert together[1] == active and together[0] == pytest.approx(height, abs=1e-6)
    assert searches[0] < 0.9 * searches[1]


@pytest.mark.parametrize("size", [0.0, 1.0])
def test_a_pruned_group_is_tried_where_it_is_foreseen_to_gain_and_nowhere_else(
    size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the log evidence at every place, under Gaussian noise; of data that need the weight, and that do not."""
    X, t = data()
    joint = LogJoint(regression, (X, t + (size - 1.0) * X[:, 0]))
    problem = laplace_problem(joint)
    whole = laplace_state(problem, joint.initial_theta, joint.initial_u, cold=True)
    pruned = laplace_state(
        problem.without(torch.arange(5) == members(whole, index_of(whole, "alpha"))), whole.theta, whole.u
    )
    none = torch.zeros_like(pruned.theta, dtype=torch.bool)

    def places() -> list[list[float]]:
        return [theta.tolist() for _, theta in reactivated(pruned, none, 12, 0.025)]

    found = places()
    monkeypatch.setattr(pruning, "predicted_gain", lambda _at, _index, moves, *_: torch.ones_like(moves) > 0)
    rises_there = {
        tuple(theta): laplace_state(problem, torch.tensor(theta), whole.u).objective - pruned.objective
        for theta in places()
    }
    assert len(rises_there) == len(pruning.SHARES)
    assert found == [[*theta] for theta, rise in rises_there.items() if rise > 0.025]
    assert bool(found) == (size > 0.0)
