"""A service that runs attempts for others, as an object in this process; `RemoteBackend` asks it.

It treats a client as a REST service does: it throttles, answers late or never, carries out later
what it never answered, moves runs and puts them back into its queue. What a client has sent is
carried out though the client dies. Its time is the event loop's; nothing here is left to chance.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Protocol, TypeVar

JOB_UID = "job-uid"
"""Tag with the job that a run belongs to."""

T = TypeVar("T")


class RunState(StrEnum):
    """How far a run is."""

    QUEUED = "Queued"
    RUNNING = "Running"
    CANCELLING = "Cancelling"  # a cancel was accepted, and its processes may still run
    COMPLETED = "Completed"
    FAILED = "Failed"
    CANCELED = "Canceled"


_ENDS = frozenset({RunState.COMPLETED, RunState.FAILED, RunState.CANCELED})


@dataclass(frozen=True)
class RemoteRun:
    """One run, as it stands in an answer.

    Attributes:
        name: Unique for ever, also after its end.
        tags: What its creator wrote on it.
        created: When it was created.
        state: How far it is.
        moves: How often the service has moved it to another machine.
        cancel_until: When a cancelled run is killed; None where nobody has cancelled it.
        error: Why it failed, in one word.
        lines: Log of rank 0.
        outputs: URIs of what it exported.
    """

    name: str
    tags: Mapping[str, str]
    created: datetime
    state: RunState = RunState.QUEUED
    moves: int = 0
    cancel_until: datetime | None = None
    error: str = ""
    lines: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    @property
    def has_ended(self) -> bool:
        """Whether no process of it can run any more."""
        return self.state in _ENDS


class Fate(StrEnum):
    """What becomes of a request."""

    ANSWERED = "Answered"
    THROTTLED = "Throttled"  # 429, and nothing is done
    IGNORED = "Ignored"  # nothing is done, and no answer comes
    LOST = "Lost"  # it is done, and no answer comes
    LATE = "Late"  # it is done `late_seconds` later, and no answer comes


class ServiceError(Exception):
    """An answer that is no success.

    Attributes:
        status: HTTP status.
        retry_after: Seconds to wait; None where the service does not say.
    """

    def __init__(self, status: int, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class ServiceClient(Protocol):
    """Who sends the four requests; the service itself, for a client in its own process.

    Each raises `ServiceError` where the answer is no success.
    """

    async def list_runs(self) -> Mapping[str, RemoteRun]:
        """Return all runs by name."""

    async def get(self, name: str) -> RemoteRun | None:
        """Return a run, or None where there is none of that name."""

    async def create(self, name: str, tags: Mapping[str, str]) -> RemoteRun:
        """Create a run; 409 where there is one of that name."""

    async def cancel(self, name: str, until: datetime) -> RemoteRun | None:
        """Accept that a run is to save a checkpoint and stop, and is killed at `until`."""


class RemoteService:
    """The service; a test sets what becomes of requests, and lets things happen to runs.

    Attributes:
        fate: Says what becomes of a request, by its verb and the run's name.
        latency: Seconds that a request takes to it, and an answer back.
        retry_after: What a 429 asks for.
        late_seconds: When a late request is carried out.
        stop_seconds: How long a cancelled run takes to end; None for ever.
        on_created: Called with the name of each new run.
        now: The time, with a zone.
        requests: Verb and run of every request so far.
        most_alive: Most runs of one job that have lived at one time.
    """

    def __init__(self) -> None:
        self.fate: Callable[[str, str], Fate] = lambda verb, name: Fate.ANSWERED
        self.latency: Callable[[], float] = lambda: 0.0
        self.retry_after: float | None = 5.0
        self.late_seconds: Callable[[], float] = lambda: 30.0
        self.stop_seconds: Callable[[RemoteRun], float | None] = lambda run: 1.0
        self.on_created: Callable[[str], None] = lambda name: None
        self.now: Callable[[], datetime] = lambda: datetime.now(UTC)
        self.requests: list[tuple[str, str]] = []
        self.most_alive = 0
        self._runs: dict[str, RemoteRun] = {}
        self._alive: dict[str, set[str]] = defaultdict(set)  # by job

    # Requests, as `ServiceClient` has them.

    async def list_runs(self) -> Mapping[str, RemoteRun]:
        """Return all runs by name."""
        return await self._serve("list", "", lambda: dict(self._runs))

    async def get(self, name: str) -> RemoteRun | None:
        """Return a run, or None."""
        return await self._serve("get", name, lambda: self._runs.get(name))

    async def create(self, name: str, tags: Mapping[str, str]) -> RemoteRun:
        """Create a run."""
        return await self._serve("create", name, lambda: self._create(name, tags))

    async def cancel(self, name: str, until: datetime) -> RemoteRun | None:
        """Accept that a run is to stop."""
        return await self._serve("cancel", name, lambda: self._cancel(name, until))

    # What happens to runs.

    @property
    def runs(self) -> Mapping[str, RemoteRun]:
        """All runs by name, without a request."""
        return self._runs

    @property
    def alive(self) -> list[RemoteRun]:
        """Runs of which a process may still run."""
        return [run for run in self._runs.values() if not run.has_ended]

    def start(self, name: str) -> None:
        """Let a run that waits in the queue begin."""
        self._change(name, (RunState.QUEUED,), state=RunState.RUNNING)

    def requeue(self, name: str) -> None:
        """Take a run's machines away: it waits in the queue again."""
        self._change(name, (RunState.RUNNING,), state=RunState.QUEUED)

    def move(self, name: str) -> None:
        """Let a run go on, on another machine."""
        moves = self._runs[name].moves + 1
        self._change(name, (RunState.RUNNING,), moves=moves)

    def end(self, name: str, state: RunState, error: str = "") -> None:
        """Let a run end."""
        living = (RunState.QUEUED, RunState.RUNNING, RunState.CANCELLING)
        self._change(name, living, state=state, error=error)

    def _change(self, name: str, states: tuple[RunState, ...], **fields: object) -> None:
        run = self._runs[name]
        if run.state in states:
            self._put(replace(run, **fields))  # type: ignore[arg-type]

    def _put(self, run: RemoteRun) -> RemoteRun:
        self._runs[run.name] = run
        alive = self._alive[run.tags[JOB_UID]]
        alive.add(run.name)
        if run.has_ended:
            alive.discard(run.name)
        self.most_alive = max(self.most_alive, len(alive))
        return run

    def _create(self, name: str, tags: Mapping[str, str]) -> RemoteRun:
        if name in self._runs:
            raise ServiceError(409, f"run {name} exists already")
        run = self._put(RemoteRun(name, tags, self.now()))
        self.on_created(name)
        return run

    def _cancel(self, name: str, until: datetime) -> RemoteRun | None:
        run = self._runs.get(name)
        if run is None or run.has_ended:
            return run
        if run.cancel_until is None:
            self._later(self.stop_seconds(run), lambda: self.end(name, RunState.CANCELED))
        sooner = min(until, run.cancel_until or until)
        return self._put(replace(run, state=RunState.CANCELLING, cancel_until=sooner))

    async def _serve(self, verb: str, name: str, act: Callable[[], T]) -> T:
        """Carry a request out, whether or not its client lives that long, and return the answer."""
        self.requests.append((verb, name))
        fate = self.fate(verb, name)
        answer: asyncio.Future[T | ServiceError] = asyncio.get_running_loop().create_future()

        def reply(said: T | ServiceError) -> None:
            if fate in (Fate.ANSWERED, Fate.THROTTLED) and not answer.done():
                answer.set_result(said)

        def carry_out() -> None:
            said: T | ServiceError
            try:
                said = act()
            except ServiceError as error:
                said = error
            self._later(self.latency(), lambda: reply(said))

        if fate is Fate.THROTTLED:
            busy = ServiceError(429, "too many requests", self.retry_after)
            self._later(self.latency(), lambda: reply(busy))
        elif fate is not Fate.IGNORED:
            late = self.late_seconds() if fate is Fate.LATE else 0.0
            self._later(self.latency() + late, carry_out)
        said = await answer
        if isinstance(said, ServiceError):
            raise said
        return said

    def _later(self, seconds: float | None, act: Callable[[], None]) -> None:
        if seconds is not None:
            asyncio.get_running_loop().call_later(seconds, act)
