"""The work queue, in virtual time."""

import asyncio
import sys

import pytest

from finetune_operator.kernel.backoff import Backoff
from finetune_operator.kernel.queue import HEAD_START_SECONDS, WorkQueue
from finetune_operator.kube.cache import Key
from support.kernel.virtual_time import run

A, B = Key("ns", "a"), Key("ns", "b")


def queue() -> WorkQueue:
    return WorkQueue(Backoff(1.0, 8.0, chance=lambda: 1.0))


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_key_added_often_is_taken_once_and_in_its_turn() -> None:
    async def work() -> list[Key]:
        made = queue()
        for key in (A, B, A, A):
            made.add(key)
        taken = [await made.get(), await made.get()]
        for key in taken:
            made.done(key)
        assert len(made) == 0
        return taken

    assert run(work()) == [A, B]


def urgent_queue() -> WorkQueue:
    return WorkQueue(Backoff(1.0, 8.0), is_urgent=lambda key: key.name.startswith("new"))


async def in_turn(made: WorkQueue, count: int) -> list[str]:
    """Take so many keys, one after the other."""
    names = []
    for _ in range(count):
        key = await made.get()
        made.done(key)
        names.append(key.name)
    return names


def test_urgent_keys_are_taken_before_others_and_each_kind_in_its_turn() -> None:
    async def work() -> list[str]:
        made = urgent_queue()
        for name in ("a", "new-1", "b", "new-2"):
            made.add(Key("ns", name))
            made.add(Key("ns", name))
        assert len(made) == 4
        taken = await in_turn(made, 4)
        assert len(made) == 0
        return taken

    assert run(work()) == ["new-1", "new-2", "a", "b"]


def test_a_key_that_waits_longer_than_the_head_start_is_not_overtaken_any_more() -> None:
    async def work() -> list[str]:
        made = urgent_queue()
        made.add(Key("ns", "new-1"))
        made.add(A)
        await asyncio.sleep(HEAD_START_SECONDS - 0.1)
        made.add(Key("ns", "new-2"))
        made.add(B)
        await asyncio.sleep(0.2)
        made.add(Key("ns", "new-3"))
        return await in_turn(made, 5)

    assert run(work()) == ["new-1", "new-2", "a", "new-3", "b"]


@pytest.mark.parametrize("names", [("new-{}", "{}"), ("{}", "new-{}")], ids=["new", "others"])
def test_however_many_keys_of_one_kind_come_the_other_kind_is_not_forgotten(
    names: tuple[str, str],
) -> None:
    many, few = names

    async def work() -> float:
        made = urgent_queue()
        made.add(Key("ns", few.format("few")))
        for number in range(200):
            for part in range(2):  # twice as many as are taken
                made.add(Key("ns", many.format(f"{number}-{part}")))
            if await in_turn(made, 1) == [few.format("few")]:
                return now()
            await asyncio.sleep(0.1)
        raise AssertionError("it is not taken")

    # What came within the head start is taken before it, at half the pace at which it came.
    assert run(work()) <= 2 * HEAD_START_SECONDS + 0.2


def test_a_key_that_changes_while_it_is_worked_on_comes_again_and_not_before() -> None:
    async def work() -> None:
        made = queue()
        made.add(A)
        await made.get()
        made.add(A)
        made.add(A)
        made.add(B)
        assert await made.get() == B
        made.done(A)
        assert await made.get() == A
        made.done(A)
        made.done(B)
        assert len(made) == 0

    run(work())


def test_events_right_after_a_look_lead_to_one_look_when_the_key_has_rested() -> None:
    async def work() -> None:
        made = WorkQueue(Backoff(1.0, 8.0), coalesce_seconds=0.25)
        made.add(A)
        made.done(await made.get())
        for _ in range(5):
            made.add(A)
            assert len(made) == 1
            await asyncio.sleep(0.04)
        assert await made.get() == A
        assert now() == pytest.approx(0.25)
        made.done(A)
        await asyncio.sleep(1.0)
        assert len(made) == 0
        made.add(A)
        assert await made.get() == A
        assert now() == pytest.approx(1.25)

    run(work())


def test_a_key_that_must_be_looked_at_again_at_once_does_not_rest() -> None:
    async def work() -> None:
        made = WorkQueue(Backoff(1.0, 8.0), coalesce_seconds=0.25)
        made.add(A)
        made.done(await made.get(), requeue_seconds=0)
        assert await made.get() == A
        assert now() == 0
        made.done(A)
        assert len(made) == 0

    run(work())


