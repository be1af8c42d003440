"""Chunks that hold whole groups: read pass by pass, their groups' modes and blocks known from the first pass on."""

import copy
import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from pyro_evidence.blocks.local import Modes, block_modes, local, solved
from pyro_evidence.blocks.partition import Partition, around
from pyro_evidence.blocks.terms import BlockDensity, Terms
from pyro_evidence.data.chunks import Chunks, cut_rows, looked_through, num_rows, with_rows
from pyro_evidence.data.groups import Labels, labels_of, require_whole
from pyro_evidence.data.ranks import Communicator
from pyro_evidence.data.rows import Repeated, Rows
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.numerics import derivatives
from pyro_evidence.numerics.derivatives import Last, are_equal, generic_directions, pullback
from pyro_evidence.numerics.newton import limits_of
from pyro_evidence.program.checks import Constant
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.simulate import prior_alone, shapes_on
from pyro_evidence.settings import stacklevel
from pyro_evidence.structure.density import AutogradDensity
from pyro_evidence.structure.factors import SMALL, NotSparse
from pyro_evidence.structure.recognise import Structure, recognise
from pyro_evidence.structure.streamed import (
    Making,
    PassTotals,
    StreamedDensity,
    Summands,
    added_up,
    constant_of,
    require_same_prior,
)


@dataclass(frozen=True)
class LocalSite:
    """A group-level latent site, as a run of the model on one chunk shows it.

    :ivar shapes: of the latent sites.
    :ivar counted: whether groups are the rows, or as many as an argument says.
    :ivar labelled: whether an argument has labels of groups other than 0, 1, ..., or groups were brought together.
    """

    shapes: dict[str, list[int]]
    counted: bool
    labelled: bool


def local_sites(
    first: LogJoint, chunks: Chunks, join: Communicator, named: Sequence[str] | None = None
) -> tuple[str, ...]:
    """The sites whose shape is another in every chunk, or those that are named; none where chunks share all.

    :param first: the model on the first rows.
    :param named: what the user says; ``()`` for none.
    :raises BadInput: for names that are none, and where chunks of equally many groups leave open whose they are.
    """
    if named is not None:
        unknown = [n for n in named if n not in first.latents.names]
        if unknown:
            raise BadInput(f"local={list(named)}; expected latent sites among {', '.join(first.latents.names)}.")
        return tuple(n for n in first.latents.names if n in named)
    found = _seen(first, chunks, join)
    different = tuple(n for n in first.latents.names if len({tuple(s.shapes.get(n, ())) for s in found}) > 1)
    told = all(s.counted for s in found) or any(s.labelled for s in found)
    if different:
        if not told:
            warnings.warn(
                f"site(s) {', '.join(different)} have another number of elements in every chunk, and are taken as "
                f"those of groups that lie whole in one chunk. Say run_chunks(chunks, local={list(different)}), also "
                "where a process has one, if that is meant; if some chunks merely lack elements that all share, let "
                "the model make all of them everywhere.",
                stacklevel=stacklevel(),
            )
        return different
    following = _following(first)
    if len(found) > 1 and following and not told:
        raise BadInput(
            f"site(s) {', '.join(following)} have as many elements as the rows of a chunk say, and all chunks have "
            f"equally many: are they each chunk's own groups, or the same in all? Expected to be told: "
            f"run_chunks(chunks, local={list(following)}) for groups that lie whole in one chunk, also where a process "
            f"has one, local=() for elements that all chunks share."
        )
    return following if len(found) > 1 or recognise(first).linear is None else ()


def _following(first: LogJoint) -> tuple[str, ...]:
    """The sites of which one row makes fewer."""
    args = cut_rows(first.args, num_rows(first.args), slice(1))
    try:
        one, whole = shapes_on(first, args), shapes_on(first, first.args)
    except Exception:  # the model's own, of a single row
        return ()
    return tuple(n for n in first.latents.names if one.get(n) != whole[n])


def _seen(first: LogJoint, chunks: Chunks, join: Communicator) -> list[LocalSite]:
    """Group-level sites of all chunks of all processes; one pass, in which chunks are found to be of one kind."""
    here: list[tuple[dict[str, list[int]], bool, bool]] = []

    def look(_: int, args: tuple[Any, ...]) -> None:
        shapes = shapes_on(first, args)
        sizes = frozenset(size for shape in shapes.values() for size in shape)
        counted = num_rows(args) in sizes or any(isinstance(x, int) and x in sizes for x in args)
        labels = labels_of(args, sizes).values()
        other = any(not torch.equal(x, torch.arange(len(x)).to(x)) for x in labels)
        here.append((shapes, counted, other or getattr(chunks, "groups", None) is not None))

    looked_through(first.model, chunks, join, look)
    return [LocalSite(*one) for said in join.gather_str(json.dumps(here)) for one in json.loads(said)]


