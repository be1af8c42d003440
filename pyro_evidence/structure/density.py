"""One log joint density with its derivatives: by autograd for any model, by linear algebra where predictors are linear.

Both satisfy :class:`pyro_evidence.precision.choices.Density`, and must agree: the second is only a faster way.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from operator import add, is_
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_evidence.errors import UnsupportedModel
from pyro_evidence.numerics import derivatives
from pyro_evidence.numerics.derivatives import Last, Orders
from pyro_evidence.numerics.linalg import require_memory
from pyro_evidence.numerics.linear_predictor import (
    CHUNK,
    ClosedForm,
    NormalTargets,
    curvature_graph,
    gram,
    gram_diagonal,
    slope_and_curvature,
)
from pyro_evidence.numerics.newton import Density
from pyro_evidence.precision.dense import FLOAT
from pyro_evidence.program import predictors
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.predictors import LikelihoodTerm
from pyro_evidence.program.sites import log_prob_sum
from pyro_evidence.structure.factor_terms import RecordedTerms

LIGHT = 2**14  # numbers of linear predictors' designs up to which a batch spares more than single rows' algebra


@dataclass(frozen=True, eq=False)
class JointDensity:
    """A density of the latents of one log joint; those below say how its derivatives are found."""

    log_joint: ClassVar[Callable[..., Tensor]]  # log p(D, w | theta) of rows (R, D) and hyperparameters, nats, (R,)

    joint: LogJoint

    @property
    def blocks(self) -> tuple[slice, ...]:
        """The flat coordinates of each latent site."""
        return tuple(self.joint.latents.slices.values())

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint and its gradient in ``u``, detached."""
        return derivatives.gradient(self.log_joint, u, theta)

    def precision_diagonal(self, u: Tensor, theta: Tensor) -> Tensor:
        """Minus the second derivatives in each coordinate of ``u``, shape ``(R, D)``."""
        return -derivatives.hessian_diagonal(self.log_joint, u, theta, self.blocks, create_graph=wants_graph(u, theta))


@dataclass(frozen=True, eq=False)
class AutogradDensity(JointDensity):
    """Any model, by reverse-mode derivatives of its log joint."""

    likelihoods: tuple[LikelihoodTerm, ...] | None  # where observed sites see the latents, for Gauss-Newton
    terms: RecordedTerms | None = None  # of the log joint, where equal operations of many steps run as one

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        return (self.joint if self.terms is None or u.dim() == 1 else self.terms).log_joint(u, theta)

    def precision(self, u: Tensor, theta: Tensor) -> Tensor:
        """Minus the Hessian in ``u``, shape ``(R, D, D)``.

        :raises TooLarge: when it and its Cholesky factor would not fit into memory.
        """
        self.require_dense(u)
        A = derivatives.hessian(self.log_joint, u, theta, create_graph=wants_graph(u, theta))
        return -A if A.requires_grad else A.neg_()

    def require_dense(self, u: Tensor) -> None:
        """Refuse a dense Hessian at rows ``(R, D)`` that would not fit into memory.

        :raises TooLarge: with the number of bytes.
        """
        _require_dense(u, "the dense Hessian of the log joint density and its Cholesky factor")

    def orders(self, u: Tensor, theta: Tensor) -> Orders:
        """The log joint and two derivatives in ``u``, which requires a gradient, in one graph.

        :raises TooLarge: as :meth:`precision`.
        """
        self.require_dense(u)
        return derivatives.orders(self.log_joint, u, theta)

    def gauss_newton(self, u: Tensor, theta: Tensor) -> Tensor:
        """Prior precision plus ``J' diag(-l'') J`` at each row, shape ``(R, D, D)``.

        :raises UnsupportedModel: when no observed site's parameter can be read as a predictor.
        :raises TooLarge: when that, its Cholesky factor and ``J`` would not fit into memory.
        """
        if not self.likelihoods:
            raise UnsupportedModel(
                f"Gauss-Newton needs observed sites that see the latents through one parameter each; among "
                f"{', '.join(self.joint.observed)} one sees them otherwise (through two parameters, a pyro.factor, its "
                f"mask or value, or the mixing of a discrete site), or none does. Use curvature=exact_hessian."
            )
        size = max(likelihood.layout.shape.numel() for likelihood in self.likelihoods) * u.shape[-1]
        _require_dense(u, "the Gauss-Newton matrix, its Cholesky factor and the Jacobian of the predictor", size)
        theta = theta.expand(len(u), -1)
        return torch.stack([self._gauss_newton(*row) for row in zip(u, theta, strict=True)])

    def _gauss_newton(self, u: Tensor, theta: Tensor) -> Tensor:
        graph = wants_graph(u, theta)
        u = u if u.requires_grad else u.detach().requires_grad_()
        prior = partial(predictors.log_prior_rows, self.joint)
        A = -derivatives.hessian(prior, u.unsqueeze(0), theta, create_graph=graph)[0]
        with derivatives.measured() as kept:
            trace = self.joint.trace(u, theta)
        for likelihood in self.likelihoods or ():
            eta = likelihood.blocks(trace)
            J = derivatives.Forward(eta.reshape(-1), u, at_once=kept.passes_at_once, create_graph=graph).matrix()
            of, rows = likelihood.log_likelihood(trace), eta.unsqueeze(0)
            B = (
                curvature_graph(of, likelihood.layout, rows)[2]
                if graph
                else slope_and_curvature(of, likelihood.layout, rows)[2]()
            )
            A = A + gram(J.reshape(*eta.shape, -1).double(), B.double())[0]
        return A


