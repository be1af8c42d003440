"""Blocks of a model against its Hessian: no entry joins two blocks, and what they share is joined to them."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence.blocks.partition import Partition, partition
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.structure.factors import NotSparse
from tests.models_for_tests import grouped_models

MODELS: dict[str, tuple[Any, list[int], list[str]]] = {  # model, widths of the blocks, sites that they share
    "intercepts": (grouped_models.intercepts, [1], ["w"]),
    "fixed effects": (grouped_models.fixed, [1], []),
    "pairs of effects": (grouped_models.slopes, [2], ["w"]),
    "a latent mean": (grouped_models.heavy, [1], ["mean"]),
}


def found_in(model: Any) -> tuple[LogJoint, Partition]:
    joint = LogJoint(model, grouped_models.groups(6, 3))
    active = torch.ones(joint.latents.size, dtype=torch.bool)
    found = partition(joint, active)
    assert isinstance(found, Partition)
    return joint, found


@pytest.mark.parametrize("name", MODELS)
def test_the_hessian_joins_no_two_blocks(name: str) -> None:
    model, widths, sites = MODELS[name]
    joint, found = found_in(model)
    assert [front.shape[-1] for front in found.fronts] == widths and found.num_blocks == 6
    shared = [c for site in sites for c in range(joint.latents.size)[joint.latents.slices[site]]]
    assert sorted(found.shared.tolist()) == shared
    u = joint.initial(1, seed=1)[0]
    hessian = torch.autograd.functional.hessian(lambda v: joint.log_joint(v.unsqueeze(0), joint.initial_theta)[0], u)
    block = torch.full((joint.latents.size,), -1)
    block[found.own] = found.block
    apart = (block.unsqueeze(-1) != block) & (block.unsqueeze(-1) >= 0) & (block >= 0)
    assert bool((hessian[apart] == 0).all())
    assert all(bool(hessian[c][block >= 0].any()) for c in shared)


def test_every_term_knows_its_block() -> None:
    joint, found = found_in(grouped_models.intercepts)
    group = grouped_models.groups(6, 3)[1]
    of_groups = found.owner["b"]
    coordinates = range(joint.latents.size)[joint.latents.slices["b"]]
    numbers = dict(zip(found.own.tolist(), found.block.tolist(), strict=True))
    assert of_groups.tolist() == [numbers[c] for c in coordinates] and sorted(of_groups.tolist()) == list(range(6))
    assert torch.equal(found.owner["y"], of_groups[group])
    assert found.place[torch.cat([found.own, found.shared])].tolist() == list(range(found.size))


def chain(y: Tensor) -> None:
    x = pyro.sample("x", dist.Normal(torch.zeros(len(y)), 1.0).to_event(1))
    pyro.factor("steps", -(x[1:] - x[:-1]).square().sum())
    pyro.sample("y", dist.Normal(x, 1.0).to_event(1), obs=y)


def test_a_long_chain_has_no_blocks() -> None:
    joint = LogJoint(chain, (torch.ones(40),))
    found = partition(joint, torch.ones(40, dtype=torch.bool))
    assert isinstance(found, NotSparse)


def test_a_term_of_no_element_joins_nothing() -> None:
    """As of a slice beyond the last column."""

    def model(_: Tensor, group: Tensor, num: int, y: Tensor) -> None:
        e = pyro.sample("e", dist.Normal(torch.zeros(num), 1.0).to_event(1))
        pyro.factor("two", -e[0].square() - (e[num:] - e[:1]).square().sum())
        pyro.sample("y", dist.Normal(e[group], 1.0).to_event(1), obs=y)

    _, found = found_in(model)
    assert found.num_blocks == 6 and not len(found.shared)
