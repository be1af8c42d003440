"""Who touches whom, per-factor curvature, and the Laplace evidence on them, against the dense Hessian and on paper."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pyro_evidence import LaplaceEvidence, LaplacePosterior, Stop
from pyro_evidence.errors import TooLarge, UnsupportedModel
from pyro_evidence.laplace.approximation import LaplaceState, Problem, is_certified, laplace_problem, laplace_state
from pyro_evidence.laplace.gradient import slope
from pyro_evidence.precision.choices import exact_hessian
from pyro_evidence.precision.dense import assembled
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.structure import recognise
from pyro_evidence.structure.density import AutogradDensity
from pyro_evidence.structure.factor_density import Structured
from tests.models_for_tests import hierarchies
from tests.models_for_tests.hierarchies import CASES, LIKELIHOODS, positive

SIZES = {"crossed": 40, "nested": 40, "slopes": 30, "non_centred": 20, "chain": 20, "second_order": 20, "grid": 25}


@pytest.fixture(autouse=True)
def small_models_too() -> Iterator[None]:
    """Factors are looked for in models of any size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recognise, "SMALL", 0)
        yield


def by_factors(joint: LogJoint) -> LaplaceState:
    problem = laplace_problem(joint)
    assert problem.factors is not None, problem.structure.coupled
    return laplace_state(problem, joint.initial_theta, joint.initial(1, 0)[0], cold=True)


def dense(state: LaplaceState) -> LaplaceState:
    joint = state.problem.joint
    problem = Problem(joint, recognise.recognise(joint), exact_hessian, state.problem.active)
    return laplace_state(problem, state.theta, state.u)


@given(
    case=st.sampled_from(CASES),
    likelihood=st.sampled_from(sorted(LIKELIHOODS)),
    with_global=st.booleans(),
    share=st.floats(0.3, 1.0),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=16, deadline=None, derandomize=True, phases=[Phase.generate])
def test_evidence_and_slope_are_those_of_the_dense_hessian(
    case: Any, likelihood: str, with_global: bool, share: float, seed: int
) -> None:
    torch.manual_seed(seed)
    model, args = case(likelihood, max(1, round(share * SIZES.get(case.__name__, 10))), with_global)
    joint = LogJoint(model, args)
    state = by_factors(joint)
    expected = dense(state)
    assert is_certified(state)
    torch.testing.assert_close(state.log_evidence, expected.log_evidence, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(slope(state).total, slope(expected).total, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state.precision.variance, expected.precision.variance, rtol=1e-8, atol=1e-10)


def test_single_precision_has_a_certificate_of_its_own() -> None:
    torch.manual_seed(0)
    model, args = hierarchies.crossed("poisson", 40, False)
    args = tuple(x.float() if x.is_floating_point() else x for x in args)

    def single(*args: Tensor) -> None:
        torch.set_default_dtype(torch.float32)
        try:
            model(*args)
        finally:
            torch.set_default_dtype(torch.float64)

    state = by_factors(LogJoint(single, args))
    density = state.problem.structure.factors
    assert density is not None and density.joint.dtype is torch.float32
    gap = density.certificate(state.u, state.theta, density.elements(state.u, state.theta))
    assert is_certified(state) and float(gap.max()) > 1e-9  # what float64 would be asked for
    lame = replace(density, linear=None, families=density.families[:-1], _kept=[])
    broken = replace(state, problem=replace(state.problem, structure=replace(state.problem.structure, known=lame)))
    assert not is_certified(broken)


@pytest.mark.parametrize("case", [hierarchies.crossed, hierarchies.nested, hierarchies.slopes])
def test_the_order_of_rows_does_not_matter(case: Any) -> None:
    torch.manual_seed(0)
    model, args = case("bernoulli", 20, True)
    order = torch.randperm(len(args[-1]))
    first, second = (by_factors(LogJoint(model, a)) for a in (args, tuple(x[order] for x in args)))
    torch.testing.assert_close(first.log_evidence, second.log_evidence, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_elements_add_up_to_the_hessian(case: Any) -> None:
    torch.manual_seed(0)
    joint = LogJoint(*case("poisson", 2, True))
    density = laplace_problem(joint).structure.factors
    assert isinstance(density, Structured)
    u = joint.initial(1, 1)[0]
    A = assembled(density.pattern, density.elements(u, joint.initial_theta))
    rows = torch.stack([u, 0.5 * u])
    expected = AutogradDensity(joint, None).precision(rows, joint.initial_theta)
    torch.testing.assert_close(A, expected[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(density.precision(rows, joint.initial_theta), expected, rtol=1e-10, atol=1e-10)


def test_a_hundred_thousand_groups_of_a_linear_gaussian_model_are_exact() -> None:
    """On paper: the covariance within a group is ``s^2 11' + noise^2 I``."""
    torch.manual_seed(0)
    num, per, s, noise = 100_000, 2, 0.8, 0.6
    group = torch.arange(num).repeat_interleave(per)
    y = s * torch.randn(num)[group] + noise * torch.randn(num * per)

    def model(y: Tensor) -> None:
        with pyro.plate("groups", num):
            a = pyro.sample("a", dist.Normal(0.0, s))
        with pyro.plate("data", num * per):
            pyro.sample("y", dist.Normal(a[group], noise), obs=y)

    posterior = LaplaceEvidence(model, stop=Stop(progress=False)).run(y)
    covariance = s**2 * torch.ones(per, per) + noise**2 * torch.eye(per)
    expected = dist.MultivariateNormal(torch.zeros(per), covariance).log_prob(y.reshape(num, per)).sum()
    torch.testing.assert_close(posterior.log_evidence, expected, rtol=1e-8, atol=0.0)
    assert posterior.state.problem.factors is not None


def mixed(y: Tensor) -> None:
    """Every datum sees all effects, each with a weight of its own."""
    with pyro.plate("groups", len(y)):
        a = pyro.sample("a", dist.Normal(0.0, positive("s")))
    weights = torch.arange(len(y) ** 2).reshape(len(y), -1).to(a).cos() / len(y)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(weights @ a, 1.0), obs=y)


def increments(y: Tensor) -> None:
    """A random walk by its increments."""
    with pyro.plate("steps", len(y)):
        z = pyro.sample("z", dist.Normal(0.0, positive("s")))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(z.cumsum(0), 1.0), obs=y)


def standardised(y: Tensor) -> None:
    """Effects in units of their own spread."""
    with pyro.plate("groups", len(y)):
        a = pyro.sample("a", dist.Normal(0.0, positive("s")))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(a / a.std(), 1.0), obs=y)


def shares(y: Tensor) -> None:
    """Effects as shares of a whole."""
    with pyro.plate("groups", len(y)):
        a = pyro.sample("a", dist.Normal(0.0, positive("s")))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(10.0 * a.softmax(0), 1.0), obs=y)


