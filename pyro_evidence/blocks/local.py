"""The mode and curvature inside each block given what the blocks share, for all blocks at once.

Shapes ``(...)`` stand for nothing, or for rows ``(R,)`` with hyperparameters and shared coordinates of their own.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_evidence.blocks.partition import Partition
from pyro_evidence.blocks.term_derivatives import by_terms, term_derivatives
from pyro_evidence.blocks.terms import Local, RowTerms, Terms
from pyro_evidence.errors import NotPositiveDefinite
from pyro_evidence.numerics.batched import Batched
from pyro_evidence.numerics.derivatives import Forward, pullback
from pyro_evidence.numerics.line_search import Backtracking, Line, armijo
from pyro_evidence.numerics.newton import Limits
from pyro_evidence.numerics.quadrature.rules import block_rule, padded

SEARCH = Backtracking(armijo)


def local(terms: Terms | RowTerms, own: Tensor, shared: Tensor, *, create_graph: bool = False) -> Local:
    """At blocks ``(..., n)`` and shared coordinates ``(..., P)``; with a graph in these and theta on request."""
    p, rows = terms.density.partition, []
    column = torch.cat([torch.arange(f.shape[-1], device=f.device).repeat(len(f)) for f in p.fronts])
    with torch.enable_grad():
        own = own if create_graph and own.requires_grad else own.detach().requires_grad_()
        value = terms(own.unsqueeze(-2), shared)[..., 0, :]
        slope = pullback(value.sum(), own, create_graph=True)
        for k in range(p.width):  # the same row of all blocks at once
            along = (slope * (column == k).to(own)).sum()
            rows.append(pullback(along, own, create_graph=create_graph))
    curvature, start = [], 0
    for front in p.fronts:
        part, shape = slice(start, start + front.numel()), (*own.shape[:-1], *front.shape)
        curvature.append(-torch.stack([row[..., part].reshape(shape) for row in rows[: front.shape[-1]]], -2))
        start = part.stop
    found = Local(value, slope, tuple(curvature))
    return found if create_graph else found.detached


def with_prior_expanded(terms: RowTerms, own: Tensor, shared: Tensor) -> RowTerms:
    """The same for these shared coordinates ``(R, P)``, a quadratic prior expanded about blocks ``(R, n)``, once."""
    density = terms.density
    if not density.is_quadratic:
        return terms
    prior = RowTerms(replace(density, linear=None, names=density.joint.latents.names), terms.theta)
    return replace(terms, prior=(own, local(prior, own, shared)))


@dataclass(frozen=True)
class Modes(Batched):
    """The mode of every block, and what is known there."""

    own: Tensor  # (..., n)
    here: Local
    tril: tuple[Tensor, ...]  # (..., G, d, d) lower Cholesky factor of the curvature, nan where there is none

    def step(self, p: Partition) -> Tensor:
        """Newton's step of all blocks, ``(..., n)``."""
        return solved(p, self.tril, self.here.slope)


def solved(p: Partition, tril: tuple[Tensor, ...], b: Tensor) -> Tensor:
    """``D^-1 b`` of all blocks, ``(..., n)``."""
    parts = zip(p.fronts, tril, b.split([front.numel() for front in p.fronts], -1), strict=True)
    each = [torch.cholesky_solve(x.reshape(*x.shape[:-1], *f.shape, 1), L) for f, L, x in parts]
    return torch.cat([x.flatten(-3) for x in each], -1)


@dataclass(frozen=True, eq=False)
class _Search(Batched):
    """Where the searches of all blocks are."""

    own: Tensor  # (..., n)
    shared: Tensor  # (..., P)
    here: Local
    before: Tensor  # what a step promised before the last one, twice the nats, (..., G)
    gained: Tensor  # by the last step, nats, (..., G)


