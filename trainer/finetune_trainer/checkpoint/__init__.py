"""Checkpoints: written beside training, committed by a manifest, trusted only when verified."""
