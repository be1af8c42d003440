"""Ordinary Pyro programs, such as a user could have written them.  They know no engine."""

from pyro_evidence.models.wrappers import marginalised, weighted, with_background

__all__ = ["marginalised", "weighted", "with_background"]
