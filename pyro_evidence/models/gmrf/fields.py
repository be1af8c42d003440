"""Fields on the nodes of a graph: neighbours are alike."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.utils import broadcast_all

from pyro_evidence.errors import BadInput
from pyro_evidence.models.gmrf.field import (
    LOG_TWO_PI,
    GaussianField,
    Skeleton,
    anchor_precision,
    log_normaliser_at,
    only_first,
    parameters,
    repeated,
)
from pyro_evidence.precision.dense import StructuredPrecision
from pyro_evidence.precision.elimination import components


@dataclass(frozen=True, eq=False)
class Neighbours:
    """A graph, looked at once: give it in place of its edges to a field that a model makes at each run.

    :param edges: pairs of nodes, ``(E, 2)`` long, each pair once.
    :param size: number of nodes; by default one more than the highest.
    :raises BadInput: for an edge of a node with itself, a pair given twice, a node without neighbours.
    """

    edges: Tensor
    size: int = 0

    def __post_init__(self) -> None:
        edges = self.edges
        if edges.dim() != 2 or edges.shape[-1] != 2 or edges.is_floating_point() or not len(edges):
            raise BadInput(f"edges of shape {tuple(edges.shape)}, {edges.dtype}; expected pairs of nodes (E, 2), long.")
        if not self.size:
            object.__setattr__(self, "size", int(edges.max()) + 1)
        _check_edges(edges, self.size)

    @cached_property
    def part(self) -> Tensor:
        """The connected part of each node, from 0 on, ``(n,)``."""
        return torch.unique(components(self.size, self.edges), return_inverse=True)[1]

    @cached_property
    def members(self) -> Tensor:
        """Number of nodes of each connected part, ``(m,)``."""
        return torch.bincount(self.part)

    @cached_property
    def skeleton(self) -> Skeleton:
        """Differences along the edges; the first node of each part is its anchor."""
        null = torch.nn.functional.one_hot(self.part).double() / self.members.double().sqrt()
        anchors = null.bool().long().argmax(0)
        return Skeleton(torch.cat([self.edges, anchors.unsqueeze(-1).expand(-1, 2)]), null)

    @cached_property
    def coefficients(self) -> Tensor:
        """Of each edge and anchor, ``(E + m, 2)`` float64."""
        edge = torch.tensor([1.0, -1.0], dtype=torch.float64, device=self.edges.device)
        return torch.cat([edge.expand(len(self.edges), 2), only_first(len(self.members), 2, edge)])

    @cached_property
    def _factor(self) -> StructuredPrecision:
        return self.skeleton.factorised(self.coefficients, torch.ones_like(self.coefficients[:, 0]))

    @cached_property
    def unit_log_det(self) -> float:
        """Log determinant of the Laplacian plus one at each anchor: by the number of spanning trees."""
        return float(self._factor.log_det)

    @cached_property
    def null_log_det(self) -> float:
        """Log determinant of the flat directions at the anchors."""
        return -0.5 * float(self.members.double().log().sum())

    @cached_property
    def typical_variance(self) -> Tensor:
        """Geometric mean of the variances of each part's unit field that sums to zero, ``(m,)``.

        Sorbye and Rue (2014); by parts, Freni-Sterrantino, Ventrucci and Rue (2018).
        """
        null, one = self.skeleton.null, torch.ones(1, self.size, dtype=torch.float64, device=self.edges.device)
        sums, count = self._factor.solve(one)[0], self.members.double()
        whole = torch.zeros_like(count).index_add_(0, self.part, sums) / count**2
        variance = self._factor.variance[0] - 2.0 * sums / count[self.part] + whole[self.part]
        return ((null.bool().double().mT @ variance.log()) / count).exp()


def _check_edges(edges: Tensor, size: int) -> None:
    if int(edges.min()) < 0 or int(edges.max()) >= size:
        raise BadInput(f"edges name the nodes {int(edges.min())} to {int(edges.max())}; expected 0 to {size - 1}.")
    loops = edges[edges[:, 0] == edges[:, 1], 0]
    if len(loops):
        raise BadInput(f"node {int(loops[0])} has an edge with itself; expected pairs of different nodes.")
    ordered = edges.sort(-1).values
    if len(torch.unique(ordered[:, 0] * size + ordered[:, 1])) < len(edges):
        raise BadInput("edges name a pair twice, perhaps both ways round; expected each pair of neighbours once.")
    alone = torch.nonzero(torch.bincount(edges.flatten(), minlength=size) == 0).flatten()
    if len(alone):
        raise BadInput(
            f"node {int(alone[0])} has no neighbour; expected one at least: join it to one, or leave it out."
        )


def _graph(edges: Tensor | Neighbours) -> Neighbours:
    return edges if isinstance(edges, Neighbours) else Neighbours(edges)


class ICAR(GaussianField):
    """An intrinsic conditional autoregression: differences along the edges of a graph.

    Its normaliser falls as ``scale^-(n - parts)``; a Normal for each edge would fall as ``scale^-E``, which is another
    density as soon as the graph has a cycle.

    :param edges: pairs of neighbours ``(E, 2)``, or :class:`Neighbours`, made once, where the graph is large.
    :param scale: conditional standard deviation of a value given a single neighbour, the batch's shape.
    :param level: standard deviation of the first value of each connected part; None has each part sum to zero.

    >>> edges = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])
    >>> round(float(ICAR(edges, scale=0.3).sample().sum()), 4) == 0.0
    True
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"scale": constraints.positive}

    def __init__(
        self, edges: Tensor | Neighbours, scale: Any, level: Any = None, validate_args: bool | None = None
    ) -> None:
        graph = _graph(edges)
        self.scale: Any
        self.level: Any
        self.scale, self.level = parameters(scale, level)
        rank, parts = graph.size - len(graph.members), len(graph.members)
        of_edges, anchors = repeated(self.scale**-2, len(graph.edges)), anchor_precision(self.level, self.scale, parts)
        unit = log_normaliser_at(rank, graph.size, graph.unit_log_det, graph.null_log_det, self.level)
        factors = (graph.coefficients.to(self.scale), torch.cat([of_edges, anchors], -1))
        normaliser = unit - rank * self.scale.log()
        super().__init__(graph.skeleton, factors, normaliser, torch.Size([graph.size]), validate_args)


