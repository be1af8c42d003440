"""Laplace's approximation of any Pyro model, and its hyperparameters where the log evidence is highest."""
