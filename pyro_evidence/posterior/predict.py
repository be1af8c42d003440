"""What a fitted model says at new inputs: means, class probabilities and new data, averaged over draws of latents."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Normal, OneHotCategorical

from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.fitting.process_state import own_random_numbers, without_validation, without_validation_or_params
from pyro_evidence.numerics.linalg import require_memory
from pyro_evidence.program import simulate
from pyro_evidence.program.failed_run import new_data
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.predictors import unwrapped
from pyro_evidence.program.simulate import unobserved, vectorised
from pyro_evidence.settings import check_seed, quantile_levels

Values = dict[str, Tensor]
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
KEYS = ("mean", "variance", "draws")
NUMBERS = 2**24  # whose quantiles are taken at a time
SHARED = 16  # torch makes as many normal numbers together: their values do not hang on how rows are shared out


@dataclass(frozen=True)
class Moments:
    """Mean and variance of new data, averaged over draws; those of more draws are added.

    :ivar weight: of these draws among all.
    :ivar mean: shape ``(N,)``, or of class probabilities ``(N, C)``.
    :ivar variance: of the same shape.
    """

    weight: float
    mean: Tensor
    variance: Tensor

    @classmethod
    def over(cls, weights: Tensor, mean: Tensor, variance: Tensor) -> "Moments":
        """Of rows of means and variances, by the laws of total expectation and variance.

        :param weights: of the rows, ``(S,)``, as many as are in front of ``mean`` and ``variance``.

        >>> rows = torch.tensor([[1.0], [3.0]])
        >>> Moments.over(torch.ones(2), rows, torch.zeros(2, 1)).variance
        tensor([1.])
        """
        share = (weights / weights.sum()).to(mean)
        average = torch.tensordot(share, mean, 1)
        spread = torch.tensordot(share, (mean - average).square_(), 1)
        return cls(float(weights.sum()), average, torch.tensordot(share, variance, 1) + spread)

    def __add__(self, other: "Moments") -> "Moments":
        """Chan, Golub and LeVeque (1983), eq. 1.5."""
        weight = self.weight + other.weight
        away, share = other.mean - self.mean, other.weight / weight
        within = torch.lerp(self.variance, other.variance, share)
        return Moments(weight, self.mean + share * away, within + share * (1.0 - share) * away.square())


@dataclass(frozen=True)
class Rows:
    """One observed site at new inputs, over rows of draws of the latents.

    :ivar moments: of a new datum; for classes of their probabilities, whose own spread is left out.
    :ivar values: what quantiles are of, parts ``(S,) + shape``: new data, for classes the probabilities; empty where
        nobody asks for quantiles.
    :ivar classes: whether the site has classes.
    """

    moments: Moments
    values: tuple[Tensor, ...]
    classes: bool

    @property
    def average(self) -> Tensor:
        """Mean over the rows."""
        return self.moments.mean

    @property
    def spread(self) -> Tensor:
        """Standard deviation of a new datum, its noise included; for classes that of the probability."""
        return self.moments.variance.sqrt()

    def quantiles(self, q: Tensor) -> Tensor:
        """Quantiles of a new datum; for classes of the probability; ``(len(q),) + shape``, or ``shape`` for one."""
        rows = torch.cat(self.values).to(self.average)
        flat = rows.flatten(1)
        found = [part.quantile(q.to(part), 0) for part in flat.split(max(1, NUMBERS // len(flat)), 1)]
        return torch.cat(found, -1).reshape(*q.shape, *rows.shape[1:])

    def __add__(self, other: "Rows") -> "Rows":
        """Over more rows."""
        return Rows(self.moments + other.moments, self.values + other.values, self.classes)


class _Observed(Messenger):
    """Gives observed sites their values in a way that can be batched, where there is one.

    :param sites: the observed sites.
    :param means: whether they get their means, which no other site sees, in place of draws.
    """

    def __init__(self, sites: Sequence[str], means: bool) -> None:
        super().__init__()
        self.sites, self.means = sites, means

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] not in self.sites or msg["value"] is not None or has_classes(msg["fn"]):
            return
        with suppress(NotImplementedError):
            if self.means:
                msg["value"] = msg["fn"].mean
            elif isinstance(unwrapped(msg["fn"]).base, Normal):
                mean, sd = msg["fn"].mean, msg["fn"].stddev
                msg["value"] = mean + sd * torch.randn(mean.shape, dtype=mean.dtype, device=mean.device)


def observed_rows(
    joint: LogJoint, theta: Tensor, latents: Iterable[Values], new: Arguments, seed: int, kept: int
) -> dict[str, Rows]:
    """Every observed site at new inputs, given rows of the latents.

    :param latents: constrained values of the latent sites, each ``(S,) + site shape``, part by part.
    :param new: the model's arguments at the new inputs; a required one that is missing is passed as None.
    :param seed: of the new data; the caller's random state is not touched.
    :param kept: how many rows of new data are kept for quantiles; with 0 the means of the one observed site stand for
        them.
    :raises BadInput: when the model cannot be run on them, or for what is no seed.
    :raises TooLarge: when what is kept does not fit into memory.
    """
    check_seed(seed)
    args, kwargs = completed(joint.model, *new)
    model = _Observed(joint.observed, means=not kept and len(joint.observed) == 1)(unobserved(joint, theta))
    classes: dict[str, bool] = {}

    def run(row: Values) -> Values:
        with without_validation_or_params():
            trace = poutine.trace(poutine.condition(model, data=row)).get_trace(*args, **kwargs)
        nodes = {n: trace.nodes[n] for n in joint.observed if n in trace.nodes}
        classes.update({n: has_classes(node["fn"]) for n, node in nodes.items()})
        return {f"{n}/{k}": v for n, node in nodes.items() for k, v in zip(KEYS, moments(node), strict=True)}

    def over(part: Values) -> dict[str, Rows]:
        found = vectorised(run, part)
        return {n: _rows([found[f"{n}/{key}"] for key in KEYS], c, kept) for n, c in classes.items()}

    with new_data(args, kwargs), own_random_numbers(), torch.no_grad(), without_validation():
        torch.manual_seed(seed)
        return reduce(_with_more, map(over, latents))


def _rows(found: list[Tensor], classes: bool, kept: int) -> Rows:
    mean, variance, values = found
    moments = Moments.over(torch.ones(len(mean), dtype=torch.float64), mean, variance)
    if not kept:
        return Rows(moments, (), classes)
    what, remedy = f"{kept:,} draws of new data {tuple(mean.shape[1:])}", "Ask for fewer, or for fewer data at a time."
    require_memory(16 * kept * mean[0].numel() if kept > len(mean) else 0, what, mean.device, remedy)
    return Rows(moments, (mean if classes else values,), classes)


def _with_more(rows: dict[str, Rows], more: dict[str, Rows]) -> dict[str, Rows]:
    return {n: rows[n] + more[n] for n in rows}


def completed(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """The arguments with None for required ones that are missing, as the targets of a prediction are.

    >>> completed(lambda X, t: None, [1.0], {})
    ((1.0,), {'t': None})
    """
    try:
        signature = inspect.signature(model)
        given = signature.bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # no signature, or arguments that do not fit, of which the model itself will tell
        return tuple(args), dict(kwargs)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    wanted = [n for n, p in signature.parameters.items() if p.kind in named and p.default is inspect.Parameter.empty]
    return tuple(args), dict(kwargs) | {n: None for n in wanted if n not in given}


def has_classes(fn: Any) -> bool:
    """Whether a distribution is over classes, two or more."""
    return isinstance(unwrapped(fn).base, Bernoulli | Categorical | OneHotCategorical)


def moments(node: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of an observed site given all else, and a draw of it; for classes their probabilities."""
    fn, value = node["fn"], node["value"]
    base = unwrapped(fn).base
    if isinstance(base, Categorical):
        probs = base.probs.expand(*value.shape, base.probs.shape[-1])
        return probs, torch.zeros_like(probs), value
    mean = fn.mean.expand(value.shape)
    return mean, torch.zeros_like(mean) if has_classes(fn) else fn.variance.expand(value.shape), value


