"""Engines side by side, and evidence side by side: what only looks at fits."""

from pyro_evidence.compare.committee import Committee, committee, linearised
from pyro_evidence.compare.comparison import Comparison, compare
from pyro_evidence.compare.evidence import EvidenceComparison, compare_evidence
from pyro_evidence.compare.learning_curve import LearningCurve, learning_curve
from pyro_evidence.compare.prequential import Prequential, prequential
from pyro_evidence.compare.prior_checks import PowerScaling, PriorDataConflict, power_scaling, prior_data_conflict
from pyro_evidence.compare.runs import NUTSRun, SVIRun
from pyro_evidence.compare.savage_dickey import SavageDickey, savage_dickey
from pyro_evidence.compare.sbc import Calibration, sbc
from pyro_evidence.compare.to_arviz import arviz_groups, to_datatree, to_inference_data

__all__ = [
    "Calibration",
    "Committee",
    "Comparison",
    "EvidenceComparison",
    "LearningCurve",
    "NUTSRun",
    "PowerScaling",
    "Prequential",
    "PriorDataConflict",
    "SVIRun",
    "SavageDickey",
    "arviz_groups",
    "committee",
    "compare",
    "compare_evidence",
    "learning_curve",
    "linearised",
    "power_scaling",
    "prequential",
    "prior_data_conflict",
    "savage_dickey",
    "sbc",
    "to_datatree",
    "to_inference_data",
]
