"""Covariance functions against scikit-learn's, against loops from the book, and against random networks."""

import math
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import kernels as sk
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.models.basis import Learned
from pyro_evidence.models.kernels import (
    RBF,
    ChangePoint,
    Constant,
    Kernel,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    RationalQuadratic,
    squared_distance,
)
from pyro_evidence.models.random_network import ArcCosine, Arcsine, RandomNetwork


def assert_exact(actual: Tensor, expected: Tensor, rtol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-13)


assert_approx = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-8)

ARD = torch.tensor([0.6, 1.7])


def inputs(num_data: int = 9, num_inputs: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(num_data, num_inputs, generator=generator)
    return torch.cat([X, X[:1]])  # two data with the same inputs


RIVALS = [
    (RBF(ARD, 2.0), 2.0 * sk.RBF(ARD.numpy())),
    (RBF(0.3, 1.0), sk.RBF(0.3)),
    (RationalQuadratic(0.7, 1.5, 0.4), 1.5 * sk.RationalQuadratic(0.7, 0.4)),
    (Matern12(ARD, 3.0), 3.0 * sk.Matern(ARD.numpy(), nu=0.5)),
    (Matern32(0.8, 3.0), 3.0 * sk.Matern(0.8, nu=1.5)),
    (Matern52(ARD, 0.5), 0.5 * sk.Matern(ARD.numpy(), nu=2.5)),
    (Linear(1.3) + Constant(0.7), 1.3 * sk.DotProduct(0.0) + 0.7 * sk.ConstantKernel(1.0)),
    (RBF(1.0, 2.0) * Matern32(2.0, 1.0) + 0.3, 2.0 * sk.RBF(1.0) * sk.Matern(2.0, nu=1.5) + sk.ConstantKernel(0.3)),
]
EVERY = [kernel for kernel, _ in RIVALS]
EVERY += [Periodic(1.3, 0.5, 2.0), Arcsine(ARD, 0.5, 2.0), ArcCosine(ARD, 0.5, 2.0), RandomNetwork(0.8, 0.5, 2.0)]
each_kernel = pytest.mark.parametrize("kernel", EVERY, ids=lambda k: type(k).__name__)


@pytest.mark.parametrize(("kernel", "rival"), RIVALS, ids=lambda k: str(k)[:20])
def test_covariances_are_scikit_learns(kernel: Kernel, rival: sk.Kernel) -> None:
    X, Z = inputs(), inputs(4, seed=1)
    assert_exact(kernel(X, Z), torch.from_numpy(rival(X.numpy(), Z.numpy())))
    assert_exact(kernel(X), torch.from_numpy(rival(X.numpy())))


def test_periodic_kernel_is_the_one_on_mackays_figure() -> None:
    x = inputs(5, 1)
    gap = x - x.T
    assert_exact(Periodic(3.0, 0.5, 2.0)(x), 2.0 * (-((math.pi * gap / 3.0).sin() ** 2) / (2 * 0.5**2)).exp())
    assert_exact(Periodic(3.0, 0.5, 2.0)(x), torch.from_numpy((2.0 * sk.ExpSineSquared(1.0, 3.0))(x.numpy())))


@pytest.mark.parametrize("location", [-0.3, 0.0, 1.0])
def test_a_change_point_is_one_kernel_before_and_another_after(location: float) -> None:
    X, Z = inputs(5, 1), inputs(4, 1, seed=1)
    one, other = RBF(0.5, 2.0), Linear(0.7)
    after = [(1.0 / (1.0 + (-(x - location) / 0.4).exp())) for x in (X, Z)]
    expected = (1.0 - after[0]) @ (1.0 - after[1]).T * one(X, Z) + after[0] @ after[1].T * other(X, Z)
    kernel = ChangePoint((one, other), location, 0.4)
    assert_exact(kernel(X, Z), expected)
    assert_exact(kernel.diagonal(X), kernel(X).diagonal())
    names = ["0.lengthscale", "0.variance", "1.variance", "location", "width"]
    assert list(settings_of(kernel)) == [f"kernel.{name}" for name in names]
    far = ChangePoint((one, other), 50.0, 0.4)
    assert_exact(far(X), one(X))
    with pytest.raises(BadInput, match="ChangePoint has 2 inputs; expected one"):
        kernel(inputs(4))
    with pytest.raises(BadInput, match="location with the value inf; expected finite, one number"):
        ChangePoint((one, other), math.inf)


def squares_left(x: np.ndarray, t: np.ndarray, period: float) -> float:
    """Sum of squares that a line and a sine of a period leave."""
    columns = np.stack([np.ones(len(x)), x, *(f(2.0 * np.pi * x / period) for f in (np.sin, np.cos))], 1)
    return float(((t - columns @ np.linalg.lstsq(columns, t, rcond=None)[0]) ** 2).sum())


@pytest.mark.parametrize("num", [12, 80])
def test_a_period_begins_where_a_sine_beside_a_line_fits_best(num: int) -> None:  # oracle: least squares in numpy
    random = np.random.default_rng(0)
    for scale in (1.0, 1.0, 1.0, 365.25):
        x = np.sort(random.uniform(size=num)) * 30.0
        t = 0.3 * x + np.sin(2.0 * np.pi * x / 3.1 + 1.0) + 0.5 * random.normal(size=num)
        X, y = torch.from_numpy(scale * x).unsqueeze(-1), torch.from_numpy(t)
        begun = Periodic().begin("period", X, y)
        assert begun is not None
        tried = [squares_left(x, t, (x[-1] - x[0]) / cycles) for cycles in np.arange(2.0, (num - 1) / 2, 0.25)]
        assert squares_left(x, t, float(begun) / scale) == pytest.approx(min(tried), rel=1e-9)
        assert num == 12 or float(begun) == pytest.approx(3.1 * scale, rel=0.05)
    assert Periodic().begin("lengthscale", X, y) is None and Periodic().begin("period", X[:4], y[:4]) is None
    assert Periodic().begin("period", X.expand(-1, 2), y) is None and Periodic().begin("period", X, None) is None


@each_kernel
def test_diagonal_symmetry_and_positive_eigenvalues(kernel: Kernel) -> None:
    X = inputs()
    K = kernel(X)
    assert_approx(kernel.diagonal(X), K.diagonal())
    assert_exact(K, K.mT)
    assert float(torch.linalg.eigvalsh(K)[0]) > -1e-10
    assert K.dtype == X.dtype and kernel(X.float()).dtype == torch.float32


@each_kernel
def test_a_kernel_is_a_value(kernel: Kernel) -> None:
    copied = pickle.loads(pickle.dumps(kernel))
    assert copied == kernel and hash(copied) == hash(kernel) and kernel != kernel + 1.0


def settings_of(kernel: Kernel) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def read(name: str, setting: float | Tensor, *_: object) -> Tensor:
        found[name] = torch.as_tensor(setting).clone().requires_grad_()
        return found[name]

    kernel.resolved(read)
    return found


@each_kernel
def test_derivatives_are_finite_at_equal_inputs_and_right(kernel: Kernel) -> None:  # oracle: differences
    X, G = inputs(4), torch.randn(5, 5)
    start = settings_of(kernel)
    names = list(start)

    def total(*values: Tensor) -> Tensor:
        given = dict(zip(names, values, strict=True))
        return (G * kernel.resolved(lambda name, *_: given[name])(X)).sum()

    assert torch.autograd.gradcheck(total, tuple(start.values()), atol=1e-6)
    if not isinstance(kernel, ArcCosine | RandomNetwork):
        assert torch.autograd.gradgradcheck(total, tuple(start.values()), atol=1e-5)


def test_distances_have_derivatives_in_the_inputs_and_no_cancellation() -> None:
    X, Z = inputs(3).requires_grad_(), inputs(4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(squared_distance, (X, Z)) and torch.autograd.gradgradcheck(squared_distance, (X, Z))
    near = torch.tensor([[1e6, 0.0], [1e6 + 1e-6, 0.0]])
    assert_exact(squared_distance(near, near)[0, 1], (near[1, 0] - near[0, 0]) ** 2)
    rows = torch.stack([X, 2.0 * X])
    batched = torch.func.vmap(torch.func.grad(lambda x: squared_distance(x, Z).square().sum()))(rows)
    alone = [torch.func.grad(lambda x: squared_distance(x, Z).square().sum())(x) for x in rows]
    assert_exact(batched, torch.stack(alone))


UNITS = [(Arcsine, torch.erf), (ArcCosine, torch.relu), (RandomNetwork, torch.tanh)]


@pytest.mark.parametrize(("kind", "unit"), UNITS, ids=["erf", "relu", "tanh"])
def test_network_kernels_are_the_covariance_of_random_networks(kind: type[Kernel], unit: object) -> None:
    X, num = inputs(3), 200_000
    generator = torch.Generator().manual_seed(3)
    v = torch.randn(num, 2, generator=generator) * torch.tensor([1.5, 0.4]).sqrt()
    b = torch.randn(num, 1, generator=generator) * math.sqrt(0.7)
    hidden = unit(v @ X.T + b)  # type: ignore[operator]
    products = 3.0 * hidden[:, :, None] * hidden[:, None, :]
    error = products.std(0) / math.sqrt(num)
    K = kind(weight_variance=torch.tensor([1.5, 0.4]), bias_variance=0.7, variance=3.0)(X)  # type: ignore[call-arg]
    assert bool(((products.mean(0) - K).abs() < 4.0 * error).all())


def test_quadrature_agrees_with_the_arcsine() -> None:
    X = inputs(4)
    smooth = RandomNetwork(0.8, 0.5, 2.0, unit=torch.erf)
    bent = RandomNetwork(0.8, 0.5, 2.0, unit=torch.tanh, num_nodes=400)
    assert_exact(RandomNetwork(0.8, 0.5, 2.0)(X), bent(X), rtol=1e-9)
    assert_exact(smooth(X), Arcsine(0.8, 0.5, 2.0)(X), rtol=1e-9)


def test_many_radial_basis_functions_become_a_gaussian_process() -> None:
    """The slides: weights of variance S dh on bumps of width r, dh apart, tend to sqrt(pi r^2) S exp(-d^2 / 4 r^2)."""
    r, S, x = 0.7, 1.9, torch.linspace(-2.0, 2.0, 9)[:, None]
    limit = RBF(lengthscale=math.sqrt(2.0) * r, variance=math.sqrt(math.pi) * r * S)(x)
    gaps = []
    for num in (5, 9, 17, 400):
        centres = torch.linspace(-12.0, 12.0, num)
        bumps = (-0.5 * ((x - centres) / r) ** 2).exp()
        Q = S * (centres[1] - centres[0]) * bumps @ bumps.T
        gaps.append(float((Q - limit).abs().max()))
        assert torch.linalg.matrix_rank(Q) <= num  # fewer functions than data: no full rank
    assert gaps[0] > gaps[1] > gaps[2] and gaps[-1] < 1e-12


def test_names_of_settings_and_starts_of_learned_ones() -> None:
    kernel = RBF(Learned(0.5), 2.0) * Periodic(1.0, 1.0, 1.0) + Linear()
    assert list(settings_of(RBF(0.5, 1.0))) == ["kernel.lengthscale", "kernel.variance"]
    X = inputs()
    assert_exact(kernel(X), (RBF(0.5, 2.0) * Periodic(1.0, 1.0, 1.0) + Linear(1.0))(X))
    names: list[str] = []
    kernel.resolved(lambda name, *_: names.append(name) or torch.ones(()))  # type: ignore[func-returns-value]
    assert names[:3] == ["kernel.0.0.lengthscale", "kernel.0.0.variance", "kernel.0.1.period"]
    assert names[-1] == "kernel.1.variance" and len(names) == 6


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_settings_must_be_positive_and_finite(value: float) -> None:
    for build in (lambda: RBF(lengthscale=value), lambda: RBF(Learned(value)), lambda: Constant(value)):
        with pytest.raises(BadInput, match=f"{value:g}; expected finite and greater than 0"):
            build()


def test_inputs_must_be_a_matrix_with_columns() -> None:
    kernel = RBF(torch.ones(2))
    with pytest.raises(BadInput, match=r"shape \(3,\).*X\[:, None\]"):
        kernel(torch.ones(3))
    with pytest.raises(BadInput, match=r"shape \(3, 0\).*no data"):
        kernel(torch.ones(3, 0))
    with pytest.raises(BadInput, match=r"int64"):
        kernel(torch.ones(3, 2, dtype=torch.long))
    with pytest.raises(BadInput, match="2 inputs and Z has 3"):
        kernel(torch.ones(3, 2), torch.ones(3, 3))
    with pytest.raises(BadInput, match="RBF has 2 entries in lengthscale, but X has 3 inputs"):
        kernel(torch.ones(4, 3))
    with pytest.raises(BadInput, match="prior"):
        RBF(torch.distributions.LogNormal(0.0, 1.0))(torch.ones(4, 3))


def test_slides_exercise_16_7_the_linear_kernel_has_the_rank_of_its_inputs() -> None:
    X = torch.from_numpy(np.random.default_rng(0).uniform(size=(30, 2)))
    assert torch.linalg.matrix_rank(Linear(1.0)(X)) == 2
    assert torch.linalg.matrix_rank(RBF(0.3, 1.0)(X)) > 20
