"""A Laplace state, and the integral over marginalised sites, as a file of tensors and settings, and back."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_evidence import files
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.files import Array, Record
from pyro_evidence.fitting import codec
from pyro_evidence.fitting.process_state import empty_store, without_validation
from pyro_evidence.laplace.approximation import LaplaceState, Problem, laplace_state
from pyro_evidence.nested.inner import (
    ConditionalModes,
    MarginalisedJoint,
    log_priors,
    marginalised_problem,
    solve_inner,
)
from pyro_evidence.nested.integration import Integral, OuterMode
from pyro_evidence.nested.joint_posterior import index_map
from pyro_evidence.numerics import evidence
from pyro_evidence.numerics.newton import Density
from pyro_evidence.numerics.quadrature import rules
from pyro_evidence.numerics.quadrature.densities import Interpolated, Lattice, Normal
from pyro_evidence.precision.choices import (
    Curvature,
    Damped,
    block_diagonal,
    damped,
    diagonal,
    exact_hessian,
    gauss_newton,
)
from pyro_evidence.precision.dense import Dense, Diagonal, Precision
from pyro_evidence.program.checks import require_kept
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.settings import check_count, check_path
from pyro_evidence.structure.recognise import recognise

FORMAT = "pyro_evidence laplace posterior 1"
NAMED: dict[str, Curvature] = {f.__name__: f for f in (exact_hessian, gauss_newton, block_diagonal, diagonal)}
NUMBER = Array("")
LAPLACE = {
    "format": str,
    "args": [object],
    "kwargs": {str: object},
    "maximised": [str],
    "free": [str],
    "held": {str: Array(finite=False)},
    "shapes": {str: [int]},
    "curvature": (str, list),
    "active": Array("D", torch.bool),
    "nodes": int,
    "theta": Array("T"),
    "u": Array("D"),
    "precision": (None, Array("1 D D"), Array("1 D")),
    "log_joint": NUMBER,
    "log_joint_beside": NUMBER,
    "decrement": float,
    "left_saddle": bool,
    "log_evidence": NUMBER,
    "log_hyperprior": NUMBER,
    "status": str,
    "log_evidences": [float],
    "restarts": Array("R", finite=False),
    "failures": [str],
}
VECTORS = {"kind": str, "inside": [[str, Array("d")]]}  # as the codec puts an object down
TENSORS = {"kind": str, "inside": [[str, Array()]]}
CHART = {"kind": str, "inside": [[str, Array("d")], [str, Array("d d")], [str, VECTORS]]}
DENSITY = {"kind": str, "inside": [[str, (float, Array(finite=False), TENSORS)]]}
NESTED = LAPLACE | {
    "nested": {
        "sites": [str],
        "theta": Array("P"),
        "u": Array("I"),
        "precision": Array("d d"),
        "follows": Array("I d"),
        "nodes_in_blocks": int,
        "chart": CHART,
        "density": DENSITY,
        "nodes": {"theta": Array("K P"), "u": Array("K I"), "log_density": Array("K", finite=False)},
        "node_tril": (None, Array("K I I")),
        "log_weights": Array("K", finite=False),
        "log_evidence": NUMBER,
        "error": float,
        "method": str,
    }
}
OTHER_DENSITY = "The sites are as saved, the density is another: load it with the model that it was fitted to."
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
    if isinstance(settings, str):
        return NAMED.get(settings) or Unsaved(settings)
    inside, amount = settings
    return damped(_curvature(inside), amount)


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


@contextmanager
def checked(content: Record, schema: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    """Inside, what a file holds is as its schema says; whatever is wrong with it still is an error that names the file.

    Lengths by the schema's letters are given.  The model runs inside, on data of the file's, and may raise anything.

    :raises BadInput: saying what is wrong, and where.
    """
    sizes: dict[str, int] = {}
    files.check(content, schema, str(content.path), sizes)
    try:
        yield sizes
    except (BadInput, UnsupportedModel) as error:
        raise BadInput(str(error) if str(content.path) in str(error) else f"{content.path}: {error}") from error
    except Exception as error:
        raise files.unreadable(content.path, error, "saved posterior", "posterior.save(path)") from error


def require_equal(name: str, found: Tensor, saved: Any, dtype: torch.dtype, advice: str = files.OTHER) -> None:
    """Refuse numbers of a file that do not follow from the others, up to the rounding of a sum over the data.

    :param name: of the entry.
    :param found: what follows from the others.
    :param saved: in the file, of the same shape.
    :param dtype: in which sums over the data are computed.
    :raises BadInput: with both numbers.
    """
    expected = torch.as_tensor(saved).to(found).expand_as(found)
    tolerance = 1e-6 if dtype == torch.float64 else 1e-3  # rounding of a sum over the data
    equal = torch.isclose(found, expected, rtol=tolerance, atol=tolerance)
    if not bool(equal.all()):
        one, other = float(expected[~equal][0]), float(found[~equal][0])
        raise BadInput(
            f"{name} is {one:.10g} in the file, and {other:.10g} by this model and the file's other entries; expected "
            f"one number. {advice}"
        )


def restore(content: Record, model: Model) -> LaplaceState:
    """The saved state over ``model``; nothing is fitted.

    Log joint and log hyperprior are evaluated anew at the saved mode; other numbers of the state are those of the file.

    :param content: as its schema says; see :func:`checked`.
    :raises BadInput: when the model's sites, shapes or density differ from the saved ones.
    """
    joint = _joint(content, model)
    if (len(content["theta"]), len(content["u"])) != (joint.hypers.size, joint.latents.size):
        raise BadInput(
            f"expected theta and u of {joint.hypers.size} and {joint.latents.size} elements, as the sites have"
        )
    theta, u = content["theta"].to(joint.initial_theta), content["u"].to(joint.initial_theta)
    stored, curvature = content["precision"], _curvature(content["curvature"])
    structure = recognise(joint, factors=stored is None)
    problem = Problem(joint, structure, curvature, content["active"], check_count("nodes", content["nodes"]))
    precision: Precision
    place = None  # the mode of what blocks share, where these are integrated
    if problem.factors is not None and problem.nodes == 1:
        precision = problem.factors.precision(u, theta)
    elif stored is None or problem.latent is not None:
        found = laplace_state(problem, theta, u)
        precision, place = found.precision, found.place
    else:
        precision = Dense(stored.double().tril()) if stored.dim() == 3 else Diagonal(stored.double())
    numbers = (content["decrement"], content["log_evidence"], content["log_hyperprior"], content["left_saddle"])
    state = LaplaceState(problem, theta, u, content["log_joint"], precision, *numbers, place)
    require_equal("log_joint", _log_joint(state, u), content["log_joint"], joint.dtype, OTHER_DENSITY)
    require_equal("log_joint_beside", _log_joint_beside(state), content["log_joint_beside"], joint.dtype, OTHER_DENSITY)
    require_equal("log_hyperprior", joint.log_hyperprior(theta).detach(), content["log_hyperprior"], joint.dtype)
    return state


def require_laplace(state: LaplaceState, content: Record) -> None:
    """Refuse a log evidence that is not Laplace's at the saved mode, or a point that is none by the saved slope.

    :raises BadInput: with the number of the file, and the one by its other numbers.
    """
    problem, dtype = state.problem, state.problem.joint.dtype
    if state.place is None:
        found = evidence.log_evidence(state.log_joint, state.precision.log_det[0], int(problem.active.sum()))
        found = found + problem.eliminated(state.u.unsqueeze(0), state.theta)
        slope = problem.density.gradient(state.u.unsqueeze(0), state.theta)[1].double() * problem.active
        decrement = (slope * state.precision.solve(slope)).sum()
    else:  # blocks were integrated, and the mode is that of what they share
        assert problem.marginal is not None
        found, decrement = problem.marginal.log_evidence(state.place), torch.as_tensor(state.place.decrement)
    require_equal("log_evidence", found, content["log_evidence"], dtype)
    require_equal("decrement", decrement, content["decrement"], dtype)


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
    integral = Integral(found, chart, density, *numbers, nodes, content["log_weights"], content["method"])
    require_equal("u", index_map(full, found).whole(found.centre, state.u), whole.u, full.dtype)
    _require_nodes(integral)
    return integral


def _require_nodes(integral: Integral) -> None:
    """Refuse nodes that are not Laplace's approximation of the model there, and an integral that is not theirs.

    :raises BadInput: naming what differs, with both numbers.
    """
    found, chart, density, nodes = integral.outer_mode, integral.chart, integral.density, integral.nodes
    problem, d, z = found.state.problem, chart.num_dims, chart.inverse(integral.phi)
    log_weights, dtype, known = integral.log_weights, problem.joint.dtype, torch.isfinite(nodes.log_density)
    require_equal("centre", found.centre, chart.centre, dtype)
    require_equal("basis", found.precision.inverse(), chart.basis @ chart.basis.mT, dtype)
    u, theta = nodes.u[known], nodes.theta[known]
    with torch.no_grad(), without_validation():
        log_joint = problem.joint.log_joint(u, theta) + log_priors(problem, theta)
    log_density = evidence.log_evidence(log_joint, nodes.precision.log_det[known], int(problem.active.sum()))
    if problem.nodes == 1:
        require_equal("log_density", log_density, nodes.log_density[known], dtype)

    log_normal = -0.5 * (z.square() + math.log(math.tau)).sum(-1)
    if isinstance(density, Lattice):
        log_volume = torch.full_like(log_normal, d * math.log(density.step))
        cells = tuple(((z - density.first) / density.step).round().long().T)
        require_equal("log_density", log_weights + integral.log_evidence, density.log_density[cells], dtype)
    elif isinstance(density, Interpolated):
        rule = rules.product(density.rule, d)
        log_volume = rule.log_weights - log_normal
        log_ratio = (log_weights - rule.log_weights).reshape([len(density.rule.nodes)] * d)
        require_equal("log_ratio", log_ratio, density.log_ratio, dtype)
    else:
        assert isinstance(density, Normal)
        design = rules.central_composite(d) if d <= rules.LARGEST_DESIGN else None
        log_volume = -rules.student_log_density(z) - math.log(len(z))
        if design is not None and len(design.nodes) == len(z):
            log_volume = design.log_weights - log_normal
        weights = log_weights.exp().unsqueeze(-1)
        loc = (weights * z).sum(0)
        require_equal("loc", loc, density.loc, dtype)
        require_equal("tril", torch.linalg.cholesky((weights * (z - loc)).mT @ (z - loc)), density.tril, dtype)
    log_mass = nodes.log_density + chart.log_slope(z) + log_volume
    require_equal("log_evidence", log_mass.logsumexp(0), integral.log_evidence, dtype)
    require_equal("log_weights", (log_mass - integral.log_evidence)[known], log_weights[known], dtype)
