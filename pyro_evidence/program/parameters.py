"""Params that a model declares, where they live, which are maximised with latent sites beside them, which are held."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, update_wrapper
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.constraints import softplus_lower_cholesky, softplus_positive
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Transform, biject_to, constraints, transform_to

from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.process_state import without_validation_or_params
from pyro_evidence.numerics.coordinates import unconstrained_shape
from pyro_evidence.program.sites import Node, central_value, is_discrete, is_plate, sample_nodes


class Constants(Messenger):
    """Puts values in place of params: a trace shows them, NUTS and SVI leave them as they are.

    ``poutine.substitute`` would do but for SVI, which asks each value of a param for its ``unconstrained()`` one, to
    hand it to the optimiser.  Here that is the constant itself, which has no gradient, and so stays.

    :param values: by the params' names, constrained.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values = {name: _constant(value) for name, value in values.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "values": {name: value.detach() for name, value in self.values.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.values = {name: _constant(value) for name, value in self.values.items()}

    def _pyro_param(self, msg: Any) -> None:
        if msg["name"] in self.values:
            msg["value"] = self.values[msg["name"]]


def _constant(value: Tensor) -> Tensor:
    value = value.detach().clone()
    value.unconstrained = lambda: value  # type: ignore[attr-defined]
    return value


Home = tuple[torch.nn.Module, str]  # a module and the attribute under which it holds a parameter


@dataclass(frozen=True, eq=False)
class Declaration:
    """One ``pyro.param``, ``PyroParam`` or ``nn.Parameter`` as the model states it."""

    value: Tensor  # constrained, where the search starts
    constraint: Any
    source: torch.nn.Parameter | None  # one that its module may read without asking Pyro
    frozen: bool  # the source has requires_grad=False


class RelativeCholesky(Transform):
    """Rows of a lower Cholesky factor: the logarithm of the diagonal, and what is left of it in units of the diagonal.

    A row measured in another unit moves its logarithm alone.
    """

    domain = constraints.independent(constraints.real, 2)
    codomain = constraints.lower_cholesky
    bijective = True  # but for the upper triangle, which is not looked at

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RelativeCholesky)

    def _call(self, x: Tensor) -> Tensor:
        unit = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        return x.diagonal(dim1=-2, dim2=-1).exp().unsqueeze(-1) * (x.tril(-1) + unit)

    def _inverse(self, y: Tensor) -> Tensor:
        size = y.diagonal(dim1=-2, dim2=-1)
        return (y / size.unsqueeze(-1)).tril(-1) + size.log().diag_embed()


def transform_of(constraint: Any) -> Transform:
    """Unconstrained to constrained, such that a change of unit is a shift, or a factor of a real number.

    The bijection that torch has, where that is so; the store's own where there is none.
    """
    if constraint in (constraints.lower_cholesky, softplus_lower_cholesky):
        return RelativeCholesky()
    if constraint is softplus_positive:  # neither logarithm nor straight line
        return biject_to(constraints.positive)
    try:
        return biject_to(constraint)
    except NotImplementedError:
        return transform_to(constraint)


def from_store(name: str, declared: Declaration, stored: Tensor | None) -> Declaration:
    """Begin at the store's value when it has one; a network's parameter is its own store.

    :raises BadInput: when the store's value has another shape.
    """
    if stored is None or declared.source is not None:
        return declared
    if declared.value.shape != stored.shape:
        raise BadInput(
            f"hyperparameter '{name}' has shape {tuple(declared.value.shape)} in this model, but the param "
            f"store holds one of shape {tuple(stored.shape)} from another model. Call "
            f"pyro.clear_param_store(), or rename one of them."
        )
    return replace(declared, value=stored.detach().clone().to(declared.value.dtype))


