"""A Laplace posterior's draws, weighted by the exact density; leave-one-group-out by the same weights."""

import inspect
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_evidence.errors import BadInput, TooLarge
from pyro_evidence.fitting.process_state import generator_of
from pyro_evidence.laplace.approximation import Problem
from pyro_evidence.numerics import batched, importance, newton
from pyro_evidence.numerics.importance import Smoothed
from pyro_evidence.numerics.quadrature.rules import quasi_normal
from pyro_evidence.posterior.base import NUM_DRAWS, of_all_sites
from pyro_evidence.posterior.diagnostics import TRUSTED
from pyro_evidence.posterior.guide import Frame, emitted, frames_of
from pyro_evidence.posterior.summary import Tabulated
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.settings import check_count, quantile_levels
from pyro_evidence.structure.density import AutogradDensity


@dataclass(frozen=True, eq=False, repr=False)
class CorrectedPosterior(Tabulated):
    """Draws of a posterior with Pareto-smoothed importance weights; made by ``posterior.importance_resampled(...)``.

    Means, quantiles and draws are those of the exact posterior at the fitted hyperparameters, as far as k-hat is
    below 0.7; Laplace's own are those of a normal density.  Vehtari, Simpson, Gelman, Yao and Gabry (2024).

    :ivar joint: the density at fixed hyperparameters, and ``theta`` those hyperparameters, unconstrained.
    :ivar draws: of every site, constrained, each ``(S,) + site shape``, before weighting.
    :ivar smoothed: their weights.

    >>> corrected = posterior.importance_resampled(4000)  # doctest: +SKIP
    >>> corrected.summary()  # doctest: +SKIP
    """

    joint: LogJoint
    theta: Tensor
    draws: dict[str, Tensor]
    smoothed: Smoothed

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(log_evidence={float(self.log_evidence):.6g} +- {self.log_evidence_error:.2g}, "
            f"num_samples={self.num_samples}, effective_sample_size={self.effective_sample_size:.0f}, "
            f"pareto_k={self.pareto_k:.2f})"
        )

    @property
    def _joint(self) -> LogJoint:
        return self.joint

    @property
    def num_samples(self) -> int:
        """Number of draws that were weighted."""
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
        """Number of independent draws that the weighted ones are worth."""
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

    def get_samples(self, num_samples: int = NUM_DRAWS, seed: int | None = None) -> dict[str, Tensor]:
        """Draws, shaped and constrained as by ``MCMC.get_samples()``: the weighted ones resampled, in random order.

        Each is taken as often as its weight says, to within one (systematic resampling).

        :param seed: None takes one from the state of the caller's generator, which stays where it is.
        """
        num_samples = check_count("num_samples", num_samples, at_least=0)
        index = importance.resampled(self.weights, num_samples, generator_of(seed))
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
        levels = quantile_levels(q)
        return {n: importance.weighted_quantiles(v, self.weights, levels) for n, v in self.draws.items()}

    def diagnostics(self) -> dict[str, float]:
        """k-hat, effective sample size, and the log evidence with its standard error, nats."""
        return {
            "pareto_k": self.pareto_k,
            "effective_sample_size": self.effective_sample_size,
            "log_evidence": float(self.log_evidence),
            "log_evidence_se": self.log_evidence_error,
        }

    def _notes(self, until: float) -> list[str]:
        said = [
            f"{self.num_samples} draws, weighted: worth {self.effective_sample_size:.0f} "
            f"({importance.tail_words(self.pareto_k)})",
            f"log evidence = {float(self.log_evidence):.4f} +- {self.log_evidence_error:.4f} nats",
        ]
        if self.pareto_k > importance.threshold(self.num_samples):
            said.append(
                "k-hat is too high: the weights rest on few draws, and these numbers too; run NUTS on its model."
            )
        return said


class WeightedGuide:
    """A guide that draws one of some weighted draws, by its weight; of densities it says nothing."""

    def __init__(self, joint: LogJoint, theta: Tensor, draws: dict[str, Tensor], weights: Tensor) -> None:
        nodes = joint.trace(joint.initial_u, theta).nodes
        self.frames: dict[str, tuple[Frame, ...]] = {n: frames_of(nodes[n]) for n in draws}
        self.event_dims: dict[str, int] = {n: nodes[n]["fn"].event_dim for n in draws}
        self.draws: dict[str, Tensor] = draws
        self.weights = weights

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """One draw of every site; the arguments are not looked at."""
        index = pyro.sample("_weighted_draw", dist.Categorical(self.weights), infer={"is_auxiliary": True})
        values = {}
        for name, draws in self.draws.items():
            event_dim = self.event_dims[name]
            shape = torch.broadcast_shapes(draws.shape[1:], index.shape + (1,) * event_dim)  # plates of others in front
            values[name] = dist.Delta(draws[index].reshape(shape), event_dim=event_dim)
        return emitted(values, self.frames)


