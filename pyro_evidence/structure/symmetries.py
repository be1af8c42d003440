"""Latent spaces that can be turned at no cost: where they are, found by values at random points, never by names.

Where a density stays the same when the last axis of a latent site is turned, its modes form an orbit: the curvature
is zero along it, and Laplace's approximation about one point of it has no meaning.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations

import torch
from torch import Tensor
from torch.distributions import ComposeTransform, SigmoidTransform, Transform

from pyro_evidence.errors import UnsupportedModel
from pyro_evidence.numerics.coordinates import is_identity
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.simulate import rows_at_once
from pyro_evidence.structure.density import AutogradDensity
from pyro_evidence.structure.recognise import Structure

# Sites that turn together; of each all, or one element of its first axis.
Turn = tuple[tuple[str, int | None], ...]
LARGEST = 64  # latent dimensions
MOST_PARTS = 16  # elements of a first axis that are turned one by one
LOOKS, END = 8, 24.0  # rows; and a logit, 4e-11 of an interval, by which no density with a slope changes by more than
CLOSED = 1e-8  # of its log
MOVED = 0.5  # of unconstrained hyperparameters: to far from where Laplace's log evidence is infinite


def off_orbits(joint: LogJoint) -> Tensor:
    """Hyperparameters ``(T,)`` at which a search may begin: the initial ones, or where no latent space can be turned.

    It can at equal lengthscales, where Laplace's log evidence is infinite; so these become unequal.

    :raises UnsupportedModel: where it can be turned there as well, with the sites that turn, and the engine that
        integrates over all turns.
    """
    begun = joint.initial_theta
    away = MOVED * torch.randn(len(begun), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moved = begun + away.to(begun)
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


def sign_flips(joint: LogJoint) -> tuple[tuple[str, ...], ...]:
    """Real sites, one or two, whose signs can be turned without any change of the density, though the data see them.

    Their modes come in pairs.
    """
    real = [p.name for p in joint.latents if is_identity(p.transform)]
    chosen = [some for size in (1, 2) for some in combinations(real, size)]
    u = torch.randn(joint.latents.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turns = [tuple((name, None) for name in some) for some in chosen]
    rows = torch.stack([u, *(_scaled(joint, turn, u, -1.0) for turn in turns)]).to(joint.device)
    parts = rows.split(rows_at_once(joint))
    height = torch.cat([joint.log_joint(part, joint.initial_theta).detach() for part in parts])
    level = (height - height[0]).abs() <= joint.rounding * (1.0 + height[0].abs())
    return tuple(
        some
        for some, turn, same in zip(chosen, turns, level[1:].tolist(), strict=True)
        if same and _changes_nothing(joint, turn, joint.initial_theta, partial(_scaled, factor=-1.0))
    )


def has_images(joint: LogJoint) -> bool:
    """Whether modes have images elsewhere: signs can be turned, or an interval's ends meet, about which modes lie."""
    generator = torch.Generator().manual_seed(0)
    rows = 0.5 * torch.randn(LOOKS, joint.latents.size, generator=generator, dtype=torch.float64)
    return bool(sign_flips(joint)) or bool(angles(joint, rows.to(joint.device), joint.initial_theta).any())


def angles(joint: LogJoint, rows: Tensor, theta: Tensor) -> Tensor:
    """Which coordinates lie on an interval at whose ends the density is the same, as on a circle, bool ``(D,)``.

    :param rows: unconstrained places ``(S, D)`` of the others at which ends are compared.
    """
    found = torch.zeros(joint.latents.size, dtype=torch.bool, device=rows.device)
    for part in (part for part in joint.latents if _is_interval(part.transform)):
        found[joint.latents.slices[part.name]] = True
    inside = found.nonzero()
    if len(inside):
        ends = torch.cat([rows.index_fill(1, index, end) for end in (-END, END) for index in inside])
        values = torch.cat([joint.log_joint(some, theta).detach() for some in ends.split(rows_at_once(joint))])
        low, high = values.view(2, len(inside), len(rows))
        found[inside.flatten()] = ((low - high).abs() <= CLOSED * (1.0 + low.abs())).all(-1)
    return found


def _is_interval(transform: Transform) -> bool:
    """Whether values are the logistic function of unconstrained ones, or a multiple of that, each alone."""
    parts = transform.parts if isinstance(transform, ComposeTransform) else [transform]
    return bool(parts) and isinstance(parts[0], SigmoidTransform)


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
        other, shrunk = turned(joint, turn, u), _scaled(joint, turn, u, 0.5)
        values = joint.log_joint(torch.stack([u, other, shrunk]).to(joint.device), theta).detach()
        rounding = joint.rounding * (1.0 + values[0].abs())
        if not bool((values[1] - values[0]).abs() <= rounding):
            return False
        of_prior = []  # log densities of the sites that turn, nats
        for point in (u, shrunk):
            nodes = joint.trace(point.to(joint.device), theta).nodes
            sites = [nodes[name] for name in {name for name, _ in turn}]
            of_prior.append(torch.stack([s["fn"].log_prob(s["value"]).sum().double() for s in sites]).sum().detach())
        if bool((values[2] - values[0] - (of_prior[1] - of_prior[0])).abs() <= rounding):
            return False  # only the prior sees it: its mode is a point
    return True


def _parts(joint: LogJoint, turn: Turn, u: Tensor) -> Iterator[Tensor]:
    """Views of what turns, latent dimensions last."""
    for name, element in turn:
        site = next(p for p in joint.latents if p.name == name)
        value = u[joint.latents.slices[name]].reshape(site.shape)
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


Axis = tuple[str, int]  # a site, and one of its dims


def has_hidden_units(structure: Structure) -> bool:
    """Whether observed sites whose predictors are not linear see the latents through two hidden units at least."""
    if structure.network is not None:
        return True
    density = structure.density
    if not structure.slots or structure.factors is not None:
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
    etas = torch.cat([slot.blocks(trace).reshape(-1).double() for slot in density.slots or ()])
    draw = torch.randn(len(etas), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return etas @ draw.to(etas)


def _point(joint: LogJoint, seed: int) -> Tensor:
    draw = torch.randn(joint.latents.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return draw.to(joint.device)


def _alike(density: AutogradDensity) -> list[Axis]:
    """Dims along which all elements move the predictors alike where each site's elements are equal."""
    joint = density.joint
    values = joint.latents.unconstrained(_point(joint, 2))
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
    joint, u = density.joint, _point(density.joint, 3)
    if len({name for name, _ in axes}) < 2:
        return False
    values = joint.latents.unconstrained(u)
    for name, dim in axes:  # all units in the next one's place
        values[name] = values[name].roll(1, dim)
    exchanged = torch.cat([v.reshape(-1) for v in values.values()])
    before, after = joint.log_joint(torch.stack([u, exchanged]), joint.initial_theta).detach()
    same = bool((after - before).abs() <= joint.rounding * (1.0 + before.abs()))
    return same and any(_is_bent(density, name, u) for name, _ in axes)


def _is_bent(density: AutogradDensity, name: str, u: Tensor) -> bool:
    """Whether the predictors are not linear in one site, the others held."""
    step = torch.zeros_like(u)
    step[density.joint.latents.slices[name]] = 0.5
    with torch.no_grad():
        behind, here, ahead = (_predictor(density, u + move) for move in (-step, torch.zeros_like(u), step))
    size = max(abs(float(x)) for x in (behind, here, ahead))
    return abs(float(ahead - 2.0 * here + behind)) > density.joint.rounding**0.5 * size
