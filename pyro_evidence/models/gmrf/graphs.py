"""Fields on the nodes of a graph: neighbours are alike."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.utils import broadcast_all
from torch.utils.weak import WeakIdKeyDictionary

from pyro_evidence.errors import BadInput
from pyro_evidence.models.gmrf.constrained import Structure, log_det, squares
from pyro_evidence.models.gmrf.field import Between, GaussianField, Unit, parameters
from pyro_evidence.numerics.derivatives import cached, cached_property, ordinary
from pyro_evidence.precision.elimination import components
from pyro_evidence.settings import check_count

SPECTRUM = 1000  # nodes up to which eigenvalues, .2 s once for a graph, cost less than a factorisation at each run
Built = tuple[Structure, tuple[Tensor, Tensor], Callable[[], Tensor], torch.Size]  # last what log_det is, and a shape


@dataclass(frozen=True, eq=False)
class Neighbours:
    """A graph, looked at once: give it in place of its edges to a field that a model makes at each run.

    :param edges: pairs of nodes, ``(E, 2)`` long, each pair once.
    :param size: number of nodes; by default one more than the highest.
    :param weights: of the edges, ``(E,)`` above 0; by default one.
    :raises BadInput: for an edge of a node with itself, a pair given twice, a node without neighbours.
    """

    edges: Tensor
    size: int = 0
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        edges = torch.as_tensor(self.edges)
        if edges.dim() != 2 or edges.shape[-1] != 2 or edges.is_floating_point() or not len(edges):
            raise BadInput(f"edges of shape {tuple(edges.shape)}, {edges.dtype}; expected pairs of nodes (E, 2), long.")
        object.__setattr__(self, "edges", edges := edges.long())
        number = self.size if isinstance(self.size, int) and not self.size else check_count("size", self.size)
        object.__setattr__(self, "size", number or int(edges.max()) + 1)
        check_pairs(edges, self.size)
        alone = torch.nonzero(torch.bincount(edges.flatten(), minlength=self.size) == 0).flatten()
        if len(alone):
            raise BadInput(f"node {int(alone[0])} has no neighbour; expected one: join it to one, or leave it out.")
        weights = torch.ones(len(edges)) if self.weights is None else torch.as_tensor(self.weights)
        if weights.shape != edges.shape[:1] or not bool((weights > 0).all() & weights.isfinite().all()):
            raise BadInput(f"weights of shape {tuple(weights.shape)}; expected {len(edges)} finite numbers above 0.")
        object.__setattr__(self, "weights", weights.detach().to(edges.device, torch.float64))

    @cached_property
    def part(self) -> Tensor:
        """The connected part of each node, from 0 on, ``(n,)``."""
        return torch.unique(components(self.size, self.edges), return_inverse=True)[1]

    @cached_property
    def unit(self) -> Unit:
        """Differences along the edges; the first node of each part is its anchor."""
        fixed = torch.nn.functional.one_hot(self.part).double()
        anchors = fixed.argmax(0)
        fixed = fixed / fixed.sum(0).sqrt()
        coefficients = torch.tensor([1.0, -1.0]).to(fixed).expand(len(self.edges), 2)
        return Unit(Structure(self.edges, fixed, anchors), coefficients, self.weights, self.part)  # type: ignore[arg-type]

    @cached_property
    def operator(self) -> "Operator":
        """The Laplacian beside the sums of the weights at each node."""
        degree = torch.zeros(self.size, dtype=torch.float64, device=self.edges.device)
        degree.index_add_(0, self.edges.flatten(), self.weights.repeat_interleave(2))  # type: ignore[union-attr]
        return Operator(degree, self.edges, self.weights)  # type: ignore[arg-type]

    @cached_property
    def identity_operator(self) -> "Operator":
        """The Laplacian beside one at each node."""
        return Operator(torch.ones_like(self.operator.mass), self.edges, self.operator.weights)


def check_pairs(edges: Tensor, size: int) -> None:
    """Refuse what are no pairs of different nodes below a size, each pair once.

    :raises BadInput: naming the first.
    """
    if int(edges.min()) < 0 or int(edges.max()) >= size:
        raise BadInput(f"edges name the nodes {int(edges.min())} to {int(edges.max())}; expected 0 to {size - 1}.")
    loops = edges[edges[:, 0] == edges[:, 1], 0]
    if len(loops):
        raise BadInput(f"node {int(loops[0])} has an edge with itself; expected pairs of different nodes.")
    ordered = edges.sort(-1).values
    if len(torch.unique(ordered[:, 0] * size + ordered[:, 1])) < len(edges):
        raise BadInput("edges name a pair twice, perhaps both ways round; expected each pair of neighbours once.")


@cached(8)
def lattice(rows: int, columns: int) -> Neighbours:
    """The graph of a grid: each cell beside those above, below, left and right; nodes row by row.

    >>> lattice(2, 3).edges.tolist()
    [[0, 1], [1, 2], [3, 4], [4, 5], [0, 3], [1, 4], [2, 5]]
    """
    node = torch.arange(rows * columns).view(rows, columns)
    across, down = (node[:, :-1], node[:, 1:]), (node[:-1], node[1:])
    return Neighbours(torch.cat([torch.stack([a.flatten(), b.flatten()], -1) for a, b in (across, down)]))


@dataclass(frozen=True, eq=False)
class Operator:
    """``K = b diag(mass) + c L`` with ``L`` the Laplacian of weighted edges, for any two numbers ``b > 0`` and ``c``.

    Proper fields on graphs and meshes have the precision ``K``, or ``K' diag(q) K``.
    """

    mass: Tensor  # (n,) float64, above 0
    edges: Tensor  # (E, 2)
    weights: Tensor  # (E,) float64

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self.mass)

    @cached_property
    def by_edges(self) -> Structure:
        """``K`` as a sum of squares of differences along the edges and of single values."""
        node = torch.arange(self.size, device=self.mass.device).unsqueeze(-1).expand(-1, 2)
        return Structure.free(torch.cat([self.edges, node]), self.size)

    def factors(self, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Coefficients and precisions of :attr:`by_edges`."""
        difference, alone = torch.tensor([[1.0, -1.0], [1.0, 0.0]]).to(b)
        coefficients = torch.cat([difference.expand(len(self.edges), 2), alone.expand(self.size, 2)])
        return coefficients, torch.cat([c.unsqueeze(-1) * self.weights.to(b), b.unsqueeze(-1) * self.mass.to(b)], -1)

    def at_scale(self, b: Tensor, c: Tensor, scale: Tensor) -> Built:
        """Structure, factors, log determinant and shape of the field of precision ``K / scale^2``."""
        coefficients, precision = self.factors(b, c)

        def log_det() -> Tensor:
            return self.log_det(b, c) - 2.0 * self.size * scale.log()

        return self.by_edges, (coefficients, precision * scale.unsqueeze(-1) ** -2), log_det, torch.Size([self.size])

    @cached_property
    def by_rows(self) -> tuple[Structure, Tensor]:
        """``K x`` node by node: the node and its neighbours, padded with itself, and the rows of ``L``, ``(n, k)``."""
        here, there = torch.cat([self.edges, self.edges.flip(-1)]).unbind(-1)
        order = here.argsort(stable=True)
        here, there, weight = here[order], there[order], torch.cat([self.weights, self.weights])[order]
        count = torch.bincount(here, minlength=self.size)
        place = torch.arange(len(here), device=here.device) - (count.cumsum(0) - count)[here] + 1
        node = torch.arange(self.size, device=here.device)
        index = node.unsqueeze(-1).expand(-1, int(count.max()) + 1).clone()
        index[here, place] = there
        row = torch.zeros(index.shape, dtype=torch.float64, device=here.device)
        row[here, place] = -weight
        row[:, 0] = torch.zeros_like(row[:, 0]).index_add_(0, here, weight)
        return Structure.free(index, self.size), row

    def rows(self, b: Tensor, c: Tensor) -> Tensor:
        """The coefficients of ``K x``, ``(..., n, k)``."""
        row = self.by_rows[1].to(b)
        own = torch.nn.functional.pad(self.mass.to(b).unsqueeze(-1), (0, row.shape[-1] - 1))
        return b[..., None, None] * own + c[..., None, None] * row

    @cached_property
    def eigenvalues(self) -> Tensor:
        """Eigenvalues of ``M^-1/2 L M^-1/2``, ``M`` the masses, ``(n,)``."""
        L = torch.zeros(self.size, self.size, dtype=torch.float64, device=self.mass.device)
        i, j = self.edges.unbind(-1)
        for a, b, sign in ((i, i, 1.0), (j, j, 1.0), (i, j, -1.0), (j, i, -1.0)):
            L.index_put_((a, b), sign * self.weights, accumulate=True)
        root = self.mass.rsqrt()
        return torch.linalg.eigvalsh(root.unsqueeze(-1) * L * root)

    def log_det(self, b: Tensor, c: Tensor) -> Tensor:
        """``log |K|``, of the shape of ``b``."""
        if self.size > SPECTRUM:
            return log_det(squares(*self.factors(b, c)), self.by_edges).to(b)
        rest = torch.log1p((c / b).double().unsqueeze(-1) * self.eigenvalues).sum(-1) + self.mass.log().sum()
        return (self.size * b.double().log() + rest).to(b)


