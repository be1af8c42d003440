"""Importance sampling from log weights: the evidence, its error, and Pareto smoothing of the largest weights."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.numerics.batched import bisected
from pyro_evidence.numerics.linalg import relative_rounding

FEWEST_IN_TAIL = 5  # weights to which a tail can be fitted
COLUMNS = 500  # of weights whose tails are fitted at a time
FLAT = 0.05  # nats; where no weight exceeds the typical one by more, there is no tail to extrapolate
LEVEL = 0.03  # standard deviation of weights over their mean: what a tail of such weights adds is below a per cent,
HIGHEST = math.log(1.5)  # nats, as long as no single one stands out by more
MOST_STEPS = 1000  # of the iteration to a bridge


def log_mean(log_weights: Tensor) -> Tensor:
    """``log mean exp`` of log weights ``(S,)``: the importance-sampled log evidence in nats, shape ``()``."""
    return log_weights.logsumexp(0) - math.log(len(log_weights))


def standard_error(log_weights: Tensor) -> Tensor:
    """Standard error of :func:`log_mean` in nats, by the delta method, shape ``()``."""
    weights = (log_weights - log_weights.max()).exp()
    return weights.std() / (weights.mean() * math.sqrt(len(weights)))


def effective_sample_size(log_weights: Tensor) -> Tensor:
    """Kish's effective number of independent draws, between 1 and ``S``, shape ``()``."""
    weights = (log_weights - log_weights.max()).exp()
    return weights.sum().square() / weights.square().sum()


def threshold(num_samples: int) -> float:
    """The largest k-hat at which ``num_samples`` draws are enough.  Vehtari et al. (2024), section 3.2.4."""
    return min(1.0 - 1.0 / math.log10(max(num_samples, 11)), 0.7)


def tail_size(num_samples: int) -> int:
    """Number of weights in the tail, ``min(S/5, 3 sqrt S)`` rounded up.  Vehtari et al. (2024), section 2."""
    return math.ceil(min(0.2 * num_samples, 3.0 * math.sqrt(num_samples)))


def tail_words(pareto_k: float) -> str:
    """The words of a summary for the shape of the weights' tail, ``-inf`` where there is none, ``inf`` of too few.

    >>> tail_words(0.4), tail_words(-math.inf), tail_words(math.inf)
    ('k-hat 0.40', 'no weight stands out', 'too few weights for a k-hat')
    """
    few = {math.inf: "too few weights for a k-hat", -math.inf: "no weight stands out"}
    return few.get(pareto_k, f"k-hat {pareto_k:.2f}")


def shape_error(pareto_k: float, num_in_tail: int) -> float:
    """Standard deviation of k-hat.  Smith (1987): the asymptotic one of the maximum-likelihood estimate."""
    return (1.0 + pareto_k) / math.sqrt(num_in_tail)


def is_beyond(pareto_k: float, num_samples: int) -> bool:
    """Whether k-hat is above its threshold by more than its standard deviation: no number of draws is then enough.

    >>> is_beyond(0.8, 4_096), is_beyond(0.9, 4_096)
    (False, True)
    """
    return pareto_k > threshold(num_samples) + shape_error(pareto_k, tail_size(num_samples))


@dataclass(frozen=True, eq=False)
class Smoothed:
    """Pareto-smoothed importance weights.

    :ivar log_weights: nats, not normalised, order kept, shape ``(S,)``.
    :ivar pareto_k: shape of the tail; ``inf`` where fewer than five weights make it up.
    :ivar missed: nats by which the mean of the tail that is fitted, if a standard deviation of k-hat heavier, would
        raise :func:`log_mean`.  Few draws are where it is, so that the mean of the weights is mostly too low.
    """

    log_weights: Tensor
    pareto_k: float
    missed: float = 0.0

    @property
    def standard_error(self) -> float:
        """Standard error of :func:`log_mean`, nats."""
        return float(standard_error(self.log_weights))

    @property
    def error(self) -> float:
        """Standard error of :func:`log_mean`, nats, with what the tail holds beyond the weights."""
        return math.hypot(self.standard_error, self.missed)

    @property
    def weights(self) -> Tensor:
        """The smoothed weights, normalised to sum one."""
        return self.log_weights.softmax(0)


