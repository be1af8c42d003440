"""What Laplace's normal density lacks in shape: marginals of single coordinates, skewed and shifted."""
