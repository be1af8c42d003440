"""A log joint recognised as a mixture of linear-Gaussian kernels, by derivatives at random points, never by names.

Enumerated and ``MixtureSameFamily`` forms come out alike: arrays for ``mixture.expectation``, and the way back to the
model's own weights and params.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal, constraints

from pyro_evidence.errors import UnsupportedModel
from pyro_evidence.mixture.density import beside
from pyro_evidence.mixture.expectation import Mixture, MixtureData
from pyro_evidence.mixture.updates import SharedParameters
from pyro_evidence.numerics.coordinates import Coordinates
from pyro_evidence.numerics.derivatives import jacobian
from pyro_evidence.program import predictors
from pyro_evidence.program.distributions import Background, WithBackground, WithGaps
from pyro_evidence.program.log_joint import LogJoint, Model

Trace = Any


class NoMixture(ValueError):
    """Not a mixture of linear-Gaussian kernels, and why."""


@dataclass(frozen=True)
class Kernels:
    """What one trace says of the observed site, by component; the data axis has size 1 where it does not matter."""

    loc: Tensor  # (K, N or 1, m)
    scale: Tensor  # (K, N or 1, m); or (K, N or 1, m, m), lower Cholesky factors
    probs: Tensor  # (K,)
    value: Tensor  # (N, m) nan where an element is missing
    weight: Tensor  # (N,)
    is_observed: bool = True  # whether the value was given
    background: Background | None = None  # a uniform density beside the components


def kernels(joint: LogJoint, trace: Trace) -> Kernels:
    """The kernels of one trace.

    :raises NoMixture: when the observed site is not a mixture of Gaussians.
    """
    if len(joint.observed) != 1 or len(joint.discrete) > 1:
        raise NoMixture(f"it has {len(joint.observed)} observed and {len(joint.discrete)} discrete sites")
    node = trace.nodes[joint.observed[0]]
    fn = node["fn"]
    background = fn.background if isinstance(fn, WithBackground) else None
    fn = fn if background is None else fn.base_dist
    seen = fn.seen if isinstance(fn, WithGaps) else None
    parts = predictors.unwrapped(fn if seen is None else fn.base_dist)
    base, num_event = parts.base, parts.inner
    if not isinstance(base, Normal | MultivariateNormal):
        raise NoMixture(f"site '{joint.observed[0]}' is {type(base).__name__}")
    if seen is not None and isinstance(base, MultivariateNormal):
        raise NoMixture("elements of its data are missing and its noise is correlated")
    if node["mask"] is not None:
        raise NoMixture("its data are masked")
    value, full = node["value"], isinstance(base, MultivariateNormal)
    if not node["is_observed"]:  # zeros of the data's shape: the trace holds draws for every component
        value = value.new_zeros(node["fn"].batch_shape[-1:] + node["fn"].event_shape)
    elif seen is not None:
        value = torch.where(seen, value, torch.nan)
    event = 1 if full else num_event
    if value.dim() - event != 1 or event > 1:
        raise NoMixture(f"data of shape {tuple(value.shape)} are not in one plate, one datum a number or a vector")
    value = value if event else value.unsqueeze(-1)
    if joint.discrete:
        choice = trace.nodes[joint.discrete[0]]
        if len(choice["cond_indep_stack"]) != 1:
            raise NoMixture(f"site '{joint.discrete[0]}' is not in one plate")
        position, probs = choice["infer"]["_enumerate_dim"], choice["fn"].probs
    elif parts.mixing is not None:
        position, probs = -1, parts.mixing.probs
    else:
        raise NoMixture("it has no components")
    probs = probs.reshape(-1, probs.shape[-1])
    if not bool((probs == probs[:1]).all()):
        raise NoMixture("its mixing depends on the datum")
    loc, scale = base.loc, base.scale_tril if isinstance(base, MultivariateNormal) else base.scale
    if not event:
        loc, scale = loc.unsqueeze(-1), scale.unsqueeze(-1)
    loc, scale = _laid_out(loc, position, 1), _laid_out(scale, position, 1 + full)
    weight = torch.as_tensor(node["scale"]).to(value.dtype).expand(len(value))
    if joint.discrete and bool((weight != 1).any()):
        raise NoMixture(
            "poutine.scale around an enumerated site is not a weight of the data; write it as MixtureSameFamily"
        )
    return Kernels(loc, scale, probs[0], value.detach(), weight, bool(node["is_observed"]), background)


def _laid_out(x: Tensor, position: int, event: int) -> Tensor:
    """``x`` as ``(K, N or 1) + event``.

    :param position: dim of the components among those in front of one datum's.
    :param event: number of dims of one datum.
    """
    x = x[(None,) * max(0, 2 + event - x.dim())].movedim(position - event, 0)
    x = x.reshape(x.shape[0], -1, *x.shape[x.dim() - event :]) if x.dim() > 2 + event else x
    return _unrepeated(x) if x.shape[1] > 1 and x.stride(1) == 0 else x


def _unrepeated(x: Tensor) -> Tensor:
    """``x[:, :1]`` of what is the same for all data; derivatives never see the repetitions."""
    base = x._base
    if base is None or base.numel() >= x.numel():
        return x[:, :1]
    return base.as_strided((len(x), 1, *x.shape[2:]), x.stride(), x.storage_offset())


FEW = 64  # rows on which a model of ours is recognised


def joint_of_rows(model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LogJoint | None:
    """The log joint of a mixture of ours on all its data; None for other models, few rows, and rows with gaps."""
    try:
        return _joint_of_rows(model, args, kwargs)
    except Exception:  # whatever it is, running the model on its data says it best
        return None


def _joint_of_rows(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LogJoint | None:
    if not hasattr(model, "settled"):
        return None
    rows = model.rows(*args, **kwargs)
    step = len(rows.Y) // FEW
    if step < 2 or bool(rows.Y.sum().isnan()):
        return None
    thin = LogJoint(model.settled(*args, **kwargs), model.few(step, *args, **kwargs))
    return thin.on(args, kwargs, times=step)


TOLERANCES = {torch.float64: 1e-9}  # relative: what counts as equal at random points
SINGLE = 3e-5  # the same in float32


@dataclass(frozen=True)
class Scaling:
    """A group of precisions: log precision is ``power * theta + offset``; index -1 where nothing is learned."""

    index: Tensor  # (...) coordinate of theta
    power: Tensor  # (...)
    offset: Tensor  # (...)


@dataclass(frozen=True)
class MixtureStructure:
    """A recognised mixture.  Built by :func:`recognise_mixture`."""

    joint: LogJoint
    index: Tensor  # (K, m, B) flat coordinate of each weight
    Y: Tensor  # (N, m) responses, what does not depend on the weights taken away
    G: Tensor | None  # (N, B) basis functions; None for the constant 1
    weight: Tensor  # (N,)
    loc: Tensor  # (K, m, B) prior mean
    alpha: Scaling  # (K, m, B)
    beta: Scaling  # (K, m) reciprocal variances of the noise
    correlation: str | None  # the param that holds the noise's correlations, by lower Cholesky factors
    mixing: str | None  # the param that holds the mixing; None when it is fixed
    start: Mixture  # one row, at the model's own hyperparameters, weights at their prior mean
    offset: Tensor  # (N or 1, m) what was taken away from the responses
    background: Background | None  # a uniform density beside the kernels, in the responses' own place

    @property
    def ties(self) -> SharedParameters:
        """Which hyperparameters are shared, and which are learned."""
        alpha, beta = _groups(self.alpha), _groups(self.beta)
        free = self.alpha.index >= 0, self.beta.index >= 0
        return SharedParameters(alpha[0], alpha[1], beta[0], beta[1], free[0], free[1], self.mixing is not None)

    def spread(self, data: MixtureData, background: Background | None, unit: Tensor | None = None) -> MixtureData:
        """The data, made of this model's responses measured in ``unit`` ``(m,)``, with a background beside."""
        return data if background is None else beside(data, background, self.Y + self.offset, unit)

    def theta(self, mixture: Mixture) -> Tensor:
        """Unconstrained hyperparameters of the first row; those of pruned components stay where the model has them."""
        theta, on = self.joint.initial_theta.clone(), mixture.active[0]
        _write(theta, self.alpha, mixture.alpha[0].log(), on)
        _write(theta, self.beta, -_covariance(mixture).diagonal(dim1=-2, dim2=-1).log(), on)
        return theta

    def params(self, mixture: Mixture) -> dict[str, Tensor]:
        """The model's params at the first row of ``mixture``."""
        params, _ = self.joint.split_hypers(self.theta(mixture))
        if self.correlation is not None:
            covariance = _covariance(mixture)
            deviation = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
            params[self.correlation] = torch.linalg.cholesky(covariance) / deviation.unsqueeze(-1)
        if self.mixing is not None:
            params[self.mixing] = mixture.log_mixing[0].exp()
        return {n: v.to(self.joint.dtype) for n, v in params.items()}

    def consistent(self, mixture: Mixture) -> Mixture:
        """The first row, with pruned components given the hyperparameters that they share with others."""
        theta, off = self.theta(mixture), ~mixture.active
        alpha = torch.where(off[..., None, None], _read(theta, self.alpha), mixture.alpha)
        beta = _read(theta, self.beta)
        if mixture.noise.dim() == 4:
            return replace(mixture, alpha=alpha)
        return replace(mixture, alpha=alpha, noise=torch.where(off.unsqueeze(-1), beta, mixture.noise))

    def flat(self, w: Tensor) -> Tensor:
        """Weights ``(K, m, B)`` as the flat latent vector."""
        return torch.zeros(self.joint.latents.size, dtype=torch.float64, device=w.device).index_copy(
            0, self.index.flatten(), w.flatten()
        )

    def fixed(self, params: Mapping[str, Tensor]) -> LogJoint:
        """The log joint with its hyperparameters held at ``params``."""
        return held_at(self.joint, params)


