"""Shared by engines: the loop, restarts of EM, moves of components, checkpoints, global state of the process."""
