"""Ordinary Pyro programs, such as a user could have written them.  They know no engine."""

from pyro_evidence.models.wrappers import Missing, marginalised, with_background

__all__ = ["Missing", "marginalised", "with_background"]