_GRAPHS = WeakIdKeyDictionary()  # those of tensors of edges that are still there, and the version each was made of


def _graph(edges: Tensor | Neighbours) -> Neighbours:
    """The graph of edges, looked at once while a tensor of them is not written into."""
    if not isinstance(edges, Tensor) or edges.is_inference():
        return edges if isinstance(edges, Neighbours) else Neighbours(edges)
    version, known = _GRAPHS.get(edges, (None, None))
    if version != edges._version:
        known = _looked_at(edges)
        _GRAPHS[edges] = edges._version, known
    return known


@ordinary
def _looked_at(edges: Tensor) -> Neighbours:
    return Neighbours(edges.clone())


class ICAR(GaussianField):
    """An intrinsic conditional autoregression: differences along the edges of a graph.

    Its normaliser falls as ``scale^-(n - parts)``; a Normal for each edge would fall as ``scale^-E``, which is another
    density as soon as the graph has a cycle.

    :param edges: pairs of neighbours ``(E, 2)``, or :class:`Neighbours`, made once, where the graph is large.
    :param scale: conditional standard deviation of a value given a single neighbour at weight one, the batch's shape;
        with ``scaled``, the typical standard deviation of each connected part.
    :param level: standard deviation of the first value of each connected part; None has each part sum to zero.
    :param scaled: whether ``scale`` is made free of the graph (Sorbye and Rue, 2014).

    >>> edges = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])
    >>> round(float(ICAR(edges, scale=0.3).sample().sum()), 4) == 0.0
    True
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"scale": constraints.positive}

    def __init__(
        self,
        edges: Tensor | Neighbours,
        scale: Any,
        level: Any = None,
        validate_args: bool | None = None,
        *,
        scaled: bool = False,
    ) -> None:
        graph = _graph(edges)
        self.scale, self.level = parameters(scale, level)
        unit = graph.unit.standardised if scaled else graph.unit
        super().__init__(*unit.factors(self.scale, self.level), torch.Size([graph.size]), validate_args)


class BYM2(GaussianField):
    """A field on a graph and independent noise, mixed; Riebler, Sorbye, Simpson and Rue (2016).

    The event is ``(2, n)``: row 0 the effect ``scale (sqrt(1 - mixing) noise + sqrt(mixing) field)``, to be used in the
    predictor; row 1 the field, an :class:`ICAR` scaled so that its typical variance is 1.

    :param edges: pairs of neighbours ``(E, 2)``, or :class:`Neighbours`, made once, where the graph is large.
    :param scale: standard deviation of the effect, the batch's shape.
    :param mixing: share of its variance that the field has, from 0 to below 1.
    :param level: standard deviation of the first value of each connected part of the field; None has it sum to zero.

    >>> BYM2(torch.tensor([[0, 1], [1, 2], [2, 0]]), scale=1.0, mixing=0.5).sample().shape
    torch.Size([2, 3])
    """

    arg_constraints: ClassVar[dict[str, Any]] = {
        "scale": constraints.positive,
        "mixing": constraints.half_open_interval(0.0, 1.0),  # at 1 an ICAR, and rows that are one another
    }

    def __init__(
        self, edges: Tensor | Neighbours, scale: Any, mixing: Any, level: Any = None, validate_args: bool | None = None
    ) -> None:
        graph = _graph(edges)
        self.scale, self.mixing, self.level = parameters(scale, mixing, level)
        size, noise = graph.size, self.scale.square() * (1.0 - self.mixing)
        unit = graph.unit.standardised
        _, (own, precision), log_det = unit.factors(torch.ones_like(self.scale), self.level)
        effect = torch.stack([torch.ones_like(self.scale), -self.scale * self.mixing.sqrt()], -1)
        effect = effect.unsqueeze(-2).expand(*self.scale.shape, size, 2)
        coefficients = torch.cat([own.expand(*self.scale.shape, *own.shape), effect], -2)
        precision = torch.cat([precision, noise.reciprocal().unsqueeze(-1).expand(*self.scale.shape, size)], -1)
        # the field behind the effects, with a factor for each effect given its field
        structure = _with_effects(graph.unit.structure if self.level is None else graph.unit.at_a_level)
        super().__init__(
            structure, (coefficients, precision), log_det - size * noise.log(), torch.Size([2, size]), validate_args
        )


@cached(8)
def _with_effects(field: Structure) -> Structure:
    node = torch.arange(field.size, device=field.index.device)
    index = torch.cat([field.index + field.size, torch.stack([node, node + field.size], -1)])
    return Structure(index, torch.cat([torch.zeros_like(field.fixed), field.fixed]), field.anchors + field.size)


class Lattice(GaussianField):
    """A thin plate on a grid: second differences across, down and mixed; Rue and Held (2005), section 3.4.2.

    The squares are those of the bending energy ``f_xx^2 + 2 f_xy^2 + f_yy^2``, within the borders: planes cost nothing.
    The event is ``(rows, columns)``.  For differences of first order: ``ICAR(lattice(rows, columns), scale)``.

    :param scale: standard deviation of a second difference, the batch's shape; with ``scaled``, the field's typical
        standard deviation.
    :param rows: 3 or more.
    :param columns: 3 or more.
    :param level: standard deviation of three values in a corner; None takes the plane away.
    :param scaled: whether ``scale`` is made free of the size (Sorbye and Rue, 2014).

    >>> Lattice(scale=0.1, rows=4, columns=5).sample().shape
    torch.Size([4, 5])

    :raises BadInput: for a grid that is too small.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"scale": constraints.positive}

    def __init__(
        self,
        scale: Any,
        rows: int,
        columns: int,
        level: Any = None,
        validate_args: bool | None = None,
        *,
        scaled: bool = False,
    ) -> None:
        if rows < 3 or columns < 3:
            raise BadInput(f"Lattice(rows={rows}, columns={columns}); expected 3 or more of each.")
        self.scale, self.level = parameters(scale, level)
        unit = _thin_plate(rows, columns, self.scale.device)
        unit = unit.standardised if scaled else unit
        super().__init__(*unit.factors(self.scale, self.level), torch.Size([rows, columns]), validate_args)


