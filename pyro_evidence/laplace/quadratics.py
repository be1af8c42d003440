"""Log joints of many data sets that are quadratic in the latents: a sum of terms times powers of hyperparameters.

The model runs a few times for each data set; its evidence at any hyperparameters is linear algebra after that.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyro_evidence.laplace.approximation import LaplaceRows
from pyro_evidence.numerics.batched import BATCH_NUMBERS
from pyro_evidence.numerics.derivatives import normal_draws, passes_to, pullback

POWERS = torch.arange(-4.0, 5.0) / 2.0  # of positive numbers: roots and squares of spreads and of precisions
MOST_HYPERS = 3  # each with nine powers
NUM_SAMPLES = 32  # settings of the hyperparameters, twice as many as there may be terms
SPREAD = 1.5  # log units on either side over which they are spread: powers that are next differ by e there
EXACT = 1e-9  # relative size of what rounding leaves of derivatives of a sum over data
WITHIN = 1e-6  # sine of the angle between a function and the span of others in which it lies


@dataclass(frozen=True)
class Quadratics:
    r"""Log joints of data sets, quadratic in the latents at any hyperparameters.

    .. math:: \log p(D_k, u \mid \theta) = l_k'\delta + \sum_m e^{p_m'\delta} (a_{km} + b_{km}'u
        - \tfrac12 u' A_{km} u), \qquad \delta = \theta - \theta_0

    So linear models with normal noise have it, ``theta`` the logarithms of their spreads, and last the number of a data
    set, whose power is zero.

    :ivar first: number of the first.
    :ivar centre: ``theta_0``, ``(T + 1,)``.
    :ivar powers: ``p``, ``(M, T + 1)``.
    :ivar line: ``l``, ``(K, T + 1)``.
    :ivar a, b, A: ``(K, M)``, ``(K, M, D)`` and ``(K, M, D, D)``.
    :ivar axes: along which all ``A`` of a data set are diagonal: these diagonals, ``b`` there, ``(K, M, D)`` each, and
        the log determinant of what leads there, ``(K,)``; None where there are none.
    """

    first: int
    centre: Tensor
    powers: Tensor
    line: Tensor
    a: Tensor
    b: Tensor
    A: Tensor
    axes: tuple[Tensor, Tensor, Tensor] | None = None

    def weights(self, theta: Tensor) -> Tensor:
        """The factor of each term at ``(..., T + 1)``, ``(..., M)``."""
        return ((theta - self.centre) @ self.powers.mT).exp()

    def _rows(self, theta: Tensor) -> Tensor:
        return theta[:, -1].long() - self.first

    def evidence(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The log evidence at settings of each data set ``(r, J, T + 1)``, and its slope in these.

        :return: nats, ``(r, J)``, minus infinity where there is no mode, and ``(r, J, T + 1)``.
        """
        size = theta.shape[1] * (self.A if self.axes is None else self.axes[0])[0, 0].numel()
        found = [self._evidence(part) for part in theta.split(max(1, BATCH_NUMBERS // size))]
        return torch.cat([value for value, _ in found]), torch.cat([slope for _, slope in found])

    def _evidence(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        rows, weights, num = self._rows(theta[:, 0]), self.weights(theta), self.b.shape[-1]
        if self.axes is None:
            terms, b = self.A[rows].flatten(2), self.b[rows]
            tril, info = torch.linalg.cholesky_ex((weights @ terms).unflatten(-1, (num, num)))
            sound, log_det = info == 0, 2.0 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            variance, slope = torch.cholesky_inverse(tril), weights @ b
            mode = (variance @ slope.unsqueeze(-1)).squeeze(-1)
            moments = (mode.unsqueeze(-1) * mode.unsqueeze(-2) + variance).flatten(2)
        else:
            terms, b, log_scale = (x[rows] for x in self.axes)
            A, slope = weights @ terms, weights @ b
            sound, log_det = (A > 0).all(-1), A.log().sum(-1) - 2.0 * log_scale.unsqueeze(-1)
            mode = slope / A
            moments = mode.square() + A.reciprocal()
        line, a = self.line[rows].unsqueeze(1), self.a[rows].unsqueeze(1)
        value = (line * (theta - self.centre)).sum(-1) + (weights * a).sum(-1) + 0.5 * (slope * mode).sum(-1)
        value = value + 0.5 * (num * math.log(math.tau) - log_det)
        expected = a + mode @ b.mT - 0.5 * moments @ terms.mT  # of each term, under the posterior
        return torch.where(sound, value, -torch.inf), line + (weights * expected) @ self.powers

    def modes(self, theta: Tensor) -> LaplaceRows:
        """Laplace's approximation, which is exact here, at ``(r, T + 1)``."""
        rows, weights = self._rows(theta), self.weights(theta).unsqueeze(1)
        A = (weights @ self.A[rows].flatten(2)).unflatten(-1, self.A.shape[2:]).squeeze(1)
        tril = torch.linalg.cholesky_ex(A).L
        u = torch.cholesky_solve((weights @ self.b[rows]).mT, tril).squeeze(-1)
        objective, active = self.evidence(theta.unsqueeze(1))[0].squeeze(1), torch.ones_like(u) > 0
        return LaplaceRows(theta, active, u, tril, objective, ~active[:, 0])

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        """The log joint of each data set at one place ``(D,)`` and setting ``(T + 1,)``, nats, ``(K,)``."""
        terms = self.a + self.b @ u - 0.5 * (self.A @ u) @ u
        return self.line @ (theta - self.centre) + terms @ self.weights(theta)

    def along_axes(self) -> "Quadratics":
        """These with ``axes``, where all data sets have them."""
        sound = self.A.isfinite().flatten(1).all(-1)
        every = torch.where(sound[:, None, None, None], self.A, torch.eye(self.A.shape[-1]).to(self.A))
        tril, info = torch.linalg.cholesky_ex(every.sum(1))
        if bool((info != 0).any()):
            return self
        whitened = torch.linalg.solve_triangular(tril.unsqueeze(1), every, upper=False)
        whitened = torch.linalg.solve_triangular(tril.unsqueeze(1), whitened.mT, upper=False)
        mixed = (normal_draws(len(self.powers)).to(self.A)[:, None, None] * whitened).sum(1)
        vectors = torch.linalg.eigh(0.5 * (mixed + mixed.mT)).eigenvectors.unsqueeze(1)
        turned = vectors.mT @ whitened @ vectors
        terms = turned.diagonal(dim1=-2, dim2=-1)
        if float((turned - terms.diag_embed()).abs().max()) > EXACT:
            return self
        b = torch.linalg.solve_triangular(tril, self.b.mT, upper=False).mT @ vectors.squeeze(1)
        return replace(self, axes=(terms.contiguous(), b, -tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)))


@dataclass(frozen=True)
class LogJoints:
    """Log joints of data sets at settings of their hyperparameters, as many together as there is room for.

    :ivar f: of data sets ``(K,)`` at places ``(K, J, D)`` and settings ``(J, T)``, nats, ``(K, J)``.
    :ivar at_once: settings of data sets whose second derivatives are made together.
    """

    f: Callable[[Tensor, Tensor, Tensor], Tensor]
    at_once: int

    def heights(self, u: Tensor, theta: Tensor, numbers: Tensor) -> Tensor:
        """The log joint of each data set at one place ``(D,)`` and settings ``(J, T)``, nats, ``(K, J)``."""
        parts = numbers.split(max(1, self.at_once * len(u) // len(theta)))
        with torch.no_grad():
            return torch.cat([self.f(u.expand(len(part), len(theta), -1), theta, part) for part in parts])

    def derivatives(self, u: Tensor, theta: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Slopes ``(K, J, D)`` and minus the Hessians ``(K, J, D, D)`` at one place ``(D,)``."""
        found = [self._derivatives(u, theta, part) for part in numbers.split(max(1, self.at_once // len(theta)))]
        return torch.cat([slope for slope, _ in found]), torch.cat([A for _, A in found])

    def _derivatives(self, u: Tensor, theta: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        places = u.expand(len(numbers), len(theta), -1).clone().requires_grad_()
        slope = pullback(self.f(places, theta, numbers).sum(), places, create_graph=True)
        units = torch.eye(len(u)).to(u)[:, None, None].expand(-1, *places.shape)
        A = passes_to(slope, [places], units, len(units), False)[0]  # one by one: together each has a copy of the data
        return slope.detach(), -A.movedim(0, 2)


@dataclass(frozen=True)
class PowerSums:
    """Of which powers of hyperparameters ``(T,)`` the log joints of many data sets are made.

    :ivar origin: of the latents, ``(D,)``.
    :ivar centre, powers: as of :class:`Quadratics`.
    :ivar places, values: settings ``(M, T)`` and ``(M + T, T)`` at which derivatives and values tell all terms apart.
    """

    log_joints: LogJoints
    origin: Tensor
    centre: Tensor
    powers: Tensor
    places: Tensor
    values: Tensor

    def of(self, numbers: Tensor) -> tuple[Quadratics, Tensor]:
        """Those of data sets ``(K,)``, and whether each is right elsewhere, ``(K,)`` bool."""
        weights, lines = (((x - self.centre) @ self.powers.mT).exp() for x in (self.places, self.values))
        b, A = self.log_joints.derivatives(self.origin, self.places, numbers)
        apart, num = torch.linalg.inv(weights), len(self.powers)
        b, A = apart @ b, (apart @ A.flatten(2)).view_as(A)
        values = self.log_joints.heights(self.origin, self.values, numbers)
        told = torch.linalg.solve(torch.cat([lines, self.values - self.centre], -1), values.mT).mT
        centre, powers, line = (pad(x, (0, 1)) for x in (self.centre, self.powers, told[:, num:]))
        found = Quadratics(int(numbers[0]), centre, powers, line, told[:, :num], b, A).along_axes()
        theta, u = self.places.mean(0), normal_draws(len(self.origin), seed=1).to(self.origin)
        height = self.log_joints.heights(u, theta.unsqueeze(0), numbers).squeeze(1)
        return found, (found.log_joint(u, pad(theta, (0, 1))) - height).abs() <= EXACT * (1.0 + height.abs())


def power_sums(log_joints: LogJoints, centre: Tensor, told: Tensor, origin: Tensor) -> PowerSums | None:
    """The terms of log joints, as derivatives of some of them tell; None where they are no such sum.

    What derivatives in the latents are as functions of the hyperparameters spans a space of few dimensions; the powers
    are those that lie in it.

    :param centre: hyperparameters about which all is looked at, ``(T,)``.
    :param told: numbers of the data sets that are looked at.
    :param origin: zeros ``(D,)``.
    """
    size = len(centre)
    if size > MOST_HYPERS:
        return None
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(NUM_SAMPLES, size, generator=generator, dtype=torch.float64).to(centre)
    sampled = centre + SPREAD * (2.0 * drawn - 1.0)
    b, A = log_joints.derivatives(origin, sampled, told)
    u = normal_draws(len(origin)).to(origin)
    value, height = (log_joints.heights(place, sampled, told) for place in (origin, u))
    if not bool(((value + b @ u - 0.5 * (A @ u) @ u - height).abs() <= EXACT * (1.0 + height.abs())).all()):
        return None
    scale = A.diagonal(dim1=-2, dim2=-1).abs().mean(1, keepdim=True).sqrt()  # of each latent, in each data set
    b, A = b / scale, A / (scale.unsqueeze(-1) * scale.unsqueeze(-2))
    ones = torch.ones_like(value[0].unsqueeze(-1))
    seen = torch.cat([ones, *((x / x.abs().amax()).transpose(0, 1).flatten(1) for x in (A, b))], -1)
    basis, sizes, _ = torch.linalg.svd(seen.nan_to_num(), full_matrices=False)
    basis = basis[:, sizes > EXACT * sizes[0]]
    powers = torch.cartesian_prod(*[POWERS.to(centre)] * size).reshape(-1, size) if size else centre.new_zeros(1, 0)
    functions = ((sampled - centre) @ powers.mT).exp()
    functions = functions / functions.norm(dim=0)
    within = (functions - basis @ (basis.mT @ functions)).norm(dim=0) < WITHIN
    functions, powers = functions[:, within], powers[within]
    if len(powers) != basis.shape[-1] or 2 * len(powers) > NUM_SAMPLES:
        return None
    places, values = (sampled[_telling(x)] for x in (functions, torch.cat([functions, sampled - centre], -1)))
    return PowerSums(log_joints, origin, centre, powers, places, values)


def _telling(functions: Tensor) -> Tensor:
    """As many rows of ``(S, M)`` as it has columns, each the farthest from the span of those before, ``(M,)``."""
    left, chosen = functions, list[int]()
    for _ in range(functions.shape[-1]):
        chosen.append(int(left.norm(dim=-1).argmax()))
        way = left[chosen[-1]] / left[chosen[-1]].norm()
        left = left - (left @ way).unsqueeze(-1) * way
    return torch.tensor(chosen, device=functions.device)
