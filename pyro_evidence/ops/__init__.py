"""Tensors in, tensors out: the mathematics under the engines.  Knows neither Pyro nor random numbers."""
