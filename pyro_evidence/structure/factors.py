"""The factors of one model: followed through a run, joined to families, worth it or not; sites that multiply others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Normal

from pyro_evidence.errors import UnsupportedModel
from pyro_evidence.fitting.process_state import without_validation
from pyro_evidence.numerics.coordinates import is_identity
from pyro_evidence.numerics.derivatives import Forward, generic_directions, pullback
from pyro_evidence.numerics.linalg import Label, has_room, require_memory
from pyro_evidence.precision.dense import FLOAT
from pyro_evidence.precision.elimination import coloured, num_cycles
from pyro_evidence.program import predictors
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.predictors import LikelihoodTerm
from pyro_evidence.structure import factor_terms
from pyro_evidence.structure.dependencies import NARROW, WIDE, Follow, Groups, Lost
from pyro_evidence.structure.factor_cells import (
    FactorFamily,
    FieldValues,
    by_width,
    cells,
    coordinate_table,
    families,
    field_values,
)
from pyro_evidence.structure.factor_density import Structured
from pyro_evidence.structure.factor_linear import SparsePredictors, SparseRows
from pyro_evidence.structure.factor_terms import RecordedTerms
from pyro_evidence.structure.probes import TestPoint

SMALL = 200  # coordinates up to which a dense precision is as fast
COPIES = 4  # of the elements, held by a factorisation and a slope
RUNS = 20  # copies of what one run keeps, at the peak of a fit
NUMBERS = 30  # per coordinate, at that peak
WIDEST_ROW = 256  # coordinates that one datum may see through linear predictors
WIDE_TERMS = 2048  # coordinates of terms that depend on many each, taken together
MANY_PAIRS = 400  # of colours, each a second derivative of the whole model


@dataclass(frozen=True, eq=False)
class Followed:
    """The coordinates on which the terms of a model depend, as a run of it shows them."""

    joint: LogJoint
    u: Tensor  # (D,) where
    theta: Tensor  # (T,)
    groups: Mapping[str, Groups]  # of the terms of the log joint density
    shapes: Mapping[str, torch.Size]
    widest: Lost  # what ties most coordinates together
    likelihoods: Mapping[str, Tensor]  # by site: coordinates of each datum's predictors, (N, C m), -1 for none
    fields: Mapping[str, FieldValues]  # by site that says its precision

    def rows(self, likelihood: LikelihoodTerm, slope: Forward) -> SparseRows | None:
        """``J`` of a linear predictor; None where some datum sees many latents, or none sees any.

        :param slope: of the predictor's blocks ``(N C,)`` in ``u``.
        """
        table = self.likelihoods.get(likelihood.site)
        return None if table is None else sparse_rows(table, slope, likelihood.layout.num_coupled)


@dataclass(frozen=True, eq=False)
class FollowedSums:
    """The terms of a model as functions of coordinates and of a few sums of them."""

    terms: RecordedTerms
    joint: LogJoint
    u: Tensor  # (D,) where
    theta: Tensor  # (T,)
    families: tuple[FactorFamily, ...]  # those of data last

    def rows(self, likelihood: LikelihoodTerm, _: Forward | None = None) -> SparseRows | None:
        """``J`` of a linear predictor in coordinates and sums, or None."""
        return rows_of(self.terms, self.joint, self.u, self.theta, likelihood.blocks)


def rows_of(
    terms: RecordedTerms, joint: LogJoint, u: Tensor, theta: Tensor, values: Callable[[Any], Tensor]
) -> SparseRows | None:
    """``J`` of values ``(N, C)`` of a run in coordinates and sums, or None."""
    found = factor_terms.through_sums(terms, joint, u, theta, values)
    return None if found is None else sparse_rows(found[0], found[1], len(found[1].value) // len(found[0]), terms.B)


@dataclass(frozen=True, eq=False)
class NotSparse:
    """Why a model has no factors that are worth following."""

    reason: str
    coordinates: Tensor | None = None

    def message(self, label: Label) -> str:
        """The obstacle to a smaller matrix, and how to write the model instead, in words."""
        where = f" ({label(max(0, int(self.coordinates.max())))})" if self.coordinates is not None else ""
        return (
            f"What keeps the matrix dense: {self.reason}{where}. Where each term of the model sees few coordinates "
            f"none is needed: make the level of a walk the site, pyro.sample('dx', Normal(x[:-1], s), obs=x[1:]), not "
            f"its increments; put an intercept beside effects instead of normalising them inside the model; draw a "
            f"field that sums to zero from pyro_evidence.models.gmrf.ICAR(edges, scale, level=...), or let terms "
            f"see it through a few plain sums."
        )


def require_room(joint: LogJoint, num_bytes: int) -> None:
    """Refuse before the fit what it would have no room for.

    :param num_bytes: what autograd keeps of one run of the model.
    :raises TooLarge: with the number.
    """
    size = joint.latents.size
    require_memory(
        RUNS * num_bytes + NUMBERS * FLOAT * size,
        f"The fit of {size:,} coordinates, by factors of few coordinates each,",
        joint.device,
        "Join rows with equal covariates and levels (a count of several trials), fit fewer groups at a time, or use a "
        "machine with more memory.",
    )


def followed_terms(
    joint: LogJoint, u: Tensor, theta: Tensor, likelihoods: Sequence[LikelihoodTerm]
) -> Followed | NotSparse:
    """The coordinates of every term and of every predictor, at one point ``(D,)``."""
    u = u.detach().clone()
    try:
        with torch.no_grad(), Follow(u) as notes:
            terms = cells(joint, u, theta.detach())
            trace = joint.trace(u, theta.detach())
            blocks = {likelihood.site: likelihood.blocks(trace) for likelihood in likelihoods}
        if any(_width(notes.of(x)) > NARROW and x.numel() * _width(notes.of(x)) > WIDE for x in terms.values()):
            return NotSparse(f"{notes.widest} ties {notes.most:,} coordinates together", notes.widest.coordinates)
        narrow = {site: eta for site, eta in blocks.items() if eta.shape[-1] * _width(notes.of(eta)) <= WIDEST_ROW}
        found = {site: coordinate_table(notes.of(eta), eta.shape).reshape(len(eta), -1) for site, eta in narrow.items()}
    except Lost as lost:
        return NotSparse(str(lost), lost.coordinates)
    groups = {name: notes.of(term) for name, term in terms.items()}
    shapes = {name: term.shape for name, term in terms.items()}
    return Followed(joint, u, theta.detach(), groups, shapes, notes.widest, found, field_values(joint, trace))


def _width(groups: Groups) -> int:
    """Number of coordinates on which each element depends."""
    return sum(group.shape[-1] for group in groups)


def sparse_rows(table: Tensor, slope: Forward, num_coupled: int, B: Tensor | None = None) -> SparseRows | None:
    """``J`` of values by a few of its products; None where some datum sees many coordinates, or none sees any.

    :param table: coordinates of each datum, ``(N, m)``, -1 for none.
    :param slope: of the values ``(N C,)`` in the coordinates, and in sums ``B u`` after these.
    """
    parts, size = by_width(table), slope.x.numel()
    if not parts or max(own.shape[-1] for _, own in parts) > WIDEST_ROW:
        return None
    most = max(own.shape[-1] for _, own in parts)
    index = parts[0][1].new_zeros(len(table), most)
    used = torch.zeros_like(index, dtype=torch.bool)
    for rows, own in parts:  # the coordinates of all data side by side; where there are fewer, the first stands again
        here = slice(None) if rows is None else rows
        index[here] = torch.cat([own, own[:, :1].expand(-1, most - own.shape[-1])], -1)
        used[here, : own.shape[-1]] = True
    colours = coloured(size, [own for _, own in parts])
    own = torch.where(used, colours[index], -1)
    value = slope.x.new_zeros(len(index), num_coupled, index.shape[-1])
    for colour in range(int(colours.max()) + 1):
        along = slope.along((colours == colour).to(slope.x).unsqueeze(0)).reshape(len(index), num_coupled)
        value = torch.where((own == colour).unsqueeze(1), along.unsqueeze(-1).to(value), value)
    return SparseRows(index, value, size if B is None else B.shape[-1], B)


def _undescribed(joint: LogJoint, linear: SparsePredictors | None) -> tuple[str, ...]:
    """The sites whose factors linear predictors do not describe: those describe the data's, and normal priors."""
    if linear is None:
        return (*joint.latents.names, *joint.discrete, *joint.observed)
    return () if linear.gaussian else joint.latents.names


