"""The posterior of a fit whose groups came in chunks: what all share, and the groups of this process."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from pyro_evidence.blocks.local import beside
from pyro_evidence.blocks.partition import Partition
from pyro_evidence.laplace import uncertainty
from pyro_evidence.laplace.approximation import LaplaceState, Problem
from pyro_evidence.laplace.grouped_chunks import GroupRows
from pyro_evidence.laplace.uncertainty import HyperparameterCovariance
from pyro_evidence.numerics.coordinates import Coordinates
from pyro_evidence.posterior.guide import LaplaceGuide
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.precision.blocks import BlockPrecision, StepFactor
from pyro_evidence.precision.choices import exact_hessian
from pyro_evidence.precision.dense import Dense
from pyro_evidence.program.checks import require_kept
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.structure.density import AutogradDensity
from pyro_evidence.structure.recognise import Structure


@dataclass(frozen=True, eq=False, repr=False)
class GroupsPosterior(LaplacePosterior):
    """Laplace's posterior of what all groups share, and of the groups whose rows this process has seen.

    Sites of groups hold those of its chunks, one after the other.  It is the posterior of all rows, but for what needs
    them once more: importance sampling, ``loo`` and files say so.

    :ivar shared: the state over what all groups share, of which the search was.
    """

    shared: LaplaceState | None = None
    _is_checkable: ClassVar[Any] = False

    @property
    def structure(self) -> Any:
        """Structure of the curvature, and how it was handled: one sentence."""
        num = len(self.state.u) - len(self._over.u)
        return (
            f"{num:,} coordinates of groups here, eliminated group by group; dense {len(self._over.u)}, shared by all"
        )

    @property
    def _over(self) -> LaplaceState:
        assert self.shared is not None
        return self.shared

    def _weighed(self, num_samples: int, seed: int, kept: bool = True) -> tuple[Tensor, Tensor]:
        """Refuse what needs the rows of all groups at once, which came in chunks."""
        require_kept(self._joint, "importance sampling")
        return super()._weighed(num_samples, seed, kept)

    @property
    def guide(self) -> LaplaceGuide:
        """Needs a run of the model on the rows of all groups, which came in chunks.

        :raises BadInput: always.
        """
        require_kept(self._joint, "the guide")
        return super().guide

    def update_param_store(self) -> None:
        """Write the params to Pyro's global param store, so that the rest of an SVI script reads them there."""
        LaplacePosterior(self._over, self.status, self.log_evidences, self.restarts).update_param_store()

    def hyperparameter_covariance(self) -> HyperparameterCovariance:
        """Uncertainty of the maximised hyperparameters, by passes over the chunks; see the posterior of all rows."""
        return uncertainty.hyperparameter_covariance(self._over)


def with_groups(rows: GroupRows, posterior: LaplacePosterior) -> GroupsPosterior:
    """The posterior with the groups of this process; one pass."""
    state = posterior.state
    joint, places = _all_latents(rows)
    slices, size = joint.latents.slices, joint.latents.size
    shared = torch.cat([torch.arange(size)[slices[p.name]] for p in rows.prior.latents]).to(joint.device)
    u = joint.initial_u.index_copy(0, shared, state.u)
    fronts: list[Tensor] = []
    factors: list[StepFactor] = []
    for groups, index in zip(rows.pieces, places, strict=True):
        modes, p = groups.modes(state.u, state.theta), groups.partition
        u = u.index_copy(0, index[p.own], (modes.own + modes.step(p)).detach())
        between = beside(groups.density.terms(state.theta.detach()), modes.own, state.u)
        parts = between.split([front.numel() for front in p.fronts])
        for front, L, B in zip(p.fronts, modes.tril, parts, strict=True):
            fronts.append(index[front])
            factors.append(StepFactor(L, solve_triangular(L, B.reshape(*front.shape, -1), upper=False)))
    partition = Partition(size, tuple(fronts), shared, shared[:0], {})
    assert isinstance(state.precision, Dense)
    precision = BlockPrecision(partition.plan, tuple(factors), state.precision.tril[0])
    active = torch.ones(size, dtype=torch.bool, device=joint.device)
    whole = Problem(joint, Structure(None, None, None, AutogradDensity(joint, None)), exact_hessian, active)
    found = replace(state, problem=whole, u=u, precision=precision)
    fields = (found, posterior.status, posterior.log_evidences, posterior.restarts, posterior.failures)
    return GroupsPosterior(*fields, shared=state)


def _all_latents(rows: GroupRows) -> tuple[LogJoint, list[Tensor]]:
    """The model with the latents of all chunks, and where the coordinates of each chunk stand among them."""
    known, joint = [rows.known[number] for number in sorted(rows.known)], copy.copy(rows.first)
    dims = {name: _dim_of_groups(name, known) for name in rows.own}
    shapes = {p.name: (p.transform, p.shape) for p in joint.latents}
    for name, dim in dims.items():
        here = [next(p for p in chunk.joint.latents if p.name == name) for chunk in known]
        like = here[0] if here else next(p for p in joint.latents if p.name == name)
        shape = list(like.shape)
        shape[dim] = sum(p.shape[dim] for p in here)
        shapes[name] = like.transform, torch.Size(shape)
    joint.latents, joint.args, joint.kwargs, joint.has_data = Coordinates(shapes), (), {}, False
    return joint, _places(joint.latents, [chunk.joint.latents for chunk in known], dims)


def _dim_of_groups(name: str, known: Sequence[Any]) -> int:
    """Along which dim of a site its chunks follow one another: the first along which coordinates change the group."""
    sizes = [next(p.unconstrained_shape for p in chunk.joint.latents if p.name == name) for chunk in known]
    for chunk, shape in zip(known, sizes, strict=True):
        index = torch.arange(chunk.joint.latents.size)[chunk.joint.latents.slices[name]]
        block = chunk.partition.block_of(index.to(chunk.partition.shared.device).unsqueeze(-1)).reshape(shape)
        for dim in range(len(shape)):
            if bool((block != block.narrow(dim, 0, 1)).any()):
                return dim
    different = [d for d in range(len(sizes[0]) if sizes else 0) if len({s[d] for s in sizes}) > 1]
    return different[0] if different else 0


def _places(whole: Coordinates, parts: Sequence[Coordinates], dims: dict[str, int]) -> list[Tensor]:
    """For each chunk where its coordinates stand among all, ``(D,)``."""
    found, begun = [], dict.fromkeys(dims, 0)
    tables = {p.name: torch.arange(whole.size)[whole.slices[p.name]].reshape(p.unconstrained_shape) for p in whole}
    for latents in parts:
        index = []
        for p in latents:
            table = tables[p.name]
            if p.name in dims:
                size = p.unconstrained_shape[dims[p.name]]
                table = table.narrow(dims[p.name], begun[p.name], size)
                begun[p.name] += size
            index.append(table.reshape(-1))
        found.append(torch.cat(index))
    return found
