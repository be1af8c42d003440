"""Many starts as one batch."""

import re
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import BadInput, EvidenceEM, LaplaceEvidence, NotAMode, Start
from pyro_evidence.laplace import approximation
from pyro_evidence.laplace.restarts import search
from pyro_evidence.program import LogJoint
from tests.models_for_tests.engine_models import classes, curve, logistic_ard, mixture, network, two_clusters


def double_well(height: Tensor) -> None:
    """Two modes of different height, near -2 and 2."""
    x = pyro.sample("x", dist.Normal(0.0, 10.0))
    pyro.factor("well", -(x.square() - 4.0).square() + height * x)


def test_modes_of_different_height_are_all_found_and_reported() -> None:
    posterior = LaplaceEvidence(double_well, start=Start(restarts=12)).run(torch.tensor(0.5))
    assert float(posterior.mode["x"]) > 0
    levels = sorted(set(posterior.restarts.round(decimals=6).tolist()))
    assert len(levels) == 2 and posterior.restarts.shape == (12,)
    # oracle: Newton by hand from each side, curvature 12 x^2 - 16 + 1/100
    for start, level in ((-2.0, levels[0]), (2.0, levels[1])):
        x = torch.tensor(start)
        for _ in range(50):
            x = x - (-4 * x * (x**2 - 4) + 0.5 - x / 100) / (-12 * x**2 + 16 - 0.01)
        value = -((x**2 - 4) ** 2) + 0.5 * x + dist.Normal(0.0, 10.0).log_prob(x)
        assert level == pytest.approx(float(value + 0.5 * torch.log(2 * torch.pi / (12 * x**2 - 16 + 0.01))), abs=1e-6)


def test_mirrored_modes_count_once() -> None:
    posterior = LaplaceEvidence(double_well, start=Start(restarts=12)).run(torch.tensor(0.0))
    assert len(set(posterior.restarts.round(decimals=6).tolist())) == 1


@pytest.mark.parametrize(
    ("model", "data"), [(network, curve()), (mixture, (two_clusters(),)), (logistic_ard, classes())]
)
def test_a_batch_of_restarts_equals_a_loop(model, data) -> None:  # type: ignore[no-untyped-def]
    joint = LogJoint(model, data)
    at = approximation.laplace_problem(joint)
    starts = joint.initial(4, seed=1)
    batch = approximation.search_modes(at, starts, joint.initial_theta, cold=True)
    alone = [approximation.search_modes(at, start.unsqueeze(0), joint.initial_theta, cold=True) for start in starts]
    levels = torch.stack([mode.log_joint[0] for mode in alone])
    for row, mode in enumerate(alone):
        assert bool(batch.converged[row]) and bool(mode.converged[0])
        assert float((batch.log_joint[row] - levels).abs().min()) < 1e-8


def test_results_do_not_depend_on_anything_but_the_seed() -> None:
    a, b = (LaplaceEvidence(network, start=Start(restarts=2, seed=7)).run(*curve()) for _ in range(2))
    assert torch.equal(a.restarts, b.restarts) and torch.equal(a.state.u, b.state.u)


def test_all_restarts_failing_says_why_each_did() -> None:
    def rising(y: Tensor) -> None:
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("y", y * x.square())

    joint = LogJoint(rising, (torch.tensor(1.0),))
    with pytest.raises(NotAMode, match=r"(?s)all restarts failed.*restarts 0, 1: .*eigenvalue"):
        search(approximation.laplace_problem(joint), joint.initial(2, seed=0), joint.initial_theta)


def test_no_restart_at_all_is_refused() -> None:
    with pytest.raises(BadInput, match="restarts=0"):
        LaplaceEvidence(network, start=Start(restarts=0))


