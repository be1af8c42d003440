"""The constants of a model's priors, and the model with these constants moved."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.constraints import is_dependent

from pyro_evidence.fitting.process_state import without_validation
from pyro_evidence.numerics.derivatives import takes_part
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.program.parameters import DUMMY_SITE
from pyro_evidence.program.sites import Node, given_arguments, innermost

STEPS = "steps of prior constants"  # the name of a param that no model has
MULTIPLIED = (constraints.positive, constraints.nonnegative, constraints.positive_definite, constraints.lower_cholesky)


@dataclass(frozen=True, eq=False)
class PriorConstant:
    """An argument of a latent site's prior that depends on no latent site and on no hyperparameter.

    One step multiplies it by two, elements together; a location moves by the prior's scale.

    :ivar site: whose prior it is, and ``argument`` of which name.
    :ivar value: of all elements.
    :ivar unit: what a step adds to a location; None where a step multiplies by two.
    """

    site: str
    argument: str
    value: Tensor
    unit: Tensor | None

    @property
    def name(self) -> str:
        """Site and argument, with a dot between."""
        return f"{self.site}.{self.argument}"


def after_steps(value: Tensor, unit: Tensor | None, steps: Tensor) -> Tensor:
    """A constant some steps away from its value."""
    steps = steps.to(value)
    return value * 2.0**steps if unit is None else value + steps * unit


def prior_constants(joint: LogJoint, u: Tensor, theta: Tensor) -> tuple[tuple[PriorConstant, ...], tuple[str, ...]]:
    """The constants of the priors of all continuous latent sites, and the arguments that cannot be moved.

    Those are bounds of a support, and arguments from which the distribution cannot be made again.

    :param joint: the density, at unconstrained latents ``(D,)`` and hyperparameters ``(T,)``.
    """
    latents, hypers, nodes = differentiable_trace(joint, u, theta)
    leaves, found, left_out = [*latents.values(), *hypers.values()], list[PriorConstant](), list[str]()
    for site in sorted({*joint.latents.names, *joint.maximised_sites} & {*nodes} - {DUMMY_SITE}):
        prior = innermost(nodes[site]["fn"])
        for argument, constraint in given_arguments(prior).items():
            value = getattr(prior, argument)
            if not isinstance(value, Tensor) or any(takes_part(value.sum(), leaves)):
                continue
            unit = None if _is_multiplied(constraint) else _unit(prior, constraint)
            constant = PriorConstant(site, argument, value.detach(), None if unit is None else unit.detach())
            movable = unit is not None or _is_multiplied(constraint)
            if movable and _is_made_again(nodes[site], argument):
                found.append(constant)
            else:
                left_out.append(constant.name)
    return tuple(found), tuple(left_out)


def _is_multiplied(constraint: Any) -> bool:
    while hasattr(constraint, "base_constraint"):
        constraint = constraint.base_constraint
    greater = isinstance(constraint, constraints.greater_than) and constraint.lower_bound == 0
    return greater or any(constraint is each for each in MULTIPLIED)


def _unit(prior: Any, constraint: Any) -> Tensor | None:
    """The scale of a prior whose location the argument is; None of any other argument."""
    if constraint is not constraints.real and constraint is not constraints.real_vector:
        return None
    unit = prior.scale if hasattr(prior, "scale") else prior.stddev
    return unit if isinstance(unit, Tensor) and bool(unit.isfinite().all()) and bool((unit > 0).all()) else None


def _is_made_again(node: Node, argument: str) -> bool:
    """Whether the prior, made again from its arguments, has the density that it had."""
    prior, value = node["fn"], node["value"]
    if is_dependent(type(innermost(prior)).support):
        return False
    try:
        with without_validation():
            again = with_arguments(prior, {argument: lambda x: x})
            return bool(torch.equal(again.log_prob(value), prior.log_prob(value)))
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError):
        return False  # of a user's own class, whose arguments are others than its attributes


def with_arguments(prior: Any, moves: Mapping[str, Callable[[Tensor], Tensor]]) -> Any:
    """A distribution with some of its arguments moved, and the same ``mask``, ``expand`` and ``to_event`` around it."""
    if innermost(prior) is prior:
        values = {name: getattr(prior, name) for name in given_arguments(prior)}
        return type(prior)(**values | {name: move(values[name]) for name, move in moves.items()})
    found = copy.copy(prior)
    found.base_dist = with_arguments(prior.base_dist, moves)
    return found


class MovedConstants(Messenger):
    """Priors of the sites inside have some of their constants moved.

    :param constants: to move, and by how many ``steps`` each, ``(C,)``.
    """

    def __init__(self, constants: Sequence[PriorConstant], steps: Tensor) -> None:
        super().__init__()
        self.moves: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {}
        for constant, step in zip(constants, steps.unbind(), strict=True):
            own = self.moves.setdefault(constant.site, {})
            own[constant.argument] = partial(after_steps, unit=constant.unit, steps=step)

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.moves and not msg["is_observed"]:
            msg["fn"] = with_arguments(msg["fn"], self.moves[msg["name"]])


class Powered(Messenger):
    """Densities of some sites inside are raised to a power, above zero."""

    def __init__(self, power: float, sites: Sequence[str]) -> None:
        super().__init__()
        self.power, self.sites = power, sites

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.sites:
            msg["scale"] = msg["scale"] * self.power


def differentiable_trace(
    joint: LogJoint, u: Tensor, theta: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Node]]:
    """Values of all latents and hyperparameters, to be differentiated in, and the sites of a run at them."""
    latents, hypers = (
        {n: v.detach().requires_grad_() for n, v in part.constrained(x.to(joint.dtype)).items()}
        for part, x in ((joint.latents, u), (joint.hypers, theta))
    )
    with torch.enable_grad(), without_validation():
        return latents, hypers, joint.trace_at(latents, hypers).nodes


def sites_with_fixed_priors(joint: LogJoint, u: Tensor, theta: Tensor) -> tuple[str, ...]:
    """Latent sites whose prior depends on no other latent site."""
    latents, _, nodes = differentiable_trace(joint, u, theta)
    return tuple(site for site in latents if not prior_depends(nodes[site], list(latents.values())))


def prior_depends(node: Node, leaves: Sequence[Tensor]) -> bool:
    """Whether the density of a site, its value held, is computed from any of ``leaves``."""
    with torch.enable_grad(), without_validation():
        return any(takes_part(node["fn"].log_prob(node["value"].detach()).sum(), leaves))


class Stepped:
    """A model with the constants of its priors moved by a param, zero to begin with, that a fit can differentiate in.

    :param constants: that its elements move.
    """

    def __init__(self, model: Model, constants: Sequence[PriorConstant]) -> None:
        self.model, self.constants = model, tuple(constants)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        steps = pyro.param(STEPS, torch.zeros(len(self.constants), dtype=torch.float64))
        with MovedConstants(self.constants, steps):
            return self.model(*args, **kwargs)


def at_point(model: Model, values: Mapping[str, Tensor], without: Sequence[str] = ()) -> Model:
    """The model with sites put at values, whose prior counts, and without the data of some others."""
    return poutine.block(poutine.condition(model, data=dict(values)), hide=list(without))