INNER = 32  # draws at each outer place
INNER_ALONE = 512  # where there is one place
LARGEST = 200  # coordinates of the Gaussian that is moved for each group
NUMBERS = 2**28  # of masks together
ONE_SHAPE = "loo(...) needs sites with one datum per cell"


@dataclass(frozen=True, repr=False)
class LOOResult:
    r"""Leave-one-group-out, ``log p(y_g | y_{-g})`` for each group; made by ``posterior.loo(...)``.

    :ivar groups: their labels, ``(G,)``.
    :ivar elpd: log predictive density of each group's data given all others, nats, ``(G,)``.
    :ivar pareto_k: of its importance weights, ``(G,)``: above 0.7 that number needs a fit without the group.
    """

    groups: Tensor
    elpd: Tensor
    pareto_k: Tensor

    @property
    def total(self) -> Tensor:
        """Sum over the groups, nats, ``()``."""
        return self.elpd.sum()

    @property
    def standard_error(self) -> Tensor:
        """Standard error of :attr:`total`, from how the groups differ, nats, ``()``."""
        return self.elpd.std() * len(self.elpd) ** 0.5

    @property
    def doubtful(self) -> Tensor:
        """Labels of groups whose k-hat is above 0.7."""
        return self.groups[self.pareto_k > TRUSTED]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(total={float(self.total):.2f} +- {float(self.standard_error):.2f}, "
            f"groups={len(self.groups)}, largest_k={float(self.pareto_k.max()):.2f}, doubtful={len(self.doubtful)})"
        )


@dataclass(frozen=True, eq=False)
class ConditionalApproximations:
    """Hyperparameters and their log weights: one point, or draws from the marginalised sites' density.

    :ivar problem: of what is inside.
    :ivar log_weight: log prior density of the marginalised sites over the density that they were drawn from, ``(K,)``.
    """

    problem: Problem
    theta: Tensor  # (K, T)
    u: Tensor  # (K, D) inner modes with all data
    log_weight: Tensor


def left_out(places: ConditionalApproximations, by: str | Tensor | None) -> LOOResult:
    """Each group's log predictive density given all other data.

    The ratio of the evidences with and without the group: at every outer place Laplace's approximation without it, its
    mode searched from the one with it, as a proposal for importance sampling, Pareto-smoothed.  Params that were
    maximised stay as they are.

    :param by: labels ``(N,)``, or the name of an argument of the model that holds them, or of a plate; None: every
        datum by itself.
    :raises BadInput: for labels that do not fit the data.
    :raises TooLarge: beyond 200 inner coordinates, or where masks of the groups do not fit.
    """
    joint = places.problem.joint
    labels, inverse = _labels(joint, places, by)
    size, numbers = places.u.shape[-1], (len(labels) + 1) * len(inverse) * len(places.u)
    if size > LARGEST or numbers > NUMBERS:
        raise TooLarge(
            f"leaving {len(labels)} groups of {len(inverse)} data out, with {size} coordinates at {len(places.u)} "
            f"outer places, needs Gaussians of {size} x {size} and masks of {numbers:.2g} numbers; expected at most "
            f"{LARGEST} coordinates and {NUMBERS:.2g} numbers. Leave fewer, larger groups out (by=...), or fit to all "
            "data but one group's and ask log_prob(...) for its data."
        )
    masks = torch.nn.functional.one_hot(inverse, len(labels)).T.to(places.u)
    masks = torch.cat([torch.zeros_like(masks[:1]), masks])  # first with all data
    values, shapes = [], []  # log mean of weights, nats, and k-hat, the larger one of places and of draws within them:
    for log_weights in _log_weights(places, masks):  # both at once would take the few of exact Gaussians for a tail
        outer = log_weights.logsumexp(-1) - math.log(log_weights.shape[-1])
        inner = importance.checked((log_weights - outer.unsqueeze(-1)).nan_to_num(nan=-math.inf).reshape(-1))
        marginalised = importance.checked(outer) if len(outer) > 1 else importance.Smoothed(outer, -math.inf)
        values.append(importance.log_mean(marginalised.log_weights) + importance.log_mean(inner.log_weights))
        shapes.append(max(marginalised.pareto_k, inner.pareto_k))
    log_evidence = torch.stack(values)
    return LOOResult(labels, log_evidence[0] - log_evidence[1:], torch.tensor(shapes[1:], dtype=torch.float64))


