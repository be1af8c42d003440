"""The rounds of evidence-regularised EM for mixtures: what one leads to, the warm-up, a journal of errors."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, TypeVar

import torch
from torch import Tensor

from pyro_evidence.fitting import restarts
from pyro_evidence.fitting.iterate import Fit, Stop
from pyro_evidence.fitting.restarts import Phase, Restarts, advance, leap_together, repeated
from pyro_evidence.mixture import mode
from pyro_evidence.mixture.data import ResponseUnits
from pyro_evidence.mixture.evidence import MixtureCurvature
from pyro_evidence.mixture.expectation import Mixture, MixtureData, e_step, rows_of
from pyro_evidence.mixture.mode import Modes
from pyro_evidence.mixture.updates import EStep, SharedParameters, Unregularised, Update, estep, pruned
from pyro_evidence.settings import check_result

ALIKE = 1e-5  # relative: what counts as the same prior mean or ratio, those of models in float32 included


def change(old: Mixture, new: Mixture) -> Tensor:
    """Largest change of a log precision or of a share, shape ``(R,)``; not finite where ``new`` is no mixture."""
    ratio = torch.cat([(new.alpha / old.alpha).flatten(1), (new.noise_diagonal / old.noise_diagonal).flatten(1)], -1)
    shares = (new.log_mixing.exp() - old.log_mixing.exp()).abs().amax(-1)
    nothing = 0.0 * new.w.flatten(1).sum(-1)  # nan where a weight is not finite
    return torch.maximum(ratio.log().abs().amax(-1), shares) + nothing


def is_sound(mixture: Mixture) -> Tensor:
    """Rows whose numbers are finite and whose precisions are positive, shape ``(R,)`` bool."""
    return change(mixture, mixture).isfinite()


def complaint(mixture: Mixture, index: int) -> str:
    """What is wrong with one row, in words."""
    logs = (mixture.noise_diagonal.log(), mixture.alpha.log(), mixture.log_mixing.unsqueeze(-1))
    names = ("weights", "noise precisions", "prior precisions", "mixing")
    on = mixture.log_mixing[index] != -torch.inf  # nan is no pruned component
    wrong = [on & ~x[index].flatten(1).isfinite().all(-1) for x in (mixture.w, *logs)]
    bad = [f"{name} of component {int(w.int().argmax())}" for name, w in zip(names, wrong, strict=True) if w.any()]
    return f"{', '.join(bad) or 'the log likelihood'} left the finite numbers, or the positive ones"


def is_exchangeable(ties: SharedParameters, loc: Tensor) -> bool:
    """Whether components differ in nothing but their number, so that any order of them is as good."""
    same = (loc, ties.alpha_ratio, ties.beta_ratio, ties.alpha_free, ties.beta_free)
    alike = all(bool(((x - x[:1]).abs() <= ALIKE * (1.0 + x[:1].abs())).all()) for x in map(_numbers, same))
    return alike and _same_pattern(ties.alpha_group) and _same_pattern(ties.beta_group)


def _numbers(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.double()


def _same_pattern(group: Tensor) -> bool:
    """Groups shared by all components in the same way, or each component's own in the same way."""
    offset = group.flatten(1)[:, :1]
    own = group - offset.reshape(-1, *[1] * (group.dim() - 1))
    size = int(group[0].max() - group[0].min()) + 1
    steps = offset.flatten().diff()
    return bool((group == group[:1]).all()) or bool((own == own[:1]).all() and (steps >= size).all())


def packed(mixture: Mixture, ties: SharedParameters) -> tuple[Mixture, SharedParameters]:
    """Components that are not pruned moved to the front and the rest cut off; for exchangeable components."""
    num = int(mixture.active.sum(-1).max())
    order = mixture.active.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :num]
    rows = torch.arange(len(order), device=order.device).unsqueeze(-1)
    smaller = mixture.rebuilt(lambda _, x: x[rows, order])
    return replace(smaller, loc=mixture.loc[:num]), _first_of(ties, num)


