"""What is recognised equals the generic path wherever one looks; what only looks alike is not recognised."""

from dataclasses import replace
from functools import cache, partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import LaplaceEvidence, Stop
from pyro_evidence.models import gmrf
from pyro_evidence.numerics.derivatives import generic_directions, pullback
from pyro_evidence.numerics.linalg import available_bytes
from pyro_evidence.precision.dense import assembled
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.structure import recognise as structure
from pyro_evidence.structure.density import AutogradDensity, LinearDensity
from pyro_evidence.structure.recognise import Structure, recognise
from tests.models_for_tests import deceptive_models, deceptive_priors, recognised_models
from tests.models_for_tests.recognised_models import X, binary, positive, real

assert_same = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)

RECOGNISED, DECEPTIVE = recognised_models.CASES, deceptive_models.CASES | deceptive_priors.CASES


@cache
def looked_at(name: str) -> tuple[LogJoint, Structure]:
    case = (RECOGNISED | DECEPTIVE)[name]
    joint = LogJoint(case.model, case.args)
    return joint, recognise(joint)


def points(joint: LogJoint, num: int = 1, spread: float = 0.7) -> tuple[Tensor, Tensor]:
    """Latents away from the origin, hyperparameters away from where they start."""
    generator = torch.Generator().manual_seed(3)
    u = spread * torch.randn(num, joint.latents.size, generator=generator)
    return u, joint.initial_theta + 0.4 * torch.randn(joint.hypers.size, generator=generator)


Density = AutogradDensity | LinearDensity


def numbers(density: Density, joint: LogJoint) -> dict[str, Tensor]:
    u, theta = points(joint, num=2)
    value, gradient = density.gradient(u, theta)
    return {
        "value": value,
        "gradient": gradient,
        "precision": density.precision(u, theta),
        "diagonal": density.precision_diagonal(u, theta),
        "Gauss-Newton": density.gauss_newton(u, theta),
    }


def slopes(density: Density, joint: LogJoint) -> dict[str, Tensor]:
    """All that the gradient of a Laplace evidence asks for, with a fixed matrix for the inverse precision."""
    u, theta = (x.requires_grad_() for x in points(joint))
    G = torch.outer(*generic_directions(2, u.shape[-1], u)) + 3.0 * torch.eye(u.shape[-1])
    trace = (density.precision(u, theta) * G).sum()
    log_joint = density.log_joint(u, theta).sum()
    by_u = pullback(log_joint, u, create_graph=True)
    return {
        "of the precision in u": pullback(trace, u),
        "of the precision in theta": pullback(trace, theta),
        "of the diagonal in theta": pullback((density.precision_diagonal(u, theta) * G.diagonal()).sum(), theta),
        "of the log joint in theta": pullback(log_joint, theta),
        "mixed": pullback(by_u, theta, generic_directions(1, u.shape[-1], u)),
    }


def assert_all_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for what, value in actual.items():
        assert_same(value, expected[what], msg=partial("{}: {}".format, what))


LINEAR = [*RECOGNISED, *(name for name, case in DECEPTIVE.items() if case.linear)]


@pytest.mark.parametrize("name", LINEAR)
def test_recognised_path_equals_autograd(name: str) -> None:
    joint, found = looked_at(name)
    assert found.linear is not None and found.fastest is found.linear
    expected = numbers(found.density, joint)
    assert_same(expected["Gauss-Newton"], expected["precision"])
    assert_all_same(numbers(found.linear, joint), expected)
    if joint.hypers.size:
        assert_all_same(slopes(found.linear, joint), slopes(found.density, joint))
    assert found.agrees(*points(joint, num=3))


@pytest.mark.parametrize("name", RECOGNISED)
def test_groups_and_prior_are_as_written(name: str) -> None:
    joint, found = looked_at(name)
    case = RECOGNISED[name]
    power = [0.0] * joint.hypers.size if found.groups is None else found.groups.power.tolist()
    assert power == case.power
    assert found.linear is not None and found.linear.gaussian is case.gaussian


@pytest.mark.parametrize("name", DECEPTIVE)
def test_what_is_not_there_is_not_seen(name: str) -> None:
    joint, found = looked_at(name)
    case = DECEPTIVE[name]
    power = [0.0] * joint.hypers.size if found.groups is None else found.groups.power.tolist()
    assert power == case.power
    assert (found.groups is None) is (not any(case.power))
    assert (found.linear is not None) is case.linear
    assert (found.likelihoods is not None) is case.likelihoods