def structured(followed: Followed, linear: SparsePredictors | None) -> Structured | NotSparse:
    """The density by its factors, where that is cheaper than a dense matrix."""
    joint, size, names = followed.joint, followed.joint.latents.size, _undescribed(followed.joint, linear)
    mine = {n: g for n, g in followed.groups.items() if any(part.split(", ")[0] in names for part in n.split("+"))}
    limit = min(WIDE_TERMS, size // 2)  # of coordinates of wide terms
    alike = {n: max((g.numel() for g in own if g.shape[:-1].numel() == 1), default=0) for n, own in mine.items()}
    least = sum(torch.Size(followed.shapes[n]).numel() * most for n, most in alike.items() if most > NARROW)
    fits = least <= limit  # told before coordinates that all elements have are laid out for each
    found = families(mine, followed.shapes, joint.observed, followed.fields) if fits else ()
    narrow = tuple(family for family in found if family.index.shape[-1] <= NARROW)
    wide = tuple(family for family in found if family.index.shape[-1] > NARROW)
    likelihoods = None if linear is None else linear.likelihoods
    density = Structured(joint, likelihoods, linear=linear, names=names, families=narrow, wide=wide)
    widths = [index.shape[-1] for index in density.pattern.index]
    most, widest_plate = max(*widths, *alike.values(), 0), max(widths[: len(widths) - len(wide)])
    fits = fits and sum(family.index.numel() for family in wide) <= limit
    if not fits or widest_plate > max(NARROW, size // 4):
        return NotSparse(f"{followed.widest} ties {most:,} coordinates together", followed.widest.coordinates)
    if not _affordable(density):
        return NotSparse("nearly every coordinate meets every other in some term")
    if not found:
        return density
    if linear is None:
        at_once = factor_terms.terms_of_steps(followed.joint, (*narrow, *wide), followed.u, followed.theta)
        if at_once is not None:  # its replay takes less time than a run of the model for closed forms
            plain = tuple(replace(family, closed=False) for family in narrow)
            density = replace(density, terms=at_once, families=plain)
    return replace(density, followed=(followed.u, followed.theta))


def followed_sums(joint: LogJoint, u: Tensor, theta: Tensor) -> FollowedSums | None:
    """The terms, where those that see many coordinates see them through a few sums."""
    found = factor_terms.terms_of_sums(joint, u, theta)
    if found is None:
        return None
    terms, groups, shapes = found

    def designed(name: str, values: Tensor) -> FieldValues | None:
        rows = rows_of(terms, joint, u, theta, lambda trace: trace.nodes[name]["value"].reshape(-1, 1))
        if rows is None:
            return None
        each = torch.eye(values.shape[-1]).to(u)[..., None] * rows.value[values, 0].unsqueeze(1)  # (F, v, v, k)
        return rows.index[values].flatten(1), each.flatten(2)

    fields = field_values(joint, joint.trace(u, theta), designed)
    own = families(groups, shapes, joint.observed, fields)
    return FollowedSums(factor_terms.ordered(terms, shapes, own), joint, u, theta, own)


def with_sums(followed: FollowedSums, linear: SparsePredictors | None) -> Structured | None:
    """The density by factors of coordinates and of a few sums of them, where that is cheaper than a dense matrix."""
    joint, own, terms = followed.joint, followed.families, followed.terms
    names = _undescribed(joint, linear)
    if linear is not None:
        own = tuple(family for family in own if all(member.name.split(", ")[0] in names for member in family.members))
        terms = replace(terms, sizes=terms.sizes[: len(own)])
    likelihoods = None if linear is None else linear.likelihoods
    density = Structured(joint, likelihoods, terms, linear=linear, names=names, families=own, wide=())
    if not _affordable(density):
        return None
    return replace(density, followed=(followed.u, followed.theta))


def _affordable(density: Structured) -> bool:
    """Whether few second derivatives give all factors, and they fit into memory."""
    size, device = density.pattern.size, density.joint.device
    numbers = sum(index.numel() * index.shape[-1] for index in density.pattern.index)
    second, most = density.second_of(density.differentiated), min(MANY_PAIRS, size)
    widths = [index.shape[-1] for index in second.index]  # pairs of colours meet in each factor
    few = all(k * (k + 1) <= 2 * most for k in widths) and len(second.pairs) <= most
    return few and has_room(COPIES * FLOAT * numbers, device)


def refuse_edges(origin: TestPoint, zeros: Sequence[str]) -> None:
    """Refuse a field on a graph that is written as differences observed to be zero, with a scale that is learned.

    Normals for ``E`` edges normalise by ``scale^-E``; a field of ``n`` values on ``c`` components of a graph by
    ``scale^-(n - c)``, which is the same for a forest only.

    :param origin: a run with derivatives.
    :param zeros: the observed sites whose data are all zero.
    :raises UnsupportedModel: with the site and what to write instead.
    """
    for name in zeros:
        edges = _edges(origin, name)
        cycles = 0 if edges is None else num_cycles(edges)
        if edges is not None and cycles:
            num = len(edges)
            raise UnsupportedModel(
                f"site '{name}' draws each of {num:,} differences between latents from a Normal whose scale is "
                f"learned. Its edges close {cycles:,} cycles, so that the differences are not free of each other: "
                f"together they must normalise by scale^-{num - cycles:,}, not by scale^-{num:,}, and the scale would "
                f"come out wrong. Draw the field from pyro_evidence.models.gmrf.ICAR(edges, scale, level=...) "
                f"instead, or hold the scale fixed."
            )


def _edges(origin: TestPoint, name: str) -> Tensor | None:
    """The two latents whose differences a Normal site of a learned scale observes, ``(E, 2)``, or None."""
    node, depends = origin.trace.nodes[name], predictors.depends
    base = predictors.unwrapped(node["fn"]).base
    if not isinstance(base, Normal) or torch.as_tensor(node["value"]).numel() <= 2:  # which close no cycle
        return None
    if not (depends(base.scale, origin.theta) or depends(base.scale, origin.u)) or not depends(base.loc, origin.u):
        return None
    u = origin.u.detach().clone()
    try:
        with torch.no_grad(), Follow(u) as notes:
            term = cells(origin.joint, u, origin.theta.detach(), (name,))[name]
    except (Lost, KeyError):
        return None
    groups = notes.of(term)
    parts = by_width(coordinate_table(groups, term.shape)) if groups else []
    pairs = [index for _, index in parts if index.shape[-1] == 2]
    loc = base.loc.reshape(-1)
    weights = generic_directions(1, len(loc), loc)[0]
    (slope,) = torch.autograd.grad(loc @ weights, origin.u, retain_graph=True)
    in_loc = slope != 0.0  # a latent and the scale itself are no two ends
    return pairs[0] if len(parts) == 1 and pairs and bool(in_loc[pairs[0]].all()) else None


OFF = -30.0  # unconstrained value at which a positive number is 1e-13; farther, a probability of one would be rounded
SWITCHED_OFF = 1e-4  # share of a slope that is none: what is added leaves more, even of a Cauchy datum's, 1 / 30


def multipliers(joint: LogJoint) -> tuple[str, ...]:
    """The sites that multiply others across plates, by name.

    Such as the discriminations of items the abilities of persons.  The joint mode of two factors says little: one grows
    as the other shrinks, and the spread of either, maximised around a Gaussian over both, ends at zero (Neyman and
    Scott, 1948; Bock and Aitkin, 1981, integrate the abilities instead).

    Two sites are crossed where an element of either meets several of the other, term by term; effects and their common
    mean are not, nor are effects and the scale of their group, which is for integration outside.  A site multiplies
    another where data that see the other no longer do once it is zero, or its exponential is.
    """
    wide, u = [part for part in joint.latents if part.size > 1], joint.initial(1, seed=0)[0]
    if len(wide) < 2:
        return ()
    pairs, felt = list[tuple[str, str]](), _slope(joint, u)
    ends = [(part, end) for part in wide for end in ((0.0, OFF) if is_identity(part.transform) else (OFF,))]
    for part, end in ends:  # by a gradient each: to follow a run takes as long as many of them
        off = u.clone()
        off[joint.latents.slices[part.name]] = end
        try:
            left = _slope(joint, off)
        except (RuntimeError, ValueError):  # the model cannot be run there, as where a matrix becomes singular
            continue
        for other in wide:
            own = joint.latents.slices[other.name]
            if other is not part and float(left[own].abs().max()) < SWITCHED_OFF * float(felt[own].abs().max()):
                pairs.append((part.name, other.name))
    followed = followed_terms(joint, u, joint.initial_theta, ()) if pairs else NotSparse("none is switched off")
    if isinstance(followed, NotSparse):
        return ()
    return tuple(sorted({part for part, other in pairs if _are_crossed(followed, part, other)}))


def _are_crossed(followed: Followed, *sites: str) -> bool:
    """Whether an element of either of two sites meets several of the other, of each term the first ones counted."""
    size, met = followed.joint.latents.size, []
    for name, groups in followed.groups.items():
        if groups:
            index = coordinate_table(groups, followed.shapes[name])
            slices = (followed.joint.latents.slices[site] for site in sites)
            first = [torch.where((index >= own.start) & (index < own.stop), index, size).amin(-1) for own in slices]
            seen = (first[0] < size) & (first[1] < size)
            met.append(first[0][seen] * size + first[1][seen])
    every = torch.cat(met).unique()  # the prior of each site is a term
    return all(len(own.unique()) < len(own) for own in (every // size, every % size))


def _slope(joint: LogJoint, u: Tensor) -> Tensor:
    """Gradient of the log likelihood in the latents, ``(D,)``."""
    u = u.detach().clone().requires_grad_()
    trace = joint.trace(u, joint.initial_theta)
    with without_validation():
        return pullback(joint.total(trace, (*joint.discrete, *joint.observed)).double(), u)
