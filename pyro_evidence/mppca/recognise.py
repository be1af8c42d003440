"""A log joint recognised as a mixture of probabilistic PCA, by its values at random points, never by names."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributions import LowRankMultivariateNormal, constraints

from pyro_evidence.errors import UnsupportedModel
from pyro_evidence.mixture.recognise import held_at
from pyro_evidence.mppca.data import Observations
from pyro_evidence.mppca.expectation import FactorAnalysers
from pyro_evidence.mppca.updates import SharedParameters
from pyro_evidence.numerics.coordinates import is_identity
from pyro_evidence.program import predictors
from pyro_evidence.program.distributions import WithGaps
from pyro_evidence.program.log_joint import LogJoint

Trace = Any
TOLERANCE, SINGLE = 1e-9, 1e-4  # relative: what counts as equal at random points in double and single precision


class NotMPPCA(ValueError):
    """Not a mixture of probabilistic PCA, and why."""


@dataclass(frozen=True)
class Scaled:
    """Precisions that are powers of one param times constants: ``param.reshape(view) ** power * exp(offset)``."""

    name: str | None  # of the param; None where the precisions are fixed
    shape: Size  # of the param
    view: Size  # broadcasts to the precisions
    power: float
    offset: Tensor  # log constants, in the shape of the precisions

    def group(self) -> Tensor:
        """Which element of the param each precision has; one for each different constant where it is fixed."""
        if self.name is None:
            return self.offset.unique(return_inverse=True)[1]
        return torch.arange(self.shape.numel()).reshape(self.view).expand(self.offset.shape)

    def param(self, precision: Tensor, on: Tensor, like: Tensor) -> Tensor:
        """The param that gives these precisions where ``on``, and stays ``like`` elsewhere."""
        values = ((precision.log() - self.offset) / self.power).exp()
        flat, group = like.detach().double().reshape(-1).clone(), self.group().to(on.device)
        flat[group[on]] = values[on]
        return flat.reshape(self.shape).to(like.dtype)


@dataclass(frozen=True)
class MPPCAStructure:
    """A recognised mixture of probabilistic PCA.  Built by :func:`recognise_mppca`."""

    joint: LogJoint
    Y: Tensor  # (N, m)
    mean: str | None  # the param that holds mu; None where it is fixed
    mixing: str | None
    alpha: Scaled  # (K, q)
    beta: Scaled  # (K, m)
    start: FactorAnalysers  # one row, at the model's own hyperparameters, W at zero

    @property
    def ties(self) -> SharedParameters:
        """Which hyperparameters are shared, and which are learned."""
        free = [x is not None for x in (self.alpha.name, self.beta.name, self.mixing, self.mean)]
        return SharedParameters(self.alpha.group(), self.beta.group(), *free)

    def params(self, analysers: FactorAnalysers) -> dict[str, Tensor]:
        """The model's params at the first row; those of pruned components stay where the model has them."""
        params, _ = self.joint.split_hypers(self.joint.initial_theta)
        on, columns = analysers.active[0], analysers.columns[0] & analysers.active[0].unsqueeze(-1)
        for scaled, value, where in (
            (self.alpha, analysers.alpha[0], columns),
            (self.beta, analysers.beta[0], on.unsqueeze(-1)),
        ):
            if scaled.name is not None:
                params[scaled.name] = scaled.param(value, where.expand(value.shape), params[scaled.name])
        if self.mixing is not None:
            params[self.mixing] = analysers.log_mixing[0].exp()
        if self.mean is not None:
            params[self.mean] = analysers.mu[0]
        return {n: v.to(self.joint.dtype) for n, v in params.items()}

    def prior_precision(self, params: Mapping[str, Tensor]) -> Tensor:
        """Prior precisions of the columns under these params, shape ``(K, q)``."""
        if self.alpha.name is None:
            return self.alpha.offset.exp()
        log_param = params[self.alpha.name].detach().double().log().reshape(self.alpha.view)
        return (self.alpha.power * log_param + self.alpha.offset).exp()

    def fixed(self, params: Mapping[str, Tensor]) -> LogJoint:
        """The log joint with its hyperparameters held at ``params``."""
        return held_at(self.joint, params)


@dataclass(frozen=True)
class _Observed:
    """What one trace says of the observed site."""

    probs: Tensor  # (K,)
    loc: Tensor  # (K, m)
    factor: Tensor  # (K, m, q)
    precision: Tensor  # (K, m)
    value: Tensor  # (N, m)