def held_at(joint: LogJoint, params: Mapping[str, Tensor]) -> LogJoint:
    """The log joint with its hyperparameters held at ``params``."""
    held = copy.copy(joint)
    held.held, held.hypers, held.initial_theta = dict(params), Coordinates({}), joint.initial_theta[:0]
    return held


def _groups(scaling: Scaling) -> tuple[Tensor, Tensor]:
    """Contiguous group numbers, what is fixed last, and the ratio of each member to its group's value."""
    _, group = scaling.index.unique(return_inverse=True)
    group = torch.where(scaling.index < 0, group.max() + 1, group)
    return group.unique(return_inverse=True)[1], scaling.offset.exp()


def _covariance(mixture: Mixture) -> Tensor:
    """Noise covariances of the first row, shape ``(K, m, m)``."""
    if mixture.noise.dim() == 4:
        return torch.linalg.inv(mixture.noise[0])
    return mixture.noise[0].reciprocal().diag_embed()


def _write(theta: Tensor, scaling: Scaling, log_precision: Tensor, on: Tensor) -> None:
    """Put the hyperparameters that give these precisions of the components ``on`` into ``theta``."""
    chosen = (scaling.index >= 0) & on.reshape(-1, *[1] * (scaling.index.dim() - 1))
    values = (log_precision - scaling.offset) / torch.where(chosen, scaling.power, 1.0)
    theta[scaling.index[chosen]] = values[chosen]


