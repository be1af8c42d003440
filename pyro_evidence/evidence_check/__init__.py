"""Whether a Laplace evidence can be believed: the same number by other means, each with its error."""

from pyro_evidence.evidence_check.bridge import bridge_sampling
from pyro_evidence.evidence_check.importance import importance_sampling
from pyro_evidence.evidence_check.modes import Modes, find_modes
from pyro_evidence.evidence_check.smc import tempered_smc
from pyro_evidence.evidence_check.target import EvidenceEstimate
from pyro_evidence.evidence_check.thames import thames
from pyro_evidence.evidence_check.thermodynamic import thermodynamic_integration

__all__ = [
    "EvidenceEstimate",
    "Modes",
    "bridge_sampling",
    "find_modes",
    "importance_sampling",
    "tempered_smc",
    "thames",
    "thermodynamic_integration",
]