@dataclass
class LastIterate:
    """Where the modes of a chunk's groups were found last, kept from pass to pass."""

    own: Tensor  # (n,)
    modes: Last[tuple[Tensor, Tensor], Modes] = field(default_factory=Last)  # by shared ones and hyperparameters


@dataclass(frozen=True)
class Groups:
    """The groups of one chunk as a density of what all groups share."""

    density: BlockDensity
    last: LastIterate
    tolerance: float  # squared length of a step in posterior standard deviations that counts as none

    @property
    def joint(self) -> LogJoint:
        """The model on the rows of the chunk, or on none."""
        return self.density.joint

    @property
    def partition(self) -> Partition:
        """The coordinates of the groups, and the shared ones."""
        return self.density.partition

    def on(self, args: Sequence[Any]) -> "Groups":
        """The same groups with the rows of their chunk, or without."""
        joint = copy.copy(self.joint)
        joint.args = tuple(args)
        return replace(self, density=replace(self.density, joint=joint))

    def modes(self, w: Tensor, theta: Tensor) -> Modes:
        """Modes of all groups given shared coordinates ``(P,)``, searched from where they were found last."""

        def found_at(place: tuple[Tensor, Tensor]) -> Modes:
            found = block_modes(self.density.terms(place[1]), self.last.own, place[0], self.tolerance)
            self.last.own = found.own
            return found

        return self.last.modes.found((w.detach().clone(), theta.detach().clone()), are_equal, found_at)

    def following(self, w: Tensor, theta: Tensor) -> tuple[Terms, Tensor]:
        """The terms, and the modes as a function of shared coordinates and hyperparameters, ``(n,)``."""
        modes, terms = self.modes(w, theta), self.density.terms(theta)
        start = modes.own.detach().requires_grad_()
        rise = pullback(terms(start.unsqueeze(0), w).sum(), start, create_graph=True)
        return terms, start.detach() + solved(self.partition, modes.tril, rise)


def _of_rows(one: Callable[[Tensor, Tensor], Tensor], u: Tensor, theta: Tensor) -> Tensor:
    """A function at rows ``(R, P)``; nan where groups have no mode: there a search turns back, on all processes."""
    found, thetas = [], theta.expand(len(u), -1)
    with torch.enable_grad():
        for w, t in zip(u, thetas, strict=True):
            try:
                found.append(one(w, t))
            except (ArithmeticError, LinAlgError):
                found.append((w.sum() + t.sum()) * torch.nan)
    value = torch.stack(found)
    return value if u.requires_grad or theta.requires_grad else value.detach()


def value(groups: Groups, u: Tensor, theta: Tensor) -> Tensor:
    """The highest log density of groups and data, nats, ``(R,)``."""

    def one(w: Tensor, theta: Tensor) -> Tensor:
        terms, own = groups.following(w, theta)
        return terms(own.unsqueeze(0), w).sum()

    return _of_rows(one, u, theta)


@torch.enable_grad()
def precision(groups: Groups, u: Tensor, theta: Tensor) -> Tensor:
    """Minus its second derivative, ``(R, P, P)``: the groups' Schur complement."""
    graph = u.requires_grad or theta.requires_grad
    return -derivatives.hessian(partial(value, groups), u, theta, create_graph=graph)


def integral(groups: Groups, u: Tensor, theta: Tensor) -> Tensor:
    """Log of the Gaussian integral over the groups, nats, ``(R,)``; its first derivatives are exact."""

    def one(w: Tensor, theta: Tensor) -> Tensor:
        terms, own = groups.following(w, theta)
        found = local(terms, own, w, create_graph=True).curvature
        logs = [torch.linalg.cholesky(B).diagonal(dim1=-2, dim2=-1).log().sum() for B in found]
        return 0.5 * len(own) * math.log(math.tau) - torch.stack(logs).sum()

    return _of_rows(one, u, theta)


@torch.enable_grad()
def _totals(groups: Groups, u: Tensor, theta: Tensor) -> PassTotals:
    u = u.detach().requires_grad_()
    height, rise, second = derivatives.sloped(partial(value, groups), u, theta)
    return PassTotals(height.detach(), rise.detach(), -second(False))


PROFILE = Summands(value, precision, _totals)


