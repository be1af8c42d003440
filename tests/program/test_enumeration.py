"""The pieces of summing out: exact probabilities, the ring, tables of a mixture family."""

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
from pyro.ops.contract import contract_to_tensor
from torch import Tensor

from pyro_evidence.errors import UnsupportedModel
from pyro_evidence.program import enumeration
from pyro_evidence.program.enumeration import LogSumExpRing
from pyro_evidence.program.exact import exact
from pyro_evidence.program.log_joint import LogJoint

assert_exact = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)

INF = math.inf
TINY = torch.tensor([1.0, 1e-30, 0.0])
LOG_TINY = torch.tensor([0.0, math.log(1e-30), -INF])


def used(fn: Any) -> Any:
    """A distribution whose lazy attributes are there already, clamped."""
    assert fn.logits.shape == fn.probs.shape
    return fn


MAKERS: dict[str, Callable[[Tensor], Any]] = {
    "new": dist.Categorical,
    "expanded": lambda p: dist.Categorical(p).expand([4]),
    "used": lambda p: used(dist.Categorical(p)),
    "used, then expanded": lambda p: used(dist.Categorical(p)).expand([4]),
    "of logits, used, then expanded": lambda p: used(dist.Categorical(logits=p.log())).expand([4]),
    "of logits": lambda p: dist.Categorical(logits=p.log()),
}


@pytest.mark.parametrize("name", list(MAKERS))
def test_exact_logits_of_a_categorical(name: str) -> None:
    fn = MAKERS[name](TINY)
    before = dict(fn.__dict__)
    assert_exact(exact(fn).logits, LOG_TINY.expand([*fn.batch_shape, 3]))
    assert fn.__dict__ == before or all(fn.__dict__[k] is v for k, v in before.items())


def test_logits_below_all_probabilities_are_kept() -> None:
    logits = torch.tensor([0.0, -900.0])
    fn = used(dist.Categorical(logits=logits)).expand([2])
    assert fn.probs[0, 1] == 0.0
    assert_exact(exact(fn).logits, logits.expand(2, 2))


def test_exact_looks_through_wrappers() -> None:
    mixture = dist.MixtureSameFamily(dist.Categorical(TINY), dist.Normal(torch.zeros(3), 1.0)).expand([2])
    assert_exact(exact(mixture).mixture_distribution.logits, LOG_TINY.expand(2, 3))
    assert_exact(exact(mixture.to_event(1)).base_dist.mixture_distribution.logits, LOG_TINY.expand(2, 3))
    masked = dist.Categorical(TINY).mask(torch.tensor(True))
    assert_exact(exact(masked).log_prob(torch.tensor(1)), LOG_TINY[1])
    one_hot = exact(dist.OneHotCategorical(TINY))
    assert_exact(one_hot.log_prob(torch.eye(3)), LOG_TINY)


@pytest.mark.parametrize("p", [0.0, 1e-30, 0.3, 1.0])
def test_exact_bernoulli(p: float) -> None:
    fn = exact(dist.Bernoulli(torch.tensor(p)))
    expected = [math.log1p(-p) if p < 1.0 else -INF, math.log(p) if p > 0.0 else -INF]
    assert_exact(fn.log_prob(torch.tensor([0.0, 1.0])), torch.tensor(expected))


@pytest.mark.parametrize(
    "fn", [dist.Normal(0.0, 1.0), dist.Bernoulli(logits=torch.tensor(1.0)), dist.Unit(torch.ones(1))]
)
def test_other_distributions_are_returned_as_they_are(fn: Any) -> None:
    assert exact(fn) is fn


def named(dims: str) -> Any:
    """A random factor whose axes have these letters, each of size 2 or 3."""
    term = torch.randn([2 + ord(s) % 2 for s in dims])
    term._pyro_dims = dims  # type: ignore[attr-defined]
    return term


TERMS = [("a", "ab"), ("ab", "bc", "cd"), ("ab", "b", "a"), ("abc", "ab", "bc", "c"), ("ab", "bc", "ca")]


