"""Read rank 0's progress from its pod in the background; no caller waits for a silent pod.

Each request runs as its own task; `read` returns the newest progress, and when to call it again.
"""

import asyncio
import logging
import os
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
from pydantic import ValidationError

from finetune_trainer.config import Phase, Progress

log = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 2.0
_PATIENCE_SECONDS = 0.05  # time in which a healthy pod responds
_SOON_SECONDS = 0.5
_SILENT_SECONDS = 3.0
_PART = 0.25  # the next wait as a fraction of the time so far
_LONG_SILENCE_SECONDS = 60.0
"""Time without a response after which the progress of a run is unknown."""
_MAX_BYTES = 1 << 20
# Phases in which progress is read less often. Tokenizing is not among them although it may take
# long, because a user waits for the first step.
_STEADY = frozenset({Phase.TRAINING, Phase.EVALUATING, Phase.ANSWERING})


@dataclass
class Pace:
    """How often a pod's progress is read, in seconds of any clock.

    Args:
        since: When it was first seen to run; in a steady state, when the next read is due.
        interval: Shortest time between two reads in that state.
    """

    since: float
    interval: float

    def after_response(self, now: float, *, is_steady: bool) -> float:
        """Return the wait after a response."""
        if is_steady:
            self.since = now + self.interval
            return self.interval
        return self._at_least(_SOON_SECONDS, now)

    def after_failure(self, now: float) -> float:
        """Return the wait after a failure."""
        return self._at_least(_SILENT_SECONDS, now)

    def _at_least(self, seconds: float, now: float) -> float:
        return max(seconds, min(_PART * (now - self.since), self.interval))


@dataclass
class _Pull:
    """State of one pod's progress; times are of the event loop.

    Attributes:
        due: When the next request is due.
        begun: When the last request was sent.
        is_early: Whether the last response was that rank 0 has no progress yet.
        silent_since: When the first request without a response was sent; None after a response.
        heard_at: When it last responded; None if never.
        trouble: Why the run has been silent for long; empty otherwise.
    """

    pace: Pace
    due: float
    begun: float = 0.0
    newest: Progress | None = None
    is_early: bool = False
    silent_since: float | None = None
    heard_at: float | None = None
    trouble: str = ""
    task: "asyncio.Task[None] | None" = None


@dataclass(frozen=True)
class Reading:
    """The newest progress of a run.

    Attributes:
        progress: The last published progress; None before that, and if it is too old.
        requeue_seconds: When to read again.
        is_early: Whether rank 0 responds, but has no progress yet.
        heard_at: When rank 0 last responded, on the loop's clock; None if never.
        trouble: Why rank 0 has not responded for a minute, with the URL; empty otherwise.
    """

    progress: Progress | None
    requeue_seconds: float
    is_early: bool = False
    trouble: str = ""
    heard_at: float | None = None


class ProgressReader:
    """Progress of all runs of this process, by the attempt's uid.

    Args:
        first_seconds: Delay from the first observation of a run until its first read.
    """

    def __init__(self, first_seconds: float) -> None:
        self._first_seconds = first_seconds
        self._pulls: dict[str, _Pull] = {}
        self._connector: aiohttp.BaseConnector | None = None

    async def read(self, uid: str, address: str, port: int, interval_seconds: float) -> Reading:
        """Return the newest progress, and request a newer one if that is due.

        Args:
            uid: Uid of the attempt.
            address: IP address of rank 0's pod.
            port: Port of /progress.
            interval_seconds: Shortest time between two requests while it trains.
        """
        loop = asyncio.get_running_loop()
        pull = self._pulls.get(uid)
        if pull is None:
            pace = Pace(loop.time(), interval_seconds)
            pull = self._pulls[uid] = _Pull(pace, loop.time() + self._first_seconds)
        if pull.task is None and loop.time() >= pull.due:
            host = f"[{address}]" if ":" in address else address
            pull.begun = loop.time()
            pull.task = asyncio.create_task(self._pull(pull, f"http://{host}:{port}/progress"))
            await asyncio.wait({pull.task}, timeout=_PATIENCE_SECONDS)
        wait = max(0.1, pull.due - loop.time())
        if pull.task is not None:
            # A pod that is silent for so long will probably not respond to this request.
            over = pull.begun + _TIMEOUT_SECONDS
            wait = over + pull.pace.after_failure(over) - loop.time()
            if pull.silent_since is None and loop.time() < pull.begun + _SOON_SECONDS:
                wait = _SOON_SECONDS
        newest = None if pull.trouble else pull.newest
        return Reading(newest, wait, pull.is_early, pull.trouble, pull.heard_at)

    def forget(self, uid: str) -> None:
        """Drop the state of a finished attempt."""
        pull = self._pulls.pop(uid, None)
        if pull is not None and pull.task is not None:
            pull.task.cancel()

    async def close(self) -> None:
        """Cancel all requests; no further read is allowed."""
        tasks = [pull.task for pull in self._pulls.values() if pull.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._connector is not None:
            await self._connector.close()

    async def _pull(self, pull: _Pull, url: str) -> None:
        if self._connector is None:
            self._connector = aiohttp.TCPConnector(limit=0, force_close=True)
        loop = asyncio.get_running_loop()
        try:
            limit = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
            # No redirects: a pod must not send the operator to addresses that only it can reach.
            async with aiohttp.request(
                "GET",
                url,
                timeout=limit,
                allow_redirects=False,
                connector=self._connector,
            ) as response:
                text = await _read(response.content)
                pull.is_early = _is_early(response, text)
                if not pull.is_early:
                    response.raise_for_status()
                    pull.newest = Progress.of_any_version(text)
            pull.silent_since, pull.trouble, pull.heard_at = None, "", loop.time()
            is_steady = pull.newest is not None and pull.newest.phase in _STEADY
            wait = pull.pace.after_response(loop.time(), is_steady=is_steady)
        except (aiohttp.ClientError, TimeoutError, ValidationError) as error:
            if pull.silent_since is None:
                pull.silent_since = pull.begun
            wait = pull.pace.after_failure(loop.time())
            silent_seconds = loop.time() - pull.silent_since
            if not pull.trouble and silent_seconds >= _LONG_SILENCE_SECONDS:
                pull.trouble = f"{url} does not respond ({_why(error)})"
                log.warning("no progress: %s", pull.trouble)
        finally:
            pull.task = None
        pull.due = loop.time() + wait


def _is_early(response: aiohttp.ClientResponse, text: bytes) -> bool:
    """Whether the page of the trainer responds that rank 0 has not reported yet.

    A proxy may respond with the same status in place of a page that it does not reach.
    """
    return response.status == HTTPStatus.SERVICE_UNAVAILABLE and text.startswith(b'{"message": ')


def _why(error: Exception) -> str:
    """Return in a few words why a request has failed."""
    if isinstance(error, TimeoutError):
        return f"no response within {_TIMEOUT_SECONDS:g} s"
    if isinstance(error, aiohttp.ClientResponseError):
        return f"HTTP status {error.status}"
    if isinstance(error, ValidationError):
        return "its response is not the progress of a run"
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__


async def _read(content: "aiohttp.StreamReader") -> bytes:
    """Return the body, truncated at a size larger than any progress."""
    body = bytearray()
    async for part in content.iter_any():
        body += part
        if len(body) > _MAX_BYTES:
            break
    return bytes(body)
