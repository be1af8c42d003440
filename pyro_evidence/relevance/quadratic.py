"""Gaussian approximations of a likelihood: what to pass as ``approximation=``.

Each maps a target, a ridge and the ridge mode to a :class:`Quadratic`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import torch
from torch import Tensor

from pyro_evidence.errors import NotConverged, UnsupportedModel
from pyro_evidence.numerics.derivatives import hessian, pullback
from pyro_evidence.numerics.linear_predictor import BinomialTargets, Part, gram
from pyro_evidence.numerics.quadrature.rules import nodes_and_weights
from pyro_evidence.relevance.targets import LinearTarget, Local, Target, exact_derivatives

MOST_STEPS = 500  # of a fixed point
SETTLED = 1e-8  # change of its numbers in one step that counts as none


@dataclass(frozen=True, eq=False)
class Quadratic:
    """A Gaussian in place of the likelihood: each part's curvature and slope in ``eta`` at ``y``."""

    y: Tensor  # (D,) the weights, then the other coordinates
    parts: tuple[Part, ...]
    curvatures: tuple[Tensor, ...]  # (N, C, C) each
    slopes: tuple[Tensor, ...]  # (N, C) each
    precision: Tensor | None  # (D, D) where other coordinates carry a prior; None: the parts' Gram matrix is all
    summed_score: Tensor | None = None  # (D,) where there are no parts but sums over data that were not kept

    @property
    def gram(self) -> Tensor:
        """Curvature in ``y``, shape ``(D, D)``."""
        if self.precision is not None:
            return self.precision
        return reduce(add, (gram(p.J, B.unsqueeze(0))[0] for p, B in zip(self.parts, self.curvatures, strict=True)))

    @property
    def score(self) -> Tensor:
        """Gradient of the log likelihood in ``y``, shape ``(D,)``."""
        if self.summed_score is not None:
            return self.summed_score
        each = [s.flatten() @ p.J.flatten(0, 1) for p, s in zip(self.parts, self.slopes, strict=True)]
        return torch.stack(each).sum(0)


Approximation = Callable[[Target, float, Tensor], Quadratic]


def laplace_at_base(target: Target, ridge: float, y: Tensor) -> Quadratic:
    """The second-order expansion at the ridge mode; Gauss-Newton where the predictor is not linear."""
    return _quadratic(target, y, exact_derivatives)


def empirical_fisher(target: Target, ridge: float, y: Tensor) -> Quadratic:
    """An expansion at the ridge mode whose curvature is the outer product of each datum's score: never negative."""
    return _quadratic(target, y, _outer)


def _outer(part: Part, eta: Tensor) -> tuple[Tensor, Tensor]:
    slope = part.slope(eta)[1]
    return slope, slope.unsqueeze(-1) * slope.unsqueeze(-2)


def _quadratic(target: Target, y: Tensor, local: Local) -> Quadratic:
    if isinstance(target, LinearTarget) and not target.is_resident:
        sums = target.sums(y, local)
        return Quadratic(y, (), (), (), sums.precision, sums.gradient)
    parts = target.linearise(y)
    found = [local(p, p.eta(y.unsqueeze(0))) for p in parts]
    slopes, curvatures = (tuple(x[0] for x in xs) for xs in zip(*found, strict=True))
    quadratic = Quadratic(y, parts, curvatures, slopes, None)
    if not isinstance(target, LinearTarget) or target.rest is None:
        return quadratic
    log_prior, point = target.rest, y.unsqueeze(0)  # of the other coordinates
    prior = hessian(lambda v, _: log_prior(v), point, point)[0]
    return replace(quadratic, precision=quadratic.gram - prior)


def _weights_alone(target: Target, name: str) -> None:
    """Refuse what has another prior than the ridge, which the iteration would not see.

    :raises UnsupportedModel: for latent sites that are no weights, and for predictors that are not linear.
    """
    if not isinstance(target, LinearTarget) or target.rest is not None or not target.is_resident:
        why = "there are other latent sites" if isinstance(target, LinearTarget) else "the predictor is not linear"
        why = why if target.is_resident else "the data come in chunks"
        raise UnsupportedModel(
            f"{name} knows the weights' ridge alone, and {why}. Use approximation=laplace_at_base, or name all latent "
            "sites in site=[...]."
        )


@dataclass(frozen=True)
class JaakkolaJordan:
    """Jaakkola and Jordan's bound on the logistic likelihood, tightened under the ridge prior: VGREVM.

    Jaakkola and Jordan (2000), eq. 3 and 12; at most ``num_steps`` rounds, until the bound's parameters
    settle.

    >>> import torch
    >>> from pyro_evidence import REVM
    >>> from pyro_evidence.models.basis import Linear
    >>> from pyro_evidence.models.classifier import classifier
    >>> from pyro_evidence.relevance import JaakkolaJordan
    >>> X = torch.linspace(-2.0, 2.0, 30).unsqueeze(-1)
    >>> t = (X[:, 0] + torch.cos(40.0 * X[:, 0]) > 0.0).double()
    >>> REVM(classifier(Linear()), approximation=JaakkolaJordan()).run(X, t).num_active
    1
    """

    num_steps: int = MOST_STEPS

    def __call__(self, target: Target, ridge: float, y: Tensor) -> Quadratic:
        """The bound at its best.

        :raises UnsupportedModel: when the likelihood is not Bernoulli in log odds, the predictor is not linear, or
            there are latent sites besides the weights.
        """
        _weights_alone(target, "the Jaakkola-Jordan bound")
        parts = target.linearise(y)
        (half, trials), part = logistic_terms(parts), parts[0]
        J = part.J[:, 0]
        xi = part.eta(y.unsqueeze(0))[0, :, 0].abs()
        for _ in range(self.num_steps):
            B = 2.0 * trials * bound_curvature(xi)
            mean, marginal = _ridged(J, B, half - B * part.c[:, 0], ridge)
            new = ((J @ mean + part.c[:, 0]).square() + marginal).sqrt()
            settled = bool(((new - xi).abs() <= SETTLED * (1.0 + new)).all())
            xi = new
            if settled:
                break
        slope = half - B * (J @ mean + part.c[:, 0])
        return Quadratic(mean, (part,), (B[:, None, None],), (slope.unsqueeze(-1),), None)


