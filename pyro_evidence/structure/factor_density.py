"""One log joint density whose curvature is a sum of small matrices: the second derivatives of each factor."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress, groupby
from operator import is_, itemgetter

import torch
from torch import Tensor

from pyro_evidence.numerics import derivatives
from pyro_evidence.numerics.derivatives import Forward, Last, generic_directions, jacobian, passes, pullback, pullbacks
from pyro_evidence.numerics.linalg import relative_rounding
from pyro_evidence.numerics.newton import Gradient
from pyro_evidence.precision.blocks import BlockPlan, elimination
from pyro_evidence.precision.dense import Elements, Pattern, Plan, assembled, pattern_product
from pyro_evidence.precision.elimination import coloured
from pyro_evidence.precision.low_rank import LowRankPlan
from pyro_evidence.program.sites import Trace
from pyro_evidence.structure.density import AutogradDensity, wants_graph
from pyro_evidence.structure.factor_cells import FactorFamily, cells
from pyro_evidence.structure.factor_linear import SparseLinear, SparsePredictors

Values = Callable[[Tensor], tuple[Tensor, ...]]  # u (D,) to the factors of each family, (F,) each; or rows of both


@dataclass(frozen=True, eq=False)
class Second:
    """Second derivatives of some families of factors.

    Along the sum of all coordinates of one colour, and then of another, the derivative of a factor is that in the two
    coordinates of these colours on which it depends, because that is no more than one of each.
    """

    size: int
    index: tuple[Tensor, ...]  # (F, k) each

    @cached_property
    def colours(self) -> Tensor:
        """``(D,)``."""
        return coloured(self.size, self.index)

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """The pairs of colours that meet in some factor."""
        meet = torch.zeros(self.num_colours, self.num_colours, dtype=torch.bool, device=self.colours.device)
        for c in self._own:
            meet[c.unsqueeze(-1), c.unsqueeze(-2)] = True
        return [(a, b) for a, b in meet.nonzero().tolist() if a <= b]

    @cached_property
    def _own(self) -> list[Tensor]:
        return [self.colours[index] for index in self.index]

    @cached_property
    def _places(self) -> list[Tensor]:
        """For each family, which of :attr:`pairs` each element is, ``(F, k, k)``."""
        place = torch.zeros(self.num_colours, self.num_colours, dtype=torch.long, device=self.colours.device)
        for i, (a, b) in enumerate(self.pairs):
            place[a, b] = place[b, a] = i
        return [place[c.unsqueeze(-1), c.unsqueeze(-2)] for c in self._own]

    def _mask(self, colour: int, like: Tensor) -> Tensor:
        return (self.colours == colour).to(like).expand_as(like).unsqueeze(0)

    def _each(self, values: Values, u: Tensor, create_graph: bool) -> Iterator[tuple[Tensor, ...]]:
        """Second derivatives of every factor along each pair of colours, in the order of :attr:`pairs`."""
        with torch.enable_grad():
            u = u if u.requires_grad else u.detach().requires_grad_()
            for found in self.seconds(Forward(torch.cat(values(u), -1), u, create_graph=create_graph), self.pairs):
                yield found.split([len(index) for index in self.index], -1)

    def elements(self, values: Values, u: Tensor) -> tuple[Tensor, ...]:
        """Minus the second derivatives, ``(F, k, k)`` for each family; ``(R, F, k, k)`` at rows ``(R, D)``."""
        along, found = list(self._each(values, u, False)), []
        for i, place in enumerate(self._places):
            pairs = torch.stack([each[i] for each in along], -1)  # (..., F, P), of which each entry takes one
            flat = place.flatten(1).expand(*pairs.shape[:-1], -1)
            found.append(-pairs.gather(-1, flat).reshape(*pairs.shape[:-1], *place.shape[1:]))
        return tuple(found)

    @property
    def num_colours(self) -> int:
        """Number of colours, one more than the highest."""
        return int(self.colours.max()) + 1 if len(self.colours) else 0

    @property
    def num_passes(self) -> int:
        """Number of derivatives of all factors that second ones take."""
        return self.num_colours + len(self.pairs)

    def firsts(self, factors: Forward) -> Iterator[Tensor]:
        """Derivatives of all factors ``(..., F)`` at rows ``(..., D)`` along each colour."""
        return (factors.along(self._mask(colour, factors.x))[0] for colour in range(self.num_colours))

    def seconds(self, factors: Forward, pairs: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        """Second ones along pairs of colours, ``(..., F)`` in their order.

        The derivative in the cotangent comes last: what it is taken of is linear in it, and no larger for that.
        """
        u = factors.x
        for a, partners in groupby(pairs, itemgetter(0)):
            along = u if factors.slope is None else pullback(factors.slope, u, self._mask(a, u)[0], create_graph=True)
            for _, b in partners:
                yield passes(along, factors.cotangent, self._mask(b, u), factors.create_graph)[0]

    def slopes(self, values: Values, u: Tensor, weights: Sequence[Tensor], wrt: Sequence[Tensor]) -> list[Tensor]:
        """Derivatives in ``wrt`` of ``sum(weights * elements)``, one pair of colours held at a time."""
        totals = [torch.zeros_like(x) for x in wrt]
        for number, found in enumerate(self._each(values, u, True)):
            total = sum(
                ((weight * (place == number)).sum((-1, -2)) * value).sum()
                for weight, place, value in zip(weights, self._places, found, strict=True)
            )
            if isinstance(total, Tensor):
                totals = [t - part for t, part in zip(totals, pullbacks(total, wrt), strict=True)]
        return totals


def hessians_of_few(values: Tensor, index: Tensor, u: Tensor) -> Tensor:
    """Minus the second derivatives of each of ``values`` ``(F,)`` in its coordinates, ``(F, k, k)``.

    :param index: the coordinates, ``(F, k)``.
    :param u: ``(D,)``, of which the values are made.
    """
    slopes = (pullback(value, u, create_graph=True)[own] for value, own in zip(values, index, strict=True))
    return torch.stack([-jacobian(slope, u)[:, own] for slope, own in zip(slopes, index, strict=True)])


def slopes_of_few(values: Tensor, index: Tensor, weights: Tensor, u: Tensor, wrt: Sequence[Tensor]) -> list[Tensor]:
    """Derivatives in ``wrt`` of ``sum(weights * hessians)``.

    :param weights: symmetric, ``(F, k, k)``.
    """
    totals = [torch.zeros_like(x) for x in wrt]
    for value, own, weight in zip(values, index, weights, strict=True):
        slope = pullback(value, u, create_graph=True)
        if not slope.requires_grad:
            continue
        for i, row in enumerate(weight):
            product = pullback(slope[own[i]], u, create_graph=True)[own] @ row
            totals = [t - part for t, part in zip(totals, pullbacks(product, wrt), strict=True)]
    return totals


Solve = Callable[[Tensor], Tensor]
Chosen = tuple[bool, ...]  # for each family

NAMED = 8  # sites that the sentence names


@dataclass(frozen=True, kw_only=True)
class Structured(AutogradDensity):
    """A density by its factors; one row at a time where second derivatives are meant.

    The first family of its pattern is every coordinate by itself; the next are the data that linear predictors join,
    then the factors of the sites ``names``.

    :ivar terms: recorded, of very many sites, or of sums that families see after all coordinates.
    """

    linear: SparsePredictors | None = None
    names: tuple[str, ...]  # sites whose factors are differentiated as they stand
    families: tuple[FactorFamily, ...]  # of these
    wide: tuple[FactorFamily, ...]  # of these, few that depend on many coordinates
    followed: tuple[Tensor, Tensor] | None = None  # (D,), (T,) where the factors were found
    about: Tensor | None = None  # (1, D) among the rows of values: a quadratic prior is expanded there, in one run
    _kept: list[tuple[Tensor, tuple[Tensor, ...]]] = field(default_factory=list, repr=False, compare=False)
    _seconds: dict[Chosen, Second] = field(default_factory=dict, repr=False, compare=False)
    _fixed: Last[None, Trace | None] = field(default_factory=Last, repr=False, compare=False)

    @property
    def differentiated(self) -> Chosen:
        """Which families are differentiated twice: those without a closed form."""
        return tuple(not family.closed for family in self.families)

    def second_of(self, chosen: Chosen) -> Second:
        """The second derivatives of some families."""
        if chosen not in self._seconds:
            self._seconds[chosen] = Second(self.size, tuple(f.index for f in compress(self.families, chosen)))
        return self._seconds[chosen]

    @cached_property
    def varies(self) -> tuple[bool, ...]:
        """Which families, then which wide ones, have other second derivatives at a generic point than where found."""
        if self.followed is None:
            return ()
        u, theta = self.followed
        first, second = (replace(self, _kept=[])._factors(v, theta) for v in (u, generic_directions(3, len(u), u)[2]))
        pairs = zip(first, second, strict=True)
        return tuple(not bool(((a - b).abs() <= relative_rounding(a.dtype) * (1.0 + a.abs())).all()) for a, b in pairs)

    @property
    def size(self) -> int:
        """Coordinates that factors see, sums of many among them."""
        return self.joint.latents.size + len(self.B)

    @cached_property
    def B(self) -> Tensor:
        """Coefficients of the sums of many coordinates that factors see, ``(r, D)``; ``r`` is mostly 0."""
        return self.joint.initial_u.new_zeros(0, self.joint.latents.size) if self.terms is None else self.terms.B

    @cached_property
    def pattern(self) -> Pattern:
        """The coordinates on which each factor depends."""
        every = torch.arange(self.size, device=self.joint.device).unsqueeze(-1)
        joined = (family.index for family in (*self.families, *self.wide) if family.index.shape[-1] > 1)
        return Pattern(self.size, (every, *(part.rows.distinct for part in self.parts), *joined))

    @cached_property
    def plan(self) -> Plan:
        """In which order coordinates are eliminated."""
        return LowRankPlan(self.pattern, self.B) if len(self.B) else elimination(self.pattern)

    @property
    def sentence(self) -> str:
        """The factors and the order of elimination in words, for the reader."""
        families = (*self.families, *self.wide)
        sizes = [part.rows.index.shape for part in self.parts] + [family.index.shape for family in families]
        num, most = sum(size[0] for size in sizes), max((size[1] for size in sizes), default=1)
        factors = f"{num:,} factors of {'up to ' if most > 1 else ''}{most} coordinate{'s' if most > 1 else ''}"
        left = ""  # the sites that are not eliminated
        if isinstance(self.plan, BlockPlan) and len(self.plan.order.rest):
            rest, blocks = self.plan.order.rest, self.joint.latents.slices.items()
            names = [n for n, s in blocks if bool(((rest >= s.start) & (rest < s.stop)).any())]
            more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
            left = f" ({', '.join(names[:NAMED])}{more})"
        return f"{self.plan.sentence}{left}; {factors}; checked by 2 products with the true Hessian"

    @property
    def parts(self) -> tuple[SparseLinear, ...]:
        """The linear predictors."""
        return () if self.linear is None else self.linear.linear

    @property
    def fixed_run(self) -> Trace | None:
        """A run whose likelihoods of predictors are those of all; None where they depend on hyperparameters."""
        return self._fixed.found(None, is_, self._run_of_all)

    def _run_of_all(self, _: None) -> Trace | None:
        with torch.enable_grad():
            trace = self.joint.trace(self.joint.initial_u, self.joint.initial_theta.detach().requires_grad_())
        others = [x for part in self.parts for x in part.likelihood.others(trace)]
        return None if any(isinstance(x, Tensor) and x.requires_grad for x in others) else trace

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        if self.linear is not None and (self.linear.gaussian or len(u) > 1):
            if self.about is not None and self.is_quadratic and not wants_graph(u, theta):
                shared = theta[0] if theta.dim() == 2 else theta
                return self.linear.log_likelihood(u, shared) + self._prior_about(self.about, shared)(u)[0]
            return self.linear.log_joint(u, theta)  # else the prior takes a run of the model, in which the rest is too
        return self.joint.log_joint(u, theta) if len(self.B) else super().log_joint(u, theta)

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint and its gradient in ``u``, detached."""
        return super().gradient(u, theta) if self.linear is None else self.linear.gradient(u, theta)

    def precision(self, u: Tensor, theta: Tensor) -> Tensor:
        """Minus the Hessian in ``u``, shape ``(R, D, D)``; by the factors where no derivatives of it are wanted."""
        if len(self.B) or wants_graph(u, theta):
            return super().precision(u, theta)
        self.require_dense(u)
        return assembled(self.pattern, self.elements_of_rows(u, theta))

    def elements(self, u: Tensor, theta: Tensor) -> Elements:
        """Minus the Hessian at ``u`` ``(D,)`` in the layout of :attr:`pattern`."""
        return tuple(own[0] for own in self.elements_of_rows(u.unsqueeze(0), theta))

    def elements_of_rows(self, u: Tensor, theta: Tensor) -> Elements:
        """The same at rows ``(R, D)`` that share their hyperparameters, ``(R, F, k, k)``."""
        theta = theta[0] if theta.dim() == 2 else theta
        curvatures = [] if self.linear is None else self.linear.curvatures(u, theta)
        with torch.no_grad():
            prior = None if self.linear is None else self.linear.parts(theta).prior
            diagonal = u.new_zeros(len(u), self.size)
            if prior is not None:
                diagonal[:, : u.shape[-1]] = prior[1].detach()
            joined = [part.rows.elements(B) for part, B in zip(self.parts, curvatures, strict=True)]
            together = len(u) > 1 and any(self.varies) and not self.wide and self.joint.row_bytes is not None
            if together:
                return self.laid_out(diagonal, joined, self.factors_of_rows(u, theta.expand(len(u), -1)))
            factors = zip(*(self._factors(row, theta) for row in u), strict=True)
            return self.laid_out(diagonal, joined, [torch.stack(own) for own in factors])

    def laid_out(self, diagonal: Tensor, joined: Sequence[Tensor], factors: Sequence[Tensor]) -> Elements:
        """In the layout of the pattern, ``(R, F, k, k)``: factors of one coordinate are added to the diagonal.

        :param diagonal: ``(R, D)``.
        """
        several = []
        for family, element in zip((*self.families, *self.wide), factors, strict=True):
            if family.index.shape[-1] == 1:
                diagonal = diagonal.scatter_add(1, family.index.mT.expand(len(diagonal), -1), element.flatten(1))
            else:
                several.append(element)
        return (diagonal[..., None, None], *joined, *several)

    @property
    def is_quadratic(self) -> bool:
        """Whether the factors beside linear predictors are those of a quadratic prior."""
        return self.linear is not None and bool(self.families) and not self.wide and not any(self.varies)

    def product(self, factors: Sequence[Tensor], v: Tensor) -> Tensor:
        """Minus the second derivatives ``(R, F, k, k)`` of the families times rows ``(R, D)``."""
        seen = torch.cat([v, v @ self.B.mT], -1)  # factors see sums too
        found = torch.zeros_like(seen)
        for family, own in zip(self.families, factors, strict=True):
            found.index_add_(1, family.index.flatten(), (own @ seen[:, family.index].unsqueeze(-1)).flatten(1))
        return self.back(found)

    def expanded(self, start: Tensor, theta: Tensor) -> Gradient:
        """The log joint and its gradient at ``(1, D)``, a quadratic prior expanded about ``start``: one run for all."""
        assert self.linear is not None
        linear, prior = self.linear, self._prior_about(start, theta)

        def gradient(u: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
            (value, slope), (log_prior, rise) = linear.likelihood_gradient(u, theta), prior(u)
            return value + log_prior, slope + rise

        return gradient

    def _prior_about(self, start: Tensor, theta: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """A quadratic prior's log density and its gradient at rows ``(R, D)``, expanded about ``start`` ``(1, D)``."""
        assert self.linear is not None
        factors = [own.unsqueeze(0) for own in self._factors(start[0], theta)]
        at_start, rise = derivatives.gradient(self.linear.log_prior, start, theta)

        def prior(u: Tensor) -> tuple[Tensor, Tensor]:
            moved = self.product(factors, away := u - start)
            return at_start + ((rise - 0.5 * moved) * away).sum(-1), rise - moved

        return prior

    @property
    def takes_rows(self) -> bool:
        """Whether rows with hyperparameters of their own are differentiated together."""
        if self.wide:
            return False
        if self.linear is not None:
            return self.joint.row_bytes is not None and (self.is_quadratic or not self.families)
        return bool(self.families) and not len(self.B) and (self.terms is not None or self.joint.row_bytes is not None)

    def factors_of_rows(self, u: Tensor, theta: Tensor, forms: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
        """Minus the second derivatives of each family at rows ``(R, D)`` and hyperparameters, ``(R, F, k, k)``.

        :param forms: those in closed form, where a run has told them.
        """
        values = torch.vmap(lambda v, t: self._values(t, self.differentiated)(v))
        if forms is None and not all(self.differentiated):
            forms = torch.vmap(lambda v, t: self.closed_forms(self.joint.trace(v, t)))(u, theta)
        closed, second = iter(forms or ()), self.second_of(self.differentiated)
        made = iter(second.elements(lambda v: values(v, theta), self._seen(u)) if any(self.differentiated) else ())
        return tuple(next(made if own else closed).detach() for own in self.differentiated)

    def _run(self, u: Tensor, theta: Tensor) -> Trace:
        """A run of the model in which closed forms are read, whatever the latents."""
        return self.joint.trace(u, theta) if self.linear is None else self.linear.parts(theta).trace

    def closed_forms(self, trace: Trace) -> tuple[Tensor, ...]:
        """Second derivatives in closed form at the hyperparameters of a run, ``(F, k, k)`` for each such family."""
        return tuple(family.elements(trace.nodes) for family in self.families if family.closed)

    def _factors(self, u: Tensor, theta: Tensor) -> tuple[Tensor, ...]:
        if not (self.families or self.wide):
            return ()
        known = self._kept[0][1] if self._kept and torch.equal(self._kept[0][0], theta) else ()
        if known and not any(self.varies):
            return known
        new = self.varies[: len(self.families)] if known else self.differentiated
        closed = iter(() if known or all(self.differentiated) else self.closed_forms(self._run(u, theta)))
        made = iter(self.second_of(new).elements(self._values(theta, new), self._seen(u)) if any(new) else ())
        found = tuple(next(made) if own else known[i] if known else next(closed).detach() for i, own in enumerate(new))
        if self.wide:
            with torch.enable_grad():
                leaf = u.detach().clone().requires_grad_()
                values = cells(self.joint, leaf, theta.detach(), self.names)
                wide = [hessians_of_few(family.of(values), family.index, leaf) for family in self.wide]
            found = (*found, *wide)
        self._kept[:] = [(theta.detach().clone(), found)]
        return found

    def _seen(self, u: Tensor) -> Tensor:
        """Coordinates as factors see them, rows too: sums of many stand after the coordinates themselves."""
        return self.terms.appended(u) if self.terms is not None and len(self.B) else u

    def _values(self, theta: Tensor, chosen: Chosen) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """The factors of the chosen families as a function of the coordinates that they see."""
        size, own = self.joint.latents.size, tuple(compress(self.families, chosen))
        sums = self.linear is None or any(bool((family.index >= size).any()) for family in own)
        sites = {site for f in own for member in f.members for site in member.name.split(", ")[0].split("+")}

        def values(u: Tensor) -> tuple[Tensor, ...]:
            if self.terms is not None and sums:
                return tuple(compress(self.terms.families(u, theta), chosen))
            found = cells(self.joint, u[:size], theta, [name for name in self.names if name in sites])
            return tuple(family.of(found) for family in own)

        return values

    def slope(self, log_det_gradient: Elements, u: Tensor, theta: Tensor, solve: Solve) -> tuple[Tensor, Tensor]:
        """Derivatives of the log evidence in ``theta``, and of the log joint at the fixed mode, both ``(T,)``.

        :param log_det_gradient: ``d log |A| / d elements`` at the mode ``u``.
        :param solve: from ``(D,)`` to the solution with ``A``.
        """
        by_u, by_theta, of_linear = self.log_det_slopes(log_det_gradient, u, theta)
        theta = self._leaf(theta)
        if of_linear is None:
            u = u.detach().clone().requires_grad_()
            log_joint = self.log_joint(u.unsqueeze(0), theta).sum()
            of_linear = derivatives.pullback(log_joint, theta), derivatives.pullback(log_joint, u, create_graph=True)
        partial, rise = of_linear
        return partial - 0.5 * by_theta - derivatives.pullback(rise, theta, solve(0.5 * by_u)), partial

    def _leaf(self, theta: Tensor) -> Tensor:
        return theta.detach().clone().requires_grad_() if self.linear is None else self.linear.leaf(theta)

    def log_det_slopes(
        self, log_det_gradient: Elements, u: Tensor, theta: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """Derivatives of ``log |A|`` in ``u`` ``(D,)`` and ``theta`` ``(T,)``; last what linear predictors know beside.

        :param log_det_gradient: ``d log |A| / d elements`` at ``u``.
        """
        diagonal, several = log_det_gradient[0].reshape(-1), iter(log_det_gradient[1 + len(self.parts) :])
        weights = [  # the log_det_gradient of each family's elements
            diagonal[family.index].unsqueeze(-1) if family.index.shape[-1] == 1 else next(several)
            for family in (*self.families, *self.wide)
        ]
        u = u.detach().clone().requires_grad_()
        theta = self._leaf(theta)
        by_u, by_theta = torch.zeros_like(u), torch.zeros_like(theta)
        if self.wide:
            with torch.enable_grad():
                found = cells(self.joint, u, theta, self.names)
                for family, weight in zip(self.wide, weights[len(self.families) :], strict=True):
                    more = slopes_of_few(family.of(found), family.index, weight, u, (u, theta))
                    by_u, by_theta = by_u + more[0], by_theta + more[1]
        if not all(self.differentiated):
            with torch.enable_grad():
                closed = [weight for family, weight in zip(self.families, weights, strict=False) if family.closed]
                each = zip(closed, self.closed_forms(self._run(u.detach(), theta)), strict=True)
                total = torch.stack([(weight * element).sum() for weight, element in each]).sum()
            by_theta = by_theta + derivatives.pullback(total, theta)
        if any(self.differentiated):
            seen = self._seen(u).detach().requires_grad_()
            own = list(compress(weights, self.differentiated))
            values = self._values(theta, self.differentiated)
            more = self.second_of(self.differentiated).slopes(values, seen, own, (seen, theta))
            by_u, by_theta = by_u + self.back(more[0]), by_theta + more[1]
        by_u, by_theta = by_u.detach(), by_theta.detach()
        if self.linear is None:
            return by_u, by_theta, None
        joined = log_det_gradient[1 : 1 + len(self.parts)]
        more_by_u, more_by_theta, partial, rise = self.linear.slopes(diagonal[: len(u)], joined, u, theta)
        return by_u + more_by_u, by_theta + more_by_theta, (partial, rise)

    def back(self, seen: Tensor) -> Tensor:
        """Derivatives in the coordinates from those in what factors see, rows too."""
        own, sums = seen.split([self.joint.latents.size, len(self.B)], -1)
        return own + sums @ self.B

    def certificate(self, u: Tensor, theta: Tensor, elements: Elements) -> Tensor:
        """Relative distance of two products with the elements from those with the true Hessian, ``(D,)``.

        The vectors are random and scaled by the root of the diagonal, so that every coordinate counts alike.
        """
        diagonal = torch.zeros(self.size, dtype=torch.float64, device=self.joint.device)
        for index, element in zip(self.pattern.index, elements, strict=True):
            diagonal.index_add_(0, index.reshape(-1), element.diagonal(dim1=-2, dim2=-1).reshape(-1))
        own, of_sums = diagonal.split([self.joint.latents.size, len(self.B)])
        diagonal = own + of_sums @ self.B.square()
        scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
        v = derivatives.generic_directions(2, len(scale), scale) * scale
        u = u.detach().clone().requires_grad_()
        slope = derivatives.pullback(self.joint.log_joint(u, theta.detach()), u, create_graph=True)
        truth = -torch.stack([derivatives.pullback(slope, u, row) for row in v])
        found = self.back(pattern_product(self.pattern, elements, torch.cat([v, v @ self.B.mT], -1)))
        return ((found - truth).abs() * scale / (1.0 + truth.abs() * scale)).amax(0)
