"""Estimators for scikit-learn: engines behind ``fit`` and ``predict``, thin.  Needs the extra ``[sklearn]``."""

from pyro_evidence.sklearn.density import MPPCA, ClassConditionalMixture, EvidenceMixture
from pyro_evidence.sklearn.general import (
    EvidenceMLPClassifier,
    EvidenceMLPRegressor,
    LaplaceGPClassifier,
    LaplaceGPRegressor,
    PRBFClassifier,
    PyroClassifier,
    PyroRegressor,
)
from pyro_evidence.sklearn.sparse import REVMClassifier, REVMRegressor, RVMClassifier, RVMRegressor, VRVMClassifier

__all__ = [
    "MPPCA",
    "ClassConditionalMixture",
    "EvidenceMLPClassifier",
    "EvidenceMLPRegressor",
    "EvidenceMixture",
    "LaplaceGPClassifier",
    "LaplaceGPRegressor",
    "PRBFClassifier",
    "PyroClassifier",
    "PyroRegressor",
    "REVMClassifier",
    "REVMRegressor",
    "RVMClassifier",
    "RVMRegressor",
    "VRVMClassifier",
]
