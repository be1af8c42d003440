"""What a fit predicts of each group of its data as if it had not seen them, without fits anew."""

import inspect
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput, TooLarge
from pyro_evidence.laplace.approximation import Problem
from pyro_evidence.numerics import batched, derivatives, importance, newton
from pyro_evidence.numerics.quadrature.nodes import quasi_normal
from pyro_evidence.program.log_joint import LogJoint

INNER = 32  # draws at each outer place
INNER_ALONE = 512  # where there is one place
LARGEST = 200  # coordinates of the Gaussian that is moved for each group
NUMBERS = 2**28  # of masks together
TRUSTED = 0.7


@dataclass(frozen=True, repr=False)
class LeftOut:
    r"""Leave-one-group-out, ``log p(y_g | y_{-g})`` for each group; made by ``posterior.loo(...)``.

    :ivar groups: their labels, ``(G,)``.
    :ivar elpd: log predictive density of each group's data given all others, nats, ``(G,)``.
    :ivar pareto_k: of its importance weights, ``(G,)``: above 0.7 that number needs a fit without the group.
    """

    groups: Tensor
    elpd: Tensor
    pareto_k: Tensor

    @property
    def total(self) -> Tensor:
        """Sum over the groups, nats, ``()``."""
        return self.elpd.sum()

    @property
    def standard_error(self) -> Tensor:
        """Of :attr:`total`, from how the groups differ, nats, ``()``."""
        return self.elpd.std() * len(self.elpd) ** 0.5

    @property
    def doubtful(self) -> Tensor:
        """Labels of groups whose k-hat is above 0.7."""
        return self.groups[self.pareto_k > TRUSTED]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(total={float(self.total):.2f} +- {float(self.standard_error):.2f}, "
            f"groups={len(self.groups)}, largest_k={float(self.pareto_k.max()):.2f}, doubtful={len(self.doubtful)})"
        )


@dataclass(frozen=True)
class OuterPlaces:
    """Where hyperparameters are, and what each place is worth: one place, or draws from the outer sites' density.

    :ivar problem: of what is inside.
    :ivar log_weight: log prior density of the outer sites over the density that they were drawn from, ``(K,)``.
    """

    problem: Problem
    theta: Tensor  # (K, T)
    u: Tensor  # (K, D) inner modes with all data
    log_weight: Tensor


def left_out(places: OuterPlaces, by: str | Tensor | None) -> LeftOut:
    """Each group's log predictive density given all other data.

    The ratio of the evidences with and without the group: at every outer place Laplace's approximation without it, its
    mode searched from the one with it, as a proposal for importance sampling, Pareto-smoothed.  Params that were
    maximised stay as they are.

    :param by: labels ``(N,)``, or the name of an argument of the model that holds them, or of a plate; None: every
        datum by itself.
    :raises BadInput: for labels that do not fit the data.
    :raises TooLarge: beyond 200 inner coordinates, or where masks of the groups do not fit.
    """
    joint = places.problem.joint
    labels, inverse = _labels(joint, places, by)
    _require_room(places, len(labels), len(inverse))
    masks = torch.nn.functional.one_hot(inverse, len(labels)).T.to(places.u)
    masks = torch.cat([torch.zeros_like(masks[:1]), masks])  # first with all data
    found = [_evidence(row) for row in _log_weights(places, masks)]
    log_evidence = torch.stack([value for value, _ in found])
    shapes = torch.tensor([shape for _, shape in found[1:]], dtype=torch.float64)
    return LeftOut(labels, log_evidence[0] - log_evidence[1:], shapes)


def _evidence(log_weights: Tensor) -> tuple[Tensor, float]:
    """Log mean of weights ``(K, M)``, smoothed, nats, and k-hat: the larger one of places and of draws within them.

    Both at once would take the few distinct weights of exact inner Gaussians for a tail.
    """
    places = log_weights.logsumexp(-1) - math.log(log_weights.shape[-1])
    inner = importance.checked((log_weights - places.unsqueeze(-1)).nan_to_num(nan=-math.inf).reshape(-1))
    outer = importance.checked(places) if len(places) > 1 else importance.Smoothed(places, -math.inf)
    value = importance.log_mean(outer.log_weights) + importance.log_mean(inner.log_weights)
    return value, max(outer.pareto_k, inner.pareto_k)


def _labels(joint: LogJoint, places: OuterPlaces, by: str | Tensor | None) -> tuple[Tensor, Tensor]:
    """Distinct labels ``(G,)``, and each datum's position among them ``(N,)``."""
    shape = _pointwise(joint, places.u[0], places.theta[0]).shape
    found = torch.arange(shape.numel()).reshape(shape) if by is None else by
    if isinstance(found, str):
        found = _argument(joint, found, shape) if found in _arguments(joint) else _plate(joint, places, found, shape)
    if not isinstance(found, Tensor):
        raise BadInput(f"by={by!r}; expected a plate's or argument's name, or a tensor of labels: loo(by=group).")
    if found.numel() != shape.numel():
        raise BadInput(
            f"by holds {found.numel()} labels, the observed data are {shape.numel()}; expected one for each datum."
        )
    labels, inverse = found.reshape(-1).unique(return_inverse=True)
    return labels, inverse


def _arguments(joint: LogJoint) -> dict[str, object]:
    """The model's arguments by name."""
    try:
        return dict(inspect.signature(joint.model).bind(*joint.args, **joint.kwargs).arguments)
    except (TypeError, ValueError):
        return dict(joint.kwargs)


