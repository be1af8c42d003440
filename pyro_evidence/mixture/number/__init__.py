"""How many components: which to leave out, which to split."""
