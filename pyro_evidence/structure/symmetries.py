"""Latent spaces that can be turned at no cost: where they are, found by values at random points, never by names.

Where a density stays the same when the last axis of a latent site is turned, its modes form an orbit: the curvature
is zero along it, and Laplace's approximation about one point of it has no meaning.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.distributions import SigmoidTransform, Transform

from pyro_evidence.errors import UnsupportedModel
from pyro_evidence.numerics.batched import apply
from pyro_evidence.numerics.coordinates import is_identity, transform_steps
from pyro_evidence.numerics.derivatives import normal_draws
from pyro_evidence.program.constants import differentiable_trace, prior_depends
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.simulate import rows_at_once
from pyro_evidence.structure.density import AutogradDensity
from pyro_evidence.structure.recognise import Structure

# Sites that turn together; of each all, or what an index says.
Turn = tuple[tuple[str, Any], ...]
LARGEST = 64  # latent dimensions, and elements of an axis that change their signs one by one
MOST_PARTS = 16  # elements of an axis that are rotated one by one, and sites that are turned in pairs
MOST_MIRRORS = 8  # whose 256 images are told apart from a mode in all combinations
LOOKS, END = 8, 24.0  # rows; and a logit, 4e-11 of an interval, by which no density with a slope changes by more than
CLOSED = 1e-8  # of its log
APART = 0.5  # standard deviations, of another order from a mode
MOST_MOVES = 8  # that are tried in pairs and in threes: 84 rows
MOVED = 0.5  # of unconstrained hyperparameters: to far from where Laplace's log evidence is infinite


def off_orbits(joint: LogJoint) -> Tensor:
    """Hyperparameters ``(T,)`` at which a search may begin: the initial ones, or where no latent space can be turned.

    It can at equal lengthscales, where Laplace's log evidence is infinite; so these become unequal.

    :raises UnsupportedModel: where it can be turned there as well, with the sites that turn, and the engine that
        integrates over all turns.
    """
    begun = joint.initial_theta
    moved = begun + MOVED * normal_draws(len(begun)).to(begun)
    for turn in _proposals(joint):
        if not _changes_nothing(joint, turn, joint.initial_theta):
            continue
        if _changes_nothing(joint, turn, moved):
            names, held = " and ".join(f"'{name}'" for name, _ in turn), turn[0][0]
            raise UnsupportedModel(
                f"the latent space of site {names} can be turned without any change of the density: its "
                "curvature has eigenvalues of zero, and Laplace's approximation about one point no meaning. Either "
                f"write {held} * torch.ones_like({held}).tril(), whose zeros above the diagonal hold it, or offer one "
                "latent; a mixture of probabilistic PCA is fitted by EvidenceEM(model).run(Y), which integrates over "
                "all turns."
            )
        begun = moved
    return begun


def mirrors(joint: LogJoint, theta: Tensor) -> tuple[Turn, ...]:
    """Real sites, one or two, whose signs can be turned without any change of the density, though the data see them.

    Or one element of these along axes of one length, such as a column of loadings with its factor.  What follows from
    those before is left out: of ``r``, each mode has ``2^r`` images.
    """
    if sum(is_identity(p.transform) for p in joint.latents) > MOST_PARTS:  # as of a recursion, whose steps are sites
        return ()
    turns = sorted(sign_turns(joint, LARGEST), key=lambda turn: int(turned_by(joint, turn).sum()))  # parts first
    u = normal_draws(joint.latents.size)
    height = _heights(joint, torch.stack([u, *(_scaled(joint, turn, u, -1.0) for turn in turns)]), theta)
    level = joint.are_level(height, height[0])[1:].tolist()
    turns = [turn for turn, same in zip(turns, level, strict=True) if same]
    found, basis = [], list[Tensor]()
    for turn, seen in zip(turns, _are_seen(joint, turns, u, theta).tolist(), strict=True):
        rest = turned_by(joint, turn)
        for known in basis:  # elimination modulo two
            rest = rest ^ known if bool(rest[known.int().argmax()]) else rest
        if seen and bool(rest.any()) and _changes_nothing(joint, turn, theta, flipped):
            found.append(turn)
            basis.append(rest)
    return tuple(found)


def sign_turns(joint: LogJoint, largest: int) -> list[Turn]:
    """Real sites, one or two whole, and one element of all of them along axes of one length, up to the largest."""
    real = [p.name for p in joint.latents if is_identity(p.transform)]
    found: list[Turn] = [tuple((n, None) for n in some) for k in (1, 2) for some in combinations(real, k)]
    for size in sorted(size for size in lengths(joint) if size <= largest):
        axes = [(name, axis) for name, axis in axes_of_length(joint, size).items() if name in real]
        found += [tuple((name, (slice(None),) * axis + (k,)) for name, axis in axes) for k in range(size) if axes]
    return found


def turned_by(joint: LogJoint, turn: Turn) -> Tensor:
    """The coordinates that turn, bool ``(D,)``."""
    return flipped(joint, turn, torch.ones(joint.latents.size)) < 0


def images(joint: LogJoint, turns: Sequence[Turn]) -> Tensor:
    """The coordinates that turn in each combination of turns but the one in which none does; of many in each turn.

    Bool ``(I, D)``.
    """
    if len(turns) > MOST_MIRRORS:  # what is nearest of these is so of all that do not overlap
        return torch.stack([turned_by(joint, turn) for turn in turns]).to(joint.device)
    found = torch.zeros(1, joint.latents.size, dtype=torch.bool)
    for turn in turns:
        found = torch.cat([found, found ^ turned_by(joint, turn)])
    return found[1:].to(joint.device)


def are_nearest(u: Tensor, mode: Tensor, variance: Tensor, turned: Tensor) -> Tensor:
    """Which rows ``(S, D)`` are no nearer to an image of a mode than to the mode itself, bool ``(S,)``.

    :param mode, variance: ``(D,)``, or one for each row.
    :param turned: coordinates that change their signs in each image, bool ``(I, D)``.
    """
    return ((u * mode / variance) @ turned.to(u).mT >= 0).all(-1)


def described(turn: Turn) -> str:
    """The sites of a turn, as a sentence names them."""
    sites = " and ".join(f"'{name}'" for name, _ in turn)
    return sites if turn[0][1] is None else f"one element along an axis of {sites}"


def has_images(joint: LogJoint) -> bool:
    """Whether modes have images elsewhere: signs can be turned, or an interval's ends meet, about which modes lie."""
    rows, theta = 0.5 * normal_draws(LOOKS, joint.latents.size).to(joint.device), joint.initial_theta
    return bool(mirrors(joint, theta)) or bool(angles(joint, rows, theta).any())