@dataclass(frozen=True, eq=False)
class Climbing(AutogradDensity):
    """The density of a search that asks for the precision where it just asked for the gradient; one run for both."""

    _last: list[tuple[Tensor, Tensor, Callable[[bool], Tensor]]] = field(default_factory=list, repr=False)

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint and its gradient in ``u``, whose graph is kept."""
        self._last.clear()  # let go before the next is made
        u = u.detach().requires_grad_()
        value, slope, second = derivatives.sloped(self.log_joint, u, theta)
        self._last.append((u, theta, second))
        return value.detach(), slope.detach().contiguous()

    def precision(self, u: Tensor, theta: Tensor) -> Tensor:
        """Minus the Hessian in ``u``, shape ``(R, D, D)``, from the graph of the gradient where that was taken."""
        here = self._last and torch.equal(self._last[0][0], u) and torch.equal(self._last[0][1], theta)
        if not here or wants_graph(u, theta):
            return super().precision(u, theta)
        self.require_dense(u)
        return self._last.pop()[2](False).neg_()


def climbing(density: Density) -> Density:
    """A density for one search; others than by autograd find the curvature without another run as they are."""
    return Climbing(density.joint, density.likelihoods, density.terms) if type(density) is AutogradDensity else density


@dataclass(frozen=True, eq=False)
class LinearPart:
    """One observed site that sees the latents only through ``eta = J u + c``, ``c`` free of ``u``."""

    product: ClassVar[Callable[..., Tensor]]  # J u of rows u (R, D), blocks (R, N, C)
    back: ClassVar[Callable[..., Tensor]]  # J' s for slopes in the predictors, blocks (R, N, C), shape (R, D)
    reach: ClassVar[Callable[..., Tensor]]  # |J| |u| for one row (D,), the size of what is summed, (N, C)

    likelihood: LikelihoodTerm  # where it sees them
    _closed: Last[Any, ClosedForm | None] = field(default_factory=Last, init=False, repr=False, compare=False)

    def eta(self, u: Tensor, offset: Tensor) -> Tensor:
        """Predictors of rows ``(R, D)``, blocks ``(R, N, C)``."""
        return self.product(u) + offset

    def derivatives(self, trace: Any, eta: Tensor) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
        """Log likelihoods ``(R,)``, slopes ``(R, N, C)``, and what gives the curvatures ``(R, N, C, C)``, detached.

        :param trace: where the rest of the site is read.
        :param eta: blocks ``(R, N, C)``.
        """
        closed, eta = self._closed_form(trace, eta), eta.detach()
        if closed is None:
            return slope_and_curvature(self.likelihood.log_likelihood(trace), self.likelihood.layout, eta)
        value, slope, curvature = (x.detach() for x in closed(eta))
        return value, slope, partial(torch.positive, curvature)

    def derivatives_graph(self, trace: Any, eta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log likelihoods, slopes and curvatures as in :meth:`derivatives`, in one graph."""
        closed = self._closed_form(trace, eta)
        if closed is None:
            return curvature_graph(self.likelihood.log_likelihood(trace), self.likelihood.layout, eta)
        return closed(eta)

    def _closed_form(self, trace: Any, eta: Tensor) -> ClosedForm | None:
        return self._closed.found(trace, is_, self.likelihood.closed) if eta.dtype == torch.float64 else None


