"""The integral over marginalised sites as tensors and settings, and back."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from pyro_evidence.fitting.process_state import empty_store
from pyro_evidence.laplace.approximation import LaplaceState, laplace_state
from pyro_evidence.nested.inner import ConditionalModes, solve_inner
from pyro_evidence.nested.integration import Integral, OuterMode
from pyro_evidence.nested.marginalised_joint import MarginalisedJoint, marginalised_problem
from pyro_evidence.numerics.quadrature.densities import Interpolated, Lattice, Normal
from pyro_evidence.numerics.quadrature.reparameterise import AxisMap, Standardisation
from pyro_evidence.numerics.quadrature.rules import Rule
from pyro_evidence.precision.dense import Dense
from pyro_evidence.program.log_joint import Model


def record(integral: Integral) -> dict[str, Any]:
    """Everything that :func:`restore` needs beside the state of all sites."""
    return {name: _plain(value) for name, value in _parts(integral).items()}


def _plain(value: Any) -> Any:
    """Tensors as copies that are no views of others."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return torch.empty(value.shape, dtype=value.dtype).copy_(value) if isinstance(value, torch.Tensor) else value


def _parts(integral: Integral) -> dict[str, Any]:
    found, density, nodes = integral.outer_mode, integral.density, integral.nodes
    shape: dict[str, Any] = (
        {"axis": density.rule.nodes, "axis_log_weights": density.rule.log_weights, "log_ratio": density.log_ratio}
        if isinstance(density, Interpolated)
        else {"loc": density.loc, "tril": density.tril}
        if isinstance(density, Normal)
        else {"step": density.step, "first": density.first, "log_density": density.log_density}
        if isinstance(density, Lattice)
        else {}
    )
    return {
        "outer": list(_marginalised_sites(found)),
        "theta": found.state.theta,
        "u": found.state.u,
        "precision": found.precision,
        "follows": found.follows,
        "centre": integral.chart.centre,
        "basis": integral.chart.basis,
        "axes": dict(vars(integral.chart.axes)),
        "density": shape,
        "nodes": {"theta": nodes.theta, "u": nodes.u, "log_density": nodes.log_density},
        "node_tril": nodes.precision.tril if isinstance(nodes.precision, Dense) else None,
        "log_weights": integral.log_weights,
        "log_evidence": integral.log_evidence,
        "error": integral.error,
        "nodes_in_blocks": found.state.problem.nodes,
        "method": integral.method,
    }


def _marginalised_sites(found: OuterMode) -> tuple[str, ...]:
    joint = found.state.problem.joint
    assert isinstance(joint, MarginalisedJoint)
    return joint.marginalised_sites


def restore(content: Mapping[str, Any], whole: LaplaceState, model: Model) -> Integral:
    """The integral over the model of a restored state; nothing is fitted.

    :param whole: of all sites, restored and checked.
    """
    joint, full = _joint(content, whole, model), whole.problem
    problem = replace(marginalised_problem(joint, full.curvature), nodes=int(content.get("nodes_in_blocks", 1)))
    state = laplace_state(problem, content["theta"], content["u"])
    found = OuterMode(state, torch.nonzero(joint.is_marginalised).flatten(), content["precision"], content["follows"])
    where = Standardisation(content["centre"], content["basis"], AxisMap(**content["axes"]))
    shape = content["density"]
    density = (
        Normal(shape["loc"], shape["tril"])
        if "loc" in shape
        else Lattice(shape["step"], shape["first"], shape["log_density"])
        if "step" in shape
        else Interpolated(Rule(shape["axis"], shape["axis_log_weights"]), shape["log_ratio"])
    )
    return Integral(
        found,
        where,
        density,
        content["log_evidence"],
        content["error"],
        _nodes(content, found),
        content["log_weights"],
        content["method"],
    )


def _joint(content: Mapping[str, Any], whole: LaplaceState, model: Model) -> MarginalisedJoint:
    full = whole.problem.joint
    maximise = list(full.maximised_sites) or (None if full.hypers.size else ())
    with empty_store():
        joint = MarginalisedJoint(model, full.args, full.kwargs, marginalise=content["outer"], maximise=maximise)
    joint.held = dict(full.held)
    return joint


def _nodes(content: Mapping[str, Any], found: OuterMode) -> ConditionalModes:
    nodes, tril = content["nodes"], content["node_tril"]
    if tril is None:
        return solve_inner(found.state.problem, nodes["theta"], nodes["u"])
    return ConditionalModes(nodes["theta"], nodes["u"], Dense(tril), nodes["log_density"])
