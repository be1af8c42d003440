"""What a relevance eigenvector machine reads off a model: its likelihood, scaled and masked, and no prior."""

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor

from pyro_evidence import REVM, RVM, VRVM, Stop
from pyro_evidence.relevance import L1Prior
from tests.models_for_tests import weight_models as models
from tests.models_for_tests.weight_models import labels


def problem(N: int = 120, M: int = 6) -> tuple[Tensor, Tensor]:
    Phi = torch.randn(N, M, generator=torch.Generator().manual_seed(0))
    return Phi, labels(Phi, torch.tensor([2.0, -1.0, 0.5] + [0.0] * (M - 3)))


def same(first: Any, second: Any) -> None:
    """One fit, in weights and in log evidence."""
    torch.testing.assert_close(first.mode["w"], second.mode["w"], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(first.log_evidence, second.log_evidence, rtol=1e-8, atol=0)


ENGINES = pytest.mark.parametrize(
    "make",
    [lambda m: REVM(m), lambda m: REVM(m, prior=L1Prior()), lambda m: RVM(m, stop=Stop(progress=False))],
    ids=["grevm", "lrevm", "rvm"],
)


@ENGINES
def test_a_scale_counts_every_datum_so_often(make: Any) -> None:
    Phi, t = problem()

    def scaled(Phi: Tensor, t: Tensor) -> None:
        w = models.weights(Phi.shape[1], Phi)
        with pyro.plate("data", len(Phi)), poutine.scale(scale=2.0):
            pyro.sample("t", dist.Bernoulli(logits=Phi @ w), obs=t)

    same(make(scaled).run(Phi, t), make(models.logistic).run(torch.cat([Phi, Phi]), torch.cat([t, t])))


@ENGINES
def test_what_is_masked_does_not_count(make: Any) -> None:
    Phi, t = problem()
    seen = torch.arange(120) % 3 > 0

    def masked(Phi: Tensor, t: Tensor) -> None:
        w = models.weights(Phi.shape[1], Phi)
        with pyro.plate("data", len(Phi)), poutine.mask(mask=seen):
            pyro.sample("t", dist.Bernoulli(logits=Phi @ w), obs=t)

    same(make(masked).run(Phi, t), make(models.logistic).run(Phi[seen], t[seen]))


@ENGINES
def test_the_prior_that_the_user_wrote_is_not_counted(make: Any) -> None:
    Phi, t = problem()

    def confident(Phi: Tensor, t: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(3.0, 1e-3).expand([6]).to_event(1))
        with pyro.plate("data", len(Phi)):
            pyro.sample("t", dist.Bernoulli(logits=Phi @ w), obs=t)

    same(make(confident).run(Phi, t), make(models.logistic).run(Phi, t))


@pytest.mark.parametrize("engine", [REVM, RVM, VRVM])
def test_several_sites_are_one_weight_vector(engine: Any) -> None:
    Phi, t = problem()

    def split(Phi: Tensor, t: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(Phi.new_zeros(2, 2), 1.0).to_event(2))
        b = pyro.sample("b", dist.Normal(Phi.new_zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(Phi)):
            pyro.sample("t", dist.Bernoulli(logits=Phi[:, :4] @ a.reshape(-1) + Phi[:, 4:] @ b), obs=t)

    found, whole = engine(split, site=["b", "a"]).run(Phi, t), engine(models.logistic).run(Phi, t)
    together = torch.cat([found.mode["a"].reshape(-1), found.mode["b"]])
    torch.testing.assert_close(together, whole.mode["w"], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.log_evidence, whole.log_evidence)


def test_the_misfit_is_what_the_quadratic_gets_wrong_at_zero() -> None:
    Phi, t = problem()
    found = REVM(models.logistic).run(Phi, t)
    y, h = found.state.base, found.eigenvalues
    s = torch.sigmoid(Phi @ y)
    A = Phi.T @ ((s * (1.0 - s))[:, None] * Phi)
    quadratic = dist.Bernoulli(logits=Phi @ y).log_prob(t).sum() - 0.5 * y @ A @ y
    assert found.diagnostics()["misfit"] == pytest.approx(float(quadratic) + 120.0 * math.log(2.0))
    assert not found.diagnostics()["separable"] and len(h) == 6
    noise = REVM(models.gaussian, ridge=0.0).run(Phi, Phi @ torch.arange(6.0) + t)
    assert noise.diagnostics()["misfit"] == pytest.approx(0.0, abs=1e-7)
