"""How hyperparameters are measured and moved: metrics of their own, and curvature by differences of exact slopes."""
