"""Whether a Laplace evidence can be believed: the same number by other means, each with its error."""

from typing import TYPE_CHECKING

from pyro_evidence.lazy_import import import_on_demand

if TYPE_CHECKING:  # at run time each is imported when it is first asked for
    from pyro_evidence.evidence_check.bridge import bridge_sampling as bridge_sampling
    from pyro_evidence.evidence_check.importance import importance_sampling as importance_sampling
    from pyro_evidence.evidence_check.modes import Modes as Modes
    from pyro_evidence.evidence_check.modes import find_modes as find_modes
    from pyro_evidence.evidence_check.smc import tempered_smc as tempered_smc
    from pyro_evidence.evidence_check.target import EvidenceEstimate as EvidenceEstimate
    from pyro_evidence.evidence_check.thames import thames as thames
    from pyro_evidence.evidence_check.thermodynamic import thermodynamic_integration as thermodynamic_integration

import_on_demand(__name__)
