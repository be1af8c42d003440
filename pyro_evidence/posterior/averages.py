"""Averages of predictions over rows, and how they change with one column of a formula's frame.

They are plug-ins at the mode with standard deviations by the delta method where the posterior is one Gaussian, the
uncertainty of maximised hyperparameters included; means and standard deviations of draws elsewhere.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.display import Table, by_label, percent
from pyro_evidence.errors import BadInput
from pyro_evidence.posterior.base import NUM_DRAWS
from pyro_evidence.posterior.effects import of_formula
from pyro_evidence.posterior.predict import KINDS, likelihood_moments, observed_at, prediction
from pyro_evidence.settings import check_probability

STEP = 1e-4  # of a column's range, as in marginaleffects; central differences of a smooth function are off by 1e-9


# what columns are set to, each in a copy of all rows; weights of averages over these, by what is asked
Question = tuple[Sequence[Mapping[str, Any]], Mapping[str, Sequence[float]]]
Levels = Mapping[str, Sequence[Any]]  # of each column that is asked for, none of numbers


def level_means(values: Sequence[Any] | Levels, _: Any, levels: Levels) -> Question:
    """The average at each of some values, of factors by default at each level; of several columns at all combinations.

    :raises BadInput: for a column without any.
    """
    given = values if isinstance(values, Mapping) else dict.fromkeys(levels, values) if len(levels) == 1 else {}
    chosen = {name: list(given.get(name, ())) or own for name, own in levels.items()}
    if numbers := [name for name, found in chosen.items() if not found]:
        how = "values=[...]" if len(levels) == 1 else f"values={{{numbers[0]!r}: [...]}}"
        raise BadInput(f"means({numbers[0]!r}) of a column of numbers; expected values to set it to, {how}.")
    settings = [dict(zip(chosen, each, strict=True)) for each in product(*chosen.values())]
    labels = [", ".join(f"{name}[{value}]" for name, value in setting.items()) for setting in settings]
    return settings, dict(zip(labels, torch.eye(len(labels)).tolist(), strict=True))


def contrasts(step: float, frame: Any, levels: Levels) -> Question:
    """Each level less the first, or without levels a number that is a step higher less the number itself.

    Of numbers 0 and 1 alone a step is that between them, as in marginaleffects.
    """
    ((name, own),) = levels.items()
    own = own or [0, 1] * (step == 1.0 and set(frame[name]) <= {0, 1})
    if not own:
        return [{}, {name: frame[name] + step}], {f"{name} + {step:g}": (-1.0, 1.0)}
    unit = torch.eye(len(own))
    labels = [f"{name}[{level}] - {name}[{own[0]}]" for level in own]
    return [{name: level} for level in own], dict(zip(labels[1:], (unit[1:] - unit[0]).tolist(), strict=True))


def derivative(frame: Any, levels: Levels) -> Question:
    """The derivative, by central differences.

    :raises BadInput: for a factor.
    """
    ((name, own),) = levels.items()
    if own:
        raise BadInput(f"slopes({name!r}) of a column with levels; expected numbers. Ask for comparisons({name!r}).")
    step = STEP * float(frame[name].max() - frame[name].min())
    return [{name: frame[name] + k * step} for k in (-1, 1)], {f"d/d {name}": (-0.5 / step, 0.5 / step)}


def frame_of(posterior: Any, frame: Any, *columns: str | None) -> Any:
    """The rows that predictions are averaged over, with the columns that are asked for.

    :raises BadInput: where the formula, or the frame, has them not.
    """
    model = of_formula(posterior)
    frame = model.frame if frame is None else frame
    for name in columns:
        if name is not None and not all(name in list(f.columns) for f in (model.frame, frame)):
            raise BadInput(f"{name!r} is no column of {model.formula!r}; expected one of {list(model.frame.columns)}.")
    return frame


def levels_of(posterior: Any, name: str) -> list[Any]:
    """The values of a column of the fit that holds words, or stands in the formula as a factor; else none."""
    model = of_formula(posterior)
    column = model.frame[name]
    if column.dtype.kind in "fiu" and not re.search(rf"\bC\(\s*{re.escape(name)}\b", model.formula):
        return []
    return list(column.cat.categories) if hasattr(column, "cat") else sorted(set(column))


def answered(
    posterior: Any,
    columns: Sequence[Any],
    ask: Callable[[Any, Levels], Question],
    by: str | None,
    frame: Any,
    kind: str,
    prob: float,
) -> Table:
    """The answer as a table, a row for each thing asked, level of ``by`` and class.

    :param ask: of the rows, and of the columns' levels.
    :param frame: the rows over which predictions are averaged, None for those of the fit.
    :raises BadInput: where the formula, or the frame, has the columns not.
    """
    model, frame = of_formula(posterior), frame_of(posterior, frame, *columns, by)
    settings, asked_for = ask(frame, {name: levels_of(posterior, name) for name in columns})
    check_probability(prob)
    if kind not in KINDS:
        raise BadInput(f"kind={kind!r}; expected one of {KINDS}.")
    num = len(frame)
    groups = [""] * num if by is None else [f", {by}[{value}]" for value in frame[by]]
    names = sorted(set(groups))
    member = torch.tensor([[float(group == name) for group in groups] for name in names], dtype=torch.float64)
    member, weights = member / member.sum(1, keepdim=True), torch.tensor(list(asked_for.values())).double()

    def asked(eta: Tensor, fn: Any) -> Tensor:
        """Answers by the predictions for all copies of the rows, ``(asked, groups)``, or ``(asked, groups, C)``."""
        value = eta if kind == "link" else likelihood_moments(fn, eta if eta.dim() == 1 else eta[..., 0])[0]
        return torch.einsum("af,gn,fn...->ag...", weights.to(value), member.to(value), value.unflatten(0, (-1, num)))

    copies = import_module("pandas").concat([frame.assign(**setting) for setting in settings])
    joint = posterior._with(model.arguments(copies, groups=kind != "population"), {})
    joint.model = model.seen(asked)
    ends = 0.5 - 0.5 * prob, 0.5 + 0.5 * prob
    if posterior._is_normal:
        found, how = delta(posterior, joint, ends), "the delta method"
    else:
        drawn, how = prediction(posterior, joint, None, NUM_DRAWS, 0, NUM_DRAWS), f"{NUM_DRAWS} draws"
        found = [drawn.moments.mean, drawn.moments.variance.sqrt(), *drawn.quantiles(torch.tensor(ends).double())]
    classes = [f", {c}" for c in model.classes] if found[0].dim() == 3 else [""]
    labels = [f"{label}{group}{c}" for label in asked_for for group in names for c in classes]
    headings = ["value", "sd", *(f"{percent(end)}%" for end in ends)]
    rows = by_label(labels, dict(zip(headings, (part.flatten() for part in found), strict=True)))
    note = f"averages over {num} rows, {kind}; standard deviations by {how}"
    return Table(rows, dict.fromkeys(headings, ""), [note], digits=4)


def delta(posterior: Any, joint: Any, ends: tuple[float, float]) -> list[Tensor]:
    """Value, standard deviation and interval of a function ``g`` that is linearised at the mode.

    The variance is ``J A^-1 J' + T S T'``: ``J`` the slope of ``g`` in the latents, of precision ``A``; ``S`` the
    covariance of the maximised hyperparameters, in which ``g`` has the slope ``T``, the mode moving along
    (Kass and Steffey 1989, eq. 3.4).
    """
    fit, (u, theta) = posterior._joint, (part.clone().requires_grad_() for part in posterior._mode_at)
    latents, hypers = fit.latents.constrained(u.to(fit.dtype)), fit.hypers.constrained(theta.to(fit.dtype))
    value = observed_at(joint, latents, hypers).mean
    spread = posterior._spread
    cross = torch.autograd.grad(fit.density(latents, hypers), u, create_graph=True)[0]
    variance = []
    for g in value.flatten():
        J, T = torch.autograd.grad(g, (u, theta), retain_graph=True, allow_unused=True, materialize_grads=True)
        J = J * posterior.state.problem.active  # what is pruned is zero, and known
        moved = posterior.state.precision.solve(J.unsqueeze(0))[0]
        variance.append(J @ moved)
        if spread is not None:
            T = T + torch.autograd.grad(cross @ moved, theta, retain_graph=True, materialize_grads=True)[0]
            variance[-1] = variance[-1] + T @ spread.unconstrained.nan_to_num(0.0) @ T
    sd = torch.stack(variance).sqrt().reshape(value.shape)
    z = torch.special.ndtri(torch.tensor(ends).double())
    return [part.detach() for part in (value, sd, value + z[0] * sd, value + z[1] * sd)]
