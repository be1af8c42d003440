"""Mixed models from a formula: an ordinary Pyro program and its arguments.  Needs the extra ``[formula]``."""

from pyro_evidence.models.formula.families import FAMILIES
from pyro_evidence.models.formula.mixed import MixedModel, mixed

__all__ = ["FAMILIES", "MixedModel", "mixed"]
