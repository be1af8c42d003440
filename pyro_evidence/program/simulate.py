"""Running a model forwards: draws from the prior, new data for given latents, densities of many rows."""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.uncondition_messenger import UnconditionMessenger
from torch import Tensor
from torch.distributions import Dirichlet, MultivariateNormal, Normal
from torch.linalg import LinAlgError  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode

from pyro_evidence.fitting.process_state import (
    own_random_numbers,
    own_warnings,
    without_validation,
    without_validation_or_params,
)
from pyro_evidence.numerics.batched import HELD_NUMBERS
from pyro_evidence.numerics.coordinates import Coordinates
from pyro_evidence.numerics.linalg import PER_NUMBER, expect
from pyro_evidence.program.checks import tensors
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.program.sites import Values, innermost, is_observation, sample_nodes

NOT_IN_ROWS: tuple[type[Any], ...] = (dist.VonMises, dist.Stable)  # samplers that loop, or look at what they drew
ROWS = 512  # evaluated at a time: keeps a (rows, N) table of predictors in the cache
MOST_DRAWS, FEWEST_DRAWS = 4_000, 100  # of a check
AFFORDABLE = 100_000_000  # latents and data, of all draws of a check


class Unobserved(UnconditionMessenger):
    """Has a model draw its data; what it computes as ``pyro.deterministic`` is no datum, and stays what it is."""

    def _pyro_sample(self, msg: Any) -> None:
        if is_observation(msg):
            super()._pyro_sample(msg)


def unobserved(joint: LogJoint, theta: Tensor) -> Model:
    """The model at these hyperparameters with every observed site drawn instead of read."""
    params, sites = joint.split_hypers(theta.detach())
    model = Unobserved()(poutine.substitute(joint.model, data=params) if params else joint.model)
    return poutine.condition(model, data=sites) if sites else model


def shapes_on(joint: LogJoint, args: tuple[Any, ...]) -> dict[str, list[int]]:
    """The shapes of the integrated sites where the model is run on other arguments, once."""
    with own_random_numbers(), without_validation_or_params(), torch.no_grad():
        trace = poutine.trace(joint.substituted(joint.initial_theta)).get_trace(*args)
    nodes: Any = trace.nodes
    return {n: list(nodes[n]["value"].shape) for n in joint.latents.names if n in nodes}


def prior_alone(joint: LogJoint, names: Sequence[str]) -> LogJoint:
    """The prior density of some latent sites alone, the others held where the search begins; no data in it."""
    found, held = copy.copy(joint), joint.latents.constrained(joint.initial_u.to(joint.dtype))
    found.latents = Coordinates({p.name: (p.transform, p.shape) for p in joint.latents if p.name in names})
    found.left_out = joint.left_out | {n: v for n, v in held.items() if n not in names}
    found.observed, found.discrete = (), ()
    found._counted, found._scored = found.latents.names, frozenset(names)
    found._first = found._drawn(1, seed=0)[0]
    return found


def with_data(joint: LogJoint, theta: Tensor, data: Mapping[str, Tensor]) -> Model:
    """A model that observes these data in place of its own."""
    return poutine.condition(unobserved(joint, theta), data=dict(data))


def latents_from_prior(joint: LogJoint, theta: Tensor, num_samples: int, seed: int, *, apart: bool = True) -> Values:
    """Draws of the integrated sites from the prior, each ``(S,) + site shape``.

    :param apart: whether one by one, where they cannot be drawn together.
    :raises RuntimeError, NotImplementedError, ValueError, Warning: where they can be neither.
    """
    model = joint.substituted(theta)
    drawn = _rows(joint, lambda _: _run(joint, model), torch.zeros(num_samples, 1), seed, apart)
    return {n: drawn[n] for n in joint.latents.names}


def from_prior(joint: LogJoint, theta: Tensor, num_samples: int, seed: int) -> Values:
    """Draws of all latent and observed sites from the prior, each ``(S,) + site shape``.

    :return: at most ``num_samples`` draws: those at which a covariance of the model's has no Cholesky factor, as under
        very vague priors of its settings, are left out; empty where that is so of all.
    """
    model = unobserved(joint, theta)
    try:
        return _rows(joint, lambda _: _run(joint, model), torch.zeros(num_samples, 1), seed)
    except LinAlgError:
        drawn = []
    with own_random_numbers(), torch.no_grad(), without_validation():
        torch.manual_seed(seed)
        for _ in range(num_samples):
            with suppress(LinAlgError):
                drawn.append(_run(joint, model))
    return {n: torch.stack([row[n] for row in drawn]) for n in drawn[0]} if drawn else {}


