"""Log joints of many data sets that are quadratic in the latents: a sum of terms times powers of hyperparameters.

The model runs a few times for each data set; its evidence at any hyperparameters is linear algebra after that.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from pyro_evidence.laplace.approximation import LaplaceBatch
from pyro_evidence.numerics.batched import CACHED_NUMBERS
from pyro_evidence.numerics.derivatives import normal_draws, passes_to, pullback
from pyro_evidence.numerics.linalg import most_independent
from pyro_evidence.structure.density import AutogradDensity

POWERS = torch.arange(-4.0, 5.0) / 2.0  # of positive numbers: roots and squares of spreads and of precisions
MOST_HYPERS = 3  # each with nine powers
NUM_SAMPLES = 32  # settings of the hyperparameters, twice as many as there may be terms
SPREAD = 1.5  # log units on either side over which they are spread: powers that are next differ by e there
EXACT = 1e-9  # relative size of what rounding leaves of derivatives of a sum over data
EQUAL = 1e-11  # relative difference of equal axes, of which rounding leaves a hundredth
WITHIN = 1e-6  # sine of the angle between a function and the span of others in which it lies


@dataclass(frozen=True, eq=False)
class Axes:
    r"""The terms of log evidences where all matrices of a data set are diagonal together; equal axes count as one.

    .. math:: a + \tfrac12 \sum_g (S_g / A_g - n_g \log A_g)

    ``a``, all ``A`` and all ``S`` are sums of exponentials of ``theta - theta_0``.

    :ivar log_scale: log determinant of what leads to the latents from there, ``(K,)``.
    :ivar num: ``n``, axes that are equal, ``(K, 1, G)``.
    :ivar powers: of the exponentials, ``(E, T)``.
    :ivar terms: their factors in ``a``, in ``A`` and in ``S``, ``(K, 1 + 2 G, E)``.
    """

    log_scale: Tensor
    num: Tensor
    powers: Tensor
    terms: Tensor

    @classmethod
    def of(cls, made: "Quadratics", log_scale: Tensor, terms: Tensor, b: Tensor) -> "Axes":
        """From the terms of precisions and of slopes at zero on each axis, ``(K, M, D)`` both."""
        order = (normal_draws(terms.shape[1]).to(terms) @ terms).argsort(-1).unsqueeze(1)  # the equal ones adjoin
        terms, b = (x.gather(-1, order.expand_as(x)) for x in (terms, b))
        differ = (terms.diff(dim=-1).abs() > EQUAL * terms[..., 1:].abs().sum(1, keepdim=True)).any(1, keepdim=True)
        group = pad(differ.cumsum(-1), (1, 0))
        zeros = terms.new_zeros(len(terms), 1, int(group.max()) + 1)

        def summed(x: Tensor) -> Tensor:
            return zeros.repeat(1, x.shape[1], 1).scatter_add(-1, group.expand_as(x), x)

        num, pairs = summed(torch.ones_like(terms[:, :1])), torch.triu_indices(*b.shape[1:2] * 2, device=b.device)
        A = torch.where(num > 0, summed(terms) / num, terms[..., :1])  # a group of none counts for nothing
        first, second = pairs[:, (b != 0).any(0)[pairs].all(0).any(-1)]
        S = summed(b[:, first] * b[:, second]) * (2.0 - (first == second).to(b)).unsqueeze(-1)
        own = torch.cat([made.a.unsqueeze(-1), A, torch.zeros_like(A)], -1)
        products = torch.cat([torch.zeros_like(S[..., :1]), torch.zeros_like(S), S], -1)
        powers = torch.cat([made.powers, made.powers[first] + made.powers[second]])
        return cls(log_scale, num, powers, torch.cat([own, products], 1).mT.contiguous())

    def _moments(self, rows: Tensor | slice, away: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The number above at ``theta - theta_0`` ``(r, T, J)``, not finite without a mode, ``(r, J)``, and both."""
        a, A, S = (self.terms[rows] @ (self.powers @ away).exp()).split([1, *[self.num.shape[-1]] * 2], 1)
        value = a.squeeze(1) + 0.5 * (S / A - self.num[rows].mT * A.log()).sum(1)
        return value + self.log_scale[rows].unsqueeze(-1), A, S

    def _orders(self, rows: Tensor | slice, away: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """That at one place ``(r, T, 1)``, its slope and its second derivatives ``(r, T, T)``."""
        value, A, S = self._moments(rows, away)
        each, num = self.terms[rows] * (self.powers @ away).exp().mT, self.num[rows].mT
        _, rise, moved = (each @ self.powers).split([1, *A.shape[1:2] * 2], 1)
        own = (torch.cat([torch.ones_like(A[:, :1]), -0.5 * (S / A + num) / A, 0.5 / A], 1) * each).sum(1)
        half = (rise / A).mT @ (((S / A + 0.5 * num) * rise - moved) / A)  # squares of large precisions overflow
        second = self.powers.mT @ (own.unsqueeze(-1) * self.powers) + 0.5 * (half + half.mT)
        return value, own @ self.powers, second


@dataclass(frozen=True, eq=False)
class Quadratics:
    r"""Log joints of data sets, quadratic in the latents at any hyperparameters.

    .. math:: \log p(D_k, u \mid \theta) = l_k'\delta + \sum_m e^{p_m'\delta} (a_{km} + b_{km}'u
        - \tfrac12 u' A_{km} u), \qquad \delta = \theta - \theta_0

    So linear models with normal noise have it, ``theta`` the logarithms of their spreads.

    :ivar first: number of the first.
    :ivar centre: ``theta_0``, ``(T,)``.
    :ivar powers: ``p``, ``(M, T)``.
    :ivar line: ``l``, ``(K, T)``.
    :ivar a, b, A: ``(K, M)``, ``(K, M, D)`` and ``(K, M, D, D)``; of matrices that all are diagonal what is on it.
    :ivar axes: on which all ``A`` of a data set are diagonal; None where there are none.
    """

    first: int
    centre: Tensor
    powers: Tensor
    line: Tensor
    a: Tensor
    b: Tensor
    A: Tensor
    axes: Axes | None = None

    def weights(self, theta: Tensor) -> Tensor:
        """The factor of each term at ``(..., T)``, ``(..., M)``."""
        return ((theta - self.centre) @ self.powers.mT).exp()

    @property
    def is_diagonal(self) -> bool:
        """Whether all ``A`` are, and what is on their diagonals is held."""
        return self.A.dim() == self.b.dim()

    def precisions(self, rows: Tensor | slice) -> Tensor:
        """``A`` of some rows as matrices, ``(r, M, D, D)``."""
        return self.A[rows].diag_embed() if self.is_diagonal else self.A[rows]

    def _rows(self, numbers: Tensor) -> Tensor | slice:
        """Which rows of these the data sets ``(r,)`` are: where possible a slice, which copies nothing."""
        rows = numbers.long() - self.first
        whole = slice(int(rows[0]), int(rows[0]) + len(rows)) if len(rows) else slice(0)
        return whole if torch.equal(rows, torch.arange(whole.start or 0, whole.stop).to(rows)) else rows

    def log_evidence(self, numbers: Tensor, theta: Tensor) -> Tensor:
        """The log evidence of data sets ``(r,)`` at settings ``(r, J, T)``, nats, ``(r, J)``; -inf without a mode."""
        size = theta.shape[1] * (self.A[0, 0].numel() if self.axes is None else sum(self.axes.terms.shape[1:]))
        num = max(1, CACHED_NUMBERS // size)
        found, of = list[Tensor](), self.axes or self
        for own, part in zip(numbers.split(num), theta.split(num), strict=True):
            rows, away = self._rows(own), (part - self.centre).mT  # settings last, along which sums are fast
            found.append(self._finite(of._moments(rows, away)[0], rows, away))
        return torch.cat(found)

    def _finite(self, value: Tensor, rows: Tensor | slice, away: Tensor) -> Tensor:
        """The value with what is not in the sums added."""
        value = value + (self.line[rows].unsqueeze(-1) * away).sum(1) + 0.5 * self.b.shape[-1] * math.log(math.tau)
        return value.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)

    def orders(self, numbers: Tensor, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The log evidence at ``(r, T)``, its slope and its second derivatives, ``(r, T, T)``."""
        rows, away = self._rows(numbers), (theta - self.centre).unsqueeze(-1)
        value, slope, second = (self.axes or self)._orders(rows, away)
        return self._finite(value, rows, away).squeeze(1), self.line[rows] + slope, second

    def _moments(self, rows: Tensor | slice, away: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As those of :class:`Axes`, then weights, slopes at zero and factors of precisions."""
        weights, num = (self.powers @ away).exp(), self.b.shape[-1]
        slope = self.b[rows].mT @ weights
        tril, info = torch.linalg.cholesky_ex((weights.mT @ self.precisions(rows).flatten(2)).unflatten(-1, (num, num)))
        log_det = torch.where(info == 0, 2.0 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1), torch.nan)
        squares = torch.linalg.solve_triangular(tril, slope.mT.unsqueeze(-1), upper=False).square().sum((-2, -1))
        value = (self.a[rows].unsqueeze(1) @ weights).squeeze(1) + 0.5 * (squares - log_det)
        return value, weights, slope, tril

    def _orders(self, rows: Tensor | slice, away: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As that of :class:`Axes`: those of the log of an integral are covariances of terms, beside their own."""
        value, weights, slope, tril = self._moments(rows, away)
        A, b, variance = self.precisions(rows), self.b[rows], torch.cholesky_inverse(tril.squeeze(1))
        mode = variance @ slope
        rise = weights * (b - (A @ mode.unsqueeze(1)).squeeze(-1))  # each has its factor: that of a sum may overflow
        spread = weights.unsqueeze(-1) * (A @ variance.unsqueeze(1))
        covariance = rise @ variance @ rise.mT + 0.5 * spread.flatten(2) @ spread.mT.flatten(2).mT
        expected = ((weights * b + rise) @ mode).squeeze(-1) - spread.diagonal(dim1=-2, dim2=-1).sum(-1)
        own = self.a[rows] * weights.squeeze(-1) + 0.5 * expected
        second = self.powers.mT @ (own.diag_embed() + covariance) @ self.powers
        return value, own @ self.powers, second

    def modes(self, theta: Tensor) -> LaplaceBatch:
        """Laplace's approximation, which is exact here, at ``(r, T + 1)``."""
        rows, away = self._rows(theta[:, -1]), (theta[:, :-1] - self.centre).unsqueeze(-1)
        value, _, slope, tril = self._moments(rows, away)
        u = torch.cholesky_solve(slope, tril[:, 0]).squeeze(-1)
        objective, active = self._finite(value, rows, away).squeeze(1), torch.ones_like(u) > 0
        return LaplaceBatch(theta, active, u, tril[:, 0], objective, ~active[:, 0])

    def follows(self, found: LaplaceBatch) -> Tensor:
        """The derivatives of modes in the hyperparameters, ``(r, D, T)``."""
        theta, numbers = found.theta[:, :-1], found.theta[:, -1]
        rows, weights = self._rows(numbers), self.weights(theta).unsqueeze(-1)
        forces = weights * (self.b[rows] - (self.precisions(rows) @ found.u[:, None, :, None]).squeeze(-1))
        return torch.cholesky_solve(forces.mT @ self.powers, found.tril)

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        """The log joint of each data set at one place ``(D,)`` and setting ``(T,)``, nats, ``(K,)``."""
        squares = self.A @ u.square() if self.is_diagonal else (self.A @ u) @ u
        return self.line @ (theta - self.centre) + (self.a + self.b @ u - 0.5 * squares) @ self.weights(theta)

    def row(self, index: int) -> "Quadratics":
        """That of one of the data sets."""
        own = slice(index, index + 1)
        parts = {"line": self.line[own], "a": self.a[own], "b": self.b[own], "A": self.precisions(own)}
        return replace(self, first=self.first + index, axes=None, **parts)

    def along_axes(self) -> "Quadratics":
        """These with ``axes``, where all data sets have them."""
        if self.is_diagonal:
            return replace(self, axes=Axes.of(self, torch.zeros_like(self.a[:, 0]), self.A, self.b))
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
        return replace(self, axes=Axes.of(self, -tril.diagonal(dim1=-2, dim2=-1).log().sum(-1), terms, b))


@dataclass(frozen=True, eq=False)
class QuadraticDensity(AutogradDensity):
    """The density of one log joint that is quadratic in the latents, without runs of the model.

    :ivar known: that log joint alone.
    """

    known: Quadratics = field(kw_only=True)

    def log_joint(self, u: Tensor, theta: Tensor) -> Tensor:
        line, weights = (theta - self.known.centre) @ self.known.line[0], self.known.weights(theta)
        squares = ((self.known.A[0] @ u[..., None, :, None]).squeeze(-1) * u.unsqueeze(-2)).sum(-1)
        return line + (weights * (self.known.a[0] + u @ self.known.b[0].mT - 0.5 * squares)).sum(-1)

    def gradient(self, u: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint and its gradient in ``u``."""
        fall = (self.precision(u, theta) @ u.unsqueeze(-1)).squeeze(-1)
        return self.log_joint(u, theta), self.known.weights(theta) @ self.known.b[0] - fall

    def precision(self, u: Tensor, theta: Tensor) -> Tensor:
        """Minus the Hessian in ``u``, the same everywhere, shape ``(R, D, D)``."""
        A = (self.known.weights(theta) @ self.known.A[0].flatten(1)).unflatten(-1, self.known.A.shape[-2:])
        return A.expand(len(u), -1, -1)


@dataclass(frozen=True, eq=False)
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


@dataclass(frozen=True, eq=False)
class Probing:
    """The terms of all entries of the Hessian and of the slope, by derivatives at few settings along few ways.

    The slope is a row below those of the Hessian.

    :ivar at_zero: terms of values at zero latents that all data sets have, ``(M + T,)``.
    :ivar values, value_solver: settings ``(V, T)`` at which values tell the others, which they are multiplied by.
    :ivar places, weights: settings, ``(J, T)``, and the factors of terms there, ``(J, M)``.
    :ivar ways: along which the slope is differentiated, ``(W, D)``.
    :ivar entries: which entries of ``common``, flat, have other terms than those of all, ``(E,)``.
    :ivar way, column: where each of these is read, ``(E,)`` each.
    :ivar known: what terms that all data sets have add to these, ``(M, W + 1, D)``.
    :ivar common: these terms, ``(M, D + 1, D)``; ``(M, 2, D)`` of the diagonal and of the slope, where no data set has
        an entry of the Hessian beside it.
    :ivar solver: the others of these entries from what is left of them at the settings, ``(E, M, J)``.
    """

    at_zero: Tensor
    values: Tensor
    value_solver: Tensor
    places: Tensor
    weights: Tensor
    ways: Tensor
    entries: Tensor
    way: Tensor
    column: Tensor
    known: Tensor
    common: Tensor
    solver: Tensor

    @classmethod
    def of(cls, values: Sequence[Tensor], sampled: Tensor, functions: Tensor, common: Tensor, own: Tensor) -> "Probing":
        """The one by few settings and ways.

        Rows of the Hessian are summed along one way where each entry stands alone in one of its two places.  Powell and
        Toint (1979).

        :param values: the fields of values.
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
        ways = one_hot(way, num_ways).mT.to(common)
        some = own.any(0).flatten()
        some[0] = True  # one at least
        entries = some.nonzero().squeeze(-1)
        rows, solver = _telling(functions, own.flatten(1)[:, entries])
        beside = (seen | common[:, :-1].any(0)).fill_diagonal_(False)
        where = read_in.flatten()[entries], read_at.flatten()[entries]
        known = torch.cat([ways @ common[:, :-1], common[:, -1:]], 1)
        if not bool(beside.any()):
            common = torch.stack([common[:, :-1].diagonal(dim1=-2, dim2=-1), common[:, -1]], 1)
            entries = entries % len(order) + torch.where(entries < order.numel() ** 2, 0, len(order))
        settings = values[0], values[1], values[2], sampled[rows], functions[rows]
        return cls(*settings, ways, entries, *where, known, common, solver)

    def terms(self, found: Tensor) -> tuple[Tensor, Tensor]:
        """``b`` and ``A`` of :class:`Quadratics` from derivatives ``(K, J, W + 1, D)``."""
        left = (found - torch.tensordot(self.weights, self.known, 1))[:, :, self.way, self.column]
        terms = self.common.repeat(len(found), 1, 1, 1)
        terms.flatten(2).index_add_(2, self.entries, torch.einsum("emr,kre->kme", self.solver, left))
        return terms[:, :, -1], terms[:, :, 0] if terms.shape[2] == 2 else terms[:, :, :-1]


@dataclass(frozen=True, eq=False)
class PowerSums:
    """Powers of hyperparameters ``(T,)`` that the log joints of many data sets are made of.

    :ivar origin: of the latents, ``(D,)``.
    :ivar centre, powers: as of :class:`Quadratics`.
    :ivar probings: the next where one is not right.
    """

    log_joints: LogJoints
    origin: Tensor
    centre: Tensor
    powers: Tensor
    probings: tuple[Probing, ...]

    def of(self, numbers: Tensor) -> tuple[Quadratics, Tensor]:
        """Those of data sets ``(K,)``, and whether each is right elsewhere, ``(K,)`` bool."""
        theta, u = self.probings[-1].values.mean(0), normal_draws(len(self.origin), seed=1).to(self.origin)
        for probing in self.probings:
            places = torch.cat([self.origin.expand(len(probing.values), -1), u.unsqueeze(0)])
            heights = self.log_joints.heights(places, torch.cat([probing.values, theta.unsqueeze(0)]), numbers)
            told, height = probing.at_zero + heights[:, :-1] @ probing.value_solver.mT, heights[:, -1]
            found = probing.terms(self.log_joints.derivatives(self.origin, probing.places, numbers, probing.ways))
            a, line = told[:, : len(self.powers)], told[:, len(self.powers) :]
            made = Quadratics(int(numbers[0]), self.centre, self.powers, line, a, *found)
            right = (made.log_joint(u, theta) - height).abs() <= EXACT * (1.0 + height.abs())
            if bool(right.all()):
                break
        return made.along_axes(), right


def power_sums(log_joints: LogJoints, centre: Tensor, told: Tensor, origin: Tensor) -> PowerSums | None:
    """The terms of log joints, as derivatives of some of them tell; None where they are no such sum.

    What derivatives in the latents are as functions of the hyperparameters spans a space of few dimensions; the powers
    are those that lie in it.  Terms that are nowhere or everywhere the same among these data sets are looked for in no
    other, unless a value elsewhere shows that it has them; so are terms of values, all or none.

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
    own, at_zero = (torch.zeros_like(lines[0]), sampled[rows], solver[0]), heights[1]
    same = (solver[0] @ at_zero[0, rows], sampled[:0], solver[0, :, :0])
    values = same if bool((at_zero == at_zero[0]).all()) else own, own
    probings = tuple(Probing.of(of, sampled, functions, *each) for of, each in zip(values, known, strict=True))
    return PowerSums(log_joints, origin, centre, powers, probings)


def _telling(functions: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """As few of the rows of ``(S, M)`` as tell terms from values, of some such choices the best.

    :param own: which terms there may be in each value, ``(M, E)`` bool.
    :return: rows ``(J,)``, and what the values there are to be multiplied by, ``(E, M, J)``.
    """
    order, num = most_independent(functions / functions.norm(dim=0)).tolist(), max(1, int(own.sum(0).max()))
    order += [row for row in range(len(functions)) if row not in order]
    each = torch.tensor(order, device=own.device).unfold(0, num, 1)
    kinds, kind = own.unique(dim=1, return_inverse=True)
    solvers = [torch.linalg.pinv(kinds.mT.unsqueeze(-2) * functions[rows]) for rows in each]
    best = int(torch.stack([solver.abs().max() for solver in solvers]).argmin())
    return each[best], solvers[best][kind]
