"""Coordinates in which a posterior is nearly round, for samplers."""
