"""A Gaussian at a posterior mode: draws, quantiles, and the density of data at the mode."""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.process_state import entry_point, generator_of
from pyro_evidence.numerics.batched import HELD_NUMBERS
from pyro_evidence.numerics.linalg import ROUNDED, require_memory
from pyro_evidence.program.checks import Arguments, as_tensors, new_data, require_kept, require_targets
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.parameters import DUMMY_SITE
from pyro_evidence.program.simulate import NewLevels, largest_row, rows_at_once
from pyro_evidence.program.sites import Values, is_improper
from pyro_evidence.settings import check_count, quantile_levels
from pyro_evidence.structure.names import as_written

NUM_DRAWS = 1_000  # of a posterior, where nobody says how many: means are known to a thirtieth of a deviation
SHARED = 16  # torch makes as many normal numbers together: their values do not hang on how draws are shared out
TOGETHER = 128  # draws of a batch between two looks at the clock, whose largest weights tell a tail


@entry_point
class Posterior:
    """A Gaussian at a mode, in as many directions as it has white noise: what draws and predictions are made of.

    Failed allocations in a public method of a posterior are an error message.
    """

    _draws: Callable[[Tensor], Tensor]  # unconstrained, (S, D), from white noise (S, num_directions)
    _away: Callable[[Tensor], Tensor]  # each coordinate z standard deviations from the mode, z.shape + (D,)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        entry_point(cls)

    @property
    def _joint(self) -> LogJoint:
        """The density, with the data of the fit."""
        raise NotImplementedError

    @property
    def flat_sites(self) -> tuple[str, ...]:
        """Latent sites under a flat prior, which has no integral.

        The log evidence is then the integral with a prior density of one in the sites' own units, and no evidence to
        weigh models by.  Empty where the data of the fit were not kept.
        """
        joint, theta = self._joint, self._mode_at[1]
        if not joint.has_data:
            return ()
        nodes = joint.trace(joint.initial_u, theta).nodes
        return tuple(site for site in joint.latents.names if is_improper(nodes[site]))

    @property
    def _mode_at(self) -> tuple[Tensor, Tensor]:
        """Unconstrained coordinates ``(D,)`` of the mode, and hyperparameters ``(T,)``."""
        raise NotImplementedError

    _num_directions: Any  # number of standard normal numbers that make one draw
    _laplace: Any  # this posterior as a LaplacePosterior, of whichever model
    _num_components: Any = None  # of a mixture, that are left; None where the model tells
    _linear_terms: Any = ()  # parameters of observed sites that are predicted by tangents of their predictors
    _in_blocks: ClassVar[bool] = False  # whether the log evidence may be checked block by block

    _num_maximised: Any  # number of maximised parameters, for which the log evidence carries no penalty

    @property
    def _as_laplace(self) -> tuple[float, tuple[str, ...]]:
        """Laplace's log evidence, nats, nan for another number; and what a comparison says of it, a sentence each."""
        return float(self.log_evidence), ()

    @property
    def log_evidence(self) -> Tensor:
        """Total, nats, shape ``()``."""
        raise NotImplementedError

    def _needs_data(self, what: str) -> None:
        """Refuse what looks at the data of the fit, where they were not kept."""
        require_kept(self._joint, what)

    @property
    def marginalised_sites(self) -> tuple[str, ...]:
        """Names of the latent sites that were integrated numerically."""
        return ()

    @property
    def mode(self) -> Values:
        """Constrained site values at the mode of the density in unconstrained space."""
        return self._constrained(self._mode_at[0])

    def _constrained(self, u: Tensor) -> Values:
        latents = self._joint.latents.constrained(u.to(self._joint.dtype))
        return {n: v.detach() for n, v in latents.items() if n != DUMMY_SITE}

    _num_remembered: Any = 0  # draws of seed 0 that cost nothing
    _price: Any = 0.0  # of another draw, seconds of the processor

    def _looks(self, draw: Callable[[int], Any], most: int, until: float) -> Iterator[int]:
        """Draw in batches as long as the next one would end before ``until``; ``most`` in all, a small one at least.

        :return: how many there are each time that these are four times as many, and at the end.
        """
        num, look, price, now = 0, TOGETHER, self._price, time.process_time()
        while True:
            first = max(SHARED, self._num_remembered // SHARED * SHARED)
            size = min(TOGETHER - num % TOGETHER if num else first, most - num)
            if num:
                size = min(size, int(min(size + SHARED, (until - now) / max(price, 1e-9))) // SHARED * SHARED)
            if size <= 0:
                break
            draw(size)
            begun, now, num = now, time.process_time(), num + size
            price = max((now - begun) / size, self._price)
            if look <= num < most:
                yield num
                look, now = 4 * num, time.process_time()
        yield num

    def get_samples(self, num_samples: int = NUM_DRAWS, seed: int | None = None) -> Values:
        """Independent draws, shaped and constrained as by ``MCMC.get_samples()``: ``(S,) + site shape``.

        :param seed: None takes one from the state of the caller's generator.  That generator stays where it
            is, so that the draws are the same until it moves, and unrelated to those that it gives next.
        """
        num_samples = check_count("num_samples", num_samples, at_least=0)
        dtype = self._mode_at[0].dtype
        white = white_noise(num_samples, self._num_directions, generator_of(seed), dtype)
        return self._constrained(self._draws(white))

    def _latent_draws(
        self, joint: LogJoint, new: Arguments, num_samples: int, seed: int, by_quadrature: bool
    ) -> Iterator[tuple[Values, Tensor]]:
        """Values of the latent sites for a prediction, as many at a time as are held, and their weights ``(S,)``.

        Draws beside their mirror images around the mode: means of what is linear are exact.

        :param joint: with the arguments of the prediction, ``new`` those without targets that are missing.
        :param by_quadrature: whether nodes with weights may stand for draws, where there is a rule.
        """
        generator, numbers = generator_of(seed), max(largest_row(joint), self._num_directions)
        for white in pairs_in_parts(num_samples, self._num_directions, generator, numbers):
            rows = self._draws(white).to(self._joint.dtype)
            for part in rows.split(rows_at_once(joint)):
                yield self._joint.latents.constrained(part), equal_weights(len(part))

    def median(self, *args: Any, **kwargs: Any) -> Values:
        """Median of each site, as ``AutoGuide.median``; the arguments are not looked at."""
        return self.quantiles(0.5)

    def quantiles(self, q: float | Sequence[float], *args: Any, **kwargs: Any) -> Values:
        """Marginal quantiles, taken in unconstrained space as ``AutoGuide.quantiles`` takes them.

        :return: ``(len(q),) + shape`` for each site; ``shape`` for a single ``q``.
        :raises BadInput: for a ``q`` outside 0 to 1.
        """
        return self._constrained(self._away(torch.special.ndtri(quantile_levels(q))))

    def _with(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LogJoint:
        """The log joint with other arguments; with its own, where there are none."""
        joint, written = copy.copy(self._joint), as_written(self._joint.model)
        if len(args) == 1 and not kwargs and hasattr(args[0], "columns") and hasattr(written, "arguments"):
            args = written.arguments(args[0])  # a frame, of a model that a formula made
        if args or kwargs:
            joint.args, joint.kwargs = as_tensors(args, kwargs)
            joint = joint.inside(NewLevels({part.name: part.shape for part in joint.latents}, drawn=False))
        else:
            self._needs_data("a method without arguments")
        return joint

    def log_likelihood(self, *args: Any, **kwargs: Any) -> Values:
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
        return of_all_sites(self.log_likelihood(*args, **kwargs), "use log_likelihood(...), an entry per site")


@entry_point
class ClassProbabilities:
    """Classes of new data by their log probabilities."""

    log_proba: Callable[[Tensor], Tensor]  # inputs (N, D) to log P(C_k | x_n), (N, K)

    def predict(self, X: Tensor) -> Tensor:
        """``P(C_k | x_n)``, shape ``(N, K)``; rows add up to 1."""
        return self.log_proba(X).exp()

    def predict_proba(self, X: Tensor) -> Tensor:
        """``P(C_k | x_n)`` under the name that scikit-learn gives it, shape ``(N, K)``."""
        return self.predict(X)

    def labels(self, X: Tensor) -> Tensor:
        """The likeliest class of each datum, shape ``(N,)``, int64."""
        return self.log_proba(X).argmax(-1)


def of_all_sites(pointwise: Values, advice: str) -> Tensor:
    """Pointwise log densities of the observed sites, summed over the sites.

    :raises BadInput: with advice, where they have different shapes.
    """
    shapes = {n: tuple(v.shape) for n, v in pointwise.items()}
    if len(set(shapes.values())) != 1:
        raise BadInput(f"observed sites have different shapes, {shapes}; expected one shape: {advice}.")
    return torch.stack(list(pointwise.values())).sum(0)


def varies(draws: Tensor) -> Tensor:
    """Which numbers differ among draws ``(S, ...)`` by more than rounding, whatever their unit, bool ``(...)``."""
    return draws.std(0) > ROUNDED * draws.abs().amax(0)


def equal_weights(num: int) -> Tensor:
    """Weights of draws, ``(S,)``."""
    return torch.ones(num, dtype=torch.float64)


def white_noise(
    num_samples: int, size: int, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Standard normal numbers, ``(S, size)``; the same on every device.

    :param generator: None for the one that everybody uses.
    :raises TooLarge: when they, and the draws that are made of them, do not fit into memory.
    """
    what = f"{num_samples:,} draws of {size:,} coordinates"
    require_memory(3 * dtype.itemsize * num_samples * size, what, torch.device("cpu"), "Ask for fewer at a time.")
    return torch.randn(num_samples, size, generator=generator, dtype=dtype, device="cpu")


def in_pairs(num_samples: int, size: int, generator: torch.Generator | None = None) -> Tensor:
    """White noise whose second half is the first with its sign turned, ``(S, size)``: linear means are then exact."""
    half = white_noise((num_samples + 1) // 2, size, generator)
    return torch.cat([half, -half])


def pairs_in_parts(num_samples: int, size: int, generator: torch.Generator, numbers: int) -> Iterator[Tensor]:
    """The rows of :func:`in_pairs`, each beside its mirror image, part by part.

    :param numbers: that are made for each draw, of which :data:`~pyro_evidence.numerics.batched.HELD_NUMBERS` are held.
    :raises TooLarge: when not even a weight for each draw fits into memory.
    """
    what = f"{num_samples:,} draws of {size:,} coordinates"
    require_memory(8 * num_samples, what, torch.device("cpu"), "Ask for fewer at a time.")
    half, at_once = (num_samples + 1) // 2, max(1, HELD_NUMBERS // (2 * numbers * SHARED)) * SHARED
    for start in range(0, half, at_once):
        yield in_pairs(2 * min(at_once, half - start), size, generator)
