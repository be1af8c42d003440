"""Engines side by side, and evidence side by side: what only looks at fits."""

from typing import TYPE_CHECKING

from pyro_evidence.lazy_import import import_on_demand

if TYPE_CHECKING:  # at run time each is imported when it is first asked for
    from pyro_evidence.compare.committee import Committee as Committee
    from pyro_evidence.compare.committee import committee as committee
    from pyro_evidence.compare.committee import linearised as linearised
    from pyro_evidence.compare.comparison import Comparison as Comparison
    from pyro_evidence.compare.comparison import compare as compare
    from pyro_evidence.compare.evidence import EvidenceComparison as EvidenceComparison
    from pyro_evidence.compare.evidence import compare_evidence as compare_evidence
    from pyro_evidence.compare.learning_curve import LearningCurve as LearningCurve
    from pyro_evidence.compare.learning_curve import learning_curve as learning_curve
    from pyro_evidence.compare.prequential import Prequential as Prequential
    from pyro_evidence.compare.prequential import prequential as prequential
    from pyro_evidence.compare.prior_checks import PowerScaling as PowerScaling
    from pyro_evidence.compare.prior_checks import PriorDataConflict as PriorDataConflict
    from pyro_evidence.compare.prior_checks import power_scaling as power_scaling
    from pyro_evidence.compare.prior_checks import prior_data_conflict as prior_data_conflict
    from pyro_evidence.compare.runs import NUTSRun as NUTSRun
    from pyro_evidence.compare.runs import SVIRun as SVIRun
    from pyro_evidence.compare.savage_dickey import SavageDickey as SavageDickey
    from pyro_evidence.compare.savage_dickey import savage_dickey as savage_dickey
    from pyro_evidence.compare.sbc import Calibration as Calibration
    from pyro_evidence.compare.sbc import sbc as sbc
    from pyro_evidence.compare.to_arviz import arviz_groups as arviz_groups
    from pyro_evidence.compare.to_arviz import to_datatree as to_datatree
    from pyro_evidence.compare.to_arviz import to_inference_data as to_inference_data

import_on_demand(__name__)
