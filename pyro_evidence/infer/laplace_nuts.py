"""Pyro's NUTS in coordinates that a posterior has made round."""

import warnings
from collections import OrderedDict
from contextlib import suppress
from typing import Any

import torch
from pyro.infer import NUTS
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.process_state import without_validation
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.posterior.whitening import Whitening, WithGradient, fused, round_coordinates
from pyro_evidence.program.checks import same_arguments
from pyro_evidence.program.log_joint import Model

MANY = 0.05  # share of divergent draws that shows the metric at the mode to be wrong
TRIAL = 20  # draws after warm-up by which that is judged
AGAIN = 300  # steps in which a metric is adapted then
CAREFUL = 0.95  # target acceptance then


class LaplaceNUTS(MCMCKernel):
    """``MCMC(LaplaceNUTS(posterior), num_samples=500, warmup_steps=50)``: NUTS in coordinates whitened by a posterior.

    The target is the density that NUTS has on ``posterior.model``, and the draws have the same names and shapes.  Only
    the step size is adapted, so that fifty steps of warm-up will do.  Of a posterior with marginalised sites the inner
    ones are whitened by the precision at the current marginalised value, the marginalised ones by their own curvature,
    volumes counted exactly.  Where divergences in twenty draws after warm-up show that this is no good, a metric is
    adapted in these coordinates for 300 steps more, at smaller steps, and that is said.

    The density and its gradient are evaluated as one list of tensor operations where the model's Python allows that.

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
        self.settings: dict[str, Any] = {"max_tree_depth": max_tree_depth, "target_accept_prob": target_accept_prob}
        latents = posterior.state.problem.joint.latents
        self.transforms: dict[str, Any] = {part.name: part.transform.inv for part in latents}
        self.round: Whitening = round_coordinates(posterior)
        self._nuts: NUTS | None = None
        self._value: WithGradient | None = None
        self._num_drawn, self._adapted = 0, False
        self._z = torch.zeros_like(posterior.state.u)

    @property
    def model(self) -> Model:
        """The model with the fitted hyperparameters put in."""
        return self.posterior.model

    def __getstate__(self) -> dict[str, Any]:
        """Without what is only kept for speed."""
        return vars(self) | {"_value": None}

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        """Begin at the mode.

        :raises BadInput: for other data than those of the posterior.
        """
        joint = self.posterior.state.problem.joint
        if (args or kwargs) and not same_arguments((joint.args, joint.kwargs), (args, kwargs)):
            raise BadInput("run(...) was given other data than the posterior was fitted to; call run() without any.")
        self._z, self._num_drawn, self._adapted = torch.zeros_like(self._z), -warmup_steps, False
        if self._value is None:
            away = torch.randn(2, len(self._z), generator=torch.Generator().manual_seed(0), dtype=self._z.dtype)
            mode_and_around, state = torch.cat([self._z.unsqueeze(0), away.to(self._z)]), self.posterior.state
            density = state.problem.density  # recognised here, and not while it is traced

            def minus_log_density(z: Tensor) -> Tensor:  # nats, up to a constant
                u, log_volume = self.round.forward(z)
                log_joint = density.log_joint(u.unsqueeze(0), state.theta)[0]
                return 0.5 * (~state.problem.active * z.square()).sum() - log_joint - log_volume

            with without_validation():
                self._value = fused(minus_log_density, mode_and_around)
        self._nuts = self._kernel(warmup_steps, adapt_mass_matrix=False, **self.settings)

    def _kernel(self, warmup_steps: int, **settings: Any) -> NUTS:
        """Pyro's, from where the chain is."""
        nuts = NUTS(potential_fn=self._potential, **settings)
        nuts.initial_params = {"z": self._z}
        nuts.setup(warmup_steps)
        return nuts

    def _potential(self, params: dict[str, Tensor]) -> Tensor:
        """Minus the log density, its gradient computed with it; infinite, and flat, where either is not a number."""
        assert self._value is not None
        z = params["z"]
        value, gradient = z.new_full((), torch.inf), torch.zeros_like(z)
        with suppress(LinAlgError), without_validation():  # a singular matrix of the model's
            found = self._value(z.detach())
            if all(bool(x.isfinite().all()) for x in found):
                value, gradient = found
        return value + gradient @ (z - z.detach())

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
        if self._num_drawn == 0 and not self._adapted:
            self._judge()
        self._z = self._running.sample({"z": self._z})["z"].detach()
        self._num_drawn += 1
        return self._sites(self._z)

    def _judge(self) -> None:
        """A few draws that nobody sees; where they diverge, the metric is adapted after all."""
        for _ in range(TRIAL):
            self._z = self._running.sample({"z": self._z})["z"].detach()
        number, self._adapted = len(self._running._divergences), True
        self._running._divergences.clear()
        if number <= MANY * TRIAL:
            return
        warnings.warn(
            f"LaplaceNUTS: {number} of {TRIAL} draws diverged: the curvature at the mode is not that of the bulk (a "
            f"funnel, a ridge). A metric is adapted instead, in {AGAIN} more steps; naming the scales in "
            "marginalise=[...] or writing the model without centring may spare that.",
            stacklevel=2,
        )
        self._nuts = self._kernel(AGAIN, **(self.settings | {"target_accept_prob": CAREFUL}))
        for _ in range(AGAIN):
            self._z = self._running.sample({"z": self._z})["z"].detach()

    def _sites(self, z: Tensor) -> dict[str, Tensor]:
        joint = self.posterior.state.problem.joint
        with torch.no_grad():
            return joint.latents.unconstrained(self.round.forward(z)[0].to(joint.dtype))

    @property
    def _running(self) -> NUTS:
        if self._nuts is None:
            raise BadInput("LaplaceNUTS has not begun; run MCMC(kernel, ...) first.")
        return self._nuts

    def diagnostics(self) -> dict[str, Any]:
        """Pyro's own: divergences and the acceptance rate."""
        return self._running.diagnostics()

    def logging(self) -> "OrderedDict[str, str]":
        """Figures of the progress bar."""
        return self._running.logging()

    def cleanup(self) -> None:
        """Say so where the draws went on to diverge."""
        drawn, diverging = self._num_drawn, len(self._running._divergences)
        self._num_drawn = 0  # it is called twice
        if drawn > 0 and diverging > MANY * drawn:
            warnings.warn(
                f"LaplaceNUTS: {diverging} of {drawn} draws diverged: the curvature at the mode is not that of the "
                "bulk (a funnel, a ridge). Name the scales in marginalise=[...], write the model without centring, "
                "or run NUTS(posterior.model).",
                stacklevel=2,
            )
        self._running.cleanup()
