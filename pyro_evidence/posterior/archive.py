"""A Laplace state, and the integral over marginalised sites, as a file of tensors and settings, and back."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_evidence import files
from pyro_evidence.errors import BadInput
from pyro_evidence.files import Record
from pyro_evidence.fitting import codec
from pyro_evidence.fitting.process_state import empty_store, without_validation
from pyro_evidence.laplace.approximation import LaplaceState, Problem, laplace_state
from pyro_evidence.nested.inner import ConditionalModes, solve_inner
from pyro_evidence.nested.integration import Integral, OuterMode
from pyro_evidence.nested.marginalised_joint import MarginalisedJoint, marginalised_problem
from pyro_evidence.numerics.newton import Density
from pyro_evidence.precision.choices import Curvature, Damped, block_diagonal, diagonal, exact_hessian, gauss_newton
from pyro_evidence.precision.dense import Dense, Diagonal, Precision
from pyro_evidence.program.checks import require_kept
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.settings import check_path
from pyro_evidence.structure.recognise import recognise

FORMAT = "pyro_evidence laplace posterior 1"
NAMED: dict[str, Curvature] = {f.__name__: f for f in (exact_hessian, gauss_newton, block_diagonal, diagonal)}
PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size)


class Unsaved:
    """Stands for a curvature that a file cannot hold; a loaded posterior keeps its name."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, density: Density, u: Tensor, theta: Tensor) -> Tensor:
        """Refuse.

        :raises BadInput: always.
        """
        raise BadInput(
            f"this posterior was saved with curvature {self.__name__}, a function that a file of tensors and "
            f"settings cannot hold. Its numbers are all there; to refit, give LaplaceEvidence that curvature."
        )


def record(state: LaplaceState) -> dict[str, Any]:
    """Everything that :func:`restore` needs of a state, as tensors, numbers and strings.

    :raises BadInput: when the model's arguments hold anything else.
    """
    joint, precision = state.problem.joint, state.precision
    require_kept(joint, "save(...)")
    cholesky_or_diagonal = None  # of the other kinds, which mode and hyperparameters imply
    if isinstance(precision, Dense):
        cholesky_or_diagonal = precision.tril
    elif isinstance(precision, Diagonal):
        cholesky_or_diagonal = precision.diagonal
    return {
        "format": FORMAT,
        "args": [storable(a, f"argument {i}") for i, a in enumerate(joint.args)],
        "kwargs": {n: storable(a, f"argument {n!r}") for n, a in joint.kwargs.items()},
        "maximised": list(joint.maximised_sites),
        "free": [n for n in joint.hypers.names if n not in joint.maximised_sites],
        "held": {n: v.detach().clone() for n, v in joint.held.items()},
        "shapes": shapes(joint),
        "curvature": _settings(state.problem.curvature),
        "active": state.problem.active,
        "nodes": state.problem.nodes,
        "theta": state.theta,
        "u": state.u,
        "precision": cholesky_or_diagonal,
        "log_joint": state.log_joint,
        "log_joint_beside": _log_joint_beside(state),
        "decrement": state.decrement,
        "left_saddle": state.left_saddle,
        "log_evidence": state.log_evidence,
        "log_hyperprior": state.log_hyperprior,
    }


def _settings(curvature: Curvature) -> str | list[Any]:
    """A curvature as its name, or for a damped one ``[what is damped, amount]``."""
    if isinstance(curvature, Damped):
        return [_settings(curvature.curvature), curvature.amount]
    return str(getattr(curvature, "__name__", "of the caller's"))


def _curvature(settings: str | list[Any]) -> Curvature:
    if isinstance(settings, list):
        return Damped(_curvature(settings[0]), settings[1])
    return NAMED.get(settings) or Unsaved(settings)