@dataclass(frozen=True)
class DenseLinear(LinearPart):
    """A linear part with all of its ``J``."""

    J: Tensor  # (N, C, D); often a view of the model's own design matrix, so never written to
    even: bool = False  # whether all data have normal noise of one precision
    _product: Last[Tensor, Tensor] = field(default_factory=Last, init=False, repr=False, compare=False)

    def product(self, u: Tensor) -> Tensor:
        return (u @ self.J.flatten(0, 1).mT).unflatten(-1, self.J.shape[:2])

    def eta(self, u: Tensor, offset: Tensor) -> Tensor:
        if u.requires_grad or len(u) != 1:
            return self.product(u) + offset
        # of one row the last is kept, as a search begins where another has ended
        return self._product.found(u.detach().clone(), torch.equal, self.product) + offset

    @cached_property
    def square(self) -> Tensor:
        """``J' J``, shape ``(D, D)``."""
        return gram(self.J, self.J.new_ones(1, len(self.J), 1, 1))[0]

    def gram(self, B: Tensor) -> Tensor:
        """``sum_n J_n' B_n J_n`` of curvatures ``(R, N, C, C)``, ``(R, D, D)``; of even noise without another pass."""
        return B[:, 0] * self.square if self.even else gram(self.J, B)

    def back(self, slope: Tensor) -> Tensor:
        return slope.double().flatten(1) @ self.J.flatten(0, 1)

    def reach(self, u: Tensor) -> Tensor:
        return torch.cat([J.abs() @ u.abs() for J in self.J.split(1 + 2**20 // self.J[0].numel())])


Blocks = list[Callable[[], Tensor]]  # what gives the curvatures of each linear predictor, (R, N, C, C)


@dataclass(frozen=True, eq=False)
class NormalPrior:
    """Latents with independent normal deviations ``W u - loc``, their means linear in other latents; ``W`` fixed."""

    loc: Tensor  # (D,)
    precision: Tensor  # (D,)
    W: Tensor | None = None  # (D, D); None for the identity

    def log_prob(self, u: Tensor) -> Tensor:
        """The log density of rows ``(R, D)``, nats, ``(R,)``."""
        return 0.5 * ((self.precision / torch.pi / 2).log() - self.precision * self._away(u).square()).sum(-1)

    def slope(self, u: Tensor) -> Tensor:
        """Its gradient, ``(R, D)``."""
        slope = -self.precision * self._away(u)
        return slope if self.W is None else slope @ self.W

    @property
    def curvature(self) -> Tensor:
        """Minus its Hessian, ``(1, D, D)``, or the diagonal of that, ``(D,)``."""
        return self.precision if self.W is None else (self.W.mT @ (self.precision.unsqueeze(-1) * self.W)).unsqueeze(0)

    @property
    def detached(self) -> "NormalPrior":
        """This prior without the graph of the hyperparameters."""
        return NormalPrior(self.loc.detach(), self.precision.detach(), self.W)

    def _away(self, u: Tensor) -> Tensor:
        return (u if self.W is None else u @ self.W.mT) - self.loc


@dataclass(frozen=True, eq=False)
class ModelParts:
    """Offsets, prior and constant terms of the model at one setting of the hyperparameters, whatever the latents."""

    theta: Tensor
    trace: Any  # at u = 0
    offsets: tuple[Tensor, ...]  # of each linear predictor
    normal: NormalPrior | None  # where all latents have one
    rest: Tensor | float  # log likelihood of the observed sites that do not see the latents
    version: int  # of theta's contents
    graph: bool  # whether one was made

    def detached(self, theta: Tensor) -> "ModelParts":
        """These parts for hyperparameters of the same values, without their graph."""
        offsets, rest = tuple(c.detach() for c in self.offsets), torch.as_tensor(self.rest).detach()
        normal = None if self.normal is None else self.normal.detached
        return ModelParts(theta, self.trace, offsets, normal, rest, theta._version, False)

    @property
    def prior(self) -> tuple[Tensor, Tensor] | None:
        """Means ``(D,)`` and precisions ``(D,)`` of latents that are all normal and independent."""
        return None if self.normal is None or self.normal.W is not None else (self.normal.loc, self.normal.precision)


@dataclass(frozen=True, eq=False)
class LinearPredictors(JointDensity):
    """A model whose observed sites have linear predictors; all rows share their hyperparameters.

    Where a gradient was taken last, its graph gives the curvatures of the likelihoods without another run.
    """

    linear: tuple[LinearPart, ...]
    free: tuple[str, ...]  # observed sites that do not see the latents
    gaussian: bool  # every integrated site has a Gaussian prior that depends on hyperparameters alone
    W: Tensor | None = None  # (D, D): W u less its mean is normal and independent, where ``gaussian`` is not the case
    _cache: Last[ModelParts, ModelParts] = field(default_factory=Last, repr=False, compare=False)  # one with the graph
    _last: Last[tuple[Tensor, ModelParts], Blocks] = field(default_factory=Last, repr=False, compare=False)

    @property
    def likelihoods(self) -> tuple[LikelihoodTerm, ...]:
        """Where the observed sites see the latents."""
        return tuple(part.likelihood for part in self.linear)

    def is_log_concave(self, trace: Any) -> bool:
        """Whether all likelihoods are known to be log-concave in their predictors."""
        return all(part.likelihood.is_log_concave(trace) for part in self.linear)

    def is_quadratic(self, trace: Any) -> bool:
        """Whether all likelihoods are normal."""
        return all(isinstance(part.likelihood.closed(trace), NormalTargets) for part in self.linear)

    @property
    def is_light(self) -> bool:
        """Whether rows are evaluated by autograd together for less than one by one by the algebra of predictors."""
        return sum(part.likelihood.layout.shape.numel() for part in self.linear) * self.joint.latents.size <= LIGHT

    def parts(self, theta: Tensor) -> ModelParts:
        """The model's parts at ``theta``, ``(T,)`` or rows of one; one run is for their values and for derivatives."""
        graph = theta.requires_grad and torch.is_grad_enabled()
        for parts in self._cache.pair or ():
            if parts.version == parts.theta._version and parts.graph == graph:
                if parts.theta is theta or (not graph and torch.equal(parts.theta, theta)):
                    return parts
        own = theta[0] if theta.dim() == 2 else theta
        leaf = own if graph or not torch.is_grad_enabled() else own.detach().clone().requires_grad_()
        parts = self.parts_at(leaf, self.joint.trace(self.joint.initial_u, leaf))
        made = parts if graph else parts.detached(theta)
        self._cache.pair = made, parts
        return made

    def leaf(self, theta: Tensor) -> Tensor:
        """A copy of ``theta`` to differentiate in: that of the last run, where it was there."""
        kept = [parts.theta for parts in self._cache.pair or () if parts.graph and torch.equal(parts.theta, theta)]
        return kept[0] if kept else theta.detach().clone().requires_grad_()

    def parts_at(self, theta: Tensor, trace: Any) -> ModelParts:
        """The parts as a trace at ``u = 0`` and ``theta`` shows them."""
        normal = None
        if self.gaussian or self.W is not None:
            loc, precision, _ = predictors.gaussian_prior(self.joint, trace)
            u = self.joint.initial_u
            normal = NormalPrior(loc if self.W is None else self.W @ u - (u - loc), precision, self.W)
        offsets = tuple(part.likelihood.blocks(trace).double() for part in self.linear)
        rest, graph = log_prob_sum(trace, self.free), theta.requires_grad and torch.is_grad_enabled()
        return ModelParts(theta, trace, offsets, normal, rest, theta._version, graph)

    def log_prior(self, u: Tensor, theta: Tensor) -> Tensor:
        """Log prior density of rows ``(R, D)``, nats, ``(R,)``."""
        normal = self.parts(theta).normal
        if normal is None:
            return predictors.log_prior_rows(self.joint, u, theta[0] if theta.dim() == 2 else theta)
        return normal.log_prob(u)

    def _etas(self, u: Tensor, theta: Tensor) -> list[Tensor]:
        offsets = self.parts(theta).offsets
        return [p.eta(u, c).to(self.joint.dtype) for p, c in zip(self.linear, offsets, strict=True)]

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        """``log p(D, w | hyperparameters)``, nats, shape ``(R,)``."""
        return self.log_prior(u, theta) + self.log_likelihood(u, theta)

    def log_likelihood(self, u: Tensor, theta: Tensor) -> Tensor:
        """Log likelihood of all observed sites, nats, shape ``(R,)``."""
        parts = self.parts(theta)
        with torch.set_grad_enabled(wants_graph(u, theta)):  # the trace may be one that others differentiate
            total = u.new_zeros(len(u)) + parts.rest
            for part, eta in zip(self.linear, self._etas(u, theta), strict=True):
                total = (
                    total + part.likelihood.log_likelihood(parts.trace)(part.likelihood.layout.natural(eta)).double()
                )
        return total

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint and its gradient in ``u``, by the slopes of the likelihoods in their predictors."""
        found, rise = self.likelihood_gradient(u, theta)
        normal = self.parts(theta).normal
        if normal is None:
            value, slope = derivatives.gradient(self.log_prior, u, theta)
            return value + found, slope + rise
        return normal.detached.log_prob(u.detach()) + found, normal.detached.slope(u.detach()) + rise

    def likelihood_gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The log likelihood and its gradient in ``u``, detached."""
        self._last.pair = None  # let go before the next is made
        u, parts, blocks = u.detach(), self.parts(theta), []
        value, slope = torch.as_tensor(parts.rest).detach() + u.new_zeros(len(u)), torch.zeros_like(u)
        for part, eta in zip(self.linear, self._etas(u, theta), strict=True):
            found, by_eta, block = part.derivatives(parts.trace, eta)
            value, slope = value + found.double(), slope + part.back(by_eta)
            blocks.append(block)
        self._last.pair = (u, parts), blocks
        return value, slope

    def curvatures(self, u: Tensor, theta: Tensor) -> list[Tensor]:
        """Minus the second derivatives of the likelihoods in their predictors, ``(R, N, C, C)`` each."""
        graph, parts = wants_graph(u, theta), self.parts(theta)
        last = None if graph else self._last.pair  # which another thread may take meanwhile
        if last is not None and last[0][1] is parts and torch.equal(last[0][0], u):
            self._last.pair = None
            return [block().double() for block in last[1]]
        pairs = zip(self.linear, self._etas(u, theta), strict=True)
        if graph:
            return [part.derivatives_graph(parts.trace, eta)[2].double() for part, eta in pairs]
        return [part.derivatives(parts.trace, eta)[2]().double() for part, eta in pairs]


@dataclass(frozen=True, eq=False)
class LinearDensity(LinearPredictors):
    """A linear predictor's density with its second derivatives, by dense linear algebra."""

    linear: tuple[DenseLinear, ...]

    def orders(self, u: Tensor, theta: Tensor) -> Orders:
        """The log joint and two derivatives in ``u``, which requires a gradient, in one graph.

        :raises TooLarge: as :meth:`precision`.
        """
        self._require_dense(u)
        parts = self.parts(theta)
        prior = self._prior_orders(u, theta)
        value, slope, A = prior.log_joint + parts.rest, prior.gradient, prior.precision
        for part, eta in zip(self.linear, self._etas(u, theta), strict=True):
            found, by_eta, B = part.derivatives_graph(parts.trace, eta)
            value, slope = value + found.double(), slope + part.back(by_eta)
            A = with_prior(part.gram(B.double()), A)
        return Orders(value, slope, A)

    def _prior_orders(self, u: Tensor, theta: Tensor) -> Orders:
        """The log prior density of rows, its gradient, and minus its Hessian or the diagonal of that."""
        normal = self.parts(theta).normal
        if normal is None:
            return derivatives.orders(self.log_prior, u, theta)
        return Orders(normal.log_prob(u), normal.slope(u), normal.curvature)

    def precision(self, u: Tensor, theta: Tensor) -> Tensor:
        """Prior precision plus ``J' diag(-l'') J``, shape ``(R, D, D)``.

        :raises TooLarge: when it and its Cholesky factor would not fit into memory.
        """
        self._require_dense(u)
        return with_prior(self.likelihood_precision(u, theta), self._prior_precision(u, theta))

    def likelihood_precision(self, u: Tensor, theta: Tensor) -> Tensor:
        """``J' diag(-l'') J``, shape ``(R, D, D)``."""
        grams = [part.gram(B) for part, B in zip(self.linear, self.curvatures(u, theta), strict=True)]
        return reduce(add, grams) if grams else u.new_zeros(*u.shape, u.shape[-1])

    def _require_dense(self, u: Tensor) -> None:
        weighted = max((len(u) * part.J.numel() for part in self.linear), default=0)
        _require_dense(u, "the dense posterior precision and its Cholesky factor", min(CHUNK, weighted))

    def _prior_precision(self, u: Tensor, theta: Tensor) -> Tensor:
        """Rows of a diagonal ``(D,)``, or dense ``(R, D, D)`` or ``(1, D, D)``."""
        normal = self.parts(theta).normal
        if normal is not None:
            return normal.curvature
        return -derivatives.hessian(self.log_prior, u, theta, create_graph=wants_graph(u, theta))

    def precision_diagonal(self, u: Tensor, theta: Tensor) -> Tensor:
        parts = [gram_diagonal(p.J, B) for p, B in zip(self.linear, self.curvatures(u, theta), strict=True)]
        normal = self.parts(theta).normal
        if normal is not None:
            A = normal.curvature
            return sum(parts, A if A.dim() == 1 else A.diagonal(dim1=-2, dim2=-1))
        graph = wants_graph(u, theta)
        return sum(parts, -derivatives.hessian_diagonal(self.log_prior, u, theta, self.blocks, create_graph=graph))

    def gauss_newton(self, u: Tensor, theta: Tensor) -> Tensor:
        """The exact precision: a linear predictor has no curvature of its own."""
        return self.precision(u, theta)


def with_prior(A: Tensor, prior: Tensor) -> Tensor:
    """``A`` plus a dense or a diagonal matrix, in the memory of ``A`` where no graph is in the way."""
    if prior.dim() > 2 or A.requires_grad or prior.requires_grad:
        return A + (prior if prior.dim() > 2 else prior.diag_embed())
    A.diagonal(dim1=-2, dim2=-1).add_(prior)
    return A


def _require_dense(u: Tensor, what: str, extra: int = 0) -> None:
    """Refuse what needs two ``(R, D, D)`` and ``extra`` numbers if that does not fit."""
    num_rows, size = u.shape
    require_memory(FLOAT * (2 * num_rows * size**2 + extra), what, u.device)


def wants_graph(u: Tensor, theta: Tensor) -> bool:
    """Whether what is made of points and hyperparameters is to be differentiated in them."""
    return torch.is_grad_enabled() and (u.requires_grad or theta.requires_grad)
