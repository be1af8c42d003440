"""Structure sites: discrete sites annotated ``infer={"branching": True}``, which choose what a model is made of."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from pyro.distributions import Bernoulli, Categorical, ImproperUniform
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.fitting.process_state import empty_store, global_lock, own_random_numbers, own_warnings
from pyro_evidence.program.checks import Arguments, as_tensors, new_data, says_singular
from pyro_evidence.program.parameters import MAY_LACK
from pyro_evidence.program.sites import Node, Values, central_value, innermost, is_structure, sample_nodes

Model = Callable[..., Any]

MOST = 2**16  # structures that are enumerated
MOST_RUNS = 2**12  # of the model, where which sites there are depends on the values of others
TRIED = 8  # random structures at which sites must be what they are at the first


def fixed(model: Model, values: Mapping[str, Tensor]) -> Model:
    """The model with its structure fixed, which may leave it without latents; the prior of that is not counted."""
    found: Model = poutine.block(poutine.condition(model, data=dict(values)), hide=list(values))
    setattr(found, MAY_LACK, True)
    return found


@dataclass(frozen=True, eq=False)
class Structures:
    """Values of the structure sites, a row for each structure.

    :ivar values: site -> ``(S,) + shape``; zeros where a structure has no such site.
    :ivar present: site -> which structures have it, bool, ``(S,)``.
    :ivar log_prior: of each, nats, ``(S,)``.
    """

    values: Mapping[str, Tensor]
    present: Mapping[str, Tensor]
    log_prior: Tensor

    def __len__(self) -> int:
        return len(self.log_prior)

    def of(self, row: int) -> Values:
        """Site -> value of one structure, without the sites that it does not have."""
        return {name: value[row] for name, value in self.values.items() if bool(self.present[name][row])}

    def rows(self, rows: Tensor) -> "Structures":
        """Some of them, in this order."""
        values, present = ({n: v[rows] for n, v in part.items()} for part in (self.values, self.present))
        return Structures(values, present, self.log_prior[rows])

    def elements(self) -> Tensor:
        """All elements of all sites side by side, ``(S, B)``."""
        return torch.cat([value.reshape(len(self), -1).double() for value in self.values.values()], -1)


@dataclass(frozen=True, eq=False)
class IndependentChoices:
    """Structure sites that are there in every structure, each element with values of its own.

    :ivar supports: site -> the values of each of its elements, ``(k,)``.
    :ivar shapes: of the sites.
    :ivar log_probs: log prior of values ``(S,) + shape`` of each site, ``(S,)``.
    """

    supports: Mapping[str, Tensor]
    shapes: Mapping[str, torch.Size]
    log_probs: Mapping[str, Callable[[Tensor], Tensor]]

    @property
    def sizes(self) -> list[int]:
        """Number of values of each element, ``(B,)``."""
        return [len(self.supports[n]) for n, shape in self.shapes.items() for _ in range(shape.numel())]

    def with_choices(self, choice: Tensor) -> Structures:
        """The structures in which each element has the value of a number, ``(S, B)``."""
        parts = choice.split([shape.numel() for shape in self.shapes.values()], -1)
        values = {
            name: self.supports[name][part].reshape(-1, *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }
        log_prior = torch.stack([self.log_probs[name](value).double() for name, value in values.items()]).sum(0).cpu()
        return Structures(values, {n: torch.ones(len(choice), dtype=torch.bool) for n in values}, log_prior)

    def with_elements(self, elements: Tensor) -> Values:
        """Site -> numbers ``(B,)`` in the places of its elements."""
        parts = elements.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def all(self) -> Tensor:
        """Every structure, ``(S, B)``."""
        return torch.cartesian_prod(*(torch.arange(size) for size in self.sizes)).reshape(-1, len(self.sizes))


def structures_of(model: Model, data: Arguments) -> IndependentChoices | Structures:
    """The structures that a model can have, as a product of independent choices where they are.

    :raises BadInput: for an annotated site that is continuous or infinite, and where the model cannot be run.
    :raises UnsupportedModel: for more structures than can be enumerated whose sites depend on one another, and for a
        structure prior that depends on latents.
    """
    data = as_tensors(*data)
    first = _first_branching(model, data)
    supports = {name: _support(name, node) for name, node in first.items()}
    shapes = {name: torch.Size(node["value"].shape) for name, node in first.items()}
    laws = {name: _law(node) for name, node in first.items()}
    product = IndependentChoices(supports, shapes, laws)
    sizes, generator = product.sizes, torch.Generator().manual_seed(0)
    tried = [[0] * len(sizes), [size - 1 for size in sizes]]
    tried += [[int(torch.randint(size, (), generator=generator)) for size in sizes] for _ in range(TRIED)]
    probes = product.with_choices(torch.tensor(tried))
    for row in range(len(probes)):  # the other latents are others in each run
        try:
            there = _branching(model, data, probes.of(row), all_of_them=True, seed=row + 1)
        except BadInput as error:
            if has_singular_matrix(error):  # of which its fit will tell
                continue
            return _tree(model, data)  # of values in another shape than this structure's
        same = there.keys() == first.keys() and all(there[n]["value"].shape == shapes[n] for n in first)
        if not (same and all(torch.equal(_law(there[n])(probes.values[n]), laws[n](probes.values[n])) for n in first)):
            again = _branching(model, data, probes.of(row), all_of_them=True)
            for name in there.keys() & again.keys():  # of one structure, with other latents beside it
                own = there[name]["value"].unsqueeze(0)
                if not torch.equal(_law(there[name])(own), _law(again[name])(own)):
                    raise UnsupportedModel(
                        f"the prior of structure site '{name}' depends on other latent sites; expected fixed "
                        "probabilities, or such as depend on structure sites alone. Integrate them out of the prior, "
                        "as a beta-binomial does with a common inclusion probability, or draw them from a few values "
                        "as a structure site."
                    )
            return _tree(model, data)
    return product


def has_structures(model: Model, data: Arguments) -> bool:
    """Whether a run of the model comes by a structure site."""
    return bool(_first_branching(model, as_tensors(*data)))


def has_singular_matrix(error: Exception) -> bool:
    """Whether a model cannot be run because a matrix of its own is singular, as of collinear columns."""
    return says_singular(error.__cause__)


def _first_branching(model: Model, data: Arguments) -> dict[str, Node]:
    """The annotated sites of the first random structure that has no singular matrix."""
    for seed in range(TRIED):
        try:
            return _branching(model, data, {}, seed=seed)
        except BadInput as error:
            if not has_singular_matrix(error):
                raise
    return _branching(model, data, {}, seed=TRIED)


class _Begun(Messenger):
    """Starts latents that cannot be drawn, those under flat priors, inside their support."""

    def _pyro_sample(self, msg: Any) -> None:
        if msg["value"] is None and isinstance(innermost(msg["fn"]), ImproperUniform):
            msg["value"] = central_value(msg["fn"])


def _branching(
    model: Model, data: Arguments, values: Values, *, all_of_them: bool = False, seed: int = 0
) -> dict[str, Node]:
    """The annotated sites of one run that have no value yet; those among ``values`` too where ``all_of_them``."""
    conditioned = poutine.condition(model, data=values) if values else model
    with global_lock(), own_random_numbers(), own_warnings("ignore"), empty_store(), _Begun(), new_data(*data):
        torch.manual_seed(seed)
        trace = poutine.trace(conditioned).get_trace(*data[0], **data[1])
    also = values if all_of_them else ()
    return {name: node for name, node in sample_nodes(trace).items() if is_structure(node) or name in also}


def _support(name: str, node: Node) -> Tensor:
    """The values of each element of a structure site, ``(k,)``."""
    base = innermost(node["fn"])
    if not base.has_enumerate_support or base.event_dim:
        raise BadInput(
            f"site '{name}' is annotated as branching and is a {type(base).__name__}; expected a latent Bernoulli, "
            "Categorical or Binomial, whose elements have finitely many values. Leave the annotation out, or choose by "
            "such a site."
        )
    if node["fn"].log_prob(node["value"]).requires_grad:
        raise UnsupportedModel(
            f"the prior of structure site '{name}' depends on a param; expected fixed probabilities, since these "
            "are not maximised. Write a number in its place, or draw it from a few values as a structure site."
        )
    return base.enumerate_support(expand=False).reshape(-1)


def _law(node: Node) -> Callable[[Tensor], Tensor]:
    """The log prior of values ``(S,) + shape``, summed over elements, ``(S,)``."""
    fn, scale, base = node["fn"], node["scale"], innermost(node["fn"])
    probs = getattr(base, "probs", None)  # whose zeros torch raises to where a logarithm can be had
    probs = torch.stack([1.0 - probs, probs], -1) if isinstance(base, Bernoulli) and probs is not None else probs

    def log_prob(values: Tensor) -> Tensor:
        values = values.reshape(-1, *node["value"].shape)
        found = (fn.log_prob(values).detach() * scale).reshape(len(values), -1).sum(-1)
        if not isinstance(base, Bernoulli | Categorical):
            return found
        chances, index = torch.broadcast_tensors(probs, values.long().unsqueeze(-1))
        return found.masked_fill((chances.gather(-1, index[..., :1]) == 0).reshape(len(values), -1).any(-1), -math.inf)

    return log_prob


def _tree(model: Model, data: Arguments) -> Structures:
    """Structures of sites that depend on the values of others: each by a run of the model."""
    pending: list[tuple[Values, float]] = [({}, 0.0)]
    found: list[tuple[Values, float]] = []
    while pending:
        values, log_prior = pending.pop()
        here = _branching(model, data, values)
        if not here:
            found.append((values, log_prior))
            continue
        name, node = next(iter(here.items()))
        support, shape = _support(name, node), node["value"].shape
        num = len(support) ** shape.numel()
        if num * (len(pending) + 1) + len(found) > MOST_RUNS:
            raise UnsupportedModel(
                f"the structure sites that a run has depend on the values of others, and there are more than "
                f"{MOST_RUNS:,} structures; expected fewer, since each takes a run of the model. Draw all structure "
                "sites in every run, whether they are used or not."
            )
        every = torch.cartesian_prod(*(support for _ in range(shape.numel()))).reshape(num, *shape)
        log_probs = _law(node)(every).tolist()
        pending += [(values | {name: v}, log_prior + p) for v, p in zip(every, log_probs, strict=True)][::-1]
    return _stacked(found)


def _stacked(found: Sequence[tuple[Values, float]]) -> Structures:
    """Structures with different sites as rows.

    :raises UnsupportedModel: for a site that has other shapes in other structures.
    """
    names = {name: value for values, _ in reversed(found) for name, value in values.items()}
    for name, like in names.items():
        shapes = {tuple(values[name].shape) for values, _ in found if name in values}
        if len(shapes) > 1:
            raise UnsupportedModel(
                f"structure site '{name}' has the shapes {sorted(shapes)} in different structures; expected one. Give "
                "the sites different names."
            )
        names[name] = torch.zeros_like(like)
    values = {n: torch.stack([v.get(n, zero) for v, _ in found]) for n, zero in names.items()}
    present = {n: torch.tensor([n in v for v, _ in found]) for n in names}
    log_prior = torch.tensor([p for _, p in found], dtype=torch.float64)
    kept = log_prior > -math.inf
    return Structures(values, present, log_prior).rows(kept.nonzero().flatten())
