"""The network on rows in chunks: the fit of all rows at once, however they are cut, none of them kept."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_evidence import BadInput, OverlapEM, Start, Stop
from pyro_evidence.models import prbf as kernels
from pyro_evidence.models.prbf import PRBF, Kernels, prbf
from pyro_evidence.prbf import KMeans
from pyro_evidence.prbf import data as prbf_data
from pyro_evidence.prbf.posterior import PRBFPosterior
from pyro_evidence.prbf.updates import Ascent, Update, em, exact_m_step, prbf2001_update

assert_close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
CUTS = [[300], [1, 299], [0, 120, 0, 180, 0], [17] * 17 + [11]]
COUNTED = Stop(progress=False, tolerance=0.0, num_steps=12)


def data(num: int = 300) -> tuple[Tensor, Tensor]:
    """Three overlapping classes; every seventh label is unknown."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (num,), generator=generator)
    X = 1.5 * torch.randn(3, 2, generator=generator)[labels] + torch.randn(num, 2, generator=generator)
    return X.double() + 20.0, torch.where(torch.arange(num) % 7 == 3, -1, labels)


def network(kind: Kernels | None = None) -> PRBF:
    return prbf(4, num_classes=3, kernels=kind or kernels.Diagonal())


def same(found: PRBFPosterior, whole: PRBFPosterior) -> None:
    assert_close(torch.tensor(found.objectives), torch.tensor(whole.objectives))
    for name in ("mixing", "loc", "counts", "overlap", "restarts"):
        assert_close(getattr(found, name), getattr(whole, name))
    assert_close(found.network.covariance, whole.network.covariance)
    assert found.status == whole.status and found.rejections == whole.rejections


def cut(X: Tensor, labels: Tensor, sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(X.split(sizes), labels.split(sizes), strict=True))


UPDATES = [(Ascent(warm_up=5), CUTS[0]), (Ascent(warm_up=5), CUTS[1]), (em, CUTS[2]), (exact_m_step, CUTS[2])]


@pytest.mark.parametrize(("updates", "sizes"), [*UPDATES, (prbf2001_update, CUTS[3])])
def test_any_cut_gives_the_fit_of_all_rows(updates: Update, sizes: list[int]) -> None:
    engine = OverlapEM(network(), update=updates, start=Start(restarts=2), stop=COUNTED)
    same(engine.run_chunks(cut(*data(), sizes)), engine.run(*data()))


@pytest.mark.parametrize("kind", [kernels.Diagonal(), kernels.Full()])
def test_a_start_sees_a_sample_of_many_rows_in_either_way(monkeypatch: pytest.MonkeyPatch, kind: Kernels) -> None:
    """A sample of each class, and a small class whole; class shares and covariance are those of all."""
    monkeypatch.setattr("pyro_evidence.prbf.data.SAMPLE", 100)
    seen = []

    def initial(training: Any, start: Start) -> Any:
        seen.append(training)
        return KMeans()(training, start)

    engine = OverlapEM(network(kind), initial=initial, stop=COUNTED)
    X, labels = data()
    same(engine.run_chunks(cut(X, labels, [70, 230])), engine.run(X, labels))
    first, second = seen
    assert 60 < len(first.X) < 140 and torch.equal(first.X, second.X) and torch.equal(first.labels, second.labels)
    known = torch.bincount(labels[labels >= 0]).double()
    assert_close(first.class_prior, known / known.sum())
    assert_close(first.totals.scatter, torch.cov(X.mT, correction=0))


def test_to_convergence_without_rows_that_are_kept() -> None:
    X, labels = data()
    engine = OverlapEM(network(), stop=Stop(progress=False, tolerance=1e-6, gradient_tolerance=1.0))
    found, whole = engine.run_chunks(cut(X, labels, [100] * 3)), engine.run(X, labels)
    assert found.status == "converged" and found.training is None and found.covariance_gain is None
    assert_close(found.log_proba(X), whole.log_proba(X))


def test_a_fit_that_was_stopped_goes_on(tmp_path: Path) -> None:
    path, chunks = tmp_path / "fit.ckpt", cut(*data(), [100] * 3)
    whole = OverlapEM(network(), stop=COUNTED).run_chunks(chunks)
    OverlapEM(network(), stop=replace(COUNTED, num_steps=5, checkpoint=path, checkpoint_interval=0.0)).run_chunks(
        chunks
    )
    found = OverlapEM(network(), stop=COUNTED).resume(path).run_chunks(chunks)
    assert found.objectives == whole.objectives and torch.equal(found.loc, whole.loc)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        (lambda X, y: iter([(X, y)]), "gone through only once"),
        (lambda X, y: [(X[:0], y[:0])], "hold no rows"),
        (lambda X, y: [(X, y), (X[:, :1], y)], "chunk 1 is"),
        (lambda X, y: [(X, y), (X.log() * torch.nan, y)], r"chunk 1: X\[0, 0\] is nan"),
        (lambda X, y: [(X, y), (X, y + 1)], r"chunk 1: labels\[.*\] is 3; expected whole numbers from 0 to 2"),
        (lambda X, y: [(X, y.clamp(max=1))], r"no row of X has label \[2\]"),
        (lambda X, y: [(torch.ones_like(X), y)], "all rows of X are the same"),
        (lambda X, y: [(X, y, y)], "chunk 0 has 3 arguments"),
    ],
)
def test_what_is_refused(chunks: Callable[[Tensor, Tensor], Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        OverlapEM(network(), stop=COUNTED).run_chunks(chunks(*data()))


def test_the_sample_of_a_start_is_stated() -> None:
    assert prbf_data.SAMPLE == 2**14
