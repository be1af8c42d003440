"""Posteriors as files of tensors and settings, and back: a Laplace state, and the integral over marginalised sites."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from pyro_evidence import files
from pyro_evidence.blocks.marginal import check_nodes
from pyro_evidence.errors import BadInput, UnsupportedModel
from pyro_evidence.files import Array
from pyro_evidence.fitting.codec import encoded_arguments
from pyro_evidence.fitting.process_state import empty_store, entry_point, without_validation
from pyro_evidence.laplace.approximation import LaplaceState, Problem, laplace_state
from pyro_evidence.nested.inner import MarginalisedJoint, marginalised_problem
from pyro_evidence.nested.integration import NODES, Integral, OuterMode, by_design, by_draws, by_lattice, by_product
from pyro_evidence.nested.joint_posterior import whole_place
from pyro_evidence.numerics import evidence
from pyro_evidence.numerics.derivatives import generic_directions
from pyro_evidence.numerics.newton import Density
from pyro_evidence.numerics.quadrature.densities import Interpolated, Lattice
from pyro_evidence.numerics.quadrature.reparameterise import AxisMap, Standardisation
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
from pyro_evidence.settings import check_path, stacklevel
from pyro_evidence.structure.recognise import recognise

FORMAT = "pyro_evidence laplace posterior 1"
NAMED: dict[str, Curvature] = {f.__name__: f for f in (exact_hessian, gauss_newton, block_diagonal, diagonal)}
NUMBER = Array("", torch.float64)
HISTORY = {"status": str, "log_evidences": [float], "restarts": Array("R", finite=False), "failures": [str]}
STATE = {  # entries that are called as in LaplaceState
    "theta": Array("T", torch.float64),
    "u": Array("D", torch.float64),
    "log_joint": NUMBER,
    "decrement": float,
    "left_saddle": bool,
    "log_evidence": NUMBER,
    "log_hyperprior": NUMBER,
}
MODEL = {
    "args": [object],
    "kwargs": {str: object},
    "held": {str: Array(finite=False)},
    "shapes": {str: [int]},
    "plates": {str: int},
    "dtype": torch.dtype,
    "log_joint_beside": NUMBER,
}
SETTINGS = {
    "maximised": [str],
    "free": [str],
    "curvature": (str, list),
    "active": Array("D", torch.bool),
    "nodes": int,
    "precision": (None, Array("1 D D"), Array("1 D")),
    "beside": Array("D"),
}
# what a file of this kind of posterior holds
LAPLACE = MODEL | STATE | SETTINGS | HISTORY
NESTED = LAPLACE | {
    "nested": {
        "sites": [str],
        "theta": Array("P"),
        "u": Array("I"),
        "precision": Array("d d"),
        "follows": Array("I d"),
        "nodes_in_blocks": int,
        "beside": Array("I"),
        "centre": Array("d"),
        "basis": Array("d d"),
        "axes": [Array("d")],
        "rule": str,
        "step": float,
        "z": Array("K d"),
        "num_nodes": int,
        "error": float,
        "method": str,
    }
}
OTHER_DENSITY = "The sites are as saved, the density is another: load it with the model that it was fitted to."
Kind = TypeVar("Kind", bound="Saved")


@entry_point
class Saved:
    """Schema by which an object is written to a file and made again.

    :cvar schema: of the entries; see :func:`pyro_evidence.files.check`.
    :ivar fit_seconds: seconds of the processor that the fit took, 0 where nobody measured them; ``summary()`` takes
        no longer, or a second.
    """

    schema: ClassVar[Mapping[str, Any]]
    fit_seconds: float = 0.0  # of the processor, that the fit took; 0 where nobody measured
    _record: Callable[[], dict[str, Any]]  # the entries of the file
    _restored: ClassVar[Any]  # the object again, of entries as the schema says, a model, and lengths by its letters

    def save(self, path: str | Path) -> None:
        """Write tensors and settings, no code, in the layout of safetensors; the file is whole or is not there.

        :raises BadInput: when the model's arguments are not tensors, numbers, strings or containers of them, and where
            the data came in chunks and were not kept.
        :raises NotWritten: when the disk is full or the folder cannot be written to; what was there before stays.
        """
        check_path("path", path)
        head = {"format": FORMAT, "kind": type(self).__name__, "fit_seconds": self.fit_seconds}
        files.write(head | self._record(), path)

    @classmethod
    def load(cls: type[Kind], path: str | Path, model: Any, *, map_location: Any = None) -> Kind:
        """A saved posterior, over the same model.

        What follows from the model, its data and the mode is computed anew, and compared where the file has it too.
        What would take another fit is believed: its status, the log evidence of each step and restart, failures; for
        a Gaussian fit the elements of its precision beyond one direction, for a variational fit its bound, for a ridge
        the axes that it leads to, for a mixture of planes its other two log evidences, and the first where there are
        too many loadings for a dense precision, and for a network of kernels what would take the data.

        :param model: that of the fit, whatever the number of components that a mixture began with; for data with gaps
            ``marginalised(model)``.
        :param map_location: a device, or a dict of devices: ``"cpu"`` for a file that was written with a GPU.
        :raises BadInput: when the file is not one of ours, or the model is another.
        """
        check_path("path", path)
        content = files.read(path, map_location)
        if content.get("format") != FORMAT:
            raise BadInput(f"{path} is not a saved posterior; expected a file that posterior.save(path) wrote.")
        kind = str(content.pop("kind", "posterior"))[:60]
        if kind != cls.__name__:
            raise BadInput(f"{path} holds a {kind}; expected a {cls.__name__}: load it with {kind}.load.")
        sizes: dict[str, int] = {}  # lengths by the schema's letters
        files.check(content, {"format": str, "fit_seconds": float} | dict(cls.schema), str(path), sizes)
        try:
            found: Kind = cls._restored(content, model, sizes)
        except (BadInput, UnsupportedModel) as error:
            raise BadInput(f"{path}: {error}") from error
        except Exception as error:  # of the model, which runs on data of the file's and may raise anything
            raise files.unreadable(str(path), error, "saved posterior", "posterior.save(path)") from error
        vars(found)["fit_seconds"] = content["fit_seconds"]
        return found


def require_equal(
    name: str, found: Tensor, saved: Any, dtype: torch.dtype, advice: str = files.OTHER, error: float = 0.0
) -> None:
    """Refuse numbers of a file that do not follow from the others, up to the rounding of a sum over the data.

    :param name: of the entry.
    :param found: what follows from the others.
    :param saved: in the file, of the same shape.
    :param dtype: in which sums over the data are computed.
    :param error: by which it may differ beside, as where another processor's rounding makes draws move elsewhere.
    :raises BadInput: with both numbers.
    """
    expected = torch.as_tensor(saved).to(found).expand_as(found)
    tolerance = 1e-6 if dtype == torch.float64 else 1e-3  # rounding of a sum over the data
    equal = torch.isclose(found, expected, rtol=tolerance, atol=tolerance + error)
    if not bool(equal.all()):
        one, other = float(expected[~equal][0]), float(found[~equal][0])
        raise BadInput(
            f"{name} is {one:.10g} in the file, and {other:.10g} by this model and the file's other entries; expected "
            f"one number. {advice}"
        )


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


def _settings(curvature: Curvature) -> str | list[Any]:
    """A curvature as its name, or for a damped one ``[what is damped, amount]``."""
    if isinstance(curvature, Damped):
        return [_settings(curvature.curvature), curvature.amount]
    return str(getattr(curvature, "__name__", "of the caller's"))


def _curvature(settings: str | list[Any]) -> Curvature:
    if isinstance(settings, str) and settings in NAMED:
        return NAMED[settings]
    if isinstance(settings, str):
        warnings.warn(
            f"the curvature in the file, {settings}, is none of the package's: the precision and draws by it stand as "
            f"they were saved, and none is computed anew.",
            stacklevel=stacklevel(),
        )
        return Unsaved(settings)
    inside, amount = settings
    return damped(_curvature(inside), amount)


def record_model(joint: LogJoint) -> dict[str, Any]:
    """Record of a model for :func:`restore_model`: arguments, held values, and shapes of all sites.

    :raises BadInput: when the arguments hold what a file cannot.
    """
    encoded_arguments(joint.args, joint.kwargs)
    return {
        "args": list(joint.args),
        "kwargs": dict(joint.kwargs),
        "held": {n: v.detach() for n, v in joint.held.items()},
        "shapes": _shapes(joint),
        "plates": joint.plates,
        "dtype": joint.dtype,
    }


def _shapes(joint: LogJoint) -> dict[str, list[int]]:
    """Shapes of a model's sites and hyperparameters, which identify it."""
    named = {p.name: p.shape for part in (joint.latents, joint.hypers) for p in part}
    named |= {n: v.shape for n, v in joint.held.items()}
    return {n: list(named[n]) for n in sorted(named)}


