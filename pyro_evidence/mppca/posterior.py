"""Posterior of a mixture of probabilistic PCA, its principal subspaces in one form only."""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput, NotAMode, TooLarge
from pyro_evidence.files import Array, Double
from pyro_evidence.fitting.process_state import generator_of
from pyro_evidence.laplace.approximation import LaplaceState
from pyro_evidence.laplace.evidence_error import EvidenceError
from pyro_evidence.mixture.posterior import ComponentPosterior
from pyro_evidence.mixture.recognise import with_components
from pyro_evidence.mppca import curvature, expectation, orbit
from pyro_evidence.mppca.data import Observations
from pyro_evidence.mppca.expectation import FactorAnalysers
from pyro_evidence.mppca.recognise import MPPCAStructure, own_model, recognise_mppca
from pyro_evidence.numerics import importance
from pyro_evidence.numerics.linalg import ROUNDED
from pyro_evidence.posterior import archive, diagnostics
from pyro_evidence.posterior.base import NUM_DRAWS
from pyro_evidence.precision.dense import Dense
from pyro_evidence.program.checks import describe, require_kept
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.settings import check_count, check_seed, seeded

DRAWS = 4_000  # for importance ratios, by default
APART = 1e-6  # relative difference of variances below which axes can turn into one another


@dataclass(frozen=True, eq=False)
class PrincipalSubspace:
    """The principal axes of one component.

    :ivar axes: orthonormal columns, the largest entry of each positive, shape ``(m, q)``.
    :ivar variances: of the data along each axis, noise included, descending, shape ``(q,)``.
    :ivar noise_variance: of the directions that are left over, mean over outputs, shape ``()``.
    :ivar groups: axes with one number have equal variances: only their span is determined, shape ``(q,)``.
    """

    axes: Tensor
    variances: Tensor
    noise_variance: Tensor
    groups: Tensor

    @property
    def is_determined(self) -> bool:
        """Whether every axis is, up to its sign; otherwise only the spans of the groups are."""
        return len(self.groups.unique()) == len(self.groups)

    def __str__(self) -> str:
        found = [f"axis {i}: variance {float(v):.4g}" for i, v in enumerate(self.variances)]
        tied = [int(g) for g, n in zip(*self.groups.unique(return_counts=True), strict=True) if n > 1]
        names = [str((self.groups == g).nonzero().flatten().tolist()) for g in tied]
        said = [f"axes {n} have equal variances: their rotation is undetermined, only their span is" for n in names]
        return "\n".join(found + said)


def principal_subspace(W: Tensor, beta: Tensor) -> PrincipalSubspace:
    """Canonical form of loadings ``(m, q)`` with noise precisions ``(m,)``; columns of zeros are left out."""
    U, lengths, _ = torch.linalg.svd(W, full_matrices=False)
    kept = lengths > ROUNDED * lengths.amax() if len(lengths) else lengths > 0  # rounding leaves zeros a length
    U, lengths = U[:, kept], lengths[kept]
    size = U.abs()
    place = (size >= (1.0 - APART) * size.amax(0)).long().argmax(0, keepdim=True)  # the first of those as large
    sign = U.gather(0, place).sign()
    noise = beta.reciprocal().mean()
    squares = lengths.square()
    new = torch.ones_like(squares, dtype=torch.bool)
    new[1:] = squares[:-1] - squares[1:] > APART * squares[:-1]
    return PrincipalSubspace(U * sign, squares + noise, noise, new.long().cumsum(0) - 1)


@dataclass(frozen=True, eq=False)
class LatentCoordinates:
    """Where data lie in the latent space of each component.

    :ivar responsibilities: ``p(component | datum)``, shape ``(N, K)``.
    :ivar mean: posterior mean of x given each component, shape ``(N, K, q)``; Husmeier (2000), eq. 3.18.
    :ivar covariance: its posterior covariance, shape ``(N, K, q, q)``; eq. 3.17.
    """

    responsibilities: Tensor
    mean: Tensor
    covariance: Tensor

    @property
    def component(self) -> Tensor:
        """The likeliest component of each datum, shape ``(N,)``."""
        return self.responsibilities.argmax(-1)


BY_NAME = {"refusal": str, "log_evidence_occam": float, "limit": str}  # as in the posterior
OWN = BY_NAME | {
    "log_evidence": Double("", finite=False),
    "analysers": {
        "W": Double("1 K m q"),
        "mu": Double("1 K m"),
        "beta": Double("1 K m"),
        "log_mixing": Double("1 K", finite=False),
        "alpha": Double("1 K q", finite=False),
        "columns": Array("1 K q", torch.bool),
    },
}