def test_a_key_comes_again_after_the_shortest_wait_asked_for() -> None:
    async def work() -> float:
        made = queue()
        made.add(A)
        made.done(await made.get(), requeue_seconds=30)
        made.add_after(A, 5)
        made.add_after(A, 9)
        await made.get()
        return now()

    assert run(work()) == 5


def test_an_event_wakes_a_sleeping_key_and_replaces_its_timer() -> None:
    async def work() -> None:
        made = queue()
        made.add_after(A, 5)
        made.add(A)
        made.done(await made.get())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await made.get()

    run(work())


def test_failures_wait_twice_as_long_each_time_and_success_forgets_them() -> None:
    async def work() -> list[float]:
        made = queue()
        made.add(A)
        waits = []
        for _ in range(6):
            waits.append(made.add_rate_limited(await made.get()))
        made.done(await made.get(), requeue_seconds=0)
        waits.append(made.add_rate_limited(await made.get()))
        return waits

    assert run(work()) == [1, 2, 4, 8, 8, 8, 1]


def test_the_echo_of_a_failure_does_not_shorten_its_wait() -> None:
    async def work() -> float:
        made = queue()
        made.add(A)
        await made.get()
        made.add(A)
        made.add_rate_limited(A, at_least_seconds=3)
        await made.get()
        return now()

    assert run(work()) == 3


def test_an_event_wakes_a_key_that_failed_but_not_before_the_time_the_server_asked_for() -> None:
    async def work(asked: float) -> float:
        made = queue()
        made.add(A)
        await made.get()
        made.add_rate_limited(A, at_least_seconds=asked)
        start = now()
        await asyncio.sleep(0.5)
        made.add(A)
        await made.get()
        return now() - start

    assert run(work(0.0)) == 0.5
    assert run(work(3.0)) == 3


def test_the_oldest_key_tells_its_age_also_while_it_is_worked_on() -> None:
    async def work() -> list[float]:
        made = queue()
        ages = [made.oldest_seconds]
        made.add_after(B, 100)
        made.add(A)
        await asyncio.sleep(2)
        ages.append(made.oldest_seconds)
        await made.get()
        await asyncio.sleep(3)
        ages.append(made.oldest_seconds)
        made.done(A)
        ages.append(made.oldest_seconds)
        made.close()
        return ages

    assert run(work()) == [0, 2, 3, 0]


def test_many_workers_share_the_keys_and_none_is_taken_by_two() -> None:
    async def work() -> list[Key]:
        made, taken = queue(), list[Key]()

        async def worker() -> None:
            while True:
                key = await made.get()
                taken.append(key)
                await asyncio.sleep(1)
                made.done(key)

        workers = [asyncio.create_task(worker()) for _ in range(4)]
        keys = [Key("ns", str(number)) for number in range(20)]
        for key in keys:
            made.add(key)
        await asyncio.sleep(60)
        for one in workers:
            one.cancel()
        assert sorted(taken) == sorted(keys)
        return taken

    assert len(run(work())) == 20


def test_backoff_lies_between_half_and_all_of_its_step_and_never_ends() -> None:
    low, high = Backoff(1, 8, chance=lambda: 0.0), Backoff(1, 8, chance=lambda: 1.0)
    waits = zip(low, high, strict=True)
    first = [next(waits) for _ in range(5)]
    assert first == [(0.5, 1), (1, 2), (2, 4), (4, 8), (4, 8)]
    assert high.seconds(10_000) == 8


def shared_queue(share: int) -> WorkQueue:
    """Return a queue whose keys are grouped by the first letter of their name."""
    return WorkQueue(Backoff(1.0, 8.0), group_of=lambda key: key.name[0], share=share)


def test_a_group_has_its_share_of_the_workers_and_others_overtake_what_waits_for_it() -> None:
    async def work() -> list[str]:
        made, taken = shared_queue(2), []
        for name in ("a1", "a2", "a3", "a4", "b1", "b2", "b3"):
            made.add(Key("ns", name))

        async def worker() -> None:
            taken.append((await made.get()).name)

        workers = [asyncio.create_task(worker()) for _ in range(7)]
        await asyncio.sleep(1)
        assert taken == ["a1", "a2", "b1", "b2"]
        made.done(Key("ns", "b1"))
        made.done(Key("ns", "a2"))
        await asyncio.sleep(1)
        for one in workers:
            one.cancel()
        return taken[4:]

    assert run(work()) == ["a3", "b3"]