def restore_model(content: Mapping[str, Any], model: Model, maximise: Any) -> LogJoint:
    """The log joint with the arguments and held values of the file, whatever the param store holds now.

    :raises BadInput: where the model cannot be run on them, has other sites, or does not allow a held value.
    """
    try:
        with empty_store():
            sites = content["shapes"] | {n: [size] for n, size in content["plates"].items()}
            joint = LogJoint(model, content["args"], content["kwargs"], maximise=maximise, shapes=sites)
    except (ValueError, TypeError) as error:
        raise BadInput(f"the saved data do not fit this model: {error}") from error
    shapes, held = _shapes(joint), {n: list(v.shape) for n, v in content["held"].items()}
    if shapes != content["shapes"] or held != {n: shapes[n] for n in joint.held}:
        raise BadInput(
            f"the file holds sites and hyperparameters of shapes {content['shapes'] | held}; this model has {shapes}. "
            f"Load it with the model that it was fitted to."
        )
    if joint.dtype != content["dtype"]:
        raise BadInput(
            f"the fit was in {content['dtype']}; these data and this model are in {joint.dtype}. Load it under the "
            f"default dtype that it was fitted under."
        )
    joint.held = {n: v.to(joint.held[n]) for n, v in content["held"].items()}
    for name, value in joint.held.items():
        constraint = joint.param_constraints[name]
        if not bool(constraint.check(value).all()):
            found = value.reshape(-1)[:5].tolist()
            raise BadInput(f"held[{name!r}] begins {found}; expected numbers that are {constraint}. {files.OTHER}")
    return joint


