"""What every Gaussian at a posterior mode says in the same way: draws, quantiles, densities of data, predictions."""

import copy
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.process_state import WithinMemory, own_random_numbers
from pyro_evidence.posterior import archive, predict
from pyro_evidence.posterior.moments import PredictiveDraws, predicted
from pyro_evidence.posterior.predict import Rows
from pyro_evidence.program.checks import require_targets
from pyro_evidence.program.failed_run import as_tensors, new_data
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.parameters import NOTHING
from pyro_evidence.program.simulate import NewLevels, largest_row, rows_at_once
from pyro_evidence.settings import check_count, check_seed, quantile_levels


class GaussianPosterior(WithinMemory):
    """A Gaussian at a mode, in as many directions as it has white noise, and what it says of latents and of data."""

    @property
    def _joint(self) -> LogJoint:
        """The density, with the data of the fit."""
        raise NotImplementedError

    @property
    def _mode_at(self) -> tuple[Tensor, Tensor]:
        """Unconstrained coordinates ``(D,)`` of the mode, and hyperparameters ``(T,)``."""
        raise NotImplementedError

    @property
    def _num_directions(self) -> int:
        """How many standard normal numbers make one draw."""
        raise NotImplementedError

    def _draws(self, white: Tensor) -> Tensor:
        """Unconstrained draws ``(S, D)`` from white noise ``(S, num_directions)``."""
        raise NotImplementedError

    def _away(self, z: Tensor) -> Tensor:
        """Each coordinate ``z`` standard deviations from the mode, ``z.shape + (D,)``."""
        raise NotImplementedError

    def _needs_data(self, what: str) -> None:
        """Refuse what looks at data of the fit where they were not kept."""

    def _observed_rows(self, joint: LogJoint, num_samples: int, seed: int, kept: int) -> dict[str, Rows]:
        """Every observed site at the arguments of ``joint``, over draws of the latents; rows that are kept, or 0."""
        raise NotImplementedError

    def _straightened(self) -> AbstractContextManager[None]:
        """Within, what is predicted is of a model that draws from the Gaussian fit: a network is its tangent."""
        return nullcontext()

    def _record(self) -> dict[str, Any]:
        """What a file holds of it."""
        raise NotImplementedError

    @property
    def mode(self) -> dict[str, Tensor]:
        """Constrained site values at the mode of the density in unconstrained space."""
        return self._constrained(self._mode_at[0])

    def _constrained(self, u: Tensor) -> dict[str, Tensor]:
        latents = self._joint.latents.constrained(u.to(self._joint.dtype))
        return {n: v.detach() for n, v in latents.items() if n != NOTHING}

    def get_samples(self, num_samples: int = 1000, seed: int | None = None) -> dict[str, Tensor]:
        """Independent draws, shaped and constrained as by ``MCMC.get_samples()``: ``(S,) + site shape``.

        :param seed: None takes one from the state of the caller's generator.  That generator stays where it
            is, so that the draws are the same until it moves, and unrelated to those that it gives next.
        """
        num_samples = check_count("num_samples", num_samples, at_least=0)
        dtype = self._mode_at[0].dtype
        white = predict.white_noise(num_samples, self._num_directions, generator_of(seed), dtype)
        return self._constrained(self._draws(white))

    def _in_parts(self, joint: LogJoint, num_samples: int, seed: int) -> Iterator[dict[str, Tensor]]:
        """Draws of every latent site beside their mirror images around the mode, as many at a time as are held."""
        num_samples = check_count("num_samples", num_samples)
        numbers = max(largest_row(joint), self._num_directions)
        for white in predict.pairs_in_parts(num_samples, self._num_directions, generator_of(seed), numbers):
            rows = self._draws(white).to(self._joint.dtype)
            for part in rows.split(rows_at_once(joint)):
                yield self._joint.latents.constrained(part)

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Median of each site, as ``AutoGuide.median``; the arguments are not looked at."""
        return self.mode

    def quantiles(self, q: float | Sequence[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Marginal quantiles, taken in unconstrained space as ``AutoGuide.quantiles`` takes them.

        :return: ``(len(q),) + shape`` for each site; ``shape`` for a single ``q``.
        :raises BadInput: for a ``q`` outside 0 to 1.
        """
        return self._constrained(self._away(torch.special.ndtri(quantile_levels(q))))

    def _with(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LogJoint:
        """The log joint with other arguments; with its own, where there are none."""
        joint = copy.copy(self._joint)
        if args or kwargs:
            joint.args, joint.kwargs = as_tensors(args, kwargs)
            joint = joint.inside(NewLevels({part.name: part.shape for part in joint.latents}, drawn=False))
        else:
            self._needs_data("a method without arguments")
        return joint

    def log_likelihood(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Pointwise log density of every observed site at the mode, nats; by default of the training data.

        Levels that the fit has not seen stand at their prior mean.

        :return: site name -> one number per datum; sites that share a discrete site are joined by ``+``.
        :raises BadInput: when the model cannot be run on the arguments, or they lack an observed site's data.
        """
        joint, (u, theta) = self._with(args, kwargs), self._mode_at
        with new_data(joint.args, joint.kwargs):
            require_targets(joint.trace(u, theta).nodes, joint.observed, joint.unvalidated)
            return {n: v.detach() for n, v in joint.pointwise(u, theta).items()}

    def log_prob(self, *args: Any, **kwargs: Any) -> Tensor:
        """Pointwise log predictive density at the mode, nats, shape ``(N,)``, summed over observed sites.

        :raises BadInput: as :meth:`log_likelihood`, and when observed sites have different shapes.
        """
        parts = self.log_likelihood(*args, **kwargs)
        shapes = {n: tuple(v.shape) for n, v in parts.items()}
        if len(set(shapes.values())) != 1:
            raise BadInput(
                f"observed sites have different shapes, {shapes}; use log_likelihood(...), an entry per site."
            )
        return torch.stack(list(parts.values())).sum(0)

    def save(self, path: str | Path) -> None:
        """Write tensors and settings, no code, in the layout of safetensors; the file is whole or is not there.

        :raises BadInput: when the model's arguments are not tensors, numbers, strings or containers of them.
        :raises NotWritten: when the disk is full or the folder cannot be written to; what was there before stays.
        """
        archive.write(self._record(), path)

    def predict(
        self,
        *args: Any,
        return_std: bool = False,
        quantiles: float | Sequence[float] | None = None,
        site: str | None = None,
        num_samples: int = 1000,
        seed: int = 0,
        **kwargs: Any,
    ) -> Any:
        """Means of new data, or class probabilities, averaged over the posterior at fixed hyperparameters.

        Means of the likelihood are averaged, not draws of it; a Gaussian process by itself is integrated by quadrature.
        A network is replaced by its tangent at the mode: draws of its weights are far wilder than what it has learned.

        :param args: the model's arguments at new inputs; targets may be left out.  Without any, the training inputs.
        :param return_std: with the predictive standard deviation, noise included.
        :param quantiles: return instead quantiles of new data, for classes those of the probability over the posterior.
        :param site: the observed site, where there are several.
        :param num_samples: draws of the latents, half of them mirror images of the others.
        :param seed: of the draws.
        :return: shape ``(N,)`` (for a Bernoulli site the probability of 1), ``(N, C)`` for a categorical one; a pair
            with ``return_std``; ``(Q,) + shape`` for quantiles.
        :raises BadInput: when the model cannot be run on the arguments, and for a distribution without a mean.

        >>> mean, sd = posterior.predict(X_new, return_std=True)  # doctest: +SKIP
        """
        joint = self._with(args, kwargs)
        with self._straightened():
            if quantiles is None and site is None and len(joint.observed) == 1 and not joint.discrete:
                draws = PredictiveDraws(num_samples, seed)
                with new_data(joint.args, joint.kwargs):
                    return predicted(self, joint, joint.args, joint.kwargs, draws, return_std=return_std)
            rows = self._observed_rows(joint, num_samples, seed, 0 if quantiles is None else num_samples)
        return predict.answer(predict.chosen(rows, site), return_std, quantiles)

    def probability(self, *args: Any, site: str | None = None, num_samples: int = 1000, **kwargs: Any) -> Tensor:
        """Class probabilities averaged over the posterior: of label 1 ``(N,)``, or of each class ``(N, C)``.

        :raises UnsupportedModel: for a site that is not Bernoulli, Categorical or OneHotCategorical.
        """
        joint = self._with(args, kwargs)
        with self._straightened():
            rows = self._observed_rows(joint, num_samples, 0, kept=0)
        return predict.probabilities(predict.chosen(rows, site), site)


def generator_of(seed: int | None) -> torch.Generator:
    """Our own random numbers; the caller's generator stays where it is."""
    if seed is None:
        with own_random_numbers():
            seed = int(torch.randint(2**62, (), device="cpu"))
    check_seed(seed)
    return torch.Generator(device="cpu").manual_seed(operator.index(seed))