def other_orders(joint: LogJoint, u: Tensor) -> Tensor:
    """The images ``(I, D)`` of a place under exchanges of what looks alike that leave the density as it is: of labels.

    Sites, with what tells them apart, or all elements along axes of one length.  Told by the density, with its data,
    at two random points.
    """
    looks = normal_draws(2, len(u)).to(u)
    rows, found = torch.cat([looks, u.unsqueeze(0)]), [u.expand(0, -1)]
    if len(images := torch.stack([rows, *exchanged(joint, rows)])) > 1:
        found.append(images[1:, -1][are_level(joint, images[:, :-1], joint.initial_theta)])
    for size in lengths(joint):
        image = without_order(joint, rows, size, joint.initial_theta)
        found += [] if image is None else [image[1:, -1]]
    return torch.cat(found)


def without_order(joint: LogJoint, rows: Tensor, size: int, theta: Tensor) -> Tensor | None:
    """Rows ``(S, D)`` with any two elements along axes of one length exchanged, themselves first, ``(I, S, D)``.

    None where that changes the density, but of the last row, which is not looked at.
    """
    images = relabelled(joint, rows, axes_of_length(joint, size), swaps(size))
    looks = images[:, :-1]
    level = (are_level(joint, some, theta).all() for some in (looks[:2], looks))  # the first tells, as a rule
    return images if all(map(bool, level)) else None


def has_labels_beside(joint: LogJoint, marginalised: Sequence[str]) -> bool:
    """Whether what can be exchanged are these sites, or sites whose priors do not hang on them.

    What has one of them for its scale has a mode given that one alone.
    """
    here = normal_draws(joint.latents.size, seed=1).to(joint.device)
    moved = ~torch.isclose(other_orders(joint, here), here).all(0)  # values that are transformed there and back round
    names = [name for name, where in joint.latents.slices.items() if bool(moved[where].any())]
    seen = _are_seen(joint, [((name, None),) for name in names], here, joint.initial_theta).tolist()
    names = [name for name, each in zip(names, seen, strict=True) if each]
    if not names or {*names} & {*marginalised}:
        return bool(names)
    values, _, nodes = differentiable_trace(joint, here, joint.initial_theta)
    return not any(prior_depends(nodes[name], [values[site] for site in marginalised]) for name in names)


