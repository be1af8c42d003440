"""How far to trust a posterior: numbers from importance ratios, and the lines of text that say so."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pyro_evidence.numerics import importance


def importance_check(log_weights: Tensor) -> dict[str, float]:
    """The log evidence by importance sampling, and how reliable that is, from log ratios ``(S,)``, nats."""
    return {
        "pareto_k": importance.checked(log_weights).pareto_k,
        "log_evidence_importance": float(importance.log_mean(log_weights)),
        "log_evidence_importance_se": float(importance.standard_error(log_weights)),
        "effective_sample_size": float(importance.effective_sample_size(log_weights)),
    }


def lines(found: Mapping[str, Any], hyperparameters: Mapping[str, Tensor], gamma: Mapping[str, Tensor]) -> list[str]:
    """What ``summary()`` says below its table.

    :param found: the posterior's diagnostics.
    """
    return [
        *(_hyperparameter(name, value, gamma.get(name)) for name, value in hyperparameters.items()),
        _evidence(found),
        *_warnings(found),
        f"status: {found['status']}",
        *found["failed_restarts"],
    ]


def _hyperparameter(name: str, value: Tensor, gamma: Tensor | None) -> str:
    return f"{name} = {_short(value)}" + ("" if gamma is None else f"   (gamma {_short(gamma)})")


def _evidence(found: Mapping[str, Any]) -> str:
    check = f"{found['log_evidence_importance']:.4f} +- {found['log_evidence_importance_se']:.4f}"
    return (
        f"log evidence = {found['log_evidence']:.4f} nats   "
        f"(importance sampling {check}, k-hat {found['pareto_k']:.2f})"
    )


def _warnings(found: Mapping[str, Any]) -> list[str]:
    said = []
    if not found["pareto_k"] <= 0.7:  # nan included
        said.append(
            "k-hat is above 0.7: the posterior is far from Gaussian; trust neither number, run NUTS on posterior.model."
        )
    heights = [h for h in found["log_evidence_per_restart"] if not math.isnan(h)]
    if heights and max(heights) - min(heights) > 1e-3:
        levels = sorted({round(h, 3) for h in heights}, reverse=True)
        said.append(f"restarts reached different modes: log evidences {levels}")
    if found["curvature"] != "exact_hessian":
        said.append(f"curvature: {found['curvature']}, not the exact Hessian")
    return said


def _short(value: Tensor) -> str:
    flat = [f"{v:.4g}" for v in value.reshape(-1)[:12].tolist()]
    inside = ", ".join(flat + (["..."] if value.numel() > 12 else []))
    return f"[{inside}]" if value.dim() else inside