def test_a_share_that_comes_free_wakes_a_worker_also_where_the_last_one_has_left() -> None:
    async def work() -> None:
        made = shared_queue(1)
        for name in ("a1", "a2"):
            made.add(Key("ns", name))
        first = await made.get()
        waiting = asyncio.create_task(made.get())
        await asyncio.sleep(1)
        assert not waiting.done()
        made.done(first)
        assert await waiting == Key("ns", "a2")

    run(work())


def test_what_waits_for_its_share_is_not_late() -> None:
    async def work() -> list[float]:
        made, ages = shared_queue(1), list[float]()
        for name in ("a1", "a2"):
            made.add(Key("ns", name))
        for _ in range(2):
            key = await made.get()
            await asyncio.sleep(100)
            ages.append(made.oldest_seconds)
            made.done(key)
            ages.append(made.oldest_seconds)
            if key.name == "a1":
                await asyncio.sleep(5)
                ages.append(made.oldest_seconds)
        assert len(made) == 0
        return ages

    # The one that is worked on; nothing of what waits for it; since its turn could have come.
    assert run(work()) == [100, 0, 5, 100, 0]


def test_a_long_queue_that_waits_for_its_share_costs_the_others_nothing() -> None:
    async def work(num_waiting: int) -> int:
        made, num_calls = shared_queue(1), 0

        def count(*_: object) -> None:
            nonlocal num_calls
            num_calls += 1

        for number in range(num_waiting):
            made.add(Key("ns", f"a{number}"))
        await made.get()
        sys.setprofile(count)
        for number in range(100):
            made.add(Key("ns", f"b{number}"))
            made.done(await made.get())
        sys.setprofile(None)
        return num_calls

    assert run(work(10_000)) == run(work(10))


def test_a_key_whose_group_changed_while_it_was_processed_is_in_one_hand() -> None:
    """The event of a child comes before its job is listed, so its backend is unknown."""

    async def work() -> None:
        groups = {A: "unknown", B: "kubernetes"}
        made = WorkQueue(Backoff(1.0, 8.0), group_of=groups.__getitem__, share=1)
        made.add(A)
        assert await made.get() == A
        made.add(B)
        assert await made.get() == B  # its group has its share now
        groups[A] = "kubernetes"
        made.add(A)
        made.done(A)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await made.get()
        made.done(B)
        assert await made.get() == A
        made.done(A)

    run(work())


def in_namespaces(*counts: tuple[str, str, int]) -> list[Key]:
    """Return so many keys of each namespace, whose names start alike."""
    return [Key(place, f"{name}-{n}") for place, name, count in counts for n in range(count)]


def test_the_backlog_of_one_namespace_delays_no_key_of_another() -> None:
    async def work() -> list[Key]:
        queued = urgent_queue()
        for key in in_namespaces(("a", "old", 10_000), ("a", "new", 5000)):
            queued.add(key)
        await asyncio.sleep(60)  # beyond the head start of urgent keys
        taken = [await queued.get()]
        for key in in_namespaces(("b", "x", 2), ("c", "new", 1)):
            queued.add(key)
        for _ in range(7):
            taken.append(await queued.get())
            queued.done(taken[-1])
        return taken

    places = [key.namespace for key in run(work())]
    assert places == ["a", "a", "b", "c", "a", "b", "a", "a"]


def test_a_namespace_that_comes_back_at_once_takes_no_turn_of_others() -> None:
    async def work() -> list[str]:
        queued, taken = queue(), list[str]()
        for key in in_namespaces(("a", "x", 1), ("b", "x", 20), ("c", "x", 20)):
            queued.add(key)
        for _ in range(30):
            key = await queued.get()
            queued.done(key)
            taken.append(key.namespace)
            queued.add(Key("a", "x-0"))
        return taken

    assert run(work()) == ["a", "b", "c"] * 10


def test_keys_of_a_group_are_not_counted_by_namespace_in_its_share() -> None:
    async def work() -> list[str]:
        queued = WorkQueue(Backoff(1.0, 8.0), group_of=lambda key: key.name[0], share=3)
        for key in in_namespaces(("a", "x", 5), ("b", "x", 5), ("c", "y", 5)):
            queued.add(key)
        return [(await queued.get()).namespace for _ in range(6)]

    assert run(work()) == ["a", "b", "a", "c", "c", "c"]
