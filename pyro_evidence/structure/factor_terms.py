"""The terms of a log joint density, recorded in one run: as functions of the coordinates, and of a few sums of them.

Equal operations of many steps become one.  And where terms see very many coordinates through a few sums, of a field
that sums to zero or of centring in the model, each such sum is a coordinate of its own to the terms, and their second
derivatives in the coordinates and the sums are small matrices again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.numerics import batched
from pyro_evidence.numerics.derivatives import generic_directions, pullback
from pyro_evidence.numerics.recorded import Picked, Replay, StandIns, Unrecordable, replay
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.structure.dependencies import NARROW, Follow, Groups, Lost
from pyro_evidence.structure.factor_cells import FactorFamily, cells, families

MANY = 500  # operations of one run
SITES = 25  # with fewer terms, of any kind, there is no loop around them
GAIN = 2  # operations that become one, on average
MOST = 8  # sums that terms may see
NOTED = 64  # sums that may be met on the way


@dataclass(frozen=True)
class RecordedTerms:
    """The terms, made by :func:`terms_of_steps` and :func:`terms_of_sums`.

    :ivar B: of the sums ``z = B u + c`` that terms see, ``(r, D)``, and ``c``, ``(r,)``; ``r`` is 0 for steps.
    :ivar used: which of the sums that were met these are, ``(r,)``.
    """

    replay: Replay  # of coordinates, hyperparameters and the sums met
    sizes: tuple[int, ...]  # of the families
    B: Tensor
    c: Tensor
    used: Tensor
    num_met: int
    _kept: list[int | None] = field(default_factory=list, repr=False, compare=False)

    def appended(self, u: Tensor) -> Tensor:
        """Coordinates ``(..., D)`` and their sums, ``(..., D + r)``."""
        return torch.cat([u, u @ self.B.mT + self.c], -1)

    def families(self, seen: Tensor, theta: Tensor) -> tuple[Tensor, ...]:
        """The factors' values of each family, nats, ``(F,)`` each.

        :param seen: coordinates and sums, ``(D + r,)``.
        """
        return self.run(seen, theta)[: sum(self.sizes)].split(self.sizes)

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        """``log p(D, w | hyperparameters)`` of rows ``(R, D)``, nats, shape ``(R,)``."""
        if len(u) > 1 and not self._kept:
            with torch.enable_grad():
                self._kept.append(batched.bytes_per_row(self._one, u[0], theta if theta.dim() == 1 else theta[0]))
        row_bytes = self._kept[0] if len(u) > 1 else None  # what autograd keeps for each of many rows
        return batched.apply(self._one, (u, theta.expand(len(u), -1)), row_bytes, self._one)

    def _one(self, u: Tensor, theta: Tensor) -> Tensor:
        found = self.run(self.appended(u), theta) if self.num_met else self.run(u, theta)
        return found[: len(found) - self.num_met].sum()

    def run(self, seen: Tensor, theta: Tensor) -> Tensor:
        """All terms, those of the families first, and last the sums that were met, as the terms before them have it."""
        if not self.num_met:
            return self.replay(seen, theta)
        u, z = seen.split([self.B.shape[-1], len(self.B)])
        return self.replay(u, theta, z.new_zeros(self.num_met).index_put((self.used,), z))


def terms_of_steps(joint: LogJoint, families: Sequence[FactorFamily], u: Tensor, theta: Tensor) -> RecordedTerms | None:
    """The terms of all sites, those of the families first; None where nothing is gained, or the model branches.

    :param u: where the model was followed, ``(D,)``.
    """
    with_families = {member.name for family in families for member in family.members}

    def terms(u: Tensor, theta: Tensor) -> list[Tensor]:
        found = cells(joint, u, theta)
        own = [member.of(found) for family in families for member in family.members]
        return own + [x for name, x in found.items() if name not in with_families]

    if len(joint.latents.names) + len(joint.discrete) + len(joint.observed) < SITES:
        return None
    try:
        made = replay(terms, u, theta)
    except Unrecordable:
        return None
    none = torch.zeros(0, dtype=torch.long, device=u.device)
    sizes = tuple(len(family.index) for family in families)
    found = RecordedTerms(made, sizes, u.new_zeros(0, len(u)), u.new_zeros(0), none, 0)
    is_gain = made.num_operations >= max(MANY, GAIN * len(made.batches))
    return found if is_gain and _is_right(found, joint, u, theta) else None


class FollowSums(Follow):
    """A run in which the few results of sums over many coordinates count as coordinates themselves.

    :param origin: the flat coordinates.
    :param stand_ins: told of them.
    """

    def __init__(self, origin: Tensor, stand_ins: StandIns) -> None:
        super().__init__(origin)
        self.size: int = len(origin)
        self.num: int = 0
        self.stand_ins: StandIns = stand_ins

    def _ruled(self, packet: Any, args: Any, kwargs: Any, result: Any) -> Groups:
        few = isinstance(result, Tensor) and result.numel() <= MOST and self.num + result.numel() <= NOTED
        try:
            found = super()._ruled(packet, args, kwargs, result)
        except Lost:
            if not few:
                raise
            return self._met(result)
        return self._met(result) if few and sum(g.shape[-1] for g in found) > NARROW else found

    def _met(self, result: Tensor) -> Groups:
        number = self.num + torch.arange(result.numel(), device=result.device).reshape(result.shape)
        self.stand_ins.add(result, Picked(2, number))
        self.num += result.numel()
        return ((self.size + number).unsqueeze(-1),)


@dataclass(frozen=True)
class Met:
    """A recorded run: the terms' coordinates, and those sums that they see."""

    replay: Replay
    groups: Mapping[str, Groups]  # with sums numbered from D, those that no term sees left out
    shapes: Mapping[str, torch.Size]
    used: Tensor
    num: int


