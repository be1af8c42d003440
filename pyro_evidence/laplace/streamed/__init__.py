"""Independent groups in chunks, or on ranks: each keeps its own; what is summed are values of what all share."""
