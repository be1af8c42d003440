"""Hierarchies as users write them, by factors and dense: the same log evidence, its factors found."""

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import LaplaceEvidence, Stop
from pyro_evidence.structure import recognise

QUIET = Stop(progress=False)


def rows(num: int, *levels: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    index = [torch.cat([torch.arange(level), torch.randint(level, (num - level,))]) for level in levels]
    return torch.randn(num, dtype=torch.float64), *index


def zero_inflated(x: Tensor, i: Tensor, j: Tensor, y: Tensor) -> None:
    """Counts with more zeros than a rate gives, effects crossed."""
    with pyro.plate("persons", 150):
        a = pyro.sample("a", dist.Normal(x.new_zeros(()), 0.7))
    with pyro.plate("items", 80):
        b = pyro.sample("b", dist.Normal(x.new_zeros(()), 0.5))
    with pyro.plate("rows", len(x)):
        rate = (0.3 + 0.4 * x + a[i] + b[j]).exp()
        pyro.sample("y", dist.ZeroInflatedPoisson(rate, gate_logits=x.new_tensor(-1.0)), obs=y)


def three_levels(x: Tensor, pupil: Tensor, district: Tensor, y: Tensor) -> None:
    """Pupils in schools in districts of very different size; a school's mean is its district's."""
    with pyro.plate("districts", 30):
        u = pyro.sample("u", dist.Normal(x.new_zeros(()), 0.5))
    with pyro.plate("schools", 200):
        v = pyro.sample("v", dist.Normal(u[district[:200]], 0.8))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=-0.5 + 0.6 * x + v[pupil]), obs=y)


@pytest.mark.parametrize("model, levels", [(zero_inflated, (150, 80)), (three_levels, (200, 30))])
def test_by_factors_and_dense(
    model: Callable[..., None], levels: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rows(700, *levels)
    y = (torch.arange(700) % 7 == 0).double()
    y = y * 3.0 if model is zero_inflated else y
    by_factors = LaplaceEvidence(model, maximise=(), marginalise=(), stop=QUIET).run(*data, y)
    assert "factors of up to 2 coordinates" in by_factors.structure
    monkeypatch.setattr(recognise, "SMALL", 10**9)
    dense = LaplaceEvidence(model, maximise=(), marginalise=(), stop=QUIET).run(*data, y)
    assert "factors" not in dense.structure
    torch.testing.assert_close(by_factors.log_evidence, dense.log_evidence, rtol=1e-9, atol=0)
    torch.testing.assert_close(by_factors.quantiles(0.9), dense.quantiles(0.9), rtol=1e-6, atol=1e-7)
