"""Checkpoints: written beside training, committed by one rename, trusted only when verified."""
