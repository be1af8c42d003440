"""How far to trust a posterior: numbers from importance ratios, and the lines of text that say so."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.numerics import importance

TRUSTED = 0.7  # k-hat up to which importance weights are believed
MANY = 1_000  # coordinates beyond which weights of joint draws spread by their number alone
NOTABLE_GAP = 0.1  # nats
NOTABLE_SHIFT = 0.2  # standard deviations
NOTABLE_RATIO = 1.2  # of two standard deviations
OTHERWISE = {
    "gauss_newton": ", the default of networks: their predictors' own curvature is left out of this evidence, so weigh "
    "it against other Gauss-Newton evidences"
}


def importance_check(
    log_weights: Tensor, draws: Mapping[str, Tensor] | None = None, dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    """The log evidence by importance sampling, how reliable that is, and what the weights change.

    The weights are Pareto-smoothed, as in :func:`~pyro_evidence.importance_sampling`: one weight far out in the tail
    would else be all of their mean.

    :param log_weights: log ratios of the exact density to the approximation, nats, shape ``(S,)``.
    :param draws: at which they were taken, constrained, each ``(S,) + site shape``.
    :param dtype: in which the density was computed.
    """
    found = importance.checked(log_weights)
    return {
        "pareto_k": found.pareto_k,
        "exact": importance.is_constant(log_weights, dtype),
        "log_evidence_importance": float(importance.log_mean(found.log_weights)),
        "log_evidence_importance_se": float(importance.standard_error(found.log_weights)),
        "effective_sample_size": float(importance.effective_sample_size(found.log_weights)),
        **shifts(draws or {}, found.weights),
    }


def not_checked() -> dict[str, Any]:
    """As :func:`importance_check` where nothing can be drawn and weighed: nan, and neither exact nor moved."""
    names = ("pareto_k", "log_evidence_importance", "log_evidence_importance_se", "effective_sample_size")
    return dict.fromkeys(names, math.nan) | {"exact": False} | shifts({}, torch.ones(1))


def shifts(draws: Mapping[str, Tensor], weights: Tensor) -> dict[str, float | str]:
    """How far the weights move means, in standard deviations, and change standard deviations, at most.

    A ratio of two standard deviations counts as the larger of itself and its reciprocal.

    :param draws: constrained, each ``(S,) + site shape``.
    :param weights: normalised, shape ``(S,)``.
    """
    moved = {n: _moved(v.reshape(len(v), -1).double(), weights.double()) for n, v in draws.items() if v.numel()}
    mean = max(moved, key=lambda n: moved[n][0], default="")
    sd = max(moved, key=lambda n: moved[n][1], default="")
    return {
        "largest_mean_shift": moved[mean][0] if mean else 0.0,
        "largest_mean_shift_site": mean,
        "largest_sd_ratio": moved[sd][1] if sd else 1.0,
        "largest_sd_ratio_site": sd,
    }


def _moved(x: Tensor, weights: Tensor) -> tuple[float, float]:
    """Largest shift of a mean and ratio of standard deviations among columns of ``x`` ``(S, K)``, constants aside."""
    before, sd = x.mean(0), x.std(0, correction=0)
    varies = torch.isfinite(sd) & (sd > 1e-12 * before.abs())  # more than rounding
    if not bool(varies.any()):
        return 0.0, 1.0
    away = (x - before)[:, varies] / sd[varies]
    shift = weights @ away
    ratio = (weights @ (away - shift).square()).sqrt()
    return float(shift.abs().max()), float(torch.maximum(ratio, 1.0 / ratio).max())


def lines(found: Mapping[str, Any], said: Sequence[str] = ()) -> list[str]:
    """What ``summary()`` says below its table.

    :param found: the posterior's diagnostics.
    :param said: what there is to say of hyperparameters.
    """
    return [
        *said,
        _evidence(found),
        *_integration(found),
        *_warnings(found),
        f"status: {found['status']}",
        *found["failed_restarts"],
        *found.get("notes", ()),
    ]


def _evidence(found: Mapping[str, Any]) -> str:
    said = f"log evidence = {found['log_evidence']:.4f} nats"
    if found.get("exact"):
        return f"{said}   (exact: given the hyperparameters the posterior is Gaussian)"
    if _unchecked(found):
        return f"{said}   (no importance sampling: the data were not kept, or there is no curvature of all weights)"
    check = f"{found['log_evidence_importance']:.4f} +- {found['log_evidence_importance_se']:.4f}"
    k = found["pareto_k"]
    tail = "no weight stands out" if k == -math.inf else f"k-hat {k:.2f}"
    return f"{said}   (importance sampling {check}, {tail})"


def _unchecked(found: Mapping[str, Any]) -> bool:
    """Whether there was nothing to draw from, or to weigh by."""
    return math.isnan(found["log_evidence_importance"]) and math.isnan(found["effective_sample_size"])


def _integration(found: Mapping[str, Any]) -> list[str]:
    """Which sites were integrated numerically, how, and how well."""
    if not found.get("outer_sites"):
        return []
    failures = f"; no inner mode at {found['inner_failures']} nodes" if found["inner_failures"] else ""
    return [
        f"integrated numerically around Laplace: {', '.join(found['outer_sites'])}   ({found['integration']}, error "
        f"{found['integration_error']:.2g} nats{failures})"
    ]


def _warnings(found: Mapping[str, Any]) -> list[str]:
    said = [*_doubts(found), *(_differences(found) if found["pareto_k"] <= TRUSTED else [])]
    heights = [h for h in found["log_evidence_per_restart"] if not math.isnan(h)]
    if len(found["log_evidence_per_restart"]) > 1 and heights:
        agreed = sum(h > max(heights) - 1e-3 for h in heights)
        said.append(f"{len(found['log_evidence_per_restart'])} starts, {agreed} of which ended in the best mode")
    if heights and max(heights) - min(heights) > 1e-3:
        levels = sorted({round(h, 3) for h in heights}, reverse=True)
        said.append(f"restarts reached different modes: log evidences {levels}")
    if found["curvature"] != "exact_hessian":
        said.append(f"curvature: {found['curvature']}, not the exact Hessian{OTHERWISE.get(found['curvature'], '')}")
    return said


def _doubts(found: Mapping[str, Any]) -> list[str]:
    """What importance sampling says against the log evidence, whatever k-hat."""
    if found.get("num_blocks"):
        return _doubtful_blocks(found)
    if _unchecked(found):
        return []
    said = []
    if found["pareto_k"] > TRUSTED and found.get("num_coordinates", 0) > MANY:
        return [
            f"k-hat is above 0.7, which in {found['num_coordinates']:,} dimensions says little: weights of joint draws "
            "spread with the number of coordinates; go by posterior.log_evidence_error."
        ]
    if not found["pareto_k"] <= TRUSTED:  # nan included
        said.append(
            "k-hat is above 0.7: the posterior is far from Gaussian; trust neither number, run NUTS on posterior.model."
        )
    gap, error = found["log_evidence_importance"] - found["log_evidence"], found["log_evidence_importance_se"]
    if abs(gap) > max(NOTABLE_GAP, 3.0 * error):
        said.append(
            f"Laplace's log evidence is {abs(gap):.2f} nats too {'low' if gap > 0 else 'high'} by importance sampling "
            f"({error:.2g} is its standard error): compare models by importance_sampling(posterior)."
        )
    return said


def _doubtful_blocks(found: Mapping[str, Any]) -> list[str]:
    """Blocks that were integrated by quadrature, and whose draws are far from their density."""
    if not found["blocks_above"]:
        return []
    return [
        f"k-hat of {found['blocks_above']:,} of {found['num_blocks']:,} blocks is above 0.7: their draws, and "
        "integrals that are Laplace's (nodes=1), are not to be trusted; posterior.blocks(site) has both by quadrature."
    ]


def _differences(found: Mapping[str, Any]) -> list[str]:
    """What the weights say against the draws, where they can be believed."""
    shift, ratio = found.get("largest_mean_shift", 0.0), found.get("largest_sd_ratio", 1.0)
    said = []
    if shift > NOTABLE_SHIFT:
        said.append(f"the mean of {found['largest_mean_shift_site']} is off by up to {shift:.2f} standard deviations")
    if ratio > NOTABLE_RATIO:
        said.append(
            f"the standard deviation of {found['largest_sd_ratio_site']} by up to {100.0 * (ratio - 1.0):.0f} %"
        )
    return [f"by importance weights {', '.join(said)}: take draws from posterior.corrected(...)"] if said else []
