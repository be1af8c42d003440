"""What a relevance eigenvector machine returns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.axis_priors import AxisPrior
from pyro_evidence.eigen_state import EigenState, Recipe, base_centre, fixed_others, separable
from pyro_evidence.ops.spectrum import Axes
from pyro_evidence.posterior_axes import AxesPosterior
from pyro_evidence.quadratic import Quadratic, laplace_at_base


@dataclass(frozen=True)
class REVMPosterior(AxesPosterior):
    """Gaussian approximation in the active eigenvectors, at the mode of likelihood times learned prior."""

    state: EigenState

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
    def restored(record: Mapping[str, Any], prior: AxisPrior) -> EigenState:
        """The state of a file's record; the local quadratic itself is not kept."""
        recipe = Recipe(prior, base_centre, laplace_at_base, fixed_others)
        quadratic = Quadratic(record["base"], (), (), (), None)
        parts = (record["alpha"], record["active"], record["x"], *record["log_likelihoods"])
        return EigenState(recipe, record["ridge"], quadratic, Axes(*record["axes"]), *parts)
