"""How many components and columns: which to leave out, which to split."""
