"""Posteriors whose log evidence is an integral by importance sampling: of one mode, or over all that were found."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_evidence.display import Table
from pyro_evidence.errors import BadInput
from pyro_evidence.files import Array
from pyro_evidence.fitting.iterate import Fit
from pyro_evidence.fitting.process_state import own_random_numbers, without_validation
from pyro_evidence.laplace import tour
from pyro_evidence.laplace.approximation import LaplaceState, laplace_state
from pyro_evidence.laplace.evidence_error import EvidenceError
from pyro_evidence.laplace.mean_shift import at_mean
from pyro_evidence.laplace.mode_checks import require_end
from pyro_evidence.laplace.tour import Exchange, ModeIntegral, NormalMixture
from pyro_evidence.laplace.type2 import TypeII
from pyro_evidence.numerics import importance
from pyro_evidence.numerics.coordinates import is_identity
from pyro_evidence.posterior import archive, diagnostics
from pyro_evidence.posterior.guide import LaplaceGuide
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.posterior.sensitivity import at_draws
from pyro_evidence.program.log_joint import Model
from pyro_evidence.program.sites import Values
from pyro_evidence.settings import check_count, quantile_levels, seeded
from pyro_evidence.structure.symmetries import reordered

SEED = 0  # of the draws that the log evidence is taken from: it is a number to report
GOOD_ENOUGH = 0.01  # nats, by which Laplace's log evidence of a single mode may be off: a per cent of a Bayes factor
FEW = 512  # draws, which tell that where weights vary by less than a tenth
CHANCE = 5.0  # standard errors, in which two processors' integrals hardly ever differ
ROUNDS = 4  # of climbs from the heaviest draws, each of sixteen
QUANTILE_DRAWS = 10_000  # of a mixture, whose quantiles are then known to two hundredths of a standard deviation


@dataclass(frozen=True, eq=False, repr=False)
class ImportancePosterior(LaplacePosterior):
    """Laplace's posterior where its log evidence is not good to a hundredth of a nat, and importance sampling's is.

    ``log_evidence`` is by importance sampling from normals and t distributions at the modes, of one coordinate by
    quadrature, or, where weights cannot be trusted, the sum of Laplace's at each, and no number to compare models by;
    ``log_evidence_error`` says by which.  Draws, quantiles and predictions are of those draws, or nodes, resampled by
    their weights; where these cannot be trusted, of the Gaussian at the mode, but for the posterior over several modes.

    :ivar states: Laplace's approximation at each mode, the highest evidence first.
    :ivar integral: over all of them.

    >>> import torch
    >>> from pyro import distributions as dist, sample
    >>> from pyro_evidence import LaplaceEvidence
    >>> def heavy(t):
    ...     a = sample("a", dist.StudentT(3.0, 0.0, 1.0))
    ...     sample("t", dist.StudentT(3.0, a, 1.0), obs=t)
    >>> posterior = LaplaceEvidence(heavy).run(torch.tensor(0.0))
    >>> len(posterior.states), bool(posterior.log_evidence > posterior.at_mode(0).log_evidence)
    (1, True)
    """

    schema: ClassVar[Mapping[str, Any]] = archive.LAPLACE | {
        "modes": Array("M D", torch.float64),
        "total": archive.NUMBER,
    }
    _in_blocks: ClassVar[bool] = False
    _mirrors: ClassVar[Any] = ()  # images are among the modes
    _num_components = 1  # so are labellings, and counted

    states: tuple[LaplaceState, ...] = field(kw_only=True)
    integral: ModeIntegral = field(kw_only=True)

    @property
    def _as_laplace(self) -> tuple[float, tuple[str, ...]]:
        return float(self._by_laplace), ()

    @property
    def _trusts_weights(self) -> bool:
        return self.integral.is_trusted

    @property
    def _normal(self) -> bool:  # type: ignore[override]
        return not self.integral.is_trusted

    @property
    def _num_directions(self) -> int:
        """Coordinates, one number that chooses a draw or a mode, and those whose ranks are an order of elements."""
        return len(self.state.u) + 1 + (0 if self.integral.exchange is None else self.integral.exchange.size)

    def _unwhitened(self, white: Tensor) -> Tensor:
        if not self.integral.is_trusted:
            return self._approximate(white)
        ends = self.integral.weighed.weights.cumsum(0)
        index = torch.searchsorted(ends, torch.special.ndtr(white[:, len(self.state.u)]).to(ends) * ends[-1])
        return self._in_any_order(self.integral.draws[index.clamp(max=len(ends) - 1)].to(white), white)

    def _approximate(self, white: Tensor) -> Tensor:
        """Unconstrained draws ``(S, D)`` of the approximation whose draws can be weighed."""
        return super()._unwhitened(white[:, : len(self.state.u)])

    def _in_any_order(self, u: Tensor, white: Tensor) -> Tensor:
        """Rows with their exchangeable elements in an order that the last white numbers choose."""
        exchange = self.integral.exchange
        if exchange is None:
            return u
        return reordered(exchange.joint, u, exchange.axes, white[:, len(self.state.u) + 1 :].argsort(1))

    def _with_density(self, white: Tensor) -> tuple[Tensor, Tensor]:
        return super()._with_density(white[:, : len(self.state.u)])

    def _reported(self, drawn: Tensor) -> Values:
        if not self.integral.is_trusted:
            return super()._reported(drawn)
        return self._constrained(self._unwhitened(self._white(len(drawn), seeded(SEED))))

    def _check(self, until: float) -> dict[str, Any]:
        if not self.integral.is_trusted:
            return super()._check(until)
        return diagnostics.importance_check(self.integral.weighed, None, self._joint.dtype)

    def _draws_until(self, until: float) -> Values:
        return self.get_samples(self._num_tabulated, seed=SEED)

    def quantiles(self, q: float | Sequence[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Marginal quantiles of unconstrained coordinates, as ``AutoGuide.quantiles`` takes them, by 10,000 draws.

        :return: ``(len(q),) + shape`` for each site; ``shape`` for a single ``q``.
        :raises BadInput: for a ``q`` outside 0 to 1.
        """
        if self._normal:
            return super().quantiles(q)
        levels = quantile_levels(q).to(self.state.u)
        white = self._white(QUANTILE_DRAWS, seeded(SEED))
        return self._constrained(self._unwhitened(white).quantile(levels, dim=0))

    @property
    def _by_laplace(self) -> Tensor:
        """The sum of Laplace's log evidences, all copies counted, nats."""
        return torch.stack([state.log_evidence for state in self.states]).logsumexp(0) + self.integral.log_copies

    @property
    def log_evidence(self) -> Tensor:
        """``log p(D | hyperparameters)`` of all modes, as one integral or as their sum, nats, shape ``()``."""
        return self.integral.log_evidence if self.integral.is_trusted else self._by_laplace

    @cached_property
    def log_evidence_error(self) -> EvidenceError:
        """That of quadrature, importance sampling or particles; of the sum of modes, what it differs by; nats."""
        over = f"{self.integral.method} over {len(self.states)} mode{'s' * (len(self.states) > 1)}"
        if self.integral.is_trusted:
            return EvidenceError.of(0.0, "", 0.0, 0.0, over).beside(self.integral.error)
        gap = float(self.integral.log_evidence - self._by_laplace)
        return EvidenceError.of(gap, "", 0.0, 0.0, f"against {over}, whose weights are not to be trusted")

    @property
    def has_unlike_modes(self) -> bool:
        """Whether some mode with a hundredth of the highest's evidence is no image of that: its evidence differs."""
        below = (self.state.log_evidence - torch.stack([state.log_evidence for state in self.states])).abs()
        return bool(((below > SAME_HEIGHT) & (below < -math.log(tour.LEAST_SHARE))).any())

    @property
    def candidate_hyperparameters(self) -> tuple[str, ...]:
        """The number furthest from zero of those that multiply one site of many elements, and turn their signs with it.

        Given that number one mode is left.  None where the integral can be trusted.
        """
        if self.integral.is_trusted:
            return ()
        joint, latents, u = self._joint, self._joint.latents, self.state.u
        real = [p for p in latents if is_identity(p.transform)]
        numbers = [p.name for p in real if p.size == 1]
        turns = torch.ones(len(numbers), len(u)).to(u)
        for row, name in zip(turns, numbers, strict=True):
            row[latents.slices[name]] = -1.0

        def are_level(rows: Tensor) -> Tensor:
            """Which rows have the density of the first."""
            height = joint.log_joint(rows, self.state.theta).detach()
            return joint.are_level(height, height[0])

        for site in (p.name for p in real if p.size > 1) if numbers else ():
            off, image = u.clone(), torch.ones_like(u)
            off[latents.slices[site]], image[latents.slices[site]] = 0.0, -1.0
            factors = are_level(torch.cat([off.unsqueeze(0), turns * off]))[1:]  # unseen without the site
            image = image * turns[factors].prod(0)
            if bool(factors.any()) and bool(are_level(torch.stack([u, image * u])).all()):
                far = (turns < 0).to(u) @ (u / self.state.precision.variance[0].sqrt()).abs()
                return (numbers[int(far.where(factors, -1.0).argmax())],)
        return ()

    @property
    def modes(self) -> Table:
        """A row for each mode: its share of the integral, how far it is from normal, its log evidence, its copies.

        k-hat is that of a few draws from the normal and t distributions at this mode alone, of the density's part that
        is rather of this mode than of others; ``-inf`` where none stands out, ``inf`` where too few have a weight.
        """
        heights = [float(state.log_evidence) for state in self.states]
        shares, orders = self.integral.log_shares.exp().tolist(), round(math.exp(self.integral.log_copies))
        rows = {
            str(k): {
                "share": share,
                "k-hat": self.integral.pareto_ks[k],
                "log evidence": height,
                "copies": float(orders * sum(abs(height - other) < SAME_HEIGHT for other in heights)),
            }
            for k, (share, height) in enumerate(zip(shares, heights, strict=True))
        }
        columns = {
            "share": "of the posterior's mass, its copies in other orders counted",
            "k-hat": "of importance sampling of this mode alone: above 0.7 it is far from normal",
            "log evidence": "of this mode alone by Laplace, nats",
            "copies": "modes of this height, itself among them",
        }
        return Table(rows, columns, (), "mode", digits=4)

    def at_mode(self, k: int) -> LaplacePosterior:
        """Laplace's posterior around one mode alone, as if the others were not there.

        :param k: its row in :attr:`modes`.
        :raises BadInput: for a number that no mode has.
        """
        k = check_count("k", k, at_least=0)
        if k >= len(self.states):
            raise BadInput(f"k={k}; expected the number of a mode, 0 to {len(self.states) - 1}: see posterior.modes.")
        return LaplacePosterior(self.states[k], self.status, self.log_evidences, self.restarts, self.failures)

    def _described(self, check: dict[str, Any]) -> dict[str, Any]:
        k, error = self.integral.weighed.pareto_k, self.integral.error
        many = f"there are more than {tour.MOST_MODES} of these"
        tried = "" if self.integral.walked is None else ", and particles that walk from these do not tell the integral"
        why = many if self.integral.is_crowded else f"the k-hat of importance sampling over the modes is {k:.2f}{tried}"
        weights = importance.tail_words(k) if self.integral.walked is None else "whose weights are not to be trusted"
        drawn = f" from normals and t distributions at the modes, {weights}"
        by = (
            f"+- {error:.2g}, by {self.integral.method}{'' if self.integral.is_quadrature else drawn}"
            if self.integral.is_trusted
            else f"the sum of Laplace's at each mode, and no number to compare models by: {why}; run NUTS or "
            "tempered_smc(posterior)"
        )
        return super()._described(check) | {"log_evidence_by": by}

    def _notes(self, until: float) -> list[str]:
        said, integral = [], self.integral
        if len(self.states) > 1:
            shares = ", ".join(f"{share:.3g}" for share in integral.log_shares.exp().tolist()[:LISTED])
            more = ", ..." if len(self.states) > LISTED else ""
            held = f"{len(self.states)} modes hold {shares}{more} of the mass"
            said.append(f"{held}: see posterior.modes, posterior.at_mode(k)")
        if integral.exchange is not None:
            said.append(
                f"{integral.exchange.size} elements of {', '.join(integral.exchange.axes)} can be exchanged: the log "
                f"evidence counts all {round(math.exp(integral.log_copies)):,} orders."
            )
        return [*said, *super()._notes(until)]

    _points_along = at_draws

    def _log_evidence_of(self, fit: Fit[TypeII]) -> Tensor:
        best = fit.state.laplace
        modes = [best, *(laplace_state(best.problem, best.theta, state.u) for state in self.states[1:])]
        return tour.integral_over(modes, SEED, exchange=tour.exchange_of(best)).log_evidence

    def _record(self) -> dict[str, Any]:
        modes = torch.stack([state.u for state in self.states])
        return super()._record() | {"modes": modes, "total": self.log_evidence}

    @classmethod
    def _restored(cls, content: Mapping[str, Any], model: Model, sizes: Mapping[str, int]) -> "ImportancePosterior":
        state = archive.restore(content, model)
        archive.require_laplace(state)
        states = tuple(laplace_state(state.problem, state.theta, u) for u in content["modes"])
        known = LaplacePosterior(state, *archive.history(content))
        found = of_modes((state, *states[1:]), known, tour.exchange_of(state))
        dtype, error = state.problem.joint.dtype, CHANCE * float(found.log_evidence_error)
        archive.require_equal("total", found.log_evidence, content["total"], dtype, error=error)
        archive.require_equal("u", states[0].u, state.u, state.problem.joint.dtype)
        return found


