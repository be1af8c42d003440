"""Pictures of posteriors, mixtures and comparisons."""