@dataclass(frozen=True, eq=False)
class NodeWeights(Smoothed):
    """Weights of the nodes of a quadrature rule, which are no draws: what is missed is all of their error."""

    @property
    def standard_error(self) -> float:
        """Zero."""
        return 0.0


def checked(log_weights: Tensor) -> Smoothed:
    """The smoothed weights of a check, with k-hat ``-inf`` where all weights are as good as equal.

    A shape says how a tail goes on, not how much is in it: of weights between 0.98 and 1.02 it is noise.

    >>> checked(torch.zeros(100)).pareto_k
    -inf
    """
    if bool(_all_alike(log_weights, log_weights.median())):
        return Smoothed(log_weights, -math.inf)
    return smoothed(log_weights)


def _all_alike(log_weights: Tensor, typical: Tensor) -> Tensor:
    """Whether none exceeds the typical one by 5 %, or they vary by 3 % and none exceeds it by half."""
    weights, above = (log_weights - typical).clamp(max=HIGHEST).exp(), log_weights.amax(0) - typical
    return (above < FLAT) | ((above < HIGHEST) & (weights.std(0) < LEVEL * weights.mean(0)))


def is_constant(log_weights: Tensor, dtype: torch.dtype = torch.float64) -> bool:
    """Whether all weights are one up to rounding, as where the approximation is exact.

    :param dtype: in which the density was computed.
    """
    size = 1.0 + log_weights.max().abs()
    return bool(log_weights.max() - log_weights.min() <= max(1e-8, relative_rounding(dtype)) * size)


def smoothed(log_weights: Tensor) -> Smoothed:
    """The largest weights replaced by quantiles of the generalised Pareto distribution fitted to them.

    A tail is what exceeds the ``tail_size(S) + 1``-th largest weight; quantiles are taken at ``(z - 1/2) / M`` and
    never exceed the largest raw weight.  Vehtari, Simpson, Gelman, Yao and Gabry (2024), section 2 and appendix C.
    What is missed is against the distribution's mean ``scale / (1 - k)`` above the cutoff, with a ``k`` that is a
    standard deviation higher, but at most halfway from k-hat to one, where there is no mean.

    :param log_weights: nats, shape ``(S,)``, at least one of them finite; ``-inf`` is a weight of zero.

    >>> smoothed(torch.zeros(100)).pareto_k  # no weight exceeds another
    inf
    """
    highest = log_weights.max()
    x = (log_weights - highest).double()
    order = x.argsort(stable=True)
    kept = max(len(x) - tail_size(len(x)) - 1, 0)
    cutoff = x[order[kept]].clamp(min=math.log(torch.finfo(x.dtype).tiny))  # below, its exponential is 0
    tail = order[x[order] > cutoff]
    if len(tail) < FEWEST_IN_TAIL:
        return Smoothed(log_weights, math.inf)
    shape, scale = (float(each) for each in generalised_pareto(x[tail].exp() - cutoff.exp()))
    if not math.isfinite(shape):
        return Smoothed(log_weights, shape)
    p = (torch.arange(len(tail)).to(x) + 0.5) / len(tail)
    quantile = (cutoff.exp() + scale * pareto_quantile(p, shape)).log().clamp(max=0.0)
    found, heavier = x.scatter(0, tail, quantile), min(shape + shape_error(shape, len(tail)), 0.5 * (1.0 + shape))
    mean = float(cutoff.exp()) + scale / (1.0 - heavier) if shape < 1.0 else math.inf
    beyond = max(0.0, len(tail) * mean - float(quantile.exp().sum()))
    return Smoothed(found + highest, shape, math.log1p(beyond / float(found.exp().sum())))


def interpolated(x: Tensor, y: Tensor, places: Tensor) -> Tensor:
    """Values at ``places`` ``(E, Q)`` of lines through points ``x``, ascending, and ``y`` ``(E, K)``; level beyond."""
    right = torch.searchsorted(x, places).clamp(1, x.shape[1] - 1)
    low, high = x.gather(1, right - 1), x.gather(1, right)
    share = torch.where(high > low, (places - low) / (high - low), 0.0).clamp(0.0, 1.0)
    return torch.lerp(y.gather(1, right - 1), y.gather(1, right), share)


