"""Checkpoints: written while training continues, committed by a manifest, verified before use."""
