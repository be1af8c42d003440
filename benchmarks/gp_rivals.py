"""Log evidence and gradient of Gaussian process regression beside gpytorch's, which is made to use Cholesky factors.

    pip install gpytorch; OMP_NUM_THREADS=1 python benchmarks/gp_rivals.py

By itself gpytorch takes conjugate gradients from 800 data on; the last column says what that costs.
"""

import torch
from torch import Tensor

from pyro_evidence.laplace import approximation, gradient
from pyro_evidence.models.gp import gp_regression
from pyro_evidence.models.kernels import RBF
from pyro_evidence.models.regression import Learned
from pyro_evidence.program import LogJoint

try:
    import gpytorch
    from linear_operator import to_linear_operator
except ModuleNotFoundError:
    raise SystemExit("gpytorch is missing: pip install gpytorch") from None

LENGTHSCALE, VARIANCE, NOISE, JITTER = 0.7, 1.3, 0.09, 1e-6
SIZES = ((200, 2), (500, 3), (1000, 3))


def data(num_data: int, num_inputs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(num_data, num_inputs, generator=generator)
    return X, torch.sin(2.0 * X[:, 0]) + 0.3 * torch.randn(num_data, generator=generator)


def ours(X: Tensor, y: Tensor) -> tuple[float, Tensor]:
    """The log evidence, nats, and its slopes in the logarithms of noise precision, lengthscale and variance."""
    kernel = RBF(Learned(torch.tensor(LENGTHSCALE)), Learned(torch.tensor(VARIANCE)))
    joint = LogJoint(gp_regression(kernel, beta=Learned(torch.tensor(1.0 / NOISE)), jitter=JITTER), (X, y))
    state = approximation.laplace_state(approximation.laplace_problem(joint), joint.initial_theta, joint.initial_u)
    return float(state.log_evidence), gradient.slope(state).total


def theirs(X: Tensor, y: Tensor, *, cholesky: bool) -> tuple[float, Tensor]:
    """The same of gpytorch's density, whose covariance holds noise and jitter."""
    theta = torch.tensor([NOISE, LENGTHSCALE, VARIANCE]).log().requires_grad_()
    noise, lengthscale, variance = theta.exp()
    K = variance * (-0.5 * torch.cdist(X, X).square() / lengthscale**2).exp() + (noise + JITTER) * torch.eye(len(X))
    settings, limit = gpytorch.settings, 10**6 if cholesky else 800
    with settings.fast_computations(*[not cholesky] * 3), settings.max_cholesky_size(limit):
        value = gpytorch.distributions.MultivariateNormal(torch.zeros(len(X)), to_linear_operator(K)).log_prob(y)
        (slope,) = torch.autograd.grad(value, theta)
    return float(value.detach()), slope * torch.tensor([-1.0, 1.0, 1.0])


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    print("| N, D | log evidence | less gpytorch's by Cholesky | largest of the slopes | less gpytorch's as it comes |")
    print("|---|---|---|---|---|")
    for size in SIZES:
        X, y = data(*size)
        (value, slope), (exact, exact_slope) = ours(X, y), theirs(X, y, cholesky=True)
        gap, loose = float((slope - exact_slope).abs().max()), theirs(X, y, cholesky=False)[0]
        print(f"| {size[0]}, {size[1]} | {value:.4f} | {value - exact:.1e} | {gap:.1e} | {value - loose:.2g} |")


if __name__ == "__main__":
    main()
