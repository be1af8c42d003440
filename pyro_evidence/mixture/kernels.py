"""The Gaussian kernels of a mixture, read off one trace of its model: enumerated and MixtureSameFamily forms alike."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from pyro_evidence.program import predictors
from pyro_evidence.program.distributions import Background, WithBackground, WithGaps
from pyro_evidence.program.log_joint import LogJoint, Model

Trace = Any


class NoMixture(ValueError):
    """Not a mixture of linear-Gaussian kernels, and why."""


@dataclass(frozen=True)
class Kernels:
    """What one trace says of the observed site, by component; the data axis has size 1 where it does not matter."""

    loc: Tensor  # (K, N or 1, m)
    scale: Tensor  # (K, N or 1, m); or (K, N or 1, m, m), lower Cholesky factors
    probs: Tensor  # (K,)
    value: Tensor  # (N, m) nan where an element is missing
    weight: Tensor  # (N,)
    is_observed: bool = True  # whether the value was given
    background: Background | None = None  # a uniform density beside the components


def kernels(joint: LogJoint, trace: Trace) -> Kernels:
    """The kernels of one trace.

    :raises NoMixture: when the observed site is not a mixture of Gaussians.
    """
    if len(joint.observed) != 1 or len(joint.discrete) > 1:
        raise NoMixture(f"it has {len(joint.observed)} observed and {len(joint.discrete)} discrete sites")
    node = trace.nodes[joint.observed[0]]
    fn = node["fn"]
    background = fn.background if isinstance(fn, WithBackground) else None
    fn = fn if background is None else fn.base_dist
    seen = fn.seen if isinstance(fn, WithGaps) else None
    parts = predictors.unwrapped(fn if seen is None else fn.base_dist)
    base, num_event = parts.base, parts.inner
    if not isinstance(base, Normal | MultivariateNormal):
        raise NoMixture(f"site '{joint.observed[0]}' is {type(base).__name__}")
    if seen is not None and isinstance(base, MultivariateNormal):
        raise NoMixture("elements of its data are missing and its noise is correlated")
    return replace(_Site(joint, trace, node, base, num_event, parts.mixing, seen).kernels(), background=background)


@dataclass(frozen=True)
class _Site:
    joint: LogJoint
    trace: Trace
    node: Any
    base: Any
    num_event: int
    mixing: Any
    seen: Tensor | None

    @property
    def full(self) -> bool:
        return isinstance(self.base, MultivariateNormal)

    def kernels(self) -> Kernels:
        if self.node["mask"] is not None:
            raise NoMixture("its data are masked")
        value, event = self._value, 1 if self.full else self.num_event
        if value.dim() - event != 1 or event > 1:
            raise NoMixture(f"data of shape {tuple(value.shape)} are not in one plate, one datum a number or a vector")
        value = value if event else value.unsqueeze(-1)
        position, probs = self._components(event)
        scale = self.base.scale_tril if self.full else self.base.scale
        parts = [
            self._laid_out(self.base.loc, position, event),
            self._laid_out(scale, position, event + self.full),
        ]
        weight = torch.as_tensor(self.node["scale"]).to(value.dtype).expand(len(value))
        if self.joint.discrete and bool((weight != 1).any()):
            raise NoMixture(
                "poutine.scale around an enumerated site is not a weight of the data; write it as MixtureSameFamily"
            )
        return Kernels(parts[0], parts[1], probs, value.detach(), weight, bool(self.node["is_observed"]))

    @property
    def _value(self) -> Tensor:
        """The data; zeros of their shape where they are not given and the trace holds draws for every component."""
        fn, value = self.node["fn"], self.node["value"]
        if not self.node["is_observed"]:
            return value.new_zeros(fn.batch_shape[-1:] + fn.event_shape)
        return value if self.seen is None else torch.where(self.seen, value, torch.nan)

    def _components(self, event: int) -> tuple[int, Tensor]:
        """Dim of the components among the batch dims, and their probabilities."""
        if self.joint.discrete:
            choice = self.trace.nodes[self.joint.discrete[0]]
            if len(choice["cond_indep_stack"]) != 1:
                raise NoMixture(f"site '{self.joint.discrete[0]}' is not in one plate")
            return choice["infer"]["_enumerate_dim"], _common(choice["fn"].probs)
        if self.mixing is None:
            raise NoMixture("it has no components")
        return -1, _common(self.mixing.probs)

    def _laid_out(self, x: Tensor, position: int, event: int) -> Tensor:
        """``x`` as ``(K, N or 1) + event``."""
        num_outputs_missing = event == (1 if self.full and event == 2 else 0)
        x = x.unsqueeze(-1) if num_outputs_missing else x
        event = max(event, 1)
        x = x[(None,) * max(0, 2 + event - x.dim())]
        x = x.movedim(position - event, 0)
        x = x.reshape(x.shape[0], -1, *x.shape[x.dim() - event :]) if x.dim() > 2 + event else x
        return _unrepeated(x) if x.shape[1] > 1 and x.stride(1) == 0 else x


def _unrepeated(x: Tensor) -> Tensor:
    """``x[:, :1]`` of what is the same for all data; derivatives never see the repetitions."""
    base = x._base
    if base is None or base.numel() >= x.numel():
        return x[:, :1]
    return base.as_strided((len(x), 1, *x.shape[2:]), x.stride(), x.storage_offset())


def _common(probs: Tensor) -> Tensor:
    """Probabilities ``(..., K)`` that are the same for all data, ``(K,)``."""
    flat = probs.reshape(-1, probs.shape[-1])
    if not bool((flat == flat[:1]).all()):
        raise NoMixture("its mixing depends on the datum")
    return flat[0]


FEW = 64  # rows on which a model of ours is recognised


def joint_of_rows(model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LogJoint | None:
    """The log joint of a mixture of ours on all its data; None for other models, few rows, and rows with gaps."""
    try:
        return _joint_of_rows(model, args, kwargs)
    except Exception:  # whatever it is, running the model on its data says it best
        return None


def _joint_of_rows(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LogJoint | None:
    if not hasattr(model, "settled"):
        return None
    rows = model.rows(*args, **kwargs)
    step = len(rows.Y) // FEW
    if step < 2 or bool(rows.Y.sum().isnan()):
        return None
    thin = LogJoint(model.settled(*args, **kwargs), model.few(step, *args, **kwargs))
    return thin.on(args, kwargs, times=step)
