"""Follow a job until it ends or standard output can no longer be written.

A closed pipe is like a closed terminal (docs/decisions/0044): `ftctl` ends, and training continues.
`ftctl run` calls it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from finetune_operator.cli.output import OutputLostError, outlet

_T = TypeVar("_T")
_CTRL_C_SECONDS = 0.5
"""Ctrl-C reaches `tee` and this process at about the same time; either order means suspend."""


async def until_unread(
    work: Coroutine[Any, Any, _T], *, is_stopping: Callable[[], bool], name: str, again: str
) -> _T:
    """Return the result of `work`; cancel it once standard output can no longer be written.

    Args:
        work: Follows the job; cancelling it leaves the attempt running.
        is_stopping: Whether the user has requested a stop, which is followed to its end.
        name: Name of the job.
        again: The command that follows the job again.

    Raises:
        OutputLostError: the output is lost; the message states that the job continues.
    """
    out = outlet()
    if out is None:
        return await work
    loop, task = asyncio.get_running_loop(), asyncio.create_task(work)
    lost: list[OSError] = []

    def leave() -> None:
        if not is_stopping():
            task.cancel()

    def on_loss(error: OSError) -> None:
        lost.append(error)
        loop.call_soon_threadsafe(loop.call_later, _CTRL_C_SECONDS, leave)

    with out.watched(on_loss, is_stopping):
        try:
            return await task
        except asyncio.CancelledError:
            if not lost:
                raise
            out.drop()  # the last lines of the screen must not raise another error
            sentence = (
                f", so ftctl ends; job {name} continues, but is not restarted if it fails. To "
                f"follow it again, or to stop it there with Ctrl-C: {again}"
            )
            raise OutputLostError(lost[0], sentence) from lost[0]
        finally:
            task.cancel()
