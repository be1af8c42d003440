"""The two densities of one model: derivatives against formulas on paper, memory asked for before it is taken."""

import time
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroSample
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence.errors import TooLarge, UnsupportedModel
from pyro_evidence.numerics import linalg
from pyro_evidence.precision import choices
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.structure.density import AutogradDensity, Climbing, LinearDensity
from pyro_evidence.structure.recognise import Structure, recognise
from tests.models_for_tests.recognised_models import X, binary, count, label, positive, real
from tests.oracles import linear_predictor as oracle

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
assert_same = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)

NONE = torch.zeros(0)


def logistic(X, t):
    alpha = positive("alpha", 2.0)
    w = pyro.sample("w", dist.Normal(torch.zeros(3), alpha.rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


def poisson(X, t):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), positive("alpha", 2.0).rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Poisson((X @ w).exp()), obs=t)


def softmax(X, t):
    w = pyro.sample("w", dist.Normal(torch.zeros(3, 3), positive("alpha", 2.0).rsqrt()).to_event(2))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Categorical(logits=X @ w.T), obs=t)


def student(X, t):
    """Not log-concave."""
    w = pyro.sample("w", dist.Normal(torch.zeros(3), positive("alpha", 2.0).rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.StudentT(2.0, X @ w, 0.1), obs=t)


def network(X, t):
    W = pyro.sample("W", dist.Normal(torch.zeros(3, 4), positive("alpha", 1.0).rsqrt()).to_event(2))
    v = pyro.sample("v", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("t", dist.Bernoulli(logits=torch.tanh(X @ W) @ v), obs=t)


def seen(model, *args) -> tuple[LogJoint, Structure]:
    joint = LogJoint(model, args)
    return joint, recognise(joint)


def both(model, *args) -> tuple[LogJoint, list[AutogradDensity | LinearDensity]]:
    joint, found = seen(model, *args)
    assert found.linear is not None
    return joint, [found.density, found.linear]


PAPER = [(logistic, binary, oracle.logistic), (poisson, count, oracle.poisson), (softmax, label, oracle.softmax)]


@pytest.mark.parametrize(("model", "t", "by_hand"), PAPER)
def test_derivatives_are_those_on_paper(model, t, by_hand) -> None:
    joint, densities = both(model, X, t)
    u = 0.5 * torch.randn(2, joint.latents.size)
    for row in range(2):
        w = u[row].numpy()
        value, gradient, hessian = by_hand(X.numpy(), t.numpy(), w.reshape(3, 3) if len(w) == 9 else w)
        value += float((0.5 * np.log(2.0 / (2.0 * np.pi)) - w**2).sum())
        for density in densities:
            actual = density.gradient(u, joint.initial_theta)
            np.testing.assert_allclose(actual[0][row], value, rtol=1e-11)
            np.testing.assert_allclose(actual[1][row], gradient - 2.0 * w, rtol=1e-9, atol=1e-11)
            A = density.precision(u, joint.initial_theta)[row]
            np.testing.assert_allclose(A, 2.0 * np.eye(len(w)) - hessian, rtol=1e-9, atol=1e-11)
            thin = density.precision_diagonal(u, joint.initial_theta)[row]
            np.testing.assert_allclose(thin, 2.0 - hessian.diagonal(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("model", [logistic, network])
def test_a_batch_of_rows_is_a_loop(model) -> None:
    joint, found = seen(model, X, binary)
    u, theta = torch.randn(4, joint.latents.size), joint.initial_theta
    for density in (found.density, found.fastest):
        for name in ("precision", "precision_diagonal", "gauss_newton", "log_joint"):
            f = getattr(density, name)
            assert_exact(f(u, theta), torch.cat([f(u[i : i + 1], theta) for i in range(4)]))


def test_products_in_a_batch_of_rows_are_a_loop_and_leave_nothing_behind() -> None:
    linear = both(logistic, X, binary)[1][1].linear[0]
    u = torch.randn(4, 1, 3)
    together = torch.vmap(linear.product)(u)
    assert_exact(together, torch.stack([linear.product(row) for row in u]))


def test_blocks_are_the_sites() -> None:
    joint, found = seen(network, X, binary)
    assert found.density.blocks == (slice(0, 12), slice(12, 16))
    assert both(logistic, X, binary)[1][1].blocks == (slice(0, 3),)
    A = choices.block_diagonal(found.density, torch.randn(1, 16), joint.initial_theta)
    assert float(A[0, :12, 12:].abs().max()) == 0.0 < float(A[0, :12, :12].abs().max())


# --- Gauss-Newton ---


def network_by_hand(u: Tensor) -> Tensor:
    """Prior precision plus the sum over data of ``p (1 - p) g g'``, ``g`` the gradient of the logit."""

    def logits(v: Tensor) -> Tensor:
        return torch.tanh(X @ v[:12].reshape(3, 4)) @ v[12:]

    J = torch.autograd.functional.jacobian(logits, u)
    p = logits(u).sigmoid()
    return torch.eye(16) + (J * (p * (1.0 - p))[:, None]).mT @ J


def test_gauss_newton_of_a_network() -> None:
    joint, found = seen(network, X, binary)
    u = torch.randn(2, 16)
    actual = choices.gauss_newton(found.density, u, joint.initial_theta)
    assert_same(actual, torch.stack([network_by_hand(row) for row in u]))


def test_gauss_newton_of_a_network_can_be_differentiated() -> None:
    joint, found = seen(network, X, binary)
    u, theta = torch.randn(1, 16, requires_grad=True), joint.initial_theta.clone().requires_grad_()
    G = torch.randn(16, 16)
    by_u, by_theta = torch.autograd.grad((found.density.gauss_newton(u, theta)[0] * G).sum(), [u, theta])
    v = u.detach()[0].requires_grad_()
    step = 1e-5 * torch.randn(16)
    difference = ((network_by_hand(v + step) - network_by_hand(v - step)) * G).sum() / 2.0
    torch.testing.assert_close((by_u[0] * step).sum(), difference, rtol=1e-6, atol=1e-12)
    assert_same(by_theta, G.diagonal()[:12].sum().unsqueeze(0))  # alpha times the unit matrix on W


@pytest.mark.parametrize(("model", "t"), [(logistic, binary), (softmax, label), (poisson, count), (network, binary)])
def test_gauss_newton_is_positive_for_log_concave_likelihoods(model, t) -> None:
    joint, found = seen(model, X, t)
    u = 3.0 * torch.randn(5, joint.latents.size)
    exact = found.density.precision(u, joint.initial_theta)
    values = torch.linalg.eigvalsh(found.density.gauss_newton(u, joint.initial_theta))
    assert float(values.min()) > 0.9  # the prior alone has 1 or 2
    if model is network:
        assert float(torch.linalg.eigvalsh(exact).min()) < 0.0


def test_gauss_newton_is_the_exact_curvature_where_predictors_are_linear() -> None:
    """Also where that is indefinite."""
    joint, densities = both(student, X, real)
    u = torch.randn(3, 3)
    exact = densities[0].precision(u, joint.initial_theta)
    assert float(torch.linalg.eigvalsh(exact).min()) < 0.0
    for density in densities:
        assert_same(density.gauss_newton(u, joint.initial_theta), exact)


def test_gauss_newton_needs_a_predictor() -> None:
    def model(X, t):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.factor("likelihood", -(t - X @ w).square().sum())

    joint, found = seen(model, X, real)
    with pytest.raises(UnsupportedModel, match=r"one parameter each; among likelihood .*curvature=exact_hessian"):
        found.density.gauss_newton(torch.zeros(1, 3), joint.initial_theta)


# --- the parts of a linear density are read once per setting of the hyperparameters ---


def test_a_model_is_run_once_per_theta() -> None:
    joint, found = seen(logistic, X, binary)
    runs = []
    model = joint._enumerated
    joint._enumerated = lambda *a: runs.append(1) or model(*a)
    assert found.linear is not None
    theta = joint.initial_theta.clone()
    for _ in range(3):
        found.linear.gradient(torch.randn(2, 3), theta)
        found.linear.precision(torch.randn(1, 3), theta)
    assert len(runs) == 1
    found.linear.log_joint(torch.randn(1, 3), theta.clone())
    assert len(runs) == 1
    found.linear.log_joint(torch.randn(1, 3), theta + 1.0)
    assert len(runs) == 2


def test_parts_of_a_theta_that_was_overwritten_are_read_again() -> None:
    joint, (density, linear) = both(logistic, X, binary)
    u, theta = torch.randn(1, 3), joint.initial_theta.clone()
    linear.log_joint(u, theta)
    theta.add_(1.0)
    assert_same(linear.log_joint(u, theta), density.log_joint(u, theta))


def test_weights_that_were_overwritten_are_multiplied_again() -> None:
    joint, (density, linear) = both(logistic, X, binary)
    u, theta = torch.randn(1, 3), joint.initial_theta
    linear.log_joint(u, theta)
    u.add_(1.0)
    assert_same(linear.log_joint(u, theta), density.log_joint(u, theta))


def weighed(X, t, weight, seen):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), positive("alpha", 1.0).rsqrt()).to_event(1))
    with (
        pyro.plate("data", len(X)),
        pyro.poutine.scale(scale=weight * positive("s", 1.0)),
        pyro.poutine.mask(mask=seen),
    ):
        pyro.sample("t", dist.Bernoulli(logits=X @ w), obs=t)


def test_formulas_of_a_likelihood_are_its_derivatives_at_every_theta() -> None:
    """Labels that count differently, some not at all; how much they count is a hyperparameter, so it is read again."""
    weight, shown = torch.linspace(0.5, 2.0, 30), torch.arange(30) % 5 > 0
    joint, (plain, linear) = both(weighed, X, binary, weight, shown)
    assert isinstance(linear, LinearDensity)
    u = torch.randn(2, 3)
    for theta in (joint.initial_theta, joint.initial_theta + 0.5, joint.initial_theta):
        for found, expected in zip(linear.gradient(u, theta), plain.gradient(u, theta), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
        assert linear.linear[0]._closed.pair[1] is not None
        torch.testing.assert_close(linear.precision(u, theta), plain.precision(u, theta), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("model", [weighed, logistic])
def test_orders_by_formula_have_the_derivatives_in_theta(model) -> None:
    """Where a hyperparameter is in the likelihood itself there is no formula of it."""
    args = (X, binary, torch.linspace(0.5, 2.0, 30), torch.arange(30) % 5 > 0)[: 4 if model is weighed else 2]
    joint, densities = both(model, *args)
    slopes = []
    for density in densities:
        u, theta = (
            torch.linspace(-1.0, 1.0, 3).unsqueeze(0).requires_grad_(),
            (joint.initial_theta + 0.3).requires_grad_(),
        )
        found = density.orders(u, theta)
        mix = found.log_joint.sum() + (found.gradient * torch.arange(3)).sum() + found.precision.square().sum()
        slopes.append(torch.autograd.grad(mix, (u, theta)))
    torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-10)


def test_parts_that_were_read_without_a_graph_get_one_when_asked() -> None:
    joint, (density, linear) = both(logistic, X, binary)
    u, theta = torch.randn(1, 3), joint.initial_theta.clone().requires_grad_()
    with torch.no_grad():
        linear.log_joint(u, theta)
    slopes = [torch.autograd.grad(d.log_joint(u, theta).sum(), theta)[0] for d in (linear, density)]
    assert_same(*slopes)


# --- memory ---

MANY = 100_000


def plate(t):
    with pyro.plate("data", len(t)):
        w = pyro.sample("w", dist.Normal(0.0, positive("alpha", 2.0).rsqrt()))
        pyro.sample("t", dist.Normal(w, 1.0), obs=t)


def arrow(t):
    """A common mean, one precision per latent."""
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    alpha = pyro.param("alpha", lambda: torch.ones(len(t)), constraint=constraints.positive)
    with pyro.plate("data", len(t)):
        w = pyro.sample("w", dist.Normal(mean, alpha.rsqrt()))
        pyro.sample("t", dist.Poisson(w.exp()), obs=t.abs().round())


@pytest.fixture
def four_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linalg, "available_bytes", lambda device: 4 * 2**30)


@pytest.mark.parametrize("model", [plate, arrow])
@pytest.mark.usefixtures("four_gigabytes")
def test_a_hessian_of_many_latents_is_refused_at_once(model) -> None:
    t = torch.randn(MANY)
    start = time.process_time()
    joint, found = seen(model, t)
    u = torch.zeros(1, joint.latents.size)
    size = 16 * joint.latents.size**2
    for choice in (choices.exact_hessian, choices.block_diagonal):
        with pytest.raises(TooLarge, match=f"dense Hessian .* needs {size:,} bytes; 4,294,967,296 are free .*diagonal"):
            choice(found.fastest, u, joint.initial_theta)
    with pytest.raises(TooLarge, match="Gauss-Newton matrix, its Cholesky factor and the Jacobian"):
        choices.gauss_newton(found.fastest, u, joint.initial_theta)
    assert time.process_time() - start < 4.0  # without any dense matrix; typically 0.3


@pytest.mark.usefixtures("four_gigabytes")
def test_the_diagonal_of_many_latents_is_not_refused() -> None:
    joint, found = seen(plate, torch.randn(MANY))
    actual = choices.diagonal(found.fastest, torch.randn(1, MANY), joint.initial_theta)
    assert_exact(actual, torch.full((1, MANY), 3.0))  # alpha = 2, and 1 from the datum
    joint, found = seen(arrow, torch.randn(MANY))
    u = torch.randn(1, MANY + 1)
    actual = choices.diagonal(found.fastest, u, joint.initial_theta)
    assert_exact(actual[0, 0], torch.tensor(1.0 + MANY))
    assert_exact(actual[0, 1:], 1.0 + u[0, 1:].exp())


def test_groups_of_many_latents_are_found() -> None:
    _, found = seen(arrow, torch.randn(MANY))
    assert found.groups is not None
    assert found.groups.member.tolist() == [-1, *range(MANY)]


def test_a_linear_density_asks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    joint, (_, linear) = both(logistic, X, binary)
    monkeypatch.setattr(linalg, "available_bytes", lambda device: 2**20)
    with pytest.raises(TooLarge, match="posterior precision and its Cholesky factor needs"):
        linear.precision(torch.zeros(2**18, 3), joint.initial_theta)
    linear.precision_diagonal(torch.zeros(1, 3), joint.initial_theta)


class Net(PyroModule):
    """A hidden layer of units that share their prior."""

    def __init__(self) -> None:
        super().__init__()
        self.first = PyroModule[torch.nn.Linear](3, 5)
        self.first.weight = PyroSample(dist.Normal(0.0, 1.0).expand([5, 3]).to_event(2))
        self.first.bias = PyroSample(dist.Normal(0.0, 1.0).expand([5]).to_event(1))
        self.last = PyroModule[torch.nn.Linear](5, 1)
        self.last.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 5]).to_event(2))
        self.last.bias = PyroSample(dist.Normal(0.0, 1.0).expand([1]).to_event(1))

    def forward(self, X, t):
        eta = self.last(torch.relu(self.first(X))).squeeze(-1)
        with pyro.plate("data", len(X)):
            pyro.sample("t", dist.Normal(eta, 0.5), obs=t)


