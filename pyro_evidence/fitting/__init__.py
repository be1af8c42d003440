"""What engines share: the loop, restarts of EM, moves of components, checkpoints, what a process has once."""