def chosen(rows: Mapping[str, Rows], site: str | None) -> Rows:
    """The rows of one site.

    :raises BadInput: for a name that is none, or where there are several sites and none is named.
    """
    if site is None and len(rows) == 1:
        return next(iter(rows.values()))
    if not isinstance(site, str) or site not in rows:
        raise BadInput(f"site={site!r}; expected one of the observed sites: {', '.join(rows) or 'there is none'}.")
    return rows[site]


def answer(rows: Rows, return_std: bool, quantiles: float | Sequence[float] | None) -> Any:
    """What ``predict`` returns.

    :raises BadInput: for both at once, and where a distribution has no mean.
    """
    if return_std and quantiles is not None:
        raise BadInput("predict(..., return_std=True, quantiles=...): expected one of the two. Call it twice.")
    if quantiles is not None:
        return rows.quantiles(quantile_levels(quantiles))
    if not bool(torch.isfinite(rows.average).all()):
        raise BadInput(
            "the mean is not finite, as that of a Cauchy is not; expected a distribution that has one. Ask for "
            "quantiles=[0.05, 0.5, 0.95]."
        )
    return (rows.average, rows.spread) if return_std else rows.average


def probabilities(rows: Rows, site: str | None) -> Tensor:
    """Averaged class probabilities.

    :raises UnsupportedModel: for a site that has no classes.
    """
    if not rows.classes:
        raise UnsupportedModel(
            f"probability(...) is for a site of classes (Bernoulli, Categorical, OneHotCategorical); "
            f"{'the observed site' if site is None else repr(site)} has none. Use predict(...) for its mean."
        )
    return rows.average


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


def in_pairs(num_samples: int, size: int, generator: torch.Generator) -> Tensor:
    """White noise whose second half is the first with its sign turned, ``(S, size)``: linear means are then exact."""
    half = white_noise((num_samples + 1) // 2, size, generator)
    return torch.cat([half, -half])


def pairs_in_parts(num_samples: int, size: int, generator: torch.Generator, numbers: int) -> Iterator[Tensor]:
    """The rows of :func:`in_pairs`, each beside its mirror image, part by part.

    :param numbers: that are made for each draw, of which :data:`~pyro_evidence.program.simulate.NUMBERS` are held.
    :raises TooLarge: when not even a weight for each draw fits into memory.
    """
    what = f"{num_samples:,} draws of {size:,} coordinates"
    require_memory(8 * num_samples, what, torch.device("cpu"), "Ask for fewer at a time.")
    half, at_once = (num_samples + 1) // 2, max(1, simulate.NUMBERS // (2 * numbers * SHARED)) * SHARED
    for start in range(0, half, at_once):
        yield in_pairs(2 * min(at_once, half - start), size, generator)