def storable(value: Any, where: str) -> Any:
    """A copy of an argument without the storage around it, where a file without code can hold it.

    :raises BadInput: where it cannot, naming the type.
    """
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(storable(item, f"{where}[{i}]") for i, item in enumerate(value))
    if type(value) is dict and all(type(k) in PLAIN for k in value):
        return {k: storable(item, f"{where}[{k!r}]") for k, item in value.items()}
    if type(value) in PLAIN:
        return value
    kind = type(value).__name__
    raise BadInput(
        f"{where} of the model is a {kind}, which a file of tensors and settings cannot hold. Pass tensors, "
        f"numbers, strings, or lists, tuples and dicts of them, or bind it to the model by functools.partial."
    )


def shapes(joint: LogJoint) -> dict[str, list[int]]:
    """Shapes of a model's sites and hyperparameters, which identify it."""
    named = {p.name: p.shape for part in (joint.latents, joint.hypers) for p in part}
    named |= {n: v.shape for n, v in joint.held.items()}
    return {n: list(named[n]) for n in sorted(named)}


def _log_joint_beside(state: LaplaceState) -> Tensor:
    """Log joint one posterior standard deviation beside the mode, in a direction without symmetry, nats."""
    index = torch.arange(1.0, len(state.u) + 1.0, dtype=state.u.dtype, device=state.u.device)
    white = torch.where(state.problem.active, (1.7 * index).sin(), 0.0).unsqueeze(0)
    beside = state.u + state.precision.unwhiten(white / white.norm())
    return _log_joint(state, beside[0])


def _log_joint(state: LaplaceState, u: Tensor) -> Tensor:
    with torch.no_grad(), without_validation():
        return state.problem.density.log_joint(u.unsqueeze(0), state.theta)[0]


def history(content: Mapping[str, Any]) -> tuple[str, tuple[float, ...], Tensor, tuple[str, ...]]:
    """Status, log evidence of each step and of each restart, and what the failed restarts said."""
    return content["status"], tuple(content["log_evidences"]), content["restarts"], tuple(content["failures"])


def write(content: dict[str, Any], path: str | Path) -> None:
    """Save, whole or not at all; see :mod:`pyro_evidence.files`."""
    check_path("path", path)
    files.write(content, path)


def read(path: str | Path, map_location: Any = None, expected: str = FORMAT) -> Record:
    """The content of a file of ours.

    :param map_location: as for :func:`pyro_evidence.files.read`.
    :param expected: what kind of file it is, as its entry ``format`` says.
    :raises BadInput: for any other file.
    :raises FileNotFoundError: where there is none.
    """
    check_path("path", path)
    content = files.read(path, map_location)
    if content.get("format") != expected:
        raise BadInput(
            f"{path} is not a saved {expected.split(maxsplit=1)[1]}; expected a file that posterior.save(path) wrote."
        )
    return content


def restore(content: Mapping[str, Any], model: Model, *, with_marginalised: bool = False) -> LaplaceState:
    """The saved state over ``model``; nothing is fitted.

    :param with_marginalised: whether the file may hold sites that were integrated numerically.
    :raises BadInput: when the model's sites, shapes or density differ from the saved ones.
    """
    if "nested" in content and not with_marginalised:
        raise BadInput(
            "the file holds a posterior with marginalised sites; load it with NestedPosterior.load(path, model)."
        )
    joint = _joint(content, model)
    theta, u, stored = content["theta"], content["u"], content["precision"]
    structure = recognise(joint, factors=stored is None)
    problem = Problem(joint, structure, _curvature(content["curvature"]), content["active"], int(content["nodes"]))
    precision: Precision
    place = None  # the mode of what blocks share, where these are integrated
    if problem.factors is not None and problem.nodes == 1:
        precision = problem.factors.precision(u, theta)
    elif stored is None or problem.latent is not None:
        found = laplace_state(problem, theta, u)
        precision, place = found.precision, found.place
    else:
        precision = Dense(stored) if stored.dim() == 3 else Diagonal(stored)
    numbers = (content["decrement"], content["log_evidence"], content["log_hyperprior"])
    state = LaplaceState(
        problem, theta, u, content["log_joint"], precision, *numbers, bool(content["left_saddle"]), place
    )
    _require_same_density(state, content)
    return state


