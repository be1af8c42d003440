"""Models that round inside: single precision within a density in double precision, then good to seven digits."""

import torch
from torch import Tensor

from pyro_evidence.program.log_joint import LogJoint
from pyro_evidence.program.predictors import unwrapped
from pyro_evidence.program.sites import Node, sample_nodes

NAMED = 3  # sites that are named


def rounded_inside(joint: LogJoint, u: Tensor, theta: Tensor) -> list[str]:
    """A sentence that names sites whose parameters are float32 though the latents are float64; else nothing."""
    if joint.dtype != torch.float64 or not joint.kept:  # of chunks that were not kept there is nothing to run
        return []
    trace = joint.trace(u.detach().clone().requires_grad_(), theta)
    names = [name for name, node in sample_nodes(trace).items() if _is_rounded(node)]
    if not names:
        return []
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return [
        f"site(s) {', '.join(names[:NAMED])}{more} round to float32 within a float64 model, so all numbers are good to "
        f"about seven digits: look for .float() or torch.float32 in the model (a float32 tensor times a scalar of "
        f"float64 is float32), and write .double()."
    ]


def _is_rounded(node: Node) -> bool:
    """Whether a parameter that depends on the latents has the digits of float32, whatever its type is by now."""
    parts = unwrapped(node["fn"])
    values = (getattr(parts.base, name, None) for name in parts.names)
    return any(isinstance(v, Tensor) and v.requires_grad and _is_single(v.detach().double()) for v in values)


def _is_single(value: Tensor) -> bool:
    """Whether all numbers are float32, and not all of them so simple as 0, 1 and 1/2."""
    return bool((value.float().double() == value).all()) and bool((value.half().double() != value).any())