def bound_curvature(xi: Tensor) -> Tensor:
    r""":math:`\lambda(\xi) = \tanh(\xi/2) / 4\xi`, shape ``(...)``.  Jaakkola and Jordan (2000), eq. 3."""
    xi = xi.clamp(min=torch.finfo(xi.dtype).eps)  # where the limit is reached
    return (0.5 * xi).tanh() / (4.0 * xi)


def _ridged(J: Tensor, B: Tensor, b: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Mean of ``N(A^-1 J'b, A^-1)``, ``A = J'BJ + ridge``, and the variances of ``J w``."""
    A = J.mT @ (B.unsqueeze(-1) * J) + ridge * torch.eye(J.shape[1], dtype=J.dtype, device=J.device)
    tril = torch.linalg.cholesky(A)
    white = torch.linalg.solve_triangular(tril, J.mT, upper=False)
    mean = torch.linalg.solve_triangular(tril.mT, (white @ b).unsqueeze(-1), upper=True).squeeze(-1)
    return mean, white.square().sum(0)


def logistic_terms(
    parts: tuple[Part, ...], remedy: str = "Use approximation=laplace_at_base or LeastKL()."
) -> tuple[Tensor, Tensor]:
    """``t - 1/2`` times the weight of each datum, and that weight, ``(N,)`` both: of Bernoulli labels in log odds.

    :param remedy: what a reader can do instead, a sentence.
    :raises UnsupportedModel: for any other likelihood.
    """
    closed = parts[0].closed if len(parts) == 1 else None
    if isinstance(closed, BinomialTargets):
        return (closed.targets - 0.5 * closed.size)[:, 0], closed.size[:, 0]
    raise UnsupportedModel(
        "the Jaakkola-Jordan bound needs one observed site, Bernoulli with a linear predictor in log odds; the "
        f"curvature of this likelihood is another. {remedy}"
    )


@dataclass(frozen=True)
class LeastKL:
    """The Gaussian of least Kullback-Leibler divergence from likelihood times ridge prior.

    A damped fixed point on expected slope and curvature under Gauss-Hermite.  Opper and Archambeau (2009),
    eq. 9 and 10. Without a ridge the divergence of separable data has no minimum; small ridges converge
    slowly or not at all.

    >>> import torch
    >>> from pyro_evidence import REVM
    >>> from pyro_evidence.models.basis import Linear
    >>> from pyro_evidence.models.classifier import classifier
    >>> from pyro_evidence.relevance import LeastKL
    >>> X = torch.linspace(-2.0, 2.0, 30).unsqueeze(-1)
    >>> t = (X[:, 0] + torch.cos(40.0 * X[:, 0]) > 0.0).double()
    >>> REVM(classifier(Linear()), approximation=LeastKL()).run(X, t).num_active
    1
    """

    num_steps: int = MOST_STEPS
    damping: float = 0.5
    num_nodes: int = 20

    def __call__(self, target: Target, ridge: float, y: Tensor) -> Quadratic:
        """The nearest Gaussian.

        :raises NotConverged: when the fixed point does not settle.
        :raises UnsupportedModel: for another predictor, or latent sites besides the weights.
        """
        _weights_alone(target, "LeastKL")
        parts = target.linearise(y)
        if len(parts) != 1 or parts[0].c.shape[1] != 1:
            raise UnsupportedModel(
                "LeastKL needs one observed site whose predictor has one element per datum. Use "
                "approximation=laplace_at_base."
            )
        part, J = parts[0], parts[0].J[:, 0]
        nodes = nodes_and_weights(self.num_nodes, y)
        mean, B = y, part.curvature(part.eta(y.unsqueeze(0)))[0, :, 0, 0]
        marginal = _ridged(J, B, torch.zeros_like(B), ridge)[1]  # of none, a mode would stand still
        for _ in range(self.num_steps):
            slope, new = _expected(part, J @ mean + part.c[:, 0], marginal, nodes)
            B = self.damping * B + (1.0 - self.damping) * new
            step, marginal = _ridged(J, B, slope + B * (J @ mean), ridge)
            change = step - mean
            mean = mean + (1.0 - self.damping) * change
            if float((J @ change).abs().max()) <= SETTLED and bool(((new - B).abs() <= SETTLED).all()):
                slope, B = _expected(part, J @ mean + part.c[:, 0], marginal, nodes)
                return Quadratic(mean, parts, (B[:, None, None],), (slope.unsqueeze(-1),), None)
        raise NotConverged(
            f"LeastKL did not settle in {self.num_steps} rounds at ridge {ridge:g}; raise the ridge or the damping."
        )


def _expected(part: Part, mean: Tensor, variance: Tensor, nodes: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Expected slope and curvature of each datum under ``N(mean, variance)``, ``(N,)`` each."""
    points, weights = nodes
    eta = (mean + variance.sqrt() * points.unsqueeze(-1)).unsqueeze(-1).detach().requires_grad_()
    slope = pullback(part.log_likelihood(eta).sum(), eta, create_graph=True)
    curvature = -pullback(slope.sum(), eta)
    return weights @ slope.detach().squeeze(-1), weights @ curvature.squeeze(-1)
