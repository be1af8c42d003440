"""What a model and its data must satisfy before anything is fitted; every refusal is a letter."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from pyro.distributions import Distribution
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor

from pyro_evidence.errors import BadInput, UnsupportedModel

Trace = Any
Node = Mapping[str, Any]


def tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the arguments, one level of containers deep, with what to call them."""
    named = [(f"argument {i}", a) for i, a in enumerate(args)] + [(f"argument {k!r}", a) for k, a in kwargs.items()]
    for name, value in named:
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, list | tuple):
            yield from ((f"{name}[{i}]", v) for i, v in enumerate(value) if isinstance(v, Tensor))
        elif isinstance(value, Mapping):
            yield from ((f"{name}[{k!r}]", v) for k, v in value.items() if isinstance(v, Tensor))


def describe(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The arguments as a reader of an error message wants them: shape, dtype, how many are not finite."""
    lines = [f"{name}: shape {tuple(t.shape)}, {t.dtype}{_bad_entries(t)}" for name, t in tensors(args, kwargs)]
    return "; ".join(lines) or "no tensors among the arguments"


def _bad_entries(value: Tensor) -> str:
    if not value.is_floating_point():
        return ""
    nan, inf = int(value.isnan().sum()), int(value.isinf().sum())
    return "".join(f", {n} {word}" for n, word in ((nan, "nan"), (inf, "inf")) if n)


def is_plate(node: Node) -> bool:
    """Whether a trace node is the bookkeeping of a plate."""
    return isinstance(node["fn"], _Subsample)


def sample_nodes(trace: Trace) -> dict[str, Node]:
    """The sample sites of a trace, without the bookkeeping of plates."""
    return {n: s for n, s in trace.nodes.items() if s["type"] == "sample" and not is_plate(s)}


def is_observation(node: Node) -> bool:
    """Whether a site carries data: observed, and not a ``pyro.deterministic``."""
    return bool(node["is_observed"]) and not node["infer"].get("_deterministic", False)


def check_trace(trace: Trace, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse what no engine can integrate.

    :raises UnsupportedModel: subsampled plate, no latent, no continuous latent, unsummable discrete latent.
    :raises BadInput: no observation, empty data.
    """
    _check_plates(trace)
    nodes = sample_nodes(trace)
    _check_observations({n: s for n, s in nodes.items() if is_observation(s)}, describe(args, kwargs))
    _check_latents({n: s for n, s in nodes.items() if not s["is_observed"]})


def _check_plates(trace: Trace) -> None:
    for name, node in trace.nodes.items():
        if node["type"] == "sample" and is_plate(node):
            size, subsample = node["fn"].size, node["fn"].subsample_size
            if subsample is not None and subsample < size:
                raise UnsupportedModel(
                    f"plate '{name}' subsamples {subsample} of {size}; expected the whole data, because an evidence is "
                    f"not an average over minibatches. Drop subsample_size."
                )


def _check_observations(observed: Mapping[str, Node], arguments: str) -> None:
    if not observed:
        raise BadInput(
            f"the model has no observed site; expected at least one pyro.sample(..., obs=data) or pyro.factor. "
            f"Pass the data to run(...), or use poutine.condition. Arguments: {arguments}."
        )
    for name, node in observed.items():
        if node["value"] is not None and node["value"].numel() == 0 and node["fn"].batch_shape.numel() == 0:
            raise BadInput(f"site '{name}' observes no data, shape {tuple(node['value'].shape)}. Arguments: {arguments}.")


def _check_latents(latent: Mapping[str, Node]) -> None:
    if not latent:
        raise UnsupportedModel(
            "the model has no latent site, so there is nothing to integrate and the log evidence is the log "
            "likelihood itself. Give a weight a prior with pyro.sample."
        )
    discrete = {n: s for n, s in latent.items() if is_discrete(s)}
    for name, node in discrete.items():
        if not node["fn"].has_enumerate_support:
            raise UnsupportedModel(
                f"site '{name}' is a discrete latent, {type(node['fn']).__name__}, without finite support; it cannot be "
                f"summed out. Truncate it (Categorical), or marginalise it by hand."
            )
    if len(discrete) == len(latent):
        raise UnsupportedModel(
            f"the model has only discrete latents ({', '.join(discrete)}): their sum is exact and leaves nothing for "
            f"Laplace's approximation. Give the parameters that you hold fixed a prior."
        )


def is_discrete(node: Node) -> bool:
    """Whether a latent site is to be summed rather than integrated."""
    fn: Distribution = node["fn"]
    return bool(fn.has_enumerate_support or getattr(fn.support, "is_discrete", False))


def check_parameter(name: str, value: Tensor, constraint: Any) -> None:
    """Refuse a hyperparameter that starts on or beyond the edge of its constraint.

    :raises BadInput: with the name, the value and the constraint.
    """
    inside = constraint.check(value).all() & torch.isfinite(value).all()
    edge = torch.distributions.biject_to(constraint).inv(value) if bool(inside) else value
    if not bool(inside) or not bool(torch.isfinite(edge).all()):
        raise BadInput(
            f"hyperparameter '{name}', shape {tuple(value.shape)}, starts at {value.detach().reshape(-1)[:5].tolist()}; "
            f"expected finite values strictly inside {constraint}. Start it elsewhere, for example at 1."
        )


def check_module_parameters(names: Sequence[str]) -> None:
    """Refuse networks registered by ``pyro.module`` where their weights were to be optimised.

    :raises UnsupportedModel: with the parameters' names.
    """
    hidden = [n for n in names if "$$$" in n]
    if hidden:
        raise UnsupportedModel(
            f"pyro.module hides {', '.join(n.replace('$$$', '.') for n in hidden)}: such weights can be neither "
            f"integrated nor maximised by the evidence. Make the network a PyroModule with PyroSample priors, "
            f"or pass hyper=() to hold them fixed."
        )
