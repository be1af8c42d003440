"""Laplace's posterior behind the interface of ``pyro.infer.MCMC``."""

from collections import OrderedDict
from typing import Any

import torch
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.infer.laplace_evidence import LaplaceEvidence
from pyro_evidence.posterior import LaplacePosterior
from pyro_evidence.program import Model


class LaplaceKernel(MCMCKernel):
    """``MCMC(LaplaceKernel(model), num_samples=..., warmup_steps=0)``: independent draws from Laplace's posterior.

    The fit is deterministic, so every chain of a parallel run draws from the same posterior, with its own seed.

    :param model: a Pyro model, or a configured :class:`LaplaceEvidence`.
    """

    def __init__(self, model: Model | LaplaceEvidence) -> None:
        self.engine = model if isinstance(model, LaplaceEvidence) else LaplaceEvidence(model)
        self.posterior: LaplacePosterior | None = None
        self.transforms: dict[str, Any] | None = None

    @property
    def model(self) -> Model:
        """The model with the fitted hyperparameters put in (the user's own before the fit)."""
        return self.engine.model if self.posterior is None else self.posterior.model

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        """Fit; nothing is sampled.

        :raises BadInput: for warmup steps, which independent draws do not have.
        """
        if warmup_steps:
            raise BadInput(f"LaplaceKernel draws independently and has no warmup; pass warmup_steps=0, got {warmup_steps}.")
        self.posterior = self.engine.run(*args, **kwargs)
        latents = self.posterior.state.problem.joint.latents
        self.transforms = {part.name: part.transform.inv for part in latents}

    @property
    def initial_params(self) -> dict[str, Tensor]:
        """The mode, unconstrained, by site."""
        state = self._fitted.state
        return state.problem.joint.latents.unconstrained(state.u.to(state.problem.joint.dtype))

    @initial_params.setter
    def initial_params(self, params: dict[str, Tensor]) -> None:
        raise BadInput("LaplaceKernel finds its own mode; initial_params cannot be set. Use LaplaceEvidence(restarts=...).")

    def sample(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """One independent draw, unconstrained, from torch's generator as every MCMC kernel."""
        state = self._fitted.state
        white = torch.randn(1, len(state.u), dtype=torch.float64).to(state.u.device) * state.problem.active
        u = (state.u + state.precision.colour(white)[0]).to(state.problem.joint.dtype)
        return state.problem.joint.latents.unconstrained(u)

    def diagnostics(self) -> dict[str, Any]:
        """The log evidence, nats; draws are never divergent."""
        return {"log evidence": float(self._fitted.log_evidence), "divergences": []}

    def logging(self) -> "OrderedDict[str, str]":
        """What the progress bar shows."""
        return OrderedDict([("log evidence", f"{float(self._fitted.log_evidence):.3f}")])

    @property
    def _fitted(self) -> LaplacePosterior:
        if self.posterior is None:
            raise BadInput("LaplaceKernel is not fitted yet; MCMC.run(...) calls setup(...).")
        return self.posterior