def terms_of_sums(joint: LogJoint, u: Tensor, theta: Tensor) -> tuple[RecordedTerms, tuple[FactorFamily, ...]] | None:
    """The sums that tie coordinates together, and the factors' families beside them; None where that is not all.

    :param u: where the model is followed, ``(D,)``.
    """
    try:
        found = _meet(joint, u, theta)
    except (Lost, Unrecordable):
        return None
    if found is None:
        return None
    own = families(found.groups, found.shapes, joint.observed)
    B, c = _straight(found, u, theta)
    value = RecordedTerms(found.replay, tuple(len(family.index) for family in own), B, c, found.used, found.num)
    return (value, own) if _is_right(value, joint, u, theta) else None


def _meet(joint: LogJoint, u: Tensor, theta: Tensor) -> Met | None:
    stand_ins, seen = StandIns(), dict[str, Any]()

    def terms(u: Tensor, theta: Tensor, z: Tensor) -> list[Tensor]:
        with FollowSums(u, stand_ins) as notes:
            found = cells(joint, u, theta)
        seen.update(notes=notes, found=found)
        groups = {name: notes.of(term) for name, term in found.items()}
        if any(sum(g.shape[-1] for g in gs) > NARROW for gs in groups.values()):
            raise notes.widest
        members = [m for family in families(groups, _shapes(found), joint.observed) for m in family.members]
        with_coordinates = {m.name for m in members}
        return [m.of(found) for m in members] + [x for n, x in found.items() if n not in with_coordinates]

    made = replay(terms, u, theta, u.new_zeros(NOTED), stand_ins=stand_ins)
    notes, found = seen["notes"], seen["found"]
    groups = {name: notes.of(term) for name, term in found.items()}
    every = torch.cat([torch.zeros(0, dtype=torch.long), *(g.reshape(-1) for gs in groups.values() for g in gs)])
    used = (every[every >= len(u)] - len(u)).unique()
    if not 0 < len(used) <= MOST:
        return None
    rank = torch.zeros(notes.num, dtype=torch.long).index_put((used,), torch.arange(len(used)))
    renumbered, D = dict[str, Groups](), len(u)
    for name, own in groups.items():
        met = [D + rank[(g - D).clamp(min=0)] for g in own]  # clamp: of coordinates that are no sums, not used
        renumbered[name] = tuple(torch.where(g >= D, sums, g) for g, sums in zip(own, met, strict=True))
    return Met(made, renumbered, _shapes(found), used, notes.num)


def _shapes(found: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: term.shape for name, term in found.items()}


def _straight(found: Met, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """``B`` ``(r, D)`` and ``c`` ``(r,)`` of the sums that terms see, if they are straight in the coordinates."""
    with torch.enable_grad():
        u, z = u.detach().clone().requires_grad_(), u.new_zeros(found.num).requires_grad_()
        value = found.replay(u, theta.detach(), z)[-found.num :][found.used]
        by_u, by_z = (torch.stack([pullback(v, x) for v in value]) for x in (u, z))
    inner = torch.eye(len(value)).to(by_z) - by_z[:, found.used]
    offset = value.detach() - by_u @ u.detach()
    return torch.linalg.solve(inner, by_u), torch.linalg.solve(inner, offset)


def _is_right(found: RecordedTerms, joint: LogJoint, u: Tensor, theta: Tensor) -> bool:
    """Whether terms and sums are the model's own, where it was followed and elsewhere, at other hyperparameters too."""
    moved = generic_directions(3, len(u) + len(theta), u)[2]
    places, other = torch.stack([u, u + 0.3 * moved[: len(u)]]), theta + 0.1 * moved[len(u) :]
    with torch.no_grad():
        value, expected = (density.log_joint(places, other) for density in (found, joint))
        seen = found.appended(places)
        met = [found.run(row, other)[-found.num_met :][found.used] for row in seen] if found.num_met else []
    right = ((value - expected).abs() <= joint.rounding * (1.0 + expected.abs())) | ~expected.isfinite()
    gaps = [(z - row[len(u) :]).abs() / (1.0 + z.abs()) for z, row in zip(met, seen, strict=False)]
    return bool(right.all()) and all(bool((gap <= joint.rounding).all()) for gap in gaps)