def _first_of(ties: SharedParameters, num: int) -> SharedParameters:
    alpha = (ties.alpha_group[:num], ties.alpha_ratio[:num])
    beta = (ties.beta_group[:num], ties.beta_ratio[:num])
    return SharedParameters(*alpha, *beta, ties.alpha_free[:num], ties.beta_free[:num], ties.mixing_free)


def grown(ties: SharedParameters, num: int) -> SharedParameters:
    """Ties of ``num`` components, more or fewer, for exchangeable ones: what is shared stays shared.

    :param ties: of two components at least, or nobody knows what is shared.
    """
    if num <= len(ties.alpha_group):
        return _first_of(ties, num)

    def alike(x: Tensor) -> Tensor:
        return x[:1].expand(num, *x.shape[1:])

    alpha = _grown_group(ties.alpha_group, num), alike(ties.alpha_ratio)
    beta = _grown_group(ties.beta_group, num), alike(ties.beta_ratio)
    return SharedParameters(*alpha, *beta, alike(ties.alpha_free), alike(ties.beta_free), ties.mixing_free)


def _grown_group(group: Tensor, num: int) -> Tensor:
    more = num - len(group)
    if bool((group == group[:1]).all()):
        return group[:1].expand(num, *group.shape[1:])
    size = int(group[-1].max() - group[-1].min()) + 1
    steps = 1 + torch.arange(more, device=group.device)
    return torch.cat([group, group[-1:] + size * steps.reshape(-1, *[1] * (group.dim() - 1))])


def padded(mixture: Mixture, like: Mixture) -> Mixture:
    """The mixture with pruned components appended, until it has as many as ``like``."""
    missing = like.w.shape[1] - mixture.w.shape[1]
    if not missing:
        return mixture

    def longer(field: str, x: Tensor) -> Tensor:
        more = getattr(like, field)[:1, -missing:]
        return torch.cat([x, more.expand(len(x), *more.shape[1:])], 1)

    keep = torch.arange(like.w.shape[1], device=like.w.device) < mixture.w.shape[1]
    whole = replace(mixture.rebuilt(longer), loc=like.loc)
    return pruned(whole, keep & whole.active)


def in_units(ties: SharedParameters, unit: Tensor) -> SharedParameters:
    """Ties with ratios where responses are measured in ``unit`` ``(m,)``, of geometric mean 1 within each group."""
    alpha = _centred(ties.alpha_ratio * unit.square().unsqueeze(-1), ties.alpha_group)
    return replace(ties, alpha_ratio=alpha, beta_ratio=_centred(ties.beta_ratio * unit.square(), ties.beta_group))


def _centred(ratio: Tensor, group: Tensor) -> Tensor:
    logs, size = ratio.log(), int(group.max()) + 1
    sums = logs.new_zeros(2, size).index_add(1, group.flatten(), torch.stack([logs, torch.ones_like(logs)]).flatten(1))
    return (logs - (sums[0] / sums[1])[group]).exp()


SETTLED = 1e-3  # change of every log precision and share in one round, below which rounds that only compare end


