"""The terms of a log joint density, recorded in one run: as functions of the coordinates, and of a few sums of them.

Equal operations of many steps become one.  And where terms see very many coordinates through a few sums, of a field
that sums to zero or of centring in the model, each such sum is a coordinate of its own to the terms, and their second
derivatives in the coordinates and the sums are small matrices again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.numerics import batched
from pyro_evidence.numerics.derivatives import Forward, generic_directions, pullbacks
from pyro_evidence.numerics.recorded import Picked, Replay, StandIns, Unrecordable, replay
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.structure.dependencies import NARROW, Follow, Groups, Lost
from pyro_evidence.structure.factor_cells import FactorFamily, cells, coordinate_table

MANY = 500  # operations of one run
SITES = 25  # with fewer terms, of any kind, there is no loop around them
GAIN = 2  # operations that become one, on average
MOST = 64  # sums that terms may see: the border that they are is as many dense columns
NOTED = 256  # sums that may be met on the way
MANY_IN_A_SUM = 16  # coordinates beyond which a sum counts as one: a factor of four values has 64 else, too many pairs


@dataclass(frozen=True, eq=False)
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
        return self.replay(u, theta, z.new_zeros(NOTED).index_put((self.used,), z))


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
        return self._met(result) if few and sum(g.shape[-1] for g in found) > MANY_IN_A_SUM else found

    def _met(self, result: Tensor) -> Groups:
        number = self.num + torch.arange(result.numel(), device=result.device).reshape(result.shape)
        self.stand_ins.add(result, Picked(2, number, result.dtype))
        self.num += result.numel()
        return ((self.size + number).unsqueeze(-1),)


Shapes = Mapping[str, torch.Size]  # of terms by name


def terms_of_sums(
    joint: LogJoint, u: Tensor, theta: Tensor
) -> tuple[RecordedTerms, Mapping[str, Groups], Shapes] | None:
    """The terms and the sums that tie coordinates together; None where that is not all.

    :param u: where the model is followed, ``(D,)``.
    :return: the terms, site by site; their coordinates, those sums that they see numbered from ``D``; their shapes.
    """
    stand_ins, seen = StandIns(), dict[str, Any]()

    def terms(u: Tensor, theta: Tensor, z: Tensor) -> list[Tensor]:
        with FollowSums(u, stand_ins) as notes:
            found = cells(joint, u, theta)
        groups = {name: notes.of(term) for name, term in found.items()}
        seen.update(num=notes.num, groups=groups, shapes={name: term.shape for name, term in found.items()})
        if any(sum(g.shape[-1] for g in gs) > NARROW for gs in groups.values()):
            raise notes.widest
        return list(found.values())

    try:
        made = replay(terms, u, theta, u.new_zeros(NOTED), stand_ins=stand_ins)
    except (Lost, Unrecordable):
        return None
    groups, num = seen["groups"], seen["num"]
    every = [g.reshape(-1) for gs in groups.values() for g in gs]
    used = (torch.cat([torch.zeros(0, dtype=torch.long, device=u.device), *every]) - len(u)).unique()
    used = used[used >= 0]
    if not 0 < len(used) <= MOST:
        return None
    with torch.enable_grad():  # the sums are straight in the coordinates, or :func:`_is_right` refuses them
        leaf, z = u.detach().clone().requires_grad_(), u.new_zeros(NOTED).requires_grad_()
        sums = made(leaf, theta.detach(), z)[-num:][used]
        by_u, by_z = map(torch.stack, zip(*(pullbacks(s, (leaf, z)) for s in sums), strict=True))
    inner = torch.eye(len(sums)).to(by_z) - by_z[:, used]
    B = torch.linalg.solve(inner, by_u)
    c = torch.linalg.solve(inner, sums.detach() - by_u @ u.detach())
    value = RecordedTerms(made, (), B, c, used, num)
    renumbered = {name: _renumbered(own, used, len(u)) for name, own in groups.items()}
    return (value, renumbered, seen["shapes"]) if _is_right(value, joint, u, theta) else None


def ordered(terms: RecordedTerms, shapes: Shapes, families: Sequence[FactorFamily]) -> RecordedTerms:
    """The terms with those of the families first, one family after the other."""
    size = len(terms.replay.order)
    places, start = dict[str, Tensor](), 0
    for name, shape in shapes.items():
        places[name], start = torch.arange(start, start + shape.numel()), start + shape.numel()
    parts = [member.of(places) for family in families for member in family.members]
    first = torch.cat(parts)
    rest = torch.ones(size, dtype=torch.bool).index_fill(0, first, False).nonzero().flatten()
    order = terms.replay.order[torch.cat([first, rest]).to(terms.replay.order.device)]
    sizes = tuple(len(family.index) for family in families)
    return replace(terms, replay=replace(terms.replay, order=order), sizes=sizes)


def _renumbered(groups: Groups, used: Tensor, size: int) -> Groups:
    """Coordinates as they are, and sums by their place among those that are used."""
    rank = used.new_full((NOTED,), -size - 1).index_put((used,), torch.arange(len(used), device=used.device))
    own = [(g - size).clamp(min=0) for g in groups]  # clamp: of coordinates that are no sums, not used
    return tuple(torch.where(g >= size, size + rank[met], g) for g, met in zip(groups, own, strict=True))


def through_sums(
    terms: RecordedTerms, joint: LogJoint, u: Tensor, theta: Tensor, values: Callable[[Any], Tensor]
) -> tuple[Tensor, Forward] | None:
    """The coordinates and sums that values ``(N, C)`` of a run see, ``(N, m)``, and their slope in all of these.

    None where other sums than those of the terms are seen.
    """
    stand_ins, seen = StandIns(), list[Tensor]()

    def recorded(u: Tensor, theta: Tensor, z: Tensor) -> list[Tensor]:
        with FollowSums(u, stand_ins) as notes:
            found = values(joint.trace(u, theta))
        own = _renumbered(notes.of(found), terms.used, len(u))
        seen.append(coordinate_table(own, found.shape).reshape(len(found), -1))
        return [found]

    try:
        made = replay(recorded, u, theta, u.new_zeros(NOTED), stand_ins=stand_ins)
    except (Lost, Unrecordable):
        return None
    if not seen[0].shape[-1] or bool((seen[0] < -1).any()):
        return None
    with torch.enable_grad():
        leaf = terms.appended(u).detach().requires_grad_()
        own, z = leaf.split([len(u), len(terms.B)])
        found = made(own, theta, z.new_zeros(NOTED).index_put((terms.used,), z))
    return seen[0], Forward(found[: len(found) - sum(x.numel() for x in stand_ins.results)], leaf)


def _is_right(found: RecordedTerms, joint: LogJoint, u: Tensor, theta: Tensor) -> bool:
    """Whether terms and sums are the model's own, where it was followed and elsewhere, at other hyperparameters too."""
    moved = generic_directions(3, len(u) + len(theta), u)[2]
    places, other = torch.stack([u, u + 0.3 * moved[: len(u)]]), theta + 0.1 * moved[len(u) :]
    with torch.no_grad():
        value, expected = (density.log_joint(places, other) for density in (found, joint))
        seen = found.appended(places)
        met = [found.run(row, other)[-found.num_met :][found.used] for row in seen] if found.num_met else []
    right = joint.are_level(value, expected) | ~expected.isfinite()
    gaps = [(z - row[len(u) :]).abs() / (1.0 + z.abs()) for z, row in zip(met, seen, strict=False)]
    return bool(right.all()) and all(bool((gap <= joint.rounding).all()) for gap in gaps)
