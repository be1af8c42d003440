"""Where observed sites see the latents: one parameter, behind a fixed link, found by derivative, not by name.

Below: probabilities averaged over a normal predictor.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import is_
from typing import Any

import torch
from pyro.distributions import (
    Bernoulli,
    Binomial,
    Categorical,
    Exponential,
    Gamma,
    Geometric,
    HalfNormal,
    Laplace,
    LogNormal,
    Multinomial,
    NegativeBinomial,
    OneHotCategorical,
    Poisson,
    Unit,
    Weibull,
)
from pyro.distributions.torch_distribution import ExpandedDistribution
from pyro.ops.special import log_binomial
from torch import Tensor
from torch.distributions import Independent, MixtureSameFamily, MultivariateNormal, Normal, constraints

from pyro_evidence.fitting.process_state import without_validation
from pyro_evidence.numerics import batched
from pyro_evidence.numerics.derivatives import Last, pullback
from pyro_evidence.numerics.linear_predictor import (
    BinomialTargets,
    ClosedForm,
    Layout,
    LogLikelihood,
    NormalTargets,
    Part,
    PoissonTargets,
    agree,
    in_blocks,
)
from pyro_evidence.numerics.quadrature.rules import nodes_and_weights
from pyro_evidence.program.enumeration import log_sum_exp
from pyro_evidence.program.exact import SUCCESSES_OR_NOT, exact
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.sites import Node, Trace, given_arguments, log_prob_sum


@dataclass(frozen=True)
class Link:
    """``parameter = forward(eta)``, ``eta = inverse(parameter)``, element by element."""

    name: str
    forward: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]

    def explains(self, parameter: Tensor, eta: Tensor, error: Tensor) -> Tensor:
        """Whether ``parameter`` lies between ``forward(eta - error)`` and ``forward(eta + error)``, up to rounding.

        Behind the link, because far out its inverse is rounding only; what is nan cannot be judged and passes.
        """
        ends = torch.stack([self.forward(eta - error), self.forward(eta + error)])
        slack = _rounding(ends.abs().amax(0))
        inside = (parameter >= ends.amin(0) - slack) & (parameter <= ends.amax(0) + slack)
        return inside | (parameter == ends[0]) | parameter.isnan()  # equal: both infinite


@dataclass(frozen=True)
class LogitsAgainstFirst(Link):
    """Logits of all classes, up to a common constant, from those of all but the first."""

    def explains(self, parameter: Tensor, eta: Tensor, error: Tensor) -> Tensor:
        """Whether the normalised logits are those of ``eta``, up to rounding."""
        expected = self.forward(eta).log_softmax(-1)
        worst = 2.0 * error.amax(-1, keepdim=True) + _rounding(expected.abs())
        return ((parameter - expected).abs() <= worst) | parameter.isnan()


@dataclass(frozen=True)
class SoftmaxAgainstFirst(Link):
    """Probabilities of all classes from the logits of all but the first."""

    def explains(self, parameter: Tensor, eta: Tensor, error: Tensor) -> Tensor:
        """Whether the probabilities are those of ``eta``, up to rounding."""
        expected = self.forward(eta)
        worst = (2.0 * error.amax(-1, keepdim=True)).expm1() * expected + _rounding(expected)
        return ((parameter - expected).abs() <= worst) | parameter.isnan()


def _rounding(size: Tensor) -> Tensor:
    """Rounding error of a few operations on numbers of this size."""
    return 16.0 * torch.finfo(size.dtype).eps * size.nan_to_num(posinf=0.0)


def _against_first(logits: Tensor) -> Tensor:
    return logits[..., 1:] - logits[..., :1]


def _with_first(eta: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(eta[..., :1]), eta], -1)


def _log_odds_against_first(probs: Tensor) -> Tensor:
    return _against_first(probs.log())


def _softmax_with_first(eta: Tensor) -> Tensor:
    return _with_first(eta).softmax(-1)


def _complementary(x: Tensor) -> Tensor:
    return -torch.expm1(-x.exp())


def _complementary_inverse(p: Tensor) -> Tensor:
    return (-torch.log1p(-p)).log()


def _softplus_inverse(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


IDENTITY: Link = Link("identity", torch.positive, torch.positive)
LOG: Link = Link("log", torch.exp, torch.log)
SQUARE_ROOT: Link = Link("square root", torch.square, torch.sqrt)
INVERSE_SOFTPLUS: Link = Link("inverse softplus", torch.nn.functional.softplus, _softplus_inverse)
LOGIT: Link = Link("logit", torch.sigmoid, torch.logit)
PROBIT: Link = Link("probit", torch.special.ndtr, torch.special.ndtri)
COMPLEMENTARY_LOG_LOG: Link = Link("complementary log-log", _complementary, _complementary_inverse)
BASELINE_LOGITS: Link = LogitsAgainstFirst("logits against the first class", _with_first, _against_first)
BASELINE_SOFTMAX: Link = SoftmaxAgainstFirst(
    "softmax against the first class", _softmax_with_first, _log_odds_against_first
)


POSITIVE: tuple[Link, ...] = (LOG, INVERSE_SOFTPLUS, SQUARE_ROOT, IDENTITY)  # a log rate is what most models have
LINKS: dict[Any, tuple[Link, ...]] = {  # worth trying for a parameter, by its constraint, likeliest first
    constraints.simplex: (BASELINE_SOFTMAX,),
    constraints.unit_interval: (LOGIT, PROBIT, COMPLEMENTARY_LOG_LOG, IDENTITY),
    constraints.positive: POSITIVE,
    constraints.nonnegative: POSITIVE,
}


def candidate_links(constraint: Any, normalised_logits: bool) -> tuple[Link, ...]:
    """The links worth trying for a parameter under ``constraint``, likeliest first.

    :param normalised_logits: whether the distribution stores logits minus their logsumexp (a Categorical).
    """
    return (BASELINE_LOGITS,) if normalised_logits else LINKS.get(constraint, (IDENTITY,))


SOFTMAX: tuple[Link, ...] = (BASELINE_LOGITS, BASELINE_SOFTMAX)  # of a Categorical's, against the first class
SUCCESSES = (Bernoulli, Binomial, Geometric, NegativeBinomial)
CLASSES = (Categorical, OneHotCategorical, Multinomial)
LOG_CONCAVE: dict[tuple[str, Link], tuple[Any, ...]] = {  # in a predictor, by parameter and link
    ("loc", IDENTITY): (Normal, MultivariateNormal, Laplace, LogNormal),
    ("scale", LOG): (Normal, HalfNormal, Laplace, LogNormal, Weibull),
    ("rate", LOG): (Poisson, Exponential, Gamma),
    ("logits", IDENTITY): SUCCESSES,
    ("probs", LOGIT): SUCCESSES,
    ("probs", PROBIT): (Bernoulli, Binomial),
    ("probs", COMPLEMENTARY_LOG_LOG): (Bernoulli, Binomial),
    ("logits", BASELINE_LOGITS): CLASSES,
    ("probs", BASELINE_SOFTMAX): CLASSES,
}


@dataclass(frozen=True)
class Unwrapped:
    """A distribution without its wrappers."""

    base: Any
    mixing: Any | None  # the weights of a MixtureSameFamily, whose component is base
    inner: int  # batch dims of base that are one datum's
    outer: int  # dims of a MixtureSameFamily's batch that to_event has summed

    @cached_property
    def names(self) -> list[str]:
        """The parameters that base was given."""
        return list(given_arguments(self.base))


def unwrapped(fn: Any) -> Unwrapped:
    """The distribution inside ``to_event``, ``expand`` and ``MixtureSameFamily``."""
    mixing, inner, outer = None, 0, 0
    while True:
        if isinstance(fn, MixtureSameFamily) and mixing is None:
            mixing, inner, outer, fn = fn.mixture_distribution, 0, inner, fn.component_distribution
        elif isinstance(fn, Independent | ExpandedDistribution):
            inner += getattr(fn, "reinterpreted_batch_ndims", 0)
            fn = fn.base_dist
        else:
            return Unwrapped(fn, mixing, inner, outer)


@dataclass(frozen=True, eq=False)
class LikelihoodTerm:
    """The parameter of one observed site that depends on the latents."""

    site: str
    parameter: str  # "loc", "logits", "rate", ...
    link: Link
    layout: Layout  # of eta; dims along which a plate or ``expand`` only repeats it have size one
    mixture: str | None  # the discrete site, "" for MixtureSameFamily, None for neither
    _log_factorials: Last[Tensor, Tensor] = field(default_factory=Last, init=False, repr=False, compare=False)

    def value(self, trace: Trace) -> Tensor:
        """The parameter in a trace, without the copies that ``expand`` made along batch dims."""
        fn = unwrapped(trace.nodes[self.site]["fn"]).base
        value: Tensor = getattr(fn, self.parameter)
        for dim in range(len(fn.batch_shape)):
            if value.stride(dim) == 0:
                value = value.narrow(dim, 0, 1)
        return value

    def predictor(self, trace: Trace) -> Tensor:
        """``eta`` of this site in a trace, shape ``layout.shape``."""
        return self.link.inverse(self.value(trace)).reshape(self.layout.shape)

    def is_log_concave(self, trace: Trace) -> bool:
        """Whether the site's likelihood is known to be log-concave in the predictor."""
        base = unwrapped(trace.nodes[self.site]["fn"]).base
        families = LOG_CONCAVE.get((self.parameter, self.link), ())
        return self.mixture is None and any(is_like(base, family, base.batch_shape) for family in families)

    def blocks(self, trace: Trace) -> Tensor:
        """The likelihood's values as data of coupled elements, shape ``(N, C)``."""
        return self.layout.blocks(self.predictor(trace).unsqueeze(0))[0]

    def log_likelihood(self, trace: Trace) -> LogLikelihood:
        """Log likelihood of the site as a function of ``eta`` ``(R,) + shape``; all else is the trace's."""
        each = self.log_likelihoods(trace)
        return lambda eta: each(eta).sum(-1)

    def log_likelihoods(self, trace: Trace) -> LogLikelihood:
        """Log likelihood of each datum as a function of ``eta``, ``(R, N)``."""
        node = trace.nodes[self.site]
        parts = unwrapped(node["fn"])
        fixed = {k: getattr(parts.base, k) for k in parts.names if k != self.parameter}
        component = -1 - parts.inner - len(parts.base.event_shape)
        value = node["value"] if parts.mixing is None else node["value"].unsqueeze(component)

        def cells_at(eta: Tensor) -> Tensor:
            if type(parts.base) is Poisson and self.link is LOG and not parts.base.is_sparse:
                constant = self.log_factorials(node["value"]).reshape(value.shape)
                return _in_dtype(value, eta) * eta - eta.exp() - _in_dtype(constant, eta)
            given = {k: _in_dtype(v, eta) for k, v in fixed.items()} | {self.parameter: self.link.forward(eta)}
            with without_validation():
                return exact(type(parts.base)(**given, validate_args=False)).log_prob(_in_dtype(value, eta))

        def log_likelihoods(eta: Tensor) -> Tensor:
            cells = cells_at(eta)
            cells = cells.expand(broadcast(cells.shape, parts.base.batch_shape))
            cells = cells.sum(tuple(range(-parts.inner, 0))) if parts.inner else cells
            if parts.mixing is not None:
                cells = log_sum_exp(cells + exact(parts.mixing).logits.log_softmax(-1), -1)
                cells = cells.sum(tuple(range(-parts.outer, 0))) if parts.outer else cells
            cells = cells if node["mask"] is None else torch.where(torch.as_tensor(node["mask"]), cells, 0.0)
            cells = cells * node["scale"]
            if self.mixture:
                cells = _chosen(node, trace.nodes[self.mixture], cells)
            return cells.reshape(len(eta), -1)

        return log_likelihoods

    def orders(self, trace: Trace, dtype: torch.dtype) -> Callable[[Tensor, bool], tuple[Tensor, Tensor]]:
        """First and second derivatives of each datum's log likelihood in its one predictor, ``(R, N)`` both.

        :param dtype: in which the model is run.
        :return: a function of predictors ``(R, N)``, and of whether derivatives have a graph.
        """
        each, closed = self.log_likelihoods(trace), self.closed(trace)

        def orders(eta: Tensor, create_graph: bool) -> tuple[Tensor, Tensor]:
            if closed is not None:
                first, curvature = closed.orders(eta.unsqueeze(-1))
                return first.squeeze(-1), -curvature.squeeze(-1)
            with torch.enable_grad():
                eta = eta if create_graph else eta.detach().requires_grad_()
                value = each(self.layout.natural(eta.unsqueeze(-1).to(dtype))).double()
                first = pullback(value.sum(), eta, create_graph=True)
                second = pullback(first.sum(), eta, create_graph=create_graph)
            return first if create_graph else first.detach(), second

        return orders

    def log_factorials(self, counts: Tensor) -> Tensor:
        """Log factorials of the counts, in double precision; found once where each run observes the same tensor."""
        return self._log_factorials.found(counts, is_, lambda y: (y.double() + 1.0).lgamma())

    def closed(self, trace: Trace) -> ClosedForm | None:
        """The site in closed form: counts of successes in log odds, counts in log rates, normal means; else None.

        The second of two classes is a success.
        """
        node, seen, shape = trace.nodes[self.site], (self.parameter, self.link), self.layout.shape
        parts, y = unwrapped(node["fn"]), node["value"]
        if two := self.link in SOFTMAX and isinstance(parts.base, Categorical) and shape[-1] == 1:
            shape = shape[:-1]
        base, alone = parts.base, parts.mixing is None and self.mixture is None and (not parts.inner or is_plain(node))
        if not alone or broadcast(y.shape, base.batch_shape) != tuple(shape):
            return None
        kind: type[ClosedForm]
        if two or (seen in (("logits", IDENTITY), ("probs", LOGIT)) and type(base) in SUCCESSES_OR_NOT):
            kind, size = BinomialTargets, torch.as_tensor(getattr(base, "total_count", 1.0)).to(y)
            of_values = log_binomial(size, y) if hasattr(base, "total_count") else torch.zeros_like(y)
        elif seen == ("rate", LOG) and type(base) is Poisson and not base.is_sparse:
            kind, size, of_values = PoissonTargets, torch.ones_like(y), -self.log_factorials(y)
        elif seen == ("loc", IDENTITY) and type(base).log_prob is Normal.log_prob:
            kind, size = NormalTargets, base.scale.pow(-2)
            of_values = 0.5 * (size / math.tau).log()
        else:
            return None
        targets, size, of_values = (x.double().expand(shape).reshape(-1, 1) for x in (y, size, of_values))
        if not is_plain(node):
            mask, scale = (torch.as_tensor(x) for x in (True if node["mask"] is None else node["mask"], node["scale"]))
            weight = torch.where(mask, scale.double(), 0.0).expand(shape).reshape(-1, 1)
            size, of_values = weight * size, weight * of_values
            targets = targets if kind is NormalTargets else weight * targets
        return kind(targets, size, of_values.sum())

    def part(self, trace: Trace, J: Tensor, c: Tensor, dtype: torch.dtype) -> Part:
        """The site behind ``eta = J y + c``, in closed form where it has one.

        :param dtype: in which the model is run.  The likelihood takes predictors in double precision wherever it can.
        """
        closed, log_likelihood = self.closed(trace), self.log_likelihood(trace)
        if closed is not None:
            return Part(closed.log_likelihood, J, c, closed=closed)
        own, double = (in_blocks(log_likelihood, self.layout, d) for d in (dtype, torch.float64))
        if dtype == torch.float64 or agree(double, own, c):
            return Part(double, J, c)
        return Part(own, J, c, eps=torch.finfo(dtype).eps)

    def others(self, trace: Trace) -> list[Any]:
        """Everything but ``eta`` that the log likelihood is made of."""
        node = trace.nodes[self.site]
        parts = unwrapped(node["fn"])
        value = getattr(parts.base, self.parameter, torch.empty(0))
        found = [type(parts.base), type(parts.mixing), parts.names, value.shape, value.stride()]
        found += [getattr(parts.base, k) for k in parts.names if k != self.parameter]
        found += [node["value"], node["mask"], node["scale"]]
        if parts.mixing is not None:
            found.append(parts.mixing.probs)
        if self.mixture:
            choice = trace.nodes[self.mixture]
            found += [choice["fn"].log_prob(choice["value"]), choice["mask"], choice["scale"]]
        return found


