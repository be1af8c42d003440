"""The loop that engines repeat, restarts of EM, checkpoints, and what a process has once."""
