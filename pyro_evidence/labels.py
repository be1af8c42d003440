"""Mixture components under one labelling: draws are renamed to agree on who owns which datum."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_evidence.ops.matching import assign, overlap_cost
from pyro_evidence.program import LogJoint
from pyro_evidence.simulate import responsibility_rows

Draws = dict[str, Tensor]


def num_components(joint: LogJoint) -> int:
    """Components of the one local discrete site, 1 where there is none or where there are several."""
    if len(joint.discrete) != 1:
        return 1
    try:
        return int(joint.table(joint.initial_u, joint.initial_theta).shape[-1])
    except (ValueError, RuntimeError):
        return 1


def component_axes(joint: LogJoint) -> dict[str, int]:
    """The first axis as long as there are components, of each site that has one."""
    num = num_components(joint)
    return {p.name: list(p.shape).index(num) for p in joint.latents if num > 1 and num in p.shape}


def responsibilities(joint: LogJoint, draws: Mapping[str, Tensor]) -> Tensor:
    """``p(z_n = k | x_n, w)`` of draws ``(C, T) + shape``, shape ``(C * T, N, K)``."""
    parts = [p.transform.inv(draws[p.name].flatten(0, 1)) for p in joint.latents]
    u = torch.cat([v.reshape(len(v), -1) for v in parts], -1)
    resp = responsibility_rows(joint, u, joint.initial_theta)
    return resp.reshape(len(u), -1, resp.shape[-1])


def matched(joint: LogJoint, draws: Draws, reference: Tensor | None = None) -> tuple[Draws, Tensor, int]:
    """Draws with their components renamed, the reference they agree with, and how often neighbours disagreed.

    :param draws: ``(C, T) + site shape``.
    :param reference: responsibilities ``(N, K)``; None takes those of the first draw, refined by one pass.
    :return: renamed draws; mean responsibilities after renaming ``(N, K)``; number of label switches within
        chains.
    """
    resp = responsibilities(joint, draws)
    orders = _orders(resp, resp[0] if reference is None else reference)
    if reference is None:
        orders = _orders(resp, _renamed(resp, orders, -1).mean(0))
    first = next(iter(draws.values()))
    chains = orders.reshape(*first.shape[:2], -1)
    switches = int((chains[:, 1:] != chains[:, :-1]).any(-1).sum())
    renamed = {n: _site(v, orders, component_axes(joint).get(n)) for n, v in draws.items()}
    return renamed, _renamed(resp, orders, -1).mean(0), switches


def _orders(resp: Tensor, reference: Tensor) -> Tensor:
    """For every draw the old label of each new one, ``(S, K)``."""
    return torch.tensor([assign(cost) for cost in overlap_cost(resp, reference)])


def _renamed(value: Tensor, orders: Tensor, axis: int) -> Tensor:
    """Rows ``(S, ...)`` with one axis reordered, each by its own order."""
    moved = value.movedim(axis, 1)
    index = orders.to(value.device).reshape(*orders.shape, *[1] * (moved.dim() - 2)).expand_as(moved)
    return moved.gather(1, index).movedim(1, axis)


def _site(value: Tensor, orders: Tensor, axis: int | None) -> Tensor:
    if axis is None:
        return value
    flat = value.flatten(0, 1)
    return _renamed(flat, orders, axis + 1).reshape(value.shape)
