"""The log joint in which some latent sites stand outside, and Laplace inside at many values of these."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.laplace.approximation import (
    LaplaceState,
    Problem,
    laplace_batch,
    laplace_problem,
    log_priors,
    near_states,
    reached,
)
from pyro_evidence.laplace.restarts import MOST_COORDINATES, has_one_mode
from pyro_evidence.nested.skewness import Profiles
from pyro_evidence.numerics import batched
from pyro_evidence.precision.choices import Curvature, exact_hessian, gauss_newton
from pyro_evidence.precision.dense import FLOAT, Dense, Diagonal, Precision, Remade, Separate, precision_tril
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.program.parameters import Declaration
from pyro_evidence.structure.density import AutogradDensity
from pyro_evidence.structure.factor_density import Structured
from pyro_evidence.structure.factors import SMALL
from pyro_evidence.structure.groups import Pruned

MOST_BYTES = 2**29  # that reverse passes for the shapes of inner marginals may write: half a second, a summary has one
FEW = 16  # coordinates up to which dense rows together are as fast as by factors
FEW_VALUES = 32  # of a process: a search at each node takes half as long again for 25, a quarter of the time for 60
MOST_TOGETHER = 64  # rows whose factors are made together: overhead is then small beside what each row costs
MOST_ROWS = 400  # Hessians for them, where rows are evaluated one by one


class MarginalisedJoint(LogJoint):
    """``log p(D, inner | marginalised, hyperparameters)``; ``theta`` holds marginalised and maximised sites and params.

    The prior of the marginalised sites is that of their unconstrained coordinates, Jacobian included, so that
    Laplace's log evidence plus :meth:`log_hyperprior` is a density over these coordinates, to be integrated.

    :param marginalise: names of the sites to integrate outside.
    :param maximise, values: as for :class:`LogJoint`.
    """

    def __init__(
        self,
        model: Model,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        marginalise: Sequence[str],
        maximise: Sequence[str] | None = None,
        values: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.marginalised_sites: tuple[str, ...] = tuple(sorted(marginalise))
        self._fixed = maximise is not None and not len(maximise)
        super().__init__(model, args, kwargs, maximise=[*(maximise or ()), *marginalise], values=values)

    def _hold(self, declared: Mapping[str, Declaration], everything: bool) -> dict[str, Declaration]:
        return super()._hold(declared, everything=self._fixed)

    @property
    def is_marginalised(self) -> Tensor:
        """Which coordinates of ``theta`` are those of marginalised sites, ``(T,)`` bool."""
        found = torch.zeros(self.hypers.size, dtype=torch.bool, device=self.device)
        for name in self.marginalised_sites:
            found[self.hypers.slices[name]] = True
        return found

    def log_hyperprior(self, theta: Tensor, trace: Any = None) -> Tensor:
        """Log prior of maximised sites, and of unconstrained coordinates of marginalised ones, nats, ``()``."""
        total = super().log_hyperprior(theta, trace)
        parts = self.hypers.unconstrained(theta.to(self.dtype))
        for part in self.hypers:
            if part.name in self.marginalised_sites:
                before = parts[part.name]
                log_slope = part.transform.log_abs_det_jacobian(before, part.transform(before))
                total = total + log_slope.sum().double()
        return total


def marginalised_problem(joint: MarginalisedJoint, curvature: Curvature | None) -> Problem:
    """The inner problem; marginalised coordinates are no precisions to be re-estimated or pruned."""
    found, marginalise, size = laplace_problem(joint, curvature, FEW), joint.is_marginalised, joint.latents.size
    if size <= MOST_COORDINATES and found.factors and not has_one_mode(found, joint.initial_u, joint.initial_theta):
        found = laplace_problem(joint, curvature)  # others are looked for
    groups = found.structure.groups
    if groups is not None:
        power = torch.where(marginalise, 0.0, groups.power)
        gone = torch.cat([marginalise, marginalise.new_zeros(1)])  # -1, the last, stands for none
        member = torch.where(gone[groups.member], -1, groups.member)
        noise = {n: torch.where(gone[owner], -1, owner) for n, owner in groups.noise.items()}
        left = bool((power != 0).any())
        groups = replace(groups, power=power, member=member, noise=noise) if left else None
    return replace(found, structure=replace(found.structure, groups=groups))


@dataclass(frozen=True, eq=False)
class ConditionalModes:
    """Inner modes at several marginalised values.

    :ivar precision: of the inner sites at each; the identity where no mode was found.
    :ivar log_density: log evidence of the inner part plus the log prior of the marginalised ones, nats, ``(R,)``; minus
        infinity where no mode was found.
    """

    theta: Tensor  # (R, T)
    u: Tensor  # (R, D)
    precision: Precision
    log_density: Tensor  # (R,)

    @property
    def num_failures(self) -> int:
        """Rows without a mode."""
        return int((self.log_density == -torch.inf).sum())


def solve_inner(
    problem: Problem,
    theta: Tensor,
    start: Tensor,
    *,
    searches: Tensor | int = 2,
    held: int | None = None,
    rough: bool = False,
) -> ConditionalModes:
    """The inner mode and its curvature at each row of ``theta`` ``(R, T)``, searched from ``start`` ``(R, D)``.

    :param searches: for a row where those for all together find no mode, of all rows or each, ``(R,)``: the first by
        itself, a second from further away.
    :param held: sparse factors, of as many other rows, beside which these have no room are let go, and made again when
        they are asked for; None where all stay.
    :param rough: whether a thousandth of a nat is enough, where searches are dear.
    """
    if not len(theta):
        nothing = theta.new_zeros(0)
        return ConditionalModes(theta, start, Dense(theta.new_zeros(0, start.shape[-1], start.shape[-1])), nothing)
    with torch.enable_grad():  # whoever asks for draws may have switched it off
        again, prior = torch.as_tensor(searches).expand(len(theta)).tolist(), log_priors(problem, theta.detach())
        search = _together if is_batched(problem) else partial(_one_by_one, prior=prior, held=held, rough=rough)
        u, precision, log_evidence = search(problem, theta.detach(), start.detach(), again)
    return ConditionalModes(theta, u, precision, log_evidence + prior.to(log_evidence))


def is_batched(problem: Problem) -> bool:
    """Whether rows with marginalised values of their own are evaluated together."""
    linear, size = problem.structure.linear, problem.joint.latents.size
    small = size <= (SMALL if problem.latent is None else FEW_VALUES) and (linear is None or linear.is_light)
    dense = problem.is_dense and problem.curvature in (exact_hessian, gauss_newton)
    return small and dense and problem.joint.row_bytes is not None


def _together(problem: Problem, theta: Tensor, start: Tensor, again: list[int]) -> tuple[Tensor, Precision, Tensor]:
    size = max(1, batched.BATCH_NUMBERS // start.shape[-1] ** 2)
    parts, exact = [], _in_double(problem)
    for t, s in zip(theta.split(size), start.split(size), strict=True):
        parts.append(laplace_batch(exact, t, problem.active.expand(len(t), -1), s))
    u, tril = torch.cat([p.u for p in parts]), torch.cat([p.tril for p in parts])
    log_evidence = torch.cat([p.objective for p in parts])
    for row in torch.nonzero(log_evidence == -torch.inf).flatten().tolist():
        state = _state(problem, theta[row], start[row], 2) if again[row] > 1 else None
        if state is not None:
            u[row], log_evidence[row] = state.u, state.log_evidence
            tril[row] = precision_tril(state.precision, len(state.u))
    return u, Dense(tril), log_evidence


def _in_double(problem: Problem) -> Problem:
    """The problem in double precision: in single, scales far from their mode leave little of a log determinant."""
    structure = problem.structure
    if problem.curvature is not exact_hessian or structure.network is not None or structure.density.terms is not None:
        return problem
    joint = problem.joint.in_double
    if joint is problem.joint:
        return problem
    return replace(problem, joint=joint, structure=replace(structure, known=None, density=AutogradDensity(joint, None)))


def _one_by_one(
    problem: Problem, theta: Tensor, start: Tensor, again: list[int], *, prior: Tensor, held: int | None, rough: bool
) -> tuple[Tensor, Precision, Tensor]:
    u, values, missing = start.clone(), [-torch.inf] * len(start), Diagonal(torch.ones_like(start[:1]))
    members, factors = list[Precision]([missing]) * len(start), problem.factors if problem.nodes == 1 else None
    each = 1 if factors is None else factors.density.plan.num_bytes  # for each of the rows that are searched together
    light = held is not None and each * (held + len(start)) > FLOAT * batched.HELD_NUMBERS
    room = MOST_TOGETHER if factors is not None else len(start)  # blocks know themselves how many have room
    for rows in torch.arange(len(start)).split(max(1, min(room, FLOAT * batched.BATCH_NUMBERS // each))):
        together = near_states(problem, theta[rows], start[rows], prior[rows], light=light, rough=rough)
        for row, near in zip(rows.tolist(), together or [None] * len(rows), strict=True):
            state = near or _state(problem, theta[row], start[row], again[row] if together else max(1, again[row]))
            if state is not None:
                u[row], values[row], members[row] = state.u, float(state.log_evidence), state.precision
                if light and factors is not None and not isinstance(state.precision, Remade):
                    again_at = partial(factors.precision, state.u, theta[row])
                    members[row] = Remade(again_at, state.precision.log_det)
    return u, Separate(tuple(members)), torch.tensor(values, dtype=torch.float64, device=theta.device)


def _state(problem: Problem, theta: Tensor, start: Tensor, searches: int) -> LaplaceState | None:
    found = (reached(problem, theta, start, cold=cold, exact=False) for cold in (False, True)[:searches])
    return next((state for state in found if state is not None), None)


def is_affordable(problem: Problem, num_hessians: int) -> bool:
    """Whether so many Hessians are worth the shapes of the inner densities."""
    size, row_bytes = problem.joint.latents.size, problem.joint.row_bytes
    if size > SMALL or problem.curvature not in (exact_hessian, gauss_newton) or not bool(problem.active.all()):
        return False
    return num_hessians <= MOST_ROWS if row_bytes is None else num_hessians * size * row_bytes <= MOST_BYTES


def profile_at(state: LaplaceState) -> Profiles | None:
    """The shape of the density of all latents about their mode; None where it is not affordable, or no exact Hessian.

    :raises NotPositiveDefinite: where the density has no curvature nearby.
    """
    problem, size = state.problem, len(state.u)
    if size > MOST_COORDINATES or problem.curvature is not exact_hessian or not is_affordable(problem, 2 * size):
        return None
    theta, u = state.theta.unsqueeze(0), state.u.unsqueeze(0)
    return profiles(problem, ConditionalModes(theta, u, state.precision, state.log_evidence.reshape(1)))


def profiles(problem: Problem, inner: ConditionalModes) -> Profiles | None:
    """The inner modes as the shapes of inner densities want them; None where one was not found."""
    if inner.num_failures:
        return None
    num, size = inner.u.shape
    rows = torch.cat([inner.theta, problem.active.expand(num, -1).to(inner.theta)], -1)
    unwhiten = [inner.precision.unwhiten(white.expand(num, -1)) for white in torch.eye(size).to(inner.u)]
    fastest = problem.structure.fastest
    near = replace(fastest, about=inner.u[:1]) if isinstance(fastest, Structured) else fastest
    shared = Pruned(near, problem.structure.groups)
    return Profiles(problem.density_by_rows, shared, rows, inner.u, torch.stack(unwhiten, -1))