def record(state: LaplaceState) -> dict[str, Any]:
    """Everything that :func:`restore` needs of a state, as tensors, numbers and strings.

    :raises BadInput: when the model's arguments hold anything else.
    """
    joint, problem, precision = state.problem.joint, state.problem, state.precision
    require_kept(joint, "save(...)")
    diagonal = precision.diagonal if isinstance(precision, Diagonal) else None
    return {
        **record_model(joint),
        **{name: getattr(state, name) for name in STATE},
        "maximised": list(joint.maximised_sites),
        "free": [n for n in joint.hypers.names if n not in joint.maximised_sites],
        "curvature": _settings(problem.curvature),
        "active": problem.active,
        "nodes": problem.nodes,
        "precision": precision.tril if isinstance(precision, Dense) else diagonal,  # others follow from the mode
        "beside": beside(state),
        "log_joint_beside": _log_joint(state, state.u + beside(state)),
    }


def beside(state: LaplaceState) -> Tensor:
    """Away from the mode by one posterior standard deviation, in a direction without symmetry, ``(D,)``."""
    white = generic_directions(1, len(state.u), state.u) * state.problem.active
    return state.precision.unwhiten(normalize(white, dim=-1))[0]  # zero where no coordinate is active


def _log_joint(state: LaplaceState, u: Tensor) -> Tensor:
    with torch.no_grad(), without_validation():
        return state.problem.density.log_joint(u.unsqueeze(0), state.theta)[0]


def history(content: Mapping[str, Any]) -> tuple[str, tuple[float, ...], Tensor, tuple[str, ...]]:
    """Status, log evidence of each step and of each restart, and what the failed restarts said."""
    return content["status"], tuple(content["log_evidences"]), content["restarts"], tuple(content["failures"])


def restore(content: Mapping[str, Any], model: Model) -> LaplaceState:
    """The saved state over ``model``; nothing is fitted.

    Log joint and log hyperprior are evaluated anew at the saved mode; other numbers of the state are those of the file.

    :param content: as its schema says.
    :raises BadInput: when the model's sites, shapes or density differ from the saved ones.
    """
    joint = restore_model(content, model, content["maximised"] or (None if content["free"] else ()))
    if (len(content["theta"]), len(content["u"])) != (joint.hypers.size, joint.latents.size):
        raise BadInput(
            f"expected theta and u of {joint.hypers.size} and {joint.latents.size} elements, as the sites have"
        )
    numbers = {name: content[name] for name in STATE}
    stored, curvature = content["precision"], _curvature(content["curvature"])
    structure = recognise(joint, factors=stored is None)
    problem = Problem(joint, structure, curvature, content["active"], int(check_nodes(content["nodes"], None)))
    precision: Precision
    place = None  # the mode of what blocks share, where these are integrated
    if problem.factors is not None and problem.nodes == 1:  # whose point may be the mode of another density
        precision = problem.factors.precision(content["u"], content["theta"])
    elif stored is None and problem.form is None:
        raise BadInput(f"precision is None; expected the factor of one, or its diagonal. {files.OTHER}")
    elif stored is None or problem.latent is not None:
        found = laplace_state(problem, content["theta"], content["u"])
        precision, place = found.precision, found.place
    else:
        precision = Dense(stored.double().tril()) if stored.dim() == 3 else Diagonal(stored.double())
    state = LaplaceState(problem, precision=precision, place=place, **numbers)
    require_equal("log_joint", _log_joint(state, state.u), state.log_joint, joint.dtype, OTHER_DENSITY)
    require_equal("beside", beside(state), content["beside"], joint.dtype)
    there = _log_joint(state, state.u + content["beside"])
    require_equal("log_joint_beside", there, content["log_joint_beside"], joint.dtype, OTHER_DENSITY)
    require_equal("log_hyperprior", joint.log_hyperprior(state.theta).detach(), state.log_hyperprior, joint.dtype)
    return state


