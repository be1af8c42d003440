"""What one trace says about sites: wrappers, likelihoods, Gaussian priors and noise, each against the trace itself."""

from functools import cache, partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor

from pyro_evidence.program import predictors
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.predictors import (
    Sites,
    gaussian_noise,
    gaussian_prior,
    log_prior_rows,
    read_sites,
    unwrapped,
)
from pyro_evidence.program.sites import log_prob_sum
from pyro_evidence.structure.recognise import recognise
from tests.models_for_tests import deceptive_models, recognised_models
from tests.models_for_tests.recognised_models import X, binary, positive, real

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)

CASES = recognised_models.CASES


@cache
def joint_of(name: str) -> LogJoint:
    case = (CASES | deceptive_models.CASES)[name]
    return LogJoint(case.model, case.args)


def run(joint: LogJoint, seed: int = 0) -> tuple[Tensor, object]:
    generator = torch.Generator().manual_seed(seed)
    u = (0.7 * torch.randn(joint.latents.size, generator=generator)).requires_grad_()
    return u, joint.trace(u, joint.initial_theta)


def sites_of(name: str) -> tuple[LogJoint, object, Sites]:
    joint = joint_of(name)
    u, trace = run(joint)
    sites = read_sites(joint, trace, u)
    assert sites is not None
    return joint, trace, sites


# --- wrappers ---

LOC = torch.zeros(4, 3, 2)


@pytest.mark.parametrize(
    ("fn", "base", "mixing", "inner", "outer"),
    [
        (dist.Normal(LOC, 1.0), "Normal", False, 0, 0),
        (dist.Normal(LOC, 1.0).to_event(2), "Normal", False, 2, 0),
        (dist.Normal(LOC, 1.0).to_event(1).to_event(1), "Normal", False, 2, 0),
        (dist.MultivariateNormal(LOC, torch.eye(2)).to_event(1), "MultivariateNormal", False, 1, 0),
        (dist.Normal(0.0, 1.0).expand([4]).to_event(1), "Normal", False, 1, 0),
        (
            dist.ZeroInflatedPoisson(torch.ones(1), gate=torch.tensor(0.1)).expand([4]),
            "ZeroInflatedPoisson",
            False,
            0,
            0,
        ),
        (dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), dist.Normal(LOC, 1.0)), "Normal", True, 0, 0),
        (
            dist.MixtureSameFamily(dist.Categorical(torch.ones(3)), dist.Normal(LOC, 1.0).to_event(1)).to_event(1),
            "Normal",
            True,
            1,
            1,
        ),
        (dist.Normal(LOC, 1.0).mask(False), "MaskedDistribution", False, 0, 0),
    ],
)
def test_wrappers_are_taken_off(fn, base: str, mixing: bool, inner: int, outer: int) -> None:
    found = unwrapped(fn)
    actual = (type(found.base).__name__, found.mixing is not None, found.inner, found.outer)
    assert actual == (base, mixing, inner, outer)


@pytest.mark.parametrize(
    ("fn", "names"),
    [
        (dist.Normal(0.0, 1.0), ["loc", "scale"]),
        (dist.Bernoulli(logits=torch.zeros(2)), ["logits"]),
        (dist.Bernoulli(probs=torch.ones(2) / 2), ["probs"]),
        (dist.Binomial(3, logits=torch.zeros(2)), ["total_count", "logits"]),
        (dist.MultivariateNormal(torch.zeros(2), scale_tril=torch.eye(2)), ["loc", "scale_tril"]),
        (dist.LogNormal(torch.zeros(2), torch.ones(2)), ["loc", "scale"]),
        (dist.OneHotCategorical(logits=torch.zeros(2)), ["logits"]),
    ],
)
def test_names_are_those_that_were_given(fn, names: list[str]) -> None:
    """Also after the other parametrisation was asked for."""
    for _ in range(2):
        assert sorted(unwrapped(fn).names) == sorted(names)
        _ = getattr(fn, "probs", None), getattr(fn, "logits", None)


