"""When Python collects garbage: not while things that stay are made, and between steps as asked.

torch and transformers make a million objects that stay, and a model and its rows some more. The
collector goes through them many times while they are made, a seventh of the CPU time of a start,
and again in every full collection between two steps. A rank that collects while the others compute
keeps all of them waiting at the next collective, each rank at another step.
"""

import gc
from collections.abc import Callable, Iterator
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


@contextmanager
def collected_every(steps: int) -> Iterator[Callable[[int], None]]:
    """Collect garbage in this block only after each so many steps; with 0 as Python likes.

    The block calls what it is given with the number of finished steps. That number is the same on
    all ranks, also after a resume, so that they collect at the same time.
    """

    def finish(step: int) -> None:
        if steps and step % steps == 0:
            gc.collect()

    if steps:
        gc.disable()
    try:
        yield finish
    finally:
        if steps:
            gc.enable()
