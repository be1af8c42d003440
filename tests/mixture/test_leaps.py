"""Rounds that crawl, accelerated: leaps never lower the log evidence, and save passes over the data."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pyro_evidence import EvidenceEM, Start, Stop
from pyro_evidence.fitting import em
from pyro_evidence.fitting.em import PLAIN_ROUNDS, advance, extrapolated
from pyro_evidence.mixture import updates
from pyro_evidence.mixture.fit import MixtureRestarts, begin
from pyro_evidence.mixture.posterior import MixturePosterior
from pyro_evidence.models.mixture import DiagonalNoise, FullNoise, gaussian_mixture
from pyro_evidence.models.mppca import mppca
from pyro_evidence.mppca.fit import MPPCARestarts
from pyro_evidence.mppca.fit import begin as begin_planes
from pyro_evidence.program.log_joint import LogJoint


def overlapping(num: int = 2000, clusters: int = 3, columns: int = 2) -> Tensor:
    """Clusters whose centres are about as far from each other as they are wide."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(clusters, columns, generator=generator, dtype=torch.float64)
    noise = torch.randn(num, columns, generator=generator, dtype=torch.float64)
    return centres[torch.arange(num) % clusters] + noise


def on_the_way(noise: DiagonalNoise | FullNoise, num_rounds: int) -> MixtureRestarts:
    joint = LogJoint(gaussian_mixture(3, noise=noise), (overlapping(500),))
    task = begin(joint, EvidenceEM(joint.model, start=Start(restarts=4)))
    return em.repeated(task.batch, num_rounds)


def planes_on_the_way(num_rounds: int) -> MPPCARestarts:
    Y = overlapping(400, 2, 4) @ torch.diag(torch.tensor([3.0, 1.0, 0.3, 0.3], dtype=torch.float64))
    task = begin_planes(LogJoint(mppca(2, 1), (Y,)), EvidenceEM(mppca(2, 1), start=Start(restarts=3)))
    return em.repeated(task.batch, num_rounds)


@pytest.mark.parametrize("kind", [DiagonalNoise(), FullNoise(), None])
@pytest.mark.parametrize("num_rounds", [5, 40])
def test_a_row_leaps_only_where_that_is_higher_and_else_has_two_rounds(
    kind: DiagonalNoise | FullNoise | None, num_rounds: int
) -> None:
    batch = planes_on_the_way(num_rounds) if kind is None else on_the_way(kind, num_rounds)
    middle = advance(batch)
    twice, found = advance(middle), extrapolated(batch)
    plain = torch.tensor([torch.equal(a, b) for a, b in zip(_first(found), _first(twice), strict=True)])
    higher = found.log_evidence >= torch.maximum(batch.log_evidence, middle.log_evidence)
    assert bool((plain | higher).all()) and not bool(plain.all()), "no row leaps"
    assert found.num_rounds == twice.num_rounds and not bool(found.failed.any())


def _first(batch: MixtureRestarts | MPPCARestarts) -> Tensor:
    return batch.parameters.w if isinstance(batch, MixtureRestarts) else batch.parameters.mu


def test_a_leap_out_of_the_finite_numbers_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = on_the_way(DiagonalNoise(), 5)
    monkeypatch.setattr(MixtureRestarts, "ahead", lambda self, before, after: replace(after, w=after.w * torch.nan))
    assert torch.equal(extrapolated(batch).parameters.w, advance(advance(batch)).parameters.w)


def passes(monkeypatch: pytest.MonkeyPatch, slowly_converging: int) -> tuple[MixturePosterior, int]:
    count, reached = [0], MixtureRestarts.reached
    monkeypatch.setattr(em, "PLAIN_ROUNDS", slowly_converging)

    def counted(self: MixtureRestarts, parameters: updates.Mixture) -> MixtureRestarts:
        count[0] += 1
        return reached(self, parameters)

    with monkeypatch.context() as patched:
        patched.setattr(MixtureRestarts, "reached", counted)
        stop = Stop(tolerance=1e-8, gradient_tolerance=1e-4, num_steps=2000, progress=False)
        engine = EvidenceEM(gaussian_mixture(3), start=Start(restarts=1), deletion=None, stop=stop)
        found = engine.run(overlapping())
    assert isinstance(found, MixturePosterior)
    return found, count[0]


def test_leaps_end_where_rounds_do_with_half_of_the_passes_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, most = passes(monkeypatch, 10**9)
    found, num = passes(monkeypatch, PLAIN_ROUNDS)
    assert num < 0.5 * most, (num, most)
    assert float(found.log_evidence) > float(plain.log_evidence) - 1e-3
    falls = torch.tensor(found.log_evidences).diff().clamp(max=0.0)
    assert float(falls.sum()) > -1e-3


def test_a_number_of_rounds_that_was_asked_for_is_of_plain_ones() -> None:
    def ended(num: int) -> float:
        stop = Stop(tolerance=0.0, num_steps=num, progress=False)
        engine = EvidenceEM(gaussian_mixture(3), start=Start(restarts=1), deletion=None, stop=stop)
        return engine.run(overlapping(300)).log_evidences[-1]  # type: ignore[attr-defined]

    joint = LogJoint(gaussian_mixture(3), (overlapping(300),))
    task = begin(joint, EvidenceEM(joint.model, start=Start(restarts=1)))
    after = em.warmed(task.batch, 10)
    plain = em.repeated(after, 40).objective - float(task.jacobian)
    assert ended(40) == pytest.approx(plain, rel=1e-12)
