"""Quadrature against the standard normal density: nodes, maps that make a density normal, interpolation."""
