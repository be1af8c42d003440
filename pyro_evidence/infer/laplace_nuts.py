"""Pyro's NUTS in coordinates that a posterior has made round."""

import warnings
from collections import OrderedDict
from typing import Any

import torch
from pyro.infer import NUTS
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.laplace.posterior import LaplacePosterior
from pyro_evidence.program.checks import same_arguments
from pyro_evidence.program.log_joint import Model
from pyro_evidence.threads import without_validation

MANY = 0.05  # share of divergent draws that shows the metric at the mode to be wrong


class LaplaceNUTS(MCMCKernel):
    """``MCMC(LaplaceNUTS(posterior), num_samples=500, warmup_steps=50)``: NUTS in coordinates whitened by a posterior.

    The target is the density that NUTS has on ``posterior.model``, and the draws have the same names and shapes.  Only
    the step size is adapted, so that fifty steps of warm-up will do.  Of a posterior with outer sites the
    Gaussian at their mode whitens, in which inner ones follow to first order; a funnel makes that worse than none, and
    divergences are said.

    :param posterior: of :class:`LaplaceEvidence`; its data are used.
    :param max_tree_depth: as for Pyro's NUTS, and ``target_accept_prob`` as well.

    >>> MCMC(LaplaceNUTS(posterior), num_samples=500, warmup_steps=50).run()  # doctest: +SKIP
    """

    def __init__(
        self, posterior: LaplacePosterior, *, max_tree_depth: int = 10, target_accept_prob: float = 0.8
    ) -> None:
        if not isinstance(posterior, LaplacePosterior):
            raise BadInput(
                f"LaplaceNUTS({type(posterior).__name__}); expected a posterior of LaplaceEvidence(...).run(...)."
            )
        self.posterior = posterior
        self.settings = {"max_tree_depth": max_tree_depth, "target_accept_prob": target_accept_prob}
        latents = posterior.state.problem.joint.latents
        self.transforms = {part.name: part.transform.inv for part in latents}
        self._nuts: NUTS | None = None
        self._num_drawn = 0
        self._z = torch.zeros_like(posterior.state.u)

    @property
    def model(self) -> Model:
        """The model with the fitted hyperparameters put in."""
        return self.posterior.model

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        """Begin at the mode.

        :raises BadInput: for other data than those of the posterior.
        """
        joint = self.posterior.state.problem.joint
        if (args or kwargs) and not same_arguments((joint.args, joint.kwargs), (args, kwargs)):
            raise BadInput("run(...) was given other data than the posterior was fitted to; call run() without any.")
        self._z = torch.zeros_like(self.posterior.state.u)
        self._nuts = NUTS(potential_fn=self._potential, adapt_mass_matrix=False, **self.settings)
        self._nuts.initial_params = {"z": self._z}
        self._nuts.setup(warmup_steps)
        self._num_drawn = -warmup_steps

    def _potential(self, params: dict[str, Tensor]) -> Tensor:
        """Minus the log density of ``z``, nats; infinite where it is not a number."""
        state, z = self.posterior.state, params["z"]
        with without_validation():
            log_joint = state.problem.density.log_joint(self._point(z), state.theta)[0]
        value = 0.5 * (~state.problem.active * z.square()).sum() - log_joint  # pruned coordinates do as they please
        return torch.where(torch.isnan(value), torch.inf, value)

    def _point(self, z: Tensor) -> Tensor:
        """``mode + A^-1/2 z``, by the posterior's own precision of whatever kind, ``(1, D)``."""
        state = self.posterior.state
        return state.u + state.precision.colour((z * state.problem.active).unsqueeze(0))

    @property
    def initial_params(self) -> dict[str, Tensor]:
        """The mode, unconstrained, by site."""
        return self._sites(self._z)

    @initial_params.setter
    def initial_params(self, params: dict[str, Tensor]) -> None:
        raise BadInput(
            "initial_params cannot be set: LaplaceNUTS begins at the posterior's mode. To begin elsewhere, use NUTS."
        )

    def sample(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """One draw, unconstrained, by site."""
        self._z = self._running.sample({"z": self._z})["z"].detach()
        self._num_drawn += 1
        return self._sites(self._z)

    def _sites(self, z: Tensor) -> dict[str, Tensor]:
        joint = self.posterior.state.problem.joint
        return joint.latents.unconstrained(self._point(z)[0].to(joint.dtype))

    @property
    def _running(self) -> NUTS:
        if self._nuts is None:
            raise BadInput("LaplaceNUTS has not begun; run MCMC(kernel, ...) first.")
        return self._nuts

    def diagnostics(self) -> dict[str, Any]:
        """Pyro's own: divergences and the acceptance rate."""
        found: dict[str, Any] = self._running.diagnostics()
        return found

    def logging(self) -> "OrderedDict[str, str]":
        """What the progress bar shows."""
        found: OrderedDict[str, str] = self._running.logging()
        return found

    def cleanup(self) -> None:
        """Say so where divergences show that the metric is wrong."""
        drawn, diverging = self._num_drawn, len(self._running._divergences)
        self._num_drawn = 0  # it is called twice
        if drawn > 0 and diverging > MANY * drawn:
            warnings.warn(
                f"LaplaceNUTS: {diverging} of {drawn} draws diverged: the curvature at the mode is not that of the "
                "bulk (a funnel, a ridge). Name the scales in outer=[...], write the model without centring, or run "
                "NUTS(posterior.model).",
                stacklevel=2,
            )
        self._running.cleanup()
