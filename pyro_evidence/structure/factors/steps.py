"""Terms of models of very many sites, a site a step: equal operations of all steps as one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyro_evidence.numerics import batched
from pyro_evidence.numerics.derivatives import generic
from pyro_evidence.numerics.replay.side_by_side import Replay, replay
from pyro_evidence.numerics.replay.tape import Unrecordable
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.structure.factors.cells import cells
from pyro_evidence.structure.factors.families import Family

MANY = 500  # operations of one run
SITES = 25
GAIN = 2  # operations that become one, on average


@dataclass(frozen=True)
class Steps:
    """The terms of a log joint density by a few operations on many at a time; made by :func:`steps`."""

    replay: Replay
    sizes: tuple[int, ...]  # of the families
    _kept: list[int | None] = field(default_factory=list, repr=False, compare=False)

    def families(self, u: Tensor, theta: Tensor) -> tuple[Tensor, ...]:
        """The factors' values of each family, nats, ``(F,)`` each."""
        return self.replay(u, theta)[: sum(self.sizes)].split(self.sizes)

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        """``log p(D, w | hyperparameters)`` of rows ``(R, D)``, nats, shape ``(R,)``."""
        rows = (u, theta.expand(len(u), -1))
        return batched.apply(self._one, rows, self._row_bytes(u, theta) if len(u) > 1 else None, self._one)

    def _one(self, u: Tensor, theta: Tensor) -> Tensor:
        return self.replay(u, theta).sum()

    def _row_bytes(self, u: Tensor, theta: Tensor) -> int | None:
        """What autograd keeps for each of many rows; None where they are evaluated one by one."""
        if not self._kept:
            with torch.enable_grad():
                self._kept.append(batched.bytes_per_row(self._one, u[0], theta if theta.dim() == 1 else theta[0]))
        return self._kept[0]


def has_many_sites(joint: LogJoint) -> bool:
    """Whether so many sites are integrated that there may be a loop around them."""
    return len(joint.latents.names) >= SITES


def _has_many_terms(joint: LogJoint) -> bool:
    """Whether there may be a loop around its sites, of any kind."""
    return len(joint.latents.names) + len(joint.discrete) + len(joint.observed) >= SITES


def steps(joint: LogJoint, families: Sequence[Family], u: Tensor, theta: Tensor) -> Steps | None:
    """The terms of all sites, those of the families first; None where nothing is gained, or the model branches.

    :param u: where the model was followed, ``(D,)``.
    """
    with_families = {member.name for family in families for member in family.members}

    def terms(u: Tensor, theta: Tensor) -> list[Tensor]:
        found = cells(joint, u, theta)
        own = [member.of(found) for family in families for member in family.members]
        return own + [x for name, x in found.items() if name not in with_families]

    if not _has_many_terms(joint):
        return None
    try:
        made = replay(terms, u, theta)
    except Unrecordable:
        return None
    found = Steps(made, tuple(len(family.index) for family in families))
    return found if _is_gain(made) and _is_right(found, joint, u, theta) else None


def _is_gain(made: Replay) -> bool:
    return made.num_operations >= max(MANY, GAIN * len(made.batches))


def _is_right(found: Steps, joint: LogJoint, u: Tensor, theta: Tensor) -> bool:
    """Whether the log joint is the model's own, where it was followed and elsewhere."""
    moved = generic(3, len(u) + len(theta), u)[2]
    places = torch.stack([u, u + 0.3 * moved[: len(u)]])
    with torch.no_grad():
        pairs = [(f.log_joint(places, theta + 0.1 * moved[len(u) :])) for f in (found, joint)]
    limit = torch.finfo(joint.dtype).eps ** 0.64 * (1.0 + pairs[1].abs())
    return bool((((pairs[0] - pairs[1]).abs() <= limit) | ~pairs[1].isfinite()).all())
