"""Compute the memory of a run by formula, and check that it is available."""