def _argument(joint: LogJoint, name: str, shape: torch.Size) -> Tensor:
    value = _arguments(joint)[name]
    if not isinstance(value, Tensor) or value.numel() != shape.numel():
        raise BadInput(
            f"by={name!r} is an argument of the model, but not one label for each of the {shape.numel()} data; "
            "expected a tensor of labels. Pass one: loo(by=group)."
        )
    return value


def _plate(joint: LogJoint, places: OuterPlaces, name: str, shape: torch.Size) -> Tensor:
    """The index in a plate of every datum."""
    nodes = joint.trace(places.u[0], places.theta[0]).nodes
    frames = {f.name: f for n in joint.observed for f in nodes[n]["cond_indep_stack"] if f.vectorized}
    if name not in frames:
        raise BadInput(
            f"by={name!r}; expected an argument of the model, {sorted(_arguments(joint))}, or a plate around the data, "
            f"{sorted(frames)}, or a tensor of labels, one for each datum."
        )
    frame = frames[name]
    event_dims = max(nodes[n]["fn"].event_dim for n in joint.observed)
    index = torch.arange(frame.size).reshape(-1, *[1] * (-frame.dim - 1 if len(shape) >= -frame.dim else event_dims))
    return index.expand(shape)


def _require_room(places: OuterPlaces, num_groups: int, num_data: int) -> None:
    size, numbers = places.u.shape[-1], (num_groups + 1) * num_data * len(places.u)
    if size > LARGEST or numbers > NUMBERS:
        raise TooLarge(
            f"leaving {num_groups} groups of {num_data} data out, with {size} coordinates at {len(places.u)} outer "
            f"places, needs Gaussians of {size} x {size} and masks of {numbers:.2g} numbers; expected at most "
            f"{LARGEST} coordinates and {NUMBERS:.2g} numbers. Leave fewer, larger groups out (by=...), or fit to all "
            "data but one group's and ask log_prob(...) for its data."
        )


def _pointwise(joint: LogJoint, u: Tensor, theta: Tensor) -> Tensor:
    """Log likelihood of every datum at one point, nats, in the data's shape."""
    parts = joint.pointwise(u, theta)
    shapes = {n: tuple(v.shape) for n, v in parts.items()}
    if len(set(shapes.values())) != 1:
        raise BadInput(f"observed sites have different shapes, {shapes}; loo(...) needs sites with one datum per cell.")
    return torch.stack(list(parts.values())).sum(0)


@dataclass(frozen=True)
class Without:
    """The density without some data: rows hold hyperparameters, then a mask ``(N,)`` of what is left out."""

    joint: LogJoint

    @property
    def blocks(self) -> tuple[slice, ...]:
        """The flat coordinates of each latent site."""
        return tuple(self.joint.latents.slices.values())

    def _one(self, u: Tensor, row: Tensor) -> Tensor:
        theta, mask = row.split([self.joint.hypers.size, len(row) - self.joint.hypers.size])
        return self.joint._one(u, theta) - (mask * _pointwise(self.joint, u, theta).reshape(-1)).sum()

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        """``log p(other data, u)``, nats, ``(R,)``."""
        row_bytes = self.joint.row_bytes
        return batched.apply(self._one, (u, theta), None if row_bytes is None else 2 * row_bytes, self._one)

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint and its gradient in ``u``."""
        return derivatives.gradient(self.log_joint, u, theta)

    def precision(self, u: Tensor, theta: Tensor) -> Tensor:
        """Minus the Hessian in ``u``, ``(R, D, D)``."""
        return -derivatives.hessian(self.log_joint, u, theta)

    def precision_diagonal(self, u: Tensor, theta: Tensor) -> Tensor:
        return -derivatives.hessian_diagonal(self.log_joint, u, theta, self.blocks)

    def gauss_newton(self, u: Tensor, theta: Tensor) -> Tensor:
        """The exact precision."""
        return self.precision(u, theta)


def _log_weights(places: OuterPlaces, masks: Tensor) -> Tensor:
    """Log importance weights with each mask, ``(G + 1, K, M)``, nats."""
    density, num = Without(places.problem.joint), len(places.u)
    theta = torch.cat([places.theta.repeat(len(masks), 1), masks.repeat_interleave(num, 0)], -1)
    start, tolerance = places.u.repeat(len(masks), 1), places.problem.tolerance
    mode = newton.climb(density, density.precision, start, theta, newton.Limits(tolerance, 30, slack=1e-12))
    tril, info = torch.linalg.cholesky_ex(mode.precision.double())
    sound = (info == 0).unsqueeze(-1)
    noise = quasi_normal(INNER if num > 1 else INNER_ALONE, start.shape[-1]).to(start)
    away = torch.linalg.solve_triangular(tril.mT, noise.T.expand(len(start), -1, -1), upper=True).mT  # (R, M, D)
    u = (mode.u.unsqueeze(1) + away).flatten(0, 1)
    with torch.no_grad():
        log_joint = density.log_joint(u, theta.repeat_interleave(len(noise), 0)).reshape(len(start), -1)
    log_proposal = tril.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=True) + _log_normal(noise)
    found = log_joint - log_proposal + places.log_weight.repeat(len(masks)).unsqueeze(-1)
    return torch.where(sound & torch.isfinite(found), found, -torch.inf).reshape(len(masks), num, -1)


def _log_normal(white: Tensor) -> Tensor:
    return -0.5 * (white.square() + torch.log(torch.tensor(torch.pi * 2.0))).sum(-1)
