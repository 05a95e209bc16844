"""A cluster in memory, the remote twin, and an operator that may die at any moment, for tests.

Nobody makes the operator look. Time is virtual, and is that of the cluster and the service, too.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Self

from fake_service import RemoteService
from finetune_operator.backends.base import BackendContext
from finetune_operator.kernel.job_events import FollowedJobs
from finetune_operator.kernel.leader_term import LeaderTerm
from finetune_operator.kernel.settings import Settings
from finetune_operator.kube.resources import Resource
from remote_backend.backend import RemoteBackend
from remote_backend.service import RemoteRun
from support.kernel.fake_api import FakeApi
from support.kernel.kernel_world import START, WRITES, Crash
from support.plugin.remote_world import RemoteWorld

NAMESPACE = "ns"

OnWrite = Callable[[str, str], None]
"""Called with the verb and what it is done to; what it raises is what the operator sees."""


def nothing(verb: str, what: str) -> None:
    """Let it happen."""


class FragileService(RemoteService):
    """The service, whose client may die before or after any write.

    Attributes:
        before: Called before each write.
        after: Called after each write that was answered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before: OnWrite = nothing
        self.after: OnWrite = nothing

    async def create(self, name: str, tags: Mapping[str, str]) -> RemoteRun:
        self.before("create", name)
        run = await super().create(name, tags)
        self.after("create", name)
        return run

    async def cancel(self, name: str, until: datetime) -> RemoteRun | None:
        self.before("cancel", name)
        run = await super().cancel(name, until)
        self.after("cancel", name)
        return run


class TwinWorld(RemoteWorld):
    """The cluster, the service and the operator; make it with `start`.

    Whoever made it is the user: what another task writes, the operator does.

    Args:
        settings: Of the operator.
    """

    service: FragileService

    def __init__(self, settings: Settings) -> None:
        self.api = FakeApi()
        super().__init__(self.api, NAMESPACE, FragileService())
        self.api.now = self.service.now = self.time
        self._settings = settings
        self._user = asyncio.current_task()
        self._operator: asyncio.Task[None] | None = None
        self._before: OnWrite = nothing
        self._after: OnWrite = nothing
        self.api.before, self.api.after = self._before_api, self._after_api
        self.service.before = lambda verb, name: self._before(verb, f"run {name}")
        self.service.after = lambda verb, name: self._after(verb, f"run {name}")

    @classmethod
    @asynccontextmanager
    async def start(cls, **settings: Any) -> AsyncIterator[Self]:
        """Have the operator at work, with these settings of its."""
        world = cls(Settings(**settings))
        world._operator = asyncio.create_task(world._operate())
        try:
            yield world
        finally:
            await world._stop()

    def time(self) -> datetime:
        """The time, which begins at START."""
        return START + timedelta(seconds=asyncio.get_running_loop().time())

    async def kill(self) -> None:
        """Kill the operator and start it again, with nothing in its memory."""
        await self._stop()
        self.deaths += 1
        self._operator = asyncio.create_task(self._operate())

    def on_writes(self, *, before: OnWrite = nothing, after: OnWrite = nothing) -> None:
        """Call these at each write of the operator, to the cluster and to the service."""
        self._before, self._after = before, after

    def _before_api(self, verb: str, resource: Resource, name: str) -> None:
        if verb in WRITES and asyncio.current_task() is not self._user:
            self._before(verb, f"{resource.plural} {name}")

    def _after_api(self, verb: str, resource: Resource, name: str) -> None:
        if asyncio.current_task() is not self._user:
            self._after(verb, f"{resource.plural} {name}")

    async def _operate(self) -> None:
        while True:
            backend = RemoteBackend(BackendContext(Path()), self.service)
            term = LeaderTerm(
                self.api,
                self._settings,
                backends={backend.name: backend},
                listen=FollowedJobs,
                now=self.time,
            )
            try:
                await term.run()
            except* Crash:  # another process
                self.deaths += 1

    async def _stop(self) -> None:
        assert self._operator is not None
        self._operator.cancel()
        with suppress(asyncio.CancelledError):
            await self._operator