@pytest.mark.parametrize("name", LINEAR)
def test_linear_density_is_right_far_out(name: str) -> None:
    """Where a kink would show: five units from the origin."""
    joint, found = looked_at(name)
    assert found.linear is not None
    u, theta = points(joint, num=4, spread=5.0)
    usable = torch.isfinite(found.density.log_joint(u, theta))
    assert bool(usable.any())
    actual, expected = (d.log_joint(u[usable], theta) for d in (found.linear, found.density))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-6)


def groups_of(name: str):
    found = looked_at(name)[1].groups
    assert found is not None
    return found


def test_members_of_several_sites() -> None:
    """Flat order is alphabetical: a, b, bias, c; hyperparameters alpha_ax, alpha_b, alpha_bx, alpha_cx."""
    found = groups_of("several_sites")
    assert found.member.tolist() == [0, 2, 1, 3]
    assert_same(found.loc, torch.tensor([0.1, 0.2, 0.0, 0.0]))
    assert_same(found.offset, torch.zeros(4))
    assert found.noise["t"].tolist() == []
    assert found.is_weight.tolist() == [True] * 4
    active = torch.tensor([True, True, False, True])
    assert found.size(active).tolist() == [1.0, 0.0, 1.0, 1.0]


def test_members_that_share_a_precision_assembled_in_place() -> None:
    assert groups_of("assembled_in_place").member.tolist() == [0, 0, 1]


def test_members_in_nested_plates() -> None:
    """Weights (3, 2) and noise (30, 2), precisions by column; hyperparameters alpha_0, alpha_1, beta_0, beta_1."""
    found = groups_of("nested_plates")
    assert found.member.tolist() == [0, 1] * 3
    assert found.noise["t"].tolist() == [2, 3] * 30
    assert found.is_weight.tolist() == [True, True, False, False]
    assert found.size(torch.ones(6, dtype=torch.bool)).tolist() == [3.0, 3.0, 30.0, 30.0]


def test_noise_of_groups_of_data() -> None:
    """Hyperparameters alpha, beta_0, beta_1, intercept."""
    found = groups_of("beta_per_group")
    assert found.member.tolist() == [0, 0, 0]
    assert found.noise["t"].tolist() == [1, 2] * 15


def test_noise_of_one_of_several_sites() -> None:
    found = groups_of("two_views")
    assert {name: owner.tolist() for name, owner in found.noise.items()} == {"s": [], "t": [1] * 30, "x": [2] * 30}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("softmax_columns", torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(3)),
        ("probit", torch.full((3,), 0.8**-2)),
        ("poisson", torch.full((3,), 1 / 0.7)),
        ("linear_scale_tril", torch.tensor([4.0, 1.0, 0.25])),
        ("overlapping", torch.ones(4)),
    ],
)
def test_log_precision_is_that_of_the_prior(name: str, precision: Tensor) -> None:
    """By hand at the start, one for what is in no group; times e to the power times a step after it."""
    joint, found = looked_at(name)[0], groups_of(name)
    theta = joint.initial_theta
    assert_same(found.log_precision(theta).exp(), precision)
    moved = found.log_precision(theta + 0.1) - found.log_precision(theta)
    assert_same(moved, torch.where(found.member >= 0, 0.1 * found.power[found.member], 0.0))


@pytest.mark.parametrize("name", ["moving_mean", "pooled_mean"])
def test_a_moving_prior_mean_is_not_a_number(name: str) -> None:
    found = groups_of(name)
    in_group = found.member >= 0
    assert int(in_group.sum()) == 3
    assert bool(found.loc[in_group].isnan().all())
    assert bool(found.follows[in_group].all()) is (name == "pooled_mean")
    assert bool(found.is_weight[0]) is (name == "moving_mean")