@dataclass(frozen=True, eq=False, repr=False)
class MultimodalPosterior(ImportancePosterior):
    """The same over several modes; weights that cannot be trusted leave Gaussians about the mean around each.

    Draws, quantiles and predictions are of all modes; ``mode`` and ``state`` are those of the one with the highest
    evidence.  Where more than three elements, such as components, can be exchanged, modes are listed in one order; the
    log evidence counts all, draws are in any, those of the guide in that one.

    >>> import torch
    >>> from pyro import distributions as dist, sample
    >>> from pyro_evidence import LaplaceEvidence
    >>> def sign_unknown(t):
    ...     a = sample("a", dist.Normal(0.0, 3.0))
    ...     sample("t", dist.Normal(a**2, 0.5), obs=t)
    >>> posterior = LaplaceEvidence(sign_unknown).run(torch.tensor(4.0))
    >>> len(posterior.states), bool(posterior.at_mode(1).mode["a"] > 0 > posterior.mode["a"])
    (2, True)
    """

    _normal: ClassVar[bool] = False
    _about_mode: ClassVar[bool] = True  # means are those of the mixture

    @cached_property
    def _mixture(self) -> NormalMixture:
        """Gaussians about the mean around each mode; about the mode where that is not known."""
        with own_random_numbers(), without_validation():
            about = [at_mean(state) or state for state in self.states]
        return replace(tour.proposal(about), log_mixing=self.integral.log_shares)

    def _approximate(self, white: Tensor) -> Tensor:
        ends, size = self.integral.log_shares.exp().cumsum(0), len(self.state.u)
        component = torch.searchsorted(ends, torch.special.ndtr(white[:, size])).clamp(max=len(ends) - 1)
        return self._in_any_order(self._mixture.of_components(white[:, :size], component), white)

    def _with_density(self, white: Tensor) -> tuple[Tensor, Tensor]:
        u, exchange = self._approximate(white), self.integral.exchange
        return u, self._mixture.log_prob(u if exchange is None else exchange.in_order(u)) - self.integral.log_copies

    @property
    def _normals(self) -> tuple[Tensor, Tensor, Callable[[int, Tensor], Tensor]]:
        modes = torch.stack([state.u for state in self.states])
        return self.integral.log_shares.exp(), modes, lambda k, white: self.states[k].precision.unwhiten(white)

    @property
    def guide(self) -> LaplaceGuide:
        """The posterior as a Pyro guide, over all modes."""
        mixture = self._mixture
        precision = torch.stack([p.tril[0] @ p.tril[0].mT for p in mixture.precisions])  # type: ignore[attr-defined]
        normals = dist.MultivariateNormal(mixture.loc, precision_matrix=precision)
        shares = dist.Categorical(logits=mixture.log_mixing)
        return LaplaceGuide(self.state, dist.MixtureSameFamily(shares, normals))


