"""A Gaussian process's latent function at new inputs: mean, covariance, draws, and averages over it."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Normal

from pyro_evidence import display
from pyro_evidence.display import NUM_GRID, Axes
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.fitting.process_state import generator_of
from pyro_evidence.laplace.approximation import LaplaceState
from pyro_evidence.numerics.derivatives import Last
from pyro_evidence.numerics.linalg import cholesky
from pyro_evidence.numerics.quadrature.rules import nodes_and_weights, quasi_normal
from pyro_evidence.posterior.base import NUM_DRAWS, Posterior, equal_weights, in_pairs, white_noise
from pyro_evidence.posterior.diagnostics import NUM_WEIGHTED
from pyro_evidence.posterior.guide import LaplaceGuide
from pyro_evidence.precision.gaussian_process import LatentPrecision
from pyro_evidence.program.checks import Arguments, new_data, same_arguments
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.predictors import NUM_NODES, hermite, is_like, unwrapped
from pyro_evidence.program.simulate import node_at, rows_at_once
from pyro_evidence.program.sites import Values
from pyro_evidence.settings import check_count
from pyro_evidence.structure.gaussian_process import function_blocks


@dataclass(frozen=True)
class LatentPrediction:
    """The posterior of one latent function at new inputs: Gaussian, ``C`` functions of ``M`` values each.

    :ivar mean: shape ``(M,)``, or ``(C, M)`` for a site with a batch of functions.
    :ivar covariance: of all values of all functions, in that order, shape ``(C M, C M)``.

    >>> import torch
    >>> from pyro_evidence import LaplaceEvidence, predict_latent
    >>> from pyro_evidence.models.gp import gp_regression
    >>> from pyro_evidence.models.kernels import RBF
    >>> X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    >>> t = 2.0 * X[:, 0] + 0.3 * torch.cos(40.0 * X[:, 0])
    >>> posterior = LaplaceEvidence(gp_regression(RBF(), beta=10.0)).run(X, t)
    >>> found = predict_latent(posterior, torch.tensor([[0.5], [9.0]]))
    >>> bool(found.covariance[0, 0] < found.covariance[1, 1])  # the function is known where the data are
    True
    """

    mean: Tensor
    covariance: Tensor

    @property
    def variance(self) -> Tensor:
        """Variances, in the shape of the mean."""
        return self.covariance.diagonal().reshape(self.mean.shape)

    def get_samples(self, num_samples: int = NUM_DRAWS, seed: int | None = None) -> Tensor:
        """Joint draws, ``(S,) + mean shape``.

        :param seed: None takes one from the state of the caller's generator, which stays where it is.
        :raises NotPositiveDefinite: when new inputs coincide and the model has no jitter.
        """
        num_samples = check_count("num_samples", num_samples, at_least=0)
        white = white_noise(num_samples, self.mean.numel(), generator_of(seed))
        tril = cholesky(self.covariance, "the latent function's posterior covariance at these inputs")
        return self.mean + (white.to(tril) @ tril.mT).reshape(num_samples, *self.mean.shape)

    def probability(self, num_samples: int = NUM_WEIGHTED, seed: int = 0) -> Tensor:
        """The averaged probability of class 1, ``E sigmoid(f)``, shape ``(M,)``; of functions ``(C, M)`` all classes'.

        Those are ``E softmax(f)``, shape ``(M, C)``, by Sobol points.  Where functions are of no classes take
        ``expected(torch.sigmoid)``.  Rasmussen and Williams (2006), eq. 3.25; neither is the plug-in.
        """
        if self.mean.dim() == 1:
            return hermite(self.mean, self.variance)
        return next(self.at_each_input(num_samples, seed, num_samples)).softmax(1).mean(0).mT

    def at_each_input(self, num_samples: int, seed: int, at_once: int) -> Iterator[Tensor]:
        """Values of ``C`` functions, ``(S, C, M)``, at most ``at_once`` of them: Sobol points, the same at all inputs.

        Functions go together, inputs do not: what is averaged over them at one input is the same whatever others there
        are.
        """
        C, M = self.mean.shape
        index = torch.arange(C, device=self.mean.device) * M + torch.arange(M, device=self.mean.device).unsqueeze(-1)
        each = self.covariance[index.unsqueeze(-1), index.unsqueeze(-2)]  # (M, C, C)
        tril = cholesky(each, "the classes' posterior covariance at one input")
        white = quasi_normal(num_samples, C, seed).to(tril)
        return (self.mean + torch.einsum("sc,mdc->sdm", part, tril) for part in white.split(at_once))

    def expected(self, function: Callable[[Tensor], Tensor], num_nodes: int = 64) -> Tensor:
        """``E function(f)`` of each value, elementwise, by Gauss-Hermite quadrature, in the shape of the mean."""
        nodes, weights = nodes_and_weights(num_nodes, self.mean)
        return function(self.mean.unsqueeze(-1) + self.variance.sqrt().unsqueeze(-1) * nodes) @ weights


def predict_latent(posterior: Posterior, *args: Any, site: str | None = None, **kwargs: Any) -> LatentPrediction:
    r"""The posterior of a latent Gaussian process at new inputs.

    .. math:: E f_* = m_* + K_{*f}\, \nabla \log p(D | \hat f), \qquad
        \mathrm{cov} f_* = K_{**} - K_{*f} (K + W^{-1})^{-1} K_{f*}

    Rasmussen and Williams (2006), eqs. 3.21 and 3.24; for Gaussian noise 2.25 and 2.26, exact.  The prior covariance
    of old and new values is what the model itself says when it runs on old and new inputs joined: every tensor among
    the arguments is joined to the one that was fitted, along its first dimension.

    :param posterior: of ``LaplaceEvidence`` on a model with a latent Gaussian process.
    :param args: the model's arguments at the new inputs, without targets.
    :param site: the function; by default the only site with a dense Gaussian prior.
    :raises UnsupportedModel: for another kind of model.
    :raises BadInput: for inputs that cannot be joined to the old ones.
    """
    state: Any = getattr(posterior, "state", None)
    if not isinstance(getattr(state, "precision", None), LatentPrecision):
        raise UnsupportedModel(
            "predict_latent needs a model whose latents have a dense Gaussian prior and are seen through linear "
            "predictors, fitted with the exact curvature; this one is not. Use Predictive(posterior.model, "
            "guide=posterior.guide, ...)."
        )
    names = functions_of(state)
    chosen = names if site is None else [n for n in names if n == site]
    if len(chosen) != 1:
        raise BadInput(f"site={site!r}; expected one of the latent functions: {', '.join(names)}.")
    return predicted(state, [new_values(state, chosen[0], (args, kwargs))])


def draw_curve(posterior: Any, axes: Axes | None, prob: float) -> Axes | None:
    """A picture of the one latent function of one input, with the data where their noise is normal; None of others."""
    joint, names = posterior.state.problem.joint, functions_of(posterior.state)
    rows = [value for value in joint.args if isinstance(value, Tensor) and value.dim()]
    if len(names) != 1 or not joint.has_data or not rows or len(rows) > 2 or rows[0][0].numel() != 1:
        return None
    X = rows[0]
    grid = torch.linspace(float(X.min()), float(X.max()), NUM_GRID).to(X).reshape(-1, *X.shape[1:])
    found = predict_latent(posterior, grid)
    if found.mean.dim() > 1:
        return None
    axes = display.axes_or_own(axes)
    node = joint.trace(joint.initial_u, posterior.state.theta).nodes[joint.observed[0]]
    if is_like(unwrapped(node["fn"]).base, Normal, node["value"].shape) and len(node["value"]) == len(X):
        axes.plot(X.flatten().tolist(), node["value"].tolist(), ".", color="grey", label="data")
    sd = found.variance.clamp(min=0.0).sqrt()  # rounding below 0
    reach = float(torch.special.ndtri(torch.tensor(0.5 + 0.5 * prob, dtype=torch.float64))) * sd
    display.curve(
        axes, grid.flatten(), torch.stack([found.mean, found.mean - reach, found.mean + reach], -1), share=prob
    )
    return display.with_labels(axes, "input", names[0])


def functions_of(state: LaplaceState) -> list[str]:
    """The latent sites with a dense Gaussian prior."""
    joint = state.problem.joint
    nodes = joint.trace(state.u, state.theta).nodes
    return [p.name for p in joint.latents if function_blocks(nodes[p.name], 0) is not None]


@dataclass(frozen=True, eq=False)
class NewValues:
    """Prior of the values of one site that are to be predicted, and its covariance with all old latents."""

    shape: tuple[int, ...]
    loc: Tensor  # (M,)
    covariance: Tensor  # (M, M)
    cross: Tensor  # (D, M)


def new_values(state: LaplaceState, site: str, new: Arguments) -> NewValues:
    """The values of a latent function at new inputs, by the prior of old and new values together.

    :raises BadInput: when the function does not grow with the model's inputs.
    """
    joint = copy.copy(state.problem.joint)
    old, args = joint.args, new[0]
    joint.args = tuple(_joined(i, old[i] if i < len(old) else None, a) for i, a in enumerate(args))
    joint.kwargs = {k: _joined(k, joint.kwargs.get(k), v) for k, v in new[1].items()}
    with new_data(joint.args, joint.kwargs):
        blocks = function_blocks(node_at(joint, state.theta, site), 0) or []  # one for each function
    shape = next(p.shape for p in joint.latents if p.name == site)
    size = shape[-1]
    if len(blocks) != shape[:-1].numel() or len(blocks[0].loc) <= size:
        raise BadInput(
            f"the model's '{site}' does not grow with its inputs: it has shape {tuple(shape)} on the old inputs, and "
            f"{len(blocks)} function(s) of {len(blocks[0].loc)} values on old and new ones joined. Expected a "
            "covariance computed from the arguments, not a stored matrix."
        )
    loc = torch.cat([b.loc[size:] for b in blocks])
    cross = torch.zeros(joint.latents.size, len(loc), dtype=loc.dtype, device=loc.device)
    cross[joint.latents.slices[site]] = torch.block_diag(*(b.covariance[:size, size:] for b in blocks))
    K = torch.block_diag(*(b.covariance[size:, size:] for b in blocks))
    return NewValues((*shape[:-1], len(blocks[0].loc) - size), loc, K, cross)


def old_values(state: LaplaceState, site: str) -> NewValues:
    """The values of another latent, which are where they were."""
    assert isinstance(state.precision, LatentPrecision)
    part = next(p for p in state.problem.joint.latents if p.name == site)
    where, K = state.problem.joint.latents.slices[site], state.precision.covariance
    loc = state.u[where] - (K @ state.precision.dual)[where]
    return NewValues(tuple(part.shape), loc, K[where, where], K[:, where])


def predicted(state: LaplaceState, values: list[NewValues]) -> LatentPrediction:
    """The joint posterior of all of them; the mean is flat when they are several."""
    assert isinstance(state.precision, LatentPrecision)
    cross = torch.cat([v.cross for v in values], 1)
    prior = torch.block_diag(*(v.covariance for v in values))
    covariance = prior - state.precision.mode.factor.explained(state.precision.seen.apply(cross))
    mean = torch.cat([v.loc for v in values]) + cross.mT @ state.precision.dual
    return LatentPrediction(mean.reshape(values[0].shape) if len(values) == 1 else mean, covariance)


def _joined(name: int | str, old: Any, new: Any) -> Any:
    """Old rows, then new ones; what is no tensor is taken from the new arguments."""
    if not (isinstance(old, Tensor) and isinstance(new, Tensor) and old.dim() and new.dim()):
        return new
    if old.shape[1:] != new.shape[1:]:
        raise BadInput(
            f"argument {name!r} has shape {tuple(new.shape)}, but was fitted with {tuple(old.shape)}; expected the "
            f"same but for the first dimension, over data."
        )
    return torch.cat([old, new.to(old)])


class ProcessGuide(LaplaceGuide):
    """The posterior of a model with a latent Gaussian process, as a guide that knows the function everywhere.

    Called with the inputs that were fitted it is a :class:`~pyro_evidence.posterior.guide.LaplaceGuide`.  Called with
    others it draws the function there, jointly with all other latents, so that ``Predictive(posterior.model,
    guide=posterior.guide, num_samples=S)(X_new)`` predicts.
    """

    def __init__(self, state: LaplaceState) -> None:
        super().__init__(state)
        self.state = state
        self.functions: list[str] = functions_of(state)
        self._laws: Last[Arguments, tuple[list[tuple[int, ...]], Tensor, Tensor]] = Last()

    def __call__(self, *args: Any, **kwargs: Any) -> Values:
        """One draw of every integrated site."""
        if self._fitted(args, kwargs):
            return super().__call__(*args, **kwargs)
        shapes, mean, tril = self._laws.found((args, kwargs), same_arguments, self._law)
        law = dist.MultivariateNormal(mean, scale_tril=tril)
        flat = pyro.sample("_laplace_latent", law, infer={"is_auxiliary": True})
        values = self._by_site(flat, shapes)
        return {n: pyro.sample(n, dist.Delta(v, event_dim=v.dim())) for n, v in values.items()}

    def values(self, num_samples: int, generator: torch.Generator, new: Arguments) -> Values | None:
        """Draws of all latents at new inputs, in pairs around the mean; None where the inputs are the fitted ones."""
        if self._fitted(*new):
            return None
        shapes, mean, tril = self._laws.found(new, same_arguments, self._law)
        return self._by_site(mean + in_pairs(num_samples, len(mean), generator).to(mean) @ tril.mT, shapes)

    def _by_site(self, flat: Tensor, shapes: list[tuple[int, ...]]) -> Values:
        pieces = flat.split([torch.Size(shape).numel() for shape in shapes], -1)
        named = zip(self.latents.names, pieces, shapes, strict=True)
        return {n: v.reshape((*v.shape[:-1], *shape)).to(self.dtype) for n, v, shape in named}

    def _fitted(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the inputs are the old ones; targets may be missing."""
        joint = self.state.problem.joint
        pairs = [*zip(joint.args, args, strict=False), *((joint.kwargs.get(k), v) for k, v in kwargs.items())]
        given = [(a, b) for a, b in pairs if isinstance(b, Tensor) and a is not b]
        return all(isinstance(a, Tensor) and a.shape == b.shape and torch.equal(a, b.to(a)) for a, b in given)

    def _law(self, new: Arguments) -> tuple[list[tuple[int, ...]], Tensor, Tensor]:
        """Shapes of the sites, flat mean and scale."""
        values = [
            new_values(self.state, n, new) if n in self.functions else old_values(self.state, n)
            for n in self.latents.names
        ]
        found = predicted(self.state, values)
        tril = cholesky(found.covariance, "the latents' posterior covariance at these inputs")
        return [v.shape for v in values], found.mean.reshape(-1), tril