def from_predictive(joint: LogJoint, theta: Tensor, u: Tensor, seed: int) -> Values:
    """One new data set per row of unconstrained latents ``(S, D)``: observed sites, ``(S,) + site shape``."""
    model = unobserved(joint, theta)

    def draw(v: Tensor) -> Values:
        latents = joint.latents.constrained(v.to(joint.dtype))
        return _run(joint, poutine.condition(model, data=latents))

    drawn = _rows(joint, draw, u, seed)
    return {n: drawn[n] for n in joint.observed if n in drawn}


def pointwise_rows(joint: LogJoint, u: Tensor, theta: Tensor) -> Values:
    """Log likelihood of every datum at rows ``(R, D)``, nats, each ``(R,) + data shape``."""
    return _in_parts(joint, lambda v: joint.pointwise(v, theta), u)


def recorded_rows(joint: LogJoint, u: Tensor) -> Values:
    """Values of the ``pyro.deterministic`` sites outside plates of discrete sites at rows ``(R, D)``."""
    nodes = sample_nodes(joint.trace(joint.initial_u, joint.initial_theta))
    names = [n for n, s in nodes.items() if _is_function(s) and not joint.discrete]
    if not names:
        return {}

    def record(v: Tensor) -> Values:
        nodes = joint.trace(v, joint.initial_theta).nodes
        return {n: nodes[n]["value"] for n in names}

    return _in_parts(joint, record, u)


def mean_rows(joint: LogJoint, u: Tensor, theta: Tensor) -> Values:
    """Mean of every observed site given the latents at rows ``(R, D)``, each ``(R,) + data shape``.

    Sites whose distribution has no mean in closed form, or that depend on a discrete site, are left out.
    """
    if joint.discrete:
        return {}

    def means(v: Tensor) -> Values:
        nodes = joint.trace(v, theta).nodes
        return {n: torch.as_tensor(nodes[n]["fn"].mean).expand(nodes[n]["value"].shape) for n in joint.observed}

    try:
        return {n: v for n, v in _in_parts(joint, means, u).items() if bool(torch.isfinite(v).all())}
    except (NotImplementedError, AttributeError, RuntimeError, ValueError):
        return {}


def responsibility_rows(joint: LogJoint, u: Tensor, theta: Tensor) -> Tensor:
    """``p(z_n = k | x_n, w)`` of the one discrete site at rows ``(R, D)``, ``(R,) + plate_shape + (K,)``."""
    return _in_parts(joint, lambda v: {"": joint.responsibilities(v, theta)}, u)[""]


def node_at(joint: LogJoint, theta: Tensor, site: str) -> Any:
    """A site as the model declares it on the arguments that ``joint`` holds now, discrete sites drawn."""
    model = joint.substituted(theta)
    with own_random_numbers(), without_validation_or_params(), torch.no_grad(), poutine.block():
        return poutine.trace(model).get_trace(*joint.args, **joint.kwargs).nodes[site]


def _run(joint: LogJoint, model: Model) -> Values:
    with without_validation_or_params():
        trace = poutine.trace(model).get_trace(*joint.args, **joint.kwargs)
    return {n: s["value"] for n, s in sample_nodes(trace).items() if s["value"].numel() and not _is_function(s)}


def _is_function(node: Any) -> bool:
    """Whether a site is a ``pyro.deterministic``, which has nothing to draw."""
    return bool(node["is_observed"]) and not is_observation(node)


def _rows(joint: LogJoint, draw: Callable[[Tensor], Values], u: Tensor, seed: int, apart: bool = True) -> Values:
    def draw_apart(row: Tensor) -> Values:
        with SitesDrawnInRows(row):
            return draw(row)

    with own_random_numbers(), torch.no_grad(), without_validation():
        torch.manual_seed(seed)
        return _joined([vectorised(draw_apart, part, apart) for part in u.split(rows_at_once(joint))])