@pytest.mark.parametrize(("a", "b"), [((3, 1), (4,)), ((), (2, 3)), ((1, 5), (4, 1)), ((2,), (2,))])
def test_shapes_broadcast_as_torchs(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    assert predictors.broadcast(a, b) == tuple(torch.broadcast_shapes(a, b))


# --- likelihoods ---


@pytest.mark.parametrize("name", CASES)
def test_slots_rebuild_the_likelihood(name: str) -> None:
    """Prior, likelihoods at their own predictor and free sites add up to the log joint; rows are a loop."""
    joint, trace, sites = sites_of(name)
    u, _ = run(joint)
    rest = log_prior_rows(joint, u.unsqueeze(0), joint.initial_theta)[0] + log_prob_sum(trace, sites.free)
    for likelihood in sites.likelihoods:
        eta = likelihood.predictor(trace)
        assert eta.shape == likelihood.layout.shape
        rows = torch.stack([eta, eta + 0.1, eta - 0.2])
        values = likelihood.log_likelihood(trace)(rows)
        assert_exact(values, torch.cat([likelihood.log_likelihood(trace)(row.unsqueeze(0)) for row in rows]))
        rest = rest + values[0]
    assert_exact(rest, joint.log_joint(u, joint.initial_theta))


@pytest.mark.parametrize("name", CASES)
def test_derivatives_in_a_predictor_are_those_of_differences(name: str) -> None:
    """Of every datum by itself, in closed form or not, on both sides of zero; with a graph on request."""
    _, trace, sites = sites_of(name)
    for likelihood in sites.likelihoods:
        eta, each, h = likelihood.blocks(trace).mT, likelihood.log_likelihoods(trace), 1e-4
        if (
            likelihood.mixture is not None
            or len(eta) > 1
            or each(likelihood.layout.natural(eta.unsqueeze(-1))).shape != eta.shape
        ):
            continue
        rows = torch.cat([eta.tanh(), 0.3 + eta.tanh(), -0.1 - eta.tanh()]).detach()
        low, middle, high = (each(likelihood.layout.natural((rows + step).unsqueeze(-1))) for step in (-h, 0.0, h))
        with torch.no_grad():
            first, second = likelihood.orders(trace, torch.float64)(rows, False)
        torch.testing.assert_close(first, ((high - low) / (2.0 * h)).detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(second, ((high - 2.0 * middle + low) / h**2).detach(), rtol=1e-4, atol=1e-4)
        leaf = rows.clone().requires_grad_()
        slope = torch.autograd.grad(likelihood.orders(trace, torch.float64)(leaf, True)[0].sum(), leaf)[0]
        assert_exact(slope, second)


@pytest.mark.parametrize(
    ("name", "parameter", "shape", "coupled", "mixture"),
    [
        ("logistic_by_logits", "logits", (30,), (), None),
        ("logistic_by_probs", "probs", (30,), (), None),
        ("softmax_rows", "logits", (30, 2), (1,), None),
        ("gamma_regression", "rate", (30,), (), None),
        ("linear_event", "loc", (30,), (), None),
        ("linear_scale_tril", "loc", (30,), (0,), None),
        ("hidden_kernels", "loc", (2, 30), (0,), "k"),
        ("mixture_of_kernels", "loc", (30, 2), (1,), ""),
        ("hidden_vectors", "loc", (2, 30, 2), (0, 2), "k"),
        ("hidden_centres", "loc", (3, 1), (0,), "k"),
        ("shared_scales", "loc", (1, 1), (0,), "k"),
        ("repeated", "loc", (1, 1), (), None),
        ("nested_plates", "loc", (30, 2), (), None),
    ],
)
def test_slots_say_where_and_what_couples(name, parameter, shape, coupled, mixture) -> None:
    """By hand: plates and ``expand`` that only repeat the predictor leave an axis of size one."""
    (likelihood,) = sites_of(name)[2].likelihoods
    actual = (
        likelihood.parameter,
        tuple(likelihood.layout.shape),
        tuple(sorted(likelihood.layout.coupled)),
        likelihood.mixture,
    )
    assert actual == (parameter, shape, coupled, mixture)


def test_sites_that_do_not_see_the_latents_are_free() -> None:
    _, _, sites = sites_of("two_views")
    assert [likelihood.site for likelihood in sites.likelihoods] == ["s", "t"]
    assert sites.free == ("x",)


@pytest.mark.parametrize("name", ["heteroscedastic", "factor", "masked_distribution", "choice_seen_elsewhere"])
def test_sites_that_no_slot_describes(name: str) -> None:
    joint = joint_of(name)
    u, trace = run(joint)
    assert read_sites(joint, trace, u) is None


def test_every_link_of_a_constraint_is_a_candidate() -> None:
    _, trace, sites = sites_of("probit")
    found = predictors.links_of(sites.likelihoods[0], trace)
    assert found == [predictors.LOGIT, predictors.PROBIT, predictors.COMPLEMENTARY_LOG_LOG, predictors.IDENTITY]


def test_what_else_a_likelihood_is_made_of() -> None:
    _, trace, sites = sites_of("masked_mixture")
    others = sites.likelihoods[0].others(trace)
    assert any(x is trace.nodes["t"]["value"] for x in others)
    assert any(x is trace.nodes["k"]["mask"] for x in others)
    assert [x for x in others if isinstance(x, float)] == [1.5, 1.5]


# --- priors ---


def mixed_priors(t):
    pyro.sample("a", dist.Normal(torch.tensor([1.0, 2.0]), torch.tensor(0.5)).to_event(1))
    pyro.sample("b", dist.MultivariateNormal(torch.ones(2), precision_matrix=torch.tensor([2.0, 3.0]).diag()))
    pyro.sample("c", dist.MultivariateNormal(torch.ones(2), torch.eye(2) + 0.1))
    pyro.sample("d", dist.HalfCauchy(1.0))
    with poutine.mask(mask=torch.tensor(True)):
        pyro.sample("e", dist.Normal(0.0, 1.0))
    with poutine.scale(scale=2.0):
        pyro.sample("f", dist.Normal(0.0, 1.0))
    with pyro.plate("two", 2):
        pyro.sample("g", dist.Normal(-1.0, 2.0))
    pyro.sample("h", dist.StudentT(3.0, 0.0, 1.0))
    pyro.sample("t", dist.Normal(0.0, 1.0), obs=t)


def test_gaussian_priors_are_known_and_others_are_not() -> None:
    joint = LogJoint(mixed_priors, (torch.tensor(0.1),))
    loc, precision, known = gaussian_prior(joint, run(joint)[1])
    yes, no = [True] * 2, [False]
    assert known.tolist() == [*yes, *yes, *no, *no, *no, *no, *no, *yes, *no]
    assert_exact(loc[known], torch.tensor([1.0, 2.0, 1.0, 1.0, -1.0, -1.0]))
    assert_exact(precision[known], torch.tensor([4.0, 4.0, 2.0, 3.0, 0.25, 0.25]))


def test_log_prior_has_the_jacobian_and_takes_rows() -> None:
    def model(t):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        tau = pyro.sample("tau", dist.Exponential(2.0))
        pyro.sample("t", dist.Normal(w, tau), obs=t)

    joint = LogJoint(model, (torch.tensor(0.1),))
    u = torch.randn(3, 2)  # log tau, w
    expected = dist.Exponential(2.0).log_prob(u[:, 0].exp()) + u[:, 0] + dist.Normal(0.0, 1.0).log_prob(u[:, 1])
    assert_exact(log_prior_rows(joint, u, joint.initial_theta), expected)


def test_a_latent_that_depends_on_a_discrete_one_is_not_known() -> None:
    def model(t):
        k = pyro.sample("k", dist.Categorical(torch.tensor([0.5, 0.5])))
        w = pyro.sample("w", dist.Normal(torch.tensor([-1.0, 1.0])[k], 1.0))
        pyro.sample("t", dist.Normal(w, 1.0), obs=t)

    joint = LogJoint(model, (torch.tensor(0.1),))
    assert gaussian_prior(joint, run(joint)[1])[2].tolist() == [False]


# --- noise ---


def test_residuals_and_log_precisions_of_gaussian_noise() -> None:
    joint = joint_of("beta_per_group")
    u, trace = run(joint)
    found = gaussian_noise(joint, trace, "t")
    assert found is not None
    assert_exact(found[0], real - X @ u - 0.2)
    assert_exact(found[1].exp(), torch.tensor([2.0, 5.0]).repeat(15))


@pytest.mark.parametrize("name", ["logistic_by_logits", "student_noise", "masked", "scaled", "hidden_kernels"])
def test_other_likelihoods_are_not_gaussian_noise(name: str) -> None:
    joint = joint_of(name)
    assert gaussian_noise(joint, run(joint)[1], "t") is None


def test_a_dependence_is_one_of_the_graph() -> None:
    u = torch.ones(2, requires_grad=True)
    assert predictors.depends(u.sum() * 0.0, u)
    assert not predictors.depends(torch.ones(2), u)
    assert not predictors.depends(torch.ones(2, requires_grad=True), u)
    assert not predictors.depends(3.0, u)
    assert not predictors.depends(u.detach() * 2.0, u)


def test_imputed_data_are_not_mistaken_for_weights() -> None:
    """With ``obs_mask`` the missing targets are latents, whose Gaussian prior depends on the weights."""

    def model(X, t):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), positive("alpha", 1.0).rsqrt()).to_event(1))
        with pyro.plate("data", len(X)):
            scale = positive("beta", 2.0).rsqrt()
            pyro.sample("t", dist.Normal(X @ w, scale), obs=t, obs_mask=torch.arange(30) > 2)

    joint = LogJoint(model, (X, binary))
    found = recognise(joint)
    assert found.groups is not None and found.groups.power.tolist() == [1.0, 0.0]
    u, theta = torch.randn(2, joint.latents.size), joint.initial_theta + 0.3
    assert_exact(found.fastest.precision(u, theta), found.density.precision(u, theta))


