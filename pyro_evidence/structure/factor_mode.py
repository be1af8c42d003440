"""Mode, evidence and exact slope where the curvature is a sum of small matrices: Newton with a factor of its own."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_evidence.errors import NotPositiveDefinite
from pyro_evidence.numerics import derivatives, newton
from pyro_evidence.numerics.batched import Batched
from pyro_evidence.numerics.lbfgs import ascend
from pyro_evidence.numerics.linalg import Label
from pyro_evidence.numerics.line_search import Backtracking, Line, along_step, first_accepted, no_fall
from pyro_evidence.precision.dense import Precision
from pyro_evidence.precision.plan import Elements, StructuredPrecision
from pyro_evidence.structure.factor_density import Point, Structured
from pyro_evidence.structure.pruned import Pruned

CLOSE = 1e-9  # relative: rounding of two orders of summation, not a coupling
FIRST_SHIFT = 1e-6  # of the largest diagonal entry, of one step of the search only
SOON = 15  # steps that Newton takes at most where the density is concave all the way
TOGETHER = Backtracking(rule=no_fall, num_trials=8)  # of a row among others
SHIFTS = 12  # tenfold ones that are tried where the curvature is not positive definite


@dataclass(frozen=True)
class StructuredMode(newton.Mode):
    """Modes with a factorised precision each, or with what was wrong with it."""

    found: tuple[StructuredPrecision | NotPositiveDefinite, ...] = ()

    def factorised(self, row: int, label: Label) -> StructuredPrecision:
        """The precision of one row.

        :raises NotPositiveDefinite: when it is not positive definite.
        """
        found = self.found[row]
        if isinstance(found, NotPositiveDefinite):
            raise found
        return found


@dataclass(frozen=True)
class StructuredProblem:
    """A density by its factors, without its pruned coordinates."""

    density: Structured
    active: Tensor  # (D,) bool
    value: Structured | Pruned  # the density whose log joint counts
    label: Label

    def point(self, u: Tensor, theta: Tensor) -> Point:
        """Value, gradient and curvature at ``u`` ``(D,)``, pruned coordinates held."""
        found = self.density.point(self._held(u), theta)
        if bool(self.active.all()):
            return found
        assert isinstance(self.value, Pruned)
        return replace(
            found, log_joint=found.log_joint - self.value.left_out(theta), gradient=found.gradient * self.active
        )

    def elements(self, point: Point) -> Elements:
        """Minus the Hessian in the active coordinates, the identity on the others."""
        elements = point.elements()
        return elements if bool(self.active.all()) else self._masked(elements, 1.0)

    def _held(self, u: Tensor) -> Tensor:
        return self.value._held(u) if isinstance(self.value, Pruned) else u

    def _masked(self, elements: Elements, identity: float) -> Elements:
        keep = self.active.to(torch.float64)
        masked = [
            element * keep[index].unsqueeze(-1) * keep[index].unsqueeze(-2)
            for index, element in zip(self.density.pattern.index, elements, strict=True)
        ]
        masked[0] = masked[0] + identity * (1.0 - keep).reshape(-1, 1, 1)
        return tuple(masked)

    def precision(self, u: Tensor, theta: Tensor) -> StructuredPrecision:
        """The posterior precision at ``u`` ``(D,)``, factorised.

        :raises NotPositiveDefinite: when it is not positive definite.
        """
        return self.density.plan.factorise(self.elements(self.point(u, theta)), self.label)

    def slope(self, precision: Precision, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Derivatives of the log evidence in ``theta``, and of the log joint at the fixed mode, both ``(T,)``."""
        adjoint = tuple(x.detach() for x in precision.adjoint)
        adjoint = adjoint if bool(self.active.all()) else self._masked(adjoint, 0.0)
        u = self._held(u)
        total, partial = self.density.slope(
            adjoint, u, theta, lambda b: precision.solve((b * self.active).unsqueeze(0))[0]
        )
        left_out = self._left_out_slope(theta)
        return total - left_out, partial - left_out

    def _left_out_slope(self, theta: Tensor) -> Tensor:
        """Derivatives of the prior density of the pruned coordinates, which does not count."""
        if not isinstance(self.value, Pruned):
            return torch.zeros_like(theta)
        theta = theta.detach().clone().requires_grad_()
        return derivatives.pullback(self.value.left_out(theta).sum(), theta)

    def is_certified(self, u: Tensor, theta: Tensor) -> bool:
        """Whether two products with the elements at ``u`` ``(D,)`` are those with the true Hessian.

        To 1e-9 relative to the root of the diagonal; where the model computes in single precision to 50 eps sqrt(D).
        """
        u = self._held(u)
        gap = self.density.certificate(u, theta, self.density.elements(u, theta))
        single = self.density.joint.dtype != torch.float64
        limit = 50.0 * torch.finfo(self.density.joint.dtype).eps * len(u) ** 0.5 if single else CLOSE
        return bool((gap <= limit).all())

    def find_modes(self, u: Tensor, theta: Tensor, limits: newton.Limits, *, cold: bool) -> StructuredMode:
        """Newton from rows ``(R, D)``, one by one; after L-BFGS where the start is far, or Newton does not arrive.

        :param cold: whether the start may be far from a mode.
        """
        far = cold and self.density.linear is None
        rows = [self._mode(row, theta, limits, far) for row in u.detach()]
        return _together([row for row, _ in rows], tuple(found for _, found in rows))

    def near_modes(self, u: Tensor, theta: Tensor, limits: newton.Limits) -> list[StructuredMode | None]:
        """Modes near rows ``(R, D)``, each at its hyperparameters ``(R, T)``, by a few Newton steps for all together.

        :return: None for rows where these do not arrive, and for all where rows are not differentiated together.
        """
        if not self.density.takes_rows or not bool(self.active.all()):
            return [None] * len(u)
        rows = Rows(self, u, theta, limits)
        for _ in range(SOON):
            if not len(rows.going):
                break
            rows.step()
        return rows.found

    def _mode(
        self, u: Tensor, theta: Tensor, limits: newton.Limits, far: bool
    ) -> tuple["FactorPoint", StructuredPrecision | NotPositiveDefinite]:
        if far:
            arrived = self._straight(u, theta, limits)
            if arrived is not None:
                return arrived
            u = self._nearer(u, theta, 1e-3 * (1.0 + len(u) ** 0.5), 300, limits)
        place, found = self._climb(self._place(u, theta), theta, limits)
        if not place.converged:
            near = self._nearer(place.u, theta, limits.tolerance**0.5, 1000, limits)
            place, found = self._climb(self._place(near, theta), theta, limits)
        return place, found

    def _straight(
        self, u: Tensor, theta: Tensor, limits: newton.Limits
    ) -> tuple["FactorPoint", StructuredPrecision | NotPositiveDefinite] | None:
        """Newton at once where the start is on a rounded summit; None where it is not, or that takes many steps."""
        place = self._place(u, theta)
        try:
            self.density.plan.factorise(self.elements(place.point), self.label)
        except NotPositiveDefinite:
            return None
        place, found = self._climb(place, theta, replace(limits, num_steps=min(SOON, limits.num_steps)))
        return (place, found) if place.converged else None

    def _nearer(self, u: Tensor, theta: Tensor, tolerance: float, num_steps: int, limits: newton.Limits) -> Tensor:
        """Where L-BFGS arrives, ``(D,)``."""
        value = self.value
        rows = u.unsqueeze(0)
        return ascend(
            lambda v: value.gradient(v, theta), rows, tolerance=tolerance, num_steps=num_steps, watch=limits.watch
        )[0]

    def _place(self, u: Tensor, theta: Tensor, before: Tensor | None = None) -> "FactorPoint":
        point = self.point(u, theta)
        before = torch.full_like(point.log_joint, torch.inf) if before is None else before
        return FactorPoint(u, point, before, torch.zeros_like(u), False, False)

    def _climb(
        self, place: "FactorPoint", theta: Tensor, limits: newton.Limits
    ) -> tuple["FactorPoint", StructuredPrecision | NotPositiveDefinite]:
        found: StructuredPrecision | NotPositiveDefinite
        for _ in range(limits.num_steps):
            found, usable = self._factorised(place.point)
            definite = not isinstance(found, NotPositiveDefinite)
            place = place.measured(usable.solve(place.gradient.unsqueeze(0))[0], definite, limits)
            if place.converged:
                break
            new = self._moved(place, theta, limits)
            limits.watch(new.log_joint.reshape(1))
            if new is place:
                resting = float(place.decrement) <= limits.tolerance * (1.0 + abs(float(place.log_joint)))
                return place.with_stop_reason(definite and resting), found
            place = new
        return place, found

    def _factorised(self, point: Point) -> tuple[StructuredPrecision | NotPositiveDefinite, StructuredPrecision]:
        """The precision or the error message about it, and one that can be used for a step, shifted if need be."""
        elements = self.elements(point)
        try:
            found = self.density.plan.factorise(elements, self.label)
            return found, found
        except NotPositiveDefinite as error:
            return error, self._shifted(elements, error)

    def _shifted(self, elements: Elements, error: NotPositiveDefinite) -> StructuredPrecision:
        size = max(float(e.diagonal(dim1=-2, dim2=-1).abs().max()) for e in elements if e.numel())
        for power in range(SHIFTS):
            shift = FIRST_SHIFT * 10.0**power * size
            try:
                self.density.plan.factorise((elements[0] + shift, *elements[1:]), self.label)
            except NotPositiveDefinite:
                continue
            return self.density.plan.factorise((elements[0] + 10.0 * shift, *elements[1:]), self.label)
        raise error

    def _moved(self, place: "FactorPoint", theta: Tensor, limits: newton.Limits) -> "FactorPoint":
        """The first of ever shorter steps that does not lower the log joint beyond rounding; the same where none."""

        def trial(scale: float) -> tuple[float, FactorPoint]:
            new = self._place(place.u + scale * place.step, theta, place.decrement)
            return float(new.log_joint), new

        height = float(place.log_joint)
        new = first_accepted(trial, height, float(place.decrement), limits.slack * (1.0 + abs(height)))
        return place if new is None or torch.equal(new.u, place.u) else new


