"""Garbage is collected when training says so: not during imports, and after steps as asked."""

import gc
from contextlib import suppress

import pytest

from finetune_trainer.garbage import gc_every, gc_paused


@pytest.mark.parametrize("error", [None, ImportError("no such module")], ids=["found", "missing"])
def test_collection_goes_on_after_imports_without_what_they_made(
    error: ImportError | None,
) -> None:
    made: list[list[int]] = [[]]
    during: list[bool] = []
    try:
        with suppress(ImportError), gc_paused():
            during.append(gc.isenabled())
            if error:
                raise error
        assert during == [False]
        assert gc.isenabled()
        assert not any(one is made for one in gc.get_objects())
    finally:
        gc.unfreeze()


def collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def test_garbage_is_collected_after_the_steps_that_are_asked_for_and_never_between() -> None:
    before = collections()
    seen = []
    with gc_every(3) as finish:
        for step in range(7, 13):
            _ = [[] for _ in range(100_000)]  # by itself Python would collect a hundred times
            finish(step)
            seen.append(collections() - before)
    assert seen == [0, 0, 1, 1, 1, 2]
    assert gc.isenabled()


def test_python_collects_as_it_likes_without_a_number_of_steps() -> None:
    before = collections()
    with gc_every(0) as finish:
        assert gc.isenabled()
        finish(6)
    assert collections() == before


def test_python_collects_again_after_a_step_that_failed() -> None:
    with pytest.raises(ValueError, match="of the step"), gc_every(1):
        raise ValueError("of the step")
    assert gc.isenabled()