@dataclass(frozen=True, eq=False, repr=False)
class MPPCAPosterior(ComponentPosterior):
    """A Laplace posterior over the loadings of a mixture of probabilistic PCA, and what the mixture says about data.

    Pruned components keep their place, with mixing 0; pruned columns are zero, with an infinite precision.  Entries of
    data that are nan are missing and are integrated out.

    :ivar recognised: the model's structure.
    :ivar analysers: all parameters, one row, in the model's units.
    :ivar refusal: why there is no log evidence; empty where there is one.
    :ivar log_evidence_occam: with an Occam factor for all that is maximised, means included, nats: for choosing the
        number of components.
    :ivar limit: what kept the number of components from growing, if anything did.

    >>> import torch
    >>> from pyro_evidence import EvidenceEM
    >>> from pyro_evidence.models.mppca import mppca
    >>> Y = torch.randn(60, 1) @ torch.randn(1, 4) + 0.1 * torch.randn(60, 4)
    >>> posterior = EvidenceEM(mppca(1, 2)).run(Y)
    >>> tuple(posterior.reconstruct(Y).shape)
    (60, 4)
    """

    schema: ClassVar[Mapping[str, Any]] = archive.LAPLACE | OWN
    _has_orbits: ClassVar[bool] = True

    _: KW_ONLY
    recognised: MPPCAStructure
    analysers: FactorAnalysers
    refusal: str = ""
    log_evidence_occam: float = float("nan")
    limit: str = ""

    def __repr__(self) -> str:
        evidence = self.refusal or f"log_evidence={float(self.state.log_evidence):.6g}"
        columns = self.num_latents.tolist()
        return f"MPPCAPosterior(num_components={self.num_components}, num_latents={columns}, {evidence})"

    @property
    def log_evidence(self) -> Tensor:
        """``log p(D | hyperparameters)``, loadings integrated over their orbits, nats, total, shape ``()``.

        :raises NotAMode: where a column is as short as it is uncertain, so that its orbit has no volume.
        """
        if self.refusal:
            raise NotAMode(self.refusal)
        return self.state.log_evidence

    @property
    def hyperparameters(self) -> dict[str, Tensor]:
        """Constrained values by the model's own names; the precision of a pruned column is ``inf``."""
        found, alpha, hypers = super().hyperparameters, self.recognised.alpha, self.recognised.joint.hypers
        gone = ~self.analysers.columns[0] & self.active.unsqueeze(-1)
        kept, lost = (alpha.totals(hypers, x.double()) for x in (~gone, gone))
        pruned = {n: ((lost[n] > 0) & (kept[n] == 0)).reshape(found[n].shape) for n in lost}
        return found | {n: torch.where(where, torch.inf, found[n]) for n, where in pruned.items()}

    @property
    def active(self) -> Tensor:
        """Components that are not pruned, shape ``(K,)`` bool."""
        return self.analysers.active[0]

    @property
    def num_latents(self) -> Tensor:
        """Number of columns that are left in each component, shape ``(K,)``; 0 in pruned components."""
        return (self.analysers.columns[0] & self.active.unsqueeze(-1)).sum(-1)

    @property
    def gamma(self) -> dict[str, Tensor]:
        """Number of well-determined loadings of each prior precision, in the hyperparameter's shape.

        From the curvature across the orbit: turning the latent space is not determined, and not counted.
        """
        each = orbit.well_determined_columns(self.state.precision, self.analysers)
        return self.recognised.alpha.totals(self.recognised.joint.hypers, each)

    def _about_means(self, Y: Tensor | None) -> tuple[Tensor, FactorAnalysers]:
        """Data, the training data by default, checked, and parameters, about the mean of the components.

        Squares of data far from zero would lose digits.
        """
        own = self.recognised.Y
        if Y is None:
            require_kept(self._joint, "a method without data")
        Y = own if Y is None else Y
        if not isinstance(Y, Tensor) or Y.dim() != 2 or Y.shape[1] != own.shape[1] or not Y.is_floating_point():
            raise BadInput(f"got {describe((Y,), {})}; expected floats Y (N, {own.shape[1]}), nan where missing.")
        if bool(Y.isinf().any()):
            raise BadInput(f"Y, shape {tuple(Y.shape)}, contains inf; expected numbers, or nan where one is missing.")
        origin = self.analysers.log_mixing[0].exp() @ self.analysers.mu[0]
        return Y.detach().double() - origin, replace(self.analysers, mu=self.analysers.mu - origin)

    def log_prob(self, Y: Tensor | None = None) -> Tensor:
        """Log density of the observed part of each datum at the mode, nats, shape ``(N,)``.

        :raises BadInput: on anything but floats ``(N, m)``.
        """
        return expectation.log_joint(*self._about_means(Y))[0].logsumexp(-1)

    def log_likelihood(self, Y: Tensor | None = None) -> dict[str, Tensor]:
        """Pointwise log density at the mode, :meth:`log_prob`, by the name of the observed site."""
        return {self._joint.observed[0]: self.log_prob(Y)}

    def responsibilities(self, Y: Tensor | None = None) -> Tensor:
        """``p(component | observed part of the datum)`` at the mode, shape ``(N, K)``."""
        return expectation.log_joint(*self._about_means(Y))[0].softmax(-1)

    def transform(self, Y: Tensor | None = None) -> LatentCoordinates:
        """Latent coordinates of data, with their covariances and the components' responsibilities."""
        found = expectation.latent(*self._about_means(Y))
        return LatentCoordinates(found.log_joint[0].softmax(-1), found.mean[0], found.covariance[0])

    def reconstruct(self, Y: Tensor | None = None) -> Tensor:
        """Mean of the data without noise, given their observed parts, shape ``(N, m)``; fills what is missing."""
        found, analysers = expectation.latent(*self._about_means(Y)), self.analysers
        each = torch.einsum("kia,nka->nki", analysers.W[0], found.mean[0]) + analysers.mu[0]
        return torch.einsum("nk,nki->ni", found.log_joint[0].softmax(-1), each)

    def sample(self, num_samples: int, seed: int | None = 0) -> Tensor:
        """Draws of data at the mode, shape ``(S, m)``.

        :raises BadInput: unless ``num_samples`` is a whole number of at least 1.
        """
        num_samples = check_count("num_samples", num_samples)
        generator, analysers = seeded(seed), self.analysers
        z = torch.multinomial(analysers.log_mixing[0].exp().cpu(), num_samples, replacement=True, generator=generator)
        x, noise = (
            torch.randn(num_samples, size, generator=generator, dtype=torch.float64).to(analysers.W)
            for size in analysers.W.shape[:1:-1]
        )
        mean = (analysers.W[0, z] @ x.unsqueeze(-1)).squeeze(-1) + analysers.mu[0, z]
        return mean + noise * analysers.beta[0, z].rsqrt()

    def principal_subspaces(self) -> list[PrincipalSubspace | None]:
        """Principal axes of each component in canonical form; None where it is pruned."""
        analysers = self.analysers
        return [
            principal_subspace(analysers.W[0, k], analysers.beta[0, k]) if on else None
            for k, on in enumerate(self.active)
        ]

    def get_samples(self, num_samples: int = NUM_DRAWS, seed: int | None = None) -> dict[str, Tensor]:
        """Independent draws of the loadings over their whole orbits, ``(S, K, m, q)`` by the site's name."""
        return self._constrained(self._over_orbits(check_count("num_samples", num_samples, at_least=0), seed))

    def _over_orbits(self, num_samples: int, seed: int | None) -> Tensor:
        """Draws of the loadings, ``(S, K m q)``."""
        generator, analysers, precision = generator_of(seed), self.analysers, self.state.precision
        d = precision.unwhiten(self._white(num_samples, generator))
        d = orbit.across(d, analysers) if isinstance(precision, Dense) else d
        W = analysers.W + d.reshape(num_samples, *analysers.W.shape[1:])
        return orbit.turned(W, analysers, generator).flatten(1)

    def _weighed(self, num_samples: int, seed: int, kept: bool = True) -> tuple[Tensor, Tensor]:
        return self._over_orbits(num_samples, seed), self.log_weights(num_samples, seed)

    def log_weights(self, num_samples: int = DRAWS, seed: int = 0) -> Tensor:
        """Log ratios of the exact density to the approximation, orbits integrated in both, nats, ``(S,)``.

        :raises TooLarge: when there are more loadings than a dense curvature is kept for.
        """
        num_samples = check_count("num_samples", num_samples)
        check_seed(seed)
        require_kept(self._joint, "importance sampling")
        precision = self.state.precision
        if not isinstance(precision, Dense):
            raise TooLarge(
                f"{self.analysers.W.numel()} loadings are too many for the dense curvature that importance ratios "
                f"need. Fit fewer components or latents."
            )
        return orbit.log_weights(*self._about_means(None), precision, num_samples, seed)

    @cached_property
    def log_evidence_error(self) -> EvidenceError:
        """The gain of importance sampling over the orbits beside the log evidence, and its standard error, nats.

        :raises TooLarge: as :meth:`log_weights`.
        """
        found = importance.checked(self.log_weights())
        gain = float(importance.log_mean(found.log_weights) - self.log_evidence)
        method = f"importance sampling over orbits by {DRAWS:,} draws, {importance.tail_words(found.pareto_k)}"
        error = EvidenceError.of(gain, "", 0.0, 0.0, method)
        return error.beside(float(importance.standard_error(found.log_weights)))

    @property
    def _is_checkable(self) -> bool:
        return isinstance(self.state.precision, Dense) and not self.refusal and self._joint.has_data

    def _check(self, until: float) -> dict[str, Any]:
        """Check of the log evidence by fewer draws where time is short: chains do not go round the orbits."""
        return diagnostics.most_until(partial(self._importance_check, seed=0), self._num_checked, until)

    def _described(self, check: dict[str, Any]) -> dict[str, Any]:
        """And components and columns that are left; without a dense curvature what comes from ratios is nan."""
        found = super(MPPCAPosterior, replace(self, refusal=""))._described(check)  # a log evidence of nan is told so
        if self.refusal:
            found["failed_restarts"].append(self.refusal)
        if not isinstance(self.state.precision, Dense):
            found["curvature"] = "responsibilities held"
        if self.limit and self.num_components > 1:
            more = f"more components are not tried: {self.limit}. Offer some more, until one is left out"
            found["notes"] = [*found["notes"], more]
        numbers = {"num_components": self.num_components, "num_components_limited_by": self.limit}
        return found | numbers | {"num_latents": self.num_latents.tolist()}

    def _record(self) -> dict[str, Any]:
        analysers = {f.name: getattr(self.analysers, f.name) for f in fields(FactorAnalysers)}
        return super()._record() | {name: getattr(self, name) for name in BY_NAME} | {"analysers": analysers}

    @classmethod
    def _restored(cls, content: Mapping[str, Any], model: Model, sizes: Mapping[str, int]) -> "MPPCAPosterior":
        grown = with_components(model, sizes["K"])
        model = grown if own_model(grown) is None else grown.settled()
        state, analysers = archive.restore(content, model), FactorAnalysers(**content["analysers"])
        structure, held = recognise_mppca(LogJoint(model, content["args"], content["kwargs"])), content["held"]
        joint = structure.joint  # whose own hyperparameters, of what is pruned, were those of a few rows
        joint.initial_theta = joint.hypers.flat({n: held[n].double() for n in joint.hypers.names})
        _require_agreement(state, structure, analysers)
        if bool(content["refusal"]) != bool(state.log_evidence.isnan()):
            raise BadInput(
                f"log_evidence is {float(state.log_evidence):.10g}, expected "
                f"nan with a refusal, not {content['refusal']!r:.60}."
            )
        own = {name: content[name] for name in BY_NAME}
        return cls(state, *archive.history(content), recognised=structure, analysers=analysers, **own)


def _require_agreement(state: LaplaceState, structure: MPPCAStructure, analysers: FactorAnalysers) -> None:
    """Refuse parameters that are not those of a state, and a log evidence that is not theirs.

    :raises BadInput: naming what differs.
    """
    pairs = {"W": (analysers.W.flatten(), state.u)}
    pairs |= {name: (value, state.problem.joint.held[name]) for name, value in structure.params(analysers).items()}
    for name, (own, of_state) in pairs.items():
        if own.shape != of_state.shape or not torch.allclose(own, of_state.to(own), equal_nan=True):
            raise BadInput(f"the analysers' {name} is not that of the mode in the same file; expected one fit's.")
    if not isinstance(state.precision, Dense) or bool(state.log_evidence.isnan()):  # there is none, for a reason
        return
    split = curvature.gauge(curvature.loading_precision(Observations.resident(structure.Y), analysers), analysers)
    width = torch.where(analysers.on, 0.0, (analysers.alpha / math.tau).log()).sum()  # of pruned columns, at zero
    log_joint = state.log_joint - 0.5 * analysers.W.shape[-2] * width
    found = curvature.orbit_laplace(log_joint, split, analysers)
    archive.require_equal("log_evidence", found, state.log_evidence, torch.float64)