def has_other_orders(joint: LogJoint, u: Tensor, whiten: Callable[[Tensor], Tensor] | None) -> bool:
    """Whether what looks alike has other orders, half a standard deviation or more from a mode.

    :param whiten: rows from the mode to standard deviations; None: of a fit that has failed, whose mode is not known.
    """
    orders = other_orders(joint, u) - u
    return len(orders) > 0 and (whiten is None or bool((whiten(orders).norm(dim=-1) > APART).any()))


def are_level(joint: LogJoint, images: Tensor, theta: Tensor) -> Tensor:
    """Which images ``(I, S, D)``, the first the rows themselves, have the same density of values, bool ``(I - 1,)``."""
    rows = images.flatten(0, 1).to(joint.dtype)
    height = (_heights(joint, rows, theta) - joint.latents.constrained_with_log_det(rows)[1]).view(images.shape[:2])
    return joint.are_level(height[1:], height[0]).all(-1)


def _heights(joint: LogJoint, rows: Tensor, theta: Tensor) -> Tensor:
    """Log joint densities of rows ``(R, D)``, nats, ``(R,)``, as many at once as there is room for."""
    parts = rows.to(joint.device).split(rows_at_once(joint) if len(rows) > LOOKS else LOOKS)
    return torch.cat([joint.log_joint(some, theta).detach() for some in parts])


def exchanged(joint: LogJoint, u: Tensor) -> list[Tensor]:
    """Rows ``(..., D)`` with sites that look alike exchanged, and with up to two more of these at once.

    The two elements of every axis of that length; an interval, or two shares, from the other end.  Each is an order of
    the unconstrained coordinates with some signs turned.
    """
    moves, found = list(_moves(joint)), []
    for num in (1, 2, 3):
        for some in combinations(moves if num == 1 else moves[:MOST_MOVES], num):
            image = u
            for order, sign in some:
                image = image[..., order.to(u.device)] * sign.to(u)
            found.append(image)
    return found


def _moves(joint: LogJoint) -> Iterator[tuple[Tensor, Tensor]]:
    """Orders and signs of all coordinates ``(D,)`` in which something changes places."""
    latents, size = joint.latents, joint.latents.size
    places = {p.name: torch.arange(size)[latents.slices[p.name]].view(p.unconstrained_shape) for p in latents}
    halves = [p for p in latents if 2 in p.shape and len(p.shape) == len(p.unconstrained_shape)]
    several = any(p.shape.count(2) > 1 for p in halves)  # such as transitions, from and to each of two states
    for most in (1, 2) if several else (1,) if halves else ():
        order, sign = torch.arange(size), torch.ones(size)
        for part in halves:
            for axis in [axis for axis, length in enumerate(part.shape) if length == 2][:most]:
                if part.unconstrained_shape[axis] == 1:  # two shares, of which the logit of one is the coordinate
                    sign[latents.slices[part.name]] *= -1.0
                else:
                    order[latents.slices[part.name]] = order[places[part.name]].flip(axis).flatten()
        yield order, sign
    for part in (p for p in latents if _is_interval(p.transform)):
        sign = torch.ones(size)
        sign[latents.slices[part.name]] = -1.0
        yield torch.arange(size), sign
    for a, b in combinations(latents, 2):
        if a.unconstrained_shape == b.unconstrained_shape and type(a.transform) is type(b.transform):
            order = torch.arange(size)
            order[latents.slices[a.name]] = places[b.name].flatten()
            order[latents.slices[b.name]] = places[a.name].flatten()
            yield order, torch.ones(size)


def lengths(joint: LogJoint) -> set[int]:
    """Lengths of all axes of latent sites, from two on."""
    return {size for part in joint.latents for size in part.shape if size > 1}


def swaps(size: int) -> list[tuple[int, ...]]:
    """The order of so many elements, and each in which two of them are exchanged."""
    found = [tuple(range(size))]
    for i, j in combinations(range(size), 2):
        found.append(tuple(j if k == i else i if k == j else k for k in range(size)))
    return found


def relabelled(joint: LogJoint, u: Tensor, axes: Mapping[str, int], orders: Sequence[Sequence[int]]) -> Tensor:
    """Unconstrained rows ``(S, D)`` with elements along some sites' axes in each of some orders, ``(len, S, D)``."""
    if not axes:
        return u.unsqueeze(0)
    each, rows = torch.tensor(orders).repeat_interleave(len(u), 0), u.repeat(len(orders), 1)
    return reordered(joint, rows, axes, each).unflatten(0, (-1, len(u)))


