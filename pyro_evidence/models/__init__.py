"""Ordinary Pyro programs, such as a user could have written them.  They know no engine."""
