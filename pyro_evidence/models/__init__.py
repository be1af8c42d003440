"""Ordinary Pyro programs, such as a user could have written them.  They know no engine."""

from pyro_evidence.models.wrappers import Missing, marginalised, weighted, with_background

__all__ = ["Missing", "marginalised", "weighted", "with_background"]
