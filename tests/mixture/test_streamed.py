"""Rows in chunks: the fit of all rows at once, however they are cut, none of them kept."""

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from pyro_evidence import BadInput, EvidenceEM, Start, Stop, UnsupportedModel
from pyro_evidence.mixture import fit
from pyro_evidence.mixture.posterior import MixturePosterior
from pyro_evidence.models import with_background
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.mixture import DiagonalNoise, FullNoise, SharedNoise, gaussian_mixture, linear_mixture
from tests.mixture.test_number import clusters, own_program

assert_close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-9)
QUIET = Stop(progress=False, throw=False)
CUTS = [[600], [1, 599], [0, 250, 0, 350, 0], [7] * 85 + [5]]


def same(found: MixturePosterior, whole: MixturePosterior, Y: Tensor) -> None:
    assert found.num_components == whole.num_components
    assert_close(found.log_evidence, whole.log_evidence)
    assert_close(found.mode["w"], whole.mode["w"])
    for name, value in whole.hyperparameters.items():
        assert_close(found.hyperparameters[name], value)
    assert_close(found.gamma["alpha"], whole.gamma["alpha"])


def run(engine: EvidenceEM, *args: Tensor) -> MixturePosterior:
    found = engine.run(*args)
    assert isinstance(found, MixturePosterior)
    return found


@cache
def of_all_rows(noise: DiagonalNoise) -> tuple[EvidenceEM, MixturePosterior]:
    engine = EvidenceEM(gaussian_mixture(6, noise=noise), start=Start(restarts=2), stop=QUIET)
    return engine, run(engine, clusters(600, 4, 3))


@pytest.mark.parametrize(
    ("noise", "cut"), [(DiagonalNoise(), CUTS[3]), *((FullNoise(), cut) for cut in CUTS), (SharedNoise(), CUTS[2])]
)
def test_any_cut_gives_the_fit_of_all_rows(noise: DiagonalNoise, cut: list[int]) -> None:
    Y, (engine, whole) = clusters(600, 4, 3), of_all_rows(noise)
    same(engine.run_chunks([(y,) for y in Y.split(cut)]), whole, Y)


def test_samples_splits_and_weights_are_those_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts on a sample, too few components, rows that count differently, and as many numbers as are never kept."""
    monkeypatch.setattr(fit, "SAMPLE", 300)
    monkeypatch.setattr(fit, "SAMPLE_EACH", 1)
    Y = clusters(900, 5, 3)
    weight = 1.0 + (torch.arange(900) % 2)
    engine = EvidenceEM(gaussian_mixture(2), start=Start(restarts=2), stop=QUIET)
    found = engine.run_chunks(list(zip(Y.split(128), weight.split(128), strict=True)))
    assert found.num_components == 5
    same(found, run(engine, Y, weight), Y)


def test_conditional_densities_a_background_and_single_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    x = 4.0 * torch.rand(300, 1, generator=generator) - 2.0
    y = x * (1.0 - 2.0 * (torch.arange(300) % 2)).unsqueeze(-1) + 0.1 * torch.randn(300, 1, generator=generator)
    engine = EvidenceEM(linear_mixture(3, Linear()), start=Start(restarts=2), stop=QUIET)
    same(engine.run_chunks(list(zip(x.split(70), y.split(70), strict=True))), run(engine, x, y), y)
    Y = clusters(300, 3)
    low, high = Y.amin(0) - 1.0, Y.amax(0) + 1.0
    engine = EvidenceEM(with_background(gaussian_mixture(4), low=low, high=high), start=Start(restarts=2), stop=QUIET)
    same(engine.run_chunks([(part,) for part in Y.split(77)]), run(engine, Y), Y)
    single = EvidenceEM(gaussian_mixture(4), start=Start(restarts=2), stop=QUIET).run_chunks([(Y.float(),)])
    assert single.num_components == 3 and single.mode["w"].dtype == torch.float32


def test_a_data_loader_gives_chunks_and_none_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    Y = clusters(400, 3)
    found = EvidenceEM(gaussian_mixture(5), stop=QUIET).run_chunks(DataLoader(TensorDataset(Y), batch_size=64))
    assert found.num_components == 3
    assert found.log_prob(Y).shape == (400,) and found.responsibilities(Y[:3]).shape == (3, 5)
    for asks in (found.log_prob, found.log_weights, partial(found.save, "nowhere")):
        with pytest.raises(BadInput, match="came in chunks"):
            asks()
    assert "coordinates" in found.structure  # a sentence, as of every posterior
    said = found.diagnostics()
    assert math.isnan(said["pareto_k"]) and said["log_evidence"] == float(found.log_evidence)
    found.summary()
    printed = capsys.readouterr().out
    assert "no importance sampling: the data were not kept" in printed and "k-hat" not in printed


class Once:
    """Chunks that end after one pass."""

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor]:
        raise StopIteration


@pytest.mark.parametrize(
    ("model", "chunks", "error", "message"),
    [
        (gaussian_mixture(2), lambda Y: Once(), BadInput, "gone through only once"),
        (gaussian_mixture(2), lambda Y: [(Y[:0],)], BadInput, "hold no rows"),
        (gaussian_mixture(2), lambda Y: [(Y,), (Y[:, :1],)], BadInput, "chunk 1 is"),
        (gaussian_mixture(2), lambda Y: [(Y,), (Y.float(),)], BadInput, "chunk 1 is"),
        (
            gaussian_mixture(2),
            lambda Y: [(Y,), (torch.where(Y > 3.0, torch.nan, Y),)],
            BadInput,
            "chunk 1: Y.* 99 nan",
        ),
        (gaussian_mixture(2), lambda Y: [Y], BadInput, r"chunk 0 is a Tensor; expected a tuple"),
        (gaussian_mixture(2), lambda Y: [None], BadInput, r"chunk 0 is a NoneType; expected a tuple"),
        (gaussian_mixture(2, units=lambda Y: (Y[0], Y[1])), lambda Y: [(Y,)], BadInput, "FixedUnits"),
        (with_background(gaussian_mixture(2)), lambda Y: [(Y,)], BadInput, "low= and high="),
        (own_program, lambda Y: [(Y,)], UnsupportedModel, "gaussian_mixture or linear_mixture"),
    ],
)
def test_what_is_refused(model: Any, chunks: Callable[[Tensor], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EvidenceEM(model, stop=QUIET).run_chunks(chunks(clusters(100, 2)))
