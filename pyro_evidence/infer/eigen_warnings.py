"""What makes the result of a relevance eigenvector machine meaningless, said in a warning."""

import warnings

from pyro_evidence.eigen_state import EigenState

SATURATED = 25.0  # log odds beyond which a likelihood no longer feels its weights


def warn_if_meaningless(state: EigenState) -> None:
    """Say whether every axis was pruned against the data, or the mode lies where the likelihood is flat."""
    explained = float(state.base_log_likelihood - state.null_log_likelihood)
    if not state.num_active and explained > 1.0:
        warnings.warn(
            f"every axis was pruned although the weights explain {explained:.3g} nats: {_why_pruned(state)} Or choose "
            "it by ridge=isotropic_evidence or cross_validation(...).",
            stacklevel=4,
        )
        return
    largest = max(
        (float(p.eta(state.quadratic.y.unsqueeze(0)).abs().max()) for p in state.quadratic.parts), default=0.0
    )
    if largest > SATURATED and not _gaussian(state):
        warnings.warn(
            f"the ridge mode has a predictor of {largest:.0f}: at ridge={state.ridge:g} some data no longer "
            "feel the "
            f"weights, and the quadratic is poor (misfit {float(state.misfit):.3g} nats). Raise the ridge.",
            stacklevel=4,
        )


def _why_pruned(state: EigenState) -> str:
    """A sentence: whether the ridge holds the weights back, or the likelihood, where it is saturated."""
    w, statistics = state.quadratic.y[: len(state.axes.directions)], float(state.axes.wald.sum())
    said = f"at ridge={state.ridge:g} their Wald statistics add up to {statistics:.2g}, and the quadratic says nothing."
    if state.ridge * float(w @ w) > statistics:
        return f"{said} The ridge outweighs the likelihood's curvature: lower it, or pass centre=score_centre."
    return f"{said} The classes are separated, so that curvature vanishes: raise the ridge, say to 1e-2."


def _gaussian(state: EigenState) -> bool:
    """Whether the quadratic is the likelihood: a long way from its centre it still agrees."""
    return abs(float(state.misfit)) <= 0.01 * (1.0 + abs(float(state.base_log_likelihood)))