def _read(theta: Tensor, scaling: Scaling) -> Tensor:
    """The precisions that ``theta`` gives."""
    padded = torch.cat([theta, theta.new_zeros(1)])  # index -1 reads the zero
    return (torch.where(scaling.index >= 0, scaling.power, 0.0) * padded[scaling.index] + scaling.offset).exp()


def _tolerance(joint: LogJoint) -> float:
    return TOLERANCES.get(joint.dtype, SINGLE)


def recognise_mixture(joint: LogJoint) -> MixtureStructure:
    """The mixture that ``joint`` is.

    :raises UnsupportedModel: with the reason why it is none.
    """
    try:
        return _recognise(joint)
    except NoMixture as reason:
        raise UnsupportedModel(
            f"the model is not a mixture of linear-Gaussian kernels: {reason}. Expected one local discrete site "
            f"(or a MixtureSameFamily) in one plate, and Normal or MultivariateNormal data, linear in Normal weights."
        ) from None


def recognised(joint: LogJoint) -> MixtureStructure:
    """The mixture that ``joint`` is, from a few rows where that is enough.

    :raises UnsupportedModel: with the reason why it is none.
    """
    model: Any = joint.model
    if joint.seen is None:
        return recognise_mixture(joint)
    thin = copy.copy(joint)
    thin.args, thin.kwargs = model.few(joint.seen, *joint.args, **joint.kwargs), {}
    structure = recognise_mixture(thin)
    rows = model.rows(*joint.args, **joint.kwargs)
    G = None if rows.G is None else _double(rows.G)
    if G is not None and structure.G is not None and not torch.equal(G[:: joint.seen], structure.G):
        return recognise_mixture(joint)  # a basis that looks at all rows
    Y, weight, offset = _double(rows.Y), _double(rows.weight), structure.offset[:1]  # our means have no fixed part
    return replace(structure, joint=joint, Y=Y, G=G, weight=weight, offset=offset)


