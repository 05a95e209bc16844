"""Report the curves of a run to experiment trackers: Weights & Biases and MLflow.

One process on rank 0's node follows rank 0's journal. No rank waits for it, imports a tracker's
library or sees its credentials.
"""