def block_modes(terms: Terms | RowTerms, own: Tensor, shared: Tensor, tolerance: float) -> Modes:
    """Newton in every block by itself, from ``own`` ``(..., n)``, steps halved block by block where they do not climb.

    Rows of which no block moves any more are left out of further steps.

    :param tolerance: squared length of a step in posterior standard deviations that counts as none.
    """
    p, here = terms.density.partition, local(terms, own, shared)
    none = torch.zeros_like(here.value[..., :-1])
    now = found = _Search(own, shared, here, none + math.inf, none)
    rows = torch.arange(len(own), device=own.device)
    for _ in range(Limits.num_steps):  # a bound, no target
        step = solved(p, tuple(_positive(D) for D in now.here.curvature), now.here.slope)
        decrement = torch.zeros_like(now.gained).index_add(-1, p.block, step * now.here.slope)
        least = _slack(terms, now.here).clamp(min=0.5 * tolerance)  # nats: rounding's, or of a step that is none
        rests = (now.gained <= least) & (decrement > 0.5 * now.before)  # by rounding, or at a jump
        moving = (decrement > tolerance) & ~rests
        if not bool(moving.any()):
            break
        step, decrement = torch.where(rests[..., p.block], 0.0, step), torch.where(rests, 0.0, decrement)
        if isinstance(terms, RowTerms) and not bool((left := moving.any(-1)).all()):
            rows, terms, now, step, decrement = (x[left] for x in (rows, terms, now, step, decrement))  # type: ignore[assignment]
        now = _climbed(terms, now, step, decrement)
        found = found.with_rows(rows, now) if isinstance(terms, RowTerms) else now
    return Modes(found.own, found.here, tuple(_factor(D) for D in found.here.curvature))


def _slack(terms: Terms | RowTerms, here: Local) -> Tensor:
    """Rounding of the log joint density of each block, nats, ``(..., G)``."""
    return 10.0 * float(torch.finfo(terms.density.joint.dtype).eps) * (1.0 + here.value[..., :-1].abs())


def _climbed(terms: Terms | RowTerms, now: _Search, step: Tensor, decrement: Tensor) -> _Search:
    """The first of ever shorter steps of each block that does not lower it.

    A block stays where what is left of its step promises less than can be told from rounding.  Of many rows those are
    evaluated again of which a block is not yet there.
    """
    p, slack = terms.density.partition, _slack(terms, now.here)
    scale, own = torch.ones_like(slack), now.own + step
    new = local(terms, own, now.shared)
    for trial in range(SEARCH.num_trials):
        rise = (new.value - now.here.value)[..., :-1]
        bad = ~SEARCH.rule(rise, scale, Line(decrement, slack)) & (scale > 0)
        if not bool(bad.any()):
            break
        goes_on = (scale * decrement > slack) & (trial < SEARCH.num_trials - 1)
        scale = torch.where(bad, torch.where(goes_on, 0.25 * scale, 0.0), scale)
        own = now.own + scale[..., p.block] * step
        if isinstance(terms, RowTerms):
            again = torch.nonzero(bad.any(-1)).squeeze(-1)
            new = new.with_rows(again, local(terms[again], own[again], now.shared[again]))
        else:
            new = local(terms, own, now.shared)
    return _Search(own, now.shared, new, decrement, (new.value - now.here.value)[..., :-1])


def _positive(D: Tensor) -> Tensor:
    """Cholesky factors of the curvature ``(..., G, d, d)``, eigenvalues in absolute value where it is not positive."""
    tril = _factor(D)
    bad = tril.isnan().any(-1).any(-1)
    if not bool(bad.any()):
        return tril
    finite = torch.where(torch.isfinite(D[bad]), D[bad], 0.0)
    values, vectors = torch.linalg.eigh(finite)
    values = values.abs().clamp(min=1e-8)  # a flat direction: a long step, halved where it does not climb
    return tril.index_put((bad,), torch.linalg.cholesky((vectors * values.unsqueeze(-2)) @ vectors.mT))


def _factor(D: Tensor) -> Tensor:
    """Cholesky factors ``(..., G, d, d)``, nan where there is none."""
    tril, info = torch.linalg.cholesky_ex(D)
    bad = (info != 0) | ~torch.isfinite(tril).flatten(-2).all(-1)
    return torch.where(bad[..., None, None], torch.nan, tril) if bool(bad.any()) else tril


def require_curved(terms: Terms, modes: Modes) -> None:
    """Refuse blocks without a mode.

    :raises NotPositiveDefinite: where the curvature of a block is not positive definite at the end of its search.
    """
    for L, front in zip(modes.tril, terms.density.partition.fronts, strict=True):
        bad = L.isnan().flatten(1).any(-1)
        if bool(bad.any()):
            name = terms.density.joint.latents.label(int(front[torch.nonzero(bad)[0, 0], 0]))
            raise NotPositiveDefinite(
                f"the log joint density is not curved downwards in the block of {name}, given all that blocks share; "
                "expected a mode."
            )


