"""Turn a `FineTuneJob` into training on a backend; this package does not import torch."""

__version__ = "0.2.0"
