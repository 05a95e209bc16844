"""A fake of the service, which a test scripts.

`RemoteService` implements `ServiceClient` in this process, and `served` serves it over HTTP.
It behaves like a REST service: it throttles, responds late or never, executes requests long after
their timeout, and moves or requeues runs. A request is executed even if its client is gone. Its
clock is the event loop's, and it is deterministic.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import TypeAdapter

from finetune_operator.testing.service_suite import Fate
from remote_backend.service import JOB_UID, RemoteRun, RunState, ServiceError

_RUN = TypeAdapter(RemoteRun)
_RUNS = TypeAdapter(dict[str, RemoteRun])

T = TypeVar("T")


class RemoteService:
    """The service; a test sets the fate of requests and changes the state of runs.

    Attributes:
        fate: Returns the fate of a request, by its verb and the run's name.
        latency: Seconds that a request takes to the service, and a response back.
        retry_after: Seconds in the Retry-After header of a 429.
        late_seconds: Delay until a late request is executed.
        stop_seconds: Time that a cancelled run takes to finish; None: it never does.
        on_created: Called with the name of each new run.
        now: The time, with a zone.
        requests: Verb and run of every request so far.
        most_alive: Highest number of live runs that one job has had at a time.
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

    # The requests of `ServiceClient`.

    async def list_runs(self) -> Mapping[str, RemoteRun]:
        """Return all runs by name."""
        return await self._serve("list", "", lambda: dict(self._runs))

    async def get(self, name: str) -> RemoteRun | None:
        """Return a run; None if it does not exist."""
        return await self._serve("get", name, lambda: self._runs.get(name))

    async def create(self, name: str, tags: Mapping[str, str]) -> RemoteRun:
        """Create a run."""
        return await self._serve("create", name, lambda: self._create(name, tags))

    async def cancel(self, name: str, until: datetime) -> RemoteRun | None:
        """Have a run stop."""
        return await self._serve("cancel", name, lambda: self._cancel(name, until))

    # Changes that a test applies to runs.

    @property
    def runs(self) -> Mapping[str, RemoteRun]:
        """All runs by name."""
        return self._runs

    @property
    def alive(self) -> list[RemoteRun]:
        """Runs with a process that may be alive."""
        return [run for run in self._runs.values() if not run.is_final]

    def start(self, name: str) -> None:
        """Start a queued run."""
        self._change(name, (RunState.QUEUED,), state=RunState.RUNNING)

    def requeue(self, name: str) -> None:
        """Put a run back into the queue."""
        self._change(name, (RunState.RUNNING,), state=RunState.QUEUED)

    def move(self, name: str) -> None:
        """Move a run to another machine."""
        moves = self._runs[name].moves + 1
        self._change(name, (RunState.RUNNING,), moves=moves)

    def end(self, name: str, state: RunState, error: str = "") -> None:
        """Finish a run."""
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
        if run.is_final:
            alive.discard(run.name)
        self.most_alive = max(self.most_alive, len(alive))
        return run

    def _create(self, name: str, tags: Mapping[str, str]) -> RemoteRun:
        if name in self._runs:
            raise ServiceError(409, f"run {name} already exists")
        run = self._put(RemoteRun(name, tags, self.now()))
        self.on_created(name)
        return run

    def _cancel(self, name: str, until: datetime) -> RemoteRun | None:
        run = self._runs.get(name)
        if run is None or run.is_final:
            return run
        if run.cancel_until is None:
            self._later(self.stop_seconds(run), lambda: self.end(name, RunState.CANCELED))
        sooner = min(until, run.cancel_until or until)
        return self._put(replace(run, state=RunState.CANCELLING, cancel_until=sooner))

    async def _serve(self, verb: str, name: str, execute: Callable[[], T]) -> T:
        """Execute a request, also if its client is gone by then, and return the result."""
        self.requests.append((verb, name))
        fate = self.fate(verb, name)
        response: asyncio.Future[T | ServiceError] = asyncio.get_running_loop().create_future()

        def respond(result: T | ServiceError) -> None:
            if fate in (Fate.ANSWERED, Fate.THROTTLED) and not response.done():
                response.set_result(result)

        def handle() -> None:
            result: T | ServiceError
            try:
                result = execute()
            except ServiceError as error:
                result = error
            self._later(self.latency(), lambda: respond(result))

        if fate is Fate.THROTTLED:
            busy = ServiceError(429, "too many requests", self.retry_after)
            self._later(self.latency(), lambda: respond(busy))
        elif fate is not Fate.IGNORED:
            late = self.late_seconds() if fate is Fate.LATE else 0.0
            self._later(self.latency() + late, handle)
        result = await response
        if isinstance(result, ServiceError):
            raise result
        return result

    def _later(self, seconds: float | None, act: Callable[[], None]) -> None:
        if seconds is not None:
            asyncio.get_running_loop().call_later(seconds, act)


@asynccontextmanager
async def served(service: RemoteService) -> AsyncIterator[str]:
    """Serve it on loopback, and yield its URL."""

    async def list_runs(request: web.Request) -> web.Response:
        return _json(_RUNS.dump_json(dict(await service.list_runs())))

    async def get(request: web.Request) -> web.Response:
        return _found(await service.get(request.match_info["name"]))

    async def create(request: web.Request) -> web.Response:
        tags = await request.json()
        return _found(await service.create(request.match_info["name"], tags))

    async def cancel(request: web.Request) -> web.Response:
        until = datetime.fromisoformat((await request.json())["until"])
        return _found(await service.cancel(request.match_info["name"], until))

    app = web.Application(middlewares=[_as_responses], client_max_size=2**24)
    app.add_routes(
        [
            web.get("/runs", list_runs),
            web.get("/runs/{name}", get),
            web.put("/runs/{name}", create),
            web.post("/runs/{name}/cancel", cancel),
        ]
    )
    # The service executes a request after its client has gone; only the handler is cancelled.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@web.middleware
async def _as_responses(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn each `ServiceError` into an error response."""
    try:
        return await handler(request)
    except ServiceError as error:
        wait = {} if error.retry_after is None else {"Retry-After": f"{error.retry_after:g}"}
        return web.Response(text=str(error), status=error.status, headers=wait)


def _found(run: RemoteRun | None) -> web.Response:
    if run is None:
        raise ServiceError(404, "the run does not exist")
    return _json(_RUN.dump_json(run))


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