def require_laplace(state: LaplaceState) -> None:
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
    require_equal("log_evidence", found, state.log_evidence, dtype)
    require_equal("decrement", decrement, state.decrement, dtype)


def record_integral(integral: Integral) -> dict[str, Any]:
    """Everything that :func:`restore_integral` needs beside the state of all sites."""
    found, density, z = integral.outer_mode, integral.density, integral.standardisation.inverse(integral.phi)
    return {
        "sites": found.names,
        "theta": found.state.theta,
        "u": found.state.u,
        "precision": found.precision,
        "follows": found.follows,
        "nodes_in_blocks": found.state.problem.nodes,
        "beside": beside(found.state),
        "centre": integral.standardisation.centre,
        "basis": integral.standardisation.basis,
        "axes": list(vars(integral.standardisation.axes).values()),
        "rule": integral.rule,
        "step": density.step if isinstance(density, Lattice) else 1.0,
        "z": z,
        "num_nodes": len(density.rule.nodes) if isinstance(density, Interpolated) else 0,
        "error": integral.error,
        "method": integral.method,
    }


def restore_integral(content: Mapping[str, Any], whole: LaplaceState, model: Model) -> Integral:
    """The integral over the marginalised sites of a restored state, by the saved rule.

    :param whole: of all sites, restored and checked.
    :raises BadInput: naming what differs, with both numbers.
    """
    full = whole.problem.joint
    maximise = list(full.maximised_sites) or (None if full.hypers.size else ())
    with empty_store():
        joint = MarginalisedJoint(model, full.args, full.kwargs, marginalise=content["sites"], maximise=maximise)
    joint.held = dict(full.held)
    problem = replace(
        marginalised_problem(joint, whole.problem.curvature), nodes=int(check_nodes(content["nodes_in_blocks"], None))
    )
    state = laplace_state(problem, content["theta"], content["u"])
    found = OuterMode(state, torch.nonzero(joint.is_marginalised).flatten(), content["precision"], content["follows"])
    axes = AxisMap(*content["axes"])
    if not bool(axes.params.isfinite().all()):
        raise BadInput(f"axes have scales and tails that are not above 0; expected those of a fit. {files.OTHER}")
    where = Standardisation(content["centre"], content["basis"], axes)
    require_equal("u", whole_place(full, state)[0], whole.u, full.dtype)
    require_equal("beside", beside(state), content["beside"], full.dtype)
    z, step, rule = content["z"], content["step"], content["rule"]
    if rule != "by_draws":  # whose weights are right for any
        require_equal("centre", found.centre, where.centre, full.dtype)
        require_equal("basis", found.precision.inverse(), where.basis @ where.basis.mT, full.dtype)
    cells = (z / step).round().long()
    hang_together = 0.0 < step < math.inf and int((cells.amax(0) - cells.amin(0)).amax()) < len(cells)
    if rule == "by_lattice" and not hang_together:
        raise BadInput(f"step is {step:.4g}; expected that of a lattice whose cells hang together.")
    if rule == "by_product" and content["num_nodes"] not in NODES:
        raise BadInput(f"num_nodes is {content['num_nodes']}; expected one of {list(NODES)}, on each axis.")
    makers = {
        "by_product": partial(by_product, found, where, content["num_nodes"], z),
        "by_lattice": partial(by_lattice, found, where, cells, step),
        "by_design": partial(by_design, found, where),
        "by_draws": partial(by_draws, found, where, z),
    }
    if rule not in makers:
        raise BadInput(f"rule is {rule!r:.60}; expected one of {', '.join(makers)}.")
    integral = makers[rule]()
    require_equal("log_evidence", integral.log_evidence, whole.log_evidence, full.dtype)
    return replace(integral, error=content["error"], method=content["method"])