def with_components(model: Any, num_components: int | None) -> Any:
    """The model with so many components, where it can be had so; else as it is."""
    grown = getattr(model, "with_components", lambda num: None)(num_components) if num_components else None
    return model if grown is None else grown


def most_components(model: Any, num_components: int, num_rows: int, *, alike: bool) -> int:
    """As many as there are data for a model that can be had with more; else as many as it has.

    :param alike: whether one component is as good as another; no more are tried beside a single one.
    """
    free = alike and num_components > 1
    return num_rows if free and with_components(model, num_components + 1) is not model else num_components


def enlarged(structure: MixtureStructure, num_components: int) -> MixtureStructure:
    """The same model with at least so many components."""
    if num_components <= len(structure.loc):
        return structure
    joint = structure.joint
    model = with_components(joint.model, num_components)
    if joint.seen is None:
        return recognise_mixture(LogJoint(model, joint.args, joint.kwargs))
    few = model.few(joint.seen, *joint.args, **joint.kwargs)
    return recognised(LogJoint(model, few).on(joint.args, joint.kwargs, times=joint.seen))


def _double(x: Tensor) -> Tensor:
    return x.detach().double()


def _recognise(joint: LogJoint) -> MixtureStructure:
    points = [_Point.drawn(joint, seed) for seed in (1, 2)]
    index = _weight_index(joint, points[0])
    origin = _Point.drawn(joint, None)
    G, offset = _basis(joint, index, origin)
    loc, alpha = _prior(joint, points, index)
    beta, correlation = _noise(joint, points)
    mixing = _mixing(joint, points[0], [alpha, beta], correlation)
    kernels = points[0].kernels
    start = _start(origin.kernels, alpha, joint.initial_theta, loc)
    Y = (kernels.value - offset).double()
    structure = MixtureStructure(
        joint, index, Y, G, kernels.weight.double(), loc, alpha, beta, correlation, mixing, start,
        offset.double(), None if kernels.background is None else kernels.background.double(),
    )  # fmt: skip
    _verify(structure, points[1])
    return structure


@dataclass(frozen=True)
class _Point:
    u: Tensor
    theta: Tensor
    trace: Trace
    kernels: Kernels

    @staticmethod
    def drawn(joint: LogJoint, seed: int | None, u: Tensor | None = None) -> "_Point":
        """Random weights and hyperparameters near the start; ``None``: the start itself, at weights of zero."""
        generator = torch.Generator().manual_seed(seed or 0)
        scale = 0.0 if seed is None else 1.0
        noise = [
            torch.randn(n, generator=generator, dtype=torch.float64) for n in (joint.latents.size, joint.hypers.size)
        ]
        u = (scale * noise[0].to(joint.device) if u is None else u).requires_grad_()
        theta = (joint.initial_theta + 0.1 * scale * noise[1].to(joint.device)).requires_grad_()
        trace = joint.trace(u, theta)
        return _Point(u, theta, trace, kernels(joint, trace))


