"""Garbage collection stops for imports, and goes on after them without what they made."""

import gc
from contextlib import suppress

import pytest

from finetune_trainer.importing import uncollected


@pytest.mark.parametrize("error", [None, ImportError("no such module")], ids=["found", "missing"])
def test_collection_goes_on_after_imports_without_what_they_made(
    error: ImportError | None,
) -> None:
    made: list[list[int]] = [[]]
    during: list[bool] = []
    try:
        with suppress(ImportError), uncollected():
            during.append(gc.isenabled())
            if error:
                raise error
        assert during == [False]
        assert gc.isenabled()
        assert not any(one is made for one in gc.get_objects())
    finally:
        gc.unfreeze()