def test_single_precision_is_recognised_with_its_own_rounding() -> None:
    def model(X, t):
        alpha, beta = (pyro.param(n, X.new_tensor(2.0), constraint=constraints.positive) for n in ("alpha", "beta"))
        w = pyro.sample("w", dist.Normal(X.new_zeros(3), alpha.rsqrt()).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("t", dist.Normal(X @ w, beta.rsqrt()), obs=t)

    joint = LogJoint(model, (X.float(), real.float()))
    found = recognise(joint)
    assert joint.dtype == torch.float32
    assert found.groups is not None and found.groups.power.tolist() == [1.0, 1.0]
    assert found.linear is not None
    u, theta = points(joint, num=2)
    torch.testing.assert_close(
        found.linear.precision(u, theta), found.density.precision(u, theta), rtol=1e-4, atol=1e-3
    )
    assert found.agrees(u, theta)


def test_a_permutation_of_components_permutes_the_predictor() -> None:
    def model(t, order):
        mu = pyro.sample("mu", dist.Normal(torch.tensor([-2.0, 0.0, 2.0])[order], 1.0).to_event(1))
        with pyro.plate("data", len(t)):
            k = pyro.sample("k", dist.Categorical(torch.tensor([0.2, 0.3, 0.5])[order]))
            pyro.sample("t", dist.Normal(mu[k], 0.8), obs=t)

    order, u = torch.tensor([2, 0, 1]), torch.randn(1, 3)
    plain, moved = (recognise(LogJoint(model, (real, o))).linear for o in (torch.arange(3), order))
    assert plain is not None and moved is not None
    theta = torch.zeros(0)
    assert_same(moved.log_joint(u[:, order], theta), plain.log_joint(u, theta))
    assert_same(moved.precision(u[:, order], theta), plain.precision(u, theta)[:, order][:, :, order])


def test_rescaled_inputs_rescale_the_weights() -> None:
    def model(X, t, scale):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0 / scale).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("t", dist.Bernoulli(logits=(X * scale) @ w), obs=t)

    scale, u, theta = torch.tensor([1e-4, 1.0, 1e4]), torch.randn(1, 3), torch.zeros(0)
    plain, other = (recognise(LogJoint(model, (X, binary, s))).linear for s in (torch.ones(3), scale))
    assert plain is not None and other is not None
    assert_same(
        other.precision(u / scale, theta), plain.precision(u, theta) * scale * scale[:, None], rtol=1e-9, atol=0.0
    )


def test_a_disagreement_is_noticed() -> None:
    joint, found = looked_at("logistic_by_logits")
    other = looked_at("masked")[1]
    u, _ = points(joint, num=2)
    mixed = Structure(None, None, found.linear, other.density)
    assert not mixed.agrees(u, torch.zeros(3))
    assert Structure(None, None, None, other.density).agrees(u, torch.zeros(1))


def test_a_model_that_cannot_be_run_far_out_is_left_to_autograd() -> None:
    def model(X, t):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        if not bool((w.abs() < 6.0).all()):
            raise OverflowError("w is too large")
        with pyro.plate("data", len(X)):
            pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)

    found = recognise(LogJoint(model, (X, binary)))
    assert found.linear is None and found.likelihoods is None and found.groups is None


def test_a_large_jacobian_of_mostly_zeros_is_not_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(t):
        with pyro.plate("data", len(t)):
            b = pyro.sample("b", dist.Normal(0.0, positive("alpha", 1.0).rsqrt()))
            pyro.sample("t", dist.Bernoulli(logits=b), obs=t)

    monkeypatch.setattr(structure, "SMALL_JACOBIAN", 30 * 30 - 1)
    found = recognise(LogJoint(model, (binary,)))
    assert found.linear is None and found.likelihoods is not None and found.groups is not None


def test_a_design_that_fills_the_memory_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    joint = looked_at("logistic_by_logits")[0]
    assert available_bytes(torch.device("cpu")) > 0
    monkeypatch.setattr(structure, "has_room", lambda num_bytes, device: num_bytes <= 16 * 90 - 1)
    assert recognise(joint).linear is None


def test_the_models_own_design_matrix_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(X, t):
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("t", dist.Bernoulli(logits=X @ w + b), obs=t)

    monkeypatch.setattr(structure, "FEW_PASSES", 0)
    alone = recognise(looked_at("logistic_by_logits")[0]).linear
    beside = recognise(LogJoint(model, (X, binary))).linear
    assert alone is not None and beside is not None
    assert alone.linear[0].J.data_ptr() == X.data_ptr()
    assert torch.equal(beside.linear[0].J[:, 0], torch.cat([torch.ones(30, 1), X], -1))