@dataclass(frozen=True)
class _Point:
    u: Tensor
    theta: Tensor
    trace: Trace
    seen: _Observed
    params: dict[str, Tensor]

    @property
    def tolerance(self) -> float:
        """What counts as equal."""
        return TOLERANCE if self.seen.value.dtype == torch.float64 else SINGLE

    @staticmethod
    def drawn(joint: LogJoint, seed: int | None) -> "_Point":
        """Random latents and hyperparameters near the start; ``None``: the start itself."""
        generator, scale = torch.Generator().manual_seed(seed or 0), float(seed is not None)
        sizes = (joint.latents.size, joint.hypers.size)
        noise = [scale * torch.randn(n, generator=generator, dtype=torch.float64).to(joint.device) for n in sizes]
        u, theta = noise[0], joint.initial_theta + 0.1 * noise[1] * _sizes(joint)
        trace = joint.trace(u, theta)
        return _Point(u, theta, trace, _observed(joint, trace), joint.split_hypers(theta)[0])


def _sizes(joint: LogJoint) -> Tensor:
    """How far hyperparameters have to move to be seen moving: real ones in proportion to what they are, ``(T,)``."""
    sizes = torch.ones_like(joint.initial_theta)
    for part in joint.hypers:
        if is_identity(part.transform):
            place = joint.hypers.slices[part.name]
            sizes[place] = joint.initial_theta[place].abs().clamp(min=1.0)  # about zero by 1, in data's units
    return sizes


def is_mppca(joint: LogJoint) -> bool:
    """Whether the observed site is a Gaussian of low rank, or a mixture of such."""
    node = joint.trace(joint.initial_u, joint.initial_theta).nodes[joint.observed[0]] if joint.observed else None
    return node is not None and isinstance(predictors.unwrapped(_whole(node)).base, LowRankMultivariateNormal)


def _whole(node: Any) -> Any:
    """The distribution of an observed site, of whole data."""
    return node["fn"].base_dist if isinstance(node["fn"], WithGaps) else node["fn"]


def recognise_mppca(joint: LogJoint) -> MPPCAStructure:
    """The mixture of probabilistic PCA that ``joint`` is.

    :raises UnsupportedModel: with the reason why it is none.
    """
    try:
        return _recognise(joint)
    except NotMPPCA as reason:
        raise UnsupportedModel(
            f"the model is not a mixture of probabilistic PCA: {reason}. Expected one observed "
            f"LowRankMultivariateNormal, or MixtureSameFamily of such, in one plate, whose cov_factor is a site of "
            f"Normal loadings (K, m, q) about zero; see pyro_evidence.models.mppca."
        ) from None


def _recognise(joint: LogJoint) -> MPPCAStructure:
    points = [_Point.drawn(joint, seed) for seed in (1, 2)]
    _check_loadings(joint, points)
    beta = _scaled([p.seen.precision for p in points], points, "noise precision")
    alpha = _alpha(joint, points)
    start = _Point.drawn(joint, None)
    mean = _holder([p.seen.loc for p in points], points)
    mixing = _holder([p.seen.probs for p in points], points) or _simplex_of_one(joint)
    known = {x for x in (mean, mixing, alpha.name, beta.name) if x is not None}
    _check_known(joint, points, known, mixing)
    found = MPPCAStructure(joint, start.seen.value.double(), mean, mixing, alpha, beta, _start(start))
    return replace(found, start=replace(found.start, alpha=found.prior_precision(start.params).unsqueeze(0)))


