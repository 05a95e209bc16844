"""Turn a job into a plan: pure, no torch, no I/O."""
