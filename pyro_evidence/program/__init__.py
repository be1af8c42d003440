"""The gate to Pyro: one model as one density, and what it may not do."""

from pyro_evidence.program.log_joint import LogJoint

__all__ = ["LogJoint"]