def test_gauss_newton_of_a_pyro_module() -> None:
    joint, found = seen(Net(), X, real)
    assert found.linear is None and found.likelihoods is not None
    u = torch.randn(2, 26)
    actual = found.density.gauss_newton(u, NONE)
    for row in range(2):
        v = u[row].clone().requires_grad_()
        J = torch.autograd.functional.jacobian(lambda x: joint.trace(x, NONE).nodes["t"]["fn"].loc, v)
        assert_same(actual[row], torch.eye(26) + 4.0 * J.mT @ J)


# --- a search asks for gradient and precision at one place: one run for both, and the numbers of two ---


def curved(X, t):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), positive("alpha", 2.0).rsqrt()).to_event(1))
    with pyro.plate("data", len(t)):
        pyro.sample("t", dist.Normal((X @ w).sin() * w[0].exp(), 0.7), obs=t)


@pytest.mark.parametrize("name", ["linear", "climbing"])
def test_the_precision_behind_a_gradient_needs_no_other_run(name: str) -> None:
    joint, found = seen(logistic if name == "linear" else curved, X, binary)
    density = found.linear if name == "linear" else Climbing(joint, None)
    assert density is not None
    u, theta = torch.randn(1, 3), joint.initial_theta.clone()
    density.gradient(u, theta)
    runs = []
    model = joint._enumerated
    joint._enumerated = lambda *a: runs.append(1) or model(*a)
    after = density.precision(u, theta)
    assert not runs
    assert_same(after, found.density.precision(u, theta))
    density.gradient(u + 1.0, theta)
    assert_same(density.precision(u, theta), after)  # elsewhere it is taken anew


@pytest.mark.parametrize("model", [logistic, curved])
def test_all_orders_in_one_graph_are_those_taken_one_by_one(model) -> None:
    joint, found = seen(model, X, binary)
    u, theta = torch.randn(1, 3, requires_grad=True), joint.initial_theta.clone().requires_grad_()
    orders, density = found.fastest.orders(u, theta), found.density
    value = density.log_joint(u, theta)
    slope = torch.autograd.grad(value.sum(), u, create_graph=True)[0]
    for one, other in zip(vars(orders).values(), (value, slope, density.precision(u, theta)), strict=True):
        assert_same(one, other)
        weight = torch.randn(one.shape)
        pairs = [torch.autograd.grad((x * weight).sum(), (u, theta), retain_graph=True) for x in (one, other)]
        for mine, expected in zip(*pairs, strict=True):
            assert_same(mine, expected)
