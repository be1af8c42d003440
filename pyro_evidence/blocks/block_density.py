"""From a model to its blocks, and the error message where there are none."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.blocks.marginal import Marginal
from pyro_evidence.blocks.partition import Partition, partition
from pyro_evidence.blocks.terms import BlockDensity
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.numerics.newton import Limits
from pyro_evidence.precision.choices import Curvature, exact_hessian
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.settings import check_count
from pyro_evidence.structure.factors import NotSparse
from pyro_evidence.structure.recognise import Structure

MOST_NODES = 388  # the outermost weights of 389 are zero in double precision
NODES = 7  # on each axis of blocks that others multiply: of 41 nodes they lack a hundredth of a nat in 40 items


def marginal_of(joint: LogJoint, structure: Structure, active: Tensor, num: int, limits: Limits) -> Marginal | None:
    """The density of what blocks share, these integrated by ``num`` nodes on each axis; None without blocks.

    :param active: coordinates that are not pruned, ``(D,)`` bool.
    """
    theta = joint.initial_theta
    found = partition(joint, active, theta, crossed=bool(structure.multipliers))
    if isinstance(found, NotSparse):
        return None
    groups = structure.groups
    kept = active.new_zeros(0, dtype=torch.float64) if groups is None else groups.loc[found.held]
    whole, half_log_tau = bool(active.all()), 0.5 * float(torch.tensor(torch.pi * 2.0).log())

    def left_out(theta: Tensor) -> Tensor:
        """The log prior density of pruned coordinates at their mean, nats."""
        if groups is None or whole:
            return theta.new_zeros(())
        return torch.where(active, 0.0, 0.5 * groups.log_precision(theta) - half_log_tau).sum()

    linear = structure.linear or (structure.factors.linear if structure.factors is not None else None)
    density = BlockDensity(joint, found, linear, kept, left_out, slots=structure.slots or ())
    if linear is not None and not density.explains(theta):
        density = replace(density, linear=None)
    return Marginal(density, num, limits, joint.latents.label)


def check_nodes(nodes: Any, curvature: Curvature | None) -> int | str:
    """The setting ``nodes``, checked.

    :raises BadInput: for what is neither a whole number from 1 to :data:`MOST_NODES` nor ``"auto"``, and beside a
        curvature that is not the exact Hessian.
    """
    if isinstance(nodes, str) and nodes != "auto":
        raise BadInput(f"nodes={nodes!r}; expected a whole number of at least 1, such as 7, or 'auto'.")
    number = nodes if isinstance(nodes, str) else check_count("nodes", nodes)
    if number != "auto" and int(number) > MOST_NODES:
        raise BadInput(f"nodes={nodes!r}; expected at most {MOST_NODES}: the outermost of more would weigh nothing.")
    if number != 1 and curvature not in (None, exact_hessian):
        raise BadInput(
            f"nodes={nodes!r} asks for quadrature about each block's own curvature, which must be the exact Hessian; "
            f"it came with curvature={getattr(curvature, '__name__', curvature)}. Leave one of them out."
        )
    return number


def all_blocks(joint: LogJoint, structure: Structure) -> Partition | NotSparse:
    """The blocks of a model with all of its coordinates, or why there are none."""
    active = torch.ones(joint.latents.size, dtype=torch.bool, device=joint.device)
    return partition(joint, active, joint.initial_theta, crossed=bool(structure.multipliers))


def require_blocks(joint: LogJoint, structure: Structure, nodes: int | str) -> None:
    """Refuse quadrature where no coordinates are independent of the others.

    :raises UnsupportedModel: with what ties them together.
    """
    if isinstance(all_blocks(joint, structure), NotSparse):
        raise no_blocks(joint, structure, f"nodes={nodes!r}")


def no_blocks(joint: LogJoint, structure: Structure, asked: str) -> UnsupportedModel:
    """The error message for a model whose coordinates are tied together.

    :param asked: the setting or the call that asks for blocks.
    """
    found = all_blocks(joint, structure)
    reason = found.reason if isinstance(found, NotSparse) else "all of them are pruned"
    return UnsupportedModel(
        f"{asked} asks for independent blocks, such as groups, but this model has none: {reason}. Crossed effects, "
        "chains and graphs have none; leave nodes=1, whose posterior.log_evidence_error then estimates Laplace's error "
        "to second order."
    )