def latents_at(
    state: LaplaceState, joint: LogJoint, new: Arguments, num_samples: int, seed: int, by_quadrature: bool
) -> Iterator[tuple[Values, Tensor]] | None:
    """Values of the latents at new inputs and their weights ``(S,)``; None where the inputs are those of the fit.

    :param by_quadrature: nodes, or Sobol points, of the normal distribution at each input by itself, for one site
        alone; draws of all inputs together otherwise.
    """
    name, at_once = joint.latents.names[0], rows_at_once(joint)
    if by_quadrature and len(joint.latents.names) == 1 and len(joint.latents.parts[0].shape) <= 2:
        found = predicted(state, [new_values(state, name, new)])
        if found.mean.dim() == 2:
            points = found.at_each_input(num_samples, seed, at_once)
            return (({name: part}, equal_weights(len(part))) for part in points)
        nodes, weights = nodes_and_weights(NUM_NODES, found.mean)
        sd = found.variance.clamp(min=0.0).sqrt()  # rounding below 0
        return iter([({name: found.mean + nodes.unsqueeze(-1) * sd}, weights)])
    drawn = ProcessGuide(state).values(num_samples, generator_of(seed), new)
    if drawn is None:
        return None
    parts = zip(*(value.split(at_once) for value in drawn.values()), strict=True)
    named = (dict(zip(drawn, part, strict=True)) for part in parts)
    return ((part, equal_weights(len(part[name]))) for part in named)
