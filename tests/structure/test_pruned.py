"""A pruned density is the limit of infinite precision, and the density of the model without those weights."""

from functools import cache, partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.structure.groups import Pruned
from pyro_evidence.structure.recognise import Structure, recognise
from tests.models_for_tests.recognised_models import X, binary, positive, real

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)

MEAN = torch.tensor([0.5, 0.8, -0.3])


def ard(X, t, mean):
    alpha = positive("alpha", torch.ones(X.shape[-1]))
    w = pyro.sample("w", dist.Normal(mean, alpha.rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


def shifted(X, t, mean, offset):
    """The other weights alone, the pruned ones' mean in an offset."""
    alpha = positive("alpha", torch.ones(X.shape[-1]))
    w = pyro.sample("w", dist.Normal(mean, alpha.rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=X @ w + offset), obs=t)


def network(X, t):
    W = pyro.sample("W", dist.Normal(torch.zeros(3, 2), positive("alpha", [[1.0], [2.0], [3.0]]).rsqrt()).to_event(2))
    v = pyro.sample("v", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Normal(torch.tanh(X @ W) @ v, 0.5), obs=t)


@cache
def seen(name: str) -> tuple[LogJoint, Structure]:
    joint = LogJoint(*{"ard": (ard, (X, binary, MEAN)), "network": (network, (X, real))}[name])
    return joint, recognise(joint)


def pruned(name: str, active: Tensor, generic_path: bool = False) -> tuple[LogJoint, Pruned]:
    joint, found = seen(name)
    assert found.groups is not None
    return joint, Pruned(found.density if generic_path else found.fastest, found.groups, active)


ACTIVE = torch.tensor([True, False, True])
THETA = torch.tensor([0.2, 0.7, -0.4])


@pytest.mark.parametrize("generic_path", [False, True])
def test_it_is_the_model_without_those_weights(generic_path: bool) -> None:
    _, density = pruned("ard", ACTIVE, generic_path)
    u = torch.randn(2, 3)
    other = recognise(LogJoint(shifted, (X[:, ACTIVE], binary, MEAN[ACTIVE], X[:, 1] * MEAN[1]))).density
    value, gradient = density.gradient(u, THETA)
    expected = other.gradient(u[:, ACTIVE], THETA[ACTIVE])
    assert_exact(value, expected[0])
    assert_exact(gradient[:, ACTIVE], expected[1])
    assert torch.equal(gradient[:, ~ACTIVE], torch.zeros(2, 1))
    for name in ("precision", "gauss_newton"):
        A = getattr(density, name)(u, THETA)
        assert_exact(A[:, ACTIVE][:, :, ACTIVE], other.precision(u[:, ACTIVE], THETA[ACTIVE]))
        assert_exact(torch.logdet(A), torch.logdet(A[:, ACTIVE][:, :, ACTIVE]))
    assert_exact(density.precision_diagonal(u, THETA), density.precision(u, THETA).diagonal(dim1=-2, dim2=-1))


def test_it_is_the_limit_of_the_evidence() -> None:
    """Log joint at the prior mean minus half the log determinant, as the precision grows."""
    found = seen("ard")[1]
    _, density = pruned("ard", ACTIVE)
    u = torch.where(ACTIVE, torch.randn(3), MEAN).unsqueeze(0)
    limit = density.log_joint(u, THETA) - 0.5 * torch.logdet(density.precision(u, THETA))
    gaps = []
    for step in (8.0, 12.0):
        theta = torch.where(ACTIVE, THETA, step)
        whole = found.density.log_joint(u, theta) - 0.5 * torch.logdet(found.density.precision(u, theta))
        gaps.append(float((whole + 0.5 * torch.log(torch.tensor(2 * torch.pi)) - limit).abs()))
    assert gaps[0] < 1e-2 and gaps[1] < gaps[0] / 50.0  # linear in the variance: e^-4 = 1 / 55


def test_what_is_pruned_no_longer_matters() -> None:
    """Neither its coordinate nor its precision, in value or derivative."""
    _, density = pruned("ard", ACTIVE)
    u, theta = torch.randn(1, 3, requires_grad=True), THETA.clone().requires_grad_()
    value = density.log_joint(u, theta)
    by_u, by_theta = torch.autograd.grad(value.sum(), [u, theta])
    assert float(by_u[0, 1]) == 0.0
    torch.testing.assert_close(by_theta[1], torch.tensor(0.0), rtol=0.0, atol=1e-12)
    far = u.detach() + 100.0 * (~ACTIVE)
    assert_exact(density.log_joint(far, THETA + 3.0 * (~ACTIVE)), value.detach())


def test_nothing_pruned_is_the_density_itself() -> None:
    _, density = pruned("ard", torch.ones(3, dtype=torch.bool))
    u = torch.randn(2, 3)
    assert_exact(density.log_joint(u, THETA), density.density.log_joint(u, THETA))
    assert_exact(density.precision(u, THETA), density.density.precision(u, THETA))
    assert density.blocks == density.density.blocks


def test_rows_with_masks_of_their_own_are_each_pruned_by_its_own() -> None:
    joint, found = seen("network")
    num = len(joint.initial_u)
    masks = torch.ones(3, num, dtype=torch.bool)
    masks[0, :2], masks[2, 4:6] = False, False  # rows of W: two groups, and none in between
    u, theta = torch.randn(3, num), joint.initial_theta + 0.3 * torch.randn(3, len(joint.initial_theta))
    together, handed_over = Pruned(found.density, found.groups), torch.cat([theta, masks.to(theta)], -1)
    for name in ("log_joint", "gradient", "precision", "precision_diagonal", "gauss_newton"):
        rows = getattr(together, name)(u, handed_over)
        for row, mask in enumerate(masks):
            alone = Pruned(found.density, found.groups, mask)
            expected = getattr(alone, name)(u[row : row + 1], theta[row])
            for got, one in zip(*(x if name == "gradient" else (x,) for x in (rows, expected)), strict=True):
                assert_exact(got[row], one[0])


def test_derivatives_in_the_hyperparameters_are_those_of_autograd() -> None:
    u = torch.randn(1, 3)
    slopes = []
    for generic_path in (False, True):
        _, density = pruned("ard", ACTIVE, generic_path)
        theta = THETA.clone().requires_grad_()
        slopes.append(torch.autograd.grad(torch.logdet(density.precision(u, theta)).sum(), theta)[0])
    assert_exact(*slopes)
    assert float(slopes[0][1]) == 0.0


def test_inputs_of_a_network_can_be_pruned() -> None:
    """Rows of the first layer, one precision each: the network without that input."""
    active = torch.tensor([True, True, False, False, True, True, True, True])
    joint, density = pruned("network", active)
    theta, u = joint.initial_theta, torch.randn(1, 8)
    other = torch.where(active, u, 0.0)
    A = density.precision(u, theta)
    whole = seen("network")[1].density.precision(other, theta)
    assert_exact(A[0, active][:, active], whole[0, active][:, active])
    assert_exact(A[0, ~active][:, ~active], torch.eye(2))
    assert float(A[0, active][:, ~active].abs().max()) == 0.0
    assert_exact(density.gauss_newton(u, theta)[0, ~active][:, ~active], torch.eye(2))
