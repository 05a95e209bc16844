"""Ctrl-C ends `ftctl top`, whatever a look makes of it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from finetune_operator.cli.top import _show
from finetune_operator.cli.top_rows import Screen
from finetune_operator.cli.top_screens import ReadScreen


@pytest.mark.parametrize("is_kept", [False, True], ids=["a look is cancelled", "it is kept"])
def test_ctrl_c_ends_it_while_it_looks(*, is_kept: bool) -> None:
    looked = 0

    @asynccontextmanager
    async def looks() -> AsyncIterator[ReadScreen]:
        async def look() -> Screen:
            nonlocal looked
            looked += 1
            if looked == 2:  # the first is before the screen is drawn
                os.kill(os.getpid(), signal.SIGINT)
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    if not is_kept:
                        raise
            return Screen(jobs=())

        yield look

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(_show(looks()))
    assert looked == 2
