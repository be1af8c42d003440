"""Log joints of many data sets that are quadratic in the latents: a sum of terms times powers of hyperparameters.

The model runs a few times for each data set; its evidence at any hyperparameters is linear algebra after that.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyro_evidence.laplace.approximation import LaplaceRows
from pyro_evidence.numerics.batched import CACHED_NUMBERS
from pyro_evidence.numerics.derivatives import normal_draws, passes_to, pullback
from pyro_evidence.structure.density import AutogradDensity

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

    def _rows(self, theta: Tensor) -> Tensor | slice:
        """Which rows of these the settings ``(r, T + 1)`` are of: where possible a slice, which copies nothing."""
        rows = theta[:, -1].long() - self.first
        whole = slice(int(rows[0]), int(rows[0]) + len(rows)) if len(rows) else slice(0)
        return whole if torch.equal(rows, torch.arange(whole.start or 0, whole.stop).to(rows)) else rows

    def log_evidence(self, theta: Tensor) -> Tensor:
        """The log evidence at settings of each data set ``(r, J, T + 1)``, nats, ``(r, J)``; -inf without a mode."""
        return torch.cat([self._value(part)[0] for part in self._parts(theta)])

    def evidence(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """That, and its slope in the settings ``(r, J, T + 1)``."""
        found = [self._sloped(part) for part in self._parts(theta)]
        return torch.cat([value for value, _ in found]), torch.cat([slope for _, slope in found])

    def _parts(self, theta: Tensor) -> tuple[Tensor, ...]:
        size = theta.shape[1] * (self.A if self.axes is None else self.axes[0])[0, 0].numel()
        return theta.split(max(1, CACHED_NUMBERS // size))

    def _value(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The log evidence, the slope at zero ``(r, D, J)``, and precisions along axes or the factor of the matrix."""
        rows, away, num = self._rows(theta[:, 0]), (theta - self.centre).mT, self.b.shape[-1]
        weights = (self.powers @ away).exp()  # settings last, along which sums are fast
        if self.axes is None:
            slope = self.b[rows].mT @ weights
            A, info = torch.linalg.cholesky_ex((weights.mT @ self.A[rows].flatten(2)).unflatten(-1, (num, num)))
            log_det = torch.where(info == 0, 2.0 * A.diagonal(dim1=-2, dim2=-1).log().sum(-1), torch.nan)
            half = torch.linalg.solve_triangular(A, slope.mT.unsqueeze(-1), upper=False)
            squares = half.square().sum((-2, -1))
        else:
            terms, b, log_scale = (x[rows] for x in self.axes)
            A, slope = terms.mT @ weights, b.mT @ weights
            log_det = A.log().sum(-2) - 2.0 * log_scale.unsqueeze(-1)  # nan where one is negative
            squares = (slope.square() / A).sum(-2)
        value = (self.line[rows].unsqueeze(1) @ away + self.a[rows].unsqueeze(1) @ weights).squeeze(1)
        value = value + 0.5 * (num * math.log(math.tau) + squares - log_det)
        return torch.where(log_det.isfinite(), value, -torch.inf), slope, A

    def _moments(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The log evidence, the mode, and the variance along axes or the matrix of covariances."""
        value, slope, A = self._value(theta)
        if self.axes is not None:
            return value, (slope / A).mT, A.reciprocal().mT
        variance = torch.cholesky_inverse(A)
        return value, (variance @ slope.mT.unsqueeze(-1)).squeeze(-1), variance

    def _sloped(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        value, mode, variance = self._moments(theta)
        rows = self._rows(theta[:, 0])
        if self.axes is None:
            terms, b = self.A[rows].flatten(2), self.b[rows]
            moments = (mode.unsqueeze(-1) * mode.unsqueeze(-2) + variance).flatten(2)
        else:
            terms, b, moments = self.axes[0][rows], self.axes[1][rows], mode.square() + variance
        expected = self.a[rows].unsqueeze(1) + mode @ b.mT - 0.5 * moments @ terms.mT  # of terms, by the posterior
        return value, self.line[rows].unsqueeze(1) + (self.weights(theta) * expected) @ self.powers

    def curvature(self, theta: Tensor) -> Tensor:
        """Minus the second derivatives of the log evidence at ``(r, T + 1)``, ``(r, T + 1, T + 1)``.

        Those of the log of an integral are covariances of the terms by the posterior, beside their own.
        """
        _, mode, variance = (x.squeeze(1) for x in self._moments(theta.unsqueeze(1)))
        rows, weights = self._rows(theta), self.weights(theta).unsqueeze(-1)
        if self.axes is None:
            A, b, a = self.A[rows], self.b[rows], self.a[rows]
            rise = b - (A @ mode[:, None, :, None]).squeeze(-1)
            spread = A @ variance.unsqueeze(1)
            covariance = rise @ variance @ rise.mT + 0.5 * spread.flatten(2) @ spread.mT.flatten(2).mT
            squares = spread.diagonal(dim1=-2, dim2=-1).sum(-1) + ((b - rise) * mode.unsqueeze(1)).sum(-1)
        else:
            A, b, a = self.axes[0][rows], self.axes[1][rows], self.a[rows]
            rise, spread = b - A * mode.unsqueeze(1), A * variance.unsqueeze(1)
            covariance = (rise * variance.unsqueeze(1)) @ rise.mT + 0.5 * spread @ spread.mT
            squares = (spread + (b - rise) * mode.unsqueeze(1)).sum(-1)
        expected = a + (b @ mode.unsqueeze(-1)).squeeze(-1) - 0.5 * squares
        own = (weights.squeeze(-1) * expected).diag_embed()
        return -self.powers.mT @ (own + weights * covariance * weights.mT) @ self.powers

    def modes(self, theta: Tensor) -> LaplaceRows:
        """Laplace's approximation, which is exact here, at ``(r, T + 1)``."""
        rows, weights = self._rows(theta), self.weights(theta).unsqueeze(1)
        A = (weights @ self.A[rows].flatten(2)).unflatten(-1, self.A.shape[2:]).squeeze(1)
        tril = torch.linalg.cholesky_ex(A).L
        u = torch.cholesky_solve((weights @ self.b[rows]).mT, tril).squeeze(-1)
        objective, active = self.log_evidence(theta.unsqueeze(1)).squeeze(1), torch.ones_like(u) > 0
        return LaplaceRows(theta, active, u, tril, objective, ~active[:, 0])

    def follows(self, found: LaplaceRows) -> Tensor:
        """The derivatives of modes in the hyperparameters, ``(r, D, T)``."""
        rows, weights = self._rows(found.theta), self.weights(found.theta).unsqueeze(-1)
        forces = weights * (self.b[rows] - (self.A[rows] @ found.u[:, None, :, None]).squeeze(-1))
        return torch.cholesky_solve(forces.mT @ self.powers[:, :-1], found.tril)

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        """The log joint of each data set at one place ``(D,)`` and setting ``(T + 1,)``, nats, ``(K,)``."""
        terms = self.a + self.b @ u - 0.5 * (self.A @ u) @ u
        return self.line @ (theta - self.centre) + terms @ self.weights(theta)

    def row(self, index: int) -> "Quadratics":
        """That of one of the data sets."""
        own = {n: getattr(self, n)[index : index + 1] for n in ("line", "a", "b", "A")}
        return replace(self, first=self.first + index, axes=None, **own)

    def along_axes(self) -> "Quadratics":
        """These with ``axes``, where all data sets have them."""
        terms = self.A.diagonal(dim1=-2, dim2=-1)
        if bool((self.A.count_nonzero((-2, -1)) == terms.count_nonzero(-1)).all()):
            return replace(self, axes=(terms.contiguous(), self.b, torch.zeros_like(self.a[:, 0])))
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
class QuadraticDensity(AutogradDensity):
    """The density of one log joint that is quadratic in the latents, without runs of the model.

    :ivar known: that log joint alone.
    """

    known: Quadratics = field(kw_only=True)

    def _weights(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The part free of the latents and of powers, ``(...)``, and the factors of the terms at ``(..., T)``."""
        away = theta - self.known.centre[:-1]
        return away @ self.known.line[0, :-1], (away @ self.known.powers[:, :-1].mT).exp()

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        line, weights = self._weights(theta)
        squares = ((self.known.A[0] @ u[..., None, :, None]).squeeze(-1) * u.unsqueeze(-2)).sum(-1)
        return line + (weights * (self.known.a[0] + u @ self.known.b[0].mT - 0.5 * squares)).sum(-1)

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint and its gradient in ``u``."""
        fall = (self.precision(u, theta) @ u.unsqueeze(-1)).squeeze(-1)
        return self.log_joint(u, theta), self._weights(theta)[1] @ self.known.b[0] - fall

    def precision(self, u: Tensor, theta: Tensor) -> Tensor:
        """Minus the Hessian in ``u``, the same everywhere, shape ``(R, D, D)``."""
        A = (self._weights(theta)[1] @ self.known.A[0].flatten(1)).unflatten(-1, self.known.A.shape[-2:])
        return A.expand(len(u), -1, -1)


@dataclass(frozen=True)
class LogJoints:
    """Log joints of data sets at settings of their hyperparameters, as many together as there is room for.

    :ivar f: of data sets ``(K,)`` at places ``(K, J, D)`` and settings ``(J, T)``, nats, ``(K, J)``.
    :ivar at_once: settings of data sets whose second derivatives are made together.
    """

    f: Callable[[Tensor, Tensor, Tensor], Tensor]
    at_once: int

    def heights(self, u: Tensor, theta: Tensor, numbers: Tensor) -> Tensor:
        """The log joint of each data set at places ``(D,)`` or ``(J, D)`` and settings ``(J, T)``, nats, ``(K, J)``."""
        parts = numbers.split(max(1, self.at_once * u.shape[-1] // len(theta)))
        with torch.no_grad():
            return torch.cat([self.f(u.expand(len(part), len(theta), -1), theta, part) for part in parts])

    def derivatives(self, u: Tensor, theta: Tensor, numbers: Tensor, ways: Tensor) -> Tensor:
        """Slopes at one place ``(D,)``, and how they fall along ways ``(W, D)`` before them, ``(K, J, W + 1, D)``."""
        parts = numbers.split(max(1, self.at_once // len(theta)))
        return torch.cat([self._derivatives(u, theta, part, ways) for part in parts])

    def _derivatives(self, u: Tensor, theta: Tensor, numbers: Tensor, ways: Tensor) -> Tensor:
        places = u.expand(len(numbers), len(theta), -1).clone().requires_grad_()
        slope = pullback(self.f(places, theta, numbers).sum(), places, create_graph=True)
        each = ways[:, None, None].expand(-1, *places.shape)
        (rises,) = passes_to(slope, [places], each, len(each), False)  # together each has a copy of the data
        return torch.cat([-rises, slope.detach().unsqueeze(0)]).movedim(0, 2)


@dataclass(frozen=True)
class Probing:
    """How derivatives at few settings, along few ways, tell the terms of all entries of the Hessian and of the slope.

    The slope is a row below those of the Hessian.

    :ivar places: settings, ``(J, T)``.
    :ivar ways: along which the slope is differentiated, ``(W, D)``.
    :ivar way, column: where each entry is read, ``(D + 1, D)`` each.
    :ivar common: terms that all data sets have, ``(M, D + 1, D)``.
    :ivar solver: the others of each entry from what is left of it at the settings, ``(D + 1, D, M, J)``.
    """

    places: Tensor
    ways: Tensor
    way: Tensor
    column: Tensor
    common: Tensor
    solver: Tensor

    @classmethod
    def of(cls, sampled: Tensor, functions: Tensor, common: Tensor, own: Tensor) -> "Probing":
        """The one by few settings and ways.

        Rows of the Hessian are summed along one way where each entry stands alone in one of its two places.  Powell and
        Toint (1979).

        :param sampled: settings to choose from, ``(S, T)``, and the factors of the terms there, ``(S, M)``.
        :param own: which terms of which entry each data set has of its own, ``(M, D + 1, D)`` bool.
        """
        seen = own[:, :-1].any(0)
        seen = seen | seen.mT
        order, left = seen.sum(-1).argsort(descending=True, stable=True), torch.ones_like(seen[0])
        way, asked, summed = torch.zeros_like(order), torch.zeros_like(seen), torch.zeros_like(seen)
        for i in order.tolist():
            wanted = seen[i] & left  # of the others the row before has it
            free = ~(summed & wanted | asked & seen[i]).any(-1)
            way[i] = k = int(free.nonzero()[0])
            asked[k], summed[k], left[i] = asked[k] | wanted, summed[k] | seen[i], False
        rank, column, num_ways = order.argsort(), torch.arange(len(order)).to(order), int(way.max()) + 1
        is_own = rank.unsqueeze(-1) <= rank
        read_in = torch.cat([torch.where(is_own, way.unsqueeze(-1), way), torch.full_like(way, num_ways)[None]])
        read_at = torch.cat([torch.where(is_own, column, column.unsqueeze(-1)), column[None]])
        ways = torch.nn.functional.one_hot(way, num_ways).mT.to(common)
        rows, solver = _telling(functions, own)
        return cls(sampled[rows], ways, read_in, read_at, common, solver)

    def terms(self, found: Tensor, weights: Tensor) -> Tensor:
        """All terms ``(K, M, D + 1, D)`` from derivatives ``(K, J, W + 1, D)``.

        :param weights: the factors of terms at the settings, ``(J, M)``.
        """
        known = torch.cat([self.ways @ self.common[:, :-1], self.common[:, -1:]], 1)
        left = (found - torch.tensordot(weights, known, 1))[:, :, self.way, self.column]
        return self.common + torch.einsum("ijmr,krij->kmij", self.solver, left)


@dataclass(frozen=True)
class PowerSums:
    """Of which powers of hyperparameters ``(T,)`` the log joints of many data sets are made.

    :ivar origin: of the latents, ``(D,)``.
    :ivar centre, powers: as of :class:`Quadratics`.
    :ivar probings: of derivatives, the next where one is not right.
    :ivar values: settings ``(M + T, T)`` at which values tell all terms, and what they are to be multiplied by.
    """

    log_joints: LogJoints
    origin: Tensor
    centre: Tensor
    powers: Tensor
    probings: tuple[Probing, ...]
    values: Tensor
    solver: Tensor

    def weights(self, theta: Tensor) -> Tensor:
        """The factor of each term at ``(J, T)``, ``(J, M)``."""
        return ((theta - self.centre) @ self.powers.mT).exp()

    def of(self, numbers: Tensor) -> tuple[Quadratics, Tensor]:
        """Those of data sets ``(K,)``, and whether each is right elsewhere, ``(K,)`` bool."""
        theta, u = self.values.mean(0), normal_draws(len(self.origin), seed=1).to(self.origin)
        places = torch.cat([self.origin.expand(len(self.values), -1), u.unsqueeze(0)])
        heights = self.log_joints.heights(places, torch.cat([self.values, theta.unsqueeze(0)]), numbers)
        told, height, num = heights[:, :-1] @ self.solver.mT, heights[:, -1], len(self.powers)
        centre, powers, line = (pad(x, (0, 1)) for x in (self.centre, self.powers, told[:, num:]))
        for probing in self.probings:
            found = self.log_joints.derivatives(self.origin, probing.places, numbers, probing.ways)
            terms = probing.terms(found, self.weights(probing.places))
            made = Quadratics(int(numbers[0]), centre, powers, line, told[:, :num], terms[:, :, -1], terms[:, :, :-1])
            right = (made.log_joint(u, pad(theta, (0, 1))) - height).abs() <= EXACT * (1.0 + height.abs())
            if bool(right.all()):
                break
        return made.along_axes(), right


def power_sums(log_joints: LogJoints, centre: Tensor, told: Tensor, origin: Tensor) -> PowerSums | None:
    """The terms of log joints, as derivatives of some of them tell; None where they are no such sum.

    What derivatives in the latents are as functions of the hyperparameters spans a space of few dimensions; the powers
    are those that lie in it.  Terms that are nowhere or everywhere the same among these data sets are looked for in no
    other, unless a value elsewhere shows that it has them.

    :param centre: hyperparameters about which all is looked at, ``(T,)``.
    :param told: numbers of the data sets that are looked at.
    :param origin: zeros ``(D,)``.
    """
    size, num = len(centre), len(origin)
    if size > MOST_HYPERS:
        return None
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(NUM_SAMPLES, size, generator=generator, dtype=torch.float64).to(centre)
    sampled = centre + SPREAD * (2.0 * drawn - 1.0)
    u = normal_draws(num).to(origin)
    heights = torch.stack([log_joints.heights(step * u, sampled, told) for step in (-1.0, 0.0, 1.0, 2.0)])
    if not bool((heights.diff(n=3, dim=0).abs() <= EXACT * (1.0 + heights.abs().amax(0))).all()):
        return None
    found = log_joints.derivatives(origin, sampled, told, torch.eye(num).to(origin))
    scale = found[:, :, :-1].diagonal(dim1=-2, dim2=-1).abs().mean(1).sqrt()  # of each latent, in each data set
    scales = torch.cat([scale, torch.ones_like(scale[:, :1])], -1).unsqueeze(-1) * scale.unsqueeze(-2)
    A, b = (found / scales.unsqueeze(1)).split([num, 1], 2)
    ones = torch.ones_like(sampled[:, :1])
    seen = torch.cat([ones, *((x / x.abs().amax()).transpose(0, 1).flatten(1) for x in (A, b))], -1)
    basis, sizes, _ = torch.linalg.svd(seen.nan_to_num(), full_matrices=False)
    basis = basis[:, sizes > EXACT * sizes[0]]
    powers = torch.cartesian_prod(*[POWERS.to(centre)] * size).reshape(-1, size) if size else centre.new_zeros(1, 0)
    functions = ((sampled - centre) @ powers.mT).exp()
    within = (functions - basis @ (basis.mT @ functions)).norm(dim=0) < WITHIN * functions.norm(dim=0)
    functions, powers = functions[:, within], powers[within]
    if len(powers) != basis.shape[-1] or 2 * len(powers) > NUM_SAMPLES:
        return None
    lines = torch.cat([functions, sampled - centre], -1)
    rows, solver = _telling(lines, torch.ones_like(lines[0]).unsqueeze(-1) > 0)
    terms = (torch.linalg.pinv(functions) @ found.flatten(2)).unflatten(2, (num + 1, num))
    mean, rounding = terms.mean(0), EXACT * scales.unsqueeze(1)
    other = ((terms - mean).abs() > rounding).any(0)
    common = torch.where(other | (terms.abs() <= rounding).all(0), 0.0, mean)
    known = ((common, other), (torch.zeros_like(common), torch.ones_like(other)))
    probings = tuple(Probing.of(sampled, functions, *each) for each in known)
    return PowerSums(log_joints, origin, centre, powers, probings, sampled[rows], solver[0])


def _telling(functions: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """As few of the rows of ``(S, M)`` as tell terms from values, of some such choices the best.

    :param own: which terms there may be in each value, ``(M, ...)`` bool.
    :return: rows ``(J,)``, and what the values there are to be multiplied by, ``(..., M, J)``.
    """
    left, order, num = functions / functions.norm(dim=0), list[int](), max(1, int(own.sum(0).max()))
    for _ in range(functions.shape[-1]):  # each the farthest from the span of those before
        order.append(int(left.norm(dim=-1).argmax()))
        way = left[order[-1]] / left[order[-1]].norm()
        left = left - (left @ way).unsqueeze(-1) * way
    order += [row for row in range(len(functions)) if row not in order]
    each = torch.tensor(order, device=own.device).unfold(0, num, 1)
    kinds, kind = own.flatten(1).unique(dim=1, return_inverse=True)
    solvers = [torch.linalg.pinv(kinds.mT.unsqueeze(-2) * functions[rows]) for rows in each]
    best = int(torch.stack([solver.abs().max() for solver in solvers]).argmin())
    return each[best], solvers[best][kind].unflatten(0, own.shape[1:])
