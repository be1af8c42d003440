"""A log joint recognised as a mixture of linear-Gaussian kernels, by derivatives at random points, never by names.

Enumerated and ``MixtureSameFamily`` forms come out alike: arrays for ``mixture.expectation``, and the way back to the
model's own weights and params.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal, constraints

from pyro_evidence.data.chunks import Chunks, first_rows, num_rows
from pyro_evidence.data.ranks import COMMUNICATOR
from pyro_evidence.data.rows import Rows
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.mixture.data import Mixture, MixtureData, Units, mixture_data
from pyro_evidence.mixture.updates import SharedParameters
from pyro_evidence.models.mixture import Responses
from pyro_evidence.numerics.coordinates import Coordinates, is_identity
from pyro_evidence.numerics.derivatives import jacobian, sole_slopes
from pyro_evidence.program import predictors
from pyro_evidence.program.checks import as_tensors, check_sizes, column_names
from pyro_evidence.program.distributions import Background, WithBackground, WithGaps
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.sites import Trace


class NotRecognised(ValueError):
    """Not the mixture that is looked for, and why."""


@dataclass(frozen=True, eq=False)
class Kernels:
    """Observed site of one trace, by component; the data axis has size 1 where it does not matter."""

    loc: Tensor  # (K, N or 1, m)
    scale: Tensor  # (K, N or 1, m); or (K, N or 1, m, m), lower Cholesky factors
    probs: Tensor  # (K,)
    value: Tensor  # (N, m) nan where an element is missing
    weight: Tensor  # (N,)
    is_observed: bool = True  # whether the value was given
    background: Background | None = None  # a uniform density beside the components


def observed_parts(node: Any) -> tuple[Any, Tensor, Background | None]:
    """Parts of an observed site, its value with nan where an element is missing, and a background beside."""
    fn, value = node["fn"], node["value"]
    background = fn.background if isinstance(fn, WithBackground) else None
    fn = fn if background is None else fn.base_dist
    if isinstance(fn, WithGaps):
        fn, value = fn.base_dist, torch.where(fn.seen, value, torch.nan) if node["is_observed"] else value
    return predictors.unwrapped(fn), value, background


def kernels(joint: LogJoint, trace: Trace) -> Kernels:
    """The kernels of one trace.

    :raises NotRecognised: when the observed site is not a mixture of Gaussians.
    """
    if len(joint.observed) != 1 or len(joint.discrete) > 1:
        raise NotRecognised(f"it has {len(joint.observed)} observed and {len(joint.discrete)} discrete sites")
    node = trace.nodes[joint.observed[0]]
    parts, value, background = observed_parts(node)
    base: Any = parts.base
    if not isinstance(parts.base, Normal | MultivariateNormal):
        raise NotRecognised(f"site '{joint.observed[0]}' is {type(base).__name__}")
    full = isinstance(base, MultivariateNormal)
    if full and bool(value.isnan().any()):
        raise NotRecognised("elements of its data are missing and its noise is correlated")
    if node["mask"] is not None:
        raise NotRecognised("its data are masked")
    if not node["is_observed"]:  # zeros of the data's shape: the trace holds draws for every component
        value = value.new_zeros(node["fn"].batch_shape[-1:] + node["fn"].event_shape)
    event = 1 if full else parts.inner
    if value.dim() - event != 1 or event > 1:
        raise NotRecognised(f"data of shape {tuple(value.shape)} are not in one plate, one datum a number or a vector")
    value = value if event else value.unsqueeze(-1)
    if joint.discrete:
        choice = trace.nodes[joint.discrete[0]]
        if len(choice["cond_indep_stack"]) != 1:
            raise NotRecognised(f"site '{joint.discrete[0]}' is not in one plate")
        position, probs = choice["infer"]["_enumerate_dim"], choice["fn"].probs
    elif parts.mixing is not None:
        position, probs = -1, parts.mixing.probs
    else:
        raise NotRecognised("it has no components")
    probs = probs.reshape(-1, probs.shape[-1])
    if not bool((probs == probs[:1]).all()):
        raise NotRecognised("its mixing depends on the datum")
    loc, scale = base.loc, base.scale_tril if full else base.scale
    if not event:
        loc, scale = loc.unsqueeze(-1), scale.unsqueeze(-1)
    loc, scale = laid_out(loc, position, 1), laid_out(scale, position, 1 + full)
    weight = torch.as_tensor(node["scale"]).to(value).expand(len(value))
    if joint.discrete and bool((weight != 1).any()):
        raise NotRecognised(
            "poutine.scale around an enumerated site is not a weight of the data; write it as MixtureSameFamily"
        )
    return Kernels(loc, scale, probs[0], value.detach(), weight, bool(node["is_observed"]), background)


def laid_out(x: Tensor, position: int, event: int) -> Tensor:
    """``x`` as ``(K, N or 1) + event``.

    :param position: dim of the components among those in front of one datum's.
    :param event: number of dims of one datum.
    """
    x = x[(None,) * max(0, 2 + event - x.dim())].movedim(position - event, 0)
    x = x.reshape(x.shape[0], -1, *x.shape[x.dim() - event :]) if x.dim() > 2 + event else x
    if x.shape[1] == 1 or x.stride(1) != 0:
        return x
    base = x._base  # what is the same for all data once: derivatives never see the repetitions
    if base is None or base.numel() >= x.numel():
        return x[:, :1]
    return base.as_strided((len(x), 1, *x.shape[2:]), x.stride(), x.storage_offset())


FEW = 64  # rows on which a model of ours is recognised, or one whose data come in chunks


def joint_of_rows(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LogJoint | None:
    """The log joint of a model of ours on all its data; None for other models, few rows, and gaps in mixtures."""
    if not hasattr(model, "settled"):
        return None
    try:
        given, named = as_tensors(args, kwargs)
        check_sizes(given, named)
        rows = model.rows(*given, **named)
        step = len(rows.Y) // FEW
        if step < 2:
            return None
        thin = LogJoint(model.settled(Rows.resident(rows, len(rows.Y))), model.few(step, *given, **named))
        thin.columns = column_names(args, kwargs)
        return thin.on(given, named, times=step)
    except Exception:  # whatever it is, running the model on its data says it best
        return None


def rows_of_chunks(model: Any, chunks: Chunks) -> tuple[Rows[Responses], LogJoint]:
    """The rows of a model of ours, in double precision, and its density on a few of them.

    :raises BadInput: for chunks that can be gone through only once, hold no rows, or cannot be used.
    """
    communicator = COMMUNICATOR.get()

    def read(number: int, args: tuple[Any, ...]) -> Responses:
        return model.rows(*args).in_double

    def check(number: int, args: tuple[Any, ...]) -> None:
        check_sizes(args, {})
        try:
            model.rows(*args)
        except TypeError as error:
            raise BadInput(f"it has {len(args)} arguments ({error}); expected those of the model.") from error

    rows = Rows.of_chunks(model, chunks, read, check=check, communicator=communicator)
    settled, first = model.settled(rows), first_rows(chunks, communicator)
    joint = LogJoint(settled, settled.few(max(1, num_rows(first) // FEW), *first))
    joint.has_data = False
    return rows, joint


@dataclass(frozen=True, eq=False)
class Scaling:
    """A group of precisions: log precision is ``power * theta + offset``; index -1 where nothing is learned."""

    index: Tensor  # (...) coordinate of theta
    power: Tensor  # (...)
    offset: Tensor  # (...)

    @property
    def free(self) -> Tensor:
        """Which of the precisions are learned, shape ``(...)`` bool."""
        return self.index >= 0

    @property
    def group(self) -> Tensor:
        """Number of the group of each precision, shape ``(...)``; what is fixed comes last, grouped by its values."""
        owner = torch.where(self.free, self.index, self.index.max() + 1)
        parts = torch.stack([owner.to(self.offset), torch.where(self.free, 0.0, self.offset)], -1).flatten(0, -2)
        return parts.unique(dim=0, return_inverse=True)[1].reshape(owner.shape)

    def write(self, theta: Tensor, log_precision: Tensor, on: Tensor) -> None:
        """Put the hyperparameters that give these precisions, where ``on`` ``(...)``, into ``theta``."""
        chosen = self.free & on
        theta[self.index[chosen]] = ((log_precision - self.offset)[chosen]) / self.power[chosen]

    def read(self, theta: Tensor) -> Tensor:
        """The precisions that ``theta`` gives, shape ``(...)``."""
        padded = torch.cat([theta, theta.new_zeros(1)])  # index -1 reads the zero
        return (self.power * padded[self.index] + self.offset).exp()

    def totals(self, hypers: Coordinates, each: Tensor) -> dict[str, Tensor]:
        """Sums of ``each`` ``(...)`` over what a hyperparameter scales, by its name and in its shape."""
        total = each.new_zeros(hypers.size).index_add_(0, self.index[self.free], each[self.free])
        used = set(self.index.unique().tolist())
        places = {p.name: (hypers.slices[p.name], p.unconstrained_shape) for p in hypers}
        return {n: total[s].reshape(shape) for n, (s, shape) in places.items() if set(range(s.start, s.stop)) & used}


@dataclass(frozen=True, eq=False)
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

    def on(self, joint: LogJoint, rows: Any) -> "MixtureStructure":
        """The same mixture on other rows of a model of ours, whose means have no fixed part."""
        return replace(self, joint=joint, Y=rows.Y, G=rows.G, weight=rows.weight, offset=self.offset[:1])

    @property
    def num_components(self) -> int:
        """``K``."""
        return len(self.loc)

    @property
    def ties(self) -> SharedParameters:
        """Which hyperparameters are shared, and which are learned."""
        parts = [(x.group, x.offset.exp()) for x in (self.alpha, self.beta)]
        return SharedParameters(*parts[0], *parts[1], self.alpha.free, self.beta.free, self.mixing is not None)

    def data(self, units: Units, background: Background | None, *, products: bool) -> MixtureData:
        """The data in standard units, with their features, and a background beside.

        :param products: as for :func:`~pyro_evidence.mixture.data.mixture_data`.
        """
        found = mixture_data((self.Y - units.origin).div_(units.unit), self.G, weight=self.weight, products=products)
        if background is None:
            return found
        Y = self.Y + self.offset  # in the units of the background's box, nan where missing
        floor = background.log_prob(Y) - background.log_rest + (~Y.isnan()).to(Y) @ units.unit.log()
        return replace(found, floor=floor, log_share=float(background.log_rest))

    def theta(self, mixture: Mixture) -> Tensor:
        """Unconstrained hyperparameters of the first row; those of pruned components stay where the model has them."""
        theta, on = self.joint.initial_theta.clone(), mixture.active[0].unsqueeze(-1)
        self.alpha.write(theta, mixture.alpha[0].log(), on.unsqueeze(-1))
        self.beta.write(theta, -_covariance(mixture).diagonal(dim1=-2, dim2=-1).log(), on)
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
        alpha = torch.where(off[..., None, None], self.alpha.read(theta), mixture.alpha)
        beta = self.beta.read(theta)
        if mixture.has_full_noise:
            return replace(mixture, alpha=alpha)
        return replace(mixture, alpha=alpha, noise=torch.where(off.unsqueeze(-1), beta, mixture.noise))

    def flat(self, w: Tensor) -> Tensor:
        """Weights ``(K, m, B)`` as the flat latent vector."""
        return torch.zeros(self.joint.latents.size, dtype=torch.float64, device=w.device).index_copy(
            0, self.index.flatten(), w.flatten()
        )


def held_at(joint: LogJoint, params: Mapping[str, Tensor]) -> LogJoint:
    """The log joint with its hyperparameters held at ``params``."""
    held = copy.copy(joint)
    held.held, held.hypers, held.initial_theta = dict(params), Coordinates({}), joint.initial_theta[:0]
    return held


def _covariance(mixture: Mixture) -> Tensor:
    """Noise covariances of the first row, shape ``(K, m, m)``."""
    if mixture.has_full_noise:
        return torch.linalg.inv(mixture.noise[0])
    return mixture.noise[0].reciprocal().diag_embed()


def recognise_mixture(joint: LogJoint) -> MixtureStructure:
    """The mixture that ``joint`` is.

    :raises UnsupportedModel: with the reason why it is none.
    """
    try:
        points = [ModelRun.drawn(joint, kernels, seed) for seed in (1, 2)]
        index, origin, seen = _weight_index(joint, points[0]), ModelRun.drawn(joint, kernels, None), points[0].seen
        G, offset = _basis(joint, index, origin)
        loc, alpha = _prior(joint, points, index)
        beta, correlation = _noise(joint, points)
        mixing = held_mixing(joint, points, [p.seen.probs for p in points])
        require_known(joint, [alpha, beta], {mixing, correlation})
        shape, scale = loc.shape[:2], origin.seen.scale[:, 0].detach().double()
        full = scale.dim() > 2
        noise = torch.cholesky_inverse(scale.expand(len(loc), -1, -1)) if full else scale.expand(shape).pow(-2)
        log_mixing, precision = origin.seen.probs.detach().double().log(), alpha.read(joint.initial_theta.detach())
        w, noise, log_mixing, precision = (x.unsqueeze(0) for x in (loc, noise, log_mixing, precision))
        start = Mixture(w, noise, log_mixing, precision, loc)
        Y = (seen.value - offset).double()
        structure = MixtureStructure(
            joint, index, Y, G, seen.weight.double(), loc, alpha, beta, correlation, mixing,
            start, offset.double(), None if seen.background is None else seen.background.double(),
        )  # fmt: skip
        _verify(structure, points[1])
        return structure
    except NotRecognised as reason:
        raise UnsupportedModel(
            f"the model is not a mixture of linear-Gaussian kernels: {reason}. Expected one local discrete site "
            f"(or a MixtureSameFamily) in one plate, and Normal or MultivariateNormal data, linear in Normal weights."
        ) from None


Structure = TypeVar("Structure", bound=Any)  # of a family of mixtures


def recognised(joint: LogJoint, recognise: Callable[[LogJoint], Structure]) -> Structure:
    """The mixture that ``joint`` is, from a few rows where that is enough.

    :param recognise: what knows the family by all rows.
    :raises UnsupportedModel: with the reason why it is none.
    """
    model: Any = joint.model
    if joint.seen is None:
        return recognise(joint)
    thin = copy.copy(joint)
    thin.args, thin.kwargs = model.few(joint.seen, *joint.args, **joint.kwargs), {}
    structure, rows = recognise(thin), model.rows(*joint.args, **joint.kwargs).in_double
    if rows.G is not None and not torch.equal(rows.G[:: joint.seen], structure.G):
        return recognise(joint)  # a basis that looks at all rows
    return structure.on(joint, rows)


def with_components(model: Any, num_components: int | None) -> Any:
    """The model with so many components, where it can be had so; else as it is."""
    grown = getattr(model, "with_components", lambda num: None)(num_components) if num_components else None
    return model if grown is None else grown


def most_components(model: Any, num_components: int, num_rows: int, *, alike: bool) -> int:
    """Most components that splits may reach: the number of data, or that of a model which cannot have more.

    :param alike: whether one component is as good as another; no more are tried beside a single one.
    """
    free = alike and num_components > 1
    return num_rows if free and with_components(model, num_components + 1) is not model else num_components


def enlarged(structure: Structure, num_components: int, recognise: Callable[[LogJoint], Structure]) -> Structure:
    """The same model with at least so many components."""
    if num_components <= structure.num_components:
        return structure
    old = structure.joint
    model = with_components(old.model, num_components)
    if old.seen is None:
        joint = LogJoint(model, old.args, old.kwargs)
        joint.has_data = old.has_data
        found = recognise(joint)
        return found if old.has_data else found.on(joint, structure)
    few = model.few(old.seen, *old.args, **old.kwargs)
    return recognised(LogJoint(model, few).on(old.args, old.kwargs, times=old.seen), recognise)


Seen = TypeVar("Seen")


@dataclass(frozen=True, eq=False)
class ModelRun(Generic[Seen]):
    """One run of a model, and what the observed site says there."""

    joint: LogJoint
    u: Tensor
    theta: Tensor
    trace: Trace
    seen: Seen

    @property
    def tolerance(self) -> float:
        """Relative difference up to which numbers count as equal: half of the digits of the model's numbers."""
        return float(torch.finfo(self.joint.dtype).eps ** 0.5)

    @cached_property
    def params(self) -> dict[str, Tensor]:
        """The params at this point, held ones among them."""
        return self.joint.split_hypers(self.theta.detach())[0]

    @staticmethod
    def drawn(
        joint: LogJoint, read: Callable[[LogJoint, Trace], Seen], seed: int | None, u: Tensor | None = None
    ) -> "ModelRun[Seen]":
        """Random latents and hyperparameters near the start; ``None``: the start itself, at latents of zero.

        Hyperparameters on the whole line move in proportion to what they are, so that they are seen moving.
        """
        generator, scale = torch.Generator().manual_seed(seed or 0), float(seed is not None)
        sizes = (joint.latents.size, joint.hypers.size)
        noise = [scale * torch.randn(n, generator=generator, dtype=torch.float64).to(joint.device) for n in sizes]
        width = torch.ones_like(joint.initial_theta)
        for part in joint.hypers:
            if is_identity(part.transform):
                place = joint.hypers.slices[part.name]
                width[place] = joint.initial_theta[place].abs().clamp(min=1.0)  # about zero by 1, in data's units
        theta = joint.initial_theta + 0.1 * width * noise[1]  # a tenth: no precision leaves its range
        theta.requires_grad_()
        u = (noise[0] if u is None else u).requires_grad_()
        trace = joint.trace(u, theta)
        return ModelRun(joint, u, theta, trace, read(joint, trace))


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether ``a`` is ``b``, up to ``tolerance`` of each element and of 1."""
    return torch.allclose(a.detach().double(), b.detach().double(), tolerance, tolerance)


def scaling(precisions: Sequence[Tensor], points: Sequence[ModelRun[Any]], what: str) -> Scaling:
    """Which hyperparameter scales each precision, and to which power: the same at both points.

    :param precisions: at each point.
    :param what: they are, for the message.
    :raises NotRecognised: where a precision is something else.
    """
    tolerance, theta, found = points[0].tolerance, points[0].theta.detach(), []
    for precision, point in zip(precisions, points, strict=True):
        power, owner, sole = sole_slopes(precision.log().reshape(-1), point.theta, tolerance)
        if not bool(sole.all()):
            raise NotRecognised(f"the {what} depends on several hyperparameters")
        found.append((power, owner))
    (power, owner), (again, same) = found
    if not close(power, again, tolerance) or not torch.equal(owner, same):
        raise NotRecognised(f"the {what} is not one hyperparameter, to some power, times a constant")
    log_precision = precisions[0].detach().double().log()
    offset = log_precision.reshape(-1) - power * torch.cat([theta, theta.new_zeros(1)])[owner]
    return Scaling(*(x.reshape(log_precision.shape) for x in (owner, power, offset)))


def holder(values: Sequence[Tensor], points: Sequence[ModelRun[Any]], what: str) -> str | None:
    """The param that holds these values, at each point; None where they are fixed.

    :param what: they are, for the message.
    :raises NotRecognised: when they move but are no param.
    """
    if close(values[0], values[1], points[0].tolerance):
        return None
    for name in points[0].joint.param_constraints:
        if _holds(name, values, points):
            return name
    raise NotRecognised(f"{what} are neither fixed nor one param")


def _holds(name: str, values: Sequence[Tensor], points: Sequence[ModelRun[Any]]) -> bool:
    pairs = [(p.params[name], v, p.tolerance) for p, v in zip(points, values, strict=True)]
    return all(x.numel() == v.numel() and close(x.reshape(v.shape), v, tolerance) for x, v, tolerance in pairs)


def held_mixing(joint: LogJoint, points: Sequence[ModelRun[Any]], probs: Sequence[Tensor]) -> str | None:
    """The param on the simplex that holds the mixing; None where it is fixed.

    :raises NotRecognised: when it is learned in another way.
    """
    shares = [n for n, kind in joint.param_constraints.items() if isinstance(kind, type(constraints.simplex))]
    name = next((n for n in shares if n in joint.hypers.names and _holds(n, probs, points)), None)
    if name is None and not close(probs[0], probs[1], points[0].tolerance):
        raise NotRecognised("its mixing is learned but is not itself one param on the simplex")
    return name


def require_known(joint: LogJoint, scalings: Sequence[Scaling], holders: set[str | None]) -> None:
    """Refuse hyperparameters that are not accounted for.

    :raises NotRecognised: naming the first.
    """
    scaled = {int(i) for s in scalings for i in s.index.unique().tolist()}
    for name, place in joint.hypers.slices.items():
        if name not in holders and not set(range(place.start, place.stop)) <= scaled:
            raise NotRecognised(
                f"hyperparameter '{name}' is neither a precision of weights or noise nor the mixing, nor holds means "
                f"or correlations"
            )
    if joint.maximised_sites:
        raise NotRecognised(f"latent sites {list(joint.maximised_sites)} are to be maximised")


def _weight_index(joint: LogJoint, point: ModelRun[Kernels]) -> Tensor:
    """The flat coordinates behind each component and output, in order of the basis functions, ``(K, m, B)``."""
    loc = point.seen.loc
    generator = torch.Generator().manual_seed(3)
    blend = torch.rand(loc.shape[1], generator=generator, dtype=torch.float64).to(loc) + 0.5
    slope = jacobian(torch.einsum("knm,n->km", loc, blend).reshape(-1), point.u)
    used = slope != 0
    num_basis = int(used[0].sum())
    if num_basis == 0 or not bool((used.sum(-1) == num_basis).all()):
        raise NotRecognised("components or outputs have different numbers of weights")
    values, order = torch.where(used, slope, torch.inf).sort(-1)
    values, order = values[:, :num_basis], order[:, :num_basis]
    if len(order.unique()) != joint.latents.size or order.numel() != joint.latents.size:
        raise NotRecognised("weights are shared between components or outputs, or other latent sites are integrated")
    if not bool(((values - values[:1]).abs() <= point.tolerance * (1.0 + values[:1].abs())).all()):
        raise NotRecognised("its means are not one set of basis functions times weights")
    num_components = len(point.seen.probs)
    if loc.shape[0] != num_components:
        raise NotRecognised("the mean is the same in all components")
    return order.reshape(num_components, -1, num_basis)


def _basis(joint: LogJoint, index: Tensor, at_origin: ModelRun[Kernels]) -> tuple[Tensor | None, Tensor]:
    """Basis functions ``(N, B)``, None for the constant 1, and the mean without weights ``(N or 1, m)``."""
    zero, origin = at_origin.u.detach(), at_origin.seen.loc.detach()
    if not bool((origin - origin[:1]).abs().max() <= at_origin.tolerance * (1.0 + origin.abs().max())):
        raise NotRecognised("its components have different fixed parts of the mean")
    columns = []
    for b in range(index.shape[-1]):
        unit = zero.index_fill(0, index[:, :, b].flatten(), 1.0)
        columns.append((ModelRun.drawn(joint, kernels, None, unit).seen.loc.detach() - origin)[0, :, 0])
    G = torch.stack(columns, -1).double()
    if G.shape == (1, 1) and bool((G - 1.0).abs().max() <= at_origin.tolerance):
        return None, origin[0]
    return G.expand(len(at_origin.seen.value), -1).contiguous(), origin[0]


def _prior(joint: LogJoint, points: list[ModelRun[Kernels]], index: Tensor) -> tuple[Tensor, Scaling]:
    """Prior means of the weights and how their precisions scale."""
    found = [predictors.gaussian_prior(joint, p.trace) for p in points]
    if not bool(found[0][2].all()):
        raise NotRecognised("its weights are not Normal")
    pairs = (found[0][0], points[0].theta), (found[0][0], points[0].u), (found[0][1], points[0].u)
    if any(predictors.depends(x, on) for x, on in pairs):
        raise NotRecognised("the prior mean of its weights is learned, or depends on other latent sites")
    return found[0][0].detach()[index], scaling([f[1][index] for f in found], points, "prior precision of its weights")


def _noise(joint: LogJoint, points: list[ModelRun[Kernels]]) -> tuple[Scaling, str | None]:
    """Scaling of the reciprocal noise variances, and the name of the param that holds correlations."""
    scales = [p.seen.scale for p in points]
    if any(s.shape[1] > 1 and bool((s != s[:, :1]).any()) for s in scales):
        raise NotRecognised("its noise depends on the datum")
    if any(predictors.depends(s, points[0].u) for s in scales[:1]):
        raise NotRecognised("its noise depends on a latent site")
    scales = [s[:, 0] for s in scales]
    shape = (len(points[0].seen.probs), points[0].seen.value.shape[-1])
    full = scales[0].dim() > 2
    deviations = [s.norm(dim=-1) if full else s for s in scales]
    correlation = None
    if full:
        shapes = [s / d.unsqueeze(-1) for s, d in zip(scales, deviations, strict=True)]
        correlation = holder(shapes, points, "the correlations of its noise")
        if correlation is None and joint.hypers.size:
            raise NotRecognised("the correlations of its noise are not one param of lower Cholesky factors (K, m, m)")
    precisions = [d.expand(shape).double().pow(-2) for d in deviations]
    return scaling(precisions, points, "precision of its noise"), correlation


def _verify(structure: MixtureStructure, point: ModelRun[Kernels]) -> None:
    """The means that the arrays give are the model's, at a point that was not used to find them."""
    w = point.u.detach()[structure.index]
    G = torch.ones(1, 1).to(w) if structure.G is None else structure.G
    expected = torch.einsum("kib,nb->kni", w, G) + (point.seen.value - structure.Y)
    actual = point.seen.loc.detach().double()
    wrong = (actual - expected).abs() > point.tolerance * (1.0 + expected.abs())  # False where a value is missing
    if bool(wrong.any()):
        raise NotRecognised("its means are not linear in the weights")