def _observed(joint: LogJoint, trace: Trace) -> _Observed:
    """The parameters of the observed site.

    :raises NotMPPCA: when it is something else.
    """
    if len(joint.observed) != 1 or joint.discrete or len(joint.latents.names) != 1:
        raise NotMPPCA(f"it has {len(joint.observed)} observed sites and latent sites {list(joint.latents.names)}")
    node = trace.nodes[joint.observed[0]]
    parts = predictors.unwrapped(_whole(node))
    base, value = parts.base, node["value"]
    value = torch.where(node["fn"].seen, value, torch.nan) if isinstance(node["fn"], WithGaps) else value
    plain = node["mask"] is None and bool((torch.as_tensor(node["scale"]) == 1).all())
    if not isinstance(base, LowRankMultivariateNormal) or not plain or value.dim() != 2:
        raise NotMPPCA(f"site '{joint.observed[0]}' is a {type(base).__name__}, masked or scaled, or not a matrix")
    batch = int(parts.mixing is not None)
    loc, factor, variance = (
        _common(x, batch + d) for x, d in ((base.loc, 1), (base.cov_factor, 2), (base.cov_diag, 1))
    )
    if not batch:
        loc, factor, variance = loc.unsqueeze(0), factor.unsqueeze(0), variance.unsqueeze(0)
    probs = loc.new_ones(1) if parts.mixing is None else _common(parts.mixing.probs, 1)
    return _Observed(probs, loc, factor, variance.reciprocal(), value.detach())


def _common(x: Tensor, dims: int) -> Tensor:
    """``x`` with its last ``dims`` dims, where it is the same for all data."""
    flat = x.detach().reshape(-1, *x.shape[x.dim() - dims :]) if x.dim() > dims else x.detach().unsqueeze(0)
    if len(flat) > 1 and not bool((flat == flat[:1]).all()):
        raise NotMPPCA("its parameters depend on the datum")
    return flat[0].double()


def _check_loadings(joint: LogJoint, points: list[_Point]) -> None:
    """The loadings are the latent site itself."""
    for point in points:
        W = joint.latents.constrained(point.u.to(joint.dtype))[joint.latents.names[0]]
        if W.numel() != point.seen.factor.numel() or not _close(
            W.reshape(point.seen.factor.shape), point.seen.factor, point.tolerance
        ):
            raise NotMPPCA(f"cov_factor is not the site '{joint.latents.names[0]}' itself")


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    a, b = a.detach().double(), b.detach().double()
    return bool(((a - b).abs() <= tolerance * (1.0 + b.abs())).all())


def _alpha(joint: LogJoint, points: list[_Point]) -> Scaled:
    """Prior precisions of the columns."""
    found = []
    for point in points:
        loc, precision, known = predictors.gaussian_prior(joint, point.trace)
        if not bool(known.all()) or bool((loc != 0).any()):
            raise NotMPPCA("its loadings are not Normal about zero")
        rows = precision.detach().reshape(point.seen.factor.shape)
        if not _close(rows, rows[:, :1].expand_as(rows), point.tolerance):
            raise NotMPPCA("the prior precision of its loadings differs from output to output")
        found.append(rows[:, 0])
    return _scaled(found, points, "prior precision of the loadings")


def _scaled(precision: list[Tensor], points: list[_Point], what: str) -> Scaled:
    """Which param scales these precisions, ``(K, n)`` at each point, and how."""
    logs, tolerance = [x.detach().double().log() for x in precision], points[0].tolerance
    if _close(logs[0], logs[1], tolerance):
        return Scaled(None, Size(), Size(), 1.0, logs[0])
    K, n = logs[0].shape
    for name, first in points[0].params.items():
        values = [p.params[name].detach().double() for p in points]
        if not bool((values[0] > 0).all()) or first.numel() == 0:
            continue
        views = [Size([K, n]), Size([K, 1]), Size([1, n]), Size([1, 1])]  # in which the param can broadcast
        for view in (v for v in views if v.numel() == first.numel()):
            found = _power(logs, [v.log().reshape(view).expand(K, n) for v in values], tolerance)
            if found is not None:
                offset = logs[0] - found * values[0].log().reshape(view)
                return _uniform(Scaled(name, first.shape, view, found, offset), what)
    raise NotMPPCA(f"the {what} is not one param, to some power, times a constant")


def _power(logs: list[Tensor], values: list[Tensor], tolerance: float) -> float | None:
    """The power that ``log precision`` is of the values; None where there is none."""
    moved = values[1] - values[0]
    power = float(((logs[1] - logs[0]) * moved).sum() / moved.square().sum())
    power, found = 0.5 * round(2.0 * power), power  # a single number follows any other to some odd power
    exact = abs(power - found) < 10.0 * tolerance and _close(logs[1] - logs[0], power * moved, tolerance)
    return power if exact and power != 0.0 else None


