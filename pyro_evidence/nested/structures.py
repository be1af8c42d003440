"""The log evidence of many structures of one model: of columns switched off in one batch, or fit by fit."""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.fitting.process_state import own_random_numbers
from pyro_evidence.laplace.approximation import Problem, laplace_problem
from pyro_evidence.laplace.restarts import MOST_COORDINATES
from pyro_evidence.nested.roles import marginalised_sites
from pyro_evidence.numerics import batched, evidence, newton
from pyro_evidence.numerics.batched import HELD_NUMBERS
from pyro_evidence.numerics.derivatives import generic_directions
from pyro_evidence.program.branching import MOST_RUNS, IndependentChoices, Model, Structures, fixed
from pyro_evidence.program.checks import Arguments
from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.settings import seeded
from pyro_evidence.structure.density import LinearDensity, NormalPrior, with_prior

TESTED = 64  # random structures at which a switched density is compared with the model's own, where there are too many
SPREAD = 0.4  # about one, of the numbers that stand for an element's value to see what it multiplies
Evaluate = Callable[[Structures], Tensor]  # to log p(D | structure), nats, (S,)


@dataclass(frozen=True, eq=False)
class Switched:
    """A density of linear predictors with columns switched off, which are others in each row.

    The prior of a coordinate whose column is off stays, and its integral is one.

    :ivar density: with all columns.
    :ivar problem: whose density it is.
    :ivar owner: which structure element multiplies each coordinate's column, -1 for none, ``(D,)``.
    """

    problem: Problem
    density: LinearDensity
    owner: Tensor

    @property
    def _theta(self) -> Tensor:
        return self.density.joint.initial_theta

    def switches(self, structures: Structures) -> Tensor:
        """The factor of each coordinate's column, ``(S, D)``."""
        elements = structures.elements().to(self._theta.device)
        ones = elements.new_ones(len(elements), 1)
        return torch.cat([elements, ones], -1)[:, self.owner]

    @property
    def num_rows(self) -> int:
        """Number of linear predictors."""
        return sum(part.J[..., 0].numel() for part in self.density.linear)

    @property
    def is_certain(self) -> bool:
        """Whether fits look for no other modes: likelihoods are log-concave, or there are too many coordinates."""
        joint = self.density.joint
        trace = joint.trace(joint.initial_u, self._theta)
        concave = not joint.discrete and all(part.likelihood.is_log_concave(trace) for part in self.density.linear)
        return concave or joint.latents.size > MOST_COORDINATES

    @property
    def _prior(self) -> NormalPrior:
        """That of all coordinates."""
        normal = self.density.parts(self._theta).normal
        assert normal is not None  # as :func:`switched` asks for
        return normal.detached

    def gradient(self, u: Tensor, switches: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint and its gradient in ``u``, detached."""
        likelihood, rise = self.density.likelihood_gradient(u * switches, self._theta)
        return self._prior.log_prob(u) + likelihood, self._prior.slope(u) + rise * switches

    def precision(self, u: Tensor, switches: Tensor) -> Tensor:
        """Minus the Hessian in ``u``, ``(R, D, D)``."""
        A = self.density.likelihood_precision(u * switches, self._theta)
        A = A * switches.unsqueeze(-1) * switches.unsqueeze(-2)
        return with_prior(A, self._prior.precision)

    def log_evidences(self, structures: Structures) -> Tensor:
        """Laplace's log evidence of each structure, nats, nan where no mode was found, ``(S,)``."""
        size = max(self.density.joint.latents.size**2, self.num_rows)
        parts = []
        for switches in self.switches(structures).split(max(1, HELD_NUMBERS // (4 * size))):
            start = self.density.joint.initial_u.expand(len(switches), -1)
            mode = newton.climb(self, self.precision, start, switches, self.problem.limits)
            tril, info = torch.linalg.cholesky_ex(mode.precision)
            log_det = 2.0 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            found = evidence.log_evidence(mode.log_joint, log_det, switches.shape[-1])
            parts.append(torch.where(mode.converged & (info == 0), found, torch.nan).detach())
        return torch.cat(parts)


def switched(model: Model, data: Arguments, product: IndependentChoices) -> Switched | None:
    """The density of all structures at once, where each of their elements, 0 or 1, multiplies columns of the design.

    Which element multiplies which column is read off the design at generic values in their places; then the density
    is compared with the model's own at a few structures.  None where hyperparameters are maximised or integrated, and
    where a structure does more than to leave columns out.
    """
    if any(sorted(support.tolist()) != [0, 1] for support in product.supports.values()):
        return None
    size = len(product.sizes)
    ones = torch.ones(1, size, dtype=torch.long)
    try:
        problem = laplace_problem(LogJoint(fixed(model, product.with_choices(ones).of(0)), *data))
        density, joint = problem.structure.linear, problem.joint
        if not isinstance(density, LinearDensity) or not density.gaussian or joint.hypers.size:
            return None
        if marginalised_sites(joint, None):
            return None
        factors, other = 1.0 + SPREAD * generic_directions(1, size, joint.initial_theta)[0], None
        with suppress(BadInput, UnsupportedModel, TypeError):  # generic values are nothing that a model has to bear
            other = laplace_problem(LogJoint(fixed(model, product.with_elements(factors)), *data)).structure.linear
        if not isinstance(other, LinearDensity) or len(other.linear) != len(density.linear):
            return None
        owner = _owners(density, other, factors)
        found = None if owner is None else Switched(problem, density, owner)
        return found if found is not None and _agrees(found, model, data, product) else None
    except (ArithmeticError, BadInput, UnsupportedModel):  # of one structure, of which its fit will tell
        return None


def _owners(density: LinearDensity, other: LinearDensity, factors: Tensor) -> Tensor | None:
    """The element whose factor each column of the other design has, -1 for none; None where that is not all."""
    first, second = (torch.cat([p.J.flatten(0, 1) for p in d.linear]) for d in (density, other))
    if first.shape != second.shape:
        return None
    ratio = (first * second).sum(0) / first.square().sum(0)
    choices = torch.cat([factors, factors.new_ones(1)])
    owner = (ratio.unsqueeze(-1) - choices).abs().nan_to_num(nan=torch.inf).argmin(-1)
    expected = first * choices[owner]
    return owner if bool(((second - expected).abs() <= density.joint.rounding * first.abs().amax()).all()) else None


def _agrees(found: Switched, model: Model, data: Arguments, product: IndependentChoices) -> bool:
    """Whether the density is the model's own in every structure; of too many in those at the ends and random ones."""
    size = len(product.sizes)
    ends, some = torch.eye(size, dtype=torch.long), torch.randint(2, (TESTED, size), generator=seeded(0))
    every = product.all() if 2**size <= MOST_RUNS else torch.cat([0 * ends[:1], ends, 1 - ends, some])
    structures = product.with_choices(every)
    structures = structures.rows((structures.log_prior > -torch.inf).nonzero().flatten())
    held, names = structures.of(0), list(structures.values)
    joint = LogJoint(lambda *args, **kwargs: fixed(model, held)(*args, **kwargs), *data)
    if joint.hypers.size or joint.latents.slices != found.density.joint.latents.slices:
        return False
    u = joint.initial(1, seed=0)

    def own(*values: Tensor) -> Tensor:
        held.update(zip(names, values, strict=True))
        return joint._one(u[0], joint.initial_theta)

    try:
        with torch.no_grad(), own_random_numbers():
            there = batched.apply(own, tuple(structures.values.values()), joint.row_bytes, own)
            parts = found.switches(structures).split(max(1, batched.BATCH_NUMBERS // found.num_rows))
            here = [found.gradient(u.expand(len(part), -1), part)[0] for part in parts]
    except (RuntimeError, ValueError):  # of one structure, of which its fit will tell
        return False
    return bool(joint.are_level(torch.cat(here), there).all())


@dataclass(frozen=True, eq=False)
class Search:
    """Result of a search among structures.

    :ivar structures: those that were evaluated.
    :ivar log_evidences: of each, nats, ``(S,)``.
    :ivar log_weights: whose exponentials estimate ``p(D)`` by their sum, and sums over structures by weighted ones:
        ``log p(D, structure)``, of some more for what was not evaluated, ``(S,)``.
    :ivar error: standard error of the log of their sum, nats.
    :ivar unvisited: the share of the posterior mass that was not looked at, two standard errors above its estimate; nan
        where no draw was of a structure that was not known before.
    """

    structures: Structures
    log_evidences: Tensor
    log_weights: Tensor
    error: float
    unvisited: float


def search(product: IndependentChoices, evaluate: Evaluate, most: int, seed: int) -> Search:
    """Structures found by steps from the best ones to their neighbours, and draws for all the others.

    A quarter of the evaluations go, best first, to neighbours of what is known: structures that differ in one element,
    and those with two elements exchanged.  The rest are drawn, each element by itself: first as often as it has its
    values given all others of the structures whose neighbours are known, then by what the draws so far say.  What is
    known counts as it is.  For the rest stand the structures that were drawn once: without that draw such a one would
    be unknown, and its importance weight, against the mixture of all rounds (Owen and Zhou, 2000), estimates what is.

    :param most: structures to evaluate.
    """
    sizes = torch.tensor(product.sizes)
    known: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[float, tuple[int, ...]]] = []
    expanded: list[tuple[int, ...]] = []

    def look(choices: Tensor) -> None:
        new = [row for row in dict.fromkeys(map(tuple, choices.tolist())) if row not in known]
        if not new:
            return
        structures = product.with_choices(torch.tensor(new))
        heights = (evaluate(structures) + structures.log_prior).nan_to_num(nan=-torch.inf)
        for row, height in zip(new, heights.tolist(), strict=True):
            known[row] = height
            heapq.heappush(frontier, (-height, row))

    look(torch.stack([torch.zeros_like(sizes), sizes - 1]))
    while frontier and (not expanded or len(known) < most // 4):
        _, row = heapq.heappop(frontier)
        look(_neighbours(torch.tensor(row), sizes))
        expanded.append(row)
    before, generator = len(known), seeded(seed)
    laws, draws = [_conditional(known, expanded, sizes)], torch.empty(0, len(sizes), dtype=torch.long)
    nums, left = [], most - before
    while True:
        begun, fresh, num = len(draws), set[tuple[int, ...]](), max(2, left // (ROUNDS * BATCHES))
        for _ in range(MOST_BATCHES):
            own = [torch.multinomial(law, num, replacement=True, generator=generator) for law in laws[-1]]
            draws = torch.cat([draws, torch.stack(own, -1)])
            fresh |= set(map(tuple, draws[-num:].tolist())) - known.keys()
            if len(known) + len(fresh) >= before + left * len(laws) // ROUNDS:
                break
        look(draws[begun:])
        nums.append(len(draws) - begun)
        log_qs = [torch.stack([p.log()[draws[:, b]] for b, p in enumerate(law)]).sum(0) for law in laws]
        log_nums = torch.tensor(nums, dtype=torch.float64).log()
        log_expected = (torch.stack(log_qs) + log_nums.unsqueeze(-1)).logsumexp(0)  # of how often each is drawn
        heights = torch.tensor(list(known.values()), dtype=torch.float64)
        places = {row: place for place, row in enumerate(known)}
        place = torch.tensor([places[row] for row in map(tuple, draws.tolist())])
        once = (place >= before) & (torch.bincount(place)[place] == 1)
        beside = torch.where(once, heights[place] - log_expected, -torch.inf)
        shift = float(torch.cat([heights, beside]).max())
        mass, unseen = (heights - shift).exp(), (beside - shift).exp()
        weights = mass + torch.zeros_like(mass).index_add(0, place, unseen)
        if len(laws) == ROUNDS:
            break
        rows, share = torch.tensor(list(known)), weights / weights.sum()
        new = [torch.bincount(rows[:, b], share, size) for b, size in enumerate(sizes.tolist())]
        laws.append([_guarded(0.5 * (one + other)) for one, other in zip(new, laws[-1], strict=True)])
    total = float(weights.sum())
    error = float((unseen.square() * (1.0 + log_expected.exp())).sum().sqrt()) / total
    unvisited = max(0.0, 1.0 - float(mass.sum()) / total / (1.0 + 2.0 * error))
    if not bool(once.any()) and len(known) < math.prod(product.sizes):  # no draw tells of those
        unvisited = math.nan
    structures = product.with_choices(torch.tensor(list(known)))
    return Search(structures, heights - structures.log_prior, weights.log() + shift, error, unvisited)


def _guarded(law: Tensor) -> Tensor:
    """Probabilities of which none is too small for importance weights."""
    law = law.clamp(min=GUARD)  # no value is left out
    return law / law.sum()


def _conditional(
    known: Mapping[tuple[int, ...], float], expanded: Sequence[tuple[int, ...]], sizes: Tensor
) -> list[Tensor]:
    """The probabilities of each element's values given the other elements, averaged over some structures.

    :param expanded: structures that differ from no unknown one in one element.
    """
    share = torch.tensor([known[row] for row in expanded], dtype=torch.float64).softmax(0)
    laws = []
    for b, size in enumerate(sizes.tolist()):
        rows = [[tuple(k if a == b else x for a, x in enumerate(row)) for k in range(size)] for row in expanded]
        heights = [[known[row] for row in neighbours] for neighbours in rows]
        laws.append(_guarded(share @ torch.tensor(heights, dtype=torch.float64).softmax(-1)))
    return laws


ROUNDS = 4  # of draws, each with the probabilities that those before have taught
BATCHES, MOST_BATCHES = 4, 64  # of draws in a round: if all are new structures, and if hardly any are
GUARD = 0.01  # least probability of each value of an element in draws of structures


def _neighbours(row: Tensor, sizes: Tensor) -> Tensor:
    """Structures with one element changed, and with two elements exchanged, ``(S, B)``."""
    others = [(b, k) for b, size in enumerate(sizes.tolist()) for k in range(size) if k != int(row[b])]
    pairs = [[a, b] for a in range(len(row)) for b in range(a) if row[a] != row[b] and sizes[a] == sizes[b]]
    changed = [row.index_fill(0, torch.tensor([b]), k) for b, k in others]
    return torch.stack([*changed, *(row.index_copy(0, torch.tensor(pair), row[pair[::-1]]) for pair in pairs)])
