"""Rows and components of a batch of mixtures: choosing, checking, leaving out, packing together."""

from dataclasses import replace

import torch
from torch import Tensor

from pyro_evidence.mixture.expectation import Mixture
from pyro_evidence.mixture.updates import Ties, pruned

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


def is_exchangeable(ties: Ties, loc: Tensor) -> bool:
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


def packed(mixture: Mixture, ties: Ties) -> tuple[Mixture, Ties]:
    """Components that are not pruned moved to the front and the rest cut off; for exchangeable components."""
    num = int(mixture.active.sum(-1).max())
    order = mixture.active.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :num]
    rows = torch.arange(len(order), device=order.device).unsqueeze(-1)
    smaller = mixture.rebuilt(lambda _, x: x[rows, order])
    return replace(smaller, loc=mixture.loc[:num]), _first_of(ties, num)


def _first_of(ties: Ties, num: int) -> Ties:
    alpha = (ties.alpha_group[:num], ties.alpha_ratio[:num])
    beta = (ties.beta_group[:num], ties.beta_ratio[:num])
    return Ties(*alpha, *beta, ties.alpha_free[:num], ties.beta_free[:num], ties.mixing_free)


def grown(ties: Ties, num: int) -> Ties:
    """Ties of ``num`` components, more or fewer, for exchangeable ones: what is shared stays shared.

    :param ties: of two components at least, or nobody knows what is shared.
    """
    if num <= len(ties.alpha_group):
        return _first_of(ties, num)

    def alike(x: Tensor) -> Tensor:
        return x[:1].expand(num, *x.shape[1:])

    alpha = _grown_group(ties.alpha_group, num), alike(ties.alpha_ratio)
    beta = _grown_group(ties.beta_group, num), alike(ties.beta_ratio)
    return Ties(*alpha, *beta, alike(ties.alpha_free), alike(ties.beta_free), ties.mixing_free)


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


def in_units(ties: Ties, unit: Tensor) -> Ties:
    """Ties with ratios where responses are measured in ``unit`` ``(m,)``, of geometric mean 1 within each group."""
    alpha = _centred(ties.alpha_ratio * unit.square().unsqueeze(-1), ties.alpha_group)
    return replace(ties, alpha_ratio=alpha, beta_ratio=_centred(ties.beta_ratio * unit.square(), ties.beta_group))


def _centred(ratio: Tensor, group: Tensor) -> Tensor:
    logs, size = ratio.log(), int(group.max()) + 1
    sums = logs.new_zeros(2, size).index_add(1, group.flatten(), torch.stack([logs, torch.ones_like(logs)]).flatten(1))
    return (logs - (sums[0] / sums[1])[group]).exp()