def beside(terms: Terms | RowTerms, own: Tensor, shared: Tensor, *, create_graph: bool = False) -> Tensor:
    """Minus the second derivatives between blocks and shared coordinates, ``(..., n, P)``."""
    with torch.enable_grad():
        own = own if create_graph and own.requires_grad else own.detach().requires_grad_()
        if isinstance(terms, Terms) and by_terms(terms.density):
            p, rows = terms.density.partition, own.unsqueeze(0)
            share = rows.new_ones(1, p.num_blocks + 1)
            found = -term_derivatives(terms, rows, shared, share, None).beside
            return found if create_graph else found.detach()
        away, num = torch.zeros_like(shared).requires_grad_(), shared.shape[-1]
        if not shared.numel():
            return own.new_zeros(*own.shape, num)
        slope = pullback(terms(own.unsqueeze(-2), shared + away).sum(), own, create_graph=True)
        directions = torch.eye(num).to(shared).reshape(num, *[1] * (shared.dim() - 1), num).expand(-1, *shared.shape)
        found = -Forward(slope, away, create_graph=create_graph).along(directions).movedim(0, -1)
    return found if create_graph else found.detach()


@dataclass(frozen=True, eq=False)
class Path:
    """Moves of the blocks' modes with what they share: to first order, by ``slope (w - start)``.

    :ivar start: ``(..., P)``.
    :ivar slope: ``(..., n, P)``.
    """

    start: Tensor
    slope: Tensor

    def away(self, shared: Tensor) -> Tensor:
        """Their distance from where they were at the start, ``(..., 1, n)``."""
        return (shared - self.start).unsqueeze(-2) @ self.slope.mT


def path(p: Partition, tril: tuple[Tensor, ...], beside: Tensor, start: Tensor) -> Path:
    """The derivative of modes by the implicit function theorem, ``-D^-1 B``.

    :param beside: ``B`` as :func:`beside` has it.
    """
    num, parts = beside.shape[-1], beside.split([front.numel() for front in p.fronts], -2)
    blocks = [x.reshape(*x.shape[:-2], *f.shape, num) for f, x in zip(p.fronts, parts, strict=True)]
    each = [torch.cholesky_solve(x, L).flatten(-3, -2) for x, L in zip(blocks, tril, strict=True)]
    return Path(start, -torch.cat(each, -2) if num else beside)


@dataclass(frozen=True, eq=False)
class Nodes:
    """Quadrature nodes in every block, ``own = centre + spread z``.

    :ivar rows: ``(..., Q, n)``.
    :ivar log_weights: of each node and block, the density of the nodes taken out, ``(..., Q, G)``; minus infinity where
        a block has fewer nodes than others.
    """

    rows: Tensor
    log_weights: Tensor


def spread(tril: Tensor) -> Tensor:
    """``S`` with ``S S' = D^-1``, upper triangular, from the Cholesky factor of ``D``, ``(..., G, d, d)``."""
    if tril.shape[-1] == 1:
        return tril.reciprocal()
    identity = torch.eye(tril.shape[-1], dtype=tril.dtype, device=tril.device).expand_as(tril)
    return torch.linalg.solve_triangular(tril, identity, upper=False).mT


def placed(p: Partition, centre: Tensor, tril: tuple[Tensor, ...], num: int) -> Nodes:
    """The nodes of all blocks about ``centre`` ``(..., n)``, in units of the curvature's Cholesky factors.

    Liu and Pierce (1994), eq. 3; Naylor and Smith (1982).  Of logs of latents, and the like, they are stretched.

    :param num: nodes on each axis.
    """
    rules = [block_rule(num, front.shape[-1], curved) for front, curved in zip(p.fronts, p.curved, strict=True)]
    nodes, weights = padded(rules)
    rows, log_weights = [], []
    parts = zip(p.fronts, tril, centre.split([f.numel() for f in p.fronts], -1), nodes, weights, strict=True)
    for front, L, mean, z, log_weight in parts:
        z, log_weight = z.to(centre), log_weight.to(centre)
        away = torch.einsum("...gij,qj->...qgi", spread(L), z)
        rows.append((mean.reshape(*mean.shape[:-1], 1, *front.shape) + away).flatten(-2))
        constant = log_weight + 0.5 * z.square().sum(-1) + 0.5 * front.shape[-1] * math.log(math.tau)
        log_det = L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        log_weights.append(constant.unsqueeze(-1) - log_det.unsqueeze(-2))
    return Nodes(torch.cat(rows, -1), torch.cat(log_weights, -1))