@cached(8)
def _thin_plate(rows: int, columns: int, device: torch.device) -> Unit:
    node = torch.arange(rows * columns, device=device).view(rows, columns)
    across = [node[:, :-2], node[:, 1:-1], node[:, 2:], node[:, 2:]]
    down = [node[:-2], node[1:-1], node[2:], node[2:]]
    mixed = [node[:-1, :-1], node[:-1, 1:], node[1:, :-1], node[1:, 1:]]
    index, coefficients, weights = [], [], []
    straight, twisted = [1.0, -2.0, 1.0, 0.0], [1.0, -1.0, -1.0, 1.0]
    for cells, coefficient, weight in ((across, straight, 1.0), (down, straight, 1.0), (mixed, twisted, 2.0)):
        index.append(torch.stack([cell.flatten() for cell in cells], -1))
        own = torch.tensor([coefficient], dtype=torch.float64, device=device).expand(len(index[-1]), 4)
        coefficients.append(own)
        weights.append(torch.full((len(own),), weight, dtype=torch.float64, device=device))
    y, x = torch.meshgrid(*(torch.arange(n, device=device).double() for n in (rows, columns)), indexing="ij")
    plane = torch.stack([torch.ones_like(x).flatten(), x.flatten(), y.flatten()], -1)
    anchors = torch.stack([node[0, 0], node[0, 1], node[1, 0]])
    structure = Structure(torch.cat(index), torch.linalg.qr(plane).Q, anchors)
    return Unit(structure, torch.cat(coefficients), torch.cat(weights), 0 * node.flatten())


