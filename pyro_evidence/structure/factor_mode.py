"""Mode, evidence and exact slope where the curvature is a sum of small matrices: Newton with a factor of its own."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.errors import NotPositiveDefinite
from pyro_evidence.numerics import derivatives, lbfgs, newton
from pyro_evidence.numerics.derivatives import Last, pullback
from pyro_evidence.numerics.linalg import Label
from pyro_evidence.numerics.line_search import no_callback
from pyro_evidence.numerics.linear_predictor import CLOSE, slope_and_curvature
from pyro_evidence.precision.dense import Elements, Precision, Separate
from pyro_evidence.program.sites import log_prob_sum
from pyro_evidence.structure.density import AutogradDensity
from pyro_evidence.structure.factor_density import Structured
from pyro_evidence.structure.factor_linear import SparseLinear
from pyro_evidence.structure.groups import Pruned

FIRST_SHIFT = 1e-6  # of the largest diagonal entry, of one step of the search only
SOON = 15  # steps that Newton takes at most where the density is concave all the way
FALL = 0.01  # of a decrement by a step with a factor of before, which takes a third of the time or less of a new one
SHIFTS = 12  # tenfold ones that are tried where the curvature is not positive definite


@dataclass(frozen=True, eq=False)
class StructuredProblem:
    """A density by its factors, without its pruned coordinates."""

    density: Structured
    active: Tensor  # (D,) bool
    value: Structured | Pruned  # the density whose log joint counts
    label: Label

    def elements(self, u: Tensor, theta: Tensor) -> Elements:
        """Minus the Hessian at ``u`` ``(D,)`` in the active coordinates, the identity on the others."""
        elements = self.density.elements(self._held(u, theta), theta)
        return elements if bool(self.active.all()) else self._masked(elements, 1.0)

    def _held(self, u: Tensor, theta: Tensor) -> Tensor:
        return self.value.held(u, theta) if isinstance(self.value, Pruned) else u

    def _masked(self, elements: Elements, identity: float) -> Elements:
        keep = self.active.to(torch.float64)
        masked = [
            element * keep[index].unsqueeze(-1) * keep[index].unsqueeze(-2)
            for index, element in zip(self.density.pattern.index, elements, strict=True)
        ]
        masked[0] = masked[0] + identity * (1.0 - keep).reshape(-1, 1, 1)
        return tuple(masked)

    def precision(self, u: Tensor, theta: Tensor) -> Precision:
        """The posterior precision at ``u`` ``(D,)``, factorised.

        :raises NotPositiveDefinite: when it is not positive definite.
        """
        return self.density.plan.factorise(self.elements(u, theta), self.label)

    def slope(self, precision: Precision, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Derivatives of the log evidence in ``theta``, and of the log joint at the fixed mode, both ``(T,)``."""
        log_det_gradient, u = self._log_det_gradient(precision), self._held(u, theta)
        total, direct = self.density.slope(
            log_det_gradient, u, theta, lambda b: precision.solve((b * self.active).unsqueeze(0))[0]
        )
        if not isinstance(self.value, Pruned):
            return total, direct
        theta = theta.detach().clone().requires_grad_()
        left_out = derivatives.pullback(self.value.left_out(theta).sum(), theta)  # which does not count
        return total - left_out, direct - left_out

    def _log_det_gradient(self, precision: Precision) -> Elements:
        log_det_gradient = tuple(x.detach() for x in precision.log_det_gradient)
        return log_det_gradient if bool(self.active.all()) else self._masked(log_det_gradient, 0.0)

    def log_det_slope(self, precision: Precision, u: Tensor, theta: Tensor) -> Tensor:
        """Derivative of ``log |A|`` in ``u`` at ``u`` ``(D,)``, where the precision is that one."""
        return self.density.log_det_slopes(self._log_det_gradient(precision), self._held(u, theta), theta)[0]

    def is_certified(self, u: Tensor, theta: Tensor) -> bool:
        """Whether two products with the elements at ``u`` ``(D,)`` are those with the true Hessian.

        To 1e-9 relative to the root of the diagonal; where the model computes in single precision to 50 eps sqrt(D).
        """
        u = self._held(u, theta)
        gap = self.density.certificate(u, theta, self.density.elements(u, theta))
        single = self.density.joint.dtype != torch.float64
        limit = 50.0 * torch.finfo(self.density.joint.dtype).eps * len(u) ** 0.5 if single else CLOSE
        return bool((gap <= limit).all())

    def find_modes(self, u: Tensor, theta: Tensor, limits: newton.Limits, *, cold: bool) -> newton.Mode:
        """Newton from rows ``(R, D)``, one by one; after L-BFGS where the start is far, or Newton does not arrive.

        :param cold: whether the start may be far from a mode.
        """
        far = cold and self.density.linear is None
        modes = [self._mode(row, theta, limits, far) for row in u.detach()]
        tensors = [n for n, x in vars(modes[0]).items() if isinstance(x, Tensor)]
        parts: Any = {n: torch.cat([vars(mode)[n] for mode in modes]) for n in tensors}
        return replace(modes[0], **parts, found=tuple(mode.found[0] for mode in modes))

    @property
    def takes_rows(self) -> bool:
        """Whether rows with hyperparameters of their own are differentiated together."""
        return self.density.takes_rows and bool(self.active.all())

    def near_modes(self, u: Tensor, theta: Tensor, limits: newton.Limits) -> list[newton.Mode | None]:
        """Modes near rows ``(R, D)``, each at its hyperparameters ``(R, T)``, by a few Newton steps for all together.

        :return: None for rows where these do not arrive.
        """
        density, limits, rows = self.density, replace(limits, num_steps=SOON, watch=no_callback), None
        if density.linear is None:

            def elements_at(u: Tensor, rows: Tensor) -> Elements:
                return density.laid_out(u.new_zeros(len(u), density.size), (), density.factors_of_rows(u, theta[rows]))

            gradient = newton.gradient_of(density, theta)
            found = self._search(gradient, elements_at, u.detach(), limits, shifted=False)
        else:
            own = newton.gradient_of(AutogradDensity(density.joint, None), theta)
            try:
                rows = PredictorRows(density, u.detach(), theta)
                found = self._search(rows.gradient, rows.elements, u.detach(), limits, shifted=False, own=own)
            except (ArithmeticError, RuntimeError, ValueError):  # of one bad row; each is searched by itself then
                return [None] * len(u)
        again = [None if rows is None else partial(self._again, rows, i, found.u[i : i + 1]) for i in range(len(u))]
        pairs = enumerate(found.converged.tolist())
        return [replace(found.row(i), make=again[i]) if arrived else None for i, arrived in pairs]

    @torch.enable_grad()  # whoever asks for draws may have switched it off
    def _again(self, rows: "PredictorRows", row: int, u: Tensor) -> Precision:
        elements = rows.elements(u, torch.tensor([row]))
        return self.density.plan.factorise(tuple(own[0] for own in elements), self.label)

    def _mode(self, u: Tensor, theta: Tensor, limits: newton.Limits, far: bool) -> newton.Mode:
        """The mode that one start ``(D,)`` leads to."""
        slope = partial(self.value.gradient, theta=theta)
        if far:  # Newton at once where the density is concave all the way, and that is not far
            mode = self._climb(u, theta, replace(limits, num_steps=min(SOON, limits.num_steps)), shifted=False)
            if bool(mode.converged):
                return mode
            u = lbfgs.from_far(slope, u.unsqueeze(0), limits.slack, limits.watch)[0]
        mode = self._climb(u, theta, limits)
        if not bool(mode.converged):
            u = lbfgs.onwards(slope, mode.u, limits.tolerance, limits.slack, limits.watch)[0]
            mode = self._climb(u, theta, limits)
        return mode

    def _climb(self, u: Tensor, theta: Tensor, limits: newton.Limits, *, shifted: bool = True) -> newton.Mode:
        """Newton from one start ``(D,)``; the curvature of a point is made of what its gradient has computed.

        Where the prior is quadratic it is expanded about the start, as far as that goes.
        """

        def elements_at(u: Tensor, _: Tensor) -> Elements:
            return tuple(own.unsqueeze(0) for own in self.elements(u[0], theta))

        u = u.unsqueeze(0)
        own = newton.gradient_of(self.value, theta)
        if self.density.is_quadratic and bool(self.active.all()):
            expanded = self.density.expanded(u, theta)
            mode = self._search(expanded, elements_at, u, limits, shifted=shifted, own=own)
            if bool(mode.converged):
                return mode
            u = mode.u
        return self._search(own, elements_at, u, limits, shifted=shifted)

    def _search(
        self,
        gradient: newton.Gradient,
        elements_at: Callable[[Tensor, Tensor], Elements],
        u: Tensor,
        limits: newton.Limits,
        *,
        shifted: bool,
        own: newton.Gradient | None = None,
    ) -> newton.Mode:
        """Newton from rows ``(R, D)``, a factor for each.

        :param elements_at: minus the Hessians at points of some rows.
        :param shifted: whether a curvature that is not positive definite is, for a step, shifted; else its row is
            given up.
        :param own: the model's own, which decides where ``gradient`` is of an expansion: that loses digits far away.
        """
        found: dict[int, Precision | NotPositiveDefinite] = {}
        last: list[tuple[list[int], Elements, Precision]] = []  # of the factors that were made together

        def factors_of(names: list[int], every: Elements) -> Precision:
            """The factors of some rows; those of before where the curvature is the same, as that of Gaussian data."""
            if last and last[0][0] == names and all(map(torch.equal, last[0][1], every)):
                return last[0][2]
            whole = self.density.plan.factorise_rows(every, self.label)
            last[:] = [(names, every, whole)]
            found.update((name, whole.row(i)) for i, name in enumerate(names))
            return whole

        def direction(u: Tensor, rows: Tensor, slope: Tensor) -> newton.Direction:
            names, every, nothing = rows.tolist(), elements_at(u, rows), torch.zeros_like(slope)
            try:
                step, definite = factors_of(names, every).solve(slope), torch.ones_like(rows, dtype=torch.bool)
            except NotPositiveDefinite:  # some row is not: each by itself
                step, definite = nothing.clone(), torch.zeros_like(rows, dtype=torch.bool)
                for i, (name, elements) in enumerate(zip(names, zip(*every, strict=True), strict=True)):
                    try:
                        found[name] = usable = self.density.plan.factorise(elements, self.label)
                        definite[i] = True
                    except NotPositiveDefinite as error:
                        found[name] = error
                        if not shifted:
                            continue
                        usable = self._shifted(elements, error)
                    step[i] = usable.solve(slope[i : i + 1])[0]
            return newton.Direction(u[:, :0], step, (slope * step).sum(-1), definite, nothing)

        def move(gradient: newton.Gradient, mode: newton.Mode, rows: Tensor, limits: newton.Limits) -> Tensor:
            """Newton's step, and further ones with its factor as long as each leaves little (Shamanskii, 1967)."""
            rows = moved = newton.backtrack(gradient, mode, rows, limits)
            names, before = last[0][0] if last else [], mode.decrement[rows]
            place = torch.tensor([names.index(row) if row in names else -1 for row in rows.tolist()])
            while len(rows) and bool((place >= 0).all()):
                if len(rows) == 1:
                    step = last[0][2].row(int(place)).solve(mode.gradient[rows])
                else:
                    slopes = mode.gradient.new_zeros(len(names), u.shape[-1]).index_copy(0, place, mode.gradient[rows])
                    step = last[0][2].solve(slopes)[place]
                decrement = (mode.gradient[rows] * step).sum(-1)
                far = ~limits.is_small(decrement, before, mode.log_joint[rows]) & (decrement <= FALL * before)
                rows, place, step, before = rows[far], place[far], step[far], decrement[far]
                new = mode.u[rows] + step
                value, slope = gradient(new, rows) if len(rows) else (before, step)
                held = value >= mode.log_joint[rows] - limits.slack * (1.0 + mode.log_joint[rows].abs())
                rows, place, before = rows[held], place[held], before[held]
                mode.u[rows], mode.log_joint[rows], mode.gradient[rows] = new[held], value[held], slope[held]
            return moved

        mode = newton.search(gradient, direction, u, limits, move)
        mode, every = replace(mode, found=tuple(found[row] for row in range(len(u)))), list(range(len(u)))
        if own is None or torch.equal(mode.u, u) or not bool(mode.converged.any()):
            return mode
        value, slope = own(mode.u, torch.arange(len(u)))
        good, together = mode.definite, bool(mode.definite.all()) and last[0][0] == every
        apart = tuple(each for each in mode.found if not isinstance(each, NotPositiveDefinite))
        factors = last[0][2] if together else Separate(apart)
        decrement = torch.full_like(value, torch.inf)
        decrement[good] = (slope[good] * factors.solve(slope[good])).sum(-1)
        rests = mode.converged & limits.is_resting(decrement, value)
        return replace(mode, log_joint=value, gradient=slope, decrement=decrement, converged=rests)

    def _shifted(self, elements: Elements, error: NotPositiveDefinite) -> Precision:
        """A factor for one step, with as much on the diagonal as that takes, and ten times more."""
        size = max(float(e.diagonal(dim1=-2, dim2=-1).abs().max()) for e in elements if e.numel())
        for power in range(SHIFTS):
            shift = FIRST_SHIFT * 10.0**power * size
            try:
                self.density.plan.factorise((elements[0] + shift, *elements[1:]), self.label)
            except NotPositiveDefinite:
                continue
            return self.density.plan.factorise((elements[0] + 10.0 * shift, *elements[1:]), self.label)
        raise error


