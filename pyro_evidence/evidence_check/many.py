"""The evidence of a posterior in many dimensions, where weights of joint draws tell nothing: block by block."""

from pyro_evidence.evidence_check.target import EvidenceEstimate, rounding
from pyro_evidence.laplace.blocks.error import EvidenceError, by_more_nodes
from pyro_evidence.laplace.nested.posterior import NestedPosterior
from pyro_evidence.laplace.posterior import LaplacePosterior
from pyro_evidence.laplace.report import MANY

FEWEST = 20  # blocks: of few, nodes about a mode tell no more than joint weights
BELIEVED = 0.1  # nats for each coordinate, of the second term of Laplace's series


def in_parts(posterior: LaplacePosterior) -> EvidenceEstimate | None:
    """The log evidence with an error that is found part by part; None where that would tell nothing.

    Independent blocks are integrated by quadrature, what they share by Laplace around that; the error is against fewer
    nodes about the mode of everything.  Where outer sites were integrated, and where no blocks are independent, it is
    the fit's log evidence with its own ``log_evidence_error``, in the latter case for more than 1,000 coordinates only.
    """
    try:
        first = posterior.log_evidence_error
    except (ArithmeticError, RuntimeError):  # letters of models whose blocks or third derivatives cannot be had
        return None
    state = posterior._inside
    size = int(state.problem.active.sum())
    if first.num_blocks < FEWEST:
        return _by_series(posterior, first, size) if size > MANY else None
    if isinstance(posterior, NestedPosterior):
        return _estimate(posterior, 0.0, first, f"integrated outside, its error by {first.method}")
    second = by_more_nodes(state, first)
    error = abs(second.signed - first.signed) if second is not first else float(first)
    shared = f", {second.num_shared} shared coordinates by Laplace" if second.num_shared else ""
    return _estimate(posterior, second.signed, error, f"quadrature in {second.num_blocks:,} blocks{shared}")


def _by_series(posterior: LaplacePosterior, error: EvidenceError, size: int) -> EvidenceEstimate:
    found = _estimate(posterior, 0.0, error, f"Laplace, its error by {error.method}")
    if error <= BELIEVED * size:
        return found
    doubt = (
        f"the second term of Laplace's series is {error:.3g} nats for {size:,} coordinates; expected at most "
        f"{BELIEVED} for each, or the series tells nothing. Run NUTS on posterior.model on a part of the data."
    )
    return EvidenceEstimate(found.method, found.log_evidence, found.standard_error, found.diagnostics, (doubt,))


def _estimate(posterior: LaplacePosterior, gain: float, error: float, method: str) -> EvidenceEstimate:
    value = float(posterior.log_evidence) + gain
    return EvidenceEstimate(method, value, max(float(error), rounding(value)), {"above_laplace": gain})
