"""Requests to a service keep their pace; writes go first, and reads are not forgotten."""

import asyncio
from itertools import pairwise

import pytest

from finetune_operator.backends.budget import (
    LONGEST_PAUSE_SECONDS,
    PATIENCE_SECONDS,
    Budget,
    Priority,
)
from finetune_operator.errors import TransientError
from support.kernel import virtual_time


class Asked:
    """A budget of two a second, and when each request went, by name."""

    def __init__(self) -> None:
        self.budget = Budget(2.0, 2)
        self.went: dict[str, float] = {}

    async def ask(self, name: str, priority: Priority = Priority.READ) -> float:
        """Ask once, and return how long that had to wait."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self.budget.turn(priority)
        self.went[name] = loop.time()
        return loop.time() - began


def test_the_pace_is_never_exceeded_and_reads_go_in_their_order() -> None:
    async def work() -> None:
        asked = Asked()
        await asyncio.gather(*(asked.ask(f"{number}") for number in range(20)))
        assert list(asked.went) == [f"{number}" for number in range(20)]
        assert all(b - a >= 0.5 for a, b in pairwise(asked.went.values()))
        await asyncio.sleep(60)  # what was not asked for then is not saved up
        began = asyncio.get_running_loop().time()
        await asyncio.gather(asked.ask("a"), asked.ask("b"))
        assert asked.went["b"] - began == pytest.approx(0.5)

    virtual_time.run(work())


def test_a_write_among_500_reads_waits_no_longer_than_one_turn() -> None:
    async def work() -> None:
        asked = Asked()
        async with asyncio.TaskGroup() as group:
            for number in range(500):
                group.create_task(asked.ask(f"{number}"))
            for second in range(100):
                await asyncio.sleep(1.0)
                assert await asked.ask(f"write {second}", Priority.WRITE) <= 0.5
        assert len(asked.went) == 600

    virtual_time.run(work())


def test_checks_of_new_jobs_delay_neither_writes_nor_half_of_the_reads() -> None:
    async def work() -> None:
        asked = Asked()

        async def check(number: int) -> None:
            async with asked.budget.held(Priority.CHECK):
                await asked.ask(f"check {number}", Priority.CHECK)

        async with asyncio.TaskGroup() as group:
            for number in range(100):
                group.create_task(check(number))
            for number in range(20):
                assert await asked.ask(f"write {number}", Priority.WRITE) <= 0.5
                assert await asked.ask(f"read {number}") <= 1.0

    virtual_time.run(work())


def test_reads_have_turns_while_writes_never_end() -> None:
    async def work() -> None:
        asked = Asked()
        async with asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(asked.ask(f"read {number}"))
            for number in range(30):
                group.create_task(asked.ask(f"write {number}", Priority.WRITE))
        assert asked.went["read 4"] < asked.went["write 20"]

    virtual_time.run(work())


def test_nothing_goes_while_the_service_asks_for_a_pause() -> None:
    async def work() -> None:
        asked = Asked()
        asked.budget.hold(7.0)
        asked.budget.hold(3.0)
        assert await asked.ask("one", Priority.WRITE) == pytest.approx(7.0)

    virtual_time.run(work())


@pytest.mark.parametrize("priority", Priority)
def test_what_a_pause_would_hold_for_long_is_to_be_tried_again(priority: Priority) -> None:
    async def work() -> None:
        asked = Asked()
        asked.budget.hold(PATIENCE_SECONDS + 40)
        with pytest.raises(TransientError) as error:
            await asked.ask("one", priority)
        assert error.value.retry_after == pytest.approx(PATIENCE_SECONDS + 40)
        await asyncio.sleep(40)
        assert await asked.ask("one", priority) == pytest.approx(PATIENCE_SECONDS)

    virtual_time.run(work())


def test_who_waits_when_a_long_pause_begins_is_told_at_once() -> None:
    async def work() -> None:
        asked = Asked()
        waiting = [asyncio.create_task(asked.ask(f"{number}")) for number in range(9)]
        await asyncio.sleep(1.2)
        asked.budget.hold(60.0)
        await asyncio.sleep(0)
        told = [task.exception() for task in waiting[3:] if task.done()]
        assert len(told) == 6
        assert all(isinstance(one, TransientError) and one.retry_after for one in told)
        await asyncio.sleep(60.0)
        assert await asked.ask("later") == 0.0

    virtual_time.run(work())


def test_a_write_behind_many_is_to_be_tried_again() -> None:
    async def work() -> None:
        asked = Asked()
        writes = [asked.ask(f"{number}", Priority.WRITE) for number in range(50)]
        answers = await asyncio.gather(*writes, return_exceptions=True)
        late = [one for one in answers if isinstance(one, TransientError)]
        assert len(answers) - len(late) == PATIENCE_SECONDS * 2 + 1

    virtual_time.run(work())


def test_no_pause_is_longer_than_two_minutes() -> None:
    async def work() -> None:
        asked = Asked()
        assert asked.budget.hold(3600.0) == LONGEST_PAUSE_SECONDS
        with pytest.raises(TransientError) as error:
            await asked.ask("one")
        assert error.value.retry_after == pytest.approx(LONGEST_PAUSE_SECONDS)
        await asyncio.sleep(LONGEST_PAUSE_SECONDS)
        assert await asked.ask("one") == 0.0

    virtual_time.run(work())


def test_who_does_not_wait_any_more_takes_no_turn() -> None:
    async def work() -> None:
        asked = Asked()
        await asked.ask("first")
        tasks = [asyncio.create_task(asked.ask(f"{number}")) for number in range(50)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert await asked.ask("last") <= 0.5

    virtual_time.run(work())