def _uniform(scaled: Scaled, what: str) -> Scaled:
    """Refuse groups whose members are different multiples of their param."""
    group = scaled.group().reshape(-1)
    flat = scaled.offset.reshape(-1)
    mean = torch.zeros(int(group.max()) + 1).to(flat).index_add(0, group, flat) / group.bincount()
    if not bool(((flat - mean[group]).abs() <= SINGLE).all()):
        raise NotMPPCA(f"the {what} is not the same multiple of its param for all that share it")
    return scaled


def _holder(values: list[Tensor], points: list[_Point]) -> str | None:
    """The param that holds these values; None where they are fixed.

    :raises NotMPPCA: when they move but are no param.
    """
    tolerance = points[0].tolerance
    if _close(values[0], values[1], tolerance):
        return None
    for name, param in points[0].params.items():
        same = param.numel() == values[0].numel()
        pairs = zip(points, values, strict=True)
        if same and all(_close(p.params[name].reshape(v.shape), v, tolerance) for p, v in pairs):
            return name
    raise NotMPPCA("its means or its mixing are neither fixed nor one param")


def _simplex_of_one(joint: LogJoint) -> str | None:
    """A mixing of a single component, which is 1 whatever happens."""
    of_one = (p.name for p in joint.hypers if p.shape == Size([1]) and p.name in joint.param_constraints)
    return next((n for n in of_one if isinstance(joint.param_constraints[n], type(constraints.simplex))), None)


def _check_known(joint: LogJoint, points: list[_Point], known: set[str], mixing: str | None) -> None:
    others = [n for n in joint.hypers.names if n not in known]
    if others or joint.maximised_sites:
        raise NotMPPCA(
            f"hyperparameters {others or list(joint.maximised_sites)} are none of alpha, beta, mu and mixing"
        )
    if mixing is not None and not isinstance(joint.param_constraints[mixing], type(constraints.simplex)):
        raise NotMPPCA(f"param '{mixing}' holds the mixing but is not constrained to the simplex")


def _start(point: _Point) -> FactorAnalysers:
    seen = point.seen
    K, m, q = seen.factor.shape
    columns = torch.ones(1, K, q, dtype=torch.bool, device=seen.loc.device)
    W = torch.zeros(1, K, m, q, dtype=torch.float64, device=seen.loc.device)
    return FactorAnalysers(
        W,
        seen.loc.unsqueeze(0),
        seen.precision.unsqueeze(0),
        seen.probs.log().unsqueeze(0),
        torch.ones(1, K, q, dtype=torch.float64, device=seen.loc.device),
        columns,
    )


@dataclass(frozen=True)
class ScalarUnits:
    """``y = origin + unit * standard y``: one unit for all outputs, which leaves isotropic noise isotropic."""

    origin: Tensor  # (m,)
    unit: Tensor  # ()

    @staticmethod
    def of(Y: Observations) -> "ScalarUnits":
        """Mean, and root mean variance, of what is not nan; 1 where nothing varies."""
        num = Y.total(lambda y: (~y.isnan()).sum(0).double()).clamp(min=1.0)  # a column without data has mean 0
        origin = Y.total(lambda y: y.nan_to_num(0.0).sum(0)) / num
        squares = Y.total(lambda y: (y - origin).nan_to_num_(0.0).square_().sum(0))
        unit, size = (squares / num).mean().sqrt(), origin.abs().max()
        return ScalarUnits(origin, torch.where(unit > 1e-12 * torch.maximum(size, unit), unit, 1.0))

    def standard(self, analysers: FactorAnalysers) -> FactorAnalysers:
        """Parameters of the caller's units in standard ones."""
        return self._moved(analysers, self.unit, -self.origin / self.unit)

    def original(self, analysers: FactorAnalysers) -> FactorAnalysers:
        """Parameters of standard units in the caller's."""
        return self._moved(analysers, self.unit.reciprocal(), self.origin)

    @staticmethod
    def _moved(analysers: FactorAnalysers, unit: Tensor, shift: Tensor) -> FactorAnalysers:
        square = unit.square()
        return replace(
            analysers,
            W=analysers.W / unit,
            mu=analysers.mu / unit + shift,
            beta=analysers.beta * square,
            alpha=analysers.alpha * square,
        )

    def log_jacobian(self, Y: Observations) -> float:
        """What the log density of all data loses by going from standard to the caller's units, nats."""
        num = int(Y.total(lambda y: (~y.isnan()).sum())) if Y.has_gaps else Y.shape.numel()
        return num * math.log(float(self.unit))
