"""The posterior of a fit with marginalised sites, and the marginals of single sites."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.iterate import Fit, Status, Stop
from pyro_evidence.fitting.process_state import generator_of, own_random_numbers, without_validation
from pyro_evidence.laplace import tour
from pyro_evidence.laplace.approximation import LaplaceState, Problem, log_priors, warn_of_jumps
from pyro_evidence.laplace.evidence_error import slope_of_error
from pyro_evidence.laplace.restarts import MOST_COORDINATES
from pyro_evidence.laplace.type2 import TypeII
from pyro_evidence.nested import joint_posterior, marginal
from pyro_evidence.nested.hyperparameter_modes import (
    best_mode,
    check_multimodality,
    has_arrived,
    maximised,
    newton_step,
)
from pyro_evidence.nested.inner import (
    MarginalisedJoint,
    is_affordable,
    is_batched,
    marginalised_problem,
    solve_inner,
)
from pyro_evidence.nested.inside import InsideCorrection, LaplaceNodes
from pyro_evidence.nested.integration import FEW_HESSIANS, Integral, integrate
from pyro_evidence.nested.joint_posterior import IndexMap, Proposal
from pyro_evidence.nested.marginal import Marginal
from pyro_evidence.nested.quantile_map import QuantileMap, levels
from pyro_evidence.numerics import importance
from pyro_evidence.numerics.coordinates import is_identity
from pyro_evidence.numerics.linalg import relative_rounding
from pyro_evidence.numerics.quadrature.rules import PRODUCT_DIMS, quasi_normal
from pyro_evidence.posterior import archive
from pyro_evidence.posterior.base import NUM_DRAWS, SHARED, TOGETHER
from pyro_evidence.posterior.guide import CoordinateDistribution, LaplaceGuide
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.posterior.reweighted import ConditionalApproximations
from pyro_evidence.posterior.sensitivity import WeightedPoints, at_nodes, at_weighted
from pyro_evidence.program.constants import PriorConstant
from pyro_evidence.program.log_joint import Model
from pyro_evidence.program.sites import Values

APART = 2.0  # standard deviations, between modes that are not the same
KEPT = 2**20  # numbers of the draws that are remembered
LEFT_OUT_PLACES = 64  # of the marginalised sites at which data are left out
ENOUGH = 0.9  # share of draws that weights leave where the inside is as good as normal
FIRST_LOOK = 50  # draws of which, where they keep nearly all of their weight, no more are asked
FEW_LATENTS = 3  # polynomials of which are few up to the sixth degree
TOLD = 1e-4  # nats a step, which slopes err by where Laplace inside leaves out some thousandths of a nat
CALIBRATED = 1024  # quasi-random draws whose weights say what marginals are
LITTLE = 0.05  # nats of an error times the spread of a scale: its slope moves no mean by a tenth of a deviation
DRAWING = 1.0  # seconds for draws of a table, where what they are made of took all of the time
CHECKING = 0.3  # seconds for a check, where the table took all of the time
FAR = 1.0  # standard deviations that a density is moved by, beyond which a straight slope may be another
FELT = 0.01  # standard deviations that a density moves by: less is rounding, or no matter
NEARLY_ALL = 0.97  # share that they keep: with standard errors of some hundredths those of many keep enough


@dataclass(frozen=True, eq=False, repr=False)
class NestedPosterior(LaplacePosterior):
    """Marginalised sites integrated numerically, the others by Laplace given them: what ``engine.run`` returns then.

    ``log_evidence`` has all latent sites integrated, and what Laplace leaves out inside added where it can be known.
    ``mode`` is the mode of the marginalised sites with the mode of the inner ones given it, and ``state`` a single
    Gaussian there over all of them; draws, quantiles and marginals are those of the mixture over the marginalised
    sites, each coordinate with the marginal that importance weights say, where these can be trusted and have few
    coordinates.

    :ivar integral: the marginalised sites' density, and Laplace inside at its nodes.

    >>> posterior = LaplaceEvidence(eight_schools).run(y)  # doctest: +SKIP
    >>> posterior.marginal("tau").mean  # doctest: +SKIP
    """

    schema: ClassVar[Mapping[str, Any]] = archive.NESTED
    _normal: ClassVar[bool] = False
    _maximises_evidence: ClassVar[bool] = False
    _num_tabulated: ClassVar[int] = NUM_DRAWS  # each with an inner mode of its own
    _num_checked: ClassVar[Any] = NUM_DRAWS

    integral: Integral = field(kw_only=True)

    def __getstate__(self) -> dict[str, Any]:  # without thousands of draws that are only kept for speed
        return {name: value for name, value in vars(self).items() if name != "_latest"}

    @property
    def marginalised_sites(self) -> tuple[str, ...]:
        """Names of the latent sites that were integrated numerically."""
        names = self.integral.outer_mode.state.problem.joint.hypers.names
        return tuple(n for n in names if n in self._joint.latents.slices)

    @property
    def integration_error(self) -> float:
        """Change of the log evidence when the nodes were last made more, or its standard error, nats."""
        return self.integral.error

    @cached_property
    def _slope_left_out(self) -> Tensor | None:
        """Slope of what Laplace leaves out inside, along the nodes' axes ``(d,)``; None where it is not known.

        By importance sampling, where that is believed, or by quadrature of independent blocks.
        """
        d, state, problem = self.integral.standardisation.num_dims, self._inside, self._inside.problem
        if problem.nodes == 1 and len(state.u) <= MOST_COORDINATES:
            away = 0.5 * state.precision.variance[0].sqrt()
            here, there = problem.density.precision(torch.stack([state.u, state.u + away]), state.theta).detach()
            if float((there - here).abs().max()) <= relative_rounding(problem.joint.dtype) * float(here.abs().max()):
                return self.integral.phi.new_zeros(d)  # Laplace's approximation is exact
        found = self._by_inside_draws
        if found is not None and found.is_trusted and bool(found.slope.any()):
            return found.slope
        with own_random_numbers(), without_validation(), torch.enable_grad(), suppress(ArithmeticError, RuntimeError):
            if self._joint.has_data and (slope := slope_of_error(self._inside)) is not None:
                return self.integral.standardisation.basis.mT @ slope[self.integral.outer_mode.marginalised].double()
        return None

    @cached_property
    def _tilted(self) -> Integral:
        """The marginalised sites' density that draws are of: with what Laplace leaves out inside along these."""
        return self._tilting(self.integral)

    def _tilting(self, integral: Integral) -> Integral:
        slope = self._slope_left_out
        return integral if slope is None or not bool((slope.abs() > FELT).any()) else integral.tilted(slope)

    @property
    def _inside(self) -> LaplaceState:
        return self.integral.outer_mode.state

    @property
    def _inside_places(self) -> LaplaceNodes:
        return LaplaceNodes.of_integral(self.integral, self._turned)

    @cached_property
    def _places(self) -> IndexMap:
        return joint_posterior.index_map(self._joint, self._inside.problem.joint)

    @cached_property
    def _latest(self) -> dict[bytes, tuple[Tensor, Tensor]]:
        """The last draws and their log densities, by their white noise: tables and checks ask for the same."""
        return {}

    @property
    def _rows(self) -> int:
        return min(super()._rows, self._num_tabulated if self._follows else TOGETHER)

    @property
    def _follows(self) -> bool:
        """Whether many draws at once cost little, few of them being searched."""
        return is_affordable(self._inside.problem, int(FEW_HESSIANS * self._tilted.searched))

    def _draws_until(self, until: float) -> Values:
        if len(self._calibrated.points):
            return self._constrained(self._calibrated.points)
        generator, parts, begun = generator_of(0), list[Tensor](), time.process_time()
        _ = self._tilted.known or self._tilted.modes, self._tilted.skewness_correction  # found once: no draw's price
        vars(self)["_num_remembered"] = self._num_tabulated if self._follows else 0  # of a first batch
        until += 0.5 * (time.process_time() - begun)  # half of it is the check's

        def draw(num: int) -> None:
            parts.append(self._unwhitened(self._white(num, generator)))

        for _ in self._looks(draw, self._num_tabulated, max(until, time.process_time() + DRAWING)):
            pass
        u = torch.cat(parts)
        vars(self)["_num_remembered"] = len(u) if u.numel() <= KEPT else 0
        return self._constrained(u)

    def _check(self, until: float) -> dict[str, Any]:
        return super()._check(max(until, time.process_time() + CHECKING))

    def _white(self, num_samples: int, generator: torch.Generator) -> Tensor:
        """Sixteen rows at a time, each coordinate's in sixteen parts of equal mass: a table's moments are steadier.

        A Latin hypercube; McKay, Beckman and Conover (1979).
        """
        whole = -(-num_samples // SHARED) * SHARED
        order, within = super()._white(2 * whole, generator).view(-1, 2, SHARED, self._num_directions).unbind(1)
        below = (order.argsort(1) + torch.special.ndtr(within.double())) / SHARED
        return self._of_active(torch.special.ndtri(below).view(whole, -1)[:num_samples])

    def _unwhitened(self, white: Tensor) -> Tensor:
        """Unconstrained draws ``(S, D)`` from white noise, each with an inner mode of its own."""
        if not len(white):
            return white
        return self._moved(torch.cat([self._with_density(part)[0] for part in white.split(self._rows)]))

    @property
    def _judged(self) -> tuple[Tensor, Tensor]:
        """Slopes are without what Laplace leaves out inside; nan where it is not known, and may be notable."""
        slope, basis, judged = self._slope_left_out, self.integral.standardisation.basis, self.state.problem.active
        if slope is None and self._left_out is not None and not self._left_out.is_doubtful:
            slope = torch.zeros_like(basis[0])
        if slope is None:
            off = float(self.log_evidence_error) * float(self.integral.moments[1].max())
            slope = basis[0] * (0.0 if off < LITTLE else math.nan)
        elif bool((slope.abs() < FAR).all()):  # the nodes' own error is all that is left there
            judged = judged.index_fill(0, self._places.marginalised, False)
        return judged, self._places.whole(torch.linalg.solve(basis.mT, slope), torch.zeros_like(self._inside.u))

    def _beside(self, white: Tensor) -> Tensor:
        places, found = self._places, self.integral.outer_mode  # the factors that draws are made by
        away = found.gaussian.forward(white[:, places.marginalised]) - found.centre
        inside = self._tilted.factored(found.state.precision).row(0).unwhiten(white[:, places.inner])
        return places.whole(away, inside + away @ found.follows.mT)

    def _with_density(self, white: Tensor) -> tuple[Tensor, Tensor]:
        known, keys = self._latest, [row.tobytes() for row in white.cpu().numpy()]
        if new := [k for k, key in enumerate(keys) if key not in known]:
            begun = time.process_time()
            made = zip(*self.proposal.drawn(white[new]), strict=True)
            known.update(zip((keys[k] for k in new), made, strict=True))
            vars(self)["_price"] = (time.process_time() - begun) / len(new)
        u, log_density = (torch.stack(rows) for rows in zip(*(known[key] for key in keys), strict=True))
        for key in list(known)[: -max(len(white), KEPT // white.shape[-1])]:
            del known[key]
        return u, log_density

    @property
    def _normals(self) -> tuple[Tensor, Tensor, Callable[[int, Tensor], Tensor]]:
        nodes, places = self.integral.nodes, self._places

        def unwhiten(k: int, white: Tensor) -> Tensor:
            inner = nodes.precision.row(k).unwhiten(white[:, places.inner])
            return places.whole(torch.zeros_like(white[:, places.marginalised]), inner)

        return self.integral.log_weights.exp(), places.whole(self.integral.phi, nodes.u), unwhiten

    @property
    def candidate_hyperparameters(self) -> tuple[str, ...]:
        """Inner sites of one number on positive or bounded support, the most skewed first, where few draws are kept.

        None where the inside is normal or large, or three axes are integrated already.
        """
        problem, dims = self._inside.problem, self.integral.standardisation.num_dims
        latents = problem.joint.latents
        names = [p.name for p in latents if p.size == 1 and not is_identity(p.transform)]
        small = 1 < len(latents.parts) and latents.size <= MOST_COORDINATES and is_batched(problem)
        if not (names and small and dims < PRODUCT_DIMS):
            return ()
        few = float(importance.effective_sample_size(self._weighed(FIRST_LOOK, seed=0)[1]))
        if few > NEARLY_ALL * FIRST_LOOK or self.relative_ess > ENOUGH or self._tilted.margins is None:
            return ()
        skew = self._tilted.margins.axes(self.integral.phi.new_zeros(1, dims)).skew[0].abs()
        return tuple(sorted(names, key=lambda name: -float(skew[latents.slices[name]])))

    @property
    def guide(self) -> LaplaceGuide:
        """The posterior as a Pyro guide; inner modes follow the draws of the marginalised sites.

        On the data of the fit.  It can be pickled if the model can.
        """
        return LaplaceGuide(self.state, CoordinateDistribution(self._calibrated))

    def marginal(self, site: str) -> Marginal:
        """The posterior density, mean, standard deviation and quantiles of a latent site, every element by itself.

        :raises BadInput: for a name that is no latent site, and for a site whose elements have no densities of their
            own, such as a correlation matrix.
        """
        latents = self._joint.latents
        if site not in latents.slices:
            raise BadInput(f"marginal({site!r}): expected a latent site, one of {list(latents.names)}.")
        part = next(p for p in latents if p.name == site)
        block = torch.arange(latents.size)[latents.slices[site]].to(self._places.marginalised.device)
        if site in self.marginalised_sites:
            rows = [int((self._places.marginalised == i).nonzero()) for i in block]
            pairs = [marginal.marginalised_density(self._tilted, row) for row in rows]
            found = [torch.stack(each, -1) for each in zip(*pairs, strict=True)]
        else:
            index = torch.stack([(self._places.inner == i).nonzero().squeeze() for i in block])
            found = list(marginal.inner_density(self._tilted, index))
        return marginal.constrained(part, *self._density_of_draws(block, *found))

    def _density_of_draws(self, index: Tensor, x: Tensor, density: Tensor) -> tuple[Tensor, Tensor]:
        """Densities ``(G, E)`` at ``x`` of the coordinates ``index`` ``(E,)``, with the quantiles of the draws."""
        if self._calibrated.map is None:
            return x, density
        own = marginal.unconstrained(x, density).quantiles(levels(x).tolist()).mT.contiguous()
        moved, log_slope = QuantileMap(own, self._calibrated.map.after[index]).forward(x)
        return moved, density * (-log_slope).exp()

    def quantiles(self, q: float | Sequence[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Marginal quantiles, of unconstrained coordinates, as ``AutoGuide.quantiles`` takes them.

        :return: ``(len(q),) + shape`` for each site; ``shape`` for a single ``q``.
        :raises BadInput: for a ``q`` outside 0 to 1.
        """
        places, wanted = self._places, torch.as_tensor(q, dtype=self.state.u.dtype).tolist()
        marginalised = [marginal.marginalised_density(self._tilted, i) for i in range(len(places.marginalised))]
        x, density = (torch.stack(each, -1) for each in zip(*marginalised, strict=True))
        inner = marginal.inner_density(self._tilted, torch.arange(len(places.inner)))
        pairs = (places.marginalised, x, density), (places.inner, *inner)
        parts = [marginal.unconstrained(*self._density_of_draws(*pair)).quantiles(wanted) for pair in pairs]
        return self._constrained(self._places.whole(*parts))

    def _described(self, check: dict[str, Any]) -> dict[str, Any]:
        """And how sites were integrated, with what error, and number of inner modes not found."""
        return super()._described(check) | {
            "marginalised_sites": list(self.marginalised_sites),
            "integration": self.integral.method,
            "integration_error": self.integral.error,
            "inner_failures": self.integral.nodes.num_failures,
        }

    @property
    def _conditional_approximations(self) -> ConditionalApproximations:
        """Quasi-random draws of the marginalised sites, and their weights but for the data."""
        integral, problem = self.integral, self.integral.outer_mode.state.problem
        z = integral.density.unwhiten(
            quasi_normal(LEFT_OUT_PLACES, integral.standardisation.num_dims).to(integral.standardisation.centre)
        )
        inner = integral.outer_mode.inner(integral.standardisation.forward(z))
        log_weight = (
            log_priors(problem, inner.theta) + integral.standardisation.log_slope(z) - integral.density.log_prob(z)
        )
        return ConditionalApproximations(problem, inner.theta, inner.u, log_weight)

    @cached_property
    def _left_out(self) -> InsideCorrection | None:
        """Error inside: of few latents, where nodes say nothing, by importance sampling of all latents together."""
        found, size = self._by_inside_draws, len(self.state.u)
        if found is None or not found.is_doubtful or size > MOST_COORDINATES or self._mirrors:
            return found
        with own_random_numbers(), without_validation(), suppress(ArithmeticError, BadInput):
            whole = tour.integral_over([self.state], seed=0)
            if whole.is_trusted:
                gain, k = float(whole.log_evidence - self.state.log_evidence), whole.weighed.pareto_k
                return InsideCorrection(gain, whole.error, 0.0, k, len(whole.draws), size, 0.0 * found.slope)
        return found

    def share_of(self, modes: Sequence[LaplaceState]) -> float:
        """Share of the mass, by Laplace at the nodes, of the heaviest mode inside but that of the integral."""
        nodes, problem, ratio = self.integral.nodes, self._inside.problem, 0.0
        for state in modes if is_batched(problem) else ():
            other = solve_inner(problem, nodes.theta, state.u.expand_as(nodes.u), searches=0)
            apart = nodes.precision.whiten(other.u - nodes.u).norm(dim=-1) > APART
            log_mass = self.integral.log_weights + other.log_density - nodes.log_density
            ratio = max(ratio, float(log_mass.nan_to_num(nan=-math.inf).where(apart, -math.inf).logsumexp(0).exp()))
        return ratio / (1.0 + ratio)

    def _points_along(self, constants: Sequence[PriorConstant]) -> WeightedPoints:
        """The nodes; of few latents, where Laplace inside is not exact, weighted draws of all that tell more."""
        slope = self._slope_left_out
        if len(self.state.u) <= FEW_LATENTS and (slope is None or bool(slope.any())):
            u, log_weights = self._weighed(2 * CALIBRATED, seed=0)
            whole = LaplacePosterior(self.state, self.status, self.log_evidences, self.restarts, self.failures)
            found = at_weighted(whole, constants, u, log_weights.softmax(0))
            if found.error < TOLD:
                return found
        return at_nodes(self, constants)

    def _problem_of(self, model: Model, given: Mapping[str, Any]) -> Problem:
        joint, before = self._joint, self._inside.problem
        conditional = MarginalisedJoint(model, joint.args, joint.kwargs, marginalise=self.marginalised_sites, **given)
        return replace(marginalised_problem(conditional, before.curvature), nodes=before.nodes)

    def _log_evidence_of(self, fit: Fit[TypeII]) -> Tensor:
        integral = _integral_around(fit, Stop().quadrature_tol)[0]
        state = replace(self.state, log_evidence=integral.log_evidence)
        return replace(self, state=state, integral=integral).log_evidence

    @property
    def proposal(self) -> Proposal:
        """The posterior over all latents, as importance sampling draws from it."""
        return Proposal(self._tilted, self._places)

    @cached_property
    def _calibrated(self) -> Proposal:
        """Density of draws: with marginals by importance weights, where few latents and data allow as many modes."""
        inside = self._inside.problem
        if len(self.state.u) > MOST_COORDINATES or not is_batched(inside):
            return self.proposal
        if not self._follows or not is_affordable(inside, FEW_HESSIANS // 4):  # else tables and checks share draws
            return self.proposal

        def log_weights(u: Tensor, log_density: Tensor) -> Tensor:
            found = self.state.problem.density.log_joint(u, self.state.theta) - log_density
            return self._of_nearest(found.nan_to_num(nan=-math.inf), u)

        with own_random_numbers(), without_validation(), torch.no_grad():
            return self.proposal.calibrated(CALIBRATED, log_weights)

    def _moved(self, u: Tensor) -> Tensor:
        """Draws of :attr:`proposal`, with the marginals by importance weights."""
        return u if self._calibrated.map is None else self._calibrated.map.forward(u)[0]

    def _reported(self, drawn: Tensor) -> Values:
        return self._constrained(self._moved(drawn))

    def _record(self) -> dict[str, Any]:
        return super()._record() | {"nested": archive.record_integral(self.integral)}

    @classmethod
    def _restored(cls, content: Mapping[str, Any], model: Model, sizes: Mapping[str, int]) -> "NestedPosterior":
        state = archive.restore(content, model)
        return cls(state, *archive.history(content), integral=archive.restore_integral(content["nested"], state, model))


def integrated(full: Problem, fit: Fit[TypeII], tolerance: float, posterior: LaplacePosterior) -> NestedPosterior:
    """The posterior with the marginalised sites integrated around a fit whose hyperparameters hold them.

    :param full: the problem with all of these sites among its latents.
    :param fit: at the maximum over marginalised sites and hyperparameters together.
    :param tolerance: of the log evidence, nats.
    :param posterior: what is known of the fit beside its last state.
    """
    integral, status = _integral_around(fit, tolerance, full)
    state = joint_posterior.whole_state(full, integral.outer_mode, integral.log_evidence)
    known = (posterior.status if status is None else status, posterior.log_evidences, posterior.restarts)
    return NestedPosterior(state, *known, posterior.failures, integral=integral)


def _integral_around(fit: Fit[TypeII], tolerance: float, full: Problem | None = None) -> tuple[Integral, str | None]:
    """The integral over the marginalised sites around a fit; and its status, where that is another than the fit's.

    :param full: the problem of all sites, to be looked at for jumps before what takes long.
    """
    joint = fit.state.laplace.problem.joint
    assert isinstance(joint, MarginalisedJoint)
    found = maximised(fit.state.laplace, torch.nonzero(joint.is_marginalised).flatten(), fit.state.slope.total)
    if fit.status is Status.STEP_LIMIT:
        found = best_mode(found)
    elif fit.state.enough:
        found = newton_step(found, fit.state.slope.total)
    if full is not None:
        warn_of_jumps(joint_posterior.whole_state(full.unread, found, found.state.log_evidence))
    found, elsewhere, hidden = check_multimodality(found, tolerance)
    integral = integrate(found, tolerance, elsewhere)
    integral = replace(integral, error=integral.error + float(softplus(hidden - integral.log_evidence)))
    arrived = fit.status is Status.STEP_LIMIT and len(found.marginalised) == len(found.state.theta)
    return integral, Status.CONVERGED.value if arrived and has_arrived(found) else None
