"""Train a language model as a `TrainConfig` states; importing this package imports no torch."""

__version__ = "0.1.0"