class CAR(GaussianField):
    """A proper conditional autoregression: precision ``(D - coefficient W) / scale^2``.

    ``W`` holds the weights of the edges, ``D`` their sums at each node; given its neighbours, a value is normal around
    ``coefficient`` times their weighted mean.  Besag (1974).

    :param edges: pairs of neighbours ``(E, 2)``, or :class:`Neighbours`, made once.
    :param scale: conditional standard deviation at one neighbour of weight one, the batch's shape.
    :param coefficient: between -1 and 1, exclusive; towards 1 the field becomes an :class:`ICAR`.

    >>> CAR(lattice(3, 3), scale=1.0, coefficient=0.9).sample().shape
    torch.Size([9])
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"scale": constraints.positive, "coefficient": Between(-1.0, 1.0)}

    def __init__(
        self, edges: Tensor | Neighbours, scale: Any, coefficient: Any, validate_args: bool | None = None
    ) -> None:
        operator = _graph(edges).operator
        self.scale, self.coefficient = broadcast_all(scale, coefficient)
        super().__init__(*operator.at_scale(1.0 - self.coefficient, self.coefficient, self.scale), validate_args)


class Leroux(GaussianField):
    """Precision ``(mixing L + (1 - mixing) I) / scale^2``, ``L`` the graph's Laplacian; Leroux, Lei and Breslow (2000).

    :param edges: pairs of neighbours ``(E, 2)``, or :class:`Neighbours`, made once.
    :param scale: standard deviation where ``mixing`` is 0, the batch's shape.
    :param mixing: between 0, independent values, and 1, an :class:`ICAR`; exclusive.

    >>> Leroux(lattice(3, 3), scale=1.0, mixing=0.5).sample().shape
    torch.Size([9])
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"scale": constraints.positive, "mixing": Between(0.0, 1.0)}

    def __init__(self, edges: Tensor | Neighbours, scale: Any, mixing: Any, validate_args: bool | None = None) -> None:
        operator = _graph(edges).identity_operator
        self.scale, self.mixing = broadcast_all(scale, mixing)
        super().__init__(*operator.at_scale(1.0 - self.mixing, self.mixing, self.scale), validate_args)


