"""Many rows at once equal one row at a time, whatever the model's Python is like."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence.numerics import batched
from pyro_evidence.program.log_joint import LogJoint

assert_exact = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)

DATA = torch.tensor([0.3, -1.2, 2.0, 2.2])
X = torch.tensor([[0.3, -1.2], [2.0, 0.1], [-0.7, 0.9], [1.1, 1.5]])


def regression(t: Tensor) -> None:
    beta = pyro.param("beta", torch.tensor(2.0), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with pyro.plate("data", len(t)):
        pyro.sample("t", dist.Normal(X @ w, beta.rsqrt()), obs=t)


def mixture(t: Tensor) -> None:
    beta = pyro.param("beta", torch.tensor(2.0), constraint=constraints.positive)
    p = pyro.sample("p", dist.Dirichlet(torch.ones(3)))
    loc = pyro.sample("loc", dist.Normal(0.0, 3.0).expand([3]).to_event(1))
    with pyro.plate("data", len(t)):
        z = pyro.sample("z", dist.Categorical(p))
        pyro.sample("t", dist.Normal(loc[z], beta.rsqrt()), obs=t)


def chain(t: Tensor) -> None:
    beta = pyro.param("beta", torch.tensor(2.0), constraint=constraints.positive)
    p = pyro.sample("p", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
    z: Any = 0
    for i in pyro.markov(range(4)):
        z = pyro.sample(f"z_{i}", dist.Bernoulli(p[z][..., 1])).long()
        pyro.sample(f"t_{i}", dist.Normal(z.double(), beta.rsqrt()), obs=t[i])


def branches(t: Tensor) -> None:
    beta = pyro.param("beta", torch.tensor(2.0), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    loc = w[0] * t.new_ones(4) if w[0] > 0 else w[1] * X[:, 0]
    pyro.sample("t", dist.Normal(loc, beta.rsqrt()).to_event(1), obs=t)


def writes_in_place(t: Tensor) -> None:
    beta = pyro.param("beta", torch.tensor(2.0), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    W = torch.zeros(4)
    W[:2] = w
    pyro.sample("t", dist.Normal(W, beta.rsqrt()).to_event(1), obs=t)


def probit(t: Tensor) -> None:
    """Torch's own logarithm of normal probabilities has no rows."""
    beta = pyro.param("beta", torch.tensor(2.0), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    pyro.factor("probit", torch.special.log_ndtr(t.sign() * (X @ w) * beta).sum())


def takes_each_row_by_itself(t: Tensor) -> None:
    """Torch would take elements row by row, and its derivatives in rows squared."""
    beta = pyro.param("beta", torch.tensor(2.0), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    pyro.sample("t", dist.Normal((X @ w).take(torch.arange(4)), beta.rsqrt()).to_event(1), obs=t)


MODELS = {
    f.__name__: f for f in (regression, mixture, chain, branches, writes_in_place, probit, takes_each_row_by_itself)
}
AT_ONCE = ("regression", "mixture", "chain", "writes_in_place", "probit")


@pytest.mark.parametrize("name", list(MODELS))
def test_rows_equal_the_loop(name: str) -> None:
    joint = LogJoint(MODELS[name], (DATA,))
    u = torch.randn(5, joint.latents.size).requires_grad_()
    theta = torch.randn(5, 1).requires_grad_()
    batch = joint.log_joint(u, theta)
    loop = torch.stack([joint.log_joint(a, b) for a, b in zip(u, theta, strict=True)])
    assert_exact(batch, loop)
    for actual, expected in zip(*(torch.autograd.grad(f.sum(), (u, theta)) for f in (batch, loop)), strict=True):
        assert_exact(actual, expected)


@pytest.mark.parametrize("name", list(MODELS))
def test_rows_may_share_their_hyperparameters(name: str) -> None:
    joint = LogJoint(MODELS[name], (DATA,))
    u, theta = torch.randn(3, joint.latents.size), torch.tensor([0.4])
    assert_exact(joint.log_joint(u, theta), joint.log_joint(u, theta.expand(3, 1)))
    assert_exact(joint.log_joint(u[:1], theta), joint.log_joint(u[0], theta).unsqueeze(0))


@pytest.mark.parametrize("name", AT_ONCE)
def test_second_derivatives_of_rows(name: str) -> None:
    joint = LogJoint(MODELS[name], (DATA,))
    u, theta = torch.randn(3, joint.latents.size), joint.initial_theta

    def hessians(f: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
        x = at.clone().requires_grad_()
        slope = torch.autograd.grad(f(x).sum(), x, create_graph=True)[0]
        columns = torch.autograd.grad(
            slope, x, torch.eye(x.shape[-1]).unsqueeze(1).expand(-1, *x.shape), is_grads_batched=True
        )
        return columns[0].movedim(0, -1)

    batch = hessians(lambda x: joint.log_joint(x, theta), u)
    loop = [torch.autograd.functional.hessian(lambda x: joint.log_joint(x, theta), row) for row in u]
    assert_exact(batch, torch.stack(loop), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", list(MODELS))
def test_rows_are_vectorised_where_that_is_possible(name: str) -> None:
    calls = 0

    def counted(t: Tensor) -> None:
        nonlocal calls
        calls += 1
        MODELS[name](t)

    joint = LogJoint(counted, (DATA,))
    assert (joint.row_bytes is not None) == (name in AT_ONCE)
    calls = 0
    joint.log_joint(torch.randn(6, joint.latents.size), joint.initial_theta)
    assert calls == (1 if name in AT_ONCE else 6)


def test_memory_bounds_the_number_of_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def counted(t: Tensor) -> None:
        nonlocal calls
        calls += 1
        regression(t)

    joint = LogJoint(counted, (DATA,))
    u = torch.randn(6, 2)
    expected = joint.log_joint(u, joint.initial_theta)
    per_row = batched.bytes_per_row(joint.log_joint, u[0], joint.initial_theta)
    assert per_row is not None
    monkeypatch.setattr(batched, "BATCH_BYTES", 2 * per_row + 1)
    calls = 0
    assert_exact(joint.log_joint(u, joint.initial_theta), expected)
    assert calls == 3


def test_a_passing_failure_does_not_end_vectorisation() -> None:
    calls, memory = 0, 10**9

    def hungry(t: Tensor) -> None:
        nonlocal calls
        calls += 1
        regression(t)
        if torch._C._functorch.maybe_current_level() is not None and memory < 10**9:
            raise RuntimeError("not enough memory")

    joint = LogJoint(hungry, (DATA,))
    u = torch.randn(4, 2)
    expected = joint.log_joint(u, joint.initial_theta)
    memory, calls = 0, 0
    assert_exact(joint.log_joint(u, joint.initial_theta), expected)
    assert calls == 6  # two batches, with the hyperparameters shared and for each row, then row by row
    memory, calls = 10**9, 0
    assert_exact(joint.log_joint(u, joint.initial_theta), expected)
    assert calls == 1


def test_the_models_own_error_is_what_the_user_sees() -> None:
    broken = False

    def model(t: Tensor) -> None:
        regression(t)
        if broken:
            raise ZeroDivisionError("the model's own")

    joint = LogJoint(model, (DATA,))
    broken = True
    with pytest.raises(ZeroDivisionError, match="the model's own"):
        joint.log_joint(torch.randn(4, 2), joint.initial_theta)


def covariance(t: Tensor) -> None:
    """Its matrix is positive definite only for small enough correlations."""
    rho = pyro.sample("rho", dist.Normal(0.0, 1.0))
    K = torch.eye(2) + rho * torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    pyro.sample("t", dist.MultivariateNormal(torch.zeros(2), K), obs=t[:2])


def asserted(t: Tensor) -> None:
    """Its distribution asserts that the scale is below two, as Pyro's SineBivariateVonMises does of concentrations."""
    rho = pyro.sample("rho", dist.Normal(0.0, 1.0))
    assert bool(rho < 2.0)
    pyro.sample("t", dist.Normal(torch.zeros(2), rho.exp()).to_event(1), obs=t[:2])


@pytest.mark.parametrize("model", [covariance, asserted])
def test_rows_that_the_model_cannot_be_run_at_are_nan_and_the_others_are_right(model: Callable[..., None]) -> None:
    joint = LogJoint(model, (DATA,))
    u = torch.tensor([[0.5], [3.0], [-0.2]])
    found = joint.log_joint(u, joint.initial_theta)
    assert found.isnan().tolist() == [False, True, False]
    assert_exact(found[[0, 2]], joint.log_joint(u[[0, 2]], joint.initial_theta))
    assert bool(joint.log_joint(u[1], joint.initial_theta).isnan())


def test_starting_points_are_uniform_on_minus_two_to_two_and_finite() -> None:
    joint = LogJoint(covariance, (DATA,))
    starts = joint.initial(200, seed=3)
    assert starts.shape == (200, 1)
    assert bool((starts.abs() < 1.0).all())  # outside, the density is not finite
    assert bool(torch.isfinite(joint.log_joint(starts, joint.initial_theta)).all())
    assert_exact(joint.initial(200, seed=3), starts)
    assert not torch.equal(joint.initial(200, seed=4), starts)
    wide = LogJoint(regression, (DATA,)).initial(500, seed=0)
    assert 1.9 < float(wide.max()) < 2.0 and -2.0 < float(wide.min()) < -1.9


def test_what_hangs_on_the_hyperparameters_alone_is_made_once_for_all_rows() -> None:
    shapes: list[int] = []

    def model(t: Tensor) -> None:
        beta = pyro.param("beta", torch.tensor(2.0), constraint=constraints.positive)
        if not torch._C._functorch.is_batchedtensor(beta):
            shapes.append(beta.dim())  # a number, as a kernel's setting would be
        w = pyro.sample("w", dist.Normal(0.0, 2.0))
        with pyro.plate("data", len(t)):
            pyro.sample("t", dist.Normal(w, beta.rsqrt()), obs=t)

    joint = LogJoint(model, (DATA,))
    u, theta = torch.randn(5, 1), joint.initial_theta
    one_by_one = torch.stack([joint.log_joint(row, theta) for row in u])
    assert joint.row_bytes is not None
    shapes.clear()
    assert_exact(joint.log_joint(u, theta), one_by_one)
    assert shapes == [0]
    assert_exact(joint.log_joint(u, theta.expand(5, -1)), one_by_one)
    assert shapes == [0]  # a batch of them is a batch


def test_what_torch_would_take_row_by_row_is_taken_so_at_once() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert LogJoint(takes_each_row_by_itself, (DATA,)).row_bytes is None
