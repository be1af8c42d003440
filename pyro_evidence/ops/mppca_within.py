r"""The best loadings within the span of those that there are, in closed form, responsibilities held.

EM lengthens columns slowly where the noise is small: by a factor of about :math:`2v/(v + l^2)` of what is missing in
each round.  For isotropic noise all within the span can be had at once: orthogonal columns along the principal axes
of the data there, whose variance c = v + l^2 solves

.. math:: \alpha c^2 / \beta + N_k c - N_k s = 0

with s the variance of the data along the column, in units of the noise.  The fixed points of EM stay what they are.
"""

from dataclasses import replace

import torch
from torch import Tensor

from pyro_evidence.ops import mppca
from pyro_evidence.ops.mppca_updates import Iterate

LEAST = 1e-6  # squared length in units of the noise that is left to a column which explains nothing


def best_within_span(it: Iterate) -> Iterate:
    """The iterate with its loadings turned and stretched; as it is where outputs have noise of their own."""
    at = it.at
    if not mppca.is_isotropic(at.beta) or not at.W.shape[-1]:
        return it
    turn = _turn(it)
    new = replace(at, W=at.W @ turn)
    change = torch.linalg.solve_triangular(new.tril, turn.mT @ at.tril, upper=False)  # of whitened coordinates
    return replace(it, at=new, stats=replace(it.stats, cross=it.stats.cross @ change.mT))


def _turn(it: Iterate) -> Tensor:
    """What the loadings are to be multiplied by, shape ``(R, K, q, q)``."""
    at, found = it.at, it.found
    eye = torch.eye(at.W.shape[-1], dtype=at.W.dtype, device=at.W.device)
    norms, V = torch.linalg.eigh(at.tril @ at.tril.mT - eye)
    some = norms > 1e-10 * (1.0 + norms[..., -1:])  # rounding leaves pruned columns a norm
    inverse = torch.where(some, torch.where(some, norms, 1.0).rsqrt(), 0.0)
    Q = V * inverse.unsqueeze(-2)  # W Q has orthonormal columns in units of the noise, and zeros
    counts = found.counts.clamp(min=1e-300)[..., None, None]  # a pruned component has none; keeps the ratio finite
    spread = at.tril @ (at.whitener @ found.yz) @ at.tril.mT / counts
    s, E = torch.linalg.eigh(Q.mT @ spread @ Q)
    s, E = s.flip(-1).clamp(min=0.0), E.flip(-1)  # rounding may leave a tiny negative
    place = _places(it)
    alpha = torch.where(at.columns, at.alpha / at.beta[..., :1], 0.0).gather(-1, place)
    c = 2.0 * s / (1.0 + (1.0 + 4.0 * alpha * s / counts.squeeze(-1)).sqrt())
    length = (c - 1.0).clamp(min=LEAST).sqrt()  # zero would stay so in EM
    on = at.columns.gather(-1, place) & at.active.unsqueeze(-1)
    found_turn = Q @ E * torch.where(on, length, 0.0).unsqueeze(-2)
    return found_turn.gather(-1, place.argsort(-1).unsqueeze(-2).expand(found_turn.shape))


def _places(it: Iterate) -> Tensor:
    """Columns in the order in which they take the principal axes: those held least first, pruned ones last."""
    return torch.where(it.at.columns, it.at.alpha, torch.inf).sort(dim=-1, stable=True).indices