def started(name: str, declared: Declaration) -> Declaration:
    """The hyperparameter where ``pyro.param`` would begin it: numbers off a simplex are divided by their sum.

    :raises BadInput: for one that begins on or beyond the edge of its constraint, with its name and value.
    """
    value, constraint = declared.value, declared.constraint
    moved = value
    if isinstance(constraint, type(constraints.simplex)) and bool(torch.isfinite(value).all()):
        stored = transform_to(constraint)
        moved = stored(stored.inv(value))
    if not _is_inside(moved, constraint):
        free = transform_of(constraint)
        inner = free(value.new_zeros(unconstrained_shape(free, value.shape)))
        given, inner = (x.reshape(-1)[:5].tolist() for x in (value, inner))
        raise BadInput(
            f"hyperparameter '{name}', shape {tuple(value.shape)}, starts at {given}; expected finite values "
            f"strictly inside {constraint}. Start it elsewhere, for example at "
            f"{inner if len(inner) > 1 else f'{inner[0]:g}'}."
        )
    return replace(declared, value=moved)


def _is_inside(value: Tensor, constraint: Any) -> bool:
    """Whether numbers are finite, and lie inside a constraint and not on its edge, where transforms are saturated."""
    if not bool(torch.isfinite(value).all()) or not bool(constraint.check(value).all()):
        return False
    base = getattr(constraint, "base_constraint", constraint)
    on_edge = isinstance(base, constraints.interval) and ((value <= base.lower_bound) | (value >= base.upper_bound))
    return not bool(torch.as_tensor(on_edge).any()) and bool(transform_of(constraint).inv(value).isfinite().all())


def check_kind(role: str, names: object) -> None:
    """Refuse what are no names of sites.

    :raises BadInput: naming the argument.
    """
    if names is not None and not isinstance(names, Sequence | Set):
        raise BadInput(f"{role}={names!r}; expected a list of names of sites, such as {role}=['w'], or None.")


def maximised_sites(
    continuous: Sequence[str],
    params: Sequence[str],
    integrate: Sequence[str] | None,
    maximise: Sequence[str] | None,
) -> tuple[str, ...]:
    """Names of the latent sites that are maximised.

    :raises BadInput: for names that do not exist, or that contradict each other.
    """
    check_kind("integrate", integrate)
    _check_names("integrate", integrate, continuous)
    _check_names("maximise", maximise, [*continuous, *params])
    both = sorted(set(integrate or ()) & set(maximise or ()))
    if both:
        raise BadInput(f"sites {both} are both in integrate and in maximise; name each of them once.")
    left_out = [n for n in continuous if integrate is not None and n not in integrate]
    if left_out and maximise is not None and not len(maximise):
        raise BadInput(
            f"maximise=() holds the hyperparameters fixed, but {left_out} are not integrated and have no value "
            f"to be held at. Use poutine.condition(model, data={{...}}), or leave maximise out to maximise them."
        )
    chosen = tuple(n for n in continuous if n in (maximise or ()) or n in left_out)
    if len(chosen) == len(continuous):
        raise BadInput(f"every latent site ({', '.join(chosen)}) is maximised; leave at least one to integrate.")
    return chosen


def _check_names(argument: str, names: Sequence[str] | None, allowed: Sequence[str]) -> None:
    unknown = [] if names is None or isinstance(names, str) else [n for n in names if n not in allowed]
    if isinstance(names, str) or unknown:
        raise BadInput(
            f"{argument}={names!r}: expected a list of names out of {', '.join(allowed)}"
            f"{f'; there is no {unknown}' if unknown else ''}."
        )


def modules(*things: Any, depth: int = 4) -> list[torch.nn.Module]:
    """The networks within reach of a model and its arguments: attributes, closures, globals, partials."""
    found = [t for t in things if isinstance(t, torch.nn.Module)]
    parts = [p for t in things if not isinstance(t, torch.nn.Module) for p in _parts(t)] if depth else []
    return found + (modules(*parts, depth=depth - 1) if parts else [])