@dataclass(frozen=True)
class Height(Batched):
    """Points and their log joint."""

    u: Tensor  # (R, D)
    objective: Tensor  # (R,) nats


class Rows:
    """Searches side by side, whose derivatives are taken together; each has a factor of its own.

    :ivar going: the rows that are still on their way.
    :ivar found: the modes of those that have arrived.
    """

    def __init__(self, problem: StructuredProblem, u: Tensor, theta: Tensor, limits: newton.Limits) -> None:
        self.problem: StructuredProblem = problem
        self.density: Structured = problem.density
        self.limits: newton.Limits = limits
        self.u: Tensor = u.detach().clone()
        self.theta: Tensor = theta
        self.going: Tensor = torch.arange(len(u), device=u.device)
        self.decrement: Tensor = torch.full_like(u[:, 0], torch.inf)
        self.found: list[StructuredMode | None] = [None] * len(u)

    def step(self) -> None:
        """One Newton step of all that go on; those that cannot are left out."""
        u, theta = self.u[self.going], self.theta[self.going]
        value, slope = self.density.gradient(u, theta)
        elements, steps = self.density.elements_of_rows(u, theta), torch.full_like(u, torch.nan)
        for i, row in enumerate(self.going.tolist()):
            point = Point(self.density, u[i], theta[i], value[i], slope[i], list)
            place = FactorPoint(u[i], point, self.decrement[row], u[i], False, False)
            steps[i] = self._measured(row, place, elements[i])
        self._move(u, theta, value, steps)

    def _measured(self, row: int, place: "FactorPoint", elements: Elements) -> Tensor:
        """The Newton step; nan where the row has arrived, or has no curvature to take one by."""
        nothing = torch.full_like(place.u, torch.nan)
        try:
            precision = self.density.plan.factorise(elements, self.problem.label)
        except NotPositiveDefinite:
            return nothing
        place = place.measured(precision.solve(place.gradient.unsqueeze(0))[0], True, self.limits)
        self.decrement[row] = place.decrement
        if place.converged:
            self.found[row] = _together([place], (precision,))
        return nothing if place.converged else place.step

    def _move(self, u: Tensor, theta: Tensor, value: Tensor, steps: Tensor) -> None:
        """Steps as long as they do not lower the log joint beyond rounding; rows without one are left out."""

        def trial(rows: Tensor, scale: Tensor) -> Height:
            moved = along_step(u[rows], scale, steps[rows])
            return Height(moved, self.density.log_joint(moved, theta[rows]).detach())

        rising = steps.isfinite().all(-1).nonzero().squeeze(-1)
        line = Line(torch.zeros_like(value), self.limits.slack * (1.0 + value.abs()))
        found, without = TOGETHER(Height(u, value), rising, line, trial)
        rising = rising[~torch.isin(rising, without)]
        self.going = self.going[rising]
        self.u[self.going] = found.u[rising]