@dataclass(frozen=True, eq=False)
class GroupRows(Rows[Groups]):
    """The groups of all chunks.

    :ivar first: the model on the first few rows.
    :ivar prior: the prior of what all groups share, and the hyperparameters from which all begin.
    :ivar own: latent sites of the groups.
    :ivar known: the groups of each chunk of this process, by number, without its rows.
    """

    first: LogJoint = field(kw_only=True)
    prior: LogJoint = field(kw_only=True)
    own: tuple[str, ...] = field(kw_only=True)
    known: dict[int, Groups] = field(kw_only=True)
    _integral: Last[tuple[Tensor, Tensor], Tensor] = field(default_factory=Last, kw_only=True)

    def integral(self, u: Tensor, theta: Tensor) -> Tensor:
        """Log of the Gaussian integral over all groups, nats, ``(R,)``; differentiable once."""

        def found_at(place: tuple[Tensor, Tensor]) -> Tensor:
            return self.total(lambda g: integral(g, *place))

        known = self._integral.found((u.detach().clone(), theta.detach().clone()), are_equal, found_at)
        return added_up(self, integral, known, u, theta)

    @property
    def structure(self) -> Structure:
        """Structure of the density of all groups and rows."""
        density = StreamedDensity(self.prior, (), (), False, rows=self, of=PROFILE)
        plain = AutogradDensity(self.prior, None)
        return Structure(None, None, density, plain, eliminated=self.integral)


@dataclass(frozen=True, eq=False)
class GroupReader:
    """Reads chunks as groups: for the first time with all checks, later without."""

    make: Making
    shared: LogJoint
    own: tuple[str, ...]
    known: dict[int, Groups] = field(default_factory=dict)
    labels: list[Labels] = field(default_factory=list)  # of groups, in each chunk
    constants: list[Constant | None] = field(default_factory=list)  # that targets are, in each chunk

    def read(self, number: int, args: Sequence[Any]) -> Groups:
        """A chunk that was checked."""
        return self.known[number].on(args)

    def checked(self, number: int, args: Sequence[Any]) -> None:
        """A chunk that is read for the first time.

        :raises BadInput: when what all share is another there than in the first.
        :raises UnsupportedModel: for groups that are not independent.
        """
        joint, shared = self.make(args), self.shared
        joint.held, joint.initial_theta = shared.held, shared.initial_theta
        here = {p.name: tuple(p.shape) for p in joint.latents if p.name not in self.own}
        first = {p.name: tuple(p.shape) for p in shared.latents}
        if here != first or joint.hypers.names != shared.hypers.names:
            raise BadInput(
                f"chunk {number} has the latent sites {here} beside those of its groups, {', '.join(self.own)}; the "
                f"first has {first}. Expected the same: chunks must differ in their rows and groups only."
            )
        u = generic_directions(1, shared.latents.size, shared.initial_u)[0]
        priors = (prior_alone(joint, shared.latents.names), shared)
        require_same_prior(number, shared, [x.log_joint(u, shared.initial_theta).detach() for x in priors])
        sizes = frozenset(d for p in joint.latents if p.name in self.own for d in p.shape)
        self.labels.append(labels_of(args, sizes))
        self.constants.append(joint.constant)
        self.known[number] = self.groups(joint, number).on(())

    def groups(self, joint: LogJoint, number: int) -> Groups:
        """The groups of a model on some rows.

        :raises UnsupportedModel: for groups that are not independent.
        """
        mask = torch.ones(joint.latents.size, dtype=torch.bool, device=joint.device)
        for name in self.own:
            mask[joint.latents.slices[name]] = False
        partition = around(joint, mask, SMALL)
        if isinstance(partition, NotSparse):
            raise UnsupportedModel(
                f"chunk {number}: the groups of {', '.join(self.own)} are not independent of one another given the "
                f"other latent sites: {partition.reason}. Chunks need linear predictors or independent groups; pass "
                "all data to run(...)."
            )
        start = torch.zeros(len(partition.own)).to(joint.initial_u)
        names = (*self.own, *joint.discrete, *joint.observed)
        density = BlockDensity(joint, partition, None, start[:0], lambda theta: theta.new_zeros(()), names)
        return Groups(density, LastIterate(start), limits_of(joint.dtype).tolerance)


def group_rows(
    model: Any, chunks: Chunks, communicator: Communicator, make: Making, first: LogJoint, own: tuple[str, ...]
) -> GroupRows:
    """The groups of all chunks; one pass, in which every chunk is checked.

    :param first: the model on the first few rows.
    :raises BadInput, UnsupportedModel: on all processes what is wrong with one chunk.
    """
    shared = prior_alone(first, [n for n in first.latents.names if n not in own])
    shared.has_data = False
    reader = GroupReader(make, shared, own)
    counts = looked_through(model, chunks, communicator, reader.checked)
    require_whole(chunks, reader.labels, communicator)
    first.constant = constant_of(reader.constants, first.observed[0], communicator)
    return GroupRows(
        Repeated(lambda: (reader.read(number, args) for number, args in with_rows(chunks))),
        next(iter(reader.known.values())) if reader.known else reader.groups(first, 0),
        counts,
        communicator,
        first=first,
        prior=shared,
        own=own,
        known=reader.known,
    )
