"""Engines: the policy of each loop.  The mathematics is in ``ops``, the density in ``program``."""
