"""One mixture of a recognised model as a density of data, new or old."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.failed_run import new_data
from pyro_evidence.mixture_kernels import Kernels, kernels
from pyro_evidence.mixture_structure import MixtureStructure
from pyro_evidence.ops.mixture import Mixture
from pyro_evidence.ops.mixture_background import MixtureWithBackground
from pyro_evidence.ops.mixture_density import MixtureDensity


@dataclass(frozen=True)
class FittedMixture:
    """The model with its weights and hyperparameters held at one mixture.

    :ivar structure: the model, recognised.
    :ivar mixture: weights and hyperparameters, one row, in the model's units.
    """

    structure: MixtureStructure
    mixture: Mixture

    @property
    def num_components(self) -> int:
        """Number of components that are left."""
        return int(self.mixture.active[0].sum())

    def kernels(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Kernels:
        """The kernels at these arguments; at the training data without any."""
        joint = self.structure.fixed(self.structure.params(self.mixture))
        if args or kwargs:
            joint = copy.copy(joint)
            joint.args, joint.kwargs = args, dict(kwargs)
        with torch.random.fork_rng():  # a response that is not given is drawn, and not looked at
            with new_data(joint.args, joint.kwargs):
                trace = joint.trace(self.structure.flat(self.mixture.w[0]), joint.initial_theta)
        return kernels(joint, trace)

    def density(self, *args: Any, **kwargs: Any) -> MixtureDensity:
        """The density; for a conditional model one for each row of the inputs given.

        The noise is that of the training data, also where a model measures it in units of the data that it is given,
        and so is the box of a background.

        :param args: as for the model, responses optional; the training data without arguments.
        """
        return self._density(self.kernels(args, kwargs))

    def _density(self, found: Kernels) -> MixtureDensity:
        loc, noise = found.loc.movedim(0, 1).detach(), self.mixture.noise[0]
        tril = noise.rsqrt().diag_embed() if noise.dim() == 2 else torch.linalg.cholesky(torch.linalg.inv(noise))
        tril = tril.to(loc).expand(1, *loc.shape[1:], loc.shape[-1])
        parts = found.probs.detach().log().unsqueeze(0), loc, tril
        background = self.structure.background
        return MixtureDensity(*parts) if background is None else MixtureWithBackground(*parts, background)

    def log_prob(self, *args: Any, **kwargs: Any) -> Tensor:
        """Log density of each datum, nats, shape ``(N,)``; missing values are integrated out.

        :raises BadInput: when the arguments hold no responses.
        """
        found = self._given(args, kwargs)
        return self._density(found).log_prob(found.value)

    def responsibilities(self, *args: Any, **kwargs: Any) -> Tensor:
        """``p(component | datum)``, shape ``(N, K)``; the training data without arguments.

        :raises BadInput: when the arguments hold no responses.
        """
        found = self._given(args, kwargs)
        return self._density(found).responsibilities(found.value)

    def _given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Kernels:
        found = self.kernels(args, kwargs)
        if not found.is_observed:
            raise BadInput("the arguments hold no responses; expected them as for run(...).")
        given, fitted = found.value.shape[-1], self.structure.Y.shape[-1]
        if given != fitted:
            raise BadInput(
                f"the data have {given} column(s); the mixture was fitted to {fitted}. Pass the same columns, in the "
                f"same order; marginals are had from density(...).marginal."
            )
        return found
