"""What a relevance vector machine returns, fast or variational."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.axes_state import GaussianFit, OnAxesState
from pyro_evidence.axis_priors import AxisPrior, GaussianPrior
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.ops.parts import Part
from pyro_evidence.posterior_axes import AxesPosterior
from pyro_evidence.weights import LinearTarget


def _positive(alpha: float) -> Tensor:
    if not alpha > 0.0:
        raise BadInput(f"alpha={alpha}; expected a positive prior precision of the added weights.")
    return torch.tensor(alpha)


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
    def restored(record: Mapping[str, Any], prior: AxisPrior) -> ColumnState:
        """The state of a file's record."""
        return ColumnState(record["alpha"], record["x"], None if record["fit"] is None else GaussianFit(*record["fit"]))
