"""A Laplace state as a file of tensors and settings, and back."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.laplace import LaplaceState, Problem, problem
from pyro_evidence.ops.curvature import Curvature, block_diagonal, diagonal, exact_hessian, gauss_newton
from pyro_evidence.ops.precision import Dense, Diagonal
from pyro_evidence.program import LogJoint, Model

FORMAT = "pyro_evidence laplace posterior 1"
CURVATURES: dict[str, Curvature] = {f.__name__: f for f in (exact_hessian, gauss_newton, block_diagonal, diagonal)}


def record(state: LaplaceState) -> dict[str, Any]:
    """Everything that :func:`restore` needs, as tensors, numbers and strings.

    :raises BadInput: when the model's arguments hold anything else.
    """
    joint = state.problem.joint
    refuse_objects(joint.args, "positional arguments")
    refuse_objects(joint.kwargs, "keyword arguments")
    precision = state.precision
    return {
        "format": FORMAT,
        "args": list(joint.args),
        "kwargs": dict(joint.kwargs),
        "integrate": list(joint.latents.names),
        "hyper": list(joint.hyper_sites),
        "held": {n: v.detach() for n, v in joint.held.items()},
        "shapes": shapes(joint),
        "curvature": getattr(state.problem.curvature, "__name__", "?"),
        "active": state.problem.active,
        "theta": state.theta,
        "u": state.u,
        "precision": precision.tril if isinstance(precision, Dense) else precision.adjoint.reciprocal(),
        "log_joint": state.log_joint,
        "decrement": state.decrement,
        "log_evidence": state.log_evidence,
        "log_hyperprior": state.log_hyperprior,
    }


def refuse_objects(value: Any, where: str) -> None:
    """Only what a file without code can hold.

    :raises BadInput: naming the type that it cannot.
    """
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            refuse_objects(item, where)
    elif not isinstance(value, Tensor | int | float | str | bool | None):
        raise BadInput(
            f"the model's {where} hold a {type(value).__name__}, which a file of tensors and settings cannot; bind it to the "
            f"model first, for example model = functools.partial(model, {type(value).__name__.lower()}=...)."
        )


def shapes(joint: LogJoint) -> dict[str, list[int]]:
    """What identifies a model: its sites and hyperparameters with their shapes."""
    return {p.name: list(p.shape) for part in (joint.latents, joint.hypers) for p in part}


def write(content: dict[str, Any], path: str | Path) -> None:
    """Save, through a temporary file so that a crash leaves no half file."""
    part = Path(f"{path}.part")
    torch.save(content, part)
    part.replace(path)


def read(path: str | Path) -> Mapping[str, Any]:
    """The content of a file of ours.

    :raises BadInput: for any other file.
    """
    try:
        content = torch.load(path, weights_only=True)
    except FileNotFoundError:
        raise
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise BadInput(f"{path} cannot be read as a saved posterior ({type(error).__name__}): it is damaged or foreign.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise BadInput(f"{path} is not a saved Laplace posterior; expected one that posterior.save(path) wrote.")
    return content


def restore(content: Mapping[str, Any], model: Model) -> LaplaceState:
    """The saved state over ``model``.

    :raises BadInput: when the model's sites, shapes or density differ from the saved ones.
    """
    joint = _joint(content, model)
    if shapes(joint) != content["shapes"]:
        raise BadInput(f"the file holds sites {content['shapes']}; this model has {shapes(joint)}. Load it with the model it was fitted to.")
    at = Problem(joint, *_structure(joint, content), content["active"])
    precision = Dense(content["precision"]) if content["precision"].dim() == 3 else Diagonal(content["precision"])
    numbers = (content["log_joint"], precision, content["decrement"], content["log_evidence"], content["log_hyperprior"])
    state = LaplaceState(at, content["theta"], content["u"], *numbers)
    found = at.density.log_joint(state.u.unsqueeze(0), state.theta)[0].detach()
    if not bool(torch.isclose(found, state.log_joint, rtol=1e-6)):
        raise BadInput(
            f"this model's log joint at the saved mode is {float(found):.6g}; the file was saved with {float(state.log_joint):.6g}. "
            f"It has the same sites but is another density."
        )
    return state


def _joint(content: Mapping[str, Any], model: Model) -> LogJoint:
    hyper: list[str] | tuple[str, ...] | None = content["hyper"] or (() if content["held"] else None)
    try:
        joint = LogJoint(model, content["args"], content["kwargs"], hyper=hyper)
    except (ValueError, TypeError) as error:
        raise BadInput(f"the saved data do not fit this model: {error}") from error
    joint.held = dict(content["held"])
    return joint


def _structure(joint: LogJoint, content: Mapping[str, Any]) -> tuple[Any, Curvature]:
    fresh = problem(joint)
    return fresh.structure, CURVATURES.get(content["curvature"], exact_hessian)
