"""A Laplace posterior's draws, weighted by the exact density: the same face, without Laplace's error in shape."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.laplace.hyperparameters.uncertainty import HyperparameterCovariance
from pyro_evidence.laplace.summary.shown import Shown
from pyro_evidence.numerics import importance
from pyro_evidence.numerics.importance import Smoothed
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.settings import check_count, seeded

Frame = tuple[str, int, int]  # a plate's name, size and dim


@dataclass(frozen=True, eq=False, repr=False)
class CorrectedPosterior(Shown):
    """Draws of a posterior with Pareto-smoothed importance weights; made by ``posterior.corrected(...)``.

    Means, quantiles and draws are those of the exact posterior at the fitted hyperparameters, as far as k-hat is
    below 0.7; Laplace's own are those of a normal density.  Vehtari, Simpson, Gelman, Yao and Gabry (2024).

    :ivar joint: the density at fixed hyperparameters, and ``theta`` those hyperparameters, unconstrained.
    :ivar draws: of every site, constrained, each ``(S,) + site shape``, before weighting.
    :ivar smoothed: their weights.

    >>> corrected = posterior.corrected(4000)  # doctest: +SKIP
    >>> corrected.summary()  # doctest: +SKIP
    """

    _gaussian: ClassVar[bool] = False

    joint: LogJoint
    theta: Tensor
    draws: dict[str, Tensor]
    smoothed: Smoothed

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(log_evidence={float(self.log_evidence):.6g} +- {self.log_evidence_error:.2g}, "
            f"num_draws={self.num_draws}, effective_sample_size={self.effective_sample_size:.0f}, "
            f"pareto_k={self.pareto_k:.2f})"
        )

    @property
    def _joint(self) -> LogJoint:
        return self.joint

    @property
    def num_draws(self) -> int:
        """How many draws were weighted."""
        return len(self.smoothed.log_weights)

    @property
    def pareto_k(self) -> float:
        """Shape of the weights' tail: below 0.7 the weighted numbers can be used; ``-inf`` where all are alike."""
        return self.smoothed.pareto_k

    @property
    def weights(self) -> Tensor:
        """Normalised weights of :attr:`draws`, shape ``(S,)``."""
        return self.smoothed.weights

    @property
    def effective_sample_size(self) -> float:
        """How many independent draws the weighted ones are worth."""
        return float(importance.effective_sample_size(self.smoothed.log_weights))

    @property
    def log_evidence(self) -> Tensor:
        """``log p(D | hyperparameters)`` by importance sampling, nats, shape ``()``."""
        return importance.log_mean(self.smoothed.log_weights)

    @property
    def log_evidence_error(self) -> float:
        """Standard error of :attr:`log_evidence`, nats."""
        return float(importance.standard_error(self.smoothed.log_weights))

    @property
    def hyperparameters(self) -> dict[str, Tensor]:
        """Constrained values by the model's own names, at which all this holds."""
        params, sites = self.joint.split_hypers(self.theta)
        return {n: v.detach() for n, v in (params | sites).items()}

    @property
    def model(self) -> Model:
        """The user's model with the hyperparameters put in as constants."""
        return self.joint.substituted(self.theta)

    @property
    def guide(self) -> "WeightedGuide":
        """A guide that gives the draws by weight: ``Predictive(corrected.model, guide=corrected.guide, ...)``."""
        own = {n: self.draws[n] for n in self.joint.latents.names if n in self.draws}
        return WeightedGuide(self.joint, self.theta, own, self.weights)

    def get_samples(self, num_samples: int = 1000, seed: int = 0) -> dict[str, Tensor]:
        """Draws, shaped and constrained as by ``MCMC.get_samples()``: the weighted ones resampled, in random order.

        Each is taken as often as its weight says, to within one (systematic resampling).
        """
        num_samples = check_count("num_samples", num_samples, at_least=0)
        index = resampled(self.weights, num_samples, seeded(seed))
        return {n: v[index] for n, v in self.draws.items()}

    def mean(self) -> dict[str, Tensor]:
        """Weighted mean of each site, in its constrained space."""
        return {n: torch.tensordot(self.weights.to(v), v, 1) for n, v in self.draws.items()}

    def std(self) -> dict[str, Tensor]:
        """Weighted standard deviation of each site, in its constrained space."""
        away = {n: (v - m).square() for (n, v), m in zip(self.draws.items(), self.mean().values(), strict=True)}
        return {n: torch.tensordot(self.weights.to(v), v, 1).sqrt() for n, v in away.items()}

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Weighted median of each site, as ``AutoGuide.median``; the arguments are not looked at."""
        return self.quantiles(0.5)

    def quantiles(self, q: float | Sequence[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Weighted marginal quantiles in constrained space.

        :return: ``(len(q),) + shape`` for each site; ``shape`` for a single ``q``.
        :raises BadInput: for a ``q`` outside 0 to 1.
        """
        levels = torch.as_tensor(q, dtype=torch.float64)
        if not bool(((levels >= 0.0) & (levels <= 1.0)).all()):
            raise BadInput(f"quantiles({q}): expected probabilities between 0 and 1.")
        return {n: weighted_quantiles(v, self.weights, levels) for n, v in self.draws.items()}

    def diagnostics(self) -> dict[str, float]:
        """k-hat, effective sample size, and the log evidence with its standard error, nats."""
        return {
            "pareto_k": self.pareto_k,
            "effective_sample_size": self.effective_sample_size,
            "log_evidence": float(self.log_evidence),
            "log_evidence_se": self.log_evidence_error,
        }

    def _below(self, spread: HyperparameterCovariance | None) -> list[str]:
        said = [
            f"{self.num_draws} draws, weighted: worth {self.effective_sample_size:.0f} (k-hat {self.pareto_k:.2f})",
            f"log evidence = {float(self.log_evidence):.4f} +- {self.log_evidence_error:.4f} nats",
        ]
        if self.pareto_k > importance.threshold(self.num_draws):
            said.append(
                "k-hat is too high: the weights rest on few draws, and these numbers too; run NUTS on corrected.model."
            )
        return said


