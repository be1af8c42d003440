"""The loop of evidence-regularised EM over a batch of restarts: rounds, failures contained, deletion, choice."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pyro_evidence.infer.iterate import Fit, Status, Stop, iterate
from pyro_evidence.ops import mixture_evidence, mixture_mode, mixture_rows
from pyro_evidence.ops.mixture import Mixture, MixtureData
from pyro_evidence.ops.mixture_evidence import MixtureCurvature
from pyro_evidence.ops.mixture_updates import EStep, Ties, Unregularised, Update, estep, pruned


@dataclass(frozen=True)
class Batch:
    """One iterate of all restarts.  Built by :func:`first` and :func:`advance`."""

    at: EStep
    update: Update
    failed: Tensor  # (R,) bool: rows that stay at their last good state
    moved: float  # largest change of a log hyperparameter in the last round

    @cached_property
    def log_evidence(self) -> Tensor:
        """Laplace log evidence at the current weights, in the engine's curvature and units, nats, ``(R,)``."""
        log_joint = self.at.stats.log_likelihood + mixture_evidence.log_prior(self.at.mixture)
        found = mixture_evidence.log_evidence(log_joint, self.at.A, self.at.mixture.alpha)
        return torch.where(self.failed | ~found.isfinite(), -torch.inf, found)

    @property
    def objective(self) -> float:
        """Log evidence of the restart that has most."""
        best = float(self.log_evidence.max())
        return best if best > -torch.inf else float(self.at.stats.log_likelihood.max())

    @property
    def gradient_norm(self) -> float:
        """How far the last round moved, in units of log precision: zero at a fixed point."""
        return self.moved

    @property
    def verdict(self) -> Status | None:
        """No further step when every restart has failed."""
        return Status.FAILED if bool(self.failed.all()) else None


def first(data: MixtureData, mixture: Mixture, ties: Ties, curvature: MixtureCurvature, update: Update) -> Batch:
    """The batch at its start."""
    at = estep(data, mixture, ties, curvature)
    failed = torch.zeros(len(mixture.w), dtype=torch.bool, device=mixture.w.device)
    return Batch(at, update, failed, torch.inf)


def advance(batch: Batch) -> Batch:
    """One round; rows that would leave the finite numbers stay where they are."""
    old = batch.at.mixture
    new = batch.update(batch.at)
    failed = batch.failed | ~mixture_rows.is_sound(new)
    new = mixture_rows.chosen(failed, old, new) if bool(failed.any()) else new
    moved = _moved(old, new)
    new, ties = _packed(new, batch.at.ties)
    return Batch(estep(batch.at.data, new, ties, batch.at.curvature), batch.update, failed, moved)


def _packed(mixture: Mixture, ties: Ties) -> tuple[Mixture, Ties]:
    """Half of the components pruned in every restart? Then go on without them."""
    num = int(mixture.active.sum(-1).max())
    if num > mixture.w.shape[1] // 2 or not mixture_rows.is_exchangeable(ties, mixture.loc):
        return mixture, ties
    return mixture_rows.packed(mixture, ties)


def _moved(old: Mixture, new: Mixture) -> float:
    parts = [(new.alpha / old.alpha).log(), (new.log_mixing.exp() - old.log_mixing.exp())]
    parts.append((new.noise_diagonal / old.noise_diagonal).log())
    return max(float(p.abs().max()) for p in parts)


def rounds(batch: Batch, update: Update, num_steps: int) -> Batch:
    """A fixed number of rounds of ``update``."""
    batch = replace(batch, update=update)
    for _ in range(num_steps):
        batch = advance(batch)
    return batch


def em(batch: Batch, update: Update, warm_up: int, stop: Stop) -> Fit[Batch]:
    """Unregularised warm-up, with the gamma prior of ``update`` if it has one, then ``update`` until ``stop``."""
    return iterate(advance, warmed(batch, update, warm_up), stop, "EvidenceEM")


def warmed(batch: Batch, update: Update, num_steps: int) -> Batch:
    """The batch after the warm-up, ready for ``update``."""
    warm = rounds(batch, Unregularised(rho=getattr(update, "rho", 0.0)), num_steps)
    return replace(warm, update=update, moved=torch.inf)


def occam(at: EStep) -> tuple[Tensor, Mixture]:
    """Occam-corrected log evidence with the full Hessian, and the modes it was taken at; -inf where there is none."""
    mode = mixture_mode.find_mode(at.data, at.mixture)
    found = mixture_mode.log_evidence_occam(estep(at.data, mode, at.ties, mixture_evidence.full))
    return torch.where(found.isfinite(), found, -torch.inf), mode


Deletion = Callable[[Batch], Batch]


@dataclass(frozen=True)
class GreedyDeletion:
    """Leave out one component, re-fit, keep the smaller mixture if its Occam-corrected log evidence is higher; repeat.

    All candidates of all restarts are one batch.  It finds the truth when the truth is a small mixture; where it is
    not, the smaller mixture has the slightly lower test density: pass ``deletion=None`` then.

    :ivar num_steps: rounds of re-fitting.
    """

    num_steps: int = 25

    def __call__(self, batch: Batch) -> Batch:
        """The batch after all deletions that gain."""
        if mixture_rows.is_exchangeable(batch.at.ties, batch.at.mixture.loc):
            mixture, ties = mixture_rows.packed(batch.at.mixture, batch.at.ties)
            batch = replace(batch, at=estep(batch.at.data, mixture, ties, batch.at.curvature))
        height, _ = occam(batch.at)
        gained = ~batch.failed
        while bool(gained.any()):
            batch, height, gained = self._once(batch, height, gained)
        return batch

    def _once(self, batch: Batch, height: Tensor, alive: Tensor) -> tuple[Batch, Tensor, Tensor]:
        mixture = batch.at.mixture
        able = mixture.active & alive.unsqueeze(-1) & (mixture.active.sum(-1, keepdim=True) > 1)
        rows, out = able.nonzero().unbind(-1)
        if not len(rows):
            return batch, height, torch.zeros_like(alive)
        keep = mixture.active[rows].scatter(-1, out.unsqueeze(-1), False)
        small = pruned(mixture_rows.row(mixture, rows), keep)
        begun = first(_rows_of(batch.at.data, rows), small, batch.at.ties, batch.at.curvature, batch.update)
        tried = rounds(begun, batch.update, self.num_steps)
        heights = torch.where(tried.failed, -torch.inf, occam(tried.at)[0])
        return _adopted(batch, height, (rows, heights, tried.at.mixture))


def _adopted(batch: Batch, height: Tensor, tried: tuple[Tensor, Tensor, Mixture]) -> tuple[Batch, Tensor, Tensor]:
    """Each restart's best candidate where it is higher."""
    rows, heights, mixtures = tried
    table = torch.where(rows == torch.arange(len(height)).unsqueeze(-1), heights, -torch.inf)  # (R, candidates)
    best, which = table.max(-1)
    gained = best > height
    mixtures = mixture_rows.padded(mixtures, batch.at.mixture)
    mixture = mixture_rows.chosen(gained, mixture_rows.row(mixtures, which), batch.at.mixture)
    at = estep(batch.at.data, mixture, batch.at.ties, batch.at.curvature)
    return replace(batch, at=at), torch.where(gained, best, height), gained


def _rows_of(data: MixtureData, rows: Tensor) -> MixtureData:
    """The data of some rows, where each row has its own."""
    if data.Y.dim() == 2 and data.G.dim() == 2:
        return data
    parts = {f: getattr(data, f) for f in ("Y", "G", "features")}
    return replace(data, **{f: v[rows] if v.dim() == 3 else v for f, v in parts.items()})