def _weight_index(joint: LogJoint, point: _Point) -> Tensor:
    """The flat coordinates behind each component and output, in order of the basis functions, ``(K, m, B)``."""
    loc = point.kernels.loc
    generator = torch.Generator().manual_seed(3)
    blend = torch.rand(loc.shape[1], generator=generator, dtype=torch.float64).to(loc) + 0.5
    slope = jacobian(torch.einsum("knm,n->km", loc, blend).reshape(-1), point.u)
    used = slope != 0
    num_basis = int(used[0].sum())
    if num_basis == 0 or not bool((used.sum(-1) == num_basis).all()):
        raise NoMixture("components or outputs have different numbers of weights")
    values, order = torch.where(used, slope, torch.inf).sort(-1)
    values, order = values[:, :num_basis], order[:, :num_basis]
    if len(order.unique()) != joint.latents.size or order.numel() != joint.latents.size:
        raise NoMixture("weights are shared between components or outputs, or other latent sites are integrated")
    if not bool(((values - values[:1]).abs() <= _tolerance(joint) * (1.0 + values[:1].abs())).all()):
        raise NoMixture("its means are not one set of basis functions times weights")
    num_components = len(point.kernels.probs)
    if loc.shape[0] != num_components:
        raise NoMixture("the mean is the same in all components")
    return order.reshape(num_components, -1, num_basis)


def _basis(joint: LogJoint, index: Tensor, at_origin: _Point) -> tuple[Tensor | None, Tensor]:
    """Basis functions ``(N, B)``, None for the constant 1, and the mean without weights ``(N or 1, m)``."""
    zero, origin = at_origin.u.detach(), at_origin.kernels.loc.detach()
    if not bool((origin - origin[:1]).abs().max() <= _tolerance(joint) * (1.0 + origin.abs().max())):
        raise NoMixture("its components have different fixed parts of the mean")
    columns = []
    for b in range(index.shape[-1]):
        unit = zero.index_fill(0, index[:, :, b].flatten(), 1.0)
        columns.append((_Point.drawn(joint, None, unit).kernels.loc.detach() - origin)[0, :, 0])
    G = torch.stack(columns, -1).double()
    if G.shape == (1, 1) and bool((G - 1.0).abs().max() <= _tolerance(joint)):
        return None, origin[0]
    return G.expand(len(at_origin.kernels.value), -1).contiguous(), origin[0]


def _prior(joint: LogJoint, points: list[_Point], index: Tensor) -> tuple[Tensor, Scaling]:
    """Prior means of the weights and how their precisions scale."""
    found = [predictors.gaussian_prior(joint, p.trace) for p in points]
    if not bool(found[0][2].all()):
        raise NoMixture("its weights are not Normal")
    if predictors.depends(found[0][0], points[0].theta) or any(
        predictors.depends(x, points[0].u) for x in found[0][:2]
    ):
        raise NoMixture("the prior mean of its weights is learned, or depends on other latent sites")
    logs = [f[1].log()[index] for f in found]
    return found[0][0].detach()[index], _scaling(logs, points, _tolerance(joint))


def _noise(joint: LogJoint, points: list[_Point]) -> tuple[Scaling, str | None]:
    """How the reciprocal noise variances scale, and the name of the param that holds correlations."""
    scales = [p.kernels.scale for p in points]
    if any(s.shape[1] > 1 and bool((s != s[:, :1]).any()) for s in scales):
        raise NoMixture("its noise depends on the datum")
    if any(predictors.depends(s, points[0].u) for s in scales[:1]):
        raise NoMixture("its noise depends on a latent site")
    scales = [s[:, 0] for s in scales]
    shape = (len(points[0].kernels.probs), points[0].kernels.value.shape[-1])
    full = scales[0].dim() == 3
    deviations = [s.norm(dim=-1) if full else s for s in scales]
    correlation = _holder(joint, points[0], scales[0] / deviations[0].unsqueeze(-1)) if full else None
    return _scaling([-2.0 * s.expand(shape).log() for s in deviations], points, _tolerance(joint)), correlation


def _holder(joint: LogJoint, point: _Point, value: Tensor) -> str:
    values = joint.hypers.constrained(point.theta.to(joint.dtype))
    names = [n for n, v in values.items() if v.shape == value.shape and bool(torch.isclose(v, value).all())]
    if not names:
        raise NoMixture("the correlations of its noise are not one param of lower Cholesky factors (K, m, m)")
    return names[0]


