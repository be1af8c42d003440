"""Mixtures of probabilistic PCA that are offered too few components find the others."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_evidence import EvidenceEM, Start, Stop, class_conditional
from pyro_evidence.mixture import GreedyDeletion
from pyro_evidence.models.mppca import DiagonalNoise, PerColumn, mppca
from pyro_evidence.models.wrappers import marginalised
from pyro_evidence.mppca import MPPCAPosterior, fit

QUIET = Stop(progress=False, throw=False)
NUM, PLANES = 500, 5


def planes(num_latents: int = 2) -> Tensor:
    """Five planes, or lines, in six dimensions."""
    generator = torch.Generator().manual_seed(0)
    W, mu = torch.randn(PLANES, 6, 2, generator=generator), 4.0 * torch.randn(PLANES, 6, generator=generator)
    z, x = torch.arange(NUM) % PLANES, torch.randn(NUM, 2, generator=generator)
    within = (W[z, :, :num_latents] @ x[:, :num_latents].unsqueeze(-1)).squeeze(-1)
    return mu[z] + within + 0.4 * torch.randn(NUM, 6, generator=generator)


def found(model: Any, Y: Tensor, **settings: Any) -> MPPCAPosterior:
    posterior = EvidenceEM(model, start=Start(restarts=2), stop=QUIET, **settings).run(Y)
    assert isinstance(posterior, MPPCAPosterior)
    return posterior


@cache
def of_two() -> MPPCAPosterior:
    return found(mppca(2, 2), planes())


@pytest.mark.parametrize(
    ("settings", "num_latents"),
    [({}, 2), ({"alpha": PerColumn()}, 2), pytest.param({"noise": DiagonalNoise()}, 1, marks=pytest.mark.slow)],
    ids=str,
)
def test_few_that_are_offered_become_as_many_as_many(settings: dict[str, Any], num_latents: int) -> None:
    """Within a tenth of a nat a datum of what nine components are reduced to."""
    Y = planes(num_latents)
    few = found(mppca(2, num_latents, **settings), Y) if settings else of_two()
    many = found(mppca(9, num_latents, **settings), Y)
    assert few.num_components == many.num_components == PLANES
    assert float(few.log_evidence) > float(many.log_evidence) - 0.1 * NUM
    assert few.limit == "" and few.mode["W"].shape[0] >= PLANES


def test_rows_on_a_sample_with_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "SAMPLE", 200)
    Y = planes()
    Y[::7, 2] = torch.nan
    few = found(marginalised(mppca(2, 2)), Y)
    assert few.num_components == PLANES and few.responsibilities().shape == (NUM, len(few.active))


def test_a_larger_mixture_comes_back_from_its_file(tmp_path: Path) -> None:
    few = of_two()
    few.save(tmp_path / "few.safetensors")
    again = MPPCAPosterior.load(tmp_path / "few.safetensors", mppca(2, 2))
    assert again.num_components == PLANES and torch.equal(again.log_prob(), few.log_prob())


def test_how_often_is_a_setting() -> None:
    """Once is not enough here, and the posterior says so; never, and it is silent of what was not tried."""
    once, never = (found(mppca(2, 2), planes(), deletion=GreedyDeletion(splits=n)) for n in (1, 0))
    assert 2 == never.num_components < once.num_components < PLANES
    assert once.diagnostics(100)["num_components_limited_by"] == "GreedyDeletion(splits=1)"


def test_each_class_by_itself() -> None:
    Y = planes()
    labels = (torch.arange(NUM) % PLANES > 2).long()
    fitted = class_conditional(EvidenceEM(mppca(2, 2), start=Start(restarts=2), stop=QUIET), Y, labels)
    assert [p.num_components for p in fitted.posteriors] == [3, 2]  # type: ignore[attr-defined]
