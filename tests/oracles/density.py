"""Log joint densities the slow way: variables changed by hand, discrete sites summed by trying everything."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor
from torch.autograd.functional import hessian
from torch.distributions import biject_to

from pyro_evidence.program.log_joint import LogJoint

Supports = Mapping[str, tuple[Any, tuple[int, ...]]]  # site -> constraint, shape of its value
Choices = Mapping[str, tuple[tuple[int, ...], Tensor]]  # discrete site -> shape of its value, its states


def unpack(u: Tensor, supports: Supports) -> tuple[dict[str, Tensor], Tensor]:
    """Constrained values of a flat vector, sites sorted by name, and the log Jacobian determinant."""
    values, log_det, used = {}, torch.zeros(()), 0
    for name in sorted(supports):
        constraint, shape = supports[name]
        transform = biject_to(constraint)
        size = torch.Size(transform.inverse_shape(torch.Size(shape)))
        part = u[used : used + size.numel()].reshape(size)
        values[name] = transform(part)
        log_det = log_det + transform.log_abs_det_jacobian(part, values[name]).sum()
        used += size.numel()
    assert used == len(u)
    return values, log_det


def brute_force(
    model: Callable[..., Any], args: tuple[Any, ...], values: Mapping[str, Tensor], choices: Choices
) -> Tensor:
    """``log sum_z p(D, z, values)`` over every assignment of the discrete sites."""
    cells = [states for shape, states in choices.values() for _ in range(torch.Size(shape).numel())]
    every = [_assigned(choices, picked) for picked in itertools.product(*cells)]
    return torch.stack([_log_prob(model, args, dict(values) | z) for z in every]).logsumexp(0)


def _assigned(choices: Choices, picked: tuple[Tensor, ...]) -> dict[str, Tensor]:
    rest = iter(picked)
    shapes = {name: torch.Size(shape) for name, (shape, _) in choices.items()}
    return {n: torch.stack([next(rest) for _ in range(s.numel())]).reshape(s) for n, s in shapes.items()}


def _log_prob(model: Callable[..., Any], args: tuple[Any, ...], values: Mapping[str, Tensor]) -> Tensor:
    with pyro.validation_enabled(False):
        return poutine.trace(poutine.condition(model, data=values)).get_trace(*args).log_prob_sum()


def value_gradient_hessian(f: Callable[[Tensor], Tensor], u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A scalar function with its first two derivatives."""
    x = u.clone().requires_grad_()
    value = f(x)
    return value.detach(), torch.autograd.grad(value, x)[0], hessian(f, u)


def at(joint: LogJoint, seed: int = 0) -> Tensor:
    """A point of no special position, not one that the program itself has drawn."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(joint.latents.size, generator=generator, dtype=torch.float64)