def submodules(*things: Any) -> list[torch.nn.Module]:
    """Those networks and all networks inside them, each once."""
    return list(dict.fromkeys(m for network in modules(*things) for m in network.modules()))


def _parts(thing: Any) -> list[Any]:
    if isinstance(thing, partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if inspect.ismethod(thing):
        return [thing.__self__, thing.__func__]
    if inspect.isfunction(thing):
        used = inspect.getclosurevars(thing)
        return [*used.nonlocals.values(), *used.globals.values()]
    if isinstance(thing, list | tuple):
        return list(thing)
    is_object = callable(thing) and hasattr(thing, "__dict__") and not isinstance(thing, type)
    own = thing if isinstance(thing, dict) else vars(thing) if is_object else {}
    return list(own.values())


def homes(parameter: Tensor, networks: Sequence[torch.nn.Module]) -> tuple[Home, ...]:
    """Every place in these networks that holds ``parameter``; tied weights have several."""
    every = [m for network in networks for m in network.modules()]
    return tuple((m, key) for m in every for key, p in m._parameters.items() if p is parameter)


@contextmanager
def in_place(values: Mapping[str, Tensor], where: Mapping[str, Sequence[Home]]) -> Iterator[None]:
    """The networks' own parameters replaced by ``values`` inside, as they were outside."""
    entries: list[tuple[dict[str, Any], str, str]] = [
        (module._parameters, key, name) for name, found in where.items() for module, key in found
    ]
    before = [entry[key] for entry, key, _ in entries]
    try:
        for entry, key, name in entries:
            entry[key] = values[name]
        yield
    finally:
        for (entry, key, _), parameter in zip(entries, before, strict=True):
            entry[key] = parameter


@dataclass(frozen=True, eq=False)
class WithParameters:
    """A model whose networks read ``values`` while it runs."""

    model: Callable[..., Any]
    values: Mapping[str, Tensor]
    where: Mapping[str, Sequence[Home]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with in_place(self.values, self.where):
            return self.model(*args, **kwargs)


IMPUTED, SEEN = "_unobserved", "_observed"  # how Pyro names the two halves of a site with an obs_mask


def imputed(run: Callable[[], Any], nodes: Mapping[str, Node]) -> dict[str, Tensor]:
    """Values of the latent halves of sites with an ``obs_mask`` that nothing else depends on.

    Whatever is not observed has its own distribution there and nothing more, and where it is observed it is masked: in
    either case it integrates to one, and it may be left out.

    :param run: the model with its arguments.
    :param nodes: of one run.
    :return: the values of that run, by site; empty for most models.
    """
    latent = {n: s["value"].detach() for n, s in nodes.items() if not s["is_observed"]}
    halves = [n for n in latent if n.endswith(IMPUTED) and n.removesuffix(IMPUTED) + SEEN in nodes]
    return {n: latent[n] for n in halves if not is_discrete(nodes[n]) and _is_leaf(run, nodes, latent, n)}


def _is_leaf(run: Callable[[], Any], nodes: Mapping[str, Node], latent: Mapping[str, Tensor], name: str) -> bool:
    """Whether the log densities of all other sites stay the same when one site takes another value."""
    with without_validation_or_params():
        other = nodes[name]["fn"].sample()
        runs = []
        for value in (latent[name], other):
            trace = poutine.trace(poutine.condition(run, data={**latent, name: value})).get_trace()
            trace.compute_log_prob()
            runs.append(sample_nodes(trace))
    return all(torch.equal(s["log_prob_sum"], runs[1][n]["log_prob_sum"]) for n, s in runs[0].items() if n != name)


MAY_LACK = "_may_lack_latents"  # set on a model that gets one where it has none
DUMMY_SITE = "_dummy"  # the latent of a model that has none: standard normal, touched by nothing, integrated to one


def with_dummy_site(model: Callable[..., Any], zero: Tensor) -> Callable[..., Any]:
    """A model with a latent site besides its own, so that one of params alone can be maximised like any other.

    :param zero: the site's mean, in the precision of the model.
    """
    return update_wrapper(partial(_beside_a_dummy, model, zero), model, updated=())  # the signature is the model's own


def _beside_a_dummy(model: Callable[..., Any], zero: Tensor, *args: Any, **kwargs: Any) -> Any:
    pyro.sample(DUMMY_SITE, dist.Normal(zero, torch.ones_like(zero)))
    return model(*args, **kwargs)


class FirstRun(Messenger):
    """Starts latents well inside their support, and takes down param statements before they are carried out.

    :param stored: what params without a value of their own begin with, in an empty store.
    :param limits: their constraints.
    :param values: of sites and params that are to begin there, constrained.
    :param shapes: of sites and plates by name; others are refused before anything is drawn for them.
    :param width: how far from the origin of unconstrained space other sites are.
    """

    def __init__(
        self,
        stored: Mapping[str, Tensor],
        limits: Mapping[str, Any],
        values: Mapping[str, Tensor] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        *,
        width: float = 2.0,
    ) -> None:
        super().__init__()
        self.width = width
        self.stored = stored
        self.limits = limits
        self.values = values or {}
        self.shapes = shapes or {}
        self.begun: set[str] = set()  # at one of these values
        self.found: dict[str, Declaration] = {}
        self.fixed: set[str] = set()  # given a value by a handler of the user's

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        if name in self.shapes and msg["value"] is None:
            shape, expected = [msg["fn"].size] if is_plate(msg) else [*msg["fn"].shape()], [*self.shapes[name]]
            if shape != expected:
                raise BadInput(f"'{name}' has shape {shape} in this model on these data; expected {expected}.")
        if msg["value"] is None and hasattr(msg["fn"], "support") and not is_discrete(msg):
            msg["value"] = self._given(msg["name"], central_value(msg["fn"], self.width), msg["fn"].support)

    def _pyro_param(self, msg: Any) -> None:
        name, given = msg["name"], msg["args"][1:]
        if name in self.found or name in self.fixed:
            return
        if msg["value"] is not None:
            self.fixed.add(name)
        elif given:
            value = self._given(name, torch.as_tensor(given[0]() if callable(given[0]) else given[0]))
            msg["args"] = (name, value)
            self._note(msg, value, value if isinstance(value, torch.nn.Parameter) else None)
        elif name in self.stored:
            pyro.get_param_store().setdefault(name, self.stored[name], self.limits[name])

    def _given(self, name: str, own: Any, support: Any = constraints.real) -> Any:
        """The value that was given for a site or param in place of its own, which for a param is looked at later."""
        if name not in self.values or own is None:
            return own
        value = torch.as_tensor(self.values[name]).detach().to(own)
        value = value if value.dim() else value.expand(own.shape)
        if value.shape != own.shape:
            raise BadInput(
                f"Start(values=...): '{name}' has shape {tuple(value.shape)}; expected {tuple(own.shape)}, as in the "
                "model."
            )
        if not _is_inside(value, support):
            given = value.reshape(-1)[:5].tolist()
            raise BadInput(
                f"Start(values=...): '{name}' begins at {given}; expected numbers strictly inside {support}."
            )
        self.begun.add(name)
        return value

    def _pyro_post_param(self, msg: Any) -> None:
        if msg["name"] not in self.found and msg["name"] not in self.fixed:
            self._note(msg, msg["value"], None)

    def _note(self, msg: Any, value: Tensor, source: torch.nn.Parameter | None) -> None:
        limits = pyro.get_param_store().get_state()["constraints"]
        constraint = limits.get(msg["name"], msg["kwargs"].get("constraint", constraints.real))
        frozen = source is not None and not source.requires_grad
        self.found[msg["name"]] = Declaration(value.detach().clone(), constraint, source, frozen)
