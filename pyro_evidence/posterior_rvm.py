"""What a relevance vector machine returns, fast or variational."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.axes_state import GaussianFit, OnAxesState
from pyro_evidence.axis_priors import AxisPrior, GaussianPrior
from pyro_evidence.posterior_axes import AxesPosterior


@dataclass(frozen=True)
class ColumnState(OnAxesState):
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

    state: ColumnState
    reason: str = "converged"
    log_evidences: tuple[float, ...] = ()

    @cached_property
    def _fit(self) -> GaussianFit:
        return super()._fit if self.state.fit is None else self.state.fit

    @property
    def relevant(self) -> Tensor:
        """Positions of the relevant weights, shape ``(num_active,)``: for kernels, the relevance vectors."""
        return torch.nonzero(self.active).flatten()

    @property
    def status(self) -> str:
        """Why the fit stopped, as a sentence."""
        return self.reason

    @staticmethod
    def restored(record: Mapping[str, Any], prior: AxisPrior) -> ColumnState:
        """The state of a file's record."""
        return ColumnState(record["alpha"], record["x"], None if record["fit"] is None else GaussianFit(*record["fit"]))