def _in_dtype(value: Any, like: Tensor) -> Any:
    """A floating tensor in the precision of ``like``: of two precisions torch's own derivatives may lose the better."""
    return value.to(like.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _chosen(node: Node, choice: Node, cells: Tensor) -> Tensor:
    """An enumerated site summed out; its scale counts outside the sum, a cell masked in both sites as 1."""
    prior, scale = choice["fn"].log_prob(choice["value"]), choice["scale"]
    prior = prior if choice["mask"] is None else torch.where(torch.as_tensor(choice["mask"]), prior, 0.0)
    total = scale * log_sum_exp((cells if _is_one(scale) else cells / scale) + prior, choice["infer"]["_enumerate_dim"])
    if node["mask"] is None or choice["mask"] is None:
        return total
    return torch.where(torch.as_tensor(node["mask"]) | torch.as_tensor(choice["mask"]), total, 0.0)


def broadcast(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    """The shape to which two compatible ones broadcast (torch's own takes 20 microseconds)."""
    if a == b:
        return tuple(a)
    num = max(len(a), len(b))
    pairs = zip((1,) * (num - len(a)) + tuple(a), (1,) * (num - len(b)) + tuple(b), strict=True)
    return tuple(y if x == 1 else x for x, y in pairs)


@dataclass(frozen=True, eq=False)
class Sites:
    """The observed sites of a model by how they see the latents."""

    likelihoods: tuple[LikelihoodTerm, ...]
    free: tuple[str, ...]  # those that do not


def read_sites(joint: LogJoint, trace: Trace, u: Tensor) -> Sites | None:
    """The observed sites by how they see the latents; None when one does in a way that no likelihood describes.

    A proposal: it holds where :func:`pyro_evidence.structure.recognise.recognise` has verified it.

    :param trace: run at ``u``, which requires a gradient.
    """
    likelihoods, free = [], []
    for name in joint.observed:
        parts = unwrapped(trace.nodes[name]["fn"])
        dependent = [k for k in parts.names if depends(getattr(parts.base, k), u)]
        if not dependent and not _discrete_parents(joint, trace, name):
            node = trace.nodes[name]
            with without_validation():
                sees = depends(node["fn"].log_prob(node["value"]), u)
            if not sees:
                free.append(name)
                continue
        likelihood = _likelihood_term(joint, name, trace, parts, dependent)
        if likelihood is None:
            return None
        likelihoods.append(likelihood)
    return Sites(tuple(likelihoods), tuple(free))


def _discrete_parents(joint: LogJoint, trace: Trace, name: str) -> list[str]:
    """The discrete sites on whose value a site's distribution depends."""
    shape = trace.nodes[name]["fn"].batch_shape
    dims = {n: trace.nodes[n]["infer"].get("_enumerate_dim", 0) for n in joint.discrete}
    return [n for n, d in dims.items() if -len(shape) <= d < 0 and shape[d] > 1]


def _likelihood_term(
    joint: LogJoint, name: str, trace: Trace, parts: Unwrapped, dependent: list[str]
) -> LikelihoodTerm | None:
    """The likelihood with its first link, the shape of ``eta`` and the dims that one datum ties together."""
    parents = _discrete_parents(joint, trace, name)
    if len(dependent) != 1 or isinstance(parts.base, Unit) or len(parents) + (parts.mixing is not None) > 1:
        return None
    mixture = "" if parts.mixing is not None else parents[0] if parents else None
    likelihood = LikelihoodTerm(name, dependent[0], IDENTITY, Layout(torch.Size(), ()), mixture)
    node, link = trace.nodes[name], links_of(likelihood, trace)[0]
    shape = link.inverse(likelihood.value(trace)).shape
    num_event = max(0, len(shape) - len(parts.base.batch_shape))
    enumerated = -trace.nodes[likelihood.mixture]["infer"]["_enumerate_dim"] if likelihood.mixture else 0
    value_dims = node["value"].dim() - len(parts.base.event_shape) + (likelihood.mixture == "")
    num_dims = num_event + max(len(parts.base.batch_shape), value_dims, parts.inner + enumerated)
    shape = torch.Size([1] * (num_dims - len(shape))) + shape
    events = range(num_dims - num_event, num_dims)
    if likelihood.mixture is None:
        return replace(likelihood, link=link, layout=Layout(shape, tuple(events)))
    first = num_dims - num_event - parts.inner
    coupled = (first - (enumerated or 1), *range(first, num_dims))
    return replace(likelihood, link=link, layout=Layout(shape, coupled))


def links_of(likelihood: LikelihoodTerm, trace: Trace) -> list[Link]:
    """Every link that the constraint on a likelihood's parameter admits."""
    base = unwrapped(trace.nodes[likelihood.site]["fn"]).base
    value = getattr(base, likelihood.parameter)
    normalised = likelihood.parameter == "logits" and value.dim() > len(base.batch_shape)
    return list(candidate_links(base.arg_constraints[likelihood.parameter], normalised))


def depends(value: Any, u: Tensor) -> bool:
    """Whether ``u`` takes part in the making of ``value``."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return False
    found = torch.autograd.grad(value.sum(), u, retain_graph=True, allow_unused=True)[0]
    return found is not None


def log_prior_rows(joint: LogJoint, u: Tensor, theta: Tensor) -> Tensor:
    """Log prior density of the integrated sites, Jacobian included, shape ``(R,)``.

    :param u: rows ``(R, D)``.
    :param theta: the hyperparameters of all rows, shape ``(T,)``.
    """

    def one(row: Tensor) -> Tensor:
        _, log_det = joint.latents.constrained_with_log_det(row.to(joint.dtype))
        return (log_prob_sum(joint.trace(row, theta), joint.latents.names) + log_det).double()

    return batched.apply(one, (u,), joint.row_bytes if len(u) > 1 else None, one)


def gaussian_prior(joint: LogJoint, trace: Trace) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, precision and whether it is known, of each integrated coordinate, three of shape ``(D,)``.

    Known are Normal sites and MultivariateNormal ones of diagonal precision, unscaled and unmasked.
    """
    parts = [gaussian_site(trace.nodes[part.name], part.size) for part in joint.latents]
    loc, precision, known = (torch.cat(x) for x in zip(*parts, strict=True))
    return loc.double(), precision.double(), known


def is_plain(node: Node) -> bool:
    """Whether a site is unmasked, unscaled and no mixture."""
    return node["mask"] is None and _is_one(node["scale"]) and unwrapped(node["fn"]).mixing is None


def covariance_sizes(joint: LogJoint, trace: Trace) -> list[int]:
    """Coordinates that each dense covariance of a site is of."""
    sites = (unwrapped(trace.nodes[part.name]["fn"]).base for part in joint.latents)
    return [base.event_shape.numel() for base in sites if isinstance(base, MultivariateNormal)]


def gaussian_site(node: Node, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, precision and whether it is known, as in :func:`gaussian_prior`, of one site."""
    value, base = node["value"], unwrapped(node["fn"]).base
    zeros = torch.zeros(size, dtype=value.dtype, device=value.device)
    if not normal_width(node, size):
        return zeros, zeros + 1.0, zeros.bool()
    loc = base.loc.expand_as(value).reshape(-1)
    if isinstance(base, Normal):
        return loc, base.scale.expand_as(value).pow(-2).reshape(-1), ~zeros.bool()
    tril = base.scale_tril  # diagonal where the precision is
    diagonal = tril.diagonal(dim1=-2, dim2=-1)
    most = torch.finfo(tril.dtype).eps * diagonal.detach().abs().amax(-1)
    separate = bool((tril.detach().tril(-1).abs().amax((-2, -1)) <= most).all())
    precision = diagonal.pow(-2) if separate else torch.ones_like(diagonal)  # no derivative of a dense factor's
    return loc, precision.expand_as(value).reshape(-1), zeros.bool() | separate


def normal_width(node: Node, size: int) -> int:
    """Number of elements that each normal density of a site ties together; 0 for a site of another kind."""
    shape, base = node["value"].shape, unwrapped(node["fn"]).base
    if not is_plain(node) or shape.numel() != size:
        return 0
    if is_like(base, Normal, shape):
        return 1
    return shape[-1] if is_like(base, MultivariateNormal, shape[:-1]) else 0


def is_like(base: Any, family: Any, shape: torch.Size) -> bool:
    """Whether ``base`` has the log density of ``family``, and no batch dims beyond ``shape``."""
    same = isinstance(base, family) and type(base).log_prob is family.log_prob
    return same and broadcast(base.batch_shape, shape) == tuple(shape)


def _is_one(scale: Any) -> bool:
    return bool((scale == 1).all()) if isinstance(scale, Tensor) else bool(scale == 1)


def gaussian_noise(joint: LogJoint, trace: Trace, name: str) -> tuple[Tensor, Tensor] | None:
    """Residual and log precision of each element of a plain Normal observation, both ``(n,)``, or None."""
    node = trace.nodes[name]
    base = unwrapped(node["fn"]).base
    plain = is_plain(node) and is_like(base, Normal, base.batch_shape)
    if not plain or _discrete_parents(joint, trace, name):
        return None
    residual = node["value"] - base.loc
    scale = base.scale.expand(residual.shape)
    return residual.reshape(-1).double(), -2.0 * scale.reshape(-1).double().log()


LOGISTIC: tuple[Link, ...] = (IDENTITY, LOGIT)  # of a Bernoulli's parameter, seen in log odds


def softmax_average(mean: Tensor, covariance: Tensor, points: Tensor) -> Tensor:
    """``E softmax`` of logits against the first class under normal distributions, one for each row, ``(N, C)``.

    :param mean: ``(N, C - 1)``, and covariances ``(N, C - 1, C - 1)``.
    :param points: standard normal, of equal weight, the same for all rows, ``(S, C - 1)``.
    """
    values, vectors = torch.linalg.eigh(covariance)
    root = (vectors * values.clamp(min=0.0).sqrt().unsqueeze(-2)) @ vectors.mT  # the symmetric one does not turn
    rows = zip(*(x.split(max(1, batched.BATCH_NUMBERS // points.numel())) for x in (mean, root)), strict=True)
    return torch.cat([_softmax_with_first(m.unsqueeze(1) + points @ r).mean(1) for m, r in rows])


NUM_NODES = 40  # of Gauss-Hermite quadrature over one predictor, or one value of a function


def hermite(mean: Tensor, variance: Tensor) -> Tensor:
    """``E sigmoid(eta)`` under ``N(mean, variance)`` by 40 Gauss-Hermite nodes, shape ``(...)``."""
    nodes, weights = nodes_and_weights(NUM_NODES, mean)
    return torch.sigmoid(mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * nodes) @ weights
