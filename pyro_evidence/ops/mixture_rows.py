"""Rows and components of a batch of mixtures: choosing, checking, leaving out, packing together."""

from dataclasses import replace

import torch
from torch import Tensor

from pyro_evidence.ops.mixture import Mixture
from pyro_evidence.ops.mixture_updates import Ties, pruned

FIELDS = ("w", "noise", "log_mixing", "alpha")


def row(mixture: Mixture, index: Tensor) -> Mixture:
    """Some rows of a batch of mixtures."""
    return Mixture(*(getattr(mixture, f)[index] for f in FIELDS), mixture.loc)


def chosen(take: Tensor, a: Mixture, b: Mixture) -> Mixture:
    """Rows of ``a`` where ``take`` ``(R,)``, else of ``b``."""

    def pick(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(take.reshape(-1, *[1] * (x.dim() - 1)), x, y)

    parts = (pick(getattr(a, f), getattr(b, f)) for f in FIELDS)
    return Mixture(*parts, a.loc)


def is_sound(mixture: Mixture) -> Tensor:
    """Rows whose numbers are finite and whose precisions are positive, shape ``(R,)`` bool."""
    noise = mixture.noise_diagonal
    parts = [mixture.w.isfinite(), noise.isfinite() & (noise > 0), mixture.alpha.isfinite() & (mixture.alpha > 0)]
    return torch.stack([p.flatten(1).all(-1) for p in parts]).all(0) & ~mixture.log_mixing.isnan().any(-1)


def is_exchangeable(ties: Ties, loc: Tensor) -> bool:
    """Whether components differ in nothing but their number, so that any order of them is as good."""
    same = (loc, ties.alpha_ratio, ties.beta_ratio, ties.alpha_free, ties.beta_free)
    alike = all(bool((x == x[:1]).all()) for x in same)
    return alike and _same_pattern(ties.alpha_group) and _same_pattern(ties.beta_group)


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
    parts = (getattr(mixture, f)[rows, order] for f in FIELDS)
    cut = {f: v[:num] if isinstance(v, Tensor) else v for f, v in vars(ties).items()}
    return Mixture(*parts, mixture.loc[:num]), Ties(**cut)


def padded(mixture: Mixture, like: Mixture) -> Mixture:
    """The mixture with pruned components appended, until it has as many as ``like``."""
    missing = like.w.shape[1] - mixture.w.shape[1]
    if not missing:
        return mixture
    rows = len(mixture.w)
    parts = [torch.cat([getattr(mixture, f), getattr(like, f)[:1, -missing:].expand(rows, *_tail(like, f, missing))], 1) for f in FIELDS]
    keep = torch.arange(like.w.shape[1]) < mixture.w.shape[1]
    whole = replace(Mixture(*parts, like.loc), log_mixing=torch.where(keep, parts[2], -torch.inf))
    return pruned(whole, whole.active)


def _tail(like: Mixture, field: str, missing: int) -> tuple[int, ...]:
    return (missing, *getattr(like, field).shape[2:])
