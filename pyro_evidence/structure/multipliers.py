"""Latents of one plate that multiply those of another, such as the discriminations of items the abilities of persons.

The joint mode of two factors says little: one grows as the other shrinks, and the spread of either, maximised around a
Gaussian over both, ends at zero (Neyman and Scott, 1948; Bock and Aitkin, 1981, integrate the abilities instead).
"""

from itertools import permutations

import torch
from torch import Tensor

from pyro_evidence.fitting.process_state import without_validation
from pyro_evidence.numerics.coordinates import is_identity
from pyro_evidence.numerics.derivatives import pullback
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.structure.factor_cells import coordinate_table
from pyro_evidence.structure.factors import Followed, NotSparse, followed_terms

OFF = -30.0  # unconstrained value at which a positive number is 1e-13
SWITCHED_OFF = 1e-9  # share of a slope that is none


def multipliers(joint: LogJoint) -> tuple[str, ...]:
    """The sites that multiply others across plates, by name.

    Two sites are crossed where an element of either meets several of the other, term by term; effects and their common
    mean are not, nor are effects and the scale of their group, which is for integration outside.  A site multiplies
    another where data that see the other no longer do once it is zero.
    """
    wide = [part for part in joint.latents if part.size > 1]
    u = joint.initial(1, seed=0)[0]
    followed = followed_terms(joint, u, joint.initial_theta, ()) if len(wide) > 1 else NotSparse("one plate")
    if isinstance(followed, NotSparse):
        return ()
    pairs = [(a, b) for a, b in permutations(wide, 2) if _are_crossed(followed, a.name, b.name)]
    felt, taken = _slope(joint, u) if pairs else u, set()
    for part in {a.name: a for a, _ in pairs}.values():
        off = u.clone()
        off[joint.latents.slices[part.name]] = 0.0 if is_identity(part.transform) else OFF
        left = _slope(joint, off)
        for own in (joint.latents.slices[b.name] for a, b in pairs if a is part):
            if float(left[own].abs().max()) < SWITCHED_OFF * float(felt[own].abs().max()):
                taken.add(part.name)
    return tuple(sorted(taken))


def _are_crossed(followed: Followed, *sites: str) -> bool:
    """Whether an element of either of two sites meets several of the other, of each term the first ones counted."""
    size, met = followed.joint.latents.size, []
    for name, groups in followed.groups.items():
        if groups:
            index = coordinate_table(groups, followed.shapes[name])
            slices = (followed.joint.latents.slices[site] for site in sites)
            first = [torch.where((index >= own.start) & (index < own.stop), index, size).amin(-1) for own in slices]
            seen = (first[0] < size) & (first[1] < size)
            met.append(first[0][seen] * size + first[1][seen])
    every = torch.cat(met).unique()  # the prior of each site is a term
    return all(len(own.unique()) < len(own) for own in (every // size, every % size))


def _slope(joint: LogJoint, u: Tensor) -> Tensor:
    """Gradient of the log likelihood in the latents, ``(D,)``."""
    u = u.detach().clone().requires_grad_()
    trace = joint.trace(u, joint.initial_theta)
    with without_validation():
        return pullback(joint.total(trace, (*joint.discrete, *joint.observed)).double(), u)
