"""Posteriors on a few axes of weight space: of relevance vector machines, fast or variational, and of eigenvectors."""

import html
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical

from pyro_evidence import display
from pyro_evidence.display import PROB, Axes, Table
from pyro_evidence.errors import BadInput
from pyro_evidence.files import Array, Double
from pyro_evidence.fitting.iterate import Status
from pyro_evidence.fitting.process_state import own_random_numbers, put_into_store, without_validation
from pyro_evidence.laplace.approximation import laplace_problem, laplace_state
from pyro_evidence.numerics.derivatives import generic_directions, jacobian
from pyro_evidence.numerics.evidence import log_evidence, well_determined
from pyro_evidence.numerics.linalg import cholesky
from pyro_evidence.numerics.quadrature.rules import quasi_normal
from pyro_evidence.posterior import archive
from pyro_evidence.posterior.diagnostics import NOT_CHECKED, NUM_WEIGHTED, lines
from pyro_evidence.posterior.guide import LaplaceGuide
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.posterior.predict import PredictivePosterior
from pyro_evidence.posterior.reweighted import CorrectedPosterior
from pyro_evidence.posterior.summary import COLUMNS, LISTED, TableLayout, of_normal
from pyro_evidence.program.checks import new_data
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.program.predictors import LOGISTIC, SOFTMAX, hermite, softmax_average, unwrapped
from pyro_evidence.relevance.axis_evidence import EigenAxes
from pyro_evidence.relevance.axis_priors import (
    AXES,
    AxisPrior,
    GaussianFit,
    GaussianPrior,
    L1Prior,
    OnAxes,
    SparseState,
    WithWeights,
)
from pyro_evidence.relevance.eigen_state import REVMState, log_likelihoods, separable
from pyro_evidence.relevance.targets import LinearTarget, Penalised
from pyro_evidence.relevance.weights import Weights, weights_of
from pyro_evidence.settings import check_count, check_probability
from pyro_evidence.structure.names import names_of

OURS: dict[str, Any] = {p.__name__: p for p in (GaussianPrior, L1Prior)}  # priors that a file may name
AXES_POSTERIOR = archive.MODEL | {"prior": list, "sites": [str], "log_evidence": archive.NUMBER}
EIGEN_STATE = {  # entries that are called as in REVMState
    "ridge": float,
    "base": Array("Y"),
    "active": Array("K", torch.bool),
    "x": Array("A", torch.float64),
}
COARSE = 60  # points along each side of a plane, whose lines the eye sees as smooth
NO_AXIS = "every axis was pruned, so {}; use get_samples(...), whose weights are 0."
CHECKS = (
    "gradient_norm smallest_eigenvalue pareto_k exact log_evidence_importance log_evidence_importance_se "
    "effective_sample_size largest_mean_shift largest_sd_ratio"
).split()


class AboutMode(LaplacePosterior):
    """Laplace's posterior whose draws are about the mode, as those of the axes are."""

    _about_mode: ClassVar[bool] = True


