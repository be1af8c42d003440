"""Rows of a mixture of probabilistic PCA that are not in memory at once."""