class WeightedGuide:
    """A guide that draws one of some weighted draws, by its weight; of densities it says nothing."""

    def __init__(self, joint: LogJoint, theta: Tensor, draws: Mapping[str, Tensor], weights: Tensor) -> None:
        nodes = joint.trace(joint.initial_u, theta).nodes
        self.frames: dict[str, tuple[tuple[str, int, int], ...]] = {
            n: tuple((f.name, f.size, f.dim) for f in _plates(nodes[n])) for n in draws
        }
        self.event_dims: dict[str, int] = {n: nodes[n]["fn"].event_dim for n in draws}
        self.draws: dict[str, Tensor] = dict(draws)
        self.weights = weights

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """One draw of every site; the arguments are not looked at."""
        index = pyro.sample("_weighted_draw", dist.Categorical(self.weights), infer={"is_auxiliary": True})
        frames: list[Frame] = sorted({frame for frames in self.frames.values() for frame in frames})
        plates = {name: pyro.plate(name, size, dim=dim) for name, size, dim in frames}
        return {n: self._site(n, v, index, plates) for n, v in self.draws.items()}

    def _site(self, name: str, draws: Tensor, index: Tensor, plates: dict[str, Any]) -> Tensor:
        event_dim = self.event_dims[name]
        shape = torch.broadcast_shapes(draws.shape[1:], index.shape + (1,) * event_dim)  # plates of others in front
        value = draws[index].reshape(shape)
        with ExitStack() as stack:
            for plate, _, _ in self.frames[name]:
                stack.enter_context(plates[plate])
            return pyro.sample(name, dist.Delta(value, event_dim=event_dim))


def _plates(node: Any) -> list[Any]:
    return [f for f in node["cond_indep_stack"] if f.vectorized]


def resampled(weights: Tensor, num_samples: int, generator: torch.Generator) -> Tensor:
    """Positions of draws taken by systematic resampling, in random order, shape ``(num_samples,)``.

    >>> resampled(torch.tensor([0.0, 1.0, 0.0]), 2, torch.Generator())
    tensor([1, 1])
    """
    ends = weights.double().cumsum(0).cpu()
    offset = torch.rand((), generator=generator, dtype=torch.float64)
    points = (torch.arange(num_samples, dtype=torch.float64) + offset) / max(num_samples, 1) * ends[-1]
    index = torch.searchsorted(ends, points).clamp(max=len(ends) - 1)
    return index[torch.randperm(num_samples, generator=generator)].to(weights.device)


def weighted_quantiles(values: Tensor, weights: Tensor, levels: Tensor) -> Tensor:
    """Quantiles of weighted numbers, element by element.

    Interpolated between the middles of the weights' steps, so that equal weights give Hazen's quantiles.

    :param values: shape ``(S,) + shape``.
    :param weights: normalised, shape ``(S,)``.
    :param levels: shape ``()`` or ``(Q,)``.
    :return: ``levels.shape + shape``.

    >>> weighted_quantiles(torch.tensor([3.0, 1.0, 2.0]), torch.full((3,), 1 / 3), torch.tensor(0.5))
    tensor(2.)
    """
    columns, order = values.reshape(len(values), -1).mT.contiguous().sort(-1)
    mass = weights.to(columns)[order]
    middle = mass.cumsum(-1) - 0.5 * mass
    wanted = levels.to(columns).reshape(-1).expand(len(columns), -1).contiguous()
    right = torch.searchsorted(middle, wanted).clamp(1, len(values) - 1)
    low, high = middle.gather(-1, right - 1), middle.gather(-1, right)
    share = (wanted - low) / torch.where(high > low, high - low, 1.0)
    below, above = columns.gather(-1, right - 1), columns.gather(-1, right)
    return torch.lerp(below, above, share.clamp(0.0, 1.0)).mT.reshape((*levels.shape, *values.shape[1:]))