@dataclass(frozen=True, repr=False)
class AxesPosterior(PredictivePosterior, archive.Saved):
    """Gaussian approximation in the active axes, at the mode of likelihood times learned prior.

    :ivar of: the weights it is of.
    :ivar state: the fit; every number below is of this one.
    """

    _restored_state: ClassVar[Any]  # from the content of a file, a prior, and the weights that it is of

    of: Weights
    state: SparseState

    def __getstate__(self) -> dict[str, Any]:
        """The fields that were given, without what follows from them."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(log_evidence={float(self.log_evidence):.6g}, sites={list(self.of.sites)}, "
            f"active={self.num_active} of {len(self.active)}, status={self.status!r})"
        )

    @cached_property
    def _fit(self) -> GaussianFit:
        """Curvature and Laplace log evidence at the mode, hyperparameters and axes held."""
        state, K = self.state, self.num_active
        alpha, others = state.alpha[state.active], state.x.new_zeros(len(state.x) - K)
        smooth = alpha if isinstance(state.prior, GaussianPrior) else torch.zeros_like(alpha)
        with torch.enable_grad():
            target, x = self.of.target.along(state.embedding), state.x.unsqueeze(0)
            A = Penalised(target, torch.cat([smooth, others])).precision(x, state.x.new_zeros(0))[0]
            tril = cholesky(A, "the posterior precision in the active axes") if len(A) else A
            log_joint = target.value(x)[0] + state.prior.distribution(alpha).log_prob(state.x[:K]).sum()
        return GaussianFit(tril, log_evidence(log_joint, 2.0 * tril.diagonal().log().sum(), len(A)))

    @property
    def log_evidence(self) -> Tensor:
        """``log p(D | alpha)`` by Laplace's approximation at the mode, nats, constants included.

        Where the axes come from the data, as in REVM, it cannot choose a ridge, a kernel or a prior:
        cross-validate.
        """
        return self._fit.log_evidence

    @property
    def evidence_note(self) -> str:
        """A sentence on the use of the log evidence; the summary ends with it."""
        return (
            "that of a prior learned from the same data: it cannot choose a kernel, its width, a basis, a ridge or a "
            "prior. Cross-validate."
        )

    @property
    def alpha(self) -> Tensor:
        """Learned hyperparameter of each axis, ``inf`` where pruned, shape ``(K,)``.

        A precision under the Gaussian prior, twice the rate under the Laplace prior.
        """
        return self.state.alpha

    @property
    def active(self) -> Tensor:
        """Which axes carry weight at the mode, bool, shape ``(K,)``."""
        return self.state.active

    @property
    def num_active(self) -> int:
        """Number of active axes."""
        return self.state.num_active

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights at the mode, by site."""
        return {n: self.mode[n] for n in self.of.sites}

    @property
    def hyperparameters(self) -> dict[str, Tensor]:
        """``alpha`` of every axis, and the model's params."""
        return {**self.of.joint.held, "alpha": self.alpha}

    @property
    def _joint(self) -> LogJoint:
        return self.of.joint

    @property
    def _mode_at(self) -> tuple[Tensor, Tensor]:
        return self.of.flat(self.state.y), self.of.joint.initial_theta

    @property
    def gamma(self) -> dict[str, Tensor]:
        """Well-determinedness of each active axis, 0 to 1; Gaussian prior only."""
        if not isinstance(self.state.prior, GaussianPrior) or not len(self.state.x):
            return {}
        variance = torch.cholesky_inverse(self._fit.precision_tril).diagonal()[: self.num_active]
        return {"alpha": well_determined(self.alpha[self.active], variance)}

    @property
    def _num_directions(self) -> int:
        return len(self.state.x)

    @property
    def _num_maximised(self) -> int:
        return len(self.alpha)

    def _draws(self, white: Tensor) -> Tensor:
        return self.of.flat((self.state.x + self._unwhiten(white.to(self.state.x))) @ self.state.embedding.mT)

    def _away(self, z: Tensor) -> Tensor:
        axes = self.state.embedding @ self._unwhiten(torch.eye(len(self.state.x)).to(self.state.x)).mT
        sd = axes.square().sum(-1).sqrt()  # axes @ axes.mT is the posterior covariance of the weights and the others
        return self.of.flat(self.state.y + z.unsqueeze(-1) * sd)

    def _unwhiten(self, white: Tensor) -> Tensor:
        tril = self._fit.precision_tril
        return torch.linalg.solve_triangular(tril.mT, white.mT, upper=True).mT if len(tril) else white

    @cached_property
    def _laplace(self) -> LaplacePosterior:
        """This mode as a Laplace posterior of :attr:`model`, whose latent site is ``axes``."""
        self._needs_data("a guide")
        if not len(self.state.x):
            raise BadInput(NO_AXIS.format("there is nothing to sample"))
        joint = LogJoint(self.model, self.of.joint.args, self.of.joint.kwargs, maximise=())
        values = self.mode | {AXES: self.state.x[: self.num_active].to(joint.dtype)}
        u = joint.latents.flat({n: values[n] for n in joint.latents.names}).double()
        state = laplace_state(laplace_problem(joint), joint.initial_theta, u)
        return AboutMode(state, "converged", (float(state.log_evidence),), state.log_evidence.reshape(1))

    @property
    def _labels(self) -> list[str]:
        """Names of the axes."""
        return [f"axis {i}" for i in range(len(self.active))]

    @property
    def _columns(self) -> dict[str, Tensor]:
        """Columns of :meth:`table` behind value and interval, one number per active axis."""
        return {"alpha": self.alpha[self.active], **({"gamma": self.gamma["alpha"]} if self.gamma else {})}

    def table(self, prob: float = PROB) -> Table:
        """The axes that are kept, a row each, and how many are pruned; ``.to_pandas()`` has the numbers.

        :param prob: in the intervals, which leave out as much on both sides.
        """
        check_probability(prob)
        layout = TableLayout(names_of(self._joint), (0.5 - 0.5 * prob, 0.5 + 0.5 * prob), None)
        sd = self._whitened(torch.eye(len(self.state.x)).to(self.state.x)).square().sum(0).sqrt()[: self.num_active]
        more = self._columns
        columns = of_normal(self.state.x[: self.num_active], sd, layout) | more
        rows = display.by_label(list(itertools.compress(self._labels, self.active.tolist())), columns)
        pruned = len(self.active) - len(rows)
        said = [f"{pruned} of {len(self.active)} axes are pruned"] if pruned else []
        said += [f"{c}: {COLUMNS[c]}" for c in more]
        return Table(rows, {c: COLUMNS.get(c, "") for c in columns}, said, digits=4)

    def summary(self, prob: float = PROB, *, check: bool = True) -> None:
        """Print the axes that are kept, then the log evidence and how far to trust it.

        :param prob: in the intervals.
        :param check: False prints the table alone.
        """
        note = f"the log evidence is {self.evidence_note}"
        print("\n".join([str(self.table(prob)), *([*lines(self.diagnostics()), note] if check else [])]))  # noqa: T201

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>{self.table()._repr_html_()}"

    def plot(self, axes: Axes | None = None, *, prob: float = PROB) -> Axes:
        """The axes that are kept, twelve at most, those furthest from zero: a point and an interval for each weight.

        >>> posterior.plot()  # doctest: +SKIP

        :param axes: to draw on; None makes a figure of its own.
        :param prob: in the intervals.
        :raises BadInput: where every axis was pruned.
        :raises ImportError: without matplotlib.
        """
        axes, rows = display.axes_or_own(axes), self.table(prob).rows
        if not rows:
            raise BadInput(NO_AXIS.format("there is nothing to draw"))
        away = {name: abs(row["value"]) / row["sd"] for name, row in rows.items()}
        furthest = sorted(away, key=away.__getitem__, reverse=True)[:LISTED]
        names = [name for name in rows if name in furthest]
        value, _, _, *ends = (c for c in next(iter(rows.values())))
        display.intervals(axes, names, *([rows[name][c] for name in names] for c in (value, *ends[:2])))
        return display.with_labels(axes, f"weight, {display.percent(prob)} % interval", legend=False)

    def importance_resampled(self, num_samples: int = NUM_WEIGHTED, seed: int = 0) -> CorrectedPosterior:
        """The same posterior without Laplace's error in shape, the learned prior held: draws weighted (PSIS).

        Its sites are those of :attr:`model`, ``axes`` among them, and the weights that follow from these.

        :param num_samples: draws to be weighted; with k-hat they tell how many they are worth.
        :raises BadInput: for fewer than 100 draws, without an active axis, or where the data came in chunks.
        """
        self._needs_data("a correction")
        if not self.num_active:
            raise BadInput(NO_AXIS.format("there is nothing to correct"))
        found = self._laplace.importance_resampled(num_samples, seed)
        return replace(found, draws=found.draws | self.weights_of_axes(found.draws))

    def weights_of_axes(self, draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights by site, ``(S, ...)``, that follow from draws of :attr:`model`'s latent site ``axes``."""
        return self.of.values(draws[AXES] @ self.state.directions.to(draws[AXES]).mT)

    @property
    def guide(self) -> LaplaceGuide:
        """The posterior as a guide of :attr:`model`, whose latent site is ``axes``."""
        return self._laplace.guide

    @property
    def model(self) -> Model:
        """The user's model with the learned prior, for NUTS and Predictive, in any process.

        Its latent site ``axes``, shape ``(num_active,)``, takes the place of the weights, which are
        deterministic sites of their own names.  Every prior precision is finite there: pruned axes are not in
        it.
        """
        joint = self.of.joint
        user = joint.substituted(joint.initial_theta)
        if not self.num_active:
            return WithWeights(user, self.weights)
        prior = self.state.prior.distribution(self.alpha[self.active].to(joint.dtype))
        shapes = {n: tuple(v.shape) for n, v in self.weights.items()}
        return OnAxes(user, self.state.directions.to(joint.dtype), prior, shapes)

    def predictor(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Posterior mean and variance of the first observed site's predictor, each of its shape.

        :param args: the model's arguments; the targets may be left out.  Random state is left alone.
        """
        eta, J = self._tangents(args, kwargs)
        return eta, (self._whitened(J.mT)).square().sum(0).reshape(eta.shape)

    def _tangents(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The first observed site's predictor at the mode, and its derivative in ``x``, ``(size, K + V)``."""
        joint, likelihood = self._with(args, kwargs), self.of.likelihoods[0]
        x = self.state.x.clone().requires_grad_()
        with own_random_numbers(), new_data(joint.args, joint.kwargs):
            trace = joint.trace(self.of.flat(self.state.embedding @ x), joint.initial_theta)
        eta = likelihood.link.inverse(likelihood.value(trace)).double()  # of any number of new inputs
        return eta.detach(), jacobian(eta.reshape(-1), x)

    def _whitened(self, columns: Tensor) -> Tensor:
        """``L^-1`` times columns ``(K + V, S)``, the posterior precision being ``L L'``."""
        tril = self._fit.precision_tril
        return torch.linalg.solve_triangular(tril, columns, upper=False) if len(tril) else columns

    def _class_probabilities(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], num_samples: int, seed: int
    ) -> Tensor | None:
        """Averaged at each row by itself, without draws; None but for one site that sees a predictor for each class."""
        likelihood, joint = self.of.likelihoods[0], self.of.joint
        base = unwrapped(joint.trace(joint.initial_u, joint.initial_theta).nodes[likelihood.site]["fn"]).base
        if len(joint.observed) > 1:
            return None
        if isinstance(base, Bernoulli) and likelihood.link in LOGISTIC and likelihood.layout.num_coupled <= 1:
            return hermite(*self.predictor(*args, **kwargs))
        if isinstance(base, Categorical) and likelihood.link in SOFTMAX:
            eta, J = self._tangents(args, kwargs)
            white = self._whitened(J.mT).mT.reshape(*eta.shape, -1)
            points = quasi_normal(check_count("num_samples", num_samples), eta.shape[-1], seed)
            return softmax_average(eta, white @ white.mT, points.to(eta))
        return None

    def update_param_store(self) -> None:
        """Write the params to Pyro's global param store; ``alpha`` is none of them."""
        put_into_store(self.of.joint.held, self.of.joint.param_constraints)

    def diagnostics(self) -> dict[str, Any]:
        """Diagnostics by name; importance sampling is that of :class:`LaplacePosterior`.

        Above .2 and 1.2 for the largest shift of a mean and ratio of deviations take :meth:`importance_resampled`.
        """
        found = {"status": self.status, "log_evidence": float(self.log_evidence), "num_active": self.num_active}
        weighed = len(self.state.x) and self.of.target.is_resident
        laplace = self._laplace.diagnostics() if weighed else NOT_CHECKED
        return found | {k: laplace[k] for k in CHECKS if k in laplace}

    @property
    def status(self) -> str:
        """Why the fit stopped, as a sentence."""
        return "converged"

    def _record(self) -> dict[str, Any]:
        joint, prior = self.of.joint, self.state.prior
        self._needs_data("a file")
        if type(prior) not in OURS.values():
            raise BadInput(
                f"prior is a {type(prior).__name__}, which a file of tensors cannot hold; expected GaussianPrior or "
                "L1Prior."
            )
        return archive.record_model(joint) | {
            "prior": [type(prior).__name__, *vars(prior).values()],
            "sites": list(self.of.sites),
            "log_joint_beside": self._log_joint_beside,
            "log_evidence": self.log_evidence,
        }

    @property
    def _log_joint_beside(self) -> Tensor:
        """Log joint one posterior standard deviation beside the mode, in a direction without symmetry, nats, ``()``.

        With the learned prior beside the model's own, so that params of either count.
        """
        white = generic_directions(1, len(self.state.x), self.state.x)
        x, joint = self.state.x + self._unwhiten(white / white.norm()), self.of.joint
        alpha = self.state.alpha[self.state.active]
        prior = self.state.prior.distribution(alpha).log_prob(x[0, : len(alpha)]).sum()
        with torch.no_grad(), without_validation():
            return prior + joint.log_joint(self.of.flat(x @ self.state.embedding.mT), joint.initial_theta)[0]

    @classmethod
    def _restored(cls, content: Mapping[str, Any], model: Model, sizes: Mapping[str, int]) -> "AxesPosterior":
        of = weights_of(archive.restore_model(content, model, ()), content["sites"])
        name, *settings = content["prior"]
        if name not in OURS:
            raise BadInput(f"its prior is {name!r:.60}; expected one of {sorted(OURS)}.")
        posterior = cls(of, cls._restored_state(content, OURS[name](*settings), of))
        posterior._require_agreement(content)
        return posterior

    def _require_agreement(self, record: Mapping[str, Any]) -> None:
        """Refuse numbers of a file that do not follow from the mode, the model and its data.

        :raises BadInput: with the number of the file and the one that follows.
        """
        state, of = self.state, self.of
        if len(state.x) != state.num_active + of.num_others or len(state.directions) != of.num_weights:
            raise BadInput(f"the mode has {len(state.x)} elements, expected them of {state.num_active} active axes.")
        another = "It is another density: load it with the model that it was fitted to."
        archive.require_equal("log_evidence", self.log_evidence, record["log_evidence"], torch.float64, another)
        beside = record["log_joint_beside"]
        archive.require_equal("log_joint_beside", self._log_joint_beside, beside, of.joint.dtype, another)


@dataclass(frozen=True, eq=False)
class RVMState(SparseState):
    """A mode on some columns of the design, each weight with a Gaussian prior of its own."""

    alpha: Tensor  # (M,) prior precision of every weight, inf where pruned
    x: Tensor  # (K,) the active weights at the mode
    fit: GaussianFit | None = None  # another Gaussian than Laplace's, where there is one
    prior: ClassVar[AxisPrior] = GaussianPrior()  # type: ignore[misc]

    @cached_property
    def active(self) -> Tensor:  # type: ignore[override]
        """Weights that are not pruned, bool, shape ``(M,)``."""
        return torch.isfinite(self.alpha)


@dataclass(frozen=True, repr=False)
class RVMPosterior(AxesPosterior):
    """Gaussian posterior of the relevant weights.

    :ivar status: why the fit stopped, as a sentence.
    :ivar log_evidences: log evidence, or its lower bound, after each step, nats.

    >>> import torch
    >>> from pyro_evidence import RVM
    >>> from pyro_evidence.models.basis import Polynomial
    >>> from pyro_evidence.models.regression import regression
    >>> X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    >>> t = 2.0 * X[:, 0] + 0.3 * torch.cos(40.0 * X[:, 0])
    >>> posterior = RVM(regression(Polynomial(3), beta=20.0)).run(X, t)
    >>> posterior.num_active < 4, bool(posterior.log_evidence.isfinite())
    (True, True)
    """

    schema: ClassVar[Mapping[str, Any]] = AXES_POSTERIOR | {
        "alpha": Array("M", torch.float64, finite=False),
        "x": Array("A", torch.float64),
        "fit": (None, [Double("A A"), Double("")]),
    }
    state: RVMState
    status: str = "converged"
    log_evidences: tuple[float, ...] = ()

    @cached_property
    def _fit(self) -> GaussianFit:
        return super()._fit if self.state.fit is None else self.state.fit

    @property
    def evidence_note(self) -> str:
        """Note on the evidence of learned priors; that of a variational fit is no evidence at all."""
        if self.state.fit is None:
            return super().evidence_note
        return (
            "a lower bound, in which the constants of the Gamma priors on all precisions count: it cannot be compared "
            "with the log evidence of another engine, nor choose a kernel, its width or a basis. Cross-validate."
        )

    @property
    def _as_laplace(self) -> tuple[float, tuple[str, ...]]:
        if self.state.fit is None:
            return super()._as_laplace
        bound = (
            f"its own log_evidence, {float(self.log_evidence):.3f} nats, is a variational lower bound under Gamma "
            "hyperpriors, not Laplace's approximation; the row is at the mean precisions."
        )
        return math.nan, (bound,)

    @property
    def _labels(self) -> list[str]:
        """Names of the weights."""
        names = names_of(self._joint).label
        return [names(n, place) for n, v in self.weights.items() for place in itertools.product(*map(range, v.shape))]

    @property
    def relevant(self) -> Tensor:
        """Positions of the relevant weights, shape ``(num_active,)``: for kernels, the relevance vectors."""
        return torch.nonzero(self.active).flatten()

    def plot(self, axes: Axes | None = None, *, prob: float = PROB) -> Axes:
        """The data with their relevance vectors ringed, and the prediction: a curve, or where two classes are even.

        That is for kernels at the data of one or two inputs; the weights of others as points and intervals.

        >>> posterior.plot()  # doctest: +SKIP

        :param axes: to draw on; None makes a figure of its own.
        :param prob: in the intervals.
        :raises ImportError: without matplotlib.
        """
        if not self._has_kernels_at_rows or self.of.joint.args[0].shape[1] > 2:
            return super().plot(axes, prob=prob)
        axes, (X, t) = display.axes_or_own(axes), self.of.joint.args[:2]
        ringed = self.relevant[self.relevant < len(X)]
        if X.shape[1] == 1:
            grid = torch.linspace(float(X.min()), float(X.max()), display.NUM_GRID).to(X)
            axes.plot(X[:, 0].tolist(), t.tolist(), ".", color="grey", label="data")
            axes.plot(grid.tolist(), self.predict(grid[:, None]).tolist(), label="prediction")
            x, y = X[ringed, 0], t[ringed]
        else:
            for number, label in enumerate(t.unique()):
                points = X[t == label].T.tolist()
                axes.plot(*points, **display.points_of(number), markersize=display.SMALL, label=f"label {label:g}")
            low, high = X.amin(0), X.amax(0)
            across, up = (torch.linspace(-0.05, 1.05, COARSE).to(X)[:, None] * (high - low) + low).T
            even = self.predict(torch.cartesian_prod(across, up)).reshape(COARSE, COARSE).T
            axes.contour(across.tolist(), up.tolist(), even.tolist(), levels=[0.5], colors="black")
            x, y = X[ringed].T
        axes.plot(x.tolist(), y.tolist(), "o", color="black", fillstyle="none", markersize=9, label="relevance vectors")
        return display.with_labels(axes, "input 0", "input 1" if X.shape[1] == 2 else "target")

    @property
    def _has_kernels_at_rows(self) -> bool:
        """Whether the columns are functions of the rows that were fitted, each largest at its own."""
        if not isinstance(self.of.target, LinearTarget) or not self.of.joint.has_data:
            return False
        J = self.of.target.parts[0].J[:, 0]
        own = torch.arange(len(J)).to(J.device)
        return J.shape[1] - len(J) in (0, 1) and torch.equal(J[:, : len(J)].argmax(0), own)

    def _record(self) -> dict[str, Any]:
        fit = None if self.state.fit is None else list(vars(self.state.fit).values())
        return super()._record() | {"alpha": self.alpha, "x": self.state.x, "fit": fit}

    @staticmethod
    def _restored_state(content: Mapping[str, Any], prior: AxisPrior, of: Weights) -> RVMState:
        if not bool((content["alpha"] > 0.0).all()):
            raise BadInput("alpha holds numbers that are not above 0; expected precisions, inf of what is pruned.")
        fit = None if content["fit"] is None else GaussianFit(*content["fit"])
        return RVMState(content["alpha"], content["x"], fit)


@dataclass(frozen=True, repr=False)
class REVMPosterior(AxesPosterior):
    """Gaussian approximation in the active eigenvectors, at the mode of likelihood times learned prior.

    >>> import torch
    >>> from pyro_evidence import REVM
    >>> from pyro_evidence.models.basis import Polynomial
    >>> from pyro_evidence.models.regression import regression
    >>> X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    >>> t = 2.0 * X[:, 0] + 0.3 * torch.cos(40.0 * X[:, 0])
    >>> posterior = REVM(regression(Polynomial(3), beta=20.0)).run(X, t)
    >>> len(posterior.wald) == len(posterior.active), int(posterior.active.sum()) == posterior.num_active
    (True, True)
    """

    schema: ClassVar[Mapping[str, Any]] = (
        AXES_POSTERIOR | EIGEN_STATE | {"axes": [Array("K"), Array("W K"), Array("K")], "reason": str}
    )
    state: REVMState

    @property
    def _as_laplace(self) -> tuple[float, tuple[str, ...]]:
        seen = "its axes were found from the same data, so its evidence is too favourable; cross-validate."
        return float(self.log_evidence), (seen,)

    @property
    def status(self) -> str:
        """Why the search for the mode stopped, as a sentence."""
        return self.state.reason.value

    @property
    def eigenvalues(self) -> Tensor:
        """Curvature of the log likelihood along each axis, largest first, no null axes, shape ``(K,)``."""
        return self.state.axes.h

    @property
    def wald(self) -> Tensor:
        """``z^2 = h u^2`` of each axis, shape ``(K,)``; those above 1 are kept."""
        return self.state.axes.wald

    @property
    def hyperparameters(self) -> dict[str, Tensor]:
        """``alpha`` of every axis, the ``ridge`` under which the axes were found, and the model's params."""
        return super().hyperparameters | {"ridge": torch.tensor(self.state.ridge, dtype=torch.float64)}

    @property
    def _columns(self) -> dict[str, Tensor]:
        return {"h": self.eigenvalues[self.active], "z^2": self.wald[self.active]} | super()._columns

    def diagnostics(self) -> dict[str, Any]:
        """Diagnostics by name; ``misfit`` and the log likelihoods are in nats.

        ``separable``: the likelihood grows along the weights without end.  ``misfit``: error of the quadratic
        at 0; where it is large the Wald statistics are not to be believed.  The rest is as in
        :class:`LaplacePosterior`.
        """
        state, misfit = self.state, float(self.state.misfit)
        no_end = separable(self.of.target, state.base, self.of.num_weights)
        return super().diagnostics() | {
            "notes": [
                f"z^2 is of a quadratic about the ridge mode, {misfit:.3g} nats off where all weights are 0",
                *["the likelihood grows along the weights without end: the ridge alone holds them"] * no_end,
            ],
            "separable": no_end,
            "misfit": misfit,
            "wald_sum": float(self.wald.sum()),
            "base_log_likelihood": float(state.base_log_likelihood),
            "null_log_likelihood": float(state.null_log_likelihood),
            "factorised_log_evidence": float(state.factorised_log_evidence),
            "ridge": state.ridge,
        }

    def _record(self) -> dict[str, Any]:
        state = self.state
        own = {name: getattr(state, name) for name in EIGEN_STATE}
        return super()._record() | own | {"axes": list(state.axes), "reason": state.reason.name}

    @staticmethod
    def _restored_state(content: Mapping[str, Any], prior: AxisPrior, of: Weights) -> REVMState:
        ridge, base, active, x = (content[name] for name in EIGEN_STATE)
        axes, reason = EigenAxes(*content["axes"]), Status[content["reason"]]
        if len(base) != len(of.order) or len(axes.directions) != of.num_weights:
            raise BadInput(f"the ridge mode has {len(base)} elements; expected {len(of.order)}, as the model.")
        if not 0.0 <= ridge < torch.inf:
            raise BadInput(f"ridge is {ridge}; expected a precision of at least 0.")
        values = log_likelihoods(of.target, base, axes)
        return REVMState(prior, ridge, base, axes, prior.alpha(axes.h, axes.u), active, x, *values, reason)
