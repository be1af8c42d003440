"""Log joints of many data sets as sums of powers of their hyperparameters: against densities on paper."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence.laplace.quadratics import Axes, LogJoints, QuadraticDensity, Quadratics, power_sums
from pyro_evidence.laplace.replicates import Evidence, Replicates, columns_of
from pyro_evidence.nested.inner import MarginalisedJoint
from pyro_evidence.structure.density import AutogradDensity, climbing

EVERY = torch.arange(5)
CONTRAST = (-1.0) ** (torch.arange(12) // 3)
GROUP = torch.arange(12) % 3


def intercepts(x: Tensor, y: Tensor) -> None:
    tau, sigma = (pyro.sample(name, dist.HalfNormal(1.0)) for name in ("tau", "sigma"))
    b = pyro.sample("b", dist.Normal(1.0, 3.0))
    with pyro.plate("groups", 3):
        e = pyro.sample("e", dist.Normal(0.0, tau))
    with pyro.plate("data", 12):
        pyro.sample("y", dist.Normal(b * x + e[GROUP], sigma), obs=y)


def scaled(x: Tensor, y: Tensor) -> None:
    """One scale alone beside a noise of one: all second derivatives are one plus its square times a number."""
    tau = pyro.sample("tau", dist.HalfCauchy(1.0))
    e = pyro.sample("e", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", 12):
        pyro.sample("y", dist.Normal(x.square() + tau * e[GROUP], 1.0), obs=y)


def logistic(x: Tensor, y: Tensor) -> None:
    tau = pyro.sample("tau", dist.HalfCauchy(1.0))
    with pyro.plate("groups", 3):
        e = pyro.sample("e", dist.Normal(0.0, tau))
    with pyro.plate("data", 12):
        pyro.sample("y", dist.Bernoulli(logits=x + e[GROUP]), obs=(y > 0).double())


def correlated(x: Tensor, y: Tensor) -> None:
    """A number between zero and one is no power of its coordinate."""
    rho = pyro.sample("rho", dist.Beta(2.0, 2.0))
    with pyro.plate("groups", 3):
        e = pyro.sample("e", dist.Normal(0.0, rho))
    with pyro.plate("data", 12):
        pyro.sample("y", dist.Normal(x + e[GROUP], 1.0), obs=y)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 12, generator=generator), 2.0 * torch.randn(5, 12, generator=generator)


def looked_at(
    model: Callable[..., Any], sites: list[str], centre: list[float], among: tuple[Tensor, ...] | None = None
) -> Any:
    """The terms of the model's log joints on five data sets."""
    sets = list(zip(*(among or data()), strict=True))
    joint = MarginalisedJoint(model, sets[0], marginalise=sites)
    replicates = Replicates(joint, columns_of(sets, joint), len(sets))
    joints, origin = LogJoints(replicates.at_settings, 50), torch.zeros(replicates.latents.size)
    return power_sums(joints, torch.tensor(centre), torch.tensor([0, 2, 4]), origin)


def settings(num: int, centre: list[float]) -> Tensor:
    """A few log units about a centre, ``(5, num, T)``."""
    generator = torch.Generator().manual_seed(1)
    return torch.tensor(centre) + 2.0 * torch.randn(5, num, len(centre), generator=generator)


def test_powers_are_read_off_and_the_evidence_is_the_normal_density() -> None:
    made_of = looked_at(intercepts, ["tau", "sigma"], [-0.5, 0.3])
    assert set(map(tuple, made_of.powers.tolist())) == {(-2.0, 0.0), (0.0, -2.0), (0.0, 0.0)}
    found, right = made_of.of(EVERY)
    assert bool(right.all())
    theta, (x, y) = settings(4, [-0.5, 0.3]), data()
    value = found.log_evidence(EVERY, theta)
    slope = torch.stack([found.orders(EVERY, theta[:, j])[1] for j in range(4)], 1)
    for k in range(5):
        for j in range(4):
            sigma, tau = theta[k, j].exp()
            covariance = sigma**2 * torch.eye(12) + 9.0 * torch.outer(x[k], x[k])
            covariance = covariance + tau**2 * (GROUP == GROUP.unsqueeze(-1)).double()
            exact = dist.MultivariateNormal(x[k], covariance).log_prob(y[k])
            assert float(value[k, j]) == pytest.approx(float(exact), rel=1e-9)
    for t, step in enumerate(1e-5 * torch.eye(2)):
        ahead, behind = (found.log_evidence(EVERY, theta + way) for way in (step, -step))
        torch.testing.assert_close(slope[..., t], (ahead - behind) / 2e-5, rtol=1e-6, atol=1e-8)
    first, ways = theta[:, 0], 1e-5 * torch.eye(2)
    falls = [found.orders(EVERY, first - way)[1] - found.orders(EVERY, first + way)[1] for way in ways]
    torch.testing.assert_close(found.orders(EVERY, first)[2], -torch.stack(falls, -1) / 2e-5, rtol=1e-6, atol=1e-6)
    rows = found.modes(torch.cat([theta[:, 0], EVERY.unsqueeze(-1)], -1))
    assert rows.objective.tolist() == pytest.approx(value[:, 0].tolist(), rel=1e-12)


