"""The posterior over several modes: Gaussians at all that were found, and the integral over them as evidence."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_evidence.display import Table
from pyro_evidence.errors import BadInput
from pyro_evidence.files import Array
from pyro_evidence.laplace import tour
from pyro_evidence.laplace.approximation import LaplaceState, laplace_state
from pyro_evidence.laplace.evidence_error import EvidenceError
from pyro_evidence.laplace.tour import ModeIntegral, NormalMixture
from pyro_evidence.numerics.importance import threshold
from pyro_evidence.posterior import archive
from pyro_evidence.posterior.base import white_noise
from pyro_evidence.posterior.guide import LaplaceGuide
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.posterior.reweighted import ConditionalApproximations
from pyro_evidence.program.log_joint import Model
from pyro_evidence.program.simulate import affordable_draws
from pyro_evidence.settings import check_count, quantile_levels

SEED = 0  # of the draws that the log evidence is taken from: it is a number to report
QUANTILE_DRAWS = 10_000  # of a mixture, whose quantiles are then known to two hundredths of a standard deviation


@dataclass(frozen=True, eq=False, repr=False)
class MultimodalPosterior(LaplacePosterior):
    """Gaussians at several modes, in proportion to the integral of the density around each.

    ``log_evidence`` is that of all modes that were found: by importance sampling from the normals at them, or, where
    its weights cannot be trusted, the sum of Laplace's of each; ``log_evidence_error`` says by which.  Draws,
    quantiles and predictions are of all modes; ``mode`` and ``state`` are those of the one with the highest evidence.

    :ivar states: Laplace's approximation at each mode, the highest evidence first.
    :ivar integral: over all of them.

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

    schema: ClassVar[Mapping[str, Any]] = archive.LAPLACE | {"modes": Array("M D", torch.float64)}
    _normal: ClassVar[bool] = False
    _in_blocks: ClassVar[bool] = False

    states: tuple[LaplaceState, ...] = field(kw_only=True)
    integral: ModeIntegral = field(kw_only=True)

    @property
    def _num_components(self) -> int | None:
        """One: labellings are among the modes, and counted."""
        return 1

    @property
    def _num_directions(self) -> int:
        return len(self.state.u) + 1  # the last one chooses the mode

    @property
    def _shifted(self) -> None:
        """Means are those of the mixture."""
        return None

    @cached_property
    def _mixture(self) -> NormalMixture:
        return replace(tour.proposal(self.states), log_mixing=self.integral.log_shares)

    @property
    def proposal(self) -> NormalMixture:
        """The mixture, as importance sampling draws from it."""
        return self._mixture

    def _white(self, num_samples: int, generator: torch.Generator) -> Tensor:
        u = self.state.u
        return white_noise(num_samples, self._num_directions, generator, u.dtype).to(u.device)

    def _draws(self, white: Tensor) -> Tensor:
        return self._unwhitened(white.to(self.state.u))

    def _unwhitened(self, white: Tensor) -> Tensor:
        ends = self.integral.log_shares.exp().cumsum(0)
        component = torch.searchsorted(ends, torch.special.ndtr(white[:, -1])).clamp(max=len(ends) - 1)
        return self._mixture.of_components(white[:, :-1], component)

    def _beside(self, white: Tensor, drawn: Tensor) -> Tensor:
        return drawn  # of all modes, which the noise of a chain does not choose

    def _with_density(self, white: Tensor) -> tuple[Tensor, Tensor]:
        u = self._unwhitened(white)
        return u, self._mixture.log_prob(u)

    @cached_property
    def log_evidence_error(self) -> EvidenceError:
        """The standard error of importance sampling over all modes; of their sum, what it differs by; nats."""
        by_sum = _sum_of_modes(self.states)
        if is_trusted(self.integral):
            method = f"importance sampling over {len(self.states)} modes"
            return EvidenceError.of(0.0, "", 0.0, 0.0, method).beside(self.integral.error)
        method = (
            f"the sum over {len(self.states)} modes against importance sampling, whose weights are not to be trusted"
        )
        return EvidenceError.of(float(self.integral.log_evidence - by_sum), "", 0.0, 0.0, method)

    @property
    def modes(self) -> Table:
        """A row for each mode: its share of the integral, its own log evidence by Laplace, and how many are as high."""
        heights = [float(state.log_evidence) for state in self.states]
        shares = self.integral.log_shares.exp().tolist()
        rows = {
            str(k): {
                "share": share,
                "log evidence": height,
                "copies": float(sum(abs(height - other) < SAME_HEIGHT for other in heights)),
            }
            for k, (share, height) in enumerate(zip(shares, heights, strict=True))
        }
        columns = {
            "share": "of the posterior's mass",
            "log evidence": "of this mode alone by Laplace, nats",
            "copies": "modes of this height, itself among them",
        }
        return Table(rows, columns, (), "mode", digits=4)

    def at_mode(self, k: int) -> LaplacePosterior:
        """The posterior around one mode alone, as if the others were not there.

        :param k: its row in :attr:`modes`.
        :raises BadInput: for a number that no mode has.
        """
        k = check_count("k", k, at_least=0)
        if k >= len(self.states):
            raise BadInput(f"k={k}; expected the number of a mode, 0 to {len(self.states) - 1}: see posterior.modes.")
        return LaplacePosterior(self.states[k], self.status, self.log_evidences, self.restarts, self.failures)

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Median of each site, as ``AutoGuide.median``; the arguments are not looked at."""
        return self.quantiles(0.5)

    def quantiles(self, q: float | Sequence[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Marginal quantiles of unconstrained coordinates, as ``AutoGuide.quantiles`` takes them, of 10,000 draws.

        :return: ``(len(q),) + shape`` for each site; ``shape`` for a single ``q``.
        :raises BadInput: for a ``q`` outside 0 to 1.
        """
        levels = quantile_levels(q).to(self.state.u)
        white = self._white(QUANTILE_DRAWS, torch.Generator().manual_seed(SEED))
        return self._constrained(self._unwhitened(white).quantile(levels, dim=0))

    @property
    def guide(self) -> "ModesGuide":
        """The posterior as a Pyro guide, over all modes."""
        return ModesGuide(self.state, self._mixture)

    @property
    def _conditional_approximations(self) -> ConditionalApproximations:
        """A place at each mode."""
        u = torch.stack([state.u for state in self.states])
        return ConditionalApproximations(
            self.state.problem, self.state.theta.expand(len(u), -1), u, u.new_zeros(len(u))
        )

    def _notes(self, until: float) -> list[str]:
        shares = ", ".join(f"{share:.3g}" for share in self.integral.log_shares.exp().tolist()[:LISTED])
        more = ", ..." if len(self.states) > LISTED else ""
        said = [f"{len(self.states)} modes hold {shares}{more} of the mass: see posterior.modes, posterior.at_mode(k)"]
        if not is_trusted(self.integral):
            said.append(
                f"k-hat of importance sampling over the modes is {self.integral.pareto_k:.2f}: the log evidence is the "
                "sum of Laplace's at each, and no number to compare models by; run NUTS or tempered_smc(posterior)."
            )
        return [*said, *super()._notes(until)]

    def _record(self) -> dict[str, Any]:
        return super()._record() | {"modes": torch.stack([state.u for state in self.states])}

    @classmethod
    def _restored(cls, content: Mapping[str, Any], model: Model, sizes: Mapping[str, int]) -> "MultimodalPosterior":
        state = archive.restore(content, model)
        states = tuple(laplace_state(state.problem, state.theta, u) for u in content["modes"])
        found = of_modes(states, archive.history(content))
        archive.require_equal("log_evidence", found.log_evidence, state.log_evidence, state.problem.joint.dtype)
        archive.require_equal("u", found.state.u, state.u, state.problem.joint.dtype)
        return found