class BYM2(GaussianField):
    """A field on a graph and independent noise, mixed; Riebler, Sorbye, Simpson and Rue (2016).

    The event is ``(2, n)``: row 0 the effect ``scale (sqrt(1 - mixing) noise + sqrt(mixing) field)``, to be used in the
    predictor; row 1 the field, an :class:`ICAR` scaled so that its typical variance is 1.

    :param edges: pairs of neighbours ``(E, 2)``, or :class:`Neighbours`, made once, where the graph is large.
    :param scale: standard deviation of the effect, the batch's shape.
    :param mixing: share of its variance that the field has, between 0 and 1.
    :param level: standard deviation of the first value of each connected part of the field; None has it sum to zero.

    >>> BYM2(torch.tensor([[0, 1], [1, 2], [2, 0]]), scale=1.0, mixing=0.5).sample().shape
    torch.Size([2, 3])
    """

    arg_constraints: ClassVar[dict[str, Any]] = {
        "scale": constraints.positive,
        "mixing": constraints.interval(0.0, 1.0),
    }

    def __init__(
        self, edges: Tensor | Neighbours, scale: Any, mixing: Any, level: Any = None, validate_args: bool | None = None
    ) -> None:
        graph = _graph(edges)
        self.scale: Any
        self.mixing: Any
        self.level: Any
        self.scale, self.mixing, self.level = parameters(scale, mixing, level)
        rank, size = graph.size - len(graph.members), graph.size
        typical = graph.typical_variance
        gain = float(((graph.members - 1) * typical.log()).sum())
        unit = log_normaliser_at(rank, size, graph.unit_log_det + gain, graph.null_log_det, self.level)
        noise = self.scale.square() * (1.0 - self.mixing)
        normaliser = unit - 0.5 * size * (noise.log() + LOG_TWO_PI)
        factors = (self._mixed(graph), self._precisions(graph, typical.to(self.scale), noise))
        super().__init__(_double(graph), factors, normaliser, torch.Size([2, size]), validate_args)

    def _mixed(self, graph: Neighbours) -> Tensor:
        """Coefficients of edges, of effects given the field, and of anchors."""
        shape, (edges, size) = self.scale.shape, (len(graph.edges), graph.size)
        fixed = graph.coefficients.to(self.scale).expand(*shape, -1, 2)
        effect = torch.stack([torch.ones_like(self.scale), -self.scale * self.mixing.sqrt()], -1)
        effect = effect.unsqueeze(-2).expand(*shape, size, 2)
        return torch.cat([fixed[..., :edges, :], effect, fixed[..., edges:, :]], -2)

    def _precisions(self, graph: Neighbours, typical: Tensor, noise: Tensor) -> Tensor:
        edges = typical[graph.part[graph.edges[:, 0]]].expand(*self.scale.shape, -1)
        anchors = anchor_precision(self.level, self.scale, len(typical))
        return torch.cat([edges, repeated(noise.reciprocal(), graph.size), anchors], -1)

    def _unseen(self, coefficients: Tensor) -> Tensor:
        field = self._skeleton.null[self._skeleton.size // 2 :]
        first_effect = len(coefficients) - len(field) - field.shape[-1]
        return torch.cat([-coefficients[first_effect, 1] * field, field])


def _double(graph: Neighbours) -> Skeleton:
    """Effects before the field."""
    size, edges = graph.size, len(graph.edges)
    node = torch.arange(size, device=graph.edges.device)
    field = graph.skeleton.index + size
    index = torch.cat([field[:edges], torch.stack([node, node + size], -1), field[edges:]])
    return Skeleton(index, torch.cat([torch.zeros_like(graph.skeleton.null), graph.skeleton.null]))


class RandomWalk(GaussianField):
    """Differences of first or second order are independent normals.

    :param scale: standard deviation of a difference, the batch's shape.
    :param size: number of values.
    :param order: 1, differences of neighbours; 2, differences of differences.
    :param level: standard deviation of the first ``order`` values; None takes away level (and slope) instead.

    >>> RandomWalk(scale=1.0, size=3, level=1.0).log_prob(torch.tensor([0.0, 1.0, 3.0]))  # Normal(0, 1) at 0, 1 and 2
    tensor(-5.2568)
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"scale": constraints.positive}

    def __init__(
        self, scale: Any, size: int, order: int = 1, level: Any = None, validate_args: bool | None = None
    ) -> None:
        if order not in (1, 2) or size <= order:
            raise BadInput(f"RandomWalk(size={size}, order={order}); expected order 1 or 2, and more values than that.")
        self.scale: Any
        self.level: Any
        self.scale, self.level = parameters(scale, level)
        skeleton, steps = _walk(size, order, self.scale.device), size - order
        weights = torch.tensor([[-1.0, 1.0], [1.0, -2.0, 1.0]][order - 1], device=self.scale.device)
        coefficients = torch.cat([weights.expand(steps, -1), only_first(order, order + 1, weights)]).to(self.scale)
        of_steps, anchors = repeated(self.scale**-2, steps), anchor_precision(self.level, self.scale, order)
        spread = 0.5 * math.log((size**3 - size) / 12.0) if order == 2 else 0.0
        unit = log_normaliser_at(steps, size, 0.0, -0.5 * math.log(size) - spread, self.level)
        super().__init__(
            skeleton,
            (coefficients, torch.cat([of_steps, anchors], -1)),
            unit - steps * self.scale.log(),
            torch.Size([size]),
            validate_args,
        )


def _walk(size: int, order: int, device: torch.device) -> Skeleton:
    first = torch.arange(size - order, device=device).unsqueeze(-1)
    steps = first + torch.arange(order + 1, device=device)
    anchors = torch.arange(order, device=device).unsqueeze(-1).expand(order, order + 1)
    time = torch.arange(size, dtype=torch.float64, device=device) - 0.5 * (size - 1)
    null = torch.stack([torch.full_like(time, size**-0.5), time / time.norm()][:order], -1)
    return Skeleton(torch.cat([steps, anchors]), null)


class AR1(GaussianField):
    """A stationary autoregression ``x_t = coefficient x_{t-1} + Normal(0, scale)``.

    :param scale: standard deviation of an innovation, the batch's shape.
    :param coefficient: between -1 and 1.
    :param size: number of values.

    >>> AR1(scale=1.0, coefficient=0.5, size=1000).sample().shape
    torch.Size([1000])
    """

    arg_constraints: ClassVar[dict[str, Any]] = {
        "scale": constraints.positive,
        "coefficient": constraints.interval(-1.0, 1.0),
    }

    def __init__(self, scale: Any, coefficient: Any, size: int, validate_args: bool | None = None) -> None:
        if size < 2:
            raise BadInput(f"AR1(size={size}); expected at least 2 values.")
        self.scale: Tensor
        self.coefficient: Tensor
        self.scale, self.coefficient = broadcast_all(scale, coefficient)
        device, shape = self.scale.device, self.scale.shape
        first = torch.arange(size - 1, device=device).unsqueeze(-1)
        index = torch.cat([first + torch.arange(2, device=device), torch.zeros_like(first[:1]).expand(1, 2)])
        skeleton = Skeleton(index, torch.zeros(size, 0, dtype=torch.float64, device=device))
        one = torch.ones_like(self.scale)
        steps = torch.stack([-self.coefficient, one], -1).unsqueeze(-2).expand(*shape, size - 1, 2)
        start = torch.stack([one, 0.0 * one], -1).unsqueeze(-2)
        shrunk = 1.0 - self.coefficient.square()
        precision = torch.cat([repeated(one, size - 1), shrunk.unsqueeze(-1)], -1) * self.scale.unsqueeze(-1) ** -2
        normaliser = 0.5 * shrunk.log() - size * (self.scale.log() + 0.5 * LOG_TWO_PI)
        factors = (torch.cat([steps, start], -2), precision)
        super().__init__(skeleton, factors, normaliser, torch.Size([size]), validate_args)