def test_second_derivatives_vanish_where_the_evidence_is_level() -> None:
    """``-log(1 + e^2t) / 2 + t`` by both forms, where a square of the precision is no number."""
    one, two = torch.ones(1), torch.tensor([[0.0], [2.0]])
    terms = torch.tensor([[[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]])
    axes = Axes(0.0 * one, one.reshape(1, 1, 1), two, terms)
    A = torch.ones(1, 2, 1, 1)
    for form in (None, axes):
        found = Quadratics(0, 0.0 * one, two, one.unsqueeze(0), 0.0 * A[:, :, 0, 0], 0.0 * A[..., 0], A, form)
        _, slope, second = found.orders(torch.zeros(1), torch.full((1, 1), 200.0))
        assert (float(slope), float(second)) == pytest.approx((0.0, 0.0), abs=1e-12)


def test_second_derivatives_take_no_more_settings_and_ways_than_differ_among_data_sets() -> None:
    """Of three levels and a slope the noise's term is each data set's own, and no two levels are in one entry."""
    made_of = looked_at(intercepts, ["tau", "sigma"], [-0.5, 0.3])
    assert [(len(each.places), len(each.ways)) for each in made_of.probings] == [(1, 2), (3, 4)]


def test_data_sets_that_are_looked_at_may_be_the_same() -> None:
    x, y = data()
    x, y = (each[[0, 1, 0, 3, 0]] for each in (x, y))
    found, right = looked_at(intercepts, ["tau", "sigma"], [-0.5, 0.3], (x, y)).of(EVERY)
    own, _ = looked_at(intercepts, ["tau", "sigma"], [-0.5, 0.3]).of(EVERY)
    assert bool(right.all())
    for name in ("line", "a", "b", "A"):
        torch.testing.assert_close(getattr(found, name)[[0, 1, 3]], getattr(own, name)[[0, 1, 3]], rtol=1e-7, atol=1e-7)


def test_terms_that_the_data_sets_looked_at_do_not_have_are_found_in_others() -> None:
    """Levels and slope are in one entry where the column is not zero, as it is in those that are looked at."""
    x, y = data()
    x = torch.where(torch.arange(5).unsqueeze(-1) % 2 == 1, x, 0.0)
    made_of, theta = looked_at(intercepts, ["tau", "sigma"], [-0.5, 0.3], (x, y)), settings(4, [-0.5, 0.3])
    assert len(made_of.probings[0].ways) == 1
    found, right = made_of.of(EVERY)
    assert bool(right.all())
    sigma, tau = theta.exp()[..., None, None].unbind(2)
    covariance = sigma**2 * torch.eye(12) + 9.0 * (x.unsqueeze(-1) * x.unsqueeze(-2)).unsqueeze(1)
    covariance = covariance + tau**2 * (GROUP == GROUP.unsqueeze(-1)).double()
    exact = dist.MultivariateNormal(x.unsqueeze(1), covariance).log_prob(y.unsqueeze(1))
    torch.testing.assert_close(found.log_evidence(EVERY, theta), exact, rtol=1e-9, atol=0.0)


def test_terms_that_are_diagonal_together_need_no_matrices() -> None:
    """Numbers along the axes are those of the matrices; a power that is seen in sums alone is told from the rest."""
    found, right = looked_at(scaled, ["tau"], [0.0]).of(EVERY)
    assert bool(right.all()) and found.axes is not None
    assert found.axes.num.flatten().tolist() == [3.0] * 5  # the groups are alike
    matrices = Quadratics(*(getattr(found, n) for n in ("first", "centre", "powers", "line", "a", "b", "A")))
    theta = settings(6, [0.0])
    here, there = (each.log_evidence(EVERY, theta) for each in (found, matrices))
    torch.testing.assert_close(here, there, rtol=1e-10, atol=1e-10)
    for here, there in zip(found.orders(EVERY, theta[:, 0]), matrices.orders(EVERY, theta[:, 0]), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-9)


def together(x: Tensor, y: Tensor) -> None:
    """Two scales with a prior of both, under which they hang together."""
    both = dist.MultivariateNormal(torch.zeros(2), torch.tensor([[1.0, 0.6], [0.6, 2.0]]))
    tau, sigma = pyro.sample("scales", both).exp()
    b = pyro.sample("b", dist.Normal(0.0, tau))
    with pyro.plate("data", 12):
        pyro.sample("y", dist.Normal(b * x, sigma), obs=y)


@pytest.mark.parametrize(("model", "names"), [(intercepts, ["tau", "sigma"]), (together, ["scales"])])
def test_orders_are_derivatives_of_evidence_and_prior(model: Callable[..., None], names: list[str]) -> None:
    """By automatic differentiation of both; the prior of two scales by themselves has no mixed derivative."""
    made_of = looked_at(model, names, [-0.5, 0.3])
    known, joint = made_of.of(EVERY)[0], made_of.log_joints.f.__self__
    evidence, theta = Evidence(None, joint, joint.initial_u, known), joint.rows(EVERY)  # type: ignore[arg-type]
    theta[:, :-1] = settings(1, [-0.5, 0.3])[:, 0]
    rows = theta[:, :-1].clone().requires_grad_()
    objective = (known.log_evidence(EVERY, rows.unsqueeze(1)) + joint.log_hyperpriors(EVERY, rows.unsqueeze(1))).sum()
    (slope,) = torch.autograd.grad(objective, rows, create_graph=True)
    second = torch.stack([torch.autograd.grad(slope[:, i].sum(), rows, retain_graph=True)[0] for i in range(2)], 1)
    _, found, precision = evidence.orders(theta)
    torch.testing.assert_close(found, slope.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(precision, -second, rtol=1e-8, atol=1e-8)


def switched(x: Tensor, y: Tensor) -> None:
    """Levels of groups, in the model where ``x`` is one, and a contrast within each."""
    tau, sigma = (pyro.sample(name, dist.HalfCauchy(1.0)) for name in ("tau", "sigma"))
    b = pyro.sample("b", dist.Normal(1.0, 3.0))
    e = pyro.sample("e", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", 12):
        pyro.sample("y", dist.Normal(b * CONTRAST + tau * x * e[GROUP], sigma), obs=y)


@pytest.mark.parametrize("num_other", [0, 1])
def test_axes_that_are_equal_count_as_one_and_data_that_are_the_same_are_looked_at_once(num_other: int) -> None:
    """Which axes are equal differs among data sets; one with other data than those looked at is found to have them."""
    x = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.0, 1.0, 1.0]])[:, GROUP]
    y = data()[1][:1].repeat(5, 1)
    y[1, :num_other] += 1.0
    made_of, theta = looked_at(switched, ["tau", "sigma"], [0.0, 0.3], (x, y)), settings(4, [0.0, 0.3])
    assert len(made_of.probings[0].values) == 0
    found, right = made_of.of(EVERY)
    assert bool(right.all()) and found.axes is not None and found.axes.num.shape[-1] == 3
    sigma, tau = theta.exp()[..., None, None].unbind(2)
    own = tau**2 * ((GROUP == GROUP.unsqueeze(-1)) * x.unsqueeze(-1)).unsqueeze(1)
    covariance = sigma**2 * torch.eye(12) + 9.0 * torch.outer(CONTRAST, CONTRAST) + own
    exact = dist.MultivariateNormal(CONTRAST, covariance).log_prob(y.unsqueeze(1))
    torch.testing.assert_close(found.log_evidence(EVERY, theta), exact, rtol=1e-9, atol=0.0)


@pytest.mark.parametrize(("model", "site"), [(logistic, "tau"), (correlated, "rho")])
def test_what_is_no_such_sum_has_no_terms(model: Callable[..., Any], site: str) -> None:
    assert looked_at(model, [site], [0.0]) is None


def test_the_density_of_one_data_set_is_that_of_the_model_without_its_runs() -> None:
    """Its derivatives are those by autograd, at rows with hyperparameters of their own."""
    found, _ = looked_at(intercepts, ["tau", "sigma"], [-0.5, 0.3]).of(EVERY)
    x, y = data()
    for k in (1, 4):
        joint = MarginalisedJoint(intercepts, (x[k], y[k]), marginalise=["tau", "sigma"])
        known, plain = QuadraticDensity(joint, None, known=found.row(k)), AutogradDensity(joint, None)
        u, theta = torch.randn(3, 4, generator=torch.Generator().manual_seed(k)), settings(4, [-0.5, 0.3])[0, :3]
        for here, there in zip(known.gradient(u, theta), plain.gradient(u, theta), strict=True):
            torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(known.precision(u, theta), plain.precision(u, theta), rtol=1e-9, atol=1e-9)
        assert climbing(known) is known
