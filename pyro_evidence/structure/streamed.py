"""Linear predictors of rows that are never together: a pass over the chunks adds up value, slope and curvature.

Derivatives in weights and hyperparameters, of any order, are passes too: what a chunk gives is differentiated there and
then, and its graph is gone before the next chunk is read.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.data.chunks import Chunks, agree_on_kind, first_rows
from pyro_evidence.data.ranks import SINGLE_PROCESS, Communicator, Statistics
from pyro_evidence.data.rows import Rows
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.numerics import derivatives
from pyro_evidence.numerics.derivatives import Last, Orders, are_equal, generic_directions
from pyro_evidence.program.checks import Constant
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.predictors import LikelihoodTerm
from pyro_evidence.structure.density import LinearDensity, wants_graph, with_prior
from pyro_evidence.structure.groups import PrecisionGroups
from pyro_evidence.structure.probes import Unreadable
from pyro_evidence.structure.recognise import Structure, read_again, recognise

MANY = 4  # points at once, beyond which curvatures are not made beside values

Making = Callable[[Sequence[Any]], LogJoint]  # the model on other rows


@dataclass(frozen=True, eq=False)
class LinearRows(Rows[LinearDensity]):
    """The linear predictors of rows in chunks; the example is that of the first few rows.

    :ivar structure: what the first few rows show, with the noise of all rows.
    """

    structure: Structure = field(kw_only=True)

    @property
    def joint(self) -> LogJoint:
        """The model on the first few rows, with the hyperparameters from which all begin."""
        return self.example.joint


@dataclass(frozen=True, eq=False)
class LinearReader:
    """Reads chunks as linear predictors: for the first time with all checks, later without."""

    make: Making
    first: LinearDensity  # of the first few rows
    likelihoods: dict[int, tuple[LikelihoodTerm, ...]] = field(default_factory=dict)  # of the chunks that were checked
    groups: dict[int, PrecisionGroups | None] = field(default_factory=dict)
    constants: dict[int, Constant | None] = field(default_factory=dict)  # what targets of these chunks all are

    @torch.enable_grad()  # predictors are read by derivatives, whoever asks
    def read(self, number: int, args: Sequence[Any]) -> LinearDensity:
        """A chunk that may have been read before."""
        if number not in self.likelihoods:
            return self.checked(number, args)
        joint = copy.copy(self.first.joint)
        joint.args = tuple(args)
        try:
            return replace(read_again(joint, self.likelihoods[number]), free=self.first.free)
        except (Unreadable, RuntimeError):  # not what it was in the pass before
            return self.checked(number, args)

    def checked(self, number: int, args: Sequence[Any]) -> LinearDensity:
        """A chunk that is read for the first time.

        :raises BadInput: when it differs from the first in more than its rows.
        :raises UnsupportedModel: for predictors that are not linear.
        """
        joint, first = self.make(args), self.first.joint
        joint.held, joint.initial_theta = first.held, first.initial_theta
        shapes, expected = ({p.name: p.shape for p in j.latents} for j in (joint, first))
        if shapes != expected or joint.hypers.names != first.hypers.names:
            raise BadInput(
                f"chunk {number} has {joint.latents.size} weights and the first {first.latents.size}; chunks must "
                f"differ in their rows only. Latent sites of every row are none that chunks can share."
            )
        found = recognise(joint)
        if found.linear is None:
            raise not_linear(joint, number)
        u = torch.stack([first.initial_u, generic_directions(1, first.latents.size, first.initial_u)[0]])
        priors = [
            (d.log_joint(u, first.initial_theta) - d.log_likelihood(u, first.initial_theta)).detach()
            for d in (found.linear, self.first)
        ]
        require_same_prior(number, first, priors)
        self.likelihoods[number], self.groups[number] = found.linear.likelihoods, found.groups
        self.constants[number] = joint.constant
        return found.linear

    def all_groups(self, few: PrecisionGroups | None, communicator: Communicator) -> PrecisionGroups | None:
        """The precisions that are hyperparameters, with the noise of all rows; None where chunks differ in them.

        :param few: those that the first few rows show.
        """
        here = [g for g in self.groups.values() if few is None or g is None or not torch.equal(g.power, few.power)]
        size = torch.zeros_like(self.first.joint.initial_theta)
        noise = [g.noise_here for g in self.groups.values() if g is not None]
        differ = size.new_tensor([float(len(here))])
        total = communicator.total(torch.cat([differ, torch.stack([size, *noise]).sum(0)]))
        return None if few is None or total[0] else replace(few, num_noise=total[1:])


def constant_of(found: Collection[Constant | None], site: str, communicator: Communicator) -> Constant | None:
    """The one number that the targets of all chunks are; None where they vary.

    :param found: of each chunk here.
    :param site: the first observed one.
    """
    here = {repr(each and each[1]) for each in found}
    there = {value for said in communicator.gather_str(" ".join(here)) for value in said.split()}
    times = torch.tensor(float(sum(each[2] for each in found if each)), dtype=torch.float64)
    number = int(communicator.total(times))
    return None if len(there) != 1 or there == {"None"} else (site, float(*there), number)


def require_same_prior(number: int, first: LogJoint, values: Sequence[Tensor]) -> None:
    """Refuse a chunk whose prior is another than the first one's.

    :param values: the log prior density of both at the same points, nats.
    :raises BadInput: naming the chunk.
    """
    if not torch.allclose(values[0], values[1], rtol=first.rounding, atol=first.rounding):
        raise BadInput(
            f"the prior of {', '.join(first.latents.names)} in chunk {number} is another than in the first: it depends "
            f"on the rows. Expected one prior: compute what it needs over all rows, and bind that to it."
        )


def not_linear(joint: LogJoint, number: int = 0) -> UnsupportedModel:
    """The error message for a model whose chunks cannot be added up."""
    return UnsupportedModel(
        f"chunk {number}: chunks of rows need linear predictors, which observed site(s) {', '.join(joint.observed)} do "
        f"not all have, or latent sites of groups that lie whole in one chunk (local=). Pass all data to run(...)."
    )


def first_joint(model: Any, chunks: Chunks, communicator: Communicator, make: Making) -> LogJoint:
    """The model on the first few rows, of which processes are found to have the same.

    :raises BadInput: on all processes, where they have not, or what is wrong with the rows of one.
    """
    agree_on_kind(model, chunks, communicator, make)
    joint = make(first_rows(chunks, communicator))
    if communicator is not SINGLE_PROCESS:
        value = float(joint.log_joint(joint.initial(1, seed=0)[0], joint.initial_theta))
        sites = ", ".join([*joint.latents.names, *joint.observed])
        density = f"sites {sites} with log density {value:.6g} at one point of the first rows"
        communicator.check_equal("models", density)
    return joint


def linear_rows(model: Any, chunks: Chunks, communicator: Communicator, make: Making, joint: LogJoint) -> LinearRows:
    """The predictors of all rows; one pass, in which every chunk is checked.

    :param joint: the model on the first few rows.
    :raises BadInput, UnsupportedModel: on all processes what is wrong with one chunk.
    """
    joint.has_data = False
    found = recognise(joint)
    if found.linear is None:
        raise not_linear(joint)
    reader = LinearReader(make, found.linear)
    rows = Rows.of_chunks(
        model, chunks, reader.read, check=reader.checked, example=found.linear, communicator=communicator
    )
    joint.constant = constant_of(reader.constants.values(), joint.observed[0], communicator)
    structure = replace(found, groups=reader.all_groups(found.groups, communicator))
    return LinearRows(rows.pieces, found.linear, rows.counts, communicator, structure=structure)


@dataclass(frozen=True, eq=False)
class PassTotals(Statistics):
    """Sums of one pass at some points."""

    value: Tensor  # (R,) log likelihood, nats
    gradient: Tensor  # (R, D)
    precision: Tensor  # (R, D, D)


@dataclass(frozen=True, eq=False)
class Summands:
    """Sums over a chunk at rows ``(R, D)`` and hyperparameters, each in its graph.

    :ivar totals: value, gradient and precision together, without a graph.
    """

    value: "OfChunk"
    precision: "OfChunk"
    totals: Callable[..., PassTotals]


@dataclass(frozen=True, eq=False)
class StreamedDensity(LinearDensity):
    """The density of all rows, whose likelihood is a sum over chunks; its fields are those of the first few rows."""

    rows: Rows[Any] = field(kw_only=True)
    of: Summands = field(default_factory=lambda: LINEAR)
    _totals_last: Last[tuple[Tensor, Tensor], PassTotals] = field(default_factory=Last, compare=False, repr=False)

    def log_likelihood(self, u: Tensor, theta: Tensor) -> Tensor:
        """Log likelihood of all observed sites, nats, shape ``(R,)``; differentiable, by a pass for each derivative."""
        return self._total("value", u, theta)

    def likelihood_gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The log likelihood and its gradient in ``u``, detached."""
        found = self._totals(u, theta)
        return found.value, found.gradient

    def likelihood_precision(self, u: Tensor, theta: Tensor) -> Tensor:
        """Minus the Hessian of the log likelihood in ``u``, shape ``(R, D, D)``, in memory of its own."""
        return self._total("precision", u, theta).clone()

    def _total(self, name: str, u: Tensor, theta: Tensor) -> Tensor:
        of: OfChunk = getattr(self.of, name)
        if len(u) > MANY and not wants_graph(u, theta):
            return self.rows.total(lambda d: of(d, u, theta).detach())
        known: Tensor = getattr(self._totals(u, theta), name)
        return added_up(self.rows, of, known, u, theta) if wants_graph(u, theta) else known

    def orders(self, u: Tensor, theta: Tensor) -> Orders:
        """The log joint and two derivatives in ``u``, which requires a gradient; theirs are passes again."""
        self._require_dense(u)
        prior = self._prior_orders(u, theta)
        gradient = added_up(self.rows, partial(_slope, self.of.value), self._totals(u, theta).gradient, u, theta)
        A = with_prior(self.likelihood_precision(u, theta), prior.precision)
        return Orders(prior.log_joint + self.log_likelihood(u, theta), prior.gradient + gradient, A)

    def precision_diagonal(self, u: Tensor, theta: Tensor) -> Tensor:
        return self.precision(u, theta).diagonal(dim1=-2, dim2=-1)

    def _totals(self, u: Tensor, theta: Tensor) -> PassTotals:
        """Value, gradient and curvature of the likelihood, in one pass; those of the last points are kept."""

        def found_at(place: tuple[Tensor, Tensor]) -> PassTotals:
            return self.rows.total(lambda d: self.of.totals(d, *place))

        return self._totals_last.found((u.detach().clone(), theta.detach().clone()), are_equal, found_at)


