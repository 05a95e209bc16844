"""Train a language model as one `TrainConfig` asks; importing this package imports no torch."""

__version__ = "0.1.0"
