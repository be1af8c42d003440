"""The posterior by Laplace's approximation: evidence, hyperparameters, draws, a guide, and diagnostics."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from pyro import poutine
from torch import Tensor

from pyro_evidence.display import PROB, Axes
from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.iterate import Fit
from pyro_evidence.fitting.process_state import generator_of, own_random_numbers, put_into_store, without_validation
from pyro_evidence.laplace import uncertainty
from pyro_evidence.laplace.approximation import LaplaceState, Problem, laplace_problem
from pyro_evidence.laplace.evidence_error import EvidenceError, evidence_error, is_in_blocks, messages
from pyro_evidence.laplace.mean_shift import at_mean
from pyro_evidence.laplace.mode_checks import rounded_inside
from pyro_evidence.laplace.type2 import FEW, TypeII
from pyro_evidence.laplace.uncertainty import HyperparameterCovariance
from pyro_evidence.nested.inner import profile_at
from pyro_evidence.nested.inside import InsideCorrection, LaplaceNodes, inside_correction
from pyro_evidence.nested.joint_posterior import Proposal
from pyro_evidence.nested.skewness import SkewedNormal, skewed_normal
from pyro_evidence.numerics import importance
from pyro_evidence.numerics.batched import BATCH_NUMBERS
from pyro_evidence.posterior import archive, diagnostics
from pyro_evidence.posterior.base import equal_weights, pairs_in_parts, white_noise
from pyro_evidence.posterior.diagnostics import MANY, NUM_WEIGHTED, Blocks, check_weighted
from pyro_evidence.posterior.guide import CoordinateDistribution, LaplaceGuide
from pyro_evidence.posterior.predict import PredictivePosterior
from pyro_evidence.posterior.process import ProcessGuide, draw_curve, latents_at
from pyro_evidence.posterior.reweighted import ConditionalApproximations, CorrectedPosterior, LOOResult, left_out
from pyro_evidence.posterior.sensitivity import Sensitivity, at_mode, sensitivity
from pyro_evidence.posterior.summary import Rows, TableLayout, Tabulated, hyper_rows
from pyro_evidence.precision.choices import exact_hessian, gauss_newton
from pyro_evidence.precision.dense import Dense
from pyro_evidence.precision.gaussian_process import LatentPrecision
from pyro_evidence.program.checks import Arguments, require_kept, tensors
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.program.parameters import DUMMY_SITE
from pyro_evidence.program.predictors import LikelihoodTerm
from pyro_evidence.program.simulate import ROWS, NewLevels, affordable_draws, largest_row, rows_at_once
from pyro_evidence.program.sites import Values
from pyro_evidence.settings import check_count, check_probability
from pyro_evidence.structure.symmetries import APART, Turn, are_nearest, described, images, mirrors, turned_by

TOLD = 0.05  # nats that importance sampling inside adds, at which the summary says so
MOST_NUMBERS = 2**26  # in the draws that a check keeps


@dataclass(frozen=True, eq=False, repr=False)
class LaplacePosterior(PredictivePosterior, Tabulated, archive.Saved):
    """The Gaussian approximation at the posterior mode, in unconstrained space, and its evidence.

    Evidence, ``mode`` and covariance are Laplace's.  Draws, quantiles, the table, predictions and the guide are of
    that Gaussian skewed by its third derivatives, with marginals by importance weights, up to fifty coordinates, of
    data in memory and where nothing is maximised (:mod:`pyro_evidence.nested.skewness`); else about the posterior
    mean by the next order of Laplace's series (:mod:`pyro_evidence.laplace.mean_shift`), with Laplace's standard
    deviations.  Not corrected is what ``predict`` says of a Gaussian process at new inputs, which is that of
    ``predict_latent``.

    :ivar state: the last iterate; every number below is of this one.
    :ivar status: why the fit stopped, as a sentence.
    :ivar log_evidences: log evidence (plus log hyperprior, where sites were maximised) after each step, nats.
    :ivar restarts: log evidence each restart arrived at, shape ``(R,)``; nan where it failed.
    :ivar failures: what the failed restarts said, and which modes are not counted.

    >>> import torch
    >>> from pyro_evidence import LaplaceEvidence
    >>> from pyro_evidence.models.basis import Linear
    >>> from pyro_evidence.models.regression import regression
    >>> X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    >>> t = 2.0 * X[:, 0] + 0.3 * torch.cos(40.0 * X[:, 0])
    >>> posterior = LaplaceEvidence(regression(Linear())).run(X, t)
    >>> tuple(posterior.get_samples(100, seed=0)["w"].shape)
    (100, 2)
    >>> posterior.diagnostics(1000)["status"]
    'converged'
    """

    state: LaplaceState
    status: str
    log_evidences: tuple[float, ...]
    restarts: Tensor
    failures: tuple[str, ...] = ()

    schema: ClassVar[Mapping[str, Any]] = archive.LAPLACE
    _normal: ClassVar[bool] = True
    _in_blocks: ClassVar[bool] = True
    _maximises_evidence: ClassVar[bool] = True  # not what else may stand for it in the loop
    _is_checkable: ClassVar[Any] = True  # whether there are draws to weigh, and data to weigh them by
    _has_orbits: ClassVar[bool] = False  # along which the density does not change, and its log weights integrate
    _about_mode: ClassVar[bool] = False  # whether draws are, where others are about the mean
    _trusts_weights: ClassVar[Any] = None  # of importance sampling over modes; None where the log evidence asks none
    has_unlike_modes: ClassVar[Any] = False  # whether there are modes of other heights

    def __repr__(self) -> str:
        sites, hypers = list(self.mode), list(self.hyperparameters)
        return (
            f"{type(self).__name__}(log_evidence={float(self.log_evidence):.6g}, sites={sites}, "
            f"hyperparameters={hypers}, status={self.status!r})"
        )

    @property
    def _joint(self) -> LogJoint:
        return self.state.problem.joint

    @property
    def _is_normal(self) -> bool:
        return self._normal and not isinstance(self.state.precision, LatentPrecision) and self._skewed is None

    @property
    def log_evidence(self) -> Tensor:
        """``log p(D | hyperparameters)`` by Laplace's approximation, nats, total, shape ``()``.

        All images of the mode are counted where signs of latents can be turned without any change of the density.
        Where latents multiply one another, or are integrated numerically around the others, what Laplace leaves out is
        added by importance sampling, of what independent blocks share, these by quadrature, as far as its k-hat is
        below 0.7 and its error below what it adds.
        """
        found, log_images = self._left_out, len(self._mirrors) * math.log(2.0)
        if found is not None and found.is_trusted:
            return self.state.log_evidence + found.gain + log_images
        return self.state.log_evidence + log_images + (self._log_nearest if log_images else 0.0)

    @property
    def log_hyperposterior(self) -> Tensor:
        """Log evidence plus the log prior density of maximised latent sites, nats, shape ``()``."""
        return self.log_evidence + self.state.log_hyperprior

    @property
    def hyperparameters(self) -> dict[str, Tensor]:
        """Constrained values by the model's own names; a pruned precision is ``inf``, a pruned scale 0."""
        theta, active = self.state.theta, self.state.problem.active
        if not bool(active.all()) and (groups := self.state.problem.structure.groups) is not None:
            pruned = groups.member[~active].unique()
            theta = theta.index_copy(0, pruned, groups.power[pruned].sign() * math.inf)
        params, sites = self._joint.split_hypers(theta)
        return {n: v.detach() for n, v in (params | sites).items()}

    @property
    def candidate_hyperparameters(self) -> tuple[str, ...]:
        """Latent sites that might be integrated numerically too, the most promising first."""
        return ()

    @property
    def proposal(self) -> Proposal | None:
        """The posterior over all latents, as importance sampling draws from it; None for a single Gaussian."""
        return None

    @property
    def structure(self) -> Any:
        """Structure of the curvature, and how it was handled: one sentence.

        A model of more than 200 coordinates whose terms touch few of them each is taken apart: blocks are eliminated,
        level by level, what is left is dense, and the whole is certified by products with the true Hessian.
        """
        return self.state.problem.sentence

    @property
    def gamma(self) -> dict[str, Tensor]:
        """Number of well-determined parameters of each precision that a hyperparameter holds; 0 where pruned.

        MacKay (1992), eq. 4.9.  Only hyperparameters that are recognised as precisions (or variances, scales,
        log precisions) of Gaussian latents are listed; each entry has the hyperparameter's shape.
        """
        hypers, gamma = self._joint.hypers, self.state.gamma
        parts = {p.name: gamma[hypers.slices[p.name]] for p in hypers}
        return {p.name: parts[p.name].reshape(p.unconstrained_shape) for p in hypers if not parts[p.name].isnan().all()}

    @property
    def pruned(self) -> dict[str, Tensor]:
        """Which elements of each site were switched off, bool masks of the sites' unconstrained shapes."""
        found = self._joint.latents.unconstrained(~self.state.problem.active)
        return {site: cells for site, cells in found.items() if site != DUMMY_SITE}

    @property
    def _mode_at(self) -> tuple[Tensor, Tensor]:
        return self.state.u, self.state.theta

    @property
    def _laplace(self) -> "LaplacePosterior":
        return self

    @property
    def _num_maximised(self) -> int:
        hypers = self._joint.hypers
        alive = [v.isfinite() & (v != 0.0) for n, v in self.hyperparameters.items() if n in hypers.slices]
        return min(sum(int(a.sum()) for a in alive), hypers.size)

    @property
    def _num_directions(self) -> int:
        return len(self.state.u)

    def _white(self, num_samples: int, generator: torch.Generator) -> Tensor:
        """Standard normal in the directions that are not pruned, ``(S, num_directions)``; the same on every device."""
        return self._of_active(white_noise(num_samples, self._num_directions, generator, self.state.u.dtype))

    def _draws(self, white: Tensor) -> Tensor:
        return self._unwhitened(self._of_active(white))

    def _of_active(self, white: Tensor) -> Tensor:
        """White noise, zero in pruned coordinates."""
        return white.to(self.state.u).index_fill(1, (~self.state.problem.active).nonzero().flatten(), 0.0)

    def _away(self, z: Tensor) -> Tensor:
        if self._skewed is not None:
            levels = torch.special.ndtr(z).to(self.state.u)
            return self._skewed.points.quantile(levels.flatten(), dim=0).reshape(*z.shape, -1)
        sd = self.state.precision.variance[0].sqrt()
        away = torch.where(self.state.problem.active, z.to(self.state.u).unsqueeze(-1) * sd, 0.0)
        return self._about_mean.u + away

    def _unwhitened(self, white: Tensor) -> Tensor:
        """Unconstrained draws ``(S, D)`` from white noise."""
        if self._skewed is not None:
            return self._skewed.drawn(white)[0]
        return self._about_mean.u + self.state.precision.unwhiten(white)

    @property
    def _judged(self) -> tuple[Tensor, Any]:
        """Which coordinates are judged by slopes at draws, bool ``(D,)``, and what these are without, nats."""
        return self.state.problem.active, 0.0

    def _beside(self, white: Tensor) -> Tensor:
        """Draws of the Gaussian at the mode from the same noise, less the mode, ``(S, D)``."""
        return self.state.precision.unwhiten(white[:, : len(self.state.u)])

    def _draws_until(self, until: float) -> Values:
        return super()._draws_until(until) if self._skewed is None else self._constrained(self._skewed.points)

    @cached_property
    def _skewed(self) -> SkewedNormal | None:
        """The density with its skewness, which draws and quantiles are of; None where that is not known, or none.

        Beside hyperparameters that were maximised, draws stay those of the Gaussian that standard errors are of.
        """
        problem, is_whole = self.state.problem, self._maximises_evidence and not len(self.state.theta)
        if not is_whole or self._about_mode or not problem.joint.has_data or problem.latent is not None:
            return None
        with own_random_numbers(), without_validation(), torch.enable_grad(), suppress(ArithmeticError):
            profile = profile_at(self.state)
            return None if profile is None else skewed_normal(profile, self.state.precision, problem.joint)
        return None

    @cached_property
    def _shifted(self) -> LaplaceState | None:
        """The Gaussian about the mean; None where that is not known, and it is about the mode."""
        with own_random_numbers(), without_validation():
            return at_mean(self.state) if self._maximises_evidence and not self._about_mode else None

    @property
    def _about_mean(self) -> LaplaceState:
        """The Gaussian that draws, quantiles and predictions are of, where they are not skewed."""
        return self._shifted or self.state

    def plot(self, axes: Axes | None = None, *, prob: float = PROB) -> Axes:
        """The table as a picture, or the curve of a Gaussian process of one input; see :class:`Tabulated`."""
        check_probability(prob)
        drawn = draw_curve(self, axes, prob) if isinstance(self.state.precision, LatentPrecision) else None
        return super().plot(axes, prob=prob) if drawn is None else drawn

    @property
    def guide(self) -> LaplaceGuide:
        """The posterior as a Pyro guide; where a latent is a Gaussian process, one that predicts it at new inputs."""
        if isinstance(self.state.precision, LatentPrecision):
            return ProcessGuide(self._about_mean)
        return LaplaceGuide(self._about_mean, None if self._skewed is None else CoordinateDistribution(self._skewed))

    @property
    def model(self) -> Model:
        """The user's model with the hyperparameters put in as constants, for NUTS and Predictive anywhere.

        A pruned precision is put in as a finite value at which the data move the weight by less than 1e-4 of
        its prior variance.  Where its arguments ask for plates of other sizes than the fit's, levels that the fit has
        not seen are drawn from their prior given everything else.
        """
        shapes = {part.name: part.shape for part in self._joint.latents}
        return NewLevels(shapes)(self._joint.substituted(self.state.theta))

    def _latent_draws(
        self, joint: LogJoint, new: Arguments, num_samples: int, seed: int, by_quadrature: bool
    ) -> Iterator[tuple[Values, Tensor]]:
        found = None
        if isinstance(self.state.precision, LatentPrecision) and bool(self.state.problem.active.any()):
            found = latents_at(self.state, joint, new, num_samples, seed, by_quadrature)  # as predict_latent
        elif self._linear_terms:
            found = self._draws_beside_modes(joint, num_samples, seed)
        return super()._latent_draws(joint, new, num_samples, seed, by_quadrature) if found is None else found

    @property
    def _linear_terms(self) -> tuple[LikelihoodTerm, ...]:
        problem = self._inside.problem
        is_linear = problem.curvature is gauss_newton and not self._trusts_weights
        return tuple(t for t in problem.structure.likelihoods or () if t.mixture is None) if is_linear else ()

    def _draws_beside_modes(self, joint: LogJoint, num_samples: int, seed: int) -> Iterator[tuple[Values, Tensor]]:
        """As :meth:`_latent_draws`, of the Gaussian about each mode, beside this mode, ``name/mode``."""
        generator, latents, size = generator_of(seed), self._joint.latents, len(self.state.u)
        shares, modes, unwhiten = self._normals
        counts = torch.multinomial(shares.cpu(), num_samples, replacement=True, generator=generator).bincount()
        for k in counts.nonzero().flatten().tolist():
            mode = {f"{n}/mode": value for n, value in latents.constrained(modes[k].to(joint.dtype)).items()}
            for white in pairs_in_parts(int(counts[k]), size, generator, max(largest_row(joint), size)):
                for part in (modes[k] + unwhiten(k, self._of_active(white))).to(joint.dtype).split(rows_at_once(joint)):
                    beside = {name: value.repeat(len(part), *[1] * value.dim()) for name, value in mode.items()}
                    yield latents.constrained(part) | beside, equal_weights(len(part))

    @property
    def _normals(self) -> tuple[Tensor, Tensor, Callable[[int, Tensor], Tensor]]:
        """Shares ``(K,)`` and modes ``(K, D)`` of Gaussians, and draws about zero of each from white noise."""
        u, precision = self.state.u, self.state.precision
        return torch.ones(1), u.unsqueeze(0), lambda _, white: precision.unwhiten(white)

    def log_weights(self, num_samples: int = NUM_WEIGHTED, seed: int = 0) -> Tensor:
        """Log ratios of the exact density to Laplace's Gaussian, that at the mode, at draws from it, nats, ``(S,)``."""
        return self._weighed(check_count("num_samples", num_samples), seed, kept=False)[1]

    def _weighed(self, num_samples: int, seed: int, kept: bool = True) -> tuple[Tensor, Tensor]:
        """Draws from the Gaussian at the mode, whose weights vary less than at the mean, and their log weights.

        :param kept: whether draws are kept; else there are none, and white noise of many is made part by part.
        """
        generator, rows, draws, log_weights = generator_of(seed), self._rows, [], []
        at_once = num_samples if kept or num_samples * len(self.state.u) < MOST_NUMBERS else rows
        for start in range(0, num_samples, at_once):
            u, found = self._weighed_rows(self._white(min(at_once, num_samples - start), generator), kept)
            log_weights.append(found)
            draws += u
        return torch.cat(draws) if kept else self.state.u[:0], torch.cat(log_weights)

    def _weighed_rows(self, white: Tensor, kept: bool = True) -> tuple[list[Tensor], Tensor]:
        """Unconstrained draws from white noise, in batches where they are kept, and their log weights, nats."""
        draws, log_weights = [], []
        with torch.no_grad(), without_validation():
            for part in white.split(self._rows):
                u, log_density = self._with_density(part)
                found = self.state.problem.density.log_joint(u, self.state.theta) - log_density
                log_weights.append(self._of_nearest(found, u))
                draws += [u] if kept else []
        found = torch.cat(log_weights)
        return draws, torch.where(found.isnan(), -math.inf, found)  # beyond the largest float: density 0

    def _reported(self, drawn: Tensor) -> Values:
        """Values that :meth:`get_samples` returns of the noise of which ``drawn`` ``(S, D)``, that are weighed, are."""
        away = drawn - self.state.u
        if self._skewed is None:
            return self._constrained(self._about_mean.u + away)
        return self._constrained(self._unwhitened(self.state.precision.whiten(away)))

    def _with_density(self, white: Tensor) -> tuple[Tensor, Tensor]:
        """Unconstrained draws to be weighed, from white noise, and their log density, nats, ``(S,)``."""
        active, precision = self.state.problem.active, self.state.precision
        log_norm = 0.5 * (precision.log_det[0] - active.sum() * math.log(math.tau))
        return self.state.u + self.state.precision.unwhiten(white), log_norm - 0.5 * white.square().sum(-1)

    @property
    def _rows(self) -> int:
        """Draws per batch: about 32 MB of a tensor as large as the data."""
        largest = max((t.numel() for _, t in tensors(self._joint.args, self._joint.kwargs)), default=1)
        return max(1, min(ROWS, BATCH_NUMBERS // max(largest, len(self.state.u), 1)))

    def diagnostics(self, num_samples: int | None = None, seed: int = 0) -> dict[str, Any]:
        """Diagnostics by name: why the fit stopped, the curvature, and importance sampling of the log evidence.

        By default 4,000 draws, fewer where latents and data are more than 25,000 numbers, but 100 at least.

        ``pareto_k`` is the shape of the importance ratios' tail (Vehtari et al. 2024): below 0.5 the
        importance-sampled log evidence and its standard error (nats) are reliable, above 0.7 neither it nor
        the approximation is.
        ``gradient_norm`` is the slope left at the mode, in nats per posterior standard deviation;
        ``smallest_eigenvalue`` is of the posterior precision in unconstrained space.
        ``largest_mean_shift`` (in standard deviations) and ``largest_sd_ratio`` are what the importance weights
        change of the draws: above 0.2 and 1.2 take :meth:`importance_resampled`.  ``exact`` says that all weights are
        one. Where blocks are integrated by quadrature, and of more than 1,000 coordinates in independent blocks, all
        this is found block by block: ``pareto_k`` is the worst block's,
        ``blocks_above`` of ``num_blocks`` have one above 0.7, and importance sampling is of the blocks' integrals.
        ``notes`` has what else there is to say, such as that the model rounds to float32 inside.
        ``mean_shift`` is how far draws, quantiles and predictions are from the mode, in standard deviations of the
        coordinate that moves most: there the posterior mean is, one order of Laplace's series on; nan where that says
        nothing, and they are about the mode.
        ``log_evidence_by`` says where the log evidence is from if that is an integral over modes, and then what the
        weights say is of the draws alone.
        ``left_a_saddle`` says whether the search for the mode came by a saddle, which it left along its downward
        curvature.

        :param num_samples: draws for importance sampling.
        :param seed: of these draws, fixed unless you change it: diagnostics are numbers to report.
        """
        num_samples = check_count("num_samples", self._num_checked if num_samples is None else num_samples)
        return self._described(self._importance_check(num_samples, seed))

    @property
    def _num_checked(self) -> int:
        """Draws of a check where nobody says how many; few of params alone, whose weights are all one."""
        return affordable_draws(self._joint) if self.mode else diagnostics.FEWEST_WEIGHTED

    def _described(self, check: dict[str, Any]) -> dict[str, Any]:
        """Entries of :meth:`diagnostics` besides those of a check."""
        curvature, flat, u = self.state.problem.curvature, ", ".join(self.flat_sites), self.state.u
        mean = math.nan if self._shifted is None else self._shifted.u
        shift = (mean if self._skewed is None else self._skewed.points.mean(0)) - u
        units = "the log evidence is the integral in the units of these sites, and no evidence to weigh models by"
        by = {} if self.mode else {"log_evidence_by": "nothing is integrated: the log likelihood of what was maximised"}
        return by | {
            "status": self.status,
            "log_evidence": float(self.log_evidence),
            "log_evidence_per_step": list(self.log_evidences),
            "log_evidence_per_restart": self.restarts.tolist(),
            "failed_restarts": list(self.failures),
            "left_a_saddle": self.state.left_saddle,
            "mean_shift": float((shift / self.state.precision.variance[0].sqrt()).abs().max()) if len(u) else 0.0,
            "gradient_norm": math.sqrt(max(self.state.decrement, 0.0)),
            "smallest_eigenvalue": self._smallest_eigenvalue(),
            "curvature": getattr(curvature, "__name__", str(curvature)),
            "num_coordinates": int(self.state.problem.active.sum()),
            "num_pruned": int((~self.state.problem.active).sum()),
            "notes": [
                *rounded_inside(self._joint, u, self.state.theta),
                *([f"flat prior for {flat}: {units}"] if flat else []),
            ],
            **check,
        }

    def _importance_check(self, num_samples: int, seed: int) -> dict[str, Any]:
        """Importance sampling of the whole, or block by block."""
        if not self._is_checkable:
            return diagnostics.NOT_CHECKED
        if self._is_by_blocks:
            return diagnostics.check_by_blocks(self._inside, float(self.log_evidence), num_samples, seed)
        if num_samples * len(self.state.u) >= MOST_NUMBERS:
            return diagnostics.importance_check(
                importance.checked(self.log_weights(num_samples, seed)), None, self._joint.dtype
            )
        u, log_weights = self._weighed(num_samples, seed)
        draws = self._constrained(u), self._reported(u)
        return diagnostics.importance_check(importance.checked(log_weights), draws, self._joint.dtype)

    @property
    def _is_by_blocks(self) -> bool:
        """Whether the log evidence is checked block by block: joint weights of many coordinates say little."""
        problem = self._inside.problem
        many = int(problem.active.sum()) > MANY and problem.curvature is exact_hessian and problem.joint.has_data
        return self.state.place is not None or (many and bool(self.log_evidence_error.block))

    def _check(self, until: float) -> dict[str, Any]:
        """Check of the log evidence and of moments for ``summary()``, by as many draws as it takes or has time for."""
        if not self.mode:
            return self._importance_check(self._num_checked, 0)
        return diagnostics.check_until(self, until) if self._is_checkable else diagnostics.NOT_CHECKED

    @property
    def _inside(self) -> LaplaceState:
        """The state whose independent blocks can be looked at."""
        return self.state

    @property
    def integration_error(self) -> float:
        """Change of the log evidence when nodes of marginalised sites were last made more, nats; 0 without these."""
        return 0.0

    @cached_property
    def _mirrors(self) -> tuple[Turn, ...]:
        """The sites whose signs can change without any change of the density, from a mode that is not its own image."""
        problem, u = self._inside.problem, self._inside.u
        if problem.structure.predictors or problem.structure.network or not problem.joint.has_data:
            return ()
        with own_random_numbers(), without_validation():
            turns = mirrors(problem.joint, self._inside.theta)
            ways = [torch.where(turned_by(problem.joint, turn).to(u.device), u, 0.0).unsqueeze(0) for turn in turns]
            apart = [float(self._inside.precision.whiten(2.0 * way).norm()) > APART for way in ways]
            return tuple(itertools.compress(turns, apart))

    @cached_property
    def _turned(self) -> Tensor:
        """Which coordinates change their signs in each image of the inner mode but itself, bool ``(I, D)``."""
        return images(self._inside.problem.joint, self._mirrors)

    def _of_nearest(self, log_weights: Tensor, u: Tensor) -> Tensor:
        """Log weights of draws ``(S, D)``, nats, zero where one is nearer to an image of the mode, for all images."""
        if not self._mirrors:
            return log_weights
        near = are_nearest(u, self.state.u, self.state.precision.variance[0], images(self._joint, self._mirrors))
        return (log_weights + len(self._mirrors) * math.log(2.0)).where(near, -math.inf)

    @cached_property
    def _log_nearest(self) -> float:
        """Log of the Gaussian's mass that is nearest to its own image, nats."""
        u, precision = self._inside.u, self._inside.precision
        white = torch.randn(NUM_WEIGHTED, len(u), generator=generator_of(0), dtype=torch.float64)
        near = are_nearest(u + precision.unwhiten(white.to(u)), u, precision.variance[0], self._turned)
        return math.log(float(near.double().mean()))

    @cached_property
    def _by_inside_draws(self) -> InsideCorrection | None:
        """Error of Laplace inside the log evidence; None where it costs too much, or data were not kept."""
        places = self._inside_places
        with own_random_numbers():
            return None if places is None else inside_correction(places)

    @cached_property
    def _left_out(self) -> InsideCorrection | None:
        """That error, by whatever tells it."""
        return self._by_inside_draws

    @property
    def _inside_places(self) -> LaplaceNodes | None:
        """Where Laplace stands for an integral over what blocks share, these integrated by default; None elsewhere."""
        problem, marginal = self.state.problem, self.state.problem.marginal
        if marginal is None or not (problem.structure.multipliers or any(marginal.partition.curved)):
            return None
        return LaplaceNodes.of_state(self.state, self._turned)

    @cached_property
    def log_evidence_error(self) -> EvidenceError:
        """Error of the log evidence because Laplace, or few nodes, stand for integrals, nats; not negative.

        With ``n`` nodes in each block, against ``n + 2``; with one, which is Laplace, against quadrature; where no
        blocks are independent (crossed effects, chains, graphs), the second-order term of Laplace's series, which is
        never added.  Where importance sampling has told what Laplace leaves out, its error.  And that of the integral
        over marginalised sites.  A float that also knows ``signed``, ``block`` (which contributes most), ``of_block``,
        ``shared`` (what integrating the coordinates that blocks share around the blocks instead of beside them
        changes) and ``method``.
        """
        require_kept(self._inside.problem.joint, "log_evidence_error")
        with without_validation():
            laplace, found = evidence_error(self._inside), self._left_out
        if found is None:
            return laplace.beside(self.integration_error)
        signed, shared = (0.0, 0.0) if found.is_trusted else (found.gain, laplace.shared)
        of = f" of {found.num_shared} shared coordinates" if laplace.num_blocks else ""
        method = f"importance sampling{of} by {found.num_draws} draws, {importance.tail_words(found.pareto_k)}"
        error = EvidenceError.of(signed, laplace.block, laplace.of_block, shared, method)
        error.num_blocks, error.num_shared = laplace.num_blocks, laplace.num_shared
        return error.beside(self.integration_error + found.error)

    def blocks(self, site: str, num_samples: int | None = None, seed: int = 0) -> Blocks:
        """The independent blocks that hold the elements of a latent site, each with a check of its own.

        :param num_samples: draws of each block, for its importance weights; by default 1,000, fewer of many data.
        :raises BadInput: for a name that is no latent site, or one that blocks share.
        :raises UnsupportedModel: where no blocks are independent.
        """
        return diagnostics.blocks(self._inside, site, num_samples, seed)

    @cached_property
    def relative_ess(self) -> float:
        """The share of 500 draws that importance weights leave, 0 to 1; small where the density is far from normal."""
        log_weights = self._weighed(500, seed=0)[1]
        return float(importance.effective_sample_size(log_weights)) / len(log_weights)

    def importance_resampled(self, num_samples: int = NUM_WEIGHTED, seed: int = 0) -> CorrectedPosterior:
        """The same posterior without Laplace's error in shape: its draws weighted by the exact density (PSIS).

        :param num_samples: draws to be weighted; with k-hat they tell how many they are worth.
        :param seed: of these draws, fixed unless you change it: the weighted means are numbers to report.
        :raises BadInput: for fewer than 100 draws, or when the density is zero at all of them.
        """
        num_samples = check_weighted(num_samples)
        u, log_weights = self._weighed(num_samples, seed)
        if not bool((log_weights > -math.inf).any()):
            raise BadInput(f"the density is zero at all {num_samples} draws; run NUTS on posterior.model.")
        return CorrectedPosterior(self._joint, self.state.theta, self._constrained(u), importance.checked(log_weights))

    def loo(self, by: str | Tensor | None = None) -> LOOResult:
        """Log predictive density of each group of the data given all others, nats: leave-one-group-out.

        Importance sampling from Laplace's approximation without the group, at the marginalised sites' draws where
        there are any; hyperparameters that were maximised are held.

        :param by: labels of the data ``(N,)``, or the name of an argument of the model that holds them, or of a plate
            around the data; None: every datum by itself.
        :raises BadInput: for labels that do not fit the data.
        :raises TooLarge: beyond 200 coordinates inside, or for too many groups of too many data.

        >>> posterior.loo(by="group").elpd  # doctest: +SKIP
        """
        self._needs_data("loo()")
        return left_out(self._conditional_approximations, by)

    @property
    def _conditional_approximations(self) -> ConditionalApproximations:
        """A place at each mode, at the hyperparameters of the fit."""
        _, modes, _ = self._normals
        theta = self.state.theta.expand(len(modes), -1)
        return ConditionalApproximations(self.state.problem, theta, modes, modes.new_zeros(len(modes)))

    def _smallest_eigenvalue(self) -> float:
        """By the covariance where it is at hand; otherwise by inverse power iterations, an upper bound."""
        precision, active = self.state.precision, self.state.problem.active
        if not bool(active.any()):
            return math.inf
        if isinstance(precision, Dense | LatentPrecision):
            variances = torch.linalg.eigvalsh(precision.log_det_gradient[0][active][:, active])
        else:
            variances = precision.least_precise_direction(active)[0].square().sum()
        return float(1.0 / variances.max())

    def hyperparameter_covariance(self) -> HyperparameterCovariance:
        """Uncertainty of the maximised hyperparameters: the inverse of minus the Hessian of the log evidence.

        In the coordinates of the search, and of the values themselves; where one is at an end of its range (the scale
        of groups that do not differ) an interval by the profile stands for it.  Fixed effects as params have the
        standard errors of a mixed model's.

        :raises NotAMode: where the log evidence has no maximum there.
        """
        return uncertainty.hyperparameter_covariance(self.state)

    @cached_property
    def _spread(self) -> HyperparameterCovariance | None:
        """:meth:`hyperparameter_covariance` where the log evidence was maximised and it is cheap, else None."""
        if not self._maximises_evidence or not 0 < len(self.state.theta) <= FEW:
            return None
        try:
            return self.hyperparameter_covariance()
        except ArithmeticError:
            return None

    def sensitivity(self) -> Sensitivity:
        """Prior sensitivity: slopes of the log evidence and of each mean in the constants of the priors.

        A constant is an argument of a prior that depends on no site, such as the 2.0 of ``Normal(0.0, 2.0)``.  Slopes
        are exact derivatives of this posterior's own numbers, by the gradient that hyperparameters are maximised by,
        the mode's and the curvature's dependence included: nats for each doubling of the constant, or for a move of a
        location by its prior's scale.  Params that were maximised follow; beside marginalised sites, and where the log
        evidence is by importance sampling, they are held.  There slopes are sums over nodes, Laplace inside, or over
        its draws.  Refits have other nodes and draws: their differences are further off than these slopes.

        :raises UnsupportedModel: without a constant that can be moved, and where importance weights cannot be trusted.
        :raises BadInput: where the data of the fit were not kept.

        >>> from pyro import distributions as dist, sample
        >>> from pyro_evidence import LaplaceEvidence
        >>> def heights(y):
        ...     mu = sample("mu", dist.Normal(0.0, 10.0))
        ...     sample("y", dist.Normal(mu, torch.ones(3)).to_event(1), obs=y)
        >>> found = LaplaceEvidence(heights).run(torch.tensor([1.0, 2.0, 3.0])).sensitivity()
        >>> round(found.log_evidence["mu.scale"], 2)  # minus log 2, but for what the data say
        -0.66
        """
        return sensitivity(self)

    _points_along = at_mode

    def _problem_of(self, model: Model, given: Mapping[str, Any]) -> Problem:
        """The problem of another model with the same latent sites: the inner one, where sites are marginalised."""
        joint, before = self._joint, self.state.problem
        found = laplace_problem(LogJoint(model, joint.args, joint.kwargs, **given), before.curvature)
        return replace(found, active=before.active, nodes=before.nodes)

    def _log_evidence_of(self, fit: Fit[TypeII]) -> Tensor:
        """The log evidence, nats, that this kind of posterior has where such a fit has ended."""
        return replace(self, state=fit.state.laplace).log_evidence

    def _hyper_rows(self, layout: TableLayout, errors: bool) -> tuple[Rows, list[str]]:
        return hyper_rows(self, self._spread if errors else None, layout)

    def _notes(self, until: float) -> list[str]:
        """Lines below the table of ``summary()``; one tells of an error of the log evidence above one nat.

        Where no blocks are independent, of models that are known by their factors alone: importance sampling tells of
        others.
        """
        spread, problem = self._spread, self._inside.problem
        said = [] if spread is None else [uncertainty.message(edge) for edge in spread.edges]
        if self._mirrors:
            turns, num = ", of ".join(dict.fromkeys(map(described, self._mirrors))), 2 ** len(self._mirrors)
            said.append(
                f"the density stays the same when the signs of {turns} change: {num} mirror images are in the log "
                "evidence, and draws are of one"
            )
        inside = self._left_out
        if inside is not None and abs(inside.gain) >= TOLD:
            added = "are added to" if inside.is_trusted else "cannot be trusted and are not added to"
            said.append(
                f"importance sampling has {inside.gain:+.2g} nats beside Laplace inside (+- {inside.error:.2g}, "
                f"{importance.tail_words(inside.pareto_k)}), which {added} the log evidence"
            )
        known = problem.structure.factors is not None or is_in_blocks(self._inside)
        if problem.joint.has_data and known and not self._has_orbits:
            with suppress(ArithmeticError, RuntimeError):
                said += messages(self.log_evidence_error, problem.nodes)
        found = self._check(until)  # last: for as long as the others have left
        return diagnostics.lines(self._described(found), said, added=inside is not None and inside.is_trusted)

    def update_param_store(self) -> None:
        """Write the params to Pyro's global param store, so that the rest of an SVI script reads them there.

        Pruned precisions are written as the finite values that :attr:`model` uses.  A network's own
        parameters are overwritten, as by SVI, and the model is run once, so that a ``PyroModule`` sees the store.
        """
        joint = self._joint
        params, sites = joint.split_hypers(self.state.theta)
        put_into_store({n: v for n, v in params.items() if not joint.homes.get(n)}, joint.param_constraints)
        with torch.no_grad():
            for name, value in params.items():
                for module, key in joint.homes.get(name, ()):
                    module.get_parameter(key).copy_(value)
        with own_random_numbers(), without_validation(), poutine.block(), torch.no_grad():
            poutine.condition(joint.model, data=self.mode | sites)(*joint.args, **joint.kwargs)

    def _record(self) -> dict[str, Any]:
        return archive.record(self.state) | {name: getattr(self, name) for name in archive.HISTORY}

    @classmethod
    def _restored(cls, content: Mapping[str, Any], model: Model, sizes: Mapping[str, int]) -> "LaplacePosterior":
        state = archive.restore(content, model)
        archive.require_laplace(state)
        return cls(state, *archive.history(content))