@pytest.mark.parametrize("num", [50, 35])  # more than there are data, and fewer
def test_a_predictor_that_is_no_design_of_the_models_is_differentiated(num: int) -> None:
    Phi, turned = torch.randn(40, 36), torch.randn(40, num)

    def model(X, t):
        b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([num]).to_event(1))
        w = pyro.sample("w", dist.Normal(torch.zeros(36), 1.0).to_event(1))
        with pyro.plate("data", 40):
            pyro.sample("t", dist.Bernoulli(logits=X @ w + (2.0 * turned.flip(1)) @ b.flip(0)), obs=t)

    found = recognise(LogJoint(model, (Phi, torch.ones(40)))).linear
    assert found is not None
    torch.testing.assert_close(found.linear[0].J[:, 0], torch.cat([2.0 * turned, Phi], -1))


def test_hidden_dependence_on_wide_hyperparameters_is_no_group() -> None:
    """Beyond a factor of a hundred million the noise precision is no longer the hyperparameter."""

    def model(X, t):
        beta = positive("beta", 1.0)
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("t", dist.Normal(X @ w, beta.clamp(max=20.0).rsqrt()), obs=t)

    assert recognise(LogJoint(model, (X, real))).groups is None


def persons_and_items(num: int) -> LogJoint:
    person, item = torch.arange(num).repeat_interleave(20), torch.arange(20).repeat(num)
    y = (person * 7 + item * 3) % 4

    def model() -> None:
        sorting = dist.transforms.OrderedTransform()
        cuts = pyro.sample("cuts", dist.TransformedDistribution(dist.Normal(torch.zeros(3), 2.0).to_event(1), sorting))
        with pyro.plate("persons", num):
            a = pyro.sample("a", dist.Normal(0.0, positive("s", 1.0)))
        with pyro.plate("items", 20):
            d = pyro.sample("d", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.OrderedLogistic(a[person] - d[item], cuts), obs=y)

    return LogJoint(model, ())


def test_few_coordinates_with_many_rows_that_are_not_linear_have_factors() -> None:
    joint = persons_and_items(60)
    found = recognise(joint, factors=True).factors
    assert found is not None
    assert found.takes_rows
    u, theta = points(joint, num=2)
    elements = found.laid_out(u.new_zeros(2, found.size), (), found.factors_of_rows(u, theta.expand(2, -1)))
    for own, expected in zip(zip(*elements, strict=True), found.precision(u, theta), strict=True):
        assert_same(assembled(found.pattern, own), expected)


def test_few_rows_are_not_searched_for_factors() -> None:
    assert recognise(persons_and_items(5), factors=True).factors is None


def hierarchy(mean, spread=lambda _: 1.0) -> LogJoint:
    def model() -> None:
        mu = pyro.sample("mu", dist.Normal(1.0, 5.0))
        with pyro.plate("groups", 3):
            pyro.sample(
                "y",
                dist.Normal(pyro.sample("theta", dist.Normal(mean(mu), positive("s", 0.7) * spread(mu))), 1.0),
                obs=X[:3, 0],
            )

    return LogJoint(model, ())


def test_linear_prior_means_are_read_off_and_give_the_derivatives_of_the_model() -> None:
    joint = hierarchy(lambda mu: 2.0 * mu - 3.0)
    found = recognise(joint)
    assert found.linear is not None
    assert found.linear.W is not None
    expected = torch.eye(4)
    expected[1:, 0] = -2.0
    assert_same(found.linear.W, expected)
    normal = found.linear.parts(joint.initial_theta).normal
    assert normal is not None
    assert_same(normal.loc, torch.tensor([1.0, -3.0, -3.0, -3.0]))
    assert_all_same(numbers(found.linear, joint), numbers(found.density, joint))
    assert_all_same(slopes(found.linear, joint), slopes(found.density, joint))


@pytest.mark.parametrize(
    "joint",
    [
        hierarchy(torch.square),
        hierarchy(lambda mu: mu.clamp(-30.0, 30.0)),
        hierarchy(lambda mu: mu, lambda mu: (0.1 * mu).exp()),
        hierarchy(lambda mu: mu * positive("slope", 2.0)),
    ],
    ids=["square", "clamped", "spread", "slope"],
)
def test_prior_means_that_are_not_linear_or_spreads_that_move_are_not(joint: LogJoint) -> None:
    linear = recognise(joint).linear
    assert linear is None or linear.W is None