@dataclass(frozen=True)
class MixtureRestarts(Restarts):
    """One iterate of all restarts.  Built by :func:`first` and :func:`~pyro_evidence.fitting.restarts.advance`."""

    expected: EStep
    update: Update

    @property
    def parameters(self) -> Mixture:
        return self.expected.mixture

    @property
    def log_likelihood(self) -> Tensor:
        return self.expected.stats.log_likelihood

    @cached_property
    def log_evidence(self) -> Tensor:
        """Laplace log evidence at the current weights, in the engine's curvature and units, nats, ``(R,)``."""
        found = self.expected.log_evidence
        return torch.where(self.failed | ~found.isfinite(), -torch.inf, found)

    @cached_property
    def occam(self) -> Tensor:
        """Log evidence with what integrating the hyperparameters out takes from it; ``(R,)``."""
        found = self.log_evidence + mode.occam_factor(self.expected)
        return torch.where(found.isfinite(), found, -torch.inf)

    @cached_property
    def modes(self) -> Modes:
        """Every restart's mode at its hyperparameters, with the full Hessian where it may be the highest."""
        return mode.modes(self.expected)

    def proposed(self) -> Mixture:
        return check_result(
            "update", self.update(self.expected), Mixture, "a Mixture, such as husmeier2000_update gives"
        )

    def reached(self, parameters: Mixture) -> "MixtureRestarts":
        """With an E-step there, without the components that are pruned in every restart."""
        old = self.expected
        new, ties = (parameters, old.ties) if parameters.all_active else _packed(parameters, old.ties)
        return replace(self, expected=estep(old.data, new, ties, old.curvature))

    def change_to(self, parameters: Mixture) -> Tensor:
        return change(self.parameters, parameters)

    def ahead(self, before: Mixture, after: Mixture) -> Mixture:
        """Where three rounds lead; what is held fixed stays."""
        return _ahead(before, self.parameters, after)

    def complaint(self, parameters: Mixture, row: int) -> str:
        return complaint(parameters, row)


def _ahead(before: Mixture, here: Mixture, after: Mixture) -> Mixture:
    """Where three iterates lead; rows in which a component was put out on the way are the last of them."""
    if not before.w.shape == here.w.shape == after.w.shape:
        return after
    same = (before.active == here.active).all(-1) & (here.active == after.active).all(-1)
    found = _placed(after, *leap_together(*map(_coordinates, (before, here, after))))
    return found.where(same, after)


def _coordinates(mixture: Mixture) -> tuple[Tensor, ...]:
    """Weights, noise precisions, prior precisions and shares without bounds, rows in front."""
    noise = mixture.noise
    noise = noise.log() if noise.dim() == 3 else _log_diagonal(torch.linalg.cholesky_ex(noise)[0])
    shares = torch.where(mixture.active, mixture.log_mixing, 0.0)
    return mixture.w, noise, mixture.alpha.log(), shares


def _log_diagonal(tril: Tensor) -> Tensor:
    return tril.diagonal_scatter(tril.diagonal(dim1=-2, dim2=-1).log(), dim1=-2, dim2=-1)


def _placed(like: Mixture, w: Tensor, noise: Tensor, log_alpha: Tensor, shares: Tensor) -> Mixture:
    """The mixture at these coordinates, with the components of ``like`` that are not pruned."""
    if noise.dim() == 4:
        tril = noise.diagonal_scatter(noise.diagonal(dim1=-2, dim2=-1).exp(), dim1=-2, dim2=-1)
        noise = tril @ tril.mT
    else:
        noise = noise.exp()
    log_mixing = torch.where(like.active, shares, -torch.inf).log_softmax(-1)
    return replace(like, w=w, noise=noise, alpha=log_alpha.exp(), log_mixing=log_mixing)


def first(
    data: MixtureData, mixture: Mixture, ties: SharedParameters, curvature: MixtureCurvature, update: Update
) -> MixtureRestarts:
    """The batch at its start."""
    expected = estep(data, mixture, ties, curvature)
    failed = torch.zeros(len(mixture.w), dtype=torch.bool, device=mixture.w.device)
    change = expected.stats.log_likelihood.new_full((len(failed),), torch.inf)
    return MixtureRestarts(expected, update, failed=failed, change=change)


def _packed(mixture: Mixture, ties: SharedParameters) -> tuple[Mixture, SharedParameters]:
    """A component pruned in every restart?  Then go on without it."""
    if bool(mixture.active.all(-1).any()) or not is_exchangeable(ties, mixture.loc):
        return mixture, ties
    return packed(mixture, ties)


def rounds(batch: MixtureRestarts, update: Update, num_steps: int) -> MixtureRestarts:
    """A fixed number of rounds of ``update``."""
    return repeated(replace(batch, update=update), num_steps)