def _totals(density: LinearDensity, u: Tensor, theta: Tensor) -> PassTotals:
    value, rise = density.likelihood_gradient(u, theta)
    return PassTotals(value, rise, density.likelihood_precision(u, theta).detach())


LINEAR: Summands = Summands(LinearDensity.log_likelihood, LinearDensity.likelihood_precision, _totals)


@torch.enable_grad()
def _slope(value: "OfChunk", piece: Any, u: Tensor, theta: Tensor) -> Tensor:
    """The derivative of a value in ``u``, which requires a gradient, in its graph, ``(R, D)``."""
    return derivatives.pullback(value(piece, u, theta).sum(), u, create_graph=True)


OfChunk = Callable[..., Tensor]  # of a chunk's density and of tensors


def added_up(rows: Rows[Any], of: OfChunk, known: Tensor, *x: Tensor) -> Tensor:
    """The sum of ``of`` over all chunks, whose value is known, differentiable in ``x`` as often as one likes."""
    return _Sum.apply(rows, of, known, *x)


class _Sum(torch.autograd.Function):
    """A sum over a pass; its derivative is a sum over a pass of derivatives."""

    @staticmethod
    def forward(ctx: Any, rows: Rows[Any], of: OfChunk, known: Tensor, *x: Tensor) -> Tensor:
        ctx.rows, ctx.of, ctx.last = rows, of, None
        ctx.save_for_backward(*x)
        return known.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        x, pulled = ctx.saved_tensors, partial(_pulled, ctx.of)
        sizes, (cotangent,) = [v.numel() for v in x], cotangents
        sign = next((s for s in (1.0, -1.0) if ctx.last and torch.equal(ctx.last[0], s * cotangent)), 0.0)
        if sign == 0.0:  # else these derivatives have been asked for, one argument after the other
            held = tuple(v.detach() for v in (*x, cotangent))
            ctx.last = held[-1].clone(), ctx.rows.total(lambda d: pulled(d, *held).detach())
        flat = added_up(ctx.rows, pulled, (sign or 1.0) * ctx.last[1], *x, cotangent)
        return None, None, None, *(g.reshape(v.shape) for g, v in zip(flat.split(sizes), x, strict=True))


@torch.enable_grad()
def _pulled(of: OfChunk, density: Any, *x: Tensor) -> Tensor:
    """Derivatives of a chunk's ``of`` in all of its arguments, times the last of ``x``, flat."""
    *points, cotangent = x
    again = any(v.requires_grad for v in x)
    points = [v if v.requires_grad else v.detach().requires_grad_() for v in points]
    found = derivatives.pullbacks(of(density, *points), points, cotangent, create_graph=again)
    return torch.cat([g.reshape(-1) for g in found])


def streamed_structure(rows: LinearRows) -> Structure:
    """Structure of the density of all rows, by the first few."""
    first = rows.example
    streamed = StreamedDensity(first.joint, first.linear, first.free, first.gaussian, rows=rows)
    return replace(rows.structure, known=streamed)
