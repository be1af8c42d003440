"""Which latent sites spread others: read off derivatives of one run's densities, never off names."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from pyro.distributions import Unit
from torch import Tensor

from pyro_evidence.fitting.process_state import own_random_numbers, without_validation
from pyro_evidence.numerics.batched import BATCH_NUMBERS
from pyro_evidence.numerics.coordinates import is_identity
from pyro_evidence.numerics.derivatives import Forward
from pyro_evidence.numerics.linalg import relative_rounding
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.sites import bijection

NUM_DRAWS = 48  # of each density that is looked at
HALF = 0.5  # the share of a change, even about the centre or explained by no shift, above which it is one of spread
ROUNDING = 1e-6  # the share of a change that is none
NOT_LINEAR = 0.02  # share of a change in counts that no shift of their mean explains


@dataclass(frozen=True)
class Child:
    """The density of one site of a run, and points at which to look at it.

    :ivar points: in the site's own space, ``(2 M,) + shape``: pairs mirrored about the centre, or draws of counts.
    :ivar counts: whether the site is discrete, so that its points have no mirror images.
    """

    name: str
    points: Tensor
    counts: bool


@dataclass(frozen=True)
class Run:
    """A log joint at one point, with the densities of its sites."""

    joint: LogJoint
    u: Tensor  # (D,)
    theta: Tensor  # (T,)
    children: tuple[Child, ...]

    def changes(self, directions: Tensor) -> list[dict[str, Tensor]]:
        """Derivatives of every child's log density, its own value held, along directions ``(P, D)`` of the latents."""
        u = self.u.clone().requires_grad_()
        nodes = self.joint.trace(u, self.theta).nodes
        with without_validation():
            parts = {c.name: nodes[c.name]["fn"].log_prob(c.points).double() for c in self.children}
        flat = torch.cat([part.reshape(-1) for part in parts.values()])
        sizes = [part.numel() for part in parts.values()]
        rows = [row.split(sizes) for row in Forward(flat, u).along(directions)]
        return [{n: x.reshape(parts[n].shape) for n, x in zip(parts, row, strict=True)} for row in rows]

    @cached_property
    def nodes(self) -> Any:
        """The sites of the run at this point."""
        return self.joint.trace(self.u, self.theta).nodes

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


def run_at(joint: LogJoint, u: Tensor, theta: Tensor) -> Run:
    """The densities at one point, with draws of each."""
    nodes = joint.trace(u, theta).nodes
    names = [*joint.latents.names, *(() if joint.discrete else joint.observed)]
    with own_random_numbers(), without_validation():
        torch.manual_seed(0)
        children = [_child(name, nodes[name]["fn"]) for name in names]
    return Run(joint, u, theta, tuple(c for c in children if c is not None))


def _child(name: str, fn: Any) -> Child | None:
    """Points of one density; None where nothing can be drawn, or what is drawn has no order."""
    support = getattr(fn, "support", None)
    if isinstance(fn, Unit) or support is None:
        return None
    num = max(4, min(NUM_DRAWS, BATCH_NUMBERS // max(1, fn.shape().numel())))
    try:
        draws = fn.sample((num,)).detach()
        points = draws if support.is_discrete else _mirrored(name, fn, draws)
        usable = bool(torch.isfinite(fn.log_prob(points)).all()) and (not support.is_discrete or _is_count(fn))
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
    if is_identity(transform):
        with suppress(NotImplementedError, AttributeError):  # a density that does not tell its mean
            mean = fn.mean.detach().expand(fn.shape())
            centre = torch.where(torch.isfinite(mean), mean, centre)
    return transform(torch.cat([y, 2.0 * centre - y]))


def _is_count(fn: Any) -> bool:
    """Whether larger values mean more, which is not so of categories."""
    base = fn
    while hasattr(base, "base_dist"):
        base = base.base_dist
    return fn.event_dim == 0 and not isinstance(base, torch.distributions.Categorical)


def spreads(site: str, changes: Mapping[str, Mapping[str, Tensor]], here: Run) -> bool:
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
    if more >= HALF or _even_share(own) >= HALF:
        return True
    rest = _unexplained(own, others)
    return bool(others) and _share(rest, own) > ROUNDING and _even_share(rest) >= HALF


def _even_share(slope: Tensor) -> float:
    """How much of a change is the same on both sides of the centre, of mirrored pairs."""
    above, below = slope.chunk(2)
    even, odd = _centred(0.5 * (above + below)), 0.5 * (above - below)
    return _share(even, torch.cat([even, odd]))


def _share(part: Tensor, whole: Tensor) -> float:
    """Sum of squares of one in that of the other, each centred."""
    total = _centred(whole).square().sum()
    return float(_centred(part).square().sum() / total) if bool(total > 0) else 0.0


def _unexplained(own: Tensor, others: list[Tensor]) -> Tensor:
    """What is left of ``own`` ``(2 M, ...)`` beside the best combination of others, in each element by itself."""
    if not others:
        return _centred(own)
    y = _centred(own).flatten(1) if own.dim() > 1 else _centred(own).unsqueeze(-1)
    X = torch.stack([_centred(o).reshape(y.shape) for o in others], -1).transpose(0, 1)  # (E, 2M, K)
    size = X.norm(dim=1, keepdim=True)
    X = X / torch.where(size > 0, size, 1.0)
    gram = X.mT @ X + relative_rounding(X.dtype) * torch.eye(X.shape[-1]).to(X)
    fit = X @ torch.linalg.solve(gram, X.mT @ y.T.unsqueeze(-1))
    return (y.T.unsqueeze(-1) - fit).squeeze(-1).T.reshape(own.shape)
