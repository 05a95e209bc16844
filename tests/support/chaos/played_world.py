"""The clock, the operator and the status that played clusters and workspaces share."""

import asyncio
from collections.abc import Callable
from datetime import timedelta

from finetune_operator.errors import FineTuneError
from finetune_operator.kube.resources import Object
from support.kernel.kernel_world import KEY, Crash, World

EVERY = 10
"""Steps between two checkpoints; a step takes a second."""

LOAD_SECONDS = 5
TOTAL_STEPS = 100_000


class PlayedWorld(World):
    """A job whose surroundings act by themselves, once a second; time is virtual.

    Attributes:
        step: Last optimizer step of the running attempt.
        saved: Step of the newest checkpoint; 0 before the first.
        lost_steps: Steps of the previous attempt that the running attempt trains again.
        is_operator: The operator sends requests now, not a part of the cluster.
        troubles: Messages of the conditions Failed and Stalled while they were True.
    """

    def begin(self) -> None:
        """Set what a fault may change; `World` has its own constructor."""
        self.step = self.saved = self.lost_steps = 0
        self.is_operator = False
        self.troubles: list[tuple[str, str]] = []

    async def act(self, step: int) -> None:
        """Let everything but the operator do its next step.

        Args:
            step: Seconds since the last one.
        """
        raise NotImplementedError

    def without_port(self, text: str) -> str:
        """Return a text with the usual ports instead of the ports of this run."""
        return text

    @property
    def status(self) -> Object:
        found: Object = self.job["status"]
        return found

    @property
    def number(self) -> int:
        """Return the number of the newest attempt."""
        return int(self.status.get("attempt") or 0)

    async def live(self, seconds: float, step: int = 1) -> None:
        """Let time pass."""
        for _ in range(0, int(seconds), step):
            await self._tick(step)

    async def until(self, is_so: Callable[[], bool], limit: float, step: int = 1) -> float:
        """Let time pass until something is so; return the seconds.

        Raises:
            AssertionError: It was not so within the limit.
        """
        begun = self.now
        while not is_so():
            passed = (self.now - begun).total_seconds()
            assert passed < limit, f"not within {limit:g} s: {self.status}"
            await self._tick(step)
        return (self.now - begun).total_seconds()

    async def reconcile(self) -> None:
        """Reconcile as the operator does after a change; a crash starts the next process."""
        for _ in range(4):
            await self.catch_up()
            self.is_operator = True
            try:
                look = await self.reconciler.reconcile(KEY)
            except FineTuneError as error:
                if not error.retryable:
                    raise
                return
            except Crash:
                self.crashes += 1
                self.start_process()
                continue
            finally:
                self.is_operator = False
            if look.requeue_seconds != 0:
                break
        await self.catch_up()

    async def _tick(self, step: int) -> None:
        self.now += timedelta(seconds=step)
        await asyncio.sleep(step)
        await self.act(step)
        await self.reconcile()
        for one in self.status.get("conditions", ()):
            if one["type"] in ("Failed", "Stalled") and one["status"] == "True":
                trouble = (one["reason"], one["message"])
                self.troubles += [trouble] if trouble not in self.troubles else []
