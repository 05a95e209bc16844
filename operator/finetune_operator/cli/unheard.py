"""Follow a job until it ends, or until nobody hears what is printed of it.

A reader that goes away is what a closed terminal is (docs/decisions/0002): `ftctl` ends, training
goes on. `ftctl run` calls it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from finetune_operator.cli.output import OutputLostError, outlet

_T = TypeVar("_T")
_CTRL_C_SECONDS = 0.5
"""Ctrl-C ends `tee` at once, and reaches us as soon; it means suspend, whichever comes first."""


async def heard(
    work: Coroutine[Any, Any, _T],
    *,
    is_stopping: Callable[[], bool],
    name: str,
    again: str,
) -> _T:
    """Return what `work` returns; end it where standard output cannot be written any more.

    Args:
        work: Follows the job; cancelled, it leaves what runs running.
        is_stopping: The user has asked for a stop, which is followed to its end.
        name: Of the job.
        again: The command that follows it again.

    Raises:
        OutputLostError: it says what happens to the job.
    """
    out = outlet()
    if out is None:
        return await work
    loop, task = asyncio.get_running_loop(), asyncio.create_task(work)
    lost: list[OSError] = []

    def leave() -> None:
        if not is_stopping():
            task.cancel()

    def hear_of(error: OSError) -> None:
        lost.append(error)
        loop.call_soon_threadsafe(loop.call_later, _CTRL_C_SECONDS, leave)

    with out.watched(hear_of, is_stopping):
        try:
            return await task
        except asyncio.CancelledError:
            if not lost:
                raise
            out.drop()  # what a screen still writes on its way out must not be told in its place
            raise OutputLostError(lost[0], _goes_on(name, again)) from lost[0]
        finally:
            task.cancel()


def _goes_on(name: str, again: str) -> str:
    return (
        f", so ftctl ends; job {name} goes on, and nothing restarts it should it fail. To follow "
        f"it again, or to stop it there with Ctrl-C: {again}"
    )