def reordered(joint: LogJoint, u: Tensor, axes: Mapping[str, int], orders: Tensor) -> Tensor:
    """Unconstrained rows ``(S, D)`` with elements along some sites' axes in orders ``(S, K)`` of their own."""
    values = joint.latents.constrained(u.to(joint.dtype))
    moved = values | {n: renamed(values[n], orders, axis + 1) for n, axis in axes.items()}
    return torch.cat([p.transform.inv(moved[p.name]).reshape(len(u), -1) for p in joint.latents], -1).to(u)


def renamed(value: Tensor, orders: Tensor, axis: int) -> Tensor:
    """Rows ``(S, ...)`` with one axis reordered, each by its own order."""
    moved = value.movedim(axis, 1)
    index = orders.to(value.device).reshape(*orders.shape, *[1] * (moved.dim() - 2)).expand_as(moved)
    return moved.gather(1, index).movedim(1, axis)


def axes_of_length(joint: LogJoint, num: int) -> dict[str, int]:
    """The first axis of length ``num``, two or more, of each latent site that has one."""
    return {p.name: list(p.shape).index(num) for p in joint.latents if num > 1 and num in p.shape}


def angles(joint: LogJoint, rows: Tensor, theta: Tensor) -> Tensor:
    """Which coordinates lie on an interval at whose ends the density is the same, as on a circle, bool ``(D,)``.

    :param rows: unconstrained places ``(S, D)`` of the others at which ends are compared.
    """
    found = on_intervals(joint).to(rows.device)
    inside = found.nonzero()
    if len(inside):
        ends = torch.cat([rows.index_fill(1, index, end) for end in (-END, END) for index in inside])
        low, high = _heights(joint, ends, theta).view(2, len(inside), len(rows))
        found[inside.flatten()] = ((low - high).abs() <= CLOSED * (1.0 + low.abs())).all(-1)
    return found


def on_intervals(joint: LogJoint) -> Tensor:
    """Which coordinates are log odds of a place on an interval, each alone, bool ``(D,)``."""
    found = torch.zeros(joint.latents.size, dtype=torch.bool)
    for part in (part for part in joint.latents if _is_interval(part.transform)):
        found[joint.latents.slices[part.name]] = True
    return found


def _is_interval(transform: Transform) -> bool:
    """Whether values are the logistic function of unconstrained ones, or a multiple of that, each alone."""
    return isinstance(next(iter(transform_steps(transform)), None), SigmoidTransform)


def _proposals(joint: LogJoint) -> Iterator[Turn]:
    """Sites alone, then all that end in the same number of dimensions, then the parts of those with three axes."""
    spaces = (p for p in joint.latents if len(p.shape) > 1 and 1 < p.shape[-1] <= LARGEST)
    sites = [p for p in spaces if is_identity(p.transform)]
    for site in sites:
        yield ((site.name, None),)
    for size in sorted({p.shape[-1] for p in sites}):
        together: Turn = tuple((p.name, None) for p in sites if p.shape[-1] == size)
        if len(together) > 1:
            yield together
    for site in sites:
        if len(site.shape) > 2 and 1 < site.shape[0] <= MOST_PARTS:
            yield from (((site.name, k),) for k in range(site.shape[0]))


def _changes_nothing(joint: LogJoint, turn: Turn, theta: Tensor, turned: Callable[..., Tensor] | None = None) -> bool:
    """Whether the density is the same after a turn at two random points, though the data see what is turned.

    :param turned: of the joint, the turn and a point, the point turned; None: by a random rotation.
    """
    generator = torch.Generator().manual_seed(0)
    turned = partial(_turned, generator=generator) if turned is None else turned
    for _ in range(2):
        u = torch.randn(joint.latents.size, generator=generator, dtype=torch.float64)
        values = joint.log_joint(torch.stack([u, turned(joint, turn, u)]).to(joint.device), theta).detach()
        rounding = joint.rounding * (1.0 + values[0].abs())
        if not bool((values[1] - values[0]).abs() <= rounding) or not bool(_are_seen(joint, [turn], u, theta)):
            return False
    return True


def _are_seen(joint: LogJoint, turns: Sequence[Turn], u: Tensor, theta: Tensor) -> Tensor:
    """Whether more than its own prior sees what turns, ``(M,)`` bool; else its mode is a point."""
    points = torch.stack([u, *(_scaled(joint, turn, u, 0.5) for turn in turns)]).to(joint.device)
    names = list(joint.latents.slices)

    def priors(point: Tensor) -> Tensor:
        nodes = joint.trace(point, theta).nodes
        return torch.stack([nodes[n]["fn"].log_prob(nodes[n]["value"]).sum().double() for n in names])

    values, each = joint.log_joint(points, theta), apply(priors, (points,), joint.row_bytes, priors)
    own = torch.tensor([[name in dict(turn) for name in names] for turn in turns]).reshape(-1, len(names)).to(each)
    away = (values[1:] - values[0] - ((each[1:] - each[0]) * own).sum(-1)).detach().abs()
    return away > joint.rounding * (1.0 + values[0].abs())


