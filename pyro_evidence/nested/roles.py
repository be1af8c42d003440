"""Which latent sites to integrate numerically around Laplace: read off derivatives, never off names."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from pyro.distributions import Unit
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.process_state import own_random_numbers, without_validation
from pyro_evidence.numerics import batched as rows
from pyro_evidence.numerics.batched import BATCH_NUMBERS
from pyro_evidence.numerics.coordinates import Coordinate, is_affine
from pyro_evidence.numerics.derivatives import Forward, generic_directions, normal_draws, passes_to, pullback
from pyro_evidence.numerics.linalg import relative_rounding
from pyro_evidence.numerics.quadrature.rules import PRODUCT_DIMS
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.parameters import check_kind
from pyro_evidence.program.sites import Trace, bijection, innermost

NUM_DRAWS = 48  # of each density that is looked at
KEPT = 24  # tensors of the size of all draws and mirror images, by autograd and while changes are compared
HALF = 0.5  # the share of a change that is the same on both sides of the centre, above which it is one of spread
CLEARLY = 0.6  # the same for what other sites leave unexplained
NOT_A_SHIFT = 0.3  # the share of a change that no shift of the whole density explains, above which it is one of spread
ROUNDING = 1e-6  # the share of a change that is none
NOT_LINEAR = 0.02  # share of a change in counts that no shift of their mean explains
EXACT = ROUNDING**2  # share of squares that rounding leaves in float64
NEARER, TRIES = 0.25, 4  # parts of the way to a place that are gone where a density overflows there
NUM_POINTS = 2  # random places at which the densities are looked at, at the first single real numbers zero
MOST = 30  # coordinates that are integrated numerically
ONE_BY_ONE = 32  # passes, once a fit, that take no longer than what torch imports for many at once


Changes = Mapping[str, Mapping[str, Tensor]]  # of the log densities of sites, by site that is moved


@dataclass(frozen=True, eq=False)
class Child:
    """The density of one site of a run, and points at which to look at it.

    :ivar points: in the site's own space, ``(2 M,) + shape``: pairs mirrored about the centre, or draws of counts.
    :ivar counts: whether the site is discrete, so that its points have no mirror images.
    """

    name: str
    points: Tensor
    counts: bool


@dataclass(frozen=True, eq=False)
class Run:
    """One run of the model, with the densities of its sites; its trace can be differentiated in ``u``."""

    joint: LogJoint
    u: Tensor  # (D,)
    nodes: Any
    children: tuple[Child, ...]

    def changes(self, directions: Tensor) -> list[dict[str, Tensor]]:
        """Derivatives of every child's log density, its own value held, along directions ``(P, D)`` of the latents."""
        if not self.children:  # flat priors and factors alone
            return [{} for _ in directions]
        with without_validation():
            parts = {c.name: self.nodes[c.name]["fn"].log_prob(c.points).double() for c in self.children}
        # a cotangent for each child: reverse passes through one for all would pad each child's part to the whole
        cotangents = [torch.zeros_like(part).requires_grad_() for part in parts.values()]
        weighed = [(part * cotangent).sum() for part, cotangent in zip(parts.values(), cotangents, strict=True)]
        slope = pullback(torch.stack(weighed).sum(), self.u, create_graph=True)
        along = passes_to(slope, cotangents, directions.to(slope), ONE_BY_ONE, create_graph=False)
        return [dict(zip(parts, row, strict=True)) for row in zip(*along, strict=True)]

    def shift(self, child: Child) -> Tensor:
        """Derivative of a child's log density as its points move together in unconstrained space."""
        fn = self.nodes[child.name]["fn"]
        transform = bijection(child.name, fn)
        y = transform.inv(child.points).detach().requires_grad_()
        x = transform(y)
        with without_validation():
            log_prob = fn.log_prob(x)
        log_det = transform.log_abs_det_jacobian(y, x).reshape(*log_prob.shape, -1).sum(-1)
        flat = (log_prob + log_det).double().reshape(-1)
        along = Forward(flat, y).along(torch.ones_like(y).unsqueeze(0))
        return along.reshape(log_prob.shape)


