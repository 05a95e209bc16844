"""Keeps the garbage collector away from what stays, a seventh of the CPU time of a start.

torch and transformers make a million objects that stay, and a model and its rows some more. The
collector goes through them many times while they are made, and again in every full collection
between two steps.
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


def exempt_what_is_there() -> None:
    """Collect what is garbage now, and look at none of the rest again."""
    gc.collect()
    gc.freeze()
