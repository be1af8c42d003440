"""Where a search begins when the columns of a design are in units that no prior had in mind."""

import copy
from dataclasses import replace

import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import Problem
from pyro_evidence.numerics.linear_predictor import curvature_blocks, gram_diagonal
from pyro_evidence.structure.density import LinearDensity

UNFELT, OVERWHELMED = (
    1e-4,
    1e9,
)  # curvature of the data over that of the prior, beyond: units


def in_units_of_the_data(problem: Problem, places: Tensor) -> tuple[Problem, Tensor]:
    """Starts at which priors and data are of a size, whatever the units of the columns; ordinary ones as they are.

    Beside a prior of unit precision a column in units of 1e-6 is not felt: the log evidence is flat there, and weights
    look as if no datum needed them.  Beside one of 1e12 the search for the mode would begin where every class is sure.
    So precisions that are hyperparameters begin where the prior weighs as one datum does, and weights at random in the
    posterior's units.  Neither changes what is maximised.

    :param places: starts for the mode, ``(R, D)``.
    """
    density = problem.structure.linear
    if not isinstance(density, LinearDensity) or problem.latent is not None:
        return problem, places
    theta = problem.joint.initial_theta
    prior = density.parts(theta).prior
    if prior is None:
        return problem, places
    loc, precision = (x.detach() for x in prior)
    felt = (_of_the_data(density, loc.unsqueeze(0), theta) / precision).nan_to_num(0.0)
    extreme = (felt > 0) & ((felt < UNFELT) | (felt > OVERWHELMED))
    if not bool(extreme.any()):
        return problem, places
    ratio = felt / max(1, sum(p.slot.layout.shape.numel() for p in density.linear))  # of one datum
    begun, moved = _balanced(problem, extreme, ratio)
    spread = torch.where(extreme, moved | (ratio > 1.0), False)
    unit = torch.where(spread, ratio * precision, 1.0).rsqrt()  # the posterior's, if all data were one
    return begun, torch.where(spread, loc + (places - loc) * unit, places)


def _of_the_data(density: LinearDensity, u: Tensor, theta: Tensor) -> Tensor:
    """Diagonal of the data's part of the precision at a row ``(1, D)``, however small beside the prior's, ``(D,)``."""
    parts, total = density.parts(theta), torch.zeros_like(u[0])
    for part, offset in zip(density.linear, parts.offsets, strict=True):
        eta = part.eta(u, offset).to(density.joint.dtype).detach().requires_grad_()
        B = curvature_blocks(part.slot.log_likelihood(parts.trace), part.layout, eta, create_graph=False)
        total = total + gram_diagonal(part.J.double(), B.double())[0]
    return total.detach()


def _balanced(problem: Problem, extreme: Tensor, ratio: Tensor) -> tuple[Problem, Tensor]:
    """The problem with other first precisions, and the coordinates whose prior is another now, ``(D,)`` bool."""
    groups, theta = problem.structure.groups, problem.joint.initial_theta.clone()
    moved = torch.zeros_like(extreme)
    if groups is None:
        return problem, moved
    for t in groups.is_weight.nonzero().flatten().tolist():
        member = groups.member == t
        if bool((extreme | (ratio == 0))[member].all()) and bool(extreme[member].any()):
            theta[t] += float(ratio[member].amax().log() / groups.power[t])
            moved |= member
    joint = copy.copy(problem.joint)
    joint.initial_theta = theta
    return replace(problem, joint=joint), moved
