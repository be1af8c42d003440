"""Differences along the edges of a graph, each a Normal for itself: right for a tree, wrong where there are cycles."""

import torch
from torch import Tensor
from torch.distributions import Normal

from pyro_evidence.curvature.graphs import num_cycles
from pyro_evidence.errors import UnsupportedModel
from pyro_evidence.program import predictors
from pyro_evidence.structure.factors.cells import cells
from pyro_evidence.structure.factors.families import distinct, table
from pyro_evidence.structure.factors.touches import Follow, Lost
from pyro_evidence.structure.probes import Probe


def refuse_edges(origin: Probe) -> None:
    """Refuse a field on a graph that is written as differences observed to be zero, with a scale that is learned.

    Normals for ``E`` edges normalise by ``scale^-E``; a field of ``n`` values on ``c`` components of a graph by
    ``scale^-(n - c)``, which is the same for a forest only.

    :param origin: a run with derivatives.
    :raises UnsupportedModel: with the site and what to write instead.
    """
    for name in origin.joint.observed:
        if _is_suspect(origin, name):
            edges = _edges(origin, name)
            cycles = 0 if edges is None else num_cycles(edges)
            if edges is not None and cycles:
                raise UnsupportedModel(_letter(name, len(edges), cycles))


def _is_suspect(origin: Probe, name: str) -> bool:
    """Whether a site is Normal, observed to be zero everywhere, about latents, with a scale that is not given."""
    node = origin.trace.nodes[name]
    base, value = predictors.unwrapped(node["fn"]).base, torch.as_tensor(node["value"])
    if not isinstance(base, Normal) or value.numel() < 3 or bool((value != 0).any()):
        return False
    learned = predictors.depends(base.scale, origin.theta) or predictors.depends(base.scale, origin.u)
    return learned and predictors.depends(base.loc, origin.u)


def _edges(origin: Probe, name: str) -> Tensor | None:
    """The two coordinates that each term sees, ``(E, 2)``; None where it sees other than two."""
    u = origin.u.detach().clone()
    try:
        with torch.no_grad(), Follow(u) as notes:
            term = cells(origin.joint, u, origin.theta.detach(), (name,))[name]
    except (Lost, KeyError):
        return None
    groups = notes.of(term)
    parts = distinct(table(groups, term.shape)) if groups else []
    pairs = [index for _, index in parts if index.shape[-1] == 2]
    return pairs[0] if len(parts) == 1 and pairs else None


def _letter(name: str, num: int, cycles: int) -> str:
    return (
        f"site '{name}' draws each of {num:,} differences between latents from a Normal whose scale is learned. Its "
        f"edges close {cycles:,} cycles, so that the differences are not free of each other: together they must "
        f"normalise by scale^-{num - cycles:,}, not by scale^-{num:,}, and the scale would come out wrong. Draw the "
        f"field from pyro_evidence.models.gmrf.ICAR(edges, scale, level=...) instead, or hold the scale fixed."
    )