class SitesDrawnInRows(Messenger):
    """Draws a model's sites so that ``torch.vmap`` can: their samplers write into numbers that each row has of its own.

    Torch's samplers fill a new tensor, which vmap refuses where all rows share it, since they would share its numbers;
    and it has no rule for that of a Dirichlet.

    :param row: the row that is being run; only that it is one of many matters.
    """

    def __init__(self, row: Tensor) -> None:
        super().__init__()
        self.zero = torch.zeros_like(row.sum())

    def _pyro_sample(self, msg: Any) -> None:
        known = type(innermost(msg["fn"])).__module__.startswith(("torch.", "pyro."))  # which return what they fill
        if known and msg["value"] is None and not msg["is_observed"]:
            with _FilledInRows(self.zero), _drawn_in_rows(innermost(msg["fn"]), self.zero):
                msg["value"] = msg["fn"](*msg["args"], **msg["kwargs"])


@contextmanager
def _drawn_in_rows(found: Any, zero: Tensor) -> Iterator[None]:
    """Inside, a distribution whose sampler vmap cannot run has another.

    A Dirichlet, the one too that a Beta or an LKJ draws from, gives gammas over their sum; one of :data:`NOT_IN_ROWS`
    draws all rows at once.
    """
    for part in ("_beta", "_dirichlet"):
        found = getattr(found, part, found)

    def gammas_over_sum(sample_shape: Sequence[int] = ()) -> Tensor:
        gammas = torch._standard_gamma(found.concentration.expand((*sample_shape, *found.concentration.shape)))
        return gammas / gammas.sum(-1, keepdim=True)

    def outside(sample_shape: Sequence[int] = ()) -> Any:
        names = list(found.arg_constraints)

        def make(*params: Tensor) -> Any:
            return type(found)(**dict(zip(names, params, strict=True)), validate_args=False)

        params = torch.broadcast_tensors(*(getattr(found, name) for name in names))
        return _DrawnOutside.apply(make, torch.Size(sample_shape), zero, *params)

    of_gammas = isinstance(found, Dirichlet)
    if not (of_gammas or isinstance(found, NOT_IN_ROWS)):
        yield
        return
    found.sample = found.rsample = gammas_over_sum if of_gammas else outside
    try:
        yield
    finally:
        del found.sample, found.rsample


class _DrawnOutside(torch.autograd.Function):
    """Draws of ``make(*params)``, for which vmap hands over all rows; ``zero`` is one of each row."""

    @staticmethod
    def forward(make: Callable[..., Any], shape: torch.Size, zero: Tensor, *params: Tensor) -> Any:
        return make(*params).sample(shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is differentiated."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, make: Any, shape: torch.Size, zero: Tensor, *params: Tensor) -> Any:
        pairs = zip(params, in_dims[3:], strict=True)
        rows = (p.expand(info.batch_size, *p.shape) if d is None else p.movedim(d, 0) for p, d in pairs)
        return _DrawnOutside.apply(make, shape, zero, *rows), len(shape)


class _FilledInRows(TorchFunctionMode):
    """A sampler's new tensor is one of each row."""

    def __init__(self, zero: Tensor) -> None:
        super().__init__()
        self.zero = zero

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "exponential_", "cauchy_"):
            args = (self.zero.to(args[0]).expand(args[0].shape).clone(), *args[1:])
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _in_parts(joint: LogJoint, function: Callable[[Tensor], Values], u: Tensor) -> Values:
    """All rows, a few hundred at once: a table of them all might not fit into memory."""
    return _joined([vectorised(function, part) for part in u.split(min(ROWS, rows_at_once(joint)))])


