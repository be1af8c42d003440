"""Conditions on a model and its arguments: what fails them, or cannot be run on them, gets an error message."""

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from pyro.distributions import Delta
from torch import Tensor
from torch.distributions import biject_to
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from pyro_evidence.data.arrays import as_tensor, require_dense
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.numerics.batched import PAIRS
from pyro_evidence.numerics.coordinates import is_identity, unconstrained_shape
from pyro_evidence.program.sites import (
    Node,
    Trace,
    innermost,
    is_discrete,
    is_empty,
    is_masked,
    is_observation,
    is_plate,
    is_structure,
    sample_nodes,
)

LARGEST = 1e70  # its fourth power, which squared curvatures reach, is a float; so is that of its reciprocal
OFFSET = 1e4  # data this far from zero beside their spread are best told without it
HALF = (torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
INDEXING = (Tensor.__getitem__, torch.take, Tensor.take)
WHOLE = (*INTEGERS, torch.uint8)
LINALG_ERROR: type[Exception] = torch.linalg.LinAlgError  # type: ignore[attr-defined]
LEVELS = " Levels that index a latent site are whole numbers from 0: write .long() after them."
MORE_JITTER = (
    " A covariance that is not positive definite holds nan, or rows that are nearly alike (inputs that occur twice): "
    "give it more jitter, as in K + 1e-6 * torch.eye(len(K))."
)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # of a call


def tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the arguments, one level of containers deep, with what to call them."""
    for name, value in _named(args, kwargs).items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, list | tuple):
            yield from ((f"{name}[{i}]", v) for i, v in enumerate(value) if isinstance(v, Tensor))
        elif isinstance(value, Mapping):
            yield from ((f"{name}[{k!r}]", v) for k, v in value.items() if isinstance(v, Tensor))


def as_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with NumPy's arrays and pandas' columns and tables made tensors, one level of containers deep.

    Floats come in the precision of the floating tensors among the arguments, else in torch's default; whole numbers as
    int64.  What is no array of numbers stays as it is, and so do lists.
    """
    floats = (t.dtype for _, t in tensors(args, kwargs) if t.is_floating_point())
    dtype = next(floats, torch.get_default_dtype())
    found = tuple(_converted(a, dtype) for a in args), {k: _converted(v, dtype) for k, v in kwargs.items()}
    for name, value in tensors(*found):
        require_dense(name, value)
    return found


def says_singular(error: BaseException | None) -> bool:
    """Whether an error is of a matrix without a Cholesky factor or an inverse."""
    return isinstance(error, LINALG_ERROR) or "PositiveDefinite" in str(error)


def column_names(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Names of the columns of those arguments that are tables, before they became tensors."""
    tables = {n: v for n, v in _named(args, kwargs).items() if hasattr(v, "columns") and not isinstance(v, Tensor)}
    return {n: tuple(str(c) for c in v.columns) for n, v in tables.items()}


def _converted(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_converted(v, dtype) for v in value)
    if isinstance(value, dict):
        return {k: _converted(v, dtype) for k, v in value.items()}
    return as_tensor(value, dtype)


def require_kept(joint: Any, what: str) -> None:
    """Refuse what needs the data of the fit, where they were not kept.

    :raises BadInput: saying what needs them.
    """
    if not joint.has_data:
        raise BadInput(
            f"{what} needs the data of the fit, which came in chunks and were not kept; pass the model's arguments for "
            f"some rows to predict, log_prob or log_likelihood."
        )


def describe(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The arguments as a reader of an error message wants them: shape, dtype, how many are not finite."""
    given = list(tensors(args, kwargs))
    found = [f"{n}: shape {tuple(t.shape)}, {t.dtype}{bad_entries(t)}{_there(t, given)}" for n, t in given]
    found += [f"{n}: {type(a).__name__}, no tensor" for n, a, _ in arrays(args, kwargs)]
    return "; ".join(found) or "no tensors among the arguments"


def _there(value: Tensor, given: Sequence[tuple[str, Tensor]]) -> str:
    """The integers of the same row as the first bad entry, such as its group, in words; empty for none."""
    bad = ~torch.isfinite(value) if value.is_floating_point() and value.dim() else None
    if bad is None or not bool(bad.any()):
        return ""
    row = int(bad.nonzero()[0, 0])
    levels = [(n, t) for n, t in given if t.dim() == 1 and len(t) == len(value) and t.dtype in WHOLE]
    return "".join(f", where {n} is {int(t[row])}" for n, t in levels)


def arrays(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Arguments that hold data and are no tensors, arrays, tables, lists, with what to call them and an element."""
    found: list[tuple[str, Any, Any]] = []
    for name, value in _named(args, kwargs).items():
        if isinstance(value, list | tuple):
            if len(value) > 0 and isinstance(value[0], int | float | str | list | tuple):
                found.append((name, value, value[0]))
        elif hasattr(value, "__array__") and not isinstance(value, Tensor | type):
            found.append((name, value, next(iter(value.__array__().flat), None)))
    return found


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by what an error message calls them."""
    return {f"argument {i}": a for i, a in enumerate(args)} | {f"argument {k!r}": a for k, a in kwargs.items()}


def bad_entries(value: Tensor) -> str:
    """The number of entries that are not finite and the place of the first, in words; empty when all are."""
    if not value.is_floating_point():
        return ""
    bad = {"nan": value.isnan(), "inf": value.isinf()}
    return "".join(
        f", {int(cells.sum())} {word} (first at {cells.nonzero()[0].tolist()})"
        for word, cells in bad.items()
        if cells.any()
    )


@contextmanager
def new_data(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Inside, what a fitted model raises on other arguments becomes an error message.

    :raises BadInput: in place of errors of Pyro's and torch's.
    """
    try:
        yield
    except UnsupportedModel:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise run_failed(error, args, kwargs) from error


def run_failed(error: Exception, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BadInput:
    """The error message for a model that its arguments break; an error message of the model's own is passed on."""
    if isinstance(error, BadInput):
        return BadInput(str(error).split("Trace Shapes:")[0].strip())  # which Pyro appends to whatever a model raises
    given = list(tensors(args, kwargs))
    said, *values = " ".join(str(error).split("Trace Shapes:")[0].split()).split(" found invalid values:")
    said = said[:600] + "".join(f" found values:{v[:60]}{' ...' * (len(v) > 60)}" for v in values)
    advice = "Expected at least one datum. " if any(t.numel() == 0 for _, t in given) else ""
    if gaps := ", ".join(n for n, t in given if bad_entries(t)):
        advice += f"Remove rows with nan or inf from {gaps}, or mask them, with any number of the support in their "
        advice += "place (obs_mask=...). "
    if "out of bounds" in str(error):  # a number that indexes too far
        whole = [(n, t) for n, t in given if t.dtype in WHOLE and t.numel()]
        seen = ", ".join(f"those of {n} go from {int(t.min())} to {int(t.max())}" for n, t in whole)
        advice += f"A site of n levels has the levels 0 to n - 1{'; ' * bool(seen)}{seen}. "
    else:
        advice += _other_types(given, arrays(args, kwargs))
    kind = OutsideSupport if "to be within the support" in str(error) else BadInput
    rules = (
        "Shapes must broadcast, all floating tensors must have one dtype (build priors with X.new_ones(...), or set "
        "torch's default dtype), and data must lie in the support of their distribution."
    )
    if "derivative" in said:
        rules = "Write it by functions that have derivatives, and what jumps by a Categorical site or by torch.sigmoid."
    return kind(
        f"the model cannot be run on these arguments ({describe(args, kwargs)}): {said}. {advice}{rules}"
        f"{MORE_JITTER if says_singular(error) else ''}{LEVELS if 'used as indices' in str(error) else ''}"
    )


def _other_types(given: Sequence[tuple[str, Tensor]], others: Sequence[tuple[str, Any, Any]]) -> str:
    """The advice on data that are no tensors, :func:`arrays`, and on integers, complex numbers and half precision."""
    words = [name for name, _, element in others if isinstance(element, str | bytes)]
    if words:
        named = ", ".join(words)
        return f"Levels are whole numbers from 0: codes, levels = pandas.factorize({named}), and pass the codes. "
    whole = ", ".join(n for n, t in given if not t.is_floating_point() and not t.is_complex())
    half = ", ".join(n for n, t in given if t.dtype in (torch.float16, torch.bfloat16))
    imaginary = ", ".join(n for n, t in given if t.is_complex())
    named = ", ".join(n for n, *_ in others)
    advice = f"Expected tensors: write torch.as_tensor(...) around {named}. " if others else ""
    advice += f"Expected real numbers: pass the .real or the .abs() of {imaginary}. " if imaginary else ""
    advice += f"Half precision has two or three digits: pass .double() of {half}. " if half else ""
    return advice + (f"Integers and floats may not mix: try .double() after {whole}. " if whole else "")


class OutsideSupport(BadInput):
    """Data that have no density under the distribution that observes them."""


class StructureSites(UnsupportedModel):
    """A model has structure sites, where a single structure is to be fitted."""


def require_one_structure(trace: Any) -> None:
    """Refuse structure sites that are not fixed.

    :raises StructureSites: naming them.
    """
    if names := [n for n, node in sample_nodes(trace).items() if is_structure(node)]:
        raise StructureSites(
            f"structure site(s) {', '.join(names)} are summed over by LaplaceEvidence(...).run(...) alone; expected a "
            f"fixed structure here. Fix it: poutine.condition(model, data={{'{names[0]}': ...}})."
        )


def check_trace(trace: Trace, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse what no engine can integrate.

    :param trace: of a plain run, log probabilities computed.
    :raises UnsupportedModel: subsampled plate, no latent, no continuous latent, unsummable discrete latent.
    :raises BadInput: no observation, empty data, shapes or dtypes that do not fit.
    """
    for name, node in trace.nodes.items():
        if node["type"] == "sample" and is_plate(node) and len(node["value"]) < node["fn"].size:
            raise UnsupportedModel(
                f"plate '{name}' subsamples {len(node['value'])} of {node['fn'].size}; expected the whole "
                f"data, because an evidence is not an average over minibatches. Drop subsample_size."
            )
    nodes = sample_nodes(trace)
    latent = {n: s for n, s in nodes.items() if not s["is_observed"]}
    check_kinds(nodes, args, kwargs)
    observed = {n: s for n, s in nodes.items() if is_observation(s)}
    if not observed:
        raise BadInput(
            f"the model has no observed site; expected at least one pyro.sample(..., obs=data) or "
            f"pyro.factor. Pass the data to run(...), or use poutine.condition. "
            f"Arguments: {describe(args, kwargs)}."
        )
    if empty := [(n, tuple(s["value"].shape)) for n, s in observed.items() if is_empty(s)]:
        raise BadInput(
            f"site '{empty[0][0]}' observes no data, shape {empty[0][1]}. Expected at least one datum. "
            f"Arguments: {describe(args, kwargs)}."
        )
    _check_latents(latent)
    masked = [n for n, s in nodes.items() if s["infer"].get("_deterministic") or is_masked(s, torch.all)]
    if len(masked) == len(nodes):
        raise BadInput(
            f"site(s) {', '.join(map(repr, masked))} are masked altogether: the log density is zero everywhere. "
            f"Expected a mask that is True where there are data, and priors without one: look at "
            f"poutine.mask(mask=...), obs_mask= and .mask(...)."
        )
    for name, node in nodes.items():
        _check_shape(name, node, has_discrete=any(is_discrete(s) for s in latent.values()))
    _check_dtypes({n: s for n, s in latent.items() if not is_discrete(s)}, nodes)


def _check_latents(latent: Mapping[str, Node]) -> None:
    if not latent:
        raise UnsupportedModel(
            "the model has no latent site, so there is nothing to integrate and the log evidence is the log "
            "likelihood itself. Give a weight a prior with pyro.sample."
        )
    if all(s["value"].numel() == 0 for s in latent.values()):
        shapes = {n: tuple(s["value"].shape) for n, s in latent.items()}
        raise BadInput(f"the latent sites have no elements: {shapes}; expected at least one. Have the inputs columns?")
    for name, node in latent.items():
        if isinstance(innermost(node["fn"]), Delta):
            raise UnsupportedModel(
                f"site '{name}' is a Delta: it has no density, so that it can be neither integrated nor moved. "
                f"Expected a value that is computed: write pyro.deterministic('{name}', ...) in place of "
                f"pyro.sample('{name}', dist.Delta(...))."
            )
    discrete = {n: s for n, s in latent.items() if is_discrete(s)}
    for name, node in discrete.items():
        if not node["fn"].has_enumerate_support:
            raise UnsupportedModel(
                f"site '{name}' is a discrete latent, {type(node['fn']).__name__}, without finite support; "
                f"it cannot be summed out. Truncate it (Categorical), or marginalise it by hand."
            )
    if len(discrete) == len(latent):
        raise UnsupportedModel(
            f"the model has only discrete latents ({', '.join(discrete)}): their sum is exact and leaves "
            f"nothing for Laplace's approximation. Give the parameters that you hold fixed a prior."
        )


def _check_event(name: str, node: Node) -> None:
    """Refuse data whose columns Pyro would repeat until there are as many as the distribution has."""
    given, event = tuple(torch.as_tensor(node["value"]).shape), tuple(node["fn"].event_shape)
    own = given[max(0, len(given) - len(event)) :]
    if len(own) < len(event) or any(e not in (g, 1) for g, e in zip(own, event, strict=True)):
        raise BadInput(
            f"site '{name}' has data of shape {given}; expected (..., {', '.join(map(str, event))}), because one datum "
            f"of its distribution has shape {event}. Pass the same columns as for the fit, in the same order."
        )


def _check_pairs(name: str, node: Node, batch: torch.Size) -> None:
    """Refuse an outer product of data and parameters of the shape ``batch``."""
    value = torch.as_tensor(node["value"]).shape
    data = value[: len(value) - node["fn"].event_dim]
    shape = np.broadcast_shapes(batch, data)  # torch's own has to import a great deal at its first call
    if shape not in (batch, data):
        raise BadInput(
            f"site '{name}': values of shape {tuple(data)} and parameters of shape {tuple(batch)} do not "
            f"match one by one, they broadcast to {tuple(shape)}. Expected equal shapes, such as (N,) and "
            f"(N,): squeeze the data or the predictor."
        )


def _check_shape(name: str, node: Node, has_discrete: bool) -> None:
    """Refuse an accidental outer product of data, parameters and plates, and axes that a discrete site might take."""
    if "log_prob" not in node:
        return
    shape = node["log_prob"].shape
    _check_event(name, node)
    _check_pairs(name, node, node["fn"].batch_shape)
    event, given = tuple(node["fn"].event_shape), tuple(torch.as_tensor(node["value"]).shape)
    cells = given[: len(given) - len(event)]
    for plate in node["cond_indep_stack"]:  # data that are one datum, and again as many as the plate has cells
        repeated = len(cells) < -plate.dim or cells[plate.dim] == 1 if plate.vectorized else False
        if event == (0,) and repeated and plate.size > 1 and math.prod(cells) == 1:
            raise BadInput(
                f"factor '{name}' is one number in plate '{plate.name}' of size {plate.size}: it would count "
                f"{plate.size} times. Expected it outside of the plate, or a number for each cell. If it is meant, "
                f"expand it to shape ({plate.size},)."
            )
        if is_observation(node) and repeated and plate.size > 1 and plate.size in event:
            raise BadInput(
                f"site '{name}' has data of shape {given}, of which one datum has shape {event}, in plate "
                f"'{plate.name}' of size {plate.size}: all of them would count {plate.size} times. Expected either: "
                f"take .to_event away, so that each cell of the plate has a datum, or the plate. If it is meant, "
                f"observe {(plate.size, *given)}: obs=data.expand({plate.size}, ...)."
            )
    plates = {f.dim for f in node["cond_indep_stack"] if f.vectorized}
    loose = [d for d in range(-len(shape), 0) if shape[d] > 1 and d not in plates]
    if plates and loose and (is_observation(node) or not node["is_observed"]):
        _check_counted_once(name, node, loose[-1])
    if has_discrete and loose:
        raise UnsupportedModel(
            f"site '{name}', batch shape {tuple(shape)}: no plate declares axis {loose[-1]}, size "
            f"{shape[loose[-1]]}, which a discrete site of this model could then take for its own. Put the "
            f"site into a pyro.plate, or call .to_event({len(shape)})."
        )


def _check_counted_once(name: str, node: Node, axis: int) -> None:
    """Refuse an ``axis`` of the log density that no plate of the site declares, unless each cell has a datum."""
    shape, value = tuple(node["log_prob"].shape), tuple(torch.as_tensor(node["value"]).shape)
    if node["is_observed"] and value[: len(value) - node["fn"].event_dim] == shape:
        return
    plates = ", ".join(f"'{f.name}' of size {f.size} at axis {f.dim}" for f in node["cond_indep_stack"] if f.vectorized)
    what = "each datum would count" if node["is_observed"] else "it would be drawn"
    raise BadInput(
        f"site '{name}': values of shape {value} have a log density of shape {shape} in plate(s) {plates}. No plate "
        f"declares axis {axis}, along which {what} {shape[axis]} times. Expected one number for each cell of the "
        f"plates, such as parameters and data of shape (N,) in a plate of size N: for (N, 1) take .squeeze(-1), or "
        f"call .to_event(1) if the last axis is of one datum; else declare axis {axis} by pyro.plate(..., dim={axis})."
    )


def _check_dtypes(latent: Mapping[str, Node], nodes: Mapping[str, Node]) -> None:
    """Refuse single precision latents under double precision data, where derivatives would be noise."""
    dtypes = {n: s["value"].dtype for n, s in latent.items()}
    results = {n: s["log_prob"].dtype for n, s in nodes.items() if n in latent or is_observation(s)}
    if len(set(dtypes.values())) > 1 or (torch.float32 in dtypes.values() and torch.float64 in results.values()):
        double = [n for n, dtype in results.items() if torch.float64 in (dtype, dtypes.get(n))]
        single = [n for n, dtype in dtypes.items() if dtype != torch.float64]
        raise BadInput(
            f"float32 and float64 are mixed: latent {', '.join(single)} are single precision, "
            f"{', '.join(double)} double. Expected one dtype: torch.set_default_dtype(torch.float64) before "
            f"the model is built, or data.float()."
        )


def check_supports(before: Mapping[str, Node], after: Mapping[str, Node]) -> None:
    """Refuse latents whose support moves with other sites or with hyperparameters.

    :param before: the latent nodes of one run.
    :param after: those of another, at other values.
    :raises UnsupportedModel: with the site and its support at both.
    """
    for name, node in before.items():
        supports, images, like = (node["fn"].support, after[name]["fn"].support), [], node["value"]
        for transform in map(biject_to, supports):  # of 1, or 0 for the real line
            shape = unconstrained_shape(transform, like.shape)
            one = torch.ones(shape, dtype=like.dtype, device=like.device)
            images.append(like.new_zeros(()) if is_identity(transform) else transform(one).detach())
        if not torch.equal(*images):
            raise UnsupportedModel(
                f"site '{name}' has support {supports[0]} at one point and {supports[1]} at another: it "
                f"depends on another site or on a hyperparameter. Expected a fixed support, because the "
                f"change of variables is fixed (in NUTS too, which would be silently wrong). Draw a site on "
                f"a fixed support and transform it, for example x = bound * pyro.sample('{name}', Uniform(0, "
                f"1))."
            )


def check_structure(trace: Trace, latent: Iterable[str], known: frozenset[str]) -> None:
    """Refuse a run that has other latent sites, or other params, than the first run had.

    :param latent: the latent sites of the first run.
    :param known: those that may be left to chance in this run, and the params.
    """
    nodes = trace.nodes
    gone = [n for n in latent if n not in nodes]
    free = {n for n, s in sample_nodes(trace).items() if not s["is_observed"]}.union(trace.param_nodes)
    new = [n for n in nodes if n in free - known]
    if gone or new:
        raise UnsupportedModel(
            f"the model's sites change from run to run: {', '.join(f'{n!r}' for n in new + gone)} "
            f"{'appeared' if new else 'vanished'} where the first run had them otherwise. Expected the same "
            f"latent sites and params at every value; look for an if or a loop that depends on a sampled "
            f"value."
        )


def check_module_parameters(names: Sequence[str]) -> None:
    """Refuse networks registered by ``pyro.module`` where their weights were to be optimised.

    :raises UnsupportedModel: with the parameters' names.
    """
    hidden = [n.replace("$$$", ".") for n in names if "$$$" in n]
    if hidden:
        raise UnsupportedModel(
            f"pyro.module hides {', '.join(hidden)}: such weights can be neither integrated nor maximised by "
            f"the evidence. Make the network a PyroModule with PyroSample priors, or pass maximise=() to hold "
            f"them fixed."
        )


def check_reads(before: Mapping[str, Node], after: Mapping[str, Node], observed: Iterable[str], moved: str) -> None:
    """Refuse a latent whose value an observed site sees, but not its slope.

    :param before: nodes of a run, log probabilities computed, in which no observed site leads to the latent ``moved``.
    :param after: those of a run in which it has another value, and all others the same.
    :raises UnsupportedModel: where an observed site has another density.
    """
    densities = [{n: nodes[n]["log_prob"].detach().nan_to_num() for n in observed} for nodes in (before, after)]
    changed = [n for n in observed if not torch.equal(densities[0][n], densities[1][n])]
    if changed:
        raise UnsupportedModel(
            f"the density of site '{changed[0]}' changes with '{moved}', but has no slope in it: there is no gradient "
            f"to climb. Expected '{moved}' to be computed with as a tensor: look for {moved}.item(), float({moved}), "
            f"{moved}.detach(), .numpy(), or for a function without a derivative, as torch.special.airy_ai. Where it "
            f"is compared (torch.where(x > {moved}, ...)), rounded or used as an index, the density jumps: make the "
            f"site a Categorical, which is summed out, or take a smooth step, by torch.sigmoid."
        )


def out_of_range(error: ArithmeticError) -> UnsupportedModel:
    """The error message for plain numbers that the model makes of latents, and that are out of range at some value."""
    return UnsupportedModel(
        f"the model computes with plain numbers, which are out of range where a latent is far from the data ({error}). "
        f"Expected latents to be computed with as tensors, whose slopes are known: look for int(...), float(...), "
        f"round(...) and .item() of a latent, in the line of the model's that the error above comes from."
    )


Constant = tuple[str, float, int]  # the first observed site, its one number, and how many times it is observed


def constant_targets(constant: Constant, otherwise: str = "pass maximise=()") -> BadInput:
    """The error message for targets that are one constant, where the scale of their noise is to be found.

    :param otherwise: what else to do about that scale.
    """
    site, value, number = constant
    return BadInput(
        f"site '{site}' observes one constant, {value:g}, {number:,} times: a constant is met exactly, and the log "
        f"evidence grows without a bound as the scale of the noise goes to 0. Expected data that vary; or hold the "
        f"scale at a number (beta=1.0), or {otherwise}."
    )


def not_finite(nodes: Mapping[str, Node], arguments: str) -> BadInput:
    """The error message for a density without a finite value or gradient.

    :param nodes: of a run at a point where that is so, log probabilities computed.
    """
    bad = [n for n, s in nodes.items() if not bool(torch.isfinite(s["log_prob_sum"]))]
    values = {n: torch.as_tensor(nodes[n]["value"]) for n in bad}
    sites = [f"'{n}' (shape {tuple(v.shape)}{bad_entries(v)})" for n, v in values.items()]
    where = f"its value is not finite at site(s) {', '.join(sites)}" if bad else "its gradient is not finite"
    return BadInput(
        f"the log joint density has no finite value and gradient at any of 100 random starts; at the last, "
        f"{where}. Arguments: {arguments}. Remove rows with nan or inf (a mask hides their value, not their "
        f"gradient: put any number of the support there), and check that the data lie in the support of "
        f"their distribution. Where the density is finite for few values only, begin there: "
        f"LaplaceEvidence(model, start=Start(values={{'a_site': ...}}))."
    )


def check_begun(values: Mapping[str, Any], begun: Set[str], sites: Sequence[str]) -> None:
    """Refuse start values of what the model does not have, or has with a value of its own.

    :raises BadInput: naming them.
    """
    if unknown := sorted(values.keys() - begun):
        raise BadInput(
            f"Start(values=...) names {unknown}; expected continuous latent sites and params of the model, out of "
            f"{list(sites)}."
        )


def same_arguments(a: Arguments, b: Arguments) -> bool:
    """Whether two calls have the same objects, or tensors of the same values, as arguments."""
    one, other = _named(*a), _named(*b)
    if one.keys() != other.keys():
        return False
    pairs = [(x, other[name]) for name, x in one.items() if x is not other[name]]
    are_tensors = all(isinstance(x, Tensor) and isinstance(y, Tensor) for x, y in pairs)
    return are_tensors and all((x.dtype, x.device) == (y.dtype, y.device) and torch.equal(x, y) for x, y in pairs)


def _check_support(name: str, node: Mapping[str, Any]) -> None:
    if node["mask"] is not None or not isinstance(node["value"], Tensor):
        return
    try:
        inside = node["fn"].support.check(node["value"])
    except NotImplementedError:  # a distribution without a support
        return
    if not bool(inside.all()):
        cell = (~inside).nonzero()[0].tolist()
        raise BadInput(
            f"site '{name}': {int((~inside).sum())} values are outside the support of {type(node['fn']).__name__}, "
            f"first {node['value'][tuple(cell)].tolist()} at {cell}; expected data of the same kind as for the fit."
        )


def unvalidated(fn: Any) -> bool:
    """Whether a distribution was told, by ``validate_args=False``, to take values outside its support.

    :param fn: of a run with validation on.
    """
    while fn is not None:
        if fn.__dict__.get("_validate_args") is False:
            return True
        fn = fn.__dict__.get("base_dist")
    return False


def require_targets(
    nodes: Mapping[str, Mapping[str, Any]], observed: Sequence[str], unvalidated: Container[str] = ()
) -> None:
    """Refuse arguments without data for a site that observed some when the model was fitted, or with other columns.

    :param nodes: of a trace on these arguments.
    :param unvalidated: sites whose distribution takes values outside its support.
    :raises BadInput: naming the sites.
    """
    missing = [n for n in observed if n not in nodes or not nodes[n]["is_observed"]]
    if missing:
        raise BadInput(f"site(s) {missing} have no data in these arguments; pass the targets as in run(...).")
    enumerated = any("_enumerate_dim" in n["infer"] for n in nodes.values() if n["type"] == "sample")
    for name in observed:
        _check_event(name, nodes[name])
        if name not in unvalidated:
            _check_support(name, nodes[name])
        if not enumerated:  # or components take axes of the parameters
            _check_pairs(name, nodes[name], nodes[name]["fn"].batch_shape)


def check_sizes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments whose fourth powers are no floats: what is computed from them would be inf or 0.

    :raises BadInput: naming the argument, the number and its place.
    """
    for name, value in tensors(args, kwargs):
        if value.dtype != torch.float64 or not value.numel():
            continue  # no other dtype has such numbers
        size = value.detach().abs().nan_to_num(0.0, posinf=0.0)
        largest = float(size.max())
        if largest > LARGEST:
            place = [int(i) for i in torch.unravel_index(size.argmax(), value.shape)]
            raise BadInput(
                f"{name}, shape {tuple(value.shape)}, holds {float(value[tuple(place)]):.3g} at {place}; expected "
                f"numbers of at most {LARGEST:g}, because larger ones have no finite fourth power. If it stands for a "
                f"missing value, leave its row out; else divide by a typical value: {name} / {largest:.0e}."
            )
        if 0.0 < largest < 1.0 / LARGEST:
            raise BadInput(
                f"{name}, shape {tuple(value.shape)}, holds nothing larger than {largest:.3g}; expected some number of "
                f"at least {1.0 / LARGEST:g}, because smaller ones have fourth powers of 0. Divide by a typical value: "
                f"{name} / {largest:.0e}."
            )


def check_kinds(nodes: Mapping[str, Node], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse half precision, which has two or three digits, and complex numbers.

    :param nodes: sample sites of a trace, log probabilities computed.
    :raises BadInput: naming the site.
    """
    for name, node in nodes.items():
        for what, kind in (("value", "values"), ("log_prob", "log densities")):
            dtype = getattr(node.get(what), "dtype", None)
            if dtype in HALF:
                has, advice = "two or three digits, too few for a log evidence", ".double() or .float()"
            elif dtype is not None and dtype.is_complex:
                has = "an imaginary part, and densities are of real numbers"
                advice = ".real, or its .abs(), or both parts as columns"
            else:
                continue
            raise BadInput(
                f"site '{name}' has {kind} of {dtype}, with {has}; expected float64 or float32. Pass the data's "
                f"{advice}. Arguments: {describe(args, kwargs)}."
            )


def check_offset(name: str, value: Tensor, J: Tensor) -> None:
    """Refuse data that differ from one another in the last digits only, or by little where no weight is a constant.

    :param J: design of the site's predictor, ``(N, C, M)``.
    :raises BadInput: naming the site, where sums of squares would be rounding, or the offset is all that is fitted.
    """
    if not value.is_floating_point() or value.numel() < 2:
        return
    centre, spread = float(value.mean()), float(value.std())
    if 0.0 < spread < abs(centre) * torch.finfo(value.dtype).eps ** 0.5:
        raise BadInput(
            f"site '{name}' has values about {centre:.6g} that differ by {spread:.2g} only: half of the digits of "
            f"{value.dtype} are the same in all of them, and squares are rounding. Expected data near zero: subtract "
            f"the mean before the fit."
        )
    if not 0.0 < spread < abs(centre) / OFFSET:
        return
    ones, columns = J.new_ones(len(J) * J.shape[1], 1), J.flatten(0, 1)
    driver = "gelsy" if J.device.type == "cpu" else "gels"
    nearest = columns @ torch.linalg.lstsq(columns, ones, driver=driver).solution
    if not bool((nearest - ones).abs().max() < 1e-3):
        raise BadInput(
            f"site '{name}' has values about {centre:.6g} that differ by {spread:.2g} only, and no combination of the "
            f"model's weights is a constant: the fit would be of the offset. Expected data near zero, or a bias among "
            f"the weights: subtract the mean before the fit, or add a column of ones."
        )


class Levels(TorchFunctionMode):
    """A run of the model that refuses data below zero as an index.

    What the model has counted itself, as in ``x[torch.arange(n) - 1]``, is its own affair; data are its arguments and
    whatever else was there before the run, in another integer type and shape too.

    :param args: the arguments of the run, with ``kwargs``.
    :ivar adds: whether the run has called ``torch.logaddexp``.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.arguments = [(n, t) for n, t in tensors(args, kwargs) if t.dtype in INTEGERS]
        self.counted: Any = WeakTensorKeyDictionary()  # tensors of integers that the run has made
        self.adds = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Carry out a function; look at an index before, and remember integers that come out of others."""
        if func in INDEXING and len(args) > 1:
            for index in args[1] if isinstance(args[1], tuple) else (args[1],):
                if isinstance(index, Tensor) and index.dtype in INTEGERS:
                    self._check(index)
        result, self.adds = func(*args, **(kwargs or {})), self.adds or func in PAIRS
        if isinstance(result, Tensor) and result.dtype in INTEGERS:
            self.counted[result] = True
        return result

    def _check(self, index: Tensor) -> None:
        flat = index.reshape(-1)
        below = (flat < 0).nonzero()[:, 0]
        if not len(below):
            return
        given = (n for n, t in self.arguments if t.numel() == len(flat) and bool((t.reshape(-1) == flat).all()))
        name = next(given, None)
        if name is None and index in self.counted:
            return
        name = name or "a tensor that is no argument of the model's"
        raise BadInput(
            f"{name}, shape {tuple(index.shape)}, is an "
            f"index and holds {int(flat[below[0]])} at {int(below[0])}, numbers below zero in {len(below):,} of "
            f"{len(flat):,} rows; expected levels from 0. In torch -1 is the last level, in pandas' codes a missing "
            f"one. Leave those rows out of all arguments (keep = index >= 0), or give what is missing a level of its "
            f"own (index = torch.where(index < 0, num_levels, index), with one level more); where counting from the "
            f"end is meant, pass index % num_levels."
        )
