"""Decide what happens to a job next: pure functions, one policy a file."""
