"""What a posterior says of its independent blocks: the error of its evidence, and a check for each of them."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.curvature.choices import exact_hessian
from pyro_evidence.errors import BadInput
from pyro_evidence.laplace.approximation import LaplaceState
from pyro_evidence.laplace.blocks.error import (
    COMPARED,
    EvidenceError,
    by_laplace,
    element_names,
    evidence_error,
    letters,
)
from pyro_evidence.laplace.blocks.local import placed, spread
from pyro_evidence.laplace.blocks.marginal import Limits, Marginal, Place
from pyro_evidence.laplace.blocks.quadrature import marginal_of, no_blocks
from pyro_evidence.laplace.blocks.terms import Terms
from pyro_evidence.laplace.report import MANY
from pyro_evidence.numerics.importance import pareto_shapes
from pyro_evidence.program.failed_run import require_kept
from pyro_evidence.settings import check_count, check_seed, seeded
from pyro_evidence.threads import without_validation

MOST = 2**27  # of log densities of a check
NUMBERS = 2**23  # of a tensor of log densities that is held at a time


@dataclass(frozen=True)
class Blocks:
    """The independent blocks that hold a site's elements, given what blocks share at its mode; in their order.

    :ivar names: the first coordinate of each block.
    :ivar k_hat: Pareto shape of each block's importance weights, the exact density over Laplace's, ``(G,)``: above 0.7
        that block's draws are not to be trusted.
    :ivar log_integral: of each block by quadrature, nats, ``(G,)``, and ``laplace_error`` what Laplace's approximation
        of it lacks.
    :ivar mean: of the site's unconstrained coordinates by quadrature, and ``sd``, in its unconstrained shape.

    >>> worst = posterior.blocks("a").k_hat.argmax()  # doctest: +SKIP
    """

    names: tuple[str, ...]
    k_hat: Tensor
    log_integral: Tensor
    laplace_error: Tensor
    mean: Tensor
    sd: Tensor


class Blockwise:
    """A posterior whose independent blocks can be looked at."""

    state: LaplaceState

    @property
    def log_evidence(self) -> Tensor:
        """In nats, of the whole."""
        return self.state.log_evidence

    @property
    def _inside(self) -> LaplaceState:
        """The state whose blocks are meant."""
        return self.state

    @cached_property
    def log_evidence_error(self) -> EvidenceError:
        """How far the log evidence is off because few nodes stand for integrals, nats; not negative.

        With ``n`` nodes in each block, against ``n + 2``; with one, which is Laplace, against quadrature; where no
        blocks are independent (crossed effects, chains, graphs), the second-order term of Laplace's series, which is
        never added.  A float that also knows ``signed``, ``block`` (which contributes most), ``of_block``, ``shared``
        (what integrating the coordinates that blocks share around the blocks instead of beside them changes) and
        ``method``.
        """
        require_kept(self._inside.problem.joint, "log_evidence_error")
        with without_validation():
            return evidence_error(self._inside)

    def blocks(self, site: str, num_samples: int | None = None, seed: int = 0) -> Blocks:
        """The independent blocks that hold the elements of a latent site, each with a check of its own.

        :param num_samples: draws of each block, for its importance weights; by default 1,000, fewer of many data.
        :raises BadInput: for a name that is no latent site, or one that blocks share.
        :raises UnsupportedModel: where no blocks are independent.
        """
        check_seed(seed)
        require_kept(self._inside.problem.joint, "blocks(...)")
        marginal, joint = _marginal(self._inside), self._inside.problem.joint
        num_samples = check_count(
            "num_samples",
            _affordable(marginal, 1_000) if num_samples is None else num_samples,
            100,
            "The weights' tail is fitted to the largest of them.",
        )
        if not isinstance(site, str) or site not in joint.latents.slices:
            raise BadInput(f"blocks({site!r}): expected a latent site in blocks, one of {list(joint.latents.names)}.")
        p, part = marginal.partition, next(x for x in joint.latents if x.name == site)
        position = p.place[joint.latents.slices[site]]
        if not bool((position < len(p.own)).all()):
            raise BadInput(
                f"blocks({site!r}): the blocks share site '{site}'; expected one of which each block has elements of "
                f"its own: {_sites(marginal)}."
            )
        with without_validation(), torch.no_grad():
            found = _looked_at(marginal, self._inside, num_samples, seed)
        chosen = p.block[position].unique()
        first = torch.full((p.num_blocks,), p.size).scatter_reduce_(0, p.block, torch.arange(len(p.own)), "amin")
        names = element_names(joint, p.own[first[chosen]])
        numbers = (found.k_hat, found.log_integral, found.laplace_error)
        moments = (x[position].reshape(part.unconstrained_shape) for x in (found.mean, found.sd))
        return Blocks(names, *(x[chosen] for x in numbers), *moments)

    def _said_of_blocks(self) -> list[str]:
        """What ``summary()`` says of the log evidence's error, where it is above one nat.

        Where no blocks are independent, of models that are known by their factors alone: importance sampling tells of
        others.
        """
        problem = self._inside.problem
        if not problem.joint.kept:
            return []
        try:
            error = self.log_evidence_error
        except (ArithmeticError, RuntimeError):
            return []
        return letters(error, problem.nodes) if error.block or problem.structure.factors is not None else []

    @property
    def _is_many_blocks(self) -> bool:
        """Whether there are more coordinates than weights of joint draws tell of, in independent blocks."""
        problem = self._inside.problem
        found = int(problem.active.sum()) > MANY and problem.curvature is exact_hessian and problem.joint.kept
        return found and bool(self.log_evidence_error.block)

    def _checked_by_blocks(self, num_samples: int, seed: int) -> dict[str, Any]:
        """What importance weights of each block by itself say, given what blocks share at its mode."""
        state, marginal = self._inside, _marginal(self._inside)
        num = _affordable(marginal, num_samples)
        place = state.place or _place(marginal, state)
        with without_validation(), torch.no_grad():
            log_weights = log_weights_of(marginal.density.terms(state.theta), place, num, seed)
        shapes, weights = pareto_shapes(log_weights), (log_weights - log_weights.amax(0)).exp()
        error = weights.std(0) / weights.mean(0) / num**0.5
        # the logarithm of a mean of few weights is low by half its squared error
        gain = log_weights.logsumexp(0) - math.log(num) + 0.5 * error.square()
        gain -= by_laplace(place) if state.place is None else place.each[:-1]
        return {
            "pareto_k": float(shapes.max()),
            "exact": bool((log_weights.amax(0) - log_weights.amin(0) < 1e-8).all()) and not len(place.shared),
            "log_evidence_importance": float(self.log_evidence + gain.sum()),
            "log_evidence_importance_se": float(error.square().sum().sqrt()),
            "effective_sample_size": float((weights.sum(0).square() / weights.square().sum(0)).min()),
            "num_blocks": len(shapes),
            "blocks_above": int((shapes > 0.7).sum()),
        }


def _affordable(marginal: Marginal, most: int) -> int:
    """Draws of each block whose log densities are not too many."""
    data = sum(len(owner) for owner in marginal.partition.owner.values())
    return max(100, min(most, MOST // max(1, data)))


def _place(marginal: Marginal, state: LaplaceState) -> Place:
    """The blocks at the mode of everything."""
    p = marginal.partition
    with torch.enable_grad(), without_validation():
        return marginal.place(marginal.density.terms(state.theta), state.u[p.own], state.u[p.shared])


def _marginal(state: LaplaceState) -> Marginal:
    problem = state.problem
    limits = Limits(problem.tolerance, problem.slack)
    found = problem.marginal or marginal_of(problem.joint, problem.structure, problem.active, COMPARED, limits)
    if found is None:
        raise no_blocks(problem.joint, "blocks(...)")
    return found


def _sites(marginal: Marginal) -> list[str]:
    p, slices = marginal.partition, marginal.density.joint.latents.slices
    return [n for n, s in slices.items() if bool((p.place[s] < len(p.own)).all())]


def _looked_at(marginal: Marginal, state: LaplaceState, num_samples: int, seed: int) -> Blocks:
    """Every block: checks ``(G,)``, moments of all of their coordinates ``(n,)``."""
    p = marginal.partition
    terms, here = marginal.density.terms(state.theta), state.place or _place(marginal, state)
    centre = here.modes.own
    nodes = placed(p, centre, here.modes.tril, marginal.num)
    log_terms = _valued(terms, nodes.rows, here) + nodes.log_weights
    weights = log_terms.softmax(0)[:, p.block]
    mean = (weights * nodes.rows).sum(0)
    sd = (weights * (nodes.rows - mean).square()).sum(0).sqrt()
    log_weights = log_weights_of(terms, here, num_samples, seed)
    error = log_terms.logsumexp(0) - by_laplace(here)
    return Blocks((), pareto_shapes(log_weights), log_terms.logsumexp(0), error, mean, sd)


def log_weights_of(terms: Terms, here: Place, num_samples: int, seed: int) -> Tensor:
    """Log ratios of each block's density to Laplace's at draws of the latter, nats, ``(S, G)``."""
    p = terms.density.partition
    generator, rows, log_norm = seeded(seed), [], []
    means = here.modes.own.split([front.numel() for front in p.fronts])
    for front, L, mean in zip(p.fronts, here.modes.tril, means, strict=True):
        white = torch.randn(num_samples, *front.shape, generator=generator, dtype=torch.float64).to(here.shared)
        away = (spread(L) @ white.unsqueeze(-1)).squeeze(-1)
        rows.append((mean.reshape(front.shape) + away).flatten(1))
        square = white.square().sum(-1)
        log_det = L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        log_norm.append(log_det - 0.5 * square - 0.5 * front.shape[-1] * math.log(math.tau))
    return _valued(terms, torch.cat(rows, 1), here) - torch.cat(log_norm, 1)


def _valued(terms: Terms, rows: Tensor, here: Place) -> Tensor:
    """The log joint density of each block at many rows, ``(Q, G)``, a few rows at a time."""
    data = sum(len(owner) for owner in terms.density.partition.owner.values())
    size = max(1, NUMBERS // max(1, data))
    return torch.cat([terms(part, here.shared)[:, :-1] for part in rows.split(size)])