def ranked(y: Tensor) -> None:
    """The largest effect matters to all."""
    with pyro.plate("groups", len(y)):
        a = pyro.sample("a", dist.Normal(0.0, positive("s")))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(a - 0.1 * a.logsumexp(0), 1.0), obs=y)


DECEPTIVE = (mixed, increments, standardised, shares, ranked)


@pytest.mark.parametrize("model", DECEPTIVE)
def test_models_that_only_look_separable_end_dense(model: Any) -> None:
    torch.manual_seed(0)
    joint = LogJoint(model, (torch.randn(220),))
    problem = laplace_problem(joint)
    assert problem.factors is None
    assert problem.structure.coupled is not None


def test_a_factor_that_was_overlooked_fails_the_certificate() -> None:
    torch.manual_seed(0)
    joint = LogJoint(*hierarchies.nested("bernoulli", 4, False))
    state = by_factors(joint)
    density = state.problem.structure.factors
    assert density is not None and density.families
    lame = replace(density, families=density.families[:-1], _kept=[])
    broken = replace(state, problem=replace(state.problem, structure=replace(state.problem.structure, known=lame)))
    assert is_certified(state) and not is_certified(broken)


def test_a_fit_whose_certificate_fails_is_made_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, args = hierarchies.crossed("bernoulli", 5, False)
    expected = LaplaceEvidence(model, stop=Stop(progress=False)).run(*args)
    monkeypatch.setattr("pyro_evidence.structure.factor_mode.CLOSE", 0.0)
    found = LaplaceEvidence(model, stop=Stop(progress=False)).run(*args)
    assert expected.state.problem.factors is not None and found.state.problem.factors is None
    torch.testing.assert_close(found.log_evidence, expected.log_evidence, rtol=1e-8, atol=1e-8)