def narrow_bump(X: Tensor, y: Tensor, where: Tensor) -> None:
    """A linear predictor but for one place, thinner than any probe."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    bump = 0.1 * (-(w - where).square().sum() / 2e-8).exp()
    pyro.sample("y", dist.Normal(X @ w + bump, 1.0).to_event(1), obs=y)


def test_a_mode_at_which_the_linear_predictor_is_none_is_searched_again() -> None:
    X, y = classes()[0][:, :2], torch.linspace(-1.0, 1.0, len(classes()[0]))
    where = torch.linalg.solve(X.T @ X + torch.eye(2), X.T @ y)  # the mode of the model without its bump
    at = approximation.laplace_problem(LogJoint(narrow_bump, (X, y, where)))
    assert at.structure.linear is not None  # no probe came near
    posterior = LaplaceEvidence(narrow_bump).run(X, y, where)
    assert posterior.state.problem.structure.linear is None
    joint = posterior.state.problem.joint
    assert float(posterior.state.log_joint) == float(joint.log_joint(posterior.state.u, posterior.state.theta))


@pytest.mark.parametrize("begun", [-2.0, 2.0])
def test_a_search_begins_at_the_values_given(begun: float) -> None:
    """From either side of the barrier the near mode is found, the lower one too."""
    posterior = LaplaceEvidence(double_well, start=Start(values={"x": torch.tensor(begun)}, tour=0)).run(
        torch.tensor(0.5)
    )
    assert float(posterior.mode["x"]) * begun > 3.0 and posterior.restarts.shape == (1,)


def test_what_no_value_was_given_for_begins_at_random() -> None:
    def two(height: Tensor) -> None:
        double_well(height)
        y = pyro.sample("y", dist.Normal(0.0, 10.0))
        pyro.factor("another", -(y.square() - 4.0).square())

    joint = LogJoint(two, (torch.tensor(0.5),), values={"x": torch.tensor(-2.0)})
    starts = joint.initial(5, seed=3)
    assert bool((starts[:, 0] == -2.0).all()) and len(set(starts[:, 1].tolist())) == 5
    assert joint.initial_u.tolist() == [-2.0, 0.0]


def test_a_param_begins_at_its_value_and_a_marginalised_site_too() -> None:
    def scaled(t: Tensor) -> None:
        loc = pyro.param("loc", torch.tensor(0.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        with pyro.plate("data", len(t)):
            pyro.sample("w", dist.Normal(loc, tau), obs=None)
            pyro.sample("t", dist.Normal(0.0, tau), obs=t)

    values = {"loc": torch.tensor(0.7), "tau": torch.tensor(0.2)}
    joint = LogJoint(scaled, (torch.ones(3),), maximise=["tau"], values=values)
    found = joint.hypers.constrained(joint.initial_theta)
    assert {n: float(v) for n, v in found.items()} == pytest.approx({"loc": 0.7, "tau": 0.2}, rel=1e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"z": torch.tensor(1.0)}, "names ['z']"),
        ({"x": torch.ones(2)}, "'x' has shape (2,); expected ()"),
        ({"x": torch.tensor(float("nan"))}, "expected a tensor of finite numbers"),
        ({"x": "2"}, "expected a tensor of finite numbers"),
        ([("x", 2.0)], "expected values by names of sites"),
    ],
)
def test_values_that_the_model_cannot_begin_at_are_refused(values: Any, message: str) -> None:
    with pytest.raises(BadInput, match=re.escape(message)):
        LaplaceEvidence(double_well, start=Start(values=values)).run(torch.tensor(0.5))


def with_a_scale_and_shares(y: Tensor) -> None:
    pyro.sample("scale", dist.HalfNormal(1.0))
    pyro.sample("shares", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("data", 2):
        pyro.sample("y", dist.Normal(0.0, pyro.param("sd", torch.tensor(1.0))), obs=y)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scale": torch.tensor(-1.0)}, "'scale' begins at [-1.0]; expected numbers strictly inside GreaterThanEq"),
        ({"scale": torch.tensor(0.0)}, "'scale' begins at [0.0]"),
        ({"shares": torch.tensor([0.5, 0.5, 1.0])}, "'shares' begins at [0.5, 0.5, 1.0]"),
        ({"data": torch.tensor(1.0)}, "params of the model, out of ['scale', 'shares', 'sd']."),
    ],
)
def test_values_beyond_their_support_are_refused(values: Any, message: str) -> None:
    with pytest.raises(BadInput, match=re.escape(message)):
        LaplaceEvidence(with_a_scale_and_shares, start=Start(values=values)).run(torch.zeros(2))


def test_a_mixture_is_begun_otherwise() -> None:
    with pytest.raises(BadInput, match="EvidenceEM and OverlapEM begin at"):
        EvidenceEM(mixture, start=Start(values={"x": torch.ones(2)}))
