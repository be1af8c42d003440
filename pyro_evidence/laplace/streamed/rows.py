"""Chunks that hold whole groups: read pass by pass, their groups' modes and blocks known from the first pass on."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.chunks import join as joining
from pyro_evidence.chunks.join import Join, Sums
from pyro_evidence.chunks.labels import Labels, labels_of, require_whole
from pyro_evidence.chunks.reading import Chunks, looked_through, with_rows
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.laplace.blocks.partition import Partition, around
from pyro_evidence.laplace.blocks.terms import BlockDensity
from pyro_evidence.laplace.streamed import profile
from pyro_evidence.laplace.streamed.profile import PROFILE, Groups, Last
from pyro_evidence.numerics.derivatives import generic
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.simulate import prior_of
from pyro_evidence.structure.density import AutogradDensity
from pyro_evidence.structure.factors.propose import Coupled
from pyro_evidence.structure.recognise import Structure
from pyro_evidence.structure.streamed import Making, StreamedDensity, added_up

WIDEST = 200  # coordinates of one group


@dataclass(frozen=True)
class Chunk:
    """What is known of a chunk without its rows."""

    joint: LogJoint  # without arguments
    partition: Partition
    last: Last


@dataclass(frozen=True)
class GroupRows:
    """The groups of all chunks; each is looked through once, with all checks."""

    make: Making
    first: LogJoint  # the model on the first few rows
    shared: LogJoint  # the prior of what all groups share, and the hyperparameters from which all begin
    own: tuple[str, ...]  # latent sites of the groups
    chunks: Chunks
    join: Join
    known: dict[int, Chunk] = field(default_factory=dict)
    last: list[tuple[Tensor, ...]] = field(default_factory=list)  # where :meth:`integral` was taken, and its value
    labels: list[Labels] = field(default_factory=list)  # of groups, in each chunk

    def total(self, of: Callable[[Groups], Sums], nothing: Callable[[], Sums]) -> Sums:
        """One pass: the sum over the groups of all processes."""
        return joining.total(self.join, self.passes(), of, nothing)

    def passes(self) -> Iterator[Groups]:
        """The groups of this process, a chunk at a time."""
        for number, args in with_rows(self.chunks):
            chunk = self.known[number]
            joint = copy.copy(chunk.joint)
            joint.args = tuple(args)
            yield self._groups(joint, chunk)

    def _groups(self, joint: LogJoint, chunk: Chunk) -> Groups:
        names = (*self.own, *joint.discrete, *joint.observed)
        nothing = chunk.last.own[:0]
        density = BlockDensity(joint, chunk.partition, None, nothing, lambda theta: theta.new_zeros(()), names)
        return Groups(density, chunk.last, 100.0 * float(torch.finfo(joint.dtype).eps))

    def checked(self, number: int, args: Sequence[Any]) -> None:
        """A chunk that is read for the first time.

        :raises BadInput: when what all share is another there than in the first.
        :raises UnsupportedModel: for groups that are not independent.
        """
        joint = self.make(args)
        joint.held, joint.initial_theta = self.shared.held, self.shared.initial_theta
        self._require_same_shared(number, joint)
        mask = torch.ones(joint.latents.size, dtype=torch.bool, device=joint.device)
        for name in self.own:
            mask[joint.latents.slices[name]] = False
        sizes = frozenset(d for p in joint.latents if p.name in self.own for d in p.shape)
        self.labels.append(labels_of(args, sizes))
        partition = around(joint, mask, WIDEST)
        if isinstance(partition, Coupled):
            raise not_independent(joint, number, self.own, partition)
        joint.args = ()
        self.known[number] = Chunk(joint, partition, Last(torch.zeros(len(partition.own)).to(joint.initial_u)))

    def _require_same_shared(self, number: int, joint: LogJoint) -> None:
        here = {p.name: tuple(p.shape) for p in joint.latents if p.name not in self.own}
        first = {p.name: tuple(p.shape) for p in self.shared.latents}
        if here != first or joint.hypers.names != self.shared.hypers.names:
            raise BadInput(
                f"chunk {number} has the latent sites {here} beside those of its groups, {', '.join(self.own)}; the "
                f"first has {first}. Expected the same: chunks must differ in their rows and groups only."
            )
        self._require_same_prior(number, prior_of(joint, self.shared.latents.names))

    def _require_same_prior(self, number: int, prior: LogJoint) -> None:
        u = generic(1, self.shared.latents.size, self.shared.initial_u)[0]
        values = torch.stack([x.log_joint(u, self.shared.initial_theta).detach() for x in (prior, self.shared)])
        close = float(torch.finfo(prior.dtype).eps ** 0.64)
        if not torch.allclose(values[0], values[1], rtol=close, atol=close):
            raise BadInput(
                f"the prior of {', '.join(self.shared.latents.names)} in chunk {number} is another than in the first: "
                f"it depends on the rows. Expected one prior: compute what it needs over all rows, and bind that to it."
            )

    def integral(self, u: Tensor, theta: Tensor) -> Tensor:
        """What the Gaussian integral over all groups adds to the log evidence, nats, ``(R,)``; differentiable once."""
        place = u.detach().clone(), theta.detach().clone()
        if not (self.last and all(map(torch.equal, self.last[0], place))):
            known = self.total(lambda g: profile.integral(g, *place), lambda: u.new_zeros(len(u)))
            self.last[:] = [(*place, known)]
        return added_up(self, profile.integral, self.last[0][2], u, theta)

    @property
    def structure(self) -> Structure:
        """What is known of the density of all groups and rows."""
        density = StreamedDensity(self.shared, (), (), False, rows=self, of=PROFILE)
        plain = AutogradDensity(self.shared, None)
        return Structure(None, None, density, plain, eliminated=self.integral)


def not_independent(joint: LogJoint, number: int, own: Sequence[str], why: Coupled) -> UnsupportedModel:
    """The letter for groups that cannot be eliminated chunk by chunk."""
    return UnsupportedModel(
        f"chunk {number}: the groups of {', '.join(own)} are not independent of one another given the other latent "
        f"sites: {why.reason}. Chunks need linear predictors or independent groups; pass all data to run(...)."
    )


def group_rows(
    model: Any, chunks: Chunks, join: Join, make: Making, first: LogJoint, own: tuple[str, ...]
) -> GroupRows:
    """The groups of all chunks; one pass, in which every chunk is checked.

    :param first: the model on the first few rows.
    :raises BadInput, UnsupportedModel: on all processes what is wrong with one chunk.
    """
    shared = prior_of(first, [n for n in first.latents.names if n not in own])
    shared.kept = False
    rows = GroupRows(make, first, shared, own, chunks, join)
    looked_through(model, chunks, join, rows.checked)
    require_whole(chunks, rows.labels, join)
    rows.labels.clear()
    return rows
