"""A function of tensors, recorded once and run again with equal operations side by side."""