OTHERS = {  # arguments beside the one that a predictor makes
    "Normal": {"loc": 0.2, "scale": 0.7},
    "Laplace": {"loc": 0.2, "scale": 0.7},
    "LogNormal": {"loc": 0.2, "scale": 0.7},
    "Weibull": {"concentration": 1.7},
    "Gamma": {"concentration": 0.6},
    "Binomial": {"total_count": 5},
    "NegativeBinomial": {"total_count": 2.5},
}
CONCAVE = [
    (parameter, link, family)
    for (parameter, link), families in predictors.LOG_CONCAVE.items()
    for family in families
    if family not in (*predictors.CLASSES, torch.distributions.MultivariateNormal)
]


@pytest.mark.parametrize(("parameter", "link", "family"), CONCAVE, ids=lambda x: getattr(x, "name", str(x)[-30:]))
def test_likelihoods_are_concave_in_their_predictors(parameter: str, link: object, family: type) -> None:
    eta = torch.linspace(-3.0, 2.5, 111).double()
    others = {n: torch.tensor(x).double() for n, x in OTHERS.get(family.__name__, {}).items() if n != parameter}
    at = family(**others, **{parameter: link.forward(eta)})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        data = at.sample((20,))[:, ::10].flatten()
    height = at.log_prob(data.unsqueeze(-1))
    assert float(height.diff(n=2).max()) < 1e-9 * float(height.abs().max())