SAME_HEIGHT = 1e-4  # nats between the evidences of copies of a mode
LISTED = 6  # shares in a line of the summary


class ModesGuide(LaplaceGuide):
    """A callable with the model's arguments that samples every integrated site from the mixture over the modes."""

    def __init__(self, state: LaplaceState, mixture: NormalMixture) -> None:
        super().__init__(state)
        precision = torch.stack([p.tril[0] @ p.tril[0].mT for p in mixture.precisions])  # type: ignore[attr-defined]
        normals = dist.MultivariateNormal(mixture.loc, precision_matrix=precision)
        self.gaussian: Any = dist.MixtureSameFamily(dist.Categorical(logits=mixture.log_mixing), normals)


def is_trusted(integral: ModeIntegral) -> bool:
    """Whether the weights say that the integral is a number."""
    return integral.pareto_k <= threshold(integral.num_draws) and math.isfinite(float(integral.log_evidence))


def _sum_of_modes(states: Sequence[LaplaceState]) -> Tensor:
    return torch.stack([state.log_evidence for state in states]).logsumexp(0)


def of_modes(
    states: Sequence[LaplaceState], known: tuple[str, tuple[float, ...], Tensor, tuple[str, ...]]
) -> MultimodalPosterior:
    """The posterior over these modes, the highest evidence first.

    :param known: status, log evidence of each step and restart, and failures of the fit that found the first.
    """
    integral = tour.integral_over(states, SEED)
    total = integral.log_evidence if is_trusted(integral) else _sum_of_modes(states)
    return MultimodalPosterior(replace(states[0], log_evidence=total), *known, states=tuple(states), integral=integral)


def toured(posterior: LaplacePosterior, num_draws: int | None, seed: int) -> LaplacePosterior:
    """The posterior over all modes that can be found; itself where there is no other.

    :param num_draws: from the prior; None: a thousand, fewer of many data.
    """
    num_draws = affordable_draws(posterior._joint, tour.DRAWS) if num_draws is None else num_draws
    states = tour.tour(posterior.state, num_draws, seed)
    if len(states) == 1 or len(states) > tour.MOST_MODES:
        return posterior
    return of_modes(states, (posterior.status, posterior.log_evidences, posterior.restarts, posterior.failures))
