"""Run a model without dropout within a block."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout off and restore the mode of every module afterwards."""
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in was_training:
            module.training = True