class SAR(GaussianField):
    """A simultaneous autoregression ``x = coefficient W x + Normal(0, scale)``, each row of ``W`` of sum one.

    :param edges: pairs of neighbours ``(E, 2)``, or :class:`Neighbours`, made once.
    :param scale: standard deviation of the noise, the batch's shape.
    :param coefficient: between -1 and 1, exclusive.

    >>> SAR(lattice(3, 3), scale=1.0, coefficient=0.5).sample().shape
    torch.Size([9])

    Whittle (1954).
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"scale": constraints.positive, "coefficient": Between(-1.0, 1.0)}

    def __init__(
        self, edges: Tensor | Neighbours, scale: Any, coefficient: Any, validate_args: bool | None = None
    ) -> None:
        operator = _graph(edges).operator
        self.scale, self.coefficient = broadcast_all(scale, coefficient)
        b, c, degree = 1.0 - self.coefficient, self.coefficient, operator.mass
        precision = degree.to(self.scale) ** -2 * self.scale.unsqueeze(-1) ** -2
        factors = (operator.rows(b, c), precision)

        def log_det() -> Tensor:
            return 2.0 * (operator.log_det(b, c) - degree.log().sum() - operator.size * self.scale.log())

        super().__init__(operator.by_rows[0], factors, log_det, torch.Size([operator.size]), validate_args)
