"""Decisions that rounding may have turned are told, and only these: data are scaled until a decision is a near tie."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import REVM, RVM, EvidenceEM, LaplaceEvidence, NotConverged, OverlapEM, Stop, tensor_file
from pyro_evidence.close_calls import NEAR, collected, noted, sentences, with_close_calls
from pyro_evidence.iterate import Status
from pyro_evidence.laplace.posterior import LaplacePosterior
from pyro_evidence.mixture.mode import SAME, first_highest
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.mppca import mppca
from pyro_evidence.models.prbf import prbf
from pyro_evidence.models.regression import regression
from tests.models_for_tests.mppca_cases import fit, planes
from tests.models_for_tests.posterior_models import mixture, mixture_data

X = torch.linspace(-1.0, 2.0, 30).double()
T = 2.0 * X + torch.cos(40.0 * X)


def slope_only(x: Tensor, t: Tensor) -> None:
    """One weight whose prior precision is learned; noise of variance 1."""
    alpha = pyro.param("alpha", lambda: torch.tensor(1.0), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(torch.zeros(1), alpha.rsqrt()).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("t", dist.Normal(x * w, 1.0), obs=t)


def at_the_margin(away: float) -> Tensor:
    """Data for which the weight's quality is its sparsity, ``(x't)^2 = x'x``, up to a factor."""
    return T * (X @ X).sqrt() / (X @ T) * (1.0 + away)


def fitted(t: Tensor) -> LaplacePosterior:
    pyro.clear_param_store()
    return LaplaceEvidence(slope_only).run(X, t)


def test_a_group_at_the_margin_of_being_pruned_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    posterior = fitted(at_the_margin(1e-12))
    [(decision, distance)] = posterior.close_calls
    assert decision.startswith("whether the weights behind site 'alpha'") and distance < NEAR
    posterior.summary()
    assert decision in capsys.readouterr().out


@pytest.mark.parametrize("away", [-0.3, 0.3])
def test_a_group_far_from_it_is_not(away: float, capsys: pytest.CaptureFixture[str]) -> None:
    posterior = fitted(at_the_margin(away))
    assert posterior.close_calls == () and bool(posterior.pruned["w"].all()) == (away < 0)
    posterior.summary()
    assert "rounding" not in capsys.readouterr().out


@pytest.mark.parametrize(("away", "told"), [(1e-13, True), (-1e-13, True), (1e-3, False)])
def test_an_axis_at_the_margin_is_told(away: float, told: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model = regression(Linear(bias=False), beta=1.0)
    wald = REVM(model).run(X[:, None], T).state.axes.wald
    posterior = REVM(model).run(X[:, None], T * wald.rsqrt() * (1.0 + away))
    assert bool(posterior.close_calls) == told
    posterior.summary()
    assert ("whether an axis is pruned" in capsys.readouterr().out) == told


def test_ordinary_fits_have_none() -> None:
    model = regression(Linear(), beta=1.0)
    for engine in (LaplaceEvidence(model), REVM(model), RVM(model)):
        assert engine.run(X[:, None], T).close_calls == ()


def test_the_first_of_those_as_high_is_told_where_the_gap_is_at_the_tolerance() -> None:
    top, gap = torch.tensor(-100.0).double(), SAME * 101.0
    for away, told in ((1e-6, True), (0.1, False)):
        with collected() as calls:
            first_highest(torch.stack([top - gap * (1.0 + away), top]))
        assert bool(calls) == told


class Slow:
    """A state whose slope is at the tolerance, up to a factor."""

    objective, verdict = -10.0, None

    def __init__(self, away: float) -> None:
        self.gradient_norm = 1e-6 * (1.0 + away)


@pytest.mark.parametrize(("away", "told"), [(1e-6, True), (-1e-6, True), (0.5, False)])
def test_the_end_of_a_loop_is_told_where_the_slope_is_at_the_tolerance(away: float, told: bool) -> None:
    with collected() as calls:
        status = Stop()(-10.0, Slow(away), 1)
    assert (status is Status.CONVERGED) == (away < 0) and bool(calls) == told


def test_nothing_is_kept_outside_of_a_fit() -> None:
    noted("whether this is kept", 0.0)
    with collected() as calls:
        pass
    assert calls == {}


def test_a_posterior_that_an_error_carries_knows_them_too() -> None:
    @with_close_calls
    def run() -> None:
        noted("whether it ends", 0.0)
        raise NotConverged("it did not end", fitted(T))

    with pytest.raises(NotConverged) as caught:
        run()
    assert getattr(caught.value.posterior, "close_calls", None) == (("whether it ends", 0.0),)


def test_a_summary_names_at_most_five() -> None:
    [said] = sentences(tuple((f"whether {i}", 10.0) for i in range(7)))
    assert "whether 4 (10 times the rounding); and 2 more" in said and sentences(()) == []


def noisy_slope(x: Tensor, t: Tensor) -> None:
    """One weight, and a sampled noise scale, which is integrated around it."""
    sigma = pyro.sample("sigma", dist.HalfNormal(torch.tensor(1.0)))
    w = pyro.sample("w", dist.Normal(torch.zeros(1), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("t", dist.Normal(x * w, sigma), obs=t)


CLOUDS = torch.cat([X[:, None] * torch.ones(2), T[:, None] + torch.tensor([6.0, 6.5])])
FITS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "laplace": lambda: (fitted(T), slope_only),
    "nested": lambda: (LaplaceEvidence(noisy_slope).run(X, T), noisy_slope),
    "mixture": lambda: (EvidenceEM(mixture).run(*mixture_data()), mixture),
    "mppca": lambda: (fit(planes(), mppca(2, 1), deletion=None), mppca(2, 1)),
    "axes": lambda: (RVM(LINE).run(X[:, None], T), LINE),
    "network": lambda: (OverlapEM(prbf(2)).run(CLOUDS, torch.arange(60) % 2), prbf(2)),
}
LINE = regression(Linear(), beta=1.0)


@pytest.mark.parametrize("kind", FITS)
def test_a_loaded_posterior_knows_them(kind: str, tmp_path: Path) -> None:
    posterior, model = FITS[kind]()
    calls = (("whether it is kept", 12.5),)
    object.__setattr__(posterior, "close_calls", calls)
    posterior.save(tmp_path / "fit")
    assert type(posterior).load(tmp_path / "fit", model).close_calls == calls


def test_a_file_without_an_entry_for_them_is_loaded_with_none(tmp_path: Path) -> None:
    fitted(at_the_margin(1e-12)).save(tmp_path / "fit")
    content = dict(tensor_file.read(tmp_path / "fit"))
    del content["close_calls"]
    tensor_file.write(content, tmp_path / "older")
    assert LaplacePosterior.load(tmp_path / "older", slope_only).close_calls == ()
