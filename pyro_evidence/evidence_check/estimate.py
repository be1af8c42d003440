"""What every estimator of the evidence returns."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class EvidenceEstimate:
    """A log evidence with its error and the reasons to doubt it.

    :ivar method: how it was estimated.
    :ivar log_evidence: log p(D | hyperparameters), nats, total, constants included, discrete sites summed
        out.
    :ivar standard_error: of ``log_evidence``, nats; never below the rounding of the arithmetic.
    :ivar diagnostics: the method's own numbers, by name.
    :ivar doubts: a sentence for each reason not to believe the two numbers; empty when there is none.
    """

    method: str
    log_evidence: float
    standard_error: float
    diagnostics: dict[str, float]
    doubts: tuple[str, ...] = ()

    @property
    def reliable(self) -> bool:
        """Whether no diagnostic speaks against it."""
        return not self.doubts

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in self.diagnostics.items())
        head = f"log evidence = {self.log_evidence:.4f} +- {self.standard_error:.4f} nats"
        return "\n".join([f"{head}   ({self.method}; {numbers})", *self.doubts])


def rounding(log_evidence: float) -> float:
    """Size of the rounding errors in a log evidence, nats: a sum of about a thousand terms of its size."""
    return 1000.0 * torch.finfo(torch.float64).eps * (1.0 + abs(log_evidence))
