"""The interface to Pyro: one model as one density, and conditions on models."""

from pyro_evidence.program.log_joint import LogJoint

__all__ = ["LogJoint"]
