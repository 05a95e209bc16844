"""Train a language model as a `TrainConfig` states; `__init__` does not import torch."""

__version__ = "0.2.0"
