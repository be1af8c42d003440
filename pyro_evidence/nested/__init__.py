"""Marginalised sites integrated numerically around Laplace: scales, correlations, kernel settings."""
