"""Round coordinates: exact volumes, exact inverses, and one list of operations for a density."""

from functools import cache

import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, LaplacePosterior, Stop
from pyro_evidence.posterior.whitening import (
    AffineWhitening,
    ConditionalWhitening,
    _least_squares,
    fused,
    polynomials,
    round_coordinates,
    with_gradient,
)
from tests.models_for_tests.long_runs import FOUND, process
from tests.models_for_tests.sampled_scales import (
    SCHOOLS,
    X,
    Y,
    generated,
    regression,
    schools_centred,
)

MODELS = {"one axis": (schools_centred, (SCHOOLS,)), "two axes": (process, (FOUND,))}


@cache
def fitted(name: str) -> LaplacePosterior:
    model, data = MODELS[name]
    return LaplaceEvidence(model, stop=Stop(progress=False)).run(*data)


@pytest.mark.parametrize("name", MODELS)
def test_volumes_and_inverses_are_exact(name: str) -> None:
    found = round_coordinates(fitted(name))
    assert isinstance(found, ConditionalWhitening)
    size = len(fitted(name).state.u)
    for scale in (0.3, 1.0, 2.0):
        z = scale * generated(size, seed=1)
        u, log_volume = found.forward(z)
        torch.testing.assert_close(found.inverse(u), z, rtol=1e-7, atol=1e-7)
        J = torch.autograd.functional.jacobian(lambda z: found.forward(z)[0], z)
        torch.testing.assert_close(torch.linalg.slogdet(J).logabsdet, log_volume, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", MODELS)
def test_the_posterior_is_nearly_round(name: str) -> None:
    found, state = round_coordinates(fitted(name)), fitted(name).state
    rows = generated(400, len(state.u), seed=2)
    placed = [found.forward(z) for z in rows]
    log_joint = state.problem.density.log_joint(torch.stack([u for u, _ in placed]), state.theta)
    log_weights = log_joint + torch.stack([v for _, v in placed]) + 0.5 * rows.square().sum(-1)
    assert float(log_weights.std()) < 0.6


def test_one_gaussian_is_whitened_by_its_precision() -> None:
    posterior = LaplaceEvidence(regression, marginalise=(), stop=Stop(progress=False)).run(X, Y)
    found, z = round_coordinates(posterior), generated(4, seed=1)
    assert isinstance(found, AffineWhitening)
    u, _ = found.forward(z)
    torch.testing.assert_close(found.inverse(u), z)
    away = u - posterior.state.u
    A = torch.linalg.inv(posterior.state.precision.log_det_gradient[0])
    torch.testing.assert_close(away @ A @ away, z @ z)


def test_a_polynomial_is_read_off_the_nodes_of_a_design() -> None:
    z = generated(40, 2)
    coefficients = generated(len(polynomials(z[0])))
    values = torch.stack([polynomials(each) @ coefficients for each in z])
    fit = _least_squares(z, generated(40, seed=1))
    assert fit is not None
    torch.testing.assert_close(fit @ values, coefficients)
    assert _least_squares(z[:5], torch.zeros(5)) is None


def curve(z: Tensor) -> Tensor:
    return (z.exp() * z.flip(0)).sum() + z.square().sum()


def branching(z: Tensor) -> Tensor:
    return z.sum() if bool(z[0] > 0) else 2.0 * z.sum()


def test_a_list_of_operations_gives_the_same_numbers() -> None:
    listed, plain = fused(curve, generated(3, 4)), with_gradient(curve)
    assert listed is not plain and listed.__qualname__.startswith("fused")
    z = generated(4, seed=5)
    for a, b in zip(listed(z), plain(z), strict=True):
        torch.testing.assert_close(a, b)


def test_python_that_asks_for_numbers_is_left_alone() -> None:
    found = fused(branching, generated(3, 4))
    assert found.__qualname__.startswith("with_gradient")
    for z in (torch.ones(2), -torch.ones(2)):
        assert float(found(z)[0]) == float(branching(z))


def test_where_the_list_fails_the_plain_way_is_taken() -> None:
    def rooted(z: Tensor) -> Tensor:
        return torch.linalg.cholesky(z[0] * torch.eye(2)).sum() if z.shape else z

    found = fused(rooted, torch.tensor([[2.0], [3.0]]))
    with pytest.raises(torch.linalg.LinAlgError):
        found(torch.tensor([-1.0]))
    assert float(found(torch.tensor([4.0]))[0]) == 4.0