@pytest.mark.parametrize("terms", TERMS)
def test_the_ring_sums_products_as_a_dense_sum_does(terms: tuple[str, ...]) -> None:
    factors = [named(dims) for dims in terms]
    found = LogSumExpRing().sumproduct(factors, {"b", "c", "d"})
    expected = torch.einsum(f"{','.join(terms)}->a", *(f.exp() for f in factors)).log()
    assert found._pyro_dims == "a"  # type: ignore[attr-defined]
    assert_exact(found, expected)


def test_the_ring_under_pyros_elimination_with_plates() -> None:
    """``prod_p sum_a f(a) prod_q sum_b g(p, a, b) h(p, q, b)``, where p and q are plates."""
    f, g, h = named("a"), named("pab"), named("pqb")
    tree = {frozenset(): [], frozenset("p"): [f, g], frozenset("pq"): [h]}
    found = contract_to_tensor(OrderedDict((k, v) for k, v in tree.items() if v), {"a", "b"}, ring=LogSumExpRing())
    inner = (g.exp() * h.exp().prod(1).unsqueeze(1)).sum(-1)
    assert_exact(found, (f.exp() * inner).sum(-1).prod().log())


def test_a_trace_in_which_nothing_is_enumerated() -> None:
    def model() -> None:
        with pyro.plate("data", 3):
            pyro.sample("x", dist.Normal(0.0, 1.0), obs=torch.arange(3.0))

    trace = pyro.poutine.trace(model).get_trace()
    expected = td.Normal(0.0, 1.0).log_prob(torch.arange(3.0))
    assert_exact(enumeration.log_prob_total(trace, ("x",)), expected.sum())
    assert_exact(enumeration.pointwise(trace, ("x",)), {"x": expected})


def test_weights_of_data_around_a_label_that_is_summed_out_are_a_letter() -> None:
    """They count outside the sum over labels, where ``MixtureSameFamily`` has them."""

    def model(weight: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", 3), pyro.poutine.scale(scale=weight):
            z = pyro.sample("z", dist.Categorical(torch.ones(2)), infer={"enumerate": "parallel"})
            pyro.sample("y", dist.Normal(w[z], 1.0), obs=torch.zeros(3))

    with pytest.raises(UnsupportedModel, match=r"a number for each datum.*MixtureSameFamily.*run\(Y, weight\)"):
        joint = LogJoint(model, (torch.tensor([1.0, 2.0, 1.0]),))
        joint.log_joint(joint.initial_u.unsqueeze(0), joint.initial_theta)


def changing(rate_at: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
    """Counts whose rate changes once, ``rate_at`` telling from the year of the change which years are after it."""

    def model(y: Tensor) -> None:
        rate = pyro.sample("rate", dist.Exponential(1.0).expand([2]).to_event(1))
        year = pyro.sample("year", dist.Categorical(torch.ones(len(y))), infer={"enumerate": "parallel"})
        with pyro.plate("years", len(y)):
            pyro.sample("y", dist.Poisson(torch.where(rate_at(year), rate[0], rate[1])), obs=y)

    return model


def test_axes_beyond_those_of_discrete_sites_are_a_letter_that_says_how() -> None:
    y = torch.tensor([3.0, 5.0, 4.0, 1.0, 0.0, 1.0])
    u, years = torch.tensor([[0.4, -0.2]], dtype=torch.float64), torch.arange(6)
    with pytest.raises(UnsupportedModel, match=r"shape \(6, 1, 6\), whose axis -3 .* torch.arange\(100\) < s"):
        LogJoint(changing(lambda year: years < year.unsqueeze(-1)), (y,))
    joint = LogJoint(changing(lambda year: years < year), (y,))
    rates = [[u[0].exp()[0] if n < k else u[0].exp()[1] for n in range(6)] for k in range(6)]
    each = [sum(td.Poisson(r).log_prob(n) for r, n in zip(row, y, strict=True)) - math.log(6.0) for row in rates]
    prior = td.Exponential(1.0).log_prob(u.exp()).sum() + u.sum()
    assert_exact(joint.log_joint(u, joint.initial_theta)[0], torch.stack(each).logsumexp(0) + prior, rtol=1e-6)
