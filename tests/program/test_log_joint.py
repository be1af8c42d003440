"""The log joint of ordinary models against sums of torch's own log densities, written out by hand."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
from pyro import poutine
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence.errors import BadInput
from pyro_evidence.program.log_joint import LogJoint
from tests.oracles.density import Supports, at, unpack

assert_exact = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)

Values = dict[str, Tensor]
X = torch.tensor([[0.3, -1.2], [2.0, 0.1], [-0.7, 0.9], [1.1, 1.5]])
T = torch.tensor([0.2, -0.4, 1.3, 2.2])
LABELS = torch.tensor([0.0, 1.0, 1.0, 0.0])
NO_THETA = torch.zeros(0)


def check(
    model: Callable[..., Any], args: tuple[Any, ...], supports: Supports, oracle: Callable[[Values], Tensor]
) -> None:
    """Equal to the hand-written density plus Jacobian at two points, with equal gradients."""
    joint = LogJoint(model, args)
    assert joint.latents.names == tuple(sorted(supports))
    for seed in (0, 1):
        u = at(joint, seed).requires_grad_()
        values, log_det = unpack(u, supports)
        expected = oracle(values) + log_det
        actual = joint.log_joint(u, joint.initial_theta)
        assert actual.shape == () and actual.dtype == torch.float64
        assert_exact(actual, expected)
        assert_exact(*(torch.autograd.grad(f, u)[0] for f in (actual, expected)))


def real(*shape: int) -> tuple[Any, tuple[int, ...]]:
    return constraints.real, shape


# --- plates, event dims, expand ---


def regression(X: Tensor, t: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.5, 2.0).expand([2]).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(X @ w, 0.7), obs=t)


def regression_density(v: Values) -> Tensor:
    return td.Normal(0.5, 2.0).log_prob(v["w"]).sum() + td.Normal(X @ v["w"], 0.7).log_prob(T).sum()


def weights_in_a_plate(X: Tensor, t: Tensor) -> None:
    with pyro.plate("features", 2):
        w = pyro.sample("w", dist.Normal(0.5, 2.0))
    pyro.sample("t", dist.Normal(X @ w, 0.7).to_event(1), obs=t)


def no_plate_at_all(X: Tensor, t: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.5, torch.tensor([2.0, 2.0])))
    pyro.sample("t", dist.Normal(X @ w, 0.7), obs=t)


def one_datum_at_a_time(X: Tensor, t: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.5, 2.0).expand([2]).to_event(1))
    for i in pyro.plate("data", len(X)):
        pyro.sample(f"t_{i}", dist.Normal(X[i] @ w, 0.7), obs=t[i])


def two_weight_sites(X: Tensor, t: Tensor) -> None:
    b = pyro.sample("b", dist.Normal(0.5, 2.0))
    a = pyro.sample("a", dist.Normal(0.5, 2.0))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(X @ torch.stack([a, b]), 0.7), obs=t)


@pytest.mark.parametrize("model", [regression, weights_in_a_plate, no_plate_at_all, one_datum_at_a_time])
def test_one_regression_written_four_ways(model: Callable[..., None]) -> None:
    check(model, (X, T), {"w": real(2)}, regression_density)


def test_flat_order_is_by_name_not_by_appearance() -> None:
    def density(v: Values) -> Tensor:
        return regression_density({"w": torch.stack([v["a"], v["b"]])})

    check(two_weight_sites, (X, T), {"a": real(), "b": real()}, density)


def test_nested_plates() -> None:
    data = torch.tensor([[0.1, 1.0, -2.0], [0.5, 0.6, 0.7]])

    def model(data: Tensor) -> None:
        top = pyro.sample("top", dist.Normal(0.0, 3.0))
        with pyro.plate("groups", 2, dim=-2):
            group = pyro.sample("group", dist.Normal(top, 1.5))
            with pyro.plate("members", 3, dim=-1):
                pyro.sample("x", dist.Normal(group, 0.5), obs=data)

    def density(v: Values) -> Tensor:
        prior = td.Normal(0.0, 3.0).log_prob(v["top"]) + td.Normal(v["top"], 1.5).log_prob(v["group"]).sum()
        return prior + sum(td.Normal(v["group"][i, 0], 0.5).log_prob(data[i, j]) for i in range(2) for j in range(3))

    check(model, (data,), {"top": real(), "group": real(2, 1)}, density)


def test_plates_of_size_one() -> None:
    def model(t: Tensor) -> None:
        with pyro.plate("weights", 1):
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 1):
            pyro.sample("t", dist.Normal(w, 0.5), obs=t)

    def density(v: Values) -> Tensor:
        return td.Normal(0.0, 1.0).log_prob(v["w"]).sum() + td.Normal(v["w"], 0.5).log_prob(T[:1]).sum()

    check(model, (T[:1],), {"w": real(1)}, density)


# --- handlers of the user's ---


def test_scale_multiplies_and_mask_leaves_out() -> None:
    keep = torch.tensor([True, False, True, True])

    def model(X: Tensor, t: Tensor) -> None:
        with poutine.scale(scale=0.25):
            w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with pyro.plate("data", len(X)), poutine.scale(scale=3.0), poutine.mask(mask=keep):
            pyro.sample("t", dist.Normal(X @ w, 0.7), obs=t)

    def density(v: Values) -> Tensor:
        likelihood = td.Normal(X[keep] @ v["w"], 0.7).log_prob(T[keep]).sum()
        return 0.25 * td.Normal(0.0, 1.0).log_prob(v["w"]).sum() + 3.0 * likelihood

    check(model, (X, T), {"w": real(2)}, density)


def test_masked_distribution() -> None:
    def model(X: Tensor, t: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.5, 2.0).expand([2]).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("t", dist.Normal(X @ w, 0.7).mask(t > 0), obs=t)

    def density(v: Values) -> Tensor:
        return td.Normal(0.5, 2.0).log_prob(v["w"]).sum() + td.Normal(X @ v["w"], 0.7).log_prob(T)[T > 0].sum()

    check(model, (X, T), {"w": real(2)}, density)


def test_conditioned_model_and_its_equal_with_obs() -> None:
    def generative(X: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.5, 2.0).expand([2]).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("t", dist.Normal(X @ w, 0.7))

    check(poutine.condition(generative, data={"t": T}), (X,), {"w": real(2)}, regression_density)


def test_model_passed_as_an_argument() -> None:
    def conditioned(model: Callable[[Tensor], None], X: Tensor, t: Tensor) -> Any:
        return poutine.condition(model, data={"t": t})(X)

    def generative(X: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.5, 2.0).expand([2]).to_event(1))
        pyro.sample("t", dist.Normal(X @ w, 0.7).to_event(1))

    check(conditioned, (generative, X, T), {"w": real(2)}, regression_density)


def test_factor_counts_and_deterministic_does_not() -> None:
    def model(X: Tensor, t: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.5, 2.0).expand([2]).to_event(1))
        eta = pyro.deterministic("eta", X @ w)
        pyro.factor("ridge", -0.3 * w.pow(4).sum())
        with pyro.plate("data", len(X)):
            pyro.factor("t", td.Normal(eta, 0.7).log_prob(t))

    check(model, (X, T), {"w": real(2)}, lambda v: regression_density(v) - 0.3 * v["w"].pow(4).sum())
    assert LogJoint(model, (X, T)).observed == ("ridge", "t")


def test_callable_object_partial_and_keyword_arguments() -> None:
    class Model:
        def __call__(self, X: Tensor, t: Tensor, scale: float = 9.0) -> None:
            w = pyro.sample("w", dist.Normal(0.5, 2.0).expand([2]).to_event(1))
            with pyro.plate("data", len(X)):
                pyro.sample("t", dist.Normal(X @ w, scale), obs=t)

    bound = LogJoint(partial(Model(), scale=0.7), (X, T))
    named = LogJoint(Model(), (X,), {"t": T, "scale": 0.7})
    u = at(bound)
    for joint in (bound, named):
        assert_exact(joint.log_joint(u, NO_THETA), regression_density({"w": u}))


def test_mixture_same_family() -> None:
    def model(t: Tensor) -> None:
        p = pyro.sample("p", dist.Dirichlet(torch.tensor([2.0, 3.0])))
        loc = pyro.sample("loc", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        with pyro.plate("data", len(t)):
            mixture = dist.MixtureSameFamily(dist.Categorical(p), dist.Normal(loc, 0.5))
            pyro.sample("t", mixture, obs=t)

    def density(v: Values) -> Tensor:
        prior = td.Dirichlet(torch.tensor([2.0, 3.0])).log_prob(v["p"]) + td.Normal(0.0, 2.0).log_prob(v["loc"]).sum()
        parts = [v["p"][k].log() + td.Normal(v["loc"][k], 0.5).log_prob(T) for k in range(2)]
        return prior + torch.logaddexp(*parts).sum()

    check(model, (T,), {"p": (constraints.simplex, (2,)), "loc": real(2)}, density)


# --- constrained sites ---

CONSTRAINED: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "positive": (dist.Gamma(2.0, 3.0), constraints.positive, ()),
    "positive vector": (dist.LogNormal(0.1, 0.8).expand([3]).to_event(1), constraints.positive, (3,)),
    "nonnegative": (dist.HalfCauchy(1.5), constraints.positive, ()),
    "unit interval": (dist.Beta(2.0, 5.0), constraints.unit_interval, ()),
    "bounded interval": (dist.Uniform(-1.0, 3.0), constraints.interval(-1.0, 3.0), ()),
    "bounded below": (dist.Pareto(1.5, 2.0), constraints.greater_than(1.5), ()),
    "simplex": (dist.Dirichlet(torch.tensor([1.0, 2.0, 3.0])), constraints.simplex, (3,)),
    "simplices": (dist.Dirichlet(torch.ones(2, 3) * 2.0).to_event(1), constraints.simplex, (2, 3)),
    "corr_cholesky": (dist.LKJCholesky(3, 1.7), constraints.corr_cholesky, (3, 3)),
    "real vector": (
        dist.MultivariateNormal(torch.ones(2), torch.eye(2) * 2.0),
        constraints.real_vector,
        (2,),
    ),
}


@pytest.mark.parametrize("kind", list(CONSTRAINED))
def test_constrained_site(kind: str) -> None:
    prior, constraint, shape = CONSTRAINED[kind]

    def model(t: Tensor) -> None:
        s = pyro.sample("s", prior)
        with pyro.plate("data", len(t)):
            pyro.sample("t", dist.Normal(s.sin().sum(), 0.5), obs=t)

    def density(v: Values) -> Tensor:
        return prior.log_prob(v["s"]).sum() + td.Normal(v["s"].sin().sum(), 0.5).log_prob(T).sum()

    check(model, (T,), {"s": (constraint, shape)}, density)


@pytest.mark.parametrize("constraint", [dist.constraints.ordered_vector, dist.constraints.positive_ordered_vector])
def test_ordered_sites(constraint: Any) -> None:
    def model(t: Tensor) -> None:
        c = pyro.sample("c", dist.ImproperUniform(constraint, (), (3,)))
        pyro.factor("prior", -c.square().sum())
        with pyro.plate("data", len(t)):
            pyro.sample("t", dist.Normal(c.prod(), 0.5), obs=t)

    def density(v: Values) -> Tensor:
        return -v["c"].square().sum() + td.Normal(v["c"].prod(), 0.5).log_prob(T).sum()

    check(model, (T,), {"c": (constraint, (3,))}, density)


def test_jacobian_makes_the_unconstrained_density_integrate_to_one() -> None:
    def model() -> None:
        s = pyro.sample("s", dist.Gamma(2.0, 3.0))
        pyro.factor("nothing", 0.0 * s)

    joint = LogJoint(model)
    grid = torch.linspace(-30.0, 10.0, 20001).unsqueeze(-1)
    density = joint.log_joint(grid, NO_THETA).exp()
    assert_exact(torch.trapezoid(density, grid[:, 0]), torch.tensor(1.0), rtol=1e-9, atol=1e-9)


def test_bernoulli_labels_and_float32() -> None:
    def model(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(X.new_zeros(2), X.new_ones(2)).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    joint = LogJoint(model, (X.float(), LABELS.float()))
    u = at(joint)
    expected = td.Normal(0.0, 1.0).log_prob(u).sum() + td.Bernoulli(logits=X @ u).log_prob(LABELS).sum()
    actual = joint.log_joint(u, NO_THETA)
    assert joint.dtype == torch.float32 and actual.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("written", [False, True])
def test_single_precision_computed_with_in_double(written: bool) -> None:
    """The same numbers, those of a closure too, in a prior so narrow that single precision loses the differences."""
    columns = X.float()

    def model(y: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, torch.ones(()).float()))
        with pyro.plate("rates", 2):
            rate = pyro.sample("rate", dist.Normal(mean, torch.tensor(1e-4).float()))
        predicted = columns @ rate
        if written:
            into = torch.zeros(len(y)).float()
            into[:] = predicted
            predicted = into
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(predicted, 1.0), obs=y)

    joint = LogJoint(model, (T.float(),))
    u = torch.tensor([0.1, 0.1001, 0.0999]).double()
    scale = torch.tensor(1e-4).float().double()
    expected = td.Normal(0.0, 1.0).log_prob(u[0]) + td.Normal(u[0], scale).log_prob(u[1:]).sum()
    expected = expected + td.Normal(columns.double() @ u[1:], 1.0).log_prob(T.float().double()).sum()
    exact = joint.in_double
    assert exact is not joint and exact.in_double is exact and exact.dtype == torch.float64
    assert_exact(exact.log_joint(u, NO_THETA), expected)
    assert_exact(exact.log_joint(u.expand(3, -1), NO_THETA), expected.expand(3))
    assert float((joint.log_joint(u, NO_THETA) - expected).abs()) > 1e-6
    assert_exact(joint.on((2.0 * T.float(),), {}, 1).in_double.args[0], 2.0 * T.float())


def test_a_model_that_asks_for_single_precision_is_left_in_it() -> None:
    def model(y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, torch.ones(()).float()))
        assert b.dtype == torch.float32
        pyro.sample("y", dist.Normal(b, 1.0).expand([len(y)]).to_event(1), obs=y)

    joint = LogJoint(model, (T.float(),))
    assert joint.in_double is joint


def of_size(num: int, t: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([num]).to_event(1))
    with pyro.plate("cells", num):
        pyro.sample("b", dist.Normal(0.0, 1.0))
    pyro.sample("t", dist.Normal(w.sum(), 1.0).expand([len(t)]).to_event(1), obs=t)


@pytest.mark.parametrize("shapes", [{"w": [3], "cells": [3]}, {"cells": [3]}, {"b": [3]}])
def test_sites_and_plates_of_other_shapes_are_refused_before_they_are_drawn(
    shapes: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LogJoint(of_size, (3, T), shapes=shapes).plates == {"cells": 3}
    drawn: list[int] = []
    sample = dist.Normal.sample
    monkeypatch.setattr(
        dist.Normal, "sample", lambda self, *a: (drawn.append(self.batch_shape.numel()), sample(self, *a))[1]
    )
    with pytest.raises(
        ValueError, match=rf"'{next(iter(shapes))}' has shape \[4\] in this model on these data; expected \[3\]"
    ):
        LogJoint(of_size, (4, T), shapes=shapes)
    assert len(drawn) == (0 if "w" in shapes else 1)


class InDouble(dist.Normal):
    """A density in double precision of a value in single precision."""

    def log_prob(self, value: Tensor) -> Tensor:
        return super().log_prob(value).double()


def test_mixed_precisions_are_refused_by_all_their_names() -> None:
    def mixed(y: Tensor) -> None:
        x = pyro.sample("x", InDouble(torch.tensor(0.0, dtype=torch.float32), torch.tensor(1.0, dtype=torch.float32)))
        pyro.sample("y", dist.Normal(x, torch.ones_like(x)), obs=y)

    with pytest.raises(BadInput, match="latent x are single precision, x double"):
        LogJoint(mixed, (torch.tensor(0.3, dtype=torch.float32),))
