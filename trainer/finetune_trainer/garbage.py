"""Pause Python's garbage collector while long-lived objects are created, then run it on schedule.

torch and transformers create a million objects that stay alive, and a model and its rows create
more. The collector scans them many times during creation, which takes a seventh of the CPU time of
a start, and again in every full collection between two steps. A rank that collects while the others
compute delays all of them at the next collective, and each rank would do so at another step.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection in this block and freeze all objects at its end."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def gc_freeze() -> None:
    """Collect garbage now and exclude the remaining objects from later collections."""
    gc.collect()
    gc.freeze()


@contextmanager
def gc_every(steps: int) -> Iterator[Callable[[int], None]]:
    """Collect garbage in this block only every `steps` steps; 0 leaves it to Python.

    The block calls the yielded function with the number of finished steps. That number is the same
    on all ranks, also after a resume, so they collect at the same time.
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