def _parts(joint: LogJoint, turn: Turn, u: Tensor) -> Iterator[Tensor]:
    """Views of what turns, latent dimensions last."""
    for name, element in turn:
        site = next(p for p in joint.latents if p.name == name)
        value = u[joint.latents.slices[name]].reshape(site.unconstrained_shape)
        yield value if element is None else value[element]


def _turned(joint: LogJoint, turn: Turn, u: Tensor, generator: torch.Generator) -> Tensor:
    u = u.clone()
    parts = list(_parts(joint, turn, u))
    size = parts[0].shape[-1]
    rotation = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=u.dtype)).Q
    for part in parts:
        part.copy_(part @ rotation)
    return u


def _scaled(joint: LogJoint, turn: Turn, u: Tensor, factor: float) -> Tensor:
    u = u.clone()
    for part in _parts(joint, turn, u):
        part.mul_(factor)
    return u


flipped = partial(_scaled, factor=-1.0)

Axis = tuple[str, int]  # a site, and one of its dims


def has_hidden_units(structure: Structure) -> bool:
    """Whether observed sites whose predictors are not linear see the latents through two hidden units at least."""
    if structure.network is not None:
        return True
    density = structure.density
    if not structure.likelihoods or structure.factors is not None:
        return False
    try:
        by_size: dict[int, list[Axis]] = defaultdict(list)  # units of one layer, or of several layers as wide
        shapes = {p.name: p.unconstrained_shape for p in density.joint.latents}
        for name, dim in _alike(density):
            by_size[shapes[name][dim]].append((name, dim))
        return any(_are_units(density, by_size[size]) for size in sorted(by_size))
    except (RuntimeError, ValueError):
        return False  # the model does not run there


def _predictor(density: AutogradDensity, u: Tensor) -> Tensor:
    """All predictors at one point, weighted by fixed random numbers: one number that tells points apart, ``()``."""
    trace = density.joint.trace(u, density.joint.initial_theta)
    etas = torch.cat([likelihood.blocks(trace).reshape(-1).double() for likelihood in density.likelihoods or ()])
    return etas @ normal_draws(len(etas), seed=1).to(etas)


def _alike(density: AutogradDensity) -> list[Axis]:
    """Dims along which all elements move the predictors alike where each site's elements are equal."""
    joint = density.joint
    values = joint.latents.unconstrained(normal_draws(joint.latents.size, seed=2).to(joint.device))
    equal = torch.cat([v.reshape(-1)[:1].expand(v.numel()) for v in values.values()]).requires_grad_()
    slope = torch.autograd.grad(_predictor(density, equal), equal)[0]
    found = []
    for name, own in joint.latents.unconstrained(slope).items():
        rounding = joint.rounding * float(own.abs().amax()) if own.numel() else 0.0
        for dim in range(own.dim() if rounding > 0.0 else 0):
            if own.shape[dim] > 1 and bool(((own - own.roll(1, dim)).abs() <= rounding).all()):
                found.append((name, dim))
    return found


def _are_units(density: AutogradDensity, axes: list[Axis]) -> bool:
    """Whether exchanging along all of these dims changes nothing, and predictors are bent along one of the sites."""
    joint, u = density.joint, normal_draws(density.joint.latents.size, seed=3).to(density.joint.device)
    if len({name for name, _ in axes}) < 2:
        return False
    values = joint.latents.unconstrained(u)
    for name, dim in axes:  # all units in the next one's place
        values[name] = values[name].roll(1, dim)
    exchanged = torch.cat([v.reshape(-1) for v in values.values()])
    before, after = joint.log_joint(torch.stack([u, exchanged]), joint.initial_theta).detach()
    return bool(joint.are_level(after, before)) and any(_is_bent(density, name, u) for name, _ in axes)


def _is_bent(density: AutogradDensity, name: str, u: Tensor) -> bool:
    """Whether the predictors are not linear in one site, the others held."""
    step = torch.zeros_like(u)
    step[density.joint.latents.slices[name]] = 0.5
    with torch.no_grad():
        behind, here, ahead = (_predictor(density, u + move) for move in (-step, torch.zeros_like(u), step))
    size = max(abs(float(x)) for x in (behind, here, ahead))
    return abs(float(ahead - 2.0 * here + behind)) > density.joint.rounding**0.5 * size
