"""Laplace's posterior behind the interface of ``pyro.infer.MCMC``."""

import copy
from collections import OrderedDict
from typing import Any

import pyro
import torch
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from pyro.params.param_store import StateDict
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.infer.evidence_em import EvidenceEM
from pyro_evidence.infer.laplace_evidence import LaplaceEvidence
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.program.log_joint import Model


class LaplaceKernel(MCMCKernel):
    """``MCMC(LaplaceKernel(model), num_samples=..., warmup_steps=0)``: draws from Laplace's posterior.

    The draws are independent.  Every chain fits, which is deterministic, so all chains draw from the same
    posterior, each with its own seed.

    :param model: a Pyro model, or an engine that fits one by Laplace's approximation, which is left as it is:
        :class:`LaplaceEvidence` or :class:`~pyro_evidence.infer.evidence_em.EvidenceEM` with its settings.
    :ivar posterior: the last fit; None before the first.

    >>> import torch
    >>> from pyro.infer import MCMC
    >>> from pyro_evidence import LaplaceKernel
    >>> from pyro_evidence.models.basis import Linear
    >>> from pyro_evidence.models.regression import regression
    >>> X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    >>> t = 2.0 * X[:, 0] + 0.3 * torch.cos(40.0 * X[:, 0])
    >>> mcmc = MCMC(LaplaceKernel(regression(Linear())), num_samples=50, warmup_steps=0, disable_progbar=True)
    >>> mcmc.run(X, t)
    >>> len(mcmc.get_samples()["w"])
    50
    """

    def __init__(self, model: Model | LaplaceEvidence | EvidenceEM) -> None:
        is_engine = isinstance(model, LaplaceEvidence | EvidenceEM)
        if hasattr(model, "run") and not is_engine and not isinstance(model, torch.nn.Module):
            raise BadInput(
                f"LaplaceKernel({type(model).__name__}(...)): expected a Pyro model, or LaplaceEvidence(model, ...) or "
                f"EvidenceEM(model, ...), whose draws are of the model's own sites. Take draws of this engine by "
                f"engine.run(...).get_samples(num_samples)."
            )
        engine: Any = model
        self.engine: LaplaceEvidence | EvidenceEM = engine if is_engine else LaplaceEvidence(engine)
        self.posterior: LaplacePosterior | None = None
        self.transforms: dict[str, Any] | None = None
        self._sent: StateDict = {"params": {}, "constraints": {}}

    def __getstate__(self) -> dict[str, Any]:
        """A spawned chain starts with an empty param store, so the params travel with the kernel."""
        return vars(self) | {"_sent": pyro.get_param_store().get_state()}

    @property
    def model(self) -> Model:
        """The model with the fitted hyperparameters put in (the user's own before the fit)."""
        return self.engine.model if self.posterior is None else self.posterior.model

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        """Fit; nothing is sampled.

        :raises BadInput: for warmup steps, which independent draws do not have.
        """
        if warmup_steps:
            raise BadInput(
                f"warmup_steps={warmup_steps}: LaplaceKernel draws independently and has nothing to warm up; "
                f"pass MCMC(..., warmup_steps=0)."
            )
        own, sent = pyro.get_param_store().get_state(), self._sent  # of this process, and of the one that sent it
        both: Any = {part: {**sent[part], **own[part]} for part in ("params", "constraints")}
        with pyro.get_param_store().scope(both):
            self.posterior = copy.copy(self.engine).run(*args, **kwargs)
        latents = self.posterior.state.problem.joint.latents
        self.transforms = {part.name: part.transform.inv for part in latents}

    @property
    def initial_params(self) -> dict[str, Tensor]:
        """The mode, unconstrained, by site."""
        return self._unconstrained(self._fitted.state.u)

    @initial_params.setter
    def initial_params(self, params: dict[str, Tensor]) -> None:
        raise BadInput(
            "initial_params cannot be set: LaplaceKernel finds the mode by itself. To search it from several "
            "starts, pass LaplaceKernel(LaplaceEvidence(model, start=Start(restarts=8)))."
        )

    def sample(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """One independent draw, unconstrained, from torch's generator as every MCMC kernel."""
        white = torch.randn(1, self._fitted._num_directions, dtype=self._fitted.state.u.dtype, device="cpu")
        return self._unconstrained(self._fitted._draws(white)[0])

    def _unconstrained(self, u: Tensor) -> dict[str, Tensor]:
        joint = self._fitted.state.problem.joint
        return joint.latents.unconstrained(u.to(joint.dtype))

    def diagnostics(self) -> dict[str, Any]:
        """The log evidence, nats; draws are never divergent."""
        return {"log evidence": float(self._fitted.log_evidence), "divergences": []}

    def logging(self) -> "OrderedDict[str, str]":
        """Figures of the progress bar."""
        return OrderedDict([("log evidence", f"{float(self._fitted.log_evidence):.3f}")])

    @property
    def _fitted(self) -> LaplacePosterior:
        if self.posterior is None:
            raise BadInput("LaplaceKernel is not fitted yet; run MCMC(kernel, ...) first.")
        return self.posterior