def test_the_letter_names_the_site_that_couples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyro_evidence.numerics.linalg.available_bytes", lambda device: 10**9)
    with pytest.raises(
        TooLarge, match=r"a cumulative sum ties 60,000 coordinates together \(site 'z'.*level of a walk"
    ):
        LaplaceEvidence(increments, stop=Stop(progress=False)).run(torch.randn(60_000))


def test_the_sentence_says_what_was_found() -> None:
    torch.manual_seed(0)
    model, args = hierarchies.crossed("bernoulli", 60, False)
    posterior = LaplaceEvidence(model, stop=Stop(progress=False)).run(*args)
    assert "eliminated" in posterior.structure and "(second_effect)" in posterior.structure
    assert "720 factors of up to 2 coordinates; checked by 2 products" in posterior.structure
    posterior = LaplaceEvidence(ranked, stop=Stop(progress=False, throw=False)).run(2.0 * torch.randn(250))
    assert posterior.structure == "250 coordinates, dense: a sum ties 250 coordinates together"


def test_a_million_groups_in_a_gibibyte_are_refused_before_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    num = 1_000_000
    y = torch.zeros(num)
    group = torch.arange(num)

    def model(y: Tensor) -> None:
        with pyro.plate("groups", num):
            a = pyro.sample("a", dist.Normal(0.0, positive("s")))
        with pyro.plate("data", num):
            pyro.sample("y", dist.Poisson((0.5 + a[group]).exp()), obs=y)

    monkeypatch.setattr("pyro_evidence.numerics.linalg.available_bytes", lambda device: 2**28)
    with pytest.raises(TooLarge, match=r"1,000,000 coordinates.*needs [0-9,]+ bytes; 268,435,456 are free"):
        LaplaceEvidence(model, stop=Stop(progress=False)).run(y)


@pytest.mark.parametrize("case", [hierarchies.crossed, hierarchies.slopes, hierarchies.chain])
def test_spread_and_draws_are_those_of_the_dense_inverse(case: Any) -> None:
    torch.manual_seed(0)
    state = by_factors(LogJoint(*case("bernoulli", 20, True)))
    covariance = dense(state).precision.log_det_gradient[0]
    torch.testing.assert_close(state.precision.variance[0], covariance.diagonal(), rtol=1e-10, atol=0.0)
    root = state.precision.unwhiten(torch.eye(len(state.u)))  # rows of a square root
    torch.testing.assert_close(root.mT @ root, covariance, rtol=1e-8, atol=1e-10)


def test_a_posterior_of_many_groups_works_as_any_other(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, args = hierarchies.crossed("poisson", 60, True)
    posterior = LaplaceEvidence(model, stop=Stop(progress=False)).run(*args)
    assert posterior.get_samples(5, seed=0)["first_effect"].shape == (5, 480)
    assert posterior.quantiles([0.1, 0.9])["second_effect"].shape == (2, 180)
    assert posterior.log_prob().shape == (len(args[-1]),)
    assert set(posterior.guide()) == {"first_effect", "second_effect", "w"}
    assert torch.isfinite(torch.as_tensor(posterior.diagnostics(num_samples=20)["smallest_eigenvalue"]))
    posterior.save(tmp_path / "posterior.pt")
    again = LaplacePosterior.load(tmp_path / "posterior.pt", model)
    torch.testing.assert_close(again.get_samples(3, seed=1), posterior.get_samples(3, seed=1), rtol=1e-10, atol=1e-10)
    assert again.structure == posterior.structure


def differences(num: int, edges: Tensor, learned: bool) -> None:
    """A field by its differences."""
    x = pyro.sample("x", dist.Normal(0.0, 2.0).expand([num]).to_event(1))
    scale = positive("s") if learned else torch.tensor(1.0)
    pyro.sample("edge", dist.Normal(x[edges[:, 0]] - x[edges[:, 1]], scale).to_event(1), obs=torch.zeros(len(edges)))
    pyro.sample("y", dist.Normal(x, 1.0).to_event(1), obs=torch.arange(float(num)))


def test_a_learned_scale_of_edges_with_cycles_is_refused() -> None:
    edges, num = hierarchies.grid_edges(3, 4)
    with pytest.raises(UnsupportedModel, match=r"'edge'.*17 differences.*6 cycles.*scale\^-11, not by.*ICAR"):
        laplace_problem(LogJoint(differences, (num, edges, True)))
    laplace_problem(LogJoint(differences, (num, edges, False)))
    laplace_problem(LogJoint(differences, (num, edges[:3], True)))