def _run(joint: LogJoint, u: Tensor, theta: Tensor) -> Run:
    """The densities at one point ``(D,)``, with draws of each."""
    u = u.clone().requires_grad_()
    nodes = joint.trace(u, theta).nodes
    names = [*joint.latents.names, *(() if joint.discrete else joint.observed)]
    with own_random_numbers(), without_validation(), torch.no_grad():
        torch.manual_seed(0)
        children = [_child(name, nodes[name]["fn"]) for name in names]
    return Run(joint, u, nodes, tuple(c for c in children if c is not None))


def _child(name: str, fn: Any) -> Child | None:
    """Points of one density; None where nothing can be drawn, or what is drawn has no order."""
    support = getattr(fn, "support", None)
    if isinstance(fn, Unit) or support is None:
        return None
    num = max(4, min(NUM_DRAWS, BATCH_NUMBERS // (KEPT * max(1, fn.shape().numel()))))
    try:
        draws = fn.sample((num,)).detach()
        points = draws if support.is_discrete else _mirrored(name, fn, draws)
        # larger values of a count mean more, which is not so of categories
        ordered = fn.event_dim == 0 and not isinstance(innermost(fn), torch.distributions.Categorical)
        usable = bool(torch.isfinite(fn.log_prob(points)).all()) and (ordered or not support.is_discrete)
        return Child(name, points, support.is_discrete) if usable else None
    except (NotImplementedError, RuntimeError, ValueError, AssertionError):  # a chain that was not told its length
        return None


def _mirrored(name: str, fn: Any, draws: Tensor) -> Tensor:
    """Draws and their mirror images about the centre in unconstrained space.

    The centre is the mean where that is the same there, else the median of the draws.
    """
    transform = bijection(name, fn)
    y = transform.inv(draws)
    centre = y.median(0).values
    with suppress(NotImplementedError, AttributeError):  # no mean is told
        if is_affine(transform) and isinstance(fn.mean, Tensor):  # over all real numbers, or a subspace
            mean = transform.inv(fn.mean.detach().expand(fn.shape()))
            if mean.shape == centre.shape:
                centre = torch.where(torch.isfinite(mean), mean, centre)
    return transform(torch.cat([y, 2.0 * centre - y]))


def spreads(site: str, changes: Changes, here: Run) -> bool:
    """Whether ``site`` changes the spread of some child at its centre held.

    :param changes: for each latent site, by child, what :meth:`Run.changes` gives along it.
    """
    for child in here.children:
        own = changes[site].get(child.name)
        if own is None or child.name == site or not _acts(own):
            continue
        others = [c[child.name] for n, c in changes.items() if n not in (site, child.name) and _acts(c[child.name])]
        if _spreads(own, others, child, here):
            return True
    return False


def _acts(slope: Tensor) -> bool:
    return bool(torch.isfinite(slope).all()) and bool((_centred(slope).abs() > 1e-9).any())


def _centred(slope: Tensor) -> Tensor:
    return slope - slope.mean(0)


def _spreads(own: Tensor, others: list[Tensor], child: Child, here: Run) -> bool:
    if child.counts:
        line = child.points.double().expand_as(own)
        return _share(_unexplained(own, [line]), own) > NOT_LINEAR
    more = _share(_unexplained(own, [here.shift(child)]), own)
    if more < ROUNDING:
        return False  # it moves the child, and nothing else
    if more >= NOT_A_SHIFT or _even_share(own) >= HALF:
        return True
    rest = _unexplained(own, others)
    return bool(others) and _share(rest, own) > ROUNDING and _even_share(rest) >= CLEARLY


def _even_share(slope: Tensor) -> float:
    """Share of a change that is the same on both sides of the centre, of mirrored pairs."""
    above, below = slope.chunk(2)
    even, odd = _centred(0.5 * (above + below)), 0.5 * (above - below)
    return _share(even, torch.cat([even, odd]))


def _share(part: Tensor, whole: Tensor) -> float:
    """Sum of squares of one in that of the other, each centred."""
    total = _centred(whole).square().sum()
    return float(_centred(part).square().sum() / total) if bool(total > 0) else 0.0


def _unexplained(own: Tensor, others: list[Tensor]) -> Tensor:
    """Residual of ``own`` ``(2 M, ...)`` after the best combination of others, in each element by itself."""
    if not others:
        return _centred(own)
    y = _centred(own).flatten(1) if own.dim() > 1 else _centred(own).unsqueeze(-1)
    X = torch.stack([_centred(o).reshape(y.shape) for o in others], -1).transpose(0, 1)  # (E, 2M, K)
    size = X.norm(dim=1, keepdim=True)
    X = X / torch.where(size > 0, size, 1.0)
    gram = X.mT @ X + EXACT * torch.eye(X.shape[-1]).to(X)
    fit = X @ torch.linalg.solve(gram, X.mT @ y.T.unsqueeze(-1))
    return (y.T.unsqueeze(-1) - fit).squeeze(-1).T.reshape(own.shape)


def multiplying(joint: LogJoint, candidates: Sequence[Coordinate], theta: Tensor) -> set[str]:
    """Those of ``candidates`` that the likelihood sees as factors of other, real-valued sites.

    Either exactly, ``s dL/ds = sum_j c_j w_j dL/dw_j`` with constants ``c`` (the likelihood depends on the product), or
    through them alone: where all sites whose prior is symmetric about zero are zero, ``dL/ds`` is zero, in every state
    of the discrete sites.
    """
    real = [p for p in joint.latents if is_affine(p.transform)]
    if not real or not candidates:
        return set()
    num = 2 * (len(real) + 2)  # twice as many places as are needed to tell
    u = normal_draws(num, joint.latents.size, seed=2).to(joint.device)

    def likelihood(joint: LogJoint, trace: Trace) -> Tensor:
        return joint.total(trace, (*joint.discrete, *joint.observed))

    slope = _slopes(joint, u, theta, likelihood)
    for _ in range(TRIES):  # as where a rate is the exponential of a sum of many latents
        far = ~slope.isfinite().all(-1)
        if bool(far.any()):
            u[far] *= NEARER
            slope = _slopes(joint, u, theta, likelihood)
    rates = {p.name: _scaling(joint, p, u, slope) for p in (*real, *candidates)}
    seen = [p for p in candidates if bool((rates[p.name] != 0).any())]
    if not seen or not bool(torch.isfinite(slope).all()):
        return set()
    others = [rates[p.name] for p in real if bool((rates[p.name] != 0).any())]
    X = torch.stack([rate / rate.norm() for rate in others] or [torch.zeros_like(u[:, 0])], -1)
    found, at_zero = set(), u[:2].clone()
    for p in seen:
        own = rates[p.name]
        rest = own - X @ (torch.linalg.pinv(X) @ own)
        if bool(rest.square().sum() <= EXACT * own.square().sum()):
            found.add(p.name)
    if len(found) == len(seen):
        return found
    nodes = joint.trace(u[0], theta).nodes
    for part in real:
        if _is_symmetric(part, nodes[part.name]["fn"], theta):
            at_zero[:, joint.latents.slices[part.name]] = 0.0
    slope = _slopes(joint, at_zero, theta, _every_state).abs()
    moving = (slope > EXACT * slope.max()).any(0)
    return found | {p.name for p in seen if not bool(moving[joint.latents.slices[p.name]].any())}


def _slopes(joint: LogJoint, u: Tensor, theta: Tensor, value_of: Callable[[LogJoint, Trace], Tensor]) -> Tensor:
    """Gradient of a number of the model's run in every latent, ``(R, D)``."""

    def one(u: Tensor, theta: Tensor) -> Tensor:
        trace = joint.trace(u, theta)
        with without_validation():
            return value_of(joint, trace).double()

    u = u.clone().requires_grad_()
    value = rows.apply(one, (u, theta.expand(len(u), -1)), BATCH_NUMBERS, one)
    found = torch.autograd.grad(value.sum(), u, allow_unused=True)[0] if value.requires_grad else None
    return torch.zeros_like(u) if found is None else found.detach()


def _every_state(joint: LogJoint, trace: Trace) -> Tensor:
    """The log densities of data and discrete sites in all states of the latter, added with weights of no pattern."""
    names, total = (*joint.discrete, *joint.observed), torch.zeros((), device=joint.device).double()
    trace.compute_log_prob(lambda name, _: name in names)
    for name in names:
        cells = trace.nodes[name]["log_prob"].double()
        weight = 1.5 + torch.arange(1.0, cells.numel() + 1.0, device=cells.device).sin().reshape(cells.shape)
        total = total + (weight * torch.where(torch.isfinite(cells), cells, 0.0)).sum()
    return total


def _scaling(joint: LogJoint, site: Coordinate, u: Tensor, slope: Tensor) -> Tensor:
    """``sum_i x_i dL/dx_i`` over the elements of a site in its own space, shape ``(R,)``."""
    block = joint.latents.slices[site.name]
    if not site.size:
        return u.new_zeros(len(u))
    before = u[:, block].reshape(len(u), *site.unconstrained_shape).requires_grad_()
    if is_affine(site.transform):
        return (u[:, block] * slope[:, block]).sum(-1)
    x = site.transform(before)
    if x.shape != before.shape:
        return u.new_zeros(len(u))
    rate = torch.autograd.grad(x.sum(), before)[0]
    move = torch.where(rate != 0, x.detach() / rate, 0.0)  # of u, where x is multiplied by 1 + e
    return (move.reshape(len(u), -1) * slope[:, block]).sum(-1)


def _is_symmetric(site: Coordinate, fn: Any, like: Tensor) -> bool:
    """Whether a prior has one density at ``x`` and ``-x``, both in its support."""
    free = generic_directions(2, site.size, like)
    x = site.transform(free.reshape(2, *site.unconstrained_shape))
    if not bool(fn.support.check(-x).all()):
        return False
    here, there = fn.log_prob(x).double(), fn.log_prob(-x).double()
    return bool(((here - there).abs() <= relative_rounding(here.dtype) * (1.0 + here.abs())).all())


def marginalised_sites(
    joint: LogJoint, marginalise: Sequence[str] | None, inside: Sequence[str] = (), own: Sequence[str] = ()
) -> tuple[str, ...]:
    """The sites to integrate numerically around Laplace: those that are named, or those that are found.

    :param joint: the log joint with all of these sites among its latents.
    :param inside: sites that are not looked at: they multiply others, element by element.
    :param own: sites that are looked at and left inside, where blocks of them are integrated.
    :param marginalise: names; None for those that :func:`sites_to_marginalise` finds.
    :raises BadInput: for names that are no continuous latent sites of ``joint``, for too many coordinates.
    """
    chosen = sites_to_marginalise(joint, inside) if marginalise is None else _named(joint, marginalise)
    chosen = tuple(name for name in chosen if name not in own)
    sizes = {p.name: p.size for p in joint.latents if p.name in chosen}
    if sum(sizes.values()) > MOST:
        largest = sorted(sizes, key=sizes.__getitem__)[-1:]
        raise BadInput(
            f"sites {sizes} set the spread of others and would be integrated numerically, but they have "
            f"{sum(sizes.values())} coordinates together; at most {MOST} can be. For a scale of each weight use REVM, "
            f"which learns them; or run NUTS on the model; or maximise the larger ones, maximise={largest}; or "
            "name the few that matter in marginalise=[...]; marginalise=() puts one Gaussian over everything."
        )
    return chosen


def _named(joint: LogJoint, marginalise: Sequence[str]) -> tuple[str, ...]:
    check_kind("marginalise", marginalise)
    if isinstance(marginalise, str):
        raise BadInput(
            f"marginalise={marginalise!r}; expected a list of names of latent sites, such as "
            f"marginalise=[{marginalise!r}]."
        )
    for name in marginalise:
        if name in joint.maximised_sites:
            raise BadInput(
                f"site '{name}' is both in marginalise, to be integrated, and in maximise, to be maximised; name it "
                "once."
            )
        if name in joint.discrete:
            raise BadInput(
                f"marginalise names '{name}', a discrete site, which is summed out already; leave it out of "
                "marginalise."
            )
        if name not in joint.latents.slices:
            raise BadInput(f"marginalise names '{name}'; expected latent sites out of {list(joint.latents.names)}.")
    if len(set(marginalise)) == len(joint.latents.names):
        raise BadInput(
            f"marginalise={list(marginalise)} leaves nothing for Laplace inside; leave at least one of the sites "
            "out, or pass marginalise=() for one Gaussian over all of them."
        )
    return tuple(sorted(set(marginalise)))


def sites_to_marginalise(joint: LogJoint, inside: Sequence[str] = ()) -> tuple[str, ...]:
    """Latent sites on positive or bounded support that spread others; beside them numbers that multiply others.

    :param joint: the log joint with all of these sites among its latents.
    :param inside: sites that are not looked at.
    """
    candidates = [p for p in joint.latents if not is_affine(p.transform) and p.name not in inside]
    if not candidates or len(joint.latents.parts) == 1:
        return ()
    theta, generator = joint.initial_theta, torch.Generator().manual_seed(1)
    real = [p for p in joint.latents if is_affine(p.transform) and p.name not in inside]
    numbers = [p.name for p in real if p.size == 1]
    numbers = numbers if len(numbers) <= MOST and len(numbers) < len(real) else []
    taken, at_points = set[str](), list[Changes]()
    for point in range(NUM_POINTS):
        u = 0.5 * torch.randn(joint.latents.size, generator=generator, dtype=torch.float64).to(joint.device)
        for name in numbers if point == 0 else ():
            u[joint.latents.slices[name]] = 0.0
        here = _run(joint, u, theta)
        along = u.new_zeros(len(joint.latents.parts), len(u))  # all elements of a candidate together, others apart
        for row, p in zip(along, joint.latents, strict=True):
            block = joint.latents.slices[p.name]
            size = block.stop - block.start
            row[block] = (torch.randn(size, generator=generator) if is_affine(p.transform) else torch.ones(size)).to(u)
        at_points.append(dict(zip(joint.latents.names, here.changes(along), strict=True)))
        taken |= {p.name for p in candidates if p.name not in taken and spreads(p.name, at_points[-1], here)}
    without, changes = at_points
    taken |= multiplying(joint, [p for p in candidates if p.name not in taken], theta)
    # single numbers that a pyro.factor sees, which does not say what they do there, where these are few
    factors = [here.nodes[name]["fn"].log_factor.sum() for name in joint.factors]
    slope = pullback(torch.stack(factors).sum(), here.u) if factors else torch.zeros_like(here.u)
    seen = {p.name for p in candidates if p.size == 1 and bool(slope[joint.latents.slices[p.name]] != 0)}
    if sum(p.size for p in candidates if p.name in seen | taken) <= PRODUCT_DIMS:
        taken |= seen
    # Single real numbers that multiply a site of many elements, such as the slope on a predictor that is latent: some
    # density that sees the elements no longer does once the number is zero.  The joint mode of two factors says little
    # of their spread; given the number, what it multiplies is linear.  None where the signs of both can be turned,
    # which makes two modes, nor where these are more axes than a product of nodes bears.
    u, slices, affine = here.u.detach(), joint.latents.slices, [p for p in joint.latents if is_affine(p.transform)]
    found, multiplied = _multiplying_in_factors(here, real)
    wide = _unseen(changes, without, {p.name for p in affine if p.size > 1})
    for name in numbers if wide else ():
        off = u.clone()
        off[slices[name]] = 0.0
        left = _run(joint, off, theta).changes(along)
        found |= {name} if _unseen(changes, dict(zip(joint.latents.names, left, strict=True)), wide) else set()
    multiplied |= wide
    if found and sum(p.size for p in joint.latents if p.name in taken | found) <= PRODUCT_DIMS:
        turned = u.clone()
        for name in found | multiplied:
            turned[slices[name]] *= -1.0
        heights = joint.log_joint(torch.stack([u, turned]), theta).detach()
        same = (heights[0] - heights[1]).abs() <= relative_rounding(joint.dtype) * (1.0 + heights[0].abs())
        taken |= set() if bool(same) else found
    more = taken
    while more:  # with the positive or bounded sites that the prior of a marginalised one depends on
        taken |= more
        others = [p.name for p in candidates if p.name not in taken]
        pulls = {n: [c for c, slope in changes[n].items() if c != n and bool((slope != 0).any())] for n in others}
        more = {n for n in others if taken & {*pulls[n]}}
    return tuple(sorted(taken)) if len(taken) < len(joint.latents.parts) else ()


def _multiplying_in_factors(here: Run, real: Sequence[Coordinate]) -> tuple[set[str], set[str]]:
    """Few real numbers that the curvature of factors of latents depends on, and the sites of many elements in these.

    Factors are those of ``pyro.factor`` and of data that are made of latents: an autoregression's coefficients multiply
    lagged slices there.  None where, given them, factors are not quadratic in the sites of many elements.
    """
    joint, u = here.joint, here.u.detach()
    wide, few = ([p for p in real if (p.size > PRODUCT_DIMS) == many] for many in (True, False))
    names = tuple(n for n in joint.observed if _is_of_latents(here.nodes[n]))
    if not (names and wide and few):
        return set(), set()
    free = torch.zeros(len(few) + 3, len(u), dtype=torch.bool, device=u.device)  # of a step, no move, and moves
    for row, parts in zip((0, 2, *range(3, len(free))), (wide, wide, *([p] for p in few)), strict=True):
        for p in parts:
            free[row, joint.latents.slices[p.name]] = True
    moves = torch.where(free, normal_draws(*free.shape, seed=3).to(u), 0.0)
    places = torch.cat([u + moves[1:], u + moves[1:] + moves[0]])
    slope = _slopes(joint, places, joint.initial_theta, lambda joint, trace: joint.total(trace, names))
    change = torch.where(free[0], slope.chunk(2)[1] - slope.chunk(2)[0], 0.0)
    moved = ((change - change[0]).abs().amax(-1) > ROUNDING * change.abs().amax()).tolist()
    if moved[1] or not bool(change.isfinite().all()):
        return set(), set()
    found = {p.name for p, own in zip(few, moved[2:], strict=True) if own}
    return found, {p.name for p in wide if bool((change[:, joint.latents.slices[p.name]] != 0).any())}


def _is_of_latents(node: Any) -> bool:
    """Whether an observed site is a factor of latents: of ``pyro.factor``, or with a value that is made of latents."""
    value = node["fn"].log_factor if isinstance(node["fn"], Unit) else node["value"]
    return isinstance(value, Tensor) and value.requires_grad


def _unseen(changes: Changes, left: Changes, names: set[str]) -> set[str]:
    """Which of some sites some density sees by ``changes``, and no more by ``left``."""
    pairs = ((name, child, after) for name in names for child, after in left[name].items())
    return {n for n, c, after in pairs if c in changes[n] and _acts(changes[n][c]) and not _acts(after)}