def _joint(content: Mapping[str, Any], model: Model) -> LogJoint:
    """The log joint with the sites, roles and held values of the file, whatever the param store holds now."""
    maximise = content["maximised"] or (None if content["free"] else ())
    try:
        with empty_store():
            joint = LogJoint(model, content["args"], content["kwargs"], maximise=maximise)
    except (ValueError, TypeError) as error:
        raise BadInput(f"the saved data do not fit this model: {error}") from error
    if shapes(joint) != content["shapes"] or joint.held.keys() != content["held"].keys():
        raise BadInput(
            f"the file holds sites and hyperparameters of shapes {content['shapes']}; this model has "
            f"{shapes(joint)}. Load it with the model that it was fitted to."
        )
    joint.held = dict(content["held"])
    return joint


def _require_same_density(state: LaplaceState, content: Mapping[str, Any]) -> None:
    """Compare the log joint with the saved one, at the mode and beside it.

    :raises BadInput: where they differ by more than rounding.
    """
    found = torch.stack([_log_joint(state, state.u), _log_joint_beside(state)])
    expected = torch.stack([content["log_joint"], content["log_joint_beside"]])
    tolerance = 1e-6 if state.problem.joint.dtype == torch.float64 else 1e-3  # rounding of a sum over the data
    if not bool(((found - expected).abs() <= tolerance * (1.0 + expected.abs())).all()):
        raise BadInput(
            f"this model's log joint is {float(found[0]):.6g} at the saved mode and {float(found[1]):.6g} "
            f"beside it; the file was saved with {float(expected[0]):.6g} and {float(expected[1]):.6g}. The sites "
            f"are the same, the density is another: load it with the model that it was fitted to."
        )


def record_integral(integral: Integral) -> dict[str, Any]:
    """Everything that :func:`restore_integral` needs beside the state of all sites."""
    found, nodes = integral.outer_mode, integral.nodes
    joint = found.state.problem.joint
    assert isinstance(joint, MarginalisedJoint)
    return {
        "sites": list(joint.marginalised_sites),
        "theta": found.state.theta,
        "u": found.state.u,
        "precision": found.precision,
        "follows": found.follows,
        "nodes_in_blocks": found.state.problem.nodes,
        "chart": codec.put_down(integral.chart, {}),
        "density": codec.put_down(integral.density, {}),
        "nodes": {"theta": nodes.theta, "u": nodes.u, "log_density": nodes.log_density},
        "node_tril": nodes.precision.tril if isinstance(nodes.precision, Dense) else None,
        "log_weights": integral.log_weights,
        "log_evidence": integral.log_evidence,
        "error": integral.error,
        "method": integral.method,
    }


def restore_integral(content: Mapping[str, Any], whole: LaplaceState, model: Model) -> Integral:
    """The integral over the marginalised sites of a restored state; nothing is fitted.

    :param whole: of all sites, restored and checked.
    """
    full = whole.problem.joint
    maximise = list(full.maximised_sites) or (None if full.hypers.size else ())
    with empty_store():
        joint = MarginalisedJoint(model, full.args, full.kwargs, marginalise=content["sites"], maximise=maximise)
    joint.held = dict(full.held)
    problem = replace(marginalised_problem(joint, whole.problem.curvature), nodes=int(content["nodes_in_blocks"]))
    state = laplace_state(problem, content["theta"], content["u"])
    found = OuterMode(state, torch.nonzero(joint.is_marginalised).flatten(), content["precision"], content["follows"])
    theta, u, log_density = (content["nodes"][name] for name in ("theta", "u", "log_density"))
    nodes = (
        solve_inner(state.problem, theta, u)
        if content["node_tril"] is None
        else ConditionalModes(theta, u, Dense(content["node_tril"]), log_density)
    )
    chart, density = (codec.taken_up(content[name], None) for name in ("chart", "density"))
    numbers = (content["log_evidence"], content["error"])
    return Integral(found, chart, density, *numbers, nodes, content["log_weights"], content["method"])
