"""What a relevance vector machine, fast or variational, and a relevance eigenvector machine return."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.relevance.axes_posterior import AxesPosterior
from pyro_evidence.relevance.axis_evidence import Axes
from pyro_evidence.relevance.axis_priors import AxisPrior, GaussianFit, GaussianPrior, SparseState
from pyro_evidence.relevance.eigen_state import REVMSettings, REVMState, base_centre, fixed_others, separable
from pyro_evidence.relevance.quadratic import Quadratic, laplace_at_base
from pyro_evidence.relevance.weights import LinearTarget
from pyro_evidence.structure.observed_parts import Part


def _positive(alpha: float) -> Tensor:
    if not alpha > 0.0:
        raise BadInput(f"alpha={alpha}; expected a positive prior precision of the added weights.")
    return torch.tensor(alpha)


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
        """Gaussian."""
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


@dataclass(frozen=True)
class RVMPosterior(AxesPosterior):
    """Gaussian posterior of the relevant weights.

    :ivar reason: why the fit stopped, as a sentence.
    :ivar log_evidences: log evidence, or its lower bound, after each step, nats.
    """

    state: RVMState
    reason: str = "converged"
    log_evidences: tuple[float, ...] = ()

    @cached_property
    def _fit(self) -> GaussianFit:
        return super()._fit if self.state.fit is None else self.state.fit

    @property
    def relevant(self) -> Tensor:
        """Positions of the relevant weights, shape ``(num_active,)``: for kernels, the relevance vectors."""
        return torch.nonzero(self.active).flatten()

    def healed_predictor(
        self, *args: Any, columns: Tensor, peaks: Tensor | float = 1.0, alpha: float | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        r"""Mean and variance of the predictor with one more basis function at each new input, ``(S,)`` each.

        So the variance does not fall far from the data, as :meth:`predictor`'s does: it goes back to the prior's.
        With :math:`e` the new function's value at its own centre less what the relevant columns explain of it, and
        :math:`s, q` its sparsity and quality, mean and variance rise by :math:`e q / (\alpha + s)` and
        :math:`e^2 / (\alpha + s)`.  Rasmussen and Quinonero-Candela (2005), "Healing the relevance vector machine
        through augmentation"; exact for Gaussian noise, otherwise by the curvature at the mode.

        :param args: the model's arguments at ``S`` new inputs; the targets may be left out.
        :param columns: the new functions, one for each new input, at the training inputs, shape ``(N, S)``.
        :param peaks: each one's value at its own centre, ``(S,)`` or a number.
        :param alpha: prior precision of the new weight; by default the new function's prior variance at its centre
            is the mean prior variance of the predictor over the training data.
        :raises UnsupportedModel: for several observed sites, or several predictor elements per datum.
        :raises BadInput: for columns of another shape, or a precision that is not positive.
        """
        part, peak = self._single_part(), torch.as_tensor(peaks).to(self.state.x)
        eta, J = self._tangents(args, kwargs)
        if columns.shape != (len(part.c), eta.numel()):
            expected = (len(part.c), eta.numel())
            raise BadInput(f"columns have shape {tuple(columns.shape)}; expected (N, S) = {expected}.")
        extra = columns.to(J)
        slope, B = part.derivatives(part.eta(self.state.y.unsqueeze(0)))
        own = part.J[:, 0] @ self.state.embedding
        cross = self._white((B.reshape(-1, 1) * own).mT @ extra)
        s = (B.reshape(-1, 1) * extra.square()).sum(0) - cross.square().sum(0)
        white = self._white(J.mT)
        if alpha is None:
            prior = (own.square() / self.alpha[self.active]).sum(-1).mean()
            precision = torch.where(prior > 0, peak.square() / prior, torch.inf)
        else:
            precision = _positive(alpha).to(peak)
        rest, spread = peak - (white * cross).sum(0), white.square().sum(0)
        gain = rest / (precision + s)
        return (eta.flatten() + gain * (slope.flatten() @ extra)), spread + gain * rest

    def _single_part(self) -> Part:
        target = self.of.target
        if not isinstance(target, LinearTarget) or len(target.parts) != 1 or target.parts[0].c.shape[1] != 1:
            raise UnsupportedModel(
                "healing needs one observed site with one predictor element per datum. Use probability without it."
            )
        return target.parts[0]

    @property
    def status(self) -> str:
        """Why the fit stopped, as a sentence."""
        return self.reason

    @staticmethod
    def restored(record: Mapping[str, Any], prior: AxisPrior) -> RVMState:
        """The state of a file's record."""
        return RVMState(record["alpha"], record["x"], None if record["fit"] is None else GaussianFit(*record["fit"]))


@dataclass(frozen=True)
class REVMPosterior(AxesPosterior):
    """Gaussian approximation in the active eigenvectors, at the mode of likelihood times learned prior."""

    state: REVMState

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
        recipe = REVMSettings(prior, base_centre, laplace_at_base, fixed_others)
        quadratic = Quadratic(record["base"], (), (), (), None)
        parts = (record["alpha"], record["active"], record["x"], *record["log_likelihoods"])
        return REVMState(recipe, record["ridge"], quadratic, Axes(*record["axes"]), *parts)