def affordable_draws(joint: LogJoint, most: int = MOST_DRAWS) -> int:
    """Number of draws at which a check evaluates the density where nobody gave one."""
    numbers = sum(t.numel() for _, t in tensors(joint.args, joint.kwargs)) + joint.latents.size
    return max(FEWEST_DRAWS, min(most, AFFORDABLE // max(1, numbers)))


def rows_at_once(joint: LogJoint) -> int:
    """Number of rows that :data:`HELD_NUMBERS` allow."""
    return max(1, HELD_NUMBERS // largest_row(joint))


def largest_row(joint: LogJoint) -> int:
    """Numbers in the largest tensor of a run of the model, which is announced: it may be worth several threads."""
    numbers = max(1, joint.latents.size, *(t.numel() for _, t in tensors(joint.args, joint.kwargs)))
    expect(PER_NUMBER * numbers)
    return numbers


def _joined(parts: list[Values]) -> Values:
    return parts[0] if len(parts) == 1 else {n: torch.cat([part[n] for part in parts]) for n in parts[0]}


def vectorised(function: Callable[[Any], Values], rows: Any, apart: bool = True) -> Values:
    """All rows at once; one by one where the model's own Python, or a sampler, cannot be vectorised.

    :param rows: a tensor, or a dict of tensors, with rows in front.
    :param apart: whether one by one is better than not at all.
    """
    try:
        with own_warnings("error"):  # a sampler that only warns may return rows that are not independent
            warnings.filterwarnings("ignore", "There is a performance drop")  # of one operation, row by row
            return torch.vmap(function, randomness="different")(rows)
    except (RuntimeError, NotImplementedError, ValueError, Warning):
        if not apart:
            raise
        if isinstance(rows, Tensor):
            each = list(rows)
        else:
            each = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
        found = [function(row) for row in each]
        return {n: torch.stack([row[n] for row in found]) for n in found[0]}


class NewLevels(Messenger):
    """Gives a latent site that was drawn for the fit's plates the sizes that its plates have now.

    Elements beyond the fit's are drawn from the site's own prior, given everything else of the run; where there are
    fewer, the first are taken.  A model of random effects then predicts for groups that it has never seen, and a field
    along a line (a site with a method ``continued``) goes on from its last values.

    :param shapes: of each latent site in the fit.
    :param drawn: whether the elements beyond are drawn, or are their prior's mean.
    :ivar fresh: shape of each site of which a run has drawn elements that can be made of white noise.
    :ivar noise: that noise, standard normal numbers of these shapes; a site without any is drawn.

    >>> import pyro.distributions as dist
    >>> from pyro import condition, plate, sample
    >>> def model(num):
    ...     with plate("groups", num):
    ...         return sample("effect", dist.Normal(0.0, 1.0))
    >>> fitted = condition(NewLevels({"effect": torch.Size([2])})(model), data={"effect": torch.tensor([5.0, 6.0])})
    >>> fitted(4)[:2], fitted(4).shape, fitted(1)
    (tensor([5., 6.]), torch.Size([4]), tensor([5.]))
    """

    def __init__(self, shapes: Mapping[str, torch.Size], *, drawn: bool = True) -> None:
        super().__init__()
        self.shapes: dict[str, torch.Size] = dict(shapes)
        self.drawn = drawn
        self.fresh: dict[str, torch.Size] = {}
        self.noise: Values = {}

    def _pyro_post_sample(self, msg: Any) -> None:
        fitted, value = self.shapes.get(msg["name"]), msg["value"]
        if fitted is None or not isinstance(value, Tensor) or value.numel() != fitted.numel():
            return
        if value.shape[value.dim() - len(fitted) :] != fitted:  # dims of size one in front apart
            return
        fn = msg["fn"]
        wanted = torch.Size(fn.shape())
        plates, field = len(fitted) - fn.event_dim, innermost(fn)
        if hasattr(field, "continued") and wanted[:-1] == fitted[:-1] and wanted[-1] > fitted[-1]:
            name, shape = msg["name"], torch.Size([*wanted[:-1], wanted[-1] - fitted[-1]])
            if not self.drawn:
                white = value.new_zeros(shape)
            else:
                self.fresh[name] = shape
                white = self.noise[name] if name in self.noise else torch.randn(shape).to(value)
            msg["value"] = field.continued(value.reshape(fitted), white)
        elif wanted != fitted and len(wanted) == len(fitted) and wanted[plates:] == fitted[plates:]:
            new = (self._drawn(msg["name"], fn) if self.drawn else fn.mean.expand(wanted)).clone()
            common = tuple(slice(0, min(a, b)) for a, b in zip(fitted, new.shape, strict=True))
            new[common] = value.reshape(fitted)[common]
            msg["value"] = new
        elif wanted == fitted:  # Predictive's, which puts dims of plates in front of what stands outside of them
            msg["value"] = value.reshape(fitted)

    def _drawn(self, name: str, fn: Any) -> Tensor:
        base, white = innermost(fn), self.noise.get(name)
        if isinstance(base, Normal | MultivariateNormal):
            self.fresh[name] = torch.Size(fn.shape())
        if white is None or name not in self.fresh:
            return cast(Tensor, fn.sample())
        if isinstance(base, Normal):
            return cast(Tensor, fn.mean + fn.stddev * white)
        return cast(Tensor, base.loc + (base.scale_tril @ white.unsqueeze(-1)).squeeze(-1))
