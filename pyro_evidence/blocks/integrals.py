r"""Integrals of all blocks with their first and second derivatives in what blocks share.

Nodes follow the modes of their blocks as these follow ``w``, to first order: :math:`b_q + C (w - w_0)`.  Held, they
would be left behind by a narrow block whose prior moves with ``w``, and few of them would not tell the slope of its
integral.  They are held where the prior of blocks is Gaussian whatever ``w``, and data see latents through linear
predictors ``eta = X w + Z b``.  Louis's (1982) formula has it: with ``p_q`` the share of each node in a block's
integral, ``s_q`` the slope of the block's log density there and ``H_q`` its second derivatives, both along the path,

.. math:: \partial^2_{ww} \log \sum_q \dots = \sum_q p_q H_q + \sum_q p_q s_q s_q' - \bar s \bar s'

With linear predictors :math:`H_q = X' \mathrm{diag}(\ell''_q) X` takes two derivatives of the likelihood, however many
coordinates are shared; else it is added up of those of each term.  Where terms see many coordinates, one pass for each.
Shapes ``(...)`` stand for nothing, or for rows ``(R,)`` with hyperparameters and shared coordinates of their own.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_evidence.blocks.local import Nodes, Path
from pyro_evidence.blocks.term_derivatives import by_terms, term_derivatives
from pyro_evidence.blocks.terms import BlockDensity, RowTerms, Terms
from pyro_evidence.numerics.derivatives import pullback

MOST_NUMBERS = 2**26  # of a design matrix of shared coordinates, or of slopes in them


@dataclass(frozen=True, eq=False)
class Integrals:
    """The log integral of each block, and last what belongs to none, with derivatives of their sum.

    :ivar each: nats, ``(..., G + 1)``.
    :ivar slope: in shared coordinates, ``(..., P)``.
    :ivar curvature: minus the second derivatives, ``(..., P, P)``.
    """

    each: Tensor
    slope: Tensor
    curvature: Tensor


def integrals(terms: Terms | RowTerms, nodes: Nodes, shared: Tensor) -> Tensor:
    """The log integral of each block, and last what belongs to none, nats, ``(..., G + 1)``."""
    found = terms(nodes.rows, shared)
    return torch.cat([(found[..., :-1] + nodes.log_weights).logsumexp(-2), found[..., 0, -1:]], -1)


def with_derivatives(
    terms: Terms | RowTerms, nodes: Nodes, shared: Tensor, path: Path, *, create_graph: bool = False
) -> Integrals:
    """The integrals and their derivatives, with a graph of their own on request.

    :param path: on which nodes follow the shared coordinates; not looked at where they are held.
    :param shared: ``(..., P)``, requires a gradient where a graph is wanted.
    """
    with torch.enable_grad():
        held = is_linear(terms.density, nodes.rows.shape[-2])
        if held and isinstance(terms, Terms):
            return _louis(terms, nodes, shared, create_graph)
        if isinstance(terms, Terms) and by_terms(terms.density):
            return _louis_of_terms(terms, nodes, shared, path)
        w = shared if create_graph else shared.detach().requires_grad_()
        each = integrals(terms, nodes if held else replace(nodes, rows=nodes.rows + path.away(w)), w)
        if not w.numel():
            return Integrals(each, w, w.detach().new_zeros(*w.shape, w.shape[-1]))
        slope = pullback(each.sum(), w, create_graph=True)
        columns = [pullback(one.sum(), w, create_graph=create_graph) for one in slope.unbind(-1)]
        rows = torch.stack(columns, -2)
    return Integrals(each, slope, -0.5 * (rows + rows.mT))


def is_linear(density: BlockDensity, num_nodes: int) -> bool:
    """Whether shared coordinates, not too many, act through linear predictors of one element each, priors Gaussian."""
    owners, p = density.data_owner, density.partition
    if density.linear is None or not density.linear.gaussian or not len(p.shared):
        return False
    largest = max(num_nodes * p.num_blocks, *map(len, owners)) * len(p.shared)
    return largest <= MOST_NUMBERS and all(
        likelihood.layout.num_coupled == 1 for likelihood in density.linear.likelihoods
    )


def _louis_of_terms(terms: Terms, nodes: Nodes, shared: Tensor, path: Path) -> Integrals:
    """The general case; what arrives with a graph leaves with one."""
    p, rows, C = terms.density.partition, nodes.rows + path.away(shared), path.slope
    total = terms(rows, shared)
    log_terms = total[:, :-1] + nodes.log_weights
    each = torch.cat([log_terms.logsumexp(0), total[0, -1:]])
    share = log_terms.softmax(0)
    every = torch.cat([share, _first_of(share)], 1)  # what belongs to no block is the same at all nodes
    found = term_derivatives(terms, rows, shared, every, C)
    if shared.requires_grad:  # it is differentiated several times, and this graph is there already
        slope = pullback(each.sum(), shared, create_graph=True)
    else:
        slope = found.mean.sum(0)
    within = sum((found.within[:, k : k + 1] * C[mate] for k, mate in enumerate(p.mates)), 0.0 * C)
    across = found.beside + 0.5 * within
    second, mean = found.shared + C.mT @ across + across.mT @ C, found.mean[:-1]
    return Integrals(each, slope, -second - (found.square - mean.mT @ mean))


def _first_of(share: Tensor) -> Tensor:
    """One at the first node, zero at the others, ``(Q, 1)``."""
    return torch.nn.functional.pad(share.new_ones(1, 1), (0, 0, 0, len(share) - 1))


def _louis(terms: Terms, nodes: Nodes, shared: Tensor, create_graph: bool) -> Integrals:
    density, read = terms.density, terms.read
    assert read is not None and read.prior is not None
    p, total = density.partition, terms.prior(nodes.rows, shared, read)
    orders = []
    u, own = density.whole(nodes.rows, shared), (density.parts, density.designs, density.data_owner, read.offsets)
    for part, design, owner, offset in zip(*own, strict=True):
        likelihood, dtype = part.likelihood, density.joint.dtype
        eta = (part.product(u) + offset).squeeze(-1)
        eta = eta if create_graph else eta.detach()
        value = likelihood.log_likelihoods(read.trace)(likelihood.layout.natural(eta.unsqueeze(-1).to(dtype))).double()
        first, second = likelihood.orders(read.trace, dtype)(eta, create_graph)
        total = total.index_add(1, owner, value)
        orders.append((design, owner, first, second))
    log_terms = total[:, :-1] + nodes.log_weights
    each = torch.cat([log_terms.logsumexp(0), total[0, -1:] + torch.as_tensor(read.rest).to(total)])
    share = log_terms.softmax(0)
    share = torch.cat([share, _first_of(share)], 1)  # what belongs to no block is the same at all nodes
    loc, precision = (x[p.shared] for x in read.prior)
    slope, curvature = -precision * (shared - loc), precision.diag()
    slopes = total.new_zeros(*share.shape, len(shared))
    for design, owner, first, second in orders:
        weight = share[:, owner]
        slope = slope + design.mT @ (weight * first).sum(0)
        curvature = curvature - design.mT @ ((weight * second).sum(0).unsqueeze(-1) * design)
        slopes = slopes.index_add(1, owner, first.unsqueeze(-1) * design)
    share, slopes = share[:, :-1, None], slopes[:, :-1]
    mean, weighted = (share * slopes).sum(0), (share * slopes).flatten(0, 1)
    return Integrals(each, slope, curvature - (weighted.mT @ slopes.flatten(0, 1) - mean.mT @ mean))