SAME_HEIGHT = 1e-4  # nats between the evidences of copies of a mode
LISTED = 6  # shares in a line of the summary


def of_modes(
    states: Sequence[LaplaceState], posterior: LaplacePosterior, exchange: Exchange | None, rounds: int = 0
) -> ImportancePosterior:
    """The posterior over these modes, the highest evidence first, and such as the heaviest draws lead to.

    :param posterior: what is known of the fit that found the first.
    :param exchange: elements that can be exchanged at the first.
    :param rounds: of climbs from the heaviest draws, as long as there are other modes, and either weights cannot be
        trusted or elements can be exchanged: draws where some are unused hide by good weights that a mode is missing.
    """
    price = tour.PRICE if len(states) > 1 or exchange is not None else 2.0 * tour.LITTLE
    num = None if len(states) <= tour.MOST_MODES else FEW  # of what is no number
    integral = tour.integral_over(states, SEED, num, exchange=exchange, price=price)
    if rounds and (exchange is not None or not integral.is_trusted):
        more = tour.in_ranks(found := tour.climbed(states, integral.heaviest, exchange))
        gain = max((float(mode.log_evidence) for mode in found[len(states) :]), default=-math.inf)
        if gain > float(more[0].log_evidence) + math.log(tour.LEAST_SHARE) and len(more) <= tour.MOST_MODES:
            return of_modes(more, posterior, tour.exchange_of(more[0]), rounds - 1)
    integral = integral.after_walk  # with all modes, once
    kind = ImportancePosterior if len(states) == 1 else MultimodalPosterior
    known = (posterior.status, posterior.log_evidences, posterior.restarts, posterior.failures)
    return kind(states[0], *known, states=tuple(states), integral=integral)


