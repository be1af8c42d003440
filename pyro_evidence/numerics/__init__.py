"""Published equations on tensors: torch alone."""
