"""What one density is made of, found by derivatives."""

from pyro_evidence.moved import folder

__getattr__ = folder("structure")
