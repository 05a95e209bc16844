"""A cluster in memory and a whole term of the operator beside it: watches, queue and workers.

Unlike `kernel_world`, nobody makes the operator look: it looks when a watch told it something, when
it has asked for it, and never else. Time is virtual.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Self

from finetune_operator.kernel.job_events import FollowedJobs
from finetune_operator.kernel.leader_term import LeaderTerm
from finetune_operator.kernel.settings import Settings
from finetune_operator.kube.api_errors import UnavailableError
from finetune_operator.kube.resources import FINE_TUNE_JOBS, Resource
from support.kernel.fake_api import BeforeCall
from support.kernel.kernel_world import KEY, START, Crash, World, at_write, nothing

AWAY = UnavailableError(0, "ClientConnectorError", "connection refused")
SETTINGS = Settings(
    backends=("configmap=support.kernel.configmap_backend:ConfigMapBackend",),
    # A full list would find what a wake-up had missed.
    resync_seconds=86_400,
)


class LiveWorld(World):
    """A cluster with one job and the operator at work; make it with `start`.

    Args:
        seed: Of the times that answers and watches take.

    Attributes:
        term: That of the operator that lives now.
    """

    term: LeaderTerm

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance = random.Random(seed)
        self._operator: asyncio.Task[None] | None = None

    @classmethod
    @asynccontextmanager
    async def start(cls, seed: int) -> AsyncIterator[Self]:
        world = cls(seed)
        world.be_slow()
        world.restart()
        try:
            yield world
        finally:
            await world._end()

    def be_slow(self) -> None:
        """Let answers and watches take their time, and overtake each other."""
        self.api.answer_lag = lambda: self._chance.choice((0.0, 0.02, 0.2))
        self.api.watch_lag = lambda: self._chance.choice((0.0, 0.05, 0.5))

    def restart(self) -> None:
        """Kill the operator and start it again."""
        if self._operator is not None:
            self._operator.cancel()
        self._operator = asyncio.create_task(self._operate())

    async def rest(self, seconds: float) -> None:
        """Wait, and show that whoever looked now would find nothing to do."""
        await asyncio.sleep(seconds)
        self.heal()
        self.api.answer_lag = self.api.watch_lag = lambda: 0.0
        before = self.writes_but_events
        self.now = self._time()
        self.start_process()
        await self.settle()
        assert self.writes_but_events == before, "nobody had told the operator to look"
        self.be_slow()

    async def delete_and_apply(self) -> None:
        """Delete the job, and create another of its name."""
        await self.api.delete(FINE_TUNE_JOBS, KEY.name, KEY.namespace)
        await self.apply()

    def fail_at(self, number: int, error: BaseException, *, is_done: bool) -> None:
        """Let the operator's write of that number from now fail, once.

        Args:
            number: From 1.
            error: What the operator sees; a Crash ends it, and it starts again.
            is_done: Whether the write happens nevertheless.
        """
        hook = self._for_the_operator(at_write(number, error))

        def both(verb: str, resource: Resource, name: str) -> None:
            self._count(verb, resource, name)
            hook(verb, resource, name)

        if is_done:
            self.api.after = both
        else:
            self.api.before = hook

    def heal(self) -> None:
        """Let nothing fail any more."""
        self.api.before, self.api.after = nothing, self._count

    @asynccontextmanager
    async def outage(self, *, forgets: bool) -> AsyncIterator[None]:
        """Keep the API server away from the operator meanwhile.

        Args:
            forgets: Afterwards no watch can go on where it was.
        """

        def refuse(verb: str, resource: Resource, name: str) -> None:
            raise AWAY

        self.api.before = self._for_the_operator(refuse)
        self.api.break_watches()
        yield
        if forgets:
            self.api.forget_history()
        self.heal()

    def _for_the_operator(self, hook: BeforeCall) -> BeforeCall:
        test = asyncio.current_task()

        def maybe(verb: str, resource: Resource, name: str) -> None:
            if asyncio.current_task() is not test:
                hook(verb, resource, name)

        return maybe

    async def _operate(self) -> None:
        while True:
            self.term = LeaderTerm(self.api, SETTINGS, listen=FollowedJobs, now=self._time)
            try:
                await self.term.run()
            except* Crash:  # another process
                self.crashes += 1

    async def _end(self) -> None:
        assert self._operator is not None
        self._operator.cancel()
        await asyncio.gather(self._operator, return_exceptions=True)

    def _time(self) -> datetime:
        return START + timedelta(seconds=asyncio.get_running_loop().time())
