"""Imports without garbage collection, which takes a seventh of the CPU time of a rank's start.

torch and transformers make a million objects that stay. The collector goes through them many times
during the imports, and again in every full collection between two steps.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage in this block, and exempt what is there at its end for good."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