def weighted_quantiles(values: Tensor, weights: Tensor, levels: Tensor) -> Tensor:
    """Quantiles of weighted numbers, element by element.

    Interpolated between the middles of the weights' steps, so that equal weights give Hazen's quantiles.

    :param values: shape ``(S,) + shape``.
    :param weights: normalised, shape ``(S,)``.
    :param levels: shape ``()`` or ``(Q,)``.
    :return: ``levels.shape + shape``.

    >>> weighted_quantiles(torch.tensor([3.0, 1.0, 2.0]), torch.full((3,), 1 / 3), torch.tensor(0.5))
    tensor(2.)
    """
    columns, order = values.reshape(len(values), -1).mT.contiguous().sort(-1)
    mass = weights.to(columns)[order]
    middle = mass.cumsum(-1) - 0.5 * mass
    wanted = levels.to(columns).reshape(-1).expand(len(columns), -1).contiguous()
    return interpolated(middle, columns, wanted).mT.reshape((*levels.shape, *values.shape[1:]))


def resampled(weights: Tensor, num_samples: int, generator: torch.Generator) -> Tensor:
    """Positions of draws taken by systematic resampling, in random order, shape ``(num_samples,)``.

    >>> resampled(torch.tensor([0.0, 1.0, 0.0]), 2, torch.Generator())
    tensor([1, 1])
    """
    ends = weights.double().cumsum(0).cpu()
    offset = torch.rand((), generator=generator, dtype=torch.float64)
    points = (torch.arange(num_samples, dtype=torch.float64) + offset) / max(num_samples, 1) * ends[-1]
    index = torch.searchsorted(ends, points).clamp(max=len(ends) - 1)
    return index[torch.randperm(num_samples, generator=generator)].to(weights.device)