def settled(batch: MixtureRestarts, num_steps: int) -> MixtureRestarts:
    """After rounds until nothing changes much any more, ``num_steps`` at most."""
    for _ in range(num_steps):
        batch = advance(batch)
        if float(batch.change.amax()) < SETTLED:
            break
    return batch


def warm_up(update: Update, num_rounds: int, step: restarts.Step[MixtureRestarts] = advance) -> Phase[MixtureRestarts]:
    """Unregularised rounds, with the gamma prior of ``update`` if it has one."""
    return Phase(_with(Unregularised(rho=getattr(update, "rho", 0.0))), step, num_rounds)


def em(
    batch: MixtureRestarts,
    update: Update,
    num_warm: int,
    stop: Stop,
    step: restarts.Step[MixtureRestarts] = advance,
) -> Fit[MixtureRestarts]:
    """The warm-up, then ``update`` until ``stop``."""
    return restarts.em(batch, [warm_up(update, num_warm, step)], _with(update), stop, step)


def warmed(batch: MixtureRestarts, update: Update, num_steps: int) -> MixtureRestarts:
    """The batch after the warm-up, ready for ``update``."""
    return restarts.ready(_with(update)(restarts.warmed(batch, [warm_up(update, num_steps)])))


def _with(update: Update) -> restarts.Step[MixtureRestarts]:
    return lambda batch: replace(batch, update=update)


def alone(batch: MixtureRestarts, row: Tensor) -> MixtureRestarts:
    """One restart ``(1,)`` of the batch, as a batch of its own."""
    mixture, ties = batch.expected.mixture[row], batch.expected.ties
    if is_exchangeable(ties, mixture.loc):
        mixture, ties = packed(mixture, ties)
    expected = estep(rows_of(batch.expected.data, row), mixture, ties, batch.expected.curvature)
    return replace(batch, expected=expected, failed=batch.failed[row], change=batch.change[row], failures={})


Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Journal(Generic[Entry]):
    """Rounds that write down what is seen of each, from the start on.

    :ivar look: what is written of the restarts as they stand.
    :ivar entries: one for each round.
    """

    look: Callable[[MixtureRestarts], Entry]
    entries: list[Entry] = field(default_factory=list)
    step: restarts.Step[MixtureRestarts] = advance

    def __call__(self, batch: MixtureRestarts) -> MixtureRestarts:
        after = self.step(batch)
        self.note(after)
        return after

    def note(self, batch: MixtureRestarts) -> None:
        """An entry for the restarts as they stand."""
        self.entries.append(self.look(batch))


@dataclass(frozen=True)
class Errors:
    """Minus the mean log density of the data that are fitted, and of others: nats per datum, the model's units.

    What it says of the data that are fitted costs nothing.

    :ivar units: of the model.
    :ivar unseen: data that are not fitted, in the units inside.
    """

    units: ResponseUnits
    unseen: tuple[MixtureData, ...] = ()

    def __call__(self, batch: MixtureRestarts) -> tuple[Tensor, ...]:
        """``(R,)`` for each of the data."""
        expected = batch.expected
        unseen = (self._nll(data, e_step(data, expected.mixture).log_likelihood) for data in self.unseen)
        return self._nll(expected.data, expected.stats.log_likelihood), *unseen

    def _nll(self, data: MixtureData, log_likelihood: Tensor) -> Tensor:
        return (self.units.log_jacobian(data) - log_likelihood) / data.num_data


def path_of(entries: list[tuple[Tensor, ...]], row: int) -> tuple[Tensor, ...]:
    """One restart's errors after each round, ``(S,)`` for each of the data.

    :param row: the restart; where the batch has shrunk to one row, that one is meant.
    """
    columns = zip(*entries, strict=True)
    return tuple(torch.stack([x[min(row, len(x) - 1)] for x in column]) for column in columns)
