"""Pareto smoothing beside ArviZ's, on weights with heavy and light tails, ties, zeros and few draws."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from pyro_evidence.numerics import importance

SIZES = (7, 12, 19, 20, 25, 50, 100, 333, 1000, 4000)
KINDS = ("narrow", "lognormal", "bounded", "exponential", "heavy", "tied", "shifted", "zeros")


def log_weights(kind: str, size: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    normal = torch.randn(size, generator=g)
    exponential = torch.empty(size).exponential_(generator=g)
    zeros = torch.where(torch.arange(size) % 3 == 0, -math.inf, normal)
    made = {
        "narrow": 0.1 * normal,
        "lognormal": 3.0 * normal,
        "bounded": -normal.square(),
        "exponential": 0.8 * exponential,
        "heavy": 2.0 * exponential,
        "tied": (2.0 * normal).round(),
        "shifted": 1000.0 + 1.5 * exponential,
        "zeros": zeros,
    }
    return made[kind]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_k_are_those_of_arviz(kind: str) -> None:  # oracle: arviz.psislw
    arviz = pytest.importorskip("arviz")
    for case, size in enumerate(SIZES * 3):
        raw = log_weights(kind, size, seed=case)
        expected, k = arviz.psislw(raw.numpy().copy())
        found = importance.smoothed(raw)
        weights, expected = found.weights.numpy(), np.exp(np.asarray(expected))
        if kind == "tied":  # which of two equal weights is called the larger is nobody's business
            weights, expected = np.sort(weights), np.sort(expected)
        np.testing.assert_allclose(weights, expected, rtol=1e-6, atol=1e-300)
        assert found.pareto_k == pytest.approx(float(k), abs=1e-6)


def test_order_is_kept_and_nothing_exceeds_the_largest() -> None:
    raw = log_weights("heavy", 2000, seed=1)
    smooth = importance.smoothed(raw).log_weights
    assert bool((smooth[raw.argsort()].diff() >= 0.0).all())
    assert float(smooth.max()) <= float(raw.max()) + 1e-12


def test_weights_below_the_tail_are_left_alone() -> None:
    raw = log_weights("exponential", 1000, seed=2)
    smooth = importance.smoothed(raw).log_weights
    rest = raw.argsort()[: -importance.tail_size(1000)]
    torch.testing.assert_close(smooth[rest], raw[rest], rtol=0, atol=1e-12)
    assert importance.tail_size(1000) == 95  # 3 sqrt 1000 = 94.87
    assert importance.tail_size(100) == 20


def test_shape_of_a_generalised_pareto_distribution() -> None:  # oracle: its own quantiles
    p = (torch.arange(2000) + 0.5) / 2000
    for shape in (-0.3, 0.0, 0.4, 0.9):
        k, scale = importance.generalised_pareto(3.0 * importance.pareto_quantile(p, shape))
        assert k == pytest.approx((2000 * shape + 5) / 2010, abs=0.02)
        assert scale == pytest.approx(3.0, rel=0.03)


def test_too_few_in_the_tail_have_no_shape() -> None:
    assert importance.smoothed(torch.zeros(50)).pareto_k == math.inf
    assert importance.smoothed(torch.tensor([0.0, 1.0, 2.0])).pareto_k == math.inf
    assert importance.smoothed(torch.zeros(1)).pareto_k == math.inf


def test_weights_that_are_as_good_as_equal_have_no_tail() -> None:
    """The tail's shape would be refused, and yet all that it could add is less than a per cent."""
    g = torch.Generator().manual_seed(0)
    even = 0.002 * torch.randn(2000, generator=g, dtype=torch.float64)
    few = even.index_add(0, torch.arange(8), 0.03 * torch.arange(1.0, 9.0).double())
    assert importance.smoothed(few).pareto_k > 0.7
    assert importance.checked(few).pareto_k == -math.inf
    assert importance.pareto_shapes(few.unsqueeze(-1)).tolist() == [-math.inf]


@pytest.mark.parametrize("one", [0.5, 2.0, 30.0])
def test_one_weight_that_stands_out_is_never_called_equal(one: float) -> None:
    some = torch.zeros(2000, dtype=torch.float64).index_fill(0, torch.tensor([5]), one)
    assert importance.checked(some).pareto_k != -math.inf
    wide = 0.04 * torch.randn(2000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert importance.checked(wide).pareto_k != -math.inf


@pytest.mark.parametrize("k", [0.5, 0.6, 0.65])
def test_errors_of_trusted_weights_with_heavy_tails_hold(k: float) -> None:
    """Weights of a Pareto distribution, of mean ``1 / (1 - k)``; a standard error alone is too small for some."""
    generator, off = torch.Generator().manual_seed(0), []
    for _ in range(200):
        found = importance.smoothed(k * torch.empty(1000).exponential_(generator=generator))
        if found.pareto_k <= importance.threshold(1000):
            gap = float(importance.log_mean(found.log_weights)) + math.log1p(-k)
            off.append((gap / found.error, gap / float(importance.standard_error(found.log_weights))))
    said, alone = (torch.tensor(off).abs() > 2.5).double().mean(0).tolist()
    assert len(off) > 100 and said < 0.05 < alone
    assert torch.tensor(off)[:, 0].square().mean().sqrt() > 0.5  # no wider than that asks for