def with_a_kinked_mean(y: Tensor, z: Tensor) -> None:
    """The prior mean of ``b`` is a straight line in ``a`` whose slope moves with ``c`` below one."""
    s, c = positive("s", 0.5), pyro.param("c", torch.tensor(3.0))
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(c.clamp(max=1.0) * a, 0.5))
    pyro.sample("z", dist.Normal(a, 0.2), obs=z)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(c + b * X[:, 0], s), obs=y)


def with_a_kinked_design(y: Tensor, z: Tensor) -> None:
    """The design of ``b`` moves with ``c`` below one."""
    s, c = positive("s", 0.5), pyro.param("c", torch.tensor(3.0))
    a, b = pyro.sample("a", dist.Normal(0.0, 1.0)), pyro.sample("b", dist.Normal(0.0, 1.0))
    pyro.sample("z", dist.Normal(a, 0.2), obs=z)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(c + c.clamp(max=1.0) * b * X[:, 0], s), obs=y)


@pytest.mark.parametrize(("model", "is_mean"), [(with_a_kinked_mean, True), (with_a_kinked_design, False)])
def test_what_moves_far_from_the_first_hyperparameters_is_seen_where_a_fit_ends(model: Model, is_mean: bool) -> None:
    """Oracle: the normal distribution of all data at the hyperparameters that the fit has ended at."""
    x, z = X[:, 0], torch.tensor(2.9)
    y = 0.2 + x + 0.3 * torch.cos(7.0 * torch.arange(len(x)))
    found = LaplaceEvidence(model, marginalise=(), stop=Stop(progress=False)).run(y, z)
    s, c = (float(found.hyperparameters[n]) for n in ("s", "c"))
    assert c < 0.9
    prior = torch.tensor([[1.0, c], [c, c * c + 0.25]]) if is_mean else torch.eye(2)
    design = torch.zeros(len(x) + 1, 2)
    design[0, 0], design[1:, 1] = 1.0, x if is_mean else c * x
    noise = torch.cat([torch.tensor([0.04]), torch.full_like(x, s * s)]).diag()
    mean = torch.cat([torch.zeros(1), torch.full_like(x, c)])
    exact = dist.MultivariateNormal(mean, design @ prior @ design.T + noise).log_prob(torch.cat([z.reshape(1), y]))
    assert float(found.log_evidence) == pytest.approx(float(exact), abs=1e-8)


def counts(y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.NegativeBinomial(positive("r", 2.0), logits=X[:, :2] @ w), obs=y)


def test_a_density_at_plain_numbers_carries_no_graph() -> None:
    """Though the run of the model that it takes its numbers from is one that slopes are taken of."""
    joint = LogJoint(counts, (torch.arange(len(X)).double() % 5.0,))
    linear = recognise(joint).linear
    assert linear is not None
    u = joint.initial(1, seed=0)
    value, _ = linear.gradient(u, joint.initial_theta)
    again = linear.log_joint(u, joint.initial_theta)
    assert_same(again, value)
    assert not again.requires_grad


def a_walk_of_counts(y: Tensor) -> None:
    s = pyro.sample("s", dist.HalfNormal(1.0))
    x = pyro.sample("x", gmrf.RandomWalk(s, torch.arange(len(y)).double().square(), level=3.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(x.exp()), obs=y)


def test_what_stands_around_a_field_is_read_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the density of all latents together a fit needs a few values, for which nothing need be recognised."""
    read: list[LogJoint] = []

    def counted(joint: LogJoint, *, factors: bool = False) -> Structure:
        read.append(joint)
        return recognise(joint, factors=factors)

    monkeypatch.setattr(structure, "recognise", counted)
    y = torch.poisson(torch.full((220,), 3.0), torch.Generator().manual_seed(0))
    posterior = LaplaceEvidence(a_walk_of_counts, nodes=1).run(y)
    assert posterior.marginalised_sites == ("s",)
    assert not read
    problem = posterior.state.problem
    with torch.no_grad():
        value = problem.density.log_joint(posterior.state.u.expand(2, -1), posterior.state.theta)
    assert len(read) == 1
    assert problem.structure.factors is not None
    assert_same(value, posterior.state.log_joint.expand(2))
    again = replace(problem.structure, known=None)
    assert again.known is None
    assert len(read) == 1