Slopes = tuple[Tensor, Tensor, Callable[[], Tensor]]  # log likelihoods (r,), their slopes and curvatures in predictors


@dataclass(frozen=True, eq=False)
class PredictorRows:
    """A density of linear predictors whose prior is quadratic in the latents; the model is run where the rows start.

    :ivar start: ``(R, D)``.
    :ivar theta: ``(R, T)``.
    """

    density: Structured
    start: Tensor
    theta: Tensor
    _last: Last[Tensor, list[Slopes]] = field(default_factory=Last, repr=False, compare=False)

    @cached_property
    def _read(self) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
        """At the starts: all but the predictors' likelihoods, its gradient, the prior's own diagonal, and predictors.

        The diagonal is that of independent latents, which have no families; else zero.  Last closed forms of families.
        """
        joint, linear = self.density.joint, self.density.linear
        assert linear is not None

        def one(u: Tensor, theta: Tensor) -> tuple[Tensor, ...]:
            trace = joint.trace(u, theta)
            log_det = joint.latents.constrained_with_log_det(u.to(joint.dtype))[1]
            value = (log_prob_sum(trace, (*joint.latents.names, *linear.free)) + log_det).double()
            etas = (part.likelihood.blocks(trace).double() for part in self.density.parts)
            return value, *etas, *self.density.closed_forms(trace)

        with torch.enable_grad():
            u = self.start.detach().requires_grad_()
            value, *others = torch.vmap(one)(u, self.theta)
            slope = pullback(value.sum(), u, create_graph=True)
            alone = torch.zeros_like(u) if self.density.families else -pullback(slope.sum(), u)
        found, num = [each.detach() for each in others], len(self.density.parts)
        return value.detach(), slope.detach(), alone.detach(), found[:num], found[num:]

    @cached_property
    def _factors(self) -> tuple[Tensor, ...]:
        """The precision of each factor of the prior, ``(R, F, k, k)`` for each family."""
        return self.density.factors_of_rows(self.start, self.theta, self._read[4])

    def _slopes(self, rows: Tensor, u: Tensor) -> list[Slopes]:
        away, joint, found, run = u - self.start[rows], self.density.joint, [], self.density.fixed_run
        for part, eta in zip(self.density.parts, self._read[3], strict=True):
            here = (eta[rows] + part.rows.product(away)).to(joint.dtype)
            if run is not None:
                found.append(part.derivatives(run, here))
            else:
                found.append(
                    slope_and_curvature(partial(self._log_likelihood, part, rows), part.likelihood.layout, here)
                )
        return found

    def _log_likelihood(self, part: SparseLinear, rows: Tensor, eta: Tensor) -> Tensor:
        """Log likelihood of predictors ``(r,) + shape``, each at its row's hyperparameters, ``(r,)``."""
        origin = self.start[0].detach()

        def one(own: Tensor, theta: Tensor) -> Tensor:
            return part.likelihood.log_likelihood(self.density.joint.trace(origin, theta))(own.unsqueeze(0))[0]

        return torch.vmap(one)(eta, self.theta[rows])

    def gradient(self, u: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint and its gradient at points ``(r, D)`` of some rows, detached."""
        value, slope, away = self._read[0][rows], self._read[1][rows], u.detach() - self.start[rows]
        factors = [own if len(rows) == len(own) else own[rows] for own in self._factors]
        moved = self._read[2][rows] * away + self.density.product(factors, away)  # the prior's precision times away
        value, slope = value + ((slope - 0.5 * moved) * away).sum(-1), slope - moved
        likelihoods = self._last.found(u.clone(), torch.equal, partial(self._slopes, rows))
        for part, (found, by_eta, _) in zip(self.density.parts, likelihoods, strict=True):
            value, slope = value + found.double(), slope + part.back(by_eta)
        return value, slope

    def elements(self, u: Tensor, rows: Tensor) -> Elements:
        """Minus the Hessians at points ``(r, D)`` of some rows."""
        likelihoods = self._last.found(u.clone(), torch.equal, partial(self._slopes, rows))
        blocks = [block().double() for *_, block in likelihoods]
        self._last.pair = None  # its graph is used up
        alone = torch.nn.functional.pad(self._read[2][rows], (0, len(self.density.B)))
        joined = [part.rows.elements(B) for part, B in zip(self.density.parts, blocks, strict=True)]
        return self.density.laid_out(alone, joined, [own[rows] for own in self._factors])
