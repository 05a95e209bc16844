"""Decide the next actions for a job: pure functions, one policy per file."""