def toured(posterior: LaplacePosterior, num_draws: int | None, seed: int) -> LaplacePosterior:
    """The posterior over all modes that can be found; itself where there is no other, and Laplace's is good enough.

    Of a single mode the log evidence that hyperparameters were maximised by stays: it is Laplace's.

    :param num_draws: from the prior; None: as many as :func:`~pyro_evidence.laplace.tour.tour` takes.
    :raises ImproperPosterior: where the density rises without end.
    """
    require_end(posterior.state.around, posterior.state.precision)
    states, exchange = tour.tour(posterior.state, num_draws, seed)
    single = len(states) == 1 and exchange is None
    if single and not len(states[0].theta):  # beside which that of the fit may be faint
        posterior = replace(posterior, state=states[0])
    many = len(states) > tour.MOST_MODES
    mirrored = many and posterior._mirrors and float(states[0].log_evidence - states[-1].log_evidence) < SAME_HEIGHT
    if mirrored or (single and len(posterior.state.theta)):
        return posterior
    if single:
        if tour.within(tour.LITTLE, posterior._joint, FEW) < FEW:  # too dear to be asked
            return posterior
        weights = posterior.log_weights(FEW)
        if not bool(weights.isfinite().any()):  # a mode in a corner, of which the summary warns
            return posterior
        few = importance.checked(weights).log_weights
        gain = abs(float(importance.log_mean(few) - posterior.log_evidence))
        if gain + 2.0 * float(importance.standard_error(few)) < GOOD_ENOUGH:
            return posterior
        return of_modes(states, posterior, exchange, ROUNDS)
    return of_modes(states[: tour.MOST_MODES + 1], posterior, exchange, 0 if many else ROUNDS)