def _scaling(log_precision: list[Tensor], points: list[_Point], tolerance: float) -> Scaling:
    """Which hyperparameter scales each precision, verified at both points."""
    slopes = [jacobian(x.reshape(-1).double(), p.theta) for x, p in zip(log_precision, points, strict=True)]
    if not bool(((slopes[0] - slopes[1]).abs() <= tolerance).all()):
        raise NoMixture("a precision is not one hyperparameter times a constant")
    used = slopes[0].abs() > tolerance
    if bool((used.sum(-1) > 1).any()):
        raise NoMixture("a precision depends on several hyperparameters")
    shape = log_precision[0].shape
    if not slopes[0].shape[1]:
        return Scaling(torch.full(shape, -1), torch.zeros(shape).double(), log_precision[0].detach().double())
    power, which = slopes[0].abs().max(-1)
    power = slopes[0].gather(-1, which.unsqueeze(-1)).squeeze(-1)
    half = (2.0 * power).round() / 2.0  # precisions, scales and variances of a group, without rounding errors
    power = torch.where((power - half).abs() <= tolerance, half, power)
    offset = log_precision[0].detach().reshape(-1).double() - power * points[0].theta.detach()[which]
    index = torch.where(used.any(-1), which, -1)
    return Scaling(index.reshape(shape), power.reshape(shape), offset.reshape(shape))


def _mixing(joint: LogJoint, point: _Point, scalings: list[Scaling], correlation: str | None) -> str | None:
    """The param that holds the mixing; all other params must be accounted for."""
    values = joint.hypers.constrained(point.theta.to(joint.dtype))
    probs = point.kernels.probs
    learned = [n for n in values if n in joint.param_constraints and values[n].shape == probs.shape]
    holders = [n for n in learned if bool(torch.isclose(values[n], probs).all())]
    simplex = type(constraints.simplex)
    name = next((n for n in holders if isinstance(joint.param_constraints[n], simplex)), None)
    if predictors.depends(probs, point.theta) and name is None:
        raise NoMixture("its mixing is learned but is not itself one param on the simplex")
    known = {n for n in (name, correlation) if n is not None}
    scaled = {int(i) for s in scalings for i in s.index.unique().tolist() if i >= 0}
    for part in joint.hypers:
        where = joint.hypers.slices[part.name]
        if part.name not in known and not set(range(where.start, where.stop)) <= scaled:
            raise NoMixture(f"hyperparameter '{part.name}' is neither a precision of weights or noise nor the mixing")
    if joint.maximised_sites:
        raise NoMixture(f"latent sites {list(joint.maximised_sites)} are to be maximised")
    return name


def _start(kernels: Kernels, alpha: Scaling, theta: Tensor, loc: Tensor) -> Mixture:
    precision = _read(theta.detach(), alpha)
    scale = kernels.scale[:, 0].detach().double()
    if scale.dim() == 3:
        noise = torch.cholesky_inverse(scale.expand(len(kernels.probs), -1, -1))
    else:
        noise = scale.expand(len(kernels.probs), loc.shape[1]).pow(-2)
    log_mixing = kernels.probs.detach().double().log()
    return Mixture(loc.unsqueeze(0), noise.unsqueeze(0), log_mixing.unsqueeze(0), precision.unsqueeze(0), loc)


def _verify(structure: MixtureStructure, point: _Point) -> None:
    """The means that the arrays give are the model's, at a point that was not used to find them."""
    w = point.u.detach()[structure.index]
    G = torch.ones(1, 1).to(w) if structure.G is None else structure.G
    expected = torch.einsum("kib,nb->kni", w, G) + (point.kernels.value - structure.Y)
    actual = point.kernels.loc.detach().double()
    wrong = (actual - expected).abs() > 10.0 * _tolerance(structure.joint) * (
        1.0 + expected.abs()
    )  # False where a value is missing
    if bool(wrong.any()):
        raise NoMixture("its means are not linear in the weights")
