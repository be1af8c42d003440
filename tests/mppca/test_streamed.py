"""Mixtures of probabilistic PCA in chunks: the fit of all rows, however they are cut, none of them kept."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_evidence import BadInput, EvidenceEM, Start, Stop, UnsupportedModel
from pyro_evidence.data import Slices
from pyro_evidence.data.rows import Rows
from pyro_evidence.models import marginalised
from pyro_evidence.models.mppca import DiagonalNoise, PerColumn, mppca
from pyro_evidence.mppca import curvature, expectation, fit, start
from pyro_evidence.mppca.data import Observations
from pyro_evidence.mppca.posterior import MPPCAPosterior

assert_close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-10)
QUIET = Stop(progress=False, throw=False)
FEW = Stop(num_steps=25, progress=False, throw=False)  # rounds are alike from the first to the last


def planes(num: int = 240) -> Tensor:
    """Three planes in five dimensions."""
    generator = torch.Generator().manual_seed(0)
    W, mu = torch.randn(3, 5, 2, generator=generator), 6.0 * torch.randn(3, 5, generator=generator)
    z = torch.arange(num) % 3
    x = torch.randn(num, 2, generator=generator)
    return mu[z] + (W[z] @ x.unsqueeze(-1)).squeeze(-1) + 0.3 * torch.randn(num, 5, generator=generator)


def same(found: Any, whole: Any) -> None:
    assert isinstance(found, MPPCAPosterior) and isinstance(whole, MPPCAPosterior)
    assert found.num_components == whole.num_components
    torch.testing.assert_close(found.log_evidence, whole.log_evidence, rtol=1e-10, atol=0.0)
    assert_close(found.mode["W"].abs(), whole.mode["W"].abs(), atol=1e-6)  # columns turn and mirror at no cost
    on = whole.hyperparameters["mixing"] > 0  # what is pruned keeps the model's own values, which the first rows set
    for name, value in whole.hyperparameters.items():
        kept = on if value.dim() and len(value) == len(on) else slice(None)
        assert_close(found.hyperparameters[name][kept], value[kept])


ANALYSERS = mppca(3, 1, noise=DiagonalNoise())


@pytest.mark.filterwarnings("ignore:EvidenceEM. ran out of steps")
@pytest.mark.parametrize(
    ("model", "cut"), [(mppca(4, 2), [1, 0, 139, 100]), (mppca(4, 2), [48] * 5), (ANALYSERS, [90, 150])]
)
def test_any_cut_gives_the_fit_of_all_rows(model: Any, cut: list[int]) -> None:
    Y = planes()
    engine = EvidenceEM(model, start=Start(restarts=2), stop=FEW)
    same(engine.run_chunks([(y,) for y in Y.split(cut)]), engine.run(Y))


@pytest.mark.filterwarnings("ignore:EvidenceEM. ran out of steps")
def test_columns_of_their_own_gaps_and_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts on a sample of the rows, chosen by their numbers; rows with gaps."""
    monkeypatch.setattr(fit, "SAMPLE", 120)
    monkeypatch.setattr(fit, "CANDIDATES", 60)
    Y = planes()
    engine = EvidenceEM(mppca(3, 3, alpha=PerColumn()), start=Start(restarts=2), stop=FEW)
    same(engine.run_chunks(Slices(Y, size=64)), engine.run(Y))
    Y[torch.arange(0, 240, 7), torch.arange(0, 240, 7) % 5] = torch.nan
    gappy = EvidenceEM(marginalised(mppca(3, 1)), start=Start(restarts=2), stop=FEW)
    same(gappy.run_chunks(Slices(Y, size=64)), gappy.run(Y))


def test_subspaces_are_iterated_by_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "DENSE", 2)
    Y = planes()
    engine = EvidenceEM(mppca(3, 2), start=Start(restarts=2), stop=QUIET)
    same(engine.run_chunks(Slices(Y, size=100)), engine.run(Y))


@pytest.mark.filterwarnings("ignore:EvidenceEM. ran out of steps")
def test_nothing_is_kept() -> None:
    Y = planes()
    found = EvidenceEM(mppca(3, 1), start=Start(restarts=2), stop=FEW).run_chunks(Slices(Y, size=64))
    assert isinstance(found, MPPCAPosterior)
    assert found.log_prob(Y).shape == (240,) and found.reconstruct(Y[:3]).shape == (3, 5)
    for asks in (found.log_prob, found.log_weights, found.reconstruct, partial(found.save, "nowhere")):
        with pytest.raises(BadInput, match="came in chunks"):
            asks()
    found.summary()
    assert "coordinates" in found.structure


@pytest.mark.parametrize(
    ("chunks", "error", "message"),
    [
        (lambda Y: [(Y,), (torch.where(Y > 8.0, torch.nan, Y),)], BadInput, "Y, shape .*, 221 nan"),
        (lambda Y: [(Y,), (Y[:, :3],)], BadInput, "chunk 1 is"),
        (lambda Y: [(Y, Y)], BadInput, r"chunk 0: it has 2 arguments .*expected those of the model"),
        (lambda Y: [(Y[:0],)], BadInput, "hold no rows"),
    ],
)
def test_what_is_refused(chunks: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EvidenceEM(mppca(2, 1), stop=QUIET).run_chunks(chunks(planes()))


def test_programs_of_ones_own_take_all_rows() -> None:
    with pytest.raises(UnsupportedModel, match="says what its rows are"):
        EvidenceEM(lambda Y: mppca(2, 1)(Y), stop=QUIET).run_chunks([(planes(),)])


@pytest.mark.parametrize("gappy", [False, True])
def test_a_process_without_rows_adds_nothing(gappy: bool) -> None:
    """All sums over no rows are zero, of the shapes that sums have."""
    whole = EvidenceEM(mppca(3, 2), start=Start(restarts=2), stop=QUIET).run(planes())
    assert isinstance(whole, MPPCAPosterior) and whole.analysers is not None
    Y, analysers = planes(), whole.analysers
    if gappy:
        Y[0, 0] = torch.nan
    rows = Observations(Rows((), Y[:0], (0,)), gappy)
    sums, like = expectation.e_step_of_all(rows, analysers), expectation.e_step(Y, analysers)
    assert not any(bool(x.any()) for x in vars(sums).values())
    assert [x.shape for x in vars(sums).values()] == [x.shape for x in vars(like).values()]
    if gappy:
        assert not bool(curvature._of_gaps(Y[:0], analysers).any())
        return
    B = analysers.whitener[0]
    spread = curvature._spread(Y[:0], analysers, analysers.beta[0].diag_embed() - B.mT @ B)
    products = (start._image(Y[:0], analysers, basis) for basis in (None, analysers.W))
    assert not any(bool(x.any()) for found in (spread, *products) for x in vars(found).values())
