"""The loop that engines repeat, restarts of EM, components left out and split, checkpoints, and what a process has once."""
