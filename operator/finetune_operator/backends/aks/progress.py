"""Pull rank 0's progress from its pod, beside the work: nobody waits for a pod that is silent.

A pull runs as a task of its own. Whoever asks gets the newest word there is, and when to ask again.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from finetune_trainer.config import Phase, Progress

if TYPE_CHECKING:
    from aiohttp import BaseConnector, StreamReader

log = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 2.0
_PATIENCE_SECONDS = 0.05  # a pod that is well answers within
_SOON_SECONDS = 0.5
_SILENT_SECONDS = 3.0
_LONG_SILENCE = 20  # pulls, about a minute
_MAX_BYTES = 1 << 20
# Not before the first step, though tokenizing may take long: then somebody waits for Running.
_STEADY = frozenset({Phase.TRAINING, Phase.EVALUATING, Phase.ANSWERING})


@dataclass
class _Pull:
    """What is known of one pod's progress, and when it is asked next (on the loop's clock)."""

    newest: Progress | None = None
    failures: int = 0
    begun: float = 0.0
    due: float = 0.0
    task: "asyncio.Task[None] | None" = None


@dataclass(frozen=True)
class Word:
    """What is known of a run.

    Attributes:
        progress: Its newest word; None before the first.
        look_again_seconds: When there may be a newer one.
    """

    progress: Progress | None
    look_again_seconds: float


class ProgressReader:
    """Progress of all runs of this process, by the attempt's uid."""

    def __init__(self) -> None:
        self._pulls: dict[str, _Pull] = {}
        self._connector: BaseConnector | None = None

    async def read(self, uid: str, address: str, port: int, interval_seconds: float) -> Word:
        """Return the newest word, after asking for a newer one if it is time.

        Args:
            uid: Of the attempt.
            address: IP address of rank 0's pod.
            port: Where it serves /progress.
            interval_seconds: Shortest time between two questions while it trains.
        """
        pull, loop = self._pulls.setdefault(uid, _Pull()), asyncio.get_running_loop()
        if pull.task is None and loop.time() >= pull.due:
            host = f"[{address}]" if ":" in address else address
            work = self._pull(pull, f"http://{host}:{port}/progress", interval_seconds)
            pull.begun = loop.time()
            pull.task = asyncio.create_task(work)
            await asyncio.wait({pull.task}, timeout=_PATIENCE_SECONDS)
        if pull.task is not None:
            if not pull.failures and loop.time() < pull.begun + _SOON_SECONDS:
                return Word(pull.newest, _SOON_SECONDS)
            # Who is silent so long will most likely be so until it is asked again.
            over = pull.begun + _TIMEOUT_SECONDS + _wait_after(pull.failures + 1, interval_seconds)
            return Word(pull.newest, over - loop.time())
        return Word(pull.newest, max(0.1, pull.due - loop.time()))

    def forget(self, uid: str) -> None:
        """Drop what is known of an attempt that is over."""
        pull = self._pulls.pop(uid, None)
        if pull is not None and pull.task is not None:
            pull.task.cancel()

    async def close(self) -> None:
        """End what is under way; nobody may read any more."""
        tasks = [pull.task for pull in self._pulls.values() if pull.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._connector is not None:
            await self._connector.close()

    async def _pull(self, pull: _Pull, url: str, interval_seconds: float) -> None:
        import aiohttp

        if self._connector is None:
            self._connector = aiohttp.TCPConnector(limit=0, force_close=True)
        try:
            limit = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
            # A pod must not send the operator, which reaches more than the pod does, elsewhere.
            async with aiohttp.request(
                "GET",
                url,
                timeout=limit,
                raise_for_status=True,
                allow_redirects=False,
                connector=self._connector,
            ) as answer:
                text = await _read(answer.content)
            pull.newest = Progress.model_validate_json(text)
            pull.failures = 0
            wait = interval_seconds if pull.newest.phase in _STEADY else _SOON_SECONDS
        except (aiohttp.ClientError, TimeoutError, ValidationError) as error:
            pull.failures += 1
            wait = _wait_after(pull.failures, interval_seconds)
            if pull.failures == _LONG_SILENCE:
                log.warning("no progress from %s (%s)", url, error or type(error).__name__)
        finally:
            pull.task = None
        pull.due = asyncio.get_running_loop().time() + wait


def _wait_after(failures: int, interval_seconds: float) -> float:
    wait = min(_SOON_SECONDS * float(2**failures), _SILENT_SECONDS)
    return max(wait, interval_seconds) if failures >= _LONG_SILENCE else wait


async def _read(content: "StreamReader") -> bytes:
    """Return the whole body, which may come in parts, as long as it is of a likely size."""
    body = bytearray()
    async for part in content.iter_any():
        body += part
        if len(body) > _MAX_BYTES:
            break  # no progress is that long, so it cannot be read as one
    return bytes(body)
