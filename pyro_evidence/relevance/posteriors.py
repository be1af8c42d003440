"""What a relevance vector machine, fast or variational, and a relevance eigenvector machine return."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.files import Array, Record
from pyro_evidence.fitting.iterate import Status
from pyro_evidence.posterior import archive
from pyro_evidence.relevance.axes_posterior import AxesPosterior
from pyro_evidence.relevance.axis_evidence import Axes
from pyro_evidence.relevance.axis_priors import AxisPrior, GaussianFit, GaussianPrior, SparseState
from pyro_evidence.relevance.eigen_state import REVMSettings, REVMState, base_centre, separable
from pyro_evidence.relevance.quadratic import bare, laplace_at_base


@dataclass(frozen=True)
class RVMState(SparseState):
    """A mode on some columns of the design, each weight with a Gaussian prior of its own."""

    alpha: Tensor  # (M,) prior precision of every weight, inf where pruned
    x: Tensor  # (K,) the active weights at the mode
    fit: GaussianFit | None = None  # another Gaussian than Laplace's, where there is one

    @cached_property
    def active(self) -> Tensor:  # type: ignore[override]
        """Weights that are not pruned, bool, shape ``(M,)``."""
        return torch.isfinite(self.alpha)

    @property
    def prior(self) -> AxisPrior:
        """A Gaussian along each column."""
        return GaussianPrior()

    @cached_property
    def directions(self) -> Tensor:
        """Columns of the identity, shape ``(M, K)``."""
        return torch.eye(len(self.alpha)).to(self.x)[:, self.active]

    def record(self) -> dict[str, Any]:
        """What a file keeps of it."""
        return {
            "alpha": self.alpha,
            "x": self.x,
            "fit": None if self.fit is None else list(vars(self.fit).values()),
        }


@dataclass(frozen=True, repr=False)
class RVMPosterior(AxesPosterior):
    """Gaussian posterior of the relevant weights.

    :ivar reason: why the fit stopped, as a sentence.
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

    schema: ClassVar[dict[str, Any]] = {
        "alpha": Array("M", finite=False),
        "x": Array("A"),
        "fit": (None, [Array("A A"), Array("")]),
    }
    state: RVMState
    reason: str = "converged"
    log_evidences: tuple[float, ...] = ()

    @cached_property
    def _fit(self) -> GaussianFit:
        return super()._fit if self.state.fit is None else self.state.fit

    @property
    def evidence_note(self) -> str:
        """As for every posterior of learned priors; that of a variational fit is no evidence at all."""
        if self.state.fit is None:
            return super().evidence_note
        return (
            "a lower bound, in which the constants of the Gamma priors on all precisions count: it cannot be compared "
            "with the log evidence of another engine, nor choose a kernel, its width or a basis. Cross-validate."
        )

    @property
    def relevant(self) -> Tensor:
        """Positions of the relevant weights, shape ``(num_active,)``: for kernels, the relevance vectors."""
        return torch.nonzero(self.active).flatten()

    @property
    def status(self) -> str:
        """Why the fit stopped, as a sentence."""
        return self.reason

    @staticmethod
    def restored(record: Mapping[str, Any], prior: AxisPrior) -> RVMState:
        """The state of a file's record."""
        return RVMState(record["alpha"], record["x"], None if record["fit"] is None else GaussianFit(*record["fit"]))


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

    schema: ClassVar[dict[str, Any]] = {
        "ridge": float,
        "axes": [Array("K"), Array("W K"), Array("K")],
        "base": Array("Y"),
        "alpha": Array("K", finite=False),
        "active": Array("K", torch.bool),
        "x": Array("A"),
        "log_likelihoods": [Array(""), Array("")],
        "reason": str,
    }
    state: REVMState

    def _require_agreement(self, record: Record) -> None:
        super()._require_agreement(record)
        state, of = self.state, self.of
        if len(state.quadratic.y) != len(of.order):
            raise BadInput(f"the ridge mode has {len(state.quadratic.y)} elements; the model has {len(of.order)}.")
        if not torch.allclose(state.prior.alpha(state.axes.h, state.axes.u), state.alpha):
            raise BadInput("alpha is not that of the axes' curvatures and centres.")
        if not 0.0 <= state.ridge < torch.inf:
            raise BadInput(f"ridge is {state.ridge}; expected a precision of at least 0.")
        null = state.quadratic.y.index_fill(0, torch.arange(of.num_weights).to(of.order.device), 0.0)
        found = of.target.value(torch.stack([state.quadratic.y, null]))
        saved = torch.stack([state.base_log_likelihood, state.null_log_likelihood])
        archive.require_equal("log_likelihoods", found, saved, torch.float64)

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

    def columns(self) -> dict[str, Tensor]:
        """Eigenvalue, Wald statistic, ``alpha`` and mode of the active axes."""
        return {"h": self.eigenvalues[self.active], "z^2": self.wald[self.active]} | super().columns()

    def diagnostics(self) -> dict[str, Any]:
        """How far to trust the numbers; ``misfit`` and the log likelihoods are in nats.

        ``separable``: the likelihood grows along the weights without end.  ``misfit``: error of the quadratic
        at 0; where it is large the Wald statistics are not to be believed.  The rest is as in
        :class:`LaplacePosterior`.
        """
        state = self.state
        return super().diagnostics() | {
            "separable": separable(self.of.target, state.quadratic.y, self.of.num_weights),
            "misfit": float(state.misfit),
            "wald_sum": float(self.wald.sum()),
            "base_log_likelihood": float(state.base_log_likelihood),
            "null_log_likelihood": float(state.null_log_likelihood),
            "factorised_log_evidence": float(state.factorised_log_evidence),
            "ridge": state.ridge,
        }

    @staticmethod
    def restored(record: Mapping[str, Any], prior: AxisPrior) -> REVMState:
        """The state of a file's record; the local quadratic itself is not kept."""
        settings = REVMSettings(prior, base_centre, laplace_at_base)
        quadratic = bare(record["base"])
        reason = Status[record["reason"]]
        parts = (record["alpha"], record["active"], record["x"], *record["log_likelihoods"], reason)
        return REVMState(settings, record["ridge"], quadratic, Axes(*record["axes"]), *parts)
