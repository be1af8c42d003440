"""Latents of one plate that multiply those of another, such as the discriminations of items the abilities of persons.

The joint mode of two factors says little: one grows as the other shrinks, and the spread of either, maximised around a
Gaussian over both, ends at zero (Neyman and Scott, 1948; Bock and Aitkin, 1981, integrate the abilities instead).
"""

import torch
from torch import Tensor

from pyro_evidence.blocks.partition import Partition, partition
from pyro_evidence.fitting.process_state import without_validation
from pyro_evidence.numerics.coordinates import is_identity
from pyro_evidence.numerics.derivatives import pullback
from pyro_evidence.program import enumeration
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.structure.factors import NotSparse
from pyro_evidence.structure.recognise import Structure

NODES = 7  # with which blocks are integrated that others multiply
OFF = -30.0  # unconstrained value at which a positive number is 1e-13
SWITCHED_OFF = 1e-9  # share of a slope that is none


def multipliers(joint: LogJoint, structure: Structure) -> tuple[str, ...]:
    """The sites that multiply others across plates: every block meets many of their elements, one term only a few.

    A site multiplies another where data no longer feel the other once it is zero.  The scale of a group's effects
    multiplies too, but the same number stands in all terms of the group; it is for integration outside.
    """
    density = structure.linear or (structure.factors.linear if structure.factors is not None else None)
    wide = [p for p in joint.latents if p.size > 1]
    if density is not None or structure.network is not None or len(wide) < 2:
        return ()
    active = torch.ones(joint.latents.size, dtype=torch.bool, device=joint.device)
    found = partition(joint, active, joint.initial_theta)
    if isinstance(found, NotSparse):
        return ()
    crossed = [p.name for p in wide if _is_crossed(found, joint.latents.slices[p.name])]
    inside = [p.name for p in wide if bool(torch.isin(found.own, _coordinates(joint, p.name)).any())]
    if not crossed or not inside:
        return ()
    pairs = {(a, b) for a in crossed for b in inside} | {(b, a) for a in crossed for b in inside}
    u = joint.initial(1, seed=0)[0]
    felt = _slope(joint, u)
    taken = set()
    for part in wide:
        off = u.index_fill(0, _coordinates(joint, part.name), 0.0 if is_identity(part.transform) else OFF)
        left = _slope(joint, off)
        for other in (b for a, b in pairs if a == part.name):
            own = joint.latents.slices[other]
            if float(left[own].abs().max()) <= SWITCHED_OFF * float(felt[own].abs().max()):
                taken.add(part.name)
    return tuple(sorted(taken))


def _coordinates(joint: LogJoint, name: str) -> Tensor:
    own = joint.latents.slices[name]
    return torch.arange(own.start, own.stop, device=joint.device)


def _is_crossed(p: Partition, own: slice) -> bool:
    """Whether some block sees more of these shared coordinates than any single term that sees one of them does."""
    if not bool(((p.shared >= own.start) & (p.shared < own.stop)).any()):
        return False
    most, seen = 0, []
    for name, index in p.touched.items():
        mine = (index >= own.start) & (index < own.stop)
        row, column = mine.nonzero(as_tuple=True)
        if len(row):
            most = max(most, int(mine.sum(-1).max()))
            seen.append(p.owner[name][row] * (p.size + 1) + index[row, column])
    pairs = torch.cat(seen).unique() // (p.size + 1)
    met = torch.bincount(pairs, minlength=p.num_blocks + 1)[: p.num_blocks]
    return int(met.max()) > most


def _slope(joint: LogJoint, u: Tensor) -> Tensor:
    """Gradient of the log likelihood in the latents, ``(D,)``."""
    u = u.detach().clone().requires_grad_()
    trace = joint.trace(u, joint.initial_theta)
    with without_validation():
        if joint.discrete:
            value = enumeration.log_prob_total(trace, (*joint.discrete, *joint.observed))
        else:
            value = torch.as_tensor(trace.log_prob_sum(lambda name, _: name in joint.observed))
        return pullback(value.double(), u)
