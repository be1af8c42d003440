"""Estimators for scikit-learn: engines behind ``fit`` and ``predict``, thin.  Needs the extra ``[sklearn]``."""

from typing import TYPE_CHECKING

from pyro_evidence.lazy_import import import_on_demand

if TYPE_CHECKING:  # at run time each is imported when it is first asked for
    from pyro_evidence.sklearn.density import MPPCA as MPPCA
    from pyro_evidence.sklearn.density import ClassConditionalMixture as ClassConditionalMixture
    from pyro_evidence.sklearn.density import EvidenceMixture as EvidenceMixture
    from pyro_evidence.sklearn.general import EvidenceMLPClassifier as EvidenceMLPClassifier
    from pyro_evidence.sklearn.general import EvidenceMLPRegressor as EvidenceMLPRegressor
    from pyro_evidence.sklearn.general import LaplaceGPClassifier as LaplaceGPClassifier
    from pyro_evidence.sklearn.general import LaplaceGPRegressor as LaplaceGPRegressor
    from pyro_evidence.sklearn.general import PRBFClassifier as PRBFClassifier
    from pyro_evidence.sklearn.general import PyroClassifier as PyroClassifier
    from pyro_evidence.sklearn.general import PyroRegressor as PyroRegressor
    from pyro_evidence.sklearn.sparse import REVMClassifier as REVMClassifier
    from pyro_evidence.sklearn.sparse import REVMRegressor as REVMRegressor
    from pyro_evidence.sklearn.sparse import RVMClassifier as RVMClassifier
    from pyro_evidence.sklearn.sparse import RVMRegressor as RVMRegressor
    from pyro_evidence.sklearn.sparse import VRVMClassifier as VRVMClassifier

import_on_demand(__name__)
