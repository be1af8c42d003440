"""Times until an event, of which some are only known to be later, earlier, or between two visits.

    >>> import pyro.distributions as dist
    >>> from pyro_evidence.models.survival import Censored
    >>> time, event = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, 0, 1])
    >>> Censored(dist.Exponential(0.5).expand([3]), event=event).log_prob(time)
    tensor([-1.1931, -1.0000, -2.1931])

Klein and Moeschberger (2003), chapters 2 and 3.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.utils import broadcast_all

from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.numerics.batched import log_ndtr
from pyro_evidence.program.distributions import OfArguments

TERMS = 400  # of a series that converges once terms pass 9 sqrt(shape)
LARGEST_SHAPE = 1500.0  # up to which both are good to 3e-8; beyond, nothing is said
LEVELS = 60  # of a continued fraction whose error falls like exp(-4 sqrt(x LEVELS)): below 1e-16 from 2 on
FRACTION_FROM = 2.0  # where that error is below rounding


class LogLogistic(OfArguments):
    """Survival ``1 / (1 + (t / scale)^concentration)``: proportional odds.

    :param scale: the median, above 0, the batch's shape.
    :param concentration: above 0.

    >>> float(LogLogistic(2.0, 3.0).log_survival(torch.tensor(2.0)).exp())
    0.5
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"scale": constraints.positive, "concentration": constraints.positive}
    support = constraints.positive
    has_rsample = True

    def __init__(self, scale: Any, concentration: Any, validate_args: bool | None = None) -> None:
        self.scale, self.concentration = broadcast_all(scale, concentration)
        super().__init__(self.scale.shape, validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        """Infinite for a concentration of one or less."""
        angle = math.pi / self.concentration
        return torch.where(self.concentration > 1.0, self.scale * angle / angle.sin(), math.inf)

    @property
    def variance(self) -> Tensor:
        """Infinite for a concentration of two or less."""
        angle = math.pi / self.concentration
        second = self.scale.square() * 2.0 * angle / (2.0 * angle).sin()
        return torch.where(self.concentration > 2.0, second - self.mean.square(), math.inf)

    def _log_odds(self, value: Tensor) -> Tensor:
        return self.concentration * (value.log() - self.scale.log())

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density, nats."""
        return self.log_hazard_at(value) + self.log_survival(value)

    def log_hazard_at(self, value: Tensor) -> Tensor:
        """Log density of an event at a time, given that there was none before."""
        return self.concentration.log() - value.log() + torch.nn.functional.logsigmoid(self._log_odds(value))

    def log_survival(self, value: Tensor) -> Tensor:
        """Log probability of more than ``value``."""
        return -torch.nn.functional.softplus(self._log_odds(value))

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draws, by the inverse of the distribution function."""
        u = torch.rand(self._extended_shape(sample_shape), dtype=self.scale.dtype, device=self.scale.device)
        return self.scale * ((u.log() - torch.log1p(-u)) / self.concentration).exp()


class Gompertz(OfArguments):
    """Hazard ``rate exp(growth t)``: the mortality of adults.

    :param rate: hazard at 0, above 0, the batch's shape.
    :param growth: of the log hazard per unit of time, above 0.

    >>> Gompertz(0.1, 0.5).log_survival(torch.tensor(2.0))
    tensor(-0.3437)
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"rate": constraints.positive, "growth": constraints.positive}
    support = constraints.nonnegative
    has_rsample = True

    def __init__(self, rate: Any, growth: Any, validate_args: bool | None = None) -> None:
        self.rate, self.growth = broadcast_all(rate, growth)
        super().__init__(self.rate.shape, validate_args=validate_args)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density, nats."""
        return self.log_hazard_at(value) + self.log_survival(value)

    def log_hazard_at(self, value: Tensor) -> Tensor:
        """Log density of an event at a time, given that there was none before."""
        return self.rate.log() + self.growth * value

    def log_survival(self, value: Tensor) -> Tensor:
        """Log probability of more than ``value``."""
        return -self.rate * torch.expm1(self.growth * value) / self.growth

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draws, by the inverse of the distribution function."""
        u = torch.rand(self._extended_shape(sample_shape), dtype=self.rate.dtype, device=self.rate.device)
        return torch.log1p(-torch.log1p(-u) * self.growth / self.rate) / self.growth


class PiecewiseExponential(OfArguments):
    """A hazard that is constant between cuts, times a ratio of each row; Friedman (1982).

    With a random walk as ``log_hazard`` this is a Cox model with a smooth baseline.  Nothing of rows times pieces is
    held: the cumulative hazard is a sum over pieces, looked up for each row.

    :param cuts: increasing, above 0, ``(J - 1,)``; the last piece has no end.
    :param log_hazard: of each piece, ``(J,)``.
    :param log_ratio: of each row, the batch's shape.

    >>> cuts, hazard = torch.tensor([1.0, 2.0]), torch.tensor([0.1, 0.2, 0.4])
    >>> PiecewiseExponential(cuts, hazard.log(), torch.tensor(0.0)).log_survival(torch.tensor(2.5))
    tensor(-0.5000)

    :raises BadInput: for cuts that do not increase, and for another number of hazards than pieces.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"log_ratio": constraints.real}
    support = constraints.nonnegative

    def __init__(self, cuts: Tensor, log_hazard: Tensor, log_ratio: Any, validate_args: bool | None = None) -> None:
        cuts, log_hazard = torch.as_tensor(cuts), torch.as_tensor(log_hazard)
        increasing = cuts.dim() == 1 and bool((cuts > 0).all()) and bool((cuts.diff() > 0).all())
        if not increasing or log_hazard.shape != (len(cuts) + 1,):
            raise BadInput(
                f"cuts of shape {tuple(cuts.shape)} and log_hazard of shape {tuple(log_hazard.shape)}; expected J - 1 "
                f"increasing times above 0, and (J,)."
            )
        self.cuts, self.log_hazard, self.log_ratio = cuts, log_hazard, torch.as_tensor(log_ratio)
        super().__init__(self.log_ratio.shape, validate_args=validate_args)

    def _pieces(self) -> tuple[Tensor, Tensor, Tensor]:
        """Where each piece starts, its hazard, and the cumulative hazard there, at ratio one, ``(J,)`` each."""
        hazard = self.log_hazard.exp()
        start = torch.cat([torch.zeros_like(self.cuts[:1]), self.cuts])
        return start, hazard, torch.nn.functional.pad((hazard[:-1] * start.diff()).cumsum(-1), (1, 0))

    def _piece(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Log hazard and cumulative hazard at ratio one."""
        start, hazard, before = self._pieces()
        number = torch.searchsorted(self.cuts, value.detach().contiguous())
        return self.log_hazard[number], before[number] + hazard[number] * (value - start[number])

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density, nats."""
        log_hazard, cumulative = self._piece(value)
        return log_hazard + self.log_ratio - self.log_ratio.exp() * cumulative

    def log_hazard_at(self, value: Tensor) -> Tensor:
        """Log density of an event at a time, given that there was none before."""
        return self._piece(value)[0] + self.log_ratio

    def log_survival(self, value: Tensor) -> Tensor:
        """Log probability of more than ``value``."""
        return -self.log_ratio.exp() * self._piece(value)[1]

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws, by the inverse of the cumulative hazard."""
        shape = self._extended_shape(sample_shape)
        with torch.no_grad():
            start, hazard, before = self._pieces()
            wanted = -torch.log1p(-torch.rand(shape, dtype=hazard.dtype, device=hazard.device))
            wanted = wanted * (-self.log_ratio).exp()
            number = torch.searchsorted(before[1:].contiguous(), wanted.contiguous())
            return start[number] + (wanted - before[number]) / hazard[number]


def _log_survival_gamma(fn: Any, value: Tensor) -> Tensor:
    """``log Q(a, x)``: a series below ``x = a + 1``, beyond it a continued fraction.  DLMF 8.7.1 and 8.9.2.

    Both are sums of smooth functions, so that derivatives in the shape are right to rounding too.
    """
    a, x = broadcast_all(fn.concentration, fn.rate * value)
    log_front = a * x.log() - x - torch.lgamma(a)
    low = x < torch.maximum(a + 1.0, torch.full_like(a, FRACTION_FROM))
    below, above = torch.where(low, x, a.detach()), torch.where(low, a.detach() + 2.0, x)
    term = total = 1.0 / a
    for k in range(1, TERMS):
        term = term * below / (a + k)
        total = total + term
    front = a * below.log() - below - torch.lgamma(a)
    series = torch.log1p(-(front.exp() * total).clamp(max=1.0 - torch.finfo(x.dtype).eps))
    fraction = torch.zeros_like(x)
    for k in range(LEVELS, 0, -1):
        fraction = k * (a - k) / (above + 2.0 * k + 1.0 - a + fraction)
    found = torch.where(low, series, log_front - (above + 1.0 - a + fraction).log())
    return torch.where(a <= LARGEST_SHAPE, found, torch.nan)


def _log_ratio(fn: Any, value: Tensor) -> Tensor:
    """Log of a time in units of the scale: exponentials of it take a fifth of the time of powers, and derive alike."""
    tiny = torch.finfo(value.dtype).tiny
    return value.clamp(min=tiny).log() - fn.scale.log()  # clamp: a visit at time 0, which all survive


LOG_HAZARD: dict[type, Callable[[Any, Tensor], Tensor]] = {
    torch.distributions.Exponential: lambda fn, value: fn.rate.log(),
    torch.distributions.Weibull: lambda fn, value: (
        (fn.concentration / fn.scale).log() + (fn.concentration - 1.0) * _log_ratio(fn, value)
    ),
}
LOG_SURVIVAL: dict[type, Callable[[Any, Tensor], Tensor]] = {
    torch.distributions.Exponential: lambda fn, value: -fn.rate * value,
    torch.distributions.Weibull: lambda fn, value: -(fn.concentration * _log_ratio(fn, value)).exp(),
    torch.distributions.LogNormal: lambda fn, value: log_ndtr((fn.loc - value.log()) / fn.scale),
    torch.distributions.Gamma: _log_survival_gamma,
}


def log_survival(fn: Any, value: Tensor) -> Tensor:
    """Log probability of more than ``value``; its first and second derivatives are right in every parameter.

    :param fn: Exponential, Weibull, LogNormal, Gamma, or a distribution with a method ``log_survival``.
    :raises UnsupportedModel: for another distribution.

    >>> import pyro.distributions as dist
    >>> log_survival(dist.Weibull(2.0, 1.0), torch.tensor(4.0))
    tensor(-2.)
    """
    found = _known(fn, value, "log_survival", LOG_SURVIVAL)
    if found is not None:
        return found
    raise UnsupportedModel(
        f"{type(fn).__name__} has no survival function here; expected Exponential, Weibull, LogNormal, Gamma, "
        f"LogLogistic, Gompertz, PiecewiseExponential, or a distribution with a method log_survival(value)."
    )


def _known(fn: Any, value: Tensor, method: str, formulas: Mapping[type, Callable[..., Tensor]]) -> Tensor | None:
    """The value of a distribution's own method, or else of a formula for its kind; None where there is neither."""
    own = getattr(fn, method, None)
    if own is None:
        own = next((partial(formula, fn) for kind, formula in formulas.items() if isinstance(fn, kind)), None)
    return None if own is None else own(value)


class Censored(OfArguments):
    """A distribution of times of which some are known in part.

    The log density of a row is that of ``base`` where the event was seen; the log probability of a later time where it
    was not; of a time between ``lower`` and ``upper`` where these are given; and of a time after ``entry``, in all of
    them, where a row came under observation only then.

    :param base: of the times, its batch's shape that of the rows.
    :param event: whether the value is the time of the event; else it is the last time without one.  ``(N,)``, 0 and 1
        or bool; by default all are seen.
    :param lower: of rows seen between two visits, the last without the event, 0 where there is none before the first
        with it; nan where a row has no such visits.
    :param upper: of those rows, the first visit with it.
    :param entry: times from which on rows are observed, 0 where from the start.

    >>> import pyro.distributions as dist
    >>> bounds = torch.tensor([[1.0, float("nan")], [2.0, float("nan")]])
    >>> between = Censored(dist.Exponential(torch.ones(2)), lower=bounds[0], upper=bounds[1])
    >>> between.log_prob(torch.tensor([2.0, 0.5])).exp()
    tensor([0.2325, 0.6065])

    :raises BadInput: for shapes that do not belong together, bounds without the other, in the wrong order.
    :raises UnsupportedModel: for a base without a survival function.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        base: Any,
        *,
        event: Tensor | None = None,
        lower: Tensor | None = None,
        upper: Tensor | None = None,
        entry: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if not isinstance(base, torch.distributions.Distribution):
            raise BadInput(f"Censored({type(base).__name__}, ...); expected a distribution of times first.")
        if (lower is None) != (upper is None):
            raise BadInput("Censored with one of lower and upper; expected both, with nan in rows that have none.")
        pairs = {"event": event, "lower": lower, "upper": upper, "entry": entry}.items()
        given = {name: torch.as_tensor(value) for name, value in pairs if value is not None}
        if given and not base.batch_shape:
            base = base.expand(next(iter(given.values())).shape)
        for name, value in given.items():
            if value.shape != base.batch_shape[len(base.batch_shape) - value.dim() :]:
                raise BadInput(
                    f"Censored: {name} of shape {tuple(value.shape)} beside times of shape {tuple(base.batch_shape)}; "
                    f"expected one for each time."
                )
        event, lower, upper, entry = (given.get(name) for name in ("event", "lower", "upper", "entry"))
        self.base, self.event, self.entry = base, event, entry
        if event is not None and not bool(((event == 0) | (event == 1)).all()):
            raise BadInput("Censored: event has other values than 0 and 1; expected 1 where the event was seen.")
        if entry is not None and not bool(((entry >= 0) & entry.isfinite()).all()):
            raise BadInput("Censored: entry is below 0 or not finite in a row; expected 0 where seen from the start.")
        self.lower, self.upper = lower, upper
        if lower is not None and upper is not None:
            self.between = lower.isfinite() & upper.isfinite()
            if bool((lower.isfinite() != upper.isfinite()).any() | (self.between & (lower >= upper)).any()):
                raise BadInput(
                    "Censored: a row has one of lower and upper, or a lower that is not below its upper; expected both "
                    "or nan, in order; event=0 where no upper is known, lower=0 where it is before the first visit."
                )
        super().__init__(base.batch_shape, base.event_shape, validate_args=validate_args)

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> Any:
        """That of the times."""
        return self.base.support

    @property
    def mean(self) -> Tensor:
        """That of the times without censoring, where it is known."""
        return self.base.mean

    @property
    def variance(self) -> Tensor:
        """Variance of the times without censoring, where it is known."""
        return self.base.variance

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density or probability of each row, nats.

        :raises BadInput: for a row that came under observation after its time, where arguments are validated.
        """
        if self.entry is not None and self._validate_args:
            first = value if self.lower is None else torch.where(self.between, self.lower, value)
            _check_entry(self.entry, first)
        hazard = None if self.event is None else _known(self.base, value, "log_hazard_at", LOG_HAZARD)
        if self.event is None:
            found = self.base.log_prob(value)
        elif hazard is not None:  # a survival for all rows: densities of those unseen would be for nothing
            if self.base._validate_args:
                self.base._validate_sample(value)
            found = log_survival(self.base, value) + torch.where(self.event.bool(), hazard, 0.0)
        else:
            found = torch.where(self.event.bool(), self.base.log_prob(value), log_survival(self.base, value))
        if self.lower is not None and self.upper is not None:
            after = self.between & (self.lower > 0)  # all are without it at time 0, where slopes may be none
            low = torch.where(after, self.lower, value.detach())
            high = torch.where(self.between, self.upper, 2.0 * value.detach())  # of other rows: not used, but finite
            later, earlier = log_survival(self.base, high), torch.where(after, log_survival(self.base, low), 0.0)
            found = torch.where(self.between, earlier + torch.log(-torch.expm1(later - earlier)), found)
        if self.entry is not None:
            under = self.entry > 0
            begun = torch.where(under, self.entry, value.detach())  # of other rows: not used, but finite
            found = found - torch.where(under, log_survival(self.base, begun), 0.0)
        return found

    def log_survival(self, value: Tensor) -> Tensor:
        """Log probability of more than ``value``, without censoring."""
        return log_survival(self.base, value)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Times without censoring: what would be seen if one waited."""
        with torch.no_grad():
            return self.base.sample(sample_shape)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "Censored":
        """The same times for each element of a larger batch."""
        new: Censored = super().expand(batch_shape, _instance)
        new.base = self.base.expand(new.batch_shape)
        return new


def _check_entry(entry: Tensor, time: Tensor) -> None:
    late = torch.nonzero(entry > time)
    if len(late):
        row = tuple(late[0].tolist())
        raise BadInput(
            f"row {row[-1]} came under observation at {entry.expand(time.shape)[row]:g}, after its time "
            f"{time[row]:g}; expected entry below the time."
        )


class CoxPartialLikelihood(OfArguments):
    """The order of the events, given who was at risk; Cox (1972).  The baseline hazard does not occur.

    ``torch.logcumsumexp`` has no third derivative; the sums over those at risk here have all.

    :param log_ratio: of each row's hazard, ``(..., N)``.
    :param event: whether the event was seen, ``(N,)``; else the row left at its time.  None: seen of all.
    :param efron: whether tied events are treated by Efron's approximation; else by Breslow's.
    :param entry: times after which rows are at risk, ``(N,)``; by default all are from the start.

    >>> time, event = torch.tensor([2.0, 1.0, 3.0]), torch.tensor([1, 1, 0])
    >>> CoxPartialLikelihood(torch.zeros(3), event).log_prob(time)  # 1/3 for the first, 1/2 for the second
    tensor(-1.7918)

    :raises BadInput: for shapes that do not belong together.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"log_ratio": constraints.real_vector}
    support = constraints.independent(constraints.nonnegative, 1)

    def __init__(
        self,
        log_ratio: Tensor,
        event: Tensor | None,
        efron: bool = False,
        validate_args: bool | None = None,
        *,
        entry: Tensor | None = None,
    ) -> None:
        event = log_ratio.new_ones(log_ratio.shape[-1:]) if event is None else event
        entered = event if entry is None else entry
        if event.dim() != 1 or log_ratio.shape[-1:] != event.shape or entered.shape != event.shape:
            raise BadInput(
                f"log_ratio of shape {tuple(log_ratio.shape)}, event of shape {tuple(event.shape)} and entry of shape "
                f"{tuple(entered.shape)}; expected (..., N) and (N,)."
            )
        if not bool(((event == 0) | (event == 1)).all()):
            raise BadInput(
                "CoxPartialLikelihood: event has other values than 0 and 1; expected 1 where the event was seen."
            )
        self.log_ratio, self.event, self.efron, self.entry = log_ratio, event.bool(), efron, entry
        super().__init__(log_ratio.shape[:-1], log_ratio.shape[-1:], validate_args=validate_args)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """There are no times to draw, nor have they a mean.

        :raises UnsupportedModel: always.
        """
        raise UnsupportedModel(
            "a partial likelihood is of the order of events, and predicts no times; expected kind='link', the log of a "
            "row's ratio of hazards, or a likelihood of times, such as PiecewiseExponential."
        )

    mean = variance = property(sample)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log partial likelihood, nats, of times ``(N,)``.

        :raises BadInput: for a row that came under observation after its time, where arguments are validated.
        """
        if self._validate_args:
            self._validate_sample(value)
            if self.entry is not None:
                _check_entry(self.entry, value)
        order = value.argsort(descending=True)
        time, event, eta = value[order], self.event[order], self.log_ratio[..., order]
        last = torch.searchsorted(-time, -time, right=True) - 1  # the last row of those with the same time
        at_risk = _running_log_sum(eta)[..., last]
        if self.entry is not None:
            entry, place = self.entry.sort(descending=True)
            count = torch.searchsorted(-entry, -time, right=True)  # of rows that enter at this time or later
            late = _running_log_sum(self.log_ratio[..., place])[..., (count - 1).clamp(min=0)]  # clamp: none, unused
            share = torch.where(count > 0, late - at_risk, -math.inf)
            at_risk = at_risk + torch.log1p(-share.exp())
        first = torch.searchsorted(-time, -time)
        seen = event.to(eta).cumsum(-1)
        before = seen - event.to(eta)
        earlier = torch.where(first > 0, seen[(first - 1).clamp(min=0)], 0.0)  # clamp: there is none before
        tied, number = seen[last] - earlier, before - earlier
        share = self.efron * number / tied.clamp(min=1.0)  # clamp: of rows without events, not used
        group = torch.unique_consecutive(time, return_inverse=True)[1]
        top = eta.detach().amax(-1, keepdim=True)
        sums = torch.zeros_like(eta).index_add(-1, group, torch.where(event, (eta - top).exp(), 0.0))[..., group]
        taken = (share * sums).clamp(min=torch.finfo(eta.dtype).tiny)  # clamp: the first of those that are tied
        left = -torch.expm1(taken.log() + top - at_risk)
        return torch.where(event, eta - at_risk - torch.where(share > 0, left, 1.0).log(), 0.0).sum(-1)


def concordance(time: Tensor, event: Tensor, risk: Tensor) -> float:
    """Harrell's C: the share of pairs in which the earlier event has the higher risk; equal risks count half.

    A pair can be compared where the earlier time is that of an event; a row that left at the time of an event is later.

    :param time: and ``event``, 1 where it was seen, and ``risk``, such as the log of a ratio of hazards, ``(N,)`` each.
    :raises BadInput: for different shapes, and where no pair can be compared.

    >>> concordance(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, 1, 0]), torch.tensor([0.5, 0.9, 0.1]))
    0.6666666666666666
    """
    if time.dim() != 1 or time.shape != event.shape or time.shape != risk.shape:
        raise BadInput(f"concordance of {[tuple(x.shape) for x in (time, event, risk)]}; expected (N,) three times.")
    pairs = ordered = 0.0
    for i in torch.nonzero(event.bool()).flatten().tolist():
        later = risk[(time > time[i]) | ((time == time[i]) & ~event.bool())]
        pairs += len(later)
        ordered += float((risk[i] > later).sum()) + 0.5 * float((risk[i] == later).sum())
    if not pairs:
        raise BadInput("concordance: no event is before another time; expected a pair that can be compared.")
    return ordered / pairs


def _running_log_sum(x: Tensor) -> Tensor:
    """``log sum_{j <= i} exp(x_j)`` along the last dim, by doubling: finite derivatives of every order."""
    step, size = 1, x.shape[-1]
    while step < size:
        both = torch.stack([x[..., step:], x[..., :-step]]).logsumexp(0)
        x, step = torch.cat([x[..., :step], both], -1), 2 * step
    return x