def survivors(log_weights: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Positions of particles taken by systematic resampling inside each group, and the log of each mean weight.

    :param log_weights: nats, by groups, ``(G, P)``.
    :return: ``(G * P,)`` among all particles, and ``(G,)``.
    """
    num, size = log_weights.shape
    uniform = torch.rand(num, 1, generator=generator, dtype=torch.float64).to(log_weights)
    points = (torch.arange(size).to(log_weights) + uniform) / size
    parent = torch.searchsorted(log_weights.softmax(-1).cumsum(-1), points).clamp(max=size - 1)
    first = size * torch.arange(num, device=parent.device).unsqueeze(-1)
    return (parent + first).reshape(-1), log_weights.logsumexp(-1) - math.log(size)


def next_temperature(log_ratio: Tensor, before: float) -> float:
    """The inverse temperature at which the pooled effective sample size has fallen to a half; at most 1.

    :param log_ratio: ``log p(u, D) - log reference(u)`` of all particles, any shape.
    """

    def is_enough(power: Tensor) -> Tensor:
        return effective_sample_size((power - before) * log_ratio) >= 0.5 * log_ratio.numel()

    one = log_ratio.new_ones(())
    return 1.0 if bool(is_enough(one)) else float(bisected(is_enough, before * one, one))


def error_of_groups(log_evidences: Tensor) -> Tensor:
    """Standard error, nats, shape ``()``, of the log of the mean evidence of groups, from the logs ``(G,)``.

    Evidences of particles are lognormal in the limit, Berard, Del Moral and Doucet (2014), and a few of them mostly
    vary less than their distribution does, while their logs vary as much.
    """
    spread = (log_evidences.var().expm1() / len(log_evidences)).sqrt()
    return torch.fmax(spread, standard_error(log_evidences))  # a group without evidence has no log


def bridge_terms(log_evidence: Tensor, posterior: Tensor, proposal: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Logs of what the bridge averages over draws from ``q``, ``(N2,)``, and over posterior draws, ``(N1,)``.

    With ``s1 p(u, D)/q(u) + s2 p(D)``, ``s1 + s2 = 1``, as denominator of both.  Meng and Wong (1996), eq. 3.5.

    :param posterior: ``log p(u, D) - log q(u)`` at posterior draws, shape ``(N1,)``.
    :param proposal: the same at draws from ``q``, shape ``(N2,)``.
    """
    log_share, log_other = math.log(share), math.log1p(-share)
    below = -torch.logaddexp(posterior + log_share, log_evidence + log_other)
    return proposal - torch.logaddexp(proposal + log_share, log_evidence + log_other), below


def bridge(posterior: Tensor, proposal: Tensor, share: float) -> tuple[Tensor, tuple[Tensor, Tensor], int]:
    """Log evidence, nats, the two logs of :func:`bridge_terms` there, and the number of steps.

    The fixed point of the log of the ratio of two means, from the median ratio of the posterior draws.  Meng and Wong
    (1996), eq. 4.1.

    :param posterior: log ratios at posterior draws, shape ``(N1,)``.
    :param proposal: log ratios at proposal draws, shape ``(N2,)``.
    :param share: the posterior's of all independent draws; affects the variance only.
    """
    value, step, change = posterior.median(), 0, math.inf
    while step < MOST_STEPS and change > relative_rounding(torch.float64) * (1.0 + abs(float(value))):
        above, below = bridge_terms(value, posterior, proposal, share)
        after = log_mean(above) - log_mean(below)
        value, change, step = after, abs(float(after - value)), step + 1
    return value, bridge_terms(value, posterior, proposal, share), step


def generalised_pareto(excess: Tensor) -> tuple[Tensor, Tensor]:
    """Shape and scale, ``(...)``, of the generalised Pareto distribution of positive numbers ``(M, ...)``.

    Zhang and Stephens (2009), with the prior of Vehtari et al. (2024), appendix C, that draws the shape to a half
    as ten observations would.

    :param excess: in ascending order along the first axis.

    >>> shape, scale = generalised_pareto(pareto_quantile((torch.arange(500.0).double() + 0.5) / 500, 0.4))
    >>> print(f"{shape:.2f} {scale:.2f}")
    0.40 1.00
    """
    num, quartile = len(excess), excess[math.floor(len(excess) / 4 + 0.5) - 1]
    num_trials = 30 + math.isqrt(num)
    position = torch.arange(1, num_trials + 1).to(excess).reshape(-1, *[1] * (excess.dim() - 1))
    b = (1.0 - (num_trials / (position - 0.5)).sqrt()) / (3.0 * quartile) + 1.0 / excess[-1]
    shape = torch.log1p(-b.unsqueeze(1) * excess).mean(1)
    weights = (num * ((-b / shape).log() - shape - 1.0)).softmax(0)
    weights = torch.where(weights >= 10.0 * torch.finfo(weights.dtype).eps, weights, 0.0)
    mean = (b * weights).sum(0) / weights.sum(0)
    found = torch.log1p(-mean * excess).mean(0)
    prior_size = 10.0  # observations
    return (num * found + 0.5 * prior_size) / (num + prior_size), -found / mean


def pareto_quantile(p: Tensor, shape: float) -> Tensor:
    """Quantile of the generalised Pareto distribution of scale 1: ``((1 - p)^-k - 1) / k``."""
    if shape == 0.0:
        return -torch.log1p(-p)
    return torch.expm1(-shape * torch.log1p(-p)) / shape


def pareto_shapes(log_weights: Tensor) -> Tensor:
    """k-hat of each column of log weights ``(S, G)``, as :func:`checked` finds it one by one, shape ``(G,)``."""
    return torch.cat([_shapes(part) for part in log_weights.split(COLUMNS, 1)])


def _shapes(log_weights: Tensor) -> Tensor:
    num = len(log_weights)
    x = (log_weights - log_weights.amax(0)).double().sort(0).values
    tail = min(tail_size(num), num - 1)
    flat = _all_alike(x, x[(num - 1) // 2])
    excess = x[-tail:].exp() - x[-tail - 1].exp()
    odd = ~flat & ~(excess[0] > 0)  # ties, and zeros: by the careful way
    shapes, _ = generalised_pareto(torch.where(flat | odd, torch.arange(1.0, tail + 1.0).to(x).unsqueeze(-1), excess))
    for column in torch.nonzero(odd).flatten().tolist():
        shapes[column] = checked(log_weights[:, column]).pareto_k
    return torch.where(flat, -math.inf, shapes)
