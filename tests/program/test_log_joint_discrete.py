"""Discrete sites summed out, against every assignment tried in turn and against sums written by hand."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
from pyro import poutine
from pyro.ops.indexing import Vindex
from torch import Tensor

from pyro_evidence.program.log_joint import LogJoint
from tests.oracles.density import Choices, at, brute_force, value_gradient_hessian

assert_exact = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
INF = math.inf

DATA = torch.tensor([0.3, -1.2, 2.0])
NO_THETA = torch.zeros(0)
TWO, COIN = torch.arange(2), torch.tensor([0.0, 1.0])


def one_local_site(x: Tensor) -> None:
    p = pyro.sample("p", dist.Dirichlet(torch.ones(2)))
    loc = pyro.sample("loc", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Categorical(p))
        pyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)


def several_dependent_sites(x: Tensor) -> None:
    x = x[:2]
    p = pyro.sample("p", dist.Beta(torch.ones(2, 3), 2.0).to_event(2))
    loc = pyro.sample("loc", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    with pyro.plate("data", len(x)):
        a = pyro.sample("a", dist.Categorical(torch.tensor([0.2, 0.5, 0.3])))
        b = pyro.sample("b", dist.Bernoulli(Vindex(p)[0, a]))
        c = pyro.sample("c", dist.Bernoulli(Vindex(p)[b.long(), a]))
        pyro.sample("x", dist.Normal(loc[c.long()] + 0.5 * a, 1.0), obs=x)


def chain(x: Tensor) -> None:
    """Five steps, so that pyro.markov uses the axes of enumeration again."""
    p = pyro.sample("p", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
    loc = pyro.sample("loc", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    z: Any = 0
    for t in pyro.markov(range(5)):
        z = pyro.sample(f"z_{t}", dist.Categorical(p[z]))
        pyro.sample(f"x_{t}", dist.Normal(loc[z], 1.0), obs=x[t % 3] + t)


def second_order_chain(x: Tensor) -> None:
    p = pyro.sample("p", dist.Dirichlet(torch.ones(2, 2, 2)).to_event(2))
    before: Any = 0
    last: Any = 1
    for t in pyro.markov(range(5), history=2):
        now = pyro.sample(f"z_{t}", dist.Categorical(Vindex(p)[before, last]))
        pyro.sample(f"x_{t}", dist.Normal(now.double(), 1.0), obs=x[t % 3] + t)
        before, last = last, now


def nested_plates(x: Tensor) -> None:
    p = pyro.sample("p", dist.Dirichlet(torch.ones(2)))
    loc = pyro.sample("loc", dist.Normal(0.0, 3.0).expand([2, 2]).to_event(2))
    with pyro.plate("groups", 2, dim=-2):
        kind = pyro.sample("kind", dist.Categorical(p))
        with pyro.plate("members", 3, dim=-1):
            z = pyro.sample("z", dist.Categorical(torch.tensor([0.4, 0.6])))
            pyro.sample("x", dist.Normal(Vindex(loc)[kind, z], 1.0), obs=torch.stack([x, x + 1.0]))


def global_site(x: Tensor) -> None:
    p = pyro.sample("p", dist.Beta(1.0, 2.0))
    loc = pyro.sample("loc", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    z = pyro.sample("z", dist.Bernoulli(p)).long()
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)


def latent_below_a_discrete_site(x: Tensor) -> None:
    z = pyro.sample("z", dist.Categorical(torch.tensor([0.4, 0.6])))
    loc = pyro.sample("loc", dist.Normal(torch.tensor([-1.0, 1.0])[z], 0.5))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(loc, 1.0), obs=x)


def one_component(x: Tensor) -> None:
    loc = pyro.sample("loc", dist.Normal(0.0, 3.0).expand([1]).to_event(1))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Categorical(torch.ones(1)))
        pyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)


def one_datum(x: Tensor) -> None:
    one_local_site(x[:1])


def scaled_prior(x: Tensor) -> None:
    """A scale on sites that meet no discrete one stays where it is."""
    with poutine.scale(scale=0.5):
        loc = pyro.sample("loc", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.4, 0.6])))
        pyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)


def masked_data(x: Tensor) -> None:
    """The third datum is missing: its site is masked, its component is not."""
    loc = pyro.sample("loc", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.4, 0.6])))
        with poutine.mask(mask=x < 1.0):
            pyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)


def one_hot(x: Tensor) -> None:
    p = pyro.sample("p", dist.Dirichlet(torch.ones(2)))
    loc = pyro.sample("loc", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.OneHotCategorical(p))
        pyro.sample("x", dist.Normal((z * loc).sum(-1), 1.0), obs=x)


LOCAL: Choices = {"z": ((3,), TWO)}
STEPS: Choices = {f"z_{t}": ((), TWO) for t in range(5)}
DEPENDENT: Choices = {"a": ((2,), torch.arange(3)), "b": ((2,), COIN), "c": ((2,), COIN)}
CASES: dict[str, tuple[Callable[[Tensor], None], Choices]] = {
    "one local site": (one_local_site, LOCAL),
    "several dependent sites": (several_dependent_sites, DEPENDENT),
    "chain": (chain, STEPS),
    "second-order chain": (second_order_chain, STEPS),
    "nested plates": (nested_plates, {"kind": ((2, 1), TWO), "z": ((2, 3), TWO)}),
    "global site": (global_site, {"z": ((), COIN)}),
    "latent below a discrete site": (latent_below_a_discrete_site, {"z": ((), TWO)}),
    "one component": (one_component, {"z": ((3,), torch.arange(1))}),
    "one datum": (one_datum, {"z": ((1,), TWO)}),
    "scaled prior": (scaled_prior, LOCAL),
    "masked data": (masked_data, LOCAL),
}


@pytest.mark.parametrize("name", list(CASES))
def test_equals_the_sum_over_every_assignment(name: str) -> None:
    model, choices = CASES[name]
    joint = LogJoint(model, (DATA,))
    assert set(joint.discrete) == set(choices)
    u = at(joint).requires_grad_()
    values, log_det = joint.latents.constrained_with_log_det(u)
    expected = brute_force(model, (DATA,), values, choices) + log_det
    actual = joint.log_joint(u, NO_THETA)
    assert_exact(actual, expected)
    assert_exact(*(torch.autograd.grad(f, u)[0] for f in (actual, expected)))


def test_one_hot_components() -> None:
    categorical, one_of_k = (LogJoint(m, (DATA,)) for m in (one_local_site, one_hot))
    u = at(categorical)
    assert_exact(one_of_k.log_joint(u, NO_THETA), categorical.log_joint(u, NO_THETA))


def test_scale_on_a_local_mixture_counts_every_datum_twice() -> None:
    def scaled(x: Tensor) -> None:
        with poutine.scale(scale=2.0):
            one_local_site(x)

    def twice(x: Tensor) -> None:
        one_local_site(torch.cat([x, x]))

    joint, double = LogJoint(scaled, (DATA,)), LogJoint(twice, (DATA,))
    u = at(joint)
    values = joint.latents.constrained(u)
    prior = td.Dirichlet(torch.ones(2)).log_prob(values["p"]) + td.Normal(0.0, 3.0).log_prob(values["loc"]).sum()
    assert_exact(joint.log_joint(u, NO_THETA), double.log_joint(u, NO_THETA) + prior)


def test_scale_inside_the_reach_of_a_global_site_counts_every_datum_twice() -> None:
    def model(x: Tensor, scale: float) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.4, 0.6])))
        with pyro.plate("data", len(x)), poutine.scale(scale=scale):
            pyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)

    once, twice = LogJoint(model, (DATA, 2.0)), LogJoint(model, (torch.cat([DATA, DATA]), 1.0))
    u = at(once)
    assert_exact(once.log_joint(u, NO_THETA), twice.log_joint(u, NO_THETA))


def test_masked_steps_of_a_chain_count_as_if_they_were_not_there() -> None:
    def model(y: Tensor, lengths: Tensor) -> None:
        p = pyro.sample("p", dist.Dirichlet(torch.ones(3, 3)).to_event(1))
        with pyro.plate("sequences", len(y)):
            x: Any = 0
            for t in pyro.markov(range(y.shape[1])):
                with poutine.mask(mask=t < lengths):
                    x = pyro.sample(f"x_{t}", dist.Categorical(p[x]))
                    pyro.sample(f"y_{t}", dist.Normal(x.double(), 1.0), obs=y[:, t])

    y = torch.stack([DATA, DATA + 1.0])
    padded = LogJoint(model, (y, torch.tensor([3, 1])))
    whole, short = (
        LogJoint(model, (y[:1], torch.tensor([3]))),
        LogJoint(model, (y[1:, :1], torch.tensor([1]))),
    )
    u = at(padded)
    p, log_det = padded.latents.constrained_with_log_det(u)
    prior = td.Dirichlet(torch.ones(3, 3)).log_prob(p["p"]).sum() + log_det
    expected = whole.log_joint(u, NO_THETA) + short.log_joint(u, NO_THETA) - prior
    assert_exact(padded.log_joint(u, NO_THETA), expected)


# --- probabilities near and at zero ---


def two_components(x: Tensor, choice: Any, parameter: Any) -> None:
    loc = pyro.sample("loc", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", choice(parameter(a)))
        pyro.sample("x", dist.Normal(loc[z.long()], 1.0), obs=x)


def as_mixture_family(x: Tensor, choice: Any, parameter: Any) -> None:
    loc = pyro.sample("loc", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        mixture = dist.MixtureSameFamily(choice(parameter(a)), dist.Normal(loc, 1.0))
        pyro.sample("x", mixture, obs=x)


def tiny(a: Tensor, log_p: float) -> Tensor:
    """Probability of the second component, which still depends on a latent."""
    return (log_p + a).exp()


def direct(u: Tensor, log_p: float) -> Tensor:
    """The two-component density; ``u`` is a, then the two locations."""
    a, loc = u[0], u[1:]
    log_mixing = torch.stack([torch.log1p(-tiny(a, log_p)), log_p + a])
    table = log_mixing + td.Normal(loc, 1.0).log_prob(DATA.unsqueeze(-1))
    prior = td.Normal(0.0, 1.0).log_prob(a) + td.Normal(0.0, 3.0).log_prob(loc).sum()
    return prior + table.logsumexp(-1).sum()


CHOICES: dict[str, tuple[Any, Any]] = {
    "Categorical logits": (
        lambda p: dist.Categorical(logits=p),
        lambda a, log_p: torch.stack([torch.log1p(-tiny(a, log_p)), log_p + a]),
    ),
    "Categorical probs": (
        dist.Categorical,
        lambda a, log_p: torch.stack([1.0 - tiny(a, log_p), tiny(a, log_p)]),
    ),
    "Bernoulli probs": (dist.Bernoulli, tiny),
    "Bernoulli logits": (
        lambda p: dist.Bernoulli(logits=p),
        lambda a, log_p: log_p + a - torch.log1p(-tiny(a, log_p)),
    ),
}


@pytest.mark.parametrize("p", [0.3, 1e-17, 1e-30])
@pytest.mark.parametrize("name", list(CHOICES))
def test_derivatives_where_a_component_is_nearly_gone(name: str, p: float) -> None:
    choice, parameter = CHOICES[name]
    joint = LogJoint(two_components, (DATA, choice, partial(parameter, log_p=math.log(p))))
    u = torch.tensor([0.2, 8.0, 0.4])  # the data are at the second component, so that it matters however small
    found = value_gradient_hessian(lambda v: joint.log_joint(v, NO_THETA), u)
    expected = value_gradient_hessian(partial(direct, log_p=math.log(p)), u)
    for actual, oracle in zip(found, expected, strict=True):
        assert_exact(actual, oracle)


@pytest.mark.parametrize("name", ["Categorical logits", "Categorical probs"])
def test_derivatives_of_a_mixture_family_with_a_tiny_component(name: str) -> None:
    choice, parameter = CHOICES[name]
    joint = LogJoint(as_mixture_family, (DATA, choice, partial(parameter, log_p=math.log(1e-17))))
    u = torch.tensor([0.2, 8.0, 0.4])
    found = value_gradient_hessian(lambda v: joint.log_joint(v, NO_THETA), u)
    expected = value_gradient_hessian(partial(direct, log_p=math.log(1e-17)), u)
    for actual, oracle in zip(found, expected, strict=True):
        assert_exact(actual, oracle)


ZEROS: dict[str, Any] = {
    "Categorical logits": dist.Categorical(logits=torch.tensor([0.0, -INF])),
    "Categorical probs": dist.Categorical(torch.tensor([1.0, 0.0])),
    "Bernoulli probs": dist.Bernoulli(torch.tensor(0.0)),
}


ZERO_CASES = [(two_components, n) for n in ZEROS] + [(as_mixture_family, n) for n in ZEROS if n != "Bernoulli probs"]


@pytest.mark.parametrize(("model", "name"), ZERO_CASES)
def test_derivatives_where_a_component_is_impossible(model: Callable[..., None], name: str) -> None:
    joint = LogJoint(model, (DATA, lambda _: ZEROS[name], lambda a: a))
    u = torch.tensor([0.2, 8.0, 0.4])

    def only_the_first(v: Tensor) -> Tensor:
        prior = td.Normal(0.0, 1.0).log_prob(v[0]) + td.Normal(0.0, 3.0).log_prob(v[1:]).sum()
        return prior + td.Normal(v[1], 1.0).log_prob(DATA).sum()

    found = value_gradient_hessian(lambda v: joint.log_joint(v, NO_THETA), u)
    for actual, oracle in zip(found, value_gradient_hessian(only_the_first, u), strict=True):
        assert_exact(actual, oracle)


def test_a_datum_that_one_component_cannot_have_made() -> None:
    def model(x: Tensor) -> None:
        p = pyro.sample("p", dist.Beta(2.0, 2.0))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Bernoulli(p)).long()
            pyro.sample("x", dist.Uniform(torch.tensor([0.0, 1.0])[z], torch.tensor([2.0, 3.0])[z]), obs=x)

    x = torch.tensor([0.5, 1.5, 2.5])  # the first component alone, both, the second alone
    joint = LogJoint(model, (x,))

    def by_hand(u: Tensor) -> Tensor:
        p = u.sigmoid()
        prior = td.Beta(2.0, 2.0).log_prob(p) + (p * (1.0 - p)).log()
        return (prior + (0.5 * (1.0 - p)).log() + math.log(0.5) + (0.5 * p).log()).sum()

    u = torch.tensor([0.7])
    found = value_gradient_hessian(lambda v: joint.log_joint(v, NO_THETA), u)
    for actual, oracle in zip(found, value_gradient_hessian(by_hand, u), strict=True):
        assert_exact(actual, oracle)


def test_an_impossible_datum_that_is_masked_leaves_the_derivatives_alone() -> None:
    def model(x: Tensor, keep: Tensor) -> None:
        p = pyro.sample("p", dist.Beta(2.0, 2.0))
        with pyro.plate("data", len(x)), poutine.mask(mask=keep):
            z = pyro.sample("z", dist.Bernoulli(p)).long()
            pyro.sample("x", dist.Uniform(0.0, torch.tensor([2.0, 3.0])[z], validate_args=False), obs=x)

    x, keep = torch.tensor([0.5, 9.0, 2.5]), torch.tensor([True, False, True])
    masked, without = LogJoint(model, (x, keep)), LogJoint(model, (x[keep], keep[keep]))
    u = at(masked)
    found = value_gradient_hessian(lambda v: masked.log_joint(v, NO_THETA), u)
    expected = value_gradient_hessian(lambda v: without.log_joint(v, NO_THETA), u)
    for actual, oracle in zip(found, expected, strict=True):
        assert_exact(actual, oracle)


def unlikely_chain(x: Tensor, log_p: float) -> None:
    """A chain whose third state is reached with a tiny probability, or never; the data may still want it."""
    v = pyro.sample("v", dist.Normal(0.0, 1.0))
    loc = pyro.sample("loc", dist.Normal(0.0, 3.0).expand([3]).to_event(1))
    rare = log_p + v
    logits = torch.stack([torch.stack([v, -v, rare]), torch.stack([rare, v, rare]), v * torch.ones(3)])
    z: Any = 0
    for t in pyro.markov(range(4)):
        z = pyro.sample(f"z_{t}", dist.Categorical(logits=logits[z]))
        pyro.sample(f"x_{t}", dist.Normal(loc[z], 1.0), obs=x[t % 3])


@pytest.mark.parametrize("log_p", [math.log(1e-17), -INF])
def test_derivatives_of_a_chain_with_unlikely_or_impossible_steps(log_p: float) -> None:
    joint = LogJoint(unlikely_chain, (DATA, log_p))
    choices: Choices = {f"z_{t}": ((), torch.arange(3)) for t in range(4)}

    def every_path(u: Tensor) -> Tensor:
        values, log_det = joint.latents.constrained_with_log_det(u)
        return brute_force(unlikely_chain, (DATA, log_p), values, choices) + log_det

    u = torch.tensor([8.0, 9.0, 0.4, 0.3])
    found = value_gradient_hessian(lambda v: joint.log_joint(v, NO_THETA), u)
    for actual, oracle in zip(found, value_gradient_hessian(every_path, u), strict=True):
        assert_exact(actual, oracle)


def test_distributions_of_the_user_are_not_changed() -> None:
    choice = dist.Categorical(torch.tensor([1.0, 0.0]))
    LogJoint(two_components, (DATA, lambda _: choice, lambda a: a))
    assert_exact(choice.logits, torch.tensor([1.0 - 2.0**-52, 2.0**-52]).log())