def _labels(joint: LogJoint, places: ConditionalApproximations, by: str | Tensor | None) -> tuple[Tensor, Tensor]:
    """Distinct labels ``(G,)``, and each datum's position among them ``(N,)``."""
    shape = of_all_sites(joint.pointwise(places.u[0], places.theta[0]), ONE_SHAPE).shape
    found: Any = torch.arange(shape.numel()).reshape(shape) if by is None else by
    if isinstance(by, str):
        arguments = dict(joint.kwargs)
        with suppress(TypeError, ValueError):  # a model without a signature
            arguments = dict(inspect.signature(joint.model).bind(*joint.args, **joint.kwargs).arguments)
        if by in arguments:
            found = arguments[by]
        else:  # the index of every datum in a plate
            nodes = joint.trace(places.u[0], places.theta[0]).nodes
            frames = {f.name: f for n in joint.observed for f in nodes[n]["cond_indep_stack"] if f.vectorized}
            if by not in frames:
                raise BadInput(
                    f"by={by!r}; expected an argument of the model, {sorted(arguments)}, or a plate around the data, "
                    f"{sorted(frames)}, or a tensor of labels, one for each datum."
                )
            frame, event_dims = frames[by], max(nodes[n]["fn"].event_dim for n in joint.observed)
            after = -frame.dim - 1 if len(shape) >= -frame.dim else event_dims
            found = torch.arange(frame.size).reshape(-1, *[1] * after).expand(shape)
    if not isinstance(found, Tensor) or found.numel() != shape.numel():
        given = "by" if isinstance(by, Tensor) else f"by={by!r}"
        given += f" holds {found.numel()} labels" if isinstance(found, Tensor) else ""
        raise BadInput(
            f"{given}; expected a plate's or argument's name, or a tensor, with one label for each of the "
            f"{shape.numel()} data: loo(by=group)."
        )
    return found.reshape(-1).unique(return_inverse=True)


@dataclass(frozen=True, eq=False)
class LeaveOutDensity(AutogradDensity):
    """The density without some data: rows hold hyperparameters, then a mask ``(N,)`` of what is left out."""

    def _one(self, u: Tensor, row: Tensor) -> Tensor:
        theta, mask = row.split([self.joint.hypers.size, len(row) - self.joint.hypers.size])
        pointwise = of_all_sites(self.joint.pointwise(u, theta), ONE_SHAPE)
        return self.joint._one(u, theta) - (mask * pointwise.reshape(-1)).sum()

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        """``log p(other data, u)``, nats, ``(R,)``."""
        row_bytes = self.joint.row_bytes
        return batched.apply(self._one, (u, theta), None if row_bytes is None else 2 * row_bytes, self._one)


def _log_weights(places: ConditionalApproximations, masks: Tensor) -> Tensor:
    """Log importance weights with each mask, ``(G + 1, K, M)``, nats."""
    density, num = LeaveOutDensity(places.problem.joint, None), len(places.u)
    theta = torch.cat([places.theta.repeat(len(masks), 1), masks.repeat_interleave(num, 0)], -1)
    start, tolerance = places.u.repeat(len(masks), 1), places.problem.limits.tolerance
    mode = newton.climb(density, density.precision, start, theta, newton.Limits(tolerance, 30, slack=1e-12))
    tril, info = torch.linalg.cholesky_ex(mode.precision.double())
    sound = (info == 0).unsqueeze(-1)
    noise = quasi_normal(INNER if num > 1 else INNER_ALONE, start.shape[-1]).to(start)
    away = torch.linalg.solve_triangular(tril.mT, noise.T.expand(len(start), -1, -1), upper=True).mT  # (R, M, D)
    u = (mode.u.unsqueeze(1) + away).flatten(0, 1)
    with torch.no_grad():
        log_joint = density.log_joint(u, theta.repeat_interleave(len(noise), 0)).reshape(len(start), -1)
    log_normal = -0.5 * (noise.square() + math.log(math.tau)).sum(-1)
    log_proposal = tril.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=True) + log_normal
    found = log_joint - log_proposal + places.log_weight.repeat(len(masks)).unsqueeze(-1)
    return torch.where(sound & torch.isfinite(found), found, -torch.inf).reshape(len(masks), num, -1)