@dataclass(frozen=True)
class FactorPoint:
    """One point of the search."""

    u: Tensor  # (D,)
    point: Point
    decrement: Tensor  # () as measured here, or at the place before
    step: Tensor  # (D,)
    definite: bool
    converged: bool

    @property
    def log_joint(self) -> Tensor:
        """Log joint density here, nats, ``()``."""
        return self.point.log_joint

    @property
    def gradient(self) -> Tensor:
        """Its gradient in the coordinates, ``(D,)``."""
        return self.point.gradient

    def measured(self, step: Tensor, definite: bool, limits: newton.Limits) -> "FactorPoint":
        """With the Newton step and what it promises; at a mode when that is nothing."""
        decrement = self.gradient @ step
        enough = limits.tolerance if decrement > 0.1 * self.decrement else limits.tolerance**1.4
        converged = definite and bool(decrement <= enough)
        return FactorPoint(self.u, self.point, decrement, step, definite, converged)

    def with_stop_reason(self, converged: bool) -> "FactorPoint":
        """The same, at a mode or not."""
        return FactorPoint(self.u, self.point, self.decrement, self.step, self.definite, converged)


def _together(rows: list[FactorPoint], found: tuple[StructuredPrecision | NotPositiveDefinite, ...]) -> StructuredMode:
    def stacked(name: str) -> Tensor:
        return torch.stack([torch.as_tensor(getattr(row, name)) for row in rows])

    u = stacked("u")
    converged = stacked("converged").to(u.device)
    return StructuredMode(
        u, stacked("log_joint"), stacked("gradient"), torch.empty(0), stacked("decrement"), converged,
        stacked("definite").to(u.device), stacked("step"), torch.zeros_like(u), torch.zeros_like(converged), found,
    )  # fmt: skip
